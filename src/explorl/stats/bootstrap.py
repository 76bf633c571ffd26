"""Uncertainty over problems: bootstrap intervals, paired differences, and a paired permutation test."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from explorl.metrics._arrays import integers, to_numpy

CHUNK = 2**22
"""Resampled values in memory at a time (32 MiB)."""
EXACT_UP_TO = 16
"""Largest number of non-zero differences for which the permutation test tries all 2^n sign flips."""


@dataclass(frozen=True)
class Interval:
    """A mean with its confidence interval. ``f"{interval:.1%}"`` formats each of the three numbers."""

    mean: float
    low: float
    high: float
    confidence: float = 0.95

    def __format__(self, spec: str) -> str:
        spec = spec or ".3f"
        return f"{self.mean:{spec}} [{self.low:{spec}}, {self.high:{spec}}]"

    def __str__(self) -> str:
        return format(self)


def bootstrap_mean(values: Any, confidence: float = 0.95, resamples: int = 10_000, seed: int = 0) -> Interval:
    """Return the mean over problems with its percentile bootstrap interval, resampling problems with replacement.

        low, high = quantiles (1 ∓ confidence)/2 of mean(values[i_1 … i_n]),  i uniform

    Efron 1979. One value per problem, such as ``pass_at_k(n, c, k)``. The same seed resamples the same problems for
    every k and model, so curves share their resamples. The interval of a single problem is its own value; with fewer
    than about 20 problems a percentile interval is somewhat too narrow.
    """
    data = _values("values", values)
    if not 0 < confidence < 1:
        raise ValueError(f"confidence must lie between 0 and 1, such as 0.95; got {confidence}")
    resamples = _positive("resamples", resamples)
    rng = np.random.default_rng(seed)
    means = np.empty(resamples)
    step = max(1, CHUNK // len(data))
    for start in range(0, resamples, step):
        part = means[start : start + step]
        part[:] = data[rng.integers(0, len(data), (len(part), len(data)))].mean(axis=1)
    low, high = np.quantile(means, [(1 - confidence) / 2, (1 + confidence) / 2])
    return Interval(float(data.mean()), float(low), float(high), confidence)


def paired_difference(a: Any, b: Any, confidence: float = 0.95, resamples: int = 10_000, seed: int = 0) -> Interval:
    """Return the mean of a − b over the problems that both attempted, with its interval.

    This is `bootstrap_mean` of a − b: every resample has the same problems for both, so the difficulty that a problem
    has for both cancels.
    """
    return bootstrap_mean(_difference(a, b), confidence, resamples, seed)


def permutation_test(a: Any, b: Any, permutations: int = 10_000, seed: int = 0) -> float:
    """Return the two-sided p value of "a and b do not differ" by flipping the signs of a − b (Fisher 1935).

        p = share of sign vectors s with |Σ s_i d_i| ≥ |Σ d_i|

    With at most 16 non-zero differences all 2^n sign vectors are tried (zeros change no sum). Otherwise
    p = (1 + hits) / (1 + permutations) over random sign vectors, which is valid and never 0.
    """
    difference = _difference(a, b)
    permutations = _positive("permutations", permutations)
    difference = difference[difference != 0]
    n = len(difference)
    # sums that are equal up to rounding count as hits
    threshold = abs(difference.sum()) - 1e-12 * np.abs(difference).sum()
    if n <= EXACT_UP_TO:
        sums = np.zeros(1)
        for d in difference:
            sums = np.concatenate([sums + d, sums - d])
        return float(np.mean(np.abs(sums) >= threshold))
    rng = np.random.default_rng(seed)
    hits, done, step = 0, 0, max(1, CHUNK // n)
    while done < permutations:
        rows = min(step, permutations - done)
        flip = rng.integers(0, 2, (rows, n), dtype=np.int8)
        sums = difference.sum() - 2 * (flip @ difference)
        hits += int(np.count_nonzero(np.abs(sums) >= threshold))
        done += rows
    return (1 + hits) / (1 + permutations)


def _values(name: str, values: Any) -> NDArray[np.float64]:
    data = to_numpy(values).astype(np.float64)
    if data.ndim != 1 or not len(data):
        raise ValueError(f"{name} must have one value per problem and at least one problem, got shape {data.shape}")
    if not np.isfinite(data).all():
        bad = int(np.flatnonzero(~np.isfinite(data))[0])
        raise ValueError(f"{name} must be finite, problem {bad} has {data[bad]}")
    return data


def _difference(a: Any, b: Any) -> NDArray[np.float64]:
    first, second = _values("a", a), _values("b", b)
    if len(first) != len(second):
        raise ValueError(
            f"a and b must have one value for each of the same problems, got {len(first)} and {len(second)}"
        )
    return first - second


def _positive(name: str, value: int) -> int:
    whole = int(integers(name, value))
    if whole < 1:
        raise ValueError(f"{name} must be at least 1, such as 10,000; got {value}")
    return whole
