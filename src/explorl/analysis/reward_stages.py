"""The stages of a training: where the rise ends and the plateau begins, and how reward follows entropy.

Deng et al. 2025, §3.2.2 and Figure 3a (stages); Cui et al. 2025 (R = −a·exp(H) + b).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from explorl.analysis.lens import Context, Unavailable
from explorl.analysis.lens_table import LensTable, NotRecorded
from explorl.stats import Cell, Interval, Table
from explorl.stats.regression import LEVEL, Effect, autoregression, binned, regression

Floats = NDArray[np.float64]

MIN_STEPS = 16
"""Steps below which no stage is told: each of the two pieces needs a handful, and the noise as well."""
EDGE = 0.06
"""Share of the steps at either end where no breakpoint is looked for."""
CANDIDATES = 150
DRAWS = 999
"""Simulated curves behind the p value and the interval."""
REWARD = ("rewards/correctness/mean", "rewards/correctness_reward/mean", "reward")
"""Keys of metrics.jsonl that say how well training goes, the best first."""
ACCURACY = "training accuracy"
NAMES = dict.fromkeys(REWARD[:2], ACCURACY) | {"reward": "reward"}


@dataclass(frozen=True)
class Stages:
    """A two-piece continuous line through a curve, or the single line that does as well."""

    measure: str
    steps: Floats
    values: Floats
    fitted: Floats
    """The two pieces where there is a breakpoint, else the line."""
    p: float
    """Of a single line: the share of simulated lines that two pieces fit better by as much as these."""
    breakpoint: Interval | None
    """The step where the rise ends; None where a single line does as well, or the slope does not fall there."""
    before: Interval
    """Slope of the first piece, per 100 steps; that of the line where there is no breakpoint."""
    after: Interval | None
    rises: bool
    """Whether the curve rises in its first piece, or along the line, beyond doubt."""


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
    """b − a: the fit, extrapolated to an entropy of 0."""
    limit: Interval | None
    """The ceiling, within [0, 1] for an accuracy; None where the extrapolation leaves that range."""
    r_squared: float
    grid: Floats
    """Entropies at which the curve and its band are given."""
    curve: Floats
    low: Floats
    high: Floats


def stages(table: LensTable, context: Context) -> Stages | Unavailable:
    """Rising and plateau stage of a run's reward."""
    measure, steps, values = reward_curve(table)
    if (reason := _too_little(measure, steps, values)) is not None:
        return Unavailable(reason)
    steps, values = binned(steps, values)
    return two_pieces(steps, values, measure=measure, seed=context.seed)


def cached_stages(table: LensTable, context: Context) -> Stages | None:
    """The stages of a run where they can be told, computed once."""
    found: Stages | None = context.cached("stages", lambda: _result(table, context))
    return found


def rising_end(table: LensTable, context: Context) -> float:
    """The last step of the rising stage; infinite where no breakpoint is seen."""
    found = cached_stages(table, context)
    return found.breakpoint.mean if found and found.breakpoint else float("inf")


def _result(table: LensTable, context: Context) -> Stages | None:
    try:
        found = stages(table, context)
    except NotRecorded:
        return None
    return found if isinstance(found, Stages) else None


def reward_curve(table: LensTable) -> tuple[str, Floats, Floats]:
    """What the curve is called, its steps and its values: the training accuracy where it is known, else the reward."""
    for key in REWARD:
        try:
            return NAMES[key], *table.curve(key)
        except NotRecorded:
            continue
    if "correct" in table.completions and len(np.unique(table.completions.step)) > 1:
        marks, at = table.completions["correct"], table.completions.step
        known = np.isfinite(marks)
        steps = np.unique(at[known])
        return ACCURACY, steps.astype(float), np.array([marks[known & (at == s)].mean() for s in steps])
    raise NotRecorded("metrics.jsonl has no line with a reward; it needs the lines that training logs")


