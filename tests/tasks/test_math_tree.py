"""What sympy is asked to do with an answer: nothing that runs, hangs or proves too much, whatever let it through."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from typing import Any

import pytest
import sympy

from explorl.tasks.math import form
from explorl.tasks.math import tree as math_tree


def parsed(latex: str) -> list[Any]:
    """As math-verify's own parser reads it."""
    from math_verify import LatexExtractionConfig, parse

    return parse(f"\\boxed{{{latex}}}", [LatexExtractionConfig(boxed_match_priority=0)], parsing_timeout=None)


def reason(gold: str, answer: str) -> str | None:
    return math_tree.refusal_reason(parsed(gold), parsed(answer))


CODE = "+".join(f"chr({code})" for code in b"print('it ran')")
NAME = f"\\bm{{\fif\fexec({CODE})\felse\f1}}"
"""A name that sympy prints, without its braces, as ``bm if exec(…) else 1`` into a function that it then calls."""
ATTACK = f"\\sum_{{k=0}}^{{\\infty}} \\frac{{{NAME}^{{k}}}}{{k!}}"

SCRIPT = """
import json, logging, sys
logging.disable(logging.CRITICAL)
from math_verify import LatexExtractionConfig, parse, verify
from explorl.tasks.math import tree as math_tree
gold, answer = json.loads(sys.stdin.read())
golds, answers = (
    parse(f"\\\\boxed{{{text}}}", [LatexExtractionConfig(boxed_match_priority=0)], parsing_timeout=None)
    for text in (gold, answer)
)
if math_tree.refusal_reason(golds, answers) is None:
    verify(golds, answers, timeout_seconds=None)
print("unguarded")
verify(golds, answers, timeout_seconds=None)
"""


def compared(gold: str, answer: str) -> tuple[str, str]:
    """What a process prints that parses both with math-verify and compares them: with the guard, and without it."""
    message = json.dumps([gold, answer])
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], input=message, capture_output=True, text=True, timeout=120, check=True
    )
    guarded, _, unguarded = done.stdout.partition("unguarded\n")
    return guarded, unguarded


@pytest.mark.parametrize("gold", [r"\pi", "e"])
def test_this_layer_alone_stops_code_in_a_name(gold: str) -> None:
    guarded, unguarded = compared(gold, ATTACK)
    if "it ran" not in unguarded:
        pytest.skip("this math-verify and sympy do not run it")
    assert guarded == ""


def test_the_form_alone_stops_code_in_a_name() -> None:
    for gold in (r"\pi", "e", "5", "x", r"\sum_{k=0}^{\infty} \frac{x^{k}}{k!}", r"\bm{x}"):
        for answer in (ATTACK, NAME, NAME.replace("\f", " "), NAME.replace("bm", "text"), NAME.replace("bm", "hat")):
            assert form.refusal_reason(gold, answer) is not None, (gold, answer)


def test_a_name_that_is_not_plain_is_refused_where_the_right_answer_is_a_sum_too() -> None:
    gold = r"\sum_{k=0}^{\infty} \frac{x^{k}}{k!}"
    assert reason(gold, ATTACK) == "the answer is not compared: it has a name that is not plain"
    assert reason(gold, gold) is None


@pytest.mark.parametrize(
    ("gold", "answer", "found"),
    [
        ("5050", r"\sum_{i=1}^{100} i", "Sum"),
        ("24", r"\prod_{k=1}^4 k", "Product"),
        (r"\pi", r"\int_0^1 x^2 dx", "Integral"),
        ("6", r"\lim_{x \to 3} (x+3)", "Limit"),
        ("2x", r"\frac{d}{dx} x^2", "Derivative"),
        ("120", "5!", "factorial"),
        ("4", r"2^{10} \mod 10", "Mod"),
        (r"\frac{1}{2}", r"\sin 30", "sin"),
        ("2", r"\log_2 4", "log"),
        ("5", "|-5|", "Abs"),
        ("3", r"\lfloor \pi \rfloor", "floor"),
        ("7", r"\max(3,7)", "Max"),
        ("x", "f(x,y)", "f"),
        ("5", "7=5", "Equality"),
        ("5", "x+1=5", "Equality"),
        ("5", "x<5", "StrictLessThan"),
        ("(0,5)", "0<x<5", "And"),
        ("[2,9]", r"[2,5]\cup[5,9]", "Union"),
        ("6", r"\gcd(12,18)", "an unevaluated part"),
    ],
)
def test_what_the_right_answer_lacks(gold: str, answer: str, found: str) -> None:
    why = reason(gold, answer)
    assert why is not None
    assert why.startswith(f"the answer is not compared: it has {found}")
    assert reason(answer, answer) is None


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        ("x+1", "1+x"), (r"\frac{1}{2}", "0.5"), (r"3\sqrt{2}", r"\sqrt{18}"), ("5", "x=5"), (r"2\pi", r"\pi \cdot 2"),
        (r"\cot x", r"\frac{\cos x}{\sin x}"), (r"e^{-x}", r"\frac{1}{e^x}"), ("(1,2)", "(1,2)"), ("50", r"50\%"),
        (r"(2,\infty)", r"(2,\infty)"), ("y=2x+3", "2y=4x+6"), ("y=2x+3", "2x-y+3=0"), ("x<4", "4>x"), ("x<4", "2x<8"),
        (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix}1\\2\end{pmatrix}"), (r"\text{east}", r"\text{east}"),
        ("x>2", r"(2,\infty)"), (r"\sin x", r"\sin x"), ("a+b", "b+a"), ("10^{-20}x", r"\frac{x}{10^{20}}"),
    ],
)  # fmt: skip
def test_what_may_be_compared(gold: str, answer: str) -> None:
    assert reason(gold, answer) is None


