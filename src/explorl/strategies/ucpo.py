"""Uniform-correct policy optimization: share what a prompt's right answers earn in favour of the unlikely ones.

    A_i ← A_i · n · [(1 − τ)/n + τ · q_i⁻¹/Σ_j q_j⁻¹]  where the answer is correct;   q = softmax(mean_t log π_old)

Lochab et al. 2026 (UCPO). n and both sums are over the right answers to a prompt, so q⁻¹/Σq⁻¹ is a softmax too, of
−mean_t log π_old. The factors of a prompt average to 1: what its right answers earn together stays the same.

What to expect: GRPO does not care which right answer it lifts, so the likely ones win. Here each is lifted the more,
the less likely it is; τ = 0 is GRPO, τ = 1 the full correction, 0.2 what the authors' scripts use. They report more
diverse right answers and a better pass@k, at about the same pass@1.

When not to: it does nothing where a prompt has fewer than two right answers, nor where they are equally likely per
token. With log-probabilities far apart (short answers, high temperatures) τ near 1 gives nearly all to one answer.

Deviations: the authors' code bounds q from below by 1e-6; a softmax needs no bound. Their rewards are right and wrong,
so that right answers have one positive advantage; here each keeps its own, and a right answer with a negative one (all
are right, and the format decides, say) is left alone: to punish the unlikely more is not the aim. Answers that could
not be scored (NaN), or without a token, are not counted. It shapes the base advantage, so it stands after what replaces
that.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from explorl.strategies._lib.collectives import LOCAL, Collectives
from explorl.strategies._lib.masked_stats import double, group_sum, masked_double
from explorl.strategies._lib.order_statistics import group_max
from explorl.strategies._lib.schedule import Scheduled, at
from explorl.strategies._lib.validate import check_number
from explorl.strategies.base import Batch, Strategy


def uniform_correct(
    advantages: Float[Tensor, "batch time"],
    right: Bool[Tensor, " batch"],
    logps: Float[Tensor, "batch time"],
    mask: Float[Tensor, "batch time"],
    group: Int[Tensor, " batch"],
    *,
    tau: float,
    collectives: Collectives = LOCAL,
) -> Float[Tensor, "batch time"]:
    """Advantages with the positive ones of right answers shared anew among those of their group."""
    tokens = (mask > 0).sum(1)
    right = right & (tokens > 0)
    rarity = -masked_double(logps, mask).sum(1) / tokens.clamp(min=1)
    factor = torch.where(right, 1 - tau + tau * collectives.map_rows(_relative_shares, rarity, right, group), 1.0)
    values = masked_double(advantages, mask)
    return torch.where(values > 0, values * factor.unsqueeze(1), values).to(advantages.dtype)


def _relative_shares(
    rarity: Float[Tensor, " batch"], right: Bool[Tensor, " batch"], group: Int[Tensor, " batch"]
) -> Float[Tensor, " batch"]:
    """n · q_i⁻¹/Σ_j q_j⁻¹ over the right answers of a group."""
    inverse = torch.where(right, (rarity - group_max(rarity, group, right)).exp(), 0.0)
    share = inverse / group_sum(inverse, group).clamp(min=1)  # the largest term of the sum is 1
    return group_sum(double(right), group) * share


@dataclass(frozen=True)
class UniformCorrect(Strategy):
    """Share what a prompt's right answers earn in favour of the unlikely ones."""

    name = "ucpo"
    paper = "Lochab et al. 2026, Uniform-correct policy optimization (arXiv:2605.00365)"
    needs_correct = True
    acts_on_parts = True

    tau: Scheduled = 0.2  # of the authors' scripts

    def __post_init__(self) -> None:
        check_number(self, "tau", at_least=0, at_most=1)

    def advantages(self, batch: Batch) -> Float[Tensor, "batch time"]:
        right = batch.correct & ~batch.correctness.isnan()
        tau = at(self.tau, batch.step)
        tokens = batch.advantages, right, batch.old_logps, batch.mask
        return uniform_correct(*tokens, batch.group, tau=tau, collectives=batch.collectives)
