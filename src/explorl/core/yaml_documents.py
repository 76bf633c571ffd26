"""Read YAML from untrusted sources in bounded time and memory.

A document of a few lines can stand for billions of values through aliases. `DocumentError` says what is wrong with it,
and where.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import yaml

from explorl.core.documents import MAX_DEPTH, DocumentError, check_size, shortened

MAX_VALUES = 100_000
"""Maximum number of values of a document after its aliases are expanded."""
MAX_DIGITS = 300
"""Maximum number of characters of a number."""


class _Loader(yaml.SafeLoader):
    """Loads YAML whose values are those of JSON: dates and times are text.

    Floats may be written 5e-6, which YAML 1.1 reads as text.
    """

    depth = 0
    values = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        self.depth += 1
        self.values += 1
        if self.depth > MAX_DEPTH or self.values > MAX_VALUES:
            problem = f"nested over {MAX_DEPTH} levels" if self.depth > MAX_DEPTH else f"over {MAX_VALUES:,} values"
            raise yaml.composer.ComposerError(None, None, f"{problem}; make it smaller", self.peek_event().start_mark)
        try:
            return super().compose_node(parent, index)
        finally:
            self.depth -= 1

    def construct_scalar(self, node: Any) -> Any:
        if node.tag in _NUMBERS and len(node.value) > MAX_DIGITS:
            problem = f"a number of over {MAX_DIGITS} characters; put text into quotes"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)
        return super().construct_scalar(node)


_NUMBERS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(?:\d[\d_]*(?:\.[\d_]*)?|\.\d[\d_]*)[eE][-+]?\d+$"),
    list("-+0123456789."),
)
_KINDS = ("null", "bool", "int", "float", "str", "seq", "map")
_Loader.yaml_constructors = {
    tag: make
    for tag, make in yaml.SafeLoader.yaml_constructors.items()
    if tag is None or tag.removeprefix("tag:yaml.org,2002:") in _KINDS
}


def parse_yaml(text: str, place: str) -> Any:
    """Parse a YAML document; raise DocumentError if it is invalid or has duplicate keys."""
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is None:
            return None
        check_size(node, _nodes, MAX_VALUES, f"{place}, with its aliases written out,")
        _reject_duplicate_keys(node, place, ())
        return loader.construct_document(node)
    except yaml.YAMLError as error:
        raise DocumentError(f"{place} is not YAML: {shortened(_yaml_fault(error, text))}") from None
    except (ValueError, LookupError) as error:
        if isinstance(error, DocumentError):
            raise
        raise DocumentError(f"{place} has a value that its tag does not fit: {shortened(str(error))}") from None


def _nodes(node: Any) -> Iterable[Any]:
    if isinstance(node, yaml.MappingNode):
        return [part for pair in node.value for part in pair]
    return node.value if isinstance(node, yaml.SequenceNode) else ()


def _reject_duplicate_keys(node: Any, place: str, trail: tuple[str, ...], visited: set[int] | None = None) -> None:
    """Raise DocumentError for a duplicate key: in YAML the second wins, so an arm or a section would be lost.

    ``visited`` holds the ids of checked nodes, which aliases may refer to again.
    """
    visited = set() if visited is None else visited
    if id(node) in visited:
        return
    visited.add(id(node))
    if isinstance(node, yaml.MappingNode):
        lines: dict[str, int] = {}
        for key, value in node.value:
            line, name = key.start_mark.line + 1, str(key.value)
            if name in lines:
                entry = f"arm {name!r}" if trail[-1:] == ("arms",) else f"key {'.'.join((*trail, name))}"
                raise DocumentError(
                    f"{place} has the {entry} twice, in lines {lines[name]} and {line}; keep or rename one"
                )
            lines[name] = line
            _reject_duplicate_keys(value, place, (*trail, name), visited)
    elif isinstance(node, yaml.SequenceNode):
        for item in node.value:
            _reject_duplicate_keys(item, place, trail, visited)


def _yaml_fault(error: yaml.YAMLError, text: str) -> str:
    """Return in one line where and why a text is not YAML."""
    mark = getattr(error, "problem_mark", None)
    if mark is None:
        return " ".join(str(error).split())
    lines = text.splitlines() or [""]
    line = lines[min(mark.line, len(lines) - 1)]
    if "\t" in line[: len(line) - len(line.lstrip())]:
        return f"line {mark.line + 1} is indented with a tab; indent with spaces, two for each level"
    start = getattr(error, "context_mark", None) or mark
    since = f" (in what starts in line {start.line + 1})" if start.line != mark.line else ""
    return f"line {mark.line + 1}, column {mark.column + 1}{since}: {getattr(error, 'problem', error)}"
