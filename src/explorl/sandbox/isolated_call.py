"""Compute a function of messages that nobody can trust: in bounded time and memory, shut in, one message at a time.

    judges = IsolatedFunction("explorl.tasks.math.sympy_worker:compare", workers=2)
    judges.call_many([{"gold": "1/2", "answer": "0.5"}])     # [IsolatedResult(value=True, error=None, seconds=0.01)]

Worker processes (`isolated_call_worker`) import the function once and fork for each message, so that no message can
leave anything behind for the next. They are shut in by the same layers as programs (`programs.capabilities`): no
network, no files but the libraries, an empty environment, no other processes.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
import warnings
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from functools import lru_cache
from multiprocessing.connection import wait
from pathlib import Path
from threading import Lock
from types import TracebackType
from typing import Any, NamedTuple

from explorl.core.text import clean
from explorl.sandbox.isolated_call_worker import LONGEST_REPLY
from explorl.sandbox.programs import SandboxError, capabilities

BOOTSTRAP = """
import sys, types
folder = sys.argv[1]
for name in ("", ".sandbox", ".tasks"):
    sys.modules["explorl" + name] = types.ModuleType("explorl" + name)
    sys.modules["explorl" + name].__path__ = [folder + name.replace(".", "/")]
from explorl.sandbox.isolated_call_worker import main
main()
"""
"""Imports a function's module by its name, but not the packages around it, which would import torch."""
_FOLDER = str(Path(__file__).resolve().parents[1])
_START_LIMIT = 120.0  # importing sympy from a cold network disk
_STARTS = 3
_PATIENCE = 10
"""The wall limit of a message, in multiples of its limit of processor time: the machine may be busy."""
_GRACE = 5.0
"""Seconds beyond its wall limit after which a worker that says nothing is killed."""


Body = tuple[bytes, bytes]
"""What is given, and the message, as they are sent."""


class IsolatedResult(NamedTuple):
    """The function's value of a message, or why there is none."""

    value: Any = None
    error: str | None = None
    """"took too long", "ran out of memory", "crashed" or "raised ValueError: …"."""
    seconds: float = 0.0
    """Processor time that it took."""


@dataclass(frozen=True)
class IsolationLimits:
    """What messages may use."""

    seconds: float = 5.0
    """Processor time of one message, whatever else is in its call; its wall limit is ten times that."""
    memory: int = 2 << 30
    """Bytes of address space of one message."""

    def __post_init__(self) -> None:
        for field in fields(self):
            if not getattr(self, field.name) > 0:
                value = getattr(self, field.name)
                raise ValueError(f"{field.name}={value!r}: give a positive number, like {field.default!r}")


class IsolatedFunction:
    """A pool of workers, started when first needed. Usable from several threads; each fork starts its own."""

    def __init__(
        self, function: str, *, setup: Any = None, workers: int | None = None, limits: IsolationLimits | None = None
    ) -> None:
        """``function``, like ``"explorl.tasks.math.sympy_worker:compare"``, gets a message and what is given with it.

        Messages and values are JSON. Its module may have ``prepare(setup)``, which is called in each worker before it
        is shut in, and ``given(…)``: see `call_many`.
        """
        if workers is not None and workers < 1:
            raise ValueError(f"workers={workers}: give 1 or more, or None for one per core, at most 8")
        self.function, self.setup = function, setup
        self.workers = min(len(_cores()), 8) if workers is None else workers
        self.limits = limits or IsolationLimits()
        self._pool: list[_Worker] = []
        self._failed_starts = 0
        self._lock = Lock()
        self._process = os.getpid()

    def call_many(self, messages: Iterable[Any], given: Iterable[Any] | None = None) -> list[IsolatedResult]:
        """The replies to messages, with all workers at once, in the messages' order.

        ``given``: for each message what of it is trusted. The module's ``given`` is computed of it outside of the
        message's process, once for many messages, within a second, and the function gets its value; or else None.
        """
        bodies = [(b"", json.dumps(message).encode()) for message in messages]
        if given is not None:
            bodies = [(json.dumps(part).encode(), body) for part, (_, body) in zip(given, bodies, strict=True)]
        if self._process != os.getpid():  # the pipes are the parent's, and so is the thread that may hold the lock
            self._pool, self._lock, self._process = [], Lock(), os.getpid()
        with self._lock:
            try:
                return self._call(bodies)
            except BaseException:
                self.close()  # a worker that still owes a reply would give it to the next message
                raise

    def close(self) -> None:
        """End the workers; the next message starts new ones."""
        if self._process == os.getpid():
            for worker in self._pool:
                worker.kill()
        self._pool = []

    def __enter__(self) -> IsolatedFunction:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _call(self, bodies: Sequence[Body]) -> list[IsolatedResult]:
        waiting = deque(range(len(bodies)))
        crashed: set[int] = set()
        replies: dict[int, IsolatedResult] = {}
        while len(replies) < len(bodies):
            while len(self._pool) < min(self.workers, len(bodies) - len(replies)):
                self._pool.append(self._worker())
            for worker in self._pool:
                if waiting and worker.is_idle:
                    next_one = waiting.popleft()
                    worker.take(next_one, bodies[next_one], self.limits.seconds)
            for worker, reply in self._heard():
                index = worker.index
                if isinstance(reply, IsolatedResult):
                    self._failed_starts = 0
                    worker.rest()
                    if index is not None:
                        replies[index] = reply
                    continue
                self._replace(worker)
                if index is None:
                    self._failed_starts += 1
                    if self._failed_starts >= _STARTS:
                        raise SandboxError(f"{self.function} does not start: {reply}, {_STARTS} times")
                elif index not in crashed:
                    crashed.add(index)  # its worker may have been killed by a stranger
                    waiting.appendleft(index)
                else:
                    replies[index] = IsolatedResult(error="crashed")
        return [replies[index] for index in range(len(bodies))]

    def _heard(self) -> list[tuple[_Worker, IsolatedResult | str]]:
        """Wait until workers have replied, or have failed; what each did."""
        expected = [worker for worker in self._pool if not worker.is_idle]
        rest = min(worker.deadline for worker in expected) - time.monotonic()
        readable = set(wait([worker.fileno() for worker in expected], max(rest, 0.0)))
        heard: list[tuple[_Worker, IsolatedResult | str]] = []
        for worker in expected:
            if worker.fileno() in readable:
                if (reply := worker.read()) is not None:
                    heard.append((worker, reply))
            elif time.monotonic() >= worker.deadline:
                heard.append((worker, "its worker hung"))
        return heard

    def _worker(self) -> _Worker:
        return _Worker(self.function, self.setup, self.limits)

    def _replace(self, worker: _Worker) -> None:
        worker.kill()
        self._pool[self._pool.index(worker)] = self._worker()


