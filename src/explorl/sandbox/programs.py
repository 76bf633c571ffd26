"""Run Python that nobody has read: in a process of its own, with limits, away from network, files and other processes.

How far that goes depends on the kernel and on what the system permits; `capabilities` tries it out and says it, and
docs/security.md explains it. Linux only.
"""

from __future__ import annotations

import contextlib
import json
import marshal
import math
import os
import signal
import socket
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields
from functools import lru_cache
from typing import Any, Literal, TypeVar

from explorl.core.text import clean
from explorl.sandbox.codec import BEGUN
from explorl.sandbox.fork_client import ForkServerDied, fork_server_client
from explorl.sandbox.scratch import working_folder
from explorl.sandbox.usage import longest

T = TypeVar("T")
Status = Literal["ok", "error", "failed", "timeout", "memory", "killed"]
Layers = tuple[str, ...]

LAYER_SETS: tuple[Layers, ...] = (("namespaces", "seccomp"), ("landlock", "seccomp"), ("seccomp",), ("landlock",), ())
"""What to shut a program in with, the strongest first; limits come always on top."""
UNISOLATED = "EXPLORL_UNISOLATED"
"""The environment variable that lets programs run where they are not isolated, if it is 1."""
_GRACE = 5.0
"""Seconds beyond a program's own that its keeper has for starting and ending."""


@dataclass(frozen=True)
class ProgramLimits:
    """What a program may use, with all its processes; ``memory``, ``file_bytes`` and ``open_files`` each of them."""

    seconds: float = 10.0
    """Time until it must have ended. What it waits for a processor that others use does not count, up to four times as
    long and two seconds on the clock."""
    cpu_seconds: float = 10.0
    """Processor time of all its processes together, and of its tests."""
    memory: int = 512 << 20
    """Bytes of address space."""
    processes: int = 8
    """Processes and threads, the first included."""
    file_bytes: int = 16 << 20
    """Size of one file, standard output included."""
    disk: int = 32 << 20
    """Bytes of all files together, with those of its tests where there are no namespaces. There it is looked at 20
    times a second, and ends what has more; in namespaces nothing more can be written."""
    open_files: int = 64
    output: int = 64 << 10
    """Bytes that are kept of standard output, and of standard error."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not 0 < value < math.inf:
                raise ValueError(f"{field.name}={value!r}: give a positive number, like {field.default!r}")
            if isinstance(field.default, int) and not isinstance(value, int):
                raise ValueError(f"{field.name}={value!r}: give a whole number, like {field.default!r}")


DEFAULTS = ProgramLimits()


@dataclass(frozen=True)
class ProgramResult:
    """What became of a program."""

    status: Status
    """"ok": it ended with exit status 0, which any program can bring about; "error": with another one; "timeout",
    "memory": beyond a limit; "killed": by a signal, or for too much on the disk, which `stderr` says."""
    stdout: str = ""
    stderr: str = ""
    """Both `clean`."""
    seconds: float = 0.0
    """On the clock."""


@dataclass(frozen=True)
class ProgramTestResult:
    """What tests said of a program."""

    status: Status
    """"ok": all tests ran and passed, which only the tests themselves can say; "failed": a test raised; "error": the
    program raised before them, ended during them, or wrote too much; "timeout"; "killed": the tests themselves crashed.
    """
    error: str | None = None
    normal: str | None = None
    """The source without comments, docstrings, imports and ways of writing; None if it is no Python."""
    seconds: float = 0.0
    """On the clock."""


@dataclass(frozen=True)
class Guarantees:
    """What holds on this machine, as a program found that tried to get out."""

    network_isolated: bool
    """No socket can be opened, nor one of the host's be reached."""
    filesystem_isolated: bool
    """Nothing of the host's files can be read, written or locked but Python's own library, which can be read."""
    processes_isolated: bool
    """No other process can be signalled, traced, slowed down or outlived, and no memory be shared."""
    separate_user: bool
    """Root does not run programs as root."""
    layers: Layers
    """The mechanisms in use, beside limits."""
    processes_limited: bool = False
    """There cannot be more processes and threads than `ProgramLimits` say."""

    @property
    def missing(self) -> tuple[str, ...]:
        """Which of "network", "files" and "processes" are not isolated. Where there is one, programs are not run."""
        isolated = (self.network_isolated, self.filesystem_isolated, self.processes_isolated)
        return tuple(name for name, is_so in zip(("network", "files", "processes"), isolated, strict=True) if not is_so)


