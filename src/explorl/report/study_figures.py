"""Marks of a study's charts: how each arm is drawn."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from explorl.analysis.charts import DASHED, DOTTED, Mark, Palette, running_mean, smoothing_window
from explorl.report.figures import ARM_COLOURS, PAGE, VARIABLES

PANEL = (4.8, 3.1)
"""Size of a panel in inches; narrow enough for its text to stay readable on a phone."""
MAX_POINTS = 200
"""Points drawn of a curve; longer curves are thinned evenly."""
MAX_MARKED = 40
"""Points of an unsmoothed curve up to which each point gets a marker."""
NAME_POINTS = 10
"""Height of a name beside a line, in points."""
MANY = 6
"""With more curves than this, the page shows the bands of arms other than the baseline only when they are chosen."""

_MARKERS = "os^DvPX*"
_DASHES: tuple[Any, ...] = ("-", DASHED, DOTTED, (0, (6, 2, 1.5, 2)))


@dataclass(frozen=True)
class LineStyle:
    """How an arm is drawn in every figure: colour, dash (None: no line) and marker."""

    colour: int | str
    """Of a `Palette`."""
    dash: Any
    marker: str
    index: int = 0
    """Index by which the page finds the parts of the arm; 0 is the baseline."""

    def part(self, kind: str) -> str:
        """Return the id of one of the arm's parts, which `_page_tag` turns into attributes."""
        return f"arm {self.index} {kind}"


@dataclass(frozen=True)
class Series:
    """A curve with an optional band; None is a missing value."""

    x: Sequence[float | None]
    mean: Sequence[float | None]
    low: Sequence[float | None] = ()
    high: Sequence[float | None] = ()
    raw: Sequence[float | None] = ()
    """The measured values if `mean` is their running mean, otherwise empty."""

    def thinned(self) -> Series:
        """Return the curve with at most `MAX_POINTS` points, including the last."""
        count = len(self.x)
        if count <= MAX_POINTS:
            return self
        indices = sorted({round(index * (count - 1) / (MAX_POINTS - 1)) for index in range(MAX_POINTS)})
        columns = (self.x, self.mean, self.low, self.high, self.raw)
        return Series(*([values[i] for i in indices if i < len(values)] for values in columns))

    def smoothed(self) -> Series:
        """Return the running mean of a long curve, with the measured values as `raw`; a short curve is unchanged."""
        window = smoothing_window(len(self.mean))
        if window < 2:
            return self
        ends = [
            _finite_values(running_mean(values, window)) if values else ()
            for values in (self.mean, self.low, self.high)
        ]
        return Series(self.x, ends[0], ends[1], ends[2], self.mean)


def frame_of(series: Iterable[Series]) -> tuple[float, float] | None:
    """Return the y limits if bands are so wide that they would flatten the lines, and None otherwise.

    The limits leave as much space above and below the lines as the lines take.
    """
    curves = list(series)
    lines = [value for curve in curves for value in (*curve.mean, *curve.raw) if value is not None]
    bands = [value for curve in curves for value in (*curve.low, *curve.high) if value is not None]
    if not lines or not bands or min(lines) == max(lines):
        return None
    low, high = min(lines), max(lines)
    reach = high - low
    if min(bands) >= low - reach and max(bands) <= high + reach:
        return None
    return max(min(bands), low - reach), min(max(bands), high + reach)


@dataclass(frozen=True)
class Bar:
    """One bar: its arm, its segments from the left, and the text beside it."""

    arm: str
    segments: Sequence[float]
    note: str = ""


def line_styles(arms: Sequence[str], baseline: str | None) -> dict[str, LineStyle]:
    """Return a line style for each arm; the baseline is drawn in ink, and the policy before training in grey."""
    styles: dict[str, LineStyle] = {}
    others = 0
    for name in arms:
        if name == baseline:
            styles[name] = LineStyle("ink", "-", "o")
            continue
        styles[name] = LineStyle(
            others % ARM_COLOURS,
            _DASHES[(others + 1) % len(_DASHES)],
            _MARKERS[(others + 1) % len(_MARKERS)],
            others + 1,
        )
        others += 1
    return styles | ({} if "start" in styles else {"start": LineStyle("quiet", (0, (1, 1.2)), "+", others + 1)})


