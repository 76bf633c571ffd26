"""Charts of a comparison of models: pass@k and its differences, bars with intervals, Venn diagram, regions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from explorl.analysis.ability_boundary import Boundary
from explorl.analysis.charts import Chart, Mark, Palette, PanelChart
from explorl.metrics import set_regions
from explorl.report.figures import ARM_COLOURS
from explorl.report.study_figures import LineStyle, Series, line_styles, lines, regions, regions_size
from explorl.stats import Interval

MAX_REGIONS = 20
"""Regions that are drawn; the smallest ones are left out."""
ELLIPSES: Mapping[int, Sequence[tuple[float, float, float, float, float]]] = {
    2: [(0.36, 0.5, 0.56, 0.56, 0), (0.64, 0.5, 0.56, 0.56, 0)],
    3: [(0.38, 0.6, 0.5, 0.5, 0), (0.62, 0.6, 0.5, 0.5, 0), (0.5, 0.39, 0.5, 0.5, 0)],
    4: [(0.35, 0.4, 0.72, 0.45, 140), (0.45, 0.5, 0.72, 0.45, 140), (0.544, 0.5, 0.72, 0.45, 40),
        (0.644, 0.4, 0.72, 0.45, 40)],
}  # fmt: skip
"""Centre, width, height and angle of the ellipses of a Venn diagram in which every region exists (Venn 1880)."""


def charts(boundary: Boundary) -> Iterator[Chart]:
    """Yield every chart of a comparison."""
    yield curves(boundary, "pass")
    if boundary.samples > 1:
        yield curves(boundary, "maj")
    yield difference_curves(boundary)
    yield bars(boundary, "answer-diversity", {"distinct_answers": 1, "distinct_correct_answers": 1})
    yield venn(boundary) if len(boundary.names) <= 4 else upset(boundary)
    tokens = [key for key in ("entropy", "branching") if all(scores[key] for scores in boundary.scores.values())]
    if tokens:
        yield bars(boundary, "entropy-and-branching", dict.fromkeys(tokens, 1))
    quality = ("truncated", "format_violations", "redundancy", "language_mixing")
    available = [key for key in quality if all(key in scores for scores in boundary.scores.values())]
    yield bars(boundary, "responses", {"mean_tokens": 1, **dict.fromkeys(available, 100)})


def curves(boundary: Boundary, kind: str) -> Chart:
    """Return the chart of pass@k or maj@k by k, with 95 % bands."""
    series = {
        name: _series({k: scores["pass@1" if k == 1 else f"{kind}@{k}"] for k in boundary.ks})
        for name, scores in boundary.scores.items()
    }

    def limits(axes: Any, palette: Palette) -> None:
        axes.set_ylim(bottom=max(0, axes.get_ylim()[0]), top=min(102, axes.get_ylim()[1]))

    marks = [*_lines(boundary, series), limits]
    title = f"{kind}@k by the number of samples"
    return Chart(f"{kind}-at-k", title, f"{title}, with 95 % intervals over problems.", marks, X, f"{kind}@k (%)", SIZE)


def difference_curves(boundary: Boundary) -> Chart:
    """Return the chart of each model's difference in pass@k to the first, paired by problem."""
    first, *others = boundary.names
    by_key = {(d.model, d.baseline, d.measure): d.difference for d in boundary.differences}
    series = {name: _series({k: by_key[name, first, f"pass@{k}"] for k in boundary.ks}) for name in others}
    title = f"against {first}, paired by problem"

    def title_and_zero(axes: Any, palette: Palette) -> None:
        low, high = axes.get_ylim()
        axes.set_ylim(min(low, 0), max(high, 0))
        axes.set_title(title, fontsize=10)

    marks = [*_lines(boundary, series, zero=True), title_and_zero]
    caption = f"Difference in pass@k {title}, with 95 % intervals over problems."
    return Chart("pass-at-k-difference", title, caption, marks, X, "difference in pass@k (points)", SIZE)


SIZE, X = (7.2, 4.4), "k (samples per problem)"


