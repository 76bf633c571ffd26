"""The same batch gives the same gradient, whatever the micro-batch size, the number of processes and the row order.

Run as a script, it is one of two processes (see `on_two_processes`).
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainerCallback
from trl import GRPOConfig

from explorl.strategies import Batch, build_all
from explorl.training.grpo.shaping import shape
from explorl.training.grpo.trainer import ExplorationTrainer

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

ROWS, GENERATIONS, LENGTH = 24, 8, 10
"""Three prompts; on two processes the answers to the second one are spread over both."""

LISTS: dict[str, list[Any]] = {
    "plain": [],
    "egsw": ["egsw"],
    "egsw-sequence": [{"egsw": {"level": "sequence", "alpha": 0.8}}],
    "forking_tokens": ["forking_tokens"],
    "clip_cov": [{"clip_cov": {"fraction": 0.1, "low": 0.1, "high": 50.0}}],
    "kl_cov": [{"kl_cov": {"fraction": 0.2}}],
    "ppl_shaping": [{"ppl_shaping": {"alpha": 0.2}}],
    "pass_threshold": [{"pass_threshold": {"threshold": 0.5, "level": "group"}}],
    "many": [
        {"passk_training": {"k": 3}},
        {"ppl_shaping": {"alpha": 0.2}},
        "entropy_advantage",
        {"position_shaping": {"start": 0}},
        "mask_truncated",
        "egsw",
        {"forking_tokens": {"normalize": "kept", "fraction": 0.5}},
        {"clip_higher": {"low": 0.005, "high": 0.01}},
        {"kl_cov": {"fraction": 0.2}},
    ],
}
LOSSES = ("grpo", "dr_grpo", "dapo")
"""bnpo divides by the tokens of a micro-batch, by its definition."""

CASES = [*((name, "dapo") for name in LISTS), *(("many", loss) for loss in LOSSES[:2])]
QUICK = ("many",)
"""In every test run: egsw, ppl_shaping and kl_cov are among them."""


def answers(prompts: list[str], trainer: Any) -> dict[str, Any]:
    """TRL's `rollout_func`: completions that depend on the prompt and their place in the group, and on nothing else."""
    tokenizer, first = trainer.processing_class, trainer.accelerator.process_index * len(prompts)
    completions = []
    for row, prompt in enumerate(prompts, start=first):
        draw = random.Random(f"{prompt} {row % GENERATIONS}")
        tokens = [draw.randrange(7, 100) for _ in range(draw.randrange(LENGTH))]
        completions.append([*tokens, draw.choice([7, tokenizer.eos_token_id])])  # cut off, or ended by itself
    return {"prompt_ids": tokenizer(prompts)["input_ids"], "completion_ids": completions, "logprobs": None}


def reward(completion_ids: list[list[int]], **columns: Any) -> list[float]:
    """Some right, some wrong, some half right."""
    return [(sum(ids) % 5) / 4 for ids in completion_ids]


class Gradients(TrainerCallback):
    """Keeps the gradient of each optimizer step, of all parameters together."""

    def __init__(self) -> None:
        self.steps: list[torch.Tensor] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.steps.append(torch.cat([p.grad.flatten().clone() for p in model.parameters() if p.grad is not None]))


def gradients(
    policy: Path,
    name: str,
    loss: str,
    *,
    micro_batch: int,
    processes: int = 1,
    save: Path | None = None,
    resume: Path | None = None,
) -> torch.Tensor:
    """The gradients of two updates on one batch; the second is off policy, so that ratio, clip and penalty act.

    With `save` there is a checkpoint between the two; with `resume` it is where the run begins.
    """
    from datasets import Dataset

    from explorl.models import load_policy

    loaded = load_policy(str(policy), device="cpu")
    recorder = Gradients()
    trainer = ExplorationTrainer(
        model=loaded.model,
        reward_funcs=reward,
        processing_class=loaded.tokenizer,
        train_dataset=Dataset.from_dict({"prompt": [f"{a} {a + 3}=" for a in range(1, 10)]}),
        rollout_func=answers,
        strategies=LISTS[name],
        callbacks=[recorder],
        args=GRPOConfig(
            str(save or policy / "out"),
            per_device_train_batch_size=micro_batch,
            gradient_accumulation_steps=ROWS // (micro_batch * processes),
            num_generations=GENERATIONS,
            num_iterations=2,
            max_completion_length=LENGTH,
            loss_type=loss,
            beta=0.05,
            optim="sgd",
            learning_rate=0.1,
            max_grad_norm=0.0,
            max_steps=2,
            save_strategy="steps" if save else "no",
            save_steps=1,
            logging_strategy="no",
            report_to="none",
            disable_tqdm=True,
            bf16=False,
            gradient_checkpointing=False,
            use_cpu=True,
            dataloader_pin_memory=False,
            seed=5,
        ),
    )
    trainer.train(resume_from_checkpoint=str(resume / "checkpoint-1") if resume else None)
    return torch.stack(recorder.steps)


def difference(first: torch.Tensor, other: torch.Tensor) -> float:
    """Of each step's gradient, relative to its norm; the larger one."""
    return float(((first - other).norm(dim=1) / other.norm(dim=1)).max())


@cache
def expected(policy: Path, name: str, loss: str) -> torch.Tensor:
    """On one process, with the largest micro-batch."""
    return gradients(policy, name, loss, micro_batch=8)


