"""Run studies: arms × seeds, one process per run, and one table with intervals.

    STUDY/study.json                  the resolved study
    STUDY/warm-start/                 an SFT run, if all arms start from one
    STUDY/arms/<arm>/seed-<n>/        the runs, each with its log and, if it failed, error.txt
    STUDY/results.json, report.html   computed from the runs, as are table.csv, .tex and .md

A restarted study skips finished runs, resumes interrupted ones and retries failed ones. All arms share seeds, and a
seed fixes the order of the prompts and the held-out problems, so comparisons are paired.
"""

from __future__ import annotations

import heapq
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn

from explorl.analysis.interim_looks import CONTINUES, EFFICACY, FAILED, FUTILITY
from explorl.analysis.study_results import results_table, study_results
from explorl.core.config import ConfigError, check_precision, check_trackers
from explorl.core.launch import check_file, python_command
from explorl.core.plugins import child_environment
from explorl.core.store import RunStore, StoreError, is_locked, locked, read_study, write_json, write_text
from explorl.core.terminal import Pace, ProgressLines, duration, ends_of_k, format_scores, literal
from explorl.core.text import clean
from explorl.stats import Cell, Table
from explorl.study.arm import is_done, is_prepared, run_folder, trained_steps
from explorl.study.compatibility import arm_difference, study_difference
from explorl.study.plan import arm_changes, effect_text, size_text, unsandboxed_warnings
from explorl.study.spec import WITHOUT_WARM_START, Arm, Study, inert_settings, load_study

POLL = 0.2
"""Seconds between polls of the processes."""


@dataclass(frozen=True)
class StudyOutcome:
    """The results of a study, and which runs failed."""

    folder: Path
    results: dict[str, Any]
    failed: list[str]
    """Failed runs, as `arm, seed n`."""

    @property
    def table(self) -> Table:
        """The arms with their scores and differences."""
        return results_table(self.results)


def run_study(
    path: str | Path,
    *,
    profile: str | None = None,
    seeds: int | Sequence[int] | None = None,
    jobs: int | None = None,
    folder: str | Path | None = None,
    only: Sequence[str] | None = None,
    launch: Path | None = None,
    overrides: Sequence[str] = (),
    console: Console,
) -> StudyOutcome:
    """Run what is missing of a study, `jobs` processes at a time, and write results.json.

    By default there is one job per GPU or, without GPUs, per core with 4 GiB of memory. `only` names the arms to run;
    the results cover all finished runs. `launch` is a configuration file of accelerate: each run then uses all its
    processes, one run after another. `overrides` change the study's base.
    """
    if launch is not None:
        check_file(launch)
        if jobs not in (None, 1):
            raise ConfigError(f"--jobs is {jobs}, but with --launch each run uses all processes; remove one of the two")
        jobs = 1
    jobs = default_jobs() if jobs is None else jobs
    if jobs < 1:
        raise ConfigError(f"jobs is {jobs}; use 1 or more")
    study = load_study(path, profile=profile, seeds=seeds, overrides=overrides)
    arms = [study.arm(name) for name in only] if only else list(study.arms)
    if launch is not None and (rft_arms := [arm.name for arm in arms if arm.kind == "rft"]):
        raise ConfigError(
            f"arm {rft_arms[0]!r} is of kind rft, which runs in one process; remove --launch, or name the other arms "
            "with --only"
        )
    check_resources(study)
    study_folder = Path(folder) if folder is not None else default_folder(study)
    before = (
        [arm["name"] for arm in read_study(study_folder)["arms"]] if (study_folder / "study.json").exists() else None
    )
    with locked_study(study_folder, study) as study:
        for message in arm_changes(before, [arm.name for arm in study.arms]) if before else ():
            console.print(literal(message), soft_wrap=True)
        _print_plan(study, study_folder, console)
        first = study.seeds if study.sequential is None else study.seeds[: study.sequential["first"]]
        runs = [StudyRun(study_folder, arm, seed, launch) for seed in first for arm in arms]
        _run_pending(runs, study, study_folder, jobs, console)
        if study.sequential is not None:
            later = _runs_after_interim_look(study, study_folder, arms, console, launch)
            _run_pending(later, study, study_folder, jobs, console)
            runs += later
        results = write_results(study_folder)
    failed = [run.label for run in runs if not run.done]
    for label in failed:
        console.print(literal((f"failed: {label}", "bold")))
    return StudyOutcome(study_folder, results, failed)


