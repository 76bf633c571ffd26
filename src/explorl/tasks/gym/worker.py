"""Data sets of reasoning-gym and their scorers; also imported by the isolated process that scores
answers (`sandbox.isolated_call`)."""

from __future__ import annotations

import importlib
import importlib.util
import json
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from fractions import Fraction
from types import ModuleType
from typing import Any

from explorl.sandbox.codec import decode, encode
from explorl.tasks.gym.guard import MAX_LENGTH, has_names, is_formula, replace_eval, uses_sympy

Score = tuple[float, str | None]
"""A score from 0 to 1, and an error or None."""
LIBRARY = "reasoning_gym"
_prepared: list[Any] = []


def factory() -> ModuleType:
    """Return ``reasoning_gym.factory``; raise ImportError with the command that installs it."""
    try:
        import reasoning_gym.factory  # here, because it is optional and the import takes seconds
    except ImportError as error:
        raise ImportError("tasks 'gym:…' need reasoning-gym: pip install explorl[gym]") from error
    return reasoning_gym.factory


def create_dataset(name: str, config: Mapping[str, Any], *, seed: int, size: int) -> Any:
    """Return a data set. The parts of a ``composite`` may also be mappings."""
    library = factory()
    options = {**config, "seed": seed, "size": size}
    try:
        if name == "composite":
            from reasoning_gym.composite import DatasetSpec

            options["datasets"] = [DatasetSpec(**spec) for spec in part_specs(config)]
        return library.create_dataset(name, **options)
    except (TypeError, AssertionError, ValueError, AttributeError, KeyError) as error:
        raise ValueError(f"gym:{name} does not take config={dict(config)!r}: {error}") from error


