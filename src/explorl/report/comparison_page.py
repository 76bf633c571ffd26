"""The results of a comparison of models, in the form that the page takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from explorl.analysis.ability_boundary import Boundary
from explorl.analysis.study_answers import error_breakdown
from explorl.analysis.verdicts import arm_verdict
from explorl.stats import Interval
from explorl.stats.p_values import holm

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
    boundary: Boundary, identity: Mapping[str, Any], folders: Mapping[str, str], samples: Mapping[str, Sequence[Path]]
) -> dict[str, Any]:
    """Return the results of a comparison for its page; the first model is the baseline.

    ``samples`` are the files with each model's completions; without them, the errors are left out.
    """
    baseline, ks = boundary.names[0], boundary.ks
    keys = [f"pass@{k}" for k in dict.fromkeys((ks[0], ks[-1]))] + ([f"maj@{ks[-1]}"] if ks[-1] > 1 else [])
    measures = [{"key": key, "label": key, "unit": "%", "higher_is_better": True} for key in keys]
    measures += [
        {"key": key, "label": label, "unit": unit, "higher_is_better": better}
        for key, (label, unit, better) in UNITS.items()
        if any(scores.get(key) for scores in boundary.scores.values())
    ]
    differences = _differences(boundary, baseline)
    arms = [
        {
            "name": name,
            "measures": {key: _ends(value) for key, value in scores.items() if value is not None},
            "differences": None if name == baseline else differences.get(name, {}),
            "verdict": arm_verdict(
                None if name == baseline else differences.get(name, {}),
                keys[:2],
                arms=len(boundary.names) - 1,
                seeds=2,
                failed=0,
            ),
            "pass_at_k": {
                "k": ks,
                **{end: [getattr(scores[f"pass@{k}"], end) for k in ks] for end in ("mean", "low", "high")},
                "band": "95 % interval over problems",
            },
            "errors": error_breakdown(samples.get(name, ())),
        }
        for name, scores in boundary.scores.items()
    ]
    return {
        "kind": "comparison",
        "title": f"{identity['task']}: {' · '.join(boundary.names)}",
        "verdict": " ".join(f"{arm['name']} against {baseline}: {arm['verdict']}." for arm in arms[1:]),
        "task": identity["task"],
        "baseline": baseline,
        "problems": len(boundary.problems),
        "samples": boundary.samples,
        "measures": measures,
        "arms": arms,
        "overlaps": [
            {"arms": sorted(names, key=boundary.names.index), "count": count}
            for names, count in boundary.overlaps().items()
        ],
        "provenance": {"protocol": identity["protocol"], "sampling": identity["sampling"], "folders": dict(folders)},
    }


def _ends(interval: Interval) -> dict[str, float]:
    return {"mean": interval.mean, "low": interval.low, "high": interval.high}


def _differences(boundary: Boundary, baseline: str) -> dict[str, dict[str, dict[str, Any]]]:
    """Return the differences to the baseline by model and measure, corrected over the models for each measure."""
    result: dict[str, dict[str, dict[str, Any]]] = {name: {} for name in boundary.names if name != baseline}
    paired = [entry for entry in boundary.differences if entry.baseline == baseline]
    for key in dict.fromkeys(entry.measure for entry in paired):
        by_model = {entry.model: entry for entry in paired if entry.measure == key}
        corrected = holm({name: entry.p for name, entry in by_model.items()})
        for name, entry in by_model.items():
            result[name][key] = {**_ends(entry.difference), "p": entry.p, "p_corrected": corrected[name]}
    return result
