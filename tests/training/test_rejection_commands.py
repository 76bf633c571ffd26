"""`explorl rft` as people use it: commands, reports, what is refused in words, and what strangers bring."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from rich.console import Console
from safetensors.torch import load_file

from explorl.cli.app import main
from explorl.core.config import ConfigError, load_config
from explorl.core.store import RunStore
from explorl.evaluation.sample import VerifiedSample, prompted_problems
from explorl.models import Policy, load_policy, tiny_tokenizer
from explorl.rollout import Rollout
from explorl.tasks import get_task
from explorl.training.rft import loop, sampling
from explorl.training.rft.fitting import fit
from explorl.training.rft.folder import IterationFolder
from explorl.training.rft.loop import run_rft

from .test_rejection_runs import TASK, made, settings
from .test_sft import CHAT, chat_policy

QUIET = Console(quiet=True)

MORE = """

class Chat(Even):
    def prompt(self, problem, template=None):
        return [{"role": "user", "content": super().prompt(problem)}]

class Odd(Even):
    def problems(self, split, *, limit=None):
        return [Problem(one.id, {**one.data, (0, 1): object()}) for one in super().problems(split, limit=limit)]
"""


@pytest.fixture(autouse=True)
def own_task(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path_factory.mktemp("task")
    (place / "own_even.py").write_text(TASK + MORE)
    monkeypatch.syspath_prepend(str(place))
    sys.modules.pop("own_even", None)


def command(*arguments: object, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        main([str(argument) for argument in arguments])
    said = capsys.readouterr()
    return int(ended.value.code or 0), said.out, said.err


def written(tmp_path: Path, policy: Path | str, **rft: Any) -> Path:
    path = tmp_path / "rft.yaml"
    path.write_text(yaml.safe_dump(settings(policy, **rft)))
    return path


# ---------------------------------------------------------------------------- the command
def test_a_run_is_started_resumed_extended_and_reported(
    small_policy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, run = written(tmp_path, small_policy, iterations=1, budget=500), tmp_path / "run"
    code, out, err = command("rft", "--config", file, "--run", run, capsys=capsys)
    assert code == 0, err
    lines = out.splitlines()
    assert lines[0].startswith("start: pass@1 ")
    assert "distinct answers" in lines[0]
    assert "iteration 1: sampling 6 problems × 4" in lines
    (chosen,) = [line for line in lines if "24 sampled" in line]
    assert "selected by branching" in chosen
    assert "fewer than rft.budget = 500" in chosen
    assert any(line.startswith("held out: pass@1 ") and "pass@4" in line for line in lines)
    assert lines[-2:] == [f"policy: {run}/model", f"next: explorl report {run}"]

    code, out, _ = command("rft", "--resume", run, capsys=capsys)
    assert code == 0
    assert "is finished" in out
    assert f"explorl rft --resume {run} --set rft.iterations=2" in out
    code, out, err = command("rft", "--resume", run, "--set", "rft.iterations=2", capsys=capsys)
    assert code == 0, err
    assert "resuming with iteration 2, sampling" in out
    one, two = IterationFolder(RunStore(run), 1), IterationFolder(RunStore(run), 2)
    assert two.fit.config()["model"]["name"] == str(one.model)
    last = load_file(two.model / "model.safetensors")
    assert all(torch.equal(value, last[name]) for name, value in load_file(run / "model/model.safetensors").items())

    for change, words in (("rft.iterations=1", "rft.iterations is 1"), ("rft.noise=0.5", "rft.noise is 0.25")):
        code, _, err = command("rft", "--resume", run, "--set", change, capsys=capsys)
        assert (code, words in err) == (2, True), err
    code, _, err = command("train", "--resume", run, capsys=capsys)
    assert code == 2
    assert f"holds a run of kind rft, not grpo; resume it with `explorl rft --resume {run}`" in err
    code, _, err = command("rft", "--config", file, "--run", run, capsys=capsys)
    assert code == 2
    assert "already holds a run" in err

    code, _, err = command("report", run, capsys=capsys)
    assert code == 0, err
    assert "pass@4 from" in (run / "report.html").read_text(encoding="utf-8")
    code, out, err = command("watch", run, "--once", capsys=capsys)
    assert code == 0, err
    assert "2/2" in out


@pytest.mark.slow
def test_a_report_has_rft_beside_grpo_and_compare_takes_both(
    small_policy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = written(tmp_path, small_policy, iterations=1)
    train = {"steps": 1, "prompts_per_step": 2, "generations": 2, "micro_batch": 4, "beta": 0.0, "iterations": 2}
    file.write_text(yaml.safe_dump({**yaml.safe_load(file.read_text()), "training": train}))
    runs = {kind: tmp_path / kind for kind in ("rft", "train")}
    for kind, run in runs.items():
        code, _, err = command(kind, "--config", file, "--run", run, capsys=capsys)
        assert code == 0, err
    page = tmp_path / "page.html"
    code, _, err = command("report", *runs.values(), "--out", page, capsys=capsys)
    assert code == 0, err
    assert "<h1>rft · train</h1>" in page.read_text(encoding="utf-8")
    models = [part for kind, run in runs.items() for part in ("--model", f"{kind}={run}/model")]
    asked = ("--task", "own_even:Even", "--samples", "2", "--max-tokens", "4", "--out", tmp_path / "e")
    code, _, err = command("eval", *models, *asked, capsys=capsys)
    assert code == 0, err
    code, out, err = command("compare", *sorted((tmp_path / "e").iterdir()), "--out", tmp_path / "c", capsys=capsys)
    assert code == 0, err
    assert "rft" in out


@pytest.mark.parametrize("number", [2, 15])
def test_an_interrupted_run_says_how_to_go_on(
    number: int, small_policy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    import os

    run = tmp_path / "a run"
    monkeypatch.setattr(loop._Loop, "_select", lambda *_: os.kill(os.getpid(), number))
    code, _, err = command("rft", "--config", written(tmp_path, small_policy), "--run", run, capsys=capsys)
    assert code == 128 + number
    assert err == (f"explorl: interrupted; resume (iteration 1, filtering) with: explorl rft --resume '{run}'\n")


# ---------------------------------------------------------------------------- refused in words
BEFORE_WEIGHTS = {
    "no mark": (
        ["rft.filters=[has_answer]"],
        "rft.filters has has_answer, but the task 'even' has no answer mark",
    ),
    "no mark to cut after": (["rft.filters=[has_answer,cut_after_answer]"], "remove those filters"),
    "unknown filter": (["rft.filters=[has_digitt]"], "unknown filter 'has_digitt'; did you mean 'has_digit'"),
    "unknown selector": (["rft.selector=brunching"], "unknown selector 'brunching'; did you mean 'branching'"),
    "all noise": (["rft.noise=1.0"], "rft.noise is 1.0"),
    "less than no noise": (["rft.noise=-0.1"], "rft.noise is -0.1"),
    "no samples": (["rft.samples=0"], "rft.samples is 0"),
    "from nowhere": (["rft.from=there"], "rft.from is 'there'"),
    "vllm": (["rollout.engine=vllm"], "rollout.engine is vllm, which explorl rft does not support"),
    "no records": (["rollout.engine=generate"], "rft.selector is branching, which model.generate does not record"),
    "strategies": (["strategies=[egsw]"], "explorl rft has no strategies"),
    "unknown model": (["model.name=nowhere"], "'nowhere'"),
}


@pytest.mark.parametrize("case", BEFORE_WEIGHTS)
def test_bad_input_is_told_before_a_weight_is_loaded(
    case: str, small_policy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    changes, words = BEFORE_WEIGHTS[case]
    monkeypatch.setattr(loop, "configured_policy", lambda *_, **__: pytest.fail("weights were loaded"))
    given = [part for change in changes for part in ("--set", change)]
    file, run = written(tmp_path, small_policy), tmp_path / "run"
    code, _, err = command("rft", "--config", file, "--run", run, *given, capsys=capsys)
    assert code == 2, err
    assert words in err
    assert len(err.splitlines()) <= 3
    assert not run.exists()


def test_what_only_the_model_tells_is_told_before_anything_is_written(
    small_policy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file, run = written(tmp_path, small_policy), tmp_path / "run"
    code, _, err = command("rft", "--config", file, "--run", run, "--set", "sft.max_length=14", capsys=capsys)
    assert (code, run.exists()) == (2, False)
    assert "sft.max_length is 14" in err
    assert "use 16 or more" in err
    monkeypatch.setenv("WORLD_SIZE", "2")
    code, _, err = command("rft", "--config", file, "--run", run, capsys=capsys)
    assert (code, run.exists()) == (2, False)
    assert "runs in one process, but WORLD_SIZE is 2" in err


def test_without_a_right_response_it_stops_with_the_counts_and_keeps_the_pool(
    small_policy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file, run = written(tmp_path, small_policy), tmp_path / "run"
    arguments = ("rft", "--config", file, "--run", run, "--set", "task.name=own_even:Never")
    code, _, err = command(*arguments, capsys=capsys)
    assert code == 2
    assert "iteration 1 has no correct response to train on: 24 sampled, 0 correct; has_digit dropped " in err
    pool = run / "iterations/iteration-01/pool.parquet"
    assert str(pool) in err
    assert "start a new run with more rft.samples" in err
    assert pool.exists()
    monkeypatch.setattr(sampling.PoolSampler, "sample", lambda *_: pytest.fail("sampled again"))
    code, _, again = command("rft", "--resume", run, capsys=capsys)
    assert (code, again) == (2, err)


def test_right_responses_that_filters_drop_are_told_apart(small_policy: Path, tmp_path: Path) -> None:
    config = made(small_policy, filters=[{"max_redundancy": 0.0}, {"max_length": 1}])
    with pytest.raises(
        loop.NoCorrectResponse, match=r"max_length dropped .* correct\).*start a new run without the filter"
    ):
        run_rft(config, RunStore(tmp_path / "run"), console=QUIET)


def test_a_fit_that_diverges_names_the_key_of_rft(small_policy: Path, tmp_path: Path) -> None:
    config = made(small_policy, iterations=1, learning_rate=1e30, budget=40, epochs=4)
    with pytest.raises(ValueError, match=r"diverged at step .*rft\.learning_rate is 1e\+30, try 1e\+29"):
        run_rft(config, RunStore(tmp_path / "run"), console=QUIET)


# ---------------------------------------------------------------------------- what strangers bring
def test_responses_that_say_nothing_are_learnt_as_ends(small_policy: Path, tmp_path: Path) -> None:
    examples = [{"prompt": "1+1=", "completion": text} for text in ("", " ", "2", "")]
    model = fit(made(small_policy), RunStore(tmp_path / "fit"), str(small_policy), examples, seed=0, console=QUIET)
    assert (model / "model.safetensors").is_file()


@pytest.mark.slow
def test_an_adapter_is_trained_on_from_iteration_to_iteration(small_policy: Path, tmp_path: Path) -> None:
    lora = {"model": {"name": str(small_policy), "lora": {"rank": 2, "alpha": 4}}}
    model = run_rft(made(small_policy, lora, epochs=0.5), RunStore(tmp_path / "run"), console=QUIET)
    store = RunStore(tmp_path / "run")
    first, second = (load_file(IterationFolder(store, number).model / "adapter_model.safetensors") for number in (1, 2))
    assert first.keys() == second.keys()
    halves = [name for name in first if "lora_B" in name]
    assert all(not torch.equal(first[name], second[name]) for name in halves)
    # Adam's steps are of the size of the learning rate: an adapter that had begun anew would be nearer to nothing
    # than to the one that it goes on from
    moved = sum(float((second[name] - first[name]).norm()) for name in first)
    assert moved < sum(float(first[name].norm()) for name in first)
    assert load_policy(str(model)).model.peft_config


def test_messages_are_learnt_and_a_template_that_opens_a_thought_is_refused(tmp_path: Path) -> None:
    policy = chat_policy(tmp_path / "policy")
    task = {"task": {"name": "own_even:Chat"}}
    run_rft(made(policy, task, iterations=1), RunStore(tmp_path / "run"), console=QUIET)
    assert IterationFolder(RunStore(tmp_path / "run"), 1).model.is_dir()

    opening = CHAT.replace("assistant\n", "assistant\n<think>")
    thinking = chat_policy(tmp_path / "thinking", opening)
    with pytest.raises(ConfigError, match="begins a new turn differently"):
        run_rft(made(thinking, task), RunStore(tmp_path / "other"), console=QUIET)
    assert not (tmp_path / "other").exists()


def test_problems_that_json_does_not_hold(
    small_policy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    odd = {"task": {"name": "own_even:Odd"}, "evaluation": {"every": 0, "ends": 0}}
    for iterations in (1, 2):
        config = made(small_policy, odd, iterations=iterations, prompts=2, samples=2, budget=2, filters=[])
        run_rft(config, RunStore(tmp_path / "run"), console=Console())
    assert "resuming with iteration 2" in (said := capsys.readouterr().out)
    assert "the problems are not those" not in said


@pytest.mark.slow
def test_one_problem_whose_answers_are_all_the_same(small_policy: Path, tmp_path: Path) -> None:
    cold = {"task": {"name": "own_even:One"}, "rollout": {"temperature": 1e-6, "max_tokens": 12}}
    config = made(small_policy, cold, iterations=1, filters=["dedupe"], selector="entropy")
    run_rft(config, RunStore(tmp_path / "run"), console=QUIET)
    facts = IterationFolder(RunStore(tmp_path / "run"), 1).selection()
    assert (facts["sampled"], facts["filtered"], facts["selected"]) == (4, 1, 1)


def test_a_model_that_generate_samples_records_nothing_and_needs_nothing(small_policy: Path, tmp_path: Path) -> None:
    plain = {"rollout": {"temperature": 1.0, "max_tokens": 6, "engine": "generate"}}
    config = made(small_policy, plain, iterations=1, selector="diverse")
    run_rft(config, RunStore(tmp_path / "run"), console=QUIET)
    pool, _ = IterationFolder(RunStore(tmp_path / "run"), 1).pool()
    assert {sample.entropy for sample in pool} == {None}


def test_what_follows_the_first_answer_is_cut_and_averaged_away(small_policy: Path) -> None:
    tokenizer, task = tiny_tokenizer(), get_task("countdown-mini")
    text = "<think>7+15+10</think><answer>7+15+10</answer> or <answer>7</answer>"
    ids = tokenizer(text)["input_ids"]
    numbers = torch.arange(len(ids), dtype=torch.float32)
    config = load_config(preset="tiny-rft", values={"model": {"name": str(small_policy)}})
    sampler = sampling.PoolSampler(
        config, Policy("p", load_policy(str(small_policy)).model, tokenizer), task, "<answer>"
    )
    problem = task.problems("train", limit=1)[0]
    rollout = Rollout(0, 0, 0, ids, numbers, numbers, numbers, numbers.int(), "length", tokenizer=tokenizer)
    (asked,) = prompted_problems(tokenizer, [problem], [task.prompt(problem, "terse")])
    whole = VerifiedSample(0, 0, asked, rollout, task.verify(text, problem))
    (sample,) = sampler._pool([whole])
    assert not sample.correct, "the last answer counts"
    assert sample.cut is not None
    assert sample.cut.correct
    assert sample.cut.text == text[: text.index(" or")]
    # the fewest tokens whose text holds the cut one, by trying all
    count = next(n for n in range(len(ids)) if len(tokenizer.decode(ids[:n])) >= len(sample.cut.text))
    assert sample.cut.tokens == count < len(ids)
    assert sample.cut.entropy == pytest.approx(np.arange(count).mean())
    assert sample.cut.branching == pytest.approx(np.arange(count).mean())
    assert (sample.finished, sample.cut.finished) == (False, True)


# ---------------------------------------------------------------------------- folders that others have been in
@pytest.fixture(scope="module")
def before_the_fit(small_policy: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was ended when it was about to fit."""
    place, run = tmp_path_factory.mktemp("task"), tmp_path_factory.mktemp("ended") / "run"
    (place / "own_even.py").write_text(TASK + MORE)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(place))
        sys.modules.pop("own_even", None)
        patch.setattr(loop, "fit", lambda *args, **kwargs: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            run_rft(made(small_policy, iterations=1), RunStore(run), console=QUIET)
    return run


@pytest.mark.parametrize("name", ["selected.parquet", "dropped.parquet", "selection.json"])
def test_what_is_removed_is_made_again(
    name: str, before_the_fit: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    shutil.copytree(before_the_fit, run)
    place = IterationFolder(RunStore(run), 1)
    before = place.selected()
    (place.folder / name).unlink()
    monkeypatch.setattr(loop, "fit", lambda *args, **kwargs: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run_rft(load_config(run / "config.yaml"), RunStore(run), console=QUIET)
    assert (place.folder / name).exists()
    assert place.selected() == before


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('f"{split}-{n}"', 'f"{split}-new-{n}"', "no longer has problem 'train-"),
        ("+1=", "+2=", "has another prompt for problem 'train-"),
    ],
)
def test_a_task_whose_problems_have_changed_is_said(
    old: str, new: str, words: str, before_the_fit: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    shutil.copytree(before_the_fit, run)
    task = Path(sys.path[0]) / "own_even.py"
    task.write_text(task.read_text().replace(old, new))
    code, _, err = command("rft", "--resume", run, capsys=capsys)
    assert code == 2
    assert words in err
    assert "own_even:Even" in err


def test_a_damaged_configuration_is_said(
    before_the_fit: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    shutil.copytree(before_the_fit, run)
    for damage in (b"\x00garbage", b"rft: [1,\n a: b", b"\xff\xfe\x00"):
        (run / "config.yaml").write_bytes(damage)
        code, _, err = command("rft", "--resume", run, capsys=capsys)
        assert (code, "config.yaml" in err) == (2, True), err


# ---------------------------------------------------------------------------- responses that imitate special tokens
def test_responses_that_write_special_tokens_out_are_not_learnt(small_policy: Path, tmp_path: Path) -> None:
    """As text they would be learnt as the tokens themselves: ends in the middle, turns of others."""
    end = load_policy(str(small_policy), device="cpu").tokenizer.eos_token
    sample = sampling.PoolSampler.sample

    def imitated(self: Any, *args: Any) -> Any:
        columns = sample(self, *args)
        for row, number in enumerate(columns["sample"]):
            if number == 0:
                columns["completion"][row], columns["correct"][row] = f"12{end}34", True
        return columns

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampling.PoolSampler, "sample", imitated)
        run_rft(made(small_policy, iterations=1, filters=[], budget=50), RunStore(tmp_path / "run"), console=QUIET)
    place = IterationFolder(RunStore(tmp_path / "run"), 1)
    assert not any(end in text for text in place.selected()["completion"])
    (rule,) = place.selection()["filters"]
    assert (rule["name"], rule["dropped"], rule["dropped_correct"]) == ("no_special_tokens", 6, 6)
