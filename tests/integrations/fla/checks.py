"""What must hold with some version of flash-linear-attention on the import path; run by test_fla.py, or by pytest."""

from __future__ import annotations

import inspect
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fla
import pytest
import torch
from fla.ops.kda import chunk_kda, fused_recurrent_kda
from fla.ops.kda import fused_recurrent as recurrent_module
from torch import Tensor, nn

import rapidkda.integrations.fla as integration
from rapidkda import reference
from rapidkda.testing.tolerances import Bar, bar, relative_error

sys.path.insert(0, str(Path(__file__).parent))  # this file is run by path, outside any package
from operator_cases import FLA_BAR, LARGE, SMALL, Case, arguments, naive

OLDEST = fla.__version__ == "0.5.0"  # no beta logits, the older name of the V-first layout
V_FIRST = "transpose_state_layout" if OLDEST else "state_v_first"
BAR = Bar(1e-5, 1e-5)  # float32 on the torch backend


def forward(*args: Any, **kwargs: Any) -> Any:
    """The recurrent operator. In 0.5.0 its wrapper itself cannot run on a CPU, so its forward is called there."""
    if OLDEST and not (args[0] if args else kwargs["q"]).is_cuda:
        return recurrent_module.fused_recurrent_kda_fwd(*args, **kwargs, inplace_final_state=False)
    return fused_recurrent_kda(*args, **kwargs)


OPERATORS = [pytest.param(chunk_kda, id="chunk"), pytest.param(forward, id="recurrent")]


@pytest.fixture(autouse=True)
def enabled() -> Iterator[None]:
    integration.enable("torch")
    yield
    integration.disable()


@pytest.fixture
def dispatched(caplog: pytest.LogCaptureFixture) -> Any:
    """Lines of fla's dispatch log so far. It logs each operator and each refusal once, so what it knows is dropped."""
    for registry in registries():
        registry._logged.clear()
    caplog.set_level(logging.INFO)
    return lambda: [r.getMessage() for r in caplog.records if "[FLA Backend]" in r.getMessage()]


def registries() -> list[Any]:
    if fla.__version__.startswith("0.5."):
        from fla.ops.backends import BackendRegistry

        return list(BackendRegistry._registries.values())
    from fla import backends

    return [*backends._operation_registries.values(), *backends._function_registries.values()]


def inputs(batch: int = 2, tokens: int = 70, heads: int = 2, value_heads: int = 4, dim: int = 32) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(tokens)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    return {
        "q": draw(batch, tokens, heads, dim),
        "k": draw(batch, tokens, heads, dim),
        "v": draw(batch, tokens, value_heads, dim),
        "g": draw(batch, tokens, value_heads, dim),
        "beta": draw(batch, tokens, value_heads).sigmoid(),
        "A_log": draw(value_heads),
        "dt_bias": draw(value_heads * dim),
        "state": draw(batch, value_heads, dim, dim),
    }


def run(operator: Any, x: dict[str, Tensor], **options: Any) -> Any:
    with torch.inference_mode():
        return operator(
            *(x[name] for name in ("q", "k", "v", "g", "beta")),
            A_log=x["A_log"],
            dt_bias=x["dt_bias"],
            use_qk_l2norm_in_kernel=True,
            use_gate_in_kernel=True,
            output_final_state=True,
            **options,
        )


def want(x: dict[str, Tensor], **options: Any) -> tuple[Tensor, Tensor]:
    tensors = [x[name] for name in ("q", "k", "v", "g", "beta")]
    return reference.kda(*tensors, A_log=x["A_log"], dt_bias=x["dt_bias"], use_qk_l2norm=True, use_gate=True, **options)


def close(got: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor], limit: Bar = BAR) -> None:
    assert relative_error(got[0], expected[0]) <= limit.out
    assert relative_error(got[1], expected[1]) <= limit.state
    assert got[1].dtype == torch.float32


