"""Scripts that a stranger brings: options that meet each other, classes built on ours, callbacks in odd places."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import TrainerCallback

from explorl import PassAtK, RunRecorder
from explorl import strategies as xs
from explorl.modeling.answer_states import states
from explorl.modeling.packed import packed_logps
from explorl.strategies import Batch, Strategy
from explorl.training.grpo.sampling_plan import SamplingPlan
from explorl.training.grpo.trainer import ExplorationTrainer
from explorl.training.grpo.trl_adapter import has_own_loss
from tests.training.conftest import PROMPTS
from tests.training.small_runs import digits


def test_packed_false_is_honoured_by_what_is_recorded(
    make_trainer: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """After `generate`, strategies see entropies of a pass over the batch: a padded one, where that is asked for."""
    kinds: list[str] = []

    def watched(model: Any, rows: Any, kind: Any, *more: Any) -> Any:
        kinds.append(kind)
        return states(model, rows, kind, *more)

    monkeypatch.setattr("explorl.modeling.token_records.states", watched)
    options = {"strategies": ["forking_tokens"], "engine": "generate", "packed": False}
    make_trainer(ExplorationTrainer, options=options, max_steps=1).train()
    assert set(kinds) == {"padded"}


def test_neftune_is_scaled_by_the_rows_of_trl(
    make_trainer: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The noise is alpha / √(length · width) of what the embedding sees: a packed row would make it smaller."""
    packed: list[Any] = []

    def watched(*args: Any, **kwargs: Any) -> Any:
        packed.append(args[1].shape)
        return packed_logps(*args, **kwargs)

    monkeypatch.setattr("explorl.training.grpo.logprobs.packed_logps", watched)
    with pytest.warns(UserWarning, match=r"neftune_noise_alpha is 5\.0"):
        trainer = make_trainer(ExplorationTrainer, max_steps=1, neftune_noise_alpha=5.0)
    trainer.train()
    assert not packed


@dataclass(frozen=True)
class Reads(Strategy):
    """Tells which rewards it saw."""

    name = "reads"

    def metrics(self, batch: Batch) -> dict[str, float]:
        return {"reward": float(batch.rewards.mean())}


@pytest.mark.parametrize("whole", [False, True])
def test_strategies_see_the_rewards_that_a_subclass_gives(make_trainer: Callable[..., Any], whole: bool) -> None:
    class Mine(ExplorationTrainer):
        def _calculate_rewards(self, inputs: Any, *more: Any) -> Any:
            rewards = torch.arange(len(inputs)).unsqueeze(1) if whole else super()._calculate_rewards(inputs, *more)
            return rewards + 100.0

    trainer = make_trainer(Mine, options={"strategies": [Reads()]}, max_steps=1)
    trainer.train()
    logged = trainer.state.log_history[0]
    assert logged["reward"] >= 100
    assert logged["strategy/reads/reward"] == pytest.approx(logged["reward"])


def test_a_loss_that_a_subclass_computes_sees_trls_micro_batches(make_trainer: Callable[..., Any]) -> None:
    """As many rows in each, also those without an advantage, and log π_old when a batch comes again."""
    recorded: list[dict[str, Any]] = []

    class Mine(ExplorationTrainer):
        def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Any:
            recorded.append(dict(inputs))
            return super()._compute_loss(model, dict(inputs))

    trainer = make_trainer(
        Mine, max_steps=4, num_iterations=2, gradient_accumulation_steps=4, per_device_train_batch_size=3,
        num_generations=6, learning_rate=1e-2, temperature=1.0,
    )  # fmt: skip
    assert has_own_loss(trainer)
    assert not has_own_loss(make_trainer(ExplorationTrainer))
    trainer.train()
    assert [len(inputs["completion_ids"]) for inputs in recorded] == [3] * 16
    for first, again in zip(recorded[:4], recorded[4:8], strict=True):
        torch.testing.assert_close(first["old_per_token_logps"], again["old_per_token_logps"], rtol=0, atol=0)
    assert trainer.state.log_history[1]["clip_ratio/region_mean"] > 0


def test_log_probabilities_that_a_subclass_computes_are_those_of_the_loss(make_trainer: Callable[..., Any]) -> None:
    from trl import GRPOTrainer

    norms = []
    for cls, options in ((GRPOTrainer, {}), (ExplorationTrainer, {"engine": "generate", "packed": False})):

        class Mine(cls):  # type: ignore[misc, valid-type]
            def _get_per_token_logps_and_entropies(self, *args: Any, **more: Any) -> Any:
                logps, *rest = super()._get_per_token_logps_and_entropies(*args, **more)
                return 1.5 * logps, *rest

        trainer = make_trainer(Mine, options=options, max_steps=1, beta=0.1)
        trainer.train()
        log = trainer.state.log_history[0]
        assert log["kl"] == pytest.approx(0, abs=1e-6)
        norms.append(log["grad_norm"])
    assert norms[1] == pytest.approx(norms[0], rel=1e-4)


