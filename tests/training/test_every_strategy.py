"""Every strategy, alone and in random company, trains a real policy, logs what it did and survives a checkpoint."""

from __future__ import annotations

import math
import random
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from explorl.strategies import REGISTRY
from explorl.training.grpo.reference import REFERENCE_STATE
from explorl.training.grpo.trainer import ExplorationTrainer
from tests.training.tool_policy import calculator

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

RATES = {f"{a} {b} {a + b}={2 * (a + b)}\n": (b % 4) / 4 for a in range(1, 5) for b in range(5, 9)}
"""Of the prompts that `make_trainer` trains on."""

PLACES = [f"text:{letter}" for letter in "0123456789abcdefghijklmnop"]
"""Where a policy of random weights comes to."""

SETTINGS: dict[str, list[dict[str, Any]]] = {
    "bottom_p": [{"p": 0.8}, {"p": {"from": 0.8, "to": 0.6, "steps": 5}, "frequency": 0.5}],
    "importance_correction": [{}],
    "element_wise_temperature": [
        {"solve_rates": RATES},
        {"source": "running"},
        {"solve_rates": RATES, "training_temperature": "one"},
    ],
    "annealed_temperature": [
        {"decay": 3.0, "training_temperature": "one"},
        {"decay": {"from": 4.0, "to": 8.0, "steps": 4}, "highest": 1.5, "warmup": 2},
    ],
    "entropy_branching": [
        {"at": PLACES, "base": 0.8, "window": 2},
        {"at": PLACES, "base": 0.8, "window": 2, "shared": "once", "weight": {"from": 0.0, "to": 1.0, "steps": 4}},
    ],
    "tool_progression": [{}, {"share": 0.5, "calls": {"from": 1, "to": 3, "steps": 4}}],
    "mask_truncated": [{}],
    "pass_threshold": [{"threshold": 0.4}, {"threshold": 0.4, "level": "group"}],
    "overlong_penalty": [{}, {"cache": 6, "longest": 8, "factor": 0.5}],
    "curriculum": [{"solve_rates": RATES}, {"solve_rates": RATES, "mode": "easy_first"}],
    "egsw": [{}, {"alpha": {"from": 0.8, "to": 0.0, "steps": 4}, "level": "sequence", "entropy": "raw"}],
    "ppl_shaping": [{"alpha": 0.2}],
    "position_shaping": [{"start": 2, "steps": 3}],
    "entropy_advantage": [{}],
    "negative_reinforcement": [{"positive_weight": 0.1}],
    "passk_training": [{"k": 2}],
    "pkpo": [{"k": 2, "of": "reward"}, {"k": {"from": 3, "to": 1, "steps": 5}}],
    "maxrl": [{"of": "reward"}, {}],
    "risk_sensitive": [{}],
    "quantile_baseline": [{}],
    "unlikeliness": [{"level": "token"}, {"beta": 0.5}],
    "ucpo": [{"tau": 0.5}],
    "outcome_exploration": [{"kind": "batch"}, {"constant": 0.2, "coef": {"from": 0.5, "to": 0.1, "steps": 5}}],
    "clip_higher": [{"low": 0.001, "high": 0.002}],
    "forking_tokens": [{}, {"normalize": "kept"}],
    "clip_cov": [{"fraction": 0.1, "low": 0.1, "high": 50.0}],
    "kl_cov": [{"fraction": 0.2, "coef": {"from": 2.0, "to": 1.0, "steps": 5}}],
    "lp_reg": [{"fraction": 0.3, "coef": 2.0}, {"fraction": {"from": 1.0, "to": 0.9, "steps": 5}, "min_p": 0.1}],
    "entropy_bonus": [{"coef": 0.05}, {"coef": 0.05, "target": 5.0}],
    "reference_reset": [{"every": 2}, {"every": 3}, {"on_stall": 1}],
}
"""Hyperparameters with which a strategy acts on a policy of random weights within five steps."""

ALIKE = {"pkpo", "risk_sensitive", "quantile_baseline", "unlikeliness", "ucpo"}
"""Arithmetic on groups, for which maxrl stands in every test run."""
ALONE = [
    pytest.param({name: options}, marks=[] if options is settings[-1] and name not in ALIKE else [pytest.mark.slow])
    for name, settings in SETTINGS.items()
    for options in settings
]


def combinations(count: int, size: int) -> list[list[dict[str, Any]]]:
    """Seeded lists of different strategies in any order; no two of them replace the advantages."""
    draw, lists = random.Random(0), []
    while len(lists) < count:
        names = draw.sample(list(REGISTRY), size)
        if sum(REGISTRY[name].replaces_advantage for name in names) < 2:
            lists.append([{name: draw.choice(SETTINGS[name])} for name in names])
    return lists


