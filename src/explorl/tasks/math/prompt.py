r"""Refuse answers that have the right value but only repeat a formula of the problem.

"Factor x² − 9", "Simplify √242" and "Write 3/20 as a decimal" ask for another form of a formula that they state. A copy
of it has the right value but solves nothing. So an answer is refused if it has the form of a formula of the prompt
and the right answer has another form. An answer with the right answer's form is never refused, even if the
prompt contains it, for example as one of several choices.

`forms` returns three forms, each coarser than the one before:

0. without layout, names, units and the order of terms and factors: ``-9 + x^2`` is ``x^2 - 9``;
1. with the numbers of a product multiplied, equal factors collected, zeros and ones left out: ``(x \cdot x - 9)/1``;
2. with equal terms added and numbers multiplied into a sum: ``-(9 - x^2)``.

A number's notation is part of its form: whole, decimal, fraction, mixed, repeating or scientific.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from fractions import Fraction
from functools import lru_cache

from explorl.tasks.math.answer_text import FUNCTIONS, Unreadable, normalize
from explorl.tasks.math.form import elements, lower_initial, named_value, option_letter, orient
from explorl.tasks.math.latex import Node, parse
from explorl.tasks.math.value import MAX_BITS, Undefined, find_operations, is_power_of_ten, rational_value
from explorl.tasks.math.vectors import same_products
from explorl.tasks.math.words import is_text, normalize_words, plain_name

Forms = tuple[object, ...]
Factors = tuple[tuple[object, Fraction], ...]
"""Bases and their exponents, sorted."""
Term = tuple[Fraction, Factors]


def refusal_reason(prompt: str, gold: str, answer: str) -> str | None:
    """Return why an answer with the right value is refused; None if it is what the prompt asks for."""
    if same_products(prompt, gold, answer) is False:
        return "a product of vectors or matrices in another order"
    if restates(prompt, gold, answer):
        return "a formula of the problem, which asks for another form of it"
    if _LOWEST_TERMS.search(prompt) and _is_unreduced(answer) and not _is_unreduced(gold):
        return "a fraction that is not in lowest terms"
    return None


def restates(prompt: str, gold: str, answer: str) -> bool:
    """Return whether an answer repeats a formula of the prompt while the right answer has another form."""
    if (
        not prompt
        or option_letter(gold) is not None
        or plain_name(gold) is not None
        or (is_text(gold) and normalize_words(gold) is not None)
    ):
        return False
    units = _may_have_unit(gold)
    gold_forms, answer_forms = _forms(gold, units), _forms(answer, units)
    if gold_forms is None or answer_forms is None:
        return normalize(answer) != normalize(gold) and normalize(answer) in _normal_texts(prompt)
    if gold_forms == answer_forms:
        return False
    return any(
        answer_form == prompt_form != gold_form
        for prompt_forms in _forms_in(prompt, units)
        for answer_form, prompt_form, gold_form in zip(answer_forms, prompt_forms, gold_forms, strict=True)
    )


_LOWEST_TERMS = re.compile(
    r"\b(?:lowest terms|simplest (?:\w+ )?form|reduced? (?:the )?(?:fraction|form)|simplify)\b", re.I
)


def _is_unreduced(answer: str) -> bool:
    try:
        return is_unreduced(parse(answer))
    except Unreadable:
        return False


def _may_have_unit(gold: str) -> bool:
    """Return whether a bare word at the end of an answer may be a unit, as `form` decides it."""
    try:
        return not find_operations(parse(gold)).symbols
    except Unreadable:
        return False


# Formulas of a prompt

_DRAWING = re.compile(r"\[asy\].*?\[/asy\]", re.DOTALL)
_FORMULA = re.compile(
    r"\$\$(.+?)\$\$|\$(.+?)\$|\\\[(.+?)\\\]|\\\((.+?)\\\)|\\begin\{((?:align|equation|gather|multline)\w*\*?)\}(.+?)"
    r"\\end\{\5\}",
    re.DOTALL,
)
_BREAK = re.compile(
    r"\\\\(?:\[[^\]]*\])?|\\q?quad(?![A-Za-z])|\\(?:text|mbox|textrm)\s*\{[^{}]*\}|\\(?:begin|end)\{(?:align|aligned|"
    r"equation|gather|gathered|split|multline)\w*\*?\}|\\(?:implies|iff|Rightarrow|Leftrightarrow|to)(?![A-Za-z])"
)
_RELATION = re.compile(r"\\(?:leq?|geq?|leqslant|geqslant|lt|gt|neq?|approx|equiv|in|sim|le|ge)(?![A-Za-z])|[=<>,;:]")
_BOX = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])")
_COMMAND = re.compile(r"\\[A-Za-z]+")
_FUNCTION_NAME = re.compile(rf"\b(?:{'|'.join([*FUNCTIONS, 'sqrt', 'pi', 'asin', 'acos', 'atan'])})\b")
_PUNCTUATION = " \t\r\n.,;:?!"
_QUOTES = str.maketrans('"“”„«»`', " " * 7)
_LONGEST_RUN = 30


@lru_cache(maxsize=1_024)
def _texts(prompt: str) -> frozenset[str]:
    """Return the formulas of a prompt, and the parts between their relations and commas.

    Some may not be formulas: that matters only if an answer with the right value has their form.
    """
    prompt = _BOX.sub(" ", _DRAWING.sub(" ", prompt)).replace("\\$", " ")
    formulas = [next(filter(None, match.groups()[:4]), match[6]) for match in _FORMULA.finditer(prompt)]
    formulas += _in_prose(_FORMULA.sub(" . ", prompt))
    formulas += [piece for formula in formulas for piece in _BREAK.split(formula.replace("&", " "))]
    sides = [side for formula in formulas for side in _sides(formula)]
    texts = {text.strip(" \t\r\n,;:") for text in (*formulas, *sides)}
    return frozenset(texts | {text.rstrip(_PUNCTUATION) for text in texts}) - {""}


def _sides(formula: str) -> Iterator[str]:
    """Yield the parts of a formula between relations and commas that are not in brackets."""
    depth, start, cuts = 0, 0, {match.start(): match.end() for match in _RELATION.finditer(formula)}
    for position, sign in enumerate(formula):
        depth += (sign in "{[(") - (sign in "}])")
        if depth <= 0 and position in cuts:
            yield formula[start:position]
            start = cuts[position]
    yield formula[start:]


def _in_prose(text: str) -> Iterator[str]:
    """Yield runs of words that may be a formula without dollar signs, and all parts of the shorter runs."""
    run: list[str] = []
    for word in [*text.translate(_QUOTES).split(), "end"]:
        if _is_formula(word):
            run.append(word)
            if word[-1] not in ".?!;":
                continue
        yield " ".join(run)
        if len(run) <= _LONGEST_RUN:  # "a 3/4" and "b) x - 9": a word beside a formula may look like a part of it
            yield from (" ".join(run[first:last]) for first in range(len(run)) for last in range(first + 1, len(run)))
            yield from (" ".join(run[first:]) for first in range(1, len(run)))
        run = []


def _is_formula(word: str) -> bool:
    bare = _FUNCTION_NAME.sub("", _COMMAND.sub("", word))
    letters = max(map(len, "".join(sign if sign.isalpha() else " " for sign in bare).split()), default=0)
    if letters > (4 if re.search(r"[\^*+=]|^[0-9]", bare) else 2):
        return False
    is_single = len(word.strip(_PUNCTUATION)) == 1
    return word != bare or is_single or any(not sign.isalpha() and sign not in ".,;:?!'-" for sign in word)


@lru_cache(maxsize=1_024)
def _forms_in(prompt: str, units: bool) -> frozenset[Forms]:
    """Return the forms of a prompt's formulas and of the sides of their relations and commas."""
    all_forms = (forms(node) for text in _texts(prompt) for node in _nodes(text, units))
    return frozenset(form for form in all_forms if form is not None)


