"""Strategies by name: building, composing, describing, and the errors of a wrong config."""

from __future__ import annotations

import inspect
import json
import math
import subprocess
import sys
from dataclasses import FrozenInstanceError, InitVar, dataclass, field
from importlib.metadata import EntryPoint

import pytest

import explorl.strategies as xs
from explorl.core import plugins
from explorl.strategies import Schedule

REQUIRED = {
    "curriculum": {"solve_rates": {"a": 1.0}},
    "element_wise_temperature": {"solve_rates": {"a": 1.0}},
    "passk_training": {"k": 4},
    "pkpo": {"k": 4},
    "reference_reset": {"every": 200},
}

NAMES = [
    "bottom_p",
    "importance_correction",
    "element_wise_temperature",
    "annealed_temperature",
    "entropy_branching",
    "tool_progression",
    "mask_truncated",
    "pass_threshold",
    "overlong_penalty",
    "curriculum",
    "egsw",
    "ppl_shaping",
    "position_shaping",
    "entropy_advantage",
    "negative_reinforcement",
    "passk_training",
    "pkpo",
    "maxrl",
    "risk_sensitive",
    "quantile_baseline",
    "unlikeliness",
    "ucpo",
    "outcome_exploration",
    "clip_higher",
    "forking_tokens",
    "clip_cov",
    "kl_cov",
    "lp_reg",
    "entropy_bonus",
    "reference_reset",
]


def error(action, *arguments, **keywords):
    with pytest.raises(ValueError) as raised:  # noqa: PT011 the message is looked at by the caller
        action(*arguments, **keywords)
    return str(raised.value)


# --- the strategies that come with the package --------------------------------------------------------------------


def test_all_strategies_are_registered():
    assert list(xs.REGISTRY) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_every_strategy_builds_and_documents_itself(name):
    strategy = xs.build({name: REQUIRED.get(name)})
    assert type(strategy) is xs.REGISTRY[name]
    assert strategy.name == name
    assert strategy.paper
    assert type(strategy).__name__ in xs.__all__
    docs = inspect.getdoc(sys.modules[type(strategy).__module__])
    effect, formula, *rest = docs.split("\n\n")
    assert "\n" not in effect
    assert effect.endswith(".")
    assert formula.startswith("    ")
    for heading in ("What to expect: ", "When not to use it: ", "Deviations: "):
        assert sum(paragraph.startswith(heading) for paragraph in rest) == 1, heading
    assert inspect.getdoc(type(strategy)).endswith(".")
    json.dumps(strategy.memory)


@pytest.mark.parametrize("name", NAMES)
def test_strategies_are_frozen_and_comparable(name):
    first, second = (xs.build({name: REQUIRED.get(name)}) for _ in range(2))
    second.memory["step"] = 3
    assert first == second
    assert first.memory == {}
    with pytest.raises(FrozenInstanceError):
        first.memory = {}


def test_description():
    described = {entry["name"]: entry for entry in xs.describe()}
    assert list(described) == NAMES
    json.dumps(list(described.values()))
    egsw = described["egsw"]
    assert egsw["class"] == "EntropyGuidedWeighting"
    assert egsw["effect"].startswith("Entropy-guided sequence weighting: ")
    assert "Vanlioglu" in egsw["paper"]
    assert egsw["docs"].count("\n") > 10
    assert egsw["hyperparameters"][0] == {
        "name": "alpha",
        "type": "float | Schedule",
        "required": False,
        "default": 0.3,
    }
    assert described["passk_training"]["hyperparameters"] == [
        {"name": "k", "type": "int | Schedule", "required": True, "default": None}
    ]
    assert described["mask_truncated"]["hyperparameters"] == []


def test_the_package_needs_torch_only():
    code = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"trl", "transformers", "datasets", "accelerate", "peft", "pydantic", "yaml",
                                      "pyarrow", "typer", "rich", "matplotlib", "jinja2", "gguf"}:
            raise ImportError(f"{name} is not to be imported")
