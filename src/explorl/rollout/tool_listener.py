"""Sample while tool calls run: listen to them in a thread, and leave them some processors."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event, Thread
from typing import Self

import torch

from explorl.sandbox.interpreter_pool import InterpreterPool

_REST = 0.005
"""Seconds for which the listener leaves Python's interpreter lock to the sampling thread."""


def processors() -> int:
    """Return the number of processors that this process may use."""
    return len(os.sched_getaffinity(0))


@contextmanager
def leave_processors(calls: int) -> Iterator[None]:
    """Leave a processor to each running call, up to half of those that torch computes on.

    Torch's threads wait for each other in busy loops: if a call delays one of them, the others waste the time.
    """
    threads = torch.get_num_threads()
    if not calls or threads == 1:
        yield
        return
    torch.set_num_threads(threads - min(calls, threads // 2))
    try:
        yield
    finally:
        torch.set_num_threads(threads)


class PoolListener:
    """A thread that polls a pool, which starts interpreters and passes on calls and results, while the caller samples.

    If polling fails here, it fails in the session too, which polls as well and reports the error.
    """

    def __init__(self, pool: InterpreterPool) -> None:
        self._pool, self.wanted, self._stop = pool, Event(), Event()
        self._thread = Thread(target=self._listen, name="explorl tool calls", daemon=True)

    def _listen(self) -> None:
        while not self._stop.is_set():
            self.wanted.wait()
            try:
                self._pool.poll(0.05)
            except (ValueError, OSError):  # the pool was closed
                return
            self._stop.wait(_REST)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self.wanted.set()
        self._thread.join()
