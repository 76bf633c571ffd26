"""Sessions used in odd orders: nobody loses a token, a stop or memory by it."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import PreTrainedTokenizerFast

from explorl.rollout import Engine, Rollout, SamplingParams, memory_plan
from explorl.rollout import readback as readback
from explorl.rollout import scheduler as scheduler
from explorl.rollout.memory import pages
from explorl.rollout.requests import SequenceState, prepare
from explorl.rollout.runner import Runner
from explorl.rollout.scheduler import Scheduler
from explorl.rollout.session import plain_tokens
from explorl.rollout.state import SlotState
from explorl.rollout.stops import StopTokens

from .models import build, prompts

PROMPT = ["3 + 4 ="]
written = partial(Engine, unrolled=True)
"""Engines that need not be tried out."""


def free(policy: Any, tokenizer: Any, tokens: int = 40) -> list[int]:
    """What comes where nothing stops it."""
    params = SamplingParams(max_tokens=tokens, stop_token_ids=(), seed=1)
    return written(policy, tokenizer).generate(PROMPT, 1, params)[0].token_ids


def stopping(tokenizer: Any, tokens: list[int]) -> SamplingParams:
    return SamplingParams(max_tokens=40, stop_token_ids=(), seed=1, stop=tokenizer.decode(tokens))


# Stop strings


@pytest.fixture
def found_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """No token tells that a string may be complete, as on a GPU: texts are searched every few tokens."""
    monkeypatch.setattr(StopTokens, "among", lambda _, requests, tokens: tokens < 0)


@pytest.mark.usefixtures("place", "found_late")
@pytest.mark.parametrize("move", ["more rows", "longer rows", "cancelled"])
def test_a_stop_string_is_found_where_it_is_though_the_row_moved(policy: Any, tokenizer: Any, move: str) -> None:
    """It is looked for every few tokens; here the row loses its seat in between."""
    tokens = free(policy, tokenizer)
    params = stopping(tokenizer, tokens[1:3])
    (want,) = written(policy, tokenizer).generate(PROMPT, 1, params)
    session = written(policy, tokenizer).open(PROMPT, 1, params)
    session.step(tokens=5)
    if move == "more rows":
        session.fork(0, 3, at=0)
    elif move == "longer rows":
        session.fork(0, at=0, max_tokens=90)
    else:
        session.cancel(0)
        session.resume(0)
    session.run()
    rollout = session.rollout(0)
    assert (rollout.token_ids, rollout.stop, len(rollout)) == (want.token_ids, want.stop, 3)


@pytest.mark.usefixtures("place", "found_late")
@pytest.mark.parametrize("looked", [False, True])
def test_a_row_is_never_seen_beyond_its_stop_string(policy: Any, tokenizer: Any, looked: bool) -> None:
    tokens = free(policy, tokenizer)
    session = written(policy, tokenizer).open(PROMPT, 1, stopping(tokenizer, tokens[1:3]))
    session.step(tokens=5)
    if looked:
        session.read_back()
    rollout = session.rollout(0)
    assert (rollout.token_ids, rollout.finish_reason) == (tokens[:3], "stop")
    assert [r.request for r in session.step()] == [0]
    session.extend(0, [7, 8])
    session.step(tokens=2)
    assert session.rollout(0).token_ids[:5] == [*tokens[:3], 7, 8]
    assert len(session.rollout(0)) == 7


@pytest.mark.usefixtures("place", "found_late")
@pytest.mark.parametrize("ended", [False, True])
def test_a_higher_limit_alone_hides_no_stop_string(policy: Any, tokenizer: Any, ended: bool) -> None:
    """Half of the string was there before, and half comes after."""
    tokens = free(policy, tokenizer)
    params = stopping(tokenizer, tokens[9:13])
    (want,) = written(policy, tokenizer).generate(PROMPT, 1, params)
    assert want.token_ids == tokens[:13]
    session = written(policy, tokenizer).open(
        PROMPT, 1, SamplingParams(max_tokens=11 if ended else 12, stop_token_ids=(), seed=1, stop=params.stop)
    )
    session.step(tokens=11)
    session.extend(0, [], max_tokens=40)
    (child,) = session.fork(0, at=8)
    session.run()
    assert (session.rollout(0).token_ids, session.rollout(0).stop) == (want.token_ids, want.stop)
    assert session.rollout(child).token_ids[:8] == tokens[:8]


def test_a_fork_before_a_stop_searches_what_it_has_of_the_text(policy: Any, tokenizer: Any) -> None:
    tokens = free(policy, tokenizer)
    stop = tokenizer.decode(tokens[9:12])
    session = written(policy, tokenizer).open(PROMPT, 1, stopping(tokenizer, tokens[9:12]))
    session.step()
    session.extend(0, [7], max_tokens=40)
    (child,) = session.fork(0, at=11)
    session.extend(child, [], max_tokens=60)
    for sample in session._sequences:
        assert sample.stop_search_start(len(sample.tokens)) == (13 if sample.index == 0 else 0)
    (last,) = session.fork(0, at=12)
    assert session._sequences[last].stop_search_start(12) == 12
    assert stop not in tokenizer.decode(session.rollout(child).token_ids)


# Who has ended


def test_a_row_that_was_given_more_is_not_reported(llama: Any) -> None:
    session = written(llama).open(prompts((4, 5)), 1, SamplingParams(max_tokens=5, seed=1, stop_token_ids=()))
    session.step(tokens=3)
    session.extend(0, [7, 8])  # to its limit: it has ended
    session.extend(0, [], max_tokens=30)
    assert session.step(tokens=1) == []
    assert [(r.request, r.finish_reason) for r in session.step()] == [(1, "length")]


# Memory


@pytest.fixture
def paged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_plan, "SPANS", ())
    monkeypatch.setitem(pages.PAGE, "cpu", 4)
    monkeypatch.setitem(scheduler.SYNC_STEPS, "cpu", 8)


def smallest(model: Any, tokens: int, prompt: int, rows: int = 1) -> Engine:
    """An engine with pages for one row of that size at least, and for no more than it must."""
    engine = written(model, batch_size=rows)
    engine.memory_budget = 1
    with pytest.raises(MemoryError) as error:
        engine.generate([[5] * prompt], 1, SamplingParams(max_tokens=tokens, seed=0))
    engine.memory_budget = int(str(error.value).split("needs ")[1].split()[0])
    return engine


@pytest.mark.usefixtures("paged")
@pytest.mark.parametrize("how", ["extend", "fork"])
def test_rows_that_end_at_once_hold_no_memory_that_others_need(llama: Any, how: str) -> None:
    ids = prompts((6, 9, 7))
    params = SamplingParams(temperature=0, max_tokens=30, stop_token_ids=())
    session = smallest(llama, 30, 9).open(ids, 1, params)
    session.step(tokens=16)
    (row,) = [i for i in range(3) if len(session.rollout(i))]
    if how == "extend":
        session.extend(row, [7, 8], max_tokens=18)
    else:
        session.fork(row, 1, at=16, max_tokens=16)
    session.run()
    want = written(llama).generate(ids, 1, params)
    for i in {0, 1, 2} - ({row} if how == "extend" else set()):
        assert session.rollout(i).token_ids == want[i].token_ids


@pytest.mark.usefixtures("paged")
@pytest.mark.parametrize("length", [6, 8, 9])
def test_a_row_goes_on_in_the_memory_that_is_just_enough_for_it(llama: Any, length: int) -> None:
    """Its prompt is kept beside what it holds, and its last page is copied: neither may keep it from its seat."""
    params = SamplingParams(temperature=0, max_tokens=31, stop_token_ids=())
    (want,) = written(llama).generate(prompts((length,)), 1, params)
    session = smallest(llama, 31, length).open(prompts((length,)), 1, params)
    while session.running:
        session.step(tokens=1)
        rollout = session.rollout(0)
        if rollout.finish_reason is None:
            session.extend(0, [])
    assert session.rollout(0).token_ids == want.token_ids


# Interruptions


@pytest.mark.parametrize(
    "where", [(Runner, "_step"), (Runner, "_compute"), (Scheduler, "_rearrange")], ids=lambda where: where[1]
)
@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_an_interruption_changes_nothing(
    llama: Any, place: str, error: type[BaseException], where: tuple[Any, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    params = SamplingParams(max_tokens=12, stop_token_ids=(), seed=3)
    if place == "pages":
        monkeypatch.setitem(scheduler.SYNC_STEPS, "cpu", 5)
    want = written(llama).generate(prompts((4, 9)), 2, params)
    session = written(llama, batch_size=3).open(prompts((4, 9)), 2, params)
    original, left = getattr(*where), [{"_step": 5, "_compute": 1, "_rearrange": 2}[where[1]]]

    def broken(self: Any, *args: Any) -> None:
        left[0] -= 1
        if left[0] == 0:
            raise error("now")
        original(self, *args)

    monkeypatch.setattr(*where, broken)
    with pytest.raises(error, match="now"):
        session.run()
    session.read_back()
    for row in range(4):
        half = session.rollout(row).token_ids
        assert half == want[row].token_ids[: len(half)]
    session.run()
    assert [r.token_ids for r in session.finished()] == [r.token_ids for r in want]


@pytest.mark.parametrize("where", ["before the tokens", "between tokens and records", "before the reason"])
@pytest.mark.parametrize("when", [1, 2, 3])
def test_an_interruption_while_rows_end_lets_none_run_on(
    llama: Any, when: int, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row that has its last token, and is not known to have ended, would go on behind it."""
    params = SamplingParams(max_tokens=12, stop_token_ids=range(3, 40), seed=3, min_p_mass=0.1)
    want = written(llama).generate(prompts((4, 4)), 3, params)
    session = written(llama).open(prompts((4, 4)), 3, params)
    append, left = SequenceState.append_sampled, [when]

    def interrupted() -> None:
        left[0] -= 1
        if left[0] == 0:
            raise KeyboardInterrupt("now")

    def broken(self: SequenceState, tokens: list[int], records: Any) -> None:
        if where == "before the tokens":
            interrupted()
        self.tokens.extend(tokens)
        if where == "between tokens and records":
            interrupted()
        self.stat_parts.append(records)

    class Reasons(dict[int, Any]):
        def get(self, *args: Any) -> Any:
            interrupted()
            return super().get(*args)

    if where == "before the reason":
        monkeypatch.setattr(readback, "_REASONS", Reasons(readback._REASONS))
    else:
        monkeypatch.setattr(SequenceState, "append_sampled", broken)
    with pytest.raises(KeyboardInterrupt, match="now"):
        session.run()
    monkeypatch.setattr(SequenceState, "append_sampled", append)
    for rollout in (session.rollout(row) for row in range(6)):
        assert len(rollout.logps) == len(rollout)
    session.run()
    assert [r.token_ids for r in session.finished()] == [r.token_ids for r in want]
    for rollout, same in zip(session.finished(), want, strict=True):
        torch.testing.assert_close(rollout.logps, same.logps)


