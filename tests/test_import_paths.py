"""Configuration and study files from strangers: an import path may name a plug-in, and nothing else is ever called."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from explorl.analysis.built_in import ANALYSES
from explorl.analysis.lens import find as find_analysis
from explorl.cli import app as cli
from explorl.core.config import ConfigError, load_config
from explorl.core.store import RunStore
from explorl.report.run_analyses import run_context
from explorl.strategies import build, build_all
from explorl.study.run_study import environment
from explorl.study.spec import load_study
from explorl.tasks import get_task
from explorl.training.grpo.inspection_schedule import build_observers
from explorl.training.rft.registry import build_filters, build_selector

PARTS = '''
"""What a stranger's module may hold. Everything that is called leaves a trace."""
import functools
import os
import types
from dataclasses import dataclass
from os import system
from pathlib import Path

from explorl.strategies import Strategy
from explorl.tasks import Problem, Task, Verdict
from explorl.training.rft.filters import rft_filter
from explorl.training.rft.selectors import rft_selector


def leave(*arguments, **options):
    Path(os.environ["EXPLORL_TEST_TRACE"]).open("a").write(f"{arguments!r} {options!r}\\n")


class NoPlugin:
    def __init__(self, *arguments, **options):
        leave("NoPlugin")


class Callable_:
    def __call__(self, *arguments, **options):
        leave("instance")


class Meta(type):
    def __call__(cls, *arguments, **options):
        leave("metaclass")


class WithMeta(metaclass=Meta):
    pass


class New:
    def __new__(cls, *arguments, **options):
        leave("new")


class Anything:
    """Says that it has every attribute, the methods of a protocol among them."""

    def __getattr__(self, name):
        return leave


class Deaf:
    """An observer whose `see` takes nothing."""

    def __init__(self):
        leave("Deaf")

    def see(self):
        return {}


class Disguised:
    """Says that it is a task, an analysis and a class."""

    @property
    def __class__(self):
        leave("__class__")
        return Good

    def __repr__(self):
        leave("repr")
        return ""


class Answering(type):
    """A class of classes that answers whatever it is asked."""

    def __getattr__(cls, name):
        leave("getattr", name)
        return NoPlugin

    def __repr__(cls):
        leave("repr of a class")
        return ""


class Asked(metaclass=Answering):
    pass


class Computed:
    def __get__(self, instance, owner):
        leave("get")
        return Good


class Outer:
    Inner = NoPlugin
    computed = Computed()
    tool = staticmethod(leave)

    @property
    def value(self):
        leave("property")

    @classmethod
    def make(cls, *arguments, **options):
        leave("classmethod")


def factory(**options):
    """Returns a task, and could do anything else."""
    leave("factory")
    return Good()


class Good(Task):
    def __init__(self, **options):
        leave("Good")

    def problems(self, split, *, limit=None):
        leave("problems")
        return [Problem(f"{split}{n}", {}) for n in range(8)][:limit]

    def prompt(self, problem, template=None):
        return "1+1="

    def verify(self, completion, problem, *, opened=False):
        return Verdict(True)

    def examples(self, count, *, template=None, seed=0):
        leave("examples")
        yield from ()


@dataclass(frozen=True)
class Careful(Strategy):
    alpha: float = 0.1

    def __post_init__(self):
        leave("Careful")
        if self.alpha > 1:
            raise ValueError(f"careful: alpha is {self.alpha}; use 0.1")


class Watching:
    def __init__(self):
        leave("Watching")

    def see(self, step):
        return {"seen": 1.0}


@rft_filter
def polite(samples, *, word="please"):
    leave("polite")
    return samples


@rft_selector
def longest(samples, rng):
    leave("longest")
    return [sample.tokens for sample in samples]


