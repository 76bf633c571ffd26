"""The reference policy of the KL penalty: a separate model, or an adapter of the policy."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from explorl.training.sharding import accessible_parameters

REFERENCE_STATE = "reference.safetensors"


class Reference:
    """The reference of a trainer, which strategies may move to the current policy."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.moved = bool(trainer.args.sync_ref_model)
        """True if it is no longer what training started with, so that checkpoints need it."""

    def reset(self) -> None:
        """Set the reference to the current policy, unless β = 0."""
        if self.trainer.beta == 0.0:
            return
        policy, reference = self.models()
        with accessible_parameters(policy), accessible_parameters(*self._separate(), change=True):
            load_reference(policy, reference, adapter_weights(policy) if reference is None else policy.state_dict())
        self.moved = True

    def models(self) -> tuple[Any, Any]:
        """Return the policy and the reference model; None if the reference is an adapter of the policy."""
        trainer, unwrap = self.trainer, self.trainer.accelerator.unwrap_model
        return unwrap(trainer.model), None if trainer.ref_model is None else unwrap(trainer.ref_model)

    def _separate(self) -> list[Any]:
        """Return the reference model as a list; empty if the reference is an adapter of the policy."""
        return [model for model in self.models()[1:] if model is not None]

    def write(self, folder: Path) -> None:
        """Write the weights to a checkpoint if they have changed; called on every process."""
        if not self.moved:
            return
        with accessible_parameters(*self._separate()):
            if self.trainer.args.should_save:
                weights = reference_weights(*self.models())
                weights = {name: value.detach().cpu().clone() for name, value in weights.items()}
                save_file(weights, folder / REFERENCE_STATE)

    def read(self, folder: Path) -> None:
        """Restore the weights if a checkpoint has any."""
        if not (folder / REFERENCE_STATE).exists():
            return
        with accessible_parameters(*self._separate(), change=True):
            load_reference(*self.models(), load_file(folder / REFERENCE_STATE))
        self.moved = True


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
