"""Compute the measures of an evaluation, per problem and as means with intervals, and their tables."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from explorl.evaluation.evaluation import Evaluation, number_format
from explorl.metrics import answer_diversity
from explorl.metrics.quality import REPETITIVE
from explorl.stats import Cell, Interval, Table
from explorl.stats.arm_differences import problem_interval
from explorl.stats.resample import CHUNK

TEXT, CODE = "text", "code"

LABELS: Mapping[str, str] = {
    "distinct_answers": "distinct answers per problem",
    "distinct_correct_answers": "distinct right answers per problem",
    "unsolvable": "unsolvable problems",
    "well_formed": "well formed",
    "truncated": "truncated",
    "mean_tokens": "tokens per completion",
    "calls": "calls per completion",
    "tool_tokens": "tokens of outputs per completion",
    "entropy": "token entropy (nats)",
    "branching": "branching factor (tokens)",
    "format_violations": "format violations",
    "redundancy": "3-gram redundancy",
    "repetitive": f"redundancy > {REPETITIVE}",
    "language_mixing": "language mixing",
}
"""The label of each measure in tables; pass@k, avg@k and maj@k are their own labels."""


def per_problem(evaluation: Evaluation) -> dict[str, np.ndarray]:
    """Return one value per problem of every measure whose mean over problems is the score.

    Measures of style are included if ``rows`` has the columns `format_violations`, `redundancy` and `cjk`.
    """
    rows, shape = evaluation.rows, evaluation.correct.shape
    values: dict[str, np.ndarray] = {}
    for name in evaluation.measures:
        values[name.replace("@k", f"@{evaluation.samples}")] = evaluation.measure_per_problem(name)
    for kind in ("pass", "maj"):
        for k in evaluation.ks:
            if kind == "pass" or k > 1:  # maj@1 is pass@1
                values.setdefault(f"{kind}@{k}", evaluation.measure_per_problem(f"{kind}@{k}"))
    values.setdefault(f"avg@{evaluation.samples}", evaluation.measure_per_problem("avg@k"))
    diversity = answer_diversity(evaluation.answers, evaluation.correct)
    values["distinct_answers"] = diversity.distinct.astype(float)
    values["distinct_correct_answers"] = diversity.correct.astype(float)

    def mean(column: Any) -> np.ndarray:
        return np.asarray(column, dtype=float).reshape(shape).mean(axis=1)

    values["well_formed"] = mean(rows["well_formed"])
    values["truncated"] = mean([reason == "length" for reason in rows["finish_reason"]])
    values["mean_tokens"] = mean(rows["tokens"])
    for name in ("calls", "tool_tokens"):
        if name in rows:
            values[name] = mean(rows[name])
    if "redundancy" in rows:
        values["format_violations"] = mean(np.asarray(rows["format_violations"]) > 0)
        values["redundancy"] = mean(rows["redundancy"])
        values["repetitive"] = mean(np.asarray(rows["redundancy"]) > REPETITIVE)
        values["language_mixing"] = mean(np.asarray(rows["cjk"]) > 0)
    return values


def unsolved(evaluation: Evaluation) -> list[str]:
    """Return the ids of the problems without a correct answer among all samples."""
    rows = zip(evaluation.problem_ids, evaluation.correct, strict=True)
    return [problem for problem, correct in rows if not correct.any()]


def scores(evaluation: Evaluation, values: Mapping[str, np.ndarray] | None = None) -> dict[str, Interval | None]:
    """Return every measure with its 95 % interval over problems; those of the protocol's source come first.

    ``values`` are the result of `per_problem`, if already computed. `entropy` and `branching` are means over all
    sampled tokens, None if they were not recorded; `unsolvable` is a number of problems.
    """
    values = per_problem(evaluation) if values is None else values
    intervals: dict[str, Interval | None] = {
        name: problem_interval(each, lowest=0.0, highest=1.0 if number_format(name) == ".1%" else math.inf)
        for name, each in values.items()
    }
    share = problem_interval(~evaluation.correct.any(axis=1), lowest=0.0, highest=1.0)
    count = len(evaluation.problem_ids)
    intervals["unsolvable"] = Interval(share.mean * count, share.low * count, share.high * count)
    tokens = np.asarray(evaluation.rows["tokens"], dtype=float)
    for name in ("entropy", "branching"):
        means = evaluation.rows[name]
        intervals[name] = None if None in means else _token_mean(np.asarray(means), tokens, evaluation.correct.shape)
    first = [name for name in intervals if name not in LABELS]
    return {name: intervals[name] for name in [*first, *(name for name in LABELS if name in intervals)]}


def table(evaluation: Evaluation, intervals: Mapping[str, Interval | None] | None = None) -> Table:
    """Return the scores as a table with one row per measure."""
    intervals = scores(evaluation) if intervals is None else intervals
    cells: list[list[Cell]] = [[LABELS.get(name, name), value] for name, value in intervals.items()]
    problems, samples = len(evaluation.problem_ids), evaluation.samples
    title = f"{evaluation.model} on {evaluation.task}: {problems} problems × {samples} samples, {evaluation.protocol}"
    return Table(["measure", "value"], cells, title=title, row_numbers=[number_format(name) for name in intervals])


def side_by_side(evaluations: Sequence[Evaluation]) -> Table:
    """Return a table of the same models and problems without a tool ("text") and with one ("code").

    Each row has pass@k, and per completion the tokens that the model sampled and the calls, as in Deng et al. 2025,
    Figure 2. The task is a column if there are several.
    """
    if not evaluations:
        raise ValueError("there are no evaluations to show; give the results of `evaluate`, with and without tools=")
    ks = _up_to_four([k for k in evaluations[0].ks if all(k <= other.samples for other in evaluations)])
    tasks = list(dict.fromkeys(evaluation.task for evaluation in evaluations))
    rows: list[list[Cell]] = []
    for evaluation in evaluations:
        intervals, tool = scores(evaluation), evaluation.tool
        calls: Cell = intervals["calls"] if tool else 0.0
        model = evaluation.model.removesuffix(f"+{tool}") if tool else evaluation.model
        pass_at_ks: list[Cell] = [intervals.get(f"pass@{k}") or evaluation.pass_at(k) for k in ks]
        task = [evaluation.task] if len(tasks) > 1 else []
        rows.append([model, *task, CODE if tool else TEXT, *pass_at_ks, intervals["mean_tokens"], calls])
    task_column = ["task"] if len(tasks) > 1 else []
    columns = ["model", *task_column, "with", *(f"pass@{k}" for k in ks), "model tokens", "calls"]
    numbers = {f"pass@{k}": ".1%" for k in ks} | {"model tokens": ".1f", "calls": ".2f"}
    tools = ", ".join(dict.fromkeys(evaluation.tool for evaluation in evaluations if evaluation.tool)) or "no tool"
    return Table(columns, rows, title=f"text and code ({tools}): {', '.join(tasks)}", number=numbers)


def _up_to_four(ks: list[int]) -> list[int]:
    """Return at most four of them, the first and the last included, to fit into a terminal."""
    return [ks[round(index * (len(ks) - 1) / 3)] for index in range(4)] if len(ks) > 4 else ks


def as_json(intervals: Mapping[str, Interval | None]) -> dict[str, Any]:
    """Return the scores as plain values."""
    return {name: None if value is None else asdict(value) for name, value in intervals.items()}


def _token_mean(values: np.ndarray, tokens: np.ndarray, shape: tuple[int, ...]) -> Interval:
    """Return the mean over tokens with its bootstrap interval: a ratio of two sums over the same resampled problems."""
    total, count = (values * tokens).reshape(shape).sum(axis=1), tokens.reshape(shape).sum(axis=1)
    rng, resamples = np.random.default_rng(0), 10_000
    ratios = np.empty(resamples)
    step = max(1, CHUNK // len(total))
    for start in range(0, resamples, step):
        part = ratios[start : start + step]
        indices = rng.integers(0, len(total), (len(part), len(total)))
        part[:] = total[indices].sum(axis=1) / count[indices].sum(axis=1)
    low, high = np.quantile(ratios, [0.025, 0.975])
    return Interval(float(total.sum() / count.sum()), float(low), float(high))
