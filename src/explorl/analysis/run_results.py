"""Results of runs without a study, for the page of one run or of several side by side."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from explorl.analysis.study_results import ArmRun, build_results
from explorl.analysis.verdicts import points
from explorl.core.config import changed_keys, with_defaults
from explorl.core.store import RunStore, StoreError, read_json

DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "task": {"name": ""},
    "model": {"name": ""},
    "training": {"iterations": 1, "steps": None},
    "rollout": {"max_tokens": 1 << 30},
}
"""Defaults for configurations without these keys, such as those of runs of another trainer."""


def run_results(folders: Sequence[str | Path], *, names: Sequence[str] | None = None) -> dict[str, Any]:
    """Return everything that the page of these runs shows; the first run is the baseline.

    Runs that differ only in their seed are the seeds of one arm. ``names`` are the names of the runs, by default those
    of their folders.
    """
    if not folders:
        raise ValueError("no run to report; give the folder of a run, such as runs/mine")
    stores = [RunStore.open(folder) for folder in folders]
    for store in stores:
        if not store.metrics():
            raise StoreError(
                f"{store.folder} has no step yet: its metrics.jsonl is empty; wait until the run has logged a step"
            )
    arms = _arms(stores, names)
    configs = {name: _fill_defaults(members[0].config()) for name, members in arms.items()}
    runs = {
        name: [ArmRun(store.folder, _seed(store), configs[name]["training"]["iterations"]) for store in members]
        for name, members in arms.items()
    }
    first = next(iter(runs))
    seeds = {name: {run.seed for run in arm_runs} for name, arm_runs in runs.items()}
    study: dict[str, Any] = {
        "title": first if len(runs) == 1 else " · ".join(runs),
        "description": "",
        "base": configs[first],
        "baseline": first,
        "created": _created(arms[first][0]),
        "seeds": sorted(set.union(*seeds.values())),
        "compared_seeds": max(
            (len(arm_seeds & seeds[first]) for name, arm_seeds in seeds.items() if name != first), default=0
        ),
        "target": None,
        "seed_deviation": None,
        "arms": [
            {"name": name, "config": config, "changes": _changes(configs[first], config)}
            for name, config in configs.items()
        ],
    }
    results = build_results(study, runs, runs)
    return {**results, "kind": "runs", "verdict": _verdict(results)}


def _arms(stores: Sequence[RunStore], names: Sequence[str] | None) -> dict[str, list[RunStore]]:
    """Group runs by their configuration without the seed; runs with equal seeds are separate arms."""
    if names is not None and (len(names) != len(stores) or len(set(names)) < len(names)):
        raise ValueError(f"{len(set(names))} names for {len(stores)} runs; give each run a different name")
    folders = [store.folder.resolve() for store in stores]
    if len(set(folders)) < len(folders):
        raise ValueError(f"{next(f for f in folders if folders.count(f) > 1)} is given twice; name each run once")
    groups: list[tuple[str, list[int]]] = []
    for index, store in enumerate(stores):
        key = json.dumps(with_defaults(store.config()) | {"seed": None}, sort_keys=True)
        group = next(
            (
                members
                for other_key, members in groups
                if other_key == key and _seed(store) not in (_seed(stores[other]) for other in members)
            ),
            None,
        )
        groups.append((key, [index])) if group is None else group.append(index)
    first = [members[0] for _, members in groups]
    labels = [names[index] for index in first] if names is not None else _names([folders[index] for index in first])
    return {name: [stores[index] for index in members] for name, (_, members) in zip(labels, groups, strict=True)}


def _names(folders: Sequence[Path]) -> list[str]:
    """Return the shortest ends of the folders' paths that differ; a study's seed-0 is not a name by itself."""
    parts = [folder.parts[:-1] if re.fullmatch(r"seed-\d+", folder.name) else folder.parts for folder in folders]
    for ends in (parts, [folder.parts for folder in folders]):
        for depth in range(1, max(map(len, ends)) + 1):
            names = ["/".join(end[-depth:]) for end in ends]
            if len(set(names)) == len(names):
                return names
    raise AssertionError("two folders are the same")


def _seed(store: RunStore) -> int:
    return int(store.config().get("seed") or 0)


def _fill_defaults(config: Mapping[str, Any]) -> dict[str, Any]:
    filled = {"strategies": [], **config}
    for key, values in DEFAULTS.items():
        filled[key] = {**values, **(config.get(key) or {})}
    return filled


def _created(store: RunStore) -> str:
    """Return the day of the run's first start."""
    if store.provenance_path.is_file():
        starts = read_json(store.provenance_path, list)
        if starts and starts[0].get("time"):
            return str(starts[0]["time"])[:10]
    return datetime.fromtimestamp(store.config_path.stat().st_mtime, UTC).date().isoformat()


def _changes(base: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that differ from those of the first run, by dotted name."""
    changed = changed_keys(base, config).items()
    return {key: new for key, (_, new) in changed if key != "seed" and not key.startswith("strategies")}


def _verdict(results: Mapping[str, Any]) -> str:
    """Describe the change of pass@1 and of the largest k in the first run, and how the others compare."""
    arm, start = results["arms"][0], results["start"]
    gain = arm["gain"]
    if start is None or not gain["k"]:
        reason = "The run has no score from before training" if arm["pass_at_k"]["k"] else "The run has no score yet"
        return f"{reason}: the page shows its training."
    parts = []
    for index in dict.fromkeys((0, len(gain["k"]) - 1)):
        before, after = start["pass_at_k"]["mean"][index], arm["pass_at_k"]["mean"][index]
        low, high = gain["low"][index], gain["high"][index]
        span = "of one problem" if low is None or high is None else f"[{points(low)}, {points(high)}]"
        parts.append(
            f"pass@{gain['k'][index]} from {before * 100:.1f} to {after * 100:.1f} % "
            f"({points(gain['mean'][index])} points {span})"
        )
    comparison = "" if len(results["arms"]) == 1 else f" {results['verdict']}"
    return f"{arm['name']}: training took {' and '.join(parts)}.{comparison}"
