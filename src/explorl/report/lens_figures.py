"""Drawings of the lens: stages, the entropy–reward law, entropy by sign, words, defects, changes of probability."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from explorl.analysis.defects import Defects, defects_summary
from explorl.analysis.entropy_by_sign import SignSplit, split_summary
from explorl.analysis.entropy_drop import EntropyDrop, WordChange, Words, drop_summary
from explorl.analysis.lens import Drawing
from explorl.analysis.probability_shift import SMALL, Bins, Updates
from explorl.analysis.reward_stages import EntropyLaw, Stages, law_summary, stages_summary
from explorl.core.text import clean
from explorl.report.figures import running_mean
from explorl.report.lens_render import Palette
from explorl.report.study_figures import smoothing_window
from explorl.stats import Interval
from explorl.stats.interval import LEVEL

MAX_WORDS = 12
"""Words in a figure."""
MIN_TICK_DISTANCE = 14
"""Percentiles between two labels, so that the labels do not overlap."""
RUNNING_MEAN_NOTE = " Line: running mean; faint points: the steps."


def stages_drawings(result: Stages) -> list[Drawing]:
    """Return the drawing of the curve with its two fitted pieces and the end of the rise."""

    def draw(figure: Any, palette: Palette) -> None:
        axes = figure.subplots()
        scale = _percent(result.measure)
        axes.plot(result.steps, scale * result.values, color=palette.quiet, label="each step", **_DOTS)
        name = "two pieces" if result.after is not None else "line"
        axes.plot(result.steps, scale * result.fitted, color=palette.arms[0], linewidth=1.9, label=name)
        if result.breakpoint is not None:
            axes.axvspan(
                result.breakpoint.low, result.breakpoint.high, color=palette.arms[1], alpha=0.15, linewidth=0,
                label="its 95 % interval",
            )  # fmt: skip
            axes.axvline(
                result.breakpoint.mean,
                color=palette.arms[1],
                linewidth=1.4,
                linestyle=(0, (5, 2)),
                label="end of the rise",
            )
        _labels(axes, "training step", _unit(result.measure))
        axes.legend(loc="lower right")

    caption = stages_summary(result)
    if result.breakpoint is not None:
        caption += " Dashed: where the rise ends; band: its 95 % interval."
    return [Drawing("stages", "Stages of the training", caption, draw)]


def law_drawings(result: EntropyLaw) -> list[Drawing]:
    """Return the drawing of entropy and reward at each step, with the fitted law and its ceiling."""

    def draw(figure: Any, palette: Palette) -> None:
        axes = figure.subplots()
        scale = _percent(result.measure)
        age = np.linspace(0.25, 0.9, len(result.steps))
        axes.scatter(result.entropy, scale * result.values, s=12, color=palette.quiet, alpha=age, linewidth=0)
        axes.plot(result.grid, scale * result.curve, color=palette.arms[0], linewidth=1.9)
        axes.fill_between(
            result.grid, scale * result.low, scale * result.high, color=palette.arms[0], alpha=0.15, linewidth=0
        )
        if result.limit is not None:
            ceiling = scale * result.limit.mean
            axes.plot([0], [ceiling], marker="D", color=palette.arms[1], markersize=6, clip_on=False)
            axes.annotate("ceiling b − a", (0, ceiling), xytext=(8, 4), textcoords="offset points", fontsize=8.5)
        _limit_y(axes, scale * result.values, scale * np.array([result.curve.min(), result.curve.max()]))
        _labels(axes, "entropy H (nats)", _unit(result.measure))

    caption = (
        f"{law_summary(result)} Each point is a step, later ones are darker; line and band: the fit and the 95 % "
        "interval of its mean, extended to H = 0."
    )
    return [Drawing("law", "Entropy and reward", caption, draw)]


def signs_drawings(result: SignSplit) -> list[Drawing]:
    """Return the drawing of the entropy of positive and negative completions over the steps."""

    def draw(figure: Any, palette: Palette) -> None:
        axes = figure.subplots()
        for name, values, colour, dash in (
            ("positive", result.positive, palette.arms[0], "-"),
            ("negative", result.negative, palette.arms[1], (0, (5, 2))),
        ):
            _draw_course(axes, result.steps, values, colour, name, dash)
        if result.rising_end < result.steps[-1]:
            axes.axvline(result.rising_end, color=palette.ink, linewidth=0.9, label="end of the rise")
        _labels(axes, "training step", "mean entropy (nats)")
        axes.legend()

    caption = split_summary(result) + RUNNING_MEAN_NOTE
    return [Drawing("signs", "Entropy of positive and negative completions", caption, draw)]


def fastest_drawings(result: EntropyDrop) -> list[Drawing]:
    """Return the drawing of the sign of completions with the fastest-dropping tokens, compared with all tokens."""

    def draw(figure: Any, palette: Palette) -> None:
        axes = figure.subplots()
        share = result.negative_share
        rows = [("fastest 20 %\nof token types", share.mean), ("all token types", result.all_share)]
        for y, (_, value) in enumerate(rows):
            axes.barh([y], [100 * value], height=0.55, color=palette.arms[1])
            axes.barh([y], [100 - 100 * value], left=[100 * value], height=0.55, color=palette.arms[0])
        for x, side, align in ((2, "negative", "left"), (98, "positive", "right")):
            axes.text(x, 1, side, ha=align, va="center", color=palette.paper, fontsize=9, fontweight="bold")
        low, high = max(share.low, 0.0), min(share.high, 1.0)
        axes.errorbar(
            [100 * share.mean], [0], xerr=[[100 * (share.mean - low)], [100 * (high - share.mean)]], color=palette.ink,
            capsize=4, linewidth=1.4,
        )  # fmt: skip
        axes.set_yticks(range(len(rows)), [name for name, _ in rows])
        axes.set_ylim(1.6, -0.6)
        axes.set_xlim(0, 100)
        axes.grid(visible=False, axis="y")
        _labels(axes, "occurrences (%)", "")

    caption = drop_summary(result) + " Occurrences in positive and negative completions; bar: 95 % interval."
    return [Drawing("fastest", "Where the fastest entropy drop happens", caption, draw, (4.8, 2.0))]


def words_drawings(result: Words) -> list[Drawing]:
    """Return the drawings of the words that rise in frequency and of those that fall in entropy."""
    drawings = []
    for name, title, changes, x, scale in (
        ("words-frequency", "Words whose frequency rises most", result.risen, "change of share (points)", 100.0),
        ("words-entropy", "Words whose entropy falls most", result.fallen, "change of mean entropy (nats)", 1.0),
    ):
        if changes:
            significant = sum(map(_is_significant, changes))
            largest, unit = _times(changes[0].change, scale), x.split("(")[1][:-1]
            caption = (
                f"{title}, from the first to the last third of steps {result.steps[0]}–{result.steps[1]}: first "
                f"{_word(changes[0].text)} by {largest:+.2f} {unit}; {significant or 'none'} of {len(changes)} "
                f"significant (filled; p < {LEVEL} after Holm's correction for all token types). Bars: 95 % intervals."
            )
            size = (4.8, 0.9 + 0.22 * min(len(changes), MAX_WORDS))
            drawings.append(Drawing(name, title, caption, _word_dots(changes[:MAX_WORDS], x, scale), size))
    return drawings


def _is_significant(change: WordChange) -> bool:
    return change.corrected is not None and change.corrected < LEVEL


def _word_dots(changes: Sequence[WordChange], x: str, scale: float) -> Callable[[Any, Palette], None]:
    def draw(figure: Any, palette: Palette) -> None:
        axes = figure.subplots()
        for y, change in enumerate(changes):
            interval = _times(change.change, scale)
            _draw_dot(axes, y, interval, palette.arms[0], filled=_is_significant(change))
        axes.set_yticks(range(len(changes)), [_word(change.text) for change in changes])
        axes.set_ylim(len(changes) - 0.4, -0.6)
        axes.axvline(0, color=palette.ink, linewidth=0.8)
        _labels(axes, x, "")

    return draw


def defects_drawings(result: Defects) -> list[Drawing]:
    """Return the drawing of the share of completions with each defect, by step."""

    def draw(figure: Any, palette: Palette) -> None:
        axes = figure.subplots()
        for index, kind in enumerate(result.kinds):
            dash = ("-", (0, (5, 2)), (0, (1.5, 1.5)))[index % 3]
            _draw_course(axes, result.steps, 100 * kind.shares, palette.arms[index], kind.name, dash)
        top = max(axes.get_ylim()[1], 1.0)
        axes.set_ylim(-0.03 * top, top)
        _labels(axes, "training step", "completions (%)")
        axes.legend()

    return [Drawing("defects", "Defects of completions", defects_summary(result) + RUNNING_MEAN_NOTE, draw)]


def updates_drawings(result: Updates) -> list[Drawing]:
    """Return the drawings of the distribution of |Δp| and of what it depends on."""
    phase = "on the plateau" if result.plateau else "over the whole run"
    drawings = [_distribution(result, phase), *(_binned(bins, phase) for bins in result.bins)]
    if result.categories:
        drawings.append(_by_category(result, phase))
    return drawings


def _distribution(result: Updates, phase: str) -> Drawing:
    def draw(figure: Any, palette: Palette) -> None:
        axes = figure.subplots()
        nonzero = result.above > 0
        axes.plot(result.grid[nonzero], 100 * result.above[nonzero], color=palette.arms[0], linewidth=1.9)
        axes.axvline(SMALL, color=palette.arms[1], linestyle=(0, (5, 2)), linewidth=1.4)
        axes.annotate(f"|Δp| = {SMALL}", (SMALL, 100), xytext=(-4, -10), textcoords="offset points", ha="right",
                      fontsize=8.5)  # fmt: skip
        axes.set_xscale("log")
        axes.set_yscale("log")
        _set_decade_ticks(axes.set_yticks, 100 * result.above[nonzero].min(), 100)
        _set_decade_ticks(axes.set_xticks, result.grid[0], result.grid[-1])
        axes.minorticks_off()
        _labels(axes, "|Δp| of an update", "tokens at or above (%)")

    caption = (
        f"{result.below:.2%} of {result.tokens:,} tokens {phase} (steps {result.steps[0]}–{result.steps[1]}) change "
        f"their probability by less than {SMALL} in a step's updates; the 20 % that change most account for "
        f"{result.concentration:.1%} of all change."
    )
    return Drawing("updates", "How far updates move tokens", caption, draw)


def _binned(bins: Bins, phase: str) -> Drawing:
    def draw(figure: Any, palette: Palette) -> None:
        axes = figure.subplots()
        means = np.array([mean.mean for mean in bins.means])
        ends = np.abs(np.array([[mean.mean - mean.low, mean.high - mean.mean] for mean in bins.means]).T)
        style = {"color": palette.arms[0], "marker": "o", "markersize": 5, "linewidth": 1.4, "capsize": 3}
        axes.errorbar(bins.percentile, means, yerr=ends, **style)
        axes.set_ylim(bottom=0)
        ticks = [len(means) - 1]
        for index in range(len(means) - 2, -1, -1):
            if bins.percentile[ticks[-1]] - bins.percentile[index] > MIN_TICK_DISTANCE:
                ticks.append(index)
        axes.set_xticks(
            [bins.percentile[index] for index in ticks],
            [f"{bins.percentile[index]:.0f}\n{bins.middle[index]:.1g}" for index in ticks],
        )
        unit = f" ({bins.unit})" if bins.unit else ""
        _labels(axes, f"tokens by {bins.name}: percentile, below it the value{unit}", "mean |Δp|")

    caption = (
        f"Mean |Δp| by {bins.name}, tokens {phase} in tenths (equal values together): Spearman's correlation "
        f"{bins.correlation:+.2f}; the 20 % of tokens with the highest {bins.name} account for "
        f"{bins.top_share:.0%} of all change. Bars: 95 % intervals."
    )
    return Drawing(f"updates-{bins.name.replace(' ', '-')}", f"Change by {bins.name}", caption, draw)


def _by_category(result: Updates, phase: str) -> Drawing:
    def draw(figure: Any, palette: Palette) -> None:
        axes = figure.subplots()
        for y, category in enumerate(result.categories):
            _draw_dot(axes, y, category.mean, palette.arms[0], filled=category.excess.sign != 0)
        axes.set_yticks(range(len(result.categories)), [category.category for category in result.categories])
        axes.set_ylim(len(result.categories) - 0.4, -0.6)
        axes.set_xlim(left=0)
        _labels(axes, "mean |Δp|", "")

    means = "; ".join(f"{category.category} {category.mean:.4f}" for category in result.categories)
    caption = (
        f"Mean |Δp| by token category, {phase}: {means}. Bars: 95 % intervals; filled: differs significantly from the "
        "mean of all tokens."
    )
    size = (4.8, 1.1 + 0.3 * len(result.categories))
    return Drawing("updates-categories", "Change by token category", caption, draw, size)


# ---------------------------------------------------------------------------- shared by the drawings
_DOTS: dict[str, Any] = {"linestyle": "none", "marker": ".", "markersize": 4, "markeredgewidth": 0, "alpha": 0.45}


def _draw_course(axes: Any, steps: Any, values: Any, colour: str, name: str, dash: Any = "-") -> None:
    """Draw a curve over steps: the steps as faint points, their running mean as a line."""
    window = smoothing_window(len(steps))
    if window > 1:
        axes.plot(steps, values, color=colour, **_DOTS)
    axes.plot(steps, running_mean(values, window), color=colour, linewidth=1.9, linestyle=dash, label=name)


def _draw_dot(axes: Any, y: float, interval: Interval, colour: str, *, filled: bool) -> None:
    ends = [[max(interval.mean - interval.low, 0)], [max(interval.high - interval.mean, 0)]]
    face = colour if filled else "none"
    axes.errorbar(
        [interval.mean], [y], xerr=ends, color=colour, marker="o", markersize=5.5, markerfacecolor=face,
        linewidth=1.4, capsize=3,
    )  # fmt: skip
    axes.locator_params(axis="x", nbins=6)


def _labels(axes: Any, x: str, y: str) -> None:
    axes.set_xlabel(x)
    axes.set_ylabel(y)


def _limit_y(axes: Any, *values: Any) -> None:
    """Limit the y axis to slightly more than these values, so that a wide band does not flatten them."""
    merged = np.concatenate([np.asarray(part, dtype=float) for part in values])
    low, high = float(merged.min()), float(merged.max())
    axes.set_ylim(low - 0.1 * (high - low), high + 0.15 * (high - low))


def _set_decade_ticks(set_ticks: Any, low: float, high: float) -> None:
    """Set a tick at powers of ten, written as plain numbers."""
    first, last = int(np.floor(np.log10(max(low, 1e-9)))), int(np.floor(np.log10(high)))
    ticks = [10.0**power for power in range(first, last + 1)]
    ticks = ticks[:: -(-len(ticks) // 6)]
    set_ticks(ticks, [f"{tick:g}" for tick in ticks])


def _percent(measure: str) -> float:
    return 100.0 if "accuracy" in measure else 1.0


def _unit(measure: str) -> str:
    return f"{measure} (%)" if "accuracy" in measure else measure


def _times(interval: Interval, scale: float) -> Interval:
    return Interval(scale * interval.mean, scale * interval.low, scale * interval.high)


def _word(text: str) -> str:
    """Return a token in quotes, with visible spaces and line ends, cut to 18 characters."""
    visible = clean(text.replace("\n", "⏎").replace("\t", "⇥").replace(" ", "␣"))
    return f"“{visible if len(visible) <= 18 else visible[:17] + '…'}”"
