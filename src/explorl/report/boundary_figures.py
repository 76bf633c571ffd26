"""Figures of a comparison of models: pass@k and its differences, bars with intervals, Venn diagram, UpSet plot."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from explorl.analysis.ability_boundary import Boundary
from explorl.core.store import atomic_path
from explorl.metrics import set_regions
from explorl.report.figures import COLOURS
from explorl.stats import Interval

DASHES = ("-", "--", ":", "-.")
MARKERS = "os^DvP"
MAX_COLUMNS = 20
"""Intersections that an UpSet plot shows; the smallest ones are left out."""
ELLIPSES: Mapping[int, Sequence[tuple[float, float, float, float, float]]] = {
    2: [(0.36, 0.5, 0.56, 0.56, 0), (0.64, 0.5, 0.56, 0.56, 0)],
    3: [(0.38, 0.6, 0.5, 0.5, 0), (0.62, 0.6, 0.5, 0.5, 0), (0.5, 0.39, 0.5, 0.5, 0)],
    4: [(0.35, 0.4, 0.72, 0.45, 140), (0.45, 0.5, 0.72, 0.45, 140), (0.544, 0.5, 0.72, 0.45, 40),
        (0.644, 0.4, 0.72, 0.45, 40)],
}  # fmt: skip
"""Centre, width, height and angle of the ellipses of a Venn diagram in which every region exists (Venn 1880)."""

_RC = {
    "svg.fonttype": "none",
    "svg.hashsalt": "explorl",
    "text.parse_math": False,
    "font.family": "sans-serif",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "grid.alpha": 0.25,
}


def figures(boundary: Boundary) -> Iterator[tuple[str, Any]]:
    """Yield every figure of a comparison with its name, as matplotlib figures."""
    yield "pass-at-k", curves(boundary, "pass")
    if boundary.samples > 1:
        yield "maj-at-k", curves(boundary, "maj")
    yield "pass-at-k-difference", difference_curves(boundary)
    yield "answer-diversity", bars(boundary, {"distinct_answers": 1, "distinct_correct_answers": 1})
    yield "unsolvable", venn(boundary) if len(boundary.names) <= 4 else upset(boundary)
    tokens = [key for key in ("entropy", "branching") if all(scores[key] for scores in boundary.scores.values())]
    if tokens:
        yield "entropy-and-branching", bars(boundary, dict.fromkeys(tokens, 1))
    quality = ("truncated", "format_violations", "redundancy", "language_mixing")
    available = [key for key in quality if all(key in scores for scores in boundary.scores.values())]
    yield "responses", bars(boundary, {"mean_tokens": 1, **dict.fromkeys(available, 100)})


def save(figure: Any, folder: Path, name: str) -> list[Path]:
    """Write `name`.svg, with text as text, and `name`.png, and return their paths."""
    import matplotlib

    paths = [folder / f"{name}.svg", folder / f"{name}.png"]
    with matplotlib.rc_context(_RC):
        for path, metadata in zip(paths, ({"Date": None, "Creator": None}, {"Software": None}), strict=True):
            with atomic_path(path) as temporary, warnings.catch_warnings():
                warnings.filterwarnings("ignore", "Glyph")  # a glyph missing in the font is drawn as a box
                figure.savefig(temporary, format=path.suffix[1:], dpi=150, metadata=metadata)
    return paths


@contextmanager
def _figure(rows: int, columns: int, size: tuple[float, float], **options: Any) -> Iterator[tuple[Any, Any]]:
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(_RC):
        figure = Figure(figsize=size, layout="constrained")
        yield figure, figure.subplots(rows, columns, squeeze=False, **options)


def _line_style(index: int) -> dict[str, Any]:
    return {
        "color": COLOURS[index % len(COLOURS)],
        "linestyle": DASHES[index // len(COLOURS) % len(DASHES)],
        "marker": MARKERS[index % len(MARKERS)],
    }


def _legend(figure: Any, names: Sequence[str], **options: Any) -> None:
    """Draw the legend above the axes, with as many columns as the longest name allows."""
    columns = max(1, min(len(names), int(80 // (max(map(len, names)) + 6))))
    figure.legend(loc="outside upper center", ncols=columns, frameon=False, **options)


def curves(boundary: Boundary, kind: str) -> Any:
    """Return the figure of pass@k or maj@k by k, with 95 % bands."""
    with _figure(1, 1, (7.2, 4.4)) as (figure, grid):
        axes = grid[0, 0]
        for index, (name, scores) in enumerate(boundary.scores.items()):
            points = [(k, scores["pass@1" if k == 1 else f"{kind}@{k}"]) for k in boundary.ks]
            _draw_curve(axes, [(k, value) for k, value in points if value is not None], name, _line_style(index))
        _set_k_axis(axes, boundary.ks)
        axes.set_ylabel(f"{kind}@k (%)")
        axes.set_ylim(bottom=max(0, axes.get_ylim()[0]), top=min(102, axes.get_ylim()[1]))
        _legend(figure, boundary.names)
    return figure


def _draw_curve(axes: Any, points: Sequence[tuple[int, Interval]], name: str, style: Mapping[str, Any]) -> None:
    ks = [k for k, _ in points]
    low, mean, high = (np.array([getattr(value, end) for _, value in points]) * 100 for end in ("low", "mean", "high"))
    axes.fill_between(ks, low, high, color=style["color"], alpha=0.15, linewidth=0)
    axes.plot(ks, mean, linewidth=2, markersize=5, label=name, **style)


def _set_k_axis(axes: Any, ks: Sequence[int]) -> None:
    from matplotlib.ticker import NullLocator

    axes.set_xscale("log", base=2)
    ticks = [k for k in ks if k == ks[-1] or ks[-1] / k >= 1.5]  # 512 and 640 would overlap
    axes.set_xticks(ticks, [str(k) for k in ticks])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel("k (samples per problem)")
    axes.grid(True)


def difference_curves(boundary: Boundary) -> Any:
    """Return the figure of each model's difference in pass@k to the first, paired by problem."""
    first, *others = boundary.names
    by_key = {(d.model, d.baseline, d.measure): d.difference for d in boundary.differences}
    with _figure(1, 1, (7.2, 4.2)) as (figure, grid):
        axes = grid[0, 0]
        axes.axhline(0, color="0.4", linewidth=1)
        for index, name in enumerate(others, start=1):
            points = [(k, by_key[name, first, f"pass@{k}"]) for k in boundary.ks]
            _draw_curve(axes, points, name, _line_style(index))
        _set_k_axis(axes, boundary.ks)
        axes.set_ylabel("difference in pass@k (points)")
        axes.set_title(f"against {first}, paired by problem", fontsize=10)
        _legend(figure, others)
    return figure


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


