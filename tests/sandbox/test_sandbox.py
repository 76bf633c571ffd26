"""Programs that want out: what the sandbox promises, tried by programs that try to break it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from explorl.sandbox import fork_client, programs
from explorl.sandbox.child import _status, normal_form, to_exception
from explorl.sandbox.codec import decode, describe_error, encode
from explorl.sandbox.fork_client import fork_server_client
from explorl.sandbox.frames import receive, receive_json, send, send_json
from explorl.sandbox.programs import (
    Guarantees,
    ProgramLimits,
    SandboxError,
    capabilities,
    probe,
    run_many,
    run_python,
    run_tests,
)
from explorl.sandbox.python_paths import python_paths
from tests.sandbox.support import (
    ISOLATED,
    PERMITTED,
    STUB,
    alive,
    children,
    descendants,
    eventually,
    fork_server_pid,
    script,
)

QUICK = ProgramLimits(seconds=0.7)
ADD = "def add(a, b):\n    return a + b\n"
CHECK = "def check(candidate):\n    assert candidate(1, 2) == 3\n    assert candidate('a', 'b') == 'ab'\n"


def fake(layers: programs.Layers) -> Guarantees:
    return Guarantees(True, True, True, True, layers)


# What a program may do ------------------------------------------------------------------------------------------------


def test_runs_a_program(here: Guarantees) -> None:
    source = (
        "import sys, os, hashlib, json, random, typing\nprint(input() + 'ß')\nprint(sys.argv, dict(os.environ), "
        "os.listdir('.'))\nopen('file', 'w').write('x')\nprint(os.listdir('.'), file=sys.stderr)"
    )
    outcome = run_python(source, stdin="Grüße\nmore")
    assert outcome.status == "ok"
    assert outcome.stdout == "Grüßeß\n['program.py'] {} []\n"
    assert outcome.stderr == "['file']\n"
    assert 0 < outcome.seconds < 10


def test_threads_and_event_loops_work() -> None:
    source = (
        "import asyncio, threading\nasync def three():\n    await asyncio.sleep(0)\n    return 3\n"
        "threading.Thread(target=lambda: print(asyncio.run(three()))).start()"
    )
    assert run_python(source).stdout == "3\n"


@pytest.mark.parametrize(
    ("source", "status", "end"),
    [
        ("1/0", "error", 'Traceback (most recent call last):\n  File "<program>", line 1, in <module>\n'),
        ("1 +", "error", "SyntaxError: invalid syntax\n"),
        ("import sys; sys.exit()", "ok", ""),
        ("import sys; sys.exit(3)", "error", ""),
        ("import sys; sys.exit('bye')", "error", "bye\n"),
        ("import os; os._exit(0)", "ok", ""),
        ("import ctypes; ctypes.string_at(0)", "killed", ""),
        ("import atexit, sys; atexit.register(print, 'later', file=sys.stderr)", "ok", "later\n"),
        ("class E(SystemExit):\n    def __str__(self): raise E\nraise E(E())", "error", ""),
        ("import sys; print(sys.stdin.read())", "ok", ""),
        ("x = '\ud800'", "error", ""),
        ("\0", "error", ""),
    ],
)
def test_how_programs_end(source: str, status: str, end: str) -> None:
    outcome = run_python(source)
    assert outcome.status == status, outcome
    assert end in outcome.stderr
    assert "sandbox" not in outcome.stderr


def test_many_at_a_time() -> None:
    outcomes = run_many([f"print({i})" for i in range(8)], workers=4)
    assert [outcome.stdout for outcome in outcomes] == [f"{i}\n" for i in range(8)]
    assert run_many([]) == []
    with pytest.raises(ValueError, match="workers=0: give a count like 4"):
        run_many(["1"], workers=0)


@pytest.mark.parametrize("field", ["seconds", "memory", "output"])
def test_limits_are_positive(field: str) -> None:
    with pytest.raises(ValueError, match=f"{field}=0: give a positive number, like"):
        ProgramLimits(**{field: 0})
    for value in ("nan", "inf"):
        with pytest.raises(ValueError, match=f"{field}={value}: give a positive number, like"):
            ProgramLimits(**{field: float(value)})


def test_counts_are_whole() -> None:
    with pytest.raises(ValueError, match=r"memory=1000000000\.0: give a whole number, like 536870912"):
        ProgramLimits(memory=1e9)  # type: ignore[arg-type]
    assert run_python("print(1)", limits=ProgramLimits(seconds=3, cpu_seconds=1e30)).stdout == "1\n"


# What it may not ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "limits", "status"),
    [
        ("while True: pass", QUICK, "timeout"),
        ("while True: pass", ProgramLimits(cpu_seconds=1), "timeout"),
        ("import time; time.sleep(100)", QUICK, "timeout"),
        ("import signal\nsignal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile True: pass", QUICK, "timeout"),
        ("kept = []\nwhile True: kept.append(bytearray(1 << 20))", ProgramLimits(memory=200 << 20), "memory"),
        ("x = 'x' * (1 << 40)", ProgramLimits(), "memory"),
        ("while True: print('x' * 10_000)", ProgramLimits(), "error"),
        ("f = open('f', 'wb')\nwhile True: f.write(bytes(1 << 20))", ProgramLimits(), "error"),
        ("kept = [open('f', 'w') for _ in range(1000)]", ProgramLimits(), "error"),
        ("import os\nwhile True:\n    try: os.fork()\n    except OSError: pass", QUICK, "timeout"),
        ("import os\nfor _ in range(100): os.fork()", QUICK, None),
        (
            "import threading, time\nfor _ in range(2000): threading.Thread(target=time.sleep, args=(9,)).start()",
            QUICK,
            None,
        ),
        ("def f(): f()\nf()", ProgramLimits(), "error"),
    ],
)
def test_bombs(here: Guarantees, source: str, limits: ProgramLimits, status: str | None) -> None:
    if not here.layers:
        pytest.skip("nothing but limits here: not to be tried on somebody's machine")
    start = time.monotonic()
    outcome = run_python(source, limits=limits)
    assert outcome.status == status or (status is None and outcome.status in ("error", "timeout"))
    assert time.monotonic() - start < 10
    assert len(outcome.stdout.encode()) <= limits.output
    assert len(outcome.stderr.encode()) <= limits.output


def test_disk_is_limited() -> None:
    if "namespaces" not in capabilities().layers:
        pytest.skip("only with namespaces")
    outcome = run_python(
        "for i in range(1000): open(str(i), 'wb').write(bytes(1 << 20))", limits=ProgramLimits(disk=4 << 20)
    )
    assert "No space left" in outcome.stderr


def test_files_outside_are_out_of_reach(here: Guarantees, tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    victim = tmp_path / "victim"
    victim.write_text("secret")
    victim.chmod(0o666)
    source = f"""
