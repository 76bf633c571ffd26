"""The processes inside the sandbox, which the fork server (`fork_server`) forks for each program.

There are three. The *supervisor* talks to `programs` and never runs the program. The *init process* of the new process
namespace only waits: when it ends, the kernel kills everything left in the namespace. The *program* is its child. Where
namespaces are not permitted, the program is a child of the supervisor, which counts its threads.

With an entry point the program only defines functions, and another child of the supervisor runs the *tests*, which come
from a data set: they are trusted to judge the program and with nothing else. They are isolated like a program, and from
the program they test. Their ``candidate`` sends the arguments of each call to the program and gets a plain value back.
Only their process reads the tests and has the descriptor on which the verdict is written, so the program cannot read
the tests, and its exits, patched built-ins and ``__eq__`` methods cannot decide the verdict.
"""

from __future__ import annotations

import _signal as signal  # type: ignore[import-not-found]  # signal would make enums of all its numbers
import _socket as socket
import _thread
import ast
import builtins
import marshal
import os
import select
import struct
import sys
import time
import types

from explorl.sandbox import linux
from explorl.sandbox.codec import STARTED, decode, encode
from explorl.sandbox.disk import ENTRIES, OPEN_FOLDER, DiskQuota
from explorl.sandbox.frames import receive, receive_json, send_json
from explorl.sandbox.usage import Usage, check_interval, wall_limit

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, NoReturn

    MainFunction = Callable[[dict[str, Any], dict[str, Any]], None]  # takes a request and the namespace of __main__
    InitFunction = Callable[[int], NoReturn]  # takes the pid of the program
    EnterIsolation = Callable[[], int]  # moves a process into its isolation; returns its uid

MEMORY_EXIT = 86
"""Exit status of a program that ran out of memory."""
CALLS, REPLIES, _READY, _THREAD_REQUESTS, _VERDICT = (
    3,
    4,
    5,
    6,
    7,
)  # descriptors of a program or its tests
DISK_FULL = f"the files were more than {ENTRIES}, or larger than allowed together"
"""The error of a program that was killed because it wrote too much to the host's disk."""


class ProgramEnded(BaseException):
    """The program has ended or its time is up. A BaseException, so that ``except Exception`` in a test misses it."""


# Errors ---------------------------------------------------------------------------------------------------------------


def to_exception(reply: dict[str, Any]) -> Exception:
    """Return the built-in exception that a reply names, or RuntimeError for StopIteration and unknown names."""
    name, text = str(reply.get("error")), str(reply.get("text"))[:1000]
    kind = getattr(builtins, name, None)
    if isinstance(kind, type) and issubclass(kind, Exception) and not issubclass(kind, StopIteration):
        try:
            return kind(text)
        except TypeError:  # UnicodeDecodeError needs five arguments
            pass
    return RuntimeError(f"{name}: {text}")


def describe_error(error: BaseException) -> str:
    """Return the error as ``AssertionError: text``, or only its name if it has no text."""
    try:
        text = str(error)[:1000]
    except Exception:
        text = ""
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


# The program ----------------------------------------------------------------------------------------------------------


class IsolatedChild:  # pragma: no cover (another process)
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


def start_isolated(
    request: dict[str, Any], descriptors: dict[int, int], uid: int, main: MainFunction, init_main: InitFunction
) -> tuple[int, int | None]:  # pragma: no cover (another process)
    """Start a program with only these descriptors; raise RuntimeError if it cannot start.

    Return the pid of the program, or in namespaces that of its init process, which runs ``init_main``; and the
    descriptor of its thread requests, or None if the kernel limits its threads.
    """

    def enter() -> int:
        linux.drop_privileges(uid)
        if "namespaces" in request["layers"]:
            child = os.fork()
            if child:
                init_main(child)
            os.setsid()
            linux.drop_privileges(uid)
        return uid

    child = IsolatedChild(request, descriptors, enter, main)
    return child.pid, child.wait()


