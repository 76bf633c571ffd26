# mypy: disable-error-code="import-not-found, import-untyped, no-untyped-def, untyped-decorator"
"""Small operations of a decoder layer with gradients, one Triton kernel each way: norm of a sum, rotation, gate."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from explorl.modeling.triton_fused import (
    add_rms_norm,
    gated,
    head_sizes,
    load_angles,
    load_halves,
    rotate,
    store_halves,
)

ROWS = 32
"""Rows per program of the norm's backward pass, over which it sums the weight's gradient."""


@triton.jit
def _spread_kernel(
    query, key, value, cos, sin, source, query_out, key_out, value_out,
    query_token, query_head, key_token, key_head, value_token, value_head, rotary_token, query_heads, key_heads,
    QUERY_HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, HALF: tl.constexpr, PAD: tl.constexpr,
):  # fmt: skip
    slot = tl.program_id(0).to(tl.int64)
    token = tl.load(source + slot)
    size: tl.constexpr = 2 * HALF
    angles = load_angles(cos + token * rotary_token, sin + token * rotary_token, HALF, PAD)
    first, second = load_halves(query + token * query_token, query_head, query_heads, QUERY_HEADS, HALF, PAD)
    first, second = rotate(first, second, angles)
    store_halves(query_out + slot * query_heads * size, first, second, query_heads, QUERY_HEADS, HALF, PAD)
    first, second = load_halves(key + token * key_token, key_head, key_heads, KEY_HEADS, HALF, PAD)
    first, second = rotate(first, second, angles)
    store_halves(key_out + slot * key_heads * size, first, second, key_heads, KEY_HEADS, HALF, PAD)
    first, second = load_halves(value + token * value_token, value_head, key_heads, KEY_HEADS, HALF, PAD)
    store_halves(value_out + slot * key_heads * size, first, second, key_heads, KEY_HEADS, HALF, PAD)


@triton.jit
def _spread_backward_kernel(
    query, key, value, cos, sin, slots, starts, query_out, key_out, value_out, longest,
    query_row, query_head, query_place, key_row, key_head, key_place, value_row, value_head, value_place, rotary_token,
    query_heads, key_heads,
    QUERY_HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, HALF: tl.constexpr, PAD: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    size: tl.constexpr = 2 * HALF
    query_1 = tl.zeros([QUERY_HEADS, PAD], tl.float32)
    query_2 = tl.zeros([QUERY_HEADS, PAD], tl.float32)
    key_1 = tl.zeros([KEY_HEADS, PAD], tl.float32)
    key_2 = tl.zeros([KEY_HEADS, PAD], tl.float32)
    value_1 = tl.zeros([KEY_HEADS, PAD], tl.float32)
    value_2 = tl.zeros([KEY_HEADS, PAD], tl.float32)
    for i in range(tl.load(starts + token), tl.load(starts + token + 1)):
        slot = tl.load(slots + i)
        row, place = slot // longest, slot % longest
        query_at, key_at = row * query_row + place * query_place, row * key_row + place * key_place
        first, second = load_halves(query + query_at, query_head, query_heads, QUERY_HEADS, HALF, PAD)
        query_1 += first
        query_2 += second
        first, second = load_halves(key + key_at, key_head, key_heads, KEY_HEADS, HALF, PAD)
        key_1 += first
        key_2 += second
        value_at = row * value_row + place * value_place
        first, second = load_halves(value + value_at, value_head, key_heads, KEY_HEADS, HALF, PAD)
        value_1 += first
        value_2 += second
    cos_1, cos_2, sin_1, sin_2 = load_angles(cos + token * rotary_token, sin + token * rotary_token, HALF, PAD)
    back = cos_1, cos_2, -sin_2, -sin_1
    first, second = rotate(query_1, query_2, back)
    store_halves(query_out + token * query_heads * size, first, second, query_heads, QUERY_HEADS, HALF, PAD)
    first, second = rotate(key_1, key_2, back)
    store_halves(key_out + token * key_heads * size, first, second, key_heads, KEY_HEADS, HALF, PAD)
    store_halves(value_out + token * key_heads * size, value_1, value_2, key_heads, KEY_HEADS, HALF, PAD)


class RotatedRows(torch.autograd.Function):
    """Rotates queries and keys of packed tokens, and spreads them and the values over padded rows.

    (1, heads, tokens, size) → (rows, heads, longest, size), in ``dtype`` (None: unchanged). The gradients of a token
    that several rows share are summed in float32.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cos: Tensor,
        sin: Tensor,
        rows: Any,
        dtype: torch.dtype | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value = (t if t.stride(-1) == 1 else t.contiguous() for t in (query, key, value))
        cos, sin = cos.contiguous(), sin.contiguous()
        ctx.save_for_backward(cos, sin)
        ctx.rows, ctx.dtypes = rows, (query.dtype, key.dtype, value.dtype)
        spread = [
            torch.empty(rows.rows, rows.longest, t.shape[1], t.shape[3], dtype=dtype or t.dtype, device=t.device)
            for t in (query, key, value)
        ]
        _spread_kernel[(len(rows.source),)](
            query, key, value, cos, sin, rows.source, *spread,
            query.stride(2), query.stride(1), key.stride(2), key.stride(1), value.stride(2), value.stride(1),
            cos.stride(1), query.shape[1], key.shape[1], **head_sizes(query, key), num_warps=2,
        )  # fmt: skip
        return spread[0].transpose(1, 2), spread[1].transpose(1, 2), spread[2].transpose(1, 2)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        rows = ctx.rows
        query, key, value = (t if t.stride(-1) == 1 else t.contiguous() for t in gradients)
        slots, starts = rows.by_token
        tokens = len(rows.slots)
        packed = [
            torch.empty(1, tokens, t.shape[1], t.shape[3], dtype=dtype, device=t.device)
            for t, dtype in zip((query, key, value), ctx.dtypes, strict=True)
        ]
        _spread_backward_kernel[(tokens,)](
            query, key, value, cos, sin, slots, starts, *packed, rows.longest,
            *query.stride()[:3], *key.stride()[:3], *value.stride()[:3], cos.stride(1),
            query.shape[1], key.shape[1], **head_sizes(query, key), num_warps=2,
        )  # fmt: skip
        return (*(t.transpose(1, 2) for t in packed), None, None, None, None)