import os, shutil
for action in (
    lambda: print(open({str(victim)!r}).read()),
    lambda: print(open("/etc/passwd").read()),
    lambda: open({str(victim)!r}, "r+").write("overwritten"),
    lambda: os.truncate({str(victim)!r}, 0),
    lambda: os.chmod({str(victim)!r}, 0),
    lambda: os.rename({str(victim)!r}, {str(victim)!r} + "2"),
    lambda: os.link({str(victim)!r}, "mine"),
    lambda: shutil.rmtree({str(tmp_path)!r}),
    lambda: print(os.listdir({str(Path.home())!r} + "/.ssh")),
    lambda: print(open({os.__file__!r}, "a")),
):
    try:
        action()
    except OSError:
        pass
"""
    if not here.filesystem_isolated:
        pytest.skip("the probe says that files are not isolated")
    outcome = run_python(source)
    assert outcome.status == "ok"
    assert outcome.stdout == ""
    assert victim.read_text() == "secret"
    assert victim.stat().st_mode & 0o777 == 0o666


def test_no_network(here: Guarantees) -> None:
    if not here.network_isolated:
        pytest.skip("the probe says that the network is not isolated")
    source = """
import socket
for family in (socket.AF_INET, socket.AF_INET6, socket.AF_UNIX, socket.AF_NETLINK):
    for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_RAW):
        try:
            socket.socket(family, kind).connect(("127.0.0.1", 9))
            print("out", family, kind)
        except PermissionError:
            pass
