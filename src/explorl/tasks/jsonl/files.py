"""The files of the task ``jsonl``, and the problems of each split in them."""

from __future__ import annotations

import gc
import hashlib
import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

from explorl.tasks.base import Problem
from explorl.tasks.json_lines import Record, group_by_split, read_records, short_repr, split_files
from explorl.tasks.jsonl.rows import EXAMPLE, as_messages, differing_column, read_row

DataFile = tuple[str, str, int, int]
"""A file's split, its path, and its modification time and size, which tell whether it has changed."""


def find_files(data_dir: str | Path | None, path: str | Path | None) -> tuple[DataFile, ...]:
    """Return the files of a folder, or the one file at a path; raise if there are none."""
    if data_dir is None and path is None:
        raise ValueError("task 'jsonl' needs data_dir, a folder with train.jsonl in it, or path, a file")
    source = Path(data_dir or ".") / os.path.expanduser(path or "")
    if not source.exists():
        raise FileNotFoundError(f"there is no file {str(source)!r}; give one with lines like {EXAMPLE}")
    files = _files_in(source) if source.is_dir() else {"all": source}
    return tuple((split, str(file), *_state(file)) for split, file in files.items())


def _files_in(folder: Path) -> dict[str, Path]:
    """Return the files of a folder by split, or its only one as "all"."""
    if files := split_files(folder):
        return files
    paths = sorted(folder.glob("*.jsonl"))
    if len(paths) == 1:
        return {"all": paths[0]}
    if paths:
        names = ", ".join(path.name for path in paths[:5])
        raise ValueError(
            f"{str(folder)!r} has {len(paths)} files ({names}); choose one with path, or name one train.jsonl"
        )
    others = sorted(path.name for path in folder.iterdir() if path.suffix in (".csv", ".json", ".parquet", ".gz"))
    hint = f"; write {others[0]} as JSONL, one object per line" if others else ""
    raise FileNotFoundError(f"no .jsonl file in {str(folder)!r}{hint}; give a folder with lines like {EXAMPLE} in one")


def _state(file: Path) -> tuple[int, int]:
    state = os.stat(file)
    return state.st_mtime_ns, state.st_size


@lru_cache(maxsize=4)
def read_splits(files: tuple[DataFile, ...], verifier: str, holdout: float, seed: int) -> Mapping[str, list[Problem]]:
    """Return the problems of each split; held-out problems are in no other. Unchanged files are read once."""
    is_collecting = gc.isenabled()
    gc.disable()  # it would traverse all rows again and again, and find nothing to free
    try:
        return _splits(files, verifier, holdout, seed)
    finally:
        if is_collecting:
            gc.enable()


def _splits(files: tuple[DataFile, ...], verifier: str, holdout: float, seed: int) -> dict[str, list[Problem]]:
    rows = {split: list(read_records(Path(path), EXAMPLE)) for split, path, _, _ in files}
    for split, path, _, _ in files:
        if not rows[split]:
            raise ValueError(f"{path}: no rows; give lines like {EXAMPLE}")
    if list(rows) == ["all"]:
        rows = group_by_split(rows["all"])
    splits = {split: _unique(part, verifier, split) for split, part in rows.items()}
    if "all" in splits:
        splits["train"] = splits.pop("all")
    if "holdout" not in splits and "train" in splits:
        splits |= _hold_out(splits["train"], holdout, seed)
    held_out = splits.get("holdout", {})
    for split in ("train", "sft"):
        if shared := [key for key in splits.get(split, ()) if key in held_out]:
            warnings.warn(
                f"{len(shared)} of the {len(splits[split])} prompts in {split!r} are also in the holdout, and are "
                f"removed from {split!r}",
                stacklevel=2,
            )
            splits[split] = {key: problem for key, problem in splits[split].items() if key not in held_out}
    if "sft" not in splits:
        train = splits.get("train", {})
        splits["sft"] = {key: problem for key, problem in train.items() if "completion" in problem.data}
    in_messages = any(isinstance(problem.data["prompt"], list) for part in splits.values() for problem in part.values())
    return {split: [_unify_prompt(problem, in_messages) for problem in part.values()] for split, part in splits.items()}


def _unique(rows: Sequence[Record], verifier: str, split: str) -> dict[str, Problem]:
    """Return the problems of rows by id; raise ValueError if the same prompt has two different answers."""
    problems: dict[str, Problem] = {}
    locations: dict[str, str] = {}
    for record, location in rows:
        problem = read_row(record, location, verifier, is_example=split == "sft")
        if (first := problems.setdefault(problem.id, problem)) is problem:
            locations[problem.id] = location
        elif column := differing_column(first, problem):
            raise ValueError(
                f"{location}: the same prompt as in {locations[problem.id]}, but another {column} "
                f"({short_repr(problem.data.get(column))}, not {short_repr(first.data.get(column))}); keep one of "
                "them, or give a list of right answers"
            )
    return problems


def _hold_out(problems: Mapping[str, Problem], holdout: float, seed: int) -> dict[str, dict[str, Problem]]:
    """Split off a share or number of problems as the holdout, drawn by seed and independent of their order."""
    count = int(holdout) if holdout >= 1 else -int(-len(problems) * holdout // 1)
    if count >= len(problems) and holdout:
        raise ValueError(f"holdout={holdout!r} would hold out all {len(problems)} rows; give a smaller one")
    order = sorted(problems, key=lambda key: hashlib.sha256(f"holdout {seed} {key}".encode()).digest())
    chosen = dict.fromkeys(order[:count])
    return {
        "train": {key: problem for key, problem in problems.items() if key not in chosen},
        "holdout": {key: problems[key] for key in chosen},
    }


def _unify_prompt(problem: Problem, in_messages: bool) -> Problem:
    """Turn the prompt into messages if one of the files has messages: a table's column has one type."""
    if not in_messages:
        return problem
    return replace(problem, data={**problem.data, "prompt": as_messages(problem.data["prompt"])})
