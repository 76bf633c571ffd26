r"""Check that an answer has a form that an answer to its problem can have, before anything evaluates it.

In training, the policy learns to write whatever the judge accepts. So an answer counts only if it is written in the
small language that `latex` parses, and is as finished as the right answer:

* **Numbers** are compared by their exact value: ``14/3``, ``\frac{14}{3}``, ``4\frac{2}{3}`` and ``4 2/3``; ``0.25``
  and ``\frac{1}{4}``; ``4.5e33`` and ``45 \times 10^{32}``; ``0.\overline{3}`` and ``1/3``. A rounded number differs
  from the exact one.
* **Operations** must be of kinds that the right answer has too. Digits, a sign, a decimal point and powers of ten are
  always allowed. A fraction is allowed if the right answer has one, or decimals; if it is whole, ``14/2`` is an
  unfinished division. Roots (simplified or not), π, e, i, functions, factorials, powers of numbers (``2^{10}``), sums
  of constants (``1+\sqrt{3}``, with no more terms than the right answer) and divisions by symbols are allowed if the
  right answer has them, and so are sums, products and quotients of plain numbers (``123 \times 456``). Adding,
  multiplying and raising symbols is always allowed: ``2(k+1)`` for ``2k+2``. ``\int``, ``\lim`` and the like cannot be
  parsed at all, and ``\sum`` only with a range of its index.
* **Symbols** must be those of the right answer. Capitals differ from small letters if either side has both.
* **=** may follow a name: a symbol, f(x), the corners of a figure, a word. ``x = 5`` is 5; ``7 = 5`` is refused.
  ``\in`` may follow one, before a set, and ``x \ge 1`` is ``[1,\infty)``. Other relations are compared with relations,
  side by side (`sympy_worker`); if the right answer is ``x = 5`` or ``x < 5``, a relation that is not solved is
  refused. Words before an = that deny the value after it, such as "anything but", are not a name.
  Values of several names may be a tuple, ``x=3, y=-5`` for ``(3,-5)``, or a list, ``x_1=1, x_2=-2`` for ``1,-2``.
* **Bounds** are sets: ``x>3`` and ``x\le 8`` are ``(3,8]``, ``x<2`` or ``x>5`` is a union, and so is ``x\ne 1``.
* **Brackets** matter: ``(1,2)``, ``[1,2)`` and ``\{1,2\}`` differ. A bare list is a set, in any order. Both must have
  the same number of elements; ± counts as two. ``(8,-2)`` is a point and not an empty interval.
* **Ratios**: ``2:3`` is a quotient, ``1:2:3`` equals what is proportional to it, in this order. ``6:00`` and ``4:30``
  are times, because a ratio would have been reduced. In ``\{x : x > 3\}`` the colon means "such that", as in x > 3.
* **Bases** are part of a number: ``4210_5`` is ``4210_5`` or, as the problem may ask for the base, ``4210``, but not
  ``4210_{10}``.
* **Letters** of options may come before the value: ``\textbf{(A)}\ 27``. If the right answer is a letter, it decides.
* **Units** must agree if both have one; if only the answer has one, it must look like a unit: ``5 \text{ cm}``, but not
  ``5 \text{ million}`` or ``5 \text{ halved}``.
* **Percent**: ``p\%`` is p if the right answer is the number p, and p/100 if the right answer is not whole, or at
  most 1.
* **Words** are compared as words (`words`): ``\text{east}`` is not ``eats``, but ``xy`` is ``yx``. So are names with
  digits, Roman numerals and three capitals: ``CO2`` is ``\mathrm{CO}_2`` and not ``C2O``, ``XL`` is not ``LX``. "And"
  between words, conditions or values of several names is not "or".

If the right answer itself cannot be parsed, only the same text is accepted, except for layout.
"""

from __future__ import annotations

import functools
import json
import math
import re
import string
from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from explorl.tasks.json_lines import read_records, short_repr
from explorl.tasks.math.answer_text import MAX_LENGTH, Unreadable, normalize, rewrite
from explorl.tasks.math.latex import Node, drop_base_ten, parse, serialize
from explorl.tasks.math.value import Operations, Undefined, exact_value, find_operations, rational_value
from explorl.tasks.math.vocabulary import NUMBERS, PHRASES
from explorl.tasks.math.words import (
    conjunctions,
    is_text,
    is_unit,
    names_a_value,
    normalize_words,
    plain_name,
    same_unit,
)

ADVERSARIAL = Path(__file__).parents[1] / "adversarial" / "math.jsonl"
"""Wrong answers that were made to look right; all are refused."""


class AdversarialCase(NamedTuple):
    """A right answer, a wrong one, the reason why it is wrong, and the prompt if it matters."""

    gold: str
    answer: str
    why: str
    prompt: str = ""


