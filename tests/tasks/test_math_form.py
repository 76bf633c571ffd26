"""Which answers count: those that state what the right answer states, as finished as it, in plain signs."""

from __future__ import annotations

import json
import re
import time
from collections import Counter
from collections.abc import Iterator
from decimal import Decimal
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from explorl.tasks.math.answer_text import MAX_LENGTH, Unreadable, normalize, parse_numeral, translate_unicode
from explorl.tasks.math.benchmark_files import read_jsonl
from explorl.tasks.math.form import AdversarialCase, read_adversarial, refusal_reason, worker_texts
from explorl.tasks.math.judge import Judge
from explorl.tasks.math.latex import Node, parse
from explorl.tasks.math.value import Undefined, rational_value
from explorl.tasks.math.words import is_unit, same_unit

DATA = Path(__file__).parents[3] / "shared" / "data"
FILES = {"math500": 500, "aime24": 30, "aime25": 30, "amc23": 40, "minerva": 272}


@pytest.fixture(scope="module")
def judge() -> Iterator[Judge]:
    with Judge(workers=2, limit=20.0) as shared:  # far more than they take, however busy the machine is
        yield shared


# The corpus


def test_every_adversarial_answer_is_wrong(judge: Judge) -> None:
    rows = read_adversarial()
    assert len(rows) == len(set(rows)) >= 1_170
    assert min(Counter(row.why for row in rows).values()) >= 3
    judged = judge.judge_many([(row.gold, row.answer) for row in rows], [row.prompt for row in rows])
    assert [row for row, judgement in zip(rows, judged, strict=True) if judgement.same] == []
    assert not [judgement for judgement in judged if "took too long" in str(judgement.error)]


def test_the_right_answers_of_the_corpus_are_right(judge: Judge) -> None:
    golds = sorted({row.gold for row in read_adversarial()})
    judged = judge.judge_many((gold, f"${gold}$.") for gold in golds)
    assert [gold for gold, judgement in zip(golds, judged, strict=True) if not judgement.same] == []
    asked = [row for row in read_adversarial() if row.prompt]
    judged = judge.judge_many([(row.gold, f"${row.gold}$.") for row in asked], [row.prompt for row in asked])
    assert [row for row, judgement in zip(asked, judged, strict=True) if not judgement.same] == []


def test_a_corpus_of_ones_own(tmp_path: Path) -> None:
    file = tmp_path / "own.jsonl"
    file.write_text(json.dumps({"gold": "5", "answer": "6", "why": "it is not"}) + "\n\n")
    assert read_adversarial(file) == read_adversarial(str(file)) == [AdversarialCase("5", "6", "it is not")]
    file.write_text(json.dumps({"gold": "5", "answer": 6, "why": "it is not"}) + "\n")
    with pytest.raises(ValueError, match=r"own\.jsonl, line 1: .*give gold, answer and why as text, like"):
        read_adversarial(file)
    file.write_text("5, 6\n")
    with pytest.raises(ValueError, match=r"own\.jsonl, line 1: not a JSON object"):
        read_adversarial(file)


