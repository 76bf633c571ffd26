"""Micro-batches of equal tokens, without rows that have no gradient: same gradient, same log."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from explorl.training.grpo.trainer import ExplorationTrainer
from explorl.training.micro_batches import make_micro_batches, split_by_tokens
from tests.training.test_invariance import Gradients


def test_a_case_worked_by_hand() -> None:
    # 40 tokens for two: the first row has 22 of them, and to give the second run the next row too would make 31
    assert split_by_tokens([22, 9, 1, 4, 4], 2) == [range(1), range(1, 5)]
    assert split_by_tokens([1, 1, 1, 100], 3) == [range(2), range(2, 3), range(3, 4)]


@given(st.lists(st.integers(0, 50), min_size=1, max_size=40), st.data())
def test_runs_are_whole_and_balanced(tokens: list[int], data: st.DataObject) -> None:
    parts = data.draw(st.integers(1, len(tokens)))
    runs = split_by_tokens(tokens, parts)
    assert len(runs) == parts
    assert all(len(run) > 0 for run in runs)
    assert [row for run in runs for row in run] == list(range(len(tokens)))


@given(st.lists(st.integers(1, 50), min_size=8, max_size=64))
def test_no_run_has_more_than_its_share_and_a_row(tokens: list[int]) -> None:
    runs = split_by_tokens(tokens, 2)
    loads = [sum(tokens[row] for row in run) for run in runs]
    assert max(loads) <= sum(tokens) / 2 + max(tokens) / 2 or min(len(run) for run in runs) == 1


def test_fewer_rows_than_micro_batches() -> None:
    with pytest.raises(ValueError, match="2 rows cannot be split into 3"):
        split_by_tokens([4, 4], 3)


def test_rows_of_two_optimizer_steps_are_drawn_by_chance() -> None:
    batch = {
        "completion_mask": torch.ones(16, 3),
        "row": torch.arange(16),
        "name": list(range(16)),
        "num_items_in_batch": torch.tensor(48.0),
        "nothing": None,
    }
    torch.manual_seed(0)
    micro_batches = make_micro_batches(batch, windows=2, parts=2, needed=torch.ones(16, dtype=torch.bool))
    rows = [part["row"].tolist() for part in micro_batches]
    assert [part["name"] for part in micro_batches] == rows
    assert sorted(row for part in rows for row in part) == list(range(16))
    assert sorted(rows[0] + rows[1]) != list(range(8))
    assert all(part["mean_rows"] == 4 and part["num_items_in_batch"] == 48 for part in micro_batches)
    torch.manual_seed(0)
    order = torch.randperm(16).tolist()  # TRL's, cut into four
    assert all(
        part["trl_part"].tolist() == [order.index(row) // 4 % 2 for row in part["row"].tolist()]
        for part in micro_batches
    )


def one_letter(completions: list[str], **columns: Any) -> list[float]:
    """Rewards of which the first half of the groups has none."""
    return [float(i >= len(completions) // 2 and i % 3 == 0) for i in range(len(completions))]


@pytest.mark.parametrize("loss", [pytest.param("grpo", marks=pytest.mark.slow), "dr_grpo", "dapo"])
@pytest.mark.parametrize("strategies", [[], ["egsw"]], ids=["plain", "egsw"])
def test_rows_without_advantage_are_left_out(
    make_trainer: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, loss: str, strategies: list[str]
) -> None:
    row_counts: dict[bool, int] = {}
    logs, gradients = [], []
    for leave_out in (True, False):
        recorder = Gradients()
        trainer = make_trainer(
            ExplorationTrainer, loss_type=loss, max_steps=1, optim="sgd", temperature=1.0, beta=0.0,
            per_device_train_batch_size=4, gradient_accumulation_steps=4,
            options={"strategies": strategies, "callbacks": [recorder]},
        )  # fmt: skip
        trainer.reward_funcs = [one_letter]
        if not leave_out:
            every = lambda batch: torch.ones(len(batch["advantages"]), dtype=torch.bool)  # noqa: E731
            monkeypatch.setattr(trainer, "_needed", every)
        compute, rows = trainer.loss, []
        monkeypatch.setattr(
            trainer, "loss", lambda m, i, c=compute, r=rows: (r.append(len(i["completion_ids"])), c(m, i))[1]
        )
        trainer.train()
        row_counts[leave_out] = sum(rows)
        gradients.append(recorder.steps[0])
        logs.append(next(entry for entry in trainer.state.log_history if "entropy" in entry))
    assert row_counts == {True: 8, False: 16}
    assert gradients[1].norm() > 0
    assert (gradients[0] - gradients[1]).norm() < 1e-5 * gradients[1].norm()
    assert logs[0]["entropy"] == pytest.approx(logs[1]["entropy"], rel=1e-4)
    assert logs[0]["loss"] == pytest.approx(logs[1]["loss"], abs=1e-6)


def test_where_no_row_has_an_advantage_nothing_is_learnt_and_nothing_fails(make_trainer: Callable[..., Any]) -> None:
    trainer = make_trainer(ExplorationTrainer, max_steps=1, optim="sgd", beta=0.0, temperature=1.0)
    trainer.reward_funcs = [lambda completions, **columns: [1.0] * len(completions)]
    trainer.reward_func_names = ["same"]
    before = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    trainer.train()
    for name, value in trainer.model.state_dict().items():
        torch.testing.assert_close(value, before[name], rtol=0, atol=0)
