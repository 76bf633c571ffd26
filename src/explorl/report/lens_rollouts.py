"""Completions for the rollout browser, with what replacing their tokens showed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from explorl.analysis.impact import TokenImpact
from explorl.analysis.lens_table import LensTable, read_run
from explorl.analysis.study_answers import evenly_spaced
from explorl.core.store import RunStore, StoreError, read_json

MAX_STEPS, MAX_PROMPTS, MAX_COMPLETIONS = 8, 4, 8
"""Steps shown, prompts per step, and completions per prompt; completions with replaced tokens are always shown."""
BROWSER_KEYS = {
    "entropy": "entropy", "logp": "logp", "token_advantage": "advantage", "token_weight": "weight",
    "update_size": "update_size", "other_logp": "other_logp",
}  # fmt: skip
"""The browser's key of each numeric token column."""


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
    iterations = (RunStore(folder).config().get("training") or {}).get("iterations") or 1
    merged = [{**rollout, "answers": list(rollout["answers"])} for rollout in rollouts]
    for index, completion_impacts in by_completion.items():
        step = math.ceil(int(table.completions.step[index]) / iterations)
        completion = _browser_completion(table, index, {}) | {"impacts": completion_impacts}
        _merge_completion(merged, step, table.completions.prompt[index], completion, table.name)
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


def lens_rollouts(table: LensTable, impacts: Sequence[TokenImpact] = (), *, name: str = "") -> list[dict[str, Any]]:
    """Return completions with token records, evenly spaced over steps, and all that have a replaced token.

    Their text is a policy's output and untrusted; `write_report` cleans it.
    """
    by_completion: dict[int, dict[int, Any]] = {}
    for impact in impacts:
        by_completion.setdefault(impact.answer, {})[impact.position] = impact_record(asdict(impact))
    recorded = np.flatnonzero(table.completions.count > 0).tolist() if "tokens" in table.tokens else []
    by_prompt: dict[tuple[int, str], list[int]] = {}
    for index in recorded:
        by_prompt.setdefault((int(table.completions.step[index]), table.completions.prompt[index]), []).append(index)
    rollouts = []
    for (step, prompt), indices in _select_completions(by_prompt, set(by_completion)).items():
        completions = [_browser_completion(table, index, by_completion.get(index, {})) for index in indices]
        rollouts.append({"arm": name or table.name, "seed": 0, "step": step, "prompt": prompt, "answers": completions})
    return rollouts


def _select_completions(
    by_prompt: Mapping[tuple[int, str], list[int]], replaced: set[int]
) -> dict[tuple[int, str], list[int]]:
    """Return the indices of the completions to show for each step and prompt; those in `replaced` always."""
    steps = set(evenly_spaced(sorted({step for step, _ in by_prompt}), MAX_STEPS))
    selected = {}
    prompts_of_step: dict[int, int] = {}
    for (step, prompt), indices in by_prompt.items():
        prompts_of_step[step] = prompts_of_step.get(step, 0) + 1
        with_replacement = [index for index in indices if index in replaced]
        if with_replacement or (step in steps and prompts_of_step[step] <= MAX_PROMPTS):
            selected[step, prompt] = sorted({*with_replacement, *indices[:MAX_COMPLETIONS]})
    return selected


def _browser_completion(table: LensTable, index: int, impacts: Mapping[int, Any]) -> dict[str, Any]:
    """Return a completion of the table in the browser's form."""
    tokens, completions = table.tokens, table.completions
    span = slice(int(completions.start[index]), int(completions.start[index] + completions.count[index]))
    completion: dict[str, Any] = {
        "tokens": tokens["tokens"][span].tolist(),
        "recorded": True,
        "correct": _bool_or_none(completions["correct"][index]) if "correct" in completions else None,
        "reward": _reward(table, index),
        **{key: _finite_values(tokens[name][span]) for name, key in BROWSER_KEYS.items() if name in tokens},
    }
    if "other" in tokens:
        completion["other"] = tokens["other"][span].tolist()
    if "logp" in tokens and "logp_after" in tokens:
        completion["delta_p"] = _finite_values(np.exp(tokens["logp_after"][span]) - np.exp(tokens["logp"][span]))
    if impacts:
        completion["impacts"] = impacts
    return completion


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


def _finite_values(values: np.ndarray) -> list[float | None]:
    return [float(value) if np.isfinite(value) else None for value in values]


def _bool_or_none(value: float) -> bool | None:
    return bool(value) if np.isfinite(value) else None


def _reward(table: LensTable, index: int) -> float | None:
    """Return the sum of the recorded reward parts, weighted as tasks weight them by default."""
    from explorl.tasks import Task

    parts = {
        name.removeprefix("reward/"): float(values[index])
        for name, values in table.completions.columns.items()
        if name.startswith("reward/") and np.isfinite(values[index])
    }
    return sum(Task.reward_parts.get(name, 1.0) * value for name, value in parts.items()) if parts else None
