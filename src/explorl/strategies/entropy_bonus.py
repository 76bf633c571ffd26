"""Entropy bonus: add the policy's entropy to the objective, with a fixed or an adaptive coefficient.

    loss ← loss − coef · mean_t H_t
    with a target: coef ← clamp(coef ± delta, minimum, maximum) after each step, + if H ≤ target, and the bonus
    applies only if H ≤ target

The classic entropy regulariser; the adaptive form is from He et al. 2025 (Skywork-OR1).

What to expect: the most direct way to prevent collapse. A fixed coefficient is hard to choose: too small has no effect,
and too large increases entropy without limit within a few dozen steps. The adaptive coefficient instead keeps entropy
above a floor.

When not to use it: with a fixed coefficient in long runs. A target far below the entropy early in training never takes
effect: set it near the `entropy` logged in the first steps.

Deviations: this strategy only enables TRL's own bonus, so its coefficient is set before training and cannot follow a
schedule. Unlike in the other strategies H carries gradient, and TRL averages it within each micro-batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from explorl.strategies._lib.validate import check_below, check_number
from explorl.strategies.base import Strategy


@dataclass(frozen=True)
class EntropyBonus(Strategy):
    """Add the policy's entropy to the objective, with a fixed or an adaptive coefficient."""

    name = "entropy_bonus"
    paper = "He et al. 2025, Skywork Open Reasoner 1 (arXiv:2505.22312)"
    acts_on_parts = True

    coef: float = 0.001  # initial value if there is a target
    target: float | None = None  # nats per token; None keeps the coefficient fixed
    delta: float = 0.005
    minimum: float = 0.0
    maximum: float = 1.0

    def __post_init__(self) -> None:
        check_number(self, "coef", at_least=0, scheduled=False)
        check_number(self, "target", above=0, optional=True, scheduled=False, good=0.2)
        check_number(self, "delta", above=0, scheduled=False)
        check_number(self, "minimum", at_least=0, scheduled=False)
        check_number(self, "maximum", above=0, scheduled=False)
        check_below(self, "minimum", "maximum")

    def arguments(self) -> Mapping[str, Any]:
        if self.target is None:
            return {"entropy_coef": self.coef, "use_adaptive_entropy": False}
        return {
            "entropy_coef": self.coef,
            "use_adaptive_entropy": True,
            "entropy_target": self.target,
            "entropy_coef_delta": self.delta,
            "entropy_coef_min": self.minimum,
            "entropy_coef_max": self.maximum,
        }
