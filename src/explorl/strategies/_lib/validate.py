"""Checks of hyperparameters. Each error names the strategy, the field, the bad value and a good value."""

from __future__ import annotations

import math
from dataclasses import fields
from numbers import Integral, Real
from typing import Any, NoReturn, TypeGuard

from explorl.strategies._lib.schedule import Schedule
from explorl.strategies.base import Strategy


def check_number(
    strategy: Strategy,
    field: str,
    *,
    above: float = -math.inf,
    at_least: float = -math.inf,
    below: float = math.inf,
    at_most: float = math.inf,
    optional: bool = False,
    scheduled: bool = True,
    good: Any = None,
) -> None:
    """Check that a field is a finite number within bounds, or a schedule whose ends are; None passes if optional."""
    value = getattr(strategy, field)
    if optional and value is None:
        return
    bounds = {"above": above, "at least": at_least, "below": below, "at most": at_most}
    rule = "a finite number " + " and ".join(f"{word} {bound:g}" for word, bound in bounds.items() if is_number(bound))
    for label, end in _ends(strategy, field, value, scheduled, good):
        if not is_number(end) or not (above < end < below and at_least <= end <= at_most):
            raise_invalid(strategy, label, end, rule.strip(), good)


def check_integer(
    strategy: Strategy,
    field: str,
    *,
    at_least: int,
    optional: bool = False,
    scheduled: bool = False,
    good: Any = None,
) -> None:
    """Check that a field is an integer, or, if `scheduled`, a schedule between two integers."""
    value = getattr(strategy, field)
    if optional and value is None:
        return
    for label, end in _ends(strategy, field, value, scheduled, good):
        integral = isinstance(end, Integral) or (isinstance(value, Schedule) and float(end).is_integer())
        if not is_number(end) or not integral or end < at_least:
            raise_invalid(strategy, label, end, f"a whole number, {at_least} or more", good)


def check_choice(strategy: Strategy, field: str, *options: Any) -> None:
    """Check that a field is one of the options."""
    value = getattr(strategy, field)
    if isinstance(value, bool) or value not in options:
        raise_invalid(strategy, field, value, " or ".join(repr(option) for option in options), options[0])


def check_interval(strategy: Strategy, field: str, *, good: tuple[float, float]) -> None:
    """Check that a field is None or two numbers, the lower one first."""
    value = getattr(strategy, field)
    if value is None:
        return
    if not (isinstance(value, tuple) and len(value) == 2 and all(map(is_number, value)) and value[0] < value[1]):
        raise_invalid(strategy, field, value, "None or two numbers, the lower one first", good)


def check_below(strategy: Strategy, low: str, high: str) -> None:
    """Check that the field `low` is below the field `high` at every step, if they are schedules."""
    lows = _ends(strategy, low, getattr(strategy, low), True, None)
    highs = _ends(strategy, high, getattr(strategy, high), True, None)
    if max(end for _, end in lows) >= min(end for _, end in highs):
        raise_invalid(strategy, low, getattr(strategy, low), f"below {high}, which is {getattr(strategy, high)!r}")


def is_number(value: Any) -> TypeGuard[float]:
    """Return whether a value is a finite number; True and False are not."""
    return not isinstance(value, bool) and isinstance(value, Real) and math.isfinite(value)


def check_k(strategy: Strategy, k: int | Schedule, num_generations: int) -> None:
    """Check that a prompt has at least k completions, at every step."""
    largest = int(max(k.begin, k.to) if isinstance(k, Schedule) else k)
    if largest > num_generations:
        raise ValueError(
            f"{name_of(strategy)}: k is {largest}, but there are only num_generations={num_generations} completions "
            f"per prompt; use k={max(1, num_generations // 2)}, or num_generations={2 * largest}"
        )


def raise_invalid(strategy: Strategy, field: str, value: Any, rule: str, good: Any = None) -> NoReturn:
    """Raise the error for a bad value; the good value it names defaults to the field's default."""
    if good is None:
        good = next(f.default for f in fields(strategy) if f.name == field.partition(".")[0])
    note = ""
    if isinstance(value, str) and "number" in rule:
        try:
            note = f" (text; as a number write {float(value)!r})"  # YAML reads 2e-4 as text
        except ValueError:
            note = " (text)"
    raise ValueError(f"{name_of(strategy)}: {field} is {value!r}{note}; it must be {rule}, for example {good!r}")


def name_of(strategy: Strategy | type[Strategy]) -> str:
    """Return the name of a strategy in errors and logs: its registered name, or that of its class."""
    return strategy.name or (strategy if isinstance(strategy, type) else type(strategy)).__name__


def _ends(strategy: Strategy, field: str, value: Any, scheduled: bool, good: Any) -> list[tuple[str, Any]]:
    """Return the values to check, each with its name for an error: a number itself, or both ends of a schedule."""
    if not isinstance(value, Schedule):
        return [(field, value)]
    if not scheduled:
        raise_invalid(strategy, field, value, "one number (it cannot follow a schedule)", good)
    return [(f"{field}.from", value.begin), (f"{field}.to", value.to)]