@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("lower_bound", [None, -5.0])
@pytest.mark.parametrize("operator", OPERATORS)
def test_both_operators_run_on_rapidkda(
    operator: Any, lower_bound: float | None, v_first: bool, dispatched: Any
) -> None:
    x = inputs()
    options: dict[str, Any] = {V_FIRST: v_first}
    if lower_bound is not None and operator is chunk_kda:
        options["safe_gate"] = True
    got = run(operator, x, initial_state=x["state"], lower_bound=lower_bound, **options)
    close(got, want(x, initial_state=x["state"], lower_bound=lower_bound, state_v_first=v_first))
    assert len(dispatched()) == 1
    assert dispatched()[0].endswith("-> rapidkda")


@pytest.mark.parametrize("operator", OPERATORS)
def test_packed_sequences_one_token_and_no_state(operator: Any) -> None:
    x = inputs(batch=1, tokens=90)
    cu_seqlens = torch.tensor([0, 30, 31, 31, 90])
    close(run(operator, x, cu_seqlens=cu_seqlens), want(x, cu_seqlens=cu_seqlens))
    one = inputs(batch=3, tokens=1)
    close(run(operator, one, initial_state=one["state"]), want(one, initial_state=one["state"]))


@pytest.mark.skipif(OLDEST, reason="0.5.0 has no beta logits")
@pytest.mark.parametrize("operator", OPERATORS)
def test_beta_logits_and_negative_eigenvalues(operator: Any) -> None:
    x = inputs()
    x["beta"] = torch.randn(x["beta"].shape)
    got = run(operator, x, use_beta_sigmoid_in_kernel=True, allow_neg_eigval=True)
    close(got, want(x, use_beta_sigmoid=True, allow_neg_eigval=True))


def test_log_decay_ignores_the_gates_parameters() -> None:
    x = inputs()
    x["g"] = -x["g"].abs()
    with torch.inference_mode():
        tensors = [x[name] for name in ("q", "k", "v", "g", "beta")]
        got = chunk_kda(*tensors, A_log=x["A_log"], dt_bias=x["dt_bias"], lower_bound=-3.0, output_final_state=True)
    close(got, reference.kda(*tensors))


@pytest.mark.parametrize("size", [64] if OLDEST else [64, 32])
def test_intermediate_states_are_those_at_the_start_of_each_chunk(size: int) -> None:
    x = inputs(batch=1, tokens=130)
    given = {} if size == 64 else {"chunk_size": size}
    _, _, states = run(chunk_kda, x, return_intermediate_states=True, **given)
    assert states.shape[:2] == (1, -(-130 // size))
    assert states.dtype == x["k"].dtype
    for chunk in range(states.shape[1]):
        part = {name: t[:, : size * chunk] if t.ndim >= 3 and name != "state" else t for name, t in x.items()}
        expected = want(part)[1] if chunk else torch.zeros_like(states[:, 0])
        assert relative_error(states[:, chunk], expected) <= BAR.state if chunk else not states[:, chunk].any()


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"cp_context": object()}, "cp_context"),
        ({"a_misspelt_option": 1}, "a_misspelt_option"),
        ({"lower_bound": -7.0}, "lower_bound in"),
    ],
)
def test_calls_that_rapidkda_does_not_take_are_declined_with_a_reason(
    options: dict[str, Any], reason: str, dispatched: Any
) -> None:
    with pytest.raises(Exception):  # noqa: B017, PT011 - fla's own kernels have no CPU form; what it raises is its affair
        run(chunk_kda, inputs(), **options)
    refusals = [line for line in dispatched() if "rapidkda rejected" in line]
    assert len(refusals) == 1
    assert reason in refusals[0]


def test_training_is_declined(dispatched: Any) -> None:
    x = inputs()
    x["q"].requires_grad_()
    with pytest.raises(Exception):  # noqa: B017, PT011
        chunk_kda(*(x[name] for name in ("q", "k", "v", "g", "beta")))
    assert "requires a gradient" in dispatched()[0]


