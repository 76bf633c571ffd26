"""Categories of tokens: formal reasoning, logical structuring, metacognitive, or semantic support.

Deng et al. 2025, Table 1 (the categories) and Table 5 (tokens of each per completion). The words are in
``token_categories.yaml`` beside this file; users can give another file of the same format.
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
"""The last contains everything that no list matches."""
REST = CATEGORIES[-1]
_APOSTROPHES = str.maketrans({"’": "'"})


class CategoryError(ValueError):
    """Invalid word lists; the message names the file, the key and a valid value."""


@dataclass(frozen=True, eq=False)
class WordLists:
    """Words and patterns by category and group, compiled for searching."""

    source: str
    groups: tuple[tuple[str, str], ...]
    """Category and name of each group, in the order of the file."""
    pattern: re.Pattern[str]
    """Matches a word as ``word``, and a pattern of the fourth group as ``g3_…``."""
    words: Mapping[str, int]
    """The group of each case-folded word."""

    def spans(self, text: str) -> Iterable[tuple[int, int, int]]:
        """Yield start, end and group of each match in a text, in order and without overlap."""
        for match in self.pattern.finditer(text.translate(_APOSTROPHES)):
            name = match.lastgroup or ""
            # None if the expression ignores a difference in case that case folding keeps
            group = self.words.get(_plain(match.group())) if name == "word" else int(name[1:].split("_")[0])
            if group is not None and match.end() > match.start():
                yield match.start(), match.end(), group


def word_lists(path: str | Path | None = None) -> WordLists:
    """Return the word lists of a file, by default those that come with Explorl."""
    return _default_lists() if path is None else _read(Path(path))


def categories_of(tokens: Sequence[str], lists: WordLists | None = None) -> list[str]:
    """Return the category of each token of a completion: ``there``, ``fore`` are both logical structuring.

    A token with several parts, such as ``2x``, has the category of the first part that matches.
    """
    lists = lists or _default_lists()
    return [REST if group is None else lists.groups[group][0] for group in groups_of(tokens, lists)]


def groups_of(tokens: Sequence[str], lists: WordLists) -> list[int | None]:
    """Return the index into ``lists.groups`` of each token of a completion; None if nothing matches."""
    groups: list[int | None] = [None] * len(tokens)
    ends, end = [], 0
    for token in tokens:
        end += len(token)
        ends.append(end)
    first = 0
    for start, stop, group in lists.spans("".join(tokens)):
        while first < len(ends) and ends[first] <= start:
            first += 1
        index = first
        while index < len(ends) and (ends[index - 1] if index else 0) < stop:
            if groups[index] is None:
                groups[index] = group
            index += 1
    return groups


@lru_cache(maxsize=1)
def _default_lists() -> WordLists:
    name = "token_categories.yaml"
    return parse_lists((resources.files("explorl.analysis") / name).read_text(encoding="utf-8"), name)


def _read(path: Path) -> WordLists:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise CategoryError(
            f"cannot read the word lists {path}: {error.strerror or error}; give the path of a YAML file, such as "
            "categories.yaml"
        ) from None
    except UnicodeDecodeError as error:
        raise CategoryError(
            f"cannot read the word lists {path}: not UTF-8 ({error.reason}); save the file as UTF-8"
        ) from None
    return parse_lists(text, str(path))


def parse_lists(text: str, source: str) -> WordLists:
    """Parse the text of a YAML file of word lists; raise `CategoryError` if it is invalid."""
    try:
        loaded = parse_yaml(text, f"the file of word lists {source}")
    except DocumentError as error:
        raise CategoryError(f"{error}; see token_categories.yaml") from None
    good = "{metacognitive: {revising: {words: [wait, actually]}}}"
    if not isinstance(loaded, dict) or not loaded:
        raise CategoryError(f"the word lists {source} must be a mapping of categories, such as {good}")
    groups: list[tuple[str, str]] = []
    words: dict[str, int] = {}
    patterns: list[tuple[int, str]] = []
    for category, parts in loaded.items():
        if category not in CATEGORIES:
            raise CategoryError(
                f"unknown category {category!r} in the word lists {source}; use {', '.join(CATEGORIES)}"
            )
        if not isinstance(parts, dict):
            raise CategoryError(f"{source}: {category!r} is {_short(parts)}; use groups, such as {good}")
        for group, entries in parts.items():
            where = f"{source}, '{category}: {group}'"
            group_words, group_patterns = _entries(entries, where)
            for word in group_words:
                key = _plain(word)
                if words.setdefault(key, len(groups)) != len(groups):
                    first = ": ".join(groups[words[key]])
                    raise CategoryError(f"{where} lists {word!r}, which is also in '{first}'; keep it in one of them")
            patterns += [(len(groups), pattern) for pattern in group_patterns]
            groups.append((category, str(group)))
    if not words and not patterns:
        raise CategoryError(f"the word lists {source} have no words or patterns; write for example {good}")
    return WordLists(source, tuple(groups), _compiled(words, patterns), words)


def _entries(entries: Any, where: str) -> tuple[list[str], list[str]]:
    """Return the words and patterns of one group."""
    good = "{words: [wait, actually]}"
    if not isinstance(entries, dict) or not entries:
        raise CategoryError(f"{where} is {_short(entries)}; use words or patterns, such as {good}")
    for key, values in entries.items():
        if key not in ("words", "patterns"):
            raise CategoryError(f"{where}: unknown key {key!r}; use words or patterns, such as {good}")
        if not isinstance(values, list):
            raise CategoryError(f"{where}: {key} is {_short(values)}; use a list, such as [wait, actually]")
        for value in values:
            if not isinstance(value, str) or not value.strip():
                raise CategoryError(
                    f"{where}: {key} contains {_short(value)}, which is not text; quote it, such as 'no'"
                )
    for pattern in entries.get("patterns", []):
        try:
            compiled = re.compile(f"(?P<one>{pattern})")  # in the form used in the combined expression
        except (re.error, RecursionError, OverflowError) as error:
            raise CategoryError(
                rf"{where}: invalid regular expression {pattern!r} ({error}); use one such as '\d+'"
            ) from None
        if compiled.match("") or compiled.groups > 1:
            fault = (
                "contains a group; write (?:…) instead"
                if compiled.groups > 1
                else r"matches empty text; use one such as '\d+'"
            )
            raise CategoryError(f"{where}: the pattern {pattern!r} {fault}")
    return entries.get("words", []), entries.get("patterns", [])


def _compiled(words: Iterable[str], patterns: Sequence[tuple[int, str]]) -> re.Pattern[str]:
    """Return one expression that matches the longest word, or else the first pattern."""
    letters = [word for word in words if _is_letter(word[0])]
    signs = sorted((word for word in words if not _is_letter(word[0])), key=len, reverse=True)
    # a plain list of alternatives would try every word at every letter of a text
    alternatives = ([rf"(?<!\w){_trie(letters)}"] if letters else []) + [_whole(word, _escaped(word)) for word in signs]
    parts = [f"(?P<word>(?i:{'|'.join(alternatives)}))"] if alternatives else []
    parts += [f"(?P<g{group}_{index}>{pattern})" for index, (group, pattern) in enumerate(patterns)]
    return re.compile("|".join(parts))


def _trie(words: Sequence[str], depth: int = 0) -> str:
    """Return an expression that matches the longest of the words, and shares their common prefixes."""
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
