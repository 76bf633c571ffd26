"""Answers to problems of reasoning-gym are scored shut in: what they do stays there, and ends."""

from __future__ import annotations

import gc
import json
import os
import random
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("reasoning_gym")

from reasoning_gym.factory import DATASETS

from explorl.sandbox.isolated_call import IsolatedResult, IsolationLimits
from explorl.tasks import Problem
from explorl.tasks.gym.score import Scorer, _to_score, shared_scorer
from explorl.tasks.gym.task import Gym
from explorl.tasks.gym.worker import create_dataset, score_answer
from tests.tasks.test_fuzz import completions
from tests.tasks.test_gym import NO_DEFAULTS, SLOW, WITHOUT_ANSWER

SIZES = {"sft": 0, "train": 8, "holdout": 0}


def gym(name: str, **options: Any) -> Gym:
    task = Gym(f"gym:{name}", **{"sizes": SIZES, "allow_exploitable": True, **options})
    task._scorer._isolated.workers = 1  # each takes as long to start as the test
    return task


def said(answer: str) -> str:
    return f"<think>so</think><answer>{answer}</answer>"


# What a scorer says ---------------------------------------------------------------------------------------------------


def test_many_at_once() -> None:
    task = gym("chain_sum")
    problems = task.problems("train")
    texts: list[str | bytes] = [said(problem.data["answer"]) for problem in problems]
    texts[1], texts[2], texts[3] = said("no"), "nothing", b"\xff<answer>1</answer>"
    verdicts = task.verify_many(texts, problems)
    assert [verdict.correct for verdict in verdicts] == [True, False, False, False, True, True, True, True]
    assert [verdict.well_formed for verdict in verdicts] == [True, True, False, False, True, True, True, True]
    assert [verdict.error for verdict in verdicts[:4]] == [None, "it scores 0", "no <answer>…</answer>", "it scores 0"]
    assert verdicts == [task.verify(text, problem) for text, problem in zip(texts, problems, strict=True)]
    parts = task.rewards_many(texts, problems, opened=[False] * 8)
    assert parts == [task.rewards(text, problem) for text, problem in zip(texts, problems, strict=True)]
    assert [part["correctness"] for part in parts] == [float(verdict.correct) for verdict in verdicts]
    assert task.verify_many([], []) == []
    with pytest.raises(ValueError, match="zip"):
        task.verify_many(texts, problems[:-1])


def test_reward_functions_send_a_batch_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    task = gym("chain_sum")
    rows = task.rows("train")
    batches = []
    score = task._scorer.score

    def counted(answers: Any) -> Any:
        batches.append(len(answers))
        return score(answers)

    monkeypatch.setattr(task._scorer, "score", counted)
    columns = {key: [row[key] for row in rows] for key in ("id", "data", "opened")}
    texts = [said(row["data"]["answer"]) for row in rows]
    rewards = [reward([row["prompt"] for row in rows], texts, **columns) for reward in task.reward_functions()]
    assert rewards == [[1.0] * 8, [1.0] * 8]
    assert batches == [8]


def test_an_answer_is_scored_once(monkeypatch: pytest.MonkeyPatch) -> None:
    scorer = Scorer({})
    sent = []

    def call_many(messages: Any) -> list[IsolatedResult]:
        sent.extend(messages)
        return [IsolatedResult([int(message["answer"]), None]) for message in sent]

    monkeypatch.setattr(scorer._isolated, "call_many", call_many)
    entry = {"question": "?", "answer": "1", "metadata": "{}"}
    other = {**entry, "answer": "2"}
    answers = [("1", entry), ("0", entry), ("1", entry), ("1", other), ("1" * 10_001, entry)]
    too_long = (0.0, "an answer of over 10000 characters")
    assert scorer.score(answers) == [(1.0, None), (0.0, None), (1.0, None), (1.0, None), too_long]
    assert len(sent) == 3


