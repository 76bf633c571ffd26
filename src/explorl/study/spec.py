"""Study files: a base configuration, arms that change it, seeds, and how they are evaluated.

    name: egsw
    base: {preset: tiny, rollout: {temperature: 1.0}}
    arms:
      GRPO: {}
      EGSW: {strategies: [egsw], set: {training.learning_rate: 1e-4}}
    baseline: GRPO
    seeds: 3
    evaluation: {every: 20, problems: 256, samples: 8}
    budget: {steps: 60}
    profiles:
      gpu: {base: {model: {name: smollm2-135m}}, budget: {tokens: 2e7}}

A profile changes any of the other keys; mappings are merged key by key, and `without` removes arms. Everything is
checked when the file is read: the whole configuration of each arm is built, with its strategies. The papers' studies
are bundled in `explorl/studies` and found by name.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, field_validator, model_validator

from explorl.core.config import (
    Config,
    ConfigError,
    Count,
    Section,
    adapt_preset,
    apply_overrides,
    load_config,
    presets,
    read_yaml,
    rft_config,
)
from explorl.core.merge import deep_merge, flatten
from explorl.core.plugins import nearest, suggest
from explorl.core.store import StoreError, cleaned, file_name, read_study
from explorl.core.terminal import counted

START = "start"
"""Value of a strategy's `solve_rates`: the rates of the common starting policy, measured once by the study."""
ANY_RATES = {"any prompt": 0.5}
"""Placeholder until they are measured."""
WITHOUT_WARM_START = "to start all arms from {model} as it is, add --set warm_start=null"
RESERVED = {
    "seed": "use the study's `seeds`",
    "strategies": "list them under the arm's `strategies`",
    "evaluation": "all arms share the study's `evaluation`",
    "training.steps": "all arms share the `budget`",
    "rft.iterations": "all arms share the `budget`",
}
"""Keys that an arm cannot set, and why."""


_BUNDLED = Path(__file__).parents[1] / "studies"

LONGEST_NAME = 100
"""Maximum length of an arm's name, which is shown in tables and legends."""
MOST_SEEDS, LARGEST_SEED = 10_000, 2**32 - 1
"""Limits of a study; NumPy accepts no larger seed."""


class ArmSettings(Section):
    """Changes of an arm to the base."""

    set: dict[str, Any] = Field(default_factory=dict)
    """Dotted keys of the configuration, as in `--set`."""
    strategies: list[str | dict[str, Any]] | None = None
    """Strategies that replace the base's; null keeps those."""
    kind: Literal["grpo", "rft"] | None = None
    """How the arm is trained: GRPO or rejection-sampling fine-tuning; null is the study's `kind`."""


class EvaluationPlan(Section):
    """How every arm is evaluated: before the first step, every `every` steps, and after the last."""

    every: Count | None = None
    """Training steps between evaluations; null evaluates only at the start and the end."""
    problems: Count | None = None
    """Number of held-out problems; null takes the base's `evaluation.problems`."""
    samples: Count | None = None
    """Completions per problem; null takes the base's `evaluation.samples`."""
    protocol: str | None = None
    """How completions are sampled; null takes the base's `evaluation.protocol`."""


class Budget(Section):
    """The budget of each run: one of steps, tokens and minutes; arms of kind rft have iterations. A run ends with the
    step that exhausts it."""

    steps: Count | None = None
    """Training steps; replaces the base's `training.steps`."""
    tokens: Annotated[float, Field(gt=0)] | None = None
    """Prompt and completion tokens; `training.steps` remains an upper limit."""
    minutes: Annotated[float, Field(gt=0)] | None = None
    """Minutes of training, without evaluations; `training.steps` remains an upper limit."""
    iterations: Count | None = None
    """Iterations of arms of kind rft; replaces the base's `rft.iterations`."""

    @model_validator(mode="after")
    def _one(self) -> Budget:
        units = [name for name in ("steps", "tokens", "minutes") if getattr(self, name) is not None]
        if len(units) > 1 or not (units or self.iterations):
            raise ValueError(f"a budget is one of steps, tokens and minutes, like {{steps: 60}}; got {units or 'none'}")
        return self


