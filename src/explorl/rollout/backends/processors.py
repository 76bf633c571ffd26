"""A logits processor for `model.generate`: bottom-p."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor
from transformers import LogitsProcessor

from explorl.rollout.sampling import SamplingParams, warp_bottom_p, warp_temperature
from explorl.rollout.sampling.sample import truncate


class BottomPLogitsProcessor(LogitsProcessor):
    """Bottom-p sampling in `generate`, with the warpers that come before it.

    `generate` applies its own temperature, top-k, top-p and min-p *after* every custom processor, but bottom-p has to
    come last. So give those values here and switch them off in `generate`:

        model.generate(**inputs, do_sample=True, temperature=1.0, top_k=0, top_p=1.0,
                       logits_processor=LogitsProcessorList([BottomPLogitsProcessor(0.9, top_p=0.9)]))
    """

    def __init__(
        self,
        bottom_p: float,
        *,
        frequency: float = 1.0,
        per: Literal["token", "sequence"] = "token",
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        generator: torch.Generator | None = None,
    ) -> None:
        self.params = SamplingParams(
            bottom_p=bottom_p,
            bottom_p_frequency=frequency,
            bottom_p_per=per,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
        )
        if temperature == 0:
            raise ValueError("temperature is 0; for greedy decoding call generate with do_sample=False")
        self.frequency, self.per, self.generator = frequency, per, generator
        self._chosen: Tensor | None = None
        self._length = 0

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        p: Any = self.params
        logits: Tensor = scores
        if p.temperature != 1:
            logits = warp_temperature(logits, p.temperature)
        logits = truncate(logits, p.top_k or None, None if p.top_p == 1 else p.top_p, p.min_p or None)
        return warp_bottom_p(logits, p.bottom_p, self._apply(input_ids, scores))  # type: ignore

    def _apply(self, input_ids: Tensor, scores: Tensor) -> Tensor | None:
        """Return the rows that bottom-p applies to at this token; None means all."""
        if self.frequency >= 1:
            return None
        rows, length = input_ids.shape
        # A sequence that did not grow by one token belongs to another call of `generate`.
        new_call = self._chosen is None or len(self._chosen) != rows or length != self._length + 1
        self._length = length
        if self.per == "token" or new_call:
            numbers = torch.rand(rows, generator=self.generator, device=scores.device)
            self._chosen = numbers < self.frequency
        return self._chosen
