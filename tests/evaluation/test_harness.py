"""The harness: what is sampled stays sampled, whatever happens in between."""

from __future__ import annotations

import io
import json
import multiprocessing
import os
import random
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from explorl.cli import run_evaluations
from explorl.cli.app import main
from explorl.cli.compare import compare
from explorl.cli.run_evaluations import evaluate_command, parse_models
from explorl.core.store import StoreError
from explorl.evaluation import PROTOCOLS, evaluate, harness, protocol
from explorl.evaluation.completions import DIGEST, TOKEN_COLUMNS
from explorl.evaluation.harness import Evaluated, FailedEvaluation, parse_shard, run_evaluation
from explorl.evaluation.results_folder import EvaluationFolder, load_evaluation
from explorl.evaluation.scores import per_problem, scores, unsolved
from explorl.evaluation.seeds import WIDTH, block_seed, seed_at
from explorl.metrics import avg_at_k, maj_at_k
from explorl.models import ModelError, Policy, load_policy
from explorl.rollout.sampling.rng import request_keys
from explorl.stats import Interval, Table
from explorl.tasks import CountdownMini, get_task

HOW = protocol("plain", samples=20, max_tokens=48)
PROBLEMS = 9
NAME = "tiny-countdown-mini-plain"
SAMPLED = ("problem", "sample", "completion", "tokens", "finish_reason", "correct", "answer", "error", "redundancy")
fork = multiprocessing.get_context("fork")  # children that need not import torch again


@pytest.fixture(scope="module")
def tiny() -> Policy:
    return load_policy("tiny", device="cpu")


def run(tiny: Policy, out: Path, samples: int = 20, limit: int = PROBLEMS, **options: Any) -> Evaluated:
    options = {"chunk": 4, "name": "plain", **options}
    return run_evaluation([tiny], ["countdown-mini"], replace(HOW, samples=samples), out, limit=limit, **options)[0]


@pytest.fixture(scope="module")
def whole(tiny: Policy, tmp_path_factory: pytest.TempPathFactory) -> Evaluated:
    """One uninterrupted call."""
    return run(tiny, tmp_path_factory.mktemp("whole"))


def texts(result: Evaluated) -> dict[str, list[Any]]:
    rows = load_evaluation(result.folder, ("completion", "error")).rows
    return {name: rows[name] for name in SAMPLED}


def assert_same(result: Evaluated, whole: Evaluated) -> None:
    assert texts(result) == texts(whole)
    assert result.scores.keys() == whole.scores.keys()
    for name, value in whole.scores.items():
        mine = result.scores[name]
        assert isinstance(value, Interval)
        assert isinstance(mine, Interval)
        np.testing.assert_allclose([mine.mean, mine.low, mine.high], [value.mean, value.low, value.high], rtol=1e-6)


# ---------------------------------------------------------------- protocols


class Named(CountdownMini):
    """A task that is one of several data sets."""

    def __init__(self, dataset: str) -> None:
        super().__init__()
        object.__setattr__(self, "dataset", dataset)


def test_protocols_report_what_the_tables_report() -> None:
    deng = PROTOCOLS["deng-table4"]
    assert (deng.samples, deng.sampling.temperature, deng.sampling.top_p) == (8, 0.6, 0.95)
    assert deng.measures == ("avg@k", "maj@k")
    table3 = PROTOCOLS["deng-table3"]
    aime, other = Named("aime24"), Named("amc23")
    assert (table3.samples_for(aime), table3.samples_for(other)) == (128, 64)
    assert protocol("deng-table3", samples=4).samples_for(aime) == 4
    assert PROTOCOLS["deng-figure1"].samples == 640
    assert PROTOCOLS["deng-table6"].samples_for(get_task("code")) == 4
    assert PROTOCOLS["deng-table6"].samples_for(get_task("countdown-mini")) == 8
    assert PROTOCOLS["egsw-table1"].sampling.temperature == 0
    for chosen in PROTOCOLS.values():
        assert "2025" in chosen.source or chosen is PROTOCOLS["plain"]


