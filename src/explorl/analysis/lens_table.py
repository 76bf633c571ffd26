"""What a run has recorded of its answers and their tokens, in flat columns that every analysis of the lens reads.

    table = read_run("runs/mine")
    table.tokens["entropy"]             one value per token, NaN where it was not recorded
    table.tokens.completion                 the answer that each token belongs to
    table.completions["advantage"]          one value per answer
    table.curve("reward")               steps and values of a key of metrics.jsonl

What a run lacks raises `NotRecorded` where it is asked for, so that an analysis need not ask first. A file that cannot
be read is left out and named in `notes`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from explorl.core.store import RunStore, StoreError, step_files
from explorl.metrics.advantages import NO_ADVANTAGE

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

MAX_TOKENS = 20_000_000
"""Tokens that are read; of a run with more, files at even distances."""
MIN_TOGETHER = 10
"""Prompts from which an interval can be drawn over prompts."""
WHOLE = ("token_ids", "other_ids")
"""Columns of whole numbers; −1 stands for what was not recorded."""
TEXTS = ("tokens", "other")
NUMBERS = (
    "entropy", "logp", "branching", "collision", "other_logp", "state_norm", "update_size", "logp_after",
    "token_advantage", "token_weight",
)  # fmt: skip
"""Columns with a number a token."""
CLOSE = ("logp_after", "update_size", "collision", "state_norm", "other", "other_ids", "other_logp")
"""Columns of the answers that the lens looks at closely."""
_PLACES = ("tokens", "token_ids", "entropy")
"""Columns that say how many tokens an answer has: the first that a file has."""


@dataclass(frozen=True)
class Advice:
    """What to set for a run to record more, which depends on what has recorded it."""

    rollouts: str
    """Keeps the completions of a generation batch."""
    tokens: str
    """Keeps their tokens one by one."""
    close: str
    """Keeps the records of completions that the lens inspects."""

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Advice:
        """Return the advice for a run with this configuration; `RunRecorder` keeps TRL's options under ``trl``."""
        return RECORDED_SCRIPT if "trl" in config else TRAINED


TRAINED = Advice(
    rollouts="they are kept where training.save_rollouts is true",
    tokens="set training.token_records, the prompts per step that have them, to 4, say",
    close="train with training.lens, which inspects some completions closely",
)
RECORDED_SCRIPT = Advice(
    rollouts="a script keeps them with RunRecorder(rollouts_every=1)",
    tokens="a script records them with an ExplorationTrainer and RunRecorder(token_records=4)",
    close="an ExplorationTrainer records it where RunRecorder(token_records=4) watches it",
)


class NotRecorded(ValueError):
    """What an analysis needs and the run has not recorded; the message says how to get it."""


@dataclass(frozen=True)
class Tokens:
    """One entry a token, answer after answer in the order of the steps."""

    completion: Ints
    """Which answer a token belongs to."""
    position: Ints
    """Its place in the answer, from 0."""
    length: Ints
    """How many tokens that answer has."""
    step: Ints
    columns: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    advice: Advice = TRAINED

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
        """Place in the answer ÷ its length, in [0, 1)."""
        return self.position / np.maximum(self.length, 1)

    def _missing(self, name: str) -> str:
        """Return why a column is missing, and how a run gets it."""
        if not len(self):
            return f"no token is recorded; {self.advice.tokens}"
        if name in CLOSE:
            return f"the tokens have no record of {name!r}; {self.advice.close}"
        return f"the tokens have no record of {name!r}; {self.advice.tokens}, in this version of Explorl"


