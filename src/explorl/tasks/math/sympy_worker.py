r"""Compare two answers, parsed by `latex`, in an isolated process (`explorl.sandbox.isolated_call`).

`build` makes sympy objects of the trees that `form` writes as texts. math-verify compares them, in some cases wrongly:
any two equations without solutions would be equal, and so would all numbers below 1e-15. So

* nothing in an answer may be undefined (1/0) or infinite, unless the right answer is;
* relations must be the same side by side, up to a factor that is a number, whatever their solutions are;
* formulas must be close to each other, relative to their size, at all points that are tried.

This module imports only the standard library, and sympy and math-verify inside its functions, so the process has no
torch and starts in a second.
"""

from __future__ import annotations

import functools
import json
import logging
import math
import operator
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

MAX_BITS = 8_192
"""The largest size of a number."""

_CLOSE = 5e-6  # six digits


def prepare(_: Any) -> None:
    """Fill the caches of sympy and math-verify: each pair is compared in a fork, whose caches are lost."""
    import math_verify  # noqa: F401 (raises ImportError, which names it, if it is missing)

    for library in ("math_verify", "latex2sympy2_extended"):  # both log every answer that they cannot compare
        logging.getLogger(library).setLevel(logging.CRITICAL)
    for index, answer in enumerate(EXAMPLES):
        with suppress(Exception):  # an error that matters will occur again in a comparison
            same_answer(answer, EXAMPLES[(7 * index + 3) % len(EXAMPLES)])


def prepare_trusted(gold: str) -> Any:
    """Return the sympy object of a right answer."""
    return build(gold)


def compare(message: dict[str, Any], gold: Any) -> bool:
    """Return whether a message's answer equals the right one, which `prepare_trusted` has built."""
    return same_answer(str(message["gold"]), str(message["answer"]), gold)


def same_answer(gold: str, answer: str, built_gold: Any = None) -> bool:
    """Return whether two answers, written by `form.worker_texts`, are equal.

    Raises ValueError, with the reason, if the answer must not be compared.
    """
    from math_verify import verify

    first, second = build(gold) if built_gold is None else built_gold, build(answer)
    if (reason := refusal_reason(first, second)) is not None:
        raise ValueError(reason)
    # math-verify's own time limit is an alarm, which works neither in threads nor during a long C call.
    return bool(verify([first], [second], timeout_seconds=None)) or agree(first, second)


def refusal_reason(gold: Any, answer: Any) -> str | None:
    """Return why the answer is refused; None if it may be compared."""
    import sympy

    if any(node is sympy.nan or node is sympy.zoo for node in _nodes(answer)):
        return "the answer is not compared: it is undefined"
    if _infinities(answer) and not _infinities(gold):
        return "the answer is not compared: it is infinite"
    if _is_another_relation(gold, answer) or _differ(gold, answer):
        return "another answer than the right one"
    return None


def _children(node: Any) -> tuple[Any, ...]:
    import sympy

    if isinstance(node, sympy.MatrixBase):
        return tuple(node.flat())
    return tuple(getattr(node, "args", ()))


def _nodes(tree: Any) -> Iterator[Any]:
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        yield node
        waiting += _children(node)


def _infinities(tree: Any) -> int:
    """Return how many parts of a tree are infinite, except the ends of intervals."""
    import sympy

    infinite = (sympy.oo, -sympy.oo)
    nodes = list(_nodes(tree))
    ends = [end for node in nodes if isinstance(node, sympy.Interval) for end in node.args]
    return sum(node in infinite for node in nodes) - sum(end in infinite for end in ends)


def _is_another_relation(gold: Any, answer: Any) -> bool:
    """Return whether the answer is another relation than the right one."""
    import sympy

    right, stated = _relations(gold), _relations(answer)
    if right is None or stated is None:
        return False
    if not all(isinstance(side, sympy.Expr) for _, *sides in right + stated for side in sides):
        return False
    return len(right) != len(stated) or not all(map(_are_same_relation, right, stated))


