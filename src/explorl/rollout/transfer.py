"""Between host and device without waiting for each other: `upload` and `Download`.

A plain ``.to`` or ``.cpu()`` waits until the GPU has done all that it was given before. Copies from and to pinned
memory take their place in its queue instead. On the CPU there is no queue, and the same calls just copy.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def upload(array: np.ndarray, device: torch.device) -> Tensor:
    """A host array on the device, ready for what is queued after it. On the CPU it is the same memory."""
    tensor = torch.from_numpy(array)
    if device.type != "cuda":
        return tensor.to(device)
    # The pinned copy may go out of scope at once: torch gives its memory to nobody before the transfer is over.
    return tensor.pin_memory().to(device, non_blocking=True)


class Download:
    """Tensors on their way to the host, as they are at this place of the queue: what comes later changes no value."""

    def __init__(self, *tensors: Tensor) -> None:
        self._host: list[Tensor] = []
        self._event: torch.cuda.Event | None = None
        for tensor in tensors:
            pinned = tensor.device.type == "cuda"
            host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pinned)
            self._host.append(host.copy_(tensor, non_blocking=pinned))
            if pinned and tensor is tensors[-1]:
                self._event = torch.cuda.Event()
                self._event.record(torch.cuda.current_stream(tensor.device))

    def wait(self) -> list[Tensor]:
        """The tensors, once they are there. Their memory may be pinned: copy what is to stay."""
        if self._event is not None:
            self._event.synchronize()
        return self._host