def test_avg_and_maj_at_8_come_with_intervals(tiny: Policy, tmp_path: Path) -> None:
    how = protocol("deng-table4", max_tokens=48)
    result = run_evaluation([tiny], ["countdown-mini"], how, tmp_path, name="deng-table4", limit=6)[0]
    evaluation = result.evaluation
    assert evaluation is not None
    assert list(result.scores)[:2] == ["avg@8", "maj@8"]
    mean = result.scores["avg@8"], result.scores["maj@8"]
    assert mean[0] is not None and mean[0].mean == np.mean(avg_at_k(evaluation.correct))  # noqa: PT018
    assert mean[1] is not None and mean[1].mean == np.mean(maj_at_k(evaluation.answers, evaluation.correct, 8))  # noqa: PT018
    assert mean[0].low <= mean[0].mean <= mean[0].high
    summary = json.loads((result.folder / "summary.json").read_text())
    assert summary["scores"]["maj@8"]["mean"] == mean[1].mean
    assert "Table 4" in summary["source"]
    plain = evaluate(tiny, get_task("countdown-mini"), get_task("countdown-mini").problems("holdout", limit=2), how)
    assert set(plain.summary()["measures"]) == {"avg@8", "maj@8"}
    with pytest.raises(ValueError, match=r"unknown measure 'best@8'"):
        plain.measure_per_problem("best@8")


# ---------------------------------------------------------------- numbering


@given(seed=st.integers(-(2**70), 2**70), first=st.integers(0, 2**40), count=st.integers(1, 5))
def test_a_call_that_begins_later_draws_the_same_numbers(seed: int, first: int, count: int) -> None:
    later = request_keys(seed_at(seed, first), range(count))
    assert later.tolist() == request_keys(seed, range(first, first + count)).tolist()


def test_blocks_have_their_own_seeds() -> None:
    seeds = {block_seed(seed, block) for seed in range(30) for block in range(40)}
    assert len(seeds) == 1200


# ---------------------------------------------------------------- samples stay


def test_more_samples_and_more_problems_draw_only_what_is_missing(
    tiny: Policy, whole: Evaluated, tmp_path: Path
) -> None:
    """In any steps and any chunks: the samples of one call for all of them."""
    done = 0
    for samples, limit, chunk in ((3, 5, 2), (18, 2, 4), (5, 7, 1), (20, PROBLEMS, 5)):
        result = run(tiny, tmp_path, samples, limit, chunk=chunk)
        assert result.evaluation is not None
        assert result.evaluation.correct.shape == (limit, samples)
        done += result.drawn
    assert done == 20 * PROBLEMS
    assert_same(result, whole)
    assert run(tiny, tmp_path).drawn == 0
    assert run(tiny, tmp_path, 2, 3).evaluation is not None


@settings(max_examples=5, deadline=None)
@given(steps=st.lists(st.tuples(st.integers(1, 18), st.integers(1, 4), st.integers(1, 4)), min_size=1, max_size=3))
def test_any_way_leads_to_the_same_samples(tiny: Policy, whole: Evaluated, steps: list[tuple[int, int, int]]) -> None:
    import tempfile

    expected = texts(whole)
    with tempfile.TemporaryDirectory() as folder:
        for samples, limit, chunk in steps:
            result = run(tiny, Path(folder), samples, limit, chunk=chunk)
        keep = [i * 20 + j for i in range(limit) for j in range(samples)]
        assert texts(result) == {name: [values[place] for place in keep] for name, values in expected.items()}


def test_samples_differ_from_one_another_and_by_seed(tiny: Policy, whole: Evaluated, tmp_path: Path) -> None:
    rows = load_evaluation(whole.folder, ("completion", "token_logps")).rows
    drawn = {tuple(values) for values in rows["token_logps"]}
    distinct = set(zip(rows["problem"], rows["completion"], strict=True))
    assert len(distinct) <= len(drawn)  # the same text has the same log-probabilities
    # blocks do not repeat each other: samples 0–3 and 16–19 of nine problems
    first = [rows["completion"][i * 20 + j] for i in range(PROBLEMS) for j in range(4)]
    second = [rows["completion"][i * 20 + 16 + j] for i in range(PROBLEMS) for j in range(4)]
    assert first != second
    other = run(tiny, tmp_path, seed=1)
    assert texts(other)["completion"] != texts(whole)["completion"]


def test_the_harness_agrees_with_evaluate(tiny: Policy, tmp_path: Path) -> None:
    """Greedy completions are those of `evaluate`, row by row; so are verdicts and token means."""
    task = get_task("countdown-mini")
    how = protocol("plain", samples=2, max_tokens=48, temperature=0.0)
    ours = run_evaluation([tiny], [task], how, tmp_path, limit=6)[0]
    theirs = evaluate(tiny, task, task.problems("holdout", limit=6), how)
    rows = load_evaluation(ours.folder, ("prompt", "completion", "error")).rows
    for name, values in theirs.rows.items():
        if name in ("entropy", "branching"):
            np.testing.assert_allclose(rows[name], values, rtol=1e-5)
        else:
            assert rows[name] == values
    assert ours.evaluation is not None
    assert ours.evaluation.summary()["pass_at_k"] == theirs.summary()["pass_at_k"]


