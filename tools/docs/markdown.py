"""Markdown for the documentation generators."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a pipe table. Cells are Markdown; only their pipes are escaped."""
    lines = (columns, ("---",) * len(columns), *rows)
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
