"""Generation with a tool: rows stop where they call it, wait for its output, and go on after it.

    tools = ToolUse(python_tool(max_calls=3))
    rollouts = generate_with_tools(engine, prompts, n=4, params=SamplingParams(max_tokens=512), tools=tools)
    rollouts[0].calls                               # (ToolCall(source="print(6 * 7)\\n", status="ok", …), …)
    rollouts[0].sampled                             # False on what the tool said

While a call runs, the other rows are sampled. Every row has an interpreter of its own, which begins with its first call
and ends with the row; what a program does to it concerns no other row.

Limits. ``max_tokens`` is that of the whole completion, outputs included, because they fill the context too; an output
that does not fit is cut there, and the row has ended by its length. A row that has made all its calls is told so in
place of an output, and goes on.

Tokens. A row ends with the token that completes its call. Where that token says more than the end of the call and white
space, it is taken back, and the end of the call comes with the output, as tokens that were not sampled.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from explorl.rollout.engine import Engine
from explorl.rollout.requests import Prompt
from explorl.rollout.rollouts import Rollout, Rollouts
from explorl.rollout.sampling import SamplingParams
from explorl.rollout.tool_session import ToolSession
from explorl.rollout.tools import ToolSpec, check_stops, check_vocabulary, get_tool
from explorl.sandbox.interpreter_pool import InterpreterPool

__all__ = ["ToolSession", "ToolUse", "generate_with_tools"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ToolUse:
    """A tool for rollouts, and how its interpreters are run."""

    tool: ToolSpec
    warm: int = 2
    """Interpreters that are kept ready beyond those in use."""
    unisolated: bool = False
    """Run code without isolation where this system has none: see `InterpreterPool`."""

    def __post_init__(self) -> None:
        if not isinstance(self.tool, ToolSpec):
            raise ValueError(f"tool is {self.tool!r}; give a tool, like python_tool() or get_tool('python')")

    @classmethod
    def of(cls, given: ToolUse | ToolSpec | str, argument: str = "tools") -> ToolUse:
        """A tool, or the tool of this name; an error names the ``argument`` that it was given as."""
        if isinstance(given, ToolUse):
            return given
        if isinstance(given, str):
            return cls(get_tool(given))
        if isinstance(given, ToolSpec):
            return cls(given)
        raise ValueError(
            f"{argument} is {given!r}; give the name of a tool, like 'python', or python_tool(max_calls=3) from "
            "explorl.rollout.tools"
        )

    def pool(self) -> InterpreterPool:
        """Interpreters for rollouts, which may serve one `generate_with_tools` after the other."""
        return self.tool.pool(warm=self.warm, unisolated=self.unisolated)

    def check(self, tokenizer: Any, model: str = "this model", stops: Sequence[str] = ()) -> None:
        """ValueError where a model with this tokenizer, or a row with these stop strings, could not call the tool."""
        if tokenizer is None:
            raise ValueError(f"tool {self.tool.name!r} is called in text, but the engine has no tokenizer; give it one")
        check_vocabulary(self.tool, tokenizer, model)
        check_stops(stops, self.tool)

    def calls(self, uses: Sequence[int] | None, rows: int) -> list[int]:
        """Calls that each of so many rows may make: ``uses``, checked, or as many as the tool allows."""
        most = self.tool.max_calls
        if uses is None:
            return [most] * rows
        if len(uses) != rows:
            raise ValueError(f"uses has {len(uses)} values; give one for each of the {rows} rollouts")
        for row, value in enumerate(uses):
            if int(value) != value or not 0 <= value <= most:
                raise ValueError(
                    f"uses[{row}] is {value!r}; tool {self.tool.name!r} allows whole numbers from 0 to its max_calls, "
                    f"{most}"
                )
        return [int(value) for value in uses]


def generate_with_tools(
    engine: Engine,
    prompts: Sequence[Prompt],
    n: int,
    params: SamplingParams | None,
    tools: ToolUse,
    *,
    uses: Sequence[int] | None = None,
    pool: InterpreterPool | None = None,
    on_finish: Callable[[Rollout], object] | None = None,
) -> Rollouts:
    """As `Engine.generate`, with a tool that rows may call.

    ``uses``: calls that each rollout may make, in the order of the requests; 0 samples it as `Engine.generate` does.
    None: as many as the tool allows. ``pool``: interpreters of `ToolUse.pool`, for callers that generate often.
    """
    with ToolSession(engine, prompts, n, params, tools, uses=uses, pool=pool) as session:
        while session.running:
            for rollout in session.step():
                if on_finish is not None:
                    on_finish(rollout)
        rollouts = Rollouts(session.rollouts(), session.prompt_ids, n, session.seed)
    for rollout in rollouts.errors:
        logger.error(rollout.error)
    return rollouts
