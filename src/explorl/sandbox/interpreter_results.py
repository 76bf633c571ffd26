"""What an interpreter may use, and what becomes of a call: see `interpreter`."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

from explorl.core.text import clean
from explorl.sandbox.programs import DEFAULTS

Status = Literal["ok", "error", "timeout", "memory", "exited", "killed", "refused"]
RESTARTED = "the interpreter was restarted, its variables are gone"
LEAST_MEMORY = 32 << 20
_ENDED = {"timeout", "memory", "exited", "killed"}


@dataclass(frozen=True)
class InterpreterLimits:
    """What an interpreter may use."""

    seconds: float = 5.0
    """Time of one call, and processor time of all its processes together. What it waits for a processor that others use
    does not count, up to four times as long and two seconds on the clock, times the interpreters per processor."""
    calls: int = 100
    """Calls in all; further ones are refused."""
    output: int = 4000
    """Characters that are kept of what a call shows: its first half and its last half."""
    memory: int = DEFAULTS.memory
    """Bytes of address space of each process."""
    processes: int = DEFAULTS.processes
    """Processes and threads, the first included."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            whole = isinstance(field.default, int)
            if isinstance(value, bool) or not isinstance(value, int if whole else int | float):
                kind = "a whole number" if whole else "a number of seconds"
                raise ValueError(f"{field.name}={value!r}: give {kind}, like {field.default!r}")
            if not 0 < value < math.inf:
                raise ValueError(f"{field.name}={value!r}: give a positive number, like {field.default!r}")
        if self.memory < LEAST_MEMORY:
            raise ValueError(
                f"memory={self.memory!r} bytes are too few for Python itself; give {LEAST_MEMORY} or more, like "
                f"{DEFAULTS.memory}"
            )

    def for_keeper(self) -> dict[str, Any]:
        """As keepers know them. The kernel counts processor time over all calls, the keeper that of each."""
        own = {"seconds": self.seconds, "memory": self.memory, "processes": self.processes, "characters": self.output}
        return {**asdict(DEFAULTS), **own, "cpu_seconds": (self.seconds + 1) * self.calls + 1}

    def told(self, message: dict[str, Any]) -> CellResult:
        """The result that a keeper's message tells of."""
        head, tail = (clean(message[name].replace("\r\n", "\n")) for name in ("head", "tail"))
        cut = message["cut"]
        text = f"{head}\n[{cut} characters cut]\n{tail}" if cut else head + tail
        status: Status = message["status"]
        if status in _ENDED:
            text += "\n" if text and not text.endswith("\n") else ""
            text += self.why_ended(status)
        return CellResult(status, text, cut, message["seconds"])

    def why_ended(self, status: Status) -> str:
        """The line that tells a model what has ended its interpreter."""
        reasons = {
            "timeout": f"TimeoutError: the call took longer than {self.seconds:g} s",
            "memory": f"MemoryError: the call took more than {self.memory / (1 << 20):g} MiB",
            "exited": "SystemExit: the code ended its process",
            "killed": "RuntimeError: the code's process was killed",
        }
        return f"{reasons[status]}; {RESTARTED}\n"


@dataclass(frozen=True)
class CellResult:
    """What became of a call."""

    status: Status
    """"ok"; "error": the cell raised; "timeout", "memory": it went beyond a limit; "exited": it ended its process;
    "killed": a signal did, or it broke off the connection; "refused": no calls are left. After "timeout", "memory",
    "exited" and "killed" all variables are gone. A cell that wants to can claim "ok" for "error", and no more."""
    text: str
    """What a notebook would show, `clean`, and what ended the interpreter."""
    cut: int = 0
    """Characters that were left out of the text's middle."""
    seconds: float = 0.0
    """On the clock."""

    @property
    def ended(self) -> bool:
        """Whether the interpreter's process, and all variables, are gone."""
        return self.status in _ENDED