@pytest.mark.parametrize(
    ("reply", "score"),
    [
        (IsolatedResult([0.5, None]), (0.5, None)),
        (IsolatedResult([9, None]), (1.0, None)),
        (IsolatedResult([-1, "odd\ud800"]), (0.0, "odd\ufffd")),
        (IsolatedResult(error="took too long"), (0.0, "the scorer took too long")),
        *(
            (IsolatedResult(value), (0.0, "the scorer gave no number"))
            for value in (None, 1, [], [1], "ab", ["x", 1], [{}, 1])
        ),
        (IsolatedResult([float("nan"), None]), (0.0, "the scorer gave no number")),
        (IsolatedResult([10**400, None]), (0.0, "the scorer gave no number")),
    ],
)
def test_any_reply_is_a_score(reply: IsolatedResult, score: tuple[float, str | None]) -> None:
    assert _to_score(reply) == score


def test_text_that_cannot_be_written() -> None:
    task = gym("string_insertion")
    problem = task.problems("train", limit=1)[0]
    for text in ("a\ud800b", "\x1b[2J", "a\0b", "\u202eabc", "é中"):
        verdict = task.verify(said(text), problem)
        assert not verdict.correct
        assert str(verdict.answer).encode()
        assert str(verdict.answer).isprintable()


def test_lines_of_other_systems() -> None:
    task = gym("mini_sudoku")
    problem = task.problems("train", limit=1)[0]
    assert task.verify(said(problem.data["answer"].replace("\n", "\r\n")), problem).correct


# Many data sets -------------------------------------------------------------------------------------------------------


def everything(names: list[str]) -> tuple[Gym, dict[str, Problem]]:
    """A composite of data sets, and a problem of each of them."""
    parts = [{"name": name, "weight": 1, "config": {}} for name in names]
    task = gym("composite", config={"datasets": parts}, sizes={})
    return task, {name: task.problem(create_dataset(name, {}, seed=0, size=1)[0]) for name in names}


def test_right_answers_of_many_data_sets_at_once() -> None:
    names = sorted(set(DATASETS) - SLOW - NO_DEFAULTS - WITHOUT_ANSWER)
    task, problems = everything(names[::5])
    verdicts = task.verify_many([said(p.data["answer"]) for p in problems.values()], list(problems.values()))
    assert {name for name, verdict in zip(problems, verdicts, strict=True) if not verdict.correct} == set()
    wrong = task.verify_many([said("\0 no answer")] * len(problems), list(problems.values()))
    easy = {name for name, verdict in zip(problems, wrong, strict=True) if verdict.correct}
    assert easy <= {"game_of_life_halting"}


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(DATASETS) - NO_DEFAULTS))
def test_shut_in_scores_are_the_same(name: str) -> None:
    dataset = create_dataset(name, {}, seed=0, size=4)
    entries = [dataset[index] for index in range(1 if name in SLOW else 4)]
    task = gym(name)
    texts = [*(entry["answer"] for entry in entries), "0", "nan", "[]", "x + 1", "True"]
    pairs = [(text, entry) for text in texts if text is not None for entry in entries]
    scores = task._scorer.score([(text, task.problem(entry).data) for text, entry in pairs])
    assert scores == [score_answer(dataset, text, entry) for text, entry in pairs]


# Hostile answers ------------------------------------------------------------------------------------------------------


def test_answers_that_never_end() -> None:
    task, problems = everything(["rush_hour", "simple_integration", "coin_flip"])
    task._scorer._isolated.limits = IsolationLimits(seconds=0.5)
    rush, integral, coin = problems.values()
    answers = [
        ("A+999999999999", rush),
        ("1e999999999", coin),
        ("sin(exp(999999999999))", integral),
        (coin.data["answer"], coin),
    ]
    verdicts = task.verify_many([said(answer) for answer, _ in answers], [problem for _, problem in answers])
    assert [verdict.correct for verdict in verdicts] == [False, False, False, True]
    assert verdicts[0].error == "the scorer took too long"
    assert verdicts[1].error in ("the scorer took too long", "the scorer ran out of memory")


