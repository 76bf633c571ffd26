"""The worker of `isolated_call`: import one function, isolate the process, and call the function in a fork per message.

The *worker* imports, prepares and isolates itself before it reads any message. In namespaces its child, the init
process there, takes its place. For each message it forks a *child*, which is isolated further (limits, no new
processes, no descriptor except that of its reply), calls the function and ends. So a message can change only its own
child, and the next message finds the worker unchanged. The worker parses neither messages nor replies.

A message may come with *trusted* data, such as the right answer to a question. The module's ``prepare_trusted(…)`` is
called in the worker, once for equal data, and the children of these messages inherit its value.
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
from explorl.sandbox.frames import FrameReader, receive, send, send_json
from explorl.sandbox.supervised import MEMORY_EXIT, set_descriptors

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, NoReturn

MAX_REPLY = 1 << 20
"""Longest reply in bytes."""
_REPLY = 3  # the child's only descriptor besides the standard three, which are /dev/null
_DISK = 1 << 20
_TICK = 0.05
_PREPARE_LIMIT = 1.0
_CACHE_SIZE = 1024


def main() -> None:  # pragma: no cover
    """Read the settings and then messages from standard input, and write replies to standard output."""
    settings = json.loads(receive(0))
    replies, null = os.dup(1), os.open(os.devnull, os.O_RDWR)
    os.dup2(2, 1)  # what libraries print must not be taken for a reply
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the host
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # if the host ignores it, children could not be waited for
    sys.path[:] = settings["path"]
    try:
        target = _import_function(settings["function"], settings["setup"])
        sys.path[:] = [folder for folder in sys.path if _is_used(folder)]
        _isolate(settings["layers"])
    except BaseException as error:
        kind = "missing" if isinstance(error, ImportError) else "other"
        send_json(replies, {"failed": f"{type(error).__name__}: {error}", "kind": kind})
        os._exit(1)
    gc.collect()
    gc.freeze()  # a collection would copy the pages of these objects into each child
    send_json(replies, {"ready": True})
    _serve(target, replies, null, settings)


class _WorkerFunction:  # pragma: no cover
    """A module's function, and its ``prepare_trusted`` if it has one."""

    def __init__(self, function: Callable[..., Any], prepare: Callable[[Any], Any] | None) -> None:
        self.function = function
        self._prepare = prepare
        self._cache: dict[bytes, Any] = {}

    def prepare_trusted(self, body: bytes) -> Any:
        """Return the value of a message's trusted data; None if that raises or takes too long."""
        if self._prepare is None or not body:
            return None
        if body not in self._cache:
            if len(self._cache) >= _CACHE_SIZE:
                self._cache.clear()
            signal.setitimer(signal.ITIMER_REAL, _PREPARE_LIMIT)
            try:
                self._cache[body] = self._prepare(json.loads(body))
            except (Exception, _TimeUp):
                self._cache[body] = None
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
        return self._cache[body]


class _TimeUp(BaseException):
    """The time is up. A BaseException, so that ``except Exception`` in a library misses it."""


def _raise_time_up(*_: object) -> NoReturn:  # pragma: no cover
    raise _TimeUp


def _import_function(name: str, setup: Any) -> _WorkerFunction:  # pragma: no cover
    """Import the function and call its module's ``prepare(setup)``, if it has one."""
    module_name, _, attribute = name.partition(":")
    module = importlib.import_module(module_name)
    if hasattr(module, "prepare"):
        module.prepare(setup)
    signal.signal(signal.SIGALRM, _raise_time_up)
    return _WorkerFunction(getattr(module, attribute), getattr(module, "prepare_trusted", None))


def _is_used(folder: str) -> bool:  # pragma: no cover
    """Return True if a module was imported from this folder. Others on the path, such as the user's project, are not
    made visible."""
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if file and "." not in name:
            directory = os.path.dirname(file)
            is_package = os.path.basename(file).startswith("__init__.")
            if os.path.abspath(os.path.dirname(directory) if is_package else directory) == folder:
                return True
    return False