def default_jobs() -> int:
    """Return how many processes this machine can run at a time."""
    if devices := _devices():
        return len(devices)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return max(1, min(os.cpu_count() or 1, memory >> 32))


def default_folder(study: Study) -> Path:
    """Return a study's default folder."""
    return Path("runs") / (f"{study.name}-{study.profile}" if study.profile else study.name)


def write_results(folder: str | Path) -> dict[str, Any]:
    """Write results.json, its table as CSV, LaTeX and Markdown, and the report, all computed from the runs."""
    from explorl.report.study_page import write_report

    path = Path(folder)
    results = study_results(path)
    write_json(path / "results.json", results)
    for name in ("table.csv", "table.tex", "table.md"):
        results_table(results).write(path / name)
    write_report(path / "report.html", results)
    return results


def study_status(folder: str | Path) -> Table:
    """Return a table of each run's progress; "later" marks runs that wait for the interim look."""
    path = Path(folder)
    study = Study.read(path)
    later = study.seeds[study.sequential["first"] :] if study.sequential else ()
    rows: list[list[Cell]] = []
    runs = [StudyRun(path, arm, seed) for arm in study.arms for seed in study.seeds]
    metrics = [run.store.metrics() for run in runs]
    score_names = ends_of_k(
        {key for lines in metrics for line in lines if line.get("kind") == "evaluation" for key in line}
    )
    for run, lines in zip(runs, metrics, strict=True):
        state = "later" if run.state == "waiting" and run.seed in later else run.state
        scores: dict[str, Any] = next((line for line in reversed(lines) if line.get("kind") == "evaluation"), {})
        seconds = sum(line.get("step_time") or 0.0 for line in lines if line.get("kind") == "train")
        rows.append([run.arm.name, run.seed, state, run.step, *map(scores.get, score_names), seconds])
    return Table(
        ["arm", "seed", "state", "step", *score_names, "seconds"],
        rows,
        title=f"{study.title}, {path}",
        number={**dict.fromkeys(score_names, ".1%"), "seconds": ".0f"},
    )


def check_resources(study: Study) -> None:
    """Raise if a policy, tracker or precision is not available, before anything runs; hub ids are not looked up."""
    from explorl.models import resolve_model

    names = [study.warm_start["model"]["name"]] if study.warm_start else []
    names += [] if study.warm_start else [arm.config["model"]["name"] for arm in study.arms]
    for name in dict.fromkeys(names):
        resolve_model(name)
    for arm in study.arms:
        check_trackers(arm.config["training"]["report_to"])
        check_precision(arm.config["model"]["dtype"])


# ---------------------------------------------------------------------------- the folder
@contextmanager
def locked_study(folder: Path, study: Study) -> Iterator[Study]:
    """Lock a study's folder and write study.json; yield the study, with arms and seeds that the folder already had."""
    require_study_folder(folder)
    with locked(folder):
        record = {**study.record(), "created": datetime.now(UTC).date().isoformat()}
        if (folder / "study.json").exists():
            old = read_study(folder)
            _refuse_other_study(folder, old, record)
            record["created"] = old["created"]
            if study.sequential is None:
                record["seeds"] = list(dict.fromkeys([*old["seeds"], *record["seeds"]]))
        write_json(folder / "study.json", record)
        yield Study.read(folder)


def require_study_folder(folder: Path) -> None:
    """Raise `StoreError` if the folder has anything but a study."""
    if (folder / "config.yaml").exists():
        raise StoreError(f"{folder} holds a run, not a study; name another folder")
    if folder.is_dir() and not (folder / "study.json").exists():
        others = [path.name for path in folder.iterdir() if path.name != ".lock"]
        if others:
            raise StoreError(f"{folder} is not empty and holds no study ({others[0]}); name another folder")


