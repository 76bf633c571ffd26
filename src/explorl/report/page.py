"""The page: one HTML file without a single reference to anything outside it."""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import Any

from explorl.store import write_text


def write_page(path: Path, **content: Any) -> None:
    """Fills the template; everything but the figure is escaped."""
    import jinja2

    template = (resources.files("explorl.report") / "page.html").read_text(encoding="utf-8")
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    write_text(path, environment.from_string(template).render(**content))
