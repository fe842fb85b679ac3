"""Which form of the prefill kernel serves a call: a cost model fitted on measurements, and the choice with its reasons.

Forms. `whole`: one CTA a head. `pair`: a cluster of two CTAs a head, for few chains. The other two cut a segment into
parts, each a pair. At a seam across which the gates provably forget everything (csrc/seams.cu, decided per head on the
device), a part starts from zero a few chunks early; elsewhere it needs the state that the part before it ends with. In
`handover` it waits for it, so slow gates cost what a pair costs and fast ones a fraction. In `parallel` the affine
transitions (S -> S M + B) of the parts are computed side by side and composed into their start states, and the parts
then run side by side from those. Exact whatever the gates are. Gates are not known here, so a form is chosen by what it
costs when nothing is forgotten.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Literal

FormName = Literal["whole", "pair", "handover", "parallel"]

CHUNK = 16
MAX_PARTS = 16
STATE_BYTES = 128 * 128 * 4  # one head's state in fp32
PART_BYTES = 64  # of a part of a head besides its states: 8 flags and its seam

# Microseconds on an H200 with the bounded gate (docs/kernels-cuda.md): what a launch costs at least, what going on to
# the next head costs, and a chunk. Unbounded gates cost 1.2 to 1.4 times as much in every form, so the choice is the
# same.
WHOLE_START_US, WHOLE_SWITCH_US, WHOLE_US = 14.0, 5.0, 1.19
PAIR_START_US, PAIR_SWITCH_US, PAIR_US = 11.5, 4.0, 0.70
PARALLEL_START_US, TRANSITION_US = 44.0, 0.79  # four launches and the composition
COMPOSE_US = 1.0  # a part
HANDOVER_START_US, HANDOVER_US = 16.0, 1.1  # over a pair where nothing is forgotten: two launches, a wait of each part
HANDOVER_PREMIUM = 1.06  # the most that may cost, for parts times the speed where all is forgotten
LEAST_PART_CHUNKS = 24  # of a handover: several times a warm-up


@dataclass(frozen=True)
class Plan:
    """The form of a prefill call.

    Attributes:
        form: which kernels run.
        parts: parts of a segment, 1 unless `form` is `parallel`.
        predicted_us: the cost model's device time.
        alternatives: the same for every form considered, "name": microseconds.
    """

    form: FormName
    parts: int
    predicted_us: float
    alternatives: tuple[tuple[str, float], ...]

    @property
    def launches(self) -> int:
        return {"whole": 1, "pair": 1, "handover": 2, "parallel": 4}[self.form]

    def __str__(self) -> str:
        others = ", ".join(f"{name} {us:.0f} us" for name, us in self.alternatives)
        return f"{self.form}{f' in {self.parts} parts' if self.parts > 1 else ''}: {others}"


@functools.lru_cache(maxsize=4096)
def plan_prefill(segments: int, total_chunks: int, longest_chunks: int, value_heads: int, sms: int) -> Plan:
    """Choose the form for `segments` sequences of `value_heads` heads.

    Args:
        total_chunks: chunks of 16 tokens in all segments together (segments x longest when only a bound is known).
        longest_chunks: chunks of the longest segment.
        sms: multiprocessors of the device.
    """
    chains = segments * value_heads
    costs: dict[tuple[FormName, int], float] = {
        ("whole", 1): WHOLE_START_US
        + _serial(segments, value_heads, total_chunks, longest_chunks, sms, WHOLE_SWITCH_US, WHOLE_US),
        ("pair", 1): PAIR_START_US
        + _serial(segments, value_heads, total_chunks, longest_chunks, sms // 2, PAIR_SWITCH_US, PAIR_US),
    }
    for parts in range(2, MAX_PARTS + 1):
        if 2 * chains * parts <= sms:
            each = -(-longest_chunks // parts)
            costs["parallel", parts] = PARALLEL_START_US + each * (TRANSITION_US + PAIR_US) + COMPOSE_US * parts
    (form, parts), best = min(costs.items(), key=lambda item: item[1])
    if form == "pair":
        for more in range(2, MAX_PARTS + 1):
            us = best + HANDOVER_START_US + HANDOVER_US * (more - 1)
            if 2 * chains * more <= sms and longest_chunks >= more * LEAST_PART_CHUNKS:
                costs["handover", more] = us
                if us <= HANDOVER_PREMIUM * best:
                    form, parts = "handover", more
    return Plan(
        form, parts, costs[form, parts], tuple((f"{n}{f'/{p}' if p > 1 else ''}", us) for (n, p), us in costs.items())
    )


def _serial(
    segments: int, value_heads: int, total: int, longest: int, workers: int, switch_us: float, chunk_us: float
) -> float:
    """Time of the worker that ends last, when each takes heads one after another."""
    chains = segments * value_heads
    alone = longest * chunk_us  # the longest chain, however idle the device is
    full = (chains * switch_us + total * value_heads * chunk_us) / workers - switch_us  # every worker busy to the end
    rounds = 0.0
    if total == segments * longest:  # equal lengths come and go together
        each = -(-chains // workers)
        rounds = each * alone + (each - 1) * switch_us
    return max(alone, full, rounds)


def workspace_bytes(value_heads: int, sms: int) -> int:
    """Scratch of the widest plan in parts: transitions (B and M), start states and seams of every part.

    A plan has at most sms / 2 parts in all (two CTAs each), whatever the number of segments.
    """
    return sms // 2 * (3 * STATE_BYTES + PART_BYTES) if 4 * value_heads <= sms else 0
