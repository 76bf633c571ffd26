"""Samples with the same tokens share a row."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from explorl.rollout import Engine, SamplingParams, memory_plan
from explorl.rollout.memory.span_memory import SharedRows
from explorl.rollout.runner import Runner

from .models import prompts
from .test_engine import check_records, same_tokens


def test_slots_of_a_prompt_start_in_one_row_and_split() -> None:
    rows = SharedRows(8)
    rows.start(np.arange(6), np.array([4, 4, 4, 7, 7, 4]))
    assert rows.row.tolist() == [0, 0, 0, 1, 1, 0, -1, -1]
    layout = rows.layout()
    assert (layout.rows, layout.slots) == (2, 6)
    assert rows.split(np.full(8, 50), 100) is None
    moves = rows.split(np.array([50, 60, 50, 50, 51, 60, 0, 0]), 100)
    assert moves is not None
    assert [m.tolist() for m in moves] == [[0, 1], [2, 3]]
    assert rows.row.tolist() == [0, 2, 0, 1, 3, 2, -1, -1]
    assert rows.entry.tolist() == [4, 7, 4, 7, -1, -1, -1, -1]
    rows.evict(np.array([3, 0]))
    assert rows.entry.tolist() == [4, -1, 4, 7, -1, -1, -1, -1]
    assert rows.holes() == 1
    moves = rows.compact()
    assert moves is not None
    assert [m.tolist() for m in moves] == [[3], [1]]
    assert rows.row.tolist() == [-1, 2, 0, -1, 1, 2, -1, -1]
    layout = rows.layout()
    assert layout.lead is not None
    assert layout.row_of is not None
    assert [int(rows.row[slot]) for slot in layout.lead] == [0, 1, 2]
    assert layout.row_of.tolist() == [0, 2, 0, 0, 1, 2]


@pytest.mark.parametrize("batch_size", [5, 64])
def test_sharing_changes_no_token_and_saves_rows(llama: Any, monkeypatch: pytest.MonkeyPatch, batch_size: int) -> None:
    params = SamplingParams(
        temperature=[0.3, 0.0, 0.5, 1.0], max_tokens=[3, 14, 9, 14, 6, 14, 14, 2] * 4, stop_token_ids=(), seed=2
    )
    ids = prompts((4, 9, 1, 6))
    decoded: list[tuple[int, int]] = []
    original = Runner._step

    def counting(self: Runner, layout: Any, *args: Any) -> None:
        decoded.append((layout.rows, layout.slots))
        original(self, layout, *args)

    Engine(llama).check(32)  # tries the engine out, which decodes too
    monkeypatch.setattr(Runner, "_step", counting)
    shared = Engine(llama, batch_size=batch_size).generate(ids, 8, params)
    rows = sum(rows for rows, _ in decoded)
    slots = sum(slots for _, slots in decoded)
    assert rows < 0.95 * slots
    monkeypatch.setattr(memory_plan, "SPANS", ())  # pages are shared, rows with pages are not
    decoded.clear()
    alone = Engine(llama, batch_size=batch_size).generate(ids, 8, params)
    assert same_tokens(shared, alone)
    assert all(rows == slots for rows, slots in decoded)
    assert sum(rows for rows, _ in decoded) > rows
    check_records(llama, [shared[i] for i in range(24, 32)], prompt_ids=shared.prompt_ids)


def test_equal_samples_of_a_greedy_policy_are_computed_once(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    decoded: list[int] = []
    original = Runner._step

    def counting(self: Runner, layout: Any, *args: Any) -> None:
        decoded.append(layout.rows)
        original(self, layout, *args)

    Engine(llama).check(32)  # tries the engine out, which decodes too
    monkeypatch.setattr(Runner, "_step", counting)
    rollouts = Engine(llama).generate(
        prompts((5, 3)), 16, SamplingParams(temperature=0, max_tokens=9, stop_token_ids=())
    )
    assert set(decoded) == {2}
    assert len({tuple(r.token_ids) for r in rollouts}) == 2
