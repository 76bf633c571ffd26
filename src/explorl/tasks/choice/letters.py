r"""Find the option that a completion chooses: ``Answer: C``, ``\boxed{C}``, ``I'd go with C``, ``Option C is correct``.

The first of these that the completion has decides:

1. the last statement of a choice: a label ("Answer: C"), a sentence ("The answer is (C)."), a box, or a last line with
   only a letter;
2. the last remark that a choice is right ("Option C is correct", "So it must be C.");
3. the only letter in brackets in the last line, except for letters that it denies ("not (A) but (C)");
4. the letter before the only line that looks like an option ("C) iron"), if that is the first or the last line.

Two letters in one of these ("A or B", "A; B", "both A and C") choose no option, and a choice that is denied or
withdrawn ("not A", "A is wrong", "A. No wait, C") does not count. If a completion has ``</think>``, only the text after
it counts, unless that chooses nothing. A letter that may be a word ("a number", "I think") or a symbol ("C = 5",
"D-glucose") is not an option.

No function here raises, whatever the text, and each takes at most a few passes over it.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from explorl.tasks.answer_span import box_spans

LETTERS = "ABCDEFGHIJ"

_MARKUP = r"[*_`$\"'“‘\s]{0,8}"
_TEXT = r"(?:\\(?:\(|(?:text|textbf|mathrm|mathbf|mbox)\{))?"
_MARKS = r"(?:[*_`$}\"'”’]|\\\)){0,4}"
_WORDS = (
    r"(?:(?i:both|either|the|la|option|opción|choice|letter|answer|probably|possibly|maybe|perhaps|(?:most )?likely"
    r"|also|clearly|definitely|certainly|indeed|therefore|thus|hence|simply|just|actually|alternatively|else)"
    r"[ \t]{1,4}){0,4}"
)
# Between two options of which neither is chosen; across the end of a line only words count.
_JOINT = (
    r"(?:[ \t]{0,4}[(（]?[,;/&+|?、，；–—-]\s{0,4}(?:(?:and|or)\b\s{1,4})?"
    r"|\s{0,4}[(（]?\b(?:and/or|and|or|to|through|und|oder|ou|et)\b\s{1,4}"
    r"|[ \t]{1,2}[(（](?=(?:maybe|possibly|perhaps|alternatively)\b)|\s?[和或及]\s?)"
)
# After a letter without brackets: the end, a full stop, or text that does not follow an article or a symbol.
_AFTER = (
    rf"(?=(?<![ai])[*_`]{{1,3}}\s|{_MARKS}(?:[ \t]*\n|\s*\Z|\s?<[/|]|\s?\|\s*(?:\n|\Z)|[.)。）](?![A-Za-z0-9])"
    r"|(?<=[A-J*_`$}])[,;:!?\]，；！](?![A-Za-z0-9])|\s{1,4}(?:because|since|which|is)\b"
    r"|(?<![AaIi])\s{1,4}(?:as|due)\b|\s?[–—]\s|\s-\s|\s?[✓✔✅☑]|(?<![ai])\s{0,2}[(（](?![A-Za-z0-9][)）])"
    r"|(?<![ai])\s{1,4}(?:and\snot|but\snot|rather\sthan|instead\sof)\b|(?<![AaIi])\s{1,4}(?:not|over)\b"
    rf"|[ \t]{{0,2}}[(\[][A-J][)\]]|{_JOINT}{_WORDS}[(\[]?[A-J]\b))"
)
_WRAPPED = r"[(\[（【](?P<wrapped>[A-Ja-j])[)\]）】]"
_OPTION = rf"{_TEXT}(?:{_WRAPPED}|(?P<bare>[A-Ja-j]){_AFTER})"
_MORE = re.compile(rf"{_MARKS}(?:{_JOINT}{_MARKUP}{_WORDS}{_MARKUP}|[ \t]{{0,2}}(?=[(\[][A-J])){_OPTION}")

_LABEL = r"(?P<label>[:=：>]|[-–—]{1,2})"
_CUE = (
    r"(?:\b(?i:answer|ans|antwort|réponse|respuesta|resposta|risposta|ответ)|答案|答え|正解|정답|####"
    r"|\b(?i:(?:correct|right|best|final|my)\s{1,4}(?:option|choice|one|letter|statement|pick|guess)))"
    r"(?:\s{1,2}(?i:to(?!\s{1,2}(?:avoid|exclude|eliminate|reject|discard|rule))|for|among|from|of|here|choice|option"
    r"|letter|correcta|correcte)(?:\s{1,2}\w{1,15}){0,6}?)?"
)
_COPULA = (
    r"(?:(?:\s|['’](?=s\s))(?i:is|s|(?:would|must|should|will)\s{1,4}be|(?:has|seems|appears)\s{1,4}to\s{1,4}be"
    r"|ist|est|es|é|è)(?![\w'’])|[是为は])"
)
_NOT_BUT = r"(?:not\s{1,4}[(\[]?[A-J][)\]]?,?\s{1,4}but\s{1,4}(?:rather\s)?)?"
_STATEMENTS = (
    re.compile(
        rf"{_CUE}{_MARKUP}(?:{_COPULA}{_MARKUP}[:：]?|{_LABEL}|(?<=####)){_MARKUP}{_NOT_BUT}{_WORDS}{_MARKUP}{_OPTION}"
    ),
    re.compile(rf"(?<![不别非未勿])(?<!不\w)(?:故选|应选|选择|选)[:：]?{_MARKUP}{_OPTION}"),
    # "I'd go with C"
    re.compile(
        r"\b(?:I(?:['’](?:d|ll|m)|\s{1,2}(?:would|will|am|must))?(?:\s{1,2}(?:therefore|thus))?\s{1,2}"
        r"(?:choose|chose|pick|picked|select|selected|vote\sfor|opt\sfor)"
        r"|(?:I(?:['’](?:d|ll|m)|\s(?:would|will|am))?|(?i:let['’]s|let\sme|let\sus))\s{1,2}(?:go|going|settle|stick)"
        rf"\s(?:with|for|on)|my\schoice:)\s{{1,4}}{_MARKUP}{_WORDS}{_MARKUP}{_OPTION}"
    ),
    # "I think it's C", "No wait, C"
    re.compile(
        r"\b(?i:no[,:;.!–—]|wait|actually|correction|sorry|oops|i\smean|make\sthat|make\sit|change\sthat\sto"
        r"|i(?:['’]d)?\s(?:would\s)?(?:think|believe|guess|say))"
        rf"[,:;.!…\s–—-]{{0,4}}(?<=[,:;.!…\s–—-])(?i:it['’]s\s|it\sis\s|that['’]s\s)?{_WORDS}{_MARKUP}{_TEXT}"
        rf"(?:{_WRAPPED}|(?P<bare>[A-J]))(?={_MARKS}(?:\s{{0,4}}\Z|[ \t]*\n|[.!;](?![A-Za-z0-9])|\s?<[/|]))"
    ),
)
_DOUBTED = re.compile(
    r"\b(?i:if|whether|suppose|supposing|assume|assuming|unless|not|never|\w{1,8}n['’]t|wrong|incorrect|false|bad|worst"
    r"|least|second[ -]best|(?<!no )(?<!without )doubt|(?:not|n['’]t)[ \t](?:sure|certain|clear|convinced)"
    r"|except|besides|excluding|other[ \t]than|(?:any|every)thing[ \t]but|all[ \t]but"
    r"|(?:wrong|incorrect|mistake|mistaken|error|fallacy|tempting)(?:[ \t]\w{1,12}){0,2}[ \t]to[ \t]\w{1,12}"
    r"|(?:students|people|many|some|others|one)(?:[ \t]\w{1,12}){0,2}[ \t](?:think|say|believe|assume|claim|guess))"
    r"[ \t]{1,4}(?i:that[ \t])?(?i:the[ \t]|an?[ \t]|my[ \t]|your[ \t]|our[ \t])?(?:\w{1,20}[ \t])?\Z"
)
"""Matches before a statement, in the same line."""
_DENIED = re.compile(
    rf"{_MARKS}\s{{0,4}}(?i:(?:is|are|was|can|could|would|does|do|did|must|seems?|appears?)\s?(?:not|n['’]t|never)\b"
    r"|cannot\b|[(（](?:wrong|incorrect|false)\b|[(（]not?[)）]|[,?]?\s?not?[.!\s]{0,4}\Z"
    r"|(?:is|are|was|seems?|appears?|must\sbe|would\sbe|turns\sout)\s(?:\w{1,12}\s)?"
    r"(?:wrong|incorrect|false|impossible|invalid|ruled|eliminated|excluded|out)\b)"
)
_WITHDRAWN = re.compile(
    rf"{_MARKS}[)\].,;:!?…\s–—-]{{0,8}}(?i:(?:(?:no|hmm|oh|but)[,.!…\s]{{1,4}})?(?:wait|scratch\sthat|never\s?mind)\b"
    r"|(?:no|wait|hmm|actually|but)?[,.!…\s]{0,4}(?:that|this)(?:['’]s|\sis)\s(?:wrong|incorrect|not\s(?:right|correct)))"
)

_BOXED = re.compile(
    rf"\s*{_TEXT}\s*{_WORDS}[(\[]?(?P<wrapped>[A-Ja-j])"
    r"(?:[)\]}.:*\s]{0,8}|[)\].:]\}?(?:\s|\\[ ,;:]|\\quad).{0,400})",
    re.DOTALL,
)
_LISTED_BOX = re.compile(rf"\s*{_TEXT}\s*{_WORDS}{_OPTION}")
_BETWEEN_BOXES = re.compile(rf"\}}?\$?{_JOINT}\$?\\{{1,2}}(?:boxed|fbox)\s*\{{")
_BARE_LINE = re.compile(rf"{_MARKUP}{_TEXT}[(\[（]?(?P<wrapped>[A-Ja-j])[)\]）}}.。:*_`$\s]{{0,8}}")
_BARE_LIST = re.compile(rf"{_MARKUP}{_WORDS}{_OPTION}")
_LINE_END = re.compile(r"[)\]}.:*_`$\s]{0,8}")

_LETTER = r"[(\[（]?[A-J][)\]）]?"
_RIGHT = re.compile(
    rf"{_MARKS}\s{{1,4}}(?i:is|are)\s{{1,4}}{_WORDS}(?i:both\s|all\s)?(?i:the\s)?(?i:only\s)?"
    r"(?i:(?:correct|right|best|true)\s{1,4}(?:answer|option|choice|one|statement)s?\b"
    r"|(?:correct|right)(?=[*_`\s]{0,4}(?:[.,;:!)]|\Z|\n|</)|\s{1,4}(?:because|since|as|here)\b)|(?:answer|solution)\b)"
)
_SUBJECT = re.compile(
    rf"(?<![\w'’)\]-])(?:(?P<noun>(?i:option|choice|answer|statement)s?)\s{{1,4}})?{_TEXT}[*_`$\"“]{{0,4}}"
    rf"(?P<letters>{_LETTER}(?:{_JOINT}{_LETTER}){{0,9}})\Z"
)
_SO = re.compile(
    r"(?<![\w'’-])(?i:so|thus|therefore|hence|leaves|it\sis|it['’]s|(?:it|this|that)\smust\sbe|this\sis|that\sis|option"
    rf"|choice|answer)[,:]?\s{{1,4}}{_MARKUP}(?i:it['’]s\s|it\sis\s)?{_WORDS}{_MARKUP}{_TEXT}"
    rf"(?:{_WRAPPED}|(?P<bare>[A-J]))(?={_MARKS}[.!。]?{_MARKS}(?:\s{{0,4}}\Z|[ \t]*\n|\s?<[/|]|(?<=[.!])\s))"
)
_BRACKETED = re.compile(r"(?<![\w)\]])\(([A-J])\)(?![\w(])")
_DENIES = re.compile(
    r"(?i:\b(?:not|never|neither|nor|except|excludes?|excluding|eliminates?|eliminating|rules?\sout|ruling\sout|than|cannot"
    r"|instead\sof|wrong|incorrect|unlike|without)|n['’]t(?:\s\w{1,12})?)[\s*_`:]{1,4}(?i:option\s|choice\s|be\s)?\Z"
)
_PAIR = re.compile(rf"\b([A-J])[)\]]?{_JOINT}{_WORDS}[(\[]?([A-J])\b")
_LISTED = re.compile(r"[*\-\s]{0,8}[(\[]?(?P<wrapped>[A-J])(?:[)\].:]|,?\s(?:because|since)\b|\s[-–—]\s)")
_NO_ANSWER = re.compile(r"(?i:\b(?:not|wrong|incorrect|false)\b)|n['’]t\b|\b[A-J](?:[.):]|\s*\Z)")

_MANY = "it chooses more than one option"
_NONE = "it chooses no option"
_TAIL = 2_000


class ChosenOption(NamedTuple):
    """The chosen letter or None, the reason if it is None, and the number of statements of a choice."""

    letter: str | None
    error: str | None
    statements: int


def chosen_option(text: str) -> ChosenOption:
    """Return the option that a text chooses, by the rules above."""
    _, closed, visible = text.rpartition("</think>")
    if closed and (choice := _find_choice(visible)).error != _NONE:
        return choice
    return _find_choice(text)


def _find_choice(text: str) -> ChosenOption:
    statements = _statements(text)
    if statements:
        return _single_choice(statements[max(statements)], len(statements))
    remarks = _remarks(text)
    if remarks:
        return _single_choice(remarks[max(remarks)], 1)
    lines = _lines(text[-_TAIL:])
    letters = _bracketed(lines) or _listed(text, lines)
    return _single_choice(letters, 1) if letters else ChosenOption(None, _NONE, 0)


def _single_choice(letters: frozenset[str], statements: int) -> ChosenOption:
    return ChosenOption(min(letters), None, statements) if len(letters) == 1 else ChosenOption(None, _MANY, statements)


def _statements(text: str) -> dict[int, frozenset[str]]:
    """Return the letters of each statement by the position of its end."""
    statements: dict[int, frozenset[str]] = {}
    for pattern in _STATEMENTS:
        for match in pattern.finditer(text):
            if not _is_article(match, text) and not _is_doubted(match, text):
                letters, end = _letters(match, text)
                if not _is_withdrawn(text, end):
                    statements[match.end()] = letters
    return statements | _boxed(text) | _last_line(text)


def _letters(match: re.Match[str], text: str) -> tuple[frozenset[str], int]:
    """Return the letter of a match and another one that follows it ("A or B"), and their end."""
    letters, end = {_letter(match)}, match.end()
    while len(letters) == 1 and (more := _MORE.match(text, end)):
        if _DENIED.match(text, more.end()):
            break
        letters.add(_letter(more))
        end = more.end()
    return frozenset(letters), end


def _boxed(text: str) -> dict[int, frozenset[str]]:
    """Return the letters of each box by the position of its end; boxes joined like "A or B" count as one."""
    boxed: dict[int, frozenset[str]] = {}
    previous: tuple[int, frozenset[str]] | None = None  # the end of the previous box's content and its letters
    for span in box_spans(text):
        letters = _in_box(text[slice(*span)]) if span and span[1] - span[0] <= 500 else frozenset()
        if not span or not letters:
            previous = None
            continue
        if previous and _BETWEEN_BOXES.fullmatch(text, previous[0], span[0]):
            letters |= previous[1]
        previous = span[1], letters
        boxed[span[1]] = letters
    return boxed


def _in_box(content: str) -> frozenset[str]:
    start = _LISTED_BOX.match(content)
    if start and len(letters := _letters(start, content)[0]) > 1:
        return letters
    if boxed := _BOXED.fullmatch(content):
        return frozenset(_letter(boxed))
    stripped = content.strip()
    return frozenset(stripped) if 1 < len(stripped) <= len(LETTERS) and set(stripped) <= set(LETTERS) else frozenset()


def _last_line(text: str) -> dict[int, frozenset[str]]:
    """Return the letters of the last line by the position of their end, if it has nothing else."""
    lines = text[-_TAIL:].rstrip().splitlines()
    if not lines:
        return {}
    *above, line = lines
    if bare := _BARE_LINE.fullmatch(line):
        if line.strip() in ("a", "i"):
            return {}
        matches = [bare, _BARE_LINE.fullmatch(above[-1]) if above and above[-1].strip() else None]
        return {text.rindex(bare["wrapped"]) + 1: frozenset(_letter(match) for match in matches if match)}
    if start := _BARE_LIST.match(line):
        letters, end = _letters(start, line)
        if len(letters) > 1 and _LINE_END.fullmatch(line, end):
            return {len(text): letters}
    return {}


def _remarks(text: str) -> dict[int, frozenset[str]]:
    """Return the letters of each remark that an option is right by the position of its end."""
    remarks: dict[int, frozenset[str]] = {}
    for right in _RIGHT.finditer(text):
        start = max(0, right.start() - 80)
        subject = _SUBJECT.search(text, start, right.start())
        if subject and not _is_doubted(subject, text):
            letters = frozenset(re.findall(r"\b[A-J]\b", subject["letters"]))
            if letters != {"I"} or subject["noun"]:
                remarks[right.end()] = letters
    for match in _SO.finditer(text):
        if not _is_doubted(match, text) and not _is_withdrawn(text, match.end()):
            remarks[match.end()] = frozenset(_letter(match))
    return remarks


def _bracketed(lines: list[str]) -> frozenset[str]:
    """Return the only letter in brackets in the last line, or an empty set."""
    if not lines:
        return frozenset()
    letters: set[str] = set()
    denied: set[str] = set()
    for match in _BRACKETED.finditer(lines[-1]):
        is_denied = _DENIES.search(lines[-1], 0, match.start()) or _DENIED.match(lines[-1], match.end())
        (denied if is_denied else letters).add(match[1])
    letters -= denied
    pairs = {letter for pair in _PAIR.finditer(lines[-1]) if pair[1] != pair[2] for letter in pair.groups()}
    # A truncated list of the options chooses none.
    is_list = len(lines) > 1 and all(_LISTED.match(line) for line in lines[-2:])
    return frozenset() if len(letters) != 1 or is_list or letters & (pairs - denied) else frozenset(letters)


def _listed(text: str, lines: list[str]) -> frozenset[str]:
    """Return the letter of the only line that looks like an option, if it is the first or the last, or an empty set."""
    first = _lines(text[:_TAIL])
    if not lines:
        return frozenset()
    marked = {line: match for line in (*first, *lines) if (match := _LISTED.match(line))}
    if len(marked) != 1:
        return frozenset()
    [(line, match)] = marked.items()
    is_answer = line in (first[0], lines[-1]) and match["wrapped"] != "I" and not _NO_ANSWER.search(line, match.end())
    return frozenset(match["wrapped"]) if is_answer else frozenset()


def _lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.strip()]


def _is_article(match: re.Match[str], text: str) -> bool:
    """Return whether a letter may be a word of a truncated sentence: "The answer is a"."""
    has_label = match.groupdict().get("label") is not None
    return not has_label and match["bare"] in ("a", "i") and text[match.end() :][:1] not in (".", ")")


def _is_doubted(match: re.Match[str], text: str) -> bool:
    """Return whether the text before a match makes it a supposition or a denial: "if the answer is C"."""
    return _DOUBTED.search(text, max(0, match.start() - 60), match.start()) is not None


def _is_withdrawn(text: str, end: int) -> bool:
    """Return whether the text after a statement denies or withdraws it: "C is wrong", "C. No wait"."""
    return bool(_DENIED.match(text, end) or _WITHDRAWN.match(text, end))


def _letter(match: re.Match[str]) -> str:
    groups = match.groupdict()
    return str(groups["wrapped"] or groups["bare"]).upper()
