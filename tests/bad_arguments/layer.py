"""A prefill with its neighbours in one call."""

from __future__ import annotations

import torch

from rapidkda.errors import BackendUnavailable

from .registry import HV, bad, bad_set, every_second, meta

OP = "prefill_layer"

bad(OP, "x", "three_dimensions", lambda x: x[None])
bad(OP, "x", "integers", lambda x: x.int(), TypeError)
bad(OP, "x", "strided_last", every_second)
bad(OP, "x", "no_values_left", lambda x: x[:, :32])
bad(OP, "x", "none", None, TypeError)
bad(OP, "g", "two_dimensions", lambda x: x[:, 0])
bad(OP, "g", "one_token_short", lambda x: x[:-1])
bad(OP, "beta", "one_head_short", lambda x: x[:, :-1])
bad(OP, "heads", "none_that_divides", 3)
bad(OP, "heads", "zero", 0)
bad(OP, "heads", "a_float", 2.0, TypeError)
bad(OP, "fuse", "an_int", 1, TypeError)
bad(OP, "neighbour_backend", "unknown", "fastest")
bad(OP, "neighbour_backend", "an_int", 3, TypeError)
bad(OP, "neighbour_backend", "that_cannot", "flashkda", BackendUnavailable)
bad(OP, "slots", "one_short", lambda x: x[:-1])
bad(OP, "state", "other_heads", lambda x: x[:, : HV - 1])
bad(OP, "conv_weight", "other_channels", lambda x: x[:-1])
bad(OP, "conv_weight", "none_with_a_pool", None, named="conv_state")
bad(OP, "conv_state", "other_channels", lambda x: x[:, :-1].contiguous())
bad(OP, "conv_state", "none_with_counts", lambda x: x[..., :-1].contiguous())
bad(OP, "conv_read_slots", "floats", torch.tensor([1.0, 1.0]), TypeError)
bad(OP, "accepted", "one_short", torch.tensor([1]))
bad(OP, "conv_out", "one_short", lambda x: x[:-1])
bad(OP, "conv_out", "another_dtype", lambda x: x.half(), TypeError)
bad(OP, "conv_checkpoint_pool", "other_channels", lambda x: x[:, :-1].contiguous())
bad(OP, "z", "other_shape", lambda x: x[:, :1])
bad(OP, "z", "none_with_a_weight", None, named="norm_weight")
bad(OP, "norm_weight", "of_all_heads", lambda x: x.repeat(HV))
bad(OP, "norm_weight", "another_device", meta)
bad(OP, "norm_weight", "none", None, TypeError)
bad(OP, "norm_eps", "zero", 0.0)
bad(OP, "norm_activation", "relu", "relu")
bad(OP, "out", "another_dtype", lambda x: x.half(), TypeError)
bad(OP, "channels_last", "of_a_channels_first_pool", True, named="conv_state")
bad_set(OP, "counts_without_a_convolution", "accepted",
        dict.fromkeys(("conv_weight", "conv_state", "conv_out", "conv_checkpoint_pool"))
        | {"accepted": torch.tensor([1, 1])})  # fmt: skip
for name, error in (("fastest", ValueError), ("flashkda", BackendUnavailable)):
    bad_set(OP, f"{name}_for_a_norm_alone", "neighbour_backend",
            dict.fromkeys(("conv_weight", "conv_state", "conv_out", "conv_checkpoint_pool"))
            | {"neighbour_backend": name}, error)  # fmt: skip
