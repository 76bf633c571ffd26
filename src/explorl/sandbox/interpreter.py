"""A Python interpreter for each rollout, in which code of a model runs cell by cell, as in a notebook.

    with InterpreterPool(InterpreterLimits(seconds=5)) as pool:
        python = pool.open()
        python.run("x = 6 * 7")
        python.run("x + 1").text                    # "43\\n"
        call = python.submit("sum(range(10**6))")   # runs while the caller does something else
        call.result()                               # CellResult(status="ok", text="499999500000\\n", …)

Variables live on between calls. Each interpreter is shut in by the layers of `programs`, and whatever a cell does ends
at most its own interpreter: the result says so, and the next call begins in a new one. Between calls it stands still.
Pools are in `interpreter_pool`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from types import TracebackType
from typing import TYPE_CHECKING

from explorl.sandbox.interpreter_process import Process
from explorl.sandbox.interpreter_results import CellResult, InterpreterLimits, Status
from explorl.sandbox.programs import SandboxError

if TYPE_CHECKING:
    from explorl.sandbox.interpreter_pool import InterpreterPool

__all__ = ["Call", "CellResult", "Interpreter", "InterpreterLimits", "Status"]


class Call:
    """A call that was submitted."""

    def __init__(self, interpreter: Interpreter, source: str, replayed: bool = False) -> None:
        self.interpreter, self.source, self.replayed = interpreter, source, replayed
        self._result: CellResult | SandboxError | None = None

    @property
    def done(self) -> bool:
        """Whether there is a result. Only `InterpreterPool.poll` and `result` make it so."""
        return self._result is not None

    def result(self) -> CellResult:
        """Wait for it; SandboxError where no interpreter could be started."""
        while self._result is None:
            self.interpreter._pool.poll(1.0)
        if isinstance(self._result, SandboxError):
            raise self._result
        return self._result


class Interpreter:
    """One rollout's interpreter; made by `InterpreterPool.open`."""

    def __init__(self, pool: InterpreterPool) -> None:
        self._pool = pool
        self._process: Process | None = None
        self._waiting: deque[Call] = deque()
        self._running: Call | None = None
        self._calls, self._failed_starts = 0, 0
        self._done: list[str] = []
        """The cells that made the variables there are."""
        self._lost = False
        self._closed = False

    @property
    def calls_left(self) -> int:
        return max(0, self._pool.limits.calls - self._calls)

    def submit(self, source: str) -> Call:
        """Have a cell run, after those that were submitted before."""
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
        """Run a cell and wait for it."""
        return self.submit(source).result()

    def copy(self) -> Interpreter:
        """Another interpreter with the same variables, by running the cells that are done again; for a branch.

        What they drew at random, or found out about time, may be different there. It has as many calls left as this.
        """
        with self._pool._usable():
            other = self._pool.open()
            other._calls = self._calls
            other.replay(self._done)
        return other

    def replay(self, sources: Iterable[str]) -> None:
        """Run cells of another interpreter for their variables alone; they are not counted as calls.

        Where one of them ends the process, the others are left out, and the next call is told that variables are gone.
        """
        with self._pool._usable():
            for source in sources:
                self._pool._queue(Call(self, source, replayed=True))

    def close(self) -> None:
        """End it. Calls that are not done get the result "killed"."""
        with self._pool._lock:
            if not self._closed:
                self._closed = True
                self._pool._drop(self)

    def __enter__(self) -> Interpreter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
