"""Tool calls in text: find the code that a completion wants to run, and format the block with its output.

The model writes a fenced block of Python. As soon as the block is closed it is run in an `Interpreter`, and what a
notebook would show is appended as an output block, after which the model continues (FORMULAS.md §5):

    ```python
    print(6 * 7)
    ```
    ```output
    42
    ```

This module handles only text, not tokens or engines. Where a block ends never depends on what follows it, so it does
not matter after how many tokens the text is searched. See `Delimiters` for policies too small for Markdown.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
from jaxtyping import Bool

from explorl.core.plugins import unknown
from explorl.sandbox.interpreter import CellResult, InterpreterLimits
from explorl.sandbox.interpreter_pool import InterpreterPool

_FENCE = re.compile(r"([ \t]*)(`{3,})([^`\n]*)")
"""The beginning of a line: indentation, the fence, and its info string, such as the name of a language."""
_LONGEST_INLINE = 200
LONGEST_CLOSING = 20
"""How often the text that every call ends with may be repeated at the end of a call."""


class ParsedCall(NamedTuple):
    """A call in a text."""

    source: str
    begin: int
    """Start of its opening."""
    end: int
    """End of its closing. What was sampled after it is not part of the rollout."""


class Fence(Protocol):
    """The format of calls and outputs."""

    @property
    def examples(self) -> tuple[str, ...]:
        """Texts that a policy must be able to write and read."""

    @property
    def opening(self) -> str:
        """The text that calls begin with."""

    @property
    def stop(self) -> str:
        """The text that every call ends with: calls are searched for whenever it was written, and at the end."""

    def find(self, text: str, start: int) -> ParsedCall | None:
        """Return the first complete call that begins at or after ``start``, or None."""

    def block(self, result: CellResult, before: str) -> str:
        """Return what is appended to the text ``before`` for a call with this result."""


@dataclass(frozen=True)
class MarkdownFence:
    """Fenced blocks of Markdown, each fence at the beginning of a line.

    A block ends at the first line that begins with as many backticks as opened it, whatever follows them; code that
    contains such a line can use four. The fence's indentation is removed from the code.
    """

    languages: tuple[str, ...] = ("python", "py", "python3")
    output: str = "output"
    """Info string of an output block."""

    def __post_init__(self) -> None:
        if not self.languages or not all(re.fullmatch(r"[^\s`]+", name) for name in (*self.languages, self.output)):
            raise ValueError(
                f"languages={self.languages!r}, output={self.output!r}: use words without spaces and backticks, "
                "such as ('python',) and 'output'"
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

    def find(self, text: str, start: int) -> ParsedCall | None:
        """Return the first complete call at or after ``start``; blocks in other languages are skipped."""
        opened: re.Match[str] | None = None
        position = start if start == 0 or text[start - 1 : start] == "\n" else text.find("\n", start) + 1 or len(text)
        while position < len(text):
            line_end = text.find("\n", position) + 1 or len(text)
            fence = _FENCE.match(text, position, line_end)
            is_line = fence is not None and text[fence.end() : line_end] == "\n"
            if opened is not None and fence and len(fence[2]) >= len(opened[2]):
                if self._is_call(opened):
                    end = fence.start(2) + len(opened[2])
                    return ParsedCall(_code(text[opened.end() : position], opened[1]), opened.start(2), end)
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
        """Return the output block; its fence is longer than any fence in the output."""
        runs = [len(run) for run in re.findall(r"`{3,}", result.text)]
        fence = "`" * (max(runs) + 1 if runs else 3)
        newline = "" if not before or before.endswith("\n") else "\n"
        ending = "" if not result.text or result.text.endswith("\n") else "\n"
        return f"{newline}{fence}{self.output}\n{result.text}{ending}{fence}\n"


@dataclass(frozen=True)
class Delimiters:
    """A call within a line, such as ``<<12*34=408>>``: four short texts for a policy with a small vocabulary.

    This is the calculator of GSM8K (Cobbe et al. 2021): the text between ``opening`` and ``closing`` is run, and the
    last line of its output is put between ``before_output`` and ``after_output``. Neither may contain a newline.
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
                raise ValueError(f"{name}={value!r}: use one or more characters without a newline, such as {good!r}")
        if self.opening == self.closing:
            raise ValueError(
                f"opening and closing are both {self.opening!r}: use different texts, such as '<<' and '='"
            )

    @property
    def examples(self) -> tuple[str, ...]:
        return (f"{self.opening}1{self.closing}{self.before_output}1{self.after_output}",)

    @property
    def stop(self) -> str:
        return self.closing

    def find(self, text: str, start: int) -> ParsedCall | None:
        position = start
        while (begin := text.find(self.opening, position)) >= 0:
            inside = begin + len(self.opening)
            end = text.find(self.closing, inside)
            if end < 0:
                return None
            begin = text.rfind(self.opening, begin, end)  # the last opening counts
            source = text[begin + len(self.opening) : end]
            if "\n" not in source and len(source) <= _LONGEST_INLINE:
                return ParsedCall(source.strip(), begin, end + len(self.closing))
            position = begin + len(self.opening)
        return None

    def block(self, result: CellResult, before: str) -> str:
        """Return the last line of the output, without texts that would end it early or begin a call."""
        lines = result.text.split("\n") if result.status != "refused" else ["no calls left"]
        last_line = next((line.strip() for line in reversed(lines) if line.strip()), "")
        for mark in filter(None, (self.after_output.strip(), self.opening.strip())):
            last_line = last_line.replace(mark, " ")
        return f"{self.before_output}{last_line}{self.after_output}"


