"""Tool calls in text: where a completion asks for code to be run, and the block that brings it the output.

A model writes a fenced block of Python; as soon as the block is closed it is run in an `Interpreter`, and what a
notebook would show is appended as an output block, after which the model goes on (FORMULAS.md §5):

    ```python
    print(6 * 7)
    ```
    ```output
    42
    ```

Pure text: nothing here knows tokens or engines. Where a block ends never depends on what comes after it, so that it
does not matter after how many tokens somebody looks. See `Delimiters` for policies too small for Markdown.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from explorl.core.plugins import unknown
from explorl.sandbox.interpreter import CellResult, InterpreterLimits
from explorl.sandbox.interpreter_pool import InterpreterPool

_FENCE = re.compile(r"([ \t]*)(`{3,})([^`\n]*)")
"""The beginning of a line: indentation, the fence, and what it says, like the name of a language."""
_LONGEST_INLINE = 200


class FoundCall(NamedTuple):
    """A call in a text: the code is to be run now, and the text ends there for the time being."""

    source: str
    begin: int
    """Where its opening begins."""
    end: int
    """Behind its closing. What was sampled beyond it is not part of the rollout."""


class Fence(Protocol):
    """How calls and outputs are written."""

    @property
    def examples(self) -> tuple[str, ...]:
        """Texts that a policy must be able to write and read."""

    @property
    def opening(self) -> str:
        """A text that calls begin with."""

    @property
    def stop(self) -> str:
        """A text that every call ends with: calls are looked for whenever it has been written, and at the very end."""

    def find(self, text: str, start: int) -> FoundCall | None:
        """The first complete call that begins at ``start`` or behind it."""

    def block(self, result: CellResult, before: str) -> str:
        """What is appended to the text ``before`` when a call has this result."""


@dataclass(frozen=True)
class MarkdownFence:
    """Fenced blocks of Markdown, each fence at the beginning of a line.

    A block ends at the first line that begins with as many backticks as opened it, whatever follows them; code that has
    to write such a line can be put between four. Indentation of the fence is taken from its lines.
    """

    languages: tuple[str, ...] = ("python", "py", "python3")
    output: str = "output"
    """What the fence of an output block says."""

    def __post_init__(self) -> None:
        if not self.languages or not all(re.fullmatch(r"[^\s`]+", name) for name in (*self.languages, self.output)):
            raise ValueError(
                f"languages={self.languages!r}, output={self.output!r}: give words without spaces and backticks, like "
                "('python',) and 'output'"
            )

    @property
    def examples(self) -> tuple[str, ...]:
        return (self.opening, "\n```", f"\n```{self.output}\n", "```\n")

    @property
    def opening(self) -> str:
        return f"```{self.languages[0]}\n"

    @property
    def stop(self) -> str:
        return "```"

    def find(self, text: str, start: int) -> FoundCall | None:
        opened: re.Match[str] | None = None
        position = start if start == 0 or text[start - 1 : start] == "\n" else text.find("\n", start) + 1 or len(text)
        while position < len(text):
            line_end = text.find("\n", position) + 1 or len(text)
            fence = _FENCE.match(text, position, line_end)
            is_line = fence is not None and text[fence.end() : line_end] == "\n"
            if opened is not None and fence and len(fence[2]) >= len(opened[2]):
                if self._is_call(opened):
                    end = fence.start(2) + len(opened[2])
                    return FoundCall(_code(text[opened.end() : position], opened[1]), opened.start(2), end)
                if is_line:
                    opened = fence if fence[3].strip() else None
            elif opened is None and is_line:
                opened = fence
            position = line_end
        return None

    def _is_call(self, fence: re.Match[str]) -> bool:
        words = fence[3].split()
        return bool(words) and words[0].strip("{}.").lower() in self.languages

    def block(self, result: CellResult, before: str) -> str:
        """An output that has fences of its own gets a longer one around it."""
        runs = [len(run) for run in re.findall(r"`{3,}", result.text)]
        fence = "`" * (max(runs) + 1 if runs else 3)
        newline = "" if not before or before.endswith("\n") else "\n"
        ending = "" if not result.text or result.text.endswith("\n") else "\n"
        return f"{newline}{fence}{self.output}\n{result.text}{ending}{fence}\n"


@dataclass(frozen=True)
class Delimiters:
    """A call within a line, like ``<<12*34=408>>``: four short texts for a policy with a small vocabulary.

    This is the calculator of GSM8K (Cobbe et al. 2021): what stands between ``opening`` and ``closing`` is run, and the
    last line of what it shows comes between ``before_output`` and ``after_output``. Neither side may hold a newline.
    """

    opening: str = "<<"
    closing: str = "="
    before_output: str = ""
    after_output: str = ">>"

    def __post_init__(self) -> None:
        for name in ("opening", "closing"):
            value = getattr(self, name)
            if not value or "\n" in value:
                good = type(self).__dataclass_fields__[name].default
                raise ValueError(f"{name}={value!r}: give one or more characters of one line, like {good!r}")
        if self.opening == self.closing:
            raise ValueError(f"opening and closing are both {self.opening!r}: give two texts, like '<<' and '='")

    @property
    def examples(self) -> tuple[str, ...]:
        written = f"{self.opening}1{self.closing}{self.before_output}1{self.after_output}"
        return (written,)

    @property
    def stop(self) -> str:
        return self.closing

    def find(self, text: str, start: int) -> FoundCall | None:
        position = start
        while (begin := text.find(self.opening, position)) >= 0:
            inside = begin + len(self.opening)
            end = text.find(self.closing, inside)
            if end < 0:
                return None
            begin = text.rfind(self.opening, begin, end)  # one that was opened anew
            source = text[begin + len(self.opening) : end]
            if "\n" not in source and len(source) <= _LONGEST_INLINE:
                return FoundCall(source.strip(), begin, end + len(self.closing))
            position = begin + len(self.opening)
        return None

    def block(self, result: CellResult, before: str) -> str:
        """The last line alone, without what would end it early or begin a call."""
        lines = result.text.split("\n") if result.status != "refused" else ["no calls left"]
        shown = next((line.strip() for line in reversed(lines) if line.strip()), "")
        for mark in filter(None, (self.after_output.strip(), self.opening.strip())):
            shown = shown.replace(mark, " ")
        return f"{self.before_output}{shown}{self.after_output}"


def _code(content: str, indent: str) -> str:
    """What stands between the fences, behind the first one's line, as Python reads it."""
    lines = content.removeprefix("\r").removeprefix("\n").replace("\r\n", "\n").split("\n")
    code = "\n".join(line.removeprefix(indent) for line in lines)
    first = next((line for line in code.split("\n") if line.strip()), "")
    return textwrap.dedent(code) if first[:1] in (" ", "\t") else code


