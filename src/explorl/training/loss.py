"""The loss of a micro-batch, piece by piece: tensors in, tensors out. Defined as in TRL, whose loss types these are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

Tokens = Float[Tensor, "rows tokens"]
PerToken = Float[Tensor, "rows #tokens"]
"""One value a token, or one for all tokens of a sequence."""
Marks = Bool[Tensor, "rows #tokens"]


class Surrogate(NamedTuple):
    """The clipped objective and what was clipped."""

    loss: PerToken
    ratio: PerToken
    low_clipped: Marks
    high_clipped: Marks


def importance_ratio(logps: Tokens, old_logps: Tokens, mask: Tokens, level: Literal["token", "sequence"]) -> PerToken:
    """π / π_old of every token, or its geometric mean over the sequence."""
    log_ratio = logps - old_logps
    if level == "sequence":
        log_ratio = ((log_ratio * mask).sum(-1) / mask.sum(-1).clamp(min=1.0)).unsqueeze(-1)
    return torch.exp(log_ratio)


def clipped_surrogate(
    ratio: PerToken, advantages: PerToken, low: Tensor | float, high: Tensor | float, delta: float | None = None
) -> Surrogate:
    """−min(r · A, clip(r, 1 − low, 1 + high) · A); ``delta`` bounds the unclipped r as well (two-sided clipping)."""
    low, high = torch.as_tensor(low).to(ratio), torch.as_tensor(high).to(ratio)
    clipped = torch.minimum(torch.maximum(ratio, 1 - low), 1 + high)
    bounded = ratio if delta is None else ratio.clamp(max=delta)
    return Surrogate(
        -torch.min(bounded * advantages, clipped * advantages),
        ratio,
        (ratio < 1 - low) & (advantages < 0),
        (ratio > 1 + high) & (advantages > 0),
    )


def k3(logps: Tokens, ref_logps: Tokens) -> Tokens:
    """The estimator ρ − log ρ − 1 of KL(π ‖ π_ref), ρ = π_ref / π."""
    ahead = ref_logps - logps
    return torch.exp(ahead) - ahead - 1


def normalised(
    token_loss: PerToken, mask: Tokens, kind: str, *, rows: float, longest: int, tokens: Tensor, accumulated: float
) -> Float[Tensor, ""]:
    """From token losses to one number.

    Args:
        kind: "grpo", the mean over sequences of their means; "bnpo", the mean over tokens; "dr_grpo", the sum over
            sequences of ``longest`` tokens; "dapo", the sum over ``tokens``.
        rows: sequences of the mean.
        tokens: tokens of the whole generation batch, rescaled to one accumulation window.
        accumulated: micro-batches whose losses are added up.
    """
    if kind == "grpo":
        return ((token_loss * mask).sum(-1) / mask.sum(-1).clamp(min=1.0)).sum() / rows / accumulated
    total = (token_loss * mask).sum()
    if kind == "bnpo":
        return total / mask.sum().clamp(min=1.0) / accumulated
    if kind == "dr_grpo":
        return total / (rows * longest) / accumulated
    return total / tokens


def sums_and_counts(values: Mapping[str, PerToken], counted: Tokens) -> Float[Tensor, "2 values"]:
    """Of each value, its sum over counted tokens and their number; of one per sequence, over sequences."""
    sums, counts = [], []
    for value in values.values():
        per_sequence = value.size(1) == 1
        sums.append((value.detach() if per_sequence else value.detach() * counted).sum())
        counts.append(torch.tensor(float(len(value)), device=value.device) if per_sequence else counted.sum().float())
    return torch.stack([torch.stack(sums), torch.stack(counts)])
