"""Stop strings: wherever tokens begin and end, per request, in any script, and cut exactly."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AddedToken, PreTrainedTokenizerFast

from explorl.rollout import Engine, SamplingParams
from explorl.rollout.rollouts import Rollout
from explorl.rollout.state import LENGTH, RUNNING, STOPPED
from explorl.rollout.stops import EVERY, StopStrings, first_stop

MORE = ["</", "answer", ">\n", "swer>", "ab", "bc"]
"""Tokens of several characters, so that strings begin and end inside tokens."""


@pytest.fixture(scope="module")
def bytewise() -> Any:
    """A byte-level tokenizer: every character outside ASCII is two to four tokens; two special tokens at the end."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate([*alphabet, *(text.replace("\n", "Ċ") for text in MORE)])}
    core = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    core.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>", pad_token="<pad>")
    return tokenizer


@pytest.fixture(scope="module")
def fallback() -> Any:
    """A tokenizer as SentencePiece's: letters are tokens, and bytes of everything else, newlines too, tokens as well.

    Bytes that follow each other and are no text together are all decoded to half characters, also those before.
    """
    letters = ["<unk>", *"abcxyz", *(f"<0x{byte:02X}>" for byte in range(256))]
    core = Tokenizer(models.BPE({text: i for i, text in enumerate(letters)}, [], byte_fallback=True, unk_token="<unk>"))
    core.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    return PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>")


def ids_of(tokenizer: Any, text: str) -> list[int]:
    """One token a byte."""
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    pieces = letters.pre_tokenize_str(text)[0][0] if text else ""
    return [tokenizer.convert_tokens_to_ids(piece) for piece in pieces]


def by_hand(tokenizer: Any, tokens: list[int], strings: list[str]) -> int | None:
    """The first number of tokens whose text, with special tokens or without, holds a string."""
    for end in range(1, len(tokens) + 1):
        texts = [tokenizer.decode(tokens[:end], skip_special_tokens=skip) for skip in (False, True)]
        if any(string in text for string in strings for text in texts):
            return end
    return None


def searched(tokenizer: Any, tokens: list[int], strings: list[str], every: int) -> tuple[int, str] | None:
    """As the engine searches: whenever there are some new tokens, and at the end."""
    stops = StopStrings([strings], tokenizer, 1)
    for steps in [*range(every, len(tokens), every), len(tokens)]:
        status = np.array([LENGTH if steps == len(tokens) else RUNNING])
        sampled = torch.tensor([tokens])
        found = stops.find(np.array([0]), np.array([steps]), status, sampled)
        assert (status[0] == STOPPED) == bool(found)
        if found:
            return found[0]
    return None


PIECES = ["</answer>", "日本", "é", "👍🏽", "stop", "ab", "bc", " ", "x", "\n"]


@settings(max_examples=120, deadline=None)
@given(data=st.data())
def test_a_search_in_parts_finds_what_a_search_of_every_prefix_finds(bytewise: Any, data: Any) -> None:
    special = bytewise.all_special_ids
    any_token = st.sampled_from([*special, *(bytewise.convert_tokens_to_ids(t.replace("\n", "Ċ")) for t in MORE)])
    piece = st.one_of(any_token.map(lambda token: [token]), st.sampled_from(PIECES).map(lambda t: ids_of(bytewise, t)))
    tokens = [token for part in data.draw(st.lists(piece, min_size=1, max_size=14)) for token in part]
    strings = data.draw(st.lists(st.sampled_from([*PIECES, "<eos>", "xab", "x日", "\nab"]), min_size=1, max_size=3))
    found = searched(bytewise, tokens, strings, data.draw(st.sampled_from([EVERY, EVERY + 3, 20])))
    want = by_hand(bytewise, tokens, strings)
    assert (None if found is None else found[0]) == want
    whole = StopStrings([strings], bytewise, 1).cut(0, np.array(tokens))
    assert (None if whole is None else whole[0]) == want


