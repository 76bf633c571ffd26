r"""Check that sympy may compare a parsed answer with the right one. Runs in the judge's worker.

sympy evaluates what it compares, which can be dangerous: a sum over names that a policy chose becomes Python code that
is run, ``9^{9^9}`` fills the memory, and any two equations without solutions are equal. So

* an answer may contain numbers, symbols with plain names, sums, products, powers, tuples, intervals, finite sets and
  matrices; functions, unions, relations, sums over indices, integrals, limits, derivatives and anything else that sympy
  has only if the right answer contains them too;
* numbers, exponents and the tree have bounded sizes, and nothing in it is undefined (1/0) or infinite, unless the right
  answer is;
* relations must be the same side by side, up to a factor that is a number, whatever their solutions are;
* formulas must be close to each other, relative to their size, at all points that are tried. math-verify alone ignores
  differences below 1e-15, so all small numbers would be equal.

`build` makes sympy objects of the trees that `form` has parsed, so no second parser reads the answer.

This module imports only the standard library, and sympy inside its functions.
"""

from __future__ import annotations

import functools
import json
import math
import operator
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

TREE = "tree:"
"""Prefix of the texts that `build` reads."""
MAX_NODES = 2_000
"""How many parts an answer's tree may have."""
MAX_DEPTH = 100
MAX_BITS = 8_192
"""The largest size of a number."""
MAX_EXPONENT = 99
"""The largest exponent of an expression with symbols, unless the right answer has a larger one."""

_NAME = re.compile(r"[A-Za-z0-9 .,'_{}\\-]*|\+-?")  # + and +- are directions of a limit
_CLOSE = 5e-6  # six digits


def refusal_reason(golds: Sequence[Any], answers: Sequence[Any]) -> str | None:
    """Return why the parsed answer is refused; None if it may be compared. Strings were not parsed, and are ignored."""
    trees = [gold for gold in golds if not isinstance(gold, str)]
    kinds = {kind for gold in trees for node in _nodes(gold) for kind in _kinds(node)}
    bits = max([MAX_BITS, *(2 * _bits(gold) for gold in trees)])
    exponent = max([MAX_EXPONENT, *(_exponent(gold) for gold in trees)])
    for answer in answers:
        if isinstance(answer, str):
            continue
        if (reason := _size_error(answer, bits, exponent) or _kind_error(answer, kinds)) is not None:
            return f"the answer is not compared: {reason}"
        if _is_another_relation(answer, trees) or (trees and all(_differ(gold, answer) for gold in trees)):
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


def _size_error(tree: Any, bits: float, exponent: float) -> str | None:
    """Return why a tree is too large to be evaluated, or None."""
    level, count = [tree], 0
    for _ in range(MAX_DEPTH):
        count += len(level)
        level = [child for node in level for child in _children(node)]
        if count > MAX_NODES or not level:
            break
    if level or count > MAX_NODES:
        return f"it has more than {MAX_NODES:,} parts or {MAX_DEPTH} levels"
    if _bits(tree) > bits:
        return "it has a number too large to compute"
    if _exponent(tree) > exponent:
        return f"it has an exponent beyond {exponent:g}"
    return None


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


def _exponent(tree: Any) -> float:
    """Return the largest number that is the exponent of an expression with symbols."""
    import sympy

    powers = (node for node in _nodes(tree) if isinstance(node, sympy.Pow) and node.base.free_symbols)
    return max((_magnitude(node.exp, _bits(node.exp)) for node in powers if node.exp.is_number), default=0.0)


def _kinds(node: Any) -> set[str]:
    """Return the kinds that a right answer's node allows: its own and, for functions, those of its family."""
    import sympy

    kind = type(node)
    if isinstance(node, sympy.core.function.AppliedUndef):
        return {f"function {node.func}"}
    if node is sympy.E or _is_elementary(node):
        return {"elementary", kind.__name__}
    if node in (sympy.oo, -sympy.oo):
        return {"infinity"}
    if isinstance(node, sympy.core.relational.Relational):
        return {"relation"} if isinstance(node, sympy.Eq) else {"relation", "inequality"}
    return {kind.__name__}


def _is_elementary(node: Any) -> bool:
    import sympy
    from sympy.functions.elementary.hyperbolic import HyperbolicFunction, InverseHyperbolicFunction
    from sympy.functions.elementary.trigonometric import InverseTrigonometricFunction, TrigonometricFunction

    families = (HyperbolicFunction, InverseHyperbolicFunction, InverseTrigonometricFunction, TrigonometricFunction)
    return isinstance(node, (sympy.exp, sympy.log, *families))


