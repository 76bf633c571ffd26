"""Sample completions of problems and verify them: what evaluations, RFT and analyses of completions are built on.

engine = open_engine(policy)
asked = prompted_problems(policy.tokenizer, problems, [task.prompt(problem) for problem in problems])
samples = sample_and_verify(engine, task, asked, 8, SamplingParams(max_tokens=512))
samples[0].verdict.correct
"""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
import torch

from explorl.models import Policy
from explorl.rollout import Engine, Rollout, Rollouts, SamplingParams, UnsupportedModel
from explorl.rollout.backends import generate as reference
from explorl.rollout.backends.generate import Completion
from explorl.rollout.backends.vllm import VllmEngine
from explorl.rollout.requests import render_prompt
from explorl.rollout.tool_use import ToolUse, generate_with_tools
from explorl.sandbox.interpreter_pool import InterpreterPool
from explorl.tasks import Problem, Prompt, Task, Verdict, opens_think
from explorl.tasks.base import verdicts_of


@dataclass(frozen=True)
class PromptedProblem:
    """A problem with its prompt."""

    problem: Problem
    prompt: Prompt | Sequence[int]
    """Text, messages or token ids."""
    rendered: str
    """The prompt as the model sees it."""
    opened: bool
    """True if a completion begins inside ``<think>``."""
    begun: Sequence[int] = ()
    """The first tokens of the completion, if the prompt ends with them; they are verified with what is sampled."""

    @cached_property
    def digest(self) -> str | None:
        """The `data_digest` of the problem."""
        return data_digest(self.problem)


def data_digest(problem: Problem) -> str | None:
    """Return a digest of what a problem's verdicts depend on, or None if that is not JSON."""
    try:
        return hashlib.blake2b(json.dumps(problem.data, sort_keys=True).encode(), digest_size=8).hexdigest()
    except (TypeError, ValueError):
        return None


def prompted_problems(
    tokenizer: Any, problems: Sequence[Problem], prompts: Sequence[Prompt], prefix: str = ""
) -> list[PromptedProblem]:
    """Return problems with their prompts; ``prefix`` is what the engine adds to all prompts."""
    rendered = [render_prompt(tokenizer, prompt) for prompt in prompts]
    return [
        PromptedProblem(problem, prompt, text, opens_think(text + prefix))
        for problem, prompt, text in zip(problems, prompts, rendered, strict=True)
    ]


@dataclass(frozen=True)
class VerifiedSample:
    """A completion with its verdict."""

    problem_index: int
    sample: int
    """Index among the problem's completions."""
    problem: PromptedProblem
    completion: Rollout | Completion
    verdict: Verdict


# ---------------------------------------------------------------------------- engines
EngineName = Literal["explorl", "generate", "vllm"]


@dataclass(frozen=True)
class ReferenceEngine:
    """Samples by `model.generate`, which records no token statistics."""

    model: Any
    tokenizer: Any
    batch_size: int = 64

    def generate(
        self, prompts: Sequence[Any], n: int, params: SamplingParams, on_finish: Callable[[None], object]
    ) -> list[Completion]:
        """Sample ``n`` completions of each prompt; ``on_finish`` gets None for each, after its batch."""

        def finish(count: int) -> None:
            for _ in range(count):
                on_finish(None)

        return reference.generate(
            self.model, self.tokenizer, prompts, n, params, batch_size=self.batch_size, on_batch=finish
        )

    def release(self) -> None:
        """Do nothing: no memory is held between calls."""


AnyEngine = Engine | VllmEngine | ReferenceEngine


def open_engine(
    policy: Policy,
    name: EngineName | None = None,
    *,
    longest: int = 0,
    batch_size: int | None = None,
    dtype: torch.dtype | None = None,
    **vllm_options: Any,
) -> AnyEngine:
    """Return an engine for sequences of up to ``longest`` tokens.

    None is Explorl's engine if it supports the model, otherwise `model.generate` with a warning. Raise
    `UnsupportedModel` if Explorl's is named and does not. vLLM starts with the policy's weights.
    """
    if name == "vllm":
        if batch_size is not None:
            vllm_options["max_num_seqs"] = batch_size
        return VllmEngine.colocated(policy.model, policy.tokenizer, **vllm_options)
    if name != "generate":
        engine = Engine(policy.model, policy.tokenizer, batch_size=batch_size, dtype=dtype)
        try:
            engine.check(longest)
            return engine
        except UnsupportedModel as error:
            if name == "explorl":
                raise
            warnings.warn(
                f"sampling by model.generate, which is slower than Explorl's engine: {error.reason}", stacklevel=3
            )
    return ReferenceEngine(policy.model, policy.tokenizer, batch_size or 64)


# ---------------------------------------------------------------------------- sampling and verifying
def sample_and_verify(
    engine: AnyEngine,
    task: Task,
    problems: Sequence[PromptedProblem],
    samples: int,
    params: SamplingParams,
    *,
    wanted: np.ndarray | None = None,
    tools: ToolUse | None = None,
    pool: InterpreterPool | None = None,
    on_finish: Callable[[int], object] | None = None,
    keep_failed: bool = False,
) -> list[VerifiedSample]:
    """Sample completions of every problem and verify them together; return them problem by problem.

    Args:
        wanted: Which completions are verified and returned, as problems × samples; None is all. The others keep the
            numbering, and with it the random numbers, of a call for all of them; ``params`` should limit their length.
        tools: A tool that completions may call, with ``pool``, its interpreters. Only the policy's own words are
            verified.
        on_finish: Called with a number of completions when they are sampled.
        keep_failed: Return completions that failed too, with finish_reason "error"; otherwise they raise RuntimeError.
    """

    def finish(rollout: Any) -> None:
        if on_finish is None:
            return
        if wanted is None or rollout is None or wanted[rollout.prompt_index, rollout.sample_index]:
            on_finish(1)

    prompts = [problem.prompt for problem in problems]
    if tools is None:
        completions = engine.generate(prompts, samples, params, on_finish=finish)
    else:
        assert isinstance(engine, Engine)
        uses = None if wanted is None else (wanted.ravel() * tools.tool.max_calls).tolist()
        completions = generate_with_tools(
            engine, prompts, samples, params, tools, uses=uses, pool=pool, on_finish=finish
        )
    if isinstance(completions, Rollouts) and not keep_failed:
        completions.check()
    chosen = [c for c in completions if wanted is None or wanted[c.prompt_index, c.sample_index]]
    asked = [problems[completion.prompt_index] for completion in chosen]
    texts = [own_text(completion, problem, engine) for completion, problem in zip(chosen, asked, strict=True)]
    return [
        VerifiedSample(completion.prompt_index, completion.sample_index, problem, completion, verdict)
        for completion, problem, verdict in zip(chosen, asked, verify_texts(task, texts, asked), strict=True)
    ]


def verify_texts(task: Task, texts: Sequence[str], problems: Sequence[PromptedProblem]) -> list[Verdict]:
    """Verify each completion by its problem."""
    if not texts:
        return []
    return verdicts_of(task, texts, [each.problem for each in problems], [each.opened for each in problems])


def own_text(completion: Rollout | Completion, problem: PromptedProblem, engine: AnyEngine) -> str:
    """Return the text that answers are parsed from: with what the prompt begins, without the output of tools."""
    if problem.begun:
        return str(engine.tokenizer.decode([*problem.begun, *completion.token_ids], skip_special_tokens=True))
    return completion.own_text if isinstance(completion, Rollout) else completion.text