def read_adversarial(path: str | Path | None = None) -> list[AdversarialCase]:
    """Return the cases of a file of adversarial answers; None: the corpus that comes with Explorl."""
    example = r'{"gold": "5", "answer": "7 = 5", "why": "an equation that does not hold"}'
    cases = []
    for record, location in read_records(ADVERSARIAL if path is None else Path(path), example):
        fields = [record.get(name, AdversarialCase._field_defaults.get(name)) for name in AdversarialCase._fields]
        if not all(isinstance(text, str) for text in fields):
            raise ValueError(
                f"{location}: fields {short_repr(record)}; give gold, answer and why as text, like {example}"
            )
        cases.append(AdversarialCase(*(str(text) for text in fields)))
    return cases


def refusal_reason(gold: str, answer: str) -> str | None:
    """Return why the answer is refused; None if it may be compared with the right one."""
    result = _compared(gold, answer)
    return result if isinstance(result, str) else None


def worker_texts(gold: str, answer: str) -> tuple[str, str]:
    """Return both answers as texts for `sympy_worker`; equal texts are equal answers. Raise for a refused answer."""
    result = _compared(gold, answer)
    if isinstance(result, str):
        raise ValueError(result)
    return result


class _Refused(ValueError):
    pass


DIFFERENT = "another answer than the right one"
_OPTION = re.compile(
    r" *\(?(?:\\(?:text(?:bf|rm|it)?|math(?:rm|bf)|mbox) *\{ *)?\(?(?P<letter>[A-J])[).:] *\}?"
    r"(?:\\[ ,;:]|~|\\q?quad(?![A-Za-z])|[ $])*(?P<value>-? *(?:[0-9.]|\\\$|\\[dt]?frac|\\sqrt|\\text).*)"
)
"""The letter of an option, and its value."""
_LETTER = re.compile(r"(?:\\(?:text(?:bf|rm|it)?|math(?:rm|bf)|mbox) *\{ *)?\(?([A-J])\)?[ .}]*")
_ANOTHER_OPTION = re.compile(r"\(\s*[A-J]\s*\)|\b(?:and|or|not)\b")


def option_letter(gold: str) -> str | None:
    """Return the letter of a right answer like (A); None for any other."""
    match = _LETTER.fullmatch(gold.strip(" $."))
    return match[1] if match else None


def count_elements(gold: str) -> int:
    """Return how many elements the list or set of a right answer has; 1 for any other answer."""
    try:
        return len(elements(parse(gold)))
    except Unreadable:
        return 1


_BOLD = re.compile(r"\\(?:mathbf|boldsymbol|bm) *(?:\{ *(\\?[A-Za-z]+) *\}|(\\[A-Za-z]+|[A-Za-z](?![A-Za-z])))")
_ARROW = re.compile(_BOLD.pattern.replace("(?:mathbf|boldsymbol|bm)", "vec"))


def _with_vectors_of(gold: str, answer: str) -> str:
    """Return the answer with bold letters for arrows, or the reverse, if the right answer has only the others."""
    is_bold, has_arrow = _BOLD.search(gold), _ARROW.search(gold)
    if is_bold and not has_arrow:
        return _ARROW.sub(r"\\mathbf{\1\2}", answer)
    return _BOLD.sub(r"\\vec{\1\2}", answer) if has_arrow and not is_bold else answer


def _spelled(text: str) -> str:
    """Return the LaTeX of words like "no solution" and "twelve"; any other text unchanged."""
    words = normalize_words(text)
    return text if words is None else PHRASES.get(words) or NUMBERS.get(words) or text


@lru_cache(maxsize=8_192)
def _compared(gold: str, answer: str) -> str | tuple[str, str]:
    """Return why the answer is refused, or both answers as texts for the worker."""
    try:
        latex = rewrite(answer)
        if len(latex) > 2 * MAX_LENGTH:
            raise Unreadable("it is too long")
        if (option := _OPTION.fullmatch(latex)) is not None:
            if (letter := option_letter(gold)) is not None:
                is_only = _ANOTHER_OPTION.search(option["value"]) is None
                return (letter, letter) if option["letter"] == letter and is_only else DIFFERENT
            latex = option["value"]
        gold, latex = _spelled(gold), _with_vectors_of(gold, _spelled(latex))
        gold_name, gold_words = plain_name(gold), normalize_words(gold)
        if gold_name is not None and gold_name == plain_name(latex):
            return gold_name, gold_name
        if gold_words is not None and is_text(gold):
            joined = conjunctions(gold) or ({"and"} if "," in gold_words else set())
            is_other = joined and conjunctions(latex) and joined != conjunctions(latex)
            return DIFFERENT if is_other or normalize_words(latex) != gold_words else (gold_words, gold_words)
        try:
            gold_tree = parse(gold)
        except Unreadable:
            return (None if gold_name is not None else _compare_unparsed(gold, latex)) or DIFFERENT
        if _has_kind(gold_tree, "based") and "." in latex.strip(" .$"):
            return DIFFERENT
        answer_tree = parse(latex, units=not find_operations(gold_tree).symbols)
        return _compare_trees(gold_tree, answer_tree) or DIFFERENT
    except (Unreadable, Undefined, _Refused) as error:
        return f"the answer is not accepted: {error}"