"""
    outcome = run_python(source)
    assert (outcome.status, outcome.stdout) == ("ok", "")


def test_other_processes_are_out_of_reach(here: Guarantees) -> None:
    if not here.processes_isolated:
        pytest.skip("the probe says that processes are not isolated")
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as victim:
        source = f"""
import ctypes, os, signal
libc = ctypes.CDLL(None)
for pid in ({victim.pid}, {os.getpid()}, os.getppid(), -1):
    try:
        os.kill(pid, signal.SIGKILL)
    except OSError:
        pass
    libc.ptrace(16, pid, 0, 0)
try:
    os.killpg({os.getpgrp()}, signal.SIGKILL)
except OSError:
    pass
print("alive")
"""
        outcome = run_python(source)
        assert victim.poll() is None
        victim.communicate(b"\n")
        assert victim.returncode == 0
    assert outcome.stdout == "alive\n"


@pytest.mark.parametrize(
    "call",
    [
        "os.execv('/bin/true', ['true'])",
        "os.memfd_create('x')",
        "os.chroot('.')",
        "os.open('/proc/self/mem', os.O_RDWR)",
        "check(libc.unshare(0x10000000))",
        "check(libc.mount(b'none', b'/tmp', b'tmpfs', 0, 0))",
        "check(libc.syscall(ctypes.c_long(425), 1, 0))",
        "check(libc.prctl(1, 0, 0, 0, 0))",
        "check(libc.setuid(0))",
        "os.nice(-5)",
        "os.setgroups([0])",
        "resource.setrlimit(resource.RLIMIT_AS, (-1, -1))",
        "resource.prlimit(os.getppid(), resource.RLIMIT_CPU, (1, 1))",
    ],
)
def test_refused_calls(call: str) -> None:
    if "seccomp" not in capabilities().layers:
        pytest.skip("seccomp is not permitted here")
    source = f"""
import ctypes, os, resource
libc = ctypes.CDLL(None, use_errno=True)
def check(result):
    if result < 0:
        raise OSError(ctypes.get_errno(), "refused")
try:
    {call}
    print("done", os.getuid())
except (OSError, ValueError):
    print("refused")
"""
    outcome = run_python(source)
    if "setuid" in call and os.getuid() == 0 and not capabilities().separate_user:
        pytest.skip("root stays root here")
    assert outcome.stdout == "refused\n", outcome


def test_no_inherited_descriptors(here: Guarantees, tmp_path: Path) -> None:
    with (tmp_path / "open").open("w") as file:
        os.set_inheritable(file.fileno(), True)
        source = (
            "import os\nfor number in range(64):\n    try: os.fstat(number); print(number)\n    except OSError: pass"
        )
        assert run_python(source).stdout.split() == ["0", "1", "2"]


def test_nothing_survives(here: Guarantees, tmp_path: Path) -> None:
    """A child that leaves the session, ignores signals and loses its parents holds a pipe: its end is the child's."""
    if not here.layers:
        pytest.skip("nothing but limits here")
    name = f"explorl-survivor-{os.getpid()}-{time.monotonic_ns()}"
    source = f"""
import ctypes, os, signal, time
def daemon():
    os.setsid()
    for number in range(1, 32):
        try: signal.signal(number, signal.SIG_IGN)
        except (OSError, ValueError): pass
    if os.fork() == 0:
        ctypes.CDLL(None).prctl(15, b"{name[-15:]}", 0, 0, 0)
        time.sleep(100)
    os._exit(0)
try:
    if os.fork() == 0:
        daemon()
    os.wait()
except PermissionError:
    pass
"""
    assert run_python(source).status == "ok"
    names = [path.read_text().strip() for path in Path("/proc").glob("[0-9]*/comm") if path.exists()]
    assert name[-15:] not in names


