"""How the updates of a training spread over tokens: Deng et al. 2025, §3.2.2 (plateau stage) and Figure 4.

    Δp = exp(log π after the step's updates) − exp(log π before)

of the tokens that were looked at after the update, on the plateau (the whole run where no breakpoint is seen). The
intervals are those of blocks of √T neighbouring steps drawn with replacement, all tokens of a step clusters: the policy
of one step is nearly that of the next. Where steps are few, answers are drawn, those to one prompt together. Runs of 40
in which tokens are told to gain or lose where Δp only wanders (100 steps, correlation 0.8), each step drawn alone and
in blocks: 16 and 2.
"""

from __future__ import annotations

import math
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
from explorl.analysis.token_types import block_resamples
from explorl.stats import Cell, Interval, Table
from explorl.stats.crossed import student_quantile
from explorl.stats.regression import Effect

Floats = NDArray[np.float64]

SMALL = 0.06
"""|Δp| below which a token is taken to stay: on the paper's plateau more than 99 % do."""
TOP = 0.2
"""Share of tokens with the largest |Δp| that are looked at."""
BINS = 10
MIN_CLUSTERS = 8
MIN_TOKENS = 200
RESAMPLES = 400


@dataclass(frozen=True)
class Bins:
    """|Δp| by equal shares of the tokens, ordered by another quantity."""

    name: str
    unit: str
    percentile: Floats
    """Mean percentile of the tokens in each bin; equal values are in one bin."""
    middle: Floats
    """Median of the quantity in each bin."""
    means: tuple[Interval, ...]
    """Mean |Δp| in each bin."""
    correlation: Effect
    """Spearman's, of |Δp| with the quantity."""
    top_share: Effect
    """Share of all |Δp| that the tokens with the top 20 % of the quantity have."""


@dataclass(frozen=True)
class CategoryUpdate:
    """How far the tokens of a category move."""

    category: str
    tokens: int
    mean: Interval
    """Mean |Δp|."""
    excess: Effect
    """Its difference to the mean of all tokens."""
    in_top: Interval
    """Share of its tokens among the 20 % of all tokens with the largest |Δp|."""


@dataclass(frozen=True)
class Updates:
    """How concentrated the changes of probability are."""

    tokens: int
    steps: tuple[int, int]
    """First and last step that was looked at."""
    plateau: bool
    """Whether these are the steps after a breakpoint."""
    below: Interval
    """Share of tokens with |Δp| < 0.06."""
    concentration: Interval
    """Share of all |Δp| that the 20 % of tokens with the largest have."""
    positive: Effect | None
    """Mean Δp in positive answers."""
    negative: Effect | None
    grid: Floats
    """|Δp| at which the distribution is given."""
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
    """Changes of probability on the plateau, against entropy, update size G and token category.

    ``categories`` has a category for each token of an answer; by default those of the option ``categories.lists``.
    """
    lists = word_lists(context.option("categories", "lists", "") or None)
    categories = categories or partial(categories_of, lists=lists)
    tokens = table.tokens
    change = np.exp(tokens["logp_after"]) - np.exp(tokens["logp"])
    known = np.isfinite(change)
    end = rising_end(table, context)
    plateau = bool(np.isfinite(end)) and bool((known & (tokens.step > end)).sum() >= MIN_TOKENS)
    kept = known & (tokens.step > end) if plateau else known
    if kept.sum() < MIN_TOKENS:
        return Unavailable(f"{kept.sum()} tokens have a probability after the update; at least {MIN_TOKENS} needed")
    size = np.abs(change[kept])
    if size.max() == 0:
        return Unavailable("no token's probability changes: the updates did nothing (a learning rate of 0?)")
    clusters = _Clusters(table, kept, context.seed)
    if clusters.count < MIN_CLUSTERS:
        return Unavailable(
            f"the tokens are of {clusters.count:.0f} prompts or answers; intervals need {MIN_CLUSTERS} or more"
        )
    sign = completion_signs(table)[tokens.completion][kept]
    top = size >= np.quantile(size, 1 - TOP)
    quantities = [("entropy", "nats"), ("update_size", "")]
    steps = tokens.step[kept]
    grid = np.geomspace(min(max(float(np.quantile(size, 0.02)), 1e-6), size.max() / 2), float(size.max()), 80)
    return Updates(
        tokens=int(kept.sum()),
        steps=(int(steps.min()), int(steps.max())),
        plateau=plateau,
        below=_share(clusters, size < SMALL),
        concentration=_interval(clusters.ratio(size * top, size)),
        positive=_signed(clusters, change[kept], sign > 0),
        negative=_signed(clusters, change[kept], sign < 0),
        grid=grid,
        above=1 - np.searchsorted(np.sort(size), grid) / len(size),
        bins=tuple(
            _bins(clusters, size, tokens[name][kept], name.replace("_", " "), unit)
            for name, unit in quantities
            if name in tokens and _varies(tokens[name][kept])
        ),
        categories=_categories(clusters, size, top, _labels(table, kept, categories)) if "tokens" in tokens else (),
    )


