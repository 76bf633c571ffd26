"""The commands that analyze runs and checkpoints: quality and analyze."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from explorl.cli import output
from explorl.cli.command_options import DTYPES, TableFile, TrustRemoteCode
from explorl.cli.output import print_line, print_next, print_table
from explorl.core.config import ConfigError, read_yaml
from explorl.core.store import RunStore, kind_of
from explorl.core.terminal import literal

if TYPE_CHECKING:
    from explorl.report.run_analyses import AnalysisOutcome


def quality(
    run: Annotated[Path, typer.Argument(metavar="FOLDER", help="A training run.")],
    mark: Annotated[
        str | None,
        typer.Option(
            metavar="TEXT",
            help="Text that an answer must have exactly once, such as \\boxed{, to be well formed.",
        ),
    ] = None,
    json_file: TableFile = None,
) -> None:
    """Count malformed and repetitive answers of a run, step by step.

    Answers that mix languages are counted too.
    """
    from explorl.analysis.response_quality import quality_by_step, quality_table

    print_table(quality_table(quality_by_step(RunStore.open(run), mark=mark)), json_file)


def analyze(
    run: Annotated[Path | None, typer.Argument(metavar="FOLDER", help="A training run.")] = None,
    model: Annotated[
        str | None, typer.Option(metavar="MODEL", help="A checkpoint instead of a run; needs --task.")
    ] = None,
    task: Annotated[str | None, typer.Option(metavar="TASK", help="Task that the checkpoint answers.")] = None,
    only: Annotated[
        list[str],
        typer.Option(
            metavar="NAME", help="Analysis to run, or the import path of your own. May be repeated; by default all."
        ),
    ] = [],  # noqa: B006
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Folder for figures and tables; by default RUN/analysis, or runs/analysis-MODEL-TASK.",
        ),
    ] = None,
    seed: Annotated[int, typer.Option(metavar="N", help="Seed of every random draw.")] = 0,
    option: Annotated[
        list[str],
        typer.Option(
            metavar="KEY=VALUE",
            help="Option of an analysis, impact.samples=8, or of the task, verifier=number. May be repeated.",
        ),
    ] = [],  # noqa: B006
    samples: Annotated[int, typer.Option(metavar="N", help="Answers per problem of a checkpoint.", min=1)] = 8,
    limit: Annotated[int, typer.Option(metavar="N", help="Problems that a checkpoint answers.", min=1)] = 64,
    max_tokens: Annotated[
        int | None, typer.Option(metavar="N", help="Longest answer of a checkpoint, in tokens.", min=1)
    ] = None,
    temperature: Annotated[
        float | None, typer.Option(metavar="X", help="Temperature of a checkpoint's answers.")
    ] = None,
    template: Annotated[
        str | None, typer.Option(metavar="NAME", help="Prompt template of a checkpoint's task.")
    ] = None,
    dtype: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="Precision of a checkpoint: float32, bfloat16 or float16.",
            autocompletion=lambda: DTYPES,
        ),
    ] = "float32",
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Show what happened to stages, answers and tokens in a run.

    For a single checkpoint, run the analyses that need no training.
    """
    from explorl.report.run_analyses import analyze_checkpoint, analyze_run

    analysis_options, task_options = parse_analysis_options(option)

    def say(text: str) -> None:
        output.console.print(literal(text), style="dim", soft_wrap=True)

    if run is not None:
        if model or task or task_options:
            extra = "--model" if model else "--task" if task else f"--option {next(iter(task_options))}"
            raise ConfigError(f"{extra} is for a single checkpoint; give a run alone, or --model with --task")
        if (kind := kind_of(run)) in ("study", "evaluation", "sft", "rft"):
            raise ConfigError(f"{run} is of kind {kind}; `explorl analyze` needs a GRPO run, such as an arm's seed-0")
        folder, outcomes = analyze_run(
            run, out=out, only=only, seed=seed, options=analysis_options, say=say, trust_remote_code=trust_remote_code
        )
    elif model and task:
        if dtype not in DTYPES:
            raise ConfigError(key="--dtype", value=dtype, hint="use float32, bfloat16 or float16")
        changes = {"max_tokens": max_tokens, "temperature": temperature}
        folder, outcomes = analyze_checkpoint(
            model, task, out=out, only=only, seed=seed, options=analysis_options, task_options=task_options,
            samples=samples, limit=limit, template=template,
            changes={key: value for key, value in changes.items() if value is not None},
            dtype=dtype, say=say, trust_remote_code=trust_remote_code,  # type: ignore[arg-type]
        )  # fmt: skip
    else:
        raise ConfigError("name a run, such as runs/mine, or a checkpoint with --model and --task")
    _print_outcomes(outcomes)
    print_line("figures and tables: ", (folder, "bold"))
    if run is not None and out is None:
        print_next(["explorl", "report", str(run)])
    if any(outcome.failed for outcome in outcomes):
        raise typer.Exit(1)


def parse_analysis_options(texts: Sequence[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the options of analyses, whose names contain a dot, and those of the task; values are YAML."""
    analysis_options: dict[str, Any] = {}
    task_options: dict[str, Any] = {}
    for text in texts:
        key, separator, value = text.partition("=")
        if not separator or not all(part.isidentifier() for part in key.split(".")) or key.count(".") > 1:
            raise ConfigError(f"--option {text!r} is not key=value; write it like impact.samples=8 or verifier=number")
        (analysis_options if "." in key else task_options)[key] = read_yaml(value, f"--option {text}")
    return analysis_options, task_options


def _print_outcomes(outcomes: Sequence[AnalysisOutcome]) -> None:
    """Print one paragraph per analysis; those without a result last."""
    from explorl.analysis.lens import Unavailable

    for outcome in outcomes:
        if not isinstance(outcome.result, Unavailable):
            output.console.print(literal((outcome.analysis.title, "bold")))
            print_line(f"  {outcome.summary}")
    for outcome in outcomes:
        if isinstance(outcome.result, Unavailable):
            print_line(f"– {outcome.analysis.title}: {outcome.summary}")
