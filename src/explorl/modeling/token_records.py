"""Statistics of every completion token, from one pass over the LM head that never stores all logits.

    log π(o_t), Σ_v π(v)², the most likely token other than o_t      at the temperature of sampling
    entropy, branching factor                                       at temperature 1

Logits are computed a block of rows at a time, so memory does not grow with batch × time × vocabulary. The records give
the size of a token's update to the LM head in closed form (`update_size`), without a vocabulary × width matrix. Nothing
here has gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from explorl.modeling import proof
from explorl.modeling.answer_states import (
    AlignedRows,
    LogitsPath,
    adjusted,
    head_of,
    is_sharded,
    logits_path,
    own_logits,
    states,
    unwrapped,
)
from explorl.modeling.logit_blocks import DTYPES, TokenRecords, block_bytes, by_blocks

Visit = Callable[[Tensor, Tensor, Tensor], None]
"""Called with each block of logits: the row and completion column of each token, and the (tokens, vocab) logits, which
are valid only during the call and must not be changed."""

__all__ = ["AnswerRecords", "TokenRecords", "answer_records", "coefficient", "token_records", "update_size"]


class AnswerRecords(NamedTuple):
    """`TokenRecords` of the last `completion` positions of each row, 0 where the mask is 0."""

    logps: Float[Tensor, "batch time"]
    entropy: Float[Tensor, "batch time"]
    branching: Int[Tensor, "batch time"]
    collision: Float[Tensor, "batch time"]
    others_squared: Float[Tensor, "batch time"]
    other_ids: Int[Tensor, "batch time"]
    other_logps: Float[Tensor, "batch time"]
    state_norms: Float[Tensor, "batch time"]
    """‖h_t‖₂ of the hidden state that predicts the token."""


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
    visit: Callable[[slice, Tensor], None] | None = None,
) -> TokenRecords:
    """Return the records of the tokens `targets` under softmax(logits), logits = states · weightᵀ + bias.

    Logits are rounded as the model rounds them, to the type of `states` (or of autocast), and capped in it:
    softcap · tanh(logits / softcap). All sums run in float32, those of the branching factor in float64.

    Args:
        temperature: One for all tokens or one per token; entropy and branching factor ignore it.
        mass: Mass that defines the branching factor.
        block: Bytes of the largest tensor over the vocabulary, such as 2**26.
        visit: Called with each block of logits, which it must not change.
    """
    _check(states, weight, targets)
    device = states.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else states.dtype
    states, weight = states.to(dtype), weight.to(dtype)
    bias = None if bias is None else bias.to(dtype)
    vocab = len(weight)
    room = states.new_empty(0)

    def logits(some: slice) -> Tensor:
        nonlocal room
        rows = states[some]
        if len(room) < len(rows):  # rows start at multiples of 16, which a GPU reads fastest
            room = states.new_empty(len(rows), -(-vocab // 16) * 16)
        out = room[: len(rows), :vocab]
        if bias is None:
            torch.mm(rows, weight.t(), out=out)
        else:
            torch.addmm(bias, rows, weight.t(), out=out)
        return adjusted(out, 1.0, softcap)

    with torch.autocast(device, enabled=False):
        return by_blocks(_with_visit(logits, visit), targets, vocab, dtype, temperature, mass, block)


def _with_visit(
    logits: Callable[[slice], Tensor], visit: Callable[[slice, Tensor], None] | None
) -> Callable[[slice], Tensor]:
    if visit is None:
        return logits

    def visited(some: slice) -> Tensor:
        block_logits = logits(some)
        visit(some, block_logits)
        return block_logits

    return visited


def _check(states: Tensor, weight: Tensor, targets: Tensor) -> None:
    if states.ndim != 2 or weight.ndim != 2 or states.shape[1] != weight.shape[1] or targets.shape != states.shape[:1]:
        shapes = f"{tuple(states.shape)}, {tuple(weight.shape)} and {tuple(targets.shape)}"
        raise ValueError(f"states must be (N, d), weight (V, d) and targets (N,), got {shapes}")
    low, high = (int(value) for value in torch.aminmax(targets)) if len(targets) else (0, 0)
    if low < 0 or high >= len(weight):
        raise ValueError(f"targets must be in 0 … {len(weight) - 1}, got {low if low < 0 else high}")


def coefficient(
    ratio: Float[Tensor, "*tokens"],
    advantages: Float[Tensor, "*tokens"],
    low: float | Tensor,
    high: float | Tensor,
) -> Float[Tensor, "*tokens"]:
    """Return the factor of ∇ log π in PPO's token term: r·A if the term is not clipped, else 0.

        min(r·A, clip(r, 1 − low, 1 + high)·A) is clipped where A > 0 and r > 1 + high, or A < 0 and r < 1 − low

    Deng et al. 2025 §3.2 (where clip(Â, …) is printed instead of clip(r, …)).
    """
    clipped = ((advantages > 0) & (ratio > 1 + high)) | ((advantages < 0) & (ratio < 1 - low))
    return torch.where(clipped, 0.0, ratio * advantages)


def update_size(
    logps: Float[Tensor, "*tokens"],
    others_squared: Float[Tensor, "*tokens"],
    state_norms: Float[Tensor, "*tokens"],
    coefficient: Float[Tensor, "*tokens"],
    *,
    temperature: float | Tensor = 1.0,
) -> Float[Tensor, "*tokens"]:
    """Return the Frobenius norm of a token's gradient of the LM head, without computing the matrix.

        G_t = |α_t| · ‖e(o_t) − π‖₂ · ‖h_t‖₂ / τ,   ‖e(o_t) − π‖² = (1 − π(o_t))² + Σ_{v ≠ o_t} π(v)²

    Deng et al. 2025 §3.2 write 1 − 2π(o_t) + Σ_v π(v)², which float32 rounds to 0 for a nearly certain token.
    `coefficient` is α_t, `temperature` is the τ of `logps` and `others_squared`.
    """
    distance = (torch.expm1(logps).square() + others_squared).sqrt()
    return coefficient.abs() * distance * state_norms / temperature


@torch.no_grad()
def answer_records(
    model: Any,
    input_ids: Int[Tensor, "batch length"],
    attention_mask: Int[Tensor, "batch length"],
    completion: int,
    *,
    rows: int | None = None,
    temperature: float | Float[Tensor, " batch"] | Float[Tensor, "batch time"] = 1.0,
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
    mass: float = 0.95,
    block: int | None = None,
    packed: bool = True,
    visit: Visit | None = None,
) -> AnswerRecords:
    """Return the records of the last `completion` positions of each row, under a causal LM of transformers.

    The hidden states that the model's head reads are computed by the fastest pass that is proven correct, and the
    logits from them a block at a time. If a model's logits are not those of its head, scaled or capped, its own logits
    are used, of as many rows as fit into four blocks, or of `rows` if the weights are sharded over processes.

    Args:
        rows: Number of rows per forward pass; all by default.
        temperature: One for all rows, one per row, or one per position.
        autocast: Returns the context in which the model is called.
        packed: False calls the model on padded rows even if a packed pass is correct.
        visit: Called with the logits of every token, a block at a time.
    """
    if not 0 < completion <= input_ids.size(1):
        raise ValueError(f"completion is {completion}; use 1 to {input_ids.size(1)}, the number of tokens per row")
    model = unwrapped(model)
    device = next(model.parameters()).device
    input_ids, attention_mask = input_ids.to(device), attention_mask.to(device)
    with autocast():
        dtype = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None
    values = [torch.zeros(len(input_ids), completion, dtype=kind, device=device) for kind in (*DTYPES, torch.float32)]
    if not len(input_ids):
        return AnswerRecords(*values)
    path, sharded = logits_path(model, input_ids.size(1), dtype), is_sharded(model)
    if not packed and path.kind != "own logits":
        path = replace(path, kind="padded")
    at_once = rows or len(input_ids)
    if path.kind == "own logits" and not sharded:
        row_bytes = 4 * proof.text_config(model).vocab_size * (completion + 1)
        at_once = max(min(at_once, 4 * block_bytes(device, block) // row_bytes), 1)
    for some in torch.arange(len(input_ids), device=device).split(at_once):
        aligned = AlignedRows(input_ids[some], attention_mask[some], completion)
        if not len(aligned.targets) and not sharded:
            continue
        row, column = some[aligned.places[0]], aligned.places[1]
        row_temperature: float | Tensor = temperature
        if isinstance(temperature, Tensor):
            row_temperature = (
                temperature.to(device)[row] if temperature.dim() == 1 else temperature.to(device)[row, column]
            )
        visitor = None if visit is None else partial(_visited, visit, row, column)
        with autocast():
            if path.kind == "own logits":
                records, norms = _from_own_logits(model, aligned, row_temperature, mass, block, visitor)
            else:
                read = states(model, aligned, path.kind)
                records = _from_head(head_of(model), read, aligned.targets, path, row_temperature, mass, block, visitor)
                norms = torch.linalg.vector_norm(read, dim=-1, dtype=torch.float32)
        for value, part in zip(values, (*records, norms), strict=True):
            value[row, column] = part.to(device)
    return AnswerRecords(*values)


def _visited(visit: Visit, row: Tensor, column: Tensor, some: slice, logits: Tensor) -> None:
    visit(row[some], column[some], logits)


def _from_head(
    head: nn.Module,
    read: Float[Tensor, "tokens width"],
    targets: Int[Tensor, " tokens"],
    path: LogitsPath,
    temperature: float | Tensor,
    mass: float,
    block: int | None,
    visit: Callable[[slice, Tensor], None] | None = None,
) -> TokenRecords:
    """Return the records from the head's weight, or from calling the head if it is more than a linear layer."""
    device = next(head.parameters()).device
    read, targets = read.to(device), targets.to(device)
    if type(head) is nn.Linear and proof.touched(head) == (0, 0, id(None)) and path.scale == 1:
        options: Any = {"bias": head.bias, "temperature": temperature, "softcap": path.softcap}
        return token_records(read, head.weight, targets, mass=mass, block=block, visit=visit, **options)
    sample = head(read[:1])

    def logits(some: slice) -> Tensor:
        return adjusted(head(read[some]), path.scale, path.softcap)

    vocab, dtype = sample.shape[-1], sample.dtype
    return by_blocks(_with_visit(logits, visit), targets, vocab, dtype, temperature, mass, block)


def _from_own_logits(
    model: Any,
    rows: AlignedRows,
    temperature: float | Tensor,
    mass: float,
    block: int | None,
    visit: Callable[[slice, Tensor], None] | None = None,
) -> tuple[TokenRecords, Float[Tensor, " tokens"]]:
    logits, norms, scored = own_logits(model, rows)
    row, column = scored.to(logits.device).nonzero().unbind(1)
    targets, vocab = rows.targets.to(logits.device), logits.shape[-1]
    some_logits = _with_visit(lambda some: logits[row[some], column[some]], visit)
    records = by_blocks(some_logits, targets, vocab, logits.dtype, temperature, mass, block)
    return records, norms[:, : scored.size(1)][scored.to(norms.device)]
