"""Records of a JSONL file, each with its place, so that an error can name file and line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def records(path: Path, example: str) -> Iterator[tuple[dict[str, Any], str]]:
    """The JSON object of each line that is not blank, and its place; ``example`` is a good line, for the error."""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            place = f"{path}, line {number}"
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):
                record = None
            if not isinstance(record, dict):
                text = shortened(line.decode(errors="replace"))
                raise ValueError(f"{place}: not a JSON object: {text}; give a line like {example}")
            yield record, place


def shortened(value: object) -> str:
    """A value as it stands in an error: at most 60 characters of it."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}…"
