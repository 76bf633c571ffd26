"""What a packed pass of SFT needs of a model: scores at places that the host knows, and how many tokens fit."""

from __future__ import annotations

import functools
import types
from typing import Any

import torch
from torch import Tensor
from trl.kernels import ChunkedLogProbFunction
from trl.trainer.utils import FusedCausalLMOutput

from explorl.modeling import passes
from explorl.modeling.proof import text_config

MOST, FEWEST = 65_536, 1_024
"""Tokens of a pass on a GPU: more do not make it faster, and with fewer it waits for the host."""
ON_CPU = 4_096
VOCABULARY_AT_ONCE = 32_768
"""Columns of the head that TRL's function computes at a time."""


def add_scores(model: Any) -> bool:
    """Lets the model's forward take ``scored`` places of a packed row and their ``targets``, beside TRL's fused head.

    The head then sees only those places, and since the host knows them, it does not wait for the device to count them.
    False where logits are scaled or capped, which TRL's head knows of.
    """
    config = text_config(model)
    names = ("final_logit_softcapping", "logit_scale", "output_multiplier", "lm_head_multiplier", "logits_scaling")
    if any(getattr(config, name, None) is not None for name in names):
        return False
    fused = model.forward

    @functools.wraps(type(model).forward)
    def forward(
        self: Any, *args: Any, scored: Tensor | None = None, targets: Tensor | None = None, **kwargs: Any
    ) -> Any:
        if scored is None:
            return fused(*args, **kwargs)
        states = self.base_model(*args, use_cache=False, **kwargs).last_hidden_state[0].index_select(0, scored)
        head = self.get_output_embeddings()
        logps, entropy, _, _, top = ChunkedLogProbFunction.apply(
            states, head.weight, head.bias, targets, 1.0, VOCABULARY_AT_ONCE, None, 1.0, ("entropy", "is_top1")
        )
        return FusedCausalLMOutput(log_probs=logps, entropy=entropy, is_top1=top)

    model.forward = types.MethodType(forward, model)
    return True


def tokens_that_fit(
    model: Any, device: torch.device, dtype: torch.dtype | None, kind: passes.Kind, checkpointing: bool
) -> int:
    """How many tokens one pass may have, so that what it keeps for the backward pass takes half of the free memory.

    A layer keeps its sums and norms (two each of h numbers), queries, keys, values and what is mixed of them, and three
    times the inner width i: about h · (8 + 8 s) + 3 i s bytes, where s are the bytes of a number. The model's own
    layers keep about twice that. With checkpointing only what goes into each layer is kept, and one layer is whole.
    """
    if device.type != "cuda":
        return ON_CPU
    config = text_config(model)
    hidden = int(getattr(config, "hidden_size", 1024))
    inner = int(getattr(config, "intermediate_size", None) or 4 * hidden)
    layers = int(getattr(config, "num_hidden_layers", 24))
    size = 2 if dtype is not None else next(model.parameters()).element_size()
    layer = (hidden * (8 + 8 * size) + 3 * inner * size) * (1 if kind == "unrolled" else 2)
    kept = layers * hidden * (4 + size) + layer if checkpointing else layers * layer
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    free = torch.cuda.mem_get_info(device)[0] - 12 * trained  # gradients and AdamW's state are still to come
    return int(min(max(0.5 * free / kept, FEWEST), MOST))
