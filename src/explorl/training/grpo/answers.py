"""What each answer of a batch says, for the strategies that ask: a function of the task's, or of the user's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from explorl.strategies import Strategy
from explorl.strategies._lib.validate import title

AnswerFunction = Callable[..., Sequence[str | None]]
"""Called with prompts, completions, completion_ids, the data set's columns and trainer_state, as TRL calls a reward
function; gives one text per completion, or None where it has no answer."""

EXAMPLE = "ExplorationTrainer(..., answers=lambda completions, **columns: [text.strip() for text in completions])"


def check_answers(strategies: Sequence[Strategy], function: AnswerFunction | None) -> None:
    """That who asks for answers can have them."""
    if function is not None and not callable(function):
        raise TypeError(f"answers is {function!r}; give a function, such as {EXAMPLE}")
    for strategy in strategies:
        if strategy.needs_answers and function is None:
            raise ValueError(
                f"{title(strategy)} looks at what each answer says, and nobody tells it; give a function that takes "
                f"completions and gives one text for each, such as {EXAMPLE}"
            )


def answers_of(function: AnswerFunction, rewarded: Mapping[str, Any]) -> list[str | None]:
    """The answers of these completions, checked."""
    found = function(**rewarded)
    rows = len(rewarded["completions"])
    if isinstance(found, str) or not isinstance(found, Sequence):
        raise TypeError(f"answers gave {type(found).__name__}; give a list of {rows}: a text or None per completion")
    if len(found) != rows:
        raise ValueError(f"answers gave {len(found)} for {rows} completions; give one per completion")
    for row, answer in enumerate(found):
        if answer is not None and not isinstance(answer, str):
            raise TypeError(f"answers gave {answer!r} for completion {row}; give a text such as '42', or None")
    return list(found)
