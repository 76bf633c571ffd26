"""Run the evaluations of `explorl eval`: show their progress, then their tables."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from explorl.core.config import read_yaml
from explorl.core.store import write_json
from explorl.core.terminal import TELLING_STEPS, ProgressLines, duration, ends_of_k, literal
from explorl.core.text import clean
from explorl.evaluation.harness import (
    Evaluated,
    EvaluationProgress,
    FailedEvaluation,
    model_label,
    parse_shard,
    run_evaluation,
)
from explorl.evaluation.protocols import protocol
from explorl.evaluation.results_folder import EvaluationFolder
from explorl.evaluation.scores import side_by_side, table
from explorl.stats import Cell, Table
from explorl.training.callbacks import progress_bar

TELLING_SHARE = 0.02
"""Share of the completions that must be sampled before the remaining time is estimated."""


def parse_models(texts: Sequence[str]) -> dict[str, str]:
    """Return labels and models of ["start=tiny", "runs/a/model"]; a run's model is labelled with the run."""
    models: dict[str, str] = {}
    for text in texts:
        label, _, model = text.rpartition("=")
        label = label or model_label(model)
        if label in models:
            raise ValueError(f"{models[label]} and {model} are both called {label!r}; write another={model}")
        models[label] = model
    return models


def parse_options(texts: Sequence[str]) -> dict[str, Any]:
    """Return the task options of ["verifier=number"]; values are YAML, as in a configuration."""
    options: dict[str, Any] = {}
    for text in texts:
        key, separator, value = text.partition("=")
        if not separator or not key.isidentifier():
            raise ValueError(f"--option {text!r} is not key=value; write it like verifier=number")
        options[key] = read_yaml(value, f"--option {text}")
    return options


def evaluate_command(
    models: Sequence[str],
    tasks: Sequence[str],
    protocol_name: str,
    out: Path,
    *,
    console: Console,
    changes: Mapping[str, Any] | None = None,
    shard: str | None = None,
    json_file: Path | None = None,
    **options: Any,
) -> list[Evaluated | FailedEvaluation]:
    """Evaluate models on tasks, with a progress bar each, and print their tables.

    With several pairs of model and task, one that fails does not stop the others. ``changes`` override the protocol
    (samples, temperature, …); ``options`` go to `run_evaluation`. ``json_file`` gets the summary, or a list of them if
    there are several.
    """
    with progress_bar(console) as bar:
        bars: dict[tuple[str, str], Any] = {}
        lines: dict[tuple[str, str], _EvaluationLines] = {}

        def show(progress: EvaluationProgress) -> None:
            key = progress.model, progress.task
            lines.setdefault(key, _EvaluationLines(console, progress)).show(progress)
            if key not in bars:
                label = clean(f"{progress.model} {progress.task}", 80)
                bars[key] = bar.add_task(label, total=progress.total, note="")
            bar.update(bars[key], completed=progress.done)

        labelled, failures = parse_models(models), list[FailedEvaluation]()
        results = run_evaluation(
            labelled,
            tasks,
            protocol(protocol_name, **(changes or {})),
            out,
            name=protocol_name,
            shard=None if shard is None else parse_shard(shard),
            on_progress=show,
            on_failure=failures.append if len(labelled) * len(tasks) > 1 else None,
            **options,
        )
    _print_results(results, failures, console, with_tools=options.get("tools") is not None)
    if json_file is not None:
        summaries = [EvaluationFolder(r.folder).summary() for r in results if r.evaluation is not None]
        entries = [*summaries, *map(asdict, failures)]
        write_json(json_file, entries[0] if len(results) + len(failures) == 1 and entries else entries)
    return [*results, *failures]


def _print_results(
    results: Sequence[Evaluated], failures: Sequence[FailedEvaluation], console: Console, *, with_tools: bool
) -> None:
    """Print each evaluation's table and folder, an overview of all, the failures and the next command."""
    for result in results:
        if result.evaluation is None:
            text = f"{result.folder}: {result.missing} completions are left to other processes"
            console.print(literal(text), soft_wrap=True)
            continue
        table(result.evaluation, result.scores).print(console)
        console.print(literal(f"completions: {result.folder}"), soft_wrap=True)
    folders = [result.folder for result in results if result.evaluation is not None]
    evaluations = [result.evaluation for result in results if result.evaluation is not None]
    if with_tools:
        if evaluations:
            side_by_side(evaluations).print(console)
    elif len(results) + len(failures) > 1:
        overview(results, failures).print(console)
    for failure in failures:
        console.print(literal((f"failed: {failure.model} on {failure.task}: {failure.error}", "bold")), soft_wrap=True)
    if len(evaluations) > 1 and len({evaluation.task for evaluation in evaluations}) == 1:
        command = shlex.join(["explorl", "compare", *map(str, folders)])
        console.print(literal(f"next: {command}"), soft_wrap=True)
    elif evaluations:
        more = 2 * evaluations[0].samples
        console.print(f"next: the same command with --samples {more} samples only the missing ones", highlight=False)


def overview(results: Sequence[Evaluated], failures: Sequence[FailedEvaluation]) -> Table:
    """Return a table of pass@1 and pass@k of every model on every task."""
    scores = ends_of_k({name for result in results for name in ends_of_k(result.scores)}) or ["pass@1"]
    blank: list[Cell] = [None] * (len(scores) - 1)
    rows: list[list[Cell]] = []
    for result in results:
        identity = EvaluationFolder(result.folder).identity()
        cells = [result.scores.get(name) for name in scores] if result.evaluation else ["unfinished", *blank]
        rows.append([identity["model"], identity["task"], *cells])
    rows += [[failure.model, failure.task, "failed", *blank] for failure in failures]
    return Table(["model", "task", *scores], rows, title="all evaluations", number=".1%")


class _EvaluationLines:
    """Plain progress lines of one evaluation, for output that is not a terminal."""

    def __init__(
        self, console: Console, start: EvaluationProgress, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.lines, self.start, self.clock, self.began = ProgressLines(console, clock), start, clock, clock()

    def show(self, progress: EvaluationProgress) -> None:
        """Print a line at the first completion, every half minute and at the last."""
        sampled, total = progress.done - self.start.done, progress.total - self.start.done
        if progress.done < progress.total and (not sampled or not self.lines.due):
            return
        left = (self.clock() - self.began) / max(sampled, 1) * (progress.total - progress.done)
        can_estimate = progress.done < progress.total and sampled >= max(TELLING_STEPS, TELLING_SHARE * total)
        rest = f", {duration(left)} left" if can_estimate else ""
        self.lines.say(
            f"{progress.model} on {progress.task}: {progress.done:,} of {progress.total:,} completions{rest}"
        )
