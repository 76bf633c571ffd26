r"""Whether an answer has the form that an answer to this question can have, before anything evaluates it.

In training, whatever the judge takes for right is what the policy learns to write. So an answer counts only if it is
written in the small language that `math_latex` reads, and is as finished as the right answer:

* **Numbers** are compared by their exact value: ``14/3``, ``\frac{14}{3}``, ``4\frac{2}{3}`` and ``4 2/3``; ``0.25``
  and ``\frac{1}{4}``; ``4.5e33`` and ``45 \times 10^{32}``; ``0.\overline{3}`` and ``1/3``. A rounded number is another
  number.
* **Operations** must be of kinds that the right answer has too. Digits, a sign, a decimal point and powers of ten are
  free. A fraction is allowed where the right answer has one, or decimals; where it is whole, ``14/2`` is a division
  left undone. Roots (simplified or not), π, e, i, functions, factorials, powers of numbers (``2^{10}``), sums of
  constants (``1+\sqrt{3}``, with no more terms than there) and divisions by symbols are allowed where the right answer
  has such. Sums, products and quotients of plain numbers (``123 \times 456``) are only where it has those. Adding,
  multiplying and raising symbols is free: ``2(k+1)`` for ``2k+2``. ``\sum``, ``\int``, ``\lim`` and their like are not
  read at all. ``arithmetic=True`` allows everything that can be worked out with numbers and roots.
* **Symbols** must be the right answer's. Capitals are told from small letters where either side has both.
* **=** may follow a name: a symbol, f(x), the corners of a figure, a word. ``x = 5`` is 5; ``7 = 5`` is nothing.
  ``\in`` may follow one, before a set, and ``x \ge 1`` is ``[1,\infty)``. Other relations are compared with relations,
  side by side (`math_tree`); where the right answer is ``x = 5`` or ``x < 5``, a relation that has yet to be solved is
  none. Words before an = that deny what follows it, such as "anything but", are no name.
* **Brackets** say what is in them: ``(1,2)``, ``[1,2)`` and ``\{1,2\}`` are three things. A bare list is a set, in any
  order. Both must have as many elements, ± counting for two. ``(8,-2)`` is a point and no empty interval.
* **Ratios**: ``2:3`` is the quotient, ``1:2:3`` is what is proportional to it, in this order. ``6:00`` and ``4:30``,
  which no ratio would be left as, are times. In ``\{x : x > 3\}`` the colon says "such that": it is the same as x > 3.
* **Bases** are part of a number: ``4210_5`` is ``4210_5`` or, the base having been asked for, ``4210``, and not
  ``4210_{10}``.
* **Units** must agree where both have one; where only the answer has one, it must look like one: ``5 \text{ cm}``, and
  not ``5 \text{ million}`` or ``5 \text{ halved}``.
* **Percent**: ``p\%`` is p where the right answer is the number p, and p/100 where that is not whole, or at most 1.
* **Words** are compared as words (`math_words`): ``\text{east}`` is not ``seat``, but ``xy`` is ``yx``. So are names
  with digits, Roman numerals and three capitals: ``CO2`` is ``\mathrm{CO}_2`` and not ``C2O``, ``XL`` is not ``LX``.
  "And" between words, conditions or values of several names is not "or".

Where the right answer itself cannot be read, the answer may hold the commands that it holds, and `math_tree` bounds
what is done with it.
"""

from __future__ import annotations

import functools
import json
import re
import string
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from explorl.tasks.json_lines import read_records, short_repr
from explorl.tasks.math.latex import Node, drop_base_ten, parse, serialize
from explorl.tasks.math.latex_tokens import FUNCTIONS, Unreadable, translate_unicode
from explorl.tasks.math.normalize import MAX_LENGTH, normalize, repair_latex
from explorl.tasks.math.tree import TREE
from explorl.tasks.math.units import is_unit, names_a_value, same_unit
from explorl.tasks.math.value import Operations, Undefined, exact_value, find_operations, rational_value
from explorl.tasks.math.words import conjunctions, is_text, normalize_words, plain_name

