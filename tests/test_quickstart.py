"""What the quickstart prints."""

from __future__ import annotations

import io
from pathlib import Path

from rich.console import Console

from explorl.evaluation import Evaluation
from explorl.metrics import Interval
from explorl.quickstart import Result, table
from explorl.rollout import SamplingParams


def evaluation(correct: list[list[bool]]) -> Evaluation:
    ids = [str(place) for place in range(len(correct))]
    rows = {"correct": [mark for marks in correct for mark in marks]}
    return Evaluation("countdown-mini", "tiny", "plain", len(correct[0]), SamplingParams(), ids, rows)


def test_scores_are_in_percent_and_gains_in_points() -> None:
    scores = {"start": evaluation([[True, False]] * 4), "plain GRPO": evaluation([[True, True]] * 4)}
    gains = {"plain GRPO": {1: Interval(0.118, 0.093, 0.144), 2: Interval(-0.078, -0.113, 0.0)}}
    found = table(Result(scores, gains, Path("report.html"), 1.0))
    printed = io.StringIO()
    Console(file=printed, width=200).print(found)
    assert "50.0% [50.0%, 50.0%]" in printed.getvalue()
    assert found.columns[3:] == ("gain in pass@1 (points)", "gain in pass@2 (points)")
    assert "+11.8 [+9.3, +14.4]" in printed.getvalue()
    assert "−7.8 [−11.3, 0.0]" in printed.getvalue()
