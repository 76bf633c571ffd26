"""Risk-sensitive advantages: optimise a soft maximum of the rewards of a prompt instead of their mean.

    A = (e^{βr} / mean_group(e^{βr}) − 1) / β

Jiang et al. 2025 (RS-GRPO): the gradient of (1/β)·ln E[e^{βr}], which is the mean reward for β → 0 and the maximum for
β → ∞. There is no division by a standard deviation: e^{βr} is divided by its own mean.

What to expect: similar to GRPO if about half of the completions are correct; for a prompt that is rarely solved,
correct completions have more weight and wrong ones less. With rewards 0 and 1 and a solve rate of p, A⁺ − A⁻ is the
slope ((e^β − 1)/β)/(1 + p(e^β − 1)): for β = 2 it falls from 3.2 at p = 0 to 0.43 at p = 1. The authors report a better
pass@k at no loss of pass@1, and recommend β = 2.

When not to use it: with noisy rewards, since it favours those that are high by chance. With a large β·(range of r) only
the best completions of a prompt are reinforced, and all others get the same small value of −1/β.

Deviations: none from the paper's estimator. r is the total reward, as in the authors' code; `of: correct` uses only
correctness. β = 0 is the limit, A = r − r̄. Negative β, which would be risk-averse, is rejected. Completions that could
not be scored (NaN) are excluded from the mean and get A = 0, and so does a prompt's only completion. It replaces the
base advantage, so list it first and combine it with no other strategy that does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from explorl.strategies._lib.masked_stats import double, group_moments
from explorl.strategies._lib.order_statistics import group_max
from explorl.strategies._lib.reward_values import reward_values
from explorl.strategies._lib.schedule import Scheduled, at
from explorl.strategies._lib.validate import check_choice, check_number
from explorl.strategies.base import Batch, Strategy, per_token


def risk_sensitive_advantages(
    rewards: Float[Tensor, " batch"], group: Int[Tensor, " batch"], *, beta: float
) -> Float[Tensor, " batch"]:
    """Return one advantage per sequence; 0 for a completion that could not be scored (NaN)."""
    values = double(rewards)
    scored = ~values.isnan()
    deficit = torch.where(scored, values - group_max(values, group, scored), 0.0)
    if beta == 0:
        mean, _ = group_moments(deficit, group, scored, correction=0)
        return torch.where(scored, deficit - mean, 0.0).float()
    mean, _ = group_moments(torch.expm1(beta * deficit), group, scored, correction=0)
    risky = torch.expm1(beta * deficit - torch.log1p(mean)) / beta  # accurate for small β, too
    return torch.where(scored, risky, 0.0).float()


@dataclass(frozen=True)
class RiskSensitive(Strategy):
    """Optimise a soft maximum of the rewards of a prompt instead of their mean."""

    name = "risk_sensitive"
    paper = "Jiang et al. 2025, Risk-sensitive RL for alleviating exploration dilemmas (arXiv:2509.24261)"
    replaces_advantage = True
    acts_on_parts = True

    beta: Scheduled = 2.0  # the authors' recommendation
    of: Literal["reward", "correct"] = "reward"  # or only correctness

    def __post_init__(self) -> None:
        check_number(self, "beta", at_least=0)
        check_choice(self, "of", "reward", "correct")

    @property
    def needs_correct(self) -> bool:  # type: ignore[override]
        return self.of == "correct"

    def advantages(self, batch: Batch) -> Float[Tensor, "batch time"]:
        rewards = reward_values(batch, self.of)
        beta = at(self.beta, batch.step)
        values = batch.collectives.map_rows(risk_sensitive_advantages, rewards, batch.group, beta=beta)
        return (per_token(values, batch.mask) * batch.mask).to(batch.advantages.dtype)
