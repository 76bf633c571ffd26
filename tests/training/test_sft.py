"""Supervised fine-tuning, on text and on messages."""

from __future__ import annotations

import io
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

from explorl.core.config import Config, ConfigError, load_config
from explorl.core.store import RunStore
from explorl.models import load_policy, tiny_tokenizer
from explorl.tasks.countdown.task import Countdown
from explorl.training.sft.data import rows_without_completion
from explorl.training.sft.run import StoredSFTTrainer, run_sft

CHAT = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
WITHOUT_THOUGHTS = CHAT.replace("message['content']", "message['content'].split('</think>')[-1]")


def chat_policy(folder: Path, template: str | None = CHAT) -> Path:
    """A small Llama that reads characters and, like SmolLM2, has its turns between <|im_start|> and <|im_end|>."""
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens({"eos_token": "<|im_end|>", "bos_token": "<|im_start|>"})
    tokenizer.chat_template, tokenizer.model_max_length = template, 4096
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=4096, tie_word_embeddings=False,
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def sft_config(policy: Path, template: str | None, **model: Any) -> Config:
    for name in ("train", "test"):
        (policy / f"countdown-3to4-{name}.jsonl").write_text('{"nums": [3, 7, 12], "target": 33}\n')
    values: dict[str, Any] = {
        "model": {"name": str(policy), "lora": None, **model},
        "task": {"template": template, "data_dir": str(policy)},
        "sft": {"examples": 8, "batch_size": 4, "epochs": 1, "warmup_steps": 0, "max_length": 4000},
    }
    return load_config(values=values)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the trainer was given: its examples as token ids and labels, and what it logged."""
    found: dict[str, Any] = {}
    train = StoredSFTTrainer.train

    def watched(self: Any, **kwargs: Any) -> Any:
        found["rows"] = list(self.train_dataset)
        result = train(self, **kwargs)
        found["log"], found["optimizer"] = self.state.log_history, self.optimizer
        return result

    monkeypatch.setattr(StoredSFTTrainer, "train", watched)
    return found


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
@pytest.mark.parametrize("template", [None, "paper-opened", "chat"])
def test_the_loss_is_on_what_the_assistant_says(
    template: str | None, dtype: str, seen: dict[str, Any], tmp_path: Path
) -> None:
    config = sft_config(chat_policy(tmp_path / "policy"), template, dtype=dtype)
    store = RunStore.create(tmp_path / "run", config.dump())
    made = run_sft(config, store, console=Console(quiet=True))
    tokenizer = load_policy(str(made)).tokenizer
    assert len(seen["rows"]) == 8
    for row in seen["rows"]:
        where = [index for index, label in enumerate(row["labels"]) if label != -100]
        assert where == list(range(where[0], len(row["labels"])))
        assert [row["labels"][index] for index in where] == row["input_ids"][where[0] :]
        prompt, learnt = (
            tokenizer.decode(part) for part in (row["input_ids"][: where[0]], row["input_ids"][where[0] :])
        )
        assert "Using the numbers" in prompt
        assert learnt.startswith("<think>") == (template != "paper-opened")
        if template == "chat":
            assert prompt.startswith("<|im_start|>user\n")
            assert prompt.endswith("<|im_end|>\n<|im_start|>assistant\n")
            assert learnt.endswith("</answer><|im_end|>\n")
        else:
            assert prompt.startswith("A conversation between User and Assistant.")
            assert learnt.endswith("</answer><|im_end|>")
    assert seen["log"][-1]["step"] == 2
    assert math.isfinite(seen["log"][-1]["train_loss"])
    states = [value for state in seen["optimizer"].state.values() for value in state.values() if value.ndim]
    assert states
    assert {value.dtype for value in states} == {torch.float32}
    old, new = (load_file(folder / "model.safetensors") for folder in (tmp_path / "policy", made))
    assert {value.dtype for value in new.values()} == {torch.float32}
    assert any(not torch.equal(old[name], new[name]) for name in old)


@pytest.mark.parametrize(
    ("chat_template", "words"),
    [
        (None, r"task\.template is 'chat'.*has no chat template; use a template of text: paper"),
        (WITHOUT_THOUGHTS, r"task\.template is 'chat'.*drops part of an assistant's message.*paper"),
    ],
)
def test_a_model_that_cannot_learn_from_messages(chat_template: str | None, words: str, tmp_path: Path) -> None:
    config = sft_config(chat_policy(tmp_path / "policy", chat_template), "chat")
    with pytest.raises(ConfigError, match=words):
        run_sft(config, RunStore.create(tmp_path / "run", config.dump()), console=Console(quiet=True))


def test_an_empty_completion_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = sft_config(chat_policy(tmp_path / "policy"), None)
    examples = [{"prompt": "a", "completion": "b"}, {"prompt": "c", "completion": " "}]
    monkeypatch.setattr(Countdown, "examples", lambda self, *args, **kwargs: examples)
    with pytest.raises(ConfigError, match=r"example 1 of task 'countdown' has an empty completion.*leave it out"):
        run_sft(config, RunStore.create(tmp_path / "run", config.dump()), console=Console(quiet=True))


@pytest.mark.parametrize(
    ("completion", "empty"),
    [("a", False), ("", True), (" \n", True), ([{"role": "assistant", "content": ""}], True),
     ([{"role": "assistant", "content": "a"}], False), ([{"role": "assistant", "content": None}], True), ([], True)],
)  # fmt: skip
def test_what_an_empty_completion_is(completion: Any, empty: bool) -> None:
    assert list(rows_without_completion([{"completion": "x"}, {"completion": completion}])) == [1] * empty


def test_prompts_that_leave_no_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = sft_config(chat_policy(tmp_path / "policy"), None)
    config = config.model_copy(update={"sft": config.sft.model_copy(update={"max_length": 20})})
    examples = [{"prompt": "a" * 19, "completion": "bb"}, {"prompt": "a" * 25, "completion": "b"}]
    monkeypatch.setattr(Countdown, "examples", lambda self, *args, **kwargs: examples)
    console = Console(record=True, width=200, file=io.StringIO())
    run_sft(config, RunStore.create(tmp_path / "run", config.dump()), console=console)
    assert (
        "leaving out 1 of 2 examples, whose prompts alone have sft.max_length = 20 tokens or more"
        in console.export_text()
    )
    del examples[0]
    with pytest.raises(ConfigError, match=r"sft\.max_length is 20: no row .* has a token to train on"):
        run_sft(config, RunStore.create(tmp_path / "other", config.dump()), console=console)
