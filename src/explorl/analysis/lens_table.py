"""The recorded completions and tokens of a run, in flat columns that every analysis of the lens reads.

    table = read_run("runs/mine")
    table.tokens["entropy"]             one value per token, NaN if it was not recorded
    table.tokens.completion             index of the completion that each token belongs to
    table.completions["advantage"]      one value per completion
    table.curve("reward")               steps and values of a key of metrics.jsonl

Access to missing records raises `NotRecorded`, so analyses need not check for them first. A file that cannot be read is
left out and named in `notes`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, is_dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from explorl.core.store import RunStore, StoreError, step_files
from explorl.metrics.advantages import NO_ADVANTAGE

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

MAX_TOKENS = 20_000_000
"""Most tokens that are read; of a run with more, evenly spaced files."""
MIN_CLUSTERS = 10
"""Least prompts for an interval over prompts."""
INTEGERS = ("token_ids", "other_ids")
"""Columns of integers; −1 means not recorded."""
TEXTS = ("tokens", "other")
NUMBERS = (
    "entropy", "logp", "branching", "collision", "other_logp", "state_norm", "update_size", "logp_after",
    "token_advantage", "token_weight",
)  # fmt: skip
"""Columns with one number per token."""
INSPECTED = ("logp_after", "update_size", "collision", "state_norm", "other", "other_ids", "other_logp")
"""Columns of the completions that the lens inspects."""
_LENGTH_COLUMNS = ("tokens", "token_ids", "entropy")
"""Columns from which a completion's number of tokens is read; the first that a file has."""


@dataclass(frozen=True)
class Advice:
    """How to record more in a run, which depends on the program that records it."""

    rollouts: str
    """How to record the completions of a generation batch."""
    tokens: str
    """How to record single tokens."""
    inspected: str
    """How to record what the lens inspects."""

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Advice:
        """Return the advice for a run with this configuration; `RunRecorder` keeps TRL's options under ``trl``."""
        return SCRIPT_ADVICE if "trl" in config else RUN_ADVICE


RUN_ADVICE = Advice(
    rollouts="set training.save_rollouts to true to record them",
    tokens="set training.token_records, the number of prompts per step with token records, for example to 4",
    inspected="train with training.lens, which inspects some completions",
)
SCRIPT_ADVICE = Advice(
    rollouts="record them with RunRecorder(rollouts_every=1)",
    tokens="record them with an ExplorationTrainer and RunRecorder(token_records=4)",
    inspected="record it with an ExplorationTrainer and RunRecorder(token_records=4)",
)


class NotRecorded(ValueError):
    """Records that an analysis needs are missing; the message says how to record them."""


@dataclass(frozen=True)
class Tokens:
    """One entry per token, completion after completion in the order of the steps."""

    completion: Ints
    """Index of the completion that the token belongs to."""
    position: Ints
    """Position in the completion, from 0."""
    length: Ints
    """Number of tokens of that completion."""
    step: Ints
    columns: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    advice: Advice = RUN_ADVICE

    def __getitem__(self, name: str) -> NDArray[Any]:
        if name not in self.columns:
            raise NotRecorded(self._missing(name))
        return self.columns[name]

    def __contains__(self, name: str) -> bool:
        return name in self.columns

    def __len__(self) -> int:
        return len(self.completion)

    @property
    def relative_position(self) -> Floats:
        """Position in the completion ÷ its length, in [0, 1)."""
        return self.position / np.maximum(self.length, 1)

    def means_by_step(self, values: Floats, selected: NDArray[np.bool_] | None = None) -> tuple[Floats, Floats]:
        """Return steps and the mean of the values at each, of all tokens or of those selected; NaN is left out."""
        known = np.isfinite(values) if selected is None else selected & np.isfinite(values)
        steps, inverse = np.unique(self.step[known], return_inverse=True)
        return steps.astype(float), np.bincount(inverse, values[known]) / np.maximum(np.bincount(inverse), 1)

    def _missing(self, name: str) -> str:
        """Return why a column is missing, and how to record it."""
        if not len(self):
            return f"no token is recorded; {self.advice.tokens}"
        if name in INSPECTED:
            return f"the tokens have no record of {name!r}; {self.advice.inspected}"
        return f"the tokens have no record of {name!r}; {self.advice.tokens}, in this version of Explorl"