class Sequential(Section):
    """A study with an interim look: every arm runs the first seeds; promising arms and the baseline run the others.

    The chance of any false finding stays below 5 % over both looks, all arms and all measures; docs/studies.md has the
    rule. Arms, seeds and these settings are fixed before the study begins."""

    first: Annotated[int, Field(ge=2)]
    """Seeds of every arm at the interim look; `seeds` is the number at the end."""
    keep: Count
    """Maximum number of arms that continue after the interim look: the most promising, in either direction."""
    measures: Annotated[list[str], Field(min_length=1)] = Field(default_factory=lambda: ["pass@1"])
    """Measures to compare: `pass@k` with any k of 1, 2, 4, … samples, `entropy`, `branching`, `area`. The correction is
    over all of them; an arm stops early for efficacy by the first."""

    @field_validator("measures")
    @classmethod
    def _once(cls, measures: list[str]) -> list[str]:
        if len(set(measures)) < len(measures):
            raise ValueError(f"{measures} has a duplicate measure; name each once")
        return measures


class StudyFile(Section):
    """The keys of a study file, except `profiles`."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._-]*$")]
    """Name of the study's folder: lower-case letters, digits, dots, hyphens and underscores."""
    title: str = ""
    """Heading of the report; empty is the name."""
    description: str = ""
    """A few sentences under that heading."""
    kind: Literal["grpo", "rft"] = "grpo"
    """How arms are trained by default: GRPO or rejection-sampling fine-tuning."""
    base: dict[str, Any] = Field(default_factory=dict)
    """Configuration shared by all arms: a `preset` and any configuration keys."""
    warm_start: dict[str, Any] | None = None
    """Configuration keys of an SFT run that is made once; all arms start from its policy. It needs a task with
    reference solutions; `--set warm_start=null` removes it."""
    arms: dict[str, ArmSettings | None]
    """The arms by name, with their changes. `{}` changes nothing."""
    baseline: str
    """The arm that all others are compared with."""
    seeds: Count | list[Annotated[int, Field(ge=0)]] = 3
    """A count, for the seeds 0, 1, …, or a list of seeds. Each arm runs once with each seed."""
    sequential: Sequential | None = None
    """Stop arms without an effect after the first seeds, like `{first: 3, keep: 4}`; null runs all seeds."""
    evaluation: EvaluationPlan = EvaluationPlan()
    """When and how every arm is evaluated."""
    budget: Budget | None = None
    """The budget of each run; null is the base's `training.steps`."""
    target: Annotated[float, Field(gt=0, le=1)] | None = None
    """Held-out accuracy for the column "steps to target"."""
    seed_deviation: Annotated[float, Field(gt=0)] = 0.02
    """Assumed standard deviation between seeds of an arm's difference from the baseline, until runs measure it."""
    solve_rate_samples: Count = 4
    """Samples per training problem if an arm has `solve_rates: start`."""
    without: list[str] = Field(default_factory=list)
    """Arms to leave out, for profiles that do not need all of them."""

    @field_validator("title", "description", "baseline", "without", "arms")
    @classmethod
    def _clean(cls, value: Any) -> Any:
        """Clean names and texts for tables, figures, files and terminals."""
        clean_value = cleaned(value)
        if isinstance(value, dict) and len(clean_value) < len(value):
            raise ValueError(f"two of {list(value)} are displayed alike: {list(clean_value)}; rename one")
        return clean_value

    @field_validator("seeds")
    @classmethod
    def _seeds_once(cls, seeds: int | list[int]) -> int | list[int]:
        return seeds if isinstance(seeds, int) else list(checked_seeds(seeds))


