"""The SGLang adapter: its facts against the published sources, its prefill on a stand-in against the reference."""

from __future__ import annotations

import ast
import importlib
import logging
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rapidkda import reference
from rapidkda.integrations import post_import
from rapidkda.integrations.contract import Sources, Text, differences
from rapidkda.integrations.sglang import plugin, seam
from rapidkda.testing.tolerances import case_bar, relative_error

from .. import wheels

SOURCES = "RAPIDKDA_SGLANG_SOURCES"  # keep unpacked sources here between runs
STANDIN = Path(__file__).parent / "standin"
HEADS, DIM, SLOTS = 2, 16, 9
NAMES_ONLY = tuple(fact for fact in seam.FACTS if not isinstance(fact, Text))
log = logging.getLogger(__name__)


@pytest.fixture(scope="module", params=seam.SUPPORTED_VERSIONS)
def root(request: pytest.FixtureRequest) -> Path:
    """Unpacked sources of a version, or a skip that says why there are none."""
    folder = wheels.cache_root(SOURCES, request.config) / f"sglang-{request.param}"
    names = [fact.module.replace(".", "/") + ".py" for fact in seam.FACTS]  # type: ignore[attr-defined]
    try:
        return wheels.members(f"sglang=={request.param}", set(names), folder)
    except wheels.Unavailable as reason:
        pytest.skip(f"no sources of SGLang {request.param}: {reason}")


def test_real_sources_agree_with_every_fact(root: Path) -> None:
    assert differences(seam.FACTS, Sources(root)) == []
    for version in seam.SUPPORTED_VERSIONS:
        plugin.check(version, root)


@pytest.mark.parametrize("fact", seam.FACTS, ids=lambda fact: f"{type(fact).__name__}-{fact.module.split('.')[-1]}")
def test_every_fact_notices_when_what_it_names_is_renamed(fact: Any, root: Path) -> None:
    words = [getattr(fact, "name", "").split(".")[-1], *getattr(fact, "names", ()), *getattr(fact, "parameters", ())]
    words += getattr(fact, "keywords", ())
    for word in filter(None, words):
        sources = Sources(root)
        parsed = sources.module(fact.module)
        assert parsed is not None
        text = parsed[1].replace(word, "renamed_by_test")
        sources._modules[fact.module] = (ast.parse(text), text)
        assert fact.difference(sources) is not None, f"{fact} does not notice that {word} is gone"


@pytest.fixture
def sglang(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str | None], Any]]:
    """The stand-in with the plugin loaded; call with the flag's value to build its dispatcher."""
    monkeypatch.syspath_prepend(str(STANDIN))
    monkeypatch.setenv("RAPIDKDA_PREFILL_BACKEND", "torch")
    monkeypatch.setattr(plugin, "version", lambda name: seam.SUPPORTED_VERSIONS[-1])
    monkeypatch.setattr(seam, "FACTS", NAMES_ONLY)  # a stand-in shares names and signatures, not code
    _forget()
    plugin.register()
    plugin.register()  # SGLang may load plugins again in the same process

    def build(flag: str | None) -> Any:
        utils = importlib.import_module(seam.UTILS)
        utils.configuration.mamba.linear_attn_prefill_backend = flag
        kinds = utils.LinearAttnKernelBackend
        module = importlib.import_module(seam.BACKEND)
        return module.KDAKernelDispatcher(kinds.TRITON, kinds(flag or "triton"), kinds.TRITON)

    yield build
    post_import.forget()
    _forget()


def _forget() -> None:
    for name in [name for name in sys.modules if name == "sglang" or name.startswith("sglang.")]:
        del sys.modules[name]


def test_the_stand_in_follows_the_names_and_signatures() -> None:
    assert differences(NAMES_ONLY, Sources(STANDIN)) == []


def test_the_choice_is_added_once_and_nothing_else_is_imported(sglang: Callable[..., Any]) -> None:
    choices = importlib.import_module(seam.CHOICES)
    assert choices.LINEAR_ATTN_KERNEL_BACKEND_CHOICES == ["triton", "flashkda", "rapidkda"]
    assert seam.BACKEND not in sys.modules


@pytest.mark.parametrize("flag", [None, "triton", "flashkda"])
def test_other_names_pass_unchanged(sglang: Callable[..., Any], flag: str | None) -> None:
    dispatcher = sglang(flag)
    assert dispatcher.extend_kernel is dispatcher.triton_kernel


def test_an_unknown_name_meets_sglangs_own_refusal(sglang: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match="Unsupported KDA prefill backend"):
        sglang("rapid")


def test_another_version_is_refused_when_the_model_is_built(
    sglang: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plugin, "version", lambda name: "0.6.1")
    sglang(None)  # not asked for: SGLang runs as if rapidkda were not there
    with pytest.raises(plugin.UnsupportedSglang, match=r"supports SGLang 0\.5\.23; found SGLang 0\.6\.1"):
        sglang("rapidkda")


