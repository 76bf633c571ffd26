"""Data sets of reasoning-gym and their scorers; also imported where answers are scored, shut in (`sandbox.sealed`)."""

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
"""From 0 to 1, and what went wrong."""
LIBRARY = "reasoning_gym"
_prepared: list[Any] = []


def factory() -> ModuleType:
    """``reasoning_gym.factory``, or an ImportError that says how to get it."""
    try:
        import reasoning_gym.factory  # here, because it is optional and takes seconds
    except ImportError as error:
        raise ImportError("tasks 'gym:…' need reasoning-gym: pip install explorl[gym]") from error
    return reasoning_gym.factory


def create_dataset(name: str, config: Mapping[str, Any], *, seed: int, size: int) -> Any:
    """A data set; a ``composite`` takes its parts as mappings, too."""
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
    """What a composite is made of: ``[{"name": …, "weight": …, "config": …}, …]``."""
    parts = config.get("datasets") or ()
    return [dict(part) if isinstance(part, Mapping) else dict(vars(part)) for part in parts]


def encode_config(name: str, config: Mapping[str, Any]) -> str:
    """A data set's options as JSON that `plain.decode` reads; equal for equal options."""
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
        return json.dumps(encode(_replaced(metadata, _tagged)))
    except TypeError as error:
        kind = str(error).partition(";")[0]
        raise ValueError(
            f"gym:{name} cannot be used: the metadata of its problems has {kind}, and only plain values and fractions "
            "can be stored; take another data set"
        ) from None


def decode_metadata(text: str) -> Any:
    """Return what `encode_metadata` was given."""
    return _replaced(decode(json.loads(text)), _untagged)


_FRACTION = "\0fraction"


def _tagged(value: Any) -> Any:
    return (_FRACTION, value.numerator, value.denominator) if isinstance(value, Fraction) else value


def _untagged(value: Any) -> Any:
    return Fraction(*value[1:]) if isinstance(value, tuple) and value[:1] == (_FRACTION,) else value


def _replaced(value: Any, replace: Callable[[Any], Any]) -> Any:
    """Return a value with everything in it replaced, from the inside out."""
    if isinstance(value, dict):
        value = {_replaced(key, replace): _replaced(item, replace) for key, item in value.items()}
    elif isinstance(value, list):
        value = [_replaced(item, replace) for item in value]
    elif type(value) in (tuple, set, frozenset):
        value = type(value)(_replaced(item, replace) for item in value)
    return replace(value)


def score_answer(dataset: Any, answer: str, entry: Mapping[str, Any]) -> Score:
    """The scorer's value for an answer, from 0 to 1, and what went wrong with it."""
    if len(answer) > MAX_LENGTH:
        return 0.0, f"an answer of over {MAX_LENGTH} characters"
    try:
        if uses_sympy(type(_source(dataset, entry))) and not is_formula(answer, names=has_names(entry["answer"])):
            return 0.0, f"not a formula: {answer[:60]!r}"
        value = float(dataset.score_answer(answer, entry))
    except Exception as error:  # scorers are many, and answers are anything
        return 0.0, f"the scorer raised {type(error).__name__}: {str(error)[:200]}"
    return (0.0, "the scorer gave no number") if math.isnan(value) else (min(max(value, 0.0), 1.0), None)


def part_datasets(dataset: Any) -> list[Any]:
    """The data sets that a composite is made of, or the data set alone."""
    return list(dataset.datasets.values()) if _is_composite(dataset) else [dataset]


def _source(dataset: Any, entry: Mapping[str, Any]) -> Any:
    """The data set that an entry is of."""
    return dataset.datasets[entry["metadata"]["source_dataset"]] if _is_composite(dataset) else dataset


def _is_composite(dataset: Any) -> bool:
    return isinstance(getattr(dataset, "datasets", None), Mapping)


def dataset_modules(name: str, config: Mapping[str, Any]) -> list[str]:
    """The modules of a data set's class and, if it is a composite, of those of its parts."""
    names = [name, *(spec["name"] for spec in part_specs(config) if name == "composite")]
    known = factory().DATASETS
    return list(dict.fromkeys(known[name][0].__module__ for name in names if name in known))


def prepare(setup: Mapping[str, Any]) -> None:  # pragma: no cover (another process)
    """Create the data set that `score` scores with; its seed and size do not matter."""
    # Each thread of a linear algebra library takes address space, of which a scorer has little.
    os.environ.update(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1", MKL_NUM_THREADS="1")
    _import(setup["modules"])
    dataset = create_dataset(setup["name"], decode(json.loads(setup["config"])), seed=0, size=1)
    for part in part_datasets(dataset):
        replace_eval(part)
        if uses_sympy(type(part)):
            with suppress(Exception):
                entry = part[0]
                part.score_answer(entry["answer"], entry)  # what sympy imports and remembers is there in each fork
    _prepared[:] = [dataset]


def _import(names: Sequence[str]) -> None:  # pragma: no cover (another process)
    """Import modules that register data sets; if they can do without it, without all other data sets.

    Those take a second to import and memory that makes each fork ten times as slow.
    """
    own = any(name.partition(".")[0] != LIBRARY for name in names)
    if not own:
        _stand_in(names)
    try:
        for name in names:
            importlib.import_module(name)
    except (ImportError, AttributeError):
        if own:
            raise
        for name in [name for name in sys.modules if name.partition(".")[0] == LIBRARY]:
            del sys.modules[name]
        factory()


def _stand_in(names: Sequence[str]) -> None:  # pragma: no cover (another process)
    """Put empty packages in the place of those that import all data sets: the library and its categories."""
    found = importlib.util.find_spec(LIBRARY)
    if found is None or not found.submodule_search_locations:
        return
    (root, *_) = found.submodule_search_locations
    for package in {".".join(name.split(".")[:-1][:2]) for name in names} | {LIBRARY}:
        module = sys.modules[package] = ModuleType(package)
        module.__path__ = [os.path.join(root, *package.split(".")[1:])]


def score(message: Mapping[str, Any], _: object = None) -> Score:  # pragma: no cover (another process)
    """Return `score_answer` of ``{"answer": …, "entry": …}``, where the entry's metadata is encoded."""
    entry = dict(message["entry"])
    entry["metadata"] = decode_metadata(entry["metadata"])
    return score_answer(_prepared[0], message["answer"], entry)
