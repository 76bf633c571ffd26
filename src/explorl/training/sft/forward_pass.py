"""Prepare a model for packed SFT: log-probabilities at given positions, and the tokens that fit into one pass."""

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

MAX_TOKENS, MIN_TOKENS = 65_536, 1_024
"""Tokens per pass on a GPU: more are not faster, and with fewer the GPU waits for the host."""
CPU_TOKENS = 4_096
VOCABULARY_CHUNK = 32_768
"""Columns of the head that TRL's function computes at a time."""


def add_scores(model: Any) -> bool:
    """Let the model's forward take ``scored`` positions of a packed row with their ``targets``; return whether it can.

    The head is then computed at those positions only, and since the host knows them, it need not wait for the device to
    count them. Return False if the model scales or caps logits, which TRL's fused head handles.
    """
    config = text_config(model)
    names = ("final_logit_softcapping", "logit_scale", "output_multiplier", "lm_head_multiplier", "logits_scaling")
    if any(getattr(config, name, None) is not None for name in names):
        return False
    trl_forward = model.forward

    @functools.wraps(type(model).forward)
    def forward(
        self: Any, *args: Any, scored: Tensor | None = None, targets: Tensor | None = None, **kwargs: Any
    ) -> Any:
        if scored is None:
            return trl_forward(*args, **kwargs)
        states = self.base_model(*args, use_cache=False, **kwargs).last_hidden_state[0].index_select(0, scored)
        head = self.get_output_embeddings()
        logps, entropy, _, _, top = ChunkedLogProbFunction.apply(
            states, head.weight, head.bias, targets, 1.0, VOCABULARY_CHUNK, None, 1.0, ("entropy", "is_top1")
        )
        return FusedCausalLMOutput(log_probs=logps, entropy=entropy, is_top1=top)

    model.forward = types.MethodType(forward, model)
    return True


def tokens_that_fit(
    model: Any, device: torch.device, dtype: torch.dtype | None, kind: passes.Kind, checkpointing: bool
) -> int:
    """Return how many tokens one pass may have, so that its activations take half of the free memory.

    For the backward pass a layer keeps its sums and norms (two each of h numbers), queries, keys, values, the attention
    output, and three times the inner width i: about h · (8 + 8 s) + 3 i s bytes per token, with s bytes per number. The
    model's own layers keep about twice that. With checkpointing, only the input of each layer is kept, plus one whole
    layer.
    """
    if device.type != "cuda":
        return CPU_TOKENS
    config = text_config(model)
    hidden = int(getattr(config, "hidden_size", 1024))
    inner = int(getattr(config, "intermediate_size", None) or 4 * hidden)
    layers = int(getattr(config, "num_hidden_layers", 24))
    size = 2 if dtype is not None else next(model.parameters()).element_size()
    layer = (hidden * (8 + 8 * size) + 3 * inner * size) * (1 if kind == "unrolled" else 2)
    kept = layers * hidden * (4 + size) + layer if checkpointing else layers * layer
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    free = torch.cuda.mem_get_info(device)[0] - 12 * trained  # gradients and AdamW's state are still to come
    return int(min(max(0.5 * free / kept, MIN_TOKENS), MAX_TOKENS))
