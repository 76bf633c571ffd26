"""The supervisor of an interpreter, which the fork server (`fork_server`) forks and `interpreter_process` talks to.

The processes are those of `child`: the *supervisor* never runs a cell; the *init process* of the namespace reaps
orphans, and stops and continues all other processes for the supervisor, so that nothing runs between calls; the
*interpreter* is its child.

The interpreter is not trusted. Its reply only says whether a cell raised, in one byte after a token that the supervisor
draws for each call, so that no reply can be written ahead. A cell's output comes through a pipe and can be anything.
The supervisor itself measures time and the length of the output and sees how the interpreter ends.
"""

from __future__ import annotations

import _signal as signal  # type: ignore[import-not-found]  # signal would make enums of all its numbers
import codecs
import fcntl
import marshal
import os
import select
import struct
import time
from contextlib import suppress

from explorl.sandbox import linux
from explorl.sandbox.codec import LOAD_BYTES, describe_error
from explorl.sandbox.frames import FrameWriter, receive, send_json
from explorl.sandbox.interpreter_child import OUTPUT, RAISED, SUCCEEDED, TOKEN, serve
from explorl.sandbox.supervised import (
    CALLS,
    MEMORY_EXIT,
    REPLIES,
    Supervised,
    exit_like,
    reap,
    restrict_supervisor,
    wake_on_child_exit,
)
from explorl.sandbox.usage import UsageBudget

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, NoReturn

_FIONREAD = 0x541B
_STOP, _CONTINUE = b"s", b"c"
_EXIT_PATIENCE = 1.0
"""Seconds that an interpreter has to end after closing its pipe before it counts as killed."""


class TruncatedOutput:
    """A cell's output, cut in the middle to ``most`` characters, since an error message comes last."""

    def __init__(self, most: int) -> None:
        self.cut = 0
        """Number of characters left out."""
        self._head, self._tail = "", ""
        self._head_size, self._tail_size = most - most // 2, most // 2
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, data: bytes, final: bool = False) -> None:
        """Append bytes, which may end within a character unless ``final``."""
        text = self._decoder.decode(data, final)
        room = self._head_size - len(self._head)
        self._head += text[:room]
        self._tail += text[room:]
        excess = len(self._tail) - self._tail_size
        if excess > 0:
            self._tail = self._tail[excess:]
            self.cut += excess

    @property
    def parts(self) -> tuple[str, str]:
        """The text before the cut, and the text after it."""
        self.add(b"", final=True)
        return self._head, self._tail


def supervise(server: int) -> NoReturn:  # pragma: no cover
    """Run the calls that arrive on standard input, a socket, and answer there."""
    linux.die_with(server)
    request = marshal.loads(receive(0))
    try:
        interpreter = _Interpreter(request, server)
    except Exception as error:
        send_json(1, {"status": "setup", "error": describe_error(error)})
        os._exit(0)
    send_json(1, {"status": "ready"})
    while True:
        try:
            message = receive(0)
        except (EOFError, OSError):
            interpreter.end()
            os._exit(0)
        answer = interpreter.call(message[LOAD_BYTES:], int.from_bytes(message[:LOAD_BYTES], "big"))
        send_json(1, answer)
        if answer["status"] not in ("ok", "error"):
            os._exit(0)
        interpreter.stop()


