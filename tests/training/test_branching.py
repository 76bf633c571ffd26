"""Training on answers that branch off each other."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

import explorl.strategies as xs
from explorl.strategies import Batch, Strategy
from explorl.training.grpo.trainer import ExplorationTrainer

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

AT = [f"text:{letter}" for letter in "0123456789abcdefghijklmnop"]
"""Places that a policy of random weights comes to."""


class Seen(Strategy):
    """Keeps the batches that it sees."""

    name = "seen"
    batches: list[Batch]

    def metrics(self, batch: Batch) -> dict[str, float]:
        self.batches.append(batch)
        return {}


def train(make: Callable[..., Any], *strategies: Any, **changes: Any) -> tuple[Any, list[Batch], list[Any]]:
    """A short run; the trainer, what its strategies saw, and the tokens of each batch."""
    tokens: list[Any] = []

    class Trainer(ExplorationTrainer):
        def scored(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
            output = super().scored(inputs)
            tokens.append((output["completion_ids"].clone(), output["completion_mask"].clone()))
            return output

    trainer = make(Trainer, options={"strategies": [*strategies, Seen()], **changes.pop("options", {})}, **changes)
    observer = trainer.strategies[-1]
    object.__setattr__(observer, "batches", [])
    trainer.train()
    return trainer, observer.batches, tokens


def test_answers_branch_and_the_batch_knows_it(make_trainer: Callable[..., Any]) -> None:
    strategy = xs.EntropyBranching(base=0.8, at=AT, window=2)
    trainer, batches, tokens = train(make_trainer, strategy)
    assert len(batches) == 2
    forks = 0
    for batch, (ids, mask) in zip(batches, tokens, strict=True):
        assert batch.drawn_by is not None
        assert batch.drawn_by.shape == batch.mask.shape
        who = batch.drawn_by + torch.arange(8)[:, None]
        for row in range(8):
            for time in range(ids.size(1)):
                drew = int(who[row, time])
                assert batch.group[drew] == batch.group[row]
                if drew != row:
                    assert torch.equal(ids[row, : time + 1], ids[drew, : time + 1])
                    assert mask[row, time]
                    torch.testing.assert_close(batch.logps[row, time], batch.logps[drew, time])
        forks += int((batch.drawn_by[:, 0] != 0).sum())
    assert forks > 0
    logs = [entry for entry in trainer.state.log_history if "branching/branches" in entry]
    assert len(logs) == 2
    assert sum(entry["branching/forks"] for entry in logs) == forks
    assert sum(entry["strategy/entropy_branching/forks"] for entry in logs) == forks
    for entry in logs:
        assert entry["branching/branches"] <= entry["branching/places"]
        if entry["branching/branches"]:
            assert 0 < entry["branching/relative_place"] < 1
            assert 0 <= entry["branching/entropy"] <= 1
            assert sum(value for name, value in entry.items() if "/at/" in name) == entry["branching/branches"]


def test_files_of_rollouts_say_where_answers_branch(make_trainer: Callable[..., Any]) -> None:
    written: list[dict[str, list[Any]]] = []
    options = {"on_rollouts": lambda _, columns: written.append(columns), "token_records": 2}
    _, batches, _ = train(make_trainer, xs.EntropyBranching(base=0.9, at=AT, window=2), options=options)
    forks = 0
    for columns, batch in zip(written, batches, strict=True):
        assert batch.drawn_by is not None
        for row, (parent, shared) in enumerate(zip(columns["parent"], columns["forked_at"], strict=True)):
            assert (parent is None) == (shared is None)
            assert int((batch.drawn_by[row] != 0).sum()) == (shared or 0)
            if parent is not None:
                assert columns["prompt"][parent] == columns["prompt"][row]
                assert columns["token_ids"][row][:shared] == columns["token_ids"][parent][:shared]
                assert parent != row
                forks += 1
    assert forks


@pytest.mark.slow
def test_without_base_and_weight_training_is_as_before(make_trainer: Callable[..., Any]) -> None:
    def losses(*strategies: Any) -> list[float]:
        torch.manual_seed(0)
        return [entry["loss"] for entry in train(make_trainer, *strategies)[0].state.log_history if "loss" in entry]

    plain = losses()
    assert losses(xs.EntropyBranching(base=0, weight=0, at=AT)) == plain
    assert losses(xs.EntropyBranching(base=0.9, at=AT, window=2)) != plain
    assert all(math.isfinite(loss) for loss in losses(xs.EntropyBranching(base=0.9, at=AT, window=2, shared="once")))


def test_temperatures_go_with_the_answers_that_they_were_sampled_at(make_trainer: Callable[..., Any]) -> None:
    """An answer that branches off another has that one's temperature, also where those of a prompt differ."""

    class ByRow(Strategy):
        name = "by_row"

        def sampling(self, prompts: Any, step: int) -> dict[str, list[float]]:
            return {"temperature": [0.8 + 0.05 * row for row in range(len(prompts))]}

    _, batches, _ = train(make_trainer, ByRow(), xs.EntropyBranching(initial=2, base=1.0, at=AT, window=1))
    moved = 0
    for batch in batches:
        assert batch.drawn_by is not None
        for row in range(8):
            drew = row + int(batch.drawn_by[row, 0])
            assert batch.temperature[row] == batch.temperature[drew]
            moved += drew != row
    assert moved


