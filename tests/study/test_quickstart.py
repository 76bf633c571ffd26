"""What the quickstart prints, from a study's results."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from explorl.cli.quickstart import ARMS, study_file, table, verdict
from explorl.report.study_numbers import format_number
from explorl.report.study_page import write_report
from explorl.strategies import build_all
from explorl.study.run_study import write_results
from explorl.study.spec import load_study


@pytest.fixture(scope="module")
def results(whole_study: Path) -> dict[str, Any]:
    """Those of a small study with a start, two arms and one that failed."""
    return write_results(whole_study)


def test_the_terminal_and_the_page_have_the_same_numbers(results: dict[str, Any], tmp_path: Path) -> None:
    """Scores and intervals to the last digit that is shown."""
    shown = table({**results, "arms": results["arms"][:2]})
    printed = io.StringIO()
    Console(file=printed, width=200).print(shown)
    write_report(tmp_path / "report.html", results)
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    for arm in [results["start"], *results["arms"][:2]]:
        for key in ("pass@1", "pass@2"):
            mean, low, high = (arm["measures"][key][end] for end in ("mean", "low", "high"))
            assert f"{mean:.1%} [{low:.1%}, {high:.1%}]" in printed.getvalue()
            assert f"[{format_number(low, '%')}, {format_number(high, '%')}]" in page
    assert shown.columns == ("", "pass@1", "pass@2", "gain in pass@1 (points)", "gain in pass@2 (points)")
    gain = results["arms"][1]["gain"]
    assert [cell.mean for cell in shown.rows[2][3:]] == pytest.approx([100 * gain["mean"][0], 100 * gain["mean"][-1]])
    assert shown.rows[0][3:] == (None, None), "the start has gained nothing"


def test_the_headline_has_both_ends_of_k_of_every_arm(results: dict[str, Any]) -> None:
    gain = {"k": [1, 2, 8], "mean": [0.128, 0.0, -0.045], "low": [0.1, 0.0, -0.08], "high": [0.15, 0.0, -0.012]}
    arms = [{"name": name, "gain": gain} for name in ("plain GRPO", "other")]
    told = verdict({**results, "arms": arms})
    for name in ("plain GRPO", "other"):
        assert f"{name} changed pass@1 by +12.8 points [+10.0, +15.0] and pass@8 by −4.5 [−8.0, −1.2]" in told
    assert "one seed" in told


def test_its_arms_keep_pass_at_k(tmp_path: Path) -> None:
    """Plain GRPO, and what was measured to keep pass@k at nearly no cost of pass@1 (docs/results/frontier.md)."""
    assert ARMS["plain GRPO"] == []
    named = {strategy.name for strategies in ARMS.values() for strategy in build_all(strategies)}
    assert named <= {"risk_sensitive", "maxrl"}
    assert named
    (tmp_path / "quick.yaml").write_text(json.dumps(study_file(None, 512, 8)))
    study = load_study(tmp_path / "quick.yaml")
    assert study.baseline == "plain GRPO"
    assert study.budget == {"steps": 90}
