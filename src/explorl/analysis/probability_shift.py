"""How updates change the probabilities of tokens: Deng et al. 2025, §3.2.2 (plateau stage) and Figure 4.

    Δp = exp(log π after the step's updates) − exp(log π before)

of the tokens that were inspected after the update, on the plateau (or over the whole run if there is no breakpoint).
Intervals come from resampling blocks of √T neighbouring steps, because the policy of one step is nearly that of the
next. If there are few steps, completions are resampled, those of a prompt together. If Δp only fluctuates (100 steps,
correlation 0.8), the runs of 40 in which it has a significant sign, resampling single steps and blocks, are 16 and 2.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from explorl.analysis.categories import categories_of, word_lists
from explorl.analysis.charts import DASHED, Chart, Palette, decades, interval_rows, line, rule
from explorl.analysis.lens import Context, Finding, Findings, Unavailable, finding_table
from explorl.analysis.lens_table import LensTable
from explorl.analysis.positions import completion_signs
from explorl.analysis.reward_stages import rising_end
from explorl.stats import Cell, Interval, Table
from explorl.stats.distributions import student_quantile
from explorl.stats.interval import Effect
from explorl.stats.resample import resample, resampled_error, resampled_interval

Floats = NDArray[np.float64]

SMALL = 0.06
"""|Δp| below which a token counts as unchanged: on the paper's plateau more than 99 % are."""
TOP = 0.2
"""Share of tokens that count as those with the largest |Δp|."""
BINS = 10
MIN_TICK_DISTANCE = 14
"""Percentiles between two labels of a chart, so that the labels do not overlap."""
MIN_CLUSTERS = 8
MIN_TOKENS = 200
RESAMPLES = 400


@dataclass(frozen=True)
class Bins:
    """|Δp| in bins with equal shares of the tokens, by another quantity."""

    name: str
    unit: str
    percentile: Floats
    """Mean percentile of the tokens in each bin; equal values share a bin."""
    middle: Floats
    """Median of the quantity in each bin."""
    means: tuple[Interval, ...]
    """Mean |Δp| in each bin."""
    correlation: Effect
    """Spearman's correlation of |Δp| with the quantity."""
    top_share: Effect
    """Share of all |Δp| in the tokens with the top 20 % of the quantity."""


@dataclass(frozen=True)
class CategoryUpdate:
    """Change of the tokens of a category."""

    category: str
    tokens: int
    mean: Interval
    """Mean |Δp|."""
    excess: Effect
    """Difference to the mean of all tokens."""
    in_top: Interval
    """Share of its tokens among the 20 % of all tokens with the largest |Δp|."""


def updates(
    table: LensTable,
    context: Context,
    *,
    categories: Callable[[Sequence[str]], Sequence[str]] | None = None,
) -> Findings | Unavailable:
    """Analyse changes of probability on the plateau, by entropy, update size G and token category.

    ``categories`` returns a category for each token of a completion, by default from the option ``categories.lists``.
    """
    lists = word_lists(context.option("categories", "lists", "") or None)
    categories = categories or partial(categories_of, lists=lists)
    tokens = table.tokens
    change = np.exp(tokens["logp_after"]) - np.exp(tokens["logp"])
    known = np.isfinite(change)
    end = rising_end(table, context)
    plateau = bool(np.isfinite(end)) and bool((known & (tokens.step > end)).sum() >= MIN_TOKENS)
    included = known & (tokens.step > end) if plateau else known
    if included.sum() < MIN_TOKENS:
        return Unavailable(
            f"{included.sum()} tokens have a probability after the update; the analysis needs {MIN_TOKENS} or more"
        )
    size = np.abs(change[included])
    if size.max() == 0:
        return Unavailable("no token's probability changes: the updates did nothing (a learning rate of 0?)")
    clusters = _Clusters(table, included, context.seed)
    if clusters.count < MIN_CLUSTERS:
        return Unavailable(
            f"the tokens come from {clusters.count:.0f} prompts or completions; intervals need {MIN_CLUSTERS} or more"
        )
    sign = completion_signs(table)[tokens.completion][included]
    top = size >= np.quantile(size, 1 - TOP)
    quantities = [("entropy", "nats"), ("update_size", "")]
    steps = tokens.step[included]
    grid = np.geomspace(min(max(float(np.quantile(size, 0.02)), 1e-6), size.max() / 2), float(size.max()), 80)
    below, concentration = _share(clusters, size < SMALL), _interval(clusters.ratio(size * top, size))
    by_quantity = [
        _bins(clusters, size, tokens[name][included], name.replace("_", " "), unit)
        for name, unit in quantities
        if name in tokens and _varies(tokens[name][included])
    ]
    by_category = _categories(clusters, size, top, _labels(table, included, categories)) if "tokens" in tokens else []
    signed = {
        "positive": _signed(clusters, change[included], sign > 0),
        "negative": _signed(clusters, change[included], sign < 0),
    }
    first, last, count = int(steps.min()), int(steps.max()), int(included.sum())
    phase = "on the plateau" if plateau else "over the whole run"
    phase_and_steps = f"{phase} (steps {first}–{last})"
    above = 1 - np.searchsorted(np.sort(size), grid) / len(size)
    caption = (
        f"{below:.2%} of {count:,} tokens {phase_and_steps} change their probability by less than {SMALL} in a step's "
        f"updates; the 20 % that change most account for {concentration:.1%} of all change."
    )
    return Findings(
        _describe(phase_and_steps, below, concentration, by_quantity, signed),
        _tables(below, concentration, by_quantity, signed, by_category),
        [
            _distribution_chart(caption, grid, above),
            *(_bins_chart(bins, phase) for bins in by_quantity),
            *([_category_chart(by_category, phase)] if by_category else []),
        ],
        {
            "tokens": count, "steps": (first, last), "plateau": plateau, "below": below,
            "concentration": concentration, **signed, "grid": grid, "above": above, "bins": by_quantity,
            "categories": by_category,
        },
    )  # fmt: skip


