"""Answers that branch off each other, sampled for a trainer: what strategies ask for, and what is logged of it."""

from __future__ import annotations

from collections.abc import Sequence

from explorl.rollout.branching import Branch, BranchedRollouts, Branching
from explorl.strategies import Strategy
from explorl.strategies._lib.validate import title
from explorl.strategies.base import overrides


def branching_of(strategies: Sequence[Strategy], step: int) -> Branching | None:
    """How answers are to branch at this step, by the last strategy that says so; None where none does."""
    found = None
    for strategy in strategies:
        given = strategy.branching(step) if overrides(strategy, "branching") else None
        if given is None:
            continue
        try:
            found = Branching(**given)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{title(strategy)}.branching: {error}") from None
    return found


def sets_rows(strategy: Strategy) -> bool:
    """Whether a strategy says how rows are sampled, which `model.generate` cannot do."""
    return overrides(strategy, "sampling") or overrides(strategy, "branching")


Told = tuple[int, list[tuple[Branch, float]]]
"""Of a call: the places at which it was decided, and where it branched, with the part of the answer before it."""


def told(rollouts: BranchedRollouts) -> Told:
    """What is to be known of the branches of a call."""
    return rollouts.decisions, [(one, one.position / max(len(rollouts[one.parent]), 1)) for one in rollouts.branches]


def branch_numbers(calls: Sequence[Told]) -> dict[str, float]:
    """What is logged of the branches of all processes: how often, where, and with what entropy."""
    places = sum(places for places, _ in calls)
    branches = [branch for _, branches in calls for branch in branches]
    numbers = {
        "branches": float(len(branches)),
        "places": float(places),
        "forks": float(sum(one.copies for one, _ in branches)),
        "frequency": len(branches) / max(places, 1),
    }
    if branches:
        numbers["relative_place"] = sum(relative for _, relative in branches) / len(branches)
        for name in ("place", "entropy", "initial_entropy", "probability"):
            numbers[name] = sum(float(getattr(one, name)) for one, _ in branches) / len(branches)
    for marker in sorted({one.marker for one, _ in branches}):
        numbers[f"at/{marker}"] = float(sum(one.marker == marker for one, _ in branches))
    return {f"branching/{name}": value for name, value in numbers.items()}
