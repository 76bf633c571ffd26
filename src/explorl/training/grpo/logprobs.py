"""Log-probabilities of a batch, with a temperature per row or token: packed if exact for the model, else padded."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from explorl.modeling import passes
from explorl.modeling.packed import by_place, is_linear, packed_logps, scaled_states
from explorl.modeling.precision import weights_dtype
from explorl.training.grpo.batch import TokenStats, engine_token_stats, forward_token_stats, padded_to
from explorl.training.grpo.sampled_rows import SampledRows
from explorl.training.grpo.trl_adapter import (
    IMAGES,
    LogpsAndEntropy,
    has_own_loss,
    is_sharded,
    whole_weights,
    without_gradient,
)
from explorl.training.sharding import autocast_dtype, spread_devices


class LogProbs:
    """Computes log π by the fastest pass that is proven exact for the trainer's model.

    Args:
        trainer: The trainer, already constructed by TRL.
        packed: True to raise if the packed pass is not exact, False for TRL's padded pass, None to decide.
    """

    def __init__(self, trainer: Any, packed: bool | None) -> None:
        self.trainer = trainer
        self.packed = False if self._requires_padding() else packed

    def _requires_padding(self) -> bool:
        """Tell whether only TRL's padded pass works with this model and these arguments."""
        trainer = self.trainer
        if trainer.aux_loss_enabled:
            trainer.warn_once(
                f"router_aux_loss_coef is {trainer.router_aux_loss_coef}: the router's loss counts the tokens of "
                "padded rows, so TRL's padded pass is used; set it to 0 for the faster packed one"
            )
            return True
        distributed = is_sharded(trainer) or bool(spread_devices(trainer.model))
        if trainer.sees_images or trainer.args.torch_compile or distributed:
            return True
        if trainer.args.neftune_noise_alpha is not None:
            trainer.warn_once(
                f"neftune_noise_alpha is {trainer.args.neftune_noise_alpha}: the noise is scaled by the length of a "
                "row, so TRL's padded pass is used; unset it for the faster packed one"
            )
            return True
        return False

    def pass_kind(self, model: Any, longest: int) -> passes.Kind:
        """Return the fastest kind of pass that is proven exact for this model."""
        if self.packed is False:
            return "padded"
        trainer = self.trainer
        inner, dtype = trainer.accelerator.unwrap_model(model), autocast_dtype(trainer.accelerator)
        choice = passes.choose(inner, longest, dtype=dtype, head_temperature=trainer.temperature)
        if choice.kind == "padded":
            if self.packed:
                raise ValueError(f"packed=True does not work for this model ({choice.why}); use packed=None")
            trainer.warn_once(f"log-probabilities are computed with padding, which is slower: {choice.why}")
        return choice.kind

    # ---------------------------------------------------------------- log π

    def of(
        self, batch: Mapping[str, Any], *, model: Any = None, rows: int | None = None, **options: Any
    ) -> LogpsAndEntropy:
        """Return log π, entropy and auxiliary loss of a batch's completions, with gradients if they are enabled."""
        ids, mask = (
            torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1),
            torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1),
        )
        images = {name: batch[name] for name in IMAGES if batch.get(name) is not None}
        rows = rows or (len(ids) if torch.is_grad_enabled() else self.trainer.args.per_device_train_batch_size)
        completion = batch["completion_ids"].size(1)
        model = self.trainer.model if model is None else model
        options = {name: value for name, value in options.items() if value is not None}
        return self.trainer._get_per_token_logps_and_entropies(  # by TRL's name: a user may have overridden it
            model, ids, mask, completion, batch_size=rows, **options, **images
        )

    def compute(
        self,
        model: Any,
        input_ids: Tensor,
        attention_mask: Tensor,
        completion: int,
        *,
        rows: int,
        temperature: Tensor | None = None,
        **options: Any,
    ) -> LogpsAndEntropy:
        """Compute log-probabilities at the temperature of each row or token, ``rows`` at a time."""
        trainer = self.trainer
        if not torch.is_grad_enabled():  # while TRL scores a batch
            if model is trainer.model and (old := trainer.sampled.take_old_logps()) is not None:
                return padded_to(old, completion), None, None
            temperature = trainer.sampled.training_temperature if temperature is None else temperature
        if temperature is not None and temperature.dim() == 2:
            temperature = pad_temperatures(temperature, completion)
        entropy = bool(options.get("compute_entropy"))
        kind = "padded" if options.keys() - {"compute_entropy"} else self.pass_kind(model, input_ids.size(1))
        if kind == "padded" and temperature is None:
            return trainer.padded_log_probabilities(model, input_ids, attention_mask, completion, rows=rows, **options)
        results: list[tuple[Tensor, Tensor | None]] = []
        for chunk in torch.arange(len(input_ids), device=input_ids.device).split(rows):
            ids, mask = input_ids[chunk], attention_mask[chunk]
            chunk_temperature = None if temperature is None else temperature[chunk]
            if kind == "padded":
                assert chunk_temperature is not None
                results.append(self._tempered(model, ids, mask, completion, chunk_temperature, entropy))
                continue
            with trainer.accelerator.autocast():
                results.append(
                    packed_logps(
                        model,
                        ids,
                        mask,
                        completion,
                        temperature=chunk_temperature,
                        head_temperature=trainer.temperature,
                        unrolled=kind == "unrolled",
                    )
                )
        logps, entropies = zip(*results, strict=True)
        return torch.cat(logps), torch.cat(entropies) if entropy else None, None

    def _tempered(
        self, model: Any, ids: Tensor, mask: Tensor, completion: int, temperature: Tensor, entropy: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Run the padded pass with a temperature per row or token; TRL's head of a reference returns no entropy."""
        trainer = self.trainer
        if not is_linear(model):
            with trainer.accelerator.autocast():
                return passes.tempered_logps(model, ids, mask, completion, temperature)
        with scaled_states(model, trainer.temperature / by_place(temperature, ids).unsqueeze(2)):
            logps, entropies, _ = trainer.padded_log_probabilities(
                model, ids, mask, completion, rows=len(ids), compute_entropy=entropy
            )
        return logps, entropies

    # ---------------------------------------------------------------- log π_old

    @property
    def needs_old(self) -> bool:
        """True if TRL computes log π_old: if a generation batch serves more than one optimizer step."""
        trainer = self.trainer
        every = trainer.args.steps_per_generation * trainer.num_iterations
        return trainer.mode == "train" and trainer.args.gradient_accumulation_steps % every != 0

    @property
    def old_is_first_pass(self) -> bool:
        """True if log π_old is needed, and every micro-batch is seen before the policy changes: then its first pass
        gives log π_old."""
        trainer = self.trainer
        complete = trainer.args.gradient_accumulation_steps % trainer.args.steps_per_generation == 0
        return self.needs_old and complete and not trainer.use_vllm and not has_own_loss(trainer)

    def known_old(self, sampled: SampledRows, rows: int) -> Tensor | None:
        """Return log π_old of a batch that was just sampled if TRL need not compute it."""
        if not self.needs_old:
            return None
        trainer, records = self.trainer, sampled.records
        if self.old_is_first_pass:
            return torch.zeros(rows, 0, device=trainer.accelerator.device)
        # Log-probabilities recorded in float32 can serve as TRL's log π_old. Not with a penalty: it may depend on the
        # difference of two log-probabilities, which then have to come from the same kind of pass.
        single = autocast_dtype(trainer.accelerator) is None and weights_dtype(trainer.model) == torch.float32
        exact = single and not has_own_loss(trainer) and not trainer.has_penalties
        same = sampled.training_temperature is sampled.sampling_temperature
        return records.logps if records is not None and exact and same else None

    # ---------------------------------------------------------------- token statistics

    def statistics(self, output: Mapping[str, Any], sampled: SampledRows, *, required: bool) -> TokenStats | None:
        """Return the token statistics of this process as recorded by the engine.

        If it did not sample, or at another temperature than that of the loss, and they are ``required``, they come from
        a pass over the batch.
        """
        if required:
            return self._statistics(output, sampled)
        records = sampled.records
        return None if records is None else engine_token_stats(records, output["completion_ids"].size(1))

    def _statistics(self, output: Mapping[str, Any], sampled: SampledRows) -> TokenStats:
        trainer = self.trainer
        if sampled.records is not None:
            stats = engine_token_stats(sampled.records, output["completion_ids"].size(1))
            if sampled.training_temperature is sampled.sampling_temperature:
                return stats
            logps = output.get("old_per_token_logps")
            if logps is None:  # the temperature of the loss differs from that of sampling
                with without_gradient(trainer):
                    logps, _, _ = self.of(output, temperature=sampled.training_temperature)
            return stats._replace(logps=logps)
        if any(name in output for name in IMAGES):
            with without_gradient(trainer):
                logps, entropy, _ = self.of(output, compute_entropy=True)
            assert entropy is not None
            return TokenStats(logps, entropy, None, None)
        # ZeRO-3 does not survive passes of two kinds between its steps.
        with without_gradient(trainer), whole_weights(trainer) if is_sharded(trainer) else nullcontext():
            return forward_token_stats(
                trainer.model,
                output,
                temperature=trainer.temperature,
                rows=trainer.args.per_device_train_batch_size,
                autocast=trainer.accelerator.autocast,
            )


def pad_temperatures(temperature: Tensor, completion: int) -> Tensor:
    """Pad temperatures per token with 1 to ``completion`` tokens, which TRL may round up."""
    padded = padded_to(temperature, completion)
    return torch.where(padded > 0, padded, 1.0)
