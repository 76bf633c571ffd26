"""Compare all token records with log-probabilities alone through TRL's fused head, in one process.

    python benchmarks/token_records.py --tokens 32768 --vocab 151936 --width 896 --dtype bfloat16 --repeats 5
    python benchmarks/token_records.py --tokens 256 --vocab 3001 --width 64 --dtype float32      on a CPU

Two kinds of rows: "policy", peaked like a trained policy's (four of five tokens are nearly certain), and "flat",
normally distributed logits, whose branching factor is most of the vocabulary. `--lanes`, `--warps` and `--blocks` (MiB)
also time other settings of the kernel. "above" is the peak of memory above the inputs; differences are to the
definitions on whole rows of the same logits.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from trl.trainer import utils as trl

from explorl.modeling.logit_blocks import DTYPES, TokenRecords, block_bytes, defined_records, slices
from explorl.modeling.token_records import token_records


def make_rows(kind: str, options: argparse.Namespace) -> tuple[Tensor, Tensor, Tensor]:
    """Return states, weight and targets."""
    draw = torch.Generator(options.device).manual_seed(0)
    dtype = getattr(torch, options.dtype)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw, device=options.device)

    weight = random(options.vocab, options.width) / options.width**0.5
    states = random(options.tokens, options.width)
    targets = torch.randint(0, options.vocab, (options.tokens,), generator=draw, device=options.device)
    if kind == "policy":
        unsure = torch.rand(options.tokens, generator=draw, device=options.device)
        boost = torch.where(unsure < 0.2, 6 + 70 * unsure, 22.0)
        states = 2 * states + boost.unsqueeze(1) * weight[targets]
    return states.to(dtype), weight.to(dtype), targets


@contextmanager
def kernel(lanes: int, warps: int) -> Iterator[None]:
    from explorl.modeling import triton_records

    before = triton_records.LANES, triton_records.WARPS
    triton_records.LANES, triton_records.WARPS = lanes, warps
    try:
        yield
    finally:
        triton_records.LANES, triton_records.WARPS = before


def candidates(
    states: Tensor, weight: Tensor, targets: Tensor, options: argparse.Namespace
) -> dict[str, Callable[[], Any]]:
    """Return the functions to time, by name."""

    def fused(*outputs: str) -> Callable[[], Any]:
        size = trl._CHUNKED_LOGPROB_CHUNK_SIZE
        return lambda: trl._ChunkedLogProbFunction.apply(
            states, weight, None, targets, 1.0, size, None, 1.0, ("log_probs", *outputs)
        )

    def ours(**kwargs: Any) -> Callable[[], Any]:
        return lambda: token_records(states, weight, targets, **kwargs)

    def set_up(lanes: int, warps: int) -> Callable[[], Any]:
        def call() -> Any:
            with kernel(lanes, warps):
                return token_records(states, weight, targets)

        return call

    passes = {
        "TRL log-prob": fused(),
        "TRL log-prob, entropy": fused("entropy"),
        "records": ours(),
        "records, τ = 0.7": ours(temperature=0.7),
    }
    for block in options.blocks:
        passes[f"records, block {block} MiB"] = ours(block=block * 2**20)
    if states.is_cuda:
        for lanes, warps in product(options.lanes, options.warps):
            passes[f"records, {lanes} lanes, {warps} warps"] = set_up(lanes, warps)
        passes.update(parts(states, weight, targets))
    return passes


def parts(states: Tensor, weight: Tensor, targets: Tensor) -> dict[str, Callable[[], Any]]:
    """Return the product and the kernel alone, on the rows of one block, repeated for the number of blocks."""
    blocks = block_slices(states, weight)
    some = blocks[0]
    logits = states[some] @ weight.t()
    from explorl.modeling.triton_records import record

    out = TokenRecords(*(torch.empty(len(logits), dtype=kind, device=states.device) for kind in DTYPES))

    def product_alone() -> None:
        for _ in blocks:
            torch.mm(states[some], weight.t(), out=logits)

    def kernel_alone() -> None:
        for _ in blocks:
            record(logits, targets[some], None, 0.95, out)

    return {"  its products alone": product_alone, "  its kernel alone": kernel_alone}


def block_slices(states: Tensor, weight: Tensor) -> list[slice]:
    wide = weight.dtype.itemsize if states.is_cuda else 8
    return list(slices(len(states), len(weight), wide, block_bytes(states.device, None)))


def measure(call: Callable[[], Any], device: str) -> tuple[float, int]:
    """Return seconds, and the peak of memory above the previous level in bytes."""
    if device == "cpu":
        start = time.perf_counter()
        call()
        return time.perf_counter() - start, 0
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    start = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return time.perf_counter() - start, torch.cuda.max_memory_allocated() - before


def differences(states: Tensor, weight: Tensor, targets: Tensor, rows: int) -> dict[str, float]:
    """Return the largest difference to the definitions on the first rows; for `other_ids`, the share that differs."""
    some = block_slices(states, weight)[0]
    actual = token_records(states[some], weight, targets[some])
    logits = (states[some] @ weight.t())[:rows]
    exact = defined_records(logits, targets[some][:rows], None, 0.95)
    result = {}
    for name, got, wanted in zip(TokenRecords._fields, actual, exact, strict=True):
        apart = (got[:rows].double() - wanted.double()).abs()
        result[name] = float((apart > 0).double().mean() if name == "other_ids" else apart.max())
    result["mean branching"] = float(exact.branching.double().mean())
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--vocab", type=int, default=151936)
    parser.add_argument("--width", type=int, default=896)
    parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16")
    parser.add_argument("--rows", nargs="*", choices=["policy", "flat"], default=["policy", "flat"])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--blocks", type=int, nargs="*", default=[], help="other block sizes to time, in MiB")
    parser.add_argument("--lanes", type=int, nargs="*", default=[], help="powers of two, such as 1024 2048 4096")
    parser.add_argument("--warps", type=int, nargs="*", default=[8], help="with --lanes, such as 4 8 16")
    parser.add_argument("--checked", type=int, default=256, help="rows that are compared with the definitions")
    parser.add_argument("--out", type=Path, help="JSON file")
    options = parser.parse_args()
    console = Console()
    name = torch.cuda.get_device_name() if options.device == "cuda" else "CPU"
    result: dict[str, Any] = {"device": name, "torch": torch.__version__, "rows": {}}
    result |= {key: getattr(options, key) for key in ("tokens", "vocab", "width", "dtype", "repeats")}
    for kind in options.rows:
        states, weight, targets = make_rows(kind, options)
        calls = candidates(states, weight, targets, options)
        times: dict[str, list[float]] = {key: [] for key in calls}
        above: dict[str, int] = {}
        for call in calls.values():  # compiles
            call()
        for _ in range(options.repeats):
            for key, call in calls.items():
                seconds, above[key] = measure(call, options.device)
                times[key].append(seconds)
        checked = differences(states, weight, targets, options.checked)
        median = {key: statistics.median(values) for key, values in times.items()}
        stock = median["TRL log-prob"]
        table = Table(
            title=f"{kind} rows: {options.tokens} × {options.vocab} × {options.width}, {options.dtype}, {name}"
        )
        for column in ("", "ms, median", "min", "× TRL log-prob", "above, MiB"):
            table.add_column(column, justify="left" if not column else "right")
        for key, seconds in median.items():
            memory = f"{above[key] / 2**20:.0f}" if options.device == "cuda" else "–"
            least = min(times[key])
            table.add_row(key, f"{1e3 * seconds:.2f}", f"{1e3 * least:.2f}", f"{seconds / stock:.2f}", memory)
        console.print(table)
        console.print("largest differences:", ", ".join(f"{key} {value:.3g}" for key, value in checked.items()))
        result["rows"][kind] = {"seconds": times, "bytes_above": above, "differences": checked}
    if options.out:
        options.out.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
