"""Shared by all figures: a palette safe for colour-blind readers, and the running mean."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")  # Okabe and Ito's palette


def running_mean(values: Sequence[float | None], window: int) -> np.ndarray:
    """Return the mean of `window` values around each position, of fewer at both ends; missing values are skipped."""
    data = np.array([np.nan if value is None else value for value in values], dtype=float)
    finite = np.isfinite(data)
    sums = np.concatenate([[0.0], np.cumsum(np.where(finite, data, 0.0))])
    counts = np.concatenate([[0], np.cumsum(finite)])
    positions = np.arange(len(data))
    reach = max(window, 1) // 2
    starts, ends = np.maximum(positions - reach, 0), np.minimum(positions + reach + 1, len(data))
    count = counts[ends] - counts[starts]
    return np.asarray(np.where(count > 0, (sums[ends] - sums[starts]) / np.maximum(count, 1), np.nan))