# What the judge says


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        (r"\frac{14}{3}", r"4\frac{2}{3}"), (r"\frac{14}{3}", "4 2/3"), ("7/3", "2 1/3"), ("-7/3", "-2 1/3"),
        ("2k+2", "2(k+1)"), (r"3\sqrt{13}", r"\sqrt{117}"), (r"1\pm\sqrt{19}", r"1+\sqrt{19}, 1-\sqrt{19}"),
        (r"\frac{3\pm\sqrt{17}}{4}", r"\frac{3-\sqrt{17}}{4}, \frac{3+\sqrt{17}}{4}"),
        ("1.2e-27", r"\frac{12}{10^{28}}"), ("4.5e33", r"45 \times 10^{32} \text{ ergs}"), ("1e11", "10^{11}"),
        ("[1,2]", r"x \in [1,2]"), ("5", "x = 5"), ("5", "AB = 5"), ("5", "f(2) = 5"),
        ("5", r"\text{Area} = 5 \text{ cm}^2"), ("30", r"\angle ABC = 30^\circ"), ("0.5", r"50\%"), ("50", r"50\%"),
        ("1", r"100\%"), (r"50\%", "0.5"), (r"50\%", r"\frac{1}{2}"), (r"50\%", "50"), (r"\{1,2\}", "2, 1"),
        ("1,2", r"\{2,1\}"), ("1,2", "1 and 2"), ("1,2", r"1 \text{ or } 2"), ("1,2", "x=2, x=1"),
        ("1,2", "x = 1, 2"), ("-3,3", r"\pm 3"), ("-3,3", r"x = \pm 3"), ("x=1,y=2", "y=2, x=1"), ("5", r"\{5\}"),
        (r"\frac{\sqrt3}{3}", r"\frac{1}{\sqrt3}"), ("y=2x+3", "2x-y+3=0"), ("y=2x+3", "2y=4x+6"), ("y=2x+3", "2x+3"),
        ("y=2x+3", "2x+3=y"), ("x=5", "5=x"), ("x<4", "4>x"), (r"1<x\le 3", r"3 \ge x > 1"), ("x>5", r"(5,\infty)"),
        (r"\mathbb{R}", r"(-\infty,\infty)"), (r"\cot x", r"\frac{\cos x}{\sin x}"), ("e^{-t}", r"\frac{1}{e^t}"),
        (r"\sqrt{x}", "x^{1/2}"), ("x^{-2}", r"\frac{1}{x^2}"), (r"\frac{4A}{3+3i}", r"\frac{2A(1-i)}{3}"),
        ("e^{it}", r"\cos t+i\sin t"), ("R^2-r^2", "(R-r)(R+r)"), ("3R^2", "3r^2"), ("x/2+c", "x/2+C"), ("xy", "yx"),
        ("8t", r"t \cdot 8"), (r"\frac{dy}{dx}=2y", r"2y=\frac{dy}{dx}"), ("y'+y=0", "y+y'=0"), ("I_0", "I_0"),
        (r"0.\overline{36}", r"\frac{4}{11}"), ("58500", "58,500"), ("58500", r"58{,}500"), ("58500", r"58\,500"),
        (r"\$32,\!348", r"32348 \text{ dollars}"), ("12", "12 apples"), ("12", r"12\text{ students}"), ("5", "5 m"),
        (r"15\mbox{ cm}^2", r"15 \text{ square centimeters}"), (r"15\mbox{ cm}^2", "15 cm²"),
        ("9", r"9 \mathrm{~m/s^2}"), ("25", r"25^\circ \text{C}"), ("90", "90°"), (r"90^\circ", "90 degrees"),
        ("4210_5", "4210_{5}"), ("4210_5", "4210"), (r"\text{east}", "East"), (r"\text{east}", r"\textbf{east}"),
        (r"\text{Poincaré}", "poincaré"), ("MC=ATC", "ATC=MC"), (r"\text{(C)}", "C"),
        (r"\text{(C)}", r"\textbf{(C)}"), (r"\text{red, blue}", "blue and red"), ("2:3", r"\frac{2}{3}"),
        (r"\pi", "π"), (r"3\sqrt{2}", "3√2"), ("x^2", "x²"), (r"\frac{1}{2}", "½"), (r"2\le x", "2≤x"), ("-5", "−5"),
        (r"10!", "3628800"), ("2^{100}", "4^{50}"), ("101", "101_{10}"), (r"\mathbf{v}", "v"), ("5", r"\mathbf{5}"),
        (r"\begin{pmatrix}1/5\\2\end{pmatrix}", r"\begin{bmatrix}0.2\\2\end{bmatrix}"), ("np.sin(1)", r"\sin 1"),
        (r"(-\infty,2)\cup(3,\infty)", r"(3,\infty)\cup(-\infty,2)"), ("(1,2)", "(x,y) = (1,2)"), ("5", "5."),
        (r"\text{June 20}", "June 20"), (r"\text{Row 1, Column 2}", r"\text{Row } 1, \text{Column } 2"),
        ("7.5", r"\approx 7.5"), ("7.5", "= 7.5"), ("CO2", "CO₂"), ("CO2", r"\mathrm{CO_2}"),
        ("CO_2", r"\text{CO}_{2}"),
        (r"\begin{cases}1&x>0\\0&x\le0\end{cases}", r"\begin{cases} 1 & x > 0 \\ 0 & x \le 0 \end{cases}"),
        (r"(-\infty,2)\cup(3,\infty)", "(-∞, 2) U (3, ∞)"), (r"(-\infty,2)\cup(3,\infty)", r"x<2 \text{ or } x>3"),
        (r"[0,1]\cup[2,3]", r"0\le x\le 1 or 2\le x\le 3"), ("8:00, 9:30", "9:30, 8:00"), ("2U(x)", "2U(x)"),
        (r"\ce{H2O}", "H_2O"), ("XL", r"\text{XL}"), ("HTT", "HTT."), ("IR", "RI"), ("AB", "BA"), ("x_1", "x_{1}"),
        ("1:2:3", "1 : 2 : 3"), ("1:2:3", "2:4:6"), (r"1:\sqrt{3}:2", r"\sqrt3:3:2\sqrt3"), ("2:3", "4:6"),
        ("1/3", "10:30"),
        ("6:00", r"6:00 \text{ p.m.}"), ("10:30", "10:30 AM"), ("8:00", "08:00"), (r"12:05\text{ p.m.}", "12:05 PM"),
        (r"\{x : x > 3\}", "x>3"), (r"\{x : x > 3\}", r"\{x \in \mathbb{R} \mid x > 3\}"),
        (r"(3,\infty)", r"\{x|x>3\}"),
        (r"[0,\infty)", r"x \ge 0"), (r"(-\infty,0]", r"0 \ge x"), (r"[-2,7]", r"-2 \le x \le 7"),
        ("(3,4]", r"3<y\le 4"),
        (r"(-\infty,2)\cup(2,\infty)", r"\mathbb{R}\setminus\{2\}"), (r"\frac{1}{6}", r"0.1\bar{6}"),
        ("(1,-2)", "（1，－２）"),
        ("5", "5 min"), ("5", r"5 \text{ sec}."), ("5", r"5\mathrm{~min}"), (r"5 \text{ min}", "5 minutes"),
        ("5 sec", "5 s"),
        ("5", r"5 \text{ arcsec}"), ("5", r"5 \text{ ft}/\text{sec}"), (r"\sec x", r"\text{sec } x"),
        ("5", r"5\,\mu\text{m}"),
        ("5", r"5\ \mathrm{kg\cdot m/s}"), ("5", r"5 \,\mathrm{m\,s^{-1}}"), ("5", r"5 \mathrm{cm^{-3}}"),
        (r"5\text{ m/s}", r"5\text{ m s}^{-1}"), (r"5\text{ MW}", r"5\text{ megawatts}"),
    ],
)  # fmt: skip
def test_honest_rewritings_by_hand(judge: Judge, gold: str, answer: str) -> None:
    judgement = judge.judge(gold, answer)
    assert judgement.same, judgement.error


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        # layout, fonts and letters of options
        ("7", r"\color{red}{7}"), ("7", r"\textcolor{blue}{7}"), ("7", r"\text{7}"), ("7", r"\text{7 apples}"),
        ("1,-2", r"\text{1, -2}"), ("3 hours", r"\text{3 hours}"), (r"\$24.50", r"\text{\$}24.50"),
        (r"65\%", r"\text{65\%}"),
        ("27.0", r"\textbf{(A)}\ 27"), ("27.0", r"(A)~27"), ("A", r"\textbf{(A)}\ 27"), ("A", r"\text{(A)}"),
        ("033", "33"), ("33", r"\text{033}"), ("33", "m+n = 033"), (r"\frac{7}{12}", r"{7 \over 12}"),
        (r"0.\overline{27}", r".\overline{27}"), ("3.2e-7", r"3.2 x 10^{-7}"), (r"24\text{ cm}^2", r"\text{24 cm}^2"),
        # words
        ("12", "twelve"), ("31", r"\text{Thirty-one}"), (r"\text{ellipse}", r"\text{an ellipse}"),
        (r"\text{parabola}", "It is a parabola."), (r"\emptyset", r"\text{no solution}"),
        (r"-\infty", "negative infinity"),
        # matrices
        (r"\begin{pmatrix}4&-6\\8&2\end{pmatrix}", r"2\begin{pmatrix}2&-3\\4&1\end{pmatrix}"),
        (r"\begin{pmatrix}x/2\\1\end{pmatrix}", r"\frac12 \begin{bmatrix}x\\2\end{bmatrix}"),
        (r"\begin{pmatrix}3\\-1\end{pmatrix}", r"-\begin{pmatrix}-3\\[4pt] 1\end{pmatrix}"),
        (r"\begin{pmatrix}3\\-1\end{pmatrix}", r"\frac{\begin{pmatrix}6\\-2\end{pmatrix}}{2}"),
        (r"\begin{pmatrix}4&-6\\8&2\end{pmatrix}", r"\pmatrix{4 & -6 \cr 8 & 2 \cr}"),
        # bases and ratios
        *(("204_5", base) for base in (
            "(204)_5", r"204_{\text{five}}", r"204_\text{five}", "204_{(5)}", r"204 \text{ base } 5", "204 base 5",
        )),
        ("3:4", r"3 \text{ to } 4"), ("3:4", r"\text{3 to 4}"), ("3:4", r"3\colon 4"), ("2:3:4", "2 to 3 to 4"),
        ("4:30 pm", "4{:}30 p.m."),
        # intervals and inequalities
        ("(3,8]", r"x>3 \text{ and } x\le 8"), (r"-1\le x\le 4", r"x\in[-1,4]"), ("x>7", r"x \in (7,\infty)"),
        (r"-1\le x\le 4", r"x \ge -1 \text{ and } x \le 4"), (r"(-\infty,2)\cup(5,\infty)", "x<2, x>5"),
        (r"(-\infty,2)\cup(5,\infty)", r"(-\infty,2) \text{ or } (5,\infty)"),
        (r"(-\infty,2)\cup(5,\infty)", r"\{x : x<2 \text{ or } x>5\}"), (r"\mathbb{R}\setminus\{1\}", r"x\ne 1"),
        (r"\mathbb{R}\setminus\{1\}", r"x\in\mathbb{R}, x\ne 1"), (r"\mathbb{R}\setminus\{1\}", r"\mathbb{R}-\{1\}"),
        (r"(1,4)\cup\{7\}", r"1<x<4 \text{ or } x=7"),
        ("(3,8]", "]3,8]"), (r"[2,\infty)", r"[2,\infty["), ("(3,8)", "]3,8["), ("x>3, x<8", "(3,8)"),
        ("x>3, x<8", r"x>3 \text{ and } x<8"),
        # remarks
        (r"2\sqrt3", r"2\sqrt3 \approx 3.46"), ("7/3", r"x = \frac73 \approx 2.33"), (r"k\pi", r"k\pi, k\in\mathbb{Z}"),
        ("x^2+1", r"f(x)=x^2+1,\ x\in\mathbb{R}"), ("5", r"\text{Answer: } 5"), ("5", r"\fbox{5}"),
        ("5", r"\underline{5}"),
        ("1,2", r"x=1 \lor x=2"), (r"65\%", r"65\text{%}"),
        # values of several names
        ("1,-2", "x_1 = 1, x_2 = -2"), ("(3,-5)", "x=3, y=-5"), ("x=3, y=-4", "(x,y) = (3,-4)"),
        (r"(2,\frac{\pi}{3})", r"\theta = \frac{\pi}{3}, r = 2"), ("-3,0,3", r"-3\text{, }0\text{, and }3"),
        # formulas
        (r"\log_2 3", r"\frac{\ln 3}{\ln 2}"), (r"\log_2 3", r"\frac{1}{\log_3 2}"),
        (r"-\tau\ln\Delta", r"\tau\ln(1/\Delta)"),
        (r"\sqrt{\frac{2E}{m}}", r"\frac{\sqrt{2E}}{\sqrt m}"), ("e^{-1}", r"\frac1e"), (r"\frac1e", "e^{-1}"),
        (r"\binom{12}{4}", r"{12 \choose 4}"), (r"\binom{12}{4}", r"\frac{12!}{4!8!}"), ("(y+1)^2=9", "(y-(-1))^2=9"),
    ],
)  # fmt: skip
def test_other_notations_by_hand(judge: Judge, gold: str, answer: str) -> None:
    judgement = judge.judge(gold, answer)
    assert judgement.same, judgement.error


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        # words after a number that only look like those that change it
        *(("5", rf"5 \text{{ {unit}}}") for unit in (
            "basis vectors", "powers", "short stories", "imaginary roots", "ordered quadruples", "canteens", "folds",
            "millionaires", "decimal places", "students without pets", "rounded corners", "cents", "scaffolds", "parts",
            "cents per pound", "infinite series", "minutes past noon", "MW", "K", "of them", "prime numbers", "primes",
            "exponents", "inclusive days", "eV", "of each",
        )),
        # names that only look like those that deny
        *(("5", rf"\text{{{name}}} = 5") for name in (
            "Least value", "Number of wrong answers", "number of times", "No. of ways", "Half", "Left over",
            "Square root", "Probability of rain or snow", "Opposite side", "The answer is", "number of false positives",
            "inverse", "number of rejected items", "excluded value", "invalid votes", "number of impossible outcomes",
            "distance from A", "number of solutions mod 7", "answer to part b", "sum of the roots", "least upper bound",
        )),
        ("1,2", "1 or 2"), (r"1 \text{ or } 2", "1 and 2"), (r"x=1 \text{ or } x=2", r"x=1 \text{ and } x=2"),
        ("x=1,y=2", r"x=1 \text{ and } y=2"), ("a,b", "a or b"), ("E_1,E_2", r"E_1 \text{ or } E_2"),
        (r"x<1 \text{ or } x>3", "x>3, or x<1"), (r"x<1 \text{ or } x>3", "x<1, x>3"),
        (r"(-\infty,1)\cup(3,\infty)", "x<1, or x>3"), (r"\text{Alice and Bob}", "Bob, Alice"),
        (r"\text{Alice, Bob}", "Bob and Alice"), (r"\text{Alice or Bob}", "Bob or Alice"),
        ("101_{10}", "101"), ("204_5", "204"), ("x<4", "4>x"), (r"1<x\le3", r"3\ge x>1"), ("x=5", "5=x"),
        (r"\emptyset", r"\{\}"), (r"\mathbb{R}", r"(-\infty,\infty)"), ("(8,-2)", "(x,y)=(8,-2)"),
        (r"(-\infty,1)\cup(1,2)\cup(2,3)\cup(3,\infty)", r"\mathbb{R}\setminus\{1,2,3\}"),
        (r"\lim_{n\to\infty} a_n", r"\lim_{n \to \infty} a_{n}"), (r"\sum_{k=1}^n k^2", r"\sum_{j=0}^{n-1} (j+1)^2"),
    ],
)  # fmt: skip
def test_what_is_refused_elsewhere_may_be_right(judge: Judge, gold: str, answer: str) -> None:
    judgement = judge.judge(gold, answer)
    assert judgement.same, judgement.error


