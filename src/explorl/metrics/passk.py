"""Scores of n samples per problem, as the expected value over which k of the n are drawn: pass@k, avg@k, maj@k."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from functools import lru_cache
from typing import Any, overload

import numpy as np
from numpy.typing import ArrayLike, NDArray

from explorl.metrics._arrays import answer_rows, first_k, integers, samples

NEGLIGIBLE = 1e-18
"""Probabilities below this change no float64 in [0, 1]."""


@overload
def pass_at_k(n: int, c: int, k: int) -> float: ...
@overload
def pass_at_k(n: ArrayLike, c: ArrayLike, k: ArrayLike) -> NDArray[np.float64]: ...


def pass_at_k(n: Any, c: Any, k: Any) -> Any:
    """Return the chance that k samples drawn without replacement from n, of which c are right, hold a right one.

        pass@k = 1 − C(n − c, k) / C(n, k) = 1 − Π_{i < min(c, k)} (n − max(c, k) − i) / (n − i)

    Unbiased: Chen et al. 2021 (arXiv 2107.03374), Deng et al. 2025 Eq. 2. The product runs over the smaller of c and k
    (the ratio is symmetric in them), stops where it no longer matters, and cannot overflow; it is exactly 0 where
    c = 0 and exactly 1 where n − c < k.

    The arguments broadcast: ``pass_at_k(640, c[:, None], [1, 8, 64])`` is problems × 3. Plain integers give a float.
    """
    whole = [integers(name, value) for name, value in (("n", n), ("c", c), ("k", k))]
    n, c, k = np.broadcast_arrays(*whole)
    for bad, rule in ((c < 0, "c ≥ 0"), (c > n, "c ≤ n"), (k < 1, "k ≥ 1"), (k > n, "k ≤ n")):
        if bad.any():
            raise ValueError(f"pass@k needs {rule}, got n = {n[bad][0]}, c = {c[bad][0]}, k = {k[bad][0]}")

    shape, n = n.shape, n.ravel()
    few, many = np.minimum(c, k).ravel(), np.maximum(c, k).ravel()
    miss = np.ones(n.shape)
    live = np.flatnonzero(few > 0)
    i = 0
    while live.size:
        miss[live] *= (n[live] - many[live] - i) / (n[live] - i)
        i += 1
        live = live[(few[live] > i) & (miss[live] > NEGLIGIBLE)]
    result = (1.0 - miss).reshape(shape)
    return float(result) if result.ndim == 0 else result


def avg_at_k(correct: Any, k: int | None = None) -> Any:
    """Return the mean of the first k samples of each problem: avg@k, the `avg@8` of Deng et al. 2025 Table 4.

    ``correct`` is problems × samples (ragged allowed) and gives an array, or the samples of one problem and gives a
    float. ``k=None`` takes all samples, which is also the expected avg@k over draws for every k. Graded scores pass.
    """
    rows, single = samples("correct", correct)
    means = np.array([row.mean() for row in first_k(rows, k)], dtype=np.float64)
    return float(means[0]) if single else means


def maj_at_k(answers: Sequence[Any], correct: Any, k: int) -> Any:
    """Return the expected accuracy of the majority answer of k samples drawn without replacement from n.

        maj@k = E_{k of n} [ mean of share(a) over the answers a with most votes ]
        share(a) = right samples with answer a / samples with answer a

    Ties count by expected value, never by order (Wang et al. 2022, arXiv 2203.11171, leave them open). None means that
    no answer was found: it has no vote, and wins only where all k drawn are None (share: how many of those are right,
    as a rule none).

    ``answers`` (hashable, normalised by the task, or None) and ``correct`` (0 or 1) are problems × samples, ragged
    allowed, and give an array; or they are the samples of one problem and give a float. No sampling: the value is
    computed from the answers' counts to about 1e-12, whatever n and k (see `_expected_majority`).
    """
    rows, right, single = answer_rows(answers, correct)
    first_k(rows, k)  # only to check k
    scores = np.array([_majority(row, marks, int(k)) for row, marks in zip(rows, right, strict=True)], dtype=np.float64)
    return float(scores[0]) if single else scores


def _majority(answers: Sequence[Hashable], right: NDArray[np.bool_], k: int) -> float:
    votes = Counter(answers)
    hits = Counter(answer for answer, hit in zip(answers, right, strict=True) if hit)
    share = {answer: hits[answer] / count for answer, count in votes.items()}
    blank_share, blanks = share.pop(None, 0.0), votes.pop(None, 0)
    n = len(answers)
    all_blank = 1.0 - pass_at_k(n, n - blanks, k)
    if not votes:
        return blank_share
    if k == n:
        most = max(votes.values())
        return float(np.mean([share[answer] for answer, count in votes.items() if count == most]))
    # answers with the same count behave alike: count → (how many answers, sum of their shares)
    sizes: dict[int, tuple[int, float]] = {}
    for answer, count in votes.items():
        many, total = sizes.get(count, (0, 0.0))
        sizes[count] = many + 1, total + share[answer]
    return all_blank * blank_share + _expected_majority(sizes, n, k)


def _expected_majority(sizes: dict[int, tuple[int, float]], n: int, k: int) -> float:
    """Return maj@k over the draws with at least one vote, k < n.

    Draw each sample independently with probability p = k/n: given that k came, the counts are those of a draw of k
    from n. So with independent X_a ~ Binomial(n_a, p), summed over the winners' votes m,

        maj@k · P(ΣX = k) = Σ_m [z^k] pool_m(z) ∫₀¹ Σ_a share_a q_a z^m Π_{b ≠ a} (low_b(z) + y q_b z^m) dy

    where q_a = P(X_a = m), low_b(z) = Σ_{x < m} P(X_b = x) z^x, and pool_m generates all that cannot reach m votes. The
    integral turns t further winners into 1/(1 + t), by Gauss–Legendre nodes; the coefficient of z^k is read off by an
    inverse Fourier transform on N ≥ 5√n roots of unity (Hoeffding: |ΣX − k| ≥ N has a chance below 1e-21). All terms
    are probabilities at most 1, so nothing overflows. Values of m that are next to impossible are left out.
    """
    p = k / n
    chance = _binomial(n, p)[k]
    pmf = {size: _binomial(size, p) for size in sizes}
    points = min(n + 1, int(5 * np.sqrt(n)) + 2)
    frequency = np.arange(points // 2 + 1)
    roots = np.exp(-2j * np.pi * np.arange(points) / points)
    draw = 1 - p + p * roots[frequency]

    reach = np.zeros(max(sizes) + 1)  # expected number of answers with at least m votes
    lowest = 1
    for size, (many, _) in sizes.items():
        reach[: size + 1] += many * np.cumsum(pmf[size][::-1])[::-1]
        lowest = max(lowest, int(np.searchsorted(np.cumsum(pmf[size]), NEGLIGIBLE * chance)))

    total = np.zeros(len(frequency), dtype=complex)
    for m in range(lowest, min(max(sizes), k) + 1):
        if reach[m] < NEGLIGIBLE * chance:
            break
        able = {size: group for size, group in sizes.items() if size >= m}
        ties = min(sum(many for many, _ in able.values()), k // m)
        nodes, weights = _unit_legendre(ties)
        step = roots[frequency * m % points]
        rest = n - sum(size * many for size, (many, _) in able.items())
        lost: NDArray[np.complex128] = np.tile(draw**rest, (len(nodes), 1))  # no winner chosen yet
        won = np.zeros_like(lost)  # one chosen, weighted with its share
        for size, (many, shares) in able.items():
            fold = np.bincount(np.arange(m) % points, weights=pmf[size][:m], minlength=points)
            tie = pmf[size][m] * step
            each = np.fft.rfft(fold) + nodes[:, None] * tie
            others = each ** (many - 1)
            won = (won * each + lost * (shares * tie)) * others
            lost = lost * each * others
        total += weights @ won
    return float(np.clip(np.fft.irfft(total, points)[k % points] / chance, 0.0, 1.0))


def _binomial(n: int, p: float) -> NDArray[np.float64]:
    """Return Binomial(n, p) probabilities of 0…n by ratios outward from the mode, 0 < p < 1; error about n ulp."""
    x = np.arange(n)
    ratio = (n - x) / (x + 1) * (p / (1 - p))
    mode = min(int((n + 1) * p), n)
    below = np.cumprod(1 / ratio[:mode][::-1])[::-1]
    weights = np.concatenate([below, [1.0], np.cumprod(ratio[mode:])])
    return weights / weights.sum()


@lru_cache(maxsize=256)
def _unit_legendre(powers: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return nodes and weights that integrate y^t over [0, 1] for every t < powers.

    powers/2 nodes do it exactly; √(8 powers) + 16, being dense near 1, do it to 1e-13.
    """
    x, weights = np.polynomial.legendre.leggauss(min((powers + 1) // 2, int(np.sqrt(8 * powers)) + 16))
    return (x + 1) / 2, weights / 2
