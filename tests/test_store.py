"""A run's folder: whole files, no double step, clear errors."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from explorl.store import RunStore, StoreError, atomic_folder, atomic_path, storage_errors, write_json, write_parquet


def litter(folder: Path) -> list[str]:
    return [p.name for p in folder.rglob("*") if p.name.startswith(".") or p.name == "staged"]


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "value.json"
    write_json(path, {"a": 1})
    with pytest.raises(RuntimeError, match="half-way"), atomic_path(path) as temporary:
        temporary.write_text('{"a": ')
        raise RuntimeError("half-way")
    assert json.loads(path.read_text()) == {"a": 1}
    assert litter(tmp_path) == []


def test_nan_is_refused_in_json_and_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "value.json"
    write_json(path, 1)
    with pytest.raises(ValueError, match="JSON"):
        write_json(path, float("nan"))
    assert path.read_text() == "1\n"


def test_parquet_round_trip(tmp_path: Path) -> None:
    write_parquet(tmp_path / "t.parquet", {"text": ["é", None], "n": [1, 2]})
    assert pq.read_table(tmp_path / "t.parquet").to_pydict() == {"text": ["é", None], "n": [1, 2]}


def test_a_folder_takes_the_place_of_the_old_one_only_when_whole(tmp_path: Path) -> None:
    target = tmp_path / "model"
    with atomic_folder(target) as folder:
        (folder / "weights").write_text("old")
    with pytest.raises(RuntimeError), atomic_folder(target) as folder:
        (folder / "weights").write_text("ne")
        raise RuntimeError
    assert (target / "weights").read_text() == "old"
    with atomic_folder(target) as folder:
        (folder / "weights").write_text("new")
    assert (target / "weights").read_text() == "new"
    assert litter(tmp_path) == []


def test_create_and_open(tmp_path: Path) -> None:
    store = RunStore.create(tmp_path / "run", {"seed": 3, "strategies": []})
    assert RunStore.open(tmp_path / "run").config() == {"seed": 3, "strategies": []}
    with pytest.raises(StoreError, match=r"already holds a run.*--resume"):
        RunStore.create(tmp_path / "run", {})
    with pytest.raises(StoreError, match="holds no run"):
        RunStore.open(tmp_path / "elsewhere")
    store.config_path.write_text("- a list")
    with pytest.raises(StoreError, match="not a mapping"):
        store.config()


def test_a_folder_that_cannot_be_made_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match=r"cannot write .*file"):
        RunStore.create(tmp_path / "file" / "run", {})


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_without_permission(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(StoreError, match="cannot write"):
        RunStore.create(tmp_path / "run", {})


def test_metrics_lines_and_a_torn_last_line(tmp_path: Path) -> None:
    store = RunStore.create(tmp_path / "run", {})
    assert store.metrics() == []
    for step in (1, 2, 3):
        store.append_metrics({"step": step, "loss": float("nan") if step == 2 else 0.5, "more": [1.0, float("inf")]})
    with store.metrics_path.open("a") as file:
        file.write('{"step": 4, "lo')
    assert [record["step"] for record in store.metrics()] == [1, 2, 3]
    assert store.metrics()[1]["loss"] is None
    assert store.metrics()[0]["more"] == [1.0, None]


def test_a_broken_line_in_the_middle_is_named(tmp_path: Path) -> None:
    store = RunStore.create(tmp_path / "run", {})
    store.metrics_path.write_text('{"step": 1}\nnonsense\n')
    with pytest.raises(StoreError, match=r"metrics\.jsonl, line 2"):
        store.metrics()


def test_rewind_forgets_what_came_after_the_checkpoint(tmp_path: Path) -> None:
    store = RunStore.create(tmp_path / "run", {})
    for step in range(1, 6):
        store.append_metrics({"step": step})
        store.write_rollouts(step, {"completion": ["a"]})
    with store.metrics_path.open("a") as file:
        file.write('{"step": 6')
    (store.folder / ".config.yaml.x.tmp").write_text("torn")
    (store.checkpoints / "staged").mkdir(parents=True)
    store.rewind(3)
    assert [record["step"] for record in store.metrics()] == [1, 2, 3]
    assert sorted(p.name for p in store.rollouts.iterdir()) == [f"step-00000{i}.parquet" for i in (1, 2, 3)]
    assert litter(store.folder) == []
    store.append_metrics({"step": 4})
    assert [record["step"] for record in store.metrics()] == [1, 2, 3, 4]


def test_checkpoints_appear_whole_and_the_oldest_go(tmp_path: Path) -> None:
    store = RunStore.create(tmp_path / "run", {})
    assert store.last_checkpoint() is None
    for step in (5, 10, 100):
        with store.stage_checkpoint() as staging:
            (staging / f"checkpoint-{step}").mkdir()
            (staging / f"checkpoint-{step}" / "model").write_text(str(step))
            (staging / "README.md").write_text("not a checkpoint")
            assert not (store.checkpoints / f"checkpoint-{step}").exists()
    last = store.last_checkpoint()
    assert last is not None
    assert last.name == "checkpoint-100"
    with pytest.raises(RuntimeError), store.stage_checkpoint() as staging:
        (staging / "checkpoint-200").mkdir()
        raise RuntimeError
    store.prune_checkpoints(2)
    assert sorted(p.name for p in store.checkpoints.iterdir()) == ["checkpoint-10", "checkpoint-100"]


@pytest.mark.parametrize(
    "error",
    [OSError(28, "No space left on device"), RuntimeError("PytorchStreamWriter failed writing file data/1")],
)
def test_a_full_disk_is_named(tmp_path: Path, error: Exception) -> None:
    with (
        pytest.raises(StoreError, match=r"cannot write .*checkpoint.*MiB free"),
        storage_errors(tmp_path / "checkpoint"),
    ):
        raise error


def test_other_errors_pass_through(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), storage_errors(tmp_path):
        raise ZeroDivisionError


def test_provenance_grows_with_each_start(tmp_path: Path) -> None:
    store = RunStore.create(tmp_path / "run", {})
    store.record_start(seed=1, resumed_from=None)
    store.record_start(seed=1, resumed_from="checkpoint-5")
    entries = json.loads(store.provenance_path.read_text())
    assert [entry["resumed_from"] for entry in entries] == [None, "checkpoint-5"]
    assert entries[0]["libraries"]["torch"]
    assert entries[0]["cores"] == os.cpu_count()
