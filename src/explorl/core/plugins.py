"""Find plug-ins by name: built in, from an installed package, or by an import path like my_pkg.puzzles:Puzzle.

    TASK = PluginKind("task", TASKS, "my_pkg.puzzles:Puzzle", refusal, group="explorl.tasks")
    TASK.find("countdown").value

A configuration may come from an untrusted source, and an import path can name any object of any module. So objects are
checked against the requirements of their kind before they are returned, and nothing is called here. Importing a module
runs it, which cannot be avoided; `working_folder` reports modules that are imported from the working folder.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import entry_points
from pathlib import Path
from types import BuiltinFunctionType, FunctionType
from typing import Any, Generic, Literal, TypeVar

from explorl.core.errors import ExplorlError

T = TypeVar("T")
Function = TypeVar("Function", bound=Callable[..., Any])

SEARCHES = "EXPLORL_WORKING_FOLDER"
"""Environment variable that tells child processes whether to search the working folder: 1 or 0."""
_MARK = "__explorl_plugin__"
_listeners: list[Callable[[str], None]] = []
"""Callbacks for imports of modules of the working folder; only the last one is called."""
_added: list[str] = []
"""Folders added to Python's path because a module there was named."""


class PluginError(ExplorlError, ValueError):
    """A plug-in that cannot be found or is invalid; the message names it and what to write."""


@dataclass(frozen=True)
class ResolvedPlugin(Generic[T]):
    """A plug-in and its origin: Explorl, an installed package's entry point, or an import path."""

    value: T
    origin: Literal["registry", "entry point", "path"]


@dataclass(frozen=True)
class PluginKind(Generic[T]):
    """A kind of plug-in: where to find them, and the check of its requirements."""

    name: str
    """The kind's name in errors, such as "task"."""
    registry: Mapping[str, T]
    """The plug-ins that are part of Explorl."""
    example: str
    """A valid import path, for errors."""
    refusal: Callable[[Any], str | None]
    """Return why an object is no plug-in of this kind, in words that follow its name, or None. Must not call it."""
    group: str = ""
    """The entry-point group of plug-ins of other packages."""

    def find(self, name: object, *, hint: str = "") -> ResolvedPlugin[T]:
        """Return the plug-in of a name, an entry point or an import path; ``hint`` ends the error if there is none."""
        if not isinstance(name, str):
            raise PluginError(f"the name of a {self.name} is {name!r}; give text, like {self.example}")
        if name in self.registry:
            return ResolvedPlugin(self.registry[name], "registry")
        points = self.points()
        if name in points:
            return ResolvedPlugin(self._load(points[name], f"{self.name} {name!r} ({points[name]})"), "entry point")
        if not is_path(name):
            hint = hint or f"name your own like {self.example}"
            raise PluginError(f"{unknown(self.name, name, [*self.registry, *points])} ({hint})")
        return ResolvedPlugin(self._load(name, f"{self.name} {name!r}"), "path")

    def points(self) -> dict[str, str]:
        """Return the import paths of plug-ins of installed packages, by name."""
        return {point.name: point.value for point in entry_points(group=self.group)} if self.group else {}

    def _load(self, path: str, subject: str) -> T:
        """Import the plug-in of an import path; ``subject`` begins its errors."""
        module_name, _, attribute = path.partition(":")
        module = _imported(module_name, subject, self.example)
        value: Any = module
        for number, part in enumerate(attribute.split(".")):
            try:
                value = _inner(value, part) if number else getattr(value, part)
            except AttributeError:
                value = None
            except Exception as error:  # raised by a module's __getattr__
                raise PluginError(f"{subject}: {module_name} failed: {describe_error(error)}") from error
            if value is None:
                fitting = ", ".join(key for key, value in vars(module).items() if self.refusal(value) is None)
                raise PluginError(f"{subject}: {module_name} has no {attribute!r} to use; it has {fitting or 'none'}")
        if why := self.refusal(value):
            raise PluginError(f"{subject} {why}")
        return value


def _inner(owner: Any, name: str) -> Any:
    """Return what a class holds under a name. Descriptors and anything but classes could compute what they hand out."""
    if not is_class(owner, object):
        return None
    value = inspect.getattr_static(owner, name)
    return value.__func__ if type(value) is staticmethod else value


def is_path(name: str) -> bool:
    """Return whether a name is written as an import path, package.module:Class."""
    module, separator, attribute = name.partition(":")
    parts = (*module.split("."), *attribute.split("."))
    return bool(separator) and not module.endswith(".py") and all(part.isidentifier() for part in parts)


def mark(function: Function, kind: str) -> Function:
    """Mark a function as a plug-in of a kind, which it cannot show by a base class."""
    setattr(function, _MARK, kind)
    return function


def is_marked(value: object, kind: str) -> bool:
    """Return whether an object is a function that `mark` has marked as this kind."""
    return is_object(value, FunctionType) and vars(value).get(_MARK) == kind


