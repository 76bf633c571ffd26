"""Store completions with their verdicts: one table for evaluations in a run, evaluation folders and pools of RFT."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from explorl.core.store import StoreError
from explorl.core.store.atomic_files import to_array, write_arrays
from explorl.evaluation.sample import VerifiedSample
from explorl.metrics import format_violations, language_mixing, trigram_redundancy
from explorl.rollout import Rollout
from explorl.rollout.backends.generate import Completion
from explorl.tasks import Task
from explorl.tasks.answer_span import requested_mark

Columns = dict[str, list[Any]]

DIGEST = "data_digest"
"""Column with a digest of the problem's data, on which its verdicts depend; missing in files of older versions."""
COLUMNS: Mapping[str, str] = {
    "problem_index": "int32", "problem": "string", "sample": "int32", "prompt": "string", "completion": "string",
    "tokens": "int32", "finish_reason": "string", "correct": "bool_", "well_formed": "bool_", "answer": "string",
    "error": "string", "entropy": "float64", "branching": "float64", "format_violations": "int32",
    "redundancy": "float64", "cjk": "int32", DIGEST: "string",
}  # fmt: skip
"""`tokens` counts the sampled tokens, and `entropy` and `branching` are means over them; `cjk` counts characters."""

TOOL_COLUMNS: Mapping[str, str] = {"calls": "int32", "tool_tokens": "int32", "tool_calls": "string"}
"""Columns of completions that may call a tool: the number of calls that ran, the number of tokens that were not
sampled, and all calls as JSON (a list of `ToolCall`s, including refused ones)."""

TOKEN_COLUMNS: Mapping[str, str] = {
    "token_ids": "int32", "token_entropy": "float32", "token_branching": "int32", "token_logps": "float32",
}  # fmt: skip
"""Lists with one entry per token, null for tokens of a tool's output. The log-probabilities are those of the policy at
the sampling temperature."""


def completion_columns(
    samples: Sequence[VerifiedSample], mark: str | None, *, with_tool: bool = False, with_tokens: bool = False
) -> Columns:
    """Return completions as `COLUMNS`, and as `TOOL_COLUMNS` and `TOKEN_COLUMNS` if requested.

    ``mark`` is the text that answers begin with (`answer_mark_of`).
    """
    names = [*COLUMNS, *(TOOL_COLUMNS if with_tool else ()), *(TOKEN_COLUMNS if with_tokens else ())]
    rows = [
        _common_values(each, mark)
        | (_tool_values(each.completion) if with_tool and isinstance(each.completion, Rollout) else {})
        | (_token_values(each.completion) if with_tokens and isinstance(each.completion, Rollout) else {})
        for each in samples
    ]
    return {name: [row[name] for row in rows] for name in names}


def _common_values(sample: VerifiedSample, mark: str | None) -> dict[str, Any]:
    """Return a completion's values of `COLUMNS`."""
    completion, verdict = sample.completion, sample.verdict
    if isinstance(completion, Rollout):
        text, tokens = completion.sampled_text, completion.model_tokens  # without the output of tools
    else:
        text, tokens = completion.text, len(completion.token_ids)
    return {
        "problem_index": sample.problem_index,
        "problem": sample.problem.problem.id,
        "sample": sample.sample,
        "prompt": sample.problem.rendered,
        "completion": completion.text,
        "tokens": tokens,
        "finish_reason": completion.finish_reason,
        "correct": verdict.correct,
        "well_formed": verdict.well_formed,
        "answer": verdict.answer,
        "error": verdict.error,
        "entropy": _mean_of(completion, "entropy"),
        "branching": _mean_of(completion, "branching"),
        "format_violations": format_violations(text, mark) if mark else int(not verdict.well_formed),
        "redundancy": trigram_redundancy(text),
        "cjk": language_mixing(text),
        DIGEST: sample.problem.digest,
    }


def _mean_of(completion: Rollout | Completion, statistic: str) -> float | None:
    """Return the mean of a token statistic over the sampled tokens, or None if there is none."""
    if not isinstance(completion, Rollout) or not completion.sampled.any():
        return None
    return float(getattr(completion, statistic)[completion.sampled].float().mean())


def _tool_values(rollout: Rollout) -> dict[str, Any]:
    return {
        "calls": sum(call.status != "refused" for call in rollout.calls),
        "tool_tokens": len(rollout) - rollout.model_tokens,
        "tool_calls": json.dumps([asdict(call) for call in rollout.calls], ensure_ascii=False),
    }


def _token_values(rollout: Rollout) -> dict[str, Any]:
    """Return a completion's values of `TOKEN_COLUMNS`, None for tokens that were not sampled."""
    values: dict[str, Any] = {"token_ids": rollout.token_ids}
    for name in ("entropy", "branching", "logps"):
        pairs = zip(getattr(rollout, name).tolist(), rollout.sampled.tolist(), strict=True)
        values[f"token_{name}"] = [value if sampled else None for value, sampled in pairs]
    return values


def answer_mark_of(task: Task, prompt: str) -> str | None:
    """Return the text that an answer begins with, from the task or its prompt; None if answers have no mark."""
    if hasattr(task, "answer_mark"):
        return task.answer_mark or None
    return requested_mark(prompt)


def write_completions(path: Path, columns: Mapping[str, Sequence[Any]], *, verbatim: bool = False) -> None:
    """Write completions atomically, with columns of other names after those of the table.

    ``verbatim`` stores texts as sampled, control characters included, to train on them; otherwise they are cleaned.
    """
    import pyarrow as pa

    types = {name: getattr(pa, kind)() for name, kind in {**COLUMNS, **TOOL_COLUMNS}.items()}
    types |= {name: pa.list_(getattr(pa, kind)()) for name, kind in TOKEN_COLUMNS.items()}
    names = [*(name for name in types if name in columns), *(name for name in columns if name not in types)]
    to_column = pa.array if verbatim else to_array
    write_arrays(path, {name: to_column(columns[name], types.get(name)) for name in names})


def read_completions(path: Path, names: Sequence[str] | None = None, optional: Sequence[str] = ()) -> Any:
    """Return these columns of a file of completions as a pyarrow table, and those of ``optional`` that it has.

    None is all columns. Raise StoreError if the file cannot be read, or is of a version with other columns.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            present = file.schema_arrow.names
            wanted = present if names is None else [*names, *(name for name in optional if name in present)]
            missing = [name for name in wanted if name not in present]
            if not missing and "completion" in present:
                return file.read(columns=wanted)
    except (pa.ArrowException, OSError) as error:
        raise StoreError(f"cannot read {path}: {error}; remove it to sample its completions again") from error
    if "completion" not in present:
        raise StoreError(
            f"{path} has no column 'completion': it was written by a version of Explorl before 0.1.0, whose pools had "
            f"other columns, or by another program; remove {path.parent} to sample its completions again"
        )
    raise StoreError(f"{path} has no column {missing[0]!r}; token records are stored with token_records=True")
