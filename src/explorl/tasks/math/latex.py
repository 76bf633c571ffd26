r"""Parse the LaTeX of an answer into a tree.

The grammar is a small part of LaTeX: numbers, symbols, sums, products, quotients, powers, roots, functions by name,
brackets, relations, unions of intervals, matrices, units. `Unreadable` says why a text is not part of it. Nothing is
evaluated, depth is bounded, and the time is about linear in the length of the text.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

from explorl.tasks.math.answer_text import ALIASES, FUNCTIONS, Token, Unreadable, rewrite, tokenize
from explorl.tasks.math.words import is_abbreviation

MAX_DEPTH = 20
"""How deep brackets, fractions and exponents may be nested; no answer of the benchmarks has half this depth."""

MAX_CHAIN = 40
"""How many divisions by a slash, unions and factorials an answer may have."""

MAX_EXPONENT = 999
"""The largest power of ten in a number's notation."""


class Node(NamedTuple):
    """A part of an answer.

    ========== ======================================== =======================================================
    kind       text                                     parts
    ========== ======================================== =======================================================
    number     its digits, like ``12.5`` or ``1e-7``
    repeating  ``0.1|6`` for 0.1666…
    based      ``52_8``; also ``52_10``
    symbol     its name, like ``x``, ``\\alpha_{1}'``
    constant   ``π``, ``e``, ``i`` or ``∞``
    text       words
    sum                                                 terms
    minus                                               what is subtracted
    choice     ``±`` or ``∓``                           what is added or subtracted
    product                                             factors
    quotient   ``mixed`` if written like 2 1/3          numerator and denominator; also of 2:3
    time       ``3:05``                                 hours and minutes
    ratio                                               three or more, like those of 1:2:3
    power                                               base and exponent
    root                                                radicand and index
    series     ``sum`` or ``product``                   what is added or multiplied, its index, and the index's range
    call       the function, like ``sin``, or a sign    arguments; the signs × and · only with ``vectors``
    percent                                             the number before the sign
    unit       the unit, like ``cm^2``                  what it measures
    bracket    its signs, like ``(]``, ``{}`` or ``<>`` elements; a single element in () or [] has no bracket node
    sets       ``∪``, ``∩`` or ``∖``                    two sets
    set        ``∅``, ``R``, ``Z``, …
    matrix                                              rows, each of kind ``row``
    relation   its signs, like ``=`` or ``< ≤``         its sides
    list       ``and`` or ``or`` if it has that word    elements
    ========== ======================================== =======================================================
    """

    kind: str
    text: str = ""
    parts: tuple[Node, ...] = ()


_GREEK = frozenset({
    "alpha", "beta", "gamma", "delta", "epsilon", "varepsilon", "zeta", "eta", "theta", "vartheta", "iota",
    "kappa", "lambda", "mu", "nu", "xi", "omicron", "rho", "varrho", "sigma", "varsigma", "tau", "upsilon", "phi",
    "varphi", "chi", "psi", "omega", "Gamma", "Delta", "Theta", "Lambda", "Xi", "Sigma", "Upsilon", "Phi", "Psi",
    "Omega", "Pi", "varpi",
})  # fmt: skip
_SYMBOLS = frozenset({"hbar", "ell", "odot", "partial", "nabla", "angle", "triangle"})
_IN_SUBSCRIPTS = frozenset(
    {*"{},+-*/='", *(f"\\{name}" for name in (*_GREEK, *_SYMBOLS, "prime", "infty", "max", "min"))}
)
_ACCENTS = frozenset({
    "hat", "bar", "dot", "ddot", "tilde", "vec", "overline", "overrightarrow", "widehat", "widetilde", "mathcal",
    "mathscr", "mathfrak",
})  # fmt: skip
_RELATIONS = {
    "=": "=", "<": "<", ">": ">", "<=": "≤", ">=": "≥", "!=": "≠",
    "\\lt": "<", "\\gt": ">", "\\le": "≤", "\\leq": "≤", "\\leqslant": "≤", "\\ge": "≥", "\\geq": "≥",
    "\\geqslant": "≥", "\\ne": "≠", "\\neq": "≠", "\\approx": "≈", "\\in": "∈",
}  # fmt: skip
_SETS = {"\\cup": "∪", "\\bigcup": "∪", "\\cap": "∩", "\\setminus": "∖"}
_TIMES = frozenset({"*", "\\cdot", "\\times", "\\ast"})
_OVER = frozenset({"/", "\\div"})
_MOD = frozenset({"\\mod", "\\bmod"})
_OPENS = {"(": "(", "[": "[", "\\{": "{", "\\lbrace": "{", "\\langle": "<", "\\lbrack": "["}
_CLOSES = {")": ")", "]": "]", "\\}": "}", "\\rbrace": "}", "\\rangle": ">", "\\rbrack": "]"}
_PAIRS = frozenset({"()", "[]", "(]", "[)", "{}", "<>"})
_BARS = {"|": "abs", "\\lvert": "abs", "\\vert": "abs", "\\lfloor": "floor", "\\lceil": "ceil"}
_BAR_ENDS = {"|": "|", "\\lvert": "\\rvert", "\\vert": "\\vert", "\\lfloor": "\\rfloor", "\\lceil": "\\rceil"}
_CURRENCIES = {"\\$": "dollar", "€": "euro", "£": "pound", "\\pounds": "pound", "\\euro": "euro", "₹": "rupee"}
_MATRICES = frozenset({"pmatrix", "bmatrix", "matrix", "smallmatrix", "array"})
_BASES = {"two": 2, "three": 3, "four": 4, "five": 5, "six": 6, "seven": 7, "eight": 8, "nine": 9, "ten": 10}
_LITERAL_SETS = frozenset("NZQRC")
_SUCH_THAT = frozenset({":", "|", "\\mid", "\\vert"})

