"""Call a function with untrusted messages: isolated, in bounded time and memory, one message at a time.

    judges = IsolatedFunction("explorl.tasks.math.sympy_worker:compare", workers=2)
    judges.call_many([{"gold": "1/2", "answer": "0.5"}])     # [IsolatedResult(value=True, error=None, seconds=0.01)]

Worker processes (`isolated_call_worker`) import the function once and fork for each message, so that a message cannot
affect the next one. They are isolated by the same layers as programs (`programs.capabilities`): no network, no files
except the libraries, an empty environment, no other processes.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import warnings
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

from explorl.core.text import clean
from explorl.sandbox import fork_client
from explorl.sandbox.frames import Channel
from explorl.sandbox.isolated_call_worker import MAX_REPLY
from explorl.sandbox.process_group import AnsweringProcess, ProcessGroup
from explorl.sandbox.programs import SandboxError, capabilities, check_limits

_BOOTSTRAP = fork_client.bootstrap("isolated_call_worker")
_FOLDERS = [*fork_client._FOLDERS, str(Path(__file__).resolve().parents[1] / "tasks")]
_START_LIMIT = 120.0  # importing sympy from a cold network disk
_START_ATTEMPTS = 3
_WALL_FACTOR = 10
"""The wall limit of a message as a multiple of its limit of processor time: the machine may be busy."""
_GRACE = 5.0
"""Seconds beyond the wall limit of a message after which a silent worker is killed."""


EncodedMessage = tuple[bytes, bytes]
"""The trusted data and the message, as they are sent."""


class IsolatedResult(NamedTuple):
    """The function's value for a message, or why there is none."""

    value: Any = None
    error: str | None = None
    """"took too long", "ran out of memory", "crashed" or "raised ValueError: …"."""
    seconds: float = 0.0
    """The processor time it took."""


@dataclass(frozen=True)
class IsolationLimits:
    """The limits of each message."""

    seconds: float = 5.0
    """Processor time of one message, independent of others in the call; its wall limit is ten times that."""
    memory: int = 2 << 30
    """Bytes of address space for one message."""

    def __post_init__(self) -> None:
        check_limits(self)


class IsolatedFunction:
    """A function and the pool of workers that call it, started at first use. Thread-safe; each fork starts its own."""

    def __init__(
        self, function: str, *, setup: Any = None, workers: int | None = None, limits: IsolationLimits | None = None
    ) -> None:
        """Name the function, like ``"explorl.tasks.math.sympy_worker:compare"``, and the limits of its messages.

        It is called with a message and the value of its trusted data. Messages and values are JSON. Its module may
        have ``prepare(setup)``, which is called in each worker before it is isolated, and ``prepare_trusted(…)``: see
        `call_many`.
        """
        if workers is not None and workers < 1:
            raise ValueError(f"workers={workers}: give 1 or more, or None for one per core, at most 8")
        self.function, self.setup = function, setup
        self.workers = min(_core_count(), 8) if workers is None else workers
        self.limits = limits or IsolationLimits()
        self._workers: ProcessGroup[_Worker] = ProcessGroup()
        self._failed_starts = 0
        self._lock = Lock()
        self._process = os.getpid()

    def call_many(self, messages: Iterable[Any], trusted: Iterable[Any] | None = None) -> list[IsolatedResult]:
        """Call the function for each message, with all workers at once; return the results in the same order.

        ``trusted`` holds trusted data for each message, such as the right answer. The module's ``prepare_trusted`` is
        called with it outside of the message's process, once for equal data, and must return within a second. The
        function gets the value, or None if that fails.
        """
        encoded = [(b"", json.dumps(message).encode()) for message in messages]
        if trusted is not None:
            encoded = [(json.dumps(part).encode(), body) for part, (_, body) in zip(trusted, encoded, strict=True)]
        if self._process != os.getpid():  # pipes and lock belong to the parent
            self._workers, self._lock, self._process = ProcessGroup(), Lock(), os.getpid()
        with self._lock:
            try:
                return self._call(encoded)
            except BaseException:
                self.close()  # or a pending reply would be taken for that of the next message
                raise

    def close(self) -> None:
        """End the workers; the next message starts new ones."""
        if self._process == os.getpid():
            for worker in self._pool:
                worker.kill()
            self._workers.close()
        self._workers = ProcessGroup()

    def __enter__(self) -> IsolatedFunction:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def _pool(self) -> list[_Worker]:
        return list(self._workers.values())

    def _call(self, encoded: Sequence[EncodedMessage]) -> list[IsolatedResult]:
        """Distribute the messages to the workers and return the results; retry a message once if its worker fails."""
        waiting = deque(range(len(encoded)))
        crashed: set[int] = set()
        replies: dict[int, IsolatedResult] = {}
        while len(replies) < len(encoded):
            while len(self._workers) < min(self.workers, len(encoded) - len(replies)):
                self._add_worker()
            for worker in self._pool:
                if waiting and worker.state == "idle":
                    worker.index = waiting.popleft()
                    worker.mark_busy(_WALL_FACTOR * self.limits.seconds + _GRACE)
                    self._workers.send(worker, repr(self.limits.seconds).encode(), *encoded[worker.index])
            for worker, reply in self._wait_for_workers():
                if isinstance(reply, IsolatedResult):
                    self._failed_starts = 0
                    if worker.index is not None:
                        replies[worker.index] = reply
                    worker.index = None
                    worker.mark_idle()
                    continue
                self._workers.remove(worker)
                worker.kill()
                self._add_worker()
                if worker.state == "idle":  # killed from outside
                    continue
                if worker.index is None:
                    self._failed_starts += 1
                    if self._failed_starts >= _START_ATTEMPTS:
                        raise SandboxError(f"{self.function} did not start in {_START_ATTEMPTS} attempts: {reply}")
                elif worker.index not in crashed:
                    crashed.add(worker.index)  # its worker may have been killed from outside
                    waiting.appendleft(worker.index)
                else:
                    replies[worker.index] = IsolatedResult(error="crashed")
        return [replies[index] for index in range(len(encoded))]

    def _wait_for_workers(self) -> Iterator[tuple[_Worker, IsolatedResult | str]]:
        """Wait until workers have replied or failed; yield each with its result or what went wrong."""
        self._workers.wait(self._workers.seconds_to_deadline())
        for worker, message in self._workers.messages():
            if isinstance(message, bytes):
                yield worker, worker.parse(message)
            else:
                yield worker, {"ended": "it ended", "late": "its worker hung"}[message]

    def _add_worker(self) -> None:
        self._workers.add(_Worker(self.function, self.setup, self.limits))


