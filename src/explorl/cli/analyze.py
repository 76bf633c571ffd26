"""The body of `explorl analyze`."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import typer
from rich.console import Console

from explorl.analysis.lens import Unavailable
from explorl.core.config import ConfigError, read_yaml
from explorl.core.store import kind_of
from explorl.core.terminal import literal
from explorl.report.run_analyses import Outcome, analyze_checkpoint, analyze_run


def analyze_command(
    run: Path | None,
    model: str | None,
    task: str | None,
    *,
    console: Console,
    only: Sequence[str],
    out: Path | None,
    seed: int,
    option: Sequence[str],
    samples: int,
    limit: int,
    changes: Mapping[str, Any],
    template: str | None,
    dtype: str,
    trust_remote_code: bool,
) -> None:
    """Analyses a run or a lone checkpoint and prints what was found; exit code 1 where an analysis broke."""
    own, of_task = parsed(option)

    def say(text: str) -> None:
        console.print(literal(text), style="dim", soft_wrap=True)

    if run is not None:
        if model or task or of_task:
            given = "--model" if model else "--task" if task else f"--option {next(iter(of_task))}"
            raise ConfigError(f"{given} is for a lone checkpoint; give a run alone, or --model with --task")
        if (kind := kind_of(run)) in ("study", "evaluation", "sft", "rft"):
            raise ConfigError(
                f"{run} is of kind {kind}; `explorl analyze` looks at a GRPO run, such as an arm's seed-0"
            )
        place, outcomes = analyze_run(
            run, out=out, only=only, seed=seed, options=own, say=say, trust_remote_code=trust_remote_code
        )
    elif model and task:
        if dtype not in ("float32", "bfloat16", "float16"):
            raise ConfigError(f"--dtype is {dtype!r}; use float32, bfloat16 or float16")
        place, outcomes = analyze_checkpoint(
            model, task, out=out, only=only, seed=seed, options=own, task_options=of_task, samples=samples, limit=limit,
            template=template, changes={key: value for key, value in changes.items() if value is not None},
            dtype=dtype, say=say, trust_remote_code=trust_remote_code,  # type: ignore[arg-type]
        )  # fmt: skip
    else:
        raise ConfigError("name a run, such as runs/mine, or a checkpoint with --model and --task")
    show(outcomes, console)
    console.print(literal("figures and tables: ", (place, "bold")), soft_wrap=True)
    if run is not None and out is None:
        console.print(literal("next: ", shlex.join(["explorl", "report", str(run)])), soft_wrap=True)
    if any(outcome.failed for outcome in outcomes):
        raise typer.Exit(1)


def parsed(texts: Sequence[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Options of analyses, whose names have a dot, and those of the task; values are YAML."""
    own: dict[str, Any] = {}
    of_task: dict[str, Any] = {}
    for text in texts:
        key, separator, value = text.partition("=")
        if not separator or not all(part.isidentifier() for part in key.split(".")) or key.count(".") > 1:
            raise ConfigError(f"--option {text!r} is not key=value; write it like impact.samples=8 or verifier=number")
        (own if "." in key else of_task)[key] = read_yaml(value, f"--option {text}")
    return own, of_task


def show(outcomes: Sequence[Outcome], console: Console) -> None:
    """One paragraph an analysis; those without a result last."""
    for outcome in outcomes:
        if not isinstance(outcome.result, Unavailable):
            console.print(literal((outcome.analysis.title, "bold")))
            console.print(literal(f"  {outcome.summary}"), soft_wrap=True)
    for outcome in outcomes:
        if isinstance(outcome.result, Unavailable):
            console.print(literal(f"– {outcome.analysis.title}: {outcome.summary}"), soft_wrap=True)