def _relations(tree: Any) -> list[tuple[str, Any, Any]] | None:
    """Return the relations of a chain, each with its sign and sides, the smaller first; None if it is not a chain."""
    import sympy

    items = getattr(tree, "_unsorted_args", tree.args) if isinstance(tree, sympy.And) else [tree]
    if not items or not all(isinstance(item, sympy.core.relational.Relational) for item in items):
        return None
    turned = [item.reversed if item.rel_op.startswith(">") else item for item in items]
    return [(item.rel_op, item.lhs, item.rhs) for item in turned]


def _are_same_relation(right: tuple[str, Any, Any], stated: tuple[str, Any, Any]) -> bool:
    """Return whether the differences of both sides are proportional, and for < by a positive factor."""
    import sympy

    if right[0] != stated[0]:
        return False
    first, second = right[1] - right[2], stated[1] - stated[2]
    values = [_evaluate_at([first, second], point) for point in range(2)]
    ratios = [above / below for above, below in values if above is not None and below]
    if len(ratios) == 2 and abs(ratios[0] - ratios[1]) > _CLOSE * abs(ratios[0]):
        return False
    factor = sympy.cancel(first / second)
    if factor.free_symbols:
        factor = sympy.simplify(factor)
    if factor.free_symbols or not factor.is_finite or factor.is_zero:
        return False
    return right[0] in ("==", "!=") or factor.is_positive is True


_POINTS = ((0.37145, 0.61923, 0.83311, 0.29077, 0.71539), (0.44871, 0.23957, 0.57713, 0.91331, 0.12893))


