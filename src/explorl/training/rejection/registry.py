"""Filters and selectors by name or import path: what a configuration says becomes functions."""

from __future__ import annotations

import difflib
import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from inspect import Parameter
from typing import Any

from explorl.training.rejection.filters import FILTERS, Filter
from explorl.training.rejection.selectors import SELECTORS, Selector

Spec = str | Mapping[str, Any]
"""``has_digit``, ``{max_redundancy: {limit: 0.31}}`` or ``{max_redundancy: 0.31}``; an import path may be the name."""


def build_filters(specs: Sequence[Spec]) -> list[tuple[str, Filter]]:
    """The filters of a configuration under their names, in its order."""
    if isinstance(specs, str | Mapping):
        raise ValueError(f"filters must be a list, such as [has_answer, has_digit]; got {specs!r}")
    built = [build("filter", spec, FILTERS, positional=1) for spec in specs]
    for (name, keep), spec in zip(built, specs, strict=True):
        if name_of(spec) in FILTERS:
            _try(name, partial(keep, []))  # what is wrong with a hyperparameter is said before anything is sampled
    return built


def build_selector(spec: Spec) -> tuple[str, Selector]:
    """The selector of a configuration, with its name."""
    return build("selector", spec, SELECTORS, positional=2)


def build(
    kind: str, spec: Spec, known: Mapping[str, Callable[..., Any]], *, positional: int
) -> tuple[str, Callable[..., Any]]:
    """A function with its hyperparameters filled in; ``positional`` is how many arguments it is called with."""
    name, given = _split(kind, spec)
    function = _found(kind, name, known)
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # made in C, which says nothing
        return name, partial(function, **(given if isinstance(given, Mapping) else {}))
    own = {one.name: one for one in parameters[positional:] if one.kind is not Parameter.VAR_KEYWORD}
    if given is not None and not isinstance(given, Mapping):
        if len(own) != 1:
            raise ValueError(f"the {kind} {name} takes {_named(own)}, not just {given!r}; write {{{name}: {{…}}}}")
        given = {next(iter(own)): given}
    values = dict(given or {})
    takes_all = any(one.kind is Parameter.VAR_KEYWORD for one in parameters)
    for key in values:
        if key not in own and not takes_all:
            raise ValueError(f"the {kind} {name} has no hyperparameter {key!r}; it has {_named(own)}")
    missing = [key for key, one in own.items() if _is_required(one) and key not in values]
    if missing:
        raise ValueError(f"the {kind} {name} needs {' and '.join(missing)}, as in {{{name}: {{{missing[0]}: …}}}}")
    return name, partial(function, **values)


def name_of(spec: Spec) -> str:
    """The name in an entry of a configuration."""
    return _split("filter", spec)[0]


def _split(kind: str, spec: Any) -> tuple[str, Any]:
    if isinstance(spec, str):
        return spec, None
    if isinstance(spec, Mapping) and isinstance(spec.get("name"), str):
        return spec["name"], {key: value for key, value in spec.items() if key != "name"}
    if isinstance(spec, Mapping) and len(spec) == 1 and isinstance(next(iter(spec)), str):
        return next(iter(spec.items()))
    raise ValueError(
        f"a {kind} is a name such as {'max_redundancy' if kind == 'filter' else 'entropy'}, or a name over its "
        f"hyperparameters such as {{max_redundancy: {{limit: 0.31}}}}; got {spec!r}"
    )


def _found(kind: str, name: str, known: Mapping[str, Callable[..., Any]]) -> Callable[..., Any]:
    if name in known:
        return known[name]
    module, separator, attribute = name.partition(":")
    if not separator:
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
        offer = f"did you mean {near[0]}? " if near else ""
        raise ValueError(
            f"there is no {kind} {name!r}; {offer}known are {', '.join(known)}, and one of your own is written like "
            f"my_pkg.{kind}s:mine"
        )
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (Exception, SystemExit) as error:
        raise ValueError(f"the {kind} {name!r} cannot be imported: {error}") from error
    if not callable(found) or isinstance(found, type):
        raise ValueError(f"the {kind} {name!r} is {found!r}, not a function; see docs/rft.md for how one is written")
    return found


def _try(name: str, call: Callable[[], object]) -> None:
    try:
        call()
    except TypeError as error:
        raise ValueError(f"{name}: {error}") from None


def _is_required(parameter: Parameter) -> bool:
    named = parameter.kind in (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
    return named and parameter.default is Parameter.empty


def _named(parameters: Mapping[str, Parameter]) -> str:
    return ", ".join(parameters) or "none"