def _refuse_other_study(folder: Path, old: dict[str, Any], new: dict[str, Any]) -> None:
    """Raise `StoreError` if the folder's runs and new ones are not comparable; arms without runs do not matter."""
    advice = "name another folder, or remove this one"
    if change := study_difference(old, new):
        raise StoreError(f"{folder} holds another study: {change}; {advice}")
    for arm in old["arms"]:
        runs = folder / "arms" / arm["slug"]
        if any(runs.glob("seed-*/config.yaml")) and (change := arm_difference(arm["name"], old, new)):
            raise StoreError(f"{folder} holds another study: {change}; {advice}, or the arm's runs in {runs}")


# ---------------------------------------------------------------------------- running
@dataclass
class StudyRun:
    """A run of an arm with a seed, and its process."""

    study: Path
    arm: Arm
    seed: int
    launch: Path | None = None
    """accelerate's configuration file, if a run has several processes."""
    process: subprocess.Popen[bytes] | None = None
    bar: TaskID | None = None
    slot: int = 0
    pace: Pace = field(default_factory=Pace)
    started: float | None = None
    """When the process was started."""

    def start_clock(self, now: float) -> None:
        """Start timing a process; steps of an earlier one do not count."""
        self.started, self.pace = now, Pace(self.step)

    def update_pace(self, now: float) -> None:
        """Record how many steps are done."""
        self.pace.see(self.step, now)

    @property
    def startup(self) -> float | None:
        """Seconds until the first step was done."""
        return None if self.pace.first is None or self.started is None else self.pace.first - self.started

    @property
    def folder(self) -> Path:
        return run_folder(self.study, self.arm.slug, self.seed)

    @property
    def store(self) -> RunStore:
        return RunStore(self.folder)

    @property
    def label(self) -> str:
        return f"{self.arm.name}, seed {self.seed}"

    @property
    def done(self) -> bool:
        return is_done(self.store)

    @property
    def steps(self) -> int:
        return int(self.arm.config["training"]["steps"])

    @property
    def step(self) -> int:
        return trained_steps(self.store) // int(self.arm.config["training"]["iterations"])

    @property
    def note(self) -> str:
        """Reward and entropy of the latest step, each after a comma."""
        last = (self.store.metrics("train") or [{}])[-1]
        return "".join(f", {key} {last[key]:.3f}" for key in ("reward", "entropy") if last.get(key) is not None)

    @property
    def state(self) -> str:
        if self.done:
            return "done"
        if is_locked(self.folder):
            return "running"
        if (self.folder / "error.txt").exists():
            return "failed"
        return "stopped" if (self.folder / "config.yaml").exists() else "waiting"

    def command(self) -> list[str]:
        module = "explorl.study.arm"
        start = [sys.executable, "-m", module] if self.launch is None else python_command(self.launch, module)
        return [*start, str(self.study), "--arm", self.arm.slug, "--seed", str(self.seed), "--supervised"]


def time_left(
    running: Sequence[StudyRun], ended: Sequence[StudyRun], waiting: Sequence[StudyRun], jobs: int
) -> float | None:
    """Estimate the seconds until all runs are trained, `jobs` at a time; None after too few steps.

    A step takes the mean time of earlier steps of the same kind. A waiting run has a start-up before it, with the first
    evaluation and the first step, that takes the mean time of the others'.
    """
    paces: dict[str, list[float]] = {}
    for run in (*running, *ended):
        if run.pace.seconds is not None:
            paces.setdefault(run.arm.kind, []).append(run.pace.seconds)
    if not {run.arm.kind for run in (*running, *waiting)} <= paces.keys():
        return None
    step = {kind: statistics.mean(seconds) for kind, seconds in paces.items()}
    starts = [run.startup for run in (*running, *ended) if run.startup is not None]
    free = [max(0, run.steps - run.step) * step[run.arm.kind] for run in running]
    free += [0.0] * (jobs - len(running))
    heapq.heapify(free)
    for run in waiting:
        heapq.heapreplace(free, free[0] + statistics.mean(starts) + (run.steps - 1) * step[run.arm.kind])
    return max(free)


