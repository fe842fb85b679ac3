"""Which form of the prefill kernel serves a call: a cost model fitted on measurements, and the choice with its reasons.

Forms. `whole`: one CTA a head. `pair`: a cluster of two CTAs a head, for few chains. `parallel` cuts a segment into
P parts, exactly, whatever the gates are: a pair runs the first part beside the affine transitions (S -> S M + B) of the
others, whose outputs are then corrected by the states that their parts start from.

Where a head provably forgets all before a part and all before its middle (csrc/seams.cuh, decided per part on the
device), each of the part's two CTAs takes half of its tokens instead of B or M, from zero a few chunks early: less work
in all, and nothing to correct. Gates are not known here, so a form is chosen by the geometric mean of what it costs
where all is forgotten and where nothing is.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass
from typing import Literal

FormName = Literal["whole", "pair", "parallel"]

CHUNK = 16
MAX_PARTS = 16
TRANSITION_BYTES = 2 * 128 * 128 * 4  # of a part of a head
QUERY_BYTES = 128 * 2  # of a token of a head
CORRECTED_BYTES = QUERY_BYTES + 2 * 128 * 2  # its query, and its output read and written
SEAM_BYTES = 4
MOST_CHECKPOINT_BYTES = 1 << 28  # scratch that checkpoints within parts may take; calls with more of them have no parts

# Microseconds on an H200 with the bounded gate (docs/kernels-cuda.md): what a launch costs at least, what going on to
# the next head costs, and a chunk. Unbounded gates cost 1.1 times as much in every form, so the choice is the same.
WHOLE_START_US, WHOLE_SWITCH_US, WHOLE_US = 13.0, 8.0, 1.02
PAIR_START_US, PAIR_SWITCH_US, PAIR_US = 14.0, 4.0, 0.625
# Parts, two launches: a chunk of a transition, a transition applied, bytes of outputs corrected in a microsecond, and a
# checkpoint of a head for one of as many CTAs as there are multiprocessors.
PARALLEL_START_US, TRANSITION_US, APPLY_US, CORRECT_BYTES_US, CHECKPOINT_US = 38.0, 0.89, 2.0, 3.4e6, 6.0
FIRST_PART = 1.5  # chunks of the first part for one of any other: csrc/parts.cuh
# The same launches where all is forgotten, a chunk of a share, and the most chunks that it begins early.
FORGETTING_START_US, SHARE_US, WARM_UP_CHUNKS = 38.0, 0.995, 5

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
        parts: of a segment; 1 unless `form` is `parallel`, and at least 2 then.
        predicted_us: the cost model's device time.
        alternatives: the same for every form considered, "name": microseconds.
    """

    form: FormName
    parts: int
    predicted_us: float
    alternatives: tuple[tuple[str, float], ...]

    @property
    def launches(self) -> int:
        return 2 if self.parts > 1 else 1

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
    checkpoints: int = 0,
    tokens: int = 0,
    most_scratch: int | None = None,
) -> Plan:
    """Choose the form for `segments` sequences of `value_heads` heads.

    Args:
        total_chunks: chunks of 16 tokens in all segments together (segments x longest when only a bound is known).
        longest_chunks: chunks of the longest segment.
        sms: multiprocessors of the device.
        fused: neighbours that the form has to take on.
        clusters: whether a form of clusters may do so.
        checkpoints: states to export on the way, of every head.
        tokens: rows of the call, which scratch is for.
        most_scratch: bytes of it that there are, or None when it is allocated as needed.
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
    exported = checkpoints * value_heads
    most_parts = MAX_PARTS if exported * TRANSITION_BYTES <= MOST_CHECKPOINT_BYTES else 1
    for parts in range(2, min(most_parts, sms // (2 * chains)) + 1) if "parallel" in able else ():
        if most_scratch is not None and Scratch(segments, tokens, value_heads, parts, checkpoints).bytes > most_scratch:
            break
        each = 1 / (parts - 1 + FIRST_PART)  # of the chunks
        corrected = each * (parts - 1) * total_chunks * CHUNK * value_heads * CORRECTED_BYTES
        costs["parallel", parts] = (
            PARALLEL_START_US
            + each * longest_chunks * TRANSITION_US
            + APPLY_US * (parts - 1)
            + corrected / CORRECT_BYTES_US
            + exported / sms * CHECKPOINT_US
        )
    form, parts = min(costs, key=lambda one: costs[one] * forgetting_us(one[0], one[1], costs[one], longest_chunks))
    return Plan(
        form, parts, costs[form, parts], tuple((f"{n}{f'/{p}' if p > 1 else ''}", us) for (n, p), us in costs.items())
    )


def forgetting_us(form: FormName, parts: int, us: float, longest: int) -> float:
    """Time of a form where all heads forget; `us`: its time where none does."""
    if form != "parallel":
        return us
    return FORGETTING_START_US + (longest / (2 * parts) + WARM_UP_CHUNKS) * SHARE_US


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


@dataclass(frozen=True)
class Scratch:
    """What a plan in parts needs in memory beside a call's tensors.

    Attributes:
        places: bytes from its start to transitions, rows of queries and seams (csrc/params.cuh).
        bytes: of all.
    """

    segments: int
    tokens: int
    value_heads: int
    parts: int
    checkpoints: int = 0

    @property
    def places(self) -> tuple[int, int, int]:
        transitions = (self.segments * self.parts + self.checkpoints) * self.value_heads * TRANSITION_BYTES
        return 0, transitions, transitions + self.tokens * self.value_heads * QUERY_BYTES

    @property
    def bytes(self) -> int:
        if self.parts == 1:
            return 0
        return self.places[-1] + self.segments * self.value_heads * 2 * self.parts * SEAM_BYTES


def workspace_bytes(tokens: int, value_heads: int, sms: int) -> int:
    """Scratch of the widest plan without checkpoints: it has at most sms / 2 parts in all, whatever the number of
    segments."""
    if 4 * value_heads > sms:
        return 0
    return sms // 2 * (TRANSITION_BYTES + 2 * SEAM_BYTES) + tokens * value_heads * QUERY_BYTES
