"""`rapidkda doctor`: what this machine has, which backend would serve what, and why each other one would not."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from typing import Annotated, Any

import torch
import typer
from rich import box
from rich.table import Table

from .. import __version__
from ..backends.base import Request
from ..device import CPU, Device
from ..dispatch import REGISTRY, decision_table
from ..problem import OPS, ROLLBACKS, GateKind
from .console import complaint, console, version_of

PACKAGES = ("torch", "triton", "cuda-core", "cuda-bindings", "nvidia-cuda-nvrtc", "transformers", "vllm", "matplotlib")
GATES: tuple[GateKind, ...] = ("bounded", "softplus")


def doctor(as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")] = False) -> None:
    """Show the devices, the versions, and for every operator which backends can run and why the others cannot.

    **Example:** `rapidkda doctor --json`
    """
    report = _report()
    if as_json:
        typer.echo(json.dumps(report, indent=2))
        return
    _print(report)


def _report() -> dict[str, Any]:
    devices = _devices()
    return {
        "rapidkda": __version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "packages": {name: version_of(name) for name in PACKAGES},
        "devices": {label: str(device) for label, device in devices.items()},
        "environment": _environment(),
        "backends": {label: _decisions(device) for label, device in devices.items()},
        "advice": _advice(devices),
    }


def _devices() -> dict[str, Device]:
    found = {f"cuda:{i}": Device.of(torch.device("cuda", i)) for i in range(torch.cuda.device_count())}
    return {**found, "cpu": CPU}


def _environment() -> dict[str, str]:
    """Variables with our prefix as they are set, with a complaint beside a value that would be refused."""
    seen = {}
    for name in sorted(os.environ):
        if name.startswith("RAPIDKDA_"):
            seen[name] = os.environ[name] + (f"  ({problem})" if (problem := complaint(name)) else "")
    return seen


def _decisions(device: Device) -> dict[str, Any]:
    """Operator -> backend -> unmet requirements, for the dtype that this device serves in; prefill with both gates,
    verify with both forms of rollback."""
    table: dict[str, Any] = {}
    for label, request in _requests(device):
        backends = decision_table(request, (request.op,))[request.op]
        chosen = next((name for name, unmet in backends.items() if not unmet), None)
        table[label] = {"auto": chosen, "unmet": {name: list(unmet) for name, unmet in backends.items()}}
    return table


def _requests(device: Device) -> Iterator[tuple[str, Request]]:
    """What is asked of the backends, and how the table calls it."""
    dtype = torch.float32 if device.vendor == "cpu" else torch.bfloat16
    for op in OPS:
        request = Request(op, device, dtype)
        if op == "prefill":
            yield from ((f"{op}, {gate} gate", replace(request, gate=gate)) for gate in GATES)
        elif op == "verify":
            yield from ((f"{op}, {rollback}", replace(request, rollback=rollback)) for rollback in ROLLBACKS)
        else:
            yield op, request


def _advice(devices: dict[str, Device]) -> list[str]:
    """What to install next, most useful first."""
    advice = []
    nvidia = [device for device in devices.values() if device.vendor == "nvidia"]
    if not nvidia and _driver_lists_gpu():
        advice.append("the driver lists a GPU that torch cannot use; install a CUDA build of torch: pip install torch")
    if nvidia and version_of("triton") is None:
        advice.append("for the portable GPU backend: pip install 'rapidkda[triton]'")
    if any(device.capability == (9, 0) for device in nvidia) and version_of("cuda-core") is None:
        advice.append("for the Hopper backend: pip install 'rapidkda[cuda]'")
    if version_of("transformers") is None:
        advice.append("for the demo and for Hugging Face models: pip install 'rapidkda[transformers]'")
    if version_of("matplotlib") is None:
        advice.append("for the plots of bench report: pip install 'rapidkda[bench]'")
    return advice


def _driver_lists_gpu() -> bool:
    smi = shutil.which("nvidia-smi")
    if smi is None:
        return False
    return subprocess.run([smi, "-L"], capture_output=True, text=True, check=False).stdout.startswith("GPU")


def _print(report: dict[str, Any]) -> None:
    out = console()
    out.print(f"rapidkda {report['rapidkda']}, Python {report['python']}, {report['system']}")
    versions = [f"{name} {version or 'not installed'}" for name, version in report["packages"].items()]
    out.print("packages: " + ", ".join(versions))
    out.print("devices: " + "; ".join(f"{label} = {name}" for label, name in report["devices"].items()))
    for name, value in report["environment"].items():
        out.print(f"environment: {name}={value}", markup=False)
    for label, decisions in report["backends"].items():
        title = f"backends on {label} ({report['devices'][label]}), head dim 128"
        table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
        for column in ("operator", "auto takes", *REGISTRY):
            table.add_column(column)
        for op, decision in decisions.items():
            can = ["no" if unmet else "yes" for unmet in decision["unmet"].values()]
            table.add_row(op, decision["auto"] or "nothing", *can)
        out.print(table)
        for line in _reasons(decisions):
            out.print(line, markup=False, soft_wrap=True)
    for line in report["advice"]:
        out.print(f"to install: {line}", markup=False)


def _reasons(decisions: dict[str, Any]) -> Iterator[str]:
    """Every unmet requirement of every backend once, with the operators that it stands in the way of."""
    for name in REGISTRY:
        blocked: dict[str, list[str]] = {}
        for op, decision in decisions.items():
            for reason in decision["unmet"][name]:
                blocked.setdefault(reason, []).append(op)
        for reason, ops in blocked.items():
            where = "" if len(ops) == len(decisions) else f" ({'; '.join(ops)})"
            yield f"  {name}: {reason}{where}"
