"""Operands and gate of the KDA operators."""

from __future__ import annotations

import torch

from .registry import KDA, WHOLE, H, V, bad, bad_set, every_second, meta

for name in ("q", "k", "v", "g", "beta"):
    bad(f"{KDA} {WHOLE}", name, "no_tensor", [1.0], TypeError)
    bad(f"{KDA} chunk_kda", name, "integers", lambda x: x.int(), TypeError)
for name in ("k", "v", "g", "beta"):
    bad(f"{KDA} {WHOLE}", name, "another_device", meta)
    bad("prefill chunk_kda", name, "too_few_tokens", lambda x: x[:-1] if x.shape[0] > 1 else x[:, :-1])
for name in ("q", "k", "v", "g"):
    bad(KDA, name, "strided_last", every_second)
for name in ("k", "v"):
    bad("prefill", name, "another_dtype", lambda x: x.bfloat16(), TypeError)
bad("prefill", "q", "two_dimensions", lambda x: x[0])
bad(WHOLE, "q", "three_dimensions", lambda x: x[0])
bad(WHOLE, "beta", "four_dimensions", lambda x: x[..., None])
bad("prefill", "k", "more_heads", lambda x: x.repeat(1, 2, 1))
bad("prefill", "k", "another_dim", lambda x: x.repeat(1, 1, 2))
bad("prefill", "v", "heads_no_multiple", lambda x: x[:, :3])
bad("prefill", "v", "no_heads", lambda x: x[:, :0])
bad("prefill", "v", "dim_above_256", lambda x: x.repeat(1, 1, 50))
bad("prefill", "v", "dim_0", lambda x: x[..., :0])
bad("prefill", "g", "key_heads_only", lambda x: x[:, :H])
bad("prefill", "g", "value_dim", lambda x: x[..., :V])
bad("prefill", "g", "another_half_dtype", lambda x: x.half(), TypeError)
bad("prefill", "beta", "key_heads_only", lambda x: x[:, :H])
bad("prefill", "beta", "a_channel_axis", lambda x: x[..., None])

bad(f"{KDA} {WHOLE}", "A_log", "one_entry", lambda x: x[:1])
bad(KDA, "A_log", "no_tensor", 0.5, TypeError)
bad(KDA, "A_log", "integers", lambda x: x.int(), TypeError)
bad(KDA, "A_log", "another_device", meta)
bad("prefill", "A_log", "a_row_and_a_column", lambda x: x[None, :, None])
bad(f"{KDA} {WHOLE}", "dt_bias", "heads_only", lambda x: x[:, 0])
bad(f"{KDA} {WHOLE}", "dt_bias", "one_short", lambda x: x.flatten()[:-1])
bad("prefill", "dt_bias", "transposed", lambda x: x.t())
bad("prefill", "dt_bias", "another_device", meta)
for bound in (-5.01, 0.0, 1.0, float("nan"), float("-inf")):
    bad(f"{KDA} {WHOLE}", "lower_bound", str(bound), bound)
bad(f"{KDA} {WHOLE}", "lower_bound", "a_string", "-5", TypeError)
bad("prefill", "lower_bound", "a_bool", True, TypeError)
bad_set("prefill", "no_amplitude_without_a_bound", "A_log", {"A_log": None, "lower_bound": None})
bad_set("prefill", "amplitude_of_an_activated_gate", "A_log", {"use_gate_in_kernel": False, "dt_bias": None})
bad_set("prefill", "bias_of_an_activated_gate", "dt_bias", {"use_gate_in_kernel": False, "A_log": None})
bad_set("prefill", "doubled_activated_beta", "allow_neg_eigval",
        {"use_beta_sigmoid_in_kernel": False, "allow_neg_eigval": True})  # fmt: skip
for name in (
    "use_qk_l2norm_in_kernel",
    "use_gate_in_kernel",
    "use_beta_sigmoid_in_kernel",
    "allow_neg_eigval",
    "state_v_first",
):
    bad(f"{KDA} {WHOLE}", name, "an_int", 1, TypeError)
    bad(f"{KDA} {WHOLE}", name, "none", None, TypeError)
bad(f"{KDA} {WHOLE}", "scale", "nan", float("nan"))
bad(f"{KDA} {WHOLE}", "scale", "a_tensor", torch.tensor(0.1), TypeError)
bad(f"{KDA} commit causal_conv", "pad_slot", "a_float", 0.0, TypeError)
bad(f"{KDA} commit causal_conv", "pad_slot", "none", None, TypeError)
bad(f"{KDA} prefill_layer commit causal_conv", "pad_slot", "of_33_bits", 2**31)
bad(f"{KDA} prefill_layer commit causal_conv", "pad_slot", "below_32_bits", -(2**31) - 1)
