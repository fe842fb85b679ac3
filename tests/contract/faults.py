"""A catalogue of faults, each a patch of the torch backend, of kinds that shipped in real systems.

Each wraps a method of the backend and changes the validated call before it, or the memory after it, so that none
depends on how the backend works inside; the numerical ones put a textbook chunked form with one wrong step in its place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from rapidkda import reference
from rapidkda.backends.torch import TorchBackend
from rapidkda.problem import CommitCall, ConvCall, DecodeCall, Gate, NormCall, PrefillCall, VerifyCall
from rapidkda.segments import Checkpoints, Segments

from . import textbook
from .textbook import log_decay, write_strength

KdaCall = Any  # PrefillCall, DecodeCall or VerifyCall: they share tokens, segments and out
Method = Callable[[TorchBackend, Any], None]


@dataclass(frozen=True)
class Fault:
    """A fault: `install()` breaks the torch backend while it is entered; some case of `caught_by` must then fail."""

    name: str
    install: Callable[[], AbstractContextManager[None]]
    caught_by: tuple[str, ...]


FAULTS: dict[str, Fault] = {}


def wraps(*methods: str, caught_by: tuple[str, ...]) -> Callable[[Callable[[Method, Any], None]], None]:
    """Register a fault that replaces backend methods by `broken(original, call)`."""

    def register(broken: Callable[[Method, Any], None]) -> None:
        @contextmanager
        def install() -> Iterator[None]:
            patches = [patch.object(TorchBackend, name, as_method(name, broken)) for name in methods]
            for each in patches:
                each.start()
            try:
                yield
            finally:
                for each in patches:
                    each.stop()

        FAULTS[broken.__name__] = Fault(broken.__name__, install, caught_by)

    return register


def as_method(name: str, broken: Callable[[Any, Any], None]) -> Method:
    original = getattr(TorchBackend, name)

    def method(self: TorchBackend, call: Any) -> None:
        broken(lambda changed: original(self, changed), call)

    return method


def replaces(module: Any, name: str, *, caught_by: tuple[str, ...]) -> Callable[[Callable[..., Any]], None]:
    """Register a fault that replaces one function; the replacement gets the original as its first argument."""

    def register(broken: Callable[..., Any]) -> None:
        original = getattr(module, name)

        @contextmanager
        def install() -> Iterator[None]:
            with patch.object(module, name, lambda *args, **kwargs: broken(original, *args, **kwargs)):
                yield

        FAULTS[broken.__name__] = Fault(broken.__name__, install, caught_by)

    return register


KDA = ("prefill", "decode", "verify")


def with_tokens(call: KdaCall, **changes: Any) -> KdaCall:
    return replace(call, tokens=replace(call.tokens, **changes))


def with_gate(call: KdaCall, **changes: Any) -> KdaCall:
    return with_tokens(call, gate=replace(call.tokens.gate, **changes))


def lengths(call: Any) -> list[int]:
    return [int(n) for n in call.segments.host_values()[1]]


# Activations


@wraps(*KDA, caught_by=("B11",))
def beta_never_through_the_sigmoid(original: Any, call: KdaCall) -> None:
    original(with_tokens(call, beta_logits=False))


@wraps(*KDA, caught_by=("B11",))
def beta_twice_through_the_sigmoid(original: Any, call: KdaCall) -> None:
    original(with_tokens(call, beta=torch.sigmoid(call.tokens.beta)))


@wraps(*KDA, caught_by=("B11",))
def beta_rounded_to_bfloat16(original: Any, call: KdaCall) -> None:
    rounded = write_strength(call.tokens).bfloat16().float()
    original(with_tokens(call, beta=rounded, beta_logits=False))


@wraps(*KDA, caught_by=("options",))
def negative_eigenvalues_ignored(original: Any, call: KdaCall) -> None:
    original(with_tokens(call, beta_scale=1.0))


@wraps(*KDA, caught_by=("options",))
def scale_ignored(original: Any, call: KdaCall) -> None:
    original(with_tokens(call, scale=call.tokens.key_dim**-0.5))


@wraps(*KDA, caught_by=("regimes-every_regime[regime=slow",))
def dt_bias_ignored(original: Any, call: KdaCall) -> None:
    original(with_gate(call, dt_bias=None))


@wraps("prefill", caught_by=("regimes-every_regime[regime=fast",))
def gate_amplitude_ignored(original: Any, call: PrefillCall) -> None:
    original(with_gate(call, A_log=None))


@wraps("decode", caught_by=("decode-every_regime_of_one_step[regime=unbounded",))
def gate_amplitude_ignored_in_decode(original: Any, call: DecodeCall) -> None:
    original(with_gate(call, A_log=None))


@wraps(*KDA, caught_by=("shapes", "decode-batch_sizes"))
def keys_and_queries_not_normalised(original: Any, call: KdaCall) -> None:
    original(with_tokens(call, l2norm=False))


@wraps(*KDA, caught_by=("B09",))
def infinite_amplitude_meets_a_zero_logit(original: Any, call: KdaCall) -> None:
    gate = call.tokens.gate
    if gate.kind != "bounded" or gate.A_log is None:
        return original(call)
    x = call.tokens.g.float() + (0.0 if gate.dt_bias is None else gate.dt_bias)
    g = gate.lower_bound * torch.sigmoid(gate.A_log.exp().unsqueeze(-1) * x)
    return original(with_tokens(call, g=g, gate=Gate("log_decay")))


# Arithmetic of the chunked form


def textbook_fault(name: str, *caught_by: str, **switches: Any) -> None:
    """Register a fault that replaces prefill by the textbook form with these switches."""

    def broken(original: Any, call: PrefillCall) -> None:
        if call.checkpoints is None:
            textbook.prefill(call, textbook.Switches(**switches))
        else:
            original(call)

    broken.__name__ = name
    wraps("prefill", caught_by=caught_by)(broken)


textbook_fault("inverse_by_powers_in_float16", "B01", "B02", power_inverse=True)
textbook_fault("exponents_anchored_in_the_middle", "B08", anchor=7, half_factors=True)
textbook_fault("exponents_anchored_at_the_start", "B05", "B06", anchor=0)
textbook_fault("rows_past_the_end_not_masked", "B16", "B20", unmasked_tail=True)
textbook_fault(
    "state_thought_forgotten_by_summed_gates", "regimes-every_regime[regime=staggered", summed_gate_bound=True
)


@wraps("decode", caught_by=("decode-layouts_and_state_dtypes",))
def decay_after_the_delta_rule(original: Any, call: DecodeCall) -> None:
    late = log_decay(call.tokens).exp()
    original(with_tokens(call, g=torch.zeros_like(call.tokens.g), gate=Gate("log_decay")))
    for first, slot in zip(call.segments.host_values()[0].tolist(), call.write_slots.tolist(), strict=True):
        call.pool[slot] *= late[first].unsqueeze(1 if call.state_v_first else 2).to(call.pool.dtype)


@wraps(*KDA, caught_by=("shapes",))
def operands_rounded_to_bfloat16(original: Any, call: KdaCall) -> None:
    tokens = call.tokens
    original(with_tokens(call, **{name: getattr(tokens, name).bfloat16().to(tokens.q.dtype) for name in ("q", "k")}))


@wraps("prefill", caught_by=("shapes", "B36"))
def one_head_two_percent_off(original: Any, call: PrefillCall) -> None:
    original(call)
    call.out[:, -1] *= 1.02


@wraps("prefill", caught_by=("B19", "B29"))
def different_bits_every_run(original: Any, call: PrefillCall) -> None:
    original(call)
    call.out.mul_(1 + 1e-6 * torch.rand(()).to(call.out.dtype))


@wraps("decode", caught_by=("B13",))
def float32_state_rounded_every_step(original: Any, call: DecodeCall) -> None:
    original(call)
    rows = call.write_slots.long()
    call.pool[rows] = call.pool[rows].bfloat16().to(call.pool.dtype)


# States: carried, laid out, addressed


def _second_part(call: PrefillCall, change: Callable[[Tensor], Tensor], original: Any, tokens: int = 64) -> None:
    """Run everything right, then the tokens from `tokens` on again from a changed state."""
    first, length = call.segments.host_values()
    device = call.tokens.q.device
    head = Segments.from_lengths([min(n, tokens) for n in length.tolist()], device, first.tolist())
    start = None if call.initial is None else call.initial.clone()
    inner = call.out.shape[1], *((call.tokens.value_dim, call.tokens.key_dim)[:: 1 if call.state_v_first else -1])
    middle = torch.zeros((len(length), *inner), device=device)
    plain = {"checkpoints": None, "checkpoint_pool": None}
    original(replace(call, segments=head, final=middle, write_slots=None, **plain))
    original(replace(call, initial=start))
    rest = [max(n - tokens, 0) for n in length.tolist()]
    tail = Segments.from_lengths(rest, device, [f + min(n, tokens) for f, n in zip(first, length)])
    original(replace(call, segments=tail, initial=change(middle), final=None, read_slots=None, write_slots=None,
                     has_initial_state=None, **plain))  # fmt: skip


@wraps("prefill", caught_by=("B26", "shapes"))
def state_dropped_after_the_first_chunk(original: Any, call: PrefillCall) -> None:
    _second_part(call, torch.zeros_like, original)


@wraps("prefill", caught_by=("B26",))
def carried_state_read_transposed(original: Any, call: PrefillCall) -> None:
    if call.tokens.key_dim != call.tokens.value_dim:
        return original(call)
    return _second_part(call, lambda state: state.transpose(-1, -2).contiguous(), original)


@wraps("prefill", "decode", caught_by=("B27",))
def initial_state_read_transposed(original: Any, call: Any) -> None:
    original(replace(call, state_v_first=not call.state_v_first))


@wraps("prefill", caught_by=("B46",))
def slots_taken_for_the_identity(original: Any, call: PrefillCall) -> None:
    if call.read_slots is None or call.initial is None:
        return original(call)
    return original(
        replace(call, read_slots=torch.arange(call.segments.count), write_slots=torch.arange(call.segments.count))
    )


@wraps("prefill", "decode", caught_by=("slots", "decode-tokens_anywhere"))
def read_slots_ignored(original: Any, call: Any) -> None:
    original(replace(call, read_slots=call.write_slots))


@wraps("prefill", "decode", "verify", caught_by=("B46",))
def dense_copy_of_the_pool_updated(original: Any, call: Any) -> None:
    if isinstance(call, PrefillCall):
        final = None if call.final is None else call.final.contiguous()
        original(replace(call, final=final))
    else:
        original(replace(call, pool=call.pool.contiguous()))


@wraps("prefill", "decode", caught_by=("B42",))
def slot_stride_ignored(original: Any, call: Any) -> None:
    def dense(slots: Tensor | None) -> Tensor | None:
        if slots is None or not slots.numel():
            return slots
        # a wrapper that trusts is_contiguous() on a one-row view is right by luck; with more rows it is not
        return slots.as_strided(slots.shape, (1,))

    original(replace(call, read_slots=dense(call.read_slots), write_slots=dense(call.write_slots)))


@wraps("prefill", "decode", "verify", caught_by=("B39",))
def slot_offsets_in_32_bits(original: Any, call: Any) -> None:
    pool = call.initial if isinstance(call, PrefillCall) else call.pool
    if pool is None or pool.stride(0) * (pool.shape[0] - 1) < 2**31:
        return original(call)
    slots = torch.zeros_like(call.write_slots if isinstance(call, (PrefillCall, DecodeCall)) else call.slots)
    if isinstance(call, VerifyCall):
        return original(replace(call, slots=slots))
    return original(replace(call, read_slots=slots))


@wraps("prefill", caught_by=("B38",))
def token_offsets_in_32_bits(original: Any, call: PrefillCall) -> None:
    tokens = call.tokens
    limit = 2**31 // max(tokens.q.stride(0), 1)
    if limit >= tokens.count:
        return original(call)
    wrapped = torch.arange(tokens.count)
    wrapped[limit:] -= limit
    return original(with_tokens(call, q=tokens.q[wrapped], k=tokens.k[wrapped]))


@wraps("prefill", caught_by=("B68",))
def initial_state_multiplied_by_its_flag(original: Any, call: PrefillCall) -> None:
    if call.has_initial_state is None or call.initial is None or call.read_slots is None:
        return original(call)
    start = call.initial.clone()
    rows = call.read_slots.long().clamp(0)
    start[rows] = start[rows] * call.has_initial_state.to(start.dtype)[:, None, None, None]
    return original(replace(call, initial=start, has_initial_state=None))


@wraps("prefill", caught_by=("B68", "B21"))
def has_initial_state_ignored(original: Any, call: PrefillCall) -> None:
    original(replace(call, has_initial_state=None))


@wraps("prefill", caught_by=("B21",))
def empty_fresh_segment_keeps_the_old_tenant(original: Any, call: PrefillCall) -> None:
    if call.final is None or call.write_slots is None:
        return original(call)
    empty = [n for n, length in enumerate(lengths(call)) if not length]
    rows = [int(r) for r in call.write_slots[empty].tolist() if 0 <= r < call.final.shape[0]]
    before = call.final[rows].clone()
    original(call)
    call.final[rows] = before
    return None


@wraps("prefill", caught_by=("B14",))
def nan_reaches_the_whole_batch(original: Any, call: PrefillCall) -> None:
    original(call)
    rows = [range(int(f), int(f + n)) for f, n in zip(*call.segments.host_values())]
    covered = [row for span in rows for row in span]
    if covered:
        call.out[covered] += 0.0 * call.out[covered].sum()


# Padding, empty rows, rows of nobody


@wraps("prefill", "decode", caught_by=("B61",))
def padding_marker_wraps_to_the_last_slot(original: Any, call: Any) -> None:
    pool = call.final if isinstance(call, PrefillCall) else call.pool
    if pool is None or call.write_slots is None:
        return original(call)
    slots = torch.where(call.write_slots < 0, call.write_slots + pool.shape[0], call.write_slots)
    return original(replace(call, read_slots=slots, write_slots=slots, pad_slot=-(2**31)))


@wraps("prefill", "decode", caught_by=("B61",))
def slot_zero_always_taken_for_padding(original: Any, call: Any) -> None:
    original(replace(call, pad_slot=0))


@wraps("prefill", "decode", caught_by=("B62",))
def outputs_of_padding_not_written(original: Any, call: Any) -> None:
    before = call.out.clone()
    original(call)
    if call.write_slots is not None:
        for (first, length), slot in zip(zip(*call.segments.host_values()), call.write_slots.tolist()):
            if slot == call.pad_slot:
                call.out[first : first + length] = before[first : first + length]


@wraps("prefill", caught_by=("B22", "shapes"))
def rows_of_no_segment_zeroed(original: Any, call: PrefillCall) -> None:
    call.out.zero_()
    original(call)


@wraps("decode", caught_by=("decode-tokens_anywhere",))
def decode_rows_taken_for_tokens(original: Any, call: DecodeCall) -> None:
    original(replace(call, segments=Segments.equal(call.segments.count, 1)))


@wraps("prefill", caught_by=("B29",))
def outputs_written_over_v(original: Any, call: PrefillCall) -> None:
    original(call)
    call.tokens.v.copy_(call.out)


@wraps("prefill", caught_by=("B87",))
def workspace_overrun(original: Any, call: PrefillCall) -> None:
    original(call)
    if call.workspace is not None:
        past = call.workspace.as_strided((16,), (1,), call.workspace.storage_offset() + call.workspace.numel())
        past.zero_()


# Heads


@wraps(*KDA, caught_by=("B32",))
def value_heads_interleaved(original: Any, call: KdaCall) -> None:
    heads = torch.arange(call.tokens.value_heads) % call.tokens.heads
    original(with_tokens(call, q=call.tokens.q[:, heads], k=call.tokens.k[:, heads]))


# Checkpoints


@wraps("prefill", caught_by=("B70",))
def final_state_stored_as_the_checkpoint(original: Any, call: PrefillCall) -> None:
    original(call)
    if call.checkpoints is not None and call.checkpoint_pool is not None and call.final is not None:
        begin, _, slot = call.checkpoints.host_values()
        for n in range(call.segments.count):
            row = n if call.write_slots is None else int(call.write_slots[n])
            for i in range(int(begin[n]), int(begin[n + 1])):
                call.checkpoint_pool[int(slot[i])] = call.final[row].to(call.checkpoint_pool.dtype)


@wraps("prefill", caught_by=("B71",))
def checkpoints_on_one_grid_over_the_batch(original: Any, call: PrefillCall) -> None:
    if call.checkpoints is None:
        return original(call)
    begin, offset, slot = call.checkpoints.host_values()
    first, _ = call.segments.host_values()
    entries = []
    for n in range(call.segments.count):
        for i in range(int(begin[n]), int(begin[n + 1])):
            on_grid = int((first[n] + offset[i]) // 16 * 16 - first[n]) // 16 * 16
            entries.append((n, max(16, on_grid), int(slot[i])))
    return original(replace(call, checkpoints=Checkpoints.build(entries, call.segments.count)))


# Speculation


@wraps("verify", "commit", caught_by=("B48", "verify"))
def accepted_off_by_one(original: Any, call: VerifyCall | CommitCall) -> None:
    original(replace(call, accepted=call.accepted - 1))


@wraps("verify", caught_by=("verify",))
def accepted_ignored(original: Any, call: VerifyCall) -> None:
    original(replace(call, accepted=torch.ones_like(call.accepted)))


@wraps("verify", caught_by=("B47",))
def accepted_not_clamped(original: Any, call: VerifyCall) -> None:
    if call.records is not None:
        return original(call)
    table = call.slots
    wide = table.as_strided((table.shape[0], table.shape[1] + 2), table.stride(), table.storage_offset() - 1)
    start = wide.gather(1, call.accepted.clamp(0, table.shape[1] + 1).long()[:, None])
    return original(replace(call, slots=torch.cat([start, table[:, 1:]], 1), accepted=torch.ones_like(call.accepted)))


@wraps("verify", caught_by=("B54",))
def drafts_committed_at_once(original: Any, call: VerifyCall) -> None:
    original(call)
    if call.records is not None:
        count = call.segments.length.to(call.accepted.dtype)
        TorchBackend().commit(CommitCall(call.pool, call.records, call.slots, count, call.state_v_first, call.pad_slot))


@wraps("commit", caught_by=("B60",))
def rejected_records_multiplied_by_zero(original: Any, call: CommitCall) -> None:
    records = call.records.clone()
    rows = call.slots.long()
    taken = torch.arange(records.shape[1]) < call.accepted[:, None]
    records[rows] = records[rows] * taken[:, :, None, None]
    original(replace(call, records=records, accepted=torch.full_like(call.accepted, records.shape[1])))


@wraps("verify", caught_by=("B50",))
def gates_taken_by_row_and_not_by_token(original: Any, call: VerifyCall) -> None:
    g = call.tokens.g.clone()
    packed = 0
    for first, length in zip(*call.segments.host_values()):
        g[first : first + length] = call.tokens.g[packed : packed + int(length)].nan_to_num(-0.5)
        packed += int(length)
    original(with_tokens(call, g=g))


@wraps("verify", caught_by=("B54", "verify"))
def state_after_the_last_draft_in_every_slot(original: Any, call: VerifyCall) -> None:
    original(call)
    if call.records is None:
        for n, length in enumerate(lengths(call)):
            for j in range(length - 1):
                call.pool[int(call.slots[n, j])] = call.pool[int(call.slots[n, length - 1])]


# Convolution and norm


@wraps("conv", caught_by=("B82",))
def window_dropped_by_a_short_chunk(original: Any, call: ConvCall) -> None:
    original(call)
    taps = call.weight.shape[1]
    if call.pool is None or call.write_slots is None or call.keep_all:
        return
    for slot, length in zip(call.write_slots.tolist(), lengths(call)):
        if 0 < length < taps - 1 and slot != call.pad_slot:
            window = call.pool[slot] if call.channels_last else call.pool[slot].t()
            window[: taps - 1 - length] = 0.0


@wraps("conv", caught_by=("B68",))
def stale_window_of_a_fresh_segment(original: Any, call: ConvCall) -> None:
    original(replace(call, has_initial_state=None))


@wraps("conv", caught_by=("B48",))
def window_not_shifted_by_the_accepted(original: Any, call: ConvCall) -> None:
    original(replace(call, accepted=None))


@wraps("conv", caught_by=("B84", "B82"))
def rows_before_the_segment_leak_in(original: Any, call: ConvCall) -> None:
    original(call)
    taps = call.weight.shape[1]
    for n, (first, length) in enumerate(zip(*(x.tolist() for x in call.segments.host_values()), strict=True)):
        if call.pool is None or (call.has_initial_state is not None and not call.has_initial_state[n]):
            start = max(0, first - taps + 1)
            y, _ = reference.causal_conv(call.x[start : first + length], call.weight, call.bias, None, call.silu)
            call.out[first : first + length] = y[first - start :].to(call.out.dtype)


@wraps("conv", caught_by=("B70",))
def last_window_stored_as_the_checkpoint(original: Any, call: ConvCall) -> None:
    if call.checkpoints is None:
        return original(call)
    begin, _, slot = call.checkpoints.host_values()
    ends = [
        (n, lengths(call)[n] // 16 * 16) for n in range(call.segments.count) for _ in range(begin[n + 1] - begin[n])
    ]
    entries = [(n, end, int(row)) for (n, end), row in zip(ends, slot)]
    return original(replace(call, checkpoints=Checkpoints.build(entries, call.segments.count)))


@wraps("norm", caught_by=("B85",))
def silu_instead_of_the_sigmoid(original: Any, call: NormCall) -> None:
    original(replace(call, activation="silu"))


@wraps("norm", caught_by=("B85",))
def norm_over_all_heads(original: Any, call: NormCall) -> None:
    x, z = (t.flatten(1).unsqueeze(1) for t in (call.x, call.z))
    out = torch.empty_like(x)
    original(replace(call, x=x, z=z, weight=call.weight.repeat(call.x.shape[1]), out=out))
    call.out.copy_(out.view(call.out.shape))


# Gradients


@replaces(TorchBackend, "forward", caught_by=("gradients",))
def gate_bias_detached(original: Any, self: TorchBackend, tokens: Any, *args: Any) -> tuple[Tensor, Tensor]:
    gate = replace(tokens.gate, dt_bias=tokens.gate.dt_bias.detach())
    return original(self, replace(tokens, gate=gate), *args)
