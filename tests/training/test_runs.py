"""Runs in folders: trained, killed at any moment, resumed; and a disk that fills up."""

from __future__ import annotations

import gc
import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
import yaml
from rich.console import Console
from safetensors.torch import load_file

from explorl.core.config import Config, load_config
from explorl.core.store import RunStore, StoreError
from explorl.training.grpo.run import is_finished, run_grpo
from explorl.training.run_setup import run_name

STEPS = 8


def small_config(policy: Path, **training: object) -> Config:
    settings = {
        "steps": STEPS, "prompts_per_step": 2, "generations": 4, "micro_batch": 4, "checkpoint_every": 2,
        "learning_rate": 1e-3, **training,
    }  # fmt: skip
    return load_config(
        preset="tiny",
        values={
            "model": {"name": str(policy)},
            "task": {"train_problems": 64},
            "rollout": {"max_tokens": 8},
            "training": settings,
            "strategies": ["mask_truncated", "ppl_shaping"],
        },
    )


def steps_of(store: RunStore) -> list[int]:
    return [record["step"] for record in store.metrics() if record["kind"] == "train"]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def test_a_run_leaves_everything_that_a_reader_needs(small_policy: Path, tmp_path: Path) -> None:
    config = small_config(small_policy).model_copy(deep=True)
    config.evaluation.every = 4
    config.evaluation.problems = 3
    config.evaluation.samples = 2
    store = RunStore.create(tmp_path / "run", config.dump())
    assert not is_finished(store)
    model = run_grpo(config, store, console=Console(quiet=True))
    assert is_finished(store)
    assert model == store.folder / "model"
    assert steps_of(store) == list(range(1, STEPS + 1))
    scores = [record for record in store.metrics() if record["kind"] == "evaluation"]
    assert [record["step"] for record in scores] == [0, 4, 8]
    assert all("pass@2" in record for record in scores)
    assert (store.folder / "evaluations" / "step-000004.parquet").exists()
    record = store.metrics()[-1]
    assert record["strategy/ppl_shaping/advantage_tokens"] >= 0
    assert {"entropy", "reward", "loss", "grad_norm", "rewards/correctness/mean"} <= record.keys()
    trained = [line for line in store.metrics() if line["kind"] == "train"]
    assert [line["step"] for line in trained if math.isfinite(line["rewards/correctness/mean"])] == list(
        range(1, STEPS + 1)
    )
    rollouts = pq.read_table(store.rollouts / "step-000001.parquet").to_pydict()
    assert len(rollouts["completion"]) == 8
    assert {"prompt", "advantage", "reward/correctness", "reward/format"} <= rollouts.keys()
    assert [p.name for p in sorted(store.checkpoints.iterdir())] == ["checkpoint-6", "checkpoint-8"]
    assert json.loads(store.provenance_path.read_text())[0]["seed"] == 0


def test_metrics_stream_to_tensorboard(small_policy: Path, tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    config = small_config(small_policy, steps=3, report_to=["tensorboard"])
    store = RunStore.create(tmp_path / "run", config.dump())
    run_grpo(config, store, console=Console(quiet=True))
    events = accumulator.EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("train/reward")] == [1, 2, 3]
    written = [record["loss"] for record in store.metrics() if record["kind"] == "train"]
    assert [event.value for event in events.Scalars("train/loss")] == pytest.approx(written)


