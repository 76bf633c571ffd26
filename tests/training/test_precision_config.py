"""`model.dtype`: what computes, what is trained, and which hosts can do it."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

from explorl.core.config import Config, ConfigError, load_config
from explorl.core.store import RunStore
from explorl.models import load_policy
from explorl.training.grpo.run import StoredExplorationTrainer, correct_reward, grpo_config, run_grpo
from explorl.training.sft.run import StoredSFTTrainer, run_sft, starting_policy

CPU_ONLY = pytest.mark.skipif(torch.accelerator.is_available(), reason="says what happens on a host without a GPU")
LOST = "bfloat16 weights without a float32 copy"


def config_of(policy: Path, dtype: str, *, lora: bool = False, **training: Any) -> Config:
    return load_config(
        preset="tiny",
        values={
            "model": {"name": str(policy), "dtype": dtype, "lora": {"rank": 2} if lora else None},
            "task": {"train_problems": 16},
            "rollout": {"max_tokens": 8, "engine": "generate"},
            "training": {
                "steps": 2, "prompts_per_step": 2, "generations": 4, "micro_batch": 4, "learning_rate": 5e-6, **training
            },
            "sft": {"from_scratch": False, "examples": 8, "batch_size": 4, "epochs": 1, "score": False},
        },
    )  # fmt: skip


@pytest.mark.parametrize(
    ("dtype", "weights", "evaluated", "bf16"),
    [
        ("float32", "float32", "float32", False),
        ("bfloat16", "float32", "bfloat16", True),
        ("pure_bfloat16", "bfloat16", "bfloat16", True),
    ],
)
def test_a_dtype_says_what_computes(dtype: str, weights: str, evaluated: str, bf16: bool, tmp_path: Path) -> None:
    model = load_config(preset="tiny", values={"model": {"dtype": dtype}}).model
    assert model.training_dtype == weights
    assert model.evaluation_dtype == evaluated
    args = grpo_config(load_config(preset="tiny", values={"model": {"dtype": dtype}}), str(tmp_path))
    assert (args.bf16, args.fp16) == (bf16, False)


def test_float16_has_a_gradient_scaler_where_there_is_an_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    model = load_config(values={"model": {"dtype": "float16"}}).model
    assert (model.training_dtype, model.evaluation_dtype) == ("float32", "float16")
    assert model.precision() == {"bf16": False, "fp16": True, "use_cpu": False}


@CPU_ONLY
@pytest.mark.parametrize("run", [run_grpo, run_sft])
def test_float16_is_refused_on_a_cpu(run: Any, small_policy: Path, tmp_path: Path) -> None:
    """accelerate would compute in float32 there without a word."""
    config = config_of(small_policy, "float16")
    store = RunStore.create(tmp_path / "run", config.dump())
    with pytest.raises(ConfigError, match=r"model\.dtype is float16, which needs a GPU.*use bfloat16"):
        run(config, store, console=Console(quiet=True))
    assert not store.metrics()
    assert not store.provenance_path.exists()


class Seen(Exception):
    """What was to be seen has been seen."""


@pytest.mark.parametrize("cls", [StoredExplorationTrainer, StoredSFTTrainer])
@pytest.mark.parametrize(
    ("dtype", "lora", "trained", "frozen", "warned"),
    [
        ("float32", False, torch.float32, None, False),
        ("bfloat16", False, torch.float32, None, False),
        ("bfloat16", True, torch.float32, torch.float32, False),
        ("pure_bfloat16", False, torch.bfloat16, None, True),
        ("pure_bfloat16", True, torch.float32, torch.bfloat16, False),
    ],
)
def test_what_is_trained_in_which_precision(
    cls: Any,
    dtype: str,
    lora: bool,
    trained: torch.dtype,
    frozen: torch.dtype | None,
    warned: bool,
    small_policy: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = config_of(small_policy, dtype, lora=lora)
    store = RunStore.create(tmp_path / "run", config.dump())
    recorded: dict[str, Any] = {}

    def train(self: Any, **kwargs: Any) -> None:
        recorded.update(
            trained={p.dtype for p in self.model.parameters() if p.requires_grad},
            frozen={p.dtype for p in self.model.parameters() if not p.requires_grad},
            autocast=self.accelerator.native_amp,
        )
        raise Seen

    monkeypatch.setattr(cls, "train", train)
    run = run_grpo if cls is StoredExplorationTrainer else run_sft
    with warnings.catch_warnings(record=True) as caught, pytest.raises(Seen):
        warnings.simplefilter("always")
        run(config, store, console=Console(quiet=True))
    assert recorded["trained"] == {trained}
    assert recorded["frozen"] == ({frozen} if frozen else set())
    assert recorded["autocast"] == (dtype != "float32")
    messages = [str(w.message) for w in caught if LOST in str(w.message)]
    assert len(messages) == warned
    assert all("use bfloat16" in message for message in messages)


@pytest.mark.parametrize(("dtype", "moved"), [("bfloat16", (0.9, 1.0)), ("pure_bfloat16", (0.0, 0.5))])
@pytest.mark.filterwarnings("ignore:model.dtype is pure_bfloat16")
def test_mixed_precision_moves_the_weights(
    dtype: str, moved: tuple[float, float], small_policy: Path, tmp_path: Path
) -> None:
    """At learning rate 5e-6 AdamW's steps are below the spacing of bfloat16 numbers, and are not lost in float32."""
    config = config_of(small_policy, dtype)
    config.sft.learning_rate, config.sft.warmup_steps = 5e-6, 0
    start = starting_policy(config).model.state_dict()
    made = run_sft(config, RunStore.create(tmp_path / "run", config.dump()), console=Console(quiet=True))
    end = load_file(made / "model.safetensors")
    assert {value.dtype for value in end.values()} == {getattr(torch, config.model.training_dtype)}
    layers = [name for name in end if "proj" in name]
    changed = sum(int((end[name] != start[name]).sum()) for name in layers)
    share = changed / sum(end[name].numel() for name in layers)
    assert moved[0] <= share <= moved[1]
    assert load_policy(str(made), dtype=config.model.evaluation_dtype).model.dtype == torch.bfloat16


