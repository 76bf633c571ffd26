"""Uniform-correct policy optimization: redistribute the advantage of correct completions to unlikely ones.

    A_i ← A_i · n · [(1 − τ)/n + τ · q_i⁻¹/Σ_j q_j⁻¹]  if the answer is correct;   q = softmax(mean_t log π_old)

Lochab et al. 2026 (UCPO). n and both sums are over the correct completions of a prompt, so q⁻¹/Σq⁻¹ is also a softmax,
of −mean_t log π_old. The factors of a prompt have a mean of 1: the total of its correct completions does not change.

What to expect: GRPO does not distinguish between correct completions, so likely ones win. Here a completion is
reinforced more, the less likely it is; τ = 0 is GRPO, τ = 1 the full correction, and the authors' scripts use 0.2. They
report more diverse correct completions and a better pass@k at about the same pass@1.

When not to use it: it has no effect if a prompt has fewer than two correct completions, or if they are equally likely
per token. If log-probabilities are far apart (short completions, high temperatures), τ near 1 gives nearly everything
to one completion.

Deviations: the authors' code bounds q from below by 1e-6; a softmax needs no bound. Their rewards are binary, so all
correct completions have the same positive advantage. Here each keeps its own, and a correct completion with a negative
one (for example if all are correct and the format decides) is unchanged: the aim is not to penalise unlikely ones more.
Completions that could not be scored (NaN) or have no tokens are not counted. It shapes the base advantage, so list it
after strategies that replace that.
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
    correct: Bool[Tensor, " batch"],
    logps: Float[Tensor, "batch time"],
    mask: Float[Tensor, "batch time"],
    group: Int[Tensor, " batch"],
    *,
    tau: float,
    collectives: Collectives = LOCAL,
) -> Float[Tensor, "batch time"]:
    """Redistribute the positive advantages of correct completions within their group."""
    tokens = (mask > 0).sum(1)
    correct = correct & (tokens > 0)
    rarity = -masked_double(logps, mask).sum(1) / tokens.clamp(min=1)
    factor = torch.where(correct, 1 - tau + tau * collectives.map_rows(_relative_shares, rarity, correct, group), 1.0)
    values = masked_double(advantages, mask)
    return torch.where(values > 0, values * factor.unsqueeze(1), values).to(advantages.dtype)


def _relative_shares(
    rarity: Float[Tensor, " batch"], correct: Bool[Tensor, " batch"], group: Int[Tensor, " batch"]
) -> Float[Tensor, " batch"]:
    """Return n · q_i⁻¹/Σ_j q_j⁻¹ over the correct completions of a group."""
    inverse = torch.where(correct, (rarity - group_max(rarity, group, correct)).exp(), 0.0)
    share = inverse / group_sum(inverse, group).clamp(min=1)  # the largest term of the sum is 1
    return group_sum(double(correct), group) * share


@dataclass(frozen=True)
class UniformCorrect(Strategy):
    """Redistribute the advantage of correct completions to unlikely ones."""

    name = "ucpo"
    paper = "Lochab et al. 2026, Uniform-correct policy optimization (arXiv:2605.00365)"
    needs_correct = True
    acts_on_parts = True

    tau: Scheduled = 0.2  # as in the authors' scripts

    def __post_init__(self) -> None:
        check_number(self, "tau", at_least=0, at_most=1)

    def advantages(self, batch: Batch) -> Float[Tensor, "batch time"]:
        correct = batch.correct & ~batch.correctness.isnan()
        tau = at(self.tau, batch.step)
        tokens = batch.advantages, correct, batch.old_logps, batch.mask
        return uniform_correct(*tokens, batch.group, tau=tau, collectives=batch.collectives)
