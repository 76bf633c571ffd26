"""Run untrusted Python in a separate process, with limits and isolated from network, files and other processes.

How well it is isolated depends on the kernel and on what the system permits: `capabilities` tries it out, and
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
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from explorl.core.errors import ExplorlError
from explorl.core.text import clean
from explorl.sandbox.codec import STARTED
from explorl.sandbox.fork_client import ForkServerDied, fork_server_client
from explorl.sandbox.scratch import working_folder
from explorl.sandbox.usage import wall_limit

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T")
ProgramStatus = Literal["ok", "error", "failed", "timeout", "memory", "killed"]
Layers = tuple[str, ...]

LAYER_SETS: tuple[Layers, ...] = (("namespaces", "seccomp"), ("landlock", "seccomp"), ("seccomp",), ("landlock",), ())
"""Combinations of isolation layers, the strongest first; resource limits apply in addition."""
UNISOLATED = "EXPLORL_UNISOLATED"
"""The environment variable that permits to run programs without isolation, if it is 1."""
_GRACE = 5.0
"""Seconds beyond the program's limit that its supervisor has for starting and ending."""


def check_limits(limits: DataclassInstance) -> None:
    """Raise ValueError for a limit that is not a positive number, or not a whole one if its default is."""
    for field in fields(limits):
        value = getattr(limits, field.name)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if is_number and not 0 < value < math.inf:
            raise ValueError(f"{field.name}={value!r}: give a positive number, like {field.default!r}")
        if not is_number or not isinstance(value, int | type(field.default)):
            kind = "a whole number" if isinstance(field.default, int) else "a number of seconds"
            raise ValueError(f"{field.name}={value!r}: give {kind}, like {field.default!r}")


@dataclass(frozen=True)
class ProgramLimits:
    """The limits of a program with all its processes; ``memory``, ``file_bytes`` and ``open_files`` are per process."""

    seconds: float = 10.0
    """Time until it must have ended. Time spent waiting for a busy processor does not count, up to four times the limit
    plus two seconds of wall time."""
    cpu_seconds: float = 10.0
    """Processor time of all its processes and its tests together."""
    memory: int = 512 << 20
    """Bytes of address space."""
    processes: int = 8
    """Processes and threads, including the first."""
    file_bytes: int = 16 << 20
    """Size of one file; also applies to standard output."""
    disk: int = 32 << 20
    """Bytes of all files together. In namespaces writing fails beyond it. Elsewhere it includes the files of the tests
    and is checked 20 times a second, and a program beyond it is killed."""
    open_files: int = 64
    output: int = 64 << 10
    """Bytes that are kept of standard output and of standard error."""

    def __post_init__(self) -> None:
        check_limits(self)


DEFAULTS = ProgramLimits()


@dataclass(frozen=True)
class ProgramResult:
    """The result of a program."""

    status: ProgramStatus
    """"ok": exit status 0, which any program can produce; "error": another exit status; "timeout", "memory": it
    exceeded a limit; "killed": by a signal, or for writing too much to the disk, which `stderr` then says."""
    stdout: str = ""
    stderr: str = ""
    """Standard output and error are made printable by `clean`."""
    seconds: float = 0.0
    """On the clock."""


@dataclass(frozen=True)
class ProgramTestResult:
    """The result of testing a program."""

    status: ProgramStatus
    """"ok": all tests ran and passed, which only the tests' process can report; "failed": a test raised; "error": the
    program raised before the tests, ended during them, or wrote too much; "timeout"; "killed": the tests crashed.
    """
    error: str | None = None
    normal: str | None = None
    """The source without comments, docstrings, imports and formatting; None if it is not valid Python."""
    seconds: float = 0.0
    """On the clock."""


@dataclass(frozen=True)
class Guarantees:
    """What is isolated on this machine, as found by a program that tried to break out."""

    network_isolated: bool
    """A program cannot open sockets or reach those of the host."""
    filesystem_isolated: bool
    """A program cannot read, write or lock the host's files, except for reading Python's own library."""
    processes_isolated: bool
    """A program cannot signal, trace, slow down or outlive other processes, or share memory with them."""
    separate_user: bool
    """Programs do not run as root."""
    layers: Layers
    """The mechanisms in use, in addition to limits."""
    processes_limited: bool = False
    """A program cannot have more processes and threads than `ProgramLimits` permits."""

    @property
    def missing(self) -> tuple[str, ...]:
        """Those of "network", "files" and "processes" that are not isolated. If there are any, programs are not run."""
        isolated = (self.network_isolated, self.filesystem_isolated, self.processes_isolated)
        return tuple(name for name, is_so in zip(("network", "files", "processes"), isolated, strict=True) if not is_so)