_NUMPY = re.compile(r"(?<![A-Za-z0-9\\])np\.(?=[a-z])")


@lru_cache(maxsize=8_192)
def parse(text: str, *, units: bool = False, vectors: bool = False) -> Node:
    """Parse an answer into a tree; raise `Unreadable` if it is not in the grammar.

    ``units``: a bare letter or word at its end, as in ``5 m``, may be a unit. ``vectors``: × and · are different
    products.
    """
    text = _NUMPY.sub("", rewrite(text).replace("{,}", ","))
    return _Parser(tokenize(_without_full_stop(text)), units, vectors).parse_all()


def _without_full_stop(text: str) -> str:
    end = text.rstrip(" $").removesuffix("\\)").removesuffix("\\]").rstrip(" ")
    return end[:-1] if end.endswith(".") and not end.endswith(("..", "\\.")) else text


class _Parser:
    """Parses one text from left to right; each token is read a bounded number of times."""

    def __init__(self, tokens: list[Token], units: bool, vectors: bool) -> None:
        self._tokens = tokens
        self._position = 0
        self._depth = 0
        self._chain_length = 0
        self._list_depth = 0  # enclosing brackets in which a comma separates elements
        self._bars: list[str] = []
        self._units = units
        self._vectors = vectors
        self._unit = ""  # of the current operand, from a sign such as $ or °
        self._pending: Node | None = None

    def parse_all(self) -> Node:
        self._position += self._peek() in ("=", "\\approx")  # "= 5" continues a sentence before the answer
        node = self._list()
        if self._position < len(self._tokens):
            raise Unreadable(f"unexpected {self._tokens[self._position].text!r} after its end")
        return node

    def _peek(self, ahead: int = 0) -> str:
        """Return the sign, command or word ``ahead`` tokens further; empty at the end, and for numbers and text."""
        at = self._position + ahead
        if at >= len(self._tokens) or self._tokens[at].kind in ("number", "text"):
            return ""
        return self._tokens[at].text

    def _kind(self, ahead: int = 0) -> str:
        at = self._position + ahead
        return self._tokens[at].kind if at < len(self._tokens) else ""

    def _next_token(self) -> Token:
        if self._position >= len(self._tokens):
            raise Unreadable("it ends too early")
        self._position += 1
        return self._tokens[self._position - 1]

    def _expect(self, sign: str) -> None:
        if self._peek() != sign:
            raise Unreadable(f"{sign} is missing")
        self._position += 1

    def _count_chained(self) -> None:
        self._chain_length += 1
        if self._chain_length > MAX_CHAIN:
            raise Unreadable(f"more than {MAX_CHAIN} divisions, unions or factorials")

    def _list(self) -> Node:
        """Parse items with commas or words between them; a single one is no list."""
        items, words = [self._relation()], set[str]()
        while (separator := self._separator()) is not None:
            items.append(self._relation())
            words |= separator
        return items[0] if len(items) == 1 else Node("list", words.pop() if len(words) == 1 else "", tuple(items))

    def _separator(self) -> set[str] | None:
        """Read a separator of items, and return its words; None if there is none."""
        before, words = self._position, set[str]()
        self._position += self._peek() in (",", ";")
        if self._kind() in ("word", "text") and self._peek_word(" ,.") in ("and", "or", "and/or"):
            words = set(self._peek_word(" ,.").split("/"))
            self._position += 1
        return words if self._position > before else None

    def _relation(self) -> Node:
        parts, signs = [self._union()], []
        while self._peek() in _RELATIONS:
            signs.append(_RELATIONS[self._next_token().text])
            parts.append(self._union())
        return Node("relation", " ".join(signs), tuple(parts)) if signs else parts[0]

    def _union(self) -> Node:
        node = self._operand()
        while self._peek() in _SETS or self._is_union() or (self._peek() == "-" and node.kind in ("set", "sets")):
            self._count_chained()
            sign = self._next_token().text
            node = Node("sets", "∖" if sign == "-" else _SETS.get(sign, "∪"), (node, self._operand()))
        return node

    def _is_union(self) -> bool:
        """Return whether the next token is a letter U that means ∪, between two brackets."""
        before = self._tokens[self._position - 1].text if self._position else ""
        return self._peek() == "U" and before in (")", "]", "\\}") and self._peek(1) in ("(", "[", "\\{")

    def _operand(self) -> Node:
        """Parse a sum with its unit or percent sign."""
        outer, self._unit = self._unit, ""
        node = self._ratio()
        if self._peek() in ("%", "\\%") or self._peek_word() in ("percent", "pct"):
            self._position += 1
            node = Node("percent", parts=(_as_expression(node),))
        unit = self._read_unit() or self._unit
        self._unit = outer
        return Node("unit", unit, (node,)) if unit else node

    def _ratio(self) -> Node:
        """Parse sums separated by colons. Two are a quotient, or a time if a ratio would have been reduced."""
        first = self._position
        parts = [self._sum()]
        while self._peek() == ":":
            self._count_chained()
            self._position += 1
            parts.append(self._sum())
        if len(parts) == 1:
            return parts[0]
        if len(parts) > 2:
            return Node("ratio", parts=tuple(_as_expression(part) for part in parts))
        digits = [token.text for token in self._tokens[first : self._position] if token.text != ":"]
        quotient = _quotient(*parts)
        is_time = self._position == first + 3 and _is_time(*digits)
        return quotient._replace(kind="time", text=":".join(digits)) if is_time else quotient

    def _peek_word(self, punctuation: str = " .") -> str:
        token = self._tokens[self._position] if self._position < len(self._tokens) else None
        return token.text.strip(punctuation).casefold() if token and token.kind in ("word", "text") else ""

    def _read_unit(self) -> str:
        """Read the unit at this position: words in ``\\text{…}``, with powers and a slash between them."""
        if self._peek() in _CURRENCIES:
            return _CURRENCIES[self._next_token().text]
        words: list[str] = []
        while self._peek_word() not in ("and", "or", "") and not self._is_union():
            if self._kind() != "text" and not self._units:
                break
            words.append(self._next_token().text)
            if self._peek() in ("^", "**"):
                self._position += 1
                words[-1] += f"^{self._digits()}"
            if self._peek() in ("/", "\\cdot") and self._kind(1) in ("text", "word"):
                words.append("/" if self._next_token().text == "/" else "")
        return " ".join(" ".join(words).split())

    def _digits(self) -> str:
        """Read the digits of an exponent or index, with or without braces."""
        braced = self._peek() == "{"
        self._position += braced
        sign = "-" if self._peek() == "-" else ""
        self._position += bool(sign)
        token = self._next_token()
        if token.kind != "number" or not token.text.isdigit():
            raise Unreadable(f"{token.text!r} where a whole number is expected")
        if braced:
            self._expect("}")
        return sign + token.text

    def _sum(self) -> Node:
        terms: list[Node] = []
        while not terms or (self._peek() in ("+", "-", "\\pm", "\\mp") and terms[0].kind != "set"):
            sign = self._next_token().text if self._peek() in ("+", "-", "\\pm", "\\mp") else "+"
            term = self._term()
            if sign in ("-", "\\pm", "\\mp") or terms:
                term = _as_expression(term)
            if sign == "-":
                term = term.parts[0] if terms and term.kind == "minus" else Node("minus", parts=(term,))
            elif sign != "+":
                term = Node("choice", "±" if sign == "\\pm" else "∓", (term,))
            terms.append(term)
        if len(terms) == 1:
            return terms[0]
        return Node("sum", parts=tuple(_as_expression(term) for term in terms))

    def _term(self) -> Node:
        """Parse factors with or without signs between them: ``1/2x`` is 1/(2x)."""
        node = self._run()
        while True:
            sign = self._peek()
            if sign in _TIMES:
                self._position += 1
                node = self._multiplied(node, sign)
            elif sign in _OVER:
                self._count_chained()
                self._position += 1
                node = _quotient(node, self._signed_run())
            elif sign in _MOD:
                self._count_chained()
                self._position += 1
                node = Node("call", "mod", (_as_expression(node), _as_expression(self._run())))
            else:
                return node

    def _multiplied(self, left: Node, sign: str) -> Node:
        """Parse the right side of a product with a sign; with ``vectors``, × binds more tightly than ·."""
        right = self._signed_run()
        if not self._vectors:
            return _product(left, right)
        while sign != "\\times" and self._peek() == "\\times":
            self._position += 1
            right = Node("call", "×", (_as_expression(right), _as_expression(self._signed_run())))
        return Node("call", "×" if sign == "\\times" else "·", (_as_expression(left), _as_expression(right)))

    def _signed_run(self) -> Node:
        if self._peek() == "-":
            self._position += 1
            return Node("minus", parts=(_as_expression(self._run()),))
        return self._run()

    def _run(self) -> Node:
        """Parse factors side by side."""
        factors = [self._factor()]
        while self._starts_factor():
            mixed = self._mixed(factors)
            if mixed is not None:
                factors[-1] = mixed
                continue
            is_factorial = factors[-1].text == "factorial"  # 4!8! is a product
            if self._kind() == "number" and self._pending is None and not is_factorial:
                raise Unreadable("a number directly after another factor; put a sign between them")
            factors.append(self._factor())
        return factors[0] if len(factors) == 1 else _product(*factors)

    def _mixed(self, factors: list[Node]) -> Node | None:
        r"""Read the fraction of a mixed number like ``2\frac{1}{3}`` or ``2 1/3``; return None if there is none."""
        if len(factors) > 1 or not _is_whole_number(factors[0]) or self._pending is not None:
            return None
        if self._peek() in ("\\frac", "\\dfrac", "\\tfrac"):
            fraction = self._factor()
            if fraction.kind != "quotient" or not all(_is_whole_number(part) for part in fraction.parts):
                return _product(factors[0], fraction)
        elif self._kind() == "number" and self._peek(1) == "/" and self._kind(2) == "number":
            fraction = _quotient(*(Node("number", self._tokens[self._position + ahead].text) for ahead in (0, 2)))
            if self._tokens[self._position].spaced != 1 or not all(_is_whole_number(part) for part in fraction.parts):
                return None
            self._position += 3
        else:
            return None
        whole, above, below = (int(part.text) for part in (factors[0], *fraction.parts))
        if above >= below:
            raise Unreadable("a mixed number whose fraction is not less than 1")
        fraction = _quotient(Node("number", str(whole * below + above)), Node("number", str(below)))
        return fraction._replace(text="mixed")

    def _starts_factor(self) -> bool:
        if self._pending is not None or self._kind() == "number":
            return True
        if self._kind() == "text":
            return False
        sign = self._peek()
        if self._is_union():
            return False
        if self._kind() == "word":
            return not self._is_unit_word() and sign.casefold() not in ("and", "or", "percent", "pct")
        if self._kind() == "letters":
            return True
        if sign in _BARS:
            return sign not in self._bars
        if self._kind() == "command":
            name = sign[1:]
            return any(name in names for names in (_STARTS, FUNCTIONS, _GREEK, ALIASES)) or sign in _OPENS
        return sign in ("(", "[", "{")

    def _is_unit_word(self) -> bool:
        """Return whether the next word can be a unit: a known one or a longer word, at the end of its part."""
        word = self._peek_word()
        if not self._units or word in FUNCTIONS or word in _GREEK or word in ("sqrt", "pi", "infinity", "infty"):
            return False
        is_noun = len(word) > 3 and bool(set(word) & set("aeiouy"))
        if not is_noun and not is_abbreviation(self._peek()):
            return False
        return self._peek(1) in ("", ",", ";", "^", "/", ".", "and", "or") or self._kind(1) in ("word", "text")

    def _factor(self) -> Node:
        """Parse a factor with its exponent, index, primes, factorial or arguments."""
        node = self._base()
        powered = False
        while True:
            sign = self._peek()
            if sign in ("^", "**") and self._is_degree():
                self._degree()
            elif sign in ("^", "**") and self._is_prime(1):
                self._position += 1
                node = _with_primes(node, self._primes())
            elif sign in ("^", "**"):
                if powered:
                    raise Unreadable("two exponents in a row")
                self._position += 1
                node, powered = Node("power", parts=(_as_expression(node), _as_expression(self._exponent()))), True
            elif sign == "_":
                self._position += 1
                is_number = _is_whole_number(node)  # as in (204)_5
                node = _based(node.text, self._index()) if is_number else _with_index(node, self._index())
            elif sign in ("'", "\\prime"):
                node = _with_primes(node, self._primes())
            elif sign == "!":
                self._count_chained()
                self._position += 1
                node = Node("call", "factorial", (_as_expression(node),))
            elif sign == "\\degree":
                self._position -= 1  # as if it came after a ^
                self._degree()
            elif sign == "(" and node.kind == "symbol" and not powered:
                node = self._function_or_factor(node)
                if self._pending is not None:
                    return node
            else:
                return node

    def _function_or_factor(self, name: Node) -> Node:
        """Parse f(x), or a symbol that is multiplied by a bracket; the bracket is then the next factor."""
        bracket = self._base()
        arguments = bracket.parts if bracket.kind == "bracket" else (bracket,)
        is_function = name.text[0] in "fghFGHP" or bracket.kind == "bracket"
        if is_function or (bracket.kind in ("number", "symbol") and bracket != name):
            return Node("symbol", f"{name.text}({','.join(serialize(argument) for argument in arguments)})")
        self._pending = bracket
        return name

    def _is_degree(self) -> bool:
        inner = self._peek(2) if self._peek(1) == "{" else self._peek(1)
        return inner in ("\\circ", "\\degree")

    def _degree(self) -> None:
        self._position += 1
        braced = self._peek() == "{"
        self._position += 3 if braced else 1
        scale = self._peek_word()
        if scale in ("c", "f") and self._kind() in ("word", "text") and self._kind(1) == "":
            self._position += 1
            self._unit = f"degree {scale}"
        else:
            self._unit = "degree"

    def _is_prime(self, ahead: int) -> bool:
        inner = self._peek(ahead + 1) if self._peek(ahead) == "{" else self._peek(ahead)
        return inner == "\\prime"

    def _primes(self) -> int:
        braced = self._peek() == "{"
        self._position += braced
        count = 0
        while self._peek() in ("'", "\\prime"):
            self._position += 1
            count += 1
        if braced:
            self._expect("}")
        return count

    def _exponent(self) -> Node:
        if self._peek() in ("-", "+"):
            minus = self._next_token().text == "-"
            node = self._base()
            return Node("minus", parts=(_as_expression(node),)) if minus else node
        return self._base()

    def _index(self) -> str:
        """Read a subscript as text."""
        if self._peek() != "{":
            token = self._next_token()
            if token.kind in ("word", "letters"):
                return self._split_first(token)
            if token.kind in ("number", "text") or token.text in _IN_SUBSCRIPTS - {"{", "}"}:
                return token.text
            raise Unreadable(f"{token.text!r} in a subscript")
        self._position += 1
        words: list[str] = []
        depth = 1
        while True:
            token = self._next_token()
            if token.kind in ("command", "sign") and token.text not in _IN_SUBSCRIPTS:
                raise Unreadable(f"{token.text!r} in a subscript")
            depth += {"{": 1, "}": -1}.get(token.text, 0) if token.kind == "sign" else 0
            if not depth:
                return "".join(words)
            if token.text not in ("{", "}"):
                words.append(token.text)

    def _base(self) -> Node:
        """Parse the start of a factor. All nesting passes through here, so this bounds the depth."""
        if self._pending is not None:
            node, self._pending = self._pending, None
            return node
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise Unreadable(f"it is nested deeper than {MAX_DEPTH} levels")
        if self._peek() in _CURRENCIES:
            self._unit = _CURRENCIES[self._next_token().text]
        node = self._primary(self._next_token())
        self._depth -= 1
        return node

    def _primary(self, token: Token) -> Node:
        if token.kind == "number":
            return self._number(token)
        if token.kind == "text":
            return Node("text", token.text)
        if token.kind in ("word", "letters"):
            return self._word(token)
        if token.text in _OPENS:
            return self._bracket(_OPENS[token.text])
        if token.text == "{":
            return self._group()
        if token.text in _BARS:
            return self._bar(token.text)
        if token.kind == "command":
            return self._command(token.text[1:])
        raise Unreadable(f"{token.text!r} where a number or a symbol is expected")

    def _number(self, token: Token) -> Node:
        digits = token.text
        if re.fullmatch(r"[1-9][0-9]{0,2}", digits):
            while "." not in digits and self._thousands():
                self._position += self._peek() == ","
                digits += self._next_token().text
        if self._peek() in ("\\overline", "\\bar", "\\dot") and re.fullmatch(r"[0-9]*\.[0-9]*", digits):
            self._position += 1
            return Node("repeating", f"{digits}|{self._digits()}")
        if self._peek() == "_":
            self._position += 1
            return _based(digits, self._index())
        return Node("number", _canonical_digits(digits))

    def _thousands(self) -> bool:
        """Return whether three more digits of a number follow, after a comma or a space."""
        comma = self._peek() == ","
        if self._kind(comma) != "number" or (comma and (self._list_depth or self._tokens[self._position].spaced)):
            return False
        group = self._tokens[self._position + comma]
        if group.spaced != 1 - comma or (not comma and self._peek(1) == "/"):
            return False
        return bool(re.fullmatch(r"[0-9]{3}(?:\.[0-9]*)?", group.text))

    def _word(self, token: Token) -> Node:
        """Parse a word that is not a command: a function, a Greek letter, or letters side by side."""
        name = token.text
        if name == "sqrt":
            return Node("root", parts=(_as_expression(self._base()), Node("number", "2")))
        if name in FUNCTIONS or name in ALIASES or name in _GREEK or name in ("pi", "infty"):
            return self._command(name)
        if name in ("infinity", "Infinity"):
            return Node("constant", "∞")
        return _letter(self._split_first(token))

    def _split_first(self, token: Token) -> str:
        """Return the first letter or digit of the current token, and put the others back as the next token."""
        if len(token.text) > 1:
            rest = token.text[1:]
            self._position -= 1
            self._tokens[self._position : self._position + 1] = (
                [Token("letters", rest, 0)] if token.text.isalpha() else tokenize(rest)
            )
        return token.text[0]

    def _group(self) -> Node:
        outer, self._list_depth = self._list_depth, 0
        node = self._list()
        if self._peek() in ("\\over", "\\choose"):
            command = self._next_token().text
            parts = (_as_expression(node), _as_expression(self._list()))
            node = _quotient(*parts) if command == "\\over" else Node("call", "binomial", parts)
        self._list_depth = outer
        self._expect("}")
        return node

    def _bracket(self, opening: str) -> Node:
        bars, self._bars = self._bars, []
        self._list_depth += 1
        element = self._element() if opening == "{" else None
        inner = None if self._peek() in _CLOSES else self._list()
        self._list_depth -= 1
        self._bars = bars
        sign = self._next_token().text
        signs = opening + _CLOSES.get(sign, "?")
        if signs not in _PAIRS:
            raise Unreadable(f"a bracket {opening} closed by {sign}")
        if element is not None:
            bounds = () if inner is None else inner.parts if inner.kind == "list" else (inner,)
            if signs != "{}" or not bounds or any(b.kind != "relation" or element not in b.parts for b in bounds):
                raise Unreadable("a set defined by something other than the bounds of its elements")
            return inner or bounds[0]
        if inner is None and signs == "{}":
            return Node("set", "∅")
        if inner is None:
            raise Unreadable("an empty bracket")
        items = inner.parts if inner.kind == "list" else (inner,)
        if signs == "{}" and any(item.kind == "set" for item in items):
            raise Unreadable("a set in a set")
        return inner if len(items) == 1 and signs in ("()", "[]") else Node("bracket", signs, items)

    def _element(self) -> Node | None:
        r"""Return the x of ``\{x : x > 3\}``, which means x > 3; None if the set does not begin like this."""
        name, ahead = self._peek(), 1
        if [self._peek(offset) for offset in range(1, 6)] == ["\\in", "\\mathbb", "{", "R", "}"]:
            ahead = 6
        if not (len(name) == 1 and name.isalpha()) or self._peek(ahead) not in _SUCH_THAT:
            return None
        self._position += ahead + 1
        return _letter(name)

    def _bar(self, sign: str) -> Node:
        self._bars.append(_BAR_ENDS[sign])
        inner = _as_expression(self._sum())
        self._bars.pop()
        self._expect(_BAR_ENDS[sign])
        return Node("call", _BARS[sign], (inner,))

    def _command(self, name: str) -> Node:
        name = ALIASES.get(name, name)
        if name in FUNCTIONS:
            return self._function(name)
        if name in _GREEK or name in _SYMBOLS:
            return Node("symbol", f"\\{name}")
        if name in _ACCENTS:
            return Node("symbol", f"\\{name}{{{self._index()}}}")
        reader = _COMMANDS.get(name)
        if reader is None:
            raise Unreadable(f"\\{name} is not allowed in an answer")
        return reader(self)

    def _fraction(self) -> Node:
        above, below = self._argument(), self._argument()
        return _derivative(above, below) or _quotient(above, below)

    def _binomial(self) -> Node:
        return Node("call", "binomial", (_as_expression(self._argument()), _as_expression(self._argument())))

    def _argument(self) -> Node:
        r"""Parse the argument of a command: a group or, as in ``\frac12``, one sign."""
        if self._kind() == "number":
            return Node("number", _canonical_digits(self._split_first(self._next_token())))
        if self._kind() in ("word", "letters"):
            return _letter(self._split_first(self._next_token()))
        return self._base()

    def _root(self) -> Node:
        index = Node("number", "2")
        if self._peek() == "[":
            self._position += 1
            index = _as_expression(self._sum())
            self._expect("]")
        return Node("root", parts=(_as_expression(self._argument()), index))

    def _series(self, name: str) -> Node:
        r"""Parse a sum or product over an index: ``\sum_{k=1}^{n} k^2``. The index gets a name that no letter has."""
        index = low = high = None
        while self._peek() in ("_", "^") and (high is None or low is None):
            if self._next_token().text == "^":
                high = _as_expression(self._exponent())
            else:
                range_ = self._base()
                if range_.kind != "relation" or range_.text != "=" or len(range_.parts) != 2:
                    raise Unreadable("an index without a range")
                index, low = range_.parts[0], _as_expression(range_.parts[1])  # i is a constant elsewhere
        if index is None or low is None or high is None or index.kind not in ("symbol", "constant"):
            raise Unreadable("an index without a range")
        body = _as_expression(self._term())
        if _is_part_of_name(index.text, body):
            raise Unreadable("an index in a name, like the k of a_k")
        name_of_index = Node("symbol", f"index{_depth(body)}")
        return Node("series", name, (_replaced(body, index, name_of_index), name_of_index, low, high))

    def _surd(self) -> Node:
        return Node("root", parts=(_as_expression(self._base()), Node("number", "2")))

    def _function(self, name: str) -> Node:
        power, base = None, None
        while self._peek() in ("^", "**", "_"):
            if self._next_token().text == "_":
                base = _as_expression(self._exponent())
            else:
                power = _as_expression(self._exponent())
        arguments = self._function_arguments(name)
        if base is not None and name != "log":
            raise Unreadable(f"\\{name} with a subscript")
        if len(arguments) > 1 and name not in ("gcd", "lcm", "max", "min"):
            raise Unreadable(f"\\{name} of {len(arguments)} numbers")
        node = Node("call", name, (*arguments, *([base] if base else [])))
        if power == Node("minus", parts=(Node("number", "1"),)):
            if f"arc{name}" not in FUNCTIONS:
                raise Unreadable(f"\\{name}^{{-1}} can be read in two ways")
            return node._replace(text=f"arc{name}")
        return node if power is None else Node("power", parts=(node, power))

    def _function_arguments(self, name: str) -> tuple[Node, ...]:
        if self._peek() in ("(", "[", "{"):
            argument = self._base()
            parts = argument.parts if argument.kind in ("bracket", "list") else (argument,)
            return tuple(_as_expression(part) for part in parts)
        if self._peek() == "-":
            raise Unreadable(f"\\{name} before a minus sign")
        factors = [self._factor()]
        while self._starts_factor() and self._peek()[1:] not in FUNCTIONS and self._kind() != "number":
            factors.append(self._factor())
        return (_as_expression(factors[0]) if len(factors) == 1 else _product(*factors),)

    def _blackboard(self) -> Node:
        name = self._index()
        if name not in _LITERAL_SETS:
            raise Unreadable("\\mathbb of a letter that is not a set of numbers")
        return Node("set", name)

    def _matrix(self) -> Node:
        self._expect("{")
        environment = self._next_token().text
        self._expect("}")
        if environment not in _MATRICES:
            raise Unreadable(f"\\begin{{{environment}}} is not allowed in an answer")
        if environment == "array":
            self._index()
        node = self._rows("\\end")
        for sign in ("\\end", "{", environment, "}"):
            self._expect(sign)
        return node

    def _plain_matrix(self) -> Node:
        r"""Parse the matrix of plain TeX: ``\pmatrix{…}``."""
        self._expect("{")
        node = self._rows("}")
        self._expect("}")
        return node

    def _rows(self, end: str) -> Node:
        listing, self._list_depth = self._list_depth, 1
        rows = [self._row()]
        while self._peek() == "\\\\":
            self._position += 1
            if self._peek() != end:
                rows.append(self._row())
        self._list_depth = listing
        if len({len(row.parts) for row in rows}) > 1:
            raise Unreadable("a matrix whose rows differ in length")
        return Node("matrix", parts=tuple(rows))

    def _row(self) -> Node:
        cells = [_as_expression(self._sum())]
        while self._peek() == "&":
            self._position += 1
            cells.append(_as_expression(self._sum()))
        return Node("row", parts=tuple(cells))


