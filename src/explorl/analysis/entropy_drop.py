"""Tokens that lose entropy and tokens that become frequent: Deng et al. 2025, §3.2.2 and Figure 3b, 3c.

Token types are compared over the steps of the rising stage.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from explorl.analysis.charts import Chart, Palette, interval_rows, rule
from explorl.analysis.lens import Context, Finding, Findings, Unavailable, finding_table, series_table, values_of
from explorl.analysis.lens_table import LensTable
from explorl.analysis.token_types import MIN_STEPS_SEEN, RESAMPLES, TokenTypes, resampled_effect, token_types
from explorl.core.text import clean
from explorl.stats import Cell, Interval, Table
from explorl.stats.interval import LEVEL, Effect, format_points
from explorl.stats.p_values import holm

Floats = NDArray[np.float64]

FASTEST = 0.2
"""Share of token types that count as those with the fastest entropy drop."""
LISTED, DRAWN = 20, 12
"""Words in a table, and in a chart."""


@dataclass(frozen=True)
class WordChange:
    """Change of a token type from the first to the last third of the steps."""

    text: str
    count: int
    before: float
    after: float
    change: Effect
    corrected: float | None
    """p value after Holm's correction for all types."""

    @property
    def significant(self) -> bool:
        return self.corrected is not None and self.corrected < LEVEL


def fastest_drop(table: LensTable, context: Context) -> Findings | Unavailable:
    """Find the 20 % of token types with the fastest entropy drop.

    The slope of a type is fitted by least squares over its occurrences, in nats per 100 steps. Types whose entropy
    rises are never among the fastest.
    """
    if not (np.any(table.completions.sign > 0) and np.any(table.completions.sign < 0)):
        return Unavailable("no completion is positive, or none is negative, for example because all rewards are equal")
    types = token_types(table, context)
    weights = types.resampled_steps(context.seed, RESAMPLES)
    t = (types.steps - types.steps.mean()) / 100
    ones = np.ones_like(t)
    sums = types.weighted(weights, {
        "n": ("n", ones), "x": ("n", t), "xx": ("n", t**2), "y": ("y", ones), "xy": ("y", t),
        "positive": ("positive", ones), "negative": ("negative", ones),
    })  # fmt: skip
    spread = sums["n"] * sums["xx"] - sums["x"] ** 2
    with np.errstate(divide="ignore", invalid="ignore"):
        slopes = np.where(spread > 1e-9, (sums["n"] * sums["xy"] - sums["x"] * sums["y"]) / spread, np.inf)
    fastest = int(np.ceil(FASTEST * types.count))
    order = np.argsort(slopes, axis=1, kind="stable")[:, :fastest]
    falling = np.take_along_axis(slopes, order, 1) < 0
    negative, positive = (
        (np.take_along_axis(sums[name], order, 1) * falling).sum(axis=1) for name in ("negative", "positive")
    )
    if not falling[0].any() or positive[0] + negative[0] == 0:
        return Unavailable("no frequent token type has falling entropy in completions with a sign")
    shares = negative / np.maximum(positive + negative, 1e-9)
    all_shares = sums["negative"].sum(1) / np.maximum(sums["negative"].sum(1) + sums["positive"].sum(1), 1e-9)
    blocks = types.blocks
    only_negative = (sums["positive"][0] == 0) & (sums["negative"][0] > 0)
    first = order[0][falling[0]]
    signed = np.maximum(sums["positive"][0] + sums["negative"][0], 1e-9)
    share, excess = resampled_effect(shares, blocks), resampled_effect(shares - all_shares, blocks)
    slope = _slope_difference(only_negative, slopes, sums["n"], blocks)
    measures = [
        Finding("negative_share", "negative share of the fastest types", share.times(1)),
        Finding("all_share", "negative share of all types", float(all_shares[0])),
        Finding("excess", "difference", excess),
        Finding("only_negative", "types in negative answers alone", int(only_negative.sum())),
        Finding("only_negative_slope", "their slope − that of the others", slope, "nats per 100 steps"),
    ]
    counts, negatives = sums["n"][0, first], sums["negative"][0, first] / signed[first]
    columns = {
        "token": [repr(text) for text in types.texts[first]],
        "slope (nats per 100 steps)": slopes[0, first],
        "share in negatives": negatives,
        "seen": counts.astype(int),
    }
    results = values_of(measures) | {
        "types": types.count, "fastest": len(first), "texts": tuple(types.texts[first]), "slopes": slopes[0, first],
        "negatives": negatives, "counts": counts, "negative_share": share,
    }  # fmt: skip
    sentence = _describe_drop(results)
    return Findings(
        sentence,
        {
            "fastest": finding_table(
                "tokens with the fastest entropy drop", measures if slope is not None else measures[:-1]
            ),
            "fastest-tokens": series_table("the token types whose entropy falls fastest", columns),
        },
        [_drop_chart(sentence, share, float(all_shares[0]))],
        results,
    )


