"""Warpers: functions that turn logits into the distribution to sample from.

Order: repetition penalty → temperature → top-k → top-p → min-p → bottom-p. A warper takes (rows, vocab)
logits and one value per row, and returns logits with −inf where a token is removed; none of them waits for the device
outside the CPU, so all run inside a CUDA graph. Of tokens with the same logit, those with lower ids count as likelier,
so that every cut keeps one definite set of tokens (`explorl.rollout.sampling.ranking`). ``rate`` is 1 / temperature
where the logits are those before it.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Float64, Int
from torch import Tensor

from explorl.rollout.sampling.ranking import SLACK, comparable, count_head, head_mask, mass_head

PerRow = Float[Tensor, " rows"] | float
Logits = Float[Tensor, "rows vocab"]


def _column(value: PerRow, logits: Logits) -> Tensor:
    # Not as_tensor: a copy from the host cannot be part of a CUDA graph.
    column = value if isinstance(value, Tensor) else torch.full((1,), value, device=logits.device)
    return column.expand(logits.shape[0])[:, None]


def warp_repetition(logits: Logits, seen: Bool[Tensor, "rows vocab"], penalty: PerRow) -> Logits:
    """Make tokens of the prompt and the completion so far less likely (Keskar et al. 2019)."""
    factor = _column(penalty, logits).to(logits.dtype)
    return torch.where(seen, torch.where(logits < 0, logits * factor, logits / factor), logits)


def warp_temperature(logits: Logits, temperature: PerRow) -> Logits:
    """Divide logits by τ; rows at τ = 0 (greedy) stay as they are."""
    tau = _column(temperature, logits).to(logits.dtype)
    return logits / torch.where(tau == 0, 1.0, tau)


def warp_top_k(logits: Logits, k: Int[Tensor, " rows"] | int) -> Logits:
    """Keep the k most likely tokens; 0 keeps all."""
    return logits.masked_fill(~head_mask(logits, count_head(logits, _column(k, logits)[:, 0])), -torch.inf)


def warp_top_p(logits: Logits, p: PerRow, rate: Float[Tensor, " rows"] | None = None) -> Logits:
    """Keep the smallest set of most likely tokens whose mass is at least p (Holtzman et al. 2020)."""
    mass = _column(p, logits)[:, 0].double()
    head = mass_head(logits, mass, rate=rate)
    return logits.masked_fill(~head_mask(logits, head) & (mass < 1)[:, None], -torch.inf)


def warp_min_p(logits: Logits, p: PerRow, rate: Float[Tensor, " rows"] | None = None) -> Logits:
    """Keep tokens whose probability is at least p times the largest (Nguyen et al. 2024).

    In logits: x ≥ max x + log(p) / rate, rounded once, to the precision in which scores are compared.
    """
    scores = comparable(logits)
    below = (_column(p, logits).double() * (1 - SLACK)).log()
    if rate is not None:
        below = below / rate[:, None]
    floor = (scores.amax(-1, keepdim=True).double() + below).to(scores.dtype)
    return logits.masked_fill(scores < floor, -torch.inf)


def warp_bottom_p(logits: Logits, p: PerRow, apply: Bool[Tensor, " rows"] | None = None) -> Logits:
    """Remove the most likely tokens while their cumulative probability is at most 1 − p (Mecklenburg, §5.2).

    The logits are those that the earlier warpers left. The least likely token with non-zero probability always stays.
    ``apply`` says for which rows it is done at all.
    """
    cut, _ = bottom_p_cut(logits, p)
    if apply is not None:
        cut = cut & apply[:, None]
    return logits.masked_fill(cut, -torch.inf)


def bottom_p_cut(
    logits: Logits, p: PerRow, rate: Float[Tensor, " rows"] | None = None
) -> tuple[Bool[Tensor, "rows vocab"], Float64[Tensor, " rows"]]:
    """Return the tokens that bottom-p removes, and their total probability."""
    head = mass_head(logits, 1.0 - _column(p, logits)[:, 0].double(), over=True, rate=rate)
    return head_mask(logits, head), head.mass
