"""From logits to a token, and what is recorded of it, in the order of the data:

`params` (what a caller asks for: `SamplingParams`), `constraints` and `tables` (what of it is looked up per request),
`warpers` (which tokens may be drawn) on `ranking` (where a ranked distribution is cut), `rng` (the number that
decides), `draw` (the whole step in torch) and `kernel` (the same in Triton).
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
