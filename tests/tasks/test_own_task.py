"""Tasks of one's own: found by import path and entry point, checked in words, and used by every command."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import warnings
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from explorl.cli import app as cli
from explorl.cli.run_evaluations import parse_options
from explorl.core import plugins
from explorl.core.config import ConfigError, load_config
from explorl.core.store import RunStore, StoreError
from explorl.evaluation.harness import run_evaluation
from explorl.evaluation.protocols import protocol, task_label
from explorl.models import load_policy
from explorl.study.spec import load_study
from explorl.tasks import Problem, Task, Verdict, get_task, registry, takes_option, task_type
from explorl.tasks.base import json_text, problems_of, verdicts_of
from explorl.training.run_setup import check_holdout

MODULE = '''
from dataclasses import dataclass
from functools import partial

from explorl.tasks import Problem, Task, Verdict


class Puzzle(Task):
    """As little as a task can be."""

    def problems(self, split, *, limit=None):
        start = 0 if split == "train" else 100
        return [Problem(f"{n}", {"n": n if n % 2 else str(n), f"key{n}": n / 2}) for n in range(start, start + 20)]

    def prompt(self, problem, template=None):
        return f"{problem.id}+1=\\n"

    def verify(self, completion, problem, *, opened=False):
        assert problem.data["n"] in (int(problem.id), problem.id)
        return Verdict(str(int(problem.data["n"]) + 1) in completion)


@dataclass(frozen=True)
class Sized(Puzzle):
    size: int
    name: str = "sized"
    data_dir: str | None = None


class Deaf(Puzzle):
    reads_files = False
    dataset = object()  # a data set that it keeps for itself

    def __init__(self, volume=3):
        self.volume = volume


class NoTask:
    pass


class Half(Task):
    def problems(self, split, *, limit=None):
        return []


class Short(Puzzle):
    def verify(self, completion, problem):
        return True


class Boolean(Puzzle):
    def verify(self, completion, problem, *, opened=False):
        return "1" in completion


class Broken(Puzzle):
    def __init__(self):
        {}["missing"]


class Listed(Puzzle):
    templates = "chat"


class Parted(Puzzle):
    reward_parts = {"brevity": 1.0}


class Thinking(Puzzle):
    def prompt(self, problem, template=None):
        return [{"role": "user", "content": problem.id}]

    def verify(self, completion, problem, *, opened=False):
        return Verdict(opened)


class Same(Puzzle):
    def problems(self, split, *, limit=None):
        return super().problems("train")


class Unheld(Puzzle):
    def problems(self, split, *, limit=None):
        return super().problems(split) if split == "train" else []


class Weighed(Puzzle):
    reward_parts = {"correctness": "1"}


class Anything(Deaf):
    def __init__(self, **options):
        super().__init__(**options)


class Nothing(Puzzle):
    def __new__(cls):
        return 7


def make(volume=1):
    return Deaf(volume)


made = Puzzle()
number = 7
'''

LOAD = "there is no module"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with modules in it, on Python's path as `python -m` puts it there."""
    (tmp_path / "own_puzzles.py").write_text(MODULE, encoding="utf-8")
    (tmp_path / "own_syntax.py").write_text("def f(:\n", encoding="utf-8")
    (tmp_path / "own_needs.py").write_text("import not_installed_anywhere\n", encoding="utf-8")
    (tmp_path / "own_raises.py").write_text("\n1 / 0\n", encoding="utf-8")
    (tmp_path / "own_leaves.py").write_text("import sys\n\nsys.exit('bye')\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    for module in [name for name in sys.modules if name.startswith("own_")]:
        monkeypatch.delitem(sys.modules, module)
    return tmp_path


# --- finding ----------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("here")
def test_by_import_path() -> None:
    task = get_task("own_puzzles:Puzzle")
    assert isinstance(task, Task)
    assert (task.name, task.templates, task.splits) == ("puzzle", (), ("sft", "train", "holdout"))
    sized = get_task("own_puzzles:Sized", size=3, data_dir="there")
    assert (sized.name, sized.size) == ("sized", 3)  # type: ignore[attr-defined]
    assert get_task("own_puzzles:Anything", volume=6).volume == 6  # type: ignore[attr-defined]
    assert task_type("own_puzzles:Sized").__name__ == "Sized"
    assert takes_option("own_puzzles:Sized", "size")
    assert takes_option("own_puzzles:Anything", "whatever")
    assert not takes_option("own_puzzles:Puzzle", "size")


def test_a_class_has_a_name(here: Path) -> None:
    class Riddle(Task):
        pass

    class Harder(Riddle):
        pass

    @dataclass(frozen=True)
    class Named(Riddle):
        name: str = "easy"

    assert (Riddle.name, Harder.name, Named.name) == ("riddle", "harder", "easy")
    assert task_label(get_task("own_puzzles:Deaf")) == "deaf"


@pytest.mark.usefixtures("here")
def test_by_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    points = [
        EntryPoint("sums", "own_puzzles:Sized", registry.KIND.group),
        EntryPoint("gone", "missing_package:Gone", registry.KIND.group),
        EntryPoint("countdown", "own_puzzles:Sized", registry.KIND.group),
    ]
    monkeypatch.setattr(plugins, "entry_points", lambda group: points if group == "explorl.tasks" else [])
    assert get_task("sums", size=2).name == "sums"
    assert type(get_task("countdown")).__name__ == "Countdown"
    with pytest.raises(ValueError, match=r"task 'gone' \(missing_package:Gone\): there is no module 'missing_package'"):
        get_task("gone")
    with pytest.raises(ValueError, match="unknown task 'sms'; did you mean 'sums'"):
        get_task("sms")
    assert load_config(values={"task": {"name": "sums", "size": 4}}).task.options == {"size": 4}


BAD = [
    ("own_puzzle:Puzzle", "there is no module 'own_puzzle'; start in the folder that has it"),
    ("own_puzzles.deep:Puzzle", "there is no module 'own_puzzles.deep'"),
    ("own_puzzles:Puzle", "own_puzzles has no 'Puzle' to use; it has Puzzle, Sized"),
    ("own_puzzles:Puzzle.deeper", r"own_puzzles has no 'Puzzle\.deeper'"),
    ("own_puzzles:NoTask", r"is not a task; write class NoTask\(Task\), with Task from explorl\.tasks"),
    ("own_puzzles:Half", "lacks prompt and verify; a task needs problems, prompt and verify"),
    ("own_puzzles:Short", r"verify does not accept the arguments .*; write verify\(self, completion, problem, \*,"),
    ("own_puzzles:made", "is an instance of a task; name its class"),
    ("own_puzzles:make", r"is a function; name a class instead: class Make\(Task\)"),
    ("own_puzzles:number", "is 7; name a subclass"),
    ("own_puzzles:Sized", r"needs size; set task\.size"),
    ("own_syntax:Puzzle", r"importing own_syntax failed: SyntaxError: .* \(own_syntax\.py, line 1\)"),
    ("own_needs:Puzzle", "own_needs needs 'not_installed_anywhere', which is not installed"),
    ("own_raises:Puzzle", r"failed: ZeroDivisionError: division by zero \(own_raises\.py, line 2\)"),
    ("own_leaves:Puzzle", r"failed: SystemExit: bye \(own_leaves\.py, line 3\)"),
    ("own_puzzles.Puzzle", "write an import path as own_puzzles:Puzzle"),
    ("./own_puzzles.py:Puzzle", "write an import path as own_puzzles:Puzzle"),
    ("own_puzzles.py:Puzzle", "write an import path as own_puzzles:Puzzle"),
    ("my rows.jsonl", r"to use rows of a file, set the task jsonl and path: my rows\.jsonl"),
    ("own_puzzles:", "write an import path like my_pkg.puzzles:Puzzle"),
    ("math:own", "unknown task 'math:own'"),
]


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(("name", "message"), BAD)
def test_what_cannot_be_found_is_said_in_words(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        get_task(name)
    assert name in str(error.value)
    with pytest.raises(ConfigError, match=message):  # before a folder is made or a weight is loaded
        load_config(values={"task": {"name": name}})


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(("name", "message"), BAD)
def test_the_command_prints_no_traceback(name: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    for command in (["config", "show", "--set", f"task.name={name!r}"], ["eval", "--model", "tiny", "--task", name]):
        with pytest.raises(SystemExit) as ended:
            cli.main(command)
        assert ended.value.code == 2
        error = capsys.readouterr().err
        assert "Traceback" not in error
        assert len(error.splitlines()) <= 3


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("own_puzzles:Nothing", "returned 7; its class must create an instance of explorl.tasks.Task"),
        ("own_puzzles:Broken", r"could not be created: KeyError: 'missing' \(own_puzzles\.py, line"),
        ("own_puzzles:Listed", "templates is 'chat'; use names"),
        ("own_puzzles:Weighed", "reward_parts has '1' for 'correctness'; use a weight like 1.0"),
        ("own_puzzles:Parted", "correct_part is 'correctness', which is not in reward_parts; set it to one of brevity"),
    ],
)
def test_what_cannot_be_made_is_said_in_words(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        get_task(name)


# --- options ----------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("here")
def test_options_stand_beside_the_name(tmp_path: Path) -> None:
    config = load_config(overrides=["task.name=own_puzzles:Sized", "task.size=4", "task.data_dir=there"])
    assert config.task.options == {"size": 4, "data_dir": Path("there")}
    file = tmp_path / "resolved.yaml"
    file.write_text(yaml.safe_dump(config.dump()))
    assert load_config(file) == config
    for key, message in (
        ("task.sise=4", "unknown option of task 'own_puzzles:Sized': 'sise'; did you mean 'size'"),
        ("task.templat=chat", "'templat'; did you mean 'template'"),
    ):
        with pytest.raises(ConfigError, match=message):
            load_config(overrides=["task.name=own_puzzles:Sized", "task.size=4", key])
    with pytest.raises(ConfigError, match="unknown option of task 'countdown': 'verifier'"):
        load_config(overrides=["task.verifier=math"])


@pytest.mark.usefixtures("here")
def test_a_preset_says_nothing_of_another_task(tmp_path: Path) -> None:
    config = load_config(preset="tiny", overrides=["task.name=own_puzzles:Puzzle"])
    assert (config.task.template, config.sft.attempts, config.model.name) == (None, None, "tiny")
    assert config.task.train_problems == 4000
    tiny = load_config(preset="tiny", overrides=["task.data_dir=there"])
    assert (tiny.task.template, tiny.sft.attempts) == ("terse", (0, 0))
    ordered = load_config(preset="tiny", overrides=["task.size=3", "task.name=own_puzzles:Sized"])
    assert ordered.task.options == {"size": 3}
    study = tmp_path / "study.yaml"
    study.write_text(
        "name: own\nbase: {preset: tiny, task: {name: own_puzzles:Sized, size: 3}}\n"
        "arms: {a: {}, b: {set: {task.size: 4}}}\nbaseline: a\n"
    )
    arms = load_study(study).arms
    assert [arm.config["task"]["size"] for arm in arms] == [3, 4]
    assert arms[0].config["task"]["template"] is None
    study.write_text(study.read_text().replace("size: 3", "sise: 3"))
    with pytest.raises(ConfigError, match="did you mean 'size'"):
        load_study(study)
    study.write_text(study.read_text().replace("sise: 3", "size: 3, template: chat"))
    with pytest.raises(ConfigError, match=r"task\.template is 'chat'; sized has none: remove it"):
        load_study(study)


def test_options_of_the_command() -> None:
    assert parse_options(["verifier=number", "tolerance=1e-2", "holdout=100"]) == {
        "verifier": "number", "tolerance": 0.01, "holdout": 100,
    }  # fmt: skip
    with pytest.raises(ValueError, match="--option 'verifier' is not key=value; write it like verifier=number"):
        parse_options(["verifier"])


@pytest.mark.usefixtures("here")
def test_a_script_elsewhere_finds_the_working_folder(tmp_path: Path, here: Path) -> None:
    """As the installed command does; but not where Python is told to be safe."""
    script = tmp_path / "bin" / "explorl"
    script.parent.mkdir()
    script.write_text("from explorl.cli.app import main\n\nmain()\n")
    words = ["config", "show", "--set", "task.name=own_puzzles:Puzzle"]

    def said(*python: str) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "PYTHONPATH": str(Path(cli.__file__).parents[1])}
        command = [sys.executable, *python, str(script), *words]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)

    (here / "yaml.py").write_text("raise SystemError('mine')\n")  # what is installed comes first
    output = said()
    assert output.returncode == 0, output.stderr
    safe = said("-P")
    assert safe.returncode == 2
    assert "there is no module 'own_puzzles'" in safe.stderr


