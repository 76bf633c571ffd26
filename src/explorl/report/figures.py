"""What all figures share: colours that the colour-blind can tell apart, and smoothing."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")  # Okabe and Ito's palette


def smoothed(values: Sequence[float], window: int) -> np.ndarray:
    """Mean of the last `window` values at each place (of fewer at the beginning)."""
    sums = np.cumsum(np.concatenate([[0.0], np.asarray(values, dtype=float)]))
    ends = np.arange(1, len(sums))
    starts = np.maximum(ends - window, 0)
    return np.asarray((sums[ends] - sums[starts]) / (ends - starts))
