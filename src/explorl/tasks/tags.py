"""The form ``<think>…</think><answer>…</answer>`` that completions shall have, and how to read one that has not.

Nothing here raises, whatever the text, and nothing takes longer than a few passes over it.
"""

from __future__ import annotations

TAGS = ("<think>", "</think>", "<answer>", "</answer>")

# A pass over a million characters takes about a millisecond, mending a million broken bytes ten times as long.
_MAX_LENGTH = 1 << 20
_MAX_BROKEN = 1 << 18


def read(completion: str | bytes) -> tuple[str, bool]:
    """The text of a completion, and whether that is all of it: beyond a million characters only the end is read."""
    if isinstance(completion, str):
        return completion[-_MAX_LENGTH:], len(completion) <= _MAX_LENGTH
    try:
        return completion[-_MAX_LENGTH:].decode(), len(completion) <= _MAX_LENGTH
    except UnicodeDecodeError:
        return completion[-_MAX_BROKEN:].decode(errors="replace"), len(completion) <= _MAX_BROKEN


def last_answer(text: str) -> str | None:
    """What the last ``<answer>`` that is closed encloses, up to the first ``</answer>`` after it."""
    start = text.rfind("<answer>", 0, max(text.rfind("</answer>"), 0))
    return None if start < 0 else text[start + len("<answer>") : text.find("</answer>", start)]


def is_well_formed(text: str, *, opened: bool = False) -> bool:
    """Whether text has each tag once, in order, and nothing but white space around and between the two elements.

    ``opened``: the prompt has already opened ``<think>``, which then counts as the text's own.
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
