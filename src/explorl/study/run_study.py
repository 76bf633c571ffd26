"""Studies: arms × seeds, one process per run, and then one table with intervals.

    STUDY/study.json                  the resolved study
    STUDY/warm-start/                 an SFT run, where all arms start from one
    STUDY/arms/<arm>/seed-<n>/        a run each, with its log and, where it failed, error.txt
    STUDY/results.json, report.html   made from the runs, and made again whenever asked; table.csv, .tex, .md too

Started again, a study skips the runs that are done, goes on with those that were interrupted and tries the failed ones
once more. All arms share seeds, and a seed fixes the order of the prompts and the held-out problems: comparisons are
paired.
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
from explorl.study.arm import done, prepared, run_folder, trained_steps
from explorl.study.compatibility import arm_difference, study_difference
from explorl.study.plan import changed_words, effect_words, size_words, unconfined_words
from explorl.study.spec import WITHOUT_WARM_START, Arm, Study, inert, load_study

POLL = 0.2
"""Seconds between two looks at the processes."""


@dataclass(frozen=True)
class Outcome:
    """What a study has come to."""

    folder: Path
    results: dict[str, Any]
    failed: list[str]
    """Runs that failed, as `arm, seed n`."""

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
) -> Outcome:
    """Runs what is missing of a study, `jobs` processes side by side, and writes results.json.

    Without a number of jobs there is one per GPU; where there is none, one per core, each with 4 GiB.
    `only` names the arms to run now; the results still have all that is there. `launch` is a file of accelerate's: each
    run has all the processes that it names, and one run follows another. `overrides` are changes of the study's base.
    """
    if launch is not None:
        check_file(launch)
        if jobs not in (None, 1):
            raise ConfigError(f"--jobs is {jobs}, and with --launch each run has all processes; leave out one of them")
        jobs = 1
    jobs = default_jobs() if jobs is None else jobs
    if jobs < 1:
        raise ConfigError(f"jobs is {jobs}; ask for 1 or more")
    study = load_study(path, profile=profile, seeds=seeds, overrides=overrides)
    wanted = [study.arm(name) for name in only] if only else list(study.arms)
    if launch is not None and (alone := [arm.name for arm in wanted if arm.kind == "rft"]):
        raise ConfigError(
            f"arm {alone[0]!r} is of kind rft, which samples and fits in one process; leave out --launch, or name the "
            "other arms with --only"
        )
    check_parts(study)
    place = Path(folder) if folder is not None else default_folder(study)
    before = [arm["name"] for arm in read_study(place)["arms"]] if (place / "study.json").exists() else None
    with locked_study(place, study) as study:
        for words in changed_words(before, [arm.name for arm in study.arms]) if before else ():
            console.print(literal(words), soft_wrap=True)
        _print_plan(study, place, console)
        first = study.seeds if study.sequential is None else study.seeds[: study.sequential["first"]]
        runs = [_Run(place, arm, seed, launch) for seed in first for arm in wanted]
        _run_left(runs, study, place, jobs, console)
        if study.sequential is not None:
            later = _after_first_look(study, place, wanted, console, launch)
            _run_left(later, study, place, jobs, console)
            runs += later
        results = write_results(place)
    failed = [run.label for run in runs if not run.done]
    for label in failed:
        console.print(literal((f"failed: {label}", "bold")))
    return Outcome(place, results, failed)


def default_jobs() -> int:
    """Processes that this machine runs well side by side."""
    if devices := _devices():
        return len(devices)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return max(1, min(os.cpu_count() or 1, memory >> 32))


def default_folder(study: Study) -> Path:
    """Where a study runs unless told otherwise."""
    return Path("runs") / (f"{study.name}-{study.profile}" if study.profile else study.name)


def write_results(folder: str | Path) -> dict[str, Any]:
    """results.json, its table as CSV, LaTeX and Markdown, and the report, all made anew from the runs."""
    from explorl.report.study_page import write_report

    place = Path(folder)
    results = study_results(place)
    write_json(place / "results.json", results)
    for name in ("table.csv", "table.tex", "table.md"):
        results_table(results).write(place / name)
    write_report(place / "report.html", results)
    return results


def study_status(folder: str | Path) -> Table:
    """How far each run is; "later" are those that the first look of a sequential study has yet to ask for, or never
    will."""
    place = Path(folder)
    study = Study.read(place)
    later = study.seeds[study.sequential["first"] :] if study.sequential else ()
    rows: list[list[Cell]] = []
    runs = [_Run(place, arm, seed) for arm in study.arms for seed in study.seeds]
    metrics = [run.store.metrics() for run in runs]
    shown = ends_of_k({key for lines in metrics for line in lines if line.get("kind") == "evaluation" for key in line})
    for run, lines in zip(runs, metrics, strict=True):
        state = "later" if run.state == "waiting" and run.seed in later else run.state
        scores: dict[str, Any] = next((line for line in reversed(lines) if line.get("kind") == "evaluation"), {})
        seconds = sum(line.get("step_time") or 0.0 for line in lines if line.get("kind") == "train")
        rows.append([run.arm.name, run.seed, state, run.step, *map(scores.get, shown), seconds])
    return Table(
        ["arm", "seed", "state", "step", *shown, "seconds"],
        rows,
        title=f"{study.title}, {place}",
        number={**dict.fromkeys(shown, ".1%"), "seconds": ".0f"},
    )


def check_parts(study: Study) -> None:
    """That every policy and tracker can be found, before anything runs; hub ids are not looked up."""
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
    """Holds a study's folder, with study.json written; arms and seeds that it had before stay part of it."""
    refuse_foreign(folder)
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


