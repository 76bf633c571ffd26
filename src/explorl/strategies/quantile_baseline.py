"""Quantile baseline: use a quantile of the group's rewards as the baseline instead of the mean.

    A = (r − Q_K)/(std_group + 1e-4),   Q_K = the smallest reward x of the group with fraction(r ≤ x) ≥ K

Wu et al. 2025 (quantile advantage estimation), Eq. 3 and 4. K = `quantile`. For rewards 0 and 1 and a solve rate of p:

    p ≤ 1 − K:  Q_K = 0, only correct completions learn;      p > 1 − K:  Q_K = 1, only wrong completions learn

What to expect: most completions get A = 0 (80 % in the authors' runs), and entropy neither collapses nor explodes; it
is negative advantages on hard prompts that make it explode. Their K = 0.4 is used with a higher upper clip bound
(clip_higher). A larger K penalises more and keeps entropy up, a smaller one reinforces more and lets it fall. They
report a pass@1 above DAPO's and about the same pass@16.

When not to use it: with few completions per prompt, where p jumps past 1 − K, and with finely graded rewards, for which
Q_K is just a different centre.

Deviations: this is the paper's quantile, which is always one of the rewards. The authors' code calls torch.quantile,
which interpolates, so that near p = 1 − K their baseline is between 0 and 1. The standard deviation is the sample's and
1e-4 is TRL's constant (the authors: 1e-6). r is the total reward, as in their code; `of: correct` uses only
correctness. Completions that could not be scored (NaN) are excluded from quantile and standard deviation and get A = 0.
It replaces the base advantage, so list it first and combine it with no other strategy that does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from explorl.strategies._lib.masked_stats import double, group_moments, group_sum
from explorl.strategies._lib.order_statistics import sorted_groups
from explorl.strategies._lib.reward_values import reward_values
from explorl.strategies._lib.schedule import Scheduled, at
from explorl.strategies._lib.validate import check_choice, check_number
from explorl.strategies.base import Batch, Strategy, per_token
from explorl.strategies.grpo import EPSILON


def quantile_advantages(
    rewards: Float[Tensor, " batch"], group: Int[Tensor, " batch"], *, quantile: float
) -> Float[Tensor, " batch"]:
    """Return one advantage per sequence; 0 for a completion that could not be scored (NaN)."""
    values = double(rewards)
    scored = ~values.isnan()
    n = group_sum(double(scored), group)
    order, position = sorted_groups(values, group, scored)
    last = (quantile * n - 1e-9).floor()  # position ⌈K·n⌉ − 1; the tolerance makes 0.55 · 20 exactly 11
    chosen = torch.empty_like(scored).scatter_(0, order, position == last[order])
    baseline = group_sum(torch.where(chosen, values, 0.0), group)
    _, std = group_moments(values, group, scored, correction=1)
    return torch.where(scored, (values - baseline) / (std + EPSILON), 0.0).float()


@dataclass(frozen=True)
class QuantileBaseline(Strategy):
    """Use a quantile of the group's rewards as the baseline instead of the mean."""

    name = "quantile_baseline"
    paper = "Wu et al. 2025, Quantile advantage estimation (arXiv:2509.22611), Eq. 3 and 4"
    replaces_advantage = True
    acts_on_parts = True

    quantile: Scheduled = 0.4  # the paper's, with clip_higher
    of: Literal["reward", "correct"] = "reward"  # or only correctness

    def __post_init__(self) -> None:
        check_number(self, "quantile", above=0, below=1)
        check_choice(self, "of", "reward", "correct")

    @property
    def needs_correct(self) -> bool:  # type: ignore[override]
        return self.of == "correct"

    def advantages(self, batch: Batch) -> Float[Tensor, "batch time"]:
        rewards, quantile = reward_values(batch, self.of), at(self.quantile, batch.step)
        values = batch.collectives.map_rows(quantile_advantages, rewards, batch.group, quantile=quantile)
        return (per_token(values, batch.mask) * batch.mask).to(batch.advantages.dtype)