NAIVE = """
import os
from dataclasses import dataclass
from reasoning_gym.factory import ProceduralDataset, register_dataset

@dataclass
class NaiveConfig:
    size: int = 5
    seed: int = 0
    top: int = 9

class NaiveDataset(ProceduralDataset):
    right = "unknown"
    def __init__(self, config):
        super().__init__(config=config, seed=config.seed, size=config.size)
    def __getitem__(self, index):
        metadata = {"source_dataset": "naive", "source_index": index}
        return {"question": f"{self.seed + index} ?", "answer": str(index % self.config.top), "metadata": metadata}
    def score_answer(self, answer, entry):
        if answer.startswith("run "):
            exec(answer[4:], {"dataset": self, "entry": entry})
        if answer.startswith("eval "):
            eval(answer[5:])
        return float(answer == entry["answer"] or answer == self.right)

register_dataset("naive", NaiveDataset, NaiveConfig)
"""


@pytest.fixture(scope="module")
def naive(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gym]:
    """A data set of a user's own, whose scorer runs what it is told; as a part of a composite."""
    folder = tmp_path_factory.mktemp("project")
    (folder / "naive_gym.py").write_text(NAIVE)
    with pytest.MonkeyPatch.context() as patched:
        patched.syspath_prepend(folder)
        import naive_gym  # type: ignore[import-not-found]  # noqa: F401

        parts = [{"name": "chain_sum", "weight": 1, "config": {}}, {"name": "naive", "weight": 3, "config": {"top": 3}}]
        yield gym("composite", config={"datasets": parts})
    del DATASETS["naive"], sys.modules["naive_gym"]


def first(task: Gym) -> Problem:
    """The first problem of the naive part."""
    return next(problem for problem in task.problems("train") if "?" in problem.data["question"][-2:])


def test_data_sets_of_ones_own(naive: Gym) -> None:
    problems = naive.problems("train")
    assert {json.loads(problem.data["metadata"])["dict"][0][1] for problem in problems} == {"chain_sum", "naive"}
    assert all(verdict.correct for verdict in naive.verify_many([said(p.data["answer"]) for p in problems], problems))
    assert not any(verdict.correct for verdict in naive.verify_many([said("7")] * 8, problems))


