"""Sample and verify the responses of an iteration: the pool for filters and selectors."""

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
class PromptedProblem:
    """A problem with its prompt."""

    problem: Problem
    prompt: Prompt


class PoolSampler:
    """Samples one policy and verifies its responses."""

    def __init__(self, config: Config, policy: Policy, task: Task, mark: str | None) -> None:
        self.config, self.policy, self.task, self.mark = config, policy, task, mark
        dtype = getattr(torch, config.model.evaluation_dtype)
        self.engine = Engine(policy.model, policy.tokenizer, batch_size=config.evaluation.batch_size, dtype=dtype)
        self.engine_name = self._choose_engine()

    def sample(
        self, problems: Sequence[PromptedProblem], seed: int, on_finish: Callable[[int], None] | None = None
    ) -> list[Sample]:
        """Return `rft.samples` verified responses per problem, in order; the same seed gives the same ones."""
        prompts, count = [item.prompt for item in problems], self.config.rft.samples
        limits = [limit_of(self.config, self.policy, prompt) for prompt in prompts]
        params = replace(sampling_params(self.config), seed=seed)
        tick = on_finish or (lambda _: None)
        rollouts: Sequence[Rollout | reference.Completion]
        if self.engine_name == "explorl":
            params = replace(params, max_tokens=limits)
            rollouts = self.engine.generate(prompts, count, params, on_finish=lambda _: tick(1)).check()
        else:
            params = replace(params, max_tokens=min(limits))
            model, tokenizer = self.policy.model, self.policy.tokenizer
            rollouts = reference.generate(model, tokenizer, prompts, count, params, on_batch=tick)
        return self._verify(problems, rollouts)

    def prompt_tokens(self, problems: Sequence[PromptedProblem]) -> int:
        """Count the prompt tokens, once per response."""
        return self.config.rft.samples * sum(len(self._ids(item.prompt)) for item in problems)

    def release(self) -> None:
        """Release the engine's memory."""
        self.engine.release()

    def _ids(self, prompt: Prompt) -> list[int]:
        return prompt_token_ids(self.policy.tokenizer, prompt)

    def _choose_engine(self) -> Literal["explorl", "generate"]:
        """Return the engine to sample with: `rollout.engine`, or what the model supports."""
        configured = self.config.rollout.engine
        if configured == "generate":
            return "generate"
        try:
            self.engine.check(self.config.rollout.max_tokens)
        except UnsupportedModel as error:
            if configured == "explorl":
                raise
            warnings.warn(
                f"sampling with model.generate, which is slower than Explorl's engine: {error.reason}", stacklevel=2
            )
            return "generate"
        return "explorl"

    def _verify(
        self, problems: Sequence[PromptedProblem], rollouts: Sequence[Rollout | reference.Completion]
    ) -> list[Sample]:
        """Verify every response as sampled and, if it has an answer, cut after the first one."""
        ends = [None if self.mark is None else first_answer_end(rollout.text, self.mark) for rollout in rollouts]
        cuts = [
            index
            for index, (rollout, end) in enumerate(zip(rollouts, ends, strict=True))
            if end is not None and (end < len(rollout.text) or rollout.finish_reason == "length")
        ]
        opened = all_opened(self.policy.tokenizer, [item.prompt for item in problems])
        texts = [rollout.text for rollout in rollouts] + [rollouts[index].text[: ends[index]] for index in cuts]
        indices = [rollout.prompt_index for rollout in rollouts] + [rollouts[index].prompt_index for index in cuts]
        verdicts = verdicts_of(
            self.task, texts, [problems[index].problem for index in indices], [opened[index] for index in indices]
        )
        samples = []
        for rollout, verdict, end in zip(rollouts, verdicts, ends, strict=False):
            count = len(rollout.token_ids)
            samples.append(
                Sample(
                    problems[rollout.prompt_index].problem.id, rollout.sample_index, rollout.text, verdict.correct,
                    verdict.answer, count, mean(rollout, "entropy", count), mean(rollout, "branching", count),
                    rollout.finish_reason != "length", end,
                )
            )  # fmt: skip
        for index, text, verdict in zip(cuts, texts[len(rollouts) :], verdicts[len(rollouts) :], strict=True):
            rollout = rollouts[index]
            count = tokens_up_to(rollout.token_ids, len(text), self.policy.tokenizer)
            cut = replace(
                samples[index], text=text, correct=verdict.correct, answer=verdict.answer, tokens=count,
                entropy=mean(rollout, "entropy", count), branching=mean(rollout, "branching", count), finished=True,
            )  # fmt: skip
            samples[index] = replace(samples[index], cut=cut)
        return samples


def sampling_params(config: Config) -> SamplingParams:
    """Return the sampling parameters of `rollout`."""
    rollout = config.rollout
    return SamplingParams(
        temperature=rollout.temperature, top_p=rollout.top_p, top_k=rollout.top_k, min_p=rollout.min_p,
        repetition_penalty=rollout.repetition_penalty, max_tokens=rollout.max_tokens, stop=rollout.stop,
    )  # fmt: skip


def limit_of(config: Config, policy: Policy, prompt: Prompt) -> int:
    """Return the token limit of a response: `rollout.max_tokens`, or what the model's context leaves."""
    context = getattr(policy.model.config, "max_position_embeddings", None)
    limit = config.rollout.max_tokens
    if context is None:
        return limit
    return min(limit, max(1, int(context) - len(prompt_token_ids(policy.tokenizer, prompt))))


def check_room(config: Config, policy: Policy, prompts: Sequence[Prompt]) -> None:
    """Raise `ConfigError` if the fit would truncate a response of full length at `sft.max_length`."""
    longest = max(
        len(prompt_token_ids(policy.tokenizer, prompt)) + limit_of(config, policy, prompt)
        for prompt in sorted(prompts, key=lambda prompt: len(str(prompt)))[-64:]
    )
    if longest > config.sft.max_length:
        raise ConfigError(
            f"sft.max_length is {config.sft.max_length}, but a prompt with a response of rollout.max_tokens = "
            f"{config.rollout.max_tokens} may have {longest} tokens and would be truncated; use {longest} or more"
        )


def mean(rollout: Rollout | reference.Completion, name: str, tokens: int) -> float | None:
    """Return the mean of a token statistic over the first tokens; 0 for none, None if not recorded."""
    values: Tensor | None = getattr(rollout, name, None)
    if values is None:
        return None
    return float(values[:tokens].double().mean()) if min(tokens, len(values)) else 0.0


def tokens_up_to(ids: Sequence[int], characters: int, tokenizer: Any) -> int:
    """Return the fewest tokens whose text has that many characters, by bisection over decoded prefixes."""
    low, high = 0, len(ids)
    while low < high:
        middle = (low + high) // 2
        if len(tokenizer.decode(ids[:middle], skip_special_tokens=True)) >= characters:
            high = middle
        else:
            low = middle + 1
    return low
