"""What a user can cause: each is exit code 2 and one to three lines that name the value, the place and a good value."""

from __future__ import annotations

import errno
import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml

from explorl.cli.app import main
from explorl.core.config import load_config
from explorl.core.store import RunStore

TRAIN = ("train", "--preset", "tiny", "--run", "{folder}/new")
EVAL = ("eval", "--model", "tiny", "--task", "countdown-mini", "--limit", "2", "--samples", "2", "--out", "{folder}/e")
SMALL = ("train", "--config", "{folder}/small.yaml", "--run", "{folder}/new")


def _set(*changes: str, command: tuple[str, ...] = TRAIN) -> tuple[str, ...]:
    return (*command, *(part for change in changes for part in ("--set", change)))


CASES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    # the configuration
    "unknown preset": (("train", "--preset", "tinny"), ("'tinny'", "did you mean 'tiny'")),
    "no config file": (("train", "--config", "{folder}/none.yaml"), ("none.yaml", "No such file")),
    "a folder as config file": (("train", "--config", "{folder}"), ("{folder}",)),
    "a list as config": (("train", "--config", "{folder}/list.yaml"), ("list.yaml", "training: {{steps: 100}}")),
    "broken YAML": (("train", "--config", "{folder}/broken.yaml"), ("broken.yaml", "not YAML", "line 1")),
    "bytes as config": (("train", "--config", "{folder}/bytes.yaml"), ("bytes.yaml", "utf-8")),
    "unknown key": (_set("training.step=3"), ("training.step", "did you mean 'steps'", "--set")),
    "not key=value": (_set("training.steps"), ("'training.steps'", "training.learning_rate=5e-6")),
    "no steps": (_set("training.steps=0"), ("training.steps is 0", "greater than or equal to 1", "default is 200")),
    "text as number": (_set("training.learning_rate=fast"), ("training.learning_rate is 'fast'", "default is 5e-06")),
    "a rate that is no number": (_set("training.learning_rate=.nan"), ("training.learning_rate is nan", "5e-06")),
    "hot": (_set("rollout.temperature=1e9"), ("rollout.temperature is 1000000000.0", "100", "default is 0.6")),
    "too cold": (_set("rollout.temperature=1e-9"), ("rollout.temperature is 1e-09", "default is 0.6")),
    "uneven micro-batches": (_set("training.micro_batch=7"), ("micro_batch is 7", "use 4")),
    "unknown strategy": (_set("strategies=[ppl_shapng]"), ("ppl_shapng", "ppl_shaping")),
    "unknown hyperparameter": (_set("strategies=[{{ppl_shaping: {{alfa: 1}}}}]"), ("alfa", "alpha")),
    "unknown engine": (_set("rollout.engine=sglang"), ("rollout.engine is 'sglang'", "'explorl'", "'vllm'")),
    "vLLM is not installed": (_set("rollout.engine=vllm"), ("rollout.engine is vllm", "pip install")),
    "tracker is not installed": (_set("training.report_to=[clearml]"), ("training.report_to", "pip install clearml")),
    "float16 on a CPU": (_set("model.dtype=float16"), ("model.dtype is float16", "bfloat16")),
    # tasks
    "unknown task": (_set("task.name=countdwn"), ("'countdwn'", "countdown")),
    "own task that is not there": (_set("task.name=nobodys.puzzles:Puzzle"), ("nobodys.puzzles",)),
    "unknown template": (_set("task.template=terrse"), ("'terrse'", "terse")),
    "messages without a chat template": (
        _set("task.name=countdown", "task.template=chat", "task.data_dir={folder}/data"),
        ("task.template is 'chat'", "'tiny'", "no chat template", "paper"),
    ),
    "messages without a chat template, eval": (
        ("eval", "--model", "tiny", "--task", "countdown", "--template", "chat", "--data-dir", "{folder}/data",
         "--out", "{folder}/e"),
        ("'chat'", "tiny", "no chat template", "paper"),
    ),
    "prompts beyond the context": (
        _set("model.name={folder}/short", "task.name=countdown", "task.data_dir={folder}/data"),
        ("tokens", "context", "short", "is 24"),
    ),
    "prompts beyond the context, eval": (
        ("eval", "--model", "{folder}/short", "--task", "countdown", "--data-dir", "{folder}/data",
         "--out", "{folder}/e"),
        ("tokens", "context", "24"),
    ),
    "no data": (_set("task.name=countdown", "task.data_dir={folder}/none"), ("{folder}/none",)),
    "a line of data that is not JSON": (
        ("eval", "--model", "tiny", "--task", "countdown", "--data-dir", "{folder}/torn-data", "--out", "{folder}/e"),
        ("countdown-3to4-train.jsonl, line 2", "target"),
    ),
    # models
    "unknown model": (_set("model.name=nowhere"), ("'nowhere'", "tiny")),
    "a model's folder without weights": (_set("model.name={folder}/no-weights"), ("no-weights", "model.safetensors")),
    "torn weights": (_set("model.name={folder}/torn-weights"), ("torn-weights",)),
    "torn weights, eval": (("eval", "--model", "{folder}/torn-weights", *EVAL[3:]), ("torn-weights",)),
    "a model's config that is not JSON": (_set("model.name={folder}/torn-config"), ("torn-config",)),
    "a model without a tokenizer": (_set("model.name={folder}/no-tokenizer"), ("no-tokenizer",)),
    "NaN weights": (("eval", "--model", "{folder}/nan", *EVAL[3:]), ("not finite", "earlier checkpoint")),
    "from scratch": (
        ("sft", *TRAIN[1:], "--set", "model.name={folder}/small"),
        ("sft.from_scratch is true", "small", "only tiny"),
    ),
    # folders of runs
    "a run in a file": (("train", "--preset", "tiny", "--run", "{folder}/list.yaml/x"), ("list.yaml",)),
    "a folder with a run": (
        ("train", "--preset", "tiny", "--run", "{folder}/run"),
        ("already holds a run", "--resume"),
    ),
    "a folder with a study": (("train", "--preset", "tiny", "--run", "{folder}/study"), ("holds a study", "--run")),
    "no run": (("train", "--resume", "{folder}/none"), ("{folder}/none holds no run", "config.yaml")),
    "a study as run": (("train", "--resume", "{folder}/study"), ("holds a study", "explorl study")),
    "SFT as GRPO": (("train", "--resume", "{folder}/warm"), ("of kind sft", "explorl sft --resume {folder}/warm")),
    "another preset": (("train", "--resume", "{folder}/run", "--preset", "tiny"), ("leave out", "--preset")),
    "another rate": (
        ("train", "--resume", "{folder}/run", "--set", "training.learning_rate=1"),
        ("training.learning_rate is 0.0001", "1.0", "training.steps"),
    ),
    "fewer steps": (
        ("train", "--resume", "{folder}/run", "--set", "training.steps=5"),
        ("training.steps is 5", "90"),
    ),
    "no whole checkpoint": (("train", "--resume", "{folder}/run"), ("checkpoint-2", "no weights", "remove")),
    "a run's config that is empty": (("train", "--resume", "{folder}/emptied"), ("config.yaml",)),
    "torn metrics": (("train", "--resume", "{folder}/torn"), ("metrics.jsonl, line 1",)),
    # evaluations and studies
    "hot, eval": ((*EVAL, "--temperature", "1e9"), ("temperature is 1000000000.0", "such as 1.0")),
    "unknown protocol": ((*EVAL, "--protocol", "plane"), ("'plane'", "plain")),
    "unknown type": ((*EVAL, "--dtype", "int8"), ("--dtype is 'int8'", "bfloat16")),
    "a shard beyond the last": ((*EVAL, "--shard", "4/4"), ("4/4", "0/4")),
    "an option without a value": ((*EVAL, "--option", "verifier"), ("'verifier'", "verifier=number")),
    "an option that no task has": ((*EVAL, "--option", "colour=red"), ("colour",)),
    "two models of one name": ((*EVAL, "--model", "tiny"), ("'tiny'", "another=tiny")),
    "no study file": (("study", "{folder}/none.yaml"), ("none.yaml",)),
    "unknown key of a study": (("study", "{folder}/study.yaml", "--run", "{folder}/s"), ("armz", "study.yaml", "arms")),
    "status of nothing": (("study", "status", "{folder}/none"), ("{folder}/none",)),
    "a report of nothing": (("report", "{folder}/none"), ("{folder}/none",)),
    "quality of nothing": (("quality", "{folder}/none"), ("{folder}/none",)),
    "a look at nothing": (("watch", "{folder}/none", "--once"), ("{folder}/none",)),
    "one evaluation that is none": (("compare", "{folder}/none", "{folder}/none"), ("{folder}/none",)),
    "a judge of nothing": (("judge", "{folder}/none", "--url", "http://127.0.0.1:9/v1", "--model", "m"), ("none",)),
    "a model that cannot be fetched": (("models", "fetch", "gpt-5"), ("'gpt-5'", "smollm2-135m")),
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, small_policy: Path) -> Path:
    """A folder with everything that can be wrong."""
    folder = tmp_path_factory.mktemp("folder")
    (folder / "list.yaml").write_text("- training\n")
    (folder / "broken.yaml").write_text("training: {steps: 3\n")
    (folder / "bytes.yaml").write_bytes(b"\xff\xfe\x00")
    (folder / "study.yaml").write_text("name: a\narmz: {}\n")
    for name, second in (("data", '{"nums": [3, 7], "target": 10}'), ("torn-data", "{")):
        (folder / name).mkdir()
        for part, target in (("train", 6), ("test", 5)):
            rows = f'{{"nums": [1, 2, 3], "target": {target}}}\n{second}\n'
            (folder / name / f"countdown-3to4-{part}.jsonl").write_text(rows)
    for name in ("small", "no-weights", "torn-weights", "torn-config", "no-tokenizer", "nan", "short"):
        shutil.copytree(small_policy, folder / name)
    (folder / "no-weights" / "model.safetensors").unlink()
    weights = folder / "torn-weights" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-50])
    (folder / "torn-config" / "config.json").write_text("{")
    for path in (folder / "no-tokenizer").glob("tokenizer*"):
        path.unlink()
    _change_weights(folder / "nan", lambda tensor: torch.full_like(tensor, torch.nan))
    config = json.loads((folder / "short" / "config.json").read_text())
    (folder / "short" / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 24}))
    _runs(folder)
    return folder


