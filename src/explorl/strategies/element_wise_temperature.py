"""Element-wise temperature: explore hard prompts hot, easy ones cool.

    τ(prompt) = hard + (easy − hard) · solve_rate(prompt)

Mecklenburg, §5.2 (0.6 where the starting checkpoint solved the prompt, 1.5 where not). The training log-probabilities
are those of the row's own temperature, log softmax(logits / τ_row), so that a sample is the policy's own.
`training_temperature="one"` takes them at τ = 1: what is trained is then the policy as it will be used, on samples that
are not its own; importance_correction weighs for that.

What to expect: hard prompts give more varied answers and so now and then a success to learn from, easy ones stay
clean. The author saw no gain on held-out puzzles with a 0.5B model.

When not to: above a temperature of about 1.5 a small model's answers fall apart and the reward goes to zero.

Deviations: the author had two temperatures; the line between them is the general form, and a file with rates 0 and 1
gives the author's. `source="checkpoint"` reads the rates from `solve_rates`. `source="running"` keeps an exponential
mean per prompt of the share of correct answers, as the run defines correct (`decay` is the weight of the past), which
starts at the first observation, or at `solve_rates` where given. A prompt without a rate takes the running mean over
all prompts, else the mean of `solve_rates`, else 0.5; where `solve_rates` has no prompt of the first batch, a warning
says so.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from explorl.strategies._lib.schedule import Scheduled, at
from explorl.strategies._lib.solve_rates import (
    SolveRates,
    load_solve_rates,
    no_match_message,
    text_key,
    update_solve_rates,
)
from explorl.strategies._lib.validate import check_choice, check_number
from explorl.strategies.base import Batch, Sampling, Strategy


@dataclass(frozen=True)
class ElementWiseTemperature(Strategy):
    """Explore hard prompts hot, easy ones cool."""

    name = "element_wise_temperature"
    paper = "Mecklenburg 2025, Exploration strategies for reasoning fine-tuning of small language models, §5.2"
    acts_on_parts = True

    easy: Scheduled = 0.6
    hard: Scheduled = 1.5
    source: Literal["checkpoint", "running"] = "checkpoint"
    solve_rates: SolveRates | None = None  # needed where the source is a checkpoint's evaluation
    decay: Scheduled = 0.9  # of the running mean
    training_temperature: Literal["row", "one"] = "row"  # of the training log-probabilities
    start: dict[str, float] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_number(self, "easy", above=0)
        check_number(self, "hard", above=0)
        check_choice(self, "source", "checkpoint", "running")
        check_number(self, "decay", at_least=0, below=1)
        check_choice(self, "training_temperature", "row", "one")
        if self.source == "checkpoint" or self.solve_rates is not None:
            self.start.update(load_solve_rates(self, self.solve_rates))

    @property
    def needs_correct(self) -> bool:  # type: ignore[override]
        return self.source == "running"

    def rate(self, prompt: str) -> float:
        """The solve rate of a prompt, as far as known."""
        if prompt in self.start:
            known = self.start[prompt]
        else:
            mean = sum(self.start.values()) / len(self.start) if self.start else 0.5
            known = self.memory.get("overall", mean)
        return self.memory.get("rates", {}).get(text_key(prompt), known)

    def sampling(self, prompts: Sequence[str], step: int) -> Sampling:
        self._warn_unmatched(prompts)
        easy, hard = at(self.easy, step), at(self.hard, step)
        temperature = {"temperature": [hard + (easy - hard) * self.rate(prompt) for prompt in prompts]}
        if self.training_temperature == "row":
            return temperature
        return temperature | {"training_temperature": [1.0] * len(prompts)}

    def _warn_unmatched(self, prompts: Sequence[str]) -> None:
        """On the first batch: whether `solve_rates` speaks of these prompts at all."""
        if not self.start or not prompts or "matched" in self.memory:
            return
        self.memory["matched"] = any(prompt in self.start for prompt in prompts)
        if not self.memory["matched"]:
            message = f"{self.name}: {no_match_message(self.start, prompts)}; they take the mean rate"
            warnings.warn(message, stacklevel=3)

    def metrics(self, batch: Batch) -> Mapping[str, float]:
        """Logs the range of the temperatures, and learns from the batch where the rates are running ones."""
        collectives = batch.collectives
        if self.source == "running":
            decay = at(self.decay, batch.step)
            outcomes = collectives.gather_rows(batch.correct), collectives.gather_rows(batch.correctness)
            update_solve_rates(
                self.memory, collectives.gather_objects(batch.prompts), *outcomes, decay=decay, start=self.start
            )
        temperature = collectives.gather_rows(batch.temperature)
        return {
            "temperature_min": float(temperature.min()),
            "temperature_max": float(temperature.max()),
        }
