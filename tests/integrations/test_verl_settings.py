"""The section `explorl` of verl's configuration: what it says, and what it cannot have."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from explorl.integrations.verl.check import check_config
from explorl.integrations.verl.settings import read_settings
from explorl.integrations.verl.support import EXAMPLES, refusal_reason, support
from explorl.strategies import REGISTRY, BottomP, EntropyBonus, MaskTruncated, Strategy, build

VERL: dict[str, Any] = {
    "trainer": {"use_v1": True, "v1": {"trainer_mode": "explorl"}, "resume_mode": "auto", "default_local_dir": "here"},
    "data": {"train_batch_size": 8},
    "algorithm": {"adv_estimator": "grpo", "rollout_correction": {"rollout_is": None, "bypass_mode": False}},
    "actor_rollout_ref": {
        "model": {"path": "m", "use_fused_kernels": False},
        "actor": {
            "ppo_mini_batch_size": 8,
            "ppo_epochs": 1,
            "entropy_coeff": 0,
            "policy_loss": {"loss_mode": "vanilla"},
        },
        "rollout": {"name": "vllm", "n": 4, "response_length": 64, "temperature": 1.0, "calculate_log_probs": False},
    },
}


def verl(strategies: Any = (), **places: Any) -> dict[str, Any]:
    """A configuration with these strategies; a place such as ``data__train_batch_size`` is set."""
    config = copy.deepcopy(VERL)
    config["explorl"] = {"strategies": list(strategies) if isinstance(strategies, tuple) else strategies}
    for path, value in places.items():
        *parents, last = path.split("__")
        inner = config
        for key in parents:
            inner = inner.setdefault(key, {})
        inner[last] = value
    return config


def test_a_list_is_read_as_a_config_of_ours() -> None:
    settings = read_settings(
        verl(["mask_truncated", {"bottom_p": {"p": 0.8}}, {"name": "entropy_bonus", "coef": 0.01}])
    )
    assert settings.strategies == (MaskTruncated(), BottomP(p=0.8), EntropyBonus(coef=0.01))
    assert settings.run == Path("here/explorl").absolute()
    assert read_settings(verl(explorl__run=False)).run is None
    assert read_settings(verl(explorl__correct=["acc", 0.5])).correct == ("acc", 0.5)


@pytest.mark.parametrize(
    ("places", "message"),
    [
        ({"explorl__strategies": ["botom_p"]}, "unknown strategy 'botom_p'; did you mean 'bottom_p'"),
        ({"explorl__strategies": "bottom_p"}, "must be a list"),
        ({"explorl__strategies": [{"bottom_p": {"q": 1}}]}, "has no hyperparameter 'q'"),
        ({"explorl__stratgies": []}, "explorl.stratgies: unknown key; did you mean 'strategies'"),
        ({"explorl": ["bottom_p"]}, "write a section"),
        ({"explorl__correct": 1.0}, "explorl.correct is 1.0"),
        ({"explorl__correct": ["acc", True]}, "explorl.correct is"),
        ({"explorl__answers": 3}, "explorl.answers is 3"),
        ({"explorl__run": 7}, "explorl.run is 7"),
    ],
)
def test_what_is_misspelt_is_named(places: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message.replace("[", r"\[")):
        read_settings(verl(**places))


@pytest.mark.parametrize(
    ("strategies", "places", "message"),
    [
        ([{"reference_reset": {"every": 10}}], {}, "reference_reset cannot run inside verl here: the reference"),
        ([{"curriculum": {"solve_rates": {"p": 1.0}}}], {}, "curriculum cannot run.*data.train_files"),
        (["entropy_branching"], {}, "entropy_branching cannot run.*branching needs"),
        (["tool_progression"], {}, "tool_progression cannot run"),
        (["lp_reg"], {}, "lp_reg cannot run.*vocabulary"),
        (["annealed_temperature"], {}, "annealed_temperature cannot run.*one temperature"),
        ([{"entropy_bonus": {"target": 0.3}}], {}, "entropy_bonus cannot run.*entropy_target"),
        (["importance_correction"], {}, "importance_correction cannot run.*calculate_log_probs=True"),
        (["outcome_exploration"], {}, "outcome_exploration cannot run.*explorl.answers"),
        (["bottom_p"], {"actor_rollout_ref__rollout__name": "sglang"}, "bottom_p cannot run.*sglang.*name=vllm"),
        (["egsw"], {"actor_rollout_ref__actor__policy_loss__loss_mode": "gspo"}, "egsw cannot run.*gspo.*vanilla"),
        (["overlong_penalty"], {"algorithm__adv_estimator": "gae"}, "overlong_penalty cannot run.*gae.*grpo"),
        (["ppl_shaping"], {"algorithm__rollout_correction__bypass_mode": True}, "bypass_mode"),
        (["egsw"], {"distillation__enabled": True}, "distillation"),
        ([{"entropy_bonus": {"coef": 0.01}}], {"actor_rollout_ref__actor__entropy_coeff": 0.5}, "entropy_coeff is 0.5"),
        ([{"passk_training": {"k": 8}}], {}, "k is 8"),
        (["ppl_shaping"], {"trainer__v1__trainer_mode": "sync"}, "trainer_mode='sync'.*trainer_mode=explorl"),
        (["ppl_shaping"], {"trainer__use_v1": False}, "use_v1=True"),
        (
            ["importance_correction"],
            {
                "actor_rollout_ref__rollout__calculate_log_probs": True,
                "algorithm__rollout_correction__rollout_is": "token",
            },
            "rollout_is already weights",
        ),
        (
            ["importance_correction", {"bottom_p": {"frequency": 0.5}}],
            {"actor_rollout_ref__rollout__calculate_log_probs": True},
            "importance_correction cannot run.*bottom_p decides at random.*frequency to 1",
        ),
        (
            [{"element_wise_temperature": {"source": "running"}}],
            {"actor_rollout_ref__model__use_fused_kernels": True},
            "element_wise_temperature cannot run.*use_fused_kernels=False",
        ),
    ],
)
def test_what_cannot_be_had_is_refused_by_name_with_the_reason(
    strategies: list[Any], places: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        check_config(verl(strategies, **places))


def test_a_configuration_without_explorl_is_left_alone() -> None:
    config = copy.deepcopy(VERL)
    config["trainer"]["v1"]["trainer_mode"] = "sync"
    assert check_config(config) is None
    config["algorithm"]["adv_estimator"] = "explorl_grpo"
    assert check_config(config) is None
    config["actor_rollout_ref"]["actor"]["policy_loss"]["loss_mode"] = "explorl"
    with pytest.raises(ValueError, match="trainer_mode=explorl"):
        check_config(config)


def test_a_run_that_would_be_overwritten_is_refused(tmp_path: Path) -> None:
    from explorl.core.store import RunStore

    store = RunStore(tmp_path / "mine")
    store.begin({"seed": 0}, "grpo")
    store.append_metrics({"step": 1, "kind": "train", "reward": 0.5})
    config = verl([], explorl__run=str(tmp_path / "mine"), trainer__resume_mode="disable")
    with pytest.raises(ValueError, match="already holds a run"):
        check_config(config)
    config["trainer"]["resume_mode"] = "auto"
    assert check_config(config) is not None


def test_a_strategy_without_effect_is_told() -> None:
    with pytest.warns(UserWarning, match="kl_cov does nothing.*ppo_mini_batch_size below"):
        check_config(verl(["kl_cov"]))


def test_the_table_has_every_strategy_and_agrees_with_what_is_refused() -> None:
    rows = {row.strategy: row for row in support()}
    assert list(rows) == list(REGISTRY)
    for name, row in rows.items():
        strategy = build({name: EXAMPLES.get(name, {})})
        assert row.runs == (refusal_reason(strategy) is None)
        assert row.through if row.runs else row.reason
    refused = {name for name, row in rows.items() if not row.runs}
    assert refused == {
        "annealed_temperature", "curriculum", "entropy_branching", "lp_reg", "reference_reset", "tool_progression",
    }  # fmt: skip


def test_a_strangers_strategy_is_judged_by_its_hooks() -> None:
    class Mine(Strategy):
        name = "mine"

        def arguments(self) -> dict[str, Any]:
            return {"num_iterations": 2}

    assert "num_iterations" in str(refusal_reason(Mine()))


def test_asking_what_a_strategy_samples_leaves_no_trace() -> None:
    strategy = build({"element_wise_temperature": {"solve_rates": {"a question": 0.5}}})
    assert refusal_reason(strategy) is None
    assert strategy.memory == {}
