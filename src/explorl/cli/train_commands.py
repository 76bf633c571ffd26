"""The commands that train a policy: train, sft and rft."""

from __future__ import annotations

import json
import os
import shlex
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from explorl.cli import output
from explorl.cli.command_options import ConfigFile, LaunchFile, Overrides, Preset, Resume, RunFolder
from explorl.cli.output import print_line, print_policy
from explorl.core import launch as launcher
from explorl.core import processes
from explorl.core.config import (
    Config,
    ConfigError,
    changed_keys,
    check_engine,
    check_precision,
    check_trackers,
    load_config,
    resumed_config,
    rft_config,
    unsandboxed_code,
)
from explorl.core.store import RunStore, file_name, resume_command
from explorl.core.terminal import print_change


class RunArguments(NamedTuple):
    """The arguments that say which run to start or to resume."""

    config: Path | None
    preset: str | None
    overrides: list[str]
    run: Path | None
    resume: Path | None

    def as_options(self) -> list[str]:
        """Return the arguments as they are written on a command line."""
        changes = [("--set", change) for change in self.overrides]
        paths = ("--run", self.run), ("--resume", self.resume)
        return launcher.command_line(("--config", self.config), ("--preset", self.preset), *changes, *paths)


def train(
    config: ConfigFile = None,
    preset: Preset = None,
    overrides: Overrides = [],  # noqa: B006 (typer's way)
    run: RunFolder = None,
    resume: Resume = None,
    launch: LaunchFile = None,
) -> None:
    """Train a policy with GRPO and the strategies you choose.

    To continue a run, use --resume FOLDER; with --set training.steps=400, it also makes a finished run longer.
    """
    arguments = RunArguments(config, preset, overrides, run, resume)
    if launch is not None:
        launcher.launch(launch, "explorl", ["train", *arguments.as_options()])
        return
    started = _start_on_all_processes(arguments, kind="grpo")
    if started is None:
        return
    store, settings = started
    from explorl.training.grpo.run import run_grpo

    with _resumable(store):
        model = run_grpo(settings, store, console=output.console, alone=processes.is_first())
    print_change(store.metrics(), output.console)
    print_policy(model, ["explorl", "report", str(store.folder)], _scoring_command(settings, model))


def sft(
    config: ConfigFile = None,
    preset: Preset = None,
    overrides: Overrides = [],  # noqa: B006
    run: RunFolder = None,
    resume: Resume = None,
    launch: LaunchFile = None,
) -> None:
    """Fine-tune a policy on reference solutions before RL."""
    arguments = RunArguments(config, preset, overrides, run, resume)
    if launch is not None:
        launcher.launch(launch, "explorl", ["sft", *arguments.as_options()])
        return
    started = _start_on_all_processes(arguments, kind="sft")
    if started is None:
        return
    store, settings = started
    from explorl.training.sft.run import run_sft

    with _resumable(store):
        model = run_sft(settings, store, console=output.console, alone=processes.is_first())
    print_policy(model, ["explorl", "train", "--config", str(store.config_path), "--set", f"model.name={model}"])


def rft(
    config: ConfigFile = None,
    preset: Preset = None,
    overrides: Overrides = [],  # noqa: B006
    run: RunFolder = None,
    resume: Resume = None,
) -> None:
    """Fine-tune a policy on the best of what it samples itself.

    Sample, filter, select, fit, and repeat. To continue a run, use --resume FOLDER; with --set rft.iterations=8, it
    also makes a finished run longer.
    """
    store, settings = _start(RunArguments(config, preset, overrides, run, resume), kind="rft")
    from explorl.training.rft.loop import next_stage, run_rft

    settings = rft_config(settings)
    _check_not_fewer_iterations(settings, store)
    if (store.folder / "model").is_dir() and next_stage(settings, store) is None:
        _print_finished(store, f"rft.iterations={2 * settings.rft.iterations}")
        return
    try:
        model = run_rft(settings, store, console=output.console, alone=processes.is_first())
    except KeyboardInterrupt as interrupt:
        stage = next_stage(settings, store)
        if not store.config_path.exists() or stage is None:
            raise
        place = f"iteration {stage[0]}, {stage[1]}"
        raise type(interrupt)(f"resume ({place}) with: {resume_command(store.folder)}") from interrupt
    finally:
        store.unlock()
    print_change(store.metrics(), output.console)
    print_policy(model, ["explorl", "report", str(store.folder)])


# ---------------------------------------------------------------------------- starting and resuming
def _start(arguments: RunArguments, *, kind: str) -> tuple[RunStore, Config]:
    """Return the folder and configuration of a new run, whose folder is not created yet, or of the run to resume."""
    if arguments.resume is not None:
        if arguments.config or arguments.preset or arguments.run:
            raise ConfigError("--resume takes the run's own configuration; leave out --config, --preset and --run")
        store = RunStore.open(arguments.resume)
        store.check_kind(kind)
        store.config()  # an empty file would be all defaults
        stored = load_config(store.config_path)
        config = resumed_config(stored, arguments.overrides, kind, str(store.config_path))
        _check_extension(store, stored, config)
    else:
        config = load_config(arguments.config, preset=arguments.preset, overrides=arguments.overrides)
        name = f"{kind}-{file_name(config.task.name)}-{time.strftime('%Y%m%d-%H%M%S')}"
        store = RunStore(arguments.run or Path("runs") / name)
        store.require_empty()
    if kind == "grpo":
        check_trackers(config.training.report_to)
        check_engine(config.rollout.engine)
    check_precision(config.model.dtype)
    from explorl.models import resolve_model

    if kind != "sft" or not config.sft.from_scratch:
        resolve_model(config.model.name)
    for line in unsandboxed_code(config.dump()):
        print_line(line)
    return store, config


