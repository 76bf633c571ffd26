"""Keeps answers from being run as programs: some scorers of reasoning-gym hand them to ``eval`` or to sympy's parser.

``eval`` in a data set's module is replaced by one that knows numbers, text, lists and arithmetic. Sympy's parser
cannot be replaced, so an answer goes to it only if it is a formula of which no number can grow beyond reason.
"""

from __future__ import annotations

import ast
import inspect
import math
import sys
from typing import Any

MAX_LENGTH = 10_000
"""Longest answer that is scored, in characters."""
MAX_FORMULA = 1_000
"""Longest formula that sympy gets."""
_MAX_POWER = 100
_MAX_NUMBER = 10**12

FUNCTIONS = {
    *("sin", "cos", "tan", "sec", "csc", "cot", "asin", "acos", "atan"),
    *("sinh", "cosh", "tanh", "asinh", "acosh", "atanh"),
    *("exp", "log", "ln", "sqrt", "Abs", "Rational"),
}
"""What a formula may call."""
_OPERATORS = (ast.Add, ast.Sub, ast.Mult, ast.Div, ast.Mod, ast.FloorDiv)
_BITWISE = (ast.BitAnd, ast.BitOr, ast.BitXor)


def guard(dataset: Any) -> None:
    """Replace ``eval`` in the module of a data set."""
    module = sys.modules[type(dataset).__module__]
    vars(module)["eval"] = evaluate


def uses_sympy(dataset: Any) -> bool:
    """Whether the data set's scorer has sympy parse answers."""
    source = inspect.getsource(type(dataset).score_answer)
    module = vars(sys.modules[type(dataset).__module__])
    parser = module.get("parse_expr")
    own = parser is not None and not parser.__module__.startswith("sympy")
    return ("parse_expr(" in source or "sympify(" in source) and not own


def evaluate(text: str, *_: Any) -> Any:
    """The value of a literal or of a sum, product, … of numbers; ValueError for all else."""
    tree = _parse(text)
    if not _is_plain(tree.body):
        raise ValueError(f"not a plain value: {text[:60]!r}")
    return eval(compile(tree, "<answer>", "eval"), {"__builtins__": {}})


def is_formula(text: str) -> bool:
    """Whether text is arithmetic of small numbers, names and the usual functions, without powers of powers."""
    try:
        return len(text) <= MAX_FORMULA and _is_formula(_parse(text).body, powers=0)
    except (ValueError, RecursionError):
        return False


def _parse(text: str) -> ast.Expression:
    if len(text) > MAX_LENGTH:
        raise ValueError(f"over {MAX_LENGTH} characters")
    try:
        return ast.parse(text.strip(), mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"not an expression: {text[:60]!r}") from error


def _is_plain(tree: ast.AST) -> bool:
    match tree:
        case ast.Constant(value=value):
            return value is None or isinstance(value, bool | str | bytes) or _is_small(value)
        case ast.List(elts=items) | ast.Tuple(elts=items) | ast.Set(elts=items):
            return all(map(_is_plain, items))
        case ast.Dict(keys=keys, values=values):
            return all(item is not None and _is_plain(item) for item in [*keys, *values])
    return _is_number(tree)


def _is_number(tree: ast.AST) -> bool:
    """Arithmetic of numbers; a shift only by a small one."""
    match tree:
        case ast.Constant(value=value):
            return _is_small(value)
        case ast.UnaryOp(op=ast.UAdd() | ast.USub() | ast.Invert(), operand=operand):
            return _is_number(operand)
        case ast.BinOp(left=left, op=ast.LShift() | ast.RShift(), right=ast.Constant(value=int(places))):
            return places <= _MAX_POWER and _is_number(left)
        case ast.BinOp(left=left, op=operator, right=right):
            known = isinstance(operator, _OPERATORS + _BITWISE)
            return known and _is_number(left) and _is_number(right)
    return False


def _is_formula(tree: ast.AST, powers: int) -> bool:
    match tree:
        case ast.Constant(value=value):
            return _is_small(value)
        case ast.Name(id=name):
            return "_" not in name
        case ast.UnaryOp(op=ast.UAdd() | ast.USub(), operand=operand):
            return _is_formula(operand, powers)
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            # A power of a power of a power has more digits than there is memory.
            return powers == 0 and _is_formula(left, 1) and _is_formula(right, 1) and _is_modest(right)
        case ast.BinOp(left=left, op=operator, right=right) if isinstance(operator, _OPERATORS):
            return _is_formula(left, powers) and _is_formula(right, powers)
        case ast.Call(func=ast.Name(id=name), args=args, keywords=[]):
            return name in FUNCTIONS and all(_is_formula(item, powers) for item in args)
    return False


def _is_modest(tree: ast.AST) -> bool:
    """Whether an exponent's numbers, multiplied with one another, stay small."""
    numbers = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)]
    return math.prod(max(abs(number), 1) for number in numbers if isinstance(number, int | float)) <= _MAX_POWER


def _is_small(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return abs(value) <= _MAX_NUMBER
