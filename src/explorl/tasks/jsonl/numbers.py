r"""Numbers as people and models write them: ``42``, ``1,000``, ``$5``, ``-7.50``, ``1e3``, ``3/4``, ``\frac{3}{4}``.

A text states a number if nothing in it could change the number's value: it may have a name or a calculation that equals
the number (``x = 42``), words that introduce it (``The answer is 42``), a currency, a unit, or a noun that is counted
(``42 apples``). ``3 1/2`` is 3.5, ``5 million`` is 5,000,000 and ``-(42)`` is -42; ``42!``, ``5²``, ``not 42`` and
``more than 42`` state none. No text raises an error, and the time is a few passes over it.
"""

from __future__ import annotations

import re
from collections import deque
from decimal import Decimal, localcontext
from typing import NamedTuple

from explorl.tasks.jsonl.number_words import CHANGES, DOUBTS, LEADS, MEASURES, SCALED, SHORT, SIGNS, UNDOES
from explorl.tasks.math.answer_text import MAX_LENGTH, parse_numeral

_DIGITS = 2 * MAX_LENGTH
"""Number of digits of the arithmetic, which rounds no number that is read."""
_CLOSE = Decimal("1e-9")
"""Relative tolerance for numbers that are not whole: in floating point, 0.1 + 0.2 is 0.30000000000000004."""


class Number(NamedTuple):
    """A number that a text states."""

    value: Decimal
    unit: str = ""
    """A unit, such as "dollar", or a unit that is itself a number, such as "dozen"; empty if there is none."""
    is_rounded: bool = False
    """True if the text says that the value is approximate."""


# ---------------------------------------------------------------------------- numerals
_SCALES = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_SCALE = rf"(?:[ -]?(?i:{'|'.join(_SCALES)})\b)"
# These characters next to a number change it: 5², √5, 5½, 5π, 1_000, 0x10.
_NUMBER = re.compile(
    r"(?<![\w.√])(?<![A-Za-z]\^)[-+]?(?:[0-9]{1,9} (?=[0-9]{1,9}/[0-9]))?"
    r"(?:(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)(?:[eE][-+]?[0-9]{1,4}(?!\w))?"
    r"(?![0-9]|\.[0-9]|[eE][-+]?[0-9]|[_xX][0-9]|\s?(?:[⁰¹²³⁴-⁹₀-₉½¼¾⅓⅔⅛√π]|\\?pi\b|\\sqrt))"
    rf"(?:[ ]?/[ ]?[0-9]+(?:\.[0-9]+)?)?{_SCALE}{{0,2}}"
)
_NUMERAL = re.compile(r"(?<![\w.])(?<![A-Za-z]\^)[0-9](?:[0-9.,]*[0-9])?")
_PARTS = re.compile(r"(?:([-+]?[0-9]+) (?=[0-9]))?([^/ ]+)(?: ?/ ?(.+))?")
_PLAIN = re.compile(r"[$€£¥₹]?[-+−]?[$€£¥₹]?(?!0[0-9])[0-9][0-9.,]*(?:[eE][-+]?[0-9]{1,4})?\s?%?")
_FRACTION = re.compile(r"\\[dtc]?frac\s*\{\s*([0-9.,]{1,60})\s*\}\s*\{\s*([0-9.,]{1,60})\s*\}")
_MIXED = re.compile(r"(?<=[0-9])\s?(?=\\[dtc]?frac\s*\{)")


def is_number(text: str) -> bool:
    """Return whether a text is just a number, and not a code with leading zeros."""
    if text.isascii() and text.isdecimal():
        return text == "0" or text[0] != "0"
    return _PLAIN.fullmatch(text.strip()) is not None and parse_number(text) is not None


def same_number(stated: Number, right: Number, tolerance: float = 0.0) -> bool:
    """Return whether a stated number is the right one.

    They may differ by ``tolerance``; if it is 0, numbers that are not whole must agree to nine digits. A rounded
    number is wrong if the right one is whole, and so is a number whose unit contradicts the right one's.
    """
    is_whole = right.value == right.value.to_integral_value()
    if stated.is_rounded and is_whole and not (right.is_rounded or tolerance):
        return False
    if stated.unit != right.unit and stated.unit and (right.unit or stated.unit in SCALED.values()):
        return False
    with localcontext() as context:
        context.prec = _DIGITS
        close = Decimal(0) if is_whole else abs(right.value) * _CLOSE
        return abs(stated.value - right.value) <= max(Decimal(str(tolerance)), close)


