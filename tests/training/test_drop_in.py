"""A TRL script with our class name in it: TRL's options, defaults and data do what they do in TRL, or are refused."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import json
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset, IterableDataset
from tools.docs import trl_options
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from explorl import strategies as xs
from explorl.models import load_policy
from explorl.training.grpo import options
from explorl.training.grpo.sampling_plan import sampling_options, unsupported_options
from explorl.training.grpo.trainer import ExplorationTrainer
from tests.training.conftest import PROMPTS
from tests.training.small_runs import digits

# ---------------------------------------------------------------- the table of options


def test_every_option_of_trl_is_in_the_table_once() -> None:
    """A field that a new release of TRL or transformers adds fails here until somebody has looked at it."""
    fields = {field.name for field in dataclasses.fields(GRPOConfig)}
    lists = [options.HONOURED, set(options.STEPS_ASIDE), set(options.IRRELEVANT)]
    listed = set().union(*lists)
    assert fields - listed == set(), "new options: say in explorl/training/grpo/options.py what becomes of them"
    assert sum(map(len, lists)) == len(listed), "an option is on two lists"


def test_every_argument_of_trls_trainer_is_in_the_table() -> None:
    arguments = set(inspect.signature(GRPOTrainer.__init__).parameters) - {"self"}
    assert arguments == set(options.ARGUMENTS)


def test_the_page_about_options_is_up_to_date() -> None:
    text = (Path(__file__).parents[2] / "docs" / "trl.md").read_text(encoding="utf-8")
    assert text == trl_options.page(), "run python -m tools.docs.trl_options > docs/trl.md"


def test_unknown_arguments_are_errors(make_trainer: Callable[..., Any]) -> None:
    with pytest.raises(TypeError, match="strategy"):
        make_trainer(ExplorationTrainer, options={"strategy": ["egsw"]})


# ---------------------------------------------------------------- what samples, and from what


class Stop(Exception):
    """Ends a run where the test has seen enough."""


def first_prompts(trainer: Any) -> list[list[int]]:
    """The token ids of the first prompts that the engine is asked to continue."""
    prompts: list[list[int]] = []

    def sample(sampled: Any, prompt_ids: list[list[int]], rows: Any = None) -> None:
        prompts.extend(prompt_ids)
        raise Stop

    trainer.sampler.sample = sample
    with pytest.raises(Stop):
        trainer.train()
    return prompts


TEMPLATE = (
    "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    "{% if enable_thinking is defined and enable_thinking is false %}={% else %}?{% endif %}"
)


def test_chat_template_kwargs_reach_the_prompt(small_policy: Path, tmp_path: Path) -> None:
    ends = {}
    for thinking in (True, False):
        policy = load_policy(str(small_policy), device="cpu")
        policy.tokenizer.chat_template = TEMPLATE
        trainer = ExplorationTrainer(
            model=policy.model,
            reward_funcs=lambda completions, **columns: [0.0] * len(completions),
            args=GRPOConfig(
                str(tmp_path), use_cpu=True, report_to="none", max_completion_length=4, max_steps=1,
                per_device_train_batch_size=2, num_generations=2, chat_template_kwargs={"enable_thinking": thinking},
            ),
            train_dataset=Dataset.from_dict({"prompt": [[{"role": "user", "content": "1 2 3"}]] * 4}),
            processing_class=policy.tokenizer,
        )  # fmt: skip
        ends[thinking] = policy.tokenizer.decode(first_prompts(trainer)[0])
    assert ends == {True: "1 2 3?", False: "1 2 3="}


def test_special_prefix_tokens_of_a_tokenizer_without_bos_are_kept(
    make_trainer: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from tokenizers.processors import TemplateProcessing

    trainer = make_trainer(ExplorationTrainer)
    tokenizer = trainer.tokenizer
    assert tokenizer.bos_token is None
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<think> $A", special_tokens=[("<think>", tokenizer.convert_tokens_to_ids("<think>"))]
    )
    assert {ids[0] for ids in first_prompts(trainer)} == {tokenizer.convert_tokens_to_ids("<think>")}


def test_generation_kwargs_go_to_the_engine(make_trainer: Callable[..., Any]) -> None:
    given = {"top_k": 5, "do_sample": False, "max_new_tokens": 3}
    trainer = make_trainer(ExplorationTrainer, generation_kwargs=given, max_steps=1, temperature=0.7)
    assert trainer.sampler.engine is not None
    found = sampling_options(trainer.generation_kwargs, trainer.eos_token_ids)
    assert (found["top_k"], found["temperature"], found["max_tokens"]) == (5, 0.0, 3)
    trainer.train()
    log = trainer.state.log_history[0]
    assert log["completions/max_length"] <= 3
    assert log["frac_reward_zero_std"] == 1.0  # greedy: all samples of a prompt are one


@pytest.mark.parametrize("options", [{}, {"strategies": ["egsw"]}, {"dynamic_sampling": True}], ids=str)
def test_a_temperature_for_sampling_alone(make_trainer: Callable[..., Any], options: dict[str, Any]) -> None:
    """TRL's loss is at the temperature of `GRPOConfig`: without a step in between, every ratio is 1."""
    trainer = make_trainer(
        ExplorationTrainer, generation_kwargs={"temperature": 0.3}, temperature=0.9, steps_per_generation=4,
        learning_rate=0.0, options=options,
    )  # fmt: skip
    batch = batch_of(trainer)
    assert batch.temperature.tolist() == pytest.approx([0.3] * 16)
    torch.testing.assert_close(batch.logps, batch.old_logps)
    assert (batch.sampling_logps - batch.old_logps)[batch.mask > 0].abs().max() > 0.1
    assert [log["clip_ratio/region_mean"] for log in trainer.state.log_history[:-1]] == [0, 0]
    for part in trainer._buffered_inputs:
        own, _, _ = trainer.logprobs.of(part)
        mask = part["completion_mask"]
        torch.testing.assert_close(own * mask, part["old_per_token_logps"] * mask, rtol=1e-4, atol=1e-5)


