"""Functions of messages that nobody can trust: what a message does stays with it, whatever it does."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import ANY

import pytest

from explorl.sandbox import isolated_call, programs
from explorl.sandbox.isolated_call import IsolatedFunction, IsolatedResult, IsolationLimits
from explorl.sandbox.programs import Guarantees, SandboxError, probe

JUDGE = '''
import os, sys, time

state = {"wins": False, "prepared": None, "computed": 0}

def prepare(setup):
    state["prepared"] = setup
    state["environment"] = dict(os.environ)
    print("noise")
    os.write(2, b"noise")

def prepare_trusted(number):
    if number == "hang":
        while True: pass
    if number == "fail":
        raise OSError
    state["computed"] += 1
    return number * 2

def run(message, trusted):
    """Runs what it is told, like a judge with a hole in it."""
    scope = {"state": state, "trusted": trusted}
    exec(message, scope)
    return scope.get("value")
'''


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("judges")
    (path / "holed_judge.py").write_text(JUDGE)
    return path


@pytest.fixture
def judges(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., IsolatedFunction]]:
    monkeypatch.syspath_prepend(str(folder))
    made: list[IsolatedFunction] = []

    def make(**options: object) -> IsolatedFunction:
        made.append(IsolatedFunction("holed_judge:run", **{"workers": 1, **options}))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for judge in made:
        judge.close()


def permitted() -> list[programs.Layers]:
    found = []
    for layers in programs.LAYER_SETS:
        try:
            guarantees = probe(layers)
        except SandboxError:
            continue
        isolated = guarantees.network_isolated and guarantees.filesystem_isolated and guarantees.processes_isolated
        found += [layers] if isolated else []
    return found


@pytest.fixture(params=permitted(), ids="+".join)
def layers(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> programs.Layers:
    """Each set of mechanisms that isolates on this machine."""
    chosen: programs.Layers = request.param
    monkeypatch.setattr(isolated_call, "_layers", lambda: chosen)
    return chosen


def one(judge: IsolatedFunction, message: str) -> IsolatedResult:
    (reply,) = judge.call_many([message])
    return reply


def test_values_come_back_in_order(judges: Callable[..., IsolatedFunction], layers: programs.Layers) -> None:
    judge = judges(workers=2, setup={"name": "x"})
    replies = judge.call_many([f"value = {number} ** 2" for number in range(20)])
    assert [reply.value for reply in replies] == [number**2 for number in range(20)]
    assert one(judge, "value = state['prepared']").value == {"name": "x"}
    assert judge.call_many([]) == []


def test_nothing_is_left_for_the_next_message(judges: Callable[..., IsolatedFunction], layers: programs.Layers) -> None:
    judge = judges()
    attack = """
import builtins, gc, json, sys
state['wins'] = True
json.dumps = lambda *_, **__: '{"value": "forged"}'
builtins.float = None
for module in list(sys.modules.values()):
    if hasattr(module, '_serve'): module._serve = None
value = 'attacked'
"""
    assert one(judge, attack).error is None
    pid = judge._pool[0].pid
    assert one(judge, "value = [state['wins'], float(1)]").value == [False, 1.0]
    assert judge._pool[0].pid == pid


def test_no_file_is_left_for_the_next_message(judges: Callable[..., IsolatedFunction], layers: programs.Layers) -> None:
    if not {"namespaces", "landlock"} & set(layers):
        pytest.skip("files are not isolated")
    judge = judges()
    name = f"explorl-{os.getpid()}"
    source = f"""
import os
value = []
for folder in ('/', '/tmp', '/dev', '/dev/shm', '/usr'):
    for leave in (os.mkdir, lambda path: os.symlink('a message', path), lambda path: open(path, 'w')):
        try: leave(folder + '/{name}')
        except OSError: continue
        value.append(folder)
