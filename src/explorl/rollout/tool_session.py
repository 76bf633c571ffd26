"""`ToolSession`: sampling of sequences that call a tool, which the caller can interrupt; see
`explorl.rollout.tool_use`."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from threading import Event, Thread
from typing import TYPE_CHECKING, Self
from weakref import WeakKeyDictionary

import torch

from explorl.modeling.precision import default_torch_settings
from explorl.rollout.engine import Engine
from explorl.rollout.requests import Prompt
from explorl.rollout.rollouts import Rollout, ToolCall
from explorl.rollout.sampling import SamplingParams
from explorl.rollout.sampling.params import spread
from explorl.rollout.session import Session, plain_tokens
from explorl.rollout.tools import LONGEST_CLOSING, check_stops, find_call, open_call_in_prompt, output_block
from explorl.sandbox.interpreter import Call, CellResult, Interpreter
from explorl.sandbox.interpreter_pool import InterpreterPool

if TYPE_CHECKING:
    from explorl.rollout.tool_use import ToolUse

STEPS = 8
"""Tokens per sequence between two checks of running calls. Sequences whose outputs have come continue together, as
computing one output takes nearly as long as computing several."""
_GPU_DIVISOR = 4
"""If no sequence can be decoded on a GPU, wait for one in this many of the waiting sequences before sampling…"""
_NEXT_OUTPUT, _NEXT_OUTPUT_BUSY = 0.02, 0.25
"""… as long as outputs follow each other within these seconds. The second applies while there are more calls than
processors, which are then busy anyway."""
_POLL = 0.05
"""Seconds to wait for a call before checking again, if there is nothing else to do."""
_REST = 0.005
"""Seconds for which the listener leaves Python's interpreter lock to the sampling thread."""


_CALLING_SHARES: WeakKeyDictionary[Engine, float] = WeakKeyDictionary()
"""Share of the sequences with allowed calls that did call in an engine's last session."""


@dataclass(eq=False)
class _Transcript:
    """A rollout in flight with its calls."""

    limit: int
    """Most tokens."""
    allowed: int
    """Number of calls that it may make."""
    open_call: str = ""
    """The end of its prompt, if that has opened a call."""
    calls: list[ToolCall] = field(default_factory=list)
    interpreter: Interpreter | None = None
    replay: list[str] = field(default_factory=list)
    """Code that restores the variables it had when it was forked; run before its first call."""
    ended: bool = False

    @property
    def calls_left(self) -> int:
        return self.allowed - sum(call.status != "refused" for call in self.calls)

    @property
    def search_start(self) -> int:
        """Number of tokens in which no call is searched for: those up to the end of the last output."""
        return self.calls[-1].end if self.calls else 0


@dataclass(frozen=True)
class _CallStop:
    """Where a sequence stops to make a call."""

    source: str
    keep: int
    """Number of tokens of the sequence that are kept."""
    text: str
    """Its text up to the end of the call, and the white space after it."""
    missing: str
    """The end of that text which the kept tokens do not contain."""