ADVERSARIAL = Path(__file__).parents[1] / "adversarial" / "math.jsonl"
"""Answers that are wrong and were made to look right; all are refused."""


class AdversarialCase(NamedTuple):
    """A right answer, one that is wrong, why it is, and the problem where that matters."""

    gold: str
    answer: str
    why: str
    prompt: str = ""


def read_adversarial(path: str | Path | None = None) -> list[AdversarialCase]:
    """The rows of a file of adversarial answers; None: those that come with Explorl."""
    example = r'{"gold": "5", "answer": "7 = 5", "why": "an equation that does not hold"}'
    rows = []
    for record, place in read_records(ADVERSARIAL if path is None else Path(path), example):
        fields = [record.get(name, AdversarialCase._field_defaults.get(name)) for name in AdversarialCase._fields]
        if not all(isinstance(text, str) for text in fields):
            raise ValueError(f"{place}: fields {short_repr(record)}; give gold, answer and why as text, like {example}")
        rows.append(AdversarialCase(*(str(text) for text in fields)))
    return rows


def refusal_reason(gold: str, answer: str, *, arithmetic: bool = False) -> str | None:
    """Why the answer is refused as it stands; None if it may be compared with the right one."""
    outcome = _compared(gold, answer, arithmetic)
    return outcome if isinstance(outcome, str) else None


def worker_texts(gold: str, answer: str, *, arithmetic: bool = False) -> tuple[str, str]:
    """Both as texts that `math_tree.built` reads; equal texts say the same, if the answer is not refused.

    Where one of them cannot be read here, both are LaTeX, for math-verify's parser.
    """
    outcome = _compared(gold, answer, arithmetic)
    return (repair_latex(gold), repair_latex(answer)) if isinstance(outcome, str) else outcome


class _Refused(ValueError):
    pass


_DIFFERENT = "another answer than the right one"


@lru_cache(maxsize=8_192)
def _compared(gold: str, answer: str, arithmetic: bool) -> str | tuple[str, str]:
    """Why the answer is refused, or both as texts for the worker."""
    try:
        said = translate_unicode(answer)
        if len(said) > 2 * MAX_LENGTH:
            raise Unreadable("it is too long")
        called, wanted = plain_name(gold), normalize_words(gold)
        if called is not None and called == plain_name(said):
            return called, called
        if wanted is not None and is_text(gold):
            joined = conjunctions(gold) or ({"and"} if "," in wanted else set())
            is_other = joined and conjunctions(said) and joined != conjunctions(said)
            return _DIFFERENT if is_other or normalize_words(said) != wanted else (wanted, wanted)
        try:
            right = parse(gold)
        except Unreadable:
            return _DIFFERENT if called is not None else _compared_unread(gold, said)
        return _compared_trees(right, parse(answer, units=not find_operations(right).symbols), arithmetic) or _DIFFERENT
    except (Unreadable, Undefined, _Refused) as error:
        return f"the answer is not taken: {error}"


def _compared_trees(right: Node, said: Node, arithmetic: bool) -> tuple[str, str] | None:
    """Both as texts for the worker; None if they are different numbers."""
    _check_conjunctions(right, said)
    if not _holds(drop_base_ten(right), "based"):  # a base of ten tells a number apart from one in another base only
        right, said = drop_base_ten(right), drop_base_ten(said)
    right, said = _unnamed(right, said)
    rights, saids = elements(right), elements(said)
    if len(rights) != len(saids):
        raise _Refused(
            f"{len(saids)} where there {'is 1 answer' if len(rights) == 1 else f'are {len(rights)} answers'}"
        )
    if {item.kind for item in rights} == {"based"} and any(item.kind == "unit" for item in saids):
        raise _Refused("words after a number in another base than ten")
    rights, saids = _unmeasured(rights, saids)
    if any(item.kind == "based" for item in (*rights, *saids)):
        return _compared_bases(rights, saids)
    if any(item.kind == "time" for item in rights):
        return _compared_times(rights, saids)
    _check_shapes(rights, saids)
    _check_operations(find_operations(*rights), find_operations(*saids), arithmetic)
    right, said = (items[0] if len(items) == 1 else Node("bracket", "{}", items) for items in (rights, saids))
    worth, stated = exact_value(right), exact_value(said)
    if worth is not None and stated is not None:
        return (serialize(right), serialize(right)) if worth == stated else None
    if {right.kind, said.kind} & {"sets", "set"} or (right.kind == "relation" != said.kind):
        right, said = _as_set(right), _as_set(said)
    names = _names(find_operations(right).symbols, find_operations(said).symbols)
    return _told(right, names), _told(said, names)


