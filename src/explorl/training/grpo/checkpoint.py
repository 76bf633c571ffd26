"""State of a checkpoint beyond TRL's: the strategies' memory, a changed reference, a generation batch in use."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import send_to_device

from explorl.core.documents import load_tensors
from explorl.core.store import read_json
from explorl.strategies import Strategy
from explorl.training.checkpoint_faults import STRATEGY_STATE, restoring

BUFFER_STATE = "generation_batch_{}.pt"


def write_state(trainer: Any, folder: Path) -> None:
    """Write the state of a trainer that its checkpoint needs beyond TRL's; called on every process."""
    accelerator, mean_reward = trainer.accelerator, trainer.mean_reward
    if trainer.buffered_batches is not None:
        torch.save(trainer.buffered_batches, folder / BUFFER_STATE.format(accelerator.process_index))
    trainer.inspector.write(folder)
    trainer.reference.write(folder)
    if not trainer.args.should_save:
        return
    progress = TrainingProgress(trainer.micro_step, mean_reward, accelerator.num_processes)
    write_progress(folder, progress, trainer.strategies)
    if trainer.prompts.streaks is not None:
        trainer.prompts.streaks.write(folder)


def read_state(trainer: Any, folder: Path) -> None:
    """Restore what `write_state` has written; called on every process."""
    trainer.inspector.read(folder)
    if trainer.prompts.streaks is not None:
        trainer.prompts.streaks.read(folder)
    processes = trainer.accelerator.num_processes
    progress = read_progress(folder, trainer.strategies, processes)
    if progress is None:
        return
    trainer.micro_step, trainer.mean_reward = progress.micro_step, progress.reward
    trainer.reference.read(folder)
    batches = _read_batches(folder, trainer.accelerator)
    if batches is not None and progress.processes != processes:
        trainer.warn_once(
            f"{folder} was written by {progress.processes} processes, now there are {processes}: the generation "
            "batch that was in use is dropped, and a new one is sampled"
        )
        batches = None
    if batches is None:  # continue with the first micro-batch of a new batch, also if batches have more of them now
        per_batch = trainer.args.steps_per_generation * trainer.num_iterations
        trainer.micro_step = -(-trainer.micro_step // per_batch) * per_batch
        return
    if len(batches) != trainer.args.steps_per_generation:
        raise ValueError(
            f"{folder} has a generation batch in {len(batches)} parts, but steps_per_generation is "
            f"{trainer.args.steps_per_generation}; resume with steps_per_generation={len(batches)}"
        )
    trainer.buffered_batches = batches


def _read_batches(folder: Path, accelerator: Any) -> list[dict[str, Any]] | None:
    """Return the micro-batches of this process's generation batch in use; None if the checkpoint has none."""
    path = folder / BUFFER_STATE.format(accelerator.process_index)
    if not path.exists():
        return None
    with restoring(folder, path.name):
        # via the CPU: torch cannot map to the "cpu:0" of a process among several
        return [dict(batch) for batch in send_to_device(load_tensors(path), accelerator.device)]


@dataclass(frozen=True)
class TrainingProgress:
    """Progress of a run between two micro-batches."""

    micro_step: int
    reward: float
    """Mean reward of the latest generation batch."""
    processes: int = 1


def write_progress(folder: Path, progress: TrainingProgress, strategies: Sequence[Strategy]) -> None:
    """Write the progress and the strategies' memory."""
    memories = [{"name": strategy.name, "memory": strategy.memory} for strategy in strategies]
    state = {
        "step": progress.micro_step,
        "reward": progress.reward,
        "processes": progress.processes,
        "strategies": memories,
    }
    (folder / STRATEGY_STATE).write_text(json.dumps(state))


def read_progress(folder: Path, strategies: Sequence[Strategy], processes: int) -> TrainingProgress | None:
    """Restore the strategies' memory and return the progress; None if a plain GRPOTrainer wrote the checkpoint.

    ``processes`` is the current number, used if the checkpoint has none.
    """
    if not (folder / STRATEGY_STATE).exists():
        return None
    saved = read_json(folder / STRATEGY_STATE, dict)
    saved_names = [entry["name"] for entry in saved["strategies"]]
    names = [strategy.name for strategy in strategies]
    if saved_names != names:
        raise ValueError(f"{folder} was written with the strategies {saved_names}, but this trainer has {names}")
    for strategy, entry in zip(strategies, saved["strategies"], strict=True):
        strategy.memory.clear()
        strategy.memory.update(entry["memory"])
    return TrainingProgress(saved["step"], saved.get("reward", math.nan), saved.get("processes", processes))
