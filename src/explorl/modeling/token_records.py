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
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from explorl.metrics.tokens import branching_factor, token_entropy
from explorl.modeling import proof
from explorl.modeling.answer_states import (
    AlignedRows,
    adjusted,
    head_of,
    is_sharded,
    own_logits,
    reading,
    states,
    unwrapped,
)

BLOCK = {"cpu": 2**26, "cuda": 2**29}
"""Bytes of the largest tensor over the vocabulary, by default: a GPU needs about a thousand rows to be busy."""


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
    _check(states, weight, targets, temperature)
    device = states.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else states.dtype
    states, weight = states.to(dtype), weight.to(dtype)
    bias = None if bias is None else bias.to(dtype)
    vocab = len(weight)
    room = states.new_empty(0)

    def logits(some: slice) -> Tensor:
        nonlocal room
        rows = states[some]
        if len(room) < len(rows):  # rows begin at multiples of 16, where a GPU reads them fastest
            room = states.new_empty(len(rows), -(-vocab // 16) * 16)
        out = room[: len(rows), :vocab]
        if bias is None:
            torch.mm(rows, weight.t(), out=out)
        else:
            torch.addmm(bias, rows, weight.t(), out=out)
        return adjusted(out, 1.0, softcap)

    with torch.autocast(device, enabled=False):
        return _by_blocks(logits, targets, vocab, dtype, temperature, mass, block)


def _check(states: Tensor, weight: Tensor, targets: Tensor, temperature: float | Tensor) -> None:
    if states.ndim != 2 or weight.ndim != 2 or states.shape[1] != weight.shape[1] or len(states) != len(targets):
        shapes = f"{tuple(states.shape)}, {tuple(weight.shape)} and {tuple(targets.shape)}"
        raise ValueError(f"states (N, d), weight (V, d) and targets (N,) are needed, got {shapes}")
    if not len(targets):
        return
    low, high = (int(value) for value in torch.stack(torch.aminmax(targets)))
    if low < 0 or high >= len(weight):
        raise ValueError(f"targets must be in 0 … {len(weight) - 1}, got {low if low < 0 else high}")
    least = float(torch.as_tensor(temperature).min())
    if not least > 0:
        raise ValueError(f"temperature must be above 0, such as 1.0; got {least}")


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

    What the model's head reads is computed by the fastest pass that is proven right on it, and the logits from that a
    block at a time. Where a model's logits are not its head's (but for a scale or a cap), they are its own, of as many
    rows as fit into four blocks, or of `rows` where weights are spread over processes.

    Args:
        rows: How many rows the model sees at once; all by default.
        temperature: One for all rows or one a row.
        autocast: Makes the context in which the model is called.
    """
    if not 0 < completion <= input_ids.size(1):
        raise ValueError(f"completion is {completion}; rows have {input_ids.size(1)} tokens, so use 1 to that many")
    model = unwrapped(model)
    device = next(model.parameters()).device
    input_ids, attention_mask = input_ids.to(device), attention_mask.to(device)
    with autocast():
        dtype = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None
    values = [torch.zeros(len(input_ids), completion, dtype=kind, device=device) for kind in (*_DTYPES, torch.float32)]
    if not len(input_ids):
        return AnswerRecords(*values)
    found, together = reading(model, input_ids.size(1), dtype), is_sharded(model)
    at_once = rows or len(input_ids)
    if found.kind == "own logits" and not together:
        row_bytes = 4 * proof.text_config(model).vocab_size * (completion + 1)
        at_once = max(min(at_once, 4 * _bytes(device.type, block) // row_bytes), 1)
    for some in torch.arange(len(input_ids), device=device).split(at_once):
        aligned = AlignedRows(input_ids[some], attention_mask[some], completion)
        if not len(aligned.targets) and not together:
            continue
        row, column = some[aligned.places[0]], aligned.places[1]
        own = temperature.to(device)[row] if isinstance(temperature, Tensor) else temperature
        with autocast():
            if found.kind == "own logits":
                records, norms = _from_own_logits(model, aligned, own, mass, block)
            else:
                read = states(model, aligned, found.kind)
                records = _from_head(head_of(model), read, aligned.targets, found, own, mass, block)
                norms = torch.linalg.vector_norm(read, dim=-1, dtype=torch.float32)
        for value, part in zip(values, (*records, norms), strict=True):
            value[row, column] = part.to(device)
    return AnswerRecords(*values)


def _from_head(
    head: nn.Module, read: Tensor, targets: Tensor, found: Any, temperature: float | Tensor, mass: float, block: Any
) -> TokenRecords:
    """By the head's weight, or by the head itself where more than a weight acts in it."""
    read, targets = read.to(next(head.parameters()).device), targets.to(next(head.parameters()).device)
    if type(head) is nn.Linear and proof.touched(head) == (0, 0, id(None)) and found.scale == 1:
        given: Any = {"bias": head.bias, "temperature": temperature, "softcap": found.softcap}
        return token_records(read, head.weight, targets, mass=mass, block=block, **given)
    sample = head(read[:1])

    def logits(some: slice) -> Tensor:
        return adjusted(head(read[some]), found.scale, found.softcap)

    return _by_blocks(logits, targets, sample.shape[-1], sample.dtype, temperature, mass, block)


def _from_own_logits(
    model: Any, rows: AlignedRows, temperature: float | Tensor, mass: float, block: int | None
) -> tuple[TokenRecords, Tensor]:
    logits, norms, scored = own_logits(model, rows)
    vocab = logits.shape[-1]
    chosen = scored(torch.arange(norms.numel(), device=logits.device).view_as(norms))
    flat = logits.reshape(-1, vocab)
    targets = rows.targets.to(logits.device)
    records = _by_blocks(lambda some: flat[chosen[some]], targets, vocab, flat.dtype, temperature, mass, block)
    return records, scored(norms)


_DTYPES = (torch.float32, torch.float32, torch.int64, torch.float32, torch.int64, torch.float32)
"""Of the six records."""


def _by_blocks(
    logits: Callable[[slice], Tensor],
    targets: Tensor,
    vocab: int,
    dtype: torch.dtype,
    temperature: float | Tensor,
    mass: float,
    block: int | None,
) -> TokenRecords:
    """Records of all rows from the logits of some, by Triton's kernel where there is a GPU."""
    device = targets.device
    out = TokenRecords(*(torch.empty(len(targets), dtype=kind, device=device) for kind in _DTYPES))
    kernel = _has_kernel(device, dtype) and 0 < mass < 1
    warm = temperature if isinstance(temperature, Tensor) else None
    if warm is None and temperature != 1:
        warm = torch.full((len(targets),), float(temperature), device=device)
    warm = None if warm is None else warm.to(device, torch.float32)
    wide = dtype.itemsize if kernel else 8  # the reference sums in float64
    for some in _slices(len(targets), _bytes(device.type, block) // (wide * vocab)):
        own = None if warm is None else warm[some]
        into = TokenRecords(*(value[some] for value in out))
        if kernel:
            from explorl.modeling.triton_records import record

            record(logits(some), targets[some], own, mass, into)
        else:
            for value, found in zip(into, _reference(logits(some), targets[some], own, mass), strict=True):
                value.copy_(found)
    if kernel and bool(out.entropy.isnan().any()):
        raise ValueError("every row needs a probability somewhere and no NaN; one has NaN, +inf or no mass at all")
    return out


def _has_kernel(device: torch.device, dtype: torch.dtype) -> bool:
    known = (torch.bfloat16, torch.float16, torch.float32)
    return device.type == "cuda" and dtype in known and find_spec("triton") is not None


def _bytes(device: str, block: int | None) -> int:
    return BLOCK.get(device, BLOCK["cpu"]) if block is None else block


def _slices(tokens: int, most: int) -> Iterator[slice]:
    """As few as hold at most so many tokens each, and as equal, in steps of 64 where they are large."""
    most = max(most if most < 128 else most // 64 * 64, 1)
    step = -(-tokens // max(-(-tokens // most), 1))
    step = min(step if step < 128 else -(-step // 64) * 64, most)
    for start in range(0, tokens, max(step, 1)):
        yield slice(start, start + step)


def _reference(
    logits: Float[Tensor, "rows vocab"], targets: Int[Tensor, " rows"], temperature: Tensor | None, mass: float
) -> TokenRecords:
    """The definitions, on whole rows of logits."""
    vocab = logits.shape[-1]
    entropy = token_entropy(logits, chunk=logits.numel() or vocab)
    branching = branching_factor(logits, mass, chunk=logits.numel() or vocab)
    scaled = logits.float() if temperature is None else logits.float() / temperature.unsqueeze(-1)
    log_z = scaled.logsumexp(-1)
    own = scaled.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    collision = ((2 * scaled).logsumexp(-1) - 2 * log_z).exp()
    other = scaled.scatter(-1, targets.unsqueeze(-1), -torch.inf).max(-1)
    return TokenRecords(own - log_z, entropy, branching, collision, other.indices, other.values - log_z)