def _series(values: Mapping[int, Interval | None]) -> Series:
    """Return a curve in percent from intervals by k."""
    points = {k: value.times(100) for k, value in values.items() if value is not None}
    ends = ([getattr(value, end) for value in points.values()] for end in ("mean", "low", "high"))
    return Series([*points], *ends)


def _lines(boundary: Boundary, series: Mapping[str, Series], *, zero: bool = False) -> list[Mark]:
    """Return the lines of models with a legend above the axes, with as many columns as the longest name allows."""
    columns = max(1, min(len(series), int(80 // (max(map(len, series)) + 6))))

    def legend(axes: Any, palette: Palette) -> None:
        axes.figure.legend(loc="outside upper center", ncols=columns)

    return [lines(series, _styles(boundary), zero=zero, powers_of_two=True), legend]


def _styles(boundary: Boundary) -> dict[str, LineStyle]:
    return line_styles(boundary.names, boundary.names[0])


BAR_LABELS = {
    "distinct_answers": "distinct answers per problem",
    "distinct_correct_answers": "distinct correct answers per problem",
    "entropy": "token entropy (nats)",
    "branching": "branching factor (tokens)",
    "mean_tokens": "length (tokens)",
    "truncated": "truncated (%)",
    "format_violations": "format violations (%)",
    "redundancy": "3-gram redundancy (%)",
    "language_mixing": "language mixing (%)",
}


def bars(boundary: Boundary, name: str, measures: Mapping[str, float]) -> Chart:
    """Return a chart with a panel per measure, and in it a bar per model with its 95 % interval.

    `measures` maps each measure to the factor that its values are multiplied by.
    """
    columns = min(len(measures), 3)
    rows = -(-len(measures) // columns)
    positions, styles = np.arange(len(boundary.names)), _styles(boundary)

    def draw(figure: Any, palette: Palette) -> None:
        grid = figure.subplots(rows, columns, squeeze=False, sharey=True)
        for axes in grid.flat[len(measures) :]:
            axes.remove()
        for axes, (key, scale) in zip(grid.flat, measures.items(), strict=False):
            values = [scores[key] for scores in boundary.scores.values()]
            low, mean, high = (np.array([getattr(v, end) for v in values]) * scale for end in ("low", "mean", "high"))
            for position, value, end in zip(positions, mean, high, strict=True):
                hatch = "" if position <= ARM_COLOURS else "//"  # the colours repeat
                colour = palette[styles[boundary.names[position]].colour]
                axes.barh(position, value, color=colour, alpha=0.85, height=0.62, hatch=hatch)
                beside = {"xytext": (6, 0), "textcoords": "offset points", "va": "center", "fontsize": 9}
                axes.annotate(f"{value:.3g}", (end, position), **beside)
            has_width = high > low
            errors = np.maximum([mean - low, high - mean], 0)[:, has_width]
            bar_ends = {"fmt": "none", "ecolor": palette.ink, "capsize": 3}
            axes.errorbar(mean[has_width], positions[has_width], xerr=errors, **bar_ends)
            axes.set_xlim(0, high.max() * 1.25 if high.max() > 0 else 1)
            axes.locator_params(axis="x", nbins=4)
            axes.set_yticks(positions, boundary.names)
            axes.set_xlabel(BAR_LABELS[key])
            axes.grid(visible=False, axis="y")
        grid[0, 0].invert_yaxis()

    size = 3.3 * columns + 0.075 * max(map(len, boundary.names)), max(rows * (0.9 + 0.42 * len(positions)), 2.2)
    title = ", ".join(BAR_LABELS[key] for key in measures)
    return PanelChart(name, title, f"{title}, with 95 % intervals over problems.", (), size=size, panels=draw)


# ---------------------------------------------------------------- sets


def venn(boundary: Boundary) -> Chart:
    """Return the Venn diagram of the problems that 2 to 4 models cannot solve, with the count of each region."""
    sets, styles, title = boundary.unsolvable, _styles(boundary), _solved_by_all(boundary)

    def draw(axes: Any, palette: Palette) -> None:
        from matplotlib.patches import Ellipse

        for index, (name, problems) in enumerate(sets.items()):
            x, y, width, height, angle = ELLIPSES[len(sets)][index]
            colour = palette[styles[name].colour]
            for style in ({"alpha": 0.22, "linewidth": 0}, {"fill": False, "linewidth": 2}):
                axes.add_patch(Ellipse((x, y), width, height, angle=angle, facecolor=colour, edgecolor=colour, **style))
            axes.plot([], [], "s", color=colour, alpha=0.6, markersize=10, label=f"{name}: {len(problems)}")
        centres = region_centres(list(sets))
        for members, region in set_regions(sets).items():
            x, y = centres[members]
            axes.text(x, y, str(len(region)), ha="center", va="center", fontsize=12)
        axes.set_aspect("equal")
        axes.autoscale_view()
        axes.axis("off")
        axes.set_title(title, fontsize=10)
        axes.figure.legend(loc="outside upper center", ncols=max(1, min(len(sets), int(80 // (longest + 6)))))

    longest = max(len(f"{name}: {len(problems)}") for name, problems in sets.items())
    return Chart("unsolvable", "Unsolved problems", f"{title[0].upper()}{title[1:]}.", [draw], size=(6.4, 5.4))


def _solved_by_all(boundary: Boundary) -> str:
    total = len(boundary.problems)
    solved = total - sum(boundary.overlaps().values())
    return f"problems unsolved in {boundary.samples} samples; {solved} of {total} are solved by every model"


def region_centres(names: Sequence[str]) -> dict[frozenset[str], tuple[float, float]]:
    """Return the point of each region of the Venn diagram that is farthest from its edge, for its number."""
    axis = np.linspace(0, 1, 201)
    x, y = np.meshgrid(axis, axis)
    inside = [_inside(x, y, ellipse) for ellipse in ELLIPSES[len(names)]]
    centres = {}
    for code in range(1, 2 ** len(names)):
        included = [bool(code >> index & 1) for index in range(len(names))]
        region = np.logical_and.reduce([within == wanted for within, wanted in zip(inside, included, strict=True)])
        while region.any():  # peel the region, layer by layer
            core = region
            region = (
                region & np.roll(region, 1, 0) & np.roll(region, -1, 0) & np.roll(region, 1, 1) & np.roll(region, -1, 1)
            )
        members = frozenset(name for name, wanted in zip(names, included, strict=True) if wanted)
        rows, columns = np.nonzero(core)
        middle = np.argmin((rows - rows.mean()) ** 2 + (columns - columns.mean()) ** 2)
        centres[members] = float(axis[columns[middle]]), float(axis[rows[middle]])
    return centres


def _inside(x: np.ndarray, y: np.ndarray, ellipse: tuple[float, float, float, float, float]) -> np.ndarray:
    centre_x, centre_y, width, height, degrees = ellipse
    angle = np.deg2rad(degrees)
    along = (x - centre_x) * np.cos(angle) + (y - centre_y) * np.sin(angle)
    across = (y - centre_y) * np.cos(angle) - (x - centre_x) * np.sin(angle)
    return np.asarray((along / width) ** 2 + (across / height) ** 2 < 0.25)


def upset(boundary: Boundary) -> Chart:
    """Return the chart of the problems that exactly the marked models cannot solve, for any number of models."""
    names, counts = boundary.names, boundary.overlaps()
    styles = _styles(boundary)
    shown = [([name for name in names if name in members], count) for members, count in counts.items()][:MAX_REGIONS]
    rest = len(counts) - len(shown)
    title = _solved_by_all(boundary) + (f"; {rest} smaller sets not shown" if rest else "")
    bars_and_markers = regions(shown, names, styles, "problems")

    def draw(figure: Any, palette: Palette) -> None:
        bars_and_markers(figure, palette)
        for name in names:
            colour, marker = palette[styles[name].colour], styles[name].marker
            label = f"{name}: {len(boundary.unsolvable[name])}"
            figure.axes[0].plot([], [], marker, color=colour, markersize=7, label=label)
        figure.suptitle(title, fontsize=10)
        figure.legend(loc="outside lower center")

    width, height = regions_size(len(shown))
    size = max(width, 7.2), height + 0.6 + 0.19 * len(names)
    return PanelChart("unsolvable", "Unsolved problems", f"{title[0].upper()}{title[1:]}.", (), size=size, panels=draw)
