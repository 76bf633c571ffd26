"""Reference solutions: correct, well-formed, honest about every failed attempt, and short where they must be."""

from __future__ import annotations

import re
from random import Random
from statistics import median

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from explorl.tasks.answer_span import TAGS
from explorl.tasks.countdown import traces
from explorl.tasks.countdown.generator import MINI, PAPER, Space, make_splits
from explorl.tasks.countdown.solver import solve
from explorl.tasks.countdown.task import verify
from explorl.tasks.countdown.templates import terse
from explorl.tasks.countdown.traces import TERSE_ALPHABET, near_misses, trace
from explorl.tasks.expression import evaluate, numbers

from .expressions import oracle

EQUATION = re.compile(r"(\(?[0-9/]+\)?) ?([-+*/]) ?(\(?[0-9/]+\)?) ?= ?([0-9/]+)")
seeds = st.integers(0, 2**32)


def tokens(text: str) -> int:
    return len(re.sub("|".join(TAGS), "T", text))


def assert_honest(completion: str, target: int) -> None:
    """Every equation holds."""
    thought = completion.partition("</think>")[0]
    for left, op, right, result in EQUATION.findall(thought):
        assert oracle(f"{left}{op}{right}") == oracle(result), completion


@settings(max_examples=60, deadline=None)
@given(seeds, st.sampled_from(["words", "terse"]), st.integers(0, 2), st.integers(0, 3))
def test_every_trace_is_correct_well_formed_and_honest(seed: int, style: str, low: int, more: int) -> None:
    for nums, target in make_splits(PAPER, {"sft": 10}, seed=seed)["sft"]:
        completion = trace(nums, target, rng=Random(seed), style=style, attempts=(low, low + more))
        verdict = verify(completion, nums, target)
        assert verdict.correct
        assert verdict.well_formed
        assert_honest(completion, target)


def test_the_same_rng_gives_the_same_trace() -> None:
    first, other = (trace([3, 7, 12], 33, rng=Random(4), style="words") for _ in range(2))
    assert first == other
    assert len({trace([3, 7, 12], 33, rng=Random(seed), style="words") for seed in range(50)}) > 40


@pytest.mark.parametrize("style", ["words", "terse"])
def test_attempts_are_as_many_as_asked_for(style: str) -> None:
    rng = Random(0)
    seen = set()
    for _ in range(100):
        completion = trace([3, 7, 12, 50], 33, rng=rng, style=style, attempts=(1, 3))
        thought = completion.partition("</think>")[0]
        seen.add(thought.count(" too ") if style == "words" else thought.count("\n"))
    assert seen == {1, 2, 3}


def test_words_state_the_miss() -> None:
    for seed in range(50):
        completion = trace([3, 7, 12], 33, rng=Random(seed), attempts=(2, 2))
        for line in completion.splitlines():
            if " too " in line:
                value = int(EQUATION.findall(line)[-1][3])
                distance, side = re.search(r"(\d+) too (high|low)", line).groups()  # type: ignore[union-attr]
                assert value != 33
                assert value - 33 == (int(distance) if side == "high" else -int(distance))


@settings(max_examples=50, deadline=None)
@given(seeds)
def test_near_misses_use_all_numbers_and_are_different(seed: int) -> None:
    misses = near_misses([3, 7, 12, 20], 24, rng=Random(seed), count=4)
    assert len({str(tree) for tree in misses}) == len(misses) >= 3
    for tree in misses:
        assert sorted(numbers(tree)) == [3, 7, 12, 20]
        assert evaluate(tree) != 24
        assert isinstance(evaluate(tree), int)


def test_near_misses_are_nearer_than_chance(monkeypatch: pytest.MonkeyPatch) -> None:
    def median_distance() -> float:
        samples = (near_misses([3, 17, 12, 20], 50, rng=Random(seed), count=1) for seed in range(200))
        return float(median(abs(evaluate(tree) - 50) for trees in samples for tree in trees))

    near = median_distance()
    monkeypatch.setattr(traces, "_CANDIDATES", 1)
    assert near < median_distance() / 2


def test_where_there_is_nothing_to_miss_there_is_no_attempt() -> None:
    assert trace([7], 7, rng=Random(0), style="terse", attempts=(3, 3)) == "<think></think><answer>7</answer>"
    completion = trace([1, 1], 2, rng=Random(0), style="terse", attempts=(9, 9))
    assert completion == "<think>1*1=1\n1+1=2</think><answer>1+1</answer>"


def test_terse_by_hand() -> None:
    completion = trace([3, 7, 12], 33, rng=Random(0), style="terse", attempts=(0, 0))
    assert completion in (
        "<think>3*7=21 21+12=33</think><answer>3*7+12</answer>",
        "<think>7*3=21 21+12=33</think><answer>7*3+12</answer>",
    )
    assert terse([3, 7, 12], 33) == "3 7 12=33\n"


def test_terse_is_short_and_has_a_tiny_alphabet() -> None:
    rng = Random(0)
    lengths = []
    for nums, target in make_splits(MINI, {"sft": 2_000})["sft"]:
        completion = trace(nums, target, rng=rng, style="terse", attempts=(2, 2))
        assert set(re.sub("|".join(TAGS), "", completion) + terse(nums, target)) <= set(TERSE_ALPHABET)
        lengths.append(tokens(completion))
    assert sum(length <= 64 for length in lengths) > 0.9 * len(lengths)
    assert max(lengths) <= 80


def test_fractions_stand_in_brackets() -> None:
    completion = trace([3, 3, 8, 8], 24, rng=Random(0), style="words", attempts=(0, 0))
    assert "8 / 3 = 8/3\n3 - (8/3) = 1/3\n8 / (1/3) = 24\n" in completion
    assert completion.endswith("<answer>8 / (3 - (8 / 3))</answer>")


def test_uses_all_numbers_where_it_can() -> None:
    assert verify(trace([3, 7, 12], 5, rng=Random(0)), [3, 7, 12], 5).correct
    assert "<answer>12</answer>" in trace([3, 7, 12], 12, rng=Random(0))
    assert solve([2, 2, 9], 9, use_all=True) is not None
    assert "<answer>9</answer>" not in trace([2, 2, 9], 9, rng=Random(0))


def test_bad_options() -> None:
    with pytest.raises(ValueError, match="unknown style 'word'; did you mean 'words'"):
        trace([3, 7], 10, rng=Random(0), style="word")
    with pytest.raises(ValueError, match=r"attempts=\(2, 1\): give 0 ≤ low ≤ high, like \(0, 3\)"):
        trace([3, 7], 10, rng=Random(0), attempts=(2, 1))
    with pytest.raises(ValueError, match=r"nums=\[3, 7\] cannot give target=11"):
        trace([3, 7], 11, rng=Random(0))


def test_larger_spaces_too() -> None:
    space = Space(operands=(5, 5), numbers=(1, 30), targets=(1, 500))
    for nums, target in make_splits(space, {"sft": 5})["sft"]:
        assert verify(trace(nums, target, rng=Random(0)), nums, target).correct
