"""Run Python that nobody has read: in a process of its own, with limits, away from network, files and other processes.

How far that goes depends on the kernel and on what the system permits; `capabilities` tries it out and says it, and
docs/security.md explains it. Linux only.
"""

from __future__ import annotations

import ast
import json
import marshal
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields
from functools import lru_cache
from typing import Any, Literal, TypeVar

from explorl.tasks.sandbox_nursery import Gone, nursery

T = TypeVar("T")
Status = Literal["ok", "error", "failed", "timeout", "memory", "killed"]
Layers = tuple[str, ...]

_LAYERS: tuple[Layers, ...] = (("namespaces", "seccomp"), ("landlock", "seccomp"), ("seccomp",), ("landlock",), ())
"""What to shut a program in with, the strongest first; limits come always on top."""
_GRACE = 5.0
"""Seconds beyond a program's own that its keeper has for starting and ending."""


@dataclass(frozen=True)
class Limits:
    """What a program may use. All but ``seconds``, ``processes`` and ``disk`` hold for each of its processes."""

    seconds: float = 10.0
    """Wall-clock time."""
    cpu_seconds: int = 10
    memory: int = 512 << 20
    """Bytes of address space."""
    processes: int = 8
    """Processes and threads, the first included."""
    file_bytes: int = 16 << 20
    """Size of one file, standard output included."""
    disk: int = 32 << 20
    """Bytes of all files together; only with namespaces."""
    open_files: int = 64
    output: int = 64 << 10
    """Bytes that are kept of standard output, and of standard error."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not value > 0:
                raise ValueError(f"{field.name}={value!r}: give a positive number, like {field.default!r}")


DEFAULTS = Limits()


@dataclass(frozen=True)
class Outcome:
    """What became of a program."""

    status: Status
    """"ok": it ended with exit status 0, which any program can bring about; "error": with another one; "timeout",
    "memory": beyond a limit; "killed": by a signal."""
    stdout: str = ""
    stderr: str = ""
    seconds: float = 0.0


@dataclass(frozen=True)
class Tested:
    """What tests said of a program."""

    status: Status
    """"ok": all tests ran and passed, which only the tests themselves can say; "failed": a test raised; "error": the
    program raised before them, or ended during them; "timeout"; "killed": the tests themselves crashed."""
    error: str | None = None
    normal: str | None = None
    """The source without comments, docstrings, imports and ways of writing; None if it is no Python."""
    seconds: float = 0.0


@dataclass(frozen=True)
class Guarantees:
    """What holds on this machine, as a program found that tried to get out."""

    network_isolated: bool
    """No socket can be opened."""
    filesystem_isolated: bool
    """Nothing of the host's files can be read or written but Python's own library, which can be read."""
    processes_isolated: bool
    """No other process can be signalled, traced or outlived."""
    separate_user: bool
    """Root does not run programs as root."""
    layers: Layers
    """The mechanisms in use, beside limits."""


def run_python(source: str, *, stdin: str = "", limits: Limits = DEFAULTS) -> Outcome:
    """Run a program with nothing but the standard library, in an empty folder that is gone afterwards."""
    answer = _run(_request(source, stdin=stdin, limits=limits), None, capabilities().layers)
    return Outcome(answer["status"], answer.get("stdout", ""), answer.get("stderr", ""), answer.get("seconds", 0.0))


def run_many(
    sources: Sequence[str], *, stdin: str = "", limits: Limits = DEFAULTS, workers: int | None = None
) -> list[Outcome]:
    """`run_python` for each program, several at a time."""
    return in_threads(lambda source: run_python(source, stdin=stdin, limits=limits), sources, workers=workers)


def run_tests(source: str, tests: str, *, entry_point: str, preamble: str = "", limits: Limits = DEFAULTS) -> Tested:
    """Test a program's function: ``tests`` defines ``check(candidate)``, which raises if the function is wrong.

    Program and tests run in two processes. The function gets its arguments as copies, and what it returns comes back as
    a plain value (numbers, text, bytes, None, and lists, tuples, sets and dicts of them). The program sees neither the
    tests nor what they expect. ``preamble`` is defined for both, before them.
    """
    request = _request(source, limits=limits, entry_point=entry_point, preamble=preamble)
    answer = _run(request, tests, capabilities().layers)
    return Tested(answer["status"], answer.get("error"), answer.get("normal"), answer.get("seconds", 0.0))


def in_threads(function: Callable[..., T], *columns: Sequence[Any], workers: int | None = None) -> list[T]:
    """``function`` of each row of the columns, in their order; one worker a core unless told."""
    if workers is not None and workers < 1:
        raise ValueError(f"workers={workers}: give a count like 4, or None for one a core")
    with ThreadPoolExecutor(workers or len(os.sched_getaffinity(0))) as pool:
        return list(pool.map(function, *columns))


@lru_cache(maxsize=1)
def capabilities() -> Guarantees:
    """What the sandbox guarantees here: the first set of mechanisms that works is tried out, once a process."""
    if sys.platform != "linux":
        raise OSError(f"the sandbox needs Linux, this is {sys.platform}; run it in a Linux container or machine")
    refused = []
    for layers in _LAYERS:
        try:
            return probe(layers)
        except SandboxError as error:
            refused.append(f"{'+'.join(layers) or 'limits alone'}: {error}")
    raise SandboxError(f"no Python can be started in a sandbox; {'; '.join(refused)}")


def probe(layers: Layers) -> Guarantees:
    """What these mechanisms guarantee; SandboxError where the system does not permit them."""
    with tempfile.NamedTemporaryFile() as secret:
        source = _PROBE.format(file=secret.name, pid=os.getpid())
        answer = _run(_request(source, limits=DEFAULTS), None, layers)
    if answer["status"] != "ok":
        raise SandboxError(f"the probe ended with {answer['status']}: {answer.get('stderr', '')[-300:]}")
    return Guarantees(**json.loads(answer["stdout"]), layers=layers)


class SandboxError(RuntimeError):
    """The sandbox itself could not be set up; says nothing of the program."""


_PROBE = """
import ctypes, json, os

