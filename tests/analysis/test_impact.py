"""Token impact: intervals and tests against published numbers, and a planted model in which one token decides."""

from __future__ import annotations

import dataclasses
import math
from types import SimpleNamespace

import numpy as np
import pytest

from explorl.analysis.impact import (
    PAIRS,
    RULES,
    Continuation,
    Side,
    TokenImpact,
    choose_tokens,
    enough_samples,
    group_impacts,
    newcombe,
    squared_impact,
)
from explorl.analysis.impact_run import impact, summary, tables
from explorl.analysis.impact_sampling import ContinuationLimits, TokenProbe, most_tokens, sample_impacts, within_budget
from explorl.analysis.impact_tokens import completion_limit, problems_by_prompt
from explorl.analysis.lens import Context, Unavailable
from explorl.analysis.lens_table import build_table
from explorl.rollout import UnsupportedModel
from explorl.stats.distributions import fisher
from explorl.stats.p_values import benjamini_hochberg
from explorl.tasks import Problem

from .planted import Planted, planted_policy

# Newcombe 1998, Table II, method 10
PUBLISHED = [
    ((56, 70, 48, 80), (0.0524, 0.3339)), ((9, 10, 3, 10), (0.1705, 0.8090)), ((6, 7, 2, 7), (0.0582, 0.8062)),
    ((5, 56, 0, 29), (-0.0381, 0.1926)), ((0, 10, 0, 20), (-0.1611, 0.2775)), ((0, 10, 0, 10), (-0.2775, 0.2775)),
    ((10, 10, 0, 20), (0.6791, 1.0)), ((10, 10, 0, 10), (0.6075, 1.0)),
]  # fmt: skip


@pytest.mark.parametrize(("counts", "ends"), PUBLISHED)
def test_newcombes_interval(counts, ends):
    found = newcombe(*counts)
    assert (found.low, found.high) == (pytest.approx(ends[0], abs=6e-5), pytest.approx(ends[1], abs=6e-5))
    assert found.mean == pytest.approx(counts[0] / counts[1] - counts[2] / counts[3])


def test_newcombes_interval_covers():
    """The exact chance that the interval holds the true difference, over a grid of chances; k = 16."""
    k = 16
    inside = np.array([[(lambda i: (i.low, i.high))(newcombe(a, k, b, k)) for b in range(k + 1)] for a in range(k + 1)])
    coverage = []
    for p in np.linspace(0.02, 0.98, 17):
        for q in np.linspace(0.02, 0.98, 17):
            one, two = (np.array([math.comb(k, x) * c**x * (1 - c) ** (k - x) for x in range(k + 1)]) for c in (p, q))
            holds = (inside[..., 0] <= p - q + 1e-12) & (p - q <= inside[..., 1] + 1e-12)
            coverage.append(float((np.outer(one, two) * holds).sum()))
    assert np.mean(coverage) > 0.95
    assert min(coverage) > 0.86


def test_fishers_test():
    assert fisher(3, 4, 1, 4) == pytest.approx(0.485714, abs=1e-6)  # the lady tasting tea
    assert fisher(8, 8, 0, 8) == pytest.approx(2 / 12870)
    assert fisher(1, 9, 11, 15) == pytest.approx(0.0094, abs=5e-4)
    assert fisher(5, 5, 5, 5) == 1.0


def test_benjamini_and_hochbergs_rule():
    published = [0.0001, 0.0004, 0.0019, 0.0095, 0.0201, 0.0278, 0.0298, 0.0344, 0.0459, 0.3240, 0.4262, 0.5719,
                 0.6528, 0.7590, 1.0]  # fmt: skip
    corrected = benjamini_hochberg(published)
    assert sum(p <= 0.05 for p in corrected) == 4  # their example of 1995
    assert corrected[3] == pytest.approx(15 * 0.0095 / 4)
    shuffled = [published[i] for i in (7, 0, 14, 3)]
    assert benjamini_hochberg(shuffled) == pytest.approx([2 * 0.0344 * 2 / 3, 0.0004, 1.0, 0.019])
    assert benjamini_hochberg([]) == []


def test_how_many_samples_are_enough():
    assert enough_samples(1) == 4  # 2 / C(8, 4) = 0.029, and 2 / C(6, 3) = 0.1
    assert enough_samples(60) == 7  # 60 · 2 / C(14, 7) = 0.035, and 60 · 2 / C(12, 6) = 0.13
    assert benjamini_hochberg([fisher(7, 7, 0, 7), *[1.0] * 59])[0] < 0.05
    assert benjamini_hochberg([fisher(6, 6, 0, 6), *[1.0] * 59])[0] > 0.05