def _change_weights(model: Path, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    from safetensors.torch import load_file, save_file

    path = model / "model.safetensors"
    save_file({name: change(value) for name, value in load_file(path).items()}, path, {"format": "pt"})


def _runs(folder: Path) -> None:
    tiny = load_config(preset="tiny")
    small = {
        "model": {"name": str(folder / "small")},
        "rollout": {"max_tokens": 8},
        "training": {"steps": 2, "prompts_per_step": 1, "generations": 4, "micro_batch": 4, "checkpoint_every": 1},
        "evaluation": {"ends": 2, "samples": 2},
    }
    (folder / "small.yaml").write_text(yaml.safe_dump(load_config(preset="tiny", values=small).dump()))
    for name, kind in (("run", "grpo"), ("warm", "sft"), ("emptied", "grpo"), ("torn", "grpo")):
        store = RunStore(folder / name)
        store.begin(tiny.dump(), kind)
        store.append_metrics({"step": 2, "kind": "train"})
        (store.checkpoints / "checkpoint-2").mkdir(parents=True)
    (folder / "emptied" / "config.yaml").write_text("")
    (folder / "torn" / "metrics.jsonl").write_text("{\n")
    (folder / "study").mkdir()
    (folder / "study" / "study.json").write_text("{}")


def refused(arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> str:
    """What the command says, where it refuses as it should."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as exit_:
        main(list(arguments))
    error = capsys.readouterr().err
    besides = ("Writing model shards", "warning: all completions of a prompt got equal rewards")
    lines = [line for line in error.splitlines() if not any(text in line for text in besides)]
    assert exit_.value.code == 2, error
    assert "Traceback" not in error
    assert 1 <= len(lines) <= 3, error
    assert lines[0].startswith("explorl: ")
    return error


@pytest.mark.parametrize("case", CASES)
def test_bad_input_is_told_in_words(
    case: str, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    arguments, words = CASES[case]
    error = refused(tuple(argument.format(folder=folder) for argument in arguments), capsys)
    for word in words:
        assert word.format(folder=folder) in error
    assert not (folder / "new").exists()


def test_there_are_forty() -> None:
    assert len(CASES) >= 40


def test_a_task_whose_library_is_missing(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.startswith("reasoning_gym")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    arguments = _set("task.name=gym:leg_counting", command=("train", "--preset", "tiny", "--run", str(folder / "new")))
    assert "pip install explorl[gym]" in refused(arguments, capsys)


def test_bfloat16_where_the_gpu_has_none(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation)
    arguments = _set("model.dtype=bfloat16", command=("train", "--preset", "tiny", "--run", str(folder / "new")))
    error = refused(arguments, capsys)
    assert "model.dtype is bfloat16" in error
    assert "use float16, or float32" in error


def test_divergence_is_said_once(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("train", "--config", str(folder / "small.yaml"), "--run", str(tmp_path / "run"))
    changes = ("training.learning_rate=1e30", "training.weight_decay=1", "training.steps=4")
    error = refused(_set(*changes, command=arguments), capsys)
    assert error.count("diverged at step ") == 1
    assert "lower the learning rate: training.learning_rate is 1e+30" in error


def test_an_engine_that_is_unknown_is_named(small_policy: Path, tmp_path: Path) -> None:
    from datasets import Dataset
    from trl import GRPOConfig

    from explorl import ExplorationTrainer

    with pytest.raises(ValueError, match=r"engine is 'sglang'; use 'explorl', 'generate', 'vllm', or None"):
        ExplorationTrainer(
            str(small_policy),
            lambda completions, **_: [0.0] * len(completions),
            GRPOConfig(str(tmp_path), use_cpu=True, bf16=False, report_to="none"),
            Dataset.from_dict({"prompt": ["1+1="]}),
            engine="sglang",
        )


FILES = [
    "config.yaml", "run.json", "provenance.json", "step-000000.parquet", "step-000000.json", "metrics.jsonl",
    "rollouts/.step-000001.parquet", "optimizer.pt", ".model.",
]  # fmt: skip


@pytest.mark.parametrize("name", FILES)
def test_a_disk_that_fills_up_at_any_file(
    name: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    sync = os.fsync

    def full(descriptor: int) -> None:
        if name in os.readlink(f"/proc/self/fd/{descriptor}"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    run = tmp_path / "run"
    error = refused(("train", "--config", str(folder / "small.yaml"), "--run", str(run)), capsys)
    assert "cannot write" in error
    assert "No space left on device" in error
    assert "MiB free" in error
    assert not list(run.rglob("*.tmp"))
