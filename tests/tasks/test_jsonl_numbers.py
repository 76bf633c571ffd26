"""Which texts state the number 42, judged by the task ``jsonl``, and which say something else."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from explorl.tasks import Jsonl, Problem

WRONG = {
    "a sign before it": r"""
        −(42)  –(42)  —$42  - (42)  −\$42  -\text{42}  -\left(42\right)  -\mathbf{42}  -{42}  -[42]  minus (42)
        negative 42  minus forty-two, not 42  (42) negative  ~=42  \textminus 42
    """,
    "about so much": r"""
        ~42  ≈ 42  \approx 42  \sim 42  approx. 42  ca. 42  circa 42  roughly 42  nearly 42  almost 42  around 42
        42 or so  42 approximately  42-ish  42ish  42-odd  about forty or 42  less than 42  fewer than 42  at least 42
        at most 42  no less than 42  no more than 42  up to 42  over 42  under 42  above 42  below 42  beyond 42
        greater than 42  exceeds 42  42 give or take  42 (estimate)  42 upwards  42 exclusive
        42 or thereabouts  rounded to 42  42 (estimated)
    """,
    "denied": r"""
        not equal to 42  anything but 42  other than 42  everything except 42  it is not 42  it isn't 42
        The answer is not 42  The answer isn't 42.  The answer is never 42  The answer is anything but 42
        The wrong answer is 42  if 42  unless 42  maybe 42  between 42  near 42  close to 42  far from 42
        ruled out: 42  excluding 42  <s>42</s>  <del>42</del>  ~~not 42~~
    """,
    "another function of it": r"""
        42!  42!!  42 !  (42)!  42\!!  \boxed{42!}  !42  !(42)  42i  42j  42 i  42\,i  42\mathrm{i}  42x  42 x  42xy
        42 xy  42ab  42\pi  42π  42 pi  42e  42\sqrt{2}  42√2  \sqrt{42}  √42  \sqrt[3]{42}  42^2  42^{2}  42²  42³
        42 squared  42 cubed  42 to the fourth  42C2  42P2
        42 to the power of two  42 raised  42^x  42^{-1}  1/42  \frac{1}{42}  \frac{42}{x}
        \frac{x}{42}  \frac{42}{7}  84/2x  84/(2x)  84/2 x  42/x  42/100  42:1  42 : 7  log 42  ln 42  \log 42  \ln 42
        \sin 42  sin(42)  cos 42°  exp(42)  |42 - x|  f(42)  g(42)  f 42  \lfloor 42.9 \rfloor  \lceil 42 \rceil
    """,
    "cut off or in another base": r"""
        \overline{42}  42.\overline{3}  42\overline{3}  42.3...  42...  42…  42\ldots  42_8  42_{10}  42 base 8
        42 in base eight  42 hex  42 octal  42 (binary)  42 in octal  0x42  0b42  042x  42h7
    """,
    "a unit that is a number": r"""
        42 dozen  42 dozens  42 score  42 gross  42 k  42k  42K  42 K  42M  $42m  £42m  42 mil  42 mn  42B  42bn
        42 billion  42 million  42 thousand  42 hundred  42 hundreds  42 tens  42 lakh  42 lakhs  42 crore  42 万  42万
        42亿  42 тыс  42 halves  42 thirds  42 tenths  42 hundredths  42 thousandths
        42 doz  42 doz.  42 baker's dozen  42 great gross  42 twelves  42 twenties  42 double  42 twice  42 thrice
        42 thou  42thou  42Ki  42 mega  42 meg  42 giga  42 tera  42million  42-million  42Mn  42 bln  42 milliard
        42 quadrillion  42 quintillion  42 zillion  42 gazillion  42 googol  42 myriad  42 millones  42 millón
        42 Millionen  42 kharab  42 oku  42 Cr.  42 Cr  42십  42 twofold  42 tenfold  42 umpteen  42 mebi
    """,
    "a place in a row, or a share": r"""
        42ᵗʰ  42ⁿᵈ  42ème  42 percentile  42 percent percent  42 percent of a percent  42 per mille  42 per mil
        42 per ten  42 per myriad  42nd  42th  42st  the 42nd  42%%  42‰  42 permille  42 ppm
        42 basis points  42 bps  42 per thousand  42 per hundred
    """,
    "a calculation": r"""
        42 and a half  42 and one half  42 and a bit  42 and change  42 and counting  42½  42 1/2  42 + 1  42 - 1
        42 + x  42-x  42 minus one  42 plus two  42 times two  42 * 2  42 \times 2  42 \cdot x  42 mod 5  42 choose 2
        \binom{42}{2}  2 \cdot 42  2(42)  (42)(2)  (2)42  42(x)  42(x+1)  (42)^2  (42)^{x}
    """,
    "several numbers": r"""
        (42, 0)  (0, 42)  [42, 50]  {42, 43}  42, 43  42 or 43  42 and 43  42; 43  41 to 42  41-42  42-43  42–43
        x = 41 or x = 42  x = 41, or x = 42  x = 41; x = 42  x=41,x=42  x = 41, y = 42  a = 41 and b = 42  41. Or 42
    """,
    "a relation": r"""
        42 ± 1  \pm 42  ±42  42 \pm 1  ≠ 42  \ne 42  x ≠ 42  x \neq 42  x != 42  > 42  < 42  x > 42  x < 42  x \leq 42
        x ≥ 42
    """,
    "an equation to be solved": r"""
        2x = 42  -x = 42  x/2 = 42  x^2 = 42  x + 1 = 42  \sqrt{x} = 42  1/x = 42  |x| = 42  xy = 42  not x = 42
        log x = 42  half of x = 42  x = -42  x = −42  x = –42  x = 42i  x = 42 or x = 7  x = 41, x = 42
    """,
    "a function in words": r"""
        twice 42  half of 42  double 42  triple 42  a third of 42  the square of 42  the square root of 42
        the opposite of 42  the inverse of 42  the reciprocal of 42  the negative of 42  minus 42  one less than 42
        one more than 42  the double of the answer is 42
    """,
    "taken back": r"""
        42 is wrong  42 is not the answer  42 isn't right  42? No  42, not  42 is incorrect  42 below zero
        42 degrees below zero  42 BC  42 under par
    """,
    "other digits": r"""
        4 2  4.2  420  4,2  42,0  4200  0.42  .42  42.1  42.001  42e1  42e-1  4.2e2  42.42
    """,
    "broken off": r"""
        +-42  --42  -+42  42-  42 -  42+  42 +  42*2  42/  42^  42\
    """,
    "in words": r"""
        forty 42  x42  A42  No. 42  number not 42  42 \text{ dozen}  42\text{k}  42 \text{ million}  42 \text{ or more}
        42 or more  42 or less  42 maximum  42 max  42 at least  42 at most  42 divided by seven
        42 multiplied by itself  42 quadrupled  42 trebled  42 inverse  42 opposite  42 incremented  42 decremented
        42 increased by one  42 decreased by two  42 reduced by ten  42 less one  42 less than one
        42 doubled  42 factorial  42 reciprocal  42 × 10^3  42 \times 10^{3}  42·10
        42 \% of 50  42 of 50  42 out of 50  \neg 42  ¬42  ~(42)
    """,
    "other characters": r"""
        ٤٢  ⁴²  ₄₂  42₈  ⁻42  ﹣42  －42  ‐42  ‑42  ‒42  ―42
    """,
}

RIGHT = r"""
    42  42.  $42  **42**  42 apples  42.0  \boxed{42}  The answer is 42.  The answer is $42$.  = 42  x = 42  $x = 42$
    42 cm^2  42\text{ cm}^{2}  42 cm²  42 m/s  42 km/h  42 miles per hour  \$42.00  42 dollars  $42.00  42€  € 42  £42
    42 percent  42%  42\%  42 degrees  42°  42^\circ  42^{\circ}C  (42)  {42}  \{42\}  [42]  +42  42.000  0042
    \frac{84}{2}  84/2  4.2e1  `42`  "42"  '42'  “42”  42 (apples)  42 apples and oranges  So the answer is 42
    Therefore, 42  Answer: 42  **Answer:** 42  **Answer: 42**  Final answer: 42  Answer = 42  Total: $42  Total = $42
    She has 42 apples left.  It is 42  It's 42  There are 42 apples in total.  the 42 apples  40 + 2 = 42  40+2=42
    6 × 7 = 42  6 x 7 = 42  $6 \times 7 = 42$  x = 84/2 = 42  f(3) = 42  P = 42  n=42  42 more apples  42 years old
    42-year-old  42-mile  42 times  42 a day  42 per day  42/day  42 per hour  42 kg  42kg  42 g  42 m  42 s  42 hours
    42 ft  42 in  42 inches  42 people  42 square meters  42 sq ft  42 cubic feet  42 m^3  42 m³  42 m/s^2
    42 \text{ apples}  42\ \text{apples}  42~\text{cm}  42\,\mathrm{cm}  \text{42}  \mathbf{42}  \textbf{42}
    $\boxed{42}$  $$42$$  \(42\)  \[42\]  \( x = 42 \)  42 USD  USD 42  US$42  Rs. 42  42 rupees  42 cents  42¢
    a total of 42  a total of $42  The total cost is $42  exactly 42  only 42  42 in total  42 total  42 altogether
    42 left  42,  42;  42?  #### 42  42**  **42  \text{The answer is } 42  \text{Answer: } 42
    The final answer is $\boxed{42}$. I hope it is correct.  42 of the apples  42% of the students
    42 percent of the students  Janet makes $42 every day at the farmers' market.  Therefore, Janet has 42 eggs left.
    the answer is: 42  答案：42  Die Antwort ist 42.  La respuesta es 42  x \in \{42\}  x → 42  \left(42\right)  42\!
    \displaystyle 42  42 \quad  42 units  42 N·m  42 kWh  42 mph  42 L  42 mL  42 pairs  42 pairs of shoes
    42 quarters  \angle A = 42^\circ  AB = 42  \overline{AB} = 42  x_1 = 42  a_{1} = 42  the area = 42 cm^2
    42 students passed  Weng earned $42.  He needs 42 more dollars  42 apples!  (B) 42  B) 42  <answer>42</answer>
    42 is the answer  42 is the correct answer  We get 42  We have 42  the sum is 42  The remainder is 42.
    \theta = 42^\circ  42 pm  42 stars (total)  * 42  • 42  42 \text{ dollars}  42 (dollars)  42, which is the answer
    2x = 84 \Rightarrow x = 42  The value of x is 42.  So x is 42  2x = 84 → x = 42  42, so Ann has the most
    Natalia sold 40+2 = 42 clips altogether in April and May.  It takes 84/2 = 42 bolts of white fiber
    He needs $50 - $8 = $42 more to buy it.  6 packs x 7 pens/pack = 42 pens  Dividing both sides by 2, we get x = 42
    3 m * 14 m = 42 m^2  42, which is even  42, isn't it?  42 less apples  42 reams of paper  42 double rooms
    42 decimal places  42 binary digits  42 twin beds  42 estimates  42 opposite pairs  42 exclusive offers
    42 minutes per mile  42 left over  42 cookies left over  42 miles per gallon  42 estimated days  42 over par
    42 megabytes  42 kilos  42 percent of a pie  42 Celsius  42 PCs  42 cm2  42 PM  42 millimeters
    42 rounds  42 overs  42 mills  42 crew members  42 Arab countries  42 folders  42 scaffolds  42 hexagons
