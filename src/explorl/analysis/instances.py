"""Which answers learn: probability shifts by the perplexity of the answer (Deng et al. 2025, §3.2.3, Fig. 5a).

    PPL_i = exp(−mean_t log π(o_t)),   Δp_t = π_after(o_t) − π(o_t)

The paper finds the tokens with the largest shifts in answers of low perplexity. Perplexity falls during training, so
low and high are told within a step: by ln PPL minus its median over the answers of the step.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from explorl.analysis.lens import Context, Unavailable
from explorl.analysis.lens_table import LensTable
from explorl.stats import Cell, Interval, Table
from explorl.stats.clusters import cluster_means, cluster_sums, effect_cell, format_effect
from explorl.stats.regression import Effect

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

GROUP = 0.2
"""Share of the answers with the lowest, and with the highest perplexity."""
TOP = 0.2
"""Share of the tokens with the largest shifts."""
BINS = 30
SMALLEST = 5
"""Completions of a step from which its own median is taken."""


@dataclass(frozen=True)
class Instances:
    """Shifts of tokens in answers of low and high perplexity."""

    edges: tuple[float, ...]
    """Of the bins of perplexity."""
    top_tokens: tuple[float, ...]
    """Share of the tokens with the largest shifts, by the perplexity of their answer."""
    all_tokens: tuple[float, ...]
    top_in_low: Interval | None
    """Share of the tokens of low-perplexity answers that are among those with the largest shifts."""
    top_in_high: Interval | None
    low_minus_high: Effect | None
    shift_low: Interval | None
    """Mean |Δp| in answers of low perplexity."""
    shift_high: Interval | None
    shift_low_minus_high: Effect | None
    low_perplexity: tuple[float, float]
    """Median perplexity of the two groups, low and high."""
    tokens: int
    answers: int


def answer_perplexity(logps: Floats, answer: Ints, answers: int) -> Floats:
    """exp(−mean log π) of each answer over its recorded tokens; NaN where it has none."""
    known = np.isfinite(logps)
    sums = np.bincount(answer[known], weights=logps[known], minlength=answers)
    counts = np.bincount(answer[known], minlength=answers)
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        return np.where(counts > 0, np.exp(-sums / counts), np.nan)


def perplexity_groups(perplexity: Floats, step: Ints, share: float = GROUP) -> Ints:
    """−1 for the answers with the lowest perplexity, 1 for the highest, 0 between; −2 where it is not known.

    By ln PPL − median of the step, where most steps have 5 answers or more; else by ln PPL over all.
    """
    with np.errstate(divide="ignore"):
        level = np.log(perplexity)
    known = np.isfinite(level)
    group = np.full(len(level), -2, dtype=np.int64)
    if not known.any():
        return group
    steps, of = np.unique(step[known], return_inverse=True)
    if np.median(np.bincount(of)) >= SMALLEST:
        medians = np.array([np.median(level[known][of == index]) for index in range(len(steps))])
        level[known] = level[known] - medians[of]
    order = np.argsort(level[known], kind="stable")
    rank = np.empty(len(order), dtype=np.int64)
    rank[order] = np.arange(len(order))
    size = max(1, int(share * len(order))) if len(order) > 1 else 0
    group[known] = np.where(rank < size, -1, np.where(rank >= len(order) - size, 1, 0))
    return group


def shifts_by_perplexity(
    logps: Floats, after: Floats, answer: Ints, step: Ints, answers: int, clusters: Ints | None = None, *, seed: int = 0
) -> Instances | None:
    """The analysis of tokens with log π before and after an update. None without such tokens.

    Of answers are `step`, and `together`, a number for those that are drawn together; by default each is drawn alone.
    """
    perplexity = answer_perplexity(logps, answer, answers)
    group = perplexity_groups(perplexity, step)
    known = np.isfinite(logps) & np.isfinite(after) & np.isfinite(perplexity[answer])
    if not known.any():
        return None
    of = answer[known]
    shift = np.abs(np.exp(after[known]) - np.exp(logps[known]))
    top = _largest(shift, TOP)
    column = np.select([group[of] == -1, group[of] == 1], [0, 1], -1)
    _, cluster = np.unique(of if clusters is None else clusters[of], return_inverse=True)
    shape = (int(cluster.max()) + 1, 2)
    counts = cluster_sums(cluster, column, np.ones(len(of)), shape)
    found = [
        cluster_means(cluster_sums(cluster, column, values, shape), counts, [(1, -1)], seed=seed)
        for values in (top.astype(np.float64), shift)
    ]
    (low, high), (difference,) = found[0]
    (shift_low, shift_high), (shift_difference,) = found[1]
    edges = _edges(perplexity[of])
    middles = [float(np.median(perplexity[group == side])) if (group == side).any() else np.nan for side in (-1, 1)]
    return Instances(
        tuple(edges.tolist()),
        _shares(perplexity[of][top], edges),
        _shares(perplexity[of], edges),
        low, high, difference, shift_low, shift_high, shift_difference,
        (middles[0], middles[1]), len(of), len(np.unique(of)),
    )  # fmt: skip


def _largest(values: Floats, share: float) -> NDArray[np.bool_]:
    """Marks this share of the values, the largest; none where all are equal. Of equals at the end, the first."""
    chosen = np.zeros(len(values), dtype=bool)
    if values.max() > values.min():
        chosen[np.argsort(-values, kind="stable")[: max(1, int(share * len(values)))]] = True
    return chosen


def _edges(perplexity: Floats) -> Floats:
    """Bins of equal width of ln PPL, over all but the extreme 1 %."""
    low, high = np.quantile(np.log(perplexity), [0.005, 0.995])
    return np.exp(np.linspace(low, high if high > low else low + 0.1, BINS + 1))


def _shares(perplexity: Floats, edges: Floats) -> tuple[float, ...]:
    counts, _ = np.histogram(np.clip(perplexity, edges[0], edges[-1]), edges)
    return tuple((counts / max(len(perplexity), 1)).tolist())


def instances(table: LensTable, context: Context) -> Instances | Unavailable:
    """The analysis of a run's recorded tokens."""
    tokens = table.tokens
    logps, after = tokens["logp"], tokens["logp_after"]
    answers = table.completions
    found = shifts_by_perplexity(
        logps, after, tokens.completion, answers.step, len(answers), answers.cluster, seed=context.seed
    )
    if found is None:
        return Unavailable("no token has a log-probability before and after an update")
    if found.answers < 10:
        return Unavailable(f"{found.answers} answers have recorded tokens; the lowest and highest 20 % need 10 or more")
    return found


