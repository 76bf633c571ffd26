"""Answers with calls: what is measured of their text is what the policy wrote, and not the frame of an output."""

from __future__ import annotations

from pathlib import Path

from explorl.analysis.response_quality import quality_by_step
from explorl.core.store import RunStore
from explorl.metrics.quality import trigram_redundancy
from explorl.rollout import Engine, SamplingParams
from explorl.rollout.tool_use import ToolUse, generate_with_tools
from explorl.rollout.tools import python_tool
from explorl.training.grpo.logged_columns import policy_texts, tool_call_columns
from explorl.training.grpo.tool_transcripts import ToolTranscript

from ..rollout.planted import Desk, always, echo, planted, standing_in


def test_the_frame_of_an_output_is_not_measured(tmp_path: Path) -> None:
    model, tokenizer = planted(always(["go", "```python\n6*7\n", "```"], **{"\n": "```python\n6*7\n"}))
    tools, params = ToolUse(python_tool(), warm=0), SamplingParams(temperature=0, max_tokens=63)
    start, pool = [[tokenizer.convert_tokens_to_ids("go")]], standing_in(Desk(echo))
    (rollout,) = generate_with_tools(Engine(model, tokenizer), start, 1, params, tools, pool=pool)
    transcript = ToolTranscript.of(rollout)
    assert transcript.blanked_text == "```python\n6*7\n```\n```output\n```\n" * 3
    assert transcript.policy_text.split() == ["```python", "6*7", "```"] * 3
    assert policy_texts({}, 1, [transcript]) == [transcript.policy_text]
    store = RunStore.create(tmp_path / "run", {})
    store.write_rollouts(1, {"prompt": ["go"], **tool_call_columns([transcript])})
    (quality,) = quality_by_step(store)
    assert quality.redundancy == trigram_redundancy(transcript.policy_text) == 1 - 3 / 7
    assert trigram_redundancy(transcript.blanked_text) != quality.redundancy
