"""The parser, against Python's own on valid text, and against everything that is not an expression."""

from __future__ import annotations

from contextlib import suppress
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from explorl.tasks.expression import (
    MAX_DEPTH,
    MAX_LENGTH,
    MAX_NUMBERS,
    OPERATORS,
    ExpressionError,
    Tree,
    canonical,
    compute,
    evaluate,
    numbers,
    parse,
    render,
    steps,
)

from .expressions import expression_texts, oracle

trees = st.recursive(st.integers(1, 100), lambda inner: st.tuples(st.sampled_from("+-*/"), inner, inner), max_leaves=6)


@given(expression_texts())
def test_agrees_with_pythons_grammar(text: str) -> None:
    try:
        expected = oracle(text)
    except ZeroDivisionError:
        with pytest.raises(ZeroDivisionError):
            evaluate(parse(text))
    else:
        value = evaluate(parse(text))
        assert value == expected
        assert isinstance(value, int) == (expected.denominator == 1)


@given(expression_texts(), st.data())
def test_other_signs_mean_the_same(text: str, data: st.DataObject) -> None:
    signs = {op: [sign for sign, meaning in OPERATORS.items() if meaning == op] for op in "+-*/"}
    other = "".join(data.draw(st.sampled_from(signs[char])) if char in signs else char for char in text)
    assert parse(other) == parse(text)


@given(trees)
def test_rendered_text_parses_to_the_same_value_and_numbers(tree: Tree) -> None:
    assert parse(render(tree)) == tree
    terse = render(tree, terse=True)
    assert " " not in terse
    assert len(terse) <= len(render(tree))
    assert numbers(parse(terse)) == numbers(tree)
    try:
        assert evaluate(parse(terse)) == evaluate(tree)
    except ZeroDivisionError:
        with pytest.raises(ZeroDivisionError):
            evaluate(tree)


@given(trees)
def test_steps_are_right_and_end_at_the_value(tree: Tree) -> None:
    try:
        value = evaluate(tree)
    except ZeroDivisionError:
        return
    done = steps(tree)
    assert len(done) == len(numbers(tree)) - 1
    assert all(compute(step.op, step.left, step.right) == step.result for step in done)
    assert (done[-1].result if done else tree) == value


def mirrored(tree: Tree) -> Tree:
    if isinstance(tree, int):
        return tree
    op, left, right = tree[0], mirrored(tree[1]), mirrored(tree[2])
    return (op, right, left) if op in "+*" else (op, left, right)


@given(trees)
def test_canonical_is_an_expression_of_the_same_value_and_ignores_order(tree: Tree) -> None:
    normal = canonical(tree)
    assert canonical(mirrored(tree)) == normal == canonical(parse(normal))
    assert sorted(numbers(parse(normal))) == sorted(numbers(tree))
    with suppress(ZeroDivisionError):  # 1 / (1 / 0) has no value; 1 * 0 / 1, which flattening makes of it, has one
        assert evaluate(tree) == oracle(normal)


@pytest.mark.parametrize(
    ("first", "other", "same"),
    [
        ("3+7*12", "12*7+3", True),
        ("3-(5-7)", "7+3-5", True),
        ("(1+2)+3", "3+(2+1)", True),
        ("8/(4/2)", "8*2/4", True),
        ("2*(3+4)", "(4+3)*2", True),
        ("3-5", "5-3", False),
        ("8/4", "4/8", False),
        ("2*3+4", "2*(3+4)", False),
        ("(3-5)*(2-7)", "(5-3)*(7-2)", False),
        ("6*1", "6/1", False),
    ],
)
def test_canonical_by_hand(first: str, other: str, same: bool) -> None:
    assert (canonical(parse(first)) == canonical(parse(other))) is same


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1+2*3", 7),
        ("(1+2)*3", 9),
        ("8-3-2", 3),
        ("8-(3-2)", 7),
        ("100/10/5", 2),
        ("100/(10/5)", 50),
        ("7/2", Fraction(7, 2)),
        ("8/(3-8/3)", 24),
        ("((((5))))", 5),
        ("2*3/4*6", 9),
        ("1/3+1/3+1/3", 1),
        ("9 − 4", 5),
        ("3 × 4 ÷ 6 · 5 x 2", 20),
        ("0", 0),
        ("0x10", 0),  # x is the sign of multiplication, here too
        ("3 ∗ 4 ⋅ 5", 60),
        (r"3 \times 4 \cdot 5 \div 6 \ast 2", 20),
        (r"3\times4", 12),
        ("[3+4]*{5-2}", 21),
        (r"\{[3+(4)]*2\}*5", 70),
        (r"\left(3+4\right)\,\times\ 5", 35),
        (r"\left[3+4\right] * \left\{5-2\right\}", 21),
        (r"\frac{8}{4}", 2),
        (r"\frac{3+9}{2*3}+1", 3),
        (r"10-\frac{8}{4}*3", 4),
        (r"100/\frac{8}{4}", 50),
        (r"\dfrac {8} {\tfrac{8}{4}} * 5", 20),
        (r"\frac{\frac{8}{4}}{\frac{3}{6}}", 4),
        (r"\frac{{3+4}*2}{{7}}", 2),
        (r"(1+\frac{8}{4})*2", 6),
    ],
)
def test_values_by_hand(text: str, value: Fraction | int) -> None:
    assert evaluate(parse(text)) == value


