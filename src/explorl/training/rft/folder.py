"""An iteration of an RFT run: a folder in which every stage leaves complete files, so that a killed run can resume.

    run/iterations/iteration-01/
      pool.parquet       every response with its verdict and its means (parts/ until sampling is complete)
      dropped.parquet    which filter dropped which response
      selected.parquet   the responses to train on, with their prompts and scores
      selection.json     counts of filters and selector (written last of the three)
      fit/               the fit: a run of kind sft, its policy in fit/model
      evaluation.json    every score of that policy with its interval; completions in run/evaluations/

Texts are stored exactly as sampled, control characters included, because they are trained on.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from explorl.core.store import RunStore, atomic_folder, fsync_folder, read_json, write_json
from explorl.core.store.atomic_files import write_arrays
from explorl.evaluation.completions import Columns, read_completions, write_completions
from explorl.training.rft.samples import Sample, from_columns

Stage = Literal["sampling", "filtering", "fitting", "evaluation"]


class IterationFolder:
    """The files of one iteration."""

    def __init__(self, store: RunStore, number: int) -> None:
        self.number = number
        self.folder = store.folder / "iterations" / f"iteration-{number:02d}"
        self.pool_path = self.folder / "pool.parquet"
        self.parts = self.folder / "parts"
        self.selection_path = self.folder / "selection.json"
        self.fit = RunStore(self.folder / "fit")
        self.model = self.folder / "fit" / "model"
        self.evaluation_path = self.folder / "evaluation.json"

    def stage(self, is_scored: bool) -> Stage | None:
        """Return the next stage, or None if all are done. ``is_scored``: the iteration ends with an evaluation."""
        if not self.pool_path.exists():
            return "sampling"
        if not self.is_selected:
            return "filtering"
        if not self.model.is_dir():
            return "fitting"
        return "evaluation" if is_scored and not self.evaluation_path.exists() else None

    # ------------------------------------------------------------------ sampling
    def part(self, number: int) -> Path:
        return self.parts / f"part-{number:05d}.parquet"

    def write_part(self, number: int, columns: Columns, seconds: float) -> None:
        """Write a part of the responses, with their sampling time in equal shares."""
        count = len(columns["sample"])
        write_completions(self.part(number), columns | {"seconds": [seconds / count] * count}, verbatim=True)

    def join_parts(self, count: int) -> None:
        """Join the parts into the pool and remove them."""
        parts = [read_completions(self.part(number)).to_pydict() for number in range(count)]
        columns = {name: [value for part in parts for value in part[name]] for name in parts[0]}
        write_completions(self.pool_path, columns, verbatim=True)
        shutil.rmtree(self.parts, ignore_errors=True)

    def pool(self) -> tuple[list[Sample], Columns]:
        """Read the pool: its responses, and all its columns."""
        columns = read_completions(self.pool_path).to_pydict()
        return from_columns(columns), columns

    # ------------------------------------------------------------------ filtering
    @property
    def is_selected(self) -> bool:
        """True if all files of `write_selection` exist."""
        names = ("dropped.parquet", "selected.parquet")
        return self.selection_path.exists() and all((self.folder / name).exists() for name in names)

    def write_selection(self, dropped: Columns, selected: Columns, facts: Mapping[str, Any]) -> None:
        """Write the selection; the facts come last and mark it as complete."""
        import pyarrow as pa

        write_arrays(self.folder / "dropped.parquet", {name: pa.array(values) for name, values in dropped.items()})
        write_completions(self.folder / "selected.parquet", selected, verbatim=True)
        write_json(self.selection_path, dict(facts))

    def selection(self) -> dict[str, Any]:
        """Read the facts of `write_selection`."""
        return dict(read_json(self.selection_path))

    def selected(self) -> Columns:
        """Read the responses to train on."""
        return dict(read_completions(self.folder / "selected.parquet").to_pydict())


def link_folder(source: Path, target: Path) -> None:
    """Hard-link all files into a second folder atomically; copy them if the file system has no hard links."""

    def link(existing: str, new: str) -> None:
        try:
            Path(new).hardlink_to(existing)
        except OSError:
            shutil.copy2(existing, new)

    with atomic_folder(target) as folder:
        shutil.copytree(source, folder, copy_function=link, dirs_exist_ok=True)
    fsync_folder(target.parent)
