"""Extract the program from a completion by lines and fences, without running or parsing it.

No function here raises, whatever the text, and each takes at most a few passes over it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

FENCE = "```"
LANGUAGES = ("", "python", "python3", "py")
_NEXT_STATEMENT = re.compile(r"""\n(?=[^\s#)\]}"'])""")
"""Matches before a line outside of an indented body: it begins with neither space, comment, bracket nor quote."""
_AFTER_FUNCTION = re.compile(r"\n(?=if __name__|print\(|assert\b|```|</?[a-z]+>)")
_CODE_LINE = re.compile(r"^(?=(?:import|from|def|async def|class)\b|@)", re.MULTILINE)


@dataclass(frozen=True)
class Fences:
    """The fenced blocks of a text."""

    blocks: list[str]
    """The contents of the closed Python blocks, in order."""
    lines: int
    """The number of fence lines, for any language."""


def find_fences(text: str) -> Fences:
    """Return the fenced blocks of a text. A fence that names a language opens a block even inside another one."""
    blocks: list[str] = []
    count = 0
    content: list[str] | None = None
    is_python, indent = False, ""
    for line in text.split("\n"):
        stripped = line.strip()
        if not stripped.startswith(FENCE):
            if content is not None:
                content.append(line.removeprefix(indent))
            continue
        count += 1
        language = stripped.strip("`").strip().lower()
        if content is not None and not language:
            if is_python:
                blocks.append("\n".join(content))
            content = None
        else:
            content, is_python = [], language in LANGUAGES
            indent = line[: len(line) - len(line.lstrip())]
    return Fences(blocks, count)


def defines(source: str, name: str) -> bool:
    """Return whether the source defines a function of that name at the top level."""
    return _definition(name).search(source) is not None


def split_prompt(prompt: str, name: str) -> tuple[str, str]:
    """Split a prompt into the text before the requested function and the head of the function."""
    matches = list(_definition(name).finditer(prompt))
    start = matches[-1].start() if matches else 0
    return prompt[:start], prompt[start:]


def extract_function(text: str, prompt: str, name: str) -> str:
    """Return the source of a function: the last block that defines it, or the text as the prompt's continuation."""
    blocks = find_fences(text).blocks
    for block in reversed(blocks):
        if defines(block, name):
            return block
    body = blocks[-1] if blocks else text
    if not body.strip():
        return ""
    indented = body.lstrip("\n")[:1] in (" ", "\t")
    if not indented and defines(body, name):
        return _function(body, name)
    return split_prompt(prompt, name)[1].rstrip(" ") + _body(body, indented)


def _definition(name: str) -> re.Pattern[str]:
    return re.compile(rf"^(?:async[ \t]+)?def[ \t]+{re.escape(name)}\b", re.MULTILINE)


def _function(text: str, name: str) -> str:
    """Return the code from its first line to the end of the function, without explanations and calls after it."""
    definition = _definition(name).search(text)
    assert definition is not None
    start = _CODE_LINE.search(text, 0, definition.end())
    end = _AFTER_FUNCTION.search(text, definition.end())
    return text[start.start() if start else definition.start() : end.start() if end else len(text)]


def _body(text: str, indented: bool) -> str:
    """Return the lines that continue a function's head."""
    if not indented:  # a tokenizer may have dropped the spaces of the first line
        text = "    " + text.lstrip()
    start = len(text) - len(text.lstrip())
    end = _NEXT_STATEMENT.search(text, start)
    return text[: end.start() if end else len(text)] + "\n"
