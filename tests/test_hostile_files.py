"""Files that strangers bring: each ends a command at once, with exit code 2 and a line that names the file."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers.trainer_pt_utils import safe_globals

from explorl.cli.app import main
from explorl.core.config import load_config
from explorl.core.documents import MAX_DEPTH, DocumentError, load_tensors, parse_json
from explorl.core.store import RunStore
from explorl.core.yaml_documents import parse_yaml

from .hostile import JSON, TEMPLATES, YAML, raw

SECONDS = 20.0
"""Processor time in which the slowest of them must be refused, on a slow machine."""


def refused(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """Return what a command says, where it refuses its input as it should."""
    capsys.readouterr()
    begun = time.process_time()
    with pytest.raises(SystemExit) as exit_:
        main([str(argument) for argument in arguments])
    seconds, error = time.process_time() - begun, capsys.readouterr().err
    assert exit_.value.code == 2, error
    assert "Traceback" not in error
    assert 1 <= len(error.splitlines()) <= 3, error
    assert all(len(line) < 3_000 for line in error.splitlines())
    assert error.startswith("explorl: ")
    assert not raw(error)
    assert seconds < SECONDS
    return error


def written(path: Path, content: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


# --- YAML -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", YAML)
def test_yaml_as_configuration_and_study(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = written(tmp_path / "own.yaml", YAML[kind])
    assert "own.yaml" in refused(capsys, "config", "show", "--config", file)
    assert "own.yaml" in refused(capsys, "study", file, "--plan")


@pytest.mark.parametrize("kind", ["a billion laughs", "5,000 nested lists", "an object of Python", "a million digits"])
def test_yaml_wherever_it_is_read(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, run = written(tmp_path / "own.yaml", YAML[kind]), tmp_path / "run"
    error = refused(capsys, "train", "--preset", "tiny", "--run", run, "--launch", file)
    assert "own.yaml" in error
    store = RunStore(run)
    store.begin(load_config(preset="tiny").dump(), "grpo")
    written(store.config_path, YAML[kind])
    assert "config.yaml" in refused(capsys, "train", "--resume", run)
    assert "--set" in refused(capsys, "config", "show", "--set", f"task={YAML[kind]}")
    options = ("--model", "tiny", "--task", "countdown-mini", "--out", tmp_path / "e")
    assert "--option" in refused(capsys, "eval", *options, "--option", f"sizes={YAML[kind]}")


def test_yaml_that_is_honest_is_read_as_before(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = "a: &a {x: 1, y: [5e-6, 1.5E3, .5e1, 1_000, 0x10, on, ~, 2024-01-01]}\nb:\n  <<: *a\n  z: *a\n"
    values = {"x": 1, "y": [5e-6, 1500.0, 5.0, 1000, 16, True, None, "2024-01-01"]}
    assert parse_yaml(text, "own.yaml") == {"a": values, "b": {**values, "z": values}}
    deep = "[" * (MAX_DEPTH - 1) + "1" + "]" * (MAX_DEPTH - 1)
    assert parse_yaml(deep, "own.yaml") == json.loads(deep) == parse_json(deep, "own.json")
    file = written(tmp_path / "own.yaml", "training: &t {steps: 3}\nsft: {epochs: 1}\n")
    with pytest.raises(SystemExit) as exit_:
        main(["config", "show", "--config", str(file)])
    assert not exit_.value.code
    assert yaml.safe_load(capsys.readouterr().out)["training"]["steps"] == 3


# --- JSON and JSONL ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        (name, kind)
        for name in ("study.json", "run.json", "metrics.jsonl", "provenance.json")
        for kind in JSON
        if (name, kind) not in (("metrics.jsonl", "nothing"), ("provenance.json", "a list"))
    ],
)
def test_json_in_a_folder(name: str, kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content = JSON[kind] if isinstance(JSON[kind], bytes) else str(JSON[kind]).encode()
    folder = tmp_path / "run"
    if name == "study.json":
        written(folder / name, content)
        for command in (("study", "status", folder), ("report", folder), ("watch", folder, "--once")):
            assert "study.json" in refused(capsys, *command)
        return
    store = RunStore(folder)
    store.begin(load_config(preset="tiny").dump(), "grpo")
    store.append_metrics({"step": 2, "kind": "train"})
    written(folder / name, content + b"\n")
    assert name in refused(capsys, "train", "--resume", folder)


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ('{"prompt": "?", "answer": ' + "[" * 5_000 + "]" * 5_000 + "}", "line 2 is nested over 64 levels"),
        ('{"prompt": "?", "answer": 1, "extra": ' + '{"a":' * 300 + "1" + "}" * 301, "line 2 is nested over 64 levels"),
        ('{"prompt": "?", "answer": ' + "9" * 5_000 + "}", "line 2: not a JSON object"),
        ('{"prompt": "?", "answer": NaN}', "line 2: answer is nan"),
        ('{"prompt": "?", "answer": 1, "answer": 2}', "line 2: duplicate key 'answer'"),
        ("[" * 100_000, "line 2"),
        ("\0", "line 2: not a JSON object"),
        ('{"prompt": "?", "answer": "(a+)+$' + "(" * 5_000 + '", "verifier": "regex"}', "line 2: answer is"),
    ],
)
def test_rows_of_a_data_set(row: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = written(tmp_path / "rows.jsonl", f'{{"prompt": "1?", "answer": 1}}\n{row}\n')
    error = refused(
        capsys, "eval", "--model", "tiny", "--task", "jsonl", "--option", f"path={file}", "--out", tmp_path / "e"
    )
    assert words in error
    assert "rows.jsonl" in error


@pytest.mark.parametrize("content", [b"Question,Correct Answer\n" + b"a" * 200_000, b"Question,\xff\n\xff,b\n"])
def test_a_table_of_questions(content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written(tmp_path / "choice.csv", content)
    options = ("--task", "choice", "--data-dir", tmp_path, "--option", "file=choice.csv", "--out", tmp_path / "e")
    assert "choice.csv, line" in refused(capsys, "eval", "--model", "tiny", *options)


@pytest.mark.parametrize("kind", JSON)
def test_a_file_of_solve_rates(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content = JSON[kind]
    file = written(tmp_path / "rates.json", content if isinstance(content, bytes) else str(content))
    strategy = f"strategies=[{{curriculum: {{solve_rates: {file}}}}}]"
    error = refused(capsys, "train", "--preset", "tiny", "--run", tmp_path / "run", "--set", strategy)
    assert "rates.json" in error


@pytest.mark.parametrize("kind", ["pipe", "device", "folder"])
@pytest.mark.timeout(60)
def test_solve_rates_that_are_no_file(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A command that only shows a configuration neither waits for a pipe nor fills memory from a device."""
    places = {"pipe": tmp_path / "pipe", "device": Path("/dev/full"), "folder": tmp_path}
    os.mkfifo(places["pipe"])
    strategy = f"strategies=[{{curriculum: {{solve_rates: {places[kind]}}}}}]"
    assert "solve_rates" in refused(capsys, "config", "show", "--set", strategy)


