"""The files of the task ``jsonl``, and the problems of each split that they hold."""

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
"""Of which split it is, where it is, when it was written, and how long it is."""


def find_files(data_dir: str | Path | None, path: str | Path | None) -> tuple[DataFile, ...]:
    """The files that a folder, a file, or a file in a folder is; an error in words where there are none."""
    if data_dir is None and path is None:
        raise ValueError("task 'jsonl' needs data_dir, a folder with train.jsonl in it, or path, a file")
    place = Path(data_dir or ".") / os.path.expanduser(path or "")
    if not place.exists():
        raise FileNotFoundError(f"there is no file {str(place)!r}; give one with lines like {EXAMPLE}")
    files = _in_folder(place) if place.is_dir() else {"all": place}
    return tuple((split, str(file), *_state(file)) for split, file in files.items())


def _in_folder(folder: Path) -> dict[str, Path]:
    """The files of a folder by split, or its only one as "all"."""
    if files := split_files(folder):
        return files
    found = sorted(folder.glob("*.jsonl"))
    if len(found) == 1:
        return {"all": found[0]}
    if found:
        names = ", ".join(path.name for path in found[:5])
        raise ValueError(
            f"{str(folder)!r} has {len(found)} files ({names}); give one with path, or call one train.jsonl"
        )
    others = sorted(path.name for path in folder.iterdir() if path.suffix in (".csv", ".json", ".parquet", ".gz"))
    hint = f"; write {others[0]} as JSONL, one object per line" if others else ""
    raise FileNotFoundError(f"no .jsonl file in {str(folder)!r}{hint}; give a folder with lines like {EXAMPLE} in one")


def _state(file: Path) -> tuple[int, int]:
    state = os.stat(file)
    return state.st_mtime_ns, state.st_size


@lru_cache(maxsize=4)
def read_splits(files: tuple[DataFile, ...], verifier: str, holdout: float, seed: int) -> Mapping[str, list[Problem]]:
    """The problems of each split; what is held out is in no other. Files that have not changed are read once."""
    is_collecting = gc.isenabled()
    gc.disable()  # it would look through all rows again and again, and find none to throw away
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
    given = {split: _unique(part, verifier, split) for split, part in rows.items()}
    if "all" in given:
        given["train"] = given.pop("all")
    if "holdout" not in given and "train" in given:
        given |= _held_out(given["train"], holdout, seed)
    held = given.get("holdout", {})
    for split in ("train", "sft"):
        if kept := [key for key in given.get(split, ()) if key in held]:
            warnings.warn(
                f"{len(kept)} of the {len(given[split])} prompts in {split!r} are in the holdout too, and are left out "
                "of it",
                stacklevel=2,
            )
            given[split] = {key: one for key, one in given[split].items() if key not in held}
    if "sft" not in given:
        given["sft"] = {key: one for key, one in given.get("train", {}).items() if "completion" in one.data}
    has_messages = any(isinstance(one.data["prompt"], list) for part in given.values() for one in part.values())
    return {split: [_asked(one, has_messages) for one in part.values()] for split, part in given.items()}


def _unique(rows: Sequence[Record], verifier: str, split: str) -> dict[str, Problem]:
    """Rows as problems by their ids; the same prompt with another answer is an error."""
    problems: dict[str, Problem] = {}
    places: dict[str, str] = {}
    for record, place in rows:
        one = read_row(record, place, verifier, is_example=split == "sft")
        if (first := problems.setdefault(one.id, one)) is one:
            places[one.id] = place
        elif column := differing_column(first, one):
            raise ValueError(
                f"{place}: the same prompt as in {places[one.id]}, with another {column} "
                f"({short_repr(one.data.get(column))}, not {short_repr(first.data.get(column))}); keep one of them, or "
                "give a list of right answers"
            )
    return problems


def _held_out(problems: Mapping[str, Problem], holdout: float, seed: int) -> dict[str, dict[str, Problem]]:
    """A share or number of problems, drawn by seed and not by their order, and the rest."""
    count = int(holdout) if holdout >= 1 else -int(-len(problems) * holdout // 1)
    if count >= len(problems) and holdout:
        raise ValueError(f"holdout={holdout!r} would hold out all of the {len(problems)} rows; give a smaller one")
    order = sorted(problems, key=lambda key: hashlib.sha256(f"holdout {seed} {key}".encode()).digest())
    chosen = dict.fromkeys(order[:count])
    return {
        "train": {key: one for key, one in problems.items() if key not in chosen},
        "holdout": {key: problems[key] for key in chosen},
    }


def _asked(problem: Problem, in_messages: bool) -> Problem:
    """In a table prompts are all text or all messages: these, if one of the files has them."""
    if not in_messages:
        return problem
    return replace(problem, data={**problem.data, "prompt": as_messages(problem.data["prompt"])})