@dataclass(frozen=True)
class Arm:
    """One arm, resolved."""

    name: str
    slug: str
    """Its folder's name."""
    changes: dict[str, Any]
    """Flat differences to the base configuration, without strategies."""
    config: dict[str, Any]
    """The whole configuration, except the seed."""
    kind: str = "grpo"
    """Training method: "grpo" or "rft"."""


@dataclass(frozen=True)
class Study:
    """A study with its profile applied and every configuration built."""

    name: str
    title: str
    description: str
    profile: str | None
    base: dict[str, Any]
    warm_start: dict[str, Any] | None
    arms: tuple[Arm, ...]
    baseline: str
    seeds: tuple[int, ...]
    budget: dict[str, float]
    target: float | None
    seed_deviation: float
    solve_rate_samples: int
    sequential: dict[str, Any] | None = None
    """`first`, `keep` and `measures` of a study with an interim look."""

    @property
    def needs_solve_rates(self) -> bool:
        """True if an arm needs the solve rates of the starting policy."""
        strategies = [arm.config["strategies"] for arm in self.arms]
        return _with_rates(strategies, ANY_RATES) != strategies

    def arm(self, name: str) -> Arm:
        """Find an arm by its name or its folder's name."""
        for arm in self.arms:
            if cleaned(name) in (arm.name, arm.slug):
                return arm
        raise ConfigError(f"the study {self.name} has no arm {name!r}; {suggest(name, [a.name for a in self.arms])}")

    def starting_config(self, folder: Path) -> Config:
        """Return the base configuration with the policy that all arms start from."""
        return load_config(values=self._with_start(self.base, folder))

    def arm_config(self, arm: Arm, seed: int, folder: Path) -> Config:
        """Return the configuration of a run in a study's folder."""
        values = self._with_start(arm.config, folder)
        rates = str((folder / "solve-rates.json").resolve())
        return load_config(values={**values, "seed": seed, "strategies": _with_rates(values["strategies"], rates)})

    def _with_start(self, values: Mapping[str, Any], folder: Path) -> dict[str, Any]:
        if self.warm_start is None:
            return dict(values)
        return deep_merge(values, {"model": {"name": str((folder / "warm-start" / "model").resolve())}})

    def record(self) -> dict[str, Any]:
        """Return the study as plain values, for study.json."""
        return {
            **{key: getattr(self, key) for key in self.__dataclass_fields__ if key not in ("arms", "seeds")},
            "arms": [dict(vars(arm)) for arm in self.arms],
            "seeds": list(self.seeds),
        }

    @classmethod
    def read(cls, folder: Path) -> Study:
        """Read the study of a folder."""
        values = read_study(folder)
        values.setdefault("sequential", None)  # older than the key
        try:
            arms = tuple(Arm(**arm) for arm in values["arms"])
            fields = {key: values[key] for key in cls.__dataclass_fields__ if key not in ("arms", "seeds")}
        except (KeyError, TypeError) as error:
            raise StoreError(f"{folder / 'study.json'} is incomplete: {error}; restore it") from None
        return cls(**fields, arms=arms, seeds=tuple(values["seeds"]))


def study_names() -> list[str]:
    """Return the names of the bundled studies."""
    return sorted(path.name.removesuffix(".yaml") for path in _BUNDLED.iterdir() if path.suffix == ".yaml")


def find_study(study: str | Path) -> Path:
    """Return the file of a study, given by name or by path; ./deng is a path while deng is a name."""
    names, path = study_names(), Path(study)
    if study in names:
        return _BUNDLED / f"{study}.yaml"
    if os.path.isdir(study):
        raise ConfigError(f"{study} is a folder; give a study file, or a name: {', '.join(names)}")
    if os.path.exists(study):
        return path
    if path.stem in names:
        advice = f"`explorl study {path.stem}` runs the bundled study"
    elif path.suffix in (".yaml", ".yml") or path.name != str(study):
        advice = "check the path"
    else:
        near = nearest(study, names)
        raise ConfigError(
            f"unknown study {str(study)!r}{f'; did you mean {near!r}?' if near else ''}\n"
            f"give a name ({', '.join(names)}) or a path to a study file, such as my-study.yaml"
        )
    raise ConfigError(f"cannot read the study file {study}: there is no such file; {advice}")