@lru_cache(maxsize=1_024)
def _normal_texts(prompt: str) -> frozenset[str]:
    """Return the normal forms of a prompt's formulas, for answers that `latex` cannot parse."""
    return frozenset(map(normalize, _texts(prompt)))


def _nodes(text: str, units: bool) -> Iterator[Node]:
    try:
        waiting = [parse(text, units=units)]
    except Unreadable:
        return
    while waiting:
        node = waiting.pop()
        yield node
        if node.kind in ("relation", "list", "bracket", "unit", "percent"):
            waiting += node.parts
        if node.kind == "percent":
            yield Node("quotient", parts=(*node.parts, Node("number", "100")))


@lru_cache(maxsize=8_192)
def _forms(text: str, units: bool) -> Forms | None:
    """Return the forms of an answer; None if it cannot be parsed."""
    try:
        return forms(parse(text, units=units))
    except Unreadable:
        return None


# Forms of a formula

_TIERS = (1, 2)
_MAX_EXPONENT = 64
_LARGEST_FACTOR = 1_000
"""The largest number whose square is tried as a factor of a radicand."""
_HALF = Fraction(1, 2)
_CONTAINERS = frozenset({
    "bracket", "list", "relation", "matrix", "row", "sets", "set", "text", "ratio", "time", "interval",
})  # fmt: skip


