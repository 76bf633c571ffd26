"""The inside of the sandbox: what the nursery (`nurse`) forks for each program.

Three processes. The *keeper* talks to `programs` and never runs the program. The *first process* of the new process
namespace only waits: when it goes, the kernel kills all that is left in there. The *program* is its child. Where
namespaces are not permitted the program is the keeper's own child, and the keeper counts its threads.

With an entry point the program only defines functions, and another child of the keeper runs the *tests*, which come
from a data set: they are trusted to judge the program, and with nothing else. They are shut in like a program, apart
from the one they test. Their ``candidate`` sends each call's arguments to the program and gets a plain value back. Only
their process reads the tests and has the descriptor on which the verdict is written, so the program cannot look them
up, and no exit, patched built-in or ``__eq__`` of its own decides.
"""

from __future__ import annotations

import _signal as signal  # type: ignore[import-not-found]  # not signal, which makes enums of all numbers
import _socket as socket
import _thread
import ast
import builtins
import json
import marshal
import os
import select
import struct
import sys
import time
import types

from explorl.sandbox import linux
from explorl.sandbox.codec import BEGUN, decode, encode
from explorl.sandbox.disk import ENTRIES, OPEN_FOLDER, Disk
from explorl.sandbox.usage import Usage, longest, longest_look

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, NoReturn

    Body = Callable[[dict[str, Any], dict[str, Any]], None]  # of a request, in the namespace of __main__
    First = Callable[[int], NoReturn]  # of the number of the program's process
    Enter = Callable[[], int]  # leads a process to where it is shut in; the number of its user

MEMORY_EXIT = 86
"""Exit status of a program that ran out of memory."""
MAX_FRAME = 1 << 22
"""Longest message of a program or of its tests, in bytes."""
CALLS, REPLIES, _READY, _QUESTIONS, _VERDICT = 3, 4, 5, 6, 7  # of a program or its tests, beside the standard three
FULL = f"the files were more than {ENTRIES}, or larger than allowed together"
"""Why a program was ended that wrote too much to the host's disk."""


class Ended(BaseException):
    """The program is gone, or its time is up. No ``except Exception`` in a test shall catch it."""


# Errors ---------------------------------------------------------------------------------------------------------------


def raised(reply: dict[str, Any]) -> Exception:
    """The built-in exception that a reply names; those that steer loops, and strangers, become RuntimeError."""
    name, text = str(reply.get("error")), str(reply.get("text"))[:1000]
    kind = getattr(builtins, name, None)
    if isinstance(kind, type) and issubclass(kind, Exception) and not issubclass(kind, StopIteration):
        try:
            return kind(text)
        except TypeError:  # UnicodeDecodeError and the like want five arguments
            pass
    return RuntimeError(f"{name}: {text}")


def described(error: BaseException) -> str:
    """``AssertionError: text``, or only the name."""
    try:
        text = str(error)[:1000]
    except Exception:
        text = ""
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


# Frames on a pipe: eight bytes of length, then the message -----------------------------------------------------------


def send(descriptor: int, body: bytes) -> None:
    view = memoryview(len(body).to_bytes(8, "big") + body)
    while view:
        view = view[os.write(descriptor, view) :]


def receive(descriptor: int, most: int = 1 << 40) -> bytes:
    """The next message; EOFError when there is none, ValueError when it is too long."""
    length = int.from_bytes(_read(descriptor, 8), "big")
    if length > most:
        raise ValueError(f"a message of {length} bytes; {most} are allowed")
    return _read(descriptor, length)


def send_json(descriptor: int, message: Any) -> None:
    send(descriptor, json.dumps(message).encode())


def receive_json(descriptor: int) -> Any:
    """A message from the program or its tests, which may be anything."""
    return json.loads(receive(descriptor, MAX_FRAME))


def _read(descriptor: int, length: int) -> bytes:
    parts = []
    while length:
        part = os.read(descriptor, min(length, 1 << 20))
        if not part:
            raise EOFError("the other side is gone")
        parts.append(part)
        length -= len(part)
    return b"".join(parts)