sys.meta_path.insert(0, Block())
import explorl.strategies
print(len(explorl.strategies.describe()))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == f"{len(NAMES)}\n", done.stderr


# --- building -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "spec",
    [
        "egsw",
        {"egsw": None},
        {"egsw": {}},
        {"egsw": {"alpha": 0.3}},
        {"name": "egsw"},
        {"name": "egsw", "alpha": 0.3, "level": "token"},
        xs.EntropyGuidedWeighting(),
    ],
)
def test_an_entry_of_a_config(spec):
    assert xs.build(spec) == xs.EntropyGuidedWeighting(alpha=0.3)


def test_schedules_and_pairs_of_a_config():
    built = xs.build({"egsw": {"alpha": {"from": 0.1, "to": 0.0, "start": 200, "steps": 100, "shape": "cosine"}}})
    assert built.alpha == Schedule(0.1, 0.0, 200, 100, "cosine")
    assert xs.build({"passk_training": {"k": {"from": 4, "to": 1}}}).k == Schedule(4, 1)
    assert xs.build({"position_shaping": {"cap": {"from": 1, "to": 0.5}}}).cap == Schedule(1, 0.5)
    assert xs.build({"ppl_shaping": {"clamp": [0.8, 1.2]}}).clamp == (0.8, 1.2)
    assert xs.build({"curriculum": {"solve_rates": {"from": 1.0, "to": 0.5}}}).rates == {"from": 1.0, "to": 0.5}


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        ({"from": 0.1, "too": 0.0}, "egsw: alpha: a schedule has no 'too'; did you mean 'to'?"),
        ({"begin": 0.1, "to": 0.0}, "egsw: alpha: a schedule has no 'begin'; known: from, shape, start"),
        ({"from": 0.1}, "egsw: alpha: the schedule has no 'to'; write {from: 0.1"),
        ({"to": 0.1, "steps": 3}, "egsw: alpha: the schedule has no 'from'"),
        ({}, "egsw: alpha: the schedule has no 'from'"),
        ({"from": "a", "to": 0.0}, "egsw: alpha: from of the schedule is 'a'; write {from: 0.1"),
        ({"from": True, "to": 0.0}, "egsw: alpha: from of the schedule is True"),
        ({"from": 0.1, "to": 0.0, "steps": 1.5}, "egsw: alpha: steps of the schedule is 1.5"),
        ({"from": 0.1, "to": 0.0, "steps": 0}, "egsw: alpha: a schedule must end after it starts"),
        ({"from": 0.1, "to": 0.0, "start": 200, "steps": -100}, "a schedule must end after it starts"),
        ({"from": 0.1, "to": 0.0, "shape": "sine"}, "egsw: alpha: unknown shape of a schedule: 'sine'"),
        ({"from": 0.1, "to": 0.0, "shape": 1}, "egsw: alpha: shape of the schedule is 1"),
        ({"from": 0.1, "to": math.nan}, "egsw: alpha: a schedule's values must be finite"),
        ({"from": 0.1, "to": -1.0}, "egsw: alpha.to is -1.0; it must be a finite number at least 0, for example 0.3"),
    ],
)
def test_a_bad_schedule_in_a_config(schedule, message):
    assert message in error(xs.build, {"egsw": {"alpha": schedule}})


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("bottomp", "unknown strategy 'bottomp'; did you mean 'bottom_p'?"),
        ("clip-cov", "did you mean 'clip_cov'?"),
        ("EGSW", "did you mean 'egsw'?"),
        ("curiculum", "did you mean 'curriculum'?"),
        ("xyzzy", "unknown strategy 'xyzzy'; known: annealed_temperature, bottom_p"),
        ({"egsw": {"alhpa": 0.3}}, "egsw has no hyperparameter 'alhpa'; did you mean 'alpha'?"),
        ({"clip_higher": {"zzz": 0.3}}, "clip_higher has no hyperparameter 'zzz'; known: high, low"),
        ({"mask_truncated": {"limit": 3}}, "mask_truncated has no hyperparameter 'limit'; it has none"),
        (
            {"bottom_p": {"importance": "truncated"}},
            "bottom_p has no hyperparameter 'importance'; add the strategy importance_correction",
        ),
        ({"bottom_p": {"cap": 2.0}}, "'cap'; it is now the cap of the strategy importance_correction"),
        ({"egsw": {"memory": {}}}, "egsw has no hyperparameter 'memory'"),
        ({"egsw": None, "alpha": 0.3}, "indent the hyperparameters below the name"),
        ({"egsw": 0.3}, "a strategy must be a name such as egsw"),
        (["egsw"], "a strategy must be a name"),
        (None, "a strategy must be a name"),
        ({}, "a strategy must be a name"),
        ({"name": 3}, "the name of a strategy is 3; give text"),
        ("passk_training", "passk_training needs k, for example {passk_training: {k: 4}}"),
        ("pkpo", "pkpo needs k, for example {pkpo: {k: 4}}"),
        ("curriculum", "curriculum needs solve_rates, for example {curriculum: {solve_rates: rates.json}}"),
        ("element_wise_temperature", "element_wise_temperature: solve_rates is missing"),
        (
            "reference_reset",
            "reference_reset: (every, on_stall) is (None, None); it must be None in exactly one of the two",
        ),
    ],
)
def test_a_bad_entry_of_a_config(spec, message):
    assert message in error(xs.build, spec)


