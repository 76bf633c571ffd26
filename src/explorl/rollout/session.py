"""`Session`: sampling that the caller can interrupt, to continue sequences after a tool call, to fork or cancel them.

    with engine.open(prompts, n=4, params=SamplingParams(stop="```output", max_tokens=512)) as session:
        while session.running:
            for rollout in session.step():
                if rollout.finish_reason == "stop" and wants_a_tool(rollout.text):
                    session.extend(rollout.request, run_tool(rollout.text))
        rollouts = session.finished()

A sequence is identified by a number, the `Rollout.request` of what the session returns. Between two calls no sequence
is decoded, so each of them can be extended, forked or cancelled whether it has ended or not. The keys and values of a
sequence are kept while there is memory for them; otherwise they are computed again from the sequence's tokens, with the
same result.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Self

import torch

from explorl.modeling.attention import model_lock, sampling_mode
from explorl.modeling.gpu import on
from explorl.modeling.precision import default_torch_settings
from explorl.rollout.memory_plan import MemoryNeeds
from explorl.rollout.requests import STATS, PromptTokens, Requests, SequenceState, continuation_tokens
from explorl.rollout.rollouts import Rollout
from explorl.rollout.sampling import Active, SamplingParams
from explorl.rollout.sampling.params import token_list
from explorl.rollout.sampling.rng import fork_key, request_keys
from explorl.rollout.scheduler import Scheduler

if TYPE_CHECKING:
    from explorl.rollout.engine import Engine

logger = logging.getLogger(__name__)


def plain_tokens(tokenizer: Any, text: str) -> list[int]:
    """Return the tokens of untrusted text that continues another text; none of them is a special token."""
    return continuation_tokens(tokenizer, text, split_special_tokens=True)


class Session:
    """Sequences that are being sampled; created by `Engine.open`.

    An engine has one session at a time: the next one, and the next `Engine.generate`, close it. The weights must not
    change while it is open.
    """

    def __init__(
        self,
        engine: Engine,
        requests: Requests,
        params: SamplingParams,
        *,
        keep: bool = True,
        on_finish: Callable[[Rollout], object] | None = None,
    ) -> None:
        self.engine, self._requests, self._on_finish = engine, requests, on_finish
        self._scheduler: Scheduler | None = None
        self._keep = keep
        self._active = Active.of(params, requests.rows)
        self.prompt_ids = requests.prompts
        """Tokens of each prompt, by `Rollout.prompt_index`."""
        distinct = {tuple(ids): PromptTokens(tuple(ids)) for ids in requests.prompts}
        prompts = [distinct[tuple(ids)] for ids in requests.prompts]
        stat_types = {**STATS, "min_p_mass": torch.float32} if params.min_p_mass else STATS
        keys = request_keys(requests.seed, range(len(requests))).tolist()
        self._sequences = [
            SequenceState(number, prompts[number // requests.n], requests, number, key, limit, stat_types)
            for number, (key, limit) in enumerate(zip(keys, requests.rows["max_tokens"].tolist(), strict=True))
        ]
        self._ended: list[SequenceState] = []
        """Sequences that have ended and that `step` has not returned yet."""
        self._weights: Any = None
        self._stamp = object()
        """Identifies this session to the runner, which copies the weights once per session."""
        self._max_slots: int | None = None
        """Most sequences decoded together, once an allocation has failed."""
        self._closed = ""
        self.steps = 0
        """Steps decoded so far, each of up to one token per sequence."""
        self.sampling = False
        """True if `step` or `run` is running, as when ``on_finish`` is called."""
        engine.begin_session(self)

    # Sequences

    @default_torch_settings()
    def extend(
        self, number: int, tokens: str | Sequence[int], max_tokens: int | None = None, at: int | None = None
    ) -> None:
        """Append tokens that were not sampled, such as a tool's output, to a sequence, and continue it after them.

        Only the new tokens are computed. They have no statistics, and are False in `Rollout.sampled`. ``max_tokens`` is
        a new limit for the whole completion, forced tokens included; None keeps the sequence's limit. Without tokens
        the sequence is just continued, also after a stop string.

        ``at`` first removes the tokens after that many. What is then sampled has new random numbers, like a fork.

        Text is taken literally: ``<|im_end|>`` becomes the tokens of these characters. For special tokens give ids.
        """
        sequence = self._continuable(number)
        ids = self._tokens(number, tokens)
        self._read_back(sequence)
        kept = self._checked_position(sequence, at)
        limit = self._limit(sequence, kept + len(ids), max_tokens)
        if self._scheduler is not None:
            self._scheduler.remove(sequence)
        if kept < len(sequence.tokens):
            sequence.cut_back(kept)
        sequence.append_forced(ids)
        sequence.limit = limit
        self._enqueue([number])

    @default_torch_settings()
    def fork(self, number: int, n: int = 1, at: int | None = None, max_tokens: int | None = None) -> list[int]:
        """Return ``n`` new sequences that begin with a sequence's first ``at`` completion tokens (None: all so far).

        Each has its own random numbers, keyed by (seed, request, number of the fork), so the same calls give the same
        tokens whatever else is sampled. The shared tokens are computed once.
        """
        sequence = self._continuable(number)
        if n < 1:
            raise ValueError(f"n is {n}; ask for at least 1 fork")
        self._read_back(sequence)
        current, length = len(sequence.tokens), self._checked_position(sequence, at)
        limit = self._limit(sequence, length, max_tokens)
        kv, stats = self._shared_kv(sequence, length), sequence.stats(length)
        no_stop_spans = sequence.spans_without_stop(length)
        if length == current and sequence.stop is not None:
            no_stop_spans.append((length - 1, length))
        numbers = list(range(len(self._sequences), len(self._sequences) + n))
        for index in numbers:
            self._sequences.append(
                SequenceState(
                    index,
                    sequence.prompt,
                    sequence.requests,
                    sequence.request,
                    key=fork_key(sequence.key, sequence.forks),
                    limit=limit,
                    stat_types=sequence.stat_types,
                    tokens=sequence.tokens[:length],
                    stat_parts=[stats] if length else [],
                    no_stop_spans=list(no_stop_spans),
                    searched=length,
                    parent=number,
                    forked_at=length,
                    saved_kv=None if kv is None else kv.first(length, sequence.prompt.stored),
                )
            )
            sequence.forks += 1
        if kv is not None:
            kv.drop()
        self._enqueue(numbers)
        return numbers

    @default_torch_settings()
    def cancel(self, number: int) -> None:
        """Stop sampling a sequence and free its memory. Its tokens so far stay readable."""
        sequence = self._continuable(number)
        self._read_back(sequence)
        if self._scheduler is not None:
            self._scheduler.remove(sequence, keep=False)
            self._scheduler.remove_resting(sequence)
        sequence.cancelled = True
        sequence.discard_kv()

    @default_torch_settings()
    def resume(self, number: int) -> None:
        """Undo `cancel`: continue the sequence, computed again from its tokens."""
        self._check_open()
        sequence = self._sequence(number)
        if not sequence.cancelled:
            raise ValueError(
                f"sequence {number} was not cancelled; to continue one that has ended, use extend({number}, [])"
            )
        sequence.cancelled = False
        if sequence.reason is None:
            self._enqueue([number])

    @default_torch_settings()
    def read_back(self) -> None:
        """Copy what all sequences have sampled to the host at once, so that `rollout` does not wait for each."""
        if self._scheduler is not None:
            self._scheduler.read_back()

    @default_torch_settings()
    def rollout(self, number: int) -> Rollout:
        """Return a sequence as it is now; `Rollout.finish_reason` is None if it has not ended."""
        sequence = self._sequence(number)
        if not self._closed:
            self._read_back(sequence)
        return sequence.rollout(self.engine.tokenizer)

    # Sampling

    @property
    def running(self) -> bool:
        """True if a sequence is unfinished, or has ended without having been returned by `step`."""
        return not self._closed and (self._unfinished or any(not s.cancelled for s in self._ended))

    @property
    def _unfinished(self) -> bool:
        return not self._closed and any(s.reason is None and not s.cancelled for s in self._sequences)

    @default_torch_settings()
    def step(self, tokens: int | None = None, *, same_weights: bool = False) -> list[Rollout]:
        """Sample until a sequence ends, or that many tokens per sequence, and return the sequences that have ended.

        ``same_weights`` states that the model has not changed since the last step, so that it need not be checked.
        """
        self._check_open()
        if tokens is not None and tokens < 1:
            raise ValueError(f"tokens is {tokens}; use at least 1, or None to sample until a sequence ends")
        if not same_weights:
            self._check_weights()
        self._run(lambda done: bool(self._ended) or (tokens is not None and done >= tokens), tokens)
        ended, self._ended = self._ended, []
        return [sequence.rollout(self.engine.tokenizer) for sequence in ended if not sequence.cancelled]

    @default_torch_settings()
    def run(self) -> None:
        """Sample until every sequence has ended."""
        self._check_open()
        self._check_weights()
        self._run(lambda _: False, None, ahead=True)
        self._ended = []

    @default_torch_settings()
    def finished(self) -> list[Rollout]:
        """Return the sequences that have ended, in the order of their numbers, without cancelled ones."""
        return [s.rollout(self.engine.tokenizer) for s in self._sequences if s.reason is not None and not s.cancelled]

    @default_torch_settings()
    def close(self, why: str = "it was closed") -> None:
        """Return the session's memory to the engine. What was sampled stays readable."""
        if self._closed:
            return
        if self._scheduler is not None:
            self._scheduler.move_out(keep=False)
            for sequence in self._sequences:
                sequence.discard_kv()
            self._scheduler.memory.clean()
        self._closed, self._scheduler = why, None
        self.engine.on_session_closed(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self, enough: Callable[[int], bool], max_steps: int | None, ahead: bool = False) -> None:
        self.sampling = True
        try:
            # Without inference mode: tensors made in it could not be written to outside it.
            model = self.engine.model
            with model_lock(model), torch.inference_mode(False), on(next(model.parameters()).device):
                self._sample_until(enough, max_steps, ahead)
        finally:
            self.sampling = False

    def _sample_until(self, enough: Callable[[int], bool], max_steps: int | None, ahead: bool) -> None:
        done = 0
        while self._unfinished and not enough(done):
            try:
                scheduler = self._prepare_scheduler()
                with self.engine.weights(), sampling_mode(self.engine.model), scheduler.runner.fused():
                    plan = self.engine.plan
                    scheduler.runner.copy_weights(self._stamp, enabled=plan is not None and plan.weight_bytes > 0)
                    while scheduler.busy and not enough(done):
                        steps = scheduler.advance(None if max_steps is None else max_steps - done, ahead)
                        done += steps
                        self.steps += steps
            except BaseException as error:
                self._discard_device_state()
                if not self._halve_slots(error):
                    raise

    def _discard_device_state(self) -> None:
        """Discard the scheduler after an interruption, as the device may hold half of a step.

        Sequences are computed again from their tokens.
        """
        for sequence in self._sequences:
            sequence.slot, sequence.saved_kv = -1, None
        self._scheduler = None
        self.engine.discard_memory()

    def _halve_slots(self, error: BaseException) -> bool:
        """Use half the slots and half the memory after a failed allocation, once; return whether to try again."""
        plan = self.engine.plan
        out_of_memory = isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)
        if not out_of_memory or self._max_slots is not None or plan is None or plan.slots < 2:
            return False
        self._max_slots = plan.slots // 2
        logger.warning("memory ran out with %d sequences; continuing with %d", plan.slots, self._max_slots)
        return True

    def _prepare_scheduler(self) -> Scheduler:
        """Return the scheduler, with memory that is large enough for all unfinished sequences."""
        engine, live = self.engine, [s for s in self._sequences if s.reason is None and not s.cancelled]
        scheduler = self._scheduler
        needs = MemoryNeeds(
            requests=len(live),
            prompts=len({id(s.prompt) for s in live}),
            prompt_tokens=max(len(s.prompt.tokens) for s in live),
            tokens=max(s.limit for s in live),
        )
        max_slots = engine.most_slots() if self._max_slots is None else self._max_slots
        if scheduler is not None and scheduler.runner.plan.holds(scheduler.slots, max_slots, needs):
            return scheduler
        if scheduler is None:
            scheduler = Scheduler(self._requests, self._sequences, engine.tokenizer, self._keep, self._end)
            memory = None
            scheduler.enqueue(*live)
        else:
            needs = needs._replace(requests=max(needs.requests, 2 * scheduler.slots))
            scheduler.move_out()
            memory = scheduler.memory
        runner, slots = engine.prepare(self._active, needs, self._max_slots)
        scheduler.move_in(runner, slots, self._active, memory)
        self._scheduler = scheduler
        return scheduler

    def _enqueue(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            sequence = self._sequences[number]
            sequence.reason, sequence.stop, sequence.error = None, None, ""
            if sequence in self._ended:  # not returned yet
                self._ended.remove(sequence)
            if len(sequence.tokens) >= sequence.limit:
                sequence.reason = "length"
                if self._scheduler is not None:
                    self._scheduler.add_resting(sequence)
                self._end(sequence)
            elif self._scheduler is not None:
                self._scheduler.enqueue(sequence)

    def _end(self, sequence: SequenceState) -> None:
        self._ended.append(sequence)
        if self._on_finish is not None:
            self._on_finish(sequence.rollout(self.engine.tokenizer))

    # Checks

    def _check_open(self) -> None:
        """Raise `RuntimeError` if the session is closed."""
        if self._closed:
            raise RuntimeError(f"this session is no longer open: {self._closed}; open another with Engine.open")

    def _check_weights(self) -> None:
        """Close the session and raise `RuntimeError` if its sequences began with other weights."""
        if not self._unfinished:
            return
        version = self.engine.version()
        if self._weights is not None and version != self._weights:
            self.close("the model's weights changed while it was open")
            self._check_open()
        self._weights = version

    def _sequence(self, number: int) -> SequenceState:
        if not 0 <= number < len(self._sequences):
            raise ValueError(f"unknown sequence {number}; the session has sequences 0 to {len(self._sequences) - 1}")
        return self._sequences[number]

    def _continuable(self, number: int) -> SequenceState:
        """Return a sequence's sequence; raise `ValueError` if it was cancelled or ended with an error."""
        self._check_open()
        sequence = self._sequence(number)
        if sequence.cancelled:
            raise ValueError(f"sequence {number} was cancelled; fork or extend another one")
        if sequence.reason == "error":
            raise ValueError(f"sequence {number} ended with an error and cannot be continued: {sequence.error}")
        return sequence

    def _read_back(self, sequence: SequenceState) -> None:
        if self._scheduler is not None:
            self._scheduler.read_back(sequence)

    def _shared_kv(self, sequence: SequenceState, length: int) -> Any:
        """Return the keys and values of a sequence's first tokens for its forks, or None if there are none."""
        if length == 0 or self._scheduler is None:
            return None
        if sequence.slot >= 0:
            return self._scheduler.memory.keep(sequence.slot, sequence, length)
        return None if sequence.saved_kv is None else sequence.saved_kv.first(length, sequence.prompt.stored)

    def _tokens(self, number: int, tokens: str | Sequence[int]) -> list[int]:
        """Return tokens to extend a sequence with as ids; raise `ValueError` if the model does not know them."""
        if isinstance(tokens, str):
            if self.engine.tokenizer is None:
                raise ValueError("the engine has no tokenizer; give token ids")
            tokens = plain_tokens(self.engine.tokenizer, tokens)
        ids, vocab = token_list(f"the extension of sequence {number}", tokens), self.engine.input_vocab()
        wrong = [token for token in ids if not 0 <= token < vocab]
        if wrong:
            raise ValueError(
                f"sequence {number} cannot be extended with token {wrong[0]}; the model has ids from 0 to {vocab - 1}"
            )
        return ids

    def _checked_position(self, sequence: SequenceState, at: int | None) -> int:
        """Return the position ``at`` in a completion, or its end; raise `ValueError` if it has fewer tokens."""
        current = len(sequence.tokens)
        if at is not None and not 0 <= at <= current:
            raise ValueError(
                f"at is {at}, but sequence {sequence.index} has {current} tokens; use a number from 0 to {current}"
            )
        return current if at is None else at

    def _limit(self, sequence: SequenceState, length: int, max_tokens: int | None) -> int:
        """Return the token limit of a sequence that has ``length`` tokens; raise `ValueError` if those are too many."""
        context, prompt = self.engine.context(), len(sequence.prompt.tokens)
        if context is not None and prompt + length > context:
            raise ValueError(
                f"sequence {sequence.index} would have {prompt + length} tokens with its prompt, but the model's "
                f"context is {context}; extend it by at most {max(0, context - prompt - len(sequence.tokens))} tokens"
            )
        limit = sequence.limit if max_tokens is None else max_tokens
        if limit < 1 or length > limit:
            raise ValueError(
                f"sequence {sequence.index} would have {length} tokens, but its limit is {limit}; give fewer tokens, "
                f"or max_tokens={length + 64}"
            )
        return limit if context is None else min(limit, context - prompt)
