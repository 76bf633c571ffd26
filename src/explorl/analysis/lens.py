"""Define an analysis of the lens: a function of a run's records, with a sentence, tables and drawings of its result.

A result is a frozen dataclass, or `Unavailable` with the reason why it cannot be computed; the other analyses still
run. A custom analysis is an `Analysis` in a module, given to the command by its import path:

    explorl analyze RUN --only my_package.my_module:LENGTHS
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from explorl.analysis.lens_table import LensTable, NotRecorded
from explorl.core.plugins import PluginKind, is_object, safe_repr
from explorl.models import Policy
from explorl.stats import Table
from explorl.tasks import Task


@dataclass(frozen=True)
class Unavailable:
    """The reason why an analysis has no result."""

    reason: str


@dataclass
class Context:
    """Everything that an analysis may use besides the records."""

    seed: int = 0
    """Seed of every random draw, so that the same run gives the same result."""
    load_policy: Callable[[], Policy] | None = None
    """Loads the final policy of the run, or the lone checkpoint."""
    load_task: Callable[[], Task] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options by name, such as ``impact.samples`` from ``--option impact.samples=8``."""
    say: Callable[[str], None] = lambda _: None
    """Reports progress to the user."""
    used_options: set[str] = field(default_factory=set)
    """The options that analyses have read."""
    _cache: dict[str, Any] = field(default_factory=dict, repr=False)

    @cached_property
    def policy(self) -> Policy:
        """The policy; raises `NotRecorded` if there is none."""
        if self.load_policy is None:
            raise NotRecorded("there is no policy to sample from")
        return self.load_policy()

    @cached_property
    def task(self) -> Task:
        """The run's task; raises `NotRecorded` if there is none."""
        if self.load_task is None:
            raise NotRecorded("there is no task to verify completions with")
        return self.load_task()

    def cached(self, key: str, make: Callable[[], Any]) -> Any:
        """Return the result of `make`, which is computed once per key."""
        if key not in self._cache:
            self._cache[key] = make()
        return self._cache[key]

    def option(self, analysis: str, name: str, default: Any) -> Any:
        """Return an option of an analysis, converted to the type of its default; raise ValueError if that fails."""
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
    """A figure to draw: ``draw(figure, palette)`` fills a matplotlib figure with the colours of a palette."""

    name: str
    """Name of its file, such as ``stages``."""
    title: str
    caption: str
    """Description of the figure, with the numbers that it shows."""
    draw: Callable[[Any, Any], None]
    size: tuple[float, float] = (4.8, 3.1)
    """Width and height in inches."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "caption", typeset(self.caption))


def typeset(text: str) -> str:
    """Return text with minus signs instead of hyphens in negative numbers, except in quotations."""
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
    """Describes the result in a sentence or two."""
    tables: Callable[[Any], Mapping[str, Table]]
    """Returns tables of the numbers, by file name."""
    drawings: Callable[[Any], Sequence[Drawing]] = _no_drawings
    lone: bool = False
    """True if it needs no training history, so that it also works for a lone checkpoint."""
    on_request: bool = False
    """True if it runs only when named, because it takes long."""

    def run(self, table: LensTable, context: Context) -> Any:
        """Return the result, or `Unavailable` if records are missing."""
        try:
            return self.function(table, context)
        except NotRecorded as error:
            return Unavailable(str(error))


def find(name: str, analyses: Sequence[Analysis]) -> Analysis:
    """Return the analysis with this name, or with this import path, such as ``my_package.my_module:LENGTHS``."""
    registry = {analysis.name: analysis for analysis in analyses}
    return PluginKind("analysis", registry, "my_package.my_module:LENGTHS", _refusal_reason).find(name).value


def _refusal_reason(value: Any) -> str | None:
    """Return why an object is not an analysis; None if it is one."""
    if is_object(value, Analysis):
        return None
    return f"is {safe_repr(value)}; name an explorl.analysis.lens.Analysis(name, …)"
