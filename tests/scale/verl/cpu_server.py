"""A server of verl's that samples with a real model on a CPU, one request after the other."""

from __future__ import annotations

import asyncio
from typing import Any

import ray
import torch
from transformers import AutoModelForCausalLM
from verl.workers.rollout.base import BaseRollout
from verl.workers.rollout.replica import RolloutReplica, TokenOutput

from explorl.rollout.sampling import warp_bottom_p, warp_temperature, warp_top_p

NAME = "explorl_cpu_server"


class Server:
    """Requests are answered as vLLM does it: with their own parameters, and Explorl's among `extra_args`."""

    def __init__(self, path: str, response_length: int) -> None:
        torch.set_num_threads(1)
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        self.length, self.step = response_length, None
        self.asked: list[dict[str, Any]] = []
        self.moved: list[float] = []
        """How far the weights moved, each time that new ones came."""
        ends = self.model.generation_config.eos_token_id
        self.ends = {ends} if isinstance(ends, int) else set(ends or [])
        self.generator = torch.Generator().manual_seed(0)

    async def generate(
        self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any], **_: Any
    ) -> Any:
        await asyncio.sleep(0)
        self.asked.append(dict(sampling_params))
        return self._answer(prompt_ids, sampling_params)

    @torch.no_grad()
    def _answer(self, prompt_ids: list[int], params: dict[str, Any]) -> TokenOutput:
        tokens, logps, cache = [], [], None
        ids = torch.tensor([prompt_ids])
        while len(tokens) < self.length and not (tokens and tokens[-1] in self.ends):
            out = self.model(input_ids=ids, past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            log_q = log_distribution(out.logits[0, -1].float(), params)
            token = int(torch.multinomial(log_q.exp(), 1, generator=self.generator))
            tokens.append(token)
            logps.append(float(log_q[token]))
            ids = torch.tensor([[token]])
        extra = {"global_steps": self.step}
        return TokenOutput(token_ids=tokens, log_probs=logps, stop_reason="completed", extra_fields=extra)

    def load(self, weights: dict[str, torch.Tensor], step: int) -> None:
        own = dict(self.model.named_parameters())
        changes = [
            float((own[name] - value.view_as(own[name])).abs().max()) for name, value in weights.items() if name in own
        ]
        self.moved.append(max(changes))
        missing, unknown = self.model.load_state_dict(weights, strict=False)
        assert not unknown, unknown
        assert set(missing) <= {"lm_head.weight"}, missing
        self.step = step

    def told(self) -> dict[str, Any]:
        return {"requests": self.asked, "moved": self.moved}

    async def nothing(self, *args: Any, **kwargs: Any) -> None:
        return None

    wake_up = sleep = abort_all_requests = resume_generation = clear_kv_cache = nothing
    release_kv_cache = resume_kv_cache = start_profile = stop_profile = nothing


def log_distribution(logits: torch.Tensor, params: dict[str, Any]) -> torch.Tensor:
    """log q of the next token: temperature, top-p, then bottom-p with its chance, drawn for the token."""
    row = warp_temperature(logits.unsqueeze(0), float(params.get("temperature", 1.0)))
    row = warp_top_p(row, float(params.get("top_p", 1.0)))
    extra = params.get("extra_args") or {}
    if "explorl_bottom_p" in extra and float(torch.rand(())) < extra.get("explorl_bottom_p_frequency", 1.0):
        row = warp_bottom_p(row, float(extra["explorl_bottom_p"]))
    return row[0].log_softmax(-1)


class Adapter(BaseRollout):
    """The worker's end: hands the trained weights to the server."""

    async def resume(self, tags: list[str]) -> None:
        return None

    async def release(self) -> None:
        return None

    async def update_weights(self, weights: Any, global_steps: int | None = None, **_: Any) -> None:
        tensors = {}
        if hasattr(weights, "__aiter__"):
            async for name, tensor in weights:
                tensors[name] = tensor.detach().float().cpu().clone()
        else:
            for name, tensor in weights:
                tensors[name] = tensor.detach().float().cpu().clone()
        await ray.get_actor(NAME).load.remote(tensors, global_steps)


class Replica(RolloutReplica):
    """One server, in a process of its own."""

    async def launch_servers(self) -> None:
        path = self.model_config.path if hasattr(self.model_config, "path") else self.model_config["path"]
        server = ray.remote(Server).options(name=NAME, num_cpus=0).remote(path, self.config.response_length)
        self.servers, self._server_handle, self._server_address = [server], server, "cpu"