# --- tensors ----------------------------------------------------------------------------------------------------------


class _Command:
    """A pickle that writes a file when it is loaded."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return (Path.write_text, (self.mark, "it ran"))


def _archive(path: Path, body: bytes) -> None:
    """Write what torch takes for a file of its own, with this pickle in it."""
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in (("data.pkl", body), ("version", b"3\n"), ("byteorder", b"little")):
            archive.writestr(f"archive/{name}", content)


def _shared(path: Path) -> None:
    value: Any = [0]
    for _ in range(40):
        value = [value, value]
    torch.save(value, path)


def _wide(path: Path) -> None:
    """A tensor of terabytes in a file of a kilobyte: each of its numbers is the same one."""
    torch.save({"state": {0: {"exp_avg": torch.zeros(1, dtype=torch.uint8).expand(1 << 42)}}, "cpu": 0}, path)


def _nested(path: Path) -> None:
    body = b"\x80\x02" + b"]" * 3_000 + b"a" * 2_999 + b"."
    _archive(path, body)


TENSORS: dict[str, Callable[[Path, Path], object]] = {
    "code, as an archive": lambda path, mark: torch.save(_Command(mark), path),
    "code, in a dictionary": lambda path, mark: torch.save({"state": {}, "param_groups": [_Command(mark)]}, path),
    "code, as a bare pickle": lambda path, mark: path.write_bytes(pickle.dumps(_Command(mark))),
    "code, by hand": lambda path, mark: _archive(path, b"cos\nsystem\n(S'touch " + str(mark).encode() + b"'\ntR."),
    "shared lists without end": lambda path, mark: _shared(path),
    "nested lists": lambda path, mark: _nested(path),
    "a number as terabytes": lambda path, mark: _wide(path),
    "a tensor of terabytes": lambda path, mark: torch.save(torch.zeros(1, dtype=torch.uint8).expand(1 << 42), path),
    "half of it": lambda path, mark: path.write_bytes(path.read_bytes()[:-9]),
    "text": lambda path, mark: path.write_text("none"),
    "an archive of something else": lambda path, mark: _archive(path, b"none"),
    "another thing": lambda path, mark: torch.save([1], path),
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, small_policy: Path) -> Path:
    """A run with a checkpoint that waits for more steps."""
    folder = tmp_path_factory.mktemp("trained")
    small = {
        "model": {"name": str(small_policy)},
        "rollout": {"max_tokens": 8},
        "training": {"steps": 2, "prompts_per_step": 1, "generations": 4, "micro_batch": 4, "checkpoint_every": 1,
                     "keep_checkpoints": 1},
        "evaluation": {"ends": 2, "samples": 2},
    }  # fmt: skip
    config = written(folder / "own.yaml", yaml.safe_dump(load_config(preset="tiny", values=small).dump()))
    with pytest.raises(SystemExit) as exit_:
        main(["train", "--config", str(config), "--run", str(folder / "run")])
    assert not exit_.value.code
    shutil.rmtree(folder / "run" / "model")
    return folder / "run"


@pytest.mark.parametrize("kind", TENSORS)
@pytest.mark.parametrize("name", ["optimizer.pt", "scheduler.pt", "rng_state.pth"])
def test_tensors_of_a_checkpoint(
    kind: str, name: str, trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, mark = tmp_path / "run", tmp_path / "mark"
    shutil.copytree(trained, run)
    (checkpoint,) = run.glob("checkpoints/checkpoint-*")
    TENSORS[kind](checkpoint / name, mark)
    error = refused(capsys, "train", "--resume", run)
    assert f"in {checkpoint.name}, {name}" in error
    assert "remove" in error
    assert not mark.exists()


def _first(state: dict[str, Any]) -> dict[str, Any]:
    """The state of an optimizer's first parameter."""
    return next(iter(state["state"].values()))


