"""Tools that completions call in text (`explorl.rollout.tool_use`): checks, transcripts and metrics for a trainer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from trl.chat_template_utils import parse_response

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


def blank_outputs(completions: list[Any], transcripts: Sequence[ToolTranscript] | None, tokenizer: Any) -> list[Any]:
    """Return the completions for the reward functions: with the outputs of tools called in text left blank."""
    if transcripts is None:
        return completions
    return [
        _with_text(completion, transcript.blanked_text, tokenizer) if transcript.calls else completion
        for completion, transcript in zip(completions, transcripts, strict=True)
    ]


def _with_text(completion: Any, text: str, tokenizer: Any) -> Any:
    if isinstance(completion, str):
        return text
    if any(getattr(tokenizer, name, None) is not None for name in ("response_template", "response_schema")):
        return [parse_response(tokenizer, tokenizer.encode(text, add_special_tokens=False))]
    return [{**completion[0], "content": text}]


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
