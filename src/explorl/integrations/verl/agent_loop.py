"""verl's agent loops with sampling parameters of each row's own."""

from __future__ import annotations

import json
from typing import Any

from verl.experimental.agent_loop.agent_loop import register
from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop
from verl.experimental.agent_loop.tool_agent_loop import ToolAgentLoop

from explorl.integrations.verl.sampling_params import FIELD, request


class RowSampling:
    """Mixin of an agent loop, named before it: the strategies' parameters take the place of the run's."""

    async def run(self, sampling_params: dict[str, Any], **columns: Any) -> Any:
        rows = columns.pop(FIELD, None)
        if rows is not None:
            sampling_params = request(sampling_params, json.loads(rows)[int(columns["session_id"])])
        return await super().run(sampling_params, **columns)  # type: ignore[misc]


@register("explorl_single_turn_agent")
class SingleTurn(RowSampling, SingleTurnAgentLoop):
    """One answer to a prompt."""


@register("explorl_tool_agent")
class Tools(RowSampling, ToolAgentLoop):
    """An answer with calls of verl's tools."""


LOOPS = {"single_turn_agent": "explorl_single_turn_agent", "tool_agent": "explorl_tool_agent"}
"""verl's own loops, and the same with parameters of each row's own."""


def loop_for(name: str) -> str:
    """The loop that stands for one of verl's."""
    from verl.experimental.agent_loop.agent_loop import _agent_loop_registry

    if name in LOOPS:
        return LOOPS[name]
    target = str(dict(_agent_loop_registry.get(name, {})).get("_target_", ""))
    if target:
        from verl.utils.import_utils import load_class_from_fqn

        if issubclass(load_class_from_fqn(target, "AgentLoop"), RowSampling):
            return name
    raise ValueError(
        f"the agent loop {name!r} does not take sampling parameters of each row's own, which a strategy sets; use "
        f"{', '.join(LOOPS)}, or derive yours from explorl.integrations.verl.agent_loop.RowSampling as well"
    )
