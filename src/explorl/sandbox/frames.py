"""Frames: how the sandbox's processes send each other messages. Eight bytes of length, then the message.

Imported in the sandbox too, so it imports nothing slow.
"""

from __future__ import annotations

import json
import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

MAX_FRAME = 1 << 22
"""Longest JSON message from a process that is not trusted, in bytes."""
_HEADER = 8
_CHUNK = 1 << 16  # also what a pipe holds


def frame(*messages: bytes) -> bytes:
    """Return the messages as frames, one after the other."""
    return b"".join(len(message).to_bytes(_HEADER, "big") + message for message in messages)


def send(descriptor: int, *messages: bytes) -> None:
    """Write messages; wait until the other process has made room for them."""
    write_all(descriptor, frame(*messages))


def receive(descriptor: int, most: int = 1 << 40) -> bytes:
    """Wait for the next message; raise EOFError at the end, and ValueError if it is longer than ``most`` bytes."""
    return _read(descriptor, _length(_read(descriptor, _HEADER), most))


def send_json(descriptor: int, message: Any) -> None:
    send(descriptor, json.dumps(message).encode())


def receive_json(descriptor: int) -> Any:
    """Return the next message of an untrusted process, which may be any JSON; raise ValueError if it is not JSON."""
    return json.loads(receive(descriptor, MAX_FRAME))


def write_all(descriptor: int, data: bytes) -> None:
    left = memoryview(data)
    while left:
        left = left[os.write(descriptor, left) :]


def _read(descriptor: int, length: int) -> bytes:
    parts = []
    while length:
        part = os.read(descriptor, min(length, 1 << 20))
        if not part:
            raise EOFError("the other process closed the connection")
        parts.append(part)
        length -= len(part)
    return b"".join(parts)


def _length(header: bytes | bytearray, most: int) -> int:
    length = int.from_bytes(header[:_HEADER], "big")
    if length > most:
        raise ValueError(f"a message of {length} bytes; {most} are allowed")
    return length


class FrameReader:
    """Reads messages without waiting for them."""

    def __init__(self, descriptor: int, most: int = 1 << 40) -> None:
        """Read from this descriptor; what begins with a length of more than ``most`` bytes is not a message."""
        os.set_blocking(descriptor, False)
        self._descriptor, self._most = descriptor, most
        self._received = bytearray()

    def fileno(self) -> int:
        return self._descriptor

    def messages(self) -> Iterator[bytes]:
        """Yield the messages that are complete now.

        Then raise EOFError if the other process has closed the connection, or ValueError if what follows is not a
        message. Reads one chunk, however much there is: the other process may never stop writing.
        """
        try:
            part = os.read(self._descriptor, _CHUNK)
        except BlockingIOError:
            return
        except ConnectionError:
            part = b""
        received = self._received
        received += part
        while len(received) >= _HEADER and len(received) >= (end := _HEADER + _length(received, self._most)):
            message = bytes(received[_HEADER:end])
            del received[:end]
            yield message
        if not part:
            raise EOFError("the other process closed the connection")


class FrameWriter:
    """Sends messages without waiting for the other process."""

    def __init__(self, descriptor: int) -> None:
        os.set_blocking(descriptor, False)
        self.writing, self._left = descriptor, bytearray()

    @property
    def has_more_to_send(self) -> bool:
        return bool(self._left)

    def send(self, *messages: bytes) -> None:
        """Send as much as there is room for now; `flush` sends the rest."""
        self._left += frame(*messages)
        self.flush()

    def flush(self) -> None:
        """Send as much of the rest as there is room for now."""
        try:
            while self._left:
                del self._left[: os.write(self.writing, self._left)]
        except BlockingIOError:
            pass
        except OSError:  # the other process has ended, which reading will show
            self._left.clear()


class Channel(FrameReader, FrameWriter):
    """A connection to another process."""

    def __init__(self, reading: int, writing: int, most: int = 1 << 40) -> None:
        """Use these two descriptors, which may be the same."""
        FrameReader.__init__(self, reading, most)
        FrameWriter.__init__(self, writing)
