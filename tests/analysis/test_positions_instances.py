"""Entropy by position and shifts by perplexity: planted effects are found, and none where none was planted."""

from __future__ import annotations

import math

import numpy as np
import pytest

from explorl.analysis import instances, positions
from explorl.analysis.instances import completion_perplexity, perplexity_groups, shifts_by_perplexity
from explorl.analysis.lens import Context, Unavailable
from explorl.analysis.lens_table import build_table
from explorl.analysis.positions import entropy_by_position
from explorl.stats import Interval
from explorl.stats.interval import format_effect
from explorl.stats.resample import cluster_means


def lengths_of(rng, answers, low=5, high=60):
    length = rng.integers(low, high, answers)
    answer = np.repeat(np.arange(answers), length)
    position = np.concatenate([np.arange(n) for n in length])
    return answer, position / length[answer]


# ---------------------------------------------------------------------------- means over clusters
def test_cluster_means_equal_a_rederivation():
    rng = np.random.default_rng(0)
    counts = rng.integers(1, 6, (7, 3)).astype(float)
    counts[2, 1] = 0
    sums = rng.normal(size=(7, 3)) * (counts > 0)
    means, (difference,) = cluster_means(sums, counts, [(1, -1, 0)], seed=3)
    draws = np.random.default_rng(3).integers(0, 7, (2000, 7))
    drawn = np.array([sums[rows].sum(0) / counts[rows].sum(0) for rows in draws])
    # t at 97.5 % is 2.446912 with 6 degrees of freedom, and 2.570582 with the 5 of the column with a hole
    tail = 0.5 * math.erfc(2.446912 * math.sqrt(7 / 6) / math.sqrt(2))
    low, high = np.quantile(drawn[:, 0], [tail, 1 - tail])
    assert means[0].mean == pytest.approx(sums[:, 0].sum() / counts[:, 0].sum())
    assert (means[0].low, means[0].high) == (pytest.approx(low), pytest.approx(high))
    tail = 0.5 * math.erfc(2.570582 * math.sqrt(6 / 5) / math.sqrt(2))
    low, high = np.quantile(drawn[:, 0] - drawn[:, 1], [tail, 1 - tail])
    assert difference.mean == pytest.approx(means[0].mean - means[1].mean)
    assert (difference.low, difference.high) == (pytest.approx(low), pytest.approx(high))


def test_intervals_over_few_clusters_cover():
    rng = np.random.default_rng(1)
    inside = 0
    for seed in range(300):
        effect = rng.normal(size=(8, 1))  # of the answer; its 30 tokens share it
        sums = 30 * effect + rng.normal(size=(8, 1)) * math.sqrt(30)
        interval = cluster_means(sums, np.full((8, 1), 30.0), seed=seed, resamples=2000)[0][0]
        inside += interval.low <= 0 <= interval.high
    assert inside / 300 > 0.91  # 95 % ± 1.3; a plain percentile interval covers 88 %


def test_p_of_a_difference_is_students_over_clusters():
    rng = np.random.default_rng(2)
    one, two = rng.normal(size=30) + 0.5, rng.normal(size=30)
    _, (effect,) = cluster_means(np.stack([one, two], 1), np.ones((30, 2)), [(1, -1)])
    t = (one - two).mean() / (one - two).std(ddof=1) * math.sqrt(30)
    # Student's tail with 29 degrees of freedom by the trapezoid rule
    x = np.linspace(t, 60, 200_001)
    density = math.gamma(15) / math.gamma(14.5) / math.sqrt(29 * math.pi) * (1 + x**2 / 29) ** -15
    assert effect.p == pytest.approx(2 * np.trapezoid(density, x), rel=0.15)  # the deviation is of 2,000 draws
    _, (same,) = cluster_means(np.ones((8, 1)), np.ones((8, 1)), [(1,)])
    assert same.p == 0.5**7
    assert same.sign == 1
    assert cluster_means(np.ones((3, 1)), np.ones((3, 1)), [(1,)])[1][0].sign == 0


def test_what_has_no_tokens_has_no_mean():
    assert cluster_means(np.zeros((3, 1)), np.zeros((3, 1)))[0] == [None]
    (one,) = cluster_means(np.full((1, 1), 2.0), np.ones((1, 1)))[0]
    assert (one.mean, one.low, one.high) == (2.0, -math.inf, math.inf)
    assert format_effect(None) == "not known"
    assert format_effect(one) == "+2.000 (of one completion)"
    assert format_effect(Interval(-1e-4, -2e-4, 1e-5)) == "−1.0e−04 [−2.0e−04, +1.0e−05]"
    assert cluster_means(np.zeros((0, 1)), np.zeros((0, 1)))[0] == [None]
    with pytest.raises(ValueError, match="contrast"):
        cluster_means(np.ones((3, 2)), np.ones((3, 2)), [(0, 0)])


# ---------------------------------------------------------------------------- positions
def test_a_planted_profile_is_recovered():
    rng = np.random.default_rng(0)
    answer, relative = lengths_of(rng, 300)
    sign = np.where(answer % 2, 1, -1)
    truth = 0.4 + 0.8 * (2 * relative - 1) ** 2 + 0.2 * ((sign < 0) & (relative >= 0.8))
    entropy = truth + rng.normal(size=len(truth)) * 0.3 + rng.normal(size=300)[answer] * 0.1
    profile = entropy_by_position(entropy, relative, answer, sign)
    assert "is U-shaped" in profile.sentence
    assert profile["end_negative_minus_positive"].sign == 1
    assert profile["end_negative_minus_positive"].low < 0.2 < profile["end_negative_minus_positive"].high
    inside = 0
    for index, found in enumerate(profile["all"]):
        here = np.floor(relative * 20) == index
        assert found.mean == pytest.approx(entropy[here].mean())
        inside += found.low <= truth[here].mean() <= found.high
    assert inside >= 18
    assert profile["answers"] == 300
    assert profile["tokens"] == len(entropy)


