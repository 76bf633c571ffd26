"""Sampling beside calls that run: who listens to them meanwhile, and how many processors are left to them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event, Thread
from typing import Self

import torch

from explorl.sandbox.interpreter_pool import InterpreterPool

_REST = 0.005
"""Seconds in which the listener leaves the interpreter of Python to whoever samples."""


def processors() -> int:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0))


@contextmanager
def processors_left(calls: int) -> Iterator[None]:
    """Leaves a processor to each of so many calls, up to half of those that torch computes on.

    Its threads wait for each other without resting: where a call holds up one of them, the others use up the time.
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


class Listener:
    """Has a pool start interpreters and pass on calls and results while the caller samples.

    Where it fails, whoever waits for a call hears of it: the session polls too.
    """

    def __init__(self, pool: InterpreterPool) -> None:
        self._pool, self.wanted, self._over = pool, Event(), Event()
        self._thread = Thread(target=self._listen, name="explorl tool calls", daemon=True)

    def _listen(self) -> None:
        while not self._over.is_set():
            self.wanted.wait()
            try:
                self._pool.poll(0.05)
            except (ValueError, OSError):  # the pool was closed
                return
            self._over.wait(_REST)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self.wanted.set()
        self._thread.join()
