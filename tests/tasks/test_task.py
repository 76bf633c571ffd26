"""Tasks as training and evaluation use them: problems, prompts, rewards, examples, and the registry."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from explorl.tasks import TASKS, Countdown, Problem, Task, Verdict, get_task, opens_think
from explorl.tasks.base import completion_text
from explorl.tasks.countdown.generator import Puzzle
from explorl.tasks.countdown.problem_files import TEST_FILE, TRAIN_FILE, write_splits

DATA = Path(__file__).parents[3] / "shared" / "data"
CORRECT = "<think>hm</think><answer>3*7+12</answer>"


@pytest.fixture(scope="module")
def mini() -> Task:
    return get_task("countdown-mini")


@pytest.fixture(scope="module")
def generated() -> Task:
    return get_task("countdown", source="generated", sizes={"sft": 50, "train": 30, "holdout": 20})


def test_registry_knows_the_nearest_name() -> None:
    assert {"countdown", "countdown-mini", "math", "math:aime24", "choice", "code", "jsonl"} <= set(TASKS)
    assert all(get_task(name).name == name for name in TASKS if name != "jsonl")
    assert get_task("math:amc23").dataset == "amc23"  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="unknown task 'math:aime42'; did you mean 'math:aime2"):
        get_task("math:aime42")
    with pytest.raises(ValueError, match="unknown task 'countdwn'; did you mean 'countdown'"):
        get_task("countdwn")
    with pytest.raises(
        ValueError,
        match="unknown task 'chess'; known: choice, code, countdown, countdown-mini, jsonl, math",
    ):
        get_task("chess")
    with pytest.raises(ValueError, match="'sed'; did you mean 'seed'"):
        get_task("countdown", sed=3)


def test_problems_are_stable_and_json(mini: Task) -> None:
    problems = mini.problems("holdout")
    assert len(problems) == 1_000
    assert problems == get_task("countdown-mini").problems("holdout")
    assert problems[:8] == mini.problems("holdout", limit=8)
    assert mini.problems("train", limit=0) == []
    for problem in problems[:20]:
        nums, target = problem.data["nums"], problem.data["target"]
        assert problem.id == f"countdown:{'-'.join(map(str, sorted(nums)))}={target}"
        assert json.loads(json.dumps(problem.data)) == problem.data
    ids = [problem.id for split in mini.splits for problem in mini.problems(split)]
    assert len(set(ids)) == len(ids) == 16_292
    assert problems != get_task("countdown-mini", seed=1).problems("holdout")


def test_bad_splits_and_limits(mini: Task) -> None:
    with pytest.raises(ValueError, match="unknown split 'holdot'; did you mean 'holdout'"):
        mini.problems("holdot")
    with pytest.raises(ValueError, match="limit=-1: use a count like 100"):
        mini.problems("train", limit=-1)


def test_prompts(mini: Task) -> None:
    problem = Problem("x", {"nums": [32, 4, 57, 19], "target": 24})
    text = get_task("countdown").prompt(problem)
    assert text == (
        "A conversation between User and Assistant. The user asks a question, and the Assistant solves it. The "
        "assistant first thinks about the reasoning process in the mind and then provides the user with the answer.\n"
        "User: Using the numbers [32, 4, 57, 19], create an equation that equals 24. You can use basic arithmetic "
        "operations (+, -, *, /) and each number can only be used once. Show your work in <think> </think> tags. And "
        "return the final answer in <answer> </answer> tags, for example <answer> (1 + 2) / 3 </answer>.\n"
        "Assistant: Let me solve this step by step.\n"
    )
    assert mini.prompt(problem, "paper-opened") == text + "<think>"
    assert mini.prompt(problem) == mini.prompt(problem, "terse") == "32 4 57 19=24\n"
    (message,) = mini.prompt(problem, "chat")
    assert message["role"] == "user"  # type: ignore[index]
    assert message["content"] in text  # type: ignore[index]
    with pytest.raises(ValueError, match="unknown template 'ters'; did you mean 'terse'"):
        mini.prompt(problem, "ters")


def test_open_think_is_seen_in_text_only(mini: Task) -> None:
    problem = mini.problems("train", limit=1)[0]
    assert [opens_think(mini.prompt(problem, name)) for name in ("paper", "paper-opened", "terse", "chat")] == [
        False,
        True,
        False,
        False,
    ]
    assert opens_think("… <think>\n")


def test_rewards_and_their_weights(mini: Task) -> None:
    problem = Problem("x", {"nums": [3, 7, 12], "target": 33})
    assert mini.reward_parts == {"correctness": 1.0, "format": 0.1}
    assert mini.rewards(CORRECT, problem) == {"correctness": 1.0, "format": 1.0}
    assert mini.reward(CORRECT, problem) == pytest.approx(1.1)
    assert mini.reward("<answer>3*7+12</answer>", problem) == 1.0
    assert mini.reward("<think></think><answer></answer>", problem) == pytest.approx(0.1)
    assert mini.rewards(CORRECT.removeprefix("<think>"), problem, opened=True)["format"] == 1.0
    assert isinstance(mini.verify(CORRECT, problem), Verdict)


@pytest.mark.parametrize("template", ["paper", "paper-opened", "terse", "chat"])
def test_reward_functions_as_trl_calls_them(generated: Task, template: str) -> None:
    rows = generated.rows("train", template=template, limit=4)
    json.dumps(rows)
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    prompts = columns.pop("prompt")
    texts = [example_for(row) for row in rows]
    texts[1] = "no"
    completions = [[{"role": "assistant", "content": text}] for text in texts] if template == "chat" else texts
    functions = generated.reward_functions()
    assert [function.__name__ for function in functions] == list(generated.reward_parts)
    values = [function(prompts, completions, trainer_state=None, **columns) for function in functions]
    assert values == [[1.0, 0.0, 1.0, 1.0]] * 2
    if template != "chat":  # text shows by itself whether it has opened <think>
        del columns["opened"]
        assert functions[1](prompts, completions, **columns) == values[1]


def example_for(row: dict[str, Any]) -> str:
    from explorl.tasks.countdown.solver import solve

    text = f"<think>hm</think><answer>{solve(row['data']['nums'], row['data']['target'])}</answer>"
    return text.removeprefix("<think>") if row["opened"] else text


def test_a_chat_template_that_opens_think_is_told(generated: Task) -> None:
    assert [row["opened"] for row in generated.rows("holdout", template="chat", limit=2)] == [False, False]
    assert [row["opened"] for row in generated.rows("holdout", template="chat", limit=2, opened=True)] == [True, True]


def test_text_of_messages() -> None:
    assert completion_text("a") == "a"
    turns = [
        {"role": "assistant", "content": "a"},
        {"role": "tool", "content": "b"},
        {"role": "assistant", "content": None},
        {"role": "assistant", "content": "c"},
    ]
    assert completion_text(turns) == "ac"  # type: ignore[arg-type]


@pytest.mark.parametrize("template", [None, "paper", "paper-opened", "terse", "chat"])
def test_examples_are_correct_under_every_template(generated: Task, template: str | None) -> None:
    examples = list(generated.examples(120, template=template, seed=3))
    assert len(examples) == 120
    assert examples == list(generated.examples(120, template=template, seed=3))
    assert examples != list(generated.examples(120, template=template, seed=4))
    by_prompt = {str(generated.prompt(p, template)): p for p in generated.problems("sft")}
    same_order = 0
    for example in examples:
        problem = by_prompt.get(str(example["prompt"]))
        if problem is None:
            continue  # shown with its numbers in another order
        same_order += 1
        verdict = generated.verify(example["completion"], problem, opened=opens_think(example["prompt"]))
        assert verdict.correct
        assert verdict.well_formed
    assert 0 < same_order < 120


def test_examples_of_the_mini_task_go_past_its_problems(mini: Task) -> None:
    examples = list(mini.examples(500))
    for example in examples:
        left, target = example["prompt"].strip().split("=")
        problem = Problem("x", {"nums": [int(number) for number in left.split()], "target": int(target)})
        assert mini.reward(example["completion"], problem) == pytest.approx(1.1)
    small = get_task("countdown-mini", sizes={"sft": 2})
    assert len({example["prompt"].partition("=")[2] for example in small.examples(30)}) <= 2
    with pytest.raises(ValueError, match="the sft split of 'countdown-mini' is empty"):
        list(get_task("countdown-mini", sizes={"sft": 0}).examples(1))


def test_files_of_a_folder(tmp_path: Path) -> None:
    (tmp_path / TRAIN_FILE).write_text(
        '{"nums": [3, 7], "target": 10}\n{"nums": [7, 3], "target": 10}\n{"nums": [1, 2], "target": 3}\n'
    )
    (tmp_path / TEST_FILE).write_text('{"nums": [2, 1], "target": 3}\n')
    task = get_task("countdown", data_dir=tmp_path, sizes={"sft": 5})
    assert [problem.id for problem in task.problems("train")] == ["countdown:3-7=10"]
    assert [problem.id for problem in task.problems("holdout")] == ["countdown:1-2=3"]
    assert len(task.problems("sft")) == 5


@pytest.mark.skipif(not DATA.is_dir(), reason="the real problems are not here")
def test_real_files() -> None:
    task = get_task("countdown", data_dir=DATA, sizes={"sft": 100})
    assert len(task.problems("train")) == 9_213
    assert len(task.problems("holdout")) == 1_024
    ids = [problem.id for split in task.splits for problem in task.problems(split)]
    assert len(set(ids)) == len(ids) == 9_213 + 1_024 + 100


def test_the_hub_is_held_out_from_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = {"nums": [[n, n + 1] for n in range(1, 41)] * 2, "target": [2 * n + 1 for n in range(1, 41)] * 2}
    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=lambda name, split: rows))
    task = get_task("countdown", sizes={"sft": 10, "holdout": 7})
    holdout, train = ({p.id for p in task.problems(split)} for split in ("holdout", "train"))
    assert len(task.problems("holdout")) == len(holdout) <= 7
    assert len(task.problems("train")) == len(train)
    assert not holdout & train
    assert len(holdout | train) == 40
    assert len(task.problems("sft")) == 10


def test_split_files(tmp_path: Path) -> None:
    splits = {"sft": [Puzzle((3, 7), 10)], "train": [Puzzle((1, 2), 3)], "holdout": [Puzzle((4, 5), 9)]}
    write_splits(tmp_path / "splits.jsonl", splits)
    task = get_task("countdown-mini", split_file=tmp_path / "splits.jsonl")
    assert [task.problems(split)[0].id for split in task.splits] == [
        "countdown:3-7=10",
        "countdown:1-2=3",
        "countdown:4-5=9",
    ]


def test_contradictory_options() -> None:
    with pytest.raises(ValueError, match="give only one of them"):
        get_task("countdown", data_dir="a", split_file="b")
    with pytest.raises(ValueError, match="unknown source 'hup'; did you mean 'hub'"):
        get_task("countdown", source="hup")
    with pytest.raises(ValueError, match="'countdown-mini' is always generated"):
        get_task("countdown-mini", data_dir="a")
    with pytest.raises(ValueError, match="'countdown-mini' is always generated"):
        get_task("countdown-mini", source="hub")
    with pytest.raises(ValueError, match="unknown split 'trian'"):
        get_task("countdown", source="generated", sizes={"trian": 3}).problems("train")


def test_a_task_without_reference_solutions_says_so() -> None:
    class Silent(Countdown):
        examples = Task.examples

    with pytest.raises(ValueError, match="has no reference solutions"):
        Silent(name="silent").examples(3)


def test_a_batch_is_verified_once_for_all_reward_parts(mini: Task, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    verify = type(mini).verify
    monkeypatch.setattr(type(mini), "verify", lambda self, *a, **k: (calls.append(1), verify(self, *a, **k))[1])
    row = mini.rows("train", limit=1)[0]
    columns = {"id": [row["id"]] * 2, "data": [row["data"]] * 2, "opened": [False] * 2}
    correctness, form = mini.reward_functions()
    assert correctness(prompts=[row["prompt"]] * 2, completions=["a", CORRECT], **columns) == [0.0, 0.0]
    assert form(prompts=[row["prompt"]] * 2, completions=["a", CORRECT], **columns) == [0.0, 1.0]
    assert len(calls) == 2
    assert form(prompts=[row["prompt"]] * 2, completions=["b", CORRECT], **columns) == [0.0, 1.0]
    assert len(calls) == 4


@pytest.mark.parametrize("own", ["nothing", "rewards", "reward_functions"])
def test_answers_come_from_the_verdicts_of_the_rewards(mini: Task, monkeypatch: pytest.MonkeyPatch, own: str) -> None:
    kind = type(mini)
    calls = []
    verify = kind.verify
    monkeypatch.setattr(kind, "verify", lambda self, *a, **k: (calls.append(1), verify(self, *a, **k))[1])
    if own == "rewards":  # which say nothing of the answers: these cost a verification
        monkeypatch.setattr(kind, "rewards", lambda self, *a, **k: {"correctness": 0.5, "format": 0.5})
    if own == "reward_functions":
        monkeypatch.setattr(kind, "reward_functions", lambda self: ["mine", *Task.reward_functions(self)])
    row = mini.rows("train", limit=1)[0]
    columns = {"id": [row["id"]] * 2, "data": [row["data"]] * 2, "opened": [False] * 2}
    columns |= {"prompts": [row["prompt"]] * 2, "completions": ["a", CORRECT]}
    functions, answers = mini.scorers()
    assert len(functions) == 2 + (own == "reward_functions")
    if own != "reward_functions":
        functions[0](**columns)
    answer = mini.verify(CORRECT, mini.problems("train", limit=1)[0]).answer
    assert answers(**columns) == answers(**columns) == [None, answer]
    assert len(calls) == 1 + 2
    assert answers(**{**columns, "completions": [CORRECT, "a"]}) == [answer, None]