def forms(node: Node) -> Forms | None:
    """Return the forms of a formula, the finest first; None if a number in it cannot be computed."""
    try:
        bare = _bare(node)
        return _plain(bare), *(_tidy(bare, tier) for tier in _TIERS)
    except (Undefined, ArithmeticError):
        return None


def _bare(node: Node) -> Node:
    """Return a formula without names and units."""
    node = named_value(node)
    if node.kind in ("unit", "percent"):
        return _bare(node.parts[0])
    if node.kind == "time" and rational_value(node.parts[1]):
        return node._replace(kind="quotient", text="")
    if node.kind == "based":  # the base may be left out
        digits = node.text.partition("_")[0]
        return Node("number" if digits.isdigit() else "symbol", digits)
    items = elements(node)
    if items == (node,):
        return orient(node) if node.kind == "relation" else node
    return _bare(items[0]) if len(items) == 1 else Node("list", parts=tuple(map(_bare, items)))


def is_unreduced(node: Node) -> bool:
    """Return whether an answer is a fraction like 2/4."""
    literal = _literal(_bare(node))
    return literal is not None and literal[0] == "unreduced fraction"


def _literal(node: Node) -> tuple[str, Fraction] | None:
    """Return the notation and value of a number; None if the node is something else or a calculation."""
    if node.kind == "minus":
        inner = _literal(node.parts[0])
        return None if inner is None else (inner[0], -inner[1])
    if node.kind == "number":
        notation = "scientific" if "e" in node.text else "decimal" if "." in node.text else "whole"
    elif node.kind == "repeating":
        notation = "repeating"
    elif node.kind == "quotient" and all(_is_whole(part) for part in node.parts):
        notation = node.text or "fraction"
        above, below = (rational_value(part) or Fraction(0) for part in node.parts)
        if notation == "fraction" and below and (above / below).denominator != abs(below):
            notation = "unreduced fraction"
    elif _is_scientific(node):
        notation = "scientific"
    else:
        return None
    value = rational_value(node)
    return None if value is None else (notation, value)


def _is_whole(node: Node) -> bool:
    literal = _literal(node)
    return literal is not None and literal[0] == "whole"


def _is_scientific(node: Node) -> bool:
    """Return whether a node is a power of ten, or a number times one."""
    *others, power = node.parts if node.kind == "product" and len(node.parts) == 2 else (node,)
    return is_power_of_ten(power) and all(other.kind in ("number", "minus") and _literal(other) for other in others)


# The finest form