def swatch(style: LineStyle) -> str:
    """Return a short piece of an arm's line with its marker, for legends; without ids, as a page repeats it."""
    from matplotlib.markers import MarkerStyle

    marker = MarkerStyle(style.marker)
    shape: Any = marker.get_path().transformed(marker.get_transform())
    corners = "".join(
        "M" + "L".join(f"{18 + 7 * x:.1f} {7 - 7 * y:.1f}" for x, y in polygon)
        for polygon in shape.to_polygons(closed_only=False)
    )
    line = ""
    if style.dash is not None:
        dashes = "" if style.dash == "-" else " ".join(f"{2 * part:g}" for part in style.dash[1])
        line = f'<path d="M1 7H35" stroke-width="2" stroke-dasharray="{dashes}"/>'
    colour = VARIABLES[PAGE[style.colour]]
    return (
        f'<svg aria-hidden="true" viewBox="0 0 36 14" style="stroke: {colour}; fill: {colour}">'
        f'{line}<path d="{corners}"/></svg>'
    )


def lines(
    series: Mapping[str, Series],
    styles: Mapping[str, LineStyle],
    *,
    zero: bool = False,
    powers_of_two: bool = False,
    named: bool = False,
) -> Mark:
    """Return a line and a band per arm; `zero` adds a line at 0, `named` the arms' names."""
    many = len(series) > MANY
    strength = 0.16 if many else min(0.16, 0.6 / max(1, len(series)))  # bands must not hide the lines

    def draw(axes: Any, palette: Palette) -> None:
        for name, curve in series.items():
            style, points = styles[name], curve.thinned()
            colour, xs = palette[style.colour], _nan_values(points.x)
            if points.raw:
                dots = {"linestyle": "none", "marker": ".", "markersize": 5, "markeredgewidth": 0, "alpha": 0.4}
                axes.plot(xs, _nan_values(points.raw), color=colour, gid=style.part("dots"), zorder=1.5, **dots)
            marked = not points.raw and len(xs) <= MAX_MARKED
            axes.plot(
                xs, _nan_values(points.mean), color=colour, linestyle=style.dash, linewidth=1.9, marker=style.marker,
                markersize=5, markevery=1 if marked else [len(xs) - 1], gid=style.part("line"),
                zorder=2.0 if style.index else 2.5, label=name,
            )  # fmt: skip
            low, high = _nan_values(points.low), _nan_values(points.high)
            if len(low) == len(high) == len(xs):
                area = axes.fill_between(xs, low, high, color=colour, alpha=strength, linewidth=0)
                area.set_gid(style.part("extra" if many and style.index else "band"))
        if zero:
            axes.axhline(0, color=palette.ink, linewidth=0.8)
        if (frame := frame_of(series.values())) is not None:
            axes.set_ylim(*frame)
        if powers_of_two:
            ticks = sorted({int(k) for curve in series.values() for k in curve.x if k is not None and k >= 1})
            ticks = [k for k in ticks if k == ticks[-1] or ticks[-1] / k >= 1.5]  # 512 and 640 would overlap
            axes.set_xscale("log", base=2)
            axes.set_xticks(ticks, [str(k) for k in ticks])
            axes.minorticks_off()
        axes.margins(y=0.06)
        if named:
            _write_names(axes, series, styles, palette)

    return draw