@dataclass(frozen=True)
class Completions:
    """One entry an answer."""

    step: Ints
    prompt: Sequence[str]
    completion: Sequence[str]
    start: Ints
    """Where its tokens begin in `Tokens`."""
    count: Ints
    """How many of its tokens are recorded; 0 where none is."""
    columns: Mapping[str, Floats] = field(default_factory=dict)
    """``advantage``, ``correct`` (1 or 0) and ``reward/<name>``, NaN where not known."""
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
        """1 for positive answers, −1 for negative ones, 0 for those that training did not move.

        By the advantage, which is what training rewards or punishes; where there is none, by correctness. In a group of
        equal rewards the advantage is what rounding leaves, divided by 1e-4: below `NO_ADVANTAGE`, it is none.
        """
        if "advantage" in self:
            advantage = np.nan_to_num(self["advantage"])
            return np.where(np.abs(advantage) < NO_ADVANTAGE, 0, np.sign(advantage)).astype(np.int64)
        if "correct" not in self:
            raise NotRecorded("the answers have neither an advantage nor correctness, so none is positive or negative")
        return np.nan_to_num(2 * self["correct"] - 1).astype(np.int64)

    @property
    def cluster(self) -> Ints:
        """A number for the answers to one prompt, which are alike: what an interval over answers draws together.

        Where a run has fewer than 10 prompts, those to one prompt in one step; with fewer of these too, each is alone.
        """
        for keys in (self.prompt, zip(self.step.tolist(), self.prompt, strict=True)):
            found = number_keys(keys)
            if len(np.unique(found)) >= MIN_TOGETHER:
                return found
        return np.arange(len(self), dtype=np.int64)


@dataclass(frozen=True)
class LensTable:
    """A run, or the answers of a lone checkpoint."""

    name: str
    completions: Completions
    tokens: Tokens
    lines: Sequence[Mapping[str, Any]] = ()
    """The training steps' lines of metrics.jsonl."""
    evaluations: Mapping[int, float] = field(default_factory=dict)
    """Held-out pass@1 by update."""
    notes: Sequence[str] = ()
    """What could not be read."""

    def curve(self, *keys: str) -> tuple[Floats, Floats]:
        """Steps and values of the first of these keys that any line has a finite value of."""
        for key in keys:
            found = {line["step"]: line[key] for line in self.lines if _is_number(line.get(key))}
            if found:
                steps = sorted(found)
                return np.array(steps, dtype=float), np.array([found[step] for step in steps], dtype=float)
        raise NotRecorded(f"metrics.jsonl has no line with {' or '.join(keys)}")


def read_run(folder: str | Path, *, most_tokens: int = MAX_TOKENS) -> LensTable:
    """Reads what a run has recorded; `StoreError` where the folder holds no run."""
    store = RunStore.open(folder)
    lines = [line for line in store.metrics() if line.get("kind") == "train" and "step" in line]
    scores = {
        int(line["step"]): float(line["pass@1"])
        for line in store.metrics()
        if line.get("kind") == "evaluation" and _is_number(line.get("pass@1"))
    }
    found, notes = _files(store, most_tokens)
    parts: list[_Part] = []
    for path in found:
        try:
            parts.append(_read(path))
        except Exception as error:  # pyarrow has many errors for a damaged file, and a bug must not hide the others
            why = str(error).splitlines()[0] if str(error) else type(error).__name__
            notes.append(f"{path.name} cannot be read and is left out: {why}")
    answers, tokens = _joined(parts, notes)
    tokens = replace(tokens, advice=Advice.of(store.config()))
    return LensTable(store.folder.name, answers, tokens, lines, scores, tuple(notes))


def build_table(name: str, steps: Mapping[int, Mapping[str, Sequence[Any]]], **more: Any) -> LensTable:
    """The table of rollouts in memory: their columns by step, as a run writes them."""
    import pyarrow as pa

    notes: list[str] = []
    parts = [_part(step, pa.table(dict(columns)), f"step {step}") for step, columns in steps.items()]
    answers, tokens = _joined(parts, notes)
    return LensTable(name, answers, tokens, notes=tuple(notes), **more)


