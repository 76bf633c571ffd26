"""Probability shifts of tokens by the perplexity of their completion (Deng et al. 2025, §3.2.3, Fig. 5a).

    PPL_i = exp(−mean_t log π(o_t)),   Δp_t = π_after(o_t) − π(o_t)

The paper finds the tokens with the largest shifts in completions of low perplexity. Perplexity falls during training,
so low and high are relative to the step: by ln PPL minus its median over the completions of the step.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from explorl.analysis.charts import Chart, Palette, interval_rows, rule
from explorl.analysis.lens import Context, Findings, Unavailable, series_table
from explorl.analysis.lens_table import LensTable
from explorl.stats import Cell, Table
from explorl.stats.interval import format_effect
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
) -> Findings | None:
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
    return _findings(
        {
            "edges": edges, "top_tokens": _shares(perplexity[owner][top], edges),
            "all_tokens": _shares(perplexity[owner], edges), "top_in_low": low, "top_in_high": high,
            "low_minus_high": difference, "shift_low": shift_low, "shift_high": shift_high,
            "shift_low_minus_high": shift_difference, "low_perplexity": tuple(medians), "tokens": len(owner),
            "answers": len(np.unique(owner)),
        }
    )  # fmt: skip


def _findings(found: Mapping[str, Any]) -> Findings:
    """Return the findings with these values."""
    difference = found["low_minus_high"]
    verdict = "are not significantly more or less common in completions of low perplexity than in those of high"
    if difference is not None and difference.sign:
        more = "more" if difference.mean > 0 else "less"
        verdict = f"are {more} common in completions of low perplexity than in those of high"
    sentence = (
        f"The {TOP:.0%} of tokens with the largest probability shifts {verdict}: "
        f"{format_effect(found['top_in_low'], '.1%')} of the tokens of the former and "
        f"{format_effect(found['top_in_high'], '.1%')} of the latter, difference {format_effect(difference, '+.1%')}. "
        f"Mean |Δp| differs by {format_effect(found['shift_low_minus_high'])}."
    )
    groups: list[list[Cell]] = [
        ["median perplexity of answers", *found["low_perplexity"], None],
        [f"share of tokens in the top {TOP:.0%} of shifts", found["top_in_low"], found["top_in_high"], difference],
        ["mean |Δp|", found["shift_low"], found["shift_high"], found["shift_low_minus_high"]],
    ]
    edges, top_tokens, all_tokens = found["edges"], found["top_tokens"], found["all_tokens"]
    bins = {"from": edges[:-1], "to": edges[1:], f"top {TOP:.0%} of shifts": top_tokens, "all tokens": all_tokens}

    def histogram(axes: Any, palette: Palette) -> None:
        shares = 100 * all_tokens, 100 * top_tokens
        axes.stairs(shares[0], edges, color=palette.bar, label="all tokens", fill=True, alpha=0.45)
        axes.stairs(shares[1], edges, color=palette.arms[1], linewidth=1.8, label=f"top {TOP:.0%} of |Δp|")
        if edges[-1] > 3 * edges[0]:
            axes.set_xscale("log")

    distribution = (
        f"Perplexity of the completions that contain the {TOP:.0%} of tokens with the largest probability shifts, and "
        f"of the completions of all tokens; {found['tokens']:,} tokens of {found['answers']:,} completions."
    )
    share = (
        "Share of the tokens of a completion that are among those with the largest shifts, with 95 % intervals over "
        f"completions; the dashed line is the share expected by chance. Low minus high: "
        f"{format_effect(difference, '+.1%')}."
    )
    names = [f"lowest {GROUP:.0%}\nof perplexity", f"highest {GROUP:.0%}\nof perplexity"]
    rows = interval_rows(names, [found["top_in_low"], found["top_in_high"]], [0, 1], scale=100)
    x = f"tokens of the group in the top {TOP:.0%} of |Δp| (%)"
    return Findings(
        sentence,
        {
            "instances": Table(
                ["measure", f"lowest {GROUP:.0%}", f"highest {GROUP:.0%}", "difference"], groups, "Shifts by perplexity"
            ),
            "instance_perplexity": series_table("Perplexity of the answers of tokens", bins),
        },
        [
            Chart(
                "instances", "Perplexity where shifts are large", distribution, [histogram],
                "perplexity of the completion", "tokens (%)", legend="best",
            ),
            Chart(
                "instance_groups", "Large shifts by perplexity", share,
                [rows, rule(100 * TOP, "quiet", dash="--", width=1)], x, size=(4.8, 2.0),
            ),
        ],
        found,
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


def _shares(perplexity: Floats, edges: Floats) -> Floats:
    counts, _ = np.histogram(np.clip(perplexity, edges[0], edges[-1]), edges)
    return counts / max(len(perplexity), 1)


def instances(table: LensTable, context: Context) -> Findings | Unavailable:
    """Analyse a run's recorded tokens."""
    tokens = table.tokens
    logps, after = tokens["logp"], tokens["logp_after"]
    completions = table.completions
    result = shifts_by_perplexity(
        logps, after, tokens.completion, completions.step, len(completions), completions.cluster, seed=context.seed
    )
    if result is None:
        return Unavailable("no token has a log-probability before and after an update")
    if result["answers"] < 10:
        return Unavailable(
            f"{result['answers']} completions have recorded tokens; the lowest and highest 20 % need 10 or more"
        )
    return result
