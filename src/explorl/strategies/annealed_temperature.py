"""Annealed temperature: start each completion at a high temperature and lower it with every token.

    τ_t = max(1 + τ_max − e^{t/d}, τ_min)   for the t-th token of a completion, t = 0, 1, …;   τ_t = 1 for t < c

Yang et al. 2025, Exploratory Annealed Decoding. The first tokens determine the approach of a completion, the later ones
carry it out. The first token is therefore sampled at τ_max, and the temperature falls, ever faster, to τ_min, which it
reaches at t = d · ln(1 + τ_max − τ_min). The training log-probabilities use each token's own temperature,
log softmax(logits_t / τ_t), so that the samples are on-policy. `training_temperature="one"` computes them at τ = 1 as
the authors do, who correct for the difference by truncated importance sampling; add importance_correction for that.

What to expect: completions that differ in their approach rather than in details. The authors report more correct
completions from the same number of samples, and entropy that stays high for longer.

When not to use it: if `decay` does not fit the length of the completions. If it is far too large, every token is
sampled at a high temperature. If it is far too small, all but the first tokens are nearly greedy, and the completions
of a group are the same. The default τ_min is reached after 0.74 · d tokens, so set `decay` to about the typical number
of tokens. With τ_max much above 1.2 the completions of small models become incoherent.

Deviations: the authors increase d as completions become longer, d_s = min(d_0 + 5·s, 40000) at step s; a schedule for
`decay` does the same (`{from: 400, to: 40000, steps: 7920}`). Their default for d_0 assumes completions of thousands of
tokens; ours of 400 assumes shorter ones. `warmup` is c, the number of first tokens that are sampled at temperature 1
because they belong to the template; the schedule then continues at t = c. This strategy overrides every other
temperature of the run, including that of element_wise_temperature if listed after it.
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
    """Return τ_0, τ_1, … up to the first value equal to the lowest, which applies to all later tokens."""
    end = math.ceil(decay * math.log1p(highest - lowest))
    falling = [max(1 + highest - math.exp(t / decay), lowest) for t in range(end)]
    curve = [*[1.0] * warmup, *falling[warmup:], lowest]
    return tuple(curve)


@dataclass(frozen=True)
class AnnealedTemperature(Strategy):
    """Start each completion at a high temperature and lower it with every token."""

    name = "annealed_temperature"
    paper = "Yang et al. 2025, Let it calm: exploratory annealed decoding for verifiable RL (arXiv:2510.05251)"
    acts_on_parts = True

    highest: Scheduled = 1.2  # τ_max, for the first token
    lowest: Scheduled = 0.1  # τ_min
    decay: Scheduled = 400.0  # d, in tokens: about the length of a completion
    warmup: int = 0  # c, number of first tokens sampled at temperature 1
    training_temperature: Literal["position", "one"] = "position"  # of the training log-probabilities

    def __post_init__(self) -> None:
        check_number(self, "highest", at_least=1e-6, at_most=100)
        check_number(self, "lowest", at_least=1e-6, at_most=100)
        check_below(self, "lowest", "highest")
        check_number(self, "decay", above=0, at_most=1e6)
        check_integer(self, "warmup", at_least=0)
        check_choice(self, "training_temperature", "position", "one")

    def curve(self, step: int) -> tuple[float, ...]:
        """Return the temperatures by position."""
        highest, lowest, decay = (at(value, step) for value in (self.highest, self.lowest, self.decay))
        return annealed_temperatures(highest=highest, lowest=lowest, decay=decay, warmup=self.warmup)

    def sampling(self, prompts: Sequence[str], step: int) -> Sampling:
        settings: dict[str, Sequence[float] | Sequence[Sequence[float]]] = {
            "temperature_by_position": [self.curve(step)] * len(prompts)
        }
        if self.training_temperature == "one":
            settings["training_temperature"] = [1.0] * len(prompts)
        return settings

    def metrics(self, batch: Batch) -> Mapping[str, float]:
        """Return the mean temperature of the completions, and τ_t at the end of the longest one."""
        lengths = batch.collectives.gather_rows((batch.mask > 0).sum(1))
        longest = int(lengths.max()) if len(lengths) else 0
        curve = self.curve(batch.step)
        return {
            "temperature_mean": float(batch.collectives.gather_rows(batch.temperature).mean()),
            "temperature_end": curve[min(max(longest - 1, 0), len(curve) - 1)],
        }
