"""What a generation batch leaves behind: columns for listeners at once, numbers of observers after its last update.

    sampled and shaped ─► columns ─► listeners           and once more with ``logp_after``, when that is known
             │
             └─► some answers looked at closely ─► updates ─► looked at again ─► observers ─► lens/…

All of it happens on the main process, whose own answers are those that are looked at closely; what all processes have
recorded is gathered for it. A batch that is still in use when a checkpoint is written is looked at again by whoever
goes on from there.
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
from explorl.training.grpo.batch import TokenStats, padded_to
from explorl.training.grpo.checkpoint import restoring
from explorl.training.grpo.correct import Correct
from explorl.training.grpo.distributed import gather_to_main
from explorl.training.grpo.inspection_schedule import (
    InspectedRows,
    Lens,
    Observer,
    StepView,
    dump,
    load,
    name_of,
    preserved_random_state,
    remembered,
    run_observers,
)
from explorl.training.grpo.logged_columns import (
    counted_tokens,
    logged_columns,
    policy_texts,
    spread,
    token_advantages,
    token_lists,
    token_weights,
    tool_call_columns,
)
from explorl.training.grpo.logprobs import widened
from explorl.training.grpo.objective import ObjectiveTrainer
from explorl.training.grpo.rollout_columns import token_columns
from explorl.training.grpo.tool_transcripts import ToolTranscript
from explorl.training.grpo.trl_adapter import IMAGES, rendered_prompt

RolloutListener = Callable[[int, dict[str, list[Any]]], None]
"""Gets the step that a generation batch is for, and the batch's columns."""

STATE = "lens.pt"
_INPUTS = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")


@dataclass(eq=False)
class PendingInspection:
    """A generation batch whose last update is still to come."""

    step: int
    view: StepView | None
    """For the observers, where there are any."""
    sampled: InspectedRows | None
    columns: dict[str, list[Any]]
    """What the listeners got."""
    inputs: dict[str, Tensor]
    """The answers that are looked at closely, their temperature, and which of their tokens count."""
    until: int
    """Micro-batches seen when the batch is used up."""


