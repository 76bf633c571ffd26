"""Probability shifts of tokens by the perplexity of their completion (Deng et al. 2025, §3.2.3, Fig. 5a).

    PPL_i = exp(−mean_t log π(o_t)),   Δp_t = π_after(o_t) − π(o_t)

The paper finds the tokens with the largest shifts in completions of low perplexity. Perplexity falls during training,
so low and high are relative to the step: by ln PPL minus its median over the completions of the step.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from explorl.analysis.lens import Context, Unavailable
from explorl.analysis.lens_table import LensTable
from explorl.stats import Cell, Interval, Table
from explorl.stats.interval import Effect, format_effect
from explorl.stats.resample import cluster_means, cluster_sums

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

GROUP = 0.2
"""Share of the completions that count as those of lowest, and of highest, perplexity."""
TOP = 0.2
"""Share of the tokens with the largest shifts."""
BINS = 30
MIN_COMPLETIONS = 5
"""Least completions of a step (in the median) for which the step's own median perplexity is used."""


@dataclass(frozen=True)
class Instances:
    """Probability shifts of tokens in completions of low and high perplexity."""

    edges: tuple[float, ...]
    """Edges of the perplexity bins."""
    top_tokens: tuple[float, ...]
    """Share of the tokens with the largest shifts in each bin."""
    all_tokens: tuple[float, ...]
    """Share of all tokens in each bin."""
    top_in_low: Interval | None
    """Share of the tokens of low-perplexity completions that have the largest shifts."""
    top_in_high: Interval | None
    low_minus_high: Effect | None
    shift_low: Interval | None
    """Mean |Δp| in completions of low perplexity."""
    shift_high: Interval | None
    shift_low_minus_high: Effect | None
    low_perplexity: tuple[float, float]
    """Median perplexity of the two groups, low and high."""
    tokens: int
    answers: int


def completion_perplexity(logps: Floats, completion: Ints, count: int) -> Floats:
    """Return exp(−mean log π) of each completion over its recorded tokens; NaN without any."""
    known = np.isfinite(logps)
    sums = np.bincount(completion[known], weights=logps[known], minlength=count)
    counts = np.bincount(completion[known], minlength=count)
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        return np.where(counts > 0, np.exp(-sums / counts), np.nan)


def perplexity_groups(perplexity: Floats, step: Ints, share: float = GROUP) -> Ints:
    """Return −1 for the completions with the lowest perplexity, 1 for the highest, 0 between; −2 if it is unknown.

    They are ranked by ln PPL − median of the step if most steps have 5 completions or more, else by ln PPL.
    """
    with np.errstate(divide="ignore"):
        level = np.log(perplexity)
    known = np.isfinite(level)
    group = np.full(len(level), -2, dtype=np.int64)
    if not known.any():
        return group
    steps, step_index = np.unique(step[known], return_inverse=True)
    if np.median(np.bincount(step_index)) >= MIN_COMPLETIONS:
        medians = np.array([np.median(level[known][step_index == index]) for index in range(len(steps))])
        level[known] = level[known] - medians[step_index]
    order = np.argsort(level[known], kind="stable")
    rank = np.empty(len(order), dtype=np.int64)
    rank[order] = np.arange(len(order))
    size = max(1, int(share * len(order))) if len(order) > 1 else 0
    group[known] = np.where(rank < size, -1, np.where(rank >= len(order) - size, 1, 0))
    return group


