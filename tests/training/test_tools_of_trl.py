"""TRL's own tools and environments through the engine: conversations in turns, a record of every sampled token."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from trl import GRPOConfig

from explorl.models import load_policy
from explorl.strategies import Batch, Strategy
from explorl.training.grpo.trainer import ExplorationTrainer

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")

TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'user' %}U{{ message.content }}\n"
    "{% elif message.role == 'tool' %}T{{ message.content }}\n"
    "{% else %}A{{ message.content }}{% for call in message.tool_calls or [] %}"
    "{{ call.function.name }}{{ call.function.arguments | tojson }}{% endfor %}{{ eos_token }}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}A{% endif %}"
)
RATES = {"1+1": 0.0, "2+2": 1.0, "3+3": 0.5, "4+4": 0.25}


def count(text: str) -> str:
    """Counts.

    Args:
        text: What to count.
    """
    return f"{len(text)}:"


class Desk:
    """An environment that says how often it was asked."""

    def reset(self, **columns: Any) -> str:
        self.asked = 0
        return "?"

    def ask(self, text: str) -> str:
        """Asks.

        Args:
            text: What to ask.
        """
        self.asked += 1
        return f"#{self.asked}"


def parsed(name: str, decode: Callable[..., str]) -> Callable[..., dict[str, Any]]:
    """Every completion with a letter before "n" calls the tool, as random text does now and then."""

    def parse(ids: list[int], **more: Any) -> dict[str, Any]:
        text = decode(ids, skip_special_tokens=True)
        message: dict[str, Any] = {"role": "assistant", "content": text}
        if any("A" <= letter <= "m" for letter in text):
            message["tool_calls"] = [{"type": "function", "function": {"name": name, "arguments": {"text": text}}}]
        return message

    return parse


def uneven(completions: list[Any], **columns: Any) -> list[float]:
    return [float(sum(len(message["content"]) for message in completion) % 3) for completion in completions]


@dataclass(frozen=True)
class Watching(Strategy):
    """Keeps the batches that it sees."""

    seen: list[Batch] = field(default_factory=list)

    def advantages(self, batch: Batch) -> torch.Tensor:
        self.seen.append(batch)
        return batch.advantages


Make = Callable[..., Any]


@pytest.fixture
def make(small_policy: Path, tmp_path: Path) -> Make:
    def trainer(
        options: dict[str, Any] | None = None, tool: Any = count, cls: Any = ExplorationTrainer, **changes: Any
    ) -> Any:
        policy = load_policy(str(small_policy), device="cpu")
        tokenizer = policy.tokenizer
        tokenizer.chat_template, tokenizer.response_schema = TEMPLATE, {"type": "object"}
        environment = isinstance(tool, type)
        tokenizer.parse_response = parsed("ask" if environment else "count", tokenizer.decode)
        arguments: dict[str, Any] = {
            "output_dir": str(tmp_path / "out"), "per_device_train_batch_size": 4, "gradient_accumulation_steps": 4,
            "num_generations": 4, "max_completion_length": 24, "learning_rate": 1e-3, "max_steps": 1,
            "logging_steps": 1, "save_strategy": "no", "report_to": "none", "disable_tqdm": True, "bf16": False,
            "gradient_checkpointing": False, "use_cpu": True, "dataloader_pin_memory": False, "seed": 3,
            "generation_kwargs": {"eos_token_id": [tokenizer.eos_token_id, *tokenizer.encode("xyzXYZ789*")]},
            "max_tool_calling_iterations": 3,
        }  # fmt: skip
        prompts = [[{"role": "user", "content": question}] for question in RATES]
        return cls(
            model=policy.model,
            reward_funcs=uneven,
            args=GRPOConfig(**{**arguments, **changes}),
            train_dataset=Dataset.from_dict({"prompt": prompts}),
            processing_class=tokenizer,
            **({"environment_factory": tool} if environment else {"tools": [tool]}),
            **(options or {}),
        )

    return trainer


def output_of(trainer: Any) -> dict[str, Any]:
    """The first generation batch, as it goes into micro-batches."""
    recorded: list[dict[str, Any]] = []
    micro_batches = trainer.micro_batches

    def seen(batch: dict[str, Any]) -> Any:
        recorded.append(batch)
        return micro_batches(batch)

    trainer.micro_batches = seen
    trainer.train()
    return recorded[0]


def logits_of(folder: Path, output: dict[str, Any]) -> torch.Tensor:
    """Of every completion token, by the model's own pass, with the weights before the first step."""
    model = load_policy(str(folder), device="cpu").model
    ids = torch.cat([output["prompt_ids"], output["completion_ids"]], 1)
    mask = torch.cat([output["prompt_mask"], output["completion_mask"]], 1)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        logits = model(input_ids=ids, attention_mask=mask, position_ids=positions).logits
    return logits[:, output["prompt_ids"].size(1) - 1 : -1].float()


