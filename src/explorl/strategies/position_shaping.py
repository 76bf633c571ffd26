"""Position shaping: add a bonus to late tokens during a window of training steps.

    A ← A + sign(A) · min(b_t, cap·|A|),   b_t = γ · sigmoid(direction · slope · (rel_t − shift))
    rel_t = (index of t among the sequence's own counted tokens, from 0) / (their number)

Deng et al. 2025, Eq. 8 and 12.

What to expect: correct and wrong completions alike have more weight towards their end. The authors report gains of 1.2
and 2.1 points of avg@8 on Qwen2.5-7B and Qwen2.5-Math-7B, slightly longer completions and a rise of entropy, in either
direction.

When not to use it: in the first, rising stage of training. The bonus raises entropy quickly, so the authors apply it
only for 100 steps of the plateau (`start=200, steps=100`; move the window to where your reward levels off). Completions
of a few tokens have no late part.

Deviations: the paper prints a shift of −0.5, with which the sigmoid is almost 1 everywhere; the authors' code uses +0.5
and caps the bonus at half of |A|, which the paper does not mention. Both are the defaults here; `cap=None` removes the
cap. Tool output in the middle of a sequence has no index.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from explorl.strategies._lib.masked_stats import double, masked_double
from explorl.strategies._lib.schedule import Scheduled, at
from explorl.strategies._lib.validate import check_choice, check_integer, check_number
from explorl.strategies.base import Batch, Strategy


def position_shaped(
    advantages: Float[Tensor, "batch time"],
    mask: Float[Tensor, "batch time"],
    *,
    gamma: float,
    direction: int = 1,
    slope: float = 15.0,
    shift: float = 0.5,
    cap: float | None = 0.5,
) -> Float[Tensor, "batch time"]:
    """Increase |A| by a bonus that grows with the relative position (with direction −1: falls)."""
    present = double(mask > 0)
    rel = (present.cumsum(1) - 1) / present.sum(1, keepdim=True).clamp(min=1)
    bonus = gamma * torch.sigmoid(direction * slope * (rel - shift))
    values = masked_double(advantages, mask)
    if cap is not None:
        bonus = torch.minimum(bonus, cap * values.abs())
    return (values + values.sign() * bonus).to(advantages.dtype)


@dataclass(frozen=True)
class PositionShaping(Strategy):
    """Add a bonus to late tokens during a window of training steps."""

    name = "position_shaping"
    paper = "Deng et al. 2025, From Trial-and-Error to Improvement, Eq. 8 and 12"
    acts_on_parts = True

    gamma: Scheduled = 0.1  # 1.0 in the paper's analysis, 0.1 in its training runs
    direction: Literal[1, -1] = 1  # −1 rewards early tokens, the paper's weaker variant
    slope: Scheduled = 15.0
    shift: Scheduled = 0.5
    cap: Scheduled | None = 0.5
    start: int = 200
    steps: int = 100

    def __post_init__(self) -> None:
        check_number(self, "gamma", at_least=0)
        check_choice(self, "direction", 1, -1)
        check_number(self, "slope", at_least=0)
        check_number(self, "shift")
        check_number(self, "cap", above=0, optional=True)
        check_integer(self, "start", at_least=0)
        check_integer(self, "steps", at_least=1)

    def advantages(self, batch: Batch) -> Float[Tensor, "batch time"] | None:
        if not self.start <= batch.step < self.start + self.steps:
            return None
        return position_shaped(
            batch.advantages,
            batch.mask,
            gamma=at(self.gamma, batch.step),
            direction=self.direction,
            slope=at(self.slope, batch.step),
            shift=at(self.shift, batch.step),
            cap=None if self.cap is None else at(self.cap, batch.step),
        )
