"""Checks of what reward functions return."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from trl.trainer.utils import is_async_callable

GOOD = "return a list with one finite number for each completion, or None if it does not apply"


def checked_rewards(name: str, rewards: Any) -> list[Any]:
    """Return the rewards of a function as the list of numbers and None that TRL expects; raise if they are not."""
    if isinstance(rewards, str | bytes | Mapping) or not isinstance(rewards, Iterable) or _is_scalar(rewards):
        raise TypeError(f"the reward function {name!r} returned {rewards!r:.80}; {GOOD}")
    values = list(rewards)
    for row, value in enumerate(values):
        if value is not None and not _is_number(value):
            raise TypeError(f"the reward function {name!r} returned {value!r:.80} for completion {row}; {GOOD}")
    return values


def _is_scalar(value: Any) -> bool:
    return getattr(value, "ndim", None) == 0  # an array or a tensor


def _is_number(value: Any) -> bool:
    if isinstance(value, str | bytes):
        return False
    try:
        float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return False
    return True


def checked_function(function: Any, name: str) -> Any:
    """Return the reward function with its rewards checked; a reward model as it is."""
    if isinstance(function, nn.Module):
        return function
    if is_async_callable(function):

        async def awaited(**columns: Any) -> list[Any]:
            return checked_rewards(name, await function(**columns))

        return awaited

    def called(**columns: Any) -> list[Any]:
        return checked_rewards(name, function(**columns))

    return called


def check_totals(totals: Tensor, weights: Sequence[float]) -> Tensor:
    """Return the weighted sums of all rows; raise where one is infinite, from which nothing would be learned."""
    infinite = totals.isinf()
    if infinite.any():
        row = int(infinite.nonzero()[0])
        raise ValueError(
            f"the rewards of completion {row} add up to {float(totals[row])}: reward_weights is {weights}; give finite "
            "numbers such as 1.0, and rewards far below 1e38"
        )
    return totals


def check_finite(parts: Tensor, names: Sequence[str]) -> Tensor:
    """Return the rewards of all rows, (rows, reward functions); raise if one is infinite. NaN means not scored."""
    infinite = parts.isinf()
    if infinite.any():
        row, column = infinite.nonzero()[0].tolist()
        name = names[column] if column < len(names) else f"number {column}"
        raise ValueError(
            f"the reward function {name!r} returned {float(parts[row, column])} for completion {row}; {GOOD}"
        )
    return parts
