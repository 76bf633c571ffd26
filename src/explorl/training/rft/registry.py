"""Resolve filters and selectors of a configuration by name or import path."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from inspect import Parameter
from typing import Any

from explorl.core.plugins import PluginKind, is_marked, safe_repr
from explorl.training.rft.filters import FILTERS, Filter
from explorl.training.rft.selectors import SELECTORS, Selector

Spec = str | Mapping[str, Any]
"""``has_digit``, ``{max_redundancy: {limit: 0.31}}`` or ``{max_redundancy: 0.31}``; an import path may be the name."""


def build_filters(specs: Sequence[Spec]) -> list[tuple[str, Filter]]:
    """Return the filters of a configuration with their names, in order."""
    if isinstance(specs, str | Mapping):
        raise ValueError(f"filters must be a list, such as [has_answer, has_digit]; got {specs!r}")
    built = [build(FILTER, spec, positional=1) for spec in specs]
    for (name, keep), spec in zip(built, specs, strict=True):
        if name_of(spec) in FILTERS:
            _try(name, partial(keep, []))  # report wrong hyperparameters before anything is sampled
    return built


def build_selector(spec: Spec) -> tuple[str, Selector]:
    """Return the selector of a configuration with its name."""
    return build(SELECTOR, spec, positional=2)


def _must_be_marked(name: str) -> Callable[[Any], str | None]:
    def refusal(value: Any) -> str | None:
        """Return why an object is not a plug-in of this kind, or None."""
        if is_marked(value, name):
            return None
        return f"is {safe_repr(value)}, not a function with @rft_{name} from explorl.training.rft.{name}s above it"

    return refusal


FILTER: PluginKind[Callable[..., Any]] = PluginKind("filter", FILTERS, "my_pkg.rules:polite", _must_be_marked("filter"))
SELECTOR: PluginKind[Callable[..., Any]] = PluginKind(
    "selector", SELECTORS, "my_pkg.rules:rare", _must_be_marked("selector")
)


def build(kinds: PluginKind[Callable[..., Any]], spec: Spec, *, positional: int) -> tuple[str, Callable[..., Any]]:
    """Return a function's name and the function with its hyperparameters bound.

    ``positional`` is the number of arguments that the caller will pass.
    """
    kind = kinds.name
    name, settings = _split(kind, spec)
    function = kinds.find(name).value
    parameters = list(inspect.signature(function).parameters.values())
    hyperparameters = {p.name: p for p in parameters[positional:] if p.kind is not Parameter.VAR_KEYWORD}
    names = ", ".join(hyperparameters) or "none"
    if settings is not None and not isinstance(settings, Mapping):
        if len(hyperparameters) != 1:
            raise ValueError(f"the {kind} {name} takes {names}, not just {settings!r}; write {{{name}: {{…}}}}")
        settings = {next(iter(hyperparameters)): settings}
    values = dict(settings or {})
    takes_any = any(p.kind is Parameter.VAR_KEYWORD for p in parameters)
    for key in values:
        if key not in hyperparameters and not takes_any:
            raise ValueError(f"the {kind} {name} has no hyperparameter {key!r}; it has {names}")
    missing = [key for key, p in hyperparameters.items() if _is_required(p) and key not in values]
    if missing:
        raise ValueError(f"the {kind} {name} needs {' and '.join(missing)}, as in {{{name}: {{{missing[0]}: …}}}}")
    return name, partial(function, **values)


def name_of(spec: Spec) -> str:
    """Return the name in an entry of a configuration."""
    return _split("filter", spec)[0]


def _split(kind: str, spec: Any) -> tuple[str, Any]:
    if isinstance(spec, str):
        return spec, None
    if isinstance(spec, Mapping) and isinstance(spec.get("name"), str):
        return spec["name"], {key: value for key, value in spec.items() if key != "name"}
    if isinstance(spec, Mapping) and len(spec) == 1 and isinstance(next(iter(spec)), str):
        return next(iter(spec.items()))
    raise ValueError(
        f"a {kind} is a name such as {'max_redundancy' if kind == 'filter' else 'entropy'}, or a name with its "
        f"hyperparameters such as {{max_redundancy: {{limit: 0.31}}}}; got {spec!r}"
    )


def _try(name: str, call: Callable[[], object]) -> None:
    try:
        call()
    except TypeError as error:
        raise ValueError(f"{name}: {error}") from None


def _is_required(parameter: Parameter) -> bool:
    named = parameter.kind in (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
    return named and parameter.default is Parameter.empty
