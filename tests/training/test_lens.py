"""The lens: what is recorded and logged of a step is right, and training goes on as if nobody looked."""

from __future__ import annotations

import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from rich.console import Console
from transformers import TrainerCallback

from explorl.analysis.response_quality import quality_by_step
from explorl.core.config import load_config
from explorl.core.store import RunStore
from explorl.training.grpo.inspection_schedule import (
    InspectedRows,
    Lens,
    ObserverError,
    StepView,
    build_observers,
    run_observers,
)
from explorl.training.grpo.logged_columns import counted_tokens, token_lists, token_texts
from explorl.training.grpo.observers import FastestDrop, position_profile, statistics
from explorl.training.grpo.run import run_grpo
from explorl.training.grpo.trainer import ExplorationTrainer
from tests.training.conftest import PROMPTS

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

Make = Callable[..., Any]


class Kept:
    """A listener that keeps what it is told, and an observer that keeps what it sees."""

    def __init__(self) -> None:
        self.told: list[tuple[int, dict[str, list[Any]]]] = []
        self.views: list[StepView] = []

    def __call__(self, step: int, columns: dict[str, list[Any]]) -> None:
        self.told.append((step, columns))

    def see(self, step: StepView) -> dict[str, float]:
        self.views.append(step)
        return {"rows": len(step.rewards), "nothing": float("nan")}


class Weights(TrainerCallback):
    """The weights before training and after each update."""

    def __init__(self) -> None:
        self.states: list[dict[str, torch.Tensor]] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.states.append({name: value.clone() for name, value in model.state_dict().items()})

    on_step_end = on_train_begin


class Restless:
    """Draws from every generator of random numbers that there is."""

    def see(self, step: StepView) -> dict[str, float]:
        return {"drawn": random.random() + np.random.rand() + torch.rand(()).item()}  # noqa: NPY002


# ---------------------------------------------------------------- training is as it was


@pytest.mark.parametrize(
    ("options", "config"),
    [
        ({"strategies": ["ppl_shaping", {"mask_truncated": {}}]}, {}),
        ({"engine": "generate"}, {"num_iterations": 2, "beta": 0.05}),
        pytest.param(
            {"strategies": [{"element_wise_temperature": {"solve_rates": dict.fromkeys(PROMPTS, 0.3)}}]},
            {"steps_per_generation": 4},
            marks=pytest.mark.slow,
        ),
    ],
    ids=["engine", "generate", "windows"],
)
def test_weights_are_bit_identical(make_trainer: Make, options: dict[str, Any], config: dict[str, Any]) -> None:
    weights = []
    for observers in ([], [Restless(), *statistics()]):
        trainer = make_trainer(
            ExplorationTrainer,
            max_steps=3,
            options={**options, "observers": observers, "lens": Lens(every=1, rate=0.5)},
            **config,
        )
        for module in trainer.model.modules():  # a pass in training mode would draw random numbers
            if hasattr(module, "attention_dropout"):
                module.attention_dropout = 0.3
        if observers:
            trainer.listen(Kept(), 1, after=Kept())
        torch.manual_seed(7)
        trainer.train()
        assert any(name.startswith("lens/") for line in trainer.state.log_history for name in line) == bool(observers)
        weights.append(trainer.model.state_dict())
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


# ---------------------------------------------------------------- what is recorded


def full_logits(model: Any, weights: dict[str, torch.Tensor], prompt: list[int], answer: list[int]) -> Any:
    """Logits and states of an answer's tokens, by the model alone."""
    model.load_state_dict(weights)
    with torch.no_grad():
        out = model(torch.tensor([[*prompt, *answer]]), output_hidden_states=True)
    here = slice(len(prompt) - 1, -1)
    return out.logits[0, here].double().numpy(), out.hidden_states[-1][0, here].double().numpy()


