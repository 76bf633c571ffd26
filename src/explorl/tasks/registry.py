"""Tasks by name: one that is built in, one that an installed package offers, or the import path of one's own."""

from __future__ import annotations

import importlib
import inspect
import os
import traceback
from collections.abc import Callable, Iterable, Mapping
from importlib.metadata import entry_points
from inspect import Parameter
from math import isfinite
from pathlib import Path
from typing import Any, Literal

from explorl.tasks.base import Task, unknown
from explorl.tasks.choice import Choice
from explorl.tasks.code import Code
from explorl.tasks.countdown import Countdown, CountdownMini
from explorl.tasks.gym import Gym
from explorl.tasks.jsonl_task import Jsonl
from explorl.tasks.math import Math
from explorl.tasks.math_files import SOURCES
from explorl.tasks.products import Products

GROUP = "explorl.tasks"
"""The entry-point group under which other packages offer tasks."""

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

Maker = Callable[..., Any]
"""A subclass of `Task`, or a function that gives a task."""

_GOOD = "my_pkg.puzzles:Puzzle"
_CALLS: Mapping[str, tuple[tuple[Any, ...], dict[str, Any], str]] = {
    "problems": (("train",), {"limit": None}, "problems(self, split, *, limit=None)"),
    "prompt": ((None, None), {}, "prompt(self, problem, template=None)"),
    "verify": (("", None), {"opened": False}, "verify(self, completion, problem, *, opened=False)"),
}
"""How the methods that a task must have are called, and how they are written."""


def task_type(name: str) -> Maker:
    """What makes the task of that name: its class, or a function."""
    return _found(name)[0]


def get_task(name: str, **options: Any) -> Task:
    """The task of that name, or of an import path like ``my_pkg.puzzles:Puzzle``.

    The options are those of its class: the fields of a dataclass, or the arguments of ``__init__`` or of the function.
    """
    make, origin = _found(name)
    _check(name, make, options)
    if isinstance(folder := options.get("data_dir"), str | Path):
        options = {**options, "data_dir": type(folder)(os.path.expanduser(folder))}  # no shell has, in a file
    detail = name.partition(":")[2]
    if make is Math and detail:
        options = {"dataset": detail, **options}
    parameters = _parameters(make)
    if "name" in parameters and (origin != "path" or parameters["name"].default is Parameter.empty):
        options = {"name": name, **options}
    return make(**options) if origin == "here" else _made(name, make, options)


def check_task(name: str, options: Mapping[str, Any], *, beside: Iterable[str] = ()) -> None:
    """That there is a task of that name with these options; ``beside``: other keys that may have been meant."""
    _check(name, task_type(name), options, beside)


def takes_option(name: str, option: str) -> bool:
    """Whether the task of that name has the option."""
    parameters = _parameters(task_type(name))
    return option in parameters or any(one.kind is Parameter.VAR_KEYWORD for one in parameters.values())


def _check(name: str, make: Maker, options: Mapping[str, Any], beside: Iterable[str] = ()) -> None:
    parameters = _parameters(make)
    known = {key for key, one in parameters.items() if one.kind in _NAMED}
    takes_all = any(one.kind is Parameter.VAR_KEYWORD for one in parameters.values())
    for option in options:
        if option not in known - {"name"} and not takes_all:
            raise unknown(f"option of task {name!r}:", option, {*known, *beside} - {"name"})
    missing = [key for key in known - {"name"} - {*options} if parameters[key].default is Parameter.empty]
    if missing:
        raise ValueError(f"task {name!r} needs {' and '.join(sorted(missing))}; set task.{min(missing)}")


def _parameters(make: Maker) -> Mapping[str, Parameter]:
    try:
        return inspect.signature(make).parameters
    except (TypeError, ValueError):  # made in C, which says nothing; making it will tell
        return {"options": Parameter("options", Parameter.VAR_KEYWORD)}