def _compare_trees(gold: Node, answer: Node) -> tuple[str, str] | None:
    """Return both answers as texts for the worker; None if they are different numbers."""
    _check_conjunctions(gold, answer)
    gold, answer = _without_remarks(gold, answer), _without_remarks(answer, gold)
    if not _has_kind(drop_base_ten(gold), "based"):  # base ten matters only if the right answer has another base
        gold, answer = drop_base_ten(gold), drop_base_ten(answer)
    gold, answer = _without_names(gold, answer)
    golds, answers = elements(gold), elements(answer)
    if len(golds) != len(answers):
        expected = "1 answer is" if len(golds) == 1 else f"{len(golds)} answers are"
        raise _Refused(f"it states {len(answers)} where {expected} expected")
    if {item.kind for item in golds} == {"based"} and any(item.kind == "unit" for item in answers):
        raise _Refused("words after a number in another base than ten")
    golds, answers = _without_units(golds, answers)
    golds, answers = tuple(map(_multiplied_out, golds)), tuple(map(_multiplied_out, answers))
    if any(item.kind == "based" for item in (*golds, *answers)):
        return _compare_bases(golds, answers)
    if any(item.kind == "time" for item in golds):
        return _compare_times(golds, answers)
    _check_shapes(golds, answers)
    _check_operations(find_operations(*golds), find_operations(*answers))
    gold, answer = (items[0] if len(items) == 1 else Node("bracket", "{}", items) for items in (golds, answers))
    gold_value, answer_value = exact_value(gold), exact_value(answer)
    if gold_value is not None and answer_value is not None:
        return (_to_json(gold, {}), _to_json(gold, {})) if gold_value == answer_value else None
    if {gold.kind, answer.kind} & {"sets", "set"}:
        gold, answer = _as_set(gold), _as_set(answer)
    names = _names(find_operations(gold).symbols, find_operations(answer).symbols)
    return _to_json(gold, names), _to_json(answer, names)


def _without_remarks(node: Node, other: Node) -> Node:
    """Return an answer without the rounded value after it, or the set of numbers that its letter stands for."""
    *parts, last = node.parts or (node,)
    if node.kind == "relation" and node.text.endswith("≈") and last.kind == "number" and not _is_symbol(parts[-1]):
        value = rational_value(parts[-1])
        if value is None or abs(value - Fraction(last.text)) <= _ROUNDING * abs(value):
            signs = node.text.split(" ")[:-1]
            return Node("relation", " ".join(signs), tuple(parts)) if signs else parts[0]
    is_condition = last.kind == "relation" and last.text == "∈" and last.parts[1] in (_EVERYTHING, Node("set", "Z"))
    if node.kind == "list" and len(parts) == 1 and is_condition and other.kind != "list" and not _is_bound(parts[0]):
        return parts[0] if last.parts[0].text in find_operations(*parts).symbols else node
    return node


_ROUNDING = Fraction(1, 20)


def _is_bound(node: Node) -> bool:
    return node.kind == "relation" and node.text != "="


def _multiplied_out(node: Node) -> Node:
    """Return a matrix whose entries are multiplied by the number before or below it; any other node unchanged."""
    matrices = [part for part in node.parts if part.kind == "matrix"]
    if len(matrices) != 1:
        return node
    others = [part for part in node.parts if part.kind != "matrix"]
    values = [rational_value(part) for part in others if not find_operations(part).names - {"a fraction"}]
    factors = [value for value in values if value is not None]
    if len(factors) < len(others):
        return node
    (matrix,), scale = matrices, math.prod(factors, start=Fraction(1))
    if node.kind == "quotient" and node.parts[0] is matrix and scale:
        scale = 1 / scale
    elif node.kind == "minus":
        scale = Fraction(-1)
    elif node.kind != "product":
        return node
    rows = (row._replace(parts=tuple(_times(scale, part) for part in row.parts)) for row in matrix.parts)
    return matrix._replace(parts=tuple(rows))