def load_study(
    path: str | Path,
    *,
    profile: str | None = None,
    seeds: int | Sequence[int] | None = None,
    overrides: Sequence[str] = (),
    construct: bool = True,
) -> Study:
    """Read and check a study, given as a file or by name.

    `seeds` replace the file's: a count, or a list of seeds. `overrides` ("task.data_dir=problems") change the base and
    thus all arms that do not set the key themselves; "warm_start=null" and "warm_start.sft.epochs=1" change the warm
    start. ``construct=False``, for showing a study, resolves tasks and plug-in strategies without constructing them.
    """
    raw = _read(find_study(path))
    profiles = raw.pop("profiles", None) or {}
    if not isinstance(profiles, dict):
        raise ConfigError(f"profiles in {path} must map names to changes, like `tiny: {{seeds: 3}}`")
    if profile is not None and not profiles:
        raise ConfigError(f"{path} has no profiles, but --profile is {profile!r}; remove it")
    if profile is not None and profile not in profiles:
        raise ConfigError(f"{path} has no profile {profile!r}; {suggest(profile, list(profiles))}")
    if profile is None and profiles:
        raise ConfigError(f"{path} has profiles; choose one with --profile: {' or '.join(map(str, profiles))}")
    place = f"{path}, profile {profile}" if profile else str(path)
    # a budget has one of several keys, so a profile replaces it whole
    values = deep_merge(raw, profiles[profile] or {}, replace=("budget",)) if profile else raw
    study_overrides = [text for text in overrides if re.match(r"warm_start\b", text)]
    base_overrides = [text for text in overrides if text not in study_overrides]
    if study_overrides:
        values = apply_overrides(values, study_overrides)
    if base_overrides and isinstance(values.get("base", {}), dict):
        values = {**values, "base": apply_overrides(values.get("base", {}), base_overrides)}
    if overrides:
        place = f"{place} and --set"
    file = _validated(values, place)
    _refuse_inert(flatten(apply_overrides({}, base_overrides)), file)
    return _resolved(file, profile, seeds, place, construct)


def _refuse_inert(overrides: Mapping[str, Any], file: StudyFile) -> None:
    """Raise `ConfigError` for overrides that the study's own keys would replace."""
    study_keys = {f"evaluation.{name}": f"evaluation.{name}" for name in file.evaluation.model_dump(exclude_none=True)}
    if file.budget is not None:
        units = {"steps": "training.steps", "iterations": "rft.iterations"}
        study_keys |= {key: f"budget.{name}" for name, key in units.items() if getattr(file.budget, name) is not None}
    for key, study_key in study_keys.items():
        if key in overrides:
            raise ConfigError(
                f"--set {key}={overrides[key]} would have no effect: the study sets {study_key}; change it in the file"
            )


def seeds_in(text: str) -> int | list[int]:
    """Parse ``--seeds``: a count (3), or a list of seeds (3-5 or 3,7)."""
    if long := max((len(digits) for digits in re.findall("[0-9]+", text) if len(digits) > 100), default=0):
        raise ConfigError(f"--seeds has a number of {long} digits; give a count, such as 3, or seeds, such as 3-5")
    if re.fullmatch(r"\s*[0-9]+\s*", text):
        _refuse_many(int(text))
        return int(text)
    spans: list[range] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*([0-9]+)\s*(?:-\s*([0-9]+)\s*)?", part)
        if not match:
            raise ConfigError(f"--seeds is {text!r}; give a count, such as 3, or seeds, such as 3-5 or 3,7")
        first, last = int(match[1]), int(match[2] or match[1])
        if last > LARGEST_SEED:
            raise ConfigError(f"--seeds has the seed {last}; seeds go up to {LARGEST_SEED}")
        spans.append(range(first, last + 1))
    _refuse_many(sum(map(len, spans)))
    if not any(spans):
        raise ConfigError(f"--seeds is {text!r}, an empty range; give the lower seed first, such as 3-5")
    return [seed for span in spans for seed in span]


