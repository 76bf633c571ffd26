"""The clipped loss with bounds of each token's own, against NumPy."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from explorl.integrations.verl.token_loss import activate_columns, active_columns, token_losses
from explorl.strategies import KLCov


def by_hand(logp: float, old: float, advantage: float, low: float, high: float, dual: float) -> float:
    """One token, as the formula reads."""
    ratio = math.exp(min(max(logp - old, -20.0), 20.0))
    bounded = min(max(ratio, 1 - low), 1 + high)
    loss = max(-advantage * ratio, -advantage * bounded)
    return min(loss, -advantage * dual) if advantage < 0 and not math.isinf(high) else loss


@pytest.mark.parametrize("seed", range(5))
def test_each_token_has_its_own_bounds(seed: int) -> None:
    rng = np.random.default_rng(seed)
    logps, old, advantages = (rng.normal(size=(4, 6)) for _ in range(3))
    low, high = rng.uniform(0, 0.9, (4, 6)), rng.uniform(0, 2, (4, 6))
    high[0] = np.inf
    tensors = [torch.tensor(value) for value in (logps, old, advantages)]
    actual = token_losses(*tensors, low=torch.tensor(low), high=torch.tensor(high), dual=3.0)
    expected = np.vectorize(by_hand)(logps, old, advantages, low, high, 3.0)
    np.testing.assert_allclose(actual.loss.numpy(), expected, rtol=1e-12)


def test_worked_by_hand() -> None:
    log2 = math.log(2.0)
    logps, old = torch.tensor([[log2, log2, log2 * 3, -log2]]), torch.zeros(1, 4)
    advantages = torch.tensor([[1.0, 1.0, -1.0, -1.0]])
    high = torch.tensor([[0.2, 4.0, 0.2, 0.2]])
    result = token_losses(logps, old, advantages, low=0.2, high=high, dual=3.0)
    # r = 2, 2, 8, 1/2: clipped at 1.2, within its bounds, held at 3 by the dual clip, clipped at 0.8
    torch.testing.assert_close(result.loss, torch.tensor([[-1.2, -2.0, 3.0, 0.8]]))
    assert result.clipped.tolist() == [[True, False, False, True]]
    assert result.clipped_below.tolist() == [[False, False, True, False]]


def test_without_a_bound_nothing_clips_and_nothing_is_nan() -> None:
    logps = torch.tensor([[3.0, 3.0, 0.0]], requires_grad=True)
    advantages = torch.tensor([[1.0, -1.0, 0.0]])
    result = token_losses(logps, torch.zeros(1, 3), advantages, low=math.inf, high=math.inf, dual=3.0)
    torch.testing.assert_close(result.loss.detach(), torch.tensor([[-math.exp(3.0), math.exp(3.0), 0.0]]))
    result.loss.sum().backward()
    assert logps.grad is not None
    assert logps.grad.isfinite().all()


def test_columns_belong_to_the_block_alone() -> None:
    assert active_columns() is None
    with activate_columns({"explorl/weights": torch.ones(1, 1), "advantages": torch.ones(1, 1)}, [], 3):
        now = active_columns()
        assert now is not None
        assert (set(now.columns), now.step) == ({"weights"}, 3)
    assert active_columns() is None
    with activate_columns({}, [], 0):
        assert active_columns() is None
    with pytest.raises(ZeroDivisionError), activate_columns({"explorl/weights": torch.ones(1, 1)}, [], 3):
        1 / 0  # noqa: B018
    assert active_columns() is None


def test_penalties_see_the_columns_of_their_rows() -> None:
    rows, tokens = 2, 3
    logps = torch.randn(rows, tokens, requires_grad=True)
    old, chosen = torch.zeros(rows, tokens), torch.tensor([[1.0, 0, 0], [0, 0, 1.0]])
    row: dict[str, Any] = {
        "rewards": torch.ones(rows),
        "correct": torch.ones(rows, dtype=torch.bool),
        "correctness": torch.ones(rows),
        "group": torch.zeros(rows, dtype=torch.long),
        "truncated": torch.zeros(rows, dtype=torch.bool),
        "temperature": torch.ones(rows),
    }
    columns = {f"explorl/row/{name}": value for name, value in row.items()}
    columns |= {"explorl/weights": torch.ones(rows, tokens), "explorl/recorded_entropy": torch.zeros(rows, tokens)}
    columns |= {"explorl/kept/0/chosen": chosen}
    with activate_columns(columns, [KLCov(coef=2.0)], 0):
        now = active_columns()
        assert now is not None
        mask = torch.ones(rows, tokens)
        (term,) = now.penalties(logps=logps, old_logps=old, mask=mask, advantages=mask, ref_logps=None)
    torch.testing.assert_close(term, 2.0 * chosen * logps.abs())
    term.sum().backward()
    torch.testing.assert_close(logps.grad, 2.0 * chosen * logps.detach().sign())