# The program ----------------------------------------------------------------------------------------------------------


class Child:  # pragma: no cover (another process)
    """A child that shuts itself in and then runs a body."""

    def __init__(self, request: dict[str, Any], descriptors: dict[int, int], enter: Enter, body: Body) -> None:
        """Fork it. The body has these descriptors, by number, and no others."""
        self._ready, ready = os.pipe()
        self._questions: int | None = None
        theirs = {_READY: ready}
        if "namespaces" not in request["layers"]:
            self._questions, theirs[_QUESTIONS] = _socket_pair()
        self.pid = os.fork()
        if self.pid == 0:
            _begin(request, descriptors | theirs, enter, body)
        for descriptor in theirs.values():
            os.close(descriptor)

    def wait(self) -> int | None:
        """Return the descriptor on which it asks for threads, if it has to; RuntimeError if it could not begin."""
        if (state := os.read(self._ready, 1000)) != b"ready":
            os.waitpid(self.pid, 0)
            raise RuntimeError(state.decode(errors="replace") or "the first process is gone")
        os.close(self._ready)
        return None if self._questions is None else _received(self._questions)


def launch(
    request: dict[str, Any], descriptors: dict[int, int], uid: int, body: Body, first: First
) -> tuple[int, int | None]:  # pragma: no cover (another process)
    """Have a program begin with these descriptors, and with none beside; RuntimeError if it cannot.

    Its process, or in namespaces that which is ``first`` there, and where it asks for threads, if it has to.
    """

    def enter() -> int:
        linux.drop_privileges(uid)
        if "namespaces" in request["layers"]:
            child = os.fork()
            if child:
                first(child)
            os.setsid()
            linux.drop_privileges(uid)
        return uid

    child = Child(request, descriptors, enter, body)
    return child.pid, child.wait()


def _begin(
    request: dict[str, Any], descriptors: dict[int, int], enter: Enter, body: Body
) -> NoReturn:  # pragma: no cover (another process)
    """Become the program or its tests. Whatever goes wrong, the keeper's code is not come back to."""
    ready = descriptors[_READY]
    try:
        os.setsid()
        was_root = os.geteuid() == 0
        uid = enter()
        arrange(descriptors)
        ready = _READY
        _shut_in(request, _others(request, was_root and os.geteuid() == uid >= linux.FIRST_UID))
        os.write(ready, b"ready")
        os.close(ready)
    except BaseException as error:
        try:
            os.write(ready, described(error).encode()[:1000])
        finally:
            os._exit(1)
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    _exit(body, request, module.__dict__)


def _wait_as_first(child: int) -> NoReturn:  # pragma: no cover (another process)
    """Be the first process of the namespace: bury what dies, and go with the program."""
    os.closerange(0, 1 << 16)
    while True:
        pid, code = os.wait()
        if pid == child:
            status = os.waitstatus_to_exitcode(code)
            os._exit(status if status >= 0 else 128 - status)


def _has_own_processes(request: dict[str, Any]) -> bool:  # pragma: no cover (another process)
    """Return whether it runs in a process namespace. Tests do not, so as to have threads; seccomp keeps them alone."""
    return "namespaces" in request["layers"] and "tests" not in request


def _others(request: dict[str, Any], is_spare_user: bool) -> int | None:  # pragma: no cover (another process)
    """Return how many processes of its user there are beside its own: parents of it. None if that is unknown."""
    if is_spare_user:
        return int(_has_own_processes(request))
    if "namespaces" in request["layers"]:
        return 2 if _has_own_processes(request) else 0
    return None if "seccomp" in request["layers"] else 2


