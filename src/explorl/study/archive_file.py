"""The archive file of `explorl study keep`, and its validation before anything is restored from it.

    {"explorl study": 1, "study": study.json, "problems": {name: ids}, "runs": […], "failed": […]}

A run is `{arm, seed, kind, start, config, provenance, metrics, evaluations}`: `start` is a digest of the warm start,
and an evaluation counts the correct samples of each problem; `problems` names the list. A file may come from anywhere
and its names become paths, so everything is checked, and a file with any fault is refused.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from explorl.core.config import Count
from explorl.core.store import StoreError, cleaned, read_json
from explorl.core.text import clean
from explorl.study.spec import LONGEST_NAME, Sequential, checked_seeds, slug

FORMAT = 1
MAX_PER_EVALUATION, MAX_COMPLETIONS = 10_000_000, 100_000_000
"""Completions of one evaluation, and of a whole file; each becomes a row of a table."""

LONGEST_ERROR = 100_000
"""Characters kept of a run's error."""

Part = TypeVar("Part", bound=BaseModel)
Seed = Annotated[int, Field(ge=0)]
Name = Annotated[str, Field(min_length=1)]
EvaluationName = Annotated[str, Field(pattern=r"^step-([0-9]{6}|[1-9][0-9]{6,8})$")]


class _Strict(BaseModel):
    """A part of the file; unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())


class _Open(BaseModel):
    """A part with further keys, which are ignored."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())


class _Named(_Open):
    name: Name


class _Training(_Open):
    steps: Count
    iterations: Count


class _Rollout(_Open):
    max_tokens: Count


class _Settings(_Open):
    """The keys of a configuration that reading results needs."""

    task: _Named
    model: _Named
    training: _Training
    rollout: _Rollout
    strategies: list[Name | Annotated[dict[str, Any], Field(min_length=1)]]


class _Arm(_Strict):
    name: Annotated[str, Field(min_length=1, max_length=LONGEST_NAME)]
    slug: str
    changes: dict[str, Any]
    config: _Settings
    kind: Literal["grpo", "rft"] = "grpo"

    @model_validator(mode="after")
    def _folder(self) -> _Arm:
        if self.name != cleaned(self.name):
            raise ValueError(f"name is {_shown(self.name)}, which cannot be displayed; use plain text")
        if self.slug != slug(self.name):
            raise ValueError(f"slug is {_shown(self.slug)}; that of {self.name!r} is {slug(self.name)!r}")
        return self


class _Study(_Open):
    """study.json."""

    name: Name
    title: str
    description: str
    profile: str | None
    base: _Settings
    warm_start: _Settings | None
    arms: Annotated[list[_Arm], Field(min_length=1)]
    baseline: str
    seeds: list[Seed]
    budget: Annotated[dict[str, float], Field(min_length=1)]
    target: Annotated[float, Field(gt=0, le=1)] | None
    seed_deviation: Annotated[float, Field(gt=0)]
    solve_rate_samples: Count
    sequential: Sequential | None = None
    created: str

    @field_validator("seeds")
    @classmethod
    def _once(cls, seeds: list[int]) -> list[int]:
        return [*checked_seeds(seeds)]

    @model_validator(mode="after")
    def _fits(self) -> _Study:
        names = [arm.name for arm in self.arms]
        if double := _double(names):
            raise ValueError(f"duplicate arm {double!r}; name each once")
        if clash := folder_clash({arm.name: arm.slug for arm in self.arms}):
            raise ValueError(clash)
        if self.baseline not in names:
            raise ValueError(f"baseline is {_shown(self.baseline)}; the arms are {_listed(names)}")
        if self.sequential is not None and self.sequential.first >= len(self.seeds):
            raise ValueError(
                f"sequential.first is {self.sequential.first}, but there are {len(self.seeds)} seeds; use fewer"
            )
        return self


class _Line(_Open):
    """A line of metrics, whose other values are numbers."""

    __pydantic_extra__: dict[str, float | None]
    kind: Literal["train", "evaluation"]
    step: Annotated[int, Field(ge=0, lt=10**9)]

    @model_validator(mode="after")
    def _scored(self) -> _Line:
        if self.kind == "evaluation" and (self.__pydantic_extra__ or {}).get("pass@1") is None:
            raise ValueError("a line of kind evaluation lacks pass@1")
        return self


