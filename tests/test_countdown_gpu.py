"""scripts/countdown_gpu.py on a very small model: every stage from the one before, errors in words, one clock."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from explorl.core.config import ConfigError
from explorl.models import ModelError, tiny_tokenizer
from explorl.study.spec import load_study
from explorl.tasks.countdown.generator import PAPER, make_splits
from explorl.tasks.countdown.problem_files import TEST_FILE, TRAIN_FILE
from explorl.tasks.countdown.task import Countdown

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "scripts" / "countdown_gpu.py"


@pytest.fixture(scope="module")
def script() -> Iterator[ModuleType]:
    sys.path.insert(0, str(SCRIPT.parent))  # as Python does for a script
    spec = importlib.util.spec_from_file_location("countdown_gpu", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["countdown_gpu"] = module
    spec.loader.exec_module(module)
    yield module
    sys.path.remove(str(SCRIPT.parent))


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    folder.mkdir()
    splits = make_splits(PAPER, {"train": 60, "holdout": 6}, seed=5)
    for name, split in ((TRAIN_FILE, "train"), (TEST_FILE, "holdout")):
        rows = (f'{{"nums": {list(nums)}, "target": {target}}}\n' for nums, target in splits[split])
        (folder / name).write_text("".join(rows))
    return folder


@pytest.fixture
def model(tmp_path: Path) -> Path:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = tiny_tokenizer()
    torch.manual_seed(0)
    shape: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, "bos_token_id": None}
    config = LlamaConfig(
        vocab_size=len(tokenizer), num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=1280,
        **shape, **ends,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(tmp_path / "start")
    tokenizer.save_pretrained(tmp_path / "start")
    return tmp_path / "start"


@pytest.mark.slow
def test_all_stages(script: ModuleType, data: Path, model: Path, tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "out"
    common = [str(out), "--data", str(data), "--template", "terse", "--max-tokens", "12"]
    script.main([
        *common, "--model", str(model), "--examples", "40", "--processes", "1", "--sft-steps", "4", "--sft-rows", "8",
        "--arm", "MaxRL", "--rl-seconds", "0", "--problems", "3", "--passk", "4", "--passk-problems", "2",
        "--set", "training.prompts_per_step=2", "training.generations=2", "training.micro_batch=4",
    ])  # fmt: skip
    printed = [json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{")]
    assert printed == [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]
    assert [line["stage"] for line in printed] == ["sft", "rl", *["eval"] * 6]
    assert printed[0]["steps"] == 4
    assert printed[1]["steps"] == 1  # the clock is looked at after a step
    assert [(line["model"], line["problems_of"], line["protocol"]) for line in printed[2:]] == [
        ("sft", "test", "mecklenburg"),
        ("sft", "synthetic", "mecklenburg"),
        ("MaxRL-0", "test", "mecklenburg"),
        ("MaxRL-0", "synthetic", "mecklenburg"),
        ("sft", "test", "plain"),
        ("MaxRL-0", "test", "plain"),
    ]
    assert list(printed[6]["pass"]) == ["pass@1", "pass@2", "pass@4"]
    assert [log["step"] for log in json.loads((out / "sft" / "log.json").read_text())][-1] == 4
    script.main([*common, "--stages", "eval", "--models", "MaxRL-0", "--sets", "validation", "--passk", "0"])
    (line,) = [json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{")]
    assert line["problems"] == len(Countdown(data_dir=data, validation=True).problems("holdout"))
    for stages, message in (("sft", "is there already; leave out the stage sft"), ("rl", "give another --run or --s")):
        with pytest.raises(ConfigError, match=message):
            script.main([*common, "--stages", stages, "--arm", "MaxRL"])


def test_what_is_missing_is_said(
    script: ModuleType, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    common = [str(tmp_path / "out"), "--data", str(data)]
    with pytest.raises(ConfigError, match="model is missing; run the stage sft first"):
        script.main([*common, "--stages", "rl"])
    with pytest.raises(ConfigError, match="--models sft: there is no folder"):
        script.main([*common, "--stages", "eval"])
    with pytest.raises(ConfigError, match=r"--model gone.gguf: there is no such file"):
        script.main([*common, "--stages", "sft", "--model", "gone.gguf", "--examples", "1", "--processes", "1"])
    monkeypatch.setattr(script, "corpus", lambda *_, **__: pytest.fail("minutes were spent"))
    with pytest.raises(ModelError, match=r"no model folder at ./gone"):
        script.main([*common, "--stages", "sft", "--model", "./gone"])
    with pytest.raises(SystemExit):
        script.main([*common, "--sft-seconds", "0"])


def test_nothing_that_is_asked_is_learnt(script: ModuleType, data: Path) -> None:
    hidden = script.held_out(data)
    for chosen in script.SETS:
        options = script.parsed(["out", "--data", str(data)])
        for problem in script.asked_problems(options, chosen):
            assert (tuple(sorted(problem.data["nums"])), problem.data["target"]) in hidden


def test_the_learning_rate_falls_with_the_seconds(script: ModuleType) -> None:
    import timed_sft

    now = 100.0
    clock = timed_sft.Clock(50, lambda: now)
    assert clock.rate(0) == pytest.approx(1 / timed_sft.WARM_UP)
    assert not clock.over()
    now = 125.0
    assert clock.rate(1000) == pytest.approx(0.5)
    now = 150.0
    assert clock.over()
    assert clock.rate(1000) == pytest.approx(0.02)


def test_the_study_builds_every_arm() -> None:
    study = load_study(ROOT / "studies" / "countdown-gpu.yaml")
    assert len(study.arms) >= 12
    for arm in study.arms:
        assert arm.config["task"]["validation"]
        assert arm.config["model"]["dtype"] == "bfloat16"
