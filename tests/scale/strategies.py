"""One of every strategy, as the tables of what runs where are walked over."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tools.docs.support_matrix import examples

from explorl.strategies import Curriculum, Strategy


def one_of_each(prompts: Sequence[str]) -> list[Strategy]:
    """With difficulties of these prompts, where a strategy asks for some."""
    rates = {prompt: (index + 1) / (len(prompts) + 1) for index, prompt in enumerate(prompts)}
    return [Curriculum(solve_rates=rates) if isinstance(strategy, Curriculum) else strategy for strategy in examples()]


def beside(strategy: Strategy) -> dict[str, Any]:
    """Arguments of `ExplorationTrainer` that it may need."""
    options: dict[str, Any] = {"strategies": [strategy], "answers": lambda completions, **_: list(completions)}
    if strategy.needs_interpreter:
        from tests.training.tool_policy import calculator

        options["interpreter"] = calculator()
    return options


def unlike(expected: dict[str, str | None], done: dict[str, str], words: dict[str, str]) -> list[str]:
    """Where the table and the trainer disagree.

    Args:
        told: The table's reason against each strategy; None where it runs.
        done: What the trainer said against it; empty where it took a step.
        words: For each reason of the table, words that the trainer says in that case.
    """
    return [
        f"{name}: the table says {reason or 'runs'!r}, the trainer {done[name] or 'runs'!r}"
        for name, reason in expected.items()
        if (done[name] if reason is None else words[reason] not in done[name])
    ]