_COMMANDS: dict[str, Callable[[_Parser], Node]] = {
    **dict.fromkeys(("frac", "dfrac", "tfrac", "cfrac"), _Parser._fraction),
    **dict.fromkeys(("binom", "dbinom", "tbinom"), _Parser._binomial),
    "sum": lambda parser: parser._series("sum"),
    "prod": lambda parser: parser._series("product"),
    "sqrt": _Parser._root,
    "surd": _Parser._surd,
    "mathbb": _Parser._blackboard,
    "begin": _Parser._matrix,
    **dict.fromkeys(("matrix", "pmatrix", "bmatrix"), _Parser._plain_matrix),
    "pi": lambda _: Node("constant", "π"),
    "infty": lambda _: Node("constant", "∞"),
    **dict.fromkeys(("emptyset", "varnothing"), lambda _: Node("set", "∅")),
}
_STARTS = frozenset({*_COMMANDS, *_SYMBOLS, *_ACCENTS})

_EXPRESSIONS = frozenset({
    "number", "repeating", "based", "symbol", "constant", "sum", "minus", "choice", "product", "quotient", "power",
    "root", "call", "matrix", "series",
})  # fmt: skip


def _as_expression(node: Node) -> Node:
    """Return the node if it can be part of a formula; raise `Unreadable` if not."""
    if node.kind not in _EXPRESSIONS:
        raise Unreadable(f"a {node.kind} inside a formula")
    return node