def test_a_batch_that_an_earlier_training_has_left_in_use(make_trainer: Callable[..., Any]) -> None:
    """Steps are counted from 0 again, and yet the policy has moved since the batch was made."""
    trainer = make_trainer(ExplorationTrainer, max_steps=1, num_iterations=2, learning_rate=0.02)
    trainer.train()
    trainer.train()
    assert trainer.state.log_history[0]["clip_ratio/region_mean"] > 0.1


@pytest.mark.parametrize("strategies", [[], ["egsw"], ["bottom_p"]], ids=str)
def test_answers_that_a_subclass_changes(make_trainer: Callable[..., Any], strategies: list[str]) -> None:
    """What the engine recorded is not of them: without a step in between, every ratio is 1 all the same."""

    class Mine(ExplorationTrainer):
        def _generate(self, prompts: Any) -> Any:
            prompt_ids, completion_ids, *rest = super()._generate(prompts)
            return prompt_ids, [[*ids[:4], 20] for ids in completion_ids], *rest

    trainer = make_trainer(Mine, steps_per_generation=4, learning_rate=0.0, options={"strategies": strategies})
    if strategies == ["bottom_p"]:
        with pytest.raises(RuntimeError, match=r"tokens of a completion were changed .* how each row was sampled"):
            trainer.train()
        return
    with pytest.warns(UserWarning, match="the tokens of a completion were changed after Explorl's engine sampled them"):
        trainer.train()
    assert [log["clip_ratio/region_mean"] for log in trainer.state.log_history[:-1]] == [0, 0]


def test_answers_in_lists_of_another_kind_are_the_same_answers(make_trainer: Callable[..., Any]) -> None:
    class Mine(ExplorationTrainer):
        def _generate(self, prompts: Any) -> Any:
            prompt_ids, completion_ids, *rest = super()._generate(prompts)
            return prompt_ids, [tuple(ids) for ids in completion_ids], *rest

    trainer = make_trainer(Mine, options={"strategies": ["bottom_p"]})
    trainer.train()  # how each row was sampled is still known


def test_a_reward_method_put_on_the_trainer_stays_there(make_trainer: Callable[..., Any]) -> None:
    trainer = make_trainer(ExplorationTrainer)
    own = trainer._calculate_rewards
    trainer._calculate_rewards = lambda *args: own(*args) + 100
    trainer.train()
    assert all(log["reward"] >= 100 for log in trainer.state.log_history[:-1])


def test_a_batch_size_that_is_lowered_in_training(make_trainer: Callable[..., Any]) -> None:
    """By a callback: the batch that was planned before is split as TRL splits it."""

    class Lower(TrainerCallback):
        def on_step_begin(self, args: Any, *rest: Any, **more: Any) -> None:
            args.per_device_train_batch_size = 2

    trainer = make_trainer(ExplorationTrainer, options={"callbacks": [Lower()]}, max_steps=1)
    trainer.train()
    assert trainer.state.global_step == 1


def test_a_prompt_beyond_the_context_is_left_to_generate(make_trainer: Callable[..., Any], tmp_path: Path) -> None:
    """As TRL does it: a rotary embedding goes on beyond the length that the configuration names."""
    trainer = make_trainer(ExplorationTrainer, options={"strategies": ["forking_tokens"]}, max_steps=1)
    trainer.train_dataset = Dataset.from_dict({"prompt": ["1 2 3=6 " * 20] * 4})
    with pytest.warns(UserWarning, match="a prompt has 160 tokens and the model's context is 128"):
        trainer.train()
    assert trainer.state.global_step == 1


@pytest.mark.parametrize(
    ("strategies", "error"),
    [
        ([xs.MaskTruncated], r"write MaskTruncated\(\)"),
        (5, "strategies must be a list"),
    ],
)
def test_strategies_that_are_none(strategies: Any, error: str) -> None:
    with pytest.raises(ValueError, match=error):
        xs.build_all(strategies)


def test_temperature_zero_is_refused_in_words(make_trainer: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match=r"temperature is 0\.0; use one above 0"):
        make_trainer(ExplorationTrainer, temperature=0.0)
    with pytest.raises(ValueError, match=r"generation_kwargs\['temperature'\] is 0; use one above 0"):
        make_trainer(ExplorationTrainer, generation_kwargs={"temperature": 0})


@pytest.mark.parametrize(
    ("sampling", "error"),
    [
        ({"temprature": [1.0]}, r"hot\.sampling returns 'temprature'; it may return temperature, top_p"),
        ({"temperature": [1.0]}, r"hot\.sampling returns 1 values of 'temperature' for 2 rows"),
    ],
)
def test_what_a_strategy_says_of_sampling_is_checked(sampling: Any, error: str) -> None:
    with pytest.raises(ValueError, match=error):
        SamplingPlan({"max_tokens": 4}, [hot(sampling)], ["a", "b"], 0)


