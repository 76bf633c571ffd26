"""Start the sandbox's processes through a fork server, which has imported what they need and forks one per program.

The fork server (`fork_server`) is a child of this process, started at first use. It never reads a request.
Each call sends it four descriptors: three pipes, which become the new supervisor's standard input, output and error,
and a *control socket*, on which the server reports the supervisor's exit status. Closing its end here kills the
supervisor.
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

from explorl.sandbox.scratch import remove_leftover_folders

BOOTSTRAP = """
import sys, types
for name, path in zip(("explorl", "explorl.sandbox"), sys.argv[1:]):
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = [path]
from explorl.sandbox.fork_server import main
main()
"""
"""Imports the server's module by its name without the packages around it, which would import torch."""
_FOLDERS = [str(Path(__file__).resolve().parents[level]) for level in (1, 0)]
_END_TIMEOUT = 5.0
"""Seconds that the fork server has to kill a supervisor, or to end."""


class ForkServerDied(RuntimeError):
    """The fork server has ended, and the supervisor with it. The message is its standard error."""


class ForkServerClient:
    """The connection of this process, with all its threads, to its fork server."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._running: tuple[subprocess.Popen[bytes], socket.socket] | None = None

    def run_program(self, message: bytes, seconds: float) -> tuple[int, bytes, bytes]:
        """Send a message to a new supervisor; return its exit status (negative: a signal), answer and standard error.

        The first eight bytes of an answer are its length. A supervisor that has sent all of it is not waited for: the
        kernel takes milliseconds to remove its namespaces. Raise TimeoutError after ``seconds``, when the supervisor
        and its process group have been killed, and `ForkServerDied` if the server has died.
        """
        with ExitStack() as stack:
            with self._lock:
                (stdin_reader, stdin_writer), (out, answer), (err, errors) = (_pipe(stack) for _ in range(3))
                sent = (stdin_reader, answer, errors)
                process, control_socket = self._fork_supervisor(b"program", [end.fileno() for end in sent])
                stack.enter_context(control_socket)
                for end in sent:
                    end.close()
            try:
                return _exchange(message, stdin_writer, out, err, control_socket, time.monotonic() + seconds)
            except (EOFError, ConnectionError):
                raise ForkServerDied(self._end_server(process)) from None
            except BaseException:
                self._kill_supervisor(process, control_socket)
                raise

    def start_interpreter(self) -> tuple[socket.socket, socket.socket]:
        """Start a supervisor of an interpreter; return its message socket and its control socket.

        Closing the control socket kills it. Raise `ForkServerDied` if the server has died.
        """
        connection, peer = socket.socketpair()
        with peer, self._lock:
            try:
                _, control_socket = self._fork_supervisor(b"interpreter", [peer.fileno()] * 3)
            except BaseException:
                connection.close()
                raise
        return connection, control_socket

    def close(self) -> None:
        """End the fork server, if it runs. The next call starts another."""
        with self._lock:
            if self._running is not None:
                self._end_server(self._running[0])

    def _start_server(self) -> tuple[subprocess.Popen[bytes], socket.socket]:
        """Return the fork server and the socket to it; start one if none runs."""
        if self._running is not None and self._running[0].poll() is not None:
            self.close()
        if self._running is None:
            remove_leftover_folders()
            server_socket, peer = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with peer:
                process = subprocess.Popen(
                    [sys.executable, "-I", "-S", "-X", "utf8", "-c", BOOTSTRAP, *_FOLDERS],
                    stdin=peer.fileno(),
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    env={name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ},
                    cwd="/",
                    start_new_session=True,
                )
            server_socket.setblocking(False)  # a full socket means that the server hangs
            self._running = process, server_socket
        return self._running

    def _fork_supervisor(self, kind: bytes, standard: Sequence[int]) -> tuple[subprocess.Popen[bytes], socket.socket]:
        """Fork a supervisor with these standard descriptors; return its server and its control socket."""
        process, server_socket = self._start_server()
        control_socket, peer = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with peer:
            try:
                socket.send_fds(server_socket, [kind], [*standard, peer.fileno()])
            except (ConnectionError, BlockingIOError):
                control_socket.close()
                raise ForkServerDied(self._end_server(process)) from None
        return process, control_socket

    def _end_server(self, process: subprocess.Popen[bytes]) -> str:
        """End this fork server with its supervisors; return the end of its output."""
        with self._lock:
            if self._running is None or self._running[0] is not process:
                return "it has ended"
            server_socket, self._running = self._running[1], None
            server_socket.close()  # makes it end, if it still can
            try:
                output, _ = process.communicate(timeout=_END_TIMEOUT)
            except subprocess.TimeoutExpired:
                process.kill()
                output, _ = process.communicate()
            return output.decode(errors="replace")[-500:]

    def _kill_supervisor(self, process: subprocess.Popen[bytes], control_socket: socket.socket) -> None:
        """Let the server kill a supervisor, whose pid only it can be sure of, and wait for that."""
        control_socket.shutdown(socket.SHUT_WR)
        if not select.select([control_socket], [], [], _END_TIMEOUT)[0]:
            self._end_server(process)

    # Handlers for forks of this process. A fork waits until other threads have finished starting and sending.

    def before_fork(self) -> None:
        """Take the lock before a fork."""
        self._lock.acquire()

    def after_fork(self) -> None:
        """Release the lock in the parent."""
        self._lock.release()

    def forget(self) -> None:
        """Leave the fork server to the parent, in the child of a fork."""
        self._lock = threading.RLock()
        if self._running is not None:
            process, server_socket = self._running
            process.returncode = 0  # not a child of this process, so nothing to wait for or to warn about
            server_socket.close()
            self._running = None


def _pipe(stack: ExitStack) -> tuple[BinaryIO, BinaryIO]:
    reading, writing = os.pipe()
    return stack.enter_context(open(reading, "rb", 0)), stack.enter_context(open(writing, "wb", 0))


def _exchange(
    message: bytes, stdin_writer: BinaryIO, out: BinaryIO, err: BinaryIO, control_socket: socket.socket, deadline: float
) -> tuple[int, bytes, bytes]:
    """Write the message and read until there is a whole answer, or the server reports that the supervisor has ended.

    The ends of the pipes are not waited for: another thread may have forked this process, and the copy holds them open.
    """
    received = {out.fileno(): bytearray(), err.fileno(): bytearray()}
    left = memoryview(message)
    poll = select.poll()
    poll.register(control_socket, select.POLLIN)
    poll.register(stdin_writer, select.POLLOUT)
    for end in (stdin_writer, out, err):
        os.set_blocking(end.fileno(), False)
    for end in (out, err):
        poll.register(end, select.POLLIN)
    while True:
        remaining = deadline - time.monotonic()
        ready = {descriptor for descriptor, _ in poll.poll(max(0.0, remaining) * 1000)}
        if remaining <= 0:
            raise TimeoutError
        if not stdin_writer.closed and stdin_writer.fileno() in ready:
            with suppress(BlockingIOError):
                try:
                    left = left[os.write(stdin_writer.fileno(), left) :]
                except BrokenPipeError:
                    left = left[:0]
            if not left:
                poll.unregister(stdin_writer)
                stdin_writer.close()
        for descriptor in ready & received.keys():
            if not _drain(descriptor, received[descriptor]):
                poll.unregister(descriptor)
        code = None
        if control_socket.fileno() in ready:
            status = control_socket.recv(64)
            if not status:
                raise EOFError
            code = os.waitstatus_to_exitcode(int(status))
            for descriptor, content in received.items():
                _drain(descriptor, content)
        answer = received[out.fileno()]
        if len(answer) >= 8 and len(answer) - 8 >= int.from_bytes(answer[:8], "big"):
            code = 0
        if code is not None:
            return code, bytes(answer[8:]), bytes(received[err.fileno()])


def _drain(descriptor: int, content: bytearray) -> bool:
    """Add to ``content`` what can be read now; return True if there may be more later."""
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
