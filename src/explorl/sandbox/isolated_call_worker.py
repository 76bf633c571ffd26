"""The inside of `sealed`: a process that imports one function, shuts itself in, and computes each message in a fork.

Three kinds of processes. The *worker* imports, prepares and shuts itself in; no message has been read by then. In
namespaces its child, the first process there, takes its place; without, it goes on itself. For each message it forks a
*child*, which is shut in further (limits, no new processes, no descriptor but that of its reply), computes and ends. So
whatever a message does to its child, the next message finds the worker as it was. The worker looks into no message and
no reply.

A message may come with something *given*, which is trusted, like the right answer to a question. The module's
``given(…)`` is computed in the worker, once for all messages with the same, and its value is there in their children.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import select
import signal
import sys
import time

from explorl.sandbox import linux
from explorl.sandbox.child import MEMORY_EXIT, arrange, receive, send

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, NoReturn

LONGEST_REPLY = 1 << 20
"""In bytes."""
_REPLY = 3  # the child's only descriptor beside the standard three, which lead nowhere
_DISK = 1 << 20
_TICK = 0.05
_GIVEN_LIMIT = 1.0
_REMEMBERED = 1024


def main() -> None:  # pragma: no cover (another process)
    """Serve messages from standard input on standard output, as ``receive(0)`` says first."""
    order = json.loads(receive(0))
    replies, null = os.dup(1), os.open(os.devnull, os.O_RDWR)
    os.dup2(2, 1)  # what a library prints is no reply
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the host's
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # which the host may ignore, and then no child could be waited for
    sys.path[:] = order["path"]
    try:
        task = _imported(order["function"], order["setup"])
        sys.path[:] = [folder for folder in sys.path if _is_used(folder)]
        _shut_in(order["layers"])
    except BaseException as error:
        send(replies, json.dumps({"failed": f"{type(error).__name__}: {error}", "kind": _kind(error)}).encode())
        os._exit(1)
    gc.collect()
    gc.freeze()  # what is here stays; looking at it would copy its pages into each child
    send(replies, b'{"ready": true}')
    _serve(task, replies, null, order)


def _kind(error: BaseException) -> str:  # pragma: no cover (another process)
    return "missing" if isinstance(error, ImportError) else "other"


class _Task:  # pragma: no cover (another process)
    """What the worker computes: a module's function, and its ``given`` where there is one."""

    def __init__(self, function: Callable[..., Any], given: Callable[[Any], Any] | None) -> None:
        self.function = function
        self._given = given
        self._known: dict[bytes, Any] = {}

    def given(self, body: bytes) -> Any:
        """The value of what is given with a message; None where it takes too long or cannot be computed."""
        if self._given is None or not body:
            return None
        if body not in self._known:
            if len(self._known) >= _REMEMBERED:
                self._known.clear()
            signal.setitimer(signal.ITIMER_REAL, _GIVEN_LIMIT)
            try:
                self._known[body] = self._given(json.loads(body))
            except (Exception, _Late):
                self._known[body] = None
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
        return self._known[body]


class _Late(BaseException):
    """Time is up. No ``except Exception`` of a library shall catch it."""


def _late(*_: object) -> NoReturn:  # pragma: no cover (another process)
    raise _Late


def _imported(name: str, setup: Any) -> _Task:  # pragma: no cover (another process)
    """The function, after its module's ``prepare(setup)``, where there is one."""
    module_name, _, attribute = name.partition(":")
    module = importlib.import_module(module_name)
    if hasattr(module, "prepare"):
        module.prepare(setup)
    signal.signal(signal.SIGALRM, _late)
    return _Task(getattr(module, attribute), getattr(module, "prepare_trusted", None))


def _is_used(folder: str) -> bool:  # pragma: no cover (another process)
    """Whether a module has been found in this folder: a user's project is not shown because it is on the path, nor is a
    folder above it."""
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if file and "." not in name:
            place = os.path.dirname(file)
            is_package = os.path.basename(file).startswith("__init__.")
            if os.path.abspath(os.path.dirname(place) if is_package else place) == folder:
                return True
    return False


