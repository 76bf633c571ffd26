"""Strings that end an answer: whatever samples, they end it, and it is not taken for one that was cut off."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from datasets import Dataset
from trl import GRPOConfig

from explorl.core.config import ConfigError, load_config
from explorl.models import load_policy, tiny_tokenizer
from explorl.strategies import Batch, Strategy
from explorl.tasks import get_task
from explorl.training.grpo.run import grpo_config
from explorl.training.grpo.sampler import why_not_engine
from explorl.training.grpo.stopping import StoppedTokens, configured_stop_strings, cut_at_stops, take_stop_strings
from explorl.training.grpo.trainer import ExplorationTrainer
from explorl.training.run_recorder import PassAtK
from tests.training.conftest import PROMPTS
from tests.training.small_runs import grpo_config as small_config
from tests.training.test_tools_of_trl import make as make_with_tools  # noqa: F401 (a fixture)

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")

STOPS = ["3", "7", "Q", "+1"]
LONGEST = 24


@dataclass(frozen=True)
class Watching(Strategy):
    """Keeps the batches that it sees."""

    seen: list[Batch] = field(default_factory=list)

    def advantages(self, batch: Batch) -> torch.Tensor:
        self.seen.append(batch)
        return batch.advantages


def ends_at(text: str, strings: list[str]) -> bool:
    """Whether one of the strings is at the end and nowhere before; False where there is none at all."""
    ends = [text.find(string) + len(string) for string in strings if string in text]
    assert not ends or min(ends) == len(text), text
    return bool(ends)


def ends_of(trainer: Any) -> list[int]:
    """Tokens with which an answer has ended, by TRL's reckoning."""
    return [*trainer.eos_token_ids, trainer.tokenizer.pad_token_id]


class Rewards:
    """A reward function that keeps what it is asked about."""

    __name__ = "length"

    def __init__(self, of: Callable[[str], float] = lambda text: float(len(text) % 4)) -> None:
        self.of = of
        self.completions: list[str] = []
        self.ids: list[list[int]] = []

    def __call__(self, completions: list[str], completion_ids: list[list[int]], **columns: Any) -> list[float]:
        self.completions += completions
        self.ids += completion_ids
        return [self.of(text) for text in completions]


Make = Callable[..., tuple[Any, Rewards, Watching]]


@pytest.fixture
def make(make_trainer: Callable[..., Any]) -> Make:
    def build(stop: Any, options: dict[str, Any] | None = None, **changes: Any) -> tuple[Any, Rewards, Watching]:
        watching, rewards = Watching(), Rewards()
        settings = {"max_completion_length": LONGEST, "max_steps": 1, "generation_kwargs": stop, **changes}
        trainer = make_trainer(ExplorationTrainer, options={"strategies": [watching], **(options or {})}, **settings)
        trainer.reward_funcs, trainer.reward_func_names = [rewards], ["length"]
        return trainer, rewards, trainer.strategies[0]

    return build


@pytest.mark.parametrize("engine", ["explorl", "generate"])
@pytest.mark.parametrize("stop", [{"stop_strings": STOPS}, {"stop": tuple(STOPS)}, {"stop_strings": "Q"}], ids=str)
def test_answers_end_at_the_first_string(stop: dict[str, Any], engine: str, make: Make) -> None:
    (name, strings), *_ = stop.items()
    trainer, rewards, watching = make(stop, {"engine": engine})
    trainer.train()
    decode, ends = trainer.tokenizer.decode, ends_of(trainer)
    stopped = [ends_at(text, [strings] if isinstance(strings, str) else list(strings)) for text in rewards.completions]
    ended = [ids[-1] in ends for ids in rewards.ids]
    cut = [len(ids) == LONGEST for ids in rewards.ids]
    assert 0 < sum(stopped) < len(stopped)
    for flags in zip(stopped, ended, cut, strict=True):
        assert any(flags)
    assert all(type(ids) is list and decode(ids, skip_special_tokens=True) == text for ids, text in zip(
        rewards.ids, rewards.completions, strict=True))  # fmt: skip
    truncated = [not (flags or other) for flags, other in zip(stopped, ended, strict=True)]
    assert watching.seen[0].truncated.tolist() == truncated
    log = trainer.state.log_history[0]
    assert log["completions/clipped_ratio"] == pytest.approx(sum(truncated) / len(truncated))
    lengths = [len(ids) for ids, was_cut in zip(rewards.ids, truncated, strict=True) if not was_cut]
    assert log["completions/mean_terminated_length"] == pytest.approx(sum(lengths) / len(lengths))
    assert trainer.args.generation_kwargs == {name: strings}


