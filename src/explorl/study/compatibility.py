"""Whether the runs of two studies can stand in one table, and whether two runs are the same: in what they differ."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from explorl.core.config import with_defaults
from explorl.core.merge import flatten

_GONE = object()


def study_difference(old: Mapping[str, Any], new: Mapping[str, Any]) -> str | None:
    """What makes the runs of two studies incomparable, in words; None where nothing but their arms can.

    Other seeds do no harm, but in a study with two looks they stay as they were planned: more of them after a look
    would be a third one.
    """
    for key in ("name", "profile", "baseline", "budget", "solve_rate_samples", "sequential"):
        if what := difference(key, old.get(key), new.get(key)):
            return what
    if new.get("sequential") is not None and (what := difference("seeds", old["seeds"], new["seeds"])):
        return f"it has two looks, whose seeds are fixed: {what}"
    for key in ("base", "warm_start"):
        if what := difference(key, old[key] and with_defaults(old[key]), new[key] and with_defaults(new[key])):
            return what
    return None


def arm_difference(name: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> str | None:
    """In what an arm of the old study differs from that of the new one, in words; None where it does not."""
    before, after = (next((_whole(arm) for arm in study["arms"] if arm["name"] == name), None) for study in (old, new))
    return f"it has the arm {name!r}" if after is None else difference(f"arm {name!r}", before, after)


def difference(name: str, old: Any, new: Any) -> str | None:
    """The first thing in which two values differ; None where they are equal."""
    if old == new:
        return None
    if isinstance(old, dict) and isinstance(new, dict):
        before, after = flatten(old), flatten(new)
        key = next(key for key in {**before, **after} if before.get(key, _GONE) != after.get(key, _GONE))
        return f"{name}: {key} is {before.get(key)!r} there and {after.get(key)!r} here"
    return f"{name} is {old!r} there and {new!r} here"


def run_difference(old: Mapping[str, Any], new: Mapping[str, Any]) -> str | None:
    """The first thing in which two runs' results differ, in words; None where they are the same run."""
    before, after = (
        {"config": with_defaults(run["config"]), "metrics": run["metrics"], "evaluations": run["evaluations"]}
        for run in (old, new)
    )
    return _apart(before, after)


def _apart(old: Any, new: Any, name: str = "") -> str | None:
    if old == new:
        return None
    inner = f"{name}." if name else ""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in {**old, **new}:
            if (key in old) != (key in new):
                return f"{inner}{key} is {'there and not here' if key in old else 'here and not there'}"
            if what := _apart(old[key], new[key], f"{inner}{key}"):
                return what
    if isinstance(old, list) and isinstance(new, list):
        if len(old) != len(new):
            return f"{name} has {len(old)} entries there and {len(new)} here"
        return next(
            _apart(*pair, f"{inner}{i}") for i, pair in enumerate(zip(old, new, strict=True)) if pair[0] != pair[1]
        )
    return f"{name} is {old!r} there and {new!r} here"


def _whole(arm: Mapping[str, Any]) -> dict[str, Any]:
    """How an arm is trained; one from before there were kinds is of kind grpo."""
    return {"kind": arm.get("kind", "grpo"), **with_defaults(arm["config"])}
