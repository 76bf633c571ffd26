"""Decide how many requests run at once and how much memory that takes, before anything is allocated."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch

from explorl.rollout.memory.cache import LayerShape
from explorl.rollout.memory.pages import COPY_BYTES, PAGE, RESERVED_PAGES
from explorl.rollout.state import SlotState

MAX_SLOTS = {"cuda": 1024, "cpu": 256}
"""Default for the most sequences decoded together."""
PREFILL_TOKENS = {"cuda": 32768, "cpu": 2048}
"""Prompt tokens, padding included, computed in one forward pass."""
LENGTH_STEP = {"cuda": 64, "cpu": 1}
"""Lengths are rounded up to a multiple, so that a slightly longer batch can reuse the memory and graphs."""

SPANS = ("cpu",)
"""Devices on which slots have spans."""
REUSE_SHARE = 0.9
"""Share of the slots and pages there is room for now that existing memory must have to be reused."""
LENGTH_DIVISOR = 4
"""Slots are decoded together if there is memory for their longest completions divided by this: few are that long."""


class MemoryNeeds(NamedTuple):
    """What unfinished sequences need memory for."""

    requests: int
    prompts: int
    """Number of distinct prompts."""
    prompt_tokens: int
    """The longest prompt."""
    tokens: int
    """The longest completion."""


@dataclass(frozen=True)
class Plan:
    """Sizes and memory of one call."""

    slots: int
    """Sequences decoded together."""
    tokens: int
    """Longest completion."""
    prompt_tokens: int
    """Longest prompt, without its last token."""
    prefill_tokens: int
    """Prompt tokens in one forward pass."""
    cache_bytes: int
    prompt_bytes: int
    work_bytes: int
    """State, logits, activations and what the libraries take; see `work_bytes`."""
    split: bool
    """True if requests may have to wait for memory, not only because of the caller's ``batch_size``."""
    page: int = 0
    """Tokens in a page; 0 if slots have spans, as on the CPU."""
    pages: int = 0
    slot_pages: int = 0
    """Most pages of a sequence."""
    entries: int = 0
    """Prompts stored at once, if slots have spans."""
    weight_bytes: int = 0
    """Memory of copied weights; see `explorl.modeling.onednn_ops`."""

    @property
    def bytes(self) -> int:
        """Peak memory of the engine, without the model."""
        return self.cache_bytes + self.prompt_bytes + self.work_bytes + self.weight_bytes

    def covers(self, other: Plan) -> bool:
        """Return whether a call with the other plan can run in this one's memory with bit-identical results."""
        sizes = ("tokens", "entries", "prompt_tokens", "slot_pages", "weight_bytes")
        large = all(getattr(self, name) >= getattr(other, name) for name in sizes)
        # The free memory differs a little each time, which alone is not worth new memory and graphs.
        share = REUSE_SHARE if other.split else 1.0
        return (
            self.page == other.page
            and large
            and self.slots >= share * other.slots
            and self.pages >= share * other.pages
        )

    def holds(self, slots: int, max_slots: int, needs: MemoryNeeds) -> bool:
        """Return whether these requests fit into ``slots`` slots of this memory, and more slots would not help.

        ``max_slots`` is the largest number of slots that would be used.
        """
        stored = needs.prompt_tokens - 1
        enough = self.split or slots >= min(needs.requests, max_slots)
        fits = not self.page or stored + needs.tokens <= self.page * self.slot_pages
        return enough and fits and needs.tokens <= self.tokens and stored <= self.prompt_tokens

    def __str__(self) -> str:
        kind = f"{self.pages} pages of {self.page}" if self.page else f"{self.entries} prompts of {self.prompt_tokens}"
        return (
            f"{self.slots} slots of {self.tokens} tokens, {kind}: {_mib(self.bytes)} (cache {_mib(self.cache_bytes)}, "
            f"prompts {_mib(self.prompt_bytes)}, work {_mib(self.work_bytes)}, weights {_mib(self.weight_bytes)})"
        )


def _mib(size: int) -> str:
    return f"{size / 2**20:.1f} MiB"


