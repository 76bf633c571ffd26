"""Records of tokens that another sampler has drawn: one pass of the training model, a block of logits at a time.

    log π at the request's temperature, entropy and branching factor at 1      `answer_records`
    log q in the distribution that the request was drawn from                  bias → repetition penalty → `chain`

The other sampler's logits are close to the model's, not the same to the last bit; what is learnt from is the model, so
the records are the model's.
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
    """How the training model is called."""

    model: Any
    rows: int | None = None
    """Rows at a time; all by default, packed. With a number they are padded, so that all processes call it alike, and
    equal answers have equal records."""
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext


class RecomputedStats(NamedTuple):
    """One value per token, of requests in their order; 0 behind the end of a completion."""

    logps: Float[Tensor, "requests time"]
    sampling_logps: Float[Tensor, "requests time"]
    """log q, over both sides of a coin that is thrown for every token; 0 where the request is greedy."""
    coin_logps: Float[Tensor, "requests time"]
    """What that adds to log q of the side that the coin showed."""
    entropy: Float[Tensor, "requests time"]
    branching: Int[Tensor, "requests time"]


def compute_token_stats(
    how: StatsPass, requests: Requests, chains: Sequence[Chain], tokens: Sequence[Sequence[int]]
) -> RecomputedStats:
    """Records of the completions ``tokens`` of all requests, each of at least one token."""
    device = next(how.model.parameters()).device
    ids, mask, completion = _padded(requests, tokens, device)
    temperature = _temperatures(requests, completion).to(device)
    warps = _Warps(requests, chains, ids, mask, completion, temperature)
    with evaluating(how.model):
        found = answer_records(
            how.model,
            ids,
            mask,
            completion,
            rows=how.rows,
            temperature=temperature,
            autocast=how.autocast,
            packed=how.rows is None,
            visit=warps if warps.needed else None,
        )
    logps, entropy, branching = found.logps, found.entropy, found.branching
    greedy = torch.from_numpy(_greedy(requests)).to(device)[:, None]
    logq = torch.where(greedy, 0.0, warps.logq if warps.needed else logps)
    coin = torch.where(greedy, 0.0, warps.coin)
    return RecomputedStats(*(value.cpu() for value in (logps, logq, coin, entropy, branching)))


def _padded(
    requests: Requests, tokens: Sequence[Sequence[int]], device: torch.device
) -> tuple[Int[Tensor, "requests length"], Int[Tensor, "requests length"], int]:
    """Prompts on the left, completions on the right."""
    prompts = [prompt for prompt in requests.prompts for _ in range(requests.n)]
    before, behind = max(map(len, prompts)), max(map(len, tokens))
    ids = torch.zeros(len(prompts), before + behind, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, (prompt, answer) in enumerate(zip(prompts, tokens, strict=True)):
        whole = torch.tensor([*prompt, *answer])
        place = slice(before - len(prompt), before + len(answer))
        ids[row, place], mask[row, place] = whole, 1
    return ids.to(device), mask.to(device), behind


def _greedy(requests: Requests) -> np.ndarray:
    return (requests.rows["temperature"] == 0) & (not requests.curves)


def _temperatures(requests: Requests, length: int) -> Float[Tensor, "requests time"]:
    """Of every token; 1 where a request is greedy."""
    if requests.curves:
        curves = [[*curve, *[curve[-1]] * length][:length] for curve in requests.curves]
        return torch.tensor(curves, dtype=torch.float32)[torch.from_numpy(requests.rows["curve"])]
    warm = np.where(_greedy(requests), 1.0, requests.rows["temperature"]).astype(np.float32)
    return torch.from_numpy(warm)[:, None].expand(-1, length).contiguous()


class _Warps:
    """log q of every token, from blocks of logits."""

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
        self.rows = Chains.of(chains, device)
        self.penalty = torch.from_numpy(requests.rows["repetition_penalty"]).to(device)
        self.penalised = bool((self.penalty != 1).any())
        self.bias = None if requests.bias is None else torch.from_numpy(requests.bias).to(device)
        self.bias_set = torch.from_numpy(requests.bias_set).to(device)
        self.cuts = any(not chain.idle for chain in chains)
        self.logq = torch.zeros(len(ids), completion, device=device)
        self.coin = torch.zeros(len(ids), completion, device=device)

    @property
    def needed(self) -> bool:
        """Whether log q is anything but log π."""
        return self.cuts or self.penalised or self.bias is not None

    def __call__(self, row: Tensor, column: Tensor, logits: Tensor) -> None:
        place = self.temperature.device
        row, column, scores = row.to(place), column.to(place), logits.detach().to(place, torch.float32, copy=True)
        if self.bias is not None:
            scores = scores + self.bias[self.bias_set[row]]
        if self.penalised:
            scores = warp_repetition(scores, self._seen(row, column, scores.shape[-1]), self.penalty[row])
        rate = 1.0 / self.temperature[row, column]
        found = self.rows.take(row).log_q(scores, column, self.ids[row, self.prompt + column], rate)
        self.logq[row, column] = found.mixed.to(self.logq.dtype)
        self.coin[row, column] = (found.mixed - found.drawn).to(self.coin.dtype)

    def _seen(self, row: Tensor, column: Tensor, vocab: int) -> Bool[Tensor, "tokens vocab"]:
        """Tokens of the prompt and of the completion so far."""
        seen = torch.zeros(len(row), vocab, dtype=torch.bool, device=row.device)
        for place, (one, at) in enumerate(zip(row.tolist(), column.tolist(), strict=True)):
            before = self.ids[one, : self.prompt + at][self.mask[one, : self.prompt + at]]
            seen[place, before] = True
        return seen
