"""The layer as a whole: against transformers' own modules, split over ranks, from configs and checkpoints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

import rapidkda
from rapidkda.errors import BackendUnavailable, ConfigConflict
from rapidkda.serving import BackendWish, Glm5NextLinearAttention, KDALayer, StepRequest
from rapidkda.testing.tolerances import relative_error

from .driver import Driver
from .oracle import WISH, Oracle, make_layer, only_on_torch

pytestmark = only_on_torch

transformers = pytest.importorskip("transformers", minversion="5.17")

BAR = 1e-4
PREFIX = "model.layers.0.self_attn."


def hugging_face_layer(family: str, seed: int = 0) -> tuple[Any, Any]:
    """A seeded KDA module of transformers and its config."""
    sizes = {"hidden_size": 48, "num_hidden_layers": 2, "linear_num_heads": 4, "linear_head_dim": 16}
    torch.manual_seed(seed)
    if family == "glm5_next":
        from transformers.models.glm5_next import modeling_glm5_next as modeling
        from transformers.models.glm5_next.configuration_glm5_next import Glm5NextTextConfig

        config = Glm5NextTextConfig(**sizes, layer_types=["linear_attention"] * 2)
        module = modeling.Glm5NextTextLinearAttention(config, 0)
    else:
        from transformers.models.kimi_linear import modeling_kimi_linear as modeling
        from transformers.models.kimi_linear.configuration_kimi_linear import KimiLinearConfig

        config = KimiLinearConfig(**sizes, layer_types=["linear_attention"] * 2)
        module = modeling.KimiLinearDeltaAttention(config, 0)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(0.0, parameter.shape[-1] ** -0.5)
        module.forget_gate.dt_bias.uniform_(-6.5, -3.0)
        module.o_norm.weight.normal_(1.0, 0.1)
    return module.eval(), config


def checkpoint(module: Any, style: str) -> dict[str, Tensor]:
    """The module's weights under the names of its state dict, or as published checkpoints name them."""
    tensors = {name: value.detach().clone() for name, value in module.state_dict().items()}
    if style == "published":
        tensors = {name.removeprefix("forget_gate."): value for name, value in tensors.items()}
        q, k, v = tensors.pop("conv1d.weight").chunk(3)
        tensors.update({"q_conv1d.weight": q, "k_conv1d.weight": k, "v_conv1d.weight": v})
        tensors["A_log"] = tensors["A_log"].reshape(1, 1, -1, 1)
    return {PREFIX + name: value.contiguous() for name, value in tensors.items()}


def float32_layer(config: Any, **options: Any) -> KDALayer:
    return KDALayer.from_config(config, dtype=torch.float32, backends=WISH, **options)


@pytest.mark.parametrize("family", ["glm5_next", "kimi_linear"])
@pytest.mark.parametrize("style", ["module", "published"])
def test_prefill_chunks_and_decode_equal_transformers(family: str, style: str, tmp_path: Path) -> None:
    module, config = hugging_face_layer(family)
    save_file(checkpoint(module, style), tmp_path / "model.safetensors")
    layer = float32_layer(config)
    layer.load_weights(tmp_path, PREFIX)
    driver = Driver(layer)
    hidden = driver.hidden(70)
    cache = transformers.DynamicCache(config=config)
    slots = driver.pool.allocate("a")
    for start, stop in ((0, 37), (37, 40), (40, 65), (65, 66), (66, 67), (67, 70)):
        with torch.no_grad():
            wanted = module(hidden[None, start:stop], cache_params=cache)[0]
        kind = "decode" if stop - start == 1 else "prefill"
        record = StepRequest("a", kind, stop - start, slots, has_initial_state=start > 0)  # type: ignore[arg-type]
        got = driver.step(record, inputs={"a": hidden[start:stop]})["a"]
        assert relative_error(got, wanted) <= BAR


@pytest.mark.parametrize("family", ["glm5_next", "kimi_linear"])
@pytest.mark.parametrize("tp_size", [2, 4])
@pytest.mark.parametrize("sharded_files", [False, True])
def test_ranks_sum_to_the_unsharded_layer(family: str, tp_size: int, sharded_files: bool) -> None:
    module, config = hugging_face_layer(family)
    tensors = checkpoint(module, "published")
    whole = float32_layer(config)
    whole.load_weights(tensors, PREFIX)
    ranks = []
    for rank in range(tp_size):
        layer = float32_layer(config, tp_rank=rank, tp_size=tp_size)
        layer.load_weights(rank_checkpoint(tensors, rank, tp_size) if sharded_files else tensors, PREFIX)
        ranks.append(layer)
    outputs = []
    for layers in ([whole], ranks):
        drivers = [Driver(layer) for layer in layers]
        total = []
        for kind, count, accepted, fresh in (
            ("prefill", 33, 0, True),
            ("verify", 4, 0, False),
            ("decode", 1, 2, False),
        ):
            parts = []
            for driver in drivers:
                slots = driver.pool.allocate("a") if fresh else driver.slots("a")
                record = StepRequest("a", kind, count, slots, has_initial_state=not fresh, accepted=accepted)  # type: ignore[arg-type]
                parts.append(driver.step(record, inputs={"a": driver.hidden(count)})["a"])
            total.append(torch.stack(parts).sum(0))
        outputs.append(torch.cat(total))
    assert relative_error(outputs[1], outputs[0]) <= 1e-5
    # each rank's part counts: without one of them the sum is wrong
    assert relative_error(outputs[1] * (tp_size - 1) / tp_size, outputs[0]) > 0.1