def _holds(node: Node, kind: str) -> bool:
    return node.kind == kind or any(_holds(part, kind) for part in node.parts)


def _check_conjunctions(right: Node, said: Node) -> None:
    """Raise where one says "and" and the other "or" between labels, conditions or values of several names.

    Between numbers, and between values of one name, both words list what there is.
    """
    if right.kind != "list" or said.kind != "list":
        return
    names = [_name(item) for item in right.parts]
    are_several = None not in names and len(set(names)) == len(names)
    are_conditions = any(item.kind == "relation" for item in right.parts) and None in names
    if are_several or are_conditions or all(map(_is_label, right.parts)):
        word = right.text or ("and" if are_several else "")
        if {word, said.text} == {"and", "or"}:
            raise _Refused(f"{said.text!r} where the right answer says {word!r}")


def _is_label(node: Node) -> bool:
    """Whether it is words or capitals, like the name of a statement."""
    symbols = node.parts if node.kind == "product" else (node,)
    return all(part.kind == "text" or (part.kind == "symbol" and part.text[0].isupper()) for part in symbols)


# Names before an =


def _unnamed(right: Node, said: Node) -> tuple[Node, Node]:
    """Both without the names that they give to what they state, except for relations that are compared as such."""
    _check_solved(_items(right), _items(said))
    if _is_surely_set(right) and (bounds := _bounds(said)) is not None:
        return right, bounds
    if right.kind == "list" or said.kind == "list":
        return _unnamed_lists(_items(right), _items(said))
    name, stated = _name(right), _name(said)
    if right.kind == said.kind == "relation":
        if name is not None and (name == stated or _is_free(stated) or _is_free(name)):
            _check_name(stated, (right.parts[1],))
            return right.parts[1], said.parts[1]
        if name is not None and not find_operations(right.parts[1]).symbols and _name(_turned(said)) != name:
            raise _Refused("an equation that is not solved")
        return orient(right), orient(said)
    if right.kind == "relation":
        return (orient(right) if name is None else right.parts[1]), said
    if said.kind == "relation":
        if stated is None:
            raise _Refused("a relation that is not a name and its value")
        _check_name(stated, (right,))
        return right, said.parts[1]
    return right, said


def _check_solved(rights: tuple[Node, ...], saids: tuple[Node, ...]) -> None:
    """Raise where the right answer bounds a symbol by constants, and a relation of the answer has yet to be solved."""
    if all(map(_is_solved, rights)):
        for relation in saids:
            if relation.kind == "relation" and _name(relation) is None and not _is_solved(relation):
                kind = "an equation" if relation.text == "=" else "a relation"
                raise _Refused(f"{kind} that is not solved")


def _is_solved(node: Node) -> bool:
    if node.kind != "relation":
        return False
    symbols = [part for part in node.parts if part.kind == "symbol"]
    return len(symbols) == 1 and not find_operations(*(part for part in node.parts if part.kind != "symbol")).symbols


def _unnamed_lists(rights: tuple[Node, ...], saids: tuple[Node, ...]) -> tuple[Node, Node]:
    names, stated = ([_name(item) for item in items] for items in (rights, saids))
    if len(rights) > 1 and None not in names and len(set(names)) == len(names):
        if set(names) != set(stated) or len(names) != len(stated):
            raise _Refused("values of other names")
        return _by_name(rights), _by_name(saids)
    rights = _values(rights, names) or rights
    values = _values(saids, stated)
    if values is None:
        if not any(item.kind == "relation" for item in rights):
            raise _Refused("relations that are not a name and its values")
        return _listed(rights), _listed(saids)
    for name in stated:
        _check_name(name, rights)
    return _listed(rights), _listed(values)