def _shut_in(request: dict[str, Any], others: int | None) -> None:  # pragma: no cover (another process)
    layers = request["layers"]
    os.environ.clear()
    os.chdir(request["folder"])
    sys.argv[:] = ["program.py"]
    sys.dont_write_bytecode = True
    linux.limit_resources(request["limits"], others=others)
    if "landlock" in layers:
        linux.restrict_files_further(request["folder"])
    if "seccomp" in layers:
        threads = others is not None or _ask_for_threads()
        linux.refuse_calls(namespaces=_has_own_processes(request), threads=threads)
    os.closerange(_QUESTIONS, _QUESTIONS + 1)


def _ask_for_threads() -> bool:  # pragma: no cover (another process)
    """Give the keeper the say in each new thread; False where the kernel does not know how."""
    try:
        listener = linux.ask_for_threads()
    except OSError:
        return False
    way = socket.socket(fileno=_QUESTIONS)
    way.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack("i", listener))])
    way.detach()
    os.close(listener)
    return True


def arrange(descriptors: dict[int, int]) -> None:  # pragma: no cover (another process)
    """Give the process these descriptors, by number, and no others."""
    high = {number: os.dup2(descriptor, 100 + number) for number, descriptor in descriptors.items()}
    for number, descriptor in high.items():
        os.dup2(descriptor, number)
    for number in range(max(high)):
        if number not in high:
            os.closerange(number, number + 1)
    os.closerange(max(high) + 1, 1 << 16)


def _run(request: dict[str, Any], namespace: dict[str, Any]) -> None:  # pragma: no cover (another process)
    for part in ("preamble", "source"):
        exec(compile(request[part], "<program>", "exec", dont_inherit=True), namespace)


def _answer_calls(request: dict[str, Any], namespace: dict[str, Any]) -> None:  # pragma: no cover (another process)
    """Define the functions, then serve the entry point to the keeper until it hangs up."""
    try:
        _run(request, namespace)
        if request["entry_point"] not in namespace:
            raise NameError(f"name {request['entry_point']!r} is not defined")
    except BaseException as error:
        send_json(REPLIES, {"error": type(error).__name__, "text": described(error)})
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
            reply = {"error": type(error).__name__, "text": described(error).partition(": ")[2]}
        send_json(REPLIES, reply)


def _exit(body: Callable[..., None], *args: Any) -> NoReturn:  # pragma: no cover (another process)
    """Call, and end the process as the interpreter would have."""
    status = 1
    try:
        try:
            body(*args)
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


# The keeper -----------------------------------------------------------------------------------------------------------


def supervise(server: int) -> None:  # pragma: no cover (another process)
    """Run one request from standard input and answer on standard output."""
    linux.die_with(server)
    request = marshal.loads(receive(0))
    answer = os.dup(1)
    try:
        program = _start(request, server)
    except Exception as error:
        result = {"status": "setup", "error": described(error)}
    else:
        os.write(2, BEGUN)
        try:
            result = _watch(request, program)
        except BaseException as error:
            result = {"status": "killed", "error": f"the tests' process failed: {described(error)}"}
    send_json(answer, result)
    os._exit(0)


class _Program:  # pragma: no cover (another process)
    """A program that has begun, and its tests if there are any, as their keeper sees them."""

    def __init__(self, children: dict[int, int | None], outputs: dict[str, int], usage: Usage) -> None:
        self.children = children
        """Process numbers, the program's first, and where each asks for threads, if it has to."""
        self.outputs, self.usage = outputs, usage
        self.verdict: int | None = None
        """Where its tests say what they think of it, if there are any."""
        self.disk: Disk | None = None
        """What it can write to of the host's, if it can."""


