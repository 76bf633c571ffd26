# mypy: disable-error-code="import-not-found, import-untyped, no-untyped-def, untyped-decorator"
"""The whole sampling step as one Triton kernel: statistics, warpers, draw, records and the row's next fields.

One program handles one row and reads its logits a few times from the second-level cache instead of writing
vocabulary-sized intermediates. Cuts (top-k, top-p, bottom-p, the branching factor) are found by a search on the bits of
the logit, two bits a pass: 8 passes settle bfloat16 logits, 16 float32 ones. Tokens with exactly the logit at a cut
stay together. The draw uses the same random numbers as `sampler.draw`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from explorl.rollout import rng
from explorl.rollout import state as fields
from explorl.rollout.sampling import Active
from explorl.rollout.state import State

TOKEN, POSITION, STEP, LIMIT = (tl.constexpr(i) for i in (fields.TOKEN, fields.POSITION, fields.STEP, fields.LIMIT))
STATUS, KEY, TOP_K = (tl.constexpr(i) for i in (fields.STATUS, fields.KEY, fields.TOP_K))
TEMPERATURE, TOP_P, MIN_P = (tl.constexpr(i) for i in (fields.TEMPERATURE, fields.TOP_P, fields.MIN_P))
REPETITION, BOTTOM_P, FREQUENCY = (tl.constexpr(i) for i in (fields.REPETITION, fields.BOTTOM_P, fields.FREQUENCY))
RUNNING, STOPPED = tl.constexpr(fields.RUNNING), tl.constexpr(fields.STOPPED)
LENGTH, BROKEN = tl.constexpr(fields.LENGTH), tl.constexpr(fields.BROKEN)
GOLDEN = tl.constexpr(rng.signed(rng.GOLDEN))
MIX_1 = tl.constexpr(rng.signed(rng.MIX_1))
MIX_2 = tl.constexpr(rng.signed(rng.MIX_2))
BERNOULLI = tl.constexpr(rng.signed(rng.BERNOULLI))

BLOCK = 2048
WARPS = 8
MASS = 0.95
"""Mass of the branching factor."""


@triton.jit
def _uniform(key, position):
    """`rng.uniform` of one row."""
    z = key + (position + 1) * GOLDEN
    z = (z ^ ((z >> 30) & 0x3FFFFFFFF)) * MIX_1
    z = (z ^ ((z >> 27) & 0x1FFFFFFFFF)) * MIX_2
    z = z ^ ((z >> 31) & 0x1FFFFFFFF)
    return ((z >> 11) & 0x1FFFFFFFFFFFFF).to(tl.float64) * 1.1102230246251565e-16


@triton.jit
def _key(x):
    """float32 as int32 in the same order."""
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _scores(line, seen, penalty, offs, vocab, REP: tl.constexpr):
    """Logits of a block, after the repetition penalty where there is one."""
    x = tl.load(line + offs, mask=offs < vocab, other=float("-inf")).to(tl.float32)
    if REP:
        had = tl.load(seen + offs, mask=offs < vocab, other=0) != 0
        x = tl.where(had, tl.where(x < 0, x * penalty, x / penalty), x)
    return x


@triton.jit
def _mass(
    line, seen, penalty, vocab, top, rate, low, high, SHIFT: tl.constexpr, BLOCK: tl.constexpr, REP: tl.constexpr
):
    """Σ exp((x − top) · rate) over the tokens whose key is in [low, high]."""
    sums = tl.zeros([BLOCK], tl.float32)
    for start in range(0, vocab, BLOCK):
        x = _scores(line, seen, penalty, start + tl.arange(0, BLOCK), vocab, REP)
        key = _key(x) >> SHIFT
        sums += tl.where((key >= low) & (key <= high), tl.exp((x - top) * rate), 0.0)
    return tl.sum(sums, 0)


@triton.jit
def _search(
    line, seen, penalty, vocab, top, rate, low, high, target,
    COUNT: tl.constexpr, STRICT: tl.constexpr, SHIFT: tl.constexpr, BLOCK: tl.constexpr, REP: tl.constexpr,
    BOUNDED: tl.constexpr,
):  # fmt: skip
    """The largest key k for which the tokens with keys in [max(k, low), high] weigh at least (or more than) target."""
    bits: tl.constexpr = 32 - SHIFT
    base = tl.full((), -(1 << (bits - 1)), tl.int64)
    one = tl.full((), 1, tl.int64)
    for i in range(bits // 2):
        unit = one << (bits - 2 - 2 * i)
        first, second, third = (
            (base + unit).to(tl.int32),
            (base + 2 * unit).to(tl.int32),
            (base + 3 * unit).to(tl.int32),
        )
        sum_1 = tl.zeros([BLOCK], tl.float32)
        sum_2 = tl.zeros([BLOCK], tl.float32)
        sum_3 = tl.zeros([BLOCK], tl.float32)
        for start in range(0, vocab, BLOCK):
            offs = start + tl.arange(0, BLOCK)
            x = _scores(line, seen, penalty, offs, vocab, REP)
            key = _key(x) >> SHIFT
            weight = tl.exp((x - top) * rate)
            if COUNT:
                weight = tl.where(offs < vocab, 1.0, 0.0)
            if BOUNDED:
                weight = tl.where((key >= low) & (key <= high), weight, 0.0)
            sum_1 += tl.where(key >= first, weight, 0.0)
            sum_2 += tl.where(key >= second, weight, 0.0)
            sum_3 += tl.where(key >= third, weight, 0.0)
        mass_1, mass_2, mass_3 = tl.sum(sum_1, 0), tl.sum(sum_2, 0), tl.sum(sum_3, 0)
        if STRICT:
            passed = (mass_1 > target).to(tl.int64) + (mass_2 > target).to(tl.int64) + (mass_3 > target).to(tl.int64)
        else:
            passed = (mass_1 >= target).to(tl.int64) + (mass_2 >= target).to(tl.int64) + (mass_3 >= target).to(tl.int64)
        base += passed * unit
    return base.to(tl.int32)


@triton.jit
def _branching(line, vocab, top, total, mass, SHIFT: tl.constexpr, BLOCK: tl.constexpr):
    """Size of the smallest set of top tokens that holds ``mass`` of the total."""
    target = total * mass
    cut = _search(
        line, line, 1.0, vocab, top, 1.0, -2147483648, 2147483647, target, False, False, SHIFT, BLOCK, False, False
    )  # fmt: skip
    above = tl.zeros([BLOCK], tl.float32)
    at = tl.zeros([BLOCK], tl.float32)
    n_above = tl.zeros([BLOCK], tl.int32)
    n_at = tl.zeros([BLOCK], tl.int32)
    for start in range(0, vocab, BLOCK):
        x = _scores(line, line, 1.0, start + tl.arange(0, BLOCK), vocab, False)
        key = _key(x) >> SHIFT
        weight = tl.exp(x - top)
        above += tl.where(key > cut, weight, 0.0)
        at += tl.where(key == cut, weight, 0.0)
        n_above += (key > cut).to(tl.int32)
        n_at += (key == cut).to(tl.int32)
    ties = tl.sum(n_at, 0)
    each = tl.sum(at, 0) / tl.maximum(ties, 1).to(tl.float32)
    need = tl.ceil((target - tl.sum(above, 0)) / each).to(tl.int32)
    return tl.sum(n_above, 0) + tl.minimum(tl.maximum(need, 1), tl.maximum(ties, 1))


@triton.jit
def _sample_kernel(
    logits, ints, reals, out_ints, out_reals, seen, stops,
    logits_row, vocab, slots, tokens, mass,
    STOPS: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, RAW_SHIFT: tl.constexpr, SHIFT: tl.constexpr,
    SEEN: tl.constexpr, REP: tl.constexpr, TAU: tl.constexpr, GREEDY: tl.constexpr, HAS_K: tl.constexpr,
    HAS_P: tl.constexpr, HAS_MIN: tl.constexpr, HAS_BOTTOM: tl.constexpr, CHANCE: tl.constexpr,
    PER_SEQUENCE: tl.constexpr,
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
    rate = 1.0 / tau
    penalty = tl.load(reals + REPETITION * slots + row).to(tl.float32)

    # 1. The policy: largest logit, sum at temperature 1 and at the row's own, entropy, branching factor.
    raw_top = tl.full([BLOCK], float("-inf"), tl.float32)
    top = tl.full([BLOCK], float("-inf"), tl.float32)
    for start in range(0, vocab, BLOCK):
        offs = start + tl.arange(0, BLOCK)
        raw_top = tl.maximum(raw_top, _scores(line, had, penalty, offs, vocab, False))
        if REP:
            top = tl.maximum(top, _scores(line, had, penalty, offs, vocab, True))
    highest = tl.max(raw_top, 0)
    best = highest
    if REP:
        best = tl.max(top, 0)
    sums = tl.zeros([BLOCK], tl.float32)
    tempered = tl.zeros([BLOCK], tl.float32)
    products = tl.zeros([BLOCK], tl.float32)
    for start in range(0, vocab, BLOCK):
        x = _scores(line, had, penalty, start + tl.arange(0, BLOCK), vocab, False) - highest
        weight = tl.exp(x)
        sums += weight
        products += tl.where(weight > 0, weight * x, 0.0)
        if TAU:
            tempered += tl.exp(x * rate)
    total = tl.sum(sums, 0)
    policy_total = total
    if TAU:
        policy_total = tl.sum(tempered, 0)
    entropy = tl.log(total) - tl.sum(products, 0) / total
    fine = (total > 0.0) & (total < float("inf"))
    branching = _branching(line, vocab, highest, total, mass, RAW_SHIFT, BLOCK)

    # 2. The warpers, as an interval of keys that stay.
    low = tl.full((), -2147483648, tl.int32)
    high = tl.full((), 2147483647, tl.int32)
    if HAS_K:
        k = tl.load(ints + TOP_K * slots + row)
        cut = _search(
            line, had, penalty, vocab, best, rate, low, high, k.to(tl.float32), True, False, SHIFT, BLOCK, REP, True
        )  # fmt: skip
        low = tl.where(k > 0, tl.maximum(low, cut), low)
    if HAS_P:
        p = tl.load(reals + TOP_P * slots + row)
        alone: tl.constexpr = not (REP or HAS_K)
        held = policy_total
        if not alone:
            held = _mass(line, had, penalty, vocab, best, rate, low, high, SHIFT, BLOCK, REP)
        target = (held.to(tl.float64) * p).to(tl.float32)
        cut = _search(
            line, had, penalty, vocab, best, rate, low, high, target, False, False, SHIFT, BLOCK, REP, not alone
        )  # fmt: skip
        low = tl.where(p < 1.0, tl.maximum(low, cut), low)
    if HAS_MIN:
        least = tl.load(reals + MIN_P * slots + row).to(tl.float32)
        floor = _key(best + tau * tl.log(least))
        # Rounded towards the keys that are not below the floor: positive ones end in zeros, negative ones in ones.
        floor = tl.where(floor < 0, floor >> SHIFT, (floor + ((1 << SHIFT) - 1)) >> SHIFT)
        low = tl.where(least > 0.0, tl.maximum(low, floor), low)
    if HAS_BOTTOM:
        p = tl.load(reals + BOTTOM_P * slots + row)
        first: tl.constexpr = not (REP or HAS_K or HAS_P or HAS_MIN)  # then nothing is cut yet
        held = policy_total
        if not first:
            held = _mass(line, had, penalty, vocab, best, rate, low, high, SHIFT, BLOCK, REP)
        target = (held.to(tl.float64) * tl.minimum(1.0 - p, 0.999999)).to(tl.float32)
        cut = _search(
            line, had, penalty, vocab, best, rate, low, high, target, False, True, SHIFT, BLOCK, REP, not first
        )  # fmt: skip
        apply = p < 1.0
        if CHANCE:
            at = step
            if PER_SEQUENCE:
                at = step * 0
            apply = apply & (_uniform(key_of ^ BERNOULLI, at) < tl.load(reals + FREQUENCY * slots + row))
        high = tl.where(apply, tl.minimum(high, cut), high)

    # 3. The draw: first the block of the vocabulary, then the token in it.
    index = tl.arange(0, BLOCKS)
    blocks = tl.zeros([BLOCKS], tl.float32)
    for start in range(0, vocab, BLOCK):
        x = _scores(line, had, penalty, start + tl.arange(0, BLOCK), vocab, REP)
        key = _key(x) >> SHIFT
        weight = tl.where((key >= low) & (key <= high), tl.exp((x - best) * rate), 0.0)
        blocks = tl.where(index == start // BLOCK, tl.sum(weight, 0), blocks)
    blocks_64 = blocks.to(tl.float64)
    sampled_total = tl.sum(blocks_64, 0)
    goal = _uniform(key_of, step) * sampled_total
    ends = tl.cumsum(blocks_64, 0)
    chosen = tl.sum((ends <= goal).to(tl.int32), 0)
    chosen = tl.minimum(chosen, tl.max(tl.where(blocks > 0, index, 0), 0))
    held_64 = tl.sum(tl.where(index == chosen, blocks_64, 0.0), 0)
    inside = (goal - tl.sum(tl.where(index < chosen, blocks_64, 0.0), 0)) / held_64
    offs = chosen * BLOCK + tl.arange(0, BLOCK)
    x = _scores(line, had, penalty, offs, vocab, REP)
    key = _key(x) >> SHIFT
    weight = tl.where((key >= low) & (key <= high), tl.exp((x - best) * rate), 0.0)
    weight_64 = weight.to(tl.float64)
    reached = (tl.cumsum(weight_64, 0) > inside * tl.sum(weight_64, 0)) & (weight > 0)
    token = tl.min(tl.where(reached, offs, vocab), 0)
    token = tl.minimum(token, tl.max(tl.where(weight > 0, offs, 0), 0))
    if GREEDY:
        first = tl.full([BLOCK], 2147483647, tl.int32)
        for start in range(0, vocab, BLOCK):
            offs = start + tl.arange(0, BLOCK)
            x = _scores(line, had, penalty, offs, vocab, REP)
            first = tl.minimum(first, tl.where((x == best) & (offs < vocab), offs, 2147483647))
        token = tl.where(greedy, tl.min(first, 0), token)
    token = tl.where(fine, tl.minimum(token, vocab - 1), 0)

    # 4. The records and the row's next state.
    raw = tl.load(line + token).to(tl.float32)
    score = raw
    if REP:
        again = tl.load(had + token) != 0
        score = tl.where(again, tl.where(raw < 0, raw * penalty, raw / penalty), raw)
    logp = (raw - highest) * rate - tl.log(policy_total)
    logq = tl.where(greedy, 0.0, (score - best) * rate - tl.log(sampled_total.to(tl.float32)))
    at = row * tokens + step
    plane = slots * tokens
    tl.store(out_ints + at, token.to(tl.int32), mask=fine)
    tl.store(out_ints + plane + at, branching, mask=fine)
    tl.store(out_reals + at, logp, mask=fine)
    tl.store(out_reals + plane + at, logq, mask=fine)
    tl.store(out_reals + 2 * plane + at, entropy, mask=fine)
    if SEEN:
        tl.store(had + token, 1, mask=fine)
    step += fine.to(tl.int64)
    stop = tl.load(stops + tl.arange(0, STOPS))
    stopped = tl.max((stop == token).to(tl.int32), 0) > 0
    status = tl.where(step >= tl.load(ints + LIMIT * slots + row), LENGTH, RUNNING)
    status = tl.where(stopped, STOPPED, status)
    status = tl.where(fine, status, BROKEN)
    onward = status == RUNNING
    tl.store(ints + STEP * slots + row, step)
    tl.store(ints + STATUS * slots + row, status.to(tl.int64))
    tl.store(ints + TOKEN * slots + row, token.to(tl.int64), mask=onward)
    tl.store(ints + POSITION * slots + row, tl.load(ints + POSITION * slots + row) + 1, mask=onward)


def sample_step_kernel(logits: Tensor, state: State, active: Active, row_of: Tensor | None = None) -> None:
    """`sampler.sample_step` in one kernel."""
    if row_of is not None:
        logits = logits[row_of]
    rows, vocab = logits.shape
    if logits.stride(-1) != 1:
        logits = logits.contiguous()
    raw_shift = 16 if logits.dtype == torch.bfloat16 else 0
    seen = state.ints if state.seen is None else state.seen.view(torch.uint8)
    _sample_kernel[(rows,)](
        logits, state.ints, state.reals, state.out_ints, state.out_reals, seen, state.stops,
        logits.stride(0), vocab, state.slots, state.tokens, MASS,
        STOPS=triton.next_power_of_2(len(state.stops)), BLOCK=min(BLOCK, max(16, triton.next_power_of_2(vocab))),
        BLOCKS=max(2, triton.next_power_of_2(triton.cdiv(vocab, BLOCK))), RAW_SHIFT=raw_shift,
        SHIFT=0 if active.repetition else raw_shift, SEEN=state.seen is not None, REP=active.repetition,
        TAU=active.temperature, GREEDY=active.greedy, HAS_K=active.top_k, HAS_P=active.top_p, HAS_MIN=active.min_p,
        HAS_BOTTOM=active.bottom_p, CHANCE=active.bottom_p_chance, PER_SEQUENCE=active.per_sequence,
        num_warps=WARPS,
    )  # fmt: skip
