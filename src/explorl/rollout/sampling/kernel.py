# mypy: disable-error-code="import-not-found, import-untyped, no-untyped-def, untyped-decorator"
"""The whole sampling step as one Triton kernel: statistics, warpers, sampling, recording and the row's next state.

One program handles one row and reads its logits a few times from the second-level cache instead of writing
vocabulary-sized intermediates. Cuts (top-k, top-p, bottom-p, the branching factor) are found by a search that divides
the range of the logits by four in each pass: bfloat16 logits take about 6 passes, float32 logits 14. A cut is a score
and a token id, since of tokens with the same score the one with the lower id comes first (`ranking`). The kernel uses
the same random numbers as `sample.draw`. The two sums that the mixture of bottom-p needs are computed while sampling.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from explorl.modeling.triton_order import SHIFTS, key_of, value_of
from explorl.rollout import state as fields
from explorl.rollout.sampling import Active, ranking, rng
from explorl.rollout.state import SlotState

TOKEN, POSITION, STEP, LIMIT = (tl.constexpr(i) for i in (fields.TOKEN, fields.POSITION, fields.STEP, fields.LIMIT))
STATUS, KEY, TOP_K = (tl.constexpr(i) for i in (fields.STATUS, fields.KEY, fields.TOP_K))
TEMPERATURE, TOP_P, MIN_P = (tl.constexpr(i) for i in (fields.TEMPERATURE, fields.TOP_P, fields.MIN_P))
STOP_SET = tl.constexpr(fields.STOP_SET)
REPETITION, BOTTOM_P, FREQUENCY = (tl.constexpr(i) for i in (fields.REPETITION, fields.BOTTOM_P, fields.FREQUENCY))
RUNNING, STOPPED = tl.constexpr(fields.RUNNING), tl.constexpr(fields.STOPPED)
LENGTH, BROKEN = tl.constexpr(fields.LENGTH), tl.constexpr(fields.BROKEN)
GOLDEN = tl.constexpr(rng.signed(rng.GOLDEN))
MIX_1 = tl.constexpr(rng.signed(rng.MIX_1))
MIX_2 = tl.constexpr(rng.signed(rng.MIX_2))
BERNOULLI = tl.constexpr(rng.signed(rng.BERNOULLI))

LOG2E = tl.constexpr(1.4426950408889634)
SLACK, TINY = tl.constexpr(ranking.SLACK), tl.constexpr(ranking.TINY)
ALL = tl.constexpr(2147483647)
"""As the token id of a cut, includes all tokens with its score."""
BY_VALUE = tl.constexpr(3)
"""Number of first passes of a search that divide the range by value."""

BLOCK = 2048
WARPS, SEARCH_WARPS = 8, 4
"""Warps for plain sampling, and for warpers that search for a cut."""
MASS = 0.95
"""Mass that defines the branching factor."""


@triton.jit
def _uniform(key, position):
    """Compute `rng.uniform` for one row."""
    z = key + (position + 1) * GOLDEN
    z = (z ^ ((z >> 30) & 0x3FFFFFFFF)) * MIX_1
    z = (z ^ ((z >> 27) & 0x1FFFFFFFFF)) * MIX_2
    z = z ^ ((z >> 31) & 0x1FFFFFFFF)
    return ((z >> 11) & 0x1FFFFFFFFFFFFF).to(tl.float64) * 1.1102230246251565e-16


@triton.jit
def _scores(line, seen, penalty, offs, vocab, REP: tl.constexpr, EVEN: tl.constexpr):
    """Load the logits of a block and apply the repetition penalty."""
    if EVEN:
        x = tl.load(line + offs).to(tl.float32)
    else:
        x = tl.load(line + offs, mask=offs < vocab, other=float("-inf")).to(tl.float32)
    if REP:
        had = tl.load(seen + offs, mask=offs < vocab, other=0) != 0
        x = tl.where(had, tl.where(x < 0, x * penalty, x / penalty), x)
    return x


@triton.jit
def _ahead(x, offs, score, token):
    """Return whether tokens rank at or before this one: a higher score, or the same score and an id up to this one."""
    return (x > score) | ((x == score) & (offs <= token))


@triton.jit
def _mass(
    line, seen, penalty, vocab, top, rate, low, low_id,
    BLOCK: tl.constexpr, REP: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Return Σ 2^((x − top) · rate) over the tokens up to the low cut."""
    sums = tl.zeros([BLOCK], tl.float32)
    for start in range(0, vocab, BLOCK):
        offs = start + tl.arange(0, BLOCK)
        x = _scores(line, seen, penalty, offs, vocab, REP, EVEN)
        sums += tl.where(_ahead(x, offs, low, low_id), tl.exp2((x - top) * rate), 0.0)
    return tl.sum(sums.to(tl.float64), 0)


