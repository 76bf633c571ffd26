"""What sympy is asked to do with an answer: nothing that runs, hangs or proves too much."""

from __future__ import annotations

import json
import subprocess
import sys
import time

import pytest
import sympy

from explorl.tasks.math import form, sympy_worker
from explorl.tasks.math.judge import judge_locally
from explorl.tasks.math.sympy_worker import build


def reason(gold: str, answer: str) -> str | None:
    """Why an answer is refused before math-verify sees it."""
    if (judgement := judge_locally(gold, answer)) is not None:
        return None if judgement.same else judgement.error or "another answer than the right one"
    return sympy_worker.refusal_reason(*map(build, form.worker_texts(gold, answer)))


CODE = "+".join(f"chr({code})" for code in b"print('it ran')")
NAME = f"\\bm{{\fif\fexec({CODE})\felse\f1}}"
"""A name that sympy prints, without its braces, as ``bm if exec(…) else 1`` into a function that it then calls."""
ATTACK = f"\\sum_{{k=0}}^{{\\infty}} \\frac{{{NAME}^{{k}}}}{{k!}}"


def test_code_in_a_name_is_refused() -> None:
    for gold in (r"\pi", "e", "5", "x", r"\sum_{k=0}^{\infty} \frac{x^{k}}{k!}", r"\bm{x}"):
        for answer in (ATTACK, NAME, NAME.replace("\f", " "), NAME.replace("bm", "text"), NAME.replace("bm", "hat")):
            assert form.refusal_reason(gold, answer) is not None, (gold, answer)


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        ("5050", r"\sum_{i=1}^{100} i"), ("24", r"\prod_{k=1}^4 k"), (r"\pi", r"\int_0^1 x^2 dx"),
        ("6", r"\lim_{x \to 3} (x+3)"), ("2x", r"\frac{d}{dx} x^2"), ("120", "5!"), ("4", r"2^{10} \mod 10"),
        (r"\frac{1}{2}", r"\sin 30"), ("2", r"\log_2 4"), ("5", "|-5|"), ("3", r"\lfloor \pi \rfloor"),
        ("7", r"\max(3,7)"), ("x", "f(x,y)"), ("5", "7=5"), ("5", "x+1=5"), ("5", "x<5"), ("(0,5)", "0<x<5"),
        ("[2,9]", r"[2,5]\cup[5,9]"), ("6", r"\gcd(12,18)"),
    ],
)  # fmt: skip
def test_what_the_right_answer_lacks(gold: str, answer: str) -> None:
    assert reason(gold, answer) is not None
    assert reason(gold, gold) is None


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        ("x+1", "1+x"), (r"\frac{1}{2}", "0.5"), (r"3\sqrt{2}", r"\sqrt{18}"), ("5", "x=5"), (r"2\pi", r"\pi \cdot 2"),
        (r"\cot x", r"\frac{\cos x}{\sin x}"), (r"e^{-x}", r"\frac{1}{e^x}"), ("(1,2)", "(1,2)"), ("50", r"50\%"),
        (r"(2,\infty)", r"(2,\infty)"), ("y=2x+3", "2y=4x+6"), ("y=2x+3", "2x-y+3=0"), ("x<4", "4>x"),
        (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix}1\\2\end{pmatrix}"), (r"\text{east}", r"\text{east}"),
        ("x>2", r"(2,\infty)"), (r"\sin x", r"\sin x"), ("a+b", "b+a"), ("10^{-20}x", r"x \cdot 10^{-20}"),
        (r"\sum_{k=1}^n k", r"\sum_{j=0}^{n-1} (j+1)"), (r"\prod_{k=1}^n 2k", r"\prod_{k=1}^n k \cdot 2"),
        (r"\sum_{k=1}^n k", r"\frac{n(n+1)}{2}"),
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


@pytest.mark.parametrize("answer", [r"\frac{1}{0}", r"\frac{0}{0}", r"\infty", r"\infty-\infty", r"-\infty"])
def test_what_has_no_value(answer: str) -> None:
    assert reason("5", answer) is not None
    assert reason("0", answer) is not None


