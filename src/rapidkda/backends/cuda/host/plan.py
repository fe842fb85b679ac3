"""Which form of the prefill kernel serves a call: a cost model fitted on measurements, and the choice with its reasons.

Forms. `whole`: one CTA a head. `pair`: a cluster of two CTAs a head, for few chains. `parallel` cuts a segment into
P + 1 parts, exactly, whatever the gates are: a pair runs the first part beside the affine transitions (S -> S M + B) of
all but the last of the others, and then the others run side by side, P pairs, each from the start that it makes of the
first part's last state and the transitions before it. The first part is a little longer, so that nobody waits.

Where a head provably forgets everything at each of 2 P - 1 seams (csrc/seams.cu, decided per head on the device), the
first of the two steps has nothing to do for it, and in the second each of the 2 P CTAs takes its share of the tokens
instead of half of V, from zero a few chunks early: less work in all. Gates are not known here, so a form is chosen by
the geometric mean of what it costs where all is forgotten and where nothing is.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass
from typing import Literal

FormName = Literal["whole", "pair", "parallel"]

CHUNK = 16
MAX_PARTS = 16
STATE_BYTES = 128 * 128 * 4  # one head's state in fp32
SEAM_BYTES = 4

# Microseconds on an H200 with the bounded gate (docs/kernels-cuda.md): what a launch costs at least, what going on to
# the next head costs, and a chunk. Unbounded gates cost 1.1 times as much in every form, so the choice is the same.
WHOLE_START_US, WHOLE_SWITCH_US, WHOLE_US = 14.0, 5.0, 1.19
PAIR_START_US, PAIR_SWITCH_US, PAIR_US = 11.5, 4.0, 0.70
# Three launches; a chunk of a part and of a transition, whose kernels have two ways to go; a transition applied.
PARALLEL_START_US, PART_US, TRANSITION_US, APPLY_US = 37.0, 0.75, 0.84, 12.2
# The same launches where all is forgotten, a chunk of a share, and the most chunks that it begins early.
FORGETTING_START_US, SHARE_US, WARM_UP_CHUNKS = 48.0, 1.18, 5

# What a neighbour adds to a chunk, where the form can take it on; and what one costs by itself: a launch, and the bytes
# of its rows at the rate that they reach.
Neighbour = Literal["conv", "norm"]
FUSED_US: dict[FormName, dict[Neighbour, float]] = {
    "whole": {"conv": 0.54, "norm": 0.21},
    "pair": {"conv": 0.31},
    "parallel": {},
}
HISTORY_US = 2.5  # the launch that stores what a fused convolution leaves behind
NEIGHBOUR_START_US = 3.0
CONV_BYTES_US, NORM_BYTES_US = 2.9e6, 3.6e6


@dataclass(frozen=True)
class Plan:
    """The form of a prefill call.

    Attributes:
        form: which kernels run.
        parts: pairs of a head at once, 1 unless `form` is `parallel`.
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
def plan_prefill(
    segments: int,
    total_chunks: int,
    longest_chunks: int,
    value_heads: int,
    sms: int,
    fused: tuple[Neighbour, ...] = (),
    clusters: bool = True,
) -> Plan:
    """Choose the form for `segments` sequences of `value_heads` heads.

    Args:
        total_chunks: chunks of 16 tokens in all segments together (segments x longest when only a bound is known).
        longest_chunks: chunks of the longest segment.
        sms: multiprocessors of the device.
        fused: neighbours that the form has to take on.
        clusters: whether a form of clusters may do so.
    """
    chains = segments * value_heads
    sizes = (segments, value_heads, total_chunks, longest_chunks)
    start_us = HISTORY_US * ("conv" in fused)
    whole_us = WHOLE_US + sum(FUSED_US["whole"][name] for name in fused)
    costs: dict[tuple[FormName, int], float] = {
        ("whole", 1): WHOLE_START_US + start_us + _serial(*sizes, sms, WHOLE_SWITCH_US, whole_us)
    }
    able = [
        form for form, known in FUSED_US.items() if all(name in known for name in fused) and (clusters or not fused)
    ]
    if "pair" in able:
        pair_us = PAIR_US + sum(FUSED_US["pair"][name] for name in fused)
        costs["pair", 1] = PAIR_START_US + start_us + _serial(*sizes, sms // 2, PAIR_SWITCH_US, pair_us)
    for parts in range(2, MAX_PARTS + 1) if "parallel" in able else ():
        if 2 * chains * parts <= sms:
            each = longest_chunks / (parts + TRANSITION_US / PART_US)
            costs["parallel", parts] = PARALLEL_START_US + each * (TRANSITION_US + PART_US) + APPLY_US * (parts - 1)
    form, parts = min(costs, key=lambda one: costs[one] * forgetting_us(one[0], one[1], costs[one], longest_chunks))
    return Plan(
        form, parts, costs[form, parts], tuple((f"{n}{f'/{p}' if p > 1 else ''}", us) for (n, p), us in costs.items())
    )


def forgetting_us(form: FormName, parts: int, us: float, longest: int) -> float:
    """Time of a form where all heads forget; `us`: its time where none does."""
    return us if form != "parallel" else FORGETTING_START_US + (longest / (2 * parts) + WARM_UP_CHUNKS) * SHARE_US


@functools.lru_cache(maxsize=4096)
def plan_neighbours(
    segments: int,
    total_chunks: int,
    longest_chunks: int,
    value_heads: int,
    sms: int,
    moved: tuple[tuple[Neighbour, int], ...],
    clusters: bool,
) -> tuple[tuple[Neighbour, ...], dict[tuple[Neighbour, ...], float]]:
    """Which neighbours the prefill takes on, and microseconds of the layer for every set of them.

    Args:
        moved: bytes that each neighbour that can be taken on moves by itself.
    """
    rates = {"conv": CONV_BYTES_US, "norm": NORM_BYTES_US}
    alone = {name: NEIGHBOUR_START_US + count / rates[name] for name, count in moved}
    costs: dict[tuple[Neighbour, ...], float] = {}
    for count in range(len(alone) + 1):
        for fused in itertools.combinations(alone, count):
            plan = plan_prefill(segments, total_chunks, longest_chunks, value_heads, sms, fused, clusters)
            costs[fused] = plan.predicted_us + sum(us for name, us in alone.items() if name not in fused)
    return min(costs, key=lambda fused: costs[fused]), costs


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


def scratch_bytes(units: int, parts: int) -> int:
    """Scratch of a plan for so many heads of segments: start states, transitions (B and M), seams."""
    return units * ((2 * parts - 1) * STATE_BYTES + 2 * parts * SEAM_BYTES) if parts > 1 else 0


def workspace_bytes(value_heads: int, sms: int) -> int:
    """Scratch of the widest plan: it has at most sms / 2 pairs in all, whatever the number of segments."""
    return sms // 2 * (2 * STATE_BYTES + 2 * SEAM_BYTES) if 4 * value_heads <= sms else 0
