"""What a tool says in reference solutions is not learnt, as it is not in rollouts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from rich.console import Console
from trl import SFTConfig

from explorl.core.config import Config
from explorl.core.store import RunStore
from explorl.models import load_policy, tiny_tokenizer, tiny_tools_model
from explorl.rollout import Engine, SamplingParams
from explorl.rollout.tool_use import ToolUse, generate_with_tools
from explorl.rollout.tools import ToolSpec, calculator_tool, output_block, python_tool
from explorl.sandbox.interpreter import CellResult
from explorl.tasks import get_task
from explorl.training.run_setup import disabled_progress
from explorl.training.sft.data import tokenize_dataset
from explorl.training.sft.run import StoredSFTTrainer, run_sft
from explorl.training.sft.trainer import PackedSFTTrainer
from tests.rollout.planted import Desk, standing_in
from tests.training.test_sft import CHAT


def learnt(rows: list[dict[str, Any]], tool: ToolSpec | None, **changes: Any) -> list[str]:
    """The text that is learnt of each row, with a dot for every token that is not."""
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template, tokenizer.model_max_length = CHAT, 4096
    how = {"max_length": None, "keep_start": True, "completion_only": True, **changes}
    found = []
    for row in tokenize_dataset(Dataset.from_list(rows), tokenizer, tool=tool, **how):
        pairs = zip(row["input_ids"], row["labels"], strict=True)
        assert all(label in (token, -100) for token, label in zip(row["input_ids"], row["labels"], strict=True))
        found.append("".join(tokenizer.decode([token]) if label != -100 else "." for token, label in pairs))
    return found


def test_text() -> None:
    rows = [
        {"prompt": "<<1=1>>?\n", "completion": "a<<6*7=42>>b<<1+1=2>>c"},
        {"prompt": "x", "completion": "6*7=42"},
    ]
    with_tool, without = learnt(rows, calculator_tool()), learnt(rows, None)
    assert with_tool == [9 * "." + "a<<6*7=....b<<1+1=...c<eos>", ".6*7=42<eos>"]
    assert without == [9 * "." + "a<<6*7=42>>b<<1+1=2>>c<eos>", ".6*7=42<eos>"]
    assert learnt(rows[:1], calculator_tool(), completion_only=False) == ["<<1=1>>?\na<<6*7=....b<<1+1=...c<eos>"]
    assert learnt(rows[:1], calculator_tool(), max_length=18) == [9 * "." + "a<<6*7=.."]
    opened = [{"prompt": "6*7 is <<", "completion": "6*7=42>>!"}]
    assert learnt(opened, calculator_tool()) == [9 * "." + "6*7=....!<eos>"]


def test_messages() -> None:
    said = "```python\nprint(6*7)\n```\n```output\n42\n```\nSo 42."
    rows = [{"prompt": [{"role": "user", "content": "6*7?"}], "completion": [{"role": "assistant", "content": said}]}]
    (text,) = learnt(rows, python_tool())
    assert text.strip(".").startswith("```python\nprint(6*7)\n```" + len("\n```output\n42\n```\n") * "." + "So 42.")
    assert "output" in learnt(rows, None)[0]


@pytest.mark.parametrize(("template", "tool"), [("terse", calculator_tool()), ("chat", python_tool())])
def test_the_mask_is_that_of_a_rollout(template: str, tool: ToolSpec) -> None:
    """Reference solutions, and the same text as a rollout: what it had sampled, and what it was given."""
    tokenizer = tiny_tokenizer()
    task = get_task("products", by_heart=0.3, sizes={"sft": 30})
    for example in task.examples(30, template=template):
        completion = example["completion"]
        (text,) = learnt([{"prompt": "?", "completion": completion}], tool)
        rest, expected = completion, "."
        while (found := tool.fence.find(rest, 0)) is not None:
            value = rest[found.end :].split(">>")[0] if template == "terse" else rest[found.end :].split("\n")[2]
            block = output_block(CellResult("ok", f"{value}\n"), tool, rest[: found.end])
            assert rest.startswith(block, found.end)
            expected += rest[: found.end] + len(tokenizer.encode(block)) * "."
            rest = rest[found.end + len(block) :]
        assert text == expected + rest + "<eos>"


def test_a_rollout_that_is_learnt_from_has_its_own_mask() -> None:
    """What `tiny-tools` has sampled with a calculator, given back as a reference solution."""
    policy, tool = load_policy("tiny-tools", device="cpu"), calculator_tool()
    desk = standing_in(Desk(lambda source: CellResult("ok", "99242\n")))
    params, prompts = SamplingParams(max_tokens=60, seed=3), ["347*286+51\n", "123*456\n"]
    rollouts = generate_with_tools(
        Engine(policy.model, policy.tokenizer), prompts, 16, params, ToolUse(tool), pool=desk
    )
    called = [rollout for rollout in rollouts if rollout.calls and rollout.finish_reason == "stop"]
    assert called
    for rollout in called:
        row = {"prompt": prompts[rollout.prompt_index], "completion": rollout.text}
        (found,) = tokenize_dataset(
            Dataset.from_list([row]),
            policy.tokenizer,
            max_length=None,
            keep_start=True,
            completion_only=True,
            tool=tool,
        )
        labels = found["labels"][-len(rollout) :]
        assert [label != -100 for label in labels] == [bool(one) for one in rollout.sampled]


def trainer(rows: Any, folder: Path, **options: Any) -> PackedSFTTrainer:
    args = SFTConfig(output_dir=str(folder), max_steps=1, report_to="none", use_cpu=True, bf16=False, disable_tqdm=True)
    with disabled_progress():
        return PackedSFTTrainer(
            model=tiny_tools_model(), args=args, train_dataset=rows, processing_class=tiny_tokenizer(), **options
        )


@pytest.mark.parametrize("packed", [True, False])
def test_the_loss_has_no_token_of_an_output(packed: bool, tmp_path: Path) -> None:
    """It is the mean cross-entropy of the tokens that are learnt, in the packed pass and in TRL's."""
    rows = Dataset.from_list([{"prompt": "?", "completion": "<<1+1=7>>x"}] * 4)
    texts, losses = [], []
    for tool in ("calculator", None):
        made = trainer(rows, tmp_path, packed=packed, tool=tool)
        row = made.train_dataset[0]
        targets = torch.tensor(row["labels"][1:])
        with torch.no_grad():
            logits = made.model.eval()(input_ids=torch.tensor([row["input_ids"]])).logits[0, :-1]
        expected = torch.nn.functional.cross_entropy(logits, targets, ignore_index=-100).item()
        made.train()
        losses.append(made.state.log_history[-1]["train_loss"])
        assert losses[-1] == pytest.approx(expected, rel=1e-3)
        texts.append(tiny_tokenizer().decode(targets[targets != -100].tolist()))
    assert texts == ["<<1+1=x<eos>", "<<1+1=7>>x<eos>"]
    assert losses[0] != pytest.approx(losses[1], rel=1e-4)


