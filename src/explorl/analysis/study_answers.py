"""Completions of a study's policies: a breakdown of their errors, and rollouts for the browser of the report."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from explorl.core.store import read_parquet, step_files
from explorl.tasks.answer_span import last_answer
from explorl.tasks.countdown.task import sides
from explorl.tasks.expression import ExpressionError, Tree, parse

STEPS, PROMPTS, TOKENS = 8, 4, 160_000
"""Rollouts in the report: steps per run, prompts per step, and tokens in total."""
TOKEN_COLUMNS = {"entropy": "entropy", "logp": "logp", "advantage": "token_advantage", "weight": "token_weight"}
SHAPES = ("calls", "row", "parent", "forked_at")
"""Columns of a completion: tool calls, row in the file, and the row and length of the prefix that it shares."""
SIGNS = {"+": "+", "-": "−", "*": "×", "/": "÷"}
KINDS = (
    (r"it gives .*, not ", "it gives another number"),
    (r".* is not given, or not that often", "a number is not given, or not that often"),
    (r"not an expression: ", "not an expression"),
    (r"no <answer>", "no answer"),
    (r"it states another result", "it states another result"),
)
"""Patterns of a task's error messages, and the kinds of error that they are counted as."""
MAX_KINDS = 8


# ---------------------------------------------------------------------------- errors
def error_breakdown(evaluations: Sequence[Path]) -> dict[str, dict[str, Any]]:
    """Count right and wrong completions by number of operands and by operation, and wrong ones by kind of error.

    The first two are Mecklenburg's Figure 6, for Countdown only. A completion without stored text has no operation.
    """
    operands: dict[str, Counter[str]] = {}
    operations: dict[str, Counter[str]] = {}
    kinds: Counter[str] = Counter()
    for path in evaluations:
        rows = read_parquet(path, ["problem", "completion", "correct", "error"])
        for problem, completion, correct, error in zip(*rows.values(), strict=True):
            outcome = "correct" if correct else "wrong"
            if problem.startswith("countdown:"):
                operands.setdefault(operand_count(problem), Counter())[outcome] += 1
                if completion is not None:
                    operations.setdefault(operation(completion, problem), Counter())[outcome] += 1
            if not correct:
                kinds[kind(error)] += 1
    order = [*SIGNS.values(), "mixed", "none"]
    common = dict(kinds.most_common(MAX_KINDS))
    rest = sum(kinds.values()) - sum(common.values())
    return {
        "by operands": {key: _counts(operands[key]) for key in sorted(operands, key=int)},
        "by operation": {key: _counts(operations[key]) for key in sorted(operations, key=order.index)},
        "by kind": {**common, **({"other": rest} if rest else {})},
    }


def operand_count(problem: str) -> str:
    """Return the number of operands of a Countdown problem from its id: ``countdown:3-5-7=24`` has 3."""
    return str(problem.removeprefix("countdown:").partition("=")[0].count("-") + 1)


def operation(completion: str, problem: str) -> str:
    """Return the operation of the last answer: one of + − × ÷, mixed, or none without a valid answer."""
    answer = last_answer(completion)
    try:
        tree = parse(sides(answer or "", problem.rpartition("=")[2])[0])
    except ExpressionError:
        return "none"
    signs = _operators(tree)
    return "mixed" if len(signs) > 1 else SIGNS[signs.pop()] if signs else "none"


def kind(error: str | None) -> str:
    """Return the kind of an error message."""
    text = error or "wrong"
    return next((name for pattern, name in KINDS if re.match(pattern, text)), " ".join(text.split())[:60])


def _operators(tree: Tree) -> set[str]:
    """Return the operators in an expression tree."""
    return set() if isinstance(tree, int) else {tree[0]} | _operators(tree[1]) | _operators(tree[2])


def _counts(outcomes: Counter[str]) -> dict[str, int]:
    return {"correct": outcomes["correct"], "wrong": outcomes["wrong"]}