def _describe_drop(drop: Mapping[str, Any]) -> str:
    """Describe in which completions the tokens with the fastest entropy drop occur."""
    comparison = {1: "more than", -1: "less than", 0: "not significantly different from that"}[drop["excess"].sign]
    text = (
        f"Of the {drop['fastest']} token types (of {drop['types']}) whose entropy falls fastest, "
        f"{drop['negative_share']:.1%} of occurrences are in negative completions: {comparison} of all types "
        f"({drop['all_share']:.1%}; difference {format_points(drop['excess'])})."
    )
    slope = drop["only_negative_slope"]
    if slope is None:
        return f"{text} No frequent type occurs in negative completions alone."
    pace = {-1: "faster than", 1: "more slowly than", 0: "not significantly faster than"}[slope.sign]
    return (
        f"{text} The entropy of the {drop['only_negative']} types in negative completions alone falls {pace} that of "
        f"the others ({slope:+.3f} nats per 100 steps)."
    )


def _drop_chart(sentence: str, share: Interval, all_share: float) -> Chart:
    """Return the chart of the signs of the completions with the fastest-dropping tokens, compared with all tokens."""

    def bars(axes: Any, palette: Palette) -> None:
        rows = [("fastest 20 %\nof token types", share.mean), ("all token types", all_share)]
        for y, (_, value) in enumerate(rows):
            axes.barh([y], [100 * value], height=0.55, color=palette.arms[1])
            axes.barh([y], [100 - 100 * value], left=[100 * value], height=0.55, color=palette.arms[0])
        for x, side, align in ((2, "negative", "left"), (98, "positive", "right")):
            axes.text(x, 1, side, ha=align, va="center", color=palette.paper, fontsize=9, fontweight="bold")
        ends = [[100 * (share.mean - max(share.low, 0.0))], [100 * (min(share.high, 1.0) - share.mean)]]
        axes.errorbar([100 * share.mean], [0], xerr=ends, color=palette.ink, capsize=4, linewidth=1.4)
        axes.set_yticks(range(len(rows)), [name for name, _ in rows])
        axes.set_ylim(1.6, -0.6)
        axes.set_xlim(0, 100)
        axes.grid(visible=False, axis="y")

    caption = sentence + " Occurrences in positive and negative completions; bar: 95 % interval."
    return Chart(
        "fastest", "Where the fastest entropy drop happens", caption, [bars], "occurrences (%)", size=(4.8, 2.0)
    )


def _slope_difference(selected: NDArray[np.bool_], slopes: Floats, counts: Floats, blocks: float) -> Effect | None:
    """Return the mean slope of the selected types minus that of the others, over occurrences."""
    if not selected.any() or selected.all():
        return None
    finite = np.where(np.isfinite(slopes), slopes, 0.0)
    weight = np.where(np.isfinite(slopes), counts, 0.0)
    means = [
        (finite[:, group] * weight[:, group]).sum(1) / np.maximum(weight[:, group].sum(1), 1e-9)
        for group in (selected, ~selected)
    ]
    return resampled_effect(means[0] - means[1], blocks)