partial = functools.partial(leave, "partial")
anonymous = lambda *arguments, **options: leave("lambda")
instance = Callable_()
anything = Anything()
outer = Outer()
made = types.SimpleNamespace(task=NoPlugin, see=leave)
alias = NoPlugin
disguised = Disguised()
'''

OWN = [
    f"stranger_parts:{name}"
    for name in (
        "leave", "system", "factory", "NoPlugin", "WithMeta", "New", "Deaf", "partial", "anonymous", "instance",
        "anything", "alias", "made", "made.task", "Outer.Inner", "Outer.tool", "Outer.make", "outer.value", "os.system",
        "functools.partial", "Path", "Path.touch", "Meta", "Problem", "Task", "Strategy", "__builtins__", "__name__",
        "leave.__globals__", "disguised", "Asked", "Asked.Inner", "Outer.computed",
        "Outer.__init__", "Outer.__class__", "Good.__subclasses__",
    )
]  # fmt: skip
"""In a module of the working folder: callables of every kind, and what is reached through them."""

FOREIGN = [
    "os:system", "os:popen", "os:execv", "os:abort", "os:_exit", "os:path.os.system", "builtins:exec", "builtins:eval",
    "builtins:breakpoint", "subprocess:run", "subprocess:Popen", "subprocess:getoutput", "posix:system",
    "shutil:rmtree", "pathlib:Path", "pathlib:Path.touch", "pydoc:pipepager", "runpy:run_path", "timeit:timeit",
    "code:interact", "pickle:loads", "importlib:import_module", "antigravity:fly", "functools:partial",
    "unittest.mock:MagicMock", "unittest.mock:sentinel.see", "types:SimpleNamespace", "concurrent.futures:Executor",
    "explorl.cli.app:os.system", "explorl.tasks.registry:Task", "explorl.cli.app:main",
    "explorl.core.store.provenance:subprocess.run",
    "explorl.models.smollm2:fetch_smollm2", "torch.hub:load", "torch:load", "numpy:fromfile", "yaml:unsafe_load",
]  # fmt: skip
"""In Python's library, in Explorl itself and in installed packages."""

NO_PATHS = [
    "os:", ":system", "os:system:run", "os:system()", "os system", "os:sys tem", "..os:system", ".os:system",
    "os/path:system", "__main__:main", "pip.__main__:main", "stranger_parts:", "stranger_parts:Good()",
    "stranger_parts:Good.", "stranger_parts:Good; import os", "stranger_parts:[x for x in ()]", "/etc/passwd:x",
    "stranger_parts.py:Good", "\u202eos:system", "os\n:system",
]  # fmt: skip
"""What is no import path."""

PATHS = [*OWN, *FOREIGN, *NO_PATHS]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A working folder with a stranger's module; ``trace`` comes into being when anything of it is called."""
    (tmp_path / "stranger_parts.py").write_text(PARTS, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("EXPLORL_TEST_TRACE", str(tmp_path / "trace"))
    yield tmp_path
    sys.modules.pop("stranger_parts", None)


@pytest.fixture
def parts(here: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The same, where Python finds it by itself."""
    monkeypatch.syspath_prepend(here)
    return here


def run(command: list[str]) -> int:
    try:
        cli.main(command)
    except SystemExit as ended:
        return int(ended.code or 0)
    return 0


def options_for(path: str) -> dict[str, Any]:
    """Options with which a callable of that kind would do something."""
    command = "touch owned"
    return {"command": command, "cmd": command, "args": command, "shell": True, "path": "owned", "setup": "0"}


def refused(here: Path, command: list[str], capsys: pytest.CaptureFixture[str], *words: str) -> None:
    """Check that a command refuses a file in words, and that nothing of it was called."""
    before = {path.name for path in here.iterdir()}
    capsys.readouterr()
    assert run(command) == 2
    error = capsys.readouterr().err
    assert "Traceback" not in error
    assert "importing stranger_parts failed" not in error
    for word in words:
        assert word in error
    assert {path.name for path in here.iterdir()} <= before | {"__pycache__"}


def written(here: Path, values: dict[str, Any], name: str = "file.yaml") -> str:
    (here / name).write_text(yaml.safe_dump(values), encoding="utf-8")
    return name


# --- one file for each path, through the command that shows a configuration -------------------------------------------


@pytest.mark.parametrize("path", PATHS)
def test_a_task_that_is_none_is_refused(path: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = written(here, {"task": {"name": path, **options_for(path)}})
    refused(here, ["config", "show", "--config", file], capsys, "task")


@pytest.mark.parametrize("path", PATHS)
def test_a_strategy_that_is_none_is_refused(path: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = written(here, {"strategies": [{path: options_for(path)}]})
    refused(here, ["config", "show", "--config", file], capsys, "strateg")


@pytest.mark.usefixtures("parts")
@pytest.mark.parametrize("path", PATHS)
def test_the_functions_behind_the_commands_refuse_them_too(path: str, here: Path) -> None:
    options = options_for(path)
    calls: list[tuple[str, Callable[[], object]]] = [
        ("task", lambda: get_task(path, **options)),
        ("task", lambda: get_task(path)),
        ("strategy", lambda: build({"name": path, **options})),
        ("strategy", lambda: build_all([path])),
        ("filter", lambda: build_filters([{path: {"cmd": "touch owned"}}])),
        ("filter", lambda: build_filters([{path: "touch owned"}])),
        ("selector", lambda: build_selector({path: {"cmd": "touch owned"}})),
        ("selector", lambda: build_selector(path)),
        ("observer", lambda: build_observers([path])),
        ("observer", lambda: build_observers(["stranger_parts:Watching", path])),
        ("analysis", lambda: find_analysis(path, ANALYSES)),
    ]
    for kind, call in calls:
        with pytest.raises(ValueError, match=kind) as error:
            call()
        assert "failed" not in str(error.value)
    assert not (here / "trace").exists()
    assert not (here / "owned").exists()


@pytest.mark.parametrize("value", [7, None, ["os:system"], {"os:system": {}}, True, 0.5])
def test_a_name_is_text(value: Any, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for values in (
        {"task": {"name": value}},
        {"strategies": [{"name": value, "command": "touch owned"}]},
        {"rft": {"filters": [{"name": value}]}},
        {"rft": {"selector": {"name": value}}},
        {"training": {"lens": {"observers": [value]}}},
    ):
        refused(here, ["config", "show", "--config", written(here, values)], capsys)


# --- the same through every command that reads a file -----------------------------------------------------------------

FEW = ["os:system", "stranger_parts:factory", "stranger_parts:NoPlugin", "pydoc:pipepager", "stranger_parts:partial"]


@pytest.mark.parametrize("path", FEW)
@pytest.mark.parametrize("command", ["train", "sft", "rft"])
def test_no_run_begins(command: str, path: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = {"model": {"name": "tiny"}}
    file = written(here, {**base, "task": {"name": path, **options_for(path)}})
    refused(here, [command, "--config", file, "--run", "run"], capsys, "task")
    refused(here, [command, "--set", f"task.name={path!r}", "--set", "task.command=touch owned"], capsys, "task")
    file = written(here, {**base, "strategies": [{path: options_for(path)}]})
    refused(here, [command, "--config", file, "--run", "run"], capsys, "strateg")
    for key, spec in itertools.product(("filters", "selector"), ({path: {"cmd": "touch owned"}}, path)):
        file = written(here, {**base, "rft": {key: [spec] if key == "filters" else spec}})
        refused(here, [command, "--config", file, "--run", "run"], capsys, key.rstrip("s"))


@pytest.mark.parametrize("path", FEW)
def test_no_run_begins_with_an_observer_that_is_none(path: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = written(here, {"training": {"lens": {"observers": [path]}}})
    refused(here, ["train", "--preset", "tiny", "--config", file, "--run", "run"], capsys, "observer")


@pytest.mark.parametrize("path", FEW)
@pytest.mark.parametrize("command", ["train", "sft", "rft"])
def test_no_run_goes_on(command: str, path: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    values = load_config(preset="tiny").dump()
    values["task"] = {"name": path, **options_for(path)}
    kind = {"train": "grpo"}.get(command, command)
    store = RunStore.create(here / "run", values)
    (store.folder / "manifest.json").write_text(json.dumps({"kind": kind}))
    refused(here, [command, "--resume", "run"], capsys, "task")
    refused(here, [command, "--resume", "run", "--set", "training.steps=400"], capsys, "task")


def study_of(here: Path, **values: Any) -> str:
    study = {"name": "s", "base": {"preset": "tiny"}, "arms": {"a": None, "b": None}, "baseline": "a", "seeds": 1}
    return written(here, {**study, **values}, "study.yaml")


@pytest.mark.parametrize("path", FEW)
@pytest.mark.parametrize("plan", [True, False])
def test_no_study_runs_or_is_planned(plan: bool, path: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    task = {"name": path, **options_for(path)}
    flat = {f"task.{key}": value for key, value in task.items()}
    for values in (
        {"base": {"preset": "tiny", "task": task}},
        {"base": {"preset": "tiny", "strategies": [{path: options_for(path)}]}},
        {"base": {"preset": "tiny", "rft": {"selector": {path: {"cmd": "touch owned"}}}}},
        {"arms": {"a": None, "b": {"set": flat}}},
        {"arms": {"a": None, "b": {"strategies": [{path: options_for(path)}]}}},
        {"arms": {"a": None, "b": {"set": {"rft.filters": [{path: {"cmd": "touch owned"}}]}}}},
        {"warm_start": {"task": task}},
    ):
        refused(here, ["study", study_of(here, **values), *(["--plan"] if plan else [])], capsys, path)
    profile = {"profiles": {"evil": {"base": {"task": task}}}}
    refused(here, ["study", study_of(here, **profile), "--profile", "evil", *(["--plan"] if plan else [])], capsys)
    setting = ["--set", f"task.name={path!r}", "--set", "task.command=touch owned"]
    refused(here, ["study", study_of(here), *setting, *(["--plan"] if plan else [])], capsys, "task")


@pytest.mark.parametrize("path", FEW)
def test_what_looks_at_a_run_calls_nothing(path: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    values = load_config(preset="tiny").dump()
    values["task"] = {"name": path, **options_for(path)}
    values["strategies"] = [{path: options_for(path)}]
    values["training"]["lens"]["observers"] = [path]
    store = RunStore.create(here / "run", values)
    from explorl.analysis.lens_table import NotRecorded

    with pytest.raises(NotRecorded, match="task"):
        _ = run_context(store.folder).task
    for command in (
        ["report", "run"], ["watch", "run", "--once"], ["quality", "run"], ["analyze", "run"],
        ["analyze", "run", "--only", "impact"], ["compare", "run", "run"], ["study", "status", "run"],
        ["study", "keep", "run", "kept.json"],
    ):  # fmt: skip
        run(command)
    assert not (here / "trace").exists()
    assert not (here / "owned").exists()


@pytest.mark.parametrize("path", FEW)
def test_what_looks_at_a_study_calls_nothing(path: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = load_study(study_of(here)).record()
    for arm in record["arms"]:
        arm["config"]["task"] = {"name": path, **options_for(path)}
        arm["config"]["strategies"] = [{path: options_for(path)}]
    (here / "study" / "arms").mkdir(parents=True)
    (here / "study" / "study.json").write_text(json.dumps({**record, "created": "2026-01-01"}))
    for command in (["study", "status", "study"], ["report", "study"], ["watch", "study", "--once"]):
        assert run(command) == 0, capsys.readouterr().err
    run(["study", "keep", "study", "kept.json"])
    run(["study", "restore", "kept.json", "--run", "again"])
    assert not (here / "trace").exists()
    assert not (here / "owned").exists()


def test_an_analysis_of_a_run_calls_no_task_that_is_none(
    here: Path, small_policy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = {
        "model": {"name": str(small_policy), "lora": None}, "rollout": {"max_tokens": 8}, "evaluation": {"ends": 0},
        "training": {"steps": 1, "prompts_per_step": 4, "generations": 2, "micro_batch": 8},
    }  # fmt: skip
    assert run(["train", "--preset", "tiny", "--config", written(here, small), "--run", "run"]) == 0
    file = here / "run" / "config.yaml"
    values = yaml.safe_load(file.read_text())
    for path in ("os:system", "stranger_parts:factory"):
        file.write_text(yaml.safe_dump({**values, "task": {"name": path, **options_for(path)}}))
        capsys.readouterr()
        run(["analyze", "run", "--only", "impact"])
        assert "cannot create the run's task" in capsys.readouterr().out
    assert not (here / "trace").exists()
    assert not (here / "owned").exists()


@pytest.mark.parametrize("path", FEW)
def test_an_evaluation_calls_no_task_that_is_none(path: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--option", "command=touch owned", "--option", "cmd=touch owned"]
    refused(here, ["eval", "--model", "tiny", "--task", path, *options], capsys, "task")
    refused(here, ["eval", "--model", "tiny", "--task", path], capsys, "task")


# --- what shows or plans constructs nothing ---------------------------------------------------------------------------

EVERYTHING: dict[str, Any] = {
    "task": {"name": "stranger_parts:Good", "size": 3},
    "strategies": [{"stranger_parts:Careful": {"alpha": 0.5}}, "egsw"],
    "training": {"lens": {"observers": ["stranger_parts:Watching"]}},
    "rft": {
        "filters": ["has_digit", {"stranger_parts:polite": {"word": "thanks"}}],
        "selector": "stranger_parts:longest",
    },
}


def test_showing_a_configuration_constructs_nothing(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = written(here, EVERYTHING)
    assert run(["config", "show", "--preset", "tiny", "--config", file]) == 0
    printed = yaml.safe_load(capsys.readouterr().out)
    assert printed["task"]["name"] == "stranger_parts:Good"
    assert printed["strategies"] == EVERYTHING["strategies"]
    assert not (here / "trace").exists()
    assert run(["config", "show", "--preset", "tiny", "--config", file, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["rft"]["selector"] == "stranger_parts:longest"
    assert not (here / "trace").exists()


def test_a_plan_constructs_nothing(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = study_of(
        here,
        base={"preset": "tiny", **EVERYTHING},
        arms={"a": None, "b": {"strategies": ["stranger_parts:Careful"]}},
        warm_start={"sft": {"examples": 8}},
    )
    assert run(["study", file, "--plan"]) == 0
    assert "2 arms" in capsys.readouterr().out
    assert not (here / "trace").exists()


@pytest.mark.usefixtures("parts")
def test_what_runs_constructs_and_checks(here: Path) -> None:
    """So that a strategy's own check of a value speaks before anything is written."""
    with pytest.raises(ConfigError, match="alpha is 5"):
        load_config(values={"strategies": [{"stranger_parts:Careful": {"alpha": 5}}]})
    assert "Careful" in (here / "trace").read_text()
    with pytest.raises(ConfigError, match=r"arm 'b'.*alpha is 5"):
        load_study(study_of(here, arms={"a": None, "b": {"strategies": [{"stranger_parts:Careful": {"alpha": 5}}]}}))
    (here / "trace").unlink()
    values = {"strategies": [{"stranger_parts:Careful": {"alpha": 5}}]}
    assert load_config(values=values, construct=False).strategies == values["strategies"]
    with pytest.raises(ConfigError, match="alfa"):  # what can be known without constructing is still said
        load_config(values={"strategies": [{"stranger_parts:Careful": {"alfa": 5}}]}, construct=False)
    with pytest.raises(ConfigError, match="2 times"):
        load_config(values={"strategies": ["stranger_parts:Careful"] * 2}, construct=False)
    with pytest.raises(ConfigError, match="alpha"):  # Explorl's own are dataclasses that only check their values
        load_config(values={"strategies": [{"egsw": {"alpha": "much"}}]}, construct=False)
    assert not (here / "trace").exists()


# --- modules of the working folder ------------------------------------------------------------------------------------


def test_a_module_of_the_working_folder_is_announced(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = written(here, EVERYTHING)
    assert run(["config", "show", "--preset", "tiny", "--config", file]) == 0
    captured = capsys.readouterr()
    assert captured.err.splitlines() == [
        f"explorl: importing stranger_parts from the working folder {here}, as task 'stranger_parts:Good' says"
    ]
    assert str(here) not in sys.path
    assert run(["config", "show", "--preset", "tiny"]) == 0
    assert not capsys.readouterr().err


def test_a_package_of_the_working_folder_is_announced(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    package = here / "stranger_pkg" / "deep"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").touch()
    (here / "stranger_parts.py").rename(package / "parts.py")
    try:
        file = written(here, {"strategies": ["stranger_pkg.deep.parts:Careful"]})
        assert run(["config", "show", "--preset", "tiny", "--config", file]) == 0
        assert f"importing stranger_pkg.deep.parts from the working folder {here}" in capsys.readouterr().err
    finally:
        for name in [name for name in sys.modules if name.startswith("stranger_pkg")]:
            del sys.modules[name]


TRAP = "import os\nopen(os.environ['EXPLORL_TEST_TRACE'], 'a').write(__name__)\n"


@pytest.fixture
def trapped(here: Path) -> Path:
    """A folder with modules of the names that are imported where they are installed, and of a package's metadata."""
    for name in ("yaml", "torch", "wandb", "trackio", "vllm", "triton", "sklearn", "tensorflow", "stranger_trap"):
        (here / f"{name}.py").write_text(TRAP)
    information = here / "stranger_trap-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: stranger-trap\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text(
        "[explorl.strategies]\ntrap = stranger_trap:Trap\n\n[explorl.tasks]\ntrap = stranger_trap:Trap\n"
    )
    return here


@pytest.mark.parametrize("start", [["bin/explorl"], ["-m", "explorl"]])
@pytest.mark.parametrize(
    "words",
    [
        ["strategies"],
        ["config", "show", "--set", "task.name=trap"],
        ["train", "--preset", "tiny", "--set", "training.report_to=[trackio]"],
    ],
)
def test_no_other_module_of_the_working_folder_is_imported(trapped: Path, start: list[str], words: list[str]) -> None:
    (trapped / "bin").mkdir()
    (trapped / "bin" / "explorl").write_text("from explorl.cli.app import main\n\nmain()\n")  # as pip installs it
    environment = {**os.environ, "PYTHONPATH": str(Path(cli.__file__).parents[1])}
    command = [sys.executable, *start, *words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert "Traceback" not in done.stderr
    assert done.returncode == (0 if words == ["strategies"] else 2)
    assert not (trapped / "trace").exists(), (trapped / "trace").read_text()


@pytest.mark.parametrize("named", [True, False])
def test_a_process_of_a_study_imports_what_its_study_names(trapped: Path, named: bool) -> None:
    """From the working folder, which `python -m` would put before everything that is installed."""
    strategies = [{"stranger_parts:Careful": {"alpha": 5}}] if named else [{"egsw": {"alpha": -5}}]
    record = load_study(study_of(trapped)).record()
    record["arms"][1]["config"]["strategies"] = strategies
    (trapped / "study").mkdir()
    (trapped / "study" / "study.json").write_text(json.dumps(record))
    command = [sys.executable, "-m", "explorl.study.arm", "study", "--arm", "b"]
    done = subprocess.run(command, env=environment(1, 0), capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "alpha is" in (trapped / "study" / "arms" / "b" / "seed-0" / "error.txt").read_text()
    assert (f"importing stranger_parts from the working folder {trapped}" in done.stderr) == named
    assert (trapped / "trace").exists() == named
    assert not named or (trapped / "trace").read_text() == "('Careful',) {}\n"
