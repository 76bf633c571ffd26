"""Recognize answers that are words, and normalize them."""

from __future__ import annotations

import re

_WRAPPED = re.compile(
    r"\\(?:text|textbf|textit|textrm|textsf|textnormal|mbox|mathrm|mathbf|operatorname|ce) ?\{([^{}]*)\}"
)
_LAYOUT = re.compile(r"\\[,;: !]|\\[()\[\]]|[~$]|\\(?:left|right|q?quad|displaystyle)(?![A-Za-z])")
# A whole number may follow a word, as in June 20, but not one with a sign or a point.
_ONLY_WORDS = re.compile(r"[^\W\d_][^\W_]*(?:[ .,'()=&/-]+[^\W\d_][^\W_]*|,? [0-9]+(?=,? |\Z))*")
_SHORT_WORDS = frozenset(
    {"yes", "no", "odd", "all", "one", "two", "six", "ten", "red", "sun", "mon", "tue", "wed", "thu", "fri", "sat"}
)
_ARTICLE = re.compile(r"(?:(?:it|this|that|the answer) (?:is|was) )?(?:(?:a|an|the) )?(?=\w)")
PHRASES = {
    "no solution": r"\emptyset", "no solutions": r"\emptyset", "no real solution": r"\emptyset",
    "no real solutions": r"\emptyset", "empty set": r"\emptyset", "none": r"\emptyset", "infinity": r"\infty",
    "positive infinity": r"\infty", "negative infinity": r"-\infty", "all real numbers": r"\mathbb{R}",
    "all reals": r"\mathbb{R}", "real numbers": r"\mathbb{R}",
}  # fmt: skip
"""Maps words, as `normalize_words` returns them, to LaTeX."""
_UNITS = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen "
    "seventeen eighteen nineteen"
)
_TENS = "twenty thirty forty fifty sixty seventy eighty ninety"
NUMBERS = {name: str(value) for value, name in enumerate(_UNITS.split())} | {
    f"{tens} {unit}".strip(): str(10 * index + value)
    for index, tens in enumerate(_TENS.split(), start=2)
    for value, unit in enumerate(["", *_UNITS.split()[1:10]])
}
"""Maps the names of whole numbers below a hundred to their digits."""
_NAME = re.compile(r"[A-Z][A-Za-z]*[0-9][A-Za-z0-9]*|[a-z][0-9]+")
_ROMAN = re.compile(r"(?=..)M{0,3}(?:C[MD]|D?C{0,3})(?:X[CL]|L?X{0,3})(?:I[XV]|V?I{0,3})")
_MATHEMATICS = frozenset({"sqrt", "sin", "cos", "tan", "cot", "sec", "csc", "log", "exp", "arcsin", "arccos", "arctan"})


def normalize_words(text: str) -> str | None:
    """Return a text's words in lower case, sorted if they are separated by commas or =; None if it has anything else.

    "and" and "or" separate them, too; `conjunctions` tells which.
    """
    text = " ".join(_LAYOUT.sub(" ", _WRAPPED.sub(r"\1", text)).split()).strip(" .,(){}")
    if not _ONLY_WORDS.fullmatch(text):
        return None
    divider = "=" if "=" in text else ","
    parts = re.sub(r",? (?:and|or) ", ",", text.casefold()).split(divider)
    bare = [_ARTICLE.sub("", " ".join(re.findall(r"[^\W_]+", part))) for part in parts]
    return f" {divider} ".join(sorted(bare))


def conjunctions(text: str) -> set[str]:
    """Return which of "and" and "or" a text has."""
    return {word.casefold() for word in re.findall(r"(?i)(?<![^\W\d_])(?:and|or)(?![^\W\d_])", text)}


def plain_name(text: str) -> str | None:
    r"""Return the letters and digits of a name with a digit, like ``CO_2``, ``\mathrm{CO}_2`` and ``Q1``; else None."""
    bare = _LAYOUT.sub(" ", _WRAPPED.sub(r"\1", _WRAPPED.sub(r"\1", text))).strip(" .")
    bare = re.sub(r" *[_{}] *", "", bare)
    return bare if _NAME.fullmatch(bare) else None


def is_text(gold: str) -> bool:
    r"""Return whether a right answer made of words must be compared as words, and not as a product of symbols.

    This is true if it is in ``\text{…}``, has a word of four letters or one of three with a capital initial, is a Roman
    numeral or three capitals, such as HTH, or is an equation of terms such as MC and ATC.
    """
    bare = gold.strip(" .$")
    if wrapped := _WRAPPED.fullmatch(bare):
        return bare.startswith(("\\text", "\\mbox")) or len(wrapped[1].strip()) > 1
    letters = re.findall(r"[^\W\d_]+", _WRAPPED.sub(r" \1 ", bare))
    if "\\" in _WRAPPED.sub("", bare) or _MATHEMATICS & set(letters):
        return False
    if len(letters) == 1 and (_ROMAN.fullmatch(bare) or (len(bare) > 2 and bare.isalpha() and bare.isupper())):
        return True
    if "=" in bare and all(word.isupper() for word in letters):
        return any(len(word) > 2 for word in letters)
    return any(
        len(word) > 3 or (len(word) == 3 and word.istitle()) or word.casefold() in _SHORT_WORDS for word in letters
    )
