"""Render the chat template of a model in an isolated process (`explorl.sandbox.isolated_call`): some never end.

Imports nothing of Explorl and so no torch, so that it starts quickly.
"""

from __future__ import annotations

from typing import Any


def prepare(_: Any) -> None:  # pragma: no cover
    """Import the renderer before the process isolates itself."""
    from transformers.utils import chat_template_utils  # noqa: F401


def refusal(message: dict[str, Any], _: Any = None) -> str | None:  # pragma: no cover
    """Return the error of rendering a message's conversation with its template; None if it renders."""
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
