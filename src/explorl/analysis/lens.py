"""Define an analysis of the lens: a function of a run's records that returns `Findings`.

It returns `Unavailable` with a reason if nothing can be computed; the other analyses still run. A custom analysis is an
`Analysis` in a module, given to the command by its import path:

    explorl analyze RUN --only my_package.my_module:LENGTHS
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from explorl.analysis.charts import Chart, typeset
from explorl.analysis.lens_table import LensTable, NotRecorded
from explorl.core.plugins import PluginKind, is_object, safe_repr
from explorl.models import Policy
from explorl.stats import Cell, Table
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
class Finding:
    """A number that an analysis found."""

    name: str
    """Name by which code and analysis.json refer to it."""
    label: str
    """Name in tables."""
    value: Cell
    unit: str = ""


@dataclass(frozen=True)
class Findings:
    """What an analysis found: in words, in numbers and in charts."""

    sentence: str
    """The result in a sentence or two."""
    tables: Mapping[str, Table] = field(default_factory=dict)
    """Tables by file name; the one with a chart's name has the numbers of that chart."""
    charts: Sequence[Chart] = ()
    values: Mapping[str, Any] = field(default_factory=dict)
    """Results by name, for other analyses and for analysis.json."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "sentence", typeset(self.sentence))
        charts = tuple(replace(chart, caption=typeset(chart.caption)) for chart in self.charts)
        object.__setattr__(self, "charts", charts)

    def __getitem__(self, name: str) -> Any:
        return self.values[name]


def finding_table(
    title: str,
    findings: Sequence[Finding],
    *,
    columns: Sequence[str] = ("measure", "value", "p of 0"),
    number: str = ".3f",
) -> Table:
    """Return a table with a row per finding: its name with the unit, its value and the p value of an effect."""
    rows = [
        [f"{each.label} ({each.unit})" if each.unit else each.label, each.value, getattr(each.value, "p", None)]
        for each in findings
    ]
    return Table(columns, [row[: len(columns)] for row in rows], title, number)


def series_table(title: str, series: Mapping[str, Iterable[Any]], *, number: str = ".3f") -> Table:
    """Return a table of series side by side, by their names."""
    return Table([*series], [list(row) for row in zip(*series.values(), strict=True)], title, number)


def values_of(findings: Iterable[Finding]) -> dict[str, Any]:
    """Return the values of findings by name."""
    return {finding.name: finding.value for finding in findings}


@dataclass(frozen=True)
class Analysis:
    """A named analysis; `function` returns `Findings` or `Unavailable`, and may raise `NotRecorded`."""

    name: str
    title: str
    function: Callable[[LensTable, Context], Findings | Unavailable]
    lone: bool = False
    """True if it needs no training history, so that it also works for a lone checkpoint."""
    on_request: bool = False
    """True if it runs only when named, because it takes long."""

    def run(self, table: LensTable, context: Context) -> Findings | Unavailable:
        """Return the findings, or `Unavailable` if records are missing."""
        try:
            result = self.function(table, context)
        except NotRecorded as error:
            return Unavailable(str(error))
        if not isinstance(result, Findings | Unavailable):
            raise TypeError(f"the analysis returned a {type(result).__name__}; return Findings or Unavailable")
        return result


def find(name: str, analyses: Sequence[Analysis]) -> Analysis:
    """Return the analysis with this name, or with this import path, such as ``my_package.my_module:LENGTHS``."""
    registry = {analysis.name: analysis for analysis in analyses}
    return PluginKind("analysis", registry, "my_package.my_module:LENGTHS", _refusal_reason).find(name).value


def _refusal_reason(value: Any) -> str | None:
    """Return why an object is not an analysis; None if it is one."""
    if is_object(value, Analysis):
        return None
    return f"is {safe_repr(value)}; name an explorl.analysis.lens.Analysis(name, …)"