class _Summary(_Open):
    entropy: float | None = None
    branching: float | None = None


class _Evaluation(_Strict):
    problems: str
    samples: Annotated[int, Field(ge=1, le=100_000)]
    right: list[Annotated[int, Field(ge=0)]]
    summary: _Summary


class _ArmSeed(_Strict):
    arm: str
    seed: Seed


class _Run(_ArmSeed):
    kind: str
    start: Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")] | None = None
    config: _Settings
    provenance: list[dict[str, Any]]
    metrics: list[_Line]
    evaluations: dict[EvaluationName, _Evaluation]

    @model_validator(mode="after")
    def _finished(self) -> _Run:
        steps = [line.step for line in self.metrics if line.kind == "train"]
        if steps != sorted(steps):
            raise ValueError("metrics has training steps out of order")
        if (end := f"step-{max(steps, default=0):06d}") not in self.evaluations:
            raise ValueError(f"evaluations lacks {end}, that of the last step")
        config_seed = (self.config.__pydantic_extra__ or {}).get("seed", self.seed)
        if config_seed != self.seed:
            raise ValueError(f"config.seed is {_shown(config_seed)}; the run's seed is {self.seed}")
        return self


class _Failed(_ArmSeed):
    error: Annotated[str, Field(max_length=LONGEST_ERROR)]


class _Archive(_Strict):
    format: int = Field(alias="explorl study")
    study: _Study
    problems: dict[str, Annotated[list[str], Field(min_length=1)]]
    runs: Annotated[list[_Run], Field(min_length=1)]
    failed: list[_Failed] = Field(default_factory=list)


def read_archive(file: Path) -> dict[str, Any]:
    """Read and check an archive file; raise `StoreError` that names the fault."""
    if not file.is_file():
        raise StoreError(f"{file} is not a file; give one that `explorl study keep FOLDER FILE` has written")
    record = read_json(file)
    version = record.get("explorl study") if isinstance(record, dict) else None
    if type(version) is not int or version < 1:
        raise StoreError(f"{file} is not a study's archive; write one with `explorl study keep FOLDER FILE`")
    if version > FORMAT:
        raise StoreError(
            f"{file} was written by a newer Explorl (format {version}; this one reads {FORMAT}); update it"
        )
    check_archive(record, file)
    return dict(record)


def check_archive(record: dict[str, Any], place: Path) -> None:
    """Raise `StoreError` unless an archive can be restored to a folder."""
    archive = _validate(_Archive, record, place)
    arms = {arm.name: arm for arm in archive.study.arms}
    for run in (*archive.runs, *archive.failed):
        if run.arm not in arms:
            raise StoreError(f"{place}, a run: arm is {_shown(run.arm)}; the study has {_listed(arms)}")
        if run.seed not in archive.study.seeds:
            seeds = _listed(archive.study.seeds)
            raise StoreError(f"{place}, arm {run.arm!r}: seed is {run.seed}; the study has {seeds}")
    if double := _double([(run.arm, run.seed) for run in (*archive.runs, *archive.failed)]):
        raise StoreError(f"{place} has arm {double[0]!r}, seed {double[1]}, twice; remove one of them")
    for name, ids in archive.problems.items():
        if same := _double(cleaned(ids)):
            raise StoreError(f"{place}: problems.{_shown(name)} has {_shown(same)} twice; name each problem once")
    completions = 0
    for run in archive.runs:
        where = f"{place}, arm {run.arm!r}, seed {run.seed}"
        if run.kind != arms[run.arm].kind:
            raise StoreError(f"{where}: kind is {_shown(run.kind)}; its arm is of kind {arms[run.arm].kind!r}")
        for name, evaluation in run.evaluations.items():
            if fault := _mismatch(evaluation, archive.problems):
                raise StoreError(f"{where}: evaluations.{name}.{fault}")
            completions += evaluation.samples * len(evaluation.right)
    if completions > MAX_COMPLETIONS:
        raise StoreError(f"{place} has evaluations of {completions:,} completions; at most {MAX_COMPLETIONS:,} fit")