def labelled_lines(series: Mapping[str, Series]) -> Mark:
    """Return the lines of one arm, each with its name at its end."""

    def draw(axes: Any, palette: Palette) -> None:
        for index, (name, curve) in enumerate(series.items()):
            points = curve.thinned()
            xs, mean, low, high = (_nan_values(values) for values in (points.x, points.mean, points.low, points.high))
            colour, markevery = palette.arms[index % ARM_COLOURS], 1 if len(xs) <= MAX_MARKED else [-1]
            style = {"linestyle": _DASHES[index % len(_DASHES)], "marker": _MARKERS[index % len(_MARKERS)]}
            axes.plot(xs, mean, color=colour, linewidth=1.9, markersize=4, markevery=markevery, **style)
            if len(low) == len(high) == len(xs):
                axes.fill_between(xs, low, high, color=colour, alpha=0.12, linewidth=0)
            if mean:
                _write_name(axes, name, (xs[-1], mean[-1]))
        axes.margins(x=0.02, y=0.06)
        low, high = axes.get_xlim()
        axes.set_xlim(low, high + 0.17 * (high - low))
        axes.set_xticks([tick for tick in axes.get_xticks() if low <= tick <= high])

    return draw


def plane(
    paths: Mapping[str, tuple[Sequence[float | None], Sequence[float | None]]],
    styles: Mapping[str, LineStyle],
    *,
    start: tuple[float, float] | None = None,
    measured: bool = False,
) -> Mark:
    """Return the path of each arm through a plane, ending at a large marker.

    The paths begin at `start`, or each at an open circle. `measured` draws the points themselves, with a dot at each;
    otherwise the points are steps, drawn as a running mean.
    """

    def draw(axes: Any, palette: Palette) -> None:
        if start is not None:
            style = styles["start"]
            axes.plot(
                [start[0]], [start[1]], color=palette[style.colour], marker=style.marker, markersize=13,
                markeredgewidth=2.4, gid=style.part("marker"), zorder=3,
            )  # fmt: skip
        for name, (first, second) in paths.items():
            style = styles[name]
            points = [(a, b) for a, b in zip(first, second, strict=False) if a is not None and b is not None]
            if not points:
                continue
            window = 1 if measured else smoothing_window(len(points))
            path = [running_mean(values, window) for values in zip(*points, strict=True)]
            xs, ys = zip(*_thin(list(zip(*path, strict=True))), strict=True)
            options = {"color": palette[style.colour], "gid": style.part("line")}
            axes.plot(xs, ys, linestyle=style.dash, linewidth=1.9, marker="." if measured else None, **options)
            if start is None:
                axes.plot(xs[:1], ys[:1], marker="o", markersize=7, markerfacecolor="none", **options)
            axes.plot(xs[-1:], ys[-1:], marker=style.marker, markersize=9, **options)
        axes.margins(y=0.06)

    return draw


def regions(
    counts: Sequence[tuple[Sequence[str], int]], arms: Sequence[str], styles: Mapping[str, LineStyle], x: str
) -> Mark:
    """Return a bar for each region of overlapping sets (Lex et al. 2014), and the markers of its arms on the left."""

    def draw(figure: Any, palette: Palette) -> None:
        from matplotlib.ticker import MaxNLocator

        width = min(0.09 * len(arms), 0.5)
        left, right = figure.subplots(1, 2, sharey=True, width_ratios=[width, 1 - width])
        for row, (members, count) in enumerate(counts):
            for column, name in enumerate(arms):
                style = styles[name]
                if name in members:
                    mark = {"color": palette[style.colour], "marker": style.marker, "markersize": 7}
                    left.plot([column], [row], markeredgewidth=1.6, **mark)
                else:
                    left.plot([column], [row], color=palette.line, marker=".", markersize=5)
            right.barh([row], [count], height=0.62, color=palette.bar)
            _write_beside(right, f"{count}", count, row)
        left.set_xlim(-0.6, len(arms) - 0.4)
        left.set_axis_off()
        right.set_ylim(len(counts) - 0.4, -0.6)
        right.set_yticks([])
        right.set_xlim(0, max([count for _, count in counts], default=1) * 1.15 or 1)
        right.set_xlabel(x)
        right.xaxis.set_major_locator(MaxNLocator(5, integer=True))
        right.grid(visible=False, axis="y")

    return draw