def _times(scale: Fraction, node: Node) -> Node:
    value = rational_value(node)
    factor = _rational(scale if value is None else scale * value)
    return factor if value is not None else Node("product", parts=(factor, node))


def _rational(value: Fraction) -> Node:
    digits = Node("number", str(abs(value.numerator)))
    if value.denominator > 1:
        digits = Node("quotient", parts=(digits, Node("number", str(value.denominator))))
    return Node("minus", parts=(digits,)) if value < 0 else digits


def _has_kind(node: Node, kind: str) -> bool:
    return node.kind == kind or any(_has_kind(part, kind) for part in node.parts)


def _check_conjunctions(gold: Node, answer: Node) -> None:
    """Raise if one has "and" and the other "or" between labels, conditions or values of several names.

    Between numbers, and between values of one name, both words mean the same list.
    """
    if gold.kind != "list" or answer.kind != "list":
        return
    names = [_name(item) for item in gold.parts]
    are_several = None not in names and len(set(names)) == len(names)
    are_conditions = any(item.kind == "relation" for item in gold.parts) and None in names
    if are_several or are_conditions or all(map(_is_label, gold.parts)):
        word = gold.text or ("and" if are_several else "")
        if {word, answer.text} == {"and", "or"}:
            raise _Refused(f"{answer.text!r} where the right answer has {word!r}")


def _is_label(node: Node) -> bool:
    """Return whether a node is words or capitals, like the name of a statement."""
    symbols = node.parts if node.kind == "product" else (node,)
    return all(part.kind == "text" or (part.kind == "symbol" and part.text[0].isupper()) for part in symbols)


# Names before an =


def _without_names(gold: Node, answer: Node) -> tuple[Node, Node]:
    """Return both without the names before their values, except for relations that are compared as relations."""
    _check_solved(_items(gold), _items(answer))
    if (regions := _regions(gold, answer)) is not None:
        return regions
    answer = _coordinates(answer, gold)
    gold = _coordinates(gold, answer) if answer.kind == "bracket" else gold
    if gold.kind == "list" or answer.kind == "list":
        return _lists_without_names(_items(gold), _items(answer))
    gold_name, answer_name = _name(gold), _name(answer)
    if gold.kind == answer.kind == "relation":
        if gold_name is not None and (gold_name == answer_name or _is_free(answer_name) or _is_free(gold_name)):
            _check_name(answer_name, (gold.parts[1],))
            return gold.parts[1], answer.parts[1]
        if (
            gold_name is not None
            and not find_operations(gold.parts[1]).symbols
            and _name(_reversed(answer)) != gold_name
        ):
            raise _Refused("an equation that is not solved")
        return orient(gold), orient(answer)
    if gold.kind == "relation":
        return (orient(gold) if gold_name is None else gold.parts[1]), answer
    if answer.kind == "relation":
        if answer_name is None and not _is_sum_of_names(answer):
            raise _Refused("a relation that is not a name and its value")
        _check_name(answer_name, (gold,))
        return gold, answer.parts[1]
    return gold, answer


def _check_solved(golds: tuple[Node, ...], answers: tuple[Node, ...]) -> None:
    """Raise if the right answer bounds a symbol by constants and the answer has a relation that is not solved."""
    if all(map(_is_solved, golds)):
        for relation in answers:
            if relation.kind == "relation" and _name(relation) is None and not _is_solved(relation):
                kind = "an equation" if relation.text == "=" else "a relation"
                raise _Refused(f"{kind} that is not solved")


def _is_solved(node: Node) -> bool:
    if node.kind != "relation":
        return False
    symbols = [part for part in node.parts if part.kind == "symbol"]
    return len(symbols) == 1 and not find_operations(*(part for part in node.parts if part.kind != "symbol")).symbols


def _lists_without_names(golds: tuple[Node, ...], answers: tuple[Node, ...]) -> tuple[Node, Node]:
    gold_names, answer_names = ([_name(item) for item in items] for items in (golds, answers))
    if len(golds) > 1 and None not in gold_names and len(set(gold_names)) == len(gold_names):
        if set(gold_names) != set(answer_names) or len(gold_names) != len(answer_names):
            raise _Refused("values of other names")
        return _by_name(golds), _by_name(answers)
    golds = _values(golds, gold_names) or golds
    values = _values(answers, answer_names)
    if values is None:
        if not any(item.kind == "relation" for item in golds):
            raise _Refused("relations that are not a name and its values")
        return _listed(golds), _listed(answers)
    for name in answer_names:
        _check_name(name, golds)
    return _listed(golds), _listed(values)


def named_value(node: Node) -> Node:
    """Return the value that a relation gives a name to, on either side; return any other node unchanged."""
    if _name(node) is not None:
        return node.parts[1]
    return node.parts[0] if _name(_reversed(node)) is not None else node


