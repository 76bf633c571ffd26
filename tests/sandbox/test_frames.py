"""Messages between processes, of which one may be hostile."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from explorl.sandbox.frames import Channel, FrameReader, frame


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    reading, writing = os.pipe()
    yield reading, writing
    os.close(reading)
    os.close(writing)


def test_messages_arrive_in_pieces(pipe: tuple[int, int]) -> None:
    reader = FrameReader(pipe[0])
    assert list(reader.messages()) == []
    data = frame(b"one", b"", b"two")
    os.write(pipe[1], data[:5])
    assert list(reader.messages()) == []
    os.write(pipe[1], data[5:-1])
    assert list(reader.messages()) == [b"one", b""]
    os.write(pipe[1], data[-1:])
    assert list(reader.messages()) == [b"two"]


def test_end_comes_after_the_last_message() -> None:
    reading, writing = os.pipe()
    os.write(writing, frame(b"last") + b"half")
    os.close(writing)
    reader = FrameReader(reading)
    assert list(reader.messages()) == [b"last"]
    with pytest.raises(EOFError):
        list(reader.messages())
    os.close(reading)


def test_what_is_too_long_is_no_message(pipe: tuple[int, int]) -> None:
    reader = FrameReader(pipe[0], 99)
    os.write(pipe[1], frame(b"one", bytes(100)))
    messages = reader.messages()
    assert next(messages) == b"one"
    with pytest.raises(ValueError, match="100 bytes; 99 are allowed"):
        next(messages)


def test_no_more_than_a_chunk_is_read_at_once() -> None:
    """A process that never stops writing cannot keep its reader from checking the time."""
    reading = os.open("/dev/zero", os.O_RDONLY)
    assert list(FrameReader(reading).messages()) == [b""] * (65536 // 8)
    os.close(reading)


def test_long_messages_are_sent_as_there_is_room(pipe: tuple[int, int]) -> None:
    sender, reader = Channel(pipe[0], pipe[1]), FrameReader(pipe[0])
    message = bytes(range(256)) * 4096
    sender.send(message)
    assert sender.has_more_to_send
    arrived: list[bytes] = []
    while not arrived:
        arrived = list(reader.messages())
        sender.flush()
    assert arrived == [message]
    assert not sender.has_more_to_send


def test_what_nobody_reads_is_dropped() -> None:
    reading, writing = os.pipe()
    sender = Channel(os.dup(reading), writing)
    os.close(sender.fileno())
    os.close(reading)
    sender.send(b"x")
    assert not sender.has_more_to_send
    os.close(writing)