def summary(found: Instances) -> str:
    """What the analysis shows, in two sentences."""
    verdict = "are as common in answers of low perplexity as in those of high, as far as can be told"
    if found.low_minus_high is not None and found.low_minus_high.sign:
        more = "more" if found.low_minus_high.mean > 0 else "less"
        verdict = f"are {more} common in answers of low perplexity than in those of high"
    return (
        f"The {TOP:.0%} of tokens with the largest probability shifts {verdict}: "
        f"{format_effect(found.top_in_low, '.1%')} of the tokens of the former and "
        f"{format_effect(found.top_in_high, '.1%')} of the latter, difference {format_effect(found.low_minus_high, '+.1%')}. Mean |Δp| differs by "
        f"{format_effect(found.shift_low_minus_high)}."
    )


def tables(found: Instances) -> dict[str, Table]:
    """The two groups side by side, and the histogram."""
    groups: list[list[Cell]] = [
        ["median perplexity of answers", found.low_perplexity[0], found.low_perplexity[1], None],
        [
            f"share of tokens in the top {TOP:.0%} of shifts",
            found.top_in_low,
            found.top_in_high,
            effect_cell(found.low_minus_high),
        ],
        ["mean |Δp|", found.shift_low, found.shift_high, effect_cell(found.shift_low_minus_high)],
    ]
    lower, upper = found.edges[:-1], found.edges[1:]
    bins: list[list[Cell]] = [list(row) for row in zip(lower, upper, found.top_tokens, found.all_tokens, strict=True)]
    return {
        "instances": Table(
            ["measure", f"lowest {GROUP:.0%}", f"highest {GROUP:.0%}", "difference"], groups, "Shifts by perplexity"
        ),
        "instance_perplexity": Table(
            ["from", "to", f"top {TOP:.0%} of shifts", "all tokens"], bins, "Perplexity of the answers of tokens"
        ),
    }
