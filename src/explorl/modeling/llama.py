"""The unrolled forward pass of Llama-like models, in which neighbouring operations can be fused.

Llama, Mistral, Qwen 2 and Qwen 3 have the same layer: norm, attention, add, norm, gated network, add. Running it here
instead of through the models' modules saves a fifth of a decode step. Weights are still read from the modules, and
adapters work: every projection is called as it is. The pass is used only if no module that it bypasses has hooks, and
if `explorl.modeling.proof` finds that it computes what the model computes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from explorl.modeling.rotary_table import RotaryTable, is_hooked

LAYERS = {"LlamaDecoderLayer", "MistralDecoderLayer", "Qwen2DecoderLayer", "Qwen3DecoderLayer"}


FEW_ROWS = range(12, 57)
"""Numbers of rows for which MKL multiplies a weight by the transposed input faster than the input by the transposed
weight: twice as fast for 32 rows of SmolLM2-135M."""
TABLED = 1 << 15
"""Most positions of a rotary table on a CPU."""
HEAD_ROWS = 1536
"""Number of tokens whose logits are computed at a time, so that they are copied while in the CPU's cache."""


Normed = Any
"""The normed input of the next projections, or None if they apply the norm themselves."""


class TorchOps:
    """The projections and the operations between them, in torch, with as few passes over memory as possible."""

    tabled = False
    """Whether decode steps look cosine and sine up in a table, if the cache knows how many positions it needs."""
    few = False
    """Whether the number of rows is in `FEW_ROWS`."""

    def begin(self, x: Tensor) -> None:
        """Prepare for operations on as many rows as x has."""
        rows = x.numel() // x.shape[-1]
        on_cpu = x.device.type == "cpu" and x.dtype == torch.float32
        self.few = on_cpu and rows in FEW_ROWS and torch.backends.mkl.is_available()

    def project(self, x: Tensor, projection: Any) -> Tensor:
        """Return projection(x), not necessarily contiguous."""
        weight = plain_weight(projection) if self.few else None
        if weight is None:
            return projection(x)
        product = torch.mm(weight, x.flatten(0, -2).t()).t()
        return product.unflatten(0, x.shape[:-1])

    def logits(self, x: Tensor, head: Any) -> Tensor:
        """Return head(x), contiguous."""
        weight = plain_weight(head) if self.few else None
        if weight is None:
            return self.project(x, head).contiguous()
        logits = x.new_empty(len(x), len(weight))
        for block, part in zip(weight.split(HEAD_ROWS), logits.split(HEAD_ROWS, 1), strict=True):
            part.copy_(torch.mm(block, x.t()).t())
        return logits

    def norm(self, x: Tensor, norm: Any) -> Tensor:
        if x.dtype != torch.float32:
            return torch.rms_norm(x, (x.shape[-1],), norm.weight, norm.variance_epsilon)
        size = torch.linalg.vector_norm(x, dim=-1, keepdim=True)  # fewer passes over memory than rms_norm
        scale = size.square_().div_(x.shape[-1]).add_(norm.variance_epsilon).rsqrt_()
        return (x * scale).mul_(norm.weight)

    def first(self, x: Tensor, norm: Any) -> Normed:
        """Return x normed for the first layer."""
        return self.norm(x, norm)

    def heads(self, x: Tensor, h: Normed, norm: Any, attn: Any) -> list[Tensor]:
        """Return query, key and value, contiguous, of x; h is x after ``norm``."""
        h = self.norm(x, norm) if h is None else h
        return [self.project(h, projection).contiguous() for projection in (attn.q_proj, attn.k_proj, attn.v_proj)]

    def rotated_heads(
        self, x: Tensor, h: Normed, norm: Any, attn: Any, rotary: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return query, key and value as (rows, heads, length, size), query and key normed and rotated."""
        query, key, value = self.split_heads(x, h, norm, attn)
        return *self.rotate(query, key, rotary), value

    def split_heads(self, x: Tensor, h: Normed, norm: Any, attn: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Return query, key and value as (rows, heads, length, size), query and key normed but not rotated."""
        shape = *x.shape[:2], -1, attn.head_dim
        query, key, value = (t.view(shape) for t in self.heads(x, h, norm, attn))
        if "q_norm" in attn._modules:
            query, key = self.norm(query, attn.q_norm), self.norm(key, attn.k_norm)
        return query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)

    def inner(self, x: Tensor, h: Normed, norm: Any, mlp: Any) -> Tensor:
        """Return silu(gate) · up of x; h is x after ``norm``."""
        h = self.norm(x, norm) if h is None else h
        return self.gate(self.project(h, mlp.gate_proj), self.project(h, mlp.up_proj))

    def add(self, x: Tensor, y: Tensor, projection: Any, norm: Any, last: bool = False) -> tuple[Tensor, Normed]:
        """Return x + projection(y), and that normed; ``last`` means for the head, which does not apply the norm."""
        weight = None if self.few else plain_weight(projection)
        if weight is None:
            x = x + self.project(y, projection)
        else:
            x = torch.addmm(x.flatten(0, 1), y.flatten(0, 1), weight.t()).view_as(x)
        return x, self.norm(x, norm)

    def rotary_factors(self, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Prepare the rotary embedding's cosine and sine, (rows, length, size), for `rotate`."""
        half = cos.shape[-1] // 2
        # rotate_half(x) · sin = (halves of x swapped) · (−sin, sin)
        return cos.unsqueeze(1), torch.cat([-sin[..., :half], sin[..., half:]], dim=-1).unsqueeze(1)

    def rotate(self, query: Tensor, key: Tensor, rotary: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        cos, signed = rotary
        half = cos.shape[-1] // 2
        return tuple(torch.addcmul(x * cos, x.roll(half, -1), signed) for x in (query, key))  # type: ignore[return-value]

    def gate(self, gate: Tensor, up: Tensor) -> Tensor:
        """Return silu(gate) · up; may overwrite the gate."""
        return F.silu(gate, inplace=True).mul_(up)


def plain_weight(projection: Any) -> Tensor | None:
    """Return the weight of a projection that only multiplies by it; None for other projections."""
    if type(projection) is not nn.Linear or is_hooked(projection):
        return None
    parameters = projection._parameters  # several times faster than the attributes
    return parameters.get("weight") if parameters.get("bias") is None else None


def is_plain_linear(projection: Any, dtype: torch.dtype) -> bool:
    """Return whether the projection is a linear layer of plain, contiguous tensors of this dtype, without hooks."""
    if type(projection) is not nn.Linear or is_hooked(projection):
        return False
    tensors = [tensor for tensor in (projection.weight, projection.bias) if tensor is not None]
    plain = all(type(tensor) is nn.Parameter and type(tensor.data) is Tensor for tensor in tensors)
    return plain and all(tensor.dtype == dtype and tensor.is_contiguous() for tensor in tensors)


class LlamaForward:
    """The forward pass of one model."""

    def __init__(self, root: Any, ops: TorchOps) -> None:
        self.root, self.body, self.ops = root, root.model, ops
        self.table = RotaryTable(self.body.rotary_emb)

    def __call__(self, ids: Tensor, positions: Tensor, cache: Any) -> Tensor:
        """Return the logits (rows, vocab) of each row's last token."""
        last = self.hidden(ids, positions, cache)[:, -1]
        self.ops.begin(last)
        return self.ops.logits(last, self.root.lm_head)

    def hidden(self, ids: Tensor, positions: Tensor, cache: Any) -> Tensor:
        """Return the hidden states that the head reads, (rows, length, width)."""
        ops, body = self.ops, self.body
        x = body.embed_tokens(ids)
        ops.begin(x)
        rotary = self._rotary_factors(x, positions, cache)
        layers = list(body.layers)
        norms = [layer.input_layernorm for layer in layers[1:]] + [body.norm]
        h = ops.first(x, layers[0].input_layernorm)
        for index, (layer, next_norm) in enumerate(zip(layers, norms, strict=True)):
            x, h = self.layer(x, h, index, layer, next_norm, rotary, cache)
        return h

    def _rotary_factors(self, x: Tensor, positions: Tensor, cache: Any) -> tuple[Tensor, Tensor]:
        """Return cosine and sine of these positions, or of all positions for a cache that looks them up itself."""
        if hasattr(cache, "rotate_and_attend") and hasattr(cache, "capacity"):
            table = self.table.up_to(cache.capacity, x)
            if table is not None:
                return table
        reach = getattr(cache, "reach", TABLED + 1) if self.ops.tabled else TABLED + 1
        table = self.table.up_to(reach, x) if reach <= TABLED else None
        if table is not None:
            cos, sin = (part.index_select(0, positions.flatten()).view(*positions.shape, -1) for part in table)
            return self.ops.rotary_factors(cos, sin)
        return self.ops.rotary_factors(*self.body.rotary_emb(x, position_ids=positions))

    def layer(
        self, x: Tensor, h: Normed, index: int, layer: Any, next_norm: Any, rotary: Any, cache: Any
    ) -> tuple[Tensor, Normed]:
        """Run one layer on x, whose normed form is ``h``; return the next x, and that normed for the next layer."""
        ops, attn = self.ops, layer.self_attn
        rows, length = x.shape[:2]
        window, inputs = window_of(attn), (x, h, layer.input_layernorm, attn)
        fused = getattr(cache, "rotate_and_attend", None)
        if fused is not None:
            mixed = fused(*ops.split_heads(*inputs), rotary, index, attn.scaling, window)
        else:
            query, key, value = ops.rotated_heads(*inputs, rotary)
            key, value = cache.update(key, value, index)
            mixed = cache.attend(query, key, value, attn.scaling, window, None)
        x, h = ops.add(x, mixed.reshape(rows, length, -1), attn.o_proj, layer.post_attention_layernorm)
        inner = ops.inner(x, h, layer.post_attention_layernorm, layer.mlp)
        return ops.add(x, inner, layer.mlp.down_proj, next_norm, last=next_norm is self.body.norm)


def window_of(attn: Any) -> int | None:
    """Return the sliding window of an attention module of these models; None if it attends to all tokens."""
    if hasattr(attn, "sliding_window"):
        return attn.sliding_window  # Qwen has None in layers with full attention
    return attn.config.sliding_window if type(attn).__name__ == "MistralAttention" else None


def llama_like(model: nn.Module) -> Any:
    """Return the model without wrappers if it can be unrolled and no hooks would be bypassed; None otherwise."""
    wrapped: Any = model
    root = wrapped.get_base_model() if hasattr(wrapped, "get_base_model") else wrapped
    layers = getattr(getattr(root, "model", None), "layers", None)
    if not layers or {type(layer).__name__ for layer in layers} - LAYERS:
        return None
    bypassed = [root.model, root.model.norm]
    for layer in layers:
        norms = layer.input_layernorm, layer.post_attention_layernorm
        bypassed += [layer, layer.self_attn, layer.mlp, *norms, layer.mlp.act_fn]
    return None if any(is_hooked(module) for module in bypassed) else root
