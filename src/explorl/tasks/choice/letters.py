r"""Which option a completion chooses: ``Answer: C``, ``\boxed{C}``, ``I'd go with C``, ``Option C is correct``, ``C``.

What counts, in this order:

1. the last statement of a choice: a label ("Answer: C"), a sentence ("The answer is (C)."), a box, or a last line that
   is nothing but a letter;
2. without one, the last remark that a choice is right ("Option C is correct", "So it must be C.");
3. the only letter in brackets of the last line, those aside that it denies ("not (A) but (C)");
4. the letter before the only line that looks like an option ("C) iron"), if that is the first or the last line.

Two letters in one of these ("A or B", "A; B", "both A and C") choose none, and what is denied or taken back ("not A",
"A is wrong", "A. No wait, C") is not chosen. Of a completion with ``</think>`` what follows it counts, if that chooses
anything. A letter that may be a word ("a number", "I think") or a symbol ("C = 5", "D-glucose") is not an option.

Nothing here raises, whatever the text, and nothing takes longer than a few passes over it.
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
# What stands between two options of which neither is chosen; over a line's end only words do.
_JOINT = (
    r"(?:[ \t]{0,4}[(（]?[,;/&+|?、，；–—-]\s{0,4}(?:(?:and|or)\b\s{1,4})?"
    r"|\s{0,4}[(（]?\b(?:and/or|and|or|to|through|und|oder|ou|et)\b\s{1,4}"
    r"|[ \t]{1,2}[(（](?=(?:maybe|possibly|perhaps|alternatively)\b)|\s?[和或及]\s?)"
)
# What may follow a letter without brackets: the end, a stop that ends a word, or what follows no article and no symbol.
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
"""What stands before, in the same line."""
_DENIED = re.compile(
    rf"{_MARKS}\s{{0,4}}(?i:(?:is|are|was|can|could|would|does|do|did|must|seems?|appears?)\s?(?:not|n['’]t|never)\b"
    r"|cannot\b|[(（](?:wrong|incorrect|false)\b|[(（]not?[)）]|[,?]?\s?not?[.!\s]{0,4}\Z"
    r"|(?:is|are|was|seems?|appears?|must\sbe|would\sbe|turns\sout)\s(?:\w{1,12}\s)?"
    r"(?:wrong|incorrect|false|impossible|invalid|ruled|eliminated|excluded|out)\b)"
)
_TAKEN_BACK = re.compile(
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
    """The letter chosen, None if there is none; why not; and how many statements of a choice there are."""

    letter: str | None
    error: str | None
    statements: int


def chosen_option(text: str) -> ChosenOption:
    """The one option that a text chooses, by the rules above."""
    _, thought, said = text.rpartition("</think>")
    if thought and (choice := _chosen(said)).error != _NONE:
        return choice
    return _chosen(text)


def _chosen(text: str) -> ChosenOption:
    stated = _statements(text)
    if stated:
        return _choice(stated[max(stated)], len(stated))
    remarks = _remarks(text)
    if remarks:
        return _choice(remarks[max(remarks)], 1)
    lines = _lines(text[-_TAIL:])
    found = _bracketed(lines) or _listed(text, lines)
    return _choice(found, 1) if found else ChosenOption(None, _NONE, 0)


def _choice(letters: frozenset[str], statements: int) -> ChosenOption:
    return ChosenOption(min(letters), None, statements) if len(letters) == 1 else ChosenOption(None, _MANY, statements)


def _statements(text: str) -> dict[int, frozenset[str]]:
    """The letters of each statement, by where it ends."""
    stated: dict[int, frozenset[str]] = {}
    for pattern in _STATEMENTS:
        for match in pattern.finditer(text):
            if not _is_article(match, text) and not _is_doubted(match, text):
                letters, end = _letters(match, text)
                if not _is_withdrawn(text, end):
                    stated[match.end()] = letters
    return stated | _boxed(text) | _last_line(text)


def _letters(match: re.Match[str], text: str) -> tuple[frozenset[str], int]:
    """The letter of a match and those that follow it ("A, B or C"), and where they end; after a second all is said."""
    letters, end = {_letter(match)}, match.end()
    while len(letters) == 1 and (more := _MORE.match(text, end)):
        if _DENIED.match(text, more.end()):
            break
        letters.add(_letter(more))
        end = more.end()
    return frozenset(letters), end


def _boxed(text: str) -> dict[int, frozenset[str]]:
    stated: dict[int, frozenset[str]] = {}
    before: tuple[int, frozenset[str]] | None = None  # the box before, where its content ends and its letters
    for span in box_spans(text):
        letters = _in_box(text[slice(*span)]) if span and span[1] - span[0] <= 500 else frozenset()
        if not span or not letters:
            before = None
            continue
        if before and _BETWEEN_BOXES.fullmatch(text, before[0], span[0]):
            letters |= before[1]
        before = span[1], letters
        stated[span[1]] = letters
    return stated


def _in_box(content: str) -> frozenset[str]:
    start = _LISTED_BOX.match(content)
    if start and len(letters := _letters(start, content)[0]) > 1:
        return letters
    if boxed := _BOXED.fullmatch(content):
        return frozenset(_letter(boxed))
    stripped = content.strip()
    return frozenset(stripped) if 1 < len(stripped) <= len(LETTERS) and set(stripped) <= set(LETTERS) else frozenset()


def _last_line(text: str) -> dict[int, frozenset[str]]:
    """A last line of nothing but a letter, or of letters."""
    lines = text[-_TAIL:].rstrip().splitlines()
    if not lines:
        return {}
    *above, line = lines
    if bare := _BARE_LINE.fullmatch(line):
        if line.strip() in ("a", "i"):
            return {}
        bares = [bare, _BARE_LINE.fullmatch(above[-1]) if above and above[-1].strip() else None]
        return {text.rindex(bare["wrapped"]) + 1: frozenset(_letter(match) for match in bares if match)}
    if (start := _BARE_LIST.match(line)) and len((found := _letters(start, line))[0]) > 1:
        return {len(text): found[0]} if _LINE_END.fullmatch(line, found[1]) else {}
    return {}


def _remarks(text: str) -> dict[int, frozenset[str]]:
    """The letters of each remark that an option is right, by where it ends."""
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
    if not lines:
        return frozenset()
    found: set[str] = set()
    denied: set[str] = set()
    for match in _BRACKETED.finditer(lines[-1]):
        is_denied = _DENIES.search(lines[-1], 0, match.start()) or _DENIED.match(lines[-1], match.end())
        (denied if is_denied else found).add(match[1])
    found -= denied
    pairs = {letter for pair in _PAIR.finditer(lines[-1]) if pair[1] != pair[2] for letter in pair.groups()}
    # A list of the options, broken off, chooses none.
    is_list = len(lines) > 1 and all(_LISTED.match(line) for line in lines[-2:])
    return frozenset() if len(found) != 1 or is_list or found & (pairs - denied) else frozenset(found)


def _listed(text: str, lines: list[str]) -> frozenset[str]:
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
    """Whether a letter may be a word of a sentence that breaks off: "The answer is a"."""
    has_label = match.groupdict().get("label") is not None
    return not has_label and match["bare"] in ("a", "i") and text[match.end() :][:1] not in (".", ")")


def _is_doubted(match: re.Match[str], text: str) -> bool:
    """Whether it is only supposed, or denied beforehand: "if the answer is C", "the wrong answer is C"."""
    return _DOUBTED.search(text, max(0, match.start() - 60), match.start()) is not None


def _is_withdrawn(text: str, end: int) -> bool:
    """Whether what ends there is denied at once: "C is wrong", "C. No wait"."""
    return bool(_DENIED.match(text, end) or _TAKEN_BACK.match(text, end))


def _letter(match: re.Match[str]) -> str:
    groups = match.groupdict()
    return str(groups["wrapped"] or groups["bare"]).upper()