# ---------------------------------------------------------------------------- rollouts
def sampled_rollouts(
    runs: Mapping[str, Path], *, seed: int, limit: int, iterations: Mapping[str, int]
) -> list[dict[str, Any]]:
    """Return completions of a few prompts at a few evenly spaced steps of each run; the same prompts if possible.

    Prompts with recorded tokens come first. A completion of `limit` tokens was cut off. Each prompt has its share of
    `TOKENS`; if not all its completions fit, right and wrong ones take turns.
    """
    rollouts: list[dict[str, Any]] = []
    prompts_at: dict[int, list[str]] = {}
    share = TOKENS // max(1, len(runs) * STEPS * PROMPTS)
    for arm, folder in runs.items():
        files = step_files(folder / "rollouts", ".parquet")
        for index, step in enumerate(evenly_spaced(sorted(files), STEPS)):
            rows = rollout_rows(files[step])
            recorded = list(dict.fromkeys(row["prompt"] for row in rows if row.get("tokens")))
            prompts = recorded or list(dict.fromkeys(row["prompt"] for row in rows))
            shared = [prompt for prompt in prompts_at.get(index, []) if prompt in prompts]
            others = [prompt for prompt in evenly_spaced(prompts, PROMPTS) if prompt not in shared]
            selected = [*shared, *others][:PROMPTS]
            prompts_at.setdefault(index, selected)
            training_step = math.ceil(step / iterations[arm])
            for prompt in selected:
                completions = _fit([browser_completion(row, limit) for row in rows if row["prompt"] == prompt], share)
                rollouts.append(
                    {"arm": arm, "seed": seed, "step": training_step, "prompt": prompt, "answers": completions}
                )
    return rollouts


def evenly_spaced(items: Sequence[Any], count: int) -> list[Any]:
    """Return up to `count` evenly spaced items, including the first and the last."""
    if len(items) <= count:
        return list(items)
    return [items[round(index * (len(items) - 1) / (count - 1))] for index in range(count)]


def rollout_rows(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a file of rollouts, numbered."""
    columns = read_parquet(path)
    return [
        {**dict(zip(columns, row, strict=True)), "row": index}
        for index, row in enumerate(zip(*columns.values(), strict=True))
    ]


def browser_completion(row: Mapping[str, Any], limit: float) -> dict[str, Any]:
    """Return a row of a file of rollouts in the browser's form; a completion of `limit` tokens was cut off."""
    from explorl.tasks import Task

    recorded = bool(row.get("tokens"))
    tokens = row["tokens"] if recorded else [row.get("transcript") or row["completion"]]
    parts = {key.removeprefix("reward/"): value for key, value in row.items() if key.startswith("reward/")}
    reward = sum(Task.reward_parts.get(name, 1.0) * (value or 0.0) for name, value in parts.items())
    return {
        "tokens": tokens,
        "recorded": recorded,
        **{name: _rounded(row.get(column), len(tokens)) for name, column in TOKEN_COLUMNS.items()},
        **(_inspected(row, len(tokens)) if recorded else {}),
        "correct": _is_correct(row, parts),
        "reward": round(reward, 4),
        "finish": None if not recorded else "length" if len(tokens) >= limit else "stop",
        **{name: row[name] for name in SHAPES if row.get(name) is not None},
    }


def _inspected(row: Mapping[str, Any], count: int) -> dict[str, Any]:
    """Return what training recorded of an inspected completion: update size, change of probability, alternative."""
    columns: dict[str, Any] = {
        name: _rounded(row[name], count) for name in ("update_size", "other_logp") if row.get(name) is not None
    }
    if row.get("other") is not None:
        columns["other"] = row["other"]
    before, after = row.get("logp"), row.get("logp_after")
    if before is not None and after is not None and len(before) == len(after):
        pairs = zip(before, after, strict=True)
        columns["delta_p"] = _rounded(
            [None if None in pair else math.exp(pair[1]) - math.exp(pair[0]) for pair in pairs], count
        )
    return columns


def _is_correct(row: Mapping[str, Any], parts: Mapping[str, float | None]) -> bool | None:
    """Return correctness as recorded, or from the reward part `correctness`, or from the only part; None if unknown."""
    if row.get("correct") is not None:
        return bool(row["correct"])
    part = parts.get("correctness") if "correctness" in parts or len(parts) != 1 else next(iter(parts.values()))
    return (part or 0.0) >= 1 if parts else None


def _rounded(values: Sequence[float | None] | None, count: int) -> list[float | None]:
    """Round to four significant digits, which are enough to read."""
    if values is None:
        return [None] * count
    return [float(f"{v:.4g}") if v is not None and math.isfinite(v) else None for v in values]


def _fit(completions: list[dict[str, Any]], share: int) -> list[dict[str, Any]]:
    """Return completions within a share of the tokens, at least one, right and wrong ones in turn, in order."""
    selected: list[int] = []
    used = 0
    for index in in_turns([bool(completion["correct"]) for completion in completions]):
        used += len(completions[index]["tokens"])
        if selected and used > share:
            break
        selected.append(index)
    return [completions[index] for index in sorted(selected)]


def in_turns(correct: Sequence[bool]) -> list[int]:
    """Return the indices of right and wrong completions in turn, a right one first."""
    turns = {True: 0, False: 0}
    ranked = []
    for index, is_correct in enumerate(correct):
        ranked.append((turns[is_correct], not is_correct, index))
        turns[is_correct] += 1
    return [index for _, _, index in sorted(ranked)]
