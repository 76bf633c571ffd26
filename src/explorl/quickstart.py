"""The shortest way to see it work: GRPO on the embedded policy, plain and with a strategy, side by side.

It is a study of two arms and one seed, in a folder like that of any other.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console

from explorl.analysis.verdicts import points
from explorl.config import load_config
from explorl.evaluation import Evaluation, protocol
from explorl.metrics import Cell, Interval, Table, paired_difference
from explorl.report.study_page import write_report
from explorl.store import StoreError, read_parquet, step_files, write_json, write_text
from explorl.study.arm import run_folder
from explorl.study.file import Study
from explorl.study.run import run_study

ARMS: dict[str, list[str]] = {"plain GRPO": [], "GRPO + PPL shaping": ["ppl_shaping"]}


@dataclass(frozen=True)
class Result:
    """What the quickstart found."""

    evaluations: dict[str, Evaluation]
    gains: dict[str, dict[int, Interval]]
    """Paired difference to the start, by arm and k."""
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
) -> Result:
    """Evaluates, trains two arms from the same checkpoint on the same prompts, evaluates both, writes the report.

    An arm that is already in `folder` is not trained again, and one that was interrupted goes on.
    """
    began = time.monotonic()
    file = folder.with_name(f"{folder.name}.yaml")
    text = yaml.safe_dump(study_file(steps, problems, samples), sort_keys=False)
    if not file.exists() or file.read_text(encoding="utf-8") != text:
        write_text(file, text)
    outcome = run_study(file, seeds=[seed], folder=folder, jobs=jobs, console=console)
    if outcome.failed:
        raise StoreError(f"{', '.join(outcome.failed)} failed; see error.txt and log.txt under {folder / 'arms'}")
    study = Study.read(folder)
    evaluations: dict[str, Evaluation] = {}
    for arm in study.arms:
        found = [*step_files(run_folder(folder, arm.slug, seed) / "evaluations", ".parquet").values()]
        evaluations.setdefault("start", _evaluation(found[0], arm.config))
        evaluations[arm.name] = _evaluation(found[-1], arm.config)
    gains = {
        name: {
            k: paired_difference(evaluations[name].per_problem(k), evaluations["start"].per_problem(k))
            for k in (1, samples)
        }
        for name in ARMS
    }
    first = next(iter(ARMS))
    gain = gains[first][1]
    results = {
        **outcome.results,
        "verdict": (
            f"{first} changed the policy's pass@1 on held-out puzzles by {points(gain.mean)} points "
            f"[{points(gain.low)}, {points(gain.high)}], and its pass@{samples} by "
            f"{points(gains[first][samples].mean)}."
        ),
    }
    write_report(folder / "report.html", results)
    seconds = time.monotonic() - began
    write_json(
        folder / "quickstart.json",
        {
            "seconds": seconds,
            "evaluations": {name: evaluation.summary() for name, evaluation in evaluations.items()},
            "gains": {
                name: {f"pass@{k}": {"mean": i.mean, "low": i.low, "high": i.high} for k, i in by_k.items()}
                for name, by_k in gains.items()
            },
        },
    )
    return Result(evaluations, gains, folder / "report.html", seconds)


def study_file(steps: int | None, problems: int, samples: int) -> dict[str, Any]:
    """The quickstart as a study."""
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


def _evaluation(path: Path, config: dict[str, Any]) -> Evaluation:
    """An evaluation as a run has stored it."""
    rows = read_parquet(path)
    samples = config["evaluation"]["samples"]
    settings = load_config(values=config)
    how = protocol(settings.evaluation.protocol, samples=samples, max_tokens=settings.rollout.max_tokens)
    ids = rows["problem"][::samples]
    return Evaluation(settings.task.name, "tiny", settings.evaluation.protocol, samples, how.sampling, ids, rows)


def table(result: Result) -> Table:
    """Scores of the start and the arms in percent, with the gains over the start in points."""
    ks = sorted(next(iter(result.gains.values())))
    scores, gains = [f"pass@{k}" for k in ks], [f"gain in pass@{k} (points)" for k in ks]
    rows: list[list[Cell]] = []
    for name, evaluation in result.evaluations.items():
        gained = [_in_points(result.gains[name][k]) if name in result.gains else None for k in ks]
        rows.append([name, *(evaluation.pass_at(k) for k in ks), *gained])
    number = {**dict.fromkeys(scores, ".1%"), **dict.fromkeys(gains, "+.1f")}
    return Table(["", *scores, *gains], rows, title="Countdown with three numbers, tiny policy", number=number)


def _in_points(share: Interval) -> Interval:
    return Interval(100 * share.mean, 100 * share.low, 100 * share.high, share.confidence)
