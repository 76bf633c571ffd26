"""Judge: whether two mathematical answers say the same, in bounded time, whatever they are.

math-verify (Hugging Face, 2024) compares them in worker processes that are started once and kept. A pair that takes
longer than the limit costs its worker, which is killed and replaced, and nothing else.
"""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
import time
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from multiprocessing.connection import wait
from pathlib import Path
from threading import Lock
from types import TracebackType
from typing import Any

from explorl.tasks.math_normal import MAX_LENGTH, mended, normal, numeral

Pair = tuple[str, str]
"""The right answer, and the one to judge."""

_WORKER = Path(__file__).with_name("math_worker.py")
_START_LIMIT = 120.0  # importing sympy from a cold network disk
_STARTS = 3
_REMEMBERED = 1 << 16


@dataclass(frozen=True)
class Judgement:
    """Whether an answer says the same as the right one; if it could not be told, why."""

    same: bool
    error: str | None = None
    seconds: float = 0.0
    """Time that a worker took over it."""


class Judge:
    """A pool of worker processes, started when first needed. Usable from several threads; each fork starts its own."""

    def __init__(self, workers: int | None = None, limit: float = 5.0, memory: int = 2 << 30) -> None:
        if workers is not None and workers < 1:
            raise ValueError(f"workers={workers}: give 1 or more, or None for one a core, at most 8")
        if not limit > 0:
            raise ValueError(f"limit={limit}: give the seconds that a pair of answers may take, like 5.0")
        self.workers = min(os.cpu_count() or 1, 8) if workers is None else workers
        self.limit = limit
        self.memory = memory
        self._pool: list[_Worker] = []
        self._failed_starts = 0
        self._known: dict[Pair, Judgement] = {}
        self._lock = Lock()
        self._process = os.getpid()

    def judge(self, gold: str, answer: str) -> Judgement:
        """Judge one answer."""
        return self.judge_many([(gold, answer)])[0]

    def judge_many(self, pairs: Iterable[Pair]) -> list[Judgement]:
        """Judge answers with all workers at once. The same pair is judged once, and remembered."""
        pairs = list(pairs)
        if self._process != os.getpid():  # the pipes are the parent's, and so is the thread that may hold the lock
            self._pool, self._lock, self._process = [], Lock(), os.getpid()
        with self._lock:
            judged = {pair: self._known.get(pair) or at_once(*pair) for pair in dict.fromkeys(pairs)}
            judged |= self._compare([pair for pair, judgement in judged.items() if judgement is None])
            if len(self._known) + len(judged) > _REMEMBERED:
                self._known.clear()
            self._known |= {pair: judgement for pair, judgement in judged.items() if judgement is not None}
        return [judgement for pair in pairs if (judgement := judged[pair]) is not None]

    def close(self) -> None:
        """End the workers; the next pair starts new ones."""
        if self._process == os.getpid():
            for worker in self._pool:
                worker.kill()
        self._pool = []

    def __enter__(self) -> Judge:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _compare(self, pairs: Sequence[Pair]) -> dict[Pair, Judgement]:
        try:
            return self._compare_in_pool(pairs)
        except BaseException:
            self.close()  # a worker that still owes a reply would give it to the next pair
            raise

    def _compare_in_pool(self, pairs: Sequence[Pair]) -> dict[Pair, Judgement]:
        waiting = deque(pairs)
        crashes: Counter[Pair] = Counter()
        judged: dict[Pair, Judgement] = {}
        while len(judged) < len(pairs):
            while len(self._pool) < min(self.workers, len(pairs) - len(judged)):
                self._pool.append(_Worker(self.limit, self.memory))
            for worker in self._pool:
                if waiting and worker.is_idle:
                    worker.take(waiting.popleft())
            for worker, reply in self._replies():
                pair, seconds = worker.pair, worker.seconds
                if isinstance(reply, dict):
                    if "missing" in reply:
                        raise ImportError(
                            f"judging answers needs math-verify ({reply['missing']}); pip install math-verify"
                        )
                    self._failed_starts = 0
                    worker.rest()
                    if pair is not None:
                        judged[pair] = Judgement(bool(reply["same"]), seconds=seconds)
                    continue
                worker.kill()
                self._pool[self._pool.index(worker)] = _Worker(self.limit, self.memory)
                if pair is None:
                    self._failed_starts += 1
                    if self._failed_starts >= _STARTS:
                        raise RuntimeError(
                            f"{_WORKER.name} does not start: it {reply}, {_STARTS} times; run it by hand"
                        )
                elif reply == "crashed" and not crashes[pair]:
                    crashes[pair] += 1  # it may have been dead before it got the pair
                    waiting.appendleft(pair)
                else:
                    judged[pair] = Judgement(False, f"the comparison {reply}", seconds)
        return judged

    def _replies(self) -> list[tuple[_Worker, dict[str, Any] | str]]:
        """Wait until workers have replied, crashed or used up their time; what each did."""
        expected = [worker for worker in self._pool if not worker.is_idle]
        rest = min(worker.deadline for worker in expected) - time.monotonic()
        readable = set(wait([worker.fileno() for worker in expected], max(rest, 0.0)))
        replies: list[tuple[_Worker, dict[str, Any] | str]] = []
        for worker in expected:
            if worker.fileno() in readable:
                reply = worker.read()
                if reply is not None:
                    replies.append((worker, reply))
            elif time.monotonic() >= worker.deadline:
                replies.append((worker, "took too long"))
        return replies


