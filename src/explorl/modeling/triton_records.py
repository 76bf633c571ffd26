# mypy: disable-error-code="import-not-found, import-untyped, no-untyped-def, untyped-decorator"
"""Token records of a block of logits as one Triton kernel, one program per row.

The row is read once. Each of `LANES` lanes adds every `LANES`-th logit to its own sums, so that threads synchronise
only at the end of the row. The sums are relative to the largest of the first logits and the target's, and are
recomputed if that is far from the largest of all. Each lane also keeps its two largest logits, so all logits above the
largest of the second ones are in registers. If these have the mass of the branching factor, as in most rows of a
trained policy, they are counted there.

Otherwise the logit at which the mass is reached is searched for over the row. Each pass weighs three thresholds, first
where they would be for normally distributed logits, then by interpolation, until one value is left. Values are those of
the logits' type, so ties have exactly the same value: of tokens tied at the cut as many count as the mass needs, as in
`explorl.metrics.tokens.branching_factor`. Lanes sum in float32, rows in float64.
"""

from __future__ import annotations

from statistics import NormalDist

import torch
import triton
import triton.language as tl
from torch import Tensor

from explorl.modeling.triton_order import SHIFTS, key_of, value_of

LANES, WARPS = 1024, 8
REGISTERS = 64
"""Registers per thread, so that two programs fit on a multiprocessor; only values outside the row loops are spilled."""

LOG2E = tl.constexpr(1.4426950408889634)
LOWEST = tl.constexpr(-1e30)
"""Replaces −inf, so that 0 · LOWEST is 0."""
FAR = tl.constexpr(30.0)
"""Largest distance of the largest logit from the base of the sums, so that no square of a weight overflows."""
NARROW = tl.constexpr(0.03)
"""Distance between the first thresholds of a search, in standard deviations."""


@triton.jit
def _four(at, LANES: tl.constexpr):
    """Load four times as many logits as lanes, all in flight at once."""
    x0 = tl.load(at).to(tl.float32)
    x1 = tl.load(at + LANES).to(tl.float32)
    x2 = tl.load(at + 2 * LANES).to(tl.float32)
    x3 = tl.load(at + 3 * LANES).to(tl.float32)
    return x0, x1, x2, x3


@triton.jit
def _fold(x, start, base, rate, weights, firsts, own, squares, best, second, place, TEMPERED: tl.constexpr):
    x = tl.maximum(x, LOWEST, propagate_nan=tl.PropagateNan.ALL)
    y = x - base
    weight = tl.exp2(y * LOG2E)
    weights += weight
    firsts += weight * y
    if TEMPERED:
        weight = tl.exp2(y * rate)
        own += weight
    squares += weight * weight
    second = tl.maximum(second, tl.minimum(best, x))
    place = tl.where(x > best, start, place)
    best = tl.maximum(best, x)
    return weights, firsts, own, squares, best, second, place


@triton.jit
def _sums(line, vocab, base, rate, LANES: tl.constexpr, TEMPERED: tl.constexpr):
    """Return sums and the largest logits of each lane.

    These are Σ w and Σ w·y at temperature 1, with y = x − base and w = exp(y); Σ w (only if TEMPERED) and Σ w² at the
    row's temperature; the two largest logits; and the index of the largest minus the lane.
    """
    lane = tl.arange(0, LANES)
    weights = tl.zeros([LANES], tl.float32)
    firsts = tl.zeros([LANES], tl.float32)
    own = tl.zeros([LANES], tl.float32)
    squares = tl.zeros([LANES], tl.float32)
    best = tl.full([LANES], LOWEST, tl.float32)
    second = tl.full([LANES], LOWEST, tl.float32)
    place = tl.zeros([LANES], tl.int32)
    sums = weights, firsts, own, squares, best, second, place
    whole = vocab // (4 * LANES) * (4 * LANES)
    for start in range(0, whole, 4 * LANES):
        x = _four(line + start + lane, LANES)
        for part in tl.static_range(4):
            sums = _fold(x[part], start + part * LANES, base, rate, *sums, TEMPERED)
    for start in range(whole, vocab, LANES):
        at = start + lane
        x = tl.load(line + at, mask=at < vocab, other=float("-inf")).to(tl.float32)
        sums = _fold(x, start, base, rate, *sums, TEMPERED)
    return sums


