"""The statistics that `explorl train` logs for every step, as observers (see `inspection_schedule`).

Deng et al. 2025, §3.2: entropy by the answer's sign and by position, tokens whose entropy falls fastest, sizes of
updates, changes of probability, quality of responses. Only tokens that the policy sampled count.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from explorl.metrics.quality import response_quality
from explorl.training.grpo.inspection_schedule import Observer, StepView

BINS = 20
SMALL_CHANGE = 0.06
"""Deng et al. 2025 §3.2.2: in the plateau phase over 99 % of tokens change their probability by less."""
FORM = "format"
"""Name of the reward function that checks the task's format."""


def statistics() -> list[Observer]:
    """Return new observers of `explorl train`."""
    return [EntropyBySign(), EntropyByPosition(), FastestDrop(), UpdateSize(), ProbabilityChange(), ResponseQuality()]


class EntropyBySign:
    """Mean token entropy of completions with positive and with negative advantage."""

    def see(self, step: StepView) -> dict[str, float]:
        known = step.known
        signs = {"entropy_positive": step.sign > 0, "entropy_negative": step.sign < 0}
        return {name: _mean(step.entropy[known & rows.unsqueeze(1)]) for name, rows in signs.items()}


class EntropyByPosition:
    """Mean token entropy by relative position in the completion, in 20 bins."""

    def see(self, step: StepView) -> dict[str, float]:
        means = position_profile(step.entropy, step.mask, BINS)
        return {f"entropy_position_{index:02d}": mean for index, mean in enumerate(means.tolist())}


