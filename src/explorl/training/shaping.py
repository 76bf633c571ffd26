"""What a list of strategies makes of a generation batch: everything that the loss will multiply with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from explorl.strategies import Batch, Strategy

PerToken = Float[Tensor, "batch time"]


@dataclass(frozen=True)
class Shaped:
    """The strategies' word on a batch, one value per token."""

    advantages: PerToken
    loss_mask: PerToken
    """1 on tokens that are in the loss."""
    weights: PerToken
    """Factor on the policy term."""
    kl_weights: PerToken
    """Factor on the KL term."""
    clip: tuple[PerToken, PerToken] | None
    """The ratio is clipped to [1 − low, 1 + high]; None leaves the trainer's own bounds."""
    kept: Mapping[str, PerToken]
    """What `Strategy.keep` returned, under "<index of the strategy>/<name>"."""
    metrics: Mapping[str, float]
    """What each strategy changed, under "strategy/<name>/<what>"."""


@torch.no_grad()
def shape(strategies: Sequence[Strategy], batch: Batch) -> Shaped:
    """Calls the hooks of all strategies in their order, on the whole batch.

    First every `advantages`, each on what the one before it left; then `select`, `weights`, `clip` and `keep`, which
    see the final advantages. Weights multiply, masks multiply, and of several clips the last one counts.
    """
    metrics: dict[str, float] = {}
    counted = batch.mask > 0
    tokens = max(int(counted.sum()), 1)

    def prefix(strategy: Strategy) -> str:
        return f"strategy/{strategy.name or type(strategy).__name__}"

    def log(strategy: Strategy, what: str, before: Tensor, after: Tensor) -> None:
        change = (after - before).abs()[counted].float()
        metrics[f"{prefix(strategy)}/{what}_change"] = (change.sum() / tokens).item()
        metrics[f"{prefix(strategy)}/{what}_tokens"] = float((change > 0).sum().item())

    for strategy in strategies:
        advantages = strategy.advantages(batch)
        if advantages is not None:
            log(strategy, "advantage", batch.advantages, advantages)
            batch = batch.with_(advantages=torch.where(counted, advantages, 0.0).to(batch.advantages.dtype))

    ones = torch.ones_like(batch.mask)
    loss_mask, weights, kl_weights = batch.mask.clone(), ones, ones
    clip: tuple[PerToken, PerToken] | None = None
    kept: dict[str, PerToken] = {}
    for index, strategy in enumerate(strategies):
        selected = strategy.select(batch)
        if selected is not None:
            log(strategy, "masked", ones, selected)
            loss_mask = loss_mask * selected.to(loss_mask.dtype)
        factors = strategy.weights(batch)
        if factors is not None:
            log(strategy, "weight", ones, factors)
            factors = factors.to(ones.dtype)
            weights = weights * factors
            kl_weights = kl_weights * factors if strategy.weighs_kl else kl_weights
        bounds = strategy.clip(batch)
        if bounds is not None:
            low, high = (torch.as_tensor(b, device=ones.device, dtype=ones.dtype).expand_as(ones) for b in bounds)
            clip = (low, high)
        kept.update({f"{index}/{name}": tensor for name, tensor in strategy.keep(batch).items()})
        metrics.update({f"{prefix(strategy)}/{name}": value for name, value in strategy.metrics(batch).items()})
    return Shaped(batch.advantages, loss_mask, weights, kl_weights, clip, kept, metrics)