def run_python(
    source: str, *, stdin: str = "", limits: ProgramLimits = DEFAULTS, unisolated: bool = False
) -> ProgramResult:
    """Run a program with nothing but the standard library, in an empty folder that is gone afterwards.

    SandboxError where it would not be isolated, unless ``unisolated`` is true or EXPLORL_UNISOLATED=1.
    """
    answer = _run(_request(source, stdin=stdin, limits=limits), None, isolating_layers(unisolated))
    out, err = (clean(answer.get(name, "")) for name in ("stdout", "stderr"))
    return ProgramResult(answer["status"], out, err, answer.get("seconds", 0.0))


def run_many(
    sources: Sequence[str],
    *,
    stdin: str = "",
    limits: ProgramLimits = DEFAULTS,
    workers: int | None = None,
    unisolated: bool = False,
) -> list[ProgramResult]:
    """`run_python` for each program, several at a time."""

    def run(source: str) -> ProgramResult:
        return run_python(source, stdin=stdin, limits=limits, unisolated=unisolated)

    return in_threads(run, sources, workers=workers)


def run_tests(
    source: str,
    tests: str,
    *,
    entry_point: str,
    preamble: str = "",
    limits: ProgramLimits = DEFAULTS,
    unisolated: bool = False,
) -> ProgramTestResult:
    """Test a program's function: ``tests`` defines ``check(candidate)``, which raises if the function is wrong.

    Program and tests run in two processes. The function gets its arguments as copies, and what it returns comes back as
    a plain value (numbers, text, bytes, None, and lists, tuples, sets and dicts of them). The program sees neither the
    tests nor what they expect. ``preamble`` is defined for both, before them. Both are isolated as in `run_python`,
    also from each other; the tests can start threads but no processes.
    """
    request = _request(source, limits=limits, entry_point=entry_point, preamble=preamble)
    answer = _run(request, tests, isolating_layers(unisolated))
    error, normal = (None if answer.get(name) is None else clean(answer[name]) for name in ("error", "normal"))
    return ProgramTestResult(answer["status"], error, normal, answer.get("seconds", 0.0))


def in_threads(function: Callable[..., T], *columns: Sequence[Any], workers: int | None = None) -> list[T]:
    """``function`` of each row of the columns, in their order; one worker per core unless told."""
    if workers is not None and workers < 1:
        raise ValueError(f"workers={workers}: give a count like 4, or None for one per core")
    with ThreadPoolExecutor(workers or len(os.sched_getaffinity(0))) as pool:
        return list(pool.map(function, *columns))


@lru_cache(maxsize=1)
def capabilities() -> Guarantees:
    """What the sandbox guarantees here, tried out once per process.

    The mechanisms are the first that isolate a program, or else those that leave least open.
    """
    if sys.platform != "linux":
        raise OSError(f"the sandbox needs Linux, this is {sys.platform}; run it in a Linux container or machine")
    found: list[Guarantees] = []
    refused = []
    for layers in LAYER_SETS:
        try:
            found.append(probe(layers))
        except SandboxError as error:
            refused.append(f"{'+'.join(layers) or 'limits alone'}: {error}")
        else:
            if not found[-1].missing:
                break
    if not found:
        raise SandboxError(f"no Python can be started in a sandbox; {'; '.join(refused)}")
    return min(found, key=lambda guarantees: len(guarantees.missing))


