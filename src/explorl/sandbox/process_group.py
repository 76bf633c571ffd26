"""Wait for many processes that answer messages: the workers of an isolated function, or the interpreters of a pool."""

from __future__ import annotations

import selectors
from collections.abc import Iterator
from typing import Protocol, TypeVar

from explorl.sandbox.frames import Channel


class AnsweringProcess(Protocol):
    """A process with the connection to it."""

    channel: Channel
    deadline: float
    """The time of `time.monotonic` by which it must have answered; infinite while it has nothing to do."""


P = TypeVar("P", bound=AnsweringProcess)


class ProcessGroup(dict[int, P]):
    """Processes by the descriptors of their connections."""

    def __init__(self) -> None:
        super().__init__()
        self._selector = selectors.DefaultSelector()

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
        self._selector.modify(process.channel.fileno(), _events(process), process)

    def wait(self, seconds: float) -> None:
        """Wait until `messages` has something to do."""
        self._selector.select(seconds)

    def messages(self, seconds: float = 0.0) -> Iterator[tuple[P, bytes | None]]:
        """Wait; yield each message that has come with its process, and each process that has ended with None.

        Processes may be added and removed meanwhile.
        """
        for key, events in self._selector.select(seconds):
            if events & selectors.EVENT_WRITE and self._holds(key.data):
                self.send(key.data)
            if events & selectors.EVENT_READ:
                yield from self.messages_of(key.data)

    def messages_of(self, process: P) -> Iterator[tuple[P, bytes | None]]:
        """Yield the messages of one process that have come, and the process with None if it has ended."""
        if self._holds(process):
            try:
                for message in process.channel.messages():
                    yield process, message
            except (EOFError, ValueError):  # the last output of the fork server is not a message
                if self._holds(process):
                    yield process, None

    def close(self) -> None:
        """Remove all processes. In a fork of this process this leaves the original as it is, unlike `remove`."""
        self.clear()
        self._selector.close()

    def _holds(self, process: P) -> bool:
        return self.get(process.channel.fileno()) is process


def _events(process: AnsweringProcess) -> int:
    return selectors.EVENT_READ | (selectors.EVENT_WRITE if process.channel.has_more_to_send else 0)
