"""Prompt templates for Countdown: as in Mecklenburg 2025, as chat messages, and a terse form for tiny policies."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from explorl.tasks.base import Prompt


def question(nums: Sequence[int], target: int) -> str:
    """Return the user's turn of the paper's Figure 1."""
    return (
        f"Using the numbers {list(nums)}, create an equation that equals {target}. You can use basic arithmetic "
        "operations (+, -, *, /) and each number can only be used once. Show your work in <think> </think> tags. And "
        "return the final answer in <answer> </answer> tags, for example <answer> (1 + 2) / 3 </answer>."
    )


def paper(nums: Sequence[int], target: int) -> str:
    """Return the prompt of the paper's Figure 1: the completion begins with ``<think>``."""
    return (
        "A conversation between User and Assistant. The user asks a question, and the Assistant solves it. The "
        "assistant first thinks about the reasoning process in the mind and then provides the user with the answer.\n"
        f"User: {question(nums, target)}\n"
        "Assistant: Let me solve this step by step.\n"
    )


def paper_opened(nums: Sequence[int], target: int) -> str:
    """Return the paper's prompt followed by ``<think>``, as in the paper's RL runs (§5.1)."""
    return paper(nums, target) + "<think>"


def chat(nums: Sequence[int], target: int) -> Prompt:
    """Return the same question as one user message, for the model's chat template."""
    return [{"role": "user", "content": question(nums, target)}]


def terse(nums: Sequence[int], target: int) -> str:
    """Return ``3 7 12=33`` and a newline: a few characters, for a character-level policy."""
    return f"{' '.join(map(str, nums))}={target}\n"


TEMPLATES: Mapping[str, Callable[[Sequence[int], int], Prompt]] = {
    "paper": paper,
    "paper-opened": paper_opened,
    "chat": chat,
    "terse": terse,
}
