"""Report generation batches: columns to listeners at once, numbers of observers after the last update.

    sampled and shaped ─► columns ─► listeners           and again with ``logp_after``, once that is known
             │
             └─► some completions inspected ─► updates ─► inspected again ─► observers ─► lens/…

All of this happens on the main process, whose own completions are the inspected ones; the token statistics of all
processes are gathered there. If a checkpoint is written while a batch is in use, the resumed run finishes its
inspection.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object, send_to_device
from torch import Tensor
from transformers import TrainerCallback

from explorl.core.documents import load_tensors
from explorl.modeling.token_records import AnswerRecords, answer_records, update_size
from explorl.training.checkpoint_faults import restoring
from explorl.training.grpo.batch import TokenStats, padded_to
from explorl.training.grpo.distributed import gather_to_main
from explorl.training.grpo.inspection_schedule import (
    InspectedRows,
    Lens,
    Observer,
    StepView,
    dump,
    load,
    observer_name,
    observer_state,
    preserved_random_state,
    run_observers,
)
from explorl.training.grpo.logged_columns import (
    counted_tokens,
    logged_columns,
    policy_texts,
    sparse_column,
    token_advantages,
    token_lists,
    token_weights,
    tool_call_columns,
)
from explorl.training.grpo.logprobs import pad_temperatures
from explorl.training.grpo.rollout_columns import token_columns
from explorl.training.grpo.sampled_rows import SampledRows
from explorl.training.grpo.tool_transcripts import ToolTranscript
from explorl.training.grpo.trl_adapter import IMAGES, is_sharded, logs_of, rendered_prompt

RolloutListener = Callable[[int, dict[str, list[Any]]], None]
"""Called with the step that a generation batch is for, and the batch's columns."""

STATE = "lens.pt"
_INPUTS = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")


@dataclass(eq=False)
class PendingInspection:
    """A generation batch whose last update has not happened yet."""

    step: int
    view: StepView | None
    """For the observers, None without observers."""
    sampled: InspectedRows | None
    columns: dict[str, list[Any]]
    """What the listeners were called with."""
    inputs: dict[str, Tensor]
    """The inspected completions, their temperature, and which of their tokens count."""
    until: int
    """Number of micro-batches seen when the batch is used up."""


