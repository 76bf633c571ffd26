"""What all figures share: colours that the colour-blind can tell apart, and smoothing."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")  # Okabe and Ito's palette


def running_mean(values: Sequence[float | None], window: int) -> np.ndarray:
    """Mean of `window` values around each place, of fewer at both ends; what was not measured is left out."""
    data = np.array([np.nan if value is None else value for value in values], dtype=float)
    known = np.isfinite(data)
    sums = np.concatenate([[0.0], np.cumsum(np.where(known, data, 0.0))])
    counts = np.concatenate([[0], np.cumsum(known)])
    places = np.arange(len(data))
    reach = max(window, 1) // 2
    starts, ends = np.maximum(places - reach, 0), np.minimum(places + reach + 1, len(data))
    found = counts[ends] - counts[starts]
    return np.asarray(np.where(found > 0, (sums[ends] - sums[starts]) / np.maximum(found, 1), np.nan))
