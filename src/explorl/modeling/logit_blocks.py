"""Token records of rows of logits, of which only a block is there at any time.

Torch's functions are the definitions; where there is a GPU, `explorl.modeling.triton_records` computes the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from explorl.metrics.tokens import branching_factor, token_entropy
from explorl.modeling.gpu import kernels_run, on

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
    others_squared: Float[Tensor, "*tokens"]
    """Σ π(v)² over all v but the token: where that has nearly all the mass, Σ_v π(v)² − π(o)² would be rounding."""
    other_ids: Int[Tensor, "*tokens"]
    """The most likely token other than this one; of equals, the one with the lowest id."""
    other_logps: Float[Tensor, "*tokens"]
    """Its log π, at the temperature; −inf in a vocabulary of one."""


DTYPES = (torch.float32, torch.float32, torch.int64, torch.float32, torch.float32, torch.int64, torch.float32)
"""Of the seven records."""


def by_blocks(
    logits: Callable[[slice], Tensor],
    targets: Int[Tensor, " tokens"],
    vocab: int,
    dtype: torch.dtype,
    temperature: float | Float[Tensor, " tokens"],
    mass: float,
    block: int | None,
) -> TokenRecords:
    """Records of all rows; `logits` gives the (rows, vocab) logits of some, of type `dtype`."""
    targets, warm = targets.long().contiguous(), _per_row(temperature, targets)
    device = targets.device
    out = TokenRecords(*(torch.empty(len(targets), dtype=kind, device=device) for kind in DTYPES))
    kernel = has_kernel(device, dtype) and 0 < mass < 1
    for some in slices(len(targets), vocab, dtype.itemsize if kernel else 8, block_bytes(device, block)):
        own = None if warm is None else warm[some]
        into = TokenRecords(*(value[some] for value in out))
        if kernel:
            from explorl.modeling.triton_records import record

            with on(device):
                record(logits(some), targets[some], own, mass, into)
        else:
            for value, found in zip(into, defined_records(logits(some), targets[some], own, mass), strict=True):
                value.copy_(found)
    if kernel and bool(out.entropy.isnan().any()):
        raise ValueError("every row needs a probability somewhere and no NaN; one has NaN, +inf or no mass at all")
    return out


def _per_row(temperature: float | Tensor, targets: Tensor) -> Float[Tensor, " tokens"] | None:
    """None where it is 1."""
    given = torch.as_tensor(temperature, dtype=torch.float32, device=targets.device)
    if given.ndim and given.shape != targets.shape:
        raise ValueError(f"{len(targets)} tokens need one temperature or one each, got {tuple(given.shape)}")
    least = float(given.min()) if given.numel() else 1.0
    if not least > 0:
        raise ValueError(f"temperature must be above 0, such as 1.0; got {least:g}")
    if given.ndim == 0 and least == 1:
        return None
    return given.expand(targets.shape).contiguous()


def has_kernel(device: torch.device, dtype: torch.dtype) -> bool:
    known = (torch.bfloat16, torch.float16, torch.float32)
    return dtype in known and kernels_run(device)


def block_bytes(device: torch.device, block: int | None) -> int:
    return BLOCK.get(device.type, BLOCK["cpu"]) if block is None else block


def slices(tokens: int, vocab: int, wide: int, block: int) -> Iterator[slice]:
    """As few as fit into a block with `wide` bytes per logit (the definitions sum in float64), and as equal, in steps
    of 64 rows where they are many."""
    most = max(block // (wide * vocab), 1)
    most = most if most < 128 else most // 64 * 64
    step = -(-tokens // max(-(-tokens // most), 1))
    step = min(step if step < 128 else -(-step // 64) * 64, most)
    for start in range(0, tokens, max(step, 1)):
        yield slice(start, start + step)


def defined_records(
    logits: Float[Tensor, "rows vocab"],
    targets: Int[Tensor, " rows"],
    temperature: Float[Tensor, " rows"] | None,
    mass: float,
) -> TokenRecords:
    """The definitions, on whole rows of logits."""
    whole = logits.numel() or logits.shape[-1]
    entropy, branching = token_entropy(logits, chunk=whole), branching_factor(logits, mass, chunk=whole)
    scaled = logits.float() if temperature is None else logits.float() / temperature.unsqueeze(-1)
    log_z = scaled.logsumexp(-1)
    own = scaled.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    others = scaled.scatter(-1, targets.unsqueeze(-1), -torch.inf)
    squared = ((2 * others).logsumexp(-1) - 2 * log_z).exp()
    collision = squared + (2 * (own - log_z)).exp()
    best = others.max(-1)
    return TokenRecords(own - log_z, entropy, branching, collision, squared, best.indices, best.values - log_z)
