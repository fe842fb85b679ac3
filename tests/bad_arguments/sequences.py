"""chunk_kda and fused_recurrent_kda over whole sequences."""

from __future__ import annotations

import torch

from .registry import WHOLE, bad, bad_set, meta, whole

bad(WHOLE, "cu_seqlens", "not_to_the_end", torch.tensor([0, 20, 23]))
bad(WHOLE, "cu_seqlens", "past_the_end", torch.tensor([0, 20, 25]))
bad(WHOLE, "cu_seqlens", "not_from_0", torch.tensor([1, 20, 24]))
bad(WHOLE, "cu_seqlens", "decreasing", torch.tensor([0, 30, 24]))
bad(WHOLE, "cu_seqlens", "floats", torch.tensor([0.0, 20.0, 24.0]), TypeError)
bad(WHOLE, "cu_seqlens", "a_list", [0, 20, 24], TypeError)
bad(WHOLE, "cu_seqlens", "one_entry", torch.tensor([0]))
bad(WHOLE, "cu_seqlens", "two_dimensions", torch.tensor([[0, 20, 24]]))
bad(WHOLE, "cu_seqlens", "none_with_a_host_copy", None, named="initial_state")
bad(WHOLE, "cu_seqlens", "another_device", meta)
bad(WHOLE, "cu_seqlens", "of_more_than_16_bits", torch.tensor([0] * 65536 + [24]))
bad(WHOLE, "cu_seqlens_cpu", "one_short", torch.tensor([0, 24]))
bad(WHOLE, "cu_seqlens_cpu", "a_list", [0, 20, 24], TypeError)
bad(WHOLE, "initial_state", "one_sequence", lambda x: x[:1])
bad(WHOLE, "initial_state", "other_layout", lambda x: x.transpose(-1, -2))
bad(WHOLE, "initial_state", "half", lambda x: x.half(), TypeError)
bad(WHOLE, "initial_state", "no_tensor", 0, TypeError)
bad(WHOLE, "output_final_state", "an_int", 1, TypeError)
bad("chunk_kda", "chunk_size", "16", 16)
bad("chunk_kda", "cp_context", "something", object())
bad("chunk_kda", "safe_gate", "an_int", 1, TypeError)
bad("chunk_kda", "return_intermediate_states", "none", None, TypeError)
bad("chunk_kda", "disable_recompute", "none", None, TypeError)
bad("chunk_kda", "use_graph", "none", None, TypeError)
bad_set("chunk_kda", "max_num_seqs_of_another_batch", "max_num_seqs", {"use_graph": True, "max_num_seqs": 3})
bad_set("chunk_kda", "safe_gate_without_a_bound", "lower_bound", {"safe_gate": True, "lower_bound": None})
bad_set("chunk_kda", "both_names_of_the_layout", "transpose_state_layout",
        {"state_v_first": True, "transpose_state_layout": True})  # fmt: skip
for op in WHOLE.split():
    operands = {
        name: whole()[name].repeat(2, *(1 for _ in whole()[name].shape[1:])) for name in ("q", "k", "v", "g", "beta")
    }
    bad_set(op, "packed_batch_of_two", "cu_seqlens", operands)
    bad_set(op, "host_lengths_alone", "cu_seqlens_cpu",
            {"cu_seqlens": None, "initial_state": None, "cu_seqlens_cpu": torch.tensor([0, 24])})  # fmt: skip
