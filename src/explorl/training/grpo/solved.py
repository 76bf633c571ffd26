"""Sample prompts that the policy solves every time less often.

    probability of sampling it  1      while any of its last m visits had a wrong completion
                                floor  after m visits in a row with correct completions only

A skipped prompt stays in the data set: its turn comes again in the next epoch, and one visit with a wrong completion
makes it an ordinary prompt again. Which prompts are skipped depends on the seed, the number of the generation batch and
the prompt alone, so every process and a resumed run agree.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor

from explorl.core.store import read_json

STATE = "skip_solved.json"


@dataclass(frozen=True)
class SkipSolved:
    """Sample prompts that are solved every time less often."""

    visits: int = 2
    """m: visits in a row with correct completions only, after which a prompt is sampled less often."""
    floor: float = 0.1
    """Probability of still sampling a solved prompt."""
    remembered: int = 200_000
    """Maximum number of prompts to keep streaks of; those visited longest ago are dropped."""

    def __post_init__(self) -> None:
        for name, good in (("visits", 2), ("remembered", 200_000)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"skip_solved: {name} is {value!r}; use a whole number of 1 or more, such as {good}")
        number = isinstance(self.floor, int | float) and not isinstance(self.floor, bool)
        if not number or not 0 < self.floor <= 1:
            raise ValueError(
                f"skip_solved: floor is {self.floor!r}; use a probability above 0 and at most 1, such as 0.1: if a "
                "prompt is never sampled again, forgetting it goes unnoticed"
            )


class SolveStreaks:
    """Number of visits in a row in which each prompt was solved; holds only prompts that were solved last time."""

    def __init__(self, spec: SkipSolved, seed: int) -> None:
        self.spec, self.seed = spec, seed
        self._streaks: dict[str, int] = {}

    @property
    def solved(self) -> int:
        """Number of prompts that are sampled less often."""
        return sum(streak >= self.spec.visits for streak in self._streaks.values())

    def skips(self, key: str, number: int) -> bool:
        """Tell whether to skip the prompt in the generation batch of this number."""
        if self._streaks.get(key, 0) < self.spec.visits:
            return False
        return keyed_uniform("skip_solved", self.seed, number, key) >= self.spec.floor

    def record(self, keys: Sequence[str], rates: Float[Tensor, " groups"]) -> None:
        """Record the share of correct completions of each prompt; NaN (none was scored) leaves its streak as it is."""
        for key, rate in zip(keys, rates.tolist(), strict=True):
            if rate != rate:
                continue
            streak = self._streaks.pop(key, 0)
            if rate == 1.0:
                self._streaks[key] = min(streak + 1, self.spec.visits)
        for key in list(self._streaks)[: max(0, len(self._streaks) - self.spec.remembered)]:
            del self._streaks[key]

    def write(self, folder: Path) -> None:
        (folder / STATE).write_text(json.dumps(self._streaks))

    def read(self, folder: Path) -> None:
        """Read the streaks; a checkpoint from before the option was switched on has none."""
        if (folder / STATE).exists():
            self._streaks = read_json(folder / STATE, dict)


def keyed_seed(*parts: object) -> int:
    """Return a seed that depends on these values alone."""
    digest = hashlib.sha256("/".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1  # torch needs a seed below 2^63


def keyed_uniform(*parts: object) -> float:
    """Return a number from 0 to 1 that depends on these values alone."""
    return keyed_seed(*parts) / 2**63


def solve_rates(correctness: Float[Tensor, " rows"], threshold: float, generations: int) -> Float[Tensor, " groups"]:
    """Return the share of correct completions among the scored ones of each group; NaN if none was scored."""
    grouped = correctness.reshape(-1, generations)
    correct = torch.where(grouped.isnan(), torch.nan, (grouped >= threshold).to(grouped.dtype))
    return correct.nanmean(1)