def _start(request: dict[str, Any], server: int) -> _Program:  # pragma: no cover (another process)
    """Make the surroundings and have the program begin in them, and its tests in theirs."""
    restrict_keeper(request)
    given, out, err = (os.memfd_create(name) for name in ("stdin", "stdout", "stderr"))
    os.write(given, request["stdin"].encode(errors="surrogatepass"))
    os.lseek(given, 0, os.SEEK_SET)
    descriptors = {0: given, 1: out, 2: err}
    body, tests, verdict = _run, None, None
    if request["entry_point"] is not None:
        descriptors[CALLS], calls_out = os.pipe()
        replies_in, descriptors[REPLIES] = os.pipe()
        verdict, verdict_out = os.pipe()
        tests = _start_tests(request, {CALLS: calls_out, REPLIES: replies_in, _VERDICT: verdict_out})
        body = _answer_calls
    uid, proc, disk = surround(request, server)
    child, questions = launch(request, descriptors, uid, body, _wait_as_first)
    for descriptor in descriptors.values():
        if descriptor not in (out, err):
            os.close(descriptor)
    children = {child: questions}
    if tests is not None:
        children[tests.pid] = tests.wait()
    program = _Program(children, {"stdout": out, "stderr": err}, Usage(proc, *children))
    program.verdict, program.disk = verdict, disk
    return program


def _start_tests(request: dict[str, Any], descriptors: dict[int, int]) -> Child:  # pragma: no cover (another process)
    """Start the process of the tests, which alone reads them: the program is forked from memory that never has them."""
    keeper = os.getpid()

    def enter() -> int:
        linux.die_with(keeper)
        request["tests"] = receive(0).decode(errors="surrogatepass")
        uid, _, _ = surround(request, keeper)
        linux.drop_privileges(uid)
        return uid

    null = os.memfd_create("null")  # tests may print
    child = Child(request, {0: null, 1: null, 2: null, **descriptors}, enter, _judge)
    for descriptor in (null, *descriptors.values()):
        os.close(descriptor)
    return child


def restrict_keeper(request: dict[str, Any]) -> None:  # pragma: no cover (another process)
    """Restrict which files this process, and all that it starts, can open where no namespace does so."""
    if "landlock" in request["layers"]:
        linux.restrict_files(request["folder"], linux.KEEPERS_FILES)


def surround(
    request: dict[str, Any], parent: int
) -> tuple[int, int, Disk | None]:  # pragma: no cover (another process)
    """Make the surroundings of a program, or of its tests, as far as this process shares them, and a folder to run in.

    Return its user, a descriptor of the host's /proc, and what it can write to of the host's disk, if it can.
    """
    uid = linux.spare_user()
    proc = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    disk = None
    if "namespaces" in request["layers"]:
        linux.prctl(linux.PR_SET_DUMPABLE, 1)  # or its own /proc, which is to be written to, would be root's
        linux.enter_namespaces(request["limits"]["disk"], uid, processes=_has_own_processes(request))
        linux.prctl(linux.PR_SET_DUMPABLE, 0)
        request["folder"] = "/tmp"
        if os.geteuid() == 0 and not linux.can_become(uid):
            raise RuntimeError(f"user {uid} cannot read {os.__file__}")
    else:
        linux.prctl(linux.PR_SET_CHILD_SUBREAPER, 1)
        disk = Disk(os.open(request["folder"], OPEN_FOLDER), request["limits"]["disk"])
        request["folder"] = os.path.join(request["folder"], "tests" if "tests" in request else "program")
        os.mkdir(request["folder"], 0o700)
        if os.geteuid() == 0 and linux.can_become(uid):
            os.chown(request["folder"], uid, uid)
    linux.die_with(parent)  # again: trying to be another user has undone it
    return uid, proc, disk


def _socket_pair() -> tuple[int, int]:  # pragma: no cover (another process)
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    return one.detach(), other.detach()


def _received(descriptor: int) -> int | None:  # pragma: no cover (another process)
    """The descriptor that was sent on this one, if one was."""
    way = socket.socket(fileno=descriptor)
    _, ancillary, _, _ = way.recvmsg(1, socket.CMSG_SPACE(4))
    way.close()
    return struct.unpack("i", ancillary[0][2])[0] if ancillary else None


