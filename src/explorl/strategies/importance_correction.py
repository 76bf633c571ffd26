"""Importance correction: weigh tokens by how much likelier the policy makes them than what was sampled from.

    weight_t = min(exp(log π_old,t − log q_t), cap),   q: what the token was really sampled from

Truncated importance sampling (Ionides 2008), which Yao et al. 2025 brought to rollouts that differ from the policy they
train. π_old is the full distribution at the training temperature. The weight multiplies the policy term alone, not the
KL term, and no gradient flows through it. It works with whatever shapes the sampling: top-p, top-k, min-p, bottom_p, a
repetition penalty, element_wise_temperature.

What to expect: less than one may hope for. For pure truncation (top-p, top-k, min-p, bottom_p at frequency 1) q = π / m
on the kept tokens, m being their mass, so the weight is exp(log π − log q) = m ≤ 1: the cap never binds, tokens weigh
less where more was cut away, and what was cut away cannot be corrected for, since it is never sampled. With
bottom_p at a frequency f < 1 per token, q is the mixture f · q_bottom + (1 − f) · q_rest, whatever the coin said (the
engine records that): no token of q_rest is left out, the weight is at most 1/(1 − f), and at f ≤ 1/2 the cap of 2 does
not bind either. With `per="sequence"` q is that of the side which the sequence drew: truncation, or none.

When not to: where samples come from the policy itself: every weight is then 1. It needs a record of log q, which the
built-in engine makes.

Deviations: the weight is per token, as in Yao et al.; that of a whole sequence would be the product over its tokens.
Above the cap a weight is the cap: a bias, against a variance without bound. With
`element_wise_temperature(training_temperature="one")` it weighs for the difference of the temperatures too.
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
    """min(exp(log π_old − log q), cap), 0 where a token does not count."""
    ratio = (double(old_logps) - double(sampling_logps)).exp().clamp(max=cap)
    return torch.where(mask > 0, ratio, 0.0).float()


@dataclass(frozen=True)
class ImportanceCorrection(Strategy):
    """Weigh tokens by how much likelier the policy makes them than what was sampled from."""

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
                f"{self.name} needs the log-probabilities that were sampled from, which this rollout did not record; "
                "use the built-in engine (engine='explorl'), or take importance_correction out of the list"
            )
        return importance_weights(batch.old_logps, batch.sampling_logps, batch.mask, cap=at(self.cap, batch.step))

    def metrics(self, batch: Batch) -> Mapping[str, float]:
        """The mean weight, and the share of the tokens at which the cap binds."""
        weights, present = self.weights(batch), batch.mask > 0
        capped = present & (weights >= at(self.cap, batch.step))
        sums = torch.stack([double(values.sum()) for values in (weights, capped, present)])
        weight, at_cap, tokens = batch.collectives.sum(sums).tolist()
        return {"mean": weight / max(tokens, 1.0), "capped": at_cap / max(tokens, 1.0)}
