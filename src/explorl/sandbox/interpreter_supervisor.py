"""The keeper of an interpreter: what the nursery (`nurse`) forks for each, and `interpreter` talks to.

Processes as in `child`: the *keeper* never runs a cell; the *first process* of the namespace buries what dies, and
stops and continues all others when the keeper says so, so that between calls nothing runs; the *notebook* is its child.

The notebook cannot be believed. All that its reply says is whether a cell raised, in one byte behind a token that the
keeper has drawn for this call, so no reply can be written ahead. What a cell has shown comes through a pipe and can be
anything; time, the length of the output and how a notebook has ended are the keeper's own knowledge.
"""

from __future__ import annotations

import _signal as signal  # type: ignore[import-not-found]  # not signal, which makes enums of all numbers
import codecs
import fcntl
import marshal
import os
import select
import struct
import time
from contextlib import suppress

from explorl.sandbox import child as program
from explorl.sandbox import linux
from explorl.sandbox.child import CALLS, REPLIES
from explorl.sandbox.codec import CROWD
from explorl.sandbox.interpreter_child import BAD, GOOD, OUTPUT, TOKEN, serve
from explorl.sandbox.usage import Usage, longest, longest_look

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, NoReturn

    from explorl.sandbox.disk import Disk

_FIONREAD = 0x541B
_STOP, _GO_ON = b"s", b"c"
_DYING = 1.0
"""Seconds that a notebook which has hung up has to end, before it counts as killed."""


class Shown:
    """What a cell shows, cut in the middle to ``most`` characters: an error comes last, and is worth seeing."""

    def __init__(self, most: int) -> None:
        self.cut = 0
        """Characters that were left out."""
        self._head, self._tail = "", ""
        self._in_head, self._in_tail = most - most // 2, most // 2
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, data: bytes, final: bool = False) -> None:
        text = self._decoder.decode(data, final)
        room = self._in_head - len(self._head)
        self._head += text[:room]
        self._tail += text[room:]
        surplus = len(self._tail) - self._in_tail
        if surplus > 0:
            self._tail = self._tail[surplus:]
            self.cut += surplus

    @property
    def parts(self) -> tuple[str, str]:
        """What comes before the cut, and what behind it."""
        self.add(b"", final=True)
        return self._head, self._tail


def supervise(server: int) -> NoReturn:  # pragma: no cover (another process)
    """Serve the calls that come on standard input, a socket, and answer there."""
    linux.die_with(server)
    request = marshal.loads(program.receive(0))
    try:
        notebook = _Notebook(request, server)
    except Exception as error:
        program.send_json(1, {"status": "setup", "error": program.described(error)})
        os._exit(0)
    program.send_json(1, {"status": "ready"})
    while True:
        try:
            message = program.receive(0)
        except (EOFError, OSError):
            notebook.end()
            os._exit(0)
        answer = notebook.call(message[CROWD:], int.from_bytes(message[:CROWD], "big"))
        program.send_json(1, answer)
        if answer["status"] not in ("ok", "error"):
            os._exit(0)
        notebook.stop()


class _Notebook:  # pragma: no cover (another process)
    """The notebook's processes and the ways to them."""

    def __init__(self, request: dict[str, Any], server: int) -> None:
        self._limits = request["limits"]
        self._in_namespaces = "namespaces" in request["layers"]
        program.restrict_keeper(request)
        uid, proc, self._disk = program.surround(request, server)
        nothing = os.memfd_create("stdin")
        calls_in, self._calls = os.pipe()
        self._replies, replies_out = os.pipe()
        self._output, output_out = os.pipe()
        orders_in, self._orders = os.pipe()
        for descriptor in (self._calls, self._replies, self._output):
            os.set_blocking(descriptor, False)
        theirs = {0: nothing, 1: output_out, 2: output_out, CALLS: calls_in, REPLIES: replies_out, OUTPUT: output_out}

        def first(notebook: int) -> NoReturn:
            _be_first(notebook, orders_in)

        self._child, questions = program.launch(request, theirs, uid, serve, first)
        for descriptor in (nothing, calls_in, replies_out, output_out, orders_in):
            os.close(descriptor)
        program.count_threads(self._child, questions, self._limits["processes"])
        self._usage = Usage(proc, self._child)
        self.stop()

    def stop(self) -> None:
        """Let nothing run until the next call."""
        self._order(_STOP)

    def call(self, source: bytes, crowd: int) -> dict[str, Any]:
        """Run a cell: what became of it and what it has shown."""
        start = time.monotonic()
        shown = Shown(self._limits["characters"])
        limit = Limit(self._usage, self._limits["seconds"], crowd, self._disk)
        self._order(_GO_ON)
        token = os.urandom(TOKEN)
        reply = self._talk(len(token + source).to_bytes(8, "big") + token + source, shown, limit)
        is_full = self._disk is not None and self._disk.is_over()  # also after a cell too short to be looked at
        if reply == token + GOOD and not is_full:
            status = "ok"
        elif reply == token + BAD and not is_full:
            status = "error"
        else:
            status = self.end()
            if is_full:
                status = "killed"
            elif limit.is_over:
                status = "timeout"
        shown.add(self._left())
        head, tail = shown.parts
        return {"status": status, "head": head, "tail": tail, "cut": shown.cut, "seconds": time.monotonic() - start}

    def end(self) -> str:
        """Kill what is left; how the notebook has ended, if it had: "exited", "memory" or else "killed"."""
        ended, code = os.waitpid(self._child, os.WNOHANG)
        deadline = time.monotonic() + _DYING
        while not ended and self._hung_up() and time.monotonic() < deadline:
            time.sleep(0.002)
            ended, code = os.waitpid(self._child, os.WNOHANG)
        if not ended:
            os.kill(self._child, signal.SIGKILL)
            os.waitpid(self._child, 0)
        if not self._in_namespaces:
            program.kill_orphans()
        if not ended:
            return "killed"
        status = os.waitstatus_to_exitcode(code)
        if status == program.MEMORY_EXIT:
            return "memory"
        return "exited" if 0 <= status < 128 else "killed"

    def _order(self, order: bytes) -> None:
        with suppress(OSError):  # it is gone, as the call will find
            if self._in_namespaces:
                os.write(self._orders, order)
            else:
                os.kill(self._child, signal.SIGSTOP if order == _STOP else signal.SIGCONT)

    def _talk(self, message: bytes, shown: Shown, limit: Limit) -> bytes:
        """Send the call and take what is shown; the first bytes of a reply, fewer if there is none or time is up."""
        left = memoryview(message)
        reply = b""
        poll = select.poll()
        for descriptor in (self._replies, self._output):
            poll.register(descriptor, select.POLLIN)
        poll.register(self._calls, select.POLLOUT)
        poll.register(0, 0)  # its end is always told
        while len(reply) < TOKEN + 1 and not limit.is_over:
            ready = dict(poll.poll(limit.rest * 1000))
            if 0 in ready:
                self.end()
                os._exit(0)
            if self._calls in ready:
                left = left[_written(self._calls, left) :]
                if not left or ready[self._calls] & select.POLLERR:
                    poll.unregister(self._calls)
            if self._output in ready and not self._take(shown):
                poll.unregister(self._output)
            if self._replies in ready:
                part = os.read(self._replies, TOKEN + 1 - len(reply))
                if not part:
                    break
                reply += part
            limit.look()
        return reply

    def _take(self, shown: Shown) -> bool:
        """Read what is in the pipe; False at its end."""
        data = os.read(self._output, 1 << 16)
        shown.add(data)
        return bool(data)

    def _left(self) -> bytes:
        """What the cell wrote before it replied or ended, and no more: others may still be writing."""
        length = struct.unpack("i", fcntl.ioctl(self._output, _FIONREAD, bytes(4)))[0]
        return os.read(self._output, length) if length else b""

    def _hung_up(self) -> bool:
        poll = select.poll()
        poll.register(self._replies, 0)
        return bool(poll.poll(0))


