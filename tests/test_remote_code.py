"""Models that bring code of their own: it runs where that is allowed by name, and nowhere else."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from explorl.core.config import load_config
from explorl.models import ModelError, load_policy

CODE = """
import os

from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

open(os.environ["EXPLORL_TEST_TRACE"], "a").write("its code ran\\n")


class StrangerConfig(LlamaConfig):
    model_type = "stranger"


class Stranger(LlamaForCausalLM):
    config_class = StrangerConfig


class StrangerTokenizer(PreTrainedTokenizerFast):
    pass
"""


@pytest.fixture
def trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that comes into being when a model's code runs."""
    from transformers import dynamic_module_utils

    monkeypatch.setenv("EXPLORL_TEST_TRACE", str(tmp_path / "trace"))
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    return tmp_path / "trace"


def changed(folder: Path, file: str, **values: Any) -> None:
    path = folder / file
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


@pytest.fixture
def model(small_policy: Path, tmp_path: Path) -> Path:
    """A model whose architecture is in its folder."""
    folder = tmp_path / "stranger"
    shutil.copytree(small_policy, folder)
    (folder / "stranger.py").write_text(CODE)
    classes = {"AutoConfig": "stranger.StrangerConfig", "AutoModelForCausalLM": "stranger.Stranger"}
    changed(folder, "config.json", model_type="stranger", auto_map=classes, architectures=["Stranger"])
    return folder


@pytest.fixture
def tokenizer(small_policy: Path, tmp_path: Path) -> Path:
    """A Llama whose tokenizer is in its folder."""
    folder = tmp_path / "spoken"
    shutil.copytree(small_policy, folder)
    (folder / "stranger.py").write_text(CODE)
    classes = {"AutoTokenizer": [None, "stranger.StrangerTokenizer"]}
    changed(folder, "tokenizer_config.json", tokenizer_class="StrangerTokenizer", auto_map=classes)
    return folder


@pytest.fixture
def adapter(model: Path, small_policy: Path, tmp_path: Path) -> Path:
    """An adapter of the model with an architecture of its own."""
    from peft import get_peft_model

    from explorl.models import lora_config

    folder = tmp_path / "adapter"
    base = load_policy(str(small_policy), device="cpu")
    get_peft_model(base.model, lora_config(4, 8, 0.0, "all-linear")).save_pretrained(folder)
    base.tokenizer.save_pretrained(folder)
    changed(folder, "adapter_config.json", base_model_name_or_path=str(model))
    return folder


@pytest.mark.parametrize("kind", ["model", "tokenizer", "adapter"])
def test_code_runs_where_it_is_allowed(kind: str, request: pytest.FixtureRequest, trace: Path) -> None:
    folder = request.getfixturevalue(kind)
    with pytest.raises(ModelError, match=r"trust_remote_code=true|--trust-remote-code") as error:
        load_policy(str(folder), device="cpu")
    assert str(folder) in str(error.value)
    assert not trace.exists()
    assert load_policy(str(folder), device="cpu", trust_remote_code=True).model is not None
    assert trace.exists()


def explorl(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """A command whose every question is answered with yes."""
    command = [sys.executable, "-m", "explorl", *words]
    return subprocess.run(
        command, cwd=folder, env={**os.environ}, input="y\n" * 100, capture_output=True, text=True, check=False
    )


SMALL = (
    "--preset", "tiny", "--set", "model.lora=null", "--set", "rollout.max_tokens=8", "--set", "training.steps=1",
    "--set", "training.prompts_per_step=4", "--set", "training.generations=2", "--set", "training.micro_batch=8",
    "--set", "evaluation.ends=0",
)  # fmt: skip


def test_commands_ask_nobody(model: Path, trace: Path, tmp_path: Path) -> None:
    evaluate = ("eval", "--model", str(model), "--task", "countdown-mini", "--limit", "2", "--samples", "2")
    evaluate = (*evaluate, "--max-tokens", "4", "--out", "out")
    refused = explorl(tmp_path, *evaluate)
    assert "--trust-remote-code" in refused.stdout + refused.stderr
    assert "[y/N]" not in refused.stdout + refused.stderr
    refused = explorl(tmp_path, "train", *SMALL, "--set", f"model.name={model}", "--run", "run")
    assert refused.returncode == 2
    assert "model.trust_remote_code=true" in refused.stderr
    assert not trace.exists()
    allowed = explorl(tmp_path, *evaluate, "--trust-remote-code")
    assert allowed.returncode == 0, allowed.stdout + allowed.stderr
    assert trace.exists()


def test_a_run_takes_the_key_and_proposes_the_option(model: Path, trace: Path, tmp_path: Path) -> None:
    allowed = ("--set", f"model.name={model}", "--set", "model.trust_remote_code=true", "--run", "run")
    done = explorl(tmp_path, "train", *SMALL, *allowed)
    assert done.returncode == 0, done.stdout + done.stderr
    assert trace.exists()
    assert "--trust-remote-code" in done.stdout
    assert f"code that comes with {model} will run" in " ".join(done.stdout.split())
    assert not load_config(preset="tiny").model.trust_remote_code


def test_what_switches_protection_off_is_said_first(tmp_path: Path) -> None:
    (tmp_path / "study.yaml").write_text(
        "name: s\nbase: {preset: tiny, model: {trust_remote_code: true}}\nbaseline: a\n"
        "arms: {a: {}, b: {set: {task.name: code, task.unisolated: true, task.template: null}}}\n"
    )
    plan = explorl(tmp_path, "study", "study.yaml", "--plan").stdout
    assert plan.count("model.trust_remote_code is true") == plan.count("task.unisolated is true") == 1
    file = ("--set", "task.name=code", "--set", "task.unisolated=true", "--set", "task.data_dir=none")
    assert "task.unisolated is true" in explorl(tmp_path, "train", "--preset", "tiny", *file).stdout
