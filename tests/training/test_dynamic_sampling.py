"""Dynamic sampling in runs of a tiny policy: what is exchanged, what is logged, and what does not depend on it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset

from explorl.cli.app import main
from explorl.core.store import RunStore
from explorl.strategies import Batch, Strategy
from explorl.training.grpo.batch import forward_token_stats
from explorl.training.grpo.dynamic import DynamicSampling, expected_cost
from explorl.training.grpo.sampled_rows import SampledRows
from explorl.training.grpo.solved import keyed_uniform
from explorl.training.grpo.trainer import ExplorationTrainer
from explorl.training.grpo.trl_adapter import logs_of
from tests.training.conftest import PROMPTS
from tests.training.small_runs import digits
from tests.training.test_every_strategy import RATES, SETTINGS, check_resumed, few_answers, label, logs, weights

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

GENERATIONS = 4
Make = Callable[..., Any]


class Planted:
    """A reward by prompt and step: with probability ``rate`` a group has variance. It keeps what it was asked."""

    __name__ = "planted"

    def __init__(self, rate: float = 0.4) -> None:
        self.rate = rate
        self.calls: list[list[str]] = []

    def __call__(self, prompts: list[str], trainer_state: Any, **columns: Any) -> list[float]:
        self.calls.append(list(prompts))
        step = trainer_state.global_step
        return [float(row % 2 and self.has_variance(prompt, step)) for row, prompt in enumerate(prompts)]

    def has_variance(self, prompt: str, step: int) -> bool:
        return keyed_uniform(prompt, step) < self.rate


@pytest.fixture
def make(make_trainer: Make) -> Make:
    """A trainer with this reward; the columns of its batches are in ``batches``."""

    def made(reward: Any, *, dynamic: Any = True, cls: Any = ExplorationTrainer, **changes: Any) -> Any:
        batches: list[dict[str, list[Any]]] = []
        options = {
            "reward_funcs": reward,
            "dynamic_sampling": dynamic,
            "on_rollouts": lambda step, columns: batches.append(columns),
            **changes.pop("options", {}),
        }
        trainer = make_trainer(lambda **kwargs: cls(**{**kwargs, **options}), **changes)
        trainer.batches = batches
        return trainer

    return made


def trained(trainer: Any) -> Any:
    trainer.train()
    return trainer


def logged(trainer: Any, name: str) -> list[float]:
    return [entry[f"dynamic_sampling/{name}"] for entry in trainer.state.log_history if "loss" in entry]


def grouped(columns: dict[str, list[Any]], name: str) -> np.ndarray:
    return np.array(columns[name]).reshape(-1, GENERATIONS)


# ---------------------------------------------------------------- what reaches the loss


def test_no_group_without_variance_is_trained_on_while_the_bound_allows(make: Make) -> None:
    """And every batch is replayed by hand: a round asks new prompts only, as many as groups are missing."""
    reward = Planted()
    trainer = trained(make(reward, dynamic=DynamicSampling(max_rounds=20), max_steps=4))
    assert len(trainer.batches) == 4
    assert sum(logged(trainer, "rounds")) == len(reward.calls) - 4 > 2
    calls = iter(reward.calls)
    for step, columns in enumerate(trainer.batches):
        rewards, prompts = grouped(columns, "reward/planted"), grouped(columns, "prompt")
        assert (rewards.std(1) > 0).all()
        assert (grouped(columns, "advantage").std(1) > 0).all()
        assert (prompts == prompts[:, :1]).all()
        sampled_prompts: list[str] = []
        missing = 2
        while missing:
            call = next(calls)[::GENERATIONS]
            assert len(call) == missing
            sampled_prompts += call
            missing -= sum(reward.has_variance(prompt, step) for prompt in call)
        assert len(set(sampled_prompts)) == len(sampled_prompts)
        assert sorted(prompts[:, 0]) == sorted(
            prompt for prompt in sampled_prompts if reward.has_variance(prompt, step)
        )
        assert logged(trainer, "drawn")[step] == len(sampled_prompts) * GENERATIONS
        assert logged(trainer, "wasted")[step] == (len(sampled_prompts) - 2) * GENERATIONS
    assert next(calls, None) is None
    assert logged(trainer, "kept") == [8] * 4
    assert logged(trainer, "without_variance") == [0] * 4
    assert all(entry["frac_reward_zero_std"] == 0 for entry in logs(trainer).values())


@pytest.mark.parametrize(("max_rounds", "rounds"), [(2, 2), pytest.param(20, 7, marks=pytest.mark.slow)])
def test_the_bound_and_the_end_of_the_data_end_the_search(make: Make, max_rounds: int, rounds: int) -> None:
    """Sixteen prompts, two a batch: after seven further rounds every one has been asked."""
    reward = Planted(rate=0.0)
    trainer = make(reward, dynamic=DynamicSampling(max_rounds=max_rounds), max_steps=1)
    before = weights(trainer)
    trainer.train()
    assert logged(trainer, "rounds") == [rounds]
    assert logged(trainer, "without_variance") == [2]
    assert logged(trainer, "kept") == [0]
    assert logged(trainer, "wasted") == [8 * (rounds + 1)]
    assert len({prompt for call in reward.calls for prompt in call}) == 2 * (rounds + 1)
    assert trainer.batches[0]["prompt"] == reward.calls[0]
    assert all(torch.equal(value, before[name]) for name, value in weights(trainer).items())


def test_where_every_group_has_variance_nothing_changes(make: Make) -> None:
    plain, dynamic = (trained(make(Planted(rate=1.0), dynamic=on)) for on in (False, True))
    assert plain.batches == dynamic.batches
    assert all(torch.equal(value, weights(plain)[name]) for name, value in weights(dynamic).items())
    for step, entry in logs(plain).items():
        assert entry == {key: value for key, value in logs(dynamic)[step].items() if "dynamic_sampling" not in key}


def test_what_has_to_differ_is_what_was_asked_for(make: Make) -> None:
    """The groups: all equal; the form differs; right and form differ and cancel out; right differs, scored or not."""
    unknown = math.nan
    groups = [
        ([0, 0, 0, 0], [0, 0, 0, 0]),
        ([1, 1, 1, 1], [1, 0, 1, 0]),
        ([1, 0, 1, 0], [0, 1, 0, 1]),
        ([1, 0, 1, 1], [1, 0, 1, 0]),
        ([1, unknown, 0, unknown], [unknown] * 4),
        ([1, unknown, unknown, unknown], [unknown] * 4),
    ]
    parts = torch.cat([torch.tensor(group, dtype=torch.float32).T for group in groups])
    functions = [Planted(), digits]
    trainer = make(functions, dynamic={"by": "correct"}, options={"correct": ("planted", 1.0)})
    by = {
        ("reward", "sum_then_normalize", 1.0): [False, True, False, True, True, False],
        ("reward", "sum_then_normalize", 0.0): [False, False, True, True, True, False],
        ("reward", "normalize_then_sum", 1.0): [False, True, True, True, True, False],
        ("reward", "normalize_then_sum", 0.0): [False, False, True, True, True, False],
        ("correct", "sum_then_normalize", 1.0): [False, False, True, True, True, False],
    }
    for (what, aggregation, weight), expected in by.items():
        trainer.prompts.dynamic_sampling = DynamicSampling(by=what)
        trainer.multi_objective_aggregation = aggregation
        trainer.reward_weights = torch.tensor([1.0, weight])
        assert trainer.prompts.varied_groups(parts) == expected, (what, aggregation, weight)


def test_answers_that_nothing_scored_are_no_variance(make: Make) -> None:
    """Of one prompt in two all answers but one stay unscored, and of the others one in two."""

    def some(prompts: list[str], **columns: Any) -> list[float | None]:
        rewards: list[float | None] = []
        for row, prompt in enumerate(prompts):
            scored = row % GENERATIONS == 0 if keyed_uniform(prompt) < 0.5 else row % 2 == 0
            rewards.append(float(row % GENERATIONS == 0) if scored else None)
        return rewards

    trainer = trained(make(some, dynamic={"max_rounds": 20}, max_steps=2))
    assert sum(logged(trainer, "rounds")) > 0
    assert all(keyed_uniform(prompt) >= 0.5 for columns in trainer.batches for prompt in columns["prompt"])
    assert all(math.isfinite(entry["loss"]) for entry in logs(trainer).values())


# ---------------------------------------------------------------- how many rounds it takes


@pytest.mark.parametrize(
    "rate", [0.3, pytest.param(0.15, marks=pytest.mark.slow), pytest.param(0.6, marks=pytest.mark.slow)]
)
def test_planted_rates_take_the_rounds_of_the_formula(make: Make, rate: float) -> None:
    """200 batches of four groups that nobody samples: each mean is within four of its standard errors."""
    batches, groups, bound = 200, 4, 4
    data = Dataset.from_dict({"prompt": [f"{index}=" for index in range(40)]})
    trainer = make(
        digits, dynamic={"max_rounds": bound}, per_device_train_batch_size=16, options={"train_dataset": data}
    )

    def planted(inputs: list[dict[str, Any]]) -> SampledRows:
        prompts = [row["prompt"] for row in inputs]
        varied = [keyed_uniform(prompt, trainer.micro_step) < rate for prompt in prompts]
        parts = torch.tensor([[float(row % 2 and good)] for row, good in enumerate(varied)])
        return SampledRows(prompts, [[7]] * len(inputs), reward_parts=parts)

    trainer.sample_and_reward = planted
    trainer.args.gradient_accumulation_steps = trainer.args.steps_per_generation = 1
    results: dict[str, list[float]] = {}
    trainer.record_metric = lambda name, value: results.setdefault(name.split("/")[1], []).append(value)
    for number in range(batches):
        trainer.micro_step = number
        rows = [{"prompt": f"{(number * groups + place) % 40}="} for place in range(groups)]
        trainer.prompts.next([dict(row) for row in rows for _ in range(GENERATIONS)])
    cost = expected_cost(groups, rate, bound)
    lengths = np.arange(1, bound + 2)
    chances = rate * (1 - rate) ** (lengths - 1)
    chances[-1] = (1 - rate) ** bound
    spread_of_groups = math.sqrt(groups * (chances @ lengths**2 - (chances @ lengths) ** 2))
    at_most = (1 - (1 - rate) ** np.arange(1, bound + 1)) ** groups  # rounds ≤ 0, 1, ...
    of_rounds = np.diff(np.concatenate([[0.0], at_most, [1.0]]))
    spread_of_rounds = math.sqrt(of_rounds @ np.arange(bound + 1) ** 2 - (of_rounds @ np.arange(bound + 1)) ** 2)
    assert of_rounds @ np.arange(bound + 1) == pytest.approx(cost.rounds)
    assert abs(np.mean(results["drawn"]) / GENERATIONS - cost.groups) < 4 * spread_of_groups / math.sqrt(batches)
    assert abs(np.mean(results["rounds"]) - cost.rounds) < 4 * spread_of_rounds / math.sqrt(batches)
    assert abs(np.mean(results["without_variance"]) - cost.without_variance) < 4 * math.sqrt(
        cost.without_variance / batches
    )


@pytest.mark.slow
def test_overdraw_takes_fewer_rounds(make: Make) -> None:
    reward = Planted(rate=0.3)
    settings = {"per_device_train_batch_size": 8, "max_steps": 3}
    plain = make(reward, dynamic={"max_rounds": 20}, **settings)
    plain.train()
    more = make(Planted(rate=0.3), dynamic={"max_rounds": 20, "overdraw": True}, **settings)
    more.train()
    assert sum(logged(more, "rounds")) < sum(logged(plain, "rounds"))
    assert sum(logged(more, "drawn")) >= sum(logged(plain, "drawn"))
    assert logged(more, "kept") == logged(plain, "kept")


# ---------------------------------------------------------------- what the rest of the trainer sees


class Probe(ExplorationTrainer):
    """Compares what was recorded of a batch with a pass over it."""

    def shape_batch(self, output: dict[str, Any], sampled: Any, recorded: Any, rewards: Any) -> None:
        temperature = sampled.sampling_temperature
        again = forward_token_stats(
            self.model, output, temperature=temperature, rows=8, autocast=self.accelerator.autocast
        )
        mask = output["completion_mask"] > 0
        for name in ("logps", "entropy"):
            torch.testing.assert_close(
                getattr(recorded, name) * mask, getattr(again, name) * mask, atol=1e-4, rtol=1e-4
            )
        self.probed = [*getattr(self, "probed", []), mask.sum(1).float().mean().item()]
        super().shape_batch(output, sampled, recorded, rewards)


class Listening(Strategy):
    """Keeps the batches, and what it was asked to set the sampling of."""

    name = "listening"

    def sampling(self, prompts: Sequence[str], step: int) -> dict[str, list[float]]:
        self.memory.setdefault("asked", []).append(list(prompts))
        return {"temperature": [own_temperature(prompt) for prompt in prompts]}

    def advantages(self, batch: Batch) -> None:
        self.memory.setdefault("seen", []).append([list(batch.prompts), batch.temperature.tolist()])


def own_temperature(prompt: str) -> float:
    return 1.0 + 0.5 * (PROMPTS.index(prompt) % 2)


def test_all_that_comes_after_sees_the_rows_that_are_trained_on(make: Make) -> None:
    """Records, strategies and logs; but every token that was sampled is counted."""
    reward, tokens = Planted(), []

    def speaking(
        prompts: list[str], completion_ids: list[list[int]], log_extra: Any, log_metric: Any, **more: Any
    ) -> list[float]:
        tokens.append(completion_ids)
        log_extra("asked", [f"asked {prompt}" for prompt in prompts])
        log_metric("rows", float(len(prompts)))
        return reward(prompts, **more)

    options = {"strategies": [Listening()]}
    trainer = trained(make(speaking, cls=Probe, dynamic={"max_rounds": 20}, options=options, max_steps=3))
    assert [entry["completions/mean_length"] for entry in logs(trainer).values()] == pytest.approx(trainer.probed)
    assert sum(logged(trainer, "rounds")) > 0
    memory = trainer.strategies[0].memory
    assert memory["asked"] == reward.calls
    assert [prompts for prompts, _ in memory["seen"]] == [columns["prompt"] for columns in trainer.batches]
    for prompts, temperatures in memory["seen"]:
        assert temperatures == [own_temperature(prompt) for prompt in prompts]
    lengths = [len(trainer.processing_class(prompt)["input_ids"]) for call in reward.calls for prompt in call]
    assert logs(trainer)[3]["num_tokens"] == sum(len(ids) for call in tokens for ids in call) + sum(lengths)
    assert list(logs_of(trainer)["extra"]["asked"]) == [f"asked {prompt}" for prompt in trainer.batches[-1]["prompt"]]
    assert logs(trainer)[1]["rows"] == np.mean(
        [len(call) for call in reward.calls[: 1 + int(logged(trainer, "rounds")[0])]]
    )
    assert logged(trainer, "reward")[0] < logs(trainer)[1]["reward"]


def test_a_reward_function_that_changes_what_it_is_given_changes_copies(make: Make) -> None:
    """As in TRL, where the batch is made before it is rewarded."""
    recorded: list[tuple[str, list[int]]] = []

    def careless(prompts: Any, completions: Any, completion_ids: list[list[int]], **columns: Any) -> list[float]:
        for prompt, ids in zip(prompts, completion_ids, strict=True):
            recorded.append((prompt[-1]["content"], list(ids)))
            prompt.append({"role": "assistant", "content": "sure"})
            ids.append(9)
        return [float(row % 2) for row in range(len(prompts))]

    trainer = make(careless, max_steps=1)
    trainer.tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    rows = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
    trainer.train_dataset = Dataset.from_dict({"prompt": rows})
    outputs: list[Any] = []
    scored = trainer.scored
    trainer.scored = lambda inputs: (outputs.append(scored(inputs)), outputs[-1])[1]
    trainer.train()
    (output,) = outputs
    for row, (prompt, ids) in enumerate(recorded):
        prompt_ids = output["prompt_ids"][row][output["prompt_mask"][row] > 0]
        assert trainer.tokenizer.decode(prompt_ids) == prompt
        assert output["completion_ids"][row][output["completion_mask"][row] > 0].tolist() == ids


def test_model_generate_can_sample_the_further_rounds(make: Make) -> None:
    trainer = make(Planted(), dynamic={"max_rounds": 20}, options={"engine": "generate", "strategies": ["egsw"]})
    trainer.train()
    assert sum(logged(trainer, "rounds")) > 0
    assert all((grouped(columns, "reward/planted").std(1) > 0).all() for columns in trainer.batches)


def test_evaluation_asks_what_it_is_given(make: Make) -> None:
    reward = Planted(rate=0.0)
    data = Dataset.from_dict({"prompt": PROMPTS[:2]})
    trainer = make(reward, options={"eval_dataset": data}, per_device_eval_batch_size=8)
    reward.calls.clear()
    trainer.evaluate()
    assert [prompt for call in reward.calls for prompt in call] == [p for p in PROMPTS[:2] for _ in range(GENERATIONS)]


def test_the_size_of_micro_batches_changes_nothing(make: Make) -> None:
    results = []
    for micro in (2, 8):
        trainer = make(
            Planted(), dynamic={"max_rounds": 20}, options={"strategies": ["egsw", {"kl_cov": {"fraction": 0.2}}]},
            per_device_train_batch_size=micro, gradient_accumulation_steps=8 // micro, optim="sgd",
            learning_rate=0.01, max_steps=2,
        )  # fmt: skip
        trainer.train()
        results.append(trainer)
    for other in results[1:]:
        assert other.batches[0]["completion"] == results[0].batches[0]["completion"]
        assert [columns["prompt"] for columns in other.batches] == [columns["prompt"] for columns in results[0].batches]
        for name, value in weights(results[0]).items():
            torch.testing.assert_close(weights(other)[name], value, rtol=1e-4, atol=1e-6)


# ---------------------------------------------------------------- resuming, every strategy


@pytest.fixture
def run(make: Make, tmp_path: Path) -> Make:
    """Five steps, two of them on each batch, with a checkpoint after the third: in the middle of a reuse."""

    def train(strategies: Sequence[Any], *, resume: int | None = None, **changes: Any) -> Any:
        settings = {"max_steps": 5, "save_strategy": "steps", "save_steps": 3, "beta": 0.05, "num_iterations": 2}
        options = {"strategies": strategies, "answers": few_answers, "correct": ("planted", 1.0)}
        options |= changes.pop("options", {})
        trainer = make(Planted(), dynamic={"max_rounds": 20}, options=options, **{**settings, **changes})
        trainer.train(resume_from_checkpoint=None if resume is None else str(tmp_path / f"out/checkpoint-{resume}"))
        return trainer

    return train


def same_run(whole: Any, resumed: Any, after: int) -> None:
    check_resumed(whole, resumed, after=after)
    assert all(torch.equal(value, weights(resumed)[name]) for name, value in weights(whole).items())
    assert resumed.batches == whole.batches[-len(resumed.batches) :]


@pytest.mark.parametrize("saved", [3, pytest.param(2, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.slow)])
def test_a_resumed_run_is_the_straight_run(run: Make, saved: int) -> None:
    strategies = [{"element_wise_temperature": {"source": "running"}}, "egsw", {"kl_cov": {"fraction": 0.2}}]
    whole = run(strategies, save_steps=1)
    assert logs(whole)[5]["dynamic_sampling/rounds"] > 0
    same_run(whole, run(strategies, save_steps=1, resume=saved), saved)


ALONE = [{name: settings[-1]} for name, settings in SETTINGS.items() if name != "tool_progression"]  # see test_tools


@pytest.mark.slow
@pytest.mark.parametrize("spec", ALONE, ids=label)
def test_every_strategy_goes_with_it(run: Make, spec: dict[str, Any]) -> None:
    whole = run([spec])
    assert all(math.isfinite(entry["loss"]) for entry in logs(whole).values())
    for columns in whole.batches:
        if "curriculum" not in spec:  # it leaves few prompts
            assert (grouped(columns, "reward/planted").std(1) > 0).all()
    same_run(whole, run([spec], resume=3), 3)


@pytest.mark.slow
def test_a_curriculum_says_which_prompts_may_come_in(make: Make) -> None:
    curriculum = {"curriculum": {"solve_rates": RATES, "above": 0.1}}
    reward = Planted(rate=0.0)
    make(reward, dynamic={"max_rounds": 20}, options={"strategies": [curriculum]}, max_steps=1).train()
    assert {prompt for call in reward.calls for prompt in call} == {p for p in PROMPTS if RATES[p] > 0.1}


def test_a_curriculum_reads_prompts_that_a_transform_makes(make_trainer: Make) -> None:
    data = Dataset.from_dict({"question": PROMPTS})
    data.set_transform(lambda rows: {"prompt": [text + "?" for text in rows["question"]]})
    rates = {text + "?": float(index < 4) / 2 for index, text in enumerate(PROMPTS)}
    options = {"train_dataset": data, "strategies": [{"curriculum": {"solve_rates": rates}}]}
    trainer = make_trainer(lambda **kwargs: ExplorationTrainer(**{**kwargs, **options}))
    assert [row["prompt"] for row in trainer.train_dataset] == [text + "?" for text in PROMPTS[:4]]


# ---------------------------------------------------------------- bad input


def stream() -> Any:
    return Dataset.from_dict({"prompt": PROMPTS}).to_iterable_dataset()


def tool(a: int) -> int:
    """Doubles.

    Args:
        a: what is doubled.
    """
    return 2 * a


@pytest.mark.parametrize(
    ("options", "changes", "words"),
    [
        ({"dynamic_sampling": {"max_rounds": 0}}, {}, "max_rounds is 0; use"),
        ({"dynamic_sampling": {"rounds": 3}}, {}, "dynamic_sampling has no setting 'rounds'"),
        ({"skip_solved": {"floor": 2}}, {}, "floor is 2; use a probability"),
        ({"train_dataset": stream}, {}, "dynamic_sampling takes fresh prompts .* IterableDataset is a stream; use a"),
        ({"train_dataset": stream, "dynamic_sampling": None, "skip_solved": True}, {}, "skip_solved takes fresh"),
        ({"tools": [tool]}, {}, "dynamic_sampling cannot be combined with tools: .* remove the tools, or"),
        ({"rollout_func": print}, {}, "cannot be combined with rollout_func: your function samples"),
        ({"environment_factory": print}, {}, "cannot be combined with environment_factory"),
        ({"engine": "vllm"}, {}, "untested with vLLM; set use_vllm=False"),
        ({}, {"per_device_train_batch_size": 32}, "the data set has 16, and a batch takes 16; add prompts"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_loaded(
    make_trainer: Make, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], changes: dict[str, Any], words: str
) -> None:
    def loaded(*_: Any, **__: Any) -> None:
        raise AssertionError("TRL's trainer was built")

    monkeypatch.setattr("trl.GRPOTrainer.__init__", loaded)
    options = {"dynamic_sampling": True, **options}
    options = {name: value() if value is stream else value for name, value in options.items()}
    with pytest.raises(ValueError, match=words):
        make_trainer(lambda **kwargs: ExplorationTrainer(**{**kwargs, **options}), **changes)


# ---------------------------------------------------------------- from a configuration


def test_the_command_has_both(small_policy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    changes = (
        f"model.name={small_policy}", "task.train_problems=12", "rollout.max_tokens=6", "training.steps=1",
        "training.prompts_per_step=2", "training.generations=2", "training.micro_batch=4", "training.lens=null",
        "evaluation.ends=0", "training.dynamic_sampling.max_rounds=2", "training.skip_solved=true",
    )  # fmt: skip
    overrides = [word for change in changes for word in ("--set", change)]
    with pytest.raises(SystemExit) as ended:
        main(["train", "--preset", "tiny", *overrides, "--run", str(tmp_path / "run")])
        raise SystemExit(0)
    assert not ended.value.code, capsys.readouterr().err
    (line,) = [line for line in RunStore(tmp_path / "run").metrics() if line["kind"] == "train"]
    assert line["dynamic_sampling/drawn"] == line["dynamic_sampling/kept"] + line["dynamic_sampling/wasted"] >= 4
    assert line["skip_solved/skipped"] == 0
    assert len(list((tmp_path / "run").rglob("skip_solved.json"))) == 1
