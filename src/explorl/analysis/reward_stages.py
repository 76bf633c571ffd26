"""Stages of a training run: where the rise ends and the plateau begins, and how reward depends on entropy.

Deng et al. 2025, §3.2.2 and Figure 3a (stages); Cui et al. 2025 (R = −a·exp(H) + b).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from explorl.analysis.lens import Context, Unavailable
from explorl.analysis.lens_table import LensTable, NotRecorded
from explorl.stats import Cell, Interval, Table
from explorl.stats.interval import LEVEL, Effect
from explorl.stats.regression import autoregression, binned, regression
from explorl.stats.resample import resampled_interval

Floats = NDArray[np.float64]

MIN_STEPS = 16
"""Fewest steps for an analysis: each of the two pieces needs several, and so does the estimate of the noise."""
EDGE = 0.06
"""Share of the steps at either end that cannot have the breakpoint."""
CANDIDATES = 150
"""Most candidate breakpoints."""
DRAWS = 999
"""Simulated curves behind the p value and the interval."""
REWARD = ("rewards/correctness/mean", "rewards/correctness_reward/mean", "reward")
"""Keys of metrics.jsonl that measure training success, in order of preference."""
ACCURACY = "training accuracy"
NAMES = dict.fromkeys(REWARD[:2], ACCURACY) | {"reward": "reward"}


@dataclass(frozen=True)
class Stages:
    """A continuous two-piece line through a curve, or a single line that fits as well."""

    measure: str
    steps: Floats
    values: Floats
    fitted: Floats
    """Fitted values of the two pieces if there is a breakpoint, else of the line."""
    p: float
    """p value of a single line: the share of simulated lines that two pieces improve on by as much."""
    breakpoint: Interval | None
    """Step at which the rise ends; None if a single line fits as well, or if the slope does not fall."""
    before: Interval
    """Slope of the first piece per 100 steps; that of the line if there is no breakpoint."""
    after: Interval | None
    """Slope of the second piece per 100 steps."""
    rises: bool
    """True if the first piece, or the line, rises significantly."""


@dataclass(frozen=True)
class EntropyLaw:
    """R = −a·exp(H) + b by least squares over the steps."""

    measure: str
    steps: Floats
    entropy: Floats
    values: Floats
    a: Effect
    b: Effect
    ceiling: Effect
    """b − a: the fit extrapolated to an entropy of 0."""
    limit: Interval | None
    """The ceiling, clipped to [0, 1] for an accuracy; None if the extrapolation is outside that range."""
    r_squared: float
    grid: Floats
    """Entropies at which the curve and its band are evaluated."""
    curve: Floats
    low: Floats
    high: Floats


def stages(table: LensTable, context: Context) -> Stages | Unavailable:
    """Find the rising and the plateau stage of a run's reward."""
    measure, steps, values = reward_curve(table)
    if (reason := _missing_data(measure, steps, values)) is not None:
        return Unavailable(reason)
    steps, values = binned(steps, values)
    return two_pieces(steps, values, measure=measure, seed=context.seed)


def cached_stages(table: LensTable, context: Context) -> Stages | None:
    """Return the stages of a run, computed once; None if they are unavailable."""
    result: Stages | None = context.cached("stages", lambda: _stages_or_none(table, context))
    return result


def rising_end(table: LensTable, context: Context) -> float:
    """Return the last step of the rising stage; infinity without a breakpoint."""
    result = cached_stages(table, context)
    return result.breakpoint.mean if result and result.breakpoint else float("inf")


def _stages_or_none(table: LensTable, context: Context) -> Stages | None:
    try:
        result = stages(table, context)
    except NotRecorded:
        return None
    return result if isinstance(result, Stages) else None