@pytest.mark.parametrize("engine", ["explorl", "generate"])
def test_columns_are_what_full_logits_say(make_trainer: Make, engine: str) -> None:
    recorder, weights = Kept(), Weights()
    trainer = make_trainer(
        ExplorationTrainer, temperature=0.7, max_steps=1, learning_rate=0.02, optim="sgd",
        options={
            "engine": engine, "lens": Lens(answers=3), "correct": ("digits", 0.3), "callbacks": [weights],
            "strategies": ["position_shaping"] if engine == "explorl" else [],
        },
    )  # fmt: skip
    trainer.listen(recorder, 1, after=recorder)
    trainer.train()
    (step, first), (same, columns) = recorder.told
    assert step == same == 1
    assert {"logp_after"} == columns.keys() - first.keys()
    assert all(first[name] == columns[name] for name in first)
    assert columns["correct"] == [reward >= 0.3 for reward in columns["reward/digits"]]
    inspected = [row for row, tokens in enumerate(columns["tokens"]) if tokens is not None]
    close = [row for row, sizes in enumerate(columns["update_size"]) if sizes is not None]
    assert close == [0, 2, 5]
    assert inspected == (sorted({*range(4), *close}) if engine == "explorl" else close)
    model = trainer.model
    forward = type(model).forward
    model.forward = forward.__get__(model)
    model.eval()
    tokenizer = trainer.processing_class
    for row in inspected:
        prompt, ids = columns["prompt_ids"][row], columns["token_ids"][row]
        assert columns["tokens"][row] == [tokenizer.decode([token]) for token in ids]
        logits, states = full_logits(model, weights.states[0], prompt, ids)
        own = np.arange(len(ids)), ids

        def log_softmax(values: Any) -> Any:
            return values - np.log(np.exp(values).sum(-1, keepdims=True))

        plain, tempered = log_softmax(logits), log_softmax(logits / 0.7)
        np.testing.assert_allclose(columns["logp"][row], tempered[own], atol=2e-5)
        np.testing.assert_allclose(columns["entropy"][row], -(np.exp(plain) * plain).sum(-1), atol=2e-5)
        if row not in close:
            assert columns["logp_after"][row] is None
            continue
        probabilities = np.exp(tempered)
        np.testing.assert_allclose(columns["collision"][row], (probabilities**2).sum(-1), atol=2e-5)
        others = tempered.copy()
        others[own] = -np.inf
        assert columns["other_ids"][row] == others.argmax(-1).tolist()
        assert columns["other"][row] == [tokenizer.decode([token]) for token in columns["other_ids"][row]]
        np.testing.assert_allclose(columns["other_logp"][row], others.max(-1), atol=2e-5)
        norms = np.linalg.norm(states, axis=-1)
        np.testing.assert_allclose(columns["state_norm"][row], norms, rtol=1e-4)
        errors = np.eye(logits.shape[1])[ids] - probabilities
        alpha = np.array(columns["token_advantage"][row]) * columns["token_weight"][row]
        sizes = [abs(a) * np.linalg.norm(np.outer(e, h)) / 0.7 for a, e, h in zip(alpha, errors, states, strict=True)]
        np.testing.assert_allclose(columns["update_size"][row], sizes, rtol=1e-3, atol=1e-5)
        assert any(sizes) == (columns["advantage"][row] != 0)
        later, _ = full_logits(model, weights.states[1], prompt, ids)
        after = log_softmax(later / 0.7)[own]
        np.testing.assert_allclose(columns["logp_after"][row], after, atol=2e-5)
        assert np.abs(after - tempered[own]).max() > 1e-3


def test_the_file_is_there_before_the_updates_and_is_completed_after_the_last(make_trainer: Make) -> None:
    order: list[tuple[str, int, int]] = []
    trainer = make_trainer(ExplorationTrainer, num_iterations=2, max_steps=5, options={"lens": Lens(every=2)})
    trainer.listen(
        lambda step, _: order.append(("sampled", step, trainer.state.global_step)),
        after=lambda step, columns: order.append(("after", step, trainer.state.global_step)),
    )
    trainer.train()
    # Batches of two updates: the second is not looked at, and the run ends in the middle of the third.
    assert order == [("sampled", 1, 0), ("after", 1, 2), ("sampled", 3, 2), ("sampled", 5, 4), ("after", 5, 5)]


