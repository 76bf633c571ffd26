"""Compare evaluations of the same problems: tables, figures and one JSON file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from explorl.analysis.ability_boundary import Boundary, boundary
from explorl.core.store import StoreError, write_json
from explorl.core.terminal import literal
from explorl.core.text import clean
from explorl.evaluation import Evaluation
from explorl.evaluation.completions import DIGEST
from explorl.evaluation.results_folder import EvaluationFolder, load_evaluation
from explorl.report.boundary_figures import charts
from explorl.report.comparison_page import comparison_results
from explorl.report.figures import save
from explorl.report.study_page import write_report
from explorl.stats import Table

SAME = ("task", "split", "protocol", "sampling", "answer_mark")
"""What evaluations must have in common. The template may differ: each model has the one it was trained with."""


@dataclass(frozen=True)
class EvaluationComparison:
    """The result of a comparison, and where it was written."""

    boundary: Boundary
    table: Table
    differences: Table
    out: Path
    figures: list[Path]


def compare(
    folders: Sequence[str | Path], out: str | Path, *, names: Sequence[str] | None = None, common: bool = False
) -> EvaluationComparison:
    """Compare two or more evaluation folders and write a page, ``comparison.json``, tables and figures into ``out``.

    They must have the same task, protocol, problems and number of samples; ``common`` uses the problems and samples
    that all of them have. ``names`` label the models; the default is the labels of the evaluations.
    """
    if len(folders) < 2:
        raise ValueError(f"a comparison needs at least 2 evaluation folders, got {len(folders)}")
    identities = [EvaluationFolder(folder).identity() for folder in folders]
    _check_alike(folders, identities)
    labels = _names(folders, identities, names)
    evaluations = dict(zip(labels, map(load_evaluation, folders), strict=True))
    evaluations = _common(evaluations) if common else _checked(evaluations)
    result = boundary(evaluations)
    target = Path(out)
    paths = [path for chart in charts(result) for path in save(chart, target, chart.name)]
    comparison = EvaluationComparison(result, result.table(), result.differences_table(), target, paths)
    for ending in ("json", "csv", "tex"):
        comparison.table.write(target / f"table.{ending}")
        result.differences_table(all_ks=True).write(target / f"differences.{ending}")
    write_json(
        target / "comparison.json",
        {
            **result.as_json(),
            "task": identities[0]["task"],
            "protocol": identities[0]["protocol"],
            "folders": {name: str(folder) for name, folder in zip(labels, folders, strict=True)},
            "evaluations": dict(zip(labels, identities, strict=True)),
            "figures": [path.name for path in paths],
        },
    )
    named = {name: str(folder) for name, folder in zip(labels, folders, strict=True)}
    files = {} if common else {name: EvaluationFolder(folder).parts() for name, folder in named.items()}
    write_report(target / "report.html", comparison_results(result, identities[0], named, files))
    return comparison


def compare_command(
    folders: Sequence[Path], out: Path, *, console: Console, names: Sequence[str] | None = None, common: bool = False
) -> EvaluationComparison:
    """Compare evaluations, and print the tables and where the files are."""
    comparison = compare(folders, out, names=names, common=common)
    comparison.table.print(console)
    comparison.differences.print(console)
    console.print(literal("report: ", (comparison.out / "report.html", "bold")), soft_wrap=True)
    console.print(literal(f"figures and comparison.json: {comparison.out}"), soft_wrap=True)
    return comparison


def _check_alike(folders: Sequence[str | Path], identities: Sequence[Mapping[str, Any]]) -> None:
    first = identities[0]
    for folder, identity in zip(folders[1:], identities[1:], strict=True):
        for key in SAME:
            value, other = first[key], identity[key]
            if value == other:
                continue
            if isinstance(value, dict):
                key, value, other = next(
                    (f"{key}.{inner}", value.get(inner), other.get(inner))
                    for inner in sorted(value.keys() | other.keys())
                    if value.get(inner) != other.get(inner)
                )
            raise StoreError(
                f"{folders[0]} and {folder} differ in {key}: {value!r} and {other!r}; evaluate both the same way"
            )


def _names(
    folders: Sequence[str | Path], identities: Sequence[Mapping[str, Any]], names: Sequence[str] | None
) -> list[str]:
    if names is not None and len(names) != len(folders):
        raise ValueError(f"{len(names)} names for {len(folders)} folders; give one per folder")
    labels = [str(identity["model"]) for identity in identities] if names is None else list(map(clean, names))
    if len(set(labels)) < len(labels) and names is None:
        labels = [clean(Path(folder).name) if labels.count(label) > 1 else label
                  for folder, label in zip(folders, labels, strict=True)]  # fmt: skip
    duplicate = next((label for label in labels if labels.count(label) > 1), None)
    if duplicate is not None:
        raise ValueError(f"two models are called {duplicate!r}; give each its own name")
    return labels


def _checked(evaluations: Mapping[str, Evaluation]) -> dict[str, Evaluation]:
    """Return the evaluations in the same order; raise StoreError if their problems or samples differ."""
    (name, first), *others = evaluations.items()
    advice = "evaluate both the same way, or compare what they have in common (--common)"
    for other, evaluation in others:
        if evaluation.samples != first.samples:
            raise StoreError(f"{name} has {first.samples} samples per problem, {other} {evaluation.samples}; {advice}")
        ids, other_ids = set(first.problem_ids), set(evaluation.problem_ids)
        if ids != other_ids:
            unmatched = sorted(ids ^ other_ids)[0]
            holder, lacking = (name, other) if unmatched in ids else (other, name)
            raise StoreError(
                f"{name} has {len(ids)} problems, {other} {len(other_ids)}, {len(ids & other_ids)} of them the same: "
                f"{unmatched!r} is in {holder} and not in {lacking}; {advice}"
            )
    return _common(evaluations)


def _common(evaluations: Mapping[str, Evaluation]) -> dict[str, Evaluation]:
    """Return the evaluations restricted to the problems and samples that all have, in the order of the first."""
    first = next(iter(evaluations.values()))
    shared = set.intersection(*(set(evaluation.problem_ids) for evaluation in evaluations.values()))
    if not shared:
        raise StoreError(f"{', '.join(evaluations)} have no problem in common; evaluate them on the same ones")
    order = [problem for problem in first.problem_ids if problem in shared]
    _check_data(evaluations, order)
    samples = min(evaluation.samples for evaluation in evaluations.values())
    return {name: _restricted(evaluation, order, samples) for name, evaluation in evaluations.items()}


def _check_data(evaluations: Mapping[str, Evaluation], problems: Sequence[str]) -> None:
    """Raise StoreError if a problem's data, such as its answer, differs between evaluations that have digests of it."""
    (name, first), *others = [(name, _digests(evaluation)) for name, evaluation in evaluations.items()]
    for other, digests in others:
        for problem in problems:
            if None not in (pair := (first[problem], digests[problem])) and len({*pair}) > 1:
                raise StoreError(
                    f"{name} and {other} have different data for problem {problem!r}: its answer, text or another "
                    "column has changed in between; evaluate both on the same data"
                )


def _digests(evaluation: Evaluation) -> dict[str, str | None]:
    """Return the digest of each problem's data; None for those of older versions."""
    problems = evaluation.rows["problem"]
    return dict(zip(problems, evaluation.rows.get(DIGEST) or [None] * len(problems), strict=True))


def _restricted(evaluation: Evaluation, problems: Sequence[str], samples: int) -> Evaluation:
    index = {problem: index for index, problem in enumerate(evaluation.problem_ids)}
    numbers = [index[problem] * evaluation.samples + sample for problem in problems for sample in range(samples)]
    rows = {name: [values[number] for number in numbers] for name, values in evaluation.rows.items()}
    return replace(evaluation, problem_ids=list(problems), samples=samples, rows=rows)
