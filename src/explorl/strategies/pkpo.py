"""Pass@k policy optimization: an answer earns what it adds to the best of k − 1 others.

    A_i = k · mean over sets S of k − 1 other answers of max(r_i − max_{j∈S} r_j, 0)

For right and wrong, with c right answers of n, and ρ(n, c, k) = 1 − C(n − c, k)/C(n, k):

    s_i = k/n if right, else (k/n)·ρ(n − 1, c, k − 1);   A_i = n·(s_i − (k/n)·ρ(n − 1, c − r_i, k − 1))
    A⁺ = k·C(n − c, k − 1)/C(n − 1, k − 1),   A⁻ = 0

Walder & Karkhanis 2025 (PKPO), Eq. 33: the reward s_i with the leave-one-out baseline over sets of k − 1 that they
recommend, written as one mean. Summed over the answers it is an unbiased estimate of the gradient of pass@k, or, for
any reward, of the expected best of k.

What to expect: a right answer counts the more, the fewer others are right; where n − c < k − 1 every set has a right
one already and nothing is learnt. Wrong answers are never pushed down, they only lose what right ones gain. The
authors also anneal k: `{from: 8, to: 1, start: 300, steps: 1, shape: step}` trains pass@8 first and pass@1 after.

When not to: where nearly all prompts are solved now and then, a large k leaves no gradient. Where wrong answers should
lose probability of their own accord, take passk_training: the same objective, centred and divided by its deviation.

Deviations: the paper's estimator is a sum over the n answers, the loss here is a mean over them: hence A = n·s. For
k = 1, where the paper's baseline has no set to take the best of, it is the mean of the others, A = r_i − r̄_{j≠i}. The
paper's other baseline (Eq. 29, sets of k) is left out: it needs n > k and has more variance. What is right is as the
run defines it; `of: reward` takes the total reward. Answers that could not be scored (NaN) are left out of n and get
A = 0, and so does a group left with fewer than k, or with a single one. It replaces the base advantage, so it stands
first in a list and excludes others that do.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from explorl.strategies._lib.masked_stats import double, group_sum
from explorl.strategies._lib.order_statistics import group_max, sorted_groups
from explorl.strategies._lib.reward_values import reward_values
from explorl.strategies._lib.schedule import Schedule, at
from explorl.strategies._lib.validate import check_choice, check_integer, check_k
from explorl.strategies.base import Batch, Strategy, per_token
from explorl.strategies.passk_training import binomial_ratio


def pkpo_advantages(
    rewards: Float[Tensor, " batch"], group: Int[Tensor, " batch"], *, k: int
) -> Float[Tensor, " batch"]:
    """One advantage per sequence; 0 for an answer that could not be scored (NaN)."""
    values = double(rewards)
    smallest = int(group_sum(torch.ones_like(values), group).min())
    if not 1 <= k <= smallest:
        raise ValueError(f"k is {k}, but a prompt has {smallest} samples; k must be between 1 and {smallest}")
    scored = ~values.isnan()
    n = group_sum(double(scored), group)
    deficit = torch.where(scored, values - group_max(values, group, scored), 0.0)
    if k == 1:
        gain = deficit - (group_sum(deficit, group) - deficit) / (n - 1).clamp(min=1)
    else:
        gain = k * _mean_gain(deficit, group, n, scored, k - 1)
    return torch.where(scored, gain, 0.0).float()


def _mean_gain(
    values: Float[Tensor, " batch"], group: Int[Tensor, " batch"], n: Float[Tensor, " batch"], scored: Tensor, m: int
) -> Float[Tensor, " batch"]:
    """Mean over all sets of m others of how far a value lies above the set's largest, 0 where it does not.

    By rising value, the answer in place j (from 0 on) is the largest of C(j, m − 1) of the C(n − 1, m) sets, if all lie
    below the value in question. It is 0 where there is no such set.
    """
    order, place = sorted_groups(values, group, scored)
    ordered, others = values[order], n[order] - 1
    chance = binomial_ratio(double(place + 1), others, m) - binomial_ratio(double(place), others, m)
    gain = ordered * _sum_below(chance, place) - _sum_below(chance * ordered, place)
    return torch.empty_like(values).scatter_(0, order, gain)


def _sum_below(terms: Float[Tensor, " batch"], place: Int[Tensor, " batch"]) -> Float[Tensor, " batch"]:
    """For each row of sorted groups the sum over the places before its own; unlike `cumsum`, alike on every run."""
    total, reach = terms, 1
    while reach <= int(place.max()):
        total, reach = total + torch.where(place >= reach, total.roll(reach), 0.0), 2 * reach
    return total - terms


@dataclass(frozen=True)
class PKPO(Strategy):
    """An answer earns what it adds to the best of k − 1 others."""

    name = "pkpo"
    paper = "Walder & Karkhanis 2025, Pass@K policy optimization (arXiv:2505.15201)"
    replaces_advantage = True
    acts_on_parts = True

    k: int | Schedule  # at most half of the generations of a prompt is a good rule
    of: Literal["correct", "reward"] = "correct"  # or the total reward

    def __post_init__(self) -> None:
        check_integer(self, "k", at_least=1, scheduled=True, good=4)
        check_choice(self, "of", "correct", "reward")

    @property
    def needs_correct(self) -> bool:  # type: ignore[override]
        return self.of == "correct"

    def check(self, *, num_generations: int) -> None:
        check_k(self, self.k, num_generations)

    def advantages(self, batch: Batch) -> Float[Tensor, "batch time"]:
        k = round(at(self.k, batch.step))
        values = batch.collectives.map_rows(pkpo_advantages, reward_values(batch, self.of), batch.group, k=k)
        return (per_token(values, batch.mask) * batch.mask).to(batch.advantages.dtype)