def regions_size(rows: int) -> tuple[float, float]:
    """Return the size in inches of a chart of so many regions."""
    return PANEL[0], 0.75 + 0.27 * rows


def bars(groups: Mapping[str, Sequence[Bar]], styles: Mapping[str, LineStyle]) -> Mark:
    """Return stacked bars in groups, a bar per arm: the first segment plain, the second hatched."""

    def draw(axes: Any, palette: Palette) -> None:
        y, ends = 0.0, [1.0]
        for title, group in groups.items():
            axes.annotate(
                _truncate(title), (0, y), xytext=(4, 0), textcoords="offset points", va="center", fontweight="bold",
            )  # fmt: skip
            y += 0.95
            for bar in group:
                style, left = styles[bar.arm], 0.0
                for width, hatch in zip(bar.segments, ("", "////"), strict=False):
                    fill = {"facecolor": "none", "edgecolor": palette.bar} if hatch else {"facecolor": palette.bar}
                    part = axes.barh([y], [width], left=left, height=0.62, hatch=hatch, linewidth=0.8, **fill)
                    part[0].set_gid(style.part("bar"))
                    left += width
                ends.append(left)
                axes.plot(
                    [-0.035], [y], transform=axes.get_yaxis_transform(), clip_on=False, color=palette[style.colour],
                    marker=style.marker, markersize=6, markeredgewidth=1.4, gid=style.part("marker"),
                )  # fmt: skip
                _write_beside(axes, bar.note, left, y)
                y += 0.75
            y += 0.45
        axes.set_ylim(y - 0.3, -0.7)
        axes.set_yticks([])
        axes.set_xlim(0, max(ends) * 1.14)
        axes.set_xticks([tick for tick in axes.get_xticks() if tick <= max(ends) * 1.001])

    return draw


def bars_size(groups: Mapping[str, Sequence[Bar]]) -> tuple[float, float]:
    """Return the size in inches of a chart of these bars."""
    rows = sum(len(group) for group in groups.values())
    return PANEL[0], 0.7 + 0.21 * rows + 0.3 * len(groups)


def _write_names(axes: Any, series: Mapping[str, Series], styles: Mapping[str, LineStyle], palette: Palette) -> None:
    """Write the names of lines at their ends, stacked where the ends are close together."""
    low, high = axes.get_ylim()
    height = 72 * 0.8 * PANEL[1]
    ends = ((_nan_values(curve.mean)[-1], _nan_values(curve.x)[-1], name) for name, curve in series.items())
    last = -math.inf
    for y, x, name in sorted(ends):
        position = (y - low) / (high - low) * height
        last = max(position, last + NAME_POINTS)
        _write_name(axes, name, (x, y), last - position, color=palette[styles[name].colour])


def _write_name(axes: Any, name: str, end: tuple[float, float], above: float = 0.0, **options: Any) -> None:
    """Write the name of a line beside its end, `above` points higher."""
    axes.annotate(name, end, xytext=(7, above), textcoords="offset points", va="center", fontsize=8.5, **options)


def _write_beside(axes: Any, text: str, x: float, y: float) -> None:
    axes.annotate(text, (x, y), xytext=(4, 0), textcoords="offset points", va="center", fontsize=8)


def _finite_values(values: Any) -> list[float | None]:
    return [float(value) if math.isfinite(value) else None for value in values]


def _nan_values(values: Sequence[float | None]) -> list[float]:
    return [math.nan if value is None else value for value in values]


def _thin(points: Sequence[Any]) -> list[Any]:
    if len(points) <= MAX_POINTS:
        return list(points)
    return [points[round(index * (len(points) - 1) / (MAX_POINTS - 1))] for index in range(MAX_POINTS)]


def _truncate(text: str, length: int = 44) -> str:
    return text if len(text) <= length else text[: length - 1] + "…"
