"""Recognize and compare units after a number."""

from __future__ import annotations

import re
from collections import Counter

UNITS = {
    "mm": "millimeter", "cm": "centimeter", "dm": "decimeter", "m": "meter", "km": "kilometer", "in": "inch",
    "inches": "inch", "ft": "foot", "feet": "foot", "yd": "yard", "mi": "mile", "metre": "meter",
    "centimetre": "centimeter", "millimetre": "millimeter", "kilometre": "kilometer", "litre": "liter", "l": "liter",
    "ml": "milliliter", "g": "gram", "kg": "kilogram", "mg": "milligram", "lb": "pound", "lbs": "pound", "oz": "ounce",
    "s": "second", "sec": "second", "min": "minute", "h": "hour", "hr": "hour", "hrs": "hour", "yr": "year",
    "deg": "degree", "usd": "dollar", "sq": "square", "cu": "cubic", "people": "person", "men": "man", "women": "woman",
    "children": "child", "mph": "mile/hour", "kph": "kilometer/hour", "kmh": "kilometer/hour", "rad": "radian",
    "n": "newton", "j": "joule", "w": "watt", "k": "kelvin", "v": "volt", "pa": "pascal", "hz": "hertz", "mol": "mole",
    "ev": "electronvolt", "erg": "erg", "radii": "radius", "am": "am", "pm": "pm",
    "arcsec": "arcsecond", "arcmin": "arcminute",
}  # fmt: skip
"""Maps the spellings of units to their names."""

_SIGNS = frozenset({"m", "s", "g", "h", "L", "N", "J", "W", "K", "V"})

# Words that change the number before them, or do not state it.
_NO_UNITS = frozenset({
    "hundred", "thousand", "million", "billion", "trillion", "dozen", "score", "half", "halves", "third", "thirds",
    "quarter", "quarters", "fourths", "fifth", "fifths", "sixth", "sixths", "seventh", "sevenths", "eighth",
    "eighths", "ninth", "ninths", "tenth", "tenths", "eleventh", "elevenths", "twelfth", "twelfths", "sixteenth",
    "sixteenths", "twentieth", "twentieths", "hundredth", "hundredths", "thousandth", "thousandths", "millionth",
    "millionths", "hundreds", "thousands", "millions", "billions", "trillions", "dozens", "scores", "pair",
    "pairs", "couple", "gross", "grand", "bn", "mn", "mil", "mio", "mrd", "lakh", "crore", "percent", "percentage",
    "pct", "permille", "double", "triple", "twice", "plus", "minus", "times", "over", "divided", "multiplied",
    "mod", "modulo", "base", "power", "factorial", "choose", "root", "sum", "difference", "product", "not", "no",
    "none", "never", "isnt", "wrong", "incorrect", "false", "nothing", "unknown", "undefined", "maybe", "perhaps",
    "probably", "possibly", "about", "approximately", "approx", "around", "roughly", "nearly", "almost", "circa",
    "least", "most", "more", "less", "fewer", "greater", "than", "under", "above", "below", "between", "to",
    "through", "is", "are", "was", "equals", "equal", "or", "and", "but", "if", "unless", "except", "otherwise",
    "else", "the", "answer", "a", "an", "any", "all", "some", "one", "two", "three", "four", "five", "six",
    "seven", "eight", "nine", "ten", "zero", "negative", "positive", "inverse", "reciprocal", "squared", "cubed",
    "eleven", "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen", "twenty",
    "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety", "ones", "tens", "myriad", "myriads", "googol",
    "googolplex", "lakhs", "lac", "lacs", "crores", "fourth", "ppm", "ppb", "ppt", "permil", "promille", "mille", "bps",
    "percents", "percentages", "percentile", "halve", "halved", "halving", "doubled", "doubling", "thrice", "tripled",
    "tripling", "treble", "trebled", "quadruple", "quadrupled", "quintuple", "quintupled", "quartered", "squaring",
    "cubing", "increased", "decreased", "incremented", "decremented", "reduced", "subtracted", "negated", "inverted",
    "truncated", "logarithm", "sqrt", "cbrt", "sin", "cos", "tan", "log", "ln", "exp", "pi", "tau", "infinity", "ish",
    "either", "neither", "nor", "xor", "versus", "vs", "instead", "rather", "too", "something", "anything",
    "everything", "hardly", "barely", "scarcely", "wrongly", "incorrectly", "untrue", "non", "anti", "umpteen",
    "thirded", "sextuple", "sextupled", "septuple", "septupled", "octuple", "octupled", "decuple", "decupled",
    "grosses", "kk", "tn", "nought", "naught", "exponent",
})  # fmt: skip
# Words that are not a unit alone: "5 imaginary" is 5i, but there may be 5 imaginary roots.
_NO_UNITS_ALONE = frozenset({
    "imaginary", "infinite", "repeating", "recurring", "opposite", "opposites", "reciprocals", "inverses", "negatives",
    "conjugate", "conjugated", "added", "raised", "lowered", "rounded", "short", "shy", "past", "beyond", "without",
    "excluding", "excluded", "exceeding", "kilo", "mega", "giga", "tera", "milli", "micro", "nano", "centi",
    "deci", "deca", "hecto", "peta", "exa", "kibi", "mebi", "gibi", "wan", "oku", "kharab", "of", "upon", "nil",
    "exclusive", "inclusive", "prime", "ad", "bc", "bce", "st", "nd", "rd", "th",
})  # fmt: skip
_NUMBER_WORD = re.compile(r"[a-z]*ill(?:ion|iard)(?:th)?s?|[a-z]*(?:tieth|teenth)s?|(?!scaf)[a-z]+fold")
_PARTS_PER = re.compile(r"\bper (?:cent|centum|mil|mill)\b|\bp c\b|\bbasis points?\b|\be\^")
_ROMAN = re.compile(r"\b(?:[IVX]{2,}|MM)\b")
# Words before an = that deny the value after it: anywhere; as the first or last word; next to words for a result.
_DENIALS = frozenset({"anything", "everything", "nothing", "whatever", "isn't", "isnt", "doesn't", "doesnt", "unequal",
    "cannot", "can't", "won't",
})  # fmt: skip
_HEDGES = frozenset({
    "not", "no", "non", "never", "neither", "but", "nor", "or", "than", "minus", "plus", "about", "approximately",
    "around", "roughly", "nearly", "almost", "maybe", "perhaps", "possibly", "probably", "unlike", "unless", "except",
    "divided", "multiplied", "exceeds", "excluding", "without",
})  # fmt: skip
_OTHERS = frozenset({
    "half", "twice", "double", "triple", "thrice", "squared", "cubed", "opposite", "inverse", "reciprocal", "negation",
    "negative", "doubled", "halved", "times", "wrong", "incorrect", "false", "untrue", "bad", "excluded", "reject",
    "rejected", "avoid", "avoided", "hardly", "impossible", "invalid",
})  # fmt: skip
_LABELS = frozenset({"half", "opposite", "inverse", "reciprocal"})
_RESULTS = frozenset({"the", "a", "of", "my", "our", "answer", "result", "solution", "it", "this", "that"})
_BOUND = re.compile(
    r"\b(?:at (?:least|most)|(?:different|far) from|close to|ruled out)$"
    r"|\b(?:wrong|incorrect|bad) (?:value|number|choice|option|guess)$"
)
# Words that change a result: "the answer plus one".
_ALTERATIONS = frozenset({
    "plus", "minus", "times", "mod", "modulo", "more", "less", "than", "over", "square", "squared", "cube", "cubed",
    "root", "log", "ln", "logarithm", "factorial", "divided", "multiplied", "added", "subtracted",
})  # fmt: skip
# Capitals do not matter in a unit, except in these: MW is not mW.
_SCALES = {"m": "milli", "M": "mega", "micro": "micro"}
_SCALED = re.compile(r"\b([mM]|micro)(W|Pa|Hz|J|V|eV|N|m|s|g)\b")
_MERIDIEM = re.compile(r"\b([ap])\. ?m\b\.?")
_PLACE = re.compile(r"\b(square|cubic) ([a-z]+)")
_RAISED = re.compile(r"([a-z]+)(?: squared| cubed|\^ ?([0-9]))")


