"""Tokens that may complete a stop string, and what a row samples before it is found."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

from explorl.rollout import Engine, SamplingParams
from explorl.rollout.stops import StopTokens

PROMPT = ["3 + 4 ="]
written = partial(Engine, unrolled=True)


class Bytes:
    """One token a byte."""

    def decode(self, tokens: list[int]) -> str:
        return bytes(tokens).decode(errors="replace")


def among(found: StopTokens, requests: list[int], text: bytes) -> list[bool]:
    return found.among(np.array(requests), np.frombuffer(text, np.uint8).astype(np.int64)).tolist()


def test_a_token_with_a_last_character_or_half_of_one_may_complete_a_string() -> None:
    strings = [["ab", "xc"], [], ["é"], ["a"], ["ab", "xc"]]
    found = StopTokens(strings, Bytes(), 256)
    assert among(found, [0, 0, 0, 0], b"abcx") == [False, True, True, False]
    assert among(found, [1, 1], b"ab") == [False, False]
    assert among(found, [2, 2, 2], b"e\xc3\xa9") == [False, True, True]
    assert found.among(np.array([0]), np.array([300])).tolist() == [False]  # which no row draws
    assert among(found, [0, 3, 4, 3], b"aaab") == [False, True, False, False]


def test_every_token_is_decoded_once() -> None:
    seen: list[int] = []

    class Counting(Bytes):
        def decode(self, tokens: list[int]) -> str:
            seen.extend(tokens)
            return super().decode(tokens)

    found = StopTokens([["ab"]] * 3, Counting(), 256)
    for _ in range(3):
        among(found, [0, 1, 2], b"abb")
    assert sorted(set(seen)) == [97, 98]
    assert len(seen) <= 3


@pytest.mark.usefixtures("place")
def test_nothing_is_sampled_behind_a_stop_string(policy: Any, tokenizer: Any) -> None:
    plain = SamplingParams(max_tokens=40, stop_token_ids=(), seed=1)
    tokens = written(policy, tokenizer).generate(PROMPT, 1, plain)[0].token_ids
    stop = tokenizer.decode(tokens[1:3])
    with written(policy, tokenizer).open(
        PROMPT, 1, SamplingParams(max_tokens=40, stop_token_ids=(), seed=1, stop=stop)
    ) as session:
        (rollout,) = session.step()
    assert (rollout.token_ids, rollout.stop) == (tokens[:3], stop)
    assert session.steps == 3
