"""Measure interpreters: the overhead of a call, the time to start, and memory while they wait.

    python benchmarks/interpreter.py                    200 interpreters, 3 calls each
    python benchmarks/interpreter.py --interpreters 20

Single calls are timed by the caller, minus the time of the code itself; on a busy machine the minimum is the cost of a
call, and the rest is waiting for a processor. Processor time includes the caller and all processes of the interpreter,
with the code itself. Memory is the private pages of each interpreter's processes, without the pages shared with the
fork server and without the kernel's own memory.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

from explorl.sandbox.fork_client import fork_server_client
from explorl.sandbox.interpreter import Interpreter, InterpreterLimits
from explorl.sandbox.interpreter_pool import InterpreterPool
from explorl.sandbox.programs import capabilities
from explorl.stats import Table

BUSY = 0.01
CELLS = {
    "1": (0.0, "1"),
    "print and a variable": (0.0, "x = 6 * 7\nprint(x)"),
    "an error": (0.0, "1 / 0"),
    "4,000 characters": (0.0, "'x' * 3998"),
    "10 ms of work": (BUSY, f"import time\nend = time.perf_counter() + {BUSY}\nwhile time.perf_counter() < end: pass"),
}
"""Seconds that the code itself takes, and the code."""


def calls(count: int) -> list[list[Any]]:
    """Return the overhead of single calls, in milliseconds."""
    rows: list[list[Any]] = []
    with InterpreterPool(InterpreterLimits(calls=len(CELLS) * (count + 1))) as pool:
        python = pool.open()
        for name, (own, source) in CELLS.items():
            python.run(source)
            taken = []
            before = processor_time()
            for _ in range(count):
                start = time.perf_counter()
                python.run(source)
                taken.append((time.perf_counter() - start - own) * 1000)
            used = (processor_time() - before) / count * 1000
            taken.sort()
            row = [taken[0], statistics.median(taken), taken[int(0.95 * count)], used]
            rows.append([f"call: {name}", "ms", *row])
    return rows


def side_by_side(count: int, rounds: int) -> list[list[Any]]:
    """Measure many interpreters at once: start, memory while they wait, calls and end."""
    with InterpreterPool(InterpreterLimits(calls=rounds + 1), warm=0) as pool:
        start = time.perf_counter()
        opened = [pool.open() for _ in range(count)]
        together(opened, "x = 0")
        started = time.perf_counter() - start
        bare = private()
        start = time.perf_counter()
        for _ in range(rounds):
            together(opened, "x += 1\nprint(x)")
        called = time.perf_counter() - start
        rows = [
            [f"{count} at once: start, each", "ms", None, started / count * 1000, None, None],
            [f"{count} at once: memory, each", "MiB", None, sum(bare) / count, None, None],
            [f"{count} at once: {rounds} calls, each call", "ms", None, called / count / rounds * 1000, None, None],
        ]
        start = time.perf_counter()
        for python in opened:
            python.close()
        while private():
            time.sleep(0.001)
        rows.append(
            [f"{count} at once: end, each", "ms", None, (time.perf_counter() - start) / count * 1000, None, None]
        )
    return rows


def together(opened: list[Interpreter], source: str) -> None:
    for call in [python.submit(source) for python in opened]:
        assert call.result().status == "ok"


def processor_time() -> float:
    """Return the processor seconds of this process and all descendants of the fork server."""
    total = time.process_time()
    for pid in descendants():
        total += int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) / 1e9
    return total


def private() -> list[float]:
    """Return the private memory of each descendant of the fork server, in MiB."""
    sizes = []
    for pid in descendants():
        try:
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        except OSError:
            continue
        sizes.append(sum(int(line.split()[1]) for line in lines if line.startswith("Private_")) / 1024)
    return sizes


def descendants() -> list[int]:
    """Return the descendants of the fork server."""
    assert fork_server_client._running is not None
    waiting, pids = children(fork_server_client._running[0].pid), []
    while waiting:
        pids.append(waiting.pop())
        waiting += children(pids[-1])
    return pids


def children(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--interpreters", type=int, default=200)
    parser.add_argument("--calls", type=int, default=200, help="number of single calls of each kind")
    parser.add_argument("--rounds", type=int, default=3, help="calls of each interpreter, in parallel")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    print(f"sandbox: {', '.join(capabilities().layers)} and limits")
    rows = calls(args.calls) + side_by_side(args.interpreters, args.rounds)
    table = Table(
        ["what", "unit", "least", "median or mean", "95 %", "processor"], rows, title="interpreters", number=".2f"
    )
    table.print()
    if args.json is not None:
        table.write(args.json)


if __name__ == "__main__":
    main()