def _varies(values: Floats) -> bool:
    known = values[np.isfinite(values)]
    return len(known) > 0 and bool(known.max() > known.min())


class _Clusters:
    """Clusters of tokens (steps, or completions if steps are few), and how often each is in a resample."""

    def __init__(self, table: LensTable, included: NDArray[np.bool_], seed: int) -> None:
        rng = np.random.default_rng(seed)
        steps, self._index = np.unique(table.tokens.step[included], return_inverse=True)
        units, block = len(steps), round(len(steps) ** 0.5)
        if units // block < MIN_CLUSTERS:
            groups, self._index = np.unique(
                table.completions.cluster[table.tokens.completion[included]], return_inverse=True
            )
            units, block = len(groups), 1
        self.count = units / block
        resampled = np.vstack([*resample(units, RESAMPLES, rng, block=block)])
        self._weights = np.concatenate([np.ones((1, resampled.shape[1])), resampled])

    def sums(self, values: Floats) -> Floats:
        """Return the sum over all tokens, followed by the sum of each resample."""
        return np.asarray(self._weights @ np.bincount(self._index, values, minlength=self._weights.shape[1]))

    def ratio(self, numerator: Floats, denominator: Floats) -> Floats:
        """Return Σ numerator ÷ Σ denominator, followed by that of each resample."""
        return self.sums(numerator.astype(float)) / np.maximum(self.sums(denominator.astype(float)), 1e-300)

    def error(self, values: Floats) -> float:
        """Return the standard error of the first value from the spread of the others, corrected for few clusters."""
        return resampled_error(values, self.count)

    def effect(self, values: Floats) -> Effect:
        """Return the first value as an effect, with its standard error."""
        return Effect.of(float(values[0]), self.error(values), self.count - 1)


def _interval(values: Floats) -> Interval:
    interval = resampled_interval(float(values[0]), values[1:])
    return Interval(interval.mean, min(interval.low, interval.mean), max(interval.high, interval.mean))


def _share(clusters: _Clusters, marks: NDArray[np.bool_]) -> Interval:
    """Return a share with Student's interval of its logit, or by the rule of three if it is 0 or 1."""
    values = clusters.ratio(marks.astype(float), np.ones(len(marks)))
    mean, error = float(values[0]), clusters.error(values)
    if mean in (0.0, 1.0):
        width = min(3 / clusters.count, 1.0)
        return Interval(0.0, 0.0, width) if mean == 0 else Interval(1.0, 1 - width, 1.0)
    reach = student_quantile(0.975, clusters.count - 1) * error / (mean * (1 - mean))
    odds = mean / (1 - mean)
    low, high = (odds * float(np.exp(side * min(reach, 700.0))) for side in (-1, 1))
    return Interval(mean, low / (1 + low), high / (1 + high))


def _signed(clusters: _Clusters, change: Floats, selected: NDArray[np.bool_]) -> Effect | None:
    return clusters.effect(clusters.ratio(change * selected, selected.astype(float))) if selected.any() else None