def rank_checkpoint(tensors: dict[str, Tensor], rank: int, size: int) -> dict[str, Tensor]:
    """What a file of one rank would hold."""
    result = {}
    for name, value in tensors.items():
        axis = {"A_log": 2, "o_proj.weight": 1}.get(name.removeprefix(PREFIX), 0)
        replicated = any(part in name for part in ("f_a_proj", "g_a_proj", "o_norm"))
        result[name] = value if replicated else value.chunk(size, axis)[rank]
    return result


def test_merged_convolution_is_sharded_by_part() -> None:
    module, config = hugging_face_layer("glm5_next")
    merged = checkpoint(module, "module")
    layer = float32_layer(config, tp_rank=1, tp_size=2)
    layer.load_weights(merged, PREFIX)
    parts = [part.chunk(2)[1].squeeze(1) for part in merged[PREFIX + "conv1d.weight"].chunk(3)]
    assert torch.equal(layer.conv_weight, torch.cat(parts))
    of_rank = dict(merged)
    of_rank[PREFIX + "conv1d.weight"] = torch.cat(parts).unsqueeze(1)
    again = float32_layer(config, tp_rank=1, tp_size=2)
    again.load_weights(of_rank, PREFIX)
    assert torch.equal(layer.conv_weight, again.conv_weight)


def test_reads_a_folder_of_shards_by_its_index(tmp_path: Path) -> None:
    module, config = hugging_face_layer("kimi_linear")
    tensors = checkpoint(module, "published")
    names = sorted(tensors)
    halves = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, held in halves.items():
        save_file({name: tensors[name] for name in held}, tmp_path / file)
    index = {"weight_map": {name: file for file, held in halves.items() for name in held}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    layer, wanted = float32_layer(config), float32_layer(config)
    layer.load_weights(tmp_path, PREFIX)
    wanted.load_weights(tensors, PREFIX)
    for got, expected in zip(layer.parameters(), wanted.parameters(), strict=True):
        assert torch.equal(got, expected)


def edit(tensors: dict[str, Tensor], fault: str) -> dict[str, Tensor]:
    tensors = dict(tensors)
    q = tensors[PREFIX + "q_proj.weight"]
    if fault == "missing":
        del tensors[PREFIX + "k_proj.weight"]
    elif fault == "unknown":
        tensors[PREFIX + "q_norm.weight"] = q
    elif fault == "shape":
        tensors[PREFIX + "v_proj.weight"] = q[:-1]
    elif fault == "twice":
        tensors[PREFIX + "forget_gate.A_log"] = tensors[PREFIX + "A_log"]
    elif fault == "both convolutions":
        tensors[PREFIX + "conv1d.weight"] = torch.cat([tensors[PREFIX + "q_conv1d.weight"]] * 3)
    elif fault == "dtype":
        tensors[PREFIX + "b_proj.weight"] = tensors[PREFIX + "b_proj.weight"].int()
    return tensors


@pytest.mark.parametrize(
    ("fault", "error", "name"),
    [
        ("missing", ValueError, "k_proj.weight"),
        ("unknown", ValueError, "q_norm.weight"),
        ("shape", ValueError, "v_proj.weight"),
        ("twice", ValueError, "A_log"),
        ("both convolutions", ValueError, "conv1d.weight"),
        ("dtype", TypeError, "b_proj.weight"),
    ],
)
def test_a_wrong_checkpoint_is_refused_by_name(fault: str, error: type[Exception], name: str) -> None:
    module, config = hugging_face_layer("glm5_next")
    layer = float32_layer(config)
    before = [parameter.clone() for parameter in layer.parameters()]
    with pytest.raises(error, match=name):
        layer.load_weights(edit(checkpoint(module, "published"), fault), PREFIX)
    assert all(torch.equal(a, b) for a, b in zip(before, layer.parameters(), strict=True))


def test_a_bounded_gate_may_have_no_amplitude_and_no_bias() -> None:
    module, config = hugging_face_layer("glm5_next")
    tensors = checkpoint(module, "published")
    bare = {name: value for name, value in tensors.items() if not name.endswith(("A_log", "dt_bias"))}
    zeros = {**tensors, PREFIX + "A_log": torch.zeros(4), PREFIX + "dt_bias": torch.zeros(64)}
    outputs = []
    for weights in (bare, zeros):
        layer = float32_layer(config)
        layer.load_weights(weights, PREFIX)
        driver = Driver(layer)
        record = StepRequest("a", "prefill", 20, driver.pool.allocate("a"), has_initial_state=False)
        outputs.append(driver.step(record, inputs={"a": driver.hidden(20)})["a"])
    assert torch.equal(*outputs)
    _, unbounded = hugging_face_layer("kimi_linear")
    with pytest.raises(ValueError, match="A_log"):
        float32_layer(unbounded).load_weights(bare, PREFIX)


def test_glm_layer_takes_its_place_among_the_linear_layers() -> None:
    _, config = hugging_face_layer("glm5_next")
    config.num_hidden_layers = 6
    config.layer_types = ["linear_attention"] * 3 + ["deepseek_sparse_attention"] + ["linear_attention"] * 2
    layer = Glm5NextLinearAttention(config, layer_idx=5, dtype=torch.float32, backends=WISH)
    assert layer.pool_layer == 4
    assert (layer.num_heads, layer.head_dim, layer.lower_bound, layer.eps) == (4, 16, -5.0, config.rms_norm_eps)
    config.hidden_act = "gelu"
    with pytest.raises(ValueError, match="hidden_act"):
        Glm5NextLinearAttention(config)


@pytest.mark.parametrize("options", [{"allow_neg_eigval": True}, {"conv_width": 3}, {"lower_bound": None}])
def test_options_reach_the_operators(options: dict[str, Any]) -> None:
    layer = make_layer(3, **options)
    driver = Driver(layer)
    hidden = driver.hidden(50)
    record = StepRequest("a", "prefill", 50, driver.pool.allocate("a"), has_initial_state=False)
    got = driver.step(record, inputs={"a": hidden})["a"]
    wanted, _ = Oracle(layer).run(hidden, driver.oracle.fresh())
    assert relative_error(got, wanted) <= 1e-5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16])
