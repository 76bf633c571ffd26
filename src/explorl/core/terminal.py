"""Print to the terminal; text from untrusted sources is never read as control codes or markup."""

from __future__ import annotations

import io
import re
import sys
import textwrap
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Any

from rich.console import Console
from rich.text import Text

from explorl.core.text import clean

LINE_SECONDS = 30.0
"""Time between two progress lines if the output is not a terminal."""

TELLING_STEPS = 3
"""Steps that must be timed before the remaining time is estimated."""

NOT_FINITE = ("logits are not finite", "probability tensor contains")
"""What the engine's and torch's errors say if a policy's weights are not finite."""


def replace_unencodable() -> None:
    """Print characters that the output's encoding lacks as question marks instead of failing."""
    encoding = (getattr(sys.stdout, "encoding", None) or "utf-8").lower().replace("-", "").replace("_", "")
    if encoding != "utf8" and isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


@contextmanager
def plain_warnings() -> Iterator[None]:
    """Print each of Explorl's own warnings as one line on stderr, without the line of code that it points to.

    Warnings of other libraries, and of modules of the user's, are shown as Python shows them.
    """
    show_others = warnings.showwarning

    def show(message: Warning | str, *details: Any, **named: Any) -> None:
        if _issuing_package() == "explorl":
            print(f"warning: {clean(' '.join(str(message).split()))}", file=sys.stderr)
        else:
            show_others(message, *details, **named)

    warnings.showwarning = show
    try:
        yield
    finally:
        warnings.showwarning = show_others


def _issuing_package() -> str:
    """Return the package of the code that called `warnings.warn`; its stack level may point to another."""
    frame: FrameType | None = sys._getframe(2)  # that of the module warnings, or of its caller
    while frame is not None and frame.f_globals.get("__name__") in ("warnings", "_py_warnings"):
        frame = frame.f_back
    return "" if frame is None else str(frame.f_globals.get("__name__")).partition(".")[0]


def literal(*parts: object) -> Text:
    """Join texts, and pairs of a text and a style, to a text that rich prints without markup."""
    return Text.assemble(
        *((clean(str(part[0])), part[1]) if isinstance(part, tuple) else clean(str(part)) for part in parts)
    )


class ProgressLines:
    """Plain progress lines for logs: the first, one every `LINE_SECONDS`, the last; none on a terminal."""

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self.console, self.clock = console, clock
        self.shown = not console.is_terminal and not console.quiet
        self._last: float | None = None

    @property
    def due(self) -> bool:
        """True if it is time for a line."""
        return self.shown and (self._last is None or self.clock() - self._last >= LINE_SECONDS)

    def say(self, text: str) -> None:
        """Print a line."""
        if self.shown:
            self._last = self.clock()
            self.console.print(literal(text), soft_wrap=True, highlight=False)


class Pace:
    """Time per step, from the end of the first one on, which includes loading and warm-up."""

    def __init__(self, done: int = 0) -> None:
        self.done = done
        self._first: tuple[int, float] | None = None
        self._last: tuple[int, float] | None = None

    def see(self, done: int, now: float) -> None:
        """Record how many steps are done; fewer than before if a run resumed from its checkpoint."""
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
        """Seconds per step; None before `TELLING_STEPS` steps are timed."""
        if self._first is None or self._last is None:
            return None
        steps, time_taken = self._last[0] - self._first[0], self._last[1] - self._first[1]
        return time_taken / steps if steps >= TELLING_STEPS else None


def ends_of_k(scores: Iterable[str]) -> list[str]:
    """Return the names of pass@k with the smallest and the largest k."""
    ks = sorted(int(match[1]) for name in scores if (match := re.fullmatch(r"pass@(\d+)", name)))
    return [f"pass@{k}" for k in dict.fromkeys((ks[0], ks[-1]))] if ks else []


def format_scores(scores: Mapping[str, Any]) -> str:
    """Return an evaluation's scores at the smallest and largest k: pass@1 51.2%, pass@8 81.1%."""
    return ", ".join(f"{name} {scores[name]:.1%}" for name in ends_of_k(scores))


def print_change(metrics: Iterable[Mapping[str, Any]], console: Console) -> None:
    """Print how a run changed the scores on held-out problems; `metrics` are its lines."""
    lines = [line for line in metrics if line.get("kind") == "evaluation"]
    if len(lines) > 1:
        first, last = lines[0], lines[-1]
        parts = [
            f"{name} {first[name]:.1%} before training, {last[name]:.1%} after"
            for name in ends_of_k(first.keys() & last.keys())
        ]
        console.print(f"held out: {'; '.join(parts)}", highlight=False, soft_wrap=True)


def duration(seconds: float) -> str:
    """Return a time in its two largest units: 45 s, 12 min, 2 h 5 min."""
    minutes = round(seconds / 60)
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def counted(number: int, noun: str) -> str:
    """Return a number with its noun: 1 seed, 3 seeds."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def indented(text: str, width: int, by: int = 4) -> str:
    """Wrap and indent a text to lines of at most `width` columns, without breaking words."""
    margin = " " * by
    return textwrap.fill(
        text, width, initial_indent=margin, subsequent_indent=margin, break_long_words=False, break_on_hyphens=False
    )