def asks_for_unit(question: str, unit: str) -> bool:
    """Return whether a question asks for a number of a unit, as in "How many dozen eggs?"."""
    return bool(unit) and re.search(rf"how many (?:\w+ ){{0,3}}{re.escape(unit)}(?:e?s)?\b", question, re.I) is not None


def format_number(stated: Number) -> str:
    """Return a number in its canonical notation: 42 for 42.0 and 4.2e1."""
    unit = f" {stated.unit}" if stated.unit in SCALED.values() else ""
    with localcontext() as context:
        context.prec = 30
        value = +stated.value
    if not value:
        return f"0{unit}"
    value = value.normalize()
    return (f"{value:f}" if -10 <= value.adjusted() <= 30 else str(value)) + unit


def _value(text: str) -> Decimal | None:
    text = text.casefold().replace(",", "")
    scales = re.findall("|".join(_SCALES), text)
    match = _PARTS.fullmatch(re.sub(_SCALE, "", text))
    if not match:
        return None
    whole, above, below = match.groups()
    number, divisor, integer = parse_numeral(above), parse_numeral(below or "1"), parse_numeral(whole or "0")
    if number is None or not divisor or integer is None:
        return None
    with localcontext() as context:
        context.prec = _DIGITS
        value = number / divisor
        if whole and not value < 1:
            return None
        return (value + integer).scaleb(sum(_SCALES[scale] for scale in scales))


# ---------------------------------------------------------------------------- layout
_CHARACTERS = str.maketrans(
    dict.fromkeys("−–—‒―‐‑﹣－", "-")
    | dict.fromkeys("≃≅∼", "≈")
    | dict.fromkeys("≤≥±∓∉⊂¬", "≠")
    | dict.fromkeys('"“”«»„`', " ")
    | dict(zip("：＝，。％（）∈ᵗʰⁿᵈˢʳ", ":=,.%()=thndsr", strict=True))
)
_RELATIONS = {
    "≈": "approx|sim|simeq|cong|thickapprox",
    "=": "in",
    "→": "to|rightarrow|Rightarrow|implies|therefore",
    "≠": "ne|neq|neg|lnot|le|leq|leqslant|lt|ll|ge|geq|geqslant|gt|gg|pm|mp|notin|subset|subseteq",
}
_CURRENCIES = "€£¥₹¢"
_MONEY = re.compile(r"\\?[$€£¥₹¢](?![0-9])|(?<![0-9])\\?[$€£¥₹¢]")
_WRAPPED = re.compile(
    r"\\(?:boxed|fbox|text|textbf|textit|textrm|emph|mathrm|mathbf|mathit|mbox)(?![A-Za-z])\s*\{([^{}]*)\}"
)
_LAYOUT = [
    (re.compile(pattern), by)
    for pattern, by in (
        (r"\u207b(?=[0-9])", "-"),
        (r"(?<=[0-9])(?:[\u00a0\u202f]|\\,)(?=[0-9]{3})|\\!", ""),
        (r"\\[(\[\])]|\\[,;: ]|\\\\|\\(?:q?quad|displaystyle|left|right)(?![A-Za-z])", " "),
        (r"</?(?!(?:s|del|strike)>)[A-Za-z_]{1,20}>", " "),
        (r"\^\s?(?:\\circ(?![A-Za-z])|\{\s?\\circ\s?\})|\\(?:text)?degree(?![A-Za-z])", "°"),
        *((rf"\\(?:{names})(?![A-Za-z])", sign) for sign, names in _RELATIONS.items()),
        (r"[=-]>|[⇒⟹∴]", "→"),
        (r"!=|=/=|[<>]", "≠"),
        (r"(?<![\w)])~=?(?=\s?[-+(\\.0-9])", "≈"),
        (r"\\([%#&_{}])", r"\1"),
        (r"\.{3,}|\\[lc]?dots(?![A-Za-z])", "…"),
        (r"([_^])\s?\{\s?(-?\w{1,20})\s?\}", r"\1\2"),
        (r"(?<![\w)])\*\*|\*\*(?!\s?[\d(])|~", " "),
        (r"(?<![\w*])\*(?=[^\s*])([^*]*[^\s*])\*(?![\w*])", r"\1"),
        (r"(?<!\w)['‘’]|['‘’](?!\w)", " "),
        (r"(?i:\b(answer|result|total)) - ", r"\1: "),
        (r"(?i:\b(?:minus|negative))\s+(?=[0-9.(])", "-"),
        (r"\s+", " "),
        (r"(?<=[A-Za-z]) \^", "^"),
    )
]
_ENDS = re.compile(r"\A[\s#*_•·:,;]+|[\s*_.,;:?]+\Z")


