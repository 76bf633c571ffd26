"""What `ExplorationTrainer` refuses: combinations of options that cannot work, in words, before training.

    check_arguments      before anything is loaded
    check_prompt_source  before anything is loaded, once the data set is ordered
    check_sampling       with the model loaded, before the engine is tried
    check_reference      with the model loaded

Classes and data are checked in `explorl.training.grpo.construction`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from explorl.modeling.proof import inner_model
from explorl.rollout.tool_use import ToolUse
from explorl.strategies import ReferenceReset, Strategy
from explorl.strategies._lib.validate import name_of
from explorl.strategies.base import overrides
from explorl.training.grpo.branches import branching_of, sets_row_sampling
from explorl.training.grpo.dynamic import DynamicSampling
from explorl.training.grpo.loss import LOSSES
from explorl.training.grpo.rewards import check_answers
from explorl.training.grpo.solved import SkipSolved
from explorl.training.grpo.stopping import configured_stop_strings
from explorl.training.sharding import fsdp_version, zero_stage

ENGINES = ("explorl", "generate", "vllm")
ENGINE_OPTIONS = ("batch_size", "memory_budget")
"""Arguments of `Engine` that ``engine_options`` may contain."""
VLLM_KEYS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "max_tokens",
    "stop",
    "stop_token_ids",
)
"""Keys of ``generation_kwargs`` that vLLM can combine with strategies that set sampling options per row."""
SAMPLES_ITSELF = {
    "tools": "a conversation is sampled turn by turn; remove the tools",
    "environment_factory": "an environment is reset for each rollout; remove the environments",
    "rollout_func": "your function samples; replace groups there, or remove rollout_func",
}
"""Arguments of TRL's trainer that sample in their own way, and why groups cannot be replaced then."""


# ---------------------------------------------------------------- before anything is loaded


def check_engine_name(engine: str | None) -> None:
    """Raise if the engine is none of the backends."""
    if engine not in (None, *ENGINES):
        raise ValueError(f"engine is {engine!r}; use {', '.join(map(repr, ENGINES))}, or None for an automatic choice")


def check_interpreter_alone(interpreter: ToolUse | None, arguments: Mapping[str, Any]) -> None:
    """Raise if an interpreter is combined with another way of sampling."""
    for name in SAMPLES_ITSELF if interpreter is not None else ():
        if arguments.get(name):
            assert interpreter is not None
            raise ValueError(
                f"interpreter={interpreter.tool.name!r} cannot be combined with {name}: each samples in its own way; "
                "leave out one of them"
            )


def check_arguments(args: Any, strategies: Sequence[Strategy], answers: Any) -> None:
    """Raise for values of TRL's options, and for strategies, that are not supported."""
    _check_options(args)
    _check_strategies(args, strategies)
    check_answers(strategies, answers)
    if args.use_vllm:
        _check_vllm(args, strategies)


def _check_options(args: Any) -> None:
    if args.loss_type not in LOSSES:
        raise ValueError(f"loss_type is {args.loss_type!r}; use one of {', '.join(LOSSES)}")
    configured_stop_strings(args.generation_kwargs)
    kwargs = args.generation_kwargs or {}
    temperature = None if args.use_vllm or kwargs.get("do_sample") is False else kwargs.get("temperature")
    for name, value in (("temperature", args.temperature), ("generation_kwargs['temperature']", temperature)):
        if value is not None and not value > 0:
            raise ValueError(
                f"{name} is {value}; use one above 0, such as 1.0: all greedy completions of a prompt are equal, so "
                "a group of them has no advantage"
            )


