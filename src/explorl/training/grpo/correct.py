"""What "correct" means in a run: one reward function, by its name, reaches a threshold.

Strategies that learn differently from right and wrong answers must not be told by the sum of all rewards: with accuracy
and format at weight 1 each, a wrong answer in the right form has as much as a right one in the wrong form.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from jaxtyping import Bool, Float
from torch import Tensor

Spec = str | tuple[str, float] | None
"""A reward function's name, or its name and the least value of a correct answer (1 where it is left out)."""

_SOUNDS_LIKE = re.compile(r"accura|correct|solve|exact", re.IGNORECASE)
SLACK = 1e-6


@dataclass(frozen=True)
class Correct:
    """An answer is correct where the reward function of this name gives at least ``threshold``."""

    name: str
    column: int
    """Its place among the run's reward functions."""
    threshold: float = 1.0
    guessed: bool = False

    @classmethod
    def of(cls, spec: Spec, names: Sequence[str]) -> Correct:
        """Looks the name up; without one, takes the only function, or the first that sounds like it."""
        if spec is None:
            likely = [name for name in names if _SOUNDS_LIKE.search(name)] or list(names)
            return cls(likely[0], list(names).index(likely[0]), guessed=True)
        name, threshold = (spec, 1.0) if isinstance(spec, str) else spec
        if name not in names:
            raise ValueError(f"correct names the reward function {name!r}; this trainer has {', '.join(names)}")
        if list(names).count(name) > 1:
            raise ValueError(f"correct names {name!r}, and {list(names).count(name)} reward functions are called so")
        return cls(name, list(names).index(name), float(threshold))

    def rewards(self, parts: Float[Tensor, "batch functions"]) -> Float[Tensor, " batch"]:
        """The reward that decides, NaN where the function did not score the answer."""
        return parts[:, self.column]

    def marks(self, parts: Float[Tensor, "batch functions"]) -> Bool[Tensor, " batch"]:
        return self.rewards(parts) >= self.threshold - SLACK

    @property
    def guess(self) -> str:
        """What to tell a user whose strategies ask for it and who has not said it."""
        return (
            f"an answer is taken to be correct where the reward function {self.name!r} gives at least 1; say which one "
            f"decides, such as ExplorationTrainer(..., correct=({self.name!r}, 1.0))"
        )
