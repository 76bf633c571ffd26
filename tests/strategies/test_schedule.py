"""Hyperparameters that follow the step, and the shared pieces of the contract."""

from __future__ import annotations

import math

import pytest
import torch

from explorl.strategies import Batch, Schedule, StepState, Strategy, at
from explorl.strategies.base import masked_mean, overrides, per_token

from .cases import make_batch


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ("linear", {0: 1.0, 200: 1.0, 250: 0.5, 275: 0.25, 300: 0.0, 999: 0.0}),
        ("cosine", {0: 1.0, 200: 1.0, 250: 0.5, 225: 0.8535534, 300: 0.0, 999: 0.0}),
        ("step", {0: 1.0, 200: 1.0, 299: 1.0, 300: 0.0, 999: 0.0}),
    ],
)
def test_schedule(shape, expected):
    schedule = Schedule(begin=1.0, to=0.0, start=200, steps=100, shape=shape)
    assert {step: schedule(step) for step in expected} == pytest.approx(expected)
    assert at(schedule, 250) == schedule(250)


def test_a_number_is_the_same_at_every_step():
    assert at(3, 0) == at(3, 10**6) == 3.0
    assert isinstance(at(3, 0), float)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"steps": 0}, "must end after it starts: steps is 0"),
        ({"steps": -5}, "must end after it starts"),
        ({"start": -1}, "cannot start before step 0"),
        ({"shape": "sine"}, "unknown shape of a schedule: 'sine'; use linear, cosine or step"),
        ({"begin": math.nan}, "begin is nan"),
        ({"to": math.inf}, "to is inf"),
        ({"steps": math.nan}, "steps is nan; use a number of steps, 1 or more, such as 100"),
        ({"steps": "100"}, "steps is '100'; use a number"),
        ({"start": None}, "start is None; use a number of steps, 0 or more"),
    ],
)
def test_a_bad_schedule_is_an_error(change, message):
    with pytest.raises(ValueError, match=message):
        Schedule(**{"begin": 1.0, "to": 0.0, **change})


def test_a_strategy_without_hooks_does_nothing():
    strategy, batch = Strategy(), make_batch()
    assert strategy.arguments() == strategy.sampling(["a"], 0) == strategy.keep(batch) == strategy.metrics(batch) == {}
    for hook in (strategy.select, strategy.advantages, strategy.weights, strategy.clip):
        assert hook(batch) is None
    assert strategy.order(["a"]) is strategy.penalty(batch, {}) is None
    strategy.after_step(StepState(1, 0.0, lambda: None, lambda: None))
    strategy.check(num_generations=1)


def test_overrides():
    class Mine(Strategy):
        def weights(self, batch: Batch):
            return batch.mask

    assert overrides(Mine(), "weights")
    assert not overrides(Mine(), "clip")


def test_a_batch_with_another_field():
    batch = make_batch()
    assert batch.with_(step=7).step == 7
    assert batch.step == 0


def test_one_value_per_sequence_spread_over_its_tokens():
    mask = torch.ones(2, 3)
    assert per_token(torch.tensor([1.0, 2.0]), mask).tolist() == [[1, 1, 1], [2, 2, 2]]


def test_means_over_counted_tokens():
    values = torch.tensor([[1.0, 3.0, math.nan], [5.0, math.inf, math.nan], [math.nan] * 3])
    mask = torch.tensor([[1.0, 1, 0], [1, 0, 0], [0, 0, 0]])
    assert masked_mean(values, mask) == 3.0
    assert masked_mean(values, mask, dim=1).tolist() == [2.0, 5.0, 0.0]
