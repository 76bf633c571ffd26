"""Words that the judge of mathematical answers knows: units, numbers, and words that change a value."""

from __future__ import annotations

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

SIGNS = frozenset({"m", "s", "g", "h", "L", "N", "J", "W", "K", "V"})

# Words that change the number before them, or do not state it.
NO_UNITS = frozenset({
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
NO_UNITS_ALONE = frozenset({
    "imaginary", "infinite", "repeating", "recurring", "opposite", "opposites", "reciprocals", "inverses", "negatives",
    "conjugate", "conjugated", "added", "raised", "lowered", "rounded", "short", "shy", "past", "beyond", "without",
    "excluding", "excluded", "exceeding", "kilo", "mega", "giga", "tera", "milli", "micro", "nano", "centi",
    "deci", "deca", "hecto", "peta", "exa", "kibi", "mebi", "gibi", "wan", "oku", "kharab", "of", "upon", "nil",
    "exclusive", "inclusive", "prime", "ad", "bc", "bce", "st", "nd", "rd", "th",
})  # fmt: skip

# Words before an = that deny the value after it: anywhere; as the first or last word; next to words for a result.
DENIALS = frozenset({"anything", "everything", "nothing", "whatever", "isn't", "isnt", "doesn't", "doesnt", "unequal",
    "cannot", "can't", "won't",
})  # fmt: skip
HEDGES = frozenset({
    "not", "no", "non", "never", "neither", "but", "nor", "or", "than", "minus", "plus", "about", "approximately",
    "around", "roughly", "nearly", "almost", "maybe", "perhaps", "possibly", "probably", "unlike", "unless", "except",
    "divided", "multiplied", "exceeds", "excluding", "without",
})  # fmt: skip
OTHERS = frozenset({
    "half", "twice", "double", "triple", "thrice", "squared", "cubed", "opposite", "inverse", "reciprocal", "negation",
    "negative", "doubled", "halved", "times", "wrong", "incorrect", "false", "untrue", "bad", "excluded", "reject",
    "rejected", "avoid", "avoided", "hardly", "impossible", "invalid",
})  # fmt: skip
LABELS = frozenset({"half", "opposite", "inverse", "reciprocal"})
RESULTS = frozenset({"the", "a", "of", "my", "our", "answer", "result", "solution", "it", "this", "that"})
# Words that change a result: "the answer plus one".
ALTERATIONS = frozenset({
    "plus", "minus", "times", "mod", "modulo", "more", "less", "than", "over", "square", "squared", "cube", "cubed",
    "root", "log", "ln", "logarithm", "factorial", "divided", "multiplied", "added", "subtracted",
})  # fmt: skip
SCALES = {"m": "milli", "M": "mega", "micro": "micro"}

# Words

SHORT_WORDS = frozenset(
    {"yes", "no", "odd", "all", "one", "two", "six", "ten", "red", "sun", "mon", "tue", "wed", "thu", "fri", "sat"}
)
MATHEMATICS = frozenset({"sqrt", "sin", "cos", "tan", "cot", "sec", "csc", "log", "exp", "arcsin", "arccos", "arctan"})
PHRASES = {
    "no solution": r"\emptyset", "no solutions": r"\emptyset", "no real solution": r"\emptyset",
    "no real solutions": r"\emptyset", "empty set": r"\emptyset", "none": r"\emptyset", "infinity": r"\infty",
    "positive infinity": r"\infty", "negative infinity": r"-\infty", "all real numbers": r"\mathbb{R}",
    "all reals": r"\mathbb{R}", "real numbers": r"\mathbb{R}",
}  # fmt: skip
"""Maps words, as `normalize_words` returns them, to LaTeX."""
_BELOW_TWENTY = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen "
    "seventeen eighteen nineteen"
)
_TENS = "twenty thirty forty fifty sixty seventy eighty ninety"
NUMBERS = {name: str(value) for value, name in enumerate(_BELOW_TWENTY.split())} | {
    f"{tens} {unit}".strip(): str(10 * index + value)
    for index, tens in enumerate(_TENS.split(), start=2)
    for value, unit in enumerate(["", *_BELOW_TWENTY.split()[1:10]])
}
"""Maps the names of whole numbers below a hundred to their digits."""
