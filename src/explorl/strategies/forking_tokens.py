"""Forking tokens: only the tokens of highest entropy learn.

    weight_t = 1 where H_t ≥ quantile(H, 1 − fraction) over all counted tokens of the batch, else 0

Wang et al. 2025 (Beyond the 80/20 rule), reviewed in Deng et al. 2025, §4.3.

What to expect: 80 % of the tokens are nearly certain and carry little gradient; without them the step goes to the
points where the answer forks. The authors report the results of all tokens with an 8B model and better ones with 14B
and 32B.

When not to: on small models, by that trend, or where the entropy has collapsed and the quantile separates noise from
noise.

Deviations: the quantile is over the whole generation batch of all processes, not over a micro-batch. Ties at the
threshold are all kept, so that more than the fraction may remain. The KL term still acts on every token.
`normalize="all"` divides the loss by all tokens (TRL), `"kept"` by the kept ones (the authors; steps about 5 times
larger at 0.2): there the kept tokens weigh N/N_kept, which is exact for losses that are averaged over tokens
(loss types "dapo" and "bnpo") and close to it for those averaged over sequences first.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from explorl.strategies._lib.collectives import LOCAL, Collectives
from explorl.strategies._lib.schedule import Scheduled, at
from explorl.strategies._lib.selection import kth_smallest
from explorl.strategies._lib.validate import check_choice, check_number
from explorl.strategies.base import Batch, Strategy


def forking_mask(
    entropy: Float[Tensor, "batch time"],
    mask: Float[Tensor, "batch time"],
    *,
    fraction: float,
    collectives: Collectives = LOCAL,
) -> Float[Tensor, "batch time"]:
    """1 on the counted tokens at or above the (1 − fraction) quantile of entropy."""
    tokens = int(collectives.sum((mask > 0).sum()))
    if not tokens:
        return torch.zeros_like(entropy, dtype=torch.float32)
    # A linear quantile lies between two order statistics, and what is ≥ it is what is ≥ the upper one.
    rank = math.ceil((1 - fraction) * (tokens - 1) - 1e-9)
    threshold = kth_smallest(entropy[mask > 0].float(), rank + 1, collectives=collectives)
    return ((mask > 0) & (entropy.float() >= threshold)).float()


@dataclass(frozen=True)
class ForkingTokens(Strategy):
    """Only the tokens of highest entropy learn."""

    name = "forking_tokens"
    paper = "Wang et al. 2025, Beyond the 80/20 rule (arXiv:2506.01939)"
    acts_on_parts = True

    fraction: Scheduled = 0.2
    normalize: Literal["all", "kept"] = "all"

    def __post_init__(self) -> None:
        check_number(self, "fraction", above=0, at_most=1)
        check_choice(self, "normalize", "all", "kept")

    def weights(self, batch: Batch) -> Float[Tensor, "batch time"]:
        kept = self._kept(batch)
        if self.normalize == "kept":
            tokens, left = batch.collectives.sum(torch.stack([(batch.mask > 0).sum(), (kept > 0).sum()]))
            kept = kept * (tokens / left.clamp(min=1))
        return kept

    def metrics(self, batch: Batch) -> Mapping[str, float]:
        lowest = batch.entropy.float().masked_fill(self._kept(batch) == 0, torch.inf).flatten()
        threshold = batch.collectives.min(lowest.min() if len(lowest) else batch.entropy.new_tensor(torch.inf))
        return {"threshold": float(threshold) if threshold.isfinite() else 0.0}

    def _kept(self, batch: Batch) -> Float[Tensor, "batch time"]:
        return forking_mask(
            batch.entropy, batch.mask, fraction=at(self.fraction, batch.step), collectives=batch.collectives
        )
