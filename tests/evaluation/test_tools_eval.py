"""Evaluations with a tool: what a program prints is no answer, and no token of it is measured."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from explorl.cli.app import main
from explorl.cli.run_evaluations import evaluate_command
from explorl.evaluation import evaluate, protocol
from explorl.evaluation.harness import run_evaluation
from explorl.evaluation.results_folder import load_evaluation
from explorl.evaluation.scores import per_problem, scores, side_by_side, table
from explorl.models import Policy, load_policy
from explorl.rollout.tool_use import ToolUse
from explorl.rollout.tools import Delimiters, calculator_tool
from explorl.sandbox.interpreter import CellResult
from explorl.tasks import Products
from tests.rollout.planted import Desk, planted

TASK = Products(sizes={"holdout": 3, "train": 0, "sft": 0})
PROBLEMS = TASK.problems("holdout")
VALUE = PROBLEMS[0].data["value"]
HOW = protocol("plain", samples=16, max_tokens=400)
RIGHT, WRONG, MUTE = f"<answer>{VALUE}</answer>", "<answer>1</answer>", "I do not say."
CHAIN = {
    "\n": {"<think><<7*7": 0.7, "<think>by heart</think>": 0.3},
    "<think><<7*7": {"=": 1.0},
    "<<8*8": {"=": 1.0},
    ">": {"<<8*8": 0.4, "</think>": 0.6},
    "</think>": {RIGHT: 0.5, WRONG: 0.2, MUTE: 0.3},
    "<think>by heart</think>": {WRONG: 0.9, MUTE: 0.1},
}
"""What the planted model says: it calls a calculator once or more, or not at all, and may be right after it has."""
LOUD = f"<answer>{VALUE}</answer> 数学 a a a a a"


@pytest.fixture(scope="module")
def policy() -> Policy:
    return Policy("planted", *planted(CHAIN))


def answering(monkeypatch: pytest.MonkeyPatch, answer: Callable[[str], CellResult]) -> None:
    """Calls get this answer instead of being run."""
    monkeypatch.setattr(ToolUse, "pool", lambda self: Desk(answer))


def chain_entropy(word: str) -> float:
    chances = np.array(list(CHAIN[word].values()))
    return float(-(chances * np.log(chances)).sum())


STATISTICS = ("tokens", "entropy", "branching", "correct", "well_formed", "answer", "calls", "finish_reason")


def test_no_token_of_a_tool_is_measured(policy: Policy, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Whatever tools say, if it is of one length, the planted model goes on alike; so all that is measured is alike."""
    found, told = [], []
    for name, said in (("quiet", "x" * len(LOUD)), ("loud", LOUD)):
        answering(monkeypatch, lambda source, said=said: CellResult("ok", said))  # type: ignore[misc]
        (_, with_tool) = run_evaluation([policy], [TASK], HOW, tmp_path / name, tools=calculator_tool(), name="plain")
        assert with_tool.evaluation is not None
        told.append(with_tool)
        found.append(evaluate(policy, TASK, PROBLEMS, HOW, tools=calculator_tool()))
    quiet, loud = found
    for name in STATISTICS:
        assert quiet.rows[name] == loud.rows[name], name
    assert quiet.rows["completion"] != loud.rows["completion"]
    assert sum(loud.rows["calls"]) > 10
    ours, theirs = (per_problem(one.evaluation) for one in told if one.evaluation is not None)
    assert ours.keys() == theirs.keys()
    for name in ours:
        np.testing.assert_array_equal(ours[name], theirs[name], err_msg=name)
    for name in ("entropy", "branching", "mean_tokens", "calls", "redundancy", "language_mixing"):
        assert scores(told[0].evaluation)[name] == scores(told[1].evaluation)[name], name  # type: ignore[arg-type]
    assert scores(told[1].evaluation)["language_mixing"].mean == 0  # type: ignore[arg-type,union-attr]


