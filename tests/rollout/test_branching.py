"""Branching where a planted model becomes unsure, against a tree that is worked out by hand from what was sampled."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from explorl.metrics.branch_probability import branch_probability, marker_text
from explorl.rollout import Engine, SamplingParams, branching, memory_plan
from explorl.rollout.branching import Branching, branch, branch_rows, drawn_by
from explorl.rollout.sampling.rng import fork_key, request_keys, uniform
from explorl.rollout.tool_use import ToolUse
from explorl.rollout.tools import Delimiters, calculator_tool, python_tool

from .planted import Desk, always, echo, planted, standing_in
from .test_sampling import chi_square_p

LETTERS = "nopqrstuvwxyz0123456789"
"""What is drawn where the planted model is unsure."""


def chain(tokenizer: Any, nexts: Mapping[str, str]) -> Any:
    """A Llama whose next token depends on the last one alone: each character of ``nexts`` has the same chance."""
    from transformers import LlamaConfig, LlamaForCausalLM

    vocab = len(tokenizer)
    size = -(-vocab // 8) * 8
    config = LlamaConfig(
        vocab_size=vocab, hidden_size=size, intermediate_size=8, num_hidden_layers=1, num_attention_heads=4,
        max_position_embeddings=128, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None, tie_word_embeddings=False, rms_norm_eps=1e-12,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    logits = torch.full((vocab, vocab), -40.0)
    for last, possible in nexts.items():
        for letter in possible:
            token = tokenizer.eos_token_id if letter == "$" else tokenizer(letter)["input_ids"][0]
            logits[token, tokenizer(last)["input_ids"][0]] = 0.0
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        model.model.norm.weight.fill_(1.0)
        model.model.layers[0].input_layernorm.weight.fill_(1.0)
        model.model.layers[0].post_attention_layernorm.weight.fill_(1.0)
        model.model.embed_tokens.weight[:, :vocab] = torch.eye(vocab)
        model.lm_head.weight[:, :vocab] = logits / math.sqrt(size)
    return model


FORK = {"S": "b", "b": "c", "c": "d", "d": "hl", "h": LETTERS, "l": "m", "m": "m"} | dict.fromkeys(LETTERS, LETTERS)
"""Sure of itself, but for one place behind which half of the answers are not."""
FEW = LETTERS[:7]
WANDERING = {"S": FEW, "b": LETTERS, "a": "c", "c": "c\n", "\n": "ab"} | dict.fromkeys(LETTERS, FEW + "\n$")
"""Lines of unlike entropy, in which now and then an answer ends."""


@pytest.fixture(scope="module")
def wandering(tokenizer: Any) -> Engine:
    return Engine(chain(tokenizer, WANDERING), tokenizer)


def mean_entropy(rollout: Any, start: int, window: int, vocab: int) -> float:
    values = np.asarray(rollout.entropy[start : start + window], dtype=np.float64)
    return float(np.mean(values[np.asarray(rollout.sampled[start : start + window])])) / math.log(vocab)


def coin(key: int, place: int) -> float:
    return float(uniform(torch.tensor([key]), torch.tensor([place]), branching.COIN).item())


def tree_by_hand(
    roots: Sequence[Any], forks: Sequence[Any], seed: int, first: int, spec: Branching, vocab: int, budget: int
) -> list[tuple[int, int, int]]:
    """(parent, place, copies) of each branch of a prompt, from whole rollouts: roots, and forks in their order.

    Places are newlines; they are gone through by position, of equal ones the older rollout first.
    """
    keys = [int(key) for key in request_keys(seed, range(first, first + len(roots)))]
    rows, begins, children = list(roots), [0] * len(roots), [0] * len(roots)
    forks, found, last = list(forks), [], (0, -1)
    while budget:
        places = [
            (at + 1, row)
            for row, rollout in enumerate(rows)
            for at, letter in enumerate(rollout.text[: len(rollout) - 1])
            if letter == "\n" and at + 1 > begins[row] and (at + 1, row) > last
        ]
        if not places:
            return found
        place, row = last = min(places)
        rise = mean_entropy(rows[row], place, spec.window, vocab) - mean_entropy(rows[row], 0, spec.window, vocab)
        if coin(keys[row], place) >= np.clip(spec.base + spec.weight * rise, 0, 1):
            continue
        copies = min(spec.beam - 1, budget)
        for _ in range(copies):
            rows.append(forks.pop(0))
            begins.append(place)
            keys.append(fork_key(keys[row], children[row]))
            children.append(0)
            children[row] += 1
        budget -= copies
        found.append((row, place, copies))
    return found


# The formula


def test_the_probability_is_clamped_and_linear_in_between() -> None:
    rng = np.random.default_rng(0)
    for now, initial, base, weight in rng.uniform(size=(200, 4)) * [1, 1, 1, 4]:
        want = np.clip(base + weight * (now - initial), 0, 1)
        assert branch_probability(now, initial, base=base, weight=weight) == pytest.approx(want, abs=1e-12)
    assert branch_probability(0.3, 0.3, base=0.5, weight=0.2) == 0.5
    assert branch_probability(1.0, 0.0, base=0.5, weight=2.0) == 1.0
    assert branch_probability(0.0, 1.0, base=0.5, weight=2.0) == 0.0


# A planted model


def test_it_branches_where_the_entropy_has_risen_at_the_expected_rate(tokenizer: Any) -> None:
    spec = Branching(initial=300, base=0.3, weight=0.8, window=4, at=["text:h", "text:l"])
    params = SamplingParams(max_tokens=10, seed=5)
    rollouts = branch(Engine(chain(tokenizer, FORK), tokenizer), ["S"], 600, params, spec)
    nats = math.log(len(tokenizer))
    initial = math.log(2) / 4 / nats
    chances = {
        "h": 0.3 + 0.8 * (math.log(len(LETTERS)) / nats - initial),
        "l": 0.3 - 0.8 * initial,
    }
    counts, expected = [], []
    for letter, chance in chances.items():
        rows = {i for i, rollout in enumerate(rollouts[:300]) if rollout.text[3] == letter}
        here = [one for one in rollouts.branches if one.parent in rows]
        assert all(one.probability == pytest.approx(chance, abs=1e-5) for one in here)
        assert all(one.initial_entropy == pytest.approx(initial, abs=1e-5) for one in here)
        assert {(one.position, one.marker, one.copies) for one in here} == {(4, f"text:{letter}", 1)}
        counts += [len(here), len(rows) - len(here)]
        expected += [len(rows) * chance / 300, len(rows) * (1 - chance) / 300]
    assert chi_square_p(np.array(counts), np.array(expected)) > 1e-3
    assert counts[0] > 2 * counts[2]
    assert len(rollouts) == 600
    assert rollouts.decisions == 300


def test_forks_draw_what_the_policy_draws(tokenizer: Any) -> None:
    spec = Branching(initial=1, beam=800, base=1.0, at=["text:h"], window=2)
    model = chain(tokenizer, FORK | {"d": "h"})
    rollouts = branch(Engine(model, tokenizer), ["S"], 800, SamplingParams(max_tokens=5, seed=2), spec)
    drawn = [rollout.text[4] for rollout in rollouts]
    assert {rollout.text[:4] for rollout in rollouts} == {"bcdh"}
    counts = np.array([drawn.count(letter) for letter in LETTERS])
    assert counts.sum() == 800
    assert chi_square_p(counts, np.full(len(LETTERS), 1 / len(LETTERS))) > 1e-3


@pytest.mark.parametrize(
    "spec",
    [
        Branching(at=["newline"], window=3),
        Branching(initial=2, beam=4, base=0.1, weight=1.5, at=["newline"], window=6),
        Branching(initial=1, beam=2, base=1.0, weight=0.0, at=["newline"], window=1),
    ],
)
def test_the_tree_is_that_worked_out_by_hand_and_the_budget_is_exact(
    spec: Branching, wandering: Engine, tokenizer: Any
) -> None:
    n, prompts = 9, ["S", "b", "\n"]
    rollouts = branch(wandering, prompts, n, SamplingParams(max_tokens=24, seed=11), spec)
    assert len(rollouts) == n * len(prompts)
    assert [rollout.request for rollout in rollouts] == list(range(len(rollouts)))
    assert rollouts.branches
    for index, group in enumerate(rollouts.by_prompt()):
        first, begun = index * n, spec.at_first(n)
        assert {rollout.prompt_index for rollout in group} == {index}
        forks = [rollout for rollout in group if rollout.parent is not None]
        want = tree_by_hand(group[:begun], forks, 11, first, spec, len(tokenizer), n - begun)
        index_of = {row: first + row for row in range(begun)}
        index_of |= {begun + i: fork.request for i, fork in enumerate(forks)}
        mine = [one for one in rollouts.branches if first <= one.parent < first + n]
        assert [(one.parent, one.position, one.copies) for one in mine] == sorted(
            (index_of[parent], place, copies) for parent, place, copies in want
        )
        assert len(forks) == sum(copies for _, _, copies in want)
        for fork in forks:
            parent = rollouts[fork.parent]
            assert fork.token_ids[: fork.forked_at] == parent.token_ids[: fork.forked_at]
            assert torch.equal(fork.entropy[: fork.forked_at], parent.entropy[: fork.forked_at])


def test_a_row_draws_what_it_drew_alone(wandering: Engine) -> None:
    """Rows that began at once and rows that fill up are those of plain sampling; branches change nothing of them."""
    params = SamplingParams(max_tokens=20, seed=5)
    plain = wandering.generate(["S", "b"], 8, params)
    rollouts = branch(wandering, ["S", "b"], 8, params, Branching(initial=3, base=0.4, at=["newline"], window=2))
    for rollout in rollouts:
        if rollout.parent is None:
            assert rollout.token_ids == plain[rollout.request].token_ids
    kinds = [rollout.parent is None for rollout in rollouts]
    assert any(kinds[3:8]), "nothing was filled up"
    assert not all(kinds)


def test_without_base_and_weight_it_is_plain_sampling_to_the_bit(policy: Any, tokenizer: Any) -> None:
    engine, params = Engine(policy, tokenizer), SamplingParams(max_tokens=12, temperature=0.9)
    spec = Branching(base=0, weight=0, at=["newline", "step", "wait"])
    torch.manual_seed(3)
    plain = engine.generate(["1 + 1", "27"], 6, params)
    torch.manual_seed(3)
    rollouts = branch(engine, ["1 + 1", "27"], 6, params, spec)
    assert rollouts.seed == plain.seed
    assert rollouts.branches == []
    for one, other in zip(rollouts, plain, strict=True):
        assert one.token_ids == other.token_ids
        assert (one.request, one.prompt_index, one.sample_index) == (
            other.request,
            other.prompt_index,
            other.sample_index,
        )
        for name in ("logps", "sampling_logps", "entropy", "branching"):
            assert torch.equal(getattr(one, name), getattr(other, name)), name


def test_the_tree_does_not_depend_on_company_or_memory(
    wandering: Engine, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = SamplingParams(max_tokens=24, seed=6)
    spec = Branching(initial=2, base=0.4, weight=0.5, at=["newline"], window=4)

    def tree(prompts: Sequence[str], engine: Engine = wandering) -> list[Any]:
        rollouts = branch(engine, prompts, 6, params, spec)
        return [(r.token_ids, r.parent, r.forked_at) for r in rollouts[:6]]

    want = tree(["S"])
    assert any(parent is not None for _, parent, _ in want)
    assert tree(["S", "b", "a", "S"], Engine(wandering.model, tokenizer, batch_size=1)) == want
    with monkeypatch.context() as pages:
        pages.setattr(memory_plan, "SPANS", ())
        pages.setitem(memory_plan.PAGE, "cpu", 4)
        assert tree(["S", "b"], Engine(wandering.model, tokenizer, batch_size=3)) == want
    monkeypatch.setattr(branching, "CHECK_ALL_AFTER", 1)
    assert tree(["S", "b", "a"]) == want
    monkeypatch.setattr(branching, "CHECK_ALL_AFTER", 10**6)
    monkeypatch.setattr(branching, "UNSURE", 40)
    assert tree(["S", "b", "a"]) == want


def test_stop_strings_end_what_branches(tokenizer: Any) -> None:
    """Tokens beyond a stop string that is not found yet open no place, and count in no window."""
    engine = Engine(chain(tokenizer, WANDERING | {"\n": "b", "b": "#", "#": "\nb"}), tokenizer)
    spec = Branching(initial=2, base=1.0, weight=0.0, at=["newline"], window=1)
    rollouts = branch(engine, ["S"] * 4, 8, SamplingParams(max_tokens=30, seed=1, stop="b#\nb#"), spec)
    assert any(rollout.stop for rollout in rollouts)
    for rollout in rollouts:
        assert rollout.text.count("b#\nb#") == (rollout.stop is not None)
    for one in rollouts.branches:
        assert one.position < len(rollouts[one.parent])


# Markers


def test_markers(tokenizer: Any) -> None:
    text = {"S": "W", "W": "a", "a": "i", "i": "t", "t": ".", ".": "\n", "\n": "\n#", "#": "#"}
    engine = Engine(chain(tokenizer, text), tokenizer)
    params = SamplingParams(max_tokens=12, seed=3)
    wanted = {"wait": "Wait", "step": "Wait.\n\n", "newline": "Wait.\n", "text:t.": "Wait."}
    for marker, before in wanted.items():
        spec = Branching(initial=1, base=1.0, weight=0.0, at=[marker], window=1)
        found = branch(engine, ["S"] * 3, 2, params, spec)
        assert any(one.marker == marker for one in found.branches), marker
        for one in found.branches:
            assert found[one.parent].text[: one.position] == before
    both = branch(engine, ["S"] * 3, 4, params, Branching(initial=1, base=1.0, at=["newline", "wait"], window=1))
    assert {one.marker for one in both.branches} == {"newline", "wait"}
    with pytest.raises(ValueError, match="unknown marker 'newlin'; did you mean 'newline'"):
        marker_text("newlin")


# Rows that a trainer gives


def test_rows_of_a_trainer_form_groups_and_keep_their_settings(wandering: Engine, tokenizer: Any) -> None:
    engine = wandering
    ids = [tokenizer(text)["input_ids"] for text in "SSSSbbbbbSS"]
    params = SamplingParams(max_tokens=20, seed=9, temperature=[0.5 + 0.1 * row for row in range(11)])
    spec = Branching(initial=2, base=0.6, at=["newline"], window=3)
    rollouts = branch_rows(engine, ids, params, spec)
    assert len(rollouts) == 11
    assert [rollouts.prompt_ids[rollout.prompt_index] for rollout in rollouts] == ids
    groups = [0] * 4 + [1] * 5 + [2] * 2
    for index, rollout in enumerate(rollouts):
        if rollout.parent is None:
            assert rollouts.params_of[index] == index
        else:
            assert groups[rollout.parent] == groups[index]
            assert rollouts.params_of[index] == rollouts.params_of[rollout.parent]
    assert any(rollout.parent is not None for rollout in rollouts)
    assert all(rollout.parent is None for rollout in rollouts[9:])  # a group of two begins whole
    again = branch_rows(engine, ids, params, Branching(base=0, weight=0, at=["newline"]))
    plain = engine.generate(ids, 1, params)
    assert [rollout.token_ids for rollout in again] == [rollout.token_ids for rollout in plain]


def test_a_prompt_that_comes_twice_has_two_groups(wandering: Engine, tokenizer: Any) -> None:
    ids = [tokenizer("S")["input_ids"]] * 12
    params, spec = SamplingParams(max_tokens=40, seed=3), Branching(initial=3, base=0.9, at=["newline"], window=2)
    rollouts = branch_rows(wandering, ids, params, spec, group=[0] * 6 + [1] * 6)
    forks = [rollout for rollout in rollouts if rollout.parent is not None]
    assert {rollout.parent // 6 for rollout in forks} == {0, 1}
    assert all(rollout.parent // 6 == rollout.request // 6 for rollout in forks)


def test_who_drew_a_token(wandering: Engine) -> None:
    spec = Branching(initial=1, base=0.9, at=["newline"], window=2)
    rollouts = branch(wandering, ["S", "b"], 8, SamplingParams(max_tokens=24, seed=8), spec)
    offsets = drawn_by(rollouts)
    assert offsets.shape == (16, max(map(len, rollouts)))

    def by_hand(row: int, token: int) -> int:
        if token >= len(rollouts[row]):
            return row
        parent = rollouts[row].parent
        return row if parent is None or token >= (rollouts[row].forked_at or 0) else by_hand(parent, token)

    want = [[by_hand(row, token) - row for token in range(offsets.size(1))] for row in range(16)]
    assert offsets.tolist() == want
    chains = {rollouts[rollout.parent].parent for rollout in rollouts if rollout.parent is not None}
    assert chains - {None}, "no fork of a fork"


# Tools


def test_it_branches_behind_what_a_tool_said(tokenizer: Any) -> None:
    nexts = {"S": "n(", "n": "(", "(": "1", "1": "=", ")": LETTERS} | dict.fromkeys(LETTERS[1:], LETTERS[1:] + "(\n")
    nexts |= {"1": "=", "\n": "(r"}
    fence = Delimiters("(", "=", "", ")")
    tools = ToolUse(calculator_tool(fence=fence, max_calls=2), unisolated=True)
    engine = Engine(chain(tokenizer, nexts), tokenizer)
    spec = Branching(initial=2, base=0.8, weight=0.3, window=4, at=["output"])
    rollouts = branch(engine, ["S", "n"], 6, SamplingParams(max_tokens=40, seed=3), spec, tools=tools)
    assert len(rollouts) == 12
    assert rollouts.branches
    for one in rollouts.branches:
        parent = rollouts[one.parent]
        assert one.position in [call.end for call in parent.calls]
        assert one.position > (parent.forked_at or 0), "a fork was asked again where it began"
        assert not parent.sampled[one.position - 1]
        assert parent.sampled[one.position]
        want = mean_entropy(parent, one.position, 4, len(tokenizer))
        assert one.entropy == pytest.approx(want, abs=1e-6)
    for rollout in rollouts:
        assert sum(call.status != "refused" for call in rollout.calls) <= 2
        if rollout.parent is not None:
            parent = rollouts[rollout.parent]
            before = [call for call in parent.calls if call.end <= rollout.forked_at]
            assert list(rollout.calls[: len(before)]) == before
            assert torch.equal(rollout.sampled[: rollout.forked_at], parent.sampled[: rollout.forked_at])
    quiet = branch(
        engine, ["S", "n"], 6, SamplingParams(max_tokens=40, seed=3), Branching(base=0, weight=0), tools=tools
    )
    from explorl.rollout.tool_use import generate_with_tools

    plain = generate_with_tools(engine, ["S", "n"], 6, SamplingParams(max_tokens=40, seed=3), tools)
    assert [rollout.token_ids for rollout in quiet] == [rollout.token_ids for rollout in plain]


def test_nothing_branches_behind_a_call_that_is_closed_in_parts() -> None:
    """Of four backticks three come first; what the policy would write on without the output is no part of any row."""
    words = [f"w{i} " for i in range(6)]
    follow = always(["go", "````python\n1\n", "```", "`", *words[:1]], **{"\n": "So ", "So ": "line\n"})
    follow |= {word: {**dict.fromkeys(words, 1 / 8), "line\n": 1 / 4} for word in words}
    model, tokenizer = planted(follow | {"line\n": dict.fromkeys(words, 1 / 6)})
    rollouts = branch(
        Engine(model, tokenizer),
        [[tokenizer.convert_tokens_to_ids("go")]],
        6,
        SamplingParams(max_tokens=90, seed=3),
        Branching(initial=2, base=0.9, weight=0, window=4, at=["newline"]),
        tools=ToolUse(python_tool(), warm=0),
        pool=standing_in(Desk(echo, patience=1)),
    )
    assert any(one.position > 22 for one in rollouts.branches)
    for one in rollouts.branches:
        assert rollouts[one.parent].sampled[one.position - 1]
        assert tokenizer.decode(rollouts[one.parent].token_ids[: one.position]).endswith("\n")


# Bad input


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"weight": -0.1}, r"weight is -0.1; use a number, at least 0, such as 0.2"),
        ({"weight": math.nan}, r"weight is nan"),
        ({"base": 1.5}, r"base is 1.5; use a number, at least 0 and at most 1, such as 0.5"),
        ({"base": "0.5"}, r"base is '0.5'"),
        ({"beam": 1}, r"beam is 1; use a whole number, 2 or more, such as 2"),
        ({"window": 0}, r"window is 0; use a whole number, 1 or more, such as 20"),
        ({"initial": 0}, r"initial is 0"),
        ({"initial": True}, r"initial is True"),
        ({"at": "newline"}, r"at is 'newline'; give a list of markers, such as \['newline'\]"),
        ({"at": []}, r"at is \[\]"),
        ({"at": ["newline", "Newline"]}, r"unknown marker 'Newline'; did you mean 'newline'\?"),
        ({"at": [3]}, r"unknown marker 3; known: newline, output"),
        ({"at": ["text:"]}, r"unknown marker 'text:'"),
    ],
)
def test_settings_that_cannot_be(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Branching(**changes)


def test_what_cannot_be_sampled_is_said_before_anything_is(
    llama: Any, policy: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("explorl.rollout.session.Session.step", lambda *_: pytest.fail("it began to sample"))
    message = r"initial is 8, but a prompt has only 4 rollouts in all; use initial=2, or 16 rollouts"
    with pytest.raises(ValueError, match=message):
        branch(Engine(policy, tokenizer), ["1"], 4, None, Branching(initial=8))
    with pytest.raises(ValueError, match=r"at has 'step', but the engine has no tokenizer"):
        branch(Engine(llama), [[5]], 4, None, Branching(at=["output", "step"]))
    with pytest.raises(ValueError, match="n is 0; ask for at least 1 sample per prompt"):
        branch(Engine(policy, tokenizer), ["1"], 0, None, Branching())
    with pytest.raises(ValueError, match="prompts is empty"):
        branch(Engine(policy, tokenizer), [], 4, None, Branching())
