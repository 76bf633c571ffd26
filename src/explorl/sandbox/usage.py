"""How long a program has run: the processor time of all its processes, and its time without what others took from it.

Read from /proc by its keeper. Imported in the sandbox, so it imports nothing that takes time.
"""

from __future__ import annotations

import os
import time
from itertools import chain

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

    from explorl.sandbox.disk import Disk


def longest(seconds: float) -> float:
    """Seconds on the clock after which a program with this limit is ended, however little of a processor it had."""
    return 4 * seconds + 2


def longest_look(disk: Disk | None) -> float:
    """Return the seconds after which a keeper looks again at what has been used: more often where that is a disk."""
    return 0.25 if disk is None else 0.05


class Usage:
    """What children with all their descendants, and this process with them, have used since this was made."""

    def __init__(self, proc: int, *children: int) -> None:
        """``proc``: a descriptor of /proc."""
        self.processor = 0.0
        """Seconds, of all processes together."""
        self.time = 0.0
        """Seconds on the clock, less those in which a process waited for a processor while none of them had one."""
        self.clock = 0.0
        """Seconds on the clock."""
        self._proc, self._children = proc, children
        self._begun, self._processor_before = time.monotonic(), time.process_time()
        self._processor_of: dict[int, float] = {}  # by process; of those that are gone what was seen last
        self._waited_of: dict[int, float] = {}  # by thread
        self._tick = 1 / os.sysconf("SC_CLK_TCK")

    @property
    def knows_waiting(self) -> bool:
        """Whether the kernel says how long a thread has waited for a processor."""
        return bool(self._waited_of)

    def update(self) -> None:
        clock, processor = time.monotonic() - self._begun, time.process_time() - self._processor_before
        waited_before = sum(self._waited_of.values())
        alive = 0.0
        for pid in chain.from_iterable(map(self._family, self._children)):
            own, buried = self._processor_times(pid)
            alive += own + buried
            self._processor_of[pid] = own
        processor += max(alive, sum(self._processor_of.values()))
        self._look_at_threads(os.getpid())
        lost = (clock - self.clock) - (processor - self.processor)
        if self.knows_waiting:  # otherwise nobody says who waited for what, and all of it may have been for a processor
            lost = min(lost, sum(self._waited_of.values()) - waited_before)
        self.time += clock - self.clock - max(0.0, lost)
        self.clock, self.processor = clock, processor

    def _family(self, pid: int) -> Iterator[int]:
        """A process and its descendants, and note how long each of their threads has waited."""
        yield pid
        for child in self._look_at_threads(pid):
            yield from self._family(child)

    def _look_at_threads(self, pid: int) -> list[int]:
        """Note how long each thread of a process has waited for a processor; the children of them all."""
        children: list[int] = []
        for thread in self._listed(f"{pid}/task"):
            children += map(int, self._read(f"{pid}/task/{thread}/children").split())
            state = self._read(f"{pid}/task/{thread}/schedstat").split()
            if len(state) == 3:
                self._waited_of[int(thread)] = int(state[1]) / 1e9
        return children

    def _processor_times(self, pid: int) -> tuple[float, float]:
        """Of a process, and of those of its children that it has waited for."""
        fields = self._read(f"{pid}/stat").rpartition(b")")[2].split()
        if len(fields) < 15:
            return self._processor_of.get(pid, 0.0), 0.0
        user, system, children_user, children_system = (int(field) * self._tick for field in fields[11:15])
        return user + system, children_user + children_system

    def _read(self, path: str) -> bytes:
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC, dir_fd=self._proc)
        except OSError:
            return b""
        try:
            return os.read(descriptor, 1 << 14)
        except OSError:
            return b""
        finally:
            os.close(descriptor)

    def _listed(self, path: str) -> list[str]:
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=self._proc)
        except OSError:
            return []
        try:
            return os.listdir(descriptor)
        except OSError:
            return []
        finally:
            os.close(descriptor)