def test_reasons_say_what_is_wrong() -> None:
    for gold, answer, reason in [
        (
            "5050",
            r"\sum_{i=1}^{100} i",
            "the answer is not accepted: a sum over an index, which the right answer does not have",
        ),
        ("1", r"\lim_{x\to0} \cos x", r"the answer is not accepted: \lim is not allowed in an answer"),
        (
            "56088",
            r"123\times456",
            "the answer is not accepted: a product of numbers, which the right answer does not have",
        ),
        ("5", "7=5", "the answer is not accepted: a relation that is not a name and its value"),
        ("5", "5, 7", "the answer is not accepted: it states 2 where 1 answer is expected"),
        ("5", "5\f", "the answer is not accepted: it has '\\x0c', which is not printable"),
        ("5", r"\bm{x(y)}", "the answer is not accepted: symbols that the right answer does not have"),
        ("(1,2)", "[1,2]", "the answer is not accepted: [] of 2 where () of 2 is expected"),
        (r"5 \text{ km}", r"5 \text{ m}", "the answer is not accepted: another unit, 'm'"),
        ("5", "6", "another answer than the right one"),
        (r"\text{east}", "seat", "another answer than the right one"),
        ("x=3", "2x+1=7", "the answer is not accepted: an equation that is not solved"),
        ("x", "y", "the answer is not accepted: symbols that the right answer does not have"),
        ("x<3", "x-3<0", "the answer is not accepted: a relation that is not solved"),
        ("(8,-2)", r"\emptyset", "the answer is not accepted: set where () of 2 is expected"),
        ("A and B", "A or B", "the answer is not accepted: 'or' where the right answer has 'and'"),
        ("5", r"5 \text{ tens}", "the answer is not accepted: words that are not a unit, 'tens'"),
    ]:
        assert refusal_reason(gold, answer) == reason


