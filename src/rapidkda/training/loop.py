"""The training loop: a given number of minutes from a fresh model or a checkpoint, with a log and a checkpoint."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

import torch
from torch import Tensor, nn

from . import probe
from .batches import KINDS, MIXTURE, Batches, Mixture, unpack
from .checkpoint import load_checkpoint, save_checkpoint
from .forward import TrainingForward
from .kda import kda_from, working_kda
from .model import MtpHead, build, text_config
from .optimizer import Optimizer

MTP_WEIGHTS = (
    0.2,
    0.1,
    0.1,
)  # of the MTP head's losses at the first guess, and at those that go on from its own output
WARM_UP = 60  # steps
LOG_EVERY = 25  # steps
LARGEST_NORM = 1.0  # gradients are scaled down to it


@dataclass(frozen=True, slots=True)
class Stage:
    """Rows of `length` tokens until `until` of the time is over, 0 to 1."""

    length: int
    until: float


@dataclass(frozen=True, slots=True)
class Settings:
    """What a run needs to know.

    Attributes:
        corpus: file of the training text.
        out: folder of the log (`log.jsonl`) and the checkpoint.
        minutes: wall time, from the call on, checkpoint included.
        resume: folder of a checkpoint to start from.
        stages: lengths of rows over time; the last one's `until` is 1.
        mixture: share of tokens of each of `batches.KINDS`.
        batch_tokens: of a step.
        rates: factors of the learning rates at the start and at the end; between them they stay at the start's value
            for `constant` of the time, then fall linearly.
        constant: share of the time before the rates fall.
        seed: of the data and the fresh weights; a continued run takes another seed.
        workers: processes that make batches.
        compiled: through torch.compile.
        kda: where gradients of KDA come from (see `kda.SOURCES`); None tries them in order.
        probe_seconds: between measurements on held-out samples, each followed by a checkpoint.
        probe_length: tokens of a row of held-out samples.
        device: where to train.
        dtype: of matrix products.
        most_steps: for tests.
        config: changes of `text_config`.
    """

    corpus: Path
    out: Path
    minutes: float
    resume: Path | None = None
    stages: Sequence[Stage] = (Stage(512, 0.3), Stage(4096, 1.0))
    mixture: Mixture = MIXTURE
    batch_tokens: int = 65_536
    rates: tuple[float, float] = (1.0, 0.05)
    constant: float = 0.6
    seed: int = 0
    workers: int = 6
    compiled: bool = True
    kda: str | None = None
    probe_seconds: float = 30.0
    probe_length: int = 4096
    device: torch.device = field(default_factory=lambda: torch.device("cuda"))
    dtype: torch.dtype = torch.bfloat16
    most_steps: int | None = None
    config: dict[str, Any] = field(default_factory=dict)


def train(settings: Settings) -> dict[str, float]:
    """Run, and return the last measurement. The checkpoint in `settings.out` is then that of the last step."""
    started = time.monotonic()
    seconds = 60 * settings.minutes
    settings.out.mkdir(parents=True, exist_ok=True)
    device = settings.device
    batches = Batches(
        settings.corpus,
        tokens=settings.batch_tokens,
        length=settings.stages[0].length,
        seed=settings.seed,
        mixture=settings.mixture,
        workers=settings.workers,
        pin=device.type == "cuda",
    )
    stream = iter(batches)  # starts the workers, before the GPU is used
    model, head = build(text_config(**settings.config), settings.seed)
    if settings.resume is not None:
        load_checkpoint(settings.resume, model, head)
    model, head = model.to(device), head.to(device)
    name, kda = (
        working_kda(device, model.config.text_config.linear_head_dim)
        if settings.kda is None
        else (settings.kda, kda_from(settings.kda))
    )
    forward = TrainingForward(model, head, kda, dtype=settings.dtype, compiled=settings.compiled)
    optimizer = Optimizer(trained(model, head))
    parameters = [parameter for _, parameter in trained(model, head)]
    held_out = probe.build(settings.batch_tokens, settings.probe_length, device)
    step, tokens, found = 0, 0, {}
    measured = time.monotonic()
    with (settings.out / "log.jsonl").open("a") as log:
        _write(
            log,
            event="start",
            seconds=measured - started,
            parameters=sum(parameter.numel() for parameter in parameters),
            kda=name,
            corpus_bytes=settings.corpus.stat().st_size,
            mixture=dict(zip(KINDS, settings.mixture)),
            lengths=[stage.length for stage in settings.stages],
            batch_tokens=settings.batch_tokens,
            rates=settings.rates,
        )
        while True:
            elapsed = (time.monotonic() - started) / seconds
            if elapsed >= 1 or (settings.most_steps is not None and step >= settings.most_steps):
                break
            batches.length = next(one.length for one in settings.stages if elapsed < one.until)
            rate = rate_factor(settings, elapsed) * min(1.0, (step + 1) / WARM_UP)
            losses = train_step(forward, optimizer, parameters, *unpack(*next(stream), device), rate)
            step, tokens = step + 1, tokens + settings.batch_tokens
            if step % LOG_EVERY == 0 or step == 1:
                loss, mtp = (float(value) for value in losses)
                _write(
                    log,
                    event="step",
                    step=step,
                    tokens=tokens,
                    seconds=time.monotonic() - started,
                    length=batches.length,
                    rate=rate,
                    loss=loss,
                    mtp_loss=mtp,
                )
                if loss != loss:
                    raise RuntimeError(
                        f"the loss became NaN at step {step}; the last checkpoint in {settings.out} is sound"
                    )
            if time.monotonic() - measured >= settings.probe_seconds:
                measured = time.monotonic()
                found = held_out.measure(forward)
                _write(log, event="probe", step=step, tokens=tokens, seconds=measured - started, **found)
                save_checkpoint(settings.out, model, head)
        save_checkpoint(settings.out, model, head)
        found = held_out.measure(forward)
        _write(log, event="end", step=step, tokens=tokens, seconds=time.monotonic() - started, **found)
    return found


def train_step(
    forward: TrainingForward,
    optimizer: Optimizer,
    parameters: list[nn.Parameter],
    tokens: Tensor,
    weights: Tensor,
    rate: float,
) -> tuple[Tensor, Tensor]:
    """One step on [B, T] tokens with their loss weights; the weighted mean losses of the model and of the MTP head.

    The latter is that of the head's first guess. For later ones the head reads its own output in the place of the
    model's hidden states, as it does when it drafts.
    """
    state = forward.hidden(tokens)
    loss = _mean(forward.losses(state, tokens.roll(-1, 1).reshape(-1))[0], weights, 1)
    total, guesses = loss, []
    for depth, weight in enumerate(MTP_WEIGHTS, 1):
        state = forward.ahead(state, tokens.roll(-depth, 1))
        guesses.append(_mean(forward.losses(state, tokens.roll(-depth - 1, 1).reshape(-1))[0], weights, depth + 1))
        total = total + weight * guesses[-1]
    total.backward()
    nn.utils.clip_grad_norm_(parameters, LARGEST_NORM)
    optimizer.step(rate)
    return loss.detach(), guesses[0].detach()


def trained(model: Any, head: MtpHead) -> list[tuple[str, nn.Parameter]]:
    """The parameters that training moves: not the vision tower, and not the indexers, which choose everything."""
    text = model.model.language_model.named_parameters()
    named = [*text, *model.lm_head.named_parameters("lm_head"), *head.named_parameters("mtp")]
    return [(name, parameter) for name, parameter in named if ".indexer." not in name]


def rate_factor(settings: Settings, elapsed: float) -> float:
    """The learning rates' factor when `elapsed` of the time, 0 to 1, is over."""
    high, low = settings.rates
    fallen = max(0.0, elapsed - settings.constant) / (1 - settings.constant)
    return high + (low - high) * min(1.0, fallen)


def _mean(losses: Tensor, weights: Tensor, ahead: int) -> Tensor:
    """Weighted mean over the rows' tokens that have a target `ahead` tokens on in the same row."""
    weights = weights.roll(-ahead, 1)
    weights[:, -ahead:] = 0
    weights = weights.reshape(-1)
    return (losses * weights).sum() / weights.sum()


def _write(log: TextIO, **record: Any) -> None:
    log.write(json.dumps({k: round(v, 5) if isinstance(v, float) else v for k, v in record.items()}) + "\n")
    log.flush()