def is_abbreviation(word: str) -> bool:
    """Return whether a word that is not a command is the sign of a unit, as in ``5 m`` and ``5 km``."""
    return word in _SIGNS if len(word) == 1 else word.casefold() in UNITS or _SCALED.fullmatch(word) is not None


def is_unit(text: str) -> bool:
    """Return whether the words after a number can be what it counts or measures."""
    spelled = _spelled(text)
    words = re.findall(r"[a-z]+", spelled)
    is_plain = re.fullmatch(r"(?:[a-z ,'/-]|\^ ?-?[0-9])*", spelled) is not None
    changes_number = (
        _NO_UNITS & set(words)
        or set(words) <= _NO_UNITS_ALONE
        or any(map(_NUMBER_WORD.fullmatch, words))
        or _PARTS_PER.search(spelled)
        or _ROMAN.search(text)
    )
    return is_plain and 0 < len(words) <= 4 and not changes_number


def names_a_value(text: str) -> bool:
    """Return whether words before an = can name a value: not "anything but", nor "half the answer"."""
    words = text.casefold().split()
    if _DENIALS & set(words) or words[0] in _HEDGES or words[-1] in _HEDGES or _BOUND.search(text.casefold()):
        return False
    if {"answer", "result", "solution"} & set(words) and _ALTERATIONS & set(words):
        return False
    is_other = _OTHERS & set(words) and set(words) <= _OTHERS | _RESULTS
    return not is_other or set(words) <= _LABELS


def same_unit(gold: str, answer: str) -> bool:
    """Return whether two units are the same, like ``cm^2`` and ``square centimeters``; "units" matches any unit."""
    gold_unit, answer_unit = _canonical(gold), _canonical(answer)
    return gold_unit == answer_unit or (is_unit(answer) and answer_unit.partition("^")[0] == "unit")


def _spelled(text: str) -> str:
    """Return the unit in lower case, with a power for "squared"."""
    text = _SCALED.sub(lambda match: f"{_SCALES[match[1]]}{UNITS[match[2].casefold()]}", text)
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
