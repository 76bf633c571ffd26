"""Words around a number: those that keep its value, and those that change it.

Words before a number tend to change it ("about 42", "log 42"), so only those on a list are allowed. A number is mostly
followed by a noun, so after it all words are allowed except those on a list.
"""

from __future__ import annotations

import re

from explorl.tasks.math.vocabulary import UNITS

LEADS = re.compile(
    # what is
    r"(?:\b(?:is|are|was|were|be|been|being|equals?|has|have|had|gives?|gave|yields|becomes|became|remains?|remained"
    r"|leaves?|left|gets?|got|makes?|made|contains?|contained|holds?|held|totals?|totaling|answer|result|value|sum|number"
    r"|count|amount"
    # verbs of word problems
    r"|costs?|needs?|needed|earns?|earned|spends?|spent|pays?|paid|sells?|sold|buys?|bought|purchased?|uses?|used|takes?"
    r"|took|reads?|runs?|ran|walks?|walked|drives?|drove|scores?|scored|loses?|lost|receives?|received|eats?|ate|drinks?"
    r"|drank|weighs?|weighed|climbs?|climbed|sleeps?|slept|sends?|sent|delivers?|delivered|works?|worked|picks?|picked"
    r"|watch(?:es|ed)?|rides?|rode|study|studies|studied|keeps?|kept|grows?|grew|carry|carries|carried|plays?|played"
    r"|hikes?|hiked|finds?|found|saves?|saved|owes?|owed|charges?|charged|collects?|collected|travels?|traveled|wants?"
    r"|bakes?|baked|catch|catches|caught|sees?|saw|writes?|wrote|produces?|produced|owns?|owned|wins?|won|raises?|raised"
    r"|plants?|planted|fills?|filled|completes?|completed|finish|finishes|finished"
    # words that keep a number's value
    r"|the|these|those|all|exactly|precisely|only|just|so|thus|therefore|hence|then|finally|additional|extra|another|in"
    r"|at|for|with|on|into|us|usd|eur|gbp|jpy|inr|cny|rmb|aud|cad|chf|rs"
    r"|(?:total|sum|amount|value|cost|price|average|speed|rate|length|width|height|area|volume|perimeter|weight|distance"
    r"|profit|score|balance|answer|mean|median|age|size|discount|loss|payment|population|temperature) of"
    r"|(?:equal|equates|amounts?|adds? up|sums?|totals? up|comes|comes out|works out|simplifies|evaluates|reduces"
    r"|increase[sd]?|decrease[sd]?|grows|grew|drops|dropped|rises|rose) to|ends? up with"
    # other languages
    r"|ist|lautet|es|est|vale|è|é|равен|ответ|答案是|答案为|答案|答えは|一共|总共|等于)|['’](?:s|re))\Z"
)
"""Words that may come directly before a number."""

DOUBTS = re.compile(
    r"\b(?:not|no|never|none|nor|neither|nothing|nobody|cannot|hardly|barely|wrong|incorrect|false|untrue|mistaken"
    r"|mistake|ruled out|if|unless|whether|suppose|supposing|assume|assuming|except|excluding|besides|without|instead"
    r"|rather|unlike|but|than|other|either|or|between|maybe|perhaps|possibly|probably|(?:may|might|could) be|about"
    r"|approximately|approx|around|roughly|nearly|almost|circa|ca|close|near|over|under|above|below|beyond|exceeds?"
    r"|at (?:least|most)|minus|plus|half|twice|thrice|doubled?|tripled?|halved|times|squared|cubed|reciprocal|inverse"
    r"|opposite|negative|negated|negation|absolute|factorial|sqrt|log|ln|lg|exp|sin|cos|tan|cot|sec|csc|arcsin|arccos"
    r"|arctan|sinh|cosh|tanh|abs|floor|ceil|ceiling|mod|modulo|divided|multiplied|det|dim|gcd|lcm|max|lim|sup|inf"
    r"|(?:square|cube) root|successor|predecessor"
    r"|(?:square|cube|root|third|quarter|fifth|tenth|multiple|divisor|factor|complement|logarithm) of)\b|n['’]t\b"
)
"""Words that may not come anywhere before a number, nor in the name of what equals it."""

CHANGES = re.compile(
    r"(?:or|and|not|no|nor|than|under|above|below|mod|modulo|base|plus|minus|multiplied|divided|choose|permute|st|nd|rd|th"
    r"|ish|odd|something|half|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|twenty|thirty|forty|fifty|sixty"
    r"|seventy|eighty|ninety|zero|(?:twelv|twenti|thirti|forti|fifti|sixti|seventi|eighti|nineti)es|umpteen|mega|meg|giga"
    r"|tera|kibi|mebi|gibi|googol(?:plex)?|myriads?|kharab|oku|(?:quadr|quint|sext|sept|oct|non|dec|cent|z|gaz|baz)illions?"
    r"|milliards?|mill(?:ones|ón|ionen)|(?:two|three|four|five|six|seven|eight|nine|ten|hundred|thousand)-?fold|i?[eè]me"
    r"|percentile|about|around|almost|nearly|max|maximum|minimum|sin|cos|tan|log|ln|lg|exp|sqrt|root|lim"
    r"|det|pi|tau|phi|bce?|ad|mille|mio|mrd|mln|tsd|тыс|млн|млрд)\b|[万亿千百十億萬兆만억천십]"
)
"""Beginnings that the first word after a number may not have."""

