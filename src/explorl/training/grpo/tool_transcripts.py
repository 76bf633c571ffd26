"""Tools that completions call in text (`explorl.rollout.tool_use`): checks, transcripts and metrics for a trainer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from explorl.rollout import Rollout
from explorl.rollout.tool_use import ToolUse
from explorl.rollout.tools import ToolSpec

ToolLike = ToolUse | ToolSpec | str


class ToolTranscript(NamedTuple):
    """The text of a completion that may have called a tool, with and without the tool's outputs."""

    text: str
    """The whole text, outputs included."""
    blanked_text: str
    """The text with empty outputs, including what follows a stop string in the last token: what rewards are for."""
    policy_text: str
    """The text without outputs and their fences: what response quality is measured on."""
    calls: tuple[Mapping[str, Any], ...] = ()
    """Source, status and text of each call; its tokens from ``begin`` to ``end`` are not the policy's."""

    def mask(self, length: int) -> list[int]:
        """Return 1 for each of ``length`` tokens that the policy sampled and 0 for the tool's tokens."""
        forced = [range(call["begin"], call["end"]) for call in self.calls]
        return [int(not any(position in span for span in forced)) for position in range(length)]

    @classmethod
    def of(cls, rollout: Rollout) -> ToolTranscript:
        """Return the transcript of a rollout."""
        names = ("source", "status", "text", "begin", "end")
        calls = tuple({name: getattr(call, name) for name in names} for call in rollout.calls)
        return cls(rollout.text, rollout.own_text + rollout.text_after_stop, rollout.sampled_text, calls)


def tool_call_metrics(transcripts: Sequence[ToolTranscript]) -> dict[str, float]:
    """Return the metrics of the calls of a generation batch, under TRL's names if it has them."""
    calls = [call for transcript in transcripts for call in transcript.calls]
    executed = [call for call in calls if call["status"] != "refused"]
    completions = max(len(transcripts), 1)
    return {
        "tools/call_frequency": len(executed) / completions,
        "tools/callers": sum(bool(transcript.calls) for transcript in transcripts) / completions,
        "tools/failure_frequency": sum(call["status"] != "ok" for call in executed) / max(len(executed), 1),
        "tools/refused": float(len(calls) - len(executed)),
    }