def run_python(
    source: str, *, stdin: str = "", limits: ProgramLimits = DEFAULTS, unisolated: bool = False
) -> ProgramResult:
    """Run a program, which has only the standard library, in an empty temporary folder.

    Raise SandboxError if it would not be isolated, unless ``unisolated`` is true or EXPLORL_UNISOLATED=1.
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
    """Call `run_python` for each program, several at a time."""

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

    Program and tests run in two processes. The function gets copies of its arguments, and its value is returned as a
    plain value (numbers, text, bytes, None, and lists, tuples, sets and dicts of them). The program has no access to
    the tests or the values they expect. ``preamble`` runs before both. Both are isolated as in `run_python`, also from
    each other; the tests can start threads but no processes.
    """
    request = _request(source, limits=limits, entry_point=entry_point, preamble=preamble)
    answer = _run(request, tests, isolating_layers(unisolated))
    error, normal = (None if answer.get(name) is None else clean(answer[name]) for name in ("error", "normal"))
    return ProgramTestResult(answer["status"], error, normal, answer.get("seconds", 0.0))


def in_threads(function: Callable[..., T], *columns: Sequence[Any], workers: int | None = None) -> list[T]:
    """Call ``function`` with each row of the columns in threads, one per core by default; return the values."""
    if workers is not None and workers < 1:
        raise ValueError(f"workers={workers}: give a count like 4, or None for one per core")
    with ThreadPoolExecutor(workers or len(os.sched_getaffinity(0))) as pool:
        return list(pool.map(function, *columns))


@lru_cache(maxsize=1)
def capabilities() -> Guarantees:
    """Return what the sandbox guarantees on this machine, tried out once per process.

    Uses the first of `LAYER_SETS` that isolates a program, or else the one that leaves least open.
    """
    if sys.platform != "linux":
        raise OSError(f"the sandbox needs Linux, this is {sys.platform}; run it in a Linux container or machine")
    tried: list[Guarantees] = []
    refused = []
    for layers in LAYER_SETS:
        try:
            tried.append(probe(layers))
        except SandboxError as error:
            refused.append(f"{'+'.join(layers) or 'limits alone'}: {error}")
        else:
            if not tried[-1].missing:
                break
    if not tried:
        raise SandboxError(f"cannot start Python in the sandbox; {'; '.join(refused)}")
    return min(tried, key=lambda guarantees: len(guarantees.missing))


def probe(layers: Layers) -> Guarantees:
    """Try out what these layers guarantee; raise SandboxError if the system does not permit them."""
    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as host:
        os.chmod(folder, 0o711)  # so that the folder's own permissions do not stop the program
        secret, path = os.path.join(folder, "secret"), os.path.join(folder, "socket")
        with open(secret, "w"):
            os.chmod(secret, 0o666)
        with contextlib.suppress(OSError):  # the path is too long, or the file system has no sockets
            host.bind(path)
            os.chmod(path, 0o666)
        probe_input = {"file": secret, "socket": path, "pid": os.getpid(), "cores": os.sched_getaffinity(0)}
        probe_input["nice"] = os.getpriority(os.PRIO_PROCESS, 0)
        source = f"HOST = {probe_input!r}\nPROCESSES = {DEFAULTS.processes}\n{_PROBE}"
        answer = _run(_request(source, limits=DEFAULTS), None, layers)
    if answer["status"] != "ok":
        raise SandboxError(f"the probe ended with {answer['status']}: {clean(answer.get('stderr', ''))[-300:]}")
    return Guarantees(**json.loads(answer["stdout"]), layers=layers)


class SandboxError(ExplorlError, RuntimeError):
    """The sandbox could not be set up, or would not isolate. Not an error of the program."""


