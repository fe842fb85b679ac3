"""`rapidkda generate`, from the folder of a model to the text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from rapidkda.cli import main
from rapidkda.engine import Engine, EngineConfig, SamplingParams
from rapidkda.engine.loading import ByteText, TokenizerText, load_model, load_text

from .test_mtp import random_weights

TEXT = "We the People of the United States, in Order to form a more perfect Union — établir la justice."


@pytest.fixture(scope="module")
def folders(models: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found = {}
    for name, model in models.items():
        found[name] = tmp_path_factory.mktemp(name)
        model.save_pretrained(found[name])
    return found


@pytest.fixture
def prompt_file(tmp_path: Path) -> Path:
    path = tmp_path / "prompt.txt"
    path.write_text(TEXT, encoding="utf-8")
    return path


def generate(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as stop:
        main(["generate", *arguments])
    shown = capsys.readouterr()
    return int(stop.value.code or 0), shown.out, shown.err


@pytest.mark.parametrize("family", ["glm5_next", "kimi_linear"])
@pytest.mark.parametrize("speculate", ["0", "3"])
def test_the_text_goes_to_the_output_and_the_summary_beside_it(
    models: dict[str, Any],
    folders: dict[str, Path],
    prompt_file: Path,
    capsys: pytest.CaptureFixture[str],
    family: str,
    speculate: str,
) -> None:
    code, text, summary = generate(
        capsys,
        *("--model", str(folders[family]), "--prompt-file", str(prompt_file), "--chunk", "16"),
        *("--max-new-tokens", "12", "--speculate", speculate),
    )
    prompt = list(TEXT.encode())
    want = Engine(models[family]).generate([prompt], SamplingParams(max_new_tokens=12))[0].tokens
    assert code == 0
    assert text == bytes(want).decode("utf-8", errors="replace") + "\n"
    for part in (f"{len(prompt)} tokens (bytes)", "12 tokens, ended by length", "time to first token", " ms", "torch"):
        assert part in summary
    assert ("no drafts" in summary) == (speculate == "0")
    assert ("verify backend" in summary) == (speculate == "3")


def test_deferred_decodes_say_the_same_and_the_summary_tells_them(
    folders: dict[str, Path], prompt_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ("--model", str(folders["kimi_linear"]), "--prompt-file", str(prompt_file), "--max-new-tokens", "12")
    plain = generate(capsys, *arguments)
    deferred = generate(capsys, *arguments, "--record-rows", "5")
    assert deferred[:2] == plain[:2]
    for part in ("verification of one token, a state stored once in 5 tokens", "no drafts", "verify backend", "torch"):
        assert part in deferred[2]
    assert "decode backend" not in deferred[2]
    assert "decoded by" not in plain[2]
    drafted = generate(capsys, *arguments, "--record-rows", "5", "--speculate", "3")
    assert drafted[:2] == plain[:2]
    assert "decoded by" not in drafted[2]


def test_sampling_is_repeatable_and_tells_its_seed(
    folders: dict[str, Path], prompt_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ("--model", str(folders["kimi_linear"]), "--prompt-file", str(prompt_file), "--temperature", "1.2")
    seeds = ("--seed", "5"), ("--seed", "5"), ("--seed", "6")
    outputs = [generate(capsys, *arguments, "--max-new-tokens", "20", *seed) for seed in seeds]
    assert outputs[0][1] == outputs[1][1] != outputs[2][1]
    assert "seed" in outputs[0][2]


def test_an_mtp_head_drafts(
    models: dict[str, Any],
    folders: dict[str, Path],
    prompt_file: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    save_file(random_weights(models["kimi_linear"])[0], tmp_path / "mtp.safetensors")
    arguments = ("--model", str(folders["kimi_linear"]), "--prompt-file", str(prompt_file), "--max-new-tokens", "9")
    plain = generate(capsys, *arguments)
    code, text, summary = generate(
        capsys, *arguments, "--speculate", "2", "--mtp", str(tmp_path / "mtp.safetensors"), "--rollback", "slots"
    )
    assert (code, text) == (0, plain[1])
    assert " of " in summary


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--model", "nowhere"), "model folder must hold a config.json, got nowhere"),
        (("--prompt-file", "nowhere.txt"), "--prompt-file must be an existing file, got nowhere.txt"),
        (("--backend", "fast"), "--backend must be one of auto, "),
        (("--decode-backend", "flashkda"), "flashkda"),
        (("--record-rows", "1"), "record_rows must be at least 2 (1 + k_max), the tokens of a verify step, got 1"),
        (("--top-p", "1.5"), "top_p must be in (0, 1], got 1.5"),
        (("--mtp", "nowhere.safetensors"), "nowhere.safetensors"),
        (("--device", "tpu"), "--device must be cpu or cuda[:N], got 'tpu'"),
        (("--device", "cuda:99"), "--device must be cpu or one of "),
    ],
)
def test_mistakes_are_told_in_one_line(
    folders: dict[str, Path],
    prompt_file: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: tuple[str, str],
    message: str,
) -> None:
    given = {"--model": str(folders["kimi_linear"]), "--prompt-file": str(prompt_file), "--speculate": "1"}
    given[arguments[0]] = arguments[1]
    code, text, error = generate(capsys, *(part for pair in given.items() for part in pair))
    assert (code, text) == (2, "")
    assert error.startswith("rapidkda: error: ")
    assert message in error
    assert len(error.strip().splitlines()) == 1


def test_an_empty_prompt_and_another_family_are_refused(
    folders: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    empty = tmp_path / "empty.txt"
    empty.touch()
    code, _, error = generate(capsys, "--model", str(folders["kimi_linear"]), "--prompt-file", str(empty))
    assert code == 2
    assert "--prompt-file must not be empty" in error
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(ValueError, match="model must be of type glm5_next, kimi_linear, got 'llama'"):
        load_model(tmp_path)


@pytest.mark.parametrize("content", [None, b"garbage", b""])
def test_a_folder_without_readable_weights_is_refused(
    folders: dict[str, Path],
    prompt_file: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    content: bytes | None,
) -> None:
    (tmp_path / "config.json").write_text((folders["kimi_linear"] / "config.json").read_text())
    if content is not None:
        (tmp_path / "model.safetensors").write_bytes(content)
    code, _, error = generate(capsys, "--model", str(tmp_path), "--prompt-file", str(prompt_file))
    assert code == 2
    assert f"model folder must hold the weights, got {tmp_path}" in error
    head = tmp_path / "model.safetensors"
    head.write_bytes(content or b"")
    arguments = ("--model", str(folders["kimi_linear"]), "--prompt-file", str(prompt_file), "--speculate", "1")
    code, _, error = generate(capsys, *arguments, "--mtp", str(head))
    assert code == 2
    assert f"weights must be safetensors files, got '{head}'" in error


def test_a_config_that_is_no_object_is_named(tmp_path: Path) -> None:
    for content in ("{", "[]"):
        (tmp_path / "config.json").write_text(content)
        with pytest.raises(ValueError, match=r"config\.json must be a JSON object"):
            load_model(tmp_path)


def test_loading_keeps_the_files_dtype_or_takes_the_one_asked_for(folders: dict[str, Path]) -> None:
    assert load_model(folders["kimi_linear"]).lm_head.weight.dtype == torch.float32
    assert load_model(folders["glm5_next"], dtype=torch.bfloat16).lm_head.weight.dtype == torch.bfloat16


def test_bytes_stream_whole_characters() -> None:
    stream = ByteText().stream()
    pieces = [stream.push(token) for token in [*"aé—".encode(), 0xE2, 0x80]]
    assert pieces == ["a", "", "é", "", "", "—", "", ""]
    assert stream.end() == "\ufffd"
    assert stream.push(300) == ""


def test_a_tokenizer_in_the_folder_is_used(folders: dict[str, Path], tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    from transformers import PreTrainedTokenizerFast

    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([TEXT] * 3, trainer)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(tmp_path)
    text = load_text(tmp_path, 300)
    assert isinstance(text, TokenizerText)
    ids = text.encode(TEXT.encode())
    assert len(ids) < len(TEXT)
    stream = text.stream()
    pieces = [stream.push(token) for token in ids]
    assert "".join(pieces) + stream.end() == TEXT
    assert sum(bool(piece) for piece in pieces) > len(ids) // 2
    with pytest.raises(ValueError, match="must hold a tokenizer, as its 100 token ids are fewer than the 256 bytes"):
        load_text(folders["kimi_linear"], 100)


def test_engine_defaults_are_those_of_the_command(kimi: Any) -> None:
    assert Engine(kimi).config == EngineConfig()