def test_both_ways_to_sample_agree_on_greedy_answers(make: Make) -> None:
    """With beams of one and the same weights, the engine's answers are those of `generate`, cut at the string."""
    texts = []
    for engine in ("explorl", "generate"):
        trainer, rewards, _ = make({"stop": STOPS, "do_sample": False}, {"engine": engine})
        trainer.train()
        texts.append(rewards.completions)
    assert texts[0] == texts[1]
    assert any(ends_at(text, STOPS) for text in texts[0])


@pytest.mark.parametrize("engine", ["explorl", "generate"])
def test_what_a_string_has_ended_is_learnt_from(engine: str, make: Make) -> None:
    """TRL's mask takes out answers that were cut off, and only those."""
    trainer, _, watching = make({"stop": STOPS}, {"engine": engine}, mask_truncated_completions=True)
    trainer.train()
    (batch,) = watching.seen
    learnt = batch.mask.sum(1) > 0
    assert torch.equal(learnt, ~batch.truncated)
    assert 0 < int(learnt.sum()) < len(learnt)


def test_answers_that_were_exchanged_for_others_keep_their_ends(make: Make) -> None:
    trainer, rewards, watching = make({"stop": STOPS}, {"dynamic_sampling": True}, max_steps=3)
    rewards.of = lambda text: float("Q" in text)  # which many a group has nowhere
    recorded: list[list[int]] = []
    trainer.listen(lambda step, columns: recorded.extend(trainer.sampled.rewarded["completion_ids"]))
    trainer.train()
    truncated = [value for batch in watching.seen for value in batch.truncated.tolist()]
    texts = trainer.tokenizer.batch_decode(recorded, skip_special_tokens=True)
    ended = [ends_at(text, STOPS) or ids[-1] in ends_of(trainer) for text, ids in zip(texts, recorded, strict=True)]
    assert truncated == [not has_ended for has_ended in ended]
    assert len(rewards.completions) > len(recorded)  # some were exchanged
    assert any(ends_at(text, STOPS) for text in texts)


def test_settings_serve_a_second_trainer(small_policy: Path, tmp_path: Path) -> None:
    policy = load_policy(str(small_policy), device="cpu")
    args = GRPOConfig(str(tmp_path), generation_kwargs={"stop_strings": STOPS}, bf16=False, use_cpu=True)
    for _ in range(2):
        trainer = ExplorationTrainer(
            model=policy.model,
            reward_funcs=Rewards(),
            args=args,
            train_dataset=Dataset.from_dict({"prompt": PROMPTS}),
            processing_class=policy.tokenizer,
        )
        assert trainer.stop_strings == tuple(STOPS)
        assert "stop_strings" not in trainer.generation_kwargs
        assert trainer.sampler.engine is not None


@pytest.mark.parametrize(
    ("stop", "words"),
    [
        ({"stop_strings": ["a", ""]}, r"\['stop_strings'\] contains an empty string"),
        ({"stop": [["a"], ["b"]]}, r"\['stop'\] is .*; all completions share the same strings"),
        ({"stop": 5}, r"\['stop'\] is 5"),
        ({"stop": "a", "stop_strings": "b"}, "'stop_strings' and 'stop', which mean the same"),
        ({"stop": ""}, r"\['stop'\] contains an empty string"),
        ({"stop": False}, r"\['stop'\] is False"),
        ({"stop": 0}, r"\['stop'\] is 0"),
        ({"stop": ["3", None]}, r"\['stop'\] contains None"),
        ({"stop": iter(["3"])}, r"\['stop'\] is <list_iterator.*>, which can be read only once"),
        ({"stop": "\udcff"}, "which can't be sampled"),
    ],
)
def test_strings_that_cannot_be_used_are_refused(stop: dict[str, Any], words: str, make: Make) -> None:
    with pytest.raises(ValueError, match=words):
        make(stop)


@pytest.mark.parametrize("engine", ["explorl", "generate"])
@pytest.mark.parametrize("stop", [{"stop": ()}, {"stop": []}, {"stop_strings": []}, {"stop_strings": ()}], ids=str)
def test_no_strings_are_none(stop: dict[str, Any], engine: str, make: Make) -> None:
    trainer, rewards, _ = make(stop, {"engine": engine})
    trainer.train()
    assert trainer.stop_strings == ()
    assert max(map(len, rewards.ids)) == LONGEST


