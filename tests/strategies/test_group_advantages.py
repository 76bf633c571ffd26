"""Strategies that weigh an answer by its group anew: against the re-derivation, by hand, and by what they promise."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import explorl.strategies as xs
from explorl.strategies._lib.order_statistics import group_max, group_rank, sorted_groups

from . import reference
from .cases import THOROUGH, Case, cases, checked, close, exact, make_batch

NAN = math.nan


def of(case: Case, kind: str) -> torch.Tensor:
    """Total rewards, some of which are unknown; or right and wrong."""
    if kind == "correct":
        return torch.where(case.correctness.isnan(), NAN, case.correct.float())
    return torch.where(case.correctness.isnan(), NAN, case.rewards)


REWARDS = st.sampled_from(["correct", "reward"])


def one_group(*rewards):
    return torch.tensor(rewards), torch.zeros(len(rewards), dtype=torch.long)


# --- order within groups ------------------------------------------------------------------------------------------


def test_order_by_hand():
    values = torch.tensor([3.0, 1.0, NAN, 2.0, 5.0, 2.0], dtype=torch.float64)
    group, present = torch.tensor([7, 7, 7, 7, -1, 7]), ~values.isnan()
    order, rank = sorted_groups(values, group, present)
    assert order.tolist() == [4, 1, 3, 5, 0, 2]
    assert rank.tolist() == [0, 0, 1, 2, 3, 4]
    assert group_max(values, group, present).tolist() == [3, 3, 3, 3, 5, 3]
    assert group_max(values, group, torch.zeros(6, dtype=torch.bool)).tolist() == [0] * 6
    assert group_rank(values, group, present)[present].tolist() == [3, 0, 1.5, 0, 1.5]
    present[1] = False
    assert group_rank(values, group, present)[present].tolist() == [2, 0.5, 0, 0.5]


def test_ranks_take_rounding_for_equality():
    values = torch.tensor([-40.0, -40.00001, -39.0, -41.0], dtype=torch.float64)
    group, present = torch.zeros(4, dtype=torch.long), torch.ones(4, dtype=torch.bool)
    assert group_rank(values, group, present).tolist() == [1.5, 1.5, 3, 0]


# --- against the re-derivation ------------------------------------------------------------------------------------


@THOROUGH
@given(cases(), REWARDS)
def test_maxrl(case: Case, kind):
    rewards = of(case, kind)
    actual = checked(xs.maxrl_advantages)(rewards, case.group)
    close(actual, reference.maxrl(exact(rewards), case.group.tolist()))
    assert actual.dtype == torch.float32


@THOROUGH
@given(cases(), REWARDS, st.integers(1, 7))
def test_pkpo(case: Case, kind, k):
    smallest = min(case.group.tolist().count(i) for i in case.group.tolist())
    rewards, k = of(case, kind), 1 + (k - 1) % smallest
    actual = checked(xs.pkpo_advantages)(rewards, case.group, k=k)
    close(actual, reference.pkpo(exact(rewards), case.group.tolist(), k))


@THOROUGH
@given(st.integers(2, 8), st.integers(1, 8), st.booleans(), st.integers(0, 2**32 - 1))
def test_pkpo_in_larger_groups(n, k, coarse, seed):
    rng = np.random.default_rng(seed)
    rewards = rng.integers(0, 3, 2 * n) / 2 if coarse else rng.normal(size=2 * n)
    rewards[rng.random(2 * n) < 0.1] = NAN
    group, k = rng.permutation(np.repeat([5, -1], n)), 1 + (k - 1) % n
    actual = xs.pkpo_advantages(torch.tensor(rewards), torch.tensor(group), k=k)
    close(actual, reference.pkpo(rewards, group.tolist(), k))


@THOROUGH
@given(cases(), REWARDS, st.sampled_from([0.0, 0.5, 2.0, 8.0]))
def test_risk_sensitive(case: Case, kind, beta):
    rewards = of(case, kind)
    actual = checked(xs.risk_sensitive_advantages)(rewards, case.group, beta=beta)
    close(actual, reference.risk_sensitive(exact(rewards), case.group.tolist(), beta))
    assert actual.dtype == torch.float32


@THOROUGH
@given(cases(), REWARDS, st.sampled_from([0.01, 0.2, 0.25, 0.4, 0.5, 0.75, 0.99]))
def test_quantile(case: Case, kind, quantile):
    rewards = of(case, kind)
    actual = checked(xs.quantile_advantages)(rewards, case.group, quantile=quantile)
    close(actual, reference.quantile(exact(rewards), case.group.tolist(), quantile))
    assert actual.dtype == torch.float32


@THOROUGH
@given(cases(), st.sampled_from([0.0, 0.25, 1.0]), st.sampled_from(["sequence", "token"]))
def test_unlikeliness(case: Case, beta, level):
    rewards = of(case, "reward")
    actual = checked(xs.unlikeliness_rewards)(
        rewards, case.correct, case.logps, case.mask, case.group, beta=beta, level=level
    )
    arrays = map(exact, (case.logps, case.mask))
    expected = reference.unlikeliness(
        exact(rewards), case.correct.tolist(), *arrays, case.group.tolist(), beta=beta, level=level
    )
    assert actual.isnan().tolist() == rewards.isnan().tolist()
    close(actual.nan_to_num(), np.nan_to_num(expected))
    assert actual.dtype == rewards.dtype


@THOROUGH
@given(cases(), st.sampled_from([0.0, 0.2, 1.0]))
def test_ucpo(case: Case, tau):
    right = case.correct & ~case.correctness.isnan()
    actual = checked(xs.uniform_correct)(case.advantages, right, case.logps, case.mask, case.group, tau=tau)
    arrays = exact(case.advantages), right.tolist(), *map(exact, (case.logps, case.mask))
    close(actual, reference.ucpo(*arrays, case.group.tolist(), tau))
    assert actual.dtype == case.advantages.dtype


# --- by hand ------------------------------------------------------------------------------------------------------


def test_maxrl_by_hand():
    # one of four: r̄ = ¼: (1 − ¼)/¼ = 3 and −1; three of four: ⅓ and −1; none, all, or a single answer: 0
    close(xs.maxrl_advantages(*one_group(0.0, 1, 0, 0)), [-1, 3, -1, -1])
    close(xs.maxrl_advantages(*one_group(1.0, 1, 0, 1)), [1 / 3, 1 / 3, -1, 1 / 3])
    for rewards in ([0.0, 0, 0], [1.0, 1, 1], [0.3, 0.3, 0.3], [1.0], [0.0], [NAN]):
        close(xs.maxrl_advantages(*one_group(*rewards)), np.zeros(len(rewards)))
    # what could not be scored is left out: one of two
    close(xs.maxrl_advantages(*one_group(1.0, NAN, 0)), [1, 0, -1])


def test_maxrl_of_rewards_that_cancel():
    close(xs.maxrl_advantages(*one_group(-1.0, -1, 0)), [0, 0, 0])
    close(xs.maxrl_advantages(*one_group(0.6, 0.1, -0.7)), [0, 0, 0])  # in float32 their sum is 4e-8
    close(xs.maxrl_advantages(*one_group(-1.0, 1, 3)), [-2, 0, 2])


def test_pkpo_by_hand():
    # n = 4, c = 1, k = 2: A⁺ = 2·C(3, 1)/C(3, 1) = 2; c = 2: 2·C(2, 1)/C(3, 1) = 4/3; wrong ones nothing
    close(xs.pkpo_advantages(*one_group(0.0, 1, 0, 0), k=2), [0, 2, 0, 0])
    close(xs.pkpo_advantages(*one_group(1.0, 1, 0, 0), k=2), [4 / 3, 4 / 3, 0, 0])
    # k = 3, c = 2: 3·C(2, 2)/C(3, 2) = 1; c = 3: each set of two others has a right one
    close(xs.pkpo_advantages(*one_group(1.0, 1, 0, 0), k=3), [1, 1, 0, 0])
    close(xs.pkpo_advantages(*one_group(1.0, 1, 1, 0), k=3), [0, 0, 0, 0])
    # k = n: only an answer that is right alone; k = 1: less the mean of the others, 1 − ⅓ and 0 − ⅔
    close(xs.pkpo_advantages(*one_group(0.0, 1, 0, 0), k=4), [0, 4, 0, 0])
    close(xs.pkpo_advantages(*one_group(1.0, 1, 0, 0), k=1), [2 / 3, 2 / 3, -2 / 3, -2 / 3])
    # graded rewards 3, 1, 0 and k = 2: 2·mean(3 − 1, 3 − 0) = 5, 2·mean(0, 1 − 0) = 1, 0
    close(xs.pkpo_advantages(*one_group(1.0, 3, 0), k=2), [1, 5, 0])


def test_pkpo_is_the_rewards_of_the_table_less_their_baseline():
    """s = k/n if right, else (k/n)·ρ(n − 1, c, k − 1), less (k/n)·ρ(n − 1, c − r, k − 1), times n."""

    def rho(n, c, k):
        return 1 - math.comb(n - c, k) / math.comb(n, k)

    n = 8
    for c, k in itertools.product(range(n + 1), range(2, n + 1)):
        rewards = [1.0] * c + [0.0] * (n - c)
        table = [k / n if r else k / n * rho(n - 1, c, k - 1) for r in rewards]
        baseline = [k / n * rho(n - 1, c - int(r), k - 1) for r in rewards]
        expected = [n * (s - b) for s, b in zip(table, baseline, strict=True)]
        close(xs.pkpo_advantages(*one_group(*rewards), k=k), expected)


def test_pkpo_leaves_out_what_could_not_be_scored():
    rewards, group = torch.tensor([0.0, 1, 0, 0, NAN, 1, NAN]), torch.tensor([0, 0, 0, 0, 0, 1, 1])
    close(xs.pkpo_advantages(rewards, group, k=2), [0, 2, 0, 0, 0, 0, 0])
    # fewer than k are left: three, then one
    for scores in ([1.0, 0, 0, NAN, NAN], [1.0, NAN, NAN, NAN, NAN]):
        for k in (4, 5):
            close(xs.pkpo_advantages(*one_group(*scores), k=k), np.zeros(5))


def test_pkpo_needs_k_answers_to_each_prompt():
    with pytest.raises(ValueError, match="k is 3, but a prompt has 2 completions; k must be between 1 and 2"):
        xs.pkpo_advantages(torch.zeros(5), torch.tensor([0, 0, 0, 1, 1]), k=3)


def test_risk_sensitive_by_hand():
    # β = ln 3 and rewards 1, 0: 3/2 − 1 = ½ and ½ − 1 = −½, over β
    half = 0.5 / math.log(3)
    close(xs.risk_sensitive_advantages(*one_group(1.0, 0.0), beta=math.log(3)), [half, -half])
    close(xs.risk_sensitive_advantages(*one_group(1.0, NAN, 0.0), beta=math.log(3)), [half, 0, -half])
    # one of four and β = 2: e² = 7.389056, mean 2.597264: (2.844938 − 1)/2 and (0.385020 − 1)/2
    rare = xs.risk_sensitive_advantages(*one_group(0.0, 1, 0, 0), beta=2.0)
    close(rare, [-0.307490, 0.922469, -0.307490, -0.307490])
    for rewards in ([0.0, 0, 0], [0.7, 0.7], [1.0], [NAN]):
        close(xs.risk_sensitive_advantages(*one_group(*rewards), beta=2.0), np.zeros(len(rewards)))


@pytest.mark.parametrize("beta", [0.0, 1e-12, 1e-7])
def test_risk_sensitive_nears_the_mean(beta):
    close(xs.risk_sensitive_advantages(*one_group(3.0, 0.0), beta=beta), [1.5, -1.5])


def test_risk_sensitive_nears_the_best():
    close(xs.risk_sensitive_advantages(*one_group(5.0, 0.0, 4.0), beta=1e3), [2e-3, -1e-3, -1e-3])
    assert torch.isfinite(xs.risk_sensitive_advantages(*one_group(1e30, -1e30), beta=1e6)).all()


def test_quantile_by_hand():
    # ten answers, K = 0.4: up to six right (p ≤ 0.6) the baseline is 0, from seven on 1
    for right in range(11):
        rewards = (torch.arange(10) < right).double()
        a = 1 / (math.sqrt(right * (10 - right) / 90) + 1e-4)
        expected = [a, 0] if right <= 6 else [0, -a]
        actual = xs.quantile_advantages(rewards, torch.zeros(10, dtype=torch.long), quantile=0.4)
        close(actual, [expected[0]] * right + [expected[1]] * (10 - right) if 0 < right < 10 else np.zeros(10))
    # rewards 0, 0.1, 1, 1.1 and their median 0.1; deviation √((0.55² + 0.45²)·2/3) = 0.5802298
    a = 1 / (0.5802298 + 1e-4)
    close(xs.quantile_advantages(*one_group(1.1, 0.0, 0.1, 1.0), quantile=0.5), [1.0 * a, -0.1 * a, 0, 0.9 * a])
    close(xs.quantile_advantages(*one_group(1.0, NAN), quantile=0.4), [0, 0])


def test_quantile_is_not_thrown_off_by_binary_fractions():
    # 0.55 · 20 is 11.000000000000002: the eleventh of twenty, not the twelfth
    rewards = (torch.arange(20) >= 11).double()
    close(xs.quantile_advantages(rewards, torch.zeros(20, dtype=torch.long), quantile=0.55)[:11], np.zeros(11))


LOGPS = torch.tensor([[-1.0, -1.0], [-3.0, 9.0], [-0.5, -0.5], [-9.0, -9.0]])
MASK = torch.tensor([[1.0, 1], [1, 0], [1, 1], [1, 1]])
"""Sums −2, −3, −1, −18; means −1, −3, −½, −9."""


def test_unlikeliness_by_hand():
    correct, group = torch.tensor([True, True, True, False]), torch.zeros(4, dtype=torch.long)
    rewards = torch.tensor([1.0, 1.0, 1.1, 0.1])
    # by likelihood the wrong one is 0th, then 1, 0, 2: ranks 2, 1, 3
    expected = [1 - 0.25 * 2 / 4, 1 - 0.25 * 1 / 4, 1.1 * (1 - 0.25 * 3 / 4), 0.1]
    args = correct, LOGPS, MASK, group
    close(xs.unlikeliness_rewards(rewards, *args, beta=0.25), expected)
    # sums −3, −4, −3.5 and −18, means per token −1.5, −2, −3.5 and −9
    logps = torch.tensor([[-3.0, 0.0], [-2.0, -2.0], [-3.5, 9.0], [-9.0, -9.0]])
    args = correct, logps, MASK[[0, 2, 1, 3]], group
    close(xs.unlikeliness_rewards(torch.ones(4), *args, beta=0.4), [0.7, 0.9, 0.8, 1])
    close(xs.unlikeliness_rewards(torch.ones(4), *args, beta=0.4, level="token"), [0.7, 0.8, 0.9, 1])


def test_unlikeliness_leaves_alone():
    group, right = torch.zeros(4, dtype=torch.long), torch.ones(4, dtype=torch.bool)

    def new(rewards, correct):
        return xs.unlikeliness_rewards(torch.tensor(rewards), correct, LOGPS, MASK, group, beta=0.25)

    close(new([1.0, 1, 1, 1], right), [1, 1, 1, 1])  # a prompt that is always solved
    close(new([0.5, 0, 0.1, 1], ~right), [0.5, 0, 0.1, 1])  # and one that never is
    close(new([-1.0, 1, -2, 0], torch.tensor([True, True, True, False])), [-1, 1 - 0.25 / 4, -2, 0])
    unscored = new([1.0, NAN, 1, 0], torch.tensor([True, True, True, False]))  # ranks 1, 2 of three
    assert unscored[1].isnan()
    close(unscored[[0, 2, 3]], [1 - 0.25 / 3, 1 - 0.25 * 2 / 3, 0])


def test_equally_likely_answers_earn_alike():
    correct = torch.tensor([True, True, True, False])
    logps = torch.tensor([[-0.1, -0.2], [-0.2, -0.1], [-0.15, -0.1500001], [-5.0, -5.0]])
    group = torch.zeros(4, dtype=torch.long)
    new = xs.unlikeliness_rewards(torch.ones(4), correct, logps, torch.ones(4, 2), group, beta=0.5)
    close(new, [0.75, 0.75, 0.75, 1])  # ranks 1, 2, 3: 2 of 4 on average


def test_ucpo_by_hand():
    # right answers with mean log-probability −1 and −1 − ln 3: q = ¾ and ¼, 1/q = 4/3 and 4: shares ¼ and ¾
    logps = torch.tensor([[-1.0, -1.0], [-1 - math.log(3), NAN], [-7.0, -7.0], [-2.0, -2.0]])
    right, group = torch.tensor([True, True, False, True]), torch.tensor([0, 0, 0, 1])
    advantages = torch.tensor([[1.0, 1.0], [1.0, NAN], [-2.0, -2.0], [3.0, 3.0]])

    def shared(tau, values=advantages):
        return xs.uniform_correct(values, right, logps, MASK, group, tau=tau)

    close(shared(1.0), [[0.5, 0.5], [1.5, 0], [-2, -2], [3, 3]])
    close(shared(0.2), [[0.9, 0.9], [1.1, 0], [-2, -2], [3, 3]])
    close(shared(0.0), [[1, 1], [1, 0], [-2, -2], [3, 3]])
    # a negative advantage of a right answer stays
    close(shared(1.0, -advantages), [[-1, -1], [-1, 0], [2, 2], [-3, -3]])


# --- what they promise --------------------------------------------------------------------------------------------


def expected_gradient(p, n, advantages):
    """E of the mean over n answers of A·∂ln π, for answers that are right with probability p, by all 2ⁿ outcomes."""
    total = 0.0
    for outcome in itertools.product([0.0, 1.0], repeat=n):
        right = torch.tensor(outcome)
        score = torch.where(right > 0, 1 / p, -1 / (1 - p)).double()
        chance = math.prod(p if r else 1 - p for r in outcome)
        total += chance * float((advantages(right, torch.zeros(n, dtype=torch.long)).double() * score).mean())
    return total


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("k", [1, 2, 4, 5])
def test_pkpo_is_an_unbiased_gradient_of_pass_at_k(p, k):
    # ∂(1 − (1 − p)^k)/∂p
    actual = expected_gradient(p, 5, lambda right, group: xs.pkpo_advantages(right, group, k=k))
    assert actual == pytest.approx(k * (1 - p) ** (k - 1), rel=1e-5)


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("n", [2, 5])
def test_maxrl_is_the_start_of_the_likelihood(p, n):
    # Σ_{k<n} (1/k)·∂pass@k/∂p = Σ_{k<n} (1 − p)^{k−1}, which is 1/p for n → ∞
    actual = expected_gradient(p, n, xs.maxrl_advantages)
    assert actual == pytest.approx(sum((1 - p) ** (k - 1) for k in range(1, n)), rel=1e-5)


def test_ucpo_hands_out_no_more_than_there_was():
    torch.manual_seed(0)
    logps, mask = -torch.rand(8, 5), torch.ones(8, 5)
    right, group = torch.arange(8) < 5, torch.zeros(8, dtype=torch.long)
    advantages = xs.grpo_advantages(right.float(), group).unsqueeze(1).expand(8, 5)
    shared = xs.uniform_correct(advantages, right, logps, mask, group, tau=0.7)
    assert shared.sum() == pytest.approx(float(advantages.sum()), abs=1e-5)
    likely = logps.mean(1)[:5].argsort()
    assert (shared[likely, 0].diff() < 0).all()


# --- hooks --------------------------------------------------------------------------------------------------------


def spread(values, batch):
    return (values.unsqueeze(1) * batch.mask).numpy()


def test_which_reward_is_read():
    correctness = torch.tensor([1.0, 0.9, NAN, 2.0, 0.0, 0.0])
    batch = make_batch(correctness=correctness, rewards=torch.tensor([1.1, 1.0, 0.1, 2.0, 0.1, 0.0]))
    binary = torch.tensor([1.0, 0.0, NAN, 1.0, 0.0, 0.0])
    pairs = {
        xs.MaxRL: xs.maxrl_advantages,
        lambda **given: xs.PKPO(2, **given): lambda *args: xs.pkpo_advantages(*args, k=2),
        xs.RiskSensitive: lambda *args: xs.risk_sensitive_advantages(*args, beta=2.0),
        xs.QuantileBaseline: lambda *args: xs.quantile_advantages(*args, quantile=0.4),
    }
    for strategy, function in pairs.items():
        close(strategy(of="correct").advantages(batch), spread(function(binary, batch.group), batch))
        close(strategy(of="reward").advantages(batch), spread(function(batch.rewards, batch.group), batch))
        assert strategy(of="correct").needs_correct
        assert not strategy(of="reward").needs_correct
        assert strategy().replaces_advantage


def test_correct_or_total_by_default():
    assert [s.of for s in (xs.MaxRL(), xs.PKPO(2), xs.RiskSensitive(), xs.QuantileBaseline())] == [
        "correct",
        "correct",
        "reward",
        "reward",
    ]


def test_unlikeliness_and_ucpo_read_the_batch():
    batch = make_batch(correctness=torch.tensor([1.0, 1.0, 0.0, 1.0, NAN, 1.0]), correct=torch.arange(6) != 2)
    right = batch.correct & ~batch.correctness.isnan()
    args = batch.old_logps, batch.mask, batch.group
    new = xs.Unlikeliness(0.5, level="token").rewards(batch)
    close(new, exact(xs.unlikeliness_rewards(batch.rewards, batch.correct, *args, beta=0.5, level="token")))
    assert not torch.equal(new, batch.rewards)
    shared = xs.UniformCorrect(0.5).advantages(batch)
    close(shared, exact(xs.uniform_correct(batch.advantages, right, *args, tau=0.5)))
    assert xs.Unlikeliness().advantages(batch) is None
    assert xs.Unlikeliness.needs_correct
    assert xs.UniformCorrect.needs_correct
    assert not xs.Unlikeliness.replaces_advantage
    assert not xs.UniformCorrect.replaces_advantage


def test_schedules_reach_the_functions():
    batch = make_batch(step=5, correctness=torch.tensor([1.0, 1.0, 0.0, 1.0, 0.0, 1.0]))
    falling = xs.Schedule(1.0, 0.0, steps=10)
    close(xs.RiskSensitive(falling).advantages(batch), exact(xs.RiskSensitive(0.5).advantages(batch)))
    close(xs.UniformCorrect(falling).advantages(batch), exact(xs.UniformCorrect(0.5).advantages(batch)))
    close(xs.Unlikeliness(falling).rewards(batch), exact(xs.Unlikeliness(0.5).rewards(batch)))
    rising = xs.Schedule(0.1, 0.9, steps=10)
    close(xs.QuantileBaseline(rising).advantages(batch), exact(xs.QuantileBaseline(0.5).advantages(batch)))
    annealed = xs.PKPO(xs.Schedule(3, 1, start=4, steps=1, shape="step"))
    close(annealed.advantages(batch), exact(xs.PKPO(1).advantages(batch)))
    close(annealed.advantages(batch.with_(step=0)), exact(xs.PKPO(3).advantages(batch)))


def test_pkpo_needs_enough_generations():
    xs.PKPO(8).check(num_generations=8)
    for k in (8, xs.Schedule(8, 1, steps=10)):
        with pytest.raises(
            ValueError, match=r"pkpo: k is 8, but there are only num_generations=4 .* use k=2, or num_generations=16"
        ):
            xs.PKPO(k).check(num_generations=4)


@pytest.mark.parametrize(
    "strategy",
    [xs.MaxRL(), xs.PKPO(2), xs.RiskSensitive(), xs.QuantileBaseline(), xs.UniformCorrect()],
    ids=lambda strategy: strategy.name,
)
def test_advantages_keep_their_dtype_and_are_zero_in_the_padding(strategy):
    batch = make_batch()
    shaped = strategy.advantages(batch.with_(advantages=batch.advantages.bfloat16()))
    assert shaped.dtype == torch.bfloat16
    assert not shaped[batch.mask == 0].any()
