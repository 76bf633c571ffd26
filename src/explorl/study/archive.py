"""A study's results in one small file, without weights, answers and checkpoints: to bring home, to keep, to add up.

    explorl study keep runs/deng-gpu deng-1.json              on each machine
    explorl study restore deng-1.json deng-2.json --run runs/deng-gpu

A restored study is a folder like any other: it is reported and watched, and goes on with more arms or seeds. Its runs
count as done, but have no policy, and of their answers it is only known which were right.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from explorl.analysis.study_results import CURVES, OTHER_CURVES, read_scores
from explorl.core.store import (
    RunStore,
    StoreError,
    atomic_folder,
    is_locked,
    locked,
    read_json,
    read_study,
    step_files,
    storage_errors,
    write_json,
    write_parquet,
    write_text,
)
from explorl.core.text import clean
from explorl.study.archive_file import FORMAT, LONGEST_ERROR, check_kept, check_study, read_kept, same_folder
from explorl.study.arm import done, run_folder, trained_steps
from explorl.study.compatibility import arm_difference, difference, run_difference, study_difference
from explorl.study.run_study import refuse_foreign, study_status
from explorl.study.spec import slug

LINE = ("kind", "step", "step_time", "num_tokens", *CURVES.values(), *OTHER_CURVES.values())
LOGGED = ("strategy/", "pass@")
"""What is kept of a line of metrics: these keys, and those that begin so."""
UNKNOWN = "its answers were not kept"
"""The error of a wrong answer."""
ADVICE = "leave out one of them, or use another folder"

Key = tuple[str, int]
"""An arm's name and a seed."""


@dataclass(frozen=True)
class Kept:
    """What `keep` has written."""

    runs: int
    of: int
    left_out: str
    """The runs that are not done, and why not: ``rft 0 and 1 (failed)``."""


@dataclass(frozen=True)
class Run:
    """What is known of a run, and where from."""

    place: Path
    values: dict[str, Any]
    """As the file has it, its evaluations with the problems themselves."""


@dataclass(frozen=True)
class Results:
    """What a file holds, or several together, or as much of a folder as matters."""

    place: Path
    study: dict[str, Any]
    runs: dict[Key, Run]
    failed: dict[Key, str]


# ---------------------------------------------------------------------------- keeping
def keep(folder: str | Path, file: str | Path) -> Kept:
    """Writes the results of all runs that are done; a file that is there must have no others."""
    place, path = Path(folder), Path(file)
    study = _study(place)
    if path.is_dir():
        raise StoreError(f"{path} is a folder; name a file, such as {place.resolve().name}.json")
    if path.resolve().is_relative_to(place.resolve()):
        raise StoreError(
            f"{path} lies in the study's own folder; name a file elsewhere, such as {place.resolve().name}.json"
        )
    keys: list[Key] = [(arm["name"], seed) for arm in study["arms"] for seed in study["seeds"]]
    states = dict(zip(keys, (str(row[2]) for row in study_status(place).rows), strict=True))
    stores = {key: RunStore(run_folder(place, slug(key[0]), key[1])) for key in states}
    start = _start(place)
    runs = {
        key: Run(stores[key].folder, {"start": _start_of(stores[key], start), **_run(stores[key])})
        for key, state in states.items()
        if state == "done"
    }
    if not runs:
        raise StoreError(f"{place} has no run that is done; wait for the first, or look with `explorl study status`")
    errors = {key: stores[key].folder / "error.txt" for key, state in states.items() if state == "failed"}
    failed = {
        key: error.read_text(encoding="utf-8", errors="replace")[-LONGEST_ERROR:] for key, error in errors.items()
    }
    results = Results(place, study, runs, failed)
    record = _record(results)
    check_kept(record, place)
    if path.exists():
        _refuse_loss(path, results)
    write_text(path, json.dumps(record, ensure_ascii=False, allow_nan=False, separators=(",", ":")) + "\n")
    groups: dict[tuple[str, str], list[Key]] = {}
    for key, state in states.items():
        if state not in ("done", "later"):
            groups.setdefault((key[0], state), []).append(key)
    left_out = ", ".join(f"{_listed(keys)} ({state})" for (_, state), keys in groups.items())
    return Kept(len(runs), len(runs) + sum(map(len, groups.values())), left_out)


def _study(folder: Path) -> dict[str, Any]:
    record = read_study(folder)
    check_study(record, folder / "study.json")
    return record


def _start(folder: Path) -> str | None:
    """A digest of the warm start's weights; None where the folder has none."""
    digest = hashlib.blake2b(digest_size=16)
    weights = sorted((folder / "warm-start" / "model").glob("*.safetensors"))
    for path in weights:
        with path.open("rb") as file:
            hashlib.file_digest(file, lambda: digest)
    return digest.hexdigest() if weights else None


def _start_of(store: RunStore, here: str | None) -> str | None:
    """The digest of the warm start that a run has begun from: that of the folder, unless it was restored there."""
    told = read_json(store.kind_path, dict) if store.kind_path.is_file() else {}
    return told.get("start", here)