def named_value(node: Node) -> Node:
    """What a relation gives a name to, on either side; any other node is its own value."""
    if _name(node) is not None:
        return node.parts[1]
    return node.parts[0] if _name(_turned(node)) is not None else node


def _items(node: Node) -> tuple[Node, ...]:
    return node.parts if node.kind == "list" else (node,)


def _listed(items: tuple[Node, ...]) -> Node:
    return items[0] if len(items) == 1 else Node("list", parts=items)


def _name(node: Node) -> str | None:
    """The name that a relation gives to its other side; None if it gives none."""
    if node.kind != "relation" or node.text not in ("=", "≈", "∈") or not _is_name(node.parts[0]):
        return None
    return None if node.text == "∈" and not _is_set(node.parts[1]) else serialize(node.parts[0])


def _is_name(node: Node) -> bool:
    """Whether it is a symbol, f(x), words, or the corners of a figure: AB, ∠ABC."""
    if node.kind == "text":
        return names_a_value(node.text)
    if node.kind == "symbol":
        return True
    if node.kind == "product":
        return all(part.kind == "symbol" and part.text in _CORNERS for part in node.parts)
    if node.kind == "bracket" and node.text == "()":
        return all(part.kind == "symbol" for part in node.parts)
    return node.kind == "call" and node.text == "abs" and _is_name(node.parts[0])


_CORNERS = frozenset({*string.ascii_uppercase, "m", "\\angle", "\\triangle"})


def _is_free(name: str | None) -> bool:
    """Whether a name is f(x) or a word, for which the right answer may have another."""
    return name is not None and (name.startswith("text[") or (name.endswith(")") and "[" not in name))


def _check_name(name: str | None, rights: tuple[Node, ...]) -> None:
    if name in find_operations(*rights).symbols:
        raise _Refused("a name that is part of the right answer")


def _values(items: tuple[Node, ...], names: list[str | None]) -> tuple[Node, ...] | None:
    """What is stated where there is one name for all, before each or before the first; None if it is not so."""
    given = {name for name in names if name is not None}
    unnamed = [item for item, name in zip(items, names, strict=True) if name is None]
    if any(item.kind == "relation" for item in unnamed) or len(given) > 1:
        return None
    if given and unnamed and (names[0] is None or len(unnamed) < len(items) - 1):
        return None
    return tuple(item if name is None else item.parts[1] for item, name in zip(items, names, strict=True))


def _by_name(items: tuple[Node, ...]) -> Node:
    """Values of several names, in the order of the names."""
    return Node(
        "named", parts=tuple(item.parts[1] for item in sorted(items, key=lambda item: serialize(item.parts[0])))
    )


def _turned(node: Node) -> Node:
    return node._replace(parts=node.parts[::-1])


def orient(node: Node) -> Node:
    """A relation, read from the smaller to the larger side."""
    signs = node.text.split(" ")
    if not all(sign in _FLIPPED for sign in signs):
        return node
    return Node("relation", " ".join(_FLIPPED[sign] for sign in reversed(signs)), node.parts[::-1])


_FLIPPED = {">": "<", "≥": "≤"}


def _bounds(said: Node) -> Node | None:
    """The set in which 1 < x ≤ 3, or x < 1 or x > 3, says that a symbol lies; None if it says something else."""
    if said.kind == "list" and said.text == "or":
        bounds = [_bounds(part) for part in said.parts]
        symbols = {part for relation in said.parts for part in relation.parts if part.kind == "symbol"}
        known = [bound for bound in bounds if bound is not None]
        is_union = len(known) == len(bounds) and len(symbols) == 1
        return functools.reduce(lambda one, other: Node("sets", "∪", (one, other)), known) if is_union else None
    if said.kind != "relation":
        return None
    relation = orient(said)
    signs, parts = relation.text.split(" "), relation.parts
    inner = [place for place, part in enumerate(parts) if part.kind == "symbol"]
    if set(signs) - {"<", "≤"} or len(parts) > 3 or len(inner) != 1 or (len(parts) == 3 and inner != [1]):
        return None
    low, high = parts[: inner[0]], parts[inner[0] + 1 :]
    signs = [*([] if low else ["<"]), *signs, *([] if high else ["<"])]
    infinity = Node("constant", "∞")
    ends = (*(low or [Node("minus", parts=(infinity,))]), *(high or [infinity]))
    return Node("bracket", "([)]"[signs[0] == "≤"] + "([)]"[2 + (signs[1] == "≤")], ends)