def bars(boundary: Boundary, measures: Mapping[str, float]) -> Any:
    """Return a figure with a panel per measure, and in it a bar per model with its 95 % interval.

    `measures` maps each measure to the factor that its values are multiplied by.
    """
    columns = min(len(measures), 3)
    rows = -(-len(measures) // columns)
    height = rows * (0.9 + 0.42 * len(boundary.names))
    positions = np.arange(len(boundary.names))
    width = 3.3 * columns + 0.075 * max(map(len, boundary.names))
    with _figure(rows, columns, (width, max(height, 2.2)), sharey=True) as (figure, grid):
        for axes in grid.flat[len(measures) :]:
            axes.remove()
        for axes, (key, scale) in zip(grid.flat, measures.items(), strict=False):
            values = [scores[key] for scores in boundary.scores.values()]
            low, mean, high = (np.array([getattr(v, end) for v in values]) * scale for end in ("low", "mean", "high"))
            for position, value, end in zip(positions, mean, high, strict=True):
                hatch = "" if position < len(COLOURS) else "//"  # the colours repeat
                colour = COLOURS[position % len(COLOURS)]
                axes.barh(position, value, color=colour, alpha=0.85, height=0.62, hatch=hatch)
                beside = {"xytext": (6, 0), "textcoords": "offset points", "va": "center", "fontsize": 9}
                axes.annotate(f"{value:.3g}", (end, position), **beside)
            has_width = high > low
            errors = np.maximum([mean - low, high - mean], 0)[:, has_width]
            axes.errorbar(mean[has_width], positions[has_width], xerr=errors, fmt="none", ecolor="0.25", capsize=3)
            axes.set_xlim(0, high.max() * 1.25 if high.max() > 0 else 1)
            axes.locator_params(axis="x", nbins=4)
            axes.set_yticks(positions, boundary.names)
            axes.set_xlabel(BAR_LABELS[key])
            axes.grid(True, axis="x")
        grid[0, 0].invert_yaxis()
    return figure


# ---------------------------------------------------------------- sets


def venn(boundary: Boundary) -> Any:
    """Return the Venn diagram of the problems that 2 to 4 models cannot solve, with the count of each region."""
    from matplotlib.patches import Ellipse

    sets = boundary.unsolvable
    with _figure(1, 1, (6.4, 5.4)) as (figure, grid):
        axes = grid[0, 0]
        for index, (name, problems) in enumerate(sets.items()):
            x, y, width, height, angle = ELLIPSES[len(sets)][index]
            style = {"facecolor": COLOURS[index], "edgecolor": COLOURS[index]}
            axes.add_patch(Ellipse((x, y), width, height, angle=angle, alpha=0.22, linewidth=0, **style))
            axes.add_patch(
                Ellipse((x, y), width, height, angle=angle, fill=False, linewidth=2, edgecolor=COLOURS[index])
            )
            axes.plot([], [], "s", color=COLOURS[index], alpha=0.6, markersize=10, label=f"{name}: {len(problems)}")
        centres = region_centres(list(sets))
        for members, region in set_regions(sets).items():
            x, y = centres[members]
            axes.text(x, y, str(len(region)), ha="center", va="center", fontsize=12)
        axes.set_aspect("equal")
        axes.autoscale_view()
        axes.axis("off")
        axes.set_title(_solved_by_all(boundary), fontsize=10)
        _legend(figure, [f"{name}: {len(problems)}" for name, problems in sets.items()])
    return figure


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


def upset(boundary: Boundary) -> Any:
    """Return the UpSet plot (Lex et al. 2014) of the problems that exactly the marked models cannot solve."""
    names, counts = boundary.names, boundary.overlaps()
    shown = list(counts.items())[:MAX_COLUMNS]
    columns, rows = np.arange(len(shown)), np.arange(len(names))
    size = (2.6 + 0.42 * max(len(shown), 4) + 0.09 * max(map(len, names)), 2.6 + 0.34 * len(names))
    ratios = {"height_ratios": [2.2, 0.34 * len(names)], "width_ratios": [1.6, 0.42 * max(len(shown), 4)]}
    with _figure(2, 2, size, gridspec_kw=ratios) as (figure, grid):
        grid[0, 0].axis("off")
        top, left, matrix = grid[0, 1], grid[1, 0], grid[1, 1]
        rectangles = top.bar(columns, [count for _, count in shown], color="0.35", width=0.62)
        top.bar_label(rectangles, fontsize=9, padding=2)
        top.set_xlim(-0.6, max(len(shown), 4) - 0.4)
        top.set_xticks([])
        top.set_ylabel("problems")
        rest = len(counts) - len(shown)
        figure.suptitle(_solved_by_all(boundary) + (f"; {rest} smaller sets not shown" if rest else ""), fontsize=10)

        sizes = [len(boundary.unsolvable[name]) for name in names]
        colours = [COLOURS[index % len(COLOURS)] for index in rows]
        left.barh(rows, sizes, color=colours, alpha=0.85, height=0.6)
        for row, count in zip(rows, sizes, strict=True):
            left.text(count + 0.04 * max(*sizes, 1), row, str(count), ha="right", va="center", fontsize=9)
        left.set_xlim(max(*sizes, 1) * 1.3, 0)
        left.set_xlabel("unsolved")
        left.set_yticks([])
        left.spines["left"].set_visible(False)

        for column, (members, _) in enumerate(shown):
            marked = [row for row, name in enumerate(names) if name in members]
            matrix.plot([column] * len(rows), rows, "o", color="0.88", markersize=8, linestyle="none")
            matrix.plot([column] * len(marked), marked, "o-", color="0.2", markersize=8, linewidth=2)
        matrix.set_xlim(top.get_xlim())
        matrix.set_yticks(rows, names)
        matrix.set_xticks([])
        matrix.tick_params(length=0)
        for spine in matrix.spines.values():
            spine.set_visible(False)
        for axes in (left, matrix):
            axes.set_ylim(len(names) - 0.5, -0.5)
    return figure
