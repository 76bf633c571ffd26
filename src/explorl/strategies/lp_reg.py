"""Low-probability regularisation: protect unlikely but plausible tokens in penalised completions.

    loss_t ← loss_t + coef · min(e^d − d − 1, 10),   d = log π_proxy(o_t) − log π(o_t),   if d > 0 and o_t is chosen
    π_proxy(v) = π_old(v) / Z if π_old(v) ≥ κ · max π_old, else 0;   Z = Σ of the kept probabilities
    chosen: the max(1, ⌊ρ · N⁻⌋) least likely of the N⁻ tokens with A < 0, except those with π_proxy(o_t) = 0

Huang et al. 2025 (Lp-Reg). The proxy is the policy without the tokens that are considered noise. The remaining tokens
are slightly more likely than under the policy, and the penalty keeps the chosen tokens near that probability.

What to expect: a wrong completion lowers the probability of all its tokens, and rare tokens lose most. This protects
the rare ones, and with them the policy's ability to start over. The authors report that entropy and accuracy hold over
a thousand on-policy steps.

When not to use it: if sampling removes the tail (top-p, top-k, min-p): hardly any unlikely token is then sampled and
there is nothing to protect. If κ is too small, noise is protected as well.

Deviations: the paper writes KL(π_proxy ‖ π) over the whole vocabulary. The authors' release computes it at the sampled
token, by the low-variance estimator above bounded by 10, and so does this strategy. As in the release (κ = 0.02,
ρ = 0.01, coef = 1) the fraction ρ refers to the tokens with a negative advantage, while the paper takes a percentile
over all tokens of the batch. The release chooses new tokens in every micro-batch by the current log π and disables the
PPO clip on chosen tokens; here the choice is made once for the whole generation batch by log π_old, and the clip
remains. Z is recorded while sampling, at the sampling temperature. Therefore this strategy needs the built-in engine,
and with a separate training temperature π_old and Z refer to two temperatures. Ties at the threshold go to the earlier
row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from explorl.strategies._lib.collectives import LOCAL, Collectives
from explorl.strategies._lib.masked_stats import double, masked_double, selection_size
from explorl.strategies._lib.schedule import Scheduled, at
from explorl.strategies._lib.selection import top_k_mask
from explorl.strategies._lib.validate import check_number
from explorl.strategies.base import Batch, Strategy

MAX_PENALTY = 10.0
"""Upper bound of a token's penalty, as in the authors' release; at the bound there is no gradient."""


def shielded_tokens(
    advantages: Float[Tensor, "batch time"],
    old_logps: Float[Tensor, "batch time"],
    min_p_mass: Float[Tensor, "batch time"],
    mask: Float[Tensor, "batch time"],
    *,
    fraction: float,
    collectives: Collectives = LOCAL,
) -> Float[Tensor, "batch time"]:
    """Return 1 for the least likely tokens with a negative advantage that the proxy keeps, else 0."""
    penalised = masked_double(advantages, mask) < 0
    tokens = int(collectives.sum(penalised.sum()))
    chosen = torch.zeros_like(mask, dtype=torch.float32)
    chosen[penalised] = top_k_mask(
        old_logps[penalised], selection_size(fraction, tokens), lowest=True, collectives=collectives
    ).float()
    return chosen * (masked_double(min_p_mass, mask) > 0)


def proxy_penalty(
    logps: Float[Tensor, "batch time"], proxy_logps: Float[Tensor, "batch time"], chosen: Float[Tensor, "batch time"]
) -> Float[Tensor, "batch time"]:
    """Return min(e^d − d − 1, 10) for chosen tokens below their proxy, with d = log π_proxy − log π; 0 elsewhere."""
    gap = torch.where(chosen > 0, proxy_logps - logps, 0.0)
    gap = torch.where(gap.detach() > 0, gap, 0.0).clamp(max=MAX_PENALTY)  # e^10 is far above the bound
    return (gap.exp() - gap - 1).clamp(max=MAX_PENALTY)


@dataclass(frozen=True)
class LowProbabilityRegularization(Strategy):
    """Protect unlikely but plausible tokens in penalised completions."""

    name = "lp_reg"
    paper = "Huang et al. 2025, Low-probability tokens sustain exploration in RLVR (arXiv:2510.03222)"
    acts_on_parts = True

    coef: Scheduled = 1.0
    fraction: Scheduled = 0.01  # ρ, of the tokens with a negative advantage
    min_p: float = 0.02  # κ: tokens less likely than this fraction of the most likely one are noise

    def __post_init__(self) -> None:
        check_number(self, "coef", at_least=0)
        check_number(self, "fraction", above=0, at_most=1)
        check_number(self, "min_p", above=0, at_most=1, scheduled=False)

    @property
    def needs_min_p_mass(self) -> float:  # type: ignore[override]
        return float(self.min_p)

    def chosen(self, batch: Batch) -> Float[Tensor, "batch time"]:
        """Return 1 for the protected tokens, else 0."""
        if batch.min_p_mass is None:
            raise ValueError(
                f"{self.name} needs the mass of the likely tokens, which was not recorded during this rollout; use the "
                "built-in engine (engine='explorl'), or remove lp_reg from the list"
            )
        tokens = batch.advantages, batch.old_logps, batch.min_p_mass, batch.mask
        return shielded_tokens(*tokens, fraction=at(self.fraction, batch.step), collectives=batch.collectives)

    def keep(self, batch: Batch) -> Mapping[str, Float[Tensor, "batch time"]]:
        chosen = self.chosen(batch)
        assert batch.min_p_mass is not None
        proxy = batch.old_logps - torch.where(chosen > 0, batch.min_p_mass, 1.0).log()
        return {"chosen": chosen, "proxy": torch.where(chosen > 0, proxy, 0.0)}

    def penalty(self, batch: Batch, kept: Mapping[str, Float[Tensor, "batch time"]]) -> Float[Tensor, "batch time"]:
        return at(self.coef, batch.step) * proxy_penalty(batch.logps, kept["proxy"], kept["chosen"])

    def metrics(self, batch: Batch) -> Mapping[str, float]:
        """Return the number of protected tokens and the mean mass that the proxy keeps at them."""
        chosen = self.chosen(batch)
        assert batch.min_p_mass is not None
        masses = torch.where(chosen > 0, batch.min_p_mass, 0.0)
        tokens, mass = batch.collectives.sum(torch.stack([double(chosen.sum()), double(masses.sum())])).tolist()
        return {"tokens": tokens, "mass": mass / max(tokens, 1.0)}
