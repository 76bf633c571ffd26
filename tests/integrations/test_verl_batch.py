"""From verl's rows to the batch that strategies see, and back."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from explorl.integrations.verl.conversion import (
    batch_of_columns,
    correctness_rule,
    extract_answers,
    group_indices,
    loss_columns,
    real_row_order,
    reward_names,
    reward_parts,
    scatter_rows,
)
from explorl.integrations.verl.sampling_params import (
    collect_parameters,
    request_parameters,
    split_rows,
    training_temperature,
)
from explorl.integrations.verl.settings import VerlSettings
from explorl.strategies import BottomP, ElementWiseTemperature, PerplexityShaping, Strategy
from explorl.training.grpo.batch import truncated_rows
from explorl.training.grpo.shaping import shape


def columns(rows: int = 4, tokens: int = 3, seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    mask = torch.ones(rows, tokens, dtype=torch.int64)
    mask[1, 2] = 0
    return {
        "response_mask": mask,
        "old_log_probs": -torch.rand(rows, tokens, generator=generator),
        "entropy": torch.rand(rows, tokens, generator=generator),
        "advantages": torch.randn(rows, 1, generator=generator) * mask,
    }


def seen(rewards: list[float], tensors: dict[str, torch.Tensor] | None = None, **more: Any) -> Any:
    tensors = tensors or columns(len(rewards))
    scores = torch.tensor(rewards)
    extras: list[dict[str, Any]] = [{}] * len(rewards)
    fields = {
        "group": torch.arange(len(rewards)) // 2,
        "rewards": scores,
        "parts": reward_parts(["score"], scores, extras),
        "correct": correctness_rule(VerlSettings(), extras),
        "truncated": torch.zeros(len(rewards), dtype=torch.bool),
        "temperature": torch.ones(len(rewards)),
        "step": 5,
        "prompts": ["a", "a", "b", "b"],
    }
    return batch_of_columns(tensors, **{**fields, **more})


def test_rows_stand_by_prompt_in_the_order_asked_and_empty_rows_are_left_out() -> None:
    keys = ["b_1_0", "pad9_0_0", "a_10_0", "a_2_0", "b_0_0"]
    padding = [False, True, False, False, False]
    assert real_row_order(keys, padding, ["b", "a"]) == [4, 0, 3, 2]
    assert real_row_order(keys, padding, ["a", "b"]) == [3, 2, 4, 0]


def test_identifiers_may_have_underscores() -> None:
    assert real_row_order(["x_y_1_0", "x_y_0_0"], [False, False], ["x_y"]) == [1, 0]


def test_an_agent_loop_with_several_outputs_is_refused() -> None:
    with pytest.raises(ValueError, match=r"2 outputs or more for one request .a.,.*explorl.strategies="):
        real_row_order(["a_0_0", "a_0_1"], [False, False], ["a"])


def test_groups_are_numbered_in_the_order_of_their_first_row() -> None:
    assert group_indices(["q", "q", "p", "q"]).tolist() == [0, 0, 1, 0]


def test_an_answer_is_whole_where_its_last_token_ends_it() -> None:
    responses = torch.tensor([[5, 1, 0], [5, 6, 7], [2, 0, 0], [0, 0, 0]])
    assert truncated_rows(responses, torch.tensor([2, 3, 1, 0]), [1, 2]).tolist() == [False, True, False, True]


def test_what_is_correct_comes_from_the_reward_function() -> None:
    extras = [{"acc": True, "pred": "4", "score": 1.1}, {"acc": False, "pred": "5", "score": 0.1}]
    names = reward_names(extras)
    assert names == ["score", "acc"]
    parts = reward_parts(names, torch.tensor([1.1, 0.1]), extras)
    guessed = correctness_rule(VerlSettings(), extras)
    assert (guessed.name, guessed.guessed) == ("acc", True)
    assert guessed.marks(parts).tolist() == [True, False]
    rule = correctness_rule(VerlSettings(correct=("score", 0.1)), extras)
    assert (rule.guessed, rule.marks(parts).tolist()) == (False, [True, True])
    with pytest.raises(ValueError, match="'exact'; this trainer has score, acc"):
        correctness_rule(VerlSettings(correct=("exact", 1.0)), extras)


def test_answers_come_from_the_reward_function() -> None:
    assert extract_answers("pred", [{"pred": 4}, {"pred": None}, {}]) == ["4", None, None]
    with pytest.raises(ValueError, match=r"explorl.answers is 'pred', but the reward function returned acc"):
        extract_answers("pred", [{"acc": 1.0}])


def test_the_batch_holds_what_verl_recorded_and_nothing_of_padding() -> None:
    tensors = columns()
    tensors["old_log_probs"][1, 2] = 7.0
    batch = seen([1.0, 0.0, 0.0, 1.1], tensors)
    assert batch.old_logps[1, 2] == 0
    torch.testing.assert_close(batch.old_logps[0], tensors["old_log_probs"][0])
    assert batch.correct.tolist() == [True, False, False, True]
    assert batch.ref_logps is None
    assert batch.sampling_logps is None
    tensors |= {"rollout_log_probs": tensors["old_log_probs"] - 0.1, "ref_log_prob": tensors["old_log_probs"]}
    batch = seen([1.0, 0.0, 0.0, 1.1], tensors)
    torch.testing.assert_close((batch.old_logps - batch.sampling_logps)[0], torch.full((3,), 0.1))


def test_what_strategies_say_does_not_depend_on_the_order_of_verls_rows() -> None:
    tensors, rewards = columns(), [1.0, 0.0, 0.0, 1.0]
    straight = shape([PerplexityShaping(alpha=0.5)], seen(rewards, tensors))
    keys, shuffled = ["a_0_0", "a_1_0", "b_0_0", "b_1_0"], [2, 0, 3, 1]
    theirs = {name: value[shuffled] for name, value in tensors.items()}
    order = real_row_order([keys[row] for row in shuffled], [False] * 4, ["a", "b"])
    again = shape([PerplexityShaping(alpha=0.5)], seen(rewards, {n: v[order] for n, v in theirs.items()}))
    back = scatter_rows(again.advantages, order, 4)
    torch.testing.assert_close(back, straight.advantages[shuffled], rtol=0, atol=0)


def test_empty_rows_get_their_fill() -> None:
    out = scatter_rows(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), [2, 0], 3, fill=9.0)
    assert out.tolist() == [[3.0, 4.0], [9.0, 9.0], [1.0, 2.0]]


def test_columns_for_the_loss_are_those_that_it_needs() -> None:
    batch = seen([1.0, 0.0, 0.0, 1.0])
    shaped = shape([PerplexityShaping()], batch)
    assert set(loss_columns(shaped, batch, penalties=False)) == {"explorl/weights", "explorl/kl_weights"}
    more = loss_columns(shaped, batch, penalties=True)
    assert {"explorl/recorded_entropy", "explorl/row/rewards", "explorl/row/temperature"} <= set(more)


def test_each_row_has_its_sampling_parameters() -> None:
    easy_or_hard = ElementWiseTemperature(easy=0.5, hard=1.5, solve_rates={"a": 1.0, "b": 0.0})
    parameters = collect_parameters([BottomP(p=0.8, frequency=0.25), easy_or_hard], ["a", "b"], 0)
    first, second = split_rows(parameters, 2)
    request = request_parameters({"temperature": 1.0, "top_p": 0.9, "logprobs": True}, second)
    assert request["temperature"] == 1.5
    assert (request["top_p"], request["logprobs"]) == (1.0, True)
    assert request["extra_args"] == {
        "explorl_top_p": 0.9, "explorl_bottom_p": 0.8, "explorl_bottom_p_frequency": 0.25,
        "explorl_bottom_p_per_sequence": 0.0,
    }  # fmt: skip
    assert training_temperature(first, 1.0) == 0.5
    assert training_temperature({"temperature": 0.5, "training_temperature": 1.0}, 0.7) == 1.0
    assert training_temperature({}, 0.7) == 0.7


def test_a_request_keeps_what_it_had() -> None:
    request = {"temperature": 1.0, "extra_args": {"theirs": 1}}
    assert request_parameters(request, {}) == request
    assert request_parameters(request, {"bottom_p": 0.5})["extra_args"] == {"theirs": 1, "explorl_bottom_p": 0.5}
    assert request_parameters(request, {"top_k": 0.0})["top_k"] == -1
    assert request_parameters({"top_p": 0.9, "top_k": 0}, {"temperature": 2.0}) == {
        "top_p": 0.9,
        "top_k": 0,
        "temperature": 2.0,
    }
    assert request == {"temperature": 1.0, "extra_args": {"theirs": 1}}


@dataclass(frozen=True)
class Own(Strategy):
    name = "own"
    said: Any = None

    def sampling(self, prompts: Any, step: int) -> Any:
        return self.said


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"temprature": [1.0, 1.0]}, "own.sampling sets 'temprature': inside verl a strategy can set temperature"),
        ({"temperature": [1.0]}, "returns 1 values of 'temperature' for 2 rows"),
        ({"temperature": [1.0, "hot"]}, "to 'hot'; give one number per row"),
        ({"temperature_by_position": [[1.0], [1.0]]}, "one temperature for all tokens of a row"),
    ],
)
def test_what_a_strangers_strategy_says_of_sampling_is_checked(value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        collect_parameters([Own(value)], ["a", "b"], 0)


def test_the_settings_are_plain() -> None:
    assert VerlSettings(run=Path("x")).strategies == ()
