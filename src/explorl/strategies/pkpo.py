"""Pass@k policy optimization: reward each completion by what it adds to the best of k − 1 others.

    A_i = k · mean over sets S of k − 1 other completions of max(r_i − max_{j∈S} r_j, 0)

For binary rewards, with c correct completions of n, and ρ(n, c, k) = 1 − C(n − c, k)/C(n, k):

    s_i = k/n if correct, else (k/n)·ρ(n − 1, c, k − 1);   A_i = n·(s_i − (k/n)·ρ(n − 1, c − r_i, k − 1))
    A⁺ = k·C(n − c, k − 1)/C(n − 1, k − 1),   A⁻ = 0

Walder & Karkhanis 2025 (PKPO), Eq. 33: the reward s_i with the leave-one-out baseline over sets of k − 1 that they
recommend, written as one mean. Summed over the completions it is an unbiased estimate of the gradient of pass@k or, for
any reward, of the expected maximum of k.

What to expect: the fewer completions are correct, the more each correct one counts; if n − c < k − 1, every set
contains a correct one already and nothing is learned. Wrong completions are never penalised directly; they only lose
the probability that correct ones gain. The authors also anneal k: `{from: 8, to: 1, start: 300, steps: 1, shape: step}`
trains pass@8 first and pass@1 afterwards.

When not to use it: if nearly all prompts are solved now and then, a large k leaves no gradient. To penalise wrong
completions directly, use passk_training: the same objective, centred and divided by its standard deviation.

Deviations: the paper's estimator is a sum over the n completions and the loss here is a mean over them, hence A = n·s.
For k = 1, where the paper's baseline has no set to maximise over, the baseline is the mean of the others:
A = r_i − r̄_{j≠i}. The paper's other baseline (Eq. 29, sets of k) is omitted: it needs n > k and has a higher variance.
Correctness is as defined by the run; `of: reward` uses the total reward. Completions that could not be scored (NaN) are
excluded from n and get A = 0, and so does a group with fewer than k left, or with only one. It replaces the base
advantage, so list it first and combine it with no other strategy that does.
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
    """Return one advantage per sequence; 0 for a completion that could not be scored (NaN)."""
    values = double(rewards)
    smallest = int(group_sum(torch.ones_like(values), group).min())
    if not 1 <= k <= smallest:
        raise ValueError(f"k is {k}, but a prompt has {smallest} completions; k must be between 1 and {smallest}")
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
    """Return the mean over all sets of m others of max(value − maximum of the set, 0); 0 if there is no such set.

    Sorted by value, the element at position j (from 0) is the maximum of C(j, m − 1) of the C(n − 1, m) sets that
    consist of smaller values.
    """
    order, position = sorted_groups(values, group, scored)
    ordered, others = values[order], n[order] - 1
    chance = binomial_ratio(double(position + 1), others, m) - binomial_ratio(double(position), others, m)
    gain = ordered * _sum_below(chance, position) - _sum_below(chance * ordered, position)
    return torch.empty_like(values).scatter_(0, order, gain)


def _sum_below(terms: Float[Tensor, " batch"], position: Int[Tensor, " batch"]) -> Float[Tensor, " batch"]:
    """Return for each row of sorted groups the sum over earlier positions; unlike `cumsum`, deterministic."""
    total, reach = terms, 1
    while reach <= int(position.max()):
        total, reach = total + torch.where(position >= reach, total.roll(reach), 0.0), 2 * reach
    return total - terms


@dataclass(frozen=True)
class PKPO(Strategy):
    """Reward each completion by what it adds to the best of k − 1 others."""

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
