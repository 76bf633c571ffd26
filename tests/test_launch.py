"""`--launch FILE`: several processes with one voice, and files that are not what it takes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from explorl.cli.app import main
from explorl.core import processes
from explorl.core.launch import _first_failure, check_file, command_line

TWO = {
    "compute_environment": "LOCAL_MACHINE",
    "distributed_type": "MULTI_CPU",
    "use_cpu": True,
    "num_machines": 1,
    "num_processes": 2,
    "mixed_precision": "no",
}
"""accelerate's file for two processes on a CPU."""


@pytest.fixture
def two(tmp_path: Path) -> Path:
    path = tmp_path / "two.yaml"
    path.write_text(yaml.safe_dump(TWO))
    return path


# ---------------------------------------------------------------- what a user can get wrong


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "which is no file"),
        ("training: {steps: 4}\n", "is no configuration of accelerate"),
        ("- 1\n", "is no configuration of accelerate"),
        ("", "is no configuration of accelerate"),
        ("a: [", "is not YAML"),
        (yaml.safe_dump({**TWO, "num_processes": 1}), "num_processes is 1"),
        (yaml.safe_dump({**TWO, "num_processes": "two"}), "num_processes is 'two'"),
        (yaml.safe_dump({"distributed_type": "MULTI_GPU"}), "num_processes is None"),
        (yaml.safe_dump({**TWO, "num_procesess": 3}), "num_procesess"),
    ],
)
@pytest.mark.parametrize("command", ["train", "sft"])
def test_files_that_it_does_not_take(
    command: str, text: str | None, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "accelerate.yaml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(SystemExit) as exit_:
        main([command, "--preset", "tiny", "--launch", str(path), "--run", str(tmp_path / "run")])
    lines = capsys.readouterr().err.splitlines()
    assert exit_.value.code == 2
    assert len(lines) <= 3, lines
    assert lines[0].startswith("explorl: ")
    assert message in lines[0]
    assert not (tmp_path / "run").exists()


def test_one_of_several_processes_launches_none(two: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_file(two)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(Exception, match="one of 2 processes"):
        check_file(two)


@pytest.mark.parametrize(("command", "message"), [(["rft"], "in one"), (["study", "deng"], "--launch FILE")])
def test_what_has_one_process(
    command: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SystemExit) as exit_:
        main(command)
    assert exit_.value.code == 2
    assert message in capsys.readouterr().err


def test_a_study_has_jobs_or_processes(two: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["study", "deng", "--profile", "tiny", "--jobs", "2", "--launch", str(two), "--run", str(tmp_path / "s")])
    assert "--jobs is 2, but with --launch each run uses all processes" in capsys.readouterr().err
    assert not (tmp_path / "s").exists()


# ---------------------------------------------------------------- parts


@pytest.mark.parametrize(
    "path", sorted(Path(__file__).parents[1].glob("examples/accelerate/*.yaml")), ids=lambda p: p.stem
)
def test_files_to_start_from(path: Path) -> None:
    """accelerate takes them, and they are of several processes."""
    from accelerate.commands.config.config_args import load_config_from_file

    assert load_config_from_file(str(path)).num_processes == check_file(path)["num_processes"] >= 2


def test_command_line() -> None:
    parts = ("train", ("--config", Path("a b.yaml")), ("--preset", None), ("--set", "x=1"))
    assert command_line(*parts) == ["train", "--config", "a b.yaml", "--set", "x=1"]


def failure(code: int, at: float, text: str | None = None) -> Any:
    message = {"message": text, "extraInfo": {"timestamp": str(int(at)), "exact": at, "code": 2}}
    details = {} if text is None else {"message": message}
    return SimpleNamespace(exitcode=code, timestamp=int(at), error_file_data=details)


@pytest.mark.parametrize(
    ("failures", "message", "code"),
    [
        ({0: failure(-15, 5.2, "explorl: no"), 1: failure(2, 5.9, "explorl: connection closed")}, "explorl: no", 2),
        ({0: failure(1, 5.9, "closed"), 1: failure(2, 5.2, "explorl: no")}, "process 1: explorl: no", 2),
        ({0: failure(-15, 5.0), 1: failure(2, 5.4, "explorl: no")}, "process 1: explorl: no", 2),
        ({1: failure(-9, 5.0)}, "process 1 was ended by SIGKILL; it may have run out of memory", 1),
        ({1: failure(3, 5.0)}, "process 1 ended with exit code 3", 3),
    ],
)
def test_the_first_failure_is_told(failures: dict[int, Any], message: str, code: int) -> None:
    failed = _first_failure(failures)
    assert (str(failed), failed.code) == (message, code)


def test_a_word_with_the_launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the form that torchrun reads; nobody else is told where `--launch` will tell it."""
    assert not processes.report_failure("no", 2)
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "a" / "error.json"))
    assert not processes.report_failure("no", 2)
    monkeypatch.setenv(processes.LAUNCH_FILE, "1")
    assert processes.report_failure("no", 2)
    left = json.loads((tmp_path / "a" / "error.json").read_text())["message"]
    assert left["message"] == "no"
    assert abs(left["extraInfo"]["exact"] - time.time()) < 60


# ---------------------------------------------------------------- end to end

SMALL = {
    "task.train_problems": 8,
    "training.steps": 2,
    "training.prompts_per_step": 4,
    "training.generations": 4,
    "training.micro_batch": 4,
    "training.checkpoint_every": 1,
    "rollout.max_tokens": 12,
    "evaluation.every": 1,
    "evaluation.problems": 4,
    "evaluation.samples": 2,
    "sft.from_scratch": "false",
    "sft.examples": 16,
    "sft.batch_size": 8,
    "sft.epochs": 1,
    "sft.checkpoint_every": 1,
    "sft.max_length": 128,
}


def explorl(*arguments: str | Path, model: Path, **changes: Any) -> subprocess.CompletedProcess[str]:
    sets = [f"{key}={value}" for key, value in {**SMALL, "model.name": model, **changes}.items()]
    command = [sys.executable, "-m", "explorl", *map(str, arguments)]
    command += [part for change in sets for part in ("--set", change)] if "--resume" not in command else []
    source = str(Path(processes.__file__).parents[1])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200", "PYTHONPATH": source}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=500)


def metrics(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_grpo_on_two_processes(two: Path, small_policy: Path, tmp_path: Path) -> None:
    """One folder, one voice, the scores of one process; longer afterwards; and as many rows as with one process."""
    run = tmp_path / "run"
    ended = explorl("train", "--preset", "tiny", "--launch", two, "--run", run, model=small_policy)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("policy: ") == 1
    lines = metrics(run)
    assert [line["step"] for line in lines if line["kind"] == "train"] == [1, 2]
    assert [line["step"] for line in lines if line["kind"] == "evaluation"] == [0, 1, 2]
    assert (run / "model" / "model.safetensors").exists()
    assert json.loads((run / "provenance.json").read_text())[0]["processes"] == 2

    import pyarrow.parquet as parquet

    assert len(parquet.read_table(run / "rollouts" / "step-000001.parquet")) == 16
    again = explorl("train", "--launch", two, "--resume", run, "--set", "training.steps=3", model=small_policy)
    assert again.returncode == 0, again.stderr
    assert [line["step"] for line in metrics(run) if line["kind"] == "train"] == [1, 2, 3]
    done = explorl("train", "--launch", two, "--resume", run, model=small_policy)
    assert done.stdout.count("is finished") == 1


@pytest.mark.slow
def test_sft_on_two_processes(two: Path, small_policy: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    ended = explorl("sft", "--preset", "tiny", "--launch", two, "--run", run, model=small_policy)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("policy: ") == 1
    assert (run / "model" / "recipe.json").exists()


@pytest.mark.slow
def test_a_mistake_is_told_once(two: Path, small_policy: Path, tmp_path: Path) -> None:
    """What all processes would say."""
    run = tmp_path / "run"
    changes = {"training.micro_batch": 16}
    ended = explorl("train", "--preset", "tiny", "--launch", two, "--run", run, model=small_policy, **changes)
    assert ended.returncode == 2
    assert ended.stderr.count("training.micro_batch is 16, and 2 processes share 16 rows a step; use 8") == 1
    assert "Traceback" not in ended.stderr
    taken = explorl("train", "--preset", "tiny", "--launch", two, "--run", small_policy, model=tmp_path / "none")
    assert taken.returncode == 2
    assert len(taken.stderr.strip().splitlines()) == 1, taken.stderr


FAILING = """
import os
from explorl.tasks.countdown.task import CountdownMini

class Failing(CountdownMini):
    def verify_many(self, *given, **options):
        if os.environ["RANK"] == "1":
            raise {error}("the judge has gone home")
        return super().verify_many(*given, **options)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("error", "code"), [("ValueError", 2), ("ZeroDivisionError", 1)])
def test_one_that_fails_ends_all(
    error: str, code: int, two: Path, small_policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With what it has to say, be it a user's mistake or a bug, and nothing of those that lost it."""
    (tmp_path / "failing_task.py").write_text(FAILING.format(error=error))
    monkeypatch.chdir(tmp_path)
    run, changes = tmp_path / "run", {"task.name": "failing_task:Failing", "evaluation.every": 0}
    ended = explorl("train", "--preset", "tiny", "--launch", two, "--run", run, model=small_policy, **changes)
    assert ended.returncode == code
    announced, _, stderr = ended.stderr.partition("\n")  # by one process
    assert announced.startswith(f"explorl: importing failing_task from the working folder {tmp_path}"), ended.stderr
    assert stderr.startswith("process 1: "), ended.stderr
    assert stderr.rstrip().endswith("the judge has gone home"), ended.stderr
    assert ended.stderr.count("Traceback") == (error == "ZeroDivisionError"), ended.stderr
    assert not (run / "model").exists()


@pytest.mark.slow
@pytest.mark.parametrize(("sign", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_an_interruption_is_told_once(
    sign: signal.Signals, code: int, two: Path, small_policy: Path, tmp_path: Path
) -> None:
    """As a batch system or a terminal sends it, with how to go on."""
    run = tmp_path / "run"
    settings = {**SMALL, "training.steps": 5000, "evaluation.every": 0, "model.name": small_policy}
    changes = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    command = [sys.executable, "-m", "explorl", "train", "--preset", "tiny", "--launch", str(two), "--run", str(run)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    process = subprocess.Popen(
        [*command, *changes],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    begun = next((line for line in process.stdout if "step" in line), "")
    assert begun, process.communicate()[1]
    if sign is signal.SIGINT:
        os.killpg(process.pid, sign)
    else:
        process.send_signal(sign)
    _, stderr = process.communicate(timeout=300)
    assert process.returncode == code, stderr
    assert stderr.count("explorl: interrupted; ") == 1, stderr
    assert "explorl train --resume" in stderr
    assert "Traceback" not in stderr, stderr