def label(spec: Any) -> str:
    if isinstance(spec, list):
        return "-".join(map(label, spec))
    ((name, options),) = spec.items()
    return name + "".join(f"-{value}" for value in options.values() if isinstance(value, (str, int, float)))


def weights(trainer: Any) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in trainer.model.state_dict().items()}


def logs(trainer: Any) -> dict[int, dict[str, float]]:
    """What was logged at each step, but for clocks."""
    entries = [entry for entry in trainer.state.log_history if "loss" in entry]
    return {entry["step"]: {key: value for key, value in entry.items() if "time" not in key} for entry in entries}


def few_answers(completions: Sequence[str], **columns: Any) -> list[str | None]:
    """What an answer says, for strategies that ask: many say the same, and some say nothing."""
    places = [ord(text.strip()[:1] or "\0") for text in completions]
    return [None if index % 7 == 0 else str(index % 3) for index in places]


Run = Callable[..., Any]


@pytest.fixture
def run(make_trainer: Callable[..., Any], tmp_path: Path) -> Run:
    """Trains for five steps, two of them on each batch, and saves after the third: in the middle of a reuse."""

    def train(strategies: Sequence[Any], *, resume: int | None = None, **changes: Any) -> Any:
        # a digit in ten characters is right, so that a prompt has right answers and wrong ones
        options = {"strategies": strategies, "answers": few_answers, "correct": ("digits", 0.1)}
        if any("tool_progression" in spec for spec in strategies):
            options["interpreter"] = calculator()
        options |= changes.pop("options", {})
        settings = {"max_steps": 5, "save_strategy": "steps", "save_steps": 3, "beta": 0.05, "num_iterations": 2}
        settings["reward_weights"] = [5.0]
        trainer = make_trainer(ExplorationTrainer, options=options, **{**settings, **changes})
        trainer.train(resume_from_checkpoint=None if resume is None else str(tmp_path / f"out/checkpoint-{resume}"))
        return trainer

    return train


@pytest.fixture(scope="module")
def plain(small_policy: Path) -> dict[str, Any]:
    """Room for what a run without strategies ends with."""
    return {}


def check_effect(trainer: Any, strategies: Sequence[dict[str, Any]]) -> None:
    """All five steps are logged with a finite loss, and each strategy says what it did to each new batch."""
    logged = logs(trainer)
    assert list(logged) == [1, 2, 3, 4, 5]
    assert all(math.isfinite(entry["loss"]) and math.isfinite(entry["grad_norm"]) for entry in logged.values())
    for name, options in ((name, options) for spec in strategies for name, options in spec.items()):
        if name == "entropy_bonus":  # TRL's own, with metrics of its own
            assert all("entropy_coef" in entry for entry in logged.values())
            continue
        acts = (3, 5) if name == "position_shaping" else (1, 3, 5)  # the steps with a new batch
        for step in acts:
            own = {key: value for key, value in logged[step].items() if key.startswith(f"strategy/{name}/")}
            assert own, (name, options, step)
            assert all(math.isfinite(value) for value in own.values()), own


def check_resumed(whole: Any, resumed: Any, *, after: int = 3) -> None:
    """The same weights to the last bit, and the same numbers in the logs of the steps after the checkpoint."""
    expected, actual = weights(whole), weights(resumed)
    assert expected.keys() == actual.keys()
    for name, value in expected.items():
        torch.testing.assert_close(actual[name], value, rtol=0, atol=1e-7, msg=name)
    for step in range(after + 1, whole.state.max_steps + 1):
        assert logs(resumed)[step] == pytest.approx(logs(whole)[step]), step


def test_settings_cover_every_strategy() -> None:
    assert list(SETTINGS) == list(REGISTRY)


@pytest.mark.parametrize("spec", ALONE, ids=label)
def test_alone(run: Run, plain: dict[str, Any], tmp_path: Path, spec: dict[str, Any]) -> None:
    if not plain:
        plain.update(weights(run([])))
        shutil.rmtree(tmp_path / "out")
    whole = run([spec])
    check_effect(whole, [spec])
    idle = [{"reference_reset": {"on_stall": 1}}, {"importance_correction": {}}]  # what is sampled here is π itself
    if spec not in idle and "tool_progression" not in spec:  # nor does this policy call a tool
        assert any((value - plain[name]).abs().max() > 1e-6 for name, value in weights(whole).items()), "no effect"
    check_resumed(whole, run([spec], resume=3))


