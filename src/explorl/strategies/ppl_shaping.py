"""Perplexity shaping: increase the weight of completions that are more likely under the policy.

    A ← A · (1 − α z),   z = (ln PPL − mean_group) / std_group,   ln PPL = −mean_t log π_old

Deng et al. 2025, Eq. 7 and 11.

What to expect: a small effect. With α = 0.01 an advantage changes by one or two per cent; the authors report gains of
1.8 and 2.6 points of avg@8 on Qwen2.5-7B and Qwen2.5-Math-7B, longer completions, and an entropy that stays higher late
in training. `direction=-1` favours high perplexity: their weaker variant, with much higher entropy and about twice as
many completions of low quality.

When not to use it: with few completions per prompt (below about 4) z is mostly noise. With a large α the factor can
change the sign of an advantage; set `clamp`.

Deviations: the standard deviation is the population's, and z is 0 if a group's values of ln PPL differ only by
rounding. A sequence without tokens counts in no statistic. The authors' release clamps the factor to [0.8, 1.2],
removes 1.5-IQR outliers from the statistics and, in its low-PPL branch, never multiplies A: this follows the paper,
with `clamp=(0.8, 1.2)` as an option.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from explorl.strategies._lib.collectives import LOCAL, Collectives
from explorl.strategies._lib.masked_stats import group_moments, is_negligible, masked_double
from explorl.strategies._lib.schedule import Scheduled, at
from explorl.strategies._lib.validate import check_choice, check_interval, check_number
from explorl.strategies.base import Batch, Strategy


def ppl_shaped(
    advantages: Float[Tensor, "batch time"],
    logps: Float[Tensor, "batch time"],
    mask: Float[Tensor, "batch time"],
    group: Int[Tensor, " batch"],
    *,
    alpha: float,
    direction: int = 1,
    clamp: tuple[float, float] | None = None,
    collectives: Collectives = LOCAL,
) -> Float[Tensor, "batch time"]:
    """Multiply advantages by the factor 1 − direction·α·z of their sequence, bounded by `clamp`."""
    tokens = (mask > 0).sum(1)
    log_ppl = -masked_double(logps, mask).sum(1) / tokens.clamp(min=1)
    mean, std = collectives.map_rows(group_moments, log_ppl, group, tokens > 0, correction=0)
    flat = is_negligible(std, mean)
    z = torch.where(flat, 0.0, (log_ppl - mean) / torch.where(flat, 1.0, std))
    factor = 1 - direction * alpha * z
    if clamp is not None:
        factor = factor.clamp(*clamp)
    return (masked_double(advantages, mask) * factor.unsqueeze(1)).to(advantages.dtype)


@dataclass(frozen=True)
class PerplexityShaping(Strategy):
    """Increase the weight of completions that are more likely under the policy."""

    name = "ppl_shaping"
    paper = "Deng et al. 2025, From Trial-and-Error to Improvement, Eq. 7 and 11"
    acts_on_parts = True

    alpha: Scheduled = 0.01  # the paper's, throughout training
    direction: Literal[1, -1] = 1  # −1 favours high perplexity, the paper's weaker variant
    clamp: tuple[float, float] | None = None  # (0.8, 1.2) in the authors' release

    def __post_init__(self) -> None:
        check_number(self, "alpha", at_least=0)
        check_choice(self, "direction", 1, -1)
        check_interval(self, "clamp", good=(0.8, 1.2))

    def advantages(self, batch: Batch) -> Float[Tensor, "batch time"]:
        alpha = at(self.alpha, batch.step)
        return ppl_shaped(
            batch.advantages,
            batch.old_logps,
            batch.mask,
            batch.group,
            alpha=alpha,
            direction=self.direction,
            clamp=self.clamp,
            collectives=batch.collectives,
        )
