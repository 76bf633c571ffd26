"""Low-probability regularisation: shield unlikely but sensible tokens of wrong answers from being wiped out.

    loss_t ← loss_t + coef · min(e^d − d − 1, 10),   d = log π_proxy(o_t) − log π(o_t),   where d > 0 and o_t is chosen
    π_proxy(v) = π_old(v) / Z where π_old(v) ≥ κ · max π_old, else 0;   Z = Σ of what is kept
    chosen: the max(1, ⌊ρ · N⁻⌋) least likely of the N⁻ tokens with A < 0, less those with π_proxy(o_t) = 0

Huang et al. 2025 (Lp-Reg). The proxy is the policy without what is taken for noise; what is left of it is a little
likelier than under the policy, and the chosen tokens are held there.

What to expect: wrong answers punish all their tokens, and the rare ones lose most; these keep their place, and with
them the policy's ways to begin anew. The authors see entropy and accuracy hold over a thousand steps on policy.

When not to: where sampling leaves out the tail (top-p, top-k, min-p), hardly an unlikely token is sampled, and there is
nothing to shield. A κ that is too small lets noise through, and noise is then what is kept alive.

Deviations: the paper writes KL(π_proxy ‖ π) over the whole vocabulary; the authors' release computes it at the sampled
token, by the low-variance estimator above, bounded by 10, and so does this. As in the release (κ = 0.02, ρ = 0.01,
coef = 1), the share ρ is of the tokens with a negative advantage, where the paper takes a percentile over all tokens of
the batch. The release chooses anew in every micro-batch by the current log π and drops the PPO clip on chosen tokens;
here the choice is made once over the whole generation batch by log π_old, and the clip stays. Z is recorded while
sampling, at the temperature of sampling; so it needs the built-in engine, and with a training temperature of its own
π_old and Z are of two temperatures. Ties at the boundary go to the earlier row.
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

MOST = 10.0
"""Bound of a token's penalty, as in the authors' release: beyond it there is no gradient."""


def shielded_tokens(
    advantages: Float[Tensor, "batch time"],
    old_logps: Float[Tensor, "batch time"],
    min_p_mass: Float[Tensor, "batch time"],
    mask: Float[Tensor, "batch time"],
    *,
    fraction: float,
    collectives: Collectives = LOCAL,
) -> Float[Tensor, "batch time"]:
    """1 on the least likely tokens with a negative advantage, as far as the proxy keeps them."""
    punished = masked_double(advantages, mask) < 0
    tokens = int(collectives.sum(punished.sum()))
    chosen = torch.zeros_like(mask, dtype=torch.float32)
    chosen[punished] = top_k_mask(
        old_logps[punished], selection_size(fraction, tokens), lowest=True, collectives=collectives
    ).float()
    return chosen * (masked_double(min_p_mass, mask) > 0)


def proxy_penalty(
    logps: Float[Tensor, "batch time"], proxy_logps: Float[Tensor, "batch time"], chosen: Float[Tensor, "batch time"]
) -> Float[Tensor, "batch time"]:
    """min(e^d − d − 1, 10) on chosen tokens below their proxy, d = log π_proxy − log π; 0 elsewhere."""
    gap = torch.where(chosen > 0, proxy_logps - logps, 0.0)
    gap = torch.where(gap.detach() > 0, gap, 0.0).clamp(max=MOST)  # e^10 is far above the bound
    return (gap.exp() - gap - 1).clamp(max=MOST)


@dataclass(frozen=True)
class LowProbabilityRegularization(Strategy):
    """Shield unlikely but sensible tokens of wrong answers from being wiped out."""

    name = "lp_reg"
    paper = "Huang et al. 2025, Low-probability tokens sustain exploration in RLVR (arXiv:2510.03222)"
    acts_on_parts = True

    coef: Scheduled = 1.0
    fraction: Scheduled = 0.01  # ρ, of the tokens with a negative advantage
    min_p: float = 0.02  # κ: tokens less likely than this share of the likeliest one are noise

    def __post_init__(self) -> None:
        check_number(self, "coef", at_least=0)
        check_number(self, "fraction", above=0, at_most=1)
        check_number(self, "min_p", above=0, at_most=1, scheduled=False)

    @property
    def needs_min_p_mass(self) -> float:  # type: ignore[override]
        return float(self.min_p)

    def chosen(self, batch: Batch) -> Float[Tensor, "batch time"]:
        """1 on the tokens that are shielded."""
        if batch.min_p_mass is None:
            raise ValueError(
                f"{self.name} needs the mass of the likely tokens, which this rollout did not record; use the built-in "
                "engine (engine='explorl'), or take lp_reg out of the list"
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
        """How many tokens are shielded, and the mean mass of what the proxy keeps there."""
        chosen = self.chosen(batch)
        assert batch.min_p_mass is not None
        masses = torch.where(chosen > 0, batch.min_p_mass, 0.0)
        tokens, mass = batch.collectives.sum(torch.stack([double(chosen.sum()), double(masses.sum())])).tolist()
        return {"tokens": tokens, "mass": mass / max(tokens, 1.0)}