# --- the contract -----------------------------------------------------------------------------------------------------


class Given(Task):
    """What `problems`, `prompt` and `verify` give, as told."""

    def __init__(self, problems: Any = (), prompt: Any = "a", verdict: Any = None) -> None:
        self.given, self.asked, self.verdict = problems, prompt, verdict

    def problems(self, split: str, *, limit: int | None = None) -> list[Problem]:
        return self.given

    def prompt(self, problem: Problem, template: str | None = None) -> Any:
        return self.asked

    def verify(self, completion: str | bytes, problem: Problem, *, opened: bool = False) -> Any:
        return self.verdict


ONE = [Problem("a", {"b": 1})]


@pytest.mark.parametrize(
    ("task", "message"),
    [
        (Given(), "task 'given' has no problems in split 'train'; its splits: sft, train, holdout"),
        (Given(["a"]), r"returned 'a'; return Problem\('id', "),
        (Given([Problem(1, {})]), r"returned Problem\(id=1"),  # type: ignore[arg-type]
        (Given(ONE * 2), "returned the id 'a' twice in split 'train'; give each problem a unique id"),
        (Given(ONE, prompt=""), "prompt of task 'given' returned ''; return text, or messages"),
        (Given(ONE, prompt={"role": "user"}), "returned {'role': 'user'}"),
        (Given(ONE, prompt=[{"role": "user", "content": None}]), "return text, or messages like"),
        (
            Given([Problem("a\ud800", {})]),
            r"returned the id 'a\\ud800'; remove half of a surrogate pair",
        ),
        (
            Given(ONE, prompt="a\udfff"),
            r"returned 'a\\udfff', which no tokenizer accepts; remove half of a surrogate pair",
        ),
    ],
)
def test_what_a_task_gives_is_checked(task: Task, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        task.rows("train")


def test_verdicts_are_checked() -> None:
    with pytest.raises(
        ValueError, match=r"verify of task 'given' returned True; return a Verdict, like Verdict\(True\)"
    ):
        Given(ONE, verdict=True).verify_many(["a"], ONE)
    with pytest.raises(ValueError, match="returned True"):
        Given(ONE, verdict=True).rewards("a", ONE[0])
    with pytest.raises(ValueError, match="answer of a verdict is 42; use text"):
        Verdict(True, answer=42)  # type: ignore[arg-type]
    assert Given(ONE, verdict=Verdict(True)).reward("a", ONE[0]) == pytest.approx(1.1)


@pytest.mark.parametrize("flag", [None, "no", 0.5, float("nan"), 2])
def test_a_verdict_is_a_yes_or_a_no(flag: Any) -> None:
    with pytest.raises(ValueError, match=f"correct of a verdict is {flag!r}; use True or False"):
        Verdict(flag)
    with pytest.raises(ValueError, match="well_formed of a verdict is"):
        Verdict(True, flag)


def test_a_verdict_may_be_numpys() -> None:
    verdict = Verdict(np.bool_(True), 0)  # type: ignore[arg-type]
    assert (verdict.correct, verdict.well_formed) == (True, False)
    assert {type(verdict.correct), type(verdict.well_formed)} == {bool}


@pytest.mark.parametrize(
    ("verdicts", "message"),
    [
        ([Verdict(True)], "verify_many of task 'many' returned 1 verdicts for 2 completions; return one for each"),
        ([True, False], "verify_many of task 'many' returned True; return Verdicts"),
    ],
)
def test_verdicts_of_many_are_checked(verdicts: Any, message: str) -> None:
    class Many(Given):
        def verify_many(self, completions: Any, problems: Any, *, opened: Any = None) -> Any:
            return verdicts

    with pytest.raises(ValueError, match=message):
        verdicts_of(Many(), ["a", "b"], ONE * 2, [False, False])
    columns: dict[str, Any] = {"prompts": ["a"] * 2, "completions": ["b"] * 2, "id": ["a"] * 2, "data": ["{}"] * 2}
    with pytest.raises(ValueError, match=message):
        Many().reward_functions()[0](**columns)


@pytest.mark.parametrize(
    ("value", "good"), [(np.float32(1), 1.0), (np.array(0.5), 0.5), (True, 1.0), (None, None), ("1", ...)]
)
def test_values_of_rewards_are_numbers(value: Any, good: Any) -> None:
    class Valued(Given):
        def rewards(self, completion: Any, problem: Any, *, opened: bool = False) -> Any:
            return {"correctness": value, "format": 0.0}

    columns: dict[str, Any] = {"prompts": ["a"], "completions": ["b"], "id": ["a"], "data": ["{}"]}
    correctness = Valued().reward_functions()[0]
    if good is not ...:
        assert correctness(**columns) == [good]
        return
    with pytest.raises(ValueError, match="rewards of task 'valued' returned '1' for 'correctness'"):
        correctness(**columns)


def test_limits_hold_where_a_task_forgets_them() -> None:
    many = Given([Problem(str(n), {}) for n in range(9)])
    assert len(problems_of(many, "train", 4)) == len(many.rows("train", limit=4)) == 4
    assert len(problems_of(Given(iter(ONE)), "train")) == 1


def test_data_that_is_not_json_is_said_in_words() -> None:
    with pytest.raises(ValueError, match=r"the data of problem 'a' of task 'given' is not JSON \(.*set.*\); use text"):
        json_text(Given(), "a", {"b": {1, 2}})


def test_a_part_without_a_value_is_said_in_words() -> None:
    class Parts(Given):
        reward_parts = {"correctness": 1.0, "brevity": 0.5}  # noqa: RUF012

    columns: dict[str, Any] = {"prompts": ["a"], "completions": ["b"], "id": ["a"], "data": ['{"b": 1}']}
    correctness, brevity = Parts(ONE, verdict=Verdict(True)).reward_functions()
    assert correctness(**columns) == [1.0]
    with pytest.raises(ValueError, match="reward_parts of task 'parts' has 'brevity', but `rewards` returns no value"):
        brevity(**columns)


def test_a_task_without_examples_says_what_to_do() -> None:
    with pytest.raises(
        ValueError, match="'given' has no reference solutions to fine-tune on: its class has no `examples`"
    ):
        Given().examples(3)


# --- commands ---------------------------------------------------------------------------------------------------------

SMALL = [
    "model.lora=null", "rollout.max_tokens=8", "training.steps=1", "training.prompts_per_step=4",
    "training.generations=2", "training.micro_batch=8", "task.name=own_puzzles:Puzzle", "evaluation.every=1",
    "evaluation.problems=4", "evaluation.samples=2",
]  # fmt: skip


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            "training.prompts_per_step=24",
            "training.prompts_per_step is 24, and there are 20 problems to train on; use 20",
        ),
        ("task.template=chat", "task.template is 'chat'; puzzle has none: leave it out"),
        ("task.name=own_puzzles:Unheld", "no problems in split 'holdout'; its splits: sft, train, holdout; to train"),
    ],
)
def test_a_run_that_could_not_train_or_score_is_not_begun(
    change: str, message: str, here: Path, small_policy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = [word for setting in (*SMALL, f"model.name={small_policy}", change) for word in ("--set", setting)]
    assert _run(["train", *settings, "--run", "run"]) == 2
    assert message in " ".join(capsys.readouterr().err.split())
    assert not (here / "run").exists()


def test_a_chat_template_that_opens_think_is_told_to_the_task(
    here: Path, small_policy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In training, in evaluations during it and in those afterwards."""
    shutil.copytree(small_policy, here / "thinker")
    template = "{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}<think>\n{% endif %}"
    (here / "thinker" / "chat_template.jinja").write_text(template)
    settings = [*SMALL, "model.name=thinker", "task.name=own_puzzles:Thinking"]
    assert _run(["train", *(f"--set={setting}" for setting in settings), "--run", "run"]) == 0, capsys.readouterr().err
    metrics = RunStore.open(here / "run").metrics()
    assert [line["pass@1"] for line in metrics if line["kind"] == "evaluation"] == [1.0, 1.0]
    assert [line["rewards/correctness/mean"] for line in metrics if line["kind"] == "train"] == [1.0]


@pytest.mark.usefixtures("here")
def test_held_out_problems_that_are_trained_on_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_config(overrides=[*SMALL, "task.name=own_puzzles:Same"])
    task = get_task(config.task.name)
    with pytest.warns(UserWarning, match="4 of the 4 held-out problems of task 'same' are also trained on"):
        check_holdout(config, task, task.problems("train"))
    other = get_task("own_puzzles:Puzzle")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_holdout(config, other, other.problems("train"))
        check_holdout(config, other, other.problems("train"))
        grids = lambda *_, **__: [Problem("a", {"grid": np.arange(2)})]  # noqa: E731
        monkeypatch.setattr(type(other), "problems", grids)  # which JSON does not hold, and == does not compare
        check_holdout(config, other, other.problems("train"))


def test_training_records_the_path_and_goes_on_from_it(
    here: Path, small_policy: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = [word for setting in (*SMALL, f"model.name={small_policy}") for word in ("--set", setting)]
    assert _run(["train", *settings, "--run", "run"]) == 0
    store = RunStore.open(here / "run")
    assert store.config()["task"]["name"] == "own_puzzles:Puzzle"
    lines = store.metrics()
    assert [line["step"] for line in lines if line.get("kind") == "train"] == [1]
    assert [line["step"] for line in lines if line.get("kind") == "evaluation"] == [0, 1]
    (here / "own_puzzles.py").rename(here / "moved.py")
    monkeypatch.delitem(sys.modules, "own_puzzles")
    sys.path_importer_cache.clear()
    capsys.readouterr()
    assert _run(["train", "--resume", "run"]) == 2
    assert LOAD in capsys.readouterr().err


def _run(command: list[str]) -> int:
    try:
        cli.main(command)
    except SystemExit as ended:
        return int(ended.code or 0)
    return 0


def test_evaluation_by_name_and_with_options(here: Path, small_policy: Path) -> None:
    policy = load_policy(str(small_policy), device="cpu")
    settings = protocol("plain", samples=2, max_tokens=4)
    options = {"data_dir": here, "size": 3}
    names = ["own_puzzles:Sized", "own_puzzles:Deaf"]
    sized, deaf = run_evaluation([policy], names, settings, here / "out", limit=3, task_options=options)
    assert sized.evaluation is not None
    assert deaf.evaluation is not None
    assert (sized.evaluation.task, deaf.evaluation.task) == ("sized", "deaf")
    identity = json.loads((sized.folder / "evaluation.json").read_text())
    assert identity["task_options"] == {"size": 3}
    assert "task_options" not in json.loads((deaf.folder / "evaluation.json").read_text())
    with pytest.raises(StoreError, match=r"another task_options\.size: 3 there, 4 requested"):
        run_evaluation([policy], names[:1], settings, here / "out", limit=3, task_options={"size": 4})
    with pytest.raises(ValueError, match="unknown option of task 'own_puzzles:Deaf': 'sise'"):
        run_evaluation([policy], names[1:], settings, here / "out", limit=3, task_options={"sise": 4})
    with pytest.raises(ValueError, match="verify of task 'boolean' returned"):
        run_evaluation([policy], ["own_puzzles:Boolean"], settings, here / "out", limit=3)


def test_fine_tuning_takes_as_many_examples_as_there_are(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"prompt": f"{n}+1=", "answer": n + 1, "completion": f"<answer>{n + 1}</answer>"} for n in range(40)]
    (here / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = ["task.name=jsonl", "task.path=rows.jsonl", "task.style=tags", "task.template=plain", "task.holdout=10"]
    settings += ["sft.epochs=1", "sft.batch_size=3", "sft.score=false", "sft.warmup_steps=0"]
    words = [word for setting in settings for word in ("--set", setting)]
    assert _run(["sft", "--preset", "tiny", *words, "--run", "run"]) == 0
    lines = [json.loads(line) for line in (here / "run" / "metrics.jsonl").read_text().splitlines()]
    assert max(line["step"] for line in lines) == 10  # 30 rows, 3 at a time
    capsys.readouterr()
    puzzle = [*words, "--set", "sft.attempts=[0, 1]", "--run", "other"]
    assert _run(["sft", "--preset", "tiny", *puzzle]) == 2
    assert "sft.attempts is (0, 1), and task 'jsonl' has no such option; leave it out" in capsys.readouterr().err
    assert _run(["sft", "--preset", "tiny", "--set", "task.name=own_puzzles:Puzzle", "--run", "third"]) == 2
    assert "'puzzle' has no reference solutions to fine-tune on" in capsys.readouterr().err
