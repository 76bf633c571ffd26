"""Quality of responses: repetition, answer format, language mixing.

Deng et al. 2025 §3.2.2 (format violations, language mixing, Figure 3d) and §4.4.1 (3-gram redundancy).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

REPETITIVE = 0.31
"""3-gram redundancy above which a response counts as repetitive (Deng et al. 2025 §4.4.1)."""


CJK = re.compile(
    "["
    "\u3005-\u3007"  # iteration and closing marks, ideographic zero
    "\u3041-\u30ff\u31f0-\u31ff"  # hiragana, katakana
    "\u3105-\u312f"  # bopomofo
    "\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"  # ideographs of the basic plane
    "\U00020000-\U000323af"  # ideographs of the supplementary planes
    "\u1100-\u11ff\u3131-\u318e\uac00-\ud7af"  # hangul
    "]"
)


@dataclass(frozen=True)
class Quality:
    """Counts over some responses."""

    responses: int
    format_violations: int
    """Responses with a format reward below 1 or, without such a reward, without exactly one answer mark."""
    repetitive: int
    """Responses whose 3-gram redundancy is above 0.31."""
    language_mixing: int
    """Responses with a CJK character."""
    redundancy: float
    """Mean 3-gram redundancy; 0 without responses."""


def response_quality(
    texts: Sequence[str], form: Sequence[float | None] | None = None, *, mark: str = "<answer>"
) -> Quality:
    """Count malformed, repetitive and language-mixing responses.

    ``form`` has the format reward of each response: below 1, NaN or None means malformed. Without it, a response is
    malformed unless it has exactly one ``mark``.
    """
    if form is None:
        malformed = sum(format_violations(text, mark) > 0 for text in texts)
    else:
        malformed = sum(not (value is not None and value >= 1) for value in form)
    redundancy = [trigram_redundancy(text) for text in texts]
    return Quality(
        responses=len(texts),
        format_violations=malformed,
        repetitive=sum(value > REPETITIVE for value in redundancy),
        language_mixing=sum(language_mixing(text) > 0 for text in texts),
        redundancy=sum(redundancy) / len(texts) if texts else 0.0,
    )


def trigram_redundancy(text: str) -> float:
    """Return the share of 3-grams of white-space separated tokens that repeat an earlier one.

        1 − distinct / total

    It is 0 for fewer than 3 tokens. Deng et al. 2025 §4.4.1 drop responses above 0.31.
    """
    words = text.split()
    total = len(words) - 2
    return 1 - len(set(zip(words, words[1:], words[2:], strict=False))) / total if total > 0 else 0.0


def format_violations(text: str, mark: str = r"\boxed{") -> int:
    """Count missing or surplus answer marks: |count(mark) − 1|, so 0 is well formed.

    The mark is ``\\boxed{`` (Deng et al. 2025 §3.2.2) or, for Countdown, ``<answer>``.
    """
    if not mark:
        raise ValueError(r"mark must be a text such as '\boxed{' or '<answer>', got ''")
    return abs(text.count(mark) - 1)


def language_mixing(text: str) -> int:
    """Count the CJK characters in a response to an English task; more than 0 is mixing.

    Ideographs, kana, bopomofo and hangul. CJK punctuation and full-width forms alone do not count. Deng et al. 2025
    §3.2.2 count Chinese characters only.
    """
    return len(CJK.findall(text))
