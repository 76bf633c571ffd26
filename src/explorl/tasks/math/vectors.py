r"""Check the order of products of vectors and matrices.

For sympy, as `sympy_worker` uses it, all symbols commute: ``\mathbf{b} \times \mathbf{a}``, ``\mathbf{a} \cdot
\mathbf{b}`` and ``\mathbf{a} \times \mathbf{b}`` are one product, and so are ``A^T B`` and ``B A^T``. So if the right
answer has vectors (letters in bold, with an arrow, or with a × between them if the prompt mentions vectors) or matrices
(capitals, if one is transposed or the prompt mentions matrices), an answer must also have the same products in the same
order. Both are multiplied out to sums of words of such letters, whose coefficients are compared by their values at one
point.
"""

from __future__ import annotations

import cmath
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from hashlib import sha256

from explorl.tasks.math.answer_text import Unreadable
from explorl.tasks.math.form import named_value
from explorl.tasks.math.latex import Node, parse

Word = tuple[str, ...]
Words = dict[Word, complex]
"""Products of letters that do not commute, and the coefficient of each; the empty word is a scalar."""

_VECTOR = re.compile(
    r"(\\nabla)|\\(?:mathbf|boldsymbol|bm|vec|bold|pmb|overrightarrow|hat)"
    r"(?:\s*\{\s*([A-Za-z])\s*\}|\s+([A-Za-z])(?![A-Za-z]))"
    r"|\\(?:vec|overrightarrow)\s*\{\s*([A-Z]{2})\s*\}"
    r"|\\(?:boldsymbol|bm|vec|pmb)(?:\s*\{\s*(\\[A-Za-z]+)\s*\}|\s*(\\[A-Za-z]+))"
)
_T = r"(?:T|\\(?:mathsf|mathrm|text)\s*\{\s*T\s*\}|\\(?:mathsf|mathrm)\s+T)"
_TRANSPOSED = re.compile(rf"(?:[A-Z]\}}?|\))\s*\^\s*(?:{_T}|\{{\s*{_T}\s*\}})")
_TRANSPOSES = re.compile(r"\b(?:transpos|adjoint|hermitian)", re.IGNORECASE)
_ACCENT = re.compile(r"\\(?:vec|overrightarrow|hat|bar)\{(\\?[A-Za-z]+)\}|(\\[A-Za-z]+)(?![A-Za-z{])")
_ARROW = re.compile(r"\\vec\{(\\?[A-Za-z]+)\}")
_MOST_WORDS = 500
_MOST_LETTERS = 12
_CLOSE = 1e-6
_CALLS: Mapping[str, Callable[[complex], complex]] = {
    "sin": cmath.sin, "cos": cmath.cos, "tan": cmath.tan, "exp": cmath.exp, "ln": cmath.log, "abs": abs,
}  # fmt: skip


class _Unsupported(ValueError):
    """Raised for a formula with something that cannot be multiplied out here."""


def same_products(prompt: str, gold: str, answer: str) -> bool | None:
    """Return whether an answer has the right one's products of vectors and matrices; None if this cannot be told."""
    vectors = {letter for match in _VECTOR.finditer(gold) for letter in match.groups() if letter}
    has_vectors = re.search(r"\b(?:vectors?|cross product)\b", prompt, re.I) is not None
    has_matrices = _TRANSPOSED.search(gold) is not None or re.search(r"\bmatri(?:x|ces)\b", prompt, re.I) is not None
    marks = frozenset({"T", "t", "H"} if _TRANSPOSES.search(prompt) else {"T"})
    if not (vectors or has_vectors or has_matrices):
        return None
    try:
        nodes = [parse(text, vectors=True) for text in (gold, answer)]
        if has_vectors:
            vectors |= _crossed(nodes[0])
        letters = _Letters(frozenset(vectors), has_matrices, marks)
        if not letters.occur_in(nodes[0]):
            return None
        are_equations = all(node.kind == "relation" and node.text == "=" and len(node.parts) == 2 for node in nodes)
        gold_words, answer_words = map(letters.balance if are_equations else letters.value, nodes)
    except (Unreadable, _Unsupported, ArithmeticError, ValueError):
        return None
    all_words = gold_words.keys() | answer_words.keys()
    return all(_are_close(gold_words.get(word, 0), answer_words.get(word, 0)) for word in all_words)