def test_the_square_has_no_bias():
    k, p, q = 5, 0.7, 0.4
    expected = 0.0
    for a in range(k + 1):
        for b in range(k + 1):
            chance = math.comb(k, a) * p**a * (1 - p) ** (k - a) * math.comb(k, b) * q**b * (1 - q) ** (k - b)
            expected += chance * squared_impact(a, k, b, k)
    assert expected == pytest.approx((p - q) ** 2)
    assert squared_impact(1, 1, 0, 1) is None


# ---------------------------------------------------------------------------- choosing
def tokens_of(entropy, lengths):
    answer = np.repeat(np.arange(len(lengths)), lengths)
    position = np.concatenate([np.arange(n) for n in lengths])
    return np.asarray(entropy, dtype=float), answer, position / np.asarray(lengths)[answer]


def test_tokens_are_chosen_by_rule():
    entropy, answer, relative = tokens_of([5, 4, 1, 0, 9, 3, 2, 1, 0, 8], [5, 5])
    sign, group = np.where(answer == 0, 1, -1), np.where(answer == 0, -1, 1)
    chosen = choose_tokens(
        entropy, answer, relative, sign, group, ("entropy", "first", "last", "negative", "low-ppl"), 2
    )
    by = {rule: {place for place, rules in chosen.items() if rule in rules} for rule in RULES}
    assert by["entropy"] == {4, 9}  # one of each answer before the second of one
    assert by["first"] == {0, 5}
    assert by["last"] == {4, 9}
    assert by["negative"] == {9, 5}
    assert by["low-ppl"] == {4, 0}
    assert list(chosen) == sorted(chosen)
    same = [choose_tokens(entropy, answer, relative, sign, group, ("random",), 3, seed=seed) for seed in (1, 1, 2)]
    assert same[0] == same[1]
    assert same[0] != same[2]
    with pytest.raises(ValueError, match="unknown rule 'top'"):
        choose_tokens(entropy, answer, relative, sign, group, ("top",), 2)


# ---------------------------------------------------------------------------- a stub of the sampler
class Letters:
    """A tokenizer of letters."""

    def decode(self, ids, skip_special_tokens=False):
        return "".join(chr(i) for i in ids if not (skip_special_tokens and i == END))


END = ord("$")


class Stub:
    """Goes on with R or W; the chance of R is that of the last letter of the prompt."""

    tokenizer = Letters()

    def __init__(self, chances, seed=0, length=1, error=False):
        self.chances, self.length, self.error = chances, length, error
        self.rng = np.random.default_rng(seed)
        self.calls = []

    def generate(self, prompts, n=1, params=None, on_finish=None):
        self.calls.append((prompts, n, params))
        limits = np.repeat(np.asarray(params.max_tokens), 1)
        rows = []
        for index, (prompt, most) in enumerate(zip(prompts, limits, strict=True)):
            for number in range(n):
                letter = "R" if self.rng.random() < self.chances.get(chr(prompt[-1]), 0.5) else "W"
                ids = [*map(ord, letter * self.length), END][: int(most)]
                finish = "error" if self.error else "stop" if ids[-1] == END else "length"
                rows.append(
                    SimpleNamespace(prompt_index=index, sample_index=number, token_ids=ids, finish_reason=finish)
                )
        return rows


class Right(Planted):
    def verify(self, completion, problem, *, opened=False):
        from explorl.tasks import Verdict

        self.seen = [*getattr(self, "seen", []), (completion, opened)]
        return Verdict("R" in completion)


def probe(text, position, other, prompt="Q", **more):
    return TokenProbe([ord(c) for c in prompt], [ord(c) for c in text], position, ord(other), Problem("p", {}), **more)