@dataclass
class _Runner:
    """Runs up to `jobs` processes at a time, each with its share of the threads and its device."""

    waiting: list[StudyRun]
    jobs: int
    console: Console
    running: list[StudyRun] = field(default_factory=list)
    ended: list[StudyRun] = field(default_factory=list)

    def _progress_line(self) -> str:
        """Return a log line on the study's progress; empty before the first step."""
        started = [*self.ended, *self.running]
        if all(run.pace.first is None for run in started):
            return ""
        parts = [f"{len(self.ended)} of {len(started) + len(self.waiting)} runs done"]
        parts += [f"{run.label}: step {run.step:,}{run.note}" for run in self.running]
        seconds = time_left(self.running, self.ended, self.waiting, self.jobs)
        return "; ".join(parts if seconds is None else [*parts, f"{duration(seconds)} left"])

    def run(self) -> None:
        if not self.waiting:
            return
        progress, lines = _progress(self.console), ProgressLines(self.console)
        try:
            with progress:
                whole = progress.add_task("runs", total=len(self.waiting), note="")
                while self.waiting or self.running:
                    self._start(progress)
                    time.sleep(POLL)
                    for run in [run for run in self.running if run.process and run.process.poll() is not None]:
                        self._end(run, progress)
                        progress.update(whole, completed=len(self.ended))
                    for run in self.running if not progress.disable else ():
                        _update_bar(run, progress)
                    for run in self.running:
                        if run.pace.first is None or lines.due:
                            run.update_pace(time.monotonic())
                    if lines.due and (text := self._progress_line()):
                        lines.say(text)
        finally:
            for run in self.running:
                _stop(run.process)

    def _start(self, progress: Progress) -> None:
        while self.waiting and len(self.running) < self.jobs:
            run = self.waiting.pop(0)
            run.slot = min(set(range(self.jobs)) - {other.slot for other in self.running})
            run.folder.mkdir(parents=True, exist_ok=True)
            env = environment(self.jobs, run.slot) if run.launch is None else dict(os.environ)
            run.start_clock(time.monotonic())
            run.process = _process(run.command(), run.folder / "log.txt", env)
            steps = run.arm.config["training"]["steps"]
            run.bar = progress.add_task(clean(run.label, 80), total=steps, note="")
            self.running.append(run)

    def _end(self, run: StudyRun, progress: Progress) -> None:
        self.running.remove(run)
        self.ended.append(run)
        run.update_pace(time.monotonic())
        if run.bar is not None:
            progress.remove_task(run.bar)
        assert run.process is not None
        code = run.process.returncode
        _close(run.process)
        if not run.done and not (run.folder / "error.txt").exists():
            _write_exit_error(run.folder, code)
        if run.done:
            lines = run.store.metrics("evaluation")
            self.console.print(literal(f"{run.label}: {format_scores(lines[-1])}"))
        else:
            last = (run.folder / "error.txt").read_text(encoding="utf-8").strip().splitlines()[-1]
            self.console.print(literal(f"{run.label}: failed: {last}"))


def _runs_after_interim_look(
    study: Study, folder: Path, arms: Sequence[Arm], console: Console, launch: Path | None
) -> list[StudyRun]:
    """Return the runs after the interim look; none while arms of the study still wait for it."""
    interim = study_results(folder)["sequential"]
    if interim["waiting"]:
        names = ", ".join(interim["waiting"])
        text = f"the interim look waits for the first {interim['first']} seeds of {names}"
        console.print(literal(text), soft_wrap=True)
        return []
    decisions = {name: arm["decision"] for name, arm in interim["arms"].items()}
    labels = {CONTINUES: "continue", FUTILITY: "stop for futility", EFFICACY: "stop for efficacy", FAILED: "failed"}
    for decision, text in labels.items():
        if names := ", ".join(name for name, value in decisions.items() if value == decision):
            console.print(literal(f"after the interim look {text}: {names}"), soft_wrap=True)
    continued = {study.baseline, *(name for name, value in decisions.items() if value == CONTINUES)}
    if len(continued) == 1:
        return []
    seeds = study.seeds[interim["first"] :]
    return [StudyRun(folder, arm, seed, launch) for seed in seeds for arm in arms if arm.name in continued]


def _run_pending(runs: Sequence[StudyRun], study: Study, folder: Path, jobs: int, console: Console) -> None:
    """Run those that are not done, after the preparation that all arms share."""
    if pending := [run for run in runs if not run.done]:
        _prepare(study, folder, console)
        _Runner(pending, jobs, console).run()