def _items(node: Node) -> tuple[Node, ...]:
    return node.parts if node.kind == "list" else (node,)


def _listed(items: tuple[Node, ...]) -> Node:
    return items[0] if len(items) == 1 else Node("list", parts=items)


def _name(node: Node) -> str | None:
    """Return the name that a relation gives to its other side; None if it gives none."""
    if node.kind != "relation" or node.text not in ("=", "≈", "∈") or not _is_name(node.parts[0]):
        return None
    return None if node.text == "∈" and not _is_set(node.parts[1]) else serialize(node.parts[0])


def _is_name(node: Node) -> bool:
    """Return whether a node is a symbol, f(x), words, or the corners of a figure: AB, ∠ABC."""
    if node.kind == "text":
        return names_a_value(node.text)
    if node.kind == "symbol":
        return True
    if node.kind == "product":
        return all(part.kind == "symbol" and part.text in _CORNERS for part in node.parts)
    if node.kind == "bracket" and node.text == "()":
        return all(map(_is_symbol, node.parts))
    return node.kind == "call" and node.text == "abs" and _is_name(node.parts[0])


_CORNERS = frozenset({*string.ascii_uppercase, "m", "\\angle", "\\triangle"})


def _is_sum_of_names(node: Node) -> bool:
    """Return whether a relation is like m + n = 5."""
    names = node.parts[0].parts
    is_sum = node.text == "=" and node.parts[0].kind == "sum"
    return is_sum and all(map(_is_symbol, names)) and len(set(names)) == len(names)


def _is_free(name: str | None) -> bool:
    """Return whether a name is f(x) or a word; the right answer may have another one."""
    return name is not None and (name.startswith("text[") or (name.endswith(")") and "[" not in name))


def _check_name(name: str | None, golds: tuple[Node, ...]) -> None:
    if name in find_operations(*golds).symbols:
        raise _Refused("a name that is part of the right answer")


def _values(items: tuple[Node, ...], names: list[str | None]) -> tuple[Node, ...] | None:
    """Return the values of one name, which comes before each or before the first; None if the list has another form."""
    distinct = {name for name in names if name is not None}
    if len(distinct) == len(items) > 1:  # x_1 = 2, x_2 = 3
        distinct = {_INDEX.sub("", name) for name in distinct if _INDEX.search(name)} or distinct
    unnamed = [item for item, name in zip(items, names, strict=True) if name is None]
    if any(item.kind == "relation" for item in unnamed) or len(distinct) > 1:
        return None
    if distinct and unnamed and (names[0] is None or len(unnamed) < len(items) - 1):
        return None
    return tuple(item if name is None else item.parts[1] for item, name in zip(items, names, strict=True))


_INDEX = re.compile(r"_\{[0-9]\}\Z")


def _by_name(items: tuple[Node, ...]) -> Node:
    """Return the values of several names, sorted by name."""
    return Node(
        "named", parts=tuple(item.parts[1] for item in sorted(items, key=lambda item: serialize(item.parts[0])))
    )


def _reversed(node: Node) -> Node:
    return node._replace(parts=node.parts[::-1])


def orient(node: Node) -> Node:
    """Return a relation written from the smaller to the larger side."""
    signs = node.text.split(" ")
    if not all(sign in _FLIPPED for sign in signs):
        return node
    return Node("relation", " ".join(_FLIPPED[sign] for sign in reversed(signs)), node.parts[::-1])


_FLIPPED = {">": "<", "≥": "≤"}


def _regions(gold: Node, answer: Node) -> tuple[Node, Node] | None:
    """Return the sets of numbers that both describe: intervals, and bounds of one symbol; else None."""
    if not (_is_surely_set(gold) or _has_kind(gold, "relation")):
        return None
    regions, symbols = [], []
    for node in (gold, answer):
        symbol = {part for item in _items(node) for part in item.parts if item.kind == "relation" if _is_symbol(part)}
        region = node if node.kind == "set" or _is_set(node) else _region(node)
        if region is None or region.text == "{}" or len(symbol) > 1:
            return None
        regions.append(region)
        symbols.append({lower_initial(part.text) for part in symbol})
    if symbols[0] and symbols[1] and symbols[0] != symbols[1]:
        return None
    return regions[0], regions[1]


_EVERYTHING = Node("set", "R")


