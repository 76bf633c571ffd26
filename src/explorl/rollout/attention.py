"""Hooks the engine into a transformers model: its attention function, and the state in which the model is run.

transformers looks attention up by the name in the model's config. While the engine runs, that name is `NAME`; the
function registered under it hands the call to whichever cache is at work, which knows how its rows lie in memory.
There is no mask of that name, so the models build none.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface, PreTrainedModel

NAME = "explorl"

_local = threading.local()


class Attends(Protocol):
    """A cache that computes attention over what it holds."""

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None, cap: float | None
    ) -> Tensor:
        """(rows, heads, queries, head size) → (rows, queries, heads, head size)."""
        ...


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    cache: Attends | None = getattr(_local, "cache", None)
    if cache is None:
        raise RuntimeError(f"attention {NAME!r} works only inside Engine.generate")
    if s_aux is not None or position_bias is not None:
        raise NotImplementedError(
            f"{type(module).__name__} uses attention sinks or a position bias, which Engine lacks"
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return cache.attend(query, key, value, scale, sliding_window, softcap), None


AttentionInterface.register(NAME, _attention)


@contextmanager
def attending(cache: Attends) -> Iterator[None]:
    """Sends the model's attention calls to this cache."""
    before = getattr(_local, "cache", None)
    _local.cache = cache
    try:
        yield
    finally:
        _local.cache = before


@contextmanager
def sampling_mode(model: nn.Module) -> Iterator[None]:
    """Runs the model for sampling: evaluation mode, no gradients, our attention. Restores every module's own mode."""
    training = [module for module in model.modules() if module.training]
    configs = {id(m.config): m.config for m in model.modules() if isinstance(m, PreTrainedModel)}
    for config in list(configs.values()):
        text = config.get_text_config(decoder=True)
        configs[id(text)] = text
    before = [(config, config._attn_implementation_internal) for config in configs.values()]
    try:
        for module in training:
            module.training = False
        for config in configs.values():
            config._attn_implementation_internal = NAME
        with torch.no_grad():
            yield
    finally:
        for config, name in before:
            config._attn_implementation_internal = name
        for module in training:
            module.training = True


@dataclass(frozen=True)
class Grouping:
    """Which rows share a prompt, so that the prompt's keys and values are read once for all of them."""

    members: Tensor
    """(entries · size): the rows of each prompt entry, padded with row 0."""
    place: Tensor
    """(rows): where each row stands in ``members``."""
    entries: int
    length: int
    """Prompt positions to look at."""
    even: bool
    """Whether all prompts have that length."""

    @classmethod
    def of(cls, entries: np.ndarray, lengths: np.ndarray, device: torch.device) -> Grouping:
        """``entries`` is the prompt entry of each row, −1 where there is none; ``lengths`` those of the prompts."""
        rows = np.flatnonzero(entries >= 0)
        of = entries[rows]
        count = np.bincount(of)
        size = int(count.max())
        order = np.argsort(of, kind="stable")
        rank = np.empty_like(of)
        rank[order] = np.arange(len(of)) - np.repeat(np.cumsum(count) - count, count)
        members = np.zeros(len(count) * size, dtype=np.int64)
        place = np.zeros(len(entries), dtype=np.int64)
        place[rows] = of * size + rank
        members[place[rows]] = rows
        return cls(
            torch.from_numpy(members).to(device),
            torch.from_numpy(place).to(device),
            len(count),
            max(1, int(lengths.max())),
            bool((lengths == max(1, lengths.max())).all()),
        )

    def gather(self, values: Tensor) -> Tensor:
        """(rows, heads, group, size) → (entries, heads, members · group, size)."""
        _, heads, group, size = values.shape
        taken = values[self.members].view(self.entries, -1, heads, group, size)
        return taken.transpose(1, 2).reshape(self.entries, heads, -1, size)

    def scatter(self, values: Tensor, rows: int) -> Tensor:
        """The way back."""
        entries, heads, queries, size = values.shape
        group = queries * entries // len(self.members)
        spread = values.reshape(entries, heads, -1, group, size).transpose(1, 2).reshape(-1, heads, group, size)
        return spread[self.place[:rows]]


def partial_attention(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, scale: float, cap: float | None
) -> tuple[Tensor, Tensor]:
    """Attention to some of the keys, and the log of the sum of exponentials that joins it with the others."""
    scores = torch.matmul(query * scale, key.transpose(-1, -2)).float()
    if cap is not None:
        scores = scores.div_(cap).tanh_().mul_(cap)
    if bias is not None:
        scores = scores.add_(bias)
    highest = scores.amax(-1, keepdim=True)
    weights = scores.sub_(highest).exp_()
    total = weights.sum(-1, keepdim=True)
    out = torch.matmul(weights.to(value.dtype), value) / total.to(value.dtype)
    return out, highest.add_(total.log_())


def join(first: Tensor, first_total: Tensor, second: Tensor, second_total: Tensor) -> Tensor:
    """Attention to all keys from that to two disjoint sets of them."""
    return torch.lerp(first, second, torch.sigmoid(second_total - first_total).to(first.dtype))


def causal_attention(
    query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None, cap: float | None
) -> Tensor:
    """Attention of whole sequences to themselves."""
    length, groups = query.shape[2], query.shape[1] // key.shape[1]
    if cap is None and (window is None or length <= window):
        out = F.scaled_dot_product_attention(
            query, key, value, is_causal=length > 1, scale=scale, enable_gqa=groups > 1
        )
        return out.transpose(1, 2).contiguous()
    if groups > 1:
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    here = torch.arange(length, device=query.device)
    distance = here[:, None] - here
    seen = (distance >= 0) & (distance < (window or length))
    if cap is None:
        out = F.scaled_dot_product_attention(query, key, value, attn_mask=seen, scale=scale)
    else:
        scores = torch.matmul(query, key.transpose(-1, -2)) * scale
        scores = (torch.tanh(scores / cap) * cap).masked_fill(~seen, -torch.inf)
        out = torch.matmul(scores.softmax(-1, dtype=torch.float32).to(value.dtype), value)
    return out.transpose(1, 2).contiguous()
