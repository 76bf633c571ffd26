"""Tokenise prompts and completions into ids with labels, as TRL does but a thousand rows at a time."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from datasets import Dataset
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from explorl.rollout.tools import ToolSpec, open_call_in_prompt, output_mask, output_spans
from explorl.training.sft.packed_rows import IGNORED

TOKENIZER_BATCH = 1000
"""Rows per call of the tokenizer."""
TEXT_MESSAGE_KEYS = {"role", "content"}
"""Keys of a message that has only text."""


def tokenize_dataset(
    dataset: Any,
    tokenizer: Any,
    *,
    max_length: int | None,
    keep_start: bool,
    completion_only: bool,
    tool: ToolSpec | None = None,
) -> Any:
    """Return the dataset with columns input_ids and labels, truncated, without rows that have no label left.

    The result equals what `trl.SFTTrainer` computes row by row: text completions end with the end-of-sequence token,
    messages are rendered with the chat template, and a completion begins where the tokens of the prompt and those of
    prompt and completion first differ. Return None if the rows are not prompts with completions, text or messages.

    Outputs of ``tool`` inside completions get no label, as in rollouts, where the tool and not the policy writes them.
    """
    if not _is_supported(dataset, tokenizer):
        return None
    kept = slice(None) if max_length is None else slice(max_length) if keep_start else slice(-max_length, None)
    ids: list[NDArray[Any]] = []
    labels: list[NDArray[Any]] = []
    merged = 0
    for start in range(0, len(dataset), TOKENIZER_BATCH):
        rows = dataset[start : start + TOKENIZER_BATCH]
        encoded = _encode(tokenizer, rows["prompt"], rows["completion"], tool)
        if encoded is None:
            return None
        for prompt, whole, outputs in encoded:
            begin = _common_prefix(prompt, whole)
            merged += begin < len(prompt)
            label = whole.astype(np.int64)
            if completion_only:
                label[:begin] = IGNORED
            label[outputs] = IGNORED
            ids.append(whole[kept])
            labels.append(label[kept])
    if merged:
        warnings.warn(
            f"in {merged:,} of {len(dataset):,} rows the tokens of the prompt differ from the beginning of the whole "
            "row: tokens merge across the end of the prompt, or the chat template renders the prompt differently. The "
            "completion is taken to begin at the first difference; to avoid this, end prompts with a line break",
            UserWarning,
            stacklevel=2,
        )
    dataset = dataset.add_column("input_ids", _lists(ids, "int32")).add_column("labels", _lists(labels, "int64"))
    if max_length is None:
        return dataset
    labelled = [row for row, label in enumerate(labels) if (label != IGNORED).any()]
    return dataset if len(labelled) == len(labels) else dataset.select(labelled)


def _is_supported(dataset: Any, tokenizer: Any) -> bool:
    """Tell whether rows have prompts and completions and no column that TRL treats specially."""
    if not isinstance(dataset, Dataset) or not isinstance(tokenizer, PreTrainedTokenizerBase):
        return False
    names = set(dataset.column_names)
    special = {"messages", "conversations", "input_ids", "labels", "tools", "chat_template_kwargs", "image"}
    special |= {"images", "completion_mask", "assistant_masks"}
    return {"prompt", "completion"} <= names and not names & special and dataset.format["type"] is None


def _encode(
    tokenizer: Any, prompts: Sequence[Any], completions: Sequence[Any], tool: ToolSpec | None
) -> list[tuple[NDArray[Any], NDArray[Any], NDArray[np.bool_]]] | None:
    """Return each row's tokens of the prompt, tokens of the whole row, and mask of the latter that are tool outputs.

    Return None for rows that only TRL supports.
    """
    if tool is not None and not getattr(tokenizer, "is_fast", False):
        raise ValueError(
            f"{type(tokenizer).__name__} has no token offsets, so outputs of the tool {tool.name!r} cannot be left "
            "out of the labels; use a fast tokenizer, or no tool"
        )
    options = {} if tool is None else {"return_offsets_mapping": True}
    texts, wholes = prompts, prompts
    if all(isinstance(text, str) for text in [*prompts, *completions]) and tokenizer.eos_token is not None:
        end = tokenizer.eos_token
        wholes = [
            prompt + completion + ("" if completion.endswith(end) else end)
            for prompt, completion in zip(prompts, completions, strict=True)
        ]
        begins, encoded = tokenizer(prompts), tokenizer(wholes, **options)
    elif all(_is_text_conversation(value) for value in [*prompts, *completions]):
        both = [[*prompt, *completion] for prompt, completion in zip(prompts, completions, strict=True)]
        begins = tokenizer.apply_chat_template(prompts, add_generation_prompt=True)
        encoded = tokenizer.apply_chat_template(both, tokenizer_kwargs=options)
        if tool is not None:
            texts = tokenizer.apply_chat_template(prompts, add_generation_prompt=True, tokenize=False)
            wholes = tokenizer.apply_chat_template(both, tokenize=False)
    else:
        return None
    rows = []
    for row, pair in enumerate(zip(begins["input_ids"], encoded["input_ids"], strict=True)):
        prompt_ids, ids = (np.asarray(tokens, dtype=np.int32) for tokens in pair)
        outputs = np.zeros(len(ids), dtype=bool)
        if tool is not None:
            outputs = _output_mask(tool, tokenizer, texts[row], pair[0], wholes[row], encoded["offset_mapping"][row])
        rows.append((prompt_ids, ids, outputs))
    return rows


def _output_mask(
    tool: ToolSpec,
    tokenizer: Any,
    prompt: str,
    prompt_ids: Sequence[int],
    text: str,
    offsets: Sequence[tuple[int, int]],
) -> NDArray[np.bool_]:
    """Return a mask of the tokens of a row's text that are tool outputs in its completion."""
    begin, opened = len(prompt), ""
    if text.startswith(prompt):
        opened = open_call_in_prompt(prompt_ids, tokenizer, tool)
    else:
        begin = next((index for index, (a, b) in enumerate(zip(prompt, text, strict=False)) if a != b), 0)
    spans, begin = output_spans(opened + text[begin:], tool), begin - len(opened)
    return output_mask(text, offsets, [(begin + first, begin + last) for first, last in spans])


