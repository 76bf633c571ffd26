r"""Refuse answers that have the right value but only repeat a formula of the problem.

"Factor x² − 9", "Simplify √242" and "Write 3/20 as a decimal" ask for another form of a formula that they state. A copy
of it has the right value but solves nothing. So an answer is refused if it has the form (`notation`) of a formula of
the prompt and the right answer has another form. An answer with the right answer's form is never refused, even if the
prompt contains it, for example as one of several choices.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache

from explorl.tasks.math.form import option_letter
from explorl.tasks.math.latex import Node, parse
from explorl.tasks.math.latex_tokens import FUNCTIONS, Unreadable
from explorl.tasks.math.normalize import normalize
from explorl.tasks.math.notation import Forms, forms, is_unreduced
from explorl.tasks.math.value import find_operations
from explorl.tasks.math.vectors import same_products
from explorl.tasks.math.words import is_text, normalize_words, plain_name


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