def words(table: LensTable, context: Context) -> Findings | Unavailable:
    """Compare frequency and entropy of token types between the last and the first third of the rising stage."""
    types = token_types(table, context)
    weights = types.resampled_steps(context.seed + 1, RESAMPLES)
    first, last = np.quantile(types.steps, [1 / 3, 2 / 3])
    early, late = (types.steps <= first).astype(float), (types.steps > last).astype(float)
    sums = types.weighted(weights, {
        "n early": ("n", early), "n late": ("n", late), "y early": ("y", early), "y late": ("y", late),
    })  # fmt: skip
    totals = {name: np.maximum((weights * part) @ types.totals, 1e-9) for name, part in
              (("early", early), ("late", late))}  # fmt: skip
    blocks = types.blocks
    frequency = [sums[f"n {part}"] / totals[part][:, None] for part in ("early", "late")]
    with np.errstate(divide="ignore", invalid="ignore"):
        entropy = [sums[f"y {part}"] / sums[f"n {part}"] for part in ("early", "late")]
    counts = (sums["n early"] + sums["n late"])[0]
    both = (sums["n early"][0] >= MIN_STEPS_SEEN) & (sums["n late"][0] >= MIN_STEPS_SEEN)
    risen = _changes(types, frequency, np.ones(types.count, dtype=bool), counts, blocks)
    fallen = _changes(types, entropy, both, counts, blocks)
    risen = sorted((word for word in risen if word.change.mean > 0), key=lambda word: -word.change.mean)[:LISTED]
    fallen = sorted((word for word in fallen if word.change.mean < 0), key=lambda word: word.change.mean)[:LISTED]
    steps = int(types.steps[0]), int(types.steps[-1])
    frequency_title = "words whose frequency rises most (share of tokens)"
    return Findings(
        f"Frequency rises most: {_significant_words(risen)}. Entropy falls most: {_significant_words(fallen)}.",
        {
            "words-frequency": _word_table(frequency_title, risen),
            "words-entropy": _word_table("words whose entropy falls most (nats)", fallen),
        },
        [
            *_word_chart(
                "words-frequency", "Words whose frequency rises most", risen, steps, "change of share (points)"
            ),
            *_word_chart(
                "words-entropy", "Words whose entropy falls most", fallen, steps, "change of mean entropy (nats)"
            ),
        ],
        {"types": types.count, "steps": steps, "risen": risen, "fallen": fallen},
    )


def _changes(
    types: TokenTypes, values: list[Floats], selected: NDArray[np.bool_], counts: Floats, blocks: float
) -> list[WordChange]:
    before, after = values
    effects = {}
    for index in np.flatnonzero(selected):
        changes = after[:, index] - before[:, index]
        known = np.isfinite(changes)
        if known[0] and known.sum() > RESAMPLES // 2:
            effects[int(index)] = resampled_effect(np.concatenate([changes[:1], changes[1:][known[1:]]]), blocks)
    corrected = holm({str(index): effect.p for index, effect in effects.items()})
    return [
        WordChange(
            str(types.texts[index]), int(counts[index]), float(before[0, index]), float(after[0, index]), effect,
            corrected[str(index)],
        )
        for index, effect in effects.items()
    ]  # fmt: skip


def _significant_words(words: Sequence[WordChange]) -> str:
    texts = [repr(word.text) for word in words if word.significant]
    return ", ".join(texts[:8]) or "no significant change"


def _word_table(title: str, words: Sequence[WordChange]) -> Table:
    rows: list[list[Cell]] = [[repr(w.text), w.count, w.before, w.after, w.change, w.corrected] for w in words]
    return Table(["token", "seen", "first third", "last third", "change", "p (Holm)"], rows, title, ".4f")


def _word_chart(name: str, title: str, words: Sequence[WordChange], steps: tuple[int, int], x: str) -> list[Chart]:
    """Return the chart of the words that change most; none without words."""
    if not words:
        return []
    unit = x.split("(")[1][:-1]
    scale = 100.0 if unit == "points" else 1.0
    changes = [word.change.times(scale) for word in words]
    significant = sum(word.significant for word in words)
    caption = (
        f"{title}, from the first to the last third of steps {steps[0]}–{steps[1]}: first {_quoted(words[0].text)} by "
        f"{changes[0]:+.2f} {unit}; {significant or 'none'} of {len(words)} significant (filled; p < {LEVEL} after "
        "Holm's correction for all token types). Bars: 95 % intervals."
    )
    shown, drawn = words[:DRAWN][::-1], changes[:DRAWN][::-1]
    names, filled = [_quoted(word.text) for word in shown], [word.significant for word in shown]
    marks = [interval_rows(names, drawn, [0] * len(shown), filled=filled), rule(0, "ink")]
    return [Chart(name, title, caption, marks, x, size=(4.8, 0.9 + 0.22 * len(shown)))]


def _quoted(text: str) -> str:
    """Return a token in quotes, with visible spaces and line ends, cut to 18 characters."""
    visible = clean(text.replace("\n", "⏎").replace("\t", "⇥").replace(" ", "␣"))
    return f"“{visible if len(visible) <= 18 else visible[:17] + '…'}”"
