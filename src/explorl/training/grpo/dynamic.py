"""Dynamic sampling: a group whose rewards are all equal is exchanged for the group of a fresh prompt.

    0 < |{o_i right}| < G        DAPO, Yu et al. 2025 (arXiv:2503.14476), Eq. 11 and Algorithm 1

All rewards of such a group equal their mean, so its advantages are 0 and its rollouts teach nothing. DAPO samples whole
batches until enough groups are left over. Here a further round draws only as many groups as are missing, for at most
`max_rounds` rounds; what is still missing then stays in the batch without variance, as in plain GRPO.

Where the sources disagree: the paper asks which answers are right, and so does the authors' configuration
(``filter_groups.metric: acc``); TRL users mean the total reward, of which correctness is often only a part. ``by`` says
which of the two is looked at. The authors' code stops with an error when its bound is reached; this one goes on.
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
    """Exchange groups whose rewards are all equal."""

    max_rounds: int = 3
    """Further rounds of sampling for one batch, at most."""
    by: By = "reward"
    """What has to differ within a group: the total reward, or which answers are correct, as in the paper."""
    overdraw: bool = False
    """A further round draws so many groups that about as many as are missing will have variance, and no more than a
    batch has: fewer rounds, more rollouts."""

    def __post_init__(self) -> None:
        if isinstance(self.max_rounds, bool) or not isinstance(self.max_rounds, int) or self.max_rounds < 1:
            raise ValueError(
                f"dynamic_sampling: max_rounds is {self.max_rounds!r}; use the number of further rounds that a batch "
                "may take, 1 or more, such as 3"
            )
        if self.by not in get_args(By):
            raise ValueError(f"dynamic_sampling: by is {self.by!r}; use 'reward' or 'correct'")
        if not isinstance(self.overdraw, bool):
            raise ValueError(f"dynamic_sampling: overdraw is {self.overdraw!r}; use True or False")

    def groups(self, missing: int, *, batch: int, drawn: int, varied: int) -> int:
        """How many groups the next round draws, after so many were drawn and so many of them had variance.

        With overdraw that is missing/q, the mean number of draws until so many groups have variance, with
        q = (varied + 1)/(drawn + 2), Laplace's estimate of how often one has.
        """
        if not self.overdraw:
            return missing
        return min(batch, math.ceil(missing * (drawn + 2) / (varied + 1)))


def as_option(kind: type[Option], value: Any, name: str) -> Option | None:
    """An option of the trainer: None and False are none, True is the defaults, a mapping sets some of them."""
    if value is None or value is False:
        return None
    if value is True:
        return kind()
    if isinstance(value, kind):
        return value
    if not isinstance(value, Mapping):
        raise ValueError(f"{name} is {value!r}; use True, False, {kind.__name__}(...) or a mapping of its settings")
    known = [one.name for one in fields(kind)]  # type: ignore[arg-type]
    wrong = [key for key in value if key not in known]
    if wrong:
        raise ValueError(f"{name} has no setting {wrong[0]!r}; it has {', '.join(known)}")
    return kind(**value)


def varies(values: Float[Tensor, "rows what"], generations: int) -> Bool[Tensor, " groups"]:
    """Whether any of the values differs within a group of rows. NaN, a row that was not scored, is left out of it."""
    grouped = values.reshape(-1, generations, values.size(1))
    unknown = grouped.isnan()
    highest = grouped.masked_fill(unknown, -math.inf).amax(1)
    lowest = grouped.masked_fill(unknown, math.inf).amin(1)
    return (highest - lowest > SLACK * highest.abs().clamp(min=1.0)).any(1)


class Cost(NamedTuple):
    """What dynamic sampling takes for one batch, on average."""

    groups: float
    """Drawn, the first round's included."""
    rounds: float
    """After the first one."""
    without_variance: float
    """Groups of the batch that have none when the bound is reached."""


def keep_rate(solve_rate: float, generations: int) -> float:
    """q = 1 − pᴳ − (1 − p)ᴳ: how often a group of G right or wrong answers has variance."""
    return 1.0 - solve_rate**generations - (1.0 - solve_rate) ** generations


def expected_cost(groups: int, rate: float, max_rounds: int) -> Cost:
    """Cost where each group has variance with probability q, and a round draws as many groups as are missing.

    Each place of the batch is filled after a geometric number of draws, cut off at R + 1, for itself:

        groups = P·(1 − (1 − q)^(R+1))/q      rounds = Σ_{r=1..R} 1 − (1 − (1 − q)^r)^P      left = P·(1 − q)^(R+1)

    Without a bound the number of groups is negative binomial, with mean P/q.
    """
    if not 0 < rate <= 1:
        raise ValueError(f"rate is {rate}; use the share of groups that have variance, above 0 and at most 1")
    fail = 1.0 - rate
    rounds = sum(1.0 - (1.0 - fail**one) ** groups for one in range(1, max_rounds + 1))
    left = groups * fail ** (max_rounds + 1)
    return Cost((groups - left) / rate, rounds, left)
