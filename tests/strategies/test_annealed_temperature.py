"""Temperatures that fall with the position in an answer."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import explorl.strategies as xs

from . import reference
from .cases import THOROUGH, make_batch


def at(curve, t):
    return curve[min(t, len(curve) - 1)]


@THOROUGH
@given(st.floats(0.5, 3), st.floats(0.01, 0.4), st.floats(1e-3, 300), st.integers(0, 500))
def test_the_schedule(highest, lowest, decay, warmup):
    curve = xs.annealed_temperatures(highest=highest, lowest=lowest, decay=decay, warmup=warmup)
    assert all(value >= min(lowest, 1.0) for value in curve)
    for t in (0, 1, 2, warmup - 1, warmup, warmup + 1, round(decay / 2), round(decay), len(curve), 10_000):
        if t >= 0:
            assert at(curve, t) == pytest.approx(reference.annealed(t, highest, lowest, decay, warmup), abs=1e-9), t


def test_the_schedule_by_hand():
    # d = 100, τ_max = 1.2, τ_min = 0.1: 1.2 at first, 2.2 − e^0.5 = 0.5513 at 50, the lowest from 100 ln 2.1 = 74.2 on
    curve = xs.annealed_temperatures(highest=1.2, lowest=0.1, decay=100)
    assert curve[0] == pytest.approx(1.2)
    assert curve[50] == pytest.approx(0.551279, abs=1e-6)
    assert curve[74] > 0.1
    assert curve[75:] == (0.1,)
    assert xs.annealed_temperatures(highest=1.2, lowest=0.1, decay=100, warmup=3)[:4] == (1.0, 1.0, 1.0, curve[3])
    assert at(xs.annealed_temperatures(highest=1.2, lowest=0.1, decay=1e-9), 1) == 0.1


def test_all_rows_share_one_curve_that_follows_the_step():
    strategy = xs.AnnealedTemperature(1.2, 0.1, decay=xs.Schedule(100, 200, steps=10))
    for step, decay in ((0, 100), (5, 150), (99, 200)):
        sampling = strategy.sampling(["a", "b"], step)
        assert sampling.keys() == {"temperature_by_position"}
        first, other = sampling["temperature_by_position"]
        assert first is other
        assert first == xs.annealed_temperatures(highest=1.2, lowest=0.1, decay=decay)
    first = xs.AnnealedTemperature(training_temperature="one").sampling(["a", "b"], 0)
    assert first["training_temperature"] == [1.0, 1.0]


def test_what_is_logged():
    batch = make_batch(temperature=torch.tensor([1.0, 0.5, 0.5, 0.5, 0.5, 0.0]))
    strategy = xs.AnnealedTemperature(1.2, 0.1, decay=100)  # the longest answer has four tokens
    expected = {"temperature_mean": pytest.approx(0.5), "temperature_end": strategy.curve(0)[3]}
    assert strategy.metrics(batch) == expected
