"""The k-th largest value of several processes, without bringing the values together."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from explorl.strategies._lib.collectives import LOCAL
from explorl.strategies._lib.selection import kth_smallest, ordered_bits, top_k_mask

from .cases import checked
from .threads import on_threads

QUICK = settings(max_examples=100, deadline=None)
SPECIAL = [-np.inf, np.inf, -0.0, 0.0, 1e-45, -1e-45, 1.1754944e-38, -3.4028235e38, 3.4028235e38, np.nan, 1.0, -1.0]
KINDS = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16, "float16": torch.float16}


@st.composite
def spread(draw):
    """Values with many ties and all that is special about floats, and how many of them each process has."""
    kind = KINDS[draw(st.sampled_from(sorted(KINDS)))]
    parts = draw(st.lists(st.integers(0, 6), min_size=1, max_size=4))
    number = sum(parts)
    if not number:
        parts, number = [1], 1
    any_float = st.floats(width=64 if kind == torch.float64 else 32, allow_subnormal=True)
    values = draw(st.lists(st.sampled_from(SPECIAL) | any_float, min_size=number, max_size=number))
    return torch.tensor(values, dtype=torch.float64).to(kind), parts, draw(st.integers(1, number))


@QUICK
@given(spread())
def test_the_kth_smallest_is_that_of_torch(case):
    values, parts, k = case
    expected = float(values.double().kthvalue(k).values)
    for actual in on_threads(parts, lambda collectives, own: kth_smallest(values[own], k, collectives=collectives)):
        np.testing.assert_array_equal(actual, expected)  # NaN equals itself, and −0 equals 0
    np.testing.assert_array_equal(checked(kth_smallest)(values, k), expected)


@QUICK
@given(spread(), st.booleans())
def test_the_leading_are_those_of_a_stable_sort(case, lowest):
    values, parts, k = case
    expected = torch.zeros(len(values), dtype=torch.bool)
    expected[values.double().sort(descending=not lowest, stable=True).indices[:k]] = True
    actual = on_threads(
        parts, lambda collectives, own: top_k_mask(values[own], k, lowest=lowest, collectives=collectives)
    )
    assert torch.equal(torch.cat(actual), expected)
    assert torch.equal(checked(top_k_mask)(values, k, lowest=lowest), expected)


@QUICK
@given(spread())
@example((torch.tensor([-0.0, 0.0, 1e-45, -1e-45]), [4], 1))
def test_bits_are_ordered_as_the_values_are(case):
    values, _, _ = case
    bits = ordered_bits(values)
    for value, its in zip(values.double().tolist(), bits.tolist(), strict=True):
        for other, others in zip(values.double().tolist(), bits.tolist(), strict=True):
            above = np.isnan(value) and not np.isnan(other)
            assert (its > others) == (value > other or above), (value, other)


def test_what_shares_all_digits_but_the_last_is_told_apart():
    values = torch.tensor([1.0, np.nextafter(np.float32(1), np.float32(2)), 1.0], dtype=torch.float32)
    assert top_k_mask(values, 1).tolist() == [False, True, False]
    assert top_k_mask(values, 2).tolist() == [True, True, False]
    assert top_k_mask(values, 2, lowest=True).tolist() == [True, False, True]


def test_nobody_leads_where_there_is_nobody():
    assert top_k_mask(torch.empty(0), 0).tolist() == []
    result = on_threads([0, 2], lambda collectives, own: top_k_mask(torch.ones(2)[own], 1, collectives=collectives))
    assert [part.tolist() for part in result] == [[], [True, False]]


@pytest.mark.parametrize("size", [1 << 12])
def test_many_values(size):
    values = torch.randn(size, generator=torch.Generator().manual_seed(0))
    for k in (1, 7, size // 2, size):
        assert top_k_mask(values, k, collectives=LOCAL).sum() == k
        assert kth_smallest(values, k) == float(values.kthvalue(k).values)