def _watch(request: dict[str, Any], program: _Program) -> dict[str, Any]:  # pragma: no cover (another process)
    """Wait until the program or its tests have ended, or are over a limit; what became of it."""
    start = time.monotonic()
    result: dict[str, Any] = {}
    timer = _Timer(request["limits"], program)
    for child, questions in program.children.items():
        count_threads(child, questions, request["limits"]["processes"])
    if program.verdict is None:
        os.waitid(os.P_PID, next(iter(program.children)), os.WEXITED | os.WNOWAIT)
    else:
        try:
            timer.interrupt = True
            try:
                _hear(program.verdict, result)
            finally:
                timer.interrupt = False
        except Ended:
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
        result |= {"status": "error", "error": FULL}
    elif "status" not in result:
        result["status"] = "timeout" if _status(codes[1], False) == "timeout" else "killed"
        result["error"] = "the tests' process has ended"
    for name, descriptor in program.outputs.items():
        os.lseek(descriptor, 0, os.SEEK_SET)
        result[name] = os.read(descriptor, request["limits"]["output"]).decode(errors="replace")
    if timer.full:
        result["stderr"] += f"{FULL}\n"
    return result


def _hear(verdict: int, result: dict[str, Any]) -> None:  # pragma: no cover (another process)
    """Add to the result what the tests say, up to their verdict, or to the first message that cannot be read."""
    try:
        while "status" not in result:
            message = receive_json(verdict)
            result.update({name: message[name] for name in ("normal", "error") if isinstance(message.get(name), str)})
            if message.get("status") in ("ok", "failed", "error"):
                result["status"] = message["status"]
    except Exception:
        return


def count_threads(child: int, questions: int | None, most: int) -> None:  # pragma: no cover (another process)
    """From now on let the program have so many threads, if it asks for them."""
    if questions is not None:
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])  # it is to interrupt this thread
        try:
            _thread.start_new_thread(_allow_threads, (child, questions, most))
        except RuntimeError:
            os.close(questions)  # then the program gets none
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGALRM])


def _allow_threads(child: int, listener: int, most: int) -> NoReturn:  # pragma: no cover (another process)
    """Allow new threads while there are fewer than ``most``."""
    poll = select.poll()
    poll.register(listener, select.POLLIN)
    while True:
        poll.poll()
        question = linux.next_question(listener)
        if question is None:  # who asked is gone, and perhaps with it all
            time.sleep(0.01)
            continue
        threads = _threads(child)
        linux.answer_question(listener, question, allow=0 < threads < most)
        for _ in range(100):  # or the next one, asked at the same time, would be allowed for the same place
            if _threads(child) != threads or not 0 < threads < most:
                break
            time.sleep(0.0002)


def _threads(pid: int) -> int:  # pragma: no cover (another process)
    """How many threads a process has; 0 if that cannot be known."""
    try:
        with open(f"/proc/{pid}/status", "rb") as file:
            return int(file.read().partition(b"\nThreads:")[2].split()[0])
    except (OSError, ValueError, IndexError):
        return 0


class _Timer:  # pragma: no cover (another process)
    """Ends a program and its tests when they are over a limit.

    Until it is stopped, their processes must not be waited for: so their numbers are still theirs, and killing them
    always finds them, if only their remains.
    """

    def __init__(self, limits: dict[str, float], program: _Program) -> None:
        self.late = False
        """Whether time was up."""
        self.full = False
        """Whether too much was written to the host's disk."""
        self.interrupt = False
        """Whether to raise `Ended` then, once, wherever this process may be."""
        self._limits, self._program = limits, program
        self._stopped = False
        self._cores = len(os.sched_getaffinity(0))
        signal.signal(signal.SIGALRM, self._look)
        self._set()

    def stop(self) -> None:
        self._stopped = True
        signal.setitimer(signal.ITIMER_REAL, 0)

    def _set(self) -> None:
        """Look again when it may have come to a limit."""
        usage, seconds = self._program.usage, self._limits["seconds"]
        rest = min(seconds - usage.time, longest(seconds) - usage.clock)
        rest = min(rest, (self._limits["cpu_seconds"] - usage.processor) / self._cores)
        signal.setitimer(signal.ITIMER_REAL, min(max(rest, 0.005), longest_look(self._program.disk)))

    def _look(self, *_: object) -> None:
        if self._stopped or self.late or self.full:
            return
        usage, seconds, disk = self._program.usage, self._limits["seconds"], self._program.disk
        usage.update()
        self.late = (
            usage.time >= seconds or usage.processor >= self._limits["cpu_seconds"] or usage.clock >= longest(seconds)
        )
        self.full = not self.late and disk is not None and disk.is_over()
        if not self.late and not self.full:
            self._set()
            return
        for child in self._program.children:
            os.kill(child, signal.SIGKILL)
        if self.interrupt:
            raise Ended