def test_a_right_answer_beyond_the_language() -> None:
    gold = r"\sum_{k=1}^{n} \left\lfloor \frac{n}{k} \right\rfloor"
    assert refusal_reason(gold, gold) is None
    assert len(set(worker_texts(gold, gold))) == 1
    assert refusal_reason(gold, r"\sum_{j=1}^{n} \lfloor n/j \rfloor") is None
    assert refusal_reason(gold, r"\int_1^n k") == r"the answer is not accepted: \int is not allowed in an answer"
    limit = r"\lim_{n \to \infty} f_n"
    assert worker_texts(limit, r"$\lim_{n\to\infty} f_{n}$.") == (limit, limit)
    assert refusal_reason(limit, r"\lim_{n \to \infty} g_n") == "another answer than the right one"
    assert refusal_reason(r"\sum_{k=1}^n \bm{v}_k", r"\sum_{k=1}^n \bm{v(1)}_k") is not None
    assert refusal_reason(r"\sum_{k=1}^n \bm{v}_k", r"\sum_{k=1}^n \bm{w}_k") is not None


def test_refused_answers_have_no_texts() -> None:
    with pytest.raises(ValueError, match="a sum over an index"):
        worker_texts("5", r"\sum_{k=1}^5 1")


# Plain signs


@pytest.mark.parametrize(
    "sign", ["\f", "\v", "\0", "\x1b", "\x7f", "\u200b", "\u2028", "\u202e", "\ufeff", "\ud800", "\ue000"]
)
def test_what_does_not_print_is_refused_everywhere(sign: str) -> None:
    for answer in (
        f"5{sign}",
        f"{sign}5",
        f"\\text{{a{sign}b}}",
        f"\\bm{{{sign}}}",
        f"x_{{{sign}}}",
        f"5 \\text{{c{sign}m}}",
    ):
        for gold in ("5", r"\text{ab}", "x_{1}", r"\sum_{k} k"):
            assert refusal_reason(gold, answer) is not None


def test_line_breaks_and_spaces_are_spaces() -> None:
    assert translate_unicode("1\n+\t\r\u00a0\u20092") == "1 +    2"


