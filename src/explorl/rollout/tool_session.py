"""`ToolSession`: rows that call a tool, with the caller in between; see `explorl.rollout.tool_use`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import TYPE_CHECKING, Self
from weakref import WeakKeyDictionary

import torch

from explorl.rollout.engine import Engine
from explorl.rollout.requests import Prompt
from explorl.rollout.rollouts import Rollout, ToolCall
from explorl.rollout.sampling import SamplingParams
from explorl.rollout.sampling.constraints import spread
from explorl.rollout.session import plain_tokens
from explorl.rollout.tool_listener import Listener, processors, processors_left
from explorl.rollout.tool_spans import LONGEST_CLOSING, opened_by
from explorl.rollout.tools import check_stops, find_call, output_block
from explorl.sandbox.interpreter import Call, CellResult, Interpreter
from explorl.sandbox.interpreter_pool import InterpreterPool

if TYPE_CHECKING:
    from explorl.rollout.tool_use import ToolUse

STEPS = 8
"""Tokens per row between two looks at calls that are running: rows whose outputs came go on together, as computing one
output costs nearly as much time as computing several."""
_SHARE = 4
"""Where no row goes on: of the rows that wait, the part of one in so many that is waited for before a GPU samples…"""
_NEXT, _BUSY = 0.02, 0.25
"""… as long as one output follows the other in so many seconds; the second while there are more calls than processors,
which are then busy anyway."""
_WAIT = 0.05
"""Seconds to wait for a call where nothing else is to be done, before looking again."""


_SHARES: WeakKeyDictionary[Engine, float] = WeakKeyDictionary()
"""Of the rows that might have called in an engine's last session, the part that did."""


@dataclass(eq=False)
class _Row:
    """A rollout in the making."""

    row: int
    """Where it is in the engine's session."""
    limit: int
    """Most tokens."""
    allowed: int
    """Calls that it may make."""
    opened: str = ""
    """The end of its prompt, where that has opened a call."""
    calls: list[ToolCall] = field(default_factory=list)
    interpreter: Interpreter | None = None
    replay: list[str] = field(default_factory=list)
    """Code that makes the variables it had when it was forked; run before its first call."""
    parent: int | None = None
    forked_at: int | None = None
    ended: bool = False

    @property
    def left(self) -> int:
        return self.allowed - sum(call.status != "refused" for call in self.calls)

    @property
    def behind(self) -> int:
        """Tokens in which no call is looked for: those up to the end of the last output."""
        return self.calls[-1].end if self.calls else 0


@dataclass(frozen=True)
class _Stop:
    """Where a row stops to call."""

    source: str
    keep: int
    """Tokens of the row that stay."""
    text: str
    """Its text up to the end of the call, and the white space behind it."""
    missing: str
    """What these tokens do not say of it."""


