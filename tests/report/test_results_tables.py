"""The tables of docs/results are in the form in which a study writes its own."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from explorl.analysis.study_results import results_table

DOCS = Path(__file__).parents[2] / "docs" / "results"


def made_results() -> dict[str, Any]:
    """A baseline, and an arm that loses a little."""
    around = {"mean": 0.466, "low": 0.415, "high": 0.518}
    measures = {"pass@1": around, "pass@8": around, "entropy": {"mean": 0.06, "low": 0.058, "high": 0.062}}
    less = {"mean": -0.0001, "low": -0.017, "high": 0.016, "p_corrected": 1.0}
    arm = {"measures": measures, "seeds": [0, 1, 2], "failed": {}}
    return {
        "title": "a study",
        "measures": [{"key": "pass@1"}, {"key": "pass@8"}, {"key": "entropy"}],
        "arms": [
            {"name": "GRPO", **arm, "differences": None},
            {"name": "PPL", **arm, "differences": {"pass@1": less, "pass@8": less}},
        ],
    }


def form(row: str) -> str:
    """A row with its digits and signs left out, and without the arm's name."""
    return re.sub(r"[+−]?\d+\.\d+", "x", row.split(" | ", 1)[1])


def test_a_difference_is_in_points_with_a_minus_sign() -> None:
    header, _, first, second, *_ = results_table(made_results()).to_markdown().split("\n")
    assert "Δ pass@1 (points)" in header
    assert "| 0.0 [−1.7, +1.6] |" in second
    assert "46.6% [41.5%, 51.8%]" in first


@pytest.mark.parametrize("name", ["deng", "egsw", "mecklenburg"])
def test_the_tables_are_the_studys_own(name: str) -> None:
    lines = [line for line in (DOCS / f"{name}.md").read_text(encoding="utf-8").splitlines() if line.startswith("|")]
    header, rules, baseline, arm, *_ = results_table(made_results()).to_markdown().split("\n")
    assert lines[:2] == [header, rules]
    assert form(lines[2]) == form(baseline)
    assert {form(line) for line in lines[3:]} == {form(arm)}
    assert not re.search(r"−0\.0+(?!\d)", "".join(lines))
