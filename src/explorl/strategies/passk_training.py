"""Pass@k training: the reward of a set of k answers is its best one.

    ρ = 1 − C(N⁻, k)/C(n, k),   σ = √(ρ(1 − ρ))
    A⁺ = (1 − ρ)/(σ + 1e-6),    A⁻ = (1 − ρ − C(N⁻ − 1, k − 1)/C(n − 1, k − 1))/(σ + 1e-6)

Chen et al. 2025 (Pass@k training), reviewed in Deng et al. 2025, §4.3. n answers to a prompt, c of them correct
(as the run defines it: a named reward function and a threshold), N⁻ = n − c; the closed form of averaging over all sets
of k.

What to expect: prompts that are solved in most sets give no gradient, rare successes a large one, and wrong answers
are hardly punished beside a right one; entropy and pass@k hold longer than with GRPO. With k = 1 it is GRPO on the
binary reward, but for the deviation. The authors train with pass@k first and pass@1 after: a schedule for `k` does it
(`{from: 4, to: 1, start: 300, steps: 1, shape: step}`).

When not to: with k close to the number of generations nearly every group counts as solved and nothing is learnt;
n ≥ 2k is a good rule.

Deviations: answers count as correct or not, partial and other rewards (for the format, say) are ignored. Answers that
could not be scored (NaN) are left out of n and get A = 0, and so does a group left with fewer than k. (verl's
`grpo_passk` is another method: it rewards only the best answer of a group.) It replaces the base advantage, so it
stands first in a list and excludes negative_reinforcement.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from explorl.strategies._lib.masked_stats import double, group_sum
from explorl.strategies._lib.schedule import Schedule, at
from explorl.strategies._lib.validate import check_integer, check_k
from explorl.strategies.base import Batch, Strategy, per_token


def binomial_ratio(m: Float[Tensor, " batch"], n: Float[Tensor, " batch"], k: int) -> Float[Tensor, " batch"]:
    """C(m, k)/C(n, k) as a product of k fractions: no factorial, so nothing overflows."""
    j = torch.arange(k, device=m.device)
    return ((m.unsqueeze(1) - j).clamp(min=0) / (n.unsqueeze(1) - j).clamp(min=1)).prod(1)


def passk_advantages(
    correct: Bool[Tensor, " batch"], scored: Bool[Tensor, " batch"], group: Int[Tensor, " batch"], *, k: int
) -> Float[Tensor, " batch"]:
    """One advantage per sequence; 0 for an answer that could not be scored."""
    counts = double(scored)
    smallest = int(group_sum(torch.ones_like(counts), group).min())
    if not 1 <= k <= smallest:
        raise ValueError(f"k is {k}, but a prompt has {smallest} samples; k must be between 1 and {smallest}")
    n = group_sum(counts, group)
    wrong = group_sum(double(scored & ~correct), group)
    missed = binomial_ratio(wrong, n, k)  # 1 − ρ
    sigma = (missed * (1 - missed)).sqrt() + 1e-6
    without = binomial_ratio(wrong - 1, n - 1, k - 1)
    signed = torch.where(correct, missed, missed - without) / sigma
    return torch.where(scored, signed, 0.0).float()


@dataclass(frozen=True)
class PassKTraining(Strategy):
    """The reward of a set of k answers is its best one."""

    name = "passk_training"
    paper = "Chen et al. 2025, Pass@k training (arXiv:2508.10751)"
    replaces_advantage = True
    needs_correct = True
    acts_on_parts = True

    k: int | Schedule  # at most half of the generations of a prompt is a good rule

    def __post_init__(self) -> None:
        check_integer(self, "k", at_least=1, scheduled=True, good=4)

    def check(self, *, num_generations: int) -> None:
        check_k(self, self.k, num_generations)

    def advantages(self, batch: Batch) -> Float[Tensor, "batch time"]:
        scored = ~batch.correctness.isnan()
        k = round(at(self.k, batch.step))
        values = batch.collectives.map_rows(passk_advantages, batch.correct, scored, batch.group, k=k)
        return (per_token(values, batch.mask) * batch.mask).to(batch.advantages.dtype)
