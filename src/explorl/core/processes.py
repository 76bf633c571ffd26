"""Coordinate several processes that train one run: share decisions and report failures once.

`accelerate launch` and torchrun start them and set each one's rank in the environment. The first process prints and
writes the run's folder; if one fails, the launcher ends the others.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

Decision = TypeVar("Decision")

LAUNCH_FILE = "EXPLORL_LAUNCHED"
"""Environment variable with the file of `--launch`, if that has started this process and reports its failure."""
INTERRUPTION_FILE = "EXPLORL_LAST_WORD"
"""Environment variable with the file to which the first process writes how to resume, for `--launch` to print."""
WAIT = 6 * 3600
"""Seconds that a process waits for the others, which may be evaluating; failures are noticed immediately."""


class EndedElsewhere(Exception):
    """The first process has failed, and reports why."""


def number() -> int:
    """Return the rank of this process; 0 is the first or only one."""
    return int(os.environ.get("RANK") or 0)


def count() -> int:
    """Return the number of processes that train together."""
    return int(os.environ.get("WORLD_SIZE") or 1)


def is_first() -> bool:
    return number() == 0


def decide_on_first(decide: Callable[[], Decision]) -> Decision:
    """Return on all processes what ``decide`` returns on the first; raise EndedElsewhere if it fails there."""
    if count() == 1:
        return decide()
    from accelerate.utils import broadcast_object_list

    _connect()
    if not is_first():
        decided, failed = broadcast_object_list([None, False])
        if failed:
            raise EndedElsewhere
        return decided
    try:
        outcome = decide()
    except BaseException:
        broadcast_object_list([None, True])
        raise
    return broadcast_object_list([outcome, False])[0]


def _connect() -> None:
    """Connect the processes as the trainers will, on GPUs if there are any."""
    from datetime import timedelta

    import torch
    from accelerate import PartialState

    if not torch.cuda.is_available():  # without this, accelerate would silently let each process train by itself
        os.environ.setdefault("ACCELERATE_USE_CPU", "true")
    on_cpu = os.environ.get("ACCELERATE_USE_CPU", "false").lower() in ("1", "true", "yes")
    connected = PartialState(cpu=on_cpu, timeout=timedelta(seconds=WAIT)).num_processes
    if connected != count():
        raise RuntimeError(f"{count()} processes were started, but accelerate found {connected}")


def report_interruption(text: str) -> bool:
    """Leave the message with the launcher, and return whether there is one.

    The launcher prints it if it was interrupted itself, and not if it ended this process because another failed.
    """
    path = os.environ.get(INTERRUPTION_FILE)
    if not path:
        return False
    Path(path).write_text(text, encoding="utf-8")
    return True


def report_failure(text: str, code: int) -> bool:
    """Leave a failure with the launcher, and return whether it will report the first one of all processes."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return False
    now = time.time()
    details = {"py_callstack": text, "timestamp": str(int(now)), "exact": now, "code": code}
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(json.dumps({"message": {"message": text, "extraInfo": details}}), encoding="utf-8")
    return bool(os.environ.get(LAUNCH_FILE))
