"""Measure a program's processor time over all its processes, and its time without waiting for busy processors.

Its supervisor reads both from /proc. Imported in the sandbox, so it imports nothing slow.
"""

from __future__ import annotations

import os
import time
from itertools import chain

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import TypeVar

    from explorl.sandbox.disk import DiskQuota

    T = TypeVar("T")


def wall_limit(seconds: float) -> float:
    """Return the wall-clock seconds after which a program with this limit is killed, however little it could run."""
    return 4 * seconds + 2


def check_interval(disk: DiskQuota | None) -> float:
    """Return the longest time between two checks of the usage, in seconds; shorter if there is a disk to watch."""
    return 0.25 if disk is None else 0.05


class Usage:
    """Time used by this process, by children and by all their descendants since this object was made."""

    def __init__(self, proc: int, *children: int) -> None:
        """Start measuring; ``proc`` is an open descriptor of /proc."""
        self.processor = 0.0
        """Processor seconds of all processes together."""
        self.time = 0.0
        """Wall-clock seconds, less those in which processes waited for a processor while none of them had one."""
        self.clock = 0.0
        """Wall-clock seconds."""
        self._proc, self._children = proc, children
        self._begun, self._processor_before = time.monotonic(), time.process_time()
        self._processor_of: dict[int, float] = {}  # by pid; the last value for processes that have ended
        self._waited_of: dict[int, float] = {}  # by thread id
        self._tick = 1 / os.sysconf("SC_CLK_TCK")

    @property
    def knows_waiting(self) -> bool:
        """True if the kernel reports how long threads have waited for a processor."""
        return bool(self._waited_of)

    def update(self) -> None:
        """Read the current times."""
        clock, processor = time.monotonic() - self._begun, time.process_time() - self._processor_before
        waited_before = sum(self._waited_of.values())
        alive = 0.0
        for pid in chain.from_iterable(map(self._family, self._children)):
            own_time, children_time = self._processor_times(pid)
            alive += own_time + children_time
            self._processor_of[pid] = own_time
        processor += max(alive, sum(self._processor_of.values()))
        self._read_threads(os.getpid())
        lost = (clock - self.clock) - (processor - self.processor)
        if self.knows_waiting:  # otherwise all lost time may have been spent waiting for a processor
            lost = min(lost, sum(self._waited_of.values()) - waited_before)
        self.time += clock - self.clock - max(0.0, lost)
        self.clock, self.processor = clock, processor

    def _family(self, pid: int) -> Iterator[int]:
        """Yield a process and its descendants, and store how long each of their threads has waited."""
        yield pid
        for child in self._read_threads(pid):
            yield from self._family(child)

    def _read_threads(self, pid: int) -> list[int]:
        """Store how long each thread of a process has waited for a processor; return the children of all threads."""
        children: list[int] = []
        for thread in self._listed(f"{pid}/task"):
            children += map(int, self._read(f"{pid}/task/{thread}/children").split())
            state = self._read(f"{pid}/task/{thread}/schedstat").split()
            if len(state) == 3:
                self._waited_of[int(thread)] = int(state[1]) / 1e9
        return children

    def _processor_times(self, pid: int) -> tuple[float, float]:
        """Return the processor times of a process and of those children that it has waited for."""
        fields = self._read(f"{pid}/stat").rpartition(b")")[2].split()
        if len(fields) < 15:
            return self._processor_of.get(pid, 0.0), 0.0
        user, system, children_user, children_system = (int(field) * self._tick for field in fields[11:15])
        return user + system, children_user + children_system

    def _read(self, path: str) -> bytes:
        return self._open(path, lambda descriptor: os.read(descriptor, 1 << 14)) or b""

    def _listed(self, path: str) -> list[str]:
        return self._open(path, os.listdir) or []

    def _open(self, path: str, read: Callable[[int], T]) -> T | None:
        """Return what is read from a file or folder of /proc; None if its process has ended."""
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC, dir_fd=self._proc)
        except OSError:
            return None
        try:
            return read(descriptor)
        except OSError:
            return None
        finally:
            os.close(descriptor)


class UsageBudget:
    """What a program or a call may use from now on: time, measured as by `Usage`, and the disk if it is the host's.

    With ``load`` interpreters per processor a call may wait that many times longer for one; this time does not count.
    """

    def __init__(
        self,
        usage: Usage,
        seconds: float,
        load: int = 1,
        *,
        processor_seconds: float | None = None,
        disk: DiskQuota | None = None,
    ) -> None:
        self.is_late = False
        """True if the time was up."""
        self.is_full = False
        """True if too much was written to the host's disk."""
        self._usage, self._disk = usage, disk
        self._cores = len(os.sched_getaffinity(0))
        longest = wall_limit(seconds) * (max(1, load) if usage.knows_waiting else 1)
        self._time, self._clock = usage.time + seconds, usage.clock + longest
        self._processor = usage.processor + (seconds if processor_seconds is None else processor_seconds)
        self._next_check = 0.0
        self._plan()

    @property
    def is_exceeded(self) -> bool:
        return self.is_late or self.is_full

    @property
    def seconds_to_check(self) -> float:
        """Seconds until the next check."""
        return max(0.0, self._next_check - time.monotonic())

    def check(self) -> None:
        """Set `is_exceeded` if a limit is reached; does nothing before the next check is due."""
        if self.seconds_to_check == 0:
            self._usage.update()
            self.is_late = self._seconds_left() <= 0
            self.is_full = not self.is_late and self._disk is not None and self._disk.is_exceeded()
            self._plan()

    def _seconds_left(self, cores: int = 1) -> float:
        """Return the seconds until a limit can be reached if the processes use so many processors."""
        usage = self._usage
        return min(self._time - usage.time, (self._processor - usage.processor) / cores, self._clock - usage.clock)

    def _plan(self) -> None:
        self._next_check = time.monotonic() + min(
            max(self._seconds_left(self._cores), 0.005), check_interval(self._disk)
        )