def shifts_by_perplexity(
    logps: Floats,
    after: Floats,
    completion: Ints,
    step: Ints,
    count: int,
    clusters: Ints | None = None,
    *,
    seed: int = 0,
) -> Instances | None:
    """Analyse tokens with log π before and after an update; return None without such tokens.

    `step` and `clusters` have one value per completion; completions with the same cluster number are resampled
    together, by default each is independent.
    """
    perplexity = completion_perplexity(logps, completion, count)
    group = perplexity_groups(perplexity, step)
    known = np.isfinite(logps) & np.isfinite(after) & np.isfinite(perplexity[completion])
    if not known.any():
        return None
    owner = completion[known]
    shift = np.abs(np.exp(after[known]) - np.exp(logps[known]))
    top = _largest(shift, TOP)
    column = np.select([group[owner] == -1, group[owner] == 1], [0, 1], -1)
    _, cluster = np.unique(owner if clusters is None else clusters[owner], return_inverse=True)
    shape = (int(cluster.max()) + 1, 2)
    counts = cluster_sums(cluster, column, np.ones(len(owner)), shape)
    results = [
        cluster_means(cluster_sums(cluster, column, values, shape), counts, [(1, -1)], seed=seed)
        for values in (top.astype(np.float64), shift)
    ]
    (low, high), (difference,) = results[0]
    (shift_low, shift_high), (shift_difference,) = results[1]
    edges = _edges(perplexity[owner])
    medians = [float(np.median(perplexity[group == side])) if (group == side).any() else np.nan for side in (-1, 1)]
    return Instances(
        tuple(edges.tolist()),
        _shares(perplexity[owner][top], edges),
        _shares(perplexity[owner], edges),
        low, high, difference, shift_low, shift_high, shift_difference,
        (medians[0], medians[1]), len(owner), len(np.unique(owner)),
    )  # fmt: skip


def _largest(values: Floats, share: float) -> NDArray[np.bool_]:
    """Return a mask of the largest values, this share of them; ties go to the first, and no value if all are equal."""
    mask = np.zeros(len(values), dtype=bool)
    if values.max() > values.min():
        mask[np.argsort(-values, kind="stable")[: max(1, int(share * len(values)))]] = True
    return mask


def _edges(perplexity: Floats) -> Floats:
    """Return edges of bins of equal width in ln PPL, over all but the extreme 1 %."""
    low, high = np.quantile(np.log(perplexity), [0.005, 0.995])
    return np.exp(np.linspace(low, high if high > low else low + 0.1, BINS + 1))


def _shares(perplexity: Floats, edges: Floats) -> tuple[float, ...]:
    counts, _ = np.histogram(np.clip(perplexity, edges[0], edges[-1]), edges)
    return tuple((counts / max(len(perplexity), 1)).tolist())


def instances(table: LensTable, context: Context) -> Instances | Unavailable:
    """Analyse a run's recorded tokens."""
    tokens = table.tokens
    logps, after = tokens["logp"], tokens["logp_after"]
    completions = table.completions
    result = shifts_by_perplexity(
        logps, after, tokens.completion, completions.step, len(completions), completions.cluster, seed=context.seed
    )
    if result is None:
        return Unavailable("no token has a log-probability before and after an update")
    if result.answers < 10:
        return Unavailable(
            f"{result.answers} completions have recorded tokens; the lowest and highest 20 % need 10 or more"
        )
    return result


def summary(result: Instances) -> str:
    """Describe the result in two sentences."""
    verdict = "are not significantly more or less common in completions of low perplexity than in those of high"
    if result.low_minus_high is not None and result.low_minus_high.sign:
        more = "more" if result.low_minus_high.mean > 0 else "less"
        verdict = f"are {more} common in completions of low perplexity than in those of high"
    return (
        f"The {TOP:.0%} of tokens with the largest probability shifts {verdict}: "
        f"{format_effect(result.top_in_low, '.1%')} of the tokens of the former and "
        f"{format_effect(result.top_in_high, '.1%')} of the latter, difference "
        f"{format_effect(result.low_minus_high, '+.1%')}. Mean |Δp| differs by "
        f"{format_effect(result.shift_low_minus_high)}."
    )


def tables(result: Instances) -> dict[str, Table]:
    """Return tables of the two groups and of the histogram."""
    groups: list[list[Cell]] = [
        ["median perplexity of answers", result.low_perplexity[0], result.low_perplexity[1], None],
        [
            f"share of tokens in the top {TOP:.0%} of shifts",
            result.top_in_low,
            result.top_in_high,
            result.low_minus_high,
        ],
        ["mean |Δp|", result.shift_low, result.shift_high, result.shift_low_minus_high],
    ]
    lower, upper = result.edges[:-1], result.edges[1:]
    bins: list[list[Cell]] = [list(row) for row in zip(lower, upper, result.top_tokens, result.all_tokens, strict=True)]
    return {
        "instances": Table(
            ["measure", f"lowest {GROUP:.0%}", f"highest {GROUP:.0%}", "difference"], groups, "Shifts by perplexity"
        ),
        "instance_perplexity": Table(
            ["from", "to", f"top {TOP:.0%} of shifts", "all tokens"], bins, "Perplexity of the answers of tokens"
        ),
    }
