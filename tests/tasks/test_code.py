"""Programs as answers: found in any text, run against tests, and right only when the tests say so."""

from __future__ import annotations

import json
import os
import random
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from explorl.core.text import clean
from explorl.sandbox import programs
from explorl.sandbox.fork_client import fork_server_client
from explorl.sandbox.programs import Guarantees, SandboxError, capabilities
from explorl.tasks import Problem
from explorl.tasks.code.extract import defines, extract_function, find_fences, split_prompt
from explorl.tasks.code.task import FILE, HUB_ID, Code

DATA = Path(__file__).parents[3] / "shared" / "data"

HEAD = """from typing import List


def largest(xs: List[int]) -> int:
    '''The largest of xs, or 0.
    >>> largest([1, 2])
    2
    '''
"""
BODY = "    if not xs:\n        return 0\n    return max(xs)\n"
OWN = [
    {
        "task_id": "own/0",
        "prompt": HEAD,
        "entry_point": "largest",
        "canonical_solution": BODY,
        "test": "def check(candidate):\n    assert candidate([3, 9, 2]) == 9\n    assert candidate([]) == 0, 'empty'\n",
    },
    {
        "task_id": "own/1",
        "prompt": "def half(x):\n    return x / 2\n\ndef quarter(x):\n",
        "entry_point": "quarter",
        "canonical_solution": "    return half(half(x))\n",
        "test": "def check(candidate):\n    for x in range(9):\n        assert candidate(x) == half(x) / 2\n",
    },
]


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Code:
    folder = tmp_path_factory.mktemp("code")
    (folder / FILE).write_text("".join(json.dumps(record) + "\n" for record in OWN))
    return Code(data_dir=folder, seconds=5)


@pytest.fixture(scope="module")
def largest(task: Code) -> Problem:
    return task.problems("holdout")[0]


# Problems and prompts -------------------------------------------------------------------------------------------------


def test_problems(task: Code) -> None:
    problems = task.problems("holdout")
    assert [problem.id for problem in problems] == ["code:own/0", "code:own/1"]
    assert problems[0].data == OWN[0]
    assert task.problems("holdout", limit=1) == problems[:1]
    with pytest.raises(ValueError, match="unknown split 'train'; known: holdout"):
        task.problems("train")
    with pytest.raises(ValueError, match="limit=-1"):
        task.problems("holdout", limit=-1)


def test_prompts(task: Code, largest: Problem) -> None:
    assert task.prompt(largest, "plain") == HEAD
    (message,) = task.prompt(largest)
    assert message["role"] == "user"  # type: ignore[index]
    content = message["content"]  # type: ignore[index]
    assert HEAD.strip() in content
    assert "one ```python block" in content
    assert "max(xs)" not in content
    with pytest.raises(ValueError, match="unknown template 'chatt'; did you mean 'chat'"):
        task.prompt(largest, "chatt")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt": None}, "line 1: prompt is None; give a line like"),
        ({"test": 3}, "line 1: test is 3"),
        ({"entry_point": "other"}, "line 1: the prompt does not define 'other'"),
        ({"test": "assert True"}, r"line 1: the test does not define check\(candidate\)"),
        ({"task_id": "own/1"}, "line 2: duplicate task_id 'own/1'"),
    ],
)
def test_bad_files(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    (tmp_path / FILE).write_text(json.dumps({**OWN[0], **change}) + "\n" + json.dumps(OWN[1]))
    with pytest.raises(ValueError, match=message):
        Code(data_dir=tmp_path).problems("holdout")


def test_no_data(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=f"no file {FILE} in"):
        Code(data_dir=tmp_path).problems("holdout")
    (tmp_path / FILE).write_text("\n")
    with pytest.raises(ValueError, match="no problems; give a file"):
        Code(data_dir=tmp_path).problems("holdout")
    with pytest.raises(ValueError, match="workers=0"):
        Code(workers=0)
    with pytest.raises(ValueError, match="seconds=-1"):
        Code(seconds=-1)


def test_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    requests = []

    def load(name: str, split: str) -> list[dict[str, str]]:
        requests.append((name, split))
        return OWN

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load))
    assert len(Code().problems("holdout")) == 2
    assert requests == [(HUB_ID, "test")]

    def fail(name: str, split: str) -> None:
        raise ConnectionError("offline")

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=fail))
    with pytest.raises(FileNotFoundError, match=r"cannot load .* \(offline\); give --data-dir, a folder with human"):
        Code().problems("holdout")


