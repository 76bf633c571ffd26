"""Each pure function against the independent re-derivation, and against cases worked by hand."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

import explorl.strategies as xs

from . import reference
from .cases import THOROUGH, Case, cases, checked, close, exact

ALPHAS = st.sampled_from([0.0, 0.01, 0.3, 1.0])
FRACTIONS = st.sampled_from([2e-4, 0.05, 0.2, 0.29, 0.5, 0.7, 1.0])


def tensor(*rows):
    return torch.tensor(rows, dtype=torch.float32)


# --- against the re-derivation ------------------------------------------------------------------------------------


@THOROUGH
@given(cases(), st.sampled_from(["group", "batch", "none"]))
def test_grpo(case: Case, scale):
    actual = checked(xs.grpo_advantages)(case.rewards, case.group, scale=scale)
    close(actual, reference.grpo(exact(case.rewards), case.group.tolist(), scale))
    assert actual.dtype == torch.float32


@THOROUGH
@given(cases(), ALPHAS, st.sampled_from([1, -1]), st.sampled_from([None, (0.8, 1.2)]))
def test_ppl(case: Case, alpha, direction, clamp):
    actual = checked(xs.ppl_shaped)(
        case.advantages, case.logps, case.mask, case.group, alpha=alpha, direction=direction, clamp=clamp
    )
    arrays = map(exact, (case.advantages, case.logps, case.mask))
    close(actual, reference.ppl(*arrays, case.group.tolist(), alpha, direction, clamp))
    assert actual.dtype == case.advantages.dtype


@THOROUGH
@given(cases(), ALPHAS, st.sampled_from([1, -1]), st.sampled_from([0.0, 0.5]), st.sampled_from([None, 0.5, 0.1]))
def test_position(case: Case, gamma, direction, shift, cap):
    actual = checked(xs.position_shaped)(
        case.advantages, case.mask, gamma=gamma, direction=direction, slope=15.0, shift=shift, cap=cap
    )
    expected = reference.position(exact(case.advantages), exact(case.mask), gamma, direction, 15.0, shift, cap)
    close(actual, expected)
    assert actual.dtype == case.advantages.dtype


@THOROUGH
@given(cases(), ALPHAS, st.sampled_from([1.0, 2.0, 10.0]))
def test_entropy_shaped(case: Case, alpha, kappa):
    actual = checked(xs.entropy_shaped)(case.advantages, case.entropy, case.mask, alpha=alpha, kappa=kappa)
    arrays = map(exact, (case.advantages, case.entropy, case.mask))
    close(actual, reference.entropy_bonus(*arrays, alpha, kappa))
    assert actual.dtype == case.advantages.dtype


@THOROUGH
@given(cases(), st.sampled_from([0.0, 0.1, 1.0]), st.sampled_from([0.0, 1.0]))
def test_signed(case: Case, positive, negative):
    actual = checked(xs.signed_advantages)(
        case.correctness, case.correct, positive_weight=positive, negative_weight=negative
    )
    close(actual, reference.signed(exact(case.correctness), case.correct.tolist(), positive, negative))
    assert actual.dtype == torch.float32
    assert not (actual[~case.correct] > 0).any()


@THOROUGH
@given(cases(), st.integers(1, 7))
def test_passk(case: Case, k):
    smallest = min(case.group.tolist().count(i) for i in case.group.tolist())
    k = 1 + (k - 1) % smallest
    scored = ~case.correctness.isnan()
    actual = checked(xs.passk_advantages)(case.correct, scored, case.group, k=k)
    close(actual, reference.passk(case.correct.tolist(), scored.tolist(), case.group.tolist(), k))


@THOROUGH
@given(st.integers(1, 40), st.integers(1, 40), st.integers(0, 40), st.integers(0, 2**32 - 1))
def test_passk_in_larger_groups(n, k, correct, seed):
    k, correct = 1 + (k - 1) % n, correct % (n + 1)
    order = np.random.default_rng(seed).permutation(2 * n)
    right, scored = np.r_[np.arange(n) < correct, np.ones(n, dtype=bool)][order], np.ones(2 * n, dtype=bool)
    group = np.repeat([5, -1], n)[order]
    actual = xs.passk_advantages(*map(torch.tensor, (right, scored, group)), k=k)
    close(actual, reference.passk(right, scored, group.tolist(), k))


@THOROUGH
@given(
    cases(),
    ALPHAS,
    st.sampled_from([0.5, 1.0, 1.8]),
    st.sampled_from(["token", "sequence"]),
    st.sampled_from(["normalized", "raw"]),
    st.sampled_from(["mean_one", "softmax"]),
)
def test_egsw(case: Case, alpha, temperature, level, mode, scale):
    actual = checked(xs.egsw_weights)(
        case.advantages,
        case.entropy,
        case.mask,
        alpha=alpha,
        temperature=temperature,
        level=level,
        entropy_mode=mode,
        scale=scale,
    )
    arrays = map(exact, (case.advantages, case.entropy, case.mask))
    close(actual, reference.egsw(*arrays, alpha, temperature, level, mode, scale))
    assert actual.dtype == torch.float32


@THOROUGH
@given(cases(), FRACTIONS)
def test_forking(case: Case, fraction):
    actual = checked(xs.forking_mask)(case.entropy, case.mask, fraction=fraction)
    close(actual, reference.forking(exact(case.entropy), exact(case.mask), fraction))
    assert actual.dtype == torch.float32


@THOROUGH
@given(cases())
def test_covariance(case: Case):
    actual = checked(xs.token_covariance)(case.advantages, case.logps, case.mask)
    close(actual, reference.covariance(*map(exact, (case.advantages, case.logps, case.mask))))
    assert actual.dtype == torch.float32


@THOROUGH
@given(cases(), FRACTIONS)
def test_top_covariance(case: Case, fraction):
    cov = xs.token_covariance(case.advantages, case.logps, case.mask)
    chosen = checked(xs.top_cov_mask)(cov, case.mask, fraction=fraction)
    counted = case.mask > 0
    assert not (chosen[~counted] > 0).any()
    assert chosen.sum() == reference.share(fraction, int(counted.sum()))
    if (chosen > 0).any() and (counted & (chosen == 0)).any():
        assert cov[chosen > 0].min() >= cov[counted & (chosen == 0)].max()


@THOROUGH
@given(cases(), FRACTIONS, st.integers(0, 5))
def test_clip_covariance(case: Case, fraction, seed):
    cov = xs.token_covariance(case.advantages, case.logps, case.mask)

    def draw():
        generator = torch.Generator().manual_seed(seed)
        mask = checked(xs.clip_cov_mask)(cov, case.mask, fraction=fraction, low=0.01, high=5.0, generator=generator)
        return mask > 0

    chosen = draw()
    candidates = (case.mask > 0) & (cov > 0.01) & (cov < 5.0)
    assert not (chosen & ~candidates).any()
    assert chosen.sum() == min(int(candidates.sum()), reference.share(fraction, int((case.mask > 0).sum())))
    assert torch.equal(chosen, draw())


@THOROUGH
@given(cases(), st.sampled_from([0.5, 2.0]))
def test_importance(case: Case, cap):
    sampling = case.entropy * 0.5
    actual = checked(xs.importance_weights)(case.logps, sampling, case.mask, cap=cap)
    close(actual, reference.importance(*map(exact, (case.logps, sampling, case.mask)), cap))
    assert actual.dtype == torch.float32


def importance_of_each_token(pi, q, cap=math.inf):
    """The weights of all tokens that can be sampled, one token per sequence."""
    possible = q > 0
    logs = (torch.tensor(np.log(values[possible]))[:, None] for values in (pi, q))
    return xs.importance_weights(*logs, torch.ones(int(possible.sum()), 1), cap=cap)[:, 0]


@THOROUGH
@given(st.integers(1, 40), st.sampled_from([0.1, 0.5, 0.9]), st.sampled_from([0.0, 0.25, 0.5, 0.9]), st.data())
def test_importance_of_truncated_sampling(vocabulary, p, frequency, data):
    """Pure truncation: the kept mass, nothing above 1. A mixture with the rest: at most 1/(1 − f), and no bias."""
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    pi = rng.dirichlet(np.full(vocabulary, data.draw(st.sampled_from([0.3, 3.0])))) + 1e-9
    pi /= pi.sum()
    allowed = rng.random(vocabulary) > 0.4
    allowed[rng.integers(vocabulary)] = True
    for keep in (allowed, np.array(reference.bottom_p(pi, p))):
        weights = importance_of_each_token(pi, reference.truncated(pi, keep))
        close(weights, np.full(keep.sum(), pi[keep].sum()))
        close(weights, exact(importance_of_each_token(pi, reference.truncated(pi, keep), cap=1 + 1e-6)))
    rest = reference.truncated(pi, allowed)
    bottom = np.zeros(vocabulary)
    bottom[allowed] = reference.truncated(rest[allowed], reference.bottom_p(rest[allowed], p))
    mixed = frequency * bottom + (1 - frequency) * rest
    weights = importance_of_each_token(pi, mixed)
    assert weights.max() <= (1 + 1e-6) / (1 - frequency)
    payoff = rng.normal(size=vocabulary)  # its mean under π over what can be sampled
    assert math.isclose(
        (exact(weights) * mixed[allowed] * payoff[allowed]).sum(), (pi * payoff)[allowed].sum(), abs_tol=1e-5
    )


GATES = [(of, level) for of in ("reward", "correct") for level in ("batch", "group")]


@THOROUGH
@given(cases(dtype="float32"), st.sampled_from(GATES), st.sampled_from([0.0, 0.3, 0.5, 1.0]))
def test_pass_threshold(case: Case, gate, threshold):
    of, level = gate
    actual = xs.PassThreshold(threshold, level=level, of=of).passes(case.batch())
    values, decides = (case.rewards, case.rewards) if of == "reward" else (case.correct, case.correctness)
    scored = (~decides.isnan()).tolist()
    expected = reference.gate(exact(values), scored, case.group.tolist(), threshold, level)
    assert actual.tolist() == expected.tolist()


@THOROUGH
@given(st.lists(cases(), min_size=1, max_size=3), st.sampled_from([0.0, 0.5, 0.9]), st.booleans())
def test_running_solve_rates(batches: list[Case], decay, given_some):
    start = {"7": 0.25, "elsewhere": 0.75} if given_some else {}
    heat = xs.ElementWiseTemperature(0.5, 1.5, "running", start or None, decay)
    recorded = []
    for case in batches:
        prompts = [str(group) for group in case.group.tolist()]
        heat.metrics(case.batch().with_(prompts=prompts))
        recorded.append((prompts, case.correct.tolist(), exact(case.correctness)))
    rates, overall = reference.running_rates(recorded, decay, start)
    unseen = overall if overall is not None else sum(start.values()) / len(start) if start else 0.5
    for prompt in ("-3", "0", "7", "1000003", "elsewhere", "new"):
        assert heat.rate(prompt) == pytest.approx(rates.get(prompt, unseen))


# --- what holds for all of them -----------------------------------------------------------------------------------


def outcomes(case):
    """Made-up answers: −1 is none."""
    return torch.where(case.correct, 1, (case.rewards > 0.5).long() - 1)


def answered(case):
    """The batch with these answers, and with its groups as prompts."""
    texts = [None if outcome < 0 else str(outcome) for outcome in outcomes(case).tolist()]
    return case.batch().with_(answers=texts, prompts=[str(group) for group in case.group.tolist()])


FUNCTIONS = {
    "grpo": lambda c: xs.grpo_advantages(c.rewards, c.group),
    "grpo_batch": lambda c: xs.grpo_advantages(c.rewards, c.group, scale="batch"),
    "ppl": lambda c: xs.ppl_shaped(c.advantages, c.logps, c.mask, c.group, alpha=0.3),
    "position": lambda c: xs.position_shaped(c.advantages, c.mask, gamma=0.3),
    "entropy": lambda c: xs.entropy_shaped(c.advantages, c.entropy, c.mask, alpha=0.4, kappa=2.0),
    "signed": lambda c: xs.signed_advantages(c.correctness, c.correct, positive_weight=0.1),
    "passk": lambda c: xs.passk_advantages(c.correct, ~c.correctness.isnan(), c.group, k=1),
    "egsw": lambda c: xs.egsw_weights(c.advantages, c.entropy, c.mask, alpha=0.3, temperature=1.0),
    "egsw_sequence": lambda c: xs.egsw_weights(
        c.advantages, c.entropy, c.mask, alpha=0.3, temperature=1.0, level="sequence"
    ),
    "forking": lambda c: xs.forking_mask(c.entropy, c.mask, fraction=0.3),
    "covariance": lambda c: xs.token_covariance(c.advantages, c.logps, c.mask),
    "importance": lambda c: xs.importance_weights(c.logps, c.entropy, c.mask, cap=2.0),
    "negative_reinforcement": lambda c: xs.NegativeReinforcement(0.1).advantages(c.batch()),
    "passk_training": lambda c: xs.PassKTraining(1).advantages(c.batch()),
    "overlong": lambda c: xs.overlong_penalties(c.mask.sum(1), longest=7, cache=3),
    "overlong_penalty": lambda c: xs.OverlongPenalty(3, 7).rewards(c.batch()),
    "shielded": lambda c: xs.shielded_tokens(c.advantages, c.logps, c.entropy, c.mask, fraction=1.0),
    "ucb_mean": lambda c: xs.ucb_bonuses(
        c.correctness.nan_to_num().abs(), outcomes(c), c.group, baseline="mean", constant=0.5
    ),
    "repetition": lambda c: xs.repetition_penalties(outcomes(c), c.group),
    "outcome_exploration": lambda c: xs.OutcomeExploration(baseline="mean").advantages(answered(c)),
    "outcome_exploration_batch": lambda c: xs.OutcomeExploration(kind="batch").advantages(answered(c)),
    "importance_correction": lambda c: xs.ImportanceCorrection().weights(c.batch()),
    "maxrl": lambda c: xs.maxrl_advantages(c.rewards, c.group),
    "maxrl_correct": lambda c: xs.MaxRL().advantages(c.batch()),
    "pkpo": lambda c: xs.pkpo_advantages(c.rewards, c.group, k=int(torch.unique(c.group, return_counts=True)[1].min())),
    "pkpo_correct": lambda c: xs.PKPO(1).advantages(c.batch()),
    "risk_sensitive": lambda c: xs.RiskSensitive().advantages(c.batch()),
    "quantile_baseline": lambda c: xs.QuantileBaseline().advantages(c.batch()),
    "unlikeliness": lambda c: xs.Unlikeliness().rewards(c.batch()),
    "ucpo": lambda c: xs.UniformCorrect(0.5).advantages(c.batch()),
    **{
        f"pass_threshold_{of}_{level}": lambda c, of=of, level=level: xs.PassThreshold(0.3, level=level, of=of).select(
            c.batch()
        )
        for of, level in GATES
    },
}


@THOROUGH
@given(cases(), st.data())
def test_permuting_the_batch_permutes_the_result(case: Case, data):
    order = torch.tensor(data.draw(st.permutations(range(len(case.group)))))
    permuted = case.map(lambda x: x[order], lambda x: x[order])
    for name, function in FUNCTIONS.items():
        close(function(permuted), exact(function(case))[order.numpy()], name=name)


@THOROUGH
@given(cases(), st.sampled_from([math.nan, math.inf, -math.inf, 1e30]))
def test_padding_changes_nothing_and_is_zero(case: Case, garbage):
    def pad(x):
        return torch.cat([x, torch.full((len(x), 3), 0.0 if x is case.mask else garbage, dtype=x.dtype)], 1)

    padded = case.map(pad, lambda x: x)
    for name, function in FUNCTIONS.items():
        expected, actual = function(case), function(padded)
        if expected.ndim == 2:
            assert not (actual[:, -3:] != 0).any(), name
            assert not (expected[case.mask == 0] != 0).any(), name
            actual = actual[:, :-3]
        close(actual, exact(expected), name=name)


@THOROUGH
@given(cases(dtype="float32"), FRACTIONS, st.integers(0, 5))
def test_choosing_tokens_ignores_padding_and_order(case: Case, fraction, seed):
    cov = xs.token_covariance(case.advantages, case.logps, case.mask)
    wide = torch.cat([cov, torch.full((len(cov), 2), math.nan)], 1)
    wide_mask = torch.cat([case.mask, torch.zeros(len(cov), 2)], 1)
    top = xs.top_cov_mask(cov, case.mask, fraction=fraction)
    assert torch.equal(xs.top_cov_mask(wide, wide_mask, fraction=fraction)[:, :-2], top)

    def clipped(cov, mask):
        generator = torch.Generator().manual_seed(seed)
        return xs.clip_cov_mask(cov, mask, fraction=fraction, low=0.0, high=9.0, generator=generator)

    assert torch.equal(clipped(wide, wide_mask)[:, :-2], clipped(cov, case.mask))
    assume(len(cov[case.mask > 0].unique()) == int(case.mask.sum()))  # without ties
    order = torch.randperm(len(cov), generator=torch.Generator().manual_seed(seed))
    assert torch.equal(xs.top_cov_mask(cov[order], case.mask[order], fraction=fraction), top[order])


@pytest.mark.parametrize("name", FUNCTIONS)
def test_no_gradient_flows(name):
    case = Case(
        *(torch.rand(3, 4, requires_grad=True) for _ in range(3)),
        torch.ones(3, 4),
        torch.rand(3, requires_grad=True),
        torch.rand(3, requires_grad=True),
        torch.tensor([True, False, True]),
        torch.tensor([0, 0, 1]),
    )
    assert not FUNCTIONS[name](case).requires_grad


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("size", [0.0, 1e-30, 1e6])
def test_extreme_but_finite_input_stays_finite(name, size):
    values = size * tensor([1, -1, 1, 0], [0, 0, 0, 0], [-1, 1, 0, 1])
    rewards = values[:, 0].clone()
    tokens = values, -values.abs(), values.abs(), torch.ones(3, 4)
    case = Case(*tokens, rewards, rewards, rewards >= 1, torch.tensor([1, 0, 1]))
    assert torch.isfinite(FUNCTIONS[name](case)).all()


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_batch_without_a_single_token(name):
    empty = torch.full((2, 3), math.nan)
    rewards = torch.zeros(2)
    group = torch.zeros(2, dtype=torch.long)
    case = Case(empty, empty, empty, torch.zeros(2, 3), rewards, rewards, rewards > 0, group)
    result = FUNCTIONS[name](case)
    assert torch.isfinite(result).all()
    if result.ndim == 2:
        assert not result.any()


# --- worked by hand -----------------------------------------------------------------------------------------------


def test_grpo_by_hand():
    # group 1: rewards 1, 0, 0, 1: mean 1/2, sample deviation √(4·¼/3) = 0.57735; group 0: a single answer
    rewards, group = torch.tensor([1.0, 0.0, 0.7, 0.0, 1.0]), torch.tensor([1, 1, 0, 1, 1])
    a = 0.5 / (0.5773503 + 1e-4)
    close(xs.grpo_advantages(rewards, group), [a, -a, 0.0, -a, a])
    close(xs.grpo_advantages(rewards, group, scale="none"), [0.5, -0.5, 0.0, -0.5, 0.5])
    # batch: mean 0.54, squares 0.2116·2 + 0.2916·2 + 0.0256 = 1.032, deviation √(1.032/4) = 0.5079370
    b = 0.5 / (0.5079370 + 1e-4)
    close(xs.grpo_advantages(rewards, group, scale="batch"), [b, -b, 0.0, -b, b])


def test_grpo_as_trl_does_it():
    rewards = torch.tensor([0.0, 1.0, 1.1, 0.1, 0.0, 0.0, 0.0, 0.0])
    grouped = rewards.view(2, 4)
    expected = (grouped - grouped.mean(1, keepdim=True)) / (grouped.std(1, keepdim=True) + 1e-4)
    close(xs.grpo_advantages(rewards, torch.arange(2).repeat_interleave(4)), expected.flatten().numpy())


def test_grpo_leaves_out_what_could_not_be_scored():
    rewards = torch.tensor([1.0, math.nan, 0.0, math.nan])
    a = 0.5 / (math.sqrt(0.5) + 1e-4)
    close(xs.grpo_advantages(rewards, torch.tensor([0, 0, 0, 1])), [a, 0.0, -a, 0.0])


def test_grpo_rejects_an_unknown_scale():
    with pytest.raises(ValueError, match="scale is 'std'; it must be 'group', 'batch' or 'none'"):
        xs.grpo_advantages(torch.zeros(2), torch.zeros(2, dtype=torch.long), scale="std")


def test_ppl_by_hand():
    # ln PPL 1 and 3: mean 2, deviation 1, z −1 and +1; the third sequence is alone in its group: z 0
    advantages, mask = tensor([2, 2], [-1, -1], [5, 5]), tensor([1, 1], [1, 0], [1, 1])
    logps, group = tensor([-0.5, -1.5], [-3, -99], [-7, -7]), torch.tensor([8, 8, 2])
    shaped = xs.ppl_shaped(advantages, logps, mask, group, alpha=0.1)
    close(shaped, [[2.2, 2.2], [-0.9, 0], [5, 5]])
    shaped = xs.ppl_shaped(advantages, logps, mask, group, alpha=0.1, direction=-1)
    close(shaped, [[1.8, 1.8], [-1.1, 0], [5, 5]])
    shaped = xs.ppl_shaped(advantages, logps, mask, group, alpha=0.5, clamp=(0.8, 1.2))
    close(shaped, [[2.4, 2.4], [-0.8, 0], [5, 5]])


def test_ppl_takes_rounding_for_equality():
    logps = tensor([-0.1, -0.2, -0.3], [-0.3, -0.1, -0.2], [-0.2, -0.3, -0.1000001])
    group = torch.zeros(3, dtype=torch.long)
    shaped = xs.ppl_shaped(torch.ones(3, 3), logps, torch.ones(3, 3), group, alpha=1.0)
    close(shaped, np.ones((3, 3)))


def test_position_by_hand():
    # four tokens: rel 0, ¼, ½, ¾; sigmoid(15·(rel − ½)) = 0.000553, 0.022977, 0.5, 0.977023
    mask = tensor([1, 1, 1, 1, 0], [1, 0, 0, 1, 0])
    advantages = tensor([1, 1, -1, 0.1, 9], [0, 9, 9, -2, 9])
    shaped = xs.position_shaped(advantages, mask, gamma=0.1)
    # 0.0977 is above half of 0.1, so capped to 0.05; an advantage of 0 stays 0; a hole does not count
    close(shaped, [[1.0000553, 1.0022977, -1.05, 0.15, 0], [0, 0, 0, -2.05, 0]])
    uncapped = xs.position_shaped(advantages, mask, gamma=0.1, cap=None)
    close(uncapped[0, 3], 0.1977023)
    early = xs.position_shaped(advantages, mask, gamma=0.1, direction=-1)
    close(early[0, 1], 1.0977023)


def test_position_with_the_printed_shift_is_flat():
    shaped = xs.position_shaped(torch.ones(1, 4), torch.ones(1, 4), gamma=0.1, shift=-0.5)
    close(shaped, 1 + 0.1 / (1 + np.exp(-15 * (np.arange(4) / 4 + 0.5)))[None])
    assert shaped.min() > 1.0999


def test_entropy_shaped_by_hand():
    # α·H = 0.4 and 0.04; |A|/κ = 0.5, 0.05, 0
    advantages, entropy = tensor([1, -1, -0.1, 0]), tensor([1, 0.1, 1, 1])
    shaped = xs.entropy_shaped(advantages, entropy, torch.ones(1, 4), alpha=0.4, kappa=2.0)
    close(shaped, [[1.4, -0.96, -0.05, 0]])


def test_signed_by_hand():
    # correct from 1 on; then from 0.5 on; then from 3 on: an incorrect 2.0 is punished no further, but never rewarded
    rewards = torch.tensor([1.0, 2.0, 0.0, 0.6, math.nan])
    first, half, three = (rewards >= threshold for threshold in (1.0, 0.5, 3.0))
    close(xs.signed_advantages(rewards, first, positive_weight=0.0), [0, 0, -1, -0.4, 0])
    close(xs.signed_advantages(rewards, first, positive_weight=0.1), [0.1, 0.2, -1, -0.4, 0])
    close(xs.signed_advantages(rewards, first, positive_weight=1.0, negative_weight=0.0), [1, 2, 0, 0, 0])
    close(xs.signed_advantages(rewards, half, positive_weight=0.1, negative_weight=2.0), [0.1, 0.2, -2, 0.06, 0])
    close(xs.signed_advantages(rewards, three, positive_weight=0.1), [0, 0, -1, -0.4, 0])


def test_passk_by_hand():
    # n = 4, c = 1, k = 2: ρ = 1 − C(3,2)/C(4,2) = ½, σ = ½; A⁺ = ½/½ = 1; A⁻ = (½ − C(2,1)/C(3,1))/½ = −⅓,
    # all but for the 1e-6 that is added to σ
    answers = torch.arange(4) == 1, torch.ones(4, dtype=torch.bool), torch.zeros(4, dtype=torch.long)
    close(xs.passk_advantages(*answers, k=2), np.array([-1 / 3, 1, -1 / 3, -1 / 3]) * 0.5 / (0.5 + 1e-6))
    # k = 1: ρ = ¼, σ = √3/4; A⁺ = ¾/σ = √3, A⁻ = −¼/σ = −1/√3
    sigma = math.sqrt(3) / 4 + 1e-6
    close(xs.passk_advantages(*answers, k=1), [-0.25 / sigma, 0.75 / sigma, -0.25 / sigma, -0.25 / sigma])
    # k = 4: the one set has a right answer: nothing to learn
    close(xs.passk_advantages(*answers, k=4), [0, 0, 0, 0])


@pytest.mark.parametrize("right", [False, True])
def test_passk_of_groups_that_are_all_wrong_or_all_right(right):
    every = torch.ones(8, dtype=torch.bool)
    for k in (1, 3, 8):
        close(xs.passk_advantages(every & right, every, torch.zeros(8, dtype=torch.long), k=k), np.zeros(8))


@pytest.mark.parametrize(("correct", "k"), [(1, 1), (3, 250), (500, 2), (10, 64), (999, 3)])
def test_passk_of_a_thousand_answers(correct, k):
    right, every = torch.arange(1000) < correct, torch.ones(1000, dtype=torch.bool)
    actual = xs.passk_advantages(right, every, torch.zeros(1000, dtype=torch.long), k=k)
    wrong = 1000 - correct
    missed = Fraction(math.comb(wrong, k), math.comb(1000, k))
    without = Fraction(math.comb(wrong - 1, k - 1), math.comb(999, k - 1))
    sigma = math.sqrt(missed * (1 - missed)) + 1e-6
    close(actual[[0, -1]], [float(missed) / sigma, float(missed - without) / sigma])


def test_passk_leaves_out_what_could_not_be_scored():
    correct = torch.tensor([False, True, False, False, False, True, True])
    scored = torch.tensor([True, True, True, True, False, True, False])
    group = torch.tensor([0, 0, 0, 0, 0, 1, 1])
    expected = np.array([-1 / 3, 1, -1 / 3, -1 / 3, 0, 0, 0]) * 0.5 / (0.5 + 1e-6)
    close(xs.passk_advantages(correct, scored, group, k=2), expected)


def test_passk_needs_k_answers_to_each_prompt():
    with pytest.raises(ValueError, match="k is 3, but a prompt has 2 completions; k must be between 1 and 2"):
        xs.passk_advantages(torch.arange(5) < 0, torch.arange(5) >= 0, torch.tensor([0, 0, 0, 1, 1]), k=3)
    with pytest.raises(ValueError, match="k is 0"):
        xs.passk_advantages(torch.arange(2) < 0, torch.arange(2) >= 0, torch.zeros(2, dtype=torch.long), k=0)


def test_egsw_by_hand():
    # position 0: scores ln 3 and 0: softmax ¾ and ¼; position 1: one sequence only
    mask = tensor([1, 1], [1, 0])
    advantages, entropy = tensor([math.log(3), 5], [0, 0]), tensor([0, 0], [0, 0])
    paper = {"alpha": 0.0, "temperature": 1.0, "scale": "softmax"}
    close(xs.egsw_weights(advantages, entropy, mask, **paper), [[0.75, 1], [0.25, 0]])
    close(xs.egsw_weights(advantages, entropy, mask, alpha=0.0, temperature=1.0), [[1.5, 1], [0.5, 0]])
    # entropy 2 and 4 become 0 and 1; with α = ln 3 the scores are 0 and ln 3, at P = 2 half of that: √3 : 1
    entropy, zero = tensor([2, 3], [4, 9]), torch.zeros(2, 2)
    close(xs.egsw_weights(zero, entropy, mask, alpha=math.log(3), temperature=1.0), [[0.5, 1], [1.5, 0]])
    share = math.sqrt(3) / (1 + math.sqrt(3))
    weights = xs.egsw_weights(zero, entropy, mask, alpha=math.log(3), temperature=2.0, scale="softmax")
    close(weights, [[1 - share, 1], [share, 0]])


def test_egsw_by_sequence_by_hand():
    # raw sums of entropy 3 and 2 (padding left out): with α = ln 3 the scores differ by ln 3
    mask, entropy = tensor([1, 1, 1], [1, 1, 0]), tensor([1, 1, 1], [1, 1, 9])
    weights = xs.egsw_weights(
        torch.zeros(2, 3), entropy, mask, alpha=math.log(3), temperature=1.0, level="sequence", entropy_mode="raw"
    )
    close(weights, [[1.5, 1.5, 1.5], [0.5, 0.5, 0]])


def test_egsw_weights_average_to_one_at_each_position():
    torch.manual_seed(0)
    mask = (torch.rand(9, 7) > 0.3).float()
    args = torch.randn(9, 7), torch.rand(9, 7), mask
    weights = xs.egsw_weights(*args, alpha=0.3, temperature=1.0)
    close(weights.sum(0) / mask.sum(0), np.ones(7))
    close(xs.egsw_weights(*args, alpha=0.3, temperature=1.0, scale="softmax").sum(0), np.ones(7))


def test_forking_by_hand():
    # eleven counted tokens 0…10: the 0.8 quantile is 8, so 8, 9, 10 stay
    entropy = torch.arange(12.0).reshape(2, 6)
    mask = torch.ones(2, 6)
    mask[1, 5] = 0
    forking = xs.forking_mask(entropy, mask, fraction=0.2)
    assert entropy[forking > 0].tolist() == [8, 9, 10]
    assert xs.forking_mask(entropy, mask, fraction=1.0).sum() == 11
    assert xs.forking_mask(entropy, mask, fraction=1e-6).sum() == 1


def test_forking_keeps_all_ties():
    entropy = tensor([1, 2, 2, 2, 0])
    assert xs.forking_mask(entropy, torch.ones(1, 5), fraction=0.2).tolist() == [[0, 1, 1, 1, 0]]


def test_forking_takes_the_tokens_of_torch_quantile():
    torch.manual_seed(0)
    entropy = torch.rand(13, 17)
    for fraction in (0.05, 0.2, 0.33, 0.5, 0.9):
        expected = entropy >= torch.quantile(entropy, 1 - fraction)
        assert torch.equal(xs.forking_mask(entropy, torch.ones(13, 17), fraction=fraction) > 0, expected)


def test_covariance_by_hand():
    # A: 1, −1, 3 (mean 1); logp: −1, −2, −3 (mean −2)
    cov = xs.token_covariance(tensor([1, -1], [3, 9]), tensor([-1, -2], [-3, 9]), tensor([1, 1], [1, 0]))
    close(cov, [[0, 0], [-2, 0]])


def test_shares_of_the_tokens_by_hand():
    cov, mask = torch.arange(100.0).reshape(10, 10), torch.ones(10, 10)
    assert cov[xs.top_cov_mask(cov, mask, fraction=0.29) > 0].tolist() == list(range(71, 100))
    assert cov[xs.top_cov_mask(cov, mask, fraction=2e-4) > 0].tolist() == [99]
    chosen = xs.clip_cov_mask(cov, mask, fraction=0.29, low=10.0, high=15.0)
    assert cov[chosen > 0].tolist() == [11, 12, 13, 14]  # the bounds themselves are out; fewer than 29 lie between
    assert not xs.clip_cov_mask(cov, mask, fraction=0.29, low=200.0, high=300.0).any()


def test_clip_covariance_draws_by_chance():
    cov, mask = torch.ones(10, 10), torch.ones(10, 10)

    def draw(seed):
        generator = torch.Generator().manual_seed(seed)
        return xs.clip_cov_mask(cov, mask, fraction=0.05, low=0.0, high=2.0, generator=generator)

    samples = torch.stack([draw(seed) for seed in range(400)])
    assert (samples.sum((1, 2)) == 5).all()
    assert abs(samples.mean(0) - 0.05).max() < 0.05  # each token in its turn: 20 of 400, give or take


def test_importance_by_hand():
    old, sampling = tensor([math.log(0.5), math.log(0.9), -1]), tensor([math.log(0.8), math.log(0.1), 0])
    close(xs.importance_weights(old, sampling, tensor([1, 1, 0]), cap=2.0), [[0.625, 2, 0]])


def test_importance_of_bottom_p_by_hand():
    # π = 0.5, 0.3, 0.2 and bottom-p 0.5: the first goes, q = 0, 0.6, 0.4, and what is drawn weighs the kept half
    pi = np.array([0.5, 0.3, 0.2])
    bottom = reference.truncated(pi, reference.bottom_p(pi, 0.5))
    np.testing.assert_allclose(bottom, [0, 0.6, 0.4])
    close(importance_of_each_token(pi, bottom), [0.5, 0.5])
    # with frequency ½ it is q = 0.25, 0.45, 0.3: weights 2 (that is 1/(1 − f)), ⅔, ⅔
    close(importance_of_each_token(pi, 0.5 * bottom + 0.5 * pi, cap=2.0), [2, 2 / 3, 2 / 3])
    # with frequency 0.9 the first is rarer still, 0.05: its weight of 10 is cut to the cap
    close(importance_of_each_token(pi, 0.9 * bottom + 0.1 * pi, cap=2.0)[0], 2)
