"""The mathematics of dynamic sampling and of skipping solved prompts, against NumPy."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from explorl.rollout import PaddedRollouts
from explorl.training.grpo.dynamic import DynamicSampling, as_option, expected_cost, keep_rate, varies
from explorl.training.grpo.prompt_source import fresh_rows, row_key
from explorl.training.grpo.sampled_rows import SampledGroups, SampledRows
from explorl.training.grpo.solved import STATE, SkipSolved, SolveStreaks, keyed_uniform, solve_rates

NAN = float("nan")


# ---------------------------------------------------------------- which groups have variance


def reference_varies(values: np.ndarray, generations: int) -> list[bool]:
    results = []
    for group in values.reshape(-1, generations, values.shape[1]):
        columns = [column[~np.isnan(column)] for column in group.T]
        results.append(any(len(column) > 1 and np.ptp(column) > 1e-6 * max(1, abs(column.max())) for column in columns))
    return results


def test_varies_is_its_formula() -> None:
    draw = np.random.default_rng(0)
    values = draw.choice([0.0, 1.0, NAN], size=(400, 2), p=[0.5, 0.2, 0.3]).astype(np.float32)
    expected = reference_varies(values, 4)
    assert 10 < sum(expected) < 90
    assert varies(torch.tensor(values), 4).tolist() == expected


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        ([1, 1, 1, 1], False),
        ([1, 1, 0, 1], True),
        ([NAN, 1, NAN, 1], False),
        ([NAN, 1, NAN, 0], True),
        ([NAN, NAN, NAN, 1], False),
        ([NAN] * 4, False),
        ([0.3, 0.1 + 0.2, 0.3, 0.3], False),
        ([1e4, 1e4, 1e4 + 1, 1e4], True),
        ([-5, -5, -5, -5.5], True),
    ],
)
def test_what_counts_as_variance(rewards: list[float], expected: bool) -> None:
    assert varies(torch.tensor(rewards, dtype=torch.float64).unsqueeze(1), 4).tolist() == [expected]


# ---------------------------------------------------------------- what it costs


def enumerated(groups: int, rate: float, max_rounds: int) -> tuple[float, float, float]:
    """Means over every outcome of P places that are drawn for at most R + 1 times each."""
    draws, rounds, left = 0.0, 0.0, 0.0
    lengths = range(1, max_rounds + 3)  # the last one: all R + 1 draws failed
    for outcome in itertools.product(lengths, repeat=groups):
        failed = [samples == max_rounds + 2 for samples in outcome]
        counts = [min(samples, max_rounds + 1) for samples in outcome]
        chance = np.prod(
            [
                (1 - rate) ** (max_rounds + 1) if bad else rate * (1 - rate) ** (samples - 1)
                for samples, bad in zip(outcome, failed, strict=True)
            ]
        )
        draws += chance * sum(counts)
        rounds += chance * (max(counts) - 1)
        left += chance * sum(failed)
    return draws, rounds, left


@pytest.mark.parametrize(("groups", "rate", "max_rounds"), [(1, 0.3, 4), (3, 0.5, 3), (4, 0.1, 2), (2, 1.0, 3)])
def test_the_cost_is_that_of_all_outcomes(groups: int, rate: float, max_rounds: int) -> None:
    assert tuple(expected_cost(groups, rate, max_rounds)) == pytest.approx(enumerated(groups, rate, max_rounds))


def test_the_cost_without_a_bound_is_negative_binomial() -> None:
    assert expected_cost(16, 0.25, 500).groups == pytest.approx(16 / 0.25)
    with pytest.raises(ValueError, match=r"rate is 0; use the share"):
        expected_cost(16, 0, 3)


def test_the_keep_rate_is_that_of_all_groups() -> None:
    p, size = 0.3, 4
    mixed = sum(
        np.prod([p if right else 1 - p for right in group])
        for group in itertools.product([True, False], repeat=size)
        if any(group) and not all(group)
    )
    assert keep_rate(p, size) == pytest.approx(mixed)
    assert keep_rate(0.0, size) == keep_rate(1.0, size) == 0


def test_overdraw_asks_for_what_will_be_enough_on_average() -> None:
    plain, more = DynamicSampling(), DynamicSampling(overdraw=True)
    assert plain.groups(3, batch=16, drawn=16, varied=2) == 3
    assert more.groups(3, batch=16, drawn=16, varied=8) == 6  # 3 · 18/9
    assert more.groups(3, batch=16, drawn=16, varied=16) == 4  # 3 · 18/17
    assert more.groups(12, batch=16, drawn=16, varied=0) == 16  # no more than a batch


# ---------------------------------------------------------------- options


@pytest.mark.parametrize(
    ("kind", "value", "words"),
    [
        (DynamicSampling, {"max_rounds": 0}, r"max_rounds is 0; use the maximum number of further rounds .* such as 3"),
        (DynamicSampling, {"max_rounds": True}, "max_rounds is True"),
        (DynamicSampling, {"max_rounds": 2.5}, r"max_rounds is 2\.5"),
        (DynamicSampling, {"by": "acc"}, "by is 'acc'; use 'reward' or 'correct'"),
        (DynamicSampling, {"overdraw": 2}, "overdraw is 2; use True or False"),
        (DynamicSampling, {"rounds": 2}, "has no setting 'rounds'; it has max_rounds, by, overdraw"),
        (DynamicSampling, "yes", r"is 'yes'; use True, False, DynamicSampling\(\.\.\.\) or a mapping"),
        (SkipSolved, {"visits": 0}, "visits is 0; use a whole number of 1 or more, such as 2"),
        (SkipSolved, {"floor": 0}, r"floor is 0; use a probability above 0 .* such as 0\.1"),
        (SkipSolved, {"floor": NAN}, "floor is nan"),
        (SkipSolved, {"floor": True}, "floor is True"),
        (SkipSolved, {"remembered": -1}, "remembered is -1"),
        (SkipSolved, 3, "is 3; use True, False, SkipSolved"),
    ],
)
def test_bad_options_are_told_in_words(kind: Any, value: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        as_option(kind, value, "option")


def test_good_options() -> None:
    assert as_option(DynamicSampling, None, "option") is as_option(DynamicSampling, False, "option") is None
    assert as_option(DynamicSampling, True, "option") == DynamicSampling()
    assert as_option(DynamicSampling, {"max_rounds": 5}, "option") == DynamicSampling(max_rounds=5)
    assert as_option(SkipSolved, SkipSolved(3), "option") == SkipSolved(3)


# ---------------------------------------------------------------- fresh prompts

ROWS = [{"prompt": f"prompt {index}", "answer": index} for index in range(40)]


def fresh(number: int = 0, seed: int = 0, **options: Any) -> list[dict[str, Any]]:
    options = {"taken": [row_key(row) for row in ROWS[:5]], **options}
    return [choice.row for choice in fresh_rows(len(ROWS), ROWS.__getitem__, seed=seed, number=number, **options)]


def test_fresh_prompts_are_all_others_once_in_an_order_of_their_own() -> None:
    rows = fresh()
    assert sorted(row["answer"] for row in rows) == list(range(5, 40))
    assert rows == fresh()
    assert rows != fresh(number=1)
    assert rows != fresh(seed=1)
    assert fresh(seed=-1)
    assert fresh(taken=map(row_key, ROWS)) == []
    assert fresh(skips=lambda key: key != row_key(ROWS[7])) == [ROWS[7]]


def test_every_prompt_is_as_likely_to_come_first() -> None:
    """Chi-square with 34 degrees of freedom: above 79 once in 50,000 times."""
    firsts = [fresh(number=number)[0]["answer"] for number in range(700)]
    counts = np.bincount(firsts, minlength=40)[5:]
    assert ((counts - 20) ** 2 / 20).sum() < 79


def test_rows_are_told_apart_by_more_than_their_prompt() -> None:
    """A data set may ask the same thing of different data; and it may hold what JSON cannot."""
    same = [
        {"prompt": "Sort the list.", "data": [2, 1], "blob": object()},
        {"prompt": "Sort the list.", "data": [3, 1]},
    ]
    assert row_key(same[0]) != row_key(same[1])
    assert row_key(same[0]) == row_key({**same[0], "blob": object()})
    assert row_key({"prompt": [{"role": "user", "content": "é"}]}) == row_key(
        {"prompt": [{"role": "user", "content": "é"}]}
    )
    twice = [ROWS[0], ROWS[0], ROWS[1]]
    assert len(list(fresh_rows(3, twice.__getitem__, seed=0, number=0, taken=()))) == 2


# ---------------------------------------------------------------- exchanged rows


def drawn(lengths: list[int], value: float, extra: dict[str, list[Any]], temperature: bool = True) -> SampledGroups:
    """Rows whose records are 0 after each answer's end."""
    width = max(lengths)
    tokens = torch.arange(width) < torch.tensor(lengths).unsqueeze(1)
    records = PaddedRollouts(
        token_ids=tokens.long(),
        mask=tokens,
        logps=-value * tokens,
        sampling_logps=tokens.float(),
        entropy=tokens.float(),
        branching=tokens.long(),
        prompt_index=torch.arange(len(lengths)),
        truncated=torch.tensor([value > 1] * len(lengths)),
        sampled=tokens,
    )
    ids = [[int(value)] * length for length in lengths]
    inputs = [{"prompt": f"{value}"} for _ in lengths]
    sampled = SampledRows([f"{value}"] * len(lengths), ids, extra=extra)
    sampled.reward_parts = torch.full((len(lengths), 1), value)
    temperatures = torch.full(tokens.shape, value) if temperature else None
    sampled.record(ids, records, temperatures, temperatures)
    return SampledGroups(inputs, sampled)