@dataclass(frozen=True)
class Completions:
    """One entry per completion."""

    step: Ints
    prompt: Sequence[str]
    completion: Sequence[str]
    start: Ints
    """Index of its first token in `Tokens`."""
    count: Ints
    """Number of its recorded tokens."""
    columns: Mapping[str, Floats] = field(default_factory=dict)
    """``advantage``, ``correct`` (1 or 0) and ``reward/<name>``, NaN if unknown."""
    prompt_ids: Sequence[Sequence[int] | None] = ()

    def __getitem__(self, name: str) -> Floats:
        if name not in self.columns:
            raise NotRecorded(f"the rollouts have no column {name!r}; they have {', '.join(self.columns) or 'none'}")
        return self.columns[name]

    def __contains__(self, name: str) -> bool:
        return name in self.columns

    def __len__(self) -> int:
        return len(self.step)

    @property
    def sign(self) -> Ints:
        """1 for positive completions, −1 for negative ones, 0 for those without an effect on training.

        The sign is that of the advantage, or else of correctness. In a group of equal rewards the advantage is a
        rounding error divided by 1e-4, so one below `NO_ADVANTAGE` counts as 0.
        """
        if "advantage" in self:
            advantage = np.nan_to_num(self["advantage"])
            return np.where(np.abs(advantage) < NO_ADVANTAGE, 0, np.sign(advantage)).astype(np.int64)
        if "correct" not in self:
            raise NotRecorded(
                "the completions have neither an advantage nor correctness, so none is positive or negative"
            )
        return np.nan_to_num(2 * self["correct"] - 1).astype(np.int64)

    @property
    def cluster(self) -> Ints:
        """Cluster numbers for intervals: completions of a prompt are similar, so they are resampled together.

        With fewer than 10 prompts, a cluster is a prompt in a step; with fewer than 10 of these, a completion.
        """
        for keys in (self.prompt, zip(self.step.tolist(), self.prompt, strict=True)):
            clusters = number_keys(keys)
            if len(np.unique(clusters)) >= MIN_CLUSTERS:
                return clusters
        return np.arange(len(self), dtype=np.int64)


@dataclass(frozen=True)
class LensTable:
    """The records of a run, or of the completions of a lone checkpoint."""

    name: str
    completions: Completions
    tokens: Tokens
    lines: Sequence[Mapping[str, Any]] = ()
    """The training steps' lines of metrics.jsonl."""
    notes: Sequence[str] = ()
    """Notes on files that could not be read."""

    def curve(self, *keys: str) -> tuple[Floats, Floats]:
        """Return steps and values of the first of these keys with a finite value; raise `NotRecorded` without any."""
        for key in keys:
            values = {line["step"]: line[key] for line in self.lines if _is_number(line.get(key))}
            if values:
                steps = sorted(values)
                return np.array(steps, dtype=float), np.array([values[step] for step in steps], dtype=float)
        raise NotRecorded(f"metrics.jsonl has no line with {' or '.join(keys)}")


def read_run(folder: str | Path, *, most_tokens: int = MAX_TOKENS) -> LensTable:
    """Read the records of a run; raise `StoreError` if the folder is not a run."""
    store = RunStore.open(folder)
    lines = [line for line in store.metrics("train") if "step" in line]
    paths, notes = _select_files(store, most_tokens)
    parts: list[_Part] = []
    for path in paths:
        try:
            parts.append(_read(path))
        except Exception as error:  # pyarrow raises many kinds; the other files must still be read
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            notes.append(f"{path.name} cannot be read and is left out: {reason}")
    completions, tokens = _join(parts, notes)
    tokens = replace(tokens, advice=Advice.of(store.config()))
    return LensTable(store.folder.name, completions, tokens, lines, tuple(notes))