def _run_isolated(
    request: dict[str, Any], descriptors: dict[int, int], enter: EnterIsolation, main: MainFunction
) -> NoReturn:  # pragma: no cover (another process)
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


def _run_init(child: int) -> NoReturn:  # pragma: no cover (another process)
    """Run as the init process of the namespace: reap orphans, and exit when the program does."""
    os.closerange(0, 1 << 16)
    while True:
        pid, code = os.wait()
        if pid == child:
            status = os.waitstatus_to_exitcode(code)
            os._exit(status if status >= 0 else 128 - status)


def _has_own_processes(request: dict[str, Any]) -> bool:  # pragma: no cover (another process)
    """Return True for a program in a process namespace; tests get none, so that they can start threads."""
    return "namespaces" in request["layers"] and "tests" not in request


def _other_processes(request: dict[str, Any], is_spare_user: bool) -> int | None:  # pragma: no cover (another process)
    """Return how many parents of the program run as its user, beside its own processes; None if unknown."""
    if is_spare_user:
        return int(_has_own_processes(request))
    if "namespaces" in request["layers"]:
        return 2 if _has_own_processes(request) else 0
    return None if "seccomp" in request["layers"] else 2


def _isolate(request: dict[str, Any], others: int | None) -> None:  # pragma: no cover (another process)
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


def _request_thread_approval() -> bool:  # pragma: no cover (another process)
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


def set_descriptors(descriptors: dict[int, int]) -> None:  # pragma: no cover (another process)
    """Leave the process these descriptors, under these numbers, and close all others."""
    high = {number: os.dup2(descriptor, 100 + number) for number, descriptor in descriptors.items()}
    for number, descriptor in high.items():
        os.dup2(descriptor, number)
    for number in range(max(high)):
        if number not in high:
            os.closerange(number, number + 1)
    os.closerange(max(high) + 1, 1 << 16)


def _run_program(request: dict[str, Any], namespace: dict[str, Any]) -> None:  # pragma: no cover (another process)
    for part in ("preamble", "source"):
        exec(compile(request[part], "<program>", "exec", dont_inherit=True), namespace)


def _answer_calls(request: dict[str, Any], namespace: dict[str, Any]) -> None:  # pragma: no cover (another process)
    """Define the functions, then call the entry point for each message until the pipe is closed."""
    try:
        _run_program(request, namespace)
        if request["entry_point"] not in namespace:
            raise NameError(f"name {request['entry_point']!r} is not defined")
    except BaseException as error:
        send_json(REPLIES, {"error": type(error).__name__, "text": describe_error(error)})
        raise
    function = namespace[request["entry_point"]]
    send_json(REPLIES, {"value": None})
    while True:
        try:
            args, kwargs = decode(receive_json(CALLS))
        except EOFError:
            return
        try:
            reply = {"value": encode(function(*args, **kwargs))}
        except BaseException as error:
            reply = {"error": type(error).__name__, "text": describe_error(error).partition(": ")[2]}
        send_json(REPLIES, reply)


def _run_and_exit(main: Callable[..., None], *args: Any) -> NoReturn:  # pragma: no cover (another process)
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
            while traceback is not None and traceback.tb_frame.f_code.co_filename == __file__:
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


def supervise(server: int) -> None:  # pragma: no cover (another process)
    """Run one request from standard input and write the answer to standard output."""
    linux.die_with(server)
    request = marshal.loads(receive(0))
    answer = os.dup(1)
    try:
        program = _start(request, server)
    except Exception as error:
        result = {"status": "setup", "error": describe_error(error)}
    else:
        os.write(2, STARTED)
        try:
            result = _watch(request, program)
        except BaseException as error:
            result = {"status": "killed", "error": f"the tests' process failed: {describe_error(error)}"}
    send_json(answer, result)
    os._exit(0)


