"""Measure the speed of verifiers: completions per second with one worker and with one per core.

    python benchmarks/verify.py                         Countdown, and programs against tests
    python benchmarks/verify.py --data-dir FOLDER       with math500.jsonl and humaneval.jsonl: also those

Countdown completions are random expressions, verified by one process. Math pairs compare an answer of MATH-500 with the
next problem's answer, rewritten so that no pair is decided by its text alone. Programs are HumanEval's own solutions,
or one small function.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from explorl.sandbox.programs import capabilities, in_threads, run_tests
from explorl.stats import Table
from explorl.tasks import get_task
from explorl.tasks.math.judge import Judge

CORES = len(os.sched_getaffinity(0))


def countdown(count: int) -> dict[str, Any]:
    """Return random expressions of the given numbers, with errors in three of ten."""
    task = get_task("countdown-mini")
    problems = task.problems("holdout", limit=500)
    rng = random.Random(0)
    texts, chosen = [], []
    for index in range(count):
        problem = problems[index % len(problems)]
        expression = "".join(f"{number}{rng.choice('+-*/')}" for number in problem.data["nums"])[:-1]
        text = f"<think>{expression}</think><answer>{expression}</answer>"
        cut = rng.randrange(len(text))
        texts.append(text if rng.random() < 0.7 else text[:cut] + rng.choice("()+*/=<>x ") + text[cut:])
        chosen.append(problem)
    return timed("countdown", count, 1, lambda: [task.verify(*pair) for pair in zip(texts, chosen, strict=True)])


def mathematics(folder: Path, workers: int) -> dict[str, Any]:
    answers = [json.loads(line)["answer"] for line in (folder / "math500.jsonl").read_text().splitlines()]
    pairs = [(a, f"x = {b}") for a, b in zip(answers, answers[1:] + answers[:1], strict=True)]
    judge = Judge(workers=workers)
    judge.judge_many([("2k+2", "2(k+1)"), ("2k+2", "2(k+2)"), ("2k", "3k")] * workers)  # start the workers
    return timed("math", len(pairs), workers, lambda: judge.judge_many(pairs))


def programs(folder: Path | None, workers: int, count: int) -> dict[str, Any]:
    if folder is not None:
        task = get_task("code", data_dir=folder, workers=workers)
        problems = task.problems("holdout")
        texts = [problem.data["canonical_solution"] for problem in problems]
        return timed("code: HumanEval", len(problems), workers, lambda: task.verify_many(texts, problems))

    def run(_: int) -> Any:
        return run_tests("def f(x): return x", "def check(c): assert c(1) == 1", entry_point="f")

    return timed("code: one function", count, workers, lambda: in_threads(run, range(count), workers=workers))


def timed(name: str, count: int, workers: int, run: Callable[[], Any]) -> dict[str, Any]:
    start = time.perf_counter()
    run()
    seconds = time.perf_counter() - start
    return {"verifier": name, "workers": workers, "completions": count, "seconds": seconds, "rate": count / seconds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path, help="folder with math500.jsonl and humaneval.jsonl")
    parser.add_argument("--completions", type=int, default=100_000, help="number of Countdown completions")
    parser.add_argument("--programs", type=int, default=200, help="number of runs of the function")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    print(f"sandbox: {', '.join(capabilities().layers)} and limits")  # also starts the fork server
    results = [countdown(args.completions)]
    counts = sorted({1, CORES})
    if args.data_dir is not None:
        results += [mathematics(args.data_dir, workers) for workers in counts]
        results += [programs(args.data_dir, workers, 0) for workers in counts]
    results += [programs(None, workers, args.programs) for workers in counts]
    columns = ["verifier", "workers", "completions", "seconds", "rate"]
    rows = [[result[column] for column in columns] for result in results]
    table = Table([*columns[:-1], "completions/s"], rows, title=f"{CORES} cores", number=".1f")
    table.print()
    if args.json is not None:
        table.write(args.json)


if __name__ == "__main__":
    main()
