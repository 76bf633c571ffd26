"""Start processes in isolation and watch over them: what the supervisors of programs and of interpreters share.

A supervisor never runs untrusted code itself. It is forked by the fork server for one program or one interpreter.
"""

from __future__ import annotations

import _signal as signal  # type: ignore[import-not-found]  # signal would make enums of all its numbers
import _socket as socket
import _thread
import os
import select
import struct
import sys
import time
import types

from explorl.sandbox import linux
from explorl.sandbox.codec import describe_error
from explorl.sandbox.disk import OPEN_FOLDER, DiskQuota
from explorl.sandbox.usage import Usage

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any, NoReturn

    MainFunction = Callable[[dict[str, Any], dict[str, Any]], None]  # takes a request and the namespace of __main__
    InitFunction = Callable[[int], NoReturn]  # takes the pid of the program
    EnterIsolation = Callable[[], int]  # moves a process into its isolation; returns its uid

MEMORY_EXIT = 86
"""Exit status of a program that ran out of memory."""
CALLS, REPLIES, _READY, _THREAD_REQUESTS, LAST = 3, 4, 5, 6, 7
"""Descriptors of a program or its tests; the last is for the tests' verdict or an interpreter's output."""
_FOLDER = os.path.dirname(__file__)


# The isolated process -------------------------------------------------------------------------------------------------


class IsolatedChild:  # pragma: no cover
    """A child process that isolates itself and then calls a main function."""

    def __init__(
        self, request: dict[str, Any], descriptors: dict[int, int], enter: EnterIsolation, main: MainFunction
    ) -> None:
        """Fork the child, which keeps only these descriptors, under these numbers."""
        self._ready, ready = os.pipe()
        self._request_socket: int | None = None
        child_ends = {_READY: ready}
        if "namespaces" not in request["layers"]:
            self._request_socket, child_ends[_THREAD_REQUESTS] = _socket_pair()
        self.pid = os.fork()
        if self.pid == 0:
            _run_isolated(request, descriptors | child_ends, enter, main)
        for descriptor in child_ends.values():
            os.close(descriptor)

    def wait(self) -> int | None:
        """Return the descriptor of its thread requests, or None; raise RuntimeError if the child could not start."""
        if (state := os.read(self._ready, 1000)) != b"ready":
            os.waitpid(self.pid, 0)
            raise RuntimeError(state.decode(errors="replace") or "the child process has ended")
        os.close(self._ready)
        return None if self._request_socket is None else _receive_descriptor(self._request_socket)


def _start_isolated(
    request: dict[str, Any], descriptors: dict[int, int], uid: int, main: MainFunction, init_main: InitFunction
) -> IsolatedChild:  # pragma: no cover
    """Start a program with only these descriptors; in namespaces the child is its init process, in ``init_main``."""

    def enter() -> int:
        linux.drop_privileges(uid)
        if "namespaces" in request["layers"]:
            child = os.fork()
            if child:
                init_main(child)
            os.setsid()
            linux.drop_privileges(uid)
        return uid

    return IsolatedChild(request, descriptors, enter, main)


def _run_isolated(
    request: dict[str, Any], descriptors: dict[int, int], enter: EnterIsolation, main: MainFunction
) -> NoReturn:  # pragma: no cover
    """Become the program or its tests; never return to the supervisor's code, whatever fails."""
    ready = descriptors[_READY]
    try:
        os.setsid()
        was_root = os.geteuid() == 0
        uid = enter()
        set_descriptors(descriptors)
        ready = _READY
        _isolate(request, _other_processes(request, was_root and os.geteuid() == uid >= linux.FIRST_UID))
        os.write(ready, b"ready")
        os.close(ready)
    except BaseException as error:
        try:
            os.write(ready, describe_error(error).encode()[:1000])
        finally:
            os._exit(1)
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    _run_and_exit(main, request, module.__dict__)


def run_init(child: int) -> NoReturn:  # pragma: no cover
    """Run as the init process of the namespace: reap orphans, and exit when the program does."""
    os.closerange(0, 1 << 16)
    while True:
        pid, code = os.wait()
        if pid == child:
            exit_like(code)


def _has_own_processes(request: dict[str, Any]) -> bool:  # pragma: no cover
    """Return True for a program in a process namespace; tests get none, so that they can start threads."""
    return "namespaces" in request["layers"] and "tests" not in request