MISFITS: dict[str, tuple[str, Callable[[Any], object]]] = {
    "a state that is a number": ("optimizer.pt", lambda state: state.update(state=3)),
    "no groups": ("optimizer.pt", lambda state: state.update(param_groups=[])),
    "groups that are a number": ("optimizer.pt", lambda state: state.update(param_groups=3)),
    "empty groups": ("optimizer.pt", lambda state: state.update(param_groups=[{}, {}])),
    "parameters that are a number": ("optimizer.pt", lambda state: state["param_groups"][0].update(params=3)),
    "a learning rate in words": ("optimizer.pt", lambda state: state["param_groups"][0].update(lr="x")),
    "one number for betas": ("optimizer.pt", lambda state: state["param_groups"][0].update(betas=3)),
    "another variant": ("optimizer.pt", lambda state: state["param_groups"][0].update(amsgrad=True)),
    "a moment of three numbers": ("optimizer.pt", lambda state: _first(state).update(exp_avg=torch.zeros(3))),
    "a moment that is one number": (
        "optimizer.pt",
        lambda state: _first(state).update(exp_avg=torch.zeros(1).expand(_first(state)["exp_avg"].shape)),
    ),
    "a step in words": ("optimizer.pt", lambda state: _first(state).update(step="x")),
    "an epoch in words": ("scheduler.pt", lambda state: state.update(last_epoch="x")),
    "a number for rates": ("scheduler.pt", lambda state: state.update(base_lrs=3)),
    "a number for a method": ("scheduler.pt", lambda state: state.update(step=3)),
    "a number for a class": ("scheduler.pt", lambda state: state.update(__class__=3)),
    "a number for Python": ("rng_state.pth", lambda state: state.update(python=3)),
    "a number for NumPy": ("rng_state.pth", lambda state: state.update(numpy=3)),
    "a generator of three bytes": ("rng_state.pth", lambda state: state.update(cpu=torch.zeros(3))),
    "looks that are a number": ("lens.pt", lambda state: state.update(looks=3)),
    "a look that is a number": ("lens.pt", lambda state: state.update(looks=[3])),
    "a look of numbers": ("lens.pt", lambda state: state.update(looks=[{"view": 3, "sampled": 3}])),
    "observers that are numbers": ("lens.pt", lambda state: state.update(observers=[3])),
}
"""Changes of a checkpoint's files after which they are sound, and do not fit what they are given back to."""


