"""Stored prompts are what the model saw: system messages and what a chat template adds are among it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from datasets import Dataset
from trl import GRPOTrainer

from explorl import ExplorationTrainer, PassAtK, RunRecorder
from explorl.analysis.checkpoint_samples import checkpoint_table
from explorl.analysis.impact_tokens import problems_by_prompt
from explorl.evaluation import protocol
from explorl.evaluation.harness import run_evaluation
from explorl.evaluation.results_folder import load_evaluation
from explorl.models import Policy, load_policy
from explorl.tasks import Problem, Task, Verdict
from tests.training.small_runs import digits as digits_of_text
from tests.training.small_runs import grpo_config

TEMPLATE = (
    "{% if messages[0]['role'] != 'system' %}0 0 0\n{% endif %}"
    "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}{{ opening | default('=') }}{% endif %}"
)
PROMPTS = [
    [{"role": "system", "content": "7 7"}, {"role": "user", "content": "1 2"}],
    [{"role": "user", "content": "3 4"}],
]
SEEN = ["7 7\n1 2\n=", "0 0 0\n3 4\n="]


def digits(completions: list[Any], **columns: Any) -> list[float]:
    return digits_of_text([completion[0]["content"] for completion in completions])


class Chat(Task):
    name = "chat"
    splits = ("holdout",)
    templates = ()

    def problems(self, split: str, *, limit: int | None = None) -> list[Problem]:
        return [Problem(str(place), {"place": place}) for place in range(len(PROMPTS))]

    def prompt(self, problem: Problem, template: str | None = None) -> Any:
        return PROMPTS[problem.data["place"]]

    def verify(self, completion: Any, problem: Problem, *, opened: bool = False) -> Verdict:
        return Verdict(True)


@pytest.fixture
def policy(small_policy: Path) -> Policy:
    loaded = load_policy(str(small_policy), device="cpu")
    loaded.tokenizer.chat_template = TEMPLATE
    return loaded


def test_of_an_evaluation_in_a_script(policy: Policy, tmp_path: Path) -> None:
    scores = PassAtK([{"prompt": prompt} for prompt in PROMPTS], digits, samples=1, max_tokens=2)
    rows = [{"prompt": prompt} for prompt in PROMPTS * 4]
    trainer = GRPOTrainer(
        model=policy.model, reward_funcs=digits, args=grpo_config(tmp_path / "out", {"max_steps": 1}),
        train_dataset=Dataset.from_list(rows), processing_class=policy.tokenizer, callbacks=[scores],
    )  # fmt: skip
    trainer.train()
    assert scores.history[0].rows["prompt"] == SEEN


def test_of_an_evaluation_in_a_folder(policy: Policy, tmp_path: Path) -> None:
    how = protocol("plain", samples=1, max_tokens=2)
    (evaluated,) = run_evaluation([policy], [Chat()], how, tmp_path, name="plain", limit=2)
    assert load_evaluation(evaluated.folder, ("prompt",)).rows["prompt"] == SEEN


def test_of_a_lone_checkpoint(policy: Policy) -> None:
    table = checkpoint_table(policy, Chat(), protocol("plain", samples=1, max_tokens=2))
    assert list(table.completions.prompt) == SEEN
    found = problems_by_prompt(Chat(), set(SEEN), policy.tokenizer)
    assert {text: problem.data["place"] for text, (problem, _) in found.items()} == {SEEN[0]: 0, SEEN[1]: 1}


@pytest.mark.parametrize("cls", [GRPOTrainer, ExplorationTrainer])
def test_of_rollouts(policy: Policy, tmp_path: Path, cls: Any) -> None:
    """With what TRL gives the chat template beside the messages."""
    settings = {"max_steps": 1, "chat_template_kwargs": {"opening": "9="}, "shuffle_dataset": False}
    trainer = cls(
        model=policy.model, reward_funcs=digits, args=grpo_config(tmp_path / "out", settings),
        train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in PROMPTS * 4]),
        processing_class=policy.tokenizer,
    )  # fmt: skip
    RunRecorder(tmp_path / "run").watch(trainer)
    trainer.train()
    stored = pq.read_table(tmp_path / "run" / "rollouts" / "step-000001.parquet")
    assert stored["prompt"].to_pylist() == [text[:-1] + "9=" for text in SEEN for _ in range(4)]
    if cls is ExplorationTrainer:
        ids = stored["prompt_ids"].to_pylist()
        assert [policy.tokenizer.decode(row) for row in ids] == stored["prompt"].to_pylist()