def test_an_answer_that_runs_reaches_nothing(naive: Gym, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_OF_A_TEST", "told")
    (tmp_path / "secret").write_text("told")
    problem = first(naive)
    attempts = [
        f"open({str(tmp_path / 'made')!r}, 'w')",
        f"import os; os.system('touch {tmp_path / 'made'}')",
        f"import os; raise ValueError(open({str(tmp_path / 'secret')!r}).read())",
        "import os; raise ValueError(os.environ['SECRET_OF_A_TEST'])",
        f"import os; os.kill({os.getpid()}, 9)",
        "import os; os.kill(os.getppid(), 9)",
        "import os; os.kill(-1, 9)",
        "import os; os.fork()",
        "import socket; socket.create_connection(('127.0.0.1', 1))",
        "import os; os._exit(0)",
        "import sys; sys.exit(0)",
        "import os; os.write(1, b'[1.0, null]'); os.close(1)",
        "raise KeyboardInterrupt",
        "import resource; resource.setrlimit(resource.RLIMIT_AS, (-1, -1))",
        "dataset.data = bytearray(1 << 40)",
        "x = [0]\nwhile True: x += x",
        "def f(): f()\nf()",
        "import ctypes; ctypes.string_at(0)",
    ]
    verdicts = naive.verify_many([said(f"run {attempt}") for attempt in attempts], [problem] * len(attempts))
    for attempt, verdict in zip(attempts, verdicts, strict=True):
        assert not verdict.correct, attempt
        assert "told" not in (verdict.error or ""), attempt
    assert not (tmp_path / "made").exists()
    assert naive.verify(said(problem.data["answer"]), problem).correct


def test_no_answer_changes_the_next(naive: Gym) -> None:
    problem = first(naive)
    attempts = [
        "type(dataset).right = '7'",
        "dataset.right = '7'",
        "type(dataset).score_answer = lambda *_: 1.0",
        "from explorl.tasks.gym import worker; worker.score_answer = lambda *_: (1.0, None)",
        "from explorl.tasks.gym import worker; worker._prepared.clear()",
        "import builtins; builtins.float = lambda _: 1.0",
        "import json; json.loads = json.dumps = None",
        "import sys; sys.modules.clear()",
    ]
    texts = [text for attempt in attempts for text in (said(f"run {attempt}"), said("7"), said(problem.data["answer"]))]
    verdicts = naive.verify_many(texts, [problem] * len(texts))
    assert [verdict.correct for verdict in verdicts[1::3]] == [False] * len(attempts)
    assert [verdict.correct for verdict in verdicts[2::3]] == [True] * len(attempts)


def test_eval_in_a_part_of_a_composite_is_guarded(naive: Gym) -> None:
    problem = first(naive)
    verdict = naive.verify(said("eval __import__('os').getpid()"), problem)
    assert (verdict.error or "").startswith("the scorer raised ValueError: not a plain value")


# Processes ------------------------------------------------------------------------------------------------------------


def test_equal_tasks_share_their_scorer() -> None:
    first, second = gym("chain_sum", config={"min_terms": 2, "max_terms": 3}), gym("chain_sum", seed=4, threshold=0.5)
    assert first._scorer is gym("chain_sum", config={"max_terms": 3, "min_terms": 2})._scorer
    assert second._scorer is gym("chain_sum")._scorer
    assert first._scorer is not second._scorer


def test_processes_end_with_the_last_task() -> None:
    scorer = shared_scorer("gcd", {})
    entry = create_dataset("gcd", {}, seed=0, size=1)[0]
    data = gym("gcd").problem(entry).data
    assert scorer.score([(entry["answer"], data)]) == [(1.0, None)]
    (pid,) = [worker.pid for worker in scorer._isolated._pool]
    os.kill(pid, 0)
    del scorer
    gc.collect()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_threads_and_forks() -> None:
    task = gym("gcd")
    task._scorer._isolated.workers = 2
    problems = task.problems("train")
    texts = [said(problem.data["answer"]) for problem in problems]
    verdicts: list[bool] = []

    def judge() -> None:
        verdicts.extend(verdict.correct for verdict in task.verify_many(texts, problems))

    threads = [threading.Thread(target=judge) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert verdicts == [True] * 24
    child = os.fork()
    if child == 0:
        os._exit(0 if all(verdict.correct for verdict in task.verify_many(texts, problems)) else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert all(verdict.correct for verdict in task.verify_many(texts, problems))


# Anything -------------------------------------------------------------------------------------------------------------


FUZZED = [
    *("chain_sum", "polynomial_multiplication", "propositional_logic", "countdown", "rush_hour", "graph_color"),
    *("power_function", "string_insertion", "tower_of_hanoi", "pool_matrix"),
]


def fuzz(names: list[str], count: int) -> None:
    task, problems = everything(names)
    task._scorer._isolated.workers = 2
    draw = random.Random(3)
    for name, problem in problems.items():
        good = said(problem.data["answer"] or "(A ∨ B)")
        texts = list(completions(draw.randrange(1 << 30), count // len(names), good))
        verdicts = task.verify_many(texts, [problem] * len(texts))
        for text, verdict in zip(texts, verdicts, strict=True):
            assert (verdict.error is None) is verdict.correct, (name, text)
            assert not (verdict.correct and "<answer>" not in str(text)), (name, text)


def test_some_completions() -> None:
    fuzz(FUZZED[:3], 150)


@pytest.mark.slow
def test_a_hundred_thousand_completions() -> None:
    fuzz(FUZZED, 100_000)
