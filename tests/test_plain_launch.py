"""The same commands started by accelerate itself, and a study whose runs have two processes each."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.test_launch import SMALL, metrics

CPU_2 = Path(__file__).parents[1] / "examples" / "accelerate" / "cpu-2.yaml"

pytestmark = pytest.mark.slow


def processes_of(run: Path) -> int:
    return int(json.loads((run / "provenance.json").read_text())[0].get("processes", 1))


def called(*command: str | Path) -> subprocess.CompletedProcess[str]:
    source = str(Path(__file__).parents[1] / "src")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": source}
    arguments = [sys.executable, "-m", *map(str, command)]
    return subprocess.run(arguments, env=environment, capture_output=True, text=True, check=False, timeout=500)


def test_accelerate_launch_has_as_many_processes_as_the_file_says(small_policy: Path, tmp_path: Path) -> None:
    """Without a word of ours to it: the file alone."""
    run = tmp_path / "run"
    changes = {**SMALL, "model.name": small_policy, "evaluation.every": 0, "evaluation.ends": 0}
    sets = [part for key, value in changes.items() for part in ("--set", f"{key}={value}")]
    launcher = ["accelerate.commands.launch", "--config_file", CPU_2, "--main_process_port", "0"]
    ended = called(*launcher, "-m", "explorl", "train", "--preset", "tiny", "--run", run, *sets)
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert ended.stdout.count("policy: ") == 1  # the second process says nothing
    assert processes_of(run) == 2
    assert [line["step"] for line in metrics(run) if line["kind"] == "train"] == [1, 2]


STUDY = """
name: two
base:
  preset: tiny
  model: {{name: {model}}}
  task: {{train_problems: 8}}
  rollout: {{max_tokens: 12}}
  training: {{prompts_per_step: 4, generations: 4, micro_batch: 4}}
arms:
  plain: {{}}
  EGSW: {{strategies: [egsw]}}
baseline: plain
seeds: 1
evaluation: {{every: 1, problems: 4, samples: 2}}
budget: {{steps: 1}}
"""


def test_a_study_has_each_run_on_all_processes(small_policy: Path, tmp_path: Path) -> None:
    (tmp_path / "study.yaml").write_text(STUDY.format(model=small_policy))
    ended = called("explorl", "study", tmp_path / "study.yaml", "--run", tmp_path / "s", "--launch", CPU_2)
    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-3000:]
    runs = sorted(path.parent for path in (tmp_path / "s" / "arms").glob("*/*/provenance.json"))
    assert len(runs) == 2
    assert [processes_of(run) for run in runs] == [2, 2]
