"""Where a rollout may branch, and with what probability.

    P = clamp(base + weight · (H_now − H_init), 0, 1)

ARPO (Dong et al. 2025, arXiv 2507.19849; Deng et al. 2025 §4.3): a rollout that has become less sure of itself than it
was at its beginning is worth going on with more than once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from explorl.core.plugins import unknown

MARKERS: Mapping[str, str] = {"output": "", "newline": "\n", "step": "\n\n", "wait": "Wait"}
"""Places by name, and the text behind which each lies; ``output`` lies behind what a tool said."""
_TEXT = "text:"


def branch_probability(now: float, initial: float, *, base: float, weight: float) -> float:
    """clamp(base + weight · (now − initial), 0, 1).

    now: mean H / ln V over the tokens behind the place. initial: the same over the rollout's first tokens.
    """
    return min(1.0, max(0.0, base + weight * (now - initial)))


def normalised_entropy(entropy: float, vocabulary: int) -> float:
    """H / ln V, from 0 to 1; 0 where there is one token only."""
    return entropy / math.log(vocabulary) if vocabulary > 1 else 0.0


def marker_text(marker: str) -> str:
    """The text behind which a marker's places lie; empty for tool outputs. ``text:Hmm`` is behind "Hmm".

    Raises `ValueError` for a marker that nobody knows.
    """
    if isinstance(marker, str) and marker in MARKERS:
        return MARKERS[marker]
    if isinstance(marker, str) and marker.startswith(_TEXT) and marker != _TEXT:
        return marker.removeprefix(_TEXT)
    raise ValueError(f"{unknown('marker', marker, MARKERS)} (a text of your own is written 'text:Hmm')")