"""


def items(block: str) -> list[str]:
    """Return the texts of a block, which are two spaces apart."""
    return re.split(r"\s{2,}", block.strip())


def task_of(folder: Path, answer: Any, question: str = "How many?", **options: Any) -> tuple[Jsonl, Problem]:
    file = folder / "rows.jsonl"
    file.write_text(json.dumps({"prompt": question, "answer": answer}) + "\n", encoding="utf-8")
    task = Jsonl(path=file, holdout=0, **{"verifier": "number", "style": "tags", **options})
    return task, task.problems("train")[0]


def is_right(folder: Path, answer: Any, stated: str, question: str = "How many?", **options: Any) -> bool:
    task, problem = task_of(folder, answer, question, **options)
    return task.verify(f"<answer>{stated}</answer>", problem).correct


def test_the_corpora_are_large_enough() -> None:
    assert sum(len(items(block)) for block in WRONG.values()) >= 430
    assert len(items(RIGHT)) >= 220


@pytest.mark.parametrize("kind", WRONG)
def test_other_statements_than_42(tmp_path: Path, kind: str) -> None:
    task, problem = task_of(tmp_path, 42)
    accepted = [text for text in items(WRONG[kind]) if task.verify(f"<answer>{text}</answer>", problem).correct]
    assert accepted == []


def test_statements_of_42(tmp_path: Path) -> None:
    task, problem = task_of(tmp_path, 42)
    refused = [text for text in items(RIGHT) if not task.verify(f"<answer>{text}</answer>", problem).correct]
    assert refused == []


@pytest.mark.parametrize(
    ("right", "stated", "correct"),
    [
        ("42 km", "42", True),
        ("42 km", "42 kilometers", True),
        ("42 km", "42 m", False),
        ("42 km", "42 miles", False),
        ("$42", "42 dollars", True),
        ("$42", "42 USD", True),
        ("$42", "42 in total", True),
        ("$42", "42 cents", False),
        ("$42", "€42", False),
        ("$42", "42%", False),
        ("42 hours", "42 h", True),
        ("42 hours", "42 minutes", False),
        ("42 mph", "42 miles per hour", True),
        ("42 ft^2", "42 square feet", True),
        ("42 apples", "42 pieces of fruit", True),
        ("42 dozen", "42 dozen eggs", True),
        ("42 dozen", "42", True),
        ("42 dozen", "42 thousandths", False),
        ("5 million", "5,000,000", True),
        ("5 million", "5", False),
        ("5 million", "5million", True),
        ("5 million", "$5-million", True),
        ("5 hundred thousand", "500,000", True),
        ("3.14", r"\approx 3.14", True),
        ("3.14", "about 3.14", True),
        ("3.14", "3.14...", True),
        ("3.14", "not 3.14", False),
        ("about 42", "about 42", True),
        ("-42", "-(42)", True),
        ("-42", "–42", True),
        ("-42", "- 42", True),
        ("-42", "minus $42", True),
        ("-42", "x = -42", True),
        ("-42", "42", False),
        ("-42", "-(-42)", False),
        (["41", "42"], "42", True),
    ],
)
def test_units_signs_and_rounding(tmp_path: Path, right: Any, stated: str, correct: bool) -> None:
    assert is_right(tmp_path, right, stated) is correct


def test_a_tolerance_takes_rounded_numbers(tmp_path: Path) -> None:
    assert is_right(tmp_path, 42, "about 41", tolerance=2)
    assert not is_right(tmp_path, 42, "more than 41", tolerance=2)
    assert not is_right(tmp_path, 42, "about 42")


def test_a_unit_that_is_asked_for(tmp_path: Path) -> None:
    assert is_right(tmp_path, 5, "5 dozen eggs", "How many dozens of eggs does she need?")
    assert is_right(tmp_path, 5, "5 dozen", "How many dozen eggs does she need?")
    assert not is_right(tmp_path, 5, "5 dozen", "A dozen eggs cost $3. How many eggs does she need?")


def test_answers_in_other_units_are_other_answers(tmp_path: Path) -> None:
    task, problem = task_of(tmp_path, 5)
    answers = [task.verify(f"<answer>{text}</answer>", problem).answer for text in ("5", "5.0 apples", "5 dozen")]
    assert answers == ["5", "5", "5 dozen"]


@pytest.mark.parametrize(
    ("completion", "correct"),
    [
        ("So she has 42 apples.", True),
        ("So there are about 42.", True),
        ("That makes 42!", True),
        ("It costs $42, no more.", True),
        ("10 + 32 = **42** apples", True),
        ("She drinks 42 liters of H2O", True),
        ("The area is 42 cm^2.", True),
        ("The answer is 42, and that is the 2nd part.", False),
        ("She has 10 - 42", True),
        ("It is = - 42", False),
        ("It is -42", False),
        ("It is -(42)", False),
        ("It is –42", False),
        ("It is √42", False),
        ("It is 10-42", False),
        ("It is 1:42", False),
        ("It is 7/42", False),
        ("It is log 42", False),
        ("It is f(42)", False),
        ("It is x^42", False),
        ("It is 42²", False),
        ("It is 42k", False),
        ("It is the 42nd", False),
        ("It is 42 dozen", False),
        ("It is 42 squared", False),
        ("It is 42%%", False),
        ("It is 41, or 4,2", False),
        ("It is 42 1_000", False),
        ("It is -((42))", False),
        ("It is ⁻42", False),
        ("It is \\textminus 42", False),
        ("It is sqrt(42)", False),
        ("It is sin 42", False),
        ("It is log_2 42", False),
        ("It is log2(42)", False),
        ("It is f'(42)", False),
        ("It is f_1(42)", False),
        ("It is φ(42)", False),
        ("It is \\phi(42)", False),
        ("It is f(x) = (42)", True),
        ("It is (42)", True),
        ("It is $\\boxed{42}$.", True),
        ("It is \\left(42\\right)", True),
        ("It costs 42", True),
        ("These are apples (42)", True),
        ("It is 42 Lakh", False),
        ("It is 42 M", False),
        ("It is 42 k", False),
        ("It is 42 quadrillion", False),
        ("It is 42 per mille", False),
        ("It is 42% %", False),
        ("It is 42^{nd}", False),
        ("It is 42 to the fourth", False),
        ("It is 42C2", False),
        ("It is 42 m", True),
    ],
)
def test_the_last_number_of_prose(tmp_path: Path, completion: str, correct: bool) -> None:
    task, problem = task_of(tmp_path, 42, style="last_number")
    assert task.verify(completion, problem).correct is correct