def _run(store: RunStore) -> dict[str, Any]:
    """What a run's folder has of what is kept."""
    if not store.config_path.is_file():
        raise StoreError(f"{store.config_path} is missing; restore it")
    evaluations = {}
    for path in step_files(store.folder / "evaluations", ".json").values():
        answers = path.with_suffix(".parquet")
        try:
            scores = read_scores(answers)
        except (StoreError, KeyError) as error:
            cause = error.__cause__ or error
            why = "it is missing" if isinstance(cause, FileNotFoundError) else str(cause).splitlines()[0]
            raise StoreError(f"cannot read {answers}, the answers of {path.name}: {why}; restore it") from error
        summary = read_json(path)
        if not isinstance(summary, dict):
            raise StoreError(f"{path} holds {summary!r}, not the summary of an evaluation; restore it")
        evaluations[path.stem] = {
            "problems": list(scores.problems),
            "samples": scores.samples,
            "right": scores.correct.tolist(),
            "summary": {key: value for key, value in summary.items() if not isinstance(value, dict | list)},
        }
    return {
        "config": store.config(),
        "provenance": read_json(store.provenance_path) if store.provenance_path.exists() else [],
        "metrics": [
            {key: value for key, value in line.items() if key in LINE or key.startswith(LOGGED)}
            for line in store.metrics()
            if line.get("kind") in ("train", "evaluation")
        ],
        "evaluations": evaluations,
    }


def _record(results: Results) -> dict[str, Any]:
    """Results as the file has them: each list of problems once."""
    problems: dict[str, list[str]] = {}
    names: dict[tuple[str, ...], str] = {}
    kinds = {arm["name"]: arm.get("kind", "grpo") for arm in results.study["arms"]}
    runs = []
    for (arm, seed), run in results.runs.items():
        evaluations = {}
        for step, evaluation in run.values["evaluations"].items():
            name = names.setdefault(tuple(evaluation["problems"]), str(len(names)))
            problems[name] = evaluation["problems"]
            evaluations[step] = {**evaluation, "problems": name}
        runs.append({"arm": arm, "seed": seed, "kind": kinds[arm], **run.values, "evaluations": evaluations})
    failed = [{"arm": arm, "seed": seed, "error": error} for (arm, seed), error in results.failed.items()]
    return {"explorl study": FORMAT, "study": results.study, "problems": problems, "runs": runs, "failed": failed}


def _refuse_loss(path: Path, new: Results) -> None:
    """That a file which is there has nothing that the new one lacks."""
    other = next(name for n in range(2, 10**6) if not (name := path.with_stem(f"{path.stem}-{n}")).exists())
    advice = f"name another file, such as {other}"
    try:
        old = _read(path)
    except StoreError as error:
        raise StoreError(f"{path} is there, and holds no results that can be read; {advice}") from error
    _joined(old, new, advice)
    if lost := [key for key in old.runs if key not in new.runs]:
        raise StoreError(f"{path} has runs that would be lost: {_listed(lost)}; {advice}")


def _listed(keys: Iterable[Key]) -> str:
    """Runs in a line: ``plain 0 and 1, rft 2``."""
    seeds: dict[str, list[str]] = {}
    for arm, seed in keys:
        seeds.setdefault(arm, []).append(str(seed))
    return ", ".join(f"{arm} {' and '.join(filter(None, (', '.join(s[:-1]), s[-1])))}" for arm, s in seeds.items())


# ---------------------------------------------------------------------------- restoring
def restore(files: Sequence[str | Path], folder: str | Path, say: Callable[[str], None] = print) -> int:
    """Lays the runs of these files out in a study's folder, beside those that are there; how many were added.

    All must be of the same study; a run that is in two places must be the same in both. Everything is checked before
    anything is written. Warm starts may differ, as they do between GPUs of two kinds, and that is said.
    """
    place = Path(folder)
    if place.exists() and not place.is_dir():
        raise StoreError(f"{place} is a file; name a folder with --run, such as runs/{place.stem}")
    refuse_foreign(place)
    first, *others = [_read(Path(file)) for file in files]
    for other in others:
        first = _joined(first, other, ADVICE)
    with storage_errors(place):
        place.mkdir(parents=True, exist_ok=True)
    with locked(place):
        here = _here(place, first)
        whole = _joined(here, first, ADVICE) if here else first
        added = {key: run for key, run in first.runs.items() if here is None or key not in here.runs}
        write_json(place / "study.json", whole.study)  # first: without it, what an interruption leaves is no study
        for (arm, seed), run in added.items():
            _lay_out(run_folder(place, slug(arm), seed), run.values)
        for (arm, seed), error in first.failed.items():
            if not (failed := run_folder(place, slug(arm), seed)).exists():
                write_text(failed / "error.txt", clean(error))
        _say_starts(place, say)
    return len(added)