def reward_curve(table: LensTable) -> tuple[str, Floats, Floats]:
    """Return name, steps and values of the training accuracy if it is known, else of the reward."""
    for key in REWARD:
        try:
            steps, values = table.curve(key)
        except NotRecorded:
            continue
        return ACCURACY if key == "reward" and _is_accuracy(table, values) else NAMES[key], steps, values
    if "correct" in table.completions and len(np.unique(table.completions.step)) > 1:
        correct, step = table.completions["correct"], table.completions.step
        known = np.isfinite(correct)
        steps = np.unique(step[known])
        return ACCURACY, steps.astype(float), np.array([correct[known & (step == s)].mean() for s in steps])
    raise NotRecorded("metrics.jsonl has no line with a reward; the analysis needs the lines that training logs")


def _is_accuracy(table: LensTable, rewards: Floats) -> bool:
    """Return whether a lone reward function gave each stored completion 0 or 1, so that its mean is an accuracy."""
    parts = [column for name, column in table.completions.columns.items() if name.startswith("reward/")]
    if len(parts) != 1 or rewards.min() < 0 or rewards.max() > 1:
        return False
    known = parts[0][np.isfinite(parts[0])]
    return bool(len(known)) and bool(np.isin(known, (0, 1)).all())


def two_pieces(steps: Floats, values: Floats, *, measure: str = "reward", seed: int = 0, draws: int = DRAWS) -> Stages:
    """Fit y = c + s·t + δ·max(t − τ, 0) + noise with the best τ, and test whether δ = 0.

    For each candidate τ the hinge is made orthogonal to the line, so that the reduction of squares is one product. The
    best candidate is compared with the best in curves simulated from the single line with the noise of the two-piece
    fit (autoregressive, see `explorl.stats.regression`): p is the share that fits as well. The intervals of τ and of
    the slopes come from refits of curves simulated from the two pieces (2.5 to 97.5 %).
    """
    rng = np.random.default_rng(seed)
    line = np.stack([np.ones_like(steps), steps], axis=1)
    hinges = _Hinges(steps)
    best, _, _ = hinges.best(values[:, None])
    pieces = np.column_stack([line, hinges.raw[best[0]]])
    fit = regression(pieces, values, seed)
    after = (steps > hinges.candidates[best[0]]).astype(float)  # derivative of the fit by τ, which is estimated too
    noise = autoregression(values - fit.fitted, np.column_stack([pieces, after]), seed)

    straight = regression(line, values, seed)
    null = straight.fitted[:, None] + noise.simulate(len(steps), draws, rng)
    gain = hinges.gain(values[:, None])[0]
    p = float((1 + (hinges.gain(null) >= gain).sum()) / (1 + draws))
    alone = straight.effect([0, 1]).times(100)
    if p >= LEVEL:
        rises = straight.effect([0, 1]).sign > 0
        return Stages(measure, steps, values, straight.fitted, p, None, alone, None, rises)

    simulated = fit.fitted[:, None] + noise.simulate(len(steps), draws, rng)
    indices, first, second = hinges.best(simulated)
    estimates = (float(fit.coefficients[1]), float(fit.coefficients[1] + fit.coefficients[2]))
    slopes = [
        resampled_interval(mean, draws).times(100) for mean, draws in zip(estimates, (first, second), strict=True)
    ]
    falls = estimates[0] > estimates[1]
    rises = float((first <= 0).mean()) < LEVEL / 2 and estimates[0] > 0
    if not (falls and rises):  # the curve bends, but not from a rise to a flatter stage
        return Stages(measure, steps, values, fit.fitted, p, None, slopes[0], slopes[1], rises)
    tau = resampled_interval(float(hinges.candidates[best[0]]), hinges.candidates[indices])
    return Stages(measure, steps, values, fit.fitted, p, tau, slopes[0], slopes[1], rises)