def part_specs(config: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the parts of a composite data set: ``[{"name": …, "weight": …, "config": …}, …]``."""
    parts = config.get("datasets") or ()
    return [dict(part) if isinstance(part, Mapping) else dict(vars(part)) for part in parts]


def encode_config(name: str, config: Mapping[str, Any]) -> str:
    """Return a data set's options as JSON for `sandbox.codec.decode`, the same for equal options."""
    try:
        options = {key: config[key] for key in sorted(config)}
        if name == "composite":
            options["datasets"] = part_specs(config)
        return json.dumps(encode(options))
    except TypeError as error:
        raise ValueError(f"gym:{name} does not take config={dict(config)!r}: {error}") from error


def encode_metadata(name: str, metadata: Any) -> str:
    """Return an entry's metadata as JSON for `decode_metadata`; raise ValueError if it has more than plain values."""
    try:
        return json.dumps(encode(_replace_all(metadata, _tag)))
    except TypeError as error:
        kind = str(error).partition(";")[0]
        raise ValueError(
            f"gym:{name} cannot be used: the metadata of its problems has {kind}, but only plain values and fractions "
            "can be stored; use another data set"
        ) from None


def decode_metadata(text: str) -> Any:
    """Return the metadata that `encode_metadata` encoded."""
    return _replace_all(decode(json.loads(text)), _untag)


_FRACTION = "\0fraction"


def _tag(value: Any) -> Any:
    return (_FRACTION, value.numerator, value.denominator) if isinstance(value, Fraction) else value


def _untag(value: Any) -> Any:
    return Fraction(*value[1:]) if isinstance(value, tuple) and value[:1] == (_FRACTION,) else value


def _replace_all(value: Any, replace: Callable[[Any], Any]) -> Any:
    """Apply ``replace`` to a value and everything in it, from the inside out, and return the result."""
    if isinstance(value, dict):
        value = {_replace_all(key, replace): _replace_all(item, replace) for key, item in value.items()}
    elif isinstance(value, list):
        value = [_replace_all(item, replace) for item in value]
    elif type(value) in (tuple, set, frozenset):
        value = type(value)(_replace_all(item, replace) for item in value)
    return replace(value)


def score_answer(dataset: Any, answer: str, entry: Mapping[str, Any]) -> Score:
    """Return the scorer's value for an answer, from 0 to 1, and an error or None."""
    if len(answer) > MAX_LENGTH:
        return 0.0, f"an answer of over {MAX_LENGTH} characters"
    try:
        if uses_sympy(type(_source(dataset, entry))) and not is_formula(answer, names=has_names(entry["answer"])):
            return 0.0, f"not a formula: {answer[:60]!r}"
        value = float(dataset.score_answer(answer, entry))
    except Exception as error:  # scorers may raise anything
        return 0.0, f"the scorer raised {type(error).__name__}: {str(error)[:200]}"
    return (0.0, "the scorer gave no number") if math.isnan(value) else (min(max(value, 0.0), 1.0), None)


def part_datasets(dataset: Any) -> list[Any]:
    """Return the parts of a composite data set, or a list with only the data set."""
    return list(dataset.datasets.values()) if _is_composite(dataset) else [dataset]


def _source(dataset: Any, entry: Mapping[str, Any]) -> Any:
    """Return the data set that an entry comes from."""
    return dataset.datasets[entry["metadata"]["source_dataset"]] if _is_composite(dataset) else dataset


def _is_composite(dataset: Any) -> bool:
    return isinstance(getattr(dataset, "datasets", None), Mapping)


def dataset_modules(name: str, config: Mapping[str, Any]) -> list[str]:
    """Return the modules of the classes of a data set and, for a composite, of its parts."""
    names = [name, *(spec["name"] for spec in part_specs(config) if name == "composite")]
    classes = factory().DATASETS
    return list(dict.fromkeys(classes[name][0].__module__ for name in names if name in classes))


def prepare(setup: Mapping[str, Any]) -> None:  # pragma: no cover (another process)
    """Create the data set for `score`; its seed and size do not matter."""
    # Each thread of a linear algebra library takes address space, which is limited here.
    os.environ.update(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1", MKL_NUM_THREADS="1")
    _import(setup["modules"])
    dataset = create_dataset(setup["name"], decode(json.loads(setup["config"])), seed=0, size=1)
    for part in part_datasets(dataset):
        replace_eval(part)
        if uses_sympy(type(part)):
            with suppress(Exception):
                entry = part[0]
                part.score_answer(entry["answer"], entry)  # so that each fork inherits sympy's imports and caches
    _prepared[:] = [dataset]


def _import(names: Sequence[str]) -> None:  # pragma: no cover (another process)
    """Import modules that register data sets, if possible without importing all other data sets.

    All data sets together take a second to import, and so much memory that each fork is ten times as slow.
    """
    has_external = any(name.partition(".")[0] != LIBRARY for name in names)
    if not has_external:
        _add_empty_packages(names)
    try:
        for name in names:
            importlib.import_module(name)
    except (ImportError, AttributeError):
        if has_external:
            raise
        for name in [name for name in sys.modules if name.partition(".")[0] == LIBRARY]:
            del sys.modules[name]
        factory()


def _add_empty_packages(names: Sequence[str]) -> None:  # pragma: no cover (another process)
    """Put empty packages in the place of those that import all data sets: the library and its categories."""
    spec = importlib.util.find_spec(LIBRARY)
    if spec is None or not spec.submodule_search_locations:
        return
    (root, *_) = spec.submodule_search_locations
    for package in {".".join(name.split(".")[:-1][:2]) for name in names} | {LIBRARY}:
        module = sys.modules[package] = ModuleType(package)
        module.__path__ = [os.path.join(root, *package.split(".")[1:])]


def score(message: Mapping[str, Any], _: object = None) -> Score:  # pragma: no cover (another process)
    """Return `score_answer` of ``{"answer": …, "entry": …}``, where the entry's metadata is encoded."""
    entry = dict(message["entry"])
    entry["metadata"] = decode_metadata(entry["metadata"])
    return score_answer(_prepared[0], message["answer"], entry)
