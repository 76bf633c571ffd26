"""Compute the exact value of an answer's tree, and find the operations that it leaves undone."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from fractions import Fraction

from explorl.tasks.math.answer_text import FUNCTIONS
from explorl.tasks.math.latex import Node

MAX_BITS = 8_192
"""The largest size of a number that is computed, about twice that of the thousand digits that an answer may have."""

Value = Fraction | str | tuple[str, tuple["Value", ...]]
"""A number; ``∞`` or ``-∞``; or the kind of a bracket, matrix or ratio and the values in it."""


class Undefined(ValueError):
    """Raised for a tree without a value, or with one that is too large to compute."""


def exact_value(node: Node) -> Value | None:
    """Return the exact value of a tree of rational numbers, alone or in brackets; None if it has symbols or roots."""
    if node.kind in ("bracket", "matrix", "row", "list", "named"):
        parts = tuple(exact_value(part) for part in node.parts)
        values = tuple(part for part in parts if part is not None)
        if len(values) < len(parts):
            return None
        unordered = node.kind == "list" or node.text == "{}"
        return (
            node.text if node.kind == "bracket" else node.kind,
            tuple(sorted(values, key=str)) if unordered else values,
        )
    if node.kind == "ratio":
        ratio = [rational_value(part) for part in node.parts]
        scale = next((part for part in ratio if part), Fraction(1))
        return None if None in ratio else ("ratio", tuple(part / scale for part in ratio if part is not None))
    if node == Node("constant", "∞"):
        return "∞"
    if node == Node("minus", parts=(Node("constant", "∞"),)):
        return "-∞"
    return rational_value(node)


def rational_value(node: Node) -> Fraction | None:
    """Return the exact value of a tree that is one rational number; None if it is not."""
    if node.kind == "number":
        return Fraction(node.text)
    if node.kind == "repeating":
        return _repeating(node.text)
    compute = _CALLS.get(node.text) if node.kind == "call" else _COMPUTATIONS.get(node.kind)
    if compute is None:
        return None
    parts = [rational_value(part) for part in node.parts]
    values = [part for part in parts if part is not None]
    if len(values) < len(parts):
        return None
    result = compute(*values)
    if result is not None and max(result.numerator.bit_length(), result.denominator.bit_length()) > MAX_BITS:
        raise Undefined("a number too large to compute")
    return result


def _repeating(digits: str) -> Fraction:
    before, _, period = digits.partition("|")
    decimals = len(before.partition(".")[2])
    return Fraction(before + "0") + Fraction(int(period), 10**decimals * (10 ** len(period) - 1))


def _quotient(above: Fraction, below: Fraction) -> Fraction:
    if not below:
        raise Undefined("a division by zero")
    return above / below


def _power(base: Fraction, exponent: Fraction) -> Fraction | None:
    if exponent.denominator != 1:
        return _root(base, Fraction(exponent.denominator)) if exponent.numerator == 1 else None
    if not base and exponent <= 0:
        raise Undefined("a power of zero")
    size = max(abs(base.numerator), base.denominator).bit_length()
    if abs(exponent) * size > MAX_BITS and abs(base) != 1:
        raise Undefined("a number too large to compute")
    return base ** int(exponent)


def _root(radicand: Fraction, index: Fraction) -> Fraction | None:
    """Return the root if it is rational, else None."""
    if index.denominator != 1 or not 2 <= index <= 64 or radicand < 0:
        return None
    roots = [_whole_root(side, int(index)) for side in (radicand.numerator, radicand.denominator)]
    return None if None in roots else Fraction(*(root for root in roots if root is not None))


def _whole_root(number: int, index: int) -> int | None:
    if index == 2:
        guess = math.isqrt(number)
    else:
        low, high = 0, 1 << (number.bit_length() // index + 1)
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if middle**index <= number else (low, middle - 1)
        guess = low
    return guess if guess**index == number else None


def _whole(*numbers: Fraction) -> list[int]:
    if any(number.denominator != 1 or abs(number) >= 1 << 63 for number in numbers):
        raise Undefined("a function of whole numbers applied to other numbers")
    return [int(number) for number in numbers]


def _factorial(value: Fraction) -> Fraction:
    (whole,) = _whole(value)
    if not 0 <= whole <= 800:
        raise Undefined("a number too large to compute")
    return Fraction(math.factorial(whole))


def _binomial(above: Fraction, below: Fraction) -> Fraction:
    total, chosen = _whole(above, below)
    if not 0 <= chosen <= total <= 8_000:
        raise Undefined("a number too large to compute")
    return Fraction(math.comb(total, chosen))


def _mod(left: Fraction, right: Fraction) -> Fraction:
    if not right:
        raise Undefined("a division by zero")
    return left % right


_COMPUTATIONS: dict[str, Callable[..., Fraction | None]] = {
    "sum": lambda *terms: sum(terms, Fraction(0)),
    "minus": lambda term: -term,
    "product": lambda *factors: math.prod(factors, start=Fraction(1)),
    "quotient": _quotient,
    "time": _quotient,
    "power": _power,
    "root": _root,
}
_CALLS: dict[str, Callable[..., Fraction | None]] = {
    "factorial": _factorial,
    "binomial": _binomial,
    "mod": _mod,
    "gcd": lambda *numbers: Fraction(math.gcd(*_whole(*numbers))),
    "lcm": lambda *numbers: Fraction(math.lcm(*_whole(*numbers))),
    "max": lambda *numbers: max(numbers),
    "min": lambda *numbers: min(numbers),
    "abs": lambda value: abs(value),
    "floor": lambda value: Fraction(math.floor(value)),
    "ceil": lambda value: Fraction(math.ceil(value)),
}


@dataclass
class Operations:
    """The operations that a tree leaves undone."""

    names: set[str] = field(default_factory=set)
    """Kinds of operations, as an error names them."""
    symbols: set[str] = field(default_factory=set)
    terms: int = 1
    """The largest number of constants in a sum, like 2 in 1 + √3."""
    exponent: int = 0
    """The largest exponent that is a number."""
    decimals: bool = False
    sets: int = 0
    """Unions, intersections and differences of sets, and elements of sets in braces."""


def find_operations(*nodes: Node) -> Operations:
    """Find the operations of trees."""
    operations = Operations()
    for node in nodes:
        _visit(node, operations)
    return operations


def _visit(node: Node, operations: Operations) -> None:
    if node.kind == "symbol":
        operations.symbols.add(node.text)
    elif node.kind == "constant":
        operations.names.add(node.text)
    elif node.kind in ("number", "repeating"):
        operations.decimals |= not node.text.isdigit()
    elif node.kind == "series":
        operations.names.add(f"a {node.text} over an index")
    elif node.kind == "call":
        operations.names.add(FUNCTIONS.get(node.text, node.text))
    elif node.kind in _VISITS:
        _VISITS[node.kind](node, operations)
    elif node.kind in ("percent", "unit", "text", "based", "choice"):
        operations.names.add(f"a {node.kind} in a formula")
    for part in _visited(node):
        _visit(part, operations)


def _visited(node: Node) -> tuple[Node, ...]:
    """Return the parts to visit: not an exponent of digits, and not an infinite end of an interval."""
    if node.kind == "power" and _is_plain(node.parts[1]):
        return node.parts[:1]
    if node.kind in ("bracket", "interval"):
        return tuple(part for part in node.parts if not isinstance(exact_value(part), str))
    return node.parts


def _visit_minus(node: Node, operations: Operations) -> None:
    if node.parts[0].kind == "minus" and _is_constant(node):
        operations.names.add("a sum of numbers")


def _visit_sum(node: Node, operations: Operations) -> None:
    constants = [part for part in node.parts if _is_constant(part)]
    if sum(_is_plain(part) for part in constants) > 1:
        operations.names.add("a sum of numbers")
    operations.terms = max(operations.terms, len(constants))


def _visit_product(node: Node, operations: Operations) -> None:
    if sum(_is_plain(part) for part in node.parts) > 1:
        operations.names.add("a product of numbers")
    if sum(_is_constant_sum(part) for part in node.parts) > 1:
        operations.names.add("a product of sums")


def _visit_quotient(node: Node, operations: Operations) -> None:
    above, below = node.parts
    if not _is_constant(below):
        operations.names.add("a division by symbols")
    elif _is_constant_sum(below):
        operations.names.add("a division by a sum")
    elif _is_plain(above) and _is_plain(below):
        operations.names.add("a fraction" if _is_finished_fraction(above, below) else "a division of numbers")
    else:
        operations.names.add("a fraction")


def _visit_power(node: Node, operations: Operations) -> None:
    base, exponent = node.parts
    size = rational_value(exponent) if _is_plain(exponent) else None
    if size is None:
        operations.names.add("a power with a calculated exponent" if _is_constant(exponent) else "exponential")
    elif not _is_plain(base):  # for plain numbers, `rational_value` bounds the result
        operations.exponent = max(operations.exponent, abs(math.ceil(size)))
    if not _is_constant(base):
        if size is not None and size < 0:
            operations.names.add("a division by symbols")
        if size is not None and size.denominator != 1:
            operations.names.add("a root of symbols")
    elif size is not None and size.denominator != 1:
        operations.names.add("a root")
    elif base.kind == "constant" and size is not None and size < 0:
        operations.names.add("a negative power")
    elif _is_constant_sum(base):
        operations.names.add("a power of a sum")
    elif (base.kind != "constant" and size is not None and not is_power_of_ten(node)) or base == Node("constant", "i"):
        operations.names.add("a power of numbers")


def _visit_root(node: Node, operations: Operations) -> None:
    radicand, index = node.parts
    if not index.text.isdigit():
        operations.names.add("a root with a calculated index")
    if not _is_constant(radicand):
        operations.names.add("a root of symbols")
    else:
        operations.names.add("a root of a sum" if radicand.kind == "sum" else "a root")


def _visit_sets(node: Node, operations: Operations) -> None:
    operations.names.add(node.text)
    operations.sets += 1


def _visit_bracket(node: Node, operations: Operations) -> None:
    if node.text == "{}":
        operations.sets += len(node.parts)


_VISITS: dict[str, Callable[[Node, Operations], None]] = {
    "minus": _visit_minus,
    "sum": _visit_sum,
    "product": _visit_product,
    "quotient": _visit_quotient,
    "time": _visit_quotient,
    "power": _visit_power,
    "root": _visit_root,
    "sets": _visit_sets,
    "bracket": _visit_bracket,
}


def _is_constant(node: Node) -> bool:
    return node.kind != "symbol" and all(_is_constant(part) for part in node.parts)


def _is_constant_sum(node: Node) -> bool:
    return node.kind == "sum" and _is_constant(node)


def is_power_of_ten(node: Node) -> bool:
    return node.kind == "power" and node.parts[0] == Node("number", "10") and _is_literal(node.parts[1])


def _is_literal(node: Node) -> bool:
    """Return whether a node is digits, optionally with a minus sign."""
    return node.kind in ("number", "repeating") or (node.kind == "minus" and _is_literal(node.parts[0]))


def _is_plain(node: Node) -> bool:
    """Return whether a node is digits or a fraction of digits, optionally negative; 10ⁿ is not."""
    if node.kind == "minus":
        return _is_plain(node.parts[0])
    return _is_literal(node) or (node.kind == "quotient" and all(_is_plain(part) for part in node.parts))


def _is_finished_fraction(above: Node, below: Node) -> bool:
    if not all(_is_literal(part) and rational_value(part) is not None for part in (above, below)):
        return False
    numerator, denominator = rational_value(above), rational_value(below)
    assert numerator is not None
    assert denominator is not None
    return numerator.denominator == denominator.denominator == 1 and denominator != 0 and numerator % denominator != 0