def probe(layers: Layers) -> Guarantees:
    """What these mechanisms guarantee, tried out now; SandboxError where the system does not permit them."""
    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as host:
        os.chmod(folder, 0o711)  # what keeps a program away shall not be this
        secret, path = os.path.join(folder, "secret"), os.path.join(folder, "socket")
        with open(secret, "w"):
            os.chmod(secret, 0o666)
        with contextlib.suppress(OSError):  # too long a path, or a file system without sockets
            host.bind(path)
            os.chmod(path, 0o666)
        given = {"file": secret, "socket": path, "pid": os.getpid(), "cores": os.sched_getaffinity(0)}
        given["nice"] = os.getpriority(os.PRIO_PROCESS, 0)
        source = f"GIVEN = {given!r}\nPROCESSES = {DEFAULTS.processes}\n{_PROBE}"
        answer = _run(_request(source, limits=DEFAULTS), None, layers)
    if answer["status"] != "ok":
        raise SandboxError(f"the probe ended with {answer['status']}: {clean(answer.get('stderr', ''))[-300:]}")
    return Guarantees(**json.loads(answer["stdout"]), layers=layers)


class SandboxError(RuntimeError):
    """The sandbox itself could not be set up, or would not isolate; says nothing of the program."""


_PROBE = """
import ctypes, fcntl, json, os, socket, threading

libc = ctypes.CDLL(None, use_errno=True)
file, pid = GIVEN["file"], GIVEN["pid"]
if (os.getpid(), os.getppid()) == (2, 1) and pid <= 2:
    pid = 1 << 22  # in a namespace of processes this number is one of ours: try one that nobody has

def refused(action, *args):
    try:
        return action(*args) in (-1, False)
    except (OSError, KeyError):  # KeyError: a machine that is not known here
        return True

def connect(family, kind, address):
    socket.socket(family, kind).connect(address)

def send():
    for end in socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM):
        end.sendto(b"x", GIVEN["socket"])

def give_signals():  # only half of it at a time: both together would kill
    reading, writing = os.pipe()
    fcntl.fcntl(reading, fcntl.F_SETOWN, pid)

def wait_for_signals():
    reading, writing = os.pipe()
    fcntl.fcntl(reading, fcntl.F_SETFL, os.O_ASYNC)

def set_disk_priority():
    get, put = {"x86_64": (252, 251), "aarch64": (31, 30)}[os.uname().machine]
    now = libc.syscall(get, 1, pid)
    return now if now == -1 else libc.syscall(put, 1, pid, now)

def share_memory():
    segment = libc.shmget(0, 4096, 0o1600)
    return segment if segment == -1 else libc.shmctl(segment, 0, None)

def lock(kind):
    with open(os.__file__) as library:
        kind(library, fcntl.LOCK_EX | fcntl.LOCK_NB)

def look_at_locks():
    with open(os.__file__) as library:
        fcntl.fcntl(library, fcntl.F_GETLK, bytes(32))

def fork():
    os.fork() or os._exit(0)

def threads_started(count):
    go_on = threading.Event()
    started = []
    threading.stack_size(64 << 10)
    for _ in range(count):
        thread = threading.Thread(target=go_on.wait)
        try:
            thread.start()
        except RuntimeError:
            break
        started.append(thread)
    go_on.set()
    for thread in started:
        thread.join()
    return len(started)

name = ctypes.create_string_buffer(b"user.explorl")
print(json.dumps({
    "network_isolated": all([
        refused(connect, socket.AF_INET, socket.SOCK_DGRAM, ("192.0.2.1", 9)),
        refused(connect, socket.AF_UNIX, socket.SOCK_DGRAM, GIVEN["socket"]),
        refused(send),
    ]),
    "filesystem_isolated": all([
        refused(open, file), refused(open, file, "r+"), refused(os.chmod, file, 0o600), refused(os.utime, file),
        refused(os.truncate, file, 0), refused(os.rename, file, file + "2"), refused(os.link, file, "mine"),
        refused(os.setxattr, file, "user.explorl", b"x"),
        refused(lambda: libc.syscall(463, -100, file.encode(), 0, name, ctypes.create_string_buffer(16), 16)),
        refused(lambda: libc.syscall(469, -100, file.encode(), ctypes.create_string_buffer(24), 24, 0)),
        refused(open, "/etc/passwd"), refused(os.listdir, "/proc"),
        refused(lock, fcntl.flock), refused(look_at_locks),
    ]),
    "processes_isolated": all([
        refused(os.kill, pid, 0),
        refused(lambda: libc.ptrace(0x4206, pid, 0, 0)),  # PTRACE_SEIZE, which does not stop the process
        refused(open, f"/proc/{pid}/mem", "r+b"),
        refused(give_signals), refused(wait_for_signals),
        refused(lambda: libc.setpriority(0, pid, GIVEN["nice"])),
        refused(os.sched_setaffinity, pid, GIVEN["cores"]),
        refused(set_disk_priority),
        refused(lambda: libc.prlimit(pid, 0, None, ctypes.create_string_buffer(16))),
        refused(share_memory),
        refused(fork) or os.getppid() == 1,
    ]),
    "separate_user": os.getuid() != 0,
    "processes_limited": threads_started(3 * PROCESSES) < PROCESSES,
}))
"""


