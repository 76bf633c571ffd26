"""Prepares what PyPI shows of the project: the README with links that work there, and the project's URLs.

Both follow from one setting, `repository` under `[tool.hatch.metadata.hooks.custom]` in pyproject.toml. Where it is
empty, relative links become plain text and images are left out, since PyPI could not find them.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

RELATIVE = r"(?!(?:[a-z]+:|#))"
IMAGE = re.compile(rf"!\[([^\]]*)\]\({RELATIVE}([^)\s]+)\)")
LINK = re.compile(rf"(?<!!)\[([^\]]*)\]\({RELATIVE}([^)\s]+)\)")
SOURCE = re.compile(rf'\b(src|srcset)="{RELATIVE}([^"]+)"')
HTML_IMAGES = re.compile(rf'<picture>.*?</picture>\n?|<img [^>]*src="{RELATIVE}[^>]*>\n?', re.DOTALL)


class Metadata(MetadataHookInterface):
    """Adds the readme and the URLs."""

    def update(self, metadata: dict[str, Any]) -> None:
        repository = self.config.get("repository", "").rstrip("/")
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        metadata["readme"] = {"content-type": "text/markdown", "text": for_pypi(text, repository)}
        metadata["urls"] = project_urls(repository)


def for_pypi(text: str, repository: str) -> str:
    """Return the README with absolute links and images, or without them where the repository has no address."""
    if repository:
        files, pages = f"{repository}/raw/HEAD", f"{repository}/blob/HEAD"
        text = IMAGE.sub(rf"![\1]({files}/\2)", text)
        text = SOURCE.sub(rf'\1="{files}/\2"', text)
        return LINK.sub(rf"[\1]({pages}/\2)", text)
    return LINK.sub(r"\1", IMAGE.sub("", HTML_IMAGES.sub("", text)))


def project_urls(repository: str) -> dict[str, str]:
    """Return the links that PyPI shows beside the project; none where the repository has no address."""
    if not repository:
        return {}
    return {
        "Repository": repository,
        "Documentation": f"{repository}/blob/HEAD/docs/index.md",
        "Changelog": f"{repository}/blob/HEAD/CHANGELOG.md",
        "Issues": f"{repository}/issues",
    }