BAD_VALUES = [
    ("bottom_p", "p", [0, 1.1, "0.9", True, math.nan, None]),
    ("bottom_p", "frequency", [-0.1, 2, "often"]),
    ("bottom_p", "per", ["tokens", 1, True]),
    ("importance_correction", "cap", [0, -1, math.inf, "2", True, Schedule(2, 0)]),
    ("element_wise_temperature", "easy", [0, "low"]),
    ("element_wise_temperature", "hard", [-1]),
    ("element_wise_temperature", "source", ["file"]),
    ("element_wise_temperature", "decay", [1, -0.1, True]),
    ("element_wise_temperature", "training_temperature", ["rows", 1.0, True]),
    ("annealed_temperature", "highest", [0, -1, 101, "1.2", math.nan]),
    ("annealed_temperature", "lowest", [0, 1.2, 2.0, "0.1"]),
    ("annealed_temperature", "decay", [0, -1, 2e6, "400", math.inf, Schedule(400, 0)]),
    ("annealed_temperature", "warmup", [-1, 1.5, True]),
    ("annealed_temperature", "training_temperature", ["row", 1.0]),
    ("entropy_branching", "initial", [0, 1.5, True, "half"]),
    ("entropy_branching", "beam", [1, 2.5, None]),
    ("entropy_branching", "base", [-0.1, 1.5, math.nan, "0.5", Schedule(0.5, 2)]),
    ("entropy_branching", "weight", [-0.2, math.inf, True]),
    ("entropy_branching", "window", [0, 2.5, "20"]),
    ("entropy_branching", "at", ["newline", 5, (), None]),
    ("entropy_branching", "shared", ["twice", 1, True]),
    ("tool_progression", "share", [-0.1, 1.5, "half", Schedule(0.5, 2)]),
    ("tool_progression", "calls", [0, math.inf, "3", True]),
    ("tool_progression", "seed", [-1, 0.5, None]),
    ("pass_threshold", "threshold", ["0.3", math.nan, False]),
    ("pass_threshold", "level", ["prompt"]),
    ("pass_threshold", "of", ["accuracy", True]),
    ("overlong_penalty", "cache", [0, -1, 1.5, "4096", True]),
    ("overlong_penalty", "longest", [0, 2.5, False]),
    ("overlong_penalty", "factor", [-1, "1", math.inf]),
    ("curriculum", "mode", ["hard_first"]),
    ("curriculum", "above", [1, -0.1, Schedule(0, 0.5)]),
    ("egsw", "alpha", ["0.3", -1, True, math.nan]),
    ("egsw", "temperature", [0, -1]),
    ("egsw", "level", ["batch"]),
    ("egsw", "entropy", ["norm"]),
    ("egsw", "scale", ["mean"]),
    ("ppl_shaping", "alpha", ["a", -0.01]),
    ("ppl_shaping", "direction", [0, True, 2, "1"]),
    ("ppl_shaping", "clamp", [0.8, (0.8,), (1.2, 0.8), (0.8, "1.2"), (0.8, math.inf), (0.8, 1.0, 1.2), (False, True)]),
    ("position_shaping", "gamma", [-1]),
    ("position_shaping", "direction", [0]),
    ("position_shaping", "slope", [-1]),
    ("position_shaping", "shift", ["half"]),
    ("position_shaping", "cap", [0, -1]),
    ("position_shaping", "start", [-1, 1.5, "200", True, Schedule(1, 2)]),
    ("position_shaping", "steps", [0, -100]),
    ("entropy_advantage", "alpha", [-1]),
    ("entropy_advantage", "kappa", [0, 0.5]),
    ("negative_reinforcement", "positive_weight", [-1, "0"]),
    ("negative_reinforcement", "negative_weight", [-1]),
    ("passk_training", "k", [0, -1, 2.5, "4", True, math.nan, Schedule(0, 4), Schedule(4, 1.5)]),
    ("outcome_exploration", "coef", [-0.1, "0.1", math.nan]),
    ("outcome_exploration", "kind", ["ucb", True]),
    ("outcome_exploration", "baseline", ["median", None]),
    ("outcome_exploration", "constant", [-0.1, 1.5, "0.5"]),
    ("pkpo", "k", [0, -1, 2.5, "4", True, math.nan, Schedule(0, 4), Schedule(4, 1.5)]),
    ("pkpo", "of", ["accuracy", True]),
    ("maxrl", "of", ["accuracy", None]),
    ("risk_sensitive", "beta", [-1, "2", math.inf, math.nan, True, Schedule(2, -1)]),
    ("risk_sensitive", "of", ["rewards"]),
    ("quantile_baseline", "quantile", [0, 1, -0.4, "0.4", Schedule(0.4, 1)]),
    ("quantile_baseline", "of", ["total"]),
    ("unlikeliness", "beta", [-0.25, 1.5, "0.25", None]),
    ("unlikeliness", "level", ["answer", True]),
    ("ucpo", "tau", [-0.1, 1.1, "0.2", math.nan, Schedule(0.2, 2)]),
    ("clip_higher", "low", [0, 1.5, "0.2"]),
    ("clip_higher", "high", [0, -0.28]),
    ("forking_tokens", "fraction", [0, 2, "0.2", Schedule(0.5, 0)]),
    ("forking_tokens", "normalize", ["kept_tokens"]),
    ("clip_cov", "fraction", [0, 2, "2e-4"]),
    ("clip_cov", "low", [5.0, 6, "1", Schedule(1, 7)]),
    ("clip_cov", "high", [math.inf]),
    ("clip_cov", "seed", [-1, 0.5, None]),
    ("kl_cov", "fraction", [0, 2]),
    ("kl_cov", "coef", [-1]),
    ("lp_reg", "coef", [-1, "1"]),
    ("lp_reg", "fraction", [0, 1.5, "0.01", Schedule(0.1, 0)]),
    ("lp_reg", "min_p", [0, 1.5, "0.02", Schedule(0.02, 0.1)]),
    ("entropy_bonus", "coef", [-0.1, Schedule(0.1, 0.0)]),
    ("entropy_bonus", "target", [0, "0.2"]),
    ("entropy_bonus", "delta", [0]),
    ("entropy_bonus", "minimum", [-1, 1.0]),
    ("entropy_bonus", "maximum", [0]),
    ("reference_reset", "every", [0, -1, 1.5, "200", True]),
]


