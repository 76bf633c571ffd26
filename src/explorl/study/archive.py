"""Archive a study's results in one small file, without weights, completions and checkpoints, and restore them.

    explorl study keep runs/deng-gpu deng-1.json              on each machine
    explorl study restore deng-1.json deng-2.json --run runs/deng-gpu

A restored study can be reported, watched and extended with more arms or seeds. Its runs count as finished but have no
policy, and of their completions only the verdicts are known.
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
from explorl.study.archive_file import FORMAT, LONGEST_ERROR, check_archive, check_study, folder_clash, read_archive
from explorl.study.arm import is_done, run_folder, trained_steps
from explorl.study.compatibility import arm_difference, difference, run_difference, study_difference
from explorl.study.run_study import require_study_folder, study_status
from explorl.study.spec import slug

METRIC_KEYS = ("kind", "step", "step_time", "num_tokens", *CURVES.values(), *OTHER_CURVES.values())
METRIC_PREFIXES = ("strategy/", "pass@")
"""Keys of a line of metrics that are archived, by name or by prefix."""
NOT_ARCHIVED = "completions are not archived"
"""The error of a wrong completion."""
ADVICE = "remove one of them, or use another folder"

Key = tuple[str, int]
"""An arm's name and a seed."""


@dataclass(frozen=True)
class ArchiveSummary:
    """How many runs `keep` has archived."""

    runs: int
    of: int
    left_out: str
    """Unfinished runs with their states: ``rft 0 and 1 (failed)``."""


@dataclass(frozen=True)
class ArchivedRun:
    """The archived values of a run, and their source."""

    source: Path
    values: dict[str, Any]
    """As in the file, with each evaluation's list of problems."""


@dataclass(frozen=True)
class Archive:
    """The contents of an archive file, of several merged, or the matching part of a folder."""

    source: Path
    study: dict[str, Any]
    runs: dict[Key, ArchivedRun]
    failed: dict[Key, str]


# ---------------------------------------------------------------------------- archiving
def keep(folder: str | Path, file: str | Path) -> ArchiveSummary:
    """Write the results of all finished runs; an existing file must not have other runs."""
    study_folder, path = Path(folder), Path(file)
    study = _read_study(study_folder)
    if path.is_dir():
        raise StoreError(f"{path} is a folder; name a file, such as {study_folder.resolve().name}.json")
    if path.resolve().is_relative_to(study_folder.resolve()):
        raise StoreError(
            f"{path} is inside the study's folder; name a file elsewhere, such as {study_folder.resolve().name}.json"
        )
    keys: list[Key] = [(arm["name"], seed) for arm in study["arms"] for seed in study["seeds"]]
    states = dict(zip(keys, (str(row[2]) for row in study_status(study_folder).rows), strict=True))
    stores = {key: RunStore(run_folder(study_folder, slug(key[0]), key[1])) for key in states}
    start = _start_digest(study_folder)
    runs = {
        key: ArchivedRun(stores[key].folder, {"start": _run_start(stores[key], start), **_run_values(stores[key])})
        for key, state in states.items()
        if state == "done"
    }
    if not runs:
        raise StoreError(f"{study_folder} has no finished run; wait for the first, or check `explorl study status`")
    errors = {key: stores[key].folder / "error.txt" for key, state in states.items() if state == "failed"}
    failed = {
        key: error.read_text(encoding="utf-8", errors="replace")[-LONGEST_ERROR:] for key, error in errors.items()
    }
    archive = Archive(study_folder, study, runs, failed)
    record = _record(archive)
    check_archive(record, study_folder)
    if path.exists():
        _refuse_loss(path, archive)
    write_text(path, json.dumps(record, ensure_ascii=False, allow_nan=False, separators=(",", ":")) + "\n")
    groups: dict[tuple[str, str], list[Key]] = {}
    for key, state in states.items():
        if state not in ("done", "later"):
            groups.setdefault((key[0], state), []).append(key)
    left_out = ", ".join(f"{_listed(keys)} ({state})" for (_, state), keys in groups.items())
    return ArchiveSummary(len(runs), len(runs) + sum(map(len, groups.values())), left_out)


def _read_study(folder: Path) -> dict[str, Any]:
    record = read_study(folder)
    check_study(record, folder / "study.json")
    return record


def _start_digest(folder: Path) -> str | None:
    """Return a digest of the warm start's weights; None without them."""
    digest = hashlib.blake2b(digest_size=16)
    weights = sorted((folder / "warm-start" / "model").glob("*.safetensors"))
    for path in weights:
        with path.open("rb") as file:
            hashlib.file_digest(file, lambda: digest)
    return digest.hexdigest() if weights else None


def _run_start(store: RunStore, folder_start: str | None) -> str | None:
    """Return the digest of a run's warm start: that of the folder, unless the run was restored."""
    values = read_json(store.kind_path, dict) if store.kind_path.is_file() else {}
    return values.get("start", folder_start)


