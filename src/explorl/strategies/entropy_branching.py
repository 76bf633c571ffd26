"""Entropy branching: answers go on more than once from where the policy has become unsure.

    P(branch) = clamp(base + weight · (H_now − H_init), 0, 1),   H = mean H_t / ln V over `window` tokens
    shared="once":   A_t ← mean over the m answers that have the token,   weight_t ← 1/m

Dong et al. 2025 (ARPO), reviewed in Deng et al. 2025, §4.3. H_now is taken behind a place, H_init at the answer's
beginning. `initial` of the num_generations answers to a prompt begin at once (None: half of them); where one branches,
up to `beam` − 1 others go on from there, as long as the prompt has any left; those that are left in the end begin at
the prompt. All of them form the prompt's group.

Places (`at`): `output`, behind what a tool said; `newline`; `step`, behind a blank line; `wait`, behind the word; and
behind any text, as `text:Hmm`.

What to expect: answers that share a beginning and differ in the end say which end was the better one, for fewer tokens
than answers of their own: what they share is sampled once. The authors report better results than GRPO's with half of
the tool calls. Logged are how often, where and with what entropy it branched, under `branching/`.

When not to: where answers are short, or differ from their first word on. A group of forks of one answer is less varied
than a group of its own size, so its mean is a poorer baseline; keep `initial` at some answers.

Deviations: the authors' release sums entropies over the ten likeliest tokens only, and compares with baselines of
earlier batches; here H_t is that of the whole distribution, averaged, and H_init the answer's own. A token that m
answers share stands in the batch m times. Each answer is a draw from the policy given the beginning it shares, so
counting the token once per answer (`shared="per_leaf"`, the authors' soft estimate and the default) is what the policy
gradient asks for: where branches do not look at what was written, it has no bias. That they do leans it towards
beginnings the policy is unsure of, which is the method. `shared="once"` gives each token that was sampled one word: it
learns from the mean advantage of its answers, and weighs, with its KL term, 1/m in each. Then beginnings count less
than the policy gradient says, by the number of answers that share them. It acts on what the strategies before it left
of the advantages: list it last.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from explorl.metrics.branching import marker_text
from explorl.strategies._lib.collectives import LOCAL, Collectives
from explorl.strategies._lib.masked_stats import double, masked_double
from explorl.strategies._lib.schedule import Scheduled, at
from explorl.strategies._lib.validate import check_choice, check_integer, check_number, name_of, raise_invalid
from explorl.strategies.base import Batch, Strategy


def shared_rows(
    drawn_by: Int[Tensor, "batch time"], mask: Float[Tensor, "batch time"], *, collectives: Collectives = LOCAL
) -> Float[Tensor, "batch time"]:
    """How many rows have each token: m_{i,t} = #{j: j + d_{j,t} = i + d_{i,t}}; 0 where a token does not count."""
    return _by_tree(_shared_rows, drawn_by, mask, collectives=collectives)


def _shared_rows(drawn_by: Int[Tensor, "batch time"], mask: Float[Tensor, "batch time"]) -> Float[Tensor, "batch time"]:
    rows = _who(drawn_by)
    return _sums(double(mask > 0), rows).gather(0, rows).float() * (mask > 0)


def shared_advantages(
    advantages: Float[Tensor, "batch time"],
    drawn_by: Int[Tensor, "batch time"],
    mask: Float[Tensor, "batch time"],
    *,
    collectives: Collectives = LOCAL,
) -> Float[Tensor, "batch time"]:
    """The mean advantage of the rows that have each token: A_{i,t} ← Σ_{j: same token} A_{j,t} / m_{i,t}."""
    return _by_tree(_shared_advantages, drawn_by, mask, advantages, collectives=collectives)


def _shared_advantages(
    drawn_by: Int[Tensor, "batch time"], mask: Float[Tensor, "batch time"], advantages: Float[Tensor, "batch time"]
) -> Float[Tensor, "batch time"]:
    rows = _who(drawn_by)
    own = masked_double(advantages, mask)
    means = _sums(own, rows) / _sums(double(mask > 0), rows).clamp(min=1)
    return (means.gather(0, rows) * (mask > 0)).to(advantages.dtype)


def _who(drawn_by: Int[Tensor, "batch time"]) -> Int[Tensor, "batch time"]:
    """The row that drew each token."""
    return drawn_by.long() + torch.arange(len(drawn_by), device=drawn_by.device).unsqueeze(1)


def _by_tree(
    function: Callable[..., Tensor], drawn_by: Int[Tensor, "batch time"], *tokens: Tensor, collectives: Collectives
) -> Float[Tensor, "batch time"]:
    """A function of rows that share tokens. They are brought together only where a process has a token that a row of
    another one drew: each samples trees of its own, and a group that was dealt out anew may come to straddle two."""
    rows = _who(drawn_by)
    if bool(collectives.sum(((rows < 0) | (rows >= len(rows))).sum()) > 0):
        return collectives.map_rows(function, drawn_by, *tokens)
    return function(drawn_by, *tokens)


def _sums(values: Float[Tensor, "batch time"], rows: Int[Tensor, "batch time"]) -> Float[Tensor, "batch time"]:
    """Sums of what stands at a position, by the row that drew the token."""
    return torch.zeros_like(values).scatter_add_(0, rows, values)


@dataclass(frozen=True)
class EntropyBranching(Strategy):
    """Answers go on more than once from where the policy has become unsure."""

    name = "entropy_branching"
    paper = "Dong et al. 2025, Agentic reinforced policy optimization (arXiv:2507.19849)"
    weighs_kl = True
    acts_on_parts = True

    initial: int | None = None  # answers that begin at once; None: half of num_generations
    beam: int = 2  # answers that go on from a branch, the one that branches among them
    base: Scheduled = 0.5  # probability to branch at the entropy of the beginning
    weight: Scheduled = 0.2  # of a rise in normalised entropy
    window: int = 20  # tokens over which entropy is averaged
    at: Sequence[str] = ("output", "step")  # output, newline, step, wait or text:…
    shared: Literal["per_leaf", "once"] = "per_leaf"  # how often a token that answers share is learnt from

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
                f"answers to a prompt; use initial={max(1, num_generations // 2)}, or "
                f"num_generations={2 * self.initial}"
            )

    def branching(self, step: int) -> Mapping[str, Any]:
        same = {name: getattr(self, name) for name in ("initial", "beam", "window", "at")}
        return {**same, "base": at(self.base, step), "weight": at(self.weight, step)}

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
        forked, own = (batch.drawn_by != 0).any(1), (batch.drawn_by == 0) & present
        forks, sampled, tokens = batch.collectives.sum(torch.stack([forked.sum(), own.sum(), present.sum()])).tolist()
        return {"forks": float(forks), "sampled_tokens": sampled / max(tokens, 1)}
