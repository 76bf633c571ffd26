r"""The text of an answer: its normal form, and the tokens of its LaTeX.

Answers with the same normal form are equal, and equal answers often have the same one: ``\dfrac{1}{2}`` and ``1/2``,
``27.0`` and ``27``, ``4.5e33`` and ``4.5 \times 10^{33}``, ``90^\circ`` and ``90``.

Tokens are numbers, words, texts, commands and single signs. A policy writes answers, so they are not trusted:
unprintable characters are refused, and ``\text{…}`` and similar commands may contain only letters, digits and
punctuation.
"""

from __future__ import annotations

import re
import unicodedata
from decimal import Decimal
from functools import lru_cache
from typing import NamedTuple

from explorl.tasks.math.words import is_abbreviation

MAX_LENGTH = 1_000
"""A longer text is not an answer; the benchmarks' answers have less than a third of this."""

_NUMERAL = re.compile(
    r"(?P<sign>[+-]?)(?=\.?[0-9])(?P<whole>[0-9]{1,3}(?:[ ,][0-9]{3})+|[0-9]*)(?:\.(?P<part>[0-9]*))?"
    r"(?:(?:[eE]|(?:\\times|\\cdot|[*x×·]) ?10\^)(?P<power>[+-]?[0-9]{1,6}|\{[+-]?[0-9]{1,6}\}))?"
)
_POWER_OF_TEN = re.compile(r"(?P<sign>[+-]?)10\^(?P<power>[0-9]|\{[+-]?[0-9]{1,6}\})")
_FRACTION = re.compile(r"(-?)\\frac\{(-?)([0-9]+)\}\{([0-9]+)\}")

# The order matters; each pattern takes time linear in the text.
_REWRITES = [
    (re.compile(pattern), by)
    for pattern, by in (
        (r"\\! *", ""),
        (r"\\(?:left|right) *\.|\\(?:left|right|displaystyle)(?![A-Za-z])", " "),
        # Signs around a number mean nothing, but between two digits they separate two numbers.
        (r"(?<![0-9])(?:\\[$()\[\]]|\$)|(?:\\[()\[\]]|\$)(?![0-9])", " "),
        (r"(?:\^ ?\\circ(?![A-Za-z])|\^ ?\{ ?\\circ ?\}|\\degree(?![A-Za-z])|°)(?! *[0-9])", ""),
        (r"\\%", "%"),
        (r"\\[,;: ]|~|\\q?quad(?![A-Za-z])|\s+", " "),
        (r"\{,\}", ","),
        (r"−", "-"),
        (r"\\[dtc]frac(?![A-Za-z])", r"\\frac"),
        (r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mbox|operatorname) ?\{([^{}]*)\}", r"\1"),
        (r" +", " "),
        # "3, 5" is "3,5", but "1, 234" is not 1,234.
        (r" (?=\W)|(?<=[^\w,]) |(?<=,) (?![0-9]{3}(?![0-9]))", ""),
        (r"\\frac ?([0-9]) ?(?=[0-9{])", r"\\frac{\1}"),
        (r"(\\frac\{[^{}]*\}) ?([0-9])", r"\1{\2}"),
        (r"\\sqrt ?([0-9])", r"\\sqrt{\1}"),
        (r"([_^])\{(\w)\}", r"\1\2"),
    )
]


def parse_numeral(text: str) -> Decimal | None:
    r"""Parse a number like ``-27.0``, ``1,024``, ``4.5e33`` or ``4.5 \times 10^{33}``; return None for other texts."""
    text = re.sub(r" (?=[^\w,])|(?<=[^\w,]) ", "", re.sub(r"\\! *", "", text.strip(" \t\r\n")).replace("−", "-"))
    if match := _POWER_OF_TEN.fullmatch(text):
        return Decimal(f"{match['sign']}1e{match['power'].strip('{}')}")
    if not (match := _NUMERAL.fullmatch(text)):
        return None
    whole, part = re.sub("[ ,]", "", match["whole"]), match["part"] or ""
    return Decimal(f"{match['sign']}{whole}.{part}e{(match['power'] or '0').strip('{}')}")


def format_numeral(value: Decimal) -> str:
    """Return a number in its canonical notation: ``27`` for 27.0, ``4.5e33`` for 45e32."""
    if not value:
        return "0"
    sign, digits, _ = value.as_tuple()
    if not -5 <= value.adjusted() <= 15:
        significant = "".join(map(str, digits)).rstrip("0")
        mantissa = f"{significant[0]}.{significant[1:]}".rstrip(".")
        return f"{'-' * sign}{mantissa}e{value.adjusted()}"
    text = f"{value:f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def normalize(text: str) -> str:
    """Return the normal form of an answer."""
    for pattern, by in _REWRITES:
        text = pattern.sub(by, text)
    text = text.strip().removesuffix(".").strip()
    if re.fullmatch(r"\{[^{}]*\}", text):
        text = text[1:-1].strip()
    if re.fullmatch(r"\([A-J]\)", text):
        return text[1]
    number = parse_numeral(text)
    if number is not None:
        return format_numeral(number)
    if match := _FRACTION.fullmatch(text):
        outer, inner, above, below = match.groups()
        return f"{'-' if outer != inner else ''}{above}/{below}"
    return text


