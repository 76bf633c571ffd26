"""What MkDocs does not do by itself: parts of the README, and bars in code in tables."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

README = Path(__file__).parent.parent / "README.md"
INCLUDED = re.compile(r"^<!-- README: (.+) -->$", re.MULTILINE)


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """The text of a page as Python-Markdown takes it."""
    markdown = INCLUDED.sub(lambda found: section(found[1]), markdown)
    return "\n".join(_bars(line) if line.startswith("|") else line for line in markdown.split("\n"))


def section(title: str) -> str:
    """A section of the README, with links as they are from inside docs/."""
    text = README.read_text(encoding="utf-8")
    found = re.search(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    if found is None:
        titles = ", ".join(re.findall(r"^## (.+)$", text, re.MULTILINE))
        raise ValueError(f"the README has no section {title!r}, which a page asks for; it has {titles}")
    return f"## {title}\n" + re.sub(r"""(?<=[("' ])docs/(?=[\w./#-]+[)"' ])""", "", found[1])


def _bars(row: str) -> str:
    """GitHub wants `a \\| b` for a bar in code in a table, Python-Markdown `a | b`."""
    return re.sub(r"`[^`]+`", lambda code: code[0].replace("\\|", "|"), row)
