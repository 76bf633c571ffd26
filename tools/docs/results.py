"""Write the results of a study into a page of the documentation, between two marks.

python -m tools.docs.results runs/rft docs/results/rft.md
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from explorl.analysis.interim_looks import describe_findings, describe_plan, describe_power
from explorl.analysis.study_results import cell, results_table
from explorl.analysis.verdicts import points
from explorl.core.store import StoreError, read_json, write_text
from explorl.stats import Cell, Table
from explorl.stats.table import escape_markdown

BEGIN = "<!-- Written by `python -m tools.docs.results` from the study's results.json. -->"
END = "<!-- Until here. -->"


def results_section(results: Mapping[str, Any]) -> str:
    """Return the section: a description of the study, the table with intervals, and a conclusion on pass@k."""
    table = results_table(results)
    scores = [name for name in table.columns if name.startswith("pass@")]
    plan = results.get("sequential")
    rows: list[list[Cell]] = [list(row) for row in table.rows]
    if results["start"] is not None:
        measures = results["start"]["measures"]
        first = [cell(measures.get(key)) for key in scores]
        rows.insert(0, ["start", *first, *[None] * (len(table.columns) - 1 - len(first))])
        rows[0][table.columns.index("entropy (nats)")] = cell(measures.get("entropy"))
    commit = f", commit `{results['commit'][:7]}`" if re.fullmatch("[0-9a-f]+[+]?", results["commit"] or "") else ""
    head = (
        f"{escape_markdown(results['date'])}{commit}: {len(results['arms'])} arms, {results['problems']} "
        f"held-out problems × {results['samples']} samples. Intervals {'' if plan else '(95 %) '}count seeds "
        f"and problems; differences are paired with *{escape_markdown(results['baseline'])}*'s"
        f"{'' if plan else ', p is corrected over the arms (Holm)'}."
    )
    rendered = Table(table.columns, rows, number=table.number).to_markdown()
    if plan is None:
        return f"{head}\n\n{rendered.strip()}\n\n{compare_with_baseline(results, scores[-1])}\n"
    differences = {arm["name"]: arm["differences"] for arm in results["arms"]}
    rule = (
        f"{escape_markdown(describe_plan(plan, results['baseline']))} The intervals of the arms' own scores have 95 %."
    )
    findings = escape_markdown(describe_findings(differences, plan))
    return f"{head} {rule}\n\n{rendered.strip()}\n\n{findings} {describe_power(plan)}\n"


def compare_with_baseline(results: Mapping[str, Any], measure: str) -> str:
    """Return which arms' pass@k is higher or lower than the baseline's, according to the intervals."""
    arms: dict[str, list[str]] = {"higher": [], "lower": [], "open": []}
    for arm in results["arms"]:
        difference = (arm["differences"] or {}).get(measure)
        if not difference or difference["low"] is None:
            continue
        kind = "higher" if difference["low"] > 0 else "lower" if difference["high"] < 0 else "open"
        p = "" if difference.get("p_corrected") is None else f", p = {difference['p_corrected']:.2f}"
        span = f"{points(difference['mean'])} points [{points(difference['low'])}, {points(difference['high'])}]"
        arms[kind].append(f"{escape_markdown(arm['name'])} ({span}{p})")
    base = escape_markdown(results["baseline"])
    if not any(arms.values()):
        return f"No arm has an interval to {base} yet."
    if not arms["higher"] and not arms["lower"]:
        return f"No arm's {measure} can be told apart from {base}'s: {'; '.join(arms['open'])}."
    parts = []
    if arms["higher"]:
        parts.append(f"{measure} ends higher than with {base} in {', '.join(arms['higher'])}")
    if arms["lower"]:
        parts.append(f"{'' if parts else f'{measure} ends '}lower in {', '.join(arms['lower'])}")
    if arms["open"]:
        parts.append(f"not told apart in {', '.join(arms['open'])}")
    return f"{'; '.join(parts)}. Before the correction over the arms, that is; p is after it."


def page_with(page: str, section: str) -> str:
    """Return the page with the section between its marks."""
    if BEGIN not in page or END not in page:
        raise ValueError(f"the page has no place for the results; add these two lines:\n{BEGIN}\n{END}")
    before, rest = page.split(BEGIN, 1)
    return f"{before}{BEGIN}\n\n{section.strip()}\n\n{END}{rest.rsplit(END, 1)[1]}"


def write(study: Path, page: Path) -> None:
    """Write a study's results into a page."""
    path = study / "results.json"
    if not path.is_file():
        raise StoreError(f"{study} has no results: {path} is missing; run `explorl report {study}`")
    write_text(page, page_with(page.read_text(encoding="utf-8"), results_section(read_json(path))))


def _main(study: Path, page: Path) -> None:
    try:
        write(study, page)
    except (ValueError, OSError, StoreError) as error:
        raise SystemExit(str(error)) from None


if __name__ == "__main__":
    import typer

    typer.run(_main)
