"""From logits to a token and its statistics, in the order of the data flow.

`params` (the caller's `SamplingParams`), `warpers` (which tokens may be sampled), based on `ranking` (where a ranked
distribution is cut), `rng` (the random number), `sample` (the whole step in torch) and `kernel` (the same in Triton).
"""

from explorl.rollout.sampling.params import Active, SamplingParams
from explorl.rollout.sampling.warpers import (
    bottom_p_cut,
    warp_bottom_p,
    warp_min_p,
    warp_repetition,
    warp_temperature,
    warp_top_k,
    warp_top_p,
)

__all__ = [
    "Active",
    "SamplingParams",
    "bottom_p_cut",
    "warp_bottom_p",
    "warp_min_p",
    "warp_repetition",
    "warp_temperature",
    "warp_top_k",
    "warp_top_p",
]
