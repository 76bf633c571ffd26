"""Quality of a response's text: repetition, answer format, language mixing.

Deng et al. 2025 §3.2.2 (format violations, language mixing, Figure 3d) and §4.4.1 (3-gram redundancy).
"""

from __future__ import annotations

import re

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


def trigram_redundancy(text: str) -> float:
    """Share of 3-grams of white-space separated tokens that repeat an earlier one.

        1 − distinct / total

    0 where there are fewer than 3 tokens. Deng et al. 2025 §4.4.1 drop responses above 0.31.
    """
    words = text.split()
    total = len(words) - 2
    return 1 - len(set(zip(words, words[1:], words[2:], strict=False))) / total if total > 0 else 0.0


def format_violations(text: str, mark: str = r"\boxed{") -> int:
    """How many answer marks are missing or too many: |count(mark) − 1|, so 0 is well formed and anything else is not.

    The mark is ``\\boxed{`` (Deng et al. 2025 §3.2.2) or, for Countdown, ``<answer>``.
    """
    if not mark:
        raise ValueError(r"mark must be a text such as '\boxed{' or '<answer>', got ''")
    return abs(text.count(mark) - 1)


def language_mixing(text: str) -> int:
    """Number of CJK characters in a response to an English task; more than 0 is mixing.

    Ideographs, kana, bopomofo and hangul. CJK punctuation and full-width forms alone do not count. Deng et al. 2025
    §3.2.2 look for Chinese characters only.
    """
    return len(CJK.findall(text))