def test_a_long_answer_is_read_twice_at_most(bytewise: Any) -> None:
    """Once as a whole, once in parts that overlap: not once for each of its tokens."""

    class Counted:
        all_special_ids = bytewise.all_special_ids
        read = 0

        def __len__(self) -> int:
            return len(bytewise)

        def decode(self, tokens: list[int], **how: Any) -> str:
            self.read += len(tokens)
            return str(bytewise.decode(tokens, **how))

    tokenizer = Counted()
    tokens = ids_of(bytewise, "so we go on " * 200 + "</answer> and on")
    end = 12 * 200 + len("</answer>")
    assert StopStrings([["</answer>"]], tokenizer, 1).cut(0, np.array(tokens)) == (end, "</answer>")
    assert tokenizer.read < 4 * len(tokens)


@pytest.mark.parametrize("string", ["a string of thirty-four characters", "десять букв да ещё", "👍🏽👍🏽👍🏽"])
def test_a_long_string_that_begins_anywhere(bytewise: Any, string: str) -> None:
    """It may have begun before the tokens that the last search did not know yet."""
    middle = ids_of(bytewise, string)
    for before in range(EVERY + 1):
        tokens = [*ids_of(bytewise, "x" * before), *middle, *ids_of(bytewise, "y" * 5)]
        assert searched(bytewise, tokens, ["no", string], EVERY) == (before + len(middle), string)


def test_special_tokens_between_the_characters(bytewise: Any) -> None:
    """They have no text, so any number of them may stand inside a string, and a look back must go beyond them."""
    gap = [bytewise.pad_token_id] * 100
    first, last = ids_of(bytewise, "x the en"), ids_of(bytewise, "d of it")
    tokens = [*first, *gap, *last]
    assert searched(bytewise, tokens, ["end"], EVERY) == (len(first) + 101, "end")
    assert searched(bytewise, [*first, bytewise.eos_token_id, *last], ["<eos>"], EVERY) == (len(first) + 1, "<eos>")


@pytest.mark.parametrize("kind", ["added", "beyond"])
def test_tokens_without_text_that_nobody_names(bytewise: Any, kind: str) -> None:
    """Llama 3 has special tokens that no role names, and many models have more embeddings than tokens."""
    tokenizer = copy.deepcopy(bytewise)
    tokenizer.add_tokens([AddedToken("<reserved>", special=True)])
    silent = len(tokenizer) - 1 if kind == "added" else len(tokenizer) + 3
    assert silent not in tokenizer.all_special_ids
    for gap in (1, 100):
        first, last = ids_of(tokenizer, "x the en"), ids_of(tokenizer, "d of it")
        tokens = [*first, *[silent] * gap, *last]
        assert searched(tokenizer, tokens, ["end"], EVERY) == (len(first) + gap + 1, "end")


def test_a_character_of_four_tokens(bytewise: Any) -> None:
    thumb = ids_of(bytewise, "👍🏽")
    assert len(thumb) == 8
    tokens = [*ids_of(bytewise, "abcdefg"), *thumb, *ids_of(bytewise, "more")]
    assert searched(bytewise, tokens, ["👍🏽"], EVERY) == (15, "👍🏽")
    assert searched(bytewise, tokens, ["👍"], EVERY) == (11, "👍")


@pytest.mark.parametrize("every", [1, 3, EVERY, 100])
@pytest.mark.parametrize("behind", ["😀xyz", "é\n", "\udcff\udcfexyz", "\udcffa\n"])
def test_bytes_behind_a_string_do_not_hide_it(fallback: Any, behind: str, every: int) -> None:
    for before in range(2 * EVERY):
        text = b"a" * before + b"\n" + behind.encode(errors="surrogateescape")
        names = [chr(byte) if chr(byte) in "abcxyz" else f"<0x{byte:02X}>" for byte in text]
        tokens = fallback.convert_tokens_to_ids(names)
        assert by_hand(fallback, tokens, ["\n"]) == before + 1
        assert searched(fallback, tokens, ["\n"], every) == (before + 1, "\n")


def test_of_several_strings_the_one_that_is_complete_first() -> None:
    assert first_stop("one two three", ["three", "two", "e two"]) == (7, "e two")
    assert first_stop("aXbY", ["Y", "X"]) == (2, "X")
    assert first_stop("nothing", ["x"]) is None


