"""Curriculum: train on the prompts that the starting checkpoint can solve, or on the easiest first.

    "solved": keep prompts with solve_rate > above;   "easy_first": order by falling solve_rate

Mecklenburg, §3 and §5.2 ("solved").

What to expect: fewer batches without any success, so an early training that is less noisy. The author's runs lost
their drops at the hard prompts, but the later decline stayed, and held-out accuracy did not improve.

When not to: with "solved" the model never meets what it cannot do yet, which is where exploration pays.

Deviations: a prompt counts as solved with a single correct answer; raise `above` to ask for more. A prompt that is
not in `solve_rates` was not seen solved, so "solved" drops it; "easy_first" gives it the mean rate. Equal rates keep
the order of the data set. Rates none of which belongs to a prompt of the data set are an error. "easy_first" switches
TRL's shuffling off.
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
    """Train on the prompts that the starting checkpoint can solve, or on the easiest first."""

    name = "curriculum"
    paper = "Mecklenburg 2025, Exploration strategies for reasoning fine-tuning of small language models, §3"
    acts_on_parts = True

    solve_rates: SolveRates  # a mapping from prompt to rate, or the path of a JSON file
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
        found = sum(prompt in self.rates for prompt in prompts)
        if not found:
            raise ValueError(f"{self.name}: {no_match_message(self.rates, prompts)}")
        mean = sum(self.rates.values()) / len(self.rates)
        if self.mode == "easy_first":
            kept = sorted(range(len(prompts)), key=lambda row: -self.rates.get(prompts[row], mean))
        else:
            kept = [row for row, prompt in enumerate(prompts) if self.rates.get(prompt, 0.0) > self.above]
        if not kept:
            raise ValueError(
                f"{self.name}: no prompt is left: {found} of {len(prompts)} have one of the {len(self.rates)} solve "
                f"rates, none of them above {self.above:g}; lower `above`, or use mode='easy_first'"
            )
        self.memory["prompts"] = len(kept)
        return kept

    def metrics(self, batch: Batch) -> Mapping[str, float]:
        return {"prompts": self.memory.get("prompts", 0)}