class _Interpreter(Supervised):  # pragma: no cover
    """The interpreter's processes and the pipes to them."""

    def __init__(self, request: dict[str, Any], server: int) -> None:
        self._limits = request["limits"]
        restrict_supervisor(request)
        nothing = os.memfd_create("stdin")
        calls, calls_out = os.pipe()
        self._replies, replies = os.pipe()
        self._output, output = os.pipe()
        orders, self._orders = os.pipe()
        theirs = {0: nothing, 1: output, 2: output, CALLS: calls, REPLIES: replies, OUTPUT: output}
        super().__init__(request, server, theirs, serve, init_main=lambda interpreter: _run_init(interpreter, orders))
        for descriptor in {*theirs.values(), orders}:
            os.close(descriptor)
        self._calls = FrameWriter(calls_out)
        for descriptor in (self._replies, self._output):
            os.set_blocking(descriptor, False)
        self.stop()

    def stop(self) -> None:
        """Stop all processes until the next call."""
        self._order(_STOP)

    def call(self, source: bytes, load: int) -> dict[str, Any]:
        """Run a cell; return its status and its output."""
        start = time.monotonic()
        output = TruncatedOutput(self._limits["output"])
        self.usage.update()
        budget = UsageBudget(self.usage, self._limits["seconds"], load, disk=self.disk)
        self._order(_CONTINUE)
        token = os.urandom(TOKEN)
        reply = self._exchange(token, source, output, budget)
        is_full = self.disk is not None and self.disk.is_exceeded()  # also after a cell too short for a check
        if reply == token + SUCCEEDED and not is_full:
            status = "ok"
        elif reply == token + RAISED and not is_full:
            status = "error"
        else:
            ended = self.reason_for_end()
            status = "killed" if is_full else "timeout" if budget.is_exceeded else ended
        output.add(self._pending_output())
        head, tail = output.parts
        return {"status": status, "head": head, "tail": tail, "cut": output.cut, "seconds": time.monotonic() - start}

    def reason_for_end(self) -> str:
        """Kill what is left; return how the interpreter had ended: "exited", "memory" or else "killed"."""
        deadline = time.monotonic() + _EXIT_PATIENCE
        while not self.has_ended() and self._hung_up() and time.monotonic() < deadline:
            time.sleep(0.002)
        (code,) = self.end()
        if code == MEMORY_EXIT:
            return "memory"
        return "exited" if 0 <= code < 128 else "killed"

    def _order(self, order: bytes) -> None:
        with suppress(OSError):  # it has ended, which the next call will notice
            if self.in_namespaces:
                os.write(self._orders, order)
            else:
                os.kill(self.pids[0], signal.SIGSTOP if order == _STOP else signal.SIGCONT)

    def _exchange(self, token: bytes, source: bytes, output: TruncatedOutput, budget: UsageBudget) -> bytes:
        """Send the call and read the output; return the start of a reply, incomplete if there is none in time."""
        reply = b""  # not a frame: of this length, whatever the interpreter writes
        self._calls.send(token + source)
        poll = select.poll()
        for descriptor in (self._replies, self._output):
            poll.register(descriptor, select.POLLIN)
        if self._calls.has_more_to_send:
            poll.register(self._calls.writing, select.POLLOUT)
        poll.register(0, 0)  # a hangup is always reported
        while len(reply) < TOKEN + 1 and not budget.is_exceeded:
            ready = dict(poll.poll(budget.seconds_to_check * 1000))
            if 0 in ready:
                self.end()
                os._exit(0)
            if self._calls.writing in ready:
                self._calls.flush()
                if not self._calls.has_more_to_send:
                    poll.unregister(self._calls.writing)
            if self._output in ready:
                data = os.read(self._output, 1 << 16)
                output.add(data)
                if not data:
                    poll.unregister(self._output)
            if self._replies in ready:
                part = os.read(self._replies, TOKEN + 1 - len(reply))
                if not part:
                    break
                reply += part
            budget.check()
        return reply

    def _pending_output(self) -> bytes:
        """Return what is in the pipe now, and no more: processes that the cell started may still be writing."""
        length = struct.unpack("i", fcntl.ioctl(self._output, _FIONREAD, bytes(4)))[0]
        return os.read(self._output, length) if length else b""

    def _hung_up(self) -> bool:
        poll = select.poll()
        poll.register(self._replies, 0)
        return bool(poll.poll(0))


def _run_init(interpreter: int, orders: int) -> NoReturn:  # pragma: no cover
    """Run as the init process: execute orders, reap orphans, and exit with the interpreter or the supervisor."""
    orders = os.dup2(orders, 0)
    os.closerange(1, 1 << 16)
    child_exits = wake_on_child_exit()
    poll = select.poll()
    for descriptor in (orders, child_exits):
        poll.register(descriptor, select.POLLIN)
    while True:
        for pid, code in reap():
            if pid == interpreter:
                exit_like(code)
        for descriptor, _ in poll.poll():
            if descriptor == child_exits:
                os.read(child_exits, 4096)
                continue
            order = os.read(orders, 1)
            if not order:
                os._exit(1)
            with suppress(ProcessLookupError):  # there is no other process
                os.kill(-1, signal.SIGSTOP if order == _STOP else signal.SIGCONT)
