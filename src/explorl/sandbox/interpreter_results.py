"""The limits of an interpreter and the results of its calls."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from explorl.core.text import clean
from explorl.sandbox.programs import DEFAULTS, check_limits

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
