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

from explorl.sandbox import child, linux
from explorl.sandbox.child import CALLS, REPLIES
from explorl.sandbox.codec import LOAD_BYTES
from explorl.sandbox.frames import frame, receive, send_json
from explorl.sandbox.interpreter_child import OUTPUT, RAISED, SUCCEEDED, TOKEN, serve
from explorl.sandbox.usage import Usage, check_interval, wall_limit

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, NoReturn

    from explorl.sandbox.disk import DiskQuota

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


def supervise(server: int) -> NoReturn:  # pragma: no cover (another process)
    """Run the calls that arrive on standard input, a socket, and answer there."""
    linux.die_with(server)
    request = marshal.loads(receive(0))
    try:
        interpreter = _InterpreterSession(request, server)
    except Exception as error:
        send_json(1, {"status": "setup", "error": child.describe_error(error)})
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


class _InterpreterSession:  # pragma: no cover (another process)
    """The interpreter's processes and the pipes to them."""

    def __init__(self, request: dict[str, Any], server: int) -> None:
        self._limits = request["limits"]
        self._in_namespaces = "namespaces" in request["layers"]
        child.restrict_supervisor(request)
        uid, proc, self._disk = child.prepare_isolation(request, server)
        nothing = os.memfd_create("stdin")
        calls_in, self._calls = os.pipe()
        self._replies, replies_out = os.pipe()
        self._output, output_out = os.pipe()
        orders_in, self._orders = os.pipe()
        for descriptor in (self._calls, self._replies, self._output):
            os.set_blocking(descriptor, False)
        theirs = {0: nothing, 1: output_out, 2: output_out, CALLS: calls_in, REPLIES: replies_out, OUTPUT: output_out}

        def first(interpreter: int) -> NoReturn:
            _run_init(interpreter, orders_in)

        self._child, thread_requests = child.start_isolated(request, theirs, uid, serve, first)
        for descriptor in (nothing, calls_in, replies_out, output_out, orders_in):
            os.close(descriptor)
        child.approve_threads(self._child, thread_requests, self._limits["processes"])
        self._usage = Usage(proc, self._child)
        self.stop()

    def stop(self) -> None:
        """Stop all processes until the next call."""
        self._order(_STOP)

    def call(self, source: bytes, load: int) -> dict[str, Any]:
        """Run a cell; return its status and its output."""
        start = time.monotonic()
        output = TruncatedOutput(self._limits["characters"])
        limit = CallBudget(self._usage, self._limits["seconds"], load, self._disk)
        self._order(_CONTINUE)
        token = os.urandom(TOKEN)
        reply = self._exchange(frame(token + source), output, limit)
        is_full = self._disk is not None and self._disk.is_exceeded()  # also after a cell too short for a check
        if reply == token + SUCCEEDED and not is_full:
            status = "ok"
        elif reply == token + RAISED and not is_full:
            status = "error"
        else:
            status = self.end()
            if is_full:
                status = "killed"
            elif limit.is_exceeded:
                status = "timeout"
        output.add(self._pending_output())
        head, tail = output.parts
        return {"status": status, "head": head, "tail": tail, "cut": output.cut, "seconds": time.monotonic() - start}

    def end(self) -> str:
        """Kill what is left; return how the interpreter had ended: "exited", "memory" or else "killed"."""
        ended, code = os.waitpid(self._child, os.WNOHANG)
        deadline = time.monotonic() + _EXIT_PATIENCE
        while not ended and self._hung_up() and time.monotonic() < deadline:
            time.sleep(0.002)
            ended, code = os.waitpid(self._child, os.WNOHANG)
        if not ended:
            os.kill(self._child, signal.SIGKILL)
            os.waitpid(self._child, 0)
        if not self._in_namespaces:
            child.kill_orphans()
        if not ended:
            return "killed"
        status = os.waitstatus_to_exitcode(code)
        if status == child.MEMORY_EXIT:
            return "memory"
        return "exited" if 0 <= status < 128 else "killed"

    def _order(self, order: bytes) -> None:
        with suppress(OSError):  # it has ended, which the next call will notice
            if self._in_namespaces:
                os.write(self._orders, order)
            else:
                os.kill(self._child, signal.SIGSTOP if order == _STOP else signal.SIGCONT)

    def _exchange(self, message: bytes, output: TruncatedOutput, limit: CallBudget) -> bytes:
        """Send the call and read the output; return the start of a reply, incomplete if there is none in time."""
        left = memoryview(message)
        reply = b""
        poll = select.poll()
        for descriptor in (self._replies, self._output):
            poll.register(descriptor, select.POLLIN)
        poll.register(self._calls, select.POLLOUT)
        poll.register(0, 0)  # a hangup is always reported
        while len(reply) < TOKEN + 1 and not limit.is_exceeded:
            ready = dict(poll.poll(limit.seconds_to_check * 1000))
            if 0 in ready:
                self.end()
                os._exit(0)
            if self._calls in ready:
                left = left[_write_some(self._calls, left) :]
                if not left or ready[self._calls] & select.POLLERR:
                    poll.unregister(self._calls)
            if self._output in ready and not self._read_output(output):
                poll.unregister(self._output)
            if self._replies in ready:
                part = os.read(self._replies, TOKEN + 1 - len(reply))
                if not part:
                    break
                reply += part
            limit.check()
        return reply

    def _read_output(self, output: TruncatedOutput) -> bool:
        """Read what is in the pipe; return False at its end."""
        data = os.read(self._output, 1 << 16)
        output.add(data)
        return bool(data)

    def _pending_output(self) -> bytes:
        """Return what is in the pipe now, and no more: processes that the cell started may still be writing."""
        length = struct.unpack("i", fcntl.ioctl(self._output, _FIONREAD, bytes(4)))[0]
        return os.read(self._output, length) if length else b""

    def _hung_up(self) -> bool:
        poll = select.poll()
        poll.register(self._replies, 0)
        return bool(poll.poll(0))


