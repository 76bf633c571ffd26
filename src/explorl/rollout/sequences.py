"""A completion in flight: its tokens so far, their statistics, and how to continue it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from explorl.rollout.requests import Requests
from explorl.rollout.rollouts import FinishReason, Rollout

StatType = tuple[torch.dtype, tuple[int, ...]]
"""Data type and shape of a statistic of one token."""
STAT_TYPES: Mapping[str, StatType] = {
    "logps": (torch.float32, ()),
    "sampling_logps": (torch.float32, ()),
    "entropy": (torch.float32, ()),
    "branching": (torch.int32, ()),
    "sampled": (torch.bool, ()),
}
"""The statistics that every rollout has."""


def stat_types(top_tokens: int, min_p_mass: bool) -> Mapping[str, StatType]:
    """Return the statistics of a request that records that many top tokens and perhaps the mass of the min-p set."""
    more: dict[str, StatType] = {"min_p_mass": (torch.float32, ())} if min_p_mass else {}
    if top_tokens:
        more |= {"top_ids": (torch.int32, (top_tokens,)), "top_logps": (torch.float32, (top_tokens,))}
    return {**STAT_TYPES, **more} if more else STAT_TYPES


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
    """One row of a session: a prompt, the completion so far, and how to continue it."""

    index: int
    """Its number in the session."""
    prompt: PromptTokens
    requests: Requests
    """Holds the sampling parameters, under ``request``."""
    request: int
    prompt_index: int
    sample_index: int
    key: int
    """Key of its stream of random numbers (`explorl.rollout.sampling.rng`)."""
    limit: int
    """Most tokens of the completion, forced ones included."""
    tokens: list[int] = field(default_factory=list)
    """The completion as far as it has been read back."""
    stat_parts: list[dict[str, Tensor]] = field(default_factory=list)
    """Statistics of ``tokens``, in consecutive parts."""
    curve: int = 0
    """Index of its temperatures by position in the session's table."""
    stop_set: int = 0
    """Index of its stop tokens in the session's table."""
    bias_set: int = 0
    """Index of its bias and bans in the session's table."""
    stat_types: Mapping[str, StatType] = field(default_factory=lambda: STAT_TYPES)
    """Statistics that are kept of each token."""
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

    def param(self, name: str) -> Any:
        """Return a sampling parameter by name."""
        return self.requests.rows[name][self.request]

    @property
    def num_top_tokens(self) -> int:
        """Number of top tokens whose log π is recorded at each position."""
        return self.stat_types["top_ids"][1][0] if "top_ids" in self.stat_types else 0

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
            self.stat_parts.append({name: _missing(kind, len(tokens)) for name, kind in self.stat_types.items()})
            self.no_stop_spans.append((begin, len(self.tokens)))

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
        parts = self.stat_parts or [{name: _missing(kind, 0) for name, kind in self.stat_types.items()}]
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
            calls=(),
        )


def sampling_values(sequences: Sequence[SequenceState], names: Sequence[str]) -> dict[str, np.ndarray]:
    """Return sampling parameters of these sequences, one array per name."""
    requests = sequences[0].requests
    if all(sequence.requests is requests for sequence in sequences):
        index = [sequence.request for sequence in sequences]
        return {name: requests.rows[name][index] for name in names}
    return {name: np.array([sequence.param(name) for sequence in sequences]) for name in names}


def _missing(kind: StatType, length: int) -> Tensor:
    """Return the value of a statistic for tokens without one: NaN for floats, else 0."""
    dtype, shape = kind
    return torch.full((length, *shape), torch.nan if dtype.is_floating_point else 0, dtype=dtype)
