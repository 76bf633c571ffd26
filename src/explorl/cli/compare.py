"""Compares evaluations of the same problems: tables, figures and one JSON file."""

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
from explorl.evaluation.results_folder import DIGEST, EvaluationFolder, load_evaluation
from explorl.report.boundary_figures import figures, save
from explorl.report.comparison_page import comparison_results
from explorl.report.study_page import write_report
from explorl.stats import Table

SAME = ("task", "split", "protocol", "sampling", "answer_mark")
"""What evaluations must share. The template may differ: each model is asked as it was trained to be."""


@dataclass(frozen=True)
class EvaluationComparison:
    """What was found, and where it was written."""

    boundary: Boundary
    table: Table
    differences: Table
    out: Path
    figures: list[Path]


def compare(
    folders: Sequence[str | Path], out: str | Path, *, names: Sequence[str] | None = None, common: bool = False
) -> EvaluationComparison:
    """Compares two or more evaluation folders and writes a page, ``comparison.json``, tables and figures into ``out``.

    They must have the same task, protocol, problems and number of samples; ``common`` takes the problems and samples
    that all of them have. ``names`` are what the models are called, by default the labels they were evaluated under.
    """
    if len(folders) < 2:
        raise ValueError(f"a comparison needs 2 evaluation folders or more, got {len(folders)}")
    identities = [EvaluationFolder(folder).identity() for folder in folders]
    _check_alike(folders, identities)
    labels = _names(folders, identities, names)
    evaluations = dict(zip(labels, map(load_evaluation, folders), strict=True))
    evaluations = _common(evaluations) if common else _checked(evaluations)
    found = boundary(evaluations)
    target = Path(out)
    paths = [path for name, figure in figures(found) for path in save(figure, target, name)]
    result = EvaluationComparison(found, found.table(), found.differences_table(), target, paths)
    for ending in ("json", "csv", "tex"):
        result.table.write(target / f"table.{ending}")
        found.differences_table(all_ks=True).write(target / f"differences.{ending}")
    write_json(
        target / "comparison.json",
        {
            **found.as_json(),
            "task": identities[0]["task"],
            "protocol": identities[0]["protocol"],
            "folders": {name: str(folder) for name, folder in zip(labels, folders, strict=True)},
            "evaluations": dict(zip(labels, identities, strict=True)),
            "figures": [path.name for path in paths],
        },
    )
    named = {name: str(folder) for name, folder in zip(labels, folders, strict=True)}
    files = {} if common else {name: EvaluationFolder(folder).parts() for name, folder in named.items()}
    write_report(target / "report.html", comparison_results(found, identities[0], named, files))
    return result


def compare_command(
    folders: Sequence[Path], out: Path, *, console: Console, names: Sequence[str] | None = None, common: bool = False
) -> EvaluationComparison:
    """The body of `explorl compare`."""
    result = compare(folders, out, names=names, common=common)
    result.table.print(console)
    result.differences.print(console)
    console.print(literal("report: ", (result.out / "report.html", "bold")), soft_wrap=True)
    console.print(literal(f"figures and comparison.json: {result.out}"), soft_wrap=True)
    return result


def _check_alike(folders: Sequence[str | Path], identities: Sequence[Mapping[str, Any]]) -> None:
    first = identities[0]
    for folder, identity in zip(folders[1:], identities[1:], strict=True):
        for key in SAME:
            mine, theirs = first[key], identity[key]
            if mine == theirs:
                continue
            if isinstance(mine, dict):
                key, mine, theirs = next(
                    (f"{key}.{inner}", mine.get(inner), theirs.get(inner))
                    for inner in sorted(mine.keys() | theirs.keys())
                    if mine.get(inner) != theirs.get(inner)
                )
            raise StoreError(
                f"{folders[0]} and {folder} differ in {key}: {mine!r} and {theirs!r}; evaluate both the same way"
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
    twice = next((label for label in labels if labels.count(label) > 1), None)
    if twice is not None:
        raise ValueError(f"two models are called {twice!r}; give each a name of its own")
    return labels


def _checked(evaluations: Mapping[str, Evaluation]) -> dict[str, Evaluation]:
    """Themselves, where they have the same problems and samples."""
    (name, first), *others = evaluations.items()
    advice = "evaluate both the same way, or compare what they have in common (--common)"
    for other, evaluation in others:
        if evaluation.samples != first.samples:
            raise StoreError(f"{name} has {first.samples} samples per problem, {other} {evaluation.samples}; {advice}")
        mine, theirs = set(first.problem_ids), set(evaluation.problem_ids)
        if mine != theirs:
            odd = sorted(mine ^ theirs)[0]
            holder, lacking = (name, other) if odd in mine else (other, name)
            raise StoreError(
                f"{name} answered {len(mine)} problems, {other} {len(theirs)}, {len(mine & theirs)} of them the same: "
                f"{odd!r} is in {holder} and not in {lacking}; {advice}"
            )
    return _common(evaluations)


def _common(evaluations: Mapping[str, Evaluation]) -> dict[str, Evaluation]:
    """The problems and samples that all have, in the order of the first."""
    first = next(iter(evaluations.values()))
    shared = set.intersection(*(set(evaluation.problem_ids) for evaluation in evaluations.values()))
    if not shared:
        raise StoreError(f"{', '.join(evaluations)} have no problem in common; evaluate them on the same ones")
    order = [problem for problem in first.problem_ids if problem in shared]
    _check_data(evaluations, order)
    samples = min(evaluation.samples for evaluation in evaluations.values())
    return {name: _restricted(evaluation, order, samples) for name, evaluation in evaluations.items()}


def _check_data(evaluations: Mapping[str, Evaluation], problems: Sequence[str]) -> None:
    """That the problems had the same answers, and whatever else they consist of, in all evaluations that say."""
    (name, first), *others = [
        (name, dict(zip(one.rows["problem"], one.rows.get(DIGEST) or [None] * len(one.rows["problem"]), strict=True)))
        for name, one in evaluations.items()
    ]
    for other, digests in others:
        for problem in problems:
            if None not in (pair := (first[problem], digests[problem])) and len({*pair}) > 1:
                raise StoreError(
                    f"{name} and {other} were judged by different data of problem {problem!r}: its answer, text or "
                    "another column has changed in between; evaluate both on the same"
                )


def _restricted(evaluation: Evaluation, problems: Sequence[str], samples: int) -> Evaluation:
    place = {problem: index for index, problem in enumerate(evaluation.problem_ids)}
    kept = [place[problem] * evaluation.samples + sample for problem in problems for sample in range(samples)]
    rows = {name: [values[row] for row in kept] for name, values in evaluation.rows.items()}
    return replace(evaluation, problem_ids=list(problems), samples=samples, rows=rows)
