"""Recognize answers that are words and units after a number, and compare them."""

from __future__ import annotations

import re
from collections import Counter

from explorl.tasks.math.vocabulary import (
    ALTERATIONS,
    DENIALS,
    HEDGES,
    LABELS,
    MATHEMATICS,
    NO_UNITS,
    NO_UNITS_ALONE,
    OTHERS,
    RESULTS,
    SCALES,
    SHORT_WORDS,
    SIGNS,
    UNITS,
)

_WRAPPED = re.compile(
    r"\\(?:text|textbf|textit|textrm|textsf|textnormal|mbox|mathrm|mathbf|operatorname|ce) ?\{([^{}]*)\}"
)
_LAYOUT = re.compile(r"\\[,;: !]|\\[()\[\]]|[~$]|\\(?:left|right|q?quad|displaystyle)(?![A-Za-z])")
# A whole number may follow a word, as in June 20, but not one with a sign or a point.
_ONLY_WORDS = re.compile(r"[^\W\d_][^\W_]*(?:[ .,'()=&/-]+[^\W\d_][^\W_]*|,? [0-9]+(?=,? |\Z))*")
_ARTICLE = re.compile(r"(?:(?:it|this|that|the answer) (?:is|was) )?(?:(?:a|an|the) )?(?=\w)")
_NAME = re.compile(r"[A-Z][A-Za-z]*[0-9][A-Za-z0-9]*|[a-z][0-9]+")
_ROMAN = re.compile(r"(?=..)M{0,3}(?:C[MD]|D?C{0,3})(?:X[CL]|L?X{0,3})(?:I[XV]|V?I{0,3})")


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
    if "\\" in _WRAPPED.sub("", bare) or MATHEMATICS & set(letters):
        return False
    if len(letters) == 1 and (_ROMAN.fullmatch(bare) or (len(bare) > 2 and bare.isalpha() and bare.isupper())):
        return True
    if "=" in bare and all(word.isupper() for word in letters):
        return any(len(word) > 2 for word in letters)
    return any(
        len(word) > 3 or (len(word) == 3 and word.istitle()) or word.casefold() in SHORT_WORDS for word in letters
    )


# Units

_NUMBER_WORD = re.compile(r"[a-z]*ill(?:ion|iard)(?:th)?s?|[a-z]*(?:tieth|teenth)s?|(?!scaf)[a-z]+fold")
_PARTS_PER = re.compile(r"\bper (?:cent|centum|mil|mill)\b|\bp c\b|\bbasis points?\b|\be\^")
_ROMAN_COUNT = re.compile(r"\b(?:[IVX]{2,}|MM)\b")
_BOUND = re.compile(
    r"\b(?:at (?:least|most)|(?:different|far) from|close to|ruled out)$"
    r"|\b(?:wrong|incorrect|bad) (?:value|number|choice|option|guess)$"
)
_SCALED = re.compile(r"\b([mM]|micro)(W|Pa|Hz|J|V|eV|N|m|s|g)\b")
_MERIDIEM = re.compile(r"\b([ap])\. ?m\b\.?")
_PLACE = re.compile(r"\b(square|cubic) ([a-z]+)")
_RAISED = re.compile(r"([a-z]+)(?: squared| cubed|\^ ?([0-9]))")


def is_abbreviation(word: str) -> bool:
    """Return whether a word that is not a command is the sign of a unit, as in ``5 m`` and ``5 km``."""
    return word in SIGNS if len(word) == 1 else word.casefold() in UNITS or _SCALED.fullmatch(word) is not None


def is_unit(text: str) -> bool:
    """Return whether the words after a number can be what it counts or measures."""
    spelled = _spelled(text)
    words = re.findall(r"[a-z]+", spelled)
    is_plain = re.fullmatch(r"(?:[a-z ,'/-]|\^ ?-?[0-9])*", spelled) is not None
    changes_number = (
        NO_UNITS & set(words)
        or set(words) <= NO_UNITS_ALONE
        or any(map(_NUMBER_WORD.fullmatch, words))
        or _PARTS_PER.search(spelled)
        or _ROMAN_COUNT.search(text)
    )
    return is_plain and 0 < len(words) <= 4 and not changes_number


def names_a_value(text: str) -> bool:
    """Return whether words before an = can name a value: not "anything but", nor "half the answer"."""
    words = text.casefold().split()
    if DENIALS & set(words) or words[0] in HEDGES or words[-1] in HEDGES or _BOUND.search(text.casefold()):
        return False
    if {"answer", "result", "solution"} & set(words) and ALTERATIONS & set(words):
        return False
    is_other = OTHERS & set(words) and set(words) <= OTHERS | RESULTS
    return not is_other or set(words) <= LABELS


def same_unit(gold: str, answer: str) -> bool:
    """Return whether two units are the same, like ``cm^2`` and ``square centimeters``; "units" matches any unit."""
    gold_unit, answer_unit = _canonical(gold), _canonical(answer)
    return gold_unit == answer_unit or (is_unit(answer) and answer_unit.partition("^")[0] == "unit")


def _spelled(text: str) -> str:
    """Return the unit in lower case, with a power for "squared"."""
    text = _SCALED.sub(lambda match: f"{SCALES[match[1]]}{UNITS[match[2].casefold()]}", text)
    text = _MERIDIEM.sub(r"\1m", " ".join(text.casefold().split())).replace(".", " ")
    text = re.sub(r"(?<=[a-z])([23])(?![0-9])", r"^\1", " ".join(text.split()))
    return _RAISED.sub(lambda match: f"{match[1]}^{match[2] or (2 if match[0].endswith('squared') else 3)}", text)


def _canonical(text: str) -> str:
    """Return a unit's words with their powers, sorted, so that ``m/s^2``, ``m s^-2`` and ``m per s squared`` agree."""
    words = re.findall(r"[a-z]+|\^ ?-?[0-9]|/", _spelled(text).replace(" per ", "/"))
    named = re.sub(r" ?(\^) ?| ?(/) ?", r"\1\2", " ".join(_singular(word) for word in words))
    named = _PLACE.sub(lambda match: f"{match[2]}^{2 if match[1] == 'square' else 3}", named)
    powers: Counter[str] = Counter()
    for index, part in enumerate(named.split("/")):
        for word, power in re.findall(r"([a-z]+)(?:\^(-?[0-9]))?", part):
            powers[word] += int(power or 1) * (-1 if index else 1)
    return " ".join(f"{word}^{power}" if power != 1 else word for word, power in sorted(powers.items()))


def _singular(word: str) -> str:
    if word in UNITS:
        return UNITS[word]
    if len(word) > 3 and word.endswith("s") and not word.endswith("ss"):
        return UNITS.get(word[:-1], word[:-1])
    return word
