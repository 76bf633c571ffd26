"""One process of a study: a run of an arm with a seed, or what all arms share (warm start and solve rates).

    python -m explorl.study.arm STUDY --arm plain-grpo --seed 0
    python -m explorl.study.arm STUDY --prepare

The study starts it with a pipe as its standard input and `--supervised`: where the pipe ends, the study has died, and
so does this. A failure leaves error.txt in the run's folder.
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
from explorl.core.text import clean
from explorl.study.spec import Study

ERROR_LINES = 12
"""How much of a traceback error.txt keeps."""


def run_folder(folder: Path, slug: str, seed: int) -> Path:
    """Where a run of a study lies."""
    return folder / "arms" / slug / f"seed-{seed}"


def trained_steps(store: RunStore) -> int:
    """The last update that the run has logged."""
    return max((record["step"] for record in store.metrics() if record.get("kind") == "train"), default=0)


def done(store: RunStore) -> bool:
    """Whether a run has its policy and the evaluation of it."""
    model = store.folder / "model"
    return model.is_dir() and (store.folder / "evaluations" / f"step-{trained_steps(store):06d}.json").exists()


def run_arm(folder: Path, slug: str, seed: int) -> None:
    """Trains and evaluates, from the last checkpoint on."""
    from explorl.training.grpo.run import is_finished, run_grpo
    from explorl.training.rft.loop import run_rft

    study = Study.read(folder)
    arm = study.arm(slug)
    config = study.arm_config(arm, seed, folder)
    place = run_folder(folder, slug, seed)

    def is_left() -> bool:
        store = _store(place, config)
        (place / "error.txt").unlink(missing_ok=True)
        return not is_finished(store)

    with locked(place) if processes.is_first() else nullcontext():
        left, store = processes.decide_on_first(is_left), RunStore(place)
        if left and arm.kind == "rft":
            run_rft(config, store, console=Console(quiet=True))
        elif left:
            budget = {key: value for key, value in study.budget.items() if key in ("tokens", "minutes")}
            stop = spent(store, budget) if budget else None
            run_grpo(config, store, console=Console(quiet=True), on_step=stop)
        if processes.is_first():
            _evaluate_end(config, store)
            shutil.rmtree(store.checkpoints, ignore_errors=True)  # a finished run resumes no more


def spent(store: RunStore, budget: Mapping[str, float]) -> Callable[[int], bool]:
    """Whether the step that has just ended has spent the tokens or minutes of a run, those before a restart included.

    It has no line of metrics yet, so it counts as the mean of the steps before it.
    """

    def stop(step: int) -> bool:
        lines = [record for record in store.metrics() if record.get("kind") == "train"]
        if step < 2 or not lines:
            return False
        used = {
            "tokens": max(record.get("num_tokens") or 0 for record in lines),
            "minutes": sum(record.get("step_time") or 0.0 for record in lines) / 60,
        }
        return any(used[key] * step / (step - 1) >= limit for key, limit in budget.items())

    return stop


def prepare(folder: Path) -> None:
    """Makes the warm start and measures the solve rates of the starting policy, where the study asks for them."""
    from explorl.core.config import load_config
    from explorl.training.grpo.run import is_finished
    from explorl.training.sft.run import run_sft

    study = Study.read(folder)
    if study.warm_start is not None:
        config = load_config(values=study.warm_start)
        store = _store(folder / "warm-start", config)
        if not is_finished(store):
            run_sft(config, store, console=Console(quiet=True))
            shutil.rmtree(store.checkpoints, ignore_errors=True)
    if study.needs_solve_rates and not (folder / "solve-rates.json").exists():
        write_json(folder / "solve-rates.json", solve_rates(study.starting_config(folder), study.solve_rate_samples))


def prepared(folder: Path, study: Study) -> bool:
    """Whether there is nothing left for `prepare` to do."""
    warm = study.warm_start is None or (folder / "warm-start" / "model").is_dir()
    return warm and (not study.needs_solve_rates or (folder / "solve-rates.json").exists())


def solve_rates(config: Config, samples: int) -> dict[str, float]:
    """Share of correct answers to each training prompt, by the evaluation's protocol."""
    import numpy as np

    from explorl.evaluation import evaluate, protocol
    from explorl.tasks import get_task
    from explorl.tasks.base import problems_of
    from explorl.training.grpo.logged_columns import prompt_text
    from explorl.training.run_setup import configured_policy, task_options

    task = get_task(config.task.name, **task_options(config))
    problems = problems_of(task, "train", config.task.train_problems)
    how = protocol(config.evaluation.protocol, samples=samples, **config.rollout.limits())
    policy = configured_policy(config)
    result = evaluate(policy, task, problems, how, template=config.task.template, seed=config.seed)
    prompts = [prompt_text(task.prompt(problem, config.task.template)) for problem in problems]
    return dict(zip(prompts, np.mean(result.correct, axis=1).tolist(), strict=True))


def _store(place: Path, config: Config) -> RunStore:
    if not (place / "config.yaml").exists():
        return RunStore.create(place, config.dump())
    store = RunStore.open(place)
    if changed := changed_keys(store.config(), config.dump()):
        key, (old, new) = next(iter(changed.items()))
        raise StoreError(
            f"{place} holds a run with another configuration ({key} is {old!r} there and {new!r} in the study); remove "
            "it, or give the study another folder"
        )
    return store


def _evaluate_end(config: Config, store: RunStore) -> None:
    """Scores the trained policy, unless the last step's evaluation is there."""
    if done(store):
        return
    from explorl.training.run_setup import configured_policy, evaluate_holdout

    step = trained_steps(store)
    result = evaluate_holdout(config, configured_policy(config, str(store.folder / "model")))
    scores = {f"pass@{k}": result.pass_at(k).mean for k in result.ks}
    if not any(record.get("kind") == "evaluation" and record["step"] == step for record in store.metrics()):
        store.append_metrics({"step": step, "kind": "evaluation", **scores})
    result.save(store.folder / "evaluations", f"step-{step:06d}")


def main(argv: list[str] | None = None) -> int:
    """Entry point of the process."""
    parser = argparse.ArgumentParser(prog="python -m explorl.study.arm")
    parser.add_argument("study", type=Path)
    parser.add_argument("--arm")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--prepare", action="store_true")
    parser.add_argument("--supervised", action="store_true")
    given = parser.parse_args(argv)
    if given.supervised:
        threading.Thread(target=_die_with_the_study, daemon=True).start()
    place = given.study if given.prepare else run_folder(given.study, given.arm, given.seed)
    try:
        with working_folder(lambda text: print(clean(text), file=sys.stderr)):
            prepare(given.study) if given.prepare else run_arm(given.study, given.arm, given.seed)
    except processes.EndedElsewhere:
        return 1
    except Exception:
        lines = clean(traceback.format_exc()).strip().splitlines()
        print(*lines, sep="\n", file=sys.stderr)
        if processes.count() == 1 or not (place / "error.txt").exists():  # the first to fail has the reason
            write_text(place / "error.txt", "\n".join(lines[-ERROR_LINES:]) + "\n")
        return 1
    return 0


def _die_with_the_study() -> Any:
    while os.read(0, 4096):
        pass
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
