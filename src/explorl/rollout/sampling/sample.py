"""One sampling step: from logits to tokens and their statistics.

A token is sampled by inverting the cumulative distribution at one counter-based random number per slot. The sum runs
over blocks of the vocabulary and then inside one block, in float64, so the far tail is sampled correctly at any size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Float64, Int
from torch import Tensor

from explorl.rollout.sampling import (
    Active,
    bottom_p_cut,
    rng,
    warp_min_p,
    warp_repetition,
    warp_temperature,
    warp_top_k,
    warp_top_p,
)
from explorl.rollout.sampling.ranking import SLACK, branching_count
from explorl.rollout.sampling.warpers import PerRow
from explorl.rollout.state import (
    BOTTOM_P,
    BROKEN,
    FREQUENCY,
    KEY,
    LENGTH,
    LIMIT,
    MIN_P,
    POSITION,
    REPETITION,
    RUNNING,
    STATUS,
    STEP,
    STOP_SET,
    STOPPED,
    TEMPERATURE,
    TOKEN,
    TOP_K,
    TOP_P,
    SlotState,
)

BLOCK = 256
"""Tokens in one block of the cumulative sum."""
BOTTOM_P_ALONE = Active(bottom_p=True)
FLOOR = -1e30
"""Replaces −inf, whose product with a probability of 0 would be NaN."""


class Scratch:
    """Memory for the distributions of a step, reused from step to step.

    With a large vocabulary, allocating it in every step costs a CPU several milliseconds, because the system maps the
    pages one by one and unmaps them at the end of the step.
    """

    def __init__(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.float32)

    def __call__(self, like: Float[Tensor, "rows vocab"]) -> Sequence[Any]:
        """Return three tensors of this shape; None on devices whose allocator reuses memory itself."""
        if like.device.type != "cpu":
            return None, None, None
        if self._buffer.numel() < 3 * like.numel():
            self._buffer = torch.empty(3 * like.numel(), dtype=torch.float32)
        return self._buffer[: 3 * like.numel()].view(3, *like.shape).unbind()


class SampledToken(NamedTuple):
    """One token per slot, and its statistics."""

    token: Int[Tensor, " rows"]
    logp: Float[Tensor, " rows"]
    """log π at the slot's temperature (1 if it is greedy), over the whole vocabulary."""
    logq: Float[Tensor, " rows"]
    """log q of the distribution sampled from, after all warpers; 0 if the slot is greedy.

    If a coin decides about bottom-p for every token, this is the mixture over both sides of the coin,
    f · q_bottom + (1 − f) · q_rest; if it decides once per sequence, log q of the side that came up.
    """
    entropy: Float[Tensor, " rows"]
    """H(π) in nats at temperature 1."""
    branching: Int[Tensor, " rows"]
    """Size of the smallest set of top tokens with mass ≥ 0.95, at temperature 1."""
    broken: Bool[Tensor, " rows"]
    """True if the logits contain NaN or +inf."""
    min_p_mass: Float[Tensor, " rows"] | None = None
    """Mass of the min-p set, 0 if the token is not in it; None if it is not recorded."""


class Coin(NamedTuple):
    """The coin that decided whether to apply bottom-p to this token."""

    frequency: Float64[Tensor, " rows"]
    applied: Bool[Tensor, " rows"]
    cut: Bool[Tensor, "rows vocab"]
    """The tokens that bottom-p removes when applied."""
    mass: Float64[Tensor, " rows"]
    """Their total probability when it is not applied."""

    def mixture(self, logq: Float[Tensor, " rows"], token: Int[Tensor, " rows"]) -> Float[Tensor, " rows"]:
        """Return log(f · q_bottom + (1 − f) · q_rest) of a token, given its log q on the side that came up.

        For a token that bottom-p keeps, q_bottom = q_rest / (1 − mass), so each follows from the other.
        """
        f, mass = self.frequency, self.mass
        removed = self.cut.gather(-1, token[:, None])[:, 0]
        remaining = torch.maximum(1.0 - mass, logq.double().exp())  # at least the token itself, despite rounding
        change = torch.where(self.applied, (f - 1.0) * mass, torch.where(removed, -f, f * mass / remaining))
        return (logq + torch.log1p(change)).to(logq.dtype)