@pytest.mark.slow
def test_a_batch_in_use_is_completed_by_the_run_that_goes_on(make_trainer: Make, tmp_path: Path) -> None:
    def make(recorder: Kept, **changes: Any) -> Any:
        trainer = make_trainer(
            ExplorationTrainer, num_iterations=2, max_steps=6, save_strategy="steps", save_steps=3,
            output_dir=str(tmp_path / "runs"),
            options={"observers": [recorder, *statistics()], "strategies": ["ppl_shaping"], "lens": Lens(every=1)},
            **changes,
        )  # fmt: skip
        trainer.listen(recorder, 1, after=recorder)
        return trainer

    whole, resumed = Kept(), Kept()
    trainer = make(whole)
    trainer.train()
    again = make(resumed)
    again.train(resume_from_checkpoint=str(tmp_path / "runs" / "checkpoint-3"))
    assert [step for step, _ in whole.told] == [1, 1, 3, 3, 5, 5]
    assert resumed.told == whole.told[3:]
    assert [view.step for view in resumed.views] == [3, 5]
    lines = [
        {line["step"]: {name: value for name, value in line.items() if name.startswith("lens/")}
         for line in source.state.log_history if "loss" in line and line["step"] > 3}
        for source in (trainer, again)
    ]  # fmt: skip
    assert lines[0] == lines[1]
    assert {"lens/fastest_drop_negative_share", "lens/probability_change_below_0.06"} <= lines[0][6].keys()


def test_nobody_asks_and_nothing_is_done(make_trainer: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "explorl.training.grpo.inspection.answer_records", lambda *_, **__: pytest.fail("a pass was made")
    )
    recorder = Kept()
    trainer = make_trainer(ExplorationTrainer, options={"on_rollouts": recorder, "token_records": 1})
    trainer.train()
    assert not any(name.startswith("lens/") for line in trainer.state.log_history for name in line)
    assert [step for step, _ in recorder.told] == [1, 2]
    assert "correct" not in recorder.told[0][1]  # nobody has said which reward decides
    assert "logp_after" not in recorder.told[0][1]
    assert [row is not None for row in recorder.told[0][1]["entropy"]] == [True] * 4 + [False] * 4


def test_views_hold_the_batch(make_trainer: Make) -> None:
    recorder = Kept()
    trainer = make_trainer(
        ExplorationTrainer, max_steps=1,
        options={"observers": [recorder], "lens": Lens(rate=0.25), "strategies": [{"mask_truncated": {}}]},
    )  # fmt: skip
    trainer.listen(recorder, 2)
    trainer.train()
    (view,), ((_, columns),) = recorder.views, recorder.told
    assert list(view.completions) == columns["completion"]
    assert view.advantage.tolist() == columns["advantage"]
    assert view.reward_parts["digits"].tolist() == columns["reward/digits"] == view.rewards.tolist()
    lengths = [len(ids) for ids in columns["token_ids"]]
    assert view.mask.sum(1).tolist() == lengths
    assert [row[:n] for row, n in zip(view.entropy.tolist(), lengths, strict=True)] == columns["entropy"]
    assert [row[:n] for row, n in zip(view.weights.tolist(), lengths, strict=True)] == columns["token_weight"]
    assert any(0 in row for row in columns["token_weight"])  # cut off, and so out of the loss
    assert view.sampled is not None
    assert view.sampled.rows.tolist() == [0, 4]
    assert trainer.state.log_history[0]["lens/rows"] == 8
    assert "lens/nothing" not in trainer.state.log_history[0]


# ---------------------------------------------------------------- statistics