def rollout_of(tokenizer: Any, tokens: list[int], stop: str | None) -> Rollout:
    empty = torch.zeros(len(tokens))
    return Rollout(0, 0, 0, tokens, empty, empty, empty, empty.long(), "stop", tokenizer=tokenizer, stop=stop)


def test_the_text_ends_with_the_string(bytewise: Any) -> None:
    """The last token holds more than the string: it is kept, with its records, but its text is cut."""
    tokens = [*ids_of(bytewise, "so: x</"), bytewise.convert_tokens_to_ids("answer")]
    end = searched(bytewise, [*tokens, *ids_of(bytewise, "more")], ["</ans"], EVERY)
    assert end == (len(tokens), "</ans")
    assert rollout_of(bytewise, tokens, "</ans").text == "so: x</ans"
    assert rollout_of(bytewise, tokens, None).text == "so: x</answer"
    assert rollout_of(bytewise, [*tokens, bytewise.eos_token_id], "<eos>").text == "so: x</answer"


# In the engine


@pytest.mark.parametrize("batch_size", [2, 64])
def test_each_request_has_its_own_strings(policy: Any, tokenizer: Any, batch_size: int) -> None:
    ids = ["3 + 4 =", "a"]
    free = Engine(policy, tokenizer).generate(ids, 3, SamplingParams(max_tokens=30, seed=1, stop_token_ids=()))
    texts = [rollout.text for rollout in free]
    own = [[texts[0][5:8]], [], [texts[2][11:13], "never in it"], [texts[0][5:8]], None, [texts[5][20:22]]]
    params = SamplingParams(max_tokens=30, seed=1, stop_token_ids=(), stop=own, min_p_mass=0.1)
    stopped = Engine(policy, tokenizer, batch_size=batch_size).generate(ids, 3, params)
    for long, short, strings in zip(free, stopped, own, strict=True):
        end = by_hand(tokenizer, long.token_ids, strings or [])
        assert short.token_ids == long.token_ids[:end]
        assert short.finish_reason == ("length" if end is None else "stop")
        assert (short.stop is None) == (end is None)
        for name in ("logps", "sampling_logps", "entropy", "branching"):
            torch.testing.assert_close(getattr(short, name), getattr(long, name)[:end])
        assert short.min_p_mass is not None
        assert len(short.min_p_mass) == len(short)
        shown = tokenizer.decode(short.token_ids, skip_special_tokens=True)
        if short.stop is not None and short.stop in shown:  # else a special token holds it
            assert short.text.endswith(short.stop)
    assert sum(rollout.stop is not None for rollout in stopped) >= 3
    assert stopped[1].stop is stopped[4].stop is None


def test_a_string_before_broken_logits(policy: Any, tokenizer: Any) -> None:
    """The completion ends with the string and is no error, and the requests after it are as they were."""
    params = SamplingParams(max_tokens=24, seed=1, stop_token_ids=())
    ids = ["3 + 4 =", "a", "5 - 2", "b", "7 * 7", "c"]
    want = Engine(policy, tokenizer).generate(ids, 1, params)
    first = want[0].token_ids
    place = next(i for i in range(2, 7) if first[i] not in first[:i])
    poison = first[place]
    clean = policy.model.embed_tokens.weight[poison].clone()
    with torch.no_grad():
        policy.model.embed_tokens.weight[poison] = torch.nan
    try:
        stops: list[Any] = [[tokenizer.decode(first[:place])], *[None] * 5]
        rollouts = Engine(policy, tokenizer, batch_size=2).generate(
            ids, 1, SamplingParams(max_tokens=24, seed=1, stop_token_ids=(), stop=stops)
        )
    finally:
        with torch.no_grad():
            policy.model.embed_tokens.weight[poison] = clean
    assert rollouts[0].finish_reason == "stop"
    assert rollouts[0].token_ids == first[:place]
    for good, rollout in zip(want[1:], rollouts[1:], strict=True):
        if poison not in good.token_ids and poison not in rollouts.prompt_ids[rollout.prompt_index]:
            assert rollout.token_ids == good.token_ids
            assert rollout.finish_reason != "error"
