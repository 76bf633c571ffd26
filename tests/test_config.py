"""Configuration: what wins over what, and errors that help."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import yaml

from explorl.core.config import (
    Config,
    ConfigError,
    changed_keys,
    check_trackers,
    load_config,
    presets,
    read_yaml,
    with_defaults,
)


def test_defaults_are_the_papers() -> None:
    config = Config()
    assert config.training.learning_rate == 5e-6
    assert config.training.generations == 16
    assert config.training.beta == 0.001
    assert config.rollout.temperature == 0.6
    assert config.rollout.max_tokens == 1024
    assert config.model.lora is not None
    assert config.model.lora.rank == 8


def test_the_order_is_defaults_preset_file_set_values(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("training: {learning_rate: 3e-5, steps: 7}\nseed: 1\n")
    config = load_config(file, preset="tiny", overrides=["training.steps=9"], values={"seed": 5})
    assert config.model.name == "tiny"
    assert config.training.learning_rate == 3e-5
    assert config.training.steps == 9
    assert config.seed == 5
    assert config.training.prompts_per_step == 32


@pytest.mark.parametrize("preset", presets())
def test_presets_load_and_round_trip(preset: str, tmp_path: Path) -> None:
    config = load_config(preset=preset)
    file = tmp_path / "resolved.yaml"
    file.write_text(yaml.safe_dump(config.dump()))
    assert load_config(file) == config


@pytest.mark.parametrize("text", ["5e-6", "5E-6", "5.0e-6", "0.000005", "+5e-6"])
def test_numbers_may_be_written_as_people_write_them(text: str) -> None:
    assert load_config(overrides=[f"training.learning_rate={text}"]).training.learning_rate == 5e-6


def test_numbers_inside_strategies_too() -> None:
    assert load_config(overrides=["strategies=[{ppl_shaping: {alpha: 1e-2}}]"]).strategies == [
        {"ppl_shaping": {"alpha": 0.01}}
    ]


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("training.learning_rat=1", ["unknown key training.learning_rat", "--set", "did you mean 'learning_rate'?"]),
        ("trainin.steps=1", ["unknown key trainin", "did you mean 'training'?"]),
        ("model.lora.rnk=8", ["unknown key model.lora.rnk", "did you mean 'rank'?"]),
        ("evaluation.engine=vllm", ["unknown key evaluation.engine", "--set", "explorl eval --engine vllm"]),
        ("training.steps=0", ["training.steps is 0", "greater than or equal to 1", "default is 200"]),
        ("training.learning_rate=fast", ["training.learning_rate is 'fast'", "number"]),
        ("rollout.temperature=.nan", ["rollout.temperature is nan", "finite"]),
        ("rollout.top_p=1.5", ["rollout.top_p is 1.5", "less than or equal to 1"]),
        ("training.micro_batch=7", ["micro_batch is 7", "256", "use 4"]),
        ("training.loss=cipso", ["training.loss is 'cipso'", "'cispo'"]),
        ("model.dtype=half", ["model.dtype is 'half'", "'pure_bfloat16'", "default is 'float32'"]),
        ("strategies=[ppl_shapin]", ["ppl_shapin", "ppl_shaping"]),
        ("strategies=[{passk_training: {k: 99}}]", ["k", "99", "16"]),
        ("strategies=[{pkpo: {k: 99}}]", ["pkpo: k is 99", "num_generations=16", "use k=8"]),
        ("strategies=[{risk_sensitive: {beta: -2}}]", ["risk_sensitive: beta is -2", "at least 0", "2.0"]),
        ("strategies=[{ucpo: {tau: 1.5}}]", ["ucpo: tau is 1.5", "at most 1", "0.2"]),
        ("strategies=[{quantile_baseline: {quantile: 1}}]", ["quantile is 1", "below 1", "0.4"]),
        ("strategies=[maxrl, {pkpo: {k: 2}}]", ["maxrl and pkpo each replace the base advantage"]),
        ("no-equals-sign", ["not key=value", "training.learning_rate=5e-6"]),
        ("training={", ["not YAML"]),
        ("training={steps: 5, steps: 6}", ["--set", "has the key steps twice, in lines 1 and 1"]),
        ("evaluation.protocol=dang", ["evaluation.protocol: unknown protocol 'dang'", "deng", "--set"]),
        ("training=", ["training is empty in --set; use keys and values, like {steps: 200}, or leave it out"]),
        ("model.lora=yes", ["model.lora is True in --set; use keys and values, like {rank: 8}"]),
        ("training.token_records=true", ["training.token_records", "it is true; use a number"]),
        ("evaluation.problems=yes", ["evaluation.problems", "it is true; use a number"]),
        ("rollout.top_p=off", ["rollout.top_p", "it is false; use a number"]),
    ],
)
def test_errors_name_the_key_the_value_and_a_good_one(override: str, words: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        load_config(overrides=[override])
    for word in words:
        assert word in str(error.value)


def test_errors_of_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read the config file .*missing\.yaml"):
        load_config(tmp_path / "missing.yaml")
    (tmp_path / "list.yaml").write_text("- 1")
    with pytest.raises(ConfigError, match=r"list\.yaml must hold keys and values"):
        load_config(tmp_path / "list.yaml")
    (tmp_path / "empty.yaml").write_text("")
    assert load_config(tmp_path / "empty.yaml") == Config()
    with pytest.raises(ConfigError, match="did you mean 'tiny'"):
        load_config(preset="tini")


def test_trackers_have_names_and_are_installed():
    with pytest.raises(ConfigError, match=r"training\.report_to\.0 is 'tensorbord'.*'tensorboard'"):
        load_config(preset="tiny", values={"training": {"report_to": ["tensorbord"]}})
    with pytest.raises(ConfigError, match="names neptune, which is not installed: pip install neptune"):
        check_trackers(["neptune"])
    check_trackers([])


def test_every_loss_of_trl_is_accepted() -> None:
    for loss in ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo"):
        assert load_config(overrides=[f"training.loss={loss}"]).training.loss == loss


def test_cispo_has_its_own_upper_bound(tmp_path: Path) -> None:
    """TRL clamps the ratio itself to it; 0.2 would shrink every update to a fifth."""
    config = load_config(overrides=["training.loss=cispo"])
    assert config.training.clip_high == 5.0
    file = tmp_path / "resolved.yaml"
    file.write_text(yaml.safe_dump(config.dump()))
    assert load_config(file) == config
    assert load_config(overrides=["training.loss=cispo", "training.clip_high=3"]).training.clip_high == 3.0
    assert load_config(overrides=["training.loss=dapo"]).training.clip_high == 0.2
    with pytest.raises(ConfigError, match=r"clip_high is 0\.28, which for cispo is the upper bound.*use 5\.0"):
        load_config(overrides=["training.loss=cispo", "training.clip_high=0.28"])


def test_a_stored_configuration_without_a_key_has_its_default() -> None:
    now = load_config(preset="tiny", overrides=["training.steps=7", "task.seed=3"]).dump()
    before = copy.deepcopy(now)
    del before["evaluation"]["ends"], before["training"]["token_records"]
    assert changed_keys(before, now) == {}
    assert changed_keys(now, before) == {}
    assert with_defaults(before) == now
    other = load_config(preset="tiny", overrides=["training.steps=7", "task.seed=3", "evaluation.ends=5"]).dump()
    assert changed_keys(before, other) == {"evaluation.ends": (64, 5)}
    assert with_defaults({"model": {"lora": None}})["model"]["lora"] is None


def test_a_fault_in_yaml_is_named_with_its_line() -> None:
    with pytest.raises(ConfigError, match=r"own\.yaml is not YAML: line 2 is indented with a tab; indent with spaces"):
        read_yaml("task:\n\tname: jsonl\n", "own.yaml")
    with pytest.raises(
        ConfigError, match=r"own\.yaml is not YAML: line 2, column 1 \(in what starts in line 1\): expected ',' or '\]'"
    ):
        read_yaml("a: [1\n", "own.yaml")


def test_a_presets_policy_is_fine_tuned_as_it_is_on_another_task() -> None:
    """The preset's own task is what it was made with, from random weights."""
    assert load_config(preset="tiny").sft.from_scratch
    assert not load_config(preset="tiny", overrides=["task.name=products"]).sft.from_scratch
    assert load_config(preset="tiny", overrides=["task.name=products", "sft.from_scratch=true"]).sft.from_scratch