def test_token_records(tiny: Policy, whole: Evaluated, tmp_path: Path) -> None:
    evaluation = load_evaluation(whole.folder, list(TOKEN_COLUMNS))
    for index in (0, 25, 179):
        ids, entropy, branching, logps = (evaluation.rows[name][index] for name in TOKEN_COLUMNS)
        assert len(ids) == len(entropy) == len(branching) == len(logps) == evaluation.rows["tokens"][index]
        assert np.mean(entropy) == pytest.approx(evaluation.rows["entropy"][index], rel=1e-5)
        assert min(branching) >= 1
        assert max(logps) <= 0
    schema = pq.read_schema(next((whole.folder / "samples").glob("*.parquet")))
    assert str(schema.field("token_ids").type.value_type) == "int32"
    assert str(schema.field("token_logps").type.value_type) == "float"
    without = run(tiny, tmp_path, 1, 2, token_records=False)
    with pytest.raises(StoreError, match=r"no column 'token_ids'.*token_records=True"):
        load_evaluation(without.folder, ["token_ids"])
    assert run(tiny, tmp_path, 2, 2).drawn == 2  # goes on as the folder began
    with pytest.raises(StoreError, match=r"another token_records: False there, True"):
        run(tiny, tmp_path, 3, 2, token_records=True)


# ---------------------------------------------------------------- another evaluation in the folder


def test_another_evaluation_in_the_folder_is_named(tiny: Policy, small_policy: Path, tmp_path: Path) -> None:
    run(tiny, tmp_path, 1, 2)
    cases: list[tuple[str, dict[str, Any]]] = [
        (r"another seed: 0 there, 7 requested", {"seed": 7}),
        (r"another split: 'holdout' there, 'train'", {"split": "train"}),
    ]
    for message, options in cases:
        with pytest.raises(StoreError, match=message):
            run(tiny, tmp_path, 1, 2, **options)
    warm = protocol("plain", samples=1, max_tokens=48, temperature=0.5)
    with pytest.raises(StoreError, match=r"another sampling.temperature: 1.0 there, 0.5"):
        run_evaluation([tiny], ["countdown-mini"], warm, tmp_path, name="plain", limit=2)
    other = Policy("tiny", load_policy(str(small_policy), device="cpu").model, tiny.tokenizer)
    with pytest.raises(StoreError, match="another fingerprint"):
        run(other, tmp_path, 1, 2)


def test_another_list_of_problems_is_named(tiny: Policy, tmp_path: Path) -> None:
    class Reversed(type(get_task("countdown-mini"))):  # type: ignore[misc]
        def problems(self, split: str, *, limit: int | None = None) -> Any:
            return super().problems(split, limit=limit)[::-1]

    run(tiny, tmp_path, 1, 2)
    with pytest.raises(StoreError, match=r"problem 0 is '.*' there and '.*' in this call"):
        run_evaluation([tiny], [Reversed()], replace(HOW, samples=1), tmp_path, name="plain", limit=2)


def test_verdicts_on_rows_that_have_changed_since_are_not_taken_over(tiny: Policy, tmp_path: Path) -> None:
    def evaluated(answer: str, out: str, samples: int = 1) -> Path:
        rows = [{"prompt": f"1 2 3={n}\n", "answer": answer if n else "1+2"} for n in range(4)]
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        task = get_task("jsonl", path=tmp_path / "rows.jsonl", holdout=3)
        how = protocol("plain", samples=samples, max_tokens=4)
        return run_evaluation([tiny], [task], how, tmp_path / out, name="plain")[0].folder

    folder = evaluated("1+2", "out")
    assert evaluated("1+2", "out", samples=2) == folder
    with pytest.raises(StoreError, match=r"tiny-rows-plain holds outdated verdicts on problem 'jsonl:\w+': its answer"):
        evaluated("2+3", "out", samples=2)
    other = evaluated("2+3", "other", samples=2)
    evaluated("1+2", "out", samples=2)
    with pytest.raises(StoreError, match=r"a and b have different data for problem 'jsonl:\w+': its answer"):
        compare([folder, other], tmp_path / "compared", names=["a", "b"])
    for path in EvaluationFolder(folder).parts():  # as a version without the column wrote them
        table = pq.read_table(path)
        pq.write_table(table.drop_columns([DIGEST]), path)
    assert evaluated("2+3", "out", samples=2) == folder
    assert evaluated("2+3", "out", samples=3) == folder, "older files and newer ones"


