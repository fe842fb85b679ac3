"""The result file: one JSON object with `meta` and `rows`. docs/benchmarks.md describes every field."""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
import platform
import subprocess
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from .. import __version__, env

Bench = Literal["prefill", "decode", "verify", "layer", "cpu_prefill", "cpu_decode"]
BENCHES: tuple[Bench, ...] = get_args(Bench)


@dataclass(frozen=True)
class Row:
    """One implementation on one workload. Times in microseconds; errors relative Frobenius against float64."""

    bench: Bench
    shape: str
    regime: str
    impl: str
    us: float  # median device time; wall time on a CPU
    us_min: float
    us_max: float
    host_us: float | None  # eager host time of one call
    launches: int | None  # kernels of one call
    floor_us: float | None  # bytes that must move / copy bandwidth of the same run
    err_out: float | None
    err_state: float | None
    note: str = ""

    @property
    def workload(self) -> tuple[str, str, str]:
        """What rows must share to be compared."""
        return self.bench, self.shape, self.regime


@dataclass(frozen=True)
class Meta:
    """Where and when: a number without these is not a result."""

    gpu: str  # the processor's name where no GPU was measured
    sms: int | None
    copy_tb_s: float | None  # measured in the same run
    driver: str | None
    torch: str
    triton: str | None
    version: str
    rev: str | None  # git revision, with "-dirty" where the tree had changes
    date: str  # ISO 8601, UTC
    note: str = ""  # what a reader of the file must know


@dataclass(frozen=True)
class Result:
    meta: Meta
    rows: tuple[Row, ...]

    def save(self, path: Path) -> None:
        text = json.dumps(dataclasses.asdict(self), indent=1)
        temporary = path.with_suffix(path.suffix + ".part")
        temporary.write_text(text + "\n")
        temporary.replace(path)

    @staticmethod
    def load(path: Path) -> Result:
        """Read a result file; ValueError says which field is wrong."""
        try:
            content = json.loads(path.read_text())
        except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
            raise ValueError(f"{path} is not a JSON file: {error}") from None
        if not isinstance(content, dict) or not isinstance(content.get("rows"), list):
            raise ValueError(f'{path} must hold an object with "meta" and "rows"')
        meta = _build(Meta, content.get("meta"), f"{path}: meta")
        rows = tuple(_build(Row, row, f"{path}: row {i}") for i, row in enumerate(content["rows"]))
        for i, row in enumerate(rows):
            if row.bench not in BENCHES:
                raise ValueError(f"{path}: row {i}: bench must be one of {', '.join(BENCHES)}, got {row.bench!r}")
        return Result(meta, rows)


def _build(kind: type[Any], fields: Any, where: str) -> Any:
    if not isinstance(fields, dict):
        raise ValueError(f"{where} must be an object, got {type(fields).__name__}")
    known = {field.name: field for field in dataclasses.fields(kind)}
    unknown = sorted(set(fields) - set(known))
    missing = sorted(n for n, f in known.items() if n not in fields and f.default is dataclasses.MISSING)
    if unknown or missing:
        raise ValueError(f"{where} has unknown fields {unknown} and lacks {missing}")
    for name in ("us", "us_min", "us_max"):
        if name in known and not isinstance(fields[name], (int, float)):
            raise ValueError(f"{where}: {name} must be a number, got {fields[name]!r}")
    return kind(**fields)


def collect_meta(device: torch.device, copy_tb_s: float | None = None) -> Meta:
    """Describe this machine."""
    gpu, sms = _processor(), None
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        gpu, sms = properties.name, properties.multi_processor_count
    now = datetime.datetime.now(datetime.timezone.utc)
    return Meta(
        gpu=gpu,
        sms=sms,
        copy_tb_s=copy_tb_s,
        driver=_run("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader") if sms else None,
        torch=torch.__version__,
        triton=_version("triton"),
        version=__version__,
        rev=_revision(),
        date=now.strftime("%Y-%m-%dT%H:%M:%SZ"),
    )


def _processor() -> str:
    name = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), name)
    except OSError:
        pass  # no such file outside Linux; the platform's name stands
    return f"CPU, {name}, {torch.get_num_threads()} of {os.cpu_count()} threads"


def _revision() -> str | None:
    """Revision of the source tree that this package runs from; None for an installed package."""
    root = Path(__file__).resolve().parents[3]
    if not (root / ".git").exists():
        return env.revision()
    revision = _run("git", "-C", str(root), "rev-parse", "--short=12", "HEAD")
    return revision and revision + ("-dirty" if _run("git", "-C", str(root), "status", "--porcelain", "src") else "")


def _run(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip().split("\n")[0] or None


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None
