"""Tasks by name: one that is built in, one that an installed package offers, or the import path of one's own."""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterable, Mapping
from inspect import Parameter
from math import isfinite
from pathlib import Path
from types import FunctionType
from typing import Any

from explorl.core.plugins import (
    PluginKind,
    ResolvedPlugin,
    describe_error,
    is_class,
    is_object,
    is_path,
    safe_repr,
    unknown,
)
from explorl.tasks.base import Task
from explorl.tasks.choice.task import Choice
from explorl.tasks.code.task import Code
from explorl.tasks.countdown.task import Countdown, CountdownMini
from explorl.tasks.gym.task import Gym
from explorl.tasks.jsonl.task import Jsonl
from explorl.tasks.math.benchmark_files import SOURCES
from explorl.tasks.math.task import Math
from explorl.tasks.products import Products

TASKS: dict[str, type[Any]] = {
    "countdown": Countdown,
    "countdown-mini": CountdownMini,
    "math": Math,
    **{f"math:{dataset}": Math for dataset in SOURCES},
    "choice": Choice,
    "code": Code,
    "jsonl": Jsonl,
    "products": Products,
}
"""Tasks by name; and ``gym:<name>`` is any data set of reasoning-gym."""

_NAMED = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)

_CALLS: Mapping[str, tuple[tuple[Any, ...], dict[str, Any], str]] = {
    "problems": (("train",), {"limit": None}, "problems(self, split, *, limit=None)"),
    "prompt": ((None, None), {}, "prompt(self, problem, template=None)"),
    "verify": (("", None), {"opened": False}, "verify(self, completion, problem, *, opened=False)"),
}
"""How the methods that a task must have are called, and how they are written."""


def task_type(name: str) -> type[Any]:
    """Return the class of the task of that name, which is not called for it."""
    return _find(name).value


def get_task(name: str, **options: Any) -> Task:
    """Make the task of that name, or of an import path like ``my_pkg.puzzles:Puzzle``.

    The options are those of its class: the fields of a dataclass, or the arguments of ``__init__``.
    """
    found = _find(name)
    make = found.value
    _check(name, make, options)
    if isinstance(folder := options.get("data_dir"), str | Path):
        options = {**options, "data_dir": type(folder)(os.path.expanduser(folder))}  # no shell has, in a file
    detail = name.partition(":")[2]
    if make is Math and detail:
        options = {"dataset": detail, **options}
    parameters = _parameters(make)
    if "name" in parameters and (found.origin != "path" or parameters["name"].default is Parameter.empty):
        options = {"name": name, **options}
    return make(**options) if found.origin == "registry" else _made(name, make, options)


def check_task(name: str, options: Mapping[str, Any], *, beside: Iterable[str] = ()) -> None:
    """That there is a task of that name with these options; ``beside``: other keys that may have been meant."""
    _check(name, task_type(name), options, beside)


def takes_option(name: str, option: str) -> bool:
    """Whether the task of that name has the option."""
    parameters = _parameters(task_type(name))
    return option in parameters or any(one.kind is Parameter.VAR_KEYWORD for one in parameters.values())


def _check(name: str, make: type[Any], options: Mapping[str, Any], beside: Iterable[str] = ()) -> None:
    parameters = _parameters(make)
    known = {key for key, one in parameters.items() if one.kind in _NAMED}
    takes_all = any(one.kind is Parameter.VAR_KEYWORD for one in parameters.values())
    for option in options:
        if option not in known - {"name"} and not takes_all:
            raise unknown(f"option of task {name!r}:", option, {*known, *beside} - {"name"})
    missing = [key for key in known - {"name"} - {*options} if parameters[key].default is Parameter.empty]
    if missing:
        raise ValueError(f"task {name!r} needs {' and '.join(sorted(missing))}; set task.{min(missing)}")