def test_what_no_task_takes_is_refused(tiny: Policy, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'countdown-mini' is always generated; leave out data_dir"):
        run(tiny, tmp_path, 1, 1, task_options={"data_dir": tmp_path})
    assert not any(tmp_path.iterdir())


def test_a_damaged_file_is_named(tiny: Policy, tmp_path: Path) -> None:
    result = run(tiny, tmp_path, 1, 2)
    part = next((result.folder / "samples").glob("*.parquet"))
    part.write_bytes(part.read_bytes()[:100])
    with pytest.raises(StoreError, match=rf"cannot read {part}.*remove it"):
        run(tiny, tmp_path, 1, 2)
    part.unlink()
    assert run(tiny, tmp_path, 1, 2).drawn == 2


# ---------------------------------------------------------------- killed, and side by side


def child(tiny: Policy, out: Path, options: dict[str, Any]) -> None:
    run(tiny, out, **options)
    os._exit(0)  # no clean-up of what the parent owns


@pytest.mark.slow
def test_killed_at_random_moments_and_resumed(tiny: Policy, whole: Evaluated, tmp_path: Path) -> None:
    """SIGKILL until a call comes through; the table is that of the uninterrupted call."""
    dice = random.Random(5)
    killed, begun = 0, time.monotonic()
    process = fork.Process(target=child, args=(tiny, tmp_path / "once", {"chunk": 2}))
    process.start()
    process.join()
    takes = time.monotonic() - begun
    for _ in range(60):
        process = fork.Process(target=child, args=(tiny, tmp_path, {"chunk": 2}))
        process.start()
        process.join(timeout=dice.uniform(0.05, 0.3) * takes)
        if process.is_alive():
            assert process.pid is not None
            os.kill(process.pid, signal.SIGKILL)
        process.join()
        killed += process.exitcode == -signal.SIGKILL
        if process.exitcode == 0:
            break
    assert killed >= 3
    result = run(tiny, tmp_path, chunk=2)
    assert_same(result, whole)
    assert (result.folder / "table.csv").exists()


def test_two_processes_share_the_work(tiny: Policy, whole: Evaluated, tmp_path: Path) -> None:
    pair = [fork.Process(target=child, args=(tiny, tmp_path, {"shard": (i, 2), "chunk": 2})) for i in range(2)]
    for process in pair:
        process.start()
    for process in pair:
        process.join()
    assert [process.exitcode for process in pair] == [0, 0]
    # whoever was last has scored it already
    assert load_evaluation(tmp_path / NAME).correct.shape == (PROBLEMS, 20)
    result = run(tiny, tmp_path)
    assert result.drawn == 0
    assert_same(result, whole)


def test_two_processes_with_the_same_work_harm_nothing(tiny: Policy, whole: Evaluated, tmp_path: Path) -> None:
    pair = [fork.Process(target=child, args=(tiny, tmp_path, {"chunk": chunk})) for chunk in (2, 3)]
    for process in pair:
        process.start()
    for process in pair:
        process.join()
    assert [process.exitcode for process in pair] == [0, 0]
    assert_same(run(tiny, tmp_path), whole)


def test_shards_are_disjoint_and_a_missing_one_is_counted(
    tiny: Policy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = run(tiny, tmp_path, 4, 5, shard=(0, 2), chunk=2)
    assert (first.drawn, first.missing, first.evaluation) == (12, 8, None)
    with pytest.raises(StoreError, match="without --shard"):
        load_evaluation(first.folder)
    monkeypatch.setenv("RANK", "1")  # as torchrun does
    monkeypatch.setenv("WORLD_SIZE", "2")
    second = run(tiny, tmp_path, 4, 5, chunk=2)
    assert (second.drawn, second.missing) == (8, 0)
    assert second.evaluation is not None


def test_shards_and_labels_are_read() -> None:
    assert parse_shard("3/4") == (3, 4)
    for bad in ("4/4", "a/b", "1", "0/0"):
        with pytest.raises(ValueError, match="shard is"):
            parse_shard(bad)
    models = ["tiny", "after=runs/b/model", "runs/a/model", "runs/a/checkpoints/checkpoint-20", "Qwen/Qwen2-0.5B"]
    assert list(parse_models(models)) == ["tiny", "after", "a", "a-checkpoint-20", "Qwen2-0.5B"]
    with pytest.raises(ValueError, match="both called 'a'"):
        parse_models(["x/a/model", "y/a/model"])


# ---------------------------------------------------------------- scores and the command


def test_scores_of_an_evaluation(whole: Evaluated) -> None:
    evaluation = whole.evaluation
    assert evaluation is not None
    found = scores(evaluation)
    assert found == whole.scores
    rows = evaluation.rows
    assert found["entropy"] is not None
    assert found["entropy"].mean == pytest.approx(np.average(rows["entropy"], weights=rows["tokens"]))
    assert found["entropy"].low < found["entropy"].mean < found["entropy"].high
    assert found["unsolvable"] is not None
    assert found["unsolvable"].mean == len(unsolved(evaluation)) == int((~evaluation.correct.any(axis=1)).sum())
    values = per_problem(evaluation)
    assert values["pass@20"].tolist() == evaluation.correct.any(axis=1).tolist()
    answers = [{a for a in row if a is not None} for row in evaluation.answers]
    assert values["distinct_answers"].tolist() == [len(row) for row in answers]
    assert values["truncated"].mean() == np.mean([reason == "length" for reason in rows["finish_reason"]])


def test_the_command_prints_and_writes(tiny: Policy, small_policy: Path, tmp_path: Path) -> None:
    """Two models at once, each with its own folder, table and summary."""
    console = Console(record=True, width=120)
    results = evaluate_command(
        ["tiny", f"random={small_policy}"], ["countdown-mini"], "deng-table4", tmp_path,
        console=console, changes={"samples": 2, "max_tokens": 16}, limit=3, json_file=tmp_path / "all.json",
    )  # fmt: skip
    assert [r.folder.name for r in results] == ["tiny-countdown-mini-deng-table4", "random-countdown-mini-deng-table4"]
    written = json.loads((tmp_path / "all.json").read_text())
    assert [entry["model"] for entry in written] == ["tiny", "random"]
    printed = console.export_text()
    assert "maj@2" in printed
    assert "random on countdown-mini: 3 problems × 2 samples" in printed
    table = Table.from_json((results[0].folder / "table.json").read_text())
    assert table.rows[0][0] == "avg@2"
    assert r"\toprule" in (results[0].folder / "table.tex").read_text()
    shard = evaluate_command(
        ["tiny"], ["countdown-mini"], "plain", tmp_path, console=console, changes={"samples": 1, "max_tokens": 16},
        limit=2, chunk=1, shard="0/2",
    )  # fmt: skip
    assert shard[0].missing == 1
    assert "left to other processes" in console.export_text()


def test_a_failing_pair_does_not_keep_the_others(tmp_path: Path) -> None:
    """A task without its files, and a model whose weights are broken, between sound ones."""
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "config.json").write_text("{")
    (broken / "model.safetensors").write_text("no weights")
    console = Console(record=True, width=160)
    results = evaluate_command(
        [f"broken={broken}", "tiny"], ["math:aime24", "countdown-mini"], "plain", tmp_path / "out",
        console=console, changes={"samples": 1, "max_tokens": 16}, limit=2, json_file=tmp_path / "all.json",
        task_options={"data_dir": tmp_path},
    )  # fmt: skip
    failed = {(one.model, one.task) for one in results if isinstance(one, FailedEvaluation)}
    assert failed == {("broken", "aime24"), ("broken", "countdown-mini"), ("tiny", "aime24")}
    written = json.loads((tmp_path / "all.json").read_text())
    assert {(entry["model"], entry["task"]) for entry in written if "error" in entry} == failed
    (score,) = [entry["scores"]["pass@1"]["mean"] for entry in written if "scores" in entry]
    printed = console.export_text()
    cells = [[cell.strip() for cell in line.split("│")[1:4]] for line in printed.splitlines() if "│" in line]
    assert {
        (model, task) for model, task, shown in (row for row in cells if len(row) == 3) if shown == "failed"
    } == failed
    assert [row[2].startswith(f"{score:.1%}") for row in cells if row[:2] == ["tiny", "countdown-mini"]] == [True]
    assert "failed: tiny on aime24: " in printed
    assert "aime24.jsonl" in printed


def test_the_command_ends_with_1_where_a_pair_failed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--samples", "1", "--limit", "2", "--max-tokens", "8", "--out", str(tmp_path / "out")]
    tasks = ["--task", "math:aime24", "--task", "countdown-mini", "--data-dir", str(tmp_path)]
    with pytest.raises(SystemExit) as ended:
        main(["eval", "--model", "tiny", *tasks, *arguments, "--json", str(tmp_path / "all.json")])
    assert ended.value.code == 1
    assert "Traceback" not in capsys.readouterr().out
    assert len(json.loads((tmp_path / "all.json").read_text())) == 2


def test_an_only_pair_that_fails_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="aime24"):
        evaluate_command(
            ["tiny"],
            ["math:aime24"],
            "plain",
            tmp_path,
            console=Console(quiet=True),
            task_options={"data_dir": tmp_path},
        )