class Inspector:
    """Reports a trainer's generation batches to listeners and observers."""

    def __init__(self, trainer: Any, lens: Lens, observers: list[Observer], token_records: int) -> None:
        self.trainer, self.lens, self.observers = trainer, lens, observers
        self._listeners: list[RolloutListener] = []
        self._listeners_after: list[RolloutListener] = []
        self._token_records = token_records
        self._token_texts: dict[int, str] = {}
        self._pending: list[PendingInspection] = []

    def listen(self, listener: RolloutListener, token_records: int, after: RolloutListener | None) -> None:
        """Add a listener, and one to call after the last update."""
        self._listeners.append(listener)
        self._token_records = max(self._token_records, token_records)
        if after is not None:
            self._listeners_after.append(after)

    # ---------------------------------------------------------------- before the first update

    def see(
        self,
        output: Mapping[str, Any],
        sampled: SampledRows,
        recorded: TokenStats | None,
        advantage: Tensor,
        rewards: Tensor,
    ) -> None:
        """Report a batch that was sampled and shaped, and inspect some of its completions; called on every process.

        Args:
            recorded: Token statistics, if there are any.
            advantage: Advantages of the completions before the strategies.
            rewards: Total rewards of all processes.
        """
        trainer, per_batch = self.trainer, self._micro_batches_per_batch
        number, step = trainer.micro_step // per_batch, trainer.state.global_step + 1
        inspects = bool(self.observers or self._listeners_after)
        transcripts = None if sampled.transcripts is None else gather_object(sampled.transcripts)
        view = self._view(output, sampled, recorded, advantage, rewards, transcripts) if self.observers else None
        if not trainer.accelerator.is_main_process or not (inspects or self._listeners):
            return
        rows = self._rows_to_inspect(output, number) if inspects and self.lens.due(number) else []
        inputs = self._inputs(output, sampled, rows) if rows else {}
        records = self._records_of(inputs) if rows else None
        inspected = None if records is None else _inspected_rows(output, rows, records, inputs["temperature"])
        columns: dict[str, list[Any]] = {}
        if self._listeners or self._listeners_after:
            columns = self._columns(output, sampled, recorded, inspected, records)
            columns |= tool_call_columns(transcripts) if transcripts else {}
        for listener in self._listeners:
            listener(step, columns)
        if view is not None and inspected is not None and records is not None:
            view = _with_records(view, inspected, records)
        if view is not None or inspected is not None:
            until = trainer.micro_step + per_batch
            self._pending.append(PendingInspection(step, view, inspected, columns, inputs, until))

    @property
    def _micro_batches_per_batch(self) -> int:
        """Number of micro-batches from one generation batch to the next."""
        return int(self.trainer.args.steps_per_generation * self.trainer.num_iterations)

    def _rows_to_inspect(self, output: Mapping[str, Any], number: int) -> list[int]:
        rows = self.lens.chosen(len(output["completion_ids"]), number)
        why = "the model takes images" if any(name in output for name in IMAGES) else ""
        why = "weights are sharded over processes (ZeRO-3 or FSDP)" if is_sharded(self.trainer) else why
        if rows and why:
            self.trainer.warn_once(f"the lens inspects no completions and records no change of probabilities: {why}")
            return []
        return rows

    def _view(
        self,
        output: Mapping[str, Any],
        sampled: SampledRows,
        recorded: TokenStats | None,
        advantage: Tensor,
        rewards: Tensor,
        transcripts: list[ToolTranscript] | None,
    ) -> StepView:
        """Return the generation batch of all processes for the observers; complete on the main process only."""
        trainer, accelerator = self.trainer, self.trainer.accelerator
        mask = counted_tokens(output).float()
        missing = torch.full_like(mask, torch.nan)

        def gathered(tensor: Tensor | None) -> Tensor:
            """Gather values per token on the main process."""
            values = missing if tensor is None else tensor
            if accelerator.num_processes == 1:
                return values
            return gather_to_main(accelerator.pad_across_processes(values.contiguous(), dim=1))

        parts = sampled.reward_parts
        logs = logs_of(trainer)
        return StepView(
            step=trainer.state.global_step + 1,
            token_ids=gathered(output["completion_ids"]),
            mask=gathered(mask),
            logps=gathered(None if recorded is None else recorded.logps),
            entropy=gathered(None if recorded is None else recorded.entropy),
            branching=gathered(None if recorded is None else recorded.branching),
            advantages=gathered(token_advantages(output) * mask),
            weights=gathered(token_weights(output)),
            advantage=advantage if accelerator.num_processes == 1 else accelerator.gather(advantage),
            rewards=rewards,
            reward_parts=dict(zip(trainer.reward_func_names, parts.unbind(1), strict=True)),
            correct=trainer.correct.marks(parts),
            group=torch.arange(len(rewards), device=rewards.device) // trainer.num_generations,
            prompts=logged_columns(logs, len(rewards))["prompt"],
            completions=policy_texts(logs, len(rewards), transcripts),
        )

    # ---------------------------------------------------------------- inspection

    def _inputs(self, output: Mapping[str, Any], sampled: SampledRows, rows: list[int]) -> dict[str, Tensor]:
        """Return these rows of the batch, their temperature in the loss, and which of their tokens count."""
        chosen = torch.tensor(rows, device=output["completion_ids"].device)
        inputs = {name: output[name][chosen] for name in _INPUTS}
        temperature = torch.full((len(rows),), float(self.trainer.temperature), device=chosen.device)
        if sampled.training_temperature is not None:
            temperature = sampled.training_temperature[chosen]
        if temperature.dim() == 2:
            temperature = pad_temperatures(temperature, output["completion_ids"].size(1))
        return {**inputs, "temperature": temperature, "counted": counted_tokens(output)[chosen]}

    def _records_of(self, inputs: Mapping[str, Tensor]) -> AnswerRecords:
        """Return the records of these completions from a pass without side effects."""
        trainer, width = self.trainer, inputs["completion_ids"].size(1)
        time = max(int(inputs["completion_mask"].sum(1).max()), 1)  # without columns of padding only
        before = max(int(inputs["prompt_mask"].sum(1).max()), 1)
        ids, mask = (
            torch.cat([inputs[f"prompt_{kind}"][:, -before:], inputs[f"completion_{kind}"][:, :time]], dim=1)
            for kind in ("ids", "mask")
        )
        model = trainer.accelerator.unwrap_model(trainer.model)
        temperature = inputs["temperature"]  # one per row, or one per position
        temperature = temperature if temperature.dim() == 1 else temperature[:, :time]
        with preserved_random_state(ids.device), _evaluation_mode(model):
            records = answer_records(
                model, ids, mask, time, rows=trainer.args.per_device_train_batch_size,
                temperature=temperature, autocast=trainer.accelerator.autocast,
                packed=trainer.logprobs.packed is not False,
            )  # fmt: skip
        return AnswerRecords(*(padded_to(values, width) for values in records))

    def _columns(
        self,
        output: Mapping[str, Any],
        sampled: SampledRows,
        recorded: TokenStats | None,
        inspected: InspectedRows | None,
        records: AnswerRecords | None,
    ) -> dict[str, list[Any]]:
        """Return the latest generation batch as TRL logged it, with token records of some rows of this process."""
        trainer, parts = self.trainer, sampled.reward_parts
        columns = logged_columns(logs_of(trainer), len(parts), partial(rendered_prompt, trainer))
        if not trainer.correct.guessed:
            marks, unscored = trainer.correct.marks(parts).tolist(), trainer.correct.rewards(parts).isnan().tolist()
            columns["correct"] = [None if missing else mark for mark, missing in zip(marks, unscored, strict=True)]
        rows = min(self._token_records * trainer.num_generations, len(output["completion_ids"]))
        return columns | token_columns(output, recorded, inspected, records, rows, len(parts), self._token_text)

    def _token_text(self, token: int) -> str:
        if token not in self._token_texts:
            self._token_texts[token] = self.trainer.tokenizer.decode([token])
        return self._token_texts[token]

    # ---------------------------------------------------------------- after the last update

    def finish(self, *, unfinished: bool = False) -> None:
        """Finish the inspections of batches that are used up, or with ``unfinished`` all of them."""
        pending, self._pending = self._pending, []
        for inspection in pending:
            if unfinished or inspection.until <= self.trainer.micro_step:
                self._finish(inspection)
            else:
                self._pending.append(inspection)

    def _finish(self, inspection: PendingInspection) -> None:
        """Inspect a batch again after its last update, and report to listeners and observers."""
        if inspection.sampled is not None:
            after = self._records_of(inspection.inputs).logps
            inspection.sampled = replace(inspection.sampled, logps_after=after)
            lists = token_lists(after, inspection.inputs["completion_mask"], inspection.inputs["counted"])
            for listener in self._listeners_after:
                rows, count = inspection.sampled.rows.tolist(), len(inspection.columns["completion"])
                listener(inspection.step, {**inspection.columns, "logp_after": sparse_column(lists, rows, count)})
        view = inspection.view
        if view is not None:
            sampled = None if inspection.sampled is None else inspection.sampled.padded(view.mask.size(1))
            for name, value in run_observers(self.observers, replace(view, sampled=sampled)).items():
                self.trainer.record_metric(name, value, "train")

    # ---------------------------------------------------------------- checkpoints

    def write(self, folder: Path) -> None:
        """Write the states of the observers and the batches that are still in use; on the main process."""
        if not self.trainer.accelerator.is_main_process:
            return
        pending = [{name: dump(value) for name, value in vars(inspection).items()} for inspection in self._pending]
        states = [
            (observer_name(observer), observer_state(observer))
            for observer in self.observers
            if hasattr(observer, "state_dict")
        ]
        if pending or states:
            torch.save({"looks": pending, "observers": states}, folder / STATE)

    def read(self, folder: Path) -> None:
        """Read what `write` has written; an observer that is not in the checkpoint starts empty."""
        accelerator = self.trainer.accelerator
        if not accelerator.is_main_process or not (folder / STATE).exists():
            return
        self._pending = []
        with restoring(folder, STATE):
            saved = load_tensors(folder / STATE)
            if self.observers or self._listeners_after:
                for values in send_to_device(saved["looks"], accelerator.device):
                    view, sampled = load(StepView, values["view"]), load(InspectedRows, values["sampled"])
                    self._pending.append(PendingInspection(**{**values, "view": view, "sampled": sampled}))
            states = [(name, state) for name, state in saved["observers"]]
        for observer in self.observers:
            entry = next((entry for entry in states if entry[0] == observer_name(observer)), None)
            if entry is not None and hasattr(observer, "load_state_dict"):
                states.remove(entry)
                observer.load_state_dict(entry[1])


