"""Dynamic sampling and skipped prompts on two processes, with a group that both have a part of: as on one process.

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
from datasets import Dataset
from trl import GRPOConfig

from explorl.models import load_policy
from explorl.rollout import Rollouts, SamplingParams
from explorl.strategies import Batch, Strategy
from explorl.training.grpo.solved import keyed_seed, keyed_uniform
from explorl.training.grpo.trainer import ExplorationTrainer
from tests.training.test_invariance import Gradients

PROMPTS = [f"{a} {b}=" for a in range(1, 6) for b in range(5, 10)]
RUNS = {
    "plain": {"generations": 4},
    "company": {"generations": 4, "strategies": ["hot", "egsw", {"kl_cov": {"fraction": 0.2}}]},
    "generate": {"generations": 4, "engine": "generate"},
    "odd": {"generations": 3},
}
"""Three groups on two processes; in "odd", rows of a single group could not be dealt out to both."""


class Hot(Strategy):
    """Another temperature for every second prompt."""

    name = "hot"

    def sampling(self, prompts: Any, step: int) -> dict[str, list[float]]:
        return {"temperature": [own_temperature(prompt) for prompt in prompts]}

    def advantages(self, batch: Batch) -> None:
        assert batch.temperature.tolist() == [own_temperature(prompt) for prompt in batch.prompts]


def own_temperature(prompt: str) -> float:
    return 0.75 + 0.5 * (PROMPTS.index(prompt) % 2)


def reward(prompts: list[str], trainer_state: Any, **columns: Any) -> list[float]:
    """One group in three has variance; half of the others are solved."""
    step, rewards = trainer_state.global_step, []
    for row, prompt in enumerate(prompts):
        chance = keyed_uniform(prompt, step)
        rewards.append(float(row % 2) if chance < 0.33 else float(PROMPTS.index(prompt) % 2))
    return rewards


def by_row(trainer: Any, generations: int) -> None:
    """Has each answer depend on the prompt, its place in the group and the step, and on nothing else."""
    engine, accelerator = trainer.sampler.engine, trainer.accelerator
    sample = engine.generate

    def one_by_one(prompt_ids: list[list[int]], n: int, params: SamplingParams) -> Rollouts:
        rollouts = []
        lists = {name: value for name, value in vars(params).items() if isinstance(value, tuple)}
        for row, ids in enumerate(prompt_ids):
            position = (accelerator.process_index * len(prompt_ids) + row) % generations
            own: dict[str, Any] = {name: value[row] for name, value in lists.items() if len(value) == len(prompt_ids)}
            own["seed"] = keyed_seed(ids, position, trainer.state.global_step) % 2**31
            rollouts += sample([ids], n, replace(params, **own)).rollouts
        return Rollouts(rollouts, prompt_ids, n, 0)

    engine.generate = one_by_one


def train(policy: Path, name: str, processes: int) -> dict[str, Any]:
    settings: dict[str, Any] = dict(RUNS[name])
    generations, batches, recorder = settings.pop("generations"), [], Gradients()
    settings["strategies"] = [Hot() if strategy == "hot" else strategy for strategy in settings.get("strategies", [])]
    loaded = load_policy(str(policy), device="cpu")
    rows = 3 * generations if name != "odd" else 4 * generations
    trainer = ExplorationTrainer(
        model=loaded.model,
        reward_funcs=reward,
        processing_class=loaded.tokenizer,
        train_dataset=Dataset.from_dict({"prompt": PROMPTS}),
        callbacks=[recorder],
        correct="reward",
        dynamic_sampling={"max_rounds": 4},
        skip_solved={"visits": 1, "floor": 0.3},
        on_rollouts=lambda step, columns: batches.append(columns),
        args=GRPOConfig(
            str(policy / "out"), per_device_train_batch_size=rows // processes, gradient_accumulation_steps=1,
            num_generations=generations, max_completion_length=6, max_steps=4, optim="sgd", learning_rate=0.02,
            max_grad_norm=0.0, logging_steps=1, save_strategy="no", report_to="none", disable_tqdm=True, bf16=False,
            gradient_checkpointing=False, use_cpu=True, dataloader_pin_memory=False, seed=5, num_iterations=1,
        ),
        **settings,
    )  # fmt: skip
    assert trainer.accelerator.num_processes == processes
    if trainer.sampler.engine is not None:
        by_row(trainer, generations)
    trainer.train()
    logs = [
        {key: value for key, value in entry.items() if "time" not in key and "per_second" not in key}
        for entry in trainer.state.log_history[:-1]
    ]
    gradients = [step.tolist() for step in recorder.steps]
    return {"batches": batches, "logs": logs, "gradients": gradients, "streaks": trainer.prompts.streaks._streaks}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_two_processes_do_what_one_does(small_policy: Path, tmp_path: Path) -> None:
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", __name__]
    environment = {**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    root = Path(__file__).parents[2]
    command = [*launch, str(small_policy), str(tmp_path)]
    done = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr[:6000]
    for name in RUNS:
        first, second = (json.loads((tmp_path / f"{rank}.json").read_text())[name] for rank in (0, 1))
        assert first["gradients"] == second["gradients"]
        assert first["streaks"] == second["streaks"]
        for line, other in zip(first["logs"], second["logs"], strict=True):
            assert line == pytest.approx(other, rel=1e-6, nan_ok=True)
        rounds = [entry["dynamic_sampling/rounds"] for entry in first["logs"]]
        assert sum(rounds) > 4
        size = RUNS[name]["generations"]
        for columns, entry in zip(first["batches"], first["logs"], strict=True):
            rewards = torch.tensor(columns["reward/reward"]).view(-1, size)
            assert int((rewards.std(1) == 0).sum()) == entry["dynamic_sampling/without_variance"]
            prompts = [columns["prompt"][row : row + size] for row in range(0, len(columns["prompt"]), size)]
            assert all(len(set(group)) == 1 for group in prompts)
        if name in ("generate", "odd"):  # other answers; and a round that rounds up
            continue
        alone = train(small_policy, name, 1)
        assert first["streaks"] == alone["streaks"]
        for two, single in zip(first["batches"], alone["batches"], strict=True):
            assert two["prompt"] == single["prompt"]
            assert two["completion"] == single["completion"]
            assert two["advantage"] == pytest.approx(single["advantage"], abs=1e-5)
        for two, single in zip(first["logs"], alone["logs"], strict=True):
            same = {
                key: value for key, value in single.items() if key.startswith(("dynamic", "skip", "reward", "num_"))
            }
            assert {key: two[key] for key in same} == pytest.approx(same, rel=1e-4)
        gradients, expected = torch.tensor(first["gradients"]), torch.tensor(alone["gradients"])
        assert ((gradients - expected).norm(dim=1) / expected.norm(dim=1).clamp(min=0.1)).max() < 1e-4


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    policy_folder, out = map(Path, sys.argv[1:])
    results = {name: train(policy_folder, name, 2) for name in RUNS}
    (out / f"{os.environ['RANK']}.json").write_text(json.dumps(results))
    torch.distributed.destroy_process_group()