def test_progress_counts_every_completion(tiny: Policy, tmp_path: Path) -> None:
    seen: list[harness.EvaluationProgress] = []
    run(tiny, tmp_path, 2, 3, on_progress=seen.append)
    assert [now.done for now in seen] == list(range(7))
    assert {now.total for now in seen} == {6}
    seen.clear()
    run(tiny, tmp_path, 3, 3, on_progress=seen.append)
    assert [now.done for now in seen] == [6, 7, 8, 9]


def test_many_is_asked_where_a_task_has_it(tiny: Policy, tmp_path: Path) -> None:
    task = get_task("countdown-mini")
    calls = []

    class Many(type(task)):  # type: ignore[misc]
        def verify_many(self, completions: Any, problems: Any, *, opened: Any = None) -> Any:
            calls.append(len(completions))
            return [self.verify(c, p, opened=o) for c, p, o in zip(completions, problems, opened, strict=True)]

    result = run_evaluation([tiny], [Many()], replace(HOW, samples=3), tmp_path, name="plain", limit=4)[0]
    assert calls == [12]
    assert texts(result)["correct"] == texts(run(tiny, tmp_path / "one", 3, 4))["correct"]


def test_bad_input(tiny: Policy, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="chunk is 0"):
        run(tiny, tmp_path, chunk=0)
    with pytest.raises(ValueError, match=r"two models are called 'tiny'"):
        run_evaluation([tiny, tiny], ["countdown-mini"], HOW, tmp_path)
    with pytest.raises(ValueError, match=r"515 tokens, and the context of the model .tiny. is 256"):
        run(tiny, tmp_path, template="paper")
    with pytest.raises(StoreError, match="no evaluation's folder"):
        EvaluationFolder(tmp_path).identity()
    assert WIDTH == 16  # part of the numbering: another width would be other samples in every folder there is


