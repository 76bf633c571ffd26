"""Prompts and completions as token ids with labels: what TRL makes of them, a thousand rows at a time."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from explorl.rollout.tool_spans import open_call_in_prompt, output_mask, output_spans
from explorl.rollout.tools import ToolSpec
from explorl.training.sft.packed_rows import IGNORED

AT_ONCE = 1000
"""Rows that the tokenizer gets at a time."""
PLAIN = {"role", "content"}
"""Keys of a message that is nothing but text."""


def tokenised(
    dataset: Any,
    tokenizer: Any,
    *,
    max_length: int | None,
    keep_start: bool,
    completion_only: bool,
    tool: ToolSpec | None = None,
) -> Any:
    """The `datasets.Dataset` with columns input_ids and labels, cut and without rows that have nothing left to learn.

    As `trl.SFTTrainer` does it row by row: text completions end with the end-of-sequence token; messages go through the
    chat template; a completion begins where the tokens of the prompt and those of both together part. None where the
    rows are of another kind than prompts with completions, text or messages.

    What a ``tool`` says in completions is not learnt, as in rollouts: a policy that has the tool never writes it.
    """
    if not _readable(dataset, tokenizer):
        return None
    import pyarrow as pa

    ids: list[NDArray[Any]] = []
    labels: list[NDArray[Any]] = []
    merged = 0
    for start in range(0, len(dataset), AT_ONCE):
        rows = dataset[start : start + AT_ONCE]
        pair = _tokens(tokenizer, rows["prompt"], rows["completion"])
        if pair is None:
            return None
        said = None if tool is None else _said_by(tool, tokenizer, rows["prompt"], rows["completion"], pair)
        for number, (prompt, whole) in enumerate(zip(*pair, strict=True)):
            begin = common_prefix(prompt, whole)
            merged += begin < len(prompt)
            learnt = whole.astype(np.int64)
            if completion_only:
                learnt[:begin] = IGNORED
            if said is not None:
                learnt[said[number]] = IGNORED
            kept = slice(None) if max_length is None else slice(max_length) if keep_start else slice(-max_length, None)
            ids.append(whole[kept])
            labels.append(learnt[kept])
    if merged:
        warnings.warn(
            f"in {merged:,} of {len(dataset):,} rows the tokens of the prompt alone are not how the row begins: tokens "
            "merge where the prompt ends, or the chat template writes the prompt otherwise. The completion begins "
            "where they part; to avoid it, end prompts where a token ends, such as with a line break",
            UserWarning,
            stacklevel=2,
        )
    dataset = dataset.add_column("input_ids", _lists(ids, pa.int32())).add_column("labels", _lists(labels, pa.int64()))
    if max_length is None:
        return dataset
    left = [row for row, label in enumerate(labels) if (label != IGNORED).any()]
    return dataset if len(left) == len(labels) else dataset.select(left)


def _readable(dataset: Any, tokenizer: Any) -> bool:
    """Whether there is nothing in the rows but prompts and completions, and what others do not look at."""
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase

    if not isinstance(dataset, Dataset) or not isinstance(tokenizer, PreTrainedTokenizerBase):
        return False
    names = set(dataset.column_names)
    special = {"messages", "conversations", "input_ids", "labels", "tools", "chat_template_kwargs", "image"}
    special |= {"images", "completion_mask", "assistant_masks"}
    return {"prompt", "completion"} <= names and not names & special and dataset.format["type"] is None


def _tokens(tokenizer: Any, prompts: Sequence[Any], completions: Sequence[Any]) -> tuple[list[Any], list[Any]] | None:
    """Token ids of the prompts, and of prompts and completions together; None where TRL has to look at them."""
    if all(isinstance(text, str) for text in [*prompts, *completions]) and tokenizer.eos_token is not None:
        return _arrays(tokenizer(prompts)), _arrays(tokenizer(_ended(tokenizer, prompts, completions)))
    if all(_messages(value) for value in [*prompts, *completions]):
        both = [[*prompt, *completion] for prompt, completion in zip(prompts, completions, strict=True)]
        how: dict[str, Any] = {"tokenize": True, "return_dict": True}
        asked = tokenizer.apply_chat_template(prompts, add_generation_prompt=True, **how)
        return _arrays(asked), _arrays(tokenizer.apply_chat_template(both, **how))
    return None


def _ended(tokenizer: Any, prompts: Sequence[str], completions: Sequence[str]) -> list[str]:
    """Prompts with their completions, which end with the end-of-sequence token."""
    end = tokenizer.eos_token
    return [
        prompt + completion + ("" if completion.endswith(end) else end)
        for prompt, completion in zip(prompts, completions, strict=True)
    ]


def _said_by(
    tool: ToolSpec,
    tokenizer: Any,
    prompts: Sequence[Any],
    completions: Sequence[Any],
    pair: tuple[list[NDArray[Any]], list[NDArray[Any]]],
) -> list[NDArray[np.bool_]]:
    """Which tokens of each row are outputs of the tool; ``pair``: what `_tokens` gave."""
    if isinstance(prompts[0], str):
        asked, wholes, how = prompts, _ended(tokenizer, prompts, completions), {}
    else:
        both = [[*prompt, *completion] for prompt, completion in zip(prompts, completions, strict=True)]
        asked = tokenizer.apply_chat_template(prompts, add_generation_prompt=True, tokenize=False)
        wholes, how = tokenizer.apply_chat_template(both, tokenize=False), {"add_special_tokens": False}
    if not getattr(tokenizer, "is_fast", False):
        raise ValueError(
            f"a {type(tokenizer).__name__} does not say where in a text its tokens stand, so that outputs of tool "
            f"{tool.name!r} cannot be left out; use a fast tokenizer, or no tool"
        )
    encoded = tokenizer(wholes, return_offsets_mapping=True, **how)
    masks = []
    for row, (prompt, text, offsets) in enumerate(zip(asked, wholes, encoded["offset_mapping"], strict=True)):
        if not np.array_equal(encoded["input_ids"][row], pair[1][row]):
            raise ValueError(
                f"the tokenizer gives row {row} other tokens when it says where they stand, so that outputs of tool "
                f"{tool.name!r} cannot be left out; use no tool"
            )
        differ = (place for place, (one, other) in enumerate(zip(prompt, text, strict=False)) if one != other)
        begin = len(prompt) if text.startswith(prompt) else next(differ, 0)
        opened = open_call_in_prompt(pair[0][row].tolist(), tokenizer, tool) if text.startswith(prompt) else ""
        found, begin = output_spans(opened + text[begin:], tool), begin - len(opened)
        spans = [(begin + first, begin + last) for first, last in found]
        masks.append(output_mask(text, offsets, spans))
    return masks


def _messages(value: Any) -> bool:
    """Whether it is a conversation of plain text."""
    return (
        isinstance(value, list)
        and bool(value)
        and all(
            isinstance(message, Mapping)
            and set(message) == PLAIN
            and all(isinstance(text, str) for text in message.values())
            for message in value
        )
    )


def _arrays(encoded: Any) -> list[NDArray[Any]]:
    return [np.asarray(ids, dtype=np.int32) for ids in encoded["input_ids"]]


def common_prefix(first: NDArray[Any], second: NDArray[Any]) -> int:
    """How many tokens both begin with."""
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


def without_completion(rows: Sequence[Mapping[str, Any]]) -> Iterator[int]:
    """The numbers of rows whose completion is empty text, or says nothing in its messages."""
    for number, row in enumerate(rows):
        said = row["completion"]
        texts = [said] if isinstance(said, str) else [message.get("content") for message in said]
        if not any(text.strip() if isinstance(text, str) else text for text in texts):
            yield number
