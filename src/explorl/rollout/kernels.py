"""The parts of the runner that are Triton kernels. Importing this module requires Triton."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from explorl.rollout.memory.pages import PageCache
from explorl.rollout.memory.triton_attention import decode_attention
from explorl.rollout.sampling.kernel import sample_step_kernel

__all__ = ["KernelPages", "decode_attention", "sample_step_kernel"]


class KernelPages(PageCache):
    """Pages with one kernel that writes the new key and value and computes attention, reading the table itself."""

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any) -> Any:
        self._layer = layer_idx
        return key_states, value_states

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None, cap: float | None
    ) -> Tensor:
        return self._decode(query, key, value, self._layer, scale, window, cap)

    def rotate_and_attend(
        self, query: Tensor, key: Tensor, value: Tensor, rotary: Any, layer: int, scale: float, window: int | None
    ) -> Tensor:
        """Apply the rotary embedding, `update` and `attend` in one kernel; ``rotary`` as in `decode_attention`."""
        return self._decode(query, key, value, layer, scale, window, None, rotary=rotary)

    def _decode(self, query: Tensor, key: Tensor, value: Tensor, layer: int, *args: Any, **kwargs: Any) -> Tensor:
        pages = self.keys[layer], self.values[layer]
        return decode_attention(query, key, value, *pages, self.table, self.ints, *args, **kwargs)
