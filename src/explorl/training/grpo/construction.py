"""Checks of what a script gives the trainer, before anything is trained: its class, its model and its data."""

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

_LOSS = ("select", "weights", "clip", "keep", "penalty")
_SAMPLING = ("sampling", "branching")
CARRIED_BY: Mapping[str, tuple[str, ...]] = {
    "_compute_loss": _LOSS,
    "compute_loss": _LOSS,
    "_generate": _SAMPLING,
    "_generate_single_turn": _SAMPLING,
    "_generate_and_score_completions": (*_SAMPLING, "rewards", "advantages", *_LOSS),
}
"""Which hooks of a strategy act through which method of the trainer."""
_REACHED_THROUGH = {"compute_loss": "_compute_loss", "_generate": "_generate_single_turn"}
"""What TRL's method calls in turn: to call that is as good."""
REPLACED = (
    "_compute_loss",
    "_prepare_inputs",
    "_get_per_token_logps_and_entropies",
    "_generate_single_turn",
    "_get_train_sampler",
)
"""TRL's methods that `ExplorationTrainer` does not always call: what another base class makes of them would be lost."""


# ---------------------------------------------------------------- classes


def check_class(trainer: type, ours: type, strategies: Sequence[Strategy]) -> None:
    """Raise where a class derived from ours overrides what the strategies act through, or has another trainer as base.

    A method in front of ours must call it. A method of a base class behind ours is called where ours calls it.
    """
    order = inspect.getmro(trainer)
    before = order[: order.index(ours)]
    behind = order[order.index(ours) + 1 : order.index(GRPOTrainer)]
    for other in behind:
        lost = [name for name in REPLACED if name in vars(other) and not other.__module__.startswith("explorl.")]
        if lost:
            raise TypeError(
                f"{trainer.__name__} derives from {ours.__name__} and {other.__name__}, and the {lost[0]} of "
                f"{other.__name__} would not be called; use one of the two trainers, or name {other.__name__} first"
            )
    for name, hooks in CARRIED_BY.items():
        whole = next((cls for cls in before if name in vars(cls) and not _calls(vars(cls)[name], name)), None)
        if whole is None:
            continue
        # Another trainer's loss expects one advantage per completion, and strategies give one per token.
        foreign = hooks is _LOSS and issubclass(whole, GRPOTrainer) and not issubclass(whole, ours)
        affected = [
            f"{name_of(strategy)} ({', '.join(acting) or 'advantages'})"
            for strategy in strategies
            if (acting := _acting(strategy, hooks)) or foreign
        ]
        if affected:
            raise ValueError(
                f"{whole.__name__}.{name} does not call that of {ours.__name__}, through which these strategies act: "
                f"{', '.join(affected)}; call super().{name} in it, or leave them out"
            )


def _acting(strategy: Strategy, hooks: Sequence[str]) -> list[str]:
    """Return which of these hooks a strategy has; TRL's entropy bonus is part of its loss."""
    bonus = ["arguments"] if hooks is _LOSS and "entropy_coef" in strategy.arguments() else []
    return bonus + [hook for hook in hooks if overrides(strategy, hook)]


def _calls(method: Any, name: str) -> bool:
    """Return whether a method names the one it overrides; True where its code cannot be read."""
    code = getattr(inspect.unwrap(method), "__code__", None)
    return code is None or not _names(code).isdisjoint({name, _REACHED_THROUGH.get(name, name)})


def _names(code: CodeType) -> set[str]:
    """Return the attributes and globals that a function uses, nested functions included."""
    return set(code.co_names).union(*(_names(nested) for nested in code.co_consts if isinstance(nested, CodeType)))


def named_arguments(positional: Sequence[Any], named: Mapping[str, Any]) -> dict[str, Any]:
    """Return what follows ``train_dataset`` by name: a base class in between may take its arguments by name alone."""
    names = list(inspect.signature(GRPOTrainer.__init__).parameters)[5:]
    if len(positional) > len(names):
        raise TypeError(
            f"GRPOTrainer takes {len(names)} arguments after train_dataset, and {len(positional)} are given"
        )
    arguments = dict(zip(names, positional, strict=False))
    twice = next((name for name in arguments if name in named), None)
    if twice is not None:
        raise TypeError(f"{twice} is given twice, by its place and by its name")
    return {**arguments, **named}


# ---------------------------------------------------------------- model and data


def model_path(model: Any) -> Any:
    """Return the folder of a model with a name of ours, such as smollm2-135m; anything else as it is."""
    return resolve_model(model) if isinstance(model, str) and model in NAMED and not os.path.isdir(model) else model


def first_rows(dataset: Any, args: Any) -> dict[str, Mapping[str, Any]]:
    """Return the first row of the data set to train on, by its name, checked; raise where it would give no step.

    A stream is not read before it is trained on, and TRL refuses what is neither.
    """
    if not isinstance(dataset, Dataset):
        return {}
    rows, needed = len(dataset), args.generation_batch_size // args.num_generations
    if not rows:
        raise ValueError("train_dataset is empty; give it 1 prompt or more, such as 1000")
    check_prompts([dataset[0]], "train_dataset")
    if rows < needed:
        raise ValueError(
            f"train_dataset has {rows} prompt{'s' * (rows != 1)}, and a generation batch takes {needed} "
            f"(generation_batch_size {args.generation_batch_size} / num_generations {args.num_generations}), so no "
            "step would be trained; give more prompts, or lower gradient_accumulation_steps"
        )
    return {"train_dataset": dataset[0]}


def check_prompts(rows: Sequence[Mapping[str, Any]], where: str) -> None:
    """Raise where a row has no prompt, or one that is neither a text nor a list of messages."""
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
    """Return the first row of each data set that is evaluated on, by what it is called in errors, checked."""
    named = {"eval_dataset": dataset}
    if isinstance(dataset, Mapping):
        named = {f"eval_dataset[{name!r}]": one for name, one in dataset.items()}
    rows = {where: one[0] for where, one in named.items() if isinstance(one, Dataset) and len(one)}
    for where, row in rows.items():
        check_prompts([row], where)
    return rows


def check_chat_template(row: Mapping[str, Any], where: str, processing_class: Any) -> None:
    """Raise where a prompt is messages and nothing turns them into a text."""
    own = (
        getattr(type(processing_class), "apply_chat_template", None) is not PreTrainedTokenizerBase.apply_chat_template
    )
    if own or getattr(processing_class, "chat_template", None) or not is_conversational({"prompt": row["prompt"]}):
        return
    raise ValueError(
        f"the prompts of {where} are lists of messages, and the tokenizer has no chat template; use a chat model, set "
        "processing_class.chat_template, or give the prompts as texts"
    )
