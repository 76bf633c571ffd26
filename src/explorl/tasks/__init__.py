"""What is asked, and how an answer is verified."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from explorl.tasks.base import Problem, Prompt, Task, Verdict, opens_think, unknown
from explorl.tasks.choice import Choice
from explorl.tasks.code import Code
from explorl.tasks.countdown import Countdown, CountdownMini
from explorl.tasks.gym import Gym
from explorl.tasks.math import Math
from explorl.tasks.math_files import SOURCES

__all__ = [
    "TASKS",
    "Choice",
    "Code",
    "Countdown",
    "CountdownMini",
    "Gym",
    "Math",
    "Problem",
    "Prompt",
    "Task",
    "Verdict",
    "get_task",
    "opens_think",
    "task_type",
]

TASKS: dict[str, type[Any]] = {
    "countdown": Countdown,
    "countdown-mini": CountdownMini,
    "math": Math,
    **{f"math:{dataset}": Math for dataset in SOURCES},
    "choice": Choice,
    "code": Code,
}
"""Tasks by name; and ``gym:<name>`` is any data set of reasoning-gym."""


def task_type(name: str) -> type[Any]:
    """The class of the task of that name."""
    task = Gym if name.startswith("gym:") else TASKS.get(name)
    if task is None:
        raise unknown("task", name, [*TASKS, "gym:<name>"])
    return task


def get_task(name: str, **options: Any) -> Task:
    """The task of that name; the options are the fields of its class."""
    task = task_type(name)
    kind, _, detail = name.partition(":")
    known = {field.name for field in fields(task)} - {"name"}
    for option in options:
        if option not in known:
            raise unknown(f"option of task {name!r}:", option, known)
    if kind == "math" and detail:
        options = {"dataset": detail, **options}
    return task(name=name, **options)
