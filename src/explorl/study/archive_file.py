"""The file that `explorl study keep` writes, and what must hold of one before anything of it reaches a folder.

    {"explorl study": 1, "study": study.json, "problems": {name: ids}, "runs": […], "failed": […]}

A run is `{arm, seed, kind, start, config, provenance, metrics, evaluations}`: `start` is a digest of the warm start,
and an evaluation has how many samples of each problem were right; `problems` names the list. A file may come from
anywhere, and its names become paths: all of it is checked, and one with a fault is refused whole.
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
MOST_IN_ONE, MOST_ANSWERS = 10_000_000, 100_000_000
"""Answers of one evaluation, and of all in a file: each becomes a row of a table."""

LONGEST_ERROR = 100_000
"""Characters of what a run failed with."""

Part = TypeVar("Part", bound=BaseModel)
Seed = Annotated[int, Field(ge=0)]
Name = Annotated[str, Field(min_length=1)]
EvaluationName = Annotated[str, Field(pattern=r"^step-([0-9]{6}|[1-9][0-9]{6,8})$")]


class _Part(BaseModel):
    """A part of the file: unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())


class _Open(BaseModel):
    """A part with further keys, which are not looked at."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())


class _Named(_Open):
    name: Name


class _Training(_Open):
    steps: Count
    iterations: Count


class _Rollout(_Open):
    max_tokens: Count


class _Settings(_Open):
    """A configuration, as far as results are read with it."""

    task: _Named
    model: _Named
    training: _Training
    rollout: _Rollout
    strategies: list[Name | Annotated[dict[str, Any], Field(min_length=1)]]


class _Arm(_Part):
    name: Annotated[str, Field(min_length=1, max_length=LONGEST_NAME)]
    slug: str
    changes: dict[str, Any]
    config: _Settings
    kind: Literal["grpo", "rft"] = "grpo"

    @model_validator(mode="after")
    def _folder(self) -> _Arm:
        if self.name != cleaned(self.name):
            raise ValueError(f"name is {_shown(self.name)}, which cannot be shown as it is; give plain text")
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
            raise ValueError(f"it has the arm {double!r} twice; name each once")
        if what := same_folder({arm.name: arm.slug for arm in self.arms}):
            raise ValueError(what)
        if self.baseline not in names:
            raise ValueError(f"baseline is {_shown(self.baseline)}; the arms are {_listed(names)}")
        if self.sequential is not None and self.sequential.first >= len(self.seeds):
            raise ValueError(
                f"sequential.first is {self.sequential.first}, and there are {len(self.seeds)} seeds; it must be fewer"
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
            raise ValueError("it is of kind evaluation and lacks pass@1")
        return self


class _Summary(_Open):
    entropy: float | None = None
    branching: float | None = None


class _Evaluation(_Part):
    problems: str
    samples: Annotated[int, Field(ge=1, le=100_000)]
    right: list[Annotated[int, Field(ge=0)]]
    summary: _Summary


class _Placed(_Part):
    arm: str
    seed: Seed


class _Run(_Placed):
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
            raise ValueError("metrics has training steps that are not in their order")
        if (end := f"step-{max(steps, default=0):06d}") not in self.evaluations:
            raise ValueError(f"evaluations lacks {end}, that of the last step")
        own = (self.config.__pydantic_extra__ or {}).get("seed", self.seed)
        if own != self.seed:
            raise ValueError(f"config.seed is {_shown(own)}; the run's seed is {self.seed}")
        return self


class _Failed(_Placed):
    error: Annotated[str, Field(max_length=LONGEST_ERROR)]


class _Kept(_Part):
    format: int = Field(alias="explorl study")
    study: _Study
    problems: dict[str, Annotated[list[str], Field(min_length=1)]]
    runs: Annotated[list[_Run], Field(min_length=1)]
    failed: list[_Failed] = Field(default_factory=list)


def read_kept(file: Path) -> dict[str, Any]:
    """What a file of results holds; `StoreError` that names the fault where it has one."""
    if not file.is_file():
        raise StoreError(f"{file} is no file; give one that `explorl study keep FOLDER FILE` has written")
    record = read_json(file)
    form = record.get("explorl study") if isinstance(record, dict) else None
    if type(form) is not int or form < 1:
        raise StoreError(f"{file} is not a study's results; write such a file with `explorl study keep FOLDER FILE`")
    if form > FORMAT:
        raise StoreError(f"{file} is of a newer Explorl (format {form}; this one reads {FORMAT}); update Explorl")
    check_kept(record, file)
    return dict(record)


def check_kept(record: dict[str, Any], place: Path) -> None:
    """That a file's content can be laid out in a folder."""
    kept = _checked(_Kept, record, place)
    arms = {arm.name: arm for arm in kept.study.arms}
    for one in (*kept.runs, *kept.failed):
        if one.arm not in arms:
            raise StoreError(f"{place}, a run: arm is {_shown(one.arm)}; the study has {_listed(arms)}")
        if one.seed not in kept.study.seeds:
            seeds = _listed(kept.study.seeds)
            raise StoreError(f"{place}, arm {one.arm!r}: seed is {one.seed}; the study has {seeds}")
    if double := _double([(one.arm, one.seed) for one in (*kept.runs, *kept.failed)]):
        raise StoreError(f"{place} has arm {double[0]!r}, seed {double[1]}, twice; keep one of them")
    for name, ids in kept.problems.items():
        if same := _double(cleaned(ids)):
            raise StoreError(f"{place}: problems.{_shown(name)} has {_shown(same)} twice; name each problem once")
    answers = 0
    for run in kept.runs:
        where = f"{place}, arm {run.arm!r}, seed {run.seed}"
        if run.kind != arms[run.arm].kind:
            raise StoreError(f"{where}: kind is {_shown(run.kind)}; its arm is of kind {arms[run.arm].kind!r}")
        for name, evaluation in run.evaluations.items():
            if what := _misfit(evaluation, kept.problems):
                raise StoreError(f"{where}: evaluations.{name}.{what}")
            answers += evaluation.samples * len(evaluation.right)
    if answers > MOST_ANSWERS:
        raise StoreError(
            f"{place} has evaluations of {answers:,} answers in all; at most {MOST_ANSWERS:,} are laid out"
        )


