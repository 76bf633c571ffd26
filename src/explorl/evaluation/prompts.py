"""Check before sampling that a model can be given a task's prompts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from explorl.core.config import ConfigError
from explorl.models import Policy
from explorl.models.chat_templates import REPLY, template_fault
from explorl.rollout import SamplingParams
from explorl.rollout.requests import prompt_token_ids, render_prompt
from explorl.tasks import Prompt, Task, opens_think
from explorl.tasks.base import checked_prompt

LONGEST = 64
"""Number of the prompts with the most characters that are tokenized to find the longest."""


def fitting_template(task: Task, tokenizer: Any, template: str | None = None) -> str | None:
    """Return the given prompt template, else "chat" for a model with a chat template, else None: the task's default."""
    if template is not None:
        return template
    return "chat" if getattr(tokenizer, "chat_template", None) and "chat" in task.templates else None


def all_opened(tokenizer: Any, prompts: Sequence[Prompt]) -> list[bool]:
    """Return whether each prompt ends with an open ``<think>``, which a chat template may add.

    Only the first prompt of messages is rendered, since one chat template ends them all.
    """
    first = next((prompt for prompt in prompts if not isinstance(prompt, str)), None)
    by_template = first is not None and opens_think(render_prompt(tokenizer, first))
    return [opens_think(prompt) if isinstance(prompt, str) else by_template for prompt in prompts]


def room(policy: Policy, tokens: int) -> float:
    """Return how many tokens the model's context leaves after a prompt; raise ValueError if there are none."""
    context = getattr(policy.model.config, "max_position_embeddings", None)
    if context is not None and tokens >= context:
        raise ValueError(f"a prompt of {tokens} tokens does not fit into the context of {policy.name}: {context}")
    return math.inf if context is None else context - tokens


def token_limits(policy: Policy, prompts: Sequence[Prompt], params: SamplingParams) -> np.ndarray:
    """Return the most tokens of a completion of each prompt: the parameters', or what the model's context leaves."""
    begun = len(policy.tokenizer(params.prefix, add_special_tokens=False)["input_ids"])
    lengths = [len(prompt_token_ids(policy.tokenizer, prompt)) + begun for prompt in prompts]
    return np.minimum(np.max(params.max_tokens), [room(policy, length) for length in lengths]).astype(int)


def fit_into_context(policy: Policy, prompts: Sequence[Prompt], params: SamplingParams) -> tuple[SamplingParams, int]:
    """Return the parameters with a limit that fits after the longest prompt, and the most tokens of both together."""
    longest = max(len(prompt_token_ids(policy.tokenizer, prompt)) for prompt in prompts)
    limit, left = int(np.max(params.max_tokens)), room(policy, longest)
    if left < math.inf:
        limit = min(limit, int(left))
        params = replace(params, max_tokens=limit)
    return params, longest + limit


def check_prompts(
    prompts: Sequence[Any], policy: Policy, task: Task, template: str | None, key: str = "task.template"
) -> None:
    """Raise ConfigError if a prompt is invalid, is made of messages without a chat template, or exceeds the context.

    ``key`` is the option that names the template, for the error.
    """
    if template is not None and template not in task.templates:
        raise ConfigError(f"{key} is {template!r}; {task.name} has {', '.join(task.templates) or 'none: leave it out'}")
    for prompt in prompts:
        checked_prompt(task, prompt)
    template = template or next(iter(task.templates), None)
    if any(not isinstance(prompt, str) for prompt in prompts) and not policy.tokenizer.chat_template:
        raise ConfigError(
            f"{key} is {template!r}, which makes messages, and the model {policy.name!r} has no chat template; use a "
            f"template of text: {_others(task, template)}"
        )
    _check_chat_template(prompts, policy, task, template, key)
    context = getattr(policy.model.config, "max_position_embeddings", None)
    if context is None or not prompts:
        return
    longest = sorted(prompts, key=lambda prompt: len(str(prompt)))[-LONGEST:]
    tokens = max(len(prompt_token_ids(policy.tokenizer, prompt)) for prompt in longest)
    if tokens >= context:
        raise ConfigError(
            f"a prompt of {task.name} has {tokens:,} tokens, and the context of the model {policy.name!r} is "
            f"{context:,}; use a model with a longer one, or a shorter {key} than {template!r}"
        )


def _check_chat_template(prompts: Sequence[Any], policy: Policy, task: Task, template: str | None, key: str) -> None:
    """Check that the model's chat template renders the first and the longest prompts, in bounded time and memory."""
    conversations = [prompt for prompt in prompts if not isinstance(prompt, str)]
    if not conversations:
        return
    longest = max(conversations, key=lambda turns: len(str(turns)))
    fault = template_fault(policy.tokenizer, [conversations[0], [*conversations[0], REPLY], longest])
    if fault is not None:
        raise ConfigError(
            f"{key} is {template!r}, which makes messages, and the chat template of the model {policy.name!r} "
            f"{fault}; correct its chat_template.jinja, or use a template of text: {_others(task, template)}"
        )


def _others(task: Task, template: str | None) -> str:
    return ", ".join(name for name in task.templates if name != template) or "another task"