def test_speculative_state_tables_are_declined(dispatched: Any) -> None:
    x = inputs(tokens=4)
    with pytest.raises(Exception), torch.inference_mode():  # noqa: B017, PT011
        recurrent_module.fused_recurrent_kda_fwd(
            *(x[name] for name in ("q", "k", "v", "g", "beta")),
            initial_state=x["state"],
            inplace_final_state=True,
            ssm_state_indices=torch.zeros(2, 2, dtype=torch.int32),
        )
    assert "inplace_final_state" in dispatched()[0]


def test_a_backend_that_cannot_run_is_a_reason_too(dispatched: Any) -> None:
    integration.enable("cuda")
    if torch.cuda.is_available():
        pytest.skip("the cuda backend may well run here")
    with pytest.raises(Exception):  # noqa: B017, PT011
        run(chunk_kda, inputs())
    assert "rapidkda rejected: backend 'cuda'" in dispatched()[0]


def test_disable_restores(dispatched: Any) -> None:
    forward_before = recurrent_module.fused_recurrent_kda_fwd
    integration.disable()
    assert not integration.enabled()
    with pytest.raises(Exception):  # noqa: B017, PT011
        run(chunk_kda, inputs())
    assert not [line for line in dispatched() if "rapidkda" in line]
    original = recurrent_module.fused_recurrent_kda_fwd
    integration.enable("torch")
    integration.enable("torch")
    run(chunk_kda, inputs())
    assert any(line.endswith("-> rapidkda") for line in dispatched())
    integration.disable()
    assert recurrent_module.fused_recurrent_kda_fwd is original
    assert inspect.unwrap(forward_before) is inspect.unwrap(original)


def test_an_unknown_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fla, "__version__", "0.9.0")
    with pytest.raises(RuntimeError, match=r"supports flash-linear-attention 0\.5 and 0\.6; found 0\.9\.0"):
        integration.enable()


def test_an_operator_with_unknown_parameters_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def fused_recurrent_kda_fwd(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, decay_power: float) -> None:
        raise NotImplementedError

    monkeypatch.setattr(recurrent_module, "fused_recurrent_kda_fwd", fused_recurrent_kda_fwd)
    with pytest.raises(RuntimeError, match=r"fused_recurrent_kda_fwd takes .*decay_power"):
        integration.enable()


def check_case(case: Case, operator: Any, device: str, lines: Any, *, taken: bool = True) -> None:
    """A call within fla's own bar, computed by rapidkda; or declined with a reason, and then computed by fla."""
    call = arguments(case, device)
    with torch.inference_mode():
        got = operator(**call)
        expected = naive(call)
    limit = FLA_BAR if case.dtype != torch.bfloat16 else bar("slow", case.dtype).out
    assert relative_error(got[0], expected[0].double()) <= limit
    assert relative_error(got[1], expected[1].double()) <= limit
    assert any(line.endswith("-> rapidkda") for line in lines()) == taken, lines()
    assert any("rapidkda rejected: " in line for line in lines()) != taken, lines()


@pytest.mark.parametrize("case", SMALL, ids=str)
@pytest.mark.parametrize("operator", OPERATORS)
def test_calls_of_flas_users(operator: Any, case: Case, dispatched: Any) -> None:
    check_case(case, operator, "cpu", dispatched)


@pytest.mark.gpu
@pytest.mark.parametrize("case", [case for case in LARGE if case.dim in (64, 128)], ids=str)
@pytest.mark.parametrize("operator", OPERATORS)
def test_calls_of_flas_users_on_triton(operator: Any, case: Case, dispatched: Any) -> None:
    integration.enable("triton")
    check_case(case, operator, "cuda", dispatched)


@pytest.mark.gpu
@pytest.mark.parametrize("case", [case for case in LARGE if case.dtype == torch.bfloat16], ids=str)
def test_calls_of_flas_users_on_cuda(case: Case, dispatched: Any) -> None:
    integration.enable("cuda")
    check_case(case, chunk_kda, "cuda", dispatched)


