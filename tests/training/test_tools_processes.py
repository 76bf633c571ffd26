"""Answers with tool calls on two processes: as on one, with dynamic sampling and strategies too.

Run as a module, it is one of the two processes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from explorl.rollout import Rollouts, SamplingParams
from explorl.rollout.tool_use import generate_with_tools
from explorl.training.grpo import sampler
from explorl.training.grpo.observers import statistics
from explorl.training.grpo.solved import keyed_seed
from explorl.training.grpo.trainer import ExplorationTrainer
from tests.training.small_runs import digits
from tests.training.test_invariance import Gradients
from tests.training.tool_policy import make_trainer, save_tool_policy

GENERATIONS = 4
RUNS: dict[str, dict[str, Any]] = {
    "plain": {},
    "company": {
        "strategies": [
            {"tool_progression": {"share": 0.5, "calls": 2}},
            {"ppl_shaping": {"alpha": 0.2}},
            {"forking_tokens": {"normalize": "kept"}},
            {"kl_cov": {"fraction": 0.2}},
        ],
        "dynamic_sampling": {"max_rounds": 2},
    },
}


def by_row(trainer: Any) -> None:
    """Has each answer depend on the prompt, its place in the group and the step, and on nothing else."""

    def one_by_one(
        engine: Any, prompt_ids: list[list[int]], n: int, params: SamplingParams, tools: Any, uses: Any
    ) -> Any:
        rollouts = []
        for row, ids in enumerate(prompt_ids):
            position = (trainer.accelerator.process_index * len(prompt_ids) + row) % GENERATIONS
            own = replace(params, seed=keyed_seed(ids, position, trainer.state.global_step) % 2**31)
            used = None if uses is None else [uses[row]]
            rollouts += generate_with_tools(engine, [ids], n, own, tools, uses=used).rollouts
        return Rollouts(rollouts, prompt_ids, n, 0)

    vars(sampler)["generate_with_tools"] = one_by_one


def train(policy: Path, name: str, processes: int) -> dict[str, Any]:
    gradients, batches = Gradients(), []
    options = {
        "callbacks": [gradients],
        "correct": ("digits", 0.5),
        "observers": statistics(),
        "on_rollouts": lambda step, columns: batches.append(columns),
        **RUNS[name],
    }
    trainer = make_trainer(
        ExplorationTrainer, policy, policy / "out", options=options, reward=digits, max_steps=2, optim="sgd",
        learning_rate=0.02, max_grad_norm=0.0, per_device_train_batch_size=16 // processes,
        gradient_accumulation_steps=1,
    )  # fmt: skip
    assert trainer.accelerator.num_processes == processes
    by_row(trainer)
    trainer.train()
    logs = [
        {key: value for key, value in entry.items() if "time" not in key and "per_second" not in key}
        for entry in trainer.state.log_history[:-1]
    ]
    return {"batches": batches, "logs": logs, "gradients": [step.tolist() for step in gradients.steps]}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_two_processes_do_what_one_does(small_policy: Path, tmp_path: Path) -> None:
    policy = save_tool_policy(small_policy, tmp_path / "policy")
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", __name__]
    environment = {**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    command, root = [*launch, str(policy), str(tmp_path)], Path(__file__).parents[2]
    done = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr[:6000]
    for name in RUNS:
        first, second = (json.loads((tmp_path / f"{rank}.json").read_text())[name] for rank in (0, 1))
        assert first["gradients"] == second["gradients"]
        alone = train(policy, name, 1)
        assert any(any(columns["calls"]) for columns in alone["batches"])
        for two, single in zip(first["batches"], alone["batches"], strict=True):
            assert two["transcript"] == single["transcript"]
            assert two["completion"] == single["completion"]
            assert two["calls"] == single["calls"]
        for two, single in zip(first["logs"], alone["logs"], strict=True):
            words = ("tools/", "completions/", "reward", "num_", "strategy/", "lens/entropy", "lens/quality", "dynamic")
            same = {
                key: value for key, value in single.items() if key.startswith(words) and not key.endswith("_tokens")
            }
            assert {key: two[key] for key in same} == pytest.approx(same, rel=1e-3, abs=1e-5, nan_ok=True)
        actual, expected = torch.tensor(first["gradients"]), torch.tensor(alone["gradients"])
        assert ((actual - expected).norm(dim=1) / expected.norm(dim=1).clamp(min=0.1)).max() < 1e-3


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    policy_folder, out = map(Path, sys.argv[1:])
    results = {name: train(policy_folder, name, 2) for name in RUNS}
    (out / f"{os.environ['RANK']}.json").write_text(json.dumps(results))
    torch.distributed.destroy_process_group()
