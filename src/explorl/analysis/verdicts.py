"""What a study found, in words: no more than its intervals allow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

LEVEL = 0.05

Difference = Mapping[str, Any]
"""mean, low, high, p, p_corrected of an arm against the baseline."""


def points(value: float) -> str:
    """A share as signed percentage points: ``+4.1``; a zero has no sign."""
    text = f"{value * 100:+.1f}".replace("-", "−")
    return text[1:] if text[1:] == "0.0" else text


def found(difference: Difference) -> bool:
    """Whether the interval excludes 0 and the corrected p value is below 0.05."""
    low, high, p = difference.get("low"), difference.get("high"), difference.get("p_corrected")
    return low is not None and high is not None and not low <= 0 <= high and p is not None and p < LEVEL


def difference_in_words(
    label: str, difference: Difference, arms: int, seeds: int, comparisons: int | None = None
) -> str:
    """``+4.1 points pass@1 [+1.2, +7.0]``, or that no difference was seen, with the interval that says how large one
    could still be; where only the correction for many arms takes a finding back, the corrected p value is given.
    `comparisons` are those that it is over, where these are not the arms."""
    mean, low, high = difference["mean"], difference.get("low"), difference.get("high")
    if low is None or high is None:
        return f"{points(mean)} points {label} (no interval)"
    span = f"[{points(low)}, {points(high)}]"
    if seeds < 2:
        return f"{points(mean)} points {label} {span} (one seed: of the problems only)"
    if low <= 0 <= high:
        return f"{label}: no difference seen {span}"
    text = f"{points(mean)} points {label} {span}"
    if not found(difference):
        p = difference.get("p_corrected")
        against = "" if arms == 1 else f" over {arms} arms"
        against = against if comparisons is None else f" over {comparisons} comparisons"
        text += " (no spread to judge by)" if p is None else f" (p = {p:.2f} after correction{against})"
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
    """An arm against the baseline, on the main measures; `arms` were compared, each with so many seeds."""
    if differences is None:
        text = "the baseline"
    else:
        told = [
            difference_in_words(label, differences[label], arms, seeds, comparisons)
            for label in labels
            if label in differences
        ]
        text = ", ".join(told) or "nothing to compare yet"
    return f"{text}; {failed} failed" if failed else text


def study_verdict(
    differences: Mapping[str, Difference], label: str, baseline: str, effect: float | None, seeds: int
) -> str:
    """One sentence for the whole study."""
    if not differences:
        return f"There is no arm to compare with {baseline} yet."
    better = [name for name, one in differences.items() if found(one) and one["mean"] > 0]
    worse = [name for name, one in differences.items() if found(one) and one["mean"] < 0]
    parts = []
    for names, word in ((better, "above"), (worse, "below")):
        if names:
            told = ", ".join(f"{name} ({points(differences[name]['mean'])} points)" for name in names)
            parts.append(f"{word} {baseline} in {label}: {told}")
    if not parts:
        parts.append(f"none is shown to differ from {baseline} in {label}")
    text = f"Of {len(differences)} arms, {'; '.join(parts)}"
    if len(differences) == 1:
        (name, one), *_ = differences.items()
        where = "above" if better else "below"
        text = f"{name} is not shown to differ from {baseline} in {label}"
        if found(one):
            text = f"{name} is {where} {baseline} in {label} ({points(one['mean'])} points)"
    if seeds < 2:
        return f"{text}; with one seed, another training could say otherwise."
    limit = "" if effect is None else f"; with {seeds} seeds, differences below {effect * 100:.1f} points may be missed"
    return f"{text}{limit}."