def of_tokens(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return logits.log_softmax(-1).gather(-1, ids.unsqueeze(-1)).squeeze(-1)


@pytest.mark.parametrize("tool", [count, Desk], ids=["tool", "environment"])
def test_every_sampled_token_has_its_record_and_no_other(make: Make, small_policy: Path, tool: Any) -> None:
    watching = Watching()
    trainer = make({"strategies": [watching]}, tool)
    output = output_of(trainer)
    batch = watching.seen[0]
    own = (output["tool_mask"] * output["completion_mask"]).bool()
    turns = ((own[:, 1:] & ~own[:, :-1]).sum(1) + 1)[own.any(1)]
    assert turns.max() >= 3  # some rows went on twice
    assert turns.min() == 1  # and some ended at once
    assert torch.equal(batch.mask.bool(), own)
    assert trainer.sampled.records is not None
    assert torch.equal(trainer.sampled.records.sampled, own)
    logits = logits_of(small_policy, output)
    expected = of_tokens(logits, output["completion_ids"])
    probabilities = logits.softmax(-1)
    entropy = -(probabilities * logits.log_softmax(-1)).sum(-1)
    assert batch.branching is not None
    assert batch.sampling_logps is not None
    torch.testing.assert_close(batch.logps, expected * own, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(batch.sampling_logps, expected * own, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(batch.entropy, entropy * own, rtol=1e-4, atol=1e-5)
    ranked = probabilities.sort(-1, descending=True).values.cumsum(-1)
    torch.testing.assert_close(batch.branching, ((ranked < 0.95).sum(-1) + 1.0) * own, rtol=0, atol=1)


def test_each_row_keeps_its_way_of_sampling_in_later_turns(make: Make, small_policy: Path) -> None:
    watching = Watching()
    temperature = {"element_wise_temperature": {"solve_rates": RATES, "easy": 0.5, "hard": 2.0}}
    trainer = make({"strategies": [temperature, {"bottom_p": {"p": 0.8}}, watching]})
    output = output_of(trainer)
    batch = watching.seen[0]
    own, ids = batch.mask.bool(), output["completion_ids"]
    assert set(batch.temperature.tolist()) == {0.5, 1.25, 1.625, 2.0}
    tempered = logits_of(small_policy, output) / batch.temperature[:, None, None]
    torch.testing.assert_close(batch.logps, of_tokens(tempered, ids) * own, rtol=1e-4, atol=1e-5)
    # bottom-p: by falling probability, the tokens whose mass up to and including them is ≤ 1 − p are left out
    ranked, order = tempered.softmax(-1).sort(dim=-1, descending=True, stable=True)
    keep = ranked.cumsum(-1) > 0.2
    mass = (ranked * keep).sum(-1)
    assert batch.sampling_logps is not None
    expected = (of_tokens(tempered, ids) - mass.log()) * own
    torch.testing.assert_close(batch.sampling_logps, expected, rtol=1e-3, atol=1e-4)
    places = (order == ids.unsqueeze(-1)).float().argmax(-1)
    assert keep.gather(-1, places.unsqueeze(-1)).squeeze(-1)[own].all()


def test_later_turns_stay_within_the_answers_limit(make: Make) -> None:
    output = output_of(make(max_completion_length=13))
    own = output["tool_mask"] * output["completion_mask"]
    assert int(output["completion_mask"].sum(1).max()) == 13
    assert (own.sum(1) < output["completion_mask"].sum(1)).any()


def test_what_trl_cuts_off_is_cut_off_from_the_records(make: Make, small_policy: Path) -> None:
    """A turn may be longer than what TRL leaves of the conversation."""
    watching = Watching()
    trainer = make({"strategies": [watching]}, max_completion_length=12)
    trainer.generation_config.max_new_tokens = 30
    output = output_of(trainer)
    assert trainer.sampled.records is not None
    own = (output["tool_mask"] * output["completion_mask"]).bool()
    expected = of_tokens(logits_of(small_policy, output), output["completion_ids"])
    torch.testing.assert_close(watching.seen[0].logps, expected * own, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("strategies", [[], ["bottom_p"]], ids=["plain", "per-row"])
def test_a_conversation_that_somebody_changed_is_noticed(make: Make, strategies: list[str]) -> None:
    trainer = make({"strategies": strategies})
    finish = trainer.sampler.finish_conversations

    def changed(sampled: Any, completion_ids: list[list[int]]) -> None:
        completion_ids[0][0] = 9
        finish(sampled, completion_ids)

    trainer.sampler.finish_conversations = changed
    if strategies:
        with pytest.raises(RuntimeError, match=r"tokens of a conversation were changed .* how each row was sampled"):
            trainer.train()
    else:
        with pytest.warns(UserWarning, match=r"tokens of a conversation were changed .* computed again"):
            trainer.train()
        assert trainer.sampled.records is None


def test_without_the_engine_trl_samples_every_turn(make: Make, small_policy: Path) -> None:
    watching = Watching()
    trainer = make({"strategies": [watching], "engine": "generate"})
    output = output_of(trainer)
    own = (output["tool_mask"] * output["completion_mask"]).bool()
    expected = of_tokens(logits_of(small_policy, output), output["completion_ids"])
    torch.testing.assert_close(watching.seen[0].logps[own], expected[own], rtol=1e-4, atol=1e-5)


def test_a_strategy_that_needs_records_trains_with_tools(make: Make) -> None:
    trainer = make({"strategies": [{"lp_reg": {"fraction": 0.3}}, "importance_correction", "bottom_p"]}, max_steps=2)
    trainer.train()
    assert trainer.state.global_step == 2