@pytest.mark.parametrize(
    "answer",
    ["9^{9^{9^{9}}}", "((((9!)!)!)!)", r"10^{10^{10}}", "(x+1)^{9999}", "x^{10^9}", r"2^{99999}", "2^{-99999}"],
)
def test_sizes_are_bounded(answer: str) -> None:
    began = time.process_time()
    for gold in ("5", "x", "x^2", r"\pi"):
        assert reason(gold, answer) is not None
    assert time.process_time() - began < 20.0


def test_a_right_answer_that_is_large_may_be_given() -> None:
    assert reason("2^{9000}", "2^{9000}") is None
    assert reason("x^{200}", "x^{200}") is None
    assert reason("x^{200}", "x^{300}") is not None


def test_the_tree_is_bounded() -> None:
    x = sympy.Symbol("x")
    deep = x
    for _ in range(150):
        deep = sympy.sin(deep, evaluate=False)
    wide = sympy.Tuple(*[x] * 3_000)
    for tree in (deep, wide):
        assert "more than 2,000 parts or 100 levels" in str(math_tree.refusal_reason([sympy.sin(x)], [tree]))


@pytest.mark.parametrize("answer", [r"\frac{1}{0}", r"\frac{0}{0}", r"\infty", r"\infty-\infty", r"-\infty"])
def test_what_has_no_value(answer: str) -> None:
    assert reason("5", answer) is not None
    assert reason("0", answer) is not None


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        ("x^2+1=0", "x^4+7=0"), ("x^2+1=0", "x^2+2=0"), ("2x-y+7=0", "(2x-y+7)^2=0"), ("2x-y+7=0", "x(2x-y+7)=0"),
        ("y=3x-1", "0=0"), ("y=3x-1", "y=y"), ("y=3x-1", "x=3y-1"), ("x<4", "x>4"), ("x<4", "-x<-4"),
        ("x<4", r"x \le 4"), ("x<4", "x=4"), ("1<x<3", "1<x<4"), ("1<x<3", r"1<x\le 3"), (r"x \ne 3", "x=3"),
    ],
)  # fmt: skip
def test_relations_are_compared_as_such(gold: str, answer: str) -> None:
    assert reason(gold, answer) is not None


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        (r"\frac{\pi}{10^{20}}", r"\frac{\pi}{10^{21}}"), ("10^{-20}x", "10^{-21}x"), (r"\pi", "3.14"), ("a-b", "b-a"),
        (r"\sqrt{2}", r"\sqrt{3}"), ("x^2", "x"), ("3+4I", "3-4I"),
    ],
)  # fmt: skip
def test_formulas_that_differ_are_refuted_by_numbers(gold: str, answer: str) -> None:
    assert reason(gold, answer) == "another answer than the right one"


def test_trees_are_built_as_they_were_read() -> None:
    gold = r"\left(\frac{x^2-\sqrt{y}}{3}, \ln x, |y|\right)"
    first, second = form.worker_texts(gold, r"(\frac{1}{3}(x^2-y^{1/2}), \ln(x), |y|)")
    x, y = sympy.symbols("x0 x1", real=True)
    expected = sympy.Tuple((x**2 - sympy.sqrt(y)) / 3, sympy.log(x), abs(y))
    assert math_tree.build(first) == expected
    assert math_tree.build(second) == expected.xreplace({expected[0]: (x**2 - sympy.sqrt(y)) * sympy.Rational(1, 3)})
    assert math_tree.build(r"\frac{1}{2}") is None
    assert all(math_tree.build(example) is not None for example in math_tree.EXAMPLES)
    assert all(math_tree.refusal_reason([tree], [tree]) is None for tree in map(math_tree.build, math_tree.EXAMPLES))


def test_a_tree_that_is_too_large_is_not_built() -> None:
    tower = ["power", "", [["number", "9", []]] * 2]
    for _ in range(3):
        tower = ["power", "", [["number", "9", []], tower]]
    with pytest.raises(ValueError, match="too large"):
        math_tree.build(math_tree.TREE + json.dumps(tower))
    with pytest.raises(ValueError, match="a unit, which cannot be compared"):
        math_tree.build(math_tree.TREE + json.dumps(["unit", "cm", []]))


def test_it_imports_only_the_standard_library() -> None:
    script = (
        f"import runpy, sys; runpy.run_path({math_tree.__file__!r}); "
        "sys.exit(any(name in sys.modules for name in ('sympy', 'explorl', 'torch', 'math_verify')))"
    )
    subprocess.run([sys.executable, "-c", script], timeout=60, check=True)
