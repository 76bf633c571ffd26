"""Interpreters: what they show, what lives on between calls, and what happens when they end."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from explorl.sandbox import interpreter_pool, interpreter_process, programs
from explorl.sandbox.fork_client import ForkServerDied, fork_server_client
from explorl.sandbox.interpreter import RESTARTED, Interpreter, InterpreterLimits
from explorl.sandbox.interpreter_child import compile_cell, format_error
from explorl.sandbox.interpreter_pool import InterpreterPool
from explorl.sandbox.interpreter_supervisor import TruncatedOutput
from explorl.sandbox.programs import Guarantees, SandboxError
from explorl.sandbox.usage import UsageBudget
from tests.sandbox.support import PERMITTED, alive, children, descendants, eventually, fork_server_pid, script


@pytest.fixture(scope="module")
def pool() -> Iterator[InterpreterPool]:
    with InterpreterPool(InterpreterLimits(seconds=5, output=1000)) as made:
        yield made


@pytest.fixture(scope="module")
def shared(pool: InterpreterPool) -> Interpreter:
    return pool.open()


@pytest.fixture
def python(pool: InterpreterPool) -> Iterator[Interpreter]:
    with pool.open() as opened:
        yield opened


# What a cell shows ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cell", "text"),
    [
        ("6 * 7", "42\n"),
        ("print('a'); 'b'", "a\n'b'\n"),
        ("x = 3", ""),
        ("None", ""),
        ("3;", ""),
        ("3; # no", ""),
        ("'ß' ; ", ""),
        ("3 # ;", "3\n"),
        ("f'{1};'", "'1;'\n"),
        ("(1,\n 2)", "(1, 2)\n"),
        ("", ""),
        ("# nothing", ""),
        ("if True:\n    5", ""),
        ("for i in range(2): print(i)", "0\n1\n"),
        ("print('no newline', end='')", "no newline"),
        ("import sys; print('one', file=sys.stderr); print('two')", "one\ntwo\n"),
        ("import os; _ = os.write(1, b'a'); print('b'); _ = os.write(2, b'c')", "ab\nc"),
        ("__name__", "'__main__'\n"),
        ("print('Grüße 答案')", "Grüße 答案\n"),
        ("print('\\ud800')", "\\ud800\n"),
        ("import os; os.write(1, b'\\xff\\x1b')", "\N{REPLACEMENT CHARACTER}␛2\n"),
        ("1\r\n2\r\n", "2\n"),
        ("x = 1\rx + 1", "2\n"),
        ("x = 1\r\nx;\r", ""),
        ("import csv, sys; _ = csv.writer(sys.stdout).writerow([1, 2])", "1,2\n"),
        ("from __future__ import annotations\ndef f(a: no): 0\nf.__annotations__", "{'a': 'no'}\n"),
        ("_ = 3\n_ + 1", "4\n"),
        ("import os, sys; os.listdir('.'), dict(os.environ), sys.argv", "([], {}, ['program.py'])\n"),
    ],
)
def test_shows_what_a_notebook_shows(shared: Interpreter, cell: str, text: str) -> None:
    result = shared.run(cell)
    assert (result.status, result.text, result.cut) == ("ok", text, 0)
    assert not result.ended


@pytest.mark.parametrize(
    ("cell", "text"),
    [
        (
            "def f(x):\n    return 1 / x\nprint('before')\nf(0)",
            'before\nTraceback (most recent call last):\n  File "<cell N>", line 4, in <module>\n    f(0)\n'
            '  File "<cell N>", line 2, in f\n    return 1 / x\nZeroDivisionError: division by zero\n',
        ),
        (
            "import json\njson.loads('{')",
            "Traceback (most recent call last):\n  File \"<cell N>\", line 2, in <module>\n    json.loads('{')\n"
            "json.decoder.JSONDecodeError: Expecting property name enclosed in double quotes: line 1 column 2 (char 1)",
        ),
        ("x = (\n", "  File \"<cell N>\", line 1\n    x = (\n        ^\nSyntaxError: '(' was never closed\n"),
        (
            "raise SystemExit(3)",
            'Traceback (most recent call last):\n  File "<cell N>", line 1, in <module>\n    raise SystemExit(3)\n'
            "SystemExit: 3\n",
        ),
        (
            "try: 1/0\nexcept Exception as e: raise ValueError('x') from e",
            'Traceback (most recent call last):\n  File "<cell N>", line 1, in <module>\n    try: 1/0\n'
            "ZeroDivisionError: division by zero\nThe above exception was the direct cause of the following exception:"
            '\nTraceback (most recent call last):\n  File "<cell N>", line 2, in <module>\n'
            "    except Exception as e: raise ValueError('x') from e\nValueError: x\n",
        ),
    ],
    ids=["own frames", "library", "syntax", "exit", "cause"],
)
def test_errors_as_a_notebook_shows_them(python: Interpreter, cell: str, text: str) -> None:
    result = python.run(cell)
    assert result.status == "error"
    without_carets = [line for line in result.text.splitlines() if set(line) - set(" ~^")]
    expected = [line for line in text.replace("<cell N>", "<cell 1>").splitlines() if set(line) - set(" ~^")]
    assert without_carets == expected


@pytest.mark.parametrize("sign", ["\u2028", "\x0c", "\x1c", "\x85", "\r"])
def test_lines_are_those_that_python_counts(shared: Interpreter, sign: str) -> None:
    """Other signs part lines for `str.splitlines`."""
    text = shared.run(f"s = '''a{sign}b'''\n1 / 0  # here").text
    assert "    1 / 0  # here\n" in text


def test_marks_stand_below_what_they_mark(shared: Interpreter) -> None:
    *_, line, marks, _ = shared.run("x = 0\n1 / x").text.splitlines()
    assert marks.index("^") == line.index("/")


@pytest.mark.parametrize(
    "cell",
    [
        "from json import nope",
        "import nope",
        "import asyncio; asyncio.run(3)",
        "open('/nope')",
        "class E(Exception):\n    def __str__(self): raise KeyboardInterrupt\nraise E",
        "class E(BaseException): __module__ = 3\nraise E",
        "raise ExceptionGroup('g', [ValueError(1), ExceptionGroup('h', [KeyError(2)])])",
        "def f(): f()\nf()",
        "exec('1/0')",
        "exit()",
        "input()",
        "x = '\ud800'",
        "\0",
        "e = ValueError(); e.__context__ = e; raise e",
        "raise type('E' * 300, (Exception,), {})",
    ],
)
def test_no_error_shows_the_machine(shared: Interpreter, cell: str) -> None:
    result = shared.run(cell)
    assert result.status == "error"
    assert result.text
    for place in (os.path.dirname(os.__file__), sys.prefix, sys.base_prefix, "explorl", "interpreter_child.py"):
        assert place not in result.text


def test_error_that_cannot_be_shown() -> None:
    class Meta(type):
        def __getattribute__(cls, name: str) -> object:
            raise SystemExit

    class Broken(Exception, metaclass=Meta):
        pass

    assert format_error(Exception.__new__(Broken)) == "Broken: <error that cannot be shown>\n"


def test_last_expression_is_apart() -> None:
    assert [len(compile_cell(source, "<cell 1>")) for source in ("1", "x = 1", "1;", "x\ny", "")] == [2, 1, 1, 2, 1]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.text(max_size=30), max_size=8), st.integers(1, 60))
def test_output_is_cut_in_the_middle(parts: list[str], most: int) -> None:
    whole = "".join(parts).encode(errors="replace").decode()
    output = TruncatedOutput(most)
    for part in parts:
        output.add(part.encode(errors="replace"))
    head, tail = output.parts
    assert output.cut == max(0, len(whole) - most)
    if output.cut:
        assert head + tail == whole[: (most + 1) // 2] + whole[len(whole) - most // 2 :]
    else:
        assert head + tail == whole


@given(st.binary(max_size=60), st.integers(1, 60))
def test_bytes_in_any_pieces_are_the_same_text(data: bytes, most: int) -> None:
    whole, pieces = TruncatedOutput(most), TruncatedOutput(most)
    whole.add(data)
    for byte in data:
        pieces.add(bytes([byte]))
    assert whole.parts == pieces.parts
    assert sum(map(len, whole.parts)) + whole.cut == len(data.decode(errors="replace"))


def test_long_output_says_how_much_was_cut(shared: Interpreter) -> None:
    result = shared.run("print('a' * 800 + 'b' * 800)\nraise ValueError('the end')")
    assert result.status == "error"
    assert result.text.startswith("a" * 500 + f"\n[{result.cut} characters cut]\n")
    assert result.text.endswith("ValueError: the end\n")
    assert 0 < result.cut < 1200
    result = shared.run("for _ in range(100_000): print('x' * 99)")  # 10 MB, far more than a pipe holds
    assert (result.status, result.cut) == ("ok", 10_000_000 - 1000)


# What lives on --------------------------------------------------------------------------------------------------------


def test_variables_live_on(pool: InterpreterPool) -> None:
    one, other = pool.open(), pool.open()
    one.run("import math\nx = 1\ndef f(): return x\nopen('file', 'w').write('kept')")
    assert other.run("x").status == "error"
    assert one.run("1 / 0").status == "error"
    assert one.run("x += 1\nf(), math.floor(2.5), open('file').read()").text == "(2, 2, 'kept')\n"
    assert other.run("import os; os.listdir('.')").text == "[]\n"
    one.close()
    other.close()


@pytest.mark.parametrize(
    "closing", ["sys.stdout.close(); sys.stderr.close()", "os.close(1); os.close(2)", "del sys.stdout"]
)
def test_closed_output_is_open_again(python: Interpreter, closing: str) -> None:
    assert python.run(f"import os, sys\n{closing}").status == "ok"
    result = python.run("print(1); print(2, file=sys.stderr); 3")
    assert (result.status, result.text) == ("ok", "1\n2\n3\n")


def test_expected_interpreters_start_before_they_are_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interpreter_pool, "_EXPECTED_PER_CORE", 3)
    with InterpreterPool(warm=0, unisolated=True) as pool:
        monkeypatch.setattr(pool, "_cores", 1)
        pool.expect(50)
        assert pool.starting
        eventually(lambda: pool.poll() == 0 and not pool.starting)
        ready = set(pool._processes.values())
        assert len(ready) == 3
        opened = [pool.open() for _ in range(3)]
        assert {python._process for python in opened} == ready
        assert [python.run("6 * 7").text for python in opened] == ["42\n"] * 3
        pool.expect(0)
        fourth = pool.open()
        assert fourth._process not in ready
        assert fourth.run("1").text == "1\n"


def test_who_is_late_is_found_though_nobody_looks_all_the_time() -> None:
    with InterpreterPool(warm=0, unisolated=True) as pool:
        python = pool.open()
        assert python.run("1").status == "ok"
        call = python.submit("import time; time.sleep(100)")
        assert python._process is not None
        python._process.deadline = 0.0
        eventually(lambda: pool.poll() >= 0 and call.done)
        assert call.result().status == "timeout"


def test_calls_run_while_others_do(pool: InterpreterPool) -> None:
    """Three cells that each take a while, in three interpreters, and none of them is waited for."""
    opened = [pool.open() for _ in range(3)]
    calls = [python.submit(f"import time; time.sleep(0.2); {number}") for number, python in enumerate(opened)]
    assert not any(call.done for call in calls)
    assert pool.poll(0) == 0
    finished = 0
    while finished < 3:
        finished += pool.poll(10)
    assert all(call.done for call in calls)
    assert [call.result().text for call in calls] == ["0\n", "1\n", "2\n"]
    assert pool.poll(1000) == 0  # at once: there is nothing to wait for
    for python in opened:
        python.close()


def test_calls_of_one_run_in_order(python: Interpreter) -> None:
    calls = [python.submit("x = []"), *(python.submit(f"x.append({i})") for i in range(5)), python.submit("x")]
    assert calls[-1].result().text == "[0, 1, 2, 3, 4]\n"
    assert all(call.done for call in calls)


def test_long_cells_arrive(python: Interpreter) -> None:
    cell = f"x = {'a' * 3_000_000!r}\nlen(x)"
    assert python.run(cell).text == "3000000\n"


def test_copy_has_the_same_variables(pool: InterpreterPool) -> None:
    python = pool.open()
    python.run("x = [1]")
    python.run("import os; os._exit(0)")  # and all before it is gone
    python.run("y = [2]")
    python.run("1 / 0")
    other = python.copy()
    assert other.calls_left == python.calls_left
    assert other.run("y.append(3); y").text == "[2, 3]\n"
    assert other.run("x").status == "error"
    assert python.run("y").text == "[2]\n"
    python.close()
    other.close()


def test_replay_that_fails_is_told(python: Interpreter) -> None:
    """What cells did once they may not do again, in time or at all."""
    python.run("0")  # it has started, so that the replay begins at once
    left = python.calls_left
    python.replay(["x = 1", "y = 2"])
    assert python.calls_left == left
    call = python.submit("'x' in globals(), 'y' in globals()")
    assert python._process is not None
    python._pool._handle_lost_process(python._process, "timeout")
    assert call.result().text == f"[{RESTARTED}]\n(False, False)\n"
    assert python.run("1").text == "1\n"


def test_nothing_runs_between_calls(pool: InterpreterPool) -> None:
    """A thread that never rests, and where there can be one a process that has left its session."""
    with pool.open() as python:
        before = set(descendants(fork_server_pid()))
        cell = "import threading, os\nn = 0\ndef count():\n    global n\n    while True: n += 1\n"
        cell += "try:\n    if os.fork() == 0:\n        os.setsid(); count()\nexcept OSError: pass\n"
        assert python.run(cell + "threading.Thread(target=count, daemon=True).start()").status == "ok"
        busy = [pid for pid in before | set(descendants(fork_server_pid())) if state(pid) == "T"]
        assert busy
        eventually(lambda: all(state(pid) in "ST" for pid in descendants(fork_server_pid())))
        assert int(python.run("n").text) > 0


def state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "X"


# Limits ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seconds": 0}, r"seconds=0: give a positive number, like 5\.0"),
        ({"seconds": float("nan")}, "seconds=nan: give a positive number"),
        ({"seconds": "5"}, "seconds='5': give a number of seconds, like"),
        ({"calls": 0}, "calls=0: give a positive number, like 100"),
        ({"calls": 1.5}, r"calls=1\.5: give a whole number, like 100"),
        ({"calls": True}, "calls=True: give a whole number"),
        ({"output": -1}, "output=-1: give a positive number, like 4000"),
        ({"memory": 0}, "memory=0: give a positive number, like 536870912"),
        ({"memory": 512}, "memory=512 bytes are too few for Python itself; give 33554432 or more, like 536870912"),
    ],
)
def test_limits_name_a_good_value(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        InterpreterLimits(**changes)  # type: ignore[arg-type]


def test_calls_are_counted() -> None:
    with InterpreterPool(InterpreterLimits(calls=2), warm=0) as pool:
        python = pool.open()
        assert (python.run("x = 1").status, python.calls_left) == ("ok", 1)
        assert (python.run("x").text, python.calls_left) == ("1\n", 0)
        result = python.run("x")
        assert (result.status, result.text, result.ended) == ("refused", "no calls are left: 2 were allowed\n", False)
        assert pool.open().run("2").text == "2\n"


def test_time_is_that_of_one_call() -> None:
    with InterpreterPool(InterpreterLimits(seconds=0.6), warm=0) as pool:
        python = pool.open()
        work = "import time\nend = time.process_time() + 0.35\nwhile time.process_time() < end: pass\nprint('done')"
        assert [python.run(work).text for _ in range(2)] == ["done\n"] * 2
        result = python.run("print('begun')\nwhile True: pass")
        assert result.status == "timeout"
        assert result.text == f"begun\nTimeoutError: the call took longer than 0.6 s; {RESTARTED}\n"
        assert python.run("1").text == "1\n"


class Counted:
    """What `Usage` would say."""

    def __init__(self, *, knows_waiting: bool = True) -> None:
        self.time = self.clock = self.processor = 100.0  # of earlier calls
        self.knows_waiting = knows_waiting

    def update(self) -> None: ...


@pytest.mark.parametrize(
    ("time", "processor", "clock", "load", "knows_waiting", "over"),
    [
        (0.9, 0.9, 0.9, 1, True, False),
        (1.1, 0.0, 1.1, 1, True, True),
        (0.5, 1.1, 0.5, 1, True, True),
        (0.5, 0.5, 5.9, 1, True, False),
        (0.5, 0.5, 6.1, 1, True, True),
        (0.5, 0.5, 59.0, 10, True, False),
        (0.5, 0.5, 61.0, 10, True, True),
        (0.5, 0.5, 6.1, 10, False, True),
    ],
)
def test_time_in_a_crowd(
    time: float, processor: float, clock: float, load: int, knows_waiting: bool, over: bool
) -> None:
    """One second of its own, of processors, and 4 · 1 + 2 on the clock; more on the clock where others wait too."""
    usage = Counted(knows_waiting=knows_waiting)
    limit = UsageBudget(usage, 1.0, load)  # type: ignore[arg-type]
    usage.time, usage.processor, usage.clock = 100 + time, 100 + processor, 100 + clock
    limit._next_check = 0.0
    limit.check()
    assert limit.is_exceeded is over


def test_memory_is_limited() -> None:
    with InterpreterPool(InterpreterLimits(memory=128 << 20), warm=0) as pool:
        python = pool.open()
        result = python.run("x = bytearray(1 << 27)")
        assert result.status == "error"
        assert result.text.endswith("\nMemoryError\n")
        assert python.run("1").text == "1\n"


# Ends -----------------------------------------------------------------------------------------------------------------


def test_every_set_of_layers_works(here: Guarantees) -> None:
    with InterpreterPool(InterpreterLimits(seconds=0.5), warm=0) as pool:
        python = pool.open()
        assert python.run("x = 1; print(x)").text == "1\n"
        assert python.run("x + 1").text == "2\n"
        assert python.run("1/0").status == "error"
        if here.layers:
            assert python.run("while True: pass").status == "timeout"
            assert python.run("import os; os._exit(3)").status == "exited"
            assert python.run("import ctypes; ctypes.string_at(0)").status == "killed"
        assert python.run("open('f', 'w').write('12')").text == "2\n"


def test_no_isolation_no_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("EXPLORL_UNISOLATED", raising=False)
    (bare, *_) = [here for here in PERMITTED if here.missing]
    monkeypatch.setattr(programs, "capabilities", lambda: bare)
    with pytest.raises(SandboxError, match=r"not be isolated from this machine's .*unisolated=True"):
        InterpreterPool()
    with InterpreterPool(unisolated=True, warm=0) as pool:
        assert pool.open().run("1").text == "1\n"


def test_linux_only(monkeypatch: pytest.MonkeyPatch) -> None:
    programs.capabilities.cache_clear()
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(OSError, match="the sandbox needs Linux, this is darwin"):
        InterpreterPool()


def test_closing_ends_all() -> None:
    pool = InterpreterPool(warm=1)
    eventually(lambda: pool.poll() == 0 and pool._spare[0].state == "idle")
    before = set(descendants(fork_server_pid()))
    one, other = pool.open(), pool.open()
    one.run("import os\nif os.fork() == 0:\n    os.setsid()\n    while True: pass")
    waiting = [other.submit("import time; time.sleep(100)"), other.submit("1")]
    eventually(lambda: pool.poll() == 0 and other._running is not None)
    mine = set(descendants(fork_server_pid())) - before
    one.close()
    one.close()
    with pytest.raises(ValueError, match=r"this interpreter is closed; open another with InterpreterPool\.open"):
        one.run("1")
    pool.close()
    pool.close()
    assert [call.result().text for call in waiting] == ["the interpreter was closed\n"] * 2
    eventually(lambda: not any(map(alive, mine)), 10)
    with pytest.raises(ValueError, match="this pool is closed; make another InterpreterPool"):
        pool.open()


def test_abandoned_interpreters_end() -> None:
    with InterpreterPool(warm=0) as pool:
        python = pool.open()
        python.run("1")
        assert len(pool._processes) == 1
        del python
        gc.collect()
        eventually(lambda: pool.poll() == 0 and pool._processes == {})  # polls look for such now and then
        pool.open().run("1")
    before = set(children(fork_server_pid()))
    forgotten = InterpreterPool(warm=2)
    eventually(lambda: len(set(children(fork_server_pid())) - before) == 2)
    del forgotten
    gc.collect()
    eventually(lambda: set(children(fork_server_pid())) <= before)


def test_many_interpreters_leave_nothing() -> None:
    with InterpreterPool(warm=0) as pool:
        kept = pool.open()
        kept.run("1")
        descriptors = sorted(os.listdir("/proc/self/fd"))
        for _ in range(10):
            with pool.open() as python:
                assert python.run("2").text == "2\n"
        assert sorted(os.listdir("/proc/self/fd")) == descriptors


def test_fork_server_that_was_killed() -> None:
    with InterpreterPool(warm=1) as pool:
        idle, busy = pool.open(), pool.open()
        idle.run("x = 1")
        call = busy.submit("import time; time.sleep(100)")
        eventually(lambda: pool.poll() == 0 and busy._running is call)
        supervisors = children(fork_server_pid())
        os.kill(fork_server_pid(), signal.SIGKILL)
        eventually(lambda: not any(map(alive, supervisors)))
        assert call.result().status == "killed"
        assert busy.run("2").text == "2\n"
        assert idle.run("3").text == f"[{RESTARTED}]\n3\n"
        assert idle.run("4").text == "4\n"


def test_warm_one_that_was_killed_is_not_given_out() -> None:
    with InterpreterPool(warm=1) as pool:
        eventually(lambda: pool.poll() == 0 and pool._spare[0].state == "idle")
        supervisors = children(fork_server_pid())
        os.kill(fork_server_pid(), signal.SIGKILL)
        eventually(lambda: not any(map(alive, supervisors)))
        assert pool.open().run("1").text == "1\n"


def test_interpreter_that_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    with InterpreterPool(warm=0) as pool:

        def refuse() -> None:
            raise ForkServerDied("no more")

        with monkeypatch.context() as patch:
            patch.setattr(fork_server_client, "start_interpreter", refuse)
            python = pool.open()
            call = python.submit("1")
            with pytest.raises(SandboxError, match="could not start an interpreter in 3 attempts: no more"):
                call.result()
        assert python.run("1").text == "1\n"


def test_setup_that_fails_is_an_error_of_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interpreter_process, "working_folder", lambda: nullcontext("/nowhere"))
    with InterpreterPool(warm=0) as pool:
        pool._layers = ()
        calls = [pool.open().submit("1") for _ in range(2)]
        for call in calls:
            with pytest.raises(SandboxError, match=r"could not start an interpreter in 3 attempts: .*/nowhere"):
                call.result()


def test_forks_leave_interpreters_to_the_parent() -> None:
    with InterpreterPool(warm=1) as pool:
        python = pool.open()
        python.run("x = 5")
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            signal.alarm(60)
            try:
                try:
                    python.run("x")
                except ValueError as error:
                    os.write(writing, str(error).encode())
                del python, pool
                gc.collect()
            finally:
                os._exit(0)
        os.close(writing)
        os.waitpid(child, 0)
        assert b"belongs to the process that was forked" in os.read(reading, 1000)
        os.close(reading)
        assert python.run("x").text == "5\n"


def test_nothing_outlives_the_training_process() -> None:
    source = """
