"""pass@k, avg@k and maj@k against exact rational arithmetic, enumeration and simulation."""

from __future__ import annotations

import time
from collections import Counter
from fractions import Fraction
from itertools import combinations
from math import comb

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from explorl.metrics import avg_at_k, maj_at_k, pass_at_k
from explorl.metrics.passk import _unit_legendre


def exact_majority(answers: list, correct: list, k: int) -> float:
    """maj@k by going through every subset."""
    total, draws = Fraction(0), 0
    for chosen in combinations(range(len(answers)), k):
        votes = Counter(answers[i] for i in chosen if answers[i] is not None) or Counter([None])
        most = max(votes.values())
        winners = [answer for answer, count in votes.items() if count == most]
        for winner in winners:
            marks = [int(correct[i]) for i in chosen if answers[i] == winner]
            total += Fraction(sum(marks), len(marks) * len(winners))
        draws += 1
    return float(total / draws)


def test_equals_rational_arithmetic_for_all_n_up_to_60():
    n, c, k = (np.array(x) for x in zip(*_triples(60), strict=True))
    exact = [
        float(1 - Fraction(comb(N - C, K), comb(N, K)))
        for N, C, K in zip(*map(np.ndarray.tolist, (n, c, k)), strict=True)
    ]
    result = pass_at_k(n, c, k)
    np.testing.assert_allclose(result, exact, rtol=0, atol=1e-12)
    assert (result[c == 0] == 0.0).all()
    assert (result[n - c < k] == 1.0).all()


def test_four_samples_one_right_all_drawn():
    assert pass_at_k(4, 1, 4) == 1.0
    assert isinstance(pass_at_k(4, 1, 4), float)
    assert pass_at_k(4, 1, 1) == 0.25


@pytest.mark.parametrize(("n", "c", "k"), [(640, 7, 64), (640, 3, 200), (1000, 400, 2), (5000, 25, 100)])
def test_equals_the_mean_of_a_million_draws(n, c, k):
    hits = np.random.default_rng(0).hypergeometric(c, n - c, k, size=1_000_000) > 0
    p = pass_at_k(n, c, k)
    assert abs(hits.mean() - p) < 4 * np.sqrt(p * (1 - p) / len(hits))


def test_a_hundred_thousand_samples():
    n = 100_000
    c = np.array([0, 1, 2, 37, 500, 50_000, 99_999, n])
    k = np.array([1, 2, 640, 9_999, 50_000, n])
    start = time.process_time()
    with np.errstate(all="raise", under="ignore"):
        result = pass_at_k(n, c[:, None], k)
    assert time.process_time() - start < 1
    exact = [[_exact(n, a, b) if min(a, b) < 700 else 1.0 for b in k.tolist()] for a in c.tolist()]
    np.testing.assert_allclose(result, exact, rtol=0, atol=1e-12)
    assert (result[0] == 0).all()
    assert (result[-1] == 1).all()
    assert (np.diff(result, axis=0) >= 0).all()
    assert (np.diff(result, axis=1) >= 0).all()


@pytest.mark.parametrize(
    ("arguments", "named"),
    [((4, 5, 1), "c = 5"), ((4, 1, 5), "k = 5"), ((4, -1, 1), "c = -1"), ((4, 1, 0), "k = 0"), ((-4, 0, 1), "n = -4"),
     ((4, 1.5, 1), "1.5"), ((4, float("nan"), 1), "nan"), ((4, 1, "2"), "'2'"), (([4, 4], [1, 9], 2), "c = 9")],
)  # fmt: skip
def test_pass_at_k_names_the_bad_value(arguments, named):
    with pytest.raises(ValueError, match=named):
        pass_at_k(*arguments)


def test_pass_at_k_takes_tensors_and_whole_floats():
    expected = pass_at_k(8, [1, 2], 2)
    np.testing.assert_array_equal(pass_at_k(8, torch.tensor([1, 2]), 2), expected)
    np.testing.assert_array_equal(pass_at_k(8, torch.tensor([1.0, 2.0], dtype=torch.bfloat16), 2), expected)
    np.testing.assert_array_equal(pass_at_k(8.0, np.array([True, 2]), 2), expected)
    assert pass_at_k(8, np.zeros((0, 3), int), 2).shape == (0, 3)


def test_avg_at_k():
    np.testing.assert_array_equal(avg_at_k([[1, 0, 0, 0], [1, 1, 0, 0]]), [0.25, 0.5])
    np.testing.assert_array_equal(avg_at_k([[1, 0, 0, 0], [1, 1]], k=2), [0.5, 1.0])
    assert avg_at_k(np.array([True, False])) == 0.5
    assert avg_at_k(torch.tensor([[0.5, 1.0]]), k=1) == [0.5]
    assert avg_at_k([]).shape == (0,)


@pytest.mark.parametrize(
    ("correct", "k", "named"),
    [([[1, 0], [1]], 2, "problem 1 has 1"), ([[1]], 0, "got 0"), ([[]], None, "problem 0 has 0"), ([[1]], 0.5, "0.5"),
     ([[float("nan")]], None, "nan"), (np.zeros((1, 2, 3)), None, "3 dim"), ([[1], [[1]]], None, "2 dim")],
)  # fmt: skip
def test_avg_at_k_names_the_bad_value(correct, k, named):
    with pytest.raises(ValueError, match=named):
        avg_at_k(correct, k)


ANSWERS = st.lists(st.tuples(st.sampled_from(["1", "2", "3", "4", None]), st.booleans()), min_size=1, max_size=9)


