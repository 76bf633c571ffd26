"""The sections of a run's page that the lens fills: from what `explorl analyze` has written, or from its records."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from explorl.core.store import RunStore, StoreError, file_name, read_json
from explorl.report.study_sections import Numbers, Picture

TAGS = frozenset({"svg", "g", "path", "defs", "use", "text", "tspan", "clipPath", "rect", "circle", "line", "polygon"})
"""What matplotlib makes of our figures."""
MOST_TOKENS = 1_000_000
"""Tokens that a page looks at where the run was not analysed before."""
Section = tuple[str, str, str, list[Picture]]
"""Id, heading, what a picture is called, and the pictures."""


def lens_results(folder: str | Path) -> list[dict[str, Any]]:
    """What the page of a run shows of the lens, as plain values; nothing where the run has no records of tokens.

    Where the run was analysed, that is shown, with the figures as they were written. Else the analyses run now that
    need no policy.
    """
    place = Path(folder) / "analysis"
    if (place / "analysis.json").is_file():
        try:
            return _stored_results(place, _last_step(Path(folder)))
        except (StoreError, OSError, ValueError, KeyError, TypeError, AttributeError):
            pass  # damaged, of another version or of an earlier step: made anew
    return _computed_results(Path(folder))


def _last_step(folder: Path) -> int:
    return max((line.get("step", 0) for line in RunStore(folder).metrics() if line.get("kind") == "train"), default=0)


def lens_sections(results: Mapping[str, Any]) -> list[Section]:
    """A section an analysis."""
    return [
        (
            f"lens-{entry['name']}",
            entry["title"],
            entry["title"].lower(),
            [Picture(one["title"], one["caption"], one["svg"], Numbers(*one["numbers"])) for one in entry["pictures"]],
        )
        for entry in results.get("lens") or []
    ]


def _stored_results(place: Path, last_step: int) -> list[dict[str, Any]]:
    held = read_json(place / "analysis.json")
    if held["last_step"] < last_step:
        raise ValueError(f"{place} was made at step {held['last_step']}, and the run is at {last_step}")
    found = []
    for name, entry in held["analyses"].items():
        pictures = [
            {
                "title": figure["title"],
                "caption": figure["caption"],
                "svg": _page_element((place / figure["svg"]).read_text(encoding="utf-8")),
                "numbers": _numbers(figure["name"], entry["tables"]),
            }
            for figure in entry.get("figures") or []
        ]
        if pictures:
            found.append({"name": file_name(name), "title": entry["title"], "pictures": pictures})
    return found


def _computed_results(folder: Path) -> list[dict[str, Any]]:
    """Runs what needs records alone."""
    from explorl.analysis.lens import Context
    from explorl.analysis.lens_table import read_run
    from explorl.report.lens_render import page_svg
    from explorl.report.run_analyses import outcome_entry, run_analyses, select_analyses

    if not _has_tokens(folder):
        return []
    table = read_run(folder, most_tokens=MOST_TOKENS)
    found = []
    for outcome in run_analyses(table, Context(), select_analyses()):
        entry = outcome_entry(outcome)
        if entry["available"] and entry["figures"]:
            pictures = [
                {
                    "title": one.title,
                    "caption": one.caption,
                    "svg": page_svg(one, one.name),
                    "numbers": _numbers(one.name, entry["tables"]),
                }
                for one in outcome.analysis.drawings(outcome.result)
            ]
            found.append({"name": file_name(outcome.analysis.name), "title": entry["title"], "pictures": pictures})
    return found


def _has_tokens(folder: Path) -> bool:
    """Whether the latest rollouts that can be read have records of tokens."""
    import pyarrow.parquet as pq

    for path in sorted((folder / "rollouts").glob("step-*.parquet"), reverse=True)[:3]:
        try:
            return "entropy" in pq.read_schema(path).names
        except Exception:  # pyarrow has many errors for a damaged file
            continue
    return False


def _page_element(svg: str) -> str:
    """An SVG file as an element of the page, without its own colours; `ValueError` where it is none that we wrote."""
    element = svg[svg.index("<svg") :]
    element = re.sub(r"<style>[^<]*</style>", "", element)
    element = element.replace(' xmlns="http://www.w3.org/2000/svg"', "", 1)
    for node in ElementTree.fromstring(element).iter():
        links = [value for key, value in node.attrib.items() if key == "href" and not value.startswith("#")]
        outside = re.search(r"url\((?!#)", " ".join(node.attrib.values()))
        if node.tag not in TAGS or links or outside or any(key.startswith("on") for key in node.attrib):
            raise ValueError(f"<{node.tag}> is in no figure that Explorl draws")
    return element


def _numbers(name: str, tables: Mapping[str, Mapping[str, Any]]) -> tuple[Sequence[str], Sequence[Sequence[str]]]:
    """The table that is called like the figure, else the first."""
    table: Mapping[str, Any] = tables.get(name) or next(iter(tables.values()), {})
    return table.get("columns", []), table.get("rows", [])
