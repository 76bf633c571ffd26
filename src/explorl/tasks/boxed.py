r"""Where a completion states its answer: in its last ``\boxed{…}``, or after its last ``####``.

Nothing here raises, whatever the text, and nothing takes longer than a few passes over it.
"""

from __future__ import annotations

import re

# A backslash takes the next character with it, so that \{ and \} are signs and not brackets. A doubled one before boxed
# is what models write that have read much escaped text.
_TOKEN = re.compile(
    r"\\?\\(?:boxed|fbox)(?![A-Za-z])\s*(?:(?P<open>\{)|(?P<bare>[-+]?\.?[0-9](?:[0-9.,/]*[0-9])?))?|\\.|[{}]",
    re.DOTALL,
)


def boxes(text: str) -> list[tuple[int, int] | None]:
    r"""Where the content of each ``\boxed{…}``, ``\fbox{…}`` and ``\boxed 5`` begins and ends; None: not closed."""
    if "\\boxed" not in text and "\\fbox" not in text:
        return []
    found: list[tuple[int, int] | None] = []
    open_braces: list[tuple[int, int]] = []  # the box each belongs to, or −1, and where its content begins
    for token in _TOKEN.finditer(text):
        sign = token[0]
        if sign == "{":
            open_braces.append((-1, 0))
        elif sign == "}":
            box, start = open_braces.pop() if open_braces else (-1, 0)
            if box >= 0:
                found[box] = (start, token.start())
        elif len(sign) > 2:
            if token["open"]:
                open_braces.append((len(found), token.end()))
            found.append(token.span("bare") if token["bare"] else None)
    return found


def last_boxed(text: str) -> tuple[str | None, int]:
    """What the last closed box holds, None if there is none; and how many boxes there are, closed or not."""
    found = boxes(text)
    span = next((span for span in reversed(found) if span is not None), None)
    return (None if span is None else text[slice(*span)].strip()), len(found)


def last_hash(text: str) -> tuple[str | None, int]:
    """What stands after the last ``####`` in its line, None if there is none; and how many ``####`` there are."""
    _, mark, after = text.rpartition("####")
    return (after.partition("\n")[0].strip() if mark else None), text.count("####")
