"""Annealed temperature: begin an answer hot and end it cool.

    τ_t = max(1 + τ_max − e^{t/d}, τ_min)   for the t-th token of an answer, t = 0, 1, …;   τ_t = 1 for t < c

Yang et al. 2025, Exploratory Annealed Decoding. The first tokens decide where an answer goes, the later ones carry it
out; so the first are sampled at τ_max and the temperature falls, ever faster, to τ_min, which it reaches at
t = d · ln(1 + τ_max − τ_min). The training log-probabilities are those of each token's own temperature,
log softmax(logits_t / τ_t), so that a sample is the policy's own. `training_temperature="one"` takes them at τ = 1, as
the authors do, who weigh for the difference by truncated importance sampling: list importance_correction beside it.

What to expect: answers that differ in their approach and not in their details. The authors report more right answers
from as many samples, and entropy that holds longer.

When not to: where `decay` does not fit the length of the answers. With one far above it all tokens are hot; far below
it, all but the first are nearly greedy, and a group has one answer. 0.74 · d tokens from the start the default τ_min is
reached, so let `decay` be about the typical number of tokens. A τ_max much above 1.2 breaks a small model's answers.

Deviations: the authors let d grow as answers do, d_s = min(d_0 + 5·s, 40000) at step s: a schedule for `decay` does it
(`{from: 400, to: 40000, steps: 7920}`). Their default of d_0 is for answers of thousands of tokens; ours of 400 is for
shorter ones. `warmup` is c, the first tokens that stay at temperature 1 because they are the template's; the schedule
goes on from t = c as if they had followed it. It takes the place of any other temperature of the run, also that of
element_wise_temperature when listed after it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from explorl.strategies._lib.schedule import Scheduled, at
from explorl.strategies._lib.validate import check_below, check_choice, check_integer, check_number
from explorl.strategies.base import Batch, Sampling, Strategy


def annealed_temperatures(*, highest: float, lowest: float, decay: float, warmup: int = 0) -> tuple[float, ...]:
    """τ_0, τ_1, … up to the first that is the lowest, which holds on."""
    end = math.ceil(decay * math.log1p(highest - lowest))
    falling = [max(1 + highest - math.exp(t / decay), lowest) for t in range(end)]
    curve = [*[1.0] * warmup, *falling[warmup:], lowest]
    return tuple(curve)


@dataclass(frozen=True)
class AnnealedTemperature(Strategy):
    """Begin an answer hot and end it cool."""

    name = "annealed_temperature"
    paper = "Yang et al. 2025, Let it calm: exploratory annealed decoding for verifiable RL (arXiv:2510.05251)"
    acts_on_parts = True

    highest: Scheduled = 1.2  # τ_max, of the first token
    lowest: Scheduled = 0.1  # τ_min
    decay: Scheduled = 400.0  # d, in tokens: about as long as answers are
    warmup: int = 0  # c, first tokens that stay at temperature 1
    training_temperature: Literal["position", "one"] = "position"  # of the training log-probabilities

    def __post_init__(self) -> None:
        check_number(self, "highest", at_least=1e-6, at_most=100)
        check_number(self, "lowest", at_least=1e-6, at_most=100)
        check_below(self, "lowest", "highest")
        check_number(self, "decay", above=0, at_most=1e6)
        check_integer(self, "warmup", at_least=0)
        check_choice(self, "training_temperature", "position", "one")

    def curve(self, step: int) -> tuple[float, ...]:
        """Temperatures by position."""
        highest, lowest, decay = (at(value, step) for value in (self.highest, self.lowest, self.decay))
        return annealed_temperatures(highest=highest, lowest=lowest, decay=decay, warmup=self.warmup)

    def sampling(self, prompts: Sequence[str], step: int) -> Sampling:
        said: dict[str, Sequence[float] | Sequence[Sequence[float]]] = {
            "temperature_by_position": [self.curve(step)] * len(prompts)
        }
        if self.training_temperature == "one":
            said["training_temperature"] = [1.0] * len(prompts)
        return said

    def metrics(self, batch: Batch) -> Mapping[str, float]:
        """The mean temperature over the tokens of an answer, averaged over answers; and τ_t at the longest's end."""
        lengths = batch.collectives.gather_rows((batch.mask > 0).sum(1))
        longest = int(lengths.max()) if len(lengths) else 0
        curve = self.curve(batch.step)
        return {
            "temperature_mean": float(batch.collectives.gather_rows(batch.temperature).mean()),
            "temperature_end": curve[min(max(longest - 1, 0), len(curve) - 1)],
        }
