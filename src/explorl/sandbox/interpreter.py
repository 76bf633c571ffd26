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
from typing import TYPE_CHECKING

from explorl.sandbox.interpreter_process import InterpreterProcess
from explorl.sandbox.interpreter_results import CellResult, CellStatus, InterpreterLimits
from explorl.sandbox.programs import SandboxError

if TYPE_CHECKING:
    from explorl.sandbox.interpreter_pool import InterpreterPool

__all__ = ["Call", "CellResult", "CellStatus", "Interpreter", "InterpreterLimits"]


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
