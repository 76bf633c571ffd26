"""Entropy bonus: reward the policy's entropy itself, with a fixed or a target-seeking coefficient.

    loss ← loss − coef · mean_t H_t
    with a target: coef ← clamp(coef ± delta, minimum, maximum) after each step, + where H ≤ target, and the bonus
    acts only where H ≤ target

The classic entropy regulariser; the target-seeking form is that of He et al. 2025 (Skywork-OR1).

What to expect: the bluntest means against collapse. A fixed coefficient is hard to set, since too little does nothing
and too much lets entropy run away within a few dozen steps; the target-seeking one holds a floor instead.

When not to: with a fixed coefficient in long runs. With a target far below what the policy shows early in training it
never engages: set it near the `entropy` that the first steps log.

Deviations: this is TRL's own bonus, which this strategy only switches on, so its coefficient is set before training
and cannot follow a schedule. Unlike in the other strategies, H carries gradient here, and TRL averages it within each
micro-batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from explorl.strategies._lib.validate import check_below, check_number
from explorl.strategies.base import Strategy


@dataclass(frozen=True)
class EntropyBonus(Strategy):
    """Reward the policy's entropy itself, with a fixed or a target-seeking coefficient."""

    name = "entropy_bonus"
    paper = "He et al. 2025, Skywork Open Reasoner 1 (arXiv:2505.22312)"
    acts_on_parts = True

    coef: float = 0.001  # with a target: where it starts
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
