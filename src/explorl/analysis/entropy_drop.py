"""Tokens that lose entropy and tokens that become frequent: Deng et al. 2025, §3.2.2 and Figure 3b, 3c.

Token types are compared over the steps of the rising stage.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from explorl.analysis.lens import Context, Unavailable
from explorl.analysis.lens_table import LensTable
from explorl.analysis.token_types import MIN_STEPS_SEEN, RESAMPLES, TokenTypes, resampled_effect, token_types
from explorl.stats import Cell, Table
from explorl.stats.interval import LEVEL, Effect, format_points
from explorl.stats.p_values import holm

Floats = NDArray[np.float64]

FASTEST = 0.2
"""Share of token types that count as those with the fastest entropy drop."""
LISTED = 20
"""Words in a table."""


@dataclass(frozen=True)
class EntropyDrop:
    """The token types whose entropy falls fastest, and the signs of the completions they occur in."""

    types: int
    """Token types that are frequent enough."""
    fastest: int
    negative_share: Effect
    """Share of negative completions among the occurrences of the fastest types in completions with a sign."""
    all_share: float
    """The same share for all types."""
    excess: Effect
    """The difference of the two shares."""
    only_negative: int
    """Types that occur in no positive completion."""
    only_negative_slope: Effect | None
    """Mean slope of those − mean slope of the others, over occurrences (nats per 100 steps)."""
    texts: tuple[str, ...]
    slopes: Floats
    """Slopes of the types in `texts` in nats per 100 steps, fastest first."""
    negatives: Floats
    """Share of each type's occurrences in negative completions."""
    counts: Floats


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


@dataclass(frozen=True)
class Words:
    """The words whose frequency rises most, and those whose entropy falls most."""

    types: int
    steps: tuple[int, int]
    """First and last step of the rising stage, or of the run if there is no breakpoint."""
    risen: tuple[WordChange, ...]
    """Share of all tokens."""
    fallen: tuple[WordChange, ...]
    """Mean entropy (nats)."""


def fastest_drop(table: LensTable, context: Context) -> EntropyDrop | Unavailable:
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
    return EntropyDrop(
        types=types.count,
        fastest=len(first),
        negative_share=resampled_effect(shares, blocks),
        all_share=float(all_shares[0]),
        excess=resampled_effect(shares - all_shares, blocks),
        only_negative=int(only_negative.sum()),
        only_negative_slope=_slope_difference(only_negative, slopes, sums["n"], blocks),
        texts=tuple(types.texts[first]),
        slopes=slopes[0, first],
        negatives=sums["negative"][0, first] / signed[first],
        counts=sums["n"][0, first],
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


def words(table: LensTable, context: Context) -> Words | Unavailable:
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
    return Words(
        types.count,
        (int(types.steps[0]), int(types.steps[-1])),
        tuple(sorted((w for w in risen if w.change.mean > 0), key=lambda w: -w.change.mean)[:LISTED]),
        tuple(sorted((w for w in fallen if w.change.mean < 0), key=lambda w: w.change.mean)[:LISTED]),
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


def drop_summary(result: EntropyDrop) -> str:
    """Describe in which completions the tokens with the fastest entropy drop occur."""
    comparison = {1: "more than", -1: "less than", 0: "not significantly different from that"}[result.excess.sign]
    text = (
        f"Of the {result.fastest} token types (of {result.types}) whose entropy falls fastest, "
        f"{result.negative_share:.1%} of occurrences are in negative completions: {comparison} of all types "
        f"({result.all_share:.1%}; difference {format_points(result.excess)})."
    )
    if result.only_negative_slope is None:
        return f"{text} No frequent type occurs in negative completions alone."
    slope = result.only_negative_slope
    pace = {-1: "faster than", 1: "more slowly than", 0: "not significantly faster than"}[slope.sign]
    return (
        f"{text} The entropy of the {result.only_negative} types in negative completions alone falls {pace} that of "
        f"the others ({slope:+.3f} nats per 100 steps)."
    )


def drop_tables(result: EntropyDrop) -> dict[str, Table]:
    """Return tables of the shares and of the fastest types."""
    rows: list[list[Cell]] = [
        ["negative share of the fastest types", result.negative_share, None],
        ["negative share of all types", result.all_share, None],
        ["difference", result.excess, result.excess.p],
        ["types in negative answers alone", result.only_negative, None],
    ]
    if result.only_negative_slope is not None:
        rows.append(["their slope − that of the others (nats per 100 steps)", result.only_negative_slope,
                     result.only_negative_slope.p])  # fmt: skip
    types: list[list[Cell]] = [
        [repr(text), float(slope), float(share), int(count)]
        for text, slope, share, count in zip(result.texts, result.slopes, result.negatives, result.counts, strict=True)
    ]
    columns = ["token", "slope (nats per 100 steps)", "share in negatives", "seen"]
    return {
        "fastest": Table(["measure", "value", "p of 0"], rows, title="tokens with the fastest entropy drop"),
        "fastest-tokens": Table(columns, types, title="the token types whose entropy falls fastest"),
    }


def words_summary(result: Words) -> str:
    """Name the significant words of both lists."""

    def significant(changes: tuple[WordChange, ...]) -> str:
        texts = [word.text for word in changes if word.corrected is not None and word.corrected < LEVEL]
        return ", ".join(repr(text) for text in texts[:8]) if texts else "no significant change"

    return f"Frequency rises most: {significant(result.risen)}. Entropy falls most: {significant(result.fallen)}."


def words_tables(result: Words) -> dict[str, Table]:
    """Return tables of both lists."""
    columns = ["token", "seen", "first third", "last third", "change", "p (Holm)"]

    def rows(changes: tuple[WordChange, ...]) -> list[list[Cell]]:
        return [[repr(w.text), w.count, w.before, w.after, w.change, w.corrected] for w in changes]

    return {
        "words-frequency": Table(
            columns, rows(result.risen), title="words whose frequency rises most (share of tokens)", number=".4f"
        ),
        "words-entropy": Table(
            columns, rows(result.fallen), title="words whose entropy falls most (nats)", number=".4f"
        ),
    }
