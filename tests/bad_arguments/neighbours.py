"""The convolution and the gated norm."""

from __future__ import annotations

import torch

from .registry import H, K, T, bad, bad_set, every_second, meta, normal

bad("causal_conv", "x", "three_dimensions", lambda x: x[None])
bad("causal_conv", "x", "integers", lambda x: x.int(), TypeError)
bad("causal_conv", "x", "strided_last", every_second)
bad("causal_conv", "x", "none", None, TypeError)
bad("causal_conv", "weight", "other_channels", lambda x: x[:-1])
bad("causal_conv", "weight", "width_1", lambda x: x[:, :1])
bad("causal_conv", "weight", "width_9", lambda x: x.repeat(1, 3)[:, :9])
bad("causal_conv", "weight", "a_middle_axis", lambda x: x[:, None])
bad("causal_conv", "weight", "integers", lambda x: x.int(), TypeError)
bad("causal_conv", "weight", "another_device", meta)
bad("causal_conv", "bias", "one_short", lambda x: x[:-1])
bad("causal_conv", "bias", "a_number", 0.0, TypeError)
bad("causal_conv", "activation", "relu", "relu")
bad("causal_conv", "channels_last", "an_int", 1, TypeError)
bad("causal_conv", "channels_last", "of_a_channels_first_pool", True, named="state")
bad("causal_conv", "keep_all", "none", None, TypeError)
bad("causal_conv", "keep_all", "window_too_short", True, named="segments")
bad("causal_conv", "state", "window_too_short", lambda x: x[..., :-1].contiguous())
bad("causal_conv", "state", "other_channels", lambda x: x[:, :-1].contiguous())
bad("causal_conv", "state", "strided_inside", lambda x: x.transpose(1, 2).contiguous().transpose(1, 2))
bad("causal_conv", "state", "none_with_slots", None, named="slots")
bad("causal_conv", "accepted", "one_short", torch.tensor([1]))
bad("causal_conv", "accepted", "floats", torch.tensor([1.0, 1.0]), TypeError)
bad_set("causal_conv", "keep_all_without_a_pool", "keep_all", {"state": None, "slots": None, "keep_all": True})
bad_set("causal_conv", "accepted_without_a_pool", "accepted",
        {"state": None, "slots": None, "accepted": torch.tensor([1, 1])})  # fmt: skip

bad("gated_rms_norm", "x", "two_dimensions", lambda x: x[0])
bad("gated_rms_norm", "x", "integers", lambda x: x.int(), TypeError)
bad("gated_rms_norm", "z", "other_shape", lambda x: x[:, :1])
bad("gated_rms_norm", "z", "none", None, TypeError)
bad("gated_rms_norm", "z", "strided_last", every_second)
bad("gated_rms_norm", "weight", "of_all_heads", lambda x: x.repeat(H))
bad("gated_rms_norm", "weight", "another_device", meta)
bad("gated_rms_norm", "eps", "zero", 0.0)
bad("gated_rms_norm", "eps", "negative", -1e-5)
bad("gated_rms_norm", "eps", "a_string", "1e-5", TypeError)
bad("gated_rms_norm", "activation", "relu", "relu")
bad("gated_rms_norm", "segments", "a_list", [1, 2], TypeError)

buffer = normal(T + 1, H, K)
bad_set("gated_rms_norm", "x_a_token_after_out", "out", {"out": buffer[:-1], "x": buffer[1:]})
bad_set("gated_rms_norm", "out_a_token_after_x", "out", {"out": buffer[1:], "x": buffer[:-1]})
bad_set("gated_rms_norm", "out_in_other_strides_of_x", "out",
        {"out": buffer[:-1], "x": buffer.view(H, T + 1, K)[:, :-1].transpose(0, 1)})  # fmt: skip