@pytest.mark.parametrize(
    ("name", "loss"),
    [pytest.param(*case, marks=[] if case[0] in QUICK else [pytest.mark.slow]) for case in CASES],
)
def test_micro_batches(small_policy: Path, name: str, loss: str) -> None:
    whole = expected(small_policy, name, loss)
    for micro_batch in (1, 3):
        assert difference(gradients(small_policy, name, loss, micro_batch=micro_batch), whole) < 1e-5, micro_batch
    if name != "plain":
        assert difference(whole, expected(small_policy, "plain", loss)) > 0.01, "the strategies do nothing"


def on_two_processes(policy: Path, folder: Path, job: str) -> dict[str, torch.Tensor]:
    """What two processes over gloo find, as torchrun starts them (`accelerate launch --cpu` would start only one)."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    environment = {**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    command = [*launch, __file__, str(policy), str(folder), job]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr[-5000:]
    gradients_by_case: dict[str, torch.Tensor] = torch.load(folder / "gradients.pt", weights_only=True)
    return gradients_by_case


def one_of_two_processes(policy: Path, folder: Path, job: str) -> None:
    """What each of them does."""
    half = {"micro_batch": 4, "processes": 2}
    if job == "gradients":
        gradients_by_case = {f"{name} {loss}": gradients(policy, name, loss, **half) for name, loss in CASES}
    else:
        gradients_by_case = {"whole": gradients(policy, "many", "dapo", **half, save=folder / "run")}
        gradients_by_case["resumed"] = gradients(policy, "many", "dapo", **half, resume=folder / "run")
    assert torch.distributed.get_world_size() == 2
    if torch.distributed.get_rank() == 0:
        torch.save(gradients_by_case, folder / "gradients.pt")
    torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_two_processes(small_policy: Path, tmp_path: Path) -> None:
    gradients_by_case = on_two_processes(small_policy, tmp_path, "gradients")
    assert len(gradients_by_case) == len(CASES)
    for name, loss in CASES:
        assert difference(gradients_by_case[f"{name} {loss}"], expected(small_policy, name, loss)) < 1e-5, (name, loss)


@pytest.mark.slow
def test_two_processes_resume_in_the_middle_of_a_reuse(small_policy: Path, tmp_path: Path) -> None:
    """Each process finds its own part of the batch in the checkpoint."""
    gradients_by_case = on_two_processes(small_policy, tmp_path, "resume")
    assert len(gradients_by_case["whole"]) == 2
    assert difference(gradients_by_case["resumed"], gradients_by_case["whole"][1:]) < 1e-5


# --- the order of the rows ----------------------------------------------------------------------------------------


def random_batch() -> Batch:
    """Three prompts with four answers each, of up to seven tokens, some of them a tool's."""
    generator = torch.Generator().manual_seed(0)
    rows, width = 12, 7
    mask = (torch.arange(width) < torch.randint(1, width + 1, (rows, 1), generator=generator)).float()
    mask *= (torch.rand(rows, width, generator=generator) > 0.1).float()

    def noise() -> torch.Tensor:
        return torch.where(mask > 0, torch.randn(rows, width, generator=generator), torch.nan)

    logps = -noise().abs()
    rewards = torch.randint(0, 5, (rows,), generator=generator) / 4
    return Batch(
        logps=logps,
        old_logps=logps,
        ref_logps=None,
        sampling_logps=logps + 0.3 * noise(),
        entropy=noise().abs(),
        branching=None,
        mask=mask,
        advantages=noise(),
        rewards=rewards,
        correct=rewards >= 1,
        correctness=rewards,
        group=torch.arange(rows) // 4,
        truncated=torch.rand(rows, generator=generator) < 0.3,
        temperature=torch.ones(rows),
        step=0,
        prompts=[f"prompt {row // 4}" for row in range(rows)],
    )


def permuted(batch: Batch, order: torch.Tensor) -> Batch:
    rows: dict[str, Any] = {
        name: value[order] for name, value in vars(batch).items() if isinstance(value, torch.Tensor)
    }
    return batch.with_(**rows, prompts=[batch.prompts[row] for row in order])


SHAPED: dict[str, list[Any]] = {
    **LISTS,
    # with fraction 1 there is nothing to draw among the rows
    "clip_cov": [{"clip_cov": {"fraction": 1.0, "low": 0.1, "high": 50.0}}],
    "importance_correction": ["bottom_p", "importance_correction"],
    "negative_reinforcement": [{"negative_reinforcement": {"positive_weight": 0.1}}, "mask_truncated"],
}


@pytest.mark.parametrize("name", SHAPED)
def test_permuting_the_batch_permutes_the_result(name: str) -> None:
    batch, strategies = random_batch(), build_all(SHAPED[name])
    result = shape(strategies, batch)
    for seed in range(5):
        order = torch.randperm(len(batch.rewards), generator=torch.Generator().manual_seed(seed))
        other = shape(strategies, permuted(batch, order))
        for field in ("advantages", "loss_mask", "weights", "kl_weights"):
            moved = getattr(result, field)[order]
            torch.testing.assert_close(getattr(other, field), moved, rtol=1e-6, atol=1e-6, equal_nan=True, msg=field)
        assert other.kept.keys() == result.kept.keys()
        for key, value in result.kept.items():
            torch.testing.assert_close(other.kept[key], value[order], msg=key)
        assert other.metrics == pytest.approx(result.metrics)


if __name__ == "__main__":
    one_of_two_processes(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
