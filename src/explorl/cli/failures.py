"""How a command ends that does not end well: what an error is in the user's words, and what an interruption leaves."""

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

from explorl.core.config import ConfigError
from explorl.core.store import StoreError
from explorl.core.terminal import NOT_FINITE
from explorl.core.text import clean
from explorl.evaluation.llm_judge import JudgeError
from explorl.models import ModelError

_LONGEST = 2_000
"""Characters that are shown of a line: a value in a file may have a million."""


class Interrupted(Exception):
    """Ctrl-C or SIGTERM, with the exit code; the text says how to go on. Typer would say nothing but "Aborted"."""

    def __init__(self, how: str, code: int) -> None:
        super().__init__(how)
        self.code = code


class Terminated(KeyboardInterrupt):
    """SIGTERM, as a batch system sends it before it kills."""


@contextmanager
def terminable() -> Iterator[None]:
    """SIGTERM ends this process as Ctrl-C does."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    process = os.getpid()

    def end(number: int, frame: Any) -> None:
        if os.getpid() != process:  # a child that was forked off
            os._exit(128 + number)
        raise Terminated

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def usage(error: Exception) -> str | None:
    """What is wrong with the command line, and where to read more; the help where it is empty; None of other errors."""
    if not isinstance(error, _UsageError):
        return None
    if type(error).__name__ == "NoArgsIsHelpError":
        return error.format_message()
    said = error.format_message()
    if isinstance(error.__cause__, ValidationError):  # typer has the value, and does not show it
        said = said.replace("value for", f"value {error.__cause__.errors()[0]['input']!r} for", 1)
    said = clean(" ".join(said.split()))
    said = said[:1].lower() + said[1:].removesuffix(".")
    return said if error.ctx is None else f"{said}\nsee {clean(error.ctx.command_path)} --help"


def in_words(error: Exception) -> str | None:
    """What to tell the user of an error that is theirs or their computer's, in three lines at most; None of a bug."""
    lines = [line.strip() for line in clean_lines(str(error)) if line.strip()] or [type(error).__name__]
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        lines = [f"cannot use {clean(str(error.filename))}: {error.strerror.lower()}"]
    elif isinstance(error, OSError) and error.errno == errno.ENOSPC:
        lines = ["cannot write: the disk is full; make room, or name a folder on another disk"]
    elif isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and "out of memory" in lines[0].lower()):
        lines = [lines[0], "out of memory: lower training.micro_batch, rollout.max_tokens or --batch-size"]
    elif isinstance(error, RuntimeError) and any(phrase in lines[0] for phrase in NOT_FINITE):
        lines = [lines[0], "use weights from before the training diverged, such as an earlier checkpoint"]
    elif type(error).__module__.startswith("jinja2."):  # not imported here: few commands render anything
        lines = [f"the model's chat template refuses a prompt: {lines[0]}", "use a template of text, or correct it"]
    elif not isinstance(error, USER_ERRORS) and type(error).__name__ != "UnsupportedModel":
        return None
    lines = [line if len(line) <= _LONGEST else f"{line[:_LONGEST]}…" for line in lines]
    return "\n".join(lines if len(lines) < 4 else [*lines[:2], f"(and {len(lines) - 2} lines more)"])


def clean_lines(text: str) -> list[str]:
    """The lines of a text, each clean."""
    return [clean(line) for line in text.splitlines()]


_UsageError: Any = typer.BadParameter.__base__  # click's, of which some releases of typer bring their own
USER_ERRORS = (ConfigError, StoreError, ModelError, JudgeError, ValueError, OSError, ImportError)
