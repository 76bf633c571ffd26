"""Student's distribution and Fisher's exact test."""

from __future__ import annotations

import math
from functools import lru_cache


def student_cdf(t: float, freedom: float) -> float:
    """Return P(T ≤ t), which is 1 − ½ I_{ν/(ν + t²)}(ν/2, ½) for t ≥ 0."""
    if not freedom > 0:
        raise ValueError(f"degrees of freedom must be above 0, such as 2; got {freedom}")
    if t * t < freedom:  # near the middle, where ν/(ν + t²) rounds to 1
        return 0.5 + math.copysign(0.5 * _incomplete_beta(0.5, freedom / 2, t * t / (freedom + t * t)), t)
    tail = 0.5 * _incomplete_beta(freedom / 2, 0.5, freedom / (freedom + t * t))
    return 1 - tail if t > 0 else tail


@lru_cache(maxsize=65536)
def student_quantile(probability: float, freedom: float) -> float:
    """Return the t with P(T ≤ t) = probability to a relative 1e-10, by Newton's method within a bracket."""
    if not 0 < probability < 1:
        raise ValueError(f"probability must lie between 0 and 1, such as 0.975; got {probability}")
    if probability < 0.5:
        return -student_quantile(1 - probability, freedom)
    low, high = 0.0, 1.0
    while student_cdf(high, freedom) < probability:
        low, high = high, 2 * high
    scale = math.exp(math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)) / math.sqrt(freedom * math.pi)
    t = (low + high) / 2
    for _ in range(100):
        error = probability - student_cdf(t, freedom)
        low, high = (t, high) if error > 0 else (low, t)
        step = t + error / (scale * (1 + t * t / freedom) ** (-(freedom + 1) / 2))
        step = step if low <= step <= high else (low + high) / 2
        if abs(step - t) <= 1e-10 * max(t, 1e-3):
            return step
        t = step
    return t


def _incomplete_beta(a: float, b: float, x: float) -> float:
    """Return the regularised incomplete beta function by its continued fraction (DLMF 8.17.22), Lentz's method."""
    if x <= 0 or x >= 1:
        return float(x >= 1)
    if x > (a + 1) / (a + b + 2):  # the fraction converges fast only on the other side
        return 1 - _incomplete_beta(b, a, 1 - x)
    front = math.exp(
        math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)
    )  # fmt: skip
    tiny = 1e-300
    c, d = 1.0, 1 / ((1 - (a + b) * x / (a + 1)) or tiny)
    value = d
    for m in range(1, 500):
        for term in (
            m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m)),
            -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1)),
        ):
            d = 1 / ((1 + term * d) or tiny)
            c = (1 + term / c) or tiny
            value *= c * d
        if abs(c * d - 1) < 1e-15:
            break
    return front * value / a


def fisher(a: int, n: int, b: int, m: int) -> float:
    """Return the two-sided p value of equal probabilities behind a/n and b/m, by Fisher's exact test (1935)."""
    total = a + b
    ways = [math.comb(n, x) * math.comb(m, total - x) for x in range(max(0, total - m), min(n, total) + 1)]
    observed = math.comb(n, a) * math.comb(m, b)
    return sum(way for way in ways if way <= observed) / sum(ways)