@pytest.mark.parametrize(
    ("name", "field", "value"), [(name, field, value) for name, field, values in BAD_VALUES for value in values]
)
def test_a_bad_hyperparameter_is_named_with_a_good_value(name, field, value):
    message = error(xs.REGISTRY[name], **{**REQUIRED.get(name, {}), field: value})
    assert message.startswith(f"{name}: {field}")
    if not isinstance(value, Schedule):
        assert repr(value) in message
    assert "; it must be " in message
    assert ", for example " in message


def test_every_hyperparameter_is_checked():
    checked = {(name, field) for name, field, _ in BAD_VALUES}
    elsewhere = {("element_wise_temperature", "solve_rates"), ("curriculum", "solve_rates")}
    elsewhere.add(("reference_reset", "on_stall"))
    hyperparameters = {(entry["name"], h["name"]) for entry in xs.describe() for h in entry["hyperparameters"]}
    assert hyperparameters == checked | elsewhere


def test_a_text_that_looks_like_a_number():
    # YAML reads 2e-4, without a point, as text
    message = error(xs.build, {"clip_cov": {"fraction": "2e-4"}})
    assert message == (
        "clip_cov: fraction is '2e-4' (text; as a number write 0.0002); "
        "it must be a finite number above 0 and at most 1, for example 0.0002"
    )
    assert "alpha is 'much' (text); it must be a finite number at least 0" in error(xs.PerplexityShaping, "much")