def _bins(clusters: _Clusters, size: Floats, values: Floats, name: str, unit: str) -> Bins:
    known = np.isfinite(values)
    values = np.where(known, values, 0.0)
    rank = _ranks(values[known])
    bin_index = np.full(len(values), -1)
    bin_index[known] = np.minimum((rank * BINS).astype(int), BINS - 1)
    percentile, middle, means = [], [], []
    for index in np.unique(bin_index[known]):
        inside = bin_index == index
        percentile.append(100 * float(rank[inside[known]].mean()))
        middle.append(float(np.median(values[inside])))
        means.append(_interval(clusters.ratio(size * inside, inside.astype(float))))
    by_value, by_size = np.zeros(len(values)), np.zeros(len(values))
    by_value[known], by_size[known] = rank - rank.mean(), _ranks(size[known])
    by_size[known] -= by_size[known].mean()
    products = [clusters.sums(a * b) for a, b in ((by_value, by_size), (by_value, by_value), (by_size, by_size))]
    correlation = products[0] / np.sqrt(np.maximum(products[1] * products[2], 1e-300))
    top = known & (values >= np.quantile(values[known], 1 - TOP))
    return Bins(
        name,
        unit,
        np.array(percentile),
        np.array(middle),
        tuple(means),
        clusters.effect(correlation),
        clusters.effect(clusters.ratio(size * top, size * known)),
    )