def test_the_whole_answer_is_judged_and_the_prefix_shared():
    stub, task = Stub({"x": 1.0, "y": 0.0}), Right()
    found = sample_impacts(
        stub, task, [probe("axb$", 1, "y")], samples=4, limits=ContinuationLimits(9, None, (END,)), seed=5
    )
    (prompts, n, params), (one,) = stub.calls[0], found.tokens
    assert [bytes(ids).decode() for ids in prompts] == ["Qax", "Qay"]
    assert (n, list(params.max_tokens), params.seed) == (4, [7, 7], 5)
    assert {completion for completion, _ in task.seen} == {"axR", "ayW"}
    assert one.impact.mean == 1
    assert one.impact.low > 0
    assert (one.sampled.token, one.other.token) == ("x", "y")
    assert one.sampled.continuations[0] == Continuation("R", True, "stop")
    assert found.sampled_tokens == 16


def test_an_opened_thought_is_told_to_the_task():
    task = Right()
    sample_impacts(
        Stub({}),
        task,
        [probe("ax", 0, "y", prompt="Q<think>\n")],
        samples=2,
        limits=ContinuationLimits(9, None, (END,)),
    )
    assert all(opened for _, opened in task.seen)


def test_what_ends_has_no_room_or_breaks_off_is_counted():
    limits = ContinuationLimits(3, 5, (END,))
    ended = sample_impacts(Stub({"a": 0.0}), Right(), [probe("R$", 1, "a")], samples=4, limits=limits)
    assert (ended.ended, ended.no_room, ended.left_out) == (1, 0, 0)
    (one,) = ended.tokens
    assert one.sampled.continuations == (Continuation("", True, "none"),) * 4
    assert one.impact.mean == 0  # R stands in the answer whatever follows
    full = sample_impacts(Stub({}), Right(), [probe("abR", 2, "c")], samples=4, limits=limits)
    assert (full.no_room, full.sampled_tokens) == (2, 0)
    assert full.tokens[0].impact.mean == 1
    tight = sample_impacts(Stub({}), Right(), [probe("ab", 0, "c", prompt="QQQQ")], samples=2, limits=limits)
    assert tight.no_room == 2  # the model's context
    cut = sample_impacts(Stub({}, length=5), Right(), [probe("ab", 0, "c")], samples=2, limits=limits)
    assert cut.cut_off == 4
    broken = sample_impacts(Stub({}, error=True), Right(), [probe("ab", 0, "c")], samples=2, limits=limits)
    assert (broken.failed, broken.left_out, broken.tokens) == (4, 1, ())
    with pytest.raises(ValueError, match="samples is 0"):
        sample_impacts(Stub({}), Right(), [], samples=0, limits=limits)


def test_the_budget_is_the_worst_case():
    limits = ContinuationLimits(10, None, (END,))
    probes = [probe("abcdef", place, "z") for place in (0, 5)]
    assert most_tokens(probes, 3, limits) == 3 * 2 * (9 + 4)
    assert within_budget(probes, 3, limits, 3 * 2 * 9) == probes[:1]
    assert within_budget(probes, 3, limits, 3 * 2 * 9 - 1) == []
    assert most_tokens([probe("ab$", 2, "z")], 3, limits) == 3 * 7  # the end itself needs nothing


def test_hostile_continuations_are_cleaned():
    stub = Stub({})
    stub.tokenizer = SimpleNamespace(decode=lambda ids, **_: "\x1b[31m\ud800\u202e" + "x" * 5000)
    found = sample_impacts(stub, Right(), [probe("ab", 0, "c")], samples=2, limits=ContinuationLimits(9, None, (END,)))
    one = found.tokens[0]
    for text in (one.sampled.token, one.other.token, one.sampled.continuations[0].text):
        assert "\x1b" not in text
        assert "\u202e" not in text
        assert len(text) <= 2000
        text.encode()


# ---------------------------------------------------------------------------- planted effects
def test_a_planted_token_is_found_among_others():
    stub = Stub({"x": 0.9, "y": 0.1})
    probes = [probe("abcx$", 3, "y", answer=0)] + [probe("abcd$", place % 4, "z", answer=1) for place in range(30)]
    found = sample_impacts(stub, Right(), probes, samples=16, limits=ContinuationLimits(9, None, (END,)))
    assert found.tokens[0].significant
    assert found.tokens[0].impact.low <= 0.8 <= found.tokens[0].impact.high
    assert sum(token.significant for token in found.tokens[1:]) <= 1
    inside = sum(token.impact.low <= 0 <= token.impact.high for token in found.tokens[1:])
    assert inside >= 26


