"""Decoding ahead of the host's looks: the same tokens and records, whoever ends, waits, gives way or breaks."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from explorl.rollout import Engine, Rollout, SamplingParams, memory_plan
from explorl.rollout import scheduler as scheduler
from explorl.rollout.memory.page_memory import PageMemory
from explorl.rollout.readback import FINE_ABOVE, MAX_STEPS, Download, graph_size, graph_sizes, steps_until_readback
from explorl.rollout.runner import Runner
from explorl.rollout.scheduler import Scheduler
from explorl.rollout.state import upload

from .models import build, prompts
from .test_pages import tight

LIMITS = SamplingParams(max_tokens=[3, 21, 8, 30, 1, 17] * 2, stop_token_ids=(), seed=3)
STOPS = SamplingParams(max_tokens=40, stop_token_ids=list(range(3, 9)), seed=3)
IDS = prompts((5, 17, 1, 9))


@pytest.fixture(autouse=True)
def pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, but for the GPU."""
    monkeypatch.setattr(memory_plan, "SPANS", ())
    monkeypatch.setitem(memory_plan.PAGE, "cpu", 4)
    monkeypatch.setitem(scheduler.SYNC_STEPS, "cpu", 8)
    monkeypatch.setitem(scheduler.AHEAD, "cpu", True)


def facts(rollout: Rollout) -> tuple[Any, ...]:
    floats = [tuple(values.tolist()) for values in (rollout.logps, rollout.sampling_logps, rollout.entropy)]
    return (
        rollout.request,
        tuple(rollout.token_ids),
        rollout.finish_reason,
        tuple(rollout.branching.tolist()),
        tuple(rollout.sampled.tolist()),
        *floats,
    )


def close(first: Any, second: Any) -> None:
    """The same tokens, and records but for the last bits: rows have had other company."""
    for a, b in zip(first, second, strict=True):
        assert facts(a)[:5] == facts(b)[:5]
        for name in ("logps", "sampling_logps", "entropy"):
            torch.testing.assert_close(getattr(a, name), getattr(b, name), atol=2e-5, rtol=0)


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The order in which steps begin and looks are taken."""
    events: list[str] = []
    run, collect = Runner.run, Scheduler._collect

    def noted_run(self: Any, *args: Any) -> None:
        events.append("run")
        run(self, *args)

    def noted_collect(self: Any, *args: Any) -> None:
        events.append("look")
        collect(self, *args)

    monkeypatch.setattr(Runner, "run", noted_run)
    monkeypatch.setattr(Scheduler, "_collect", noted_collect)
    return events


@pytest.mark.parametrize("params", [LIMITS, STOPS], ids=["limits", "stops"])
@pytest.mark.parametrize("batch_size", [None, 3])
def test_ahead_or_not_is_the_same(
    llama: Any, params: SamplingParams, batch_size: int | None, monkeypatch: pytest.MonkeyPatch, begun: list[str]
) -> None:
    Engine(llama).check(60)
    begun.clear()
    ahead = Engine(llama, batch_size=batch_size).generate(IDS, 3, params)
    assert begun[:3] == ["run", "run", "look"]  # the second steps begin before the first look
    begun.clear()
    monkeypatch.setitem(scheduler.AHEAD, "cpu", False)
    behind = Engine(llama, batch_size=batch_size).generate(IDS, 3, params)
    assert begun[:3] == ["run", "look", "run"]
    close(ahead, behind)


def test_two_runs_are_the_same_to_the_last_bit(llama: Any) -> None:
    engine = Engine(llama, batch_size=5)
    first = engine.generate(IDS, 3, STOPS)
    engine.generate(prompts((4, 2)), 2, SamplingParams(max_tokens=9, seed=1))
    assert [facts(r) for r in engine.generate(IDS, 3, STOPS)] == [facts(r) for r in first]


def test_no_steps_are_begun_that_nobody_can_need(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[int] = []
    run = Runner.run

    def counting(self: Any, layout: Any, even: bool, count: int, active: Any) -> None:
        steps.append(count)
        run(self, layout, even, count, active)

    Engine(llama).check(60)
    monkeypatch.setattr(Runner, "run", counting)
    Engine(llama).generate(IDS, 3, LIMITS)
    assert sum(steps) == 30  # the longest limit


def test_rows_give_way_ahead_of_looks(llama: Any, caplog: pytest.LogCaptureFixture) -> None:
    params = replace(STOPS, max_tokens=24, seed=0)
    engine = tight(llama, IDS, 3, params, 0.3)
    with caplog.at_level(logging.INFO, "explorl.rollout.scheduler"):
        rollouts = engine.generate(IDS, 3, params)
    assert any("evicting" in record.msg for record in caplog.records)
    close(rollouts, Engine(llama).generate(IDS, 3, params))


def test_all_may_have_ended_when_memory_is_short(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The look that is taken because there are no pages left finds that nobody goes on."""
    params = SamplingParams(
        max_tokens=16, stop_token_ids=list(range(97)), seed=0
    )  # every row ends with its first token
    want = Engine(llama).generate(IDS[:2], 1, params)
    ready = PageMemory.reserve

    def short(self: Any, slots: Any, tokens: Any) -> bool:
        after_a_step = len(slots) > 0 and bool((self.page_counts[slots] > 0).all()) and int(tokens.max()) > 20
        return False if after_a_step else ready(self, slots, tokens)

    monkeypatch.setattr(PageMemory, "reserve", short)
    close(Engine(llama).generate(IDS[:2], 1, params), want)