# ---------------------------------------------------------------------------- looking at objects of others
def is_class(value: object, base: type[Any]) -> bool:
    """Return whether an object is a subclass of a class. Unlike `isinstance`, it does not ask the object."""
    return issubclass(type(value), type) and issubclass(value, base)  # type: ignore[arg-type]


def is_object(value: object, kind: Any) -> bool:
    """Return whether an object is of a class, whatever its own `__class__` says."""
    return issubclass(type(value), kind)


_PLAIN = (bool, int, float, str, type(None), FunctionType, BuiltinFunctionType)


def safe_repr(value: object) -> str:
    """Return an object as errors show it, without calling a `__repr__` of its own."""
    if is_class(value, object):
        text = type.__repr__(value)
    else:
        text = repr(value) if type(value) in _PLAIN else object.__repr__(value)
    return text[:100]


# ---------------------------------------------------------------------------- did you mean
def nearest(word: object, known: Iterable[object]) -> str | None:
    """Return the known word that is most similar to another one, if any is."""
    words = {str(candidate).lower(): str(candidate) for candidate in known}
    close = difflib.get_close_matches(str(word).lower(), list(words), n=1, cutoff=0.6)
    return words[close[0]] if close else None


def suggest(word: object, known: Iterable[object]) -> str:
    """Return what to write instead of an unknown word: the nearest known one, or all of them."""
    names = sorted(map(str, known))
    close = nearest(word, names)
    return f"did you mean {close!r}?" if close else f"known: {', '.join(names) or 'none'}"


def unknown(kind: str, word: object, known: Iterable[object]) -> ValueError:
    """Return the error for an unknown word, with what to write instead."""
    return PluginError(f"unknown {kind} {word!r}; {suggest(word, known)}")


# ---------------------------------------------------------------------------- importing
@contextmanager
def working_folder(say: Callable[[str], None]) -> Iterator[None]:
    """Let import paths name modules of the working folder, as the commands do, and report each one to ``say``.

    The folder is added to the end of Python's path when the first of them is imported. So a module there that nothing
    names is never imported, whatever its name. Python's option -P excludes the folder.
    """
    added = len(_added)
    _listeners.append(say)
    try:
        yield
    finally:
        _listeners.pop()
        for folder in _added[added:]:
            _added.remove(folder)
            with suppress(ValueError):
                sys.path.remove(folder)


def searches() -> bool:
    """Return whether commands search the working folder for named modules: not if Python was started with -P."""
    return not sys.flags.safe_path if SEARCHES not in os.environ else os.environ[SEARCHES] == "1"


def child_environment() -> dict[str, str]:
    """Return the environment variables that make ``python -m`` treat the working folder as this process does."""
    return {"PYTHONSAFEPATH": "1", SEARCHES: str(int(searches()))}


def _imported(name: str, subject: str, example: str) -> Any:
    """Import a module; raise PluginError if there is none, or importing it fails."""
    _reject_programs(name, subject)
    try:
        _search_working_folder(name, subject)
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise PluginError(f"{subject}: {name} needs {error.name!r}, which is not installed") from error
        raise PluginError(
            f"{subject}: there is no module {error.name!r}; start in the folder that has it, or add that folder to "
            f"PYTHONPATH, and write it like {example}"
        ) from error
    except (Exception, SystemExit) as error:
        raise PluginError(f"{subject}: importing {name} failed: {describe_error(error)}") from error


def _reject_programs(name: str, subject: str) -> None:
    """Reject Python's library and programs: they contain no plug-ins, and some act when they are imported."""
    top = name.partition(".")[0]
    if top in sys.stdlib_module_names:
        raise PluginError(f"{subject}: {top} is part of Python's library; name a module of your own")
    if "__main__" in name.split("."):
        raise PluginError(f"{subject}: {name} is a program; name a module")


def _search_working_folder(name: str, subject: str) -> None:
    """Add the working folder to Python's path if only it has the module, and report a module of it."""
    if not _listeners or name in sys.modules:
        return
    folder, top, spec = os.getcwd(), name.partition(".")[0], None
    with suppress(ValueError):  # a module created in memory has no spec
        spec = importlib.util.find_spec(top)
    if spec is None and searches() and (spec := PathFinder.find_spec(top, [folder])) is not None:
        sys.path.append(folder)
        _added.append(folder)
    if spec is not None and _folder_of(spec) == os.path.realpath(folder):
        _listeners[-1](f"importing {name} from the working folder {folder}, as {subject} says")


def _folder_of(spec: ModuleSpec) -> str | None:
    """Return the folder that contains a top-level module or package."""
    packages = list(spec.submodule_search_locations or ())
    files = packages or ([spec.origin] if spec.has_location and spec.origin else [])
    return os.path.realpath(os.path.dirname(files[0])) if files else None


def describe_error(error: BaseException) -> str:
    """Return an error of a plug-in's code in one line, with its place."""
    if isinstance(error, SyntaxError):
        return f"{type(error).__name__}: {error.msg} ({Path(error.filename or '?').name}, line {error.lineno})"
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}{place}"
