"""Extract the answer of each completion for the strategies that need it, by a function of the task or the user."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from explorl.strategies import Strategy
from explorl.strategies._lib.validate import name_of

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