def _start_on_all_processes(arguments: RunArguments, *, kind: str) -> tuple[RunStore, Config] | None:
    """Return what `_start` returns on the first process, on all of them; print so and return None if it is finished."""
    if not processes.is_first():
        output.console.quiet = True
        warnings.simplefilter("ignore")  # the first process gives the same warnings

    def decide() -> tuple[Path, Config] | None:
        store, settings = _start(arguments, kind=kind)
        return None if _is_finished(store, settings, kind) else (store.folder, settings)

    started = processes.decide_on_first(decide)
    return None if started is None else (RunStore(started[0]), started[1])


def _check_extension(store: RunStore, stored: Config, config: Config) -> None:
    """Raise ConfigError if a run would become shorter; warn if its learning rate was scheduled for fewer steps."""
    changed = changed_keys(stored.dump(), config.dump())
    for key in {"training.steps", "sft.epochs"} & changed.keys():
        old, new = changed[key]
        if new < old:
            raise ConfigError(f"it was {old} in {store.config_path}", key=key, value=new, hint=f"use {old} or more")
        schedule = (stored.training if key == "training.steps" else stored.sft).schedule
        if schedule != "constant":
            print_line(
                f"The schedule is {schedule}: the learning rate has been falling towards {old} {key.split('.')[1]}, so "
                f"the result will differ from a run of {new} from the start."
            )


def _check_not_fewer_iterations(config: Config, store: RunStore) -> None:
    """Raise ConfigError if an RFT run would become shorter."""
    if not store.config_path.exists() or not store.has_steps:
        return
    old, new = store.config().get("rft", {}).get("iterations", 0), config.rft.iterations
    if new < old:
        problem = f"it was {old} in {store.config_path}"
        raise ConfigError(problem, key="rft.iterations", value=new, hint=f"use {old} or more")


def _is_finished(store: RunStore, config: Config, kind: str) -> bool:
    """Return whether nothing is left to train, and print so."""
    if not (store.folder / "model").is_dir():
        return False
    key = "training.steps" if kind == "grpo" else "sft.epochs"
    if key in changed_keys(store.config(), config.dump()):
        return False
    _print_finished(store, f"{key}={2 * (config.training.steps if kind == 'grpo' else config.sft.epochs):g}")
    return True


def _print_finished(store: RunStore, change: str) -> None:
    """Print that a run is finished, and the command that makes it longer."""
    print_line(f"{store.folder} is finished; its policy is {store.folder / 'model'}")
    print_line(f"to train it further: {resume_command(store.folder)} --set {change}")


@contextmanager
def _resumable(store: RunStore) -> Iterator[None]:
    """Release the run's lock at the end; on an interruption, add the command that resumes the run."""
    try:
        yield
    except KeyboardInterrupt as interrupt:
        if not store.config_path.exists():
            raise
        last = store.last_checkpoint()
        place = f"from {last.name}" if last else "from the beginning: it had no checkpoint yet"
        launch_file = os.environ.get(processes.LAUNCH_FILE)
        launch = f" --launch {shlex.quote(launch_file)}" if launch_file else ""
        raise type(interrupt)(f"resume ({place}) with: {resume_command(store.folder)}{launch}") from interrupt
    finally:
        store.unlock()


# ---------------------------------------------------------------------------- the next command
def _scoring_command(settings: Config, model: Path) -> list[str]:
    """Return the command that scores the policy before and after training, with prompts and sampling as in training."""
    task, rollout, evaluation = settings.task, settings.rollout, settings.evaluation
    options = [
        ("--data-dir", value) if key == "data_dir" else ("--option", f"{key}={json.dumps(value, ensure_ascii=False)}")
        for key, value in task.options.items()
    ]
    dtype = settings.model.evaluation_dtype
    arguments = (
        ("--model", f"start={settings.model.name}"),
        ("--model", f"trained={model}"),
        ("--dtype", None if dtype == "float32" else dtype),
        ("--protocol", evaluation.protocol),
        ("--samples", evaluation.samples),
        ("--task", task.name),
        *options,
        ("--template", task.template or _default_template(settings)),
        ("--max-tokens", rollout.max_tokens),
        *[("--stop", text) for text in rollout.stop],
        *((("--tools", rollout.tools), ("--tool-calls", rollout.tool_calls)) if rollout.tools else ()),
    )
    trust = ["--trust-remote-code"] if settings.model.trust_remote_code else []
    return ["explorl", *launcher.command_line("eval", *arguments, *trust)]


def _default_template(settings: Config) -> str | None:
    """Return the task's default template: `eval` would prompt chat models in messages, however they were trained."""
    from explorl.tasks import get_task
    from explorl.tasks.base import problems_of

    try:
        task = get_task(settings.task.name, **settings.task.options)
        if not task.templates:
            return None
        (problem,) = problems_of(task, "train", 1)
        prompt = task.prompt(problem)
        return next((name for name in task.templates if task.prompt(problem, name) == prompt), None)
    except Exception:  # a task's own code, or a missing file: training has succeeded, and this only suggests a command
        return None