def _round_up(value: int, step: int) -> int:
    return -(-value // step) * step


def free_memory(device: torch.device) -> int:
    """Return the bytes that a new tensor could take on this device."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))
    limit = allowed_memory()
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = next(1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        free = int(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")) // 2
    return free if limit is None else min(free, limit)


def allowed_memory(groups: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")) -> int | None:
    """Return the bytes that this process may still take by the limits of its control groups, or None without limits.

    Cached files count as free, as the system drops them before it kills a process.
    """
    try:
        lines = [line.split(":", 2) for line in membership.read_text().splitlines()]
    except OSError:
        return None
    allowed = []
    for _, kinds, path in (line for line in lines if len(line) == 3):
        if kinds and "memory" not in kinds.split(","):
            continue
        root = groups / "memory" if kinds else groups
        most, used, cached = _OLD_GROUP if kinds else _GROUP
        innermost = root / path.lstrip("/")
        for folder in (innermost, *innermost.parents):
            limit, taken = _number(folder / most), _number(folder / used)
            if limit is not None and taken is not None:
                allowed.append(max(0, limit - taken + _statistic(folder / "memory.stat", cached)))
            if folder == root:
                break
    return min(allowed, default=None)


_GROUP = ("memory.max", "memory.current", "inactive_file")
_OLD_GROUP = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
"""Files with the limit and the usage of a control group, versions 2 and 1, and the name of its cached files in
``memory.stat``."""


def _number(file: Path) -> int | None:
    """Return the number in a file, or None if there is none or it is "max"."""
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return None


def _statistic(file: Path, name: str) -> int:
    """Return a number of a ``memory.stat`` file, or 0 if it has none."""
    try:
        return next(int(line.split()[1]) for line in file.read_text().splitlines() if line.split()[0] == name)
    except (OSError, StopIteration, ValueError, IndexError):
        return 0


def total_memory(device: torch.device) -> int:
    """Return the total memory of the device in bytes."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[1])
    return int(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))


STREAMS = 3
"""Streams on which the engine multiplies matrices: the caller's, the one for warm-ups and the one for captures."""


def workspace_bytes(device: torch.device) -> int:
    """Return the memory that cuBLAS keeps once the engine has run.

    For each stream that is the size in ``CUBLAS_WORKSPACE_CONFIG`` (pairs of KiB and count), or torch's default, 32 MiB
    since Hopper and 8 before.
    """
    if device.type != "cuda":
        return 0
    sizes = [int(part) for part in os.environ.get("CUBLAS_WORKSPACE_CONFIG", "").split(":") if part.isdigit()]
    if sizes and len(sizes) % 2 == 0:
        per_stream = sum(size * count for size, count in zip(sizes[::2], sizes[1::2], strict=True)) << 10
    else:
        per_stream = 32 << 20 if torch.cuda.get_device_capability(device)[0] >= 9 else (8 << 20) + (128 << 10)
    return STREAMS * per_stream


def work_bytes(slots: int, prefill: int, *, state: int, logits: int, activations: int, copied: int) -> int:
    """Return the peak memory of the engine in addition to keys and values and the workspaces of libraries.

        state + max(slots · (logits + activations), prefill · activations, copied)

    ``state`` is permanent. The rest is temporary: a decode step (``logits`` and ``activations`` are bytes per slot), a
    pass over ``prefill`` prompt tokens, or the copying of ``copied`` bytes of pages.
    """
    return state + max(slots * (logits + activations), prefill * activations, copied)


