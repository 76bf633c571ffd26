"""Which of the filtered responses are learnt.

A selector gives every response a score, and those with the highest are taken: at most `budget`, at most `per_prompt` of
one problem, and a share `noise` of them wrong (Deng et al. 2025, §4.4.1).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from explorl.core.plugins import Function, mark
from explorl.training.rft.filters import said_in_words
from explorl.training.rft.samples import Sample

Selector = Callable[[Sequence[Sample], np.random.Generator], Sequence[float]]


def rft_selector(function: Function) -> Function:
    """Mark a function as a selector, so that a configuration may name it by its import path."""
    return mark(function, "selector")


def random(samples: Sequence[Sample], rng: np.random.Generator) -> list[float]:
    """Any, each as likely as every other."""
    return rng.random(len(samples)).tolist()


def entropy(samples: Sequence[Sample], rng: np.random.Generator) -> list[float]:
    """Those with the highest mean token entropy over their own tokens."""
    return [_recorded(sample.entropy, "entropy") for sample in samples]


def branching(samples: Sequence[Sample], rng: np.random.Generator) -> list[float]:
    """Those with the highest mean branching factor over their own tokens."""
    return [_recorded(sample.branching, "branching") for sample in samples]


def shortest(samples: Sequence[Sample], rng: np.random.Generator) -> list[float]:
    """Those with the fewest tokens."""
    return [-float(sample.tokens) for sample in samples]


def diverse(samples: Sequence[Sample], rng: np.random.Generator) -> list[float]:
    """Spread over problems and over distinct answers: every problem's first answer, then second answers, and so on.

    The score is −(round in which the problem gives the response). In a problem's rounds each distinct answer comes once
    before any comes again.
    """
    order = rng.permutation(len(samples)).tolist()
    seen: Counter[tuple[str, str | None]] = Counter()
    turns: dict[str, list[tuple[int, int]]] = {}
    for place, index in enumerate(order):
        sample = samples[index]
        answer = sample.problem, sample.answer
        turns.setdefault(sample.problem, []).append((seen[answer], place))
        seen[answer] += 1
    scores = [0.0] * len(samples)
    for turn in turns.values():
        for round_, (_, place) in enumerate(sorted(turn)):
            scores[order[place]] = -float(round_)
    return scores


def _recorded(value: float | None, name: str) -> float:
    if value is None:
        raise ValueError(
            f"rft.selector is {name}, which was not recorded: the model is sampled by model.generate; use random, "
            "shortest or diverse"
        )
    return value


SELECTORS: dict[str, Callable[..., Sequence[float]]] = {
    one.__name__: one for one in (random, entropy, branching, shortest, diverse)
}
"""Selectors by name."""
NEED_RECORDS = ("entropy", "branching")
"""Selectors that read what the engine records of every token."""


@dataclass(frozen=True)
class Selection:
    """The responses to learn from, and how they came about."""

    samples: tuple[Sample, ...]
    """Right ones first, each kind by falling score."""
    scores: tuple[float, ...]
    wanted_noise: int
    """Wrong responses that the share asked for; fewer are there where the pool had not so many."""
    candidates: int
    """Responses that could have been selected: the right ones, and the wrong ones where noise is asked for."""

    @property
    def noise(self) -> int:
        """How many of them are wrong."""
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
    """The right responses with the highest scores, and of the wrong ones as many as make up the share ``noise``.

        wrong = round(noise · n),   n = right + wrong ≤ budget

    At most ``per_prompt`` of one problem, right and wrong together. Equal scores are taken in an order drawn by the
    seed. Where right ones are fewer than the budget wants, so are wrong ones; where wrong ones are fewer than the share
    wants, right ones take their place. Where right ones fill the caps of their problems, those with the lowest scores
    give way. Wrong ones are never selected alone.
    """
    check(budget, per_prompt, noise)
    rng = np.random.default_rng(seed)
    with said_in_words("selector", getattr(getattr(selector, "func", selector), "__name__", "given")):
        given = selector(list(samples), rng)
    scores = _checked(given, samples)
    order = np.lexsort((rng.permutation(len(samples)), -np.asarray(scores, dtype=float))).tolist()
    right = [index for index in order if samples[index].correct]
    wrong = [index for index in order if not samples[index].correct] if noise > 0 else []

    wanted = min(round(noise * budget), budget - 1)
    taken: Counter[str] = Counter()
    chosen = _take(right, samples, budget - wanted, per_prompt, taken)
    if len(chosen) < budget - wanted:
        wanted = round(noise * len(chosen) / (1 - noise))
    noisy = _take(wrong, samples, wanted, per_prompt, taken)
    if len(noisy) < wanted:
        left = set(chosen)
        chosen += _take(
            [i for i in right if i not in left], samples, budget - len(chosen) - len(noisy), per_prompt, taken
        )
        together = len(chosen) + len(noisy)
        wanted = min(round(noise * together), max(together - 1, 0))
        chosen, noisy = _exchanged(chosen, noisy, [i for i in wrong if i not in set(noisy)], samples, wanted)
        place = {index: number for number, index in enumerate(order)}
        chosen, noisy = sorted(chosen, key=place.__getitem__), sorted(noisy, key=place.__getitem__)
    picked = [*chosen, *noisy]
    return Selection(
        tuple(samples[index] for index in picked),
        tuple(float(scores[index]) for index in picked),
        wanted,
        len(right) + len(wrong),
    )


def check(budget: int, per_prompt: int | None, noise: float) -> None:
    """That the numbers can be meant."""
    if budget < 1:
        raise ValueError(f"budget is {budget}; select 1 response or more, such as 1100")
    if per_prompt is not None and per_prompt < 1:
        raise ValueError(f"per_prompt is {per_prompt}; take 1 response a problem or more, such as 4, or null")
    if not 0 <= noise < 1:
        raise ValueError(f"noise is {noise}; use a share from 0 to less than 1, such as 0.05")


def _take(
    order: Sequence[int], samples: Sequence[Sample], count: int, per_prompt: int | None, taken: Counter[str]
) -> list[int]:
    """The first ``count`` of an order that the caps leave room for; ``taken`` counts them by problem."""
    found: list[int] = []
    for index in order:
        if len(found) >= count:
            break
        problem = samples[index].problem
        if per_prompt is None or taken[problem] < per_prompt:
            taken[problem] += 1
            found.append(index)
    return found


def _exchanged(
    chosen: list[int], noisy: list[int], others: Sequence[int], samples: Sequence[Sample], wanted: int
) -> tuple[list[int], list[int]]:
    """Puts other wrong responses in the place of right ones to the same problem, the last first, as many as lack."""
    spare: dict[str, list[int]] = {}
    for index in reversed(others):
        spare.setdefault(samples[index].problem, []).append(index)
    kept, noisy = [], list(noisy)
    for index in reversed(chosen):
        instead = spare.get(samples[index].problem)
        if instead and len(noisy) < wanted:
            noisy.append(instead.pop())
        else:
            kept.append(index)
    return kept[::-1], noisy


def _checked(scores: object, samples: Sequence[Sample]) -> list[float]:
    """What a selector gave, if it is a number for each: a selector may be somebody else's."""
    try:
        found = [float(score) for score in scores] if isinstance(scores, Iterable) else []
    except (TypeError, ValueError, OverflowError, RuntimeError):
        found = []
    if len(found) != len(samples) or not np.isfinite(found).all():
        raise ValueError(
            f"the selector gave {scores!r:.80} for {len(samples)} samples; give one number for each, and none infinite"
        )
    return found
