"""The fork server, which `fork_client` starts as a process. It forks a supervisor for each program (`child`) and each
interpreter (`interpreter_supervisor`) and kills it on request; it never reads programs."""

from __future__ import annotations

import _signal as signal  # type: ignore[import-not-found]  # signal would make enums of all its numbers
import _socket as socket
import gc
import json
import os
import select
from contextlib import suppress

from explorl.sandbox import child, interpreter_supervisor, linux
from explorl.sandbox.codec import decode, describe_error, encode
from explorl.sandbox.supervised import reap, set_descriptors, wake_on_child_exit


def main() -> None:  # pragma: no cover
    """Serve until the client ends; in each fork, supervise a program or an interpreter."""
    server = os.getpid()
    module = interpreter_supervisor if serve() == b"interpreter" else child
    module.supervise(server)


def serve() -> bytes:  # pragma: no cover
    """Fork a supervisor for each message on standard input, a socket; return the message in the fork.

    A message brings four descriptors: the supervisor's standard three and its control socket. When the other end of the
    control socket is shut down or closed, the supervisor is killed; when a supervisor has ended, its wait status is
    written there. The server ends when the socket on standard input is closed.
    """
    linux.prepare()
    _warm_up()
    gc.collect()
    gc.freeze()  # a collection would copy the pages of these objects into each supervisor
    linux.allow_open_files()
    linux.prctl(linux.PR_SET_DUMPABLE, 0)  # programs of the same user must not debug it or its supervisors
    server_socket = socket.socket(fileno=0)
    child_exits = wake_on_child_exit()
    sockets_by_pid: dict[int, int] = {}  # the control socket of each supervisor
    pids_by_socket: dict[int, int] = {}  # the supervisor of each control socket that is still polled
    poll = select.poll()
    for descriptor in (0, child_exits):
        poll.register(descriptor, select.POLLIN)
    while True:
        ready = {descriptor for descriptor, _ in poll.poll()}
        # New supervisors come last: a new control socket may get the number of one that has just been closed.
        for control_socket in ready & pids_by_socket.keys():
            poll.unregister(control_socket)
            _kill_group(pids_by_socket.pop(control_socket))
        if child_exits in ready:
            os.read(child_exits, 4096)
            for pid, code in reap():
                control_socket = sockets_by_pid.pop(pid)
                if pids_by_socket.pop(control_socket, None):
                    poll.unregister(control_socket)
                _send_status(control_socket, code)
        if 0 in ready:
            if (request := _receive_request(server_socket)) is None:
                for pid in sockets_by_pid:
                    _kill_group(pid)
                while sockets_by_pid:
                    del sockets_by_pid[os.wait()[0]]
                os._exit(0)
            message, (*standard, control_socket) = request
            try:
                pid = os.fork()
            except OSError as error:
                os.write(standard[2], describe_error(error).encode())
                _send_status(control_socket, 1 << 8)
            else:
                if pid == 0:
                    break
                sockets_by_pid[pid], pids_by_socket[control_socket] = control_socket, pid
                poll.register(control_socket, select.POLLIN)
            for descriptor in standard:
                os.close(descriptor)
    server_socket.detach()
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    set_descriptors(dict(enumerate(standard)))
    os.setsid()
    return message


def _warm_up() -> None:  # pragma: no cover
    """Fill the interpreter's caches by doing what supervisors do, and import what programs often import.

    No module that draws random numbers when it is imported: all programs would have the same ones.
    """
    import bisect  # noqa: F401
    import heapq  # noqa: F401
    import math  # noqa: F401
    import string  # noqa: F401
    import typing  # noqa: F401

    for _ in range(10):
        child.normal_form("import os\ndef f(x: int) -> int:\n    'doc'\n    return [x + 1 for x in range(x)][0]")
        decode(json.loads(json.dumps(encode(((1, "a", [2.0]), {"a": None})))))
        exec(compile("def f(x):\n    return x", "<program>", "exec", dont_inherit=True), {})


def _receive_request(
    server_socket: socket.socket,
) -> tuple[bytes, list[int]] | None:  # pragma: no cover
    """Return the next message and its four descriptors; None at the end."""
    message, ancillary, _, _ = server_socket.recvmsg(64, socket.CMSG_SPACE(4 * 4))
    if not message:
        return None
    ((_, _, content),) = ancillary
    descriptors = memoryview(content).cast("i").tolist()
    if len(descriptors) != 4:
        raise RuntimeError(f"received {len(descriptors)} descriptors instead of 4")
    return message, descriptors


def _send_status(control_socket: int, code: int) -> None:  # pragma: no cover
    with suppress(OSError):  # the client may have closed the socket
        os.write(control_socket, b"%d" % code)
    os.close(control_socket)


def _kill_group(pid: int) -> None:  # pragma: no cover
    """Kill a child and its process group. It has not been waited for, so its pid is still its own."""
    os.kill(pid, signal.SIGKILL)
    with suppress(ProcessLookupError):  # it may not have made a process group yet
        os.killpg(pid, signal.SIGKILL)