def made_up(*, sampled: bool = True, seed: int = 0, **changes: Any) -> StepView:
    """Six answers with a tool's output in them; what does not count holds NaN."""
    generator = torch.Generator().manual_seed(seed)
    rows, time = 6, 12
    mask = (torch.arange(time) < torch.tensor([[12], [12], [7], [1], [9], [0]])).float()
    mask[1, 4:7] = 0  # a tool wrote these

    def noise() -> torch.Tensor:
        return torch.where(mask > 0, torch.rand(rows, time, generator=generator), torch.nan)

    advantage = torch.tensor([1.0, -1.0, 0.0, 2.0, -0.5, -3.0])
    close = torch.tensor([1, 4])
    looked = InspectedRows(
        rows=close, logps=-noise()[close], collision=noise()[close], other_ids=torch.zeros(2, time, dtype=torch.long),
        other_logps=-noise()[close], state_norms=noise()[close], update_size=noise()[close],
        logps_after=-noise()[close],
    )  # fmt: skip
    values: dict[str, Any] = {
        "step": 1,
        "token_ids": torch.randint(0, 5, (rows, time), generator=generator),
        "mask": mask,
        "logps": -noise(),
        "entropy": noise(),
        "branching": noise(),
        "advantages": advantage.unsqueeze(1) * mask,
        "weights": mask,
        "advantage": advantage,
        "rewards": advantage,
        "reward_parts": {"format": torch.tensor([1.0, 0.1, 1.0, torch.nan, 1.0, 1.0])},
        "correct": advantage > 0,
        "group": torch.arange(rows) // 3,
        "prompts": ["p"] * rows,
        "completions": ["a b c a b c a b c", "日本", "fine and well and short", "", "x", "y"],
        "sampled": looked if sampled else None,
    }
    return StepView(**{**values, **changes})


