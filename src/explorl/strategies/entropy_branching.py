"""Entropy branching: branch completions at points where the policy has become uncertain.

    P(branch) = clamp(base + weight · (H_now − H_init), 0, 1),   H = mean H_t / ln V over `window` tokens
    shared="once":   A_t ← mean over the m completions that share the token,   weight_t ← 1/m

Dong et al. 2025 (ARPO), reviewed in Deng et al. 2025, §4.3. H_now is measured after a marker, H_init at the start of
the completion. `initial` of the num_generations completions of a prompt start at once (None: half of them). When one of
them branches, up to `beam` − 1 others continue from that point, as long as any are left; those left at the end start at
the prompt. Together they form the prompt's group.

Markers (`at`): `output`, after the output of a tool; `newline`; `step`, after an empty line; `wait`, after that word;
and after any text, as `text:Hmm`.

What to expect: completions with a common beginning and different endings show which ending was better, at a lower cost
than independent completions, because the shared part is sampled only once. The authors report better results than GRPO
with half of the tool calls. How often, where and at which entropy completions branched is logged under `branching/`.

When not to use it: if completions are short or differ from the first word on. A group of branches of one completion is
less diverse than a group of independent ones, so its mean is a worse baseline; do not set `initial` too low.

Deviations: the authors' release sums entropies over the ten most likely tokens only and compares with baselines from
earlier batches; here H_t is the mean over the whole distribution and H_init is that of the completion itself. A token
that m completions share occurs m times in the batch. Given the shared beginning, each completion is a sample of the
policy, so counting the token once per completion (`shared="per_leaf"`, the authors' soft estimate and the default) is
the correct policy gradient: it is unbiased if branching does not depend on the sampled tokens. As it does, it favours
beginnings about which the policy is uncertain, as the method intends. `shared="once"` counts each sampled token once:
its advantage is the mean over its completions, and it has the weight 1/m, also in the KL term, in each of them. Shared
beginnings then count less than in the policy gradient, by the number of completions that share them. It uses the
advantages left by the strategies before it: list it last.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from explorl.metrics.branch_probability import marker_text
from explorl.strategies._lib.collectives import LOCAL, Collectives
from explorl.strategies._lib.masked_stats import double, masked_double
from explorl.strategies._lib.schedule import Scheduled, at
from explorl.strategies._lib.validate import check_choice, check_integer, check_number, name_of, raise_invalid
from explorl.strategies.base import Batch, Strategy


def shared_rows(
    drawn_by: Int[Tensor, "batch time"], mask: Float[Tensor, "batch time"], *, collectives: Collectives = LOCAL
) -> Float[Tensor, "batch time"]:
    """Return how many rows share each token: m_{i,t} = #{j: j + d_{j,t} = i + d_{i,t}}; 0 for uncounted tokens."""
    return _by_tree(_shared_rows, drawn_by, mask, collectives=collectives)


def _shared_rows(drawn_by: Int[Tensor, "batch time"], mask: Float[Tensor, "batch time"]) -> Float[Tensor, "batch time"]:
    rows = _source_rows(drawn_by)
    return _sums(double(mask > 0), rows).gather(0, rows).float() * (mask > 0)


def shared_advantages(
    advantages: Float[Tensor, "batch time"],
    drawn_by: Int[Tensor, "batch time"],
    mask: Float[Tensor, "batch time"],
    *,
    collectives: Collectives = LOCAL,
) -> Float[Tensor, "batch time"]:
    """Return the mean advantage of the rows that share each token: A_{i,t} ← Σ_{j: same token} A_{j,t} / m_{i,t}."""
    return _by_tree(_shared_advantages, drawn_by, mask, advantages, collectives=collectives)


def _shared_advantages(
    drawn_by: Int[Tensor, "batch time"], mask: Float[Tensor, "batch time"], advantages: Float[Tensor, "batch time"]
) -> Float[Tensor, "batch time"]:
    rows = _source_rows(drawn_by)
    means = _sums(masked_double(advantages, mask), rows) / _sums(double(mask > 0), rows).clamp(min=1)
    return (means.gather(0, rows) * (mask > 0)).to(advantages.dtype)


