"""What a script gets wrong is named in one line, before anything is trained: class, model, data, reward functions."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset, IterableDataset
from trl import GRPOTrainer
from trl.experimental.gmpo import GMPOConfig, GMPOTrainer

from explorl import ExplorationTrainer, PassAtK
from explorl.models import load_policy
from explorl.strategies import Strategy
from tests.training.conftest import PROMPTS
from tests.training.small_runs import SETTINGS, digits, grpo_config
from tests.training.test_grpo_equals_trl import answers, reward

# ---------------------------------------------------------------- classes


class OursFirst(ExplorationTrainer, GMPOTrainer):
    pass


class TheirsFirst(GMPOTrainer, ExplorationTrainer):
    pass


def test_a_loss_that_would_never_be_computed_is_refused(make_trainer: Callable[..., Any]) -> None:
    with pytest.raises(TypeError, match=r"OursFirst .* GMPOTrainer.*_compute_loss"):
        make_trainer(OursFirst)


def test_strategies_beside_the_loss_of_another_trainer_are_refused(make_trainer: Callable[..., Any]) -> None:
    for strategy in ("egsw", "ppl_shaping", "bottom_p"):
        with pytest.raises(ValueError, match=rf"GMPOTrainer\._compute_loss .*{strategy}"):
            make_trainer(TheirsFirst, options={"strategies": [strategy]})


@pytest.mark.filterwarnings("ignore:You are using 'rollout_func'")
@pytest.mark.parametrize("iterations", [1, 2])
def test_the_loss_of_another_trainer_is_computed_as_there(small_policy: Path, tmp_path: Path, iterations: int) -> None:
    """With log π_old of the same tokens when a batch comes again."""
    logs = []
    for cls in (GMPOTrainer, TheirsFirst):
        policy = load_policy(str(small_policy), device="cpu")
        options = {"num_iterations": iterations, "learning_rate": 0.1, "max_steps": 4, "optim": "sgd"}
        trainer = cls(
            model=policy.model, reward_funcs=reward, args=GMPOConfig(str(tmp_path), **{**SETTINGS, **options}),
            train_dataset=Dataset.from_dict({"prompt": PROMPTS}), processing_class=policy.tokenizer,
            rollout_func=answers,
        )  # fmt: skip
        trainer.train()
        logs.append([entry for entry in trainer.state.log_history if "loss" in entry])
    stock, mixed = logs
    for expected, actual in zip(stock, mixed, strict=True):
        for name in ("loss", "grad_norm", "entropy", "clip_ratio/region_mean"):
            assert actual[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-6), name
    assert any(entry["grad_norm"] > 1e-3 for entry in stock)


class Logs(GRPOTrainer):
    """Another trainer that changes nothing of what ours relies on, and takes options by name alone."""

    def __init__(self, model: Any, reward_funcs: Any, *, team: str = "", **more: Any) -> None:
        super().__init__(model, reward_funcs, **more)
        self.team = team

    def log(self, logs: dict[str, float], *more: Any, **options: Any) -> None:
        super().log({**logs, "team": self.team}, *more, **options)  # type: ignore[dict-item]


class OursOverLogs(ExplorationTrainer, Logs):
    pass


class LogsOverOurs(Logs, ExplorationTrainer):
    pass


@pytest.mark.parametrize("cls", [OursOverLogs, LogsOverOurs])
def test_a_trainer_that_only_logs_goes_with_ours(make_trainer: Callable[..., Any], cls: Any) -> None:
    trainer = make_trainer(cls, options={"strategies": ["egsw"], "team": "blue"}, max_steps=1)
    trainer.train()
    first = trainer.state.log_history[0]
    assert first["team"] == "blue"
    assert "strategy/egsw/weight_change" in first


class WholeLoss(ExplorationTrainer):
    """A loss of its own that knows nothing of weights."""

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Any:
        logps, *_ = self._get_per_token_logps_and_entropies(
            model,
            torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1),
            torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1),
            inputs["completion_ids"].size(1),
        )
        return -(logps * inputs["advantages"].view(len(logps), -1) * inputs["completion_mask"]).mean()


class WrappedLoss(ExplorationTrainer):
    def compute_loss(self, model: Any, inputs: Any, *more: Any, **options: Any) -> Any:
        return 2 * self._compute_loss(model, inputs)


def test_weights_that_reach_no_loss_are_refused(make_trainer: Callable[..., Any]) -> None:
    for strategy in ("egsw", "clip_higher", "forking_tokens", "kl_cov", "entropy_bonus"):
        with pytest.raises(ValueError, match=rf"WholeLoss\._compute_loss .*{strategy} \("):
            make_trainer(WholeLoss, options={"strategies": [strategy]}, num_iterations=2)
    make_trainer(WholeLoss, options={"strategies": ["ppl_shaping"]}, max_steps=1).train()
    make_trainer(WrappedLoss, options={"strategies": ["egsw"]}, max_steps=1).train()


class WholeSampling(ExplorationTrainer):
    def _generate_single_turn(self, prompt_ids: Any, *more: Any, **options: Any) -> Any:
        return [[7, 8] for _ in prompt_ids], None


class WholeScoring(ExplorationTrainer):
    def _generate_and_score_completions(self, inputs: Any) -> Any:
        raise NotImplementedError


def test_strategies_that_would_never_be_asked_are_refused(make_trainer: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match=r"WholeSampling\._generate_single_turn .*bottom_p"):
        make_trainer(WholeSampling, options={"strategies": ["bottom_p"]})
    make_trainer(WholeSampling, options={"strategies": ["egsw"]}, max_steps=1).train()
    with pytest.raises(ValueError, match=r"WholeScoring\._generate_and_score_completions .*ppl_shaping"):
        make_trainer(WholeScoring, options={"strategies": ["ppl_shaping"]})


# ---------------------------------------------------------------- model and data


def test_short_names_of_models(tmp_path: Path) -> None:
    """As in the command; what is no name of ours is left to TRL."""
    trainer = ExplorationTrainer("tiny", digits, grpo_config(tmp_path, {}), Dataset.from_dict({"prompt": PROMPTS}))
    assert trainer.model.num_parameters() == load_policy("tiny", device="cpu").model.num_parameters()


def messages(role: str = "user") -> list[list[dict[str, str]]]:
    return [[{"role": role, "content": prompt}] for prompt in PROMPTS]


@pytest.mark.parametrize(
    ("columns", "error"),
    [
        ({"question": PROMPTS}, r"train_dataset has no column 'prompt'; it has question"),
        ({"prompt": []}, r"train_dataset is empty"),
        ({"prompt": PROMPTS[:1]}, r"train_dataset has 1 prompt.* generation batch takes 2"),
        ({"prompt": [1, 2, 3]}, r"the prompt of row 0 of train_dataset is 1"),
        ({"prompt": messages()}, r"train_dataset.* messages.* no chat template"),
        ({"prompt": [[{"from": "user", "value": "1"}]] * 4}, r"row 0 of train_dataset has no role: \{'from': 'user'"),
    ],
)
def test_data_that_cannot_be_trained_on(
    small_policy: Path, tmp_path: Path, columns: dict[str, Any], error: str
) -> None:
    policy = load_policy(str(small_policy), device="cpu")
    policy.tokenizer.chat_template = None
    with pytest.raises(ValueError, match=error) as raised:
        ExplorationTrainer(
            policy.model, digits, grpo_config(tmp_path, {}), Dataset.from_dict(columns),
            processing_class=policy.tokenizer,
        )  # fmt: skip
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("rows", "error"),
    [
        ([{"question": "1"}], r"eval_dataset has no column 'prompt'; it has question"),
        ([{"prompt": [{"role": "user", "content": "1"}]}], r"prompts of eval_dataset are .*no chat template"),
    ],
)
def test_data_that_cannot_be_evaluated_on(
    small_policy: Path, tmp_path: Path, rows: list[dict[str, Any]], error: str
) -> None:
    """It is refused before the training that comes first, by the name of the data set where there are several."""
    policy = load_policy(str(small_policy), device="cpu")
    policy.tokenizer.chat_template = None
    dataset = Dataset.from_list(rows)
    for eval_dataset, name in ((dataset, error), ({"hard": dataset}, r"eval_dataset\['hard'\]")):
        with pytest.raises(ValueError, match=name):
            ExplorationTrainer(
                policy.model, digits, grpo_config(tmp_path, {}), Dataset.from_dict({"prompt": PROMPTS}),
                eval_dataset=eval_dataset, processing_class=policy.tokenizer,
            )  # fmt: skip


@pytest.mark.parametrize(
    ("rows", "error"),
    [
        ([], "train_dataset is too small for a generation batch"),
        ([{"question": "1"}] * 8, "has no column 'prompt'; it has question"),
    ],
)
def test_a_stream_that_cannot_be_trained_on(
    make_trainer: Callable[..., Any], tmp_path: Path, rows: list[dict[str, str]], error: str
) -> None:
    def stream() -> Iterator[dict[str, str]]:
        yield from rows

    whole = make_trainer(ExplorationTrainer)
    trainer = ExplorationTrainer(
        whole.model, digits, grpo_config(tmp_path, {}), IterableDataset.from_generator(stream),
        processing_class=whole.processing_class,
    )  # fmt: skip
    with pytest.raises(ValueError, match=error):
        trainer.train()


# ---------------------------------------------------------------- reward functions


def rewards(value: Any) -> Callable[..., Any]:
    def mine(completions: list[str], **columns: Any) -> Any:
        return value(completions) if callable(value) else value

    return mine


WRONG: dict[str, tuple[Any, str]] = {
    "none": (None, r"'mine' returned None; "),
    "text": ("right", r"'mine' returned 'right'; "),
    "texts": (lambda texts: ["1.0"] * len(texts), r"'mine' returned '1.0' for completion 0; "),
    "lists": (lambda texts: [[1.0, 2.0]] * len(texts), r"'mine' returned \[1.0, 2.0\] for completion 0; "),
    "mapping": (lambda texts: {"score": 1.0}, r"'mine' returned \{'score': 1.0\}; "),
    "one": (1.0, r"'mine' returned 1.0; "),
    "fewer": (lambda texts: [1.0] * (len(texts) - 1), r"'mine' .*7 .*8"),
    "infinite": (lambda texts: [0.0, math.inf] * (len(texts) // 2), r"'mine' returned inf "),
    "minus infinite": (lambda texts: [0.0, -math.inf] * (len(texts) // 2), r"'mine' returned -inf "),
}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("case", WRONG)
def test_rewards_that_are_no_numbers(make_trainer: Callable[..., Any], case: str, dynamic: bool) -> None:
    value, error = WRONG[case]
    trainer = make_trainer(ExplorationTrainer, options={"dynamic_sampling": dynamic})
    trainer.reward_funcs, trainer.reward_func_names = [rewards(value)], ["mine"]
    with pytest.raises((TypeError, ValueError), match=error) as raised:
        trainer.train()
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("weights", "value"), [([math.inf], 1.0), ([1.0, 1.0], 3e38)], ids=["infinite weight", "sum beyond float32"]
)
def test_rewards_that_add_up_to_infinity(make_trainer: Callable[..., Any], weights: list[float], value: float) -> None:
    trainer = make_trainer(ExplorationTrainer, max_steps=1)
    alternating = rewards(lambda texts: [0.0, value] * (len(texts) // 2))
    trainer.reward_funcs, trainer.reward_func_names = [alternating] * len(weights), ["mine"] * len(weights)
    trainer.reward_processing_classes = [None] * len(weights)
    trainer.reward_weights = torch.tensor(weights)
    with pytest.raises(ValueError, match=r"rewards of completion \d add up to inf: reward_weights is"):
        trainer.train()


def test_an_asynchronous_function_is_checked_as_well(make_trainer: Callable[..., Any], tmp_path: Path) -> None:
    async def mine(completions: list[str], **columns: Any) -> list[str]:
        return ["1.0"] * len(completions)

    whole = make_trainer(ExplorationTrainer)
    trainer = ExplorationTrainer(
        whole.model, mine, grpo_config(tmp_path, {}), whole.train_dataset, processing_class=whole.processing_class
    )
    with pytest.raises(TypeError, match=r"'mine' returned '1\.0' for completion 0"):
        trainer.train()


@pytest.mark.parametrize(
    "value",
    [
        lambda texts: np.arange(len(texts), dtype=np.float32),
        lambda texts: torch.arange(len(texts)),
        lambda texts: (float(index) for index in range(len(texts))),
        lambda texts: [torch.tensor(index) for index in range(len(texts))],
        lambda texts: [index > 1 for index in range(len(texts))],
        lambda texts: [None, 1.0] * (len(texts) // 2),
    ],
    ids=["array", "tensor", "generator", "tensors", "booleans", "some None"],
)
def test_rewards_that_trl_takes(make_trainer: Callable[..., Any], value: Any) -> None:
    """None for a completion that a function does not apply to is TRL's own."""
    logs = []
    for cls in (GRPOTrainer, ExplorationTrainer):
        trainer = make_trainer(cls, max_steps=1)
        trainer.reward_funcs = [rewards(value)]
        trainer.train()
        logs.append(trainer.state.log_history[0]["reward"])
    assert logs[0] == logs[1]