class InspectingTrainer(ObjectiveTrainer):
    """Tells listeners and observers of its generation batches."""

    correct: Correct
    lens: Lens
    observers: list[Observer]

    def _begin_watching(self, lens: Lens, observers: list[Observer], token_records: int) -> None:
        self.lens, self.observers = lens, observers
        self._listeners: list[RolloutListener] = []
        self._listeners_after: list[RolloutListener] = []
        self._token_records = token_records
        self._token_texts: dict[int, str] = {}
        self._looks: list[PendingInspection] = []
        self.add_callback(_Watching(self))

    def listen(self, listener: RolloutListener, token_records: int = 0, after: RolloutListener | None = None) -> None:
        """Have another function called as ``on_rollouts`` is, with at least so many prompts' token records.

        ``after`` is called with the same columns and ``logp_after`` when the last update on a batch is done, where some
        of its answers are looked at closely; to ask for it is to have them looked at.
        """
        self._listeners.append(listener)
        self._token_records = max(self._token_records, token_records)
        if after is not None:
            self._listeners_after.append(after)

    # ---------------------------------------------------------------- before the first update

    def _inspect_batch(
        self, output: Mapping[str, Any], recorded: TokenStats | None, advantage: Tensor, rewards: Tensor
    ) -> None:
        """Tells of a batch that was sampled and shaped; called on every process."""
        number = self.micro_step // self._micro_batches_of_batch
        asked = bool(self.observers or self._listeners_after)
        said = None if self.transcripts is None else gather_object(self.transcripts)
        view = self._view(output, recorded, advantage, rewards, said) if self.observers else None
        if not self.accelerator.is_main_process or not (asked or self._listeners):
            return
        rows = self._rows_to_look_at(output, number) if asked and self.lens.due(number) else []
        inputs, records = self._looked_at(output, rows) if rows else ({}, None)
        sampled = None if records is None else self._sampled(output, rows, records, inputs["temperature"])
        told = self._listeners or self._listeners_after
        columns = self._columns(output, recorded, sampled, records) if told else {}
        columns |= tool_call_columns(said) if said and told else {}
        for listener in self._listeners:
            listener(self.current_step + 1, columns)
        if view is not None and sampled is not None and records is not None:
            view = _filled(view, sampled, records)
        if view is not None or sampled is not None:
            until = self.micro_step + self._micro_batches_of_batch
            self._looks.append(PendingInspection(self.current_step + 1, view, sampled, columns, inputs, until))

    @property
    def _micro_batches_of_batch(self) -> int:
        """Micro-batches from one generation batch to the next."""
        return int(self.args.steps_per_generation * self.num_iterations)

    def _rows_to_look_at(self, output: Mapping[str, Any], number: int) -> list[int]:
        rows = self.lens.chosen(len(output["completion_ids"]), number)
        why = "it sees images" if any(name in output for name in IMAGES) else ""
        why = "weights are sharded over processes (ZeRO-3 or FSDP)" if self.sharded else why
        if rows and why:
            self.warn_once(f"the lens looks at no answer closely, and records no change of probabilities: {why}")
            return []
        return rows

    def _view(
        self,
        output: Mapping[str, Any],
        recorded: TokenStats | None,
        advantage: Tensor,
        rewards: Tensor,
        said: list[ToolTranscript] | None,
    ) -> StepView:
        accelerator = self.accelerator
        mask = counted_tokens(output).float()
        unknown = torch.full_like(mask, torch.nan)

        def told(tensor: Tensor | None) -> Tensor:
            """Of all processes on the main one, which alone looks at it."""
            values = unknown if tensor is None else tensor
            if accelerator.num_processes == 1:
                return values
            return gather_to_main(accelerator.pad_across_processes(values.contiguous(), dim=1))

        parts = self.reward_parts
        assert parts is not None
        logged = logged_columns(self.logs, len(rewards))
        return StepView(
            step=self.current_step + 1,
            token_ids=told(output["completion_ids"]),
            mask=told(mask),
            logps=told(None if recorded is None else recorded.logps),
            entropy=told(None if recorded is None else recorded.entropy),
            branching=told(None if recorded is None else recorded.branching),
            advantages=told(token_advantages(output) * mask),
            weights=told(token_weights(output)),
            advantage=advantage if accelerator.num_processes == 1 else accelerator.gather(advantage),
            rewards=rewards,
            reward_parts=dict(zip(self.reward_func_names, parts.unbind(1), strict=True)),
            correct=self.correct.marks(parts),
            group=torch.arange(len(rewards), device=rewards.device) // self.num_generations,
            prompts=logged["prompt"],
            completions=policy_texts(self.logs, len(rewards), said),
        )

    # ---------------------------------------------------------------- a closer look

    def _looked_at(self, output: Mapping[str, Any], rows: list[int]) -> tuple[dict[str, Tensor], AnswerRecords]:
        chosen = torch.tensor(rows, device=output["completion_ids"].device)
        inputs = {name: output[name][chosen] for name in _INPUTS}
        temperature = torch.full((len(rows),), float(self.temperature), device=chosen.device)
        if self._row_temperature is not None:
            temperature = self._row_temperature[chosen]
        if temperature.dim() == 2:
            temperature = widened(temperature, output["completion_ids"].size(1))
        inputs["temperature"] = temperature
        inputs["counted"] = counted_tokens(output)[chosen]
        return inputs, self._records_of(inputs)

    def _records_of(self, inputs: Mapping[str, Tensor]) -> AnswerRecords:
        """A pass over these answers that leaves no trace."""
        width = inputs["completion_ids"].size(1)
        time = max(int(inputs["completion_mask"].sum(1).max()), 1)  # without columns that are padding in all of them
        before = max(int(inputs["prompt_mask"].sum(1).max()), 1)
        ids, mask = (
            torch.cat([inputs[f"prompt_{kind}"][:, -before:], inputs[f"completion_{kind}"][:, :time]], dim=1)
            for kind in ("ids", "mask")
        )
        model = self.accelerator.unwrap_model(self.model)
        temperature = inputs["temperature"]  # one per row, or one per position
        temperature = temperature if temperature.dim() == 1 else temperature[:, :time]
        with preserved_random_state(ids.device), _still(model):
            found = answer_records(
                model, ids, mask, time, rows=self.args.per_device_train_batch_size,
                temperature=temperature, autocast=self.accelerator.autocast,
                packed=self._packed is not False,
            )  # fmt: skip
        return AnswerRecords(*(padded_to(values, width) for values in found))

    def _sampled(
        self, output: Mapping[str, Any], rows: list[int], records: AnswerRecords, temperature: Tensor
    ) -> InspectedRows:
        chosen = torch.tensor(rows, device=records.logps.device)
        moved = (token_advantages(output) * token_weights(output))[chosen]  # at the first update the ratio is 1
        size = update_size(
            records.logps,
            records.others_squared,
            records.state_norms,
            moved,
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

    def _columns(
        self,
        output: Mapping[str, Any],
        recorded: TokenStats | None,
        sampled: InspectedRows | None,
        records: AnswerRecords | None,
    ) -> dict[str, list[Any]]:
        """The latest generation batch as TRL logged it, with token records of some answers of this process."""
        parts = self.reward_parts
        assert parts is not None
        columns = logged_columns(self.logs, len(parts), partial(rendered_prompt, self))
        if not self.correct.guessed:
            marks, unscored = self.correct.marks(parts).tolist(), self.correct.rewards(parts).isnan().tolist()
            columns["correct"] = [None if no else mark for mark, no in zip(marks, unscored, strict=True)]
        rows = min(self._token_records * self.num_generations, len(output["completion_ids"]))
        return columns | token_columns(output, recorded, sampled, records, rows, len(parts), self._token_text)

    def _token_text(self, token: int) -> str:
        if token not in self._token_texts:
            self._token_texts[token] = self.tokenizer.decode([token])
        return self._token_texts[token]

    # ---------------------------------------------------------------- after the last update

    def _look_again(self, look: PendingInspection) -> None:
        """What has become of a batch: for the observers, and for those who keep it."""
        if look.sampled is not None:
            after = self._records_of(look.inputs).logps
            look.sampled = replace(look.sampled, logps_after=after)
            lists = token_lists(after, look.inputs["completion_mask"], look.inputs["counted"])
            for listener in self._listeners_after:
                column = spread(lists, look.sampled.rows.tolist(), len(look.columns["completion"]))
                listener(look.step, {**look.columns, "logp_after": column})
        if look.view is not None:
            sampled = None if look.sampled is None else look.sampled.padded(look.view.mask.size(1))
            for name, value in run_observers(self.observers, replace(look.view, sampled=sampled)).items():
                self.record_metric(name, value, "train")

    def finish_inspections(self, *, all_of_them: bool = False) -> None:
        """Ends the looks at batches that are used up, or at all of them."""
        looks, self._looks = self._looks, []
        for look in looks:
            if all_of_them or look.until <= self.micro_step:
                self._look_again(look)
            else:
                self._looks.append(look)

    # ---------------------------------------------------------------- checkpoints

    def _write_looks(self, folder: Path) -> None:
        """Keeps what the observers remember and the batches that are still in use; on the main process."""
        looks = [{name: dump(value) for name, value in vars(look).items()} for look in self._looks]
        states = [(name_of(one), remembered(one)) for one in self.observers if hasattr(one, "state_dict")]
        if looks or states:
            torch.save({"looks": looks, "observers": states}, folder / STATE)

    def _read_looks(self, folder: Path) -> None:
        """An observer that the checkpoint does not know begins anew."""
        if not self.accelerator.is_main_process or not (folder / STATE).exists():
            return
        self._looks = []
        with restoring(folder, STATE):
            saved = load_tensors(folder / STATE)
            if self.observers or self._listeners_after:
                for one in send_to_device(saved["looks"], self.accelerator.device):
                    view, sampled = load(StepView, one["view"]), load(InspectedRows, one["sampled"])
                    self._looks.append(PendingInspection(**{**one, "view": view, "sampled": sampled}))
            states = [(name, state) for name, state in saved["observers"]]
        for observer in self.observers:
            found = next((one for one in states if one[0] == name_of(observer)), None)
            if found is not None and hasattr(observer, "load_state_dict"):
                states.remove(found)
                observer.load_state_dict(found[1])


def _filled(view: StepView, sampled: InspectedRows, records: AnswerRecords) -> StepView:
    """The view with what a closer look found, where nothing else is known of its tokens."""
    if not view.entropy.isnan().all():
        return view
    filled = {}
    for name in ("logps", "entropy", "branching"):
        values: Tensor = getattr(records, name)
        filled[name] = getattr(view, name).clone()
        filled[name][sampled.rows, : values.size(1)] = values.to(filled[name].dtype)
    return replace(view, **filled)


@contextmanager
def _still(model: Any) -> Iterator[None]:
    """Without dropout."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


class _Watching(TrainerCallback):
    def __init__(self, trainer: InspectingTrainer) -> None:
        self.trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Steps may be counted anew: a batch that an earlier call of `train` has left was made at none of them."""
        for part in self.trainer.buffered_batches or []:
            part["made_at"] = torch.tensor(-1)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.trainer.finish_inspections()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.trainer.finish_inspections(all_of_them=True)
