"""Unlikeliness reward: reduce the reward of the more likely correct completions of a prompt.

    r ← r · (1 − β · rank/G)  if the answer is correct and not all completions of its prompt are
    rank = number of the G completions of its prompt that are less likely

He et al. 2025 (Rewarding the unlikely). It changes the rewards before normalisation: the trainer then computes the
advantages by its own rule, with the mean and standard deviation of the new rewards.

What to expect: GRPO mostly reinforces correct completions that were likely already. This reverses the order among the
correct ones: with β = 0.25, the authors' value, the least likely keeps its reward and the most likely loses just under
a quarter of it. They report a better pass@k at large k, especially if a batch is used for several updates
(`num_iterations`: theirs is 2).

When not to use it: with few completions per prompt, where a rank is a coarse measure. With β near 1 a likely correct
completion is hardly better than a wrong one.

Deviations: the paper's rewards are 0 and 1, so that the factor affects only correct completions; here this holds for
any reward, and rewards below 0 are unchanged. Prompts whose completions are all correct, which the authors exclude from
training, keep their rewards; otherwise the likelier half of their correct completions would be penalised. The
log-probability is that of the whole completion. The authors' code uses the mean per token, here `level: token`, so that
long completions are not unlikely because of their length. Equally likely completions share their mean rank; the code
gives them different ranks by their order. Completions that could not be scored (NaN) stay so and count in no rank, nor
do completions without tokens. Strategies that only use correctness (passk_training, for example) do not see the new
rewards.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from explorl.strategies._lib.collectives import LOCAL, Collectives
from explorl.strategies._lib.masked_stats import double, group_sum, masked_double
from explorl.strategies._lib.order_statistics import group_rank
from explorl.strategies._lib.schedule import Scheduled, at
from explorl.strategies._lib.validate import check_choice, check_number
from explorl.strategies.base import Batch, Strategy


def unlikeliness_rewards(
    rewards: Float[Tensor, " batch"],
    correct: Bool[Tensor, " batch"],
    logps: Float[Tensor, "batch time"],
    mask: Float[Tensor, "batch time"],
    group: Int[Tensor, " batch"],
    *,
    beta: float,
    level: Literal["sequence", "token"] = "sequence",
    collectives: Collectives = LOCAL,
) -> Float[Tensor, " batch"]:
    """Return the new reward of each sequence; NaN if it could not be scored."""
    values = double(rewards)
    tokens = (mask > 0).sum(1)
    logp = masked_double(logps, mask).sum(1)
    if level == "token":
        logp = logp / tokens.clamp(min=1)
    ranked = ~values.isnan() & (tokens > 0)
    rank, size = collectives.map_rows(_ranks, logp, ranked, group)
    share = rank / size.clamp(min=1)
    solved = collectives.map_rows(group_sum, double(~values.isnan() & ~correct), group) == 0
    reduction = torch.where(ranked & correct & ~solved, beta * share * values.clamp(min=0), 0.0)
    return (values - reduction).to(rewards.dtype)


def _ranks(
    logp: Float[Tensor, " batch"], ranked: Bool[Tensor, " batch"], group: Int[Tensor, " batch"]
) -> tuple[Float[Tensor, " batch"], Float[Tensor, " batch"]]:
    """Return each row's rank in its group, and the number of ranked rows there."""
    return group_rank(logp, group, ranked), group_sum(double(ranked), group)


@dataclass(frozen=True)
class Unlikeliness(Strategy):
    """Reduce the reward of the more likely correct completions of a prompt."""

    name = "unlikeliness"
    paper = "He et al. 2025, Rewarding the unlikely (arXiv:2506.02355)"
    needs_correct = True
    acts_on_parts = True

    beta: Scheduled = 0.25  # the authors' value
    level: Literal["sequence", "token"] = "sequence"  # log-probability of the whole completion, or its mean per token

    def __post_init__(self) -> None:
        check_number(self, "beta", at_least=0, at_most=1)
        check_choice(self, "level", "sequence", "token")

    def rewards(self, batch: Batch) -> Float[Tensor, " batch"]:
        return unlikeliness_rewards(
            batch.rewards,
            batch.correct,
            batch.old_logps,
            batch.mask,
            batch.group,
            beta=at(self.beta, batch.step),
            level=self.level,
            collectives=batch.collectives,
        )
