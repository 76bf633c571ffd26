"""Arithmetic as a language model writes it: parsed by hand, evaluated exactly.

    expression := term (("+" | "-") term)*
    term       := factor (("*" | "/") factor)*
    factor     := number | "(" expression ")"

There are no signs, no powers and no implicit multiplication. Length, depth, digits and the count of numbers are
bounded, so that no text can cost more than microseconds; the bound on numbers also bounds every recursion over a tree.
"""

from __future__ import annotations

import re
from fractions import Fraction
from typing import NamedTuple, TypeAlias

Rational: TypeAlias = int | Fraction
"""A value; always an int where it is whole, because ints are many times faster."""
Tree: TypeAlias = "int | tuple[str, Tree, Tree]"
"""A number, or (operator, left, right)."""

MAX_LENGTH = 256
MAX_DEPTH = 32
MAX_NUMBERS = 32
MAX_DIGITS = 9

OPERATORS = {"+": "+", "-": "-", "−": "-", "*": "*", "×": "*", "x": "*", "·": "*", "/": "/", "÷": "/"}
"""What may be written for each operator."""
_PRECEDENCE = {"(": 0, "+": 1, "-": 1, "*": 2, "/": 2}
# [0-9], because \d would take the digits of every script.
_TOKEN = re.compile(r"\s*(?:([0-9]+)|(.))", re.DOTALL)


class ExpressionError(ValueError):
    """Text that is no expression of this grammar, or one beyond its bounds."""


class Step(NamedTuple):
    """One operation of an evaluation: left op right = result."""

    left: Rational
    op: str
    right: Rational
    result: Rational


def parse(text: str) -> Tree:
    """The tree of an expression, by operator precedence; `ExpressionError` says where and why there is none."""
    text = text.strip()
    if len(text) > MAX_LENGTH:
        raise ExpressionError(f"{len(text)} characters; an expression has at most {MAX_LENGTH}")
    values: list[Tree] = []
    pending: list[str] = []
    depth = count = 0
    operand_due = True
    for match in _TOKEN.finditer(text):
        digits, symbol = match.groups()
        place = match.start(match.lastindex or 0) + 1
        if operand_due != (digits is not None or symbol == "("):
            due = "a number or '('" if operand_due else "an operator or ')'"
            raise ExpressionError(f"{due} is due at character {place}, not {(digits or symbol)!r}")
        if digits is not None:
            count += 1
            if count > MAX_NUMBERS:
                raise ExpressionError(f"more than {MAX_NUMBERS} numbers")
            if len(digits) > MAX_DIGITS or (digits[0] == "0" and len(digits) > 1):
                raise ExpressionError(f"{digits!r} is not a plain number of at most {MAX_DIGITS} digits")
            values.append(int(digits))
            operand_due = False
        elif symbol == "(":
            depth += 1
            if depth > MAX_DEPTH:
                raise ExpressionError(f"brackets are more than {MAX_DEPTH} deep")
            pending.append("(")
        elif symbol == ")":
            if not depth:
                raise ExpressionError(f"')' at character {place} closes nothing")
            depth -= 1
            _reduce(values, pending, down_to=1)
            pending.pop()
        else:
            op = OPERATORS.get(symbol)
            if op is None:
                raise ExpressionError(f"{symbol!r} at character {place} is not one of + - * / ( )")
            _reduce(values, pending, down_to=_PRECEDENCE[op])
            pending.append(op)
            operand_due = True
    if operand_due:
        raise ExpressionError("it ends where a number is due" if text else "it is empty")
    if depth:
        raise ExpressionError("a '(' is never closed")
    _reduce(values, pending, down_to=1)
    return values[0]


def _reduce(values: list[Tree], pending: list[str], *, down_to: int) -> None:
    """Apply the pending operators that bind at least as tightly as ``down_to``, up to the innermost open bracket."""
    while pending and _PRECEDENCE[pending[-1]] >= down_to:
        right = values.pop()
        values[-1] = (pending.pop(), values[-1], right)


def compute(op: str, left: Rational, right: Rational) -> Rational:
    """left op right, exactly; `ZeroDivisionError` for a division by zero."""
    if op == "/":
        result: Rational = Fraction(left) / right if left % right else left // right
    else:
        result = left + right if op == "+" else left - right if op == "-" else left * right
    return result.numerator if result.denominator == 1 else result


def evaluate(tree: Tree) -> Rational:
    """The exact value of a tree; `ZeroDivisionError` if it divides by zero."""
    if isinstance(tree, int):
        return tree
    op, left, right = tree
    return compute(op, evaluate(left), evaluate(right))


def numbers(tree: Tree) -> list[int]:
    """The numbers of a tree from left to right."""
    return [tree] if isinstance(tree, int) else numbers(tree[1]) + numbers(tree[2])


def steps(tree: Tree) -> list[Step]:
    """The operations of a tree in the order in which one would write them down."""
    if isinstance(tree, int):
        return []
    op, left, right = tree
    before = [*steps(left), *steps(right)]
    a, b = evaluate(left), evaluate(right)
    return [*before, Step(a, op, b, compute(op, a, b))]


def render(tree: Tree, *, terse: bool = False) -> str:
    """A tree as text: ``(32 / 4) * (57 / 19)``; terse, without spaces and needless brackets: ``32/4*57/19``."""
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
    """One text for all trees that differ only in the order of operands and in brackets that change nothing.

    Sums are flattened to (plus, minus) and products to (times, over), then sorted: ``3-(5-7)`` and ``7+3-5`` are both
    ``3+7-5``. Signs are not moved across a product: ``(3-5)*(2-7)`` is not ``(5-3)*(7-2)``.
    """
    return _join(_flatten(tree))


_Flat: TypeAlias = tuple[str, list[str], list[str]]
"""Kind ("+" for sums, "*" for products, "" for a number), what is added (multiplied), what is subtracted (divided)."""


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
