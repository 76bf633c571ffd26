"""Measure the cost of strategies on several processes: with the whole batch gathered, and on each process's own rows.

    python benchmarks/gathered_batch.py --json gathered.json                          # two and four gloo processes
    python benchmarks/gathered_batch.py --processes 2 --shapes 64x2048 --strategies egsw
    python benchmarks/gathered_batch.py --processes 1 --shapes 1024x16384 16x16384 --device cuda

For each number of processes and each shape of the whole batch (completions × tokens), new processes make a `Batch` of
random token statistics, apply the strategies and put the result back, as `ExplorationTrainer` does in each step: once
with the whole batch gathered, once on parts. Reported for each process, and for the one with the highest value:

- batch: bytes of the `Batch` itself;
- peak: the peak of memory above the level before the step (resident on a CPU, allocated on a GPU);
- sent: bytes that it must send, counted at every collective: x · (P − 1) if x bytes are gathered, and
  2x · (P − 1)/P if they are reduced, as in a ring;
- calls: number of collectives;
- seconds: time of a step, the second of two. It says little if processes share cores.

The results of both ways are compared, and the largest difference is reported.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import platform
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from accelerate import PartialState
from accelerate.utils import gather, pad_across_processes
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.multiprocessing.spawn import start_processes

from explorl.strategies import Batch, build_all
from explorl.strategies.grpo import grpo_advantages
from explorl.training.grpo.batch import TokenStats, generation_batch, put_back
from explorl.training.grpo.correct import Correct
from explorl.training.grpo.shaping import shape

COMPANY = ("ppl_shaping", "mask_truncated", "egsw", "forking_tokens", "kl_cov")
GENERATIONS = 8


@dataclass(frozen=True)
class Cell:
    """One measurement."""

    processes: int
    rows: int
    tokens: int
    gathered: bool
    strategies: tuple[str, ...]
    device: str


@dataclass
class Cost:
    """The cost of a step on one process."""

    batch: int
    peak: int
    sent: int = 0
    calls: int = 0
    seconds: float = math.nan


# ---------------------------------------------------------------- the batch


def own_rows(cell: Cell, rank: int) -> tuple[TokenStats, dict[str, Tensor], Tensor]:
    """Return token statistics and TRL's dictionary of this process's rows, and the rewards of all rows."""
    count = cell.rows // cell.processes
    rewards = (torch.randn(cell.rows, generator=torch.Generator().manual_seed(0)) > 0).float().to(cell.device)
    advantages = grpo_advantages(rewards, torch.arange(cell.rows, device=cell.device) // GENERATIONS)
    fields: list[list[Tensor]] = [[], [], [], [], []]
    for row in range(rank * count, (rank + 1) * count):
        draw = torch.Generator().manual_seed(row + 1)
        length = int(torch.randint(cell.tokens // 4, cell.tokens + 1, (), generator=draw))
        present = (torch.arange(cell.tokens) < length).float()
        noise = torch.randn(3, cell.tokens, generator=draw)
        logps = -noise[0].abs() * present
        for field, values in zip(
            fields,
            (logps, noise[1].abs() * present, present * 3, logps + 0.1 * noise[2] * present, present),
            strict=True,
        ):
            field.append(values.to(cell.device))
    logps, entropy, branching, sampling_logps, present = (torch.stack(field) for field in fields)
    output = {
        "completion_ids": present.long(),
        "completion_mask": present.long(),
        "advantages": advantages[rank * count : (rank + 1) * count],
    }
    return TokenStats(logps, entropy, branching, sampling_logps), output, rewards


def step(cell: Cell, rank: int, rows: tuple[TokenStats, dict[str, Tensor], Tensor]) -> tuple[Batch, dict[str, Any]]:
    """Do what the trainer does after sampling a batch."""
    recorded, output, rewards = rows[0], dict(rows[1]), rows[2]
    count = cell.rows // cell.processes
    batch = generation_batch(
        SimpleNamespace(gather=gather, pad_across_processes=pad_across_processes),
        recorded,
        output,
        prompts=[f"What is {(rank * count + row) // GENERATIONS} + 1?" for row in range(count)],
        parts=rewards.unsqueeze(1),
        rewards=rewards,
        correct=Correct.of(("score", 1.0), ["score"]),
        ends=[1],
        generations=GENERATIONS,
        temperature=1.0,
        row_temperature=None,
        step=0,
        max_length=cell.tokens,
        gathered=cell.gathered,
    )
    put_back(shape(build_all(cell.strategies), batch), output, batch, process=rank, penalties=True)
    return batch, output


# ---------------------------------------------------------------- measurements


class Traffic:
    """Counts the bytes that this process must send, and its calls."""

    def __init__(self) -> None:
        self.sent = self.calls = 0

    @contextmanager
    def counted(self, processes: int) -> Iterator[None]:
        """Count tensors passed to the backend; objects are gathered as tensors, too."""
        names = {"all_gather": 1, "all_reduce": 0}
        homes = (dist, dist.distributed_c10d)
        before = {(home, name): getattr(home, name) for home in homes for name in names}

        def counting(call: Callable[..., Any], name: str) -> Callable[..., Any]:
            def counted(*args: Any, **more: Any) -> Any:
                size = args[names[name]].nbytes
                self.calls += 1
                self.sent += int(size * (processes - 1) * (1 if name == "all_gather" else 2 / processes))
                return call(*args, **more)

            return counted

        for (home, name), call in before.items():
            setattr(home, name, counting(call, name))
        try:
            yield
        finally:
            for (home, name), call in before.items():
                setattr(home, name, call)


class Memory:
    """Measures the peak of memory above the level at the start."""

    def __init__(self, device: str) -> None:
        self.cuda = device.startswith("cuda")
        if self.cuda:
            torch.cuda.reset_peak_memory_stats()
            self.start = torch.cuda.memory_allocated()
        else:
            Path("/proc/self/clear_refs").write_text("5")  # reset the peak
            self.start = _resident("VmRSS")

    def above(self) -> int:
        return (torch.cuda.max_memory_allocated() if self.cuda else _resident("VmHWM")) - self.start


def _resident(field: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


def measured(cell: Cell, rank: int) -> tuple[Cost, dict[str, Any]]:
    """Measure the memory of one step, and the traffic and time of a second one."""
    rows = own_rows(cell, rank)
    memory = Memory(cell.device)
    batch, output = step(cell, rank, rows)
    cost = Cost(batch=_bytes(batch), peak=memory.above())
    del batch, output
    traffic = Traffic()
    with traffic.counted(cell.processes):
        _synchronized(cell)
        start = time.perf_counter()
        _, output = step(cell, rank, rows)
        _synchronized(cell)
        cost.seconds = time.perf_counter() - start
    cost.sent, cost.calls = traffic.sent, traffic.calls
    return cost, output


def _bytes(batch: Batch) -> int:
    tensors = {value.data_ptr(): value.nbytes for value in vars(batch).values() if isinstance(value, Tensor)}
    return sum(tensors.values())


def _synchronized(cell: Cell) -> None:
    if cell.device.startswith("cuda"):
        torch.cuda.synchronize()


# ---------------------------------------------------------------- processes


def one_process(rank: int, cell: Cell, folder: str) -> None:
    torch.set_num_threads(1)
    if cell.processes > 1:
        for name in ("RANK", "LOCAL_RANK"):
            os.environ[name] = str(rank)
        for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
            os.environ[name] = str(cell.processes)
        method = f"file://{folder}/store"
        dist.init_process_group("gloo", init_method=method, rank=rank, world_size=cell.processes)
        assert PartialState(cpu=True, backend="gloo").num_processes == cell.processes
    cost, output = measured(cell, rank)
    torch.save((asdict(cost), output), Path(folder) / f"{rank}.pt")
    if cell.processes > 1:
        dist.destroy_process_group()


def run(cell: Cell) -> tuple[list[Cost], list[dict[str, Any]]]:
    with tempfile.TemporaryDirectory() as folder:
        if cell.processes == 1:
            one_process(0, cell, folder)
        else:
            start_processes(one_process, (cell, folder), cell.processes, start_method="forkserver")
        measurements = [torch.load(Path(folder) / f"{rank}.pt", weights_only=False) for rank in range(cell.processes)]
    return [Cost(**cost) for cost, _ in measurements], [output for _, output in measurements]


def difference(first: Sequence[dict[str, Any]], other: Sequence[dict[str, Any]]) -> float:
    """Return the largest difference between the results of the two ways."""
    return max(
        float((mine[name].double() - theirs[name].double()).abs().max())
        for mine, theirs in zip(first, other, strict=True)
        for name in mine
    )


# ---------------------------------------------------------------- the table


def compared(processes: int, shape: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    rows, tokens = map(int, shape.split("x"))
    if rows % processes or rows % GENERATIONS:
        raise SystemExit(f"--shapes {shape}: {rows} rows cannot be divided among {processes} processes in groups of 8")
    measurements, outputs = [], []
    for gathered in [True] if processes == 1 else [True, False]:
        cell = Cell(processes, rows, tokens, gathered, tuple(options.strategies), options.device)
        costs, output = run(cell)
        outputs.append(output)
        most = {name: max(getattr(cost, name) for cost in costs) for name in asdict(costs[0])}
        measurements.append({**asdict(cell), **most})
    if len(outputs) == 2:
        measurements[1]["difference"] = difference(*outputs)
    return measurements


def table(results: Sequence[dict[str, Any]]) -> Table:
    rendered = Table("processes", "answers x tokens", "batch is", "Batch MiB", "peak MiB", "sent MiB", "calls", "s")
    for result in results:
        sizes = [f"{result[name] / 2**20:.2f}" for name in ("batch", "peak", "sent")]
        shape, kind = f"{result['rows']} x {result['tokens']}", "whole" if result["gathered"] else "in parts"
        rendered.add_row(
            str(result["processes"]), shape, kind, *sizes, str(result["calls"]), f"{result['seconds']:.2f}"
        )
    return rendered


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--shapes", nargs="+", default=["64x1024", "128x2048", "128x8192"], help="completions x tokens")
    parser.add_argument("--strategies", nargs="+", default=list(COMPANY))
    parser.add_argument("--device", default="cpu", help="device of a single process; several run on the CPU")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.device != "cpu" and options.processes != [1]:
        raise SystemExit(f"--device {options.device} is for --processes 1; several processes run on the CPU")
    multiprocessing.get_context("forkserver").set_forkserver_preload(["accelerate", "explorl.training.grpo.batch"])
    results = [
        result
        for processes in options.processes
        for shape in options.shapes
        for result in compared(processes, shape, options)
    ]
    Console().print(table(results))
    differences = [result["difference"] for result in results if "difference" in result]
    if differences:
        Console().print(f"largest difference between the two: {max(differences):.1e}")
    if options.json:
        about = {"machine": platform.processor() or platform.machine(), "torch": torch.__version__}
        options.json.write_text(json.dumps({**about, "results": results}, indent=1))


if __name__ == "__main__":
    main()
