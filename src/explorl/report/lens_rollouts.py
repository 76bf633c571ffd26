"""Completions for the rollout browser, with what replacing their tokens showed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from explorl.analysis.lens_table import LensTable, read_run
from explorl.analysis.study_answers import browser_completion, rollout_rows
from explorl.core.store import RunStore, StoreError, read_json, step_files


def with_impacts(rollouts: Sequence[Mapping[str, Any]], folder: str | Path) -> list[Mapping[str, Any]]:
    """Return the rollouts of a run's page with the impacts that ``explorl analyze RUN --only impact`` wrote.

    Completions that the page does not show yet are added. Without a readable analysis, the rollouts are unchanged.
    """
    try:
        stored = read_json(Path(folder) / "analysis" / "analysis.json")["analyses"]["impact"]["result"]["tokens"]
        impacts = [
            (int(impact["answer"]), int(impact["position"]), int(impact["sampled"]["token_id"]), impact)
            for impact in stored
        ]
        records = {(index, position): impact_record(impact) for index, position, _, impact in impacts}
    except (StoreError, OSError, ValueError, LookupError, TypeError, AttributeError):
        return list(rollouts)
    table = read_run(folder)
    by_completion: dict[int, dict[int, Any]] = {}
    for index, position, token, _ in impacts:
        if _has_token(table, index, position, token):  # else the run has changed since the analysis
            by_completion.setdefault(index, {})[position] = records[index, position]
    store, steps = RunStore(folder), table.completions.step
    iterations = (store.config().get("training") or {}).get("iterations") or 1
    limit = (store.config().get("rollout") or {}).get("max_tokens") or math.inf
    merged = [{**rollout, "answers": list(rollout["answers"])} for rollout in rollouts]
    files = step_files(store.rollouts, ".parquet")
    rows = {step: rollout_rows(files[step]) for step in {int(steps[index]) for index in by_completion}}
    for index, completion_impacts in by_completion.items():
        step = int(steps[index])
        row = rows[step][index - int(np.searchsorted(steps, step))]
        completion = browser_completion(row, limit) | {"impacts": completion_impacts}
        _merge_completion(merged, math.ceil(step / iterations), row["prompt"], completion, table.name)
    return list(merged)


def _has_token(table: LensTable, index: int, position: int, token: int) -> bool:
    """Check whether a completion of the table has this token at this position."""
    if "token_ids" not in table.tokens or not 0 <= index < len(table.completions):
        return False
    inside = 0 <= position < table.completions.count[index]
    return inside and int(table.tokens["token_ids"][table.completions.start[index] + position]) == token


def _merge_completion(
    rollouts: list[dict[str, Any]], step: int, prompt: str, completion: dict[str, Any], run_name: str
) -> None:
    """Add the completion's impacts to the same completion in `rollouts`; if it is missing, add it to its prompt."""
    for rollout in rollouts:
        if (rollout["step"], rollout["prompt"]) == (step, prompt):
            for index, shown in enumerate(rollout["answers"]):
                if shown.get("tokens") == completion["tokens"] and "impacts" not in shown:
                    rollout["answers"][index] = {**shown, "impacts": completion["impacts"]}
                    return
            rollout["answers"].append(completion)
            return
    arm, seed = (rollouts[0]["arm"], rollouts[0]["seed"]) if rollouts else (run_name, 0)
    rollouts.append({"arm": arm, "seed": seed, "step": step, "prompt": prompt, "answers": [completion]})


def impact_record(impact: Mapping[str, Any]) -> dict[str, Any]:
    """Return a `TokenImpact`, given as a dictionary, in the browser's form."""
    interval = {key: impact["impact"][key] for key in ("mean", "low", "high")}
    return {
        **interval, "p": impact["corrected"], "sampled": _token_side(impact["sampled"]),
        "other": _token_side(impact["other"]),
    }  # fmt: skip


def _token_side(side: Mapping[str, Any]) -> dict[str, Any]:
    continuations = [(continuation["text"], continuation["correct"]) for continuation in side["continuations"]]
    return {
        **{key: side[key] for key in ("token", "probability")},
        "correct": sum(bool(correct) for _, correct in continuations),
        "count": len(continuations),
        "continuations": continuations,
    }