def refused(action, *args):
    try:
        return action(*args) in (-1, False)
    except OSError:
        return True

def connect():
    import socket
    socket.socket(socket.AF_INET, socket.SOCK_DGRAM).connect(("192.0.2.1", 9))

def fork():
    os.fork() or os._exit(0)

libc = ctypes.CDLL(None)  # 0x4206: PTRACE_SEIZE, which does not stop the process
print(json.dumps({{
    "network_isolated": refused(connect),
    "filesystem_isolated": all([
        refused(open, {file!r}), refused(open, {file!r}, "r+"), refused(os.chmod, {file!r}, 0o600),
        refused(open, "/etc/passwd"), refused(os.listdir, "/proc"),
    ]),
    "processes_isolated": all([
        refused(os.kill, {pid}, 0),
        refused(lambda: libc.ptrace(0x4206, {pid}, 0, 0)),
        refused(open, "/proc/{pid}/mem", "r+b"),
        refused(fork) or os.getppid() == 1,
    ]),
    "separate_user": os.getuid() != 0,
}}))
"""


def _request(
    source: str, *, limits: Limits, stdin: str = "", entry_point: str | None = None, preamble: str = ""
) -> dict[str, Any]:
    what = {"source": source, "stdin": stdin, "entry_point": entry_point, "preamble": preamble}
    return {**what, "limits": asdict(limits)}


def _run(request: dict[str, Any], tests: str | None, layers: Layers) -> dict[str, Any]:
    """Have a keeper run the request; once more, if the nursery was killed meanwhile."""
    try:
        return _run_once(request, tests, layers)
    except Gone:
        pass
    try:
        return _run_once(request, tests, layers)
    except Gone as error:
        raise SandboxError(f"no answer, but {str(error)!r}") from None


def _run_once(request: dict[str, Any], tests: str | None, layers: Layers) -> dict[str, Any]:
    """Send a new keeper the request and perhaps the tests, and take its answer."""
    folder = None if "namespaces" in layers else tempfile.mkdtemp(prefix="explorl-sandbox-")
    frames = [marshal.dumps({**request, "layers": layers, "folder": folder})]
    if tests is not None:
        frames.append(tests.encode(errors="surrogatepass"))
    message = b"".join(len(frame).to_bytes(8, "big") + frame for frame in frames)
    try:
        code, answer, errors = nursery.keep(message, request["limits"]["seconds"] + _GRACE)
    except TimeoutError:
        return {"status": "timeout"}
    finally:
        if folder is not None:
            _remove(folder)
    if code < 0:  # a test, or the source's normal form, was too much for it
        return {"status": "timeout" if code == -signal.SIGXCPU else "killed"}
    try:
        result: dict[str, Any] = ast.literal_eval(answer.decode(errors="surrogatepass"))
    except (ValueError, SyntaxError):
        raise SandboxError(f"no answer, but {errors.decode(errors='replace')[-500:]!r}") from None
    if result["status"] == "setup":
        raise SandboxError(result["error"])
    return result


def _remove(folder: str) -> None:
    """Remove a folder whatever a program has put there: folders without rights, or nested beyond all recursion."""
    try:
        os.rmdir(folder)
    except OSError:
        subprocess.run(["chmod", "-R", "u+rwX", folder], stderr=subprocess.DEVNULL, check=False)
        subprocess.run(["rm", "-rf", folder], stderr=subprocess.DEVNULL, check=False)