def pick(
    weights: Float[Tensor, "rows vocab"], u: Float64[Tensor, " slots"], row_of: Int[Tensor, " slots"] | None = None
) -> Int[Tensor, " slots"]:
    """Return the token at which the running sum of each slot's row of weights first exceeds u times its total."""
    rows, vocab = weights.shape
    if vocab <= 4 * BLOCK:
        ends = weights.double().cumsum(-1)
        return _invert_on_host(ends, u, row_of) if weights.device.type == "cpu" else _invert(ends, u, row_of)
    whole = vocab // BLOCK
    sums = weights[:, : whole * BLOCK].view(rows, whole, BLOCK).sum(-1)
    if whole * BLOCK < vocab:
        sums = torch.cat([sums, weights[:, whole * BLOCK :].sum(-1, keepdim=True)], dim=-1)
    sums = sums.double() if row_of is None else sums.double()[row_of]
    ends = sums.cumsum(-1)
    block = _invert(ends, u)[:, None]
    mass = sums.gather(-1, block)[:, 0]
    inside = (u * ends[:, -1] - (ends.gather(-1, block)[:, 0] - mass)) / mass
    index = block * BLOCK + torch.arange(BLOCK, device=weights.device)
    row = torch.arange(rows, device=weights.device) if row_of is None else row_of
    values = weights[row[:, None], index.clamp(max=vocab - 1)].masked_fill(index >= vocab, 0.0)
    return block[:, 0] * BLOCK + _invert(values.double().cumsum(-1), inside.clamp(0.0, 1.0 - 2.0**-53))


def _invert_on_host(ends: Tensor, u: Tensor, row_of: Tensor | None) -> Tensor:
    """Compute `_invert` on a CPU, where NumPy's calls cost less."""
    sums = ends.numpy() if row_of is None else ends.numpy()[row_of.numpy()]
    index = np.count_nonzero(sums <= (u.numpy() * sums[:, -1])[:, None], axis=-1)
    return torch.from_numpy(np.minimum(index, sums.shape[-1] - 1))


def _invert(ends: Tensor, u: Tensor, row_of: Tensor | None = None) -> Tensor:
    if row_of is not None:
        ends = ends[row_of]
    index = (ends <= (u * ends[:, -1])[:, None]).sum(-1)
    return index.clamp(max=ends.shape[-1] - 1)


def draw(
    logits: Float[Tensor, "rows vocab"],
    state: SlotState,
    active: Active,
    row_of: Int[Tensor, " slots"] | None = None,
    scratch: Scratch | None = None,
) -> SampledToken:
    """Sample for the state's first slots; ``row_of`` is each slot's row in the logits if several slots share rows."""
    slots = logits.shape[0] if row_of is None else len(row_of)
    ints, reals = state.ints[:, :slots], state.reals[:, :slots]
    scores, policy, weights, entropy = _policy(logits.float(), scratch or Scratch())
    branching = branching_count(policy, weights)
    if row_of is not None:
        entropy, branching = entropy[row_of], branching[row_of]
    if active == BOTTOM_P_ALONE and scores.device.type == "cpu" and not _cuts(weights, reals[BOTTOM_P], row_of):
        active = Active()
    if row_of is not None and (active.temperature or active.warps):  # slots have different warpers
        scores, policy, row_of = scores[row_of], policy[row_of], None
    broken = ~torch.isfinite(entropy)

    if active.temperature:
        policy = torch.log_softmax(warp_temperature(scores, reals[TEMPERATURE]), -1)
    sampled, coin = policy, None
    if active.warps:
        warped, coin = _apply_warpers(scores, policy, state, slots, active)
        sampled = torch.log_softmax(warped, -1)
    if active.temperature or active.warps:
        weights = torch.exp(sampled)

    token = pick(weights, rng.uniform(ints[KEY], ints[STEP]), row_of)
    if active.greedy:
        greedy = reals[TEMPERATURE] == 0
        best = _penalised(scores, state, slots) if active.repetition else scores
        likeliest = best.argmax(-1) if row_of is None else best.argmax(-1)[row_of]
        token = torch.where(greedy, likeliest, token)
    token = torch.where(broken, 0, token)
    row = torch.arange(slots, device=token.device) if row_of is None else row_of
    logp = policy[row, token]
    logq = sampled[row, token] if active.warps else logp
    if coin is not None:
        logq = coin.mixture(logq, token)
    if active.greedy:
        logq = torch.where(greedy, 0.0, logq)
    mass = _min_p_mass(policy, row, token, active.min_p_mass) if active.min_p_mass else None
    return SampledToken(token, logp, logq, entropy, branching, broken, mass)


