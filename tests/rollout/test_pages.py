"""Pages: ownership, memory that grows with the tokens, and eviction when there are not enough."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from explorl.rollout import Engine, SamplingParams, memory_plan
from explorl.rollout.memory.page_memory import PageMemory
from explorl.rollout.memory.pages import RESERVED_PAGES, pages_for
from explorl.rollout.memory_plan import MemoryNeeds
from explorl.rollout.sampling import Active

from .models import GQA, prompts
from .test_engine import check_records, same_tokens
from .test_session import all_alone

TOKEN_BYTES = GQA["num_hidden_layers"] * 2 * 2 * 12 * 4
PARAMS = SamplingParams(max_tokens=24, stop_token_ids=(), seed=3)


@pytest.fixture(autouse=True)
def small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_plan, "SPANS", ())
    monkeypatch.setitem(memory_plan.PAGE, "cpu", 4)


def memory_of(session: Any) -> PageMemory:
    memory = session._scheduler.memory
    assert isinstance(memory, PageMemory)
    return memory


def used(memory: PageMemory) -> int:
    assert ((memory.refs > 0).sum() + len(memory.free)) == memory.cache.pages - RESERVED_PAGES
    assert not memory.refs[memory.free].any()
    assert memory.free_count == len(memory.free)
    assert not memory.refs[:RESERVED_PAGES].any()
    return int((memory.refs > 0).sum())


def tight(model: Any, ids: Any, n: int, params: SamplingParams, share: float) -> Engine:
    """An engine whose budget is just enough for a share of the pages that these requests can need."""
    needs = MemoryNeeds(len(ids) * n, len(ids), max(map(len, ids)), int(params.max_tokens))  # type: ignore[arg-type]
    engine = Engine(model)
    engine.prepare(Active(), needs)
    assert engine.plan is not None
    most, engine.memory_budget = engine.plan.pages, engine.plan.bytes
    while engine.plan.pages > most * share:
        engine.memory_budget -= 16 * TOKEN_BYTES
        engine.release()
        engine.prepare(Active(), needs)
    engine.release()
    return engine


@pytest.mark.parametrize("share", [0.3, 0.6])
def test_rows_give_way_and_are_computed_again(llama: Any, share: float, caplog: pytest.LogCaptureFixture) -> None:
    ids = prompts((5, 17, 1, 9))
    want = Engine(llama).generate(ids, 3, PARAMS)
    engine = tight(llama, ids, 3, PARAMS, share)
    with caplog.at_level(logging.INFO, "explorl"):
        rollouts = engine.generate(ids, 3, PARAMS)
    assert engine.plan is not None
    assert engine.plan.split
    assert same_tokens(rollouts, want)
    check_records(llama, rollouts)
    gave_way = [int(r.args[0]) for r in caplog.records if "evicting" in r.msg]  # type: ignore[index, arg-type]
    assert gave_way
    assert 0 not in gave_way  # the oldest goes first


def test_continuations_and_forks_in_little_memory(llama: Any) -> None:
    ids = prompts((5, 17, 9))
    params = SamplingParams(temperature=0, max_tokens=8, stop_token_ids=())
    engine = tight(llama, ids, 1, SamplingParams(temperature=0, max_tokens=30, stop_token_ids=()), 0.45)
    with engine.open(ids, 1, params) as session:
        session.run()
        for row in range(3):
            session.extend(row, [7, 8, 9], max_tokens=24)
        forks = [session.fork(row, 2, at=10)[1] for row in range(3)]
        session.run()
        used(memory_of(session))
        heads = [[*session.rollout(row).token_ids[:8], 7, 8, 9] for row in range(3)]
        ends = all_alone(llama, [[*p, *h] for p, h in zip(ids, heads, strict=True)], 13)
        for row in range(3):
            assert session.rollout(row).token_ids == [*heads[row], *ends[row]]
        ends = all_alone(llama, [[*p, *h[:10]] for p, h in zip(ids, heads, strict=True)], 14)
        for row, fork in enumerate(forks):
            assert session.rollout(fork).token_ids == [*heads[row][:10], *ends[row]]


def test_memory_follows_the_tokens(llama: Any) -> None:
    (prompt,) = prompts((11,))
    session = Engine(llama).open([prompt], 4, SamplingParams(max_tokens=40, stop_token_ids=(), seed=1))
    session.step(tokens=1)
    memory = memory_of(session)
    # 10 stored tokens: two full pages are shared, the third has been copied for each row.
    assert used(memory) == 3 + 4
    session.step(tokens=9)
    assert used(memory) == 3 + 4 * (pages_for(20, 4) - 2)
    forks = session.fork(0, 5)
    session.step(tokens=1)
    assert used(memory) == 3 + 4 * (pages_for(21, 4) - 2) + 5 * (pages_for(21, 4) - 20 // 4)
    for row in (*range(4), *forks):
        session.cancel(row)
    assert used(memory) == 3
    session.close()
    assert used(memory) == 0


def test_pages_of_rows_that_ended_are_taken_back(llama: Any) -> None:
    ids = prompts((9, 6, 7, 5, 4, 8))
    params = SamplingParams(temperature=0, max_tokens=12, stop_token_ids=())
    engine = tight(llama, ids, 1, params, 0.5)
    session = engine.open(ids, 1, params)
    session.run()
    kept = [sample.saved_kv is not None for sample in session._sequences]
    assert not all(kept)
    assert any(kept)
    for row in range(6):
        session.extend(row, [], max_tokens=18)
    session.run()
    assert [r.token_ids for r in session.finished()] == all_alone(llama, ids, 18)


def test_a_row_that_fits_alone_is_never_refused(llama: Any) -> None:
    ids = prompts((17, 9))
    engine = tight(llama, ids[:1], 1, PARAMS, 1.0)
    assert engine.memory_budget is not None
    rollouts = engine.generate(ids, 4, PARAMS)
    assert same_tokens(rollouts, Engine(llama).generate(ids, 4, PARAMS))


def test_broken_rows_leave_no_nan_behind(llama: Any) -> None:
    from .models import build

    model = build("llama")
    with torch.no_grad():
        model.model.embed_tokens.weight[50] = torch.nan
    engine = Engine(model, batch_size=2)
    session = engine.open([[5, 50, 7, 8, 9, 10]] * 2 + [[5, 6, 7]] * 4, 1, PARAMS)
    session.run()
    memory = memory_of(session)
    session.close()
    assert not memory.spoiled
    for block in memory.cache.blocks:
        assert not block[:, RESERVED_PAGES:].isnan().any()


def test_a_little_more_memory_is_no_reason_to_start_over() -> None:
    sizes = {"tokens": 64, "prompt_tokens": 16, "prefill_tokens": 64, "cache_bytes": 0, "prompt_bytes": 0}
    sizes |= {"work_bytes": 0, "page": 16, "slot_pages": 5}
    have = memory_plan.Plan(slots=30, pages=95, split=True, **sizes)
    assert have.covers(memory_plan.Plan(slots=32, pages=100, split=True, **sizes))
    assert not have.covers(memory_plan.Plan(slots=30, pages=110, split=True, **sizes))
    assert not have.covers(memory_plan.Plan(slots=40, pages=95, split=True, **sizes))
    assert not have.covers(memory_plan.Plan(slots=30, pages=96, split=False, **sizes))
    assert not have.covers(memory_plan.Plan(slots=30, pages=95, split=True, **{**sizes, "page": 8}))
    assert not have.covers(memory_plan.Plan(slots=30, pages=95, split=True, **{**sizes, "tokens": 65}))
