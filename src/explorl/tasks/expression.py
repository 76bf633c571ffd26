r"""Parse arithmetic expressions as language models write them, and evaluate them exactly.

    expression := term (("+" | "-") term)*
    term       := factor (("*" | "/") factor)*
    factor     := number | "(" expression ")" | "\frac{" expression "}{" expression "}"

Square and curly brackets are the same as round ones, and each operator has the spellings listed in ``OPERATORS``.
Signs before a number, powers and implicit multiplication are not supported: ``2(3)`` would be a product but
``2\frac{1}{2}`` a sum, so both are rejected. Length, depth, digits and the number of numbers are limited, so that no
text takes more than microseconds; the limit on numbers also bounds every recursion over a tree.
"""

from __future__ import annotations

import re
from fractions import Fraction
from typing import NamedTuple, TypeAlias

Rational: TypeAlias = int | Fraction
"""A value; always an int if it is whole, because ints are many times faster."""
Tree: TypeAlias = "int | tuple[str, Tree, Tree]"
"""A number, or (operator, left, right)."""

MAX_LENGTH = 256
MAX_DEPTH = 32
MAX_NUMBERS = 32
MAX_DIGITS = 9

OPERATORS = {
    "+": "+", "-": "-", "−": "-", "*": "*", "×": "*", "x": "*", "·": "*", "⋅": "*", "∗": "*", "/": "/", "÷": "/",
    r"\times": "*", r"\cdot": "*", r"\ast": "*", r"\div": "/",
}  # fmt: skip
"""The operator that each spelling stands for."""
# \frac{ … }{ … } is read as two pairs of brackets: "\frac{" to "}{" and "}{" to "}".
_CLOSING = {"(": ")", "[": "]", "{": "}", r"\{": r"\}", r"\frac{": "}{", "}{": "}"}
_BRACKETS = frozenset(_CLOSING) - {"}{"}
_CLOSED = frozenset(_CLOSING.values())
_PRECEDENCE = {"+": 1, "-": 1, "*": 2, "/": 2} | dict.fromkeys(_CLOSING, 0)
# [0-9], because \d also matches the digits of other scripts. Most symbols are one character, so that comes first.
_TOKEN = re.compile(r"\s*(?:([0-9]+)|([^\\}]|\\[dt]?frac\s*\{|\}\s*\{|\}|\\[A-Za-z]+|\\.|\\))", re.DOTALL)
# LaTeX commands that only affect the layout: the size of a bracket, and space.
_LAYOUT = re.compile(r"\\left\s*(?=[(\[]|\\\{)|\\right\s*(?=[)\]]|\\\})|\\[,;:! ]")


class ExpressionError(ValueError):
    """The text is not an expression of this grammar, or exceeds a limit."""


class Step(NamedTuple):
    """One operation of an evaluation: left op right = result."""

    left: Rational
    op: str
    right: Rational
    result: Rational


def parse(text: str) -> Tree:
    """Return the tree of an expression; raise `ExpressionError`, with the position, if it is not one."""
    text = text.strip()
    if len(text) > MAX_LENGTH:
        raise ExpressionError(f"{len(text)} characters; an expression has at most {MAX_LENGTH}")
    if "\\" in text:
        text = _LAYOUT.sub(lambda match: " " * len(match[0]), text)
    values: list[Tree] = []
    pending: list[str] = []
    depth = count = 0
    expects_operand = True
    for match in _TOKEN.finditer(text):
        digits, symbol = match.groups()
        if symbol is not None and len(symbol) > 1:
            symbol = _normal_symbol(symbol)
        if expects_operand != (digits is not None or symbol in _BRACKETS):
            expected = "a number or '('" if expects_operand else "an operator or ')'"
            raise ExpressionError(f"expected {expected} at character {_position(match)}, not {(digits or symbol)!r}")
        if digits is not None:
            values.append(_number(digits))
            count += 1
            if count > MAX_NUMBERS:
                raise ExpressionError(f"more than {MAX_NUMBERS} numbers")
            expects_operand = False
        elif symbol in _BRACKETS:
            depth += 1
            if depth > MAX_DEPTH:
                raise ExpressionError(f"brackets are more than {MAX_DEPTH} deep")
            pending.append(symbol)
        elif symbol in _CLOSED:
            _reduce(values, pending, down_to=1)
            expects_operand = _close(values, pending, symbol, match)
            depth -= not expects_operand
        else:
            op = OPERATORS.get(symbol)
            if op is None:
                raise ExpressionError(f"{symbol!r} at character {_position(match)} is not one of + - * / ( )")
            _reduce(values, pending, down_to=_PRECEDENCE[op])
            pending.append(op)
            expects_operand = True
    if expects_operand:
        raise ExpressionError("it ends where a number is expected" if text else "it is empty")
    if depth:
        raise ExpressionError("a bracket is never closed")
    _reduce(values, pending, down_to=1)
    return values[0]


def _position(match: re.Match[str]) -> int:
    return match.start(match.lastindex or 0) + 1