def test_rows_in_which_outputs_cannot_be_found(tmp_path: Path) -> None:
    text = Dataset.from_list([{"text": "<<1+1=2>>"}])
    with pytest.raises(ValueError, match="tool='calculator' needs rows with a prompt"):
        trainer(text, tmp_path, tool="calculator")
    with pytest.raises(ValueError, match="unknown tool 'pyton'; did you mean 'python'"):
        trainer(text, tmp_path, tool="pyton")


def test_a_run_with_a_tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`rollout.tools` says whose outputs are left out; the recipe of tiny-tools names none: it must do without too."""
    seen: list[list[Any]] = []
    train = StoredSFTTrainer.train

    def watched(self: Any, **kwargs: Any) -> Any:
        seen.append(list(self.train_dataset))
        return train(self, **kwargs)

    monkeypatch.setattr(StoredSFTTrainer, "train", watched)
    for tools in ("calculator", None):
        config = Config.model_validate(
            {
                "model": {"name": "tiny-tools", "lora": None},
                "task": {"name": "products", "template": "terse", "by_heart": 0.0},
                "rollout": {"tools": tools},
                "sft": {"from_scratch": True, "examples": 4, "batch_size": 4, "max_length": 80},
            }
        )
        store = RunStore.create(tmp_path / str(tools), config.dump())
        run_sft(config, store, console=Console(quiet=True))
    tokenizer = tiny_tokenizer()
    masked, whole = (
        [tokenizer.decode([label for label in row["labels"] if label != -100]) for row in rows] for rows in seen
    )
    assert all(">>" not in text and "<<" in text for text in masked)
    assert all(">>" in text for text in whole)
