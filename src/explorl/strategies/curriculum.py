"""Curriculum: train only on prompts that the initial checkpoint can solve, or on the easiest prompts first.

    "solved": keep prompts with solve_rate > above;   "easy_first": sort by falling solve_rate

Mecklenburg, §3 and §5.2 ("solved").

What to expect: fewer batches without any success, and therefore less noise early in training. In the author's runs the
drops at hard prompts disappeared, but the later decline remained, and held-out accuracy did not improve.

When not to use it: with "solved" the model is never trained on prompts that it cannot solve yet, for which exploration
is most useful.

Deviations: a prompt counts as solved with a single correct completion; increase `above` to require more. A prompt that
is missing from `solve_rates` is dropped by "solved"; "easy_first" gives it the mean rate. Prompts with equal rates keep
the order of the data set. It is an error if none of the rates belongs to a prompt of the data set. "easy_first"
disables TRL's shuffling.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from explorl.strategies._lib.solve_rates import SolveRates, load_solve_rates, no_match_message
from explorl.strategies._lib.validate import check_choice, check_number
from explorl.strategies.base import Batch, Strategy


@dataclass(frozen=True)
class Curriculum(Strategy):
    """Train only on prompts that the initial checkpoint can solve, or on the easiest prompts first."""

    name = "curriculum"
    paper = "Mecklenburg 2025, Exploration strategies for reasoning fine-tuning of small language models, §3"
    acts_on_parts = True

    solve_rates: SolveRates  # mapping from prompt to rate, or path of a JSON file
    mode: Literal["solved", "easy_first"] = "solved"
    above: float = 0.0
    rates: dict[str, float] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_choice(self, "mode", "solved", "easy_first")
        check_number(self, "above", at_least=0, below=1, scheduled=False)
        self.rates.update(load_solve_rates(self, self.solve_rates))

    def arguments(self) -> Mapping[str, Any]:
        return {"shuffle_dataset": False} if self.mode == "easy_first" else {}

    def order(self, prompts: Sequence[str]) -> Sequence[int]:
        matches = sum(prompt in self.rates for prompt in prompts)
        if not matches:
            raise ValueError(f"{self.name}: {no_match_message(self.rates, prompts)}")
        mean = sum(self.rates.values()) / len(self.rates)
        if self.mode == "easy_first":
            indices = sorted(range(len(prompts)), key=lambda row: -self.rates.get(prompts[row], mean))
        else:
            indices = [row for row, prompt in enumerate(prompts) if self.rates.get(prompt, 0.0) > self.above]
        if not indices:
            raise ValueError(
                f"{self.name}: no prompt is left: {matches} of {len(prompts)} prompts have a solve rate, none of them "
                f"above {self.above:g}; lower `above`, or use mode='easy_first'"
            )
        self.memory["prompts"] = len(indices)
        return indices

    def metrics(self, batch: Batch) -> Mapping[str, float]:
        return {"prompts": self.memory.get("prompts", 0)}
