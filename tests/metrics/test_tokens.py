"""Entropy, branching factor and perplexity against float64 loops in NumPy."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from explorl.metrics import branching_factor, branching_factor_of_probs, masked_mean, perplexity, token_entropy
from explorl.metrics import tokens as module


def softmax(row: np.ndarray) -> np.ndarray:
    weights = np.exp(np.asarray(row, dtype=np.float64) - np.max(row))
    return weights / weights.sum()


def entropy(row: np.ndarray) -> float:
    return -sum(p * math.log(p) for p in softmax(row) if p > 0)


def branching(row: np.ndarray, mass: float) -> int:
    held = 0.0
    for size, p in enumerate(sorted(softmax(row), reverse=True), start=1):
        held += p
        if held >= mass:
            return size
    return len(row)


LOGITS = torch.randn(3, 5, 1000, generator=torch.Generator().manual_seed(0)) * torch.tensor([0.3, 2, 8]).view(3, 1, 1)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_against_loops_in_every_dtype(dtype):
    logits = LOGITS.to(dtype)
    rows = logits.double().view(-1, 1000).numpy()
    result = token_entropy(logits)
    assert result.shape == (3, 5)
    assert result.dtype == torch.float32
    np.testing.assert_allclose(result.flatten(), [entropy(row) for row in rows], rtol=1e-5, atol=1e-6)
    for mass in (0.5, 0.95, 0.999):
        sizes = branching_factor(logits, mass)
        assert sizes.dtype == torch.int64
        assert sizes.flatten().tolist() == [branching(row, mass) for row in rows]


def test_probabilities_and_numpy_give_the_same():
    probs = LOGITS.double().softmax(-1)
    assert torch.equal(branching_factor_of_probs(probs), branching_factor(LOGITS))
    assert torch.equal(branching_factor_of_probs(7 * probs), branching_factor(LOGITS))  # relative to their sum
    array = LOGITS.numpy()
    assert isinstance(token_entropy(array), np.ndarray)
    np.testing.assert_array_equal(token_entropy(array), token_entropy(LOGITS).numpy())
    np.testing.assert_array_equal(branching_factor(array[0, 0]), branching_factor(LOGITS)[0, 0].numpy())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_equal_tokens_are_counted_exactly(dtype):
    for size in range(1, 400):
        logits = torch.zeros(size, dtype=dtype)
        assert branching_factor(logits).item() == -(-size * 95 // 100), size
        assert token_entropy(logits).item() == pytest.approx(math.log(size), abs=1e-5)
    assert branching_factor_of_probs(torch.ones(20, dtype=dtype)).item() == 19


def test_tokens_without_mass():
    logits = torch.tensor([[0.0, -math.inf, 0.0, -math.inf], [5.0, -math.inf, -math.inf, -math.inf]])
    np.testing.assert_allclose(token_entropy(logits), [math.log(2), 0], atol=1e-6)
    assert branching_factor(logits).tolist() == [2, 1]
    assert branching_factor(logits, mass=1).tolist() == [2, 1]
    assert branching_factor(torch.tensor([0.0, -2000.0]), mass=1) == 2  # improbable is not impossible
    assert branching_factor_of_probs(torch.tensor([0.5, 0.0, 0.5]), mass=1) == 2
    assert torch.isnan(token_entropy(torch.full((4,), -math.inf)))


def test_mass_a_breath_below_one_stays_in_the_vocabulary():
    sizes = branching_factor(torch.randn(50, 300, generator=torch.Generator().manual_seed(1)), mass=1 - 2**-53)
    assert ((sizes > 290) & (sizes <= 300)).all()


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(-30, 30, width=32), min_size=1, max_size=200), st.floats(0.01, 0.99), st.randoms())
def test_order_shift_and_padding_do_not_matter(row, mass, random):
    logits = torch.tensor(row)
    mixed = torch.tensor(random.sample(row, len(row)))
    padded = torch.cat([logits, torch.full((7,), -math.inf)])
    for other in (mixed, padded):
        assert torch.allclose(token_entropy(other), token_entropy(logits), atol=1e-5)
        assert int(branching_factor(other, mass)) == int(branching_factor(logits, mass))
    assert torch.allclose(token_entropy(logits + 3), token_entropy(logits), atol=1e-4)
    size = int(branching_factor(logits, mass))
    top = np.sort(softmax(np.array(row)))[::-1]
    assert top[:size].sum() >= mass - 1e-9
    assert top[: size - 1].sum() < mass + 1e-9


def test_chunks_and_slices_change_nothing_and_copy_little():
    shapes = []
    original = module._entropy

    def watch(rows):
        shapes.append(rows.shape)
        return original(rows)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_entropy", watch)
        result = token_entropy(LOGITS, chunk=4000)
        assert shapes == [(4, 1000), (4, 1000), (4, 1000), (3, 1000)]
        assert torch.equal(token_entropy(LOGITS, chunk=1), result)
        shapes.clear()
        assert torch.equal(token_entropy(LOGITS[:, :-1]), result[:, :-1])
        assert shapes == [(4, 1000)] * 3
    assert torch.equal(branching_factor(LOGITS[:, :-1], chunk=2000), branching_factor(LOGITS)[:, :-1])
    assert torch.equal(token_entropy(LOGITS.transpose(0, 1)), result.T)
    assert token_entropy(torch.zeros(0, 4, 8)).shape == (0, 4)


def test_no_gradient_flows():
    logits = LOGITS.clone().requires_grad_()
    assert not token_entropy(logits).requires_grad
    assert not branching_factor(logits).requires_grad


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda: branching_factor(torch.zeros(4), mass=0), "got 0"),
        (lambda: branching_factor_of_probs(torch.ones(4), mass=95), "got 95"),
        (lambda: branching_factor(torch.tensor([0.0, math.nan])), "NaN"),
        (lambda: branching_factor(torch.full((4,), -math.inf)), "no mass"),
        (lambda: branching_factor_of_probs(torch.zeros(4)), "no mass"),
        (lambda: branching_factor_of_probs(torch.tensor([0.5, -1.0])), "-1"),
        (lambda: token_entropy(torch.zeros(3, 0)), r"\(3, 0\)"),
        (lambda: token_entropy(torch.tensor(1.0)), r"\(\)"),
        (lambda: perplexity(torch.zeros(2, 3), torch.ones(2, 4)), r"\(2, 3\).*\(2, 4\)"),
    ],
)
def test_errors_name_the_bad_value(call, named):
    with pytest.raises(ValueError, match=named):
        call()


def test_perplexity_by_hand_and_padding():
    logps = torch.tensor(
        [[math.log(0.5), math.log(0.125), math.nan], [math.log(0.2), -math.inf, -math.inf], [-1, -1, -1]],
        dtype=torch.float64,
    )
    mask = torch.tensor([[1.0, 1, 0], [1, 0, 0], [0, 0, 0]])
    for form in (mask, mask.bool(), mask.long()):
        np.testing.assert_allclose(perplexity(logps.float(), form), [4, 5, math.nan], rtol=1e-6)
    result = perplexity(logps.numpy(), mask.numpy())
    assert isinstance(result, np.ndarray)
    assert result.dtype == np.float64
    np.testing.assert_allclose(result, [4, 5, math.nan], rtol=1e-12)
    assert perplexity(logps.bfloat16(), mask).dtype == torch.float32


def test_masked_mean_of_integers_and_its_gradient():
    assert masked_mean(torch.tensor([1, 2, 9]), torch.tensor([1, 1, 0])).item() == 1.5
    values = torch.tensor([1.0, math.nan], requires_grad=True)
    masked_mean(values, torch.tensor([1, 0])).backward()
    assert values.grad.tolist() == [1, 0]
