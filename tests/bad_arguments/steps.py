"""Segments, pools, outputs, checkpoints, workspace, drafts."""

from __future__ import annotations

from functools import partial

import torch

from rapidkda import Checkpoints, Segments

from .registry import (
    CALLS,
    HV,
    KDA,
    LENS,
    Arguments,
    BadCall,
    H,
    T,
    V,
    bad,
    bad_set,
    every_second,
    expanded,
    meta,
    prefill,
)

bad("prefill verify causal_conv", "segments", "a_list", LENS, TypeError)
bad("prefill prefill_layer", "segments", "of_more_than_16_bits", Segments.from_lengths([*LENS, *[0] * 65534]))
bad("decode", "segments", "two_tokens", Segments.from_lengths([2, 1]))
bad("verify", "segments", "more_tokens_than_slots", Segments.from_lengths([4, 1]))
bad("replay", "segments", "more_tokens_than_records", Segments.from_lengths([4, 1]))
bad("prefill decode verify causal_conv", "segments", "past_the_end", Segments.from_lengths([1, 1], first_token=[0, T]))
bad("prefill causal_conv", "segments", "another_device", Segments.from_lengths(LENS, "meta"))
bad("prefill", "segments", "more_than_slots", Segments.from_lengths([20, 2, 2]), named="slots")

for op in (*KDA.split(), "commit", "causal_conv"):
    bad(op, "state", "no_tensor", [1], TypeError)
    bad(op, "state", "expanded", expanded)
    bad(op, "state", "three_dimensions" if op != "causal_conv" else "two_dimensions", lambda x: x[0])
    bad(op, "slots", "floats", lambda x: x.float(), TypeError)
    bad(op, "slots", "a_list", [3, 1], TypeError)
    bad(op, "slots", "another_device", meta)
bad("prefill decode", "state", "half", lambda x: x.half(), TypeError)
bad("prefill decode verify", "state", "another_device", meta)
bad("prefill decode verify", "state", "other_layout", lambda x: x.transpose(-1, -2).contiguous())
bad("prefill decode verify", "state", "strided_inside", lambda x: x.transpose(-1, -2).contiguous().transpose(-1, -2))
bad("prefill decode verify", "state", "key_heads", lambda x: x[:, :H].contiguous())
bad("prefill decode", "slots", "column_kept", lambda x: x[:, None])
bad("prefill decode", "slots", "one_short", lambda x: x[:1])
bad("prefill", "slots", "none", None)
bad("verify", "slots", "one_dimension", lambda x: x[:, 0])
bad("verify", "slots", "no_columns", lambda x: x[:, :0])
bad("replay", "slots", "two_dimensions", lambda x: x[:, None])
bad("commit", "slots", "two_dimensions", lambda x: x[:, None])
bad("prefill decode causal_conv", "read_slots", "one_short", torch.tensor([3]))
bad("prefill decode causal_conv", "read_slots", "bools", torch.tensor([True, False]), TypeError)
bad("prefill", "has_initial_state", "one_short", lambda x: x[:1])
bad("prefill", "has_initial_state", "floats", lambda x: x.float(), TypeError)
bad("prefill", "has_initial_state", "a_list", [True, False], TypeError)
bad("prefill", "has_initial_state", "another_device", meta)
for name in ("slots", "has_initial_state"):
    given = {"state": None, "slots": None, "has_initial_state": None} | {name: prefill()[name]}
    bad_set("prefill", f"{name}_without_a_pool", name, given)
bad_set("prefill", "read_slots_without_a_pool", "read_slots",
        {"state": None, "slots": None, "has_initial_state": None, "read_slots": torch.tensor([1, 2])})  # fmt: skip
bad("decode", "state", "none", None, TypeError)

for op in (*KDA.split(), "causal_conv", "gated_rms_norm"):
    bad(op, "out", "no_tensor", "cpu", TypeError)
    bad(op, "out", "another_dtype", lambda x: x.bfloat16(), TypeError)
    bad(op, "out", "one_short", lambda x: x[:-1])
    bad(op, "out", "another_device", meta)
    bad(op, "out", "expanded", expanded)
    bad(op, "out", "strided_last", every_second)
CALLS.append(BadCall("prefill-out-is-an-input", "prefill",
                     lambda a: a | {"v": a["v"], "out": a["v"]}, ValueError, "out", False))  # fmt: skip
CALLS.append(BadCall("decode-out-is-beta", "decode",
                     lambda a: a | {"beta": a["out"][:, :, 0]}, ValueError, "out", False))  # fmt: skip
CALLS.append(BadCall("decode-out-is-the-pool", "decode",
                     lambda a: a | {"out": a["state"].view(-1)[: T * HV * V].view(T, HV, V)},
                     ValueError, "out", False))  # fmt: skip


