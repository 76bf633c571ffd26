"""A comparison of models as what the page is made of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from explorl.analysis.ability_boundary import Boundary
from explorl.analysis.study_answers import error_breakdown
from explorl.analysis.verdicts import arm_verdict
from explorl.stats import Interval
from explorl.stats.arm_differences import NO_SPREAD
from explorl.stats.crossed import holm

UNITS: Mapping[str, tuple[str, str, bool | None]] = {
    "distinct_answers": ("distinct answers per problem", "", None),
    "unsolvable": ("unsolved problems", "", False),
    "entropy": ("entropy", "nats", None),
    "branching": ("branching", "", None),
    "mean_tokens": ("length", "tokens", None),
    "truncated": ("truncated", "%", False),
}
"""Measures beside pass@k and maj@k: label, unit, and whether more is better."""


def comparison_results(
    found: Boundary, identity: Mapping[str, Any], folders: Mapping[str, str], samples: Mapping[str, Sequence[Path]]
) -> dict[str, Any]:
    """What the page of a comparison shows; the first model is what the others are compared with.

    ``samples`` are the files with each model's completions; none leaves the errors out.
    """
    first, ks = found.names[0], found.ks
    keys = [f"pass@{k}" for k in dict.fromkeys((ks[0], ks[-1]))] + ([f"maj@{ks[-1]}"] if ks[-1] > 1 else [])
    measures = [{"key": key, "label": key, "unit": "%", "higher_is_better": True} for key in keys]
    measures += [
        {"key": key, "label": label, "unit": unit, "higher_is_better": better}
        for key, (label, unit, better) in UNITS.items()
        if any(scores.get(key) for scores in found.scores.values())
    ]
    differences = _differences(found, first)
    arms = [
        {
            "name": name,
            "measures": {
                key: _floored(key, value, len(found.problems))
                for key, value in found.scores[name].items()
                if value is not None
            },
            "differences": None if name == first else differences.get(name, {}),
            "verdict": arm_verdict(
                None if name == first else differences.get(name, {}),
                keys[:2],
                arms=len(found.names) - 1,
                seeds=2,
                failed=0,
            ),
            "pass_at_k": {
                "k": ks,
                **{end: [getattr(found.scores[name][f"pass@{k}"], end) for k in ks] for end in ("mean", "low", "high")},
                "band": "95 % interval over problems",
            },
            "errors": error_breakdown(samples.get(name, ())),
        }
        for name in found.names
    ]
    return {
        "kind": "comparison",
        "title": f"{identity['task']}: {' · '.join(found.names)}",
        "verdict": " ".join(f"{arm['name']} against {first}: {arm['verdict']}." for arm in arms[1:]),
        "task": identity["task"],
        "baseline": first,
        "problems": len(found.problems),
        "samples": found.samples,
        "measures": measures,
        "arms": arms,
        "overlaps": [{"arms": sorted(some, key=found.names.index), "count": n} for some, n in found.overlaps().items()],
        "provenance": {"protocol": identity["protocol"], "sampling": identity["sampling"], "folders": dict(folders)},
    }


def _floored(key: str, value: Interval, problems: int) -> dict[str, Any]:
    """A score; a share that is the same for all problems could still differ for 3 of so many (the rule of three)."""
    ends = {"mean": value.mean, "low": value.low, "high": value.high}
    share = key.startswith(("pass@", "maj@", "avg@")) or UNITS.get(key, ("", "", None))[1] == "%"
    if value.low < value.high or not share or problems < 2:
        return ends
    reach = 3 / problems
    return ends | {"low": max(0.0, value.mean - reach), "high": min(1.0, value.mean + reach), "note": NO_SPREAD}


def _differences(found: Boundary, first: str) -> dict[str, dict[str, dict[str, Any]]]:
    """By model and measure, to the first model; corrected over the models, measure by measure."""
    result: dict[str, dict[str, dict[str, Any]]] = {name: {} for name in found.names if name != first}
    against = [one for one in found.differences if one.baseline == first]
    for key in dict.fromkeys(one.measure for one in against):
        mine = {one.model: one for one in against if one.measure == key}
        corrected = holm({name: one.p for name, one in mine.items()})
        for name, one in mine.items():
            ends = {"mean": one.difference.mean, "low": one.difference.low, "high": one.difference.high}
            result[name][key] = {**ends, "p": one.p, "p_corrected": corrected[name]}
    return result