# Extraction -----------------------------------------------------------------------------------------------------------

WHOLE = HEAD + BODY


@pytest.mark.parametrize(
    "text",
    [
        BODY,
        "\n" + BODY,
        BODY.strip(),
        BODY + "\n\nprint(largest([1]))\n",
        BODY + "\ndef other():\n    pass\n",
        BODY + "\nclass A: pass",
        BODY + "\nif __name__ == '__main__':\n    main()",
        BODY + "\nThis function returns the largest.",
        WHOLE,
        WHOLE + "\nprint(largest([1]))",
        WHOLE + "\nassert largest([1]) == 1\n",
        "Here it is:\n" + WHOLE,
        f"```python\n{WHOLE}```",
        f"```\n{WHOLE}\n```\n",
        f"```py\n{WHOLE}\n```",
        f"```Python3\n{WHOLE}\n```",
        f"Text\n```python\n{WHOLE}\n```\nmore ``` text",
        f"```python\ndef largest(xs):\n    return 1/0\n```\nNo:\n```python\n{WHOLE}\n```\n```\nlargest([1])\n```",
        f"```python\n{WHOLE}\n```\nUse it:\n```bash\npython x.py\n```",
        f"```python\nbroken(\n```python\n{WHOLE}\n```",
        "1. So:\n   ```python\n" + "".join(f"   {line}\n" for line in WHOLE.split("\n")) + "   ```",
        f"```python\n{BODY}```",
        "```python\nreturn max(xs) if xs else 0\n```",
        f"<think>```python\ndef largest(xs): return 1\n```</think>\n```python\n{WHOLE}```",
        "def helper(xs):\n    return max(xs)\n\ndef largest(xs):\n    return helper(xs) if xs else 0\n",
        "```python\nfrom __future__ import annotations\ndef largest(xs):\n    return max(xs) if xs else 0\n```",
        "```python\nlargest = 3\ndef largest(xs):\n    return later(xs)\ndef later(xs):\n    return max([0, *xs])\n```",
        f"```python\n{WHOLE}\n```".encode(),
    ],
)
def test_finds_the_program(task: Code, largest: Problem, text: str | bytes) -> None:
    verdict = task.verify(text, largest)
    assert verdict.correct, (extract_function(str(text), HEAD, "largest"), verdict)
    assert verdict.error is None


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("", "no code"),
        (" \n\n", "no code"),
        ("```python\n```", "no code"),
        ("I do not know.", "SyntaxError: "),
        ("    return 7\n", "wrong answer: AssertionError"),
        ("    return max(xs)\n", "ValueError: max() arg is an empty sequence"),
        ("    return max(xs) if xs else None\n", "wrong answer: AssertionError: empty"),
        ("    return max(ys)\n", "NameError: name 'ys' is not defined"),
        ("```python\nclass A:\n    def largest(self, xs): return max(xs)\n```", "IndentationError: "),
        ("```python\ndef largest(xs):\n    return max(xs\n```", "SyntaxError: "),
        ("    while True: pass\n", "took over 0.5 s"),
        ("    return largest(xs)\n", "RecursionError: maximum recursion depth exceeded"),
        ("    return [0] * (1 << 40)\n", "used over 512 MiB"),
        ("    import os; os._exit(0)\n", "the program ended before the tests did"),
        ("    raise SystemExit(0)\n", "RuntimeError: SystemExit: 0"),
        ("```python\nimport sys\nsys.exit(0)\ndef largest(xs): return 0\n```", "SystemExit: 0"),
        ("    " + "x" * (1 << 16), "a program of over 65536 characters"),
        ("    raise ValueError('x' * 999)\n", "…"),
        ("    return '\ud800'\n", "UnicodeEncodeError"),
    ],
)
def test_says_what_is_wrong(task: Code, largest: Problem, text: str, error: str) -> None:
    if "while" in text:
        task = Code(data_dir=task.data_dir, seconds=0.5)
    verdict = task.verify(text, largest)
    assert not verdict.correct
    assert error in (verdict.error or "")
    assert len(verdict.error or "") < 300