def test_reference_reset_takes_one_of_two():
    assert "it must be None in exactly one of the two" in error(xs.ReferenceReset, every=3, on_stall=3)
    assert "on_stall is 0; it must be a whole number, 1 or more, for example 50" in error(xs.ReferenceReset, on_stall=0)


def test_whole_numbers_of_a_schedule():
    assert xs.PassKTraining(Schedule(4.0, 1.0)).k(0) == 4


# --- composing ----------------------------------------------------------------------------------------------------


def test_a_list_keeps_its_order():
    built = xs.build_all(["clip_higher", {"bottom_p": {"p": 0.5}}, xs.EntropyAdvantage()])
    assert built == [xs.ClipHigher(), xs.BottomP(0.5), xs.EntropyAdvantage()]
    assert xs.build_all(None) == xs.build_all([]) == []


@dataclass(frozen=True)
class Learning(xs.Strategy):
    """Has state of its own beside its memory."""

    factor: float = 2.0
    label: str = field(default="x", kw_only=True)
    seen: list[str] = field(default_factory=list, init=False)
    double: float = field(init=False)

    def __post_init__(self):
        object.__setattr__(self, "double", 2 * self.factor)


@dataclass(frozen=True)
class Derived(xs.Strategy):
    """Is built from what it does not keep."""

    half: InitVar[float]
    factor: float = field(default=0.0, init=False)

    def __post_init__(self, half):
        object.__setattr__(self, "factor", 2 * half)


class Handmade(xs.Strategy):
    """Has an __init__ of its own, whose default is not what it was built with."""

    def __init__(self, factor=1.0):
        super().__init__()
        object.__setattr__(self, "factor", factor)


@pytest.mark.parametrize("build", [xs.build, lambda strategy: xs.build_all([strategy])[0]])
@pytest.mark.parametrize("name", NAMES)
def test_a_strategy_is_taken_over_without_its_memory(build, name):
    strategy = xs.build({name: REQUIRED.get(name)})
    strategy.memory["rates"] = {"a": 1.0}
    built = build(strategy)
    assert built is not strategy
    assert type(built) is type(strategy)
    assert built == strategy
    assert built.memory == {}
    built.memory["rates"] = {}
    assert strategy.memory == {"rates": {"a": 1.0}}


def test_a_learning_strategy_is_taken_over_as_new():
    strategy = Learning(3.0, label="y")
    strategy.memory["a"] = 1
    strategy.seen.append("a prompt")
    built = xs.build(strategy)
    assert (built.factor, built.label, built.double, built.seen, built.memory) == (3.0, "y", 6.0, [], {})


