"""An evaluation's folder: what was asked, and every completion drawn so far, in files that are never rewritten.

    <model>-<task>-<protocol>/
      evaluation.json       what all its samples share: the model's fingerprint, task, template, sampling, seed
      samples/*.parquet     completions with their verdicts, a chunk a file
      summary.json          the scores of the latest call that found everything it had asked for
      table.json .csv .tex  the same for people

A file of samples is named after its rows and written whole, so processes may write side by side: whatever has its name
is complete, and who draws the same rows writes the same file.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from explorl.core.store import StoreError, cleaned, read_json, write_json, write_parquet
from explorl.evaluation.completions import TOOL_COLUMNS
from explorl.evaluation.evaluation import Evaluation
from explorl.rollout import SamplingParams

Columns = dict[str, list[Any]]

COLUMNS: Mapping[str, str] = {
    "problem_index": "int32", "problem": "string", "sample": "int32", "prompt": "string", "completion": "string",
    "tokens": "int32", "finish_reason": "string", "correct": "bool", "well_formed": "bool", "answer": "string",
    "error": "string", "entropy": "float64", "branching": "float64", "format_violations": "int32",
    "redundancy": "float64", "cjk": "int32",
}  # fmt: skip
"""`tokens` counts the sampled tokens, and `entropy` and `branching` are means over them; `cjk` counts characters."""

TOKEN_COLUMNS: Mapping[str, str] = {
    "token_ids": "int32", "token_entropy": "float32", "token_branching": "int32", "token_logps": "float32",
}  # fmt: skip
"""Lists with one entry per token, null where it was not sampled but said by a tool. The log-probabilities are those of
the policy at the sampling temperature."""

DIGEST = "data_digest"
"""Column with a digest of the problem's data, which its verdicts depend on; files of older versions lack it."""
TEXT = ("prompt", "completion", "error")
STALE_SECONDS = 3600
"""Age at which a temporary file is what a killed process left, not what a living one is writing."""


class EvaluationFolder:
    """Reads and writes one evaluation's folder."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.identity_path = self.folder / "evaluation.json"
        self.summary_path = self.folder / "summary.json"
        self.samples = self.folder / "samples"

    def identity(self) -> dict[str, Any]:
        """What all samples share."""
        return _read_json(self.identity_path, "it is no evaluation's folder")

    def summary(self) -> dict[str, Any]:
        """The scores of the latest call that found everything."""
        return _read_json(self.summary_path, "run the evaluation again, without --shard, to draw what is missing")

    def claim(self, identity: Mapping[str, Any]) -> None:
        """Begins the evaluation, or goes on with it; `StoreError` where the folder holds another one."""
        if not self.identity_path.exists():
            write_json(self.identity_path, dict(identity))
        asked = _flat(cleaned(json.loads(json.dumps(identity))))
        there = _flat(self.identity())
        for key in sorted(asked.keys() | there.keys()):
            if asked.get(key) != there.get(key):
                raise StoreError(
                    f"{self.folder} holds samples with another {key}: {there.get(key)!r} there, {asked.get(key)!r} "
                    "asked for; ask for the same or name another folder with --out"
                )
        for path in self.samples.glob(".*.tmp"):
            if time.time() - path.stat().st_mtime > STALE_SECONDS:
                path.unlink(missing_ok=True)

    # ------------------------------------------------------------------ samples
    def write(self, rows: Columns) -> None:
        """Adds completions: the columns of `COLUMNS`, and what there is of `TOOL_COLUMNS` and `TOKEN_COLUMNS`."""
        import pyarrow as pa

        kinds = {name: getattr(pa, kind.replace("bool", "bool_"))() for name, kind in COLUMNS.items()}
        kinds |= {DIGEST: pa.string()} if DIGEST in rows else {}
        kinds |= {name: getattr(pa, kind)() for name, kind in TOOL_COLUMNS.items() if name in rows}
        kinds |= {name: pa.list_(getattr(pa, kind)()) for name, kind in TOKEN_COLUMNS.items() if name in rows}
        pairs = np.array([rows["problem_index"], rows["sample"]], dtype=np.int64)
        (first, start), (last, stop) = pairs.min(axis=1), pairs.max(axis=1)
        digest = hashlib.blake2b(pairs.tobytes(), digest_size=4).hexdigest()
        name = f"problems-{first:05d}-{last:05d}-samples-{start:04d}-{stop:04d}-{digest}.parquet"
        write_parquet(self.samples / name, {key: rows[key] for key in kinds}, kinds)

    def have(self, problems: Sequence[str], samples: int, digests: Sequence[str | None] | None = None) -> np.ndarray:
        """Which samples of these problems are there: problems × samples. ``digests``: those of the problems' data."""
        found = np.zeros((len(problems), samples), dtype=bool)
        ids = np.asarray(cleaned(list(problems)), dtype=object)
        for path in self.parts():
            part = _columns(path, ("problem_index", "problem", "sample"), optional=(DIGEST,))
            index, sample = part["problem_index"].to_numpy(), part["sample"].to_numpy()
            inside = index < len(problems)
            other = inside.copy()
            other[inside] = part["problem"].to_numpy()[inside] != ids[index[inside]]
            if other.any():
                row = int(np.flatnonzero(other)[0])
                raise StoreError(
                    f"{path}: problem {index[row]} is {part['problem'][row].as_py()!r} there and {ids[index[row]]!r} "
                    "in this call; ask for the same problems or name another folder with --out"
                )
            if digests is not None and DIGEST in part.column_names:
                now = np.asarray(digests, dtype=object)[index[inside]]
                then = part[DIGEST].to_numpy()[inside]
                changed = (now != then) & (now != None) & (then != None)  # noqa: E711 (by element)
                if changed.any():
                    odd = ids[index[inside][np.flatnonzero(changed)[0]]]
                    raise StoreError(
                        f"{self.folder} holds verdicts on problem {odd!r} as it was: its answer, text or another "
                        f"column has changed since; name another folder with --out, or remove {self.folder}"
                    )
            inside &= sample < samples
            found[index[inside], sample[inside]] = True
        return found

    def read(self, problems: int, samples: int, columns: Sequence[str] = ()) -> Columns:
        """The first samples of the first problems, in order; without texts and token records but those named."""
        import pyarrow as pa

        wanted = [*(name for name in COLUMNS if name not in TEXT), *columns]
        if "tool" in self.identity():
            wanted += [name for name in TOOL_COLUMNS if name != "tool_calls" and name not in columns]
        parts = [_columns(path, wanted, optional=(DIGEST,)) for path in self.parts()]
        table = pa.concat_tables(parts, promote_options="default")  # where some are older than a column
        keys = table["problem_index"].to_numpy().astype(np.int64), table["sample"].to_numpy().astype(np.int64)
        places = np.flatnonzero((keys[0] < problems) & (keys[1] < samples))
        # the same sample may have been drawn twice, by two processes
        _, first = np.unique(keys[0][places] * samples + keys[1][places], return_index=True)
        if len(first) < problems * samples:
            missing = problems * samples - len(first)
            raise StoreError(f"{self.folder} lacks {missing} of {problems * samples} samples; run the evaluation again")
        return {name: values.to_pylist() for name, values in _named(table.take(pa.array(places[first])))}

    def parts(self) -> list[Path]:
        """The files of samples that are whole."""
        return sorted(self.samples.glob("[!.]*.parquet"))