def _plain(text: str) -> tuple[str, str]:
    """Return a text without its layout, and its currency sign."""
    text = text.translate(_CHARACTERS)
    # Two dollar signs delimit mathematics.
    signs = [*(sign for sign in _CURRENCIES if sign in text), *("$" if r"\$" in text or text.count("$") % 2 else "")]
    text = _FRACTION.sub(r"\1/\2", _MIXED.sub(" ", text.replace("{,}", ",")))
    for _ in range(3):
        text = _WRAPPED.sub(r" \1 ", text)
    text = _MONEY.sub(" ", text)
    for pattern, by in _LAYOUT:
        text = pattern.sub(by, text)
    return _ENDS.sub("", text), signs[0] if signs else ""


# ---------------------------------------------------------------------------- statements
_WORD = re.compile(r"[^\W\d_]+(?:['’][^\W\d_]+)?")
_OPTION = re.compile(r"\(?[A-J][).:] ?|[A-Za-z] ?:")
_HEAD = re.compile(r"(?:[^\W\d_]|[ .,:;()'’]|(?<=[^\W\d_])[-/](?=[^\W\d_]))*")
_ROUNDLY = re.compile(r"(?i:\b(?:about|approximately|approx\.?|around|roughly|circa|ca\.?)) ?\Z")
_CLOSING = {"(": ")", "[": "]", "{": "}"}
_BEFORE_MINUS = re.compile(r"(?:\A|[:(\[{]|\b(?:is|are|was|were|be|equals|to|answer|result)) ?\Z")

_POWER = re.compile(r"(?<=[A-Za-z])(?: ?\^-?[1-9](?!\d)|[23](?!\w)|⁻?[¹²³])")
_TAIL = re.compile(r"(?:[^\W\d_]|[ .,:;()?'’]|(?<=[^\W\d_])(?:!| ?[/·] ?(?=[^\W\d_])|[-&](?=[^\W\d_])))*")
_CHOSEN = re.compile(r" ?[CP]_?[0-9]")
_SQUARE = re.compile(r"\A(?:square|cubic|sq|cu)\b[. ]*", re.IGNORECASE)

_FUNCTION = re.compile(r"\\[A-Za-z]+|\b(?:log|ln|exp|sin|cos|tan|sqrt|gcd|lcm|mod|max|min)\b")
_NAME = re.compile(
    r"\\(?:alpha|beta|gamma|delta|theta|lambda|mu|sigma|phi|omega|Delta|angle|triangle|overline|bar|vec|hat)(?![a-z])"
    r"|(?<=[A-Za-z])(?:_\w+|[0-9]+\b)|(?<=[A-Za-z]) ?\([^()]*\)|[{}]"
)
_VARIABLE = re.compile(r"(?<![A-Za-z'’&\\])(?![aAI])[A-Za-z](?![A-Za-z'’&]|-[A-Za-z])")
_MEASURED = re.compile(r"(?<=[0-9]) ?/? ?[msghLN]\b(?:/[a-z]+)?")
_OPERATOR = re.compile(r"[+*×÷^]| [-/] |[-/](?=[0-9(.])|(?<=[0-9)])-|(?<=[0-9)% ])[xX](?= ?[(.0-9])")
_UNKNOWN = re.compile(rf"(?:[0-9)+*×÷^]|(?<![A-Za-z])[-/]) ?{_VARIABLE.pattern}|{_VARIABLE.pattern} ?[-/0-9(+*×÷^]")