def _product(*factors: Node) -> Node:
    parts: list[Node] = []
    for factor in factors:
        parts += factor.parts if factor.kind == "product" else (_as_expression(factor),)
    return Node("product", parts=tuple(parts))


def _quotient(above: Node, below: Node) -> Node:
    return Node("quotient", parts=(_as_expression(above), _as_expression(below)))


def _is_time(hours: str, minutes: str) -> bool:
    """Return whether digits like 6:00 or 4:30 are a time, and not a ratio, which would have been reduced."""
    if not (re.fullmatch("[0-9]{1,2}", hours) and re.fullmatch("[0-5][0-9]", minutes) and int(hours) <= 24):
        return False
    return minutes[0] == "0" or math.gcd(int(hours), int(minutes)) > 1


def _derivative(above: Node, below: Node) -> Node | None:
    """Return dx/dt as one symbol; None if it is another fraction."""
    if below.kind != "product" or below.parts[0] != Node("symbol", "d") or len(below.parts) != 2:
        return None
    first = above.parts[0] if above.kind == "product" else above
    first = first.parts[0] if first.kind == "power" else first
    if first != Node("symbol", "d"):
        return None
    return Node("symbol", f"{serialize(above)}/{serialize(below)}")


def _letter(letter: str) -> Node:
    return Node("constant", letter) if letter in "ei" else Node("symbol", letter)


