"""Two looks with one level: the shares, the p values, and errors and power in planted studies."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from explorl.analysis.interim_looks import SequentialPlan
from explorl.analysis.verdicts import is_significant
from explorl.stats.crossed import crossed_mean, power
from explorl.stats.distributions import student_quantile
from explorl.stats.sequential import (
    Design,
    detectable_effect,
    detection_chance,
    expected_findings,
    select_arms,
    sequential_p,
)

EIGHT = Design(first=3, seeds=8, keep=4, arms=13, measures=3)


def phi(z: float) -> float:
    return math.erfc(-z / math.sqrt(2)) / 2


def planted(
    rng: np.random.Generator, arms: int, seeds: int, problems: int, of_seeds: float, of_problems: float
) -> np.ndarray:
    """arms × seeds × problems, the first being the baseline: a spread between trainings, between how hard problems are
    for an arm, and of the samples."""
    training = of_seeds * rng.standard_normal((arms, seeds, 1))
    hard = of_problems * rng.standard_normal((arms, 1, problems))
    return training + hard + rng.standard_normal((arms, seeds, problems))


def study_of(values: np.ndarray, design: Design) -> tuple[SequentialPlan, dict[str, Any], dict[str, Any]]:
    """A study of one measure in which the arms that look alive have all seeds and the others the first ones."""
    arms = tuple(f"arm {place}" for place in range(1, len(values)))
    looks = SequentialPlan(design, tuple(range(design.seeds)), ("pass@1",), arms)
    differences = {name: values[place + 1] - values[0] for place, name in enumerate(arms)}
    whole = {name: dict(enumerate(one)) for name, one in differences.items()}
    first = {name: {seed: one[seed] for seed in looks.first_seeds} for name, one in whole.items()}
    decided = looks.decisions({"pass@1": first}, {})
    paired = {"pass@1": {name: whole[name] if decided[name] == "goes on" else first[name] for name in arms}}
    return looks, decided, looks.differences(paired)


def most(studies: int, rate: float = 0.05) -> int:
    """Findings that so many studies exceed with a chance below one in a thousand, at this rate."""
    count, chance, term = 0, 1.0, studies * math.log1p(-rate)
    while (chance := chance - math.exp(term)) > 0.001:
        term += math.log((studies - count) / (count + 1) * rate / (1 - rate))
        count += 1
    return count


def test_the_shares_are_obrien_and_flemings() -> None:
    early = 2 * (1 - phi(1.959963984540054 / math.sqrt(3 / 8))) / 0.05
    assert EIGHT.shares == pytest.approx((early, 1 - early), rel=1e-9)
    assert EIGHT.shares[0] == pytest.approx(0.0274, abs=1e-4)
    assert EIGHT.levels == pytest.approx((0.00137, 0.04863), abs=1e-5)
    later = Design(6, 8, 4, 13, 3).shares[0]
    assert EIGHT.shares[0] < later < 0.6, "the more of the seeds are in, the more may be spent"
    assert (EIGHT.seeds_by_look, EIGHT.tests) == ((3, 8), 39)


@pytest.mark.parametrize(("first", "seeds"), [(1, 8), (8, 8), (9, 8), (0, 3)])
def test_a_look_needs_seeds_before_and_after_it(first: int, seeds: int) -> None:
    with pytest.raises(ValueError, match=f"at {first} of {seeds} seeds; .* such as 3 of 8"):
        Design(first, seeds, 4, 13, 1)


def test_a_p_value_over_both_looks() -> None:
    assert sequential_p([0.002], (0.1, 0.9)) == pytest.approx(0.02)
    assert sequential_p([0.2, 0.0018], (0.1, 0.9)) == pytest.approx(0.002)
    assert sequential_p([0.001, 0.9], (0.1, 0.9)) == pytest.approx(0.01), "what an early look found stays found"
    assert sequential_p([0.5], (0.1, 0.9)) == 1.0


def test_the_arms_of_most_promise_go_on() -> None:
    assert select_arms({"a": 0.1, "b": 0.9, "c": 0.1, "d": 0.3}, 3) == ["a", "b", "d"]
    assert select_arms({"a": 0.1}, 3) == ["a"]
    level = EIGHT.levels[1] / 39
    both = expected_findings({"pass@1": (0.02, 0.01), "entropy": (-0.003, 0.001)}, EIGHT)
    assert both == pytest.approx(power(0.02, 0.01, 8, level) + power(0.003, 0.001, 8, level))
    assert (
        expected_findings({"pass@1": (0.0, 0.0)}, EIGHT) == 0 < expected_findings({"pass@1": (0.01, 0.0)}, EIGHT) == 1
    )


def at_a_stroke(values: np.ndarray, design: Design) -> tuple[np.ndarray, np.ndarray]:
    """The same for many studies of one measure at once, written out: studies × arms × seeds × problems → whether
    Holm's first step finds any arm, and whether the first arm's interval leaves out 0."""
    x = values[:, 1:] - values[:, :1]
    problems = x.shape[3]
    found_any = np.zeros(len(x), dtype=bool)
    alive = np.ones(x.shape[:2], dtype=bool)
    outside = np.zeros(len(x), dtype=bool)
    for seeds, level in zip(design.seeds_by_look, design.levels, strict=True):
        part = x[:, :, :seeds]
        by_seed, by_problem, mean = part.mean(3), part.mean(2), part.mean((2, 3))
        rest = part - by_seed[..., None] - by_problem[:, :, None] + mean[..., None, None]
        ms_rest = (rest**2).sum((2, 3)) / ((seeds - 1) * (problems - 1))
        of_seeds = by_seed.var(2, ddof=1) / seeds
        of_problems = np.maximum(seeds * by_problem.var(2, ddof=1) - ms_rest, 0) / (seeds * problems)

        def reach(tail: float, seeds: int = seeds, of: tuple[Any, Any] = (of_seeds, of_problems)) -> np.ndarray:
            lines = student_quantile(1 - tail / 2, seeds - 1), student_quantile(1 - tail / 2, problems - 1)
            return np.sqrt(lines[0] ** 2 * of[0] + lines[1] ** 2 * of[1])

        found_any |= (alive & (np.abs(mean) > reach(level / design.arms))).any(1)
        outside = np.where(alive[:, 0], np.abs(mean[:, 0]) > reach(level)[:, 0], outside)
        rank = np.argsort(np.argsort(-np.abs(mean), axis=1), axis=1)
        alive = rank < design.keep
    return found_any, outside


def test_the_study_finds_what_the_formulas_find() -> None:
    """Planted effects of all sizes; some studies find an arm and some do not."""
    design = Design(3, 6, 2, 4, 1)
    rng = np.random.default_rng(0)
    values = np.stack([planted(rng, 5, 6, 12, 0.4, 0.2) for _ in range(24)])
    values[:, 1] += np.linspace(0, 4, 24)[:, None, None]
    expected, outside = at_a_stroke(values, design)
    for one, any_found, left_out in zip(values, expected, outside, strict=True):
        _, _, differences = study_of(one, design)
        assert any(is_significant(own["pass@1"]) for own in differences.values()) == any_found
        told = differences["arm 1"]["pass@1"]
        assert (not told["low"] <= 0 <= told["high"]) == left_out
    assert 4 <= expected.sum() <= 20


def errors(studies: int, design: Design, of_seeds: float, of_problems: float, seed: int) -> tuple[int, int]:
    """Studies with any finding, and those in which an arm's interval misses the truth, where no arm differs."""
    rng = np.random.default_rng(seed)
    wrong = missed = 0
    for _ in range(studies // 100):
        size = (100, design.arms + 1)
        values = of_seeds * rng.standard_normal((*size, design.seeds, 1))
        values = values + of_problems * rng.standard_normal((*size, 1, 32))
        values += rng.standard_normal((*size, design.seeds, 32))
        found_any, outside = at_a_stroke(values, design)
        wrong, missed = wrong + int(found_any.sum()), missed + int(outside.sum())
    return wrong, missed


REGIMES = [(1.0, 0.0), (0.3, 1.0), (0.0, 0.0)]
"""Deviations between trainings and between problems, beside that of the samples, which is 1."""


@pytest.mark.parametrize(("of_seeds", "of_problems"), REGIMES)
def test_without_a_difference_a_study_finds_one_at_most_5_times_in_100(of_seeds: float, of_problems: float) -> None:
    wrong, missed = errors(400, Design(3, 8, 4, 13, 1), of_seeds, of_problems, 0)
    assert wrong <= most(400)
    assert missed <= most(400)


@pytest.mark.slow
@pytest.mark.parametrize(("of_seeds", "of_problems"), REGIMES)
def test_the_same_in_many_studies(of_seeds: float, of_problems: float) -> None:
    wrong, missed = errors(10_000, Design(3, 8, 4, 13, 1), of_seeds, of_problems, 1)
    print(f"\nany finding in {wrong / 100:.2f} % of the studies; intervals that miss the truth {missed / 100:.2f} %")
    assert wrong <= most(10_000)
    assert missed <= most(10_000)


def test_two_looks_at_the_whole_level_would_find_more() -> None:
    """That the simulation can tell: the arm of the largest difference goes on, and both looks have 5 %, uncorrected."""
    rng = np.random.default_rng(2)
    wrong = 0
    for _ in range(400):
        x = rng.standard_normal((5, 6)) - rng.standard_normal(6)
        early = x[:, :3]
        t = np.abs(early.mean(axis=1)) / early.std(axis=1, ddof=1) * math.sqrt(3)
        last = x[int(np.abs(early.mean(axis=1)).argmax())]
        t_last = abs(last.mean()) / last.std(ddof=1) * math.sqrt(6)
        wrong += bool((t > student_quantile(0.975, 2)).any() or t_last > student_quantile(0.975, 5))
    assert wrong > most(400)


@pytest.mark.parametrize("design", [EIGHT, Design(2, 5, 1, 3, 1)])
def test_the_detectable_effect_is_found_in_80_of_100_studies(design: Design) -> None:
    """Simulated again, with other numbers and the test written out."""
    effect = detectable_effect(0.02, design)
    assert effect == pytest.approx(2 * detectable_effect(0.01, design))
    assert detection_chance(effect, 0.02, design) == pytest.approx(0.8, abs=0.01)
    rng = np.random.default_rng(7)
    hits, studies = 0, 2000
    lines = [
        student_quantile(1 - level / design.tests / 2, seeds - 1)
        for level, seeds in zip(design.levels, design.seeds_by_look, strict=True)
    ]
    for _ in range(studies):
        runs = 0.02 / math.sqrt(2) * rng.standard_normal((design.arms + 1, design.seeds))
        x = runs[1:] - runs[0]
        x[0] += effect
        t = [abs(x[0, :n].mean()) / x[0, :n].std(ddof=1) * math.sqrt(n) for n in design.seeds_by_look]
        alive = np.argsort(-np.abs(x[:, : design.first].mean(axis=1)))[: design.keep]
        hits += t[0] > lines[0] or (0 in alive and t[1] > lines[1])
    assert hits / studies == pytest.approx(0.8, abs=0.035), "four standard errors"


def test_power_is_that_of_one_look_where_every_arm_goes_on() -> None:
    design = Design(3, 8, 13, 13, 1)
    alone = power(0.02, 0.01, 8, design.levels[1] / 13)
    assert detection_chance(0.02, 0.01, design) == pytest.approx(alone, abs=0.03)
    assert detection_chance(0.02, 0.01, Design(3, 8, 1, 13, 1)) < detection_chance(0.02, 0.01, design) - 0.01
    assert detection_chance(0.0, 0.01, design) < 0.05 / 13 + 0.004


def test_a_planted_effect_is_found_and_the_interval_holds_it() -> None:
    design = Design(3, 8, 2, 4, 1)
    values = planted(np.random.default_rng(3), 5, 8, 64, 0.2, 0.0)
    values[3] += 2.0
    _, decided, differences = study_of(values, design)
    assert decided["arm 3"] == "goes on"
    assert sorted(decided.values()) == ["futility", "futility", "goes on", "goes on"]
    told = differences["arm 3"]["pass@1"]
    assert is_significant(told)
    assert told["look"] == 2
    assert told["low"] < 2.0 < told["high"]
    assert not is_significant(differences["arm 1"]["pass@1"])


def test_an_interval_has_the_level_of_its_look() -> None:
    design = Design(3, 8, 1, 2, 1)
    values = planted(np.random.default_rng(4), 3, 8, 16, 0.5, 0.5)
    _, decided, differences = study_of(values, design)
    assert sorted(decided.values()) == ["futility", "goes on"]
    for place, (name, decision) in enumerate(decided.items(), 1):
        look = int(decision == "goes on")
        estimate = crossed_mean((values[place] - values[0])[: design.seeds_by_look[look]])
        told = differences[name]["pass@1"]
        assert told["look"] == look + 1
        assert told["mean"] == pytest.approx(estimate.mean)
        (of_seeds, freedom), (of_problems, problems) = estimate.parts
        at = 1 - (0.0013714, 0.0486286)[look] / 2
        square = student_quantile(at, freedom) ** 2 * of_seeds + student_quantile(at, problems) ** 2 * of_problems
        assert (told["high"] - told["low"]) / 2 == pytest.approx(math.sqrt(square), rel=1e-4)


def test_an_effect_beyond_any_doubt_stops_at_the_first_look() -> None:
    values = planted(np.random.default_rng(3), 4, 6, 8, 0.0, 0.0) * 1e-6
    values[2] += 1.0
    _, decided, differences = study_of(values, Design(3, 6, 1, 3, 1))
    assert decided["arm 2"] == "efficacy"
    assert list(decided.values()).count("goes on") == 1, "it takes no place of those that go on"
    assert differences["arm 2"]["pass@1"]["look"] == 1
    assert is_significant(differences["arm 2"]["pass@1"])