class ToolSession:
    """Rows that call a tool, with the caller in between, as in `explorl.rollout.session`.

    Rows are numbered in the order of the requests, and forks behind them.
    """

    def __init__(
        self,
        engine: Engine,
        prompts: Sequence[Prompt],
        n: int,
        params: SamplingParams | None,
        tools: ToolUse,
        *,
        uses: Sequence[int] | None = None,
        pool: InterpreterPool | None = None,
    ) -> None:
        tools.check(engine.tokenizer)
        params = params or SamplingParams()
        self.engine, self.tool = engine, tools.tool
        self.seed = params.seed if params.seed is not None else int(torch.randint(2**62, ()).item())
        allowed = tools.calls(uses, len(prompts) * n)
        own = spread("stop", params.stop, len(prompts), n)
        check_stops({text for texts in own for text in texts}, self.tool)
        stops = [[*texts, self.tool.fence.stop] if calls else texts for texts, calls in zip(own, allowed, strict=True)]
        with ExitStack() as closing:
            self._pool = closing.enter_context(tools.pool()) if pool is None else pool
            self._listener = closing.enter_context(Listener(self._pool))
            self._session = closing.enter_context(engine.open(prompts, n, replace(params, stop=stops, seed=self.seed)))
            self._closing = closing.pop_all()
        self.prompt_ids = self._session.prompt_ids
        limits = self._limits(params, n)
        asked = [tuple(ids) for ids in self.prompt_ids]
        opened = {ids: opened_by(ids, engine.tokenizer, self.tool) for ids in set(asked)}
        self._rows = [
            _Row(row, limit, calls, opened[asked[row // n]])
            for row, (limit, calls) in enumerate(zip(limits, allowed, strict=True))
        ]
        self._waiting: dict[int, tuple[_Stop, Call]] = {}
        """By row: calls that run."""
        self._ended: list[int] = []
        """Rows that have ended since somebody asked."""
        self._looked = 0
        """`Session.steps` when the calls were last looked at."""
        self._callers = 0
        """Interpreters that were opened."""
        self._on_cpu = next(engine.model.parameters()).device.type == "cpu"
        self._share = _SHARES.get(engine, 0.0)
        self._expect()
        self._listener.wanted.set()

    def _limits(self, params: SamplingParams, n: int) -> list[int]:
        """Most tokens of each row."""
        asked, context = params.rows(len(self.prompt_ids), n)["max_tokens"].tolist(), self.engine.context()
        if context is None:
            return [int(limit) for limit in asked]
        return [min(int(limit), context - len(self.prompt_ids[row // n])) for row, limit in enumerate(asked)]

    @property
    def running(self) -> bool:
        """Whether there is a row that goes on or waits for a call."""
        return bool(self._waiting) or self._session.running

    def run(self) -> None:
        """Samples until every row has ended."""
        self._pass(None)
        while self.running:
            self._pass(None, same_weights=True)

    def step(self, tokens: int | None = None) -> list[Rollout]:
        """Samples until a row has ended, calls and all, or up to so many tokens per row; what has ended."""
        self._pass(tokens)
        while not self._ended and tokens is None and self.running:
            self._pass(None, same_weights=True)
        ended, self._ended = self._ended, []
        return [self.rollout(index) for index in ended]

    def rollout(self, index: int) -> Rollout:
        """A row as it stands."""
        row = self._rows[index]
        return replace(
            self._session.rollout(row.row),
            request=index,
            calls=tuple(row.calls),
            parent=row.parent,
            forked_at=row.forked_at,
        )

    def rollouts(self) -> list[Rollout]:
        """All rows as they stand."""
        return [self.rollout(index) for index in range(len(self._rows))]

    def calls(self, index: int) -> tuple[ToolCall, ...]:
        """Calls of a row that have their output."""
        return tuple(self._rows[index].calls)

    def is_waiting(self, index: int) -> bool:
        """Whether a row that has stopped may go on: it waits for a call, or nobody has looked for one yet."""
        return index in self._waiting or not self._rows[index].ended

    def fork(self, index: int, n: int = 1, at: int | None = None) -> list[int]:
        """As `Session.fork`. A fork has the calls up to there, and runs them again before its own first one.

        What they drew at random, or found out about time, may be different then.
        """
        row = self._rows[index]
        if index in self._waiting and (at is None or at > self._waiting[index][0].keep):
            raise ValueError(f"row {index} waits for a call; fork it at {self._waiting[index][0].keep} tokens or fewer")
        calls = [call for call in row.calls if at is None or call.begin < at]
        if calls and at is not None and at < calls[-1].end:
            raise ValueError(f"at is {at}, inside an output of row {index}; use {calls[-1].begin} or {calls[-1].end}")
        length = len(self._session.rollout(row.row)) if at is None else at
        rows = self._session.fork(row.row, n, at, row.limit)
        forks = list(range(len(self._rows), len(self._rows) + n))
        for other in rows:
            replay = _makes_variables(calls)
            self._rows.append(_Row(other, row.limit, row.allowed, row.opened, [*calls], None, replay, index, length))
        return forks

    def cancel(self, index: int) -> None:
        """Gives a row up, and its call with it."""
        self._waiting.pop(index, None)
        self._session.cancel(self._rows[index].row)
        self._end(index)
        self._ended = [other for other in self._ended if other != index]

    def resume(self, index: int) -> None:
        """Takes back `cancel` of a row that had not begun."""
        self._session.resume(self._rows[index].row)
        self._rows[index].ended = False

    def look(self) -> None:
        """As `Session.look`."""
        self._session.look()

    def close(self) -> None:
        """Ends all interpreters and the engine's session. What was sampled stays readable."""
        if may := sum(row.allowed > 0 for row in self._rows):
            _SHARES[self.engine] = min(1.0, self._callers / may)
        for row in self._rows:
            if row.interpreter is not None:
                row.interpreter.close()
        self._waiting.clear()
        with suppress(ValueError):  # somebody has closed it
            self._pool.expect(0)
        self._closing.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # One pass: sample, look for calls, take what calls have said

    def _pass(self, tokens: int | None, same_weights: bool = False) -> None:
        most = tokens
        busy = len(self._waiting) or int(self._pool.starting)
        if busy:
            most = max(1, min(tokens or STEPS, self._looked + STEPS - self._session.steps))
        with processors_left(busy):
            stopped = self._session.step(most, same_weights=same_weights)
        index = {row.row: index for index, row in enumerate(self._rows)}
        callers = self._callers
        for rollout in stopped:
            if rollout.request in index:
                self._look(index[rollout.request], rollout)
        if self._callers > callers:
            self._expect()
        if self._waiting and not self._session.running:
            self._await()
        if not self._session.running or self._session.steps >= self._looked + STEPS:
            self._take()

    def _expect(self) -> None:
        """Has interpreters start ahead for rows that will probably call.

        That is as many more as have called so far, or as many as in the engine's last session: rows of a policy that
        does not call shall cost nothing.
        """
        may = [row for row in self._rows if row.allowed]
        before = math.ceil(self._share * len(may)) - self._callers
        silent = sum(row.interpreter is None and not row.ended for row in may)
        self._pool.expect(min(silent, max(before, self._callers)))

    def _await(self) -> None:
        """Waits for outputs, as no row goes on: for the first, and for others that follow it quickly.

        Where calls need the processors that would sample, nothing is gained by sampling a few rows meanwhile, and a
        step of few costs nearly as much as a step of many: there all are waited for.
        """
        self._listener.wanted.clear()
        if not self._done():
            self._pool.poll(_WAIT)
        enough = len(self._waiting) if self._on_cpu else len(self._waiting) // _SHARE
        while 0 < (done := len(self._done())) < enough:
            if not self._pool.poll(_BUSY if len(self._waiting) - done > processors() else _NEXT):
                break
        self._listener.wanted.set()

    def _take(self) -> None:
        """Lets rows go on whose calls are done."""
        self._looked = self._session.steps
        self._pool.poll(0.0)  # the listener may be behind, or have failed
        for place in self._done():
            stop, call = self._waiting.pop(place)
            self._go_on(place, stop, call.result())
        if not self._waiting and not self._pool.starting:
            self._listener.wanted.clear()

    def _done(self) -> list[int]:
        """Rows whose calls are done."""
        return [place for place, (_, call) in self._waiting.items() if call.done]

    def _look(self, index: int, rollout: Rollout) -> None:
        """A row that has stopped calls, goes on or has ended.

        Tokens may part the text that ends a call: of four backticks, three may come first. Such a row goes on by one
        token at a time, so that nothing is sampled behind a call that nobody has seen.
        """
        row, mark = self._rows[index], self.tool.fence.stop
        if row.ended:
            return
        final = rollout.finish_reason == "error" or not row.allowed
        before = rollout.token_ids if rollout.stop in (None, mark) else rollout.token_ids[:-1]  # a stop of the caller's
        stop = None if final else self._called(row, before)
        if stop is not None and stop.keep < row.limit:
            self._call(index, stop)
            return
        watched = rollout.finish_reason == "length" and len(rollout) < row.limit
        if (rollout.stop == mark and not final) or watched:
            limit = len(rollout) + 1 if self._may_close(row, rollout.token_ids) else row.limit
            self._session.extend(row.row, [], min(limit, row.limit))
            if len(rollout) < row.limit:
                return
        self._end(index)

    def _may_close(self, row: _Row, tokens: list[int]) -> bool:
        """Whether a call is open that more of the text which every call ends with would close here."""
        text = row.opened + self._text(tokens) + LONGEST_CLOSING * self.tool.fence.stop
        return find_call(text, self.tool, self._start(row, tokens)) is not None

    def _start(self, row: _Row, tokens: list[int]) -> int:
        """Where in a row's text, behind what its prompt has opened, calls are looked for."""
        return len(row.opened + self._text(tokens[: row.behind])) if row.behind else 0

    def _called(self, row: _Row, tokens: list[int]) -> _Stop | None:
        """The first call of a row, if it is complete, and how many tokens there are up to its end."""
        start, count, text = self._start(row, tokens), len(tokens), row.opened + self._text(tokens)
        found = find_call(text, self.tool, start)
        if found is None:
            return None
        while find_call(shorter := row.opened + self._text(tokens[: count - 1]), self.tool, start) is not None:
            count, text = count - 1, shorter
        if not text[found.end :].strip():
            return _Stop(found.source, count, text, "")
        said = text[: found.end]
        texts = ((k, row.opened + self._text(tokens[:k])) for k in range(count - 1, -1, -1))
        keep, kept = next((k, text) for k, text in texts if said.startswith(text))
        return _Stop(found.source, keep, said, said[len(kept) :])

    def _call(self, index: int, stop: _Stop) -> None:
        row = self._rows[index]
        if row.left <= 0:
            refused = CellResult("refused", f"no calls are left: {row.allowed} were allowed\n")
            self._go_on(index, stop, refused)
            return
        if row.interpreter is None:
            row.interpreter = self._pool.open()
            self._callers += 1
            row.interpreter.replay(row.replay)
        self._waiting[index] = stop, row.interpreter.submit(stop.source)
        self._listener.wanted.set()

    def _go_on(self, index: int, stop: _Stop, result: CellResult) -> None:
        """Appends a call's output to a row and lets it go on, as far as there is room."""
        row = self._rows[index]
        block, blank = (output_block(r, self.tool, stop.text) for r in (result, CellResult("ok", "")))
        tokens = plain_tokens(self.engine.tokenizer, stop.missing + block)[: row.limit - stop.keep]
        if stop.keep < len(self._session.rollout(row.row)):
            (shorter,) = self._session.fork(row.row, at=stop.keep, max_tokens=row.limit)
            self._session.cancel(row.row)
            row.row = shorter
        self._session.extend(row.row, tokens, row.limit)
        end = stop.keep + len(tokens)
        row.calls.append(
            ToolCall(stop.source, result.status, result.text, stop.keep, end, result.seconds, stop.missing + blank)
        )
        if end >= row.limit:
            self._end(index)

    def _end(self, index: int) -> None:
        row = self._rows[index]
        if not row.ended:
            self._ended.append(index)
        row.ended = True
        if row.interpreter is not None:
            row.interpreter.close()
            row.interpreter = None

    def _text(self, tokens: Sequence[int]) -> str:
        return str(self.engine.tokenizer.decode(tokens, skip_special_tokens=True))


def _makes_variables(calls: Sequence[ToolCall]) -> list[str]:
    """The code that made the variables there are after these calls."""
    sources: list[str] = []
    for call in calls:
        if call.status in ("ok", "error"):
            sources.append(call.source)
        elif call.status != "refused":
            sources.clear()
    return sources