def _is_text_conversation(value: Any) -> bool:
    """Tell whether a value is a list of messages that have only text."""
    return (
        isinstance(value, list)
        and bool(value)
        and all(
            isinstance(message, Mapping)
            and set(message) == TEXT_MESSAGE_KEYS
            and all(isinstance(text, str) for text in message.values())
            for message in value
        )
    )


def _common_prefix(first: NDArray[Any], second: NDArray[Any]) -> int:
    """Return the length of the common prefix of two token sequences."""
    shorter = min(len(first), len(second))
    differ = np.flatnonzero(first[:shorter] != second[:shorter])
    return int(differ[0]) if len(differ) else shorter


def _lists(rows: Sequence[NDArray[Any]], kind: str) -> Any:
    """Return a column of lists."""
    offsets = np.cumsum([0, *(len(row) for row in rows)])
    values = pa.array(np.concatenate(rows) if rows else np.empty(0), type=kind)
    lists, index = (pa.ListArray, pa.int32()) if offsets[-1] < 2**31 else (pa.LargeListArray, pa.int64())
    return lists.from_arrays(pa.array(offsets, type=index), values)


def rows_without_completion(rows: Sequence[Mapping[str, Any]]) -> Iterator[int]:
    """Yield the indices of rows whose completion is blank text, or messages without content."""
    for index, row in enumerate(rows):
        completion = row["completion"]
        texts = [completion] if isinstance(completion, str) else [message.get("content") for message in completion]
        if not any(text.strip() if isinstance(text, str) else text for text in texts):
            yield index
