"""Search traces: correct, exact in every value, complete up to their bounds, no pair tried twice, short."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from random import Random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from explorl.tasks import get_task
from explorl.tasks.countdown.generator import PAPER, make_splits
from explorl.tasks.countdown.problem_files import TEST_FILE, TRAIN_FILE, read_jsonl
from explorl.tasks.countdown.search import LARGEST, ORDERS, SIGNS, search
from explorl.tasks.countdown.task import Countdown, verify
from explorl.tasks.countdown.traces import trace
from explorl.tasks.expression import numbers, parse

DATA = Path(__file__).parents[3] / "shared" / "data"
LINE = re.compile(r"([0-9]+) ([0-9]+)([:?])((?:[-+*/][0-9]+)*)(!?)(?:\|([0-9 ]+))?")
ENTRY = re.compile(r"([-+*/])([0-9]+)")
STEP = re.compile(r"([0-9]+)([-+*/])([0-9]+)=([0-9]+)")


def operated(op: str, p: int, q: int) -> int:
    """What an entry of a line must say, written down anew."""
    high, low = sorted((p, q), reverse=True)
    if op == "/":
        assert high % low == 0
        return high // low
    return {"+": high + low, "-": high - low, "*": high * low}[op]


def read(completion: str, nums: list[int], target: int) -> list[tuple[int, int]]:
    """The pairs that were tried, after every line has been checked against what stands before it."""
    first, *lines = completion.removeprefix("<think>").partition("</think>")[0].splitlines()
    assert first == SIGNS
    assert set("".join(lines)) <= {*SIGNS, " "}
    steps = list(itertools.takewhile(STEP.fullmatch, reversed(lines)))
    for p, op, q, result in (STEP.fullmatch(line).groups() for line in steps):  # type: ignore[union-attr]
        assert operated(op, int(p), int(q)) == int(result)
        assert op in "+*" or int(p) >= int(q)
    pairs: list[tuple[int, int]] = []
    reached: set[int] = set()
    values: set[int] = set()
    left: list[int] = []
    searched = lines[: len(lines) - len(steps)]
    for index, line in enumerate(searched):
        match = LINE.fullmatch(line)
        assert match, line
        p, q, mark, entries, hit, rest = match.groups()
        results = []
        for op, value in ENTRY.findall(entries):
            assert operated(op, int(p), int(q)) == int(value), line
            assert 0 < int(value) <= max(LARGEST, target)
            results.append(int(value))
        if rest:
            pairs.append((int(p), int(q)))
            left = [int(number) for number in rest.split()]
            assert sorted([*pairs[-1], *left]) == sorted(nums)
            values, reached = set(results), {target, *left}
        elif len(nums) > 2:
            assert {int(p), int(q)} <= reached  # nothing from nowhere
            reached |= set(results)
        if mark == "?" and len(nums) > 2:
            assert results, "a line that says nothing"
            assert not values & set(results[:-1])
            assert bool(hit) is (results[-1] in values)
        assert bool(hit) is (index == len(searched) - 1)
    return pairs


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from(sorted(ORDERS)))
@example(5036, "guided")  # 68 * 60 is larger than what may be written down
def test_every_search_is_correct_and_every_value_follows(seed: int, order: str) -> None:
    for nums, target in make_splits(PAPER, {"sft": 10}, seed=seed)["sft"]:
        completion = search(nums, target, rng=Random(seed), order=order)
        if completion is None:
            continue
        verdict = verify(completion, nums, target)
        assert verdict.correct
        assert verdict.well_formed
        answer = completion.partition("<answer>")[2].partition("</answer>")[0]
        assert sorted(numbers(parse(answer))) == sorted(nums)
        pairs = read(completion, list(nums), target)
        assert len(set(nums)) < len(nums) or len({tuple(sorted(pair)) for pair in pairs}) == len(pairs)
        if order == "systematic":
            assert pairs == list(itertools.combinations(nums, 2))[: len(pairs)]


def whole_values(nums: tuple[int, ...]) -> set[int]:
    """All that the numbers give by whole and positive steps, by brute force."""
    if len(nums) == 1:
        return set(nums)
    values: set[int] = set()
    for size in range(1, len(nums)):
        for part in itertools.combinations(range(len(nums)), size):
            some = tuple(nums[i] for i in part)
            rest = tuple(nums[i] for i in range(len(nums)) if i not in part)
            for p, q in itertools.product(whole_values(some), whole_values(rest)):
                high, low = max(p, q), min(p, q)
                values |= {p + q, p * q} | ({high - low} - {0}) | ({high // low} if high % low == 0 else set())
    return values


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(1, 30), min_size=2, max_size=3).map(tuple))
def test_finds_all_that_up_to_three_numbers_give(nums: tuple[int, ...]) -> None:
    possible = whole_values(nums)
    for target in range(1, 120):
        completion = search(nums, target, rng=Random(0))
        if completion is not None:
            assert verify(completion, nums, target).correct
            read(completion, list(nums), target)
        # A number and the target may be equal, and what the others give zero, or one with a division by it.
        if target not in nums:
            assert (completion is not None) is (target in possible)


def test_finds_nearly_all_that_four_numbers_give() -> None:
    rng = Random(3)
    solved = total = 0
    for _ in range(6):
        nums = tuple(rng.randint(1, 20) for _ in range(4))
        possible = sorted(value for value in whole_values(nums) if 10 <= value <= 100)
        solved += sum(search(nums, target, rng=rng) is not None for target in possible)
        total += len(possible)
    assert total > 150
    assert solved > 0.97 * total


def test_the_docstrings_example() -> None:
    from explorl.tasks.countdown import search as countdown_search

    lines = [line for line in (countdown_search.__doc__ or "").splitlines() if re.match(r"    [0-9]+ [0-9]+[:?]", line)]
    lines = [line.strip().split("  ")[0] for line in lines]
    assert countdown_search.try_pair((35, 18, 7, 9), 61, (0, 1)).text.splitlines() == lines


def test_by_hand() -> None:
    completion = search([60, 24, 6], 78, rng=Random(0))
    assert completion == (
        f"<think>{SIGNS}\n60 24:+84-36*1440|6\n78 6?+84!\n60+24=84\n84-6=78\n</think><answer>(60+24)-6</answer>"
    )
    assert search([7], 7, rng=Random(0)) == "<think></think><answer>7</answer>"
    assert search([7], 8, rng=Random(0)) is None
    assert search([3, 7], 21, rng=Random(0)) == f"<think>{SIGNS}\n3 7?+10-4*21!\n7*3=21\n</think><answer>7*3</answer>"
    assert search([3, 3, 8, 8], 24, rng=Random(0)) is None  # 8 / (3 - 8 / 3) alone


def test_no_sign_is_merged_with_another() -> None:
    """Whatever the tokenizer: signs stand between digits, and a prompt that ends with a sign before a digit."""
    assert re.fullmatch(r"([0-9][^0-9])+[0-9]", SIGNS)
    assert set("+-*/:?|!=0123456789") == set(SIGNS)


def test_the_same_seed_gives_the_same_text_and_others_give_variants() -> None:
    problem = ([26, 27, 21, 2], 37)
    for order in ORDERS:
        first, other = (search(*problem, rng=Random(4), order=order) for _ in range(2))
        assert first == other
        variants = {search(*problem, rng=Random(seed), order=order) for seed in range(30)}
        assert len(variants) == 1 if order == "systematic" else len(variants) > 4


def test_hints_make_searches_shorter() -> None:
    puzzles = make_splits(PAPER, {"sft": 200}, seed=1)["sft"]
    mean = {}
    for order in ("shuffled", "guided"):
        texts = [search(nums, target, rng=Random(seed), order=order) for seed, (nums, target) in enumerate(puzzles)]
        mean[order] = sum(len(text) for text in texts if text) / len(puzzles)
    assert mean["guided"] < 0.95 * mean["shuffled"]


@pytest.mark.skipif(not DATA.is_dir(), reason="the real problems are not here")
def test_real_problems_are_solved_within_900_characters() -> None:
    puzzles = read_jsonl(DATA / TRAIN_FILE)[::9]
    texts = [search(nums, target, rng=Random(0)) for nums, target in puzzles]
    for text, (nums, target) in zip(texts, puzzles, strict=True):
        assert text is None or verify(text, nums, target).correct
    # every character is at most one token of a tokenizer that parts numbers into digits
    assert sum(text is not None and len(text) <= 900 for text in texts) > 0.97 * len(puzzles)


def test_as_a_style_of_traces_and_of_a_task() -> None:
    assert trace([60, 24, 6], 78, rng=Random(0), style="systematic") == search([60, 24, 6], 78, rng=Random(0))
    with pytest.raises(ValueError, match=r"does not get from nums=\[3, 3, 8, 8\] to target=24; use the style 'words'"):
        trace([3, 3, 8, 8], 24, rng=Random(0), style="guided")
    with pytest.raises(ValueError, match=r"takes one to 4 numbers; for more use the style 'words'"):
        trace([1, 2, 3, 4, 5], 15, rng=Random(0), style="guided")
    with pytest.raises(ValueError, match="unknown style 'guide'; did you mean 'guided'"):
        Countdown(source="generated", style="guide")
    task = get_task("countdown", source="generated", style="guided", sizes={"sft": 40})
    rows = list(task.examples(60, template="paper-opened", seed=1))
    assert len(rows) == 60
    assert all(row["completion"].startswith(SIGNS) for row in rows)
    assert rows == list(task.examples(60, template="paper-opened", seed=1))


def test_a_style_that_solves_nothing_says_so(tmp_path: Path) -> None:
    path = tmp_path / "splits.jsonl"
    path.write_text('{"split": "sft", "nums": [3, 3, 8, 8], "target": 24}\n')
    with pytest.raises(ValueError, match="style='guided' solves none of the 1 sft problems"):
        list(Countdown(split_file=path, style="guided").examples(3))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    splits = make_splits(PAPER, {"holdout": 500, "train": 400, "sft": 30}, seed=0)
    for name, split in ((TRAIN_FILE, "train"), (TEST_FILE, "sft")):
        rows = (f'{{"nums": {list(nums)}, "target": {target}}}\n' for nums, target in splits[split])
        (tmp_path / name).write_text("".join(rows))
    return tmp_path


def test_validation_problems_come_out_of_the_training_file(folder: Path) -> None:
    whole, tuned = Countdown(data_dir=folder), Countdown(data_dir=folder, validation=True)
    held_out = {problem.id for problem in tuned.problems("holdout")}
    train = {problem.id for problem in whole.problems("train")}
    assert 10 < len(held_out) < 45
    assert held_out < train
    assert {problem.id for problem in tuned.problems("train")} == train - held_out
    with pytest.raises(ValueError, match="validation is for the problems of the hub or of a data_dir"):
        Countdown(source="generated", validation=True)


def test_nothing_is_learnt_from_what_is_tested(folder: Path) -> None:
    """The file's problems come from the same generator and seed, as do those of the synthetic holdout."""
    tuned = Countdown(data_dir=folder, validation=True, sizes={"sft": 600})
    learnt = {problem.id for problem in tuned.problems("sft")}
    tested = Countdown(data_dir=folder).problems("holdout") + Countdown(source="generated").problems("holdout")
    assert not learnt & {problem.id for problem in [*tested, *tuned.problems("train"), *tuned.problems("holdout")]}