def _prepare(study: Study, folder: Path, console: Console) -> None:
    """Make the warm start and the solve rates in a separate process."""
    if is_prepared(folder, study):
        return
    console.print("preparing all arms: " + ("warm start" if study.warm_start else "solve rates"))
    command = [sys.executable, "-m", "explorl.study.arm", str(folder), "--prepare", "--supervised"]
    (folder / "error.txt").unlink(missing_ok=True)
    process = _process(command, folder / "log.txt", environment(1, 0))
    try:
        while process.poll() is None:
            time.sleep(POLL)
    finally:
        _stop(process)
    if not is_prepared(folder, study):
        if not (folder / "error.txt").exists():
            _write_exit_error(folder, process.returncode)
        last = (folder / "error.txt").read_text(encoding="utf-8").strip().splitlines()[-1]
        warm = study.warm_start
        advice = "" if warm is None else f"; {WITHOUT_WARM_START.format(model=warm['model']['name'])}"
        raise StoreError(f"the preparation of all arms failed: {last} (see {folder / 'log.txt'}){advice}")


def environment(jobs: int, slot: int) -> dict[str, str]:
    """Return a process's environment: its share of the threads, and a device in turn."""
    threads = int(os.environ.get("OMP_NUM_THREADS") or os.cpu_count() or 1)
    values = {
        "OMP_WAIT_POLICY": "PASSIVE",
        "GOMP_SPINCOUNT": "20000",
        "TOKENIZERS_PARALLELISM": "false",
        **os.environ,
        **child_environment(),
        "OMP_NUM_THREADS": str(max(1, threads // jobs)),
    }
    devices = _devices()
    if devices:
        values["CUDA_VISIBLE_DEVICES"] = devices[slot % len(devices)]
    return values


def _devices() -> list[str]:
    """Return the GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [name.strip() for name in visible.split(",") if name.strip()]
    import torch

    return [str(index) for index in range(torch.cuda.device_count())]


def _process(command: list[str], log: Path, env: dict[str, str]) -> subprocess.Popen[bytes]:
    """Start a process in its own session, so that Ctrl-C reaches only the study; its input closes with the study."""
    with log.open("ab") as file:
        return subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=file, stderr=subprocess.STDOUT, env=env, start_new_session=True
        )


def _stop(process: subprocess.Popen[bytes] | None) -> None:
    if process is None:
        return
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    _close(process)


def _close(process: subprocess.Popen[bytes]) -> None:
    if process.stdin is not None:
        process.stdin.close()


def _write_exit_error(folder: Path, code: int) -> None:
    """Write error.txt for a process that could not write its own."""
    reason = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    tail = (folder / "log.txt").read_text(encoding="utf-8", errors="replace").splitlines()[-3:]
    hint = "; it may have run out of memory" if code == -signal.SIGKILL else ""
    write_text(folder / "error.txt", clean("\n".join([*tail, f"the process ended with {reason}{hint}"])) + "\n")


def _progress(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description:<32}", markup=False),
        BarColumn(bar_width=30),
        MofNCompleteColumn(),
        TextColumn("{task.fields[note]}", markup=False),
        console=console,
        disable=not console.is_terminal,
        refresh_per_second=2,
    )


def _update_bar(run: StudyRun, progress: Progress) -> None:
    lines = run.store.metrics("train")
    if lines and run.bar is not None:
        accuracy = lines[-1].get("rewards/correctness/mean")  # None if it was not finite
        note = "" if accuracy is None else f"accuracy {accuracy:.3f}"
        iterations = run.arm.config["training"]["iterations"]
        progress.update(run.bar, completed=lines[-1]["step"] // iterations, note=note)


def _print_plan(study: Study, folder: Path, console: Console) -> None:
    console.print(literal(f"{study.title}: {size_text(study)}, in {folder}"), soft_wrap=True)
    console.print(literal(effect_text(study, folder)), highlight=False, soft_wrap=True)
    for line in unsandboxed_warnings(study):
        console.print(literal(line), soft_wrap=True, highlight=False)
    for arm in study.arms:
        for message in inert_settings(arm):
            console.print(literal(f"{arm.name}: {message}"), soft_wrap=True)
