"""Python interpreters for rollouts, in which a model's code runs cell by cell, as in a notebook.

    with InterpreterPool(InterpreterLimits(seconds=5)) as pool:
        python = pool.open()
        python.run("x = 6 * 7")
        python.run("x + 1").text                    # "43\\n"
        call = python.submit("sum(range(10**6))")   # returns at once
        call.result()                               # CellResult(status="ok", text="499999500000\\n", …)

Variables persist between calls. Each interpreter is isolated by the layers of `programs`, and a cell can end at most
its own interpreter: the result says so, and the next call runs in a new one. Between calls all its processes are
stopped.
Pools are in `interpreter_pool`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

from explorl.core.text import clean
from explorl.sandbox.programs import DEFAULTS, SandboxError, check_limits

if TYPE_CHECKING:
    from explorl.sandbox.interpreter_pool import InterpreterPool
    from explorl.sandbox.interpreter_process import InterpreterProcess

CellStatus = Literal["ok", "error", "timeout", "memory", "exited", "killed", "refused"]
RESTARTED = "the interpreter was restarted, its variables are gone"
LEAST_MEMORY = 32 << 20
_ENDED = {"timeout", "memory", "exited", "killed"}


@dataclass(frozen=True)
class InterpreterLimits:
    """What an interpreter may use."""

    seconds: float = 5.0
    """Time of one call, and processor time of all its processes together. Time spent waiting for a busy processor does
    not count, up to four times the limit plus two seconds of wall time, times the interpreters per processor."""
    calls: int = 100
    """Number of calls; further ones are refused."""
    output: int = 4000
    """Characters that are kept of a call's output: the first half and the last half."""
    memory: int = DEFAULTS.memory
    """Bytes of address space of each process."""
    processes: int = DEFAULTS.processes
    """Processes and threads, the first included."""

    def __post_init__(self) -> None:
        check_limits(self)
        if self.memory < LEAST_MEMORY:
            raise ValueError(
                f"memory={self.memory!r} bytes are too few for Python itself; give {LEAST_MEMORY} or more, like "
                f"{DEFAULTS.memory}"
            )

    def for_supervisor(self) -> dict[str, Any]:
        """Return the limits for a supervisor, which limits each call; the kernel limits the time of all calls."""
        return {**asdict(DEFAULTS), **asdict(self), "cpu_seconds": (self.seconds + 1) * self.calls + 1}

    def to_result(self, message: dict[str, Any]) -> CellResult:
        """Return the result of a call from its supervisor's message."""
        head, tail = (clean(message[name].replace("\r\n", "\n")) for name in ("head", "tail"))
        cut = message["cut"]
        text = f"{head}\n[{cut} characters cut]\n{tail}" if cut else head + tail
        status: CellStatus = message["status"]
        if status in _ENDED:
            text += "\n" if text and not text.endswith("\n") else ""
            text += self.end_reason(status)
        return CellResult(status, text, cut, message["seconds"])

    def end_reason(self, status: CellStatus) -> str:
        """Return the line that tells a model why its interpreter has ended."""
        reasons = {
            "timeout": f"TimeoutError: the call took longer than {self.seconds:g} s",
            "memory": f"MemoryError: the call took more than {self.memory / (1 << 20):g} MiB",
            "exited": "SystemExit: the code ended its process",
            "killed": "RuntimeError: the code's process was killed",
        }
        return f"{reasons[status]}; {RESTARTED}\n"


@dataclass(frozen=True)
class CellResult:
    """The result of a call."""

    status: CellStatus
    """"ok"; "error": the cell raised; "timeout", "memory": it exceeded a limit; "exited": it ended its process;
    "killed": a signal ended it, or it closed the connection; "refused": no calls are left. After "timeout", "memory",
    "exited" and "killed" all variables are gone. A hostile cell can forge "ok" for "error", but no more."""
    text: str
    """What a notebook would show, made printable by `clean`, and why the interpreter ended."""
    cut: int = 0
    """Number of characters left out of the middle of the text."""
    seconds: float = 0.0
    """Wall-clock time."""

    @property
    def ended(self) -> bool:
        """True if the interpreter's process has ended and all variables are gone."""
        return self.status in _ENDED


class Call:
    """A submitted cell and, later, its result."""

    def __init__(self, interpreter: Interpreter, source: str, replayed: bool = False) -> None:
        self.interpreter, self.source, self.replayed = interpreter, source, replayed
        self._result: CellResult | SandboxError | None = None

    @property
    def done(self) -> bool:
        """True if there is a result. Only `InterpreterPool.poll` and `result` receive results."""
        return self._result is not None

    def result(self) -> CellResult:
        """Wait for the result and return it; raise SandboxError if no interpreter could be started."""
        while self._result is None:
            self.interpreter._pool.poll(1.0)
        if isinstance(self._result, SandboxError):
            raise self._result
        return self._result


class Interpreter:
    """The interpreter of one rollout; made by `InterpreterPool.open`."""

    def __init__(self, pool: InterpreterPool) -> None:
        self._pool = pool
        self._process: InterpreterProcess | None = None
        self._waiting: deque[Call] = deque()
        self._running: Call | None = None
        self._calls, self._failed_starts = 0, 0
        self._history: list[str] = []
        """The cells that made the current variables."""
        self._variables_lost = False
        self._closed = False

    @property
    def calls_left(self) -> int:
        """Number of calls that will still be run."""
        return max(0, self._pool.limits.calls - self._calls)

    def submit(self, source: str) -> Call:
        """Run a cell after those that were submitted before; return at once."""
        if not isinstance(source, str):
            raise TypeError(f"a cell of type {type(source).__name__!r}: give Python source as text, like 'print(1)'")
        with self._pool._usable():
            if self._closed:
                raise ValueError("this interpreter is closed; open another with InterpreterPool.open()")
            call = Call(self, source)
            if not self.calls_left:
                limit = self._pool.limits.calls
                call._result = CellResult("refused", f"no calls are left: {limit} were allowed\n")
                return call
            self._calls += 1
            self._pool._queue(call)
        return call

    def run(self, source: str) -> CellResult:
        """Run a cell and return its result."""
        return self.submit(source).result()

    def copy(self) -> Interpreter:
        """Return another interpreter with the same variables, for a branch, by running the same cells again.

        Random numbers and times may differ there. It has as many calls left as this one.
        """
        with self._pool._usable():
            other = self._pool.open()
            other._calls = self._calls
            other.replay(self._history)
        return other

    def replay(self, sources: Iterable[str]) -> None:
        """Run cells of another interpreter only for their variables; they do not count as calls.

        If one of them ends the process, the rest is skipped, and the result of the next call says that variables are
        gone.
        """
        with self._pool._usable():
            for source in sources:
                self._pool._queue(Call(self, source, replayed=True))

    def close(self) -> None:
        """End the interpreter. Unfinished calls get the result "killed"."""
        with self._pool._lock:
            if not self._closed:
                self._closed = True
                self._pool._remove(self)

    def __enter__(self) -> Interpreter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