def test_a_callback_changes_how_is_sampled(make_trainer: Callable[..., Any]) -> None:
    """By TRL's `generation_config`, which is what `generate` gets of it."""
    kinds: list[bool] = []

    class Change(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            kinds.append(trainer.sampled.records is not None)
            trainer.generation_config.max_new_tokens = 3
            trainer.generation_config.min_new_tokens = 3 if state.global_step > 1 else None

    trainer = make_trainer(ExplorationTrainer, max_steps=3, options={"callbacks": [Change()]})
    with pytest.warns(UserWarning, match="a batch is sampled by model.generate, .*the engine has no min_new_tokens=3"):
        trainer.train()
    assert [log["completions/max_length"] for log in trainer.state.log_history[:-1]] == [10, 3, 3]
    assert kinds == [True, True, False]
    trainer.strategies.append(xs.BottomP(0.9))
    with pytest.raises(ValueError, match=r"model.generate does not support \(the engine has no min_new_tokens=3\)"):
        trainer.train()


def test_a_length_in_generation_kwargs_alone(make_trainer: Callable[..., Any]) -> None:
    options = {"max_completion_length": None, "generation_kwargs": {"max_new_tokens": 3}}
    trainer = make_trainer(ExplorationTrainer, max_steps=1, **options)
    trainer.train()
    assert trainer.sampler.engine is not None
    assert trainer.state.log_history[0]["completions/max_length"] == 3


@pytest.mark.parametrize("options", [{"no_repeat_ngram_size": 2}, {"suppress_tokens": [5]}, {"num_beams": 2}])
def test_generation_kwargs_that_the_engine_lacks_are_left_to_generate(
    make_trainer: Callable[..., Any], options: dict[str, Any]
) -> None:
    with pytest.warns(UserWarning, match=f"sampling by model.generate.*no {next(iter(options))}"):
        trainer = make_trainer(ExplorationTrainer, generation_kwargs=options)
    assert trainer.sampler.engine is None
    with pytest.raises(ValueError, match=r"bottom_p sets how each row is sampled.*; remove it"):
        make_trainer(ExplorationTrainer, generation_kwargs=options, options={"strategies": ["bottom_p"]})
    with pytest.raises(ValueError, match="engine='explorl' cannot sample here"):
        make_trainer(ExplorationTrainer, generation_kwargs=options, options={"engine": "explorl"})


@pytest.mark.parametrize("owner", ["model", "class"])
def test_a_generate_of_the_users_own_is_called(
    make_trainer: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, owner: str
) -> None:
    from transformers import GenerationMixin

    def four_more(self: Any = None, input_ids: Any = None, **kwargs: Any) -> Any:
        return torch.cat([input_ids, torch.full((len(input_ids), 4), 9)], dim=1)

    if owner == "class":
        monkeypatch.setattr(GenerationMixin, "generate", four_more)
    else:
        load = load_policy

        def with_own(*kwargs: Any, **more: Any) -> Any:
            policy = load(*kwargs, **more)
            policy.model.generate = four_more
            return policy

        monkeypatch.setattr("tests.training.conftest.load_policy", with_own)
    with pytest.warns(UserWarning, match=r"sampling by model.generate.*LlamaForCausalLM overrides generate"):
        trainer = make_trainer(ExplorationTrainer, max_steps=1)
    trainer.train()
    assert trainer.state.log_history[0]["completions/max_length"] == 4


def test_a_generate_that_comes_later_is_called(make_trainer: Callable[..., Any]) -> None:
    trainer = make_trainer(ExplorationTrainer, max_steps=1)
    trainer.model.generate = lambda input_ids, **kwargs: torch.cat(
        [input_ids, torch.full((len(input_ids), 4), 9)], dim=1
    )
    trainer.train()
    assert trainer.state.log_history[0]["completions/max_length"] == 4


def test_a_models_own_generation_config_counts_too() -> None:
    from transformers import GenerationConfig

    usual = GenerationConfig(temperature=0.7, top_p=0.8, top_k=20, repetition_penalty=1.1, eos_token_id=[1, 2])
    assert unsupported_options({"temperature": 1.0}, usual) == {}
    assert unsupported_options({}, GenerationConfig(bad_words_ids=[[3]])) == {"bad_words_ids": [[3]]}


def test_a_model_that_the_engine_would_sample_wrongly_is_sampled_by_generate(
    small_policy: Path, tmp_path: Path
) -> None:
    from transformers import Lfm2Config, Lfm2ForCausalLM

    tokenizer = load_policy(str(small_policy), device="cpu").tokenizer
    model = Lfm2ForCausalLM(
        Lfm2Config(
            vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128,
            layer_types=["conv", "full_attention"], eos_token_id=tokenizer.eos_token_id, bos_token_id=None,
            pad_token_id=tokenizer.pad_token_id,
        )
    )  # fmt: skip
    args = GRPOConfig(
        str(tmp_path), use_cpu=True, report_to="none", max_completion_length=6, max_steps=1, num_generations=4,
        per_device_train_batch_size=4, logging_steps=1,
    )  # fmt: skip
    data = Dataset.from_dict({"prompt": PROMPTS})
    options: dict[str, Any] = {"model": model, "reward_funcs": digits, "args": args, "train_dataset": data}
    with pytest.raises(ValueError, match=r"engine='explorl' would not sample as this model does .*Lfm2"):
        ExplorationTrainer(**options, processing_class=tokenizer, engine="explorl")
    with pytest.warns(UserWarning, match=r"sampling by model.generate.*Lfm2DecoderLayer"):
        trainer = ExplorationTrainer(**options, processing_class=tokenizer, strategies=["egsw"])
    with pytest.warns(UserWarning, match=r"computed with padding.*Lfm2DecoderLayer"):
        trainer.train()
    assert trainer.state.log_history[0]["entropy"] > 0


# ---------------------------------------------------------------- data


def test_an_endless_stream_is_not_read_ahead(small_policy: Path, tmp_path: Path) -> None:
    read = [0]

    def endless() -> Iterator[dict[str, str]]:
        while True:
            read[0] += 1
            assert read[0] < 1000
            yield {"prompt": PROMPTS[read[0] % len(PROMPTS)]}

    policy = load_policy(str(small_policy), device="cpu")
    args = GRPOConfig(
        str(tmp_path), use_cpu=True, bf16=False, report_to="none", max_completion_length=4, max_steps=2,
        per_device_train_batch_size=4, num_generations=4, shuffle_dataset=False,
    )  # fmt: skip
    options: dict[str, Any] = {
        "model": policy.model,
        "reward_funcs": digits,
        "args": args,
        "train_dataset": IterableDataset.from_generator(endless),
        "processing_class": policy.tokenizer,
    }
    ExplorationTrainer(**options, strategies=["egsw"]).train()
    rates = dict.fromkeys(PROMPTS, 0.5)
    with pytest.raises(ValueError, match="curriculum orders the prompts, but IterableDataset is a stream"):
        ExplorationTrainer(**options, strategies=[xs.Curriculum(rates)])


# ---------------------------------------------------------------- batches


def micro_batches(trainer: Any) -> list[dict[str, Any]]:
    recorded: list[dict[str, Any]] = []
    loss = trainer.loss

    def watched(model: Any, batch: dict[str, Any]) -> Any:
        recorded.append(batch)
        return loss(model, batch)

    trainer.loss = watched
    trainer.train()
    return recorded


@pytest.mark.filterwarnings("ignore:kl_cov does nothing on a batch")
@pytest.mark.parametrize(
    ("per_generation", "accumulated"),
    [(5, 2), (2, 4), *(pytest.param(*pair, marks=pytest.mark.slow) for pair in [(4, 2), (3, 2), (6, 4)])],
)
@pytest.mark.parametrize("iterations", [1, 2])
def test_generation_batches_that_do_not_end_with_an_optimizer_step(
    make_trainer: Callable[..., Any], per_generation: int, accumulated: int, iterations: int
) -> None:
    trainer = make_trainer(
        ExplorationTrainer, steps_per_generation=per_generation, gradient_accumulation_steps=accumulated,
        max_steps=4, num_iterations=iterations, temperature=1.0, options={"strategies": ["kl_cov"]},
    )  # fmt: skip
    recorded = micro_batches(trainer)
    assert len(recorded) == 4 * accumulated
    assert all(0 < len(batch["completion_ids"]) <= 4 for batch in recorded)


def lengths_by_place(completion_ids: list[list[int]], **columns: Any) -> list[float]:
    return [float(len(ids)) for ids in completion_ids]


@pytest.mark.filterwarnings("ignore:You are using 'rollout_func'")
def test_no_micro_batch_has_more_rows_than_asked_for(make_trainer: Callable[..., Any]) -> None:
    """One long answer among short ones: dealt by tokens alone, the short ones would stand in one micro-batch."""

    def answers(prompts: list[str], trainer: Any) -> dict[str, Any]:
        ids = [[7 + i % 50] * (10 if i % 8 == 0 else 1) for i in range(len(prompts))]
        return {"prompt_ids": trainer.tokenizer(prompts)["input_ids"], "completion_ids": ids, "logprobs": None}

    trainer = make_trainer(
        ExplorationTrainer, gradient_accumulation_steps=4, max_steps=1, num_generations=8,
        options={"rollout_func": answers},
    )  # fmt: skip
    trainer.reward_funcs = [lengths_by_place]
    assert [len(batch["completion_ids"]) for batch in micro_batches(trainer)] == [4, 4, 4, 4]


# ---------------------------------------------------------------- what is correct


def accuracy(completions: list[str], **columns: Any) -> list[float]:
    return [float(i % 4 == 0) for i in range(len(completions))]


def well_formed(completions: list[str], **columns: Any) -> list[float]:
    return [1.0] * len(completions)


def batch_of(trainer: Any) -> Any:
    """The first `Batch` that the strategies see."""
    batches: list[Any] = []

    class Look(xs.Strategy):
        name = "look"

        def metrics(self, batch: Any) -> dict[str, float]:
            batches.append(batch)
            return {}

    trainer.strategies.append(Look())
    trainer.train()
    return batches[0]


def test_a_wrong_answer_in_the_right_form_is_wrong(make_trainer: Callable[..., Any], small_policy: Path) -> None:
    def make(**options: Any) -> Any:
        policy = load_policy(str(small_policy), device="cpu")
        args = copy.copy(make_trainer(ExplorationTrainer, max_steps=1).args)
        return ExplorationTrainer(
            model=policy.model, reward_funcs=[well_formed, accuracy], args=args, processing_class=policy.tokenizer,
            train_dataset=Dataset.from_dict({"prompt": PROMPTS}), strategies=["negative_reinforcement"], **options,
        )  # fmt: skip

    with pytest.warns(UserWarning, match="count as correct if the reward function 'accuracy' returns at least 1"):
        guessed = make()
    batch = batch_of(guessed)
    assert batch.rewards.min() == 1.0
    assert batch.correct.tolist() == [i % 4 == 0 for i in range(len(batch.correct))]
    assert make(correct=("accuracy", 0.5)).correct.threshold == 0.5
    with pytest.raises(ValueError, match="correct names the reward function 'exactness'; this trainer has well_formed"):
        make(correct="exactness")


# ---------------------------------------------------------------- what strategies are told, and remember


def test_kl_cov_does_not_act_on_rounding(make_trainer: Callable[..., Any]) -> None:
    """With a learning rate of 0 the policy never moves, so |log π − log π_old| has no gradient, in any update."""
    norms = {}
    for name, spec in (("none", []), ("kl_cov", [{"kl_cov": {"fraction": 1.0, "coef": 100.0}}])):
        for reuse in ({"num_iterations": 2}, {"steps_per_generation": 4, "gradient_accumulation_steps": 2}):
            trainer = make_trainer(
                ExplorationTrainer, learning_rate=0.0, max_steps=4, epsilon=100.0, weight_decay=0.0,
                options={"strategies": spec}, **reuse,
            )  # fmt: skip
            trainer.train()
            log = [entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry]
            norms[name, str(reuse)] = log
    for reuse in {key[1] for key in norms}:
        assert norms["kl_cov", reuse] == pytest.approx(norms["none", reuse], rel=1e-3)


@pytest.mark.filterwarnings("ignore:completions count as correct")
def test_memory_does_not_pass_from_one_trainer_to_the_next(make_trainer: Callable[..., Any]) -> None:
    strategy = xs.ElementWiseTemperature(source="running")
    first = make_trainer(ExplorationTrainer, options={"strategies": [strategy]})
    first.train()
    assert first.strategies[0].memory["rates"]
    assert strategy.memory == {}
    assert make_trainer(ExplorationTrainer, options={"strategies": [strategy]}).strategies[0].memory == {}


def test_the_step_is_told_when_sampling(make_trainer: Callable[..., Any]) -> None:
    steps: list[int] = []

    class Tell(xs.Strategy):
        name = "tell"

        def sampling(self, prompts: Any, step: int) -> dict[str, Any]:
            steps.append(step)
            return {}

    make_trainer(ExplorationTrainer, max_steps=3, options={"strategies": [Tell()]}).train()
    assert steps == [0, 1, 2]


def test_training_at_temperature_one(make_trainer: Callable[..., Any]) -> None:
    rates = dict.fromkeys(PROMPTS, 0.0)
    recorded = {}
    for where in ("row", "one"):
        strategy = xs.ElementWiseTemperature(solve_rates=rates, hard=1.5, training_temperature=where)
        trainer = make_trainer(ExplorationTrainer, max_steps=1, options={"strategies": [strategy]})
        recorded[where] = batch_of(trainer), trainer._buffered_inputs[0]["row_temperature"]
    assert set(recorded["row"][1].tolist()) == {1.5}
    assert set(recorded["one"][1].tolist()) == {1.0}
    assert set(recorded["one"][0].temperature.tolist()) == {1.5}
    mask = recorded["row"][0].mask > 0
    torch.testing.assert_close(recorded["row"][0].sampling_logps[mask], recorded["one"][0].sampling_logps[mask])
    assert (recorded["row"][0].old_logps - recorded["one"][0].old_logps)[mask].abs().max() > 0.1


def test_a_synced_reference_is_restored_by_a_resume(make_trainer: Callable[..., Any], tmp_path: Path) -> None:
    options = {
        "beta": 0.5, "sync_ref_model": True, "ref_model_sync_steps": 1, "ref_model_mixup_alpha": 0.5, "max_steps": 4,
        "save_strategy": "steps", "save_steps": 2, "learning_rate": 1e-2,
    }  # fmt: skip
    whole = make_trainer(ExplorationTrainer, **options)
    whole.train()
    resumed = make_trainer(ExplorationTrainer, **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-2"))
    for first, other in zip(whole.ref_model.parameters(), resumed.ref_model.parameters(), strict=True):
        torch.testing.assert_close(first, other, rtol=0, atol=0)


def generations_of(trainer: Any, checkpoint: Path) -> list[int | str]:
    """Places in the generation batch of the micro-batches of a resumed run, "new" before the first of each batch."""
    recorded: list[int | str] = []
    score, loss = trainer.scored, trainer.loss
    trainer.scored = lambda inputs: (recorded.append("new"), score(inputs))[1]
    trainer.loss = lambda *args: (recorded.append(trainer.micro_step % trainer.args.steps_per_generation), loss(*args))[
        1
    ]
    trainer.train(resume_from_checkpoint=str(checkpoint))
    return recorded


def test_a_resume_with_other_accumulation_begins_a_batch_with_its_first_part(
    make_trainer: Callable[..., Any], tmp_path: Path
) -> None:
    make_trainer(ExplorationTrainer, max_steps=2, save_strategy="steps", save_steps=2).train()
    resumed = make_trainer(ExplorationTrainer, max_steps=4, gradient_accumulation_steps=3)
    assert generations_of(resumed, tmp_path / "out" / "checkpoint-2") == ["new", 0, 1, 2] * 2


def test_a_batch_in_use_by_other_processes_is_sampled_anew(make_trainer: Callable[..., Any], tmp_path: Path) -> None:
    """One process has the rows of two no more, and of two processes one alone would find a batch and go on with it."""
    make_trainer(ExplorationTrainer, max_steps=1, num_iterations=2, save_strategy="steps", save_steps=1).train()
    state = tmp_path / "out" / "checkpoint-1" / "strategies.json"
    assert json.loads(state.read_text())["processes"] == 1
    state.write_text(json.dumps({**json.loads(state.read_text()), "processes": 2}))
    resumed = make_trainer(ExplorationTrainer, max_steps=2, num_iterations=2)
    with pytest.warns(UserWarning, match="was written by 2 processes, now there are 1: the generation batch that was"):
        assert generations_of(resumed, state.parent) == ["new", 0, 1]


@pytest.mark.parametrize("options", [{}, {"strategies": ["egsw"], "engine": "generate"}])
def test_reentrant_checkpointing_warns_of_no_missing_gradient(make_trainer: Callable[..., Any], options: Any) -> None:
    """Where a pass has none: TRL's own go without checkpointing, and so do ours."""
    reentrant = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}}
    trainer = make_trainer(ExplorationTrainer, max_steps=1, options=options, **reentrant)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.train()
    assert trainer.state.log_history[0]["grad_norm"] > 0
    assert [warning for warning in caught if "None of the inputs have requires_grad" in str(warning.message)] == []


def test_fast_paths_are_tried_out_once(make_trainer: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Not again at every generation, though TRL switches adapters and gradient checkpointing off and on in each."""
    from peft import LoraConfig

    from explorl.modeling import fast_paths
    from explorl.rollout import engine

    tried: list[str] = []
    own = fast_paths._try_out
    monkeypatch.setattr(fast_paths, "_try_out", lambda path, *given: (tried.append(path), own(path, *given))[1])
    looks: list[int] = []
    probe = engine.probe
    monkeypatch.setattr(engine, "probe", lambda *args: (looks.append(1), probe(*args))[1])
    trainer = make_trainer(
        ExplorationTrainer, max_steps=5, beta=0.1, bf16=True, gradient_checkpointing=True,
        options={"peft_config": LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear")},
    )  # fmt: skip
    counts: list[tuple[int, int]] = []
    sample = trainer.sampler.sample
    trainer.sampler.sample = lambda *given: (counts.append((len(tried), len(looks))), sample(*given))[1]
    trainer.train()
    assert len(counts) == 5
    assert counts[2] == counts[4]
