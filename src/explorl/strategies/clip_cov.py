"""Clip-Cov: remove the gradient of a few tokens that reduce entropy most.

    among tokens with low < cov_t < high choose max(1, ⌊fraction · N⌋) at random and detach them
    cov_t = (A_t − mean A) · (log π_t − mean log π),   N = number of counted tokens

Cui et al. 2025 (The entropy mechanism), reviewed in Deng et al. 2025, §4.3.

What to expect: entropy collapses because confident tokens of highly rewarded completions are reinforced further.
Excluding two in ten thousand tokens, chosen among those, slows the decrease. The authors report higher entropy and
better results late in training.

When not to use it: if entropy does not collapse. The bounds 1 and 5 assume advantages of unit scale. With shaped or
unscaled advantages check the covariance first: there may be no tokens between the bounds.

Deviations: the authors choose new tokens for every micro-batch of every update, so that the choice depends on the
micro-batch size. Here it is made once for the whole generation batch, from the log-probabilities at sampling time, with
a generator seeded by `seed` and the step. At that time no token is PPO-clipped, so the authors' exclusion of clipped
tokens has no effect. The KL term still applies to the chosen tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from explorl.strategies._lib.collectives import LOCAL, Collectives
from explorl.strategies._lib.covariance import token_covariance
from explorl.strategies._lib.masked_stats import selection_size
from explorl.strategies._lib.schedule import Scheduled, at
from explorl.strategies._lib.validate import check_below, check_integer, check_number
from explorl.strategies.base import Batch, Strategy


def clip_cov_mask(
    cov: Float[Tensor, "batch time"],
    mask: Float[Tensor, "batch time"],
    *,
    fraction: float,
    low: float,
    high: float,
    generator: torch.Generator | None = None,
    collectives: Collectives = LOCAL,
) -> Float[Tensor, "batch time"]:
    """Return 1 for the chosen tokens, a random sample of those with low < cov < high, else 0.

    Chooses at most the given fraction of all counted tokens. The generator must be in the same state on all processes;
    the candidates are numbered across processes, so that the choice does not depend on how rows are distributed.
    """
    candidates = ((mask > 0) & (cov > low) & (cov < high)).nonzero()
    counts = torch.tensor([len(candidates), int((mask > 0).sum())], device=cov.device)
    total, tokens = collectives.sum(counts).tolist()
    device = generator.device if generator is not None else None
    order = torch.randperm(total, generator=generator, device=device, dtype=torch.int32)
    numbers = order[: selection_size(fraction, tokens)].long().to(cov.device) - collectives.sum_before(counts[0])
    rows, times = candidates[numbers[(numbers >= 0) & (numbers < len(candidates))]].unbind(1)
    chosen = torch.zeros_like(cov, dtype=torch.float32)
    chosen[rows, times] = 1.0
    return chosen


@dataclass(frozen=True)
class ClipCov(Strategy):
    """Remove the gradient of a few tokens that reduce entropy most."""

    name = "clip_cov"
    paper = "Cui et al. 2025, The entropy mechanism of RL for reasoning language models (arXiv:2505.22617)"
    needs_reuse = True
    acts_on_parts = True
    used_once: ClassVar[str] = "only excludes its tokens from a single step, before anything could be clipped,"

    fraction: Scheduled = 2e-4
    low: Scheduled = 1.0
    high: Scheduled = 5.0
    seed: int = 0

    def __post_init__(self) -> None:
        check_number(self, "fraction", above=0, at_most=1)
        check_number(self, "low")
        check_number(self, "high")
        check_below(self, "low", "high")
        check_integer(self, "seed", at_least=0)

    def weights(self, batch: Batch) -> Float[Tensor, "batch time"]:
        chosen = clip_cov_mask(
            token_covariance(batch.advantages, batch.old_logps, batch.mask, collectives=batch.collectives),
            batch.mask,
            fraction=at(self.fraction, batch.step),
            low=at(self.low, batch.step),
            high=at(self.high, batch.step),
            generator=torch.Generator().manual_seed((self.seed * 1_000_003 + batch.step) % 2**63),
            collectives=batch.collectives,
        )
        return (batch.mask > 0).float() - chosen
