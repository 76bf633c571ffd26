"""The forward pass of Llama-like models, written out, so that neighbouring operations can be fused.

Llama, Mistral, Qwen 2 and Qwen 3 share one layer: norm, attention, add, norm, gated network, add. Running it here
instead of through the models' modules saves a fifth of a decode step. The modules are still where the weights are read
and where adapters act: every projection is called as it is. It is used only where no hook waits on a module that it
passes by, and where it gives the logits that the model itself gives; all other models run as they are.
"""

from __future__ import annotations

import logging
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from explorl.rollout.attention import attending, sampling_mode

logger = logging.getLogger(__name__)

LAYERS = {"LlamaDecoderLayer", "MistralDecoderLayer", "Qwen2DecoderLayer", "Qwen3DecoderLayer"}


FEW_ROWS = range(12, 57)
"""Rows for which MKL multiplies a weight by the transposed input faster than the input by the transposed weight: twice
as fast for 32 rows of SmolLM2-135M."""


class Ops(Protocol):
    """The operations between the projections, and those themselves, for one kind of device."""

    def begin(self, x: Tensor) -> None:
        """Looks at what the next operations will be about: as many rows as x has."""
        ...

    def project(self, x: Tensor, projection: Any) -> Tensor:
        """projection(x); the result need not be contiguous."""
        ...

    def norm(self, x: Tensor, norm: Any) -> Tensor: ...

    def add(self, x: Tensor, y: Tensor, projection: Any, norm: Any) -> tuple[Tensor, Tensor]:
        """x + projection(y), and that normed."""
        ...

    def angles(self, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """What `rotate` wants to have of the rotary embedding's cosine and sine, (rows, length, size)."""
        ...

    def rotate(self, query: Tensor, key: Tensor, angles: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]: ...

    def gate(self, gate: Tensor, up: Tensor) -> Tensor: ...


class TorchOps:
    """The operations in torch, with as few passes over memory as it allows."""

    few = False
    """Whether there are `FEW_ROWS`."""

    def begin(self, x: Tensor) -> None:
        rows = x.numel() // x.shape[-1]
        on_cpu = x.device.type == "cpu" and x.dtype == torch.float32
        self.few = on_cpu and rows in FEW_ROWS and torch.backends.mkl.is_available()

    def project(self, x: Tensor, projection: Any) -> Tensor:
        if not self.few or not _plain(projection):
            return projection(x)
        product = torch.mm(projection.weight, x.flatten(0, -2).t()).t()
        return product.unflatten(0, x.shape[:-1])

    def norm(self, x: Tensor, norm: Any) -> Tensor:
        if x.dtype != torch.float32:
            return torch.rms_norm(x, (x.shape[-1],), norm.weight, norm.variance_epsilon)
        size = torch.linalg.vector_norm(x, dim=-1, keepdim=True)  # which leaves fewer passes than rms_norm takes
        scale = size.square_().div_(x.shape[-1]).add_(norm.variance_epsilon).rsqrt_()
        return (x * scale).mul_(norm.weight)

    def add(self, x: Tensor, y: Tensor, projection: Any, norm: Any) -> tuple[Tensor, Tensor]:
        if self.few or not _plain(projection):
            x = x + self.project(y, projection)
        else:
            x = torch.addmm(x.flatten(0, 1), y.flatten(0, 1), projection.weight.t()).view_as(x)
        return x, self.norm(x, norm)

    def angles(self, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        half = cos.shape[-1] // 2
        # rotate_half(x) · sin = (halves of x swapped) · (−sin, sin)
        return cos.unsqueeze(1), torch.cat([-sin[..., :half], sin[..., half:]], dim=-1).unsqueeze(1)

    def rotate(self, query: Tensor, key: Tensor, angles: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        cos, signed = angles
        half = cos.shape[-1] // 2
        return tuple(torch.addcmul(x * cos, x.roll(half, -1), signed) for x in (query, key))  # type: ignore[return-value]

    def gate(self, gate: Tensor, up: Tensor) -> Tensor:
        return F.silu(gate, inplace=True).mul_(up)


def _plain(projection: Any) -> bool:
    """Whether it is nothing but a product with its weight."""
    return type(projection) is nn.Linear and projection.bias is None


class KernelOps(TorchOps):
    """The same as Triton kernels."""

    def __init__(self) -> None:
        from explorl.rollout import triton_fused

        self.kernels = triton_fused

    def norm(self, x: Tensor, norm: Any) -> Tensor:
        return self.kernels.rms_norm(x, norm.weight, norm.variance_epsilon, 0.0, True)

    def add(self, x: Tensor, y: Tensor, projection: Any, norm: Any) -> tuple[Tensor, Tensor]:
        return self.kernels.add_rms_norm(x, projection(y), norm.weight, norm.variance_epsilon)

    def angles(self, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return cos, sin

    def rotate(self, query: Tensor, key: Tensor, angles: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return self.kernels.rotary(query, key, *angles)

    def gate(self, gate: Tensor, up: Tensor) -> Tensor:
        return self.kernels.gated(gate, up, False)


class LlamaForward:
    """The forward pass of one model."""

    def __init__(self, root: Any, ops: Ops) -> None:
        self.root, self.body, self.ops = root, root.model, ops

    def __call__(self, ids: Tensor, positions: Tensor, cache: Any) -> Tensor:
        """Logits (rows, vocab) of each row's last token."""
        last = self.hidden(ids, positions, cache)[:, -1]
        self.ops.begin(last)
        return self.ops.project(last, self.root.lm_head).contiguous()

    def hidden(self, ids: Tensor, positions: Tensor, cache: Any) -> Tensor:
        """What the head reads, (rows, length, width)."""
        ops, body = self.ops, self.body
        rows, length = ids.shape
        x = body.embed_tokens(ids)
        ops.begin(x)
        angles = ops.angles(*body.rotary_emb(x, position_ids=positions))
        layers = list(body.layers)
        at_once = getattr(cache, "rotate_and_attend", None)
        norms = [layer.input_layernorm for layer in layers[1:]] + [body.norm]
        h = ops.norm(x, layers[0].input_layernorm)
        for index, (layer, next_norm) in enumerate(zip(layers, norms, strict=True)):
            attn, mlp = layer.self_attn, layer.mlp
            shape = rows, length, -1, attn.head_dim
            projections = attn.q_proj, attn.k_proj, attn.v_proj
            query, key, value = (ops.project(h, projection).contiguous().view(shape) for projection in projections)
            if hasattr(attn, "q_norm"):
                query, key = ops.norm(query, attn.q_norm), ops.norm(key, attn.k_norm)
            query, key, value = (t.transpose(1, 2) for t in (query, key, value))
            window = getattr(attn, "sliding_window", None)
            if at_once is not None:
                mixed = at_once(query, key, value, angles, index, attn.scaling, window)
            else:
                query, key = ops.rotate(query, key, angles)
                key, value = cache.update(key, value, index)
                mixed = cache.attend(query, key, value, attn.scaling, window, None)
            x, h = ops.add(x, mixed.reshape(rows, length, -1), attn.o_proj, layer.post_attention_layernorm)
            inner = ops.gate(ops.project(h, mlp.gate_proj), ops.project(h, mlp.up_proj))
            x, h = ops.add(x, inner, mlp.down_proj, next_norm)
        return h


def llama_like(model: nn.Module) -> Any:
    """The model inside its wrappers, where it is one that can be written out and no hook would be passed by."""
    wrapped: Any = model
    root = wrapped.get_base_model() if hasattr(wrapped, "get_base_model") else wrapped
    layers = getattr(getattr(root, "model", None), "layers", None)
    if not layers or {type(layer).__name__ for layer in layers} - LAYERS:
        return None
    passed = [root.model, root.model.norm]
    for layer in layers:
        norms = layer.input_layernorm, layer.post_attention_layernorm
        passed += [layer, layer.self_attn, layer.mlp, *norms, layer.mlp.act_fn]
    hooked = any(m._forward_hooks or m._forward_pre_hooks or "forward" in m.__dict__ for m in passed)
    return None if hooked else root


def agree(got: Tensor, want: Tensor, dtype: torch.dtype) -> bool:
    """Whether two results are equal up to the rounding of weights of this type."""
    error = float((got.float() - want.float()).norm() / want.float().norm())
    close = error <= (1e-4 if dtype in (torch.float32, torch.float64) else 5e-2)
    if not close:
        logger.info("the written-out forward pass differs from the model's by %.1e; it is not used", error)
    return close


def cannot(error: Exception) -> None:
    """Says why a model that looks like Llama runs as it is."""
    logger.warning("the faster, written-out forward pass fails on this model, which runs as it is: %s", error)


def written_out(model: nn.Module, probe: Any, use_kernels: bool) -> LlamaForward | None:
    """The written-out forward pass of this model; None where it has none, or one that does not agree with it.

    ``probe`` makes a cache that attends without keeping anything.
    """
    root = llama_like(model)
    if root is None:
        return None
    device = next(model.parameters()).device
    forward = LlamaForward(root, KernelOps() if use_kernels else TorchOps())
    with sampling_mode(model):
        for length in (7, 1):
            positions = (
                torch.arange(length, device=device).flip(0).expand(3, -1) + torch.arange(3, device=device)[:, None]
            )
            ids = (positions * 31 + 5) % root.get_input_embeddings().weight.shape[0]
            cache = probe()
            with attending(cache):
                want = model(input_ids=ids, position_ids=positions, past_key_values=cache, use_cache=True).logits[:, -1]
            try:
                got = forward(ids, positions, probe())
            except (AttributeError, TypeError, RuntimeError) as error:
                cannot(error)
                return None
            if got.shape != want.shape:
                return None
            if not agree(got, want, next(model.parameters()).dtype):
                return None
    return forward
