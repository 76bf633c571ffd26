"""Stages of a training run: where the rise ends and the plateau begins, and how reward depends on entropy.

Deng et al. 2025, §3.2.2 and Figure 3a (stages); Cui et al. 2025 (R = −a·exp(H) + b).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from explorl.analysis.charts import DASHED, Chart, Palette, band, dots, line, rule, span
from explorl.analysis.lens import Context, Finding, Findings, Unavailable, finding_table, series_table, values_of
from explorl.analysis.lens_table import LensTable, NotRecorded
from explorl.stats import Interval
from explorl.stats.interval import LEVEL
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


def stages(table: LensTable, context: Context) -> Findings | Unavailable:
    """Find the rising and the plateau stage of a run's reward."""
    measure, steps, values = reward_curve(table)
    if (reason := _missing_data(measure, steps, values)) is not None:
        return Unavailable(reason)
    steps, values = binned(steps, values)
    return two_pieces(steps, values, measure=measure, seed=context.seed)


def rising_end(table: LensTable, context: Context) -> float:
    """Return the last step of the rising stage, computed once; infinity without a breakpoint."""

    def compute() -> float:
        try:
            result = stages(table, context)
        except NotRecorded:
            return float("inf")
        breakpoint = result["breakpoint"] if isinstance(result, Findings) else None
        return breakpoint.mean if breakpoint else float("inf")

    return float(context.cached("rising end", compute))


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


def two_pieces(
    steps: Floats, values: Floats, *, measure: str = "reward", seed: int = 0, draws: int = DRAWS
) -> Findings:
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
    if p >= LEVEL:
        alone = straight.effect([0, 1])
        return _stages(measure, steps, values, straight.fitted, p, None, alone.times(100), None, rises=alone.sign > 0)

    simulated = fit.fitted[:, None] + noise.simulate(len(steps), draws, rng)
    indices, first, second = hinges.best(simulated)
    estimates = (float(fit.coefficients[1]), float(fit.coefficients[1] + fit.coefficients[2]))
    slopes = [
        resampled_interval(mean, draws).times(100) for mean, draws in zip(estimates, (first, second), strict=True)
    ]
    falls = estimates[0] > estimates[1]
    rises = float((first <= 0).mean()) < LEVEL / 2 and estimates[0] > 0
    tau = resampled_interval(float(hinges.candidates[best[0]]), hinges.candidates[indices])
    # a curve may also bend, but not from a rise to a flatter stage
    return _stages(measure, steps, values, fit.fitted, p, tau if falls and rises else None, *slopes, rises=rises)


def _stages(
    measure: str,
    steps: Floats,
    values: Floats,
    fitted: Floats,
    p: float,
    breakpoint: Interval | None,
    before: Interval,
    after: Interval | None,
    *,
    rises: bool,
) -> Findings:
    """Return the findings of the two pieces, or of the line; the slopes are per 100 steps."""
    findings = [
        Finding("breakpoint", "breakpoint", breakpoint, "step"),
        Finding("p", "p of a single line", p),
        Finding("before", "slope before" if after else "slope of the line", before, "per 100 steps"),
        Finding("after", "slope after", after, "per 100 steps"),
    ]
    caption = sentence = _describe_stages(measure, p, breakpoint, before, after)
    scale, unit = _scale_and_unit(measure)
    marks = [
        dots(steps, scale * values, "quiet", "each step"),
        line(steps, scale * fitted, 0, "two pieces" if after is not None else "line"),
    ]
    if breakpoint is not None:
        marks.append(span(breakpoint, 1, "its 95 % interval"))
        marks.append(rule(breakpoint.mean, 1, "end of the rise", dash=DASHED, width=1.4))
        caption += " Dashed: where the rise ends; band: its 95 % interval."
    return Findings(
        sentence,
        {
            "stages": finding_table("stages of the training", findings, columns=("measure", "value")),
            "stages-curve": series_table(f"{measure} by step", {"step": steps, measure: values, "fitted": fitted}),
        },
        [Chart("stages", "Stages of the training", caption, marks, "training step", unit, legend="lower right")],
        {"measure": measure, "steps": steps, "values": values, "fitted": fitted, "rises": rises, **values_of(findings)},
    )


def _describe_stages(
    measure: str, p: float, breakpoint: Interval | None, before: Interval, after: Interval | None
) -> str:
    """Describe where the rise ends, or that there is no breakpoint."""
    if breakpoint is None and after is not None:
        return (
            f"The {measure} bends (p = {p:.3f}), but not from a rise to a flatter stage: {before:+.3f} per 100 steps, "
            f"then {after:+.3f}."
        )
    if breakpoint is None:
        return (
            f"No breakpoint: a single line fits as well (p = {p:.2f}); the {measure} changes by {before:+.3f} per 100 "
            "steps."
        )
    p_text = f"≤ {p:.3f}" if p <= 1 / DRAWS * 1.01 else f"= {p:.3f}"
    return (
        f"The {measure} rises until step {breakpoint:.0f} by {before:+.3f} per 100 steps, then changes by "
        f"{after:+.3f} (p of a single line {p_text})."
    )


