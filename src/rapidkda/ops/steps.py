"""KDA over the segments of a serving step: prefill, decode, verify, commit. Pools are updated in place.

Inputs are strided views of the engine's buffers on the step's token axis; nothing is gathered or copied.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .. import checks, env
from ..backends.base import Request
from ..device import Device
from ..problem import CommitCall, DecodeCall, PrefillCall, Rollback, Tokens, VerifyCall
from ..segments import Checkpoints, Segments
from . import bind, bind_requests, kinds, tables
from .choose import BackendLike, choose, resolved, workspace_needed


def check_prefill(
    inputs: tuple[Any, ...],
    segments: Segments,
    state: Tensor | None,
    slots: Tensor | None,
    read_slots: Tensor | None,
    has_initial_state: Tensor | None,
    state_v_first: bool,
    pad_slot: int,
    checkpoints: Checkpoints | None,
    checkpoint_pool: Tensor | None,
) -> tuple[bind.Terms, Tokens, Segments, int, Tensor | None, Checkpoints | None]:
    """Check the arguments of a prefill but `out` and `workspace`; returns those that have a second form, in the one of
    calls. `inputs`: what `bind.terms` takes."""
    terms = bind.terms(*inputs)
    tokens = terms.tokens(*inputs[:7])
    device = tokens.q.device
    checks.boolean("state_v_first", state_v_first)
    segments = bind_requests.segment_table(segments, tokens.count, device)
    bind_requests.sequences_of_prefill("segments", segments.count)
    pad_slot = bind_requests.pad_marker(pad_slot)
    if state is None:
        for name, value in (("slots", slots), ("read_slots", read_slots), ("has_initial_state", has_initial_state)):
            if value is not None:
                raise ValueError(f"{name} must be None without a state pool, got a tensor")
    else:
        bind_requests.pool("state", state, tokens, state_v_first)
        if slots is None:
            raise ValueError("slots must be given with a state pool, got None")
        bind_requests.slots_of_segments(slots, read_slots, segments.count, state.shape[0], pad_slot, device)
        has_initial_state = bind_requests.flags("has_initial_state", has_initial_state, segments.count, device)
    if checkpoint_pool is not None:
        bind_requests.pool("checkpoint_pool", checkpoint_pool, tokens, state_v_first)
    checkpoints = bind_requests.checkpoints(checkpoints, checkpoint_pool, segments, device)
    bind.gate_values(tokens, segments)
    return terms, tokens, segments, pad_slot, has_initial_state, checkpoints


def prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    segments: Segments,
    state: Tensor | None = None,
    slots: Tensor | None = None,
    read_slots: Tensor | None = None,
    has_initial_state: Tensor | None = None,
    out: Tensor | None = None,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    lower_bound: float | None = None,
    scale: float | None = None,
    use_qk_l2norm_in_kernel: bool = True,
    use_gate_in_kernel: bool = True,
    use_beta_sigmoid_in_kernel: bool = True,
    allow_neg_eigval: bool = False,
    state_v_first: bool = True,
    pad_slot: int = -1,
    checkpoints: Checkpoints | None = None,
    checkpoint_pool: Tensor | None = None,
    workspace: Tensor | None = None,
    backend: BackendLike = None,
) -> Tensor:
    """Chunked prefill of the segments of a step, states updated in place in the pool.

    Inputs are raw by default (logits of the gate and of beta, q and k before normalisation), strided views of the
    engine's buffers; nothing is copied. Each segment starts from its slot where `has_initial_state` is true, else from
    zero, and leaves its last state in its slot. An empty segment leaves its state as it starts.

    Args:
        q, k: [T, H, K]; v: [T, HV, V]; g: [T, HV, K]; beta: [T, HV]. As in `chunk_kda`, without the batch dimension;
            the last dimension of q, k, v and g is dense.
        segments: which tokens belong to which request, at most 65,535 of them; tokens of no segment are left alone.
        state: pool [S, HV, V, K] ([S, HV, K, V] without `state_v_first`), float32 or bfloat16; slot stride free.
            None: every segment starts from zero and no state is kept.
        slots: int32 or int64 [N], any stride; row of the pool of each segment. `pad_slot`, or a row outside the pool,
            marks padding: no state is touched, the segment's output rows are zero. No two segments may share a slot.
        read_slots: where to start from when it differs from `slots`. Segments may share one, but none may read a slot
            that another one writes in the same call.
        has_initial_state: bool [N]; default all true.
        out: [T, HV, V], dtype of v; default newly allocated, with zeros in rows that no segment covers.
        checkpoints, checkpoint_pool: states to export at token offsets (multiples of 16) while the segment runs.
        workspace: uint8 [workspace_bytes("prefill", ...)], 256-byte aligned; default: allocated by the backend.

    Returns:
        `out`.
    """
    inputs = (q, k, v, g, beta, state)
    options = (
        lower_bound,
        scale,
        use_qk_l2norm_in_kernel,
        use_gate_in_kernel,
        use_beta_sigmoid_in_kernel,
        allow_neg_eigval,
    )
    within = checkpoint_pool is state  # told apart by the kind: guards of torch take no tensor twice
    exported = None if within else checkpoint_pool
    key, kind, given = kinds.find(
        "prefill",
        backend,
        env.PREFILL_BACKEND,
        segments,
        checkpoints,
        (*inputs, A_log, dt_bias, slots, read_slots, has_initial_state, out, exported, workspace),
        (*options, state_v_first, pad_slot, within),
    )
    if kind is None:
        terms, tokens, segments, pad_slot, has_initial_state, checkpoints = check_prefill(
            (q, k, v, g, beta, A_log, dt_bias, *options),
            segments,
            state,
            slots,
            read_slots,
            has_initial_state,
            state_v_first,
            pad_slot,
            checkpoints,
            checkpoint_pool,
        )
        device = q.device
        covered = bind.covers(segments, tokens.count)
        if out is not None:
            bind.output(out, tuple(v.shape), "[T, HV, V]", v, inputs)
        chosen = choose("prefill", tokens, state, backend, checkpoints is not None)
        bind.workspace(workspace, workspace_needed(chosen, "prefill", tokens, segments), device)
        kind = kinds.keep(key, kinds.Kind(chosen, terms, covered))
    else:
        if out is not None:
            if kind.repeats(given, segments, checkpoints):
                return out
            bind.apart(out, inputs)
        if workspace is not None:
            bind.aligned(workspace)
        tokens = kind.tokens(q, k, v, g, beta, A_log, dt_bias)
    if out is None:
        out = bind.new_output(v, kind.covered)
    call = PrefillCall(
        tokens=tokens,
        segments=segments,
        out=out,
        initial=state,
        final=state,
        read_slots=slots if read_slots is None else read_slots,
        write_slots=slots,
        has_initial_state=has_initial_state,
        state_v_first=state_v_first,
        pad_slot=pad_slot,
        checkpoints=checkpoints,
        checkpoint_pool=checkpoint_pool,
        workspace=workspace,
    )
    call.memo = kind.memo
    kind.backend.prefill(call)
    kind.learn(call.repeat, given, segments, checkpoints, out, inputs, workspace)
    return out


def decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    state: Tensor,
    slots: Tensor,
    read_slots: Tensor | None = None,
    segments: Segments | None = None,
    out: Tensor | None = None,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    lower_bound: float | None = None,
    scale: float | None = None,
    use_qk_l2norm_in_kernel: bool = True,
    use_gate_in_kernel: bool = True,
    use_beta_sigmoid_in_kernel: bool = True,
    allow_neg_eigval: bool = False,
    state_v_first: bool = True,
    pad_slot: int = -1,
    backend: BackendLike = None,
) -> Tensor:
    """One token for each request, states updated in place in the pool.

    Arguments as in `prefill`. Without `segments`, row n of the inputs is request n; with it, request n is the token
    `segments.first_token[n]` (lengths of at most 1). Returns `out` [T, HV, V].
    """
    inputs = (q, k, v, g, beta, state)
    options = (
        lower_bound,
        scale,
        use_qk_l2norm_in_kernel,
        use_gate_in_kernel,
        use_beta_sigmoid_in_kernel,
        allow_neg_eigval,
    )
    key, kind, given = kinds.find(
        "decode",
        backend,
        env.DECODE_BACKEND,
        segments,
        None,
        (*inputs, A_log, dt_bias, slots, read_slots, out),
        (*options, state_v_first, pad_slot),
    )
    if kind is None:
        terms = bind.terms(q, k, v, g, beta, A_log, dt_bias, *options)
        tokens = terms.tokens(q, k, v, g, beta, A_log, dt_bias)
        device = q.device
        checks.boolean("state_v_first", state_v_first)
        if segments is None:
            segments = tables.equal(tokens.count, 1, device)
        else:
            segments = bind_requests.segment_table(segments, tokens.count, device, max_length=1)
        pad_slot = bind_requests.pad_marker(pad_slot)
        bind_requests.pool("state", state, tokens, state_v_first)
        bind_requests.slots_of_segments(slots, read_slots, segments.count, state.shape[0], pad_slot, device)
        bind.gate_values(tokens, segments)
        covered = bind.covers(segments, tokens.count)
        if out is not None:
            bind.output(out, tuple(v.shape), "[T, HV, V]", v, inputs)
        kind = kinds.keep(key, kinds.Kind(choose("decode", tokens, state, backend), terms, covered))
    else:
        if segments is None:
            segments = tables.equal(q.shape[0], 1, q.device)
        if out is not None:
            if kind.repeats(given, segments, None):
                return out
            bind.apart(out, inputs)
        tokens = kind.tokens(q, k, v, g, beta, A_log, dt_bias)
    if out is None:
        out = bind.new_output(v, kind.covered)
    call = DecodeCall(
        tokens=tokens,
        segments=segments,
        out=out,
        pool=state,
        read_slots=slots if read_slots is None else read_slots,
        write_slots=slots,
        state_v_first=state_v_first,
        pad_slot=pad_slot,
    )
    call.memo = kind.memo
    kind.backend.decode(call)
    kind.learn(call.repeat, given, segments, None, out, inputs)
    return out


def verify(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    segments: Segments,
    state: Tensor,
    slots: Tensor,
    accepted: Tensor,
    records: Tensor | None = None,
    held: Tensor | None = None,
    out: Tensor | None = None,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    lower_bound: float | None = None,
    scale: float | None = None,
    use_qk_l2norm_in_kernel: bool = True,
    use_gate_in_kernel: bool = True,
    use_beta_sigmoid_in_kernel: bool = True,
    allow_neg_eigval: bool = False,
    state_v_first: bool = True,
    pad_slot: int = -1,
    backend: BackendLike = None,
) -> Tensor:
    """Speculative verification: segment n holds the last accepted token and its k_n drafts, k_n <= k_max.

    `accepted[n]` is how many tokens of the request's previous verify step were accepted, 1 to 1 + k; 0 says that the
    previous step was no verify step. Values outside are clamped (and refused in debug mode, as are more records than
    `held` and `accepted` can name together).

    Three forms of rollback, with the same results:
        slot per position (`records` is None): slots [N, 1 + k_max]; start from the state in slots[n, accepted - 1]
            (slots[n, 0] for 0), store the state after token j in slots[n, j].
        replay (`records` given): slots [N]; apply the first `accepted` records to the state of the slot, store it,
            run the tokens from it and store their records instead of their states.
            records: float32 [S, 1 + k_max, HV, 2K + V], one row a pool slot: k | log decay | correction.
        replay with deferred states (`held` given too): the state is stored only where the records are full, and those
            of accepted tokens are kept and applied anew until then. With two steps' records a slot or more, that moves
            less memory, which is what limits a GPU.
            records: float32 [S, R, HV, 2K + V] with R >= 1 + k_max.
            held: int32 [S, HV], contiguous, kept by the operator: records before those of the last step. Needs no
            initial value: `accepted` 0 starts anew. The state of the slot is that of `commit` with the same `held`.

    Other arguments as in `prefill`. Returns `out` [T, HV, V].
    """
    inputs = (q, k, v, g, beta, state)
    options = (
        lower_bound,
        scale,
        use_qk_l2norm_in_kernel,
        use_gate_in_kernel,
        use_beta_sigmoid_in_kernel,
        allow_neg_eigval,
    )
    key, kind, given = kinds.find(
        "verify",
        backend,
        env.DECODE_BACKEND,
        segments,
        None,
        (*inputs, A_log, dt_bias, slots, accepted, records, held, out),
        (*options, state_v_first, pad_slot),
    )
    if kind is None:
        terms = bind.terms(q, k, v, g, beta, A_log, dt_bias, *options)
        tokens = terms.tokens(q, k, v, g, beta, A_log, dt_bias)
        device = q.device
        checks.boolean("state_v_first", state_v_first)
        pad_slot = bind_requests.pad_marker(pad_slot)
        bind_requests.pool("state", state, tokens, state_v_first)
        if records is None:
            checks.tensor("slots", slots)
            if slots.ndim != 2 or slots.shape[1] < 1:
                raise ValueError(f"slots must have shape [N, 1 + k_max] without records, got {list(slots.shape)}")
            most = slots.shape[1]
        else:
            inner = (tokens.value_heads, 2 * tokens.key_dim + tokens.value_dim)
            most = bind_requests.records(records, state.shape[0], inner, device).shape[1]
        bind_requests.held(held, records, device)
        segments = bind_requests.segment_table(segments, tokens.count, device, max_length=most)
        if records is None:
            bind_requests.slots("slots", slots, (segments.count, most), "[N, 1 + k_max]", device)
        else:
            bind_requests.slots("slots", slots, (segments.count,), "[N]", device)
        bind_requests.slot_values("slots", slots, state.shape[0], pad_slot, written=True)
        bind_requests.accepted(accepted, segments.count, most, device, held, slots, pad_slot)
        bind.gate_values(tokens, segments)
        covered = bind.covers(segments, tokens.count)
        if out is not None:
            bind.output(out, tuple(v.shape), "[T, HV, V]", v, inputs)
        rollback: Rollback = "slots" if records is None else "replay"
        chosen = choose(
            "verify",
            tokens,
            state,
            backend,
            rollback=rollback,
            deferred=held is not None,
            state_v_first=state_v_first,
            records=None if records is None else most,
            most_tokens=segments.max_length,
        )
        kind = kinds.keep(key, kinds.Kind(chosen, terms, covered))
    else:
        if out is not None:
            if kind.repeats(given, segments, None):
                return out
            bind.apart(out, inputs)
        tokens = kind.tokens(q, k, v, g, beta, A_log, dt_bias)
    if out is None:
        out = bind.new_output(v, kind.covered)
    call = VerifyCall(
        tokens=tokens,
        segments=segments,
        out=out,
        pool=state,
        slots=slots,
        accepted=accepted,
        records=records,
        held=held,
        state_v_first=state_v_first,
        pad_slot=pad_slot,
    )
    call.memo = kind.memo
    kind.backend.verify(call)
    kind.learn(call.repeat, given, segments, None, out, inputs)
    return out


def commit(
    *,
    state: Tensor,
    records: Tensor,
    slots: Tensor,
    accepted: Tensor,
    held: Tensor | None,
    state_v_first: bool = True,
    pad_slot: int = -1,
    backend: BackendLike = None,
) -> None:
    """Apply the accepted records of each slot to its state, in place (replay form of `verify`).

    Used when a request leaves speculation, once: its next verification says `accepted` 0. `accepted` 0 leaves a state
    bit-unchanged. Shapes as in `verify`. `held` as the verifications had it, None only if they had none: nothing else
    tells how many records count. It is read only.
    """
    key, kind, given = kinds.find(
        "commit",
        backend,
        env.DECODE_BACKEND,
        None,
        None,
        (state, records, slots, accepted, held),
        (state_v_first, pad_slot),
    )
    if kind is None:
        checks.tensor("state", state)
        checks.tensor("records", records)
        checks.boolean("state_v_first", state_v_first)
        if state.ndim != 4:
            raise ValueError(f"state must have 4 dimensions [S, HV, V, K] or [S, HV, K, V], got {list(state.shape)}")
        value_dim, key_dim = state.shape[2:] if state_v_first else (state.shape[3], state.shape[2])
        checks.dtype("state", state, checks.STATE_DTYPES)
        checks.dense_inner("state", state)
        checks.no_self_overlap("state", state)
        bind_requests.records(records, state.shape[0], (state.shape[1], 2 * key_dim + value_dim), state.device)
        bind_requests.held(held, records, state.device)
        checks.tensor("slots", slots)
        if slots.ndim != 1:
            raise ValueError(f"slots must have shape [N], got {list(slots.shape)}")
        bind_requests.slots("slots", slots, (None,), "[N]", state.device)
        pad_slot = bind_requests.pad_marker(pad_slot)
        bind_requests.slot_values("slots", slots, state.shape[0], pad_slot, written=True)
        bind_requests.accepted(accepted, slots.shape[0], records.shape[1], state.device, held, slots, pad_slot)
        # The verifications that left the records are not known here: asked is the least that any of them may have.
        device = Device.of(state.device)
        request = Request(
            "verify",
            device,
            key_dim=key_dim,
            value_dim=value_dim,
            state_dtype=state.dtype,
            deferred=held is not None,
            state_v_first=state_v_first,
            records=records.shape[1],
        )
        kind = kinds.keep(key, kinds.Kind(resolved(request, backend, env.DECODE_BACKEND)))
    elif kind.repeats(given, None, None):
        return
    call = CommitCall(state, records, held, slots, accepted, state_v_first, pad_slot)
    call.memo = kind.memo
    kind.backend.commit(call)
    kind.learn(call.repeat, given, None, None)