@triton.jit
def _at(
    line, seen, penalty, vocab, top, rate, low, low_id, cut,
    COUNT: tl.constexpr, BLOCK: tl.constexpr, REP: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Return, among tokens up to the low cut, the weight of those above a score and the number exactly at it."""
    above = tl.zeros([BLOCK], tl.float32)
    equal = tl.zeros([BLOCK], tl.int32)
    for start in range(0, vocab, BLOCK):
        offs = start + tl.arange(0, BLOCK)
        x = _scores(line, seen, penalty, offs, vocab, REP, EVEN)
        inside = _ahead(x, offs, low, low_id) & (offs < vocab)
        weight = tl.where(inside, 1.0, 0.0) if COUNT else tl.exp2((x - top) * rate)
        above += tl.where(inside & (x > cut), weight, 0.0)
        equal += (inside & (x == cut)).to(tl.int32)
    return tl.sum(above.to(tl.float64), 0), tl.sum(equal, 0)


@triton.jit
def _nth(
    line, seen, penalty, vocab, score, n,
    BLOCK: tl.constexpr, REP: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Return the id of the n-th token, counted from 1, with exactly this score; −1 if n is 0."""
    before = tl.full((), 0, tl.int32)
    found = tl.full((), -1, tl.int32)
    for start in range(0, vocab, BLOCK):
        offs = start + tl.arange(0, BLOCK)
        x = _scores(line, seen, penalty, offs, vocab, REP, EVEN)
        equal = (x == score) & (offs < vocab)
        rank = before + tl.cumsum(equal.to(tl.int32), 0)
        found = tl.maximum(found, tl.max(tl.where(equal & (rank == n), offs, -1), 0))
        before += tl.sum(equal.to(tl.int32), 0)
    return found


@triton.jit
def _lightest(
    line, seen, penalty, vocab, top, rate, low, low_id,
    BLOCK: tl.constexpr, REP: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Return the lowest score of the tokens with non-zero probability up to the low cut."""
    least = tl.full([BLOCK], float("inf"), tl.float32)
    for start in range(0, vocab, BLOCK):
        offs = start + tl.arange(0, BLOCK)
        x = _scores(line, seen, penalty, offs, vocab, REP, EVEN)
        counts = _ahead(x, offs, low, low_id) & (tl.exp2((x - top) * rate) >= TINY)
        least = tl.minimum(least, tl.where(counts, x, float("inf")))
    return tl.min(least, 0)


@triton.jit
def _search(
    line, seen, penalty, vocab, top, rate, least, low, low_id, target,
    COUNT: tl.constexpr, STRICT: tl.constexpr, SHIFT: tl.constexpr, BLOCK: tl.constexpr,
    REP: tl.constexpr, EVEN: tl.constexpr, BOUNDED: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Return the largest t such that tokens with x ≥ t, up to the low cut, weigh at least (or more than) target.

    The result is between ``least`` and ``top``. Each pass weighs three thresholds that divide the remaining range into
    four: by value in the first passes (logits are spread over values, not over keys, half of which are near zero), then
    by keys, until one key is left.
    """
    bottom = key_of(least, SHIFT)
    beyond = key_of(top, SHIFT) + 1
    passes = tl.full((), 0, tl.int32)
    while beyond - bottom > 1:
        unit = (beyond - bottom + 3) >> 2
        key_1, key_2, key_3 = bottom + unit, bottom + 2 * unit, bottom + 3 * unit
        if passes < BY_VALUE:
            from_value = value_of(bottom, SHIFT)
            quarter = (value_of(beyond, SHIFT) - from_value) * 0.25
            key_1 = key_of(from_value + quarter, SHIFT)
            key_2 = key_of(from_value + 2 * quarter, SHIFT)
            key_3 = key_of(from_value + 3 * quarter, SHIFT)
        # Rounding must not leave the interval.
        key_1 = tl.minimum(tl.maximum(key_1, bottom), beyond)
        key_2 = tl.minimum(tl.maximum(key_2, key_1), beyond)
        key_3 = tl.minimum(tl.maximum(key_3, key_2), beyond)
        first, second, third = value_of(key_1, SHIFT), value_of(key_2, SHIFT), value_of(key_3, SHIFT)
        sum_1 = tl.zeros([BLOCK], tl.float32)
        sum_2 = tl.zeros([BLOCK], tl.float32)
        sum_3 = tl.zeros([BLOCK], tl.float32)
        for start in range(0, vocab, BLOCK):
            offs = start + tl.arange(0, BLOCK)
            x = _scores(line, seen, penalty, offs, vocab, REP, EVEN)
            weight = tl.where(offs < vocab, 1.0, 0.0) if COUNT else tl.exp2((x - top) * rate)
            if BOUNDED:
                weight = tl.where(_ahead(x, offs, low, low_id), weight, 0.0)
            sum_1 += tl.where(x >= first, weight, 0.0)
            sum_2 += tl.where(x >= second, weight, 0.0)
            sum_3 += tl.where(x >= third, weight, 0.0)
        if WIDE:
            mass_1, mass_2 = tl.sum(sum_1.to(tl.float64), 0), tl.sum(sum_2.to(tl.float64), 0)
            mass_3 = tl.sum(sum_3.to(tl.float64), 0)
        else:
            mass_1, mass_2, mass_3 = tl.sum(sum_1, 0), tl.sum(sum_2, 0), tl.sum(sum_3, 0)
        if STRICT:
            pass_1, pass_2, pass_3 = mass_1 > target, mass_2 > target, mass_3 > target
        else:
            pass_1, pass_2, pass_3 = mass_1 >= target, mass_2 >= target, mass_3 >= target
        beyond = tl.where(pass_1, tl.where(pass_2, tl.where(pass_3, beyond, key_3), key_2), key_1)
        bottom = tl.where(pass_1, tl.where(pass_2, tl.where(pass_3, key_3, key_2), key_1), bottom)
        passes += 1
    return value_of(bottom, SHIFT)


@triton.jit
def _least(best, lowest, vocab, rate, share):
    """Return a value below which lies at most 1 − share of the mass: tokens there have < (1 − share) / vocab."""
    outside = tl.maximum(1.0 - share, 1e-30).to(tl.float32)
    return tl.maximum(lowest, best - (tl.log2(vocab / outside) + 0.1) / rate)  # 0.1 is for rounding


@triton.jit
def _branching(
    line, vocab, top, lowest, total, mass, SHIFT: tl.constexpr, BLOCK: tl.constexpr, EVEN: tl.constexpr
):  # fmt: skip
    """Return the size of the smallest set of top tokens with ``mass`` of the total."""
    target = total * mass
    least = _least(top, lowest, vocab, LOG2E, target / total)
    cut = _search(
        line, line, 1.0, vocab, top, LOG2E, least, 0.0, 0, target,
        False, False, SHIFT, BLOCK, False, EVEN, False, False,
    )  # fmt: skip
    above = tl.zeros([BLOCK], tl.float32)
    n_above = tl.zeros([BLOCK], tl.int32)
    n_at = tl.zeros([BLOCK], tl.int32)
    for start in range(0, vocab, BLOCK):
        x = _scores(line, line, 1.0, start + tl.arange(0, BLOCK), vocab, False, EVEN)
        above += tl.where(x > cut, tl.exp2((x - top) * LOG2E), 0.0)
        n_above += (x > cut).to(tl.int32)
        n_at += (x == cut).to(tl.int32)
    need = tl.ceil((target - tl.sum(above, 0)) / tl.exp2((cut - top) * LOG2E)).to(tl.int32)
    return tl.sum(n_above, 0) + tl.minimum(tl.maximum(need, 1), tl.maximum(tl.sum(n_at, 0), 1))


@triton.jit
def _sample_kernel(
    logits, ints, reals, out_ints, out_reals, out_mass, seen, stops,
    logits_row, vocab, slots, tokens, mass, log_min_p,
    STOPS: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, EVEN: tl.constexpr,
    RAW_SHIFT: tl.constexpr, SHIFT: tl.constexpr,
    SEEN: tl.constexpr, REP: tl.constexpr, TAU: tl.constexpr, GREEDY: tl.constexpr, HAS_K: tl.constexpr,
    HAS_P: tl.constexpr, HAS_MIN: tl.constexpr, HAS_BOTTOM: tl.constexpr, CHANCE: tl.constexpr,
    PER_SEQUENCE: tl.constexpr, MIN_P_MASS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    if tl.load(ints + STATUS * slots + row) != RUNNING:
        return
    line = logits + row * logits_row
    had = seen + row * vocab
    key_of = tl.load(ints + KEY * slots + row)
    step = tl.load(ints + STEP * slots + row)
    tau = tl.load(reals + TEMPERATURE * slots + row).to(tl.float32)
    greedy = tau == 0.0
    tau = tl.where(greedy, 1.0, tau)
    rate = LOG2E / tau  # weights are powers of two
    penalty = tl.load(reals + REPETITION * slots + row).to(tl.float32)

    # 1. The policy: largest logit, sums at temperature 1 and at the row's temperature, entropy, branching factor.
    tops = tl.full([BLOCK], float("-inf"), tl.float32)
    bottoms = tl.full([BLOCK], float("inf"), tl.float32)
    warped_tops = tl.full([BLOCK], float("-inf"), tl.float32)
    warped_bottoms = tl.full([BLOCK], float("inf"), tl.float32)
    for start in range(0, vocab, BLOCK):
        offs = start + tl.arange(0, BLOCK)
        x = _scores(line, had, penalty, offs, vocab, False, EVEN)
        tops = tl.maximum(tops, x)
        bottoms = tl.minimum(bottoms, tl.where(offs < vocab, x, float("inf")))
        if REP:
            x = _scores(line, had, penalty, offs, vocab, REP, EVEN)
            warped_tops = tl.maximum(warped_tops, x)
            warped_bottoms = tl.minimum(warped_bottoms, tl.where(offs < vocab, x, float("inf")))
    highest, lowest = tl.max(tops, 0), tl.min(bottoms, 0)
    best, worst = highest, lowest
    if REP:
        best, worst = tl.max(warped_tops, 0), tl.min(warped_bottoms, 0)
    sums = tl.zeros([BLOCK], tl.float32)
    tempered = tl.zeros([BLOCK], tl.float32)
    products = tl.zeros([BLOCK], tl.float32)
    for start in range(0, vocab, BLOCK):
        x = _scores(line, had, penalty, start + tl.arange(0, BLOCK), vocab, False, EVEN) - highest
        weight = tl.exp2(x * LOG2E)
        sums += weight
        products += tl.where(weight > 0, weight * x, 0.0)
        if TAU:
            tempered += tl.exp2(x * rate)
    total = tl.sum(sums, 0)
    policy_total = total
    if TAU:
        policy_total = tl.sum(tempered, 0)
    entropy = tl.log(total) - tl.sum(products, 0) / total
    fine = (total > 0.0) & (total < float("inf"))
    if fine == 0:  # no search works on logits that are not finite
        tl.store(ints + STATUS * slots + row, BROKEN)
        return
    branching = _branching(line, vocab, highest, lowest, total, mass, RAW_SHIFT, BLOCK, EVEN)

    # 2. The warpers, as two cuts: tokens up to the low cut stay, except those up to the high cut.
    low = tl.full((), float("-inf"), tl.float32)
    low_id = tl.full((), ALL, tl.int32)
    if HAS_K:
        k = tl.load(ints + TOP_K * slots + row)
        if (k > 0) & (k < vocab):
            cut = _search(
                line, had, penalty, vocab, best, rate, worst, low, low_id, k.to(tl.float64),
                True, False, SHIFT, BLOCK, REP, EVEN, False, True,
            )  # fmt: skip
            above, ties = _at(line, had, penalty, vocab, best, rate, low, low_id, cut, True, BLOCK, REP, EVEN)
            need = k.to(tl.int32) - above.to(tl.int32)
            if need < ties:
                low_id = _nth(line, had, penalty, vocab, cut, need, BLOCK, REP, EVEN)
            low = cut
    if HAS_P:
        p = tl.load(reals + TOP_P * slots + row)
        alone: tl.constexpr = not (REP or HAS_K)
        held = policy_total.to(tl.float64)
        if not alone:
            held = _mass(line, had, penalty, vocab, best, rate, low, low_id, BLOCK, REP, EVEN)
        if p < 1.0:
            target = held * p * (1.0 - SLACK)
            cut = _search(
                line, had, penalty, vocab, best, rate, _least(best, worst, vocab, rate, p), low, low_id, target,
                False, False, SHIFT, BLOCK, REP, EVEN, not alone, True,
            )  # fmt: skip
            above, ties = _at(line, had, penalty, vocab, best, rate, low, low_id, cut, False, BLOCK, REP, EVEN)
            each = tl.exp2((cut - best) * rate).to(tl.float64)
            need = tl.maximum(tl.ceil((target - above) / each), 1.0)
            if need < ties:
                low_id = _nth(line, had, penalty, vocab, cut, need.to(tl.int32), BLOCK, REP, EVEN)
            elif cut > low:
                low_id = tl.full((), ALL, tl.int32)
            low = cut
    if HAS_MIN:
        least_p = tl.load(reals + MIN_P * slots + row)
        floor = (best.to(tl.float64) + tl.log(least_p * (1.0 - SLACK)) * (LOG2E / rate)).to(tl.float32)
        if (least_p > 0.0) & (floor > low):
            low = floor
            low_id = tl.full((), ALL, tl.int32)
    if HAS_BOTTOM:
        high_id = tl.full((), -1, tl.int32)
        p = tl.load(reals + BOTTOM_P * slots + row)
        first: tl.constexpr = not (REP or HAS_K or HAS_P or HAS_MIN)  # no earlier cut
        held = policy_total.to(tl.float64)
        if not first:
            held = _mass(line, had, penalty, vocab, best, rate, low, low_id, BLOCK, REP, EVEN)
        share = (1.0 - p) * (1.0 + SLACK)
        target = held * share
        if share < 1.0:
            high = _search(
                line, had, penalty, vocab, best, rate, _least(best, worst, vocab, rate, share), low, low_id,
                target, False, True, SHIFT, BLOCK, REP, EVEN, not first, True,
            )  # fmt: skip
        else:  # remove all but the last
            high = _lightest(line, had, penalty, vocab, best, rate, low, low_id, BLOCK, REP, EVEN)
        above, ties = _at(line, had, penalty, vocab, best, rate, low, low_id, high, False, BLOCK, REP, EVEN)
        each = tl.exp2((high - best) * rate).to(tl.float64)
        gone_ties = tl.minimum(tl.floor((target - above) / each), ties - 1.0)
        if gone_ties > 0.0:
            high_id = _nth(line, had, penalty, vocab, high, gone_ties.to(tl.int32), BLOCK, REP, EVEN)
        apply = p < 1.0
        if CHANCE:
            at = step
            if PER_SEQUENCE:
                at = step * 0
            frequency = tl.where(apply, tl.load(reals + FREQUENCY * slots + row), 0.0)
            apply = apply & (_uniform(key_of ^ BERNOULLI, at) < frequency)
        applied = tl.where(apply, high, float("inf"))

    # 3. Sampling: first the block of the vocabulary, then the token in it.
    LOW: tl.constexpr = HAS_K or HAS_P or HAS_MIN
    index = tl.arange(0, BLOCKS)
    blocks = tl.zeros([BLOCKS], tl.float32)
    mixed: tl.constexpr = CHANCE and not PER_SEQUENCE
    if mixed:
        removed = tl.zeros([BLOCK], tl.float32)
        left = tl.zeros([BLOCK], tl.float32)
    for start in range(0, vocab, BLOCK):
        offs = start + tl.arange(0, BLOCK)
        x = _scores(line, had, penalty, offs, vocab, REP, EVEN)
        weight = tl.exp2((x - best) * rate)
        if LOW:
            weight = tl.where(_ahead(x, offs, low, low_id), weight, 0.0)
        drawn = weight
        if HAS_BOTTOM:
            drawn = tl.where(_ahead(x, offs, applied, high_id), 0.0, weight)
        blocks = tl.where(index == start // BLOCK, tl.sum(drawn, 0), blocks)
        if mixed:  # the mass that bottom-p removes and keeps, whichever side of the coin came up
            gone = _ahead(x, offs, high, high_id)
            removed += tl.where(gone, weight, 0.0)
            left += tl.where(gone, 0.0, weight)
    blocks_64 = blocks.to(tl.float64)
    sampled_total = tl.sum(blocks_64, 0)
    goal = _uniform(key_of, step) * sampled_total
    ends = tl.cumsum(blocks_64, 0)
    chosen = tl.sum((ends <= goal).to(tl.int32), 0)
    chosen = tl.minimum(chosen, tl.max(tl.where(blocks > 0, index, 0), 0))
    held_64 = tl.sum(tl.where(index == chosen, blocks_64, 0.0), 0)
    inside = (goal - tl.sum(tl.where(index < chosen, blocks_64, 0.0), 0)) / held_64
    offs = chosen * BLOCK + tl.arange(0, BLOCK)
    x = _scores(line, had, penalty, offs, vocab, REP, EVEN)
    weight = tl.exp2((x - best) * rate)
    if LOW:
        weight = tl.where(_ahead(x, offs, low, low_id), weight, 0.0)
    if HAS_BOTTOM:
        weight = tl.where(_ahead(x, offs, applied, high_id), 0.0, weight)
    weight_64 = weight.to(tl.float64)
    reached = (tl.cumsum(weight_64, 0) > inside * tl.sum(weight_64, 0)) & (weight > 0)
    token = tl.min(tl.where(reached, offs, vocab), 0)
    token = tl.minimum(token, tl.max(tl.where(weight > 0, offs, 0), 0))
    if GREEDY:
        firsts = tl.full([BLOCK], 2147483647, tl.int32)
        for start in range(0, vocab, BLOCK):
            offs = start + tl.arange(0, BLOCK)
            x = _scores(line, had, penalty, offs, vocab, REP, EVEN)
            firsts = tl.minimum(firsts, tl.where((x == best) & (offs < vocab), offs, 2147483647))
        token = tl.where(greedy, tl.min(firsts, 0), token)
    token = tl.minimum(token, vocab - 1)

    # 4. The statistics and the row's next state.
    raw = tl.load(line + token).to(tl.float32)
    score = raw
    if REP:
        again = tl.load(had + token) != 0
        score = tl.where(again, tl.where(score < 0, score * penalty, score / penalty), score)
    logp = (raw - highest) / tau - tl.log(policy_total)
    logq = (score - best) / tau - tl.log(sampled_total.to(tl.float32))
    if mixed:  # as in `sample.Coin.mixture`
        lost, stay = tl.sum(removed, 0).to(tl.float64), tl.sum(left, 0).to(tl.float64)
        change = tl.where(_ahead(score, token, high, high_id), -frequency, frequency * (lost / stay))
        change = tl.where(apply, (frequency - 1.0) * (lost / (lost + stay)), change)
        logq += tl.log(1.0 + change).to(tl.float32)
    logq = tl.where(greedy, 0.0, logq)
    at = row * tokens + step
    plane = slots * tokens
    tl.store(out_ints + at, token.to(tl.int32))
    tl.store(out_ints + plane + at, branching)
    tl.store(out_reals + at, logp)
    tl.store(out_reals + plane + at, logq)
    tl.store(out_reals + 2 * plane + at, entropy)
    if MIN_P_MASS:  # of the policy, before all warpers
        floor = highest + tau * log_min_p
        kept = _mass(line, had, penalty, vocab, highest, rate, floor, ALL, BLOCK, False, EVEN)
        tl.store(out_mass + at, tl.where(raw >= floor, kept / policy_total, 0.0))
    if SEEN:
        tl.store(had + token, 1)
    step += 1
    stop = tl.load(stops + tl.load(ints + STOP_SET * slots + row) * STOPS + tl.arange(0, STOPS))
    stopped = tl.max((stop == token).to(tl.int32), 0) > 0
    status = tl.where(step >= tl.load(ints + LIMIT * slots + row), LENGTH, RUNNING)
    status = tl.where(stopped, STOPPED, status)
    onward = status == RUNNING
    tl.store(ints + STEP * slots + row, step)
    tl.store(ints + STATUS * slots + row, status.to(tl.int64))
    tl.store(ints + TOKEN * slots + row, token.to(tl.int64), mask=onward)
    tl.store(ints + POSITION * slots + row, tl.load(ints + POSITION * slots + row) + 1, mask=onward)


def sample_step_kernel(logits: Tensor, state: SlotState, active: Active, row_of: Tensor | None = None) -> None:
    """Run `sample.sample_step` as one kernel."""
    if row_of is not None:
        logits = logits[row_of]
    rows, vocab = logits.shape
    if logits.stride(-1) != 1:
        logits = logits.contiguous()
    block = min(BLOCK, max(16, triton.next_power_of_2(vocab)))
    raw_shift = SHIFTS.get(logits.dtype, 0)
    none = state.ints
    seen = none if state.seen is None else state.seen.view(torch.uint8)
    out_mass = state.out_reals if state.out_mass is None else state.out_mass
    _sample_kernel[(rows,)](
        logits, state.ints, state.reals, state.out_ints, state.out_reals, out_mass, seen, state.stops,
        logits.stride(0), vocab, state.slots, state.tokens, MASS, math.log(active.min_p_mass or 1.0),
        STOPS=state.stops.shape[1], BLOCK=block,
        BLOCKS=max(2, triton.next_power_of_2(triton.cdiv(vocab, block))), EVEN=vocab % block == 0, RAW_SHIFT=raw_shift,
        SHIFT=0 if active.repetition else raw_shift, SEEN=state.seen is not None, REP=active.repetition,
        TAU=active.temperature, GREEDY=active.greedy, HAS_K=active.top_k, HAS_P=active.top_p, HAS_MIN=active.min_p,
        HAS_BOTTOM=active.bottom_p, CHANCE=active.bottom_p_chance, PER_SEQUENCE=active.per_sequence,
        MIN_P_MASS=active.min_p_mass > 0,
        num_warps=SEARCH_WARPS if active.top_k or active.top_p or active.bottom_p else WARPS,
    )  # fmt: skip