def _normal_symbol(symbol: str) -> str:
    """Return a symbol of several characters in the spelling that the tables use."""
    symbol = "".join(symbol.split())
    return r"\frac{" if symbol.endswith("frac{") else symbol


def _number(digits: str) -> int:
    if len(digits) > MAX_DIGITS or (digits[0] == "0" and len(digits) > 1):
        raise ExpressionError(f"{digits!r} is not a plain number of at most {MAX_DIGITS} digits")
    return int(digits)


def _close(values: list[Tree], pending: list[str], symbol: str, match: re.Match[str]) -> bool:
    """Close the innermost bracket; return True after a fraction's numerator, when its denominator must follow."""
    opened = pending.pop() if pending else ""
    if _CLOSING.get(opened) != symbol:
        bracket = repr(opened) if opened else "nothing"
        raise ExpressionError(f"{symbol!r} at character {_position(match)} closes {bracket}")
    if symbol == "}{":
        pending.append(symbol)
        return True
    if opened == "}{":
        denominator = values.pop()
        values[-1] = ("/", values[-1], denominator)
    return False


def _reduce(values: list[Tree], pending: list[str], *, down_to: int) -> None:
    """Apply the pending operators that bind at least as tightly as ``down_to``, up to the innermost open bracket."""
    while pending and _PRECEDENCE[pending[-1]] >= down_to:
        right = values.pop()
        values[-1] = (pending.pop(), values[-1], right)


def compute(op: str, left: Rational, right: Rational) -> Rational:
    """Return the exact value of left op right; raise `ZeroDivisionError` for a division by zero."""
    if op == "/":
        result: Rational = Fraction(left) / right if left % right else left // right
    else:
        result = left + right if op == "+" else left - right if op == "-" else left * right
    return result.numerator if result.denominator == 1 else result


def evaluate(tree: Tree) -> Rational:
    """Return the exact value of a tree; raise `ZeroDivisionError` if it divides by zero."""
    if isinstance(tree, int):
        return tree
    op, left, right = tree
    return compute(op, evaluate(left), evaluate(right))


def numbers(tree: Tree) -> list[int]:
    """Return the numbers of a tree from left to right."""
    return [tree] if isinstance(tree, int) else numbers(tree[1]) + numbers(tree[2])


def steps(tree: Tree) -> list[Step]:
    """Return the operations of a tree in the order of their evaluation."""
    if isinstance(tree, int):
        return []
    op, left, right = tree
    a, b = evaluate(left), evaluate(right)
    return [*steps(left), *steps(right), Step(a, op, b, compute(op, a, b))]


def render(tree: Tree, *, terse: bool = False) -> str:
    """Return a tree as text: ``(32 / 4) * (57 / 19)``; terse, without spaces and redundant brackets: ``32/4*57/19``."""
    if isinstance(tree, int):
        return str(tree)
    op, left, right = tree
    # a + (b - c) and a * (b / c) keep their value without brackets, a - (b - c) and a / (b / c) do not.
    tight = _PRECEDENCE[op] + (op in "-/")
    space = "" if terse else " "
    return f"{_operand(left, _PRECEDENCE[op], terse)}{space}{op}{space}{_operand(right, tight, terse)}"


def _operand(tree: Tree, precedence: int, terse: bool) -> str:
    text = render(tree, terse=terse)
    bare = isinstance(tree, int) or (terse and _PRECEDENCE[tree[0]] >= precedence)
    return text if bare else f"({text})"


def canonical(tree: Tree) -> str:
    """Return the same text for all trees that differ only in the order of operands and in redundant brackets.

    Sums are flattened to (plus, minus) and products to (times, over), then sorted: ``3-(5-7)`` and ``7+3-5`` are both
    ``3+7-5``. Signs are not moved across a product: ``(3-5)*(2-7)`` is not ``(5-3)*(7-2)``.
    """
    return _join(_flatten(tree))


_Flat: TypeAlias = tuple[str, list[str], list[str]]
"""The kind ("+" for sums, "*" for products, "" for a number) and its direct and its inverse operands."""


def _flatten(tree: Tree) -> _Flat:
    if isinstance(tree, int):
        return "", [str(tree)], []
    op, left, right = tree
    kind = "+" if op in "+-" else "*"
    direct, inverse = _open(_flatten(left), kind)
    right_direct, right_inverse = _open(_flatten(right), kind)
    if op in "-/":
        right_direct, right_inverse = right_inverse, right_direct
    return kind, direct + right_direct, inverse + right_inverse


def _open(flat: _Flat, kind: str) -> tuple[list[str], list[str]]:
    if flat[0] == kind:
        return flat[1], flat[2]
    text = _join(flat)
    return [f"({text})" if flat[0] == "+" else text], []


def _join(flat: _Flat) -> str:
    kind, direct, inverse = flat
    inverse_op = "-" if kind == "+" else "/"
    return kind.join(sorted(direct)) + "".join(inverse_op + text for text in sorted(inverse))
