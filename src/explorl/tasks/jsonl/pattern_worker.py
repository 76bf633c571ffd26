"""Search texts for patterns in an isolated process (`explorl.sandbox.isolated_call`): some searches never end.

This module imports nothing of Explorl, so the process has no torch and starts at once.
"""

from __future__ import annotations

import re
from typing import Any


def prepare_trusted(patterns: list[str]) -> list[re.Pattern[str]]:
    """Compile the patterns."""
    return [re.compile(pattern) for pattern in patterns]


def matches(message: dict[str, Any], patterns: list[re.Pattern[str]] | None) -> bool:
    """Return whether a message's text matches one of its patterns; ``patterns`` are compiled ones or None."""
    compiled = prepare_trusted(message["patterns"]) if patterns is None else patterns
    return any(pattern.search(message["text"]) for pattern in compiled)
