"""Entropy-based branching: rollouts fork at positions where the model has become unsure.

    start `initial` of a prompt's n rollouts
    after each position: H_now   = mean H / ln V over the next ≤ `window` tokens
                         H_init  = mean H / ln V over the rollout's first `window` tokens
    with probability     clamp(base + weight · (H_now − H_init), 0, 1)
    up to `beam` − 1 further rollouts begin at the position, while there are fewer than n
    the rest of the n rollouts begin at the prompt

FORMULAS.md §5; ARPO (Dong et al. 2025, arXiv 2507.19849). Tokens that rollouts share are computed once.

The tree does not depend on what else is sampled or on how many sequences fit into memory. The positions of a prompt are
decided in order, each when all rollouts of the prompt are known up to the end of its window, and the random number of a
position is keyed by (seed, sequence, position). If the probability is always 0, the rollouts are those of plain
sampling.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from explorl.metrics.branch_probability import branch_probability, marker_text, normalised_entropy
from explorl.rollout.engine import Engine
from explorl.rollout.requests import Prompt
from explorl.rollout.rollouts import PaddedRollouts, Rollout, Rollouts
from explorl.rollout.sampling import SamplingParams
from explorl.rollout.sampling.rng import fork_key, request_keys, uniform
from explorl.rollout.session import Session
from explorl.rollout.stops import EVERY, StopStrings
from explorl.rollout.tool_use import ToolSession, ToolUse
from explorl.sandbox.interpreter_pool import InterpreterPool

COIN = 0x3C6EF372FE94F82B
"""Salt of the stream that decides where to branch."""
UNSURE = 2 * EVERY
"""Tokens at the end of an unfinished sequence that may still be removed."""
CHECK_ALL_AFTER = 8
"""Ended sequences after which all prompts are checked, not only those of the ended sequences."""


@dataclass(frozen=True)
class Branching:
    """Options of branching; the defaults are ARPO's."""

    initial: int | None = None
    """Rollouts of a prompt that begin at once; None is half of them."""
    beam: int = 2
    """Rollouts that continue from a position where one of them branches, itself included."""
    base: float = 0.5
    """Probability of branching if the entropy is that of the rollout's beginning."""
    weight: float = 0.2
    """Weight with which a rise of the normalised entropy is added to it."""
    window: int = 20
    """Tokens over which entropy is averaged."""
    at: Sequence[str] = ("output",)
    """Markers to branch after: ``output`` of a tool, ``newline``, ``step`` (a blank line), ``wait``, or ``text:…``."""

    def __post_init__(self) -> None:
        for name, minimum, example in (("initial", 1, 4), ("beam", 2, 2), ("window", 1, 20)):
            value = getattr(self, name)
            optional = name == "initial" and value is None
            if not optional and (isinstance(value, bool) or not isinstance(value, int) or value < minimum):
                raise ValueError(f"{name} is {value!r}; use a whole number, {minimum} or more, such as {example}")
        for name, maximum, good in (("base", 1.0, 0.5), ("weight", math.inf, 0.2)):
            value = getattr(self, name)
            number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
            if not number or not 0 <= value <= maximum:
                bound = "" if maximum == math.inf else f" and at most {maximum:g}"
                raise ValueError(f"{name} is {value!r}; use a number, at least 0{bound}, such as {good}")
        if isinstance(self.at, str) or not self.at:
            raise ValueError(f"at is {self.at!r}; give a list of markers, such as ['newline']")
        object.__setattr__(self, "at", tuple(dict.fromkeys(self.at)))
        for marker in self.at:
            marker_text(marker)

    @property
    def never(self) -> bool:
        """True if the probability is always 0, as H / ln V is at most 1."""
        return self.base + self.weight <= 0

    def at_first(self, n: int) -> int:
        """Return how many of n rollouts begin at once."""
        return n if self.never else max(1, n // 2) if self.initial is None else self.initial

    def check(self, n: int) -> None:
        """Raise `ValueError` if a prompt has fewer than `initial` rollouts."""
        if self.initial is not None and self.initial > n:
            raise ValueError(
                f"initial is {self.initial}, but a prompt has only {n} rollouts in all; use initial={max(1, n // 2)}, "
                f"or {2 * self.initial} rollouts"
            )


@dataclass(frozen=True)
class Branch:
    """A position at which a rollout branched."""

    parent: int
    """Index of the rollout among the returned ones."""
    position: int
    """Number of completion tokens before it."""
    marker: str
    entropy: float
    """H_now: mean H / ln V after the position."""
    initial_entropy: float
    """H_init: mean H / ln V at the rollout's beginning."""
    probability: float
    copies: int
    """Number of rollouts that begin there."""


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


@dataclass(eq=False)
class _BranchRow:
    """A rollout in flight."""

    row: int
    key: int
    """Key of its stream of random numbers."""
    begin: int = 0
    """Number of tokens it shares with its parent."""
    searched: int = 0
    """Number of tokens that have been searched for markers."""
    floor: dict[str, int] = field(default_factory=dict)
    """Number of tokens in which each marker may no longer begin."""
    undecided: list[tuple[int, str]] = field(default_factory=list)
    """Positions, with their markers, that are not decided yet."""
    rollout: Rollout | None = None
    final: float = 0
    """Number of tokens that can't change any more, as stop strings and calls are found late; ∞ once it has ended."""
    forks: int = 0


@dataclass(eq=False)
class _BranchGroup:
    """The rollouts of a prompt."""

    rows: list[_BranchRow]
    unstarted: list[int]
    """Sequences that have not begun: the budget for forks."""
    forks: int = 0
    """How many of ``rows`` are forks; they come last."""
    open: bool = True
    """True if there is anything left to decide."""


class BranchTree:
    """Decides where the sequences of a session branch, forks them, and starts the remaining sequences at the end.

    Sequences beyond the ``initial`` ones of their group are cancelled on construction, before anything is sampled;
    `update` resumes them.
    """

    def __init__(self, session: Session, groups: Sequence[Sequence[int]], branching: Branching, seed: int) -> None:
        self.session, self.branching, self.seed = session, branching, seed
        self._vocabulary = session.engine.vocab
        self._texts = {
            marker: StopStrings([[text]], session.engine.tokenizer)
            for marker in branching.at
            if (text := marker_text(marker))
        }
        keys = request_keys(self.seed, range(sum(map(len, groups)))).tolist()
        self._groups = [self._start(rows, keys) for rows in groups]
        self._group_of = {row: group for group, rows in zip(self._groups, groups, strict=True) for row in rows}
        self.branches: list[Branch] = []
        """Where sequences branched; `Branch.parent` is a sequence of the session."""
        self.decisions = 0
        """Number of positions at which it was decided whether to branch."""
        self._ended = 0
        """Sequences that have ended since all prompts were last checked."""

    def _start(self, rows: Sequence[int], keys: Sequence[int]) -> _BranchGroup:
        """Return the group of these sequences, after cancelling those that do not begin at once."""
        first = min(self.branching.at_first(len(rows)), len(rows))
        for row in rows[first:]:
            self.session.cancel(row)
        started = [_BranchRow(row, keys[row]) for row in rows[:first]]
        return _BranchGroup(started, list(rows[first:]), open=first < len(rows))

    @property
    def open(self) -> bool:
        """True if there is anything left to decide."""
        return any(group.open for group in self._groups)

    def update(self, ended: Sequence[int]) -> list[int]:
        """Decide what can be decided after a step in which these sequences ended, and return the forks."""
        self._ended += len(ended)
        if ended and self._ended < CHECK_ALL_AFTER:
            due = list({id(group): group for group in (self._group_of[row] for row in ended)}.values())
        else:
            due, self._ended = self._groups, 0
            self.session.read_back()
        return [fork for group in due if group.open for fork in self._decide(group)]

    def _decide(self, group: _BranchGroup) -> list[int]:
        """Decide a group's positions in order, as far as no sequence can have an earlier one, and return the forks.

        A position is decided when its sequence is final up to the end of the window.
        """
        forks: list[int] = []
        for row in group.rows:
            self._read(row)
        frontier = min(max(row.final - 1, row.begin) for row in group.rows)
        undecided = sorted(
            (position, order, marker) for order, row in enumerate(group.rows) for position, marker in row.undecided
        )
        for position, order, marker in undecided:
            row = group.rows[order]
            if position > frontier or position + self.branching.window > row.final:
                return forks
            row.undecided.pop(0)
            new = self._fork(group, row, position, marker)
            if new:
                forks, frontier = forks + new, position
            if not group.open:
                return forks
        if frontier == math.inf:  # all have ended
            for unstarted in group.unstarted:
                self.session.resume(unstarted)
            group.open = False
        return forks

    def _read(self, row: _BranchRow) -> None:
        """Read a sequence, and add the positions in its new tokens."""
        if row.final == math.inf:
            return
        row.rollout = rollout = self.session.rollout(row.row)
        waits = isinstance(self.session, ToolSession) and self.session.is_waiting(row.row)
        running = rollout.finish_reason is None or waits
        row.final = max(0, len(rollout) - UNSURE) if running else math.inf
        if rollout.finish_reason != "error":
            self._search(row, rollout, int(min(row.final, len(rollout))))

    def _search(self, row: _BranchRow, rollout: Rollout, final: int) -> None:
        """Add the positions among the tokens that have become final since the last search."""
        if final <= row.searched:
            return
        markers: dict[int, str] = {}
        for marker in self.branching.at:
            for position in self._positions(marker, row, rollout, final):
                markers.setdefault(position, marker)
        row.undecided += [(position, markers[position]) for position in sorted(markers)]
        row.searched = final

    def _positions(self, marker: str, row: _BranchRow, rollout: Rollout, final: int) -> Iterator[int]:
        """Yield the positions after a marker, each between two tokens."""
        sampled = rollout.sampled
        if marker not in self._texts:
            for position in range(max(row.begin + 1, row.searched), final):
                if sampled[position] and not sampled[position - 1]:
                    yield position
            return
        # The last final token is left for later, as there is no position after it yet.
        tokens, searched = np.array(rollout.token_ids[: final - 1]), max(0, row.searched - 1)
        floor = row.floor.get(marker, row.begin)
        while (end := self._texts[marker].cut(0, tokens, searched, floor)) is not None:
            searched = floor = end[0]
            if sampled[searched - 1] and sampled[searched]:
                yield searched
        row.floor[marker] = floor

    def _fork(self, group: _BranchGroup, row: _BranchRow, position: int, marker: str) -> list[int]:
        """Fork a sequence at a position with the probability that the entropy there gives, and return the forks."""
        assert row.rollout is not None
        now, initial = (self._entropy(row.rollout, start) for start in (position, 0))
        if now is None or initial is None:
            return []
        self.decisions += 1
        probability = branch_probability(now, initial, base=self.branching.base, weight=self.branching.weight)
        coin = uniform(torch.tensor([row.key]), torch.tensor([position]), COIN).item()
        if coin >= probability:
            return []
        copies = min(self.branching.beam - 1, len(group.unstarted))
        forks = self.session.fork(row.row, copies, at=position)
        for fork in forks:
            group.rows.append(_BranchRow(fork, fork_key(row.key, row.forks), begin=position, searched=position))
            row.forks += 1
            self._group_of[fork] = group
            group.unstarted.pop()
        group.forks += copies
        group.open = bool(group.unstarted)
        self.branches.append(Branch(row.row, position, marker, now, initial, probability, copies))
        return forks

    def _entropy(self, rollout: Rollout, start: int) -> float | None:
        """Return the mean H / ln V over the window's sampled tokens, or None if there are none."""
        window = slice(start, start + self.branching.window)
        values = rollout.entropy[window][rollout.sampled[window]]
        return normalised_entropy(float(values.double().mean()), self._vocabulary) if len(values) else None

    @property
    def rows(self) -> list[int]:
        """All sequences by group: those that began at once, those that began at the prompt later, the forks."""
        rows: list[int] = []
        for group in self._groups:
            started = [row.row for row in group.rows[: len(group.rows) - group.forks]]
            rows += [*started, *group.unstarted, *(row.row for row in group.rows[len(started) :])]
        return rows
