"""The operations of a decode step on a CPU, for `explorl.modeling.llama`: few calls, and products by oneDNN.

A step of a small model has hundreds of operations on a few thousand numbers, for which the calls take most of the time.
In a larger one the matrix products do, so they are computed from copies of the weights in oneDNN's own layout. MKL
reorders a weight for the processor in every product. For the few rows of a decode step that takes as long as the
product itself, so here it is done once for all steps of a call. Query, key and value are one product, and sums, gates
and their activation are computed while a result is still in the processor's cache. For 32 rows of SmolLM2-135M the
products of a step take two thirds of MKL's time, for 4 rows one third.

The copies take as much memory as the weights and do not follow their updates: `OneDnnOps.renew` makes new ones before
each call. Layers without a copy (adapters, projections with hooks) are computed by MKL. Every kind of copy is compared
with the modules, on random inputs, before it is used.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from copy import deepcopy
from itertools import repeat
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from explorl.modeling.fast_paths import Verified, random_inputs
from explorl.modeling.llama import HEAD_ROWS, Normed, TorchOps, is_plain_linear, plain_weight

logger = logging.getLogger(__name__)

WIDE = 256
"""Width from which a product with the transposed input is worth transposing the result, and copies are worthwhile."""
NEAR = 1e-5
"""Largest relative difference from the modules' products; another order of summation stays below it."""

Group = tuple[nn.Linear, ...]
"""Projections of the same input that are computed as one product."""


class ReorderedWeight(NamedTuple):
    """A weight in oneDNN's layout, and its bias."""

    weight: Tensor
    bias: Tensor | None

    @classmethod
    def of(cls, weight: Tensor, bias: Tensor | None) -> ReorderedWeight:
        reordered = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous())
        return cls(reordered, None if bias is None else bias.clone())

    def product(self, x: Tensor, then: str = "none") -> Tensor:
        """Return x · weightᵀ + bias, followed by "none" or "swish"."""
        return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, then, [], "")

    def combined(self, x: Tensor, other: Tensor, then: str) -> Tensor:
        """Return x · weightᵀ + bias, followed by "add" or "mul" with another tensor of the result's shape."""
        return torch.ops.mkldnn._linear_pointwise.binary(x, other, self.weight, self.bias, then)


def is_available() -> bool:
    """Return whether this processor and this build of torch support these products."""
    has_operators = all(hasattr(torch.ops.mkldnn, name) for name in ("_reorder_linear_weight", "_linear_pointwise"))
    fast = torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")
    return has_operators and fast and torch.backends.mkldnn.is_available() and bool(torch.backends.mkldnn.enabled)


def groups(root: Any) -> Iterator[Group]:
    """Yield the products of a Llama-like model that get copies; none for a narrow model, where calls matter more."""
    if root.config.hidden_size < WIDE:
        return
    for layer in root.model.layers:
        attn, mlp = layer.self_attn, layer.mlp
        yield from _eligible((attn.q_proj, attn.k_proj, attn.v_proj), (attn.o_proj,))
        yield from _eligible((mlp.gate_proj,), (mlp.up_proj,), (mlp.down_proj,))
    yield from _eligible((root.lm_head,))


def _eligible(*candidates: Group) -> Iterator[Group]:
    for group in candidates:
        plain = all(_has_plain_weight(projection) for projection in group)
        if plain and len({projection.bias is None for projection in group}) == 1:
            yield group


def _has_plain_weight(projection: Any) -> bool:
    """Return whether the projection is a plain linear layer in float32 on the CPU, whole and not sharded."""
    if not is_plain_linear(projection, torch.float32) or projection.weight.device.type != "cpu":
        return False
    return projection.weight.shape == (projection.out_features, projection.in_features)


def copied_bytes(root: Any) -> int:
    """Return the bytes that copies of a model's weights take; 0 if there would be none."""
    if not is_available():
        return 0
    return sum(4 * projection.weight.numel() for group in groups(root) for projection in group)