@settings(max_examples=150, deadline=None)
@given(ANSWERS, st.data())
def test_maj_at_k_equals_enumeration(pairs, data):
    answers, correct = map(list, zip(*pairs, strict=True))
    k = data.draw(st.integers(1, len(pairs)))
    assert maj_at_k(answers, correct, k) == pytest.approx(exact_majority(answers, correct, k), abs=1e-12)
    order = data.draw(st.permutations(range(len(pairs))))
    shuffled = maj_at_k([answers[i] for i in order], [correct[i] for i in order], k)
    assert shuffled == pytest.approx(maj_at_k(answers, correct, k), abs=1e-12)


@pytest.mark.parametrize("k", range(1, 17))
def test_maj_at_k_equals_enumeration_at_sixteen(k):
    answers = [*"aaaabbbbcccdd", "e", None, None]
    correct = [a in ("b", "d") for a in answers]
    assert maj_at_k(answers, correct, k) == pytest.approx(exact_majority(answers, correct, k), abs=1e-12)


def test_maj_at_k_by_hand():
    assert maj_at_k(["a", "b"], [1, 0], 2) == 0.5  # a tie counts half, whatever the order
    assert maj_at_k(["b", "a"], [0, 1], 2) == 0.5
    assert maj_at_k([None, None, "a"], [0, 0, 1], 3) == 1.0  # None has no vote
    assert maj_at_k([None, None], [1, 0], 1) == 0.5  # but it stands where there is nothing else
    assert maj_at_k([None, None, "a"], [0, 0, 1], 2) == pytest.approx(2 / 3)
    np.testing.assert_array_equal(maj_at_k([["a", "a", "b"], ["c"]], [[1, 1, 0], [0]], 1), [pytest.approx(2 / 3), 0])
    assert maj_at_k(torch.tensor([7, 7, 8]), torch.tensor([1, 1, 0]), 3) == 1.0


def test_nan_is_no_answer():
    nan = float("nan")
    assert maj_at_k([nan, nan, "5"], [0, 0, 1], 3) == maj_at_k([None, None, "5"], [0, 0, 1], 3) == 1.0
    assert maj_at_k(np.array([nan, nan, 5.0]), [0, 0, 1], 3) == 1.0


def test_maj_at_1_is_the_mean_and_many_equal_answers_tie_alike():
    rng = np.random.default_rng(1)
    answers = rng.integers(0, 30, 640)
    correct = answers < 4
    assert maj_at_k(answers, correct, 1) == pytest.approx(correct.mean(), abs=1e-12)
    for k in (2, 50, 639, 640):  # all different: every draw is a tie of k
        assert maj_at_k(range(640), np.arange(640) < 100, k) == pytest.approx(100 / 640, abs=1e-12)


@pytest.mark.parametrize(
    ("sizes", "k"), [((200, 180, 150, 110), 64), ((30,) * 21 + (10,), 320), ((7, 6) + (1,) * 600, 8)]
)
def test_maj_at_k_equals_the_mean_of_draws(sizes, k):
    right = np.zeros(len(sizes))
    right[:2] = 1, 0.5
    answers = np.repeat(np.arange(len(sizes)), sizes)
    correct = np.concatenate([np.arange(s) < r * s for s, r in zip(sizes, right, strict=True)])
    draws = np.random.default_rng(2).multivariate_hypergeometric(sizes, k, size=20_000)
    wins = draws == draws.max(axis=1, keepdims=True)
    scores = (wins * right).sum(1) / wins.sum(1)
    assert abs(maj_at_k(answers, correct, k) - scores.mean()) < 4 * scores.std() / np.sqrt(len(scores))


def test_maj_at_k_is_fast_and_sums_to_one_over_answers():
    rng = np.random.default_rng(3)
    answers = np.concatenate([np.repeat([-1, -2, -3], [1500, 1480, 1400]), rng.zipf(1.4, 5620) % 1300])
    start = time.process_time()
    values = [maj_at_k(answers, answers == a, 1000) for a in (-1, -2, -3, 1)]
    assert time.process_time() - start < 5
    assert 0 < values[2] < values[1] < values[0] < 1
    assert sum(values) == pytest.approx(1, abs=1e-9)  # nothing else has a chance
    assert maj_at_k(answers, np.ones(10_000), 1000) == pytest.approx(1, abs=1e-12)


@pytest.mark.parametrize("powers", [1, 2, 17, 600, 5000])
def test_tie_nodes_integrate_every_power(powers):
    nodes, weights = _unit_legendre(powers)
    t = np.arange(powers)[:: max(1, powers // 200)]
    np.testing.assert_allclose((nodes[:, None] ** t * weights[:, None]).sum(0), 1 / (t + 1), rtol=0, atol=1e-13)


@pytest.mark.parametrize(
    ("answers", "correct", "k", "named"),
    [(["a"], [1], 2, "k = 2"), (["a"], [0.1], 1, "0.1"), (["a", "b"], [1], 1, "2 answers"),
     ([["a"]], [[1], [0]], 1, "1 problems"), ([["a", ["b"]]], [[1, 0]], 1, r"problem 0 has \['b'\]")],
)  # fmt: skip
def test_maj_at_k_names_the_bad_value(answers, correct, k, named):
    with pytest.raises(ValueError, match=named):
        maj_at_k(answers, correct, k)


def _triples(top: int) -> list[tuple[int, int, int]]:
    return [(n, c, k) for n in range(1, top + 1) for c in range(n + 1) for k in range(1, n + 1)]


def _exact(n: int, a: int, b: int) -> float:
    """1 − C(n − a, b) / C(n, b), over the smaller of a and b."""
    few, many = sorted((a, b))
    return float(1 - Fraction(_falling(n - many, few), _falling(n, few)))


def _falling(start: int, factors: int) -> int:
    product = 1
    for i in range(factors):
        product *= max(start - i, 0)
    return product
