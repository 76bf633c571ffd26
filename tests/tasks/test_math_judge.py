"""The judge of mathematical answers: what is the same, in bounded time, whatever happens to its workers."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from explorl.sandbox import isolated_call
from explorl.tasks.math import judge as math_judge
from explorl.tasks.math.answer_text import MAX_LENGTH, format_numeral, normalize, parse_numeral
from explorl.tasks.math.form import worker_texts
from explorl.tasks.math.judge import Judge, Judgement, judge_locally, shared_judge
from explorl.tasks.math.sympy_worker import compare, prepare, prepare_trusted, same_answer

LIMIT = 1.0
HANGS = "9^{9^{9^{9}}}"


@pytest.fixture(scope="module")
def judge() -> Iterator[Judge]:
    with Judge(workers=2, limit=20.0) as shared:  # far more than they take, however busy the machine is
        yield shared


@pytest.mark.parametrize(
    ("gold", "answer", "expected"),
    [
        (r"\frac{14}{3}", "14/3", True),
        (r"\frac{14}{3}", "4.67", False),
        ("2k+2", "2(k+1)", True),
        ("2k+2", "2(k+2)", False),
        ("p - q", "-q + p", True),
        (r"3\sqrt{13}", r"\sqrt{117}", True),
        ("x=5", "5", True),
        ("5", "x = 5", True),
        ("(3,4]", "[3,4)", False),
        ("3, 5, 7", "7, 5, 3", True),
        ("(6,31,-1)", "(6,-1,31)", False),
        (r"1 \pm \sqrt{19}", r"1+\sqrt{19}, 1-\sqrt{19}", True),
        (r"\begin{pmatrix} 1/5 \\ -18/5 \end{pmatrix}", r"\begin{bmatrix} 0.2 \\ -3.6 \end{bmatrix}", True),
        (r"\text{Evelyn}", "Evelyn", True),
        (r"\text{Evelyn}", "Angela", False),
        (r"90^\circ", "90", True),
        ("0.5", r"50\%", True),
        ("1.6", r"1.6 \mathrm{~cm}", True),
        (r"\$32,\!348", r"32348 \text{ dollars}", True),
        ("5", "5 or 7", False),
        ("5", "the answer is 5", False),
        ("5", r"foo \(5\) bar", False),
        ("5", r"@@ \[5\] @@", False),  # a part of the box is not the answer
        ("3", "1 2", False),  # a mixed number to math-verify
        # what math-verify alone misreads
        ("4.5e33", r"45 \times 10^{32} \text{ ergs}", True),
        ("np.arcsin(10/13)", r"\arcsin\frac{10}{13}", True),
        ("-1./3", r"-\frac{1}{3}", True),
        # and what it takes for the same because both are small
        ("1.325e-27", r"\frac{1}{10^{20}}", False),
        ("1.325e-27", r"\frac{1325}{10^{30}}", True),
        ("1.325e-27", r"p = 1.325 \cdot 10^{-27} \text{ kg}", True),
        ("1.325e-27", "p", False),
        (".0000672", r"\frac{67}{10^6}", False),
        (".0000672", r"\frac{672}{10^7}", True),
    ],
)
def test_sameness_by_hand(judge: Judge, gold: str, answer: str, expected: bool) -> None:
    assert judge.judge(gold, answer).same is expected


@pytest.mark.parametrize(
    ("gold", "answer", "expected"),
    [
        ("27.0", "27", True), ("025", "25", True), ("25", "025.00", True), ("-7", "7", False), ("+2", "2", True),
        ("58,500", "58500", True), ("58500", r"58{,}500", True), (r"11,\! 111,\! 111,\! 100", "11111111100", True),
        ("0.3", "0.30001", False), ("4.5e33", r"4.5 \times 10^{33}", True), ("1e11", "10^{11}", True),
        ("1.0e-5", "0.00001", True), ("2e27", "2e26", False), ("0.0000672", "0.000067", False),
        (r"\dfrac{17}{50}", "17/50", True), (r"\frac 59", r"\tfrac59", True), (r"\frac{-3}{8}", r"-\frac{3}{8}", True),
        (r"90^\circ", "90", True), (r"\$18.90", "18.9", True), (r"\text{(C)}", "C", True), ("42_{5}", "42_5", True),
        (r"\left( 3, \frac{\pi}{2} \right)", r"(3,\frac{\pi}{2})", True), (r"11\sqrt2", r"11 \sqrt{2}.", True),
    ],
)  # fmt: skip
def test_the_fast_path_needs_no_worker(gold: str, answer: str, expected: bool) -> None:
    assert judge_locally(gold, answer) == Judgement(expected)
    with Judge() as idle:
        assert idle.judge(gold, answer).same is expected
        assert idle._isolated._pool == []


@pytest.mark.parametrize(("gold", "answer"), [("12", "1 2"), ("5", ""), ("5", "$$"), ("5", ".")])
def test_what_is_no_number_is_not_made_one(gold: str, answer: str) -> None:
    judgement = judge_locally(gold, answer)
    assert judgement is not None
    assert not judgement.same


def test_an_answer_too_long_is_not_compared() -> None:
    judgement = judge_locally("5", "5" + " " * MAX_LENGTH)
    assert judgement == Judgement(False, "the answer is longer than 1,000 characters")
    assert judge_locally("x", "x" * MAX_LENGTH) is None


@pytest.fixture
def strange(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A math-verify that hangs over 24690, is slow over 86420, runs out of memory over 108642, and accepts all else."""
    (tmp_path / "math_verify.py").write_text(
        "import time\n"
        "LatexExtractionConfig = dict\n"
        "def parse(text, *_, **__): return [text]\n"
        "def verify(golds, answers, **_):\n"
        "    print('noise')\n"
        "    begun = time.process_time()\n"
        "    while '24690' in str(answers): pass\n"
        "    while '86420' in str(answers) and time.process_time() < begun + 0.3: pass\n"
        "    return '108642' not in str(answers) or len(bytearray(3 << 30)) > 0\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.mark.usefixtures("strange")
def test_a_hung_pair_costs_its_limit_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        isolated_call, "_WALL_FACTOR", 1000
    )  # else the clock ends it first where the machine is very busy
    with Judge(workers=2, limit=LIMIT) as judge:
        hung, right = judge.judge_many([("2k+24690", "2(k+12345)"), ("2k+2", "2(k+1)")])
        assert hung == Judgement(False, "the comparison took too long", hung.seconds)
        assert LIMIT <= hung.seconds < LIMIT + 2
        assert right.same
        assert judge.judge("2k+24690", "2(k+12345)") == hung  # it is not tried again