@dataclass(frozen=True)
class ToolSpec:
    """A tool: what it is called, how it is called in text, and its limits."""

    name: str
    fence: Fence
    max_calls: int = 3
    """Calls of one rollout."""
    seconds: float = 5.0
    """Time of one call; see `InterpreterLimits`."""
    output: int = 1000
    """Characters that are kept of an output."""
    memory: int = InterpreterLimits.memory
    """Bytes of address space."""

    def __post_init__(self) -> None:
        if isinstance(self.max_calls, bool) or not isinstance(self.max_calls, int) or self.max_calls < 1:
            raise ValueError(
                f"max_calls={self.max_calls!r} of tool {self.name!r}: give 1 or more, like 3; for rollouts without "
                "calls leave the tool out"
            )
        try:
            self.limits()
        except ValueError as error:
            raise ValueError(f"tool {self.name!r}: {error}") from None

    def limits(self) -> InterpreterLimits:
        return InterpreterLimits(self.seconds, self.max_calls, self.output, self.memory)

    def pool(self, *, warm: int = 2, unisolated: bool = False) -> InterpreterPool:
        """Where rollouts get their interpreters; refuses as `InterpreterPool` does where nothing isolates them."""
        return InterpreterPool(self.limits(), warm=warm, unisolated=unisolated)


