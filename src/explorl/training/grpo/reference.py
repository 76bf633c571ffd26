"""The reference policy of the KL penalty: a separate model, or an adapter of the policy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


def load_reference(model: Any, reference: Any, weights: Mapping[str, Tensor]) -> None:
    """Load weights into the reference model; without one, into the adapter that TRL uses as the reference."""
    if reference is not None:
        reference.load_state_dict(dict(weights))
        return
    if "ref" not in model.peft_config:
        model.add_adapter("ref", model.peft_config["default"])
        model.set_adapter("default")
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name, value in weights.items():
            parameters[name.replace(".default.", ".ref.")].copy_(value)
            parameters[name.replace(".default.", ".ref.")].requires_grad_(False)


def reference_weights(model: Any, reference: Any) -> dict[str, Tensor]:
    """Return the weights of the reference; those of an adapter under the names of the trained adapter."""
    if reference is not None:
        return dict(reference.state_dict())
    return {key.replace(".ref.", ".default."): value for key, value in adapter_weights(model, "ref").items()}


def adapter_weights(model: Any, adapter: str = "default") -> dict[str, Tensor]:
    """Return the parameters of one of the model's adapters."""
    return {name: value for name, value in model.named_parameters() if f".{adapter}." in name}