def test_calls_of_a_tool_that_is_not_there_are_refused(make_trainer: Callable[..., Any]) -> None:
    trainer = make_trainer(ExplorationTrainer, options={"strategies": [hot({"tool_calls": 2})]})
    with pytest.raises(ValueError, match=r"hot\.sampling returns 'tool_calls', but there is no tool to call"):
        trainer.train()


def test_one_temperature_for_all_rows() -> None:
    assert SamplingPlan({"max_tokens": 4}, [hot({"temperature": 0.7})], ["a", "b"], 0).sampling_temperature == [
        0.7,
        0.7,
    ]
    assert SamplingPlan({"max_tokens": 4}, [hot(None)], ["a", "b"], 0).sampling_temperature is None


def hot(parameters: Any) -> Strategy:
    @dataclass(frozen=True)
    class Hot(Strategy):
        name = "hot"

        def sampling(self, prompts: Any, step: int) -> Any:
            return parameters

    return Hot()


@pytest.mark.parametrize(("order", "error"), [([999], "returns index 999"), ([], "returns no prompts")])
def test_an_order_that_has_no_such_prompt(make_trainer: Callable[..., Any], order: list[int], error: str) -> None:
    @dataclass(frozen=True)
    class Ordered(Strategy):
        name = "ordered"

        def order(self, prompts: Any) -> list[int]:
            return order

    with pytest.raises(ValueError, match=rf"ordered\.order {error}; return one or more indices from 0 to 15"):
        make_trainer(ExplorationTrainer, options={"strategies": [Ordered()]})


# ---------------------------------------------------------------- PassAtK and RunRecorder, in odd orders

ROWS = [{"prompt": PROMPTS[0]}, {"prompt": PROMPTS[1]}]


def test_scores_that_come_after_the_recorder_are_recorded(make_trainer: Callable[..., Any], tmp_path: Path) -> None:
    trainer = make_trainer(ExplorationTrainer, max_steps=1)
    recorder = RunRecorder(tmp_path / "run").watch(trainer)
    trainer.add_callback(PassAtK(ROWS, digits, samples=2))
    trainer.train()
    assert len(list((tmp_path / "run" / "evaluations").glob("*.json"))) == 2
    assert recorder.store.config()["evaluation"] == {"every": None, "problems": 2, "samples": 2}


def test_a_trainer_is_recorded_once(make_trainer: Callable[..., Any], tmp_path: Path) -> None:
    trainer = make_trainer(ExplorationTrainer, max_steps=1)
    recorder = RunRecorder(tmp_path / "run").watch(trainer)
    recorder.watch(trainer)
    with pytest.raises(ValueError, match="already recorded in"):
        RunRecorder(tmp_path / "run").watch(trainer)
    trainer.train()
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 1


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"dataset": None}, "is None; use a datasets"),
        ({"dataset": {"train": ROWS, "test": ROWS}}, "a mapping of 'train', 'test'; use one of these"),
        ({"dataset": [*ROWS, {"text": "1"}]}, "row 2 of the data set of PassAtK has no 'prompt'; it has text"),
        ({"reward": [digits]}, "use one function"),
        ({"every": 1.5}, "every is 1.5"),
        ({"samples": 2.5}, "samples is 2.5"),
    ],
)
def test_what_pass_at_k_cannot_use(options: dict[str, Any], error: str) -> None:
    with pytest.raises(ValueError, match=error):
        PassAtK(**{"dataset": ROWS, "reward": digits, **options})


def test_a_column_that_the_reward_function_misses_is_named() -> None:
    def judge(completions: list[str], solution: list[str], **columns: Any) -> list[float]:
        return [1.0 for _ in completions]

    task = PassAtK(ROWS, judge).task
    with pytest.raises(ValueError, match=r"missing a required argument: 'solution'; the data set needs a column"):
        task.verify_many(["1"], task.problems("holdout")[:1])


def test_a_later_temperature_takes_the_training_temperature_with_it() -> None:
    """What the loss looks at belongs to the temperature that was sampled at, not to one that another replaced."""
    options = {"max_tokens": 4}
    rates = {"a": 0.5, "b": 0.5}
    curve = [xs.AnnealedTemperature(), xs.AnnealedTemperature(training_temperature="one")]
    flat = [xs.ElementWiseTemperature(solve_rates=rates, training_temperature=mode) for mode in ("row", "one")]
    for first, second in ((flat[1], curve[0]), (curve[1], flat[0])):
        draw = SamplingPlan(dict(options), [first, second], ["a", "b"], 0)
        assert draw.training_temperature is draw.sampling_temperature
    assert SamplingPlan(dict(options), [flat[0], curve[1]], ["a", "b"], 0).training_temperature == [1.0, 1.0]
