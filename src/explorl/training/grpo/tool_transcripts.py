"""Tools that answers call in text (`explorl.rollout.tool_use`): which one a trainer has, and what was said with it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from explorl.rollout import Rollout
from explorl.rollout.tool_use import ToolUse
from explorl.rollout.tools import ToolSpec

ToolLike = ToolUse | ToolSpec | str


class Said(NamedTuple):
    """An answer that may have called a tool."""

    text: str
    """All of it, outputs included."""
    own: str
    """With every output left blank, and all of the last token, as of an answer without calls: what rewards are given
    for."""
    written: str
    """Without outputs and all that belongs to them: what is measured."""
    calls: tuple[Mapping[str, Any], ...] = ()
    """Each with its source, status and text, and with the tokens ``begin`` to ``end`` that the policy did not write."""

    def mask(self, length: int) -> list[int]:
        """1 on the tokens that the policy wrote, of so many."""
        forced = [range(call["begin"], call["end"]) for call in self.calls]
        return [int(not any(place in span for span in forced)) for place in range(length)]

    @classmethod
    def of(cls, rollout: Rollout) -> Said:
        names = ("source", "status", "text", "begin", "end")
        calls = tuple({name: getattr(call, name) for name in names} for call in rollout.calls)
        return cls(rollout.text, rollout.own_text + rollout.text_after_stop, rollout.sampled_text, calls)


def refuse_beside(tool: ToolUse | None, given: Mapping[str, Any]) -> None:
    """What a tool in text does not go with, before anything is loaded."""
    if tool is None:
        return
    for name in ("tools", "environment_factory", "rollout_func"):
        if given.get(name):
            raise ValueError(
                f"interpreter={tool.tool.name!r} does not go with {name}: each samples in its own way; leave out "
                "one of them"
            )


def numbers_of(said: Sequence[Said]) -> dict[str, float]:
    """What is logged of the calls of a generation batch, under TRL's names where it has one."""
    calls = [call for one in said for call in one.calls]
    made = [call for call in calls if call["status"] != "refused"]
    return {
        "tools/call_frequency": len(made) / max(len(said), 1),
        "tools/callers": sum(bool(one.calls) for one in said) / max(len(said), 1),
        "tools/failure_frequency": sum(call["status"] != "ok" for call in made) / max(len(made), 1),
        "tools/refused": float(len(calls) - len(made)),
    }