def _other_processes(request: dict[str, Any], is_spare_user: bool) -> int | None:  # pragma: no cover
    """Return how many parents of the program run as its user, beside its own processes; None if unknown."""
    if is_spare_user:
        return int(_has_own_processes(request))
    if "namespaces" in request["layers"]:
        return 2 if _has_own_processes(request) else 0
    return None if "seccomp" in request["layers"] else 2


def _isolate(request: dict[str, Any], others: int | None) -> None:  # pragma: no cover
    layers = request["layers"]
    os.environ.clear()
    os.chdir(request["folder"])
    sys.argv[:] = ["program.py"]
    sys.dont_write_bytecode = True
    linux.limit_resources(request["limits"], other_processes=others)
    if "landlock" in layers:
        linux.restrict_files_further(request["folder"])
    if "seccomp" in layers:
        threads = others is not None or _request_thread_approval()
        linux.install_seccomp_filter(namespaces=_has_own_processes(request), threads=threads)
    os.closerange(_THREAD_REQUESTS, _THREAD_REQUESTS + 1)


def _request_thread_approval() -> bool:  # pragma: no cover
    """Let the supervisor decide about each new thread; return False if the kernel does not support that."""
    try:
        listener = linux.request_thread_approval()
    except OSError:
        return False
    connection = socket.socket(fileno=_THREAD_REQUESTS)
    connection.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack("i", listener))])
    connection.detach()
    os.close(listener)
    return True


def set_descriptors(descriptors: dict[int, int]) -> None:  # pragma: no cover
    """Leave the process these descriptors, under these numbers, and close all others."""
    high = {number: os.dup2(descriptor, 100 + number) for number, descriptor in descriptors.items()}
    for number, descriptor in high.items():
        os.dup2(descriptor, number)
    for number in range(max(high)):
        if number not in high:
            os.closerange(number, number + 1)
    os.closerange(max(high) + 1, 1 << 16)


def _run_and_exit(main: Callable[..., None], *args: Any) -> NoReturn:  # pragma: no cover
    """Call ``main`` and end the process with the status and output that the interpreter would have given."""
    status = 1
    try:
        try:
            main(*args)
            status = 0
        except SystemExit as stop:
            if stop.code is None or isinstance(stop.code, int):
                status = stop.code or 0
            else:
                print(stop.code, file=sys.stderr)
        except BaseException as error:
            status = MEMORY_EXIT if isinstance(error, MemoryError) else 1
            traceback = error.__traceback__
            while traceback is not None and os.path.dirname(traceback.tb_frame.f_code.co_filename) == _FOLDER:
                traceback = traceback.tb_next
            sys.__excepthook__(type(error), error.with_traceback(traceback), traceback)
        if "threading" in sys.modules:
            sys.modules["threading"]._shutdown()
        if "atexit" in sys.modules:
            sys.modules["atexit"]._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(status & 255)


# The supervisor -------------------------------------------------------------------------------------------------------


class Supervised:  # pragma: no cover
    """A program or an interpreter that a supervisor has started, and the tests if there are any.

    Only `end` waits for their processes: one that has not been waited for keeps its pid, so a kill cannot hit another.
    """

    def __init__(
        self,
        request: dict[str, Any],
        server: int,
        descriptors: dict[int, int],
        main: MainFunction,
        *,
        init_main: InitFunction = run_init,
        tests: IsolatedChild | None = None,
    ) -> None:
        """Isolate and start the program with these descriptors; raise an error if it or the tests cannot start."""
        uid, proc, self.disk = prepare_isolation(request, server)
        program = _start_isolated(request, descriptors, uid, main, init_main)
        self.pids: list[int] = []
        """That of the program, or in namespaces of its init process, and that of the tests."""
        for child in filter(None, (program, tests)):
            _let_start_threads(child.pid, child.wait(), request["limits"]["processes"])
            self.pids.append(child.pid)
        self.usage = Usage(proc, *self.pids)
        self.in_namespaces = "namespaces" in request["layers"]

    def has_ended(self) -> bool:
        """Return True if the program has ended."""
        return os.waitid(os.P_PID, self.pids[0], os.WEXITED | os.WNOWAIT | os.WNOHANG) is not None

    def end(self) -> list[int]:
        """Kill what is left; return how the processes have ended: exit statuses, negative for a signal."""
        codes = []
        for pid in self.pids:
            os.kill(pid, signal.SIGKILL)
            codes.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        if not self.in_namespaces:
            _kill_orphans()
        return codes


