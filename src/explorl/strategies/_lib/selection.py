"""The k-th largest of the values of all processes, found without bringing them together.

The bits of a float, with all but the sign turned round where it is negative, are a whole number that grows as the float
does. So the k-th largest is found digit by digit: each process counts its values by their leading bits, the counts are
added up, they say which digit the k-th largest has, and the values that share it are counted by their next 11 bits.
Three rounds of 2,048 counts give the float32 exactly, six the float64, whatever the number of values. It is radix
selection (Alabi et al. 2012, Fast k-selection algorithms for graphics processing units), with the histogram summed.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from explorl.strategies._lib.collectives import LOCAL, Collectives

DIGIT = 11
"""Bits by which values are counted in one round."""


def ordered_bits(values: Float[Tensor, " tokens"]) -> Int[Tensor, " tokens"]:
    """Whole numbers that are ordered as the values are, and equal where those are: −0 is 0, and NaN is above +∞."""
    values = values.detach() if values.dtype == torch.float64 else values.detach().float()
    kind = torch.int64 if values.dtype == torch.float64 else torch.int32
    most = torch.iinfo(kind).max
    bits = torch.where(values == 0, 0.0, values).view(kind)
    bits = torch.where(bits < 0, bits ^ most, bits)
    return torch.where(values.isnan(), most, bits)


def _value(bits: int, kind: torch.dtype) -> float:
    """The float whose ordered bits these are."""
    most = torch.iinfo(kind).max
    raw = torch.tensor([bits if bits >= 0 else bits ^ most], dtype=kind)
    return float(raw.view(torch.float64 if kind == torch.int64 else torch.float32))


def _kth_largest(bits: Int[Tensor, " tokens"], k: int, collectives: Collectives) -> tuple[int, int]:
    """The k-th largest of the bits of all processes, and how many are larger than it."""
    size = torch.iinfo(bits.dtype).bits
    found, above = 0, 0
    for shift in range(size // DIGIT * DIGIT, -1, -DIGIT):
        leading = shift + DIGIT >= size
        digits = (bits >> shift) + 2 ** (size - shift - 1) if leading else (bits >> shift) & (2**DIGIT - 1)
        counts = collectives.sum(torch.bincount(digits, minlength=2**DIGIT)).cpu()
        at_least = counts.flip(0).cumsum(0).flip(0)
        digit = int((at_least >= k - above).sum()) - 1
        above += int(at_least[digit] - counts[digit])
        found = digit - 2 ** (size - shift - 1) if leading else found << DIGIT | digit
        bits = bits[digits == digit]
    return found, above


def kth_smallest(values: Float[Tensor, " tokens"], k: int, *, collectives: Collectives = LOCAL) -> float:
    """The k-th smallest of the values of all processes, k from 1 to their number; NaN counts as the largest."""
    bits = ordered_bits(values)
    found, _ = _kth_largest(~bits, k, collectives)
    return _value(~found, bits.dtype)


def top_k_mask(
    values: Float[Tensor, " tokens"], k: int, *, lowest: bool = False, collectives: Collectives = LOCAL
) -> Bool[Tensor, " tokens"]:
    """True on this process's own among the k largest values of all (`lowest`: smallest), k from 0 to their number.

    Of equal values the earlier ones are taken, as by a stable sort.
    """
    if k == 0:
        return torch.zeros_like(values, dtype=torch.bool)
    bits = ordered_bits(values)
    bits = ~bits if lowest else bits
    threshold, above = _kth_largest(bits, k, collectives)
    ties = bits == threshold
    left = k - above - collectives.sum_before(ties.sum())
    return (bits > threshold) | (ties & (ties.cumsum(0) <= left))
