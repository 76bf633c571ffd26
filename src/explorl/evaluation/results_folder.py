"""Store an evaluation in a folder: its identity, and every completion so far, in files that are never rewritten.

    <model>-<task>-<protocol>/
      evaluation.json       what all samples have in common: the model's fingerprint, task, template, sampling, seed
      samples/*.parquet     completions with their verdicts, one file per chunk
      summary.json          the scores of the latest call that was complete
      table.json .csv .tex  the same as tables

A file of samples is named after its rows and written atomically, so several processes may write at once: a file with
its final name is complete, and processes that sample the same rows write the same file.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from explorl.core.merge import flatten
from explorl.core.store import StoreError, cleaned, read_json, write_json
from explorl.evaluation.completions import (
    COLUMNS,
    DIGEST,
    TOOL_COLUMNS,
    Columns,
    read_completions,
    write_completions,
)
from explorl.evaluation.evaluation import Evaluation
from explorl.rollout import SamplingParams

TEXT = ("prompt", "completion", "error")
STALE_SECONDS = 3600
"""Age at which a temporary file is taken to be left by a killed process."""


class EvaluationFolder:
    """Read and write one evaluation's folder."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.identity_path = self.folder / "evaluation.json"
        self.summary_path = self.folder / "summary.json"
        self.samples = self.folder / "samples"

    def identity(self) -> dict[str, Any]:
        """Return what all samples have in common; raise StoreError if this is no evaluation's folder."""
        return _read_json(self.identity_path, "this is no evaluation's folder")

    def summary(self) -> dict[str, Any]:
        """Return the scores of the latest complete call."""
        return _read_json(self.summary_path, "run the evaluation again, without --shard, to sample what is missing")

    def claim(self, identity: Mapping[str, Any]) -> None:
        """Start or resume the evaluation; raise StoreError if the folder holds a different one."""
        if not self.identity_path.exists():
            write_json(self.identity_path, dict(identity))
        requested = flatten(cleaned(json.loads(json.dumps(identity))))
        stored = flatten(self.identity())
        for key in sorted(requested.keys() | stored.keys()):
            if requested.get(key) != stored.get(key):
                raise StoreError(
                    f"{self.folder} holds samples with another {key}: {stored.get(key)!r} there, "
                    f"{requested.get(key)!r} requested; request the same or name another folder with --out"
                )
        for path in self.samples.glob(".*.tmp"):
            if time.time() - path.stat().st_mtime > STALE_SECONDS:
                path.unlink(missing_ok=True)

    # ------------------------------------------------------------------ samples
    def write(self, rows: Columns) -> None:
        """Add completions."""
        pairs = np.array([rows["problem_index"], rows["sample"]], dtype=np.int64)
        (first, start), (last, stop) = pairs.min(axis=1), pairs.max(axis=1)
        digest = hashlib.blake2b(pairs.tobytes(), digest_size=4).hexdigest()
        name = f"problems-{first:05d}-{last:05d}-samples-{start:04d}-{stop:04d}-{digest}.parquet"
        write_completions(self.samples / name, rows)

    def have(self, problems: Sequence[str], samples: int, digests: Sequence[str | None] | None = None) -> np.ndarray:
        """Return which samples of these problems are stored, as an array of problems × samples.

        Raise StoreError if they are of other problems, or of problems whose data has another digest.
        """
        stored = np.zeros((len(problems), samples), dtype=bool)
        ids = np.asarray(cleaned(list(problems)), dtype=object)
        for path in self.parts():
            part = read_completions(path, ("problem_index", "problem", "sample"), (DIGEST,))
            index, sample = part["problem_index"].to_numpy(), part["sample"].to_numpy()
            inside = index < len(problems)
            other = inside.copy()
            other[inside] = part["problem"].to_numpy()[inside] != ids[index[inside]]
            if other.any():
                row = int(np.flatnonzero(other)[0])
                raise StoreError(
                    f"{path}: problem {index[row]} is {part['problem'][row].as_py()!r} there and {ids[index[row]]!r} "
                    "in this call; use the same problems or name another folder with --out"
                )
            if digests is not None and DIGEST in part.column_names:
                current = np.asarray(digests, dtype=object)[index[inside]]
                earlier = part[DIGEST].to_numpy()[inside]
                changed = (current != earlier) & (current != None) & (earlier != None)  # noqa: E711 (by element)
                if changed.any():
                    problem = ids[index[inside][np.flatnonzero(changed)[0]]]
                    raise StoreError(
                        f"{self.folder} holds outdated verdicts on problem {problem!r}: its answer, text or another "
                        f"column has changed since; name another folder with --out, or remove {self.folder}"
                    )
            inside &= sample < samples
            stored[index[inside], sample[inside]] = True
        return stored

    def read(self, problems: int, samples: int, columns: Sequence[str] = ()) -> Columns:
        """Return the first samples of the first problems, in order; of texts and token records only those named."""
        import pyarrow as pa

        wanted = [*(name for name in COLUMNS if name not in (*TEXT, DIGEST)), *columns]
        if "tool" in self.identity():
            wanted += [name for name in TOOL_COLUMNS if name != "tool_calls" and name not in columns]
        parts = [read_completions(path, wanted, (DIGEST,)) for path in self.parts()]
        table = pa.concat_tables(parts, promote_options="default")  # older files lack a column
        keys = table["problem_index"].to_numpy().astype(np.int64), table["sample"].to_numpy().astype(np.int64)
        rows = np.flatnonzero((keys[0] < problems) & (keys[1] < samples))
        # two processes may have drawn the same sample
        _, first = np.unique(keys[0][rows] * samples + keys[1][rows], return_index=True)
        if len(first) < problems * samples:
            missing = problems * samples - len(first)
            raise StoreError(f"{self.folder} lacks {missing} of {problems * samples} samples; run the evaluation again")
        return dict(table.take(pa.array(rows[first])).to_pydict())

    def parts(self) -> list[Path]:
        """Return the complete files of samples."""
        return sorted(self.samples.glob("[!.]*.parquet"))


def load_evaluation(folder: str | Path, columns: Sequence[str] = ()) -> Evaluation:
    """Return the evaluation of the folder's latest summary.

    ``columns`` adds texts (prompt, completion, error), token records (`TOKEN_COLUMNS`), which may be large, or the
    calls of a tool (tool_calls, as JSON).
    """
    store = EvaluationFolder(folder)
    summary, identity = store.summary(), store.identity()
    rows = store.read(summary["problems"], summary["samples"], columns)
    return evaluation_of(identity, rows, summary["samples"], summary["measures"])


def evaluation_of(identity: Mapping[str, Any], rows: Columns, samples: int, measures: Sequence[str]) -> Evaluation:
    """Return an `Evaluation` of what `EvaluationFolder.read` returned."""
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


def _read_json(path: Path, advice: str) -> dict[str, Any]:
    if not path.is_file():
        raise StoreError(f"{path} is missing; {advice}")
    return dict(cleaned(read_json(path, dict)))  # the folder may come from an untrusted source
