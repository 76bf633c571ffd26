"""Log-probabilities of a batch, with a temperature per row or token: packed if exact for the model, else padded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from explorl.modeling import passes
from explorl.modeling.packed import by_place, is_linear, packed_logps, scaled_states
from explorl.training.grpo.batch import padded_to
from explorl.training.grpo.sampler import SamplingTrainer
from explorl.training.grpo.trl_adapter import IMAGES
from explorl.training.sharding import spread_devices


def pad_temperatures(temperature: Tensor, completion: int) -> Tensor:
    """Pad temperatures per token with 1 to ``completion`` tokens, which TRL may round up."""
    padded = padded_to(temperature, completion)
    return torch.where(padded > 0, padded, 1.0)


class LogProbabilityTrainer(SamplingTrainer):
    """Computes log π by the fastest pass that is proven exact for its model."""

    _packed: bool | None

    def _requires_padding(self) -> bool:
        """Tell whether only TRL's padded pass works with this model and these arguments."""
        distributed = self.sharded or bool(spread_devices(self.model))
        if self.sees_images or self.aux_loss_enabled or self.args.torch_compile or distributed:
            if self.aux_loss_enabled:
                self.warn_once(
                    f"router_aux_loss_coef is {self.router_aux_loss_coef}: the router's loss counts the tokens of "
                    "padded rows, so TRL's padded pass is used; set it to 0 for the faster packed one"
                )
            return True
        if self.args.neftune_noise_alpha is not None:
            self.warn_once(
                f"neftune_noise_alpha is {self.args.neftune_noise_alpha}: the noise is scaled by the length of a row, "
                "so TRL's padded pass is used; unset it for the faster packed one"
            )
            return True
        return False

    def _pass_kind(self, model: Any, longest: int) -> passes.Kind:
        """Return the fastest kind of pass that is proven exact for this model."""
        if self._packed is False:
            return "padded"
        inner = self.accelerator.unwrap_model(model)
        choice = passes.choose(inner, longest, dtype=self.compute_dtype, head_temperature=self.temperature)
        if choice.kind == "padded":
            if self._packed:
                raise ValueError(f"packed=True does not work for this model ({choice.why}); use packed=None")
            self.warn_once(f"log-probabilities are computed with padding, which is slower: {choice.why}")
        return choice.kind

    def _logps(
        self, batch: Mapping[str, Any], *, model: Any = None, rows: int | None = None, **options: Any
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return log π, entropy and auxiliary loss of a batch's completions, with gradients if they are enabled."""
        ids, mask = (
            torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1),
            torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1),
        )
        images = {name: batch[name] for name in IMAGES if batch.get(name) is not None}
        rows = rows or (len(ids) if torch.is_grad_enabled() else self.args.per_device_train_batch_size)
        completion = batch["completion_ids"].size(1)
        model = self.model if model is None else model
        options = {name: value for name, value in options.items() if value is not None}
        return self._get_per_token_logps_and_entropies(  # by TRL's name: a user may have overridden it
            model, ids, mask, completion, batch_size=rows, **options, **images
        )

    def log_probabilities(
        self,
        model: Any,
        input_ids: Tensor,
        attention_mask: Tensor,
        completion: int,
        *,
        rows: int,
        temperature: Tensor | None = None,
        **options: Any,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Compute log-probabilities at the temperature of each row or token: packed if that is exact, else padded."""
        no_gradient = not torch.is_grad_enabled()
        if self._old_logps is not None and model is self.model and no_gradient:
            recorded, self._old_logps = padded_to(self._old_logps, completion), None
            return recorded, None, None
        if temperature is None and no_gradient:
            temperature = self._row_temperature
        if temperature is not None and temperature.dim() == 2:
            temperature = pad_temperatures(temperature, completion)
        entropy = bool(options.get("compute_entropy"))
        kind = "padded" if options.keys() - {"compute_entropy"} else self._pass_kind(model, input_ids.size(1))
        if kind == "padded" and temperature is None:
            return self.padded_log_probabilities(model, input_ids, attention_mask, completion, rows=rows, **options)
        results: list[tuple[Tensor, Tensor | None]] = []
        for chunk in torch.arange(len(input_ids), device=input_ids.device).split(rows):
            ids, mask = input_ids[chunk], attention_mask[chunk]
            chunk_temperature = None if temperature is None else temperature[chunk]
            if kind == "padded":
                assert chunk_temperature is not None
                results.append(self._tempered(model, ids, mask, completion, chunk_temperature, entropy))
                continue
            with self.accelerator.autocast():
                results.append(
                    packed_logps(
                        model,
                        ids,
                        mask,
                        completion,
                        temperature=chunk_temperature,
                        head_temperature=self.temperature,
                        unrolled=kind == "unrolled",
                    )
                )
        logps, entropies = zip(*results, strict=True)
        return torch.cat(logps), torch.cat(entropies) if entropy else None, None

    def _tempered(
        self, model: Any, ids: Tensor, mask: Tensor, completion: int, temperature: Tensor, entropy: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Run the padded pass with a temperature per row or token; TRL's head of a reference returns no entropy."""
        if not is_linear(model):
            with self.accelerator.autocast():
                return passes.tempered_logps(model, ids, mask, completion, temperature)
        with scaled_states(model, self.temperature / by_place(temperature, ids).unsqueeze(2)):
            logps, entropies, _ = self.padded_log_probabilities(
                model, ids, mask, completion, rows=len(ids), compute_entropy=entropy
            )
        return logps, entropies
