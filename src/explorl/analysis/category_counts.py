"""How many tokens of each category answers have, and which patterns they show (Deng et al. 2025, Table 5).

A pattern is a group of the word lists, such as verifying or contrasting: the share of answers in which it occurs. Of a
run, the first and the last fifth of its steps are set side by side.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from explorl.analysis.categories import CATEGORIES, REST, WordLists, groups_of, word_lists
from explorl.analysis.lens import Context, Unavailable
from explorl.analysis.lens_table import LensTable
from explorl.stats import Cell, Interval, Table
from explorl.stats.clusters import cluster_means, effect_cell, format_effect
from explorl.stats.regression import Effect

EDGE = 0.2
"""Share of the steps that is the beginning of a run, and its end."""
MAX_ANSWERS = 20_000
"""Completions that are read; of a run with more, those at even distances."""


@dataclass(frozen=True)
class Count:
    """Something counted in answers: its mean over all, over the first and the last steps, and the change."""

    name: str
    all: Interval | None
    first: Interval | None = None
    last: Interval | None = None
    change: Effect | None = None


@dataclass(frozen=True)
class CategoryCounts:
    """Tokens of each category by answer, and the share of answers that show each pattern."""

    length: Count
    """Tokens of an answer."""
    categories: tuple[Count, ...]
    """Tokens of an answer, in the order of `CATEGORIES`."""
    patterns: tuple[Count, ...]
    """Share of answers, by ``category: group``."""
    answers: int
    lists: str
    """Where the word lists came from."""


def count_categories(
    answers: Sequence[Sequence[str]],
    steps: Sequence[int] | None = None,
    lists: WordLists | None = None,
    *,
    clusters: NDArray[np.int64] | None = None,
    seed: int = 0,
) -> CategoryCounts:
    """Counts over answers, each a list of its tokens' texts, with intervals over answers.

    With the step of each answer, the first and the last fifth of the steps are compared. `together` has a number for
    the answers that are drawn together; by default each is drawn alone.
    """
    lists = lists or word_lists()
    category = [CATEGORIES.index(name) for name, _ in lists.groups]
    rest = CATEGORIES.index(REST)
    values = np.zeros((len(answers), 1 + len(CATEGORIES) + len(lists.groups)))
    for row, tokens in zip(values, answers, strict=True):
        found = groups_of(tokens, lists)
        row[0] = len(tokens)
        for group in found:
            row[1 + (rest if group is None else category[group])] += 1
        row[[1 + len(CATEGORIES) + group for group in set(found) if group is not None]] = 1
    names = ["tokens", *CATEGORIES, *(f"{name}: {group}" for name, group in lists.groups)]
    counts = _compared(names, values, _part(steps), np.arange(len(answers)) if clusters is None else clusters, seed)
    kinds = 1 + len(CATEGORIES)
    return CategoryCounts(counts[0], tuple(counts[1:kinds]), tuple(counts[kinds:]), len(answers), lists.source)


def _part(steps: Sequence[int] | None) -> NDArray[np.int64] | None:
    """0 for answers of the first steps, 1 for those of the last, −1 between; None with fewer than 2 steps."""
    if steps is None or len(different := np.unique(steps)) < 2:
        return None
    size = max(1, int(EDGE * len(different)))
    at = np.searchsorted(different, steps)
    return np.select([at < size, at >= len(different) - size], [0, 1], -1)


def _compared(
    names: Sequence[str],
    values: NDArray[np.float64],
    part: NDArray[np.int64] | None,
    clusters: NDArray[np.int64],
    seed: int,
) -> list[Count]:
    parts = [np.ones(len(values))] + ([] if part is None else [part == 0, part == 1])
    inside = np.stack(parts).astype(np.float64)  # parts × answers
    sums = _summed(np.hstack([values * one[:, None] for one in inside]), clusters)
    counts = _summed(np.hstack([np.broadcast_to(one[:, None], values.shape) for one in inside]), clusters)
    if part is None:
        means, _ = cluster_means(sums, counts, seed=seed)
        return [Count(name, mean) for name, mean in zip(names, means, strict=True)]
    width = values.shape[1]
    contrasts = np.hstack([np.zeros((width, width)), -np.eye(width), np.eye(width)])
    means, changes = cluster_means(sums, counts, contrasts.tolist(), seed=seed)
    columns = zip(names, means, means[width:], means[2 * width :], changes, strict=False)
    return [Count(*column) for column in columns]


def _summed(values: NDArray[np.float64], clusters: NDArray[np.int64]) -> NDArray[np.float64]:
    """Sums of the rows that belong together."""
    names, cluster = np.unique(clusters, return_inverse=True)
    found = np.zeros((len(names), values.shape[1]))
    np.add.at(found, cluster, values)
    return found


def category_counts(table: LensTable, context: Context) -> CategoryCounts | Unavailable:
    """The counts of a run's answers whose tokens are recorded."""
    texts = table.tokens["tokens"]
    lists = word_lists(context.option("categories", "lists", "") or None)
    kept = np.flatnonzero(table.completions.count > 0)
    if len(kept) > MAX_ANSWERS:
        kept = kept[np.linspace(0, len(kept) - 1, MAX_ANSWERS).astype(np.int64)]
    if len(kept) < 2:
        return Unavailable("fewer than 2 answers have recorded tokens, which leaves no interval; record 2 or more")
    start, count = table.completions.start[kept], table.completions.count[kept]
    answers = [texts[a : a + n].tolist() for a, n in zip(start, count, strict=True)]
    return count_categories(
        answers,
        table.completions.step[kept].tolist(),
        lists,
        clusters=table.completions.cluster[kept],
        seed=context.seed,
    )


def summary(found: CategoryCounts) -> str:
    """What the counts show, in a sentence or two."""
    each = ", ".join(f"{one.all.mean:.1f} {one.name}" for one in found.categories if one.all is not None)
    text = f"An answer has {found.length.all:.1f} tokens: {each}."
    moved = [one for one in (found.length, *found.categories) if one.change is not None and one.change.sign]
    if found.length.change is None:
        return text
    if not moved:
        return f"{text} From the first to the last fifth of the steps none of these changes beyond doubt."
    each = ", ".join(f"{one.name} {format_effect(one.change, '+.1f')}" for one in moved)
    return f"{text} From the first to the last fifth of the steps these change: {each} tokens per answer."


def tables(found: CategoryCounts) -> dict[str, Table]:
    """Tokens by category, and answers by pattern."""

    def table(first: str, rows: Sequence[Count], title: str, number: str) -> Table:
        compared = any(one.change is not None for one in rows)
        names = ["all steps", "first fifth", "last fifth", "change"] if compared else ["answers"]
        cells: list[list[Cell]] = [
            [one.name, one.all, *([one.first, one.last, effect_cell(one.change)] if compared else [])] for one in rows
        ]
        return Table([first, *names], cells, title, number)

    return {
        "token_categories": table(
            "category", (found.length, *found.categories), "Tokens of an answer, by category", ".2f"
        ),
        "response_patterns": table("pattern", found.patterns, "Share of answers that show a pattern", ".1%"),
    }
