"""Tasks: problems, prompts and the verification of completions."""

from __future__ import annotations

from explorl.tasks.base import Problem, Prompt, Task, Verdict, opens_think
from explorl.tasks.choice.task import Choice
from explorl.tasks.code.task import Code
from explorl.tasks.countdown.task import Countdown, CountdownMini
from explorl.tasks.gym.task import Gym
from explorl.tasks.jsonl.task import Jsonl
from explorl.tasks.math.task import Math
from explorl.tasks.products import Products
from explorl.tasks.registry import TASKS, check_task, get_task, takes_option, task_type

__all__ = [
    "TASKS",
    "Choice",
    "Code",
    "Countdown",
    "CountdownMini",
    "Gym",
    "Jsonl",
    "Math",
    "Problem",
    "Products",
    "Prompt",
    "Task",
    "Verdict",
    "check_task",
    "get_task",
    "opens_think",
    "takes_option",
    "task_type",
]
