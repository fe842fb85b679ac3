"""Which form of the prefill kernel serves a call: a cost model fitted on measurements, and the choice with its reasons.

Forms. `whole`: one CTA a head. `pair`: a cluster of two CTAs a head, for few chains. `parallel`: context parallelism; a
segment is cut into parts whose affine transitions (S -> S M + B) are computed side by side, composed into the part's
start states, and the parts then run side by side from those. Exact whatever the gates are.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Literal

FormName = Literal["whole", "pair", "parallel"]

CHUNK = 16
MAX_PARTS = 16
STATE_BYTES = 128 * 128 * 4  # one head's state in fp32

# Microseconds on an H200 (docs/kernels-cuda.md): what a round of CTAs costs at least, and a chunk of a running CTA.
START_US = 10.0
WHOLE_US = 1.24
PAIR_US = 0.68
TRANSITION_US = 0.90
COMPOSE_US = 3.6  # a part
PASSES_US = 12.0  # two more launches


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
        return 3 if self.form == "parallel" else 1

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
        ("whole", 1): _serial(chains, value_heads, total_chunks, longest_chunks, sms, 1, WHOLE_US),
        ("pair", 1): _serial(chains, value_heads, total_chunks, longest_chunks, sms, 2, PAIR_US),
    }
    for parts in range(2, MAX_PARTS + 1):
        if chains * parts * 2 <= sms and longest_chunks >= 8 * parts:
            each = -(-longest_chunks // parts)
            costs["parallel", parts] = 2 * START_US + PASSES_US + each * (TRANSITION_US + PAIR_US) + COMPOSE_US * parts
    (form, parts), best = min(costs.items(), key=lambda item: item[1])
    return Plan(form, parts, best, tuple((f"{n}{f'/{p}' if p > 1 else ''}", us) for (n, p), us in costs.items()))


def _serial(chains: int, value_heads: int, total: int, longest: int, sms: int, ctas: int, chunk_us: float) -> float:
    """Device time when each head runs its chunks one after another on `ctas` CTAs."""
    work = (chains * START_US + total * value_heads * chunk_us) * ctas / sms  # if all SMs are busy to the end
    rounds = -(-chains * ctas // sms)
    even = rounds * (START_US + total / max(1, chains // value_heads) * chunk_us)  # equal lengths, in rounds
    return max(START_US + longest * chunk_us, work, even if total == longest * (chains // value_heads) else 0.0)


def workspace_bytes(value_heads: int, sms: int) -> int:
    """Scratch of the widest context-parallel plan: transitions (B and M) and start states of every part.

    A plan has at most sms / 2 parts in all (two CTAs each), whatever the number of segments.
    """
    return sms // 2 * 3 * STATE_BYTES if 4 * value_heads <= sms else 0
