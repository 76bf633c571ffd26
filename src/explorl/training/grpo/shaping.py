"""Apply a list of strategies to a generation batch: the result is everything that the loss multiplies with."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from explorl.strategies import Batch, Strategy
from explorl.strategies._lib.masked_stats import double
from explorl.strategies._lib.validate import name_of
from explorl.strategies.base import overrides
from explorl.training.grpo.hook_checks import finite, number, per_row, per_token

PerToken = Float[Tensor, "batch time"]
PerRow = Float[Tensor, " batch"]


@dataclass(frozen=True)
class Shaped:
    """The result of the strategies for a batch, one value per token."""

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
def shape(strategies: Sequence[Strategy], batch: Batch, normalised: Callable[[PerRow], PerRow] | None = None) -> Shaped:
    """Call the hooks of all strategies in order, on the whole batch, or on this process's part of it.

    With a part (`Batch.collectives` spans several processes), the result is for its rows, and metrics are for all rows.

    First every `rewards`, from whose final result `normalised` computes advantages, one per row; then every
    `advantages`, each applied to the result of the one before; then `select`, `weights`, `clip` and `keep`, which see
    the final advantages. Weights multiply, masks multiply, and of several clips the last one counts.
    """
    metrics: dict[str, float] = {}
    counted, collectives = batch.mask > 0, batch.collectives
    tokens = max(int(collectives.sum(counted.sum())), 1)

    def prefix(strategy: Strategy) -> str:
        return f"strategy/{name_of(strategy)}"

    def checked(strategy: Strategy, hook: str, value: Any, *, infinite: bool = False) -> PerToken:
        return finite(strategy, hook, per_token(strategy, hook, value, batch), batch, infinite=infinite)

    def log(strategy: Strategy, what: str, before: Tensor, after: Tensor) -> None:
        change = (after - before).abs()[counted].float()
        total, touched = collectives.sum(torch.stack([double(change.sum()), double((change > 0).sum())])).tolist()
        metrics[f"{prefix(strategy)}/{what}_change"] = total / tokens
        metrics[f"{prefix(strategy)}/{what}_tokens"] = touched

    rewarding = [strategy for strategy in strategies if overrides(strategy, "rewards")]
    changed = False
    for strategy in rewarding:
        rewards = strategy.rewards(batch)
        if rewards is not None:
            rewards = per_row(strategy, "rewards", rewards, batch)
            change = collectives.gather_rows((rewards - batch.rewards).abs())
            metrics[f"{prefix(strategy)}/reward_change"] = change.nanmean().item()
            metrics[f"{prefix(strategy)}/reward_rows"] = float((change > 0).sum().item())
            batch, changed = batch.with_(rewards=rewards), True
    if changed:
        assert normalised is not None, "normalised is needed with strategies that change rewards"
        new = collectives.map_rows(normalised, batch.rewards).unsqueeze(1) * batch.mask
        batch = batch.with_(advantages=new.to(batch.advantages.dtype))

    for strategy in strategies:
        advantages = strategy.advantages(batch)
        if advantages is not None:
            advantages = checked(strategy, "advantages", advantages)
            log(strategy, "advantage", batch.advantages, advantages)
            batch = batch.with_(advantages=torch.where(counted, advantages, 0.0).to(batch.advantages.dtype))

    ones = torch.ones_like(batch.mask)
    loss_mask, weights, kl_weights = batch.mask.clone(), ones, ones
    clip: tuple[PerToken, PerToken] | None = None
    kept: dict[str, PerToken] = {}
    for index, strategy in enumerate(strategies):
        selected = strategy.select(batch)
        if selected is not None:
            selected = checked(strategy, "select", selected)
            log(strategy, "masked", ones, selected)
            loss_mask = loss_mask * torch.where(counted, selected, 0.0).to(loss_mask.dtype)
        factors = strategy.weights(batch)
        if factors is not None:
            factors = checked(strategy, "weights", factors)
            log(strategy, "weight", ones, factors)
            factors = factors.to(ones.dtype)
            weights = weights * factors
            kl_weights = kl_weights * factors if strategy.weighs_kl else kl_weights
        bounds = strategy.clip(batch)
        if bounds is not None:
            if not isinstance(bounds, tuple | list) or len(bounds) != 2:
                raise TypeError(f"{name_of(strategy)}.clip is {bounds!r}; return (low, high), such as (0.2, 0.28)")
            low, high = (checked(strategy, "clip", bound, infinite=True).to(ones.dtype) for bound in bounds)
            clip = (low, high)
        for name, tensor in (strategy.keep(batch) or {}).items():
            kept[f"{index}/{name}"] = _kept(strategy, name, tensor, ones)
        for name, value in (strategy.metrics(batch) or {}).items():
            metrics[f"{prefix(strategy)}/{name}"] = number(strategy, name, value)
    return Shaped(batch.advantages, loss_mask, weights, kl_weights, clip, kept, metrics)


def _kept(strategy: Strategy, name: str, tensor: Any, like: PerToken) -> PerToken:
    """Return a kept tensor, checked to have one value per token; it is split into micro-batches like the tokens."""
    if isinstance(tensor, Tensor) and tensor.shape == like.shape:
        return tensor
    what = f"has shape {tuple(tensor.shape)}" if isinstance(tensor, Tensor) else f"is {type(tensor).__name__}"
    raise ValueError(
        f"{name_of(strategy)}.keep: {name!r} {what}; return one value per token, shape {tuple(like.shape)}"
    )