# ---------------------------------------------------------------------------- tasks of others
def _found(name: str) -> tuple[Maker, Literal["here", "package", "path"]]:
    """What makes the task of that name, and where it comes from: Explorl, another package, or its import path."""
    kind = name.partition(":")[0]
    if kind == "gym" and ":" in name:
        return Gym, "here"
    if name in TASKS:
        return TASKS[name], "here"
    points = {point.name: point.value for point in entry_points(group=GROUP)}
    if name in points:
        return _imported(name, points[name]), "package"
    if kind == "math":
        raise unknown("task", name, TASKS)
    if not _is_path(name):
        raise ValueError(f"{unknown('task', name, [*TASKS, 'gym:<name>', *points])}; {_hint(name)}")
    return _imported(name, name), "path"


def _is_path(name: str) -> bool:
    module, separator, attribute = name.partition(":")
    parts = (*module.split("."), *attribute.split("."))
    return bool(separator) and not module.endswith(".py") and all(part.isidentifier() for part in parts)


def _hint(name: str) -> str:
    """How what the name may have meant is written."""
    module, _, attribute = name.removeprefix("./").replace("/", ".").replace(".py:", ":").rpartition(":")
    if not module:
        module, _, attribute = attribute.rpartition(".")
    if name.endswith(".jsonl"):
        return f"rows of a file are the task jsonl, with path: {name}"
    if module and _is_path(f"{module}:{attribute}"):
        return f"a task of your own is written {module}:{attribute}"
    return f"a task of your own is written like {_GOOD}"


def _imported(name: str, path: str) -> Maker:
    """The class or function at an import path; an error in words where it is not there, or is no task."""
    what = f"task {name!r}" if name == path else f"task {name!r} ({path})"
    module_name, _, attribute = path.partition(":")
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise ValueError(f"{what}: {module_name} needs {error.name!r}, which is not installed") from error
        raise ValueError(
            f"{what}: there is no module {error.name!r}; start in the folder that holds it, or name that folder in "
            f"PYTHONPATH, and write it like {_GOOD}"
        ) from error
    except (Exception, SystemExit) as error:
        raise ValueError(f"{what}: importing {module_name} failed: {_told(error)}") from error
    module = found
    for part in attribute.split("."):
        if not hasattr(found, part):
            tasks = ", ".join(key for key, value in vars(module).items() if _is_task(value))
            raise ValueError(f"{what}: {module_name} has no {attribute!r}; its tasks: {tasks or 'none'}")
        found = getattr(found, part)
    _check_maker(what, found)
    return found


def _is_task(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, Task) and value is not Task


def _check_maker(what: str, found: Any) -> None:
    if isinstance(found, Task) or not callable(found):
        kind = "made already" if isinstance(found, Task) else repr(found)
        raise ValueError(f"{what} is {kind}; name a subclass of explorl.tasks.Task, or a function that gives one made")
    if not isinstance(found, type):
        return
    if not _is_task(found):
        raise ValueError(f"{what} is no task; write class {found.__name__}(Task), with Task from explorl.tasks")
    if missing := sorted(getattr(found, "__abstractmethods__", ())):
        raise ValueError(f"{what} lacks {' and '.join(missing)}; a task has problems, prompt and verify")
    _check_methods(what, found, (None,))


def _made(name: str, make: Maker, options: Mapping[str, Any]) -> Task:
    try:
        task = make(**options)
    except (ValueError, FileNotFoundError):
        raise
    except Exception as error:
        raise ValueError(f"task {name!r} could not be made: {_told(error)}") from error
    if not isinstance(task, Task):
        raise ValueError(f"task {name!r} gave {task!r}; the function must return an instance of explorl.tasks.Task")
    _check_methods(f"task {name!r}", task, ())
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


def _check_methods(what: str, owner: Any, first: tuple[Any, ...]) -> None:
    """That problems, prompt and verify can be called; ``first``: what stands for ``self`` where a class is asked."""
    for method, (values, named, good) in _CALLS.items():
        try:
            inspect.signature(getattr(owner, method)).bind(*first, *values, **named)
        except TypeError:
            raise ValueError(f"{what}: {method} does not take what it is called with; write {good}") from None


def _told(error: BaseException) -> str:
    """An error of somebody else's code in a line, with its place."""
    if isinstance(error, SyntaxError):
        return f"{type(error).__name__}: {error.msg} ({Path(error.filename or '?').name}, line {error.lineno})"
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}{place}"
