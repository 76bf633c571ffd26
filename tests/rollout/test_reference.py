"""Sampling by `model.generate`: every parameter is honoured or refused, none is ignored."""

from __future__ import annotations

from typing import Any

import pytest

from explorl.rollout import Engine, SamplingParams
from explorl.rollout.backends import generate as reference

GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 20}
PROMPT = ["3 + 4 ="]


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"repetition_penalty": 1.4},
        {"stop_token_ids": []},
        {"prefix": "<think>"},
    ],
)
def test_greedy_tokens_are_the_engines(policy: Any, tokenizer: Any, values: dict[str, Any]) -> None:
    params = SamplingParams(**GREEDY, **values)
    want = Engine(policy, tokenizer).generate(PROMPT, 1, params)[0]
    found = reference.generate(policy, tokenizer, PROMPT, 1, params)[0]
    assert found.token_ids == want.token_ids
    assert (found.text, found.finish_reason) == (want.text, want.finish_reason)
    if values and values != {"stop_token_ids": []}:
        assert (
            found.token_ids != reference.generate(policy, tokenizer, PROMPT, 1, SamplingParams(**GREEDY))[0].token_ids
        )


def test_stop_strings_and_stop_tokens(policy: Any, tokenizer: Any) -> None:
    free = Engine(policy, tokenizer).generate(PROMPT, 1, SamplingParams(**GREEDY, stop_token_ids=()))[0]
    for values in ({"stop": [free.text[4:6]], "stop_token_ids": ()}, {"stop_token_ids": [free.token_ids[3]]}):
        params = SamplingParams(**GREEDY, **values)
        want = Engine(policy, tokenizer).generate(PROMPT, 1, params)[0]
        found = reference.generate(policy, tokenizer, PROMPT, 1, params)[0]
        assert len(found.token_ids) < 20
        assert (found.token_ids, found.text, found.finish_reason) == (want.token_ids, want.text, "stop")


def test_bottom_p_is_applied(policy: Any, tokenizer: Any) -> None:
    """With a tiny p only the least likely token that top-k leaves is drawn."""
    params = SamplingParams(top_k=2, bottom_p=1e-9, max_tokens=6, seed=3, stop_token_ids=())
    want = Engine(policy, tokenizer).generate(PROMPT, 1, params)[0]
    assert reference.generate(policy, tokenizer, PROMPT, 1, params)[0].token_ids == want.token_ids


@pytest.mark.parametrize(
    "values",
    [{"top_p": [0.5, 0.9]}, {"stop": [["a"], ["b"]]}, {"stop_token_ids": [[1], None]}],
)
def test_values_per_request_are_refused(policy: Any, tokenizer: Any, values: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(values))} has one value per request, .*; give one"):
        reference.generate(policy, tokenizer, PROMPT, 2, SamplingParams(**values))