def test_an_interruption_while_tables_are_laid_out(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    params = SamplingParams(max_tokens=4, min_p_mass=0.1, seed=3)
    session, original = written(llama).open(prompts((4,)), 1, params), SlotState.set_stops

    def broken(*_: Any) -> bool:
        monkeypatch.setattr(SlotState, "set_stops", original)
        raise KeyboardInterrupt("now")

    monkeypatch.setattr(SlotState, "set_stops", broken)
    with pytest.raises(KeyboardInterrupt, match="now"):
        session.run()
    session.run()
    want = written(llama).generate(prompts((4,)), 1, params)[0]
    assert session.rollout(0).token_ids == want.token_ids
    torch.testing.assert_close(session.rollout(0).min_p_mass, want.min_p_mass)


@pytest.mark.parametrize("thread", [False, True])
@pytest.mark.parametrize("use", ["generate", "open", "release"])
def test_an_engine_is_not_used_while_it_samples(llama: Any, use: str, thread: bool) -> None:
    engine = written(llama)
    acts: dict[str, Callable[[], object]] = {
        "generate": lambda: engine.generate([[5]], 1, SamplingParams(max_tokens=2)),
        "open": lambda: engine.open([[5]]),
        "release": engine.release,
    }

    def on_finish(_: Rollout) -> None:
        if thread:
            with ThreadPoolExecutor(1) as pool:
                pool.submit(acts[use]).result(timeout=5)
        else:
            acts[use]()

    params = SamplingParams(max_tokens=3, seed=1)
    with pytest.raises(RuntimeError, match=r"in the middle of a call .* between the steps of Engine\.open"):
        engine.generate([[5, 6]], 2, params, on_finish=on_finish)
    want = written(llama).generate([[5, 6]], 2, params)
    assert [r.token_ids for r in engine.generate([[5, 6]], 2, params)] == [r.token_ids for r in want]


@pytest.mark.usefixtures("place")
def test_a_session_that_nobody_closed_leaves_nothing_behind() -> None:
    model = build("llama")
    with torch.no_grad():
        model.model.embed_tokens.weight[50] = torch.nan
    params = SamplingParams(max_tokens=12, stop_token_ids=(), seed=1)

    def lines(engine: Engine, words: list[int]) -> list[list[int]]:
        session = engine.open([[5, 6], [9, 10]], 1, params)
        session.extend(1, words)
        session.run()
        return [session.rollout(row).token_ids for row in (0, 1)]

    engine = written(model)
    broken = engine.open([[5, 6], [9, 10]], 1, params)
    for row in (0, 1):
        broken.extend(row, [7, 8, 9, 50, 11, 12])
    broken.run()
    assert [rollout.finish_reason for rollout in broken.finished()] == ["error", "error"]
    del broken
    gc.collect()
    assert lines(engine, [7, 8, 9, 10, 11, 12]) == lines(written(model), [7, 8, 9, 10, 11, 12])


@pytest.mark.usefixtures("found_late")
def test_a_row_that_ended_while_it_was_looked_at_is_still_reported(policy: Any, tokenizer: Any) -> None:
    session = written(policy, tokenizer).open(PROMPT, 1, stopping(tokenizer, free(policy, tokenizer)[1:3]))
    session.step(tokens=5)
    assert session.rollout(0).finish_reason == "stop"
    assert session.running
    assert [rollout.request for rollout in session.step()] == [0]
    assert not session.running


@pytest.mark.parametrize("text", ["{eos}", "a{eos}b", "1{pad}"])
def test_a_text_that_rows_are_extended_with_holds_no_special_token(policy: Any, tokenizer: Any, text: str) -> None:
    """It may be what a tool has said."""
    text = text.format(eos=tokenizer.eos_token, pad=tokenizer.pad_token)
    with written(policy, tokenizer).open(PROMPT, 1, SamplingParams(max_tokens=60, seed=1)) as session:
        session.extend(0, text)
        tokens = session.rollout(0).token_ids
    assert tokens
    assert not set(tokens) & {tokenizer.eos_token_id, tokenizer.pad_token_id}


def test_a_control_token_in_a_text_is_its_characters(tokenizer: Any) -> None:
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.add_tokens(["<|im_end|>"], special_tokens=True)
    control = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert control in tokenizer("1<|im_end|>2", add_special_tokens=False)["input_ids"]
    assert control not in (tokens := plain_tokens(tokenizer, "1<|im_end|>2"))
    assert len(tokens) > 2


@pytest.fixture(scope="module")
def spacing() -> Any:
    """A tokenizer as SentencePiece's, which puts a space before every text."""
    letters = ["<unk>", "▁", *"abcxyz<>/`.", *(f"<0x{byte:02X}>" for byte in range(256))]
    core = Tokenizer(models.BPE({text: i for i, text in enumerate(letters)}, [], byte_fallback=True, unk_token="<unk>"))
    core.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    core.decoder = decoders.Sequence(parts)
    return PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>")


@pytest.mark.parametrize("text", ["abc", " abc", "  a", "\n```x\n", "\n\na", "<x>", "é", ".", " ", "\n"])
def test_a_text_in_the_middle_is_what_is_written(tokenizer: Any, spacing: Any, text: str) -> None:
    assert spacing.decode([*spacing("ab")["input_ids"], *spacing("c")["input_ids"]]) == "ab c"
    assert spacing.decode([*spacing("ab")["input_ids"], *plain_tokens(spacing, text)]) == "ab" + text
    prompt = prepare(
        ["ab"], 1, SamplingParams(prefix=text), tokenizer=spacing, vocab=len(spacing), context=None, eos=(), seed=1
    ).prompts[0]
    assert spacing.decode(prompt) == "ab" + text
    if text.isascii() and "`" not in text:  # a tokenizer that puts nothing before
        assert plain_tokens(tokenizer, text) == tokenizer(text, add_special_tokens=False)["input_ids"]