def _check_strategies(args: Any, strategies: Sequence[Strategy]) -> None:
    shares = {
        name_of(strategy): strategy.needs_min_p_mass for strategy in strategies if strategy.needs_min_p_mass is not None
    }
    if len(set(shares.values())) > 1:
        raise ValueError(
            f"strategies need the mass above different shares of the most likely token: {shares}; use one share"
        )
    for strategy in strategies:
        strategy.check(num_generations=args.num_generations)
        strategy.check_length(max_completion_length=args.max_completion_length)
        if overrides(strategy, "rewards") and args.multi_objective_aggregation != "sum_then_normalize":
            raise ValueError(
                f"{name_of(strategy)} changes the total reward, and multi_objective_aggregation="
                f"{args.multi_objective_aggregation!r} normalises each reward separately, before there is a total; use "
                f"'sum_then_normalize', or remove {name_of(strategy)}"
            )


def _check_vllm(args: Any, strategies: Sequence[Strategy]) -> None:
    if (args.generation_kwargs or {}).get("stop_strings") is not None:
        raise ValueError("generation_kwargs has 'stop_strings', which vLLM calls 'stop'; use that name")
    for strategy in strategies:
        if overrides(strategy, "branching"):
            raise ValueError(
                f"{name_of(strategy)} lets completions branch, which vLLM does not support; use engine='explorl', or "
                "remove it"
            )
        if strategy.needs_min_p_mass is not None:
            raise ValueError(_needs_other_tokens(strategy, "vLLM samples"))


def check_prompt_source(
    dynamic: DynamicSampling | None, skip: SkipSolved | None, *, args: Any, dataset: Any, arguments: Mapping[str, Any]
) -> None:
    """Raise for options that replacing prompts does not work with."""
    names = [name for name, spec in (("dynamic_sampling", dynamic), ("skip_solved", skip)) if spec is not None]
    if names and dataset is not None and not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise ValueError(
            f"{names[0]} takes fresh prompts from anywhere in the data set, but {type(dataset).__name__} is a stream; "
            "use a datasets.Dataset"
        )
    if dynamic is None:
        return
    for name, why in SAMPLES_ITSELF.items():
        if arguments.get(name):
            raise ValueError(f"dynamic_sampling cannot be combined with {name}: {why}, or remove dynamic_sampling")
    if args.use_vllm:
        raise ValueError("dynamic_sampling is untested with vLLM; set use_vllm=False, or remove it")
    prompts = args.generation_batch_size // args.num_generations
    if dataset is not None and len(dataset) <= prompts:
        raise ValueError(
            f"dynamic_sampling needs more prompts than a batch has: the data set has {len(dataset)}, and a batch takes "
            f"{prompts}; add prompts, or remove it"
        )


# ---------------------------------------------------------------- with the model loaded


def check_sampling(
    trainer: Any, engine: str | None, options: Mapping[str, Any], interpreter: ToolUse | None, why: str
) -> None:
    """Raise if the requested backend cannot sample, or not as the strategies and the interpreter need it.

    Args:
        options: Arguments of the engine.
        why: Why the engine can't be used, or "".
    """
    unknown = sorted(set(options) - set(ENGINE_OPTIONS))
    if unknown:
        raise ValueError(f"engine_options has {unknown[0]!r}; it may contain {', '.join(ENGINE_OPTIONS)}")
    _check_records(trainer, engine, why)
    _check_interpreter(trainer, engine, interpreter, why)
    per_row = [strategy for strategy in trainer.strategies if sets_row_sampling(strategy)]
    if trainer.use_vllm and engine in (None, "vllm") and per_row:
        _check_vllm_rows(trainer, name_of(per_row[0]))
    elif engine == "explorl" and why:
        raise ValueError(f"engine='explorl' cannot sample here: {why}; use engine=None")


def _needs_other_tokens(strategy: Strategy, why: str) -> str:
    return (
        f"{name_of(strategy)} needs the probabilities of other tokens, which only Explorl's engine records ({why}); "
        "use engine='explorl', or remove it"
    )


