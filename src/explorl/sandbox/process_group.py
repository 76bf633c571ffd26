"""Wait for many processes that answer messages: the workers of an isolated function, or the interpreters of a pool."""

from __future__ import annotations

import math
import selectors
import time
from collections.abc import Iterator
from typing import Literal, TypeVar

from explorl.sandbox.frames import Channel

_CHECK_INTERVAL = 0.02
"""Seconds between two checks of all deadlines: there may be hundreds of processes, and `messages` should be cheap."""
_MAX_WAIT = 3600.0


class AnsweringProcess:
    """A process with the connection to it."""

    channel: Channel
    state: Literal["waiting", "starting", "idle", "busy", "ended"] = "waiting"
    deadline = math.inf
    """The time of `time.monotonic` by which it must have answered; infinite while it has nothing to do."""

    def mark_started(self, seconds: float) -> None:
        """Store that it starts, and how long it may take to say that it has."""
        self.state, self.deadline = "starting", time.monotonic() + seconds

    def mark_busy(self, seconds: float) -> None:
        """Store that it has a message, and how long it may take to answer."""
        self.state, self.deadline = "busy", time.monotonic() + seconds

    def mark_idle(self) -> None:
        """Store that it has answered and waits for the next message."""
        self.state, self.deadline = "idle", math.inf

    def is_late(self) -> bool:
        """Return True if it should not be waited for any longer."""
        return self.deadline <= time.monotonic()


P = TypeVar("P", bound=AnsweringProcess)


class ProcessGroup(dict[int, P]):
    """Processes by the descriptors of their connections."""

    def __init__(self) -> None:
        super().__init__()
        self._selector = selectors.DefaultSelector()
        self._next_check = 0.0

    def add(self, process: P) -> None:
        """Wait for this process too, until it is removed."""
        self[process.channel.fileno()] = process
        self._selector.register(process.channel.fileno(), _events(process), process)

    def remove(self, process: P) -> None:
        """Forget a process, if it is here; before its connection is closed."""
        if self._holds(process):
            self._selector.unregister(process.channel.fileno())
            del self[process.channel.fileno()]

    def send(self, process: P, *messages: bytes) -> None:
        """Send messages; `messages` sends what there is no room for yet."""
        process.channel.send(*messages)
        if process.channel.has_more_to_send:
            self._selector.modify(process.channel.fileno(), _events(process), process)

    def seconds_to_deadline(self) -> float:
        """Return the seconds until the first process is late."""
        first = min((process.deadline for process in self.values()), default=math.inf)
        return max(first, self._next_check) - time.monotonic()

    def wait(self, seconds: float) -> None:
        """Wait so long, or until `messages` has something to do. Other threads may use the group meanwhile."""
        self._selector.select(min(max(0.0, seconds), _MAX_WAIT))

    def messages(self) -> Iterator[tuple[P, bytes | Literal["ended", "late"]]]:
        """Yield the messages that have come, each with its process, and the processes that have ended or are late.

        Processes may be added and removed meanwhile.
        """
        for key, events in self._selector.select(0):
            if events & selectors.EVENT_WRITE and self._holds(key.data):
                key.data.channel.flush()
                self._selector.modify(key.fd, _events(key.data), key.data)
            if events & selectors.EVENT_READ:
                yield from self.messages_of(key.data)
        if time.monotonic() >= self._next_check:
            self._next_check = time.monotonic() + _CHECK_INTERVAL
            for process in list(self.values()):
                if process.is_late() and self._holds(process):
                    yield process, "late"

    def messages_of(self, process: P) -> Iterator[tuple[P, bytes | Literal["ended"]]]:
        """Yield the messages of one process that have come, and the process if it has ended."""
        if self._holds(process):
            try:
                for message in process.channel.messages():
                    yield process, message
            except (EOFError, ValueError):  # the last output of the fork server is not a message
                if self._holds(process):
                    yield process, "ended"

    def close(self) -> None:
        """Remove all processes. In a fork of this process this leaves the original as it is, unlike `remove`."""
        self.clear()
        self._selector.close()

    def _holds(self, process: P) -> bool:
        return self.get(process.channel.fileno()) is process


def _events(process: AnsweringProcess) -> int:
    return selectors.EVENT_READ | (selectors.EVENT_WRITE if process.channel.has_more_to_send else 0)