class ToolSession(Session):
    """A session whose sequences call a tool. `step` returns a sequence when it has ended with all its calls."""

    @default_torch_settings()
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
        self.tool = tools.tool
        self.seed = params.seed if params.seed is not None else int(torch.randint(2**62, ()).item())
        allowed = tools.calls(uses, len(prompts) * n)
        user_stops = spread("stop", params.stop, len(prompts), n)
        check_stops({text for texts in user_stops for text in texts}, self.tool)
        stops = [
            [*texts, self.tool.fence.stop] if calls else texts for texts, calls in zip(user_stops, allowed, strict=True)
        ]
        params = replace(params, stop=stops, seed=self.seed)
        requests = engine.requests(prompts, n, params)
        prompt_keys = [tuple(ids) for ids in requests.prompts]
        open_calls = {ids: open_call_in_prompt(ids, engine.tokenizer, self.tool) for ids in set(prompt_keys)}
        self._transcripts = [
            _Transcript(limit, calls, open_calls[prompt_keys[number // n]])
            for number, (limit, calls) in enumerate(zip(requests.rows["max_tokens"].tolist(), allowed, strict=True))
        ]
        self._waiting: dict[int, tuple[_CallStop, Call]] = {}
        """Running calls by sequence."""
        self._completed: list[int] = []
        """Sequences that have ended with all their calls and that `step` has not returned yet."""
        self._last_check = 0
        """`Session.steps` when the calls were last checked."""
        self._callers = 0
        """Number of interpreters that were opened."""
        self._on_cpu = next(engine.model.parameters()).device.type == "cpu"
        self._calling_share = _CALLING_SHARES.get(engine, 0.0)
        with ExitStack() as closing:
            self._pool = closing.enter_context(tools.pool()) if pool is None else pool
            self._listener = closing.enter_context(PoolListener(self._pool))
            super().__init__(engine, requests, params)
            self._closing = closing.pop_all()
        self._prestart()
        self._listener.wanted.set()

    @property
    def running(self) -> bool:
        """True if a sequence is unfinished or waits for a call."""
        return bool(self._waiting) or super().running

    def run(self) -> None:
        """Sample until every sequence has ended."""
        self._advance(None)
        while self.running:
            self._advance(None, same_weights=True)

    def step(self, tokens: int | None = None, *, same_weights: bool = False) -> list[Rollout]:
        """Sample until a sequence has ended with all its calls, or that many tokens per sequence; return what ended."""
        self._advance(tokens, same_weights)
        while not self._completed and tokens is None and self.running:
            self._advance(None, same_weights=True)
        ended, self._completed = self._completed, []
        return [self.rollout(number) for number in ended]

    def rollout(self, number: int) -> Rollout:
        """Return a sequence as it is now."""
        return replace(super().rollout(number), calls=tuple(self._transcripts[number].calls))

    def rollouts(self) -> list[Rollout]:
        """Return all sequences as they are now."""
        return [self.rollout(number) for number in range(len(self._transcripts))]

    def is_waiting(self, number: int) -> bool:
        """Return whether a stopped sequence may be continued: it waits for a call, or was not searched for one yet."""
        return number in self._waiting or not self._transcripts[number].ended

    def fork(self, number: int, n: int = 1, at: int | None = None, max_tokens: int | None = None) -> list[int]:
        """Fork a sequence as `Session.fork` does.

        A fork has the calls up to that position, and runs them again before its own first call. If they used random
        numbers or the clock, the result may differ.
        """
        transcript = self._transcripts[number]
        if number in self._waiting and (at is None or at > self._waiting[number][0].keep):
            keep = self._waiting[number][0].keep
            raise ValueError(f"sequence {number} waits for a call; fork it at {keep} tokens or fewer")
        calls = [call for call in transcript.calls if at is None or call.begin < at]
        if calls and at is not None and at < calls[-1].end:
            good = f"{calls[-1].begin} or {calls[-1].end}"
            raise ValueError(f"at is {at}, inside an output of sequence {number}; use {good}")
        limit = transcript.limit if max_tokens is None else max_tokens
        numbers = super().fork(number, n, at, limit)
        replay = _variable_sources(calls)
        for _ in numbers:
            self._transcripts.append(
                _Transcript(limit, transcript.allowed, transcript.open_call, calls=[*calls], replay=replay)
            )
        return numbers

    def cancel(self, number: int) -> None:
        """Cancel a sequence together with its running call."""
        self._waiting.pop(number, None)
        super().cancel(number)
        self._end_row(number)
        self._completed = [ended for ended in self._completed if ended != number]

    def resume(self, number: int) -> None:
        """Undo `cancel` of a sequence that had not begun."""
        super().resume(number)
        self._transcripts[number].ended = False

    def close(self, why: str = "it was closed") -> None:
        """Close all interpreters and the session. What was sampled stays readable."""
        if count := sum(transcript.allowed > 0 for transcript in self._transcripts):
            _CALLING_SHARES[self.engine] = min(1.0, self._callers / count)
        for transcript in self._transcripts:
            if transcript.interpreter is not None:
                transcript.interpreter.close()
        self._waiting.clear()
        with suppress(ValueError):  # the pool has been closed
            self._pool.expect(0)
        try:
            super().close(why)
        finally:
            self._closing.close()

    # One round: sample, find calls, append the outputs of finished calls

    def _advance(self, tokens: int | None, same_weights: bool = False) -> None:
        max_tokens = tokens
        busy = len(self._waiting) or int(self._pool.starting)
        if busy:
            max_tokens = max(1, min(tokens or STEPS, self._last_check + STEPS - self.steps))
        with leave_processors(busy):
            stopped = super().step(max_tokens, same_weights=same_weights)
        callers = self._callers
        for rollout in stopped:
            self._handle_stop(rollout)
        if self._callers > callers:
            self._prestart()
        if self._waiting and not super().running:
            self._wait_for_outputs()
        if not super().running or self.steps >= self._last_check + STEPS:
            self._append_outputs()

    def _prestart(self) -> None:
        """Start interpreters in advance for sequences that will probably call.

        Their number is that of the calls so far, or that of the engine's last session, so that sequences of a policy
        that does not call cost nothing.
        """
        may_call = [transcript for transcript in self._transcripts if transcript.allowed]
        expected = math.ceil(self._calling_share * len(may_call)) - self._callers
        silent = sum(transcript.interpreter is None and not transcript.ended for transcript in may_call)
        self._pool.expect(min(silent, max(expected, self._callers)))

    def _wait_for_outputs(self) -> None:
        """Wait for the first output, and for others that follow it quickly, when no sequence can be decoded.

        On a CPU all outputs are waited for: calls need the processors that would sample, and a step of a few sequences
        takes nearly as long as a step of many.
        """
        self._listener.wanted.clear()
        if not self._done():
            self._pool.poll(_POLL)
        enough = len(self._waiting) if self._on_cpu else len(self._waiting) // _GPU_DIVISOR
        while 0 < (done := len(self._done())) < enough:
            if not self._pool.poll(_NEXT_OUTPUT_BUSY if len(self._waiting) - done > processors() else _NEXT_OUTPUT):
                break
        self._listener.wanted.set()

    def _append_outputs(self) -> None:
        """Continue the sequences whose calls are done."""
        self._last_check = self.steps
        self._pool.poll(0.0)  # the listener may be late, or have failed
        for number in self._done():
            stop, call = self._waiting.pop(number)
            self._append_output(number, stop, call.result())
        if not self._waiting and not self._pool.starting:
            self._listener.wanted.clear()

    def _done(self) -> list[int]:
        """Return the sequences whose calls are done."""
        return [number for number, (_, call) in self._waiting.items() if call.done]

    def _handle_stop(self, rollout: Rollout) -> None:
        """Run the call of a sequence that has stopped, continue the sequence, or end it.

        The text that ends a call may be split over tokens: of four backticks, three may come first. Such a sequence is
        continued by one token at a time, so that nothing is sampled after a call that has not been noticed.
        """
        number, mark = rollout.request, self.tool.fence.stop
        transcript = self._transcripts[number]
        if transcript.ended:
            return
        final = rollout.finish_reason == "error" or not transcript.allowed
        # A stop string of the caller's is not part of a call.
        tokens = rollout.token_ids if rollout.stop in (None, mark) else rollout.token_ids[:-1]
        stop = None if final else self._find_call(transcript, tokens)
        if stop is not None and stop.keep < transcript.limit:
            self._run_call(number, stop)
            return
        single_step = rollout.finish_reason == "length" and len(rollout) < transcript.limit
        if (rollout.stop == mark and not final) or single_step:
            limit = len(rollout) + 1 if self._may_close(transcript, rollout.token_ids) else transcript.limit
            self.extend(number, [], min(limit, transcript.limit))
            if len(rollout) < transcript.limit:
                return
        self._end_row(number)

    def _may_close(self, transcript: _Transcript, tokens: list[int]) -> bool:
        """Return whether more of the text that every call ends with would close an open call here."""
        text = transcript.open_call + self._decode(tokens) + LONGEST_CLOSING * self.tool.fence.stop
        return find_call(text, self.tool, self._start(transcript, tokens)) is not None

    def _start(self, transcript: _Transcript, tokens: list[int]) -> int:
        """Return from where in a sequence's text, after the call that its prompt has opened, calls are searched for."""
        if not transcript.search_start:
            return 0
        return len(transcript.open_call + self._decode(tokens[: transcript.search_start]))

    def _find_call(self, transcript: _Transcript, tokens: list[int]) -> _CallStop | None:
        """Return the first complete call of a sequence and how many tokens there are up to its end, or None."""

        def text_of(length: int) -> str:
            return transcript.open_call + self._decode(tokens[:length])

        start, count, text = self._start(transcript, tokens), len(tokens), text_of(len(tokens))
        call = find_call(text, self.tool, start)
        if call is None:
            return None
        while find_call(shorter := text_of(count - 1), self.tool, start) is not None:
            count, text = count - 1, shorter
        if not text[call.end :].strip():
            return _CallStop(call.source, count, text, "")
        call_text = text[: call.end]
        keep, kept_text = next(
            (length, prefix) for length in range(count - 1, -1, -1) if call_text.startswith(prefix := text_of(length))
        )
        return _CallStop(call.source, keep, call_text, call_text[len(kept_text) :])

    def _run_call(self, number: int, stop: _CallStop) -> None:
        """Start a call, or append a refusal if the sequence has no calls left."""
        transcript = self._transcripts[number]
        if transcript.calls_left <= 0:
            refused = CellResult("refused", f"no calls are left: {transcript.allowed} were allowed\n")
            self._append_output(number, stop, refused)
            return
        if transcript.interpreter is None:
            transcript.interpreter = self._pool.open()
            self._callers += 1
            transcript.interpreter.replay(transcript.replay)
        self._waiting[number] = stop, transcript.interpreter.submit(stop.source)
        self._listener.wanted.set()

    def _append_output(self, number: int, stop: _CallStop, result: CellResult) -> None:
        """Append a call's output to a sequence and continue the sequence, as far as its limit allows."""
        transcript = self._transcripts[number]
        block, empty = (output_block(r, self.tool, stop.text) for r in (result, CellResult("ok", "")))
        room = transcript.limit - stop.keep
        tokens = plain_tokens(self.engine.tokenizer, stop.missing + block)[:room]
        self.extend(number, tokens, transcript.limit, at=stop.keep)
        end = stop.keep + len(tokens)
        transcript.calls.append(
            ToolCall(stop.source, result.status, result.text, stop.keep, end, result.seconds, stop.missing + empty)
        )
        if end >= transcript.limit:
            self._end_row(number)

    def _end_row(self, number: int) -> None:
        transcript = self._transcripts[number]
        if not transcript.ended:
            self._completed.append(number)
        transcript.ended = True
        if transcript.interpreter is not None:
            transcript.interpreter.close()
            transcript.interpreter = None

    def _decode(self, tokens: Sequence[int]) -> str:
        return str(self.engine.tokenizer.decode(tokens, skip_special_tokens=True))


def _variable_sources(calls: Sequence[ToolCall]) -> list[str]:
    """Return the code of the calls whose variables exist after these calls."""
    sources: list[str] = []
    for call in calls:
        if call.status in ("ok", "error"):
            sources.append(call.source)
        elif call.status != "refused":
            sources.clear()
    return sources


def processors() -> int:
    """Return the number of processors that this process may use."""
    return len(os.sched_getaffinity(0))


@contextmanager
def leave_processors(calls: int) -> Iterator[None]:
    """Leave a processor to each running call, up to half of those that torch computes on.

    Torch's threads wait for each other in busy loops: if a call delays one of them, the others waste the time.
    """
    threads = torch.get_num_threads()
    if not calls or threads == 1:
        yield
        return
    torch.set_num_threads(threads - min(calls, threads // 2))
    try:
        yield
    finally:
        torch.set_num_threads(threads)


class PoolListener:
    """A thread that polls a pool, which starts interpreters and passes on calls and results, while the caller samples.

    If polling fails here, it fails in the session too, which polls as well and reports the error.
    """

    def __init__(self, pool: InterpreterPool) -> None:
        self._pool, self.wanted, self._stop = pool, Event(), Event()
        self._thread = Thread(target=self._listen, name="explorl tool calls", daemon=True)

    def _listen(self) -> None:
        while not self._stop.is_set():
            self.wanted.wait()
            try:
                self._pool.poll(0.05)
            except (ValueError, OSError):  # the pool was closed
                return
            self._stop.wait(_REST)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self.wanted.set()
        self._thread.join()