def test_exchanged_rows_bring_their_records_with_them() -> None:
    """The longest answer goes, so that all are shorter; and the other way round."""
    old, new = drawn([2, 5], 1.0, {"seen": ["a", "b"]}), drawn([3, 1], 2.0, {"said": ["c", "d"]})
    old.replace_row(1, {"prompt": "new"}, new.row(0))
    old.replace_rewards(1, new.reward_parts[0])
    found = old.merged()
    assert old.inputs == [{"prompt": "1.0"}, {"prompt": "new"}]
    assert found.prompts == ["1.0", "new"]
    assert found.completion_ids == [[1, 1], [2, 2, 2]]
    assert found.extra == {"said": [None, "c"], "seen": ["a", None]}
    assert found.reward_parts.tolist() == [[1.0], [2.0]]
    assert found.records is not None
    assert found.records.logps.tolist() == [[-1, -1, 0], [-2, -2, -2]]
    assert found.records.truncated.tolist() == [False, True]
    assert found.sampling_temperature is found.training_temperature
    assert found.sampling_temperature is not None
    assert found.sampling_temperature.tolist() == [[1, 1, 1], [2, 2, 2]]

    new.replace_row(1, {"prompt": "old"}, drawn([5, 5], 1.0, {}).row(0))
    found = new.merged()
    assert found.records is not None
    assert found.sampling_temperature is not None
    assert found.records.logps.tolist() == [[-2, -2, -2, 0, 0], [-1] * 5]
    assert found.sampling_temperature.tolist() == [[2, 2, 2, 1, 1], [1] * 5]