@triton.jit
def _gate_backward_kernel(gate, up, gradient, gate_out, up_out, size, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    x = tl.load(gate + at, mask=inside, other=0.0).to(tl.float32)
    factor = tl.load(up + at, mask=inside, other=0.0).to(tl.float32)
    slope = tl.load(gradient + at, mask=inside, other=0.0).to(tl.float32)
    share = tl.sigmoid(x)
    tl.store(up_out + at, (slope * x * share).to(up_out.dtype.element_ty), mask=inside)
    inner = slope * factor * share * (1.0 + x * (1.0 - share))
    tl.store(gate_out + at, inner.to(gate_out.dtype.element_ty), mask=inside)


class Gated(torch.autograd.Function):
    """silu(gate) · up."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        gate, up = gate.contiguous(), up.contiguous()
        ctx.save_for_backward(gate, up)
        return gated(gate, up, False)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        gate_out, up_out = torch.empty_like(gate), torch.empty_like(up)
        size = gate.numel()
        _gate_backward_kernel[(triton.cdiv(size, 1024),)](
            gate, up, gradients[0].contiguous(), gate_out, up_out, size, BLOCK=1024, num_warps=4
        )
        return gate_out, up_out


@triton.jit
def _add_rms_norm_backward_kernel(
    total, weight, sum_gradient, out_gradient, out, partial, size, columns, eps,
    ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, WIDTH)
    inside = at < columns
    factor = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    added = tl.zeros([WIDTH], tl.float32)
    for i in range(ROWS):
        place = (program * ROWS + i) * columns + at
        here = inside & (place < size)
        x = tl.load(total + place, mask=here, other=0.0).to(tl.float32)
        slope = tl.load(out_gradient + place, mask=here, other=0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(x * x, 0) / columns + eps)
        normed = x * scale
        added += slope * normed
        inner = slope * factor
        value = scale * (inner - normed * (tl.sum(inner * normed, 0) / columns))
        value += tl.load(sum_gradient + place, mask=here, other=0.0).to(tl.float32)
        tl.store(out + place, value.to(out.dtype.element_ty), mask=here)
    tl.store(partial + program * columns + at, added, mask=inside)


class AddedNorm(torch.autograd.Function):
    """x + y, and its RMS norm in ``dtype`` (None: that of x)."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, y: Tensor, weight: Tensor, eps: float, dtype: torch.dtype | None
    ) -> tuple[Tensor, Tensor]:
        total, out = add_rms_norm(x, y, weight, eps, dtype)
        ctx.save_for_backward(total, weight)
        ctx.eps, ctx.other = eps, y.dtype
        return total, out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor | None, None, None]:
        total, weight = ctx.saved_tensors
        of_sum, of_out = (gradient.contiguous() for gradient in gradients)
        columns = total.shape[-1]
        rows = total.numel() // columns
        out = torch.empty_like(total)
        programs = triton.cdiv(rows, ROWS)
        partial = torch.empty(programs, columns, dtype=torch.float32, device=total.device)
        width = triton.next_power_of_2(columns)
        _add_rms_norm_backward_kernel[(programs,)](
            total, weight, of_sum, of_out, out, partial, total.numel(), columns, ctx.eps, ROWS=ROWS, WIDTH=width,
            num_warps=min(8, max(1, width // 256)),
        )  # fmt: skip
        added = partial.sum(0).to(weight.dtype) if ctx.needs_input_grad[2] else None
        return out, out.to(ctx.other), added, None, None