def _policy(scores: Tensor, scratch: Scratch) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return scores without −inf, their log π and π at temperature 1, and its entropy."""
    if scores.device.type != "cpu":
        scores = scores.clamp(min=FLOOR)
    policy, weights, entropy = _distribution(scores, scratch)
    if scores.device.type == "cpu" and not bool(torch.isfinite(entropy).all()):
        scores = scores.clamp(min=FLOOR)  # few models give −inf, and on a CPU the check costs less than clamping
        policy, weights, entropy = _distribution(scores, scratch)
    return scores, policy, weights, entropy


def _distribution(scores: Tensor, scratch: Scratch) -> tuple[Tensor, Tensor, Tensor]:
    buffers = scratch(scores)
    policy = torch.log_softmax(scores, -1, out=buffers[0])
    weights = torch.exp(policy, out=buffers[1])
    return policy, weights, torch.mul(weights, policy, out=buffers[2]).sum(-1).neg_()


def _min_p_mass(policy: Tensor, row: Tensor, token: Tensor, share: float) -> Tensor:
    """Return the mass of the tokens at least ``share`` times as likely as the likeliest; 0 if the token is not one."""
    in_set = policy >= policy.amax(-1, keepdim=True) + math.log(share)
    mass = torch.where(in_set, policy.exp(), 0.0).sum(-1)
    return torch.where(in_set[row, token], mass[row], 0.0)


def _cuts(weights: Tensor, p: Tensor, row_of: Tensor | None) -> bool:
    """Return whether bottom-p removes any token: it does not if the likeliest one alone has more than 1 − p."""
    top = weights.amax(-1) if row_of is None else weights.amax(-1)[row_of]
    return not bool((top > (1.0 - p) * (1 + 2 * SLACK)).all())


def _penalised(scores: Tensor, state: SlotState, rows: int) -> Tensor:
    """Apply the repetition penalty, which also affects the greedy choice, to scores."""
    assert state.seen is not None
    return warp_repetition(scores, state.seen[:rows], state.reals[REPETITION, :rows])


def truncate(
    scores: Float[Tensor, "rows vocab"],
    top_k: Int[Tensor, " rows"] | int | None,
    top_p: PerRow | None,
    min_p: PerRow | None,
    rate: Float[Tensor, " rows"] | None = None,
) -> Float[Tensor, "rows vocab"]:
    """Apply top-k, top-p and min-p in this order, without those that are None; ``rate`` as in `warpers`."""
    if top_k is not None:
        scores = warp_top_k(scores, top_k)
    if top_p is not None:
        scores = warp_top_p(scores, top_p, rate)
    return scores if min_p is None else warp_min_p(scores, min_p, rate)


def _apply_warpers(
    scores: Tensor, policy: Tensor, state: SlotState, rows: int, active: Active
) -> tuple[Tensor, Coin | None]:
    """Apply all warpers to scores; also return the coin if one is tossed for this token."""
    ints, reals = state.ints[:, :rows], state.reals[:, :rows]
    ranked, warped, rate = scores, policy, None  # cuts compare scores before the temperature
    if active.repetition:
        ranked = warped = _penalised(scores, state, rows)
        if active.temperature:
            warped = warp_temperature(warped, reals[TEMPERATURE])
    if active.temperature:
        rate = 1.0 / torch.where(reals[TEMPERATURE] == 0, 1.0, reals[TEMPERATURE])
    ranked = truncate(
        ranked,
        ints[TOP_K] if active.top_k else None,
        reals[TOP_P] if active.top_p else None,
        reals[MIN_P] if active.min_p else None,
        rate,
    )
    if active.top_k or active.top_p or active.min_p:
        warped = warped.masked_fill(ranked == -torch.inf, -torch.inf)
    if not active.bottom_p:
        return warped, None
    cut, mass = bottom_p_cut(ranked, reals[BOTTOM_P], rate)
    if not active.bottom_p_chance:
        return warped.masked_fill(cut, -torch.inf), None
    positions = torch.zeros_like(ints[STEP]) if active.per_sequence else ints[STEP]
    applied = rng.uniform(ints[KEY], positions, rng.BERNOULLI) < reals[FREQUENCY]
    coin = None if active.per_sequence else Coin(reals[FREQUENCY], applied, cut, mass)
    return warped.masked_fill(cut & applied[:, None], -torch.inf), coin


def sample_step(
    logits: Float[Tensor, "rows vocab"],
    state: SlotState,
    active: Active,
    row_of: Int[Tensor, " slots"] | None = None,
    scratch: Scratch | None = None,
) -> None:
    """Sample a token for each of the first slots, record it, and advance the slots that are still running."""
    rows = logits.shape[0] if row_of is None else len(row_of)
    ints = state.ints[:, :rows]
    result = draw(logits, state, active, row_of, scratch)
    running = ints[STATUS] == RUNNING
    good = running & ~result.broken
    step = ints[STEP].clamp(max=state.tokens - 1)[:, None]
    new_ints = torch.stack([result.token, result.branching])
    new_reals = torch.stack([result.logp, result.logq, result.entropy])
    _record(state.out_ints[:, :rows], step, new_ints, good)
    _record(state.out_reals[:, :rows], step, new_reals, good)
    if result.min_p_mass is not None and state.out_mass is not None:
        _record(state.out_mass[None, :rows], step, result.min_p_mass[None], good)
    if state.seen is not None:
        seen = state.seen[:rows]
        token = result.token[:, None]
        seen.scatter_(1, token, seen.gather(1, token) | good[:, None])

    advance = _advance_on_host if ints.device.type == "cpu" else _advance
    advance(state, ints, result, running, good)


def _advance(state: SlotState, ints: Tensor, result: SampledToken, running: Tensor, good: Tensor) -> None:
    """Count the sampled tokens, and set the status of the slots that end with them."""
    ints[STEP] += good
    status = torch.where(ints[STEP] >= ints[LIMIT], LENGTH, RUNNING)
    stopped = (result.token[:, None] == state.stops[ints[STOP_SET]]).any(-1)
    status = torch.where(result.broken, BROKEN, torch.where(stopped, STOPPED, status))
    ints[STATUS] = torch.where(running, status, ints[STATUS])
    onward = ints[STATUS] == RUNNING
    ints[TOKEN] = torch.where(onward, result.token, ints[TOKEN])
    ints[POSITION] += onward


def _advance_on_host(state: SlotState, ints: Tensor, result: SampledToken, running: Tensor, good: Tensor) -> None:
    """Compute `_advance` on a CPU, where NumPy's calls cost less."""
    fields, token, stops = ints.numpy(), result.token.numpy(), state.stops.numpy()
    fields[STEP] += good.numpy()
    status = np.where(fields[STEP] >= fields[LIMIT], LENGTH, RUNNING)
    status[(token[:, None] == stops[fields[STOP_SET]]).any(-1)] = STOPPED
    status[result.broken.numpy()] = BROKEN
    fields[STATUS] = np.where(running.numpy(), status, fields[STATUS])
    onward = fields[STATUS] == RUNNING
    fields[TOKEN] = np.where(onward, token, fields[TOKEN])
    fields[POSITION] += onward


def _record(out: Tensor, step: Tensor, values: Tensor, where: Tensor) -> None:
    """Write (fields, rows) values at each row's step, only ``where`` it is true."""
    if out.device.type == "cpu":
        at = np.flatnonzero(where.numpy())
        out.numpy()[:, at, step.numpy()[at, 0]] = values.numpy()[:, at]
        return
    index = step.expand(len(out), *step.shape)
    old = out.gather(-1, index)
    out.scatter_(-1, index, torch.where(where[:, None], values[..., None].to(out.dtype), old))