def _run_values(store: RunStore) -> dict[str, Any]:
    """Read the archived values of a run from its folder."""
    if not store.config_path.is_file():
        raise StoreError(f"{store.config_path} is missing; restore it")
    evaluations = {}
    for path in step_files(store.folder / "evaluations", ".json").values():
        completions = path.with_suffix(".parquet")
        try:
            scores = read_scores(completions)
        except (StoreError, KeyError) as error:
            cause = error.__cause__ or error
            reason = "it is missing" if isinstance(cause, FileNotFoundError) else str(cause).splitlines()[0]
            raise StoreError(
                f"cannot read {completions}, the completions of {path.name}: {reason}; restore it"
            ) from error
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
            {key: value for key, value in line.items() if key in METRIC_KEYS or key.startswith(METRIC_PREFIXES)}
            for line in store.metrics()
            if line.get("kind") in ("train", "evaluation")
        ],
        "evaluations": evaluations,
    }


def _record(archive: Archive) -> dict[str, Any]:
    """Return the contents of the archive file, with each list of problems once."""
    problems: dict[str, list[str]] = {}
    names: dict[tuple[str, ...], str] = {}
    kinds = {arm["name"]: arm.get("kind", "grpo") for arm in archive.study["arms"]}
    runs = []
    for (arm, seed), run in archive.runs.items():
        evaluations = {}
        for step, evaluation in run.values["evaluations"].items():
            name = names.setdefault(tuple(evaluation["problems"]), str(len(names)))
            problems[name] = evaluation["problems"]
            evaluations[step] = {**evaluation, "problems": name}
        runs.append({"arm": arm, "seed": seed, "kind": kinds[arm], **run.values, "evaluations": evaluations})
    failed = [{"arm": arm, "seed": seed, "error": error} for (arm, seed), error in archive.failed.items()]
    return {"explorl study": FORMAT, "study": archive.study, "problems": problems, "runs": runs, "failed": failed}


def _refuse_loss(path: Path, new: Archive) -> None:
    """Raise `StoreError` if an existing file has runs that the new archive lacks."""
    other = next(name for n in range(2, 10**6) if not (name := path.with_stem(f"{path.stem}-{n}")).exists())
    advice = f"name another file, such as {other}"
    try:
        old = _read(path)
    except StoreError as error:
        raise StoreError(f"{path} exists and is not a readable archive; {advice}") from error
    _merge(old, new, advice)
    if lost := [key for key in old.runs if key not in new.runs]:
        raise StoreError(f"{path} has runs that would be lost: {_listed(lost)}; {advice}")


def _listed(keys: Iterable[Key]) -> str:
    """Format runs in a line: ``plain 0 and 1, rft 2``."""
    seeds: dict[str, list[str]] = {}
    for arm, seed in keys:
        seeds.setdefault(arm, []).append(str(seed))
    return ", ".join(f"{arm} {' and '.join(filter(None, (', '.join(s[:-1]), s[-1])))}" for arm, s in seeds.items())


# ---------------------------------------------------------------------------- restoring
def restore(files: Sequence[str | Path], folder: str | Path, say: Callable[[str], None] = print) -> int:
    """Restore the runs of archive files to a study's folder, beside existing runs; return how many were added.

    All files must be of the same study; a run that is in several places must be the same in all. Everything is checked
    before anything is written. Warm starts may differ, as between GPUs of two kinds; a message says so.
    """
    study_folder = Path(folder)
    if study_folder.exists() and not study_folder.is_dir():
        raise StoreError(f"{study_folder} is a file; name a folder with --run, such as runs/{study_folder.stem}")
    require_study_folder(study_folder)
    archive, *others = [_read(Path(file)) for file in files]
    for other in others:
        archive = _merge(archive, other, ADVICE)
    with storage_errors(study_folder):
        study_folder.mkdir(parents=True, exist_ok=True)
    with locked(study_folder):
        existing = _existing(study_folder, archive)
        merged = _merge(existing, archive, ADVICE) if existing else archive
        added = {key: run for key, run in archive.runs.items() if existing is None or key not in existing.runs}
        write_json(study_folder / "study.json", merged.study)  # first, so that an interrupted restore is still a study
        for (arm, seed), run in added.items():
            _restore_run(run_folder(study_folder, slug(arm), seed), run.values)
        for (arm, seed), error in archive.failed.items():
            if not (failed := run_folder(study_folder, slug(arm), seed)).exists():
                write_text(failed / "error.txt", clean(error))
        _report_starts(study_folder, say)
    return len(added)


def _report_starts(study_folder: Path, say: Callable[[str], None]) -> None:
    """Report if restored runs, or the folder itself, have different warm starts."""
    starts = {start: study_folder} if (start := _start_digest(study_folder)) else {}
    for path in sorted(study_folder.glob("arms/*/seed-*/run.json")):
        if start := read_json(path).get("start"):
            starts.setdefault(start, path.parent)
    if len(starts) > 1:
        say(f"the runs have different warm starts: compare {' and '.join(map(str, starts.values()))}")


