"""How many tokens of each category completions have, and which patterns they show (Deng et al. 2025, Table 5).

A pattern is a group of the word lists, such as verifying or contrasting, and is counted as the share of completions in
which it occurs. For a run, the first and the last fifth of its steps are compared.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from explorl.analysis.categories import CATEGORIES, REST, WordLists, groups_of, word_lists
from explorl.analysis.charts import Chart, Mark, Palette
from explorl.analysis.lens import Context, Findings, Unavailable
from explorl.analysis.lens_table import LensTable
from explorl.core.text import clean
from explorl.stats import Interval, Table
from explorl.stats.interval import Effect, format_effect
from explorl.stats.resample import cluster_means

EDGE = 0.2
"""Share of the steps that counts as the beginning of a run, and as its end."""
MAX_COMPLETIONS = 20_000
"""Most completions that are read; of a run with more, evenly spaced ones."""


@dataclass(frozen=True)
class Count:
    """A count per completion: its mean over all, over the first and the last steps, and the change."""

    name: str
    all: Interval | None
    first: Interval | None = None
    last: Interval | None = None
    change: Effect | None = None


def count_categories(
    completions: Sequence[Sequence[str]],
    steps: Sequence[int] | None = None,
    lists: WordLists | None = None,
    *,
    clusters: NDArray[np.int64] | None = None,
    seed: int = 0,
) -> Findings:
    """Count categories and patterns in completions, given as the texts of their tokens, with intervals.

    If `steps` has the step of each completion, the first and the last fifth of the steps are compared. `clusters` has
    a number per completion; completions with the same number are resampled together, by default each is independent.
    """
    lists = lists or word_lists()
    category = [CATEGORIES.index(name) for name, _ in lists.groups]
    rest = CATEGORIES.index(REST)
    values = np.zeros((len(completions), 1 + len(CATEGORIES) + len(lists.groups)))
    for row, tokens in zip(values, completions, strict=True):
        groups = groups_of(tokens, lists)
        row[0] = len(tokens)
        for group in groups:
            row[1 + (rest if group is None else category[group])] += 1
        row[[1 + len(CATEGORIES) + group for group in set(groups) if group is not None]] = 1
    names = ["tokens", *CATEGORIES, *(f"{name}: {group}" for name, group in lists.groups)]
    clusters = np.arange(len(completions)) if clusters is None else clusters
    counts = _counts(names, values, _part(steps), clusters, seed)
    first_pattern = 1 + len(CATEGORIES)
    by_category, by_pattern = counts[1:first_pattern], counts[first_pattern:]
    return _findings(counts[0], by_category, by_pattern, answers=len(completions), source=lists.source)


def _findings(
    length: Count, by_category: Sequence[Count], by_pattern: Sequence[Count], *, answers: int, source: str
) -> Findings:
    """Return the findings of these counts."""
    data = f"{answers:,} completions" if length.change is None else "the first and the last fifth of the steps"
    each = "; ".join(
        f"{count.name} {format_effect(count.change or count.all, '+.2f' if count.change else '.2f')}"
        for count in by_category
    )
    return Findings(
        _describe(length, by_category),
        {
            "token_categories": _table(
                "category", [length, *by_category], "Tokens of a completion, by category", ".2f"
            ),
            "response_patterns": _table("pattern", by_pattern, "Share of completions that show a pattern", ".1%"),
        },
        [
            Chart(
                "token_categories", "Tokens by category",
                f"Tokens per completion by category, with 95 % intervals over completions: {data}. {each}.",
                [_bars(by_category, 1.0)], "tokens per completion", size=(4.8, 0.9 + 0.5 * len(by_category)),
            ),
            Chart(
                "response_patterns", "Patterns in completions",
                f"Share of completions in which a pattern occurs, with 95 % intervals over completions: {data}.",
                [_bars(by_pattern, 100.0)], "completions (%)", size=(4.8, 0.9 + 0.32 * len(by_pattern)),
            ),
        ],
        {
            "length": length, "categories": by_category, "patterns": by_pattern, "answers": answers,
            "lists": source,
        },
    )  # fmt: skip


def _describe(length: Count, categories: Sequence[Count]) -> str:
    """Describe the counts in a sentence or two."""
    each = ", ".join(f"{count.all.mean:.1f} {count.name}" for count in categories if count.all is not None)
    text = f"A completion has {length.all:.1f} tokens: {each}."
    if length.change is None:
        return text
    changed = [count for count in (length, *categories) if count.change is not None and count.change.sign]
    if not changed:
        return f"{text} From the first to the last fifth of the steps none of these changes significantly."
    each = ", ".join(f"{count.name} {format_effect(count.change, '+.1f')}" for count in changed)
    return f"{text} From the first to the last fifth of the steps these change: {each} tokens per completion."


def _table(first: str, counts: Sequence[Count], title: str, number: str) -> Table:
    if not any(count.change is not None for count in counts):
        return Table([first, "answers"], [[count.name, count.all] for count in counts], title, number)
    rows = [[count.name, count.all, count.first, count.last, count.change] for count in counts]
    return Table([first, "all steps", "first fifth", "last fifth", "change"], rows, title, number)


def _bars(counts: Sequence[Count], scale: float) -> Mark:
    """Draw a bar with its interval for each count; for a run, one for its first and one for its last steps."""
    compared = any(count.change is not None for count in counts)
    parts = (
        [("first fifth", "first", 0, 0.2), ("last fifth", "last", 1, -0.2)] if compared else [("", "all", "bar", 0.0)]
    )

    def draw(axes: Any, palette: Palette) -> None:
        for name, key, colour, shift in parts:
            for y, count in enumerate(reversed(counts)):
                value: Interval | None = getattr(count, key)
                if value is None:
                    continue
                style = {"height": 0.36 if compared else 0.6, "color": palette[colour]}
                axes.barh(y + shift, scale * value.mean, **style, label=name if y == 0 else None)
                if math.isfinite(value.low):
                    axes.hlines(y + shift, scale * value.low, scale * value.high, color=palette.ink, linewidth=1)
        axes.set_yticks(range(len(counts)), [clean(count.name, 36) for count in reversed(counts)])
        axes.grid(visible=False, axis="y")
        if compared:
            axes.legend()

    return draw


def _part(steps: Sequence[int] | None) -> NDArray[np.int64] | None:
    """Return 0 for completions of the first steps, 1 for the last, −1 between; None with fewer than 2 steps."""
    if steps is None or len(unique := np.unique(steps)) < 2:
        return None
    size = max(1, int(EDGE * len(unique)))
    index = np.searchsorted(unique, steps)
    return np.select([index < size, index >= len(unique) - size], [0, 1], -1)


def _counts(
    names: Sequence[str],
    values: NDArray[np.float64],
    part: NDArray[np.int64] | None,
    clusters: NDArray[np.int64],
    seed: int,
) -> list[Count]:
    parts = [np.ones(len(values))] + ([] if part is None else [part == 0, part == 1])
    masks = np.stack(parts).astype(np.float64)  # parts × completions
    sums = _sum_by_cluster(np.hstack([values * mask[:, None] for mask in masks]), clusters)
    counts = _sum_by_cluster(np.hstack([np.broadcast_to(mask[:, None], values.shape) for mask in masks]), clusters)
    if part is None:
        means, _ = cluster_means(sums, counts, seed=seed)
        return [Count(name, mean) for name, mean in zip(names, means, strict=True)]
    width = values.shape[1]
    contrasts = np.hstack([np.zeros((width, width)), -np.eye(width), np.eye(width)])
    means, changes = cluster_means(sums, counts, contrasts.tolist(), seed=seed)
    columns = zip(names, means, means[width:], means[2 * width :], changes, strict=False)
    return [Count(*column) for column in columns]


def _sum_by_cluster(values: NDArray[np.float64], clusters: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return the sums of the rows of each cluster."""
    names, cluster = np.unique(clusters, return_inverse=True)
    sums = np.zeros((len(names), values.shape[1]))
    np.add.at(sums, cluster, values)
    return sums


def category_counts(table: LensTable, context: Context) -> Findings | Unavailable:
    """Count categories and patterns in the completions of a run whose tokens are recorded."""
    texts = table.tokens["tokens"]
    lists = word_lists(context.option("categories", "lists", "") or None)
    recorded = np.flatnonzero(table.completions.count > 0)
    if len(recorded) > MAX_COMPLETIONS:
        recorded = recorded[np.linspace(0, len(recorded) - 1, MAX_COMPLETIONS).astype(np.int64)]
    if len(recorded) < 2:
        return Unavailable("fewer than 2 completions have recorded tokens, which gives no interval; record 2 or more")
    start, count = table.completions.start[recorded], table.completions.count[recorded]
    completions = [texts[a : a + n].tolist() for a, n in zip(start, count, strict=True)]
    return count_categories(
        completions,
        table.completions.step[recorded].tolist(),
        lists,
        clusters=table.completions.cluster[recorded],
        seed=context.seed,
    )