def python_tool(**options: Any) -> ToolSpec:
    """A Python interpreter, called by a fenced block: ``python_tool(max_calls=3, seconds=5, output=1000)``."""
    return _made("python", MarkdownFence(), options)


def calculator_tool(**options: Any) -> ToolSpec:
    """The same interpreter for tiny policies: ``<<12*34=408>>``. For other texts give ``fence=Delimiters(…)``."""
    return _made("calculator", Delimiters(), {"seconds": 1.0, "output": 200, **options})


TOOLS: dict[str, Callable[..., ToolSpec]] = {"python": python_tool, "calculator": calculator_tool}
_OPTIONS = ("fence", "max_calls", "seconds", "output", "memory")


def _made(name: str, fence: Fence, options: dict[str, Any]) -> ToolSpec:
    for option in options:
        if option not in _OPTIONS:
            raise unknown(f"option of tool {name!r}", option, _OPTIONS)
    return ToolSpec(**{"name": name, "fence": fence, **options})


def get_tool(name: str, /, **options: Any) -> ToolSpec:
    """The tool of this name, with limits like ``max_calls=3``."""
    if name not in TOOLS:
        raise unknown("tool", name, TOOLS)
    return TOOLS[name](**options)


def find_call(text: str, tool: ToolSpec, start: int = 0) -> FoundCall | None:
    """The first complete call of a tool in a completion so far, or None.

    ``start``: where to begin; behind the last output block, so that no output can make calls.
    """
    return tool.fence.find(text, start)


def output_block(result: CellResult, tool: ToolSpec, before: str = "") -> str:
    """The text to append for a result, behind the text ``before``, which ends with the call."""
    return tool.fence.block(result, before)


def check_stops(stops: Iterable[str], tool: ToolSpec) -> None:
    """ValueError where a stop string does not go with the tool.

    A row stops at the end of every call to be looked at: a stop string across that place would be missed, and one that
    ends there, or before, or in what calls begin with, would leave no call to be made.
    """
    mark, opening = tool.fence.stop, tool.fence.opening
    for text in stops:
        heads = [text[:k] for k in range(1, len(text))]
        tails = [text[k:] for k in range(1, len(text))]
        across = any(mark.endswith(head) or head.endswith(mark) for head in heads)
        before = text in mark or text.endswith(mark) or any(mark.startswith(tail) for tail in tails)
        if across or before:
            raise ValueError(
                f"stop is {text!r}, but every call of tool {tool.name!r} ends with {mark!r}, and the one holds a part "
                "of the other; use another stop string, such as '</answer>'"
            )
        if text in opening:
            raise ValueError(
                f"stop is {text!r}, but calls of tool {tool.name!r} begin with {opening!r}, so that none would ever be "
                "whole; use another stop string, such as '</answer>'"
            )


def check_vocabulary(tool: ToolSpec, tokenizer: Any, model: str = "this model") -> None:
    """ValueError where a tokenizer cannot write, or does not give back, what a tool's calls are written with."""
    for text in tool.fence.examples:
        tokens = tokenizer.encode(text, add_special_tokens=False)
        unknown = getattr(tokenizer, "unk_token_id", None)
        if (unknown is not None and unknown in tokens) or text.strip() not in tokenizer.decode(tokens):
            raise ValueError(
                f"tool {tool.name!r} is called with {text!r}, which the tokenizer of {model} cannot write; give it a "
                "fence=Delimiters(opening, closing, before_output, after_output) of texts that it can, like "
                "Delimiters('<<', '=', '', '>>')"
            )