def _files(store: RunStore, most: int) -> tuple[list[Path], list[str]]:
    """The rollout files to read, and what to say of the others."""
    import pyarrow.parquet as pq

    found = list(step_files(store.rollouts, ".parquet").values())
    sizes = []
    for path in found:
        try:
            with pq.ParquetFile(path) as file:
                parts = [file.metadata.row_group(index) for index in range(file.metadata.num_row_groups)]
                columns = [part.column(place) for part in parts for place in range(part.num_columns)]
                sizes.append(sum(c.num_values for c in columns if c.path_in_schema.startswith("entropy.")))
        except Exception:  # said when it is read
            sizes.append(0)
    every = -(-sum(sizes) // most) if sizes else 1
    if every <= 1:
        return found, []
    kept = found[::every]
    return kept, [f"{len(kept)} of {len(found)} rollout files are read, at even distances: {sum(sizes):,} tokens"]


@dataclass(frozen=True)
class _Part:
    """One file."""

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
    blank: list[Any] = [None] * rows
    texts = {key: table[key].to_pylist() if key in names else blank for key in ("prompt", "completion", "prompt_ids")}
    numbers = {
        name: _floats(table[name]) for name in names if name in ("advantage", "correct") or name.startswith("reward/")
    }
    place = next((name for name in _PLACES if name in names), None)
    count = _lengths(table[place]) if place else np.zeros(rows, dtype=np.int64)
    notes: list[str] = []
    tokens: dict[str, NDArray[Any]] = {}
    for name in (*NUMBERS, *WHOLE, *TEXTS):
        if name in names:
            values, wrong = _flat(table[name], count, name)
            if wrong:
                notes.append(f"{where}: {name} of {wrong} answers has another length than {place}, and is left out")
            tokens[name] = values
    return _Part(step, count, texts, numbers, tokens, notes)


def number_keys(keys: Iterable[Any]) -> Ints:
    """The same number for the same key, from 0 in the order in which they first come."""
    known: dict[Any, int] = {}
    return np.array([known.setdefault(key, len(known)) for key in keys], dtype=np.int64)


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
    """The values of a column of lists one after the other, blank where a list is not there, and how many lists have
    the wrong length."""
    import pyarrow.compute as pc

    total, own = int(count.sum()), _lengths(column)
    fits = (own == count) & (count > 0)
    if name in TEXTS:
        flat: NDArray[Any] = np.full(total, "", dtype=object)
    else:
        flat = np.full(total, -1, dtype=np.int64) if name in WHOLE else np.full(total, np.nan)
    if fits.any():
        values = pc.list_flatten(column)
        if name in TEXTS:
            found: NDArray[Any] = np.array([value or "" for value in values.to_pylist()], dtype=object)
        elif name in WHOLE:
            found = np.asarray(pc.fill_null(values, -1).to_numpy(), dtype=np.int64)
        else:
            found = np.asarray(values.cast("float64").to_numpy(), dtype=np.float64)
        flat[np.repeat(fits, count)] = found[np.repeat(fits, own)]
    return flat, int(((own != count) & (own > 0)).sum())


def _joined(parts: Sequence[_Part], notes: list[str]) -> tuple[Completions, Tokens]:
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
        known = columns["reward/correctness"]
        columns["correct"] = np.where(np.isfinite(known), known >= 1 - 1e-6, np.nan)
    columns = {name: values for name, values in columns.items() if np.isfinite(values).any()}
    texts = {
        key: [value for part in parts for value in part.texts[key]] for key in ("prompt", "completion", "prompt_ids")
    }
    answers = Completions(
        step, [value or "" for value in texts["prompt"]], [value or "" for value in texts["completion"]],
        start, count, columns, texts["prompt_ids"],
    )  # fmt: skip
    answer = np.repeat(np.arange(len(count)), count)
    position = np.arange(int(count.sum())) - start[answer]
    tokens = {
        name: np.concatenate([part.tokens.get(name, _blank(name, int(part.count.sum()))) for part in parts])
        for name in dict.fromkeys(name for part in parts for name in part.tokens)
    }
    tokens = {name: values for name, values in tokens.items() if _any(values)}
    return answers, Tokens(answer, position, count[answer], step[answer], tokens)


def _blank(name: str, count: int) -> NDArray[Any]:
    if name in TEXTS:
        return np.full(count, "", dtype=object)
    return np.full(count, -1, dtype=np.int64) if name in WHOLE else np.full(count, np.nan)


def _any(values: NDArray[Any]) -> bool:
    """Whether anything was recorded."""
    if values.dtype == object:
        return bool((values != "").any())
    return bool((values >= 0).any() if values.dtype == np.int64 else np.isfinite(values).any())


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and bool(np.isfinite(value))


def plain_values(value: Any) -> Any:
    """A result as values that JSON has: arrays as lists, NaN as None, anything else as its text."""
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