_PROBE = """
import ctypes, fcntl, json, os, socket, threading

libc = ctypes.CDLL(None, use_errno=True)
file, pid = HOST["file"], HOST["pid"]
if (os.getpid(), os.getppid()) == (2, 1) and pid <= 2:
    pid = 1 << 22  # in a namespace of processes this number is one of ours: try an unused one

def refused(action, *args):
    try:
        return action(*args) in (-1, False)
    except (OSError, KeyError):  # KeyError: an unknown machine
        return True

def connect(family, kind, address):
    socket.socket(family, kind).connect(address)

def send():
    for end in socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM):
        end.sendto(b"x", HOST["socket"])

def set_signal_owner():  # without O_ASYNC: both together would send signals
    reading, writing = os.pipe()
    fcntl.fcntl(reading, fcntl.F_SETOWN, pid)

def enable_signals():
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

def read_locks():
    with open(os.__file__) as library:
        fcntl.fcntl(library, fcntl.F_GETLK, bytes(32))

def fork():
    os.fork() or os._exit(0)

def threads_started(count):
    release = threading.Event()
    started = []
    threading.stack_size(64 << 10)
    for _ in range(count):
        thread = threading.Thread(target=release.wait)
        try:
            thread.start()
        except RuntimeError:
            break
        started.append(thread)
    release.set()
    for thread in started:
        thread.join()
    return len(started)

name = ctypes.create_string_buffer(b"user.explorl")
print(json.dumps({
    "network_isolated": all([
        refused(connect, socket.AF_INET, socket.SOCK_DGRAM, ("192.0.2.1", 9)),
        refused(connect, socket.AF_UNIX, socket.SOCK_DGRAM, HOST["socket"]),
        refused(send),
    ]),
    "filesystem_isolated": all([
        refused(open, file), refused(open, file, "r+"), refused(os.chmod, file, 0o600), refused(os.utime, file),
        refused(os.truncate, file, 0), refused(os.rename, file, file + "2"), refused(os.link, file, "mine"),
        refused(os.setxattr, file, "user.explorl", b"x"),
        refused(lambda: libc.syscall(463, -100, file.encode(), 0, name, ctypes.create_string_buffer(16), 16)),
        refused(lambda: libc.syscall(469, -100, file.encode(), ctypes.create_string_buffer(24), 24, 0)),
        refused(open, "/etc/passwd"), refused(os.listdir, "/proc"),
        refused(lock, fcntl.flock), refused(read_locks),
    ]),
    "processes_isolated": all([
        refused(os.kill, pid, 0),
        refused(lambda: libc.ptrace(0x4206, pid, 0, 0)),  # PTRACE_SEIZE, which does not stop the process
        refused(open, f"/proc/{pid}/mem", "r+b"),
        refused(set_signal_owner), refused(enable_signals),
        refused(lambda: libc.setpriority(0, pid, HOST["nice"])),
        refused(os.sched_setaffinity, pid, HOST["cores"]),
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
    """Return the layers for programs; raise SandboxError if they do not isolate and that is not permitted."""
    guarantees = capabilities()
    if guarantees.missing and not unisolated and os.environ.get(UNISOLATED) != "1":
        using = " and ".join(guarantees.layers) or "limits alone"
        raise SandboxError(
            f"programs would not be isolated from this machine's {' and '.join(guarantees.missing)} ({using}); permit "
            "unprivileged user namespaces (in a container: CAP_SYS_ADMIN, or no seccomp profile), or use a "
            "kernel with Landlock and seccomp (Linux 5.13), see docs/security.md; on a disposable machine, set "
            f"unisolated=True, or {UNISOLATED}=1 for the whole process"
        )
    return guarantees.layers


def _request(
    source: str, *, limits: ProgramLimits, stdin: str = "", entry_point: str | None = None, preamble: str = ""
) -> dict[str, Any]:
    program = {"source": source, "stdin": stdin, "entry_point": entry_point, "preamble": preamble}
    return {**program, "limits": asdict(limits)}


def _run(request: dict[str, Any], tests: str | None, layers: Layers) -> dict[str, Any]:
    """Run a request in a supervisor; try again once if the fork server was killed."""
    try:
        return _run_once(request, tests, layers)
    except ForkServerDied:
        pass
    try:
        return _run_once(request, tests, layers)
    except ForkServerDied as error:
        raise SandboxError(f"no answer from the supervisor, but {str(error)!r}") from None


def _run_once(request: dict[str, Any], tests: str | None, layers: Layers) -> dict[str, Any]:
    """Send a new supervisor the request and the tests, if any, and return its answer."""
    with contextlib.ExitStack() as stack:
        folder = None if "namespaces" in layers else stack.enter_context(working_folder())
        messages = [marshal.dumps({**request, "layers": layers, "folder": folder})]
        if tests is not None:
            messages.append(tests.encode(errors="surrogatepass"))
        seconds = wall_limit(request["limits"]["seconds"]) + _GRACE
        try:
            code, answer, errors = fork_server_client.run_program(messages, seconds)
        except TimeoutError:
            return {"status": "timeout"}
    if code < 0:  # a test, or computing the normal form, has crashed it
        return {"status": "timeout" if code == -signal.SIGXCPU else "killed"}
    try:
        result: dict[str, Any] = json.loads(answer)
    except ValueError:
        if errors.startswith(STARTED):
            return {"status": "killed", "error": "the tests' process has ended"}
        raise SandboxError(
            f"no answer from the supervisor, but {clean(errors.decode(errors='replace'))[-500:]!r}"
        ) from None
    if result["status"] == "setup":
        raise SandboxError(clean(result["error"]))
    return result
