# mypy: disable-error-code="import-not-found, import-untyped, no-untyped-def, untyped-decorator"
"""Small operations of a decoder layer as one Triton kernel each: RMS norm, rotary embedding, gated activation."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _rms_norm_kernel(
    x, weight, out, columns, eps, shift, WIDTH: tl.constexpr, ROUND: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, WIDTH)
    inside = at < columns
    value = tl.load(x + row * columns + at, mask=inside, other=0.0).to(tl.float32)
    value *= tl.rsqrt(tl.sum(value * value, 0) / columns + eps)
    if ROUND:
        value = value.to(out.dtype.element_ty).to(tl.float32)
    value *= tl.load(weight + at, mask=inside, other=0.0).to(tl.float32) + shift
    tl.store(out + row * columns + at, value.to(out.dtype.element_ty), mask=inside)


def rms_norm(x: Tensor, weight: Tensor, eps: float, shift: float, round_first: bool) -> Tensor:
    """Compute x / sqrt(mean x² + eps) · (weight + shift); ``round_first`` rounds before the weight, as Llama does."""
    x = x.contiguous()
    columns = x.shape[-1]
    out = torch.empty_like(x)
    width = triton.next_power_of_2(columns)
    _rms_norm_kernel[(x.numel() // columns,)](
        x, weight, out, columns, eps, shift, WIDTH=width, ROUND=round_first, num_warps=min(8, max(1, width // 256))
    )
    return out


@triton.jit
def _add_rms_norm_kernel(x, y, weight, total, out, columns, eps, WIDTH: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * columns
    at = tl.arange(0, WIDTH)
    inside = at < columns
    value = tl.load(x + row + at, mask=inside, other=0.0).to(tl.float32)
    value += tl.load(y + row + at, mask=inside, other=0.0).to(tl.float32)
    rounded = value.to(total.dtype.element_ty)
    tl.store(total + row + at, rounded, mask=inside)
    value = rounded.to(tl.float32)
    value *= tl.rsqrt(tl.sum(value * value, 0) / columns + eps)
    value = value.to(total.dtype.element_ty).to(tl.float32)
    value *= tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row + at, value.to(out.dtype.element_ty), mask=inside)


def add_rms_norm(
    x: Tensor, y: Tensor, weight: Tensor, eps: float, dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """Return x + y, and its RMS norm in ``dtype``, by default that of x."""
    x, y = x.contiguous(), y.contiguous()
    columns = x.shape[-1]
    total, out = torch.empty_like(x), torch.empty_like(x, dtype=dtype)
    width = triton.next_power_of_2(columns)
    _add_rms_norm_kernel[(x.numel() // columns,)](
        x, y, weight, total, out, columns, eps, WIDTH=width, num_warps=min(8, max(1, width // 256))
    )
    return total, out


@triton.jit
def load_halves(x, x_head, heads, HEADS: tl.constexpr, HALF: tl.constexpr, PAD: tl.constexpr):
    """Load the first and the second half of each head of a token."""
    head, at = tl.arange(0, HEADS)[:, None], tl.arange(0, PAD)[None, :]
    inside = (head < heads) & (at < HALF)
    first = tl.load(x + head * x_head + at, mask=inside, other=0.0)
    second = tl.load(x + head * x_head + HALF + at, mask=inside, other=0.0)
    return first.to(tl.float32), second.to(tl.float32)


@triton.jit
def store_halves(out, first, second, heads, HEADS: tl.constexpr, HALF: tl.constexpr, PAD: tl.constexpr):
    """Store both halves of each head; the heads are contiguous."""
    head, at = tl.arange(0, HEADS)[:, None], tl.arange(0, PAD)[None, :]
    inside = (head < heads) & (at < HALF)
    to = out + head * (2 * HALF) + at
    tl.store(to, first.to(out.dtype.element_ty), mask=inside)
    tl.store(to + HALF, second.to(out.dtype.element_ty), mask=inside)


@triton.jit
def rotate(first, second, angles):
    """Rotate the halves against each other; for ``angles`` see `load_angles`."""
    cos_1, cos_2, sin_1, sin_2 = angles
    return first * cos_1 - second * sin_1, second * cos_2 + first * sin_2


@triton.jit
def load_angles(cos, sin, HALF: tl.constexpr, PAD: tl.constexpr):
    """Load the cosine of both halves and the sine of both halves."""
    at = tl.arange(0, PAD)[None, :]
    inside = at < HALF
    cos_1 = tl.load(cos + at, mask=inside, other=0.0).to(tl.float32)
    cos_2 = tl.load(cos + HALF + at, mask=inside, other=0.0).to(tl.float32)
    sin_1 = tl.load(sin + at, mask=inside, other=0.0).to(tl.float32)
    sin_2 = tl.load(sin + HALF + at, mask=inside, other=0.0).to(tl.float32)
    return cos_1, cos_2, sin_1, sin_2


@triton.jit
def _rotary_kernel(
    query, key, cos, sin, query_out, key_out, length,
    query_row, query_head, query_token, key_row, key_head, key_token, rotary_row, rotary_token, query_heads, key_heads,
    QUERY_HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, HALF: tl.constexpr, PAD: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0).to(tl.int64)
    row, token = place // length, place % length
    rotary = row * rotary_row + token * rotary_token
    angles = load_angles(cos + rotary, sin + rotary, HALF, PAD)
    size: tl.constexpr = 2 * HALF
    query += row * query_row + token * query_token
    first, second = load_halves(query, query_head, query_heads, QUERY_HEADS, HALF, PAD)
    first, second = rotate(first, second, angles)
    store_halves(query_out + place * query_heads * size, first, second, query_heads, QUERY_HEADS, HALF, PAD)
    first, second = load_halves(key + row * key_row + token * key_token, key_head, key_heads, KEY_HEADS, HALF, PAD)
    first, second = rotate(first, second, angles)
    store_halves(key_out + place * key_heads * size, first, second, key_heads, KEY_HEADS, HALF, PAD)


def head_sizes(query: Tensor, key: Tensor) -> dict[str, int]:
    """Return the sizes that kernels on (rows, heads, tokens, size) are compiled for."""
    half = query.shape[-1] // 2
    heads = {"QUERY_HEADS": triton.next_power_of_2(query.shape[1]), "KEY_HEADS": triton.next_power_of_2(key.shape[1])}
    return {**heads, "HALF": half, "PAD": triton.next_power_of_2(half)}


def rotary(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Apply the rotary embedding (halves rotated against each other) to (rows, heads, tokens, size).

    The results are contiguous token by token.
    """
    rows, query_heads, length, size = query.shape
    key_heads = key.shape[1]
    query, key = (t if t.stride(-1) == 1 else t.contiguous() for t in (query, key))
    cos, sin = (t.expand(rows, length, size) for t in (cos, sin))
    if cos.stride() != sin.stride() or cos.stride(-1) != 1:
        cos, sin = cos.contiguous(), sin.contiguous()
    query_out = torch.empty(rows, length, query_heads, size, dtype=query.dtype, device=query.device)
    key_out = torch.empty(rows, length, key_heads, size, dtype=key.dtype, device=key.device)
    _rotary_kernel[(rows * length,)](
        query, key, cos, sin, query_out, key_out, length,
        *query.stride()[:3], *key.stride()[:3], *cos.stride()[:2], query_heads, key_heads,
        **head_sizes(query, key), num_warps=2,
    )  # fmt: skip
    return query_out.transpose(1, 2), key_out.transpose(1, 2)


@triton.jit
def _gate_kernel(gate, up, out, size, BLOCK: tl.constexpr, GELU: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    x = tl.load(gate + at, mask=inside, other=0.0).to(tl.float32)
    if GELU:
        inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        act = x * tl.sigmoid(2.0 * inner)
    else:
        act = x * tl.sigmoid(x)
    act = act.to(out.dtype.element_ty).to(tl.float32)
    value = act * tl.load(up + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, value.to(out.dtype.element_ty), mask=inside)


def gated(gate: Tensor, up: Tensor, gelu: bool) -> Tensor:
    """Compute silu(gate) · up, or gelu(gate) · up in the tanh approximation."""
    gate, up = gate.contiguous(), up.contiguous()
    out = torch.empty_like(gate)
    size = gate.numel()
    _gate_kernel[(triton.cdiv(size, 1024),)](gate, up, out, size, BLOCK=1024, GELU=gelu, num_warps=4)
    return out
