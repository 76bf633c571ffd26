"""The engine against `model.generate` and against teacher-forced forward passes, on the CPU in float32."""

from __future__ import annotations

import logging
import pickle
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from transformers import GenerationConfig

from explorl.rollout import Engine, Rollout, Rollouts, SamplingParams

from .models import BUILDERS, EOS, VOCAB, build, prompts, shared

TINY = SamplingParams(max_tokens=12, seed=5)


def generated(model: Any, ids: list[list[int]], tokens: int, **options: Any) -> list[list[int]]:
    """`model.generate` of left-padded prompts, cut after the end-of-sequence token."""
    longest = max(len(prompt) for prompt in ids)
    out = model.generate(
        torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in ids]),
        attention_mask=torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in ids]),
        generation_config=GenerationConfig(max_new_tokens=tokens, eos_token_id=EOS, pad_token_id=0, **options),
    )[:, longest:].tolist()
    return [row[: row.index(EOS) + 1] if EOS in row else row for row in out]


@cache
def greedy(name: str) -> list[list[int]]:
    return generated(shared(name), prompts(), 24, do_sample=False)


def forced(model: Any, prompt: list[int], completion: list[int]) -> torch.Tensor:
    """Logits of each completion token from one forward pass over the whole sequence."""
    with torch.no_grad():
        logits = model(torch.tensor([prompt + completion])).logits[0].double()
    return logits[len(prompt) - 1 : -1]


def check_records(model: Any, rollouts: Any, temperature: float = 1.0, prompt_ids: Any = None) -> None:
    for rollout in rollouts:
        logits = forced(model, (prompt_ids or rollouts.prompt_ids)[rollout.prompt_index], rollout.token_ids)
        picked = torch.tensor(rollout.token_ids)[:, None]
        logp = (logits / temperature).log_softmax(-1).gather(1, picked)[:, 0]
        probs = logits.softmax(-1)
        entropy = -(probs * logits.log_softmax(-1)).sum(-1)
        ranked = probs.sort(-1, descending=True).values.cumsum(-1)
        torch.testing.assert_close(rollout.logps.double(), logp, atol=1e-4, rtol=0)
        torch.testing.assert_close(rollout.entropy.double(), entropy, atol=1e-4, rtol=0)
        assert torch.equal(rollout.branching, (ranked < 0.95).sum(-1) + 1)
        assert len(rollout.logps) == len(rollout.sampling_logps) == len(rollout.token_ids)


def same_tokens(first: Rollouts, second: Rollouts) -> bool:
    return [r.token_ids for r in first] == [r.token_ids for r in second]


