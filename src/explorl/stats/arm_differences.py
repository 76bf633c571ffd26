"""Differences between a study's arms and its baseline, paired by seed and by problem, with corrected p values."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from explorl.stats.crossed import Estimate, crossed_mean, seeds_mean
from explorl.stats.interval import CONFIDENCE, Interval
from explorl.stats.p_values import holm

NO_SPREAD = "no spread"
"""Note on an interval whose measurements do not vary."""

Values = dict[int, Any]
"""By seed: a number, or one number per problem."""
Paired = dict[str, dict[str, Values]]
"""By measure and arm: the arm minus the baseline, for the seeds that both have."""
Differences = dict[str, dict[str, dict[str, Any]]]
"""By arm and measure: mean, low, high, p, p_corrected."""


def estimate_mean(values: Values) -> Estimate | None:
    """Return the mean over seeds, and over problems if there is one number per problem; None without values."""
    if not values:
        return None
    stacked = np.stack([np.asarray(value, dtype=np.float64) for value in values.values()])
    return crossed_mean(stacked) if stacked.ndim == 2 else seeds_mean(stacked)


def mean_interval(values: Values, level: float = 1 - CONFIDENCE) -> dict[str, Any]:
    """Return the mean and an interval that misses the true mean with probability `level`.

    An interval of no width would claim certainty. If no problem differs from another, it is widened by the rule of
    three: 3 of that many problems could still differ. An interval whose measurements agree has the note `NO_SPREAD`.
    """
    estimate = estimate_mean(values)
    if estimate is None:
        return {"mean": None, "low": None, "high": None}
    mean, (low, high) = estimate.mean, estimate.ends(level)
    if low is None or high is None or high - low > 1e-12:
        return {"mean": mean, "low": low, "high": high}
    problems = np.size(next(iter(values.values())))
    reach = 3 / problems if problems > 1 else 0.0
    return {"mean": mean, "low": mean - reach, "high": mean + reach, "note": NO_SPREAD}


def problem_interval(values: Any, *, lowest: float = -math.inf, highest: float = math.inf) -> Interval:
    """Return the mean over problems with its 95 % interval, limited to the range of the measure.

    It is the interval that studies and pages have for one seed. A single problem tells nothing about others: its
    interval is the whole range or, without one, its value.
    """
    interval = mean_interval({0: np.asarray(values, dtype=np.float64)})
    mean, low, high = interval["mean"], interval["low"], interval["high"]
    if low is None or high is None:
        low, high = (lowest, highest) if math.isfinite(lowest) and math.isfinite(highest) else (mean, mean)
    return Interval(mean, max(low, lowest), min(high, highest))


def paired_differences(measured: Mapping[str, Mapping[str, Values]], baseline: str) -> Paired:
    """Return each arm minus the baseline, for the seeds that both have."""
    paired: Paired = {}
    for name, measures in measured.items():
        for key, values in measures.items() if name != baseline else ():
            reference = measured[baseline].get(key, {})
            paired.setdefault(key, {})[name] = {
                seed: value - reference[seed]
                for seed, value in values.items()
                if seed in reference and np.shape(value) == np.shape(reference[seed])
            }
    return paired


def corrected_differences(paired: Paired, arms: Iterable[str]) -> Differences:
    """Return intervals and p values of these arms' differences, each measure corrected for the number of arms."""
    result: Differences = {name: {} for name in arms}
    for key, by_arm in paired.items():
        estimates = {
            name: estimate for name, values in by_arm.items() if (estimate := estimate_mean(values)) is not None
        }
        # one seed gives an interval over problems, but does not tell whether another training run would agree
        p_values = {name: estimate.p if len(by_arm[name]) > 1 else None for name, estimate in estimates.items()}
        p_corrected = holm(p_values)
        for name in estimates:
            result[name][key] = {
                **mean_interval(by_arm[name]), "p": p_values[name], "p_corrected": p_corrected[name],
            }  # fmt: skip
    return result


def pooled_deviation(by_arm: Mapping[str, Values]) -> float | None:
    """Return the standard deviation between seeds of the differences, pooled over the arms; None if it is 0."""
    squares, freedom = 0.0, 0
    for values in by_arm.values():
        if len(values) > 1:
            means = np.array([float(np.mean(value)) for value in values.values()])
            squares += float(((means - means.mean()) ** 2).sum())
            freedom += len(values) - 1
    return float(np.sqrt(squares / freedom)) if squares > 0 else None