# Tokens


class Unreadable(ValueError):
    """Raised for a text that is not in the grammar of answers."""


class Token(NamedTuple):
    """A token of LaTeX."""

    kind: str
    """``number``, ``word`` (letters), ``letters`` (the rest of a word), ``text``, ``command`` or ``sign``."""
    text: str
    spaced: int
    """1: after a space; 2: after the end of a formula, or after a bracket's \\left."""


FUNCTIONS = {
    **dict.fromkeys(("sin", "cos", "tan", "cot", "sec", "csc"), "trigonometric function"),
    **dict.fromkeys(("arcsin", "arccos", "arctan", "arccot", "arcsec", "arccsc"), "trigonometric function"),
    **dict.fromkeys(("sinh", "cosh", "tanh", "arcsinh", "arccosh", "arctanh"), "hyperbolic function"),
    **dict.fromkeys(("ln", "log"), "logarithm"),
    "exp": "exponential",
    **{name: name for name in ("gcd", "lcm", "max", "min")},
}
"""Maps names of functions to their families."""

ALIASES = {
    "arsinh": "arcsinh", "arcosh": "arccosh", "artanh": "arctanh",
    "asin": "arcsin", "acos": "arccos", "atan": "arctan",
}  # fmt: skip
"""Maps other names of functions to their names."""

_TEXTS = frozenset({
    "text", "textbf", "textit", "textrm", "textsf", "texttt", "textnormal", "mbox", "hbox", "emph", "operatorname",
    "mathrm", "mathbf", "mathit", "mathsf", "mathtt", "mathnormal", "boldsymbol", "bm",
})  # fmt: skip
_FONTS = frozenset({
    "mathrm", "mathbf", "mathit", "mathsf", "mathtt", "mathnormal", "boldsymbol", "bm", "textbf",
})  # fmt: skip
_SIZES = frozenset({
    "left", "right", "big", "Big", "bigg", "Bigg", "bigl", "bigr", "Bigl", "Bigr", "biggl", "biggr", "Biggl",
    "Biggr",
})  # fmt: skip
_SPACES = frozenset({
    "~", "$", "\\,", "\\;", "\\:", "\\>", "\\ ", "\\(", "\\)", "\\[", "\\]", "\\/", "\\quad", "\\qquad", "\\thinspace",
    "\\medspace", "\\thickspace", "\\enspace", "\\displaystyle", "\\textstyle", "\\limits", "\\nolimits",
})  # fmt: skip

_UNICODE = {
    "−": "-", "–": "-", "×": "\\times ", "⋅": "\\cdot ", "·": "\\cdot ", "∙": "\\cdot ", "∗": "*", "÷": "\\div ",
    "∕": "/", "⁄": "/", "≤": "\\le ", "≥": "\\ge ", "≠": "\\ne ", "≈": "\\approx ", "∈": "\\in ", "±": "\\pm ",
    "∓": "\\mp ", "∞": "\\infty ", "∪": "\\cup ", "∩": "\\cap ", "∖": "\\setminus ", "∅": "\\emptyset ", "√": "\\surd ",
    "°": "\\degree ", "π": "\\pi ", "′": "'", "’": "'", "ℝ": "\\mathbb{R}", "ℤ": "\\mathbb{Z}", "ℚ": "\\mathbb{Q}",
    "ℕ": "\\mathbb{N}", "ℂ": "\\mathbb{C}", "⟨": "\\langle ", "⟩": "\\rangle ", "½": "\\frac{1}{2}",
    "¼": "\\frac{1}{4}", "¾": "\\frac{3}{4}", "⅓": "\\frac{1}{3}", "⅔": "\\frac{2}{3}", "⅛": "\\frac{1}{8}",
    "¢": "\\text{ cents}",
    "α": "\\alpha ", "β": "\\beta ", "γ": "\\gamma ", "δ": "\\delta ", "ε": "\\epsilon ", "ζ": "\\zeta ",
    "η": "\\eta ", "θ": "\\theta ", "ι": "\\iota ", "κ": "\\kappa ", "λ": "\\lambda ", "μ": "\\mu ",
    "ν": "\\nu ", "ξ": "\\xi ", "ρ": "\\rho ", "σ": "\\sigma ", "τ": "\\tau ", "υ": "\\upsilon ",
    "φ": "\\phi ", "χ": "\\chi ", "ψ": "\\psi ", "ω": "\\omega ", "Γ": "\\Gamma ", "Δ": "\\Delta ",
    "Θ": "\\Theta ", "Λ": "\\Lambda ", "Ξ": "\\Xi ", "Σ": "\\Sigma ", "Φ": "\\Phi ", "Ψ": "\\Psi ",
    "Ω": "\\Omega ",
}  # fmt: skip
_WIDE = {chr(ord(sign) + 0xFEE0): sign for sign in "0123456789+-*/=<>()[],.:;%"}
"""Full-width signs, which policies write when they reason in Chinese."""
_TRANSLATION = str.maketrans(_UNICODE | _WIDE)

