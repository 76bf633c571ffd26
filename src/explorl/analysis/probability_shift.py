"""How updates change the probabilities of tokens: Deng et al. 2025, §3.2.2 (plateau stage) and Figure 4.

    Δp = exp(log π after the step's updates) − exp(log π before)

of the tokens that were inspected after the update, on the plateau (or over the whole run if there is no breakpoint).
Intervals come from resampling blocks of √T neighbouring steps, because the policy of one step is nearly that of the
next. If there are few steps, completions are resampled, those of a prompt together. If Δp only fluctuates (100 steps,
correlation 0.8), the runs of 40 in which it has a significant sign, resampling single steps and blocks, are 16 and 2.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from explorl.analysis.categories import categories_of, word_lists
from explorl.analysis.lens import Context, Unavailable
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


@dataclass(frozen=True)
class Updates:
    """How concentrated the changes of probability are."""

    tokens: int
    steps: tuple[int, int]
    """First and last inspected step."""
    plateau: bool
    """True if these are the steps after a breakpoint."""
    below: Interval
    """Share of tokens with |Δp| < 0.06."""
    concentration: Interval
    """Share of all |Δp| in the 20 % of tokens with the largest |Δp|."""
    positive: Effect | None
    """Mean Δp in positive completions."""
    negative: Effect | None
    grid: Floats
    """Values of |Δp| at which the distribution is evaluated."""
    above: Floats
    """Share of tokens with at least that |Δp|."""
    bins: tuple[Bins, ...]
    categories: tuple[CategoryUpdate, ...]


def updates(
    table: LensTable,
    context: Context,
    *,
    categories: Callable[[Sequence[str]], Sequence[str]] | None = None,
) -> Updates | Unavailable:
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
    return Updates(
        tokens=int(included.sum()),
        steps=(int(steps.min()), int(steps.max())),
        plateau=plateau,
        below=_share(clusters, size < SMALL),
        concentration=_interval(clusters.ratio(size * top, size)),
        positive=_signed(clusters, change[included], sign > 0),
        negative=_signed(clusters, change[included], sign < 0),
        grid=grid,
        above=1 - np.searchsorted(np.sort(size), grid) / len(size),
        bins=tuple(
            _bins(clusters, size, tokens[name][included], name.replace("_", " "), unit)
            for name, unit in quantities
            if name in tokens and _varies(tokens[name][included])
        ),
        categories=_categories(clusters, size, top, _labels(table, included, categories)) if "tokens" in tokens else (),
    )


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
) -> tuple[CategoryUpdate, ...]:
    overall = clusters.ratio(size, np.ones(len(size)))
    updates_by_category = []
    for name in sorted(set(labels)):
        inside = (labels == name).astype(float)
        mean = clusters.ratio(size * inside, inside)
        excess, in_top = clusters.effect(mean - overall), _interval(clusters.ratio(inside * top, inside))
        updates_by_category.append(CategoryUpdate(str(name), int(inside.sum()), _interval(mean), excess, in_top))
    return tuple(sorted(updates_by_category, key=lambda update: -update.mean.mean))


# ---------------------------------------------------------------------------- summary and tables
def updates_summary(result: Updates) -> str:
    """Describe how concentrated the updates are, and what they are associated with."""
    where = "On the plateau" if result.plateau else "Over the whole run"
    text = (
        f"{where} (steps {result.steps[0]}–{result.steps[1]}), {result.below:.2%} of tokens change their probability "
        f"by less than {SMALL}; the 20 % that change most have {result.concentration:.1%} of all change."
    )
    for bins in result.bins:
        verb = {1: "increases with", -1: "decreases with", 0: "is not significantly correlated with"}
        text += f" |Δp| {verb[bins.correlation.sign]} {bins.name} (Spearman {bins.correlation:+.2f})."
    for name, effect in (("positive", result.positive), ("negative", result.negative)):
        if effect is not None:
            verb = {1: "gain", -1: "lose", 0: "do not significantly gain or lose"}
            text += f" Tokens of {name} completions {verb[effect.sign]} probability ({effect:+.4f})."
    return text


def updates_tables(result: Updates) -> dict[str, Table]:
    """Return tables of the shares, of |Δp| by bins, and of |Δp| by category."""
    rows: list[list[Cell]] = [
        [f"share of tokens with |Δp| < {SMALL}", result.below, None],
        ["share of all |Δp| in the top 20 % of tokens", result.concentration, None],
    ]
    for name, effect in (("positive", result.positive), ("negative", result.negative)):
        if effect is not None:
            rows.append([f"mean Δp in {name} answers", effect, effect.p])
    for bins in result.bins:
        rows.append([f"Spearman's correlation of |Δp| and {bins.name}", bins.correlation, bins.correlation.p])
        rows.append([f"share of all |Δp| in the top 20 % by {bins.name}", bins.top_share, None])
    bin_rows: list[list[Cell]] = [
        [bins.name, float(bins.percentile[index]), float(bins.middle[index]), mean]
        for bins in result.bins
        for index, mean in enumerate(bins.means)
    ]
    category_rows: list[list[Cell]] = [
        [update.category, update.tokens, update.mean, update.excess, update.excess.p, update.in_top]
        for update in result.categories
    ]
    columns = ["category", "tokens", "mean |Δp|", "difference to all tokens", "p of 0", "share in the top 20 %"]
    return {
        "updates": Table(["measure", "value", "p of 0"], rows, title="changes of probability", number=".4f"),
        "updates-bins": Table(
            ["by", "percentile", "median", "mean |Δp|"], bin_rows, title="|Δp| by bins", number=".4f"
        ),
        "updates-categories": Table(columns, category_rows, title="|Δp| by token category", number=".4f"),
    }
