import torch

from rapidkda import reference


def causal_conv1d_fn(
    x,
    weight,
    bias,
    conv_states,
    query_start_loc,
    cache_indices=None,
    has_initial_state=None,
    activation="silu",
    pad_slot_id=-1,
    metadata=None,
):
    """x [C, T]; conv_states [slots, C, L], updated in place; returns [C, T]."""
    out = torch.empty_like(x)
    width = weight.shape[1]
    ends = query_start_loc.tolist()
    for n, (start, end) in enumerate(zip(ends[:-1], ends[1:], strict=True)):
        if start == end:
            continue
        slot = int(cache_indices[n])
        history = conv_states[slot, :, : width - 1].T if has_initial_state[n] else None
        y, last = reference.causal_conv(x[:, start:end].T, weight, bias, history)
        out[:, start:end] = y.T.to(x.dtype)
        conv_states[slot, :, : width - 1] = last.T.to(conv_states.dtype)
    return out
