# mypy: disable-error-code="import-not-found, import-untyped, no-untyped-def, untyped-decorator"
"""Map floating-point values to integers in the same order, so that a search over values ends at exactly one."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

SHIFTS = {torch.bfloat16: 16, torch.float16: 13, torch.float32: 0}
"""Bits of a float32 that no value of the type has set: neighbouring values then have neighbouring keys."""


@triton.jit
def key_of(x, SHIFT: tl.constexpr):
    """Map a float32 value to an integer in the same order; keys of opposite sign may be more than 2³¹ apart."""
    bits = x.to(tl.int32, bitcast=True)
    return ((bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> SHIFT).to(tl.int64)


@triton.jit
def value_of(key, SHIFT: tl.constexpr):
    """Return the value with this key."""
    filled = (key << SHIFT).to(tl.int32)
    if SHIFT > 0:
        filled = tl.where(key < 0, filled | ((1 << SHIFT) - 1), filled)
    return (filled ^ ((filled >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