@pytest.mark.parametrize(
    ("text", "opened", "well_formed"),
    [
        (f"Sure:\n```python\n{WHOLE}```\nDone.", False, True),
        (f"```python\n{WHOLE}```", True, False),
        (f"hm ```x``` </think>```python\n{WHOLE}```", True, True),
        (f"hm</think>\n```python\n{WHOLE}```", True, True),
        (BODY, False, False),
        (f"```python\n{BODY}```", False, False),
        (f"```python\n{WHOLE}", False, False),
        (f"```python\n{WHOLE}```\n```python\n{WHOLE}```", False, False),
        (f"```python\n{WHOLE}```\n```text\nok\n```", False, False),
        ("x" * (1 << 20) + f"\n```python\n{WHOLE}```", False, False),
    ],
)
def test_form(task: Code, largest: Problem, text: str, opened: bool, well_formed: bool) -> None:
    assert task.verify(text, largest, opened=opened).well_formed is well_formed


def test_answers_that_say_the_same_are_equal(task: Code, largest: Problem) -> None:
    texts = [BODY, f"```python\n{WHOLE}```", f"```python\n{WHOLE.replace('return 0', 'return (0)  # none')}```"]
    answers = {verdict.answer for verdict in task.verify_many(texts, [largest] * 3)}
    assert answers == {"def largest(xs: List[int]) -> int:\n    if not xs:\n        return 0\n    return max(xs)"}
    assert task.verify("    return (\n", largest).answer == (HEAD + "    return (").removeprefix(
        "from typing import List\n\n\n"
    )


def test_many(task: Code) -> None:
    problems = task.problems("holdout")
    texts = [BODY, "    return half(half(x))", "    return 1"]
    verdicts = task.verify_many(texts, [*problems, problems[0]], opened=[False] * 3)
    assert [verdict.correct for verdict in verdicts] == [True, True, False]
    assert verdicts == [
        task.verify(text, problem) for text, problem in zip(texts, [*problems, problems[0]], strict=True)
    ]
    assert task.verify_many([], []) == []
    with pytest.raises(ValueError, match="1 completions, 2 problems, 1 flags"):
        task.verify_many([BODY], problems)
    assert task.rewards(f"```python\n{WHOLE}```", problems[0]) == {"correctness": 1.0, "format": 1.0}


SPINNER = """    import os
    for _ in range(7):
        if os.fork() == 0:
            os.setsid()
            break
    while True: pass
"""
"""Eight processes, each in a session of its own, for which some kernels give it as much as eight programs."""


def test_spinners_beside_it_do_not_fail_an_honest_program(task: Code, largest: Problem) -> None:
    if "namespaces" not in capabilities().layers:
        pytest.skip("programs have one process here")
    slow = "    import time\n    end = time.process_time() + 0.15\n    while time.process_time() < end: pass\n"
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})  # what is started now keeps to it
    try:
        fork_server_client.close()
        texts = [SPINNER, slow + BODY, SPINNER]
        verdicts = Code(data_dir=task.data_dir, seconds=1.5, workers=3).verify_many(texts, [largest] * 3)
    finally:
        os.sched_setaffinity(0, cores)
        fork_server_client.close()
    assert [verdict.error for verdict in verdicts] == ["took over 1.5 s", None, "took over 1.5 s"]


