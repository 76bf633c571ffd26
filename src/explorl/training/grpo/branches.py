"""Branching completions in a trainer: what strategies request, and what is logged."""

from __future__ import annotations

from collections.abc import Sequence

from explorl.rollout.branching import Branch, BranchedRollouts, Branching
from explorl.strategies import Strategy
from explorl.strategies._lib.validate import name_of
from explorl.strategies.base import overrides


def branching_of(strategies: Sequence[Strategy], step: int) -> Branching | None:
    """Return how completions branch at this step, by the last strategy that sets it; None if no strategy does."""
    branching = None
    for strategy in strategies:
        settings = strategy.branching(step) if overrides(strategy, "branching") else None
        if settings is None:
            continue
        try:
            branching = Branching(**settings)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{name_of(strategy)}.branching: {error}") from None
    return branching


def sets_row_sampling(strategy: Strategy) -> bool:
    """Tell whether a strategy sets how individual rows are sampled, which `model.generate` cannot do."""
    return overrides(strategy, "sampling") or overrides(strategy, "branching")


BranchRecord = tuple[int, list[tuple[Branch, float]]]
"""Of one call: the number of candidate positions, and each branch with its relative position in its parent."""


def branch_record(rollouts: BranchedRollouts) -> BranchRecord:
    """Return what the metrics need to know of the branches of a call."""
    branches = [(branch, branch.position / max(len(rollouts[branch.parent]), 1)) for branch in rollouts.branches]
    return rollouts.decisions, branches


def branch_metrics(calls: Sequence[BranchRecord]) -> dict[str, float]:
    """Return the metrics of the branches of all processes: how often, where, and with what entropy."""
    places = sum(candidates for candidates, _ in calls)
    branches = [branch for _, branches in calls for branch in branches]
    numbers = {
        "branches": float(len(branches)),
        "places": float(places),
        "forks": float(sum(branch.copies for branch, _ in branches)),
        "frequency": len(branches) / max(places, 1),
    }
    if branches:
        numbers["relative_place"] = sum(relative for _, relative in branches) / len(branches)
        numbers["place"] = sum(float(branch.position) for branch, _ in branches) / len(branches)
        for name in ("entropy", "initial_entropy", "probability"):
            numbers[name] = sum(float(getattr(branch, name)) for branch, _ in branches) / len(branches)
    for marker in sorted({branch.marker for branch, _ in branches}):
        numbers[f"at/{marker}"] = float(sum(branch.marker == marker for branch, _ in branches))
    return {f"branching/{name}": value for name, value in numbers.items()}
