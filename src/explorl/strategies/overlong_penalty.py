"""Overlong penalty: reduce the reward of completions gradually as they approach the length limit.

    R ← R + factor · penalty(|y|)
    penalty(|y|) = 0                                        if |y| ≤ L_max − L_cache
                   ((L_max − L_cache) − |y|) / L_cache      if L_max − L_cache < |y| ≤ L_max
                   −1                                       if |y| > L_max

Yu et al. 2025 (DAPO), Eq. 13, "soft overlong punishment", there with L_max = 20480 and L_cache = 4096. It changes the
reward before normalisation, so a long completion lowers its own advantage and raises those of the others in its group.

What to expect: fewer truncated completions, because a gradient against length exists before they reach the limit. If
many completions reach it, training is more stable than with a reward of zero for each.

When not to use it: if long completions are the goal; the penalty does not depend on correctness. A penalty of 1 was
designed for rewards of 1 and −1: with 0 and 1, a correct completion at the limit gets as much as a wrong short one.

Deviations: `longest` is L_max, by default the trainer's max_completion_length, and `cache` is L_cache, by default a
fifth of L_max as in the paper. |y| counts the tokens that the policy generated, without the output of tools. `factor`
is verl's `overlong_buffer.penalty_factor`, 1 in the paper. The release (verl's DAPO reward manager) has no third case
because its completions cannot be longer than L_max.
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
    """Return a penalty from −1 to 0 for each length in tokens."""
    return ((longest - cache - double(lengths)) / cache).clamp(-1.0, 0.0).float()


@dataclass(frozen=True)
class OverlongPenalty(Strategy):
    """Reduce the reward of completions gradually as they approach the length limit."""

    name = "overlong_penalty"
    paper = "Yu et al. 2025, DAPO: an open-source LLM reinforcement learning system at scale (arXiv:2503.14476), Eq. 13"
    acts_on_parts = True

    cache: int | None = None  # tokens before the limit over which the penalty grows; None: a fifth of it
    longest: int | None = None  # the limit; None: the trainer's max_completion_length
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
                f"{self.name}: completions have no length limit (max_completion_length is None); set longest, for "
                "example 20480"
            )
        if self.longest is None and max_completion_length is not None:
            self._check_cache(max_completion_length, "max_completion_length")

    def _check_cache(self, longest: int, name: str) -> None:
        if self.cache is not None and self.cache > longest:
            raise_invalid(self, "cache", self.cache, f"at most {name}, which is {longest}", max(longest // 5, 1))

    def penalties(self, batch: Batch) -> Float[Tensor, " batch"]:
        """Return the penalty of each completion, before the factor."""
        longest = self.longest or batch.max_length
        if longest is None:
            raise ValueError(f"{self.name}: the length limit is unknown; set longest, for example 20480")
        cache = self.cache or max(longest // 5, 1)
        tokens = (batch.mask > 0).sum(1)
        masked = batch.truncated & (tokens == 0)  # by TRL's mask_truncated_completions
        tokens = torch.where(masked, batch.max_length or longest, tokens)
        return overlong_penalties(tokens.float(), longest=longest, cache=cache)

    def rewards(self, batch: Batch) -> Float[Tensor, " batch"]:
        penalties = at(self.factor, batch.step) * self.penalties(batch)
        return (double(batch.rewards) + penalties).to(batch.rewards.dtype)

    def metrics(self, batch: Batch) -> Mapping[str, float]:
        """Return the mean penalty and the fraction of completions with one."""
        penalties = batch.collectives.gather_rows(self.penalties(batch))
        return {"penalty": float(penalties.mean()), "penalised": float((penalties < 0).float().mean())}
