"""Rows that a strategy has sampled in its own way, by the vLLM that TRL has set up and whose weights TRL keeps up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from accelerate.utils import broadcast_object_list, gather_object

from explorl.rollout import Rollouts, SamplingParams
from explorl.rollout.backends.token_stats import StatsPass
from explorl.rollout.backends.vllm import ColocatedVllm, VllmEngine, VllmServer
from explorl.rollout.backends.vllm_requests import VllmCompletion
from explorl.strategies import Strategy
from explorl.strategies._lib.validate import title
from explorl.strategies.base import overrides

KNOWN = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_tokens", "stop", "stop_token_ids")
"""Keys of ``generation_kwargs`` that go along with what strategies say of each row."""


class TrlSampler:
    """TRL's `VLLMGeneration`, each prompt with options of its own: on a server by the main process for all of them,
    colocated on every process, or by all processes of a tensor-parallel group together."""

    def __init__(self, generation: Any) -> None:
        self.generation = generation
        self._context: int | None = None

    @property
    def context(self) -> int | None:
        """Of the server, the main process tells the others."""
        if self.generation.mode == "colocate":
            return ColocatedVllm(self.generation.llm).context
        if self._context is None:
            main = self.generation.accelerator.is_main_process
            known = [VllmServer(self.generation.vllm_client).context if main else None]
            broadcast_object_list(known, from_process=0)
            self._context = known[0] or 0
        return self._context or None

    def sample(self, prompts: Sequence[Sequence[int]], options: Sequence[dict[str, Any]]) -> list[VllmCompletion]:
        rows = list(zip(prompts, options, strict=True))
        return self._served(rows) if self.generation.mode == "server" else self._colocated(rows)

    def _served(self, rows: list[Any]) -> list[VllmCompletion]:
        accelerator = self.generation.accelerator
        everybodys = gather_object(rows)
        drawn: list[Any] = [None]
        if accelerator.is_main_process:
            drawn = [VllmServer(self.generation.vllm_client).sample(*zip(*everybodys, strict=True))]
        broadcast_object_list(drawn, from_process=0)
        first = accelerator.process_index * len(rows)
        return [VllmCompletion(*one) for one in drawn[0][first : first + len(rows)]]

    def _colocated(self, rows: list[Any]) -> list[VllmCompletion]:
        generation, first, count = self.generation, 0, len(rows)
        if generation.enable_sleep_mode:
            if generation._llm_weights_sleeping:  # sleeping, it has forgotten them
                generation.sync_weights()
            generation.llm.wake_up(tags=["kv_cache"])
        if generation.tensor_parallel_size > 1:
            groups: list[Any] = [None] * generation.tensor_parallel_size
            torch.distributed.all_gather_object(groups, rows, group=generation.tp_group)
            first = torch.distributed.get_rank(group=generation.tp_group) * count
            rows = [row for group in groups for row in group]
            torch.distributed.barrier(device_ids=[generation.accelerator.local_process_index])  # as TRL does
        drawn = ColocatedVllm(generation.llm).sample(*zip(*rows, strict=True))
        if generation.enable_sleep_mode:
            generation.llm.sleep(level=2)
            generation._llm_weights_sleeping = True
        return drawn[first : first + count]


def refuse_with_vllm(args: Any, strategies: Sequence[Strategy]) -> None:
    """Raises for arguments and strategies that vLLM cannot serve, before it is loaded."""
    if (args.generation_kwargs or {}).get("stop_strings") is not None:
        raise ValueError("generation_kwargs has 'stop_strings', which vLLM calls 'stop'; use that name")
    for strategy in strategies:
        if overrides(strategy, "branching"):
            raise ValueError(
                f"{title(strategy)} lets answers branch off each other, which vLLM cannot do; use engine='explorl', or "
                "leave it out"
            )
        if strategy.needs_min_p_mass is not None:
            raise ValueError(
                f"{title(strategy)} needs to know how likely other tokens were, which only Explorl's engine records "
                "(vLLM samples); use engine='explorl', or leave it out"
            )


def refuse(trainer: Any, strategies: Sequence[Strategy]) -> None:
    """Raises where vLLM cannot sample the rows as these strategies say."""
    named = title(strategies[0])
    if trainer.tools or trainer.environment_factories:
        raise ValueError(
            f"{named} sets how each row is sampled, and with vLLM a conversation with tools is sampled by TRL alone; "
            "use engine='explorl', or leave out the tools"
        )
    if trainer.sees_images:
        raise ValueError(f"{named} sets how each row is sampled, which is not possible with images; leave it out")
    if trainer.args.vllm_structured_outputs_regex is not None:
        raise ValueError(
            f"{named} sets how each row is sampled, and what vllm_structured_outputs_regex leaves of a distribution is "
            "not recorded; leave out one of them"
        )
    beyond = sorted(set(trainer.args.generation_kwargs or {}) - set(KNOWN))
    if beyond:
        raise ValueError(
            f"{named} sets how each row is sampled, and generation_kwargs has {beyond[0]!r}; beside it there may be "
            f"{', '.join(KNOWN)}"
        )


def options(trainer: Any) -> dict[str, Any]:
    """What TRL would sample all rows with, as arguments of `SamplingParams`."""
    given: Mapping[str, Any] = {
        "temperature": trainer.temperature,
        "top_p": trainer.top_p,
        "top_k": max(0, trainer.top_k or 0),
        "min_p": trainer.min_p or 0.0,
        "repetition_penalty": trainer.repetition_penalty,
        "max_tokens": trainer.max_completion_length,
        "stop_token_ids": list(trainer.eos_token_ids),
    }
    own = dict(trainer.args.generation_kwargs or {})
    if own.get("stop_token_ids"):
        own["stop_token_ids"] = [*given["stop_token_ids"], *own["stop_token_ids"]]
    return {**given, **{name: value for name, value in own.items() if value is not None}}


class VllmRows:
    """Samples and records the rows of a process."""

    def __init__(self, trainer: Any) -> None:
        rows, autocast = trainer.args.per_device_train_batch_size, trainer.accelerator.autocast
        records = StatsPass(trainer.model, rows=rows, autocast=autocast)
        self.engine = VllmEngine(
            trainer.model, trainer.tokenizer, TrlSampler(trainer.vllm_generation), stats_pass=records
        )

    def draw(self, prompt_ids: list[list[int]], params: SamplingParams) -> tuple[Rollouts, list[list[float]]]:
        """One completion of each prompt, and vLLM's log q of its tokens."""
        return self.engine.generate_with_logps(prompt_ids, 1, params)