def _ranks(values: Floats) -> Floats:
    """Return ranks in (0, 1); equal values share their mean rank."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    return np.asarray(((ends - counts / 2) / len(values))[inverse])


def _labels(
    table: LensTable, included: NDArray[np.bool_], categories: Callable[[Sequence[str]], Sequence[str]]
) -> NDArray[np.object_]:
    """Return the category of each included token, determined from its whole completion."""
    texts, completions = table.tokens["tokens"], table.completions
    labels = np.full(len(included), "", dtype=object)
    for index in np.unique(table.tokens.completion[included]):
        inside = slice(int(completions.start[index]), int(completions.start[index] + completions.count[index]))
        labels[inside] = categories(texts[inside].tolist())
    return labels[included]


def _categories(
    clusters: _Clusters, size: Floats, top: NDArray[np.bool_], labels: NDArray[np.object_]
) -> list[CategoryUpdate]:
    overall = clusters.ratio(size, np.ones(len(size)))
    updates_by_category = []
    for name in sorted(set(labels)):
        inside = (labels == name).astype(float)
        mean = clusters.ratio(size * inside, inside)
        excess, in_top = clusters.effect(mean - overall), _interval(clusters.ratio(inside * top, inside))
        updates_by_category.append(CategoryUpdate(str(name), int(inside.sum()), _interval(mean), excess, in_top))
    return sorted(updates_by_category, key=lambda update: -update.mean.mean)


# ---------------------------------------------------------------------------- words, tables and charts
def _describe(
    phase: str, below: Interval, concentration: Interval, bins: Sequence[Bins], signed: Mapping[str, Effect | None]
) -> str:
    """Describe how concentrated the updates are, and what they are associated with."""
    text = (
        f"{phase[0].upper()}{phase[1:]}, {below:.2%} of tokens change their probability by less than {SMALL}; the 20 % "
        f"that change most have {concentration:.1%} of all change."
    )
    for each in bins:
        verb = {1: "increases with", -1: "decreases with", 0: "is not significantly correlated with"}
        text += f" |Δp| {verb[each.correlation.sign]} {each.name} (Spearman {each.correlation:+.2f})."
    for name, effect in signed.items():
        if effect is not None:
            verb = {1: "gain", -1: "lose", 0: "do not significantly gain or lose"}
            text += f" Tokens of {name} completions {verb[effect.sign]} probability ({effect:+.4f})."
    return text


def _tables(
    below: Interval,
    concentration: Interval,
    bins: Sequence[Bins],
    signed: Mapping[str, Effect | None],
    categories: Sequence[CategoryUpdate],
) -> dict[str, Table]:
    """Return tables of the shares, of |Δp| by bins, and of |Δp| by category."""
    findings = [
        Finding("below", f"share of tokens with |Δp| < {SMALL}", below),
        Finding("concentration", "share of all |Δp| in the top 20 % of tokens", concentration),
        *(Finding(name, f"mean Δp in {name} answers", value) for name, value in signed.items() if value is not None),
    ]
    for each in bins:
        findings += [
            Finding("correlation", f"Spearman's correlation of |Δp| and {each.name}", each.correlation),
            Finding("top_share", f"share of all |Δp| in the top 20 % by {each.name}", each.top_share.times(1)),
        ]
    bin_rows: list[list[Cell]] = [
        [each.name, float(each.percentile[index]), float(each.middle[index]), mean]
        for each in bins
        for index, mean in enumerate(each.means)
    ]
    category_rows: list[list[Cell]] = [
        [each.category, each.tokens, each.mean, each.excess, each.excess.p, each.in_top] for each in categories
    ]
    columns = ["category", "tokens", "mean |Δp|", "difference to all tokens", "p of 0", "share in the top 20 %"]
    return {
        "updates": finding_table("changes of probability", findings, number=".4f"),
        "updates-bins": Table(["by", "percentile", "median", "mean |Δp|"], bin_rows, "|Δp| by bins", ".4f"),
        "updates-categories": Table(columns, category_rows, "|Δp| by token category", ".4f"),
    }


def _distribution_chart(caption: str, grid: Floats, above: Floats) -> Chart:
    """Return the chart of the share of tokens with at least some |Δp|."""
    shown = above > 0

    def axes_by_decades(axes: Any, palette: Palette) -> None:
        note = {"xytext": (-4, -10), "textcoords": "offset points", "ha": "right", "fontsize": 8.5}
        axes.annotate(f"|Δp| = {SMALL}", (SMALL, 100), **note)
        axes.set_xscale("log")
        axes.set_yscale("log")
        for set_ticks, low, high in (
            (axes.set_yticks, 100 * above[shown].min(), 100), (axes.set_xticks, grid[0], grid[-1])
        ):  # fmt: skip
            ticks = decades(low, high)
            set_ticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.minorticks_off()

    marks = [line(grid[shown], 100 * above[shown], 0), rule(SMALL, 1, dash=DASHED, width=1.4), axes_by_decades]
    title = "How far updates move tokens"
    return Chart("updates", title, caption, marks, "|Δp| of an update", "tokens at or above (%)")


def _bins_chart(bins: Bins, phase: str) -> Chart:
    """Return the chart of mean |Δp| by a quantity."""

    def means(axes: Any, palette: Palette) -> None:
        middle = np.array([mean.mean for mean in bins.means])
        ends = np.abs(np.array([[mean.mean - mean.low, mean.high - mean.mean] for mean in bins.means]).T)
        style = {"color": palette.arms[0], "marker": "o", "markersize": 5, "linewidth": 1.4, "capsize": 3}
        axes.errorbar(bins.percentile, middle, yerr=ends, **style)
        axes.set_ylim(bottom=0)
        ticks = [len(middle) - 1]
        for index in range(len(middle) - 2, -1, -1):
            if bins.percentile[ticks[-1]] - bins.percentile[index] > MIN_TICK_DISTANCE:
                ticks.append(index)
        labels = [f"{bins.percentile[index]:.0f}\n{bins.middle[index]:.1g}" for index in ticks]
        axes.set_xticks([bins.percentile[index] for index in ticks], labels)

    caption = (
        f"Mean |Δp| by {bins.name}, tokens {phase} in tenths (equal values together): Spearman's correlation "
        f"{bins.correlation:+.2f}; the 20 % of tokens with the highest {bins.name} account for {bins.top_share:.0%} of "
        "all change. Bars: 95 % intervals."
    )
    unit = f" ({bins.unit})" if bins.unit else ""
    x = f"tokens by {bins.name}: percentile, below it the value{unit}"
    return Chart(f"updates-{bins.name.replace(' ', '-')}", f"Change by {bins.name}", caption, [means], x, "mean |Δp|")


def _category_chart(categories: Sequence[CategoryUpdate], phase: str) -> Chart:
    """Return the chart of mean |Δp| by token category."""
    means = "; ".join(f"{each.category} {each.mean:.4f}" for each in categories)
    caption = (
        f"Mean |Δp| by token category, {phase}: {means}. Bars: 95 % intervals; filled: differs significantly from the "
        "mean of all tokens."
    )
    rows = categories[::-1]
    names, filled = [each.category for each in rows], [each.excess.sign != 0 for each in rows]
    marks = [interval_rows(names, [each.mean for each in rows], [0] * len(rows), filled=filled), _from_zero]
    size = (4.8, 1.1 + 0.3 * len(categories))
    return Chart("updates-categories", "Change by token category", caption, marks, "mean |Δp|", size=size)


def _from_zero(axes: Any, palette: Palette) -> None:
    axes.set_xlim(0, 1.05 * axes.get_xlim()[1])