_PRODUCT = re.compile(rf"{_VARIABLE.pattern} ?{_VARIABLE.pattern}")
_CLAUSE = re.compile("[,;:.] ")
_SECOND = re.compile(r"(?:[,;] ?|\b(?:or|and) ){1,2}[^\s0-9]{1,20}\Z")


def parse_number(text: str) -> Number | None:
    """Return the number that a text states; None if it states no number, or several."""
    if len(text) > MAX_LENGTH:
        return None
    plain, currency = _plain(text)
    *equals, claim = re.split("[=≈]", plain.rpartition("→")[2])
    equals = [part.strip() for part in equals if part.strip()]
    numbers = list(_NUMBER.finditer(claim))
    has_two_claims = any(_SECOND.search(part) for part in equals[1:])  # "x = 41, x = 42"
    if "≠" in plain or len(numbers) != 1 or has_two_claims or (equals and not _can_equal(equals[-1])):
        return None
    digits = numbers[0][0].lstrip("-+")
    value = _value(digits)
    around = _signed(claim[: numbers[0].end() - len(digits)], claim[numbers[0].end() :])
    if value is None or around is None:
        return None
    sign, head, tail = around
    rounds = _ROUNDLY.search(head)
    head = head[: rounds.start()].rstrip() if rounds else head
    is_cut = tail.startswith("…") and "." in digits
    unit = _unit(tail.removeprefix("…") if is_cut else tail, currency)
    if unit is None or not _introduces(head):
        return None
    value = value.copy_negate() if sign < 0 else value  # - would round it as the caller's decimal context says
    return Number(value, unit, bool(rounds) or is_cut or "≈" in plain)


def _signed(head: str, tail: str) -> tuple[int, str, str] | None:
    """Remove signs and brackets around a number from the text before and after it; None if it is a calculation."""
    sign = 1
    while head := head.rstrip():
        mark = head[-1]
        if mark in _CLOSING and tail.lstrip().startswith(_CLOSING[mark]) and not head[:-1].endswith(("\\", ")")):
            head, tail = head[:-1], tail.lstrip()[1:]
        elif mark in "-+" and _BEFORE_MINUS.search(head[:-1]):
            head, sign = head[:-1], -sign if mark == "-" else sign
        else:
            break
    return None if head.endswith(("-", "+")) else (sign, head, tail)


def _introduces(head: str) -> bool:
    """Return whether the text before a number keeps its value."""
    if not head or _OPTION.fullmatch(head):
        return True
    text = head.casefold().removesuffix(" (").rstrip(" ,")
    if not _HEAD.fullmatch(head) or DOUBTS.search(text):
        return False
    return (
        text.endswith((":", ";")) or (text.endswith(".") and " " in text) or LEADS.search(text.rstrip(".")) is not None
    )


def _unit(tail: str, currency: str) -> str | None:
    """Return the unit after a number, empty if it is unknown; None if the text after the number changes its value."""
    unit = MEASURES.get(currency, "")
    for sign in ("%", "°", "‰"):
        if tail.lstrip().startswith(sign):
            tail, unit = tail.lstrip()[1:], SCALED.get(sign) or MEASURES[sign]
            tail = re.sub(r"\A ?[CFK]\b", "", tail) if sign == "°" else tail
    if _CHOSEN.match(tail):
        return None
    tail = _POWER.sub("", tail)
    is_attached = tail[:1].isalpha()
    rest = re.sub(r"\A(?:-(?=[^\W\d_]{2})| ?/ ?(?=[^\W\d_]))", " ", tail)
    words = _WORD.findall(rest)
    if not _TAIL.fullmatch(rest) or rest.lstrip().startswith("!") or UNDOES.search(rest.casefold()):
        return None
    if words and (CHANGES.match(words[0].casefold()) or not all(map(_is_word, words[1:]))):
        return None
    if not words or rest.lstrip()[0] in ".,:;?":
        return unit
    first = next(iter(_WORD.findall(_SQUARE.sub("", rest.lstrip(" (")))), words[0])
    if scaled := "M" if first == "m" and currency else SCALED.get(first if len(first) < 3 else first.casefold()):
        return scaled
    if len(first) == 1 and first.isascii() and first not in SIGNS and (first != "a" or is_attached):
        return None
    measure = "" if first == "in" and len(words) > 1 else _measure(first)
    return unit or measure if measure or _is_word(first) or len(first) == 1 else None