UNDOES = re.compile(
    r"\b(?:squared|cubed|factorial|minus|reciprocal|inverted|negated|doubled|tripled|trebled|quadrupled|quintupled|halved"
    r"|raised|exponent|itself|incremented|decremented|(?:increased|decreased|reduced) by|less (?:than )?(?:one|two|ten)"
    r"|give or take|upwards|baker['’]?s dozen|great gross|percent (?:percent|of (?:a|one) percent)"
    r"|(?:double|twice|thrice|inverse|opposite|negative|exclusive|estimated?|hex|octal|binary)(?=\W*\Z)"
    r"|approximately|approx|roughly|maybe|perhaps|possibly|probably|(?:divided|multiplied) by|at (?:least|most)"
    r"|(?:to|of) the (?:\w+ )?power|to the (?:second|third|fourth|fifth|sixth|seventh|eighth|ninth|tenth|nth)(?=\W*\Z)"
    r"|and (?:(?:an?|one) )?(?:half|third|quarter|fifth|tenth|bit|change|something|up)"
    r"|and counting|(?:a|one) (?:half|third|fifth|tenth)|or (?:so|more|less|fewer|another|thereabouts|higher|lower)"
    r"|in (?:binary|octal|hex|hexadecimal|base)|(?:below|under) (?:zero|freezing)"
    r"|per (?:ten|hundred|thousand|million|billion|myriad|mille?|mil)"
    r"|(?:over|to|by|under|times|plus) (?:a |the )?(?:two|three|four|five|six|seven|eight|nine|ten"
    r"|twelve|twenty|hundred|thousand|million|billion|zero|half|third)(?=\W*\Z)"
    r"|(?:is|are|was|were)(?: not|n['’]t)(?: \w+){0,3} (?:answer|right|correct|true)"
    r"|(?:is|are|was|were|be|seems) (?:\w+ )?(?:wrong|incorrect|false|untrue)"
    r"|(?:not|n['’]t|no|wrong|incorrect|false|untrue)(?=\W*\Z))\b"
)
"""Words that may not come anywhere after a number."""

_SCALED = {
    "k": "k K thou", "Ki": "Ki ki", "M": "M MM mn Mn mil", "B": "B bn Bn bil bln", "T": "T tn",
    "dozen": "dozen dozens doz", "score": "score", "gross": "gross", "grand": "grand",
    "lakh": "lakh lakhs lac lacs", "crore": "crore crores cr Cr", "ten": "tens", "hundred": "hundreds",
    "thousand": "thousands", "million": "millions", "billion": "billions", "half": "halves",
    "third": "thirds", "fourth": "fourths", "fifth": "fifths", "sixth": "sixths", "seventh": "sevenths",
    "eighth": "eighths", "ninth": "ninths", "tenth": "tenths", "twelfth": "twelfths", "hundredth": "hundredths",
    "thousandth": "thousandths", "millionth": "millionths", "permille": "permille ‰", "ppm": "ppm", "ppb": "ppb",
    "basis point": "basis bps",
}  # fmt: skip
SCALED = {word: name for name, words in _SCALED.items() for word in words.split()}
"""Maps words to units that are numbers themselves, like "dozen"."""

_MEASURES = {
    "dollar": "$ usd dollar buck", "cent": "¢ cent", "euro": "€ eur euro", "pound": "£ gbp", "yen": "¥ jpy yen",
    "rupee": "₹ rs inr rupee", "yuan": "cny rmb yuan 元", "percent": "% percent pct percentage", "degree": "°",
    "minute": "minute", "day": "day", "week": "week", "month": "month",
}  # fmt: skip
_COUNTED = frozenset(("person", "man", "woman", "child", "radius"))
_UNITS = {word: name.partition("/")[0] for word, name in UNITS.items() if name not in _COUNTED}
MEASURES = {
    **{name: name for name in _UNITS.values()},
    **_UNITS,
    **{word: name for name, words in _MEASURES.items() for word in words.split()},
}
"""Maps words and signs to what they measure: "min" and "minute" are one measure."""

SIGNS = frozenset("msghLlNJWVFC")
"""Units of one letter that cannot be confused with a variable or a scale."""

SHORT = re.compile(
    "in|of|on|at|as|we|us|my|me|he|up|go|so|it|is|be|am|pm|an|by|do|if|no|or|to|cm|mm|km|dm|nm|kg|mg|ml|dl|cl|cc|lb|oz|ft"
    "|yd|mi|hr|qt|pt|sq|cu|ha|ms|ns|hz|db|kb|mb|gb|tb|kw|mw|kj|kv|kn|mv|ev|px|rs|tv|pc|cd|id|uk|le|la|de|du|en|au|un",
    re.IGNORECASE,
)
"""Words of two letters; any other two letters are a product of variables."""
