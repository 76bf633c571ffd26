"""The lens sections of a run's page: from what `explorl analyze` wrote, or computed from the run's records."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from explorl.core.store import RunStore, StoreError, file_name, read_json
from explorl.report.study_sections import NumberTable, Picture

TAGS = frozenset({"svg", "g", "path", "defs", "use", "text", "tspan", "clipPath", "rect", "circle", "line", "polygon"})
"""The tags that matplotlib writes for our figures."""
MAX_TOKENS = 1_000_000
"""Tokens that a page analyzes if the run was not analyzed before."""
PageSection = tuple[str, str, str, list[Picture]]
"""Id, heading, the name of one picture (for "No … was recorded."), and the pictures."""


def lens_results(folder: str | Path) -> list[dict[str, Any]]:
    """Return the lens part of a run's page as plain values; an empty list if the run has no token records.

    If the run was analyzed, return the stored findings with their figures as they were written; otherwise run the
    analyses that need no policy.
    """
    analysis_folder = Path(folder) / "analysis"
    if (analysis_folder / "analysis.json").is_file():
        try:
            return _stored_results(analysis_folder, _last_step(Path(folder)))
        except (StoreError, OSError, ValueError, KeyError, TypeError, AttributeError):
            pass  # damaged, or from another version or an earlier step: compute the results again
    return _computed_results(Path(folder))


def _last_step(folder: Path) -> int:
    return max((line.get("step", 0) for line in RunStore(folder).metrics("train")), default=0)


def lens_sections(results: Mapping[str, Any]) -> list[PageSection]:
    """Return one section per analysis."""
    return [
        (
            f"lens-{entry['name']}",
            entry["title"],
            entry["title"].lower(),
            [
                Picture(picture["title"], picture["caption"], picture["svg"], NumberTable(*picture["numbers"]))
                for picture in entry["pictures"]
            ],
        )
        for entry in results.get("lens") or []
    ]


def _stored_results(folder: Path, last_step: int) -> list[dict[str, Any]]:
    stored = read_json(folder / "analysis.json")
    if stored["last_step"] < last_step:
        raise ValueError(f"{folder} was written at step {stored['last_step']}, and the run is at {last_step}")
    return _results(
        stored["analyses"], lambda figure: _page_element((folder / figure["svg"]).read_text(encoding="utf-8"))
    )


def _computed_results(folder: Path) -> list[dict[str, Any]]:
    """Run the analyses that need only records."""
    from explorl.analysis.lens import Context, Findings
    from explorl.analysis.lens_table import read_run
    from explorl.report.figures import page_svg
    from explorl.report.run_analyses import outcome_entry, run_analyses, select_analyses

    if not _has_token_records(folder):
        return []
    table = read_run(folder, most_tokens=MAX_TOKENS)
    outcomes = run_analyses(table, Context(), select_analyses())
    results = [outcome.result for outcome in outcomes if isinstance(outcome.result, Findings)]
    charts = {chart.name: chart for result in results for chart in result.charts}
    entries = {outcome.analysis.name: outcome_entry(outcome) for outcome in outcomes}
    return _results(entries, lambda figure: page_svg(charts[figure["name"]], figure["name"]))


def _results(entries: Mapping[str, Any], svg_of: Callable[[Mapping[str, Any]], str]) -> list[dict[str, Any]]:
    """Return what the page shows of each analysis with figures."""
    return [
        {
            "name": file_name(name),
            "title": entry["title"],
            "pictures": [
                {
                    "title": figure["title"],
                    "caption": figure["caption"],
                    "svg": svg_of(figure),
                    "numbers": _numbers(figure["name"], entry["tables"]),
                }
                for figure in entry["figures"]
            ],
        }
        for name, entry in entries.items()
        if entry.get("figures")
    ]


def _has_token_records(folder: Path) -> bool:
    """Check whether the latest readable rollouts have token records."""
    import pyarrow.parquet as pq

    for path in sorted((folder / "rollouts").glob("step-*.parquet"), reverse=True)[:3]:
        try:
            return "entropy" in pq.read_schema(path).names
        except Exception:  # pyarrow raises many kinds of errors for a damaged file
            continue
    return False


def _page_element(svg: str) -> str:
    """Return an SVG file as an element of the page, without its own colours.

    Raise `ValueError` for an element or attribute that Explorl's figures do not use: the file may be from an untrusted
    source.
    """
    element = svg[svg.index("<svg") :]
    element = re.sub(r"<style>[^<]*</style>", "", element)
    element = element.replace(' xmlns="http://www.w3.org/2000/svg"', "", 1)
    for node in ElementTree.fromstring(element).iter():
        links = [value for key, value in node.attrib.items() if key == "href" and not value.startswith("#")]
        outside = re.search(r"url\((?!#)", " ".join(node.attrib.values()))
        if node.tag not in TAGS or links or outside or any(key.startswith("on") for key in node.attrib):
            raise ValueError(f"<{node.tag}> does not occur in this form in figures that Explorl draws")
    return element


def _numbers(name: str, tables: Mapping[str, Mapping[str, Any]]) -> tuple[Sequence[str], Sequence[Sequence[str]]]:
    """Return the columns and rows of the table with the figure's name, or else of the first."""
    table: Mapping[str, Any] = tables.get(name) or next(iter(tables.values()), {})
    return table.get("columns", []), table.get("rows", [])
