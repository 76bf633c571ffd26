"""verl's agent loops with sampling parameters per row."""

from __future__ import annotations

import json
from typing import Any

from verl.experimental.agent_loop.agent_loop import register
from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop
from verl.experimental.agent_loop.tool_agent_loop import ToolAgentLoop

from explorl.integrations.verl.sampling_params import FIELD, request_parameters


class RowSampling:
    """Mixin for an agent loop, listed before it as a base class, that applies the strategies' sampling parameters."""

    async def run(self, sampling_params: dict[str, Any], **columns: Any) -> Any:
        rows = columns.pop(FIELD, None)
        if rows is not None:
            sampling_params = request_parameters(sampling_params, json.loads(rows)[int(columns["session_id"])])
        return await super().run(sampling_params, **columns)  # type: ignore[misc]


@register("explorl_single_turn_agent")
class SingleTurnLoop(RowSampling, SingleTurnAgentLoop):
    """verl's single-turn loop with sampling parameters per row."""


@register("explorl_tool_agent")
class ToolLoop(RowSampling, ToolAgentLoop):
    """verl's tool loop with sampling parameters per row."""


LOOPS = {"single_turn_agent": "explorl_single_turn_agent", "tool_agent": "explorl_tool_agent"}
"""verl's own loops, and their variants with sampling parameters per row."""


def row_sampling_loop(name: str) -> str:
    """Return the loop with sampling parameters per row that replaces a loop of verl's."""
    from verl.experimental.agent_loop.agent_loop import _agent_loop_registry

    if name in LOOPS:
        return LOOPS[name]
    target = str(dict(_agent_loop_registry.get(name, {})).get("_target_", ""))
    if target:
        from verl.utils.import_utils import load_class_from_fqn

        if issubclass(load_class_from_fqn(target, "AgentLoop"), RowSampling):
            return name
    raise ValueError(
        f"the agent loop {name!r} does not take sampling parameters per row, which a strategy sets; use "
        f"{', '.join(LOOPS)}, or add explorl.integrations.verl.agent_loop.RowSampling to the bases of yours"
    )
