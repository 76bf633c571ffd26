"""Compare studies and runs: the first difference that makes results incomparable."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from explorl.core.config import with_defaults
from explorl.core.merge import flatten

_MISSING = object()


def study_difference(old: Mapping[str, Any], new: Mapping[str, Any]) -> str | None:
    """Describe the first difference that makes all runs of two studies incomparable, or return None.

    Seeds may differ, except in a study with an interim look, where more seeds would amount to another look.
    """
    for key in ("name", "profile", "baseline", "budget", "solve_rate_samples", "sequential"):
        if change := difference(key, old.get(key), new.get(key)):
            return change
    if new.get("sequential") is not None and (change := difference("seeds", old["seeds"], new["seeds"])):
        return f"the seeds of a study with an interim look are fixed: {change}"
    for key in ("base", "warm_start"):
        if change := difference(key, old[key] and with_defaults(old[key]), new[key] and with_defaults(new[key])):
            return change
    return None


def arm_difference(name: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> str | None:
    """Describe how an arm differs between two studies, or return None."""
    before, after = (
        next((_training(arm) for arm in study["arms"] if arm["name"] == name), None) for study in (old, new)
    )
    return f"it has the arm {name!r}" if after is None else difference(f"arm {name!r}", before, after)


def difference(name: str, old: Any, new: Any) -> str | None:
    """Describe the first difference of two values, or return None."""
    if old == new:
        return None
    if isinstance(old, dict) and isinstance(new, dict):
        before, after = flatten(old), flatten(new)
        key = next(key for key in {**before, **after} if before.get(key, _MISSING) != after.get(key, _MISSING))
        return f"{name}: {key} is {before.get(key)!r} there and {after.get(key)!r} here"
    return f"{name} is {old!r} there and {new!r} here"


def run_difference(old: Mapping[str, Any], new: Mapping[str, Any]) -> str | None:
    """Describe the first difference of two runs' results, or return None."""
    before, after = (
        {"config": with_defaults(run["config"]), "metrics": run["metrics"], "evaluations": run["evaluations"]}
        for run in (old, new)
    )
    return _first_difference(before, after)


def _first_difference(old: Any, new: Any, name: str = "") -> str | None:
    if old == new:
        return None
    inner = f"{name}." if name else ""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in {**old, **new}:
            if (key in old) != (key in new):
                return f"{inner}{key} is {'there and not here' if key in old else 'here and not there'}"
            if change := _first_difference(old[key], new[key], f"{inner}{key}"):
                return change
    if isinstance(old, list) and isinstance(new, list):
        if len(old) != len(new):
            return f"{name} has {len(old)} entries there and {len(new)} here"
        return next(
            _first_difference(*pair, f"{inner}{i}")
            for i, pair in enumerate(zip(old, new, strict=True))
            if pair[0] != pair[1]
        )
    return f"{name} is {old!r} there and {new!r} here"


def _training(arm: Mapping[str, Any]) -> dict[str, Any]:
    """Return an arm's kind and configuration; older records without a kind are grpo."""
    return {"kind": arm.get("kind", "grpo"), **with_defaults(arm["config"])}