def position_profile(
    values: Float[Tensor, "batch time"], mask: Float[Tensor, "batch time"], bins: int
) -> Float[Tensor, " bins"]:
    """Return the mean of the tokens in each bin of relative positions, NaN for a bin without tokens.

        bin = ⌊bins · i / n⌋   for the i-th of a completion's n counted tokens, from 0

    Deng et al. 2025 §3.4. Values that are not finite are ignored.
    """
    counted = mask > 0
    index, lengths = counted.long().cumsum(1) - 1, counted.sum(1, keepdim=True).clamp(min=1)
    known = counted & values.isfinite()
    bin_of = (bins * index // lengths)[known]
    sums = torch.zeros(bins, dtype=torch.float64, device=values.device)
    sums.index_add_(0, bin_of, values[known].double())
    return sums / torch.bincount(bin_of, minlength=bins)


class UpdateSize:
    """Mean and quantiles of the update size G over the inspected tokens."""

    def see(self, step: StepView) -> dict[str, float]:
        if step.sampled is None:
            return {}
        sizes = step.sampled.update_size[step.of_sampled(step.mask) > 0].double()
        if not len(sizes):
            return {}
        shares = torch.tensor([0.5, 0.9, 0.99], dtype=sizes.dtype)
        # torch.quantile takes 16 million values at most
        quantiles = torch.quantile(sizes.cpu()[:: -(-len(sizes) // 2**23)], shares).tolist()
        names = ("update_size_p50", "update_size_p90", "update_size_p99")
        return {"update_size_mean": _mean(sizes), **dict(zip(names, quantiles, strict=True))}


class ProbabilityChange:
    """Change of probability of the inspected tokens: mean |Δπ|, and the share below 0.06."""

    def see(self, step: StepView) -> dict[str, float]:
        if step.sampled is None:
            return {}
        change = step.sampled.probability_change[step.of_sampled(step.mask) > 0].abs()
        return {
            "probability_change_mean_abs": _mean(change),
            f"probability_change_below_{SMALL_CHANGE}": _mean((change < SMALL_CHANGE).float()),
        }


class ResponseQuality:
    """Shares of responses that are malformed, repetitive or mix languages; mean 3-gram redundancy.

    Counted as in `explorl.analysis.response_quality`: a response is malformed according to the reward function
    ``format``; without one, if it has not exactly one ``<answer>``.
    """

    def see(self, step: StepView) -> dict[str, float]:
        form = step.reward_parts.get(FORM)
        quality = response_quality(step.completions, None if form is None else form.tolist())
        share = 1 / max(quality.responses, 1)
        return {
            "quality_format_violations": quality.format_violations * share,
            "quality_repetitive": quality.repetitive * share,
            "quality_language_mixing": quality.language_mixing * share,
            "quality_redundancy": quality.redundancy,
        }


class FastestDrop:
    """Share of occurrences in negative completions of the 20 % of tokens whose entropy falls fastest.

    For every token of the vocabulary, the slope of its entropy over the batches seen, by least squares over its
    occurrences, with each batch weighted λ times as much as the next one:

        slope = (W·Wxy − Wx·Wy) / (W·Wxx − Wx²),   W = Σ λ^age, Wx = Σ λ^age·x, …   x = −age in batches

    A token counts once it has been seen in two batches and, with these weights, `least` times. Deng et al. 2025
    §3.2.1 (Figure 3c: the top 20 %).
    """

    def __init__(self, share: float = 0.2, decay: float = 0.95, least: float = 8.0) -> None:
        self.share, self.decay, self.least = share, decay, least
        self._sums = torch.zeros(7, 0, dtype=torch.float64)
        """W, Wx, Wxx, Wy, Wxy, and W over positive and over negative completions; one column per vocabulary token."""

    def see(self, step: StepView) -> dict[str, float]:
        known = step.known.cpu()
        sign = step.sign.cpu().unsqueeze(1).expand(known.shape)[known]
        self._add(step.token_ids.cpu()[known], step.entropy.cpu()[known], sign)
        ids, _ = self.fastest(in_order=False)
        positive, negative = self._sums[5:, ids].sum(1).tolist()
        return {"fastest_drop_negative_share": negative / (positive + negative)} if positive + negative else {}

    def fastest(self, in_order: bool = True) -> tuple[Int[Tensor, " tokens"], Float[Tensor, " tokens"]]:
        """Return the ids of the fastest falling tokens and their drop in nats per batch, sorted if ``in_order``."""
        weight, x, xx, y, xy = self._sums[:5]
        spread = weight * xx - x**2
        counts = torch.nonzero((weight >= self.least) & (spread > 1e-9 * weight**2)).squeeze(1)
        drops = -((weight * xy - x * y)[counts] / spread[counts])
        falling = torch.nonzero(drops > 0).squeeze(1)
        most = min(len(falling), math.ceil(self.share * len(counts)))
        fastest, order = drops[falling].topk(most, sorted=in_order)
        return counts[falling[order]], fastest

    def _add(self, ids: Tensor, entropy: Tensor, sign: Tensor) -> None:
        size = max(self._sums.shape[1], int(ids.max()) + 1 if len(ids) else 0)
        sums = torch.nn.functional.pad(self._sums, (0, size - self._sums.shape[1]))
        weight, x, xx, y, xy, positive, negative = sums * self.decay
        # everything seen so far is one batch older now
        sums = torch.stack([weight, x - weight, xx - 2 * x + weight, y, xy - y, positive, negative])
        for row, values in ((0, None), (3, entropy.double()), (5, (sign > 0).double()), (6, (sign < 0).double())):
            sums[row] += torch.bincount(ids, values, minlength=size)
        self._sums = sums

    def state_dict(self) -> dict[str, Any]:
        ids = torch.nonzero(self._sums[0]).squeeze(1)
        return {"ids": ids, "sums": self._sums[:, ids]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        ids = state["ids"]
        self._sums = torch.zeros(7, int(ids.max()) + 1 if len(ids) else 0, dtype=torch.float64)
        self._sums[:, ids] = state["sums"]


def _mean(values: Tensor) -> float:
    """Return the mean, NaN without values."""
    return values.double().mean().item()