def test_scores_name_the_reward_function_as_well() -> None:
    task = PassAtK([{"prompt": "1"}], rewards(lambda texts: ["1.0"] * len(texts))).task
    with pytest.raises(TypeError, match=r"'mine' returned '1\.0' for completion 0"):
        task.verify_many(["1"], task.problems("holdout"))


def test_scores_refuse_an_infinite_reward_as_the_trainer_does() -> None:
    task = PassAtK([{"prompt": "1"}], rewards(lambda texts: [math.inf] * len(texts))).task
    with pytest.raises(ValueError, match=r"'mine' returned inf for completion 0"):
        task.verify_many(["1"], task.problems("holdout"))


def test_scores_of_messages_without_a_chat_template(make_trainer: Callable[..., Any]) -> None:
    scores = PassAtK([{"prompt": message} for message in messages()], digits)
    trainer = make_trainer(ExplorationTrainer, options={"callbacks": [scores]})
    trainer.processing_class.chat_template = None
    with pytest.raises(ValueError, match=r"data set of PassAtK are .*no chat template"):
        trainer.train()


def test_every_strategy_can_be_told_from_its_base() -> None:
    """The table of hooks that a method carries names hooks that exist."""
    from explorl.training.grpo.construction import CARRIED_BY

    assert all(hasattr(Strategy, hook) for hooks in CARRIED_BY.values() for hook in hooks)