def _core_count() -> int:
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


@lru_cache(maxsize=1)
def _layers() -> tuple[str, ...]:
    """Return the layers that isolate workers; warn if they are not enough."""
    layers: tuple[str, ...] = ()
    try:
        guarantees = capabilities()
    except (OSError, SandboxError) as error:  # not Linux, or nothing is permitted
        missing = str(error)
    else:
        layers = guarantees.layers
        missing = f"open: {', '.join(guarantees.missing)}" if guarantees.missing else ""
    if missing:
        warnings.warn(
            f"answers are judged in separate processes, which are not isolated here ({missing}); "
            "`explorl doctor` says what to do",
            stacklevel=2,
        )
    return layers


class _Worker(AnsweringProcess):
    """One process, which takes one message at a time."""

    def __init__(self, function: str, setup: Any, limits: IsolationLimits) -> None:
        # A random hash seed would make sympy order terms randomly. -s -S -P: the path is set below.
        self._process = subprocess.Popen(
            [sys.executable, "-s", "-S", "-P", "-X", "utf8", "-c", _BOOTSTRAP, *_FOLDERS],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            cwd="/",
            env={
                "PYTHONHASHSEED": "0",
                # Processes with threads cannot be forked safely, and forks may not start any.
                **dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"),
                **{name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ},
            },
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self.channel = Channel(self._process.stdout.fileno(), self._process.stdin.fileno())
        self.mark_started(_START_LIMIT)
        self.index: int | None = None
        cpu = math.ceil(limits.seconds) + 1
        resources = {
            "cpu_seconds": cpu, "memory": limits.memory, "file_bytes": 1, "open_files": 64, "processes": 1,
        }  # fmt: skip
        settings = {
            "function": function,
            "setup": setup,
            "path": [os.path.abspath(folder) for folder in sys.path if folder],
            "layers": _layers(),
            "limits": resources,
            "wall_factor": _WALL_FACTOR,
        }
        self.channel.send(json.dumps(settings).encode())

    @property
    def pid(self) -> int:
        return self._process.pid

    def parse(self, frame: bytes) -> IsolatedResult | str:
        """Return the result that the worker has sent, or why it could not start."""
        if self.index is None:
            state = json.loads(frame)
            if state.get("kind") == "missing":
                raise ImportError(state["failed"])
            return IsolatedResult() if "ready" in state else str(state["failed"])
        seconds, _, body = frame.partition(b" ")
        return _parse_reply(body, float(seconds))

    def kill(self) -> None:
        """Kill the worker and close its pipes."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()


def _parse_reply(body: bytes, seconds: float) -> IsolatedResult:
    """Return the result in what a child has written, which may be anything."""
    try:
        if len(body) > MAX_REPLY:
            raise ValueError
        reply = json.loads(body)
        if "error" in reply:
            return IsolatedResult(error=clean(str(reply["error"]), 600), seconds=seconds)
        return IsolatedResult(reply["value"], seconds=seconds)
    except (ValueError, TypeError, KeyError, RecursionError):
        return IsolatedResult(error="crashed", seconds=seconds)
