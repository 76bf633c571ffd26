"""Checks of the trainer's arguments before training: its class, its model and its data."""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping, Sequence
from types import CodeType
from typing import Any

from datasets import Dataset
from transformers import PreTrainedTokenizerBase
from trl import GRPOTrainer
from trl.data_utils import is_conversational

from explorl.models import NAMED, resolve_model
from explorl.strategies import Strategy
from explorl.strategies._lib.validate import name_of
from explorl.strategies.base import overrides
from explorl.training.grpo.logged_columns import prompt_text

_LOSS = ("select", "weights", "clip", "keep", "penalty")
_SAMPLING = ("sampling", "branching")
CARRIED_BY: Mapping[str, tuple[str, ...]] = {
    "_compute_loss": _LOSS,
    "compute_loss": _LOSS,
    "_generate": _SAMPLING,
    "_generate_single_turn": _SAMPLING,
    "_generate_and_score_completions": (*_SAMPLING, "rewards", "advantages", *_LOSS),
}
"""For each method of the trainer, the strategies' hooks that act through it."""
_REACHED_THROUGH = {"compute_loss": "_compute_loss", "_generate": "_generate_single_turn"}
"""A method that TRL's method calls in turn: an override that calls it directly is fine."""
REPLACED = (
    "_compute_loss",
    "_prepare_inputs",
    "_get_per_token_logps_and_entropies",
    "_generate_single_turn",
    "_get_train_sampler",
)
"""TRL's methods that `ExplorationTrainer` does not always call: overrides in another base class would be lost."""


# ---------------------------------------------------------------- classes


def check_class(trainer: type, ours: type, strategies: Sequence[Strategy]) -> None:
    """Raise if a subclass bypasses methods that strategies act through, or has another trainer as base class.

    A method before ours in the resolution order must call ours. A method after ours is called if ours calls it.
    """
    order = inspect.getmro(trainer)
    before = order[: order.index(ours)]
    after = order[order.index(ours) + 1 : order.index(GRPOTrainer)]
    for other in after:
        lost = [name for name in REPLACED if name in vars(other) and not other.__module__.startswith("explorl.")]
        if lost:
            raise TypeError(
                f"{trainer.__name__} derives from {ours.__name__} and {other.__name__}, and the {lost[0]} of "
                f"{other.__name__} would not be called; use one of the two trainers, or put {other.__name__} first"
            )
    for name, hooks in CARRIED_BY.items():
        replacing = next((cls for cls in before if name in vars(cls) and not _calls(vars(cls)[name], name)), None)
        if replacing is None:
            continue
        # Another trainer's loss expects one advantage per completion, and strategies give one per token.
        foreign = hooks is _LOSS and issubclass(replacing, GRPOTrainer) and not issubclass(replacing, ours)
        affected = [
            f"{name_of(strategy)} ({', '.join(acting) or 'advantages'})"
            for strategy in strategies
            if (acting := _acting(strategy, hooks)) or foreign
        ]
        if affected:
            raise ValueError(
                f"{replacing.__name__}.{name} does not call that of {ours.__name__}, through which these strategies "
                f"act: {', '.join(affected)}; call super().{name} in it, or remove them"
            )


def _acting(strategy: Strategy, hooks: Sequence[str]) -> list[str]:
    """Return which of these hooks a strategy has; TRL's entropy bonus is part of its loss."""
    bonus = ["arguments"] if hooks is _LOSS and "entropy_coef" in strategy.arguments() else []
    return bonus + [hook for hook in hooks if overrides(strategy, hook)]


def _calls(method: Any, name: str) -> bool:
    """Return whether a method names the one it overrides; True if its code cannot be read."""
    code = getattr(inspect.unwrap(method), "__code__", None)
    return code is None or not _names(code).isdisjoint({name, _REACHED_THROUGH.get(name, name)})


def _names(code: CodeType) -> set[str]:
    """Return the attributes and globals that a function uses, nested functions included."""
    return set(code.co_names).union(*(_names(nested) for nested in code.co_consts if isinstance(nested, CodeType)))


