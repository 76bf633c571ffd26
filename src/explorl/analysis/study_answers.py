"""What the policies of a study wrote: where their errors lie, and rollouts to look at."""

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
"""Rollouts to look at: steps of a run, prompts of a step, and tokens in all."""
TOKEN_COLUMNS = {"entropy": "entropy", "logp": "logp", "advantage": "token_advantage", "weight": "token_weight"}
SHAPES = ("calls", "row", "parent", "forked_at")
"""Of an answer: its calls of a tool, its row in the file, and from which row it has how many of its first tokens."""
SIGNS = {"+": "+", "-": "−", "*": "×", "/": "÷"}
KINDS = (
    (r"it gives .*, not ", "it gives another number"),
    (r".* is not given, or not that often", "a number is not given, or not that often"),
    (r"not an expression: ", "not an expression"),
    (r"no <answer>", "no answer"),
    (r"it states another result", "it states another result"),
)
"""What the errors of a task are told as, their numbers left out."""
MOST_KINDS = 8


# ---------------------------------------------------------------------------- errors
def error_breakdown(evaluations: Sequence[Path]) -> dict[str, dict[str, Any]]:
    """Right and wrong answers by the problem's number of operands and by the answer's operation; wrong ones by kind.

    The first two are Mecklenburg's Figure 6, and there for Countdown only. An answer whose text was not kept has no
    operation.
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
    common = dict(kinds.most_common(MOST_KINDS))
    rest = sum(kinds.values()) - sum(common.values())
    return {
        "by operands": {key: _counts(operands[key]) for key in sorted(operands, key=int)},
        "by operation": {key: _counts(operations[key]) for key in sorted(operations, key=order.index)},
        "by kind": {**common, **({"other": rest} if rest else {})},
    }


def operand_count(problem: str) -> str:
    """How many numbers a Countdown problem gives, from its id: ``countdown:3-5-7=24`` has 3."""
    return str(problem.removeprefix("countdown:").partition("=")[0].count("-") + 1)


def operation(completion: str, problem: str) -> str:
    """The operation of the last answer: one of + − × ÷, mixed, or none where there is no answer to read."""
    answer = last_answer(completion)
    try:
        tree = parse(sides(answer or "", problem.rpartition("=")[2])[0])
    except ExpressionError:
        return "none"
    signs = _operators(tree)
    return "mixed" if len(signs) > 1 else SIGNS[signs.pop()] if signs else "none"


def kind(error: str | None) -> str:
    """An error without its numbers."""
    text = error or "wrong"
    return next((name for pattern, name in KINDS if re.match(pattern, text)), " ".join(text.split())[:60])


def _operators(tree: Tree) -> set[str]:
    return set() if isinstance(tree, int) else {tree[0]} | _operators(tree[1]) | _operators(tree[2])


def _counts(outcomes: Counter[str]) -> dict[str, int]:
    return {"correct": outcomes["correct"], "wrong": outcomes["wrong"]}


# ---------------------------------------------------------------------------- rollouts
def sampled_rollouts(
    runs: Mapping[str, Path], *, seed: int, limit: int, iterations: Mapping[str, int]
) -> list[dict[str, Any]]:
    """Answers to a few prompts at a few steps, evenly spread, of a run of each arm; the same prompts where it can be.

    Prompts whose tokens were recorded come first. `limit` is the longest completion in tokens: what reaches it was cut
    off. Each prompt has its share of `TOKENS`; where not all its answers fit in, right and wrong ones take turns.
    """
    chosen: list[dict[str, Any]] = []
    wanted: dict[int, list[str]] = {}
    share = TOKENS // max(1, len(runs) * STEPS * PROMPTS)
    for arm, folder in runs.items():
        files = step_files(folder / "rollouts", ".parquet")
        for place, step in enumerate(evenly(sorted(files), STEPS)):
            rows = _rows(files[step])
            recorded = list(dict.fromkeys(row["prompt"] for row in rows if row.get("tokens")))
            prompts = recorded or list(dict.fromkeys(row["prompt"] for row in rows))
            same = [prompt for prompt in wanted.get(place, []) if prompt in prompts]
            picked = [*same, *(prompt for prompt in evenly(prompts, PROMPTS) if prompt not in same)][:PROMPTS]
            wanted.setdefault(place, picked)
            for prompt in picked:
                answers = _fitting([_answer(row, limit) for row in rows if row["prompt"] == prompt], share)
                count = math.ceil(step / iterations[arm])
                chosen.append({"arm": arm, "seed": seed, "step": count, "prompt": prompt, "answers": answers})
    return chosen


def evenly(items: Sequence[Any], count: int) -> list[Any]:
    """Up to `count` items, the first and the last among them, the others evenly between."""
    if len(items) <= count:
        return list(items)
    return [items[round(place * (len(items) - 1) / (count - 1))] for place in range(count)]


def _rows(path: Path) -> list[dict[str, Any]]:
    columns = read_parquet(path)
    return [
        {**dict(zip(columns, row, strict=True)), "row": place}
        for place, row in enumerate(zip(*columns.values(), strict=True))
    ]


def _answer(row: Mapping[str, Any], limit: int) -> dict[str, Any]:
    from explorl.tasks import Task

    recorded = bool(row.get("tokens"))
    tokens = row["tokens"] if recorded else [row.get("transcript") or row["completion"]]
    parts = {key.removeprefix("reward/"): value for key, value in row.items() if key.startswith("reward/")}
    reward = sum(Task.reward_parts.get(name, 1.0) * (value or 0.0) for name, value in parts.items())
    return {
        "tokens": tokens,
        "recorded": recorded,
        **{name: _rounded(row.get(column), len(tokens)) for name, column in TOKEN_COLUMNS.items()},
        **(_looked_at(row, len(tokens)) if recorded else {}),
        "correct": _is_correct(row, parts),
        "reward": round(reward, 4),
        "finish": None if not recorded else "length" if len(tokens) >= limit else "stop",
        **{name: row[name] for name in SHAPES if row.get(name) is not None},
    }


def _looked_at(row: Mapping[str, Any], count: int) -> dict[str, Any]:
    """What there is of answers that training looked at closely: update size, change of probability, alternative."""
    found: dict[str, Any] = {
        name: _rounded(row[name], count) for name in ("update_size", "other_logp") if row.get(name) is not None
    }
    if row.get("other") is not None:
        found["other"] = row["other"]
    before, after = row.get("logp"), row.get("logp_after")
    if before is not None and after is not None and len(before) == len(after):
        pairs = zip(before, after, strict=True)
        found["delta_p"] = _rounded(
            [None if None in pair else math.exp(pair[1]) - math.exp(pair[0]) for pair in pairs], count
        )
    return found


def _is_correct(row: Mapping[str, Any], parts: Mapping[str, float | None]) -> bool | None:
    """By the run's own word, else by the part called correctness, else by the only part; None where none says so."""
    if row.get("correct") is not None:
        return bool(row["correct"])
    part = parts.get("correctness") if "correctness" in parts or len(parts) != 1 else next(iter(parts.values()))
    return (part or 0.0) >= 1 if parts else None


def _rounded(values: Sequence[float | None] | None, count: int) -> list[float | None]:
    """Four significant digits are enough to look at."""
    if values is None:
        return [None] * count
    return [float(f"{v:.4g}") if v is not None and math.isfinite(v) else None for v in values]


def _fitting(answers: list[dict[str, Any]], share: int) -> list[dict[str, Any]]:
    """Answers within a share of the tokens, at least one; right and wrong ones by turns, in their old order."""
    right, wrong = (
        [place for place, one in enumerate(answers) if bool(one["correct"]) is flag] for flag in (True, False)
    )
    longest = max(len(right), len(wrong))
    turns = [places[i] for i in range(longest) for places in (right, wrong) if i < len(places)]
    kept: list[int] = []
    used = 0
    for place in turns:
        used += len(answers[place]["tokens"])
        if kept and used > share:
            break
        kept.append(place)
    return [answers[place] for place in sorted(kept)]
