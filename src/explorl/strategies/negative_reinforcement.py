"""Negative reinforcement: learn from wrong completions, and little or not at all from correct ones.

    A = λ · R  if the answer is correct,   A = ν · min(R − 1, 0)  if not;   no baseline, no standard deviation

Zhu et al. 2025 (The surprising effectiveness of negative reinforcement), reviewed in Deng et al. 2025, §4.3.
λ = `positive_weight`, ν = `negative_weight`: λ = 0 is NSR, λ = 0.1 W-REINFORCE, λ = 1 with ν = 0 PSR. R is the reward
that decides whether an answer is correct, as defined by the run: a named reward function and a threshold.

What to expect: wrong paths lose probability, which moves to whatever else the policy already considered, so pass@k at
large k is preserved or improves and pass@1 comes close to GRPO's. PSR does the opposite: pass@1 rises and diversity
falls. W-REINFORCE is the authors' compromise.

When not to use it: if almost all completions are wrong, since there is no useful mass to move, or if almost all are
correct, since hardly any gradient remains. Without a baseline, groups with equal rewards do have a gradient.

Deviations: the authors have one reward, correct or wrong. Here R is the deciding reward rather than the total, so that
a reward for the format neither makes a wrong answer correct nor reduces its penalty. A partial score of the deciding
reward does reduce it (R = 0.1 gives −0.9), but an incorrect answer never gets a positive advantage, whatever its R. A
completion that could not be scored (NaN) gets A = 0. It replaces the base advantage, so list it first and do not
combine it with passk_training.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from explorl.strategies._lib.masked_stats import double
from explorl.strategies._lib.schedule import Scheduled, at
from explorl.strategies._lib.validate import check_number
from explorl.strategies.base import Batch, Strategy, per_token


def signed_advantages(
    correctness: Float[Tensor, " batch"],
    correct: Bool[Tensor, " batch"],
    *,
    positive_weight: float,
    negative_weight: float = 1.0,
) -> Float[Tensor, " batch"]:
    """Return one advantage per sequence; 0 for a completion that could not be scored (NaN in `correctness`)."""
    values = double(correctness)
    signed = torch.where(correct, positive_weight * values, negative_weight * (values - 1).clamp(max=0))
    return torch.where(values.isnan(), 0.0, signed).float()


@dataclass(frozen=True)
class NegativeReinforcement(Strategy):
    """Learn from wrong completions, and little or not at all from correct ones."""

    name = "negative_reinforcement"
    paper = "Zhu et al. 2025, The surprising effectiveness of negative reinforcement (arXiv:2506.01347)"
    replaces_advantage = True
    needs_correct = True
    acts_on_parts = True

    positive_weight: Scheduled = 0.0  # 0.1 is W-REINFORCE
    negative_weight: Scheduled = 1.0

    def __post_init__(self) -> None:
        check_number(self, "positive_weight", at_least=0)
        check_number(self, "negative_weight", at_least=0)

    def advantages(self, batch: Batch) -> Float[Tensor, "batch time"]:
        values = signed_advantages(
            batch.correctness,
            batch.correct,
            positive_weight=at(self.positive_weight, batch.step),
            negative_weight=at(self.negative_weight, batch.step),
        )
        return (per_token(values, batch.mask) * batch.mask).to(batch.advantages.dtype)