def test_half_precision_layer_stays_near_the_reference(dtype: torch.dtype, state_dtype: torch.dtype) -> None:
    layer = make_layer(1, hidden=128, heads=2, dim=64, dtype=dtype, state_dtype=state_dtype)
    driver = Driver(layer)
    hidden = driver.hidden(130)
    state = driver.oracle.fresh()
    slots = driver.pool.allocate("a")
    for start, stop, kind in ((0, 64, "prefill"), (64, 129, "prefill"), (129, 130, "decode")):
        record = StepRequest("a", kind, stop - start, slots, has_initial_state=start > 0)  # type: ignore[arg-type]
        got = driver.step(record, inputs={"a": hidden[start:stop]})["a"]
        wanted, states = driver.oracle.run(hidden[start:stop], state)
        state = states[-1]
        # Projections, convolution, KDA, norm and output each round to `dtype`: five roundings of 2^-9 on average.
        assert relative_error(got, wanted) <= 2e-2


def test_the_report_says_what_serves_and_why() -> None:
    report = make_layer().backend_report()
    assert report["version"] == rapidkda.__version__
    assert set(report["backends"]) == {"prefill", "decode", "verify", "verify_slots", "conv", "norm"}
    assert report["backends"]["prefill"]["name"] == WISH.prefill
    assert "asked for" in report["backends"]["prefill"]["reason"]


@pytest.mark.parametrize(
    ("wish", "variables", "source"),
    [
        (BackendWish(prefill="torch", decode="torch"), {}, "argument"),
        (BackendWish(prefill_flag="torch", decode_flag="torch"), {}, "engine flag"),
        (
            BackendWish(additional_config={"kda_prefill_backend": "torch", "kda_decode_backend": "Torch"}),
            {},
            "additional_config",
        ),
        (BackendWish(), {"RAPIDKDA_PREFILL_BACKEND": "torch", "RAPIDKDA_DECODE_BACKEND": "torch"}, "environment"),
    ],
)
def test_every_knob_reaches_the_layer(
    wish: BackendWish, variables: dict[str, str], source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    report = make_layer(backends=wish).backend_report()["backends"]
    for op in ("prefill", "decode", "verify", "conv", "norm"):
        assert report[op]["name"] == "torch"
        assert source in report[op]["source"]


def test_conflicting_or_unknown_wishes_are_refused() -> None:
    wish = BackendWish(prefill="torch", decode_flag="torch", additional_config={"kda_decode_backend": "triton"})
    with pytest.raises(ConfigConflict, match=r"engine flag --kda-decode-backend.*additional_config"):
        make_layer(backends=wish)
    with pytest.raises(ValueError, match=r"torch.*nonesuch"):
        make_layer(backends=BackendWish(prefill="nonesuch", decode="torch"))
    with pytest.raises(BackendUnavailable, match="flashkda"):
        make_layer(backends=BackendWish(prefill="flashkda", decode="torch"))


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"tp_size": 3}, "tp_size"),
        ({"tp_rank": 2, "tp_size": 2}, "tp_rank"),
        ({"lower_bound": -6.0}, "lower_bound"),
        ({"lower_bound": 0.5}, "lower_bound"),
        ({"pool_layer": -1}, "pool_layer"),
        ({"state_dtype": torch.float16}, "state_dtype"),
        ({"heads": 0}, "num_heads"),
    ],
)
def test_wrong_dimensions_are_refused_by_name(options: dict[str, Any], name: str) -> None:
    with pytest.raises((ValueError, TypeError), match=name):
        make_layer(**options)
