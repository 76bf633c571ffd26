"""verl's clipped loss with separate bounds for each token.

    loss = max(−r·A, −clip(r, 1 − low, 1 + high)·A)      r = exp(clamp(log π − log π_old, −20, 20))
    loss = min(loss, −c·A) if A < 0                       dual-clip PPO, Ye et al. 2020 (arXiv:1912.09729)

as in verl's loss "vanilla", which has one pair of bounds for all tokens. If ``high`` is infinite the token is not
clipped at all, not even by c.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from explorl.integrations.verl.conversion import PREFIX, ROWS
from explorl.strategies import Strategy

Tokens = Float[Tensor, "rows tokens"]


class TokenLosses(NamedTuple):
    """Policy term of each token, and whether it was clipped."""

    loss: Tokens
    log_ratio: Tokens
    clipped: Bool[Tensor, "rows tokens"]
    clipped_below: Bool[Tensor, "rows tokens"]


def token_losses(
    logps: Tokens,
    old_logps: Tokens,
    advantages: Tokens,
    *,
    low: Tensor | float,
    high: Tensor | float,
    dual: float = math.inf,
) -> TokenLosses:
    """Return the clipped policy term of each token; ``dual`` is c."""
    low, high = (torch.as_tensor(bound).to(logps).expand_as(logps) for bound in (low, high))
    log_ratio = (logps - old_logps).clamp(-20.0, 20.0)
    ratio = log_ratio.exp()
    unclipped = -advantages * ratio
    bounded = -advantages * torch.minimum(torch.maximum(ratio, 1 - low), 1 + high)
    loss = torch.maximum(unclipped, bounded)
    floor = -advantages * min(dual, torch.finfo(logps.dtype).max / 1e4)
    below = (advantages < 0) & ~high.isinf() & (loss > floor)
    return TokenLosses(torch.where(below, floor, loss), log_ratio, bounded > unclipped, below)


@dataclass(frozen=True)
class LossColumns:
    """The strategies' columns of a micro-batch."""

    columns: Mapping[str, Tensor]
    """Columns by name, without the prefix."""
    strategies: Sequence[Strategy]
    step: int

    def weights(self) -> Tensor:
        return self.columns["weights"]

    def penalties(
        self, *, logps: Tokens, old_logps: Tokens, mask: Tokens, advantages: Tokens, ref_logps: Tokens | None
    ) -> Iterator[Tokens]:
        """Yield the strategies' penalty terms, which carry gradient."""
        if "recorded_entropy" not in self.columns:
            return
        from explorl.training.grpo.batch import penalties

        kept = {name: value for name, value in self.columns.items() if name.startswith("kept/")}
        rows = {f"row_{name}": self.columns[f"row/{name}"] for name in ROWS}
        inputs: dict[str, Any] = {**rows, **kept, "recorded_entropy": self.columns["recorded_entropy"]}
        if ref_logps is not None:
            inputs["ref_per_token_logps"] = ref_logps
        terms = penalties(
            self.strategies,
            inputs,
            logps=logps,
            old_logps=old_logps,
            mask=mask,
            advantages=advantages,
            temperature=1.0,
            step=self.step,
        )
        yield from (term for _, term in terms)


_ACTIVE: ContextVar[LossColumns | None] = ContextVar("active_columns", default=None)
"""Columns of the current micro-batch, because verl calls a policy loss with a fixed set of tensors."""


def active_columns() -> LossColumns | None:
    """Return the strategies' columns of the micro-batch whose loss is being computed, if any."""
    return _ACTIVE.get()


@contextmanager
def activate_columns(columns: Mapping[str, Tensor], strategies: Sequence[Strategy], step: int) -> Iterator[None]:
    """Make the columns whose names start with the prefix available to the policy loss within the block."""
    by_name = {name.removeprefix(PREFIX): value for name, value in columns.items() if name.startswith(PREFIX)}
    token = _ACTIVE.set(LossColumns(by_name, strategies, step) if "weights" in by_name else None)
    try:
        yield
    finally:
        _ACTIVE.reset(token)
