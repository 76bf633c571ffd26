"""Strategies of a stranger's own that say something of the wrong shape, type, device or value: the error names them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from explorl.strategies import Batch, Strategy
from explorl.training.grpo.batch import penalties
from explorl.training.grpo.shaping import shape

ROWS = 4
"""As many rows as tokens: a value per row would be spread along the wrong axis without a word."""


def batch_of(**changes: Any) -> Batch:
    square = torch.ones(ROWS, ROWS)
    fields: dict[str, Any] = {
        "logps": -square,
        "old_logps": -square,
        "ref_logps": None,
        "sampling_logps": None,
        "entropy": 0.5 * square,
        "branching": None,
        "mask": square.tril(),
        "advantages": torch.arange(1.0, ROWS + 1).unsqueeze(1) * square.tril(),
        "rewards": torch.tensor([1.0, 0.0, 1.0, torch.nan]),
        "correct": torch.tensor([True, False, True, False]),
        "correctness": torch.tensor([1.0, 0.0, 1.0, torch.nan]),
        "group": torch.tensor([0, 0, 1, 1]),
        "truncated": torch.zeros(ROWS, dtype=torch.bool),
        "temperature": torch.ones(ROWS),
        "step": 7,
    }
    return Batch(**{**fields, **changes})


def mine(**hooks: Callable[..., Any]) -> Strategy:
    made: type[Strategy] = dataclass(frozen=True)(type("Mine", (Strategy,), {**hooks, "name": "mine"}))
    return made()


ROW_OPTIONS, NAN, OTHER_DEVICE = (
    (lambda s, b: b.rewards),
    (lambda s, b: b.mask * torch.nan),
    (lambda s, b: b.mask.to("meta")),
)


@pytest.mark.parametrize("hook", ["advantages", "select", "weights"])
@pytest.mark.parametrize(
    ("value", "error"),
    [
        (ROW_OPTIONS, r"shape \(4,\).*unsqueeze"),
        (lambda s, b: b.mask[:, :-1], r"shape \(4, 3\).*shape \(4, 4\)"),
        (lambda s, b: b.mask.tolist(), "is list; return a tensor"),
        (lambda s, b: b.mask.numpy(), "is ndarray; return a tensor"),
        (NAN, "is nan on 10 of 10 tokens at step 7"),
        (OTHER_DEVICE, "is on meta; return it on cpu"),
    ],
)
def test_what_cannot_be_meant_is_named(hook: str, value: Any, error: str) -> None:
    with pytest.raises((TypeError, ValueError), match=rf"mine\.{hook} .*{error}"):
        shape([mine(**{hook: value})], batch_of())


@pytest.mark.parametrize(
    ("hooks", "error"),
    [
        ({"clip": lambda s, b: 0.2}, r"mine\.clip is 0\.2; return \(low, high\)"),
        ({"clip": lambda s, b: (0.2, b.rewards)}, r"mine\.clip has shape \(4,\)"),
        ({"clip": lambda s, b: (0.2, float("nan"))}, r"mine\.clip is nan"),
        ({"keep": lambda s, b: {"a": b.rewards}}, r"mine\.keep: 'a' has shape \(4,\)"),
        ({"keep": lambda s, b: {"a": [1]}}, r"mine\.keep: 'a' is list"),
        ({"metrics": lambda s, b: {"a": b.rewards}}, r"mine\.metrics: 'a' is a tensor of shape \(4,\)"),
        ({"metrics": lambda s, b: {"a": "much"}}, r"mine\.metrics: 'a' is 'much'"),
    ],
)
def test_what_cannot_be_meant_by_the_other_hooks(hooks: dict[str, Any], error: str) -> None:
    with pytest.raises((TypeError, ValueError), match=error):
        shape([mine(**hooks)], batch_of())


def test_what_can_be_meant_is_taken() -> None:
    """Booleans as a mask, a column, one number for all, no bound at all, a metric as a tensor, None for nothing."""
    batch = batch_of()
    shaped = shape([mine(select=lambda s, b: b.correct.unsqueeze(1), weights=lambda s, b: 2.0)], batch)
    torch.testing.assert_close(shaped.loss_mask, batch.mask * batch.correct.unsqueeze(1))
    torch.testing.assert_close(shaped.weights, torch.full_like(batch.mask, 2.0))
    assert shaped.metrics["strategy/mine/masked_tokens"] == 2 + 4
    shaped = shape([mine(clip=lambda s, b: (0.2, float("inf")), metrics=lambda s, b: {"a": b.mask.mean()})], batch)
    assert shaped.clip is not None
    assert bool(shaped.clip[1].isinf().all())
    assert shaped.metrics == {"strategy/mine/a": 0.625}
    assert shape([mine(keep=lambda s, b: None, metrics=lambda s, b: None)], batch).kept == {}
    columns = shape([mine(advantages=lambda s, b: b.advantages[:, :1])], batch).advantages
    torch.testing.assert_close(columns, batch.advantages)


def test_a_model_that_diverged_is_not_the_strategys_fault() -> None:
    batch = batch_of(logps=torch.full((ROWS, ROWS), torch.nan))
    assert bool(shape([mine(weights=lambda s, b: b.logps)], batch).weights.isnan().all())


@pytest.mark.parametrize(
    ("term", "error"),
    [
        (lambda s, b, k: b.logps.sum(1), r"mine\.penalty has shape \(4,\)"),
        (lambda s, b, k: b.logps / 0, "is -inf on 10"),
    ],
)
def test_a_penalty_too(term: Any, error: str) -> None:
    batch, inputs = batch_of(), {"recorded_entropy": torch.ones(ROWS, ROWS)}
    inputs |= {
        f"row_{name}": getattr(batch, name) for name in ("rewards", "correct", "correctness", "group", "truncated")
    }
    tensors = {name: getattr(batch, name) for name in ("logps", "old_logps", "mask", "advantages")}
    with pytest.raises(ValueError, match=error):
        list(penalties([mine(penalty=term)], inputs, temperature=1.0, step=7, **tensors))