@pytest.mark.parametrize(
    "command",
    [
        "bm",
        "mathbf",
        "text",
        "operatorname",
        "mathrm",
        "mbox",
        "textbf",
        "hat",
        "vec",
        "overline",
        "variable",
        "mathcal",
    ],
)
@pytest.mark.parametrize(
    "name", ["a(b)", "a[b]", "a:b", "a=b", "a#b", 'a"b', "a;b", "a+b", "__a__", "a{b}", r"\a", "a%b", "é(", "a|b"]
)
def test_names_are_plain(command: str, name: str) -> None:
    """Or they are read as formulas, and the worker is told other names."""
    for answer in (f"\\{command}{{{name}}}", f"x_{{\\{command}{{{name}}}}}", f"5 \\{command}{{{name}}}"):
        for gold in ("5", "x", "x_{a}", "a+b", "ab"):
            if refusal_reason(gold, answer) is None:
                assert names_told(worker_texts(gold, answer)[1]) <= {"x0", "x1"}
        assert refusal_reason(rf"\sum_{{k}} \{command}{{v}}", answer) is not None


def names_told(text: str) -> set[str]:
    assert text.startswith("[")
    return set(re.findall(r'\["symbol","([^"]*)"', text))


@pytest.mark.parametrize("letter", ["х", "е", "ａ", "𝑥", "ℓ", "中"])
def test_letters_of_other_alphabets_are_compared_as_words_only(letter: str) -> None:
    assert refusal_reason("x", letter) is not None
    assert refusal_reason("2x", f"2{letter}") is not None
    assert refusal_reason(rf"\text{{{letter * 4}}}", letter * 4) is None
    assert refusal_reason(rf"\text{{{letter * 4}}}", letter * 5) is not None


# Reading


@pytest.mark.parametrize(
    ("text", "tree"),
    [
        ("1,234", Node("number", "1234")), ("1,234,567.50", Node("number", "1234567.5")),
        ("1 234", Node("number", "1234")),
        ("1, 234", Node("list", parts=(Node("number", "1"), Node("number", "234")))),
        ("3.40e-05", Node("number", "3.4e-5")),
        ("(1,234)", Node("bracket", "()", (Node("number", "1"), Node("number", "234")))),
        ("007", Node("number", "7")), ("2 1/3", Node("quotient", "mixed", (Node("number", "7"), Node("number", "3")))),
        ("52_{8}", Node("based", "52_8")), ("x_{1}'", Node("symbol", "x_{1}'")),
        (r"\dot{x}_0", Node("symbol", r"\dot{x}_{0}")), ("f(x)", Node("symbol", "f(x)")),
        (r"\text{two words}", Node("text", "two words")),
        (r"5\text{ cm}^2", Node("unit", "cm^2", (Node("number", "5"),))),
        (r"\sin^{-1} x", Node("call", "arcsin", (Node("symbol", "x"),))), ("i", Node("constant", "i")),
        ("a(b+1)", Node("product", parts=(Node("symbol", "a"), parse("b+1")))),
        (r"\frac12", Node("quotient", parts=(Node("number", "1"), Node("number", "2")))), (r"\{\}", Node("set", "∅")),
        (r"50 \%", Node("percent", parts=(Node("number", "50"),))),
        ("2<x", Node("relation", "<", (Node("number", "2"), Node("symbol", "x")))),
    ],
)  # fmt: skip
def test_trees(text: str, tree: Node) -> None:
    assert parse(text) == tree


@pytest.mark.parametrize(
    "text",
    [
        "", " ", "1 2", "2 4/3", "5$7", r"5\%7", r"9^\circ0", "1.2.3", "(1", "1)", "(1}", r"\frac{1}", "x^", "x^2^3",
        "^2", "5=", ",5", "\\", "5\\", r"\unknown", r"\begin{cases} 1 \end{cases}", "1e9999", "5 +", "()",
        r"\text{a(b)}", r"\begin{pmatrix} 1 & 2 \\ 3 \end{pmatrix}",
        "x''^{3}^2", r"\frac1e5", r"\log(8,2)", r"\sin -x", "x!_2",
    ],
)  # fmt: skip
def test_what_cannot_be_read(text: str) -> None:
    with pytest.raises(Unreadable):
        parse(text)


@pytest.mark.parametrize(
    "unit",
    ["m", "(", "√", "\\frac", "\\sqrt", "\\sin", "1/", "5!", "a^", "f(", "{", "|", "-", "[1,2]\\cup", "9 ", "½", "\\$"],
)
def test_nothing_is_nested_or_repeated_without_end(unit: str) -> None:
    text = (unit * MAX_LENGTH)[: MAX_LENGTH - 1] + "5"
    began = time.process_time()
    for gold in ("5", "x+1", "(1,2)", r"\text{east}"):
        assert refusal_reason(gold, text) is not None
    assert time.process_time() - began < 5.0