def _code(content: str, indent: str) -> str:
    """Return the text between the fences as Python code, without the fence's indentation."""
    lines = content.removeprefix("\r").removeprefix("\n").replace("\r\n", "\n").split("\n")
    code = "\n".join(line.removeprefix(indent) for line in lines)
    first = next((line for line in code.split("\n") if line.strip()), "")
    return textwrap.dedent(code) if first[:1] in (" ", "\t") else code


@dataclass(frozen=True)
class ToolSpec:
    """A tool: its name, the format of its calls, and its limits."""

    name: str
    fence: Fence
    max_calls: int = 3
    """Most calls of a rollout."""
    seconds: float = 5.0
    """Time limit of a call; see `InterpreterLimits`."""
    output: int = 1000
    """Most characters of an output."""
    memory: int = InterpreterLimits.memory
    """Bytes of address space."""

    def __post_init__(self) -> None:
        if isinstance(self.max_calls, bool) or not isinstance(self.max_calls, int) or self.max_calls < 1:
            raise ValueError(
                f"max_calls={self.max_calls!r} of tool {self.name!r}: use 1 or more, such as 3; for rollouts without "
                "calls leave the tool out"
            )
        try:
            self.limits()
        except ValueError as error:
            raise ValueError(f"tool {self.name!r}: {error}") from None

    def limits(self) -> InterpreterLimits:
        return InterpreterLimits(self.seconds, self.max_calls, self.output, self.memory)

    def pool(self, *, warm: int = 2, unisolated: bool = False) -> InterpreterPool:
        """Return a pool of interpreters for rollouts; raise as `InterpreterPool` does if code can't be isolated."""
        return InterpreterPool(self.limits(), warm=warm, unisolated=unisolated)


def python_tool(**options: Any) -> ToolSpec:
    """Return a Python interpreter, called by a fenced block: ``python_tool(max_calls=3, seconds=5, output=1000)``."""
    return _build("python", MarkdownFence(), options)


def calculator_tool(**options: Any) -> ToolSpec:
    """Return the same interpreter for tiny policies: ``<<12*34=408>>``. Other texts: ``fence=Delimiters(…)``."""
    return _build("calculator", Delimiters(), {"seconds": 1.0, "output": 200, **options})


TOOLS: dict[str, Callable[..., ToolSpec]] = {"python": python_tool, "calculator": calculator_tool}
_OPTIONS = ("fence", "max_calls", "seconds", "output", "memory")


def _build(name: str, fence: Fence, options: dict[str, Any]) -> ToolSpec:
    for option in options:
        if option not in _OPTIONS:
            raise unknown(f"option of tool {name!r}", option, _OPTIONS)
    return ToolSpec(**{"name": name, "fence": fence, **options})


def get_tool(name: str, /, **options: Any) -> ToolSpec:
    """Return the tool of this name, with options such as ``max_calls=3``."""
    if name not in TOOLS:
        raise unknown("tool", name, TOOLS)
    return TOOLS[name](**options)


def find_call(text: str, tool: ToolSpec, start: int = 0) -> ParsedCall | None:
    """Return the first complete call of a tool in an unfinished completion, or None.

    ``start`` should be the end of the last output block, so that no output can make calls.
    """
    return tool.fence.find(text, start)


def output_block(result: CellResult, tool: ToolSpec, before: str = "") -> str:
    """Return the text to append for a result to the text ``before``, which ends with the call."""
    return tool.fence.block(result, before)


def check_stops(stops: Iterable[str], tool: ToolSpec) -> None:
    """Raise `ValueError` if a stop string conflicts with the tool.

    A row stops at the end of every call. A stop string across that point would be missed, and one that ends there, or
    that is part of a call's beginning, would prevent all calls.
    """
    mark, opening = tool.fence.stop, tool.fence.opening
    for text in stops:
        heads = [text[:k] for k in range(1, len(text))]
        tails = [text[k:] for k in range(1, len(text))]
        across = any(mark.endswith(head) or head.endswith(mark) for head in heads)
        before = text in mark or text.endswith(mark) or any(mark.startswith(tail) for tail in tails)
        if across or before:
            raise ValueError(
                f"stop is {text!r}, which overlaps with {mark!r} that every call of tool {tool.name!r} ends with; use "
                "another stop string, such as '</answer>'"
            )
        if text in opening:
            raise ValueError(
                f"stop is {text!r}, which is part of {opening!r} that calls of tool {tool.name!r} begin with, so no "
                "call could be completed; use another stop string, such as '</answer>'"
            )


