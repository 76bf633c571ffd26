"""Intervals and tests on planted data."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from explorl.stats import Interval, bootstrap_mean, p_values, paired_difference, permutation_test, resample


def test_coverage_is_what_it_says():
    rng = np.random.default_rng(0)
    for draw, truth in ((lambda: rng.random(60) < 0.3, 0.3), (lambda: rng.exponential(2.0, 80), 2.0)):
        intervals = [bootstrap_mean(draw(), confidence=0.9, resamples=400, seed=s) for s in range(500)]
        coverage = np.mean([i.low <= truth <= i.high for i in intervals])
        assert 0.86 <= coverage <= 0.94


def test_width_is_that_of_the_normal_law():
    values = np.random.default_rng(1).normal(size=2000)
    interval = bootstrap_mean(values)
    assert interval.mean == pytest.approx(values.mean())
    assert interval.high - interval.low == pytest.approx(2 * 1.96 * values.std() / np.sqrt(2000), rel=0.05)
    assert bootstrap_mean(values) == interval
    assert bootstrap_mean(values, seed=1) != interval
    wider = bootstrap_mean(values, confidence=0.99)
    assert wider.low < interval.low < interval.high < wider.high


def test_chunks_do_not_change_the_draws(monkeypatch):
    values = np.arange(50.0)
    whole = bootstrap_mean(values, resamples=1000)
    monkeypatch.setattr(resample, "CHUNK", 170)
    assert bootstrap_mean(values, resamples=1000) == whole


def test_pairing_narrows_correlated_data():
    rng = np.random.default_rng(2)
    hard = rng.random(200)
    a, b = np.clip(hard + 0.05 + 0.02 * rng.normal(size=(2, 200)) * [[1], [1]] - [[0], [0.05]], 0, 2)
    paired = paired_difference(a, b)
    unpaired = paired_difference(a, rng.permutation(b))  # the same two samples, no longer problem by problem
    assert paired.mean == pytest.approx(unpaired.mean) == pytest.approx(a.mean() - b.mean())
    assert paired.high - paired.low < 0.2 * (unpaired.high - unpaired.low)
    assert paired.low > 0 > unpaired.low
    assert permutation_test(a, b) < 0.001 < 0.01 < permutation_test(a, rng.permutation(b))


def test_paired_takes_the_same_problems():
    rng = np.random.default_rng(3)
    a, b = rng.random((2, 30))
    index = np.random.default_rng(5).integers(0, 30, (300, 30))
    by_hand = np.quantile(a[index].mean(1) - b[index].mean(1), [0.025, 0.975])
    interval = paired_difference(a, b, resamples=300, seed=5)
    np.testing.assert_allclose([interval.low, interval.high], by_hand, atol=1e-12)


def test_one_problem_and_tensors():
    assert bootstrap_mean([0.25]) == Interval(0.25, 0.25, 0.25, 0.95)
    assert permutation_test([1.0], [0.0]) == 1.0
    assert bootstrap_mean(torch.tensor([True, False, True])) == bootstrap_mean([1, 0, 1])
    assert bootstrap_mean(torch.ones(3, dtype=torch.bfloat16)).low == 1.0


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=1, max_size=8))
def test_exact_permutation_equals_enumeration(pairs):
    a, b = np.array(pairs, dtype=float).T / 3
    d = (np.array(pairs) @ [1, -1]).tolist()
    sums = [abs(sum(s * x for s, x in zip(signs, d, strict=True))) for signs in product((1, -1), repeat=len(d))]
    assert permutation_test(a, b) == np.mean(np.array(sums) >= abs(sum(d)))


def test_sampled_permutation_agrees_with_the_exact_one(monkeypatch):
    rng = np.random.default_rng(4)
    a = rng.random(16)
    b = a - 0.15 * rng.random(16) + 0.05
    exact = permutation_test(a, b)
    monkeypatch.setattr(p_values, "EXACT_UP_TO", 4)
    monkeypatch.setattr(p_values, "CHUNK", 16_000)
    sampled = permutation_test(a, b, permutations=40_000)
    assert 0.0001 < exact < 0.9
    assert abs(sampled - exact) < 4 * np.sqrt(exact / 40_000) + 1e-4
    assert permutation_test(np.arange(40) + 1.0, np.zeros(40), permutations=99) == 0.01  # never 0


def test_permutation_p_is_uniform_without_a_difference():
    rng = np.random.default_rng(6)
    p = np.array([permutation_test(*rng.normal(size=(2, 20)), permutations=199, seed=s) for s in range(400)])
    assert 0.02 < np.mean(p <= 0.05) < 0.09
    assert 0.42 < np.mean(p <= 0.5) < 0.58


def test_equal_models_have_p_one():
    assert permutation_test([0.1, 0.5], [0.1, 0.5]) == 1.0


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda: bootstrap_mean([]), r"\(0,\)"),
        (lambda: bootstrap_mean(np.ones((2, 2))), r"\(2, 2\)"),
        (lambda: bootstrap_mean([1, np.nan]), "problem 1 has nan"),
        (lambda: bootstrap_mean([1], confidence=95), "got 95"),
        (lambda: bootstrap_mean([1], resamples=0), "got 0"),
        (lambda: paired_difference([1, 2], [1]), "2 and 1"),
        (lambda: permutation_test([], []), r"\(0,\)"),
        (lambda: permutation_test([1], [1], permutations=-3), "got -3"),
    ],
)
def test_errors_name_the_bad_value(call, named):
    with pytest.raises(ValueError, match=named):
        call()


def test_interval_reads_well():
    interval = Interval(0.4123, 0.3, 0.5278)
    assert str(interval) == f"{interval}" == "0.412 [0.300, 0.528]"
    assert f"{interval:.1%}" == "41.2% [30.0%, 52.8%]"
    with pytest.raises(AttributeError):
        interval.mean = 1.0