def make_plan(
    layers: Sequence[LayerShape],
    needs: MemoryNeeds,
    *,
    vocab: int,
    logit_bytes: int,
    prefill_bytes: int,
    batch_size: int | None,
    budget: int,
    device: torch.device,
    kernels: bool = False,
    before: Plan | None = None,
    stat_bytes: int = 0,
) -> Plan:
    """Return the plan with the largest batch that the budget allows; raise `MemoryError` if not even one slot fits.

    On the CPU every slot has a span for its longest completion, which is the fastest to read. On other devices, and if
    spans do not fit, memory is divided into pages, which are allocated as tokens are sampled.

    Args:
        logit_bytes: Memory that sampling takes per entry of the logits.
        prefill_bytes: Memory that a forward pass takes per prompt token, without its keys and values.
        before: The previous plan. Its room for prompts is kept if the budget allows.
        stat_bytes: Memory of additional statistics per sampled token.
    """
    requests, prompts, prompt_tokens, tokens = needs
    step = LENGTH_STEP.get(device.type, 1)
    tokens, stored = _round_up(tokens, step), _round_up(max(1, prompt_tokens - 1), step)
    prefill = max(stored, min(PREFILL_TOKENS.get(device.type, 2048), prompts * stored))
    while prefill > stored and prefill * prefill_bytes > budget // 8:
        prefill = max(stored, prefill // 2)
    wanted = min(batch_size or MAX_SLOTS.get(device.type, 256), requests)

    pages, stored_prompts = (before.pages, before.entries) if before is not None else (0, 0)

    def entries(slots: int) -> int:
        # Twice the prompts that the slots need, so that many are computed at a time instead of one after the other.
        return min(prompts, 2 * -(-slots * prompts // requests) + 2)

    workspace = workspace_bytes(device)
    page_bytes = PAGE.get(device.type, 64) * max(layer.bytes for layer in layers)

    def work(slots: int) -> int:
        return workspace + work_bytes(
            slots,
            prefill,
            state=SlotState.bytes(slots, tokens) + slots * tokens * stat_bytes,
            logits=vocab * logit_bytes,
            activations=prefill_bytes,
            copied=min(max(COPY_BYTES, slots * page_bytes // 2), slots * page_bytes * len(layers)),  # keys or values
        )

    def sized(slots: int) -> Plan:
        return Plan(slots, tokens, stored, prefill, 0, 0, work(slots), split=slots < wanted, entries=entries(slots))

    if device.type in SPANS and not kernels:
        for count in (max(entries(wanted), stored_prompts), entries(wanted)):
            plan = _with_spans(replace(sized(wanted), entries=count), layers)
            if plan.bytes <= budget:
                return plan

    def paged(slots: int) -> Plan:
        return _with_pages(sized(slots), layers, pages, budget, kernels)

    if paged(1).bytes > budget:
        raise MemoryError(
            f"one request with a prompt of {prompt_tokens} and a completion of {tokens} tokens needs "
            f"{paged(1).bytes} bytes, but the memory budget is {budget}; raise memory_budget, or shorten them"
        )
    low, high = 1, wanted + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if paged(middle).bytes <= budget else (low, middle)
    return paged(low)


def _with_spans(plan: Plan, layers: Sequence[LayerShape]) -> Plan:
    """Return the plan with one span per slot, and the prompts beside them."""
    token_bytes = sum(layer.bytes for layer in layers)
    return replace(
        plan,
        cache_bytes=plan.slots * plan.tokens * token_bytes,
        prompt_bytes=plan.entries * plan.prompt_tokens * token_bytes,
    )


def _with_pages(plan: Plan, layers: Sequence[LayerShape], before: int, budget: int, kernels: bool) -> Plan:
    """Return the plan with pages for all that slots may sample, or for 1 / `LENGTH_DIVISOR` of it if memory is short.

    ``before`` is the previous number of pages, which is kept if the budget allows.
    """
    page = PAGE.get(layers[0].device.type, 64)
    slots, tokens, stored = plan.slots, plan.tokens, plan.prompt_tokens
    page_bytes = page * sum(layer.bytes for layer in layers)
    slot_pages = -(-(stored + tokens) // page)
    work = plan.work_bytes
    if not kernels:  # torch gathers the keys and values of a layer, and once more for each query head
        work += 3 * slots * slot_pages * page * max(layer.bytes for layer in layers)
    table = slots * slot_pages * 4
    prompt_pages = -(-stored // page)
    most = slots * (-(-tokens // page) + 1) + plan.entries * prompt_pages + RESERVED_PAGES
    least = max(slot_pages + 1, slots * (-(-tokens // (page * LENGTH_DIVISOR)) + 1) + prompt_pages) + RESERVED_PAGES
    pages = min(max(most, before), max(least, (budget - work - table) // page_bytes))
    return replace(
        plan,
        cache_bytes=pages * page_bytes + table,
        work_bytes=work,
        split=plan.split or pages < most,
        page=page,
        pages=pages,
        slot_pages=slot_pages,
        entries=0,
    )