def test_models_are_looked_for_before_any_is_sampled(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="nowhere"):
        run_evaluation({"a": "tiny", "b": str(tmp_path / "nowhere")}, ["countdown-mini"], protocol("plain"), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_of_files_goes_to_the_tasks_that_read_one(tmp_path: Path) -> None:
    (tmp_path / "aime24.jsonl").write_text('{"question": "1+1?", "answer": "2"}\n')
    options = {"data_dir": tmp_path}
    (aime, _), (mini, _) = harness._tasks(["math:aime24", "countdown-mini"], options)
    assert aime.problems("holdout")[0].data["answer"] == "2"
    assert len(mini.problems("holdout", limit=2)) == 2


def test_the_first_of_many_completions_does_not_tell_how_long_the_others_take() -> None:
    printed, now = io.StringIO(), [0.0]
    console = Console(file=printed, width=200)
    lines = run_evaluations._EvaluationLines(
        console, harness.EvaluationProgress("m", "t", 100, 1100), clock=lambda: now[0]
    )
    for now[0], done in ((20.0, 101), (60.0, 200), (200.0, 1100)):
        lines.show(harness.EvaluationProgress("m", "t", done, 1100))
    assert printed.getvalue().splitlines() == [
        "m on t: 101 of 1,100 completions",
        "m on t: 200 of 1,100 completions, 9 min left",
        "m on t: 1,100 of 1,100 completions",
    ]


def test_two_completions_of_few_tell_nothing_either() -> None:
    printed, now = io.StringIO(), [0.0]
    lines = run_evaluations._EvaluationLines(
        Console(file=printed, width=200), harness.EvaluationProgress("m", "t", 0, 8), clock=lambda: now[0]
    )
    for now[0], done in ((30.0, 2), (60.0, 4)):
        lines.show(harness.EvaluationProgress("m", "t", done, 8))
    assert printed.getvalue().splitlines() == ["m on t: 2 of 8 completions", "m on t: 4 of 8 completions, 60 s left"]