def _region(node: Node) -> Node | None:
    """Return the set of the solutions of 1 < x ≤ 3, x ≠ 2, or of x < 1 or x > 3; None for anything else."""
    if _is_interval(node) or node.kind in ("sets", "set"):
        return node
    if node.kind == "list":
        regions = [_region(part) for part in node.parts]
        parts = [region for region in regions if region is not None and region != _EVERYTHING]
        if None in regions or not parts or all(part.text == "=" for part in node.parts):
            return None
        if node.text == "and" or _EVERYTHING in regions or (not node.text and _overlap(parts)):
            return functools.reduce(_both, parts)
        return functools.reduce(lambda left, right: Node("sets", "∪", (left, right)), parts)
    if node.kind != "relation" or find_operations(*(part for part in node.parts if not _is_symbol(part))).symbols:
        return None
    relation = orient(node)
    signs, (left, right, *_) = relation.text.split(" "), relation.parts
    if signs in (["="], ["≠"]) and _is_symbol(left):
        point = Node("bracket", "{}", (right,))
        return point if signs == ["="] else Node("sets", "∖", (_EVERYTHING, point))
    if signs == ["∈"] and _is_symbol(left):
        return right if _is_set(right) else None
    count, inner = len(relation.parts), [index for index, part in enumerate(relation.parts) if _is_symbol(part)]
    if set(signs) - {"<", "≤"} or count > 3 or len(inner) != 1 or (count == 3 and inner != [1]):
        return None
    low, high = relation.parts[: inner[0]], relation.parts[inner[0] + 1 :]
    signs = [*([] if low else ["<"]), *signs, *([] if high else ["<"])]
    ends = (*(low or (_BELOW,)), *(high or (_ABOVE,)))
    return Node("bracket", "([)]"[signs[0] == "≤"] + "([)]"[2 + (signs[1] == "≤")], ends)


_ABOVE = Node("constant", "∞")
_BELOW = Node("minus", parts=(_ABOVE,))


def _overlap(regions: Sequence[Node]) -> bool:
    """Return whether two bounds hold for all numbers if they mean "or": x > 3, x < 8 must mean "and"."""
    low = [rational_value(region.parts[0]) for region in regions if region.parts[1:] == (_ABOVE,)]
    high = [rational_value(region.parts[1]) for region in regions if region.parts[:1] == (_BELOW,)]
    return len(low) == len(high) == 1 and None not in (*low, *high) and low < high


def _both(left: Node, right: Node) -> Node:
    """Return the numbers above one bound and below another; for other sets, their intersection."""
    if _is_interval(left) and _is_interval(right):
        if left.parts[0] == _BELOW:
            left, right = right, left
        if left.parts[1] == _ABOVE and right.parts[0] == _BELOW:
            return Node("bracket", left.text[0] + right.text[1], (left.parts[0], right.parts[1]))
    return Node("sets", "∩", (left, right))


def _is_symbol(node: Node) -> bool:
    return node.kind == "symbol"


_AXES = (("x", "y"), ("x", "y", "z"), ("a", "b"), ("a", "b", "c"), ("m", "n"), ("p", "q"), ("r", "\\theta"))


def _coordinates(node: Node, other: Node) -> Node:
    """Return (x, y) = (1, 2) and "x = 1, y = 2" in the form that the other answer has; any other node unchanged."""
    if node.kind == "relation" and other.kind == "list" and [part.text for part in node.parts] == ["()", "()"]:
        names, values = (part.parts for part in node.parts)
        if len(names) == len(values) and all(map(_is_symbol, names)):
            return Node("list", parts=tuple(Node("relation", "=", pair) for pair in zip(names, values, strict=True)))
    stated = {_name(item): item.parts[1] for item in _items(node) if _name(item) is not None}
    axes = next((axes for axes in _AXES if stated.keys() == set(axes)), None)
    is_tuple = other.text == "()" or (other.kind == "relation" and other.parts[-1].text == "()")
    if node.kind == "list" and node.text != "or" and is_tuple and axes and len(axes) == len(node.parts):
        return Node("bracket", "()", tuple(stated[name] for name in axes))
    return node


# Elements


def elements(node: Node) -> tuple[Node, ...]:
    """Return the elements of a list or set, with ± expanded to two; any other answer is its only element."""
    parts = node.parts if node.kind == "list" or node.text == "{}" else (node,)
    return tuple(variant for part in parts for variant in _variants(part))


def _variants(node: Node) -> tuple[Node, ...]:
    plus, minus = _chosen(node, "±"), _chosen(node, "∓")
    return (node,) if plus == minus else (plus, minus)


def _chosen(node: Node, added: str) -> Node:
    parts = tuple(_chosen(part, added) for part in node.parts)
    if node.kind == "choice":
        return parts[0] if node.text == added else Node("minus", parts=parts)
    return node._replace(parts=parts)


# Units, percents and bases

Nodes = tuple[Node, ...]


