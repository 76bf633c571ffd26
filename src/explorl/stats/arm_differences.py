"""A study's arms minus its baseline, paired by seed and by problem, with intervals and corrected p values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from explorl.stats.crossed import CONFIDENCE, Estimate, crossed_mean, holm, seeds_mean

NO_SPREAD = "no spread"
"""The word beside an interval that would have no width."""

Values = dict[int, Any]
"""By seed: a number, or one number per problem."""
Paired = dict[str, dict[str, Values]]
"""By measure and arm: the arm minus the baseline, for the seeds that both have."""
Differences = dict[str, dict[str, dict[str, Any]]]
"""By arm and measure: mean, low, high, p, p_corrected."""


def estimate_mean(values: Values) -> Estimate | None:
    """Mean over seeds, and over problems where there is a number for each."""
    if not values:
        return None
    stacked = np.stack([np.asarray(value, dtype=np.float64) for value in values.values()])
    return crossed_mean(stacked) if stacked.ndim == 2 else seeds_mean(stacked)


def mean_interval(values: Values, level: float = 1 - CONFIDENCE) -> dict[str, Any]:
    """Mean and interval, which misses with a chance of `level`. One without any width would claim certainty: where no
    problem differs from another, 3 in so many problems could still do so (the rule of three), and where seeds agree
    there is a word for it."""
    estimate = estimate_mean(values)
    if estimate is None:
        return {"mean": None, "low": None, "high": None}
    mean, (low, high) = estimate.mean, estimate.ends(level)
    if low is None or high is None or high - low > 1e-12:
        return {"mean": mean, "low": low, "high": high}
    problems = np.size(next(iter(values.values())))
    reach = 3 / problems if problems > 1 else 0.0
    return {"mean": mean, "low": mean - reach, "high": mean + reach, "note": NO_SPREAD}


def paired_differences(measured: Mapping[str, Mapping[str, Values]], baseline: str) -> Paired:
    """Each arm minus the baseline, over the seeds that both have."""
    found: Paired = {}
    for name, own in measured.items():
        for key, values in own.items() if name != baseline else ():
            other = measured[baseline].get(key, {})
            found.setdefault(key, {})[name] = {
                seed: value - other[seed]
                for seed, value in values.items()
                if seed in other and np.shape(value) == np.shape(other[seed])
            }
    return found


def corrected_differences(paired: Paired, arms: Iterable[str]) -> Differences:
    """Intervals and p values of these arms' differences, corrected over the arms, measure by measure."""
    result: Differences = {name: {} for name in arms}
    for key, by_arm in paired.items():
        estimates = {
            name: estimate for name, values in by_arm.items() if (estimate := estimate_mean(values)) is not None
        }
        # of one seed the problems' interval is known, but not whether another training would agree
        p_values = {name: one.p if len(by_arm[name]) > 1 else None for name, one in estimates.items()}
        after = holm(p_values)
        for name in estimates:
            result[name][key] = {**mean_interval(by_arm[name]), "p": p_values[name], "p_corrected": after[name]}
    return result


def pooled_deviation(by_arm: Mapping[str, Values]) -> float | None:
    """Standard deviation between seeds of a difference to the baseline, pooled over the arms; None if none is seen."""
    squares, freedom = 0.0, 0
    for values in by_arm.values():
        if len(values) > 1:
            means = np.array([float(np.mean(value)) for value in values.values()])
            squares += float(((means - means.mean()) ** 2).sum())
            freedom += len(values) - 1
    return float(np.sqrt(squares / freedom)) if squares > 0 else None
