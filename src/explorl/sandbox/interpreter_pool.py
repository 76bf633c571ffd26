"""Run many interpreters at the same time: start their supervisors through the fork server, keep some ready, and pass
calls and results between them and the threads that poll."""

from __future__ import annotations

import json
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, Literal

from explorl.core.text import clean
from explorl.sandbox.codec import LOAD_BYTES
from explorl.sandbox.fork_client import ForkServerDied
from explorl.sandbox.interpreter import RESTARTED, Call, CellResult, CellStatus, Interpreter, InterpreterLimits
from explorl.sandbox.interpreter_process import InterpreterProcess
from explorl.sandbox.process_group import ProcessGroup
from explorl.sandbox.programs import SandboxError, isolating_layers
from explorl.sandbox.usage import wall_limit

_GRACE = 5.0
"""Seconds beyond the wall limit of a call that its supervisor has to answer."""
_START_LIMIT = 60.0
_START_ATTEMPTS = 3
_EXPECTED_PER_CORE = 32
"""Most processes per processor that are started for expected interpreters."""


class InterpreterPool:
    """A pool of interpreters. Usable from several threads; a fork of this process needs its own pool."""

    def __init__(self, limits: InterpreterLimits | None = None, *, warm: int = 2, unisolated: bool = False) -> None:
        """Keep ``warm`` processes ready in addition to those in use.

        Raise SandboxError if interpreters would not be isolated, unless ``unisolated`` is true or EXPLORL_UNISOLATED=1.
        """
        if not isinstance(warm, int) or warm < 0:
            raise ValueError(f"warm={warm!r}: give a count of processes like 2, or 0 for none")
        self.limits, self.warm = limits or InterpreterLimits(), warm
        self._layers = isolating_layers(unisolated)
        self._lock = threading.RLock()
        self._processes: ProcessGroup[InterpreterProcess] = ProcessGroup()
        """All started processes."""
        self._to_start: deque[InterpreterProcess] = deque()
        self._starting: set[InterpreterProcess] = set()
        self._spare: deque[InterpreterProcess] = deque()
        self._open: weakref.WeakSet[Interpreter] = weakref.WeakSet()
        self._pending = 0
        self._finished = 0
        self._expected = 0
        self._cores = len(os.sched_getaffinity(0))
        self._owner_process = os.getpid()
        self._finalizer = weakref.finalize(self, _close, self._processes)
        _POOLS.add(self)
        with self._lock:
            self._refill()

    def open(self) -> Interpreter:
        """Return an interpreter; if no warm process is left, its process starts now."""
        with self._usable():
            interpreter = Interpreter(self)
            self._open.add(interpreter)
            self._expected = max(0, self._expected - 1)
            self._assign_process(interpreter)
            self._refill()
        return interpreter

    def expect(self, interpreters: int) -> None:
        """Announce that about so many interpreters will be opened soon, so that their processes start meanwhile."""
        with self._usable():
            self._expected = min(interpreters, _EXPECTED_PER_CORE * self._cores)
            self._refill()

    @property
    def starting(self) -> bool:
        """True if there are processes that are starting, or will start during polls."""
        return bool(self._starting or self._to_start)

    def poll(self, seconds: float = 0.0) -> int:
        """Handle messages, waiting up to ``seconds`` for a call to finish; return how many calls have finished."""
        deadline = time.monotonic() + seconds
        with self._usable():
            before = self._finished
        while True:
            with self._usable():
                self._handle_messages()
                finished, remaining = self._finished - before, deadline - time.monotonic()
                if finished or not self._pending or remaining <= 0:
                    return finished
                remaining = min(remaining, self._processes.seconds_to_deadline())
            self._processes.wait(remaining)  # another thread may handle the message

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

    def __exit__(self, *_: object) -> None:
        self.close()

    # The methods below are called with the lock held.

    def _usable(self) -> threading.RLock:
        if self._owner_process != os.getpid():
            raise ValueError("this pool belongs to the process that was forked; make an InterpreterPool here")
        if not self._finalizer.alive:
            raise ValueError("this pool is closed; make another InterpreterPool")
        return self._lock

    def _assign_process(self, interpreter: Interpreter) -> None:
        """Assign a process to an interpreter: a spare one, or else a new one that has to start."""
        while self._spare and self._spare[0].state == "idle":
            self._handle(self._processes.messages_of(self._spare[0]))  # removes it if it has ended
            if self._spare and self._spare[0].state == "idle":
                break
        if self._spare:
            process = self._spare.popleft()
        else:
            process = InterpreterProcess()
            self._to_start.append(process)
        process.owner, interpreter._process = interpreter, process
        self._start_some()

    def _refill(self) -> None:
        """Queue spare processes for starting, behind those that interpreters wait for."""
        while len(self._spare) < max(self.warm, self._expected):
            process = InterpreterProcess()
            self._spare.append(process)
            self._to_start.append(process)
        self._start_some()

    def _start_some(self) -> None:
        """Start queued processes, but only two per processor at the same time."""
        while self._to_start and len(self._starting) < 2 * self._cores:
            process = self._to_start.popleft()
            try:
                process.start(self.limits.for_supervisor(), self._layers, _START_LIMIT)
            except (ForkServerDied, OSError) as error:
                self._handle_lost_process(process, "killed", str(error))
                continue
            self._processes.add(process)
            self._starting.add(process)

    def _queue(self, call: Call) -> None:
        self._pending += 1
        call.interpreter._waiting.append(call)
        self._serve(call.interpreter)

    def _serve(self, interpreter: Interpreter) -> None:
        """Send the next call if there is one and the process is idle."""
        if interpreter._running is not None or not interpreter._waiting:
            return
        if interpreter._process is None:
            self._assign_process(interpreter)
            self._refill()
        process = interpreter._process
        if process is not None and process.state == "idle":
            interpreter._running = interpreter._waiting.popleft()
            load = 1 + len(self._processes) // self._cores
            process.mark_busy(load * wall_limit(self.limits.seconds) + _GRACE)
            source = interpreter._running.source.encode(errors="surrogatepass")
            self._processes.send(process, load.to_bytes(LOAD_BYTES, "big") + source)

    def _handle_messages(self) -> None:
        """Send and receive what is possible now, and end late processes."""
        self._handle(self._processes.messages())
        self._start_some()

    def _handle(self, messages: Iterable[tuple[InterpreterProcess, bytes | Literal["ended", "late"]]]) -> None:
        for process, message in messages:
            if isinstance(message, bytes):
                self._handle_message(process, json.loads(message))
            else:
                self._handle_lost_process(process, "timeout" if message == "late" else "killed")

    def _handle_message(self, process: InterpreterProcess, message: dict[str, Any]) -> None:
        interpreter, status = process.owner, message["status"]
        if status == "setup":
            self._handle_lost_process(process, "killed", clean(message["error"]))
        elif status == "ready":
            self._starting.discard(process)
            process.mark_idle()
            if interpreter is not None:
                interpreter._failed_starts = 0
                self._serve(interpreter)
        elif interpreter is not None and interpreter._running is not None:
            result = self.limits.to_result(message)
            self._finish(interpreter, result)
            if result.ended:
                interpreter._process = None
                self._end_process(process)
            else:
                process.mark_idle()
            self._serve(interpreter)

    def _handle_lost_process(
        self, process: InterpreterProcess, status: CellStatus, reason: str = "its process ended"
    ) -> None:
        """End a process that has died or is late, and give its call a result."""
        interpreter = process.owner
        was_starting = process.state in ("waiting", "starting")
        self._end_process(process)
        if interpreter is None:
            if process in self._spare:
                self._spare.remove(process)  # replaced only when the next interpreter is opened: it may never start
            return
        interpreter._process = None
        if was_starting:
            self._retry(interpreter, reason)
        elif interpreter._running is not None:
            self._finish(interpreter, CellResult(status, self.limits.end_reason(status)))
        else:
            interpreter._variables_lost = True
        self._serve(interpreter)

    def _retry(self, interpreter: Interpreter, reason: str) -> None:
        """Count a failed start; after some, the calls that wait for the interpreter get an error."""
        interpreter._failed_starts += 1
        if interpreter._failed_starts >= _START_ATTEMPTS:
            interpreter._failed_starts = 0
            error = SandboxError(f"could not start an interpreter in {_START_ATTEMPTS} attempts: {reason}")
            while interpreter._waiting:
                self._settle(interpreter._waiting.popleft(), error)

    def _finish(self, interpreter: Interpreter, result: CellResult) -> None:
        """Store the result of the running call."""
        call, interpreter._running = interpreter._running, None
        assert call is not None
        if interpreter._variables_lost and not call.replayed:
            result = replace(result, text=f"[{RESTARTED}]\n{result.text}")
            interpreter._variables_lost = False
        if result.ended:
            interpreter._history.clear()
        else:
            interpreter._history.append(call.source)
        self._settle(call, result)
        if call.replayed and result.ended:  # its result is not read
            interpreter._variables_lost = True
            while interpreter._waiting and interpreter._waiting[0].replayed:
                self._settle(interpreter._waiting.popleft(), result)

    def _settle(self, call: Call, result: CellResult | SandboxError) -> None:
        call._result = result
        self._finished += 1
        self._pending -= 1

    def _remove(self, interpreter: Interpreter) -> None:
        self._open.discard(interpreter)
        process, interpreter._process = interpreter._process, None
        if process is not None:
            if process in self._to_start:
                self._to_start.remove(process)
            self._end_process(process)
        calls = [*filter(None, [interpreter._running]), *interpreter._waiting]
        interpreter._running = None
        interpreter._waiting.clear()
        for call in calls:
            self._settle(call, CellResult("killed", "the interpreter was closed\n"))

    def _end_process(self, process: InterpreterProcess) -> None:
        self._starting.discard(process)
        if process.state not in ("waiting", "ended"):
            self._processes.remove(process)
        process.close()

    def _forget(self) -> None:
        """Leave all processes to the parent, in a fork of this process."""
        for process in self._processes.values():
            process.forget()
        self._processes.close()
        self._starting.clear()
        self._finalizer.detach()


def _close(processes: ProcessGroup[InterpreterProcess]) -> None:
    """End the processes of a pool that is closed, garbage-collected, or alive when this process exits."""
    for process in list(processes.values()):
        process.close()
    processes.close()


_POOLS: weakref.WeakSet[InterpreterPool] = weakref.WeakSet()


def _forget_all() -> None:
    for pool in list(_POOLS):
        pool._forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_all)
