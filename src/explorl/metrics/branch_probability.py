"""Where a rollout may branch, and with what probability.

    P = clamp(base + weight · (H_now − H_init), 0, 1)

ARPO (Dong et al. 2025, arXiv 2507.19849; Deng et al. 2025 §4.3): where the policy has become less certain than at the
beginning of a rollout, it pays to continue the rollout more than once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from explorl.core.plugins import unknown

MARKERS: Mapping[str, str] = {"output": "", "newline": "\n", "step": "\n\n", "wait": "Wait"}
"""Positions by name, and the text after which each lies; ``output`` is after a tool's output."""
_TEXT = "text:"


def branch_probability(now: float, initial: float, *, base: float, weight: float) -> float:
    """Return clamp(base + weight · (now − initial), 0, 1).

    now: mean H / ln V over the tokens after the marker. initial: the same over the rollout's first tokens.
    """
    return min(1.0, max(0.0, base + weight * (now - initial)))


def normalised_entropy(entropy: float, vocabulary: int) -> float:
    """Return H / ln V, from 0 to 1; 0 for a vocabulary of one token."""
    return entropy / math.log(vocabulary) if vocabulary > 1 else 0.0


def marker_text(marker: str) -> str:
    """Return the text that a marker stands for; empty for tool outputs. ``text:Hmm`` stands for "Hmm".

    Raise `ValueError` for an unknown marker.
    """
    if isinstance(marker, str) and marker in MARKERS:
        return MARKERS[marker]
    if isinstance(marker, str) and marker.startswith(_TEXT) and marker != _TEXT:
        return marker.removeprefix(_TEXT)
    raise ValueError(f"{unknown('marker', marker, MARKERS)} (write your own text as 'text:Hmm')")