def two_pieces(steps: Floats, values: Floats, *, measure: str = "reward", seed: int = 0, draws: int = DRAWS) -> Stages:
    """Fits y = c + s·t + δ·max(t − τ, 0) + noise for the best τ, and asks whether δ = 0 would do.

    For each candidate τ, the hinge is made orthogonal to the line, so that the squares it takes away are one product.
    The best of all candidates is compared with the best in curves simulated from the single line with the noise of the
    two-piece fit (autoregressive, see `explorl.stats.regression`): p is the share that does as well. The interval of τ
    and of the slopes is that of refits of curves simulated from the two pieces (2.5 to 97.5 %).
    """
    rng = np.random.default_rng(seed)
    line = np.stack([np.ones_like(steps), steps], axis=1)
    hinges = _Hinges(steps)
    place, _, _ = hinges.best(values[:, None])
    pieces = np.column_stack([line, hinges.raw[place[0]]])
    fit = regression(pieces, values, seed)
    after = (steps > hinges.at[place[0]]).astype(float)  # how the fit changes with τ, which was chosen by the data too
    noise = autoregression(values - fit.fitted, np.column_stack([pieces, after]), seed)

    straight = regression(line, values, seed)
    null = straight.fitted[:, None] + noise.simulate(len(steps), draws, rng)
    gain = hinges.gain(values[:, None])[0]
    p = float((1 + (hinges.gain(null) >= gain).sum()) / (1 + draws))
    alone = _scaled(straight.effect([0, 1]))
    if p >= LEVEL:
        rises = straight.effect([0, 1]).sign > 0
        return Stages(measure, steps, values, straight.fitted, p, None, alone, None, rises)

    drawn = fit.fitted[:, None] + noise.simulate(len(steps), draws, rng)
    places, first, second = hinges.best(drawn)
    own = (float(fit.coefficients[1]), float(fit.coefficients[1] + fit.coefficients[2]))
    slopes = [_percentiles(own[0], first), _percentiles(own[1], second)]
    falls = own[0] > own[1]
    rises = float((first <= 0).mean()) < LEVEL / 2 and own[0] > 0
    if not (falls and rises):  # the curve bends, but this is no rise that ends
        return Stages(measure, steps, values, fit.fitted, p, None, slopes[0], slopes[1], rises)
    tau = _percentiles(float(hinges.at[place[0]]), hinges.at[places], 1.0)
    return Stages(measure, steps, values, fit.fitted, p, tau, slopes[0], slopes[1], rises)


class _Hinges:
    """Candidate breakpoints, each as a unit vector orthogonal to every line."""

    def __init__(self, steps: Floats) -> None:
        first, last = np.quantile(steps, [EDGE, 1 - EDGE])
        inner = np.unique(np.linspace(max(first, steps[2]), min(last, steps[-3]), CANDIDATES))
        self.at = inner
        self.raw = np.maximum(steps[None, :] - inner[:, None], 0.0)
        self._line = np.linalg.qr(np.stack([np.ones_like(steps), steps], axis=1))[0]
        self._steps = steps
        apart = self.raw - (self.raw @ self._line) @ self._line.T
        self._norms = np.linalg.norm(apart, axis=1)
        self._units = apart / self._norms[:, None]

    def gain(self, curves: Floats) -> Floats:
        """How much the best hinge takes away of each curve's squares, relative to what it leaves (sup F)."""
        rest = curves - self._line @ (self._line.T @ curves)
        squares = (rest**2).sum(axis=0)
        taken = ((self._units @ rest) ** 2).max(axis=0)
        return np.asarray(taken / np.maximum(squares - taken, 1e-300))

    def best(self, curves: Floats) -> tuple[NDArray[np.int64], Floats, Floats]:
        """The best candidate's place, and the slopes before and after it, of each curve."""
        rest = curves - self._line @ (self._line.T @ curves)
        products = self._units @ rest
        place = np.abs(products).argmax(axis=0)
        columns = np.arange(curves.shape[1])
        bend = products[place, columns] / self._norms[place]
        without = curves - self.raw[place].T * bend
        centred = self._steps - self._steps.mean()
        before = centred @ without / (centred @ centred)
        return place, np.asarray(before), np.asarray(before + bend)


def _percentiles(mean: float, draws: Floats, scale: float = 100.0) -> Interval:
    low, high = np.quantile(draws, [0.025, 0.975])
    return Interval(scale * mean, scale * float(low), scale * float(high))


def _scaled(effect: Effect) -> Interval:
    return Interval(100 * effect.mean, 100 * effect.low, 100 * effect.high)


def _too_little(measure: str, steps: Floats, values: Floats) -> str | None:
    if len(steps) < MIN_STEPS:
        plural = "" if len(steps) == 1 else "s"
        return f"the run has {len(steps)} step{plural} with a {measure}; stages need {MIN_STEPS} or more"
    if np.ptp(values) < 1e-9:
        return f"the {measure} is {values[0]:g} at every step: there is no rise to find"
    return None


def entropy_law(table: LensTable, context: Context) -> EntropyLaw | Unavailable:
    """Reward against the policy's entropy, over the whole run."""
    measure, steps, values = reward_curve(table)
    at, entropy = entropy_curve(table)
    both = np.intersect1d(steps, at)
    values, entropy = values[np.isin(steps, both)], entropy[np.isin(at, both)]
    if (reason := _too_little(measure, both, values)) is not None:
        return Unavailable(reason)
    if np.ptp(entropy) < 1e-6:
        return Unavailable(f"the entropy is {entropy[0]:g} nats at every step: the law has nothing to go by")
    return fit_law(both, entropy, values, measure=measure, seed=context.seed)


