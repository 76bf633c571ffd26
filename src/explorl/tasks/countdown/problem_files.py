"""Read Countdown problems from files and from the Hugging Face hub; read and write split files."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from explorl.core.store import write_text
from explorl.tasks.countdown.generator import SPLITS, Key, Puzzle, Splits
from explorl.tasks.expression import MAX_DIGITS
from explorl.tasks.json_lines import read_records, short_repr

HUB_ID = "Jiayi-Pan/Countdown-Tasks-3to4"
TRAIN_FILE = "countdown-3to4-train.jsonl"
TEST_FILE = "countdown-3to4-test.jsonl"

_EXAMPLE = '{"nums": [3, 7, 12], "target": 33}'


def read_folder(folder: str | Path) -> tuple[list[Puzzle], list[Puzzle]]:
    """Return the problems of a folder's train file and of its test file."""
    for name in (TRAIN_FILE, TEST_FILE):
        if not (Path(folder) / name).is_file():
            raise FileNotFoundError(
                f"no file {name} in {str(folder)!r}; give a folder with {TRAIN_FILE} and {TEST_FILE}"
            )
    return read_jsonl(Path(folder) / TRAIN_FILE), read_jsonl(Path(folder) / TEST_FILE)


def read_hub() -> list[Puzzle]:
    """Return all problems of Countdown-Tasks-3to4."""
    import datasets  # here, because the import takes seconds

    try:
        rows = datasets.load_dataset(HUB_ID, split="train")
    except OSError as error:
        raise FileNotFoundError(
            f"cannot load {HUB_ID} from the Hugging Face hub ({error}); give data_dir, a folder with {TRAIN_FILE} and "
            f"{TEST_FILE}, or source='generated'"
        ) from error
    return [Puzzle(tuple(nums), target) for nums, target in zip(rows["nums"], rows["target"], strict=True)]


def read_jsonl(path: str | Path) -> list[Puzzle]:
    """Return the problems of a file with one JSON object per line, with ``nums`` and ``target``."""
    puzzles = [_to_puzzle(record, location) for record, location in read_records(Path(path), _EXAMPLE)]
    if not puzzles:
        raise ValueError(f"{path}: no problems; give a file with lines like {_EXAMPLE}")
    return puzzles


def write_splits(path: str | Path, splits: Mapping[str, Sequence[Puzzle]]) -> None:
    """Write splits to one JSONL file atomically."""
    lines = [
        json.dumps({"split": name, "nums": list(puzzle.nums), "target": puzzle.target}) + "\n"
        for name in SPLITS
        for puzzle in splits.get(name, ())
    ]
    write_text(path, "".join(lines))


def read_splits(path: str | Path) -> Splits:
    """Return the splits of a file that `write_splits` wrote; raise ValueError if it has a problem twice."""
    splits: Splits = {name: [] for name in SPLITS}
    locations: dict[Key, str] = {}
    for record, location in read_records(Path(path), _EXAMPLE):
        puzzle = _to_puzzle(record, location)
        name = record.get("split")
        if name not in SPLITS:
            raise ValueError(f"{location}: split is {name!r}; give one of {', '.join(SPLITS)}")
        if puzzle.key in locations:
            raise ValueError(f"{location}: {puzzle.key} is already in {locations[puzzle.key]}; keep one of them")
        locations[puzzle.key] = location
        splits[name].append(puzzle)
    if not locations:
        raise ValueError(f"{path}: no problems; give a file that write_splits wrote")
    return splits


def _to_puzzle(record: Mapping[str, Any], location: str) -> Puzzle:
    for field in ("nums", "target"):
        if field not in record:
            raise ValueError(f"{location}: no field {field!r}; give a line like {_EXAMPLE}")
    nums, target = record["nums"], record["target"]
    if not isinstance(nums, list) or not nums or not all(map(_is_number, nums)):
        raise ValueError(
            f"{location}: nums is {short_repr(nums)}; give positive integers of at most {MAX_DIGITS} digits, "
            "like [3, 7, 12]"
        )
    if not _is_number(target):
        raise ValueError(f"{location}: target is {short_repr(target)}; give a positive integer, like 33")
    return Puzzle(tuple(nums), target)


def _is_number(value: object) -> bool:
    # bool is a subclass of int, but true is not a number in JSON.
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value < 10**MAX_DIGITS
