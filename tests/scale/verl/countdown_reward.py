"""The reward function of the runs here, as verl loads one from a file."""

from __future__ import annotations

import json
from typing import Any

from explorl.tasks.countdown.task import verify


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None, **_: Any) -> Any:
    """1 for a right answer, 0.1 for the right form; `acc` and `pred` say what is correct and what was answered."""
    puzzle = json.loads(ground_truth)
    verdict = verify(solution_str, puzzle["nums"], puzzle["target"], opened=True)
    score = float(verdict.correct) + 0.1 * float(verdict.well_formed)
    return {"score": score, "acc": float(verdict.correct), "pred": verdict.answer or ""}
