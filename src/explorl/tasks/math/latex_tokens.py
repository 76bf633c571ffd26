r"""Split an answer's LaTeX into tokens: numbers, words, texts, commands and single signs.

A policy writes answers, so they are not trusted: unprintable characters are refused, and ``\text{…}`` and similar
commands may contain only letters, digits and punctuation.
"""

from __future__ import annotations

import re
import unicodedata
from typing import NamedTuple

from explorl.tasks.math.units import is_abbreviation


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
_FORMULA = re.compile(r" *(?:[-+(.0-9]|\\[$%])(?:[^\\{}]|\\[$% ,;:!])*")
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


def rewrite(text: str) -> str:
    """Return an answer's text in the notation of the grammar: without signs of Unicode and colours, ``:`` for "to"."""
    text = translate_unicode(text)
    for pattern, by in _NOTATIONS:
        text = pattern.sub(by, text)
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