@pytest.mark.parametrize("engine", ["explorl", "generate"])
def test_an_array_of_strings(engine: str, make: Make) -> None:
    trainer, _, _ = make({"stop": np.array(STOPS)}, {"engine": engine})
    assert trainer.stop_strings == tuple(STOPS)


@pytest.mark.parametrize("engine", ["explorl", "generate"])
@pytest.mark.parametrize("stop", [None, {"stop": ["Q"]}], ids=str)
def test_a_model_that_has_strings_of_its_own(stop: Any, engine: str, make: Make) -> None:
    """They count where none are given, and nothing asks for a tokenizer."""
    trainer, rewards, _ = make(stop, {"engine": engine})
    trainer.model.generation_config.stop_strings = ["3", "7"]
    trainer.stop_strings = take_stop_strings(trainer)
    assert not why_not_engine(trainer)
    trainer.train()
    strings = ["Q"] if stop else ["3", "7"]
    assert sum(ends_at(text, strings) for text in rewards.completions) > 0
    assert trainer.model.generation_config.stop_strings == ["3", "7"]


def test_a_function_that_samples_by_itself(make: Make) -> None:
    """Its answers stay as they are; those that a string ends are not cut off."""
    tokenizer = tiny_tokenizer()
    texts = ["1+23", "3+12"]

    def rollout(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        assert trainer.stop_strings == ("3",)
        ids = [tokenizer.encode(texts[row % 2], add_special_tokens=False) for row in range(len(prompts))]
        prompt_ids = [tokenizer.encode("1", add_special_tokens=False)] * len(prompts)
        return {"prompt_ids": prompt_ids, "completion_ids": ids, "logprobs": None}

    trainer, rewards, watching = make({"stop": ["3"]}, {"rollout_func": rollout})
    trainer.train()
    assert rewards.completions[:2] == texts
    assert watching.seen[0].truncated.tolist() == [text == "3+12" for text in rewards.completions]
    assert trainer.rollout_func is rollout


def test_held_out_answers_end_at_the_same_strings(make: Make) -> None:
    trainer, _, _ = make({"stop": STOPS})
    scored: list[str] = []

    def reward(completions: list[str], **_: Any) -> list[float]:
        scored.extend(completions)
        return [0.0] * len(completions)

    held_out = Dataset.from_dict({"prompt": PROMPTS[:2]})
    callback = PassAtK(held_out, reward, samples=8)
    trainer.add_callback(callback)
    trainer.train()
    assert sum(ends_at(text, STOPS) for text in scored) > 0
    scored.clear()
    PassAtK(held_out, reward, samples=8, stop=()).on_train_end(
        trainer.args, trainer.state, None, model=trainer.model, processing_class=trainer.tokenizer
    )
    assert any("3" in text[:-1] for text in scored)


def test_rewards_see_the_whole_last_token_with_calls_and_without(tmp_path: Path) -> None:
    policy, task, rewards = load_policy("tiny-tools", device="cpu"), get_task("products"), Rewards()
    prompts = [task.prompt(problem) for problem in task.problems("train", limit=4)]
    trainer = ExplorationTrainer(
        model=policy.model,
        reward_funcs=rewards,
        args=small_config(
            tmp_path, {"generation_kwargs": {"stop": ["</ans"]}, "max_steps": 1, "max_completion_length": 80}
        ),
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        processing_class=policy.tokenizer,
        interpreter="calculator",
    )
    rollouts: list[Any] = []
    trainer.listen(lambda step, columns: rollouts.extend(trainer.sampled.transcripts))
    trainer.train()
    ends = {
        (bool(rollout.calls), text[-9:])
        for rollout, text in zip(rollouts, rewards.completions, strict=True)
        if "</" in text
    }
    assert (True, "</answer>") in ends
    assert {text for _, text in ends} == {"</answer>"}


def test_vllm_calls_them_otherwise(make: Make) -> None:
    with pytest.raises(ValueError, match="'stop_strings', which vLLM calls 'stop'"):
        make({"stop_strings": ["a"]}, {"engine": "vllm"})


def test_a_tool_whose_calls_they_would_cut_is_refused(make: Make) -> None:
    with pytest.raises(
        ValueError, match="stop is '=', which overlaps with '=' that every call of tool 'calculator' ends with"
    ):
        make({"stop": ["="]}, {"interpreter": "calculator"})


@pytest.mark.parametrize("engine", ["explorl", "generate"])
def test_in_conversations_with_tools(engine: str, make_with_tools: Callable[..., Any]) -> None:  # noqa: F811
    """The last turn may end with a string, and with it the conversation. None of them is in a special token."""
    watching = Watching()
    trainer = make_with_tools(
        {"strategies": [watching], "engine": engine}, generation_kwargs={"stop": ["j", "m", "q", "Q"]}
    )
    trainer.train()
    (batch,) = trainer.strategies[0].seen
    ids = trainer.sampled.rewarded["completion_ids"]
    last = [trainer.tokenizer.decode(one[-1:]) for one in ids]
    ended = [text in "jmqQ" or one[-1] in ends_of(trainer) for one, text in zip(ids, last, strict=True)]
    assert batch.truncated.tolist() == [not one for one in ended]
    assert 0 < sum(text in "jmqQ" for text in last) < len(last)


# ---------------------------------------------------------------- parts


def test_tokens_of_an_answer_that_was_stopped() -> None:
    row = StoppedTokens([5, 6, 7], end=2)
    assert row[-1] == 2
    assert (row[2], row[-2], row[1:], list(row), len(row)) == (7, 6, [6, 7], [5, 6, 7], 3)
    assert torch.tensor(row).tolist() == [5, 6, 7]
    assert tiny_tokenizer().batch_decode([row]) == tiny_tokenizer().batch_decode([[5, 6, 7]])
    later, earlier = [1, 2] + row, row + [1, 2]  # noqa: RUF005 (as TRL does)
    assert isinstance(later, StoppedTokens)
    assert (list(later), later[-1]) == ([1, 2, 5, 6, 7], 2)
    assert type(earlier) is list
    assert earlier == [5, 6, 7, 1, 2]
    again = pickle.loads(pickle.dumps(row))  # on its way to another process
    assert isinstance(again, StoppedTokens)
    assert (list(again), again[-1]) == ([5, 6, 7], 2)


def test_the_first_string_to_be_complete_counts() -> None:
    tokenizer = tiny_tokenizer()
    texts = ["12+34=", "1234", "12", "", "34"]
    rows = cut_at_stops([tokenizer.encode(text) for text in texts], ["34", "+3"], tokenizer, end=9)
    assert tokenizer.batch_decode(rows) == ["12+3", "1234", "12", "", "34"]
    assert [isinstance(row, StoppedTokens) for row in rows] == [True, True, False, False, True]
    (late,) = cut_at_stops([tokenizer.encode("34+34")], ["34"], tokenizer, end=9, min_tokens=2)
    assert tokenizer.decode(late) == "34+34"
    assert configured_stop_strings(None) == configured_stop_strings({"top_k": 3, "stop": None}) == ()


# ---------------------------------------------------------------- configurations


def test_a_configuration_names_them(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    for stop, strings in (("</answer>", ["</answer>"]), (["a", "b"], ["a", "b"]), ([], [])):
        file.write_text(yaml.safe_dump({"task": {"name": "countdown-mini"}, "rollout": {"stop": stop}}))
        config = load_config(file)
        assert config.rollout.stop == strings
        args = grpo_config(config, str(tmp_path))
        assert args.generation_kwargs == ({"stop": strings} if strings else None)
        assert config.rollout.limits()["stop"] == (strings or None)
    for bad in ("['']", "5", "[a, 3]", "", "###", "yes"):
        file.write_text(f"task: {{name: countdown-mini}}\nrollout:\n  stop: {bad}\n")
        with pytest.raises(ConfigError, match=r"rollout.stop: it is read as .*; use a text such as '</answer>'"):
            load_config(file)


def test_a_token_of_the_users_own_ends_answers_too(make: Make) -> None:
    """TRL looks for the tokenizer's and the model's: to it, an answer that ends with another one was cut off."""
    own = tiny_tokenizer().convert_tokens_to_ids(list("0123456789abcdefgh"))
    trainer, rewards, watching = make({"eos_token_id": own}, mask_truncated_completions=True)
    trainer.train()
    assert not set(own) & set(trainer.eos_token_ids)
    cut = [ids[-1] not in (*own, *ends_of(trainer)) for ids in rewards.ids]
    assert all(type(ids) is list for ids in rewards.ids)
    assert not all(cut)
    assert watching.seen[0].truncated.tolist() == cut
    log = trainer.state.log_history[0]
    assert log["completions/clipped_ratio"] == pytest.approx(sum(cut) / len(cut))
    assert log["grad_norm"] > 0
