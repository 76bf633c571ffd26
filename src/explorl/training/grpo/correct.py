"""What "correct" means in a run: one reward function, given by name, reaches a threshold.

Strategies that treat correct and wrong completions differently cannot go by the sum of all rewards: with accuracy and
format at weight 1 each, a wrong answer in the right format gets as much as a correct answer in the wrong format.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from jaxtyping import Bool, Float
from torch import Tensor

Spec = str | tuple[str, float] | None
"""A reward function's name, optionally with the minimum value of a correct completion (default 1)."""

_SOUNDS_LIKE = re.compile(r"accura|correct|solve|exact", re.IGNORECASE)
SLACK = 1e-6


@dataclass(frozen=True)
class Correct:
    """A completion is correct if the reward function of this name returns at least ``threshold``."""

    name: str
    column: int
    """Index of the function among the run's reward functions."""
    threshold: float = 1.0
    guessed: bool = False

    @classmethod
    def of(cls, spec: Spec, names: Sequence[str]) -> Correct:
        """Look up the reward function; without a name, guess the first that sounds like correctness, or the first."""
        if spec is None:
            likely = [name for name in names if _SOUNDS_LIKE.search(name)] or list(names)
            return cls(likely[0], list(names).index(likely[0]), guessed=True)
        name, threshold = (spec, 1.0) if isinstance(spec, str) else spec
        if name not in names:
            raise ValueError(f"correct names the reward function {name!r}; this trainer has {', '.join(names)}")
        if list(names).count(name) > 1:
            raise ValueError(f"correct names {name!r}, and {list(names).count(name)} reward functions have this name")
        return cls(name, list(names).index(name), float(threshold))

    def rewards(self, parts: Float[Tensor, "batch functions"]) -> Float[Tensor, " batch"]:
        """Return the reward that decides, NaN for completions that the function did not score."""
        return parts[:, self.column]

    def marks(self, parts: Float[Tensor, "batch functions"]) -> Bool[Tensor, " batch"]:
        """Return which completions are correct."""
        return self.rewards(parts) >= self.threshold - SLACK

    @property
    def guess(self) -> str:
        """Warning for users whose strategies need ``correct`` and who have not set it."""
        return (
            f"completions count as correct if the reward function {self.name!r} returns at least 1; choose one with "
            f"correct, such as ExplorationTrainer(..., correct=({self.name!r}, 1.0))"
        )
