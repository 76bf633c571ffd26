"""What a strategy says of a batch, checked: an error names the strategy, its hook, what came and what should have."""

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
    """One number per token; a number for all tokens and a column, one number per row, are spread over them."""
    place, like = f"{name_of(strategy)}.{hook}", batch.mask
    shape = tuple(like.shape)
    if isinstance(value, Real):
        return torch.full_like(like, float(value))
    if not isinstance(value, Tensor):
        raise TypeError(f"{place} is {type(value).__name__}; give a tensor of shape {shape}, one value per token")
    if value.dim() == 1:
        raise ValueError(
            f"{place} has shape {tuple(value.shape)}; give one value per token, shape {shape}: what there is one of "
            "per row becomes that by .unsqueeze(1)"
        )
    if value.dim() and tuple(value.shape) not in (shape, (shape[0], 1)):
        raise ValueError(f"{place} has shape {tuple(value.shape)}; give one value per token, shape {shape}")
    if value.device != like.device:
        raise ValueError(f"{place} is on {value.device}; give it on {like.device}, the batch's own device")
    return (value if value.is_floating_point() else value.to(like.dtype)).expand_as(like)


def per_row(strategy: Strategy, hook: str, value: Any, batch: Batch) -> Float[Tensor, " batch"]:
    """One finite number per row, NaN only where there was NaN before: an answer that could not be scored."""
    place, like = f"{name_of(strategy)}.{hook}", batch.rewards
    shape = tuple(like.shape)
    if not isinstance(value, Tensor):
        raise TypeError(f"{place} is {type(value).__name__}; give a tensor of shape {shape}, one value per row")
    if tuple(value.shape) != shape:
        raise ValueError(f"{place} has shape {tuple(value.shape)}; give one value per row, shape {shape}")
    if value.device != like.device:
        raise ValueError(f"{place} is on {value.device}; give it on {like.device}, the batch's own device")
    value = value.detach().to(like.dtype)
    bad = _Bad.of(value, ~value.isfinite() & like.isfinite(), torch.ones_like(like, dtype=torch.bool), batch)
    if bad.number:
        raise ValueError(
            f"{place} is {bad.first} on {bad.number} of {bad.among} rows at step {batch.step}; give finite numbers, "
            "and NaN only where batch.rewards has it"
        )
    return value


def finite(strategy: Strategy, hook: str, value: PerToken, batch: Batch, *, infinite: bool = False) -> PerToken:
    """NaN (and ±∞, unless ``infinite``) on a counted token is an error, unless the batch itself has some."""
    counted = batch.mask > 0
    bad = _Bad.of(value, _bad(value, counted, infinite), counted, batch)
    if bad.number and _sound(batch, counted):
        raise ValueError(
            f"{name_of(strategy)}.{hook} is {bad.first} on {bad.number} of {bad.among} tokens at step {batch.step}; "
            "give finite numbers (a division by a standard deviation of 0 is a usual cause)"
        )
    return value


def number(strategy: Strategy, name: str, value: Any) -> float:
    """A number to log."""
    single = isinstance(value, Tensor) and value.numel() == 1
    if single or isinstance(value, Real):
        return float(value)
    what = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
    raise TypeError(f"{name_of(strategy)}.metrics: {name!r} is {what}; give one number, such as its mean")


class _Bad(NamedTuple):
    """Values that are wrong, on all processes: each of them must come to know, or the others would wait for the one
    that fails."""

    number: int
    first: float
    among: int

    @classmethod
    def of(cls, value: Tensor, wrong: Tensor, counted: Tensor, batch: Batch) -> _Bad:
        first = value.new_tensor(0.0)
        if wrong.numel():
            first = value[torch.unravel_index(wrong.view(torch.uint8).argmax(), wrong.shape)]
        found = batch.collectives.gather(torch.stack([double(x) for x in (wrong.sum(), first, counted.sum())]))
        counts, firsts, among = found.T.tolist()
        which = next((which for which, count in enumerate(counts) if count), 0)
        return cls(int(sum(counts)), firsts[which], int(sum(among)))


def _bad(value: Tensor, counted: Bool[Tensor, "batch time"], infinite: bool) -> Tensor:
    return (value.isnan() if infinite else ~value.isfinite()) & counted


def _sound(batch: Batch, counted: Bool[Tensor, "batch time"]) -> bool:
    """Whether what the strategies read is finite: else the model or a reward is to blame."""
    read = (batch.logps.detach(), batch.entropy, batch.advantages)
    wrong = torch.stack([batch.rewards.isinf().sum(), *(_bad(x, counted, False).sum() for x in read)])
    return not bool(batch.collectives.sum(wrong).any())