def test_ended_rows_are_reported_once_and_in_full(llama: Any) -> None:
    seen: list[Rollout] = []
    rollouts = Engine(llama, batch_size=4).generate(IDS, 3, STOPS, on_finish=seen.append)
    assert sorted(map(facts, seen)) == [facts(r) for r in rollouts]


def test_a_callback_that_raises_loses_nothing(llama: Any) -> None:
    session = Engine(llama, batch_size=4).open(IDS, 3, STOPS)

    def fail(_: Rollout) -> None:
        raise RuntimeError("mine")

    session._on_finish = fail
    with pytest.raises(RuntimeError, match="mine"):
        session.run()
    session._on_finish = None
    session.run()
    close(session.finished(), Engine(llama, batch_size=4).generate(IDS, 3, STOPS))


def test_broken_rows_end_alone(llama: Any) -> None:
    model = build("llama")
    with torch.no_grad():
        model.model.embed_tokens.weight[50] = torch.nan
    rollouts = Engine(model).generate([[5, 50], [5, 6, 7], [9]], 2, SamplingParams(max_tokens=12, seed=1))
    assert [r.finish_reason == "error" for r in rollouts[:2]] == [True, True]
    assert "at step 0 of request 1" in rollouts[1].error


def test_rows_go_on_after_a_run_ahead(llama: Any) -> None:
    params = SamplingParams(temperature=0, max_tokens=9, stop_token_ids=())
    session = Engine(llama).open(IDS, 1, params)
    session.run()
    for row in range(4):
        session.extend(row, [], max_tokens=20)
    session.run()
    want = Engine(llama).generate(IDS, 1, SamplingParams(temperature=0, max_tokens=20, stop_token_ids=()))
    assert [r.token_ids for r in session.finished()] == [r.token_ids for r in want]


# Who goes first


def test_the_highest_limits_go_first(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[int] = []
    start = Scheduler._start

    def noted(self: Any, seats: Any, samples: Any) -> None:
        order.extend(sample.index for sample in samples)
        start(self, seats, samples)

    Engine(llama).check(60)
    monkeypatch.setattr(Scheduler, "_start", noted)
    limits = [4, 9, 2, 30, 9, 9]
    Engine(llama, batch_size=2).generate(prompts((4, 5, 6)), 2, SamplingParams(max_tokens=limits, stop_token_ids=()))
    assert order == [3, 1, 4, 5, 0, 2]


# When to look


def test_graphs_for_every_number_of_rows() -> None:
    assert graph_sizes(512) == (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512)
    assert graph_sizes(7) == (1, 2, 4, 7)
    assert graph_sizes(1) == (1,)
    assert graph_sizes(100) == (1, 2, 4, 8, 16, 32, 64, 96, 100)
    for slots in (1, 5, 64, 70, 100, 512, 1000, 1024):
        for rows in range(1, slots + 1):
            size = graph_size(rows, slots)
            assert rows <= size <= slots
            assert size <= (2 * rows if rows <= FINE_ABOVE else 1.5 * rows + 1)


def test_looks_come_when_something_has_ended() -> None:
    rng = np.random.default_rng(0)
    for trial in range(300):
        slots = int(rng.integers(1, 300))
        rows = int(rng.integers(1, slots + 1))
        remaining = rng.integers(0, 60, rows)
        remaining[0] = max(1, remaining[0])
        waiting = bool(trial % 2)
        steps = steps_until_readback(remaining, rows, slots, patience=4, certain=True, waiting=waiting)
        assert 1 <= steps <= min(MAX_STEPS, remaining.max())
        assert steps_until_readback(remaining, rows, slots, patience=4, certain=False, waiting=waiting) == min(
            4, remaining.max()
        )
        if steps == remaining.max():
            continue
        alive = (remaining > 0).sum()
        before, after = ((remaining > s).sum() for s in (steps - 1, steps))
        if waiting:  # somebody has ended, and nobody long before
            assert after < alive or steps == MAX_STEPS
            assert steps == 4 or before == alive
        else:
            assert graph_size(max(1, after), slots) < graph_size(rows, slots) or steps == MAX_STEPS or rows == 1
            assert steps == 4 or graph_size(max(1, before), slots) == graph_size(rows, slots)


# Transfers


def test_a_download_is_what_was_there_when_it_began() -> None:
    values = torch.arange(6).view(2, 3)
    download = Download(values[:, 1:], values[0])
    values += 10
    first, second = download.wait()
    assert first.tolist() == [[1, 2], [4, 5]]
    assert second.tolist() == [0, 1, 2]
    assert upload(np.arange(3), torch.device("cpu")).tolist() == [0, 1, 2]