def out_beside_v(arguments: Arguments, shift: int) -> Arguments:
    """v and out as slices of one buffer, `shift` elements apart in every row of 2 HV V."""
    rows = torch.zeros(T + 1, 2 * HV * V)
    v, out = (rows.view(-1)[at : at + T * 2 * HV * V].view(T, 2 * HV, V)[:, :HV] for at in (0, shift))
    return arguments | {"v": v.copy_(arguments["v"]), "out": out}


for op, shift in (("prefill", V), ("decode", 1), ("verify", 2 * HV * V), ("prefill", HV * V - 1)):
    CALLS.append(BadCall(f"{op}-out-{shift}-after-v", op, partial(out_beside_v, shift=shift), ValueError, "out", True))
CALLS.append(BadCall("causal_conv-out-is-x", "causal_conv", lambda a: a | {"out": a["x"]}, ValueError, "out", False))
CALLS.append(
    BadCall("gated_rms_norm-out-is-z", "gated_rms_norm", lambda a: a | {"out": a["z"]}, ValueError, "out", False)
)

bad("prefill", "checkpoints", "a_list", [(0, 16, 2)], TypeError)
bad("prefill", "checkpoints", "another_batch", Checkpoints.build([(0, 16, 2)], 3))
bad("prefill", "checkpoints", "unaligned", Checkpoints.build([(0, 17, 2)], 2))
bad("prefill", "checkpoints", "past_the_segment", Checkpoints.build([(1, 16, 2)], 2))
bad("prefill", "checkpoints", "offsets_one_short", lambda c: Checkpoints(c.begin, c.offset[:0], c.slot),
    named="checkpoints.offset")  # fmt: skip
bad("prefill", "checkpoints", "offsets_of_two_dimensions", lambda c: Checkpoints(c.begin, c.offset[None], c.slot[None]),
    named="checkpoints.slot")  # fmt: skip
bad("prefill", "checkpoints", "host_of_another_table",
    lambda c: Checkpoints(c.begin, c.offset, c.slot, Checkpoints.build([(0, 16, 2), (0, 16, 3)], 2).host),
    named="checkpoints.begin")  # fmt: skip
bad("prefill", "checkpoints", "slot_outside", Checkpoints.build([(0, 16, 4)], 2))
bad("prefill", "checkpoints", "none_with_a_pool", None, named="checkpoint_pool")
bad("prefill", "checkpoint_pool", "none", None)
bad("prefill", "checkpoint_pool", "other_layout", lambda x: x.transpose(-1, -2).contiguous())
bad("prefill", "checkpoint_pool", "half", lambda x: x.half(), TypeError)
bad("prefill", "workspace", "floats", torch.zeros(64), TypeError)
bad("prefill", "workspace", "two_dimensions", torch.zeros(8, 8, dtype=torch.uint8))
bad("prefill", "workspace", "unaligned", torch.zeros(1024, dtype=torch.uint8)[1:])
bad("prefill", "workspace", "another_device", torch.zeros(1024, dtype=torch.uint8, device="meta"))

for op in ("verify", "commit"):
    bad(op, "accepted", "one_short", lambda x: x[:1])
    bad(op, "accepted", "floats", lambda x: x.float(), TypeError)
    bad(op, "accepted", "none", None, TypeError)
for op in ("replay", "commit"):
    bad(op, "records", "half", lambda x: x.half(), TypeError)
    bad(op, "records", "fewer_slots", lambda x: x[:5])
    bad(op, "records", "narrow", lambda x: x[..., :-1].contiguous())
    bad(op, "records", "no_tokens", lambda x: x[:, :0])
    bad(op, "records", "expanded", expanded)
    bad(op, "records", "strided_inside", lambda x: x.transpose(1, 2).contiguous().transpose(1, 2))
for op in ("deferred", "commit"):
    bad(op, "held", "of_64_bits", lambda x: x.long(), TypeError)
    bad(op, "held", "a_list", [0, 0], TypeError)
    bad(op, "held", "fewer_slots", lambda x: x[:5])
    bad(op, "held", "one_a_slot", lambda x: x[:, 0].contiguous())
    bad(op, "held", "expanded", expanded)
    bad(op, "held", "strided", lambda x: x.t().contiguous().t())
    bad(op, "held", "another_device", meta)
bad("verify", "held", "without_records", torch.zeros(9, HV, dtype=torch.int32))
bad("commit", "records", "none", None, TypeError)
bad("commit", "state", "half", lambda x: x.half(), TypeError)

for op in (*KDA.split(), "chunk_kda", "fused_recurrent_kda"):
    bad_set(op, "bound_of_a_gate_that_is_off", "lower_bound",
            {"use_gate_in_kernel": False, "A_log": None, "dt_bias": None, "lower_bound": "-5"}, TypeError)  # fmt: skip