def _without_units(golds: Nodes, answers: Nodes) -> tuple[Nodes, Nodes]:
    """Return both without units and percent signs; raise if the answer's unit is wrong."""
    gold_units, answer_units = ({item.text for item in items if item.kind == "unit"} for items in (golds, answers))
    for unit in answer_units:
        if gold_units and not all(same_unit(gold_unit, unit) for gold_unit in gold_units):
            raise _Refused(f"another unit, {unit!r}")
        if not is_unit(unit):
            raise _Refused(f"words that are not a unit, {unit!r}")
    golds, answers = (
        tuple(item.parts[0] if item.kind == "unit" else item for item in items) for items in (golds, answers)
    )
    if gold_units and any(item.kind == "percent" for item in answers):
        raise _Refused("another unit, '%'")
    if answer_units and any(item.kind == "percent" for item in golds):
        raise _Refused("a unit where the right answer has '%'")
    pairs = [_without_percent(*pair) for pair in zip(golds, answers, strict=True)]
    return tuple(gold for gold, _ in pairs), tuple(answer for _, answer in pairs)


def _without_percent(gold: Node, answer: Node) -> tuple[Node, Node]:
    """Return both without percent signs, the answer as a fraction if the right answer is one."""
    if "percent" not in (gold.kind, answer.kind):
        return gold, answer
    bare_gold, bare_answer = (node.parts[0] if node.kind == "percent" else node for node in (gold, answer))
    if gold.kind == answer.kind:
        return bare_gold, bare_answer
    gold_value, answer_value = rational_value(bare_gold), rational_value(bare_answer)
    if gold_value is None or answer_value is None:
        raise _Refused("a percent sign that the right answer does not have")
    if gold.kind == "percent":
        return bare_gold, (bare_gold if answer_value * 100 == gold_value else bare_answer)
    is_count = gold_value.denominator == 1 or abs(gold_value) > 1
    is_share = gold_value.denominator != 1 or 0 <= gold_value <= 1
    if (is_count and answer_value == gold_value) or (is_share and answer_value == gold_value * 100):
        return bare_gold, bare_gold
    raise _Refused("another percentage")


def _compare_bases(golds: Nodes, answers: Nodes) -> tuple[str, str] | None:
    """Compare numbers in other bases than ten by their digits and base; the answer may leave out the base."""
    gold_texts, answer_texts = (sorted(item.text for item in items) for items in (golds, answers))
    digits = sorted(item.text.partition("_")[0] for item in golds)
    kinds = {item.kind for item in answers}
    is_based = {item.kind for item in golds} == {"based"} and kinds <= {"based", "number"}
    if is_based and answer_texts in (gold_texts, digits):
        return " ".join(gold_texts), " ".join(gold_texts)
    return None


def _compare_times(golds: Nodes, answers: Nodes) -> tuple[str, str] | None:
    """Compare times by their digits: 4:30 is not 2:15."""
    gold_texts, answer_texts = (sorted(item.text.lstrip("0") for item in items) for items in (golds, answers))
    return (" ".join(gold_texts), " ".join(gold_texts)) if gold_texts == answer_texts else None


# Shapes

_INTERVALS = frozenset({"()", "[]", "(]", "[)"})


def _is_interval(node: Node) -> bool:
    return node.kind == "bracket" and node.text in _INTERVALS and len(node.parts) == 2


def _is_surely_set(node: Node) -> bool:
    """Return whether a node must be an interval or union: (1,2) can be a point, [1,2) and (1,∞) cannot."""
    if not _is_interval(node):
        return node.kind == "sets"
    return node.text != "()" or any(isinstance(exact_value(part), str) for part in node.parts)


def _is_set(node: Node) -> bool:
    return node.kind in ("sets", "set") or node.text == "{}" or _is_interval(node)


def _shape(node: Node) -> str:
    if node.kind in ("bracket", "named"):
        return f"{node.text or 'named values'} of {len(node.parts)}"
    if node.kind == "ratio":
        return f"a ratio of {len(node.parts)}"
    if node.kind == "matrix":
        return f"a matrix of {len(node.parts)} by {len(node.parts[0].parts)}"
    if node.kind == "relation":
        return f"a relation with {node.text}"
    return node.kind if node.kind in ("sets", "set", "text", "list") else "a formula"


def _check_shapes(golds: Nodes, answers: Nodes) -> None:
    gold_shapes, answer_shapes = (sorted(_shape(item) for item in items) for items in (golds, answers))
    gold, answer = golds[0], answers[0]
    if gold_shapes == answer_shapes or (len(golds) == 1 and _is_set(answer) and _may_be_set(gold, answer)):
        return
    raise _Refused(f"{', '.join(answer_shapes)} where {', '.join(gold_shapes)} is expected")


