"""Importance correction: weight tokens by the ratio of the policy to the distribution they were sampled from.

    weight_t = min(exp(log π_old,t − log q_t), cap),   q: distribution that the token was sampled from

Truncated importance sampling (Ionides 2008), which Yao et al. 2025 applied to rollouts that differ from the trained
policy. π_old is the full distribution at the training temperature. The weight multiplies only the policy term, not the
KL term, and carries no gradient. It works with everything that changes the sampling distribution: top-p, top-k, min-p,
bottom_p, a repetition penalty, element_wise_temperature.

What to expect: a smaller effect than one may hope for. For pure truncation (top-p, top-k, min-p, bottom_p at frequency
1), q = π / m on the kept tokens, where m is their mass, so the weight is exp(log π − log q) = m ≤ 1: the cap is never
reached, tokens weigh less where more mass was removed, and the removed tokens cannot be corrected for, since they are
never sampled. With bottom_p at a frequency f < 1 per token, q is the mixture f · q_bottom + (1 − f) · q_rest regardless
of the random decision (this is what the engine records): no token of q_rest is excluded, the weight is at most
1/(1 − f), and for f ≤ 1/2 the cap of 2 is not reached either. With `per="sequence"`, q is the distribution that the
sequence was sampled from: truncated or not.

When not to use it: if completions are sampled from the policy itself: all weights are then 1. It needs recorded values
of log q, which the built-in engine provides.

Deviations: the weight is per token, as in Yao et al.; that of a whole sequence would be the product over its tokens.
Weights above the cap are set to it, which introduces a bias but bounds the variance. With
`element_wise_temperature(training_temperature="one")` it also corrects for the difference in temperature.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from explorl.strategies._lib.masked_stats import double
from explorl.strategies._lib.schedule import Scheduled, at
from explorl.strategies._lib.validate import check_number
from explorl.strategies.base import Batch, Strategy


def importance_weights(
    old_logps: Float[Tensor, "batch time"],
    sampling_logps: Float[Tensor, "batch time"],
    mask: Float[Tensor, "batch time"],
    *,
    cap: float,
) -> Float[Tensor, "batch time"]:
    """Return min(exp(log π_old − log q), cap), 0 for uncounted tokens."""
    ratio = (double(old_logps) - double(sampling_logps)).exp().clamp(max=cap)
    return torch.where(mask > 0, ratio, 0.0).float()


@dataclass(frozen=True)
class ImportanceCorrection(Strategy):
    """Weight tokens by the ratio of the policy to the distribution they were sampled from."""

    name = "importance_correction"
    needs_sampling_logps = True
    acts_on_parts = True
    paper = (
        "Ionides 2008, Truncated importance sampling (J. Comput. Graph. Stat. 17); "
        "Yao et al. 2025, Your efficient RL framework secretly brings you off-policy RL training"
    )

    cap: Scheduled = 2.0

    def __post_init__(self) -> None:
        check_number(self, "cap", above=0)

    def weights(self, batch: Batch) -> Float[Tensor, "batch time"]:
        if batch.sampling_logps is None:
            raise ValueError(
                f"{self.name} needs the sampling log-probabilities, which were not recorded during this rollout; "
                "use the built-in engine (engine='explorl'), or remove importance_correction from the list"
            )
        return importance_weights(batch.old_logps, batch.sampling_logps, batch.mask, cap=at(self.cap, batch.step))

    def metrics(self, batch: Batch) -> Mapping[str, float]:
        """Return the mean weight and the fraction of tokens at the cap."""
        weights, present = self.weights(batch), batch.mask > 0
        capped = present & (weights >= at(self.cap, batch.step))
        sums = torch.stack([double(values.sum()) for values in (weights, capped, present)])
        weight, at_cap, tokens = batch.collectives.sum(sums).tolist()
        return {"mean": weight / max(tokens, 1.0), "capped": at_cap / max(tokens, 1.0)}
