"""Find the k-th largest value over all processes without gathering the values.

The bits of a float, with all but the sign inverted for negative numbers, form an integer that has the same order as the
floats. The k-th largest value is therefore found digit by digit: each process counts its values by their leading bits,
the counts are summed over the processes and determine the digit of the k-th largest, and the values with that digit are
counted by their next 11 bits. Three rounds of 2,048 counts give a float32 exactly, six a float64, whatever the number
of values. This is radix selection (Alabi et al. 2012, Fast k-selection algorithms for graphics processing units) with
the histogram summed over processes.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from explorl.strategies._lib.collectives import LOCAL, Collectives

DIGIT = 11
"""Number of bits by which values are counted in one round."""


def ordered_bits(values: Float[Tensor, " tokens"]) -> Int[Tensor, " tokens"]:
    """Return integers in the same order as the values: −0 equals 0, and NaN is above +∞."""
    values = values.detach() if values.dtype == torch.float64 else values.detach().float()
    kind = torch.int64 if values.dtype == torch.float64 else torch.int32
    largest = torch.iinfo(kind).max
    bits = torch.where(values == 0, 0.0, values).view(kind)
    bits = torch.where(bits < 0, bits ^ largest, bits)
    return torch.where(values.isnan(), largest, bits)


def _value(bits: int, kind: torch.dtype) -> float:
    """Return the float that has these ordered bits."""
    largest = torch.iinfo(kind).max
    raw = torch.tensor([bits if bits >= 0 else bits ^ largest], dtype=kind)
    return float(raw.view(torch.float64 if kind == torch.int64 else torch.float32))


def _kth_largest(bits: Int[Tensor, " tokens"], k: int, collectives: Collectives) -> tuple[int, int]:
    """Return the k-th largest of the bits of all processes, and how many are larger."""
    size = torch.iinfo(bits.dtype).bits
    result, above = 0, 0
    for shift in range(size // DIGIT * DIGIT, -1, -DIGIT):
        is_first = shift + DIGIT >= size
        digits = (bits >> shift) + 2 ** (size - shift - 1) if is_first else (bits >> shift) & (2**DIGIT - 1)
        counts = collectives.sum(torch.bincount(digits, minlength=2**DIGIT)).cpu()
        at_least = counts.flip(0).cumsum(0).flip(0)
        digit = int((at_least >= k - above).sum()) - 1
        above += int(at_least[digit] - counts[digit])
        result = digit - 2 ** (size - shift - 1) if is_first else result << DIGIT | digit
        bits = bits[digits == digit]
    return result, above


def kth_smallest(values: Float[Tensor, " tokens"], k: int, *, collectives: Collectives = LOCAL) -> float:
    """Return the k-th smallest value over all processes, for k from 1 to their number; NaN counts as the largest."""
    bits = ordered_bits(values)
    inverted, _ = _kth_largest(~bits, k, collectives)
    return _value(~inverted, bits.dtype)


def top_k_mask(
    values: Float[Tensor, " tokens"], k: int, *, lowest: bool = False, collectives: Collectives = LOCAL
) -> Bool[Tensor, " tokens"]:
    """Return a mask of this process's values that are among the k largest of all processes (`lowest`: smallest).

    k is from 0 to the number of values. Ties go to the earlier values, as in a stable sort.
    """
    if k == 0:
        return torch.zeros_like(values, dtype=torch.bool)
    bits = ordered_bits(values)
    bits = ~bits if lowest else bits
    threshold, above = _kth_largest(bits, k, collectives)
    ties = bits == threshold
    left = k - above - collectives.sum_before(ties.sum())
    return (bits > threshold) | (ties & (ties.cumsum(0) <= left))
