"""One process of a study: a run of an arm with a seed, or the preparation that all arms share.

    python -m explorl.study.arm STUDY --arm plain-grpo --seed 0
    python -m explorl.study.arm STUDY --prepare

The study starts it with a pipe as its standard input and `--supervised`: when the pipe closes, the study has died, and
this process exits too. A failure leaves error.txt in the run's folder.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from rich.console import Console

from explorl.core import processes
from explorl.core.config import Config, changed_keys
from explorl.core.plugins import working_folder
from explorl.core.store import RunStore, StoreError, locked, write_json, write_text
from explorl.core.terminal import plain_warnings
from explorl.core.text import clean
from explorl.study.spec import Study

ERROR_LINES = 12
"""Lines of a traceback that error.txt keeps."""


def run_folder(folder: Path, slug: str, seed: int) -> Path:
    """Return the folder of a run."""
    return folder / "arms" / slug / f"seed-{seed}"


def trained_steps(store: RunStore) -> int:
    """Return the last update that the run has logged."""
    return max((record["step"] for record in store.metrics("train")), default=0)


def is_done(store: RunStore) -> bool:
    """Tell whether a run has its policy and that policy's evaluation."""
    model = store.folder / "model"
    return model.is_dir() and (store.folder / "evaluations" / f"step-{trained_steps(store):06d}.json").exists()


def run_arm(folder: Path, slug: str, seed: int) -> None:
    """Train from the last checkpoint and evaluate."""
    from explorl.training.grpo.run import is_finished, run_grpo
    from explorl.training.rft.loop import run_rft

    study = Study.read(folder)
    arm = study.arm(slug)
    config = study.arm_config(arm, seed, folder)
    path = run_folder(folder, slug, seed)

    def is_pending() -> bool:
        store = _open_store(path, config)
        (path / "error.txt").unlink(missing_ok=True)
        return not is_finished(store)

    with locked(path) if processes.is_first() else nullcontext():
        pending, store = processes.decide_on_first(is_pending), RunStore(path)
        if pending and arm.kind == "rft":
            run_rft(config, store, console=Console(quiet=True))
        elif pending:
            budget = {key: value for key, value in study.budget.items() if key in ("tokens", "minutes")}
            stop = budget_check(store, budget) if budget else None
            run_grpo(config, store, console=Console(quiet=True), on_step=stop)
        if processes.is_first():
            _evaluate_end(config, store)
            shutil.rmtree(store.checkpoints, ignore_errors=True)  # a finished run does not resume


def budget_check(store: RunStore, budget: Mapping[str, float]) -> Callable[[int], bool]:
    """Return a function that tells after a step whether the tokens or minutes of the run are used up.

    Steps before a restart count. The step that has just ended is not logged yet and counts as the mean of the others.
    """

    def stop(step: int) -> bool:
        lines = store.metrics("train")
        if step < 2 or not lines:
            return False
        used = {
            "tokens": max(record.get("num_tokens") or 0 for record in lines),
            "minutes": sum(record.get("step_time") or 0.0 for record in lines) / 60,
        }
        return any(used[key] * step / (step - 1) >= limit for key, limit in budget.items())

    return stop


def prepare(folder: Path) -> None:
    """Train the warm start and measure the solve rates of the starting policy, if the study needs them."""
    from explorl.core.config import load_config
    from explorl.training.grpo.run import is_finished
    from explorl.training.sft.run import run_sft

    study = Study.read(folder)
    if study.warm_start is not None:
        config = load_config(values=study.warm_start)
        store = _open_store(folder / "warm-start", config)
        if not is_finished(store):
            run_sft(config, store, console=Console(quiet=True))
            shutil.rmtree(store.checkpoints, ignore_errors=True)
    if study.needs_solve_rates and not (folder / "solve-rates.json").exists():
        write_json(folder / "solve-rates.json", solve_rates(study.starting_config(folder), study.solve_rate_samples))


def is_prepared(folder: Path, study: Study) -> bool:
    """Tell whether `prepare` has nothing left to do."""
    has_start = study.warm_start is None or (folder / "warm-start" / "model").is_dir()
    return has_start and (not study.needs_solve_rates or (folder / "solve-rates.json").exists())


def solve_rates(config: Config, samples: int) -> dict[str, float]:
    """Return the share of correct completions per training prompt, under the evaluation's protocol."""
    import numpy as np

    from explorl.evaluation import evaluate, protocol
    from explorl.tasks import get_task
    from explorl.tasks.base import problems_of
    from explorl.training.grpo.logged_columns import prompt_text
    from explorl.training.run_setup import configured_policy

    task = get_task(config.task.name, **config.task.options)
    problems = problems_of(task, "train", config.task.train_problems)
    settings = protocol(config.evaluation.protocol, samples=samples, **config.rollout.limits())
    policy = configured_policy(config)
    result = evaluate(policy, task, problems, settings, template=config.task.template, seed=config.seed)
    prompts = [prompt_text(task.prompt(problem, config.task.template)) for problem in problems]
    return dict(zip(prompts, np.mean(result.correct, axis=1).tolist(), strict=True))


def _open_store(folder: Path, config: Config) -> RunStore:
    """Open or create a run's folder; raise `StoreError` if it holds a run with another configuration."""
    if not (folder / "config.yaml").exists():
        return RunStore.create(folder, config.dump())
    store = RunStore.open(folder)
    if changed := changed_keys(store.config(), config.dump()):
        key, (old, new) = next(iter(changed.items()))
        raise StoreError(
            f"{folder} holds a run with another configuration ({key} is {old!r} there and {new!r} in the study); "
            "remove it, or choose another folder for the study"
        )
    return store


def _evaluate_end(config: Config, store: RunStore) -> None:
    """Evaluate the trained policy, unless the last step's evaluation exists."""
    if is_done(store):
        return
    from explorl.training.run_setup import configured_policy, evaluate_holdout

    step = trained_steps(store)
    result = evaluate_holdout(config, configured_policy(config, str(store.folder / "model")))
    scores = {f"pass@{k}": result.pass_at(k).mean for k in result.ks}
    if not any(record["step"] == step for record in store.metrics("evaluation")):
        store.append_metrics({"step": step, "kind": "evaluation", **scores})
    result.save(store.folder / "evaluations", f"step-{step:06d}")


def main(argv: list[str] | None = None) -> int:
    """Run the process."""
    parser = argparse.ArgumentParser(prog="python -m explorl.study.arm")
    parser.add_argument("study", type=Path)
    parser.add_argument("--arm")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--prepare", action="store_true")
    parser.add_argument("--supervised", action="store_true")
    options = parser.parse_args(argv)
    if options.supervised:
        threading.Thread(target=_exit_with_study, daemon=True).start()
    folder = options.study if options.prepare else run_folder(options.study, options.arm, options.seed)
    try:
        with plain_warnings(), working_folder(lambda text: print(clean(text), file=sys.stderr)):
            prepare(options.study) if options.prepare else run_arm(options.study, options.arm, options.seed)
    except processes.EndedElsewhere:
        return 1
    except Exception:
        lines = clean(traceback.format_exc()).strip().splitlines()
        print(*lines, sep="\n", file=sys.stderr)
        if processes.count() == 1 or not (folder / "error.txt").exists():  # the first process to fail has the cause
            write_text(folder / "error.txt", "\n".join(lines[-ERROR_LINES:]) + "\n")
        return 1
    return 0


def _exit_with_study() -> Any:
    """Exit when standard input closes."""
    while os.read(0, 4096):
        pass
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
