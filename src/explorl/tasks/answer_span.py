r"""Find the answer in a completion: in ``<answer>…</answer>``, in ``\boxed{…}`` or after ``####``.

No function here raises, whatever the text, and each takes at most a few passes over it.
"""

from __future__ import annotations

import re

TAGS = ("<think>", "</think>", "<answer>", "</answer>")
BOXED = r"\boxed{"

_MARKS = {r"\boxed": BOXED, "####": "####", "<answer>": "<answer>"}
"""Text in a prompt that requests an answer mark, and the mark."""

# A pass over a million characters takes about a millisecond, repairing a million invalid bytes ten times as long.
_MAX_LENGTH = 1 << 20
_MAX_INVALID_BYTES = 1 << 18

# A backslash consumes the next character, so that \{ and \} are not read as braces. Models that have seen much escaped
# text write a second backslash before boxed.
_BOX_TOKEN = re.compile(
    r"\\?\\(?:boxed|fbox)(?![A-Za-z])\s*(?:(?P<open>\{)|(?P<bare>[-+]?\.?[0-9](?:[0-9.,/]*[0-9])?))?|\\.|[{}]",
    re.DOTALL,
)


def requested_mark(prompt: str) -> str | None:
    """Return what an answer begins with according to the prompt, or None if the prompt requests no mark."""
    return next((mark for request, mark in _MARKS.items() if request in prompt), None)


def read_completion(completion: str | bytes) -> tuple[str, bool]:
    """Return the text of a completion and whether it is complete: only the last million characters are read."""
    if isinstance(completion, str):
        return completion[-_MAX_LENGTH:], len(completion) <= _MAX_LENGTH
    try:
        return completion[-_MAX_LENGTH:].decode(), len(completion) <= _MAX_LENGTH
    except UnicodeDecodeError:
        return completion[-_MAX_INVALID_BYTES:].decode(errors="replace"), len(completion) <= _MAX_INVALID_BYTES


# ---------------------------------------------------------------------------- <think>…</think><answer>…</answer>
def last_answer(text: str) -> str | None:
    """Return the content of the last closed ``<answer>``, up to the first ``</answer>`` after it, or None."""
    start = text.rfind("<answer>", 0, max(text.rfind("</answer>"), 0))
    return None if start < 0 else text[start + len("<answer>") : text.find("</answer>", start)]


def is_well_formed(text: str, *, opened: bool = False) -> bool:
    """Return whether text is exactly ``<think>…</think><answer>…</answer>``, except for white space around each.

    ``opened``: the prompt has already opened ``<think>``.
    """
    text = ("<think>" + text if opened else text).strip()
    if not (text.startswith("<think>") and text.endswith("</answer>")):
        return False
    think, _, rest = text.removeprefix("<think>").partition("</think>")
    rest = rest.lstrip()
    if not rest.startswith("<answer>"):
        return False
    answer = rest[len("<answer>") : -len("</answer>")]
    # Looking for "<" first is many times faster than looking for four tags, and most text has none.
    return not any("<" in part and any(tag in part for tag in TAGS) for part in (answer, think))


# ---------------------------------------------------------------------------- \boxed{…} and ####
def box_spans(text: str) -> list[tuple[int, int] | None]:
    r"""Return the span of the content of each ``\boxed{…}``, ``\fbox{…}`` and ``\boxed 5``; None: it is not closed."""
    if "\\boxed" not in text and "\\fbox" not in text:
        return []
    spans: list[tuple[int, int] | None] = []
    open_braces: list[tuple[int, int]] = []  # the box that each belongs to, or −1, and where its content begins
    for token in _BOX_TOKEN.finditer(text):
        symbol = token[0]
        if symbol == "{":
            open_braces.append((-1, 0))
        elif symbol == "}":
            box, start = open_braces.pop() if open_braces else (-1, 0)
            if box >= 0:
                spans[box] = (start, token.start())
        elif len(symbol) > 2:
            if token["open"]:
                open_braces.append((len(spans), token.end()))
            spans.append(token.span("bare") if token["bare"] else None)
    return spans


def last_boxed(text: str) -> tuple[str | None, int]:
    """Return the content of the last closed box, or None, and the number of boxes, closed or not."""
    spans = box_spans(text)
    span = next((span for span in reversed(spans) if span is not None), None)
    return (None if span is None else text[slice(*span)].strip()), len(spans)


_BETWEEN_BOXES = re.compile(
    r"\}?(?:[\s$,;]|\\[()\[\] ,;]|\\q?quad(?![A-Za-z])|and\b|or\b|\\text\s*\{[\s,;]*(?:and|or)?\s*\})*"
    r"\\(?:boxed|fbox)\s*\{?"
)


_MOST_BOXES = 40


def last_boxes(text: str) -> list[str]:
    """Return the contents of the last boxes with only commas, "and" or "or" between them, in their order."""
    spans = box_spans(text)
    boxes: list[tuple[int, int]] = []  # the last is the first of the text
    for span in spans[: -_MOST_BOXES - 1 : -1]:
        if span is None or (boxes and not _BETWEEN_BOXES.fullmatch(text, span[1], boxes[-1][0])):
            break
        boxes.append(span)
    return [text[slice(*span)].strip() for span in reversed(boxes)]


def last_hash(text: str) -> tuple[str | None, int]:
    """Return the rest of the line after the last ``####``, or None, and the number of ``####``."""
    _, mark, after = text.rpartition("####")
    return (after.partition("\n")[0].strip() if mark else None), text.count("####")