@pytest.mark.parametrize(
    "specs",
    [
        pytest.param(some, marks=[pytest.mark.slow] if index > 3 else [])
        for index, some in enumerate(combinations(10, 3))
    ],
    ids=label,
)
def test_in_company(run: Run, specs: list[dict[str, Any]]) -> None:
    whole = run(specs)
    check_effect(whole, specs)
    check_resumed(whole, run(specs, resume=3))


def test_a_checkpoint_has_the_batch_only_in_the_middle_of_its_reuse(run: Run, tmp_path: Path) -> None:
    run([{"reference_reset": {"every": 3}}], save_steps=1)
    saved = {step: {path.name for path in (tmp_path / f"out/checkpoint-{step}").iterdir()} for step in range(1, 6)}
    batches = [step for step in saved if any(name.startswith("generation_batch") for name in saved[step])]
    assert batches == [1, 3, 5]
    assert [step for step in saved if REFERENCE_STATE in saved[step]] == [3, 4, 5]


@pytest.mark.parametrize("saved", [pytest.param(1, marks=pytest.mark.slow), 2, pytest.param(4, marks=pytest.mark.slow)])
def test_resumes_from_any_step(run: Run, saved: int) -> None:
    """Before, at and after the reset; with a new batch, in the middle of one and at its end."""
    strategies = [{"kl_cov": {"fraction": 0.2}}, {"reference_reset": {"every": 2}}, "egsw"]
    whole = run(strategies, save_steps=1)
    check_resumed(whole, run(strategies, save_steps=1, resume=saved), after=saved)


def test_a_batch_may_serve_several_updates_without_iterations(run: Run) -> None:
    """steps_per_generation above the accumulation: a batch is split between two updates."""
    strategies = [{"kl_cov": {"fraction": 0.2}}, "egsw"]
    changes = {"num_iterations": 1, "steps_per_generation": 4}
    whole = run(strategies, **changes)
    check_resumed(whole, run(strategies, resume=3, **changes))


def test_a_stall_is_counted_through_a_checkpoint(run: Run) -> None:
    """The batch of steps 4 to 6 is of before the checkpoint, and so is its reward, which the reset at step 5 takes."""
    strategies, changes = [{"reference_reset": {"on_stall": 2}}], {"num_iterations": 3, "max_steps": 8, "save_steps": 4}
    whole = run(strategies, **changes)
    assert [entry.get("strategy/reference_reset/resets") for entry in logs(whole).values()][6] > 0
    check_resumed(whole, run(strategies, resume=4, **changes), after=4)


def test_adapters_resume_after_their_reference_was_reset(run: Run) -> None:
    from peft import LoraConfig

    def lora() -> dict[str, Any]:
        torch.manual_seed(0)
        return {"peft_config": LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)}

    strategies = [{"reference_reset": {"every": 2}}]
    whole = run(strategies, options=lora())
    check_resumed(whole, run(strategies, options=lora(), resume=3))


def test_resumes_in_the_second_epoch(run: Run) -> None:
    """Two batches are an epoch; after the checkpoint come the rest of the second one and a third."""
    changes = {"per_device_train_batch_size": 16, "num_iterations": 1}
    whole = run(["egsw"], **changes)
    assert whole.state.log_history[2]["epoch"] == 1.5
    check_resumed(whole, run(["egsw"], resume=3, **changes))


def test_resuming_with_other_strategies_is_refused(run: Run) -> None:
    run(["egsw"])
    with pytest.raises(ValueError, match=r"with the strategies \['egsw'\], but this trainer has \['clip_higher'\]"):
        run(["clip_higher"], resume=3)


# --- which prompts -------------------------------------------------------------------------------------------------


def test_a_curriculum_applies_however_the_data_set_is_given(make_trainer: Callable[..., Any]) -> None:
    curriculum = {"curriculum": {"solve_rates": RATES, "above": 0.5}}
    by_name = make_trainer(ExplorationTrainer, options={"strategies": [curriculum]})
    assert len(by_name.train_dataset) == 4
    template = make_trainer(ExplorationTrainer)
    by_position = ExplorationTrainer(
        template.model,
        template.reward_funcs,
        template.args,
        template.train_dataset,
        processing_class=template.processing_class,
        strategies=[curriculum],
    )
    assert len(by_position.train_dataset) == 4


def test_only_a_curriculum_with_an_order_switches_shuffling_off(make_trainer: Callable[..., Any]) -> None:
    for mode, shuffled in (("solved", True), ("easy_first", False)):
        curriculum = {"curriculum": {"solve_rates": RATES, "mode": mode}}
        assert make_trainer(ExplorationTrainer, options={"strategies": [curriculum]}).shuffle_dataset is shuffled, mode
