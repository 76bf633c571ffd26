"""Whatever a model, a program or a data set writes: it is stored, shown and compared, and nothing of it acts."""

from __future__ import annotations

import io
import json
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from explorl.cli.compare import compare, compare_command
from explorl.cli.run_evaluations import evaluate_command
from explorl.core.text import clean
from explorl.evaluation import protocol
from explorl.evaluation.completions import COLUMNS, DIGEST
from explorl.evaluation.harness import run_evaluation
from explorl.evaluation.llm_judge import parse_opinion
from explorl.evaluation.results_folder import EvaluationFolder, load_evaluation
from explorl.evaluation.scores import table
from explorl.models import load_policy
from explorl.tasks import CountdownMini, Problem, Verdict
from explorl.training.callbacks import progress_bar

from ..hostile import HOSTILE, NAMES, raw

MEGABYTE = "[/b]\x1b\ud800<b>" * 100_000
DRAWN = ("lone surrogate", "closing tag of rich", "clear the screen", "writing turned around",
         "mathematics without end", "script", "pipe", "null")  # fmt: skip


@pytest.mark.parametrize("text", [*NAMES, MEGABYTE])
def test_a_verdict_holds_clean_text(text: str) -> None:
    verdict = Verdict(False, False, text, text)
    assert verdict.answer == verdict.error == clean(text)
    json.dumps(asdict(verdict), ensure_ascii=False).encode()
    assert Verdict(True, True, "a\n\tb é").answer == "a\n\tb é"