def test_statistics_are_those_of_the_sampled_words(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each completion's words are known, and with them the tokens, the calls, and the mean entropy of the chain."""
    answering(monkeypatch, lambda source: CellResult("ok", "49"))
    found = evaluate(policy, TASK, PROBLEMS, HOW, tools=calculator_tool(max_calls=2))
    for row, text in enumerate(found.rows["completion"]):
        words, last = [], "\n"
        rest = text.replace("49>>", "\x00").replace("no calls left>>", "\x01")
        entropies = []
        while rest:
            if rest[0] in "\x00\x01":
                rest, last = rest[1:], ">"
                continue
            word = next(word for word in CHAIN[last] if rest.startswith(word))
            words.append(word)
            entropies.append(chain_entropy(last))
            rest, last = rest.removeprefix(word), word
        assert last in (RIGHT, WRONG, MUTE)
        entropies.append(0.0)  # of the end
        assert found.rows["tokens"][row] == len(words) + 1
        assert found.rows["calls"][row] == text.count("49>>")
        assert found.rows["calls"][row] <= 2
        np.testing.assert_allclose(found.rows["entropy"][row], np.mean(entropies), atol=1e-4)
        assert found.rows["correct"][row] == (last == RIGHT and row < 16)
    assert 2 in found.rows["calls"]
    assert any("no calls left" in text for text in found.rows["completion"])
    assert found.summary()["calls"] == np.mean(found.rows["calls"])
    assert found.summary()["tool"] == "calculator"
    assert "calls per completion" in [row[0] for row in table(found).rows]


def test_what_a_program_prints_is_not_the_answer(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    answering(monkeypatch, lambda source: CellResult("ok", f"<answer>{VALUE}</answer>"))
    found = evaluate(policy, TASK, PROBLEMS[:1], HOW, tools=calculator_tool())
    texts, correct = found.rows["completion"], found.rows["correct"]
    mute = [row for row, text in enumerate(texts) if text.endswith(MUTE) and f"{VALUE}</answer>>>" in text]
    wrong = [row for row, text in enumerate(texts) if text.endswith(WRONG) and f"{VALUE}</answer>>>" in text]
    assert mute
    assert wrong
    assert not any(correct[row] for row in (*mute, *wrong))
    assert [found.rows["answer"][row] for row in mute] == [None] * len(mute)
    assert [found.rows["answer"][row] for row in wrong] == ["1"] * len(wrong)
    right = [row for row, text in enumerate(texts) if text.endswith(RIGHT)]
    assert right
    assert all(correct[row] and found.rows["well_formed"][row] for row in right)


def test_text_and_code_are_kept_and_gone_on_with(
    policy: Policy, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    answering(monkeypatch, lambda source: CellResult("ok", "49"))
    how = replace(HOW, samples=4)
    (alone,) = run_evaluation([policy], [TASK], how, tmp_path, name="plain")
    both = run_evaluation([policy], [TASK], how, tmp_path, name="plain", tools=calculator_tool())
    assert [result.folder.name for result in both] == ["planted-products-plain", "planted+calculator-products-plain"]
    assert [result.drawn for result in both] == [0, 12]
    assert both[0].scores == alone.scores
    more = run_evaluation([policy], [TASK], replace(HOW, samples=6), tmp_path, name="plain", tools=calculator_tool())
    assert [result.drawn for result in more] == [6, 6]
    fresh = run_evaluation([policy], [TASK], replace(HOW, samples=6), tmp_path / "b", tools=calculator_tool(), chunk=1)
    kept = ("completion", "tool_calls", "token_ids", "token_entropy", "token_logps", "token_branching")
    for one, other in zip(more, fresh, strict=True):
        columns = kept if "+" in one.folder.name else ("completion",)
        assert (
            load_evaluation(one.folder, columns).rows["completion"]
            == (load_evaluation(other.folder, columns).rows["completion"])
        )
    rows = load_evaluation(more[1].folder, kept).rows
    for row, text in enumerate(rows["completion"]):
        calls = json.loads(rows["tool_calls"][row])
        assert rows["calls"][row] == len(calls) == text.count("49>>")
        forced = sum(call["end"] - call["begin"] for call in calls)
        assert rows["tool_tokens"][row] == forced == 4 * len(calls)
        for name in kept[3:]:
            assert len(rows[name][row]) == len(rows["token_ids"][row])
            assert sum(value is None for value in rows[name][row]) == forced
        for call in calls:
            assert policy.tokenizer.decode(rows["token_ids"][row][call["begin"] : call["end"]]) == "49>>"
            assert (call["source"], call["status"], call["text"]) in [("7*7", "ok", "49"), ("8*8", "ok", "49")]
    with pytest.raises(Exception, match=r"another tool\.max_calls: 3 there, 2 requested"):
        run_evaluation([policy], [TASK], how, tmp_path, name="plain", tools=calculator_tool(max_calls=2))


def test_the_table_has_text_and_code(policy: Policy, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    answering(monkeypatch, lambda source: CellResult("ok", "49"))
    results = run_evaluation([policy], [TASK], HOW, tmp_path, tools=calculator_tool())
    evaluations = [result.evaluation for result in results if result.evaluation is not None]
    table = side_by_side(evaluations)
    assert list(table.columns[:6]) == ["model", "with", "pass@1", "pass@2", "pass@8", "pass@16"]
    assert list(table.columns[6:]) == ["model tokens", "calls"]
    assert [row[:2] for row in table.rows] == [("planted", "text"), ("planted", "code")]
    both = side_by_side([evaluations[0], replace(evaluations[1], task="other")])
    assert [row[1] for row in both.rows] == ["products", "other"]
    for row, one in zip(table.rows, evaluations, strict=True):
        correct = np.array(one.rows["correct"]).reshape(3, 16)
        assert row[2].mean == pytest.approx(correct.mean())  # type: ignore[union-attr]
        assert row[5].mean == pytest.approx(correct.any(axis=1).mean())  # type: ignore[union-attr]
        assert row[6].mean == pytest.approx(np.mean(one.rows["tokens"]))  # type: ignore[union-attr]
    assert table.rows[0][7] == 0.0
    assert table.rows[1][7].mean == pytest.approx(np.mean(evaluations[1].rows["calls"]))  # type: ignore[union-attr]
    assert evaluations[0].pass_at(16).mean < evaluations[1].pass_at(16).mean  # only after a call may it be right


def test_the_command(policy: Policy, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("explorl.evaluation.harness.load_policy", lambda *_, **__: policy)
    monkeypatch.setattr("explorl.evaluation.harness._tasks", lambda *_: [(TASK, {})])
    answering(monkeypatch, lambda source: CellResult("ok", "49"))
    written = io.StringIO()
    evaluate_command(
        ["tiny"],
        ["products"],
        "plain",
        tmp_path,
        console=Console(file=written, width=200),
        changes={"samples": 2, "max_tokens": 100},
        tools=calculator_tool(max_calls=1),
    )
    said = written.getvalue()
    assert "text and code (calculator)" in said
    assert "│ text │" in said
    assert "│ code │" in said
    assert "calls per completion" in said
    identity = json.loads((tmp_path / "tiny+calculator-products-plain" / "evaluation.json").read_text())
    assert identity["tool"]["name"] == "calculator"
    assert identity["tool"]["max_calls"] == 1
    assert "Delimiters(opening='<<'" in identity["tool"]["fence"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--tools", "pyton"], r"unknown tool 'pyton'; did you mean 'python'\?"),
        (  # as typer 0.28 says it, and typer 0.26
            ["--tools", "python", "--tool-calls", "0"],
            "invalid value '0' for '--tool-calls': Input should be greater than or equal to 1"
            "|invalid value for '--tool-calls': 0 is not in the range x>=1",
        ),
        (["--tool-calls", "2"], "--tool-calls is 2: no tool is named; add --tools python, or leave it out"),
    ],
)
def test_bad_options_are_said_before_anything_is_loaded(
    options: list[str], said: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["eval", "--model", "tiny", "--task", "products", "--out", str(tmp_path / "out"), *options])
    assert exit_.value.code == 2
    assert re.search(said, " ".join(capsys.readouterr().err.split()))
    assert not (tmp_path / "out").exists()


def test_the_scripts_of_the_page_run(capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parents[2] / "docs" / "tools.md").read_text(encoding="utf-8")
    scripts = re.findall(r"^```python\n(from .*?)^```$", page, re.MULTILINE | re.DOTALL)
    assert len(scripts) == 2
    for script in scripts:
        exec(script, {})
    said = capsys.readouterr().out
    assert "text and code (calculator)" in said
    assert "ToolCall(source='" in said


def test_a_model_that_cannot_write_the_fence_is_refused_before_sampling(tmp_path: Path) -> None:
    tiny: Any = load_policy("tiny", device="cpu")
    tool = calculator_tool(fence=Delimiters("«", "="))
    with pytest.raises(ValueError, match="'«1=1>>', which the tokenizer of tiny cannot write"):
        evaluate(tiny, TASK, PROBLEMS, HOW, tools=tool)
    with pytest.raises(ValueError, match="'«1=1>>', which the tokenizer of tiny cannot write"):
        run_evaluation([tiny], [TASK], HOW, tmp_path / "out", tools=tool)
    assert not (tmp_path / "out").exists()
    with pytest.raises(ValueError, match="engine is 'generate', which cannot call tool 'python'"):
        evaluate(tiny, TASK, PROBLEMS, HOW, tools="python", engine="generate")