from explorl.sandbox.interpreter import *
from explorl.sandbox.interpreter_pool import *
pool = InterpreterPool(InterpreterLimits(seconds=100), warm=1)
one, other = pool.open(), pool.open()
one.run("x = 1")
other.submit("import os\\nif os.fork() == 0: os.setsid()\\nwhile True: pass")
while True:
    pool.poll(0.1)
    print(flush=True)
"""
    training = script(source)
    try:
        assert training.stdout is not None
        training.stdout.readline()
        eventually(lambda: len(descendants(training.pid)) >= 1 + 3 * 3 or training.poll() is not None)
        processes = descendants(training.pid)
        assert len(processes) >= 1 + 3 * 3
    finally:
        training.kill()
        training.communicate()
    eventually(lambda: not any(map(alive, processes)), 10)


def test_exit_without_closing_leaves_nothing() -> None:
    source = "from explorl.sandbox.interpreter_pool import *\npool = InterpreterPool()\npython = pool.open()\n"
    with script(source + "print(python.run('1').text, programs.fork_server_client._running[0].pid)") as training:
        out, err = training.communicate(timeout=60)
    assert (training.returncode, err) == (0, "")
    assert not alive(int(out.split()[1]))


def test_threads_share_a_pool() -> None:
    with InterpreterPool(warm=0) as pool:

        def work(number: int) -> list[str]:
            with pool.open() as python:
                python.run(f"x = {number}")
                return [python.run("x += 1; x").text for _ in range(3)]

        with ThreadPoolExecutor(4) as threads:
            found = list(threads.map(work, range(0, 40, 10)))
    assert found == [[f"{number + step}\n" for step in (1, 2, 3)] for number in range(0, 40, 10)]


def test_cells_are_text(python: Interpreter) -> None:
    with pytest.raises(TypeError, match="a cell of type 'bytes': give Python source as text"):
        python.submit(b"1")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="warm=-1: give a count of processes like 2, or 0 for none"):
        InterpreterPool(warm=-1)
