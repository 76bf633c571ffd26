"""Forking tokens: train only on the tokens with the highest entropy.

    weight_t = 1 if H_t ≥ quantile(H, 1 − fraction) over all counted tokens of the batch, else 0

Wang et al. 2025 (Beyond the 80/20 rule), reviewed in Deng et al. 2025, §4.3.

What to expect: 80 % of the tokens are nearly certain and contribute little gradient; without them the update
concentrates on the points where completions diverge. The authors report the same results as with all tokens for an 8B
model, and better ones for 14B and 32B.

When not to use it: on small models, by that trend, or after entropy has collapsed, when the quantile separates only
noise.

Deviations: the quantile is taken over the whole generation batch of all processes, not over a micro-batch. All tokens
equal to the threshold are kept, so more than the fraction may remain. The KL term still applies to every token.
`normalize="all"` divides the loss by the number of all tokens (TRL), `"kept"` by that of the kept ones (the authors;
steps are about 5 times larger at 0.2). For the latter the kept tokens have the weight N/N_kept, which is exact for
losses averaged over tokens (loss types "dapo" and "bnpo") and a close approximation for those averaged over sequences
first.
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
    """Return 1 for counted tokens at or above the (1 − fraction) quantile of entropy, else 0."""
    tokens = int(collectives.sum((mask > 0).sum()))
    if not tokens:
        return torch.zeros_like(entropy, dtype=torch.float32)
    # A linear quantile lies between two order statistics, and comparing with it or with the upper one is the same.
    rank = math.ceil((1 - fraction) * (tokens - 1) - 1e-9)
    threshold = kth_smallest(entropy[mask > 0].float(), rank + 1, collectives=collectives)
    return ((mask > 0) & (entropy.float() >= threshold)).float()


@dataclass(frozen=True)
class ForkingTokens(Strategy):
    """Train only on the tokens with the highest entropy."""

    name = "forking_tokens"
    paper = "Wang et al. 2025, Beyond the 80/20 rule (arXiv:2506.01939)"
    acts_on_parts = True

    fraction: Scheduled = 0.2
    normalize: Literal["all", "kept"] = "all"

    def __post_init__(self) -> None:
        check_number(self, "fraction", above=0, at_most=1)
        check_choice(self, "normalize", "all", "kept")

    def weights(self, batch: Batch) -> Float[Tensor, "batch time"]:
        mask = self._forking_mask(batch)
        if self.normalize == "kept":
            tokens, kept = batch.collectives.sum(torch.stack([(batch.mask > 0).sum(), (mask > 0).sum()]))
            mask = mask * (tokens / kept.clamp(min=1))
        return mask

    def metrics(self, batch: Batch) -> Mapping[str, float]:
        lowest = batch.entropy.float().masked_fill(self._forking_mask(batch) == 0, torch.inf).flatten()
        threshold = batch.collectives.min(lowest.min() if len(lowest) else batch.entropy.new_tensor(torch.inf))
        return {"threshold": float(threshold) if threshold.isfinite() else 0.0}

    def _forking_mask(self, batch: Batch) -> Float[Tensor, "batch time"]:
        return forking_mask(
            batch.entropy, batch.mask, fraction=at(self.fraction, batch.step), collectives=batch.collectives
        )
