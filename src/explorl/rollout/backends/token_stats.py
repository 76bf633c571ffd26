"""Token statistics of completions from another sampler: one pass of the training model, a block of logits at a time.

    log π at the request's temperature, entropy and branching factor at 1      `answer_records`
    log q in the distribution that the request was sampled from                repetition penalty → `chain`

The other sampler's logits are close to the model's, but not equal to the last bit. The model is what is trained, so the
statistics are the model's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from explorl.modeling.attention import evaluating
from explorl.modeling.token_records import answer_records
from explorl.rollout.backends.chain import Chain, Chains
from explorl.rollout.requests import Requests
from explorl.rollout.sampling import warp_repetition


@dataclass(frozen=True)
class StatsPass:
    """Options for calls of the training model."""

    model: Any
    rows: int | None = None
    """Rows at a time. None passes all rows at once, packed. With a number rows are padded, so that all processes make
    the same calls, and equal completions have equal statistics."""
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext


class RecomputedStats(NamedTuple):
    """One value per token, for requests in their order; 0 after the end of a completion."""

    logps: Float[Tensor, "requests time"]
    sampling_logps: Float[Tensor, "requests time"]
    """log q, over both outcomes if bottom-p is applied at random per token; 0 if the request is greedy."""
    coin_logps: Float[Tensor, "requests time"]
    """The difference to log q of the actual outcome."""
    entropy: Float[Tensor, "requests time"]
    branching: Int[Tensor, "requests time"]


def compute_token_stats(
    stats_pass: StatsPass, requests: Requests, chains: Sequence[Chain], tokens: Sequence[Sequence[int]]
) -> RecomputedStats:
    """Return the statistics of the completions ``tokens`` of all requests, each of at least one token."""
    device = next(stats_pass.model.parameters()).device
    ids, mask, completion = _pad(requests, tokens, device)
    temperature = _temperatures(requests, completion).to(device)
    sampling_logps = _SamplingLogps(requests, chains, ids, mask, completion, temperature)
    with evaluating(stats_pass.model):
        records = answer_records(
            stats_pass.model,
            ids,
            mask,
            completion,
            rows=stats_pass.rows,
            temperature=temperature,
            autocast=stats_pass.autocast,
            packed=stats_pass.rows is None,
            visit=sampling_logps if sampling_logps.needed else None,
        )
    logps, entropy, branching = records.logps, records.entropy, records.branching
    greedy = torch.from_numpy(_greedy(requests)).to(device)[:, None]
    logq = torch.where(greedy, 0.0, sampling_logps.logq if sampling_logps.needed else logps)
    coin = torch.where(greedy, 0.0, sampling_logps.coin)
    return RecomputedStats(*(value.cpu() for value in (logps, logq, coin, entropy, branching)))


def _pad(
    requests: Requests, tokens: Sequence[Sequence[int]], device: torch.device
) -> tuple[Int[Tensor, "requests length"], Int[Tensor, "requests length"], int]:
    """Return token ids and mask with prompts padded left and completions padded right, and the completions' length."""
    prompts = [prompt for prompt in requests.prompts for _ in range(requests.n)]
    prompt_length, completion_length = max(map(len, prompts)), max(map(len, tokens))
    ids = torch.zeros(len(prompts), prompt_length + completion_length, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, (prompt, completion) in enumerate(zip(prompts, tokens, strict=True)):
        columns = slice(prompt_length - len(prompt), prompt_length + len(completion))
        ids[row, columns], mask[row, columns] = torch.tensor([*prompt, *completion]), 1
    return ids.to(device), mask.to(device), completion_length


def _greedy(requests: Requests) -> np.ndarray:
    return (requests.rows["temperature"] == 0) & (not requests.curves)


def _temperatures(requests: Requests, length: int) -> Float[Tensor, "requests time"]:
    """Return the temperature of every token; 1 if the request is greedy."""
    if requests.curves:
        curves = [[*curve, *[curve[-1]] * length][:length] for curve in requests.curves]
        return torch.tensor(curves, dtype=torch.float32)[torch.from_numpy(requests.rows["curve"])]
    temperatures = np.where(_greedy(requests), 1.0, requests.rows["temperature"]).astype(np.float32)
    return torch.from_numpy(temperatures)[:, None].expand(-1, length).contiguous()


class _SamplingLogps:
    """Computes log q of every token from blocks of logits."""

    def __init__(
        self,
        requests: Requests,
        chains: Sequence[Chain],
        ids: Int[Tensor, "requests length"],
        mask: Int[Tensor, "requests length"],
        completion: int,
        temperature: Float[Tensor, "requests time"],
    ) -> None:
        device = ids.device
        self.ids, self.mask, self.prompt = ids, mask > 0, ids.size(1) - completion
        self.temperature = temperature
        self.chains = Chains.of(chains, device)
        self.penalty = torch.from_numpy(requests.rows["repetition_penalty"]).to(device)
        self.penalised = bool((self.penalty != 1).any())
        self.cuts = any(not chain.idle for chain in chains)
        self.logq = torch.zeros(len(ids), completion, device=device)
        self.coin = torch.zeros(len(ids), completion, device=device)

    @property
    def needed(self) -> bool:
        """True if log q differs from log π."""
        return self.cuts or self.penalised

    def __call__(self, row: Tensor, column: Tensor, logits: Tensor) -> None:
        """Store log q of the tokens at (row, column), whose logits these are."""
        device = self.temperature.device
        row, column, scores = row.to(device), column.to(device), logits.detach().to(device, torch.float32, copy=True)
        if self.penalised:
            scores = warp_repetition(scores, self._seen(row, column, scores.shape[-1]), self.penalty[row])
        rate = 1.0 / self.temperature[row, column]
        log_q = self.chains.select(row).log_q(scores, column, self.ids[row, self.prompt + column], rate)
        self.logq[row, column] = log_q.mixed.to(self.logq.dtype)
        self.coin[row, column] = (log_q.mixed - log_q.sampled).to(self.coin.dtype)

    def _seen(self, row: Tensor, column: Tensor, vocab: int) -> Bool[Tensor, "tokens vocab"]:
        """Return which tokens the prompt and the completion contain before each column."""
        seen = torch.zeros(len(row), vocab, dtype=torch.bool, device=row.device)
        for i, (request, position) in enumerate(zip(row.tolist(), column.tolist(), strict=True)):
            end = self.prompt + position
            seen[i, self.ids[request, :end][self.mask[request, :end]]] = True
        return seen
