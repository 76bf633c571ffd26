"""Load a configuration from its sources, and explain what is wrong with it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from explorl.core.config.schema import Config
from explorl.core.documents import DocumentError
from explorl.core.errors import ConfigError
from explorl.core.merge import deep_merge
from explorl.core.plugins import suggest
from explorl.core.yaml_documents import parse_yaml


def read_yaml(text: str, place: str) -> Any:
    """Parse a YAML document; raise ConfigError, which names the place, if it is invalid."""
    try:
        return parse_yaml(text, place)
    except DocumentError as error:
        raise ConfigError(str(error)) from None


def presets() -> list[str]:
    """Return the names of the presets that ship with the package."""
    return sorted(path.name.removesuffix(".yaml") for path in (resources.files("explorl") / "presets").iterdir())


def load_config(
    path: str | Path | None = None,
    *,
    preset: str | None = None,
    overrides: Sequence[str] = (),
    values: Mapping[str, Any] | None = None,
    construct: bool = True,
) -> Config:
    """Return the resolved configuration: defaults < preset < file < `overrides` ("training.steps=60") < `values`.

    ``construct=False`` is for commands that only show it: plug-ins named by import paths are then looked up, but not
    constructed.
    """
    base: dict[str, Any] = {}
    changes: dict[str, Any] = {}
    sources: list[str] = []
    if preset is not None:
        if preset not in presets():
            raise ConfigError(f"unknown preset {preset!r}; {suggest(preset, presets())}")
        text = (resources.files("explorl") / "presets" / f"{preset}.yaml").read_text(encoding="utf-8")
        base = _mapping(read_yaml(text, f"preset {preset}"), f"preset {preset}")
    if path is not None:
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"cannot read the config file {path}: {error}") from error
        changes = deep_merge(changes, _mapping(read_yaml(text, str(path)), str(path)))
        sources.append(str(path))
    if overrides:
        changes = apply_overrides(changes, overrides)
        sources.append("--set")
    changes = deep_merge(changes, values or {})
    place = " and ".join(sources) or "the configuration"
    return validate(deep_merge(adapt_preset(base, changes), changes), place, construct=construct)


def apply_overrides(values: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """Return the values with the changes of --set, such as "training.steps=60"."""
    merged = dict(values)
    for override in overrides:
        key, separator, value = override.partition("=")
        if not separator or not key:
            raise ConfigError(f"--set {override!r} is not key=value; write it like training.learning_rate=5e-6")
        nested: Any = read_yaml(value, f"--set {override}")
        for part in reversed(key.split(".")):
            nested = {part: nested}
        merged = deep_merge(merged, nested)
    return merged


def adapt_preset(preset: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return a preset's values; without those for its own task if the changes name another task."""
    task, new_task = preset.get("task", {}), changes.get("task")
    if not isinstance(new_task, Mapping) or new_task.get("name", task.get("name")) == task.get("name"):
        return dict(preset)
    counts = {key: task[key] for key in ("train_problems", "holdout_problems") if key in task}
    pretraining = ("attempts", "from_scratch")  # how the preset's policy was made; other tasks only fine-tune it
    sft = {key: value for key, value in preset.get("sft", {}).items() if key not in pretraining}
    return {**preset, "task": counts, "sft": sft}


def _mapping(value: Any, place: str) -> dict[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ConfigError(f"{place} must hold keys and values, like `training: {{steps: 100}}`")
    return value


# ---------------------------------------------------------------------------- errors
def validate(values: Mapping[str, Any], place: str, *, construct: bool = True) -> Config:
    """Return the validated configuration; raise ConfigError, which names the place, if it is invalid."""
    try:
        return Config.model_validate(values, context={"construct": construct})
    except ValidationError as error:
        raise ConfigError(_explain(error, place)) from None


_ELSEWHERE = {
    "evaluation.engine": "Explorl's engine samples the evaluations of a run; explorl eval --engine vllm scores its "
    "model with vLLM afterwards",
}
"""Keys that users may expect, and what to use instead."""


def _explain(error: ValidationError, place: str) -> str:
    """Return pydantic's findings, one line each: key, value, what is wrong, the nearest known key."""
    lines = []
    for finding in error.errors():
        location = [str(part) for part in finding["loc"]]
        key = ".".join(location)
        if finding["type"] == "extra_forbidden":
            advice = _ELSEWHERE.get(key) or suggest(location[-1], _keys_beside(location))
            lines.append(f"unknown key {key} in {place}; {advice}")
        elif finding["type"] == "value_error":
            message = str(finding["ctx"]["error"])
            prefix = f"{key}: " if key and not message.startswith(f"{key} ") else ""
            lines.append(f"{prefix}{message} (in {place})")
        elif finding["type"] == "model_type":
            value = "empty" if finding["input"] is None else repr(finding["input"])
            lines.append(f"{key} is {value} in {place}; use keys and values, like {_sample(location)}, or leave it out")
        else:
            lines.append(f"{key} is {finding['input']!r} in {place}: {finding['msg'].lower()}{_default(location)}")
    return "\n".join(dict.fromkeys(lines))


def _section(location: Sequence[str]) -> type[BaseModel] | None:
    section: type[BaseModel] | None = Config
    for part in location:
        field = section.model_fields.get(part) if section is not None else None
        candidates = [field.annotation, *get_args(field.annotation)] if field is not None else []
        section = next((c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel)), None)
    return section


def _keys_beside(location: Sequence[str]) -> list[str]:
    section = _section(location[:-1])
    return [field.alias or name for name, field in section.model_fields.items()] if section is not None else []


def _default(location: Sequence[str]) -> str:
    section = _section(location[:-1])
    field = section.model_fields.get(location[-1]) if section is not None else None
    return f" (the default is {field.default!r})" if field is not None else ""


def _sample(location: Sequence[str]) -> str:
    """Return the first key of a section with its default, as it is written in a file."""
    section = _section(location)
    name, field = next(iter(section.model_fields.items())) if section is not None else ("", None)
    return f"{{{name}: {field.default}}}" if field is not None else "{}"
