"""The three synthetic tasks: recall of many needles, arithmetic in worked steps, copying of long spans.

A sample is a pure function of its seed, its split and its parameters. Tokens are bytes (`text.encode("latin-1")`), so
lengths and positions count both. The splits share nothing that could be learned by heart:

- seeds: the split is part of every random seed;
- needles: a key of three letters belongs to one split, by `held_out_key`; about one in eight is held out;
- arithmetic: so does a problem, by `held_out_problem` of its numbers and operations; about one in eight is held out;
- copying: half of the spans are random letters, the others windows of the filler text.

The filler of held-out samples is the Constitution of the United States, which is not in the training text.
"""

from __future__ import annotations

import random
import re
import zlib
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Literal, get_args

from .. import checks

Split = Literal["train", "test"]
TASKS = ("needles", "arithmetic", "copy")
LETTERS = "abcdefghijklmnopqrstuvwxyz"
HELD_OUT_ONE_IN = 8
NEEDLES = 36
RECALL = "\nRecall: "
FACT_LENGTH = len("[abc=1234] ")
COPY_OVERHEAD = len("Copy: {") + len("}\nAgain: {") + len("}\n")
PEOPLE = ("Ann", "Ben", "Eva", "Ian", "Leo", "Mia", "Sam", "Zoe")
THINGS = ("apples", "books", "coins", "eggs", "nuts", "pens", "shells", "stamps")
STEPS = (2, 3, 4, 5)
MOST_COUNTED = 99  # numbers of the arithmetic task have at most two digits


@dataclass(frozen=True, slots=True)
class Answer:
    """One span of a sample's text that a model is asked for.

    Attributes:
        start, end: tokens [start, end) of the text.
        depth: where its evidence stands in the context before the questions, 0 (first) to 1 (last).
        distance: tokens from the end of its evidence to `start`.
    """

    start: int
    end: int
    depth: float
    distance: int


@dataclass(frozen=True, slots=True)
class Sample:
    """A text with its answers in it, in order.

    To ask for answer i alone, give a model `text[:answers[i].start]`: earlier questions then stand there with their
    right answers.

    Attributes:
        task: of `TASKS`.
        text: prompt, answers and what stands between them, in ASCII or Latin-1.
        answers: at least one.
    """

    task: str
    text: str
    answers: tuple[Answer, ...]

    @property
    def prompt(self) -> str:
        """The text before the first answer."""
        return self.text[: self.answers[0].start]

    @property
    def expected(self) -> tuple[str, ...]:
        """The texts of the answers."""
        return tuple(self.text[answer.start : answer.end] for answer in self.answers)

    @property
    def tokens(self) -> bytes:
        """The text as token ids."""
        return self.text.encode("latin-1")


def needles(seed: int, split: Split, *, length: int = 4096, count: int = NEEDLES, filler: str | None = None) -> Sample:
    """Facts such as `[kqz=4821]` scattered in filler text; all are asked for at the end, in random order.

    Args:
        seed: 0 or more.
        split: "train" or "test".
        length: tokens of the whole sample.
        count: facts, at most `most_needles(length)`.
        filler: Latin-1 text to take a random window of, at least `length` long; by default the held-out text.

    The answers are the values, four digits each.
    """
    rng = _generator("needles", seed, split)
    checks.integer("count", count, 1)
    if count > most_needles(length):
        raise ValueError(f"count must be at most {most_needles(length)} for length {length}, got {count}")
    keys: dict[str, str] = {}
    while len(keys) < count:
        key = "".join(rng.choice(LETTERS) for _ in range(3))
        if held_out_key(key) == (split == "test"):
            keys[key] = f"{rng.randrange(10_000):04d}"
    body = length - len(RECALL) - count * FACT_LENGTH
    window = _window(rng, filler, body - count * FACT_LENGTH)
    places = sorted(_word_start(window, rng.randrange(len(window) + 1)) for _ in keys)
    pieces, ends, done, size = [], {}, 0, 0
    for place, (key, value) in zip(places, keys.items()):
        pieces += [window[done:place], f"[{key}={value}] "]
        size += place - done + FACT_LENGTH
        done = place
        ends[key] = size - 2  # after the value
    pieces += [window[done:], RECALL]
    asked = list(keys)
    rng.shuffle(asked)
    answers, end = [], body + len(RECALL)
    for key in asked:
        pieces.append(f"[{key}={keys[key]}] ")
        start = end + FACT_LENGTH - len("1234] ")
        answers.append(Answer(start, start + 4, ends[key] / body, start - ends[key]))
        end += FACT_LENGTH
    return Sample("needles", "".join(pieces), tuple(answers))


