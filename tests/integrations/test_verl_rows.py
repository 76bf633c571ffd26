"""The rows of a step as verl's driver reads them, and what strategies remember between two runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from explorl.integrations.verl import memory
from explorl.integrations.verl.step_rows import StepRows
from explorl.strategies import ElementWiseTemperature, MaskTruncated


class Held(dict[str, Any]):
    """As much of a TensorDict as is needed: nested columns that are padded together."""

    def select(self, *names: str) -> Held:
        return Held({name: self[name] for name in names})

    def to_padded_tensor(self) -> dict[str, torch.Tensor]:
        return {name: value.to_padded_tensor(0) for name, value in self.items()}


def nested(*rows: list[float]) -> torch.Tensor:
    return torch.nested.as_nested_tensor([torch.tensor(row) for row in rows], layout=torch.jagged)


def held(**more: Any) -> Held:
    return Held(
        uid=["b", "pad", "a"],
        raw_prompt=[[{"role": "user", "content": "B?"}], [], [{"role": "user", "content": "A?"}]],
        extra_fields=[{"reward_extra_info": {"acc": 1.0}}, {}, {"reward_extra_info": None}],
        responses=nested([5, 6, 7], [1], [8, 9]),
        response_mask=nested([1, 0, 1], [0], [1, 1]),
        rm_scores=nested([0.0, 0.0, 1.0], [0.0], [0.0, 0.5]),
        **more,
    )


KEYS, TAGS = ["b_0_0", "pad_0_0", "a_0_0"], [{}, {"is_padding": True}, {"is_padding": False}]


def test_real_rows_in_the_order_asked() -> None:
    rows = StepRows.from_batch(held(), KEYS, TAGS, ["a", "b"])
    assert rows.order == [2, 0]
    assert (rows.keys, rows.uids) == (["a_0_0", "b_0_0"], ["a", "b"])
    assert rows.lengths.tolist() == [2, 3]
    assert rows.rewards.tolist() == [0.5, 1.0]
    assert rows.columns["responses"].tolist() == [[8, 9, 0], [5, 6, 7]]
    assert rows.extras == [{}, {"acc": 1.0}]
    assert rows.prompts[0][0]["content"] == "A?"


def test_new_rewards_are_on_the_last_token_that_counts() -> None:
    rows = StepRows.from_batch(held(), KEYS, TAGS, ["a", "b"])
    assert rows.token_rewards_with(torch.tensor([0.5, 3.0])).tolist() == [[0.0, 0.5, 0.0], [0.0, 0.0, 3.0]]
    penalised = held(token_level_rewards=nested([-0.1, -0.1, 0.9], [0.0], [-0.2, 0.3]))
    rows = StepRows.from_batch(penalised, KEYS, TAGS, ["a", "b"])
    torch.testing.assert_close(
        rows.token_rewards_with(torch.tensor([1.5, 1.0])), torch.tensor([[-0.2, 1.3, 0.0], [-0.1, -0.1, 0.9]])
    )


def test_memory_comes_back_with_the_checkpoint(tmp_path: Path) -> None:
    strategies = [ElementWiseTemperature(source="running"), MaskTruncated()]
    strategies[0].memory["rates"] = {"x": 0.5}
    memory.save(tmp_path / "global_step_3", strategies)
    again = [ElementWiseTemperature(source="running"), MaskTruncated()]
    memory.restore(tmp_path / "global_step_3", again)
    assert again[0].memory == {"rates": {"x": 0.5}}
    memory.restore(tmp_path / "plain verl", again)
    with pytest.raises(ValueError, match=r"with the strategies element_wise_temperature, mask_truncated, but .* has"):
        memory.restore(tmp_path / "global_step_3", [MaskTruncated()])
