"""Which random numbers sample j of problem i draws: the same whatever the chunks, their order and their number.

The engine gives request r of a call the stream (seed, r). Samples are numbered in blocks of `WIDTH`: block b has a seed
of its own, hashed from the evaluation's seed and b, and in it sample j of problem i is request i · WIDTH + j mod WIDTH,
i being the problem's place in the task's list. A call that begins at problem i₀ takes the seed under which its request
0 draws what request i₀ · WIDTH draws under the block's seed (`seed_at`).
"""

from __future__ import annotations

import hashlib

from explorl.rollout.sampling.rng import GOLDEN, MIX_1, MIX_2, _mix

WIDTH = 16
"""Samples of a problem that one call can draw."""

_MASK = (1 << 64) - 1


def block_seed(seed: int, block: int) -> int:
    """The seed of a block of samples."""
    return int.from_bytes(hashlib.blake2b(f"{seed}/{block}".encode(), digest_size=8).digest(), "little")


def seed_at(seed: int, first: int) -> int:
    """The seed under which request r draws what request first + r draws under ``seed``.

    request r's stream begins at mix(mix(seed ⊕ γ) + (r + 1) γ)
    so the new seed is mix⁻¹(mix(seed ⊕ γ) + first · γ) ⊕ γ
    """
    return _unmix((_mix((seed & _MASK) ^ GOLDEN) + first * GOLDEN) & _MASK) ^ GOLDEN


def _unmix(value: int) -> int:
    """The inverse of SplitMix64's mixing function: each of its steps is a bijection of 64-bit numbers."""
    value = _unshift(value, 31) * pow(MIX_2, -1, 1 << 64) & _MASK
    value = _unshift(value, 27) * pow(MIX_1, -1, 1 << 64) & _MASK
    return _unshift(value, 30)


def _unshift(value: int, bits: int) -> int:
    """x where value = x ⊕ (x >> bits): with bits ≥ 22 two terms of the series are left."""
    return value ^ (value >> bits) ^ (value >> (2 * bits))