@pytest.mark.parametrize("kind", MISFITS)
def test_tensors_that_fit_nothing(kind: str, trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, (name, change) = tmp_path / "run", MISFITS[kind]
    shutil.copytree(trained, run)
    (checkpoint,) = run.glob("checkpoints/checkpoint-*")
    with safe_globals():
        state = torch.load(checkpoint / name, weights_only=True)
    change(state)
    torch.save(state, checkpoint / name)
    error = refused(capsys, "train", "--resume", run)
    assert f"in {checkpoint.name}, " in error
    assert name in error
    assert "remove" in error


@pytest.mark.parametrize("kind", [kind for kind in TENSORS if kind != "another thing"])
def test_tensors_that_are_read(kind: str, tmp_path: Path) -> None:
    path, mark = tmp_path / "lens.pt", tmp_path / "mark"
    torch.save({"looks": [], "observers": [("a", torch.ones(2))]}, path)
    assert load_tensors(path)["observers"][0][1].tolist() == [1, 1]
    TENSORS[kind](path, mark)
    with pytest.raises(DocumentError, match=r"lens\.pt"):
        load_tensors(path)
    assert not mark.exists()


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("trainer_state.json", "[" * 5_000),
        ("trainer_state.json", "[]"),
        ("trainer_state.json", '{"global_step": 2, "nonsense": 1}'),
        ("trainer_state.json", '{"global_step": "two"}'),
        ("trainer_state.json", '{"global_step": 2, "log_history": 3}'),
        ("trainer_state.json", '{"global_step": 2, "log_history": [3]}'),
        ("trainer_state.json", '{"global_step": 2, "log_history": [], "train_batch_size": "x"}'),
        ("trainer_state.json", '{"global_step": 2, "log_history": [], "logging_steps": "x"}'),
        ("strategies.json", "{}"),
        ("strategies.json", '{"strategies": [], "step": "x"}'),
        ("strategies.json", '{"strategies": [{"name": "a"}], "step": 1}'),
        ("strategies.json", "[" * 100_000),
        ("model.safetensors", b"\x10\0\0\0\0\0\0\0" + b"[" * 16),
        ("model.safetensors", b"\xff" * 100),
    ],
)
def test_records_of_a_checkpoint(
    name: str, content: str | bytes, trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    shutil.copytree(trained, run)
    (checkpoint,) = run.glob("checkpoints/checkpoint-*")
    written(checkpoint / name, content)
    assert f"in {checkpoint.name}, {name}" in refused(capsys, "train", "--resume", run)


# --- chat templates ---------------------------------------------------------------------------------------------------


@contextmanager
def chat_model(parent: Path, small_policy: Path, template: str) -> Iterator[Path]:
    """A model whose chat template is this one."""
    folder = parent / "chat-model"
    shutil.copytree(small_policy, folder)
    written(folder / "chat_template.jinja", template)
    yield folder
    shutil.rmtree(folder)


@pytest.mark.parametrize("kind", TEMPLATES)
def test_chat_templates(kind: str, tmp_path: Path, small_policy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with chat_model(tmp_path, small_policy, TEMPLATES[kind]) as model:
        error = refused(
            capsys, "eval", "--model", model, "--task", "products", "--template", "chat", "--limit", "1", "--samples",
            "2", "--out", tmp_path / "e",
        )  # fmt: skip
        for word in ("chat template", "chat-model", "terse"):
            assert word in error


@pytest.mark.parametrize("kind", ["nested loops", "no template"])
@pytest.mark.parametrize("command", ["train", "sft", "rft"])
def test_chat_templates_of_a_policy_that_is_trained(
    command: str, kind: str, tmp_path: Path, small_policy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with chat_model(tmp_path, small_policy, TEMPLATES[kind]) as model:
        changes = ("task.name=products", "task.template=chat", f"model.name={model}", "sft.from_scratch=false")
        error = refused(
            capsys, command, "--preset", "tiny", "--run", tmp_path / "run",
            *(part for change in changes for part in ("--set", change)),
        )  # fmt: skip
        assert "the chat template of the model" in error
        assert "chat-model" in error


def test_a_chat_template_that_is_honest(tmp_path: Path, small_policy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Gemma's refuses a system message, and Llama's has tags that only transformers knows."""
    template = (
        "{%- for message in messages %}{%- if message.role == 'system' %}{{ raise_exception('no system') }}{%- endif %}"
        "{%- if message.role == 'assistant' %}{% generation %}{{ message.content }}{% endgeneration %}{%- break %}"
        "{%- else %}{{ message.content[:40] }}{%- endif %}{%- endfor %}"
    )
    with chat_model(tmp_path, small_policy, template) as model:
        command = ("eval", "--model", str(model), "--task", "products", "--template", "chat", "--limit", "1")
        with pytest.raises(SystemExit) as exit_:
            main([*command, "--samples", "2", "--max-tokens", "4", "--out", str(tmp_path / "e")])
        assert not exit_.value.code, capsys.readouterr().err


def test_a_chat_template_that_refuses_what_comes_later(
    tmp_path: Path, small_policy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    template = (
        "{% if messages | length > 1 %}{{ raise_exception('one message only') }}{% endif %}{{ messages[0].role }}"
    )
    with chat_model(tmp_path, small_policy, template) as model:
        changes = ("task.name=products", "task.template=chat", f"model.name={model}", "sft.from_scratch=false")
        error = refused(
            capsys, "sft", "--preset", "tiny", "--run", tmp_path / "run",
            *(part for change in changes for part in ("--set", change)),
        )  # fmt: skip
        assert "the model's chat template refuses a prompt: one message only" in error
