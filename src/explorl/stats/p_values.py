"""Tests without a distribution, and corrections for many of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from explorl.stats.resample import CHUNK, paired_values, positive

EXACT_UP_TO = 16
"""Largest number of non-zero differences for which the permutation test tries all 2^n sign flips."""

Tested = TypeVar("Tested", str, tuple[str, str])
"""An arm, or an arm and a measure."""


def permutation_test(a: Any, b: Any, permutations: int = 10_000, seed: int = 0) -> float:
    """Return the two-sided p value of "a and b do not differ" by flipping the signs of a − b (Fisher 1935).

        p = share of sign vectors s with |Σ s_i d_i| ≥ |Σ d_i|

    With at most 16 non-zero differences all 2^n sign vectors are tried (zeros change no sum). Otherwise
    p = (1 + hits) / (1 + permutations) over random sign vectors, which is valid and never 0.
    """
    difference = paired_values(a, b)
    permutations = positive("permutations", permutations)
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


def holm(p_values: Mapping[Tested, float | None]) -> dict[Tested, float | None]:
    """Return p values corrected so that the probability of any false finding stays below the level (Holm 1979).

        p̃_(i) = max_{j ≤ i} min(1, (m − j + 1) · p_(j)),   p_(1) ≤ … ≤ p_(m)

    Missing p values (None) stay None and do not count.
    """
    ordered = sorted(((p, name) for name, p in p_values.items() if p is not None), key=lambda pair: pair[0])
    corrected: dict[Tested, float | None] = dict.fromkeys(p_values)
    highest = 0.0
    for rank, (p, name) in enumerate(ordered):
        highest = max(highest, min(1.0, (len(ordered) - rank) * p))
        corrected[name] = highest
    return corrected


def benjamini_hochberg(p_values: Sequence[float]) -> list[float]:
    """Return p values corrected so that at most the share `level` of those below a level are false findings.

        p̃_(i) = min_{j ≥ i} min(1, m · p_(j) / j),   p_(1) ≤ … ≤ p_(m)

    Benjamini and Hochberg 1995, for independent tests.
    """
    ranked = np.argsort(p_values, kind="stable")[::-1]
    ranks = np.arange(len(ranked), 0, -1)
    corrected = np.empty(len(ranked))
    corrected[ranked] = np.minimum.accumulate(np.minimum(1.0, len(ranked) * np.asarray(p_values)[ranked] / ranks))
    return corrected.tolist()
