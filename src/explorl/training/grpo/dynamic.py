"""Dynamic sampling: replace a group whose rewards are all equal by the group of a fresh prompt.

    0 < |{o_i correct}| < G        DAPO, Yu et al. 2025 (arXiv:2503.14476), Eq. 11 and Algorithm 1

All rewards of such a group equal their mean, so its advantages are 0 and its rollouts contribute no gradient. DAPO
samples whole batches until enough groups remain. Here a further round samples only as many groups as are missing, for
at most `max_rounds` rounds; groups that are still missing then stay in the batch without variance, as in plain GRPO.

The sources disagree: the paper and the authors' configuration (``filter_groups.metric: acc``) look at which completions
are correct; TRL users mean the total reward, of which correctness is often only a part. ``by`` selects one of the two.
The authors' code stops with an error when its bound is reached; this one continues.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, NamedTuple, TypeVar, get_args

from jaxtyping import Bool, Float
from torch import Tensor

Option = TypeVar("Option")
By = Literal["reward", "correct"]
SLACK = 1e-6
"""Rewards that differ by less, relative to their size, are equal: 0.1 + 0.2 is not 0.3."""


@dataclass(frozen=True)
class DynamicSampling:
    """Replace groups whose rewards are all equal."""

    max_rounds: int = 3
    """Maximum number of further rounds of sampling for one batch."""
    by: By = "reward"
    """What has to differ within a group: the total reward, or which completions are correct, as in the paper."""
    overdraw: bool = False
    """Sample so many groups in a further round that the expected number with variance is the number missing, at most a
    whole batch: fewer rounds, more rollouts."""

    def __post_init__(self) -> None:
        if isinstance(self.max_rounds, bool) or not isinstance(self.max_rounds, int) or self.max_rounds < 1:
            raise ValueError(
                f"dynamic_sampling: max_rounds is {self.max_rounds!r}; use the maximum number of further rounds of "
                "sampling per batch, 1 or more, such as 3"
            )
        if self.by not in get_args(By):
            raise ValueError(f"dynamic_sampling: by is {self.by!r}; use 'reward' or 'correct'")
        if not isinstance(self.overdraw, bool):
            raise ValueError(f"dynamic_sampling: overdraw is {self.overdraw!r}; use True or False")

    def groups(self, missing: int, *, batch: int, drawn: int, varied: int) -> int:
        """Return how many groups to sample in the next round, when ``varied`` of the ``drawn`` groups had variance.

        With overdraw that is missing/q, the mean number of draws until that many groups have variance, with
        q = (varied + 1)/(drawn + 2), Laplace's estimate of how often a group has variance.
        """
        if not self.overdraw:
            return missing
        return min(batch, math.ceil(missing * (drawn + 2) / (varied + 1)))


def as_option(kind: type[Option], value: Any, name: str) -> Option | None:
    """Build an option of the trainer: None and False mean off, True means defaults, a mapping sets some fields."""
    if value is None or value is False:
        return None
    if value is True:
        return kind()
    if isinstance(value, kind):
        return value
    if not isinstance(value, Mapping):
        raise ValueError(f"{name} is {value!r}; use True, False, {kind.__name__}(...) or a mapping of its settings")
    settings = [field.name for field in fields(kind)]  # type: ignore[arg-type]
    unknown = [key for key in value if key not in settings]
    if unknown:
        raise ValueError(f"{name} has no setting {unknown[0]!r}; it has {', '.join(settings)}")
    return kind(**value)


def varies(values: Float[Tensor, "rows values"], generations: int) -> Bool[Tensor, " groups"]:
    """Tell for each group of rows whether a value differs within it; NaN, a row without a score, is ignored."""
    grouped = values.reshape(-1, generations, values.size(1))
    unscored = grouped.isnan()
    highest = grouped.masked_fill(unscored, -math.inf).amax(1)
    lowest = grouped.masked_fill(unscored, math.inf).amin(1)
    return (highest - lowest > SLACK * highest.abs().clamp(min=1.0)).any(1)


class SamplingCost(NamedTuple):
    """Expected cost of dynamic sampling for one batch."""

    groups: float
    """Groups sampled, including the first round."""
    rounds: float
    """Rounds after the first one."""
    without_variance: float
    """Groups left without variance when the bound is reached."""


def keep_rate(solve_rate: float, generations: int) -> float:
    """Return q = 1 − pᴳ − (1 − p)ᴳ: how often a group of G correct or wrong completions has variance."""
    return 1.0 - solve_rate**generations - (1.0 - solve_rate) ** generations


def expected_cost(groups: int, rate: float, max_rounds: int) -> SamplingCost:
    """Return the expected cost if each group has variance with probability q, without overdraw.

    Each slot of the batch is filled independently after a geometric number of draws, cut off at R + 1:

        groups = P·(1 − (1 − q)^(R+1))/q      rounds = Σ_{r=1..R} 1 − (1 − (1 − q)^r)^P      left = P·(1 − q)^(R+1)

    Without a bound the number of groups is negative binomial, with mean P/q.
    """
    if not 0 < rate <= 1:
        raise ValueError(f"rate is {rate}; use the share of groups that have variance, above 0 and at most 1")
    fail = 1.0 - rate
    rounds = sum(1.0 - (1.0 - fail**number) ** groups for number in range(1, max_rounds + 1))
    left = groups * fail ** (max_rounds + 1)
    return SamplingCost((groups - left) / rate, rounds, left)
