"""Products on a CPU by oneDNN, from copies of the weights in the order in which it reads them.

MKL brings a weight into an order that suits the processor anew in every product. For the few rows of a decode step that
takes as long as the product itself, so here it is done once for all steps of a call. Query, key and value are one
product, and sums, gates and their activation are computed while a result is still in the processor's cache. For 32 rows
of SmolLM2-135M the products of a step take two thirds of MKL's time, for 4 rows a third.

A copy is as large as the weights, and knows nothing of what happens to them afterwards: `OneDnnOps.renew` makes it
anew before each call. What has no copy (adapters, projections with hooks) is computed as `CpuOps` does. Every kind of
copy is compared with the modules, on random inputs, before it is used.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from copy import deepcopy
from itertools import repeat
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from explorl.modeling.cpu_ops import WIDE, CpuOps
from explorl.modeling.llama import HEAD_ROWS, Normed
from explorl.modeling.rotary_table import touched

logger = logging.getLogger(__name__)

NEAR = 1e-5
"""Largest part of a result by which a product may differ from the modules': different orders of summation do not."""

Group = tuple[nn.Linear, ...]
"""Projections of the same input that are one product."""


class Copy(NamedTuple):
    """A weight as oneDNN reads it, and its bias."""

    weight: Tensor
    bias: Tensor | None

    @classmethod
    def of(cls, weight: Tensor, bias: Tensor | None) -> Copy:
        reordered = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous())
        return cls(reordered, None if bias is None else bias.clone())

    def product(self, x: Tensor, then: str = "none") -> Tensor:
        """x · weightᵀ + bias, and then "none" or "swish"."""
        return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, then, [], "")

    def onto(self, x: Tensor, other: Tensor, then: str) -> Tensor:
        """The same, and then "add" or "mul" with another tensor of the result's shape."""
        return torch.ops.mkldnn._linear_pointwise.binary(x, other, self.weight, self.bias, then)


def possible() -> bool:
    """Whether this processor and this build of torch have what it takes."""
    known = all(hasattr(torch.ops.mkldnn, name) for name in ("_reorder_linear_weight", "_linear_pointwise"))
    fast = torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")
    return known and fast and torch.backends.mkldnn.is_available() and bool(torch.backends.mkldnn.enabled)


def groups(root: Any) -> Iterator[Group]:
    """The products of a Llama-like model that have copies; none in a narrow one, where calls matter more."""
    if root.config.hidden_size < WIDE:
        return
    for layer in root.model.layers:
        attn, mlp = layer.self_attn, layer.mlp
        yield from _able((attn.q_proj, attn.k_proj, attn.v_proj), (attn.o_proj,))
        yield from _able((mlp.gate_proj,), (mlp.up_proj,), (mlp.down_proj,))
    yield from _able((root.lm_head,))


def _able(*candidates: tuple[Any, ...]) -> Iterator[Group]:
    for group in candidates:
        same = len({projection.bias is None for projection in group if type(projection) is nn.Linear}) == 1
        if same and all(_plain(projection) for projection in group):
            yield group


def _plain(projection: Any) -> bool:
    """Whether it is a linear layer of plain float32 tensors on the CPU, and nobody waits on it."""
    if type(projection) is not nn.Linear or touched(projection):
        return False
    weight = projection.weight
    if type(weight) is not nn.Parameter or weight.shape != (projection.out_features, projection.in_features):
        return False
    return weight.dtype == torch.float32 and weight.device.type == "cpu"


def copied_bytes(root: Any) -> int:
    """What copies of a model's weights take; 0 where there would be none."""
    if not possible():
        return 0
    return sum(4 * projection.weight.numel() for group in groups(root) for projection in group)


