"""Unknown keywords, backends by name, and what only a debug run can see."""

from __future__ import annotations

import torch

from rapidkda import Checkpoints, Segments

from .registry import CALLS, GOOD, KDA, WHOLE, BadCall, T, bad, bad_set

for op in ("prefill", "chunk_kda", "fused_recurrent_kda"):
    for unknown in ("state_vfirst", "beta_is_raw", "head_first", "use_beta_sigmoid"):
        bad(op, unknown, "unknown_keyword", True, TypeError)
for op in (*KDA.split(), "commit", *WHOLE.split(), "causal_conv", "gated_rms_norm", "workspace_bytes", "resolve"):
    bad(op, "backend", "unknown", "fastest")
    bad(op, "backend", "a_number", 3, TypeError)
bad("workspace_bytes", "op", "unknown", "preffil")
bad("workspace_bytes", "sizes", "a_number", 4096, TypeError)
bad("resolve", "engine_flag", "unknown", "fla", named="--kda-prefill-backend")
bad("resolve", "additional_config", "unknown", {"kda_prefill_backend": "fla"}, named="additional_config")
bad("resolve", "additional_config", "a_string", "torch", TypeError)
for lower_bound in (0.0, -5.5, 1.0, float("nan")):
    bad("resolve", "lower_bound", f"is_{lower_bound}", lower_bound)
bad("resolve", "lower_bound", "a_string", "-5", TypeError)
bad_set("resolve", "two_sources_disagree", "engine flag", {"backend": "torch", "engine_flag": "triton"})

bad("prefill", "slots", "outside_the_pool", torch.tensor([3, 9]), debug=True)
bad("prefill decode causal_conv", "slots", "twice", torch.tensor([3, 3]), debug=True)
bad("prefill decode causal_conv", "read_slots", "negative", torch.tensor([3, -7]), debug=True)
bad("prefill decode causal_conv", "read_slots", "written_by_another_row", torch.tensor([1, 2]), debug=True)
bad("verify commit", "accepted", "too_many", torch.tensor([1, 4]), debug=True)
bad("verify commit", "accepted", "negative", torch.tensor([-1, 1]), debug=True)
bad("deferred commit", "held", "past_the_records", torch.full((9, 2), 2, dtype=torch.int32), debug=True)
bad("deferred commit", "held", "of_no_request", torch.full((9, 2), 2**31 - 1, dtype=torch.int32), debug=True)
bad("causal_conv", "accepted", "too_many", torch.tensor([1, 3]), debug=True)
bad(WHOLE, "cu_seqlens_cpu", "other_values", torch.tensor([0, 19, 24]), debug=True)
for what, table in {
    "overlapping": ([0, 3], [4, 2]),
    "past_the_end": ([0, 20], [4, 9]),
    "negative": ([-1, 4], [2, 2]),
}.items():
    first, length = (torch.tensor(x, dtype=torch.int32) for x in table)
    bad("prefill causal_conv", "segments", f"{what}_on_the_device", Segments(first, length, T), debug=True)
bad("prefill", "segments", "max_length_too_small", lambda s: Segments(s.first_token, s.length, 3), debug=True)
for what, columns in {
    "unaligned": ([0, 1, 1], [17], [2]),
    "past_the_segment": ([0, 0, 1], [16], [2]),
    "at_the_start": ([0, 1, 1], [0], [2]),
    "slot_outside": ([0, 1, 1], [16], [4]),
    "slot_negative": ([0, 1, 1], [16], [-1]),
    "begin_decreasing": ([0, 1, 0], [16], [2]),
    "begin_past_the_end": ([0, 1, 2], [16], [2]),
}.items():
    begin, offset, slot = (torch.tensor(x, dtype=torch.int32) for x in columns)
    bad("prefill", "checkpoints", f"{what}_on_the_device", Checkpoints(begin, offset, slot), debug=True)
bad("prefill", "checkpoints", "host_values_of_another_step",
    lambda c: Checkpoints(c.begin, c.offset, c.slot, Checkpoints.build([(0, 16, 3)], 2).host), debug=True)  # fmt: skip
bad("prefill", "segments", "host_values_of_another_step",
    lambda s: Segments(s.first_token, s.length, 20, Segments.from_lengths([19, 5]).host), debug=True)  # fmt: skip
ACTIVATED = {"use_gate_in_kernel": False, "A_log": None, "dt_bias": None, "lower_bound": None}
for op in (*KDA.split(), *WHOLE.split()):
    growing = ACTIVATED | {"g": GOOD[op][1]()["g"].abs() + 3.0}
    CALLS.append(BadCall(f"{op}-g-above_0", op, lambda a, growing=growing: a | growing, ValueError, "g", True))