def refuse_foreign(folder: Path) -> None:
    """That a study may be written here: the folder has one, or nothing."""
    if (folder / "config.yaml").exists():
        raise StoreError(f"{folder} holds a run, not a study; name another folder")
    if folder.is_dir() and not (folder / "study.json").exists():
        strange = [path.name for path in folder.iterdir() if path.name != ".lock"]
        if strange:
            raise StoreError(f"{folder} is not empty and holds no study ({strange[0]}); name another folder")


def _refuse_other_study(folder: Path, old: dict[str, Any], new: dict[str, Any]) -> None:
    """That the folder's runs and new ones are comparable; more arms do not matter, nor do arms without any run."""
    advice = "name another folder, or remove this one"
    if what := study_difference(old, new):
        raise StoreError(f"{folder} holds another study: {what}; {advice}")
    for arm in old["arms"]:
        runs = folder / "arms" / arm["slug"]
        if any(runs.glob("seed-*/config.yaml")) and (what := arm_difference(arm["name"], old, new)):
            raise StoreError(f"{folder} holds another study: {what}; {advice}, or the arm's runs in {runs}")


# ---------------------------------------------------------------------------- running
@dataclass
class _Run:
    """A run of an arm with a seed, and the process that is at it."""

    study: Path
    arm: Arm
    seed: int
    launch: Path | None = None
    """accelerate's file, where a run has several processes."""
    process: subprocess.Popen[bytes] | None = None
    bar: TaskID | None = None
    slot: int = 0
    pace: Pace = field(default_factory=Pace)
    begun: float | None = None
    """When the process was started."""

    def begin(self, now: float) -> None:
        """Start the clock of a process; steps of an earlier one do not count."""
        self.begun, self.pace = now, Pace(self.step)

    def look(self, now: float) -> None:
        """See how many steps are done."""
        self.pace.see(self.step, now)

    @property
    def startup(self) -> float | None:
        """Seconds until its first step was done."""
        return None if self.pace.first is None or self.begun is None else self.pace.first - self.begun

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
        return done(self.store)

    @property
    def steps(self) -> int:
        return int(self.arm.config["training"]["steps"])

    @property
    def step(self) -> int:
        return trained_steps(self.store) // int(self.arm.config["training"]["iterations"])

    @property
    def note(self) -> str:
        """Reward and entropy of the latest step, after a comma."""
        last: dict[str, Any] = next(
            (line for line in reversed(self.store.metrics()) if line.get("kind") == "train"), {}
        )
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