@pytest.mark.gpu
@pytest.mark.parametrize(("backend", "dim"), [("triton", 100), ("cuda", 64)])
def test_what_a_gpu_backend_cannot_do_runs_on_fla(backend: str, dim: int, dispatched: Any) -> None:
    integration.enable(backend)
    case = next(case for case in LARGE if case.dim == dim)
    check_case(case, chunk_kda, "cuda", dispatched, taken=False)


class PlainNorm(nn.Module):
    """fla's gated norm as plain tensor code: its own is a GPU kernel."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * self.weight * torch.sigmoid(gate)


@pytest.mark.skipif(OLDEST and not torch.cuda.is_available(), reason="0.5.0's recurrent operator needs a GPU")
@pytest.mark.parametrize("cached", [False, True])
def test_kimi_delta_attention_runs_on_rapidkda(cached: bool, dispatched: Any) -> None:
    """fla's layer: a prefill of 80 tokens and two single tokens from its cache equal one pass over all of them."""
    from fla.layers import KimiDeltaAttention
    from fla.models.utils import Cache

    torch.manual_seed(3)
    layer = KimiDeltaAttention(hidden_size=48, head_dim=16, num_heads=3, use_short_conv=False, layer_idx=0).eval()
    layer.o_norm = PlainNorm(16)
    x = torch.randn(2, 82, 48)
    with torch.inference_mode():
        if cached:
            cache = Cache()
            parts = []
            for part in (x[:, :80], x[:, 80:81], x[:, 81:]):
                out, _, cache = layer(part, past_key_values=cache, use_cache=True)
                parts.append(out)
            got = torch.cat(parts, dim=1)
        else:
            got = layer(x)[0]
        q, k, v = (
            torch.nn.functional.silu(p(x)).unflatten(-1, (3, 16)) for p in (layer.q_proj, layer.k_proj, layer.v_proj)
        )
        o, _ = reference.kda(
            q,
            k,
            v,
            layer.f_proj(x).unflatten(-1, (3, 16)),
            layer.b_proj(x),
            use_qk_l2norm=True,
            use_gate=True,
            A_log=layer.A_log,
            dt_bias=layer.dt_bias,
            use_beta_sigmoid=True,
        )
        expected = layer.o_proj(layer.o_norm(o.float(), layer.g_proj(x).unflatten(-1, (3, 16))).flatten(-2))
    assert relative_error(got, expected) <= 1e-5
    lines = dispatched()
    assert lines
    assert all(line.endswith("-> rapidkda") for line in lines)
    assert len(lines) == (2 if cached else 1)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["triton", "cuda", None])
@pytest.mark.parametrize("tokens", [40, 300])
def test_kimi_delta_attention_on_a_gpu_equals_flas_own(backend: str | None, tokens: int, dispatched: Any) -> None:
    """The whole layer, convolutions and norm included, in bfloat16: a prefill, then three tokens from its cache."""
    from fla.layers import KimiDeltaAttention
    from fla.models.utils import Cache

    torch.manual_seed(4)
    layer = KimiDeltaAttention(hidden_size=512, head_dim=128, num_heads=4, layer_idx=0).cuda().bfloat16().eval()
    x = torch.randn(2, tokens + 3, 512, device="cuda", dtype=torch.bfloat16)

    def served() -> Tensor:
        cache = Cache()
        parts = []
        for part in x.split([tokens, 1, 1, 1], dim=1):
            out, _, cache = layer(part, past_key_values=cache, use_cache=True)
            parts.append(out)
        return torch.cat(parts, dim=1)

    with torch.inference_mode():
        integration.disable()
        expected = served()
        integration.enable(backend)
        got = served()
    limit = bar("fast", torch.bfloat16).out
    assert relative_error(got, expected.double()) <= 2 * limit  # two bfloat16 results, each within its bar
    # Up to 64 tokens the layer calls the recurrent operator.
    first = "chunk_kda" if tokens > 64 else "fused_recurrent_kda_fwd"
    assert any(line.endswith(f"{first} -> rapidkda") for line in dispatched()), dispatched()
