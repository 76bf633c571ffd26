"""A study's results in one small file, without weights, answers and checkpoints: to bring home, to keep, to add up.

    explorl study keep runs/deng-gpu deng-1.json              on each machine
    explorl study restore deng-1.json deng-2.json --run runs/deng-gpu

A restored study is a folder like any other: it is reported and watched, and goes on with more arms or seeds. Its runs
count as done, but have no policy, and of their answers it is only known which were right.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from explorl.analysis.study_results import CURVES, OTHER_CURVES, read_scores
from explorl.store import RunStore, StoreError, kind_of, read_json, write_json, write_parquet, write_text
from explorl.study.arm import done, run_folder
from explorl.study.file import Study, read_record

FORMAT = 1
LINE = ("kind", "step", "step_time", "num_tokens", *CURVES.values(), *OTHER_CURVES.values())
"""What is kept of a line of metrics, beside what strategies log."""
UNKNOWN = "its answers were not kept"
"""The error of a wrong answer."""


def keep(folder: str | Path, file: str | Path) -> int:
    """Writes the results of all runs that are done; how many there are."""
    place = Path(folder)
    study, problems, runs = Study.read(place), dict[str, list[str]](), []
    for arm in study.arms:
        for seed in study.seeds:
            store = RunStore(run_folder(place, arm.slug, seed))
            if done(store):
                runs.append({"arm": arm.name, "seed": seed, **_kept(store, problems)})
    if not runs:
        raise StoreError(f"{place} has no run that is done; wait for the first, or look with `explorl study status`")
    record = {"explorl study": FORMAT, "study": read_record(place), "problems": problems, "runs": runs}
    write_text(file, json.dumps(record, ensure_ascii=False, separators=(",", ":")) + "\n")
    return len(runs)


def _kept(store: RunStore, problems: dict[str, list[str]]) -> dict[str, Any]:
    lines = [line for line in store.metrics() if line.get("kind") == "train"]
    evaluations = {}
    for path in sorted((store.folder / "evaluations").glob("step-*.json")):
        scores = read_scores(path.with_suffix(".parquet"))
        name = next((name for name, held in problems.items() if held == list(scores.problems)), str(len(problems)))
        problems[name] = list(scores.problems)
        summary = {key: value for key, value in read_json(path).items() if not isinstance(value, dict | list)}
        evaluations[path.stem] = {
            "problems": name,
            "samples": scores.samples,
            "right": scores.correct.tolist(),
            "summary": _short(summary),
        }
    return {
        "kind": store.kind,
        "config": store.config(),
        "provenance": read_json(store.provenance_path) if store.provenance_path.exists() else [],
        "metrics": [
            _short({key: value for key, value in line.items() if key in LINE or key.startswith("strategy/")})
            for line in lines
        ],
        "evaluations": evaluations,
    }


def _short(values: Mapping[str, Any]) -> dict[str, Any]:
    """Numbers with nine digits."""
    return {key: float(f"{value:.9g}") if isinstance(value, float) else value for key, value in values.items()}


def restore(files: Sequence[str | Path], folder: str | Path) -> int:
    """Lays the runs of these files out in a study's folder, beside those that are there; how many were added.

    All must be of the same study; a run that is in two places must be the same in both.
    """
    place = Path(folder)
    if kind_of(place) not in (None, "study"):
        raise StoreError(f"{place} holds a {kind_of(place)}, not a study; name another folder with --run")
    added = 0
    for file in files:
        record = _read(Path(file))
        _join(place, record, Path(file))
        arms = {arm["name"]: arm["slug"] for arm in record["study"]["arms"]}
        for run in record["runs"]:
            store = RunStore(run_folder(place, arms[run["arm"]], run["seed"]))
            if store.config_path.exists():
                _check_same(store, run, Path(file))
                continue
            _lay_out(store, run, record["problems"])
            added += 1
    return added


def _read(file: Path) -> dict[str, Any]:
    record = read_json(file)
    if not isinstance(record, dict) or record.get("explorl study") != FORMAT:
        raise StoreError(f"{file} is not a study's results; write such a file with `explorl study keep FOLDER FILE`")
    return record


def _join(place: Path, record: Mapping[str, Any], file: Path) -> None:
    """Makes the study of a file that of the folder, with the arms and seeds of both."""
    new = dict(record["study"])
    if (place / "study.json").exists():
        old = read_record(place)
        for key in ("name", "profile", "baseline", "budget", "base"):
            if old.get(key) != new.get(key):
                raise StoreError(f"{file} is of another study than {place}: {key} is not the same; use another --run")
        configs = {arm["name"]: arm["config"] for arm in old["arms"]}
        for arm in new["arms"]:
            if configs.get(arm["name"], arm["config"]) != arm["config"]:
                raise StoreError(f"{file} has another arm {arm['name']!r} than {place}; use another --run")
        new = {**old, "arms": [*old["arms"], *(arm for arm in new["arms"] if arm["name"] not in configs)]}
        new["seeds"] = list(dict.fromkeys([*old["seeds"], *record["study"]["seeds"]]))
        if old.get("sequential") is not None and new["seeds"] != old["seeds"]:
            raise StoreError(f"{file} has other seeds than {place}, and in a study with two looks they are fixed")
    write_json(place / "study.json", new)


def _check_same(store: RunStore, run: Mapping[str, Any], file: Path) -> None:
    here = [line.get("reward", line.get("loss")) for line in store.metrics() if line.get("kind") == "train"]
    there = [line.get("reward", line.get("loss")) for line in run["metrics"]]
    if [_short({"": value})[""] for value in here] != there:
        raise StoreError(
            f"{store.folder} holds another run of arm {run['arm']!r}, seed {run['seed']}, than {file}; keep one of them"
        )


def _lay_out(store: RunStore, run: Mapping[str, Any], problems: Mapping[str, Sequence[str]]) -> None:
    """The files of a run as far as they are known; its configuration last: only with it there is a run."""
    write_text(store.metrics_path, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in run["metrics"]))
    write_json(store.provenance_path, run["provenance"])
    for name, evaluation in run["evaluations"].items():
        asked, samples = problems[evaluation["problems"]], evaluation["samples"]
        marks = [place < right for right in evaluation["right"] for place in range(samples)]
        columns = {
            "problem": [problem for problem in asked for _ in range(samples)],
            "completion": [""] * len(marks),
            "correct": marks,
            "error": [None if mark else UNKNOWN for mark in marks],
        }
        write_parquet(store.folder / "evaluations" / f"{name}.parquet", columns)
        write_json(store.folder / "evaluations" / f"{name}.json", evaluation["summary"])
    write_text(
        store.folder / "model" / "README.md", "This run was restored from its results; its policy was not kept.\n"
    )
    write_json(store.kind_path, {"kind": run["kind"]})
    store.write_config(run["config"])
