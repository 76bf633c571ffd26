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
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO

from explorl.sandbox.frames import Channel
from explorl.sandbox.scratch import remove_leftover_folders


def bootstrap(module: str) -> str:
    """Return a program that runs ``main`` of a module of this package without the packages around it.

    They would import torch. Its arguments are their folders.
    """
    return f"""
import sys, types
for name, path in zip(("explorl", "explorl.sandbox", "explorl.tasks"), sys.argv[1:]):
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = [path]
from explorl.sandbox.{module} import main
main()
"""


BOOTSTRAP = bootstrap("fork_server")
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

    def run_program(self, messages: Sequence[bytes], seconds: float) -> tuple[int, bytes, bytes]:
        """Send messages to a new supervisor; return its exit status (negative: a signal), answer and standard error.

        A supervisor that has sent its answer is not waited for: the kernel takes milliseconds to remove its namespaces.
        Raise TimeoutError after ``seconds``, when the supervisor and its process group have been killed, and
        `ForkServerDied` if the server has died.
        """
        deadline = time.monotonic() + seconds
        with ExitStack() as stack:
            with self._lock:
                (stdin, requests), (answers, stdout), (errors, stderr) = (_pipe(stack) for _ in range(3))
                sent = (stdin, stdout, stderr)
                process, control_socket = self._fork_supervisor(b"program", [end.fileno() for end in sent])
                stack.enter_context(control_socket)
                for end in sent:
                    end.close()
            channel = Channel(answers.fileno(), requests.fileno())
            channel.send(*messages)
            try:
                code, answer = _wait_for_answer(channel, control_socket, deadline)
            except (EOFError, ConnectionError):
                raise ForkServerDied(self._end_server(process)) from None
            except BaseException:
                self._kill_supervisor(process, control_socket)
                raise
            os.set_blocking(errors.fileno(), False)
            return code, answer, errors.read(1 << 16) or b""

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


def _wait_for_answer(channel: Channel, control_socket: socket.socket, deadline: float) -> tuple[int, bytes]:
    """Return a supervisor's answer, or its exit status if it has ended without one.

    The ends of the pipes are not waited for: another thread may have forked this process, and the copy holds them open.
    """
    poll = select.poll()
    for descriptor in (control_socket, channel):
        poll.register(descriptor, select.POLLIN)
    if channel.has_more_to_send:
        poll.register(channel.writing, select.POLLOUT)
    code = None
    while True:
        remaining = deadline - time.monotonic()
        ready = {descriptor for descriptor, _ in poll.poll(max(0.0, remaining) * 1000 if code is None else 0)}
        if remaining <= 0:
            raise TimeoutError
        if channel.writing in ready:
            channel.flush()
            if not channel.has_more_to_send:
                poll.unregister(channel.writing)
        if control_socket.fileno() in ready:
            status = control_socket.recv(64)
            if not status:
                raise EOFError
            code = os.waitstatus_to_exitcode(int(status))
            poll.unregister(control_socket)
        if channel.fileno() in ready:
            try:
                for message in channel.messages():
                    return 0, message
            except (EOFError, ValueError):
                poll.unregister(channel)
        elif code is not None:
            return code, b""


fork_server_client = ForkServerClient()
os.register_at_fork(
    before=fork_server_client.before_fork,
    after_in_parent=fork_server_client.after_fork,
    after_in_child=fork_server_client.forget,
)
atexit.register(fork_server_client.close)
