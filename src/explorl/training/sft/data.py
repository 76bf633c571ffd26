"""Tokenise prompts and completions into ids with labels, as TRL does but a thousand rows at a time."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

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
    import pyarrow as pa

    ids: list[NDArray[Any]] = []
    labels: list[NDArray[Any]] = []
    merged = 0
    for start in range(0, len(dataset), TOKENIZER_BATCH):
        rows = dataset[start : start + TOKENIZER_BATCH]
        pair = _token_ids(tokenizer, rows["prompt"], rows["completion"])
        if pair is None:
            return None
        outputs = None if tool is None else _tool_outputs(tool, tokenizer, rows["prompt"], rows["completion"], pair)
        for row, (prompt, whole) in enumerate(zip(*pair, strict=True)):
            begin = common_prefix(prompt, whole)
            merged += begin < len(prompt)
            label = whole.astype(np.int64)
            if completion_only:
                label[:begin] = IGNORED
            if outputs is not None:
                label[outputs[row]] = IGNORED
            kept = slice(None) if max_length is None else slice(max_length) if keep_start else slice(-max_length, None)
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
    dataset = dataset.add_column("input_ids", _lists(ids, pa.int32())).add_column("labels", _lists(labels, pa.int64()))
    if max_length is None:
        return dataset
    labelled = [row for row, label in enumerate(labels) if (label != IGNORED).any()]
    return dataset if len(labelled) == len(labels) else dataset.select(labelled)


def _is_supported(dataset: Any, tokenizer: Any) -> bool:
    """Tell whether rows have prompts and completions and no column that TRL treats specially."""
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase

    if not isinstance(dataset, Dataset) or not isinstance(tokenizer, PreTrainedTokenizerBase):
        return False
    names = set(dataset.column_names)
    special = {"messages", "conversations", "input_ids", "labels", "tools", "chat_template_kwargs", "image"}
    special |= {"images", "completion_mask", "assistant_masks"}
    return {"prompt", "completion"} <= names and not names & special and dataset.format["type"] is None


def _token_ids(
    tokenizer: Any, prompts: Sequence[Any], completions: Sequence[Any]
) -> tuple[list[Any], list[Any]] | None:
    """Return the ids of the prompts, and of prompts with completions; None for rows that only TRL supports."""
    if all(isinstance(text, str) for text in [*prompts, *completions]) and tokenizer.eos_token is not None:
        return _arrays(tokenizer(prompts)), _arrays(tokenizer(_with_end(tokenizer, prompts, completions)))
    if all(_is_text_conversation(value) for value in [*prompts, *completions]):
        both = [[*prompt, *completion] for prompt, completion in zip(prompts, completions, strict=True)]
        options: dict[str, Any] = {"tokenize": True, "return_dict": True}
        encoded_prompts = tokenizer.apply_chat_template(prompts, add_generation_prompt=True, **options)
        return _arrays(encoded_prompts), _arrays(tokenizer.apply_chat_template(both, **options))
    return None


def _with_end(tokenizer: Any, prompts: Sequence[str], completions: Sequence[str]) -> list[str]:
    """Return the prompts with their completions and one end-of-sequence token."""
    end = tokenizer.eos_token
    return [
        prompt + completion + ("" if completion.endswith(end) else end)
        for prompt, completion in zip(prompts, completions, strict=True)
    ]


def _tool_outputs(
    tool: ToolSpec,
    tokenizer: Any,
    prompts: Sequence[Any],
    completions: Sequence[Any],
    pair: tuple[list[NDArray[Any]], list[NDArray[Any]]],
) -> list[NDArray[np.bool_]]:
    """Return a mask of each row's tool outputs; ``pair`` is the result of `_token_ids`."""
    if isinstance(prompts[0], str):
        prompt_texts, wholes, options = prompts, _with_end(tokenizer, prompts, completions), {}
    else:
        both = [[*prompt, *completion] for prompt, completion in zip(prompts, completions, strict=True)]
        prompt_texts = tokenizer.apply_chat_template(prompts, add_generation_prompt=True, tokenize=False)
        wholes, options = tokenizer.apply_chat_template(both, tokenize=False), {"add_special_tokens": False}
    if not getattr(tokenizer, "is_fast", False):
        raise ValueError(
            f"{type(tokenizer).__name__} has no token offsets, so outputs of the tool {tool.name!r} cannot be left "
            "out of the labels; use a fast tokenizer, or no tool"
        )
    encoded = tokenizer(wholes, return_offsets_mapping=True, **options)
    masks = []
    for row, (prompt, text, offsets) in enumerate(zip(prompt_texts, wholes, encoded["offset_mapping"], strict=True)):
        if not np.array_equal(encoded["input_ids"][row], pair[1][row]):
            raise ValueError(
                f"row {row} has other tokens when the tokenizer also returns offsets, so outputs of the tool "
                f"{tool.name!r} cannot be left out of the labels; use no tool"
            )
        differ = (index for index, (a, b) in enumerate(zip(prompt, text, strict=False)) if a != b)
        begin = len(prompt) if text.startswith(prompt) else next(differ, 0)
        opened = open_call_in_prompt(pair[0][row].tolist(), tokenizer, tool) if text.startswith(prompt) else ""
        spans, begin = output_spans(opened + text[begin:], tool), begin - len(opened)
        masks.append(output_mask(text, offsets, [(begin + first, begin + last) for first, last in spans]))
    return masks


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


def _arrays(encoded: Any) -> list[NDArray[Any]]:
    return [np.asarray(ids, dtype=np.int32) for ids in encoded["input_ids"]]


def common_prefix(first: NDArray[Any], second: NDArray[Any]) -> int:
    """Return the length of the common prefix of two token sequences."""
    shorter = min(len(first), len(second))
    differ = np.flatnonzero(first[:shorter] != second[:shorter])
    return int(differ[0]) if len(differ) else shorter


def _lists(rows: Sequence[NDArray[Any]], kind: Any) -> Any:
    import pyarrow as pa

    offsets = np.cumsum([0, *(len(row) for row in rows)])
    values = pa.array(np.concatenate(rows) if rows else np.empty(0), type=kind)
    if offsets[-1] < 2**31:
        return pa.ListArray.from_arrays(pa.array(offsets, type=pa.int32()), values)
    return pa.LargeListArray.from_arrays(pa.array(offsets, type=pa.int64()), values)


def rows_without_completion(rows: Sequence[Mapping[str, Any]]) -> Iterator[int]:
    """Yield the indices of rows whose completion is blank text, or messages without content."""
    for index, row in enumerate(rows):
        completion = row["completion"]
        texts = [completion] if isinstance(completion, str) else [message.get("content") for message in completion]
        if not any(text.strip() if isinstance(text, str) else text for text in texts):
            yield index