def test_folder_is_removed_whatever_is_in_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    outside = [found.layers for found in PERMITTED if "namespaces" not in found.layers]
    if not outside:
        pytest.skip("always in namespaces here")
    layers = outside[0]
    monkeypatch.setattr(programs, "capabilities", lambda: fake(layers))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    tmp_path.chmod(0o755)
    source = (
        "import os\nos.mkdir('a'); open('a/f', 'w').close(); os.mkdir('b'); os.mkdir('b/c', 0)\n"
        "for _ in range(1200): os.mkdir('d'); os.chdir('d')"
    )
    assert run_python(source).status == "ok"
    assert list(tmp_path.iterdir()) == []


# Tests decide, and nobody else ----------------------------------------------------------------------------------------


def test_tests_pass_and_fail(here: Guarantees) -> None:
    tested = run_tests(ADD, CHECK, entry_point="add")
    assert (tested.status, tested.error) == ("ok", None)
    assert tested.normal == "def add(a, b):\n    return a + b"
    tested = run_tests("def add(a, b):\n    return 3", CHECK, entry_point="add")
    assert (tested.status, tested.error) == ("failed", "AssertionError")


@pytest.mark.parametrize(
    ("source", "status", "error"),
    [
        ("import os; os._exit(0)", "error", "the program ended before the tests did"),
        ("import sys; sys.exit(0)", "error", "SystemExit: 0"),
        ("def add(a, b):\n    import os; os._exit(0)", "error", "the program ended before the tests did"),
        ("def add(a, b):\n    raise SystemExit(0)", "failed", "RuntimeError: SystemExit: 0"),
        ("def add(a, b):\n    raise StopIteration", "failed", "RuntimeError: StopIteration: "),
        ("def add(a, b):\n    raise KeyError(a)", "failed", "KeyError: '1'"),
        ("class E(Exception): pass\ndef add(a, b):\n    raise E('e')", "failed", "RuntimeError: E: e"),
        # A value that equals everything is not a plain value.
        (
            "class Yes:\n    def __eq__(self, other): return True\ndef add(a, b): return Yes()",
            "failed",
            "TypeError: a value of type 'Yes'; only plain values can be compared",
        ),
        ("class Yes(int):\n    def __eq__(self, other): return True\ndef add(a, b): return Yes(7)", "failed", None),
        # Patched built-ins are the program's own.
        (
            "import builtins\nbuiltins.AssertionError = None\nbuiltins.isinstance = lambda *_: True\ndef add(*_): 0",
            None,
            None,
        ),
        ("import sys, json\njson.dumps = lambda *_: '{\"value\": 3}'\ndef add(a, b): return 0", "failed", None),
        # Neither answers nor exit codes can be written to anybody.
        ("import os\nfor fd in range(64):\n    try: os.write(fd, b'ok' * 99)\n    except OSError: pass", None, None),
        ("import os\nos.write(4, b'\\xff' * 8 + b'{}')\ndef add(a, b): return 3", None, None),
        ("import os\nos.write(4, bytes(7) + b'\\2[]')\ndef add(a, b): return 3", None, None),
        ("import os\nos.close(3)\ndef add(a, b): return 3", None, None),
        ("def sub(a, b): return a", "error", "NameError: name 'add' is not defined"),
        ("add = 3", "failed", "TypeError: 'int' object is not callable"),
        ("def add(a, b:", "error", "SyntaxError"),
        ("1/0", "error", "ZeroDivisionError: division by zero"),
        ("def add(a, b):\n    x = []\n    x.append(x)\n    return x", "failed", "RecursionError"),
        ("def add(a, b): return 'x' * (1 << 23)", None, None),
        ("x = " + "(" * 150 + ")" * 150 + "\ndef add(a, b): return 0", "failed", None),
        ("x = " + "-" * 50_000 + "1", None, None),
    ],
)
def test_success_cannot_be_faked(source: str, status: str | None, error: str | None) -> None:
    tested = run_tests(source, CHECK, entry_point="add", limits=ProgramLimits(seconds=5))
    assert tested.status != "ok"
    assert status is None or tested.status == status
    assert error is None or error in (tested.error or "")


