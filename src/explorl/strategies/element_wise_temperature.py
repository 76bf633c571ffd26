"""Element-wise temperature: explore hard prompts hot, easy ones cool.

    τ(prompt) = hard + (easy − hard) · solve_rate(prompt)

Mecklenburg, §5.2 (0.6 where the starting checkpoint solved the prompt, 1.5 where not).

What to expect: hard prompts give more varied answers and so now and then a success to learn from, easy ones stay
clean. The author saw no gain on held-out puzzles with a 0.5B model.

When not to: above a temperature of about 1.5 a small model's answers fall apart and the reward goes to zero.

Deviations: the author had two temperatures; the line between them is the general form, and a file with rates 0 and 1
gives the author's. `source="checkpoint"` reads the rates from `solve_rates`. `source="running"` keeps an exponential
mean for each prompt (R ≥ 1 is solved; `decay` is the weight of the past), which starts at the first observation, or
at `solve_rates` where given. A prompt without a rate takes the running mean over all prompts, else the mean of
`solve_rates`, else 0.5.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from explorl.strategies.base import Batch, Sampling, StepState, Strategy
from explorl.strategies.schedule import Scheduled, at
from explorl.strategies.solve_rates import SolveRates, digest, load, remember
from explorl.strategies.validate import choice, number


@dataclass(frozen=True)
class ElementWiseTemperature(Strategy):
    """Explore hard prompts hot, easy ones cool."""

    name = "element_wise_temperature"
    paper = "Mecklenburg, exploration strategies for reasoning fine-tuning of small language models, §5.2"

    easy: Scheduled = 0.6
    hard: Scheduled = 1.5
    source: Literal["checkpoint", "running"] = "checkpoint"
    solve_rates: SolveRates | None = None  # needed where the source is a checkpoint's evaluation
    decay: Scheduled = 0.9  # of the running mean
    start: dict[str, float] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        number(self, "easy", above=0)
        number(self, "hard", above=0)
        choice(self, "source", "checkpoint", "running")
        number(self, "decay", at_least=0, below=1)
        if self.source == "checkpoint" or self.solve_rates is not None:
            self.start.update(load(self, self.solve_rates))

    def rate(self, prompt: str) -> float:
        """The solve rate of a prompt, as far as known."""
        if prompt in self.start:
            known = self.start[prompt]
        else:
            mean = sum(self.start.values()) / len(self.start) if self.start else 0.5
            known = self.memory.get("overall", mean)
        return self.memory.get("rates", {}).get(digest(prompt), known)

    def sampling(self, prompts: Sequence[str]) -> Sampling:
        step = self.memory.get("step", 0)
        easy, hard = at(self.easy, step), at(self.hard, step)
        return {"temperature": [hard + (easy - hard) * self.rate(prompt) for prompt in prompts]}

    def after_step(self, state: StepState) -> None:
        self.memory["step"] = state.step  # `sampling` is not told the step

    def metrics(self, batch: Batch) -> Mapping[str, float]:
        """Logs the range of the temperatures, and learns from the batch where the rates are running ones."""
        if self.source == "running":
            decay = at(self.decay, batch.step)
            remember(self.memory, batch.prompts, batch.rewards, decay=decay, start=self.start)
        return {
            "temperature_min": float(batch.temperature.min()),
            "temperature_max": float(batch.temperature.max()),
        }
