"""Choose the fastest pass for log-probabilities in training that is proven correct on the model itself.

"unrolled"      packed, with the layers of `explorl.modeling.llama_pass`
"packed"        packed, with the model's own layers
"padded"        as the model and TRL do it
"""

from __future__ import annotations

import logging
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from explorl.modeling import proof
from explorl.modeling.attention import AttentionDropout
from explorl.modeling.llama_pass import llama_pass
from explorl.modeling.packed import packed_logps

logger = logging.getLogger(__name__)

Kind = Literal["unrolled", "packed", "padded"]


@dataclass
class PassChoice:
    """The pass chosen for one model with one set of adapters."""

    kind: Kind
    points: frozenset[int] = frozenset()
    """Turning points covered by the proof."""
    why: str = ""
    """Why no packed pass is used."""
    reasons: dict[str, str] = field(default_factory=dict)
    """Why each faster kind was rejected."""


_CHOSEN: WeakKeyDictionary[Any, dict[Any, PassChoice]] = WeakKeyDictionary()


def choose(model: Any, reach: int, *, dtype: torch.dtype | None = None, head_temperature: float = 1.0) -> PassChoice:
    """Return the fastest pass that is correct on sequences of up to ``reach`` tokens.

    ``model`` has TRL's fused head, with `head_temperature`, and no wrapper other than peft's. ``dtype`` is that of the
    computation, if autocast changes it.
    """
    points = proof.reached(proof.inner_model(model).config, reach)
    chosen = _CHOSEN.setdefault(proof.inner_model(model), {})
    key = (proof.build_of(model), dtype, head_temperature, model.training)
    choice = chosen.get(key)
    if choice is None or not points <= choice.points:
        choice = chosen[key] = _try_out(
            model, points | (choice.points if choice else frozenset()), dtype, head_temperature
        )
    return choice


def _try_out(model: Any, points: frozenset[int], dtype: torch.dtype | None, temperature: float) -> PassChoice:
    kinds: list[Kind] = ["packed"]
    if llama_pass(model) is not None:
        kinds.insert(0, "unrolled")
    reasons: dict[str, str] = {}
    if model.training and _drops_attention(model, temperature):
        reason = "the packed pass does not support attention dropout (set disable_dropout, or the dropout to 0)"
        return PassChoice("padded", points, f"{proof.layer_types(model)}: {reason}", {"packed": reason})
    for kind in kinds:
        reason = _difference(model, kind, sorted(points), dtype, temperature)
        if not reason:
            return PassChoice(kind, points, reasons=reasons)
        reasons[kind] = reason
        logger.info("the %s pass is not used: %s", kind, reason)
    return PassChoice("padded", points, f"{proof.layer_types(model)}: {reasons['packed']}", reasons)


def _drops_attention(model: Any, temperature: float) -> bool:
    """Return whether attention has dropout in training, which the proof, in evaluation mode, would not notice."""
    with torch.no_grad(), torch.random.fork_rng():
        try:
            _packed(model, proof.sequences(model, [])[:1], False, False, temperature)
        except AttentionDropout:
            return True
        except Exception:  # the proof reports other failures
            return False
    return False


def _difference(model: Any, kind: Kind, points: list[int], dtype: torch.dtype | None, temperature: float) -> str:
    """Return why this kind of pass can't be used for this model, or ""."""
    ids = proof.sequences(model, points)

    def fast(in_float32: bool) -> tuple[list[list[int]], Tensor]:
        with nullcontext() if in_float32 else proof.computing_in(model, dtype):
            return ids, _packed(model, ids, kind == "unrolled", False if in_float32 else None, temperature)

    return proof.difference(model, dtype, fast, temperature=temperature)


def _packed(model: Any, ids: list[list[int]], unrolled: bool, use_kernels: bool | None, temperature: float) -> Tensor:
    """Return the last log-probabilities of each sequence, all packed in one row, the first one twice."""
    device = next(model.parameters()).device
    rows = [ids[0], *ids]  # the first two share their prompt
    longest = max(len(row) for row in rows)
    padded = torch.tensor([[0] * (longest - len(row)) + list(row) for row in rows], device=device)
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows], device=device)
    logps, _ = packed_logps(
        model,
        padded,
        mask,
        proof.TAIL,
        head_temperature=temperature,
        unrolled=unrolled,
        use_kernels=use_kernels,
    )
    return logps[1:].float().cpu()


def tempered_logps(
    model: Any, input_ids: Tensor, attention_mask: Tensor, completion: int, temperature: Tensor
) -> tuple[Tensor, Tensor]:
    """Return log π and entropy of padded rows from all logits, at a temperature per row or per token."""
    logits = model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False).logits
    logits = logits[:, -completion - 1 : -1].float() / temperature.view(len(temperature), -1, 1)
    distribution = torch.log_softmax(logits, dim=-1)
    counted = attention_mask[:, -completion:] > 0
    logps = distribution.gather(-1, input_ids[:, -completion:, None]).squeeze(-1)
    entropy = -(distribution.exp() * distribution).sum(-1)
    return logps.where(counted, 0.0), entropy.where(counted, 0.0)