def _plain(node: Node) -> object:
    """Return the form without layout, with sorted terms and factors."""
    literal = _literal(node)
    if literal is not None and not literal[0].endswith("fraction"):
        return literal
    if node.kind == "sum":
        return "sum", *_ordered(_plain(term) for term in _flat_terms(node))
    if node.kind in ("product", "quotient", "minus", "power", "root"):
        sign, factors = _factors(node)
        if sign == 1 and len(factors) == 1 and not factors[0][1]:
            return factors[0][0]
        return "product", sign, *_ordered(factors)
    parts = [_plain(part) for part in node.parts]
    return node.kind, _text(node), *(_ordered(parts) if _is_unordered(node) else parts)


def _flat_terms(node: Node) -> Iterator[Node]:
    for part in node.parts:
        yield from _flat_terms(part) if part.kind == "sum" else (part,)


def _factors(node: Node) -> tuple[int, list[tuple[object, bool]]]:
    """Return the sign of a product, and for each factor its form and whether it is in the denominator."""
    literal = _literal(node)
    if literal is not None and not literal[0].endswith("fraction"):
        notation, value = literal
        return -1 if value < 0 else 1, [((notation, abs(value)), False)] if abs(value) != 1 else []
    if node.kind == "minus":
        sign, factors = _factors(node.parts[0])
        return -sign, factors
    if node.kind == "product":
        signs, parts = zip(*map(_factors, node.parts), strict=True)
        return math.prod(signs), [factor for factors in parts for factor in factors]
    if node.kind == "quotient":
        (sign, above), (other, below) = map(_factors, node.parts)
        return sign * other, above + [(form, not is_below) for form, is_below in below]
    if node.kind in ("power", "root"):
        base, exponent = node.parts
        literal = _literal(exponent)  # x^{0.5} is x^{1/2}, whichever is asked for
        return 1, [((node.kind, _plain(base), _plain(exponent) if literal is None else literal[1]), False)]
    return 1, [(_plain(node), False)]


def _exponent(node: Node) -> Fraction | None:
    """Return the exponent of a power or root if it is a number, else None."""
    literal = _literal(node.parts[1]) if node.kind in ("power", "root") else None
    if literal is None or not literal[1]:
        return None
    return literal[1] if node.kind == "power" else 1 / literal[1]


# Coarser forms


def _tidy(node: Node, tier: int) -> object:
    """Return the form with numbers, factors and, at tier 2, terms collected."""
    if (literal := _literal(node)) is not None:
        notation, value = literal
        return notation.removeprefix("unreduced ") if tier == 2 else notation, value
    if node.kind == "relation" and node.text == "=":
        return "=", *_ordered(_scaled([_terms(part, tier) for part in node.parts], tier))
    if node.kind in _CONTAINERS:
        parts = [_tidy(part, tier) for part in node.parts]
        return node.kind, node.text, *(_ordered(parts) if _is_unordered(node) else parts)
    terms = _terms(node, tier)
    if len(terms) == 1 and not terms[0][1]:
        value = terms[0][0]
        return "decimal" if find_operations(node).decimals else "whole" if value.denominator == 1 else "fraction", value
    return tuple(terms)


def _scaled(sides: list[list[Term]], tier: int) -> list[object]:
    """Return the sides of an equation, at tier 2 divided by the coefficient of one of their terms."""
    terms = [term for side in sides for term in side if term[0]] if tier == 2 else []
    scale, _ = min(terms, key=lambda term: repr(term[1]), default=(Fraction(1), ()))
    return [tuple((factor / scale, factors) for factor, factors in side) for side in sides]


