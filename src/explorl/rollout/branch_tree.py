"""Decide where the rows of a session branch, and start the remaining rows when all is decided."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from explorl.metrics.branching import branch_probability, marker_text, normalised_entropy
from explorl.rollout.rollouts import Rollout
from explorl.rollout.sampling.rng import fork_key, request_keys, uniform
from explorl.rollout.session import Session
from explorl.rollout.stops import EVERY, StopStrings
from explorl.rollout.tool_use import ToolSession

COIN = 0x3C6EF372FE94F82B
"""Salt of the stream that decides where to branch."""
UNSURE = 2 * EVERY
"""Tokens at the end of an unfinished row that may still be removed."""
CHECK_ALL_AFTER = 8
"""Ended rows after which all prompts are checked, not only those of the ended rows."""


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
    """Rows that have not begun: the budget for forks."""
    forks: int = 0
    """How many of ``rows`` are forks; they come last."""
    open: bool = True
    """True if there is anything left to decide."""


class BranchTree:
    """Decides where the rows of a session branch, forks them, and starts the remaining rows at the end.

    Rows beyond the ``initial`` ones of their group are cancelled on construction, before anything is sampled; `update`
    resumes them.
    """

    def __init__(
        self, session: Session | ToolSession, groups: Sequence[Sequence[int]], branching: Branching, seed: int
    ) -> None:
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
        """Where rows branched; `Branch.parent` is a row of the session."""
        self.decisions = 0
        """Number of positions at which it was decided whether to branch."""
        self._ended = 0
        """Rows that have ended since all prompts were last checked."""

    def _start(self, rows: Sequence[int], keys: Sequence[int]) -> _BranchGroup:
        """Return the group of these rows, after cancelling those that do not begin at once."""
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
        """Decide what can be decided after a step of the session in which these rows ended, and return the forks."""
        self._ended += len(ended)
        if ended and self._ended < CHECK_ALL_AFTER:
            due = list({id(group): group for group in (self._group_of[row] for row in ended)}.values())
        else:
            due, self._ended = self._groups, 0
            self.session.read_back()
        return [fork for group in due if group.open for fork in self._decide(group)]

    def _decide(self, group: _BranchGroup) -> list[int]:
        """Decide a group's positions in order, as far as no row can have an earlier one, and return the forks.

        A position is decided when its row is final up to the end of the window.
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
        """Read a row, and add the positions in its new tokens."""
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
        """Fork a row at a position with the probability that the entropy there gives, and return the new rows."""
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
        """All rows by group: those that began at once, those that began at the prompt later, the forks."""
        rows: list[int] = []
        for group in self._groups:
            started = [row.row for row in group.rows[: len(group.rows) - group.forks]]
            rows += [*started, *group.unstarted, *(row.row for row in group.rows[len(started) :])]
        return rows
