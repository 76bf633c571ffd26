# mypy: disable-error-code="import-not-found, import-untyped, no-untyped-def, untyped-decorator"
"""The matrix products of a decoder layer with the operations before and after them, as one Triton kernel each.

A decode step of a small model is hundreds of kernels that each wait a few microseconds for memory. Here a layer has
four: norm and query, key and value; output and sum; norm, gate, up and their product; down and sum. The weights are
read from the parameters, each by its own pointer, without copying or reordering, so that every change of a parameter,
in place or not, takes effect.

One program sums a product in float32 over the whole inner dimension in order, and rounds where the modules round: a
row's result depends neither on the other rows nor on the order in which programs run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

# Launch parameters


class Tile(NamedTuple):
    """Launch parameters of a product; they do not change the result."""

    rows: int
    columns: int
    depth: int
    """Size of the inner dimension per step of the loop."""
    warps: int
    stages: int
    """Number of loop steps whose loads are in flight at once."""


HEADS, ADDED, GATED = "heads", "added", "gated"

TILES: dict[str, tuple[tuple[int, Tile], ...]] = {
    HEADS: (
        (16, Tile(16, 16, 256, 4, 3)),
        (32, Tile(32, 16, 64, 4, 8)),
        (64, Tile(32, 32, 64, 4, 6)),
        (1024, Tile(64, 32, 64, 4, 5)),
    ),
    ADDED: (
        (16, Tile(16, 16, 64, 4, 8)),
        (32, Tile(32, 16, 128, 4, 5)),
        (64, Tile(64, 16, 128, 4, 4)),
    ),
    GATED: (
        (16, Tile(16, 16, 256, 4, 3)),
        (32, Tile(32, 16, 64, 4, 8)),
        (64, Tile(64, 16, 64, 4, 6)),
        (1024, Tile(128, 64, 64, 8, 3)),
    ),
}
"""For each product, the most rows for each tile. For more rows than the last, the modules are used."""
FEW = 64
"""Most rows for which a product norms its input itself; for more, the norm is a separate kernel."""
WIDEST = 2048
"""Largest width of a model; the products of wider ones are long enough to hide the latency."""
DTYPES = (torch.bfloat16, torch.float16)
"""Not float32, for which there is no faster exact product than the modules'."""


def tile_for(kind: str, rows: int, width: int, dtype: torch.dtype) -> Tile | None:
    """Return the fastest of the measured tiles; None if the modules are as fast."""
    if width > WIDEST or dtype not in DTYPES:
        return None
    return next((tile for most, tile in TILES[kind] if rows <= most), None)


# Kernels


@triton.jit
def _scales(x, row, inside, eps, DEPTH: tl.constexpr, CHUNK: tl.constexpr):
    """Compute 1 / sqrt(mean x² + eps) of each row."""
    squares = tl.zeros([row.shape[0], CHUNK], tl.float32)
    for start in tl.static_range(0, DEPTH, CHUNK):
        at = start + tl.arange(0, CHUNK)
        value = tl.load(x + row[:, None] * DEPTH + at[None, :], mask=inside[:, None] & (at < DEPTH)[None, :], other=0.0)
        squares += value.to(tl.float32) * value.to(tl.float32)
    return tl.rsqrt(tl.sum(squares, 1) / DEPTH + eps)


@triton.jit
def _operand(x, norm, row, inside, at, scale, DEPTH: tl.constexpr, NORM: tl.constexpr):
    """Load columns ``at`` of the rows, normed if NORM, with the roundings of Llama's norm."""
    value = tl.load(x + row[:, None] * DEPTH + at[None, :], mask=inside[:, None] & (at < DEPTH)[None, :], other=0.0)
    if NORM:
        rounded = (value.to(tl.float32) * scale[:, None]).to(value.dtype).to(tl.float32)
        weight = tl.load(norm + at, mask=at < DEPTH, other=0.0).to(tl.float32)
        value = (rounded * weight[None, :]).to(value.dtype)
    return value


