"""An oracle for arithmetic that shares no code with the library, and random texts to try it on."""

from __future__ import annotations

import ast
from fractions import Fraction

from hypothesis import strategies as st


def oracle(text: str) -> Fraction:
    """The value of ASCII arithmetic by Python's grammar, with a Fraction for each number."""

    def walk(node: ast.expr) -> Fraction:
        match node:
            case ast.Constant(value=int(value)):
                return Fraction(value)
            case ast.BinOp(left=left, op=ast.Add(), right=right):
                return walk(left) + walk(right)
            case ast.BinOp(left=left, op=ast.Sub(), right=right):
                return walk(left) - walk(right)
            case ast.BinOp(left=left, op=ast.Mult(), right=right):
                return walk(left) * walk(right)
            case ast.BinOp(left=left, op=ast.Div(), right=right):
                return walk(left) / walk(right)
        raise ValueError(ast.dump(node))

    return walk(ast.parse(" ".join(text.split()), mode="eval").body)


@st.composite
def expression_texts(draw: st.DrawFn, max_numbers: int = 8) -> str:
    """Valid text with random brackets and spaces, its structure left to the parser."""
    count = draw(st.integers(1, max_numbers))
    space = st.sampled_from(["", " ", "  ", "\n", "\t"])
    parts: list[str] = []
    depth = 0
    for index in range(count):
        opened = draw(st.integers(0, 2))
        depth += opened
        parts += ["("] * opened + [draw(space), str(draw(st.integers(0, 120))), draw(space)]
        closed = depth if index == count - 1 else draw(st.integers(0, depth))
        depth -= closed
        parts += [")"] * closed
        if index < count - 1:
            parts += [draw(space), draw(st.sampled_from("+-*/")), draw(space)]
    return "".join(parts)
