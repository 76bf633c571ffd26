"""Maximum-likelihood RL: divide by how often a prompt is solved, so that rare successes count in full.

    A = (r − r̄)/r̄,   0 where r̄ ≤ 0;   r̄ = mean_group(r)

Tajwar et al. 2026 (MaxRL). GRPO climbs the mean of p, the probability of a right answer; this climbs the mean of log p,
whose gradient is 1/p times as large: ∇ log p = Σ_k ∇pass@k / k over all k. With n answers to a prompt the expected
gradient is that of the first n − 1 terms. (It would be the first n without r̄ in the numerator; as in the authors'
code, a group without a right answer has no gradient at all, and that takes away the last one.)

What to expect: one right answer among n gets A = n − 1, a prompt solved half of the time ±1, and one that is nearly
always solved next to nothing for its right answers. The authors report pass@1 like GRPO's or above it and a much better
pass@k, with gains that grow with n.

When not to: with few answers to a prompt it is GRPO without the deviation. Gradients of hard prompts are large, so a
learning rate that suits GRPO may be too high. With `of: reward`, rewards must not be negative: where they cancel, r̄ is
near 0 and A large; and a reward for the format hides that a prompt is never solved.

Deviations: the authors' r is right or wrong. Here it is too (as the run defines it), so that a reward for the format
plays no part; `of: reward` takes the total reward instead. Their code adds 1e-6 to r̄ and, for a prompt with a single
answer, divides by that 1e-6 alone; here a single answer has A = 0. Answers that could not be scored (NaN) are left out
of r̄ and get A = 0; an r̄ that is 0 but for rounding counts as 0. It replaces the base advantage, so it stands first in
a list and excludes others that do.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from explorl.strategies._lib.masked_stats import double, group_moments
from explorl.strategies._lib.reward_values import reward_values
from explorl.strategies._lib.validate import check_choice
from explorl.strategies.base import Batch, Strategy, per_token


def maxrl_advantages(rewards: Float[Tensor, " batch"], group: Int[Tensor, " batch"]) -> Float[Tensor, " batch"]:
    """One advantage per sequence; 0 for an answer that could not be scored (NaN)."""
    values = double(rewards)
    scored = ~values.isnan()
    mean, _ = group_moments(values, group, scored, correction=0)
    size, _ = group_moments(values.abs(), group, scored, correction=0)
    solved = scored & (mean > 1e-6 * size)
    return torch.where(solved, (values - mean) / torch.where(solved, mean, 1.0), 0.0).float()


@dataclass(frozen=True)
class MaxRL(Strategy):
    """Divide by how often a prompt is solved."""

    name = "maxrl"
    paper = "Tajwar et al. 2026, Maximum likelihood reinforcement learning (arXiv:2602.02710)"
    replaces_advantage = True
    acts_on_parts = True

    of: Literal["correct", "reward"] = "correct"  # or the total reward

    def __post_init__(self) -> None:
        check_choice(self, "of", "correct", "reward")

    @property
    def needs_correct(self) -> bool:  # type: ignore[override]
        return self.of == "correct"

    def advantages(self, batch: Batch) -> Float[Tensor, "batch time"]:
        values = batch.collectives.map_rows(maxrl_advantages, reward_values(batch, self.of), batch.group)
        return (per_token(values, batch.mask) * batch.mask).to(batch.advantages.dtype)