def kill_orphans() -> None:  # pragma: no cover (another process)
    """End what the program has left behind, where no namespace does it."""
    while True:
        with open(f"/proc/self/task/{os.getpid()}/children") as file:
            children = file.read().split()
        if not children:
            return
        for pid in map(int, children):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def _status(code: int, late: bool) -> str:
    """What became of a program, by its exit status: negative or from 128 on for a signal."""
    number = -code if code < 0 else code - 128
    if late or number == signal.SIGXCPU:
        return "timeout"
    if code == MEMORY_EXIT:
        return "memory"
    if number > 0:
        return "killed"
    return "error" if code else "ok"


class _Candidate:  # pragma: no cover (another process)
    """The program's function, as the tests call it."""

    def __init__(self, calls: int, replies: int) -> None:
        self.calls, self.replies = calls, replies
        self.gone = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        message = encode((args, kwargs))
        try:
            send_json(self.calls, message)
        except OSError as error:
            self.gone = True
            raise Ended from error
        reply = self.reply()
        if "value" in reply:
            return reply["value"]
        raise raised(reply)

    def reply(self) -> dict[str, Any]:
        """The next reply, with its value decoded. After one that is none, the program counts as gone."""
        try:
            reply = receive_json(self.replies)
            return {"value": decode(reply["value"])} if "value" in reply else {"error": reply["error"], **reply}
        except Exception as error:
            self.gone = True
            raise Ended from error


def _judge(request: dict[str, Any], _: dict[str, Any]) -> None:  # pragma: no cover (another process)
    """Run the tests against the program's function and write what they say to `_VERDICT`."""
    signal.signal(signal.SIGALRM, signal.SIG_IGN)  # an alarm that a test has set, and no handler for it, ends nothing
    send_json(_VERDICT, {"normal": normal_form(request["source"])})
    candidate = _Candidate(CALLS, REPLIES)
    try:
        status, error = _tested(request, candidate)
    except Ended:
        candidate.gone = True
    if candidate.gone:  # also where a test has caught it
        status, error = "error", "the program ended before the tests did"
    send_json(_VERDICT, {"status": status, "error": error})


def _tested(request: dict[str, Any], candidate: _Candidate) -> tuple[str, str | None]:  # pragma: no cover
    """Return what the tests say of the program's function, and the error that says why."""
    loaded = candidate.reply()
    if "value" not in loaded:
        return "error", str(loaded.get("text"))[:1000]
    module = types.ModuleType("tests")
    sys.modules["tests"] = module  # where dataclasses, pickle and unittest look for what is defined there
    namespace = module.__dict__
    try:
        exec(compile(request["preamble"], "<preamble>", "exec", dont_inherit=True), namespace)
        namespace[request["entry_point"]] = candidate  # some tests call it by its own name
        exec(compile(request["tests"], "<tests>", "exec", dont_inherit=True), namespace)
        namespace["check"](candidate)
    except Ended:
        raise
    except BaseException as error:
        return "failed", described(error)
    return "ok", None


def normal_form(source: str) -> str | None:
    """Source without comments, docstrings, imports and ways of writing; None if it is no Python."""
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
