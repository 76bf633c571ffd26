"""Find tasks by name: a built-in task, a task of an installed package, or an import path."""

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
"""Built-in tasks by name. In addition, ``gym:<name>`` is any data set of reasoning-gym."""

_NAMED = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)

_CALLS: Mapping[str, tuple[tuple[Any, ...], dict[str, Any], str]] = {
    "problems": (("train",), {"limit": None}, "problems(self, split, *, limit=None)"),
    "prompt": ((None, None), {}, "prompt(self, problem, template=None)"),
    "verify": (("", None), {"opened": False}, "verify(self, completion, problem, *, opened=False)"),
}
"""For each required method: the arguments of a call, and the signature to suggest in errors."""


def task_type(name: str) -> type[Any]:
    """Return the class of a task without creating an instance."""
    return _find(name).value


def get_task(name: str, **options: Any) -> Task:
    """Create a task by its name or by an import path like ``my_pkg.puzzles:Puzzle``.

    The options are those of its class: the fields of a dataclass, or the arguments of ``__init__``.
    """
    plugin = _find(name)
    task_class = plugin.value
    _check_options(name, task_class, options)
    if isinstance(folder := options.get("data_dir"), str | Path):
        options = {**options, "data_dir": type(folder)(os.path.expanduser(folder))}  # in YAML, no shell expands ~
    detail = name.partition(":")[2]
    if task_class is Math and detail:
        options = {"dataset": detail, **options}
    parameters = _parameters(task_class)
    if "name" in parameters and (plugin.origin != "path" or parameters["name"].default is Parameter.empty):
        options = {"name": name, **options}
    return task_class(**options) if plugin.origin == "registry" else _create_external(name, task_class, options)


def check_task(name: str, options: Mapping[str, Any], *, beside: Iterable[str] = ()) -> None:
    """Raise ValueError unless there is a task of that name with these options; suggest also the keys in ``beside``."""
    _check_options(name, task_type(name), options, beside)


def takes_option(name: str, option: str) -> bool:
    """Return whether the task of that name has the option."""
    parameters = _parameters(task_type(name))
    return option in parameters or _takes_any_option(parameters)


def _check_options(name: str, task_class: type[Any], options: Mapping[str, Any], beside: Iterable[str] = ()) -> None:
    """Raise ValueError for unknown and for missing options."""
    parameters = _parameters(task_class)
    named = {key for key, parameter in parameters.items() if parameter.kind in _NAMED}
    for option in options:
        if option not in named - {"name"} and not _takes_any_option(parameters):
            raise unknown(f"option of task {name!r}:", option, {*named, *beside} - {"name"})
    missing = [key for key in named - {"name"} - {*options} if parameters[key].default is Parameter.empty]
    if missing:
        raise ValueError(f"task {name!r} needs {' and '.join(sorted(missing))}; set task.{min(missing)}")


def _parameters(task_class: type[Any]) -> Mapping[str, Parameter]:
    try:
        return inspect.signature(task_class).parameters
    except (TypeError, ValueError):  # a class written in C without a signature: creating it will show what is wrong
        return {"options": Parameter("options", Parameter.VAR_KEYWORD)}


def _takes_any_option(parameters: Mapping[str, Parameter]) -> bool:
    return any(parameter.kind is Parameter.VAR_KEYWORD for parameter in parameters.values())


# ---------------------------------------------------------------------------- external tasks
def _find(name: str) -> ResolvedPlugin[type[Any]]:
    """Return the class of a task by its name, and its origin."""
    if isinstance(name, str) and name.startswith("gym:"):
        return ResolvedPlugin(Gym, "registry")
    if isinstance(name, str) and name.startswith("math:") and name not in TASKS:
        raise unknown("task", name, TASKS)
    return KIND.find(name, hint=_hint(name))


def _hint(name: object) -> str:
    """Return a suggestion for an unknown name."""
    if not isinstance(name, str):
        return ""
    module, _, attribute = name.removeprefix("./").replace("/", ".").replace(".py:", ":").rpartition(":")
    if not module:
        module, _, attribute = attribute.rpartition(".")
    if name.endswith(".jsonl"):
        return f"to use rows of a file, set the task jsonl and path: {name}"
    if module and is_path(f"{module}:{attribute}"):
        return f"write an import path as {module}:{attribute}"
    return f"gym:<name> is a data set of reasoning-gym; write an import path like {KIND.example}"


def _refusal(value: Any) -> str | None:
    """Return why an object is not a task class, or None if it is one."""
    if is_object(value, Task):
        return "is an instance of a task; name its class, which is instantiated with the options of the configuration"
    if is_object(value, FunctionType):
        return (
            f"is a function; name a class instead: class {value.__name__.title()}(Task), with Task from explorl.tasks "
            "and the function's arguments in its __init__"
        )
    if not is_class(value, object):
        return f"is {safe_repr(value)}; name a subclass of explorl.tasks.Task"
    if not is_class(value, Task):
        return f"is not a task; write class {value.__name__}(Task), with Task from explorl.tasks"
    if missing := sorted(getattr(value, "__abstractmethods__", ())):
        return f"lacks {' and '.join(missing)}; a task needs problems, prompt and verify"
    return _wrong_method(value, (None,))


KIND: PluginKind[type[Any]] = PluginKind("task", TASKS, "my_pkg.puzzles:Puzzle", _refusal, "explorl.tasks")


def _create_external(name: str, task_class: type[Any], options: Mapping[str, Any]) -> Task:
    """Return an instance of an external task class; raise ValueError if it does not implement the interface."""
    try:
        task = task_class(**options)
    except (ValueError, FileNotFoundError):
        raise
    except Exception as error:
        raise ValueError(f"task {name!r} could not be created: {describe_error(error)}") from error
    if not isinstance(task, Task):  # a class may define __new__
        raise ValueError(
            f"task {name!r} returned {task!r:.100}; its class must create an instance of explorl.tasks.Task"
        )
    if wrong := _wrong_method(task, ()):
        raise ValueError(f"task {name!r} {wrong}")
    for attribute in ("splits", "templates"):
        value = getattr(task, attribute)
        if isinstance(value, str) or not all(isinstance(item, str) for item in value):
            raise ValueError(f"task {name!r}: {attribute} is {value!r}; use names, like ('train', 'holdout')")
    for part, weight in task.reward_parts.items():
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not isfinite(weight):
            raise ValueError(f"task {name!r}: reward_parts has {weight!r} for {part!r}; use a weight like 1.0")
    if task.correct_part not in task.reward_parts:
        raise ValueError(
            f"task {name!r}: correct_part is {task.correct_part!r}, which is not in reward_parts; set it to one of "
            f"{', '.join(task.reward_parts)}"
        )
    return task


def _wrong_method(owner: Any, first: tuple[Any, ...]) -> str | None:
    """Return which method has the wrong signature, or None. ``first`` is ``(self,)`` for a class, else empty."""
    for method, (values, named, signature) in _CALLS.items():
        try:
            inspect.signature(getattr(owner, method)).bind(*first, *values, **named)
        except TypeError:
            return f"cannot be used: {method} does not accept the arguments it is called with; write {signature}"
    return None