# Against generate and a forward pass


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize("name", BUILDERS)
def test_greedy_equals_generate(name: str) -> None:
    model = shared(name)
    rollouts = Engine(model).generate(prompts(), 2, SamplingParams(temperature=0, max_tokens=24))
    assert [r.token_ids for r in rollouts] == [row for row in greedy(name) for _ in range(2)]
    assert all(bool((r.sampling_logps == 0).all()) for r in rollouts)
    check_records(model, rollouts)


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize("name", BUILDERS)
def test_records_equal_a_teacher_forced_pass(name: str) -> None:
    model = shared(name)
    rollouts = Engine(model, batch_size=4).generate(prompts(), 3, SamplingParams(max_tokens=20, seed=1))
    check_records(model, rollouts)
    assert len({tuple(r.token_ids) for r in rollouts}) == len(rollouts)
    for rollout in rollouts:
        torch.testing.assert_close(rollout.sampling_logps, rollout.logps)
        stopped = rollout.token_ids[-1] == EOS
        assert rollout.finish_reason == ("stop" if stopped else "length")
        assert stopped or len(rollout) == 20


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize("name", ["qwen3", "gemma3"])
def test_many_columns_are_attended_to_head_by_head(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("explorl.rollout.memory.spans.FEW_COLUMNS", 0)
    model = shared(name)
    check_records(model, Engine(model, batch_size=4).generate(prompts(), 3, SamplingParams(max_tokens=20, seed=1)))


@pytest.mark.usefixtures("place")
def test_repetition_penalty_equals_generate(llama: Any) -> None:
    ids = prompts()
    params = SamplingParams(temperature=0, repetition_penalty=1.4, max_tokens=20)
    rollouts = Engine(llama).generate(ids, 1, params)
    # `generate` counts padding as seen, so each prompt goes alone.
    want = [generated(llama, [prompt], 20, do_sample=False, repetition_penalty=1.4)[0] for prompt in ids]
    assert [r.token_ids for r in rollouts] == want


def test_log_q_is_that_of_the_warped_distribution(llama: Any) -> None:
    from explorl.rollout.sampling import warp_bottom_p, warp_top_p

    params = SamplingParams(temperature=1.5, top_p=0.9, bottom_p=0.9, max_tokens=10, seed=2)
    rollouts = Engine(llama).generate(prompts(), 2, params)
    check_records(llama, rollouts, temperature=1.5)
    for rollout in rollouts:
        logits = forced(llama, rollouts.prompt_ids[rollout.prompt_index], rollout.token_ids).float() / 1.5
        warped = warp_bottom_p(warp_top_p(logits, 0.9), 0.9).log_softmax(-1)
        want = warped.gather(1, torch.tensor(rollout.token_ids)[:, None])[:, 0]
        torch.testing.assert_close(rollout.sampling_logps, want, atol=1e-4, rtol=0)


# Scheduling


@pytest.mark.usefixtures("place")
def test_batch_size_changes_no_token(llama: Any) -> None:
    ids = prompts((4, 11, 1, 20))
    warped = SamplingParams(
        temperature=[0.7, 1.0, 2.0, 0.0], top_p=0.95, bottom_p=0.95, bottom_p_frequency=0.5, max_tokens=12, seed=9
    )
    for params in (TINY, warped):
        runs = [Engine(llama, batch_size=size).generate(ids, 3, params) for size in (1, 5, 64)]
        assert same_tokens(runs[0], runs[1])
        assert same_tokens(runs[0], runs[2])
        assert [(r.prompt_index, r.sample_index) for r in runs[1]] == [(i, j) for i in range(4) for j in range(3)]
        assert same_tokens(runs[1], Engine(llama, batch_size=5).generate(ids, 3, params))
    assert not same_tokens(runs[0], Engine(llama).generate(ids, 3, replace(params, seed=10)))


def test_one_value_a_row_does_what_the_scalar_does(llama: Any) -> None:
    ids = prompts((6, 6, 6))
    per_row = Engine(llama).generate(
        ids, 2, SamplingParams(temperature=[0.5, 1.0, 2.0], top_k=[0, 3, 0], max_tokens=[5, 9, 5, 9, 5, 9], seed=3)
    )
    for i, (temperature, top_k) in enumerate([(0.5, 0), (1.0, 3), (2.0, 0)]):
        scalar = Engine(llama).generate(
            ids, 2, SamplingParams(temperature=temperature, top_k=top_k, max_tokens=9, seed=3)
        )
        for j, limit in enumerate((5, 9)):
            assert per_row[2 * i + j].token_ids == scalar[2 * i + j].token_ids[:limit]


def test_rows_are_refilled_and_the_order_is_kept(llama: Any, place: str) -> None:
    ids = prompts((3, 8, 5, 2))
    limits = [1, 17, 2, 9, 30, 1, 1, 4, 12, 3, 8, 25]
    finished: list[Rollout] = []
    params = SamplingParams(max_tokens=limits, stop_token_ids=(), seed=1)
    engine = Engine(llama, batch_size=3)
    rollouts = engine.generate(ids, 3, params, on_finish=finished.append)
    assert [len(r) for r in rollouts] == limits
    assert [r.request for r in rollouts] == list(range(12))
    assert {r.finish_reason for r in rollouts} == {"length"}
    assert finished[0].request in ((1,) if place == "pages" else (0, 2))  # of 4, 11 and 1, the longest, or of 0, 1, 2
    assert sorted(r.request for r in finished) == list(range(12))
    assert [r.request for r in finished] != list(range(12))
    assert same_tokens(rollouts, Engine(llama).generate(ids, 3, params))
    check_records(llama, rollouts)


@pytest.mark.usefixtures("place")
def test_equal_prompts_are_computed_once(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from explorl.rollout.runner import Runner

    computed: list[int] = []
    original = Runner.prefill

    def counting(self: Runner, entries: Any, ids: Any) -> None:
        computed.append(len(ids))
        original(self, entries, ids)

    monkeypatch.setattr(Runner, "prefill", counting)
    ids = prompts((6, 9))
    repeated = Engine(llama).generate([ids[0], ids[0], ids[1], ids[0]], 1, TINY)
    assert sum(computed) == 2
    check_records(llama, repeated)
    computed.clear()
    check_records(llama, Engine(llama, batch_size=1).generate([ids[0], ids[1], ids[0]], 2, TINY))
    assert sum(computed) <= 3


@pytest.mark.usefixtures("place")
def test_the_engine_is_used_again(llama: Any) -> None:
    engine = Engine(llama)
    first = engine.generate(prompts(), 2, TINY)
    runner = engine._runner
    engine.generate(prompts((2, 4), seed=8), 1, SamplingParams(max_tokens=5, seed=1, repetition_penalty=1.2))
    assert engine._runner is runner  # smaller calls use the same memory
    assert same_tokens(first, engine.generate(prompts(), 2, TINY))
    engine.generate(prompts((60,)), 2, SamplingParams(max_tokens=40))
    assert engine._runner is not runner
    engine.release()
    assert same_tokens(first, engine.generate(prompts(), 2, TINY))


@pytest.mark.usefixtures("place")
def test_what_an_engine_did_before_changes_no_bit(llama: Any) -> None:
    """A resumed run has an engine that has seen nothing."""
    short = [ids[:6] for ids in prompts()]
    fresh = Engine(llama).generate(short, 3, TINY)
    used = Engine(llama)
    used.generate(prompts(), 5, replace(TINY, max_tokens=17))
    again = used.generate(short, 3, TINY)
    assert used._runner is not None
    assert used._runner.plan.prompt_tokens > 6
    for one, other in zip(fresh, again, strict=True):
        assert one.token_ids == other.token_ids
        assert torch.equal(one.logps, other.logps)
        assert torch.equal(one.entropy, other.entropy)


def test_any_whole_number_is_a_seed(llama: Any) -> None:
    engine = Engine(llama)
    for seed in (np.int64(3), np.uint64(2**63 + 5), torch.tensor(3)):
        rollouts = [engine.generate(prompts((4,)), 2, replace(TINY, seed=same)) for same in (seed, int(seed))]
        assert same_tokens(*rollouts)


def test_a_seed_of_none_follows_torch(llama: Any) -> None:
    engine = Engine(llama)
    torch.manual_seed(4)
    first, second = (engine.generate(prompts(), 1, SamplingParams(max_tokens=8)) for _ in range(2))
    torch.manual_seed(4)
    third = engine.generate(prompts(), 1, SamplingParams(max_tokens=8))
    assert same_tokens(first, third)
    assert not same_tokens(first, second)
    assert first.seed == third.seed


def test_rows_and_lengths_of_graphs(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What surrounds CUDA graphs: buckets, several steps between two looks, moves to a smaller bucket."""
    from explorl.rollout import runner as module
    from explorl.rollout import scheduler as scheduler
    from explorl.rollout.memory.cache import Layout

    class Replay:
        def __init__(self, step: Any) -> None:
            self.replay = step

    captured: list[tuple[int, int]] = []

    def capture(self: Any, rows: int, length: int, active: Any) -> Replay:
        captured.append((rows, length))
        return Replay(lambda: self._step(Layout(rows, rows, length), length, False, active))

    limits = [1, 17, 2, 9, 30, 1, 1, 4, 12, 3, 8, 25]
    params = SamplingParams(max_tokens=limits, stop_token_ids=(), seed=1)
    ids = prompts((3, 8, 5, 2))
    want = Engine(llama).generate(ids, 3, params)
    monkeypatch.setattr(module.Runner, "_capture", capture)
    monkeypatch.setattr(module, "LENGTH_BUCKET", 8)
    monkeypatch.setitem(scheduler.SYNC_STEPS, "cpu", 4)
    monkeypatch.setattr("explorl.rollout.memory_plan.SPANS", ())
    engine = Engine(llama, batch_size=7)
    engine.generate(ids, 3, params)
    assert engine._runner is not None
    engine._runner.use_graphs = True
    assert same_tokens(engine.generate(ids, 3, params), want)
    assert {rows for rows, _ in captured} == {7, 4, 2, 1}
    assert {length for _, length in captured} <= {16, 24, 32, 40}
    assert len(captured) == len(set(captured))


# Stopping, text


def test_stop_tokens(llama: Any) -> None:
    free = Engine(llama).generate(prompts(), 2, SamplingParams(max_tokens=20, stop_token_ids=(), seed=1))
    assert all(len(r) == 20 for r in free)
    chosen = [free[0].token_ids[4], free[3].token_ids[7], *range(80, 90)]
    stopped = Engine(llama).generate(prompts(), 2, SamplingParams(max_tokens=20, stop_token_ids=chosen, seed=1))
    for long, short in zip(free, stopped, strict=True):
        first = next((i for i, token in enumerate(long.token_ids) if token in chosen), None)
        assert short.token_ids == long.token_ids[: None if first is None else first + 1]
        assert short.finish_reason == ("length" if first is None else "stop")


@pytest.mark.parametrize("batch_size", [3, 64])
def test_stop_strings(policy: Any, tokenizer: Any, batch_size: int) -> None:
    ids = ["3 + 4 =", "a", "<think>"]
    free = Engine(policy, tokenizer).generate(ids, 6, SamplingParams(max_tokens=40, seed=1, stop_token_ids=()))
    pieces = [tokenizer.decode(rollout.token_ids[i : i + 3]) for rollout, i in ((free[0], 9), (free[5], 14))]
    stops = (pieces[0][:-1], pieces[1][1:], "never in it")
    stopped = Engine(policy, tokenizer, batch_size=batch_size).generate(
        ids, 6, SamplingParams(max_tokens=40, seed=1, stop_token_ids=(), stop=stops)
    )
    hits = 0
    for long, short in zip(free, stopped, strict=True):
        texts = [tokenizer.decode(long.token_ids[:end]) for end in range(41)]
        end = next((end for end, text in enumerate(texts) if any(stop in text for stop in stops)), None)
        assert short.token_ids == long.token_ids[:end]
        assert short.finish_reason == ("length" if end is None else "stop")
        assert len(short.logps) == len(short.token_ids)
        hits += end is not None
    assert hits >= 2


def test_prompts_of_every_kind(policy: Any, tokenizer: Any) -> None:
    engine = Engine(policy, tokenizer)
    text = "1 + 2"
    ids = tokenizer(text)["input_ids"]
    by_text, by_ids = engine.generate([text], 2, TINY), engine.generate([ids], 2, TINY)
    assert same_tokens(by_text, by_ids)
    assert by_text.texts == [tokenizer.decode(r.token_ids, skip_special_tokens=True) for r in by_ids]
    prefixed = engine.generate([text], 2, SamplingParams(max_tokens=12, seed=5, prefix="<think>"))
    assert prefixed.prompt_ids == [ids + tokenizer("<think>")["input_ids"]]
    assert same_tokens(prefixed, engine.generate([text + "<think>"], 2, TINY))
    turns = "{% for m in messages %}{{ m.role }}:{{ m.content }}\n{% endfor %}"
    tokenizer.chat_template = turns + "{% if add_generation_prompt %}a:{% endif %}"
    try:
        chat = engine.generate([[{"role": "u", "content": text}]], 1, TINY)
    finally:
        tokenizer.chat_template = None
    assert tokenizer.decode(chat.prompt_ids[0]) == "u:1 + 2\na:"


def test_rollouts_as_tensors(llama: Any) -> None:
    rollouts = Engine(llama).generate(prompts(), 2, SamplingParams(max_tokens=[3, 6, 4, 1, 9], stop_token_ids=()))
    padded = rollouts.padded(pad_token_id=0)
    assert padded.token_ids.shape == padded.logps.shape == padded.branching.shape == (10, 9)
    assert padded.mask.sum(-1).tolist() == [3, 3, 6, 6, 4, 4, 1, 1, 9, 9]
    assert padded.prompt_index.tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    assert bool(padded.truncated.all())
    assert not padded.logps[~padded.mask].any()
    assert [len(group) for group in rollouts.by_prompt()] == [2] * 5
    assert rollouts.by_prompt()[3][1] is rollouts[7]
    assert rollouts.tokens == 46
    assert rollouts[0].text == ""


def test_rollouts_are_stored_in_as_much_as_they_hold(llama: Any) -> None:
    """Their tensors are parts of those of a batch, which pickle would store whole with each of them."""
    rollouts = Engine(llama).generate(prompts((3,)), 64, SamplingParams(max_tokens=32, stop_token_ids=(), seed=1))
    stored = pickle.dumps(rollouts)
    assert len(stored) < 64 * (32 * 40 + 4000)
    for one, same in zip(rollouts, pickle.loads(stored), strict=True):
        assert one.token_ids == same.token_ids
        assert torch.equal(one.logps, same.logps)


# Errors


@pytest.mark.parametrize(
    ("ids", "n", "message"),
    [
        ([[5, 6], []], 1, "prompt 1 is empty"),
        ([[5] * 200], 1, "200 tokens, but the model's context is 128"),
        ([[5]], 0, "n is 0"),
        ([], 1, "prompts is empty"),
        ([[5, VOCAB]], 1, f"token id {VOCAB}; the model has ids from 0 to {VOCAB - 1}"),
        ([[5, -1]], 1, "token id -1"),
        (["text"], 1, "no tokenizer"),
        ([[5, 6.5]], 1, "prompt 0 contains 6.5; use token ids such as 13"),
        ([torch.tensor([5.0])], 1, "prompt 0 contains 5.0"),
        ([[5], [True]], 1, "prompt 1 contains True"),
        ([["2 + 2 ="]], 1, "prompt 0 contains '2 \\+ 2 ='"),
        ([5, 6], 1, "prompt 0 is 5; use a text, token ids or chat messages, such as"),
        ([[5], None], 1, "prompt 1 is None"),
        ([b"ab"], 1, "prompt 0 is b'ab'"),
        (torch.tensor([5, 6]), 1, "prompt 0 is tensor"),
        ([{"input_ids": [5]}], 1, "prompt 0 is {'input_ids'"),
        ({"input_ids": [[5]]}, 1, "prompts is {'input_ids': .*; give a list such as"),
        ((ids for ids in [[5]]), 1, "prompts is <generator"),
        ([[5]], 1.5, "n is 1.5; ask for at least 1"),
        ([[5]], None, "n is None"),
        ([[5]], True, "n is True"),
    ],
)
def test_bad_input_is_refused_before_anything_runs(llama: Any, ids: Any, n: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Engine(llama).generate(ids, n, TINY)


def test_bad_settings(llama: Any) -> None:
    with pytest.raises(ValueError, match="batch_size is 0"):
        Engine(llama, batch_size=0)
    with pytest.raises(ValueError, match="memory_budget is -1"):
        Engine(llama, memory_budget=-1)
    with pytest.raises(ValueError, match=r"batch_size is 2.5; use at least 1"):
        Engine(llama, batch_size=2.5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="memory_budget is '4GB'; give bytes"):
        Engine(llama, memory_budget="4GB")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"dtype is 'bfloat16'; use torch.bfloat16"):
        Engine(llama, dtype="bfloat16")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"dtype is torch.int8"):
        Engine(llama, dtype=torch.int8)
    with pytest.raises(ValueError, match="model is 'gpt2'; give the model itself"):
        Engine("gpt2")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"model is a DataParallel; give the transformers model"):
        Engine(torch.nn.DataParallel(llama))
    with pytest.raises(ValueError, match=r"params is {'max_tokens': 2}; give SamplingParams"):
        Engine(llama).generate(prompts(), 1, {"max_tokens": 2})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="CUDA device"):
        Engine(llama, use_graphs=True).generate(prompts(), 1, TINY)
    with pytest.raises(ValueError, match="no tokenizer; use stop_token_ids"):
        Engine(llama).generate(prompts(), 1, SamplingParams(stop="x"))
    with pytest.raises(ValueError, match="stop token 500"):
        Engine(llama).generate(prompts(), 1, SamplingParams(stop_token_ids=[500]))


def test_max_tokens_beyond_the_context_is_shortened(llama: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        params = SamplingParams(max_tokens=50, stop_token_ids=())
        rollouts = Engine(llama).generate([[5] * 100, [6] * 10], 1, params)
    assert [len(r) for r in rollouts] == [28, 50]
    assert "max_tokens of 1 of 2 requests" in caplog.text


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize("batch_size", [2, *(pytest.param(size, marks=pytest.mark.slow) for size in (5, 64))])
def test_nan_logits_break_only_their_request(batch_size: int, caplog: pytest.LogCaptureFixture) -> None:
    params = SamplingParams(max_tokens=16, stop_token_ids=(), seed=4)
    healthy = shared("llama")
    want = Engine(healthy).generate(prompts(), 4, params)
    poison = want[6].token_ids[3]
    broken = build("llama")
    with torch.no_grad():
        broken.model.embed_tokens.weight[poison] = torch.nan
    engine = Engine(broken, batch_size=batch_size)
    rollouts = engine.generate(prompts(), 4, params)
    assert rollouts.errors
    for good, rollout in zip(want, rollouts, strict=True):
        poisoned = poison in rollouts.prompt_ids[rollout.prompt_index]
        length = 0 if poisoned else next((i for i, t in enumerate(good.token_ids[:-1]) if t == poison), 15) + 1
        assert rollout.token_ids == good.token_ids[:length]
        if length < 16:
            assert rollout.finish_reason == "error"
            assert f"step {length} of request {rollout.request} (prompt {rollout.prompt_index}" in rollout.error
            assert rollout.error in caplog.text
    with pytest.raises(RuntimeError, match="not finite"):
        rollouts.check()
    with torch.no_grad():
        broken.model.embed_tokens.weight[poison] = healthy.model.embed_tokens.weight[poison]
    assert same_tokens(engine.generate(prompts(), 4, params).check(), want)


@pytest.mark.parametrize("p", [0.9, 0.3])
def test_bottom_p_alone_draws_what_it_draws_in_company(p: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the likeliest token is too heavy to be cut nothing is warped; with `_cuts` always true, everything is."""
    from explorl.rollout.sampling import sample as sampler

    model = shared("llama")
    params = SamplingParams(bottom_p=p, max_tokens=12, seed=4, stop_token_ids=())
    found = Engine(model).generate(prompts(), 4, params)
    monkeypatch.setattr(sampler, "_cuts", lambda *_: True)
    expected = Engine(model).generate(prompts(), 4, params)
    assert [r.token_ids for r in found] == [r.token_ids for r in expected]
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.sampling_logps, other.sampling_logps, rtol=1e-5, atol=1e-5)
