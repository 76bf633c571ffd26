"""Where the rows of a session branch: the places, their coins, and the rows that begin when all is decided."""

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
"""Tokens at the end of a row that goes on which may still be taken back."""
IMPATIENCE = 8
"""Rows that end before all prompts are looked at."""


@dataclass(frozen=True)
class Branching:
    """Where and how readily rollouts branch; the defaults are ARPO's."""

    initial: int | None = None
    """Rollouts of a prompt that begin at once; None is half of them."""
    beam: int = 2
    """Rollouts that go on from a place where one of them branches, itself among them."""
    base: float = 0.5
    """Probability to branch where the entropy is that of the rollout's beginning."""
    weight: float = 0.2
    """How much of a rise of the normalised entropy is added to it."""
    window: int = 20
    """Tokens over which entropy is averaged."""
    at: Sequence[str] = ("output",)
    """Places: ``output`` (behind what a tool said), ``newline``, ``step`` (a blank line), ``wait``, or ``text:…``."""

    def __post_init__(self) -> None:
        for name, least, example in (("initial", 1, 4), ("beam", 2, 2), ("window", 1, 20)):
            value = getattr(self, name)
            optional = name == "initial" and value is None
            if not optional and (isinstance(value, bool) or not isinstance(value, int) or value < least):
                raise ValueError(f"{name} is {value!r}; use a whole number, {least} or more, such as {example}")
        for name, most, good in (("base", 1.0, 0.5), ("weight", math.inf, 0.2)):
            value = getattr(self, name)
            number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
            if not number or not 0 <= value <= most:
                bound = "" if most == math.inf else f" and at most {most:g}"
                raise ValueError(f"{name} is {value!r}; use a number, at least 0{bound}, such as {good}")
        if isinstance(self.at, str) or not self.at:
            raise ValueError(f"at is {self.at!r}; give a list of markers, such as ['newline']")
        object.__setattr__(self, "at", tuple(dict.fromkeys(self.at)))
        for marker in self.at:
            marker_text(marker)

    @property
    def never(self) -> bool:
        """Whether no coin can say yes: H / ln V is at most 1."""
        return self.base + self.weight <= 0

    def at_first(self, n: int) -> int:
        """How many of n rollouts begin at once."""
        return n if self.never else max(1, n // 2) if self.initial is None else self.initial

    def check(self, n: int) -> None:
        """`ValueError` where a prompt has fewer than `initial` rollouts."""
        if self.initial is not None and self.initial > n:
            raise ValueError(
                f"initial is {self.initial}, but a prompt has only {n} rollouts in all; use initial={max(1, n // 2)}, "
                f"or {2 * self.initial} rollouts"
            )


@dataclass(frozen=True)
class Branch:
    """A place where a rollout branched."""

    parent: int
    """Index of the rollout among those that are returned."""
    place: int
    """Tokens of the completion before it."""
    marker: str
    entropy: float
    """H_now: mean H / ln V behind the place."""
    initial_entropy: float
    """H_init: mean H / ln V at the rollout's beginning."""
    probability: float
    copies: int
    """Rollouts that begin there."""


@dataclass(eq=False)
class _Row:
    """A rollout in the making."""

    row: int
    key: int
    """Of its stream of random numbers."""
    begin: int = 0
    """Tokens that it has from another."""
    searched: int = 0
    """Tokens in which places have been looked for."""
    floor: dict[str, int] = field(default_factory=dict)
    """Tokens in which a marker is not looked for any more."""
    places: list[tuple[int, str]] = field(default_factory=list)
    """Those that are not decided yet."""
    rollout: Rollout | None = None
    known: float = 0
    """Tokens of it that stay what they are: stop strings and calls are found late. Infinite where it has ended."""
    forks: int = 0


@dataclass(eq=False)
class _Group:
    """The rollouts of a prompt."""

    rows: list[_Row]
    held: list[int]
    """Rows that have not begun: the budget."""
    forks: int = 0
    """How many of its rows branched off others: the last of them."""
    open: bool = True
    """Whether there is anything left to decide."""


class Tree:
    """Decides where the rows of a session branch, forks them, and begins what is missing in the end.

    Rows that are not among the ``initial`` ones of their group are cancelled when it is made, before anything is
    sampled; `look` resumes them.
    """

    def __init__(
        self, session: Session | ToolSession, groups: Sequence[Sequence[int]], branching: Branching, seed: int
    ) -> None:
        self.session, self.branching, self.seed = session, branching, seed
        self._vocabulary = session.engine.vocab
        self._texts = {
            marker: StopStrings([[text]], session.engine.tokenizer, 0)
            for marker in branching.at
            if (text := marker_text(marker))
        }
        keys = request_keys(self.seed, range(sum(map(len, groups)))).tolist()
        self._groups = [self._begun(rows, keys) for rows in groups]
        self._group_of = {row: group for group, rows in zip(self._groups, groups, strict=True) for row in rows}
        self.branches: list[Branch] = []
        """Where rows branched; `Branch.parent` is a row of the session."""
        self.places = 0
        """Places at which it was decided whether to branch."""
        self._hurry = 0

    def _begun(self, rows: Sequence[int], keys: Sequence[int]) -> _Group:
        first = min(self.branching.at_first(len(rows)), len(rows))
        for row in rows[first:]:
            self.session.cancel(row)
        begun = [_Row(row, keys[row]) for row in rows[:first]]
        return _Group(begun, list(rows[first:]), open=first < len(rows))

    @property
    def open(self) -> bool:
        """Whether there is anything left to decide."""
        return any(group.open for group in self._groups)

    def look(self, ended: Sequence[int]) -> list[int]:
        """Decides what can be decided after a step of the session that has ended these rows; the rows it forked."""
        self._hurry += len(ended)
        if ended and self._hurry < IMPATIENCE:
            due = list({id(group): group for group in (self._group_of[row] for row in ended)}.values())
        else:
            due, self._hurry = self._groups, 0
            self.session.look()
        return [fork for group in due if group.open for fork in self._decided(group)]

    def _decided(self, group: _Group) -> list[int]:
        """Goes through a group's places by position, as far as no row can have one before; the rows it forked.

        A place is decided when its row is known to the end of the window.
        """
        forks: list[int] = []
        for one in group.rows:
            self._see(one)
        frontier = min(max(one.known - 1, one.begin) for one in group.rows)
        places = sorted((place, order, marker) for order, one in enumerate(group.rows) for place, marker in one.places)
        for place, order, marker in places:
            one = group.rows[order]
            if place > frontier or place + self.branching.window > one.known:
                return forks
            one.places.pop(0)
            new = self._forked(group, one, place, marker)
            if new:
                forks, frontier = forks + new, place
            if not group.open:
                return forks
        if frontier == math.inf:  # all have ended
            for row in group.held:
                self.session.resume(row)
            group.open = False
        return forks

    def _see(self, one: _Row) -> None:
        """Reads a row, and takes down the places that lie in what is new of it."""
        if one.known == math.inf:
            return
        one.rollout = rollout = self.session.rollout(one.row)
        waits = isinstance(self.session, ToolSession) and self.session.is_waiting(one.row)
        goes_on = rollout.finish_reason is None or waits
        one.known = max(0, len(rollout) - UNSURE) if goes_on else math.inf
        if rollout.finish_reason != "error":
            self._search(one, rollout, int(min(one.known, len(rollout))))

    def _search(self, one: _Row, rollout: Rollout, known: int) -> None:
        """Takes down the places in what is known of a row since the last search; they lie between two tokens."""
        if known <= one.searched:
            return
        found: dict[int, str] = {}
        for marker in self.branching.at:
            for place in self._found(marker, one, rollout, known):
                found.setdefault(place, marker)
        one.places += [(place, found[place]) for place in sorted(found)]
        one.searched = known

    def _found(self, marker: str, one: _Row, rollout: Rollout, known: int) -> Iterator[int]:
        sampled = rollout.sampled
        if marker not in self._texts:
            for place in range(max(one.begin + 1, one.searched), known):
                if sampled[place] and not sampled[place - 1]:
                    yield place
            return
        # The last known token is left for later: there is no place behind it yet.
        tokens, searched = np.array(rollout.token_ids[: known - 1]), max(0, one.searched - 1)
        floor = one.floor.get(marker, one.begin)
        while (end := self._texts[marker].cut(0, tokens, searched, floor)) is not None:
            searched = floor = end[0]
            if sampled[searched - 1] and sampled[searched]:
                yield searched
        one.floor[marker] = floor

    def _forked(self, group: _Group, one: _Row, place: int, marker: str) -> list[int]:
        """Throws the coin of a place; the new rows."""
        assert one.rollout is not None
        now, initial = (self._entropy(one.rollout, start) for start in (place, 0))
        if now is None or initial is None:
            return []
        self.places += 1
        chance = branch_probability(now, initial, base=self.branching.base, weight=self.branching.weight)
        coin = uniform(torch.tensor([one.key]), torch.tensor([place]), COIN).item()
        if coin >= chance:
            return []
        copies = min(self.branching.beam - 1, len(group.held))
        rows = self.session.fork(one.row, copies, at=place)
        for row in rows:
            group.rows.append(_Row(row, fork_key(one.key, one.forks), begin=place, searched=place))
            one.forks += 1
            self._group_of[row] = group
            group.held.pop()
        group.forks += copies
        group.open = bool(group.held)
        self.branches.append(Branch(one.row, place, marker, now, initial, chance, copies))
        return rows

    def _entropy(self, rollout: Rollout, start: int) -> float | None:
        """Mean H / ln V over the window's tokens that were sampled; None where there is none."""
        window = slice(start, start + self.branching.window)
        values = rollout.entropy[window][rollout.sampled[window]]
        return normalised_entropy(float(values.double().mean()), self._vocabulary) if len(values) else None

    @property
    def rows(self) -> list[int]:
        """All rows in the order of the groups: those that began at once, those that filled up, the forks."""
        found: list[int] = []
        for group in self._groups:
            begun = [one.row for one in group.rows[: len(group.rows) - group.forks]]
            found += [*begun, *group.held, *(one.row for one in group.rows[len(begun) :])]
        return found
