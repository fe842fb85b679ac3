"""User mistakes: exit code 2, one line on stderr that says what, no traceback; and help for every command."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import rapidkda
from rapidkda.cli import app

from .conftest import Cli

COMMANDS = (
    ("doctor",),
    ("demo",),
    ("generate",),
    ("plan",),
    ("verify",),
    ("eval",),
    ("capture",),
    ("compile",),
    ("bench", "cpu"),
    ("bench", "prefill"),
    ("bench", "decode"),
    ("bench", "verify"),
    ("bench", "layer"),
    ("bench", "report"),
    ("bench", "compare"),
    ("bench", "readme"),
)

MISTAKES = {
    "unknown command": (("dokter",), "dokter"),
    "unknown option": (("doctor", "--jsno"), "--jsno"),
    "bench without a command": (("bench",), "command"),
    "unknown backend": (("verify", "--backend", "cutlass"), "auto, cuda, triton, flashkda, torch"),
    "unknown backend of the demo": (("demo", "--backend", "cutlass"), "cutlass"),
    "unknown regime": (("verify", "--regime", "medium"), "fast, slow"),
    "unknown shape": (("verify", "--shape", "1x1"), "one_token"),
    "unknown device": (("verify", "--device", "tpu"), "--device"),
    "device out of range": (("verify", "--device", "cuda:99"), "--device"),
    "text that is not there": (("demo", "--text", "no/such/file"), "no/such/file"),
    "text that is a folder": (("demo", "--text", "."), "--text"),
    "no tokens": (("demo", "--tokens", "0"), "--tokens"),
    "more tokens than the demo's model sees": (("demo", "--tokens", "20000"), "16,384"),
    "tokens that are no number": (("demo", "--tokens", "many"), "--tokens"),
    "regime that is not timed": (("bench", "cpu", "--regime", "staggered"), "--regime"),
    "result file that is a folder": (("bench", "cpu", "--out", "."), "--out"),
    "report of nothing": (("bench", "report", "no/such.json"), "no/such.json"),
    "report without a file": (("bench", "report"), "Missing argument"),
    "readme of nothing": (("bench", "readme", "--root", "no/such"), "README.md"),
    "unknown workload": (("bench", "prefill", "--shape", "1x1", "--backend", "torch"), "1x1"),
    "unknown peer": (("bench", "prefill", "--peers", "cutlass", "--backend", "torch"), "cutlass"),
    "library that is not there": (("bench", "prefill", "--flashkda", "no.so", "--backend", "torch"), "no.so"),
    "unknown form of verification": (("bench", "verify", "--form", "undo", "--backend", "torch"), "deferred, slots"),
    "two forms of verification": (("bench", "verify", "--slots", "--form", "replay", "--backend", "torch"), "--slots"),
    "fewer records than tokens": (("bench", "verify", "--records", "7", "--backend", "torch"), "at least 8"),
    "a peer named as a backend": (("bench", "prefill", "--backend", "flashkda"), "--backend"),
    "operands that are not there": (("bench", "decode", "--backend", "torch", "--inputs", "no.file"), "no.file"),
    "operands that are none": (("verify", "--inputs", __file__), "rapidkda capture"),
    "operands and a regime": (("verify", "--inputs", __file__, "--regime", "slow"), "--regime"),
    "model that is not there": (("eval", "--model", "no/such"), "no/such"),
    "a recorded run that is none": (("eval", "--recorded", __file__), __file__),
    "nothing to capture from": (("capture", "--model", ".", "--text", "no.txt", "--out", "x"), "no.txt"),
    "unknown architecture": (("compile", "--arch", "sm_10"), "sm_90a"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistake(cli: Cli, mistake: str) -> None:
    arguments, named = MISTAKES[mistake]
    done = cli(*arguments)
    assert done.code == 2
    assert done.err.startswith("rapidkda: error: ")
    assert named in done.err
    assert done.err.count("\n") == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_backend_that_cannot_run_says_why(cli: Cli) -> None:
    for command in (("verify",), ("demo",)):
        done = cli(*command, "--backend", "cuda")
        assert done.code == 2
        assert "cuda: needs an NVIDIA GPU" in done.err
        assert done.err.count("\n") == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_gpu_bench_without_gpu_names_the_cpu_bench(cli: Cli) -> None:
    done = cli("bench", "prefill")
    assert done.code == 2
    assert "rapidkda bench cpu" in done.err


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("RAPIDKDA_CHECK", "maybe"),
        ("RAPIDKDA_VLLM", "decode"),
        ("RAPIDKDA_PREFILL_BACKEND", "fla"),
        ("RAPIDKDA_DECODE_BACKEND", "fla"),
    ],
)
@pytest.mark.parametrize("command", ["demo", "plan", "verify"])
def test_environment_variables_are_refused_by_name(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, variable: str, value: str, command: str
) -> None:
    monkeypatch.setenv(variable, value)
    done = cli(command)
    assert done.code == 2
    assert done.err.startswith(f"rapidkda: error: environment variable {variable} must be ")
    assert done.err.count("\n") == 1


def test_empty_text(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "empty.txt").touch()
    done = cli("demo", "--text", str(tmp_path / "empty.txt"))
    assert done.code == 2
    assert "--text must not be empty" in done.err


@pytest.mark.parametrize(
    "content",
    ["", "[]", "{}", json.dumps({"meta": {}, "rows": []}), json.dumps({"meta": None, "rows": [1]}), "\xff\xfe"],
)
def test_broken_result_file(cli: Cli, tmp_path: Path, content: str) -> None:
    path = tmp_path / "result.json"
    path.write_bytes(content.encode("latin-1"))
    done = cli("bench", "report", str(path))
    assert done.code == 2
    assert str(path) in done.err
    assert done.err.count("\n") == 1


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_help_has_an_example(cli: Cli, command: tuple[str, ...]) -> None:
    done = cli(*command, "--help")
    assert done.code == 0
    assert f"rapidkda {' '.join(command)}" in done.out.split("Example:")[1]


def test_every_command_is_listed_here() -> None:
    groups = {group.name: group.typer_instance for group in app.registered_groups if group.typer_instance}
    names = {(command.name,) for command in app.registered_commands}
    names |= {(group, command.name) for group, sub in groups.items() for command in sub.registered_commands}
    assert names == set(COMMANDS)


def test_version_and_bare_call(cli: Cli) -> None:
    assert cli("--version").out == f"rapidkda {rapidkda.__version__}\n"
    bare = cli()
    assert bare.code == 0
    assert "doctor" in bare.out
