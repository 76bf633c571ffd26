"""Pass@k training: reward sets of k completions by their best one.

    ρ = 1 − C(N⁻, k)/C(n, k),   σ = √(ρ(1 − ρ))
    A⁺ = (1 − ρ)/(σ + 1e-6),    A⁻ = (1 − ρ − C(N⁻ − 1, k − 1)/C(n − 1, k − 1))/(σ + 1e-6)

Chen et al. 2025 (Pass@k training), reviewed in Deng et al. 2025, §4.3. A prompt has n completions, c of them correct
(as defined by the run: a named reward function and a threshold), and N⁻ = n − c; this is the closed form of the average
over all sets of k.

What to expect: prompts that are solved in most sets have no gradient, rare successes have a large one, and wrong
completions are hardly penalised if another one is correct; entropy and pass@k stay high for longer than with GRPO. With
k = 1 it is GRPO on the binary reward except for the standard deviation. The authors train with pass@k first and with
pass@1 afterwards, for which `k` can be a schedule (`{from: 4, to: 1, start: 300, steps: 1, shape: step}`).

When not to use it: with k close to the number of generations nearly every group counts as solved and nothing is
learned; n ≥ 2k is a good rule.

Deviations: completions are correct or wrong; partial and other rewards (for the format, for example) are ignored.
Completions that could not be scored (NaN) are excluded from n and get A = 0, and so does a group with fewer than k
left. (verl's `grpo_passk` is a different method: it rewards only the best completion of a group.) It replaces the base
advantage, so list it first and do not combine it with negative_reinforcement.
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
    """Return C(m, k)/C(n, k), computed as a product of k fractions to avoid overflowing factorials."""
    j = torch.arange(k, device=m.device)
    return ((m.unsqueeze(1) - j).clamp(min=0) / (n.unsqueeze(1) - j).clamp(min=1)).prod(1)


def passk_advantages(
    correct: Bool[Tensor, " batch"], scored: Bool[Tensor, " batch"], group: Int[Tensor, " batch"], *, k: int
) -> Float[Tensor, " batch"]:
    """Return one advantage per sequence; 0 for a completion that could not be scored."""
    counts = double(scored)
    smallest = int(group_sum(torch.ones_like(counts), group).min())
    if not 1 <= k <= smallest:
        raise ValueError(f"k is {k}, but a prompt has {smallest} completions; k must be between 1 and {smallest}")
    n = group_sum(counts, group)
    wrong = group_sum(double(scored & ~correct), group)
    missed = binomial_ratio(wrong, n, k)  # 1 − ρ
    sigma = (missed * (1 - missed)).sqrt() + 1e-6
    missed_by_others = binomial_ratio(wrong - 1, n - 1, k - 1)
    signed = torch.where(correct, missed, missed - missed_by_others) / sigma
    return torch.where(scored, signed, 0.0).float()


@dataclass(frozen=True)
class PassKTraining(Strategy):
    """Reward sets of k completions by their best one."""

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
