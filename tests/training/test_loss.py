"""The pieces of the loss, worked by hand."""

from __future__ import annotations

import math

import pytest
import torch

from explorl.training.grpo.loss import LoggedRows, clipped_surrogate, importance_ratio, k3, normalised

MASK = torch.tensor([[1.0, 1.0, 0.0], [1.0, 0.0, 0.0]])


def test_clipping_takes_the_worse_of_two() -> None:
    ratio = torch.tensor([[0.5, 1.5, 1.1], [0.5, 1.5, 3.0]])
    advantages = torch.tensor([[2.0], [-2.0]])
    actual = clipped_surrogate(ratio, advantages, 0.2, 0.3)
    # A > 0: r up to 1.3; A < 0: r from 0.8 on.
    expected = torch.tensor([[-1.0, -2.6, -2.2], [1.6, 3.0, 6.0]])
    torch.testing.assert_close(actual.loss, expected)
    assert actual.low_clipped.tolist() == [[False] * 3, [True, False, False]]
    assert actual.high_clipped.tolist() == [[False, True, False], [False] * 3]
    bounded = clipped_surrogate(ratio, advantages, 0.2, 0.3, delta=2.0)
    assert bounded.loss[1, 2] == 4.0  # −(2 · −2)


def test_a_clip_range_of_each_token() -> None:
    high = torch.tensor([[0.0, 1.0]])
    result = clipped_surrogate(torch.full((1, 2), 1.5), torch.ones(1, 1), 0.2, high)
    torch.testing.assert_close(result.loss, torch.tensor([[-1.0, -1.5]]))


def test_ratios_of_tokens_and_of_sequences() -> None:
    old = torch.zeros(2, 3)
    logps = torch.log(torch.tensor([[2.0, 0.5, 9.0], [3.0, 9.0, 9.0]]))
    torch.testing.assert_close(importance_ratio(logps, old, MASK, "token"), logps.exp())
    mean = importance_ratio(logps, old, MASK, "sequence")
    torch.testing.assert_close(mean, torch.tensor([[1.0], [3.0]]))  # √(2 · ½), 3


def test_k3() -> None:
    result = k3(torch.log(torch.tensor([[0.5]])), torch.log(torch.tensor([[0.25]])))
    assert float(result) == pytest.approx(0.5 - math.log(0.5) - 1)
    assert float(k3(old := torch.tensor([[-1.0]]), old)) == 0


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("grpo", ((1 + 2) / 2 + 4) / 2 / 2),
        ("bnpo", (1 + 2 + 4) / 3 / 2),
        ("dr_grpo", (1 + 2 + 4) / (2 * 10) / 2),
        ("dapo", (1 + 2 + 4) / 5),
    ],
)
def test_normalised(kind: str, expected: float) -> None:
    losses = torch.tensor([[1.0, 2.0, 100.0], [4.0, 100.0, 100.0]])
    actual = normalised(losses, MASK, kind, rows=2, longest=10, tokens=torch.tensor(5.0), accumulated=2)
    assert float(actual) == pytest.approx(expected)


def test_rows_are_averaged_by_the_micro_batches_of_trl() -> None:
    values = {"token": torch.tensor([[1.0, 2.0, 100.0], [4.0, 100.0, 100.0]]), "sequence": torch.tensor([[3.0], [4.0]])}
    rows = LoggedRows.of(values, MASK, torch.tensor([1, 1]))
    sums, counts = rows.totals(2)
    assert sums.tolist() == [[0.0, 7.0], [0.0, 7.0]]
    assert counts.tolist() == [[0.0, 3.0], [0.0, 2.0]]
    joined = LoggedRows.joined([rows, LoggedRows.of(values, MASK[:, [0]] * 0, torch.tensor([0, 0]))])
    assert joined.extremes(0, 2, largest=True).tolist() == [-math.inf, 4.0]  # a row without tokens has no mean
    assert joined.extremes(0, 2, largest=False).tolist() == [math.inf, 1.5]
    assert joined.extremes(1, 2, largest=False).tolist() == [3.0, 3.0]
