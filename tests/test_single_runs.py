"""Runs without a study: their page, and run folders and held-out scores for a plain TRL script."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from datasets import Dataset
from transformers import DataCollatorForLanguageModeling, Trainer, TrainerCallback, TrainingArguments
from trl import GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

from explorl import ExplorationTrainer, PassAtK, RunRecorder
from explorl.analysis.lens import Unavailable
from explorl.analysis.response_quality import quality_by_step
from explorl.analysis.run_results import run_results
from explorl.cli.app import main
from explorl.core.config import Config
from explorl.core.store import RunStore, StoreError, write_json, write_parquet
from explorl.models import load_policy
from explorl.report.run_analyses import analyze_run
from explorl.report.run_page import write_run_report

BEFORE = [[1, 0], [0, 1], [0, 1], [0, 0]]
AFTER = [[1, 1], [1, 1], [0, 0], [0, 0]]


def evaluation(folder: Path, step: int, correct: list[list[int]], entropy: float, problems: str = "p") -> None:
    """What a run keeps of an evaluation."""
    rows = [(f"{problems}{index}", bool(mark)) for index, marks in enumerate(correct) for mark in marks]
    columns = {
        "problem": [problem for problem, _ in rows],
        "correct": [mark for _, mark in rows],
        "completion": ["1"] * len(rows),
        "error": [None if mark else "wrong" for _, mark in rows],
    }
    write_parquet(folder / "evaluations" / f"step-{step:06d}.parquet", columns)
    write_json(folder / "evaluations" / f"step-{step:06d}.json", {"entropy": entropy, "branching": 1.5})


def made_run(
    folder: Path, *, seed: int = 0, steps: int = 30, scored: bool = True, problems: str = "p", **config: Any
) -> Path:
    """A run as a trainer leaves it, without the training."""
    store = RunStore.create(folder, {"seed": seed, "training": {"iterations": 1, "steps": steps}, **config})
    for step in range(1, steps + 1):
        line = {
            "step": step,
            "kind": "train",
            "loss": 1 / step,
            "reward": step / steps,
            "entropy": 1 - step / (2 * steps),
        }
        store.append_metrics({**line, "completions/mean_length": 20.0, "step_time": 1.0, "num_tokens": 100 * step})
    if scored:
        evaluation(folder, 0, BEFORE, 0.9, problems)
        evaluation(folder, steps, AFTER, 0.4, problems)
    return folder


def test_scores_of_other_problems_or_fewer_samples_in_one_run(tmp_path: Path) -> None:
    run = made_run(tmp_path / "run")
    evaluation(run, 0, BEFORE[:2], 0.9)
    evaluation(run, 10, BEFORE, 0.9, "q")
    with pytest.warns(UserWarning, match="run: at step 0, 10 it was scored on other problems than at step 30"):
        results = run_results([run])
    assert results["arms"][0]["curves"]["holdout pass@1"]["step"] == [30]
    evaluation(run, 0, [[1], [0], [0], [0]], 0.9)
    (run / "evaluations" / "step-000010.json").unlink()
    assert run_results([run])["arms"][0]["gain"]["k"] == [1]


def test_scores_are_paired_by_problem_and_not_by_place(tmp_path: Path) -> None:
    plain, other = made_run(tmp_path / "plain"), made_run(tmp_path / "other", strategies=["egsw"])
    path = other / "evaluations" / "step-000030.parquet"
    write_parquet(path, {key: values[::-1] for key, values in pq.read_table(path).to_pydict().items()})
    difference = run_results([plain, other])["arms"][1]["differences"]["pass@1"]
    assert (difference["mean"], difference["note"]) == (0.0, "no spread")


def test_one_held_out_problem(tmp_path: Path) -> None:
    run = made_run(tmp_path / "run", scored=False)
    evaluation(run, 0, [[1, 0]], 0.9)
    evaluation(run, 30, [[1, 1]], 0.4)
    assert "pass@1 from 50.0 to 100.0 % (+50.0 points of one problem)" in run_results([run])["verdict"]
    evaluation(run, 0, [[1, 0], [0, 0]], 0.9)
    evaluation(run, 30, [[1, 1], [0, 0]], 0.4)
    assert "(+25.0 points [−100.0, +100.0])" in run_results([run])["verdict"]


# ---------------------------------------------------------------- pages of runs


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("config.yaml", None, "config.yaml is missing; restore it"),
        ("metrics.jsonl", b"[1]\n", "metrics.jsonl, line 1 holds no mapping"),
        ("run.json", b"[]", "run.json holds no mapping; restore it"),
        ("provenance.json", b"{}", "provenance.json holds no list; restore it"),
        ("evaluations/step-000000.json", b"{", "step-000000.json is not JSON"),
        ("evaluations/step-000000.parquet", b"PAR1", "cannot read"),
        ("evaluations/step-000000.parquet", None, "cannot read"),
    ],
)
def test_a_damaged_file_of_a_run_is_named(
    file: str, content: bytes | None, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = made_run(tmp_path / "mine")
    RunStore(run).record_start()
    (run / "run.json").write_text('{"kind": "grpo"}')
    (run / file).unlink() if content is None else (run / file).write_bytes(content)
    with pytest.raises(SystemExit) as ended:
        main(["report", str(run)])
    assert ended.value.code == 2
    stderr = capsys.readouterr().err.replace("\n", " ")
    assert message in stderr
    assert Path(file).name in stderr
    assert "to train it further" not in stderr, "the same command would say so again"


def test_runs_that_were_judged_by_other_answers_are_not_compared(tmp_path: Path) -> None:
    runs = [made_run(tmp_path / name, task={"name": name}) for name in "abc"]
    for run, data in zip(runs, ("1f", "1f", "2e"), strict=True):
        path = run / "evaluations" / "step-000030.json"
        write_json(path, {**json.loads(path.read_text()), "data": data})
    assert run_results(runs[:2])["arms"]
    with pytest.raises(StoreError, match="a, seed 0 and c, seed 0 were judged by different data: the answers or texts"):
        run_results(runs)


def test_copies_beside_a_runs_files_are_left_alone(tmp_path: Path) -> None:
    run = made_run(tmp_path / "mine")
    store = RunStore(run)
    for step in (1, 2):
        store.write_rollouts(step, {"prompt": ["a"], "completion": ["b"], "correct": [1.0]})
    for path in (run / "evaluations" / "step-000000.json", run / "rollouts" / "step-000002.parquet"):
        path.with_stem(f"{path.stem} (copy)").write_bytes(path.read_bytes())
    assert write_run_report([run]).is_file()
    assert [each.step for each in quality_by_step(store)] == [1, 2]
    store.rewind(1)
    assert {path.name for path in (run / "rollouts").iterdir()} == {"step-000001.parquet", "step-000002 (copy).parquet"}


def test_one_run_has_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = made_run(tmp_path / "mine")
    with pytest.raises(SystemExit) as ended:
        main(["report", str(run)])
    assert not ended.value.code
    assert "mine/report.html" in capsys.readouterr().out.replace("\n", "")
    text = (run / "report.html").read_text(encoding="utf-8")
    assert "<h1>mine</h1>" in text
    assert "mine: training took pass@1 from 37.5 to 50.0 % (+12.5 points" in text
    assert "pass@2 from 75.0 to 50.0 % (−25.0 points" in text
    assert "before training" in text
    assert "(baseline)" not in text
    for section in ("over-training", "pass-at-k", "plane", "curves"):
        assert f'<section id="{section}"' in text


def test_several_runs_stand_side_by_side(tmp_path: Path) -> None:
    runs = [
        made_run(tmp_path / "a", task={"name": "own"}),
        made_run(tmp_path / "b", training={"iterations": 1, "steps": 30, "learning_rate": 1e-5}),
        made_run(tmp_path / "c", seed=1, task={"name": "own"}),
    ]
    with pytest.raises(SystemExit):
        main(["report", *map(str, runs), "--out", str(tmp_path / "page.html")])
    assert (tmp_path / "page.html").is_file()
    results = run_results(runs)
    assert {arm["name"]: arm["seeds"] for arm in results["arms"]} == {"a": [0, 1], "b": [0]}, (
        "a and c differ in their seed"
    )
    assert results["arms"][1]["changes"]["training.learning_rate"] == 1e-5
    named = run_results([runs[0], runs[1]], names=["plain", "slow"])
    assert [arm["name"] for arm in named["arms"]] == ["plain", "slow"]


def test_a_key_that_an_older_run_lacks_is_no_difference(tmp_path: Path) -> None:
    now = Config().dump()
    old = {**now, "evaluation": {key: value for key, value in now["evaluation"].items() if key != "ends"}}
    runs = [made_run(tmp_path / name, **config) for name, config in (("now", now), ("old", old | {"seed": 1}))]
    assert [arm["seeds"] for arm in run_results(runs)["arms"]] == [[0, 1]]
    named = run_results([runs[0], made_run(tmp_path / "older", **old)], names=["now", "older"])
    assert [arm["changes"] for arm in named["arms"]] == [{}, {}]


def test_runs_of_a_study_are_called_by_their_arms(tmp_path: Path) -> None:
    runs = [made_run(tmp_path / arm / "seed-0", task={"name": arm}) for arm in ("plain", "hot")]
    assert [arm["name"] for arm in run_results(runs)["arms"]] == ["plain", "hot"]


def test_a_run_that_was_never_scored_shows_its_training(tmp_path: Path) -> None:
    run = made_run(tmp_path / "run", scored=False)
    text = write_run_report([run]).read_text(encoding="utf-8")
    assert "The run has no score yet" in text
    assert "Reward: " in text
    assert '<section id="plane"' not in text  # nothing to show, and nothing said


def test_a_run_of_one_step_and_one_evaluation_has_a_page(tmp_path: Path) -> None:
    run = made_run(tmp_path / "run", steps=1, scored=False)
    evaluation(run, 1, AFTER, 0.4)
    assert "no score from before training" in write_run_report([run]).read_text(encoding="utf-8")


@pytest.mark.parametrize("case", ["nothing", "no step", "twice", "other problems", "study"])
def test_what_is_no_run_is_named(case: str, tmp_path: Path) -> None:
    run = made_run(tmp_path / "run")
    other = tmp_path / "other"
    other.mkdir()
    if case == "no step":
        RunStore.create(other, {})
    elif case == "other problems":
        made_run(other, problems="q", task={"name": "own"})
    elif case == "study":
        (other / "study.json").write_text("{}")
    message = {
        "nothing": "holds no run", "no step": "has no step yet", "twice": "is given twice",
        "other problems": "were scored on different problems", "study": "holds a study, not a run",
    }[case]  # fmt: skip
    with pytest.raises((StoreError, ValueError), match=message):
        write_run_report([run, run if case == "twice" else other], tmp_path / "page.html")
    assert not (tmp_path / "page.html").exists()


def test_seeds_that_agree_get_a_floor_and_a_word(tmp_path: Path) -> None:
    runs = [made_run(tmp_path / f"seed{seed}", seed=seed) for seed in (0, 1)]
    results = run_results(runs)
    entropy = results["arms"][0]["measures"]["entropy"]
    assert entropy["note"] == "no spread"
    for run in runs:
        evaluation(run, 30, [[1, 1]] * 4, 0.4)
    best = run_results(runs)["arms"][0]["measures"]["pass@2"]
    assert (best["low"], best["high"], best["note"]) == (0.25, 1.0, "no spread"), "3 of 4 problems: the rule of three"
    assert "no spread" in write_run_report(runs, tmp_path / "page.html").read_text(encoding="utf-8")


def test_one_seed_has_no_range(tmp_path: Path) -> None:
    results = run_results([made_run(tmp_path / "run")])
    assert results["arms"][0]["curves"]["entropy"]["band"] is None
    assert results["arms"][0]["over_training"]["1"]["band"] == "95 % interval over problems (one seed)"


# ---------------------------------------------------------------- a plain TRL script


def digits(completions: list[str], **columns: Any) -> list[float]:
    """A reward with variance on random text."""
    return [round(sum(c.isdigit() for c in text) / max(len(text), 1), 1) for text in completions]


def first_is(completions: list[str], wanted: list[str], **columns: Any) -> list[float]:
    """Correct where the answer has the wanted letter."""
    return [float(letter in text) for text, letter in zip(completions, wanted, strict=True)]


HELD_OUT = [{"prompt": f"{n} {n + 1}=3\n", "wanted": str(n)} for n in range(4)]


@pytest.fixture
def make_trainer(small_policy: Path, tmp_path: Path) -> Callable[..., Any]:
    def make(cls: Any, callbacks: list[Any], **changes: Any) -> Any:
        policy = load_policy(str(small_policy), device="cpu")
        arguments = {
            "output_dir": str(tmp_path / "out"), "per_device_train_batch_size": 4, "num_generations": 4,
            "max_completion_length": 8, "learning_rate": 1e-3, "max_steps": 3, "save_strategy": "no",
            "report_to": "none", "disable_tqdm": True, "bf16": False, "use_cpu": True, "dataloader_pin_memory": False,
            "gradient_checkpointing": False,
        }  # fmt: skip
        return cls(
            model=policy.model, reward_funcs=digits, args=GRPOConfig(**{**arguments, **changes}),
            train_dataset=Dataset.from_dict({"prompt": ["1 2=3\n", "4 5=9\n", "6 7=1\n", "8 9=7\n"]}),
            processing_class=policy.tokenizer, callbacks=callbacks,
        )  # fmt: skip

    return make


@pytest.mark.parametrize("cls", [GRPOTrainer, ExplorationTrainer])
def test_a_plain_script_gets_the_same_page(cls: Any, make_trainer: Callable[..., Any], tmp_path: Path) -> None:
    scores = PassAtK(HELD_OUT, first_is, every=2, samples=2, name="letters")
    trainer = make_trainer(cls, [scores], logging_steps=1)
    RunRecorder(tmp_path / "run").watch(trainer)
    trainer.train()
    assert sorted(scores.history) == [0, 2, 3]
    store = RunStore.open(tmp_path / "run")
    assert [line["step"] for line in store.metrics() if line["kind"] == "train"] == [1, 2, 3]
    assert [line["step"] for line in store.metrics() if line["kind"] == "evaluation"] == [0, 2, 3]
    assert any("eval_pass@2" in line for line in trainer.state.log_history)
    results = run_results([store.folder])
    expected = [scores.history[step].pass_at(2).mean for step in (0, 2, 3)]
    assert results["arms"][0]["over_training"]["2"]["mean"] == pytest.approx(expected)
    page, script = results["arms"][0]["measures"]["pass@2"], scores.history[3].pass_at(2)
    assert [page["mean"], page["low"], page["high"]] == pytest.approx([script.mean, script.low, script.high])
    assert (results["task"], results["problems"], results["samples"]) == ("letters", 4, 2)
    assert {rollout["step"] for rollout in results["rollouts"]} == {1, 2, 3}
    recorded = {answer["recorded"] for rollout in results["rollouts"] for answer in rollout["answers"]}
    assert recorded == {cls is ExplorationTrainer}
    text = write_run_report([store.folder]).read_text(encoding="utf-8")
    assert "before training" in text
    assert json.loads((store.folder / "provenance.json").read_text())[0]["seed"] == 42
    assert store.config()["trl"]["learning_rate"] == 1e-3


@pytest.mark.parametrize("cls", [GRPOTrainer, ExplorationTrainer])
def test_scores_reach_every_tracker(
    cls: Any, make_trainer: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of ``report_to``, with the training's own metrics; TensorBoard's file is read back."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "events"))
    scores = PassAtK(HELD_OUT, first_is, every=2, samples=8, name="letters")
    options = {"strategies": ["egsw"]} if cls is ExplorationTrainer else {}
    trainer = make_trainer(functools.partial(cls, **options), [scores], logging_steps=1, report_to=["tensorboard"])
    trainer.train()
    (file,) = (tmp_path / "events").iterdir()  # the last evaluation comes before the writer closes
    events = accumulator.EventAccumulator(str(file))
    events.Reload()
    assert [event.step for event in events.Scalars("train/reward")] == [1, 2, 3]
    for k in (1, 8):
        expected = {step: result.pass_at(k) for step, result in scores.history.items()}
        for name, end in (("", "mean"), ("_low", "low"), ("_high", "high")):
            logged = {event.step: event.value for event in events.Scalars(f"eval/pass@{k}{name}")}
            assert logged == pytest.approx({step: getattr(value, end) for step, value in expected.items()}), name
    text = {tag: events.Tensors(tag) for tag in events.Tags()["tensors"]}
    assert [entry.tensor_proto.string_val for entry in text["eval/task/text_summary"]] == [[b"letters"]]
    assert ("eval/strategies/text_summary" in text) is (cls is ExplorationTrainer)
    assert [line["step"] for line in trainer.state.log_history if "eval_pass@8" in line] == [0, 2, 3]


@pytest.mark.parametrize("cls", [GRPOTrainer, ExplorationTrainer])
def test_analyses_of_a_recorded_script_advise_what_a_script_has(
    cls: Any, make_trainer: Callable[..., Any], tmp_path: Path
) -> None:
    """Such as RunRecorder(token_records=4); training.token_records is an option of `explorl train`."""
    trainer = make_trainer(cls, [], max_steps=1)
    RunRecorder(tmp_path / "run", token_records=0).watch(trainer)
    trainer.train()
    _, outcomes = analyze_run(tmp_path / "run")
    reasons = {
        outcome.analysis.name: outcome.summary for outcome in outcomes if isinstance(outcome.result, Unavailable)
    }
    assert "RunRecorder(token_records=4)" in reasons["signs"]
    (tmp_path / "run" / "rollouts" / "step-000001.parquet").unlink()
    reasons |= {
        outcome.analysis.name: outcome.summary for outcome in analyze_run(tmp_path / "run", only=["defects"])[1]
    }
    assert "RunRecorder(rollouts_every=1)" in reasons["defects"]
    with pytest.raises(StoreError, match=r"RunRecorder\(rollouts_every=1\)"):
        quality_by_step(RunStore(tmp_path / "run"))
    assert [name for name, reason in reasons.items() if "training." in reason] == []


def test_the_example_of_the_docs(small_policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).parents[1] / "docs" / "trl.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    for printed, used in (("test_size=100", "test_size=4"), ("every=50", "every=1")):
        assert code.count(printed) == 1, printed
        code = code.replace(printed, used)
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {
        "GRPOTrainer": GRPOTrainer, "model": str(small_policy), "reward": digits,
        "dataset": Dataset.from_dict({"prompt": [f"{n} 2=3\n" for n in range(12)]}),
        "args": GRPOConfig("out", max_steps=2, num_generations=4, per_device_train_batch_size=4, use_cpu=True,
                           max_completion_length=8, bf16=False, save_strategy="no", report_to="none"),
    }  # fmt: skip
    exec(code, names)
    assert sorted(names["held_out"].history) == [0, 1, 2]
    assert "before training" in write_run_report([Path("runs/mine")]).read_text(encoding="utf-8")


def test_scores_do_not_change_the_training(make_trainer: Callable[..., Any]) -> None:
    ends = []
    for callbacks in ([], [PassAtK(HELD_OUT, first_is, every=1, samples=2)]):
        trainer = make_trainer(GRPOTrainer, callbacks)
        trainer.train()
        assert trainer.model.training
        ends.append([parameter.detach().clone() for parameter in trainer.model.parameters()])
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(*ends, strict=True))


def test_steps_between_two_logs_count(make_trainer: Callable[..., Any], tmp_path: Path) -> None:
    """TRL logs every tenth step unless told otherwise; the evaluation at the end comes after the last log."""
    trainer = make_trainer(GRPOTrainer, [PassAtK(HELD_OUT, first_is, samples=1)], logging_steps=2)
    RunRecorder(tmp_path / "run", rollouts_every=0).watch(trainer)
    trainer.train()
    results = run_results([tmp_path / "run"])
    assert results["arms"][0]["over_training"]["1"]["step"] == [0, 3]
    assert results["rollouts"] == []


def test_answers_of_an_evaluation_are_not_kept_as_rollouts(make_trainer: Callable[..., Any], tmp_path: Path) -> None:
    """Each generation batch is learnt in two steps, with an evaluation by TRL behind each."""
    reused = {"steps_per_generation": 2, "eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 4}
    cls = functools.partial(GRPOTrainer, eval_dataset=Dataset.from_dict({"prompt": ["held out\n"]}))
    trainer = make_trainer(cls, [], **reused, max_steps=4)
    RunRecorder(tmp_path / "run").watch(trainer)
    trainer.train()
    files = sorted((tmp_path / "run" / "rollouts").glob("*.parquet"))
    assert [path.stem for path in files] == ["step-000001", "step-000003"]
    assert not any("held out" in prompt for path in files for prompt in pq.read_table(path)["prompt"].to_pylist())


def test_a_resumed_script_goes_on_in_its_folder(make_trainer: Callable[..., Any], tmp_path: Path) -> None:
    saving = {"save_strategy": "steps", "save_steps": 2, "logging_steps": 1}
    for resume in (None, str(tmp_path / "out" / "checkpoint-2")):
        trainer = make_trainer(GRPOTrainer, [PassAtK(HELD_OUT, first_is, every=1, samples=1)], **saving)
        RunRecorder(tmp_path / "run").watch(trainer)
        trainer.train(resume_from_checkpoint=resume)
    lines = RunStore.open(tmp_path / "run").metrics()
    assert [line["step"] for line in lines if line["kind"] == "train"] == [1, 2, 3]
    assert [line["step"] for line in lines if line["kind"] == "evaluation"] == [0, 1, 2, 3]
    assert len(json.loads((tmp_path / "run" / "provenance.json").read_text())) == 2
    with pytest.raises(StoreError, match="already holds a run; use another folder"):
        trainer.train()


@pytest.mark.parametrize("cls", [SFTTrainer, Trainer])
def test_a_script_without_rollouts_gets_a_page(cls: Any, small_policy: Path, tmp_path: Path) -> None:
    policy = load_policy(str(small_policy), device="cpu")
    arguments: dict[str, Any] = {
        "output_dir": str(tmp_path / "out"), "max_steps": 2, "logging_steps": 1, "save_strategy": "no",
        "report_to": "none", "disable_tqdm": True, "bf16": False, "use_cpu": True,
    }  # fmt: skip
    scores = PassAtK(HELD_OUT, first_is, every=1, samples=2, max_tokens=4)
    rows = Dataset.from_list([{"input_ids": [5, 6, 7], "labels": [5, 6, 7]}] * 8)
    trainer = cls(
        model=policy.model, args=(SFTConfig if cls is SFTTrainer else TrainingArguments)(**arguments),
        train_dataset=rows, processing_class=policy.tokenizer, callbacks=[scores],
        data_collator=None if cls is SFTTrainer else DataCollatorForLanguageModeling(policy.tokenizer, mlm=False),
    )  # fmt: skip
    RunRecorder(tmp_path / "run").watch(trainer)
    trainer.train()
    store = RunStore.open(tmp_path / "run")
    assert store.kind == "sft"
    assert [line["step"] for line in store.metrics() if line["kind"] == "train"] == [1, 2]
    assert store.config()["training"]["learning_rate"] == trainer.args.learning_rate
    assert "before training" in write_run_report([store.folder]).read_text(encoding="utf-8")


class Interrupts(TrainerCallback):
    """Once, after two steps."""

    begun = True

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.begun and state.global_step == 2:
            self.begun = False
            raise KeyboardInterrupt


def test_a_script_that_was_interrupted_goes_on_by_itself(make_trainer: Callable[..., Any], tmp_path: Path) -> None:
    """As in a notebook: trainer, recorder and scores are still there."""
    scores = PassAtK(HELD_OUT, first_is, every=1, samples=1)
    trainer = make_trainer(GRPOTrainer, [scores, Interrupts()], save_strategy="steps", save_steps=1, logging_steps=1)
    RunRecorder(tmp_path / "run").watch(trainer)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    lost = scores.history[2]
    trainer.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-1"))
    assert scores.history[2] is not lost
    lines = RunStore.open(tmp_path / "run").metrics()
    assert [line["step"] for line in lines if line["kind"] == "evaluation"] == [0, 1, 2, 3]
    assert len(json.loads((tmp_path / "run" / "provenance.json").read_text())) == 2
    again = make_trainer(GRPOTrainer, [Interrupts()], logging_steps=1)
    RunRecorder(tmp_path / "another").watch(again)
    with pytest.raises(KeyboardInterrupt):
        again.train()
    with pytest.raises(StoreError, match="already holds a run"):
        again.train()


def test_a_folder_with_a_run_is_not_taken(make_trainer: Callable[..., Any], tmp_path: Path) -> None:
    made_run(tmp_path / "run")
    trainer = make_trainer(GRPOTrainer, [])
    RunRecorder(tmp_path / "run").watch(trainer)
    with pytest.raises(StoreError, match="already holds a run"):
        trainer.train()
    lone = make_trainer(GRPOTrainer, [RunRecorder(tmp_path / "other")])
    with pytest.raises(ValueError, match=r"call recorder.watch\(trainer\) before train\(\)"):
        lone.train()


def test_messages_columns_and_odd_rewards() -> None:
    recorded: dict[str, Any] = {}

    def reward(prompts: Any, completions: Any, answer: Any) -> list[float | None]:
        recorded.update(prompts=prompts, completions=completions, answer=answer)
        return [None, torch.tensor(1.0)][: len(completions)]  # type: ignore[list-item]

    messages = [{"role": "user", "content": "1+1?"}]
    task = PassAtK([{"prompt": messages, "answer": 2}], reward).task
    problem = task.problems("holdout")[0]
    assert [verdict.correct for verdict in task.verify_many(["3", "2"], [problem, problem])] == [False, True]
    assert recorded["completions"][0] == [{"role": "assistant", "content": "3"}]
    assert (recorded["prompts"], recorded["answer"]) == ([messages, messages], [2, 2])
    with pytest.raises(ValueError, match="returned 2 numbers for 3 completions"):
        task.verify_many(["1", "2", "3"], [problem] * 3)


def test_a_reward_function_gets_what_trl_gives_it(make_trainer: Callable[..., Any]) -> None:
    def reward(completions: Any, trainer_state: Any, log_metric: Any, log_extra: Any, **columns: Any) -> list[float]:
        log_metric("answers", len(completions))
        log_extra("text", completions)
        assert "completion" not in columns
        return [float(trainer_state.global_step)] * len(completions)

    scores = PassAtK([{"prompt": "1+1=", "completion": "2"}], reward, samples=2, max_tokens=2)
    make_trainer(GRPOTrainer, [scores], max_steps=1).train()
    assert [scores.history[step].pass_at(1).mean for step in (0, 1)] == [0.0, 1.0]


async def slow(completions: list[str], **columns: Any) -> list[float]:
    return [1.0 for _ in completions]


class Slow:
    async def __call__(self, completions: list[str], **columns: Any) -> list[float]:
        return [1.0 for _ in completions]


def by_tokens(completions: list[str], completion_ids: list[list[int]], **columns: Any) -> list[float]:
    return [float(len(ids)) for ids in completion_ids]


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"reward": functools.partial(slow, word="a")}, "is asynchronous; use a regular function"),
        ({"reward": Slow()}, "is asynchronous; use a regular function"),
        ({"reward": by_tokens}, "by_tokens of PassAtK needs completion_ids, but gets only texts"),
        ({"dataset": [{"prompt": "1", "completions": "2"}]}, "a column 'completions'.*; rename it"),
        ({"dataset": [{"prompt": None}]}, "the prompt of row 0 .* is None; give a text or a list of messages"),
        ({"dataset": [{"prompt": [1, 2]}]}, r"the prompt of row 0 .* is \[1, 2\]; give a text"),
        ({"max_tokens": 0}, "max_tokens is 0; "),
        ({"batch_size": 0}, "batch_size is 0; "),
        ({"samples": "4"}, "samples is '4'; "),
        ({"correct": float("nan")}, "correct is nan; "),
    ],
)
def test_what_scores_cannot_use(options: dict[str, Any], error: str) -> None:
    with pytest.raises(ValueError, match=error):
        PassAtK(**{"dataset": HELD_OUT, "reward": digits, **options})


@pytest.mark.parametrize("value", [None, ["right"]])
def test_a_reward_that_is_no_number_is_named(value: Any) -> None:
    task = PassAtK(HELD_OUT, lambda completions, **columns: value).task
    with pytest.raises(TypeError, match=r"the reward function .* returned .*; return a list with one finite number"):
        task.verify_many(["1"], task.problems("holdout")[:1])


def test_a_trainer_without_a_tokenizer_is_told(small_policy: Path, tmp_path: Path) -> None:
    arguments = TrainingArguments(str(tmp_path), max_steps=1, report_to="none", use_cpu=True)
    model = load_policy(str(small_policy), device="cpu").model
    rows = Dataset.from_list([{"input_ids": [5, 6], "labels": [5, 6]}] * 8)
    trainer = Trainer(model, arguments, train_dataset=rows, callbacks=[PassAtK(HELD_OUT, digits)])
    with pytest.raises(ValueError, match="PassAtK has no tokenizer to sample with"):
        trainer.train()


def test_bad_input(tmp_path: Path) -> None:
    for name in ("rollouts_every", "token_records"):
        with pytest.raises(ValueError, match=f"{name} is -1; use 0 for none"):
            RunRecorder(tmp_path, **{name: -1})
    with pytest.raises(ValueError, match="has no column 'prompt'; it has question"):
        PassAtK([{"question": "1+1"}], digits)
    with pytest.raises(ValueError, match="is empty"):
        PassAtK([], digits)
    with pytest.raises(ValueError, match="every is 0"):
        PassAtK(HELD_OUT, digits, every=0)
    with pytest.raises(ValueError, match="samples is 0"):
        PassAtK(HELD_OUT, digits, samples=0)
