r"""Compare Explorl's judge of mathematical answers with math-verify: wrong verdicts of both kinds, and time.

    python benchmarks/judges.py                          both judges on benchmarks/judges_corpus.jsonl
    python benchmarks/judges.py --half tuned --failures  the answers of one half that Explorl's judge gets wrong
    python benchmarks/judges.py --markdown FILE          also write the table for docs/evaluation.md

A line of the corpus is one answer to a problem: the problem, the right answer (truth), the answer to judge, whether it
is right, the kind of variant, and its half. The answers of the half "held-out" were written before the judge was tuned
on the half "tuned", and nobody looked at single verdicts on them. An answer is judged as the content of the last box of
a completion, or as a completion if it has boxes of its own.

math-verify parses both the truth and the completion with its default settings and a limit of 5 seconds.
"""

from __future__ import annotations

import argparse
import json
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from explorl.stats import Table
from explorl.tasks.base import Problem
from explorl.tasks.math.task import Math

CORPUS = Path(__file__).with_name("judges_corpus.jsonl")
HALVES = ("tuned", "held-out")
LIMIT = 5
CHUNK = 100


class Case(NamedTuple):
    """An answer of the corpus."""

    problem: str
    truth: str
    answer: str
    right: bool
    kind: str
    half: str

    @property
    def completion(self) -> str:
        """What a policy writes who gives this answer."""
        return self.answer if r"\boxed" in self.answer else rf"So the answer is $\boxed{{{self.answer}}}$."


Judging = Callable[[Sequence[Case]], list[bool]]


def read_corpus(path: Path = CORPUS) -> list[Case]:
    return [Case(**json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]


def judge(cases: Sequence[Case]) -> list[bool]:
    """Return Explorl's verdicts, with one worker."""
    task = Math(workers=1, limit=LIMIT)
    problems = [Problem("x", {"question": case.problem, "answer": case.truth}) for case in cases]
    return [verdict.correct for verdict in task.verify_many([case.completion for case in cases], problems)]


def math_verify(cases: Sequence[Case]) -> list[bool]:
    """Return math-verify's verdicts."""
    from math_verify import parse, verify

    def verdict(case: Case) -> bool:
        truth, answer = (parse(text, parsing_timeout=LIMIT) for text in (rf"\boxed{{{case.truth}}}", case.completion))
        return bool(verify(truth, answer, timeout_seconds=LIMIT))

    return list(map(verdict, cases))


def timed(judges: Mapping[str, Judging], cases: Sequence[Case]) -> dict[str, tuple[list[bool], float]]:
    """Return each judge's verdicts and seconds per answer. The judges take turns, so what else runs slows all down."""
    verdicts: dict[str, list[bool]] = {name: [] for name in judges}
    seconds = dict.fromkeys(judges, 0.0)
    for first in range(0, len(cases), CHUNK):
        for name, function in judges.items():
            start = time.perf_counter()
            verdicts[name] += function(cases[first : first + CHUNK])
            seconds[name] += time.perf_counter() - start
    return {name: (verdicts[name], seconds[name] / len(cases)) for name in judges}


def wrong_verdicts(cases: Sequence[Case], verdicts: Sequence[bool]) -> list[Case]:
    return [case for case, verdict in zip(cases, verdicts, strict=True) if verdict != case.right]


def share(part: int, whole: int) -> str:
    return f"{part} of {whole} ({100 * part / max(whole, 1):.1f} %)"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", type=Path, default=CORPUS)
    parser.add_argument("--half", choices=HALVES, help="only this half")
    parser.add_argument("--failures", action="store_true", help="print the wrong verdicts of Explorl's judge")
    parser.add_argument("--only-explorl", action="store_true", help="leave math-verify out")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the table as Markdown")
    args = parser.parse_args()
    logging.disable(logging.CRITICAL)  # math-verify logs each answer that it cannot parse
    judges = {"Explorl": judge} if args.only_explorl else {"Explorl": judge, "math-verify": math_verify}
    warm_up = [Case("Add.", "2k+2", answer, True, "", "") for answer in ("2(k+1)", "k+k+2", "2k+3")]
    for function in judges.values():
        function(warm_up)
    rows: list[list[str]] = []
    for half in [args.half] if args.half else HALVES:
        cases = [case for case in read_corpus(args.corpus) if case.half == half]
        total = Counter(case.right for case in cases)
        for name, (verdicts, seconds) in timed(judges, cases).items():
            wrong = wrong_verdicts(cases, verdicts)
            counts = Counter(case.right for case in wrong)
            rates = [share(counts[right], total[right]) for right in (True, False)]
            rows.append([half, name, *rates, f"{1e3 * seconds:.1f}"])
            if args.failures and name == "Explorl":
                for case in wrong:
                    print("false reject" if case.right else "FALSE ACCEPT", *case[:3], case.kind, sep=" | ")
    table = Table(["half", "judge", "false rejects", "false accepts", "ms per answer"], rows, title="Judges")
    table.print()
    if args.markdown is not None:
        table.write(args.markdown)


if __name__ == "__main__":
    main()
