"""Solve rates of prompts, loaded from a file of a previous evaluation or kept as a running mean.

A file holds a JSON object ``{prompt text: fraction of correct answers}``, each fraction between 0 and 1.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

from jaxtyping import Bool, Float
from torch import Tensor

from explorl.core.documents import DocumentError, parse_json
from explorl.strategies._lib.validate import is_number, name_of
from explorl.strategies.base import Strategy

SolveRates = Mapping[str, float] | str | PathLike[str]
"""A mapping from prompt to solve rate, or the path of a JSON file that holds one."""

EXAMPLE = '{"What is 1 + 1?": 0.75}'


def load_solve_rates(strategy: Strategy, source: SolveRates | None) -> dict[str, float]:
    """Return the solve rates, read from the file if `source` is a path; raise if they are not valid."""
    where = f"{name_of(strategy)}: solve_rates"
    rates: Any = source
    if source is None:
        raise ValueError(f"{where} is missing; give a mapping such as {EXAMPLE}, or the path of a JSON file with one")
    if isinstance(source, (str, PathLike)):
        where = f"{where} {str(source)!r}"
        try:
            path = Path(source)
            if path.exists() and not path.is_file():  # reading a pipe would block
                raise ValueError(f"{where} is not a file; it must be a JSON file such as {EXAMPLE}")
            rates = parse_json(path.read_bytes(), where)
        except OSError as error:
            raise ValueError(
                f"{where} cannot be read ({error.strerror}); it must be a JSON file such as {EXAMPLE}"
            ) from None
        except DocumentError as error:
            raise ValueError(f"{error}; it must be a JSON file such as {EXAMPLE}") from None
    if not isinstance(rates, Mapping) or not rates:
        raise ValueError(f"{where} must be a non-empty mapping from prompts to rates, such as {EXAMPLE}")
    for prompt, rate in rates.items():
        if not isinstance(prompt, str) or not is_number(rate) or not 0 <= rate <= 1:
            raise ValueError(f"{where}: the rate of {prompt!r} is {rate!r}; it must be between 0 and 1, such as 0.75")
    return {prompt: float(rate) for prompt, rate in rates.items()}


def no_match_message(rates: Mapping[str, float], prompts: Sequence[str]) -> str:
    """Return an error message for rates that match none of the prompts, with one of each to compare."""
    example = f"the first prompt is {_short(prompts[0])}, " if prompts else ""
    return (
        f"none of the {len(rates)} solve rates matches any of the {len(set(prompts))} prompts: {example}the first "
        f"key of solve_rates is {_short(next(iter(rates)))}; the keys must be the complete texts of the "
        "prompts, as used in training"
    )


def _short(prompt: str) -> str:
    return repr(prompt if len(prompt) <= 80 else f"{prompt[:40]} … {prompt[-40:]}")


def text_key(text: str) -> str:
    """Return a short key for a prompt or an answer, so that a checkpoint does not hold the text."""
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


def update_solve_rates(
    memory: dict[str, Any],
    prompts: Sequence[str],
    correct: Bool[Tensor, " batch"],
    correctness: Float[Tensor, " batch"],
    *,
    decay: float,
    start: Mapping[str, float],
) -> None:
    """Update the running solve rate of each prompt, and the overall one, in `memory`.

    A prompt's rate starts at its value in `start`, or at its first observation. Completions that could not be scored
    (NaN in `correctness`) do not count.
    """
    results: dict[str, list[bool]] = {}
    for prompt, is_correct, scored in zip(prompts, correct.tolist(), (~correctness.isnan()).tolist(), strict=True):
        if scored:
            results.setdefault(prompt, []).append(is_correct)
    rates = memory.setdefault("rates", {})
    for prompt, solved in results.items():
        rate, key = sum(solved) / len(solved), text_key(prompt)
        rates[key] = decay * rates.get(key, start.get(prompt, rate)) + (1 - decay) * rate
    every_result = [is_correct for solved in results.values() for is_correct in solved]
    if every_result:
        rate = sum(every_result) / len(every_result)
        memory["overall"] = decay * memory.get("overall", rate) + (1 - decay) * rate