class _Hinges:
    """Candidate breakpoints, each as a unit vector orthogonal to every line."""

    def __init__(self, steps: Floats) -> None:
        first, last = np.quantile(steps, [EDGE, 1 - EDGE])
        inner = np.unique(np.linspace(max(first, steps[2]), min(last, steps[-3]), CANDIDATES))
        self.candidates = inner
        self.raw = np.maximum(steps[None, :] - inner[:, None], 0.0)
        self._line = np.linalg.qr(np.stack([np.ones_like(steps), steps], axis=1))[0]
        self._steps = steps
        orthogonal = self.raw - (self.raw @ self._line) @ self._line.T
        self._norms = np.linalg.norm(orthogonal, axis=1)
        self._units = orthogonal / self._norms[:, None]

    def gain(self, curves: Floats) -> Floats:
        """Return the squares that the best hinge explains of each curve, relative to those it leaves (sup F)."""
        residuals = curves - self._line @ (self._line.T @ curves)
        squares = (residuals**2).sum(axis=0)
        explained = ((self._units @ residuals) ** 2).max(axis=0)
        return np.asarray(explained / np.maximum(squares - explained, 1e-300))

    def best(self, curves: Floats) -> tuple[NDArray[np.int64], Floats, Floats]:
        """Return the index of each curve's best candidate, and the slopes before and after it."""
        residuals = curves - self._line @ (self._line.T @ curves)
        products = self._units @ residuals
        index = np.abs(products).argmax(axis=0)
        columns = np.arange(curves.shape[1])
        bend = products[index, columns] / self._norms[index]
        unbent = curves - self.raw[index].T * bend
        centred = self._steps - self._steps.mean()
        before = centred @ unbent / (centred @ centred)
        return index, np.asarray(before), np.asarray(before + bend)


def _missing_data(measure: str, steps: Floats, values: Floats) -> str | None:
    """Return why the curve cannot be analysed; None if it can."""
    if len(steps) < MIN_STEPS:
        plural = "" if len(steps) == 1 else "s"
        return f"the run has {len(steps)} step{plural} with a {measure}; stages need {MIN_STEPS} or more"
    if np.ptp(values) < 1e-9:
        return f"the {measure} is {values[0]:g} at every step, so there is no rise"
    return None


def entropy_law(table: LensTable, context: Context) -> EntropyLaw | Unavailable:
    """Fit reward as a function of the policy's entropy, over the whole run."""
    measure, steps, values = reward_curve(table)
    entropy_steps, entropy = entropy_curve(table)
    both = np.intersect1d(steps, entropy_steps)
    values, entropy = values[np.isin(steps, both)], entropy[np.isin(entropy_steps, both)]
    if (reason := _missing_data(measure, both, values)) is not None:
        return Unavailable(reason)
    if np.ptp(entropy) < 1e-6:
        return Unavailable(f"the entropy is {entropy[0]:g} nats at every step, so the law cannot be fitted")
    return fit_law(both, entropy, values, measure=measure, seed=context.seed)


def entropy_curve(table: LensTable) -> tuple[Floats, Floats]:
    """Return the mean entropy of sampled tokens by step: as logged, or else of the recorded tokens."""
    try:
        return table.curve("entropy")
    except NotRecorded:
        known = np.isfinite(table.tokens["entropy"])
        steps, inverse = np.unique(table.tokens.step[known], return_inverse=True)
        sums = np.bincount(inverse, table.tokens["entropy"][known])
        return steps.astype(float), sums / np.bincount(inverse)


