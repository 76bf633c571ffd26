"""Entropy advantage: add a bounded bonus to the advantage of tokens with high entropy.

    A ← A + min(α · H, |A| / κ)

Cheng et al. 2025 (Reasoning with exploration), reviewed in Deng et al. 2025, §4.3. H is detached.

What to expect: tokens of high entropy (changes of direction, checks, rare steps) are reinforced more in correct
completions and penalised less in wrong ones. The bound preserves the sign of every advantage, and since H is detached
the bonus shrinks by itself as the policy becomes more certain. The authors report gains of pass@k at large k.

When not to use it: together with another entropy reward with a large coefficient; entropy can grow without limit.

Deviations: none. H is the entropy at temperature 1 recorded while sampling. κ below 1 is rejected because the bonus
could then change the sign of a negative advantage.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from explorl.strategies._lib.masked_stats import masked_double
from explorl.strategies._lib.schedule import Scheduled, at
from explorl.strategies._lib.validate import check_number
from explorl.strategies.base import Batch, Strategy


def entropy_shaped(
    advantages: Float[Tensor, "batch time"],
    entropy: Float[Tensor, "batch time"],
    mask: Float[Tensor, "batch time"],
    *,
    alpha: float,
    kappa: float,
) -> Float[Tensor, "batch time"]:
    """Return the advantages plus min(α·H, |A|/κ)."""
    values = masked_double(advantages, mask)
    bonus = torch.minimum(alpha * masked_double(entropy, mask), values.abs() / kappa)
    return (values + bonus).to(advantages.dtype)


@dataclass(frozen=True)
class EntropyAdvantage(Strategy):
    """Add a bounded bonus to the advantage of tokens with high entropy."""

    name = "entropy_advantage"
    paper = "Cheng et al. 2025, Reasoning with exploration: an entropy perspective (arXiv:2506.14758)"
    acts_on_parts = True

    alpha: Scheduled = 0.4
    kappa: Scheduled = 2.0

    def __post_init__(self) -> None:
        check_number(self, "alpha", at_least=0)
        check_number(self, "kappa", at_least=1)

    def advantages(self, batch: Batch) -> Float[Tensor, "batch time"]:
        alpha, kappa = at(self.alpha, batch.step), at(self.kappa, batch.step)
        return entropy_shaped(batch.advantages, batch.entropy, batch.mask, alpha=alpha, kappa=kappa)