def _may_be_set(gold: Node, answer: Node) -> bool:
    """Return whether a set may be compared with the right answer, which is another set or an inequality."""
    if "set" in (gold.kind, answer.kind) and (_is_interval(gold) or _is_interval(answer)):
        # The point (8, -2), read as an interval, would equal ∅; only the set of all numbers has both forms.
        return {str(exact_value(part)) for part in (*gold.parts, *answer.parts)} == {"-∞", "∞"}
    return _is_set(gold) and bool({gold.kind, answer.kind} & {"sets", "set"})


def _as_set(node: Node) -> Node:
    """Return a node with brackets of two elements as intervals."""
    if _is_interval(node):
        return Node("interval", node.text, node.parts)
    return node._replace(parts=tuple(map(_as_set, node.parts))) if node.kind == "sets" else node


# Operations

_GRANTS = {
    "a division by symbols": {"a fraction"},
    "a root of symbols": {"a root"},
    "a root of a sum": {"a root"},
    "a division by a sum": {"a fraction"},
    "a division of numbers": {"a fraction"},
    "exponential": {"e", "a division by symbols", "a fraction"},
    "e": {"exponential"},
    "a fraction": {"a negative power"},
    "a negative power": {"a fraction"},
    "logarithm": {"a division by symbols", "a fraction"},
    "trigonometric function": {"a division by symbols", "a fraction"},
    "binomial": {"a fraction", "factorial"},
    "∪": {"∖"},
    "∖": {"∪"},
    "hyperbolic function": {"e", "exponential", "a division by symbols", "a fraction"},
    "a sum over an index": {"a fraction", "exponential"},
    "a product over an index": {"a fraction", "exponential", "factorial"},
}
"""Maps kinds of operations to those that an honest rewriting of them may have."""

_LARGEST_EXPONENT = 99
_MORE_SETS = 4
"""How many more unions an answer may have than the right one: the complement of n points is a union of n + 1."""


def _check_operations(gold: Operations, answer: Operations) -> None:
    allowed = gold.names.union(*(_GRANTS.get(name, ()) for name in gold.names))
    allowed |= {"a fraction"} if gold.decimals else set()
    allowed |= {"trigonometric function"} if {"exponential", "i"} <= allowed else set()
    if left := sorted(answer.names - allowed):
        raise _Refused(f"{left[0]}, which the right answer does not have")
    if answer.terms > gold.terms:
        raise _Refused("a sum that is not worked out")
    if answer.sets > gold.sets + _MORE_SETS:  # the time to compare unions grows faster than with their square
        raise _Refused(f"{answer.sets} sets where the right answer has {gold.sets}")
    if answer.exponent > max(_LARGEST_EXPONENT, gold.exponent):
        raise _Refused(f"an exponent of {answer.exponent}")
    names = _names(gold.symbols, answer.symbols)
    if not {names[name] for name in answer.symbols} <= {names[name] for name in gold.symbols}:
        raise _Refused("symbols that the right answer does not have")


# Texts for the worker


def _names(gold: set[str], answer: set[str]) -> dict[str, str]:
    """Map each symbol to a safe name; capitals equal small letters unless one side has both."""
    folds = all(len({lower_initial(name) for name in side}) == len(side) for side in (gold, answer))
    numbers: dict[str, int] = {}
    return {
        name: f"x{numbers.setdefault(lower_initial(name) if folds else name, len(numbers))}"
        for name in [*sorted(gold), *sorted(answer - gold)]
    }


def lower_initial(name: str) -> str:
    """Return a name with its first letter in lower case."""
    return name[0].lower() + name[1:]


def _to_json(node: Node, names: dict[str, str]) -> str:
    return json.dumps(_values_of(node, names), separators=(",", ":"))


def _values_of(node: Node, names: dict[str, str]) -> list[object]:
    value = rational_value(node) if node.kind in ("number", "repeating") else None
    if value is not None:
        return ["number", str(value), []]
    text = names[node.text] if node.kind == "symbol" else node.text
    return [node.kind, text, [_values_of(part, names) for part in node.parts]]


# Right answers that cannot be parsed


def _compare_unparsed(gold: str, answer: str) -> tuple[str, str] | None:
    """Return both as texts if they are the same; spaces without meaning do not count."""
    is_same = _without_spaces(answer) == _without_spaces(gold) or normalize(answer) == normalize(gold)
    return (gold, gold) if is_same else None


def _without_spaces(text: str) -> str:
    """Return LaTeX without spaces that mean nothing: after a command's name, and next to other signs."""
    text = re.sub(r"(\\[A-Za-z]+) +(?![A-Za-z])", r"\1", " ".join(text.strip(" $.").split()))
    return re.sub(r" (?=[^A-Za-z0-9])|(?<=[^A-Za-z0-9]) ", "", text)