def load_evaluation(folder: str | Path, columns: Sequence[str] = ()) -> Evaluation:
    """The evaluation that the folder's latest summary is of.

    ``columns`` adds texts (prompt, completion, error), token records (`TOKEN_COLUMNS`), which may be large, or the
    calls of a tool (tool_calls, as JSON).
    """
    store = EvaluationFolder(folder)
    summary, identity = store.summary(), store.identity()
    rows = store.read(summary["problems"], summary["samples"], columns)
    return evaluation_of(identity, rows, summary["samples"], summary["measures"])


def evaluation_of(identity: Mapping[str, Any], rows: Columns, samples: int, measures: Sequence[str]) -> Evaluation:
    """An `Evaluation` of what `EvaluationFolder.read` returned."""
    return Evaluation(
        identity["task"],
        identity["model"],
        identity["protocol"],
        samples,
        SamplingParams(**identity["sampling"]),
        rows["problem"][::samples],
        rows,
        tuple(measures),
        identity.get("tool", {}).get("name", ""),
    )


def _columns(path: Path, names: Sequence[str], optional: Sequence[str] = ()) -> Any:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            there = [name for name in optional if name in file.schema_arrow.names]
            table = file.read(columns=[*names, *there])
    except (pa.ArrowException, OSError) as error:
        raise StoreError(f"cannot read {path}: {error}; remove it, and its samples are drawn again") from error
    for name in names:
        if name not in table.column_names:
            raise StoreError(f"{path} has no column {name!r}; token records are kept with token_records=True")
    return table


def _named(table: Any) -> list[tuple[str, Any]]:
    return [(name, table[name]) for name in table.column_names]


def _read_json(path: Path, otherwise: str) -> dict[str, Any]:
    if not path.is_file():
        raise StoreError(f"{path} is missing; {otherwise}")
    return dict(cleaned(read_json(path, dict)))  # a folder may come from anywhere


def _flat(values: Mapping[str, Any]) -> dict[str, Any]:
    """{"sampling": {"top_p": 1}} as {"sampling.top_p": 1}."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            flat.update({f"{key}.{inner}": item for inner, item in value.items()})
        else:
            flat[key] = value
    return flat