def _varies(values: Floats) -> bool:
    known = values[np.isfinite(values)]
    return len(known) > 0 and bool(known.max() > known.min())


class _Clusters:
    """Tokens by step, or by what is drawn together where there are few steps, and how often each is in a resample."""

    def __init__(self, table: LensTable, kept: NDArray[np.bool_], seed: int) -> None:
        rng = np.random.default_rng(seed)
        steps, self._of = np.unique(table.tokens.step[kept], return_inverse=True)
        length = round(len(steps) ** 0.5)
        if len(steps) // length >= MIN_CLUSTERS:
            self.count = len(steps) / length
            drawn = block_resamples(len(steps), length, RESAMPLES, rng)
        else:
            groups, self._of = np.unique(table.completions.cluster[table.tokens.completion[kept]], return_inverse=True)
            self.count = len(groups)
            drawn = rng.multinomial(len(groups), np.full(len(groups), 1 / len(groups)), size=RESAMPLES).astype(float)
        self._weights = np.concatenate([np.ones((1, drawn.shape[1])), drawn])

    def sums(self, values: Floats) -> Floats:
        """The sum of all tokens, and that of each resample."""
        return np.asarray(self._weights @ np.bincount(self._of, values, minlength=self._weights.shape[1]))

    def ratio(self, above: Floats, below: Floats) -> Floats:
        """Σ above ÷ Σ below, and that of each resample."""
        return self.sums(above.astype(float)) / np.maximum(self.sums(below.astype(float)), 1e-300)

    def error(self, draws: Floats) -> float:
        """Of the first value, from the spread of the others, which is too small by what clusters are few."""
        return float(draws[1:].std(ddof=1)) * math.sqrt(self.count / max(self.count - 1, 1))

    def effect(self, draws: Floats) -> Effect:
        return Effect.of(float(draws[0]), self.error(draws), self.count - 1)


def _interval(draws: Floats) -> Interval:
    low, high = np.quantile(draws[1:], [0.025, 0.975])
    return Interval(float(draws[0]), min(float(low), float(draws[0])), max(float(high), float(draws[0])))


def _share(clusters: _Clusters, marks: NDArray[np.bool_]) -> Interval:
    """A share with Student's interval of its logit; where all or none of the tokens have it, by the rule of three."""
    draws = clusters.ratio(marks.astype(float), np.ones(len(marks)))
    mean, error = float(draws[0]), clusters.error(draws)
    if mean in (0.0, 1.0):
        far = min(3 / clusters.count, 1.0)
        return Interval(0.0, 0.0, far) if mean == 0 else Interval(1.0, 1 - far, 1.0)
    reach = student_quantile(0.975, clusters.count - 1) * error / (mean * (1 - mean))
    odds = mean / (1 - mean)
    low, high = (odds * float(np.exp(side * min(reach, 700.0))) for side in (-1, 1))
    return Interval(mean, low / (1 + low), high / (1 + high))


def _signed(clusters: _Clusters, change: Floats, chosen: NDArray[np.bool_]) -> Effect | None:
    return clusters.effect(clusters.ratio(change * chosen, chosen.astype(float))) if chosen.any() else None


