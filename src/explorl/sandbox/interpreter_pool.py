"""Interpreters side by side: starts their processes (`notebook_keeper`) from the nursery, keeps some warm, so that a
call need not wait, and passes calls and results between them and whoever polls."""

from __future__ import annotations

import math
import os
import select
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterable
from dataclasses import replace
from types import TracebackType

from explorl.core.text import clean
from explorl.sandbox.fork_client import ForkServerDied
from explorl.sandbox.interpreter import Call, Interpreter
from explorl.sandbox.interpreter_process import Process
from explorl.sandbox.interpreter_results import RESTARTED, CellResult, InterpreterLimits, Status
from explorl.sandbox.programs import SandboxError, isolating_layers
from explorl.sandbox.usage import longest

_GRACE = 5.0
"""Seconds beyond a call's longest that its keeper has to answer."""
_START_LIMIT = 60.0
_STARTS = 3
_LONGEST_WAIT = 3600.0
_LOOK = 0.02
"""Seconds between two looks at who is late: there may be hundreds, and a poll should cost what has happened."""
_AHEAD = 32
"""Processes, for each processor, that are started at most for calls that are only expected."""


class InterpreterPool:
    """Interpreters side by side. Usable from several threads; a fork of this process needs a pool of its own."""

    def __init__(self, limits: InterpreterLimits | None = None, *, warm: int = 2, unisolated: bool = False) -> None:
        """``warm``: processes that are kept ready beyond those in use.

        SandboxError where interpreters would not be isolated, unless ``unisolated`` is true or EXPLORL_UNISOLATED=1.
        """
        if not isinstance(warm, int) or warm < 0:
            raise ValueError(f"warm={warm!r}: give a count of processes like 2, or 0 for none")
        self.limits, self.warm = limits or InterpreterLimits(), warm
        self._layers = isolating_layers(unisolated)
        self._lock = threading.RLock()
        self._epoll = select.epoll()
        self._processes: dict[int, Process] = {}
        """By descriptor: all that were started."""
        self._to_start: deque[Process] = deque()
        self._starting: set[Process] = set()
        self._spare: deque[Process] = deque()
        self._open: weakref.WeakSet[Interpreter] = weakref.WeakSet()
        self._pending = 0
        self._finished = 0
        self._expected = 0
        self._next_look = 0.0
        self._cores = len(os.sched_getaffinity(0))
        self._owner_process = os.getpid()
        self._finalizer = weakref.finalize(self, _close, self._processes, self._epoll)
        _POOLS.add(self)
        with self._lock:
            self._refill()

    def open(self) -> Interpreter:
        """An interpreter, which begins to start now if no warm one is left."""
        with self._usable():
            interpreter = Interpreter(self)
            self._open.add(interpreter)
            self._expected = max(0, self._expected - 1)
            self._seat(interpreter)
            self._refill()
        return interpreter

    def expect(self, interpreters: int) -> None:
        """About so many will be opened soon: have processes for them start meanwhile, as far as that is sensible."""
        with self._usable():
            self._expected = min(interpreters, _AHEAD * self._cores)
            self._refill()

    @property
    def starting(self) -> bool:
        """Whether there are processes that start, or are to, while somebody polls."""
        return bool(self._starting or self._to_start)

    def poll(self, seconds: float = 0.0) -> int:
        """Take what interpreters have said, waiting so long for a call to finish; how many have finished meanwhile."""
        deadline = time.monotonic() + seconds
        with self._usable():
            before = self._finished
        while True:
            with self._usable():
                self._take(self._epoll.poll(0))
                finished, now = self._finished - before, time.monotonic()
                if finished or not self._pending or now >= deadline:
                    return finished
                wait = min(deadline, self._next_deadline()) - now
            self._epoll.poll(min(max(0.0, wait), _LONGEST_WAIT))  # another thread may take what it finds

    def close(self) -> None:
        """End all interpreters."""
        with self._lock:
            for interpreter in list(self._open):
                interpreter.close()
            self._spare.clear()
            self._to_start.clear()
            self._starting.clear()
            self._finalizer()

    def __enter__(self) -> InterpreterPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # All that follows runs under the lock.

    def _usable(self) -> threading.RLock:
        if self._owner_process != os.getpid():
            raise ValueError("this pool belongs to the process that was forked; make an InterpreterPool here")
        if not self._finalizer.alive:
            raise ValueError("this pool is closed; make another InterpreterPool")
        return self._lock

    def _seat(self, interpreter: Interpreter) -> None:
        """Give an interpreter a process: a spare one, or one that is still to start."""
        while self._spare and self._spare[0].state == "idle":
            self._hear(self._spare[0])  # if it has ended, it is no longer there
            if self._spare and self._spare[0].state == "idle":
                break
        if self._spare:
            process = self._spare.popleft()
        else:
            process = Process()
            self._to_start.append(process)
        process.owner, interpreter._process = interpreter, process
        self._start_some()

    def _refill(self) -> None:
        """Have spare processes ready; those that interpreters wait for come first."""
        while len(self._spare) < max(self.warm, self._expected):
            process = Process()
            self._spare.append(process)
            self._to_start.append(process)
        self._start_some()

    def _start_some(self) -> None:
        """Start processes, not so many at once that they take the processors from each other and from us."""
        while self._to_start and len(self._starting) < 2 * self._cores:
            process = self._to_start.popleft()
            try:
                process.start(self.limits.for_keeper(), self._layers, _START_LIMIT)
            except (ForkServerDied, OSError) as error:
                self._not_started(process, str(error))
                continue
            self._processes[process.fileno()] = process
            self._starting.add(process)
            self._epoll.register(process.fileno(), select.EPOLLIN)

    def _queue(self, call: Call) -> None:
        self._pending += 1
        call.interpreter._waiting.append(call)
        self._serve(call.interpreter)

    def _serve(self, interpreter: Interpreter) -> None:
        """Send the next call, if there is one and it can be sent."""
        if interpreter._running is not None or not interpreter._waiting:
            return
        if interpreter._process is None:
            self._seat(interpreter)
            self._refill()
        process = interpreter._process
        if process is not None and process.state == "idle":
            interpreter._running = interpreter._waiting.popleft()
            crowd = 1 + len(self._processes) // self._cores
            process.call(interpreter._running.source, crowd, crowd * longest(self.limits.seconds) + _GRACE)
            if process.has_more_to_send:
                self._epoll.modify(process.fileno(), select.EPOLLIN | select.EPOLLOUT)

    def _take(self, events: Iterable[tuple[int, int]]) -> None:
        """Hear those that have something to say, and end those that are late."""
        for descriptor, event in events:
            process = self._processes.get(descriptor)
            if process is None:
                continue
            if event & select.EPOLLOUT:
                process.flush()
                if not process.has_more_to_send:
                    self._epoll.modify(descriptor, select.EPOLLIN)
            if event & ~select.EPOLLOUT:
                self._hear(process)
        if time.monotonic() >= self._next_look:
            self._look_for_late()
        self._start_some()

    def _look_for_late(self) -> None:
        now = time.monotonic()
        self._next_look = now + _LOOK
        for process in list(self._processes.values()):
            if process.deadline <= now:
                self._gone(process, "timeout")
            elif process.is_abandoned:
                self._end(process)

    def _hear(self, process: Process) -> None:
        try:
            message = process.receive()
        except (EOFError, ValueError):
            self._gone(process, "killed")
            return
        if message is None:
            return
        interpreter, status = process.owner, message["status"]
        if status == "setup":
            self._gone(process, "killed", clean(message["error"]))
        elif status == "ready":
            self._starting.discard(process)
            process.rest()
            if interpreter is not None:
                interpreter._failed_starts = 0
                self._serve(interpreter)
        elif interpreter is not None and interpreter._running is not None:
            result = self.limits.told(message)
            self._finish(interpreter, result)
            if result.ended:
                interpreter._process = None
                self._end(process)
            else:
                process.rest()
            self._serve(interpreter)

    def _gone(self, process: Process, status: Status, said: str = "its process ended") -> None:
        """A process has ended without a word, or is late."""
        interpreter = process.owner
        was_starting = process.state == "starting"
        self._end(process)
        if interpreter is None:
            if process in self._spare:
                self._spare.remove(process)  # not replaced before the next one is opened: it may never start
            return
        interpreter._process = None
        if was_starting:
            self._retry(interpreter, said)
        elif interpreter._running is not None:
            self._finish(interpreter, CellResult(status, self.limits.why_ended(status)))
        else:
            interpreter._lost = True
        self._serve(interpreter)

    def _not_started(self, process: Process, said: str) -> None:
        interpreter = process.owner
        process.close()
        if interpreter is None:
            self._spare.remove(process)
        else:
            interpreter._process = None
            self._retry(interpreter, said)
            self._serve(interpreter)

    def _retry(self, interpreter: Interpreter, said: str) -> None:
        """Count a start that failed; after some, those who wait for it get an error."""
        interpreter._failed_starts += 1
        if interpreter._failed_starts >= _STARTS:
            interpreter._failed_starts = 0
            error = SandboxError(f"no interpreter starts, {_STARTS} times: {said}")
            while interpreter._waiting:
                self._settle(interpreter._waiting.popleft(), error)

    def _finish(self, interpreter: Interpreter, result: CellResult) -> None:
        """The running call has this result."""
        call, interpreter._running = interpreter._running, None
        assert call is not None
        if interpreter._lost and not call.replayed:
            result = replace(result, text=f"[{RESTARTED}]\n{result.text}")
            interpreter._lost = False
        if result.ended:
            interpreter._done.clear()
        else:
            interpreter._done.append(call.source)
        self._settle(call, result)
        if call.replayed and result.ended:  # nobody reads what it shows
            interpreter._lost = True
            while interpreter._waiting and interpreter._waiting[0].replayed:
                self._settle(interpreter._waiting.popleft(), result)

    def _settle(self, call: Call, result: CellResult | SandboxError) -> None:
        call._result = result
        self._finished += 1
        self._pending -= 1

    def _drop(self, interpreter: Interpreter) -> None:
        self._open.discard(interpreter)
        process, interpreter._process = interpreter._process, None
        if process is not None:
            if process in self._to_start:
                self._to_start.remove(process)
            self._end(process)
        calls = [*filter(None, [interpreter._running]), *interpreter._waiting]
        interpreter._running = None
        interpreter._waiting.clear()
        for call in calls:
            self._settle(call, CellResult("killed", "the interpreter was closed\n"))

    def _end(self, process: Process) -> None:
        self._starting.discard(process)
        if process.state not in ("waiting", "ended"):
            self._processes.pop(process.fileno(), None)
            self._epoll.unregister(process.fileno())
        process.close()

    def _next_deadline(self) -> float:
        """When to look again whether somebody is late."""
        late = min((process.deadline for process in self._processes.values()), default=math.inf)
        return max(late, self._next_look)

    def _forget(self) -> None:
        """In a fork of this process."""
        for process in self._processes.values():
            process.forget()
        self._processes.clear()
        self._starting.clear()
        self._finalizer.detach()
        self._epoll.close()


def _close(processes: dict[int, Process], epoll: select.epoll) -> None:
    """What is left of a pool that was closed, forgotten, or overtaken by the end of this process."""
    for process in list(processes.values()):
        process.close()
    processes.clear()
    epoll.close()


_POOLS: weakref.WeakSet[InterpreterPool] = weakref.WeakSet()


def _forget_all() -> None:
    for pool in list(_POOLS):
        pool._forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_all)
