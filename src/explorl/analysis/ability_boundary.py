"""Models side by side on the same problems: scores, paired differences, and which problems each cannot solve.

Deng et al. 2025, §2.1 and §2.4 (Figure 1): pass@k curves, answer diversity, k-rollout unsolvable problems and their
overlap, entropy and rollout branching factor.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import combinations
from typing import Any

from explorl.core.text import clean
from explorl.evaluation import Evaluation
from explorl.evaluation.evaluation import number_format
from explorl.evaluation.scores import LABELS, as_json, per_problem, scores, unsolved
from explorl.metrics import upset_counts
from explorl.stats import Cell, Interval, Table, paired_difference, permutation_test

LONGEST_NAME = 200
"""Characters of a model's name, which stands in tables and legends."""
DIFFERED = ("distinct_answers", "distinct_correct_answers", "mean_tokens")
"""Measures beside pass@k and maj@k whose paired differences are taken."""


@dataclass(frozen=True)
class Difference:
    """How much higher a measure of one model is than of another, over the problems that both answered."""

    model: str
    baseline: str
    measure: str
    difference: Interval
    p: float
    """Two-sided, by paired permutation; not corrected for how many differences are looked at."""


@dataclass(frozen=True)
class Boundary:
    """What a comparison found."""

    evaluations: Mapping[str, Evaluation]
    scores: Mapping[str, Mapping[str, Interval | None]]
    differences: list[Difference]
    """Of every later model to every earlier one."""
    unsolvable: Mapping[str, list[str]]

    @property
    def names(self) -> list[str]:
        return list(self.evaluations)

    @property
    def problems(self) -> list[str]:
        return next(iter(self.evaluations.values())).problem_ids

    @property
    def samples(self) -> int:
        return next(iter(self.evaluations.values())).samples

    @property
    def ks(self) -> list[int]:
        return next(iter(self.evaluations.values())).ks

    def overlaps(self) -> dict[frozenset[str], int]:
        """How many problems exactly these models cannot solve; the largest first, none that is empty."""
        return upset_counts(self.unsolvable)

    def table(self) -> Table:
        """One row per measure, one column per model."""
        first = self.scores[self.names[0]]
        rows: list[list[Cell]] = [
            [LABELS.get(key, key), *(found.get(key) for found in self.scores.values())] for key in first
        ]
        task = next(iter(self.evaluations.values())).task
        title = f"{task}: {len(self.problems)} problems × {self.samples} samples"
        return Table(["measure", *self.names], rows, title=title, row_numbers=[number_format(key) for key in first])

    def differences_table(self, *, all_ks: bool = False) -> Table:
        """Paired differences with intervals and p values; of the k only the first and the last, or all."""
        ends = {f"pass@{self.ks[0]}", f"pass@{self.ks[-1]}", f"maj@{self.ks[-1]}", *DIFFERED}
        shown = [d for d in self.differences if all_ks or d.measure in ends]
        rows: list[list[Cell]] = [[f"{d.model} − {d.baseline}", _unit(d.measure), d.difference, d.p] for d in shown]
        return Table(
            ["models", "measure", "difference", "p"],
            rows,
            title="paired differences over problems",
            number={"p": ".4f"},  # the least is 1 / 10,001
            row_numbers=[number_format(d.measure, difference=True) for d in shown],
        )

    def as_json(self) -> dict[str, Any]:
        """Everything as plain values."""
        return {
            "models": self.names,
            "problems": len(self.problems),
            "samples": self.samples,
            "scores": {name: as_json(found) for name, found in self.scores.items()},
            "differences": [asdict(difference) for difference in self.differences],
            "unsolvable": dict(self.unsolvable),
            "overlaps": [{"models": sorted(some), "problems": count} for some, count in self.overlaps().items()],
        }


def _unit(measure: str) -> str:
    """What a difference of this measure is called: with its unit, where that is another than the measure's own."""
    label = LABELS.get(measure, measure)
    return f"{label} (points)" if number_format(measure) == ".1%" else label


def _checked(name: str) -> str:
    if len(name) > LONGEST_NAME:
        shown = f"{name[:40]}…"
        raise ValueError(f"the model {shown!r} has a name of {len(name)} characters; give at most {LONGEST_NAME}")
    return clean(name)


def boundary(evaluations: Mapping[str, Evaluation]) -> Boundary:
    """Compares evaluations of the same problems with as many samples."""
    if len(evaluations) < 2:
        raise ValueError(f"a comparison needs 2 evaluations or more, got {len(evaluations)}")
    evaluations = {_checked(name): evaluation for name, evaluation in evaluations.items()}
    values = {name: per_problem(evaluation) for name, evaluation in evaluations.items()}
    shared = [key for key in next(iter(values.values())) if key.startswith(("pass@", "maj@")) or key in DIFFERED]
    differences = [
        Difference(
            model,
            baseline,
            key,
            paired_difference(values[model][key], values[baseline][key]),
            permutation_test(values[model][key], values[baseline][key]),
        )
        for baseline, model in combinations(evaluations, 2)
        for key in shared
    ]
    return Boundary(
        dict(evaluations),
        {name: scores(evaluation, values[name]) for name, evaluation in evaluations.items()},
        differences,
        {name: unsolved(evaluation) for name, evaluation in evaluations.items()},
    )
