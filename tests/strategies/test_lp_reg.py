"""Low-probability regularisation."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import explorl.strategies as xs

from . import reference
from .cases import THOROUGH, Case, cases, checked, close, exact, make_batch


@THOROUGH
@given(cases(), st.sampled_from([0.01, 0.29, 0.5, 1.0]), st.integers(0, 99))
def test_shielded(case: Case, fraction, seed):
    mass = torch.rand(case.mask.shape, generator=torch.Generator().manual_seed(seed)).to(case.logps.dtype)
    mass = torch.where(mass > 0.3, mass, 0.0)
    actual = checked(xs.shielded_tokens)(case.advantages, case.logps, mass, case.mask, fraction=fraction)
    expected = reference.shielded(exact(case.advantages), exact(case.logps), exact(mass), exact(case.mask), fraction)
    close(actual, expected)


@THOROUGH
@given(st.floats(-30, 0), st.floats(-30, 0), st.floats(1e-6, 1))
def test_penalty(logp, old_logp, mass):
    def one(value):
        return torch.tensor([[value]], dtype=torch.float64)

    target = one(old_logp) - one(mass).log()
    actual = checked(xs.proxy_penalty)(one(logp), target, one(1.0))
    assert float(actual) == pytest.approx(reference.proxy(logp, old_logp, mass), rel=1e-6, abs=1e-6)
    assert float(xs.proxy_penalty(one(logp), target, one(0.0))) == 0


def batch_with_mass(**changes):
    """The punished tokens are those of rows 1, 2, 4 and 5: 2 + 3 + 4 + 2; the least likely stand in row 5 and 4."""
    batch = make_batch(**changes)
    mass = torch.where(batch.mask > 0, 0.8, torch.nan)
    mass[5, 1] = 0.0  # noise
    return batch.with_(min_p_mass=mass)


def test_by_hand():
    batch = batch_with_mass()
    strategy = xs.LowProbabilityRegularization(coef=2.0, fraction=0.3)  # ⌊0.3 · 11⌋ = 3: (5, 1), (5, 0), (4, 3)
    keep = strategy.keep(batch)
    assert keep["chosen"].nonzero().tolist() == [[4, 3], [5, 0]]
    assert strategy.metrics(batch) == {"tokens": 2, "mass": pytest.approx(0.8)}
    assert torch.isfinite(keep["proxy"]).all()
    # log π is log π_old: d = −ln 0.8, and the penalty 2 · (1/0.8 + ln 0.8 − 1)
    logps = batch.logps.clone().requires_grad_()
    penalty = strategy.penalty(batch.with_(logps=logps), keep)
    close(penalty.detach(), 2 * (1.25 + math.log(0.8) - 1) * exact(keep["chosen"]))
    penalty.sum().backward()
    # It pulls the token up: d penalty / d log π = −2 · (e^d − 1) = −0.5
    np.testing.assert_allclose(logps.grad.nan_to_num(), -0.5 * exact(keep["chosen"]), atol=1e-6)


def test_a_token_above_its_proxy_is_left_alone_and_one_far_below_is_bounded():
    batch = batch_with_mass()
    strategy = xs.LowProbabilityRegularization(fraction=0.3)
    keep = strategy.keep(batch)
    above = strategy.penalty(batch.with_(logps=batch.logps + 1), keep)
    assert not above.any()
    far = batch.logps - 500
    penalty = strategy.penalty(batch.with_(logps=far.requires_grad_()), keep)
    close(penalty.detach(), 10 * exact(keep["chosen"]))
    penalty.sum().backward()
    assert not far.grad.any()


def test_its_share_follows_a_schedule_and_its_min_p_is_asked_for():
    strategy = xs.LowProbabilityRegularization(fraction=xs.Schedule(0.1, 1.0, steps=10), min_p=0.3)
    assert strategy.needs_min_p_mass == 0.3
    assert xs.Strategy.needs_min_p_mass is None
    assert strategy.metrics(batch_with_mass(step=0))["tokens"] == 0  # the one token is noise
    assert strategy.metrics(batch_with_mass(step=10))["tokens"] == 10
    assert not xs.LowProbabilityRegularization.needs_reuse


def test_a_rollout_without_a_record_is_an_error():
    with pytest.raises(ValueError, match=r"lp_reg needs the mass of the likely tokens, .*engine=.explorl."):
        xs.LowProbabilityRegularization().keep(make_batch())


def test_nothing_is_punished():
    batch = batch_with_mass(advantages=torch.zeros(6, 4))
    strategy = xs.LowProbabilityRegularization(fraction=1.0)
    assert strategy.metrics(batch) == {"tokens": 0.0, "mass": 0.0}
    assert not strategy.penalty(batch, strategy.keep(batch)).any()
