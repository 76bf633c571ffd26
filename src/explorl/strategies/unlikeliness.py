"""Unlikeliness reward: of the right answers to a prompt, the more likely one earns less.

    r ← r · (1 − β · rank/G)  where the answer is correct, and not all answers to its prompt are
    rank = how many of the G answers to its prompt are less likely

He et al. 2025 (Rewarding the unlikely). Acts on the rewards, before they are normalised: the trainer then computes the
advantages by its own rule, so mean and deviation are those of the new rewards.

What to expect: GRPO mostly lifts right answers that were likely already. This turns it round among the right ones: with
β = 0.25, the authors' value, the least likely keeps its reward and the most likely loses just under a quarter of it.
They report a better pass@k at large k, and more so when a batch serves several updates (`num_iterations`: theirs is 2).

When not to: with few answers to a prompt a rank is a coarse measure, and with β near 1 a likely right answer is hardly
better than a wrong one.

Deviations: the paper's rewards are 0 and 1, so that the factor acts on right answers only; here it does so whatever the
reward is, and a reward below 0 is left alone. Prompts that are always solved, which the authors leave out of training,
keep their rewards: else the likelier half of their right answers would be pushed down. The log-probability is that of
the whole answer; the authors' code takes the mean per token, `level: token` here, so that long answers are not unlikely
for being long. Equally likely answers share their mean rank; the code gives them different ones by their order.
Answers that could not be scored (NaN) stay so and count in no rank, nor do answers without a token. What only asks
whether an answer is correct (passk_training, say) does not see the new rewards.
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
    """The new reward of each sequence; NaN where it could not be scored."""
    values = double(rewards)
    tokens = (mask > 0).sum(1)
    logp = masked_double(logps, mask).sum(1)
    if level == "token":
        logp = logp / tokens.clamp(min=1)
    ranked = ~values.isnan() & (tokens > 0)
    rank, size = collectives.map_rows(_ranks, logp, ranked, group)
    share = rank / size.clamp(min=1)
    solved = collectives.map_rows(group_sum, double(~values.isnan() & ~correct), group) == 0
    taken = torch.where(ranked & correct & ~solved, beta * share * values.clamp(min=0), 0.0)
    return (values - taken).to(rewards.dtype)


def _ranks(
    logp: Float[Tensor, " batch"], ranked: Bool[Tensor, " batch"], group: Int[Tensor, " batch"]
) -> tuple[Float[Tensor, " batch"], Float[Tensor, " batch"]]:
    """Each row's rank in its group, and how many have one there."""
    return group_rank(logp, group, ranked), group_sum(double(ranked), group)


@dataclass(frozen=True)
class Unlikeliness(Strategy):
    """Of the right answers to a prompt, the more likely one earns less."""

    name = "unlikeliness"
    paper = "He et al. 2025, Rewarding the unlikely (arXiv:2506.02355)"
    needs_correct = True
    acts_on_parts = True

    beta: Scheduled = 0.25  # the authors'
    level: Literal["sequence", "token"] = "sequence"  # how likely the whole answer is, or its tokens on average

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
