"""A run's folder: whole files, no double step, clear errors."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from explorl.core.store import (
    RunStore,
    StoreError,
    atomic_folder,
    atomic_path,
    file_name,
    kind_of,
    step_files,
    storage_errors,
    write_json,
    write_parquet,
    write_text,
)
from explorl.core.text import clean

from .hostile import HOSTILE, NAMES, raw


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
    again = RunStore.create(tmp_path / "run", {"seed": 4})
    assert again.config() == {"seed": 4}, "without a step it may be started again"
    again.append_metrics({"step": 1, "kind": "train", "reward": 0.5})
    with pytest.raises(StoreError, match=r"already holds a run.*train --resume"):
        RunStore.create(tmp_path / "run", {})
    with pytest.raises(StoreError, match="holds no run"):
        RunStore.open(tmp_path / "elsewhere")
    store.config_path.write_text("- a list")
    with pytest.raises(StoreError, match="not a mapping"):
        store.config()


def test_a_run_is_of_one_kind(tmp_path: Path) -> None:
    store = RunStore(tmp_path / "run")
    store.begin({"seed": 3}, "sft")
    assert json.loads((tmp_path / "run" / "run.json").read_text()) == {"kind": "sft"}
    store.begin({"seed": 3}, "grpo")
    assert store.kind == "grpo", "it had no step yet"
    store.append_metrics({"step": 1, "kind": "train"})
    store.begin({"seed": 5}, "grpo")
    assert store.config() == {"seed": 5}
    with pytest.raises(StoreError, match=r"of kind grpo, not sft.*`explorl train --resume .*run`"):
        store.begin({}, "sft")


@pytest.mark.parametrize(("line", "kind"), [({"reward": 1.0}, "grpo"), ({"loss": 1.0}, "sft")])
def test_the_kind_of_an_older_run_is_told_from_its_metrics(line: dict[str, float], kind: str, tmp_path: Path) -> None:
    store = RunStore.create(tmp_path, {})
    assert store.kind is None
    store.append_metrics({"step": 1, "kind": "train", **line})
    assert store.kind == kind


@pytest.mark.parametrize(("name", "kind"), [("study.json", "study"), ("evaluation.json", "evaluation")])
def test_what_is_no_run_is_not_resumed_as_one(name: str, kind: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("{}")
    assert kind_of(tmp_path) == kind
    with pytest.raises(StoreError, match=rf"holds an? {kind}; name another folder"):
        RunStore.create(tmp_path, {})
    with pytest.raises(StoreError, match=f"`explorl {kind[:4] if kind == 'evaluation' else kind} "):
        RunStore.open(tmp_path)


def test_two_processes_do_not_train_in_one_folder(tmp_path: Path) -> None:
    first = RunStore(tmp_path)
    first.lock()
    with pytest.raises(StoreError, match="another process is at work"):
        RunStore(tmp_path).lock()
    first.unlock()
    RunStore(tmp_path).lock()


def test_a_damaged_checkpoint_is_set_aside(tmp_path: Path) -> None:
    store, messages = RunStore(tmp_path), list[str]()
    for step in (2, 10, 100):
        (store.checkpoints / f"checkpoint-{step}").mkdir(parents=True)
    faults = {"checkpoint-100": "it is empty"}
    checkpoint = store.latest_valid_checkpoint(lambda path: faults.get(path.name), messages.append)
    assert checkpoint == store.checkpoints / "checkpoint-10"
    assert messages == ["checkpoint-100 is damaged (it is empty); resuming from checkpoint-10"]
    assert (store.checkpoints / "damaged-checkpoint-100").is_dir()
    with pytest.raises(StoreError, match=r"no valid checkpoint: in checkpoint-10, torn; remove .*checkpoints"):
        store.latest_valid_checkpoint(lambda path: "torn", messages.append)
    assert (store.checkpoints / "checkpoint-10").is_dir()
    assert RunStore(tmp_path / "none").latest_valid_checkpoint(lambda path: None, messages.append) is None


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


def test_files_of_steps_are_in_the_order_of_their_steps(tmp_path: Path) -> None:
    for name in ("step-999999", "step-1000000", "step-000002", "step-000002-copy"):
        (tmp_path / f"{name}.json").touch()
    assert list(step_files(tmp_path, ".json")) == [2, 999_999, 1_000_000]


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


# ---------------------------------------------------------------------------- text from strangers
MEGABYTE = "[/b]\x1b\ud800" * 170_000


def test_json_holds_any_text_as_it_was(tmp_path: Path) -> None:
    value = {"texts": [*NAMES, MEGABYTE], **{name: name for name in NAMES}}
    write_json(tmp_path / "value.json", value)
    assert json.loads((tmp_path / "value.json").read_text(encoding="utf-8")) == value


def test_text_files_hold_any_text(tmp_path: Path) -> None:
    write_text(tmp_path / "a.txt", "\n".join([*NAMES, MEGABYTE]))
    assert "a\ufffdb" in (tmp_path / "a.txt").read_text(encoding="utf-8")


def test_parquet_holds_any_text_cleaned(tmp_path: Path) -> None:
    texts, parts = [*NAMES, MEGABYTE, None], [*([name, ""] for name in NAMES), [MEGABYTE], None]
    write_parquet(tmp_path / "a.parquet", {"text": texts, "parts": parts, "re\ud800ward": [0.5] * len(texts)})
    actual = pq.read_table(tmp_path / "a.parquet").to_pydict()
    expected = [clean(name.replace("\r", "\n")) for name in [*NAMES, MEGABYTE]]
    assert actual["text"] == [*expected, None]
    assert [parts and parts[0] for parts in actual["parts"]] == [*expected, None]
    assert not raw("".join(actual["text"][:-1]) + "".join(actual))
    write_parquet(tmp_path / "b.parquet", {"text": ["1\r\n2\t3\n", "é中😀"]})
    assert pq.read_table(tmp_path / "b.parquet").to_pydict() == {"text": ["1\n2\t3\n", "é中😀"]}


def test_metrics_hold_any_text(tmp_path: Path) -> None:
    store = RunStore.create(tmp_path / "run", {"texts": NAMES})
    assert store.config() == {"texts": NAMES}
    store.append_metrics({"step": 1, **dict.fromkeys(NAMES, 0.5), "note": NAMES})
    store.append_metrics({"step": 2})
    store.rewind(1)
    assert store.metrics() == [{"step": 1, **dict.fromkeys(NAMES, 0.5), "note": NAMES}]


def test_provenance_holds_any_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["explorl", "train", "--run", "r\udcff\x1b[2J"])
    store = RunStore.create(tmp_path / "run", {})
    store.record_start()
    assert json.loads(store.provenance_path.read_text())[0]["command"][-1] == "r\ufffd␛[2J"


@pytest.mark.parametrize("name", [*HOSTILE.values(), "a/b", "/etc", ".hidden", "-x", "", "n" * 300, "é" * 300, "\0"])
def test_any_name_is_a_file_name(name: str, tmp_path: Path) -> None:
    stem = file_name(name)
    (tmp_path / stem).mkdir()
    assert [path.name for path in tmp_path.iterdir()] == [stem]
    assert stem[0] not in ".-"
    assert len(stem.encode()) <= 80


def test_file_names_keep_what_they_can_and_tell_long_ones_apart() -> None:
    assert file_name("smollm2-135m_a.b+c") == "smollm2-135m_a.b+c"
    assert file_name("a/b c") == "a-b-c"
    assert file_name("x" * 100 + "1") != file_name("x" * 100 + "2")
    assert file_name("|") != file_name("/")