@pytest.mark.parametrize(("gold", "answer"), [("x", r"\frac{x}{x-x}"), (r"\ln x", r"\ln(x-x)"), ("x", r"x-\infty")])
def test_formulas_without_a_value(gold: str, answer: str) -> None:
    assert reason(gold, answer) is not None


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        ("x^2+1=0", "x^4+7=0"), ("x^2+1=0", "x^2+2=0"), ("2x-y+7=0", "(2x-y+7)^2=0"), ("2x-y+7=0", "x(2x-y+7)=0"),
        ("y=3x-1", "0=0"), ("y=3x-1", "y=y"), ("y=3x-1", "x=3y-1"), ("x<4", "x>4"), ("x<4", "-x<-4"),
        ("x<4", r"x \le 4"), ("x<4", "x=4"), ("1<x<3", "1<x<4"), ("1<x<3", r"1<x\le 3"), (r"x \ne 3", "x=3"),
        ("a<2x+y", "a>2x+y"), ("a<2x+y", r"a\le 2x+y"), ("a<2x+y", "-a<-2x-y"), ("a<b<c", "a<b<2c"),
    ],
)  # fmt: skip
def test_relations_are_compared_as_such(gold: str, answer: str) -> None:
    assert reason(gold, answer) is not None


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        (r"\frac{\pi}{10^{20}}", r"\frac{\pi}{10^{21}}"), ("10^{-20}x", "10^{-21}x"), (r"\pi", "3.14"), ("a-b", "b-a"),
        (r"\sqrt{2}", r"\sqrt{3}"), ("x^2", "x"), ("3+4i", "3-4i"),
    ],
)  # fmt: skip
def test_formulas_that_differ_are_refuted_by_numbers(gold: str, answer: str) -> None:
    assert reason(gold, answer) == "another answer than the right one"


@pytest.mark.parametrize(
    ("gold", "answer", "expected"),
    [
        (r"-\ln x", r"\ln(1/x)", True), (r"\frac{\sqrt{2x}}{\sqrt{y}}", r"\sqrt{2x/y}", True),
        (r"\log_2 3", r"\frac{\ln 3}{\ln 2}", True), ("x", "|x|", False), (r"\ln x", r"\ln|x|", False),
        ("ex", "2.718281828459045235360287471352662497757x", False), ("x", "x+10^{-40}", False),
    ],
)  # fmt: skip
def test_formulas_that_agree_at_several_points(gold: str, answer: str, expected: bool) -> None:
    """Where they are real; a decimal that is close to e is not e."""
    assert sympy_worker.agree(*trees(gold, answer)) is expected


def trees(*answers: str) -> tuple[sympy.Expr, ...]:
    """As they are built: symbols get their names in the order of the alphabet."""
    return tuple(build(form.worker_texts(f"({answer})+z", f"z+({answer})")[0]) for answer in answers)


def test_trees_are_built_as_they_were_read() -> None:
    gold = r"\left(\frac{x^2-\sqrt{y}}{3}, \ln x, |y|\right)"
    first, second = form.worker_texts(gold, r"(\frac{1}{3}(x^2-y^{1/2}), \ln(x), |y|)")
    x, y = sympy.symbols("x0 x1", real=True)
    expected = sympy.Tuple((x**2 - sympy.sqrt(y)) / 3, sympy.log(x), abs(y))
    assert build(first) == expected
    assert build(second) == expected.xreplace({expected[0]: (x**2 - sympy.sqrt(y)) * sympy.Rational(1, 3)})
    examples = list(map(build, sympy_worker.EXAMPLES))
    assert all(sympy_worker.refusal_reason(tree, tree) is None for tree in examples)


def test_a_tree_that_is_too_large_is_not_built() -> None:
    tower: list[object] = ["power", "", [["number", "9", []]] * 2]
    for _ in range(3):
        tower = ["power", "", [["number", "9", []], tower]]
    with pytest.raises(ValueError, match="too large"):
        build(json.dumps(tower))
    with pytest.raises(ValueError, match="a unit, which cannot be compared"):
        build(json.dumps(["unit", "cm", []]))


def test_it_imports_only_the_standard_library() -> None:
    script = (
        f"import runpy, sys; runpy.run_path({sympy_worker.__file__!r}); "
        "sys.exit(any(name in sys.modules for name in ('sympy', 'explorl', 'torch', 'math_verify')))"
    )
    subprocess.run([sys.executable, "-c", script], timeout=60, check=True)
