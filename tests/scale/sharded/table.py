"""One of two processes that have every strategy make a step under ZeRO-3 or FSDP2, and write down what was said.

torchrun --nproc-per-node 2 -m tests.scale.sharded.table POLICY FOLDER zero3|fsdp2
"""

from __future__ import annotations

import gc
import json
import math
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from trl import GRPOConfig

from explorl.models import load_policy
from explorl.strategies import Strategy
from explorl.training.grpo.trainer import ExplorationTrainer
from explorl.training.sharding import fsdp_modules, fsdp_version, zero_stage
from tests.scale.sharded.training import digits, prepare, sharding
from tests.scale.strategies import beside, one_of_each

WITH_REFERENCE = ("reference_reset", "element_wise_temperature")
"""Strategies that also make a step beside a reference: one moves it, one has it compute at temperatures per row."""
PROMPTS = [f"{a}*{b}=" for a in range(1, 3) for b in range(5, 7)]


def against(strategy: Strategy, policy: Path, out: Path, backend: str, beta: float) -> str:
    """What the trainer says against a strategy; empty where it has made a step on sharded weights."""
    args = GRPOConfig(
        str(out),
        per_device_train_batch_size=4,
        num_generations=4,
        max_completion_length=8,
        max_steps=1,
        learning_rate=1e-3,
        beta=beta,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        bf16=False,
        gradient_checkpointing=False,
        dataloader_pin_memory=False,
        **sharding(backend),
    )
    loaded, data = load_policy(str(policy), device="cpu"), Dataset.from_dict({"prompt": PROMPTS})
    try:
        trainer: Any = ExplorationTrainer(
            loaded.model, digits, args, data, processing_class=loaded.tokenizer, correct="digits", **beside(strategy)
        )
    except ValueError as error:
        return str(error)
    trainer.train()
    assert (zero_stage(trainer.accelerator), fsdp_version(trainer.accelerator)) == (
        (3, 0) if backend == "zero3" else (0, 2)
    )
    assert backend == "zero3" or fsdp_modules(trainer.model)
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(losses) == 1, strategy.name
    assert math.isfinite(losses[0]), strategy.name
    return ""


def main(policy: Path, folder: Path, backend: str) -> None:
    prepare(backend)
    warnings.simplefilter("ignore")
    gc.freeze()  # every trainer collects garbage, and looking at all modules for it takes longer than to train
    done = {
        f"{strategy.name} {beta}": against(strategy, policy, folder, backend, beta)
        for strategy in one_of_each(PROMPTS)
        for beta in ([0.0, 0.05] if strategy.name in WITH_REFERENCE else [0.0])
    }
    (folder / f"{backend}-{os.environ['RANK']}.json").write_text(json.dumps(done))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
