"""A program's time: what counts, and that nothing breaks when it is up."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import pytest

from explorl.sandbox import programs
from explorl.sandbox.programs import (
    Guarantees,
    ProgramLimits,
    SandboxError,
    in_threads,
    run_many,
    run_python,
    run_tests,
)
from explorl.sandbox.usage import Usage, wall_limit
from tests.sandbox.support import STUB

SPINNER = """
import os
for _ in range(7):
    if os.fork() == 0:
        os.setsid()
        break
while True: pass
"""
"""Eight processes, each in a session of its own, for which some kernels give it as much as eight programs."""


def about(limit: float, count: int) -> list[float]:
    """Times within 20 ms of a limit."""
    return [limit - 0.02 + 0.04 * index / count for index in range(count)]


@pytest.mark.parametrize("count", [150, pytest.param(4000, marks=pytest.mark.slow)])
def test_ending_at_the_limit_is_a_verdict(count: int) -> None:
    limits = ProgramLimits(seconds=0.06)
    sources = [f"import time; time.sleep({seconds})" for seconds in about(limits.seconds, count)]
    outcomes = run_many(sources, limits=limits, workers=6)
    assert {outcome.status for outcome in outcomes} <= {"ok", "timeout"}

    def test(seconds: float) -> str:
        source = f"import time\ndef add(a, b):\n    time.sleep({seconds})\n    return a + b"
        return run_tests(source, "def check(c): assert c(1, 2) == 3", entry_point="add", limits=limits).status

    statuses = in_threads(test, about(limits.seconds, count), workers=6)
    assert set(statuses) <= {"ok", "timeout"}


@pytest.mark.parametrize(
    ("tests", "status"),
    [
        ("import os\ndef check(c): os._exit(0)", "killed"),
        (
            "import os\ndef check(c):\n    for fd in range(99):\n        try: os.close(fd)\n        except OSError: 0",
            None,
        ),
        ("import os, signal\ndef check(c): os.kill(os.getpid(), signal.SIGALRM)", "ok"),
        ("import sys\ndef check(c):\n    def f(): f()\n    f()", "failed"),
        ("def check(c):\n    x = [0] * (1 << 40)", "failed"),
    ],
)
def test_what_happens_after_the_beginning_is_a_verdict(here: Guarantees, tests: str, status: str | None) -> None:
    if not here.layers:
        pytest.skip("nothing but limits here")
    tested = run_tests("def add(a, b): return a + b", tests, entry_point="add", limits=ProgramLimits(seconds=5))
    assert tested.status == status or (status is None and tested.status != "ok")


def test_failure_of_the_supervisor_is_a_verdict_once_the_program_runs(bootstrap: Callable[[str], None]) -> None:
    fail = "def fail(*_): raise OSError('no')\n"
    bootstrap(f"{STUB}\nfrom explorl.sandbox import child, fork_server\n{fail}child._watch = fail\nfork_server.main()")
    assert run_python("1").status == "killed"
    assert run_tests("def f(): 0", "def check(c): 0", entry_point="f").status == "killed"
    bootstrap(f"{STUB}\nfrom explorl.sandbox import child, fork_server\n{fail}child._start = fail\nfork_server.main()")
    with pytest.raises(SandboxError, match="OSError: no"):
        run_python("1")


def test_all_processes_count() -> None:
    if "namespaces" not in programs.capabilities().layers or len(os.sched_getaffinity(0)) < 2:
        pytest.skip("needs two cores, and programs with more than one process")
    waiting = "import os\nfor _ in range(4):\n    if os.fork() == 0:\n        os.setsid()\n        while True: pass\n"
    waiting += "import time; time.sleep(100)"
    for source in (SPINNER, waiting):
        outcome = run_python(source, limits=ProgramLimits(seconds=20, cpu_seconds=1))
        assert outcome.status == "timeout"
        assert outcome.seconds < 15


def test_children_that_have_ended_count() -> None:
    if "namespaces" not in programs.capabilities().layers:
        pytest.skip("programs have one process here")
    source = "import os, time\nwhile True:\n    if os.fork() == 0:\n        end = time.process_time() + 0.2\n"
    source += "        while time.process_time() < end: pass\n        os._exit(0)\n    os.wait()"
    outcome = run_python(source, limits=ProgramLimits(seconds=60, cpu_seconds=0.5))
    assert outcome.status == "timeout"
    assert outcome.seconds < 30


def test_no_child_ends_unseen() -> None:
    """Where SIGCHLD is ignored, nobody is told what a child has used."""
    if "namespaces" not in programs.capabilities().layers:
        pytest.skip("programs have one process here")
    source = "import signal\ntry: signal.signal(signal.SIGCHLD, signal.SIG_IGN)\nexcept OSError: print('refused')"
    assert run_python(source).stdout == "refused\n"


@pytest.mark.parametrize("source", ["import time; time.sleep(100)", "import threading; threading.Event().wait()"])
def test_sleep_counts(isolated: Guarantees, source: str) -> None:
    outcome = run_python(source, limits=ProgramLimits(seconds=0.4))
    assert outcome.status == "timeout"
    assert outcome.seconds >= 0.39


def test_time_without_a_view_of_processes(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Where /proc says nothing, all time may have been lost to others, and the clock has the last word."""
    empty = os.open(tmp_path_factory.mktemp("proc"), os.O_RDONLY)
    usage = Usage(empty, os.getpid())
    usage.update()
    os.close(empty)
    assert usage.time <= usage.clock
    assert usage.processor >= 0
    assert wall_limit(10) == 42


def test_usage_adds_up() -> None:
    busy = 0.35  # the kernel counts whole hundredths, of user and system time of each process for itself
    proc = os.open("/proc", os.O_RDONLY)
    child = os.fork()
    if child == 0:
        if os.fork() == 0:
            while time.process_time() < busy:
                pass
            os._exit(0)
        os.wait()
        while time.process_time() < busy:
            pass
        time.sleep(100)
    usage = Usage(proc, child)
    deadline = time.monotonic() + 60
    while usage.processor < 0.59 and time.monotonic() < deadline:
        usage.update()
    os.kill(child, 9)
    os.waitpid(child, 0)
    usage.update()
    os.close(proc)
    assert usage.processor >= 0.59
    assert usage.processor <= usage.clock * len(os.sched_getaffinity(0)) + 0.1
    assert 0.3 <= usage.time <= usage.clock + 0.01  # the child may have run before there was somebody to look


def test_hostile_tenth_harms_nobody_fast() -> None:
    load(20)


@pytest.mark.slow
def test_hostile_tenth_harms_nobody() -> None:
    load(300)


def load(count: int) -> None:
    """Checks of which one in ten is hostile: every honest one is judged right."""
    if "namespaces" not in programs.capabilities().layers:
        pytest.skip("spinners have one process here")
    limits = ProgramLimits(seconds=1, cpu_seconds=1)
    good = "import time\ndef f(x):\n    end = time.process_time() + 0.1\n    while time.process_time() < end: pass\n"
    hostile = SPINNER + "\ndef f(x): return x + 1"

    def judge(index: int) -> str:
        source = hostile if index % 10 == 3 else good + f"    return x + {1 + index % 2}"
        return run_tests(source, "def check(c): assert c(1) == 2", entry_point="f", limits=limits).status

    statuses = in_threads(judge, range(count), workers=2 * len(os.sched_getaffinity(0)))
    expected = ["timeout" if i % 10 == 3 else ("failed" if i % 2 else "ok") for i in range(count)]
    assert statuses == expected
