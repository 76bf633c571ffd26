"""Runs without a study: what the page of one run, or of several side by side, shows."""

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
"""What a run's configuration may lack, such as that of a run that another trainer made."""


def run_results(folders: Sequence[str | Path], *, names: Sequence[str] | None = None) -> dict[str, Any]:
    """Everything that the page of these runs shows; the first is what the others are compared with.

    Runs that differ in their seed alone are the seeds of one arm. ``names`` are what the runs are called, by default
    their folders.
    """
    if not folders:
        raise ValueError("a report needs the folder of a run, such as runs/mine")
    stores = [RunStore.open(folder) for folder in folders]
    for store in stores:
        if not store.metrics():
            raise StoreError(
                f"{store.folder} has no step yet: its metrics.jsonl is empty; let the run log a step first"
            )
    arms = _arms(stores, names)
    configs = {name: _filled(members[0].config()) for name, members in arms.items()}
    runs = {
        name: [ArmRun(store.folder, _seed(store), configs[name]["training"]["iterations"]) for store in members]
        for name, members in arms.items()
    }
    first = next(iter(runs))
    seeds = {name: {run.seed for run in found} for name, found in runs.items()}
    study: dict[str, Any] = {
        "title": first if len(runs) == 1 else " · ".join(runs),
        "description": "",
        "base": configs[first],
        "baseline": first,
        "created": _created(arms[first][0]),
        "seeds": sorted(set.union(*seeds.values())),
        "compared_seeds": max((len(own & seeds[first]) for name, own in seeds.items() if name != first), default=0),
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
    """Runs by what they were set to do, the seed left out; the same seed twice is two arms."""
    if names is not None and (len(names) != len(stores) or len(set(names)) < len(names)):
        raise ValueError(f"{len(set(names))} names for {len(stores)} runs; give each run a name of its own")
    places = [store.folder.resolve() for store in stores]
    if len(set(places)) < len(places):
        raise ValueError(f"{next(p for p in places if places.count(p) > 1)} is given twice; name each run once")
    groups: list[tuple[str, list[int]]] = []
    for index, store in enumerate(stores):
        mine = json.dumps(with_defaults(store.config()) | {"seed": None}, sort_keys=True)
        group = next(
            (
                members
                for text, members in groups
                if text == mine and _seed(store) not in (_seed(stores[other]) for other in members)
            ),
            None,
        )
        groups.append((mine, [index])) if group is None else group.append(index)
    first = [members[0] for _, members in groups]
    called = [names[index] for index in first] if names is not None else _names([places[index] for index in first])
    return {name: [stores[index] for index in members] for name, (_, members) in zip(called, groups, strict=True)}


def _names(places: Sequence[Path]) -> list[str]:
    """The last parts of the folders, as many as it takes to tell them apart; a study's seed-0 is no name by itself."""
    parts = [place.parts[:-1] if re.fullmatch(r"seed-\d+", place.name) else place.parts for place in places]
    for ends in (parts, [place.parts for place in places]):
        for depth in range(1, max(map(len, ends)) + 1):
            found = ["/".join(own[-depth:]) for own in ends]
            if len(set(found)) == len(found):
                return found
    raise AssertionError("two places are the same")


def _seed(store: RunStore) -> int:
    return int(store.config().get("seed") or 0)


def _filled(config: Mapping[str, Any]) -> dict[str, Any]:
    filled = {"strategies": [], **config}
    for key, values in DEFAULTS.items():
        filled[key] = {**values, **(config.get(key) or {})}
    return filled


def _created(store: RunStore) -> str:
    """The day of the run's first start."""
    if store.provenance_path.is_file():
        starts = read_json(store.provenance_path, list)
        if starts and starts[0].get("time"):
            return str(starts[0]["time"])[:10]
    return datetime.fromtimestamp(store.config_path.stat().st_mtime, UTC).date().isoformat()


def _changes(base: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """Settings that differ from the first run's, by their names with dots."""
    changed = changed_keys(base, config).items()
    return {key: new for key, (_, new) in changed if key != "seed" and not key.startswith("strategies")}


def _verdict(results: Mapping[str, Any]) -> str:
    """What training did to pass@1 and to the largest k, of the first run, and how the others compare."""
    arm, start = results["arms"][0], results["start"]
    gain = arm["gain"]
    if start is None or not gain["k"]:
        told = "The run has no score from before its training" if arm["pass_at_k"]["k"] else "The run has no score yet"
        return f"{told}: the page shows its training."
    parts = []
    for place in dict.fromkeys((0, len(gain["k"]) - 1)):
        before, after = start["pass_at_k"]["mean"][place], arm["pass_at_k"]["mean"][place]
        low, high = gain["low"][place], gain["high"][place]
        span = "of one problem" if low is None or high is None else f"[{points(low)}, {points(high)}]"
        parts.append(
            f"pass@{gain['k'][place]} from {before * 100:.1f} to {after * 100:.1f} % "
            f"({points(gain['mean'][place])} points {span})"
        )
    more = "" if len(results["arms"]) == 1 else f" {results['verdict']}"
    return f"{arm['name']}: training took {' and '.join(parts)}.{more}"
