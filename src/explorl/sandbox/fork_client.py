"""Where `programs` gets its processes from: a nursery, which has imported what they need and forks one per program.

The nursery (`nurse`) is a child of this process, started at first use. It never reads a request.
Each call sends it four descriptors: three pipes, which become the new keeper's standard input, output and error, and a
*leash*, a socket on which the nursery says how the keeper has ended, and whose end here is the keeper's death.
"""

from __future__ import annotations

import atexit
import os
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import BinaryIO

from explorl.sandbox.scratch import sweep

BOOTSTRAP = """
import sys, types
for name, path in zip(("explorl", "explorl.sandbox"), sys.argv[1:]):
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = [path]
from explorl.sandbox.fork_server import main
main()
"""
"""Imports the child by its name, but not the packages around it, which would import torch."""
_FOLDERS = [str(Path(__file__).resolve().parents[level]) for level in (1, 0)]
_PATIENCE = 5.0
"""Seconds that the nursery has to kill a keeper, or to end, when it was told to."""


class ForkServerDied(RuntimeError):
    """The nursery has ended, and with it the keeper. Says what it left on standard error."""


class ForkServerClient:
    """The nursery of this process, and of all its threads."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._running: tuple[subprocess.Popen[bytes], socket.socket] | None = None

    def run_program(self, message: bytes, seconds: float) -> tuple[int, bytes, bytes]:
        """Give a new keeper its message; its exit status (negative: the signal), its answer and its standard error.

        An answer says by its first eight bytes how long it is. When all of it is there, the keeper has only to end, and
        is not waited for: the kernel takes milliseconds to take its namespaces down.
        TimeoutError when it takes longer, and then it is dead with all its group; `ForkServerDied` when it has died.
        """
        with ExitStack() as stack:
            with self._lock:
                (given, into), (out, answer), (err, errors) = (_pipe(stack) for _ in range(3))
                sent = (given, answer, errors)
                process, leash = self._fork(b"program", [end.fileno() for end in sent])
                stack.enter_context(leash)
                for end in sent:
                    end.close()
            try:
                return _talk(message, into, out, err, leash, time.monotonic() + seconds)
            except (EOFError, ConnectionError):
                raise ForkServerDied(self._end(process)) from None
            except BaseException:
                self._kill(process, leash)
                raise

    def start_interpreter(self) -> tuple[socket.socket, socket.socket]:
        """A new keeper of a notebook: the socket to talk with it, and its leash, whose closing is its death.

        `ForkServerDied` when it has died.
        """
        ours, theirs = socket.socketpair()
        with theirs, self._lock:
            try:
                _, leash = self._fork(b"interpreter", [theirs.fileno()] * 3)
            except BaseException:
                ours.close()
                raise
        return ours, leash

    def close(self) -> None:
        """End the nursery, if there is one. The next call starts another."""
        with self._lock:
            if self._running is not None:
                self._end(self._running[0])

    def _start(self) -> tuple[subprocess.Popen[bytes], socket.socket]:
        """The nursery and the socket to it; a new one if there is none alive."""
        if self._running is not None and self._running[0].poll() is not None:
            self.close()
        if self._running is None:
            sweep()
            control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with theirs:
                process = subprocess.Popen(
                    [sys.executable, "-I", "-S", "-X", "utf8", "-c", BOOTSTRAP, *_FOLDERS],
                    stdin=theirs.fileno(),
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    env={name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ},
                    cwd="/",
                    start_new_session=True,
                )
            control.setblocking(False)  # a nursery that takes no more is none
            self._running = process, control
        return self._running

    def _fork(self, kind: bytes, standard: Sequence[int]) -> tuple[subprocess.Popen[bytes], socket.socket]:
        """A new keeper with these standard descriptors: its nursery, and its leash."""
        process, control = self._start()
        leash, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            try:
                socket.send_fds(control, [kind], [*standard, theirs.fileno()])
            except (ConnectionError, BlockingIOError):
                leash.close()
                raise ForkServerDied(self._end(process)) from None
        return process, leash

    def _end(self, process: subprocess.Popen[bytes]) -> str:
        """Make sure that this nursery is gone, and its keepers with it; what it has said."""
        with self._lock:
            if self._running is None or self._running[0] is not process:
                return "it has ended"
            control, self._running = self._running[1], None
            control.close()  # on which it ends, if it still can
            try:
                said, _ = process.communicate(timeout=_PATIENCE)
            except subprocess.TimeoutExpired:
                process.kill()
                said, _ = process.communicate()
            return said.decode(errors="replace")[-500:]

    def _kill(self, process: subprocess.Popen[bytes], leash: socket.socket) -> None:
        """Have a keeper killed, which only the nursery can do without mistaking it for another, and wait for that."""
        leash.shutdown(socket.SHUT_WR)
        if not select.select([leash], [], [], _PATIENCE)[0]:
            self._end(process)

    # Around a fork of this process, which waits for other threads to be done with starting and sending.

    def before_fork(self) -> None:
        self._lock.acquire()

    def after_fork(self) -> None:
        self._lock.release()

    def forget(self) -> None:
        """In the child: leave the nursery to the parent."""
        self._lock = threading.RLock()
        if self._running is not None:
            process, control = self._running
            process.returncode = 0  # not a child of this process: nothing to wait for, or to warn of
            control.close()
            self._running = None


def _pipe(stack: ExitStack) -> tuple[BinaryIO, BinaryIO]:
    reading, writing = os.pipe()
    return stack.enter_context(open(reading, "rb", 0)), stack.enter_context(open(writing, "wb", 0))


def _talk(
    message: bytes, into: BinaryIO, out: BinaryIO, err: BinaryIO, leash: socket.socket, deadline: float
) -> tuple[int, bytes, bytes]:
    """Write the message and read what comes, until that is an answer or the nursery says that the keeper has ended.

    Not until the pipes end: another thread may have forked this process, and the copy holds their other ends too.
    """
    heard = {out.fileno(): bytearray(), err.fileno(): bytearray()}
    left = memoryview(message)
    poll = select.poll()
    poll.register(leash, select.POLLIN)
    poll.register(into, select.POLLOUT)
    for end in (into, out, err):
        os.set_blocking(end.fileno(), False)
    for end in (out, err):
        poll.register(end, select.POLLIN)
    while True:
        remaining = deadline - time.monotonic()
        ready = {descriptor for descriptor, _ in poll.poll(max(0.0, remaining) * 1000)}
        if remaining <= 0:
            raise TimeoutError
        if not into.closed and into.fileno() in ready:
            with suppress(BlockingIOError):
                try:
                    left = left[os.write(into.fileno(), left) :]
                except BrokenPipeError:
                    left = left[:0]
            if not left:
                poll.unregister(into)
                into.close()
        for descriptor in ready & heard.keys():
            if not _drain(descriptor, heard[descriptor]):
                poll.unregister(descriptor)
        code = None
        if leash.fileno() in ready:
            status = leash.recv(64)
            if not status:
                raise EOFError
            code = os.waitstatus_to_exitcode(int(status))
            for descriptor, content in heard.items():
                _drain(descriptor, content)
        answer = heard[out.fileno()]
        if len(answer) >= 8 and len(answer) - 8 >= int.from_bytes(answer[:8], "big"):
            code = 0
        if code is not None:
            return code, bytes(answer[8:]), bytes(heard[err.fileno()])


def _drain(descriptor: int, content: bytearray) -> bool:
    """Add to ``content`` what can be read now; whether there may be more later."""
    with suppress(BlockingIOError):
        while part := os.read(descriptor, 1 << 16):
            content += part
        return False
    return True


fork_server_client = ForkServerClient()
os.register_at_fork(
    before=fork_server_client.before_fork,
    after_in_parent=fork_server_client.after_fork,
    after_in_child=fork_server_client.forget,
)
atexit.register(fork_server_client.close)
