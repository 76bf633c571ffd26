"""Problem files and split files: read back as written, and every bad line named."""

from __future__ import annotations

import hashlib
import os
import stat
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from explorl.core.store import StoreError
from explorl.tasks.countdown.generator import MINI, PAPER, Puzzle, make_splits
from explorl.tasks.countdown.problem_files import (
    HUB_ID,
    TEST_FILE,
    TRAIN_FILE,
    read_folder,
    read_hub,
    read_jsonl,
    read_splits,
    write_splits,
)

GOOD = '{"nums": [3, 7, 12], "target": 33}\n'


def test_reads_lines_and_skips_blank_ones(tmp_path: Path) -> None:
    file = tmp_path / "problems.jsonl"
    file.write_text(GOOD + "\n" + '{"target": 8, "nums": [1, 7], "extra": null}')
    assert read_jsonl(file) == [Puzzle((3, 7, 12), 33), Puzzle((1, 7), 8)]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("nums: 3", "not a JSON object: 'nums: 3"),
        ("[3, 7]", "not a JSON object"),
        ('{"nums": [3', "not a JSON object"),
        ("[" * 100_000, "not a JSON object"),
        ("9" * 5_000, "not a JSON object"),
        (b'{"nums": [3], "target": "\xff"}', "not a JSON object"),
        ('{"nums": [3], "target": 33, "target": 34}', "duplicate key 'target'"),
        ('{"target": 33}', "no field 'nums'"),
        ('{"nums": [3]}', "no field 'target'"),
        ('{"nums": [3], "target": "33"}', "target is '33'; give a positive integer, like 33"),
        ('{"nums": [3], "target": 33.0}', "target is 33.0"),
        ('{"nums": [3], "target": null}', "target is None"),
        ('{"nums": [3], "target": true}', "target is True"),
        ('{"nums": [3], "target": 0}', "target is 0"),
        ('{"nums": [3], "target": NaN}', "target is nan"),
        ('{"nums": [], "target": 3}', r"nums is \[\]; give positive integers .* like \[3, 7, 12\]"),
        ('{"nums": "3 7", "target": 3}', "nums is '3 7'"),
        ('{"nums": [3, "7"], "target": 3}', "nums is"),
        ('{"nums": [3, 7.5], "target": 3}', "nums is"),
        ('{"nums": [3, true], "target": 3}', "nums is"),
        ('{"nums": [3, -7], "target": 3}', "nums is"),
        ('{"nums": [1000000000], "target": 3}', "nums is"),
    ],
)
def test_a_bad_line_is_named_by_file_and_number(tmp_path: Path, line: str | bytes, message: str) -> None:
    file = tmp_path / "problems.jsonl"
    file.write_bytes(GOOD.encode() * 2 + (line if isinstance(line, bytes) else line.encode()) + b"\n" + GOOD.encode())
    with pytest.raises(ValueError, match=rf"problems\.jsonl, line 3: {message}") as error:
        read_jsonl(file)
    assert len(str(error.value)) < 400
    assert "give " in str(error.value)


def test_an_empty_file_is_an_error(tmp_path: Path) -> None:
    file = tmp_path / "problems.jsonl"
    file.write_text("\n")
    with pytest.raises(ValueError, match=r"problems\.jsonl: no problems"):
        read_jsonl(file)
    with pytest.raises(ValueError, match=r"problems\.jsonl: no problems"):
        read_splits(file)


def test_splits_are_read_back_as_written(tmp_path: Path) -> None:
    splits = make_splits(PAPER, {"sft": 40, "train": 20, "holdout": 10}, seed=2)
    write_splits(tmp_path / "splits.jsonl", splits)
    assert read_splits(tmp_path / "splits.jsonl") == splits
    assert os.listdir(tmp_path) == ["splits.jsonl"]
    assert stat.S_IMODE((tmp_path / "splits.jsonl").stat().st_mode) & 0o400


@pytest.mark.parametrize(
    ("space", "digest"),
    [
        (MINI, "23fb87e2dcf974a56f4d2f7e753d27e1eb8b7fee2e6cae24b3d5f7c453167b58"),
        (PAPER, "d50795501dc4ec9ff5a9e8b65a10fdfb50848bd1fc5751b5aad86ad93f185018"),
    ],
)
def test_a_seed_gives_the_same_file_everywhere(tmp_path: Path, space: Any, digest: str) -> None:
    write_splits(tmp_path / "splits.jsonl", make_splits(space, {"sft": 50, "train": 30, "holdout": 20}, seed=0))
    assert hashlib.sha256((tmp_path / "splits.jsonl").read_bytes()).hexdigest() == digest


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (GOOD, "split is None; give one of sft, train, holdout"),
        ('{"split": "test", "nums": [3], "target": 3}', "split is 'test'"),
        ('{"split": ["sft"], "nums": [3], "target": 3}', r"split is \['sft'\]"),
        ('{"split": "train", "nums": [7, 3], "target": 10}', "is already in .*, line 1"),
    ],
)
def test_a_bad_split_file(tmp_path: Path, line: str, message: str) -> None:
    file = tmp_path / "splits.jsonl"
    file.write_text('{"split": "sft", "nums": [3, 7], "target": 10}\n' + line)
    with pytest.raises(ValueError, match=rf"splits\.jsonl, line 2: .*{message}"):
        read_splits(file)


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "splits.jsonl"
    write_splits(file, {"sft": [Puzzle((3, 7), 10)]})
    before = file.read_bytes()

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StoreError, match="No space left"):
        write_splits(file, {"sft": [Puzzle((1, 2), 3)]})
    assert file.read_bytes() == before
    assert os.listdir(tmp_path) == ["splits.jsonl"]


def test_folders(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=f"no file {TRAIN_FILE}"):
        read_folder(tmp_path)
    (tmp_path / TRAIN_FILE).write_text(GOOD)
    with pytest.raises(FileNotFoundError, match=f"no file {TEST_FILE}"):
        read_folder(tmp_path)
    (tmp_path / TEST_FILE).write_text('{"nums": [1, 2], "target": 3}')
    assert read_folder(tmp_path) == ([Puzzle((3, 7, 12), 33)], [Puzzle((1, 2), 3)])


def test_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    def load_dataset(name: str, split: str) -> dict[str, Any]:
        assert (name, split) == (HUB_ID, "train")
        return {"nums": [[3, 7], [1, 2]], "target": [10, 3]}

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    assert read_hub() == [Puzzle((3, 7), 10), Puzzle((1, 2), 3)]

    def offline(name: str, split: str) -> None:
        raise ConnectionError("offline")

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=offline))
    with pytest.raises(FileNotFoundError, match=r"\(offline\); give data_dir, .* or source='generated'"):
        read_hub()
