"""Seed the samples of an evaluation, so that sample j of problem i is the same however the work is divided.

The engine gives request r of a call the stream (seed, r). Samples are numbered in blocks of `WIDTH`. Block b's seed
is a hash of the evaluation's seed and b; in it, sample j of problem i is request i · WIDTH + j mod WIDTH, where i is
the problem's index in the task. A call that starts at problem i₀ uses the seed under which its request 0 has the
stream of request i₀ · WIDTH under the block's seed (`seed_at`).
"""

from __future__ import annotations

import hashlib

from explorl.rollout.sampling.rng import GOLDEN, MIX_1, MIX_2, _mix

WIDTH = 16
"""Maximum number of samples of a problem per call."""

_MASK = (1 << 64) - 1


def block_seed(seed: int, block: int) -> int:
    """Return the seed of a block of samples."""
    return int.from_bytes(hashlib.blake2b(f"{seed}/{block}".encode(), digest_size=8).digest(), "little")


def seed_at(seed: int, first: int) -> int:
    """Return the seed under which request r has the stream of request first + r under ``seed``.

    Request r's stream starts at mix(mix(seed ⊕ γ) + (r + 1) γ).
    So the new seed is mix⁻¹(mix(seed ⊕ γ) + first · γ) ⊕ γ.
    """
    return _unmix((_mix((seed & _MASK) ^ GOLDEN) + first * GOLDEN) & _MASK) ^ GOLDEN


def _unmix(value: int) -> int:
    """Invert SplitMix64's mixing function, each step of which is a bijection of 64-bit numbers."""
    value = _unshift(value, 31) * pow(MIX_2, -1, 1 << 64) & _MASK
    value = _unshift(value, 27) * pow(MIX_1, -1, 1 << 64) & _MASK
    return _unshift(value, 30)


def _unshift(value: int, bits: int) -> int:
    """Return x for value = x ⊕ (x >> bits); for bits ≥ 22 the series has two terms."""
    return value ^ (value >> bits) ^ (value >> (2 * bits))
