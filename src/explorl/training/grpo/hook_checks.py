"""Check the results of strategies' hooks: errors name the strategy, the hook, the bad value and a good one."""

from __future__ import annotations

from numbers import Real
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from explorl.strategies import Batch, Strategy
from explorl.strategies._lib.masked_stats import double
from explorl.strategies._lib.validate import name_of

PerToken = Float[Tensor, "batch time"]


def per_token(strategy: Strategy, hook: str, value: Any, batch: Batch) -> PerToken:
    """Return one number per token; a single number and a column with one number per row are expanded."""
    name, like = f"{name_of(strategy)}.{hook}", batch.mask
    shape = tuple(like.shape)
    if isinstance(value, Real):
        return torch.full_like(like, float(value))
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} is {type(value).__name__}; return a tensor of shape {shape}, one value per token")
    if value.dim() == 1:
        raise ValueError(
            f"{name} has shape {tuple(value.shape)}; return one value per token, shape {shape}; values per row need "
            ".unsqueeze(1)"
        )
    if value.dim() and tuple(value.shape) not in (shape, (shape[0], 1)):
        raise ValueError(f"{name} has shape {tuple(value.shape)}; return one value per token, shape {shape}")
    if value.device != like.device:
        raise ValueError(f"{name} is on {value.device}; return it on {like.device}, the batch's own device")
    return (value if value.is_floating_point() else value.to(like.dtype)).expand_as(like)


def per_row(strategy: Strategy, hook: str, value: Any, batch: Batch) -> Float[Tensor, " batch"]:
    """Return one finite number per row; NaN is allowed only if the reward was NaN (not scored) before."""
    name, like = f"{name_of(strategy)}.{hook}", batch.rewards
    shape = tuple(like.shape)
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} is {type(value).__name__}; return a tensor of shape {shape}, one value per row")
    if tuple(value.shape) != shape:
        raise ValueError(f"{name} has shape {tuple(value.shape)}; return one value per row, shape {shape}")
    if value.device != like.device:
        raise ValueError(f"{name} is on {value.device}; return it on {like.device}, the batch's own device")
    value = value.detach().to(like.dtype)
    invalid = _InvalidValues.of(
        value, ~value.isfinite() & like.isfinite(), torch.ones_like(like, dtype=torch.bool), batch
    )
    if invalid.number:
        raise ValueError(
            f"{name} is {invalid.first} on {invalid.number} of {invalid.total} rows at step {batch.step}; return "
            "finite numbers, and NaN only for rows with NaN in batch.rewards"
        )
    return value


def finite(strategy: Strategy, hook: str, value: PerToken, batch: Batch, *, infinite: bool = False) -> PerToken:
    """Raise for NaN (and ±∞, unless ``infinite``) on a counted token, unless the batch itself has some."""
    counted = batch.mask > 0
    invalid = _InvalidValues.of(value, _is_invalid(value, counted, infinite), counted, batch)
    if invalid.number and _is_finite_batch(batch, counted):
        raise ValueError(
            f"{name_of(strategy)}.{hook} is {invalid.first} on {invalid.number} of {invalid.total} tokens at step "
            f"{batch.step}; return finite numbers (a division by a standard deviation of 0 is a usual cause)"
        )
    return value


def number(strategy: Strategy, name: str, value: Any) -> float:
    """Return a metric as a number."""
    single = isinstance(value, Tensor) and value.numel() == 1
    if single or isinstance(value, Real):
        return float(value)
    what = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
    raise TypeError(f"{name_of(strategy)}.metrics: {name!r} is {what}; return one number, such as its mean")


class _InvalidValues(NamedTuple):
    """Invalid values on all processes, so that all of them fail together and none waits for the others."""

    number: int
    first: float
    total: int

    @classmethod
    def of(cls, value: Tensor, invalid: Tensor, counted: Tensor, batch: Batch) -> _InvalidValues:
        first = value.new_tensor(0.0)
        if invalid.numel():
            first = value[torch.unravel_index(invalid.view(torch.uint8).argmax(), invalid.shape)]
        gathered = batch.collectives.gather(torch.stack([double(x) for x in (invalid.sum(), first, counted.sum())]))
        counts, firsts, totals = gathered.T.tolist()
        process = next((process for process, count in enumerate(counts) if count), 0)
        return cls(int(sum(counts)), firsts[process], int(sum(totals)))


def _is_invalid(value: Tensor, counted: Bool[Tensor, "batch time"], infinite: bool) -> Tensor:
    return (value.isnan() if infinite else ~value.isfinite()) & counted


def _is_finite_batch(batch: Batch, counted: Bool[Tensor, "batch time"]) -> bool:
    """Tell whether the inputs of the strategies are finite; if not, the model or a reward is the cause."""
    inputs = (batch.logps.detach(), batch.entropy, batch.advantages)
    invalid = torch.stack([batch.rewards.isinf().sum(), *(_is_invalid(x, counted, False).sum() for x in inputs)])
    return not bool(batch.collectives.sum(invalid).any())
