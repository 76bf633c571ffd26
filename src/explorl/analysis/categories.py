"""What the tokens of an answer do: formal reasoning, logical structuring, metacognitive, or semantic support.

Deng et al. 2025, Table 1 (the categories) and Table 5 (tokens of each by answer). The words are in
``token_categories.yaml`` beside this file; a user's own file of the same form can take its place.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import Any

from explorl.core.documents import DocumentError
from explorl.core.yaml_documents import parse_yaml

CATEGORIES = ("formal reasoning", "logical structuring", "metacognitive", "semantic support")
"""The last is what no list names."""
REST = CATEGORIES[-1]
_MARKS = str.maketrans({"Ġ": " ", "▁": " ", "Ċ": "\n", "’": "'"})  # byte-level and sentence-piece tokens, as stored
_APOSTROPHES = str.maketrans({"’": "'"})


class CategoryError(ValueError):
    """Word lists that cannot be used; the message names the file, the key and a good value."""


@dataclass(frozen=True, eq=False)
class WordLists:
    """Words and patterns by category and group, ready to be looked for."""

    source: str
    groups: tuple[tuple[str, str], ...]
    """Category and name of each group, in the order of the file."""
    pattern: re.Pattern[str]
    """Finds a word as ``word``, and what a pattern of the fourth group names as ``g3_…``."""
    words: Mapping[str, int]
    """The group of each word, its case folded."""

    def spans(self, text: str) -> Iterable[tuple[int, int, int]]:
        """Start, end and group of what the lists name in a text, in order and without overlap."""
        for match in self.pattern.finditer(text.translate(_APOSTROPHES)):
            name = match.lastgroup or ""
            # None: letters that the expression takes for each other, and case folding does not
            group = self.words.get(_plain(match.group())) if name == "word" else int(name[1:].split("_")[0])
            if group is not None and match.end() > match.start():
                yield match.start(), match.end(), group


def word_lists(path: str | Path | None = None) -> WordLists:
    """The lists of a file; those that come with Explorl where none is given."""
    return _standard() if path is None else _read(Path(path))


def category_of(token: str, lists: WordLists | None = None) -> str:
    """The category of a token by itself. Where its neighbours are known, `categories_of` sees words that were split.

    Marks that tokenizers write for a space (``Ġ``, ``▁``) are no part of the token.
    """
    return _category_of(token, lists or _standard())


def categories_of(tokens: Sequence[str], lists: WordLists | None = None) -> list[str]:
    """The category of each token of an answer, read in its text: in ``there``, ``fore`` both are logical structuring.

    A token of several parts, like ``2x``, has the category of the first part that is named.
    """
    lists = lists or _standard()
    return [REST if group is None else lists.groups[group][0] for group in groups_of(tokens, lists)]


def groups_of(tokens: Sequence[str], lists: WordLists) -> list[int | None]:
    """Which of ``lists.groups`` each token of an answer belongs to; None where no list names it."""
    found: list[int | None] = [None] * len(tokens)
    ends, end = [], 0
    for token in tokens:
        end += len(token)
        ends.append(end)
    place = 0
    for start, stop, group in lists.spans("".join(tokens)):
        while place < len(ends) and ends[place] <= start:
            place += 1
        at = place
        while at < len(ends) and (ends[at - 1] if at else 0) < stop:
            if found[at] is None:
                found[at] = group
            at += 1
    return found


@lru_cache(maxsize=1 << 16)
def _category_of(token: str, lists: WordLists) -> str:
    first = next(iter(lists.spans(token.translate(_MARKS))), None)
    return REST if first is None else lists.groups[first[2]][0]


@lru_cache(maxsize=1)
def _standard() -> WordLists:
    name = "token_categories.yaml"
    return parse_lists((resources.files("explorl.analysis") / name).read_text(encoding="utf-8"), name)


def _read(path: Path) -> WordLists:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise CategoryError(
            f"cannot read the word lists {path}: {error.strerror or error}; give the path of a YAML file such as "
            "categories.yaml"
        ) from None
    except UnicodeDecodeError as error:
        raise CategoryError(
            f"the word lists {path} are not UTF-8 text ({error.reason}); save the file as UTF-8"
        ) from None
    return parse_lists(text, str(path))


def parse_lists(text: str, source: str) -> WordLists:
    """Word lists from the text of a YAML file; `CategoryError` where it is none."""
    try:
        loaded = parse_yaml(text, f"the file of word lists {source}")
    except DocumentError as error:
        raise CategoryError(f"{error}; see token_categories.yaml") from None
    good = "{metacognitive: {revising: {words: [wait, actually]}}}"
    if not isinstance(loaded, dict) or not loaded:
        raise CategoryError(f"the word lists {source} are not a mapping of categories; write for instance {good}")
    groups: list[tuple[str, str]] = []
    words: dict[str, int] = {}
    patterns: list[tuple[int, str]] = []
    for category, parts in loaded.items():
        if category not in CATEGORIES:
            raise CategoryError(
                f"the word lists {source} have the key {category!r}; the categories are {', '.join(CATEGORIES)}"
            )
        if not isinstance(parts, dict):
            raise CategoryError(f"{source}, {category!r} is {_short(parts)}; give groups, such as {good}")
        for group, entries in parts.items():
            where = f"{source}, '{category}: {group}'"
            own_words, own_patterns = _entries(entries, where)
            for word in own_words:
                key = _plain(word)
                if words.setdefault(key, len(groups)) != len(groups):
                    first = ": ".join(groups[words[key]])
                    raise CategoryError(f"{where} lists {word!r}, which '{first}' lists too; keep it in one of them")
            patterns += [(len(groups), pattern) for pattern in own_patterns]
            groups.append((category, str(group)))
    if not words and not patterns:
        raise CategoryError(f"the word lists {source} name no word and no pattern; write for instance {good}")
    return WordLists(source, tuple(groups), _compiled(words, patterns), words)


def _entries(entries: Any, where: str) -> tuple[list[str], list[str]]:
    """Words and patterns of one group."""
    good = "{words: [wait, actually]}"
    if not isinstance(entries, dict) or not entries:
        raise CategoryError(f"{where} is {_short(entries)}; give words or patterns, such as {good}")
    for key, values in entries.items():
        if key not in ("words", "patterns"):
            raise CategoryError(f"{where} has the key {key!r}; give words or patterns, such as {good}")
        if not isinstance(values, list):
            raise CategoryError(f"{where}: {key} is {_short(values)}; give a list, such as [wait, actually]")
        for value in values:
            if not isinstance(value, str) or not value.strip():
                raise CategoryError(f"{where}: {key} has {_short(value)}, which is no text; quote it, such as 'no'")
    for pattern in entries.get("patterns", []):
        try:
            compiled = re.compile(f"(?P<one>{pattern})")  # as it will stand among others
        except (re.error, RecursionError, OverflowError) as error:
            raise CategoryError(
                rf"{where}: patterns has {pattern!r}, which is no regular expression ({error}); write one such as '\d+'"
            ) from None
        if compiled.match("") or compiled.groups > 1:
            fault = (
                "a group; write (?:…) instead"
                if compiled.groups > 1
                else r"a match in nothing; write one such as '\d+'"
            )
            raise CategoryError(f"{where}: patterns has {pattern!r}, which has {fault}")
    return entries.get("words", []), entries.get("patterns", [])


def _compiled(words: Iterable[str], patterns: Sequence[tuple[int, str]]) -> re.Pattern[str]:
    """One expression: the longest of the words, else the first of the patterns."""
    letters = [word for word in words if _is_letter(word[0])]
    signs = sorted((word for word in words if not _is_letter(word[0])), key=len, reverse=True)
    # a list of alternatives would be tried word by word at each letter of a text
    found = ([rf"(?<!\w){_trie(letters)}"] if letters else []) + [_whole(word, _escaped(word)) for word in signs]
    parts = [f"(?P<word>(?i:{'|'.join(found)}))"] if found else []
    parts += [f"(?P<g{group}_{place}>{pattern})" for place, (group, pattern) in enumerate(patterns)]
    return re.compile("|".join(parts))


def _trie(words: Sequence[str], depth: int = 0) -> str:
    """An expression for the longest of the words, in which equal beginnings are read once."""
    following: dict[str, list[str]] = {}
    for word in words:
        if len(word) > depth:
            following.setdefault(word[depth], []).append(word)
    choices = [_escaped(letter) + _trie(rest, depth + 1) for letter, rest in following.items()]
    ended = next((word for word in words if len(word) == depth), None)
    if ended is not None:
        choices.append(_whole(ended, ""))
    return choices[0] if len(choices) == 1 else f"(?:{'|'.join(choices)})"


def _whole(word: str, expression: str) -> str:
    return expression + (r"(?!\w)" if _is_letter(word[-1]) else "")


def _escaped(word: str) -> str:
    return re.escape(word).replace("\\ ", r"\s+")


def _plain(word: str) -> str:
    return " ".join(word.casefold().translate(_APOSTROPHES).split())


def _is_letter(letter: str) -> bool:
    return re.match(r"\w", letter) is not None


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:79] + "…"
