"""What is asked, and how an answer is verified."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from explorl.tasks.base import Problem, Prompt, Task, Verdict, opens_think, unknown
from explorl.tasks.countdown import Countdown, CountdownMini

__all__ = ["TASKS", "Countdown", "CountdownMini", "Problem", "Prompt", "Task", "Verdict", "get_task", "opens_think"]

TASKS = {"countdown": Countdown, "countdown-mini": CountdownMini}


def get_task(name: str, **options: Any) -> Task:
    """The task of that name; the options are the fields of its class."""
    if name not in TASKS:
        raise unknown("task", name, TASKS)
    known = {field.name for field in fields(TASKS[name])} - {"name"}
    for option in options:
        if option not in known:
            raise unknown(f"option of task {name!r}:", option, known)
    return TASKS[name](**options)