def rows(texts: list[str], right: int) -> dict[str, list[Any]]:
    """Two samples of each problem; the first of the first ``right`` problems is correct."""
    count = 2 * len(texts)
    doubled = [text for text in texts for _ in range(2)]
    values: dict[str, list[Any]] = dict.fromkeys(COLUMNS, [1] * count)
    values |= dict.fromkeys(("problem", "prompt", "completion", "answer", "error", "finish_reason"), doubled)
    values |= {name: [1.0] * count for name in ("entropy", "branching", "redundancy")}
    values |= {name: [row % 2 == 0 and row // 2 < right for row in range(count)] for name in ("correct", "well_formed")}
    values[DIGEST] = [None] * count
    return values | {"problem_index": [row // 2 for row in range(count)], "sample": [0, 1] * len(texts)}


def write_folder(folder: Path, model: str, texts: list[str], right: int = 2) -> EvaluationFolder:
    store = EvaluationFolder(folder)
    sampling = {key: value for key, value in asdict(protocol("plain").sampling).items() if key != "seed"}
    identity = {"model": model, "task": texts[0], "split": "holdout", "protocol": "plain", "sampling": sampling,
                "answer_mark": "<answer>"}  # fmt: skip
    store.claim(identity)
    store.claim(identity)  # it is the same evaluation, whatever its name
    store.write(rows(texts, right))
    summary: Mapping[str, Any] = {**identity, "measures": [], "problems": len(texts), "samples": 2}
    store.summary_path.write_text(json.dumps(summary))
    return store


def test_an_evaluation_is_written_and_read_back(tmp_path: Path) -> None:
    texts = [*NAMES, MEGABYTE]
    store = write_folder(tmp_path, "m\ud800[/b]", texts)
    assert store.have(texts, 2).all()  # its problems are found under the names that they have elsewhere
    evaluation = load_evaluation(tmp_path, ("prompt", "completion", "error"))
    shown = [clean(text.replace("\r", "\n")) for text in texts]
    for column in ("prompt", "completion", "error", "answer"):
        assert evaluation.rows[column][::2] == shown
    assert not raw("".join(evaluation.rows["completion"]))
    assert evaluation.model == "m\ufffd[/b]"
    out = io.StringIO()
    table(evaluation).print(Console(file=out, width=200))
    assert not raw(out.getvalue())
    assert "m\ufffd[/b] on" in out.getvalue()
    evaluation.save(tmp_path, "again")


def test_a_folder_from_elsewhere_is_cleaned_when_it_is_read(tmp_path: Path) -> None:
    store = write_folder(tmp_path, "x", ["p", "q"])
    store.identity_path.write_text(json.dumps({**store.identity(), "model": "\x1b]52;c;AAAA\x07", "\x1b": ["\ud800"]}))
    assert store.identity()["model"] == "␛]52;c;AAAA␇"
    assert store.identity()["␛"] == ["\ufffd"]


@pytest.mark.parametrize("count", [4, pytest.param(8, marks=pytest.mark.slow)])
def test_models_of_any_name_are_compared(count: int, tmp_path: Path) -> None:
    names = [HOSTILE[kind] for kind in DRAWN[:count]]
    folders = [tmp_path / str(place) for place in range(count)]
    for place, (folder, name) in enumerate(zip(folders, names, strict=True)):
        write_folder(folder, name, ["[/b]\x1b", "$p$", "q\0", "|"], right=place % 4)
    out = io.StringIO()
    compared = compare_command(folders, tmp_path / "out[/b]", console=Console(file=out, width=400))
    shown = [clean(name) for name in names]
    assert compared.boundary.names == shown
    for name in shown:
        assert name in out.getvalue()
    assert "out[/b]" in out.getvalue()
    svgs = [path.read_text(encoding="utf-8") for path in compared.figures if path.suffix == ".svg"]
    for svg in svgs:
        ElementTree.fromstring(svg)
    drawn = "".join(ElementTree.fromstring(svgs[0]).itertext())
    for name in shown:
        assert name in drawn
    files = [path for path in (tmp_path / "out[/b]").iterdir() if path.suffix != ".png"]
    assert not raw(out.getvalue() + "".join(path.read_text(encoding="utf-8") for path in files))
    assert json.loads((tmp_path / "out[/b]" / "comparison.json").read_text())["models"] == shown


def test_names_of_a_comparison(tmp_path: Path) -> None:
    folders = [tmp_path / str(place) for place in range(2)]
    for folder in folders:
        write_folder(folder, "x", ["p", "q"])
    with pytest.raises(ValueError, match="two models are called 'a␛'"):
        compare(folders, tmp_path / "out", names=["a\x1b", "a␛"])
    with pytest.raises(ValueError, match=r"'n{40}…' has 1000000 characters; use at most 200"):
        compare(folders, tmp_path / "out", names=["n" * 1_000_000, "b"])


@dataclass(frozen=True)
class Hostile(CountdownMini):
    """Countdown, whose verdicts and ids are what strangers write."""

    name: str = "../[/b]\x1b$x^"

    def problems(self, split: str, *, limit: int | None = None) -> list[Problem]:
        found = super().problems(split, limit=len(NAMES))
        return [Problem(text, problem.data) for text, problem in zip(NAMES, found, strict=True)][:limit]

    def verify(self, completion: str | bytes, problem: Problem, *, opened: bool = False) -> Verdict:
        return Verdict(False, False, problem.id, problem.id)


def test_a_hostile_task_and_label_are_evaluated(tmp_path: Path) -> None:
    policy, how = load_policy("tiny", device="cpu"), protocol("plain", samples=1, max_tokens=4)
    label = "../m\ud800[/b]"
    for drawn in (len(NAMES), 0):  # nothing is drawn again
        (result,) = run_evaluation({label: policy}, [Hostile()], how, tmp_path / "out", name="../plain")
        assert (result.drawn, result.missing) == (drawn, 0)
        assert result.folder.parent == tmp_path / "out"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert load_evaluation(result.folder).rows["answer"] == [clean(text) for text in NAMES]


def test_the_command_prints_labels_as_they_are(tmp_path: Path) -> None:
    out = io.StringIO()
    evaluate_command(
        ["[/b]\x1b]52;c;AAAA\x07=tiny"], ["countdown-mini"], "plain", tmp_path / "a[/b]",
        console=Console(file=out, width=300), changes={"samples": 1, "max_tokens": 4}, limit=2,
    )  # fmt: skip
    assert "[/b]␛]52;c;AAAA␇ on countdown-mini" in out.getvalue()
    assert "a[/b]" in out.getvalue()
    assert not raw(out.getvalue())


def test_a_bar_shows_its_label_as_it_is() -> None:
    out = io.StringIO()
    with progress_bar(Console(file=out, force_terminal=True, width=200, color_system=None)) as progress:
        progress.add_task("[/b] [red]x :smile:", total=1, note="[/i]")
    assert "[/b] [red]x :smile:" in out.getvalue()
    assert "[/i]" in out.getvalue()


def test_a_judges_reason_is_cleaned() -> None:
    opinion = parse_opinion(json.dumps({"irrelevant": True, "reason": "\x1b[2J\ud800" + "a" * 10_000}))
    assert opinion is not None
    assert opinion.reason.startswith("␛[2J\ufffd")
    assert len(opinion.reason) == 500
