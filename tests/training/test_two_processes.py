"""Every strategy on two processes that hold very different parts of a batch: it ends, they agree, and they do what one does.

Each generation batch of a run is another way in which two processes may differ (`SCENES`). One start of torchrun trains
trainer after trainer, since the start takes longer than all of them; the tests read what the processes wrote down.

Run as a module, it is one of the two processes (see `TwoProcesses`).
"""

from __future__ import annotations

import copy
import faulthandler
import gc
import hashlib
import json
import math
import os
import random
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainerCallback
from trl import GRPOConfig

from explorl.models import load_policy
from explorl.rollout import Rollouts, SamplingParams
from explorl.strategies import REGISTRY, build_all
from explorl.strategies.base import overrides
from explorl.training.grpo import ExplorationTrainer
from tests.training.test_every_strategy import SETTINGS, label

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

GENERATIONS, LENGTH = 4, 10
ROWS = 2 * GENERATIONS
"""Of each of the two processes in a generation batch: two prompts."""
PARTS = 2
"""Micro-batches in which each process sees them."""
LIMIT = 90
"""Seconds after which a run is taken to hang; it needs one or two."""

SCENES = {
    "solved": "the first process has solved prompts alone, the second unsolved ones alone",
    "lengths": "the first process has long answers, the second answers of one token",
    "truncated": "all answers of the second process are cut off, none of the first",
    "flat": "all rows of the first process have advantage 0",
    "half": "of the second process, half of the rows have",
    "unscored": "no reward function scores the answers of the second process",
}
PLACES = {f"{scene}{place}=": (name, place) for scene, name in enumerate(SCENES) for place in range(4)}
"""Prompts in their order: of each scene two that go to the first process and two that go to the second."""

RATES = {prompt: float(place < 2) for prompt, (_, place) in PLACES.items()}
FALLING = {prompt: 1 - 0.02 * rank for rank, prompt in enumerate(PLACES)}
"""Solve rates for a curriculum that keeps all these prompts, in this order."""
UNSOLVED = ["9 9=", "8 8="]


def variants() -> list[dict[str, Any]]:
    """Every strategy with the hyperparameters of `SETTINGS`, on the prompts of this module."""
    found = []
    for name, settings in SETTINGS.items():
        for given in settings:
            rates = {**FALLING, **dict.fromkeys(UNSOLVED, 0.0)} if name == "curriculum" else RATES
            found.append({name: {**given, "solve_rates": rates} if "solve_rates" in given else given})
    # One process samples at the trainer's own temperature, the other one does not: from the start, or later.
    found.append({"element_wise_temperature": {"easy": 1.0, "solve_rates": RATES}})
    found.append({"element_wise_temperature": {"easy": 1.0, "hard": 1.3, "source": "running", "decay": 0.0}})
    return found


@dataclass(frozen=True)
class Case:
    strategies: list[Any]
    engine: bool = True
    """Sampled by the engine; else the answers are given."""
    seeded: bool = True
    """The engine's draws are those of a run on one process."""
    config: dict[str, Any] = field(default_factory=dict)

    @property
    def exact(self) -> bool:
        """Whether the gradient has to be that of one process."""
        return not self.has_entropy_bonus or not self.engine

    @property
    def has_entropy_bonus(self) -> bool:
        """TRL's, which is averaged within each micro-batch: the same on one process where answers are equally long."""
        return any("entropy_bonus" in spec for spec in self.strategies if isinstance(spec, dict))


REUSED = {"num_iterations": 2, "beta": 0.05}
WINDOWS = {"steps_per_generation": 4, "gradient_accumulation_steps": 2, "per_device_train_batch_size": 2}
DEFAULTS = {"bf16": True, "gradient_checkpointing": True}
"""TRL's own."""
BUSY = [
    {"passk_training": {"k": 2}},
    {"ppl_shaping": {"alpha": 0.2}},
    "mask_truncated",
    "egsw",
    {"kl_cov": {"fraction": 0.2}},
    {"element_wise_temperature": {"easy": 1.0, "solve_rates": RATES}},
    {"bottom_p": {"p": 0.8}},
    "importance_correction",
]


def samples(spec: dict[str, Any]) -> bool:
    return any(overrides(strategy, "sampling") for strategy in build_all([spec]))


def needs_engine(spec: dict[str, Any]) -> bool:
    return samples(spec) or "importance_correction" in spec


def cases() -> dict[str, Case]:
    found: dict[str, Case] = {"engine/plain": Case([]), "given/plain": Case([], engine=False, config=REUSED)}
    for spec in variants():
        found[f"engine/{label(spec)}"] = Case([spec])
        if needs_engine(spec):
            found[f"reused/{label(spec)}"] = Case([spec], config=REUSED)
        else:
            found[f"given/{label(spec)}"] = Case([spec], engine=False, config=REUSED)
    return found


CASES = cases()


# ---------------------------------------------------------------- a run, on one process or on two


def reward(prompts: list[str], completion_ids: list[list[int]], **columns: Any) -> list[float | None]:
    """What the scene of each prompt says; 1 and more is correct."""
    found: list[float | None] = []
    for prompt, ids in zip(prompts, completion_ids, strict=True):
        scene, place = PLACES[prompt]
        second, parity = place >= 2, sum(ids) % 2
        if scene == "unscored" and second:
            found.append([None, math.nan][parity])
        elif (scene, second) == ("flat", False) or (scene, place) == ("half", 3):
            found.append(0.5)
        elif scene == "solved":
            found.append(0.5 * parity if second else 1 + 0.5 * parity)
        else:
            found.append(float(parity))
    return found