class Limit:
    """What one call may use: time, counted as `Usage` does, and a disk where that is the host's.

    Where a ``crowd`` shares each processor, a call may wait for one as many times longer; that time is not its own.
    """

    def __init__(self, usage: Usage, seconds: float, crowd: int, disk: Disk | None = None) -> None:
        self.is_over = False
        self._usage, self._seconds, self._disk = usage, seconds, disk
        self._cores = len(os.sched_getaffinity(0))
        usage.update()
        self._time, self._clock, self._processor = usage.time, usage.clock, usage.processor
        self._longest = longest(seconds) * (max(1, crowd) if usage.knows_waiting else 1)
        self._next = 0.0
        self._plan()

    @property
    def rest(self) -> float:
        """Seconds until it is time to look."""
        return max(0.0, self._next - time.monotonic())

    def look(self) -> None:
        """Find out whether a limit is reached, if it may be."""
        if self.rest == 0:
            self._usage.update()
            self.is_over = min(self._left()) <= 0 or (self._disk is not None and self._disk.is_over())
            self._plan()

    def _left(self) -> tuple[float, float, float]:
        """Of its own time, of processor time, and on the clock."""
        usage = self._usage
        own, processor = usage.time - self._time, usage.processor - self._processor
        return self._seconds - own, self._seconds - processor, self._longest - (usage.clock - self._clock)

    def _plan(self) -> None:
        own, processor, clock = self._left()
        rest = min(own, processor / self._cores, clock)
        self._next = time.monotonic() + min(max(rest, 0.005), longest_look(self._disk))


def _written(descriptor: int, data: memoryview) -> int:  # pragma: no cover (another process)
    try:
        return os.write(descriptor, data)
    except BlockingIOError:
        return 0
    except OSError:  # nobody reads
        return len(data)


def _be_first(notebook: int, orders: int) -> NoReturn:  # pragma: no cover (another process)
    """Be the first process of the namespace: obey the keeper, bury what dies, go with the notebook or the keeper."""
    orders = os.dup2(orders, 0)
    os.closerange(1, 1 << 16)
    wake_in, wake_out = os.pipe()
    os.set_blocking(wake_in, False)
    os.set_blocking(wake_out, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake_out, warn_on_full_buffer=False)
    poll = select.poll()
    for descriptor in (orders, wake_in):
        poll.register(descriptor, select.POLLIN)
    _bury(notebook)
    while True:
        for descriptor, _ in poll.poll():
            if descriptor == wake_in:
                os.read(wake_in, 4096)
                _bury(notebook)
            else:
                _obey(os.read(orders, 1))


def _obey(order: bytes) -> None:  # pragma: no cover (another process)
    if not order:
        os._exit(1)
    with suppress(ProcessLookupError):  # all others are gone
        os.kill(-1, signal.SIGSTOP if order == _STOP else signal.SIGCONT)


def _bury(notebook: int) -> None:  # pragma: no cover (another process)
    while True:
        try:
            pid, code = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == notebook:
            status = os.waitstatus_to_exitcode(code)
            os._exit(status if status >= 0 else 128 - status)
        if pid == 0:
            return