def _source_rows(drawn_by: Int[Tensor, "batch time"]) -> Int[Tensor, "batch time"]:
    """Return the index of the row that sampled each token."""
    return drawn_by.long() + torch.arange(len(drawn_by), device=drawn_by.device).unsqueeze(1)


def _by_tree(
    function: Callable[..., Tensor], drawn_by: Int[Tensor, "batch time"], *tokens: Tensor, collectives: Collectives
) -> Float[Tensor, "batch time"]:
    """Apply a function of rows that share tokens, gathering the rows only if a process needs those of another.

    Each process samples its own trees, but a group that was moved, by dynamic sampling for example, can span two.
    """
    rows = _source_rows(drawn_by)
    if bool(collectives.sum(((rows < 0) | (rows >= len(rows))).sum()) > 0):
        return collectives.map_rows(function, drawn_by, *tokens)
    return function(drawn_by, *tokens)


def _sums(values: Float[Tensor, "batch time"], rows: Int[Tensor, "batch time"]) -> Float[Tensor, "batch time"]:
    """Return the sums at each position over the rows that share a source row."""
    return torch.zeros_like(values).scatter_add_(0, rows, values)


@dataclass(frozen=True)
class EntropyBranching(Strategy):
    """Branch completions at points where the policy has become uncertain."""

    name = "entropy_branching"
    paper = "Dong et al. 2025, Agentic reinforced policy optimization (arXiv:2507.19849)"
    weighs_kl = True
    acts_on_parts = True

    initial: int | None = None  # completions that start at once; None: half of num_generations
    beam: int = 2  # completions that continue from a branch, including the branching one
    base: Scheduled = 0.5  # probability of branching at the initial entropy
    weight: Scheduled = 0.2  # of an increase in normalised entropy
    window: int = 20  # tokens over which entropy is averaged
    at: Sequence[str] = ("output", "step")  # output, newline, step, wait or text:…
    shared: Literal["per_leaf", "once"] = "per_leaf"  # how often a shared token counts

    def __post_init__(self) -> None:
        check_integer(self, "initial", at_least=1, optional=True, good=4)
        check_integer(self, "beam", at_least=2)
        check_number(self, "base", at_least=0, at_most=1)
        check_number(self, "weight", at_least=0)
        check_integer(self, "window", at_least=1)
        check_choice(self, "shared", "per_leaf", "once")
        if isinstance(self.at, str) or not isinstance(self.at, Sequence) or not self.at:
            raise_invalid(self, "at", self.at, "a list of markers", ["newline"])
        for marker in self.at:
            try:
                marker_text(marker)
            except ValueError as error:
                raise ValueError(f"{name_of(self)}: {error}") from None
        object.__setattr__(self, "at", tuple(self.at))

    def check(self, *, num_generations: int) -> None:
        if self.initial is not None and self.initial > num_generations:
            raise ValueError(
                f"{name_of(self)}: initial is {self.initial}, but there are only num_generations={num_generations} "
                f"completions per prompt; use initial={max(1, num_generations // 2)}, or "
                f"num_generations={2 * self.initial}"
            )

    def branching(self, step: int) -> Mapping[str, Any]:
        constant = {name: getattr(self, name) for name in ("initial", "beam", "window", "at")}
        return {**constant, "base": at(self.base, step), "weight": at(self.weight, step)}

    def advantages(self, batch: Batch) -> Float[Tensor, "batch time"] | None:
        if self.shared == "per_leaf" or batch.drawn_by is None:
            return None
        return shared_advantages(batch.advantages, batch.drawn_by, batch.mask, collectives=batch.collectives)

    def weights(self, batch: Batch) -> Float[Tensor, "batch time"] | None:
        if self.shared == "per_leaf" or batch.drawn_by is None:
            return None
        return 1 / shared_rows(batch.drawn_by, batch.mask, collectives=batch.collectives).clamp(min=1)

    def metrics(self, batch: Batch) -> Mapping[str, float]:
        if batch.drawn_by is None:
            return {}
        present = batch.mask > 0
        forked, sampled = (batch.drawn_by != 0).any(1), (batch.drawn_by == 0) & present
        counts = torch.stack([forked.sum(), sampled.sum(), present.sum()])
        forks, sampled_tokens, tokens = batch.collectives.sum(counts).tolist()
        return {"forks": float(forks), "sampled_tokens": sampled_tokens / max(tokens, 1)}