def test_nothing_is_found_where_nothing_is_planted():
    reports = 0
    for seed in range(100):
        probes = [
            probe("abcdefgh$", place % 8, "z", answer=place % 10, groups=("first",) if place % 2 else ("last",))
            for place in range(20)
        ]
        found = sample_impacts(
            Stub({}, seed=seed), Right(), probes, samples=12, limits=ContinuationLimits(12, None, (END,))
        )
        reports += any(token.significant for token in found.tokens)
        _, (one,) = group_impacts(found.tokens, RULES, PAIRS, seed=seed)
        reports += bool(one.mean.sign or one.square.sign) and not any(token.significant for token in found.tokens)
    assert reports <= 5


def made(answer, correct, other, groups, k=10):
    def side(right):
        return Side(1, "a", 0.5, tuple(Continuation("", i < right, "stop") for i in range(k)))

    counts = (correct, k, other, k)
    return TokenImpact(answer, 0, 5, 1, 1, 1.0, 2.0, groups, side(correct), side(other), newcombe(*counts),
                       fisher(*counts), 1.0)  # fmt: skip


def test_groups_are_compared_over_answers():
    tokens = [made(i, 9, 2 + i % 3, ("first",)) for i in range(12)] + [made(i, 5, 5, ("last",)) for i in range(12)]
    (first, last), (one,) = group_impacts(tokens, RULES, PAIRS)
    assert (first.name, first.tokens, first.answers) == ("first", 12, 12)
    assert first.mean.mean == pytest.approx(0.6)
    assert last.mean.mean == 0
    assert last.square.mean == pytest.approx(-2 * 0.25 / 9)  # no bias: below 0 as often as above
    assert one.name == "first − last"
    assert one.mean.sign == one.square.sign == 1
    assert group_impacts([], RULES, PAIRS) == ([], [])


# ---------------------------------------------------------------------------- a run
@pytest.fixture(scope="module")
def policy():
    return planted_policy()


def planted_table(policy, texts, step=3, **more):
    """Completions to q and qq in turn, as a run records them."""
    ids = [[*policy.tokenizer.convert_tokens_to_ids(list(text)), policy.tokenizer.eos_token_id] for text in texts]
    prompts = ["q" if i % 2 == 0 else "qq" for i in range(len(texts))]
    columns = {
        "prompt": prompts, "completion": list(texts), "correct": ["r" in text for text in texts],
        "tokens": [[*text, "<eos>"] for text in texts], "token_ids": ids, "entropy": [[0.5] * len(row) for row in ids],
    }  # fmt: skip
    return build_table("run", {step: columns | more})


def context_of(policy, said=None, **options):
    return Context(
        load_policy=lambda: policy, load_task=Planted, say=(said.append if said is not None else lambda _: None),
        options={f"impact.{key}": value for key, value in options.items()},
    )  # fmt: skip


def test_the_deciding_token_of_a_planted_model(policy):
    table = planted_table(policy, ["mgr", "nbw", "ngr", "mbw"])
    said: list[str] = []
    found = impact(table, context_of(policy, said, samples=16, each=20))
    by_place = {(token.answer, token.position): token for token in found.tokens}
    for answer, decides in ((0, 1), (1, -1), (2, 1), (3, -1)):
        one = by_place[answer, 1]
        assert one.impact.mean == decides
        assert one.significant
        assert {one.sampled.token, one.other.token} == {"g", "b"}
        assert one.other.probability == pytest.approx(0.5, abs=1e-3)
        assert one.entropy == pytest.approx(math.log(2), abs=1e-3)
        assert not by_place[answer, 0].significant  # m or n: nothing follows
    neutral = [by_place[answer, 0].impact for answer in range(4)]
    assert sum(one.low < 0 < one.high for one in neutral) >= 3  # 95 % each
    assert {token.position for token in found.tokens if "first" in token.groups} == {0}
    assert {token.answer for token in found.tokens if "negative" in token.groups} == {1, 3}
    assert "at most" in said[0]
    assert "tokens are sampled" in said[0]
    assert found.sampled_tokens <= int(said[0].split("at most ")[1].split()[0].replace(",", ""))
    assert {"impact", "impact_groups", "impact_comparisons"} == set(tables(found))
    assert "change the accuracy" in summary(found)
    again = impact(table, context_of(policy, samples=16, each=20))
    assert again == found  # the same seed
    other = impact(table, dataclasses.replace(context_of(policy, samples=16, each=20), seed=1))
    assert other.tokens != found.tokens