def test_differing_sources_are_refused_when_the_model_is_built(
    sglang: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    fact = next(fact for fact in NAMES_ONLY if type(fact).__name__ == "Parameters")
    monkeypatch.setattr(seam, "FACTS", (replace(fact, parameters=("decode", "prefill")),))  # type: ignore[type-var]
    with pytest.raises(plugin.UnsupportedSglang, match=r"expected parameters \(decode, prefill\), found \(decode_b"):
        sglang("rapidkda")


class Step:
    """A prefill step as SGLang's backend hands it over: strided slices of one projection, lengths on the host."""

    def __init__(self, lengths: list[int], dtype: torch.dtype, lower_bound: float | None):
        tokens, width = sum(lengths), HEADS * DIM
        wide = torch.randn(tokens, 4 * width + HEADS).to(dtype)
        self.q, self.k, self.v = (x.unflatten(-1, (HEADS, DIM))[None] for x in wide[:, : 3 * width].split(width, -1))
        self.g = wide[None, :, 3 * width : 4 * width].unflatten(-1, (HEADS, DIM))
        self.beta = wide[None, :, 4 * width :]
        starts = torch.tensor([0, *lengths]).cumsum(0)
        self.starts = starts.to(torch.int32)
        self.pool = torch.randn(SLOTS, HEADS, DIM, DIM)
        self.slots = torch.randperm(SLOTS)[: len(lengths)].to(torch.int32)
        self.options: dict[str, Any] = {
            "A_log": torch.randn(1, 1, HEADS, 1),
            "dt_bias": torch.randn(width),
            "lower_bound": lower_bound,
            "beta_is_raw": True,
            "extend_seq_lens_cpu": lengths,
            "extend_prefix_lens": torch.zeros(len(lengths)),
            "layer_id": 3,
            "is_spec_decode": False,
            "return_intermediate_states": False,
            "track_state": None,
        }

    def run(self, dispatcher: Any, **options: Any) -> Any:
        return dispatcher.extend(
            q=self.q,
            k=self.k,
            v=self.v,
            g=self.g,
            beta=self.beta,
            ssm_states=self.pool,
            cache_indices=self.slots,
            query_start_loc=self.starts,
            **{**self.options, **options},
        )

    def want(self) -> tuple[Tensor, Tensor]:
        return reference.kda(
            self.q,
            self.k,
            self.v,
            self.g,
            self.beta,
            cu_seqlens=self.starts,
            initial_state=self.pool[self.slots.long()],
            state_v_first=True,
            use_qk_l2norm=True,
            use_gate=True,
            use_beta_sigmoid=True,
            A_log=self.options["A_log"].flatten(),
            dt_bias=self.options["dt_bias"],
            lower_bound=self.options["lower_bound"],
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("lower_bound", [None, -5.0])
def test_prefill_in_place_on_the_pool(
    sglang: Callable[..., Any], dtype: torch.dtype, lower_bound: float | None, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    log.info("torch.manual_seed(%d)", torch.seed())  # fresh inputs every time; pytest shows the seed with a failure
    dispatcher = sglang("rapidkda")
    assert "rapidkda takes the prefill of KDA layers (--linear-attn-prefill-backend rapidkda)" in caplog.text
    step = Step([33, 1, 5, 70], dtype, lower_bound)
    out, states = step.want()
    before = step.pool.clone()
    got = step.run(dispatcher)
    bar = case_bar(dtype)
    assert got.dtype == dtype
    assert relative_error(got, out) <= bar.out
    assert relative_error(step.pool[step.slots.long()], states) <= bar.state
    others = [slot for slot in range(SLOTS) if slot not in step.slots.tolist()]
    assert torch.equal(step.pool[others], before[others])
    assert dispatcher.triton_kernel.calls == []


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"return_intermediate_states": True, "track_state": torch.zeros(1)}, "tracked for the prefix cache"),
        ({"is_spec_decode": True}, "roll back"),
        ({"extend_seq_lens_cpu": None}, "not known on the host"),
        ({"A_log": None}, "gate comes activated"),
    ],
)
def test_steps_that_stay_sglangs_own(
    sglang: Callable[..., Any], options: dict[str, Any], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    dispatcher = sglang("rapidkda")
    step = Step([9, 4], torch.float32, None)
    before = step.pool.clone()
    for _ in range(2):
        out = step.run(dispatcher, **options)
    assert (out[0] if isinstance(out, tuple) else out) is step.v
    assert torch.equal(step.pool, before)
    assert len(dispatcher.triton_kernel.calls) == 2
    assert len([line for line in caplog.messages if reason in line]) == 1


def test_entry_point_names_the_plugin() -> None:
    text = (Path(__file__).parents[3] / "pyproject.toml").read_text()
    section = text.split('[project.entry-points."sglang.srt.plugins"]')[1].split("[")[0]
    name, _, value = section.strip().partition(" = ")
    entry = EntryPoint(name, value.strip('"'), "sglang.srt.plugins")
    assert entry.load() is plugin.register
