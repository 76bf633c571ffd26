"""Weights handed over to a vLLM server by gloo, where NCCL has no GPU: the transport, and nothing else of the way.

TRL's client, vLLM's routes and the reloading of vLLM's own engine for NCCL stay as they are. The server is started with
``--weight-transfer-config '{"backend": "gloo"}' --worker-extension-cls tests.scale.vllm.gloo_weights.Worker``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed import ProcessGroupGloo, TCPStore
from trl.generation import vllm_client, vllm_generation
from vllm.distributed.weight_transfer import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine

BACKEND = "gloo"


def joined(address: str, port: int, rank: int, size: int) -> Any:
    """The group of the trainer, which is its first process, and of the server's workers."""
    return ProcessGroupGloo(TCPStore(address, port, size, rank == 0), rank, size)


class GlooWeights(NCCLWeightTransferEngine):
    """vLLM's end."""

    def init_transfer_engine(self, init_info: Any) -> None:
        size, rank = init_info.world_size, init_info.rank_offset  # of a single worker
        self.model_update_group = joined(init_info.master_address, init_info.master_port, rank, size)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: Any) -> None:
        for name, kind, shape in zip(update_info.names, update_info.dtype_names, update_info.shapes, strict=True):
            weight = torch.empty(shape, dtype=getattr(torch, kind))
            self.model_update_group.broadcast(weight, 0).wait()  # type: ignore[union-attr]
            self.model.load_weights([(name, weight)])


if BACKEND not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine(BACKEND, GlooWeights)


class Worker:
    """An extension of vLLM's worker that adds nothing: to name it has this module imported there."""


class Client(vllm_client.VLLMClient):
    """TRL's end. Its own refuses a trainer that is not on a GPU."""

    def init_communicator(self, device: Any = 0) -> None:
        super().init_communicator("cuda")  # without a number, so that no device is touched

    def close_communicator(self) -> None:
        self.communicator = None


def in_place_of_nccl() -> dict[tuple[Any, str], Any]:
    """What stands in for what in TRL, to be set by the tests."""
    return {
        (vllm_generation, "VLLMClient"): Client,
        (vllm_client, "open_trainer_endpoint"): _opened,
        (vllm_client, "packed_nccl_broadcast_producer"): _sent,
    }


def _opened(init_info: dict[str, Any]) -> Any:
    return joined(init_info["master_address"], init_info["master_port"], 0, init_info["world_size"])


def _sent(iterator: Iterator[tuple[str, torch.Tensor]], group: Any, src: int, post_iter_func: Any) -> None:
    for item in iterator:
        group.broadcast(post_iter_func(item).contiguous(), src).wait()
