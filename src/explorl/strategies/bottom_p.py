"""Bottom-p: sample without the most likely tokens.

    sort by falling probability; remove token j if Σ_{i ≤ j} π_i ≤ 1 − p; the least likely token is never removed

Mecklenburg, §5.2. It is applied to the distribution that remains after temperature, top-k, top-p and min-p,
renormalised; top-p 0.9 with bottom-p 0.9 thus samples from the middle. With a `frequency` f below 1 each row decides at
random whether to apply it: for every token, or once for the whole sequence (`per="sequence"`).

What to expect: a token with a probability above 1 − p is never removed, so confident steps are unaffected and only flat
distributions lose their top. Where the policy is unsure, rollouts leave the paths that fine-tuning has reinforced. The
author used p = 0.9 and 0.5 at temperatures 1.0 and 5.0: p = 0.9 at 1.0 trained, but did not beat plain temperature on
held-out puzzles; p = 0.5, or temperature 5.0, resulted in no reward at all.

When not to use it: with a small p or a high temperature, where hardly any likely token remains. A lower `frequency`
reduces both effects.

Deviations: none. The paper treats these samples as on-policy; add importance_correction to weight them by the
distribution they were sampled from.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from explorl.strategies._lib.schedule import Scheduled, at
from explorl.strategies._lib.validate import check_choice, check_number
from explorl.strategies.base import Batch, Sampling, Strategy


@dataclass(frozen=True)
class BottomP(Strategy):
    """Sample without the most likely tokens."""

    name = "bottom_p"
    paper = "Mecklenburg 2025, Exploration strategies for reasoning fine-tuning of small language models, §5.2"
    acts_on_parts = True
    moved: ClassVar[Mapping[str, str]] = {
        "importance": "add the strategy importance_correction",
        "cap": "it is now the cap of the strategy importance_correction",
    }

    p: Scheduled = 0.9
    frequency: Scheduled = 1.0
    per: Literal["token", "sequence"] = "token"

    def __post_init__(self) -> None:
        check_number(self, "p", above=0, at_most=1)
        check_number(self, "frequency", at_least=0, at_most=1)
        check_choice(self, "per", "token", "sequence")

    def sampling(self, prompts: Sequence[str], step: int) -> Sampling:
        rows = len(prompts)
        return {
            "bottom_p": [at(self.p, step)] * rows,
            "bottom_p_frequency": [at(self.frequency, step)] * rows,
            "bottom_p_per_sequence": [float(self.per == "sequence")] * rows,
        }

    def metrics(self, batch: Batch) -> Mapping[str, float]:
        return {"p": at(self.p, batch.step), "frequency": at(self.frequency, batch.step)}
