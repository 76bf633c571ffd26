"""Select the responses to train on.

A selector scores every filtered response, and the highest scores are selected: at most `budget`, at most `per_prompt`
per problem, and a share `noise` of wrong ones (Deng et al. 2025, §4.4.1).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from explorl.core.plugins import Function, mark
from explorl.training.rft.filters import errors_named
from explorl.training.rft.samples import Sample

Selector = Callable[[Sequence[Sample], np.random.Generator], Sequence[float]]


def rft_selector(function: Function) -> Function:
    """Mark a function as a selector, so that a configuration may name it by its import path."""
    return mark(function, "selector")


def random(samples: Sequence[Sample], rng: np.random.Generator) -> list[float]:
    """Score at random, so that every response is equally likely."""
    return rng.random(len(samples)).tolist()


def entropy(samples: Sequence[Sample], rng: np.random.Generator) -> list[float]:
    """Score by mean token entropy."""
    return [_recorded(sample.entropy, "entropy") for sample in samples]


def branching(samples: Sequence[Sample], rng: np.random.Generator) -> list[float]:
    """Score by mean branching factor."""
    return [_recorded(sample.branching, "branching") for sample in samples]


def shortest(samples: Sequence[Sample], rng: np.random.Generator) -> list[float]:
    """Score by the number of tokens, fewest first."""
    return [-float(sample.tokens) for sample in samples]


def diverse(samples: Sequence[Sample], rng: np.random.Generator) -> list[float]:
    """Spread over problems and distinct answers: first one response per problem, then a second, and so on.

    The score is −(round in which the problem contributes the response). Within a problem each distinct answer comes
    once before any comes again.
    """
    order = rng.permutation(len(samples)).tolist()
    seen: Counter[tuple[str, str | None]] = Counter()
    turns: dict[str, list[tuple[int, int]]] = {}
    for position, index in enumerate(order):
        sample = samples[index]
        answer = sample.problem, sample.answer
        turns.setdefault(sample.problem, []).append((seen[answer], position))
        seen[answer] += 1
    scores = [0.0] * len(samples)
    for turn in turns.values():
        for round_, (_, position) in enumerate(sorted(turn)):
            scores[order[position]] = -float(round_)
    return scores


def _recorded(value: float | None, name: str) -> float:
    if value is None:
        raise ValueError(
            f"rft.selector is {name}, which model.generate does not record; use random, shortest or diverse"
        )
    return value


SELECTORS: dict[str, Callable[..., Sequence[float]]] = {
    function.__name__: function for function in (random, entropy, branching, shortest, diverse)
}
"""Selectors by name."""
NEED_RECORDS = ("entropy", "branching")
"""Selectors that need the engine's token statistics."""


@dataclass(frozen=True)
class Selection:
    """The selected responses, and counts of the selection."""

    samples: tuple[Sample, ...]
    """Correct ones first, each kind by descending score."""
    scores: tuple[float, ...]
    wanted_noise: int
    """Wrong responses that `noise` asks for; the pool may have had fewer."""
    candidates: int
    """Responses that could have been selected: correct ones and, with noise, wrong ones."""

    @property
    def noise(self) -> int:
        """Number of wrong responses."""
        return sum(not sample.correct for sample in self.samples)