def wake_on_child_exit() -> int:  # pragma: no cover
    """Return a descriptor that is readable whenever a child has ended."""
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    os.set_blocking(writing, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    return reading


def reap() -> Iterator[tuple[int, int]]:  # pragma: no cover
    """Yield the pid and the wait status of each child that has ended."""
    while True:
        try:
            pid, code = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        yield pid, code


def exit_like(code: int) -> NoReturn:  # pragma: no cover
    """Exit with the status of a process that has this wait status, as shells do."""
    status = os.waitstatus_to_exitcode(code)
    os._exit(status if status >= 0 else 128 - status)


def restrict_supervisor(request: dict[str, Any]) -> None:  # pragma: no cover
    """Restrict which files this process and its children can open, with Landlock where there are no namespaces."""
    if "landlock" in request["layers"]:
        linux.restrict_files(request["folder"], linux.SUPERVISOR_FILES)


def prepare_isolation(request: dict[str, Any], parent: int) -> tuple[int, int, DiskQuota | None]:  # pragma: no cover
    """Enter the namespaces of a program or its tests, if permitted, and make their working folder.

    Return the uid to run as, a descriptor of the host's /proc, and the quota of the host's disk (None in namespaces).
    """
    uid = linux.spare_user()
    proc = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    disk = None
    if "namespaces" in request["layers"]:
        linux.prctl(linux.PR_SET_DUMPABLE, 1)  # otherwise root would own its /proc, which must be written to
        linux.enter_namespaces(request["limits"]["disk"], uid, processes=_has_own_processes(request))
        linux.prctl(linux.PR_SET_DUMPABLE, 0)
        request["folder"] = "/tmp"
        if os.geteuid() == 0 and not linux.can_become(uid):
            raise RuntimeError(f"user {uid} cannot read {os.__file__}")
    else:
        linux.prctl(linux.PR_SET_CHILD_SUBREAPER, 1)
        disk = DiskQuota(os.open(request["folder"], OPEN_FOLDER), request["limits"]["disk"])
        request["folder"] = os.path.join(request["folder"], "tests" if "tests" in request else "program")
        os.mkdir(request["folder"], 0o700)
        if os.geteuid() == 0 and linux.can_become(uid):
            os.chown(request["folder"], uid, uid)
    linux.die_with(parent)  # again, since trying to become another user has cleared it
    return uid, proc, disk


def _socket_pair() -> tuple[int, int]:  # pragma: no cover
    first, second = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    return first.detach(), second.detach()


def _receive_descriptor(descriptor: int) -> int | None:  # pragma: no cover
    """Return the descriptor that was sent on this socket, or None; close the socket."""
    connection = socket.socket(fileno=descriptor)
    _, ancillary, _, _ = connection.recvmsg(1, socket.CMSG_SPACE(4))
    connection.close()
    return struct.unpack("i", ancillary[0][2])[0] if ancillary else None


def _let_start_threads(child: int, thread_requests: int | None, most: int) -> None:  # pragma: no cover
    """Approve up to ``most`` threads of the program from now on, if it has to request them."""
    if thread_requests is not None:
        try:
            _thread.start_new_thread(_approve_threads, (child, thread_requests, most))
        except RuntimeError:
            os.close(thread_requests)  # then the program cannot start threads


def _approve_threads(child: int, listener: int, most: int) -> NoReturn:  # pragma: no cover
    """Approve new threads while there are fewer than ``most``."""
    poll = select.poll()
    poll.register(listener, select.POLLIN)
    while True:
        poll.poll()
        number = linux.next_thread_request(listener)
        if number is None:  # the requesting thread has ended, perhaps with the whole program
            time.sleep(0.01)
            continue
        threads = _thread_count(child)
        linux.answer_thread_request(listener, number, allow=0 < threads < most)
        for _ in range(100):  # wait until it is counted, or a request made meanwhile would exceed the limit
            if _thread_count(child) != threads or not 0 < threads < most:
                break
            time.sleep(0.0002)


def _thread_count(pid: int) -> int:  # pragma: no cover
    """Return the number of threads of a process; 0 if it cannot be read."""
    try:
        with open(f"/proc/{pid}/status", "rb") as file:
            return int(file.read().partition(b"\nThreads:")[2].split()[0])
    except (OSError, ValueError, IndexError):
        return 0


def _kill_orphans() -> None:  # pragma: no cover
    """Kill the processes that the program has left behind, where no namespace does it."""
    while True:
        with open(f"/proc/self/task/{os.getpid()}/children") as file:
            children = file.read().split()
        if not children:
            return
        for pid in map(int, children):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
