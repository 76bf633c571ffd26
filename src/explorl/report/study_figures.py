"""Figures of a study as SVG text that takes its colours and fonts from the page around it."""

from __future__ import annotations

import io
import math
import re
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from html import escape
from typing import Any, ParamSpec

from explorl.report.figures import running_mean

P = ParamSpec("P")

PANEL = (4.8, 3.1)
"""Size of a panel in inches; narrow enough for its text to stay readable on a phone."""
MAX_POINTS = 200
"""Points drawn of a curve; longer curves are thinned evenly."""
MIN_SMOOTHED = 24
"""Steps from which a curve is drawn as its running mean, over faint points for the measured values."""
MAX_MARKED = 40
"""Points of an unsmoothed curve up to which each point gets a marker."""
NAME_POINTS = 10
"""Height of a name beside a line, in points."""
MANY = 6
"""With more curves than this, the page shows the bands of arms other than the baseline only when they are chosen."""

_INK, _LINE, _BAR, _QUIET = "#000001", "#000002", "#000003", "#000004"
_ARM_COLOURS = 7
_VARIABLES = {
    _INK: "currentColor", _LINE: "var(--line)", _BAR: "var(--bar)", _QUIET: "var(--quiet)", "#000005": "var(--paper)",
} | {f"#0001{index:02x}": f"var(--arm-{index})" for index in range(_ARM_COLOURS)}  # fmt: skip
_MARKERS = "os^DvPX*"
_DASHES: tuple[Any, ...] = ("-", (0, (5, 2)), (0, (1.5, 1.5)), (0, (6, 2, 1.5, 2)))
_RC = {
    "svg.fonttype": "none",
    "svg.hashsalt": "explorl",
    "text.parse_math": False,
    "text.color": _INK,
    "axes.edgecolor": _INK,
    "axes.labelcolor": _INK,
    "xtick.color": _INK,
    "ytick.color": _INK,
    "grid.color": _LINE,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "hatch.linewidth": 0.8,
}


@dataclass(frozen=True)
class LineStyle:
    """How an arm is drawn in every figure: colour, dash (None: no line) and marker."""

    colour: str
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