class OneDnnOps(TorchOps):
    """`TorchOps` for one token per row, which use copies of the weights once `renew` has made them."""

    tabled = True

    def __init__(self, root: Any) -> None:
        self.root = root
        self.copies: dict[int, ReorderedWeight] = {}
        """Copies by the id of a group's first projection."""
        self._head: list[ReorderedWeight] = []
        """Copies of the head's weight, in blocks whose results fit in the processor's cache."""
        self._logits = torch.empty(0, dtype=torch.float32)
        """Memory for logits, reused from step to step because allocating so much is slow."""
        self._verified = Verified()
        self._epsilons: dict[float, Tensor] = {}

    def renew(self) -> None:
        """Copy the current weights; if there is not enough memory, continue without copies."""
        try:
            self._renew()
        except (RuntimeError, MemoryError) as error:
            self.forget()
            logger.warning("could not copy the weights for faster products, continuing without copies: %s", error)

    @torch.no_grad()
    def _renew(self) -> None:
        self.forget()
        head = self.root.lm_head
        for group in groups(self.root):
            weight, bias = _joined(group)
            size = HEAD_ROWS if group[0] is head else len(weight)
            biases: Iterable[Tensor | None] = repeat(None) if bias is None else bias.split(size)
            blocks = [self._copied(*part) for part in zip(weight.split(size), biases, strict=False)]
            copies = [block for block in blocks if block is not None]
            if len(copies) < len(blocks):
                continue
            if group[0] is head:
                self._head = copies
            else:
                self.copies[id(group[0])] = copies[0]

    def _copied(self, weight: Tensor, bias: Tensor | None) -> ReorderedWeight | None:
        """Return a copy; None if its products do not agree with those of the weight."""
        copy, key = ReorderedWeight.of(weight, bias), ("product with a copy", *weight.shape, bias is None)

        def fast(x: Tensor, other: Tensor) -> list[Tensor]:
            combined = [copy.combined(x, other, then) for then in ("add", "mul")]
            return [copy.product(x), copy.product(x, "swish"), *combined]

        def own(x: Tensor, other: Tensor) -> list[Tensor]:
            product = F.linear(x, weight, bias)
            return [product, F.silu(product), product + other, product * other]

        columns, depth = weight.shape
        inputs = random_inputs((3, depth), (3, columns), dtype=weight.dtype, device=weight.device)
        return copy if self._verified.agrees(key, fast, own, inputs, NEAR) else None

    def forget(self) -> None:
        """Drop all copies."""
        self.copies, self._head = {}, []

    def __deepcopy__(self, memo: dict[int, Any]) -> OneDnnOps:
        """Return operations without copies of the weights, because torch cannot deep-copy these."""
        return OneDnnOps(deepcopy(self.root, memo))

    def begin(self, x: Tensor) -> None:
        super().begin(x)
        self.few = self.few and x.shape[-1] >= WIDE

    def project(self, x: Tensor, projection: Any) -> Tensor:
        weight = None if self.few else plain_weight(projection)
        return super().project(x, projection) if weight is None else F.linear(x, weight)

    def norm(self, x: Tensor, norm: Any) -> Tensor:
        if x.dtype != torch.float32:
            return super().norm(x, norm)
        size = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        epsilon = self._epsilons.get(norm.variance_epsilon)
        if epsilon is None:
            epsilon = self._epsilons[norm.variance_epsilon] = torch.tensor(norm.variance_epsilon, dtype=torch.float32)
        scale = torch.addcmul(epsilon, size, size, value=1 / x.shape[-1]).rsqrt_()
        return (x * scale).mul_(norm.weight)

    def logits(self, x: Tensor, head: Any) -> Tensor:
        """Return the logits; those of the next step overwrite them."""
        if not self._head:
            return super().logits(x, head)
        size = len(x) * head.out_features
        if self._logits.numel() < size:
            self._logits = x.new_empty(size)
        logits = self._logits[:size].view(len(x), -1)
        for block, part in zip(self._head, logits.split(HEAD_ROWS, 1), strict=True):
            part.copy_(block.product(x))
        return logits

    def heads(self, x: Tensor, h: Normed, norm: Any, attn: Any) -> list[Tensor]:
        copy = self.copies.get(id(attn.q_proj))
        if copy is None:
            return super().heads(x, h, norm, attn)
        joined = copy.product(self.norm(x, norm) if h is None else h)
        sizes = [projection.out_features for projection in (attn.q_proj, attn.k_proj, attn.v_proj)]
        return [part.contiguous() for part in joined.split(sizes, -1)]

    def rotated_heads(
        self, x: Tensor, h: Normed, norm: Any, attn: Any, rotary: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        copy, projections = self.copies.get(id(attn.q_proj)), (attn.q_proj, attn.k_proj, attn.v_proj)
        weights: list[Any] = [plain_weight(projection) for projection in projections] if copy is None else []
        simple = x.shape[1] == 1 and x.dtype == torch.float32 and "q_norm" not in attn._modules
        if not simple or any(weight is None for weight in weights):
            return super().rotated_heads(x, h, norm, attn, rotary)
        h, size = (self.norm(x, norm) if h is None else h)[:, 0], attn.head_dim
        shape, query = (len(h), -1, 1, size), attn.q_proj.out_features // size
        if copy is not None:
            parts, both = copy.product(h).view(shape), query + attn.k_proj.out_features // size
            rotated, value = self._rotate(parts[:, :both], rotary), parts[:, both:]
        elif self.few:
            transposed = h.t()
            both_heads = torch.cat([torch.mm(weight, transposed) for weight in weights[:2]]).t().contiguous()
            rotated = self._rotate(both_heads.view(shape), rotary)
            value = torch.mm(weights[2], transposed).t().contiguous().view(shape)
        else:
            first, second, third = (F.linear(h, weight).view(shape) for weight in weights)
            return self._rotate(first, rotary), self._rotate(second, rotary), third
        return rotated[:, :query], rotated[:, query:], value

    def _rotate(self, x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
        return (x * rotary[0]).addcmul_(x.roll(x.shape[-1] // 2, -1), rotary[1])

    def inner(self, x: Tensor, h: Normed, norm: Any, mlp: Any) -> Tensor:
        gate, up = self.copies.get(id(mlp.gate_proj)), self.copies.get(id(mlp.up_proj))
        if gate is None or up is None:
            return super().inner(x, h, norm, mlp)
        h = self.norm(x, norm) if h is None else h
        return up.combined(h, gate.product(h, "swish"), "mul")

    def add(self, x: Tensor, y: Tensor, projection: Any, norm: Any, last: bool = False) -> tuple[Tensor, Normed]:
        copy = self.copies.get(id(projection))
        if copy is None:
            return super().add(x, y, projection, norm, last)
        x = copy.combined(y, x, "add")
        return x, self.norm(x, norm)


def _joined(group: Group) -> tuple[Tensor, Tensor | None]:
    """Return the weights and biases of a group, concatenated."""
    weights = [projection.weight.detach() for projection in group]
    biases = [projection.bias.detach() for projection in group if projection.bias is not None]
    return (weights[0] if len(weights) == 1 else torch.cat(weights)), torch.cat(biases) if biases else None
