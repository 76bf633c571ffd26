"""Show the progress and curves of a running study or run on the terminal."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich import box
from rich.cells import cell_len
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table as RichTable
from rich.text import Text

from explorl.core.store import RunStore, StoreError, read_study
from explorl.core.terminal import ends_of_k, literal

BLOCKS = "▁▂▃▄▅▆▇█"
COLOURS = ("cyan", "yellow", "magenta", "green", "blue", "red")
CURVES = {"accuracy": "rewards/correctness/mean", "entropy": "entropy", "length": "completions/mean_length"}
LEAST_SPARKLINE = 4
"""Width below which only the latest value is shown, without a curve."""
_DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
"""Bits of a braille character: left and right column, from the top."""

Curve = tuple[Sequence[float], Sequence[float]]
"""Steps and values."""


@dataclass(frozen=True)
class ArmProgress:
    """Progress and curves of an arm, or of a single run."""

    name: str
    progress: str
    curves: dict[str, Curve]
    held_out: dict[str, float]
    """pass@k of the latest evaluation, for the smallest and the largest k."""


def watch(folder: str | Path, *, once: bool = False, console: Console, every: float = 2.0) -> None:
    """Show a study's or a run's folder, updated every `every` seconds until Ctrl-C; with `once`, print it once."""
    path = Path(folder)
    if once:
        console.print(frame(path, console.width))
        return
    with Live(frame(path, console.width), console=console, screen=console.is_terminal, auto_refresh=False) as live:
        try:
            while True:
                time.sleep(every)
                live.update(frame(path, console.width), refresh=True)
        except KeyboardInterrupt:
            pass


def frame(folder: Path, width: int = 80) -> RenderableType:
    """Return a plot of the training accuracy and a table with a row per arm."""
    title, arms = _study_progress(folder) if (folder / "study.json").is_file() else _run_progress(folder)
    table = RichTable(box=box.SIMPLE, title=literal(title), title_justify="left")
    scores = ends_of_k({name for arm in arms for name in arm.held_out}) or ["held out"]
    values = {
        name: [f"{arm.curves[name][1][-1]:.3g}" if arm.curves[name][1] else "–" for arm in arms] for name in CURVES
    }
    columns = [
        ["arm", *(arm.name for arm in arms)], ["progress", *(arm.progress for arm in arms)],
        *([name, *texts] for name, texts in values.items()), *([name, "100.0%"] for name in scores),
    ]  # fmt: skip
    free = width - 1 - sum(3 + max(map(cell_len, texts)) for texts in columns)
    room = free // len(CURVES) - 1
    table.add_column("arm", overflow="fold")
    table.add_column("progress")
    for name in CURVES:
        table.add_column(name)
    for name in scores:
        table.add_column(name, justify="right")
    for index, arm in enumerate(arms):
        cells = []
        for name in CURVES:
            line = sparkline(arm.curves[name][1], room) if room >= LEAST_SPARKLINE else ""
            cells.append(Text(f"{line} {values[name][index]}".lstrip()))
        held_out = [f"{arm.held_out[name]:.1%}" if name in arm.held_out else "–" for name in scores]
        table.add_row(literal((arm.name, COLOURS[index % len(COLOURS)])), arm.progress, *cells, *held_out)
    curves = {arm.name: arm.curves["accuracy"] for arm in arms if len(arm.curves["accuracy"][0]) > 1}
    has_step = any(len(arm.curves["accuracy"][0]) for arm in arms)
    message = Text("one training step so far: a curve needs two" if has_step else "no training step yet")
    plot = braille(curves, max(20, min(width - 10, 100)), 10) if curves else message
    return Group(table, Text("correct rollouts by step"), plot)


def sparkline(values: Sequence[float], width: int) -> str:
    """Return values as a row of blocks scaled from lowest to highest; neighbours are averaged to fit the width."""
    if not len(values):
        return ""
    parts = [float(np.mean(part)) for part in np.array_split(np.asarray(values, float), min(width, len(values)))]
    low, high = min(parts), max(parts)
    span = (high - low) or 1.0
    return "".join(BLOCKS[round((value - low) / span * (len(BLOCKS) - 1))] for value in parts)


def braille(curves: Mapping[str, Curve], width: int, height: int) -> Text:
    """Plot curves on common axes, each in its colour; a cell is two dots wide and four high."""
    lows, highs = zip(*[(min(values), max(values)) for _, values in curves.values()], strict=True)
    low, high = min(lows), max(highs)
    last = max(max(steps) for steps, _ in curves.values())
    first = min(min(steps) for steps, _ in curves.values())
    if high == low:
        low, high = low - 0.5, high + 0.5
    span, length = high - low, (last - first) or 1.0
    bits = np.zeros((height, width), dtype=int)
    owner = np.zeros((height, width), dtype=int)
    for index, (steps, values) in enumerate(curves.values()):
        at = np.linspace(steps[0], steps[-1], 4 * width)
        for step, value in zip(at, np.interp(at, steps, values), strict=True):
            x = round((step - first) / length * (2 * width - 1))
            y = round((high - value) / span * (4 * height - 1))
            bits[y // 4, x // 2] |= _DOTS[x % 2][y % 4]
            owner[y // 4, x // 2] = index
    text = Text(no_wrap=True)
    for y in range(height):
        label = f"{high - span * y / (height - 1 or 1):6.3f}" if y in (0, height - 1) else " " * 6
        text.append(f"{label} │")
        for x in range(width):
            text.append(chr(0x2800 + bits[y, x]), style=COLOURS[owner[y, x] % len(COLOURS)])
        text.append("\n")
    text.append(f"{'':7}└{'─' * width}\n{'':8}{first:<{width - 8}g}{last:>8g}")
    return text


# ---------------------------------------------------------------------------- reading
def _study_progress(folder: Path) -> tuple[str, list[ArmProgress]]:
    study = read_study(folder)
    arms = []
    for arm in study["arms"]:
        stores = [RunStore(folder / "arms" / arm["slug"] / f"seed-{seed}") for seed in study["seeds"]]
        due = (study.get("sequential") or {}).get("first", len(stores))
        stores = [store for index, store in enumerate(stores) if index < due or store.folder.exists()]
        total = arm["config"]["training"]["steps"] * len(stores)
        arms.append(_arm_progress(arm["name"], stores, total, arm["config"]["training"]["iterations"]))
    return f"{study['title']}, {folder}", arms


def _run_progress(folder: Path) -> tuple[str, list[ArmProgress]]:
    if not (folder / "config.yaml").is_file():
        raise StoreError(f"{folder} holds neither a study nor a run: study.json and config.yaml are missing")
    store = RunStore.open(folder)
    training = store.config()["training"]
    if store.kind == "sft":  # only the trainer knows the number of steps
        return str(folder), [_arm_progress(folder.name, [store], None, 1)]
    return str(folder), [_arm_progress(folder.name, [store], training["steps"], training["iterations"])]


def _arm_progress(name: str, stores: Sequence[RunStore], total: int | None, iterations: int) -> ArmProgress:
    lines = [store.metrics() for store in stores]
    train = [[line for line in run if line.get("kind") == "train"] for run in lines]
    scores = [[line for line in run if line.get("kind") == "evaluation"] for run in lines]
    ends = [run[-1] for run in scores if run]
    held_out = {name: float(np.mean([end[name] for end in ends])) for name in ends_of_k(ends[0] if ends else ())}
    steps = sum(run[-1]["step"] // iterations for run in train if run)
    failed = sum((store.folder / "error.txt").exists() for store in stores)
    progress = (f"{steps}" if total is None else f"{steps}/{total}") + (f", {failed} failed" if failed else "")
    curves = {name: _mean_curve(train, key, iterations) for name, key in CURVES.items()}
    return ArmProgress(name, progress, curves, held_out)


def _mean_curve(runs: Sequence[list[dict[str, Any]]], key: str, iterations: int) -> Curve:
    """Return the mean by step over the runs that have reached it."""
    values: dict[float, list[float]] = {}
    for lines in runs:
        for line in lines:
            if line.get(key) is not None:
                values.setdefault(line["step"] / iterations, []).append(line[key])
    steps = sorted(values)
    return steps, [float(np.mean(values[step])) for step in steps]