def fit_law(steps: Floats, entropy: Floats, values: Floats, *, measure: str = "reward", seed: int = 0) -> EntropyLaw:
    """Fit R to −exp(H) and 1 by least squares, with errors that allow for autocorrelation."""
    steps, entropy, values = binned(steps, entropy, values)
    fit = regression(np.stack([-np.exp(entropy), np.ones_like(entropy)], axis=1), values, seed)
    grid = np.linspace(0.0, float(entropy.max()), 60)
    rows = np.stack([-np.exp(grid), np.ones_like(grid)], axis=1)
    low, high = fit.band(rows)
    curve = rows @ fit.coefficients
    ceiling = fit.effect([-1, 1])
    limit: Interval | None = ceiling
    if measure == ACCURACY:
        curve, low, high = (np.clip(values_on_grid, 0.0, 1.0) for values_on_grid in (curve, low, high))
        clipped = Interval(ceiling.mean, max(ceiling.low, 0.0), min(ceiling.high, 1.0))
        limit = clipped if 0 <= ceiling.mean <= 1 else None
    residual = float(((values - fit.fitted) ** 2).sum())
    r_squared = 1 - residual / float(((values - values.mean()) ** 2).sum())
    return EntropyLaw(
        measure, steps, entropy, values, fit.effect([1, 0]), fit.effect([0, 1]), ceiling, limit, r_squared,
        grid, curve, low, high,
    )  # fmt: skip


# ---------------------------------------------------------------------------- summaries and tables
def stages_summary(result: Stages) -> str:
    """Describe where the rise ends, or that there is no breakpoint."""
    if result.breakpoint is None and result.after is not None:
        return (
            f"The {result.measure} bends (p = {result.p:.3f}), but not from a rise to a flatter stage: "
            f"{result.before:+.3f} per 100 steps, then {result.after:+.3f}."
        )
    if result.breakpoint is None:
        return (
            f"No breakpoint: a single line fits as well (p = {result.p:.2f}); the {result.measure} changes by "
            f"{result.before:+.3f} per 100 steps."
        )
    return (
        f"The {result.measure} rises until step {result.breakpoint:.0f} by {result.before:+.3f} per 100 steps, "
        f"then changes by {result.after:+.3f} (p of a single line {_p(result.p)})."
    )


def _p(value: float) -> str:
    return f"≤ {value:.3f}" if value <= 1 / DRAWS * 1.01 else f"= {value:.3f}"


def stages_tables(result: Stages) -> dict[str, Table]:
    """Return tables of the fit and of the curve."""
    rows: list[list[Cell]] = [
        ["breakpoint (step)", result.breakpoint],
        ["p of a single line", result.p],
        ["slope before (per 100 steps)" if result.after else "slope of the line (per 100 steps)", result.before],
        ["slope after (per 100 steps)", result.after],
    ]
    points: list[list[Cell]] = [
        [float(step), float(value), float(fit)]
        for step, value, fit in zip(result.steps, result.values, result.fitted, strict=True)
    ]
    return {
        "stages": Table(["measure", "value"], rows, title="stages of the training"),
        "stages-curve": Table(["step", result.measure, "fitted"], points, title=f"{result.measure} by step"),
    }


def law_summary(result: EntropyLaw) -> str:
    """Describe a, b and the ceiling."""
    if result.limit is not None:
        ceiling = f"the {result.measure} would be {result.limit:.3f}"
    elif result.ceiling.mean > 1:
        ceiling = f"this fit shows no ceiling below 1 for the {result.measure}"
    else:
        ceiling = f"this fit shows no {result.measure} above 0"
    text = (
        f"R = −a·exp(H) + b with a = {result.a:.3f} and b = {result.b:.3f}; at an entropy of 0 "
        f"{ceiling} (R² = {result.r_squared:.2f})."
    )
    return text if result.a.sign else text + " In this run a does not differ significantly from 0."


def law_tables(result: EntropyLaw) -> dict[str, Table]:
    """Return tables of the coefficients and of the points."""
    rows: list[list[Cell]] = [
        [name, effect, effect.p]
        for name, effect in (("a", result.a), ("b", result.b), ("b − a, the fit at H = 0", result.ceiling))
    ]
    points: list[list[Cell]] = [
        [float(s), float(h), float(r)] for s, h, r in zip(result.steps, result.entropy, result.values, strict=True)
    ]
    return {
        "law": Table(["coefficient", "value", "p of 0"], rows, title="R = −a·exp(H) + b"),
        "law-points": Table(["step", "entropy (nats)", result.measure], points, title="entropy and reward by step"),
    }
