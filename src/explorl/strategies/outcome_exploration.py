"""Outcome-based exploration: add a bonus for final answers that were rarely given to a prompt.

    historical   A_i ← A_i + coef · (b_i − baseline),   b_i = min(1, N(x, a_i)^(−1/2))
    batch        A_i ← A_i − coef · (1/n) · #{j ≠ i : a_j = a_i}

Song, Kempe and Munos 2025. N(x, a) is how often answer a was given to prompt x in earlier batches, so a new answer has
b = 1. `baseline="none"` is their UCB, "mean" UCB-Mean (the mean of b over the group) and "constant" UCB-Con (b_0, here
`constant`: answers given more than b_0^(−2) times are penalised). `kind="batch"` uses only the n answers of the group.

What to expect: on prompts that are not solved yet, the policy keeps trying new answers instead of repeating a wrong
one. The authors found that UCB alone helps training more than test performance, that UCB-Con helps both, and that the
batch variant keeps answers most diverse at the end of training.

When not to use it: if the space of answers is unlimited (programs, proofs): nearly all answers are then new, and the
bonus does not distinguish between them. The bonus for wrong answers never ends either: with a large `coef` the policy
is rewarded for new wrong answers. A completion without an answer (None) gets no bonus and counts in no statistic.

Deviations: the mean baseline is over all n answers of the group; excluding the answer itself would multiply b_i − mean
by n/(n − 1). The defaults of `coef` and `constant` are ours. The task, or the trainer's `answers` function, defines
which answers are equal. Completions that could not be scored (NaN) get no bonus. For each prompt the counts of at most
1000 different answers are kept; beyond that the rarest are dropped, and among these the oldest.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from explorl.strategies._lib.masked_stats import double, group_moments, group_sum, masked_double
from explorl.strategies._lib.schedule import Scheduled, at
from explorl.strategies._lib.solve_rates import text_key
from explorl.strategies._lib.validate import check_choice, check_number
from explorl.strategies.base import Batch, Strategy

MAX_ANSWERS = 1000
"""Maximum number of different answers per prompt whose counts are kept."""


def ucb_bonuses(
    counts: Float[Tensor, " batch"],
    outcome: Int[Tensor, " batch"],
    group: Int[Tensor, " batch"],
    *,
    baseline: Literal["none", "mean", "constant"],
    constant: float,
) -> Float[Tensor, " batch"]:
    """Return min(1, N^(−1/2)) − baseline for an answer given N times before; 0 if there is no answer (outcome −1)."""
    answered = outcome >= 0
    bonus = double(counts).clamp(min=1.0).rsqrt()
    if baseline == "mean":
        mean, _ = group_moments(bonus, group, answered, correction=0)
        bonus = bonus - mean
    elif baseline == "constant":
        bonus = bonus - constant
    return torch.where(answered, bonus, 0.0).float()


def repetition_penalties(outcome: Int[Tensor, " batch"], group: Int[Tensor, " batch"]) -> Float[Tensor, " batch"]:
    """Return −(1/n) · #{j ≠ i : a_j = a_i} within each group of n; 0 if there is no answer (outcome −1)."""
    answered = outcome >= 0
    _, pair = torch.unique(torch.stack([group, outcome.to(group.dtype)]), dim=1, return_inverse=True)
    others = group_sum(torch.ones_like(double(outcome)), pair) - 1
    size = group_sum(torch.ones_like(others), group)
    return torch.where(answered, -others / size, 0.0).float()