# Elements


def elements(node: Node) -> tuple[Node, ...]:
    """The elements of a list or set, ± being two; any other answer is its own only element."""
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


def _unmeasured(rights: Nodes, saids: Nodes) -> tuple[Nodes, Nodes]:
    """Both without their units and percent signs."""
    wanted, stated = ({item.text for item in items if item.kind == "unit"} for items in (rights, saids))
    for unit in stated:
        if wanted and not all(same_unit(ours, unit) for ours in wanted):
            raise _Refused(f"another unit, {unit!r}")
        if not is_unit(unit):
            raise _Refused(f"words that are no unit, {unit!r}")
    rights, saids = (
        tuple(item.parts[0] if item.kind == "unit" else item for item in items) for items in (rights, saids)
    )
    if wanted and any(item.kind == "percent" for item in saids):
        raise _Refused("another unit, '%'")
    pairs = [_without_percent(*pair) for pair in zip(rights, saids, strict=True)]
    return tuple(right for right, _ in pairs), tuple(said for _, said in pairs)


def _without_percent(right: Node, said: Node) -> tuple[Node, Node]:
    """Both without percent signs, the answer as the fraction that it is where that is what is asked for."""
    if "percent" not in (right.kind, said.kind):
        return right, said
    bare, stated = (node.parts[0] if node.kind == "percent" else node for node in (right, said))
    if right.kind == said.kind:
        return bare, stated
    worth, share = rational_value(bare), rational_value(stated)
    if worth is None or share is None:
        raise _Refused("a percent sign that the right answer does not have")
    if right.kind == "percent":
        return bare, (bare if share * 100 == worth else stated)
    is_count = worth.denominator == 1 or abs(worth) > 1
    is_share = worth.denominator != 1 or 0 <= worth <= 1
    if (is_count and share == worth) or (is_share and share == worth * 100):
        return bare, bare
    raise _Refused("another percentage")


def _compared_bases(rights: Nodes, saids: Nodes) -> tuple[str, str] | None:
    """A number in another base than ten is its digits and its base, which may be left out if it was asked for."""
    wanted, stated = (sorted(item.text for item in items) for items in (rights, saids))
    digits = sorted(item.text.partition("_")[0] for item in rights)
    kinds = {item.kind for item in saids}
    if {item.kind for item in rights} == {"based"} and kinds <= {"based", "number"} and stated in (wanted, digits):
        return " ".join(wanted), " ".join(wanted)
    return None


def _compared_times(rights: Nodes, saids: Nodes) -> tuple[str, str] | None:
    """A time is its digits: 4:30 is not 2:15."""
    wanted, stated = (sorted(item.text.lstrip("0") for item in items) for items in (rights, saids))
    return (" ".join(wanted), " ".join(wanted)) if wanted == stated else None


# Shapes

_INTERVALS = frozenset({"()", "[]", "(]", "[)"})


def _is_interval(node: Node) -> bool:
    return node.kind == "bracket" and node.text in _INTERVALS and len(node.parts) == 2


def _is_surely_set(node: Node) -> bool:
    """Whether it is an interval or union, and cannot be a point: (1,2) can, [1,2) and (1,∞) cannot."""
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


def _check_shapes(rights: Nodes, saids: Nodes) -> None:
    wanted, found = (sorted(_shape(item) for item in items) for items in (rights, saids))
    right, said = rights[0], saids[0]
    if wanted == found or (len(rights) == 1 and _is_set(said) and _may_be_set(right, said)):
        return
    raise _Refused(f"{', '.join(found)} where there must be {', '.join(wanted)}")