def test_late_programs_fail_even_if_the_test_catches_all() -> None:
    tests = "def check(candidate):\n    try: candidate(1, 2)\n    except: pass\n"
    assert run_tests("def add(a, b):\n    while True: 0", tests, entry_point="add", limits=QUICK).status == "timeout"
    assert run_tests("def add(a, b):\n    import os; os._exit(0)", tests, entry_point="add").status == "error"
    tests = "def check(candidate):\n    while True: pass"
    assert run_tests(ADD, tests, entry_point="add", limits=QUICK).status == "timeout"


def test_the_program_never_sees_the_tests() -> None:
    """It searches all that it can reach, its memory included, for a word of the tests."""
    source = """
import gc, sys
def add(a, b):
    seen = []
    frame = sys._getframe()
    while frame:
        seen.append(repr({**frame.f_globals, **frame.f_locals})); frame = frame.f_back
    seen += [repr(o) for o in gc.get_objects() if isinstance(o, (dict, list, tuple, str))][:20000]
    try:
        for line in open("/proc/self/maps"):
            low, high = (int(part, 16) for part in line.split()[0].split("-"))
            if "rw" in line:
                memory = open("/proc/self/mem", "rb"); memory.seek(low); seen.append(repr(memory.read(high - low)))
    except OSError:
        pass
    return any("xy" + str("zzy") in text for text in seen)
"""
    tests = "def check(candidate):\n    magic = 'xyzzy'\n    assert candidate(1, 2) is False\n"
    assert run_tests(source, tests, entry_point="add").status == "ok"


def test_preamble_is_for_both() -> None:
    tests = "def check(candidate):\n    print('not in the answer')\n    assert candidate(2) == double(2) == f(2)\n"
    preamble = "def double(x):\n    return 2 * x\n"
    tested = run_tests("def f(x):\n    return double(x)", tests, entry_point="f", preamble=preamble)
    assert tested.status == "ok"


@pytest.mark.parametrize(
    "tests",
    [
        "def check(candidate):\n    assert candidate(Node(4).val) == 4",
        "import unittest\nclass Case(unittest.TestCase):\n    def test(self): self.assertEqual(f(4), 4)\n"
        "def check(candidate):\n"
        "    assert unittest.main(__name__, argv=['x'], exit=False).result.wasSuccessful()",
        "import pickle\nclass C: pass\ndef check(candidate):\n    pickle.loads(pickle.dumps(C()))",
    ],
    ids=["a class that names itself", "unittest", "pickle"],
)
def test_tests_are_a_module(here: Guarantees, tests: str) -> None:
    """The library looks up by name where a class was made."""
    preamble = "import dataclasses\n@dataclasses.dataclass\nclass Node:\n    val: int\n    next: 'Node' = None\n"
    tested = run_tests("def f(x): return Node(x).val", tests, entry_point="f", preamble=preamble, unisolated=True)
    assert (tested.status, tested.error) == ("ok", None)


def test_broken_tests_are_not_passed() -> None:
    for tests in ("", "def check(:", "raise SystemExit(0)", "def check(candidate): raise SystemExit(0)", "1/0"):
        assert run_tests(ADD, tests, entry_point="add").status == "failed"
    assert run_tests(ADD, "def check(f):\n    f(object(), 1)", entry_point="add").status == "failed"


# Guarantees -----------------------------------------------------------------------------------------------------------


def test_guarantees_say_what_was_tried() -> None:
    best = capabilities()
    assert best is capabilities()
    assert best == ISOLATED[0]
    if "namespaces" in best.layers:
        assert best.separate_user
        assert best.processes_limited
    for found in PERMITTED:
        if found.layers == ():
            assert found.missing == ("network", "files", "processes")


def supervisor_that(code: str) -> str:
    """Return a bootstrap whose supervisors run this code instead of supervising."""
    return f"""{STUB}
import os, time
from explorl.sandbox import child, fork_server
def supervise(server):
    {code}
child.supervise = supervise
fork_server.main()
"""


def answers(answer: dict[str, str]) -> str:
    return supervisor_that(f"child.send_json(1, {answer!r})")


