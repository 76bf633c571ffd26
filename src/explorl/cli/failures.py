"""Explain errors to the user, and end commands on SIGTERM as on Ctrl-C."""

from __future__ import annotations

import errno
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import typer
from pydantic import ValidationError

from explorl.core.errors import ExplorlError
from explorl.core.terminal import NOT_FINITE
from explorl.core.text import clean

_LONGEST = 2_000
"""Characters that are shown of a line: a value in a file may have a million."""


class Interrupted(Exception):
    """Ctrl-C or SIGTERM, with the exit code; the text says how to continue. Typer would only say "Aborted"."""

    def __init__(self, advice: str, code: int) -> None:
        super().__init__(advice)
        self.code = code


class Terminated(KeyboardInterrupt):
    """SIGTERM, as a batch system sends it before it kills."""


@contextmanager
def terminable() -> Iterator[None]:
    """Let SIGTERM end this process as Ctrl-C does."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    process = os.getpid()

    def end(number: int, frame: Any) -> None:
        if os.getpid() != process:  # a forked child
            os._exit(128 + number)
        raise Terminated

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def usage_error(error: Exception) -> str | None:
    """Return what is wrong with the command line, the help if it is empty, or None for other errors."""
    if not isinstance(error, _UsageError):
        return None
    if type(error).__name__ == "NoArgsIsHelpError":
        return error.format_message()
    text = error.format_message()
    if isinstance(error.__cause__, ValidationError):  # typer does not show the value
        text = text.replace("value for", f"value {error.__cause__.errors()[0]['input']!r} for", 1)
    text = clean(" ".join(text.split()))
    text = text[:1].lower() + text[1:].removesuffix(".")
    return text if error.ctx is None else f"{text}\nsee {clean(error.ctx.command_path)} --help"


def explain(error: Exception) -> str | None:
    """Explain an error that the user or the computer caused, in at most three lines; return None for a bug."""
    lines = [line.strip() for line in clean_lines(str(error)) if line.strip()] or [type(error).__name__]
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        lines = [f"cannot use {clean(str(error.filename))}: {error.strerror.lower()}"]
    elif isinstance(error, OSError) and error.errno == errno.ENOSPC:
        lines = ["cannot write: the disk is full; make room, or name a folder on another disk"]
    elif isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and "out of memory" in lines[0].lower()):
        lines = [lines[0], "out of memory: lower training.micro_batch, rollout.max_tokens or --batch-size"]
    elif isinstance(error, RuntimeError) and any(phrase in lines[0] for phrase in NOT_FINITE):
        lines = [lines[0], "use weights from before the training diverged, such as an earlier checkpoint"]
    elif type(error).__module__.startswith("jinja2."):  # not imported here: few commands render templates
        lines = [f"the model's chat template refuses a prompt: {lines[0]}", "use a template of text, or correct it"]
    elif not isinstance(error, USER_ERRORS):
        return None
    lines = [line if len(line) <= _LONGEST else f"{line[:_LONGEST]}…" for line in lines]
    return "\n".join(lines if len(lines) < 4 else [*lines[:2], f"(and {len(lines) - 2} lines more)"])


def clean_lines(text: str) -> list[str]:
    """Return the lines of a text, each cleaned for the terminal."""
    return [clean(line) for line in text.splitlines()]


_UsageError: Any = typer.BadParameter.__base__  # click's, of which some releases of typer bring their own
USER_ERRORS = (ExplorlError, ValueError, OSError, ImportError)
