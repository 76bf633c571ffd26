"""Prevent answers from being run as programs: some scorers of reasoning-gym pass them to ``eval`` or to sympy's parser.

``eval`` in the modules of the data sets is replaced by a function that supports only numbers, text, lists and
arithmetic. Sympy's parser cannot be replaced, so it only gets answers that are formulas whose numbers stay small.
"""

from __future__ import annotations

import ast
import builtins
import inspect
import math
import operator
import re
import sys
from collections.abc import Callable
from typing import Any

MAX_LENGTH = 10_000
"""Maximum length of an answer in characters."""
MAX_FORMULA = 1_000
"""Maximum length of a formula for sympy."""
_MAX_POWER = 100
_MAX_NUMBER = 10**30
_MAX_BITS = 1 << 16

FUNCTIONS = {
    *("sin", "cos", "tan", "sec", "csc", "cot", "asin", "acos", "atan"),
    *("sinh", "cosh", "tanh", "asinh", "acosh", "atanh"),
    *("exp", "log", "ln", "sqrt", "Abs", "Rational"),
}
"""Functions that a formula may call."""
_OPERATORS = (ast.Add, ast.Sub, ast.Mult, ast.Div, ast.Mod, ast.FloorDiv)
_BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.LShift: operator.lshift,
    ast.RShift: operator.rshift,
    ast.BitAnd: operator.and_,
    ast.BitOr: operator.or_,
    ast.BitXor: operator.xor,
}
_UNARY: dict[type[ast.unaryop], Callable[[Any], Any]] = {
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
    ast.Invert: operator.invert,
}
# Text that Python's parser reads differently from a scorer that looks for whole numbers: 24e0, 0x18, 2_4, # 1 2 3.
_AMBIGUOUS = re.compile(r"\d\w*[^\W\d]|[#\\]")


def replace_eval(dataset: Any) -> None:
    """Replace ``eval`` in the modules of reasoning-gym and in the module of a data set."""
    names = [name for name in sys.modules if name.partition(".")[0] == "reasoning_gym"]
    for name in {*names, type(dataset).__module__}:
        namespace = vars(sys.modules[name])
        if namespace.get("eval", builtins.eval) is builtins.eval:
            namespace["eval"] = evaluate


def uses_sympy(kind: type) -> bool:
    """Return whether the scorer of a data set class parses answers with sympy."""
    if kind not in _USERS:
        _USERS[kind] = _calls_sympy(kind)
    return _USERS[kind]


_USERS: dict[type, bool] = {}


def _calls_sympy(kind: type) -> bool:
    source = scorer_source(kind)
    parser = vars(sys.modules[kind.__module__]).get("parse_expr")
    has_other_parser = parser is not None and not parser.__module__.startswith("sympy")
    return ("parse_expr(" in source or "sympify(" in source) and not has_other_parser


def scorer_source(kind: type) -> str:
    """Return the source code of the scorer of a data set class, or "" if it is not available."""
    try:
        return inspect.getsource(kind.score_answer)  # type: ignore[attr-defined]
    except (OSError, TypeError):
        return ""


def evaluate(text: str, *_: Any) -> Any:
    """Return the value of a literal or of arithmetic with numbers; raise ValueError for anything else."""
    try:
        return _literal(_parse(text).body)
    except RecursionError as error:
        raise ValueError(f"not a plain value: nested too deeply: {text[:60]!r}") from error


def is_formula(text: str, *, names: bool = True) -> bool:
    """Return whether text is arithmetic with small numbers, names and the usual functions, without nested powers.

    Numbers are plain: ``2.4``, not ``24e-1``. With ``names=False`` only numbers are allowed.
    """
    if len(text) > MAX_FORMULA or _AMBIGUOUS.search(text):
        return False
    try:
        tree = _parse(text).body
        return _is_formula(tree, powers=0) and (names or not _names(tree))
    except (ValueError, RecursionError):
        return False


def has_names(text: object) -> bool:
    """Return whether text contains a letter."""
    return isinstance(text, str) and any(character.isalpha() for character in text)


def _parse(text: str) -> ast.Expression:
    if len(text) > MAX_LENGTH:
        raise ValueError(f"over {MAX_LENGTH} characters")
    try:
        return ast.parse(text.strip(), mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"not an expression: {text[:60]!r}") from error


def _literal(tree: ast.AST) -> Any:
    match tree:
        case ast.Constant(value=bool() | str() | bytes() | None as value):
            return value
        case ast.List(elts=items):
            return [_literal(item) for item in items]
        case ast.Tuple(elts=items):
            return tuple(_literal(item) for item in items)
        case ast.Set(elts=items):
            return {_hashable(item) for item in items}
        case ast.Dict(keys=keys, values=values):
            return {_hashable(key): _literal(value) for key, value in zip(keys, values, strict=True)}
    return _number(tree)


def _hashable(tree: ast.AST | None) -> Any:
    if tree is None or isinstance(tree, ast.List | ast.Dict | ast.Set):
        raise ValueError("not a plain value: a list, set or dict as a key")
    return _literal(tree)


def _number(tree: ast.AST) -> int | float:
    """Return the value of arithmetic with numbers."""
    match tree:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            return value
        case ast.UnaryOp(op=sign, operand=operand) if type(sign) in _UNARY:
            return _UNARY[type(sign)](_number(operand))
        case ast.BinOp(left=left, op=sign, right=right) if type(sign) in _BINARY:
            first, second = _number(left), _number(right)
            if _bits(sign, first, second) > _MAX_BITS:
                raise ValueError(f"not a plain value: a number of over {_MAX_BITS} bits")
            return _BINARY[type(sign)](first, second)
    raise ValueError(f"not a plain value: {ast.unparse(tree)[:60]!r}")


def _bits(sign: ast.operator, first: float, second: float) -> int:
    """Return an upper bound of the number of bits of an integer result."""
    if not isinstance(first, int) or not isinstance(second, int):
        return 0
    if isinstance(sign, ast.LShift):
        return first.bit_length() + max(second, 0)
    return first.bit_length() + second.bit_length()


def _is_formula(tree: ast.AST, powers: int) -> bool:
    match tree:
        case ast.Constant(value=value):
            return _is_small(value)
        case ast.Name(id=name):
            return "_" not in name
        case ast.UnaryOp(op=ast.UAdd() | ast.USub(), operand=operand):
            return _is_formula(operand, powers)
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            # Nested powers have more digits than fit into memory.
            return powers == 0 and _is_formula(left, 1) and _is_formula(right, 1) and _is_modest(right)
        case ast.BinOp(left=left, op=sign, right=right) if isinstance(sign, _OPERATORS):
            return _is_formula(left, powers) and _is_formula(right, powers)
        case ast.Call(func=ast.Name(id=name), args=args, keywords=[]):
            return name in FUNCTIONS and all(_is_formula(item, powers) for item in args)
    return False


def _names(tree: ast.AST) -> set[str]:
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}


def _is_modest(tree: ast.AST) -> bool:
    """Return whether the product of an exponent's numbers is small."""
    numbers = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)]
    return math.prod(max(abs(number), 1) for number in numbers if isinstance(number, int | float)) <= _MAX_POWER


def _is_small(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return abs(value) <= _MAX_NUMBER
