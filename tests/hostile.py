"""Texts that strangers bring, and what must be true of all that comes out."""

from __future__ import annotations

import re
import textwrap

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


def _laughs(first: str, many: str) -> str:
    """Return YAML whose last line stands for a billion values."""
    lines = [f"a0: &a0 {first}"]
    for n in range(1, 10):
        aliases = ", ".join([f"*a{n - 1}"] * 10)
        lines.append(f"a{n}: &a{n} {many.format(aliases)}")
    return "\n".join(lines) + "\n"


YAML = {
    "a billion laughs": _laughs("[x, x, x, x, x, x, x, x, x, x]", "[{}]"),
    "a billion laughs in a task's option": "task:\n  name: products\n  sizes:\n"
    + textwrap.indent(_laughs("[x]", "[{}]"), "    "),
    "a billion laughs, in one line": "task: {name: products, sizes: ["
    + ", ".join(["&a0 [x]", *(f"&a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 10))])
    + "]}\n",
    "merged without end": _laughs("{k: 1}", "{{<<: [{}]}}"),
    "a list that holds itself": "task: &a [*a]\n",
    "a mapping that holds itself": "task: &a {name: *a}\n",
    "a chain of aliases": "".join(f"a{n}: &a{n} [{f'*a{n - 1}' if n else 1}]\n" for n in range(2_000)),
    "5,000 nested lists": "task: " + "[" * 5_000 + "]" * 5_000,
    "5,000 nested mappings": "task: " + "{a: " * 5_000 + "1" + "}" * 5_000,
    "lists that are never closed": "[" * 100_000,
    "nested dashes": "- " * 50_000,
    "nested keys": "? " * 50_000,
    "nested by indentation": "".join(f"{' ' * n}a:\n" for n in range(2_000)),
    "200,000 values": f"task: [{'1,' * 200_000}]",
    "a million digits": f"seed: {'1' * 1_000_000}",
    "hexadecimal digits": f"seed: 0x{'f' * 5_000}",
    "sixties": f"seed: 1{':59' * 50_000}",
    "no float": "seed: !!float abc",
    "no switch": "seed: !!bool 3",
    "an object of Python": "seed: !!python/object/apply:os.system [ls]",
    "bytes": "task: {name: !!binary //79}",
    "no date": "seed: !!timestamp 2001-99-99",
    "null character": "seed: \0",
    "an unknown alias": "seed: *nobody",
    "a list as key": "? [a]\n: 1",
    "two documents": "seed: 1\n---\nseed: 2",
    "one key twice": "seed: 1\nseed: 2",
}
"""Documents that no command may take long over, by what is hostile about them."""

JSON = {
    "nested lists": "[" * 5_000 + "]" * 5_000,
    "nested mappings": '{"a":' * 300 + "1" + "}" * 300,
    "lists that are never closed": "[" * 100_000,
    "5,000 digits": f'{{"a": {"9" * 5_000}}}',
    "a list": "[]",
    "nothing": "",
    "null": "null",
    "half of it": '{"arms": [',
    "no UTF-8": b"\xff\xfe{",
    "null character": "\0",
}
"""Files that are no record of anything."""

TEMPLATES = {
    "nested loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "a power without end": "{{ 10 ** (10 ** 9) }}",
    "all of the memory": "{{ 'x' * 10 ** 11 }}",
    "no template": "{% for message in",
    "an unknown tag": "{% nonsense %}",
    "attributes of Python": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "a file": "{% include '/etc/passwd' %}",
    "recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "refuses everything": "{{ raise_exception('\x1b[2Jno [/b]') }}",
    "undefined": "{{ nothing.at.all }}",
}
"""Chat templates that render nothing."""

_RAW = re.compile("[\0-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\u202a-\u202e\u2066-\u2069]")


def raw(text: str) -> list[str]:
    """What a terminal would obey, and what no file can hold."""
    return _RAW.findall(text)
