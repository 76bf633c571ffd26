"""Every analysis of tokens on a small planted run: result, sentence, tables and pictures, hostile tokens among them."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest

from explorl.analysis.built_in import ANALYSES
from explorl.analysis.lens import Context, Unavailable
from explorl.analysis.lens_table import build_table
from explorl.report.figures import file_png, file_svg

from .planted import Planted, planted_policy

TOKEN_ANALYSES = [one for one in ANALYSES if one.lone or one.name == "instances"]
HOSTILE = '</svg><script>alert(1)</script>$\\frac{1}{2}$"&'


@pytest.fixture(scope="module")
def policy():
    return planted_policy()


def columns(policy, texts, rng):
    ids = [[*policy.tokenizer.convert_tokens_to_ids(list(text)), policy.tokenizer.eos_token_id] for text in texts]
    return {
        "prompt": ["q"] * len(texts), "completion": list(texts), "correct": ["r" in text for text in texts],
        "tokens": [[*text, HOSTILE] for text in texts], "token_ids": ids,
        **{name: [(-rng.random(len(row))).tolist() for row in ids] for name in ("logp", "logp_after")},
        "entropy": [rng.random(len(row)).tolist() for row in ids],
    }  # fmt: skip


@pytest.mark.parametrize("analysis", TOKEN_ANALYSES, ids=lambda analysis: analysis.name)
def test_every_analysis_says_tells_and_draws(analysis, policy):
    rng = np.random.default_rng(0)
    table = build_table("run", {step: columns(policy, ["mgr", "nbw", "ngr", "mbw"] * 2, rng) for step in (1, 2)})
    context = Context(load_policy=lambda: policy, load_task=Planted, options={"impact.samples": 4, "impact.each": 2})
    result = analysis.run(table, context)
    assert not isinstance(result, Unavailable), result.reason
    said = result.sentence
    assert said.endswith(".")
    assert "nan" not in said
    for table in result.tables.values():
        assert table.rows
        assert table.to_json()
        assert table.to_markdown()
    assert bool(result.charts) == (analysis.name != "gradients")
    for chart in result.charts:
        assert file_png(chart).startswith(b"\x89PNG")
        tree = ElementTree.fromstring(file_svg(chart).split("\n", 1)[1])
        assert not [node for node in tree.iter() if node.tag.endswith("script")]
        assert chart.caption.endswith(".")


@pytest.mark.parametrize("analysis", TOKEN_ANALYSES, ids=lambda analysis: analysis.name)
def test_every_analysis_says_what_it_lacks(analysis):
    bare = build_table("run", {1: {"prompt": ["q"], "completion": ["m"]}})
    result = analysis.run(bare, Context())
    assert isinstance(result, Unavailable)
    assert "token" in result.reason


@pytest.mark.parametrize("analysis", [one for one in TOKEN_ANALYSES if one.lone], ids=lambda analysis: analysis.name)
def test_a_lone_checkpoint_has_no_history(analysis, policy):
    table = build_table("lone", {0: columns(policy, ["mgr", "nbw"] * 4, np.random.default_rng(1))})
    context = Context(load_policy=lambda: policy, load_task=Planted, options={"impact.samples": 2, "impact.each": 1})
    result = analysis.run(table, context)
    assert not isinstance(result, Unavailable)
    assert "fifth of the steps" not in result.sentence