def test_groups_that_are_exchanged_keep_their_trees(make_trainer: Callable[..., Any]) -> None:
    strategy = xs.EntropyBranching(base=1.0, at=AT, window=2)
    _, batches, tokens = train(make_trainer, strategy, options={"dynamic_sampling": True})
    shared = 0
    for batch, (ids, _) in zip(batches, tokens, strict=True):
        assert batch.drawn_by is not None
        who = batch.drawn_by + torch.arange(8)[:, None]
        for row, time in (batch.drawn_by != 0).nonzero().tolist():
            assert torch.equal(ids[row, : time + 1], ids[who[row, time], : time + 1])
            shared += 1
    assert shared


def test_a_prompt_that_comes_twice_in_a_batch_has_two_groups(make_trainer: Callable[..., Any]) -> None:
    from datasets import Dataset

    class Same(ExplorationTrainer):
        def __init__(self, **kwargs: Any) -> None:
            super().__init__(**{**kwargs, "train_dataset": Dataset.from_dict({"prompt": ["1 2=3\n"] * 8})})

    observer = Seen()
    trainer = make_trainer(Same, options={"strategies": [xs.EntropyBranching(base=1.0, at=AT, window=1), observer]})
    object.__setattr__(trainer.strategies[-1], "batches", [])
    trainer.train()
    forks = 0
    for batch in trainer.strategies[-1].batches:
        who = batch.drawn_by + torch.arange(8)[:, None]
        assert torch.equal(batch.group[who], batch.group[:, None].expand_as(who))
        forks += int((batch.drawn_by[:, 0] != 0).sum())
    assert forks


def test_what_cannot_branch_is_said_before_training(make_trainer: Callable[..., Any]) -> None:
    def build(*strategies: Any, **options: Any) -> Any:
        return make_trainer(ExplorationTrainer, options={"strategies": list(strategies), **options})

    with pytest.raises(ValueError, match="initial is 9, but there are only num_generations=4 completions"):
        build(xs.EntropyBranching(initial=9))
    with pytest.raises(ValueError, match=r"entropy_branching sets how each row is sampled, which model\.generate"):
        build(xs.EntropyBranching(), engine="generate")

    class Wrong(Strategy):
        name = "wrong"

        def branching(self, step: int) -> dict[str, Any]:
            return {"at": ["nowhere"]}

    with pytest.raises(ValueError, match=r"wrong.branching: unknown marker 'nowhere'"):
        build(Wrong())
    with pytest.warns(UserWarning, match="completions will not branch: they branch after outputs of a tool"):
        build(xs.EntropyBranching(at=["output"]))