"""
    assert one(judge, source).value == []


@pytest.mark.parametrize(
    ("attempt", "refused"),
    [
        ("open('{secret}').read()", True),
        ("open('/etc/passwd').read()", True),
        ("open('{folder}/new', 'w')", True),
        ("os.listdir('/proc')", True),
        ("os.kill(os.getppid(), 9)", True),
        ("os.kill({pid}, 0)", True),
        ("os.killpg(0, 9)", True),
        ("os.fork()", True),
        ("os.execv('/bin/sh', ['sh'])", True),
        ("socket.socket()", True),
        ("os.setresuid(1, 1, 1)", True),
        ("[os.fstat(number) for number in range(4, 64)]", True),
        ("open('{library}').read(1)", False),
    ],
)
def test_nothing_is_reached(
    judges: Callable[..., IsolatedFunction], layers: programs.Layers, tmp_path: Path, attempt: str, refused: bool
) -> None:
    secret = tmp_path / "secret"
    secret.write_text("secret")
    code = attempt.format(secret=secret, folder=tmp_path, pid=os.getpid(), library=os.__file__)
    source = f"import os, socket\ntry:\n    {code}\n    value = 'done'\nexcept OSError:\n    value = 'refused'"
    judge = judges()
    assert one(judge, source).value == ("refused" if refused else "done")
    assert one(judge, "value = 1").value == 1
    assert secret.read_text() == "secret"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["secret"]


def test_the_environment_is_empty(
    judges: Callable[..., IsolatedFunction], layers: programs.Layers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")
    judge = judges()
    assert one(judge, "import os; value = dict(os.environ)").value == {}
    assert "HF_TOKEN" not in one(judge, "value = state['environment']").value


def test_a_project_on_the_path_is_not_shown(
    judges: Callable[..., IsolatedFunction], layers: programs.Layers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / ".env").write_text("TOKEN=1")
    monkeypatch.syspath_prepend(str(tmp_path))
    source = f"import os\ntry:\n    value = open({str(tmp_path / '.env')!r}).read()\nexcept OSError:\n    value = None"
    assert one(judges(), source)[:2] == (None, None)


def test_a_folder_above_the_judge_is_on_the_path(
    folder: Path, judges: Callable[..., IsolatedFunction], layers: programs.Layers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As /tmp is for a script that lies there: it is not shown, and does not stand in the way of the sandbox's own."""
    (folder.parent / ".env").write_text("TOKEN=1")
    monkeypatch.syspath_prepend("/tmp")
    monkeypatch.syspath_prepend(str(folder.parent))
    source = f"try:\n    value = open({str(folder.parent / '.env')!r}).read()\nexcept OSError:\n    value = None"
    assert one(judges(), source)[:2] == (None, None)


@pytest.mark.parametrize(
    ("source", "error"),
    [
        ("while True: pass", "took too long"),
        ("import time; time.sleep(1000)", "took too long"),
        ("import signal; [signal.signal(n, signal.SIG_IGN) for n in (14, 15, 24)]\nwhile True: pass", "took too long"),
        ("10 ** 10 ** 10", "took too long"),
        ("x = bytearray(1 << 40)", "ran out of memory"),
        ("x = []\nwhile True: x.append(bytearray(1 << 20))", "ran out of memory"),
        ("import os; os._exit(0)", "crashed"),
        ("import os; os.close(3)", "crashed"),
        ("import ctypes; ctypes.string_at(0)", "crashed"),
        ("import os\nwhile True: os.write(3, b'x' * 65536)", "crashed"),
        ("import os; os.write(3, b'[1')", "crashed"),
        ("import os; os.write(3, b'[' * 100000); os._exit(0)", "crashed"),
        ("import os; os.write(3, b'\\xff'); os._exit(0)", "crashed"),
        ("raise ValueError('no\\x1b[2J\\ud800')", "raised ValueError: no␛[2J\ufffd"),
        ("raise SystemExit(0)", "crashed"),
        ("value = object()", "raised TypeError: Object of type object is not JSON serializable"),
        ("def f(): f()\nf()", "raised RecursionError: maximum recursion depth exceeded"),
    ],
)
def test_what_becomes_of_bad_messages(judges: Callable[..., IsolatedFunction], source: str, error: str) -> None:
    seconds = 0.4 if error == "took too long" else 30.0  # 200 MiB, page by page, may take longer
    judge = judges(limits=IsolationLimits(seconds=seconds, memory=200 << 20))
    bad, good = judge.call_many([source, "value = 1"])
    assert bad.value is None
    assert (bad.error or "").startswith(error)
    assert good.value == 1


def test_trusted_values_are_prepared_once_and_outside(judges: Callable[..., IsolatedFunction]) -> None:
    judge = judges()
    replies = judge.call_many(["value = [trusted, state['computed']]"] * 3, [21, 21, 4])
    assert [reply.value for reply in replies] == [[42, 1], [42, 1], [8, 2]]
    replies = judge.call_many(["value = trusted"] * 2, ["hang", "fail"])
    assert [reply.value for reply in replies] == [None, None]
    assert one(judge, "value = trusted").value is None
    judge.call_many(["state['computed'] = 99"], [7])
    assert judge.call_many(["value = state['computed']"], [7])[0].value == 3