def _read(file: Path) -> Archive:
    record = read_archive(file)
    runs: dict[Key, ArchivedRun] = {}
    for run in record["runs"]:
        values = {key: value for key, value in run.items() if key not in ("arm", "seed")}
        values["evaluations"] = {
            step: {**evaluation, "problems": record["problems"][evaluation["problems"]]}
            for step, evaluation in run["evaluations"].items()
        }
        runs[run["arm"], run["seed"]] = ArchivedRun(file, values)
    failed = {(run["arm"], run["seed"]): run["error"] for run in record.get("failed", [])}
    return Archive(file, record["study"], runs, failed)


def _existing(study_folder: Path, new: Archive) -> Archive | None:
    """Return the folder's study with those of its runs that the new archive also has; None without a study.

    Raise `StoreError` for an unfinished run that the archive also has.
    """
    if not (study_folder / "study.json").exists():
        return None
    existing = Archive(study_folder, _read_study(study_folder), {}, {})
    study = _merge_studies(existing, new, ADVICE)
    for (arm, seed), run in new.runs.items():
        store = RunStore(run_folder(study_folder, slug(arm), seed))
        if is_locked(store.folder):
            raise StoreError(f"another process is using {store.folder}; wait for it, or stop it first")
        if is_done(store):
            existing.runs[arm, seed] = ArchivedRun(store.folder, _run_values(store))
        elif store.folder.exists() and {path.name for path in store.folder.iterdir()} - {".lock", "error.txt"}:
            training = next(item["config"]["training"] for item in study["arms"] if item["name"] == arm)
            state = "has failed" if (store.folder / "error.txt").exists() else "is unfinished"
            step = f"step {trained_steps(store) // training['iterations']} of {training['steps']}"
            raise StoreError(
                f"{store.folder} {state} ({step}); remove it to restore the finished one from {run.source}"
            )
    return existing


def _merge(first: Archive, second: Archive, advice: str) -> Archive:
    """Merge two archives; raise `StoreError` if studies differ, or two runs of the same arm and seed."""
    study = _merge_studies(first, second, advice)
    for (arm, seed), run in second.runs.items():
        existing = first.runs.get((arm, seed))
        if existing is not None and (change := run_difference(existing.values, run.values)):
            raise StoreError(
                f"{existing.source} has another run of arm {arm!r}, seed {seed}, than {run.source}: {change}; {advice}"
            )
    runs = {**second.runs, **first.runs}
    failed = {key: error for key, error in (second.failed | first.failed).items() if key not in runs}
    return Archive(first.source, study, runs, failed)


def _merge_studies(first: Archive, second: Archive, advice: str) -> dict[str, Any]:
    """Return a study with the arms and seeds of both."""
    old, new = first.study, second.study
    slugs = {arm["name"]: arm["slug"] for arm in old["arms"]}
    shared = [arm["name"] for arm in new["arms"] if arm["name"] in slugs]
    more = [arm for arm in new["arms"] if arm["name"] not in slugs]
    change = study_difference(old, new) or difference("target", old["target"], new["target"])
    change = change or next(filter(None, (arm_difference(name, old, new) for name in shared)), None)
    if change := change or folder_clash(slugs | {arm["name"]: arm["slug"] for arm in more}):
        raise StoreError(f"{first.source} holds another study than {second.source}: {change}; {advice}")
    seeds = old["seeds"] if old.get("sequential") else sorted({*old["seeds"], *new["seeds"]})
    return {**old, "arms": [*old["arms"], *more], "seeds": seeds, "created": min(old["created"], new["created"])}


def _restore_run(folder: Path, run: Mapping[str, Any]) -> None:
    """Write the files of an archived run atomically."""
    import pyarrow as pa

    with atomic_folder(folder) as temporary:
        store = RunStore(temporary)
        write_text(store.metrics_path, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in run["metrics"]))
        if run["provenance"]:
            write_json(store.provenance_path, run["provenance"])
        for name, evaluation in run["evaluations"].items():
            samples = evaluation["samples"]
            verdicts = [sample < right for right in evaluation["right"] for sample in range(samples)]
            columns = {
                "problem": [problem for problem in evaluation["problems"] for _ in range(samples)],
                "completion": [None] * len(verdicts),
                "correct": verdicts,
                "error": [None if correct else NOT_ARCHIVED for correct in verdicts],
            }
            texts = dict.fromkeys(("completion", "error"), pa.string())
            write_parquet(temporary / "evaluations" / f"{name}.parquet", columns, texts)
            write_json(temporary / "evaluations" / f"{name}.json", evaluation["summary"])
        note = "This run was restored from an archive of its results, which has no policy.\n"
        write_text(temporary / "model" / "README.md", note)
        write_json(store.kind_path, {"kind": run["kind"], "start": run.get("start")})
        store.write_config(run["config"])
