"""What strategies remember, beside a checkpoint of verl's."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from explorl.core.store import read_json, write_json
from explorl.strategies import Strategy
from explorl.strategies._lib.validate import name_of

FILE = "explorl_strategies.json"


def keep(folder: Path, strategies: Sequence[Strategy]) -> None:
    """Writes what the strategies remember into a checkpoint's folder."""
    write_json(folder / FILE, [{"name": name_of(strategy), "memory": strategy.memory} for strategy in strategies])


def restore(folder: Path, strategies: Sequence[Strategy]) -> None:
    """Gives the strategies the memory that a checkpoint holds; one of plain verl holds none."""
    path = folder / FILE
    if not path.exists():
        return
    saved = read_json(path, list)
    names, own = [entry["name"] for entry in saved], [name_of(strategy) for strategy in strategies]
    if names != own:
        raise ValueError(
            f"{folder} was written with the strategies {', '.join(names) or 'none'}, and explorl.strategies has "
            f"{', '.join(own) or 'none'}; list the same ones, or start anew with trainer.resume_mode=disable"
        )
    for strategy, entry in zip(strategies, saved, strict=True):
        strategy.memory.clear()
        strategy.memory.update(entry["memory"])