def _refuse_many(count: int) -> None:
    if count > MOST_SEEDS:
        raise ConfigError(f"--seeds has {count:,} seeds; use at most {MOST_SEEDS:,}")


def checked_seeds(seeds: int | Sequence[int]) -> tuple[int, ...]:
    """Return the seeds 0, 1, … of a count, or a list of seeds; raise `ValueError` for duplicates and limits."""
    if isinstance(seeds, int):
        if not 1 <= seeds <= MOST_SEEDS:
            raise ValueError(f"seeds is {seeds}; use 1 to {MOST_SEEDS:,}, such as 3")
        return tuple(range(seeds))
    if not seeds:
        raise ValueError("seeds is empty; give a count such as 3, or a list such as [0, 1, 2]")
    if len(seeds) > MOST_SEEDS:
        raise ValueError(f"there are {len(seeds):,} seeds; use at most {MOST_SEEDS:,}")
    for seed, count in Counter(seeds).items():
        if count > 1:
            raise ValueError(f"the seed {seed} is listed {count} times; list each once")
        if seed > LARGEST_SEED:
            raise ValueError(f"the seed {seed} is above {LARGEST_SEED}; use a smaller one, such as 0")
    return tuple(seeds)


def inert_settings(arm: Arm) -> list[str]:
    """Return warnings about strategies of an arm that will have no effect, and what to set."""
    from explorl.strategies import build_all, warn_inert

    strategies = build_all(_with_rates(arm.config["strategies"], ANY_RATES))
    return warn_inert(strategies, reused=arm.config["training"]["iterations"] > 1)


def slug(name: str) -> str:
    """Return the folder name of an arm: its letters a to z and digits, if it has any."""
    return file_name(re.sub(r"[^a-z0-9.]+", "-", name.lower()).strip("-.") or name)


