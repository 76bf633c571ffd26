"""Choose the fastest pass for log-probabilities in training that is proven correct on the model itself.

"unrolled"      packed, with the layers of `explorl.modeling.llama_pass`
"packed"        packed, with the model's own layers
"padded"        as the model and TRL do it
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, Literal

import torch
from torch import Tensor

from explorl.modeling import proof
from explorl.modeling.fast_paths import PathChoice, fastest, padded_rows
from explorl.modeling.llama_pass import llama_pass
from explorl.modeling.packed import packed_logps

Kind = Literal["unrolled", "packed", "padded"]


def choose(
    model: Any, reach: int, *, dtype: torch.dtype | None = None, head_temperature: float = 1.0
) -> PathChoice[Kind]:
    """Return the fastest pass that is correct on sequences of up to ``reach`` tokens.

    ``model`` has TRL's fused head, with `head_temperature`, and no wrapper other than peft's. ``dtype`` is that of the
    computation, if autocast changes it.
    """

    def candidates() -> list[Kind]:
        return ["packed", "padded"] if llama_pass(model) is None else ["unrolled", "packed", "padded"]

    def logps(kind: Kind, ids: list[list[int]], in_float32: bool) -> tuple[list[list[int]], Tensor]:
        with nullcontext() if in_float32 else proof.computing_in(model, dtype):
            values, _ = packed_logps(
                model,
                *padded_rows(model, ids),
                proof.TAIL,
                head_temperature=head_temperature,
                unrolled=kind == "unrolled",
                use_kernels=False if in_float32 else None,
            )
        return ids, values[1:].float().cpu()

    return fastest(
        model,
        "the training pass",
        candidates,
        logps,
        points=proof.reached(proof.inner_model(model).config, reach),
        dtype=dtype,
        temperature=head_temperature,
        in_training=True,
    )


def tempered_logps(
    model: Any, input_ids: Tensor, attention_mask: Tensor, completion: int, temperature: Tensor
) -> tuple[Tensor, Tensor]:
    """Return log π and entropy of padded rows from all logits, at a temperature per row or per token."""
    logits = model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False).logits
    logits = logits[:, -completion - 1 : -1].float() / temperature.view(len(temperature), -1, 1)
    distribution = torch.log_softmax(logits, dim=-1)
    counted = attention_mask[:, -completion:] > 0
    logps = distribution.gather(-1, input_ids[:, -completion:, None]).squeeze(-1)
    entropy = -(distribution.exp() * distribution).sum(-1)
    return logps.where(counted, 0.0), entropy.where(counted, 0.0)
