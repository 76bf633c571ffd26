"""The command: help, listings, and bad input with exit code 2."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import yaml
from typer.main import get_command

from explorl.cli import app as cli
from explorl.cli import train_commands
from explorl.cli.app import main
from explorl.cli.run_evaluations import parse_options
from explorl.core.config import load_config
from explorl.tasks import CountdownMini, Problem
from explorl.tasks.base import Prompt

from .hostile import NAMES, raw


def run(*arguments: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as exit_:
        main(list(arguments))
    out, err = capsys.readouterr()
    return int(exit_.value.code or 0), out, err


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run("--help", capsys=capsys)
    assert code == 0
    commands = [
        "quickstart",
        "train",
        "sft",
        "eval",
        "compare",
        "judge",
        "study",
        "report",
        "quality",
        "watch",
        "strategies",
        "models",
        "config",
    ]
    for command in commands:
        assert command in out


class AskedInOneWay(CountdownMini):
    """It has no templates."""

    templates = ()


class AskedOtherwise(CountdownMini):
    """Its own template is not the first of the list."""

    def prompt(self, problem: Problem, template: str | None = None) -> Prompt:
        return super().prompt(problem, template or "chat")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (["task.template=paper-opened", "rollout.max_tokens=48"], "--template paper-opened --max-tokens 48"),
        (["task.template=null"], "--template terse --max-tokens 64"),
        (["rollout.stop=[</answer>, '=']", "rollout.tools=calculator"],
         "--template terse --max-tokens 64 --stop </answer> --stop = --tools calculator --tool-calls 3"),
        (["task.name=tests.test_cli:AskedInOneWay", "task.template=null"],
         "--task tests.test_cli:AskedInOneWay --max-tokens 64"),
        (["task.name=tests.test_cli:AskedOtherwise", "task.template=null"], "--template chat --max-tokens 64"),
    ],
)  # fmt: skip
def test_the_evaluation_that_train_proposes_asks_as_training_did(changes: list[str], words: str) -> None:
    proposed = train_commands._scoring_command(load_config(preset="tiny", overrides=changes), Path("runs/a/model"))
    assert " ".join(proposed).endswith(f" {words}")
    assert get_command(cli.app).commands["eval"].make_context("eval", proposed[2:]).params["limit"] is None  # type: ignore[attr-defined]


def test_the_command_starts_without_torch() -> None:
    code = "import sys, explorl.cli.app; print({'torch', 'transformers', 'trl', 'pyarrow'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_warnings_are_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [{"prompt": f"{number} + 1 =", "answer": number + 1} for number in range(8)]
    for split in ("train", "holdout"):
        (tmp_path / f"{split}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    task = "--task jsonl --option path=. --option style=last_number"
    code, _, err = run(
        *f"eval --model tiny {task} --samples 1 --max-tokens 4 --limit 1".split(),
        capsys=capsys,
    )
    assert code == 0
    assert err == "warning: 8 of the 8 prompts in 'train' are also in the holdout, and are removed from 'train'\n"


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--version", capsys=capsys)[1].startswith("0.")


def test_config_show_is_yaml_that_loads_again(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, out, _ = run("config", "show", "--preset", "tiny", "--set", "training.learning_rate=5e-6", capsys=capsys)
    assert code == 0
    assert yaml.safe_load(out)["training"]["learning_rate"] == 5e-6
    (tmp_path / "again.yaml").write_text(out)
    assert run("config", "show", "--config", str(tmp_path / "again.yaml"), capsys=capsys)[1] == out
    as_json = run("config", "show", "--preset", "tiny", "--json", capsys=capsys)[1]
    assert json.loads(as_json)["model"]["name"] == "tiny"
    assert "tiny" in run("config", "presets", capsys=capsys)[1]


def test_strategies_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    entries = json.loads(run("strategies", "--json", capsys=capsys)[1])
    assert {"ppl_shaping", "mask_truncated"} <= {entry["name"] for entry in entries}
    assert "ppl_shaping" in run("strategies", capsys=capsys)[1]


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
@pytest.mark.parametrize(
    "words",
    [["strategies"], ["strategies", "--json"], ["config", "show", "--set=model.name=ü→"], ["config", "presets"]],
)
def test_an_output_that_is_not_utf8_ends_no_command(
    encoding: str, words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding=encoding))
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert not ended.value.code
    sys.stdout.flush()
    text = written.getvalue().decode(encoding)
    if "--json" in words:
        assert any("§" in entry["paper"] for entry in json.loads(text))
    if "show" in words:
        assert yaml.safe_load(text)["model"]["name"] == "ü→"


def test_models_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert "tiny_checkpoint" in run("models", "list", capsys=capsys)[1]


def test_eval_writes_what_it_prints(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    code, out, _ = run(
        "eval", "--model", "tiny", "--task", "countdown-mini", "--protocol", "deng", "--samples", "2", "--limit", "4",
        "--max-tokens", "48", "--json", str(file), "--out", str(tmp_path / "runs"), capsys=capsys,
    )  # fmt: skip
    assert code == 0
    summary = json.loads(file.read_text())
    assert {"pass@1", "pass@2"} <= summary["scores"].keys()
    assert f"{summary['scores']['pass@2']['mean']:.1%}" in out
    lines = [line for line in out.splitlines() if line.startswith("tiny on countdown-mini: ")]
    assert lines[0] == "tiny on countdown-mini: 1 of 8 completions"
    assert lines[-1] == "tiny on countdown-mini: 8 of 8 completions"
    assert "next: the same command with --samples 4" in out
    assert list((tmp_path / "runs" / "tiny-countdown-mini-deng" / "samples").glob("*.parquet"))
    again = run(
        "eval", "--model", "a=tiny", "--model", "b=tiny", "--task", "countdown-mini", "--samples", "2", "--limit", "4",
        "--max-tokens", "48", "--json", str(file), "--out", str(tmp_path / "runs"), capsys=capsys,
    )  # fmt: skip
    assert again[0] == 0
    assert [entry["model"] for entry in json.loads(file.read_text())] == ["a", "b"]
    folders = [str(tmp_path / "runs" / f"{name}-countdown-mini-plain") for name in "ab"]
    assert f"next: explorl compare {folders[0]} {folders[1]}" in again[1]
    last = again[1].split("all evaluations")[1]
    assert [len(re.findall(rf"│ {name} +│ countdown-mini │ +[\d.]+% .*│ +[\d.]+% ", last)) for name in "ab"] == [1, 1]
    assert re.search(r"┃ +pass@1 ┃ +pass@2 ┃", last)
    code, out, _ = run("compare", *folders, "--out", str(tmp_path / "compared"), capsys=capsys)
    assert code == 0
    assert "pass@1" in out
    assert (tmp_path / "compared" / "comparison.json").exists()


def test_eval_ends_completions_at_stop_strings(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    arguments = ("eval", "--model", "tiny", "--task", "countdown-mini", "--samples", "1", "--limit", "4")
    code, _, _ = run(*arguments, "--stop", "</think>", "--stop", "=", "--out", str(tmp_path), capsys=capsys)
    assert code == 0
    (file,) = tmp_path.glob("*/samples/*.parquet")
    texts = pq.read_table(file)["completion"].to_pylist()
    assert all(text.endswith(("</think>", "=")) and text.count("=") < 2 for text in texts), texts
    code, _, error = run(*arguments, "--stop", "", "--out", str(tmp_path / "other"), capsys=capsys)
    assert code == 2
    assert "stop contains an empty string" in error


def test_the_command_that_scores_a_run_asks_and_draws_as_the_run_did(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "answer": 1}\n{"prompt": "b", "answer": 2}\n')
    rows = ["task.name=jsonl", f"task.path={tmp_path / 'rows.jsonl'}", "task.instruction=Füge 😀 an."]
    changes = ["rollout.stop=</answer>", "rollout.max_tokens=64", "evaluation.protocol=deng", "model.dtype=bfloat16"]
    words = train_commands._scoring_command(load_config(preset="tiny", overrides=[*rows, *changes]), Path("r/model"))
    flags = dict(zip(words[2::2], words[3::2], strict=True))
    assert (flags["--template"], flags["--protocol"], flags["--samples"]) == ("instructed", "deng", "8")
    assert (flags["--max-tokens"], flags["--stop"], flags["--dtype"]) == ("64", "</answer>", "bfloat16")
    options = [value for word, value in zip(words[2::2], words[3::2], strict=True) if word == "--option"]
    assert parse_options(options) == {"path": str(tmp_path / "rows.jsonl"), "instruction": "Füge 😀 an."}
    plain = train_commands._scoring_command(
        load_config(preset="tiny", overrides=[*rows, "task.template=plain"]), Path("r/model")
    )
    assert plain[plain.index("--template") + 1] == "plain"
    assert "--dtype" not in plain
    assert "--tools" not in plain
    (tmp_path / "rows.jsonl").unlink()
    gone = train_commands._scoring_command(load_config(preset="tiny", overrides=rows), Path("r/model"))
    assert "--template" not in gone, "a run that has ended well ends well"


@pytest.mark.slow
def test_the_quickstart_is_a_study(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    folder, file = tmp_path / "quick", tmp_path / "scores.json"
    arguments = ("quickstart", "--run", str(folder), "--steps", "2", "--problems", "8", "--jobs", "2")
    code, out, _ = run(*arguments, "--json", str(file), capsys=capsys)
    assert code == 0
    assert re.search(r"[01] of 2 runs done; .*, seed 0: step [12], reward ", out)
    assert "\x1b" not in out
    assert "│ risk-sensitive GRPO │" in out
    assert f"explorl study {folder}.yaml --run {folder} --seeds 5" in out
    assert "report.html" in out
    page = (folder / "report.html").read_text()
    assert "Explorl quickstart" in page
    assert "plain GRPO changed pass@1 by" in page
    results = json.loads((folder / "results.json").read_text())
    assert [arm["name"] for arm in results["arms"]] == ["plain GRPO", "risk-sensitive GRPO"]
    assert results["verdict"] in " ".join(out.split())
    assert results["problems"] == 8
    rollout = next(entry for entry in results["rollouts"] if entry["arm"] == "plain GRPO")["answers"][0]
    assert len(rollout["tokens"]) == len(rollout["entropy"]) == len(rollout["advantage"]) > 1

    counts = tmp_path / "quality.json"
    run_folder = str(folder / "arms" / "plain-grpo" / "seed-0")
    assert "responses" in run("quality", run_folder, "--json", str(counts), capsys=capsys)[1]
    assert "format violations" in counts.read_text()
    before = (folder / "report.html").stat().st_mtime_ns
    assert "done" in run("study", "status", str(folder), capsys=capsys)[1]
    assert "plain GRPO" in run("watch", str(folder), "--once", capsys=capsys)[1]
    assert run("report", str(folder), capsys=capsys)[0] == 0
    assert (folder / "report.html").stat().st_mtime_ns > before
    assert run(*arguments, capsys=capsys)[0] == 0  # nothing is trained again


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (("study", "nothing.yaml"), "nothing.yaml"),
        (("study", "status"), "takes the study's folder"),
        (("study", "a.yaml", "b.yaml"), "takes one study"),
        (("watch", "nothing", "--once"), "nothing"),
        (("report", "nothing"), "nothing"),
        (("quality", "nothing"), "nothing"),
        (("compare", "nothing", "nowhere"), "nothing"),
        (("judge", "nothing", "--url", "http://127.0.0.1:9/v1", "--model", "m"), "nothing"),
    ],
)
def test_what_is_not_there_is_named(
    arguments: tuple[str, ...], word: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    code, _, err = run(*arguments, capsys=capsys)
    assert code == 2
    assert "Traceback" not in err
    assert word in err


def test_bad_input_is_one_message_and_exit_code_2(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    empty = tmp_path / "empty-model"
    empty.mkdir()
    (empty / "config.json").write_text("{}")
    data = tmp_path / "data"
    data.mkdir()
    (data / "countdown-3to4-train.jsonl").write_text('{"nums": [1, 2, 3], "target": 6}\n')
    (data / "countdown-3to4-test.jsonl").write_text('{"nums": [1, 2, 3], "target": 7}\nnot json\n')
    (tmp_path / "file").write_text("")
    config = tmp_path / "c.yaml"
    config.write_text("training: {step: 3}")
    countdown = ("eval", "--model", "tiny", "--task", "countdown", "--data-dir", str(data))
    cases = [
        (("train", "--config", str(config)), ["unknown key training.step", "did you mean 'steps'?", "c.yaml"]),
        (("eval", "--model", str(empty), "--task", "countdown-mini"), ["empty-model", "no weights"]),
        (countdown, ["countdown-3to4-test.jsonl", "line 2"]),
        (("train", "--preset", "tiny", "--run", str(tmp_path / "file" / "run")), ["cannot write", "file"]),
        (("train", "--resume", str(tmp_path / "nothing")), ["holds no run"]),
        (("train", "--resume", str(tmp_path), "--preset", "tiny"), ["leave out"]),
        (("eval", "--model", "tiny", "--task", "countdwn"), ["unknown task 'countdwn'", "countdown"]),
        (("eval", "--model", "tiny", "--task", "countdown-mini", "--dtype", "int8"), ["--dtype is 'int8'"]),
        (("eval", "--model", "tiny", "--task", "countdown-mini", "--temperature", "-1"), ["temperature is -1"]),
        (("models", "fetch", "gpt-5"), ["cannot fetch 'gpt-5'"]),
        (("train", "--preset", "tiny", "--set", "strategies=[ppl_shapng]"), ["ppl_shaping"]),
    ]
    for arguments, words in cases:
        code, _, err = run(*arguments, capsys=capsys)
        assert code == 2, arguments
        assert "Traceback" not in err
        for word in words:
            assert word in err, (arguments, err)
    (data / "countdown-3to4-test.jsonl").write_text('{"nums": [1, 2, 3], "target": "six"}\n')
    code, _, err = run(*countdown, capsys=capsys)
    assert code == 2
    assert "line 1" in err
    assert "six" in err


# ---------------------------------------------------------------------------- text from strangers
@pytest.mark.parametrize("text", [name for name in NAMES if raw(name)])
def test_errors_show_any_text_and_obey_none(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (
        ["train", "--preset", text],
        ["train", "--config", f"x{text.replace(chr(0), '')}"],
        ["train", "--preset", "tiny", "--set", f"training.{text}=1"],
        ["eval", "--model", "tiny", "--task", f"x{text}"],
        ["eval", "--model", "tiny", "--task", "choice", "--protocol", f"x{text}"],
        ["study", f"x{text.replace(chr(0), '')}.yaml"],
        ["report", f"x{text.replace(chr(0), '')}"],
    ):
        code, out, err = run(*arguments, capsys=capsys)
        assert code == 2
        assert err
        assert not raw(out + err)


def test_config_show_prints_any_text_so_that_it_loads_again(capsys: pytest.CaptureFixture[str]) -> None:
    for text in NAMES:
        code, out, _ = run("config", "show", "--set", f"model.name={json.dumps('x' + text)}", capsys=capsys)
        assert code == 0
        assert not raw(out)
        assert yaml.safe_load(out)["model"]["name"] == f"x{text}"


def test_folders_are_printed_as_they_are(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("explorl.models.resolve_model", lambda name: tmp_path / "[/b]\x1b[2J")
    _, out, _ = run("models", "list", capsys=capsys)
    assert out.count("[/b]␛[2J") == 3


def test_a_strategys_brackets_are_shown(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    entry = {"name": "[/b]", "effect": "in [0, 1] :smile:", "paper": "\x1b[2J", "hyperparameters": []}
    monkeypatch.setattr("explorl.strategies.describe", lambda: [entry])
    _, out, _ = run("strategies", capsys=capsys)
    for part in ("[/b]", "[0, 1]", ":smile:", "␛[2J"):
        assert part in out
