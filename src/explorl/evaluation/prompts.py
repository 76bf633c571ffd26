"""Check before sampling that a model can be given a task's prompts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from explorl.core.config import ConfigError
from explorl.models import Policy
from explorl.models.chat_templates import REPLY, template_fault
from explorl.rollout.requests import prompt_token_ids, render_prompt
from explorl.tasks import Prompt, Task, opens_think
from explorl.tasks.base import checked_prompt

LONGEST = 64
"""Number of the prompts with the most characters that are tokenized to find the longest."""


def opens_think_in(tokenizer: Any, prompt: Prompt, prefix: str = "") -> bool:
    """Return whether the rendered prompt ends with an open ``<think>``, which a chat template may add."""
    return opens_think(render_prompt(tokenizer, prompt) + prefix)


def all_opened(tokenizer: Any, prompts: Sequence[Prompt], prefix: str = "") -> list[bool]:
    """Return `opens_think_in` of each prompt.

    Only the first prompt of messages is rendered, since one chat template ends them all. ``prefix`` follows all
    prompts.
    """
    first = next((prompt for prompt in prompts if not isinstance(prompt, str)), None)
    by_template = first is not None and opens_think_in(tokenizer, first)
    ends = [prompt if isinstance(prompt, str) else "<think>" * by_template for prompt in prompts]
    return [opens_think(end + prefix) for end in ends]


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