def _check_records(trainer: Any, engine: str | None, why: str) -> None:
    """Check that the token statistics that strategies need will be recorded."""
    if engine == "generate":
        why = "model.generate samples"
    for strategy in trainer.strategies:
        if strategy.needs_min_p_mass is not None and why:
            raise ValueError(_needs_other_tokens(strategy, "vLLM samples" if trainer.use_vllm else why))
        if not strategy.needs_sampling_logps:
            continue
        if trainer.use_vllm and trainer.vllm_importance_sampling_correction:
            raise ValueError(
                f"{strategy.name} would repeat the correction of vllm_importance_sampling_correction; remove one of "
                "them"
            )
        if not trainer.use_vllm and why:
            raise ValueError(
                f"{strategy.name} needs the log-probabilities of the sampling distribution, which model.generate does "
                "not record; use engine='explorl'"
            )


def _check_interpreter(trainer: Any, engine: str | None, interpreter: ToolUse | None, why: str) -> None:
    """Check that completions can call the interpreter, and that it is set if a strategy needs it."""
    for strategy in trainer.strategies:
        if strategy.needs_interpreter and interpreter is None:
            raise ValueError(
                f"{name_of(strategy)} sets how often completions may call a tool, but there is none; set "
                "interpreter='python' (rollout.tools in a configuration), or remove it"
            )
        if overrides(strategy, "branching") and (trainer.tools or trainer.environment_factories):
            raise ValueError(
                f"{name_of(strategy)} lets completions branch, but conversations with TRL's tools are sampled turn "
                "by turn; use interpreter='python' instead of tools, or remove it"
            )
    branching = branching_of(trainer.strategies, 0)
    if branching is not None and branching.at == ("output",) and interpreter is None:
        trainer.warn_once("completions will not branch: they branch after outputs of a tool, and there is none")
    if interpreter is None:
        return
    for strategy in trainer.strategies:
        strategy.check_calls(max_calls=interpreter.tool.max_calls)
    why = f"engine={engine!r}" if engine not in (None, "explorl") else why
    if why:
        raise ValueError(
            f"interpreter={interpreter.tool.name!r} needs Explorl's engine, which does not sample here ({why}); use "
            "engine='explorl', or remove the interpreter"
        )
    name = inner_model(trainer.model).config._name_or_path or "this model"
    interpreter.check(trainer.tokenizer, name, trainer.stop_strings)
    with interpreter.pool():  # raises if programs cannot be isolated on this machine
        pass


def _check_vllm_rows(trainer: Any, name: str) -> None:
    """Raise if vLLM cannot sample rows with individual options, which the strategy ``name`` sets."""
    if trainer.tools or trainer.environment_factories:
        raise ValueError(
            f"{name} sets how each row is sampled, but with vLLM conversations with tools are sampled by TRL alone; "
            "use engine='explorl', or remove the tools"
        )
    if trainer.sees_images:
        raise ValueError(f"{name} sets how each row is sampled, which is not supported with images; remove it")
    if trainer.args.vllm_structured_outputs_regex is not None:
        raise ValueError(
            f"{name} sets how each row is sampled, but the distribution after vllm_structured_outputs_regex is not "
            "recorded; remove one of them"
        )
    unsupported = sorted(set(trainer.args.generation_kwargs or {}) - set(VLLM_KEYS))
    if unsupported:
        raise ValueError(
            f"{name} sets how each row is sampled, which cannot be combined with {unsupported[0]!r} in "
            f"generation_kwargs; supported are {', '.join(VLLM_KEYS)}"
        )


def check_reference(trainer: Any) -> None:
    """Raise if a strategy changes the reference and sharding makes that impossible."""
    zero3 = zero_stage(trainer.accelerator) == 3
    sharding = "FSDP" if fsdp_version(trainer.accelerator) else "ZeRO-3" if zero3 and trainer.ref_model is None else ""
    for strategy in trainer.strategies:
        if isinstance(strategy, ReferenceReset) and trainer.beta != 0.0 and sharding:
            raise ValueError(
                f"{name_of(strategy)} changes the reference, which is not possible if {sharding} shards "
                f"{'it' if sharding == 'FSDP' else 'the model that it is an adapter of'}; use ZeRO-2, or beta=0"
            )