@pytest.mark.parametrize("engine", ["explorl", "generate"])
def test_grpo_in_mixed_precision(
    engine: str, small_policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights and optimizer stay float32."""
    config = config_of(small_policy, "bfloat16", beta=0.1)
    config.rollout.engine = engine  # type: ignore[assignment]
    recorded: dict[str, Any] = {}
    train = StoredExplorationTrainer.train

    def watched(self: Any, **kwargs: Any) -> Any:
        result = train(self, **kwargs)
        recorded["states"] = {v.dtype for state in self.optimizer.state.values() for v in state.values() if v.ndim}
        return result

    monkeypatch.setattr(StoredExplorationTrainer, "train", watched)
    store = RunStore.create(tmp_path / "run", config.dump())
    made = run_grpo(config, store, console=Console(quiet=True))
    assert recorded["states"] == {torch.float32}
    assert {value.dtype for value in load_file(made / "model.safetensors").values()} == {torch.float32}
    assert [record["step"] for record in store.metrics() if record["kind"] == "train"] == [1, 2]


def test_the_random_tiny_policy_has_the_weights_dtype() -> None:
    for dtype in ("bfloat16", "pure_bfloat16"):
        config = load_config(preset="tiny", values={"model": {"dtype": dtype}})
        assert starting_policy(config).model.dtype == getattr(torch, config.model.training_dtype)


# ---------------------------------------------------------------------------- TRL's losses
def test_luspo_has_sequence_ratios_and_cispo_its_own_bound(tmp_path: Path) -> None:
    made = {
        loss: grpo_config(load_config(preset="tiny", values={"training": {"loss": loss}}), str(tmp_path))
        for loss in ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo")
    }
    assert {loss: args.loss_type for loss, args in made.items()} == {loss: loss for loss in made}
    levels = {loss: args.importance_sampling_level for loss, args in made.items()}
    assert levels.pop("luspo") == "sequence"
    assert set(levels.values()) == {"token"}
    bounds = {loss: args.epsilon_high for loss, args in made.items()}
    assert bounds.pop("cispo") == 5.0
    assert set(bounds.values()) == {0.2}


# ---------------------------------------------------------------------------- which answers are correct
def test_the_trainer_is_told_which_reward_says_correct(
    small_policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(small_policy, "float32")
    trainer_options: dict[str, Any] = {}

    def init(self: Any, *args: Any, **options: Any) -> None:
        trainer_options.update(options)
        raise Seen

    monkeypatch.setattr(StoredExplorationTrainer, "__init__", init)
    with pytest.raises(Seen):
        run_grpo(config, RunStore.create(tmp_path / "run", config.dump()), console=Console(quiet=True))
    assert trainer_options["correct"] == ("correctness", 1.0)
    from trl.trainer.utils import get_callable_name

    assert trainer_options["correct"][0] in [
        get_callable_name(function) for function in trainer_options["reward_funcs"]
    ]


def test_a_correct_answer_reaches_the_threshold_before_the_weights() -> None:
    from explorl.tasks import get_task

    class Heavy(type(get_task("countdown-mini"))):  # type: ignore[misc]
        reward_parts = {"format": 0.1, "correctness": 0.5}  # noqa: RUF012

    task = Heavy()
    name, threshold = correct_reward(task)
    function = next(f for f in task.reward_functions() if f.__name__ == name)
    problem = task.problem([3, 7, 12], 33)
    columns = {"id": [problem.id] * 2, "data": [dict(problem.data)] * 2, "opened": [False] * 2}
    answers = [f"<think>x</think><answer>{text}</answer>" for text in ("7 * 3 + 12", "7 + 3 + 12")]
    right, wrong = function(prompts=["x"] * 2, completions=answers, **columns)
    assert wrong < threshold <= right


def test_a_task_without_that_reward_part_is_told() -> None:
    from explorl.tasks import get_task

    class Scored(type(get_task("countdown-mini"))):  # type: ignore[misc]
        reward_parts = {"score": 1.0}  # noqa: RUF012

    with pytest.raises(ValueError, match=r"'countdown-mini'.*correct_part is 'correctness'.*set it to one of score"):
        correct_reward(Scored())
    Scored.correct_part = "score"
    assert correct_reward(Scored()) == ("score", 1.0)
