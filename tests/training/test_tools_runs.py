"""`explorl train` with a tool: the shipped policy has its calculator, and the run's folder knows what it called."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from rich.console import Console

from explorl.core.config import ConfigError, load_config
from explorl.core.store import RunStore
from explorl.training.grpo.run import run_grpo
from explorl.training.rft.loop import check_rft

SMALL = [
    "rollout.tools=calculator", "training.steps=2", "training.prompts_per_step=4", "training.micro_batch=32",
    "task.train_problems=16", "task.holdout_problems=16", "evaluation.ends=16", "evaluation.samples=4",
    "training.token_records=2",
]  # fmt: skip


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_run_with_a_calculator(tmp_path: Path) -> None:
    config = load_config(preset="tiny-tools", overrides=SMALL)
    store = RunStore(tmp_path / "run")
    run_grpo(config, store, console=Console(quiet=True))
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    before, *steps = lines
    assert [line["step"] for line in lines if line["kind"] == "evaluation"] == [0, lines[-1]["step"]]
    assert before["pass@4"] > 0.2  # without the calculator it is 0
    assert all(0 < line["tools/callers"] < 1 for line in steps if line["kind"] == "train")
    for path in sorted((tmp_path / "run/rollouts").glob("*.parquet")):
        rows = pq.read_table(path).to_pydict()
        right = [row for row, value in enumerate(rows["reward/correctness"]) if value == 1]
        assert right
        assert all(rows["calls"][row] for row in right)  # nobody knows these products by heart
        for row in right:
            (*_, last) = rows["calls"][row]
            assert last["text"].strip() in rows["transcript"][row]
            assert last["text"].strip() in rows["completion"][row]  # the answer, and not the output
            assert rows["completion"][row].count(last["text"].strip()) < rows["transcript"][row].count(
                last["text"].strip()
            )


def test_rejection_sampling_has_no_tools() -> None:
    config = load_config(preset="tiny-rft", overrides=["rollout.tools=python"])
    with pytest.raises(ConfigError, match=r"rollout.tools is 'python', but explorl rft samples without tools"):
        check_rft(config)
