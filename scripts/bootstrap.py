"""Make a virtual environment and install rapidkda into it. Safe to run again: nothing happens when nothing changed.

Standard library only, because it runs before anything is installed. The one hard choice is torch: its default build
for Linux brings gigabytes of CUDA libraries, which a machine without a GPU cannot use. There, three places are tried
in order: a CPU build on the package indexes that pip is configured with, a CPU build on PyTorch's own index (short
timeout, skipped when it cannot be reached), the default build. Where there is a GPU the default build is taken.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import time
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PYTHON_NEEDED = (3, 10)
TORCH = "2.13.0"
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
STAMP = "rapidkda-installed.json"  # in the environment: what was installed, from which project file


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv", help="environment to make or update")
    parser.add_argument("--extras", default="", help="comma-separated extras of the package, such as dev,transformers")
    parser.add_argument("--torch", default="", help="requirement to install instead, such as torch==2.14.1")
    parser.add_argument("--wheel", type=Path, help="install this wheel instead of the source tree in place")
    args = parser.parse_args()
    if sys.version_info < PYTHON_NEEDED:
        say(f"error: {sys.executable} is Python {platform.python_version()}, rapidkda needs 3.10 or newer;")
        say("       name another one, for example: make demo PYTHON=python3.12")
        return 2
    extras = {extra.strip() for extra in args.extras.split(",") if extra.strip()}
    stamp = args.venv / STAMP
    key = fingerprint(args.torch, args.wheel)
    installed = read_stamp(stamp, key)
    if installed is not None and extras <= installed:
        say(f"{show(args.venv)} is up to date")
        return 0
    extras |= installed or set()
    start = time.monotonic()
    try:
        python = make_environment(args.venv)
        install_torch(python, args.torch)
        target = str(args.wheel.resolve()) if args.wheel else str(ROOT)
        say(f"3/3 rapidkda {'with ' + ', '.join(sorted(extras)) if extras else ''}".rstrip())
        pip(
            python,
            *([] if args.wheel else ["--editable"]),
            target + (f"[{','.join(sorted(extras))}]" if extras else ""),
        )
    except subprocess.CalledProcessError as error:
        say(f"error: step failed with exit code {error.returncode}: {' '.join(map(str, error.cmd))}")
        return 1
    except EnvironmentFailure as error:
        say(f"error: {error}")
        return 2
    stamp.write_text(json.dumps({"key": key, "extras": sorted(extras)}) + "\n")
    say(f"{show(args.venv)} is ready after {time.monotonic() - start:.0f} s")
    return 0


class EnvironmentFailure(Exception):
    """The environment cannot be made here; the message says what to do."""


def say(text: str) -> None:
    print(f"[bootstrap] {text}", flush=True)


def show(path: Path) -> str:
    return os.path.relpath(path)


def fingerprint(torch: str, wheel: Path | None) -> str:
    """Changes when an installation made earlier is out of date."""
    parts = [platform.python_version(), torch, (ROOT / "pyproject.toml").read_text(), Path(__file__).read_text()]
    if wheel is not None:
        parts.append(hashlib.sha256(wheel.read_bytes()).hexdigest())
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def read_stamp(stamp: Path, key: str) -> set[str] | None:
    """The extras installed under this key, or None."""
    try:
        content = json.loads(stamp.read_text())
        return set(content["extras"]) if content["key"] == key else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def make_environment(path: Path) -> Path:
    """The environment's interpreter, of the version that runs this script; made, or made anew, where it must be."""
    python = path / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    if same_python(python):
        say(f"1/3 environment {show(path)} (there already)")
        return python
    if path.exists() and any(path.iterdir()) and not (path / "pyvenv.cfg").exists():
        raise EnvironmentFailure(f"{show(path)} exists and is no virtual environment; name another place with VENV=...")
    say(f"1/3 environment {show(path)} with Python {platform.python_version()}")
    try:
        venv.EnvBuilder(with_pip=True, clear=path.exists()).create(path)
    except (subprocess.CalledProcessError, ModuleNotFoundError) as error:
        shutil.rmtree(path, ignore_errors=True)
        raise EnvironmentFailure(
            f"Python cannot make an environment with pip ({error}); on Debian and Ubuntu: apt install python3-venv"
        ) from error
    return python


def same_python(python: Path) -> bool:
    code = "import pip, platform; print(platform.python_version())"
    try:
        found = subprocess.run([python, "-c", code], check=True, capture_output=True, text=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return False
    return found == platform.python_version()


def pip(python: Path, *arguments: str, timeout: float | None = None) -> None:
    command = [str(python), "-m", "pip", "install", "--disable-pip-version-check", *arguments]
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL, timeout=timeout)


def install_torch(python: Path, wanted: str) -> None:
    """Install torch, a CPU build where the machine has no GPU and some index offers one."""
    there = torch_version(python)
    if there and not wanted:
        say(f"2/3 torch {there} (there already)")
        return
    if wanted:
        say(f"2/3 torch: {wanted}, as asked for")
        pip(python, wanted)
        return
    gpu = gpu_here()
    if gpu:
        say(f"2/3 torch: the default build ({gpu})")
    elif sys.platform != "linux":
        say("2/3 torch: the default build, a CPU build on this system")
    else:
        say("2/3 torch: no GPU found, so a CPU build where an index offers one")
        attempts = {
            "the configured indexes": [],
            "PyTorch's CPU index": ["--index-url", CPU_INDEX, "--timeout", "8", "--retries", "1"],
        }
        for place, options in attempts.items():
            say(f"    trying {place}")
            try:
                pip(python, *options, f"torch=={TORCH}+cpu")
                return
            except subprocess.CalledProcessError:
                say(f"    {place}: no CPU build of torch {TORCH} for this Python to be had")
        say("    taking the default build, about 3 GB of downloads with its CUDA libraries")
    pip(python, f"torch=={TORCH}")


def torch_version(python: Path) -> str:
    code = "import importlib.metadata as m; print(m.version('torch'))"
    result = subprocess.run([python, "-c", code], capture_output=True, text=True)
    return result.stdout.strip() if result.returncode == 0 else ""


def gpu_here() -> str:
    """What shows a GPU that torch can use, or an empty string."""
    smi = shutil.which("nvidia-smi")
    if smi and subprocess.run([smi, "-L"], capture_output=True).stdout.startswith(b"GPU"):
        return "nvidia-smi lists a GPU"
    if Path("/dev/kfd").exists():
        return "AMD GPU driver found; for a ROCm build see https://pytorch.org and pass TORCH=..."
    return ""


if __name__ == "__main__":
    sys.exit(main())
