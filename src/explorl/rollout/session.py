"""`Session`: sampling with the caller in between — rows go on after a tool call, branch, and are given up.

    with engine.open(prompts, n=4, params=SamplingParams(stop="```output", max_tokens=512)) as session:
        while session.running:
            for rollout in session.step():
                if rollout.finish_reason == "stop" and wants_a_tool(rollout.text):
                    session.extend(rollout.request, run_tool(rollout.text))
        rollouts = session.finished()

A row is a number, the `Rollout.request` of what it returns. Between two calls all rows stand still, so each of them may
be extended, forked or cancelled whether it has ended or not. What a row has computed is kept while there is memory for
it; if it is not, it is computed again from the row's tokens, and nothing else changes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, Self

import torch

from explorl.modeling.attention import model_lock, sampling_mode
from explorl.modeling.gpu import on
from explorl.modeling.precision import default_torch_settings
from explorl.rollout.requests import Prompt, Requests, continued
from explorl.rollout.rollouts import Rollout
from explorl.rollout.sampling import Active, SamplingParams
from explorl.rollout.sampling.constraints import token_list
from explorl.rollout.sampling.rng import fork_key, request_keys
from explorl.rollout.sampling.tables import Tables
from explorl.rollout.scheduler import Scheduler
from explorl.rollout.sequences import Sample, recorded

if TYPE_CHECKING:
    from explorl.rollout.engine import Engine

logger = logging.getLogger(__name__)

PLACES = ("curve", "stop_set", "bias_set")
"""What `Tables` says of each request, by the names that `Sample` has for it."""


def plain_tokens(tokenizer: Any, text: str) -> list[int]:
    """Tokens of a text that nobody vouches for and that goes on behind others: none is a special one."""
    return continued(tokenizer, text, split_special_tokens=True)


class Session:
    """Rows that are being sampled; made by `Engine.open`.

    An engine has one session at a time: the next one, and the next `Engine.generate`, close it. The weights must not
    change while it is open.
    """

    def __init__(
        self, engine: Engine, *, keep: bool = True, on_finish: Callable[[Rollout], object] | None = None
    ) -> None:
        self.engine, self._on_finish = engine, on_finish
        self._samples: list[Sample] = []
        self._scheduler: Scheduler | None = None
        self._keep = keep
        self._active = Active()
        self._tables = Tables()
        self._strings: list[Sequence[str]] = []
        """Stop strings of each row."""
        self._ended: list[Sample] = []
        self._weights: Any = None
        self._stamp = object()
        """What the engine knows this session by."""
        self._rows: int | None = None
        """Most rows together, once an allocation has failed."""
        self._closed = ""
        self.steps = 0
        """Steps that were decoded so far, each of up to one token per row."""
        self.sampling = False
        """Whether it is in the middle of `step` or `run`, as when ``on_finish`` is called."""
        self.prompt_ids: list[list[int]] = []
        """Tokens of each prompt, by `Rollout.prompt_index`."""

    # What there is to sample

    @default_torch_settings()
    def add(self, prompts: Sequence[Prompt], n: int = 1, params: SamplingParams | None = None) -> list[int]:
        """Further requests, sampled as `Engine.generate` alone would sample them; their rows."""
        self._check_open()
        params = params or SamplingParams()
        return self._add(self.engine.requests(prompts, n, params), params)

    def _add(self, requests: Requests, params: SamplingParams) -> list[int]:
        self._agree(requests, params)
        keys = request_keys(requests.seed, range(len(requests)))
        different = [self.engine.prompt(ids) for ids in requests.different]
        first, before = len(self._samples), len(self.prompt_ids)
        self.prompt_ids += requests.prompts
        places = self._tables.add(requests)
        self._active = replace(self._active, stop_sets=self._active.stop_sets or len(self._tables.stops) > 1)
        self._strings += requests.stops
        limits, tops = requests.rows["max_tokens"].tolist(), requests.rows["logprobs"].tolist()
        kinds = {k: recorded(k, bool(params.min_p_mass)) for k in set(tops)}
        columns = zip(*(values.tolist() for values in (keys, *(places[name] for name in PLACES))), strict=True)
        for request, (key, *own) in enumerate(columns):
            prompt, sample = divmod(request, requests.n)
            self._samples.append(
                Sample(
                    first + request,
                    different[requests.which[request]],
                    requests,
                    request,
                    prompt_index=before + prompt,
                    sample_index=sample,
                    key=key,
                    limit=limits[request],
                    kinds=kinds[tops[request]],
                    **dict(zip(PLACES, own, strict=True)),
                )
            )
        rows = list(range(first, len(self._samples)))
        self._enqueue(rows)
        return rows

    def _agree(self, requests: Requests, params: SamplingParams) -> None:
        """Takes over what all rows of a session have in common, or says where they differ."""
        active = Active.of(params, requests.rows)
        if self._samples:
            for name, here, there in (
                ("temperature_by_position", self._active.by_position, active.by_position),
                ("min_p_mass", self._active.min_p_mass, active.min_p_mass),
            ):
                if here != there:
                    raise ValueError(
                        f"{name} is not given alike for all rows of the session; open another session for these"
                    )
            per = self._active.bottom_p_chance and active.bottom_p_chance
            if per and self._active.per_sequence != active.per_sequence:
                raise ValueError(
                    f"bottom_p_per is {params.bottom_p_per!r}, but not for the session's other rows; open another "
                    "session for it"
                )
            active = Active(
                **{f.name: max(getattr(active, f.name), getattr(self._active, f.name)) for f in fields(active)}
            )
        self._active = active

    @default_torch_settings()
    def extend(self, row: int, tokens: str | Sequence[int], max_tokens: int | None = None) -> None:
        """Appends tokens that were not sampled, such as what a tool said, to a row, and lets it go on after them.

        Only the new tokens are computed. They carry no record, and are False in `Rollout.sampled`. ``max_tokens`` is a
        new limit for the whole completion, forced tokens included; None keeps the row's own. Without tokens the row
        just goes on, after a stop string as well.

        A text is taken as it is written: where it says ``<|im_end|>``, that becomes the tokens of these characters. For
        special tokens give ids.
        """
        sample = self._sample(row)
        ids = self._tokens(row, tokens)
        self._read(sample)
        length = len(sample.tokens) + len(ids)
        limit = self._limit(sample, length, max_tokens)
        if self._scheduler is not None:
            self._scheduler.unseat(sample)
        sample.force(ids)
        sample.limit = limit
        self._enqueue([row])

    @default_torch_settings()
    def fork(self, row: int, n: int = 1, at: int | None = None, max_tokens: int | None = None) -> list[int]:
        """``n`` new rows that have a row's first ``at`` completion tokens (None: all so far) and go on on their own.

        Each has its own random numbers, keyed by (seed, request, number of the fork): the same calls give the same
        tokens, whatever else is sampled. The tokens they share are computed once.
        """
        sample = self._sample(row)
        if n < 1:
            raise ValueError(f"n is {n}; ask for at least 1 fork")
        self._read(sample)
        had = len(sample.tokens)
        length = had if at is None else at
        if not 0 <= length <= had:
            raise ValueError(f"at is {at}, but row {row} has {had} tokens; use a number from 0 to {had}")
        limit = self._limit(sample, length, max_tokens)
        kept, records = self._kept(sample, length), sample.records(length)
        quiet = [(begin, min(end, length)) for begin, end in sample.quiet if begin < length]
        if length == had and sample.stop is not None:
            quiet.append((length - 1, length))
        rows = list(range(len(self._samples), len(self._samples) + n))
        for index in rows:
            self._samples.append(
                Sample(
                    index,
                    sample.prompt,
                    sample.requests,
                    sample.request,
                    sample.prompt_index,
                    sample.sample_index,
                    key=fork_key(sample.key, sample.forks),
                    limit=limit,
                    curve=sample.curve,
                    stop_set=sample.stop_set,
                    bias_set=sample.bias_set,
                    kinds=sample.kinds,
                    tokens=sample.tokens[:length],
                    pieces=[records] if length else [],
                    quiet=list(quiet),
                    searched=length,
                    parent=row,
                    forked_at=length,
                    kept=None if kept is None else kept.first(length, sample.prompt.stored),
                )
            )
            self._strings.append(self._strings[row])
            sample.forks += 1
        if kept is not None:
            kept.drop()
        self._enqueue(rows)
        return rows

    @default_torch_settings()
    def cancel(self, row: int) -> None:
        """Gives a row up: its tokens so far stay readable, its memory is free."""
        sample = self._sample(row)
        self._read(sample)
        if self._scheduler is not None:
            self._scheduler.unseat(sample, keep=False)
            self._scheduler.wake(sample)
        sample.cancelled = True
        sample.forget()

    @default_torch_settings()
    def resume(self, row: int) -> None:
        """Takes back `cancel`: the row goes on where it was, computed again from its tokens."""
        self._check_open()
        sample = self._known(row)
        if not sample.cancelled:
            raise ValueError(f"row {row} was not cancelled; a row that has ended goes on by extend({row}, [])")
        sample.cancelled = False
        if sample.reason is None:
            self._enqueue([row])

    @default_torch_settings()
    def look(self) -> None:
        """Brings what all rows have sampled to the host at once: `rollout` has then nothing to wait for."""
        if self._scheduler is not None:
            self._scheduler.read_all()

    @default_torch_settings()
    def rollout(self, row: int) -> Rollout:
        """A row as it stands; `Rollout.finish_reason` is None where it has not ended."""
        sample = self._known(row)
        if not self._closed:
            self._read(sample)
        return sample.rollout(self.engine.tokenizer)

    # Sampling

    @property
    def running(self) -> bool:
        """Whether there is a row that goes on, or one that has ended and that `step` has not returned yet."""
        return not self._closed and (self._going_on or any(not s.cancelled for s in self._ended))

    @property
    def _going_on(self) -> bool:
        return not self._closed and any(s.reason is None and not s.cancelled for s in self._samples)

    @default_torch_settings()
    def step(self, tokens: int | None = None, *, same_weights: bool = False) -> list[Rollout]:
        """Samples until a row ends, or so many tokens per row; what has ended.

        ``same_weights``: the caller knows that nobody has touched the model since the last step, and it need not be
        looked at.
        """
        self._check_open()
        if tokens is not None and tokens < 1:
            raise ValueError(f"tokens is {tokens}; use at least 1, or None to go on until a row ends")
        if not same_weights:
            self._check_weights()
        self._run(lambda done: bool(self._ended) or (tokens is not None and done >= tokens), tokens)
        ended, self._ended = self._ended, []
        return [sample.rollout(self.engine.tokenizer) for sample in ended if not sample.cancelled]

    @default_torch_settings()
    def run(self) -> None:
        """Samples until every row has ended."""
        self._check_open()
        self._check_weights()
        self._run(lambda _: False, None, ahead=True)
        self._ended = []

    @default_torch_settings()
    def finished(self) -> list[Rollout]:
        """The rows that have ended, in the order of their numbers; cancelled ones are left out."""
        return [s.rollout(self.engine.tokenizer) for s in self._samples if s.reason is not None and not s.cancelled]

    @default_torch_settings()
    def close(self, why: str = "it was closed") -> None:
        """Gives the session's memory back to the engine. What was sampled stays readable."""
        if self._closed:
            return
        if self._scheduler is not None:
            self._scheduler.move_out(keep=False)
            for sample in self._samples:
                sample.forget()
            self.engine.remember(self._scheduler.memory)
        self._closed, self._scheduler = why, None
        self.engine.is_over(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self, enough: Callable[[int], bool], most: int | None, ahead: bool = False) -> None:
        self.sampling = True
        try:
            # What it keeps is written to in other modes too.
            model = self.engine.model
            with model_lock(model), torch.inference_mode(False), on(next(model.parameters()).device):
                self._sample_until(enough, most, ahead)
        finally:
            self.sampling = False

    def _sample_until(self, enough: Callable[[int], bool], most: int | None, ahead: bool) -> None:
        done = 0
        while self._going_on and not enough(done):
            try:
                scheduler = self._settled()
                with self.engine.weights(), sampling_mode(self.engine.model), scheduler.runner.fused():
                    plan = self.engine.plan
                    scheduler.runner.copy_weights(self._stamp, wanted=plan is not None and plan.weight_bytes > 0)
                    while scheduler.busy and not enough(done):
                        steps = scheduler.advance(None if most is None else most - done, ahead)
                        done += steps
                        self.steps += steps
            except BaseException as error:
                if not self._halve(error):
                    self._lose()
                    raise

    def _lose(self) -> None:
        """After an interruption: the device may hold half of a step, so rows are computed again from their tokens."""
        if self._scheduler is None:
            return
        for sample in self._samples:
            sample.seat, sample.kept = -1, None
        self._scheduler = None
        self.engine.forget_memory()

    def _halve(self, error: BaseException) -> bool:
        """After a failed allocation: half the rows and half the memory, once. Rows are computed again from tokens."""
        scheduler, plan = self._scheduler, self.engine.plan
        full = isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)
        if not full or self._rows is not None or plan is None or plan.slots < 2:
            return False
        self._rows = plan.slots // 2
        logger.warning("memory ran out with %d rows; going on with %d", plan.slots, self._rows)
        if scheduler is not None:
            scheduler.move_out(keep=False)
            scheduler.abandon()
        self._scheduler = None
        self.engine.forget_memory()
        return True

    def _settled(self) -> Scheduler:
        """The scheduler, in memory that is large enough for all rows that go on."""
        engine, live = self.engine, [s for s in self._samples if s.reason is None and not s.cancelled]
        scheduler = self._scheduler
        needs = {
            "requests": len(live),
            "prompts": len({id(s.prompt) for s in live}),
            "prompt_tokens": max(len(s.prompt.tokens) for s in live),
            "tokens": max(s.limit for s in live),
        }
        most = engine.most_rows() if self._rows is None else self._rows
        if scheduler is not None and scheduler.runner.plan.holds(scheduler.slots, most, **needs):
            if self._active.logprobs != scheduler.active.logprobs:  # records are made anew
                scheduler.move_out()
            scheduler.active, scheduler.certain = self._active, self._certain
            self._tables.put(scheduler.runner, self._active)
            return scheduler
        if scheduler is None:
            scheduler = Scheduler(self._samples, engine.tokenizer, self._strings, self._keep, self._end)
            memory = engine.recall()
            scheduler.wait(*live)
        else:
            needs["requests"] = max(needs["requests"], 2 * scheduler.slots)
            scheduler.move_out()
            memory = scheduler.memory
        runner, slots = engine.prepare(self._active, rows=self._rows, table_bytes=self._tables.bytes, **needs)
        self._tables.put(runner, self._active)
        scheduler.move_in(runner, slots, self._active, memory)
        self._scheduler, scheduler.certain = scheduler, self._certain
        return scheduler

    @property
    def _certain(self) -> bool:
        """Whether rows end at their limits and nowhere else, but for those that break."""
        return not any(self._tables.stops) and not any(self._strings)

    def _enqueue(self, rows: Sequence[int]) -> None:
        for row in rows:
            sample = self._samples[row]
            sample.reason, sample.stop, sample.error = None, None, ""
            if sample in self._ended:  # which nobody has been told of
                self._ended.remove(sample)
            if len(sample.tokens) >= sample.limit:
                sample.reason = "length"
                if self._scheduler is not None:
                    self._scheduler.rest(sample)
                self._end(sample)
            elif self._scheduler is not None:
                self._scheduler.wait(sample)

    def _end(self, sample: Sample) -> None:
        self._ended.append(sample)
        if self._on_finish is not None:
            self._on_finish(sample.rollout(self.engine.tokenizer))

    # Rows

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError(f"this session is no longer open: {self._closed}; open another with Engine.open")

    def _check_weights(self) -> None:
        """Closes a session whose rows began with other weights."""
        if not self._going_on:
            return
        version = self.engine.version()
        if self._weights is not None and version != self._weights:
            self.close("the model's weights changed while it was open")
            self._check_open()
        self._weights = version

    def _known(self, row: int) -> Sample:
        if not 0 <= row < len(self._samples):
            raise ValueError(f"row {row} is unknown; the session has rows 0 to {len(self._samples) - 1}")
        return self._samples[row]

    def _sample(self, row: int) -> Sample:
        self._check_open()
        sample = self._known(row)
        if sample.cancelled:
            raise ValueError(f"row {row} was cancelled; fork or extend another one")
        if sample.reason == "error":
            raise ValueError(f"row {row} broke off and cannot go on: {sample.error}")
        return sample

    def _read(self, sample: Sample) -> None:
        if self._scheduler is not None:
            self._scheduler.read(sample)

    def _kept(self, sample: Sample, length: int) -> Any:
        """Keys and values of a row's first tokens, for its forks."""
        if length == 0 or self._scheduler is None:
            return None
        if sample.seat >= 0:
            return self._scheduler.memory.keep(sample.seat, sample, length)
        return None if sample.kept is None else sample.kept.first(length, sample.prompt.stored)

    def _tokens(self, row: int, tokens: str | Sequence[int]) -> list[int]:
        if isinstance(tokens, str):
            if self.engine.tokenizer is None:
                raise ValueError("the engine has no tokenizer; give token ids")
            tokens = plain_tokens(self.engine.tokenizer, tokens)
        ids, vocab = token_list(f"what row {row} is extended with", tokens), self.engine.input_vocab()
        wrong = [token for token in ids if not 0 <= token < vocab]
        if wrong:
            raise ValueError(f"row {row} cannot have token id {wrong[0]}; the model knows ids from 0 to {vocab - 1}")
        return ids

    def _limit(self, sample: Sample, length: int, max_tokens: int | None) -> int:
        """The most tokens of a row that is to have ``length`` of them now; `ValueError` where that is too many."""
        context, prompt = self.engine.context(), len(sample.prompt.tokens)
        if context is not None and prompt + length > context:
            raise ValueError(
                f"row {sample.index} would have {prompt + length} tokens with its prompt and the model's context is "
                f"{context}; give it {max(0, context - prompt - len(sample.tokens))} more at most"
            )
        limit = sample.limit if max_tokens is None else max_tokens
        if limit < 1 or length > limit:
            raise ValueError(
                f"row {sample.index} would have {length} tokens and may have {limit}; give fewer, or "
                f"max_tokens={length + 64}"
            )
        return limit if context is None else min(limit, context - prompt)