def isolating_layers(unisolated: bool) -> Layers:
    """The mechanisms to run a program in; SandboxError where they do not isolate it and nobody has allowed that."""
    here = capabilities()
    if here.missing and not unisolated and os.environ.get(UNISOLATED) != "1":
        using = " and ".join(here.layers) or "limits alone"
        raise SandboxError(
            f"programs would not be isolated from this machine's {' and '.join(here.missing)} ({using}); permit "
            "unprivileged user namespaces (in a container: CAP_SYS_ADMIN, or no seccomp profile of its own), or use a "
            "kernel with Landlock and seccomp (Linux 5.13), see docs/security.md; where nothing is of value, say "
            f"unisolated=True, or {UNISOLATED}=1 for the whole process"
        )
    return here.layers


def _request(
    source: str, *, limits: ProgramLimits, stdin: str = "", entry_point: str | None = None, preamble: str = ""
) -> dict[str, Any]:
    what = {"source": source, "stdin": stdin, "entry_point": entry_point, "preamble": preamble}
    return {**what, "limits": asdict(limits)}


def _run(request: dict[str, Any], tests: str | None, layers: Layers) -> dict[str, Any]:
    """Have a keeper run the request; once more, if the nursery was killed meanwhile."""
    try:
        return _run_once(request, tests, layers)
    except ForkServerDied:
        pass
    try:
        return _run_once(request, tests, layers)
    except ForkServerDied as error:
        raise SandboxError(f"no answer, but {str(error)!r}") from None


def _run_once(request: dict[str, Any], tests: str | None, layers: Layers) -> dict[str, Any]:
    """Send a new keeper the request and perhaps the tests, and take its answer."""
    with contextlib.ExitStack() as stack:
        folder = None if "namespaces" in layers else stack.enter_context(working_folder())
        frames = [marshal.dumps({**request, "layers": layers, "folder": folder})]
        if tests is not None:
            frames.append(tests.encode(errors="surrogatepass"))
        message = b"".join(len(frame).to_bytes(8, "big") + frame for frame in frames)
        try:
            code, answer, errors = fork_server_client.run_program(
                message, longest(request["limits"]["seconds"]) + _GRACE
            )
        except TimeoutError:
            return {"status": "timeout"}
    if code < 0:  # a test, or the source's normal form, was too much for it
        return {"status": "timeout" if code == -signal.SIGXCPU else "killed"}
    try:
        result: dict[str, Any] = json.loads(answer)
    except ValueError:
        if errors.startswith(BEGUN):
            return {"status": "killed", "error": "the tests' process has ended"}
        raise SandboxError(f"no answer, but {clean(errors.decode(errors='replace'))[-500:]!r}") from None
    if result["status"] == "setup":
        raise SandboxError(clean(result["error"]))
    return result