@triton.jit
def _other(line, vocab, target, best, second, place, LANES: tl.constexpr):
    """Return the largest logit other than the target's, and the lowest id that has it."""
    lane = tl.arange(0, LANES)
    targets = place + lane == target  # the lane whose largest is the target
    others = tl.where(targets, second, best)
    other = tl.max(others, 0)
    found = tl.min(tl.where((others == other) & (place + lane != target), place + lane, 0x7FFFFFFF), 0)
    if tl.max(tl.where(targets, second, float("-inf")), 0) == other:  # its index in that lane was not recorded
        for start in range(0, vocab, LANES * LANES):
            at = start + target % LANES + lane * LANES
            x = tl.load(line + at, mask=(at < vocab) & (at != target), other=float("nan")).to(tl.float32)
            found = tl.minimum(found, tl.min(tl.where(x == other, at, 0x7FFFFFFF), 0))
    return other, found


@triton.jit
def _total(lanes):
    return tl.sum(lanes.to(tl.float64), 0)


@triton.jit
def _others_squared(line, vocab, target, base, rate, squares, LANES: tl.constexpr):
    """Return Σ w² over all tokens except the target, whose lane is summed again without it."""
    lane = tl.arange(0, LANES)
    total = _total(tl.where(lane == target % LANES, 0.0, squares))
    for start in range(0, vocab, LANES * LANES):
        at = start + target % LANES + lane * LANES
        x = tl.load(line + at, mask=(at < vocab) & (at != target), other=float("-inf")).to(tl.float32)
        weight = tl.exp2((tl.maximum(x, LOWEST) - base) * rate)
        total += _total(weight * weight)
    return total


@triton.jit
def _weigh(x, base, least_1, least_2, least_3, sum_1, sum_2, sum_3, count_1, count_2, count_3):
    weight = tl.exp2((x - base) * LOG2E)
    in_1 = (x >= least_1).to(tl.float32)
    in_2 = (x >= least_2).to(tl.float32)
    in_3 = (x >= least_3).to(tl.float32)
    return (
        sum_1 + in_1 * weight, sum_2 + in_2 * weight, sum_3 + in_3 * weight,
        count_1 + in_1, count_2 + in_2, count_3 + in_3,
    )  # fmt: skip


@triton.jit
def _weighed(line, vocab, base, least_1, least_2, least_3, LANES: tl.constexpr):
    """Return the weight and number of the logits at or above each of three thresholds."""
    lane = tl.arange(0, LANES)
    sum_1 = tl.zeros([LANES], tl.float32)
    sum_2 = tl.zeros([LANES], tl.float32)
    sum_3 = tl.zeros([LANES], tl.float32)
    count_1 = tl.zeros([LANES], tl.float32)
    count_2 = tl.zeros([LANES], tl.float32)
    count_3 = tl.zeros([LANES], tl.float32)
    sums = sum_1, sum_2, sum_3, count_1, count_2, count_3
    whole = vocab // (4 * LANES) * (4 * LANES)
    for start in range(0, whole, 4 * LANES):
        x = _four(line + start + lane, LANES)
        for part in tl.static_range(4):
            sums = _weigh(x[part], base, least_1, least_2, least_3, *sums)
    for start in range(whole, vocab, LANES):
        at = start + lane
        x = tl.load(line + at, mask=at < vocab, other=float("-inf")).to(tl.float32)
        sums = _weigh(x, base, least_1, least_2, least_3, *sums)
    sum_1, sum_2, sum_3, count_1, count_2, count_3 = sums
    return (
        _total(sum_1), _total(sum_2), _total(sum_3),
        _total(count_1).to(tl.int64), _total(count_2).to(tl.int64), _total(count_3).to(tl.int64),
    )  # fmt: skip


