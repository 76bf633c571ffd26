"""The loss of a micro-batch, piece by piece: tensors in, tensors out. Defined as in TRL, whose loss types these are.

grpo, bnpo, dr_grpo, dapo, luspo   −min(r·A, clip(r, 1 − low, 1 + high)·A)
cispo                              −clip(r, max=high)·A·log π, the clipped r detached       (MiniMax-M1, 2506.13585)
sapo                               −(4/τ)·σ(τ(r − 1))·A, τ by the sign of A                  (2511.20347)
vespo                              −φ(w)·A·log π, φ a gamma weight of the sequence's ratio w (2602.10693)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

Tokens = Float[Tensor, "rows tokens"]
PerToken = Float[Tensor, "rows #tokens"]
"""One value per token, or one for all tokens of a sequence."""
Marks = Bool[Tensor, "rows #tokens"]

CLIPPED = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")
LOSSES = (*CLIPPED, "cispo", "sapo", "vespo")
OVER_TOKENS = ("dapo", "cispo", "vespo")
"""Loss types that divide by the tokens of the whole generation batch."""


class Surrogate(NamedTuple):
    """The objective of each token and its metrics."""

    loss: PerToken
    low_clipped: Marks | None = None
    high_clipped: Marks | None = None
    values: Mapping[str, PerToken] = {}
    """Further values whose means are logged."""


@dataclass(frozen=True)
class Bounds:
    """Bounds of the ratio: [1 − low, 1 + high], and ``ceiling`` for cispo, which has no lower one."""

    low: Tensor | float
    high: Tensor | float
    ceiling: Tensor | float


def importance_ratio(logps: Tokens, old_logps: Tokens, mask: Tokens, level: Literal["token", "sequence"]) -> PerToken:
    """Return π / π_old of every token, or its geometric mean over the sequence."""
    log_ratio = logps - old_logps
    if level == "sequence":
        log_ratio = ((log_ratio * mask).sum(-1) / mask.sum(-1).clamp(min=1.0)).unsqueeze(-1)
    return torch.exp(log_ratio)


def clipped_surrogate(
    ratio: PerToken, advantages: PerToken, low: Tensor | float, high: Tensor | float, delta: float | None = None
) -> Surrogate:
    """Return −min(r · A, clip(r, 1 − low, 1 + high) · A); ``delta`` also bounds r itself (two-sided clipping)."""
    low, high = torch.as_tensor(low).to(ratio), torch.as_tensor(high).to(ratio)
    clipped = torch.minimum(torch.maximum(ratio, 1 - low), 1 + high)
    bounded = ratio if delta is None else ratio.clamp(max=delta)
    return Surrogate(
        -torch.min(bounded * advantages, clipped * advantages),
        (bounded < 1 - low) & (advantages < 0),
        (bounded > 1 + high) & (advantages > 0),
    )


def cispo_surrogate(ratio: PerToken, advantages: PerToken, logps: Tokens, ceiling: Tensor | float) -> Surrogate:
    """Return −clip(r, max) · A · log π: every token keeps its gradient, with a bounded weight."""
    ceiling = torch.as_tensor(ceiling).to(ratio)
    marks = (ratio > ceiling) & (advantages > 0)
    weight = torch.minimum(ratio, ceiling).detach()
    return Surrogate(-weight * advantages * logps, values={"cispo_clip_ratio": marks.float()})


def sapo_surrogate(ratio: PerToken, advantages: PerToken, *, positive: float, negative: float) -> Surrogate:
    """Return −(4/τ) · σ(τ (r − 1)) · A: a soft gate around r = 1 instead of a clip."""
    tau = torch.where(advantages > 0, positive, negative)
    return Surrogate(-torch.sigmoid(tau * (ratio - 1)) * 4 / tau * advantages)


def vespo_surrogate(weight: PerToken, advantages: PerToken, logps: Tokens) -> Surrogate:
    """Return −φ · A · log π with detached weights φ of the sequences."""
    return Surrogate(-weight * advantages * logps, values={"vespo/phi_seq_mean": weight})


def surrogate(
    kind: str, ratio: PerToken, advantages: PerToken, logps: Tokens, bounds: Bounds, args: Any, weight: Any = None
) -> Surrogate:
    """Return the objective of a loss type; ``args`` is TRL's configuration, ``weight`` vespo's φ."""
    if kind == "cispo":
        return cispo_surrogate(ratio, advantages, logps, bounds.ceiling)
    if kind == "sapo":
        return sapo_surrogate(ratio, advantages, positive=args.sapo_temperature_pos, negative=args.sapo_temperature_neg)
    if kind == "vespo":
        return vespo_surrogate(weight, advantages, logps)
    return clipped_surrogate(ratio, advantages, bounds.low, bounds.high, args.delta)


def k3(logps: Tokens, ref_logps: Tokens) -> Tokens:
    """Return the estimator ρ − log ρ − 1 of KL(π ‖ π_ref), ρ = π_ref / π."""
    ahead = ref_logps - logps
    return torch.exp(ahead) - ahead - 1


def normalised(
    token_loss: PerToken, mask: Tokens, kind: str, *, rows: float, longest: int, tokens: Tensor, accumulated: float
) -> Float[Tensor, ""]:
    """Reduce token losses to one number.

    Args:
        kind: "grpo" and "sapo", the mean over sequences of their means; "luspo", the mean over sequences of their sums;
            "bnpo", the mean over tokens; "dr_grpo", the sum over sequences of ``longest`` tokens; "dapo", "cispo" and
            "vespo", the sum over ``tokens``.
        rows: sequences of the mean.
        tokens: tokens of the whole generation batch, rescaled to one accumulation window.
        accumulated: micro-batches whose losses are added up.
    """
    if kind in ("grpo", "sapo"):
        return ((token_loss * mask).sum(-1) / mask.sum(-1).clamp(min=1.0)).sum() / rows / accumulated
    total = (token_loss * mask).sum()
    if kind == "luspo":
        return total / rows / accumulated
    if kind == "bnpo":
        return total / mask.sum().clamp(min=1.0) / accumulated
    if kind == "dr_grpo":
        return total / (rows * longest) / accumulated
    return total / tokens


class LoggedRows(NamedTuple):
    """What the rows of a micro-batch contribute to the metrics."""

    part: Int[Tensor, " rows"]
    """The micro-batch that TRL would have put each row into, numbered within the optimizer step."""
    sums: Float[Tensor, "values rows"]
    counts: Float[Tensor, "values rows"]

    @classmethod
    def of(cls, values: Mapping[str, PerToken], counted: Tokens, part: Int[Tensor, " rows"]) -> LoggedRows:
        """Sum each value over the counted tokens of a row; one per sequence counts once, as in TRL."""
        tokens = counted.sum(1).float()
        sums, counts = [], []
        for value in values.values():
            per_sequence = value.size(1) == 1
            sums.append((value.detach().squeeze(1) if per_sequence else (value.detach() * counted).sum(1)).float())
            counts.append(torch.ones_like(tokens) if per_sequence else tokens)
        return cls(part, torch.stack(sums), torch.stack(counts))

    @classmethod
    def joined(cls, rows: Sequence[LoggedRows]) -> LoggedRows:
        """Concatenate the rows of several micro-batches."""
        return cls(
            torch.cat([row.part for row in rows]),
            torch.cat([row.sums for row in rows], dim=1),
            torch.cat([row.counts for row in rows], dim=1),
        )

    def totals(self, parts: int) -> Float[Tensor, "2 values parts"]:
        """Return sums and counts of each part."""
        empty = self.sums.new_zeros(len(self.sums), parts)
        return torch.stack([empty.index_add(1, self.part, values) for values in (self.sums, self.counts)])

    def extremes(self, value: int, parts: int, *, largest: bool) -> Float[Tensor, " parts"]:
        """Return the least (or largest) row mean of a value in each part; ±∞ if no row has a counted token."""
        empty = -torch.inf if largest else torch.inf
        means = torch.nan_to_num(self.sums[value] / self.counts[value], nan=empty)
        return means.new_full((parts,), empty).scatter_reduce(0, self.part, means, "amax" if largest else "amin")