# ---------------------------------------------------------------------------- reading
def _read(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the study file {path}: {error}") from error
    values = read_yaml(text, str(path))
    if not isinstance(values, dict):
        raise ConfigError(f"{path} must hold keys and values, like `name: my-study`")
    return values


def _validated(values: Mapping[str, Any], place: str) -> StudyFile:
    try:
        return StudyFile.model_validate(values)
    except ValidationError as error:
        raise ConfigError("\n".join(dict.fromkeys(_explain(item, place) for item in error.errors()))) from None


def _explain(error: Any, place: str) -> str:
    """Format one of pydantic's errors as a line: key, value, the problem, and the nearest known key."""
    location = [str(part) for part in error["loc"]]
    key = ".".join(location)
    if error["type"] == "extra_forbidden":
        sections: dict[str, type[Section]] = {
            "arms": ArmSettings, "evaluation": EvaluationPlan, "budget": Budget, "sequential": Sequential,
        }  # fmt: skip
        section = sections.get(location[0], StudyFile) if len(location) > 1 else StudyFile
        return f"unknown key {key} in {place}; {suggest(location[-1], [*section.model_fields])}"
    if error["type"] == "value_error":
        return f"{key}: {error['ctx']['error']} (in {place})"
    if error["type"] == "missing":
        return f"{place} lacks the key {key}"
    return f"{key} is {error['input']!r} in {place}: {error['msg'].lower()}"


# ---------------------------------------------------------------------------- resolving
def _resolved(
    file: StudyFile, profile: str | None, seeds: int | Sequence[int] | None, place: str, construct: bool
) -> Study:
    for name in file.without:
        if name not in file.arms:
            raise ConfigError(f"without: {place} has no arm {name!r}; {suggest(name, [*file.arms])}")
    arms = {name: arm or ArmSettings() for name, arm in file.arms.items() if name not in file.without}
    if file.baseline not in arms:
        raise ConfigError(
            f"baseline is {file.baseline!r}, which is not an arm of {place}; {suggest(file.baseline, arms)}"
        )
    try:
        seed_list = checked_seeds(file.seeds if seeds is None else seeds)
    except ValueError as error:
        raise ConfigError(f"{error} (in {'--seeds' if seeds is not None else place})") from None
    base_values = _base_values(file, place)
    base = _built(base_values, f"base of {place}", construct)
    if file.warm_start is not None:
        warm_config = _built(deep_merge(base_values, file.warm_start), f"warm_start of {place}", construct)
        _check_reference_solutions(warm_config, place)
        warm = warm_config.dump()
    resolved = tuple(_arm(name, arm, file, base, base_values, place, construct) for name, arm in arms.items())
    for name in arms:
        if len(name) > LONGEST_NAME:
            raise ConfigError(
                f"arm {name[:40] + '…'!r} of {place}: its name has {len(name)} characters; use at most {LONGEST_NAME}"
            )
    for arm in resolved:
        twins = [other.name for other in resolved if other.slug == arm.slug]
        if len(twins) > 1:
            raise ConfigError(f"the arms {twins} of {place} have the same folder name {arm.slug!r}; rename one")
    return Study(
        name=file.name,
        title=file.title or file.name,
        description=file.description.strip(),
        profile=profile,
        base=(rft_config(base) if file.kind == "rft" else base).dump(),
        warm_start=warm if file.warm_start is not None else None,
        arms=resolved,
        baseline=file.baseline,
        seeds=seed_list,
        budget=_budget(file, base, {arm.kind for arm in resolved}, place),
        target=file.target,
        seed_deviation=file.seed_deviation,
        solve_rate_samples=file.solve_rate_samples,
        sequential=_sequential(file, base, len(seed_list), place),
    )


def _sequential(file: StudyFile, base: Config, seeds: int, place: str) -> dict[str, Any] | None:
    """Return the settings of the interim look; raise `ConfigError` if they do not fit the seeds and measures."""
    from explorl.analysis.study_results import reported_ks
    from explorl.evaluation import protocol

    plan = file.sequential
    if plan is None:
        return None
    if plan.first >= seeds:
        raise ConfigError(
            f"sequential.first is {plan.first}, but {place} has {counted(seeds, 'seed')}; the interim look needs fewer "
            "than all, such as 3 of 8"
        )
    samples = base.evaluation.samples or protocol(base.evaluation.protocol).samples
    known = [*(f"pass@{k}" for k in reported_ks(samples)), "entropy", "branching", "area"]
    for name in plan.measures:
        if name not in known:
            choices = f"with {counted(samples, 'sample')} use {', '.join(known)}"
            raise ConfigError(f"sequential.measures has {name!r} in {place}; {choices}")
    return plan.model_dump()


def _budget(file: StudyFile, base: Config, kinds: set[str], place: str) -> dict[str, float]:
    """Return the budget of each run by unit; arms of kind rft have only iterations."""
    limits = file.budget.model_dump(exclude_none=True) if file.budget else {}
    for unit in ("tokens", "minutes"):
        if unit in limits and "rft" in kinds:
            raise ConfigError(
                f"budget has {unit} in {place}, which arms of kind rft do not support; use iterations, like "
                "{iterations: 4}, and steps for arms of kind grpo"
            )
    budget = {key: value for key, value in limits.items() if key != "iterations"}
    if "grpo" in kinds and not budget:
        budget = {"steps": base.training.steps}
    return {**budget, **({"iterations": base.rft.iterations} if "rft" in kinds else {})}


def _base_values(file: StudyFile, place: str) -> dict[str, Any]:
    """Return the values of the base with its preset, the evaluation plan and the budget."""
    changes = dict(file.base)
    preset = changes.pop("preset", None)
    if preset is not None and preset not in presets():
        raise ConfigError(f"base.preset is {preset!r} in {place}; {suggest(str(preset), presets())}")
    values = deep_merge(adapt_preset(load_config(preset=preset).dump(), changes), changes)
    values["evaluation"] = deep_merge(values["evaluation"], file.evaluation.model_dump(exclude_none=True))
    if file.budget is not None and file.budget.steps is not None:
        values["training"] = {**values["training"], "steps": file.budget.steps}
    if file.budget is not None and file.budget.iterations is not None:
        values["rft"] = {**values["rft"], "iterations": file.budget.iterations}
    if file.evaluation.every is None:
        values["evaluation"]["every"] = values["training"]["steps"]
    return values


def _arm(
    name: str,
    settings: ArmSettings,
    file: StudyFile,
    base: Config,
    base_values: Mapping[str, Any],
    place: str,
    construct: bool,
) -> Arm:
    where = f"arm {name!r} of {place}"
    values, kind = dict(base_values), settings.kind or file.kind
    for key, value in settings.set.items():
        _refuse_reserved(key, file, where)
        nested: Any = value
        for part in reversed(key.split(".")):
            nested = {part: nested}
        values = deep_merge(values, nested)
    if settings.strategies is not None:
        values["strategies"] = settings.strategies
    config = _built(values, where, construct)
    dump, old = config.dump(), flatten(base.dump())
    changes = {key: value for key, value in flatten(dump).items() if value != old.get(key) and key != "strategies"}
    if kind != file.kind:
        changes = {"kind": kind, **changes}
    if kind == "rft":
        if values["strategies"]:
            raise ConfigError(f"{where} is of kind rft, which has no strategies; set strategies: []")
        config = rft_config(config)
        dump = config.dump()
        if file.evaluation.every is None:
            dump["evaluation"]["every"] = config.rft.iterations
    # evaluations are scheduled in training steps, while the trainer counts updates
    dump["evaluation"]["every"] *= config.training.iterations
    del dump["seed"]
    dump["strategies"] = values["strategies"]
    return Arm(name, slug(name), changes, dump, kind)


def _refuse_reserved(key: str, file: StudyFile, where: str) -> None:
    reserved = RESERVED | ({"model.name": "all arms start from the warm start"} if file.warm_start is not None else {})
    for prefix, why in reserved.items():
        if key == prefix or key.startswith(f"{prefix}."):
            raise ConfigError(f"{where} sets {key}: {why}")


def _built(values: Mapping[str, Any], where: str, construct: bool) -> Config:
    """Build a configuration and check its strategies, task, template and protocol; errors name the place."""
    from explorl.evaluation import protocol
    from explorl.tasks import get_task, task_type

    filled = {**values, "strategies": _with_rates(values.get("strategies", []), ANY_RATES)}
    try:
        config = load_config(values=filled, construct=construct)
        protocol(config.evaluation.protocol)
        name, template = config.task.name, config.task.template
        task = get_task(name, **config.task.options) if construct else task_type(name)
        if template is not None and template not in task.templates:
            choices = ", ".join(task.templates) or "none: remove it"
            raise ValueError(f"task.template is {template!r}; {task.name} has {choices}")
    except ValueError as error:
        raise ConfigError(f"{where}: {error}") from None
    return config


def _check_reference_solutions(config: Config, place: str) -> None:
    """Raise `ConfigError` if the task of the warm start has no reference solutions."""
    from explorl.tasks.base import Task
    from explorl.tasks.registry import task_type

    if getattr(task_type(config.task.name), "examples", None) is Task.examples:
        raise ConfigError(
            f"warm_start of {place}: task {config.task.name!r} has no reference solutions to fine-tune on; "
            f"{WITHOUT_WARM_START.format(model=config.model.name)}"
        )


def _with_rates(specs: Any, rates: Any) -> Any:
    """Replace `solve_rates: start` in a list of strategies."""
    if isinstance(specs, list):
        return [_with_rates(item, rates) for item in specs]
    if isinstance(specs, dict):
        return {
            key: rates if key == "solve_rates" and value == START else _with_rates(value, rates)
            for key, value in specs.items()
        }
    return specs