def _crossed(node: Node) -> set[str]:
    """Return the letters with a × between them."""
    letters = {letter for part in node.parts for letter in _crossed(part)}
    if node == Node("call", "×", node.parts):
        letters |= {_letter(part.text) for part in node.parts if part.kind == "symbol"}
    return letters


def _are_close(first: complex, second: complex) -> bool:
    return abs(first - second) <= _CLOSE * max(abs(first), abs(second), _CLOSE)


def _scalar_value(name: str) -> float:
    """Return a pseudo-random value between 1/2 and 3/2 for a scalar, always the same for a name."""
    return 0.5 + int.from_bytes(sha256(name.encode()).digest()[:6], "big") / (1 << 48)


@dataclass(frozen=True)
class _Letters:
    """The letters that do not commute."""

    vectors: frozenset[str]
    has_matrices: bool
    transposes: frozenset[str]
    """Exponents that transpose."""

    def occur_in(self, node: Node) -> bool:
        """Return whether a formula has a letter that does not commute."""
        is_letter = node.kind in ("symbol", "constant") and () not in self.words(node)
        return is_letter or any(map(self.occur_in, node.parts))

    def balance(self, equation: Node) -> Words:
        """Return one side of an equation minus the other, multiplied out and scaled by a factor."""
        words = _added([self.words(equation.parts[0]), _scaled(self.words(equation.parts[1]), -1)])
        return _scaled(words, 1 / (words[min(words)] or 1))

    def value(self, answer: Node) -> Words:
        """Return the value of an answer without its name or unit, multiplied out."""
        node = named_value(answer)
        return self.words(node.parts[0] if node.kind == "unit" else node)

    def words(self, node: Node) -> Words:
        """Return a formula multiplied out."""
        reader = getattr(self, f"_{node.kind}", None)
        if reader is None:
            raise _Unsupported(node.kind)
        words: Words = reader(node)
        if len(words) > _MOST_WORDS or any(len(word) > _MOST_LETTERS for word in words):
            raise _Unsupported("too long")
        return words

    def _number(self, node: Node) -> Words:
        return {(): complex(float(node.text))}

    def _constant(self, node: Node) -> Words:
        if node.text in self.vectors:  # the i of i, j and k
            return {(node.text,): 1}
        values = {"π": cmath.pi, "e": cmath.e, "i": 1j}
        if node.text not in values:
            raise _Unsupported(node.text)
        return {(): values[node.text]}

    def _symbol(self, node: Node) -> Words:
        letter = _letter(node.text)
        if letter in self.vectors or (self.has_matrices and letter.isupper()):
            return {() if node.text == "I" and self.has_matrices else (_ARROW.sub(r"\1", node.text),): 1}
        return {(): _scalar_value(node.text)}

    def _sum(self, node: Node) -> Words:
        return _added([self.words(part) for part in node.parts])

    def _minus(self, node: Node) -> Words:
        return _scaled(self.words(node.parts[0]), -1)

    def _product(self, node: Node) -> Words:
        words: Words = {(): 1}
        for part in node.parts:
            words = self._bilinear(words, self.words(part), lambda first, second: {first + second: 1})
        return self._scalars(words)

    def _quotient(self, node: Node) -> Words:
        above, below = map(self.words, node.parts)
        return _scaled(above, 1 / _scalar(below))

    def _power(self, node: Node) -> Words:
        base, exponent = node.parts
        words = self.words(base)
        if set(words) <= {()}:
            return {(): _scalar(words) ** _scalar(self.words(exponent))}
        if exponent.kind == "symbol" and exponent.text in self.transposes:
            return self._scalars({_transposed(word): factor for word, factor in words.items()})
        if exponent == Node("minus", parts=(Node("number", "1"),)) and len(words) == 1:
            ((word, factor),) = words.items()
            return {tuple(_toggled(letter, "⁻¹") for letter in reversed(word)): 1 / factor}
        if exponent.kind != "number" or not exponent.text.isdigit() or int(exponent.text) > _MOST_LETTERS:
            raise _Unsupported("an exponent")
        if exponent.text == "2" and all(map(self._is_vector, words)):  # v² is v · v
            return self._dot(words, words)
        return self._product(Node("product", parts=(base,) * int(exponent.text)))

    def _root(self, node: Node) -> Words:
        radicand, index = (_scalar(self.words(part)) for part in node.parts)
        return {(): radicand ** (1 / index)}

    def _call(self, node: Node) -> Words:
        arguments = [self.words(part) for part in node.parts]
        if node.text in ("×", "·"):
            first, second = arguments
            if () in first or () in second:
                return self._bilinear(first, second, lambda left, right: {left + right: 1})
            if node.text == "×":
                return self._bilinear(first, second, self._cross)
            if all(map(self._is_vector, [*first, *second])):
                return self._dot(first, second)
            return self._scalars(self._bilinear(first, second, lambda left, right: {left + right: 1}))
        if node.text == "abs" and set(arguments[0]) - {()}:
            return {(): cmath.sqrt(_scalar(self._dot(arguments[0], arguments[0])))}
        if node.text not in _CALLS:
            raise _Unsupported(node.text)
        return {(): complex(_CALLS[node.text](_scalar(arguments[0])))}

    def _is_vector(self, word: Word) -> bool:
        """Return whether a word is a column: it ends with a vector and does not begin with a row."""
        return bool(word) and self._is_column(word[-1]) and not word[0].endswith("ᵀ")

    def _is_column(self, letter: str) -> bool:
        name = _letter(letter)
        is_matrix = self.has_matrices and name.isupper()
        return letter.startswith("(") or (name in self.vectors and not letter.endswith("ᵀ") and not is_matrix)

    def _scalars(self, words: Words) -> Words:
        """Replace rows times columns by their dot products, independent of which of the two is transposed."""
        terms: list[Words] = []
        for word, factor in words.items():
            is_row = word and word[0].endswith("ᵀ") and self._is_column(word[0][:-1])
            if is_row and len(word) > 1 and self._is_column(word[-1]):
                name = min(word, _transposed(word))
                terms.append({(): factor * _scalar_value("".join(name))})
            else:
                terms.append({word: factor})
        return _added(terms)

    def _dot(self, first: Words, second: Words) -> Words:
        def dot(left: Word, right: Word) -> Words:
            product = (*_transposed(left), *right)
            is_operator = "\\nabla" in (*left, *right)  # it acts on what follows
            return {(): _scalar_value("".join(product if is_operator else min(product, _transposed(product))))}

        return self._bilinear(first, second, dot)

    def _cross(self, left: Word, right: Word) -> Words:
        if left == right:
            return {}
        name = "×".join("".join(word) for word in sorted((left, right)))
        return {(f"({name})",): 1 if left < right else -1}

    def _bilinear(self, first: Words, second: Words, product: Callable[[Word, Word], Words]) -> Words:
        if len(first) * len(second) > _MOST_WORDS:
            raise _Unsupported("too long")
        return _added(
            [
                _scaled(product(left, right), factor * other)
                for left, factor in first.items()
                for right, other in second.items()
            ]
        )


def _letter(name: str) -> str:
    """Return the letter that a symbol's name begins with, or its command."""
    if match := _ACCENT.match(name):
        return match[1] or match[2]
    return name[:1]


def _added(terms: list[Words]) -> Words:
    total: Words = {}
    for words in terms:
        for word, factor in words.items():
            total[word] = total.get(word, 0) + factor
    return {word: factor for word, factor in total.items() if factor} or {(): 0}


def _scaled(words: Words, by: complex) -> Words:
    return {word: factor * by for word, factor in words.items()}


def _scalar(words: Words) -> complex:
    if set(words) - {()}:
        raise _Unsupported("a vector or matrix where a scalar is expected")
    return words.get((), 0)


def _transposed(word: Word) -> Word:
    return tuple(_toggled(letter, "ᵀ") for letter in reversed(word))


def _toggled(letter: str, mark: str) -> str:
    return letter.removesuffix(mark) if letter.endswith(mark) else letter + mark