def test_what_was_recorded_of_some_rows_only_is_recorded_of_none() -> None:
    """Nor on a process that gets none of those rows: else it would go on by itself."""
    other = drawn([3], 2.0, {}, temperature=False).row(0)
    gets, gets_none, alike = drawn([2, 5], 1.0, {}), drawn([4, 1], 1.0, {}), drawn([4, 1], 1.0, {})
    for here in (gets, gets_none):
        here.drop_partial_records([drawn([3], 2.0, {}).row(0), other])
    gets.replace_row(0, {"prompt": "new"}, other)
    for here in (gets, gets_none):
        assert here.merged().records is here.merged().sampling_temperature is None
    alike.drop_partial_records([drawn([3], 2.0, {}).row(0)])
    assert alike.merged().records is not None
    assert alike.merged().sampling_temperature is not None


# ---------------------------------------------------------------- solved prompts


def test_solve_rates_leave_out_what_was_not_scored() -> None:
    correctness = torch.tensor([1, 1, 1, NAN, 1, 0, 0.5, 1, NAN, NAN, NAN, NAN])
    np.testing.assert_allclose(solve_rates(correctness, 1.0, 4).numpy(), [1, 0.5, NAN])


def test_a_prompt_is_skipped_after_so_many_visits_that_solved_it() -> None:
    streaks = SolveStreaks(SkipSolved(visits=2, floor=0.25), seed=0)

    def visit(rate: float) -> None:
        streaks.record(["a"], torch.tensor([rate]))

    def skipped() -> float:
        return float(np.mean([streaks.skips("a", number) for number in range(2000)]))

    assert skipped() == 0
    visit(1.0)
    assert (skipped(), streaks.solved) == (0, 0)
    visit(1.0)
    assert streaks.solved == 1
    assert abs(skipped() - 0.75) < 4 * (0.75 * 0.25 / 2000) ** 0.5
    visit(NAN)
    assert skipped() > 0
    visit(0.75)
    assert (skipped(), streaks.solved) == (0, 0)
    visit(1.0)
    assert skipped() == 0


def test_memory_is_bounded_and_survives_a_checkpoint(tmp_path: Path) -> None:
    streaks = SolveStreaks(SkipSolved(visits=1, remembered=3), seed=0)
    streaks.record(list("abcd"), torch.ones(4))
    streaks.record(["b"], torch.ones(1))
    streaks.record(["e"], torch.ones(1))
    streaks.write(tmp_path)
    assert (tmp_path / STATE).read_text() == '{"d": 1, "b": 1, "e": 1}'
    again = SolveStreaks(SkipSolved(visits=1, remembered=3), seed=0)
    again.read(tmp_path)
    numbers = range(50)
    assert [again.skips("b", number) for number in numbers] == [streaks.skips("b", number) for number in numbers]
    again.read(tmp_path / "nowhere")
    assert again.solved == 3


def test_keyed_numbers_are_even() -> None:
    values = np.array([keyed_uniform("x", number) for number in range(4000)])
    assert (values >= 0).all()
    assert (values < 1).all()
    assert abs(values.mean() - 0.5) < 4 * (1 / 12 / 4000) ** 0.5
