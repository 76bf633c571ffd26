"""Overlong penalty: answers that come close to the length limit lose reward, softly.

    R ← R + factor · penalty(|y|)
    penalty(|y|) = 0                                        where |y| ≤ L_max − L_cache
                   ((L_max − L_cache) − |y|) / L_cache      where L_max − L_cache < |y| ≤ L_max
                   −1                                       where |y| > L_max

Yu et al. 2025 (DAPO), Eq. 13, "soft overlong punishment", there with L_max = 20480 and L_cache = 4096. It acts on the
reward, before it is normalised, so a long answer lowers its own advantage and lifts that of the others in its group.

What to expect: fewer answers that are cut off, and a gradient that says so before they are; where many answers reach
the limit, training is calmer than with a hard zero for each.

When not to: where long answers are what is to be learnt; the penalty does not look at whether an answer is right. A
penalty of 1 was made for rewards of 1 and −1: with 0 and 1, a right answer at the limit is worth as much as a wrong
short one.

Deviations: `longest` is L_max, the trainer's max_completion_length unless given, and `cache` is L_cache, a fifth of
L_max unless given, as in the paper. |y| counts the tokens that the policy wrote, not what a tool put in. `factor` is
verl's `overlong_buffer.penalty_factor`, 1 in the paper. The release (verl's DAPO reward manager) has no third case,
because its answers cannot be longer than L_max.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from explorl.strategies._lib.masked_stats import double
from explorl.strategies._lib.schedule import Scheduled, at
from explorl.strategies._lib.validate import check_integer, check_number, raise_invalid
from explorl.strategies.base import Batch, Strategy


def overlong_penalties(lengths: Float[Tensor, " batch"], *, longest: int, cache: int) -> Float[Tensor, " batch"]:
    """One number from −1 to 0 per answer of so many tokens."""
    return ((longest - cache - double(lengths)) / cache).clamp(-1.0, 0.0).float()


@dataclass(frozen=True)
class OverlongPenalty(Strategy):
    """Answers that come close to the length limit lose reward, softly."""

    name = "overlong_penalty"
    paper = "Yu et al. 2025, DAPO: an open-source LLM reinforcement learning system at scale (arXiv:2503.14476), Eq. 13"
    acts_on_parts = True

    cache: int | None = None  # the last tokens before the limit, over which the penalty grows; None is a fifth of it
    longest: int | None = None  # the limit; None is the trainer's max_completion_length
    factor: Scheduled = 1.0

    def __post_init__(self) -> None:
        check_integer(self, "cache", at_least=1, optional=True, good=4096)
        check_integer(self, "longest", at_least=1, optional=True, good=20480)
        check_number(self, "factor", at_least=0)
        if self.longest is not None:
            self._check_cache(self.longest, "longest")

    def check_length(self, *, max_completion_length: int | None) -> None:
        if self.longest is None and max_completion_length is None:
            raise ValueError(
                f"{self.name}: answers have no length limit (max_completion_length is None); give longest, for example "
                "20480"
            )
        if self.longest is None and max_completion_length is not None:
            self._check_cache(max_completion_length, "max_completion_length")

    def _check_cache(self, longest: int, name: str) -> None:
        if self.cache is not None and self.cache > longest:
            raise_invalid(self, "cache", self.cache, f"at most {name}, which is {longest}", max(longest // 5, 1))

    def penalties(self, batch: Batch) -> Float[Tensor, " batch"]:
        """What each answer loses, before the factor."""
        longest = self.longest or batch.max_length
        if longest is None:
            raise ValueError(f"{self.name}: nobody says how long answers may be; give longest, for example 20480")
        cache = self.cache or max(longest // 5, 1)
        tokens = (batch.mask > 0).sum(1)
        masked = batch.truncated & (tokens == 0)  # TRL's mask_truncated_completions hides all of a cut-off answer
        tokens = torch.where(masked, batch.max_length or longest, tokens)
        return overlong_penalties(tokens.float(), longest=longest, cache=cache)

    def rewards(self, batch: Batch) -> Float[Tensor, " batch"]:
        penalties = at(self.factor, batch.step) * self.penalties(batch)
        return (double(batch.rewards) + penalties).to(batch.rewards.dtype)

    def metrics(self, batch: Batch) -> Mapping[str, float]:
        """The mean penalty, and the share of the answers that have one."""
        penalties = batch.collectives.gather_rows(self.penalties(batch))
        return {"penalty": float(penalties.mean()), "penalised": float((penalties < 0).float().mean())}
