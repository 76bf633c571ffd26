"""The nursery: what `nursery` starts in an interpreter of its own. It forks a keeper for each program (`child`) and
notebook (`notebook_keeper`), kills it when it is told to, and knows nothing of programs."""

from __future__ import annotations

import _signal as signal  # type: ignore[import-not-found]  # not signal, which makes enums of all numbers
import _socket as socket
import gc
import json
import os
import select
from contextlib import suppress

from explorl.sandbox import child, interpreter_supervisor, linux
from explorl.sandbox.codec import decode, encode

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator


def main() -> None:  # pragma: no cover (another process)
    server = os.getpid()
    module = interpreter_supervisor if serve() == b"interpreter" else child
    module.supervise(server)


def serve() -> bytes:  # pragma: no cover (another process)
    """Fork a keeper for each message on standard input, a socket, and return it in the keeper; end with the socket.

    A message brings four descriptors: the keeper's standard three, and its leash. When the other end of the leash is
    shut or closed, the keeper is killed; when a keeper has ended, its wait status is written there.
    """
    linux.prepare()
    _warm_up()
    gc.collect()
    gc.freeze()  # what is here stays; looking at it would copy its pages into each keeper
    linux.allow_open_files()
    linux.prctl(linux.PR_SET_DUMPABLE, 0)  # programs of the same user shall not debug it, nor keepers
    control = socket.socket(fileno=0)
    wake_in, wake_out = os.pipe()
    os.set_blocking(wake_out, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake_out, warn_on_full_buffer=False)
    leashes: dict[int, int] = {}  # of each keeper
    alive: dict[int, int] = {}  # the keeper on each leash that is still to be watched
    poll = select.poll()
    for descriptor in (0, wake_in):
        poll.register(descriptor, select.POLLIN)
    while True:
        ready = {descriptor for descriptor, _ in poll.poll()}
        # New keepers come last: a new leash may get the number of one that has just been closed.
        for leash in ready & alive.keys():
            poll.unregister(leash)
            _kill_group(alive.pop(leash))
        if wake_in in ready:
            os.read(wake_in, 4096)
            for pid, code in _ended():
                leash = leashes.pop(pid)
                if alive.pop(leash, None):
                    poll.unregister(leash)
                _report(leash, code)
        if 0 in ready:
            if (given := _accept(control)) is None:
                for pid in leashes:
                    _kill_group(pid)
                while leashes:
                    del leashes[os.wait()[0]]
                os._exit(0)
            message, (*standard, leash) = given
            try:
                pid = os.fork()
            except OSError as error:
                os.write(standard[2], child.described(error).encode())
                _report(leash, 1 << 8)
            else:
                if pid == 0:
                    break
                leashes[pid], alive[leash] = leash, pid
                poll.register(leash, select.POLLIN)
            for descriptor in standard:
                os.close(descriptor)
    control.detach()
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    child.arrange(dict(enumerate(standard)))
    os.setsid()
    return message


def _warm_up() -> None:  # pragma: no cover (another process)
    """Do what keepers will do, so that the interpreter's caches are full, and import what programs often do.

    Nothing that draws random numbers when it is imported: all programs would have the same.
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


def _accept(control: socket.socket) -> tuple[bytes, list[int]] | None:  # pragma: no cover (another process)
    """The next message and its four descriptors; None when there will be none."""
    message, ancillary, _, _ = control.recvmsg(64, socket.CMSG_SPACE(4 * 4))
    if not message:
        return None
    ((_, _, content),) = ancillary
    descriptors = memoryview(content).cast("i").tolist()
    if len(descriptors) != 4:
        raise RuntimeError(f"{len(descriptors)} descriptors instead of 4")
    return message, descriptors


def _ended() -> Iterator[tuple[int, int]]:  # pragma: no cover (another process)
    """Process number and wait status of each child that has ended."""
    while True:
        try:
            pid, code = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        yield pid, code


def _report(leash: int, code: int) -> None:  # pragma: no cover (another process)
    with suppress(OSError):  # perhaps nobody waits for it any more
        os.write(leash, b"%d" % code)
    os.close(leash)


def _kill_group(pid: int) -> None:  # pragma: no cover (another process)
    """Kill a child that has not been waited for, so that its number is still its own, and its process group."""
    os.kill(pid, signal.SIGKILL)
    with suppress(ProcessLookupError):  # perhaps it had not come to make one
        os.killpg(pid, signal.SIGKILL)