def _say_starts(place: Path, say: Callable[[str], None]) -> None:
    """Says where runs that were restored, and the folder itself, have different warm starts."""
    starts = {start: place} if (start := _start(place)) else {}
    for path in sorted(place.glob("arms/*/seed-*/run.json")):
        if start := read_json(path).get("start"):
            starts.setdefault(start, path.parent)
    if len(starts) > 1:
        say(f"the runs have not all the same warm start: it differs between {' and '.join(map(str, starts.values()))}")


def _read(file: Path) -> Results:
    record = read_kept(file)
    runs: dict[Key, Run] = {}
    for run in record["runs"]:
        values = {key: value for key, value in run.items() if key not in ("arm", "seed")}
        values["evaluations"] = {
            step: {**evaluation, "problems": record["problems"][evaluation["problems"]]}
            for step, evaluation in run["evaluations"].items()
        }
        runs[run["arm"], run["seed"]] = Run(file, values)
    failed = {(run["arm"], run["seed"]): run["error"] for run in record.get("failed", [])}
    return Results(file, record["study"], runs, failed)


def _here(place: Path, new: Results) -> Results | None:
    """The folder's study, with those of its runs that are among the new ones; None where there is no study yet.

    A run that has begun there and is not done is refused: the new one would take its place, or be dropped for it.
    """
    if not (place / "study.json").exists():
        return None
    results = Results(place, _study(place), {}, {})
    study = _joined_studies(results, new, ADVICE)
    for (arm, seed), run in new.runs.items():
        store = RunStore(run_folder(place, slug(arm), seed))
        if is_locked(store.folder):
            raise StoreError(f"another process is at work in {store.folder}; wait for it, or stop it first")
        if done(store):
            results.runs[arm, seed] = Run(store.folder, _run(store))
        elif store.folder.exists() and {path.name for path in store.folder.iterdir()} - {".lock", "error.txt"}:
            training = next(one["config"]["training"] for one in study["arms"] if one["name"] == arm)
            state = "has failed" if (store.folder / "error.txt").exists() else "is unfinished"
            step = f"step {trained_steps(store) // training['iterations']} of {training['steps']}"
            raise StoreError(f"{store.folder} {state} ({step}); remove it to take the finished one from {run.place}")
    return results


def _joined(one: Results, other: Results, advice: str) -> Results:
    """Both together; `StoreError` where they are of two studies, or have two different runs of an arm and a seed."""
    study = _joined_studies(one, other, advice)
    for (arm, seed), run in other.runs.items():
        held = one.runs.get((arm, seed))
        if held is not None and (what := run_difference(held.values, run.values)):
            raise StoreError(
                f"{held.place} has another run of arm {arm!r}, seed {seed}, than {run.place}: {what}; {advice}"
            )
    runs = {**other.runs, **one.runs}
    failed = {key: error for key, error in (other.failed | one.failed).items() if key not in runs}
    return Results(one.place, study, runs, failed)


def _joined_studies(one: Results, other: Results, advice: str) -> dict[str, Any]:
    """A study with the arms and seeds of both."""
    old, new = one.study, other.study
    slugs = {arm["name"]: arm["slug"] for arm in old["arms"]}
    shared = [arm["name"] for arm in new["arms"] if arm["name"] in slugs]
    more = [arm for arm in new["arms"] if arm["name"] not in slugs]
    what = study_difference(old, new) or difference("target", old["target"], new["target"])
    what = what or next(filter(None, (arm_difference(name, old, new) for name in shared)), None)
    if what := what or same_folder(slugs | {arm["name"]: arm["slug"] for arm in more}):
        raise StoreError(f"{one.place} holds another study than {other.place}: {what}; {advice}")
    seeds = old["seeds"] if old.get("sequential") else sorted({*old["seeds"], *new["seeds"]})
    return {**old, "arms": [*old["arms"], *more], "seeds": seeds, "created": min(old["created"], new["created"])}


def _lay_out(folder: Path, run: Mapping[str, Any]) -> None:
    """The files of a run as far as they are known; whole or not at all."""
    import pyarrow as pa

    with atomic_folder(folder) as temporary:
        store = RunStore(temporary)
        write_text(store.metrics_path, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in run["metrics"]))
        if run["provenance"]:
            write_json(store.provenance_path, run["provenance"])
        for name, evaluation in run["evaluations"].items():
            samples = evaluation["samples"]
            marks = [place < right for right in evaluation["right"] for place in range(samples)]
            columns = {
                "problem": [problem for problem in evaluation["problems"] for _ in range(samples)],
                "completion": [None] * len(marks),
                "correct": marks,
                "error": [None if mark else UNKNOWN for mark in marks],
            }
            texts = dict.fromkeys(("completion", "error"), pa.string())
            write_parquet(temporary / "evaluations" / f"{name}.parquet", columns, texts)
            write_json(temporary / "evaluations" / f"{name}.json", evaluation["summary"])
        note = "This run was restored from its results; its policy was not kept.\n"
        write_text(temporary / "model" / "README.md", note)
        write_json(store.kind_path, {"kind": run["kind"], "start": run.get("start")})
        store.write_config(run["config"])
