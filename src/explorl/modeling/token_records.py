"""What is known of every token of an answer, from one pass over the LM head that never holds all logits.

    log π(o_t), Σ_v π(v)², the most likely token other than o_t      at the temperature of sampling
    entropy, branching factor                                       at temperature 1

Logits are computed a block of rows at a time, so memory does not grow with batch × time × vocabulary. From the records
follows the size of a token's update to the LM head in closed form (`update_size`), with no vocabulary × width matrix.
Nothing here carries gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from explorl.metrics.tokens import branching_factor, token_entropy
from explorl.modeling import proof

BLOCK = 2**26
"""Bytes of the largest tensor over the vocabulary, by default: 64 MiB."""


class TokenRecords(NamedTuple):
    """Of N tokens, one value each."""

    logps: Float[Tensor, "*tokens"]
    """log π of the token, at the temperature."""
    entropy: Float[Tensor, "*tokens"]
    """In nats, at temperature 1."""
    branching: Int[Tensor, "*tokens"]
    """Size of the smallest set of top tokens with the given mass, at temperature 1."""
    collision: Float[Tensor, "*tokens"]
    """Σ_v π(v)², at the temperature."""
    other_ids: Int[Tensor, "*tokens"]
    """The most likely token other than this one; of equals, the one with the lowest id."""
    other_logps: Float[Tensor, "*tokens"]
    """Its log π, at the temperature; −inf in a vocabulary of one."""


class AnswerRecords(NamedTuple):
    """`TokenRecords` of the last `completion` positions of each row, 0 where the mask is 0."""

    logps: Float[Tensor, "batch time"]
    entropy: Float[Tensor, "batch time"]
    branching: Int[Tensor, "batch time"]
    collision: Float[Tensor, "batch time"]
    other_ids: Int[Tensor, "batch time"]
    other_logps: Float[Tensor, "batch time"]
    state_norms: Float[Tensor, "batch time"]
    """‖h_t‖₂ of what the head reads where the token is predicted."""


@torch.no_grad()
def token_records(
    states: Float[Tensor, "tokens width"],
    weight: Float[Tensor, "vocab width"],
    targets: Int[Tensor, " tokens"],
    *,
    bias: Float[Tensor, " vocab"] | None = None,
    temperature: float | Float[Tensor, " tokens"] = 1.0,
    softcap: float | None = None,
    mass: float = 0.95,
    block: int | None = None,
) -> TokenRecords:
    """Records of the tokens `targets` under softmax(logits), logits = states · weightᵀ + bias.

    Logits are rounded as the model rounds them, to the type of `states` (or of autocast), and capped in it:
    softcap · tanh(logits / softcap). All sums run in float32, those of the branching factor in float64.

    Args:
        temperature: One for all tokens or one a token, for all but entropy and branching factor.
        mass: Of the branching factor.
        block: Bytes of the largest tensor over the vocabulary, such as 2**26.
    """
    device = states.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else states.dtype
    states, weight = states.to(dtype), weight.to(dtype)
    bias = None if bias is None else bias.to(dtype)

    def logits(some: slice) -> Tensor:
        found = torch.nn.functional.linear(states[some], weight, bias)
        return found if softcap is None else softcap * torch.tanh(found / softcap)

    with torch.autocast(device, enabled=False):
        return _by_blocks(logits, targets, len(weight), temperature, mass, block)


def coefficient(
    ratio: Float[Tensor, "*tokens"],
    advantages: Float[Tensor, "*tokens"],
    low: float | Tensor,
    high: float | Tensor,
) -> Float[Tensor, "*tokens"]:
    """Factor of ∇ log π in PPO's token term: r·A where the term is not clipped, else 0.

        min(r·A, clip(r, 1 − low, 1 + high)·A) is clipped where A > 0 and r > 1 + high, or A < 0 and r < 1 − low

    Deng et al. 2025 §3.2 (who print clip(Â, …) where clip(r, …) is meant).
    """
    clipped = ((advantages > 0) & (ratio > 1 + high)) | ((advantages < 0) & (ratio < 1 - low))
    return torch.where(clipped, 0.0, ratio * advantages)


def update_size(
    logps: Float[Tensor, "*tokens"],
    collision: Float[Tensor, "*tokens"],
    state_norms: Float[Tensor, "*tokens"],
    coefficient: Float[Tensor, "*tokens"],
    *,
    temperature: float | Tensor = 1.0,
) -> Float[Tensor, "*tokens"]:
    """Frobenius norm of a token's gradient of the LM head, without the matrix.

        G_t = |α_t| · ‖e(o_t) − π‖₂ · ‖h_t‖₂ / τ,   ‖e(o_t) − π‖² = 1 − 2π(o_t) + Σ_v π(v)²

    Deng et al. 2025 §3.2; `coefficient` is α_t, `temperature` is τ, at which `logps` and `collision` were taken.
    """
    distance = (1 - 2 * logps.exp() + collision).clamp(min=0).sqrt()
    return coefficient.abs() * distance * state_norms / temperature


@torch.no_grad()
def answer_records(
    model: Any,
    input_ids: Int[Tensor, "batch length"],
    attention_mask: Int[Tensor, "batch length"],
    completion: int,
    *,
    rows: int | None = None,
    temperature: float | Float[Tensor, " batch"] = 1.0,
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
    mass: float = 0.95,
    block: int | None = None,
) -> AnswerRecords:
    """Records of the last `completion` positions of each row, under a causal language model of transformers.

    Args:
        rows: How many rows the model sees at once; all by default.
        temperature: One for all rows or one a row.
        autocast: Makes the context in which the model is called.
    """
    found = []
    for some in torch.arange(len(input_ids), device=input_ids.device).split(rows or max(len(input_ids), 1)):
        own = temperature[some] if isinstance(temperature, Tensor) else temperature
        with autocast():
            logits, norms = _own_logits(model, input_ids[some], attention_mask[some], completion)
        time = logits.size(1)
        each = own.repeat_interleave(time) if isinstance(own, Tensor) else own
        records = _of_logits(logits.flatten(0, 1), input_ids[some][:, -time:].flatten(), each, mass, block)
        counted = attention_mask[some][:, -completion:] > 0
        values = [value.view(-1, time) for value in records] + [norms]
        padded = (torch.nn.functional.pad(value, (completion - time, 0)) for value in values)
        found.append([value.where(counted, torch.zeros_like(value)) for value in padded])
    return AnswerRecords(*(torch.cat(values) for values in zip(*found, strict=True)))


def _own_logits(model: Any, input_ids: Tensor, attention_mask: Tensor, completion: int) -> tuple[Tensor, Tensor]:
    """The model's own logits for the last positions, and the norms of what its head read."""
    read: list[Tensor] = []
    head = proof.inner_model(model).get_output_embeddings()
    hook = head.register_forward_pre_hook(lambda module, inputs: read.append(inputs[0]))
    keep = {"logits_to_keep": completion + 1} if proof.keeps_logits(model) else {}
    try:
        logits = model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False, **keep).logits
    finally:
        hook.remove()
    logits = logits[:, -completion - 1 : -1]
    return logits, read[-1][:, -completion - 1 : -1].float().norm(dim=-1)


