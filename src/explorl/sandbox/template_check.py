"""Renders chat templates that came with a model, in a sealed process (`explorl.sandbox.isolated_call`): some never end.

It imports nothing of Explorl, so it holds no torch and starts at once.
"""

from __future__ import annotations

from typing import Any


def prepare(_: Any) -> None:  # pragma: no cover (another process)
    """Import what renders, before a template may do anything."""
    from transformers.utils import chat_template_utils  # noqa: F401


def refusal(message: dict[str, Any], _: Any = None) -> str | None:  # pragma: no cover (another process)
    """Return why a template does not render the conversation of a message; None if it does."""
    from transformers.utils.chat_template_utils import render_jinja_template

    try:
        render_jinja_template(
            [message["conversation"]],
            chat_template=message["template"],
            add_generation_prompt=message["conversation"][-1]["role"] != "assistant",
            **message["tokens"],
        )
    except MemoryError:
        raise
    except Exception as error:
        line = getattr(error, "lineno", None)
        return f"{f'line {line}: ' if line else ''}{error}" or type(error).__name__
    return None