def test_evaluations_stream_to_tensorboard(small_policy: Path, tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    config = small_config(small_policy, steps=3, report_to=["tensorboard"]).model_copy(deep=True)
    config.evaluation.every, config.evaluation.problems, config.evaluation.samples = 2, 3, 2
    store = RunStore.create(tmp_path / "run", config.dump())
    run_grpo(config, store, console=Console(quiet=True))
    (file,) = (tmp_path / "run" / "tensorboard").glob("events.*")  # the last evaluation comes before the writer closes
    events = accumulator.EventAccumulator(str(file))
    events.Reload()
    stored = {line["step"]: line for line in store.metrics() if line["kind"] == "evaluation"}
    assert sorted(stored) == [0, 2, 3]
    for k in (1, 2):
        scalars = {event.step: event.value for event in events.Scalars(f"eval/pass@{k}")}
        assert scalars == pytest.approx({step: line[f"pass@{k}"] for step, line in stored.items()})
        low, high = (events.Scalars(f"eval/pass@{k}_{end}") for end in ("low", "high"))
        assert all(a.value <= scalars[a.step] <= b.value for a, b in zip(low, high, strict=True))
    text = {tag: events.Tensors(tag)[0].tensor_proto.string_val[0].decode() for tag in events.Tags()["tensors"]}
    assert text["eval/task/text_summary"] == config.task.name
    assert "PerplexityShaping(" in text["eval/strategies/text_summary"]


def test_a_tracker_calls_a_run_by_its_place() -> None:
    assert run_name(Path("/x/runs/grpo-1")) == "grpo-1"
    assert run_name(Path("/x/runs/deng-tiny/arms/GRPO/seed-0")) == "deng-tiny/GRPO/seed-0"


def test_an_interrupted_run_ends_with_the_same_weights(small_policy: Path, tmp_path: Path) -> None:
    config = small_config(small_policy)
    whole = RunStore.create(tmp_path / "whole", config.dump())
    run_grpo(config, whole, console=Console(quiet=True))

    class Interrupted(Exception):
        pass

    def interrupt(step: int) -> None:
        if step == 5:
            raise Interrupted

    broken = RunStore.create(tmp_path / "broken", config.dump())
    with pytest.raises(Interrupted):
        run_grpo(config, broken, console=Console(quiet=True), on_step=interrupt)
    assert steps_of(broken)[-1] == 4
    run_grpo(config, broken, console=Console(quiet=True))
    assert steps_of(broken) == list(range(1, STEPS + 1))
    for name, value in weights(whole.folder / "model").items():
        torch.testing.assert_close(weights(broken.folder / "model")[name], value, rtol=0, atol=0)
    assert [r.get("loss") for r in whole.metrics()] == [r.get("loss") for r in broken.metrics()]


@pytest.mark.slow
def test_killed_at_ten_random_moments_it_still_ends(small_policy: Path, tmp_path: Path) -> None:
    """`kill -9`, ten times: the run ends, no file is corrupt, the metrics have no gap and no double step."""
    config = small_config(small_policy, steps=48)
    folder = tmp_path / "run"
    RunStore.create(folder, config.dump())
    command = [sys.executable, "-m", "explorl.cli.app", "train", "--resume", str(folder)]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    moments = random.Random(0)
    reached = []
    for _ in range(10):
        process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        _wait_for_steps(process, RunStore(folder), moments.randint(0, 5), moments.uniform(0.0, 0.1))
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
        reached.append(max(steps_of(RunStore(folder)), default=0))
    assert len(set(reached)) > 3, "the kills came at different moments of training"
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    store = RunStore.open(folder)
    assert is_finished(store)
    assert steps_of(store) == list(range(1, 49))
    for path in folder.rglob("*"):
        if path.suffix == ".parquet":
            assert pq.read_table(path).num_rows == (8 if path.parent == store.rollouts else 64 * 8)
        elif path.suffix == ".json":
            json.loads(path.read_text())
        elif path.suffix == ".safetensors":
            load_file(path)
        assert not path.name.endswith(".tmp")
    assert sorted(p.name for p in store.rollouts.iterdir()) == [f"step-{i:06d}.parquet" for i in range(1, 49)]


def _wait_for_steps(process: subprocess.Popen[bytes], store: RunStore, steps: int, more: float) -> None:
    """Until the process has written so many lines of metrics beyond its checkpoint, and a little longer."""
    checkpoint = store.last_checkpoint()
    goal = (int(checkpoint.name.removeprefix("checkpoint-")) if checkpoint else 0) + steps
    starts = _starts(store)
    deadline = time.monotonic() + 120
    while process.poll() is None and time.monotonic() < deadline:
        if _starts(store) > starts and (steps == 0 or goal in steps_of(store)):
            break
        time.sleep(0.005)
    end = time.monotonic() + more
    while process.poll() is None and time.monotonic() < end:
        time.sleep(0.005)


def _starts(store: RunStore) -> int:
    return len(json.loads(store.provenance_path.read_text())) if store.provenance_path.exists() else 0


@pytest.fixture
def small_disk(tmp_path: Path) -> Path:
    """A file system of 3 MiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = shutil.which("mount")
    if mount is None or subprocess.run([mount, "-t", "tmpfs", "-o", "size=3m", "tmpfs", disk], check=False).returncode:
        pytest.skip("no permission to mount a small tmpfs")
    yield disk
    gc.collect()  # the error holds the file that torch could not write
    subprocess.run(["umount", disk], check=True)


def test_a_full_disk_during_a_checkpoint_is_one_clear_error(small_policy: Path, small_disk: Path) -> None:
    config = small_config(small_policy, checkpoint_every=1, keep_checkpoints=100, steps=40)
    store = RunStore.create(small_disk / "run", config.dump())
    with pytest.raises(StoreError, match=r"cannot write .*MiB free"):
        run_grpo(config, store, console=Console(quiet=True))
    assert not list(store.folder.rglob("*.tmp"))
    last = store.last_checkpoint()
    assert last is not None
    load_file(last / "model.safetensors")
    whole = steps_of(store)
    assert whole == list(range(1, len(whole) + 1))
    assert whole[-1] >= int(last.name.removeprefix("checkpoint-"))
    for old in sorted(store.checkpoints.iterdir())[:-1]:  # make room, and it goes on
        if old != last:
            shutil.rmtree(old)
    config.training.keep_checkpoints = 1
    config.training.steps = whole[-1] + 2
    run_grpo(config, store, console=Console(quiet=True))
    assert steps_of(store) == list(range(1, whole[-1] + 3))


def test_the_command_says_that_the_disk_is_full(
    small_policy: Path, small_disk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from explorl.cli.app import main

    file = small_disk.parent / "config.yaml"
    file.write_text(
        yaml.safe_dump(small_config(small_policy, checkpoint_every=1, keep_checkpoints=100, steps=40).dump())
    )
    with pytest.raises(SystemExit) as exit_:
        main(["train", "--config", str(file), "--run", str(small_disk / "run")])
    assert exit_.value.code == 2
    error = capsys.readouterr().err
    assert "cannot write" in error
    assert "Traceback" not in error


@pytest.mark.slow
def test_the_tiny_policy_is_made_again_from_nothing(tmp_path: Path) -> None:
    """`explorl sft --preset tiny`: about a quarter of an hour on two cores, and the accuracy of the shipped weights."""
    from explorl.evaluation import evaluate, protocol
    from explorl.models import load_policy, tiny_checkpoint
    from explorl.stats import paired_difference
    from explorl.tasks import get_task
    from explorl.training.sft.run import run_sft

    torch.set_num_threads(os.cpu_count() or 1)
    config = load_config(preset="tiny")
    made = run_sft(config, RunStore.create(tmp_path / "sft", config.dump()), console=Console())
    shipped, again = (json.loads((f / "recipe.json").read_text()) for f in (tiny_checkpoint(), made))
    assert again["sft"] == shipped["sft"]
    task = get_task("countdown-mini")
    problems, settings = task.problems("holdout"), protocol("plain", samples=8, max_tokens=64)
    old, new = (evaluate(load_policy(name), task, problems, settings) for name in ("tiny", str(made)))
    difference = paired_difference(new.per_problem(1), old.per_problem(1))
    # two trainings of one recipe differ by more than the problems' interval: rounding alone moves them some points
    assert difference.low < 0.03
    assert difference.high > -0.03
