"""The process that runs the tests of a data set: what it may do for `code` and `jsonl`, and when it ends."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from explorl.sandbox.programs import Guarantees, ProgramLimits, run_tests
from explorl.tasks import Task, get_task
from tests.sandbox.support import alive, descendants, eventually, script

SLEEPING = ("def f(): return 1", "import time\ndef check(candidate): time.sleep(100)")
HOSTILE = """def check(candidate):
    import os, signal
    for attempt in (
        lambda: open({secret!r}).read(),
        lambda: open({shared!r}, "w").close(),
        lambda: open("/proc/{pid}/environ").read(),
        lambda: os.kill({pid}, 0),
    ):
        try: attempt()
        except OSError: continue
        raise AssertionError("reached")
    assert candidate(1) == 1
"""


@pytest.mark.parametrize("kind", ["code", "jsonl"])
def test_tests_of_a_data_set_reach_nothing(isolated: Guarantees, tmp_path: Path, kind: str) -> None:
    """A data set is judged right by tests that try to read, to write and to signal what is the user's."""
    secret, shared = tmp_path / "secret", tmp_path / "shared"
    for path, mode in ((secret, 0o600), (shared, 0o666)):
        path.write_text("x")
        path.chmod(mode)
    test = HOSTILE.format(secret=str(secret), shared=str(shared), pid=os.getpid())
    row = {"prompt": "def f(x):\n", "entry_point": "f", "test": test}
    task: Task
    if kind == "code":
        row |= {"task_id": "hostile/0", "canonical_solution": "    return x\n"}
        (tmp_path / "humaneval.jsonl").write_text(json.dumps(row) + "\n")
        task, split = get_task("code", data_dir=tmp_path), "holdout"
    else:
        (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
        task, split = get_task("jsonl", path=tmp_path / "rows.jsonl", holdout=0), "train"
    (problem,) = task.problems(split)
    verdict = task.verify("```python\ndef f(x):\n    return x\n```", problem)
    assert verdict.correct, verdict.error
    assert (secret.read_text(), shared.read_text()) == ("x", "x")


@pytest.mark.parametrize(
    "limits", [ProgramLimits(seconds=0.3), ProgramLimits(seconds=100, cpu_seconds=0.3)], ids=["time", "processor"]
)
def test_tests_are_limited_with_their_program(here: Guarantees, limits: ProgramLimits) -> None:
    tests = "def check(candidate):\n    while True: pass"
    tested = run_tests(SLEEPING[0], tests, entry_point="f", limits=limits)
    assert tested.status == "timeout"
    assert tested.normal == "def f():\n    return 1"


@pytest.mark.parametrize("first", ["training process", "fork server", "supervisor"])
def test_tests_do_not_outlive_their_supervisor(here: Guarantees, first: str) -> None:
    if not here.layers:
        pytest.skip("nothing but limits here")
    request = f"programs._request({SLEEPING[0]!r}, limits=ProgramLimits(seconds=100, cpu_seconds=100), entry_point='f')"
    training = script(f"print(programs._run({request}, {SLEEPING[1]!r}, {here.layers})['status'])")
    count = 5 if "namespaces" in here.layers else 4
    try:
        eventually(lambda: len(descendants(training.pid)) == count or training.poll() is not None)
        processes = descendants(training.pid)
        assert len(processes) == count
        if first == "supervisor":
            os.kill(processes[1], signal.SIGKILL)
            assert training.communicate(timeout=60)[0] == "killed\n"
        elif first == "fork server":
            os.kill(training.pid, signal.SIGSTOP)  # or it would start another
            os.kill(processes[0], signal.SIGKILL)
            eventually(lambda: not any(map(alive, processes)), 10)
    finally:
        training.kill()
        training.communicate()
    eventually(lambda: not any(map(alive, processes)), 10)


def test_normal_form_is_told_before_the_tests_crash(here: Guarantees) -> None:
    tests = "import os\ndef check(candidate): os._exit(0)"
    tested = run_tests("def f( ): return 1 # why", tests, entry_point="f")
    assert (tested.status, tested.normal) == ("killed", "def f():\n    return 1")