@triton.jit
def _weight(weight, column, at, columns, DEPTH: tl.constexpr):
    mask = (column < columns)[:, None] & (at < DEPTH)[None, :]
    return tl.load(weight + column.to(tl.int64)[:, None] * DEPTH + at[None, :], mask=mask, other=0.0)


@triton.jit(do_not_specialize=["rows"])
def _products_kernel(
    x, norm, residual, weight_0, weight_1, weight_2, bias_0, bias_1, bias_2, out_0, out_1, out_2,
    columns_0, columns_1, columns_2, rows, eps,
    DEPTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr, CHUNK: tl.constexpr,
    NORM: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(1)
    tiles_0 = tl.cdiv(columns_0, COLUMNS)
    tiles_1 = tl.cdiv(columns_1, COLUMNS)
    if tile < tiles_0:
        weight, bias, out, columns = weight_0, bias_0, out_0, columns_0
    elif tile < tiles_0 + tiles_1:
        weight, bias, out, columns = weight_1, bias_1, out_1, columns_1
        tile -= tiles_0
    else:
        weight, bias, out, columns = weight_2, bias_2, out_2, columns_2
        tile -= tiles_0 + tiles_1
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tile * COLUMNS + tl.arange(0, COLUMNS)
    inside = row < rows
    scale = tl.zeros([ROWS], tl.float32)
    if NORM:
        scale = _scales(x, row, inside, eps, DEPTH, CHUNK)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, DEPTH, STEP):
        at = start + tl.arange(0, STEP)
        right = _weight(weight, column, at, columns, DEPTH)
        left = _operand(x, norm, row, inside, at, scale, DEPTH, NORM)
        total = tl.dot(left, tl.trans(right), total, input_precision=PRECISION)
    if BIAS:
        total += tl.load(bias + column, mask=column < columns, other=0.0).to(tl.float32)[None, :]
    place = row[:, None] * columns + column[None, :]
    written = inside[:, None] & (column < columns)[None, :]
    value = total.to(out.dtype.element_ty)
    if RESIDUAL:
        before = tl.load(residual + place, mask=written, other=0.0).to(tl.float32)
        value = (before + value.to(tl.float32)).to(out.dtype.element_ty)
    tl.store(out + place, value, mask=written)


