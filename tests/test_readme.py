"""The README runs: every block of code says how it is checked, and nothing in it is typed where it can be generated."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from rapidkda import dispatch
from rapidkda.bench.report import readme_section, readme_text

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```([^\n]*)\n(.*?)^```", README, re.M | re.S)  # (info string, content)
PYTHON = [body for info, body in BLOCKS if info == "python run"]
COMMANDS = [line for info, body in BLOCKS if info == "sh run" for line in body.splitlines()]
TARGETS = [line for info, body in BLOCKS if info == "sh make" for line in body.splitlines()]


def test_every_block_says_how_it_is_checked() -> None:
    assert {info for info, _ in BLOCKS} == {"python run", "sh run", "sh make"}
    assert len(PYTHON) >= 2
    assert COMMANDS
    assert TARGETS == ["make demo", "make test"]


@pytest.mark.parametrize("code", PYTHON, ids=range(len(PYTHON)))
def test_python(code: str) -> None:
    if "transformers" in code:
        pytest.importorskip("transformers")
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


@pytest.mark.parametrize("command", COMMANDS)
def test_command(command: str) -> None:
    program, *arguments = shlex.split(command)
    assert program == "rapidkda"
    subprocess.run([sys.executable, "-m", "rapidkda.cli", *arguments], check=True, timeout=600)


@pytest.mark.parametrize("command", TARGETS)
def test_make_target(command: str) -> None:
    """The long ones run in .ci/run; here: the target exists and starts what the README says."""
    _, target = command.split()
    environment = {key: value for key, value in os.environ.items() if key != "MAKEFLAGS"}
    plan = subprocess.run(
        ["make", "--dry-run", target], cwd=ROOT, env=environment, check=True, capture_output=True, text=True
    ).stdout
    assert "scripts/bootstrap.py" in plan
    assert {"demo": "rapidkda demo", "test": "-m pytest"}[target] in plan
    assert f"make {target}" in (ROOT / ".ci" / "run").read_text()


def test_performance_section_is_generated() -> None:
    assert readme_text(README, readme_section(ROOT / "benchmarks" / "results", ROOT)) == README, (
        "out of date: run rapidkda bench readme"
    )


def test_backend_table_lists_the_registry_in_order() -> None:
    table = README.split("## Backends")[1].split("## ")[0]
    assert re.findall(r"^\| `(\w+)` \|", table, re.M) == list(dispatch.REGISTRY)


PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")] + sorted(
    (ROOT / "docs").rglob("*.md")
)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links(page: Path) -> None:
    for link in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
        if not link.startswith("http"):
            assert (page.parent / link).exists(), f"{page.name} links to {link}, which is not there"
