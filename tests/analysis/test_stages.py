"""Stages and the entropy–reward law recover what was planted, and find nothing where nothing is."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest

from explorl.analysis.lens import Analysis, Context, Unavailable, find
from explorl.analysis.lens_table import build_table
from explorl.analysis.reward_stages import (
    entropy_law,
    fit_law,
    reward_curve,
    stages,
    two_pieces,
)
from explorl.report.figures import file_svg
from explorl.stats.interval import Effect
from explorl.stats.regression import Noise, autoregression, binned, regression

from .planted_runs import lines, noise

DRAWS = [20, pytest.param(100, marks=pytest.mark.slow)]
T = np.arange(1.0, 121.0)


def kinked(rng: np.random.Generator) -> np.ndarray:
    return 0.2 + 0.4 * np.minimum(T, 50) / 50 + noise(120, 0.04, rng)


@pytest.mark.parametrize("draws", DRAWS)
def test_a_planted_breakpoint_lies_in_its_interval(draws: int) -> None:
    rng = np.random.default_rng(0)
    found = [two_pieces(T, kinked(rng), seed=draw, draws=499) for draw in range(draws)]
    assert all(one["breakpoint"] is not None for one in found)
    ends = [one["breakpoint"] for one in found if one["breakpoint"]]
    assert sum(one.low <= 50 <= one.high for one in ends) >= 0.9 * draws
    assert sum(one["before"].low <= 0.8 <= one["before"].high for one in found) >= 0.9 * draws
    assert sum(one["after"] is not None and one["after"].low <= 0 <= one["after"].high for one in found) >= 0.9 * draws
    assert np.mean([one.high - one.low for one in ends]) < 40  # an interval of everything would cover as well


@pytest.mark.parametrize("draws", DRAWS)
@pytest.mark.parametrize("slope", [0.0, 0.3])
def test_a_line_has_no_breakpoint(draws: int, slope: float) -> None:
    rng = np.random.default_rng(1)
    found = [two_pieces(T, 0.2 + slope * T / 120 + noise(120, 0.05, rng), seed=s, draws=499) for s in range(draws)]
    assert sum(one["breakpoint"] is None for one in found) >= 0.95 * draws
    rising = sum(one["rises"] for one in found)
    assert rising >= 0.9 * draws if slope else rising <= 0.05 * draws


def test_a_curve_that_only_begins_to_rise_has_no_plateau() -> None:
    rng = np.random.default_rng(2)
    found = two_pieces(T, 0.2 + 0.01 * np.maximum(T - 60, 0) + noise(120, 0.02, rng))
    assert found["p"] < 0.01
    assert found["breakpoint"] is None
    assert found["after"] is not None
    assert "bends" in found.sentence


@pytest.mark.parametrize("draws", DRAWS)
def test_the_law_is_recovered(draws: int) -> None:
    rng = np.random.default_rng(3)
    entropy = np.linspace(1.2, 0.3, 120) + noise(120, 0.05, rng)
    found = [fit_law(T, entropy, -0.2 * np.exp(entropy) + 0.9 + noise(120, 0.04, rng), seed=s) for s in range(draws)]
    for name, value in (("a", 0.2), ("b", 0.9), ("ceiling", 0.7)):
        effects = [one[name] for one in found]
        assert sum(effect.low <= value <= effect.high for effect in effects) >= 0.9 * draws, name
    assert all(one["a"].sign == 1 for one in found)


@pytest.mark.parametrize("draws", DRAWS)
def test_no_law_is_found_where_reward_and_entropy_go_their_own_ways(draws: int) -> None:
    rng = np.random.default_rng(4)
    found = [fit_law(T, 1 + noise(120, 0.2, rng), 0.5 + noise(120, 0.1, rng), seed=s) for s in range(draws)]
    assert sum(one["a"].sign == 0 for one in found) >= 0.95 * draws


def test_the_law_is_least_squares() -> None:
    rng = np.random.default_rng(5)
    entropy, reward = rng.random(50), rng.random(50)
    slope, level = np.polyfit(np.exp(entropy), reward, 1)
    found = fit_law(np.arange(50.0), entropy, reward)
    assert found["a"].mean == pytest.approx(-slope)
    assert found["b"].mean == pytest.approx(level)
    assert found["ceiling"].mean == pytest.approx(level + slope)
    assert found["curve"][0] == pytest.approx(found["ceiling"].mean)
    assert found["low"][0] == pytest.approx(found["ceiling"].low)


def test_two_pieces_are_the_best_of_all_candidates() -> None:
    values = kinked(np.random.default_rng(6))
    found = two_pieces(T, values)
    assert found["breakpoint"] is not None
    squares = {}
    for tau in np.linspace(10, 110, 101):
        design = np.stack([np.ones_like(T), T, np.maximum(T - tau, 0)], axis=1)
        squares[tau] = np.linalg.lstsq(design, values, rcond=None)[1][0]
    assert found["breakpoint"].mean == pytest.approx(min(squares, key=lambda tau: squares[tau]), abs=1.5)
    assert ((values - found["fitted"]) ** 2).sum() <= min(squares.values()) * 1.001


def test_whole_runs() -> None:
    rng = np.random.default_rng(7)
    entropy = 0.3 + np.exp(-T / 40)
    table = build_table("run", {}, lines=lines(reward=kinked(rng), entropy=entropy))
    found = stages(table, Context())
    assert not isinstance(found, Unavailable)
    assert "rises until step" in found.sentence
    assert {"stages", "stages-curve"} == found.tables.keys()
    law = entropy_law(table, Context())
    assert not isinstance(law, Unavailable)
    assert "b = " in law.sentence
    assert len(law.tables["law-points"].rows) == 120


@pytest.mark.parametrize(("top", "phrase"), [(1.2, "no ceiling below 1"), (0.95, "would be 0.9")])
def test_no_accuracy_above_1_is_predicted(top: float, phrase: str) -> None:
    """The fit is a straight line in exp(H); extrapolated to an entropy of 0, it may leave the range of an accuracy."""
    rng = np.random.default_rng(3)
    entropy = np.linspace(1.2, 0.5, 120)
    law = fit_law(T, entropy, top - 0.3 * (np.exp(entropy) - 1) + noise(120, 0.04, rng), measure="training accuracy")
    text = law.sentence
    assert phrase in text
    assert max(law["curve"].max(), law["high"].max()) <= 1
    ceiling = text[text.index("at an entropy of 0") : text.index("(R²")]
    assert all(float(number) <= 1 for number in re.findall(r"\d\.\d+", ceiling))
    assert (law["limit"] is None) == (top > 1)
    (chart,) = law.charts
    assert chart.caption.startswith(text)
    assert ("ceiling b − a" in file_svg(chart)) is (top < 1)


@pytest.mark.parametrize(
    ("given", "measure"), [([0.0, 1.0], "training accuracy"), ([0.0, 0.5], "reward"), ([0.0, 2.0], "reward")]
)
def test_the_reward_of_a_script_is_an_accuracy_where_it_is_0_or_1(given: list[float], measure: str) -> None:
    """TRL logs it under the name of the function; what was stored of the completions tells."""
    rollouts = {step: {"prompt": ["1", "1"], "completion": ["a", "b"], "reward/mine": given} for step in range(1, 5)}
    assert reward_curve(build_table("run", rollouts, lines=lines(reward=np.full(120, 0.4))))[0] == measure


@pytest.mark.parametrize(
    ("curves", "words"),
    [
        ({"reward": [0.5], "entropy": [1.0]}, "1 step "),
        ({"reward": [0.5] * 40, "entropy": np.linspace(1, 0, 40)}, "0.5 at every step"),
    ],
)
def test_too_little_is_said(curves: dict[str, list[float]], words: str) -> None:
    table = build_table("run", {}, lines=lines(**curves))
    for function in (stages, entropy_law):
        found = function(table, Context())
        assert isinstance(found, Unavailable)
        assert words in found.reason


def test_what_is_not_recorded_is_unavailable() -> None:
    one = Analysis("stages", "Stages", stages)
    found = one.run(build_table("run", {}), Context())
    assert isinstance(found, Unavailable)
    assert "reward" in found.reason
    assert find("stages", [one]) is one
    with pytest.raises(ValueError, match="did you mean 'stages'"):
        find("stage", [one])
    with pytest.raises(ValueError, match=r"analysis 'no\.such:THING': there is no module 'no'"):
        find("no.such:THING", [one])
    with pytest.raises(ValueError, match=r"explorl\.analysis\.lens\.Analysis"):
        find("explorl.analysis.reward_stages:MIN_STEPS", [one])


# ---------------------------------------------------------------------------- regressions on steps
@pytest.mark.parametrize("draws", DRAWS)
@pytest.mark.parametrize("correlation", [0.0, 0.8])
def test_intervals_allow_for_autocorrelation(draws: int, correlation: float) -> None:
    rng = np.random.default_rng(8)
    design = np.stack([np.ones(100), np.linspace(0, 1, 100)], axis=1)
    effects = [
        regression(design, design @ [0.3, 0.5] + noise(100, 0.1, rng, correlation), seed).effect([0, 1])
        for seed in range(draws)
    ]
    assert sum(one.low <= 0.5 <= one.high for one in effects) >= 0.9 * draws


def test_the_noise_is_found_again() -> None:
    values = Noise((0.6, 0.2), 0.5).simulate(3000, 1, np.random.default_rng(9))[:, 0]
    found = autoregression(values, np.ones((3000, 1)))
    assert sum(found.coefficients) == pytest.approx(0.8, abs=0.05)
    assert found.deviation == pytest.approx(0.5, abs=0.03)
    ones = Noise((0.5,), 1.0).covariances(3)
    assert ones == pytest.approx([4 / 3, 2 / 3, 1 / 3])


def test_an_effect_is_students() -> None:
    effect = Effect.of(1.0, 0.5, 10)
    assert (effect.low, effect.high) == pytest.approx((1 - 2.2281 * 0.5, 1 + 2.2281 * 0.5), abs=1e-3)
    assert effect.p == pytest.approx(0.0734, abs=1e-3)
    assert effect.sign == 0
    assert Effect.of(-2.0, 0.1, 50).sign == -1
    assert Effect.of(0.0, 0.0, 5).sign == 0


def test_long_curves_are_binned() -> None:
    t, doubled = binned(np.arange(1000.0), 2 * np.arange(1000.0), most=100)
    assert len(t) == 100
    assert t[0] == 4.5
    assert math.isclose(doubled[-1], 2 * t[-1])
