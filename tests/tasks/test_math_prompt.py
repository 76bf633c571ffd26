"""Answers of the right value that only repeat the problem, and those that do not, at the tasks that know it."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from explorl.tasks.base import Problem
from explorl.tasks.jsonl.task import Jsonl
from explorl.tasks.math.benchmark_files import read_jsonl
from explorl.tasks.math.judge import Judge
from explorl.tasks.math.prompt import refusal_reason
from explorl.tasks.math.task import Math

DATA = Path(__file__).parents[3] / "shared" / "data"
FILES = ("math500", "aime24", "aime25", "amc23", "minerva")


@pytest.fixture(scope="module")
def task() -> Math:
    return Math(limit=20.0, workers=2)  # far more than they take, however busy the machine is


def problem(prompt: str, gold: str) -> Problem:
    return Problem("x", {"question": prompt, "answer": gold})


@pytest.mark.parametrize(
    ("prompt", "gold", "answer"),
    [
        ("Factor $x^2 - 9$.", "(x-3)(x+3)", "x^2-9"),
        ("Factor $$x^2 - 9.$$", "(x-3)(x+3)", "-(9-x^2)"),
        ("Factor \\(x^2 - 9\\).", "(x-3)(x+3)", r"x \cdot x - 9"),
        ("Factor\n\\[x^2 - 9.\\]", "(x-3)(x+3)", "f(x) = x^2 - 9"),
        ("Factor\n\\begin{align*}\nx^2 &- 9\n\\end{align*}", "(x-3)(x+3)", "x^2-9"),
        ("Factor $f(x) = x^2 - 9, x > 0$.", "(x-3)(x+3)", r"\{x^2-9\}"),
        ("Factor x^2 - 9 completely.", "(x-3)(x+3)", "x^2-9"),
        ("Is a x^2 - 9 a product?", "(x-3)(x+3)", "x^2-9"),
        ("Factor (see page 3): b) “X^2 - 9”, then stop.", "(x-3)(x+3)", "x^2-9"),
        ("Simplify 3xyz + 2xyz.", "5xyz", "2xyz+3xyz"),
        ("Simplify x²y² + x²y².", "2x^2y^2", "x^2y^2 + x²y²"),
        ("Simplify $\\sqrt{242}$.", r"11\sqrt2", r"\sqrt{242}"),
        ("Simplify $\\sqrt{242}$.", r"11\sqrt2", r"2\sqrt{60.5}"),
        ("Simplify sqrt(242).", r"11\sqrt2", r"242^{1/2}"),
        ("Write $\\frac{3}{20}$ as a decimal.", "0.15", "3/20"),
        ("Write 3/20 as a decimal.", "0.15", r"\frac{6}{40}"),
        ("Write 0.15 as a common fraction.", r"\frac{3}{20}", ".150"),
        ("Reduce $14/21$.", r"\frac{2}{3}", r"\frac{28}{42}"),
        ("Write $\\frac{14}{3}$ as a mixed number.", r"4\frac{2}{3}", r"\frac{14}{3}"),
        ("Write 0.00036 in scientific notation.", r"3.6\times10^{-4}", "0.00036"),
        ("Write $3 < x \\le 4$ as an interval.", "(3,4]", r"4 \ge x > 3"),
        ("Write $2x-y+3=0$ in slope-intercept form.", "y=2x+3", "4x-2y+6=0"),
        ("Write $x^{-2}$ without a negative exponent.", r"\frac{1}{x^2}", "x^{-2}"),
    ],
)
def test_a_formula_of_the_problem_is_refused(task: Math, prompt: str, gold: str, answer: str) -> None:
    verdict = task.verify(rf"So it is \boxed{{{answer}}}.", problem(prompt, gold))
    assert not verdict.correct
    assert "formula of the problem" in str(verdict.error)
    assert task.verify(rf"\boxed{{{gold}}}", problem(prompt, gold)).correct
    assert task.verify(rf"\boxed{{{answer}}}", problem("Find it.", gold)).correct  # the value is right


@pytest.mark.parametrize(
    ("prompt", "gold", "answer"),
    [
        ("Which is $x^2-9$: $(x-3)(x+3)$ or $(x-9)(x+1)$?", "(x-3)(x+3)", "(x+3)(x-3)"),
        ("Which of $0.5$, $\\frac{1}{3}$ and $\\frac12$ is a fraction above 0.4?", r"\frac{1}{2}", "1/2"),
        ("A number is $27$. Which is it?", "27.0", "27"),
        ("Expand $(x+1)(x+2)$.", "x^2+3x+2", "2+3x+x^2"),
        ("Simplify $\\sqrt{242}$.", r"11\sqrt2", r"\sqrt{2} \cdot 11"),
        ("Write $\\frac{3}{20}$ as a decimal.", "0.15", "x = .150"),
        ("Simplify $\\frac{\\sec x}{\\sin x} - \\frac{\\sin x}{\\cos x}$.", r"\cot x", r"\frac{\cos x}{\sin x}"),
        ("Rationalize $\\frac{5}{2\\sqrt3}$.", r"\frac{5\sqrt3}{6}", r"\frac{5}{6}\sqrt3"),
        ("It costs \\$5 or \\$6.", r"\$5", r"5 \text{ dollars}"),
        ("Half of it, $50\\%$ or $\\frac12$, is sold. How many percent?", "50", r"50\%"),
        ("(A) 3 (B) 4", r"\text{(A)}", "A"),
        ("Does it go east or west?", r"\text{east}", "East"),
        ("Give $n \\times 10^x$; it weighs $4.5 \\times 10^{33}$ g.", "4.5e33", r"4.5 \times 10^{33}"),
        ("There are 58,500 seats.", "58500", r"58{,}500"),
        ("Write 54 in base 5; 204 is near.", "204_5", "204"),
        ("Solve $x = 3$.", "x=3", "3"),
        ("Write $x \\ge 3$ as an interval.", r"[3,\infty)", r"x \in [3, ∞)"),
        ("Write 14/3 as a mixed number.", r"4\frac{2}{3}", "4 2/3"),
        ("", "(x-3)(x+3)", "x^2-9"),
        ("5", r"\sum_{k=1}^n k", r"\sum_{k=1}^{n} k"),
    ],
)
def test_the_right_form_is_accepted_wherever_it_stands(task: Math, prompt: str, gold: str, answer: str) -> None:
    verdict = task.verify(rf"\boxed{{{answer}}}", problem(prompt, gold))
    assert verdict.correct, verdict.error


def test_an_answer_that_is_not_read_may_be_a_formula_of_the_problem_too() -> None:
    prompt = r"Write $\sum_{k=1}^{n} k$ with a sum from 0."
    with Judge(workers=1, limit=20.0) as judge:
        assert judge.judge(r"\sum_{k=0}^{n} k", r"\sum_{k=1}^{n}k").same
        assert not judge.judge(r"\sum_{k=0}^{n} k", r"\sum_{k=1}^{n}k", prompt).same


@pytest.mark.parametrize("turns", [False, True])
def test_rows_of_ones_own(tmp_path: Path, turns: bool) -> None:
    text = "Factor $x^2 - 9$."
    prompt = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": text}] if turns else text
    rows = [{"prompt": prompt, "answer": answer} for answer in ("(x-3)(x+3)", ["x^2-9", "(x-3)(x+3)"])]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = Jsonl(data_dir=tmp_path, verifier="math", holdout=0, seconds=20.0)
    one, any_form = ({**row, "verifier": "math"} for row in rows)
    one["answer"] = [one["answer"]]
    problems = [Problem("one", one), Problem("any", any_form)]
    verdicts = task.verify_many([r"\boxed{x^2-9}"] * 2 + ["no box", r"\boxed{(x+3)(x-3)}"], [*problems, *problems])
    assert [verdict.correct for verdict in verdicts] == [False, True, False, True]


@given(st.text(max_size=80), st.text(max_size=40), st.sampled_from(["0.15", "(x-3)(x+3)", r"\text{a}", "A^TB", "4:30"]))
@settings(max_examples=200, deadline=None)
def test_no_text_raises(prompt: str, answer: str, gold: str) -> None:
    for text in (prompt, f"${prompt}$", f"{prompt} {answer}", f"\\[{answer} = {prompt}\\]"):
        assert refusal_reason(text, gold, gold) is None
        refusal_reason(text, gold, answer)


@pytest.mark.parametrize("unit", ["x+", "((", "2^", "$", "\\[", "\\frac{1}", "a b ", "3/20 ", "(2x+2y)^{64}", "-", "√"])
def test_prompts_and_answers_take_bounded_time(unit: str) -> None:
    began = time.process_time()
    refusal_reason(f"${unit * 5_000}$ {unit * 5_000}", "0.15", (unit * 1_000)[:999])
    refusal_reason("Find it.", r"\mathbf{a}\times\mathbf{b}", (unit * 1_000)[:999])
    assert time.process_time() - began < 20.0


def test_numbers_in_forms_are_bounded() -> None:
    power = "(2x+2y)"
    for _ in range(8):
        power = f"({power}^{{64}})"
    began = time.process_time()
    assert refusal_reason(f"Expand ${power}$.", "x+y", power) is not None  # as text, since the form is not worked out
    assert time.process_time() - began < 5.0


@pytest.mark.skipif(not DATA.is_dir(), reason="the real problems are not here")
def test_formulas_of_the_benchmarks() -> None:
    """Every right answer is accepted with its problem, and so is a copy of a formula only where it has that form."""
    copied = {
        ("math500", 31): r"\sqrt{242}", ("math500", 54): r"\frac{3}{20}", ("math500", 98): "(-k + 4) + (-2 + 3k)",
        ("math500", 66): r"x\left(x(1+x)+2x\right)-3(x^2-x+2)", ("math500", 102): "ab+5b+2a+10",
        ("math500", 74): r"\frac{\sec x}{\sin x} - \frac{\sin x}{\cos x}", ("math500", 146): r"\frac{3}{\sqrt{27}}",
        ("math500", 181): r"\sqrt{\sqrt[3]{\sqrt{\frac{1}{729}}}}", ("math500", 430): r"\frac{9}{2}",
        ("math500", 318): r"\frac{4+6a}{5}-\frac{1+3a}{4}", ("math500", 433): r"\frac{57}{160}",
        ("math500", 347): "4(3r^3+5r-6)-6(2r^3-r^2+4r)", ("minerva", 70): r"\cos (2 t)+\sin (2 t)",
    }  # fmt: skip
    questions = {
        (name, row): question for name in FILES for row, question in enumerate(read_jsonl(DATA / f"{name}.jsonl"))
    }
    with Judge(workers=2, limit=20.0) as judge:
        pairs = [(question.answer, f"${question.answer}$.") for question in questions.values()]
        judged = judge.judge_many(pairs, [question.text for question in questions.values()])
        assert all(judgement.same for judgement in judged)
        for key, formula in copied.items():
            assert judge.judge(questions[key].answer, formula).same
            assert not judge.judge(questions[key].answer, formula, questions[key].text).same