def _bins(clusters: _Clusters, size: Floats, values: Floats, name: str, unit: str) -> Bins:
    known = np.isfinite(values)
    values = np.where(known, values, 0.0)
    rank = _ranks(values[known])
    place = np.full(len(values), -1)
    place[known] = np.minimum((rank * BINS).astype(int), BINS - 1)
    percentile, middle, means = [], [], []
    for index in np.unique(place[known]):
        inside = place == index
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
    """Ranks in (0, 1), equal values sharing the mean of theirs."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    return np.asarray(((ends - counts / 2) / len(values))[inverse])


def _labels(
    table: LensTable, kept: NDArray[np.bool_], categories: Callable[[Sequence[str]], Sequence[str]]
) -> NDArray[np.object_]:
    """The category of each token that is kept, with its whole answer in sight."""
    texts, answers = table.tokens["tokens"], table.completions
    labels = np.full(len(kept), "", dtype=object)
    for answer in np.unique(table.tokens.completion[kept]):
        inside = slice(int(answers.start[answer]), int(answers.start[answer] + answers.count[answer]))
        labels[inside] = categories(texts[inside].tolist())
    return labels[kept]


def _categories(
    clusters: _Clusters, size: Floats, top: NDArray[np.bool_], labels: NDArray[np.object_]
) -> tuple[CategoryUpdate, ...]:
    everything = clusters.ratio(size, np.ones(len(size)))
    found = []
    for name in sorted(set(labels)):
        inside = (labels == name).astype(float)
        mean = clusters.ratio(size * inside, inside)
        excess, in_top = clusters.effect(mean - everything), _interval(clusters.ratio(inside * top, inside))
        found.append(CategoryUpdate(str(name), int(inside.sum()), _interval(mean), excess, in_top))
    return tuple(sorted(found, key=lambda one: -one.mean.mean))


# ---------------------------------------------------------------------------- in words and numbers
def updates_summary(result: Updates) -> str:
    """How concentrated the updates are, and what goes with them."""
    where = "On the plateau" if result.plateau else "Over the whole run"
    text = (
        f"{where} (steps {result.steps[0]}–{result.steps[1]}), {result.below:.2%} of tokens change their probability "
        f"by less than {SMALL}; the 20 % that change most have {result.concentration:.1%} of all change."
    )
    for one in result.bins:
        how = {1: "goes with", -1: "goes against", 0: "has no relation, as far as can be told, to"}
        text += f" |Δp| {how[one.correlation.sign]} {one.name} (Spearman {one.correlation.interval:+.2f})."
    for name, sign in (("positive", result.positive), ("negative", result.negative)):
        if sign is not None:
            word = {1: "gain", -1: "lose", 0: "neither gain nor lose, as far as can be told,"}[sign.sign]
            text += f" Tokens of {name} answers {word} probability ({sign.interval:+.4f})."
    return text


def updates_tables(result: Updates) -> dict[str, Table]:
    """The shares, |Δp| by bins, and by category."""
    rows: list[list[Cell]] = [
        [f"share of tokens with |Δp| < {SMALL}", result.below, None],
        ["share of all |Δp| in the top 20 % of tokens", result.concentration, None],
    ]
    for name, sign in (("positive", result.positive), ("negative", result.negative)):
        if sign is not None:
            rows.append([f"mean Δp in {name} answers", sign.interval, sign.p])
    for one in result.bins:
        rows.append([f"Spearman's correlation of |Δp| and {one.name}", one.correlation.interval, one.correlation.p])
        rows.append([f"share of all |Δp| in the top 20 % by {one.name}", one.top_share.interval, None])
    bins: list[list[Cell]] = [
        [one.name, float(one.percentile[index]), float(one.middle[index]), mean]
        for one in result.bins
        for index, mean in enumerate(one.means)
    ]
    kinds: list[list[Cell]] = [
        [one.category, one.tokens, one.mean, one.excess.interval, one.excess.p, one.in_top] for one in result.categories
    ]
    columns = ["category", "tokens", "mean |Δp|", "difference to all tokens", "p of 0", "share in the top 20 %"]
    return {
        "updates": Table(["measure", "value", "p of 0"], rows, title="changes of probability", number=".4f"),
        "updates-bins": Table(["by", "percentile", "median", "mean |Δp|"], bins, title="|Δp| by bins", number=".4f"),
        "updates-categories": Table(columns, kinds, title="|Δp| by token category", number=".4f"),
    }
