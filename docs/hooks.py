"""MkDocs hooks: include sections of the README, and convert escaped bars in code in tables."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

README = Path(__file__).parent.parent / "README.md"
INCLUDED = re.compile(r"^<!-- README: (.+) -->$", re.MULTILINE)


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Return a page's text as Python-Markdown expects it."""
    markdown = INCLUDED.sub(lambda match: section(match[1]), markdown)
    return "\n".join(_bars(line) if line.startswith("|") else line for line in markdown.split("\n"))


def section(title: str) -> str:
    """Return a section of the README, with links relative to docs/; raise ValueError if it does not exist."""
    text = README.read_text(encoding="utf-8")
    match = re.search(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    if match is None:
        titles = ", ".join(re.findall(r"^## (.+)$", text, re.MULTILINE))
        raise ValueError(f"the README has no section {title!r}; it has {titles}")
    return f"## {title}\n" + re.sub(r"""(?<=[("' ])docs/(?=[\w./#-]+[)"' ])""", "", match[1])


def _bars(row: str) -> str:
    """Convert `a \\| b`, as GitHub needs for a bar in code in a table, to `a | b` for Python-Markdown."""
    return re.sub(r"`[^`]+`", lambda code: code[0].replace("\\|", "|"), row)
