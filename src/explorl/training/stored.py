"""What every training run shares: whole checkpoints, a metrics file, a progress bar."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from accelerate.utils import broadcast_object_list
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from transformers import TrainerCallback

from explorl.store import RunStore, atomic_folder


class StoredCheckpoints:
    """Mixin of a transformers Trainer: a checkpoint gets its name only when it is whole."""

    args: Any
    accelerator: Any
    store: RunStore
    keep_checkpoints: int = 2

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        accelerator = self.accelerator
        main = accelerator.is_main_process
        final = self.args.output_dir
        with self.store.stage_checkpoint() if main else nullcontext() as staging:
            # all processes write into one folder, and the main one gives it its name when they are done
            self.args.output_dir = broadcast_object_list([str(staging)])[0]
            try:
                super()._save_checkpoint(model, trial)  # type: ignore[misc]
                accelerator.wait_for_everyone()
            finally:
                self.args.output_dir = final
        if main:
            self.store.prune_checkpoints(self.keep_checkpoints)
        accelerator.wait_for_everyone()

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """A run folder has its provenance; TRL's card for the hub has no place in it."""


class Recorder(TrainerCallback):
    """Writes one line of metrics.jsonl for each logged step."""

    def __init__(self, store: RunStore) -> None:
        self.store = store

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        if state.is_world_process_zero and logs and "loss" in logs:  # the closing summary has no loss of its own
            self.store.append_metrics({"step": state.global_step, "kind": "train", **logs})


class ProgressBar(TrainerCallback):
    """A bar with the latest reward or loss; nothing where the output is not a terminal."""

    def __init__(self, label: str, console: Console) -> None:
        self.label = label
        self.progress = progress_bar(console)
        self.task: Any = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.progress.start()
        self.task = self.progress.add_task(self.label, total=state.max_steps, completed=state.global_step, note="")

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        values = {key: (logs or {}).get(key) for key in ("reward", "loss")}
        note = next((f"{key} {float(value):.3f}" for key, value in values.items() if value is not None), "")
        if note and self.task is not None:
            self.progress.update(self.task, note=note)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.task is not None:
            self.progress.update(self.task, completed=state.global_step)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.progress.stop()


def progress_bar(console: Console) -> Progress:
    """The bar that all commands share; hidden where the output is not a terminal."""
    return Progress(
        TextColumn("{task.description:<24}"),
        BarColumn(bar_width=30),
        MofNCompleteColumn(),
        TextColumn("{task.fields[note]}"),
        TimeRemainingColumn(),
        console=console,
        disable=not console.is_terminal,
    )


class Periodically(TrainerCallback):
    """Calls a function each so many steps; where it returns True, training ends."""

    def __init__(self, every: int, function: Callable[[int], bool | None]) -> None:
        self.every, self.function = every, function

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        due = self.every and state.global_step % self.every == 0 and state.is_world_process_zero
        if due and self.function(state.global_step):
            control.should_training_stop = True


def save_model(store: RunStore, trainer: Any, tokenizer: Any) -> Path:
    """Writes the trained policy to `model/` in the run's folder, whole."""
    target = store.folder / "model"
    with atomic_folder(target) as folder:
        trainer.model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    return target
