"""Counter-based random numbers that depend only on (seed, request, position).

Each request has a SplitMix64 stream (Steele, Lea and Flood 2014) that starts at a key hashed from the seed and the
request's index; the number at a position is computed without the ones before it. So the numbers do not depend on the
batch size, the other requests in flight or the order in which slots are refilled. Everything is integer arithmetic
modulo 2^64, which torch does in int64 on every device, and which runs inside a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Float64, Int64
from torch import Tensor

GOLDEN = 0x9E3779B97F4A7C15
MIX_1 = 0xBF58476D1CE4E5B9
MIX_2 = 0x94D049BB133111EB
BERNOULLI = 0x6A09E667F3BCC909
"""Salt of the stream that decides whether to apply bottom-p."""
FORK = 0xBB67AE8584CAA73B
"""Salt of the keys of forks."""

_MASK = (1 << 64) - 1


def signed(value: int) -> int:
    """Return the int64 with the same bits as this 64-bit number."""
    value &= _MASK
    return value - (1 << 64) if value >> 63 else value


def _mix(value: int) -> int:
    value = ((value ^ (value >> 30)) * MIX_1) & _MASK
    value = ((value ^ (value >> 27)) * MIX_2) & _MASK
    return value ^ (value >> 31)


def request_keys(seed: int, requests: Sequence[int]) -> np.ndarray:
    """Return the stream keys (int64) of these requests."""
    start = _mix((seed & _MASK) ^ GOLDEN)
    return np.array([signed(_mix(start + (request + 1) * GOLDEN & _MASK)) for request in requests], dtype=np.int64)


def fork_key(key: int, fork: int) -> int:
    """Return the stream key (int64) of a sequence's fork number ``fork``."""
    start = _mix((key & _MASK) ^ FORK)
    return signed(_mix(start + (fork + 1) * GOLDEN & _MASK))


def _shift(value: Tensor, bits: int) -> Tensor:
    """Shift int64 right logically."""
    return (value >> bits) & ((1 << (64 - bits)) - 1)


def uniform(keys: Int64[Tensor, " rows"], positions: Int64[Tensor, " rows"], salt: int = 0) -> Float64[Tensor, " rows"]:
    """Return one number in [0, 1) per row, with 53 random bits."""
    if keys.device.type == "cpu":  # NumPy takes a quarter of torch's time
        return torch.from_numpy(_on_host(keys.numpy().view(np.uint64), positions.numpy().view(np.uint64), salt))
    return _on_device(keys, positions, salt)


def _on_device(keys: Tensor, positions: Tensor, salt: int) -> Tensor:
    z = (keys ^ signed(salt) if salt else keys) + (positions + 1) * signed(GOLDEN)
    z = (z ^ _shift(z, 30)) * signed(MIX_1)
    z = (z ^ _shift(z, 27)) * signed(MIX_2)
    z = z ^ _shift(z, 31)
    return _shift(z, 11).to(torch.float64) * 2.0**-53


def _on_host(keys: np.ndarray, positions: np.ndarray, salt: int) -> np.ndarray:
    z = (keys ^ np.uint64(salt)) + (positions + np.uint64(1)) * np.uint64(GOLDEN)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(MIX_1)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(MIX_2)
    z ^= z >> np.uint64(31)
    return (z >> np.uint64(11)).astype(np.float64) * 2.0**-53