PIECES = [
    *"0123456789+-*/^_=<>(){}[]|!,.:;'\"$%&~ xyzabeiπ√½²°é", "\\frac", "\\sqrt", "\\boxed", "\\text{", "\\left",
    "\\right", "\\cdot", "\\pm", "\\cup", "\\in", "\\infty", "\\sum", "\\begin{pmatrix}", "\\end{pmatrix}", "\\{",
    "\\}", "\\circ", "1/2", "1e5", "\n", "\0", "and", "{1}", "^{2}", "_{3}", "\\pi", "\\\\", "\\sin", "\\log_",
    "\\bm{", "\\hat", "\\overline{", "\\$", "\\%", "cm", "sqrt", "\\mod", "\\binom", "\\degree", "\\prime", "np.",
    "\\mathbb{R}", "f(", "\\!", "{,}", ",000", "\\lfloor", "\\rfloor",
]  # fmt: skip
GOLDS = [
    "42", r"\frac{14}{3}", "p - q", r"(3, \frac{\pi}{2})", "x=5", "1,-2", r"90^\circ", "(3,4]", "6 - 5i", "4.5e33",
    r"1 \pm \sqrt{19}", r"\text{east}", r"\sum_{k=1}^n k", "y=2x+3", r"(0,9)\cup(9,36)", r"50\%", "52_8",
    r"15 \text{ cm}^2", r"\{1,2\}", "1<x<3", "e^{it}",
]  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(GOLDS), st.lists(st.sampled_from(PIECES), max_size=30).map("".join) | st.text(max_size=60))
def test_no_answer_raises_or_takes_long(gold: str, answer: str) -> None:
    began = time.process_time()
    why = refusal_reason(gold, answer)
    first, second = worker_texts(gold, answer) if why is None else ("", "")
    if first != second:
        assert names_told(second) <= {f"x{count}" for count in range(3)}
        assert json.loads(second)
    assert time.process_time() - began < 2.0


@settings(max_examples=100, deadline=None)
@given(st.fractions(), st.fractions(), st.integers(2, 99))
def test_rational_numbers_are_exact(first: Fraction, second: Fraction, factor: int) -> None:
    assert refusal_reason(str(first), str(first)) is None
    assert (refusal_reason(str(first), str(second)) is None) == (first == second)
    if first.denominator > 1:
        whole, rest = divmod(abs(first.numerator), first.denominator)
        sign = "-" if first < 0 else ""
        assert refusal_reason(str(first), f"{sign}{whole}\\frac{{{rest}}}{{{first.denominator}}}") is None
        assert refusal_reason(str(first), f"{sign}{whole} {rest + 1}/{first.denominator}") is not None
        assert (
            refusal_reason(str(first), f"\\frac{{{factor * first.numerator}}}{{{factor * first.denominator}}}") is None
        )


# Values, units, normal forms


def test_values() -> None:
    assert rational_value(parse(r"0.1\overline{6}")) == Fraction(1, 6)
    assert rational_value(parse(r"\sqrt[3]{\frac{8}{27}}")) == Fraction(2, 3)
    assert rational_value(parse(r"\sqrt{2}")) is None
    assert rational_value(parse(r"2^{10} + \binom{5}{2} - \lfloor 2.5 \rfloor")) == 1032
    assert rational_value(parse(r"17 \bmod 5")) == 2
    for text in (r"\frac{1}{0}", "0^0", "9^{9^{9}}", "900!", r"\binom{9000}{2}", r"5 \bmod 0", r"\gcd(1.5,2)"):
        with pytest.raises(Undefined):
            rational_value(parse(text))


def test_units() -> None:
    for same in [
        ("cm^2", "square centimeters"),
        ("m/s", "meters per second"),
        ("ft", "feet"),
        ("dollar", "dollars"),
        ("cm^2", "square units"),
    ]:
        assert same_unit(*same)
    for other in [("km", "m"), ("cm", "cm^2"), ("hours", "minutes"), ("cm^2", "cm^3"), ("dollar", "cents")]:
        assert not same_unit(*other)
    assert all(map(is_unit, ("apples", "square units", "m/s^2", "cm")))
    assert not any(
        map(
            is_unit,
            ("million", "is wrong", "or more", "sixths", "to seven", "the right answer is five", "(x)", "per cent"),
        )
    )


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("57", "5$7"), ("57", r"5\%7"), ("90", r"9^\circ0"), ("90", r"9^{\circ} 0"), ("5.3", r"5\left.3\right."),
        ("1234", "1, 234"), ("100200", "100, 200"), ("0.25", r"0.25\%"), ("57", r"5\)7"), ("57", r"5\left7"),
    ],
)  # fmt: skip
def test_normal_forms_glue_nothing_together(one: str, other: str) -> None:
    assert normalize(one) != normalize(other)
    assert parse_numeral(other) is None


def test_normal_forms_still_say_the_same() -> None:
    for one, other in [
        ("3, 5, 7", "3,5,7"), (r"11,\! 111", "11111"), (r"\$18.90", "18.9"), (r"90^\circ", "90"),
        (r"\left( 3, 4 \right)", "(3,4)"), ("$5$", "5"), (r"\(5\)", "5"), (r"50\%", "50 %"), (r"\left.5\right.", "5"),
    ]:  # fmt: skip
        assert normalize(one) == normalize(other)


# Right answers of the benchmarks, and what else says the same

_WHOLE = r"-?[0-9]+"
_TIMES = re.compile(r"(?<![A-Za-z\\}])([0-9.]+) ?([a-df-hj-z])(?![A-Za-z])")


def rewritings(gold: str) -> dict[str, str]:
    """Texts that say what a right answer says, each by the name of the rule that made it."""
    found: dict[str, str] = {}
    for rules in (layout, fractions, numbers, lists, texts_and_units, formulas, relations):
        for name, text in rules(gold).items():
            if text != gold and text not in found.values():
                found[name] = text
    return found


def is_word(gold: str) -> bool:
    return "\\text" in gold and not re.search("[0-9]", gold)


def is_relation(gold: str) -> bool:
    return any(sign in gold for sign in ("=", "<", ">", "\\in"))


def is_list(gold: str) -> bool:
    return "," in gold and not re.fullmatch(r"(?:\\\$)?[0-9]{1,3}(?:,(?:\\! ?)?[0-9]{3})+", gold)