def at_once(gold: str, answer: str) -> Judgement | None:
    """The judgement on a pair that needs no comparison: equal normal forms, two numbers, no answer."""
    if len(answer) > MAX_LENGTH:
        return Judgement(False, f"the answer is longer than {MAX_LENGTH:,} characters")
    said = normal(answer)
    if not said:
        return Judgement(False, "the answer is empty")
    if said == normal(gold):
        return Judgement(True)
    # "1 2" is 3 to math-verify, a mixed number.
    if said.replace(" ", "").isdigit() and " " in said:
        return Judgement(False)
    return Judgement(False) if numeral(gold) and numeral(answer) else None


@lru_cache
def shared_judge(workers: int | None, limit: float) -> Judge:
    """One judge a process for all that ask with the same numbers; ended when Python ends."""
    judge = Judge(workers, limit)
    atexit.register(judge.close)
    return judge


class _Worker:
    """One process, which takes one pair at a time."""

    def __init__(self, limit: float, memory: int) -> None:
        self._limit = limit
        # -P: this folder's math.py must not stand before Python's own. The hash seed: sympy orders terms by hash.
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(_WORKER), str(limit + 2), str(memory)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            env={**os.environ, "PYTHONHASHSEED": "0"},
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._stdin, self._stdout = self._process.stdin, self._process.stdout
        self._read = b""
        self._begun = time.monotonic()
        self.deadline = self._begun + _START_LIMIT
        self.is_idle = False
        self.pair: Pair | None = None

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._begun

    def fileno(self) -> int:
        return self._stdout.fileno()

    def take(self, pair: Pair) -> None:
        gold, answer = pair
        number = numeral(gold)
        shift = -number.magnitude if number and number.magnitude < -3 else 0
        self.pair, self.is_idle = pair, False
        self._begun = time.monotonic()
        self.deadline = self._begun + self._limit
        message = {"gold": mended(gold), "answer": mended(answer), "shift": shift}
        with suppress(OSError):  # if it is dead, reading from it will tell
            self._stdin.write(json.dumps(message).encode() + b"\n")

    def rest(self) -> None:
        self.pair, self.is_idle = None, True

    def read(self) -> dict[str, Any] | str | None:
        """Its reply, "crashed", or None if there is only a part of a reply."""
        chunk = os.read(self.fileno(), 1 << 16)
        self._read += chunk
        if not chunk:
            return "crashed"
        if not self._read.endswith(b"\n"):
            return None
        line, self._read = self._read, b""
        reply: dict[str, Any] = json.loads(line)
        return reply

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        self._stdin.close()
        self._stdout.close()
