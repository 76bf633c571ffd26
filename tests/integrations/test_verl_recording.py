"""A run inside verl leaves a folder that Explorl's pages read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from explorl.analysis.run_results import run_results
from explorl.core.store import RunStore, StoreError
from explorl.integrations.verl.run_folder import VerlRecorder, metrics_line
from explorl.integrations.verl.settings import read_settings
from tests.integrations.test_verl_settings import verl

LOGGED: dict[str, Any] = {
    "critic/score/mean": np.float64(0.25),
    "actor/entropy": 0.7,
    "actor/pg_loss": 0.1,
    "response_length/mean": np.float32(12.0),
    "explorl/correct": 0.25,
    "training/epoch": 0,
    "actor/strange": float("nan"),
    "a/list": [1, 2],
    "a/flag": True,
}


def test_names_are_ours_where_we_have_some_and_verls_elsewhere() -> None:
    line = metrics_line(3, LOGGED)
    assert line == {
        "step": 3, "kind": "train", "reward": 0.25, "entropy": 0.7, "actor/pg_loss": 0.1, "loss": 0.1,
        "completions/mean_length": 12.0, "rewards/correctness/mean": 0.25, "training/epoch": 0.0,
    }  # fmt: skip


def recorder(folder: Path) -> VerlRecorder:
    config = verl(["ppl_shaping"], explorl__run=str(folder))
    return VerlRecorder(read_settings(config), config)


def test_a_report_reads_the_folder(tmp_path: Path) -> None:
    own = recorder(tmp_path / "mine")
    own.begin(0)
    for step in (1, 2, 3):
        own.log(step, {**LOGGED, "explorl/correct": 0.25 * step})
        own.record_rollouts(step, {"prompt": ["p"], "completion": ["c"], "advantage": [0.5], "reward/score": [1.0]})
    curves = run_results([tmp_path / "mine"])["arms"][0]["curves"]
    assert curves["training accuracy"]["mean"] == [0.25, 0.5, 0.75]
    assert curves["entropy"]["mean"] == [0.7] * 3
    assert curves["length"]["mean"] == [12.0] * 3
    store = RunStore.open(tmp_path / "mine")
    assert store.kind == "grpo"
    assert store.config()["verl"]["trainer"]["v1"]["trainer_mode"] == "explorl"
    assert "PerplexityShaping" in store.config()["strategies"][0]


def test_a_resumed_run_has_no_step_twice(tmp_path: Path) -> None:
    own = recorder(tmp_path / "mine")
    own.begin(0)
    for step in (1, 2, 3):
        own.log(step, LOGGED)
    again = recorder(tmp_path / "mine")
    again.begin(2)
    again.log(3, LOGGED)
    assert [line["step"] for line in again.store.metrics()] == [1, 2, 3]
    with pytest.raises(StoreError, match="already holds a run, but verl found no checkpoint"):
        recorder(tmp_path / "mine").begin(0)
