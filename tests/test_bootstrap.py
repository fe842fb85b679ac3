"""scripts/bootstrap.py without installing anything: which torch it asks for, where, and when it does nothing."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[1] / "scripts" / "bootstrap.py"
CPU_BUILD, DEFAULT_BUILD = "torch==2.13.0+cpu", "torch==2.13.0"


@pytest.fixture
def bootstrap(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script as a module, on Linux, without a GPU and without torch."""
    spec = importlib.util.spec_from_file_location("bootstrap", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "gpu_here", lambda: "")
    monkeypatch.setattr(module, "torch_version", lambda python: "")
    monkeypatch.setattr(sys, "platform", "linux")
    return module


class Pip:
    """Records what is asked for; only these requirements exist, on these indexes."""

    def __init__(self, available: set[tuple[str, str]]):
        self.available = available
        self.asked: list[tuple[str, str]] = []

    def __call__(self, python: Path, *arguments: str) -> None:
        index = arguments[arguments.index("--index-url") + 1] if "--index-url" in arguments else "configured"
        self.asked.append((index, arguments[-1]))
        if self.asked[-1] not in self.available:
            raise subprocess.CalledProcessError(1, ["pip"])


OWN_INDEX = "https://download.pytorch.org/whl/cpu"
EVERYTHING = {("configured", CPU_BUILD), (OWN_INDEX, CPU_BUILD), ("configured", DEFAULT_BUILD)}


@pytest.mark.parametrize(
    ("available", "asked"),
    [
        (EVERYTHING, [("configured", CPU_BUILD)]),
        (EVERYTHING - {("configured", CPU_BUILD)}, [("configured", CPU_BUILD), (OWN_INDEX, CPU_BUILD)]),
        (
            {("configured", DEFAULT_BUILD)},
            [("configured", CPU_BUILD), (OWN_INDEX, CPU_BUILD), ("configured", DEFAULT_BUILD)],
        ),
    ],
)
def test_order_without_a_gpu(
    bootstrap: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    available: set[tuple[str, str]],
    asked: list[tuple[str, str]],
) -> None:
    pip = Pip(available)
    monkeypatch.setattr(bootstrap, "pip", pip)
    bootstrap.install_torch(Path("python"), "")
    assert pip.asked == asked


def test_default_build_where_there_is_a_gpu(bootstrap: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    pip = Pip(EVERYTHING)
    monkeypatch.setattr(bootstrap, "pip", pip)
    monkeypatch.setattr(bootstrap, "gpu_here", lambda: "a GPU")
    bootstrap.install_torch(Path("python"), "")
    assert pip.asked == [("configured", DEFAULT_BUILD)]


def test_wish_and_what_is_there_come_first(bootstrap: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    pip = Pip({("configured", "torch==2.14.1")})
    monkeypatch.setattr(bootstrap, "pip", pip)
    bootstrap.install_torch(Path("python"), "torch==2.14.1")
    assert pip.asked == [("configured", "torch==2.14.1")]
    monkeypatch.setattr(bootstrap, "torch_version", lambda python: "2.12.0")
    bootstrap.install_torch(Path("python"), "")
    assert len(pip.asked) == 1


def test_a_folder_that_is_no_environment_is_left_alone(bootstrap: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("dear")
    with pytest.raises(bootstrap.EnvironmentFailure, match="is no virtual environment"):
        bootstrap.make_environment(tmp_path)
    assert (tmp_path / "thesis.txt").read_text() == "dear"


def test_runs_once(
    bootstrap: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pip = Pip(EVERYTHING)
    calls: list[tuple[str, ...]] = []

    def install(python: Path, *arguments: str) -> None:
        calls.append(arguments)
        if "torch" in arguments[-1]:
            pip(python, *arguments)

    monkeypatch.setattr(bootstrap, "pip", install)
    monkeypatch.setattr(bootstrap, "make_environment", lambda path: path.mkdir(exist_ok=True) or path / "python")

    def run(*arguments: str) -> int:
        monkeypatch.setattr(sys, "argv", ["bootstrap.py", "--venv", str(tmp_path / "venv"), *arguments])
        return bootstrap.main()

    assert run("--extras", "transformers") == 0
    first = len(calls)
    assert first == 2
    assert run("--extras", "transformers") == 0
    assert run() == 0
    assert len(calls) == first, "a second run installs nothing"
    assert run("--extras", "dev") == 0
    assert calls[-1][-1].endswith("[dev,transformers]"), "what was there stays"
    assert "is up to date" in capsys.readouterr().out
    monkeypatch.setattr(bootstrap, "fingerprint", lambda *wishes: "another project file")
    before = len(calls)
    assert run("--extras", "dev") == 0
    assert len(calls) > before, "a changed project file is installed anew"


def test_failure_leaves_no_stamp(bootstrap: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(bootstrap, "pip", Pip(set()))
    monkeypatch.setattr(bootstrap, "make_environment", lambda path: path.mkdir(exist_ok=True) or path / "python")
    monkeypatch.setattr(sys, "argv", ["bootstrap.py", "--venv", str(tmp_path / "venv")])
    assert bootstrap.main() == 1
    assert list((tmp_path / "venv").iterdir()) == []


def test_old_python_is_refused_in_words(
    bootstrap: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bootstrap, "PYTHON_NEEDED", (99, 0))
    monkeypatch.setattr(sys, "argv", ["bootstrap.py"])
    assert bootstrap.main() == 2
    assert "make demo PYTHON=" in capsys.readouterr().out
