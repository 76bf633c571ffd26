"""Check a model's chat template before it is used: it is untrusted Jinja code from the model's author."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from explorl.sandbox.isolated_call import IsolatedFunction, IsolationLimits

SECONDS = 1.0
"""CPU time that a template may use for one conversation."""
REPLY = {"role": "assistant", "content": "42"}
"""A model's turn, for conversations that continue after one."""


def template_fault(tokenizer: Any, conversations: Sequence[Sequence[Mapping[str, Any]]]) -> str | None:
    """Return what is wrong with a tokenizer's chat template for these conversations; None if it renders them.

    The template runs in an isolated process with limits on time and memory.
    """
    tokens = {name: token for name, token in tokenizer.special_tokens_map.items() if isinstance(token, str)}
    return _fault(
        tokenizer.get_chat_template(),
        json.dumps(tokens),
        json.dumps([list(map(dict, turns)) for turns in conversations]),
    )


@lru_cache(maxsize=64)
def _fault(template: str, tokens: str, conversations: str) -> str | None:
    special_tokens = json.loads(tokens)
    messages = [
        {"template": template, "tokens": special_tokens, "conversation": turns} for turns in json.loads(conversations)
    ]
    limits = IsolationLimits(seconds=SECONDS)
    with IsolatedFunction("explorl.sandbox.template_check:refusal", workers=1, limits=limits) as renderer:
        for message, reply in zip(messages, renderer.call_many(messages), strict=True):
            if reply.error is not None:
                return f"{reply.error} with a prompt"
            # Some templates only accept conversations that end with a user turn, and are never used for others.
            if reply.value is not None and message["conversation"][-1]["role"] != "assistant":
                return f"refuses a prompt: {reply.value}"
    return None
