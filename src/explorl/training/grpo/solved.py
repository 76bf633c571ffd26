"""Prompts that the policy solves again and again come back less often.

    asked with probability  1      as long as one of its last m visits had an answer that was not right
                            floor  after m visits in a row in which every answer was right

A prompt that is passed over is still in the data set: its turn comes again in the next epoch, and one visit with a
wrong answer makes it an ordinary prompt again. Which ones are passed over follows from the seed, the number of the
generation batch and the prompt, so that every process and a resumed run agree.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor

from explorl.core.store import read_json
from explorl.training.grpo.fresh import keyed_uniform

STATE = "skip_solved.json"


@dataclass(frozen=True)
class SkipSolved:
    """Ask prompts that are solved every time less often."""

    visits: int = 2
    """m: visits in a row with right answers only, after which a prompt comes back less often."""
    floor: float = 0.1
    """With what probability it is asked all the same when its turn comes."""
    remembered: int = 200_000
    """Of so many prompts at most it is known how often they were solved; those visited longest ago are forgotten."""

    def __post_init__(self) -> None:
        for name, good in (("visits", 2), ("remembered", 200_000)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"skip_solved: {name} is {value!r}; use a whole number from 1 on, such as {good}")
        number = isinstance(self.floor, int | float) and not isinstance(self.floor, bool)
        if not number or not 0 < self.floor <= 1:
            raise ValueError(
                f"skip_solved: floor is {self.floor!r}; use a probability above 0 and at most 1, such as 0.1: a prompt "
                "that is never asked again can never be found to be forgotten"
            )


class SolveStreaks:
    """How many visits in a row each prompt was solved in; prompts that were not solved last time are not in it."""

    def __init__(self, spec: SkipSolved, seed: int) -> None:
        self.spec, self.seed = spec, seed
        self._streaks: dict[str, int] = {}

    @property
    def solved(self) -> int:
        """Prompts that come back less often."""
        return sum(streak >= self.spec.visits for streak in self._streaks.values())

    def skips(self, key: str, number: int) -> bool:
        """Whether the prompt is not asked in the generation batch of this number."""
        if self._streaks.get(key, 0) < self.spec.visits:
            return False
        return keyed_uniform("skip_solved", self.seed, number, key) >= self.spec.floor

    def record(self, keys: Sequence[str], rates: Float[Tensor, " groups"]) -> None:
        """Takes down what share of each prompt's answers was right; NaN, where none was scored, says nothing."""
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
        """A checkpoint without it was written before the option was switched on: nothing is known."""
        if (folder / STATE).exists():
            self._streaks = read_json(folder / STATE, dict)


def solve_rates(correctness: Float[Tensor, " rows"], threshold: float, generations: int) -> Float[Tensor, " groups"]:
    """Share of right answers among those of each group that were scored; NaN where none was."""
    grouped = correctness.reshape(-1, generations)
    right = torch.where(grouped.isnan(), torch.nan, (grouped >= threshold).to(grouped.dtype))
    return right.nanmean(1)