def check_study(record: Any, path: Path) -> None:
    """That a study.json has what results are read with."""
    _checked(_Study, record, path)


def same_folder(slugs: Mapping[str, str]) -> str | None:
    """Which two arms would have one folder, in words; `slugs` are their folders' names."""
    double = _double([*slugs.values()])
    if double is None:
        return None
    first, second = [name for name, one in slugs.items() if one == double][:2]
    return f"the arms {first!r} and {second!r} have the same folder name {double!r}; rename one"


def _misfit(evaluation: _Evaluation, problems: Mapping[str, list[str]]) -> str | None:
    """What of an evaluation does not fit its problems, in words."""
    right, samples = evaluation.right, evaluation.samples
    if evaluation.problems not in problems:
        return f"problems is {_shown(evaluation.problems)}; the file has {_listed(problems)}"
    if len(right) != (asked := len(problems[evaluation.problems])):
        return f"right has {len(right)} numbers, and there are {asked} problems"
    if max(right) > samples:
        return f"right.{right.index(max(right))} is {max(right)} of {samples} samples; give {samples} or fewer"
    if samples * asked > MOST_IN_ONE:
        return f"samples is {samples} for {asked} problems; at most {MOST_IN_ONE:,} answers are laid out"
    return None


# ---------------------------------------------------------------------------- faults in words
WORDS = {
    "extra_forbidden": "there is no such key; it may be of a newer Explorl",
    "model_type": "it should be a dictionary",
    "too_short": "give at least one",
}
"""What to say where pydantic's own words would not help, by the type of its finding."""


def _checked(part: type[Part], record: Any, place: Path) -> Part:
    for location, number in _odd_numbers(record):
        raise StoreError(f"{place}{_where(record, location)}: {_key(location)} is {number}; give a number, or null")
    try:
        return part.model_validate(record, strict=True)
    except ValidationError as error:
        finding = error.errors()[0]
        location, value = finding["loc"], _shown(finding["input"])
        where, key = f"{place}{_where(record, location)}", _key(location)
        why = WORDS.get(finding["type"], finding["msg"].lower())
        if finding["type"] == "missing":
            raise StoreError(f"{where} lacks {key}") from None
        if finding["type"] == "value_error":
            raise StoreError(f"{where}: {f'{key}: ' if key else ''}{finding['ctx']['error']}") from None
        if location[-1:] == ("[key]",):
            raise StoreError(f"{where}: {_key(location[:-2])} has {value}; give names like step-000002") from None
        raise StoreError(f"{where}: {key or 'it'} is {value}: {why}") from None


def _odd_numbers(value: Any, location: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], float]]:
    """Numbers that are not finite, which JSON does not have, and where they are."""
    if isinstance(value, float) and not math.isfinite(value):
        yield location, value
    elif isinstance(value, dict | list):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _odd_numbers(item, (*location, key))


def _where(record: Any, location: tuple[Any, ...]) -> str:
    """Which run a fault is in."""
    if len(location) < 2 or location[0] not in ("runs", "failed"):
        return ""
    run = record[location[0]][location[1]]
    if not isinstance(run, dict):
        return f", {location[0]}.{location[1]}"
    return f", arm {_shown(run.get('arm'))}, seed {_shown(run.get('seed'))}"


def _key(location: tuple[Any, ...]) -> str:
    """The dotted key of a fault, within its run where it is in one."""
    if location[:1] in (("runs",), ("failed",)) and len(location) > 1:
        location = location[2:]
    return " ".join(clean(".".join(str(part)[:80] for part in location)).split())


def _shown(value: Any) -> str:
    """A value as a message shows it, not at its full length."""
    text = clean(repr(value))
    return text if len(text) <= 80 else f"{text[:79]}…"


def _listed(values: Iterable[Any]) -> str:
    return _shown([*values])[1:-1]


def _double(items: list[Any]) -> Any:
    """The first that is there more than once."""
    return next((item for item, count in Counter(items).items() if count > 1), None)
