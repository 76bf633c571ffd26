"""`explorl analyze`: every figure and table of a run, clear words where something is missing, and its report page."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from typer.testing import CliRunner

from explorl.analysis.charts import Chart
from explorl.analysis.lens import Analysis, Context, Findings, Unavailable
from explorl.analysis.lens_table import LensTable, NotRecorded, build_table, read_run
from explorl.cli import app as cli
from explorl.core.store import RunStore, StoreError, write_json
from explorl.report.figures import file_png, file_svg, page_svg
from explorl.report.lens_sections import _page_element, _stored_results
from explorl.report.run_analyses import (
    AnalysisOutcome,
    analyze_checkpoint,
    analyze_run,
    run_analyses,
    run_context,
    select_analyses,
)
from explorl.report.run_page import write_run_report
from explorl.stats import Table

from .planted_runs import lines, noise, rollouts

STEPS = 40
RUN = ("stages", "law", "signs", "fastest", "words", "defects", "updates")


@pytest.fixture
def run(tmp_path: Path) -> RunStore:
    """A run whose reward rises until step 20."""
    rng = np.random.default_rng(0)
    store = RunStore.create(tmp_path / "run", {"seed": 0, "training": {"steps": STEPS, "iterations": 1}})
    write_json(store.kind_path, {"kind": "grpo"})
    t = np.arange(1, STEPS + 1)
    curves = lines(
        reward=0.2 + 0.4 * np.minimum(t, 20) / 20 + noise(STEPS, 0.02, rng),
        entropy=0.5 + np.exp(-t / 20) + noise(STEPS, 0.02, rng),
    )
    for line in curves:
        store.append_metrics(line)
    for step, columns in rollouts(rng, steps=STEPS, fast_slope=-2.0, fast_negative=0.8, link=True).items():
        store.write_rollouts(step, columns)
    return store


def outcomes_of(run: RunStore) -> dict[str, AnalysisOutcome]:
    """What the analyses of a run find, with nothing written."""
    return {one.analysis.name: one for one in run_analyses(read_run(run.folder), Context(), select_analyses(RUN))}


def test_every_figure_and_table_is_written(run: RunStore) -> None:
    place, outcomes = analyze_run(run.folder, only=RUN)
    assert place == run.folder / "analysis"
    assert {
        one.analysis.name: type(one.result).__name__ for one in outcomes if isinstance(one.result, Unavailable)
    } == {}
    held = json.loads((place / "analysis.json").read_text())
    assert held["last_step"] == STEPS
    assert held["tokens"] == STEPS * 8 * 20
    for entry in held["analyses"].values():
        assert entry["figures"]
        for figure in entry["figures"]:
            ElementTree.fromstring((place / figure["svg"]).read_bytes())
            assert (place / figure["png"]).read_bytes().startswith(b"\x89PNG")
            assert len(figure["caption"]) > 40
        for table in entry["tables"].values():
            written = (place / table["csv"]).read_text().splitlines()
            assert len(written) == len(table["rows"]) + 1
    found = held["analyses"]["stages"]["result"]["breakpoint"]
    assert found["low"] <= 20 <= found["high"]
    assert not list(place.glob(".*"))


def test_the_same_seed_gives_the_same_files(run: RunStore, tmp_path: Path) -> None:
    first, _ = analyze_run(run.folder, only=["fastest"])
    second, _ = analyze_run(run.folder, only=["fastest"], out=tmp_path / "again")
    names = sorted(path.name for path in first.iterdir())
    assert names == sorted(path.name for path in second.iterdir())
    for name in names:
        if name != "analysis.json":
            assert (first / name).read_bytes() == (second / name).read_bytes(), name


def test_one_analysis_again_keeps_the_others(run: RunStore) -> None:
    place, _ = analyze_run(run.folder, only=["stages", "law"])
    before = (place / "law.svg").stat().st_mtime_ns
    analyze_run(run.folder, only=["stages"])
    held = json.loads((place / "analysis.json").read_text())
    assert set(held["analyses"]) == {"stages", "law"}
    assert (place / "law.svg").stat().st_mtime_ns == before
    run.metrics_path.write_text("".join(run.metrics_path.read_text().splitlines(keepends=True)[:3]))
    analyze_run(run.folder, only=["stages"])
    assert not (place / "stages.svg").exists()  # what it showed is no longer so
    assert "3 steps" in json.loads((place / "analysis.json").read_text())["analyses"]["stages"]["reason"]


def test_a_truncated_file_is_left_out_and_named(run: RunStore) -> None:
    broken = run.rollouts / "step-000003.parquet"
    broken.write_bytes(broken.read_bytes()[:200])
    assert not any(isinstance(one.result, Unavailable) for one in outcomes_of(run).values())
    said: list[str] = []
    analyze_run(run.folder, only=[f"{__name__}:MINE"], say=said.append)
    assert any("step-000003.parquet cannot be read and is left out" in text for text in said)
    assert 3 not in read_run(run.folder).completions.step


def test_a_run_without_token_records(run: RunStore) -> None:
    for path in run.rollouts.glob("*"):
        step = int(path.stem[5:])
        run.write_rollouts(step, {"prompt": ["p"] * 2, "completion": ["a"] * 2, "advantage": [1.0, -1.0]})
    found = outcomes_of(run)
    assert not isinstance(found["stages"].result, Unavailable)
    assert not isinstance(found["law"].result, Unavailable)
    for name in ("signs", "fastest", "words", "updates"):
        assert "no token is recorded" in found[name].summary, name


def test_a_run_of_one_step(run: RunStore) -> None:
    run.rewind(1)
    outcomes = outcomes_of(run)
    assert "1 step" in outcomes["stages"].summary
    assert all(isinstance(one.result, Unavailable) or name == "updates" for name, one in outcomes.items())
    assert not any(one.failed for one in outcomes.values())


def test_empty_and_odd_rollouts(run: RunStore) -> None:
    run.write_rollouts(1, {"prompt": [], "completion": [], "advantage": []})
    run.write_rollouts(2, {"other": [1, 2]})
    run.write_rollouts(3, {"prompt": ["p"], "completion": [None], "tokens": [["a", "b"]], "entropy": [[0.5]],
                           "logp": [[None, -0.5]], "advantage": [None]})  # fmt: skip
    table = read_run(run.folder)
    assert any("entropy of 1 completions is left out" in note for note in table.notes)
    inside = table.tokens.step == 3
    assert inside.sum() == 2
    assert np.isnan(table.tokens["entropy"][inside]).all()
    assert table.tokens["logp"][inside].tolist()[1] == -0.5
    assert not any(one.failed for one in outcomes_of(run).values())


def test_reading_puts_every_token_in_its_place() -> None:
    table = build_table(
        "run",
        {
            2: {"prompt": ["p", "q"], "completion": ["ab", "c"], "advantage": [1.0, -1.0], "prompt_ids": [[7], None],
                "tokens": [["a", "b"], None], "token_ids": [[1, 2], None], "entropy": [[0.1, 0.2], None]},
            1: {"prompt": ["r"], "completion": ["d"], "advantage": [0.5], "tokens": [["d"]], "token_ids": [[3]],
                "entropy": [[0.3]], "logp_after": [[-1.0]], "reward/correctness": [1.0]},
        },
    )  # fmt: skip
    assert table.completions.step.tolist() == [1, 2, 2]
    assert table.completions.count.tolist() == [1, 2, 0]
    assert table.tokens.completion.tolist() == [0, 1, 1]
    assert table.tokens.position.tolist() == [0, 0, 1]
    assert table.tokens["token_ids"].tolist() == [3, 1, 2]
    assert table.tokens["tokens"].tolist() == ["d", "a", "b"]
    assert table.tokens["logp_after"].tolist()[0] == -1.0
    assert np.isnan(table.tokens["logp_after"][1:]).all()
    assert table.completions.prompt_ids[1] == [7]
    assert table.completions["correct"][0] == 1
    assert table.completions.sign.tolist() == [1, 1, -1]
    rounding = build_table(
        "run", {1: {"prompt": ["p"] * 3, "completion": ["a"] * 3, "advantage": [7.4e-5, -7.4e-5, -0.3]}}
    )
    assert rounding.completions.sign.tolist() == [0, 0, -1]  # (1.1 − mean of eight 1.1) / 1e-4 is no advantage
    with pytest.raises(NotRecorded, match="update_size"):
        table.tokens["update_size"]
    with pytest.raises(NotRecorded, match="advantage"):
        table.completions["reward/style"]


def test_long_runs_are_thinned(run: RunStore) -> None:
    table = read_run(run.folder, most_tokens=STEPS * 8 * 20 // 4)
    assert np.unique(table.completions.step).tolist() == list(range(1, STEPS + 1, 4))
    assert "10 of 40 rollout files" in table.notes[0]


def broken(table: LensTable, context: Context) -> Any:
    raise ZeroDivisionError("no luck")


def lengths(table: LensTable, context: Context) -> Any:
    if context.option("mine", "off", False):
        return Unavailable("nothing")
    return Findings(f"{len(table.completions)} answers", {"mine": Table(["n"], [])})


MINE = Analysis("mine", "Mine", lengths)
BROKEN = Analysis("broken", "Broken", broken)
ODD = Analysis("odd", "Odd", lambda table, context: 3)  # type: ignore[arg-type, return-value]


def test_an_analysis_of_ones_own_and_one_that_breaks(run: RunStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("EXPLORL_DEBUG", raising=False)
    names = [f"{__name__}:{name}" for name in ("MINE", "BROKEN", "ODD")]
    place, outcomes = analyze_run(run.folder, only=[*names, "stages"])
    assert outcomes[0].summary == "320 answers"
    assert outcomes[1].failed
    assert "ZeroDivisionError: no luck" in outcomes[1].summary
    assert "returned a int; return Findings or Unavailable" in outcomes[2].summary
    assert not isinstance(outcomes[3].result, Unavailable)
    assert (place / "mine.csv").read_text() == "n\n"


def test_names(run: RunStore) -> None:
    assert [one.name for one in select_analyses()][: len(RUN)] == list(RUN)
    assert all(one.lone for one in select_analyses(lone=True))
    with pytest.raises(ValueError, match="stages needs the steps of a training run"):
        select_analyses(["stages"], lone=True)
    with pytest.raises(ValueError, match="unknown analysis 'nothing'"):
        analyze_run(run.folder, only=["nothing"])


def test_the_task_has_the_runs_options(run: RunStore) -> None:
    values = run.config()
    values["task"] = {"name": "countdown-mini", "template": "terse", "train_problems": 8, "seed": 7, "data_dir": None}
    run.config_path.write_text(yaml.safe_dump(values))
    assert run_context(run.folder).task.seed == 7  # type: ignore[attr-defined]


def test_options_that_nobody_asked_for_are_named(run: RunStore) -> None:
    said: list[str] = []
    analyze_run(run.folder, only=[f"{__name__}:MINE"], options={"mine.of": 1, "impact.samples": 2}, say=said.append)
    assert "--option impact.samples had no effect; no analysis that ran has this option" in said
    assert "--option mine.of had no effect; valid options: mine.off" in said


def test_options_have_the_type_of_their_default() -> None:
    context = Context(options={"a.n": "8", "a.x": 0.5, "a.bad": 2.5, "a.word": "many", "a.yes": True})
    assert context.option("a", "n", 1) == 8
    assert context.option("a", "x", 1.0) == 0.5
    assert context.option("a", "none", 3) == 3
    for name in ("bad", "word", "yes"):
        with pytest.raises(ValueError, match=rf"a\.{name} is .*; use a value like 4"):
            context.option("a", name, 4)


def test_the_command(run: RunStore) -> None:
    result = CliRunner().invoke(cli.app, ["analyze", str(run.folder), "--only", "stages", "--only", "law"])
    assert result.exit_code == 0, result.output
    text = " ".join(result.output.split())
    assert "rises until step" in text
    assert "R = −a·exp(H) + b" in text
    assert "explorl report" in text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "name a run"),
        (["--model", "tiny"], "name a run"),
        (["RUN", "--model", "tiny"], "--model is for a single checkpoint"),
        (["RUN", "--option", "impact"], "is not key=value"),
        (["RUN", "--only", "stage"], "did you mean 'stages'"),
        (["/no/such/run"], "holds no run"),
    ],
)
def test_bad_calls_are_told_in_words(
    run: RunStore, arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit:
        cli.main(["analyze", *(str(run.folder) if one == "RUN" else one for one in arguments)])
    assert exit.value.code == 2
    assert words in " ".join(capsys.readouterr().err.split())


def test_out_must_be_a_folder(run: RunStore, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="it is a file"):
        analyze_run(run.folder, only=["stages"], out=tmp_path / "file")


def test_the_report_has_the_lens(run: RunStore) -> None:
    for step in range(1, 31):  # so few steps that figures are quickly drawn
        (run.rollouts / f"step-{step:06d}.parquet").unlink()
    before = write_run_report([run.folder]).read_text()
    assert 'id="lens-stages"' in before
    assert 'id="lens-law"' in before
    analyze_run(run.folder, only=["stages"])
    page = write_run_report([run.folder]).read_text()
    assert 'id="lens-stages"' in page
    assert 'id="lens-law"' not in page  # what was analysed is what is shown
    assert page.count("The training accuracy rises until step") >= 1
    names = re.findall(r'\bid="([^"]+)"', page)
    assert len(names) == len(set(names))


def test_a_stored_figure_is_shown_only_as_we_drew_it(run: RunStore) -> None:
    place, _ = analyze_run(run.folder, only=["stages"])
    assert [entry["name"] for entry in _stored_results(place, STEPS)] == ["stages"]
    with pytest.raises(ValueError, match="step 40, and the run is at 41"):
        _stored_results(place, STEPS + 1)
    svg = (place / "stages.svg").read_text()
    assert "<style" not in _page_element(svg)
    for evil in (
        "<script>alert(1)</script>",
        '<image href="http://evil.example/x.png"/>',
        '<g onload="alert(1)"/>',
        '<use href="http://evil.example/x.svg#a"/>',
        '<path style="fill: url(http://evil.example)"/>',
        "<style>@import 'http://evil.example'</style><script/>",
    ):
        with pytest.raises(ValueError, match="figures that Explorl draws"):
            _page_element(svg.replace("</svg>", f"{evil}</svg>"))


def test_charts_take_the_colours_of_where_they_are() -> None:
    def draw(axes: Any, palette: Any) -> None:
        axes.plot([0, 1], [0, 1], color=palette.arms[0])
        axes.text(0.5, 0.5, "a$b$", color=palette.paper)

    found = Findings("[-0.5, -.3] step-1 a -2", charts=[Chart("one", "One", "from -1 to 2e-05, x-1", [draw])])
    assert found.sentence == "[−0.5, −.3] step-1 a −2"
    (chart,) = found.charts
    assert chart.caption == "from −1 to 2e-05, x-1"
    element = page_svg(chart, "one")
    assert "var(--arm-0)" in element
    assert "a$b$" in element
    assert "<style" not in element
    assert "prefers-color-scheme: dark" in file_svg(chart)
    assert file_png(chart).startswith(b"\x89PNG")


def test_a_lone_checkpoint(tmp_path: Path) -> None:
    names = ["positions", f"{__name__}:LONE"]
    place, outcomes = analyze_checkpoint(
        "tiny", "countdown-mini", out=tmp_path / "lone", only=names, samples=2, limit=3, template="terse",
        changes={"max_tokens": 24},
    )  # fmt: skip
    assert not any(one.failed for one in outcomes)
    table = outcomes[1].result["table"]
    assert len(table.completions) == 6
    assert set(np.unique(table.completions["correct"])) <= {0.0, 1.0}
    tokens = table.tokens
    assert (tokens["entropy"] >= 0).all()
    assert (tokens["logp"] <= 0).all()
    assert (tokens["other_ids"] != tokens["token_ids"]).all()
    assert tokens["state_norm"].min() > 0
    whole = np.exp(tokens["logp"]) ** 2 + np.exp(tokens["other_logp"]) ** 2
    assert (tokens["collision"] >= whole - 1e-5).all()
    assert (place / "analysis.json").is_file()


LONE = Analysis("lone", "Lone", lambda table, context: Findings("", values={"table": table}), lone=True)


def test_a_run_with_nothing_in_it_has_a_reason_for_everything() -> None:
    outcomes = run_analyses(build_table("run", {}), Context(), select_analyses())
    assert all(isinstance(one.result, Unavailable) for one in outcomes), [
        one.analysis.name for one in outcomes if not isinstance(one.result, Unavailable)
    ]
    assert not any(one.failed for one in outcomes), [one.summary for one in outcomes if one.failed]