def layout(gold: str) -> dict[str, str]:
    found = {
        "dollars": f"${gold}$",
        "full stop": f"{gold}.",
        "parentheses": rf"\({gold}\)",
        "display": rf"\displaystyle {gold}",
    }
    if not re.search(r"e[-+]|\\[a-z]*\{|,\\!|[0-9],[0-9]{3}", gold) and not is_word(gold):
        found["spaces"] = re.sub(r"([-+=,])", r" \1 ", gold)
    if not re.search(r"\\!|\\mbox|\\text", gold):
        found["no spaces"] = re.sub(r"(?<![A-Za-z]) | (?![A-Za-z])", "", gold)
    found["no left"] = gold.replace("\\left", "").replace("\\right", "")
    if "\\left" not in gold and "sqrt[" not in gold:
        found["left"] = re.sub(r"(?<!\\)([(\[])", r"\\left\1", re.sub(r"(?<!\\)([)\]])", r"\\right\1", gold))
    if not is_list(gold) and not is_word(gold):
        found["braces"] = f"{{{gold}}}"
    if re.fullmatch(r"-?[0-9.]+", gold):
        found["bold"] = rf"\mathbf{{{gold}}}"
    if "\\pi" in gold:
        found["π"] = gold.replace("\\pi", "π")
    return found


def fractions(gold: str) -> dict[str, str]:
    found = {name: re.sub(r"\\[dt]?frac(?![a-z])", rf"\\{name}", gold) for name in ("frac", "dfrac", "tfrac")}
    found["braced"] = re.sub(r"\\frac ?([0-9])([0-9])", r"\\frac{\1}{\2}", gold)
    match = re.fullmatch(rf"(-?)\\[dt]?frac ?(?:\{{({_WHOLE})\}}|([0-9])) ?(?:\{{({_WHOLE})\}}|([0-9]+))", gold)
    if not match:
        return found
    value = Fraction(int(match[2] or match[3]), int(match[4] or match[5])) * (-1 if match[1] else 1)
    sign, (whole, rest) = "-" if value < 0 else "", divmod(abs(value.numerator), value.denominator)
    found["slash"] = str(value)
    found["not reduced"] = rf"\frac{{{2 * value.numerator}}}{{{2 * value.denominator}}}"
    if value.denominator < 10**6 and not set(prime_factors(value.denominator)) - {2, 5}:
        found["decimal"] = str(Decimal(value.numerator) / Decimal(value.denominator))
    if whole:
        found["mixed"] = rf"{sign}{whole}\frac{{{rest}}}{{{value.denominator}}}"
        found["mixed with a slash"] = f"{sign}{whole} {rest}/{value.denominator}"
    return found


def prime_factors(number: int) -> Iterator[int]:
    divisor = 2
    while number > 1:
        while number % divisor == 0:
            yield divisor
            number //= divisor
        divisor += 1


def numbers(gold: str) -> dict[str, str]:
    found: dict[str, str] = {}
    if re.fullmatch(r"-?[0-9]+(?:\.[0-9]+)?", gold):
        value = Fraction(gold)
        found |= {"units": rf"{gold} \text{{ units}}", "cm": rf"{gold}\text{{ cm}}", "kg": rf"{gold} \mathrm{{~kg}}"}
        found |= {"bare unit": f"{gold} cm", "unicode minus": gold.replace("-", "−")}
        if value.denominator > 1:
            found["as a fraction"] = (
                rf"{'-' if value < 0 else ''}\frac{{{abs(value.numerator)}}}{{{value.denominator}}}"
            )
        elif abs(value) >= 1_000 and "." not in gold:
            grouped = f"{int(gold):,}"
            found |= {
                "thousands": grouped,
                "braced comma": grouped.replace(",", "{,}"),
                "thin": grouped.replace(",", ",\\!"),
            }
    if match := re.fullmatch(r"(-?[0-9.]+)e([-+]?[0-9]+)", gold):
        found |= {sign: rf"{match[1]} \{sign} 10^{{{int(match[2])}}}" for sign in ("times", "cdot")}
        found["with a unit"] = rf"{match[1]} \times 10^{{{int(match[2])}}} \text{{ m}}"
        found["shifted"] = rf"{Decimal(match[1]) * 10} \times 10^{{{int(match[2]) - 1}}}"
    if match := re.fullmatch(r"([0-9]+)_\{?([0-9])\}?", gold):
        found |= {
            "base": f"{match[1]}_{{{match[2]}}}",
            "no base": match[1],
            "text base": rf"{match[1]}_{{\text{{{match[2]}}}}}",
        }
    return found


def lists(gold: str) -> dict[str, str]:
    found: dict[str, str] = {}
    if is_list(gold) and not re.search(r"[()\[\]=]|\\begin|\\\{", gold):
        parts = [part.strip() for part in gold.split(",")]
        found |= {"set": rf"\{{{', '.join(parts)}\}}", "reversed": ", ".join(parts[::-1]), "or": " or ".join(parts)}
        found |= {"and": rf"{', '.join(parts[:-1])} \text{{ and }} {parts[-1]}", "x =": f"x = {', '.join(parts)}"}
        found["x = each"] = ", ".join(f"x={part}" for part in parts)
    if match := re.fullmatch(r"([^\\{,]*)\\pm(.*)", gold):
        found["plus, minus"] = f"{match[1]}+{match[2]}, {match[1]}-{match[2]}"
        found["set of two"] = rf"\{{{match[1]}-{match[2]}, {match[1]}+{match[2]}\}}"
    if " \\cup " in gold:
        found["union"] = " \\cup ".join(gold.split(" \\cup ")[::-1])
    if "pmatrix" in gold:
        found["bmatrix"] = gold.replace("pmatrix", "bmatrix")
        found["fractions in a matrix"] = re.sub(r"(\d+)/(\d+)", r"\\dfrac{\1}{\2}", gold)
    return found


