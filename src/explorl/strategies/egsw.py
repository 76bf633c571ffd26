"""Entropy-guided sequence weighting: weight tokens by a softmax of advantage plus entropy over the batch.

    w_{i,t} = softmax_i((A_{i,t} + α · H_{i,t}) / P) · N_t,   over the N_t sequences that have a token at position t

Vanlioglu 2025, Eq. 6–10. At level "sequence", H_i = Σ_t H_{i,t}, A_i is the mean of the sequence's advantages (which
are all equal unless another strategy has shaped them), and all tokens of a sequence share one weight. The weight
multiplies both the policy term and the KL term (Eq. 10) and carries no gradient.

What to expect: completions with high reward and high entropy dominate the step. The author reports gains of 1.1 to 5
points over GRPO on Qwen2.5-Math-7B (α = 0.3, P = 1), and shorter completions; for the instruct model α = 0.8, P = 1.8.

When not to use it: if α and P cannot be tuned. The author calls the method very sensitive to both; a large α rewards
entropy for its own sake. At positions that few sequences reach the softmax covers only those sequences; with
`level="sequence"` all weights share one softmax. With raw entropy at that level, the sum over hundreds of tokens
outweighs any advantage.

Deviations: the paper's weights sum to 1 over N sequences, which divides the step by N. `scale="mean_one"` multiplies
them by the number of sequences in the softmax; `scale="softmax"` follows the paper. The paper does not define
`entropy="normalized"`, the author's best setting; here it is min-max scaling to [0, 1] over the counted tokens (or
sequences) of the batch, and 0 if all are equal up to rounding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from explorl.strategies._lib.collectives import LOCAL, Collectives
from explorl.strategies._lib.masked_stats import double, is_negligible, masked_double
from explorl.strategies._lib.schedule import Scheduled, at
from explorl.strategies._lib.validate import check_choice, check_number
from explorl.strategies.base import Batch, Strategy


def _min_max(
    values: Float[Tensor, "a b"], present: Bool[Tensor, "a b"], collectives: Collectives
) -> Float[Tensor, "a b"]:
    low = values.masked_fill(~present, torch.inf).min()
    high = values.masked_fill(~present, -torch.inf).max()
    low, high = collectives.min(low), collectives.max(high)
    flat = is_negligible(high - low, high)
    return torch.where(flat | ~present, 0.0, (values - low) / torch.where(flat, 1.0, high - low))


def egsw_weights(
    advantages: Float[Tensor, "batch time"],
    entropy: Float[Tensor, "batch time"],
    mask: Float[Tensor, "batch time"],
    *,
    alpha: float,
    temperature: float,
    level: Literal["token", "sequence"] = "token",
    entropy_mode: Literal["normalized", "raw"] = "normalized",
    scale: Literal["mean_one", "softmax"] = "mean_one",
    collectives: Collectives = LOCAL,
) -> Float[Tensor, "batch time"]:
    """Return the weights of the tokens, 0 for uncounted tokens."""
    present = mask > 0
    a, h = masked_double(advantages, mask), masked_double(entropy, mask)
    if level == "sequence":
        tokens = present.sum(1, keepdim=True)
        a, h, present = a.sum(1, keepdim=True) / tokens.clamp(min=1), h.sum(1, keepdim=True), tokens > 0
    if entropy_mode == "normalized":
        h = _min_max(h, present, collectives)
    raw = ((a + alpha * h) / temperature).masked_fill(~present, -torch.inf)
    # The largest power is 1, so a sum below 1 means that no sequence has a token at that position.
    powers = (raw - collectives.max(raw.amax(0)).clamp(min=torch.finfo(raw.dtype).min)).exp()
    total, sequences = collectives.sum(torch.stack([powers.sum(0), double(present.sum(0))]))
    weights = powers / total.clamp(min=1)
    if scale == "mean_one":
        weights = weights * sequences
    return torch.where(mask > 0, weights, 0.0).float()


@dataclass(frozen=True)
class EntropyGuidedWeighting(Strategy):
    """Weight tokens by a softmax of advantage plus entropy over the batch."""

    name = "egsw"
    paper = "Vanlioglu 2025, Entropy-guided sequence weighting, Eq. 6-10"
    weighs_kl = True
    acts_on_parts = True

    alpha: Scheduled = 0.3  # 0.8 for an instruct model
    temperature: Scheduled = 1.0  # P; 1.8 for an instruct model
    level: Literal["token", "sequence"] = "token"
    entropy: Literal["normalized", "raw"] = "normalized"
    scale: Literal["mean_one", "softmax"] = "mean_one"

    def __post_init__(self) -> None:
        check_number(self, "alpha", at_least=0)
        check_number(self, "temperature", above=0)
        check_choice(self, "level", "token", "sequence")
        check_choice(self, "entropy", "normalized", "raw")
        check_choice(self, "scale", "mean_one", "softmax")

    def weights(self, batch: Batch) -> Float[Tensor, "batch time"]:
        return egsw_weights(
            batch.advantages,
            batch.entropy,
            batch.mask,
            alpha=at(self.alpha, batch.step),
            temperature=at(self.temperature, batch.step),
            level=self.level,
            entropy_mode=self.entropy,
            scale=self.scale,
            collectives=batch.collectives,
        )