def most_needles(length: int) -> int:
    """Facts that a needle sample of `length` tokens holds, with at least a third of it filler."""
    checks.integer("length", length, 64)
    return (2 * length // 3 - len(RECALL)) // (2 * FACT_LENGTH)


def held_out_key(key: str) -> bool:
    """Whether a needle's key belongs to the split "test"."""
    return _held_out(f"key {key}")


def arithmetic(seed: int, split: Split, *, steps: int | None = None) -> Sample:
    """A story of a number that changes step by step, then the worked steps and the final answer.

    `Mia has 34 coins. Mia gets 7 more. Mia doubles them. How many?` is answered by
    `34+7=41; 41*2=82. Answer: 82`. Numbers are 0 to 99.

    Args:
        seed: 0 or more.
        split: "train" or "test".
        steps: 2 to 5; drawn at random by default.

    The one answer covers the worked steps and the final answer; `final_answer` reads the latter from any text.
    """
    rng = _generator("arithmetic", seed, split)
    if steps is not None:
        checks.choice("steps", steps, STEPS)
    while True:
        start, operations = _operations(rng, rng.choice(STEPS) if steps is None else steps)
        if held_out_problem(start, operations) == (split == "test"):
            break
    person, things = rng.choice(PEOPLE), rng.choice(THINGS)
    story, work, total = [f"{person} has {start} {things}."], [], start
    for sign, operand in operations:
        after = _apply(total, sign, operand)
        story.append(f"{person} {_PHRASES[sign].format(operand)}.")
        work.append(f"{total}{sign}{operand}={after}")
        total = after
    prompt = " ".join(["Problem:", *story, "How many?"]) + "\nWork: "
    answer = f"{'; '.join(work)}. Answer: {total}"
    answered = Answer(len(prompt), len(prompt) + len(answer), 0.0, 0)
    return Sample("arithmetic", f"{prompt}{answer}\n", (answered,))


def final_answer(text: str) -> int | None:
    """The number after the first `Answer:` that a newline or the end of the text follows; None without one."""
    found = re.search(r"Answer: (\d+)(?=\n|$)", text)
    return int(found[1]) if found else None


def held_out_problem(start: int, operations: tuple[tuple[str, int], ...]) -> bool:
    """Whether a problem belongs to the split "test"."""
    return _held_out(f"problem {start} {operations}")


def copy(seed: int, split: Split, *, length: int = 1024, filler: str | None = None) -> Sample:
    """A span in braces, then the same span again; every other seed's span is random letters, else it is filler text.

    Args:
        seed: 0 or more.
        split: "train" or "test".
        length: tokens of the whole sample, which holds the span twice; one less if that does not fit evenly.
        filler: as in `needles`.
    """
    rng = _generator("copy", seed, split)
    checks.integer("length", length, COPY_OVERHEAD + 2)
    size = (length - COPY_OVERHEAD) // 2
    if seed % 2:
        span = "".join(rng.choice(LETTERS + "    ") for _ in range(size))
    else:
        span = _window(rng, filler, size).replace("{", "(").replace("}", ")")
    prompt = f"Copy: {{{span}}}\nAgain: {{"
    answer = Answer(len(prompt), len(prompt) + size, 0.0, len(prompt) - len("Copy: {"))
    return Sample("copy", f"{prompt}{span}}}\n", (answer,))


@cache
def held_out_text() -> str:
    """The text that fills held-out samples: the Constitution of the United States."""
    return resources.files("rapidkda").joinpath("data/us-constitution.txt").read_text("latin-1")


_PHRASES = {"+": "gets {} more", "-": "loses {}", "*": "has {} times as many"}


def _operations(rng: random.Random, steps: int) -> tuple[int, tuple[tuple[str, int], ...]]:
    start = total = rng.randint(1, MOST_COUNTED)
    operations: list[tuple[str, int]] = []
    while len(operations) < steps:
        sign = rng.choice("++--*")
        operand = rng.randint(2, 3) if sign == "*" else rng.randint(1, 30)
        after = _apply(total, sign, operand)
        if 0 <= after <= MOST_COUNTED:
            operations.append((sign, operand))
            total = after
    return start, tuple(operations)


def _apply(total: int, sign: str, operand: int) -> int:
    return {"+": total + operand, "-": total - operand, "*": total * operand}[sign]


def _generator(task: str, seed: int, split: Split) -> random.Random:
    checks.integer("seed", seed, 0)
    checks.choice("split", split, get_args(Split))
    return random.Random(f"{task} {split} {seed}")


def _held_out(what: str) -> bool:
    return zlib.crc32(what.encode()) % HELD_OUT_ONE_IN == 0


def _window(rng: random.Random, filler: str | None, size: int) -> str:
    text = held_out_text() if filler is None else filler
    if len(text) < size:
        raise ValueError(f"filler must be at least {size} tokens long, got {len(text)}")
    start = rng.randrange(len(text) - size + 1)
    return text[start : start + size]


def _word_start(text: str, place: int) -> int:
    """The first place from `place` on that a word starts at, or the end of the text."""
    found = text.find(" ", place)
    return len(text) if found < 0 else found + 1