def most_tokens(prompt: str) -> int:
    return 1 if PLACES[prompt][0] == "lengths" and PLACES[prompt][1] >= 2 else LENGTH


def cut_off(prompt: str) -> bool:
    return PLACES[prompt][0] == "truncated" and PLACES[prompt][1] >= 2


def given_answers(even: bool) -> Any:
    """TRL's `rollout_func`: completions that depend on the prompt and their place in the group, and on nothing else.

    even: all of them have as many tokens.
    """

    def answers(prompts: list[str], trainer: Any) -> dict[str, Any]:
        tokenizer = trainer.processing_class
        completions = []
        for row, prompt in enumerate(prompts):
            draw = random.Random(f"{prompt} {row % GENERATIONS}")
            length = LENGTH if even or PLACES[prompt][0] == "lengths" else draw.randint(1, LENGTH)
            tokens = [draw.randrange(7, 100) for _ in range(length if even else min(length, most_tokens(prompt)))]
            scene, place = PLACES[prompt]
            ends = draw.random() < 0.5 if scene != "truncated" else place < 2
            completions.append([*tokens[:-1], tokenizer.eos_token_id] if ends else tokens)
        return {"prompt_ids": tokenizer(prompts)["input_ids"], "completion_ids": completions, "logprobs": None}

    return answers


def direct(trainer: Any, *, seeded: bool) -> None:
    """Makes the trainer's engine sample what the scenes want: how long answers get, and whether they may end.

    seeded: each half of a generation batch is drawn with a seed of its own, whether or not a process has both.
    """
    generate = trainer._engine.generate
    process, processes = trainer.accelerator.process_index, trainer.accelerator.num_processes

    def directed(prompt_ids: list[list[int]], n: int, params: SamplingParams) -> Rollouts:
        prompts, rollouts = trainer._prompts, []
        for start in range(0, len(prompts), ROWS):
            rows = slice(start, start + ROWS)
            half = process + start // ROWS
            own = {
                name: value[rows]
                for name, value in vars(params).items()
                if isinstance(value, list) and name != "stop_token_ids"
            }
            own["max_tokens"] = [most_tokens(prompt) for prompt in prompts[rows]]
            if any(cut_off(prompt) for prompt in prompts[rows]):
                own["stop_token_ids"] = ()
            if seeded:
                own["seed"] = 2 * trainer.state.global_step + half
            rollouts += generate(prompt_ids[rows], n, replace(params, **own)).rollouts
        return Rollouts(rollouts, prompt_ids, n, 0)

    trainer._engine.generate = directed
    assert processes in (1, 2)


class Gradients(TrainerCallback):
    """Keeps the gradient of each optimizer step, of all parameters together."""

    def __init__(self) -> None:
        self.steps: list[torch.Tensor] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.steps.append(torch.cat([p.grad.flatten().clone() for p in model.parameters() if p.grad is not None]))


@dataclass
class Outcome:
    """Of one run on one process."""

    gradients: torch.Tensor
    weights: str
    """A hash of all of them."""
    logs: list[dict[str, Any]]
    """Of each optimizer step, but for clocks."""


def train(policy: Path, folder: Path, case: Case, *, processes: int) -> Outcome:
    from datasets import Dataset

    loaded, kept = load_policy(str(policy), device="cpu"), Gradients()
    prompts = list(PLACES)
    if any("curriculum" in spec for spec in case.strategies if isinstance(spec, dict)):
        prompts = [*UNSOLVED, *prompts]
    arguments: dict[str, Any] = {
        "output_dir": str(folder / "out"),
        "per_device_train_batch_size": ROWS // PARTS,
        "gradient_accumulation_steps": PARTS,
        "num_generations": GENERATIONS,
        "max_completion_length": LENGTH,
        "shuffle_dataset": False,
        "num_train_epochs": 1,
        "optim": "sgd",
        "learning_rate": 0.1,
        "max_grad_norm": 0.0,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "use_cpu": True,
        "dataloader_pin_memory": False,
        "seed": 5,
        **case.config,
    }
    per_batch = arguments.get("steps_per_generation", PARTS) // arguments["gradient_accumulation_steps"]
    arguments["max_steps"] = len(SCENES) * per_batch * arguments.get("num_iterations", 1)
    if processes == 1:
        arguments["gradient_accumulation_steps"] *= 2
        if "steps_per_generation" in arguments:
            arguments["steps_per_generation"] *= 2
    trainer = ExplorationTrainer(
        model=loaded.model,
        reward_funcs=reward,
        processing_class=loaded.tokenizer,
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        rollout_func=None if case.engine else given_answers(even=case.has_entropy_bonus),
        strategies=copy.deepcopy(case.strategies),
        correct=("reward", 1.0),
        callbacks=[kept],
        args=GRPOConfig(**arguments),
    )
    assert trainer.accelerator.num_processes == processes
    assert (trainer._engine is not None) == case.engine
    if case.engine:
        direct(trainer, seeded=case.seeded)
    trainer.train()
    digest = hashlib.sha256()
    for value in trainer.accelerator.unwrap_model(trainer.model).state_dict().values():
        digest.update(value.numpy().tobytes())
    clocks = ("time", "per_second", "runtime")
    logs = [
        {key: value for key, value in entry.items() if not any(clock in key for clock in clocks)}
        for entry in trainer.state.log_history
    ]
    return Outcome(torch.stack(kept.steps), digest.hexdigest(), logs)