_RAISED = re.compile("[⁻]?[⁰¹²³⁴⁵⁶⁷⁸⁹]+|[₀₁₂₃₄₅₆₇₈₉]+")
_PLAIN_DIGITS = str.maketrans("⁻⁰¹²³⁴⁵⁶⁷⁸⁹₀₁₂₃₄₅₆₇₈₉", "-01234567890123456789")
_BREAKS = frozenset("\f\v\x1c\x1d\x1e\x1f\x85\u2028\u2029")

_BRACED = re.compile(r" *\{((?:[^{}]|\{[^{}]*\})*)\}")
_INVISIBLE = re.compile(r" *\.")
_WORDS = re.compile(r"[A-Za-z0-9 .,'/^-]*")
# A formula in \text{…}, maybe with words after a number: it does not begin with a letter.
_FORMULA = re.compile(r" *(?:[-+(.0-9%$]|\\[$%])(?:[^\\{}]|\\[$% ,;:!])*")
_SEPARATOR = re.compile("[,;](?: (and|or))?")
_MEASURES = frozenset({"min", "sec", "arcsec"})
_PART_END = re.compile(r"[ .]*(?:[,;/$)}\]]|\\[)\]]|$)")
_POWER = re.compile(r"\^\{ ?(-?[0-9]) ?\}")
_MICRO = re.compile(r"\\mu *(?=[A-Za-z])")
_MICRO_UNIT = re.compile(r" *\\(?:text|mathrm) *\{ *([A-Za-z]+) *\}")
_SCAN = re.compile(
    r"(?P<space> +)"
    r"|(?P<number>(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]{1,6}(?![A-Za-z0-9.]))?)"
    r"|(?P<command>\\(?:[A-Za-z]+|.))"
    r"|(?P<word>[A-Za-z]+)"
    r"|(?P<sign>\*\*|<=|>=|!=|[^\\])"
)


# Other ways to write what the grammar has. The order matters; each pattern takes time linear in the text.
_NOTATIONS = [
    (re.compile(pattern), by)
    for pattern, by in (
        (r"\\(?:text)?color *\{[A-Za-z0-9!]*\}", " "),
        (r"\\(?:fbox|boxed)(?= *\{)|\\underline(?= *\{ *-?[0-9])", " "),
        (r"(?i)\A *\\text(?:bf|rm|it)? *\{ *(?:the )?(?:final )?answer(?: is)? *:? *\} *:?", ""),
        (r"\\lor(?![A-Za-z])", r"\\text{ or }"),
        (r"\\land(?![A-Za-z])", r"\\text{ and }"),
        (r"\{:\}|\\!:\\!|\\colon(?![A-Za-z])", ":"),
        (r"\\cr(?![A-Za-z])", r"\\\\ "),
        (r"\\\\ *\[ *-?[0-9.]+ *(?:pt|ex|em|mm|cm|in) *\]", r"\\\\ "),
        (r"\\backslash(?![A-Za-z])", r"\\setminus "),
        (r"(?<=[0-9]) [xX] (?=10 ?\^)", r" \\times "),
        (r"(?<![0-9])\.(?=\\(?:overline|bar|dot)(?![A-Za-z]))", "0."),
        (r"_\{\\(?:text|mathrm) *\{ *base *\} *([0-9]+) *\}|_\{ *\( *([0-9]+) *\) *\}", r"_{\1\2}"),
        (r"(?<=[0-9]) *(?:\\text *\{ *(?:in )?base *\}| base ) *\{?([0-9]+)\}?", r"_{\1}"),
        (r"(?<=[0-9])(?: *\\text *\{ *(?:is )?to *\} *| +to +)(?=[0-9])", ":"),
        (r"\b([ap])\. ?m\b\.?", r"\1m"),
    )
]


_OUTWARD_BRACKETS = re.compile(r" *(?=\]|.*\[ *\Z)([\[\]])([^][()]+,[^][()]+)([\[\]]) *")  # ]3,8] and [2,9[