def time_left(running: Sequence[_Run], ended: Sequence[_Run], waiting: Sequence[_Run], jobs: int) -> float | None:
    """Return the seconds until all runs are trained, `jobs` side by side; None where too few steps tell it.

    A step takes as long as those of the same kind have taken so far. A run that waits has a start-up ahead of it, with
    the first evaluation and the first step, as long as those of the others.
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
    """Keeps up to `jobs` processes busy, each with its share of the threads and its device."""

    waiting: list[_Run]
    jobs: int
    console: Console
    running: list[_Run] = field(default_factory=list)
    ended: list[_Run] = field(default_factory=list)

    def _line(self) -> str:
        """How far the study is, in a line for a log; empty before the first step."""
        begun = [*self.ended, *self.running]
        if all(run.pace.first is None for run in begun):
            return ""
        parts = [f"{len(self.ended)} of {len(begun) + len(self.waiting)} runs done"]
        parts += [f"{run.label}: step {run.step:,}{run.note}" for run in self.running]
        left = time_left(self.running, self.ended, self.waiting, self.jobs)
        return "; ".join(parts if left is None else [*parts, f"{duration(left)} left"])

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
                        _show(run, progress)
                    for run in self.running:
                        if run.pace.first is None or lines.due:
                            run.look(time.monotonic())
                    if lines.due and (text := self._line()):
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
            run.begin(time.monotonic())
            run.process = _process(run.command(), run.folder / "log.txt", env)
            steps = run.arm.config["training"]["steps"]
            run.bar = progress.add_task(clean(run.label, 80), total=steps, note="")
            self.running.append(run)

    def _end(self, run: _Run, progress: Progress) -> None:
        self.running.remove(run)
        self.ended.append(run)
        run.look(time.monotonic())
        if run.bar is not None:
            progress.remove_task(run.bar)
        assert run.process is not None
        code = run.process.returncode
        _close(run.process)
        if not run.done and not (run.folder / "error.txt").exists():
            _write_death(run.folder, code)
        if run.done:
            lines = [line for line in run.store.metrics() if line.get("kind") == "evaluation"]
            self.console.print(literal(f"{run.label}: {format_scores(lines[-1])}"))
        else:
            last = (run.folder / "error.txt").read_text(encoding="utf-8").strip().splitlines()[-1]
            self.console.print(literal(f"{run.label}: failed: {last}"))


def _after_first_look(
    study: Study, folder: Path, wanted: Sequence[Arm], console: Console, launch: Path | None
) -> list[_Run]:
    """The runs that follow the first look; none while other arms of the study have not come to it."""
    told = study_results(folder)["sequential"]
    if told["waiting"]:
        names = ", ".join(told["waiting"])
        console.print(literal(f"the first look waits for the first {told['first']} seeds of {names}"), soft_wrap=True)
        return []
    decided = {name: one["decision"] for name, one in told["arms"].items()}
    words = {CONTINUES: "go on", FUTILITY: "stop for futility", EFFICACY: "stop as found", FAILED: "failed"}
    for decision, text in words.items():
        if names := ", ".join(name for name, what in decided.items() if what == decision):
            console.print(literal(f"after the first look {text}: {names}"), soft_wrap=True)
    on = {study.baseline, *(name for name, what in decided.items() if what == CONTINUES)}
    if len(on) == 1:
        return []
    seeds = study.seeds[told["first"] :]
    return [_Run(folder, arm, seed, launch) for seed in seeds for arm in wanted if arm.name in on]


def _run_left(runs: Sequence[_Run], study: Study, folder: Path, jobs: int, console: Console) -> None:
    """Runs those that are not done; where there are any, first makes what all arms share."""
    if left := [run for run in runs if not run.done]:
        _prepare(study, folder, console)
        _Runner(left, jobs, console).run()


def _prepare(study: Study, folder: Path, console: Console) -> None:
    """The warm start and the solve rates, in a process of their own."""
    if prepared(folder, study):
        return
    console.print("making what all arms share" + (": the warm start" if study.warm_start else ": solve rates"))
    command = [sys.executable, "-m", "explorl.study.arm", str(folder), "--prepare", "--supervised"]
    (folder / "error.txt").unlink(missing_ok=True)
    process = _process(command, folder / "log.txt", environment(1, 0))
    try:
        while process.poll() is None:
            time.sleep(POLL)
    finally:
        _stop(process)
    if not prepared(folder, study):
        if not (folder / "error.txt").exists():
            _write_death(folder, process.returncode)
        last = (folder / "error.txt").read_text(encoding="utf-8").strip().splitlines()[-1]
        warm = study.warm_start
        advice = "" if warm is None else f"; {WITHOUT_WARM_START.format(model=warm['model']['name'])}"
        raise StoreError(f"what all arms share could not be made: {last} (see {folder / 'log.txt'}){advice}")


def environment(jobs: int, slot: int) -> dict[str, str]:
    """A process's environment: its share of the threads, and a device by turns."""
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
    """The GPUs that this process may use, by the names that CUDA_VISIBLE_DEVICES takes."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    if given is not None:
        return [name.strip() for name in given.split(",") if name.strip()]
    import torch

    return [str(index) for index in range(torch.cuda.device_count())]


def _process(command: list[str], log: Path, env: dict[str, str]) -> subprocess.Popen[bytes]:
    """A process in a session of its own, so that Ctrl-C reaches the study alone; its input ends when the study does."""
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


def _write_death(folder: Path, code: int) -> None:
    """error.txt for a process that could not write its own."""
    how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    tail = (folder / "log.txt").read_text(encoding="utf-8", errors="replace").splitlines()[-3:]
    hint = "; it may have run out of memory" if code == -signal.SIGKILL else ""
    write_text(folder / "error.txt", clean("\n".join([*tail, f"the process ended with {how}{hint}"])) + "\n")


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


def _show(run: _Run, progress: Progress) -> None:
    lines = [line for line in run.store.metrics() if line.get("kind") == "train"]
    if lines and run.bar is not None:
        accuracy = lines[-1].get("rewards/correctness/mean")  # None where it was not finite
        note = "" if accuracy is None else f"accuracy {accuracy:.3f}"
        iterations = run.arm.config["training"]["iterations"]
        progress.update(run.bar, completed=lines[-1]["step"] // iterations, note=note)


def _print_plan(study: Study, folder: Path, console: Console) -> None:
    console.print(literal(f"{study.title}: {size_words(study)}, in {folder}"), soft_wrap=True)
    console.print(literal(effect_words(study, folder)), highlight=False, soft_wrap=True)
    for line in unconfined_words(study):
        console.print(literal(line), soft_wrap=True, highlight=False)
    for arm in study.arms:
        for message in inert(arm):
            console.print(literal(f"{arm.name}: {message}"), soft_wrap=True)