def _of_logits(
    logits: Tensor, targets: Tensor, temperature: float | Tensor, mass: float, block: int | None
) -> TokenRecords:
    return _by_blocks(lambda some: logits[some], targets, logits.shape[-1], temperature, mass, block)


def _by_blocks(
    logits: Callable[[slice], Tensor],
    targets: Tensor,
    vocab: int,
    temperature: float | Tensor,
    mass: float,
    block: int | None,
) -> TokenRecords:
    found = []
    for some in _slices(len(targets), vocab, block):
        own = temperature[some] if isinstance(temperature, Tensor) else temperature
        found.append(_reference(logits(some), targets[some], own, mass))
    return TokenRecords(*(torch.cat(values) for values in zip(*found, strict=True)))


def _slices(tokens: int, vocab: int, block: int | None) -> Iterator[slice]:
    """Of as many tokens as a block holds in float64; one empty slice where there are none."""
    step = max((BLOCK if block is None else block) // (8 * vocab), 1)
    for start in range(0, max(tokens, 1), step):
        yield slice(start, start + step)


def _reference(
    logits: Float[Tensor, "rows vocab"], targets: Int[Tensor, " rows"], temperature: float | Tensor, mass: float
) -> TokenRecords:
    """The definitions, on whole rows of logits."""
    entropy, branching = token_entropy(logits), branching_factor(logits, mass)
    scaled = logits.float() / (temperature.unsqueeze(-1) if isinstance(temperature, Tensor) else temperature)
    log_z = scaled.logsumexp(-1)
    own = scaled.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    collision = ((2 * scaled).logsumexp(-1) - 2 * log_z).exp()
    other = scaled.scatter_(-1, targets.unsqueeze(-1), -torch.inf).max(-1)
    return TokenRecords(own - log_z, entropy, branching, collision, other.indices, other.values - log_z)
