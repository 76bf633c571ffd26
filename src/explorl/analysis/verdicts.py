"""Describe the findings of a study in words, claiming no more than its intervals allow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

LEVEL = 0.05

Difference = Mapping[str, Any]
"""mean, low, high, p and p_corrected of an arm minus the baseline."""


def points(value: float) -> str:
    """Return a share as signed percentage points: ``+4.1``; zero has no sign."""
    text = f"{value * 100:+.1f}".replace("-", "−")
    return text[1:] if text[1:] == "0.0" else text


def is_significant(difference: Difference) -> bool:
    """Check that the interval excludes 0 and the corrected p value is below 0.05."""
    low, high, p = difference.get("low"), difference.get("high"), difference.get("p_corrected")
    return low is not None and high is not None and not low <= 0 <= high and p is not None and p < LEVEL


def difference_in_words(
    label: str, difference: Difference, arms: int, seeds: int, comparisons: int | None = None
) -> str:
    """Describe a difference: ``+4.1 points pass@1 [+1.2, +7.0]``, or that none was seen, with its interval.

    If only the correction for many arms removes significance, the corrected p value is included. `comparisons` is the
    number of comparisons that are corrected for, if it is not the number of arms.
    """
    mean, low, high = difference["mean"], difference.get("low"), difference.get("high")
    if low is None or high is None:
        return f"{points(mean)} points {label} (no interval)"
    span = f"[{points(low)}, {points(high)}]"
    if seeds < 2:
        return f"{points(mean)} points {label} {span} (one seed: over problems only)"
    if low <= 0 <= high:
        return f"{label}: no difference seen {span}"
    text = f"{points(mean)} points {label} {span}"
    if not is_significant(difference):
        p = difference.get("p_corrected")
        scope = "" if arms == 1 else f" over {arms} arms"
        scope = scope if comparisons is None else f" over {comparisons} comparisons"
        text += " (no spread to judge by)" if p is None else f" (p = {p:.2f} after correction{scope})"
    return text


def arm_verdict(
    differences: Mapping[str, Difference] | None,
    labels: Sequence[str],
    *,
    arms: int,
    seeds: int,
    failed: int,
    comparisons: int | None = None,
) -> str:
    """Describe an arm relative to the baseline on the main measures; `arms` arms were compared, with `seeds` seeds."""
    if differences is None:
        text = "the baseline"
    else:
        descriptions = [
            difference_in_words(label, differences[label], arms, seeds, comparisons)
            for label in labels
            if label in differences
        ]
        text = ", ".join(descriptions) or "nothing to compare yet"
    return f"{text}; {failed} failed" if failed else text


def study_verdict(
    differences: Mapping[str, Mapping[str, Difference]],
    labels: Sequence[str],
    baseline: str,
    effects: Mapping[str, float],
    seeds: int,
) -> str:
    """Return one sentence for the whole study: which arms differ from the baseline in each of these measures.

    `effects` has the smallest detectable difference of each measure.
    """
    compared = {name: by_label for name, by_label in differences.items() if any(label in by_label for label in labels)}
    if not compared:
        return f"There is no arm to compare with {baseline} yet."
    measured = [label for label in labels if any(label in by_label for by_label in compared.values())]
    if len(compared) == 1:
        (name, by_label), *_ = compared.items()
        text = f"{name} is {_describe_arm(by_label[measured[0]], measured[0], baseline)}"
        for before, label in pairwise(measured):
            if is_significant(by_label[label]):
                text += f", and {_describe_arm(by_label[label], label, baseline)}"
            else:
                text += (
                    f", and not shown to differ in {label}" if is_significant(by_label[before]) else f", nor in {label}"
                )
    else:
        parts = [part for label in measured for part in _describe_arms(compared, label, baseline)]
        text = f"Of {len(compared)} arms, {'; '.join(parts)}"
    if seeds < 2:
        return f"{text}; with one seed, another training run could give a different result."
    limits = [f"{effects[label] * 100:.1f} points of {label}" for label in measured if label in effects]
    limit = f"; with {seeds} seeds, differences below {' and '.join(limits)} may be missed" if limits else ""
    return f"{text}{limit}."


def _describe_arm(difference: Difference, label: str, baseline: str) -> str:
    """Describe a single arm: above or below the baseline, or not shown to differ."""
    if not is_significant(difference):
        return f"not shown to differ from {baseline} in {label}"
    word = "above" if difference["mean"] > 0 else "below"
    return f"{word} {baseline} in {label} ({points(difference['mean'])} points)"


def _describe_arms(compared: Mapping[str, Mapping[str, Difference]], label: str, baseline: str) -> list[str]:
    """Describe which arms are above and below the baseline in a measure."""
    differing = {
        name: by_label[label]["mean"]
        for name, by_label in compared.items()
        if label in by_label and is_significant(by_label[label])
    }
    parts = []
    for word, sign in (("above", 1), ("below", -1)):
        if arms := [f"{name} ({points(mean)} points)" for name, mean in differing.items() if mean * sign > 0]:
            parts.append(f"{word} {baseline} in {label}: {', '.join(arms)}")
    return parts or [f"none is shown to differ from {baseline} in {label}"]