def test_a_date_is_text() -> None:
    """As it is in the run's own file, from which it goes on."""
    assert read_yaml("since: 2024-01-01\nat: 2024-01-01 10:00:00", "own.yaml") == {
        "since": "2024-01-01", "at": "2024-01-01 10:00:00",
    }  # fmt: skip


def test_a_section_that_stands_twice_is_not_dropped() -> None:
    text = "training:\n  steps: 5\nmodel: {name: tiny}\ntraining:\n  shuffle: true\n"
    with pytest.raises(ConfigError, match=r"own\.yaml has the key training twice, in lines 1 and 4"):
        read_yaml(text, "own.yaml")
    merged = "a: &a {x: 1, y: 2}\nb: &b\n  <<: *a\n  x: 3\nc:\n  <<: *b\n  y: 4\n"
    assert read_yaml(merged, "own.yaml")["c"] == {"x": 3, "y": 4}
    doubled = "".join(f"a{n}: &a{n} [{f'*a{n - 1}, *a{n - 1}' if n else '{b: 1, b: 2}'}]\n" for n in range(8))
    with pytest.raises(ConfigError, match=r"has the key a0\.b twice"):
        read_yaml(doubled, "own.yaml")
    assert read_yaml(doubled.replace("b: 2", "c: 2"), "own.yaml")["a7"]


@pytest.mark.parametrize("name", ["dynamic_sampling", "skip_solved"])
def test_an_option_may_be_switched_on_without_its_settings(name: str) -> None:
    def told(value: str) -> object:
        return load_config(overrides=[f"training.{name}={value}"]).dump()["training"][name]

    key, default, other = {"dynamic_sampling": ("max_rounds", 3, 5), "skip_solved": ("visits", 2, 4)}[name]
    on = told("true")
    assert isinstance(on, dict)
    assert on[key] == default
    assert told("false") is told("null") is None
    assert told(f"{{{key}: {other}}}") == {**on, key: other}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("training.dynamic_sampling.max_rounds=0", "training.dynamic_sampling.max_rounds is 0"),
        ("training.dynamic_sampling.rounds=2", "unknown key training.dynamic_sampling.rounds"),
        ("training.dynamic_sampling=5", "training.dynamic_sampling is 5"),
        ("training.skip_solved.floor=0", "training.skip_solved.floor is 0"),
        ("rollout.engine=vllm", "training.dynamic_sampling is not supported with vLLM; set rollout.engine to null"),
        ("task.train_problems=16", "task.train_problems is 16 and training.prompts_per_step 16; use more problems"),
    ],
)
def test_what_dynamic_sampling_and_skip_solved_cannot_do_is_told(change: str, words: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_config(overrides=["training.dynamic_sampling=true", change])
    assert words in str(error.value)


@pytest.mark.parametrize("seed", [-1, 2**32])
def test_a_seed_that_torch_and_numpy_do_not_both_take_is_refused(seed: int) -> None:
    with pytest.raises(ConfigError, match=rf"seed is {seed} in --set: .*the default is 0"):
        load_config(overrides=[f"seed={seed}"])
