"""Reference reset: periodically copy the policy into the reference model and reset the optimizer.

    π_ref ← π_θ and clear the optimizer's moments, every N steps or when the reward stalls

Liu et al. 2025 (ProRL), reviewed in Deng et al. 2025, §4.3.

What to expect: in a long run the KL term grows until it outweighs the reward and the policy stops improving; after a
reset it can move again. The KL drops to 0 at each reset, and the first steps after it are larger.

When not to use it: in short runs, or if the KL term is what keeps the policy close to the reference (each reset accepts
all drift up to that point). Without a KL term (β = 0) only the optimizer is reset.

Deviations: the authors reset when validation performance stagnates. `every` resets at fixed intervals; `on_stall`
observes the mean reward of the generation batches, resets when it has reached no new maximum for that many steps, and
then starts again from the reward at the reset.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from explorl.strategies._lib.validate import check_integer, raise_invalid
from explorl.strategies.base import Batch, StepState, Strategy


@dataclass(frozen=True)
class ReferenceReset(Strategy):
    """Periodically copy the policy into the reference model and reset the optimizer."""

    name = "reference_reset"
    paper = "Liu et al. 2025, ProRL (arXiv:2505.24864)"
    acts_on_parts = True

    every: int | None = None  # steps
    on_stall: int | None = None  # steps without a new best reward

    def __post_init__(self) -> None:
        check_integer(self, "every", at_least=1, optional=True, good=200)
        check_integer(self, "on_stall", at_least=1, optional=True, good=50)
        if (self.every is None) == (self.on_stall is None):
            both = (self.every, self.on_stall)
            raise_invalid(self, "(every, on_stall)", both, "None in exactly one of the two", (200, None))

    def after_step(self, state: StepState) -> None:
        due = self._stalled(state.reward) if self.every is None else state.step % self.every == 0
        if due:
            state.reset_reference()
            state.reset_optimizer()
            self.memory["resets"] = self.memory.get("resets", 0) + 1

    def _stalled(self, reward: float) -> bool:
        if reward > self.memory.get("best", -math.inf):
            self.memory.update(best=reward, waited=0)
            return False
        self.memory["waited"] = self.memory.get("waited", 0) + 1  # also if the reward is NaN
        if self.memory["waited"] < self.on_stall:
            return False
        self.memory.update(best=reward if math.isfinite(reward) else -math.inf, waited=0)
        return True

    def metrics(self, batch: Batch) -> Mapping[str, float]:
        return {"resets": self.memory.get("resets", 0)}