def smoothing_window(count: int) -> int:
    """Return the window of the running mean for a curve of `count` steps: an odd number, 1 for a short curve."""
    return 1 if count < MIN_SMOOTHED else 2 * (count // 14) + 1


@dataclass(frozen=True)
class Bar:
    """One bar: its arm, its segments from the left, and the text beside it."""

    arm: str
    segments: Sequence[float]
    note: str = ""


def _with_settings(draw: Callable[P, str]) -> Callable[P, str]:
    """Draw with the settings above, and restore matplotlib's own afterwards."""

    @wraps(draw)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> str:
        import matplotlib

        with matplotlib.rc_context(_RC):
            return draw(*args, **kwargs)

    return wrapped


def line_styles(arms: Sequence[str], baseline: str | None) -> dict[str, LineStyle]:
    """Return a line style for each arm; the baseline is drawn in ink, and the policy before training in grey."""
    styles: dict[str, LineStyle] = {}
    others = 0
    for name in arms:
        if name == baseline:
            styles[name] = LineStyle(_INK, "-", "o")
            continue
        styles[name] = LineStyle(
            f"#0001{others % _ARM_COLOURS:02x}",
            _DASHES[(others + 1) % len(_DASHES)],
            _MARKERS[(others + 1) % len(_MARKERS)],
            others + 1,
        )
        others += 1
    return styles | ({} if "start" in styles else {"start": LineStyle(_QUIET, (0, (1, 1.2)), "+", others + 1)})


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
    colour = _VARIABLES[style.colour]
    return (
        f'<svg aria-hidden="true" viewBox="0 0 36 14" style="stroke: {colour}; fill: {colour}">'
        f'{line}<path d="{corners}"/></svg>'
    )


@_with_settings
def lines(
    series: Mapping[str, Series],
    styles: Mapping[str, LineStyle],
    *,
    identifier: str,
    label: str,
    x: str,
    y: str,
    powers_of_two: bool = False,
    zero: bool = False,
    named: bool = False,
) -> str:
    """Return a figure with a line and a band per arm; `zero` adds a line at 0, `named` the arms' names."""
    figure = _figure(PANEL)
    axes = figure.subplots()
    many = len(series) > MANY
    strength = 0.16 if many else min(0.16, 0.6 / max(1, len(series)))  # bands must not hide the lines
    for name, curve in series.items():
        style, points = styles[name], curve.thinned()
        xs, mean = _nan_values(points.x), _nan_values(points.mean)
        if points.raw:
            dots = {"linestyle": "none", "marker": ".", "markersize": 5, "markeredgewidth": 0, "alpha": 0.4}
            axes.plot(xs, _nan_values(points.raw), color=style.colour, gid=style.part("dots"), zorder=1.5, **dots)
        _line(axes, xs, mean, style, marked=not points.raw and len(xs) <= MAX_MARKED)
        low, high = _nan_values(points.low), _nan_values(points.high)
        if len(low) == len(high) == len(xs):
            band = axes.fill_between(xs, low, high, color=style.colour, alpha=strength, linewidth=0)
            band.set_gid(style.part("extra" if many and style.index else "band"))
    if zero:
        axes.axhline(0, color=_INK, linewidth=0.8)
    if (frame := frame_of(series.values())) is not None:
        axes.set_ylim(*frame)
    if powers_of_two:
        ticks = sorted({int(k) for curve in series.values() for k in curve.x if k is not None and k >= 1})
        axes.set_xscale("log", base=2)
        axes.set_xticks(ticks, [str(k) for k in ticks])
        axes.minorticks_off()
    if named:
        _write_names(axes, series, styles)
    return _label_and_render(figure, axes, identifier, label, x, y)


@_with_settings
def labelled_lines(series: Mapping[str, Series], *, identifier: str, label: str, x: str, y: str) -> str:
    """Return a figure with the lines of one arm, each with its name at its end."""
    figure = _figure(PANEL)
    axes = figure.subplots()
    for index, (name, curve) in enumerate(series.items()):
        points = curve.thinned()
        xs, mean, low, high = (_nan_values(values) for values in (points.x, points.mean, points.low, points.high))
        style = LineStyle(
            f"#0001{index % _ARM_COLOURS:02x}", _DASHES[index % len(_DASHES)], _MARKERS[index % len(_MARKERS)]
        )
        options = {"color": style.colour, "linestyle": style.dash, "linewidth": 1.9}
        axes.plot(
            xs, mean, marker=style.marker, markersize=4, markevery=1 if len(xs) <= MAX_MARKED else [-1], **options
        )
        if len(low) == len(high) == len(xs):
            axes.fill_between(xs, low, high, color=style.colour, alpha=0.12, linewidth=0)
        if mean:
            _write_name(axes, name, (xs[-1], mean[-1]))
    axes.margins(x=0.02)
    low, high = axes.get_xlim()
    axes.set_xlim(low, high + 0.17 * (high - low))
    axes.set_xticks([tick for tick in axes.get_xticks() if low <= tick <= high])
    return _label_and_render(figure, axes, identifier, label, x, y)


@_with_settings
def plane(
    paths: Mapping[str, tuple[Sequence[float | None], Sequence[float | None]]],
    styles: Mapping[str, LineStyle],
    *,
    identifier: str,
    label: str,
    x: str,
    y: str,
    start: tuple[float, float] | None = None,
    measured: bool = False,
) -> str:
    """Return a figure with the path of each arm through a plane, ending at a large marker.

    The paths begin at `start`, or each at an open circle. `measured` draws the points themselves, with a dot at each;
    otherwise the points are steps, drawn as a running mean.
    """
    figure = _figure((PANEL[0], 3.6))
    axes = figure.subplots()
    if start is not None:
        style = styles["start"]
        axes.plot(
            [start[0]], [start[1]], color=style.colour, marker=style.marker, markersize=13, markeredgewidth=2.4,
            gid=style.part("marker"), zorder=3,
        )  # fmt: skip
    for name, (first, second) in paths.items():
        style = styles[name]
        points = [(a, b) for a, b in zip(first, second, strict=False) if a is not None and b is not None]
        if not points:
            continue
        window = 1 if measured else smoothing_window(len(points))
        path = [running_mean(values, window) for values in zip(*points, strict=True)]
        xs, ys = zip(*_thin(list(zip(*path, strict=True))), strict=True)
        options = {"color": style.colour, "gid": style.part("line")}
        axes.plot(xs, ys, linestyle=style.dash, linewidth=1.9, marker="." if measured else None, **options)
        if start is None:
            axes.plot(xs[:1], ys[:1], marker="o", markersize=7, markerfacecolor="none", **options)
        axes.plot(xs[-1:], ys[-1:], marker=style.marker, markersize=9, **options)
    return _label_and_render(figure, axes, identifier, label, x, y)


@_with_settings
def regions(
    counts: Sequence[tuple[Sequence[str], int]],
    arms: Sequence[str],
    styles: Mapping[str, LineStyle],
    *,
    identifier: str,
    label: str,
) -> str:
    """Return a figure with a bar for each region of overlapping sets, and the markers of its arms on the left."""
    figure = _figure((PANEL[0], 0.75 + 0.27 * len(counts)))
    width = min(0.09 * len(arms), 0.5)
    left, right = figure.subplots(1, 2, sharey=True, width_ratios=[width, 1 - width])
    for row, (members, count) in enumerate(counts):
        for column, name in enumerate(arms):
            style = styles[name]
            if name in members:
                left.plot([column], [row], color=style.colour, marker=style.marker, markersize=7, markeredgewidth=1.6)
            else:
                left.plot([column], [row], color=_LINE, marker=".", markersize=5)
        right.barh([row], [count], height=0.62, color=_BAR)
        _write_beside(right, f"{count}", count, row)
    left.set_xlim(-0.6, len(arms) - 0.4)
    left.set_axis_off()
    right.set_ylim(len(counts) - 0.4, -0.6)
    right.set_yticks([])
    right.set_xlim(0, max([count for _, count in counts], default=1) * 1.15 or 1)
    return _label_and_render(
        figure, right, identifier, label, "problems unsolved in all samples", "", grid="x", whole=True
    )


@_with_settings
def bars(
    groups: Mapping[str, Sequence[Bar]], styles: Mapping[str, LineStyle], *, identifier: str, label: str, x: str
) -> str:
    """Return a figure of stacked bars in groups, a bar per arm: the first segment plain, the second hatched."""
    rows = sum(len(group) for group in groups.values())
    figure = _figure((PANEL[0], 0.7 + 0.21 * rows + 0.3 * len(groups)))
    axes = figure.subplots()
    y, ends = 0.0, [1.0]
    for title, group in groups.items():
        axes.annotate(
            _truncate(title), (0, y), xytext=(4, 0), textcoords="offset points", va="center", fontweight="bold",
        )  # fmt: skip
        y += 0.95
        for bar in group:
            style, left = styles[bar.arm], 0.0
            for width, hatch in zip(bar.segments, ("", "////"), strict=False):
                fill = {"facecolor": _BAR} if not hatch else {"facecolor": "none", "edgecolor": _BAR}
                part = axes.barh([y], [width], left=left, height=0.62, hatch=hatch, linewidth=0.8, **fill)
                part[0].set_gid(style.part("bar"))
                left += width
            ends.append(left)
            axes.plot(
                [-0.035], [y], transform=axes.get_yaxis_transform(), clip_on=False, color=style.colour,
                marker=style.marker, markersize=6, markeredgewidth=1.4, gid=style.part("marker"),
            )  # fmt: skip
            _write_beside(axes, bar.note, left, y)
            y += 0.75
        y += 0.45
    axes.set_ylim(y - 0.3, -0.7)
    axes.set_yticks([])
    axes.set_xlim(0, max(ends) * 1.14)
    axes.set_xticks([tick for tick in axes.get_xticks() if tick <= max(ends) * 1.001])
    return _label_and_render(figure, axes, identifier, label, x, "", grid="x")


def _line(axes: Any, xs: Sequence[float], ys: Sequence[float], style: LineStyle, *, marked: bool) -> None:
    """Draw a line with its arm's marker at each point, or only at the last if not `marked`."""
    axes.plot(
        xs, ys, color=style.colour, linestyle=style.dash, linewidth=1.9, marker=style.marker, markersize=5,
        markevery=1 if marked else [len(xs) - 1], gid=style.part("line"), zorder=2.0 if style.index else 2.5,
    )  # fmt: skip


def _write_names(axes: Any, series: Mapping[str, Series], styles: Mapping[str, LineStyle]) -> None:
    """Write the names of lines at their ends, stacked where the ends are close together."""
    low, high = axes.get_ylim()
    height = 72 * 0.8 * PANEL[1]
    ends = ((_nan_values(curve.mean)[-1], _nan_values(curve.x)[-1], name) for name, curve in series.items())
    last = -math.inf
    for y, x, name in sorted(ends):
        position = (y - low) / (high - low) * height
        last = max(position, last + NAME_POINTS)
        _write_name(axes, name, (x, y), last - position, color=styles[name].colour)


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


def _figure(size: tuple[float, float]) -> Any:
    from matplotlib.figure import Figure

    return Figure(figsize=size, layout="constrained")


def _label_and_render(
    figure: Any, axes: Any, identifier: str, label: str, x: str, y: str, grid: str = "both", whole: bool = False
) -> str:
    from matplotlib.ticker import MaxNLocator

    axes.set_xlabel(x)
    axes.set_ylabel(y)
    if whole:
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    axes.grid(axis=grid, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.margins(y=0.06)
    return _svg(figure, identifier, label)


def _svg(figure: Any, identifier: str, label: str = "") -> str:
    """Return the figure as an SVG element for a page: no external references, unique ids, the page's own colours."""
    buffer = io.StringIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a glyph missing in matplotlib's font is drawn with the reader's
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>", "", svg, flags=re.DOTALL)
    svg = re.sub(r"<[^>]*>", lambda tag: _page_tag(tag[0], identifier), svg)
    accessibility = f'role="img" aria-label="{escape(label)}"' if label else 'aria-hidden="true"'
    svg = re.sub(r"\n\s*", "\n", svg)
    return svg.replace("<svg", f'<svg {accessibility} fill="currentColor" stroke-linejoin="round"', 1)


def _page_tag(tag: str, identifier: str) -> str:
    if tag.startswith("<svg"):
        box = re.search(r'viewBox="[^"]*"', tag)
        return f"<svg {box[0]}>" if box else "<svg>"
    tag = tag.replace("xlink:href", "href")
    tag = re.sub(r'\bid="arm (\d+) (\w+)"', r'class="\2" data-arm="\1"', tag)
    tag = re.sub(r'\bid="', f'id="{identifier}-', tag)
    tag = re.sub(r'(url\(|href=")#', rf"\1#{identifier}-", tag)
    tag = re.sub(r"font-family: [^;\"]*;?", "", tag)
    tag = re.sub(r"(\d\.\d\d)\d+", r"\1", tag)
    return re.sub(r"#[0-9a-f]{6}", lambda colour: _VARIABLES.get(colour[0], "currentColor"), tag)
