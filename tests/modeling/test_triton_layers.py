"""The kernels of whole layer products against NumPy, and their roundings against the modules."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm

pytest.importorskip("triton")

from explorl.modeling.triton_layers import Norm, Tile, Weight, gated_products, products

TILES = [Tile(16, 32, 32, 4, 2), Tile(32, 64, 64, 4, 3)]
CASES = pytest.mark.parametrize(("tile", "bias"), [(TILES[0], False), (TILES[1], True)], ids=["small", "bias"])


@pytest.fixture(params=[torch.float32, torch.float16], ids=["float32", "float16"])
def case(request: pytest.FixtureRequest, kernel_device: torch.device) -> Any:
    """Draws tensors; sizes below are multiples of nothing."""

    def draw(*shape: int, seed: int = 0) -> torch.Tensor:
        numbers = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
        return numbers.to(kernel_device, request.param)

    return draw


def normed(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    """In x's type, rounded before the weight and after it."""
    wide = x.astype(np.float32)
    rounded = (wide / np.sqrt((wide**2).mean(1, keepdims=True) + eps)).astype(x.dtype)
    return (rounded.astype(np.float32) * weight.astype(np.float32)).astype(x.dtype)


def product(x: np.ndarray, weight: Weight) -> np.ndarray:
    matrix = weight.matrix.cpu().numpy()
    total = x.astype(np.float64) @ matrix.astype(np.float64).T
    if weight.bias is not None:
        total += weight.bias.cpu().numpy().astype(np.float64)
    return total.astype(x.dtype)


def close(got: torch.Tensor, want: np.ndarray) -> None:
    """To a few roundings of the type, of the largest."""
    allowed = {np.float32: 2e-6, np.float16: 2e-3}[want.dtype.type] * float(np.abs(want.astype(np.float64)).max())
    np.testing.assert_allclose(got.cpu().numpy().astype(np.float64), want.astype(np.float64), rtol=0, atol=allowed)


@CASES
def test_products_of_several_weights(case: Any, tile: Tile, bias: bool) -> None:
    x, norm = case(19, 50), Norm(1 + 0.3 * case(50, seed=1), 1e-5)
    sizes = (70, 24, 5)
    weights = [Weight(case(n, 50, seed=2 + n) / 7, case(n, seed=3 + n) if bias else None) for n in sizes]
    h = normed(x.cpu().numpy(), norm.weight.cpu().numpy(), norm.eps)
    for kind, left in ((norm, h), (None, x.cpu().numpy())):
        outs = products(x, weights, tile, kind)
        assert [out.shape for out in outs] == [(19, n) for n in sizes[: len(weights)]]
        for out, weight in zip(outs, weights, strict=True):
            assert out.is_contiguous()
            close(out, product(left, weight))
        del weights[-1]  # and of fewer


@CASES
def test_a_product_added(case: Any, tile: Tile, bias: bool) -> None:
    x, before = case(19, 50), 3 * case(19, 40, seed=1)
    weight = Weight(case(40, 50, seed=2) / 7, case(40, seed=3) if bias else None)
    inner = product(x.cpu().numpy(), weight)
    (out,) = products(x, [weight], tile, residual=before)
    close(out, (before.cpu().numpy().astype(np.float32) + inner.astype(np.float32)).astype(inner.dtype))


@CASES
def test_gated_products(case: Any, tile: Tile, bias: bool) -> None:
    x, norm = case(19, 50), Norm(1 + 0.3 * case(50, seed=1), 1e-5)
    gate, up = (Weight(case(40, 50, seed=s) / 7, case(40, seed=s + 1) if bias else None) for s in (2, 4))
    h = normed(x.cpu().numpy(), norm.weight.cpu().numpy(), norm.eps)
    for kind, left in ((norm, h), (None, x.cpu().numpy())):
        g, u = product(left, gate).astype(np.float32), product(left, up).astype(np.float32)
        active = (g / (1 + np.exp(-g))).astype(left.dtype).astype(np.float32)
        close(gated_products(x, gate, up, tile, kind), (active * u).astype(left.dtype))


def test_half_precision_is_rounded_where_the_modules_round(kernel_device: torch.device) -> None:
    """Sums of few terms are exact in float32, so that every bit must be the modules'."""
    generator = torch.Generator().manual_seed(0)

    def grid(*shape: int) -> torch.Tensor:
        return (torch.randint(-8, 9, shape, generator=generator) / 8).half().to(kernel_device)

    def fine(*shape: int) -> torch.Tensor:
        """Of numbers between 1 and 2, whose products with the others have more digits than the type."""
        return (1 + torch.randint(0, 1024, shape, generator=generator) / 1024).half().to(kernel_device)

    x, y, norm = grid(7, 16), grid(7, 16), LlamaRMSNorm(16).half().to(kernel_device)
    linear = nn.Linear(16, 24).half().to(kernel_device)
    with torch.no_grad():
        norm.weight.copy_(grid(16) + 2)
        linear.weight.copy_(fine(24, 16))
        linear.bias.copy_(grid(24))
        back = Weight(fine(16, 16))
        h, tile = norm(x), Tile(16, 16, 16, 4, 2)
        # NumPy's square root is not torch's to the last bit: a norm may differ there, once in a while.
        (got,) = products(x, [Weight(linear.weight, linear.bias)], tile, Norm(norm.weight, norm.variance_epsilon))
        assert (got == linear(h)).float().mean() > 0.95
        (got,) = products(x, [Weight(linear.weight, linear.bias)], tile)
        assert torch.equal(got, linear(x))
        (got,) = products(y, [back], tile, residual=x)
        assert torch.equal(got, x + nn.functional.linear(y, back.matrix))


def test_a_row_does_not_depend_on_the_others(case: Any) -> None:
    x, norm, tile = case(19, 50), Norm(1 + 0.3 * case(50, seed=1), 1e-5), TILES[0]
    weight, other = Weight(case(20, 50, seed=2)), Weight(case(20, 50, seed=3))
    (whole,), gated = products(x, [weight], tile, norm), gated_products(x, weight, other, tile, norm)
    few, others = x[:5], torch.cat([x[:5], 9 * x[5:]])
    for part in (few, others):
        assert torch.equal(products(part, [weight], tile, norm)[0][:5], whole[:5])
        assert torch.equal(gated_products(part, weight, other, tile, norm)[:5], gated[:5])