def _parameters(make: type[Any]) -> Mapping[str, Parameter]:
    try:
        return inspect.signature(make).parameters
    except (TypeError, ValueError):  # made in C, which says nothing; making it will tell
        return {"options": Parameter("options", Parameter.VAR_KEYWORD)}


# ---------------------------------------------------------------------------- tasks of others
def _find(name: str) -> ResolvedPlugin[type[Any]]:
    """Return the class of a task's name, and where it comes from."""
    if isinstance(name, str) and name.startswith("gym:"):
        return ResolvedPlugin(Gym, "registry")
    if isinstance(name, str) and name.startswith("math:") and name not in TASKS:
        raise unknown("task", name, TASKS)
    return KIND.find(name, hint=_hint(name))


def _hint(name: object) -> str:
    """Return how what the name may have meant is written."""
    if not isinstance(name, str):
        return ""
    module, _, attribute = name.removeprefix("./").replace("/", ".").replace(".py:", ":").rpartition(":")
    if not module:
        module, _, attribute = attribute.rpartition(".")
    if name.endswith(".jsonl"):
        return f"rows of a file are the task jsonl, with path: {name}"
    if module and is_path(f"{module}:{attribute}"):
        return f"a task of your own is written {module}:{attribute}"
    return f"gym:<name> is a data set of reasoning-gym, and a task of your own is written like {KIND.example}"


def _refusal(value: Any) -> str | None:
    """Return why an object is no class of tasks; None where it is one."""
    if is_object(value, Task):
        return "is a task that is made already; name its class, which is made with the options of the configuration"
    if is_object(value, FunctionType):
        return (
            f"is a function, and anything could be called so; name a class: class {value.__name__.title()}(Task), with "
            "Task from explorl.tasks and the function's arguments in its __init__"
        )
    if not is_class(value, object):
        return f"is {safe_repr(value)}; name a subclass of explorl.tasks.Task"
    if not is_class(value, Task):
        return f"is no task; write class {value.__name__}(Task), with Task from explorl.tasks"
    if missing := sorted(getattr(value, "__abstractmethods__", ())):
        return f"lacks {' and '.join(missing)}; a task has problems, prompt and verify"
    return _wrong_method(value, (None,))


KIND: PluginKind[type[Any]] = PluginKind("task", TASKS, "my_pkg.puzzles:Puzzle", _refusal, "explorl.tasks")


def _made(name: str, make: type[Any], options: Mapping[str, Any]) -> Task:
    try:
        task = make(**options)
    except (ValueError, FileNotFoundError):
        raise
    except Exception as error:
        raise ValueError(f"task {name!r} could not be made: {describe_error(error)}") from error
    if not isinstance(task, Task):  # a class may have a __new__ of its own
        raise ValueError(f"task {name!r} gave {task!r:.100}; its class must make an instance of explorl.tasks.Task")
    if wrong := _wrong_method(task, ()):
        raise ValueError(f"task {name!r} {wrong}")
    for attribute in ("splits", "templates"):
        value = getattr(task, attribute)
        if isinstance(value, str) or not all(isinstance(one, str) for one in value):
            raise ValueError(f"task {name!r}: {attribute} is {value!r}; give names, like ('train', 'holdout')")
    for part, weight in task.reward_parts.items():
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not isfinite(weight):
            raise ValueError(f"task {name!r}: reward_parts has {weight!r} for {part!r}; give its weight, like 1.0")
    if task.correct_part not in task.reward_parts:
        raise ValueError(
            f"task {name!r}: correct_part is {task.correct_part!r}, which reward_parts has not; set it to one of "
            f"{', '.join(task.reward_parts)}"
        )
    return task


def _wrong_method(owner: Any, first: tuple[Any, ...]) -> str | None:
    """Return which of a task's methods cannot be called, and how it is written; ``first``: ``self``, of a class."""
    for method, (values, named, good) in _CALLS.items():
        try:
            inspect.signature(getattr(owner, method)).bind(*first, *values, **named)
        except TypeError:
            return f"cannot be used: {method} does not take what it is called with; write {good}"
    return None
