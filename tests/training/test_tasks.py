"""The synthetic tasks: samples are well formed, seeded, right by an independent solver, and the splits are disjoint."""

from __future__ import annotations

import re

import pytest

from rapidkda.training import tasks
from rapidkda.training.tasks import Sample


def samples(split: tasks.Split, seeds: range = range(40)) -> list[Sample]:
    makers = (tasks.needles, tasks.arithmetic, tasks.copy)
    return [maker(seed, split) for maker in makers for seed in seeds]


def test_samples_are_pure_functions_of_their_seeds() -> None:
    assert samples("test", range(4)) == samples("test", range(4))
    assert len({sample.text for split in ("train", "test") for sample in samples(split)}) == 2 * 3 * 40


@pytest.mark.parametrize("length", [512, 4096, 16384])
def test_needles_are_in_the_text_and_asked_for_once(length: int) -> None:
    count = min(tasks.NEEDLES, tasks.most_needles(length))
    for seed in range(10):
        sample = tasks.needles(seed, "test", length=length, count=count)
        assert len(sample.tokens) == length
        context, questions = sample.text.split(tasks.RECALL)
        facts = dict(re.findall(r"\[([a-z]{3})=(\d{4})\] ", context))
        assert len(facts) == count == len(sample.answers)
        assert re.fullmatch(rf"(\[[a-z]{{3}}=\d{{4}}\] ){{{count}}}", questions)
        assert dict(re.findall(r"([a-z]{3})=(\d{4})", questions)) == facts
        for answer, value in zip(sample.answers, sample.expected):
            key = sample.text[answer.start - 4 : answer.start - 1]
            assert facts[key] == value
            end = answer.start - answer.distance
            assert sample.text[end - 8 : end] == f"{key}={value}"
            assert answer.depth == pytest.approx(end / len(context))


def test_needles_lie_at_all_depths() -> None:
    depths = [answer.depth for seed in range(20) for answer in tasks.needles(seed, "train").answers]
    counts = [sum(i / 10 <= depth < (i + 1) / 10 for depth in depths) for i in range(10)]
    assert min(counts) > 0.05 * len(depths)


def test_arithmetic_is_solved_by_reading_the_story() -> None:
    for split in ("train", "test"):
        for seed in range(300):
            sample = tasks.arithmetic(seed, split)
            sentences = sample.prompt.removeprefix("Problem: ").split(". ")
            total = int(sentences[0].split()[2])
            for sentence in sentences[1:-1]:
                number = int(re.findall(r"\d+", sentence)[0])
                total += number if "gets" in sentence else -number if "loses" in sentence else (number - 1) * total
                assert 0 <= total <= 99
            assert tasks.final_answer(sample.text) == total
            for a, sign, b, c in re.findall(r"(\d+)([-+*])(\d+)=(\d+)", sample.text):
                assert {"+": int(a) + int(b), "-": int(a) - int(b), "*": int(a) * int(b)}[sign] == int(c)


def test_a_given_number_of_steps_is_kept() -> None:
    for steps in tasks.STEPS:
        assert tasks.arithmetic(3, "train", steps=steps).text.count("=") == steps


def test_final_answer_needs_the_whole_number() -> None:
    assert tasks.final_answer("1+1=2. Answer: 2\nmore 7") == 2
    assert tasks.final_answer("Answer: 41") == 41
    assert tasks.final_answer("Answer: x") is None
    assert tasks.final_answer("41\n") is None


@pytest.mark.parametrize("length", [64, 1024, 4096])
def test_copies_are_exact(length: int) -> None:
    for seed in range(8):
        sample = tasks.copy(seed, "test", length=length)
        span = sample.prompt.removeprefix("Copy: {").removesuffix("}\nAgain: {")
        assert sample.expected == (span,)
        assert len(sample.tokens) in (length, length - 1)
        assert sample.text[sample.answers[0].start - sample.answers[0].distance :].startswith(span)


def test_the_splits_share_no_key_and_no_problem() -> None:
    def keys(split: tasks.Split) -> set[str]:
        return {key for seed in range(60) for key in re.findall(r"\[([a-z]{3})=", tasks.needles(seed, split).text)}

    def problems(split: tasks.Split) -> set[str]:
        texts = [tasks.arithmetic(seed, split).text.split("Work: ")[1] for seed in range(2000)]
        return set(texts)

    assert keys("train") & keys("test") == set()
    assert problems("train") & problems("test") == set()
    assert len(keys("test")) > 500
    assert len(problems("test")) > 1900


def test_mistakes_are_named() -> None:
    with pytest.raises(ValueError, match="count must be at most"):
        tasks.needles(0, "train", length=512)
    with pytest.raises(ValueError, match="split must be"):
        tasks.needles(0, "dev")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="steps must be"):
        tasks.arithmetic(0, "train", steps=9)
    with pytest.raises(ValueError, match="filler must be at least"):
        tasks.copy(0, "train", length=1000, filler="short")
    with pytest.raises(ValueError, match="seed must be"):
        tasks.copy(-1, "train")
