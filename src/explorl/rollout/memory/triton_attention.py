# mypy: disable-error-code="import-not-found, import-untyped, no-untyped-def, untyped-decorator"
"""Decode attention as a Triton kernel: one query per row, against the pages of its table.

One program handles one row and one key/value head for all query heads that share it, so each key and value is read
once. Rows that share pages read the same memory, which is then in the second-level cache. The program also writes the
row's new key and value to its last page, and can first rotate query and key. Lengths and tables are read on the device,
so one CUDA graph works for all of them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from explorl.modeling.gpu import shared_memory
from explorl.rollout import state
from explorl.rollout.memory.pages import PageCache

POSITION = tl.constexpr(state.POSITION)
STATUS = tl.constexpr(state.STATUS)
RUNNING = tl.constexpr(state.RUNNING)
LOG2E = tl.constexpr(1.4426950408889634)

PROGRAMS = 528
"""Programs that fill the device (4 for each of 132 multiprocessors); with fewer rows, rows are split along their
length."""
MOST_SPLITS = 16


class Launch(NamedTuple):
    """Launch parameters of the kernel."""

    block: int
    """Columns per tile."""
    warps: int
    stages: int


FEW = Launch(64, 4, 3)
"""For few programs, each with many threads."""
MANY, MANY_WIDE = Launch(32, 1, 2), Launch(32, 2, 2)
"""For many programs; small ones hide each other's latency best: on an H200, 512 rows of SmolLM2-135M take 21 µs instead
of 26. Heads wider than 128 need two warps."""


def launch_for(programs: int, key_size: int) -> Launch:
    """Return the fastest of the measured settings."""
    if programs < 2 * PROGRAMS:
        return FEW
    return MANY if key_size <= 128 else MANY_WIDE


def fitting(launch: Launch, group: int, key: int, value: int, itemsize: int, most: int) -> Launch:
    """Return ``launch`` with tiles that fit in ``most`` bytes of shared memory, and with enough threads.

    Sizes are the padded ones. The settings were measured on an H200, whose blocks may have 227 KiB (a T4's 64), for
    small groups and 2-byte types: larger ones do not fit in the registers of so few threads.
    """

    def needed(block: int) -> int:  # a tile of keys, one of values, the queries, and their attention weights
        return itemsize * (block * (key + value) + group * (key + block)) * 9 // 8

    block = launch.block
    while block > 16 and needed(block) > most:
        block //= 2
    return launch._replace(block=block, warps=max(launch.warps, min(group // 16, 8), 4 if itemsize > 2 else 1))


@triton.jit
def _tiles(
    query, keys, values, table, heads, first, low, high, scale, cap, best, total, acc,
    KEY: tl.constexpr, VALUE: tl.constexpr, KEY_PAD: tl.constexpr, VALUE_PAD: tl.constexpr,
    BLOCK: tl.constexpr, PAGE: tl.constexpr, CAP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add the positions from low (a multiple of BLOCK) to high, skipping those before first, to a base-2 softmax."""
    k_size = tl.arange(0, KEY_PAD)
    v_size = tl.arange(0, VALUE_PAD)
    for start in range(low, high, BLOCK):
        page = tl.load(table + start // PAGE).to(tl.int64)
        position = start + tl.arange(0, BLOCK)
        inside = (position >= first) & (position < high)
        line = (page * PAGE + start % PAGE + tl.arange(0, BLOCK)) * heads
        key = tl.load(
            keys + line[:, None] * KEY + k_size[None, :],
            mask=inside[:, None] & (k_size < KEY)[None, :],
            other=0.0,
        )
        scores = tl.dot(query, tl.trans(key), input_precision=PRECISION) * scale
        if CAP:
            scores = (2.0 * tl.sigmoid(2.0 * scores / cap) - 1.0) * cap
        scores = tl.where(inside[None, :], scores * LOG2E, float("-inf"))
        higher = tl.maximum(best, tl.max(scores, 1))
        shrink = tl.exp2(best - higher)
        weights = tl.exp2(scores - higher[:, None])
        value = tl.load(
            values + line[:, None] * VALUE + v_size[None, :],
            mask=inside[:, None] & (v_size < VALUE)[None, :],
            other=0.0,
        )
        acc = acc * shrink[:, None] + tl.dot(weights.to(value.dtype), value, input_precision=PRECISION)
        total = total * shrink + tl.sum(weights, 1)
        best = higher
    return best, total, acc


@triton.jit
def _rotated(x, at, line, cos, sin, inside, HALF: tl.constexpr):
    """Apply the rotary embedding (one half rotated against the other) to x, loaded from offsets ``at`` of each line."""
    other = tl.load(line + tl.where(at < HALF, at + HALF, at - HALF), mask=inside, other=0.0).to(tl.float32)
    turned = tl.load(sin + at, mask=at < 2 * HALF, other=0.0).to(tl.float32)
    turned = tl.where(at < HALF, -turned, turned)
    straight = tl.load(cos + at, mask=at < 2 * HALF, other=0.0).to(tl.float32)
    return (x.to(tl.float32) * straight + other * turned).to(x.dtype)


@triton.jit
def _decode_kernel(
    query, new_key, new_value, keys, values, table, ints, out, part_acc, part_best, part_total,
    cos, sin, scale, cap, window, slots, table_row,
    query_row, query_head, key_row, key_head, value_row, value_head, rotary_row,
    GROUP: tl.constexpr, GROUP_PAD: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr,
    KEY_PAD: tl.constexpr, VALUE_PAD: tl.constexpr, BLOCK: tl.constexpr, PAGE: tl.constexpr, SPLITS: tl.constexpr,
    WINDOW: tl.constexpr, CAP: tl.constexpr, ROTATE: tl.constexpr, TABLE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    split = tl.program_id(2)
    heads = tl.num_programs(1)
    if tl.load(ints + STATUS * slots + row) != RUNNING:
        return
    position = tl.load(ints + POSITION * slots + row).to(tl.int32)
    table += row * table_row
    keys += head * KEY
    values += head * VALUE

    member = tl.arange(0, GROUP_PAD)
    k_size = tl.arange(0, KEY_PAD)
    v_size = tl.arange(0, VALUE_PAD)
    lines = query + row * query_row + (head * GROUP + member[:, None]) * query_head
    inside = (member < GROUP)[:, None] & (k_size < KEY)[None, :]
    q = tl.load(lines + k_size[None, :], mask=inside, other=0.0)
    if ROTATE:
        rotary_line = row
        if TABLE:
            rotary_line = position.to(tl.int64)
        cos += rotary_line * rotary_row
        sin += rotary_line * rotary_row
        q = _rotated(q, k_size[None, :], lines, cos, sin, inside, KEY // 2)

    best = tl.full([GROUP_PAD], float("-inf"), tl.float32)
    total = tl.zeros([GROUP_PAD], tl.float32)
    acc = tl.zeros([GROUP_PAD, VALUE_PAD], tl.float32)
    if split == 0:
        # The new token is read from registers, so that no program waits until it is written.
        line = new_key + row * key_row + head * key_head
        k = tl.load(line + k_size, mask=k_size < KEY, other=0.0)
        if ROTATE:
            k = _rotated(k, k_size, line, cos, sin, k_size < KEY, KEY // 2)
        v = tl.load(new_value + row * value_row + head * value_head + v_size, mask=v_size < VALUE, other=0.0)
        at = (tl.load(table + position // PAGE).to(tl.int64) * PAGE + position % PAGE) * heads
        tl.store(keys + at * KEY + k_size, k, mask=k_size < KEY)
        tl.store(values + at * VALUE + v_size, v, mask=v_size < VALUE)
        score = tl.sum(q.to(tl.float32) * k.to(tl.float32)[None, :], 1) * scale
        if CAP:
            score = (2.0 * tl.sigmoid(2.0 * score / cap) - 1.0) * cap
        best = score * LOG2E
        total += 1.0
        acc += v.to(tl.float32)[None, :]

    # Positions first..position − 1, starting with a whole tile, in SPLITS equal parts.
    first = 0
    if WINDOW:
        first = tl.maximum(position - window + 1, 0)
    begin = first // BLOCK * BLOCK
    part = tl.cdiv(tl.cdiv(position - begin, SPLITS), BLOCK) * BLOCK
    low = begin + split * part
    best, total, acc = _tiles(
        q, keys, values, table, heads, first, low, tl.minimum(low + part, position), scale, cap, best, total, acc,
        KEY, VALUE, KEY_PAD, VALUE_PAD, BLOCK, PAGE, CAP, PRECISION,
    )  # fmt: skip

    at = (row * heads + head) * GROUP + member
    if SPLITS == 1:
        tl.store(
            out + at[:, None] * VALUE + v_size[None, :],
            (acc / total[:, None]).to(out.dtype.element_ty),
            mask=(member < GROUP)[:, None] & (v_size < VALUE)[None, :],
        )
    else:
        at = at * SPLITS + split
        tl.store(
            part_acc + at[:, None] * VALUE + v_size[None, :],
            acc,
            mask=(member < GROUP)[:, None] & (v_size < VALUE)[None, :],
        )
        tl.store(part_best + at, best, mask=member < GROUP)
        tl.store(part_total + at, total, mask=member < GROUP)


@triton.jit
def _join_kernel(
    part_acc, part_best, part_total, out, VALUE: tl.constexpr, VALUE_PAD: tl.constexpr, SPLITS: tl.constexpr
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, SPLITS)
    size = tl.arange(0, VALUE_PAD)
    best = tl.load(part_best + at * SPLITS + split)
    total = tl.load(part_total + at * SPLITS + split)
    acc = tl.load(
        part_acc + (at * SPLITS + split)[:, None] * VALUE + size[None, :], mask=(size < VALUE)[None, :], other=0.0
    )
    weight = tl.exp2(best - tl.max(best, 0))
    joined = tl.sum(acc * weight[:, None], 0) / tl.sum(total * weight, 0)
    tl.store(out + at * VALUE + size, joined.to(out.dtype.element_ty), mask=size < VALUE)


def splits_for(rows: int, kv_heads: int, longest: int) -> int:
    """Return the number of programs per row: enough to fill the device, but each with at least two tiles."""
    wanted = max(1, PROGRAMS // (rows * kv_heads))
    return 1 << (min(wanted, MOST_SPLITS, max(1, longest // (2 * FEW.block))).bit_length() - 1)


def decode_attention(
    query: Tensor,
    new_key: Tensor,
    new_value: Tensor,
    keys: Tensor,
    values: Tensor,
    table: Tensor,
    ints: Tensor,
    scale: float,
    window: int | None = None,
    cap: float | None = None,
    splits: int | None = None,
    rotary: tuple[Tensor, Tensor] | None = None,
    launch: Launch | None = None,
) -> Tensor:
    """Attend with one query per row, (rows, heads, 1, size) → (rows, 1, heads, size); store its key and value too.

    ``keys`` and ``values`` (pages, page, kv heads, size) are all pages of a layer, ``table`` (slots, pages of a row)
    lists those of each row; ``ints`` is `SlotState.ints`, with each row's position. ``rotary`` has the cosine and sine
    by which query and key are rotated first, for each row (rows, 1, size) or for all positions (positions, size); None
    does not rotate.
    """
    rows, heads, _, key_size = query.shape
    page, kv_heads, value_size = keys.shape[1], keys.shape[2], values.shape[-1]
    group = heads // kv_heads
    if splits is None:
        splits = splits_for(rows, kv_heads, table.shape[1] * page)
    launch = launch or launch_for(rows * kv_heads * splits, key_size)
    group_pad, key_pad, value_pad = (max(16, triton.next_power_of_2(size)) for size in (group, key_size, value_size))
    launch = launch._replace(block=min(launch.block, page))
    launch = fitting(launch, group_pad, key_pad, value_pad, query.element_size(), shared_memory(query.device))
    assert page % launch.block == 0, f"page size {page} is not a multiple of the tile size {launch.block}"
    query, new_key, new_value = (t if t.stride(-1) == 1 else t.contiguous() for t in (query, new_key, new_value))
    assert all(t.is_contiguous() for t in (keys, values, table))
    cos, sin = (query, query) if rotary is None else rotary
    by_position = rotary is not None and cos.ndim == 2
    if rotary is not None and not by_position:
        cos, sin = (part.expand(rows, 1, key_size) for part in rotary)
    if rotary is not None and (cos.stride() != sin.stride() or cos.stride(-1) != 1):
        cos, sin = cos.contiguous(), sin.contiguous()
    out = torch.empty(rows, 1, heads, value_size, dtype=query.dtype, device=query.device)
    parts = rows * heads * splits if splits > 1 else 1
    acc = torch.empty(parts, value_size, dtype=torch.float32, device=query.device)
    best, total = (torch.empty(parts, dtype=torch.float32, device=query.device) for _ in range(2))
    _decode_kernel[(rows, kv_heads, splits)](
        query, new_key, new_value, keys, values, table, ints, out, acc, best, total,
        cos, sin, scale, cap or 1.0, window or 0, ints.stride(0), table.stride(0),
        query.stride(0), query.stride(1), new_key.stride(0), new_key.stride(1),
        new_value.stride(0), new_value.stride(1), cos.stride(0),
        GROUP=group, GROUP_PAD=group_pad, KEY=key_size, VALUE=value_size, KEY_PAD=key_pad, VALUE_PAD=value_pad,
        BLOCK=launch.block, PAGE=page, SPLITS=splits,
        WINDOW=window is not None, CAP=cap is not None, ROTATE=rotary is not None, TABLE=by_position,
        PRECISION="ieee" if query.dtype == torch.float32 else "tf32",
        num_warps=launch.warps, num_stages=launch.stages,
    )  # fmt: skip
    if splits > 1:
        _join_kernel[(rows * heads,)](acc, best, total, out, VALUE=value_size, VALUE_PAD=value_pad, SPLITS=splits)
    return out


class KernelPages(PageCache):
    """Pages with one kernel that writes the new key and value and computes attention, reading the table itself."""

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any) -> Any:
        self._layer = layer_idx
        return key_states, value_states

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None, cap: float | None
    ) -> Tensor:
        return self._decode(query, key, value, self._layer, scale, window, cap)

    def rotate_and_attend(
        self, query: Tensor, key: Tensor, value: Tensor, rotary: Any, layer: int, scale: float, window: int | None
    ) -> Tensor:
        """Apply the rotary embedding, `update` and `attend` in one kernel; ``rotary`` as in `decode_attention`."""
        return self._decode(query, key, value, layer, scale, window, None, rotary=rotary)

    def _decode(self, query: Tensor, key: Tensor, value: Tensor, layer: int, *args: Any, **kwargs: Any) -> Tensor:
        pages = self.keys[layer], self.values[layer]
        return decode_attention(query, key, value, *pages, self.table, self.ints, *args, **kwargs)