class InspectionCallback(TrainerCallback):
    """Finishes inspections after the last update on their batch."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Mark batches left over from an earlier call of `train`, since steps may be counted from 0 again."""
        for part in self.trainer.buffered_batches or []:
            part["made_at"] = torch.tensor(-1)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.trainer.inspector.finish()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.trainer.inspector.finish(unfinished=True)


def _inspected_rows(
    output: Mapping[str, Any], rows: list[int], records: AnswerRecords, temperature: Tensor
) -> InspectedRows:
    """Return what is known of these rows before the updates; `logps_after` is NaN until then."""
    chosen = torch.tensor(rows, device=records.logps.device)
    factors = (token_advantages(output) * token_weights(output))[chosen]  # at the first update the ratio is 1
    size = update_size(
        records.logps,
        records.others_squared,
        records.state_norms,
        factors,
        temperature=temperature.view(len(temperature), -1),
    )
    return InspectedRows(
        rows=chosen,
        logps=records.logps,
        collision=records.collision,
        other_ids=records.other_ids,
        other_logps=records.other_logps,
        state_norms=records.state_norms,
        update_size=size,
        logps_after=torch.full_like(records.logps, torch.nan),
    )


def _with_records(view: StepView, sampled: InspectedRows, records: AnswerRecords) -> StepView:
    """Add the records of the inspected rows to the view if it has no token statistics."""
    if not view.entropy.isnan().all():
        return view
    filled = {}
    for name in ("logps", "entropy", "branching"):
        values: Tensor = getattr(records, name)
        filled[name] = getattr(view, name).clone()
        filled[name][sampled.rows, : values.size(1)] = values.to(filled[name].dtype)
    return replace(view, **filled)


@contextmanager
def _evaluation_mode(model: Any) -> Iterator[None]:
    """Switch dropout off."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)