def test_no_profile_is_found_where_there_is_none():
    reports = 0
    for seed in range(100):
        rng = np.random.default_rng(seed)
        answer, relative = lengths_of(rng, 40)
        entropy = 0.5 + rng.normal(size=40)[answer] * 0.2 + rng.normal(size=len(answer)) * 0.3
        profile = entropy_by_position(entropy, relative, answer, np.where(answer % 2, 1, -1), bins=4, seed=seed)
        parts = (profile["begin_minus_middle"], profile["end_minus_middle"], profile["end_negative_minus_positive"])
        reports += any(part.sign for part in parts)
    assert reports <= 5


def test_a_fall_is_told_as_no_u():
    answer, relative = lengths_of(np.random.default_rng(0), 50)
    noise = np.random.default_rng(1).normal(size=len(relative)) * 0.1
    profile = entropy_by_position(1 - relative + noise, relative, answer, np.zeros_like(answer))
    assert profile.sentence.startswith("Entropy over the completion is not U-shaped: the first 20% minus")


def test_positions_of_a_run_and_what_it_may_lack():
    rng = np.random.default_rng(0)
    columns = {
        "prompt": ["p"] * 6, "completion": ["c"] * 6, "correct": [True, False] * 3,
        "entropy": [rng.random(30).tolist() for _ in range(6)],
    }  # fmt: skip
    found = positions.positions(build_table("run", {1: columns}), Context())
    assert "not significantly U-shaped" in found.sentence
    assert {"positions", "position_contrasts"} == set(found.tables)
    bare = build_table("run", {1: {key: columns[key] for key in ("prompt", "completion", "entropy")}})
    unsigned = positions.positions(bare, Context())
    assert unsigned["positive"][0] is None
    assert "negative" not in unsigned.sentence
    one = {key: value[:1] for key, value in columns.items()}
    assert isinstance(positions.positions(build_table("run", {1: one}), Context()), Unavailable)


# ---------------------------------------------------------------------------- instances
def test_perplexity_and_its_groups():
    logps = np.log(np.array([0.5, 0.5, 0.25, 0.25, np.nan]))
    found = completion_perplexity(logps, np.array([0, 0, 1, 1, 2]), 4)
    assert found[:2] == pytest.approx([2, 4])
    assert np.isnan(found[2:]).all()
    group = perplexity_groups(np.array([1, 2, 3, 4, 5, 11, 12, 13, 14, 15.0]), np.repeat([1, 2], 5))
    assert group.tolist() == [-1, -1, 0, 1, 1, 0, 0, 0, 0, 0]  # by the ratio to 3 and to 13
    alone = perplexity_groups(np.array([1.0, 2.0, 3.0, np.nan, 5.0, 6.0]), np.arange(6))
    assert alone.tolist() == [-1, 0, 0, -2, 0, 1]


def planted_shifts(seed, effect, answers=120):
    rng = np.random.default_rng(seed)
    answer, _ = lengths_of(rng, answers, 20, 40)
    level = rng.normal(size=answers) * 0.4
    logps = -np.abs(rng.normal(size=len(answer)) * 0.2 + 1 + level[answer] * 0.5)
    size = 0.02 * np.exp(-effect * level[answer] + rng.normal(size=answers)[answer] * 0.3)
    after = np.log(np.clip(np.exp(logps) + rng.normal(size=len(answer)) * size, 1e-6, 1))
    return logps, after, answer, np.repeat(np.arange(answers // 20), 20), answers


def test_planted_shifts_in_fluent_answers_are_found():
    logps, after, answer, step, answers = planted_shifts(0, effect=1.0)
    found = shifts_by_perplexity(logps, after, answer, step, answers)
    assert found["low_minus_high"].low > 0
    assert found["shift_low_minus_high"].low > 0
    shift = np.abs(np.exp(after) - np.exp(logps))
    low = perplexity_groups(completion_perplexity(logps, answer, answers), step)[answer] == -1
    assert found["shift_low"].mean == pytest.approx(shift[low].mean())
    assert found["top_in_low"].mean == pytest.approx((shift >= np.sort(shift)[-int(0.2 * len(shift))])[low].mean())
    assert sum(found["top_tokens"]) == pytest.approx(1)
    assert sum(found["all_tokens"]) == pytest.approx(1)
    assert "more common" in found.sentence


def test_no_shifts_are_found_where_none_are_planted():
    reports = 0
    for seed in range(100):
        found = shifts_by_perplexity(*planted_shifts(seed, effect=0.0), seed=seed)
        reports += bool(found["low_minus_high"].sign or found["shift_low_minus_high"].sign)
    assert reports <= 5


def test_instances_say_what_they_lack():
    columns = {"prompt": ["p"] * 3, "completion": ["c"] * 3, "logp": [[-1.0]] * 3, "entropy": [[1.0]] * 3}
    with pytest.raises(ValueError, match="logp_after"):
        instances.instances(build_table("run", {1: columns}), Context())
    few = instances.instances(build_table("run", {1: columns | {"logp_after": [[-1.0]] * 3}}), Context())
    assert isinstance(few, Unavailable)
    assert "10 or more" in few.reason
    many = {key: value * 5 for key, value in (columns | {"logp_after": [[-1.0]] * 3}).items()}
    still = instances.instances(build_table("run", {1: many}), Context())  # nothing moved
    assert still["top_in_low"].mean == 0
    assert "not significantly" in still.sentence
    assert still.tables