def _may_be_set(right: Node, said: Node) -> bool:
    """Whether an interval or union may be what is asked for: another union, or an inequality."""
    if right.kind == "relation":
        return not set(right.text.split(" ")) - {"<", "≤"}
    if "set" in (right.kind, said.kind) and (_is_interval(right) or _is_interval(said)):
        # ∅ is the point (8, -2) to whoever reads that as an interval; only all numbers have both forms.
        return {str(exact_value(part)) for part in (*right.parts, *said.parts)} == {"-∞", "∞"}
    return _is_set(right) and bool({right.kind, said.kind} & {"sets", "set"})


def _as_set(node: Node) -> Node:
    """With brackets of two as the intervals that they are among sets."""
    if _is_interval(node):
        return Node("interval", node.text, node.parts)
    return node._replace(parts=tuple(map(_as_set, node.parts))) if node.kind == "sets" else node


# Operations

_NUMERIC = frozenset(
    {
        "a sum of numbers", "a product of numbers", "a division of numbers", "a fraction", "a power of numbers",
        "a power of a sum", "a product of sums", "a division by a sum", "a root", "a root of a sum", "factorial",
        "binomial", "mod", "gcd", "lcm", "max", "min", "abs", "floor", "ceil",
    }
)  # fmt: skip
"""What ``arithmetic=True`` allows."""

_GRANTS = {
    "a division by symbols": {"a fraction"},
    "a root of symbols": {"a root"},
    "a root of a sum": {"a root"},
    "a division by a sum": {"a fraction"},
    "a division of numbers": {"a fraction"},
    "exponential": {"e", "a division by symbols", "a fraction"},
    "e": {"exponential"},
    "trigonometric function": {"a division by symbols", "a fraction"},
    "binomial": {"a fraction"},
    "∪": {"∖"},
    "∖": {"∪"},
    "hyperbolic function": {"e", "exponential", "a division by symbols", "a fraction"},
}
"""Kinds of operations, and those that an honest rewriting of them may have."""

_LARGEST_EXPONENT = 99
_MORE_SETS = 4
"""How many more unions an answer may be written with: the complement of n points is a union of n + 1 intervals."""


def _check_operations(right: Operations, said: Operations, arithmetic: bool) -> None:
    allowed = right.names.union(*(_GRANTS.get(name, ()) for name in right.names))
    allowed |= {"a fraction"} if right.decimals else set()
    allowed |= {"trigonometric function"} if {"exponential", "i"} <= allowed else set()
    allowed |= _NUMERIC if arithmetic else set()
    if left := sorted(said.names - allowed):
        raise _Refused(f"{left[0]}, which the right answer does not have")
    if said.terms > right.terms and not arithmetic:
        raise _Refused("a sum left to be worked out")
    if said.sets > right.sets + _MORE_SETS:  # the time to compare unions grows faster than with their square
        raise _Refused(f"{said.sets} sets where the right answer has {right.sets}")
    if said.exponent > max(_LARGEST_EXPONENT, right.exponent):
        raise _Refused(f"an exponent of {said.exponent}")
    names = _names(right.symbols, said.symbols)
    if not {names[name] for name in said.symbols} <= {names[name] for name in right.symbols}:
        raise _Refused("symbols that the right answer does not have")


# Texts for the worker


def _names(right: set[str], said: set[str]) -> dict[str, str]:
    """A name of our own for each symbol; capitals are small letters, unless one side tells them apart."""
    folds = all(len({lower_initial(name) for name in side}) == len(side) for side in (right, said))
    numbers: dict[str, int] = {}
    return {
        name: f"x{numbers.setdefault(lower_initial(name) if folds else name, len(numbers))}"
        for name in [*sorted(right), *sorted(said - right)]
    }


def lower_initial(name: str) -> str:
    """The name with a small letter for its first."""
    return name[0].lower() + name[1:]


def _told(node: Node, names: dict[str, str]) -> str:
    return TREE + json.dumps(_values_of(node, names), separators=(",", ":"))


