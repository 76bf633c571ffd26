"""Entropy-based branching: rollouts fork at positions where the model has become unsure.

    start `initial` of a prompt's n rollouts
    after each position: H_now   = mean H / ln V over the next ≤ `window` tokens
                         H_init  = mean H / ln V over the rollout's first `window` tokens
    with probability     clamp(base + weight · (H_now − H_init), 0, 1)
    up to `beam` − 1 further rollouts begin at the position, while there are fewer than n
    the rest of the n rollouts begin at the prompt

FORMULAS.md §5; ARPO (Dong et al. 2025, arXiv 2507.19849). Tokens that rollouts share are computed once.

The tree does not depend on what else is sampled or on how many rows fit into memory. The positions of a prompt are
decided in order, each when all rollouts of the prompt are known up to the end of its window, and the random number of a
position is keyed by (seed, row, position). If the probability is always 0, the rollouts are those of plain sampling.
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
from explorl.rollout.branch_tree import Branch, Branching, BranchTree
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
    """Rollouts some of which begin with tokens of another one: `Rollout.parent` is its index among them.

    For each prompt, the rollouts that began at once come first, then those that began at the prompt later, then the
    forks.
    """

    branches: list[Branch] = field(default_factory=list)
    decisions: int = 0
    """Number of positions at which it was decided whether to branch."""
    params_of: list[int] = field(default_factory=list)
    """The request whose sampling parameters each rollout has: its own, or that of the rollout that it branched off."""

    def padded(self, pad_token_id: int = 0, device: torch.device | str = "cpu") -> PaddedRollouts:
        """Return padded tensors like `Rollouts.padded`, with `drawn_by`."""
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
    """Sample exactly ``n`` completions of every prompt, some of which branch off others.

    Otherwise this is like `Engine.generate`, or with ``tools`` like `generate_with_tools`, which explains ``uses`` and
    ``pool``. A completion that branches off another one has its calls up to there, and may make as many calls in all.
    """
    branching = branching or Branching()
    branching.check(n)
    groups = [list(range(n * prompt, n * prompt + n)) for prompt in range(len(prompts))]
    return _sample(engine, prompts, n, params, branching, groups, tools, uses, pool)


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
    """Do the same as `branch` for a list with one prompt per completion.

    Consecutive equal prompts form a group; ``group`` numbers separate groups of the same prompt. ``params`` has one
    value per completion, or one for all. A group that is smaller than ``initial`` starts whole.
    """
    numbers = group or [0] * len(prompts)
    groups = [
        list(rows) for _, rows in groupby(range(len(prompts)), key=lambda row: (numbers[row], tuple(prompts[row])))
    ]
    return _sample(engine, prompts, 1, params, branching, groups, tools, uses, pool)


def drawn_by(rollouts: Sequence[Rollout]) -> Int[Tensor, "batch time"]:
    """Return the distance from each rollout to the one that sampled its token: 0 for its own tokens and on padding.

    ``Rollout.parent`` must be the index of an earlier one of these rollouts.
    """
    rows: list[np.ndarray] = []
    for index, rollout in enumerate(rollouts):
        rows.append(np.zeros(len(rollout), dtype=np.int64))
        if rollout.parent is not None:
            shared = slice(rollout.forked_at)
            rows[index][shared] = rows[rollout.parent][shared] + rollout.parent - index
    return torch.nn.utils.rnn.pad_sequence([torch.from_numpy(row) for row in rows], batch_first=True)


def _sample(
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
    if params.seed is None:  # as in the engine
        params = replace(params, seed=int(torch.randint(2**62, ()).item()))
    assert params.seed is not None
    texts = [marker for marker in branching.at if marker_text(marker)]
    if texts and engine.tokenizer is None:
        raise ValueError(f"at has {texts[0]!r}, but the engine has no tokenizer to find it; give it one")
    session: Session | ToolSession
    if tools is None:
        session = engine.open(prompts, n, params)
    else:
        session = ToolSession(engine, prompts, n, params, tools, uses=uses, pool=pool)
    with session:
        tree = BranchTree(session, groups, branching, params.seed)
        while session.running and tree.open:
            ended = session.step(tokens=branching.window)
            tree.update([rollout.request for rollout in ended])
        session.run()
        return _collect(tree, n)


def _collect(tree: BranchTree, n: int) -> BranchedRollouts:
    """Return the rollouts of a tree, ``n`` of each prompt."""
    index_of = {row: index for index, row in enumerate(tree.rows)}
    rollouts: list[Rollout] = []
    params_of: list[int] = []
    for row, index in index_of.items():
        rollout = tree.session.rollout(row)
        parent = None if rollout.parent is None else index_of[rollout.parent]
        rollouts.append(replace(rollout, request=index, prompt_index=index // n, sample_index=index % n, parent=parent))
        params_of.append(row if parent is None else params_of[parent])
    branches = [replace(branch, parent=index_of[branch.parent]) for branch in tree.branches]
    branches.sort(key=lambda branch: (branch.parent, branch.position))
    return BranchedRollouts(rollouts, tree.session.prompt_ids, n, tree.seed, branches, tree.decisions, params_of)
