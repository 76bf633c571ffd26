"""Maximum-likelihood RL: divide advantages by the group's mean reward, so that rare successes count more.

    A = (r − r̄)/r̄,   0 if r̄ ≤ 0;   r̄ = mean_group(r)

Tajwar et al. 2026 (MaxRL). GRPO maximises the mean of p, the probability of a correct completion; this maximises the
mean of log p, whose gradient is 1/p times as large: ∇ log p = Σ_k ∇pass@k / k over all k. With n completions per prompt
the expected gradient consists of the first n − 1 terms. (Without r̄ in the numerator it would be the first n. As in the
authors' code, a group without a correct completion has no gradient, which removes the last term.)

What to expect: a single correct completion among n gets A = n − 1, completions of a prompt that is solved half of the
time get ±1, and correct completions of a prompt that is nearly always solved get almost 0. The authors report a pass@1
equal to GRPO's or better and a much better pass@k, with gains that grow with n.

When not to use it: with few completions per prompt it is GRPO without the division by the standard deviation. Hard
prompts have large gradients, so a learning rate that suits GRPO may be too high. With `of: reward`, rewards must not be
negative: if they cancel, r̄ is near 0 and A is large. Rewards for the format also hide that a prompt is never solved.

Deviations: the authors' r is 1 for correct and 0 for wrong. So it is here (as defined by the run), which excludes
rewards for the format; `of: reward` uses the total reward instead. The authors' code adds 1e-6 to r̄ and, for a prompt
with a single completion, divides by that 1e-6 alone; here a single completion has A = 0. Completions that could not be
scored (NaN) are excluded from r̄ and get A = 0; an r̄ that is 0 up to rounding counts as 0. It replaces the base
advantage, so list it first and combine it with no other strategy that does.
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
    """Return one advantage per sequence; 0 for a completion that could not be scored (NaN)."""
    values = double(rewards)
    scored = ~values.isnan()
    mean, _ = group_moments(values, group, scored, correction=0)
    size, _ = group_moments(values.abs(), group, scored, correction=0)
    solved = scored & (mean > 1e-6 * size)
    return torch.where(solved, (values - mean) / torch.where(solved, mean, 1.0), 0.0).float()


@dataclass(frozen=True)
class MaxRL(Strategy):
    """Divide advantages by the group's mean reward, so that rare successes count more."""

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