@triton.jit(do_not_specialize=["rows"])
def _gated_kernel(
    x, norm, gate, up, gate_bias, up_bias, out, columns, rows, eps,
    DEPTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr, CHUNK: tl.constexpr,
    NORM: tl.constexpr, BIAS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = row < rows
    scale = tl.zeros([ROWS], tl.float32)
    if NORM:
        scale = _scales(x, row, inside, eps, DEPTH, CHUNK)
    # Gate and up are alternating columns of one product, because two products in one loop would wait for each other.
    turn = tl.arange(0, 2 * COLUMNS)
    both = tl.program_id(1) * COLUMNS + turn // 2
    is_up = (turn % 2 == 1)[:, None]
    line = both.to(tl.int64)[:, None] * DEPTH
    total = tl.zeros([ROWS, 2 * COLUMNS], tl.float32)
    for start in range(0, DEPTH, STEP):
        at = start + tl.arange(0, STEP)
        source = tl.where(is_up, up + line + at[None, :], gate + line + at[None, :])
        right = tl.load(source, mask=(both < columns)[:, None] & (at < DEPTH)[None, :], other=0.0)
        left = _operand(x, norm, row, inside, at, scale, DEPTH, NORM)
        total = tl.dot(left, tl.trans(right), total, input_precision=PRECISION)
    gates, ups = tl.split(tl.reshape(total, [ROWS, COLUMNS, 2]))
    if BIAS:
        gates += tl.load(gate_bias + column, mask=column < columns, other=0.0).to(tl.float32)[None, :]
        ups += tl.load(up_bias + column, mask=column < columns, other=0.0).to(tl.float32)[None, :]
    rounded = gates.to(out.dtype.element_ty).to(tl.float32)
    active = (rounded * tl.sigmoid(rounded)).to(out.dtype.element_ty).to(tl.float32)
    value = active * ups.to(out.dtype.element_ty).to(tl.float32)
    place = row[:, None] * columns + column[None, :]
    written = inside[:, None] & (column < columns)[None, :]
    tl.store(out + place, value.to(out.dtype.element_ty), mask=written)


# Calls


class Weight(NamedTuple):
    """A linear layer."""

    matrix: Float[Tensor, "columns depth"]
    bias: Float[Tensor, " columns"] | None = None


class Norm(NamedTuple):
    """x / sqrt(mean x² + eps), rounded, times ``weight``, rounded."""

    weight: Float[Tensor, " depth"]
    eps: float


def products(
    x: Float[Tensor, "rows depth"],
    weights: Sequence[Weight],
    tile: Tile,
    norm: Norm | None = None,
    residual: Float[Tensor, "rows columns"] | None = None,
) -> list[Tensor]:
    """Compute norm(x) · Wᵀ + b for each of up to three weights, each contiguous.

    Either all weights have a bias or none. ``residual``, only for one weight, is added after rounding.
    """
    assert 1 <= len(weights) <= 3
    assert residual is None or len(weights) == 1
    _check(x, weights)
    rows = len(x)
    outs = [torch.empty(rows, len(weight.matrix), dtype=x.dtype, device=x.device) for weight in weights]
    columns = [len(weight.matrix) for weight in weights]
    padded = [*weights, *[weights[-1]] * (3 - len(weights))]
    biases = [x if weight.bias is None else weight.bias for weight in padded]
    sizes = columns + [0] * (3 - len(weights))
    _products_kernel[(triton.cdiv(rows, tile.rows), sum(triton.cdiv(size, tile.columns) for size in columns))](
        x, x if norm is None else norm.weight, x if residual is None else residual,
        *(weight.matrix for weight in padded), *biases, *outs, *[outs[-1]] * (3 - len(weights)),
        *sizes, rows, 0.0 if norm is None else norm.eps,
        BIAS=weights[0].bias is not None, RESIDUAL=residual is not None, NORM=norm is not None,
        **_launch(x, tile),
    )  # fmt: skip
    return outs


def gated_products(
    x: Float[Tensor, "rows depth"], gate: Weight, up: Weight, tile: Tile, norm: Norm | None = None
) -> Float[Tensor, "rows columns"]:
    """Compute silu(g) · u, with g and u = norm(x) · Wᵀ + b for two weights of one shape."""
    _check(x, (gate, up))
    rows, columns = len(x), len(gate.matrix)
    out = torch.empty(rows, columns, dtype=x.dtype, device=x.device)
    _gated_kernel[(triton.cdiv(rows, tile.rows), triton.cdiv(columns, tile.columns))](
        x, x if norm is None else norm.weight, gate.matrix, up.matrix,
        x if gate.bias is None else gate.bias, x if up.bias is None else up.bias,
        out, columns, rows, 0.0 if norm is None else norm.eps,
        BIAS=gate.bias is not None, NORM=norm is not None, **_launch(x, tile),
    )  # fmt: skip
    return out


def _check(x: Tensor, weights: Sequence[Weight]) -> None:
    assert x.is_contiguous()
    assert all(weight.matrix.is_contiguous() and weight.matrix.shape[1] == x.shape[1] for weight in weights)
    assert len({weight.bias is None for weight in weights}) == 1


def _launch(x: Tensor, tile: Tile) -> dict[str, object]:
    return {
        "DEPTH": x.shape[1],
        "ROWS": tile.rows,
        "COLUMNS": tile.columns,
        "STEP": tile.depth,
        "CHUNK": max(32, 4096 // tile.rows),
        "PRECISION": "ieee" if x.dtype == torch.float32 else "tf32",
        "num_warps": tile.warps,
        "num_stages": tile.stages,
    }
