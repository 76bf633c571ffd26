"""Products of vectors and matrices: the same in another writing, and not in another order."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from explorl.tasks.math.judge import Judge


@pytest.fixture(scope="module")
def judge() -> Iterator[Judge]:
    with Judge(workers=2, limit=20.0) as shared:
        yield shared


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        (r"\mathbf{a}\times\mathbf{b}", r"\mathbf a \times \mathbf b"), (r"\mathbf{a}\times\mathbf{b}", r"a \times b"),
        (r"2\mathbf{a}\times\mathbf{b}", r"\mathbf{a}\times(2\mathbf{b})"), ("A^T(B+C)", "A^{T}B+A^TC"),
        (r"\mathbf{a}\times\mathbf{b}+\mathbf{a}\times\mathbf{c}", r"\mathbf{a}\times(\mathbf{b}+\mathbf{c})"),
        (r"\mathbf{a}\cdot\mathbf{b}", r"\mathbf{b}\cdot\mathbf{a}"), (r"3\mathbf{i}+4\mathbf{j}", r"4j+3i"),
        (r"\mathbf{a}\cdot(\mathbf{b}\times\mathbf{c})", r"\mathbf{a}\cdot\mathbf{b}\times\mathbf{c}"),
        (
            r"\frac{\mathbf{a}\cdot\mathbf{b}}{|\mathbf{a}|^2}\mathbf{a}",
            r"\frac{\mathbf{b}\cdot\mathbf{a}}{\mathbf{a}\cdot\mathbf{a}}\mathbf{a}",
        ),
        (r"q\vec{v}\times\vec{B}", r"\vec{v}\times q\vec{B}"), (r"\frac{1}{2}(A+A^T)", r"\frac{A^T+A}{2}"),
        (r"\vec{F}=m\vec{a}", r"m\vec{a}"), (r"\vec{F}=m\vec{a}", r"2\vec{F}=2\vec{a}m"),
        (r"\vec{F}=m\vec{a}", r"\vec{F}-m\vec{a}=0"), (r"\tau=\vec{r}\times\vec{F}", r"\vec{r}\times\vec{F}=\tau"),
        ("V=IR", "V=RI"), ("AB", "BA"),
        (r"\vec{\omega}\times\vec{r}", r"\vec \omega \times \vec r"), (r"2\boldsymbol{\mu}\cdot\boldsymbol{\sigma}",
        r"\boldsymbol{\sigma}\cdot2\boldsymbol{\mu}"), (r"\boldsymbol{\omega}\times r", r"\omega\times r"),
        (r"\overrightarrow{AB}\cdot\overrightarrow{AC}", r"\overrightarrow{AC}\cdot\overrightarrow{AB}"),
        (r"\frac{1}{2}\overrightarrow{AB}+\overrightarrow{AC}", r"\overrightarrow{AC}+\frac{\overrightarrow{AB}}{2}"),
        (r"\mathbf{r}\times\mathbf{F}", r"\vec{r}\times\vec F"), (r"\vec{r}\times\vec F", r"\mathbf{r}\times\mathbf F"),
        (r"\mathbf{r}\times\mathbf{F}", r"-\mathbf{F}\times\mathbf{r}"),
        (r"\nabla\cdot\mathbf{E}", r"\vec\nabla\cdot\vec{E}"),
        (r"A^{\mathsf{T}}B", "A^TB"), (r"\hat{p}(1-\hat{p})", r"(1-\hat{p})\hat{p}"), (r"\omega r", r"r\omega"),
    ],
)  # fmt: skip
def test_the_same_products(judge: Judge, gold: str, answer: str) -> None:
    judgement = judge.judge(gold, answer)
    assert judgement.same, judgement.error


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        (r"\mathbf{a}\times\mathbf{b}", r"\mathbf{b}\times\mathbf{a}"),
        (r"\mathbf{a}\times\mathbf{b}", r"\mathbf{a}\cdot\mathbf{b}"), (r"\mathbf{a}\times\mathbf{b}", "ab"),
        (r"\mathbf{a}\cdot\mathbf{b}", r"\mathbf{a}\times\mathbf{b}"), ("A^TB", "BA^T"), ("A^{T}AB", "AA^TB"),
        (r"(\mathbf{a}\cdot\mathbf{b})\mathbf{c}", r"\mathbf{a}(\mathbf{b}\cdot\mathbf{c})"),
        (r"\nabla\times\mathbf{F}", r"\nabla\cdot\mathbf{F}"), (r"\hat{A}\hat{B}-\hat{B}\hat{A}", "0"),
        (r"\tau=\vec{r}\times\vec{F}", r"2\tau=2\vec{F}\times\vec{r}"), (r"\bm{A}\bm{B}", r"\bm{B}\bm{A}"),
    ],
)  # fmt: skip
def test_another_order_or_another_product(judge: Judge, gold: str, answer: str) -> None:
    judgement = judge.judge(gold, answer)
    assert not judgement.same
    assert "another order" in str(judgement.error)


def test_capitals_are_matrices_where_the_problem_says_so(judge: Judge) -> None:
    assert judge.judge("A^{-1}B", "BA^{-1}").same
    prompt = "Find the matrix $X$ with $AX = B$."
    assert not judge.judge("A^{-1}B", "BA^{-1}", prompt).same
    assert judge.judge("A^{-1}B", "A^{-1} B", prompt).same
    assert judge.judge("2A+3I", "3I+2A", prompt).same
    assert judge.judge("10.1", "10.1 eV", prompt).same
    assert judge.judge("A^tB", "BA^t", prompt).same  # t may be a number
    assert not judge.judge("A^tB", "BA^t", f"{prompt} Transpose it.").same


def test_plain_letters_are_vectors_where_the_problem_says_so(judge: Judge) -> None:
    prompt = "Find the cross product of the vectors u and v."
    assert judge.judge(r"u\times v", r"u \times v", prompt).same
    assert not judge.judge(r"u\times v", r"v\times u", prompt).same
    assert not judge.judge(r"u\times v", r"u\cdot v", prompt).same
    assert judge.judge(r"l\times w", r"w\cdot l", "Find the area.").same


@pytest.mark.parametrize("answer", [r"\mathbf{a}\times" * 60 + "b", "(a+b)^{12}", "(" * 19 + "a" + ")" * 19, "a^{a}"])
def test_long_products_are_left_to_the_other_gates(judge: Judge, answer: str) -> None:
    assert not judge.judge(r"\mathbf{a}\times\mathbf{b}", answer).same
