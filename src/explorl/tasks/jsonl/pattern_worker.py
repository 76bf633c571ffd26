"""Search a text for a pattern in an isolated process (`explorl.sandbox.isolated_call`): some searches never end.

It imports nothing of Explorl, so it holds no torch and starts at once.
"""

from __future__ import annotations

import re
from typing import Any


def prepare_trusted(patterns: list[str]) -> list[re.Pattern[str]]:
    """The patterns, compiled."""
    return [re.compile(pattern) for pattern in patterns]


def matches(message: dict[str, Any], patterns: list[re.Pattern[str]] | None) -> bool:
    """Whether one of the patterns of a message, which may have been compiled already, is in its text."""
    compiled = prepare_trusted(message["patterns"]) if patterns is None else patterns
    return any(pattern.search(message["text"]) for pattern in compiled)