def _scale_and_unit(measure: str) -> tuple[float, str]:
    """Return the factor and the label with which charts show a reward: an accuracy in percent."""
    return (100.0, f"{measure} (%)") if "accuracy" in measure else (1.0, measure)


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


def entropy_law(table: LensTable, context: Context) -> Findings | Unavailable:
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
        return table.tokens.means_by_step(table.tokens["entropy"])


def fit_law(steps: Floats, entropy: Floats, values: Floats, *, measure: str = "reward", seed: int = 0) -> Findings:
    """Fit R to −exp(H) and 1 by least squares, with errors that allow for autocorrelation."""
    steps, entropy, values = binned(steps, entropy, values)
    fit = regression(np.stack([-np.exp(entropy), np.ones_like(entropy)], axis=1), values, seed)
    grid = np.linspace(0.0, float(entropy.max()), 60)
    rows = np.stack([-np.exp(grid), np.ones_like(grid)], axis=1)
    low, high = fit.band(rows)
    curve = rows @ fit.coefficients
    ceiling = fit.effect([-1, 1])
    limit: Interval | None = ceiling.times(1)
    if measure == ACCURACY:
        curve, low, high = (np.clip(values_on_grid, 0.0, 1.0) for values_on_grid in (curve, low, high))
        clipped = Interval(ceiling.mean, max(ceiling.low, 0.0), min(ceiling.high, 1.0))
        limit = clipped if 0 <= ceiling.mean <= 1 else None
    residual = float(((values - fit.fitted) ** 2).sum())
    r_squared = 1 - residual / float(((values - values.mean()) ** 2).sum())
    findings = [
        Finding("a", "a", fit.effect([1, 0])),
        Finding("b", "b", fit.effect([0, 1])),
        Finding("ceiling", "b − a, the fit at H = 0", ceiling),
    ]
    series = {"steps": steps, "entropy": entropy, "values": values}
    series |= {"grid": grid, "curve": curve, "low": low, "high": high}
    results = {"measure": measure, "limit": limit, "r_squared": r_squared, **series, **values_of(findings)}
    sentence = _describe_law(results)
    return Findings(
        sentence,
        {
            "law": finding_table("R = −a·exp(H) + b", findings, columns=("coefficient", "value", "p of 0")),
            "law-points": series_table(
                "entropy and reward by step", {"step": steps, "entropy (nats)": entropy, measure: values}
            ),
        },
        [_law_chart(sentence, measure, series, limit)],
        results,
    )


def _describe_law(law: Mapping[str, Any]) -> str:
    """Describe a, b and the ceiling."""
    measure = law["measure"]
    if law["limit"] is not None:
        ceiling = f"the {measure} would be {law['limit']:.3f}"
    elif law["ceiling"].mean > 1:
        ceiling = f"this fit shows no ceiling below 1 for the {measure}"
    else:
        ceiling = f"this fit shows no {measure} above 0"
    text = (
        f"R = −a·exp(H) + b with a = {law['a']:.3f} and b = {law['b']:.3f}; at an entropy of 0 {ceiling} "
        f"(R² = {law['r_squared']:.2f})."
    )
    return text if law["a"].sign else text + " In this run a does not differ significantly from 0."


def _law_chart(sentence: str, measure: str, series: Mapping[str, Floats], limit: Interval | None) -> Chart:
    """Return the chart of entropy and reward at each step, with the fitted law and its ceiling."""
    scale, unit = _scale_and_unit(measure)
    values, curve, low, high = (scale * series[name] for name in ("values", "curve", "low", "high"))

    def points(axes: Any, palette: Palette) -> None:
        age = np.linspace(0.25, 0.9, len(values))
        axes.scatter(series["entropy"], values, s=12, color=palette.quiet, alpha=age, linewidth=0)

    def ceiling(axes: Any, palette: Palette) -> None:
        if limit is not None:
            top = scale * limit.mean
            axes.plot([0], [top], marker="D", color=palette.arms[1], markersize=6, clip_on=False)
            axes.annotate("ceiling b − a", (0, top), xytext=(8, 4), textcoords="offset points", fontsize=8.5)
        shown = np.concatenate([values, curve])  # a wide band must not flatten the points
        reach = float(np.ptp(shown))
        axes.set_ylim(float(shown.min()) - 0.1 * reach, float(shown.max()) + 0.15 * reach)

    caption = (
        f"{sentence} Each point is a step, later ones are darker; line and band: the fit and the 95 % interval of its "
        "mean, extended to H = 0."
    )
    marks = [points, line(series["grid"], curve, 0), band(series["grid"], low, high, 0), ceiling]
    return Chart("law", "Entropy and reward", caption, marks, "entropy H (nats)", unit)
