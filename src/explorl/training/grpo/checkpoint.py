"""State of a checkpoint beyond TRL's: the strategies' memory, a changed reference, a generation batch in use."""

from __future__ import annotations

import json
import math
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import send_to_device
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import TrainerState
from transformers.trainer_pt_utils import safe_globals

from explorl.core.documents import DocumentError, load_tensors, parse_json
from explorl.core.store import read_json
from explorl.strategies import Strategy

STRATEGY_STATE, REFERENCE_STATE, BUFFER_STATE = "strategies.json", "reference.safetensors", "generation_batch_{}.pt"

WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "adapter_model.safetensors", "pytorch_model.bin",
           "pytorch_model.bin.index.json")  # fmt: skip


def find_fault(folder: Path) -> str | None:
    """Return why training can't resume from this checkpoint, such as an incomplete file; None if it can."""
    if not any((folder / name).exists() for name in WEIGHTS) and not _sharded(folder):
        return "it has no weights"
    if not _sharded(folder):
        for name in ("optimizer.pt", "scheduler.pt"):
            if not (folder / name).exists():
                return f"{name} is missing"
    if not (folder / "trainer_state.json").exists():
        return "trainer_state.json is missing"
    for path in sorted(folder.iterdir()):
        reason = _FAULTS[path.suffix](path) if path.suffix in _FAULTS else None
        if reason is not None:
            return f"{path.name} {reason}"
    return None


def _sharded(folder: Path) -> bool:
    """Tell whether FSDP or DeepSpeed wrote the checkpoint, with weights and optimizer in subfolders."""
    return any(path.is_dir() for path in folder.iterdir()) or (folder / "optimizer.bin").exists()


def _json_fault(path: Path) -> str | None:
    try:
        state = parse_json(path.read_bytes(), path.name)
    except DocumentError:
        return "is incomplete"
    if path.name == STRATEGY_STATE:
        return None if _is_strategy_state(state) else "has no memory of strategies"
    if path.name != "trainer_state.json":
        return None
    if not isinstance(state, dict) or not isinstance(state.get("global_step"), int):
        return "has no global_step"
    try:
        TrainerState.load_from_json(str(path))
    except Exception:  # fields of any type may fail in any way
        return "is not the state of a trainer"
    return None


def _is_strategy_state(state: Any) -> bool:
    entries = state.get("strategies") if isinstance(state, dict) else None
    return isinstance(entries, list) and all(
        isinstance(entry, dict) and isinstance(entry.get("name"), str) and isinstance(entry.get("memory"), dict)
        for entry in entries
    )


def _safetensors_fault(path: Path) -> str | None:
    """Check the length of the file, which its header states."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = parse_json(file.read(min(length, path.stat().st_size)), path.name)
        ends = [int(entry["data_offsets"][1]) for name, entry in header.items() if name != "__metadata__"]
    except (ValueError, LookupError, AttributeError, TypeError, OverflowError):
        return "is incomplete"
    return None if path.stat().st_size == 8 + length + max(ends, default=0) else "is incomplete"


def _torch_fault(path: Path) -> str | None:
    """Check a file of torch without reading its tensors: it is a zip archive, whose directory is written last."""
    if not zipfile.is_zipfile(path):
        return "is incomplete"
    try:
        with safe_globals():  # of random number generators, as the trainer loads them
            content = load_tensors(path, map_location="meta", mmap=True)
    except DocumentError:
        return "is not a file of tensors and plain values"
    keys = _KEYS.get(path.name, frozenset())
    missing = sorted(keys - content.keys()) if isinstance(content, dict) else sorted(keys)
    return f"has no {missing[0]}" if missing else None


_KEYS = {
    "optimizer.pt": frozenset(("state", "param_groups")),
    "scheduler.pt": frozenset(("last_epoch",)),
    "rng_state.pth": frozenset(("python", "numpy", "cpu")),
}
"""Keys of the files of a trainer."""
_FAULTS = {".json": _json_fault, ".safetensors": _safetensors_fault, ".pt": _torch_fault, ".pth": _torch_fault}


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


def write_reference(folder: Path, weights: Mapping[str, Tensor]) -> None:
    """Write the weights of the reference."""
    save_file({key: value.detach().cpu().clone() for key, value in weights.items()}, folder / REFERENCE_STATE)


def read_reference(folder: Path) -> dict[str, Tensor] | None:
    """Return the weights of the reference; None if the checkpoint has none."""
    return load_file(folder / REFERENCE_STATE) if (folder / REFERENCE_STATE).exists() else None


def write_batches(folder: Path, process: int, batches: list[dict[str, Any]]) -> None:
    """Write the micro-batches of this process's generation batch in use."""
    torch.save(batches, folder / BUFFER_STATE.format(process))


def read_batches(folder: Path, process: int, device: torch.device) -> list[dict[str, Any]] | None:
    """Return the micro-batches of this process's generation batch in use; None if the checkpoint has none."""
    path = folder / BUFFER_STATE.format(process)
    if not path.exists():
        return None
    # via the CPU: torch cannot map to the "cpu:0" of a process among several
    return send_to_device(load_tensors(path), device)
