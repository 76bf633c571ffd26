"""Element-wise temperature: sample hard prompts at a higher temperature than easy ones.

    τ(prompt) = hard + (easy − hard) · solve_rate(prompt)

Mecklenburg, §5.2 (0.6 for prompts that the initial checkpoint solved, 1.5 for the others). The training
log-probabilities use the row's own temperature, log softmax(logits / τ_row), so that the samples are on-policy.
`training_temperature="one"` computes them at τ = 1: this trains the policy as it will be used, but on off-policy
samples; importance_correction corrects for that.

What to expect: completions of hard prompts vary more and therefore contain an occasional success to learn from, while
those of easy prompts stay clean. The author found no improvement on held-out puzzles with a 0.5B model.

When not to use it: above a temperature of about 1.5, where completions of a small model become incoherent and the
reward drops to zero.

Deviations: the author used two temperatures. Interpolating between them is the general form, and a file with rates of
0 and 1 reproduces the author's setting. `source="checkpoint"` reads the rates from `solve_rates`. `source="running"`
maintains an exponential moving average of each prompt's fraction of correct completions, with correct as defined by the
run (`decay` is the weight of the past), which starts at the first observation, or at `solve_rates` if given. A prompt
without a rate uses the running average over all prompts, otherwise the mean of `solve_rates`, otherwise 0.5; a warning
is shown if `solve_rates` contains no prompt of the first batch.
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
    """Sample hard prompts at a higher temperature than easy ones."""

    name = "element_wise_temperature"
    paper = "Mecklenburg 2025, Exploration strategies for reasoning fine-tuning of small language models, §5.2"
    acts_on_parts = True

    easy: Scheduled = 0.6
    hard: Scheduled = 1.5
    source: Literal["checkpoint", "running"] = "checkpoint"
    solve_rates: SolveRates | None = None  # required if the source is a checkpoint
    decay: Scheduled = 0.9  # of the running average
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
        """Return the solve rate of a prompt, or an average over other prompts if it is unknown."""
        if prompt in self.start:
            default = self.start[prompt]
        else:
            mean = sum(self.start.values()) / len(self.start) if self.start else 0.5
            default = self.memory.get("overall", mean)
        return self.memory.get("rates", {}).get(text_key(prompt), default)

    def sampling(self, prompts: Sequence[str], step: int) -> Sampling:
        self._warn_unmatched(prompts)
        easy, hard = at(self.easy, step), at(self.hard, step)
        temperature = {"temperature": [hard + (easy - hard) * self.rate(prompt) for prompt in prompts]}
        if self.training_temperature == "row":
            return temperature
        return temperature | {"training_temperature": [1.0] * len(prompts)}

    def _warn_unmatched(self, prompts: Sequence[str]) -> None:
        """Warn on the first batch if `solve_rates` contains none of the prompts."""
        if not self.start or not prompts or "matched" in self.memory:
            return
        self.memory["matched"] = any(prompt in self.start for prompt in prompts)
        if not self.memory["matched"]:
            message = f"{self.name}: {no_match_message(self.start, prompts)}; using the mean rate"
            warnings.warn(message, stacklevel=3)

    def metrics(self, batch: Batch) -> Mapping[str, float]:
        """Return the range of the temperatures, and update running solve rates from the batch."""
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