def test_statistics_are_what_numpy_says() -> None:
    view = made_up()
    metrics = {name: value for observer in statistics() for name, value in observer.see(view).items()}
    entropy, mask = view.entropy.numpy(), view.mask.numpy() > 0
    rows = np.array([[sign] * 12 for sign in np.sign(view.advantage.numpy())])
    assert metrics["entropy_positive"] == pytest.approx(entropy[mask & (rows > 0)].mean())
    assert metrics["entropy_negative"] == pytest.approx(entropy[mask & (rows < 0)].mean())

    bins: dict[int, list[float]] = {}
    for values, counted in zip(entropy, mask, strict=True):
        own = values[counted]
        for index, value in enumerate(own):
            bins.setdefault(20 * index // len(own), []).append(value)
    for index in range(20):
        mean = metrics[f"entropy_position_{index:02d}"]
        assert mean == pytest.approx(np.mean(bins[index])) if index in bins else np.isnan(mean)
    assert len(bins) > 10

    assert view.sampled is not None
    close = mask[[1, 4]]
    sizes = view.sampled.update_size.numpy()[close]
    assert metrics["update_size_mean"] == pytest.approx(sizes.mean())
    for share in (50, 90, 99):
        assert metrics[f"update_size_p{share}"] == pytest.approx(np.percentile(sizes, share))
    change = np.abs(np.exp(view.sampled.logps_after.numpy()) - np.exp(view.sampled.logps.numpy()))[close]
    assert metrics["probability_change_mean_abs"] == pytest.approx(change.mean())
    assert metrics["probability_change_below_0.06"] == pytest.approx((change < 0.06).mean())
    assert 0 < metrics["probability_change_below_0.06"] < 1

    assert metrics["quality_format_violations"] == pytest.approx(2 / 6)
    assert metrics["quality_language_mixing"] == pytest.approx(1 / 6)
    assert metrics["quality_repetitive"] == pytest.approx(1 / 6)
    assert metrics["quality_redundancy"] == pytest.approx((1 - 3 / 7) / 6)
    assert "fastest_drop_negative_share" not in metrics  # one batch has no slope


def test_nothing_sampled_and_nothing_known() -> None:
    nothing = torch.full((6, 12), torch.nan)
    for view in (made_up(sampled=False), made_up(sampled=False, entropy=nothing), made_up(mask=torch.zeros(6, 12))):
        metrics = {name: value for observer in statistics() for name, value in observer.see(view).items()}
        assert "quality_redundancy" in metrics
        assert not np.isfinite(metrics["entropy_positive"]) or view.known.any()


def test_position_profile_by_hand() -> None:
    values, mask = torch.tensor([[1.0, 2.0, 9.0, 3.0, 4.0]]), torch.tensor([[1.0, 1.0, 0.0, 1.0, 1.0]])
    assert position_profile(values, mask, 2).tolist() == [1.5, 3.5]


def test_fastest_drop_is_weighted_least_squares() -> None:
    """Tokens 0–4 in batch after batch: NumPy's slope over all occurrences, old ones counting less."""
    observer, observations = FastestDrop(share=0.4, decay=0.9, least=2.0), []
    falls = np.array([0.01, 0.05, -0.2, 0.03, 0.0])
    for number in range(8):
        view = made_up(seed=number)
        entropy = 5 - torch.tensor(falls, dtype=torch.float32)[view.token_ids] * number + 0.01 * view.entropy
        view = made_up(seed=number, entropy=entropy)
        metrics = observer.see(view)
        for row, column in zip(*np.nonzero(view.mask.numpy()), strict=True):
            observations.append(
                (number, int(view.token_ids[row, column]), float(entropy[row, column]), float(view.advantage[row]))
            )
        if number == 4:  # what a checkpoint keeps is all that there is to know
            state = observer.state_dict()
            observer = FastestDrop(share=0.4, decay=0.9, least=2.0)
            observer.load_state_dict(state)
    steps, ids, values, advantages = (np.array(column) for column in zip(*observations, strict=True))
    weights = 0.9 ** (7 - steps)
    slopes = {
        token: np.polyfit(steps[ids == token], values[ids == token], 1, w=np.sqrt(weights[ids == token]))[0]
        for token in range(5)
    }
    expected = sorted(slopes, key=lambda token: slopes[token])[:2]
    fastest, drops = observer.fastest()
    assert fastest.tolist() == expected == [1, 3]
    np.testing.assert_allclose(drops, [-slopes[token] for token in expected], rtol=1e-6)
    own = np.isin(ids, expected)
    negative, positive = (weights[own & (advantages * sign > 0)].sum() for sign in (-1, 1))
    assert metrics["fastest_drop_negative_share"] == pytest.approx(negative / (negative + positive))


# ---------------------------------------------------------------- which answers, which observers


def test_the_chosen_answers_go_round() -> None:
    lens = Lens(rate=0.1)
    assert lens.chosen(30, 0) == [0, 10, 20]
    assert lens.chosen(30, 13) == [3, 13, 23]
    assert lens.chosen(7, 6) == [6]
    assert Lens(answers=0).chosen(8, 3) == Lens(rate=0).chosen(8, 3) == []
    assert Lens(answers=99).chosen(8, 3) == list(range(8))
    for rows in (1, 5, 16, 33):
        for answers in range(rows + 1):
            assert len(set(Lens(answers=answers).chosen(rows, 11))) == answers
    for wrong in ({"every": 0}, {"answers": -1}, {"rate": 1.5}):
        with pytest.raises(ValueError, match=rf"{next(iter(wrong))} is .*; use"):
            Lens(**wrong)


class Broken:
    def see(self, step: StepView) -> dict[str, float]:
        raise KeyError("mistake")


class Wordy:
    def see(self, step: StepView) -> Any:
        return {"length": "long"}


@pytest.mark.parametrize("observer", [Broken(), Wordy()])
def test_an_observer_that_fails_is_named(observer: Any) -> None:
    with pytest.raises(ObserverError, match=rf"the observer {type(observer).__name__} failed at step 1: \w+Error"):
        run_observers([*statistics(), observer], made_up())


@pytest.mark.parametrize(
    ("observer", "words"),
    [
        ("tests.training.test_lens", "name your own like my_pkg.watching:Lengths"),
        ("tests.training.test_lens:Nowhere", "has no 'Nowhere' to use"),
        ("no_such_package.at:All", "there is no module 'no_such_package'"),
        ("tests.training.test_lens:PROMPTS", "has no method see"),
        (Kept, "has no method see"),
        (3, "the observer 3 has no method see"),
    ],
)
def test_what_is_no_observer_is_refused(observer: Any, words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        build_observers([observer])


def test_a_tools_output_has_no_values() -> None:
    mask = torch.tensor([[1, 1, 1, 1, 0], [1, 1, 0, 0, 0]])
    tool = torch.tensor([[1, 0, 0, 1, 1], [1, 1, 1, 1, 1]])
    output = {
        "prompt_ids": torch.tensor([[0, 7], [8, 9]]), "prompt_mask": torch.tensor([[0, 1], [1, 1]]),
        "completion_ids": torch.arange(10).view(2, 5), "completion_mask": mask, "tool_mask": tool,
    }  # fmt: skip
    assert token_lists(torch.arange(10).view(2, 5), mask, counted_tokens(output)) == [[0, None, None, 3], [5, 6]]
    texts = token_texts(output, [0, 1], str)
    assert texts["prompt_ids"] == [[7], [8, 9]]
    assert texts["token_ids"] == [[0, 1, 2, 3], [5, 6]]
    assert texts["tokens"][0] == ["0", "1", "2", "3"]


# ---------------------------------------------------------------- a run


class Lengths:
    """An observer that a configuration names."""

    def see(self, step: StepView) -> dict[str, float]:
        return {"mean_length": step.mask.sum(1).mean().item()}


def test_a_run_has_it_all_in_its_folder(small_policy: Path, tmp_path: Path) -> None:
    """With LoRA, dropout and two updates a batch; made longer from the middle of a batch."""
    values = {
        "model": {"name": str(small_policy), "lora": {"rank": 2, "dropout": 0.2}},
        "task": {"train_problems": 16},
        "rollout": {"max_tokens": 8},
        "training": {
            "steps": 2, "prompts_per_step": 2, "generations": 4, "micro_batch": 4, "iterations": 2,
            "checkpoint_every": 1, "keep_checkpoints": 9, "learning_rate": 1e-2, "token_records": 1,
            "lens": {"answers": 2, "observers": ["tests.training.test_lens:Lengths"]},
        },
        "evaluation": {"ends": 0},
        "strategies": ["negative_reinforcement"],  # a gradient, though nothing is right
    }  # fmt: skip
    config = load_config(preset="tiny", values=values)
    store = RunStore.create(tmp_path / "run", config.dump())
    run_grpo(config, store, console=Console(quiet=True))
    lines = [line for line in store.metrics() if line["kind"] == "train"]
    assert [("lens/mean_length" in line, "lens/probability_change_mean_abs" in line) for line in lines] == [
        (False, False), (True, True), (False, False), (True, False),
    ]  # fmt: skip
    first, second = (pq.read_table(store.rollouts / f"step-{step:06d}.parquet") for step in (1, 3))
    kinds = {name: str(first.schema.field(name).type) for name in first.schema.names}
    for name in ("entropy", "logp", "logp_after", "collision", "other_logp", "state_norm", "update_size"):
        assert kinds[name].startswith("list<"), name
        assert "double" in kinds[name]
    assert {kinds[name].split(": ")[1] for name in ("prompt_ids", "token_ids", "branching", "other_ids")} == {"int64>"}
    assert kinds["correct"] == "bool"
    rows = first.to_pydict()
    assert [row is not None for row in rows["tokens"]] == [True] * 5 + [False] * 3
    assert [row is not None for row in rows["logp_after"]] == [True, False, False, False, True, False, False, False]
    assert rows["logp_after"][0] != rows["logp"][0]
    assert "logp_after" not in second.schema.names

    (quality, _) = quality_by_step(store)
    assert lines[1]["lens/quality_format_violations"] == quality.format_violations / quality.responses
    assert lines[1]["lens/quality_redundancy"] == pytest.approx(quality.redundancy)

    whole = {path.name: path.read_bytes() for path in store.rollouts.iterdir()}
    for step in (2, 3, 4):  # as if it had been killed in the middle of the first batch
        shutil.rmtree(store.checkpoints / f"checkpoint-{step}")
    shutil.rmtree(store.folder / "model")
    (store.rollouts / "step-000001.parquet").unlink()
    run_grpo(config, store, console=Console(quiet=True))
    assert {path.name: path.read_bytes() for path in store.rollouts.iterdir()} == whole
    again = [line for line in store.metrics() if line["kind"] == "train"]
    for old, new in zip(lines, again, strict=True):
        assert {k: v for k, v in old.items() if "lens/" in k} == {k: v for k, v in new.items() if "lens/" in k}