def build_table(name: str, steps: Mapping[int, Mapping[str, Sequence[Any]]], **more: Any) -> LensTable:
    """Return the table of rollouts in memory, given their columns by step as a run writes them."""
    import pyarrow as pa

    notes: list[str] = []
    parts = [_part(step, pa.table(dict(columns)), f"step {step}") for step, columns in steps.items()]
    completions, tokens = _join(parts, notes)
    return LensTable(name, completions, tokens, notes=tuple(notes), **more)


def _select_files(store: RunStore, most_tokens: int) -> tuple[list[Path], list[str]]:
    """Return the rollout files to read, and a note if some are left out."""
    import pyarrow.parquet as pq

    paths = list(step_files(store.rollouts, ".parquet").values())
    sizes = []
    for path in paths:
        try:
            with pq.ParquetFile(path) as file:
                parts = [file.metadata.row_group(index) for index in range(file.metadata.num_row_groups)]
                columns = [part.column(index) for part in parts for index in range(part.num_columns)]
                sizes.append(sum(c.num_values for c in columns if c.path_in_schema.startswith("entropy.")))
        except Exception:  # reported when the file is read
            sizes.append(0)
    every = -(-sum(sizes) // most_tokens) if sizes else 1
    if every <= 1:
        return paths, []
    selected = paths[::every]
    return selected, [f"{len(selected)} of {len(paths)} rollout files are read, evenly spaced: {sum(sizes):,} tokens"]


@dataclass(frozen=True)
class _Part:
    """The contents of one file."""

    step: int
    count: Ints
    texts: Mapping[str, list[Any]]
    numbers: Mapping[str, Floats]
    tokens: Mapping[str, NDArray[Any]]
    notes: Sequence[str]


def _read(path: Path) -> _Part:
    import pyarrow.parquet as pq

    with pq.ParquetFile(path) as file:
        return _part(int(path.stem.removeprefix("step-")), file.read(), path.name)


def _part(step: int, table: Any, where: str) -> _Part:
    rows = table.num_rows
    names = table.column_names
    empty: list[Any] = [None] * rows
    texts = {key: table[key].to_pylist() if key in names else empty for key in ("prompt", "completion", "prompt_ids")}
    numbers = {
        name: _floats(table[name]) for name in names if name in ("advantage", "correct") or name.startswith("reward/")
    }
    length_column = next((name for name in _LENGTH_COLUMNS if name in names), None)
    count = _lengths(table[length_column]) if length_column else np.zeros(rows, dtype=np.int64)
    notes: list[str] = []
    tokens: dict[str, NDArray[Any]] = {}
    for name in (*NUMBERS, *INTEGERS, *TEXTS):
        if name in names:
            values, wrong = _flat(table[name], count, name)
            if wrong:
                notes.append(
                    f"{where}: {name} of {wrong} completions is left out: its length differs from {length_column}"
                )
            tokens[name] = values
    return _Part(step, count, texts, numbers, tokens, notes)


def number_keys(keys: Iterable[Any]) -> Ints:
    """Return numbers from 0 in order of first occurrence, the same for equal keys."""
    numbers: dict[Any, int] = {}
    return np.array([numbers.setdefault(key, len(numbers)) for key in keys], dtype=np.int64)


def _floats(column: Any) -> Floats:
    values = column.to_pylist()
    return np.array([np.nan if value is None else float(value) for value in values], dtype=np.float64)


def _lengths(column: Any) -> Ints:
    import pyarrow as pa
    import pyarrow.compute as pc

    if not (pa.types.is_list(column.type) or pa.types.is_large_list(column.type)):
        return np.zeros(len(column), dtype=np.int64)
    return np.asarray(pc.fill_null(pc.list_value_length(column), 0).to_numpy(), dtype=np.int64)


def _flat(column: Any, count: Ints, name: str) -> tuple[NDArray[Any], int]:
    """Return the concatenated lists of a column, blank for missing lists, and how many lists have the wrong length."""
    import pyarrow.compute as pc

    total, lengths = int(count.sum()), _lengths(column)
    fits = (lengths == count) & (count > 0)
    if name in TEXTS:
        flat: NDArray[Any] = np.full(total, "", dtype=object)
    else:
        flat = np.full(total, -1, dtype=np.int64) if name in INTEGERS else np.full(total, np.nan)
    if fits.any():
        values = pc.list_flatten(column)
        if name in TEXTS:
            recorded: NDArray[Any] = np.array([value or "" for value in values.to_pylist()], dtype=object)
        elif name in INTEGERS:
            recorded = np.asarray(pc.fill_null(values, -1).to_numpy(), dtype=np.int64)
        else:
            recorded = np.asarray(values.cast("float64").to_numpy(), dtype=np.float64)
        flat[np.repeat(fits, count)] = recorded[np.repeat(fits, lengths)]
    return flat, int(((lengths != count) & (lengths > 0)).sum())


def _join(parts: Sequence[_Part], notes: list[str]) -> tuple[Completions, Tokens]:
    notes += [note for part in parts for note in part.notes]
    parts = sorted(parts, key=lambda part: part.step)
    counts = [part.count for part in parts]
    count = np.concatenate(counts) if counts else np.zeros(0, dtype=np.int64)
    step = np.repeat([part.step for part in parts], [len(part.count) for part in parts]).astype(np.int64)
    start = np.concatenate([[0], np.cumsum(count)])[:-1].astype(np.int64)
    columns = {
        name: np.concatenate([part.numbers.get(name, np.full(len(part.count), np.nan)) for part in parts])
        for name in dict.fromkeys(name for part in parts for name in part.numbers)
    }
    if "correct" not in columns and "reward/correctness" in columns:
        correctness = columns["reward/correctness"]
        columns["correct"] = np.where(np.isfinite(correctness), correctness >= 1 - 1e-6, np.nan)
    columns = {name: values for name, values in columns.items() if np.isfinite(values).any()}
    texts = {
        key: [value for part in parts for value in part.texts[key]] for key in ("prompt", "completion", "prompt_ids")
    }
    completions = Completions(
        step, [value or "" for value in texts["prompt"]], [value or "" for value in texts["completion"]],
        start, count, columns, texts["prompt_ids"],
    )  # fmt: skip
    completion = np.repeat(np.arange(len(count)), count)
    position = np.arange(int(count.sum())) - start[completion]
    tokens = {
        name: np.concatenate([part.tokens.get(name, _blank(name, int(part.count.sum()))) for part in parts])
        for name in dict.fromkeys(name for part in parts for name in part.tokens)
    }
    tokens = {name: values for name, values in tokens.items() if _is_recorded(values)}
    return completions, Tokens(completion, position, count[completion], step[completion], tokens)


def _blank(name: str, count: int) -> NDArray[Any]:
    if name in TEXTS:
        return np.full(count, "", dtype=object)
    return np.full(count, -1, dtype=np.int64) if name in INTEGERS else np.full(count, np.nan)


def _is_recorded(values: NDArray[Any]) -> bool:
    """Check whether any value was recorded."""
    if values.dtype == object:
        return bool((values != "").any())
    return bool((values >= 0).any() if values.dtype == np.int64 else np.isfinite(values).any())


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and bool(np.isfinite(value))


def plain_values(value: Any) -> Any:
    """Return a result as JSON values: arrays as lists, NaN as None, anything unknown as text."""
    if is_dataclass(value) and not isinstance(value, type):
        return plain_values(asdict(value))
    if isinstance(value, np.ndarray):
        return plain_values(value.tolist())
    if isinstance(value, np.generic):
        return plain_values(value.item())
    if isinstance(value, Mapping):
        return {
            key if isinstance(key, str) else json.dumps(plain_values(key)): plain_values(item)
            for key, item in value.items()
        }
    if isinstance(value, list | tuple | set | frozenset):
        return [plain_values(item) for item in value]
    if isinstance(value, float):
        return value if np.isfinite(value) else None
    return value if value is None or isinstance(value, str | int) else str(value)


__all__ = ["Completions", "LensTable", "NotRecorded", "StoreError", "Tokens", "build_table", "plain_values", "read_run"]
