"""The README's script runs as it is printed, but for a small local model, and fewer steps and held-out rows."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from explorl.strategies import REGISTRY
from tests.training.test_every_strategy import SETTINGS, few_answers

README = Path(__file__).parent.parent / "README.md"
CODE = re.search(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
MODEL = '"Qwen/Qwen2-0.5B-Instruct"'
STRATEGIES = re.compile(r"    strategies=\[.*\],.*\n")
TEMPLATE = "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def script(policy: Path, folder: Path) -> str:
    assert CODE is not None
    text = CODE.group(1)
    for printed, used in (
        ("test_size=100", "test_size=20"),
        (MODEL, repr(str(policy))),
        ('GRPOConfig("adding", max_steps=100,', f"GRPOConfig({str(folder / 'adding')!r}, max_steps=2,"),
    ):
        assert text.count(printed) == 1, printed
        text = text.replace(printed, used)
    return text


@pytest.fixture(scope="module")
def chat_policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy with a chat template whose answers end after some thirty tokens."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from explorl.models import tiny_tokenizer

    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = TEMPLATE
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer), hidden_size=16, intermediate_size=32, num_hidden_layers=2,
            num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=1024, bos_token_id=None,
            eos_token_id=[tokenizer.eos_token_id, 50, 51], pad_token_id=tokenizer.pad_token_id, initializer_range=0.3,
        )
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("chat-policy")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_as_printed(chat_policy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, Any] = {}
    exec(script(chat_policy, tmp_path), names)
    trainer, scores = names["trainer"], names["held_out"]
    assert trainer.state.global_step == 2
    prompts = [set(map(str, names["dataset"][split]["prompt"])) for split in ("train", "test")]
    assert not prompts[0] & prompts[1], "what is scored was trained on"
    printed = re.findall(r"^step (\d+): (.*)$", capsys.readouterr().out, re.MULTILINE)
    assert [int(step) for step, _ in printed] == [0, 2] == [*scores.history]
    for line, scored in zip(printed, scores.history.values(), strict=True):
        numbers = r"[\d.]+% \[[\d.]+%, [\d.]+%\]"
        assert re.fullmatch(" ".join(f"pass@{k} {numbers}" for k in (1, 2, 4, 8)), line[1])
        assert (len(scored.problem_ids), scored.samples) == (20, 8)
    assert trainer.sampler.engine is not None
    args = trainer.args
    assert (args.bf16, args.gradient_checkpointing, args.per_device_train_batch_size) == (
        True,
        True,
        8,
    )  # TRL's defaults


QUICK = ("bottom_p", "kl_cov")
NAMES = [name for name in SETTINGS if name != "tool_progression"]  # which needs an interpreter


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in NAMES]
)
def test_with_each_strategy(name: str, chat_policy: Path, tmp_path: Path) -> None:
    """With TRL's default arguments."""
    text = script(chat_policy, tmp_path)
    assert len(STRATEGIES.findall(text)) == 1
    names: dict[str, Any] = {}
    data, training = text.replace("    callbacks=[held_out],\n", "").split("trainer = ")
    exec(data, names)
    options = dict(SETTINGS[name][-1])
    if "solve_rates" in options:
        options["solve_rates"] = {question: (row % 4) / 4 for row, question in enumerate(names["questions"])}
    names["spec"] = {name: options}
    names["answers"] = lambda completions, **columns: few_answers([messages[0]["content"] for messages in completions])
    more = "    answers=answers,\n" if REGISTRY[name].needs_answers else ""
    exec("trainer = " + STRATEGIES.sub(f"    strategies=[spec],\n{more}", training), names)
    assert names["held_out"].history == {}, "scored elsewhere"
    log = next(entry for entry in names["trainer"].state.log_history if "train_loss" in entry)
    assert log["train_loss"] == log["train_loss"]
    assert names["trainer"].state.global_step == 2
