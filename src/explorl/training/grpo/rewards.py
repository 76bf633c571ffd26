"""Checks of what the user's functions return: rewards, and the answers that some strategies need."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from trl.trainer.utils import is_async_callable, nanstd

from explorl.strategies import Strategy
from explorl.strategies._lib.validate import name_of

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


def group_advantages(rewards: Tensor, generations: int, scale: str) -> Tensor:
    """Return the advantages of the total rewards of all rows as TRL does ("sum_then_normalize").

    Args:
        generations: Rows of a group.
        scale: TRL's `scale_rewards`.
    """
    grouped = rewards.view(-1, generations)
    advantages = rewards - grouped.nanmean(dim=1).repeat_interleave(generations, dim=0)
    if scale != "none":
        batch = scale == "batch"
        std = nanstd(rewards).expand_as(rewards) if batch else nanstd(grouped, dim=1)
        std = std if batch else std.repeat_interleave(generations, dim=0)
        advantages = advantages / (std + 1e-4)
    return torch.nan_to_num(advantages, nan=0.0)


# ---------------------------------------------------------------- answers

AnswerFunction = Callable[..., Sequence[str | None]]
"""Called with prompts, completions, completion_ids, the data set's columns and trainer_state, as TRL calls a reward
function; returns one text per completion, or None for a completion without an answer."""

EXAMPLE = "ExplorationTrainer(..., answers=lambda completions, **columns: [text.strip() for text in completions])"


def check_answers(strategies: Sequence[Strategy], function: AnswerFunction | None) -> None:
    """Check that `answers` is a function, and that it is set if a strategy needs it."""
    if function is not None and not callable(function):
        raise TypeError(f"answers is {function!r}; give a function, such as {EXAMPLE}")
    for strategy in strategies:
        if strategy.needs_answers and function is None:
            raise ValueError(
                f"{name_of(strategy)} needs the answer of each completion; set answers to a function that takes "
                f"completions and returns one text for each, such as {EXAMPLE}"
            )


def answers_of(function: AnswerFunction, rewarded: Mapping[str, Any]) -> list[str | None]:
    """Return the answers of these completions; raise if the function does not return one text or None for each."""
    answers = function(**rewarded)
    rows = len(rewarded["completions"])
    if isinstance(answers, str) or not isinstance(answers, Sequence):
        raise TypeError(
            f"answers returned {type(answers).__name__}; return a list of {rows}: a text or None per completion"
        )
    if len(answers) != rows:
        raise ValueError(f"answers returned {len(answers)} for {rows} completions; return one per completion")
    for row, answer in enumerate(answers):
        if answer is not None and not isinstance(answer, str):
            raise TypeError(f"answers returned {answer!r} for completion {row}; return a text such as '42', or None")
    return list(answers)