class OneDnnOps(CpuOps):
    """`CpuOps` that read copies, once `renew` has made them."""

    def __init__(self, root: Any) -> None:
        super().__init__()
        self.root = root
        self.copies: dict[int, Copy] = {}
        """By the identity of a group's first projection."""
        self._head: list[Copy] = []
        """Those of the head, in blocks whose results the processor's cache can hold."""
        self._logits = torch.empty(0, dtype=torch.float32)
        """Memory for logits, kept from one step to the next: the system takes its time to hand out so much of it."""
        self._right: dict[Any, bool] = {}
        """Kinds of products that were compared with the modules', and whether they are the same."""

    def renew(self) -> None:
        """Copies the weights as they are now; where there is no memory for that, they are read where they are."""
        try:
            self._renew()
        except (RuntimeError, MemoryError) as error:
            self.forget()
            logger.warning("products are computed without copies of the weights, which could not be made: %s", error)

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

    def _copied(self, weight: Tensor, bias: Tensor | None) -> Copy | None:
        """A copy; None where it does not give what the weight itself gives."""
        copy, kind = Copy.of(weight, bias), (weight.shape, bias is None)
        if kind not in self._right:
            self._right[kind] = _agrees(copy, weight, bias)
        return copy if self._right[kind] else None

    def forget(self) -> None:
        """Goes on without copies."""
        self.copies, self._head = {}, []

    def __deepcopy__(self, memo: dict[int, Any]) -> OneDnnOps:
        """One without copies: torch cannot copy them."""
        return OneDnnOps(deepcopy(self.root, memo))

    def logits(self, x: Tensor, head: Any) -> Tensor:
        """They are written over by those of the next step."""
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
        copy = self.copies.get(id(attn.q_proj))
        if copy is None or x.shape[1] > 1 or "q_norm" in attn._modules:
            return super().rotated_heads(x, h, norm, attn, rotary)
        joined = copy.product((self.norm(x, norm) if h is None else h)[:, 0])
        parts, size = joined.view(len(x), -1, 1, attn.head_dim), attn.head_dim
        query, key = attn.q_proj.out_features // size, attn.k_proj.out_features // size
        turned = self._turned(parts[:, : query + key], rotary)
        return turned[:, :query], turned[:, query:], parts[:, query + key :]

    def inner(self, x: Tensor, h: Normed, norm: Any, mlp: Any) -> Tensor:
        gate, up = self.copies.get(id(mlp.gate_proj)), self.copies.get(id(mlp.up_proj))
        if gate is None or up is None:
            return super().inner(x, h, norm, mlp)
        h = self.norm(x, norm) if h is None else h
        return up.onto(h, gate.product(h, "swish"), "mul")

    def add(self, x: Tensor, y: Tensor, projection: Any, norm: Any, last: bool = False) -> tuple[Tensor, Normed]:
        copy = self.copies.get(id(projection))
        if copy is None:
            return super().add(x, y, projection, norm, last)
        x = copy.onto(y, x, "add")
        return x, self.norm(x, norm)


def _joined(group: Group) -> tuple[Tensor, Tensor | None]:
    """Weights and biases of a group, one below the other."""
    weights = [projection.weight.detach() for projection in group]
    biases = [projection.bias.detach() for projection in group if projection.bias is not None]
    return (weights[0] if len(weights) == 1 else torch.cat(weights)), torch.cat(biases) if biases else None


def _agrees(copy: Copy, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether a copy gives what the weight gives, with each of what may follow a product."""
    draw = torch.Generator().manual_seed(0)
    x, other = (torch.randn(3, size, generator=draw, dtype=weight.dtype) for size in weight.shape[::-1])
    want = F.linear(x, weight, bias)
    pairs: list[tuple[Callable[[], Tensor], Tensor]] = [
        (lambda: copy.product(x), want),
        (lambda: copy.product(x, "swish"), F.silu(want)),
        (lambda: copy.onto(x, other, "add"), want + other),
        (lambda: copy.onto(x, other, "mul"), want * other),
    ]
    try:
        return all(_near(product(), expected) for product, expected in pairs)
    except RuntimeError as error:  # a build of torch whose oneDNN lacks one of them
        logger.info("products from copies of the weights do not run here: %s", error)
        return False


def _near(got: Tensor, want: Tensor) -> bool:
    finite = torch.isfinite(want)
    if not torch.equal(finite, torch.isfinite(got)):
        return False
    far = torch.linalg.vector_norm(got[finite] - want[finite])
    return bool(far <= NEAR * torch.linalg.vector_norm(want[finite]))