@dataclass(frozen=True)
class OutcomeExploration(Strategy):
    """Add a bonus for final answers that were rarely given to a prompt."""

    name = "outcome_exploration"
    paper = "Song, Kempe and Munos 2025, Outcome-based exploration for LLM reasoning (arXiv:2509.06941)"
    needs_answers = True
    acts_on_parts = True

    coef: Scheduled = 0.1
    kind: Literal["historical", "batch"] = "historical"
    baseline: Literal["constant", "mean", "none"] = "constant"  # of the historical bonus
    constant: Scheduled = 0.5  # b_0: answers given more than b_0^(−2) times are penalised

    def __post_init__(self) -> None:
        check_number(self, "coef", at_least=0)
        check_choice(self, "kind", "historical", "batch")
        check_choice(self, "baseline", "constant", "mean", "none")
        check_number(self, "constant", at_least=0, at_most=1)

    def bonuses(self, batch: Batch) -> Float[Tensor, " batch"]:
        """Return the bonus of each completion, before the coefficient."""
        numbers: dict[str, int] = {}
        answers, collectives = _answers(batch), batch.collectives
        ids = [
            -1 if answer is None else numbers.setdefault(answer, len(numbers))
            for answer in collectives.gather_objects(answers)
        ]
        outcome = collectives.local_rows(torch.tensor(ids, device=batch.group.device))
        if self.kind == "batch":
            return collectives.map_rows(repetition_penalties, outcome, batch.group)
        history = self.memory.get("counts", {})
        counts = [
            0 if answer is None else history.get(text_key(prompt), {}).get(answer, 0)
            for prompt, answer in zip(batch.prompts, answers, strict=True)
        ]
        return collectives.map_rows(
            ucb_bonuses,
            torch.tensor(counts, dtype=torch.float32, device=batch.group.device),
            outcome,
            batch.group,
            baseline=self.baseline,
            constant=at(self.constant, batch.step),
        )

    def advantages(self, batch: Batch) -> Float[Tensor, "batch time"]:
        bonus = double(at(self.coef, batch.step) * self.bonuses(batch)).masked_fill(batch.rewards.isnan(), 0.0)
        bonus = bonus.unsqueeze(1)
        shaped = masked_double(batch.advantages, batch.mask) + bonus * (batch.mask > 0)
        return shaped.to(batch.advantages.dtype)

    def metrics(self, batch: Batch) -> Mapping[str, float]:
        """Return the mean bonus, the fraction of rows with an answer and the distinct answers per prompt.

        Also adds the answers to the counts in `memory`.
        """
        collectives = batch.collectives
        bonuses, group, answers = (
            collectives.gather_rows(self.bonuses(batch)),
            collectives.gather_rows(batch.group).tolist(),
            collectives.gather_objects(_answers(batch)),
        )
        metrics = {
            "bonus": float(bonuses.mean()),
            "answered": sum(answer is not None for answer in answers) / max(len(answers), 1),
            "distinct": len({pair for pair in zip(group, answers, strict=True) if pair[1] is not None})
            / max(len(set(group)), 1),
        }
        if self.kind == "historical":
            self._remember(collectives.gather_objects([text_key(prompt) for prompt in batch.prompts]), answers)
        return metrics

    def _remember(self, prompts: Sequence[str], answers: Sequence[str | None]) -> None:
        pairs = zip(prompts, answers, strict=True)
        new = Counter((prompt, answer) for prompt, answer in pairs if answer is not None)
        counts = self.memory.setdefault("counts", {})
        for (prompt, answer), times in new.items():
            of_prompt = counts.setdefault(prompt, {})
            of_prompt[answer] = of_prompt.get(answer, 0) + times
        for prompt in {prompt for prompt, _ in new}:
            surplus = len(counts[prompt]) - MAX_ANSWERS
            for answer in sorted(counts[prompt], key=counts[prompt].__getitem__)[: max(surplus, 0)]:
                del counts[prompt][answer]


def _answers(batch: Batch) -> list[str | None]:
    """Return a short key for each row's answer; raise if the trainer has not filled in `Batch.answers`.

    Keys instead of texts, because answers can have any length and are gathered on all processes.
    """
    if len(batch.answers) != len(batch.group):
        raise ValueError(
            f"outcome_exploration has {len(batch.answers)} answers for {len(batch.group)} rows; fill in "
            "Batch.answers with one text or None per row"
        )
    return [None if text is None else text_key(text) for text in batch.answers]
