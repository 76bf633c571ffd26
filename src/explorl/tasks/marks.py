r"""How prompts ask for an answer to be marked, such as ``<answer>``, ``\boxed{`` or ``####``."""

from __future__ import annotations

BOXED = r"\boxed{"
_ASKED = {r"\boxed": BOXED, "####": "####", "<answer>": "<answer>"}
"""What a prompt has in it, and what an answer then begins with."""


def asked_mark(prompt: str) -> str | None:
    """What an answer begins with, by the prompt that asks for it; None where it asks for no mark."""
    return next((mark for form, mark in _ASKED.items() if form in prompt), None)
