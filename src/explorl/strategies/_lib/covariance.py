"""Covariance of advantage and log-probability per token, which determines how fast the entropy falls.

    cov_t = (A_t − mean A) · (log π_t − mean log π),   means over the counted tokens of the batch

Cui et al. 2025 (The entropy mechanism): for a softmax policy, the change in entropy in one step is proportional to
minus the mean of this covariance, to which a few tokens contribute most. `clip_cov` and `kl_cov` act on those.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from explorl.strategies._lib.collectives import LOCAL, Collectives
from explorl.strategies._lib.masked_stats import double, masked_double


def token_covariance(
    advantages: Float[Tensor, "batch time"],
    logps: Float[Tensor, "batch time"],
    mask: Float[Tensor, "batch time"],
    *,
    collectives: Collectives = LOCAL,
) -> Float[Tensor, "batch time"]:
    """Return each counted token's term of the covariance, 0 elsewhere."""
    a, logp = masked_double(advantages, mask), masked_double(logps, mask)
    tokens, a_sum, logp_sum = collectives.sum(torch.stack([double((mask > 0).sum()), a.sum(), logp.sum()]))
    tokens = tokens.clamp(min=1)
    return torch.where(mask > 0, (a - a_sum / tokens) * (logp - logp_sum / tokens), 0.0).float()