@pytest.mark.parametrize("strategy", [Derived(1.5), Handmade(3.0)], ids=lambda strategy: type(strategy).__name__)
def test_a_strategy_that_its_fields_do_not_build_is_taken_over_too(strategy):
    strategy.memory["a"] = 1
    (built,) = xs.build_all([strategy])
    assert built is not strategy
    assert type(built) is type(strategy)
    assert built.factor == 3.0
    assert built.memory == {}
    assert strategy.memory == {"a": 1}


def test_a_strategy_outlives_its_file(tmp_path):
    path = tmp_path / "rates.json"
    path.write_text('{"a": 1.0, "b": 0.5}')
    course = xs.Curriculum(path, mode="easy_first")
    course.order(["a"])
    path.unlink()
    built = xs.build(course)
    assert built is not course
    assert built.memory == {}
    assert built.order(["b", "a"]) == [1, 0]


def test_all_that_do_not_exclude_each_other_build_together():
    replacing = [name for name in NAMES if xs.REGISTRY[name].replaces_advantage]
    assert "maxrl" in replacing
    for chosen in replacing:
        specs = [{name: REQUIRED.get(name)} for name in NAMES if name not in replacing or name == chosen]
        assert len(xs.build_all(specs)) == len(NAMES) - len(replacing) + 1


def test_two_replacements_of_the_advantage_are_an_error():
    specs = ["negative_reinforcement", "egsw", {"passk_training": {"k": 2}}]
    assert error(xs.build_all, specs) == (
        "negative_reinforcement and passk_training each replace the base advantage; keep one of them"
    )


def test_the_same_strategy_twice_is_an_error():
    assert error(xs.build_all, ["egsw", {"egsw": {"alpha": 1}}]) == "egsw is listed 2 times; list it once"


@pytest.mark.parametrize("specs", ["egsw", {"egsw": {}}, xs.ClipHigher()])
def test_strategies_must_be_a_list(specs):
    assert "strategies must be a list" in error(xs.build_all, specs)


def test_what_is_inert_on_a_batch_used_once():
    strategies = xs.build_all(["clip_cov", "kl_cov", "egsw"])
    assert xs.warn_inert(strategies, reused=True) == []
    messages = xs.warn_inert(strategies, reused=False)
    assert [message.split()[0] for message in messages] == ["clip_cov", "kl_cov"]
    for message in messages:
        assert "num_iterations to 2 or more (in a configuration training.iterations)" in message
        assert "steps_per_generation above gradient_accumulation_steps" in message
    assert "kl_cov does nothing on a batch that is used for one update only" in messages[1]
    assert "clip_cov only excludes its tokens from a single step" in messages[0]


def test_what_is_overwritten_by_a_later_one():
    strategies = xs.build_all(["ppl_shaping", "negative_reinforcement", "entropy_advantage", "clip_higher", "kl_cov"])
    assert xs.warn_inert(strategies, reused=True) == [
        "ppl_shaping has no effect on the advantages: negative_reinforcement, listed after it, replaces them; "
        "list negative_reinforcement first",
        "the clip of clip_higher has no effect: kl_cov, listed after it, sets another; keep one of them",
    ]


@pytest.mark.parametrize("order", [1, -1])
def test_new_rewards_that_nobody_reads(order):
    def said(*specs):
        return xs.warn_inert(xs.build_all(specs[::order]), reused=True)

    assert said("unlikeliness", "maxrl") == [
        "the rewards of unlikeliness have no effect on the advantages: maxrl uses only correctness; keep one of them, "
        "or set of='reward' in maxrl"
    ]
    assert said("unlikeliness", {"passk_training": {"k": 2}}) == [
        "the rewards of unlikeliness have no effect on the advantages: passk_training uses only correctness; keep one "
        "of them"
    ]
    assert said("unlikeliness", {"maxrl": {"of": "reward"}}) == []
    assert said("unlikeliness", "risk_sensitive") == []
    assert said("unlikeliness", "egsw") == []