def texts_and_units(gold: str) -> dict[str, str]:
    found: dict[str, str] = {}
    if match := re.fullmatch(r"\\text\{([A-Za-z]+)\}", gold):
        found |= {"bare": match[1], "textbf": rf"\textbf{{{match[1]}}}", "capitals": match[1].upper()}
        found |= {"mathrm": rf"\mathrm{{{match[1]}}}", "end of sentence": f"{match[1]}."}
    if match := re.fullmatch(r"\\text\{\(([A-Z])\)\}", gold):
        found |= {
            "letter": match[1],
            "bold": rf"\textbf{{({match[1]})}}",
            "bracket": f"({match[1]})",
            "text": rf"\text{{{match[1]}}}",
        }
    if "^\\circ" in gold:
        signs = {"none": "", "braced": "^{\\circ}", "°": "°", "word": r" \text{ degrees}", "bare word": " degrees"}
        found |= {f"degrees: {name}": gold.replace("^\\circ", sign) for name, sign in signs.items()}
    if gold.startswith("\\$"):
        found |= {"no dollar sign": gold[2:], "dollars in words": rf"{gold[2:]} \text{{ dollars}}"}
    if match := re.fullmatch(r"(.+?)\\(?:text|mbox)\{ ?([a-z]+)\}(\^2)?", gold):
        number, unit, power = match[1], match[2], match[3] or ""
        found |= {
            "no unit": number,
            "unit bare": f"{number} {unit}{power}",
            "unit roman": rf"{number}\mathrm{{~{unit}}}{power}",
        }
    return found


def formulas(gold: str) -> dict[str, str]:
    found: dict[str, str] = {}
    if is_relation(gold) or is_list(gold) or is_word(gold) or re.search(r"\\pm|cup|\\begin", gold):
        return found
    name, argument = ("w" if "x" in gold else "x"), ("s" if "t" in gold else "t")
    found |= {"name": f"{name} = {gold}", "function": f"g({argument}) = {gold}"}
    terms = top_terms(gold)
    if len(terms) > 1:
        found["reordered"] = "".join(term if term[0] == "-" else f"+{term}" for term in terms[::-1]).lstrip("+")
    if match := re.fullmatch(r"([0-9]+) ?\\sqrt\{?([0-9]+)\}?", gold):
        found |= {"under the root": rf"\sqrt{{{int(match[1]) ** 2 * int(match[2])}}}", "√": f"{match[1]}√{match[2]}"}
        found |= {"dot": rf"{match[1]} \cdot \sqrt{{{match[2]}}}", "sqrt": f"{match[1]}*sqrt({match[2]})"}
    if _TIMES.search(gold):
        found |= {"cdot": _TIMES.sub(r"\1 \\cdot \2", gold), "star": _TIMES.sub(r"\1*\2", gold)}
    return found


def top_terms(gold: str) -> list[str]:
    """The terms of a sum that stand in no bracket; one if that cannot be told."""
    terms, depth = [""], 0
    for sign in gold:
        depth += (sign in "{[(") - (sign in "}])")
        if depth == 0 and sign in "+-" and terms[-1].strip() and terms[-1].strip()[-1] not in "^_/*(e":
            terms.append("-" if sign == "-" else "")
        else:
            terms[-1] += sign
    return [term.strip() for term in terms] if depth == 0 and not re.search(r"[0-9]e[-+]?[0-9]", gold) else [gold]


def relations(gold: str) -> dict[str, str]:
    found: dict[str, str] = {}
    if match := re.fullmatch(r"([^=]*)=([^=]*)", gold):
        left, right = match[1].strip(), match[2].strip()
        found["swapped"] = f"{right} = {left}"
        if re.fullmatch("[a-z]", left):
            found["right side"] = right
        if re.search("[a-z]", right) and re.search("[0-9]", gold):
            found |= {"zero": f"{left} - ({right}) = 0", "doubled": f"2({left}) = 2({right})"}
    if match := re.fullmatch(r"x \\in (.*)", gold):
        found["set only"] = match[1]
    elif re.fullmatch(r"[\[(].*[\])]", gold) and re.search(r"infty|cup|\]", gold):
        found["in"] = rf"x \in {gold}"
    return found


def golds() -> list[str]:
    return [question.answer for name in FILES for question in read_jsonl(DATA / f"{name}.jsonl")]


def check_rewritings(judge: Judge, chosen: list[str]) -> tuple[int, list[tuple[str, str, str]]]:
    """How many rewritings there are, and those that are not accepted, by rule."""
    pairs = [(gold, text, rule) for gold in chosen for rule, text in rewritings(gold).items()]
    judged = judge.judge_many((gold, text) for gold, text, _ in pairs)
    return len(pairs), [pair for pair, judgement in zip(pairs, judged, strict=True) if not judgement.same]


@pytest.mark.skipif(not DATA.is_dir(), reason="the real problems are not here")
def test_some_right_answers_and_their_rewritings(judge: Judge) -> None:
    chosen = sorted(set(golds()), key=lambda gold: (len(gold) * 7919) % 613)[:60]
    assert all(judgement.same for judgement in judge.judge_many((gold, gold) for gold in chosen))
    count, refused = check_rewritings(judge, chosen)
    assert count > 400
    assert len(refused) <= 0.01 * count, refused


@pytest.mark.slow
@pytest.mark.skipif(not DATA.is_dir(), reason="the real problems are not here")
def test_all_right_answers_and_their_rewritings(judge: Judge) -> None:
    answers = golds()
    assert len(answers) == sum(FILES.values())
    assert [gold for gold in answers if not judge.judge(gold, gold).same] == []
    count, refused = check_rewritings(judge, sorted(set(answers)))
    print(f"{count} rewritings of {len(set(answers))} right answers, {len(refused)} refused: {refused}")
    assert count > 5_000
    assert len(refused) <= 0.01 * count


@pytest.mark.skipif(not DATA.is_dir(), reason="the real problems are not here")
def test_right_answers_can_all_be_read() -> None:
    unread = []
    for gold in set(golds()):
        try:
            parse(gold)
        except Unreadable:
            unread.append(gold)
    assert all(re.fullmatch(r"\\text\{\([A-E]\)\}", gold) for gold in unread)
