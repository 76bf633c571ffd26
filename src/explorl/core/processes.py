"""Several processes that train one run: what the first one decides, and how the failure of one is told.

`accelerate launch` and torchrun start them and say in the environment which one each is. The first process speaks and
writes the run's folder; where one fails, the launcher ends the others.
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
"""The file of `--launch`, where that has started this process, and tells of its failure."""
INTERRUPTION_FILE = "EXPLORL_LAST_WORD"
"""The file in which the first process leaves how to go on after an interruption, for `--launch` to say."""
WAIT = 6 * 3600
"""Seconds that a process waits for the others, which may be evaluating; a failed one is noticed at once."""


class EndedElsewhere(Exception):
    """The first process has failed, and says why."""


def number() -> int:
    """Which of the processes this is; 0 is the first, or the only one."""
    return int(os.environ.get("RANK") or 0)


def count() -> int:
    """How many processes train together."""
    return int(os.environ.get("WORLD_SIZE") or 1)


def is_first() -> bool:
    return number() == 0


def decide_on_first(decide: Callable[[], Decision]) -> Decision:
    """What the first process decides, on all of them; where it fails, the others end with it."""
    if count() == 1:
        return decide()
    from accelerate.utils import broadcast_object_list

    _meet()
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


def _meet() -> None:
    """Has the processes find each other, as the trainers will; on GPUs where there are any."""
    from datetime import timedelta

    import torch
    from accelerate import PartialState

    if not torch.cuda.is_available():  # else accelerate would let each of them train by itself, without a word
        os.environ.setdefault("ACCELERATE_USE_CPU", "true")
    on_cpu = os.environ.get("ACCELERATE_USE_CPU", "false").lower() in ("1", "true", "yes")
    found = PartialState(cpu=on_cpu, timeout=timedelta(seconds=WAIT)).num_processes
    if found != count():
        raise RuntimeError(f"{count()} processes were started, and accelerate sees {found} of them")


def report_interruption(text: str) -> bool:
    """Leaves how to go on with the launcher, which says it if it was interrupted itself, and not where it ended this
    process because another one has failed; False where there is none to say it."""
    path = os.environ.get(INTERRUPTION_FILE)
    if not path:
        return False
    Path(path).write_text(text, encoding="utf-8")
    return True


def report_failure(text: str, code: int) -> bool:
    """Leaves a failure with the launcher, which tells the first of all; False where there is none to tell it."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return False
    now = time.time()
    about = {"py_callstack": text, "timestamp": str(int(now)), "exact": now, "code": code}
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(json.dumps({"message": {"message": text, "extraInfo": about}}), encoding="utf-8")
    return bool(os.environ.get(LAUNCH_FILE))