def test_a_flat_model_has_no_deciding_token():
    flat = planted_policy(flat=True)
    found = impact(planted_table(flat, ["mgr", "nbw"]), context_of(flat, rules="first,entropy", each=6))
    assert not [token for token in found.tokens if token.significant and token.position < 2]


def test_tokens_by_hand(policy):
    table = planted_table(policy, ["mgr", "nbw"])
    found = impact(table, context_of(policy, tokens="1:1, 0:3", samples=4))
    assert [(token.answer, token.position) for token in found.tokens] == [(1, 1), (0, 3)]
    assert found.tokens[0].groups == ("by hand",)
    assert any("impact.samples=5 is enough" in note for note in found.notes)
    assert any("ends the completion" in note for note in found.notes)  # 0:3 is the end itself
    for text, says in (
        ("1-1", "such as 12:3"), ("7:0", "completions 0 to 1"), ("0:9", "it has 0 to 3"), ("-1:0", "such as 12:3")
    ):  # fmt: skip
        with pytest.raises(ValueError, match=says):
            impact(table, context_of(policy, tokens=text))


def test_answers_may_be_as_long_as_the_records_tell(policy):
    whole = planted_table(policy, ["mgr", "nb"])
    assert completion_limit(whole, (policy.tokenizer.eos_token_id,)) == 8  # none was cut off, so none hit the limit
    assert completion_limit(whole, (999,)) == 4
    found = impact(whole, context_of(policy, tokens="0:0", samples=2, max_tokens=1))
    assert found.longest == 1
    assert any("without room for another token, which are judged unchanged: 2" in note for note in found.notes)


def test_a_model_that_the_engine_cannot_sample_is_said(policy, monkeypatch):
    def refuse(*args, **kwargs):
        raise UnsupportedModel(policy.model, "it has no attention")

    monkeypatch.setattr("explorl.rollout.engine.Engine.generate", refuse)
    found = impact(planted_table(policy, ["mgr"]), context_of(policy))
    assert isinstance(found, Unavailable)
    assert "no attention" in found.reason


def test_prompts_of_several_turns_are_found(policy):
    class Chat(Planted):
        def prompt(self, problem, template=None):
            return [{"role": "system", "content": "be brief"}, {"role": "user", "content": super().prompt(problem)}]

    found = problems_by_prompt(Chat(), {"be brief\nq", "be brief\nqq", "other"}, policy.tokenizer)
    assert {text: problem.id for text, (problem, _) in found.items()} == {"be brief\nq": "one", "be brief\nqq": "two"}


def test_stored_prompts_are_used_as_they_were(policy):
    ids = policy.tokenizer.convert_tokens_to_ids(["q", "m", "q"])
    found = impact(planted_table(policy, ["mgr"], prompt_ids=[ids]), context_of(policy, tokens="0:1", samples=4))
    assert found.tokens[0].impact.mean == 1


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"samples": 1}, "impact.samples is 1; use 2 or more"),
        ({"each": 0}, "impact.each is 0"),
        ({"samples": "many"}, "impact.samples is 'many'"),
        ({"rules": "entropy,top"}, "impact.rules .*'top'"),
        ({"temperature": 0.0}, "impact.temperature is 0.0"),
    ],
)
def test_options_that_cannot_be_used_are_said(policy, options, says):
    with pytest.raises(ValueError, match=says):
        impact(planted_table(policy, ["mgr"]), context_of(policy, **options))


def test_what_is_lacking_is_said(policy):
    table = planted_table(policy, ["mgr"])
    assert "impact.budget is 3 tokens" in impact(table, context_of(policy, budget=3)).reason
    strange = planted_table(policy, ["mgr"], prompt=["other"])
    assert "no completion with recorded tokens" in impact(strange, context_of(policy)).reason
    with pytest.raises(ValueError, match="whose prompt is not among"):
        impact(strange, context_of(policy, tokens="0:0"))
    alien = planted_table(policy, ["mgr"], token_ids=[[1, 2, 3, 999_999]])
    assert "the token id 999999" in impact(alien, context_of(policy)).reason
    bare = build_table("run", {1: {"prompt": ["q"], "completion": ["m"], "entropy": [[1.0]]}})
    with pytest.raises(ValueError, match="token_ids"):
        impact(bare, context_of(policy))
    few = impact(planted_table(policy, ["mgr", "nbw"]), context_of(policy, budget=200))
    assert isinstance(few, Unavailable) or any("leaves out" in note for note in few.notes)
