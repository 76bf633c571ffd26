"""What an analysis of the lens is: a function of a run's records, with a sentence, tables and drawings of its result.

A result is a frozen dataclass; what cannot be computed is `Unavailable` with its reason, and the others still run. An
analysis of your own is an `Analysis` in a module, named to the command by its import path:

    explorl analyze RUN --only my_package.my_module:LENGTHS
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from explorl.analysis.lens_table import LensTable, NotRecorded
from explorl.core.plugins import PluginKind
from explorl.models import Policy
from explorl.stats import Table
from explorl.tasks import Task


@dataclass(frozen=True)
class Unavailable:
    """Why an analysis has no result."""

    reason: str


@dataclass
class Context:
    """What an analysis may use besides the records."""

    seed: int = 0
    """Of every random draw, so that the same run gives the same result."""
    load_policy: Callable[[], Policy] | None = None
    """Loads the policy that the run ended with, or the lone checkpoint."""
    load_task: Callable[[], Task] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    """What ``--option impact.samples=8`` gave, by these names."""
    say: Callable[[str], None] = lambda _: None
    """Tells the user what takes long."""
    used_options: set[str] = field(default_factory=set)
    """The options that an analysis has looked for."""
    _made: dict[str, Any] = field(default_factory=dict, repr=False)

    @cached_property
    def policy(self) -> Policy:
        """The policy; `NotRecorded` where there is none."""
        if self.load_policy is None:
            raise NotRecorded("there is no policy to sample from")
        return self.load_policy()

    @cached_property
    def task(self) -> Task:
        """The run's task; `NotRecorded` where there is none."""
        if self.load_task is None:
            raise NotRecorded("there is no task to judge answers by")
        return self.load_task()

    def cached(self, key: str, make: Callable[[], Any]) -> Any:
        """What `make` gives, computed the first time that the key is asked for."""
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    def option(self, analysis: str, name: str, default: Any) -> Any:
        """An option of an analysis, as the type of its default."""
        key = f"{analysis}.{name}"
        self.used_options.add(key)
        if key not in self.options:
            return default
        value = self.options[key]
        try:
            if type(default) is int and (isinstance(value, bool) or int(value) != float(value)):
                raise ValueError
            return type(default)(value)
        except (TypeError, ValueError, OverflowError):
            raise ValueError(f"{key} is {value!r}; use a value like {default!r}") from None


@dataclass(frozen=True)
class Drawing:
    """A picture to be drawn: ``draw(figure, palette)`` fills a matplotlib figure with a palette's colours."""

    name: str
    """Of its file, such as ``stages``."""
    title: str
    caption: str
    """What there is to see, with the numbers that the picture shows."""
    draw: Callable[[Any, Any], None]
    size: tuple[float, float] = (4.8, 3.1)
    """Inches."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "caption", typeset(self.caption))


def typeset(text: str) -> str:
    """A text whose negative numbers have a minus sign instead of a hyphen; what is quoted stays as it is."""
    return re.sub(r"(?<![\w.'\"“-])-(?=\.?\d)", "−", text)


def _no_drawings(result: Any) -> Sequence[Drawing]:
    return ()


@dataclass(frozen=True)
class Analysis:
    """A named analysis; `function` returns a frozen dataclass or `Unavailable`, and may raise `NotRecorded`."""

    name: str
    title: str
    function: Callable[[LensTable, Context], Any]
    summary: Callable[[Any], str]
    """The result in a sentence or two."""
    tables: Callable[[Any], Mapping[str, Table]]
    """The numbers, by the name of their file."""
    drawings: Callable[[Any], Sequence[Drawing]] = _no_drawings
    lone: bool = False
    """Whether it needs no training history, so that it can be made of a lone checkpoint."""
    on_request: bool = False
    """Whether it runs only where it is named, because it takes long."""

    def run(self, table: LensTable, context: Context) -> Any:
        """The result, or why there is none."""
        try:
            return self.function(table, context)
        except NotRecorded as error:
            return Unavailable(str(error))


def find(name: str, known: Sequence[Analysis]) -> Analysis:
    """Return the analysis of a name among the known ones, or that of an import path, ``my_package.my_module:MINE``."""
    registry = {analysis.name: analysis for analysis in known}
    return PluginKind("analysis", registry, "my_package.my_module:LENGTHS", _refusal).find(name).value


def _refusal(value: Any) -> str | None:
    """Return why an object is no analysis; None where it is one."""
    if isinstance(value, Analysis):
        return None
    return f"is {value!r:.100}; name an explorl.analysis.lens.Analysis(name, …)"
