"""Generation with a tool: sequences stop where they call it, wait for its output, and continue after it.

    tools = ToolUse(python_tool(max_calls=3))
    rollouts = generate_with_tools(engine, prompts, n=4, params=SamplingParams(max_tokens=512), tools=tools)
    rollouts[0].calls                               # (ToolCall(source="print(6 * 7)\\n", status="ok", …), …)
    rollouts[0].sampled                             # False on the tool's output

While a call runs, the other sequences are sampled. Every sequence has its own interpreter, from its first call until
the sequence ends, so that a program cannot affect other sequences.

Limits: ``max_tokens`` includes outputs, because they fill the context too. An output that does not fit is cut off, and
the sequence ends by its length. A sequence without calls left gets a message instead of an output, and continues.

Tokens: a sequence stops with the token that completes its call. If that token contains more than the end of the call
and white space, it is removed, and the end of the call is added with the output, as tokens that were not sampled.
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
    """A tool for rollouts, with the options of its interpreters."""

    tool: ToolSpec
    warm: int = 2
    """Idle interpreters that are kept ready."""
    unisolated: bool = False
    """Run code without isolation if this system has none: see `InterpreterPool`."""

    def __post_init__(self) -> None:
        if not isinstance(self.tool, ToolSpec):
            raise ValueError(f"tool is {self.tool!r}; give a tool such as python_tool() or get_tool('python')")

    @classmethod
    def of(cls, tool: ToolUse | ToolSpec | str, argument: str = "tools") -> ToolUse:
        """Return the `ToolUse` for a tool or the name of one; raise `ValueError` naming the ``argument`` otherwise."""
        if isinstance(tool, ToolUse):
            return tool
        if isinstance(tool, str):
            return cls(get_tool(tool))
        if isinstance(tool, ToolSpec):
            return cls(tool)
        raise ValueError(
            f"{argument} is {tool!r}; give the name of a tool, such as 'python', or python_tool(max_calls=3) from "
            "explorl.rollout.tools"
        )

    def pool(self) -> InterpreterPool:
        """Return a pool of interpreters, which can be passed to several calls of `generate_with_tools`."""
        return self.tool.pool(warm=self.warm, unisolated=self.unisolated)

    def check(self, tokenizer: Any, model: str = "this model", stops: Sequence[str] = ()) -> None:
        """Raise `ValueError` if this tokenizer or these stop strings would prevent calls of the tool."""
        if tokenizer is None:
            raise ValueError(f"tool {self.tool.name!r} needs text, but the engine has no tokenizer; give it one")
        check_vocabulary(self.tool, tokenizer, model)
        check_stops(stops, self.tool)

    def calls(self, uses: Sequence[int] | None, rows: int) -> list[int]:
        """Return how many calls each sequence may make: ``uses`` after a check, or as many as the tool allows."""
        max_calls = self.tool.max_calls
        if uses is None:
            return [max_calls] * rows
        if len(uses) != rows:
            raise ValueError(f"uses has {len(uses)} values; give one for each of the {rows} rollouts")
        for row, value in enumerate(uses):
            if int(value) != value or not 0 <= value <= max_calls:
                raise ValueError(
                    f"uses[{row}] is {value!r}; tool {self.tool.name!r} allows whole numbers from 0 to its max_calls, "
                    f"{max_calls}"
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
    """Generate completions as `Engine.generate` does, with a tool that they may call.

    Args:
        uses: Number of calls that each rollout may make, in the order of the requests; with 0 it is sampled as
            `Engine.generate` would. None means as many as the tool allows.
        pool: Interpreters of `ToolUse.pool`, for callers that generate often.
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
