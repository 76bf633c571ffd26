"""Answers of a lens table as the rollout browser takes them, with what replacing their tokens showed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from explorl.analysis.impact import Side, TokenImpact
from explorl.analysis.lens_table import LensTable
from explorl.analysis.study_answers import evenly

STEPS, PROMPTS, ANSWERS = 8, 4, 8
"""Steps that are shown, prompts of a step, and answers to a prompt; more where their tokens were replaced."""
COLUMNS = {
    "entropy": "entropy", "logp": "logp", "token_advantage": "advantage", "token_weight": "weight",
    "update_size": "update_size", "other_logp": "other_logp",
}  # fmt: skip
"""Numbers of a token, by their column and by what the browser calls them."""


def lens_rollouts(table: LensTable, impacts: Sequence[TokenImpact] = (), *, name: str = "") -> list[dict[str, Any]]:
    """Answers whose tokens are recorded, at even distances over steps; all those in which a token was replaced.

    What they are made of is text from a policy: `write_report` cleans it.
    """
    by_answer: dict[int, list[TokenImpact]] = {}
    for one in impacts:
        by_answer.setdefault(one.answer, []).append(one)
    recorded = np.flatnonzero(table.answers.count > 0).tolist() if "tokens" in table.tokens else []
    by_prompt: dict[tuple[int, str], list[int]] = {}
    for index in recorded:
        by_prompt.setdefault((int(table.answers.step[index]), table.answers.prompt[index]), []).append(index)
    rollouts = []
    for (step, prompt), answers in _chosen(by_prompt, set(by_answer)).items():
        shown = [_answer(table, index, by_answer.get(index, [])) for index in answers]
        rollouts.append({"arm": name or table.name, "seed": 0, "step": step, "prompt": prompt, "answers": shown})
    return rollouts


def _chosen(by_prompt: Mapping[tuple[int, str], list[int]], replaced: set[int]) -> dict[tuple[int, str], list[int]]:
    steps = set(evenly(sorted({step for step, _ in by_prompt}), STEPS))
    chosen = {}
    seen: dict[int, int] = {}
    for (step, prompt), answers in by_prompt.items():
        seen[step] = seen.get(step, 0) + 1
        special = [index for index in answers if index in replaced]
        if special or (step in steps and seen[step] <= PROMPTS):
            chosen[step, prompt] = sorted({*special, *answers[:ANSWERS]})
    return chosen


def _answer(table: LensTable, index: int, impacts: Sequence[TokenImpact]) -> dict[str, Any]:
    tokens, answers = table.tokens, table.answers
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
        found["impacts"] = {one.position: impact_record(one) for one in impacts}
    return found


def impact_record(one: TokenImpact) -> dict[str, Any]:
    """A replaced token as the browser takes it."""
    interval = {"mean": one.impact.mean, "low": one.impact.low, "high": one.impact.high, "p": one.corrected}
    return interval | {"sampled": _side(one.sampled), "other": _side(one.other)}


def _side(side: Side) -> dict[str, Any]:
    return {
        "token": side.token,
        "probability": side.probability,
        "correct": side.correct,
        "count": side.count,
        "continuations": [(one.text, one.correct) for one in side.continuations],
    }


def _numbers(values: np.ndarray) -> list[float | None]:
    return [float(value) if np.isfinite(value) else None for value in values]


def _known(value: float) -> bool | None:
    return bool(value) if np.isfinite(value) else None


def _reward(table: LensTable, index: int) -> float | None:
    """The sum of the recorded parts, by the weights of a task."""
    from explorl.tasks import Task

    parts = {
        name.removeprefix("reward/"): float(values[index])
        for name, values in table.answers.columns.items()
        if name.startswith("reward/") and np.isfinite(values[index])
    }
    return sum(Task.reward_parts.get(name, 1.0) * value for name, value in parts.items()) if parts else None
