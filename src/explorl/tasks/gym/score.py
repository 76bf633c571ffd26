"""Score answers to problems of reasoning-gym in isolated processes, which are killed when they take too long."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakValueDictionary, finalize

from explorl.core.text import clean
from explorl.sandbox.isolated_call import IsolatedFunction, IsolatedResult
from explorl.tasks.gym.guard import MAX_LENGTH
from explorl.tasks.gym.worker import Score, dataset_modules, encode_config


class Scorer:
    """Processes that score answers for one data set; they end when this object is deleted."""

    def __init__(self, setup: Mapping[str, Any]) -> None:
        self._isolated = IsolatedFunction("explorl.tasks.gym.worker:score", setup=dict(setup))
        finalize(self, self._isolated.close)

    def score(self, answers: Sequence[tuple[str, Mapping[str, Any]]]) -> list[Score]:
        """Return the score of each pair of an answer and a problem's data; equal pairs are scored once."""
        messages = {
            _key(answer, data): {"answer": answer, "entry": dict(data)}
            for answer, data in answers
            if len(answer) <= MAX_LENGTH
        }
        replies = self._isolated.call_many(messages.values()) if messages else []
        scores = dict(zip(messages, map(_to_score, replies), strict=True))
        too_long = 0.0, f"an answer of over {MAX_LENGTH} characters"
        return [scores.get(_key(answer, data), too_long) for answer, data in answers]


def shared_scorer(name: str, config: Mapping[str, Any]) -> Scorer:
    """Return the scorer of a data set, the same for all tasks with equal options."""
    key = name, encode_config(name, config)
    scorer = _SHARED.get(key)
    if scorer is None:
        scorer = _SHARED[key] = Scorer({"name": name, "config": key[1], "modules": dataset_modules(name, config)})
    return scorer


_SHARED: WeakValueDictionary[tuple[str, str], Scorer] = WeakValueDictionary()


def _key(answer: str, data: Mapping[str, Any]) -> tuple[Any, ...]:
    return answer, data["question"], data["answer"], data["metadata"]


def _to_score(reply: IsolatedResult) -> Score:
    """Return the score in a reply, or 0 with an error if it is not a score."""
    if reply.error is not None:
        return 0.0, f"the scorer {reply.error}"
    try:
        value, error = reply.value
        value = float(value)
    except (TypeError, ValueError, OverflowError):
        return 0.0, "the scorer gave no number"
    if math.isnan(value):
        return 0.0, "the scorer gave no number"
    return min(max(value, 0.0), 1.0), None if error is None else clean(str(error), 300)