def _evaluate_at(trees: Sequence[Any], point: int) -> list[complex | None]:
    """Evaluate formulas at one of two points; None for a formula whose value is not a finite number."""
    import sympy

    coordinates = _POINTS[point]
    symbols = sorted({symbol for tree in trees for symbol in tree.free_symbols}, key=str)
    substitution = {symbol: sympy.Float(coordinates[i % 5]) / (1 + i // 5) for i, symbol in enumerate(symbols)}
    values: list[complex | None] = []
    for tree in trees:
        try:
            value = complex(tree.subs(substitution).evalf(20))
            values.append(value if math.isfinite(value.real) and math.isfinite(value.imag) else None)
        except (TypeError, ValueError, ArithmeticError, AttributeError, NotImplementedError):
            values.append(None)
    return values


def _differ(gold: Any, answer: Any) -> bool:
    """Return whether two formulas differ at a point where both have a value, which must be real unless gold has i."""
    import sympy

    if isinstance(gold, sympy.Tuple) and isinstance(answer, sympy.Tuple):
        return len(gold) != len(answer) or any(map(_differ, gold, answer))
    if not all(isinstance(tree, sympy.Expr) and not isinstance(tree, sympy.MatrixExpr) for tree in (gold, answer)):
        return False
    if any(isinstance(node, (sympy.Sum, sympy.Product)) for node in (*_nodes(gold), *_nodes(answer))):
        return False  # evaluating them at a point that is not whole takes minutes
    is_real = bool(gold.free_symbols | answer.free_symbols) and sympy.I not in _nodes(gold)
    for point in range(2):
        first, second = _evaluate_at([gold, answer], point)
        if first is None or second is None or (is_real and (first.imag or second.imag)):
            continue
        if abs(first - second) > _CLOSE * max(abs(first), abs(second)):
            return True
    return False


_SIGNS = ("+++++", "++-+-", "-+--+", "+--++", "---+-", "-++-+", "+-+--", "-----")
_MOST_DIGITS, _DIGITS = 64, 60  # binary, decimal
_MOST_DIFFERENCE = 1e-50  # no fraction of so few digits is that close to e or π


def agree(gold: Any, answer: Any) -> bool:
    """Return whether two elementary formulas have the same real values at several points, of both signs.

    sympy alone does not know ln(1/x) = -ln x, because it holds only where both are real.
    """
    import sympy

    if not all(isinstance(tree, sympy.Expr) and all(map(_is_analytic, _nodes(tree))) for tree in (gold, answer)):
        return False
    symbols = sorted(gold.free_symbols | answer.free_symbols, key=str)
    count = 0
    all_signs = _SIGNS if symbols else _SIGNS[:1]
    for index, signs in enumerate(all_signs):
        point = {
            symbol: sympy.Rational(f"{signs[i % 5]}{_POINTS[0][(i + index) % 5]}") * (1 + (i + index) % 3)
            for i, symbol in enumerate(symbols)
        }
        try:
            first, second = (tree.evalf(_DIGITS, subs=point) for tree in (gold, answer))
            if not (first.is_finite and second.is_finite) or bool(first.is_real) != bool(second.is_real):
                return False
            difference, size = abs(first - second), max(abs(first), abs(second))
            if first.is_real and not difference <= _MOST_DIFFERENCE * size:
                return False
        except (TypeError, ValueError, ArithmeticError, AttributeError, NotImplementedError):
            return False
        count += bool(first.is_real)
    return count >= min(2, len(all_signs))


def _is_analytic(node: Any) -> bool:
    import sympy
    from sympy.functions.elementary.hyperbolic import HyperbolicFunction, InverseHyperbolicFunction
    from sympy.functions.elementary.trigonometric import InverseTrigonometricFunction, TrigonometricFunction

    if isinstance(node, sympy.Rational):
        return max(abs(node.p), node.q).bit_length() <= _MOST_DIGITS
    kinds = (sympy.Add, sympy.Mul, sympy.Pow, sympy.Symbol, sympy.NumberSymbol, sympy.Abs, sympy.exp, sympy.log)
    families = (HyperbolicFunction, InverseHyperbolicFunction, InverseTrigonometricFunction, TrigonometricFunction)
    return isinstance(node, (*kinds, *families))


# Trees from texts


def build(text: str) -> Any:
    """Return the sympy object of a tree written by `form.worker_texts`."""
    return _build_node(*json.loads(text))


def _build_node(kind: str, text: str, inner: list[Any]) -> Any:
    import sympy

    parts = [_build_node(*part) for part in inner]
    match kind:
        case "number":
            return sympy.Rational(text)
        case "symbol":
            return sympy.Symbol(text, real=True)
        case "constant":
            return {"π": sympy.pi, "e": sympy.E, "i": sympy.I, "∞": sympy.oo}[text]
        case "sum" | "product":
            if any(isinstance(part, sympy.MatrixBase) for part in parts):
                return functools.reduce(operator.add if kind == "sum" else operator.mul, parts)
            return sympy.Add(*parts) if kind == "sum" else sympy.Mul(*parts)
        case "minus":
            return -parts[0]
        case "quotient" | "time":
            return parts[0] * _power(parts[1], sympy.Integer(-1))
        case "power":
            return _power(*parts)
        case "root":
            return sympy.Pow(parts[0], 1 / parts[1])
        case "call":
            return _call(text, parts)
        case "series":
            return {"sum": sympy.Sum, "product": sympy.Product}[text](parts[0], tuple(parts[1:]))
        case "bracket" | "named":
            return sympy.FiniteSet(*parts) if text == "{}" else sympy.Tuple(*parts)
        case "ratio":
            return sympy.Tuple(*(part * _power(parts[0], sympy.Integer(-1)) for part in parts))
        case "interval":
            return _interval(text, parts)
        case "sets":
            return {"∪": sympy.Union, "∩": sympy.Intersection, "∖": sympy.Complement}[text](*parts)
        case "set":
            return getattr(sympy.S, _SETS[text])
        case "row":
            return parts
        case "matrix":
            return sympy.Matrix(parts)
        case "relation":
            return _relation(text, parts)
    raise ValueError(f"it has a {kind}, which cannot be compared")


_SETS = {"∅": "EmptySet", "N": "Naturals", "Z": "Integers", "Q": "Rationals", "R": "Reals", "C": "Complexes"}
_FUNCTIONS = {"ln": "log", "abs": "Abs", "ceil": "ceiling", "mod": "Mod", "max": "Max", "min": "Min"}


def _power(base: Any, exponent: Any) -> Any:
    import sympy

    if max(1.0, _bits(base)) * _magnitude(exponent, _bits(exponent)) > MAX_BITS:
        raise ValueError("it has a number too large to compute")
    return sympy.Pow(base, exponent)


def _bits(node: Any) -> float:
    """Return an upper bound of the size of a tree's value in bits; a symbol has one."""
    import sympy

    if isinstance(node, sympy.Rational):
        return float(max(abs(node.p), node.q).bit_length())
    parts = [_bits(child) for child in _children(node)]
    if isinstance(node, sympy.Pow):
        size = _magnitude(node.exp, parts[1])
        return max(1.0, parts[0]) * max(1.0, size)
    if isinstance(node, (sympy.factorial, sympy.binomial, sympy.gamma)):
        size = max((_magnitude(child, part) for child, part in zip(node.args, parts, strict=True)), default=1.0)
        return size * max(1.0, math.log2(max(size, 2.0)))
    if isinstance(node, sympy.Mul):
        return sum(parts)
    return max(parts, default=1.0) + math.log2(len(parts) + 1)


def _magnitude(node: Any, bits: float) -> float:
    """Return the absolute value of an exponent, or the largest that its bits allow if it must be computed first."""
    import sympy

    if isinstance(node, sympy.Number) and bits < 64:
        return abs(float(node))
    if node.free_symbols and not any(isinstance(part, sympy.Pow) for part in _nodes(node)):
        return 1.0
    return math.inf if bits > 20 else 2.0**bits


def _call(text: str, parts: list[Any]) -> Any:
    import sympy

    name = _FUNCTIONS.get(text, f"a{text[3:]}" if text.startswith("arc") else text)
    if text == "log" and len(parts) == 1:
        parts = [*parts, sympy.Integer(10)]
    if text in ("factorial", "binomial") and max(map(_bits, parts)) > 12:
        raise ValueError("it has a number too large to compute")
    return getattr(sympy, name)(*parts)


def _interval(text: str, parts: list[Any]) -> Any:
    import sympy

    interval = sympy.Interval(*parts, left_open=text[0] == "(", right_open=text[1] == ")")
    if interval is sympy.S.EmptySet:
        raise ValueError("it has an interval without elements")
    return interval


def _relation(text: str, parts: list[Any]) -> Any:
    import sympy
    from latex2sympy2_extended.logic import And  # type: ignore[import-untyped]  # keeps the order of its parts

    kinds = {"=": sympy.Eq, "≈": sympy.Eq, "<": sympy.Lt, ">": sympy.Gt, "≤": sympy.Le, "≥": sympy.Ge, "≠": sympy.Ne}
    signs = [kinds[sign] for sign in text.split(" ") if sign in kinds]
    if len(signs) != len(parts) - 1:
        raise ValueError("it has a relation that cannot be compared")
    relations = [sign(*sides, evaluate=False) for sign, *sides in zip(signs, parts[:-1], parts[1:], strict=True)]
    return relations[0] if len(relations) == 1 else And(*relations)


def _examples() -> tuple[str, ...]:
    """Return trees of many kinds."""

    def node(kind: str, text: str = "", *parts: list[Any]) -> list[Any]:
        return [kind, text, list(parts)]

    x, y, two, five = node("symbol", "x0"), node("symbol", "x1"), node("number", "2"), node("number", "5")
    root, pi, imaginary = node("root", "", five, two), node("constant", "π"), node("constant", "i")
    square, total = node("power", "", x, two), node("sum", "", x, y)
    sine = node("call", "sin", node("product", "", two, x))
    exponential = node("power", "", node("constant", "e"), node("minus", "", node("product", "", two, x)))
    trees = [
        root, node("product", "", two, pi), node("sum", "", five, node("product", "", two, imaginary)), total,
        node("sum", "", square, node("minus", "", node("product", "", five, x)), two), node("call", "ln", x),
        node("product", "", node("sum", "", x, two), node("sum", "", x, five)), node("quotient", "", two, total),
        sine, exponential, node("sum", "", sine, exponential), node("call", "arcsin", node("quotient", "", two, five)),
        node("bracket", "()", root, pi), node("bracket", "{}", root, x), node("relation", "=", y, square),
        node("sets", "∪", node("interval", "(]", two, root), node("interval", "()", five, node("constant", "∞"))),
        node("matrix", "", node("row", "", x, two), node("row", "", root, y)), node("relation", "< ≤", two, x, root),
    ]  # fmt: skip
    return tuple(json.dumps(tree) for tree in trees)


EXAMPLES = _examples()
"""Answers of many kinds, as `form.worker_texts` writes them; comparing them loads all of sympy that is needed."""