def _values_of(node: Node, names: dict[str, str]) -> list[object]:
    worth = rational_value(node) if node.kind in ("number", "repeating") else None
    if worth is not None:
        return ["number", str(worth), []]
    text = names[node.text] if node.kind == "symbol" else node.text
    return [node.kind, text, [_values_of(part, names) for part in node.parts]]


# Right answers that are not read

_COMMAND = re.compile(r"\\(?:[A-Za-z]+|.)")
_NAMING = re.compile(
    r"\\(?:text\w*|math\w+|mbox|bm|boldsymbol|operatorname|variable|\w*(?:hat|bar|dot|tilde|vec|line))\b"
)
_RANGE = re.compile(
    r"\\(?P<name>lim|sum|prod|int|oint|bigcup|bigcap)(?:\\(?:no)?limits)?"
    r"(?P<scripts>(?:[_^](?:\{(?:[^{}]|\{[^{}]*\})*\}|\\[A-Za-z]+|[^\\{}]))*)"
)
_PLAIN_NAME = re.compile(r" *(?:\{[A-Za-z0-9 .,'-]*\}|[A-Za-z0-9])")
_HARMLESS = {f"\\{name}" for name in (*FUNCTIONS, "frac", "dfrac", "sqrt", "cdot", "times", "left", "right", "pi")} | {
    "\\,", "\\;", "\\!", "\\ ", "\\{", "\\}", "\\\\", "\\infty", "\\text",
}  # fmt: skip


def _compared_unread(gold: str, said: str) -> tuple[str, str]:
    """An answer may then hold the commands that the right one holds, and plain names; or be the same but for spaces."""
    if _tight(said) == _tight(gold):
        return repair_latex(gold), repair_latex(gold)
    if strange := sorted(set(_COMMAND.findall(said)) - set(_COMMAND.findall(gold)) - _HARMLESS):
        raise _Refused(f"{strange[0]}, which the right answer does not have")
    if not said.isascii() or not all(_PLAIN_NAME.match(said, match.end()) for match in _NAMING.finditer(said)):
        raise _Refused("a name that is not plain")
    if _ranges(gold) != _ranges(said) and any(name == "lim" or hidden for name, _, hidden in _ranges(gold)):
        raise _Refused("another limit, or another range of an index")
    # to math-verify a : is always a division, and x2 is 2x
    if normalize(said) != normalize(gold) and (":" in said + gold or any(_touches(text) for text in (said, gold))):
        raise _Refused("a colon, or a digit right after a letter, which can be read in several ways")
    return repair_latex(gold), repair_latex(said)


def _ranges(text: str) -> list[tuple[str, str, bool]]:
    r"""What stands below and above each ``\lim``, ``\sum`` and the like, and whether its index is part of a name.

    To math-verify the index of a_n is a part of a name, so that a_n has the same limit and sum everywhere.
    """
    text = _tight(text)
    rest, ranges = _RANGE.sub(" ", text), []
    for match in _RANGE.finditer(text):
        scripts = match["scripts"]
        index = re.match(r"_\{?([A-Za-z])(?![A-Za-z])", scripts)
        is_hidden = index is not None and re.search(rf"_(?:\{{[^{{}}]*)?{index[1]}", rest) is not None
        ranges.append((match["name"], scripts.replace(index[1], "·", 1) if index else scripts, is_hidden))
    return sorted(ranges)


def _touches(text: str) -> bool:
    """Whether a digit stands right after a letter, and is not the exponent of 4.5e33."""
    return re.search(r"[A-Za-z](?<![0-9.][eE])[0-9]", _COMMAND.sub(" ", text)) is not None


def _tight(text: str) -> str:
    """LaTeX without the spaces that say nothing: after a command's name, and beside what is no letter or digit."""
    text = re.sub(r"(\\[A-Za-z]+) +(?![A-Za-z])", r"\1", " ".join(text.strip(" $.").split()))
    return re.sub(r" (?=[^A-Za-z0-9])|(?<=[^A-Za-z0-9]) ", "", text)