def _based(digits: str, base: str) -> Node:
    return Node("based", f"{digits}_{_BASES.get(base.casefold(), base)}")


def _with_index(node: Node, index: str) -> Node:
    if node.kind == "constant" and node.text in "ei":
        node = Node("symbol", node.text)
    if node.kind != "symbol" or "_" in node.text:
        raise Unreadable("a subscript on something other than a symbol")
    return Node("symbol", f"{node.text}_{{{index}}}")


def _with_primes(node: Node, count: int) -> Node:
    if node.kind != "symbol":
        raise Unreadable("a prime on something other than a symbol")
    return Node("symbol", node.text + "'" * count)


def _is_whole_number(node: Node) -> bool:
    return node.kind == "number" and node.text.isdigit()


def _canonical_digits(digits: str) -> str:
    """Return the digits of a number without redundant zeros."""
    mantissa, mark, exponent = digits.replace("E", "e").partition("e")
    if mark and abs(int(exponent)) > MAX_EXPONENT:
        raise Unreadable(f"a number with an exponent beyond {MAX_EXPONENT}")
    whole, _, part = mantissa.partition(".")
    whole, part = whole.lstrip("0") or "0", part.rstrip("0")
    return whole + (f".{part}" if part else "") + (f"e{int(exponent)}" if mark else "")


def _is_part_of_name(letter: str, node: Node) -> bool:
    is_name = node.kind == "symbol" and node.text != letter and letter in node.text
    return is_name or any(_is_part_of_name(letter, part) for part in node.parts)


def _depth(node: Node) -> int:
    """Return how many sums over an index are nested in a node."""
    return max(map(_depth, node.parts), default=0) + (node.kind == "series")


def _replaced(node: Node, old: Node, new: Node) -> Node:
    return new if node == old else node._replace(parts=tuple(_replaced(part, old, new) for part in node.parts))


def drop_base_ten(node: Node) -> Node:
    """Return a tree whose numbers in base ten, like ``101_{10}``, are plain numbers."""
    if node.kind == "based" and node.text.endswith("_10"):
        return Node("number", _canonical_digits(node.text.removesuffix("_10")))
    return node._replace(parts=tuple(map(drop_base_ten, node.parts)))


def serialize(node: Node) -> str:
    """Return a text that identifies the tree."""
    inner = ",".join(serialize(part) for part in node.parts)
    return node.text if node.kind in ("number", "symbol", "constant") else f"{node.kind}[{node.text}]({inner})"