@pytest.mark.parametrize(
    "text",
    [
        "", " ", "()", "(", ")", "3+", "+3", "-3", "−3", "--3", "3--3", "3+-3", "3 4", "2(3)", "(2)(3)", "(2)3", "3)",
        "(3", "2**3", "2//3", "2^3", "2%3", "3.0", "3.", ".5", "1e3", "1_000", "1,000", "0xF", "007", "00", "0b1",
        "٣", "٣+1", "３", "3+４", "²", "3²", "½", "Ⅳ", "a", "3a", "3 X 4", "3 – 4", "3 — 4", "3;4", "3=3",
        "__import__('os')", "eval('1')", "\x00", "3\x00", "\ud800", "3+\udfff4", "1\u200b2", "lambda: 0",
        "3+4)", "((3+4)", "3*/4", "3 + * 4", "1" * 10, "9" * 5000, "(" * 1_000_000, "1+" * 500_000 + "1",
        "<answer>3", "3 if 1 else 4", "3j", "True", "$3+4$", "[3+4)",
        "(3+4]", "{3)", "[3", "3]", "{3", "3}", "{}", "[]", "[3][4]", "{3}{4}", "2[3]", "(3+[4)]", r"\{3}", r"{3\}",
        r"\frac", r"\frac{3}", r"\frac{3}4", r"\frac34", r"\frac 3 4", r"\frac{3}{4", r"\frac{3{4}}", r"\frac{}{4}",
        r"\frac{3}{}", r"\frac{3}{4}{5}", r"\frac{3)+(4}{5}", r"\frac[3]{4}{5}", r"\frac(3)(4)", r"2\frac{1}{2}",
        r"\frac{1}{2}3", r"\frac{1}{2}\frac{3}{4}", r"\cfrac{1}{2}", r"\sfrac{1}{2}", r"\binom{4}{2}", r"\sqrt{4}",
        r"\timesx 3", r"3\timesy4", r"3\\times4", r"3\pm4", r"3\,4", r"3\ 4", "3\\", "\\", r"\left3", r"3\left+4",
        r"\left.3\right.", r"\text{3}", r"\boxed{3}", r"\(3+4\)", r"\[3\]", "3^{2}", "3_{2}", "4!", "|3|", "⌊3⌋",
        "3 ∕ 4", "3 ⁄ 4", "3 • 4", "3 ＊ 4", "（3）",
    ],
)  # fmt: skip
def test_no_expression(text: str) -> None:
    with pytest.raises(ExpressionError):
        parse(text)


SPACES = {chr(code) for code in range(0x110000) if chr(code).isspace()}
PIECES = [
    *"0123 ()[]{}\\.$=",
    *OPERATORS,
    r"\frac{",
    "}{",
    r"\left(",
    r"\right)",
    r"\left",
    r"\{",
    r"\}",
    r"\,",
    "^",
    "a",
]


@given(st.one_of(st.text(), st.lists(st.sampled_from(PIECES), max_size=12).map("".join)))
def test_any_text_gives_a_tree_or_an_expression_error(text: str) -> None:
    try:
        tree = parse(text)
    except ExpressionError:
        return
    assert set(text) <= set(r"0123456789()[]{}\,;:!") | set("".join(OPERATORS)) | set("leftrigdac") | SPACES
    assert numbers(tree)


@given(st.text(alphabet="0123456789+-*/() ", max_size=12))
def test_what_is_accepted_python_accepts_too(text: str) -> None:
    try:
        tree = parse(text)
    except ExpressionError:
        return
    try:
        assert evaluate(tree) == oracle(text)
    except ZeroDivisionError:
        with pytest.raises(ZeroDivisionError):
            oracle(text)


def test_bounds_are_where_they_say() -> None:
    assert parse("(" * MAX_DEPTH + "7" + ")" * MAX_DEPTH) == 7
    with pytest.raises(ExpressionError, match="deep"):
        parse("(" * (MAX_DEPTH + 1) + "7" + ")" * (MAX_DEPTH + 1))
    assert evaluate(parse("+".join(["1"] * MAX_NUMBERS))) == MAX_NUMBERS
    with pytest.raises(ExpressionError, match="numbers"):
        parse("+".join(["1"] * (MAX_NUMBERS + 1)))
    assert parse("1" + " " * MAX_LENGTH) == 1
    with pytest.raises(ExpressionError, match="characters"):
        parse("1" + " " * MAX_LENGTH + "+1")
    assert parse("999999999") == 999_999_999


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("3 4", "expected an operator or '\\)' at character 3, not '4'"),
        ("3+*", "expected a number or '\\(' at character 3, not '\\*'"),
        ("3+", "ends where a number is expected"),
        ("", "empty"),
        ("(3", "never closed"),
        ("3)", "closes nothing"),
        ("3^2", "'\\^' at character 2"),
        ("3+012", "'012' is not a plain number"),
    ],
)
def test_errors_say_where_and_why(text: str, message: str) -> None:
    with pytest.raises(ExpressionError, match=message):
        parse(text)