class _Program:  # pragma: no cover (another process)
    """A program that has started, and its tests if there are any, as their supervisor sees them."""

    def __init__(self, children: dict[int, int | None], outputs: dict[str, int], usage: Usage) -> None:
        self.children = children
        """By pid, the program's first: the descriptor of its thread requests, or None."""
        self.outputs, self.usage = outputs, usage
        self.verdict: int | None = None
        """The descriptor on which its tests write their verdict, if there are tests."""
        self.disk: DiskQuota | None = None
        """The quota of the host's disk that it can write to, outside of namespaces."""


def _start(request: dict[str, Any], server: int) -> _Program:  # pragma: no cover (another process)
    """Isolate and start the program, and its tests if there are any."""
    restrict_supervisor(request)
    stdin, out, err = (os.memfd_create(name) for name in ("stdin", "stdout", "stderr"))
    os.write(stdin, request["stdin"].encode(errors="surrogatepass"))
    os.lseek(stdin, 0, os.SEEK_SET)
    descriptors = {0: stdin, 1: out, 2: err}
    main, tests, verdict = _run_program, None, None
    if request["entry_point"] is not None:
        descriptors[CALLS], calls_out = os.pipe()
        replies_in, descriptors[REPLIES] = os.pipe()
        verdict, verdict_out = os.pipe()
        tests = _start_tests(request, {CALLS: calls_out, REPLIES: replies_in, _VERDICT: verdict_out})
        main = _answer_calls
    uid, proc, disk = prepare_isolation(request, server)
    child, thread_requests = start_isolated(request, descriptors, uid, main, _run_init)
    for descriptor in descriptors.values():
        if descriptor not in (out, err):
            os.close(descriptor)
    children = {child: thread_requests}
    if tests is not None:
        children[tests.pid] = tests.wait()
    program = _Program(children, {"stdout": out, "stderr": err}, Usage(proc, *children))
    program.verdict, program.disk = verdict, disk
    return program


def _start_tests(
    request: dict[str, Any], descriptors: dict[int, int]
) -> IsolatedChild:  # pragma: no cover (another process)
    """Start the tests' process, which alone reads them: the memory that the program is forked from never holds them."""
    supervisor = os.getpid()

    def enter() -> int:
        linux.die_with(supervisor)
        request["tests"] = receive(0).decode(errors="surrogatepass")
        uid, _, _ = prepare_isolation(request, supervisor)
        linux.drop_privileges(uid)
        return uid

    null = os.memfd_create("null")  # for what tests print
    child = IsolatedChild(request, {0: null, 1: null, 2: null, **descriptors}, enter, _run_tests)
    for descriptor in (null, *descriptors.values()):
        os.close(descriptor)
    return child


def restrict_supervisor(request: dict[str, Any]) -> None:  # pragma: no cover (another process)
    """Restrict which files this process and its children can open, with Landlock where there are no namespaces."""
    if "landlock" in request["layers"]:
        linux.restrict_files(request["folder"], linux.SUPERVISOR_FILES)


def prepare_isolation(
    request: dict[str, Any], parent: int
) -> tuple[int, int, DiskQuota | None]:  # pragma: no cover (another process)
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


def _socket_pair() -> tuple[int, int]:  # pragma: no cover (another process)
    first, second = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    return first.detach(), second.detach()


def _receive_descriptor(descriptor: int) -> int | None:  # pragma: no cover (another process)
    """Return the descriptor that was sent on this socket, or None; close the socket."""
    connection = socket.socket(fileno=descriptor)
    _, ancillary, _, _ = connection.recvmsg(1, socket.CMSG_SPACE(4))
    connection.close()
    return struct.unpack("i", ancillary[0][2])[0] if ancillary else None


