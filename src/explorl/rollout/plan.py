"""How many requests run at once, and how much memory that takes: decided before anything is allocated."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from explorl.rollout.cache import LayerShape
from explorl.rollout.joined import SHORT_PROMPT
from explorl.rollout.state import State

ROWS = {"cuda": 1024, "cpu": 256}
"""Most rows decoded together, where the caller does not say."""
PREFILL_TOKENS = {"cuda": 32768, "cpu": 2048}
"""Prompt tokens, padding included, computed in one forward pass."""
LENGTH_STEP = {"cuda": 64, "cpu": 1}
"""Lengths are rounded up to a multiple, so that a slightly longer batch finds the memory and graphs in place."""


@dataclass(frozen=True)
class Plan:
    """Sizes and memory of one call."""

    slots: int
    """Rows decoded together."""
    tokens: int
    """Longest completion, and the columns of a slot: the prompt's last token and all sampled ones but the last."""
    entries: int
    """Prompts kept at once."""
    prompt_tokens: int
    """Positions kept for each of them."""
    joined: bool
    """Whether every row has a copy of its prompt."""
    prefill_tokens: int
    """Prompt tokens in one forward pass."""
    cache_bytes: int
    prompt_bytes: int
    work_bytes: int
    """State, logits and activations."""
    split: bool
    """Whether memory, not the caller, keeps some requests waiting."""

    @property
    def bytes(self) -> int:
        """What the engine will hold at its peak, beside the model."""
        return self.cache_bytes + self.prompt_bytes + self.work_bytes

    def covers(self, other: Plan) -> bool:
        """Whether a call with the other plan can run in the memory of this one."""
        return all(
            getattr(self, name) >= getattr(other, name) for name in ("slots", "tokens", "entries", "prompt_tokens")
        )

    def holds(self, slots: int, most: int, *, requests: int, prompts: int, prompt_tokens: int, tokens: int) -> bool:
        """Whether these requests can run in ``slots`` seats of this memory, and no more (up to ``most``) would help."""
        enough = self.split or slots >= min(requests, most)
        return enough and tokens <= self.tokens and prompt_tokens - 1 <= self.prompt_tokens

    def __str__(self) -> str:
        return (
            f"{self.slots} rows of {self.tokens} tokens, {self.entries} prompts of {self.prompt_tokens}: "
            f"{_mib(self.bytes)} (cache {_mib(self.cache_bytes)}, prompts {_mib(self.prompt_bytes)}, "
            f"work {_mib(self.work_bytes)})"
        )


def _mib(size: int) -> str:
    return f"{size / 2**20:.1f} MiB"


def _round_up(value: int, step: int) -> int:
    return -(-value // step) * step


def free_memory(device: torch.device) -> int:
    """Bytes that a new tensor could take on this device."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return int(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")) // 2


def make_plan(
    layers: Sequence[LayerShape],
    *,
    requests: int,
    prompts: int,
    prompt_tokens: int,
    tokens: int,
    vocab: int,
    logit_bytes: int,
    prefill_bytes: int,
    batch_size: int | None,
    budget: int,
    device: torch.device,
    join: bool = False,
) -> Plan:
    """The largest batch that the budget allows.

    ``prompts`` counts different ones. ``logit_bytes`` is what sampling holds for one entry of the logits,
    ``prefill_bytes`` what a forward pass holds for one prompt token beside its keys and values. ``join`` lets every row
    have a copy of its prompt where prompts are short.
    """
    token_bytes = sum(layer.bytes for layer in layers)
    step = LENGTH_STEP.get(device.type, 1)
    tokens, stored = _round_up(tokens, step), _round_up(max(1, prompt_tokens - 1), step)
    prefill = max(stored, min(PREFILL_TOKENS.get(device.type, 2048), prompts * stored))
    joined = join and stored <= SHORT_PROMPT
    while prefill > stored and prefill * prefill_bytes > budget // 8:
        prefill = max(stored, prefill // 2)

    def plan(rows: int) -> Plan:
        # Twice the prompts that the rows need: the next ones are computed many at a time, not whenever a row is free.
        entries = min(prompts, 2 * -(-rows * prompts // requests) + 2)
        return Plan(
            slots=rows,
            tokens=tokens,
            entries=entries,
            prompt_tokens=stored,
            joined=joined,
            prefill_tokens=prefill,
            cache_bytes=rows * (tokens + joined * SHORT_PROMPT) * token_bytes,
            prompt_bytes=entries * stored * token_bytes,
            work_bytes=State.bytes(rows, tokens) + rows * vocab * logit_bytes + prefill * prefill_bytes,
            split=rows < wanted,
        )

    wanted = min(batch_size or ROWS.get(device.type, 256), requests)
    if plan(wanted).bytes <= budget:
        return plan(wanted)
    if plan(1).bytes > budget:
        raise MemoryError(
            f"one request with a prompt of {prompt_tokens} and a completion of {tokens} tokens needs "
            f"{plan(1).bytes} bytes and the memory budget is {budget}; raise memory_budget, or shorten them"
        )
    low, high = 1, wanted
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if plan(middle).bytes <= budget else (low, middle)
    return plan(low)
