"""Text and code side by side: the same models and problems without a tool and with one (Deng et al. 2025, Figure 2)."""

from __future__ import annotations

from collections.abc import Sequence

from explorl.evaluation.evaluation import Evaluation
from explorl.evaluation.scores import scores
from explorl.stats import Cell, Table

TEXT, CODE = "text", "code"


def side_by_side(evaluations: Sequence[Evaluation]) -> Table:
    """pass@k of every evaluation, and what it took: tokens that the model sampled, and calls, each per completion.

    A row for each; "text" is without a tool, "code" with one. The task is a column where there are several.
    """
    if not evaluations:
        raise ValueError("there are no evaluations to show; give the results of `evaluate`, with and without tools=")
    ks = _some([k for k in evaluations[0].ks if all(k <= other.samples for other in evaluations)])
    tasks = list(dict.fromkeys(one.task for one in evaluations))
    rows: list[list[Cell]] = []
    for one in evaluations:
        found = scores(one)
        calls: Cell = found["calls"] if one.tool else 0.0
        model = one.model.removesuffix(f"+{one.tool}") if one.tool else one.model
        reached: list[Cell] = [found.get(f"pass@{k}") or one.pass_at(k) for k in ks]
        asked = [one.task] if len(tasks) > 1 else []
        rows.append([model, *asked, CODE if one.tool else TEXT, *reached, found["mean_tokens"], calls])
    columns = [
        "model",
        *(["task"] if len(tasks) > 1 else []),
        "with",
        *(f"pass@{k}" for k in ks),
        "model tokens",
        "calls",
    ]
    numbers = {f"pass@{k}": ".1%" for k in ks} | {"model tokens": ".1f", "calls": ".2f"}
    tools = ", ".join(dict.fromkeys(one.tool for one in evaluations if one.tool)) or "no tool"
    return Table(columns, rows, title=f"text and code ({tools}): {', '.join(tasks)}", number=numbers)


def _some(ks: list[int]) -> list[int]:
    """At most four of them, the first and the last included: what fits into a terminal."""
    return [ks[round(place * (len(ks) - 1) / 3)] for place in range(4)] if len(ks) > 4 else ks
