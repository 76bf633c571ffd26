"""How often each prompt is solved: from a file of a previous evaluation, or from a running mean.

A file is a JSON object ``{prompt text: share of correct answers}``, each share between 0 and 1.
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
    """The rates, checked; errors name the file, the prompt and a good value."""
    where = f"{name_of(strategy)}: solve_rates"
    rates: Any = source
    if source is None:
        raise ValueError(f"{where} is missing; give a mapping such as {EXAMPLE}, or the path of a JSON file with one")
    if isinstance(source, (str, PathLike)):
        where = f"{where} {str(source)!r}"
        try:
            path = Path(source)
            if path.exists() and not path.is_file():  # a pipe would wait, and a device never end
                raise ValueError(f"{where} is no file; it must be a JSON file such as {EXAMPLE}")
            rates = parse_json(path.read_bytes(), where)
        except OSError as error:
            raise ValueError(
                f"{where} cannot be read ({error.strerror}); it must be a JSON file such as {EXAMPLE}"
            ) from None
        except DocumentError as error:
            raise ValueError(f"{error}; it must be a JSON file such as {EXAMPLE}") from None
    if not isinstance(rates, Mapping) or not rates:
        raise ValueError(f"{where} must be a mapping from prompts to rates, such as {EXAMPLE}, and not empty")
    for prompt, rate in rates.items():
        if not isinstance(prompt, str) or not is_number(rate) or not 0 <= rate <= 1:
            raise ValueError(f"{where}: the rate of {prompt!r} is {rate!r}; it must be between 0 and 1, such as 0.75")
    return {prompt: float(rate) for prompt, rate in rates.items()}


def no_match_message(rates: Mapping[str, float], prompts: Sequence[str]) -> str:
    """What to say where none of the rates is that of a prompt: how many there are, and one of each to compare."""
    asked = f"a prompt asked for is {_short(prompts[0])}, " if prompts else ""
    return (
        f"none of the {len(rates)} solve rates belongs to any of the {len(set(prompts))} prompts: {asked}one in "
        f"solve_rates is {_short(next(iter(rates)))}; its keys must be the whole texts of the prompts, as they are "
        "trained on"
    )


def _short(prompt: str) -> str:
    return repr(prompt if len(prompt) <= 80 else f"{prompt[:40]} … {prompt[-40:]}")


def text_key(prompt: str) -> str:
    """A short key for a prompt, so that a checkpoint need not hold its text."""
    return hashlib.blake2b(prompt.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


def update_solve_rates(
    memory: dict[str, Any],
    prompts: Sequence[str],
    correct: Bool[Tensor, " batch"],
    correctness: Float[Tensor, " batch"],
    *,
    decay: float,
    start: Mapping[str, float],
) -> None:
    """Updates the running solve rate of each prompt (from `start`, or its first value) and the one over all of them.

    A correct answer solves its prompt; one that could not be scored (NaN in `correctness`) does not count.
    """
    outcomes: dict[str, list[bool]] = {}
    for prompt, solves, scored in zip(prompts, correct.tolist(), (~correctness.isnan()).tolist(), strict=True):
        if scored:
            outcomes.setdefault(prompt, []).append(solves)
    rates = memory.setdefault("rates", {})
    for prompt, solved in outcomes.items():
        now, key = sum(solved) / len(solved), text_key(prompt)
        rates[key] = decay * rates.get(key, start.get(prompt, now)) + (1 - decay) * now
    everything = [one for solved in outcomes.values() for one in solved]
    if everything:
        now = sum(everything) / len(everything)
        memory["overall"] = decay * memory.get("overall", now) + (1 - decay) * now