def _watch(request: dict[str, Any], program: _Program) -> dict[str, Any]:  # pragma: no cover (another process)
    """Wait until the program or its tests end or exceed a limit, kill what is left, and return the result."""
    start = time.monotonic()
    result: dict[str, Any] = {}
    timer = _LimitTimer(request["limits"], program)
    for child, thread_requests in program.children.items():
        approve_threads(child, thread_requests, request["limits"]["processes"])
    if program.verdict is None:
        os.waitid(os.P_PID, next(iter(program.children)), os.WEXITED | os.WNOWAIT)
    else:
        try:
            timer.interrupt = True
            try:
                _read_verdict(program.verdict, result)
            finally:
                timer.interrupt = False
        except ProgramEnded:
            pass
    timer.stop()
    codes = []
    for child in program.children:
        os.kill(child, signal.SIGKILL)
        codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    if "namespaces" not in request["layers"]:
        kill_orphans()
    result["seconds"] = time.monotonic() - start
    if timer.late or program.verdict is None:
        result["status"] = _status(codes[0], timer.late)
    elif timer.full:
        result |= {"status": "error", "error": DISK_FULL}
    elif "status" not in result:
        result["status"] = "timeout" if _status(codes[1], False) == "timeout" else "killed"
        result["error"] = "the tests' process has ended"
    for name, descriptor in program.outputs.items():
        os.lseek(descriptor, 0, os.SEEK_SET)
        result[name] = os.read(descriptor, request["limits"]["output"]).decode(errors="replace")
    if timer.full:
        result["stderr"] += f"{DISK_FULL}\n"
    return result


def _read_verdict(verdict: int, result: dict[str, Any]) -> None:  # pragma: no cover (another process)
    """Add the tests' messages to the result, up to their verdict or to the first message that cannot be read."""
    try:
        while "status" not in result:
            message = receive_json(verdict)
            result.update({name: message[name] for name in ("normal", "error") if isinstance(message.get(name), str)})
            if message.get("status") in ("ok", "failed", "error"):
                result["status"] = message["status"]
    except Exception:
        return


def approve_threads(child: int, thread_requests: int | None, most: int) -> None:  # pragma: no cover (another process)
    """Approve up to ``most`` threads of the program from now on, if it has to request them."""
    if thread_requests is not None:
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])  # SIGALRM must interrupt this thread
        try:
            _thread.start_new_thread(_approve_threads, (child, thread_requests, most))
        except RuntimeError:
            os.close(thread_requests)  # then the program cannot start threads
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGALRM])


def _approve_threads(child: int, listener: int, most: int) -> NoReturn:  # pragma: no cover (another process)
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


def _thread_count(pid: int) -> int:  # pragma: no cover (another process)
    """Return the number of threads of a process; 0 if it cannot be read."""
    try:
        with open(f"/proc/{pid}/status", "rb") as file:
            return int(file.read().partition(b"\nThreads:")[2].split()[0])
    except (OSError, ValueError, IndexError):
        return 0


class _LimitTimer:  # pragma: no cover (another process)
    """Kills a program and its tests when they exceed a limit.

    Until it is stopped, their processes must not be waited for: an unreaped process keeps its pid, so a kill cannot hit
    another process.
    """

    def __init__(self, limits: dict[str, float], program: _Program) -> None:
        self.late = False
        """True if the time was up."""
        self.full = False
        """True if too much was written to the host's disk."""
        self.interrupt = False
        """Set it to raise `ProgramEnded` in this process when a limit is exceeded."""
        self._limits, self._program = limits, program
        self._stopped = False
        self._cores = len(os.sched_getaffinity(0))
        signal.signal(signal.SIGALRM, self._check)
        self._schedule()

    def stop(self) -> None:
        self._stopped = True
        signal.setitimer(signal.ITIMER_REAL, 0)

    def _schedule(self) -> None:
        """Schedule the next check for when a limit can first be reached."""
        usage, seconds = self._program.usage, self._limits["seconds"]
        remaining = min(seconds - usage.time, wall_limit(seconds) - usage.clock)
        remaining = min(remaining, (self._limits["cpu_seconds"] - usage.processor) / self._cores)
        signal.setitimer(signal.ITIMER_REAL, min(max(remaining, 0.005), check_interval(self._program.disk)))

    def _check(self, *_: object) -> None:
        if self._stopped or self.late or self.full:
            return
        usage, seconds, disk = self._program.usage, self._limits["seconds"], self._program.disk
        usage.update()
        self.late = (
            usage.time >= seconds
            or usage.processor >= self._limits["cpu_seconds"]
            or usage.clock >= wall_limit(seconds)
        )
        self.full = not self.late and disk is not None and disk.is_exceeded()
        if not self.late and not self.full:
            self._schedule()
            return
        for child in self._program.children:
            os.kill(child, signal.SIGKILL)
        if self.interrupt:
            raise ProgramEnded


