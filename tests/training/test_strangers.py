"""Scripts that a stranger brings: options that meet each other, classes built on ours, callbacks in odd places."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from explorl.modeling.answer_states import states
from explorl.modeling.packed import packed_logps
from explorl.training.grpo import ExplorationTrainer


def test_packed_false_is_honoured_by_what_is_recorded(
    make_trainer: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """After `generate`, strategies see entropies of a pass over the batch: a padded one, where that is asked for."""
    kinds: list[str] = []

    def watched(model: Any, rows: Any, kind: Any, *more: Any) -> Any:
        kinds.append(kind)
        return states(model, rows, kind, *more)

    monkeypatch.setattr("explorl.modeling.token_records.states", watched)
    given = {"strategies": ["forking_tokens"], "engine": "generate", "packed": False}
    make_trainer(ExplorationTrainer, options=given, max_steps=1).train()
    assert set(kinds) == {"padded"}


def test_neftune_is_scaled_by_the_rows_of_trl(
    make_trainer: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The noise is alpha / √(length · width) of what the embedding sees: a packed row would make it smaller."""
    packed: list[Any] = []

    def watched(*args: Any, **given: Any) -> Any:
        packed.append(args[1].shape)
        return packed_logps(*args, **given)

    monkeypatch.setattr("explorl.training.logps.packed_logps", watched)
    with pytest.warns(UserWarning, match=r"neftune_noise_alpha is 5\.0"):
        trainer = make_trainer(ExplorationTrainer, max_steps=1, neftune_noise_alpha=5.0)
    trainer.train()
    assert not packed
