"""Per-row sampling options with vLLM: through the vLLM engine that TRL sets up and keeps up to date."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from accelerate.utils import broadcast_object_list, gather_object

from explorl.rollout import Rollouts, SamplingParams
from explorl.rollout.backends.token_stats import StatsPass
from explorl.rollout.backends.vllm import ColocatedVllm, VllmEngine, VllmServer
from explorl.rollout.backends.vllm_requests import VllmCompletion


class TrlVllmSampler:
    """TRL's `VLLMGeneration` with individual options for each prompt.

    The main process calls a server for all processes. A colocated engine is called by every process, or by all
    processes of a tensor-parallel group together.
    """

    def __init__(self, generation: Any) -> None:
        self.generation = generation
        self._context: int | None = None

    @property
    def context(self) -> int | None:
        """The context length of the engine; with a server, the main process broadcasts it."""
        if self.generation.mode == "colocate":
            return ColocatedVllm(self.generation.llm).context
        if self._context is None:
            main = self.generation.accelerator.is_main_process
            context = [VllmServer(self.generation.vllm_client).context if main else None]
            broadcast_object_list(context, from_process=0)
            self._context = context[0] or 0
        return self._context or None

    def sample(self, prompts: Sequence[Sequence[int]], options: Sequence[dict[str, Any]]) -> list[VllmCompletion]:
        """Sample each prompt with its options."""
        rows = list(zip(prompts, options, strict=True))
        return self._served(rows) if self.generation.mode == "server" else self._colocated(rows)

    def _served(self, rows: list[Any]) -> list[VllmCompletion]:
        accelerator = self.generation.accelerator
        all_rows = gather_object(rows)
        completions: list[Any] = [None]
        if accelerator.is_main_process:
            completions = [VllmServer(self.generation.vllm_client).sample(*zip(*all_rows, strict=True))]
        broadcast_object_list(completions, from_process=0)
        first = accelerator.process_index * len(rows)
        return [VllmCompletion(*completion) for completion in completions[0][first : first + len(rows)]]

    def _colocated(self, rows: list[Any]) -> list[VllmCompletion]:
        generation, first, count = self.generation, 0, len(rows)
        if generation.enable_sleep_mode:
            if generation._llm_weights_sleeping:  # a sleeping engine has dropped its weights
                generation.sync_weights()
            generation.llm.wake_up(tags=["kv_cache"])
        if generation.tensor_parallel_size > 1:
            groups: list[Any] = [None] * generation.tensor_parallel_size
            torch.distributed.all_gather_object(groups, rows, group=generation.tp_group)
            first = torch.distributed.get_rank(group=generation.tp_group) * count
            rows = [row for group in groups for row in group]
            torch.distributed.barrier(device_ids=[generation.accelerator.local_process_index])  # as TRL does
        completions = ColocatedVllm(generation.llm).sample(*zip(*rows, strict=True))
        if generation.enable_sleep_mode:
            generation.llm.sleep(level=2)
            generation._llm_weights_sleeping = True
        return completions[first : first + count]


def trl_sampling_options(trainer: Any) -> dict[str, Any]:
    """Return TRL's sampling options of all rows as arguments of `SamplingParams`."""
    options: Mapping[str, Any] = {
        "temperature": trainer.temperature,
        "top_p": trainer.top_p,
        "top_k": max(0, trainer.top_k or 0),
        "min_p": trainer.min_p or 0.0,
        "repetition_penalty": trainer.repetition_penalty,
        "max_tokens": trainer.max_completion_length,
        "stop_token_ids": list(trainer.eos_token_ids),
    }
    changes = dict(trainer.args.generation_kwargs or {})
    if changes.get("stop_token_ids"):
        changes["stop_token_ids"] = [*options["stop_token_ids"], *changes["stop_token_ids"]]
    return {**options, **{name: value for name, value in changes.items() if value is not None}}


class VllmRows:
    """Samples the rows of a process and computes their token statistics."""

    def __init__(self, trainer: Any) -> None:
        rows, autocast = trainer.args.per_device_train_batch_size, trainer.accelerator.autocast
        stats_pass = StatsPass(trainer.model, rows=rows, autocast=autocast)
        self.engine = VllmEngine(
            trainer.model, trainer.tokenizer, TrlVllmSampler(trainer.vllm_generation), stats_pass=stats_pass
        )

    def sample(self, prompt_ids: list[list[int]], params: SamplingParams) -> tuple[Rollouts, list[list[float]]]:
        """Return one completion of each prompt, and vLLM's log q of its tokens."""
        return self.engine.generate_with_logps(prompt_ids, 1, params)
