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
import ast
import builtins
import json
import marshal
import os
import select
import sys
import time
import types

from explorl.sandbox import linux
from explorl.sandbox.codec import STARTED, decode, describe_error, encode
from explorl.sandbox.disk import ENTRIES
from explorl.sandbox.frames import MAX_FRAME, FrameReader, receive, receive_json, send_json
from explorl.sandbox.supervised import (
    CALLS,
    LAST,
    MEMORY_EXIT,
    REPLIES,
    IsolatedChild,
    Supervised,
    prepare_isolation,
    restrict_supervisor,
    wake_on_child_exit,
)
from explorl.sandbox.usage import UsageBudget

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_VERDICT = LAST
DISK_FULL = f"the files were more than {ENTRIES}, or larger than allowed together"
"""The error of a program that was killed because it wrote too much to the host's disk."""


class ProgramEnded(BaseException):
    """The program has ended. A BaseException, so that ``except Exception`` in a test misses it."""


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


# The program ----------------------------------------------------------------------------------------------------------


def _run_program(request: dict[str, Any], namespace: dict[str, Any]) -> None:  # pragma: no cover
    for part in ("preamble", "source"):
        exec(compile(request[part], "<program>", "exec", dont_inherit=True), namespace)


def _answer_calls(request: dict[str, Any], namespace: dict[str, Any]) -> None:  # pragma: no cover
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


# The supervisor -------------------------------------------------------------------------------------------------------


def supervise(server: int) -> None:  # pragma: no cover
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


class _Program(Supervised):  # pragma: no cover
    """A program as its supervisor sees it."""

    outputs: dict[str, int]
    """Files with its standard output and error."""
    verdict: int | None
    """The descriptor on which its tests write their verdict, if there are tests."""


def _start(request: dict[str, Any], server: int) -> _Program:  # pragma: no cover
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
    program = _Program(request, server, descriptors, main, tests=tests)
    program.verdict, program.outputs = verdict, {"stdout": out, "stderr": err}
    for descriptor in descriptors.values():
        if descriptor not in (out, err):
            os.close(descriptor)
    return program


def _start_tests(request: dict[str, Any], descriptors: dict[int, int]) -> IsolatedChild:  # pragma: no cover
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


def _watch(request: dict[str, Any], program: _Program) -> dict[str, Any]:  # pragma: no cover
    """Wait until the program or its tests end or exceed a limit, kill what is left, and return the result."""
    start = time.monotonic()
    result: dict[str, Any] = {}
    limits = request["limits"]
    budget = UsageBudget(program.usage, limits["seconds"], processor_seconds=limits["cpu_seconds"], disk=program.disk)
    verdict = None if program.verdict is None else FrameReader(program.verdict, MAX_FRAME)
    events = wake_on_child_exit() if verdict is None else verdict.fileno()
    poll = select.poll()
    poll.register(events, select.POLLIN)
    while not (program.has_ended() if verdict is None else _read_verdict(verdict, result)):
        budget.check()
        if budget.is_exceeded:
            break
        if poll.poll(budget.seconds_to_check * 1000) and verdict is None:
            os.read(events, 4096)
    codes = program.end()
    result["seconds"] = time.monotonic() - start
    if budget.is_late or program.verdict is None:
        result["status"] = _status(codes[0], budget.is_late)
    elif budget.is_full:
        result |= {"status": "error", "error": DISK_FULL}
    elif "status" not in result:
        result["status"] = "timeout" if _status(codes[1], False) == "timeout" else "killed"
        result["error"] = "the tests' process has ended"
    for name, descriptor in program.outputs.items():
        os.lseek(descriptor, 0, os.SEEK_SET)
        result[name] = os.read(descriptor, limits["output"]).decode(errors="replace")
    if budget.is_full:
        result["stderr"] += f"{DISK_FULL}\n"
    return result


def _read_verdict(verdict: FrameReader, result: dict[str, Any]) -> bool:  # pragma: no cover
    """Add the tests' messages to the result; return True after their verdict or a message that cannot be read."""
    try:
        for frame in verdict.messages():
            message = json.loads(frame)
            result.update({name: message[name] for name in ("normal", "error") if isinstance(message.get(name), str)})
            if message.get("status") in ("ok", "failed", "error"):
                result["status"] = message["status"]
                return True
    except Exception:
        return True
    return False


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


class _Candidate:  # pragma: no cover
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


def _run_tests(request: dict[str, Any], _: dict[str, Any]) -> None:  # pragma: no cover
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
