"""Save and restore the strategies' memory with verl's checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from explorl.core.store import read_json, write_json
from explorl.strategies import Strategy
from explorl.strategies._lib.validate import name_of

FILE = "explorl_strategies.json"


def save(folder: Path, strategies: Sequence[Strategy]) -> None:
    """Write the strategies' memory into a checkpoint's folder."""
    write_json(folder / FILE, [{"name": name_of(strategy), "memory": strategy.memory} for strategy in strategies])


def restore(folder: Path, strategies: Sequence[Strategy]) -> None:
    """Restore the strategies' memory from a checkpoint, if it has any; a checkpoint of plain verl does not."""
    path = folder / FILE
    if not path.exists():
        return
    saved = read_json(path, list)
    names, listed = [entry["name"] for entry in saved], [name_of(strategy) for strategy in strategies]
    if names != listed:
        raise ValueError(
            f"{folder} was written with the strategies {', '.join(names) or 'none'}, but explorl.strategies has "
            f"{', '.join(listed) or 'none'}; list the same ones, or start again with trainer.resume_mode=disable"
        )
    for strategy, entry in zip(strategies, saved, strict=True):
        strategy.memory.clear()
        strategy.memory.update(entry["memory"])
