"""KL-Cov: penalise the drift of the few tokens that reduce entropy most.

    loss_t = −A_t · r_t + coef · |log π_t − log π_old,t|  on the max(1, ⌊fraction · N⌋) tokens of largest cov_t
    loss_t = −A_t · r_t                                   on the others, without a clip
    cov_t = (A_t − mean A) · (log π_t − mean log π),      N = number of counted tokens

Cui et al. 2025 (The entropy mechanism), reviewed in Deng et al. 2025, §4.3.

What to expect: while a batch is reused, the chosen tokens stay close to the old policy and the others are
unconstrained; entropy settles at a higher level.

When not to use it: on a batch that is used for one update only, where log π equals log π_old and the penalty has no
gradient. Since it disables the PPO clip, many updates on one batch can leave the trust region. It overrides clip_higher
if listed after it.

Deviations: the authors choose new tokens for every micro-batch. Here the choice is made once for the whole generation
batch, from the log-probabilities at sampling time, and used for all updates on it. Ties at the threshold go to the
earlier row.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from explorl.strategies._lib.collectives import LOCAL, Collectives
from explorl.strategies._lib.covariance import token_covariance
from explorl.strategies._lib.masked_stats import selection_size
from explorl.strategies._lib.schedule import Scheduled, at
from explorl.strategies._lib.selection import top_k_mask
from explorl.strategies._lib.validate import check_number
from explorl.strategies.base import Batch, Strategy


def top_cov_mask(
    cov: Float[Tensor, "batch time"],
    mask: Float[Tensor, "batch time"],
    *,
    fraction: float,
    collectives: Collectives = LOCAL,
) -> Float[Tensor, "batch time"]:
    """Return 1 for the given fraction of counted tokens with the largest covariance, else 0."""
    tokens = int(collectives.sum((mask > 0).sum()))
    chosen = torch.zeros_like(cov, dtype=torch.float32)
    chosen[mask > 0] = top_k_mask(cov[mask > 0], selection_size(fraction, tokens), collectives=collectives).float()
    return chosen


@dataclass(frozen=True)
class KLCov(Strategy):
    """Penalise the drift of the few tokens that reduce entropy most."""

    name = "kl_cov"
    paper = "Cui et al. 2025, The entropy mechanism of RL for reasoning language models (arXiv:2505.22617)"
    needs_reuse = True
    acts_on_parts = True

    fraction: Scheduled = 2e-4
    coef: Scheduled = 1.0

    def __post_init__(self) -> None:
        check_number(self, "fraction", above=0, at_most=1)
        check_number(self, "coef", at_least=0)

    def clip(self, batch: Batch) -> tuple[float, float]:
        return math.inf, math.inf

    def keep(self, batch: Batch) -> Mapping[str, Float[Tensor, "batch time"]]:
        cov = token_covariance(batch.advantages, batch.old_logps, batch.mask, collectives=batch.collectives)
        fraction = at(self.fraction, batch.step)
        return {"chosen": top_cov_mask(cov, batch.mask, fraction=fraction, collectives=batch.collectives)}

    def penalty(self, batch: Batch, kept: Mapping[str, Float[Tensor, "batch time"]]) -> Float[Tensor, "batch time"]:
        drift = torch.where(kept["chosen"] > 0, batch.logps - batch.old_logps, 0.0)
        return at(self.coef, batch.step) * drift.abs()

    def metrics(self, batch: Batch) -> Mapping[str, float]:
        tokens = int(batch.collectives.sum((batch.mask > 0).sum()))
        return {"tokens": selection_size(at(self.fraction, batch.step), tokens)}