def test_setup_that_fails_is_an_error(monkeypatch: pytest.MonkeyPatch, bootstrap: Callable[[str], None]) -> None:
    bootstrap("import sys; sys.exit('bye')")
    with pytest.raises(SandboxError, match="no answer from the supervisor, but 'bye"):
        probe(())
    bootstrap(supervisor_that("os.write(2, b'sorry'); os._exit(1)"))
    with pytest.raises(SandboxError, match="no answer from the supervisor, but 'sorry'"):
        probe(())
    bootstrap("printf x >&2; exit 1")
    monkeypatch.setattr(sys, "executable", "/bin/sh")
    capabilities.cache_clear()
    with pytest.raises(SandboxError, match="cannot start Python in the sandbox; namespaces"):
        capabilities()
    capabilities.cache_clear()


def test_supervisor_that_hangs_is_killed(monkeypatch: pytest.MonkeyPatch, bootstrap: Callable[[str], None]) -> None:
    monkeypatch.setattr(programs, "_GRACE", 0.0)
    monkeypatch.setattr(programs, "wall_limit", lambda seconds: seconds)
    request = programs._request("1", limits=QUICK)
    bootstrap(supervisor_that("time.sleep(100)"))
    assert programs._run(request, None, ())["status"] == "timeout"
    first = fork_server_pid()
    eventually(lambda: children(first) == [])
    bootstrap(supervisor_that("os.fork(); time.sleep(100)"))
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(programs._run, programs._request("1", limits=ProgramLimits(seconds=2)), None, ())
        eventually(lambda: fork_server_client._running is not None and len(descendants(fork_server_pid())) == 2)
        group = descendants(fork_server_pid())
        assert running.result()["status"] == "timeout"
    eventually(lambda: not any(map(alive, group)), 10)
    monkeypatch.setattr(fork_client, "_END_TIMEOUT", 0.1)
    bootstrap("import time; time.sleep(100)")
    assert programs._run(request, None, ())["status"] == "timeout"
    assert fork_server_client._running is None


@pytest.mark.parametrize(("number", "status"), [(9, "killed"), (24, "timeout")])
def test_supervisor_that_is_killed(number: int, status: str, bootstrap: Callable[[str], None]) -> None:
    bootstrap(supervisor_that(f"os.kill(os.getpid(), {number})"))
    assert programs._run(programs._request("1", limits=QUICK), None, ())["status"] == status


def test_setup_refusal_names_the_call(bootstrap: Callable[[str], None]) -> None:
    bootstrap(answers({"status": "setup", "error": "unshare: Operation not permitted"}))
    with pytest.raises(SandboxError, match="unshare"):
        probe(("namespaces",))
    bootstrap(answers({"status": "error"}))
    with pytest.raises(SandboxError, match="the probe ended with error"):
        probe(())


def test_linux_only(monkeypatch: pytest.MonkeyPatch) -> None:
    capabilities.cache_clear()
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(OSError, match="the sandbox needs Linux, this is darwin"):
        capabilities()


# The fork server ------------------------------------------------------------------------------------------------------

FOREVER = "ProgramLimits(seconds=100, cpu_seconds=100)"


def with_programs(server: int) -> list[int]:
    """Return the supervisors whose programs run: one that has answered may end at any time."""
    return [pid for pid in children(server) if descendants(pid)]


only_root_sees_descriptors = pytest.mark.skipif(
    os.getuid() != 0, reason="the fork server's descriptors are root's to see"
)


@only_root_sees_descriptors
def test_supervisors_share_no_descriptors(here: Guarantees) -> None:
    def links(pid: int) -> set[str]:
        found = set()
        for path in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(FileNotFoundError):  # closed since it was listed
                found.add(os.readlink(path))
        return found

    run_python("1")
    with ThreadPoolExecutor(2) as pool:
        running = [
            pool.submit(run_python, "import time; time.sleep(100)", limits=ProgramLimits(seconds=99)) for _ in range(2)
        ]
        eventually(lambda: len(with_programs(fork_server_pid())) == 2)
        supervisors = with_programs(fork_server_pid())
        eventually(lambda: not any(link.startswith("socket:") for pid in supervisors for link in links(pid)))
        one, other = map(links, supervisors)
        listed = run_python("import os\nfor n in range(64):\n    try: os.fstat(n); print(n)\n    except OSError: pass")
        assert not any(future.done() for future in running)
        for program in (pid for supervisor in supervisors for pid in descendants(supervisor)):
            with suppress(ProcessLookupError):  # it went with another one
                os.kill(program, signal.SIGKILL)
    assert [future.result().status for future in running] == ["killed", "killed"]
    assert {link for link in one & other if not link.startswith(("/memfd:", "anon_inode:"))} == {"/proc"}
    assert listed.stdout.split() == ["0", "1", "2"]


