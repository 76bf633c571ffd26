"""Judge whether two mathematical answers are equal, in bounded time for any text.

An answer passes three gates. It must have the form of an answer to this problem, without operations that the right
answer does not have (`form`); sympy and math-verify (Hugging Face, 2024) compare the two in an isolated process
(`sympy_worker`), which leaves nothing behind for the next pair; and an answer with the right value must not be a
formula copied from the prompt, nor a product of vectors or matrices in another order (`prompt`).
"""

from __future__ import annotations

import atexit
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from threading import Lock
from types import TracebackType

from explorl.sandbox.isolated_call import IsolatedFunction, IsolatedResult, IsolationLimits
from explorl.tasks.math import form
from explorl.tasks.math import prompt as math_prompt
from explorl.tasks.math.answer_text import MAX_LENGTH, normalize, parse_numeral
from explorl.tasks.math.vectors import same_products

Pair = tuple[str, str]
"""The right answer, and the answer to judge."""

_WORKER = "explorl.tasks.math.sympy_worker:compare"
_MAX_CACHED = 1 << 16


@dataclass(frozen=True)
class Judgement:
    """True if an answer equals the right one, and an error if it could not be compared."""

    same: bool
    error: str | None = None
    seconds: float = 0.0
    """Processor time of the comparison in a worker."""


class Judge:
    """Judges answers in isolated workers, started when first needed. Usable from several threads and forks."""

    def __init__(self, workers: int | None = None, limit: float = 5.0) -> None:
        """Set up the workers, without starting them, and the seconds of processor time of each pair."""
        if not limit > 0:
            raise ValueError(f"limit={limit}: give the seconds that comparing two answers may take, like 5.0")
        self._isolated = IsolatedFunction(_WORKER, workers=workers, limits=IsolationLimits(seconds=limit))
        self._cache: dict[Pair, Judgement] = {}
        self._lock = Lock()

    @property
    def workers(self) -> int:
        return self._isolated.workers

    def judge(self, gold: str, answer: str, prompt: str = "") -> Judgement:
        """Judge one answer, given the text of the problem."""
        return self.judge_many([(gold, answer)], [prompt])[0]

    def judge_many(self, pairs: Iterable[Pair], prompts: Iterable[str] | None = None) -> list[Judgement]:
        """Judge answers with all workers in parallel. The same pair is judged once, and remembered.

        ``prompts`` are the texts of the problems: an answer that repeats a formula of its prompt is refused if the
        right answer has another form (`prompt`).
        """
        pairs = list(pairs)
        prompts = [""] * len(pairs) if prompts is None else prompts
        results = {pair: self._cache.get(pair) or judge_locally(*pair) for pair in dict.fromkeys(pairs)}
        results |= self._compare([pair for pair, judgement in results.items() if judgement is None])
        judgements = {pair: judgement for pair, judgement in results.items() if judgement is not None}
        if len(self._cache) + len(judgements) > _MAX_CACHED:
            self._cache = {}
        self._cache |= judgements
        return [_unless_refused(judgements[pair], *pair, prompt) for pair, prompt in zip(pairs, prompts, strict=True)]

    def close(self) -> None:
        """End the workers; the next pair starts new ones."""
        self._isolated.close()

    def __enter__(self) -> Judge:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _compare(self, pairs: Sequence[Pair]) -> dict[Pair, Judgement | None]:
        try:
            messages = [_message(*pair) for pair in pairs]
            replies = self._isolated.call_many(messages, [message["gold"] for message in messages]) if pairs else []
        except ImportError as error:
            raise ImportError(f"judging answers needs math-verify ({error}); pip install math-verify") from None
        return {pair: _judgement(reply) for pair, reply in zip(pairs, replies, strict=True)}


def _unless_refused(judgement: Judgement, gold: str, answer: str, prompt: str) -> Judgement:
    """Return the judgement, or a refusal of a right value without the form that the prompt asks for.

    A product like -b × a, which is not a × b if all symbols commute, is accepted here.
    """
    is_different = not judgement.same and judgement.error in (None, form.DIFFERENT)
    if is_different and "\\times" in gold and same_products(prompt, gold, answer):
        judgement = Judgement(True, seconds=judgement.seconds)
    reason = math_prompt.refusal_reason(prompt, gold, answer) if judgement.same and answer != gold else None
    return judgement if reason is None else Judgement(False, reason, judgement.seconds)


def _message(gold: str, answer: str) -> dict[str, object]:
    gold_text, answer_text = form.worker_texts(gold, answer)
    return {"gold": gold_text, "answer": answer_text}


def _judgement(reply: IsolatedResult) -> Judgement:
    if reply.error is None:
        return Judgement(reply.value is True, seconds=reply.seconds)
    error = reply.error.removeprefix("raised ValueError: ")
    return Judgement(False, f"the comparison {error}" if error == reply.error else error, reply.seconds)


def judge_locally(gold: str, answer: str) -> Judgement | None:
    """Judge a pair without a worker: equal normal forms, two numbers, no answer, a bad form. Else return None."""
    if len(answer) > MAX_LENGTH:
        return Judgement(False, f"the answer is longer than {MAX_LENGTH:,} characters")
    normal_form = normalize(answer)
    if not normal_form:
        return Judgement(False, "the answer is empty")
    if answer == gold:
        return Judgement(True)
    numbers = parse_numeral(gold), parse_numeral(answer)
    if None not in numbers:
        return Judgement(numbers[0] == numbers[1])
    if (reason := form.refusal_reason(gold, answer)) is not None:
        return Judgement(False, reason)
    gold_text, answer_text = form.worker_texts(gold, answer)
    return Judgement(True) if gold_text == answer_text or normal_form == normalize(gold) else None


@lru_cache
def shared_judge(workers: int | None, limit: float) -> Judge:
    """Return this process's judge with these settings; it is closed when Python exits."""
    judge = Judge(workers, limit)
    atexit.register(judge.close)
    return judge
