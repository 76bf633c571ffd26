"""Entropy-based branching: rollouts that go on more than once from places where the model has become unsure.

    start `initial` of a prompt's n rollouts
    behind each place:   H_now   = mean H / ln V over the next ≤ `window` tokens
                         H_init  = mean H / ln V over the rollout's first `window` tokens
    with probability     clamp(base + weight · (H_now − H_init), 0, 1)
    up to `beam` − 1 further rollouts begin at the place, while there are fewer than n
    what is then missing of n begins at the prompt

FORMULAS.md §5; ARPO (Dong et al. 2025, arXiv 2507.19849). Tokens that rollouts share are computed once.

The tree is the same whatever else is sampled and however many rows fit into memory. Places of a prompt are decided in
the order of their positions, each when all rollouts of the prompt are known up to the end of its window; the coin of a
place is keyed by (seed, row, place); and where the coin can only say no, the rollouts are those of plain sampling.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from explorl.metrics.branching import marker_text
from explorl.rollout.branch_tree import Branch, Branching, Tree
from explorl.rollout.engine import Engine
from explorl.rollout.requests import Prompt
from explorl.rollout.rollouts import PaddedRollouts, Rollout, Rollouts
from explorl.rollout.sampling import SamplingParams
from explorl.rollout.session import Session
from explorl.rollout.tool_use import ToolSession, ToolUse
from explorl.sandbox.interpreter_pool import InterpreterPool

__all__ = ["Branch", "BranchedRollouts", "Branching", "branch", "branch_rows", "drawn_by"]


@dataclass(eq=False)
class BranchedRollouts(Rollouts):
    """Rollouts some of which begin with tokens of another: `Rollout.parent` is that one's index among them.

    The rollouts that began at once come first for each prompt, then those that filled up the number, then the forks.
    """

    branches: list[Branch] = field(default_factory=list)
    places: int = 0
    """Places at which it was decided whether to branch."""
    settings: list[int] = field(default_factory=list)
    """The request whose sampling parameters each rollout has: its own, or that of the one that it branched off."""

    def padded(self, pad_token_id: int = 0, device: torch.device | str = "cpu") -> PaddedRollouts:
        """As `Rollouts.padded`, and who drew each token."""
        return replace(super().padded(pad_token_id, device), drawn_by=drawn_by(self).to(device))


def branch(
    engine: Engine,
    prompts: Sequence[Prompt],
    n: int,
    params: SamplingParams | None = None,
    branching: Branching | None = None,
    *,
    tools: ToolUse | None = None,
    uses: Sequence[int] | None = None,
    pool: InterpreterPool | None = None,
) -> BranchedRollouts:
    """Samples exactly ``n`` completions of every prompt, some of which branch off others.

    In all else as `Engine.generate`, or with ``tools`` as `generate_with_tools`, whose ``uses`` and ``pool`` these are.
    A completion that branches off another one has its calls up to there, and may make as many as that one.
    """
    branching = branching or Branching()
    branching.check(n)
    groups = [list(range(n * prompt, n * prompt + n)) for prompt in range(len(prompts))]
    return _sampled(engine, prompts, n, params, branching, groups, tools, uses, pool)


def branch_rows(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    branching: Branching,
    *,
    group: Sequence[int] | None = None,
    tools: ToolUse | None = None,
    uses: Sequence[int] | None = None,
    pool: InterpreterPool | None = None,
) -> BranchedRollouts:
    """The same for prompts that are given once for every completion.

    Equal prompts in a row are answered together; ``group`` tells those apart that are not, where a prompt comes twice.
    ``params`` has one value per completion, or one for all. A group that is smaller than ``initial`` starts whole.
    """
    numbers = group or [0] * len(prompts)
    together = groupby(range(len(prompts)), key=lambda row: (numbers[row], tuple(prompts[row])))
    groups = [list(rows) for _, rows in together]
    return _sampled(engine, prompts, 1, params, branching, groups, tools, uses, pool)


def drawn_by(rollouts: Sequence[Rollout]) -> Int[Tensor, "batch time"]:
    """How far from each row that row stands which drew its token: 0 for its own, and on padding.

    ``Rollout.parent`` is an index among these rollouts, of one that stands before it.
    """
    rows: list[np.ndarray] = []
    for index, rollout in enumerate(rollouts):
        rows.append(np.zeros(len(rollout), dtype=np.int64))
        if rollout.parent is not None:
            shared = slice(rollout.forked_at)
            rows[index][shared] = rows[rollout.parent][shared] + rollout.parent - index
    return torch.nn.utils.rnn.pad_sequence([torch.from_numpy(row) for row in rows], batch_first=True)


def _sampled(
    engine: Engine,
    prompts: Sequence[Prompt],
    n: int,
    params: SamplingParams | None,
    branching: Branching,
    groups: Sequence[Sequence[int]],
    tools: ToolUse | None,
    uses: Sequence[int] | None,
    pool: InterpreterPool | None,
) -> BranchedRollouts:
    params = params or SamplingParams()
    if params.seed is None:  # drawn as the engine would draw it
        params = replace(params, seed=int(torch.randint(2**62, ()).item()))
    assert params.seed is not None
    texts = [marker for marker in branching.at if marker_text(marker)]
    if texts and engine.tokenizer is None:
        raise ValueError(f"at has {texts[0]!r}, but the engine has no tokenizer to find it with; give it one")
    session: Session | ToolSession
    if tools is None:
        session = engine.open(prompts, n, params)
    else:
        session = ToolSession(engine, prompts, n, params, tools, uses=uses, pool=pool)
    with session:
        tree = Tree(session, groups, branching, params.seed)
        while session.running and tree.open:
            ended = session.step(tokens=branching.window)
            tree.look([rollout.request for rollout in ended])
        session.run()
        return _collected(tree, n)


def _collected(tree: Tree, n: int) -> BranchedRollouts:
    """What has become of a tree's rows, ``n`` of each prompt."""
    place = {row: index for index, row in enumerate(tree.rows)}
    found: list[Rollout] = []
    settings: list[int] = []
    for row, index in place.items():
        rollout = tree.session.rollout(row)
        parent = None if rollout.parent is None else place[rollout.parent]
        found.append(replace(rollout, request=index, prompt_index=index // n, sample_index=index % n, parent=parent))
        settings.append(row if parent is None else settings[parent])
    branches = [replace(one, parent=place[one.parent]) for one in tree.branches]
    branches.sort(key=lambda one: (one.parent, one.place))
    return BranchedRollouts(found, tree.session.prompt_ids, n, tree.seed, branches, tree.places, settings)