@triton.jit
def _cut_in_lanes(best, base, need, bottom, beyond, SHIFT: tl.constexpr):
    """Return the cut if all logits at and above it are the largest of their lanes; see `_cut`."""
    weights = tl.exp2((best - base) * LOG2E).to(tl.float64)
    mass = need * 0.0
    count = tl.full((), 0, tl.int64)
    count_bottom = count + 0x7FFFFFFF
    while (beyond - bottom > 1) & (count_bottom - count > 1):
        middle = (bottom + beyond) >> 1
        least = value_of(middle, SHIFT)
        held = tl.sum(tl.where(best >= least, weights, 0.0), 0)
        many = tl.sum((best >= least).to(tl.int32), 0).to(tl.int64)
        enough = held >= need
        bottom = tl.where(enough, middle, bottom)
        count_bottom = tl.where(enough, many, count_bottom)
        beyond = tl.where(enough, beyond, middle)
        mass = tl.where(enough, mass, held)
        count = tl.where(enough, count, many)
    return bottom, mass, count, count_bottom


@triton.jit
def _cut(
    line, vocab, base, need, bottom, beyond, mass_bottom, mass, count, guess, narrow,
    SHIFT: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Return the largest key of a logit such that the logits at or above it have enough mass.

    Also return the mass and number of logits above it, and their number including it. The result is in
    [bottom, beyond); `mass` and `count` are those of the logits at or above beyond.
    """
    count_bottom = tl.full((), 0, tl.int64) + vocab
    passes = tl.full((), 0, tl.int32)
    while (beyond - bottom > 1) & (count_bottom - count > 1):
        width = beyond - bottom
        low, high = value_of(bottom, SHIFT), value_of(beyond, SHIFT)
        share = ((need - mass) / (mass_bottom - mass)).to(tl.float32)
        middle = key_of(high + (low - high) * share, SHIFT)
        step = tl.maximum(width >> 4, 1)
        key_1, key_2, key_3 = middle - step, middle, middle + step
        if passes == 0:
            key_1, key_2, key_3 = key_of(guess - narrow, SHIFT), key_of(guess, SHIFT), key_of(guess + narrow, SHIFT)
        if passes % 3 == 2:  # shrinks the range for any distribution of logits
            key_1, key_2, key_3 = bottom + (width >> 2), bottom + (width >> 1), bottom + width - (width >> 2)
        key_1 = tl.minimum(tl.maximum(key_1, bottom + 1), beyond - 1)
        key_2 = tl.minimum(tl.maximum(key_2, bottom + 1), beyond - 1)
        key_3 = tl.minimum(tl.maximum(key_3, bottom + 1), beyond - 1)
        mass_1, mass_2, mass_3, count_1, count_2, count_3 = _weighed(
            line, vocab, base, value_of(key_1, SHIFT), value_of(key_2, SHIFT), value_of(key_3, SHIFT), LANES
        )
        in_1, in_2, in_3 = mass_1 >= need, mass_2 >= need, mass_3 >= need
        beyond = tl.where(in_3, beyond, tl.where(in_2, key_3, tl.where(in_1, key_2, key_1)))
        mass = tl.where(in_3, mass, tl.where(in_2, mass_3, tl.where(in_1, mass_2, mass_1)))
        count = tl.where(in_3, count, tl.where(in_2, count_3, tl.where(in_1, count_2, count_1)))
        bottom = tl.where(in_3, key_3, tl.where(in_2, key_2, tl.where(in_1, key_1, bottom)))
        mass_bottom = tl.where(in_3, mass_3, tl.where(in_2, mass_2, tl.where(in_1, mass_1, mass_bottom)))
        count_bottom = tl.where(in_3, count_3, tl.where(in_2, count_2, tl.where(in_1, count_1, count_bottom)))
        passes += 1
    return bottom, mass, count, count_bottom


@triton.jit
def _records_kernel(
    logits, stride, targets, temperatures,
    logps, entropy, branching, collision, others_squared, other_ids, other_logps, vocab,
    MASS: tl.constexpr, QUANTILE: tl.constexpr, SHIFT: tl.constexpr, LANES: tl.constexpr, TEMPERED: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    line = logits + row * stride
    target = tl.load(targets + row).to(tl.int32)
    target_logit = tl.load(line + target).to(tl.float32)
    cooling = 1.0
    if TEMPERED:
        cooling = 1.0 / tl.load(temperatures + row)
    rate = cooling * LOG2E
    lane = tl.arange(0, LANES)
    base = tl.max(tl.load(line + lane, mask=lane < vocab, other=float("-inf")).to(tl.float32), 0)
    base = tl.maximum(base, target_logit)
    base = tl.where(tl.abs(base) < -LOWEST, base, 0.0)
    weights, firsts, own, squares, best, second, place = _sums(line, vocab, base, rate, LANES, TEMPERED)
    top = tl.max(best, 0)
    if tl.abs(top - base) * tl.maximum(cooling, 1.0) > FAR:
        base = top
        weights, firsts, own, squares, best, second, place = _sums(line, vocab, base, rate, LANES, TEMPERED)

    total = _total(weights)
    mean = (_total(firsts) / total).to(tl.float32)
    spread = tl.log(total.to(tl.float32)) - mean
    tl.store(entropy + row, tl.where(top > LOWEST, spread, float("nan")))
    own_total = total
    if TEMPERED:
        own_total = _total(own)
    log_total = tl.log(own_total.to(tl.float32))
    tl.store(logps + row, (target_logit - base) * cooling - log_total)
    tl.store(collision + row, (_total(squares) / (own_total * own_total)).to(tl.float32))
    others = _others_squared(line, vocab, target, base, rate, squares, LANES)
    tl.store(others_squared + row, (others / (own_total * own_total)).to(tl.float32))
    other, other_id = _other(line, vocab, target, best, second, place, LANES)
    tl.store(other_ids + row, tl.where(other > LOWEST, other_id, 0).to(tl.int64))
    tl.store(other_logps + row, tl.where(other > LOWEST, (other - base) * cooling - log_total, float("-inf")))

    need = MASS * total
    bound = tl.max(second, 0)
    known = _total(tl.where(best > bound, tl.exp2((best - base) * LOG2E), 0.0))
    after = key_of(bound, SHIFT) + 1
    if known >= need:
        cut, mass, count, count_least = _cut_in_lanes(best, base, need, after, key_of(top, SHIFT) + 1, SHIFT)
    else:
        many = tl.sum((best > bound).to(tl.int32), 0).to(tl.int64)
        # All tokens below this logit together have less than the rest of the mass.
        least = base + tl.log(((0.5 - 0.5 * MASS) * total).to(tl.float32) / vocab)
        # Of normal logits with variance σ² the weights are normal too, with variance σ² = 2 (ln vocab − entropy).
        deviation = tl.sqrt(tl.maximum(2 * (tl.log(base * 0.0 + vocab) - spread), 0.0))
        guess = base + mean - QUANTILE * deviation
        cut, mass, count, count_least = _cut(
            line, vocab, base, need, key_of(least, SHIFT), after, total, known, many, guess, NARROW * deviation,
            SHIFT, LANES,
        )  # fmt: skip
    weight = tl.exp2((value_of(cut, SHIFT) - base) * LOG2E).to(tl.float64)
    more = (need - mass) / weight
    more = tl.minimum(tl.maximum(more, 1.0), (count_least - count).to(tl.float64))
    whole = more.to(tl.int64)
    tl.store(branching + row, count + whole + (whole.to(tl.float64) < more).to(tl.int64))


def record(
    logits: Tensor,
    targets: Tensor,
    temperature: Tensor | None,
    mass: float,
    out: tuple[Tensor, ...],
    *,
    lanes: int | None = None,
    warps: int | None = None,
) -> None:
    """Fill `out`, in the order of `TokenRecords`, for (rows, vocab) logits that are contiguous in the last dimension.

    `temperature` has one value per row; None means 1.
    """
    rows, vocab = logits.shape
    lanes, warps = lanes or LANES, warps or WARPS
    most = {"maxnreg": REGISTERS} if lanes <= 128 * warps and not torch.version.hip else {}
    if rows:
        _records_kernel[(rows,)](
            logits, logits.stride(0), targets, targets if temperature is None else temperature, *out, vocab,
            MASS=mass, QUANTILE=NormalDist().inv_cdf(mass), SHIFT=SHIFTS[logits.dtype], LANES=lanes,
            TEMPERED=temperature is not None, num_warps=warps, **most,
        )  # fmt: skip