# --- strategies of other packages ---------------------------------------------------------------------------------

MODULE = '''"""A module with a strategy of its own."""
from __future__ import annotations
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from explorl.strategies import Scheduled, Strategy
from explorl.strategies._lib.validate import check_number

if TYPE_CHECKING:
    from nowhere import Unknown

@dataclass(frozen=True)
class Louder(Strategy):
    """Doubles the advantages."""
    name = "louder"
    factor: Scheduled = 2.0
    tags: tuple[str, ...] = field(default_factory=tuple)

    def __post_init__(self):
        check_number(self, "factor", above=0)

@dataclass(frozen=True)
class Opaque(Strategy):
    """Has an annotation that cannot be resolved."""
    factor: Scheduled
    other: Unknown = None

not_a_strategy = 3
'''


@pytest.fixture
def other_package(tmp_path, monkeypatch):
    (tmp_path / "other_package.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("other_package", None)


@pytest.mark.usefixtures("other_package")
def test_a_strategy_by_its_import_path():
    louder = xs.build({"other_package:Louder": {"factor": {"from": 3, "to": 1, "steps": 10}}})
    assert louder.factor == Schedule(3, 1, steps=10)
    assert xs.build("other_package:Louder").factor == 2.0
    assert xs.build({"name": "other_package:Louder", "factor": 4}).factor == 4
    assert "louder: factor is -1" in error(xs.build, {"other_package:Louder": {"factor": -1}})
    assert "louder has no hyperparameter 'factr'; did you mean 'factor'?" in error(
        xs.build, {"other_package:Louder": {"factr": 1}}
    )


@pytest.mark.usefixtures("other_package")
def test_a_strategy_whose_annotations_cannot_be_resolved():
    opaque = xs.build({"other_package:Opaque": {"factor": {"from": 3, "to": 1}, "other": {"a": 1}}})
    assert opaque.factor == Schedule(3, 1)
    assert opaque.other == {"a": 1}
    assert error(xs.build, "other_package:Opaque") == "Opaque needs factor"


@pytest.mark.usefixtures("other_package")
@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("missing_package:Louder", "strategy 'missing_package:Louder': there is no module 'missing_package'"),
        ("other_package:Quieter", "other_package has no 'Quieter' to use; it has Louder, Opaque"),
        ("other_package:not_a_strategy", "is 3; name a subclass of explorl.strategies.Strategy"),
        ("other_package:Strategy", "name a subclass of explorl.strategies.Strategy"),
        (":Louder", "unknown strategy ':Louder'"),
    ],
)
def test_a_bad_import_path(path, message):
    with pytest.raises(ValueError, match=message):
        xs.build(path)


@pytest.mark.usefixtures("other_package")
def test_a_strategy_by_its_entry_point(monkeypatch):
    points = [
        EntryPoint("loud", "other_package:Louder", "explorl.strategies"),
        EntryPoint("gone", "missing_package:Gone", "explorl.strategies"),
        EntryPoint("egsw", "other_package:Louder", "explorl.strategies"),
    ]
    monkeypatch.setattr(plugins, "entry_points", lambda group: points if group == "explorl.strategies" else [])
    assert type(xs.build("loud")).__name__ == "Louder"
    assert type(xs.build("egsw")) is xs.EntropyGuidedWeighting
    assert "did you mean 'loud'?" in error(xs.build, "louds")
    with pytest.warns(UserWarning, match="strategy 'gone' \\(missing_package:Gone\\): there is no module"):
        described = xs.describe()
    assert [entry["name"] for entry in described] == [*NAMES, "loud"]
    loud = described[-1]
    assert loud["effect"] == "A module with a strategy of its own."
    assert loud["hyperparameters"][1] == {
        "name": "tags",
        "type": "tuple[str, ...]",
        "required": False,
        "default": (),
    }
