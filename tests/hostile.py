"""Texts that strangers bring, and what must be true of all that comes out."""

from __future__ import annotations

import re

HOSTILE = {
    "lone surrogate": "a\ud800b",
    "closing tag of rich": "[/b]",
    "opening tag of rich": "[red]x",
    "emoji of rich": ":smile:",
    "clear the screen": "x\x1b[2J\x1b[Hy",
    "write the clipboard": "\x1b]52;c;AAAA\x07",
    "a link": "\x1b]8;;http://example.org\x1b\\z\x1b]8;;\x1b\\",
    "eight-bit control": "\x9b2Jz",
    "writing turned around": "a\u202eb\u2066c",
    "mathematics without end": "$\\frac{$",
    "mathematics": "$x^2$",
    "script": "<script>alert(1)</script>",
    "end of a comment": "--><b>x</b>]]>",
    "attribute": "\" onload='x' \\",
    "template": "{{ 7*7 }}{% raw %}",
    "pipe": "|",
    "formula": "=1+1",
    "star": "*x*",
    "percent": "100 % of $5 & #1_a^b~{}",
    "backslashes": "y\\\\\\",
    "null": "n\0b",
    "carriage return": "seen\runseen",
    "path": "../../etc/passwd",
    "dots": "..",
    "nothing but spaces": "  ",
    "other script": "答案",
}
"""By what is hostile about it."""

NAMES = list(HOSTILE.values())

_RAW = re.compile("[\0-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\u202a-\u202e\u2066-\u2069]")


def raw(text: str) -> list[str]:
    """What a terminal would obey, and what no file can hold."""
    return _RAW.findall(text)
