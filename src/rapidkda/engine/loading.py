"""A model and its text from a folder of Hugging Face files."""

from __future__ import annotations

import codecs
import importlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError

from .families import FAMILIES

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "tiktoken.model")
BYTES = 256
SHIPPED = Path(__file__).parent.parent / "data" / "model"  # the trained model of this package, with its card
HEAD_FILE = "mtp.safetensors"  # an MTP head beside a model's weights
REPLACEMENT = "\ufffd"  # what a decoder shows for a character whose last bytes are still to come


def load_model(folder: Path, *, dtype: torch.dtype | str = "auto", device: torch.device | str = "cpu") -> Any:
    """The causal language model in a folder, in evaluation mode.

    Args:
        folder: config.json and safetensors files.
        dtype: of the weights; "auto" for that of the files.
        device: where it goes.

    Raises:
        ValueError: no config.json, a model of another family, or weights that are missing or cannot be read.
    """
    name = _model_type(folder)
    transformers: Any = importlib.import_module("transformers")
    # glm5_next has no text-only class: its conditional generation class takes text as it is.
    loader = transformers.Glm5NextForConditionalGeneration if name == "glm5_next" else transformers.AutoModelForCausalLM
    try:
        model = loader.from_pretrained(folder, dtype=dtype)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"model folder must hold the weights, got {folder}: {error}") from error
    return model.to(device).eval()


def text_config(folder: Path) -> Any:
    """The text configuration of the model in a folder. ValueError as `load_model`."""
    _model_type(folder)
    return importlib.import_module("transformers").AutoConfig.from_pretrained(folder).get_text_config()


def _model_type(folder: Path) -> str:
    """Of a family that runs here; what the folder's config.json says."""
    config = folder / "config.json"
    if not config.is_file():
        raise ValueError(f"model folder must hold a config.json, got {folder}")
    try:
        name = json.loads(config.read_text()).get("model_type")
    except (ValueError, AttributeError) as error:
        raise ValueError(f"model's {config} must be a JSON object: {error}") from error
    if name not in FAMILIES:
        raise ValueError(f"model must be of type {', '.join(FAMILIES)}, got {name!r} in {config}")
    return str(name)


class Text(Protocol):
    """Between text and token ids."""

    name: str

    def encode(self, data: bytes) -> list[int]:
        """Token ids of a prompt."""

    def stream(self) -> TextStream:
        """For the tokens of one output."""


class TextStream(Protocol):
    """Turns tokens into text piece by piece, and never shows half a character."""

    def push(self, token: int) -> str:
        """The text that this token completes."""

    def end(self) -> str:
        """What is left."""


def load_text(folder: Path, vocab_size: int) -> Text:
    """The folder's tokenizer; without one, a byte is a token.

    Raises ValueError when there is no tokenizer and the vocabulary is smaller than 256.
    """
    if any((folder / name).is_file() for name in TOKENIZER_FILES):
        transformers: Any = importlib.import_module("transformers")
        return TokenizerText(transformers.AutoTokenizer.from_pretrained(folder))
    if vocab_size < BYTES:
        raise ValueError(
            f"model folder must hold a tokenizer, as its {vocab_size} token ids are fewer than the {BYTES} bytes, "
            f"got {folder}"
        )
    return ByteText()


class ByteText:
    """Bytes as token ids; ids from 256 on have no text."""

    name = "bytes"

    def encode(self, data: bytes) -> list[int]:
        """See `Text`."""
        return list(data)

    def stream(self) -> TextStream:
        """See `Text`."""
        return _ByteStream()


class _ByteStream:
    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token: int) -> str:
        return self._decoder.decode(bytes([token])) if token < BYTES else ""

    def end(self) -> str:
        return self._decoder.decode(b"", final=True)


class TokenizerText:
    """A tokenizer of transformers."""

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer
        self.name = type(tokenizer).__name__

    def encode(self, data: bytes) -> list[int]:
        """See `Text`."""
        ids: list[int] = self._tokenizer(data.decode("utf-8", errors="replace"))["input_ids"]
        return ids

    def stream(self) -> TextStream:
        """See `Text`."""
        return _TokenizerStream(self._tokenizer)


class _TokenizerStream:
    """Decodes the tokens since the last whole piece of text, after those before it for their context."""

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer
        self._tokens: list[int] = []
        self._shown = 0  # tokens whose text has been shown
        self._context = 0  # where the context of the next piece starts

    def push(self, token: int) -> str:
        self._tokens.append(token)
        return self._take(whole=True)

    def end(self) -> str:
        return self._take(whole=False)

    def _take(self, whole: bool) -> str:
        before = self._decode(self._tokens[self._context : self._shown])
        text = self._decode(self._tokens[self._context :])
        if whole and (text.endswith(REPLACEMENT) or len(text) <= len(before)):
            return ""
        self._context, self._shown = self._shown, len(self._tokens)
        return text[len(before) :]

    def _decode(self, tokens: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(list(tokens))
        return text