def _isolate(layers: list[str]) -> None:  # pragma: no cover
    """Give up network, files and other processes; in namespaces, return only in the init process."""
    os.chdir("/")
    os.environ.clear()
    if sys.platform != "linux":
        return
    linux.prepare()
    folders = [folder for folder in sys.path if os.path.isdir(folder)]
    uid = linux.spare_user()
    if "namespaces" in layers:
        # Without a writable folder, so that no message leaves files for the next.
        linux.enter_namespaces(_DISK, None, folders)
        child = os.fork()
        if child:
            os.closerange(0, 1 << 16)
            _, status = os.waitpid(child, 0)
            os._exit(1 if status else 0)
    elif "landlock" in layers:
        linux.restrict_files(None, folders)
    if layers:
        linux.drop_privileges(uid)


def _serve(target: _WorkerFunction, replies: int, null: int, settings: dict[str, Any]) -> NoReturn:  # pragma: no cover
    """Serve messages until the pipe is closed. Each is preceded by its limit in seconds and its trusted data."""
    while True:
        try:
            seconds, trusted, body = float(receive(0)), receive(0), receive(0)
        except EOFError:
            os._exit(0)
        value = target.prepare_trusted(trusted)
        send(replies, _run_in_child(lambda: target.function(json.loads(body), value), seconds, null, settings))  # noqa: B023


def _run_in_child(
    function: Callable[[], Any], seconds: float, null: int, settings: dict[str, Any]
) -> bytes:  # pragma: no cover
    """Call the function in a child; return the processor time and the reply, or an error if the child failed."""
    reading, writing = os.pipe()
    start = time.monotonic()
    child = os.fork()
    if child == 0:
        _run_child(function, null, writing, settings)
    os.close(writing)
    try:
        reader = FrameReader(reading, MAX_REPLY)
        reply = _read_reply(reader, child, start, seconds, settings["wall_factor"] * seconds)
    finally:
        os.kill(child, signal.SIGKILL)  # not waited for yet, so the pid is still its own
        os.close(reading)
        _, status, usage = os.wait4(child, 0)
    used = usage.ru_utime + usage.ru_stime
    if reply is None:
        reply = b'{"error": "took too long"}'
    elif not reply:
        reasons = {-signal.SIGXCPU: b"took too long", MEMORY_EXIT: b"ran out of memory"}
        reply = b'{"error": "%s"}' % reasons.get(os.waitstatus_to_exitcode(status), b"crashed")
    return b"%.6f %s" % (used, reply)


def _read_reply(
    reader: FrameReader, child: int, start: float, seconds: float, wall: float
) -> bytes | None:  # pragma: no cover
    """Return the child's reply; empty if there is none, None if the time is up. Exit if the host has ended."""
    reply = b""
    poll = select.poll()
    poll.register(reader, select.POLLIN)
    poll.register(0, 0)  # a hangup is always reported
    while True:
        if 0 in dict(poll.poll(_TICK * 1000)):
            os.kill(child, signal.SIGKILL)
            os._exit(0)
        try:
            for message in reader.messages():
                reply = message
        except EOFError:  # its memory is gone too, so that this process's pages are not copied when they change
            return reply
        except ValueError:
            return b""
        if _cpu_time(child) > seconds or time.monotonic() - start > wall:
            return None


def _cpu_time(pid: int) -> float:  # pragma: no cover
    """Return the processor seconds that a child has used, which do not depend on other processes."""
    try:
        return time.clock_gettime((~pid << 3) | 2)
    except OSError:  # no such clock here; the wall limit remains
        return 0.0


def _run_child(
    function: Callable[[], Any], null: int, writing: int, settings: dict[str, Any]
) -> NoReturn:  # pragma: no cover
    """Run the child: call the function, write its value, and exit."""
    status = 1
    try:
        set_descriptors({0: null, 1: null, 2: null, _REPLY: writing})
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        if sys.platform == "linux" and settings["layers"]:
            linux.die_with(os.getppid())
        if sys.platform == "linux":
            linux.limit_resources(settings["limits"])
            if "seccomp" in settings["layers"]:
                linux.install_seccomp_filter(namespaces=False)
        try:
            reply = json.dumps({"value": function()})
        except MemoryError:
            raise
        except Exception as error:
            reply = json.dumps({"error": f"raised {type(error).__name__}: {str(error)[:500]}"})
        send(_REPLY, reply.encode())
        status = 0
    except MemoryError:
        status = MEMORY_EXIT
    finally:
        os._exit(status)