def _cores() -> Sequence[int]:
    return list(os.sched_getaffinity(0)) if sys.platform == "linux" else list(range(os.cpu_count() or 1))


@lru_cache(maxsize=1)
def _layers() -> tuple[str, ...]:
    """What workers are shut in with; a warning where that does not isolate them."""
    layers: tuple[str, ...] = ()
    try:
        guarantees = capabilities()
    except (OSError, SandboxError) as error:  # not Linux, or a kernel that permits nothing
        missing = str(error)
    else:
        layers = guarantees.layers
        missing = f"open: {', '.join(guarantees.missing)}" if guarantees.missing else ""
    if missing:
        warnings.warn(
            f"answers are judged in processes of their own, but those are not isolated here ({missing}); "
            "`explorl doctor` says what to do",
            stacklevel=2,
        )
    return layers


class _Worker:
    """One process, which takes one message at a time."""

    def __init__(self, function: str, setup: Any, limits: IsolationLimits) -> None:
        # A hash seed of its own would make sympy order terms by chance. -s -S -P: what is on the path is said below.
        self._process = subprocess.Popen(
            [sys.executable, "-s", "-S", "-P", "-X", "utf8", "-c", BOOTSTRAP, _FOLDER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            cwd="/",
            env={
                "PYTHONHASHSEED": "0",
                # A process with threads cannot be forked well, and a fork may not start any.
                **dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"),
                **{name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ},
            },
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._stdin, self._stdout = self._process.stdin, self._process.stdout
        self._read = bytearray()
        self.deadline = time.monotonic() + _START_LIMIT
        self.is_idle = False
        self.index: int | None = None
        cpu = math.ceil(limits.seconds) + 1
        resources = {
            "cpu_seconds": cpu, "memory": limits.memory, "file_bytes": 1, "open_files": 64, "processes": 1,
        }  # fmt: skip
        order = {
            "function": function,
            "setup": setup,
            "path": [os.path.abspath(folder) for folder in sys.path if folder],
            "layers": _layers(),
            "limits": resources,
            "patience": _PATIENCE,
        }
        self._send(json.dumps(order).encode())

    @property
    def pid(self) -> int:
        return self._process.pid

    def fileno(self) -> int:
        return self._stdout.fileno()

    def take(self, index: int, body: Body, seconds: float) -> None:
        self.index, self.is_idle = index, False
        self.deadline = time.monotonic() + _PATIENCE * seconds + _GRACE
        self._send(repr(seconds).encode(), *body)

    def rest(self) -> None:
        self.index, self.is_idle = None, True

    def read(self) -> IsolatedResult | str | None:
        """Its reply, what is wrong with it, or None if there is only a part of a reply."""
        chunk = os.read(self.fileno(), 1 << 16)
        self._read += chunk
        if not chunk:
            return "it ended"
        if len(self._read) < 8 or len(self._read) - 8 < int.from_bytes(self._read[:8], "big"):
            return None
        frame = bytes(self._read[8:])
        self._read.clear()
        if self.index is None:
            state = json.loads(frame)
            if state.get("kind") == "missing":
                raise ImportError(state["failed"])
            return IsolatedResult() if "ready" in state else str(state["failed"])
        seconds, _, body = frame.partition(b" ")
        return _understood(body, float(seconds))

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        self._stdin.close()
        self._stdout.close()

    def _send(self, *frames: bytes) -> None:
        view = memoryview(b"".join(len(frame).to_bytes(8, "big") + frame for frame in frames))
        with suppress(OSError):  # if it is dead, reading from it will tell
            while view:
                view = view[self._stdin.write(view) or 0 :]


def _understood(body: bytes, seconds: float) -> IsolatedResult:
    """What a child has written, which may be anything."""
    try:
        if len(body) > LONGEST_REPLY:
            raise ValueError
        said = json.loads(body)
        if "error" in said:
            return IsolatedResult(error=clean(str(said["error"]), 600), seconds=seconds)
        return IsolatedResult(said["value"], seconds=seconds)
    except (ValueError, TypeError, KeyError, RecursionError):
        return IsolatedResult(error="crashed", seconds=seconds)
