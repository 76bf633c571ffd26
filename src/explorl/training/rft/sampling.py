"""Draws the responses of an iteration and judges them: the pool that filters and selectors choose from."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from explorl.core.config import Config, ConfigError
from explorl.evaluation.prompts import all_opened
from explorl.models import Policy
from explorl.rollout import Engine, Rollout, SamplingParams, UnsupportedModel
from explorl.rollout.backends import generate as reference
from explorl.rollout.requests import prompt_token_ids
from explorl.tasks import Problem, Prompt, Task
from explorl.tasks.base import verdicts_of
from explorl.training.rft.answer_spans import first_answer_end
from explorl.training.rft.samples import Sample


@dataclass(frozen=True)
class Ask:
    """A problem as it is asked."""

    problem: Problem
    prompt: Prompt


class Sampler:
    """Samples one policy, and verifies what it says."""

    def __init__(self, config: Config, policy: Policy, task: Task, mark: str | None) -> None:
        self.config, self.policy, self.task, self.mark = config, policy, task, mark
        dtype = getattr(torch, config.model.evaluation_dtype)
        self.engine = Engine(policy.model, policy.tokenizer, batch_size=config.evaluation.batch_size, dtype=dtype)
        self.by = self._by()

    def draw(self, asked: Sequence[Ask], seed: int, on_finish: Callable[[int], None] | None = None) -> list[Sample]:
        """`rft.samples` responses to each, in their order; the same seed draws the same ones."""
        prompts, count = [one.prompt for one in asked], self.config.rft.samples
        limits = [limit_of(self.config, self.policy, prompt) for prompt in prompts]
        params = replace(sampling_params(self.config), seed=seed)
        tick = on_finish or (lambda _: None)
        drawn: Sequence[Rollout | reference.Completion]
        if self.by == "explorl":
            params = replace(params, max_tokens=limits)
            drawn = self.engine.generate(prompts, count, params, on_finish=lambda _: tick(1)).check()
        else:
            params = replace(params, max_tokens=min(limits))
            model, tokenizer = self.policy.model, self.policy.tokenizer
            drawn = reference.generate(model, tokenizer, prompts, count, params, on_batch=tick)
        return self._judged(asked, drawn)

    def prompt_tokens(self, asked: Sequence[Ask]) -> int:
        """Tokens of the prompts, each counted once a response."""
        return self.config.rft.samples * sum(len(self._ids(one.prompt)) for one in asked)

    def release(self) -> None:
        """Gives the memory of the engine back."""
        self.engine.release()

    def _ids(self, prompt: Prompt) -> list[int]:
        return prompt_token_ids(self.policy.tokenizer, prompt)

    def _by(self) -> Literal["explorl", "generate"]:
        """What samples: as `rollout.engine` says, or as the model allows."""
        wanted = self.config.rollout.engine
        if wanted == "generate":
            return "generate"
        try:
            self.engine.check(self.config.rollout.max_tokens)
        except UnsupportedModel as error:
            if wanted == "explorl":
                raise
            warnings.warn(
                f"sampling by model.generate, which is slower than Explorl's engine: {error.reason}", stacklevel=2
            )
            return "generate"
        return "explorl"

    def _judged(self, asked: Sequence[Ask], drawn: Sequence[Rollout | reference.Completion]) -> list[Sample]:
        ends = [None if self.mark is None else first_answer_end(one.text, self.mark) for one in drawn]
        cuts = [
            index
            for index, (one, end) in enumerate(zip(drawn, ends, strict=True))
            if end is not None and (end < len(one.text) or one.finish_reason == "length")
        ]
        opened = all_opened(self.policy.tokenizer, [one.prompt for one in asked])
        texts = [one.text for one in drawn] + [drawn[index].text[: ends[index]] for index in cuts]
        places = [one.prompt_index for one in drawn] + [drawn[index].prompt_index for index in cuts]
        verdicts = verdicts_of(
            self.task, texts, [asked[place].problem for place in places], [opened[place] for place in places]
        )
        samples = []
        for one, verdict, end in zip(drawn, verdicts, ends, strict=False):
            count = len(one.token_ids)
            samples.append(
                Sample(
                    asked[one.prompt_index].problem.id, one.sample_index, one.text, verdict.correct, verdict.answer,
                    count, mean(one, "entropy", count), mean(one, "branching", count),
                    one.finish_reason != "length", end,
                )
            )  # fmt: skip
        for index, text, verdict in zip(cuts, texts[len(drawn) :], verdicts[len(drawn) :], strict=True):
            one = drawn[index]
            count = tokens_up_to(one.token_ids, len(text), self.policy.tokenizer)
            cut = replace(
                samples[index], text=text, correct=verdict.correct, answer=verdict.answer, tokens=count,
                entropy=mean(one, "entropy", count), branching=mean(one, "branching", count), finished=True,
            )  # fmt: skip
            samples[index] = replace(samples[index], cut=cut)
        return samples


def sampling_params(config: Config) -> SamplingParams:
    """How responses are drawn, as `rollout` says."""
    rollout = config.rollout
    return SamplingParams(
        temperature=rollout.temperature, top_p=rollout.top_p, top_k=rollout.top_k, min_p=rollout.min_p,
        repetition_penalty=rollout.repetition_penalty, max_tokens=rollout.max_tokens, stop=rollout.stop,
    )  # fmt: skip


def limit_of(config: Config, policy: Policy, prompt: Prompt) -> int:
    """Most tokens of a response: `rollout.max_tokens`, or what the model's context leaves."""
    context = getattr(policy.model.config, "max_position_embeddings", None)
    limit = config.rollout.max_tokens
    if context is None:
        return limit
    return min(limit, max(1, int(context) - len(prompt_token_ids(policy.tokenizer, prompt))))


def check_room(config: Config, policy: Policy, prompts: Sequence[Prompt]) -> None:
    """That a response of any length can be learnt whole: the fit cuts examples off at `sft.max_length`."""
    longest = max(
        len(prompt_token_ids(policy.tokenizer, prompt)) + limit_of(config, policy, prompt)
        for prompt in sorted(prompts, key=lambda prompt: len(str(prompt)))[-64:]
    )
    if longest > config.sft.max_length:
        raise ConfigError(
            f"sft.max_length is {config.sft.max_length}, and a prompt with a response of rollout.max_tokens = "
            f"{config.rollout.max_tokens} may have {longest} tokens, the last of which would not be learnt; use "
            f"{longest} or more"
        )


def mean(drawn: Rollout | reference.Completion, name: str, tokens: int) -> float | None:
    """Mean of a record over the first tokens; 0 of none, None where it was not recorded."""
    values: Tensor | None = getattr(drawn, name, None)
    if values is None:
        return None
    return float(values[:tokens].double().mean()) if min(tokens, len(values)) else 0.0


def tokens_up_to(ids: Sequence[int], characters: int, tokenizer: Any) -> int:
    """The fewest tokens whose text has so many characters: found by halving, a decoded prefix a time."""
    low, high = 0, len(ids)
    while low < high:
        middle = (low + high) // 2
        if len(tokenizer.decode(ids[:middle], skip_special_tokens=True)) >= characters:
            high = middle
        else:
            low = middle + 1
    return low