@pytest.mark.usefixtures("strange")
def test_memory_is_limited() -> None:
    with Judge(workers=1, limit=20.0) as judge:
        judgement = judge.judge("2k+108642", "2(k+54321)")
        assert judgement == Judgement(False, "the comparison ran out of memory", judgement.seconds)


@pytest.mark.parametrize(
    "answer", [HANGS, r"((((9!)!)!)!)", r"\sum_{k=1}^{10^{12}} \frac{1}{k}", "(" * 300 + "5" + ")" * 300]
)
def test_what_would_hang_is_refused_at_once(answer: str) -> None:
    judgement = judge_locally("7", answer)
    assert judgement is not None
    assert not judgement.same


@pytest.mark.usefixtures("strange")
def test_answers_that_hang_take_no_time_from_slow_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each answer has the same time, whatever else is in its batch and wherever it stands there."""
    monkeypatch.setattr(
        isolated_call, "_WALL_FACTOR", 1000
    )  # else the clock ends them first where the machine is very busy
    hanging = [(f"{2 * n}k+24690", f"2({n}k+12345)") for n in range(2, 10)]
    slow = [(f"{2 * n}k+86420", f"2({n}k+43210)") for n in range(2, 5)]
    with Judge(workers=2, limit=1.0) as judge:
        judgements = judge.judge_many(hanging + slow)
        assert {judgement.error for judgement in judgements[:8]} == {"the comparison took too long"}
        assert all(judgement.same for judgement in judgements[8:])
        assert judge.judge_many(slow[::-1] + hanging) == judgements[:7:-1] + judgements[:8]


def test_a_union_is_about_as_long_as_the_right_one() -> None:
    """The time to compare unions grows fast: 4 s for 38 intervals. It is not begun."""
    for intervals in (8, 38):
        union = r"\cup".join(f"({2 * n},{2 * n + 1})" for n in range(intervals))
        judgement = judge_locally(r"(-\infty,2)\cup(3,\infty)", union)
        assert judgement is not None
        assert not judgement.same
    # the complement of four points is a union of five intervals
    intervals_of_complement = r"(-\infty,1)\cup(1,2)\cup(2,3)\cup(3,4)\cup(4,\infty)"
    assert judge_locally(r"\mathbb{R}\setminus\{1,2,3,4\}", intervals_of_complement) is None


def test_threads_share_a_judge(judge: Judge) -> None:
    results: dict[int, bool] = {}

    def ask(number: int) -> None:
        pairs = [(f"{number}x+{k}", f"{k}+{number}x") for k in range(2, 6)]
        results[number] = all(judgement.same for judgement in judge.judge_many(pairs))

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(2, 6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == dict.fromkeys(range(2, 6), True)


def test_many_pairs_come_back_in_order(judge: Judge) -> None:
    pairs = [(f"x+{n}", f"{n + n % 3 // 2}+x") for n in range(40)]
    assert [judgement.same for judgement in judge.judge_many(pairs)] == [n % 3 != 2 for n in range(40)]
    assert judge.judge_many([]) == []
    assert judge.judge_many(iter([pairs[0], pairs[2], pairs[0]])) == [judge.judge(*pairs[i]) for i in (0, 2, 0)]


def test_memory_of_judgements_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(math_judge, "_MAX_CACHED", 10)
    with Judge() as judge:
        for number in range(25):
            assert judge.judge("5", str(number)).same is (number == 5)
            assert len(judge._cache) <= 10


def test_math_verify_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "math_verify.py").write_text("raise ImportError('not here')")
    monkeypatch.syspath_prepend(str(tmp_path))
    found = r"needs math-verify \(ImportError: not here\); pip install math-verify"
    with Judge() as judge, pytest.raises(ImportError, match=found):
        judge.judge("x+1", "1+x")


def test_bad_numbers_are_named() -> None:
    with pytest.raises(ValueError, match="workers=0: give 1 or more"):
        Judge(workers=0)
    with pytest.raises(ValueError, match=r"limit=0\.0: give the seconds"):
        Judge(limit=0.0)
    with pytest.raises(ValueError, match="limit=nan"):
        Judge(limit=float("nan"))
    assert shared_judge(3, 2.5) is shared_judge(3, 2.5)
    assert 1 <= Judge().workers <= 8


def test_the_worker_in_this_process() -> None:
    gold, answer = worker_texts("x+1", "1+x")
    assert same_answer(gold, answer)
    with pytest.raises(ValueError, match="another answer than the right one"):
        same_answer(*worker_texts("x+y", "y-x"))
    assert compare({"gold": gold, "answer": answer}, None)
    assert compare({"gold": gold, "answer": answer}, prepare_trusted(gold))
    prepare(None)


@given(st.decimals(allow_nan=False, allow_infinity=False))
def test_numerals_are_exact(number: object) -> None:
    from decimal import Decimal, localcontext

    with localcontext() as context:
        context.prec = 1_000
        assert isinstance(number, Decimal)
        text = format(number, "E") if abs(number.adjusted()) > 400 else str(number)
        read = parse_numeral(text)
        assert read is not None
        assert read == number
        notation = format_numeral(read)
        assert Decimal(notation) == number
        assert parse_numeral(notation) == read
        assert notation == normalize(text)


@given(st.integers(-(10**30), 10**30))
def test_integers_with_and_without_separators(number: int) -> None:
    assert (
        normalize(str(number))
        == normalize(f"{number:,}")
        == normalize(f"${number}.0$")
        == normalize(f"{number:,}".replace(",", " "))
    )


@given(st.text(max_size=200))
def test_normal_forms_of_any_text(text: str) -> None:
    assert normalize(text) == normalize(text)
    parse_numeral(text)
    judgement = judge_locally("7x+3", text)
    assert judgement is None or not judgement.same


@pytest.mark.parametrize(
    "text", ["٣", "1e", "e5", ".", "-", "1,0000", "1.2.3", "10^-5x", "1 2", "", "1e9999999", "½", "５"]
)
def test_what_is_no_numeral(text: str) -> None:
    assert parse_numeral(text) is None