def check_study(record: Any, path: Path) -> None:
    """Raise `StoreError` unless a study.json has what reading results needs."""
    _validate(_Study, record, path)


def folder_clash(slugs: Mapping[str, str]) -> str | None:
    """Describe two arms with the same folder name, or return None; `slugs` maps arms to folder names."""
    double = _double([*slugs.values()])
    if double is None:
        return None
    first, second = [name for name, slug_ in slugs.items() if slug_ == double][:2]
    return f"the arms {first!r} and {second!r} have the same folder name {double!r}; rename one"


def _mismatch(evaluation: _Evaluation, problems: Mapping[str, list[str]]) -> str | None:
    """Describe how an evaluation does not fit its problems, or return None."""
    right, samples = evaluation.right, evaluation.samples
    if evaluation.problems not in problems:
        return f"problems is {_shown(evaluation.problems)}; the file has {_listed(problems)}"
    if len(right) != (count := len(problems[evaluation.problems])):
        return f"right has {len(right)} numbers, but there are {count} problems"
    if max(right) > samples:
        return f"right.{right.index(max(right))} is {max(right)} of {samples} samples; use {samples} or fewer"
    if samples * count > MAX_PER_EVALUATION:
        return f"samples is {samples} for {count} problems; at most {MAX_PER_EVALUATION:,} completions fit"
    return None


# ---------------------------------------------------------------------------- errors
MESSAGES = {
    "extra_forbidden": "unknown key; it may be from a newer Explorl",
    "model_type": "it should be a dictionary",
    "too_short": "give at least one",
}
"""Replacements for pydantic's messages, by the type of error."""


def _validate(part: type[Part], record: Any, place: Path) -> Part:
    for location, number in _odd_numbers(record):
        raise StoreError(f"{place}{_where(record, location)}: {_key(location)} is {number}; give a number, or null")
    try:
        return part.model_validate(record, strict=True)
    except ValidationError as error:
        detail = error.errors()[0]
        location, value = detail["loc"], _shown(detail["input"])
        where, key = f"{place}{_where(record, location)}", _key(location)
        message = MESSAGES.get(detail["type"], detail["msg"].lower())
        if detail["type"] == "missing":
            raise StoreError(f"{where} lacks {key}") from None
        if detail["type"] == "value_error":
            raise StoreError(f"{where}: {f'{key}: ' if key else ''}{detail['ctx']['error']}") from None
        if location[-1:] == ("[key]",):
            raise StoreError(f"{where}: {_key(location[:-2])} has {value}; use names like step-000002") from None
        raise StoreError(f"{where}: {key or 'it'} is {value}: {message}") from None


def _odd_numbers(value: Any, location: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], float]]:
    """Yield numbers that are not finite, with their locations."""
    if isinstance(value, float) and not math.isfinite(value):
        yield location, value
    elif isinstance(value, dict | list):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _odd_numbers(item, (*location, key))


def _where(record: Any, location: tuple[Any, ...]) -> str:
    """Name the run that an error is in."""
    if len(location) < 2 or location[0] not in ("runs", "failed"):
        return ""
    run = record[location[0]][location[1]]
    if not isinstance(run, dict):
        return f", {location[0]}.{location[1]}"
    return f", arm {_shown(run.get('arm'))}, seed {_shown(run.get('seed'))}"


def _key(location: tuple[Any, ...]) -> str:
    """Return the dotted key of an error, relative to its run."""
    if location[:1] in (("runs",), ("failed",)) and len(location) > 1:
        location = location[2:]
    return " ".join(clean(".".join(str(part)[:80] for part in location)).split())


def _shown(value: Any) -> str:
    """Return a value's repr, shortened for a message."""
    text = clean(repr(value))
    return text if len(text) <= 80 else f"{text[:79]}…"


def _listed(values: Iterable[Any]) -> str:
    return _shown([*values])[1:-1]


def _double(items: list[Any]) -> Any:
    """Return the first duplicate item, or None."""
    return next((item for item, count in Counter(items).items() if count > 1), None)
