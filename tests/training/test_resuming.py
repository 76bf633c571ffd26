"""Runs that cannot be confused: their kind, going on, being made longer, damaged checkpoints, interruptions."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from rich.console import Console
from safetensors.torch import load_file

from explorl.cli.app import main
from explorl.core.config import load_config
from explorl.core.store import RunStore
from explorl.training.callbacks import Diverged, ProgressDisplay, StopAtDivergence
from explorl.training.checkpoint_faults import find_fault


@pytest.fixture
def config_file(small_policy: Path, tmp_path: Path) -> Path:
    """A configuration of four short steps, and an SFT of three."""
    values = {
        "model": {"name": str(small_policy)},
        "task": {"train_problems": 16},
        "rollout": {"max_tokens": 8},
        "training": {
            "steps": 4, "prompts_per_step": 2, "generations": 4, "micro_batch": 4, "checkpoint_every": 2,
            "learning_rate": 1e-3,
        },
        "sft": {"from_scratch": False, "examples": 12, "batch_size": 4, "epochs": 1, "checkpoint_every": 2},
        "evaluation": {"ends": 2, "problems": 3, "samples": 2},
        "strategies": ["mask_truncated"],
    }  # fmt: skip
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(load_config(preset="tiny", values=values).dump()))
    return path


def command(*arguments: object, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    try:
        main([str(argument) for argument in arguments])
        code: Any = 0
    except SystemExit as exit_:
        code = exit_.code or 0
    out, err = capsys.readouterr()
    return int(code), out, err


def steps_of(run: Path) -> list[int]:
    return [line["step"] for line in RunStore(run).metrics() if line["kind"] == "train"]


def test_a_finished_run_made_longer_is_the_long_run(
    config_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    short, long = tmp_path / "short", tmp_path / "long"
    code, out, err = command("train", "--config", config_file, "--run", short, capsys=capsys)
    assert code == 0, err
    for words in (
        "GRPO: step 1 of 4, reward ", "tokens/s", "GRPO: step 4 of 4", "step 0: pass@1 ", "step 4: pass@1 ",
        "before training", f"policy: {short}/model", f"next: explorl report {short}", "next: explorl eval --model",
    ):  # fmt: skip
        assert words in out
    assert re.search(r"step 4: pass@1 [\d.]+%, pass@2 [\d.]+% on 2 held-out problems", out)
    change = r"[\d.]+% before training, [\d.]+% after"
    assert re.search(rf"held out: pass@1 {change}; pass@2 {change}", out)
    assert "\x1b" not in out
    assert RunStore(short).kind == "grpo"

    again = command("train", "--resume", short, capsys=capsys)
    assert again[0] == 0
    assert f"to train it further: explorl train --resume {short} --set training.steps=8" in again[1]

    code, out, err = command("train", "--resume", short, "--set", "training.steps=6", capsys=capsys)
    assert code == 0, err
    assert "step 6 of 6" in out
    assert "schedule" not in out
    assert (short / "model-step-4").is_dir()
    command("train", "--config", config_file, "--set", "training.steps=6", "--run", long, capsys=capsys)
    assert steps_of(short) == steps_of(long) == [1, 2, 3, 4, 5, 6]
    first, other = (load_file(run / "model" / "model.safetensors") for run in (short, long))
    assert all(torch.equal(first[name], other[name]) for name in first)
    starts = json.loads((short / "provenance.json").read_text())
    assert [start["resumed_from"] for start in starts] == [None, "checkpoint-4"]
    assert starts[1]["changed"] == {"training.steps": [4, 6]}

    for change, words in {
        "training.steps=3": "training.steps is 3: it was 6 in",
        "rollout.temperature=2": "rollout.temperature is 1.0 in",
        "model.name=tiny": "model.name is",
        "strategies=[]": "strategies is ['mask_truncated']",
    }.items():
        code, _, err = command("train", "--resume", short, "--set", change, capsys=capsys)
        assert code == 2
        assert words in err
    assert RunStore(short).config()["training"]["steps"] == 6


def test_rows_that_have_changed_since_are_told_of(
    config_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows, run = tmp_path / "rows.jsonl", tmp_path / "run"

    def train(answer: int, *more: object) -> tuple[int, str, str]:
        lines = [json.dumps({"prompt": f"{n}+1=", "answer": n + answer}) + "\n" for n in range(8)]
        rows.write_text("".join(lines))
        return command("train", *more, capsys=capsys)

    task = ["task.name=jsonl", f"task.path={rows}", "task.template=plain", "training.steps=2", "evaluation.ends=0"]
    assert train(1, "--config", config_file, *(f"--set={setting}" for setting in task), "--run", run)[0] == 0
    for steps, answer, warned in ((3, 1, False), (4, 2, True)):
        code, out, err = train(answer, "--resume", run, "--set", f"training.steps={steps}")
        assert code == 0, err
        assert ("the problems differ from those that" in out) == warned


def test_a_schedule_that_was_falling_is_told_of(
    config_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("explorl.training.grpo.run.run_grpo", lambda config, store, **_: store.folder / "model")
    run, config = tmp_path / "run", load_config(config_file, overrides=["training.schedule=cosine"])
    RunStore(run).begin(config.dump(), "grpo")
    out = command("train", "--resume", run, "--set", "training.steps=6", capsys=capsys)[1]
    assert "The schedule is cosine" in out
    assert "will differ from a run of 6 from the start" in " ".join(out.split())


def test_sft_and_grpo_do_not_go_on_with_each_other(
    config_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    warm = tmp_path / "warm"
    arguments = ("sft", "--config", config_file, "--set", "sft.score=true", "--run", warm)
    code, out, err = command(*arguments, capsys=capsys)
    assert code == 0, err
    for words in ("SFT: step 1 of 3, loss ", "SFT: step 3 of 3", "scoring the policy", "on 3 held-out problems"):
        assert words in out
    assert f"next: explorl train --config {warm}/config.yaml --set model.name={warm}/model" in out
    assert json.loads((warm / "run.json").read_text()) == {"kind": "sft"}
    start = json.loads((warm / "provenance.json").read_text())[0]
    assert start["kind"] == "sft"
    assert start["libraries"]["torch"]
    before = {path: path.read_bytes() for path in warm.rglob("*") if path.is_file()}
    code, _, err = command("train", "--resume", warm, capsys=capsys)
    assert code == 2
    assert f"holds a run of kind sft, not grpo; resume it with `explorl sft --resume {warm}`" in err
    assert {path: path.read_bytes() for path in warm.rglob("*") if path.is_file()} == before

    code, out, err = command("sft", "--resume", warm, "--set", "sft.epochs=2", capsys=capsys)
    assert code == 0, err
    assert "SFT: step 6 of 6" in out
    long = tmp_path / "long"
    command(*arguments[:-1], long, "--set", "sft.epochs=2", capsys=capsys)
    first, other = (load_file(run / "model" / "model.safetensors") for run in (warm, long))
    assert all(torch.equal(first[name], other[name]) for name in first)

    (warm / "run.json").write_text("")
    code, _, err = command("train", "--resume", warm, capsys=capsys)
    assert code == 2
    assert "run.json is not JSON" in err


@pytest.mark.parametrize(
    "change",
    ["model.name=nowhere", "task.template=nothing", "rollout.engine=vllm", "task.name=gym:nothing", "task.data_dir=/x"],
)
def test_what_cannot_be_trained_leaves_no_folder(
    change: str, config_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    code, _, err = command("train", "--config", config_file, "--set", change, "--run", run, capsys=capsys)
    assert code == 2, err
    assert not run.exists()


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-9])


DAMAGES = {
    "model.safetensors is incomplete": lambda folder: _truncate(folder / "model.safetensors"),
    "optimizer.pt is missing": lambda folder: (folder / "optimizer.pt").unlink(),
    "optimizer.pt is incomplete": lambda folder: _truncate(folder / "optimizer.pt"),
    "trainer_state.json is incomplete": lambda folder: (folder / "trainer_state.json").write_text(""),
    "trainer_state.json has no global_step": lambda folder: (folder / "trainer_state.json").write_text("{}"),
    "strategies.json is incomplete": lambda folder: (folder / "strategies.json").write_text(""),
    "it has no weights": lambda folder: (folder / "model.safetensors").unlink(),
}


def test_a_damaged_checkpoint_gives_way_to_the_one_before(
    config_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    command("train", "--config", config_file, "--run", run, capsys=capsys)
    old, new = run / "checkpoints" / "checkpoint-2", run / "checkpoints" / "checkpoint-4"
    assert find_fault(old) is None
    for reason, damage in DAMAGES.items():
        copy = tmp_path / "copy"
        shutil.copytree(new, copy)
        damage(copy)
        assert find_fault(copy) == reason
        shutil.rmtree(copy)
    trained = load_file(run / "model" / "model.safetensors")
    shutil.rmtree(run / "model")
    _truncate(new / "model.safetensors")
    code, out, err = command("train", "--resume", run, capsys=capsys)
    assert code == 0, err
    assert "checkpoint-4 is damaged (model.safetensors is incomplete); resuming from checkpoint-2\n" in out
    again = load_file(run / "model" / "model.safetensors")
    assert all(torch.equal(trained[name], again[name]) for name in trained)
    assert steps_of(run) == [1, 2, 3, 4]

    shutil.rmtree(run / "model")
    for folder in run.glob("checkpoints/checkpoint-*"):
        (folder / "optimizer.pt").unlink()
    code, _, err = command("train", "--resume", run, capsys=capsys)
    assert code == 2
    assert "has no valid checkpoint: in checkpoint-4, optimizer.pt is missing; remove" in err
    assert steps_of(run) == [1, 2, 3, 4]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_an_interrupted_command_says_how_to_go_on(
    number: int, code: int, config_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    run = tmp_path / "a run"

    def interrupted(config: Any, store: RunStore, **_: Any) -> None:
        store.begin(config.dump(), "grpo")
        (store.checkpoints / "checkpoint-2").mkdir(parents=True)
        os.kill(os.getpid(), number)
        raise AssertionError("went on")

    monkeypatch.setattr("explorl.training.grpo.run.run_grpo", interrupted)
    ended, _, err = command("train", "--config", config_file, "--run", run, capsys=capsys)
    assert ended == code
    assert err == f"explorl: interrupted; resume (from checkpoint-2) with: explorl train --resume '{run}'\n"

    monkeypatch.setattr("explorl.study.run_study.run_study", lambda *_, **__: os.kill(os.getpid(), number))
    monkeypatch.chdir(tmp_path)
    Path("my study.yaml").touch()
    ended, _, err = command("study", "my study.yaml", "--jobs", "2", capsys=capsys)
    assert ended == code
    assert err == "explorl: interrupted; to continue, repeat the command: explorl study 'my study.yaml' --jobs 2\n"


# ---------------------------------------------------------------------------- progress
class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def lines_in(capsys: pytest.CaptureFixture[str]) -> list[str]:
    """What was printed; rich 14.0 ends with an empty line."""
    return [line for line in capsys.readouterr().out.splitlines() if line]


def test_a_log_has_a_line_at_the_first_step_each_half_minute_and_at_the_last(
    capsys: pytest.CaptureFixture[str],
) -> None:
    clock = Clock()
    display = ProgressDisplay("GRPO", Console(), clock)
    args = SimpleNamespace(num_iterations=2)
    state = SimpleNamespace(global_step=0, max_steps=20, is_world_process_zero=True)
    display.on_train_begin(args, state, None)
    for _ in range(20):
        clock.now += 6
        state.global_step += 1
        display.on_step_end(args, state, None)
        logs = {"loss": 0.1, "reward": 0.25, "entropy": 1.5, "num_tokens": state.global_step * 1200}
        display.on_log(args, state, None, logs)
    display.on_train_end(args, state, None)
    lines = lines_in(capsys)
    assert lines[0] == "GRPO: step 1 of 10, reward 0.250, entropy 1.500, 200 tokens/s"
    assert [line.split(",")[0] for line in lines] == [f"GRPO: step {n} of 10" for n in (1, 3, 6, 8, 10)]
    assert lines[1].endswith("200 tokens/s"), "two steps after the first do not say how long the others take"
    assert lines[2].endswith("200 tokens/s, 48 s left")
    assert "left" not in lines[-1]


@pytest.mark.parametrize(("logged", "last"), [(range(1), ""), (range(1, 11), ", 200 tokens/s")])
def test_the_last_line_has_the_speed_up_to_what_was_logged(
    logged: range, last: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """What came after it, an evaluation too, took time and has no tokens that anybody has counted."""
    clock = Clock()
    display = ProgressDisplay("SFT", Console(), clock)
    args, state = SimpleNamespace(), SimpleNamespace(global_step=0, max_steps=14, is_world_process_zero=True)
    display.on_train_begin(args, state, None)
    for step in range(14):
        clock.now += 1
        state.global_step += 1
        if step in {0, *logged}:
            display.on_log(args, state, None, {"loss": 0.1, "num_tokens": state.global_step * 200})
    display.on_train_end(args, state, None)
    assert lines_in(capsys) == [
        "SFT: step 1 of 14, loss 0.100, 200 tokens/s", f"SFT: step 14 of 14, loss 0.100{last}",
    ]  # fmt: skip


def test_a_bar_counts_steps_not_updates() -> None:
    display = ProgressDisplay("GRPO", Console(quiet=True))
    args = SimpleNamespace(num_iterations=2)
    state = SimpleNamespace(global_step=0, max_steps=20, is_world_process_zero=True)
    display.on_train_begin(args, state, None)
    state.global_step = 20
    display.on_step_end(args, state, None)
    (task,) = display.progress.tasks
    assert (task.completed, task.total) == (10, 10)


@pytest.mark.parametrize("logs", [{"loss": float("nan")}, {"loss": 0.0, "grad_norm": float("inf")}])
def test_divergence_is_said_with_its_step(logs: dict[str, float]) -> None:
    callback = StopAtDivergence("training.learning_rate", 0.01)
    state = SimpleNamespace(global_step=7, max_steps=20)
    args = SimpleNamespace(num_iterations=1, fp16=False)
    callback.on_log(args, state, None, {"loss": 1.0, "grad_norm": 2.0})
    with pytest.raises(Diverged, match=r"diverged at step 7 .*lower the learning rate.*is 0\.01, try 0\.001"):
        callback.on_log(args, state, None, logs)
    callback.on_log(SimpleNamespace(num_iterations=1, fp16=True), state, None, logs)