def _shut_in(layers: list[str]) -> None:  # pragma: no cover (another process)
    """Leave network, files and other processes behind; in namespaces return only in the first process."""
    os.chdir("/")
    os.environ.clear()
    if sys.platform != "linux":
        return
    linux.prepare()
    folders = [folder for folder in sys.path if os.path.isdir(folder)]
    uid = linux.spare_user()
    if "namespaces" in layers:
        linux.enter_namespaces(_DISK, None, folders)  # no file that one message leaves for the next
        child = os.fork()
        if child:
            os.closerange(0, 1 << 16)
            _, status = os.waitpid(child, 0)
            os._exit(1 if status else 0)
    elif "landlock" in layers:
        linux.restrict_files(None, folders)
    if layers:
        if "namespaces" in layers:
            linux.drop_privileges(uid)
        else:
            parent = os.getppid()
            linux.drop_privileges(uid)
            if os.getppid() != parent:
                os._exit(1)


def _serve(task: _Task, replies: int, null: int, order: dict[str, Any]) -> NoReturn:  # pragma: no cover
    """Compute messages until there are no more. Each comes after the seconds that it has and what is given with it."""
    while True:
        try:
            seconds, given, body = float(receive(0)), receive(0), receive(0)
        except EOFError:
            os._exit(0)
        value = task.given(given)
        send(replies, _computed(lambda: task.function(json.loads(body), value), seconds, null, order))  # noqa: B023


def _computed(
    function: Callable[[], Any], seconds: float, null: int, order: dict[str, Any]
) -> bytes:  # pragma: no cover (another process)
    """What a child says of a message, or what became of it."""
    reading, writing = os.pipe()
    begun = time.monotonic()
    child = os.fork()
    if child == 0:
        _compute(function, null, writing, order)
    os.close(writing)
    try:
        reply = _read(reading, child, begun, seconds, order["patience"] * seconds)
    finally:
        os.kill(child, signal.SIGKILL)  # not waited for yet, so the number is still its own
        os.close(reading)
        _, status, usage = os.wait4(child, 0)
    used = usage.ru_utime + usage.ru_stime
    if reply is None:
        reply = b'{"error": "took too long"}'
    elif not reply:
        ended = os.waitstatus_to_exitcode(status)
        if ended == -signal.SIGXCPU:
            reply = b'{"error": "took too long"}'
        elif ended == MEMORY_EXIT:
            reply = b'{"error": "ran out of memory"}'
        else:
            reply = b'{"error": "crashed"}'
    return b"%.6f %s" % (used, reply)


def _read(
    descriptor: int, child: int, begun: float, seconds: float, wall: float
) -> bytes | None:  # pragma: no cover (another process)
    """All that the child writes; empty when it is too much, None when time is up or the host is gone."""
    parts, length = [], 0
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    poll.register(0, 0)  # its end is always told
    while True:
        for ready, event in poll.poll(_TICK * 1000):
            if ready == 0 and event & (select.POLLHUP | select.POLLERR):
                os.kill(child, signal.SIGKILL)
                os._exit(0)
            if ready == descriptor:
                part = os.read(descriptor, 1 << 16)
                parts.append(part)
                length += len(part)
                if length > LONGEST_REPLY:
                    return b""
                if not part:
                    return b"".join(parts)
        if _cpu_time(child) > seconds or time.monotonic() - begun > wall:
            return None


def _cpu_time(pid: int) -> float:  # pragma: no cover (another process)
    """Seconds of processor that a child has used: a busy machine is not its fault."""
    try:
        return time.clock_gettime((~pid << 3) | 2)
    except OSError:  # no such clock here; the wall limit is left
        return 0.0


def _compute(
    function: Callable[[], Any], null: int, writing: int, order: dict[str, Any]
) -> NoReturn:  # pragma: no cover (another process)
    """Be the child: write the value of the message, and end."""
    status = 1
    try:
        arrange({0: null, 1: null, 2: null, _REPLY: writing})
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        if sys.platform == "linux" and order["layers"]:
            linux.die_with(os.getppid())
        _limit(order)
        try:
            reply = json.dumps({"value": function()})
        except MemoryError:
            raise
        except Exception as error:
            reply = json.dumps({"error": f"raised {type(error).__name__}: {str(error)[:500]}"})
        left = memoryview(reply.encode())
        while left:
            left = left[os.write(_REPLY, left) :]
        status = 0
    except MemoryError:
        status = MEMORY_EXIT
    finally:
        os._exit(status)


def _limit(order: dict[str, Any]) -> None:  # pragma: no cover (another process)
    if sys.platform == "linux":
        linux.limit_resources(order["limits"])
        if "seccomp" in order["layers"]:
            linux.refuse_calls(namespaces=False)
