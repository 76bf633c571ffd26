"""Compare models on the same problems: scores, paired differences, and the problems that each cannot solve.

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
from explorl.stats import Cell, Interval, Table, permutation_test
from explorl.stats.arm_differences import problem_interval

MAX_NAME = 200
"""Most characters of a model's name in tables and legends."""
DIFFERENCE_MEASURES = ("distinct_answers", "distinct_correct_answers", "mean_tokens")
"""Measures besides pass@k and maj@k that are compared."""


@dataclass(frozen=True)
class Difference:
    """A measure of one model minus that of another, over the problems that both attempted."""

    model: str
    baseline: str
    measure: str
    difference: Interval
    p: float
    """Two-sided, by paired permutation; not corrected for the number of differences."""


@dataclass(frozen=True)
class Boundary:
    """A comparison of models."""

    evaluations: Mapping[str, Evaluation]
    scores: Mapping[str, Mapping[str, Interval | None]]
    differences: list[Difference]
    """Differences of every later model to every earlier one."""
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
        """Return how many problems exactly these models cannot solve, the largest count first, without zeros."""
        return upset_counts(self.unsolvable)

    def table(self) -> Table:
        """Return a table with one row per measure and one column per model."""
        first = self.scores[self.names[0]]
        rows: list[list[Cell]] = [
            [LABELS.get(key, key), *(scores.get(key) for scores in self.scores.values())] for key in first
        ]
        task = next(iter(self.evaluations.values())).task
        title = f"{task}: {len(self.problems)} problems × {self.samples} samples"
        return Table(["measure", *self.names], rows, title=title, row_numbers=[number_format(key) for key in first])

    def differences_table(self, *, all_ks: bool = False) -> Table:
        """Return paired differences with intervals and p values, for the first and the last k or for all."""
        ends = {f"pass@{self.ks[0]}", f"pass@{self.ks[-1]}", f"maj@{self.ks[-1]}", *DIFFERENCE_MEASURES}
        selected = [d for d in self.differences if all_ks or d.measure in ends]
        rows: list[list[Cell]] = [
            [f"{d.model} − {d.baseline}", _difference_label(d.measure), d.difference, d.p] for d in selected
        ]
        return Table(
            ["models", "measure", "difference", "p"],
            rows,
            title="paired differences over problems",
            number={"p": ".4f"},  # the smallest p is 1 / 10,001
            row_numbers=[number_format(d.measure, difference=True) for d in selected],
        )

    def as_json(self) -> dict[str, Any]:
        """Return the comparison as JSON values."""
        return {
            "models": self.names,
            "problems": len(self.problems),
            "samples": self.samples,
            "scores": {name: as_json(scores) for name, scores in self.scores.items()},
            "differences": [asdict(difference) for difference in self.differences],
            "unsolvable": dict(self.unsolvable),
            "overlaps": [{"models": sorted(models), "problems": count} for models, count in self.overlaps().items()],
        }


def _difference_label(measure: str) -> str:
    """Return the label of a difference, with its unit if that is not the unit of the measure."""
    label = LABELS.get(measure, measure)
    return f"{label} (points)" if number_format(measure) == ".1%" else label


def _checked_name(name: str) -> str:
    """Return a model's name, cleaned; raise ValueError if it is too long."""
    if len(name) > MAX_NAME:
        start = f"{name[:40]}…"
        raise ValueError(f"the model name {start!r} has {len(name)} characters; use at most {MAX_NAME}")
    return clean(name)


def boundary(evaluations: Mapping[str, Evaluation]) -> Boundary:
    """Compare evaluations of the same problems with the same number of samples."""
    if len(evaluations) < 2:
        raise ValueError(f"a comparison needs 2 evaluations or more, got {len(evaluations)}")
    evaluations = {_checked_name(name): evaluation for name, evaluation in evaluations.items()}
    values = {name: per_problem(evaluation) for name, evaluation in evaluations.items()}
    shared = [
        key for key in next(iter(values.values())) if key.startswith(("pass@", "maj@")) or key in DIFFERENCE_MEASURES
    ]
    differences = [
        Difference(
            model,
            baseline,
            key,
            problem_interval(values[model][key] - values[baseline][key]),
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
