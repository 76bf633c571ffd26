"""The open form: rows that are extended, forked and cancelled against a fresh engine on the concatenated tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from explorl.rollout import Engine, SamplingParams, Session
from explorl.rollout.runner import Runner

from .models import EOS, VOCAB, build, prompts, shared
from .test_engine import check_records, forced
from .test_sampling import chi_square_p

GREEDY = SamplingParams(temperature=0, max_tokens=6, stop_token_ids=())
WORDS = [[7, 8, 9], [11], [12, 13, 14, 15, 16], [17, 18], [19]]
"""What a tool says, turn by turn."""


def alone(model: Any, ids: Sequence[int], tokens: int) -> list[int]:
    """What a fresh engine gives after these tokens."""
    return all_alone(model, [ids], tokens)[0]


def all_alone(model: Any, ids: Sequence[Sequence[int]], tokens: int) -> list[list[int]]:
    params = SamplingParams(temperature=0, max_tokens=tokens, stop_token_ids=())
    return [rollout.token_ids for rollout in Engine(model).generate([list(row) for row in ids], 1, params)]


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt_neox"])
def test_continuations_equal_a_fresh_engine_on_the_same_tokens(name: str) -> None:
    model, ids = shared(name), prompts((5, 17, 1))
    session = Engine(model).open(ids, 1, GREEDY)
    want = all_alone(model, ids, 6)
    for turn, words in enumerate(WORDS):
        session.run()
        assert [r.token_ids for r in session.finished()] == want, turn
        for row in range(3):
            own = words[row % 2 :]  # not all of a length
            session.extend(row, own, max_tokens=len(want[row]) + len(own) + 4)
            want[row] += own
        ends = all_alone(model, [[*prompt, *row] for prompt, row in zip(ids, want, strict=True)], 4)
        want = [[*row, *end] for row, end in zip(want, ends, strict=True)]
    session.run()
    assert [r.token_ids for r in session.finished()] == want
    for rollout, prompt in zip(session.finished(), ids, strict=True):
        logits = forced(model, prompt, rollout.token_ids)
        picked = torch.tensor(rollout.token_ids)[:, None]
        logp = logits.log_softmax(-1).gather(1, picked)[:, 0].float()
        torch.testing.assert_close(rollout.logps[rollout.sampled], logp[rollout.sampled], atol=1e-4, rtol=0)
        assert rollout.sampled.tolist()[:6] == [True] * 6
        assert int((~rollout.sampled).sum()) == sum(len(words[rollout.request % 2 :]) for words in WORDS)


@pytest.mark.usefixtures("place")
def test_only_new_tokens_are_computed(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    computed: list[int] = []
    original = Runner._compute
    Engine(llama).check(40)

    def counting(self: Runner, ids: Any, *args: Any) -> None:
        computed.append(ids.numel())
        original(self, ids, *args)

    monkeypatch.setattr(Runner, "_compute", counting)
    session = Engine(llama).open(prompts((9,)), 1, GREEDY)
    session.run()
    assert computed == [8]
    session.extend(0, [5, 6, 7], max_tokens=12)
    session.run()
    assert computed == [8, 3]  # the last sampled token and all forced ones but the last
    session.fork(0, 4, at=5)
    session.run()
    assert computed == [8, 3]


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_forks_and_forks_of_forks_equal_a_fresh_engine(name: str) -> None:
    model, (prompt,) = shared(name), prompts((7,))
    session = Engine(model).open([prompt], 1, GREEDY)
    session.run()
    root = session.rollout(0).token_ids
    (first,) = session.fork(0, at=3)
    session.extend(first, [9, 10], max_tokens=12)
    second, third = session.fork(first, 2, at=4, max_tokens=10)
    session.extend(third, [21, 22, 23])
    session.run()
    (fourth,) = session.fork(third, at=9, max_tokens=14)
    session.run()
    heads = {first: [*root[:3], 9, 10], second: [*root[:3], 9], third: [*root[:3], 9, 21, 22, 23]}
    heads[fourth] = session.rollout(third).token_ids[:9]
    for row, length in ((first, 12), (second, 10), (third, 10), (fourth, 14)):
        want = [*heads[row], *alone(model, [*prompt, *heads[row]], length - len(heads[row]))]
        assert session.rollout(row).token_ids == want, row
    assert session.rollout(0).token_ids == root
    assert [session.rollout(row).parent for row in range(5)] == [None, 0, first, first, third]
    assert session.rollout(fourth).forked_at == 9
    assert session.rollout(fourth).sampled.tolist()[3:7] == [False, False, False, False]


@pytest.mark.usefixtures("place")
def test_what_is_forgotten_is_computed_again(llama: Any) -> None:
    """A row goes on as before where its keys and values were given up, here because there is no room to keep them."""
    ids = prompts((5, 9, 3, 12) * 3)
    whole = all_alone(llama, ids, 20)
    engine = Engine(llama, batch_size=1)
    session = engine.open(ids, 1, SamplingParams(temperature=0, max_tokens=8, stop_token_ids=()))
    session.run()
    assert session._scheduler is not None
    kept = [s.saved_kv is not None for s in session._sequences]
    assert kept[-1]
    assert not all(kept)
    for row in range(12):
        session.extend(row, [], max_tokens=20)
    session.run()
    assert [r.token_ids for r in session.finished()] == whole


def test_forks_draw_from_the_right_distribution(llama: Any) -> None:
    (prompt,) = prompts((4,))
    session = Engine(llama).open([prompt], 1, SamplingParams(max_tokens=8, stop_token_ids=(), seed=3))
    session.run()
    rows = session.fork(0, 2000, at=5, max_tokens=6)
    session.run()
    shared = session.rollout(0).token_ids[:5]
    drawn = np.bincount([session.rollout(row).token_ids[5] for row in rows], minlength=VOCAB)
    assert all(session.rollout(row).token_ids[:5] == shared for row in rows)
    probs = forced(llama, prompt, [*shared, 0])[-1].softmax(-1).numpy()
    assert (drawn > 0).sum() > 10
    assert chi_square_p(drawn, probs) > 1e-3


def test_history_and_company_change_no_draw(llama: Any) -> None:
    ids = prompts((4, 9))
    params = SamplingParams(max_tokens=10, stop_token_ids=(), seed=8)

    def forks(busy: bool) -> list[list[int]]:
        engine = Engine(llama)
        if busy:
            engine.generate(prompts(), 3, SamplingParams(max_tokens=5))
        session = engine.open(ids, 2, params)
        session.step(tokens=4)
        if busy:
            session.fork(0, 3)
            session.step(tokens=3)
            session.cancel(0)
        session.run()
        first = session.fork(2, 2, at=4)
        session.run()
        second = session.fork(first[1], 1, at=5)
        session.run()
        return [session.rollout(row).token_ids for row in (1, 2, 3, *first, *second)]

    quiet, busy = forks(False), forks(True)
    assert quiet == busy
    assert len({tuple(row) for row in quiet}) == 6
    want = Engine(llama).generate(ids, 2, params)
    assert quiet[:3] == [r.token_ids for r in want[1:]]


def test_rows_that_have_not_ended(llama: Any) -> None:
    ids = prompts((4, 9, 6))
    session = Engine(llama).open(ids, 1, SamplingParams(temperature=0, max_tokens=12, stop_token_ids=()))
    assert session.step(tokens=5) == []
    half = [session.rollout(row) for row in range(3)]
    assert [(len(r), r.finish_reason) for r in half] == [(5, None)] * 3
    session.extend(1, [30, 31])
    session.cancel(2)
    (child,) = session.fork(0)
    assert session.running
    ended = []
    while session.running:
        ended += session.step()
    assert sorted(r.request for r in ended) == [0, 1, child]
    assert session.rollout(1).token_ids == [
        *half[1].token_ids,
        30,
        31,
        *alone(llama, [*ids[1], *half[1].token_ids, 30, 31], 5),
    ]
    assert session.rollout(child).token_ids == session.rollout(0).token_ids == alone(llama, ids[0], 12)
    assert session.rollout(2).token_ids == half[2].token_ids
    assert [r.request for r in session.finished()] == [0, 1, child]
    assert session.step() == []


def test_stop_tokens_and_strings_stop_again(policy: Any, tokenizer: Any) -> None:
    engine = Engine(policy, tokenizer)
    free = engine.generate(["3 + 4 ="], 1, SamplingParams(max_tokens=40, seed=1, stop_token_ids=()))[0]
    stop = tokenizer.decode(free.token_ids[9:12])
    session = engine.open(["3 + 4 ="], 1, SamplingParams(max_tokens=60, seed=1, stop_token_ids=(), stop=stop))
    (rollout,) = session.step()
    assert rollout.finish_reason == "stop"
    assert rollout.text.endswith(stop)
    (child,) = session.fork(0, at=len(rollout) - 1)
    session.extend(0, stop)  # what is forced stops nothing, nor does what stopped it before
    session.step(tokens=8)
    assert len(session.rollout(0)) >= len(rollout) + len(tokenizer(stop)["input_ids"]) + 8
    session.run()
    assert session.rollout(child).token_ids[: len(rollout) - 1] == rollout.token_ids[:-1]


@pytest.mark.usefixtures("place")
def test_a_look_at_a_row_changes_nothing(policy: Any, tokenizer: Any) -> None:
    """Stop strings are looked for every few tokens: what a row had beyond one may have been seen already."""
    params = SamplingParams(max_tokens=40, stop_token_ids=(), stop=["a", "q"], seed=1)
    want = Engine(policy, tokenizer).generate(["3 + 4 ="], 6, params)
    session = Engine(policy, tokenizer).open(["3 + 4 ="], 6, params)
    while session.running:
        session.step(tokens=3)
        session.read_back()
        for row in range(6):
            session.rollout(row)
    for seen, rollout in zip(session.finished(), want, strict=True):
        assert (seen.token_ids, seen.stop, seen.text) == (rollout.token_ids, rollout.stop, rollout.text)
        assert len(seen.logps) == len(seen.sampled) == len(rollout)


@pytest.mark.usefixtures("place")
def test_a_row_that_is_resumed_is_as_if_it_had_never_stopped(llama: Any) -> None:
    params = SamplingParams(max_tokens=10, stop_token_ids=(), seed=8)
    want = Engine(llama).generate(prompts((4, 9)), 2, params)
    session = Engine(llama).open(prompts((4, 9)), 2, params)
    session.cancel(3)  # before it began
    session.step(tokens=4)
    session.cancel(0)  # in the middle
    session.run()
    assert [rollout.request for rollout in session.finished()] == [1, 2]
    session.cancel(1)  # after its end
    for row in (0, 1, 3):
        session.resume(row)
    with pytest.raises(ValueError, match=r"sequence 3 was not cancelled; .* extend\(3, \[\]\)"):
        session.resume(3)
    session.run()
    assert [rollout.token_ids for rollout in session.finished()] == [rollout.token_ids for rollout in want]


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize("ended", [False, True])
def test_tokens_that_are_taken_back_are_replaced_as_in_a_fork(llama: Any, ended: bool) -> None:
    ids, params = prompts((4, 9)), SamplingParams(max_tokens=12, stop_token_ids=(), seed=4)

    def opened() -> Session:
        session = Engine(llama).open(ids, 2, params)
        session.step() if ended else session.step(tokens=6)
        return session

    with opened() as session:
        before = session.rollout(1).token_ids
        (fork,) = session.fork(1, at=3)
        session.extend(fork, [5, 6], max_tokens=16)
        session.run()
        want, others = session.rollout(fork), [session.rollout(row).token_ids for row in (0, 2, 3)]
    with opened() as session:
        session.extend(1, [5, 6], max_tokens=16, at=3)
        session.run()
        got = session.rollout(1)
        assert [session.rollout(row).token_ids for row in (0, 2, 3)] == others
        (second,) = session.fork(1, at=5)
        with pytest.raises(ValueError, match="at is 17, but sequence 1 has 16 tokens"):
            session.extend(1, [5], at=17)
    assert got.token_ids == want.token_ids == [*before[:3], 5, 6, *got.token_ids[5:]]
    assert len(got) == 16
    assert got.sampled.tolist() == want.sampled.tolist() == [True] * 3 + [False] * 2 + [True] * 11
    torch.testing.assert_close(got.logps, want.logps, equal_nan=True)
    assert (got.parent, got.finish_reason, second) == (None, "length", 4)


def test_records_of_forced_tokens(llama: Any) -> None:
    from explorl.rollout import Rollouts

    session = Engine(llama).open(prompts((4, 6)), 1, SamplingParams(max_tokens=5, stop_token_ids=(), seed=1))
    session.run()
    session.extend(0, [5, 6], max_tokens=9)
    session.run()
    long, short = session.finished()
    assert long.sampled.tolist() == [True] * 5 + [False] * 2 + [True] * 2
    for records in (long.logps, long.sampling_logps, long.entropy):
        assert torch.equal(records.isnan(), ~long.sampled)
    assert long.branching[5:7].tolist() == [0, 0]
    padded = Rollouts([long, short], session.prompt_ids, 1, 0).padded()
    assert padded.mask.sum(-1).tolist() == [9, 5]
    assert padded.sampled.sum(-1).tolist() == [7, 5]
    for values in (padded.logps, padded.sampling_logps, padded.entropy):
        assert not values.isnan().any()
        assert not values[~padded.sampled].any()
    check_records(llama, [short], prompt_ids=session.prompt_ids)


def test_a_row_that_is_forced_to_its_limit_has_ended(llama: Any) -> None:
    session = Engine(llama).open(prompts((4,)), 1, SamplingParams(max_tokens=5, seed=1, stop_token_ids=()))
    session.step(tokens=3)
    session.extend(0, [7, 8])
    (rollout,) = session.step()
    assert rollout.finish_reason == "length"
    assert rollout.token_ids[3:] == [7, 8]
    assert not session.running


# Errors


def test_errors_name_the_row_and_what_would_do(llama: Any) -> None:
    engine = Engine(llama)
    session = engine.open(prompts((100, 4)), 1, SamplingParams(max_tokens=5, seed=1))
    session.run()
    with pytest.raises(ValueError, match="sequence 7; the session has sequences 0 to 1"):
        session.extend(7, [5])
    with pytest.raises(ValueError, match="the model has ids from 0 to 96"):
        session.extend(1, [VOCAB])
    with pytest.raises(ValueError, match=r"the extension of sequence 1 contains 5.5; use token ids such as 13"):
        session.extend(1, [5.5])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="would have 7 tokens, but its limit is 5; give fewer tokens, or max_tokens="):
        session.extend(1, [5, 6])
    with pytest.raises(ValueError, match="the model's context is 128; extend it by at most 23 tokens"):
        session.extend(0, [5] * 30, max_tokens=100)
    with pytest.raises(ValueError, match="no tokenizer"):
        session.extend(0, "text")
    with pytest.raises(ValueError, match="at is 6, but sequence 1 has 5 tokens"):
        session.fork(1, at=6)
    with pytest.raises(ValueError, match="n is 0"):
        session.fork(1, 0)
    with pytest.raises(ValueError, match="tokens is 0"):
        session.step(0)
    session.cancel(1)
    for act in (session.extend, session.fork, session.cancel):
        with pytest.raises(ValueError, match="sequence 1 was cancelled"):
            act(1, *([[5]] if act == session.extend else []))
    assert len(session.rollout(1)) == 5
    engine.generate(prompts((3,)), 1, GREEDY)
    with pytest.raises(RuntimeError, match="no longer open: the engine began another one"):
        session.step()
    assert len(session.rollout(0)) == 5
    assert not session.running


def test_weights_that_change_close_a_session() -> None:
    model = build("llama")
    session = Engine(model).open(prompts((4,)), 1, SamplingParams(max_tokens=9, seed=1, stop_token_ids=()))
    session.step(tokens=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
    model(torch.tensor([[5, 6]]), labels=torch.tensor([[5, 6]])).loss.backward()
    optimizer.step()
    with pytest.raises(RuntimeError, match="weights changed while it was open"):
        session.step()
    assert len(session.rollout(0)) == 2


def test_a_row_that_broke_off_cannot_go_on() -> None:
    model = build("llama")
    with torch.no_grad():
        model.model.embed_tokens.weight[50] = torch.nan
    session = Engine(model).open([[5, 50], [5, 6]], 1, SamplingParams(max_tokens=4, stop_token_ids=(EOS,), seed=1))
    session.run()
    with pytest.raises(ValueError, match=r"sequence 0 ended with an error and cannot be continued: .* not finite"):
        session.extend(0, [5], max_tokens=9)
    session.extend(1, [5], max_tokens=9)
    session.run()
    assert session.rollout(1).finish_reason != "error"
