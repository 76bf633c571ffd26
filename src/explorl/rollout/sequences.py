"""A completion in flight: its tokens so far, their statistics, and how to continue it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from explorl.rollout.requests import Requests
from explorl.rollout.rollouts import FinishReason, Rollout
from explorl.rollout.sampling.rng import fork_key

STATS: Mapping[str, torch.dtype] = {
    "logps": torch.float32,
    "sampling_logps": torch.float32,
    "entropy": torch.float32,
    "branching": torch.int32,
    "sampled": torch.bool,
}
"""The statistics that every rollout has of each token, with their types."""


@dataclass(eq=False, frozen=True)
class PromptTokens:
    """A prompt that is computed once for all its sequences. Equal prompts of a session are the same object."""

    tokens: tuple[int, ...]

    @property
    def stored(self) -> int:
        """Tokens whose keys and values are stored: all except the last, which is the first input of the decoding."""
        return len(self.tokens) - 1


@dataclass(eq=False, slots=True)
class SequenceState:
    """One sequence of a session: a prompt, the completion so far, and how to continue it."""

    index: int
    """Its number in the session."""
    prompt: PromptTokens
    requests: Requests
    """Holds the sampling parameters, under ``request``."""
    request: int
    key: int
    """Key of its stream of random numbers (`explorl.rollout.sampling.rng`)."""
    limit: int
    """Most tokens of the completion, forced ones included."""
    stat_types: Mapping[str, torch.dtype] = field(default_factory=lambda: STATS)
    """Statistics that are kept of each token."""
    tokens: list[int] = field(default_factory=list)
    """The completion as far as it has been read back."""
    stat_parts: list[dict[str, Tensor]] = field(default_factory=list)
    """Statistics of ``tokens``, in consecutive parts."""
    no_stop_spans: list[tuple[int, int]] = field(default_factory=list)
    """Spans of tokens in which no stop string may begin: forced tokens, and the last token of an earlier stop."""
    searched: int = 0
    """Tokens that have been searched for stop strings."""
    parent: int | None = None
    forked_at: int | None = None
    forks: int = 0
    """Number of sequences forked from it."""
    slot: int = -1
    """−1 while it is not being decoded."""
    stop: str | None = None
    """The stop string that ended it."""
    reason: FinishReason | None = None
    """Why it ended; None while it is decoded or waits."""
    error: str = ""
    cancelled: bool = False
    saved_kv: Any = None
    """Keys and values that the memory keeps for it while it has no slot."""

    def discard_kv(self) -> None:
        """Discard the saved keys and values. They will be computed again from the tokens."""
        if self.saved_kv is not None:
            self.saved_kv.drop()
        self.saved_kv = None

    @property
    def ids(self) -> tuple[int, ...]:
        """Tokens of prompt and completion."""
        return (*self.prompt.tokens, *self.tokens)

    @property
    def prompt_index(self) -> int:
        return self.request // self.requests.n

    @property
    def sample_index(self) -> int:
        return self.request % self.requests.n

    @property
    def strings(self) -> Sequence[str]:
        """Its stop strings."""
        return self.requests.stops[self.request]

    @property
    def priority(self) -> tuple[bool, int, int]:
        """Sort key for admission to slots (see `Scheduler`), the smallest first."""
        return not self.tokens, -self.limit, self.index

    def append_sampled(self, tokens: Sequence[int], stats: dict[str, Tensor]) -> None:
        """Append sampled tokens with their statistics."""
        self.tokens.extend(tokens)
        self.stat_parts.append(stats)

    def append_forced(self, tokens: Sequence[int]) -> None:
        """Append tokens that were not sampled, and therefore have no statistics."""
        begin = len(self.tokens)
        if self.stop is not None:
            self.no_stop_spans.append((begin - 1, begin))
        if tokens:
            self.tokens.extend(tokens)
            self.stat_parts.append({name: _missing(dtype, len(tokens)) for name, dtype in self.stat_types.items()})
            self.no_stop_spans.append((begin, len(self.tokens)))

    def spans_without_stop(self, length: int) -> list[tuple[int, int]]:
        """Return `no_stop_spans` of the first ``length`` tokens."""
        return [(begin, min(end, length)) for begin, end in self.no_stop_spans if begin < length]

    def cut_back(self, length: int) -> None:
        """Keep the first ``length`` tokens with their keys and values, and continue with new random numbers."""
        if self.saved_kv is not None:
            saved_kv, self.saved_kv = self.saved_kv, self.saved_kv.first(length, self.prompt.stored)
            saved_kv.drop()
        self.key, self.forks = fork_key(self.key, self.forks), 0
        self.no_stop_spans, self.searched, self.stop = self.spans_without_stop(length), length, None
        self.truncate(length)

    def stop_search_start(self, length: int) -> int:
        """Return before which of the first ``length`` tokens no stop string may begin."""
        return max((min(end, length) for begin, end in self.no_stop_spans if begin < length), default=0)

    def truncate(self, length: int) -> None:
        """Remove the tokens after the first ``length``."""
        if length < len(self.tokens):
            self.stat_parts = [self.stats(length)]
            del self.tokens[length:]

    def stats(self, length: int | None = None) -> dict[str, Tensor]:
        """Return the statistics of the first ``length`` tokens (None: all)."""
        parts = self.stat_parts or [{name: _missing(dtype, 0) for name, dtype in self.stat_types.items()}]
        joined = parts[0] if len(parts) == 1 else {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
        return joined if length is None else {name: values[:length] for name, values in joined.items()}

    def rollout(self, tokenizer: Any) -> Rollout:
        """Return the completion so far; its ``finish_reason`` is None if it has not ended."""
        return Rollout(
            request=self.index,
            prompt_index=self.prompt_index,
            sample_index=self.sample_index,
            token_ids=list(self.tokens),
            **self.stats(),
            finish_reason=self.reason,
            stop=self.stop,
            error=self.error,
            tokenizer=tokenizer,
            parent=self.parent,
            forked_at=self.forked_at,
        )


def _missing(dtype: torch.dtype, length: int) -> Tensor:
    """Return the value of a statistic for tokens without one: NaN for floats, else 0."""
    return torch.full((length,), torch.nan if dtype.is_floating_point else 0, dtype=dtype)
