"""Answers as the rollout browser takes them, with what replacing their tokens showed."""

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

STEPS, PROMPTS, ANSWERS = 8, 4, 8
"""Steps that are shown, prompts of a step, and answers to a prompt; more where their tokens were replaced."""
COLUMNS = {
    "entropy": "entropy", "logp": "logp", "token_advantage": "advantage", "token_weight": "weight",
    "update_size": "update_size", "other_logp": "other_logp",
}  # fmt: skip
"""Numbers of a token, by their column and by what the browser calls them."""


def with_impacts(rollouts: Sequence[Mapping[str, Any]], folder: str | Path) -> list[Mapping[str, Any]]:
    """The rollouts of a run's page, and what ``explorl analyze RUN --only impact`` wrote of the run's answers.

    An answer that the page does not show yet is added to it. Without a readable analysis they stay as they are.
    """
    try:
        held = read_json(Path(folder) / "analysis" / "analysis.json")["analyses"]["impact"]["result"]["tokens"]
        impacts = [(int(one["answer"]), int(one["position"]), int(one["sampled"]["token_id"]), one) for one in held]
        records = {(answer, position): impact_record(one) for answer, position, _, one in impacts}
    except (StoreError, OSError, ValueError, LookupError, TypeError, AttributeError):
        return list(rollouts)
    table = read_run(folder)
    by_answer: dict[int, dict[int, Any]] = {}
    for answer, position, token, _ in impacts:
        if _has(table, answer, position, token):  # else the run was changed since
            by_answer.setdefault(answer, {})[position] = records[answer, position]
    iterations = (RunStore(folder).config().get("training") or {}).get("iterations") or 1
    shown = [{**rollout, "answers": list(rollout["answers"])} for rollout in rollouts]
    for index, found in by_answer.items():
        step = math.ceil(int(table.completions.step[index]) / iterations)
        _show(shown, step, table.completions.prompt[index], _answer(table, index, {}) | {"impacts": found}, table.name)
    return list(shown)


def _has(table: LensTable, answer: int, position: int, token: int) -> bool:
    if "token_ids" not in table.tokens or not 0 <= answer < len(table.completions):
        return False
    inside = 0 <= position < table.completions.count[answer]
    return inside and int(table.tokens["token_ids"][table.completions.start[answer] + position]) == token


def _show(rollouts: list[dict[str, Any]], step: int, prompt: str, answer: dict[str, Any], name: str) -> None:
    """Puts the answer in the place of the same one, or beside the others to its prompt, or with a prompt of its own."""
    for rollout in rollouts:
        if (rollout["step"], rollout["prompt"]) == (step, prompt):
            for place, one in enumerate(rollout["answers"]):
                if one.get("tokens") == answer["tokens"] and "impacts" not in one:
                    rollout["answers"][place] = {**one, "impacts": answer["impacts"]}
                    return
            rollout["answers"].append(answer)
            return
    arm, seed = (rollouts[0]["arm"], rollouts[0]["seed"]) if rollouts else (name, 0)
    rollouts.append({"arm": arm, "seed": seed, "step": step, "prompt": prompt, "answers": [answer]})


def lens_rollouts(table: LensTable, impacts: Sequence[TokenImpact] = (), *, name: str = "") -> list[dict[str, Any]]:
    """Answers whose tokens are recorded, at even distances over steps; all those in which a token was replaced.

    What they are made of is text from a policy: `write_report` cleans it.
    """
    by_answer: dict[int, dict[int, Any]] = {}
    for one in impacts:
        by_answer.setdefault(one.answer, {})[one.position] = impact_record(asdict(one))
    recorded = np.flatnonzero(table.completions.count > 0).tolist() if "tokens" in table.tokens else []
    by_prompt: dict[tuple[int, str], list[int]] = {}
    for index in recorded:
        by_prompt.setdefault((int(table.completions.step[index]), table.completions.prompt[index]), []).append(index)
    rollouts = []
    for (step, prompt), answers in _chosen(by_prompt, set(by_answer)).items():
        shown = [_answer(table, index, by_answer.get(index, {})) for index in answers]
        rollouts.append({"arm": name or table.name, "seed": 0, "step": step, "prompt": prompt, "answers": shown})
    return rollouts


def _chosen(by_prompt: Mapping[tuple[int, str], list[int]], replaced: set[int]) -> dict[tuple[int, str], list[int]]:
    steps = set(evenly_spaced(sorted({step for step, _ in by_prompt}), STEPS))
    chosen = {}
    seen: dict[int, int] = {}
    for (step, prompt), answers in by_prompt.items():
        seen[step] = seen.get(step, 0) + 1
        special = [index for index in answers if index in replaced]
        if special or (step in steps and seen[step] <= PROMPTS):
            chosen[step, prompt] = sorted({*special, *answers[:ANSWERS]})
    return chosen


def _answer(table: LensTable, index: int, impacts: Mapping[int, Any]) -> dict[str, Any]:
    tokens, answers = table.tokens, table.completions
    some = slice(int(answers.start[index]), int(answers.start[index] + answers.count[index]))
    found: dict[str, Any] = {
        "tokens": tokens["tokens"][some].tolist(),
        "recorded": True,
        "correct": _known(answers["correct"][index]) if "correct" in answers else None,
        "reward": _reward(table, index),
        **{key: _numbers(tokens[name][some]) for name, key in COLUMNS.items() if name in tokens},
    }
    if "other" in tokens:
        found["other"] = tokens["other"][some].tolist()
    if "logp" in tokens and "logp_after" in tokens:
        found["delta_p"] = _numbers(np.exp(tokens["logp_after"][some]) - np.exp(tokens["logp"][some]))
    if impacts:
        found["impacts"] = impacts
    return found


def impact_record(one: Mapping[str, Any]) -> dict[str, Any]:
    """A `TokenImpact` in plain values as the browser takes it."""
    interval = {key: one["impact"][key] for key in ("mean", "low", "high")}
    return {**interval, "p": one["corrected"], "sampled": _side(one["sampled"]), "other": _side(one["other"])}


def _side(side: Mapping[str, Any]) -> dict[str, Any]:
    found = [(one["text"], one["correct"]) for one in side["continuations"]]
    right = sum(bool(correct) for _, correct in found)
    return {**{key: side[key] for key in ("token", "probability")}, "correct": right, "count": len(found),
            "continuations": found}  # fmt: skip


def _numbers(values: np.ndarray) -> list[float | None]:
    return [float(value) if np.isfinite(value) else None for value in values]


def _known(value: float) -> bool | None:
    return bool(value) if np.isfinite(value) else None


def _reward(table: LensTable, index: int) -> float | None:
    """The sum of the recorded parts, by the weights of a task."""
    from explorl.tasks import Task

    parts = {
        name.removeprefix("reward/"): float(values[index])
        for name, values in table.completions.columns.items()
        if name.startswith("reward/") and np.isfinite(values[index])
    }
    return sum(Task.reward_parts.get(name, 1.0) * value for name, value in parts.items()) if parts else None
