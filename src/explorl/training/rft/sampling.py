"""Sample and verify the responses of an iteration: the pool for filters and selectors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from explorl.core.config import Config, ConfigError
from explorl.evaluation.completions import Columns, completion_columns
from explorl.evaluation.prompts import token_limits
from explorl.evaluation.sample import (
    ReferenceEngine,
    VerifiedSample,
    open_engine,
    prompted_problems,
    sample_and_verify,
    verify_texts,
)
from explorl.models import Policy
from explorl.rollout import SamplingParams
from explorl.rollout.requests import prompt_token_ids
from explorl.tasks import Problem, Prompt, Task
from explorl.training.rft.answer_spans import first_answer_end
from explorl.training.rft.samples import Sample, to_columns


class PoolSampler:
    """Samples one policy and verifies its responses."""

    def __init__(self, config: Config, policy: Policy, task: Task, mark: str | None) -> None:
        self.config, self.policy, self.task, self.mark = config, policy, task, mark
        self.engine = open_engine(
            policy, config.rollout.engine, longest=config.rollout.max_tokens,
            batch_size=config.evaluation.batch_size, dtype=getattr(torch, config.model.evaluation_dtype),
        )  # fmt: skip

    def sample(
        self,
        problems: Sequence[Problem],
        prompts: Sequence[Prompt],
        seed: int,
        on_finish: Callable[[int], object] | None = None,
    ) -> Columns:
        """Return `rft.samples` verified responses per problem, in order; the same seed gives the same ones."""
        lengths = [len(prompt_token_ids(self.policy.tokenizer, prompt)) for prompt in prompts]
        params = sampling_params(self.config)
        limits = token_limits(self.policy, prompts, params).tolist()
        max_tokens = min(limits) if isinstance(self.engine, ReferenceEngine) else limits
        verified = sample_and_verify(
            self.engine,
            self.task,
            prompted_problems(self.policy.tokenizer, problems, prompts),
            self.config.rft.samples,
            replace(params, seed=seed, max_tokens=max_tokens),
            on_finish=on_finish,
        )
        columns = completion_columns(verified, self.mark) | to_columns(self._pool(verified))
        return columns | {"prompt_tokens": [lengths[each.problem_index] for each in verified]}

    def _pool(self, verified: Sequence[VerifiedSample]) -> list[Sample]:
        """Return the responses as sampled and, where text follows an answer, also cut after the first one."""
        pool, cuts = [], {}
        for index, each in enumerate(verified):
            rollout, verdict, count = each.completion, each.verdict, len(each.completion.token_ids)
            finished = rollout.finish_reason != "length"
            end = None if self.mark is None else first_answer_end(rollout.text, self.mark)
            if end is not None and (end < len(rollout.text) or not finished):
                cuts[index] = rollout.text[:end]
            pool.append(
                Sample(
                    each.problem.problem.id, each.sample, rollout.text, verdict.correct, verdict.answer, count,
                    mean(rollout, "entropy", count), mean(rollout, "branching", count), finished, end,
                )
            )  # fmt: skip
        verdicts = verify_texts(self.task, list(cuts.values()), [verified[index].problem for index in cuts])
        for (index, text), verdict in zip(cuts.items(), verdicts, strict=True):
            rollout = verified[index].completion
            count = tokens_up_to(rollout.token_ids, len(text), self.policy.tokenizer)
            cut = replace(
                pool[index], text=text, correct=verdict.correct, answer=verdict.answer, tokens=count,
                entropy=mean(rollout, "entropy", count), branching=mean(rollout, "branching", count), finished=True,
            )  # fmt: skip
            pool[index] = replace(pool[index], cut=cut)
        return pool


def sampling_params(config: Config) -> SamplingParams:
    """Return the sampling parameters of `rollout`."""
    rollout = config.rollout
    return SamplingParams(
        temperature=rollout.temperature, top_p=rollout.top_p, top_k=rollout.top_k, min_p=rollout.min_p,
        repetition_penalty=rollout.repetition_penalty, max_tokens=rollout.max_tokens, stop=rollout.stop,
    )  # fmt: skip


def check_room(config: Config, policy: Policy, prompts: Sequence[Prompt]) -> None:
    """Raise `ConfigError` if the fit would truncate a response of full length at `sft.max_length`."""
    candidates = sorted(prompts, key=lambda prompt: len(str(prompt)))[-64:]
    lengths = [len(prompt_token_ids(policy.tokenizer, prompt)) for prompt in candidates]
    longest = int((token_limits(policy, candidates, sampling_params(config)) + lengths).max())
    if longest > config.sft.max_length:
        raise ConfigError(
            f"sft.max_length is {config.sft.max_length}, but a prompt with a response of rollout.max_tokens = "
            f"{config.rollout.max_tokens} may have {longest} tokens and would be truncated; use {longest} or more"
        )


def mean(rollout: Any, name: str, tokens: int) -> float | None:
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