def check_vocabulary(tool: ToolSpec, tokenizer: Any, model: str = "this model") -> None:
    """Raise `ValueError` if a tokenizer cannot encode and decode the texts of a tool's calls."""
    for text in tool.fence.examples:
        tokens = tokenizer.encode(text, add_special_tokens=False)
        unk = getattr(tokenizer, "unk_token_id", None)
        if (unk is not None and unk in tokens) or text.strip() not in tokenizer.decode(tokens):
            raise ValueError(
                f"tool {tool.name!r} is called with {text!r}, which the tokenizer of {model} cannot write; give it a "
                "fence=Delimiters(opening, closing, before_output, after_output) of texts that it can, such as "
                "Delimiters('<<', '=', '', '>>')"
            )


# Outputs and open calls in texts that were written with a tool


def output_spans(text: str, tool: ToolSpec) -> list[tuple[int, int]]:
    """Return the (begin, end) of each output in a completion that was written with a tool.

    They are what `output_block` would have appended after the calls. An output that is cut off at the end of the text
    counts; a call without an output, and an output block without a call, do not.
    """
    spans: list[tuple[int, int]] = []
    start = 0
    while (call := find_call(text, tool, start)) is not None:
        start = call.end
        end = _output_end(text, call.end, tool)
        if end is not None and end > call.end:
            spans.append((call.end, end))
            start = end
    return spans


def output_mask(
    text: str, offsets: Sequence[tuple[int, int]], spans: Sequence[tuple[int, int]]
) -> Bool[np.ndarray, " tokens"]:
    """Return a mask of the tokens that a rollout would not have sampled; ``offsets`` are their positions in the text.

    A rollout stops with the token that completes its call. That token may contain white space of the output; if it
    contains more, it does not count as sampled.
    """
    begins, ends = (np.array(side, dtype=np.int64) for side in (zip(*offsets, strict=True) if offsets else ((), ())))
    mask = np.zeros(len(begins), dtype=bool)
    for begin, end in spans:
        for token in np.flatnonzero((begins < end) & (ends > begin)):
            first, last = max(int(begins[token]), begin), min(int(ends[token]), end)
            mask[token] |= begins[token] >= begin or bool(text[first:last].strip())
    return mask


def open_call(text: str, tool: ToolSpec) -> str:
    """Return the end of a prompt from the opening of a call that is not closed, or "".

    A completion continues such a call. An opening within a line may mean something else, as in ``x << 2``, and only
    counts at the end of the prompt.
    """
    if isinstance(tool.fence, Delimiters):
        return tool.fence.opening if text.endswith(tool.fence.opening) else ""
    mark = LONGEST_CLOSING * tool.fence.stop
    for closing in (mark, f"\n{mark}"):
        start = 0
        while (call := find_call(text + closing, tool, start)) is not None:
            if call.end > len(text):
                line = text.rfind("\n", 0, call.begin) + 1
                return text[call.begin if text[line : call.begin].strip() else line :]
            start = call.end
    return ""


def open_call_in_prompt(prompt: Sequence[int], tokenizer: Any, tool: ToolSpec) -> str:
    """Return the open call at the end of a prompt's tokens, or "".

    Only the text after the last special token counts, as that token ends any earlier message.
    """
    from explorl.rollout.stops import special_ids  # imports torch, which takes seconds

    special = special_ids(tokenizer)
    begin = next((i for i in range(len(prompt), 0, -1) if int(prompt[i - 1]) in special), 0)
    return open_call(str(tokenizer.decode(prompt[begin:], skip_special_tokens=True)), tool)


def _output_end(text: str, begin: int, tool: ToolSpec) -> int | None:
    """Return where the output that begins here ends, or None if there is none."""
    if isinstance(tool.fence, MarkdownFence):
        return _block_end(text, begin, tool.fence.output)
    if isinstance(tool.fence, Delimiters):
        return _inline_end(text, begin, tool.fence)
    raise ValueError(
        f"outputs of tool {tool.name!r} have a {type(tool.fence).__name__}, which cannot be found in a text; use a "
        "MarkdownFence or Delimiters"
    )


def _block_end(text: str, begin: int, name: str) -> int | None:
    opening = re.compile(rf"[ \t]*\r?\n?[ \t]*(`{{3,}}){re.escape(name)}[ \t]*\r?\n").match(text, begin)
    if opening is None:
        return None
    closing = re.compile(rf"^[ \t]*{opening[1]}`*[ \t]*\r?(?:\n|\Z)", re.MULTILINE).search(text, opening.end())
    return len(text) if closing is None else closing.end()


def _inline_end(text: str, begin: int, fence: Delimiters) -> int | None:
    if not fence.after_output.strip():
        raise ValueError(
            f"after_output={fence.after_output!r} does not show where an output ends; give it a text such as '>>'"
        )
    if not text.startswith(fence.before_output, begin):
        return None
    inside = begin + len(fence.before_output)
    line_end = text.find("\n", inside)
    closing = text.find(fence.after_output, inside, None if line_end < 0 else line_end)
    if closing < 0:
        return None if line_end >= 0 else len(text)
    while text.startswith(fence.after_output, closing + 1):  # the output ends with a part of it
        closing += 1
    return closing + len(fence.after_output)