def test_fork_server_that_was_killed_is_replaced() -> None:
    run_python("1")
    first = fork_server_pid()
    os.kill(first, signal.SIGKILL)
    assert run_python("print(1)").stdout == "1\n"
    assert fork_server_pid() != first
    os.kill(fork_server_pid(), signal.SIGKILL)
    eventually(lambda: not alive(fork_server_pid()))
    assert programs._run_once(programs._request("print(1)", limits=QUICK), None, ())["stdout"] == "1\n"
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(run_python, "import time; time.sleep(1); print(2)")
        eventually(lambda: descendants(fork_server_pid()))
        os.kill(fork_server_pid(), signal.SIGKILL)
        assert running.result().stdout == "2\n"


def test_fork_server_that_dies_again_is_an_error(bootstrap: Callable[[str], None]) -> None:
    bootstrap(supervisor_that("os.kill(server, 9); time.sleep(100)"))
    with pytest.raises(SandboxError, match="no answer"):
        probe(())


def test_forked_process_has_its_own_fork_server() -> None:
    run_python("1")
    first = fork_server_pid()
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(run_python, "import time; time.sleep(0.5); print(1)")
        eventually(lambda: descendants(first))
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            signal.alarm(60)
            try:
                text = f"{fork_server_client._running} {run_python('print(2)').stdout.strip()} {fork_server_pid()}"
                os.write(writing, text.encode())
                fork_server_client.close()
            finally:
                os._exit(0)
        os.close(writing)
        _, code = os.waitpid(child, 0)
        assert running.result().stdout == "1\n"
    text = os.read(reading, 1000).decode().split()
    os.close(reading)
    assert code == 0
    assert text[:2] == ["None", "2"]
    assert int(text[2]) != first
    assert not os.path.exists(f"/proc/{text[2]}")
    assert run_python("print(3)").stdout == "3\n"
    assert fork_server_pid() == first


@pytest.mark.parametrize("source", ["while True: pass", "import time; time.sleep(100)"])
@pytest.mark.parametrize("first", ["training process", "fork server"])
def test_nothing_outlives_the_training_process(here: Guarantees, first: str, source: str) -> None:
    if not here.layers:
        pytest.skip("nothing but limits here")
    count = 4 if "namespaces" in here.layers else 3
    training = script(f"programs._run(programs._request({source!r}, limits={FOREVER}), None, {here.layers})")
    try:
        eventually(lambda: len(descendants(training.pid)) == count or training.poll() is not None)
        processes = descendants(training.pid)
        assert len(processes) == count
        if first == "fork server":
            os.kill(training.pid, signal.SIGSTOP)  # or it would start another
            os.kill(processes[0], signal.SIGKILL)
            eventually(lambda: not any(map(alive, processes)), 10)
    finally:
        training.kill()
        training.communicate()
    eventually(lambda: not any(map(alive, processes)), 10)


def test_exit_leaves_nothing() -> None:
    source = """
pid = lambda: programs.fork_server_client._running[0].pid
print(run_python("print(1)").stdout, os.path.exists(f"/proc/{pid()}"))
last = lambda pid=pid(): print(programs.fork_server_client._running, os.path.exists(f"/proc/{pid}"))
"""
    with script(source) as training:
        out, err = training.communicate(timeout=60)
    assert (training.returncode, err) == (0, "")
    assert out.split() == ["1", "True", "None", "False"]


