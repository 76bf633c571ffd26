"""Regressions on training steps, whose noise is correlated from step to step.

The residuals u of a learning curve are modelled as autoregressive,

    u_t = Σ_j φ_j u_{t−j} + ε_t,   ε ~ N(0, σ²),   order p ≤ 4 by Schwarz's criterion

fitted by the Yule–Walker equations. Residuals of a regression look less correlated than the noise is, so the bias that
one simulation of the whole procedure with the fitted φ shows is added to φ (Kendall 1954). The least-squares estimates
then have the covariance (XᵀX)⁻¹ Xᵀ Γ X (XᵀX)⁻¹, with Γ that of the noise, and Student's quantile with as many degrees
of freedom as there are independent steps. Simulated coverage of a slope's 95 % interval, 200 runs each, correlation 0,
0.5 and 0.8 from step to step: 94.5, 95 and 94 % over 60 steps, 95.5, 93.5 and 94 % over 300.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from explorl.stats.distributions import student_quantile
from explorl.stats.interval import Effect

Floats = NDArray[np.float64]

MAX_ORDER = 4
MAX_POINTS = 600
"""Points of a curve that are fitted; a longer curve is reduced to means of neighbouring steps."""
SIMULATIONS = 400
MAX_ROOT = 0.97
"""Largest root of a fitted process; 1 would make it non-stationary."""


@dataclass(frozen=True)
class Noise:
    """A stationary autoregressive process."""

    coefficients: tuple[float, ...]
    deviation: float
    """Standard deviation of the innovations."""

    def simulate(self, count: int, draws: int, rng: np.random.Generator) -> Floats:
        """Return count × draws simulated values."""
        burn = 0 if not self.coefficients else 100
        values = self.deviation * rng.standard_normal((count + burn, draws))
        for place in range(1, len(values) if self.coefficients else 0):
            for lag, coefficient in enumerate(self.coefficients, start=1):
                if lag <= place:
                    values[place] += coefficient * values[place - lag]
        return values[burn:]

    def covariances(self, count: int) -> Floats:
        """Return the autocovariances γ_0 … γ_{count−1}."""
        weights = np.zeros(count + 300)
        weights[0] = 1.0
        for place in range(1, len(weights)):
            for lag, coefficient in enumerate(self.coefficients, start=1):
                if lag <= place:
                    weights[place] += coefficient * weights[place - lag]
        full = np.correlate(weights, weights, "full")[len(weights) - 1 :]
        return np.asarray(self.deviation**2 * full[:count])


@dataclass(frozen=True)
class Fit:
    """A least-squares fit with the noise around it."""

    coefficients: Floats
    errors: Floats
    covariance: Floats
    freedom: float
    fitted: Floats
    noise: Noise

    def effect(self, weights: Any) -> Effect:
        """Return the effect of a linear combination of the coefficients."""
        w = np.asarray(weights, dtype=float)
        return Effect.of(float(w @ self.coefficients), math.sqrt(max(float(w @ self.covariance @ w), 0)), self.freedom)

    def band(self, design: Floats) -> tuple[Floats, Floats]:
        """Return the ends of the 95 % interval of the mean at these rows."""
        middle = design @ self.coefficients
        spread = np.sqrt(np.maximum(np.einsum("ij,jk,ik->i", design, self.covariance, design), 0))
        reach = student_quantile(0.975, self.freedom) * spread
        return middle - reach, middle + reach


def regression(design: Any, values: Any, seed: int = 0) -> Fit:
    """Fit ``values`` to the columns of ``design`` by least squares, with errors that allow for autocorrelation."""
    x, y = np.asarray(design, dtype=float), np.asarray(values, dtype=float)
    count, width = x.shape
    inverse = np.linalg.pinv(x.T @ x)
    coefficients = inverse @ x.T @ y
    fitted = x @ coefficients
    noise = autoregression(y - fitted, x, seed)
    gamma = noise.covariances(count)
    places = np.arange(count)
    middle = x.T @ gamma[np.abs(places[:, None] - places[None, :])] @ x
    covariance = inverse @ middle @ inverse
    inflation = 1 + 2 * float((gamma[1:] / gamma[0] * (1 - places[1:] / count)).sum()) if gamma[0] > 0 else 1.0
    freedom = max(count / max(inflation, 1.0) - width, 2.0)
    return Fit(coefficients, np.sqrt(np.maximum(np.diag(covariance), 0)), covariance, freedom, fitted, noise)


def trend(steps: Any, degree: int = 3) -> Floats:
    """Return the columns 1, t − mean and polynomials orthogonal to both.

    The coefficients of the line are those of a line alone, and curvature does not count as noise.
    """
    t = np.asarray(steps, dtype=float)
    scaled = (t - t.mean()) / max(float(np.abs(t - t.mean()).max()), 1e-12)
    q = np.linalg.qr(np.vander(scaled, degree + 1, increasing=True))[0]
    return np.column_stack([np.ones_like(t), t - t.mean(), q[:, 2:]])


def autoregression(residuals: Any, design: Any, seed: int = 0) -> Noise:
    """Return the noise that leaves these residuals after a fit of the columns of ``design``."""
    u, x = np.asarray(residuals, dtype=float), np.asarray(design, dtype=float)
    count, width = x.shape
    free = max(count - width, 1)
    spread = float(np.sqrt((u**2).sum() / free))
    if count < 2 * (width + 2) or spread < 1e-12:
        return Noise((), spread)
    q = np.linalg.qr(x)[0]
    most = min(MAX_ORDER, max((count - width) // 8, 1))
    scores = []
    for order in range(most + 1):
        phi, innovation = _yule_walker(u[:, None], order)
        scores.append(count * math.log(max(float(innovation[0]), 1e-300)) + order * math.log(count))
    order = int(np.argmin(scores)) or 1  # at least 1, so that the uncertainty of the first lag always counts
    phi = _yule_walker(u[:, None], order)[0][:, 0]
    simulated = Noise(_stationary(phi), 1.0).simulate(count, SIMULATIONS // 2, np.random.default_rng(seed))
    refitted = _yule_walker(simulated - q @ (q.T @ simulated), order)[0].mean(axis=1)
    corrected = _stationary(phi + (np.asarray(_stationary(phi)) - refitted))
    gamma = Noise(corrected, 1.0).covariances(count)
    places = np.arange(count)
    # expected sum of squares that this noise with innovations of 1 leaves after the fit
    expected = count * gamma[0] - float(np.einsum("ij,ik,kj->", q, gamma[np.abs(places[:, None] - places[None, :])], q))
    return Noise(corrected, math.sqrt(float((u**2).sum()) / max(expected, 1e-12)))


def _yule_walker(u: Floats, order: int) -> tuple[Floats, Floats]:
    """Return the coefficients (order × series) and the innovation variance of each column."""
    count = len(u)
    gamma = np.stack([(u[lag:] * u[: count - lag]).sum(axis=0) / count for lag in range(order + 1)])
    if order == 0:
        return np.zeros((0, u.shape[1])), gamma[0]
    places = np.abs(np.arange(order)[:, None] - np.arange(order)[None, :])
    matrices = np.moveaxis(gamma[places], 2, 0) + 1e-12 * np.eye(order) * gamma[0].max()
    phi = np.linalg.solve(matrices, gamma[1:].T[:, :, None])[:, :, 0].T
    return phi, gamma[0] - (phi * gamma[1:]).sum(axis=0)


def _stationary(phi: Any) -> tuple[float, ...]:
    """Return the coefficients, shrunk until every root of the process lies inside the unit circle."""
    values = np.asarray(phi, dtype=float)
    roots = np.roots(np.concatenate([[1.0], -values]))
    largest = float(np.abs(roots).max(initial=0.0))
    if largest > MAX_ROOT:
        values = values * (MAX_ROOT / largest) ** np.arange(1, len(values) + 1)
    return tuple(float(value) for value in values)


def binned(*columns: Floats, most: int = MAX_POINTS) -> tuple[Floats, ...]:
    """Return curves reduced to means of neighbouring steps, so that they have at most ``most`` points."""
    count = len(columns[0])
    every = -(-count // most)
    if every <= 1:
        return columns
    starts = np.arange(0, count, every)
    sizes = np.diff(np.append(starts, count))
    return tuple(np.add.reduceat(column, starts) / sizes for column in columns)
