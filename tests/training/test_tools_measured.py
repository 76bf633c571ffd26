"""Answers with calls: what is measured of their text is what the policy wrote, and not the frame of an output."""

from __future__ import annotations

from pathlib import Path

from explorl.analysis.response_quality import quality_by_step
from explorl.core.store import RunStore
from explorl.metrics.quality import trigram_redundancy
from explorl.rollout import Engine, SamplingParams
from explorl.rollout.tool_use import ToolUse, generate_with_tools
from explorl.rollout.tools import python_tool
from explorl.training.grpo.logged_columns import calls_columns, own_words
from explorl.training.grpo.tool_transcripts import Said

from ..rollout.planted import Desk, always, echo, planted, standing_in


def test_the_frame_of_an_output_is_not_measured(tmp_path: Path) -> None:
    model, tokenizer = planted(always(["go", "```python\n6*7\n", "```"], **{"\n": "```python\n6*7\n"}))
    tools, params = ToolUse(python_tool(), warm=0), SamplingParams(temperature=0, max_tokens=63)
    start, pool = [[tokenizer.convert_tokens_to_ids("go")]], standing_in(Desk(echo))
    (rollout,) = generate_with_tools(Engine(model, tokenizer), start, 1, params, tools, pool=pool)
    said = Said.of(rollout)
    assert said.own == "```python\n6*7\n```\n```output\n```\n" * 3
    assert said.written.split() == ["```python", "6*7", "```"] * 3
    assert own_words({}, 1, [said]) == [said.written]
    store = RunStore.create(tmp_path / "run", {})
    store.write_rollouts(1, {"prompt": ["go"], **calls_columns([said])})
    (found,) = quality_by_step(store)
    assert found.redundancy == trigram_redundancy(said.written) == 1 - 3 / 7
    assert trigram_redundancy(said.own) != found.redundancy