def _terms(node: Node, tier: int) -> list[Term]:
    """Return the terms of a sum with their coefficients, sorted."""
    terms: list[Term]
    if (literal := _literal(node)) is not None:
        terms = [(literal[1], ())]
    elif node.kind == "sum":
        terms = [term for part in node.parts for term in _terms(part, tier)]
    elif node.kind == "minus":
        terms = [(-factor, factors) for factor, factors in _terms(node.parts[0], tier)]
    elif node.kind == "product":
        terms = _multiplied([(_terms(part, tier), Fraction(1)) for part in node.parts], tier)
    elif node.kind == "quotient":
        terms = _multiplied(
            [(_terms(part, tier), Fraction(sign)) for part, sign in zip(node.parts, (1, -1), strict=True)], tier
        )
    elif (exponent := _exponent(node)) is not None:
        terms = _multiplied([(_terms(node.parts[0], tier), exponent)], tier)
    else:
        parts = [_tidy(part, tier) for part in node.parts]
        terms = [(Fraction(1), (((node.kind, _text(node), *parts), Fraction(1)),))]
    if tier == 2:
        collected: dict[Factors, Fraction] = {}
        for factor, factors in terms:
            collected[factors] = collected.get(factors, Fraction(0)) + factor
        terms = [(factor, factors) for factors, factor in collected.items()]
    nonzero = [term for term in terms if term[0]]
    return sorted(nonzero or [(Fraction(0), ())], key=lambda term: (repr(term[1]), term[0]))


def _multiplied(powers: list[tuple[list[Term], Fraction]], tier: int) -> list[Term]:
    """Return the product of powers of sums, with its coefficient.

    At tier 2, a number times one sum is multiplied out; of several sums, the first terms get the coefficient 1.
    """
    scale, bases = Fraction(1), dict[object, Fraction]()
    sums: list[list[Term]] = []
    for terms, exponent in powers:
        if len(terms) > 1:
            if tier == 2 and exponent.denominator == 1 and abs(exponent) <= _MAX_EXPONENT:
                lead = terms[0][0]
                scale *= _raised(lead, int(exponent))
                terms = [(factor / lead, inner) for factor, inner in terms]
            sums += [terms] if exponent == 1 else []
            factors: Factors = ((("sum", *terms), exponent),)
        else:
            (factor, inner), *_ = terms
            factors = tuple((base, power * exponent) for base, power in inner)
            if exponent.denominator == 1 and abs(exponent) <= _MAX_EXPONENT:
                scale *= _raised(factor, int(exponent))
            elif factor != 1:
                factors += ((("number", factor), exponent),)
        for base, power in factors:
            bases[base] = bases.get(base, Fraction(0)) + power
    bases = {base: power for base, power in bases.items() if power}
    scale = _unsimplified(scale, bases)
    if tier == 2 and len(sums) == 1 and list(bases.values()) == [1]:
        return [(scale * factor, inner) for factor, inner in sums[0]]
    return [(scale, tuple(sorted(bases.items(), key=repr)))]


def _raised(base: Fraction, exponent: int) -> Fraction:
    if abs(exponent) * max(base.numerator.bit_length(), base.denominator.bit_length()) > MAX_BITS:
        raise Undefined("a number too large to compute")
    return base**exponent


def _unsimplified(scale: Fraction, bases: dict[object, Fraction]) -> Fraction:
    """Move a number before a square root into it if the radicand is a fraction or has a square factor: 2√60.5 is √242.

    Return the remaining factor, which is its sign; a simplified root is unchanged.
    """
    roots = [base for base in bases if isinstance(base, tuple) and base[0] == "number" and bases[base] == _HALF]
    if len(roots) != 1:
        return scale
    (root,) = roots
    radicand: Fraction = root[1]
    whole = radicand.numerator
    if radicand.denominator == 1 and all(whole % (factor * factor) for factor in range(2, _LARGEST_FACTOR)):
        return scale
    del bases[root]
    bases["number", radicand * scale**2] = _HALF
    return Fraction(-1 if scale < 0 else 1)


def _text(node: Node) -> str:
    """Return the text of a node; a symbol in lower case, because `form` accepts capitals for small letters."""
    return lower_initial(node.text) if node.kind == "symbol" else node.text


def _is_unordered(node: Node) -> bool:
    return node.kind == "list" or node.text in ("{}", "=", "∪", "∩", "≠")


def _ordered(parts: Iterable[object]) -> list[object]:
    return sorted(parts, key=repr)