def _kind_error(tree: Any, kinds: set[str]) -> str | None:
    """Return which forbidden part a tree has, or which part that the right answer does not have, or None."""
    import sympy

    plain = (
        sympy.Add, sympy.Mul, sympy.Pow, sympy.NumberSymbol, sympy.Tuple, sympy.FiniteSet, sympy.Interval,
        sympy.MatrixBase, sympy.MatAdd, sympy.MatMul, sympy.logic.boolalg.BooleanAtom,
        type(sympy.I), type(sympy.S.EmptySet), type(sympy.S.Reals), type(sympy.S.Integers),
    )  # fmt: skip
    nodes = list(_nodes(tree))
    infinite = sum(node in (sympy.oo, -sympy.oo) for node in nodes)
    ends = sum(end in (sympy.oo, -sympy.oo) for node in nodes if isinstance(node, sympy.Interval) for end in node.args)
    if infinite > ends and "infinity" not in kinds:
        return "it is infinite"
    for node in nodes:
        if node is sympy.nan or node is sympy.zoo:
            return "it is undefined"
        if isinstance(node, sympy.Symbol):
            if not _NAME.fullmatch(node.name):
                return "it has a name that is not plain"
        elif isinstance(node, sympy.UnevaluatedExpr):
            if node.args[0] != sympy.Rational(1, 100) and "UnevaluatedExpr" not in kinds:
                return "it has an unevaluated part"
        elif isinstance(node, sympy.Number):
            continue
        elif not isinstance(node, plain) and not _kinds(node) & kinds and not _names_a_value(node):
            return f"it has {type(node).__name__}, which the right answer does not have"
    return None


def _names_a_value(node: Any) -> bool:
    """Return whether a node is an equation like x = 5."""
    import sympy

    return isinstance(node, sympy.Eq) and isinstance(node.lhs, (sympy.Symbol, sympy.Tuple))


def _is_another_relation(answer: Any, golds: Sequence[Any]) -> bool:
    """Return whether the answer is a relation that differs from all right ones; x = 5 for 5 does not count."""
    import sympy

    stated = _relations(answer)
    if stated is None:
        return False
    for gold in golds:
        right = _relations(gold)
        if right is None or not all(isinstance(side, sympy.Expr) for _, *sides in right + stated for side in sides):
            return False
        if len(right) == len(stated) and all(map(_are_same_relation, right, stated)):
            return False
    return True


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

    kinds = (sympy.Add, sympy.Mul, sympy.Pow, sympy.Symbol, sympy.NumberSymbol, sympy.Abs)
    if isinstance(node, sympy.Rational):
        return _bits(node) <= _MOST_DIGITS
    return isinstance(node, kinds) or _is_elementary(node)


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
    if any(isinstance(node, sympy.UnevaluatedExpr) for node in _nodes(answer)):
        return False  # a percentage, which math-verify compares in two ways
    is_real = bool(gold.free_symbols | answer.free_symbols) and sympy.I not in _nodes(gold)
    for point in range(2):
        first, second = _evaluate_at([gold, answer], point)
        if first is None or second is None or (is_real and (first.imag or second.imag)):
            continue
        if abs(first - second) > _CLOSE * max(abs(first), abs(second)):
            return True
    return False


# Trees from texts


def build(text: str) -> Any | None:
    """Return the sympy object of a tree written by `form.worker_texts`; None if the text is LaTeX."""
    return _build_node(*json.loads(text.removeprefix(TREE))) if text.startswith(TREE) else None


def _build_node(kind: str, text: str, parts: list[Any]) -> Any:
    if kind not in _BUILDERS:
        raise ValueError(f"it has a {kind}, which cannot be compared")
    return _BUILDERS[kind](text, [_build_node(*part) for part in parts])


def _number(text: str, parts: list[Any]) -> Any:
    import sympy

    return sympy.Rational(text)


def _symbol(text: str, parts: list[Any]) -> Any:
    import sympy

    return sympy.Symbol(text, real=True)


def _constant(text: str, parts: list[Any]) -> Any:
    import sympy

    return {"π": sympy.pi, "e": sympy.E, "i": sympy.I, "∞": sympy.oo}[text]


def _sum(text: str, parts: list[Any]) -> Any:
    import sympy

    if any(isinstance(part, sympy.MatrixBase) for part in parts):
        return functools.reduce(operator.add, parts)
    return sympy.Add(*parts)