@only_root_sees_descriptors
def test_many_programs_leave_nothing() -> None:
    run_python("1")
    eventually(lambda: children(fork_server_pid()) == [])
    before = sorted(os.listdir("/proc/self/fd"))
    server_before = sorted(os.listdir(f"/proc/{fork_server_pid()}/fd"))
    for _ in range(200):
        assert run_python("1").status == "ok"
    assert sorted(os.listdir("/proc/self/fd")) == before
    eventually(lambda: children(fork_server_pid()) == [])
    assert sorted(os.listdir(f"/proc/{fork_server_pid()}/fd")) == server_before
    assert [pid for pid in children(os.getpid()) if not alive(pid)] == []


# Pieces ---------------------------------------------------------------------------------------------------------------

plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
    | st.complex_numbers(allow_nan=False) | st.builds(range, st.integers(-9, 9)),
    lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(st.text() | st.integers(), inner)
    | st.sets(st.integers()) | st.frozensets(st.text() | st.tuples(st.integers())),
)  # fmt: skip


@settings(max_examples=50, deadline=None)
@given(plain | st.integers(20_000, 20_010).map(lambda n: 1 << n))
def test_plain_values_come_back(value: object) -> None:
    back = decode(json.loads(json.dumps(encode(value))))
    assert back == value
    assert type(back) is type(value)


@settings(max_examples=50, deadline=None)
@given(st.recursive(st.none() | st.integers() | st.text(), lambda x: st.lists(x) | st.dictionaries(st.text(), x)))
@example({"int": "x"})
@example({"dict": [[[], 1]]})
@example({"set": [[[]]]})
@example({"range": [1, 2, 0]})
@example({"tuple": 3})
@example({})
def test_decoding_gives_plain_values_or_raises(data: object) -> None:
    try:
        value = decode(data)
    except (ValueError, TypeError):
        return
    assert type(value).__module__ == "builtins"


def test_subclasses_become_plain() -> None:
    class Five(int):
        pass

    assert type(decode(encode(Five(5)))) is int
    assert decode(encode(bytearray(b"ab"))) == bytearray(b"ab")
    with pytest.raises(TypeError, match="of type 'object'"):
        encode(object())


@given(st.text(), st.text())
def test_exceptions_are_built_in_and_steer_nothing(name: str, text: str) -> None:
    for kind in (name, "ValueError", "StopIteration", "SystemExit", "UnicodeDecodeError", "Warning", "print"):
        error = to_exception({"error": kind, "text": text})
        assert isinstance(error, Exception)
        assert not isinstance(error, StopIteration)
    assert type(to_exception({"error": "ValueError", "text": text})) is ValueError


def test_errors_in_errors() -> None:
    class Bad(Exception):
        def __str__(self) -> str:
            raise ValueError

    assert describe_error(Bad()) == "Bad"
    assert describe_error(ValueError("x")) == "ValueError: x"


def test_frames() -> None:
    reading, writing = os.pipe()
    send(writing, b"abc")
    send_json(writing, {"a": [1]})
    send(writing, bytes(100))
    assert receive(reading) == b"abc"
    assert receive_json(reading) == {"a": [1]}
    with pytest.raises(ValueError, match="100 bytes; 99 are allowed"):
        receive(reading, 99)
    os.read(reading, 100)
    os.write(writing, b"short")
    os.close(writing)
    with pytest.raises(EOFError):
        receive(reading)
    os.close(reading)


@pytest.mark.parametrize(
    ("code", "late", "status"),
    [
        *[(0, False, "ok"), (1, False, "error"), (86, False, "memory"), (-9, True, "timeout"), (0, True, "timeout")],
        *[(-11, False, "killed"), (139, False, "killed"), (-24, False, "timeout"), (152, False, "timeout")],
    ],
)
def test_statuses(code: int, late: bool, status: str) -> None:
    assert _status(code, late) == status


def test_normal_form() -> None:
    one = 'import math\ndef f( x ):\n    """Doc."""\n    # why\n    return (x+1)\n'
    assert normal_form(one) == "def f(x):\n    return x + 1"
    assert normal_form('class A:\n    "doc"\n') == "class A:\n    pass"
    assert normal_form("def f(:") is None
    assert normal_form("\0") is None


def test_python_finds_its_library() -> None:
    paths = python_paths()
    assert any(os.__file__.startswith(path) for path in paths)
    assert all(os.path.isdir(path) for path in paths)
