"""Tokens that answers share: counts and means against NumPy, and the policy gradient by going through all outcomes."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

import explorl.strategies as xs
from explorl.strategies.entropy_branching import shared_advantages, shared_rows

from .cases import checked, close, exact, make_batch


def random_tree(rng: np.random.Generator, rows: int, width: int) -> tuple[np.ndarray, np.ndarray]:
    """(who drew each token, mask) of answers in groups of three, some of which branch off one before them."""
    lengths = rng.integers(1, width + 1, rows)
    drew = np.tile(np.arange(rows)[:, None], (1, width))
    for row in range(rows):
        others = [other for other in range(row - row % 3, row) if lengths[other] > 1]
        if others and rng.random() < 0.8:
            parent = rng.choice(others)
            begin = rng.integers(1, lengths[parent])
            drew[row, :begin] = drew[parent, :begin]
            lengths[row] = max(lengths[row], begin)
    mask = np.arange(width) < lengths[:, None]
    drew = np.where(mask, drew, np.arange(rows)[:, None])
    from_policy = rng.random(width) > 0.2  # what a tool said is the same for all that share it
    return drew, mask * from_policy


@pytest.mark.parametrize("seed", range(20))
def test_counts_and_means_are_those_of_numpy(seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows, width = int(rng.integers(1, 13)), int(rng.integers(1, 9))
    drew, mask = random_tree(rng, rows, width)
    advantages = np.where(mask, rng.normal(size=mask.shape), np.nan)
    count, mean = np.zeros(mask.shape), np.zeros(mask.shape)
    for row, time in itertools.product(range(rows), range(width)):
        if mask[row, time]:
            same = [other for other in range(rows) if drew[other, time] == drew[row, time] and mask[other, time]]
            count[row, time] = len(same)
            mean[row, time] = np.mean([advantages[other, time] for other in same])
    offsets = torch.tensor(drew - np.arange(rows)[:, None])
    counted = torch.tensor(mask, dtype=torch.float32)
    close(checked(shared_rows)(offsets, counted), count)
    close(checked(shared_advantages)(torch.tensor(advantages, dtype=torch.float32), offsets, counted), mean)


def gradients(shared: str) -> tuple[np.ndarray, np.ndarray]:
    """The expected policy gradient of two answers that share their first token, and that of the return itself.

    A policy of two tokens: the first of three kinds, the second of two that depend on the first. All outcomes are gone
    through with their probabilities.
    """
    torch.manual_seed(1)
    first, second = torch.randn(3, dtype=torch.float64), torch.randn(3, 2, dtype=torch.float64)
    first.requires_grad_()
    second.requires_grad_()
    reward = torch.randn(3, 2, dtype=torch.float64)
    probability = (first.softmax(0)[:, None] * second.softmax(1)).detach()
    (first.log_softmax(0)[:, None] + second.log_softmax(1)).mul(probability * reward).sum().backward()
    truth = np.concatenate([first.grad.numpy(), second.grad.numpy().ravel()])
    first.grad = second.grad = None
    strategy = xs.EntropyBranching(shared=shared)
    mask = torch.ones(2, 2)
    for x, y, z in itertools.product(range(3), range(2), range(2)):
        chance = probability[x, y] * probability[x, z] / probability[x].sum()
        rows = torch.tensor([[x, y], [x, z]])
        advantages = torch.stack([reward[x, y], reward[x, z]])[:, None].expand(2, 2)
        batch = make_batch(advantages=advantages, mask=mask, drawn_by=torch.tensor([[0, 0], [-1, 0]]))
        means, weights = strategy.advantages(batch), strategy.weights(batch)
        shaped = (advantages if means is None else means) * (1.0 if weights is None else weights.double())
        logps = torch.stack([first.log_softmax(0)[rows[:, 0]], second.log_softmax(1)[rows[:, 0], rows[:, 1]]], 1)
        (chance * (shaped * logps).sum() / 2).backward()
    return np.concatenate([first.grad.numpy(), second.grad.numpy().ravel()]), truth


def test_once_per_answer_is_the_policy_gradient() -> None:
    actual, truth = gradients("per_leaf")
    np.testing.assert_allclose(actual, truth, atol=1e-12)


def test_once_in_all_weighs_a_shared_beginning_by_one_over_its_answers() -> None:
    actual, truth = gradients("once")
    np.testing.assert_allclose(actual[:3], truth[:3] / 2, atol=1e-8)
    np.testing.assert_allclose(actual[3:], truth[3:], atol=1e-8)


def test_once_learns_from_the_mean_and_weighs_the_rest_as_before() -> None:
    batch = make_batch(drawn_by=torch.tensor([[0] * 4, [-1, -1, 0, 0], [-2, 0, 0, 0], [0] * 4, [0] * 4, [0] * 4]))
    strategy = xs.EntropyBranching(shared="once")
    means, weights = strategy.advantages(batch), strategy.weights(batch)
    np.testing.assert_allclose(exact(weights[:3, 0]), 1 / 3, rtol=1e-6)
    np.testing.assert_allclose(exact(means[:3, 0]), 0.0, atol=1e-7)  # of 1, −0.5 and −0.5
    np.testing.assert_allclose(exact(means[:2, 1]), 0.25)
    assert weights[2, 1] == 1
    assert means[2, 1] == -0.5
    assert torch.equal(weights[3:], torch.ones(3, 4))
    assert strategy.weighs_kl
    assert strategy.metrics(batch) == {"forks": 2.0, "sampled_tokens": pytest.approx(13 / 16)}


@pytest.mark.parametrize("shared", ["per_leaf", "once"])
def test_a_batch_without_branches_is_left_alone(shared: str) -> None:
    strategy = xs.EntropyBranching(shared=shared)
    batch = make_batch()
    assert strategy.advantages(batch) is None
    assert strategy.weights(batch) is None
    assert strategy.metrics(batch) == {}
    assert xs.EntropyBranching().advantages(make_batch(drawn_by=torch.zeros(6, 4, dtype=torch.long))) is None


def test_a_config_says_how_answers_branch() -> None:
    options = {"initial": 3, "at": ["newline", "text:Hmm"], "weight": {"from": 0.0, "to": 0.4, "steps": 10}}
    (strategy,) = xs.build_all([{"entropy_branching": options}])
    assert strategy.branching(5) == {
        "initial": 3, "beam": 2, "base": 0.5, "weight": pytest.approx(0.2), "window": 20, "at": ("newline", "text:Hmm"),
    }  # fmt: skip
    strategy.check(num_generations=4)
    message = r"initial is 3, but there are only num_generations=2 completions per prompt; use initial=1, or num_g.*=6"
    with pytest.raises(ValueError, match=message):
        strategy.check(num_generations=2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weight": -1}, "entropy_branching: weight is -1; it must be a finite number at least 0, for example 0.2"),
        ({"base": 1.2}, "base is 1.2; it must be a finite number at least 0 and at most 1"),
        ({"beam": 1}, "beam is 1; it must be a whole number, 2 or more, for example 2"),
        ({"initial": 0}, "initial is 0; it must be a whole number, 1 or more, for example 4"),
        ({"window": 2.5}, "window is 2.5; it must be a whole number"),
        ({"at": "newline"}, r"at is 'newline'; it must be a list of markers, for example \['newline'\]"),
        ({"at": []}, r"at is \(\); it must be a list of markers"),
        ({"at": 5}, "at is 5; it must be a list of markers"),
        ({"at": ["stepp"]}, "entropy_branching: unknown marker 'stepp'; did you mean 'step'"),
        ({"shared": "twice"}, "shared is 'twice'; it must be 'per_leaf' or 'once'"),
    ],
)
def test_errors_name_the_value_and_a_good_one(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        xs.build({"entropy_branching": options})
