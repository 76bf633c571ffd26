"""Log-probabilities of completions without padding.

All tokens of a micro-batch stand in one row, so that no layer and no logit is computed for padding. Attention alone is
computed on padded rows, where a causal kernel needs no mask: padding stands behind every token that counts. The result
is that of a padded pass, with gradients.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from explorl.rollout.attention import NAME, attending
from explorl.rollout.fused import Fusion


class PackedRows:
    """Attention within each of several sequences that stand in one row."""

    def __init__(self, lengths: Int[Tensor, " rows"], tokens: int) -> None:
        self.rows, self.longest = len(lengths), int(lengths.max())
        starts = lengths.cumsum(0) - lengths
        row = torch.repeat_interleave(torch.arange(self.rows, device=lengths.device), lengths, output_size=tokens)
        self.positions = torch.arange(tokens, device=lengths.device) - starts[row]
        self.slots = row * self.longest + self.positions
        self.even = tokens == self.rows * self.longest

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None, cap: float | None
    ) -> Tensor:
        """(1, heads, tokens, size) → (1, tokens, heads, size)."""
        query, key, value = (self._spread(tensor) for tensor in (query, key, value))
        mask = None
        if window is not None and window < self.longest:
            place = torch.arange(self.longest, device=query.device)
            distance = place[:, None] - place
            mask = (distance >= 0) & (distance < window)
        if cap is None:
            grouped = query.size(1) != key.size(1)
            out = F.scaled_dot_product_attention(
                query, key, value, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=grouped
            )
        else:
            out = _capped_attention(query, key, value, mask, scale, cap)
        flat = out.transpose(1, 2).reshape(self.rows * self.longest, out.size(1), out.size(3))
        return (flat if self.even else flat.index_select(0, self.slots)).unsqueeze(0)

    def _spread(self, tensor: Tensor) -> Tensor:
        """(1, heads, tokens, size) → (rows, heads, longest, size)."""
        flat = tensor[0].transpose(0, 1)
        if not self.even:
            padded = flat.new_zeros(self.rows * self.longest, *flat.shape[1:])
            flat = padded.index_copy(0, self.slots, flat)
        return flat.reshape(self.rows, self.longest, *flat.shape[1:]).transpose(1, 2)


def _capped_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float, cap: float
) -> Tensor:
    """softmax(cap · tanh(scores / cap)) · value, which no fused kernel of torch computes."""
    key, value = (tensor.repeat_interleave(query.size(1) // tensor.size(1), dim=1) for tensor in (key, value))
    scores = cap * torch.tanh(query @ key.transpose(2, 3) * scale / cap)
    if mask is None:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    return torch.softmax(scores.masked_fill(~mask, -torch.inf).float(), dim=-1).to(value.dtype) @ value


_NORMS: WeakKeyDictionary[nn.Module, Fusion] = WeakKeyDictionary()


def fused_norms(model: nn.Module) -> AbstractContextManager[None]:
    """Runs RMS norms as one operation instead of six, where that gives what the module gives."""
    if model not in _NORMS:
        fusion = Fusion(model, next(model.parameters()).dtype, use_kernels=False)
        norms = [entry for entry in fusion.replacements if type(entry[0]).__name__.endswith("RMSNorm")]
        fusion.replacements = norms
        _NORMS[model] = fusion
    return _NORMS[model]()


@contextmanager
def packed_attention(model: nn.Module, rows: PackedRows) -> Iterator[None]:
    """Sends the model's attention calls to the packed rows."""
    configs = {id(m.config): m.config for m in model.modules() if isinstance(m, PreTrainedModel)}
    for config in list(configs.values()):
        text = config.get_text_config(decoder=True)
        configs[id(text)] = text
    before = [(config, config._attn_implementation_internal) for config in configs.values()]
    try:
        for config in configs.values():
            config._attn_implementation_internal = NAME
        with attending(rows):
            yield
    finally:
        for config, name in before:
            config._attn_implementation_internal = name


def packed_logps(
    model: Any,
    input_ids: Int[Tensor, "batch length"],
    attention_mask: Int[Tensor, "batch length"],
    completion: int,
    *,
    temperature: Float[Tensor, " batch"] | None = None,
) -> tuple[Float[Tensor, "batch time"], Float[Tensor, "batch time"]]:
    """log π and entropy of the last `completion` positions; 0 where the mask is 0.

    `model` carries TRL's fused head, which divides logits by the trainer's temperature; with `temperature`, one a row,
    logits are computed and divided here.
    """
    counted = attention_mask.bool()
    lengths = counted.sum(1)
    tokens = int(lengths.sum())
    rows = PackedRows(lengths, tokens)
    labels = input_ids.masked_fill(~counted, -100)
    labels[:, : input_ids.size(1) - completion] = -100
    following = torch.full_like(labels, -100)
    following[:, :-1] = labels[:, 1:]  # what stands at a place predicts the token after it
    packed = {"input_ids": input_ids[counted].unsqueeze(0), "position_ids": rows.positions.unsqueeze(0)}
    targets = following[counted]
    with packed_attention(model, rows), fused_norms(model):
        if temperature is None:
            output = model(**packed, shift_labels=targets.unsqueeze(0), fused_lm_head=True)
            logps, entropy = output.log_probs[0], output.entropy
            entropy = torch.zeros_like(logps) if entropy is None else entropy[0]
        else:
            row_temperature = temperature.unsqueeze(1).expand_as(input_ids)[counted]
            logits = model(**packed, use_cache=False).logits[0].float() / row_temperature.unsqueeze(1)
            distribution = torch.log_softmax(logits, dim=-1)
            logps = distribution.gather(1, targets.clamp(min=0).unsqueeze(1)).squeeze(1)
            entropy = -(distribution.exp() * distribution).sum(-1)
    # A token's log-probability stands where it was predicted, one place before it.
    places = counted.flatten().nonzero().squeeze(1)
    kept = targets != -100
    into = places[kept] + 1

    def unpack(values: Tensor) -> Tensor:
        flat = values.new_zeros(input_ids.numel()).index_copy(0, into, values[kept])
        return flat.view_as(input_ids)[:, -completion:]

    return unpack(logps), unpack(entropy)