class CallBudget:
    """The limits of one call: time, measured as by `Usage`, and the disk if it is the host's.

    With ``load`` interpreters per processor a call may wait that many times longer for one; this time does not count.
    """

    def __init__(self, usage: Usage, seconds: float, load: int, disk: DiskQuota | None = None) -> None:
        self.is_exceeded = False
        self._usage, self._seconds, self._disk = usage, seconds, disk
        self._cores = len(os.sched_getaffinity(0))
        usage.update()
        self._time, self._clock, self._processor = usage.time, usage.clock, usage.processor
        self._longest = wall_limit(seconds) * (max(1, load) if usage.knows_waiting else 1)
        self._next_check = 0.0
        self._plan()

    @property
    def seconds_to_check(self) -> float:
        """Seconds until the next check."""
        return max(0.0, self._next_check - time.monotonic())

    def check(self) -> None:
        """Set `is_exceeded` if a limit is reached; does nothing before the next check is due."""
        if self.seconds_to_check == 0:
            self._usage.update()
            self.is_exceeded = min(self._remaining()) <= 0 or (self._disk is not None and self._disk.is_exceeded())
            self._plan()

    def _remaining(self) -> tuple[float, float, float]:
        """Return the remaining own time, processor time and wall time in seconds."""
        usage = self._usage
        time_used, processor = usage.time - self._time, usage.processor - self._processor
        return self._seconds - time_used, self._seconds - processor, self._longest - (usage.clock - self._clock)

    def _plan(self) -> None:
        own_time, processor, clock = self._remaining()
        remaining = min(own_time, processor / self._cores, clock)
        self._next_check = time.monotonic() + min(max(remaining, 0.005), check_interval(self._disk))


def _write_some(descriptor: int, data: memoryview) -> int:  # pragma: no cover (another process)
    try:
        return os.write(descriptor, data)
    except BlockingIOError:
        return 0
    except OSError:  # the reader has closed the pipe
        return len(data)


def _run_init(interpreter: int, orders: int) -> NoReturn:  # pragma: no cover (another process)
    """Run as the init process: execute orders, reap orphans, and exit with the interpreter or the supervisor."""
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
    _reap(interpreter)
    while True:
        for descriptor, _ in poll.poll():
            if descriptor == wake_in:
                os.read(wake_in, 4096)
                _reap(interpreter)
            else:
                _execute_order(os.read(orders, 1))


def _execute_order(order: bytes) -> None:  # pragma: no cover (another process)
    if not order:
        os._exit(1)
    with suppress(ProcessLookupError):  # there is no other process
        os.kill(-1, signal.SIGSTOP if order == _STOP else signal.SIGCONT)


def _reap(interpreter: int) -> None:  # pragma: no cover (another process)
    while True:
        try:
            pid, code = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == interpreter:
            status = os.waitstatus_to_exitcode(code)
            os._exit(status if status >= 0 else 128 - status)
        if pid == 0:
            return