def kill_orphans() -> None:  # pragma: no cover (another process)
    """Kill the processes that the program has left behind, where no namespace does it."""
    while True:
        with open(f"/proc/self/task/{os.getpid()}/children") as file:
            children = file.read().split()
        if not children:
            return
        for pid in map(int, children):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def _status(code: int, late: bool) -> str:
    """Return the result status for an exit status, which is negative or 128 and more after a signal."""
    number = -code if code < 0 else code - 128
    if late or number == signal.SIGXCPU:
        return "timeout"
    if code == MEMORY_EXIT:
        return "memory"
    if number > 0:
        return "killed"
    return "error" if code else "ok"


class _Candidate:  # pragma: no cover (another process)
    """The program's function as the tests call it."""

    def __init__(self, calls: int, replies: int) -> None:
        self.calls, self.replies = calls, replies
        self.ended = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        message = encode((args, kwargs))
        try:
            send_json(self.calls, message)
        except OSError as error:
            self.ended = True
            raise ProgramEnded from error
        reply = self.reply()
        if "value" in reply:
            return reply["value"]
        raise to_exception(reply)

    def reply(self) -> dict[str, Any]:
        """Return the next reply with its value decoded; after an invalid one the program counts as ended."""
        try:
            reply = receive_json(self.replies)
            return {"value": decode(reply["value"])} if "value" in reply else {"error": reply["error"], **reply}
        except Exception as error:
            self.ended = True
            raise ProgramEnded from error


def _run_tests(request: dict[str, Any], _: dict[str, Any]) -> None:  # pragma: no cover (another process)
    """Run the tests against the program's function and write their verdict to `_VERDICT`."""
    signal.signal(signal.SIGALRM, signal.SIG_IGN)  # an alarm without a handler must not kill the tests
    send_json(_VERDICT, {"normal": normal_form(request["source"])})
    candidate = _Candidate(CALLS, REPLIES)
    try:
        status, error = _test_candidate(request, candidate)
    except ProgramEnded:
        candidate.ended = True
    if candidate.ended:  # also if a test has caught ProgramEnded
        status, error = "error", "the program ended before the tests did"
    send_json(_VERDICT, {"status": status, "error": error})


def _test_candidate(request: dict[str, Any], candidate: _Candidate) -> tuple[str, str | None]:  # pragma: no cover
    """Run the tests and return their status and the error, if any."""
    loaded = candidate.reply()
    if "value" not in loaded:
        return "error", str(loaded.get("text"))[:1000]
    module = types.ModuleType("tests")
    sys.modules["tests"] = module  # dataclasses, pickle and unittest look definitions up here
    namespace = module.__dict__
    try:
        exec(compile(request["preamble"], "<preamble>", "exec", dont_inherit=True), namespace)
        namespace[request["entry_point"]] = candidate  # some tests call it by its name
        exec(compile(request["tests"], "<tests>", "exec", dont_inherit=True), namespace)
        namespace["check"](candidate)
    except ProgramEnded:
        raise
    except BaseException as error:
        return "failed", describe_error(error)
    return "ok", None


def normal_form(source: str) -> str | None:
    """Return source code without comments, docstrings, imports and formatting; None if it is not valid Python."""
    try:
        tree = ast.parse(source)
        tree.body = [node for node in tree.body if not isinstance(node, ast.Import | ast.ImportFrom)]
        for node in ast.walk(tree):
            if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            if ast.get_docstring(node, clean=False) is not None:
                node.body = node.body[1:] or [ast.Pass()]
        return ast.unparse(tree)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