@lru_cache(maxsize=8_192)
def rewrite(text: str) -> str:
    """Return an answer's text in the notation of the grammar: without signs of Unicode and colours, ``:`` for "to"."""
    text = translate_unicode(text)
    for pattern, by in _NOTATIONS:
        text = pattern.sub(by, text)
    if interval := _OUTWARD_BRACKETS.fullmatch(text):
        opening, ends, closing = interval.groups()
        return f"{'(' if opening == ']' else '['}{ends}{')' if closing == '[' else ']'}"
    return text


def translate_unicode(text: str) -> str:
    """Replace mathematical signs of Unicode by LaTeX, and each space or line break by a plain space.

    Raises `Unreadable` for unprintable characters: control characters, form feeds, zero-width signs, lone surrogates.
    """
    if not text.isascii():
        text = _RAISED.sub(_script, unicodedata.normalize("NFC", text)).translate(_TRANSLATION)
    text = "".join([" " if sign.isspace() and sign not in _BREAKS else sign for sign in text])
    if not text.isprintable():
        sign = next(sign for sign in text if not sign.isprintable())
        raise Unreadable(f"it has {sign!a}, which is not printable")
    return text


def _script(match: re.Match[str]) -> str:
    return f"{'_' if match[0][0] in '₀₁₂₃₄₅₆₇₈₉' else '^'}{{{match[0].translate(_PLAIN_DIGITS)}}}"


def tokenize(text: str) -> list[Token]:
    """Split a text into tokens, without spaces, dollar signs and other layout."""
    result: list[Token] = []
    spaced, position = 0, 0
    while match := _SCAN.match(text, position):
        kind, sign, position = match.lastgroup or "", match[0], match.end()
        name = sign[1:] if kind == "command" else ""
        if sign == "\\!":
            while text.startswith(" ", position):
                position += 1
        elif kind == "space" or sign in _SPACES:
            spaced = max(spaced, 1 if sign.strip("\\,;: ~") == "" else 2)
        elif name in _SIZES:
            spaced = 2
            if invisible := _INVISIBLE.match(text, position):
                position = invisible.end()
        elif name == "mu" and (unit := _MICRO_UNIT.match(text, position)) and is_abbreviation(f"micro{unit[1]}"):
            result.append(Token("text", f"micro{unit[1]}", spaced))
            spaced, position = 0, unit.end()
        elif kind == "word" and _is_measure(sign, text, position):
            result.append(Token("text", sign, spaced))
            spaced = 0
        elif name in _TEXTS:
            added, position = _text_tokens(text, position, sign, spaced)
            result += added
            spaced = 0 if added else spaced
        else:
            result.append(Token(kind, sign, spaced))
            spaced = 0
    if position < len(text):
        raise Unreadable("it ends with a backslash")
    return result


def _is_measure(name: str, text: str, position: int) -> bool:
    """Return whether min, sec or arcsec are units: nothing follows that they could be a function of."""
    return name in _MEASURES and _PART_END.match(text, position) is not None


def _text_tokens(text: str, position: int, command: str, spaced: int) -> tuple[list[Token], int]:
    r"""Return the tokens of ``\text{…}`` and similar, and their end: words are text, a single letter is a symbol."""
    braced = _BRACED.match(text, position)
    content = braced[1] if braced else ""
    name = " ".join(re.sub(r"\\[ ,;:!]|[~$]", " ", content).replace("^{2}", "^2").replace("^{3}", "^3").split())
    unit = " ".join(_MICRO.sub("micro", _POWER.sub(r"^\1", name)).replace("\\cdot", " ").split())
    name = unit if all(map(is_abbreviation, re.findall("[A-Za-z]+", unit))) else name
    if braced and not name:
        return [], braced.end()
    if braced and (separator := _SEPARATOR.fullmatch(name)):
        words = [Token("text", separator[1], spaced)] if separator[1] else []
        return [Token("sign", ",", spaced), *words], braced.end()
    if braced and (name in FUNCTIONS or name in ALIASES) and not _is_measure(name, text, braced.end()):
        return [Token("command", f"\\{name}", spaced)], braced.end()
    if braced and len(name) > 1 and name[0].isalpha() and _WORDS.fullmatch(name):
        return [Token("text", name, spaced)], braced.end()
    if braced and (re.fullmatch("[A-Za-z]", name) or _FORMULA.fullmatch(content)):
        first, *others = [_as_text(token) for token in tokenize(content.strip())]
        return [first._replace(spaced=spaced), *others], braced.end()
    if command[1:] not in _FONTS:
        raise Unreadable(f"{command} contains something other than letters, digits and .,'-")
    return [], position  # letters in another font: the command is ignored


def _as_text(token: Token) -> Token:
    return token._replace(kind="text") if token.kind == "word" and len(token.text) > 1 else token
