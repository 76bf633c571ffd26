r"""Which option a completion chooses: ``Answer: C``, ``\boxed{C}``, ``The answer is (C).``, or a last line ``C``.

Nothing here raises, whatever the text, and nothing takes longer than a few passes over it. A letter that may be a word
("a number", "I think") or a symbol ("C = 5", "D-glucose") is not taken for an option.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from explorl.tasks.boxed import boxes

LETTERS = "ABCDEFGHIJ"

_MARKUP = r"[*_`$\s]{0,8}"
_TEXT = r"(?:\\(?:\(|(?:text|textbf|mathrm|mathbf|mbox)\{))?"
_JOINT = r"\s{0,4}(?:,\s{0,4}(?:and\s|or\s)?|/|&|\band\s|\bor\s)\s{0,4}"
# What may follow a letter without brackets: the end, a stop that ends a word, or what follows no article and no symbol.
_AFTER = (
    rf"(?=(?:[*_`$}}]|\\\)){{0,4}}(?:[ \t]*\n|\s*\Z|\s?</|[.)](?![A-Za-z0-9])|(?<=[A-J*_`$}}])[,;:!?\]](?![A-Za-z0-9])"
    rf"|\s{{1,4}}(?:because|since|which|is)\b|(?<![AaIi])\s{{1,4}}(?:as|due)\b|\s?[–—]\s|\s-\s|{_JOINT}[(\[]?[A-J]\b))"
)
_OPTION = rf"{_TEXT}(?:[(\[](?P<wrapped>[A-Ja-j])[)\]]|(?P<bare>[A-Ja-j]){_AFTER})"
_STATEMENT = re.compile(
    r"(?<!wrong )(?<!incorrect )\b(?i:answer|(?:correct|right|best|final)\s{1,4}(?:option|choice))"
    rf"{_MARKUP}(?:\s(?i:is|(?:would|must|should)\s{{1,4}}be){_MARKUP}[:：]?|(?P<label>[:=：>])){_MARKUP}"
    rf"(?:(?i:option|choice|letter)\s{{1,4}})?{_MARKUP}{_OPTION}"
)
_MORE = re.compile(rf"[*_`$}}]{{0,4}}{_JOINT}{_MARKUP}(?i:option\s)?{_MARKUP}{_OPTION}")
_BOXED = re.compile(
    rf"\s*{_TEXT}\s*[(\[]?(?P<wrapped>[A-Ja-j])(?:[)\]}}.:*\s]{{0,8}}|[)\].:]}}?\s.{{0,400}})", re.DOTALL
)
_BARE_LINE = re.compile(rf"{_MARKUP}{_TEXT}[(\[]?(?P<wrapped>[A-Ja-j])[)\]}}.:*_`$\s]{{0,8}}")
_BRACKETED = re.compile(r"(?<![\w)\]])\(([A-J])\)(?![\w(])")
_LISTED = re.compile(r"[*\-\s]{0,8}[(\[]?[A-J][)\].:]")


class Choice(NamedTuple):
    """The letter chosen, None if there is none; why not; and how many statements of a choice there are."""

    letter: str | None
    error: str | None
    statements: int


def chosen(text: str) -> Choice:
    """The option that the last statement names; without one, the only bracketed letter of the last line."""
    stated: dict[int, str | None] = {}
    for match in _STATEMENT.finditer(text):
        if match["label"] is None and _may_be_article(match["bare"], text[match.end() :][:1]):
            continue
        more = _MORE.match(text, match.end())
        letter = _letter(match)
        # "A or B" chooses neither.
        stated[match.end()] = None if more and _letter(more) != letter else letter
    for span in boxes(text):
        if span and (boxed := _BOXED.fullmatch(text, *span)):
            stated[boxed.end("wrapped")] = _letter(boxed)
    lines = [line for line in text[-2_000:].splitlines() if line.strip()]
    if lines and (bare := _BARE_LINE.fullmatch(lines[-1])) and not _may_be_article(lines[-1].strip()):
        stated[text.rindex(bare["wrapped"]) + 1] = _letter(bare)
    if stated:
        last = stated[max(stated)]
        return Choice(last, None if last else "it chooses more than one option", len(stated))
    bracketed = set(_BRACKETED.findall(lines[-1])) if lines else set()
    # A list of the options, broken off, chooses none.
    is_list = len(lines) > 1 and all(_LISTED.match(line) for line in lines[-2:])
    if len(bracketed) != 1 or is_list:
        return Choice(None, "it chooses no option", 0)
    return Choice(bracketed.pop(), None, 1)


def _may_be_article(letter: str | None, after: str = "") -> bool:
    """Whether a letter may be a word of a sentence that breaks off: "The answer is a"."""
    return letter in ("a", "i") and after not in (".", ")")


def _letter(match: re.Match[str]) -> str:
    groups = match.groupdict()
    return str(groups["wrapped"] or groups["bare"]).upper()