def test_each_message_has_its_own_time(
    judges: Callable[..., IsolatedFunction], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(isolated_call, "_WALL_FACTOR", 1000)  # the clock does not count here
    judge = judges(limits=IsolationLimits(seconds=0.6))
    spin = "import time\nbegun = time.process_time()\nwhile time.process_time() < begun + 0.2: pass\nvalue = 'slow'"
    replies = judge.call_many(["while True: pass"] * 6 + [spin, spin, "value = 'quick'"])
    assert [reply.error for reply in replies[:6]] == ["took too long"] * 6
    assert all(0.6 <= reply.seconds < 2 for reply in replies[:6])
    assert [reply.value for reply in replies[6:]] == ["slow", "slow", "quick"]


def test_a_busy_machine_is_not_the_message_s_fault(
    judges: Callable[..., IsolatedFunction], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A message is judged by its own processor time, however many others want the processor."""
    monkeypatch.setattr(
        isolated_call, "_WALL_FACTOR", 1000
    )  # which the test's own company does not use up, but others may
    judge = judges(limits=IsolationLimits(seconds=0.6))
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(6)]
    try:
        reply = one(judge, "import time\nwhile time.process_time() < 0.3: pass\nvalue = 1")
    finally:
        for process in busy:
            process.kill()
            process.wait()
    assert reply.value == 1, reply


def test_a_host_that_ignores_its_children_s_ends(judges: Callable[..., IsolatedFunction]) -> None:
    """Signals that are ignored stay so in the programs that a process starts: some that watch over others do that."""
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        assert one(judges(), "value = 1") == IsolatedResult(1, None, ANY)
    finally:
        signal.signal(signal.SIGCHLD, before)


def test_a_killed_worker_is_replaced(judges: Callable[..., IsolatedFunction]) -> None:
    judge = judges()
    assert one(judge, "value = 1").value == 1
    first = judge._pool[0].pid
    os.kill(first, signal.SIGKILL)
    judge._pool[0]._process.wait()  # on a busy machine it may take a while to die, and its child to hear of it
    assert one(judge, "value = 2").value == 2
    assert judge._pool[0].pid != first


def test_killed_workers_that_had_nothing_to_do_are_replaced(judges: Callable[..., IsolatedFunction]) -> None:
    judge = judges(workers=4)
    judge.call_many(["value = 1"] * 4)
    while any(worker.state == "starting" for worker in judge._pool):  # one that is killed then has failed to start
        judge.call_many(["import time; time.sleep(0.05); value = 1"] * 4)
    for worker in judge._pool[1:]:
        os.kill(worker.pid, signal.SIGKILL)
        worker._process.wait()
    assert one(judge, "import time; time.sleep(0.3); value = 2").value == 2
    assert [reply.value for reply in judge.call_many(["value = 3"] * 4)] == [3] * 4


def test_a_message_whose_worker_is_killed_twice_has_crashed(judges: Callable[..., IsolatedFunction]) -> None:
    judge = judges(limits=IsolationLimits(seconds=30))
    killed: list[int] = []

    def kill_whoever_takes_it() -> None:
        while len(killed) < 2:
            for worker in list(judge._pool):
                if worker.index == 0 and worker.pid not in killed:
                    killed.append(worker.pid)
                    os.kill(worker.pid, signal.SIGKILL)
            threading.Event().wait(0.01)

    killer = threading.Thread(target=kill_whoever_takes_it)
    killer.start()
    reply = one(judge, "import time; time.sleep(1000)")
    killer.join()
    assert reply == IsolatedResult(error="crashed")
    assert one(judge, "value = 1").value == 1


def test_all_processes_end_with_their_host(folder: Path) -> None:
    source = (
        f"import sys; sys.path.insert(0, {str(folder)!r})\nfrom explorl.sandbox.isolated_call import IsolatedFunction\n"
        "judge = IsolatedFunction('holed_judge:run', workers=1); judge.call_many(['1'])\n"
        "print(judge._pool[0].pid, flush=True); judge.call_many(['while True: pass'])"
    )
    host = subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE, text=True)
    assert host.stdout is not None
    worker = int(host.stdout.readline())
    family = [worker, *descendants(worker)]
    host.kill()
    host.wait()
    host.stdout.close()
    deadline = time.monotonic() + 60
    while any(map(is_alive, family)):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def descendants(pid: int) -> list[int]:
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return []
    return [found for child in map(int, children) for found in (child, *descendants(child))]


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def test_interrupted_calls_leave_no_stale_reply(
    judges: Callable[..., IsolatedFunction], monkeypatch: pytest.MonkeyPatch
) -> None:
    judge = judges()
    assert one(judge, "value = 1").value == 1
    with monkeypatch.context() as patch:
        patch.setattr(IsolatedFunction, "_wait_for_workers", interrupted)
        with pytest.raises(KeyboardInterrupt):
            one(judge, "value = 2")
    assert judge._pool == []
    assert one(judge, "value = 3").value == 3


def interrupted(judge: IsolatedFunction) -> None:
    raise KeyboardInterrupt


def test_a_fork_has_workers_of_its_own(judges: Callable[..., IsolatedFunction]) -> None:
    judge = judges()
    assert one(judge, "value = 1").value == 1
    pid = judge._pool[0].pid
    child = os.fork()
    if not child:
        own = one(judge, "value = 2").value == 2 and judge._pool[0].pid != pid
        judge.close()
        os._exit(0 if own else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert one(judge, "value = 3").value == 3
    assert judge._pool[0].pid == pid


def test_threads_share_workers(judges: Callable[..., IsolatedFunction]) -> None:
    judge = judges(workers=2)
    results: dict[int, list[object]] = {}

    def ask(number: int) -> None:
        results[number] = [reply.value for reply in judge.call_many([f"value = {number} + {k}" for k in range(5)])]

    threads = [threading.Thread(target=ask, args=(number,)) for number in (10, 20, 30)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {number: [number + k for k in range(5)] for number in (10, 20, 30)}


def test_modules_that_do_not_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "needs_more.py").write_text("import no_such_library_here")
    with IsolatedFunction("needs_more:run") as judge, pytest.raises(ImportError, match="no_such_library_here"):
        judge.call_many([1])
    (tmp_path / "broken_judge.py").write_text("raise RuntimeError('not today')")
    found = "broken_judge:run did not start in 3 attempts: RuntimeError: not today"
    with IsolatedFunction("broken_judge:run", workers=1) as judge, pytest.raises(SandboxError, match=found):
        judge.call_many([1])
    (tmp_path / "gone_judge.py").write_text("import os; os._exit(3)")
    found = "gone_judge:run did not start in 3 attempts: it ended"
    with IsolatedFunction("gone_judge:run", workers=1) as judge, pytest.raises(SandboxError, match=found):
        judge.call_many([1])


def test_no_torch_and_no_explorl_in_a_worker(judges: Callable[..., IsolatedFunction]) -> None:
    modules = one(judges(), "import sys; value = sorted(sys.modules)").value
    assert "torch" not in modules
    assert {name for name in modules if name.startswith("explorl.") and not name.startswith("explorl.sandbox")} == {
        "explorl.tasks"
    }


@pytest.mark.parametrize("reason", ["not Linux", "refused", "open"])
def test_where_nothing_isolates_there_is_a_warning(
    judges: Callable[..., IsolatedFunction], monkeypatch: pytest.MonkeyPatch, reason: str
) -> None:
    def capabilities() -> Guarantees:
        if reason == "not Linux":
            raise OSError("the sandbox needs Linux, this is darwin")
        if reason == "refused":
            raise SandboxError("no Python can be started in a sandbox")
        return probe(())

    monkeypatch.setattr(isolated_call, "capabilities", capabilities)
    isolated_call._layers.cache_clear()
    try:
        with pytest.warns(UserWarning, match=r"not isolated here \(.*explorl doctor"):
            assert one(judges(), "value = 1").value == 1
        bad, good = judges(limits=IsolationLimits(seconds=0.3)).call_many(["while True: pass", "value = 1"])
        assert (bad.error, good.value) == ("took too long", 1)
    finally:
        isolated_call._layers.cache_clear()


def test_bad_numbers_are_named() -> None:
    with pytest.raises(ValueError, match="workers=0: give 1 or more"):
        IsolatedFunction("x:y", workers=0)
    with pytest.raises(ValueError, match=r"seconds=nan: give a positive number, like 5\.0"):
        IsolationLimits(seconds=float("nan"))
    assert 1 <= IsolatedFunction("x:y").workers <= 8


@pytest.mark.parametrize("body", [b"", b"1", b"null", b'{"other": 1}', b"{" * 10, b"[" * 100_000])
def test_replies_that_are_none(body: bytes) -> None:
    assert isolated_call._parse_reply(body, 0.0).error == "crashed"
    assert json.dumps(isolated_call._parse_reply(b'{"value": [1]}', 0.0).value) == "[1]"