def test_without_isolation_it_says_so(task: Code, largest: Problem, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("EXPLORL_UNISOLATED", raising=False)
    monkeypatch.setattr(programs, "capabilities", lambda: Guarantees(True, False, True, True, capabilities().layers))
    with pytest.raises(SandboxError, match=r"not be isolated from this machine's files .*unisolated=True"):
        task.verify(BODY, largest)
    assert Code(data_dir=task.data_dir, unisolated=True).verify(BODY, largest).correct


def test_no_text_steers_a_terminal(task: Code, largest: Problem) -> None:
    for text in (
        "    raise ValueError('\\x1b[2J\\ud800\\u202e')\n",
        "    return '\x1b\ud800' +\n",
        "    \x00\x9b = \n",
    ):
        verdict = task.verify(text, largest)
        assert not verdict.correct
        for message in (verdict.error or "", verdict.answer or ""):
            assert clean(message) == message


def test_pieces() -> None:
    assert split_prompt(HEAD, "largest") == (
        "from typing import List\n\n\n",
        HEAD[len("from typing import List\n\n\n") :],
    )
    assert split_prompt("x", "f") == ("", "x")
    assert defines("async  def f(): pass", "f")
    assert not defines("def ff(): pass", "f")
    assert not defines(" def f(): pass", "f")
    fences = find_fences("```python\na\n```\n```js\nb\n```\n```\nc\n```\n```python\nd")
    assert (fences.blocks, fences.lines) == (["a", "c"], 7)


# Any text at all ------------------------------------------------------------------------------------------------------

PIECES = [
    *(
        "```",
        "```python\n",
        "\n```\n",
        "\n",
        "    ",
        "\t",
        "def largest",
        "def largest(xs):\n",
        "    return 0\n",
        "(",
        "'''",
    ),
    *(
        "class A:",
        "\nif __name__",
        "\nprint(1)",
        "<think>",
        "</think>",
        "import os\n",
        "\ud800",
        "\0",
        "é",
        "#",
        "`",
        "x = 1",
    ),
    *("\r\n", "\x0b", "\u2028", "async def largest(", "@", '"""', "\\", "lambda: " * 9),
]


@given(st.text() | st.lists(st.sampled_from(PIECES)).map("".join))
def test_extraction_never_raises(text: str) -> None:
    source = extract_function(text, HEAD, "largest")
    assert isinstance(source, str)
    assert bool(source) or not text.strip() or "```" in text


def mutations(rng: random.Random, count: int) -> list[str]:
    texts = []
    for _ in range(count):
        parts = rng.choices(PIECES, k=rng.randrange(12))
        if rng.random() < 0.5:
            parts.insert(rng.randrange(len(parts) + 1), WHOLE if rng.random() < 0.5 else BODY)
        text = "".join(parts)
        cut = rng.randrange(len(text) + 1)
        texts.append(text[:cut] if rng.random() < 0.3 else text)
    return texts


@pytest.mark.parametrize("count", [10_000, pytest.param(100_000, marks=pytest.mark.slow)])
def test_mutated_completions_are_read(count: int) -> None:
    for text in mutations(random.Random(0), count):
        extract_function(text, HEAD, "largest")
        find_fences(text)


@pytest.mark.parametrize("count", [100, pytest.param(100_000, marks=pytest.mark.slow)])
def test_mutated_completions_are_judged(task: Code, largest: Problem, count: int) -> None:
    texts = mutations(random.Random(1), count)
    for text, verdict in zip(texts, task.verify_many(texts, [largest] * count), strict=True):
        assert (verdict.error is None) is verdict.correct
        assert not (verdict.error or "").startswith("took over"), text
        if verdict.correct:
            assert "max(xs)" in text
        if verdict.answer is not None:
            verdict.answer.encode()


@pytest.mark.parametrize(
    "piece", [*PIECES, "```python\ndef largest(xs):\n", " \n", "\n\n", "`" * 7, "\ndef largest(", "a\n"]
)
def test_extraction_takes_linear_time(piece: str) -> None:
    text = piece * ((1 << 18) // len(piece))
    start = time.process_time()
    extract_function(text, HEAD, "largest")
    assert time.process_time() - start < 1


# HumanEval itself -----------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not (DATA / FILE).exists(), reason="needs humaneval.jsonl")
def test_humaneval() -> None:
    task = Code(data_dir=DATA)
    problems = task.problems("holdout")
    assert len(problems) == 164
    right = [problem.data["canonical_solution"] for problem in problems]
    verdicts = task.verify_many(right, problems)
    assert [problem.id for problem, verdict in zip(problems, verdicts, strict=True) if not verdict.correct] == []
    for body in ("    pass\n", "    return None\n"):
        assert not any(verdict.correct for verdict in task.verify_many([body] * len(problems), problems))
    some = problems[::6]
    whole = [f"```python\n{problem.data['prompt']}{problem.data['canonical_solution']}```" for problem in some]
    assert all(verdict.correct and verdict.well_formed for verdict in task.verify_many(whole, some))