def entropy_curve(table: LensTable) -> tuple[Floats, Floats]:
    """Mean entropy of the sampled tokens by step: as logged, else that of the recorded tokens."""
    try:
        return table.curve("entropy")
    except NotRecorded:
        known = np.isfinite(table.tokens["entropy"])
        steps, inverse = np.unique(table.tokens.step[known], return_inverse=True)
        sums = np.bincount(inverse, table.tokens["entropy"][known])
        return steps.astype(float), sums / np.bincount(inverse)


def fit_law(steps: Floats, entropy: Floats, values: Floats, *, measure: str = "reward", seed: int = 0) -> EntropyLaw:
    """Least squares of R on −exp(H) and 1, with errors that allow for autocorrelation."""
    steps, entropy, values = binned(steps, entropy, values)
    fit = regression(np.stack([-np.exp(entropy), np.ones_like(entropy)], axis=1), values, seed)
    grid = np.linspace(0.0, float(entropy.max()), 60)
    rows = np.stack([-np.exp(grid), np.ones_like(grid)], axis=1)
    low, high = fit.band(rows)
    curve = rows @ fit.coefficients
    ceiling = fit.effect([-1, 1])
    limit: Interval | None = ceiling.interval
    if measure == ACCURACY:
        curve, low, high = (np.clip(values_on_grid, 0.0, 1.0) for values_on_grid in (curve, low, high))
        clipped = Interval(ceiling.mean, max(ceiling.low, 0.0), min(ceiling.high, 1.0))
        limit = clipped if 0 <= ceiling.mean <= 1 else None
    left = float(((values - fit.fitted) ** 2).sum())
    r_squared = 1 - left / float(((values - values.mean()) ** 2).sum())
    return EntropyLaw(
        measure, steps, entropy, values, fit.effect([1, 0]), fit.effect([0, 1]), ceiling, limit, r_squared,
        grid, curve, low, high,
    )  # fmt: skip


# ---------------------------------------------------------------------------- in words and numbers
def stages_summary(result: Stages) -> str:
    """Where the rise ends, or that none is seen."""
    if result.breakpoint is None and result.after is not None:
        return (
            f"The {result.measure} bends (p = {result.p:.3f}), but not from a rise to a flatter stage: "
            f"{result.before:+.3f} per 100 steps, then {result.after:+.3f}."
        )
    if result.breakpoint is None:
        return (
            f"No breakpoint: a single line does as well (p = {result.p:.2f}); the {result.measure} changes by "
            f"{result.before:+.3f} per 100 steps."
        )
    return (
        f"The {result.measure} rises until step {result.breakpoint:.0f} by {result.before:+.3f} per 100 steps, "
        f"then changes by {result.after:+.3f} (p of a single line {_p(result.p)})."
    )


def _p(value: float) -> str:
    return f"≤ {value:.3f}" if value <= 1 / DRAWS * 1.01 else f"= {value:.3f}"


def stages_tables(result: Stages) -> dict[str, Table]:
    """The fit, and the curve with it."""
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
    """a, b and the ceiling."""
    if result.limit is not None:
        ceiling = f"the {result.measure} would be {result.limit:.3f}"
    elif result.ceiling.mean > 1:
        ceiling = f"this fit shows no ceiling below 1 for the {result.measure}"
    else:
        ceiling = f"this fit shows no {result.measure} above 0"
    text = (
        f"R = −a·exp(H) + b with a = {result.a.interval:.3f} and b = {result.b.interval:.3f}; at an entropy of 0 "
        f"{ceiling} (R² = {result.r_squared:.2f})."
    )
    return text if result.a.sign else text + " That a is not 0 cannot be told from this run."


def law_tables(result: EntropyLaw) -> dict[str, Table]:
    """The coefficients, and the points."""
    rows: list[list[Cell]] = [
        [name, effect.interval, effect.p]
        for name, effect in (("a", result.a), ("b", result.b), ("b − a, the fit at H = 0", result.ceiling))
    ]
    points: list[list[Cell]] = [
        [float(s), float(h), float(r)] for s, h, r in zip(result.steps, result.entropy, result.values, strict=True)
    ]
    return {
        "law": Table(["coefficient", "value", "p of 0"], rows, title="R = −a·exp(H) + b"),
        "law-points": Table(["step", "entropy (nats)", result.measure], points, title="entropy and reward by step"),
    }
