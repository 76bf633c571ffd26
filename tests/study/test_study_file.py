"""Study files: what they say, and one clear error for each way to say it wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

import explorl
from explorl.core.config import ConfigError
from explorl.core.merge import flatten
from explorl.core.store import cleaned
from explorl.strategies import REGISTRY
from explorl.study.spec import Study, checked_seeds, inert_settings, load_study, seeds_in, slug

from ..hostile import NAMES

STUDIES = Path(explorl.__file__).parent / "studies"

SOUND = {
    "name": "s",
    "base": {"preset": "tiny", "training": {"iterations": 2}},
    "arms": {"a": None, "b": {"set": {"training.learning_rate": 1e-3}, "strategies": ["egsw"]}},
    "baseline": "a",
    "evaluation": {"every": 5},
    "budget": {"steps": 20},
}


def written(tmp_path: Path, values: object) -> Path:
    path = tmp_path / "study.yaml"
    path.write_text(values if isinstance(values, str) else yaml.safe_dump(values, sort_keys=False))
    return path


@pytest.mark.parametrize("name", ["deng", "egsw", "mecklenburg"])
@pytest.mark.parametrize("profile", ["tiny", "gpu"])
def test_the_papers_studies_build_every_arm(name: str, profile: str, tmp_path: Path) -> None:
    study = load_study(STUDIES / f"{name}.yaml", profile=profile)
    assert len(study.seeds) == 3
    assert study.base["model"]["name"] == ("tiny" if profile == "tiny" else "smollm2-135m")
    assert (study.warm_start is not None) == (profile == "gpu")
    (tmp_path / "solve-rates.json").write_text('{"a prompt": 0.5}')
    for arm in study.arms:
        config = study.arm_config(arm, 7, tmp_path)
        assert config.seed == 7
        assert not inert_settings(arm), "every strategy has an effect"
        assert config.training.steps == study.budget["steps"]
    assert study.needs_solve_rates == (name == "mecklenburg")


def test_the_frontier_study_builds_every_arm_and_looks_twice(tmp_path: Path) -> None:
    study = load_study(STUDIES / "frontier.yaml", profile="tiny")
    assert study.sequential == {"first": 3, "keep": 4, "measures": ["pass@1", "pass@16", "entropy"]}
    assert len(study.seeds) == 8
    plain = flatten(study.arm_config(study.arm("GRPO"), 0, tmp_path).dump())
    for arm in study.arms:
        config = study.arm_config(arm, 0, tmp_path)
        assert not inert_settings(arm), "every strategy has an effect"
        other = {key for key, value in flatten(config.dump()).items() if plain.get(key) != value}
        assert other or arm.name == "GRPO", "an arm differs from the baseline"
        assert all(key.startswith(("strategies", "training.dynamic_sampling")) for key in other), other


def test_the_papers_studies_have_the_papers_arms() -> None:
    deng = load_study(STUDIES / "deng.yaml", profile="tiny")
    used = {
        name
        for arm in deng.arms
        for spec in arm.config["strategies"]
        for name in ([spec] if isinstance(spec, str) else spec)
    }
    assert used >= {
        "ppl_shaping", "position_shaping", "entropy_advantage", "negative_reinforcement", "passk_training",
        "clip_higher", "clip_cov", "forking_tokens", "reference_reset", "kl_cov",
    }  # fmt: skip
    assert used <= set(REGISTRY)
    sweep = load_study(STUDIES / "mecklenburg.yaml", profile="gpu")
    plain = {arm.config["rollout"]["temperature"] for arm in sweep.arms if not arm.config["strategies"]}
    assert plain == {0.3, 0.6, 0.8, 1.5}
    assert sweep.base["training"]["learning_rate"] == 5e-6


def test_what_a_file_says(tmp_path: Path) -> None:
    study = load_study(written(tmp_path, SOUND))
    a, b = study.arms
    assert study.title == "s"
    assert study.seeds == (0, 1, 2)
    assert a.changes == {}
    assert b.changes == {"training.learning_rate": 1e-3}
    assert b.config["strategies"] == ["egsw"]
    assert a.config["training"]["steps"] == 20
    assert a.config["evaluation"]["every"] == 10, "evaluations are due by steps, of which each has two updates"
    assert load_study(written(tmp_path, SOUND), seeds=[5, 3]).seeds == (5, 3)
    assert study.arm_config(b, 4, tmp_path).training.learning_rate == 1e-3
    (tmp_path / "study.json").write_text(json.dumps(study.record()))
    assert Study.read(tmp_path) == study


def test_without_a_plan_the_start_and_the_end_are_evaluated(tmp_path: Path) -> None:
    study = load_study(written(tmp_path, {**SOUND, "evaluation": {"samples": 4}}))
    assert study.arms[0].config["evaluation"]["every"] == 40
    assert study.arms[0].config["evaluation"]["samples"] == 4


def test_a_profile_changes_anything(tmp_path: Path) -> None:
    profiles = {
        "small": {"seeds": [1], "budget": {"tokens": 5e6}, "base": {"training": {"steps": 9}}, "without": ["b"]},
        "warm": {"warm_start": {"sft": {"examples": 5}}, "arms": {"c": {"strategies": []}}},
    }
    path = written(tmp_path, {**SOUND, "profiles": profiles})
    small, warm = (load_study(path, profile=name) for name in profiles)
    assert (small.seeds, small.budget, [arm.name for arm in small.arms]) == ((1,), {"tokens": 5e6}, ["a"])
    assert small.arms[0].config["training"]["steps"] == 9
    assert [arm.name for arm in warm.arms] == ["a", "b", "c"]
    assert warm.warm_start is not None
    assert warm.warm_start["sft"]["examples"] == 5
    assert warm.arm_config(warm.arms[0], 0, tmp_path).model.name.endswith("warm-start/model")
    with pytest.raises(ConfigError, match=r"no profile 'smal'; did you mean 'small'\?"):
        load_study(path, profile="smal")
    with pytest.raises(ConfigError, match="choose one with --profile: small or warm"):
        load_study(path)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"arm": {}}, ["unknown key arm", "did you mean 'arms'?", "study.yaml"]),
        ({"arms": {"a": {"sett": {}}}}, ["unknown key arms.a.sett", "did you mean 'set'?"]),
        ({"evaluation": {"evry": 3}}, ["unknown key evaluation.evry", "did you mean 'every'?"]),
        ({"arms": {"a": {"set": {"training.learning_rat": 1}}}}, ["arm 'a'", "training.learning_rat", "learning_rate"]),
        ({"arms": {"a": {"set": {"trainin.steps": 1}}}}, ["arm 'a'", "unknown key trainin", "did you mean 'training'"]),
        ({"arms": {"a": {"set": {"training.learning_rate": -1}}}}, ["learning_rate is -1", "greater than 0"]),
        ({"arms": {"a": {"strategies": ["egws"]}}}, ["arm 'a'", "unknown strategy 'egws'", "egsw"]),
        ({"arms": {"a": {"strategies": [{"egsw": {"alpa": 1}}]}}}, ["arm 'a'", "hyperparameter 'alpa'", "alpha"]),
        ({"arms": {"a": {"strategies": [{"egsw": {"alpha": "x"}}]}}}, ["arm 'a'", "egsw: alpha is 'x'"]),
        ({"arms": {"a": {"set": {"seed": 3}}}}, ["arm 'a'", "sets seed", "`seeds`"]),
        ({"arms": {"a": {"set": {"evaluation.samples": 3}}}}, ["sets evaluation.samples", "all arms share"]),
        ({"arms": {"a": {"set": {"training.steps": 3}}}}, ["sets training.steps", "`budget`"]),
        ({"arms": {"a": {"set": {"strategies": []}}}}, ["sets strategies", "the arm's `strategies`"]),
        ({"arms": {"a": None, "A": None}}, ["'a', 'A'", "same folder name 'a'", "rename one"]),
        ({"arms": {"a": None, "a…": None}}, ["'a', 'a…'", "same folder name 'a'", "rename one"]),
        ({"arms": {"a": None, "x\x1b": None, "x␛": None}}, ["displayed alike", "rename one"]),
        ({"arms": {"a": None, "n" * 101: None}}, ["'" + "n" * 40 + "…'", "101 characters", "at most 100"]),
        ({"baseline": "c"}, ["baseline is 'c'", "not an arm"]),
        ({"without": ["c"]}, ["no arm 'c'"]),
        ({"seeds": [0, 1, 0]}, ["the seed 0 is listed 2 times"]),
        ({"seeds": []}, ["seeds is empty"]),
        ({"seeds": 0}, ["seeds", "greater than or equal to 1"]),
        ({"base": {"preset": "tini"}}, ["base.preset is 'tini'", "did you mean 'tiny'?"]),
        ({"base": {"task": {"name": "countdwn"}}}, ["base of", "unknown task 'countdwn'"]),
        ({"base": {"preset": "tiny", "task": {"template": "ters"}}}, ["task.template is 'ters'", "terse"]),
        ({"evaluation": {"protocol": "plan"}}, ["unknown protocol 'plan'"]),
        ({"budget": {"steps": 3, "tokens": 5}}, ["one of steps, tokens and minutes", "'steps', 'tokens'"]),
        ({"budget": {}}, ["one of steps, tokens and minutes", "none"]),
        ({"name": "Two Words"}, ["name is 'Two Words'"]),
        ({"warm_start": {"sft": {"epocs": 1}}}, ["warm_start of", "sft.epocs", "epochs"]),
        ({"profiles": [1]}, ["profiles in"]),
    ],
)  # fmt: skip
def test_bad_input_is_one_clear_error(change: dict[str, object], words: list[str], tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        load_study(written(tmp_path, {**SOUND, **change}))
    for word in words:
        assert word in str(error.value), str(error.value)


def test_a_key_of_all_arms_on_the_command_line(tmp_path: Path) -> None:
    """An arm that sets the key itself keeps its own value."""
    path = written(tmp_path, SOUND)
    changes = ["rollout.max_tokens=12", "training.learning_rate=0.5", "task.holdout_problems=3"]
    study = load_study(path, overrides=changes)
    assert study.base["task"]["holdout_problems"] == 3
    rates = {}
    for arm in study.arms:
        config = study.arm_config(arm, 0, tmp_path)
        assert (config.rollout.max_tokens, config.training.iterations) == (12, 2)
        rates[arm.name] = config.training.learning_rate
    assert rates == {"a": 0.5, "b": 1e-3}
    bare = written(tmp_path, {"name": "s", "arms": {"a": None}, "baseline": "a", "budget": {"steps": 2}})
    assert load_study(bare, overrides=["model.name=tiny", "task.name=countdown-mini"]).base["model"]["name"] == "tiny"


def test_the_warm_start_on_the_command_line(tmp_path: Path) -> None:
    """It is a key of the study, not of its base: it can be dropped or changed."""
    path = written(tmp_path, {**SOUND, "warm_start": {"sft": {"epochs": 2}}})
    assert load_study(path, overrides=["warm_start.sft.examples=30"]).warm_start["sft"]["examples"] == 30
    study = load_study(path, overrides=["warm_start=null"])
    assert study.warm_start is None
    assert study.arm_config(study.arms[0], 0, tmp_path).model.name == study.base["model"]["name"]
    with pytest.raises(ConfigError, match=r"warm_start of .*sft\.epocs"):
        load_study(path, overrides=["warm_start.sft.epocs=1"])


def test_a_warm_start_on_a_task_without_reference_solutions(tmp_path: Path) -> None:
    """It is refused before anything runs, with what to do instead."""
    path = written(tmp_path, {**SOUND, "warm_start": {"sft": {"epochs": 2}}})
    choice = ["task.name=choice", "task.template=null", f"task.data_dir={tmp_path}"]
    with pytest.raises(ConfigError, match=r"warm_start.*'choice'.*--set warm_start=null"):
        load_study(path, overrides=choice)
    assert load_study(path, overrides=[*choice, "warm_start=null"]).warm_start is None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("training.steps=5", "would have no effect: the study sets budget.steps"),
        ("evaluation.every=3", "would have no effect: the study sets evaluation.every"),
        ("rollout.max_token=3", "--set"),
        ("rollout.max_tokens", "is not key=value"),
        ("rollout.max_tokens=none", "and --set"),
    ],
)
def test_a_key_that_cannot_be_set(change: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=words):
        load_study(written(tmp_path, SOUND), overrides=[change])


def test_two_arms_of_one_name(tmp_path: Path) -> None:
    text = "name: s\nbaseline: a\narms:\n  a: {}\n  b: {}\n  a: {strategies: [egsw]}\n"
    with pytest.raises(ConfigError, match=r"has the arm 'a' twice, in lines 4 and 6"):
        load_study(written(tmp_path, text))
    with pytest.raises(ConfigError, match=r"has the key base.seed twice"):
        load_study(written(tmp_path, "name: s\nbase: {seed: 1, seed: 2}\nbaseline: a\narms: {a: {}}\n"))


def test_files_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read the study file"):
        load_study(tmp_path / "missing.yaml")
    with pytest.raises(ConfigError, match="must hold keys and values"):
        load_study(written(tmp_path, "- 1"))
    with pytest.raises(ConfigError, match="is not YAML"):
        load_study(written(tmp_path, "a: ["))
    with pytest.raises(ConfigError, match="lacks the key arms"):
        load_study(written(tmp_path, "name: s\nbaseline: a\n"))


def test_a_policy_of_ones_own_cannot_stand_beside_a_warm_start(tmp_path: Path) -> None:
    values = {**SOUND, "warm_start": {}, "arms": {"a": {"set": {"model.name": "tiny"}}}}
    with pytest.raises(ConfigError, match="all arms start from the warm start"):
        load_study(written(tmp_path, values))


def test_seeds() -> None:
    assert checked_seeds(3) == (0, 1, 2)
    assert checked_seeds([4, 2]) == (4, 2)
    with pytest.raises(ValueError, match="use 1 to 10,000, such as 3"):
        checked_seeds(0)


def test_arms_may_have_any_name(tmp_path: Path) -> None:
    texts = {"baseline": NAMES[0], "title": "\x1b[2J[/b]", "description": "\ud800"}
    path = written(tmp_path, {**SOUND, **texts, "arms": dict.fromkeys(NAMES, None)})
    study = load_study(path)
    assert [arm.name for arm in study.arms] == cleaned(NAMES)
    assert (study.baseline, study.title, study.description) == (cleaned(NAMES[0]), "␛[2J[/b]", "\ufffd")
    assert len({arm.slug for arm in study.arms}) == len(NAMES)
    for arm, name in zip(study.arms, NAMES, strict=True):
        assert study.arm(name) is arm
        (tmp_path / arm.slug).mkdir()
        assert (tmp_path / arm.slug).parent == tmp_path
    assert len([path for path in tmp_path.iterdir() if path.is_dir()]) == len(NAMES)


def test_a_slug_is_a_folders_name() -> None:
    assert slug("PPL + position, T 0.3") == "ppl-position-t-0.3"


@pytest.mark.parametrize(
    ("text", "seeds"),
    [
        ("3", 3),
        (" 3 ", 3),
        ("0-2", [0, 1, 2]),
        ("3 - 5", [3, 4, 5]),
        ("4-4", [4]),
        ("3,7", [3, 7]),
        ("0-1, 5", [0, 1, 5]),
        ("10000", 10_000),
        ("4294967295-4294967295", [2**32 - 1]),
    ],
)
def test_seeds_on_the_command_line(text: str, seeds: int | list[int]) -> None:
    assert seeds_in(text) == seeds


@pytest.mark.parametrize("text", ["", "-3", "a", "1-", "1,", "1.5", "5-3", "1-2-3"])
def test_seeds_that_nobody_can_read(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--seeds is .*; give"):
        seeds_in(text)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("1-1000000", "1,000,000 seeds; use at most 10,000"),
        ("0-6000,7000-13000", "12,002 seeds; use at most 10,000"),
        ("0-99999999999999999999", "seed 99999999999999999999; seeds go up to 4294967295"),
        ("4294967296-4294967296", "seed 4294967296; seeds go up to 4294967295"),
        ("99999999999999999999", "99,999,999,999,999,999,999 seeds; use at most 10,000"),
        ("9" * 5000, "a number of 5000 digits"),
        ("3," + "9" * 5000, "a number of 5000 digits"),
    ],
)
def test_too_many_or_too_large_seeds_are_refused_at_once(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        seeds_in(text)


def test_too_many_seeds_of_a_file_are_refused_too(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"seeds is 1000000000; use 1 to 10,000, such as 3"):
        load_study(written(tmp_path, {**SOUND, "seeds": 10**9}))
    with pytest.raises(ConfigError, match=r"the seed 4294967296 is above 4294967295"):
        load_study(written(tmp_path, {**SOUND, "seeds": [2**32]}))
    with pytest.raises(ValueError, match=r"there are 10,001 seeds; use at most 10,000"):
        checked_seeds(range(10_001))
