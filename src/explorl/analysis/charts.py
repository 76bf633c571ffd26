"""Charts as data: marks on one pair of axes, in the colours of the page or file that shows them.

A mark is a function of matplotlib axes and a `Palette`; the functions below return the usual ones. A colour is ``ink``,
``quiet``, ``bar``, or the index of a hue that is safe for colour-blind readers.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from explorl.stats import Interval

MIN_SMOOTHED = 24
"""Steps from which a curve is drawn as its running mean, over faint points for the measured values."""
DASHED, DOTTED = (0, (5, 2)), (0, (1.5, 1.5))
RUNNING_MEAN_NOTE = " Line: running mean; faint points: the steps."


@dataclass(frozen=True)
class Palette:
    """The colours of a chart; they depend on where it is shown."""

    ink: str
    """Text, axes, and curves of the whole run."""
    line: str
    """Grid lines."""
    bar: str
    """Bars that belong to no arm."""
    quiet: str
    """Less important parts."""
    paper: str
    """The background; also the colour of text on a bar."""
    arms: tuple[str, ...]
    """Hues safe for colour-blind readers: 0 is blue (positive, before), 1 is orange (negative, after)."""

    def __getitem__(self, colour: int | str) -> str:
        return self.arms[colour] if isinstance(colour, int) else str(getattr(self, colour))


Mark = Callable[[Any, Palette], None]


@dataclass(frozen=True)
class Chart:
    """A figure with one pair of axes: what is drawn on them, and what is written around them."""

    name: str
    """Name of its file, such as ``stages``."""
    title: str
    caption: str
    """Description of the figure, with the numbers that it shows."""
    marks: Sequence[Mark]
    x: str = ""
    y: str = ""
    size: tuple[float, float] = (4.8, 3.1)
    """Width and height in inches."""
    legend: str | None = None
    """Place of the legend, such as ``best``; None for no legend."""
    grid: str = "both"
    """Axes with grid lines: ``both``, ``x`` or ``y``."""

    def draw(self, figure: Any, palette: Palette) -> None:
        """Draw on an empty matplotlib figure."""
        axes = figure.subplots()
        for mark in self.marks:
            mark(axes, palette)
        axes.set_xlabel(self.x)
        axes.set_ylabel(self.y)
        if self.legend:
            axes.legend(loc=self.legend)
        if self.grid != "both":
            axes.grid(visible=False, axis="y" if self.grid == "x" else "x")
        axes.set_axisbelow(True)


@dataclass(frozen=True)
class PanelChart(Chart):
    """A figure with several pairs of axes, which one function draws."""

    panels: Mark = lambda figure, palette: None

    def draw(self, figure: Any, palette: Palette) -> None:
        """Draw on an empty matplotlib figure."""
        self.panels(figure, palette)
        for axes in figure.axes:
            axes.set_axisbelow(True)


def typeset(text: str) -> str:
    """Return text with minus signs instead of hyphens in negative numbers, except in quotations."""
    return re.sub(r"(?<![\w.'\"“-])-(?=\.?\d)", "−", text)


# ---------------------------------------------------------------------------- marks over x
def line(x: Any, y: Any, colour: int | str, label: str | None = None, *, dash: Any = "-", width: float = 1.9) -> Mark:
    """Draw a curve."""
    return lambda axes, palette: axes.plot(x, y, color=palette[colour], linestyle=dash, linewidth=width, label=label)


def band(x: Any, low: Any, high: Any, colour: int | str, *, strength: float = 0.15) -> Mark:
    """Fill the area between two curves."""
    return lambda axes, palette: axes.fill_between(
        x, low, high, color=palette[colour], alpha=strength, linewidth=0
    )  # fmt: skip


def dots(x: Any, y: Any, colour: int | str, label: str | None = None) -> Mark:
    """Draw faint points."""
    style = {"linestyle": "none", "marker": ".", "markersize": 4, "markeredgewidth": 0, "alpha": 0.45}
    return lambda axes, palette: axes.plot(x, y, color=palette[colour], label=label, **style)


def course(steps: Any, values: Any, colour: int | str, label: str, *, dash: Any = "-") -> Mark:
    """Draw a curve over steps: the steps as faint points, their running mean as a line."""
    window = smoothing_window(len(steps))

    def draw(axes: Any, palette: Palette) -> None:
        if window > 1:
            dots(steps, values, colour)(axes, palette)
        line(steps, running_mean(values, window), colour, label, dash=dash)(axes, palette)

    return draw


def rule(at: float, colour: int | str, label: str | None = None, *, dash: Any = "-", width: float = 0.8) -> Mark:
    """Draw a vertical line."""
    return lambda axes, palette: axes.axvline(
        at, color=palette[colour], linewidth=width, linestyle=dash, label=label
    )  # fmt: skip


def span(interval: Interval, colour: int | str, label: str | None = None) -> Mark:
    """Fill the area between two vertical lines."""
    return lambda axes, palette: axes.axvspan(
        interval.low, interval.high, color=palette[colour], alpha=0.15, linewidth=0, label=label
    )  # fmt: skip


# ---------------------------------------------------------------------------- rows
def interval_rows(
    names: Sequence[str],
    values: Sequence[Interval | None],
    colours: Sequence[int | str],
    *,
    filled: Sequence[bool] | None = None,
    scale: float = 1.0,
    shift: float = 0.0,
    marker: str = "o",
    label: str | None = None,
) -> Mark:
    """Draw a point with its interval for each value, from the bottom up; points that are not `filled` are rings."""

    def draw(axes: Any, palette: Palette) -> None:
        for y, (value, colour) in enumerate(zip(values, colours, strict=True)):
            if value is None:
                continue
            if math.isfinite(value.low):
                ends = scale * value.low, scale * value.high
                axes.hlines(y + shift, *ends, color=palette[colour], linewidth=1.6)
            face = palette[colour] if filled is None or filled[y] else "none"
            point = {"color": palette[colour], "markerfacecolor": face, "markersize": 5}
            axes.plot([scale * value.mean], [y + shift], marker, **point)
        if label is not None:
            axes.plot([], [], marker, color=palette[colours[0]], label=label)
        axes.locator_params(axis="x", nbins=6)
        axes.set_yticks(range(len(names)), names)
        axes.set_ylim(-0.6, len(names) - 0.4)
        axes.grid(visible=False, axis="y")

    return draw


def decades(low: float, high: float) -> list[float]:
    """Return powers of ten for the ticks of a logarithmic axis, at most six."""
    first, last = int(np.floor(np.log10(max(low, 1e-9)))), int(np.floor(np.log10(high)))
    ticks = [10.0**power for power in range(first, last + 1)]
    return ticks[:: -(-len(ticks) // 6)]


# ---------------------------------------------------------------------------- smoothing
def smoothing_window(count: int) -> int:
    """Return the window of the running mean for a curve of `count` steps: an odd number, 1 for a short curve."""
    return 1 if count < MIN_SMOOTHED else 2 * (count // 14) + 1


def running_mean(values: Sequence[float | None], window: int) -> np.ndarray:
    """Return the mean of `window` values around each position, of fewer at both ends; missing values are skipped."""
    data = np.array([np.nan if value is None else value for value in values], dtype=float)
    finite = np.isfinite(data)
    sums = np.concatenate([[0.0], np.cumsum(np.where(finite, data, 0.0))])
    counts = np.concatenate([[0], np.cumsum(finite)])
    positions = np.arange(len(data))
    reach = max(window, 1) // 2
    starts, ends = np.maximum(positions - reach, 0), np.minimum(positions + reach + 1, len(data))
    count = counts[ends] - counts[starts]
    return np.asarray(np.where(count > 0, (sums[ends] - sums[starts]) / np.maximum(count, 1), np.nan))