def named_arguments(positional: Sequence[Any], named: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments after ``train_dataset`` by name: other base classes may take keyword arguments only."""
    names = list(inspect.signature(GRPOTrainer.__init__).parameters)[5:]
    if len(positional) > len(names):
        raise TypeError(
            f"GRPOTrainer takes {len(names)} arguments after train_dataset, but {len(positional)} are given"
        )
    arguments = dict(zip(names, positional, strict=False))
    twice = next((name for name in arguments if name in named), None)
    if twice is not None:
        raise TypeError(f"{twice} is given twice, by position and by name")
    return {**arguments, **named}


# ---------------------------------------------------------------- model and data


def model_path(model: Any) -> Any:
    """Return the folder of a model with one of our names, such as smollm2-135m; anything else as it is."""
    return resolve_model(model) if isinstance(model, str) and model in NAMED and not os.path.isdir(model) else model


def first_rows(dataset: Any, args: Any) -> dict[str, Mapping[str, Any]]:
    """Return the first row of the training data set by its name, checked; raise if it is too small for a step.

    Streams are not read before training, and TRL rejects other types.
    """
    if not isinstance(dataset, Dataset):
        return {}
    rows, needed = len(dataset), args.generation_batch_size // args.num_generations
    if not rows:
        raise ValueError("train_dataset is empty; give it 1 prompt or more, such as 1000")
    check_prompts([dataset[0]], "train_dataset")
    if rows < needed:
        raise ValueError(
            f"train_dataset has {rows} prompt{'s' * (rows != 1)}, but a generation batch takes {needed} "
            f"(generation_batch_size {args.generation_batch_size} / num_generations {args.num_generations}), so no "
            "step would be trained; give more prompts, or lower gradient_accumulation_steps"
        )
    return {"train_dataset": dataset[0]}


def ordered(dataset: Any, strategies: Sequence[Strategy]) -> Any:
    """Return the data set with the prompts that the strategies select, in their order."""
    for strategy in strategies:
        if not overrides(strategy, "order"):
            continue
        if not hasattr(dataset, "select"):
            raise ValueError(
                f"{strategy.name} orders the prompts, but {type(dataset).__name__} is a stream, which would have "
                "to be read to its end; use a datasets.Dataset"
            )
        transformed = "prompt" not in dataset.column_names  # a transform makes it when a row is read
        prompts = (row["prompt"] for row in dataset) if transformed else dataset["prompt"]
        order = strategy.order([prompt_text(prompt) for prompt in prompts])
        if order is not None:
            dataset = dataset.select(_checked_order(strategy, [int(index) for index in order], len(dataset)))
    return dataset


def _checked_order(strategy: Strategy, order: list[int], rows: int) -> list[int]:
    invalid = [index for index in order if not 0 <= index < rows]
    if invalid or not order:
        problem = f"index {invalid[0]}" if invalid else "no prompts"
        raise ValueError(
            f"{name_of(strategy)}.order returns {problem}; return one or more indices from 0 to {rows - 1}"
        )
    return order


def check_prompts(rows: Sequence[Mapping[str, Any]], where: str) -> None:
    """Raise if a row has no prompt, or one that is neither a text nor a list of messages."""
    for number, row in enumerate(rows):
        if "prompt" not in row:
            what = f"{where} has no column 'prompt'" if number == 0 else f"row {number} of {where} has no 'prompt'"
            raise ValueError(f"{what}; it has {', '.join(row)}: rename the one with the prompts")
        prompt = row["prompt"]
        messages = isinstance(prompt, list | tuple) and all(isinstance(message, Mapping) for message in prompt)
        if not isinstance(prompt, str) and not (messages and prompt):
            raise ValueError(
                f"the prompt of row {number} of {where} is {prompt!r:.80}; give a text or a list of messages"
            )
        if messages and (other := next((message for message in prompt if "role" not in message), None)) is not None:
            raise ValueError(
                f"a message in the prompt of row {number} of {where} has no role: {other!r:.80}; give messages such as "
                "{'role': 'user', 'content': 'What is 1 + 2?'}"
            )


def first_evaluation_rows(dataset: Any) -> dict[str, Mapping[str, Any]]:
    """Return the first row of each evaluation data set, checked, by its name in errors."""
    datasets = {"eval_dataset": dataset}
    if isinstance(dataset, Mapping):
        datasets = {f"eval_dataset[{name!r}]": value for name, value in dataset.items()}
    rows = {name: value[0] for name, value in datasets.items() if isinstance(value, Dataset) and len(value)}
    for name, row in rows.items():
        check_prompts([row], name)
    return rows


def check_chat_template(row: Mapping[str, Any], name: str, processing_class: Any) -> None:
    """Raise if a prompt is a list of messages and there is no chat template; ``name`` is the data set's."""
    custom = (
        getattr(type(processing_class), "apply_chat_template", None) is not PreTrainedTokenizerBase.apply_chat_template
    )
    if custom or getattr(processing_class, "chat_template", None) or not is_conversational({"prompt": row["prompt"]}):
        return
    raise ValueError(
        f"the prompts of {name} are lists of messages, but the tokenizer has no chat template; use a chat model, set "
        "processing_class.chat_template, or give the prompts as texts"
    )