def _measure(word: str) -> str:
    """Return what a word in singular or plural measures; empty if it is not a known unit."""
    word = word.casefold()
    return MEASURES.get(word) or MEASURES.get(word.removesuffix("s") if len(word) > 2 else "") or ""


def _is_word(word: str) -> bool:
    """Return whether letters are a word and not a variable or a product of variables."""
    if len(word) > 2 or not word.isascii() or word[0].isupper():
        return True
    return word in SIGNS or word == "a" or bool(SHORT.fullmatch(word))


def _can_equal(left: str) -> bool:
    """Return whether the left side of an = is a name or a calculation, and not an equation to be solved."""
    if any(map(str.isdigit, left)) and not any(map(str.isalpha, _FUNCTION.sub("", left))):
        return True
    name = _NAME.sub("", _CLAUSE.split(left)[-1]).strip()
    if not any(map(str.isdigit, name)):
        is_product = _PRODUCT.search(name) or not all(_is_word(word) for word in _WORD.findall(name) if len(word) > 1)
        return not is_product and _HEAD.fullmatch(name) is not None and not DOUBTS.search(name.casefold())
    calculation = _OPERATOR.sub(lambda match: "*" if match[0] in "xX" else match[0], _MEASURED.sub(" ", left))
    return not _UNKNOWN.search(calculation) and all(any(map(str.isdigit, part)) for part in _OPERATOR.split(left))


# ---------------------------------------------------------------------------- prose
_MARKS = re.compile(
    r"\\[$%!,]|\\(?:boxed|fbox|text|textbf|mathrm|mathbf|mbox)(?![A-Za-z])|[$€£¥₹{}]|[\u00a0\u202f](?=[0-9]{3})"
)
_NEGATIVE = re.compile(r"\b(?:minus|negative) (?=[0-9.(])", re.IGNORECASE)
# A dash after a word or number is not a minus sign: "10 - 42" and "so - 42" state 42, but "= - 42" states -42.
_BEFORE = re.compile(
    r"(?P<mark>[\w)]?[-–—‒―‐‑﹣－⁻](?=[(\[]*\Z)|\\textminus ?|(?<=[=:(]) ?[-–—] |[0-9][/:]|[√^~≈<>≤≥≠±/]"
    r"|(?:\\?\b(?:log|ln|lg|exp|sqrt|(?:a|arc)?(?:sin|cos|tan)h?)(?:_\w{1,2}|[0-9]{1,2})?|\\sqrt) ?"
    r"|\b[^\W\d_](?:_\w|['′])?(?=\()|\\(?!left|big)[A-Za-z]+(?=\())[(\[ ]*\Z"
)
_AFTER = re.compile(
    r"[)\]]*(?P<mark>[^\W_](?:[\w^]|-(?=\w))*|\^[A-Za-z]\w*|%(?: ?\\?[%‰])+|‰|/[A-Za-z]\w*| (?:[kKMBT]|bn|mn)\b"
    r"| (?i:squared|cubed|factorial|to the [a-z]+|per [a-z]+|[a-z]+illions?"
    rf"|{'|'.join(word for word in SCALED if len(word) > 2)})\b)"
)


def last_number(text: str) -> str | None:
    """Return the last number of a text, with adjacent signs and letters that change its value, like the "k" of 42k."""
    text = _FRACTION.sub(r"\1/\2", _MIXED.sub(" ", text.replace("−", "-").replace("{,}", ",")))
    text = _NEGATIVE.sub("-", _MARKS.sub("", text))
    numerals, numbers = (deque(pattern.finditer(text), maxlen=1) for pattern in (_NUMERAL, _NUMBER))
    if not numerals:
        return None
    start, end = numerals[0].span()
    if not numbers or numbers[0].start() > start or numbers[0].end() < end:
        return text[max(0, start - 1) : start].strip() + text[start : end + 8].split()[0]
    start, end = numbers[0].span()
    before = _BEFORE.search(text[max(0, start - 12) : start])
    after = _AFTER.match(text[end : end + 40])
    return f"{before['mark'].strip() if before else ''}{numbers[0][0]}{after['mark'] if after else ''}"