def _product(text: str, parts: list[Any]) -> Any:
    import sympy

    if any(isinstance(part, sympy.MatrixBase) for part in parts):
        return functools.reduce(operator.mul, parts)
    return sympy.Mul(*parts)


def _power(text: str, parts: list[Any]) -> Any:
    import sympy

    base, exponent = parts
    if max(1.0, _bits(base)) * _magnitude(exponent, _bits(exponent)) > MAX_BITS:
        raise ValueError("it has a number too large to compute")
    return sympy.Pow(base, exponent)


def _quotient(above: Any, below: Any) -> Any:
    return _product("", [above, _power("", [below, _number("-1", [])])])


def _root(text: str, parts: list[Any]) -> Any:
    import sympy

    return sympy.Pow(parts[0], 1 / parts[1])


def _call(text: str, parts: list[Any]) -> Any:
    import sympy

    functions = {"ln": "log", "abs": "Abs", "ceil": "ceiling", "mod": "Mod", "max": "Max", "min": "Min"}
    name = functions.get(text, f"a{text[3:]}" if text.startswith("arc") else text)
    if text == "log" and len(parts) == 1:
        parts = [*parts, sympy.Integer(10)]
    if text in ("factorial", "binomial") and max(map(_bits, parts)) > 12:
        raise ValueError("it has a number too large to compute")
    return getattr(sympy, name)(*parts)


def _series(text: str, parts: list[Any]) -> Any:
    import sympy

    body, *index = parts
    return {"sum": sympy.Sum, "product": sympy.Product}[text](body, tuple(index))


def _tuple(text: str, parts: list[Any]) -> Any:
    import sympy

    return sympy.FiniteSet(*parts) if text == "{}" else sympy.Tuple(*parts)


def _interval(text: str, parts: list[Any]) -> Any:
    import sympy

    interval = sympy.Interval(*parts, left_open=text[0] == "(", right_open=text[1] == ")")
    if interval is sympy.S.EmptySet:
        raise ValueError("it has an interval without elements")
    return interval


def _sets(text: str, parts: list[Any]) -> Any:
    import sympy

    return {"∪": sympy.Union, "∩": sympy.Intersection, "∖": sympy.Complement}[text](*parts)


def _set(text: str, parts: list[Any]) -> Any:
    import sympy

    names = {"∅": "EmptySet", "N": "Naturals", "Z": "Integers", "Q": "Rationals", "R": "Reals", "C": "Complexes"}
    return getattr(sympy.S, names[text])


def _matrix(text: str, parts: list[Any]) -> Any:
    import sympy

    return sympy.Matrix([list(row) for row in parts])


def _relation(text: str, parts: list[Any]) -> Any:
    import sympy
    from latex2sympy2_extended.logic import And  # type: ignore[import-untyped]  # keeps the order of its parts

    kinds = {"=": sympy.Eq, "≈": sympy.Eq, "<": sympy.Lt, ">": sympy.Gt, "≤": sympy.Le, "≥": sympy.Ge, "≠": sympy.Ne}
    signs = [kinds[sign] for sign in text.split(" ") if sign in kinds]
    if len(signs) != len(parts) - 1:
        raise ValueError("it has a relation that cannot be compared")
    relations = [sign(*sides, evaluate=False) for sign, *sides in zip(signs, parts[:-1], parts[1:], strict=True)]
    return relations[0] if len(relations) == 1 else And(*relations)


_BUILDERS: dict[str, Callable[[str, list[Any]], Any]] = {
    "number": _number,
    "symbol": _symbol,
    "constant": _constant,
    "sum": _sum,
    "minus": lambda _, parts: -parts[0],
    "product": _product,
    "quotient": lambda _, parts: _quotient(*parts),
    "time": lambda _, parts: _quotient(*parts),
    "ratio": lambda _, parts: _tuple("", [_quotient(part, parts[0]) for part in parts]),
    "power": _power,
    "root": _root,
    "call": _call,
    "series": _series,
    "bracket": _tuple,
    "named": _tuple,
    "interval": _interval,
    "sets": _sets,
    "set": _set,
    "matrix": _matrix,
    "row": lambda _, parts: tuple(parts),
    "relation": _relation,
}


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
    return tuple(TREE + json.dumps(tree) for tree in trees)


EXAMPLES = _examples()
"""Answers of many kinds, as `form.worker_texts` writes them; comparing them loads all of sympy that is needed."""
