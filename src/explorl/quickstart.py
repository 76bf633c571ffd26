"""The shortest way to see it work: GRPO on the embedded policy, plain and with a strategy, side by side."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from explorl.config import Config, load_config
from explorl.evaluation import Evaluation, evaluate, protocol
from explorl.metrics import Cell, Interval, Table, paired_difference
from explorl.models import load_policy
from explorl.report.figures import learning_curves
from explorl.report.page import write_page
from explorl.store import RunStore, StoreError, write_json
from explorl.tasks import get_task
from explorl.training.run import accuracy_curve, finished, run_grpo
from explorl.training.stored import progress_bar

ARMS = {"plain GRPO": [], "GRPO + PPL shaping": ["ppl_shaping"]}


@dataclass(frozen=True)
class Result:
    """What the quickstart found."""

    evaluations: dict[str, Evaluation]
    gains: dict[str, dict[int, Interval]]
    """Paired difference to the start, by arm and k."""
    report: Path
    seconds: float


def quickstart(
    folder: Path, *, seed: int = 0, steps: int | None = None, problems: int = 512, samples: int = 8, console: Console
) -> Result:
    """Evaluates, trains two arms from the same checkpoint on the same prompts, evaluates both, writes the report.

    An arm that is already in `folder` is not trained again, and one that was interrupted goes on.
    """
    began = time.monotonic()
    evaluations = {"start": _evaluate("tiny", "start", seed, problems, samples, folder, console)}
    for name, strategies in ARMS.items():
        values: dict[str, object] = {"seed": seed, "strategies": strategies}
        if steps is not None:
            values["training"] = {"steps": steps}
        config = load_config(preset="tiny", values=values)
        store = _arm(folder / name.replace(" ", "-").replace("+", "and").lower(), config)
        if finished(store):
            console.print(f"{name}: already trained, in {store.folder}")
        else:
            run_grpo(config, store, console=console, label=name)
        evaluations[name] = _evaluate(str(store.folder / "model"), name, seed, problems, samples, folder, console)
    ks = (1, samples)
    gains = {
        name: {k: paired_difference(evaluations[name].per_problem(k), evaluations["start"].per_problem(k)) for k in ks}
        for name in ARMS
    }
    seconds = time.monotonic() - began
    report = _report(folder, evaluations, gains, seconds)
    return Result(evaluations, gains, report, seconds)


def _arm(folder: Path, config: Config) -> RunStore:
    if not (folder / "config.yaml").exists():
        return RunStore.create(folder, config.dump())
    store = RunStore.open(folder)
    if store.config() != config.dump():
        raise StoreError(f"{folder} holds a run with another configuration; remove it or give another --run folder")
    return store


def _evaluate(
    model: str, name: str, seed: int, problems: int, samples: int, folder: Path, console: Console
) -> Evaluation:
    task = get_task("countdown-mini")
    with progress_bar(console) as progress:
        bar = progress.add_task(f"evaluate {name}", total=problems * samples, note="")
        result = evaluate(
            load_policy(model),
            task,
            task.problems("holdout", limit=problems),
            protocol("plain", samples=samples, max_tokens=64),
            name="plain",
            seed=seed,
            on_progress=lambda done: progress.update(bar, advance=done),
        )
    result.save(folder / "evaluations", name.replace(" ", "-").replace("+", "and").lower())
    return result


def table(result: Result) -> Table:
    """Scores of the start and the arms, with the gains over the start."""
    ks = sorted(next(iter(result.gains.values())))
    columns = ["", *(f"pass@{k}" for k in ks), *(f"gain in pass@{k}" for k in ks)]
    rows: list[list[Cell]] = []
    for name, evaluation in result.evaluations.items():
        gains = [result.gains[name][k] if name in result.gains else None for k in ks]
        rows.append([name, *(evaluation.pass_at(k) for k in ks), *gains])
    return Table(columns, rows, title="Countdown with three numbers, tiny policy", number=".1%")


def _report(
    folder: Path, evaluations: dict[str, Evaluation], gains: dict[str, dict[int, Interval]], seconds: float
) -> Path:
    stores = {name: RunStore.open(folder / name.replace(" ", "-").replace("+", "and").lower()) for name in ARMS}
    start = next(iter(evaluations.values()))
    path = folder / "report.html"
    result = Result(evaluations, gains, path, seconds)
    scores = table(result)
    write_json(
        folder / "results.json",
        {
            "seconds": seconds,
            "evaluations": {name: evaluation.summary() for name, evaluation in evaluations.items()},
            "gains": {
                name: {f"pass@{k}": {"mean": i.mean, "low": i.low, "high": i.high} for k, i in by_k.items()}
                for name, by_k in gains.items()
            },
        },
    )
    examples = [
        {"label": name, "text": "\n\n".join(_example(evaluation, index) for index in (0, 1, 2))}
        for name, evaluation in evaluations.items()
    ]
    plain = gains["plain GRPO"][1]
    write_page(
        path,
        title="Explorl quickstart",
        summary=(
            f"Plain GRPO changed the tiny policy's pass@1 on held-out puzzles by {plain.mean * 100:+.1f} points "
            f"(95 % interval {plain.low * 100:+.1f} to {plain.high * 100:+.1f})."
        ),
        table={"columns": scores.columns, "rows": [[_cell(cell) for cell in row] for row in scores.rows]},
        note=(
            f"{len(start.problem_ids)} held-out problems × {start.samples} samples at temperature 1; intervals are "
            "95 % bootstrap over problems, gains are paired. One seed: it shows that it works, not which arm is better."
        ),
        figure=learning_curves({name: accuracy_curve(store) for name, store in stores.items()}),
        caption="Correct rollouts during training: thin as measured, thick the mean of the last eight steps.",
        examples=examples,
        provenance=json.dumps(
            json.loads(stores["plain GRPO"].provenance_path.read_text(encoding="utf-8"))[-1], indent=2
        ),
    )
    return path


def _cell(cell: object) -> str:
    if isinstance(cell, Interval):
        return f"{cell:.1%}"
    return "" if cell is None else str(cell)


def _example(evaluation: Evaluation, problem: int) -> str:
    row = problem * evaluation.samples
    verdict = "correct" if evaluation.rows["correct"][row] else f"wrong: {evaluation.rows['error'][row]}"
    return f"{evaluation.rows['prompt'][row]}{evaluation.rows['completion'][row]}\n→ {verdict}"
