"""Text for the terminal, in which nothing that a stranger wrote is taken for a command or for markup."""

from __future__ import annotations

import io
import re
import sys
import textwrap
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from rich.console import Console
from rich.text import Text

from explorl.core.text import clean

LINE_SECONDS = 30.0
"""Time between two lines of progress where the output is not a terminal."""

TELLING_STEPS = 3
"""Steps that must have been timed before they say how long the others take."""

NOT_FINITE = ("logits are not finite", "probability tensor contains")
"""What the engine and torch say of a policy whose weights are not finite."""


def replace_unencodable() -> None:
    """Where the output has another encoding than UTF-8, what it lacks becomes a question mark and ends no command."""
    encoding = (getattr(sys.stdout, "encoding", None) or "utf-8").lower().replace("-", "").replace("_", "")
    if encoding != "utf8" and isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


def literal(*parts: object) -> Text:
    """Texts, and pairs of a text and a style, as one that rich prints as it stands: brackets are brackets."""
    return Text.assemble(
        *((clean(str(part[0])), part[1]) if isinstance(part, tuple) else clean(str(part)) for part in parts)
    )


class ProgressLines:
    """Progress as plain lines, for logs: the first, one each `LINE_SECONDS`, the last; nothing on a terminal."""

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self.console, self.clock = console, clock
        self.shown = not console.is_terminal and not console.quiet
        self._last: float | None = None

    @property
    def due(self) -> bool:
        """Whether it is time for a line."""
        return self.shown and (self._last is None or self.clock() - self._last >= LINE_SECONDS)

    def say(self, text: str) -> None:
        """Prints a line."""
        if self.shown:
            self._last = self.clock()
            self.console.print(literal(text), soft_wrap=True, highlight=False)


class Pace:
    """How long a step takes, from the end of the first one on: that one has loading and warming up in it."""

    def __init__(self, done: int = 0) -> None:
        self.done = done
        self._first: tuple[int, float] | None = None
        self._last: tuple[int, float] | None = None

    def see(self, done: int, now: float) -> None:
        """Record how many steps are done; fewer than before are a run that went back to its checkpoint."""
        if done > self.done:
            self._last = (done, now)
            self._first = self._first or self._last
        self.done = done

    @property
    def first(self) -> float | None:
        """When the first step ended."""
        return None if self._first is None else self._first[1]

    @property
    def seconds(self) -> float | None:
        """Seconds per step; None before `TELLING_STEPS` of them have been timed."""
        if self._first is None or self._last is None:
            return None
        steps, time_taken = self._last[0] - self._first[0], self._last[1] - self._first[1]
        return time_taken / steps if steps >= TELLING_STEPS else None


def ends_of_k(scores: Iterable[str]) -> list[str]:
    """Return pass@k of the smallest and of the largest k among these names of scores."""
    ks = sorted(int(match[1]) for name in scores if (match := re.fullmatch(r"pass@(\d+)", name)))
    return [f"pass@{k}" for k in dict.fromkeys((ks[0], ks[-1]))] if ks else []


def format_scores(scores: Mapping[str, Any]) -> str:
    """Return an evaluation's scores at both ends of k: pass@1 51.2%, pass@8 81.1%."""
    return ", ".join(f"{name} {scores[name]:.1%}" for name in ends_of_k(scores))


def print_change(metrics: Iterable[Mapping[str, Any]], console: Console) -> None:
    """Print what a run has changed on held-out problems, at both ends of k; `metrics` are its lines."""
    lines = [line for line in metrics if line.get("kind") == "evaluation"]
    if len(lines) > 1:
        first, last = lines[0], lines[-1]
        parts = [
            f"{name} {first[name]:.1%} before training, {last[name]:.1%} after"
            for name in ends_of_k(first.keys() & last.keys())
        ]
        console.print(f"held out: {'; '.join(parts)}", highlight=False, soft_wrap=True)


def duration(seconds: float) -> str:
    """A time in the two largest units that matter: 45 s, 12 min, 2 h 5 min."""
    minutes = round(seconds / 60)
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def counted(number: int, what: str) -> str:
    """A number of things: 1 seed, 3 seeds."""
    return f"{number:,} {what}" if number == 1 else f"{number:,} {what}s"


def indented(text: str, width: int, by: int = 4) -> str:
    """A text in lines of at most `width` columns, in which no word is broken."""
    margin = " " * by
    return textwrap.fill(
        text, width, initial_indent=margin, subsequent_indent=margin, break_long_words=False, break_on_hyphens=False
    )
