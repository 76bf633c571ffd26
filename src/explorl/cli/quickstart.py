"""Run the quickstart: GRPO on the embedded policy, plain and with a strategy, side by side.

It is a study of two arms and one seed, with the folder of any other study.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console

from explorl.analysis.study_results import cell
from explorl.analysis.verdicts import points
from explorl.core.config import load_config
from explorl.core.store import StoreError, write_json, write_text
from explorl.core.terminal import ends_of_k
from explorl.report.study_page import write_report
from explorl.stats import Cell, Table
from explorl.study.run_study import run_study

ARMS: dict[str, list[str]] = {"plain GRPO": [], "risk-sensitive GRPO": ["risk_sensitive"]}


@dataclass(frozen=True)
class QuickstartResult:
    """The results of the quickstart and where its report is."""

    results: dict[str, Any]
    study: Path
    """The study file."""
    report: Path
    seconds: float


def quickstart(
    folder: Path,
    *,
    seed: int = 0,
    steps: int | None = None,
    problems: int = 512,
    samples: int = 8,
    jobs: int | None = None,
    console: Console,
) -> QuickstartResult:
    """Train two arms from the same checkpoint on the same prompts, evaluate them before and after, write the report.

    An arm that is finished in `folder` is not trained again, and an interrupted one is resumed.
    """
    began = time.monotonic()
    file = folder.with_name(f"{folder.name}.yaml")
    text = yaml.safe_dump(study_file(steps, problems, samples), sort_keys=False)
    if not file.exists() or file.read_text(encoding="utf-8") != text:
        write_text(file, text)
    outcome = run_study(file, seeds=[seed], folder=folder, jobs=jobs, console=console)
    if outcome.failed:
        raise StoreError(f"{', '.join(outcome.failed)} failed; see error.txt and log.txt under {folder / 'arms'}")
    results = {**outcome.results, "verdict": verdict(outcome.results)}
    write_json(folder / "results.json", results)
    write_report(folder / "report.html", results)
    return QuickstartResult(results, file, folder / "report.html", time.monotonic() - began)


def verdict(results: Mapping[str, Any]) -> str:
    """Return a sentence on how training changed pass@1 and pass@k of each arm."""
    arms = []
    for arm in results["arms"]:
        gain = arm["gain"]
        parts = [
            f"pass@{gain['k'][at]} by {points(gain['mean'][at])}{'' if at else ' points'} "
            f"[{points(gain['low'][at])}, {points(gain['high'][at])}]"
            for at in _ends(gain)
        ]
        arms.append(f"{arm['name']} changed {' and '.join(parts)}")
    return f"On held-out puzzles {'; '.join(arms)}. This is one seed; other seeds will differ."


def study_file(steps: int | None, problems: int, samples: int) -> dict[str, Any]:
    """Return the content of the study file."""
    steps = steps or load_config(preset="tiny").training.steps
    return {
        "name": "quickstart",
        "title": "Explorl quickstart",
        "description": (
            "The embedded policy on Countdown with three numbers, trained by GRPO, plain and with a strategy. "
            "One seed: it shows that it works, not which arm is better."
        ),
        "base": {"preset": "tiny"},
        "baseline": "plain GRPO",
        "arms": {name: {"strategies": strategies} for name, strategies in ARMS.items()},
        "budget": {"steps": steps},
        "evaluation": {"protocol": "plain", "every": max(1, steps // 2), "problems": problems, "samples": samples},
    }


def table(results: Mapping[str, Any]) -> Table:
    """Return the scores of the start and the arms in percent, with the gains over the start in points."""
    scores = ends_of_k(results["start"]["measures"])
    gains = [f"gain in {name} (points)" for name in scores]
    rows: list[list[Cell]] = [
        ["start", *(cell(results["start"]["measures"][name]) for name in scores), *[None] * len(scores)]
    ]
    for arm in results["arms"]:
        gain, measured = arm["gain"], [cell(arm["measures"][name]) for name in scores]
        ends = [{end: gain[end][at] for end in ("mean", "low", "high")} for at in _ends(gain)]
        rows.append([arm["name"], *measured, *(cell(change, 100) for change in ends)])
    number = {**dict.fromkeys(scores, ".1%"), **dict.fromkeys(gains, "+.1f")}
    return Table(["", *scores, *gains], rows, title="Countdown with three numbers, tiny policy", number=number)


def _ends(gain: Mapping[str, Any]) -> list[int]:
    """Return the positions of the smallest and the largest k."""
    return list(dict.fromkeys((0, len(gain["k"]) - 1)))
