"""Faults of a checkpoint: files that are incomplete, or that do not fit the run that resumes from it."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import Field, fields
from numbers import Real
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler
from transformers import TrainerState
from transformers.trainer_pt_utils import safe_globals

from explorl.core.documents import DocumentError, load_tensors, parse_json
from explorl.core.store import StoreError

STRATEGY_STATE = "strategies.json"

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
        trainer = TrainerState.load_from_json(str(path))
    except Exception:  # fields of any type may fail in any way
        return "is not the state of a trainer"
    invalid = next((field.name for field in fields(TrainerState) if not _is_valid_field(trainer, field)), None)
    return None if invalid is None else f"has an invalid {invalid}"


def _is_valid_field(state: TrainerState, field: Field[Any]) -> bool:
    """Tell whether a field of a trainer's state has a valid type."""
    value = getattr(state, field.name)
    if field.name == "log_history":
        return isinstance(value, list) and all(isinstance(line, dict) for line in value)
    if field.name == "stateful_callbacks":
        return isinstance(value, dict) and "TrainerControl" in value
    if field.name in ("epoch", "train_batch_size"):
        return value is None or _is_number(value)
    return _is_number(value) or not _is_number(field.default)


def _is_strategy_state(state: Any) -> bool:
    entries = state.get("strategies") if isinstance(state, dict) else None
    numbers = [state.get(name, 0) for name in ("step", "reward", "processes")] if isinstance(state, dict) else []
    return (
        all(map(_is_number, numbers))
        and isinstance(entries, list)
        and all(
            isinstance(entry, dict) and isinstance(entry.get("name"), str) and isinstance(entry.get("memory"), dict)
            for entry in entries
        )
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
    if missing:
        return f"has no {missing[0]}"
    return _CONTENT_FAULTS[path.name](content) if path.name in _CONTENT_FAULTS else None


def _scheduler_fault(content: Mapping[str, Any]) -> str | None:
    """Return what is wrong with a scheduler's state, whose entries become its attributes, in place of methods too."""
    for name, value in content.items():
        if name == "optimizer" or callable(getattr(LRScheduler, str(name), None)):
            return f"has a state of {name!r}, which is none"
        if name in ("base_lrs", "_last_lr", "lr_lambdas") and not isinstance(value, list):
            return f"has {name} that is no list"
    return None if _is_number(content["last_epoch"]) else "has a last_epoch that is no number"


def _optimizer_fault(content: Mapping[str, Any]) -> str | None:
    state, groups = content["state"], content["param_groups"]
    if not isinstance(state, dict) or not all(isinstance(values, dict) for values in state.values()):
        return "has a state that is no mapping of mappings"
    if not isinstance(groups, list) or not all(isinstance(group, dict) and "params" in group for group in groups):
        return "has param_groups that are no list of groups"
    return None


def _is_number(value: object) -> bool:
    return isinstance(value, Real) or (isinstance(value, Tensor) and value.numel() == 1)


_KEYS = {
    "optimizer.pt": frozenset(("state", "param_groups")),
    "scheduler.pt": frozenset(("last_epoch",)),
    "rng_state.pth": frozenset(("python", "numpy", "cpu")),
}
"""Keys of the files of a trainer."""
_CONTENT_FAULTS = {"scheduler.pt": _scheduler_fault, "optimizer.pt": _optimizer_fault}
_FAULTS = {".json": _json_fault, ".safetensors": _safetensors_fault, ".pt": _torch_fault, ".pth": _torch_fault}


# -------------------------------------------------------------------- restoring


@contextmanager
def restoring(folder: Path, names: str) -> Iterator[None]:
    """Raise `StoreError` where what these files of a checkpoint hold does not fit what it is given back to."""
    try:
        yield
    except (MemoryError, torch.OutOfMemoryError, OSError):
        raise
    except Exception as error:  # what is wrong in a file fails wherever it is used first
        reason = next(iter(str(error).splitlines()), "") or type(error).__name__
        raise StoreError(
            f"cannot go on from {folder}: in {folder.name}, {names} does not fit this run ({reason}); remove the "
            "folder to go on from an earlier checkpoint"
        ) from error


@contextmanager
def restoring_optimizer(trainer: Any, checkpoint: str | None) -> Iterator[None]:
    """Raise `StoreError` where the optimizer and the scheduler that a trainer restores do not fit its parameters."""
    if checkpoint is None or not (Path(checkpoint) / "optimizer.pt").is_file():  # a first step, or a sharded one
        yield
        return
    before = _settings(trainer.optimizer)
    with restoring(Path(checkpoint), "optimizer.pt or scheduler.pt"):
        yield
        _check_optimizer(trainer.optimizer, before)


_SHAPED = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad)
"""Optimizers whose state has the shape of its parameter."""


def _settings(optimizer: Any) -> list[dict[str, Any]]:
    """Return the hyperparameters of each group of an optimizer."""
    return [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]


def _check_optimizer(optimizer: Any, before: Sequence[Mapping[str, Any]]) -> None:
    """Raise where an optimizer's restored state does not fit its parameters: fused kernels would read past its end."""
    for settings, expected in zip(_settings(optimizer), before, strict=True):
        for name in expected.keys() & settings.keys():
            if not _is_alike(settings[name], expected[name]):
                raise ValueError(f"{name} is {settings[name]!r:.100}, like {expected[name]!r} would be right")
    if not isinstance(getattr(optimizer, "optimizer", optimizer), _SHAPED):
        return
    for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
        for name, value in optimizer.state.get(parameter, {}).items():
            if not _fits(value, parameter):
                raise ValueError(f"{name} of a parameter of the shape {tuple(parameter.shape)} is {_described(value)}")


def _is_alike(value: Any, expected: Any) -> bool:
    """Return whether a value could stand for one that is expected, where that is a number or some of them."""
    if isinstance(expected, list | tuple):
        return isinstance(value, list | tuple) and len(value) == len(expected) and all(map(_is_alike, value, expected))
    if isinstance(expected, bool):  # it says which state there is
        return value is expected
    return _is_number(value) or not _is_number(expected)


def _fits(value: Any, parameter: Tensor) -> bool:
    if not isinstance(value, Tensor) or value.numel() == 1:
        return value is None or _is_number(value)
    is_whole = value.untyped_storage().nbytes() >= value.numel() * value.element_size()
    return value.shape == parameter.shape and value.is_floating_point() and is_whole


def _described(value: Any) -> str:
    return f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else f"{value!r:.100}"