def select(
    samples: Sequence[Sample],
    selector: Selector,
    *,
    budget: int,
    per_prompt: int | None = None,
    noise: float = 0.0,
    seed: int | Sequence[int] = 0,
) -> Selection:
    """Select the correct responses with the highest scores, and wrong ones to make up the share ``noise``.

        wrong = round(noise · n),   n = right + wrong ≤ budget

    At most ``per_prompt`` responses per problem are selected, right and wrong together. Ties are broken by the seed. If
    there are too few right ones for the budget, there are proportionally fewer wrong ones; if there are too few wrong
    ones, right ones take their place. If right ones fill the caps of their problems, those with the lowest scores are
    replaced. Wrong ones are never selected alone.
    """
    check_limits(budget, per_prompt, noise)
    rng = np.random.default_rng(seed)
    with errors_named("selector", getattr(getattr(selector, "func", selector), "__name__", "custom")):
        returned = selector(list(samples), rng)
    scores = _check_scores(returned, samples)
    order = np.lexsort((rng.permutation(len(samples)), -np.asarray(scores, dtype=float))).tolist()
    right = [index for index in order if samples[index].correct]
    wrong = [index for index in order if not samples[index].correct] if noise > 0 else []

    wanted = min(round(noise * budget), budget - 1)
    counts: Counter[str] = Counter()
    chosen = _take(right, samples, budget - wanted, per_prompt, counts)
    if len(chosen) < budget - wanted:
        wanted = round(noise * len(chosen) / (1 - noise))
    noisy = _take(wrong, samples, wanted, per_prompt, counts)
    if len(noisy) < wanted:
        already = set(chosen)
        chosen += _take(
            [i for i in right if i not in already], samples, budget - len(chosen) - len(noisy), per_prompt, counts
        )
        total = len(chosen) + len(noisy)
        wanted = min(round(noise * total), max(total - 1, 0))
        chosen, noisy = _exchange(chosen, noisy, [i for i in wrong if i not in set(noisy)], samples, wanted)
        rank = {index: number for number, index in enumerate(order)}
        chosen, noisy = sorted(chosen, key=rank.__getitem__), sorted(noisy, key=rank.__getitem__)
    selected = [*chosen, *noisy]
    return Selection(
        tuple(samples[index] for index in selected),
        tuple(float(scores[index]) for index in selected),
        wanted,
        len(right) + len(wrong),
    )


def check_limits(budget: int, per_prompt: int | None, noise: float) -> None:
    """Raise `ValueError` for limits out of range."""
    if budget < 1:
        raise ValueError(f"budget is {budget}; select 1 response or more, such as 1100")
    if per_prompt is not None and per_prompt < 1:
        raise ValueError(f"per_prompt is {per_prompt}; take 1 response a problem or more, such as 4, or null")
    if not 0 <= noise < 1:
        raise ValueError(f"noise is {noise}; use a share from 0 to less than 1, such as 0.05")


def _take(
    order: Sequence[int], samples: Sequence[Sample], count: int, per_prompt: int | None, counts: Counter[str]
) -> list[int]:
    """Return the first ``count`` of an order within the caps, and update ``counts`` by problem."""
    taken: list[int] = []
    for index in order:
        if len(taken) >= count:
            break
        problem = samples[index].problem
        if per_prompt is None or counts[problem] < per_prompt:
            counts[problem] += 1
            taken.append(index)
    return taken


def _exchange(
    chosen: list[int], noisy: list[int], others: Sequence[int], samples: Sequence[Sample], wanted: int
) -> tuple[list[int], list[int]]:
    """Replace right responses, last first, by other wrong ones to the same problem until ``wanted`` are wrong."""
    spare: dict[str, list[int]] = {}
    for index in reversed(others):
        spare.setdefault(samples[index].problem, []).append(index)
    kept, noisy = [], list(noisy)
    for index in reversed(chosen):
        replacements = spare.get(samples[index].problem)
        if replacements and len(noisy) < wanted:
            noisy.append(replacements.pop())
        else:
            kept.append(index)
    return kept[::-1], noisy


def _check_scores(scores: object, samples: Sequence[Sample]) -> list[float]:
    """Return a selector's scores as floats; raise `ValueError` unless there is one finite number per sample."""
    try:
        numbers = [float(score) for score in scores] if isinstance(scores, Iterable) else []
    except (TypeError, ValueError, OverflowError, RuntimeError):
        numbers = []
    if len(numbers) != len(samples) or not np.isfinite(numbers).all():
        raise ValueError(
            f"the selector returned {scores!r:.80} for {len(samples)} samples; return one finite number per sample"
        )
    return numbers
