"""One typed configuration for every command: defaults, a preset, a YAML file and `--set key=value`, in that order.

The defaults are the stable configuration of Mecklenburg 2025 ("Exploration Strategies for Reasoning Fine-tuning") where
it gives one: GRPO with learning rate 5e-6, 16 generations of at most 1,024 tokens at temperature 0.6, β = 0.001 and a
LoRA adapter of rank 8, on Countdown.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator, model_validator

from explorl.core.documents import DocumentError
from explorl.core.plugins import suggest
from explorl.core.yaml_documents import parse_yaml

Fraction = Annotated[float, Field(gt=0, le=1)]
Count = Annotated[int, Field(ge=1)]
WeightsDtype = Literal["float32", "bfloat16", "float16"]
"""What `load_policy` can load weights in."""
Tracker = Literal[
    "tensorboard", "trackio", "wandb", "mlflow", "comet_ml", "neptune", "swanlab", "clearml", "dvclive", "codecarbon",
    "dagshub", "azure_ml", "flyte", "kubeflow",
]  # fmt: skip
_TRACKER_PACKAGES = {"azure_ml": "azureml", "flyte": "flytekit"}
CISPO_BOUND = 5.0
"""ε_max of CISPO as TRL recommends it (ScaleRL, arXiv:2510.13786)."""


class ConfigError(ValueError):
    """A configuration that cannot be used; the message names the key, the value, the place and a good value."""


class Section(BaseModel):
    """A part of the configuration: unknown keys are errors, and NaN is no number."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, protected_namespaces=())

    @field_validator("*", mode="before")
    @classmethod
    def _no_switches_for_numbers(cls, value: Any, info: ValidationInfo) -> Any:
        """pydantic would take true for 1: a switch that is none."""
        kinds = _kinds(cls.model_fields[info.field_name or ""].annotation)
        if isinstance(value, bool) and bool not in kinds and (int in kinds or float in kinds):
            raise ValueError(f"it is {str(value).lower()}; use a number")
        return value


def _kinds(annotation: Any) -> list[Any]:
    """The types that an annotation is made of."""
    parts = get_args(annotation)
    return [kind for part in parts for kind in _kinds(part)] if parts else [annotation]


class LoraSettings(Section):
    """A LoRA adapter, made by peft."""

    rank: Count = 8
    """Rank of the two small matrices that are trained beside each adapted layer."""
    alpha: Count = 16
    """What the adapter adds is multiplied by alpha / rank."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of the adapter's inputs that is dropped in each training pass."""
    targets: str | list[str] = "all-linear"
    """Which layers get an adapter: `all-linear`, a regular expression, or a list of module names."""


class ModelSettings(Section):
    """Which policy, and what of it is trained."""

    name: str = "Qwen/Qwen2-0.5B-Instruct"
    """The policy: `tiny`, `tiny-tools`, `smollm2-135m`, a folder, or a hub id."""
    dtype: Literal["float32", "bfloat16", "float16", "pure_bfloat16"] = "float32"
    """The type that is computed in.

    float32: everything. It runs everywhere and is exact enough for runs to be compared, but is slow on a GPU.
    bfloat16: mixed precision, the one for a GPU. Products are computed in bfloat16; the weights that are trained and
        the optimizer's state are float32.
    float16: the same with float16 and a gradient scaler, for a GPU that has no bfloat16. It needs a GPU.
    pure_bfloat16: the weights themselves are bfloat16, which takes half the memory. Without LoRA that is what the
        optimizer changes, and it loses most of its small steps; an adapter is float32 all the same and loses none.

    Where a policy is only evaluated, its weights are loaded in the type that is computed in.
    """
    lora: LoraSettings | None = LoraSettings()
    """The adapter that is trained; null trains all weights instead."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model, which some architectures need. It runs as you and outside the sandbox:
    read it first."""

    @property
    def training_dtype(self) -> WeightsDtype:
        """What the weights are loaded in to be trained."""
        return "bfloat16" if self.dtype == "pure_bfloat16" else "float32"

    @property
    def evaluation_dtype(self) -> WeightsDtype:
        """What the weights are loaded in where nothing is trained."""
        return "bfloat16" if self.dtype == "pure_bfloat16" else self.dtype

    def precision(self) -> dict[str, bool]:
        """The arguments of a transformers Trainer that say so; a ConfigError where this computer cannot do it."""
        check_precision(self.dtype)
        bf16 = self.evaluation_dtype == "bfloat16"
        # transformers takes bf16 on a CPU only where it is told that the CPU is meant
        return {"bf16": bf16, "fp16": self.dtype == "float16", "use_cpu": bf16 and not _has_accelerator()}


class TaskSettings(Section):
    """What is asked."""

    model_config = ConfigDict(extra="allow")
    """Any other key is an option of the task itself, such as `verifier` of `jsonl`; an unknown one is an error."""

    name: str = "countdown"
    """A task by its name (docs/evaluation.md lists them), or the import path of your own: my_pkg.puzzles:Puzzle."""
    template: str | None = None
    """How a problem is put into a prompt; null is the task's own default."""
    data_dir: Path | None = None
    """Folder with the task's JSONL files; null loads the problems from the hub, or generates them."""
    train_problems: Count | None = 2000
    """How many problems of the training split are used; null is all of them."""
    holdout_problems: Count | None = 500
    """How many held-out problems an evaluation asks where `evaluation.problems` is null; null is all of them."""

    @property
    def options(self) -> dict[str, Any]:
        """What `explorl.tasks.get_task` takes beside the name."""
        folder = {} if self.data_dir is None else {"data_dir": self.data_dir}
        return {**folder, **(self.model_extra or {})}


class RolloutSettings(Section):
    """How completions are sampled during training."""

    temperature: Annotated[float, Field(ge=1e-6, le=100)] = 0.6
    """Logits are divided by it before sampling, and in the training pass too."""
    top_p: Fraction = 1.0
    """Sample only from the likeliest tokens that together hold this probability; 1 keeps all."""
    top_k: Annotated[int, Field(ge=0)] = 0
    """Sample only from so many of the likeliest tokens; 0 keeps all."""
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Drop tokens that have less than this share of the likeliest token's probability; 0 keeps all."""
    repetition_penalty: Annotated[float, Field(gt=0)] = 1.0
    """Above 1 makes tokens that have occurred, in the prompt too, less likely; 1 changes nothing."""
    max_tokens: Count = 1024
    """Longest completion, in tokens. Evaluations during training have the same limit."""
    stop: list[Annotated[str, Field(min_length=1)]] = []
    """One string or several that end a completion, such as `</answer>`, for policies that do not end by themselves; the
    string stays in it. Evaluations during training have the same ones. Rewards see all of the token that completes the
    string, evaluations the text up to its end."""
    engine: Literal["explorl", "generate", "vllm"] | None = None
    """What samples the completions. null is Explorl's engine where it computes what the model computes, and otherwise
    `model.generate`, with a warning that says why."""
    batch_size: Count | None = None
    """Most completions that Explorl's engine decodes together; null lets memory decide, up to a few hundred."""
    memory_budget: Count | None = None
    """Bytes that Explorl's engine may hold beside the model; null is half of what is free."""
    tools: str | None = None
    """A tool that completions may call, in training and in evaluations during it; null is none.

    python: fenced blocks of Python, which are run in a sandbox; what they show follows as an output block.
    calculator: the same for tiny policies, `<<12*34=408>>`.

    What a tool says is not learnt from, enters no statistic, and is no answer."""
    tool_calls: Count = 3
    """Calls that one completion may make. The strategy tool_progression lets it begin with fewer."""

    @field_validator("stop", mode="before")
    @classmethod
    def _strings(cls, value: Any) -> list[str]:
        strings = [value] if isinstance(value, str) else value
        if not isinstance(strings, (list, tuple)) or not all(isinstance(one, str) and one for one in strings):
            raise ValueError(
                f"it is read as {value!r}; use a text such as '</answer>' or a list of them, in quotes where YAML "
                "would take it for something else, like '###'; [] is none"
            )
        return list(strings)

    @field_validator("tools")
    @classmethod
    def _known_tool(cls, value: str | None) -> str | None:
        from explorl.rollout.tools import get_tool

        if value is not None:
            get_tool(value)
        return value

    def limits(self) -> dict[str, Any]:
        """Where a completion ends, in an evaluation too: changes of `explorl.evaluation.protocol`."""
        return {"max_tokens": self.max_tokens, "stop": self.stop or None}

    def tool(self) -> Any:
        """The tool with its limit (`explorl.rollout.tools.ToolSpec`), or None."""
        from explorl.rollout.tools import get_tool

        return None if self.tools is None else get_tool(self.tools, max_calls=self.tool_calls)


class LensSettings(Section):
    """What is recorded of a step beside its rewards, under `lens/…` in metrics.jsonl and in the files of rollouts."""

    every: Count = 4
    """Steps from one with answers that are looked at closely to the next."""
    answers: Annotated[int, Field(ge=0)] | None = None
    """How many answers of such a step are looked at closely, by one pass before the update and one after it: the best
    other token, the size of each token's update, the change of its probability. null is `rate` of them."""
    rate: Annotated[float, Field(ge=0, le=1)] = 0.05
    """The share of such a step's answers that is looked at closely; 0 is none."""
    observers: list[str] = []
    """Import paths of your own observers, like my_pkg.watching:Lengths: objects with a method `see(self, step)`, or
    classes of them, which are called without arguments."""


class DynamicSamplingSettings(Section):
    """Groups whose rewards are all equal are exchanged for those of fresh prompts (DAPO, arXiv:2503.14476)."""

    max_rounds: Count = 3
    """Further rounds of sampling for one step, at most; each draws as many prompts as are missing."""
    by: Literal["reward", "correct"] = "reward"
    """What has to differ within a group: the total reward, or which answers are correct, as in DAPO."""
    overdraw: bool = False
    """Draw so many prompts that about as many as are missing will be kept: fewer rounds, more completions."""


class SkipSolvedSettings(Section):
    """Prompts that are solved every time come back less often."""

    visits: Count = 2
    """Visits in a row with right answers only, after which a prompt comes back less often."""
    floor: Fraction = 0.1
    """With what probability it is asked all the same when its turn comes."""
    remembered: Count = 200_000
    """Of how many prompts at most it is known how often they were solved."""


class TrainingSettings(Section):
    """GRPO. One step samples `prompts_per_step` × `generations` completions and updates the policy."""

    steps: Count = 200
    """How many batches of completions are sampled and learnt from."""
    prompts_per_step: Count = 16
    """Different prompts in one step."""
    generations: Annotated[int, Field(ge=2)] = 16
    """Completions sampled per prompt: the group whose mean is the baseline of an advantage."""
    micro_batch: Count = 16
    """Sequences in one forward and backward pass: no micro-batch has more rows than that. It changes memory and speed,
    and the result only with the loss bnpo and the strategy entropy_bonus, which average over each micro-batch."""
    iterations: Count = 1
    """How many optimizer steps use one batch."""
    learning_rate: Annotated[float, Field(gt=0)] = 5e-6
    """Step size of AdamW, at its highest."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """How the learning rate goes on after the warm-up: it stays, or falls to 0 at the last step."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Optimizer steps over which the learning rate rises from 0."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """AdamW's weight decay."""
    max_grad_norm: Annotated[float, Field(gt=0)] = 1.0
    """A gradient with a larger norm is scaled down to it."""
    beta: Annotated[float, Field(ge=0)] = 0.001
    """Weight of the KL term against the starting policy; 0 needs no reference."""
    loss: Literal["grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo"] = "dapo"
    """TRL's loss types. r is the ratio of the new to the old probability, A the advantage.

    grpo: the clipped objective, averaged over each sequence's tokens and then over sequences; favours short answers.
    bnpo: the clipped objective, divided by the tokens of the micro-batch, whose size therefore matters.
    dr_grpo: the clipped objective, divided by the constant `rollout.max_tokens` (Dr. GRPO, arXiv:2503.20783).
    dapo: the clipped objective, divided by all tokens of the batch (arXiv:2503.14476), as in Mecklenburg's Eq. 1.
    cispo: min(r, clip_high)·A·log π with no gradient through the ratio: no token is dropped (arXiv:2506.13585).
    sapo: as grpo, with a smooth gate instead of the clip, narrower where A ≤ 0 (arXiv:2511.20347).
    luspo: one ratio for each sequence, clipped, its loss multiplied by the length (arXiv:2602.05261).
    vespo: one smooth weight for each sequence from the product of its ratios, no clip (arXiv:2602.10693).
    """
    clip_low: Annotated[float, Field(gt=0)] = 0.2
    """The ratio is clipped to 1 − clip_low and 1 + clip_high; sapo and vespo have no bounds, cispo no lower one."""
    clip_high: Annotated[float, Field(gt=0)] = 0.2
    """In cispo the largest ratio itself, not what is added to 1: there it is 5.0, unless it is set."""
    scale_rewards: Literal["group", "batch", "none"] = "group"
    """What the difference between a reward and its group's mean is divided by.

    group: the standard deviation of the group's rewards.
    batch: the standard deviation of all rewards of the batch.
    none: nothing (Dr. GRPO, arXiv:2503.20783).
    """
    shuffle: bool = False
    """Draw the prompts in random order. Mecklenburg keeps their order, so that runs can be compared step by step."""
    dynamic_sampling: DynamicSamplingSettings | None = None
    """Exchange groups that teach nothing, because their rewards are all equal; true is its defaults."""
    skip_solved: SkipSolvedSettings | None = None
    """Ask prompts less often that are solved every time; true is its defaults."""
    gradient_checkpointing: bool = False
    """Compute each layer again in the backward pass: less memory, more time."""
    checkpoint_every: Count = 25
    """Optimizer steps between checkpoints, from which a killed run resumes."""
    keep_checkpoints: Count = 2
    """How many of the newest checkpoints stay on disk."""
    save_rollouts: bool = True
    """Keep every completion of training, with its rewards, in the run's folder."""
    token_records: Annotated[int, Field(ge=0)] = 4
    """How many prompts of each step are saved with the record of every token."""
    lens: LensSettings | None = LensSettings()
    """What is recorded of each step beside its rewards; null records nothing."""
    report_to: list[Tracker] = []
    """Trackers of the transformers Trainer, such as tensorboard (its files go to RUN/tensorboard) or trackio. Scores on
    held-out problems go there as well, as ``eval/pass@8`` with ``eval/pass@8_low`` and ``eval/pass@8_high``."""

    @field_validator("dynamic_sampling", "skip_solved", mode="before")
    @classmethod
    def _on_or_off(cls, value: Any) -> Any:
        return ({} if value else None) if isinstance(value, bool) else value

    @model_validator(mode="after")
    def _bound_of_cispo(self) -> TrainingSettings:
        if self.loss == "cispo" and "clip_high" not in self.model_fields_set:
            self.clip_high = CISPO_BOUND
        if self.loss == "cispo" and self.clip_high < 1:
            raise ValueError(
                f"clip_high is {self.clip_high}, and cispo cuts the ratio itself off there, so that every update would "
                f"be made smaller; use {CISPO_BOUND}, or leave it out"
            )
        return self

    @model_validator(mode="after")
    def _whole_micro_batches(self) -> TrainingSettings:
        sequences = self.prompts_per_step * self.generations
        if sequences % self.micro_batch:
            good = max(n for n in range(1, self.micro_batch + 1) if sequences % n == 0)
            raise ValueError(
                f"micro_batch is {self.micro_batch}, which does not divide prompts_per_step × generations = "
                f"{sequences}; use {good}"
            )
        return self


class SftSettings(Section):
    """Supervised fine-tuning on the task's reference solutions, loss on completion tokens only."""

    examples: Count = 11_000
    """How many reference solutions are learnt; Mecklenburg has about 11,000."""
    epochs: Annotated[float, Field(gt=0)] = 10
    """Passes over the examples."""
    batch_size: Count = 16
    """Examples per optimizer step."""
    learning_rate: Annotated[float, Field(gt=0)] = 1e-5
    """Step size of AdamW, at its highest."""
    schedule: Literal["constant", "linear", "cosine"] = "cosine"
    """How the learning rate goes on after the warm-up: it stays, or falls to 0 at the last step."""
    warmup_steps: Annotated[int, Field(ge=0)] = 50
    """Optimizer steps over which the learning rate rises from 0."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.01
    """AdamW's weight decay."""
    adam_beta2: Annotated[float, Field(gt=0, lt=1)] = 0.999
    """AdamW's β₂, the decay of its mean of squared gradients."""
    max_length: Count = 1280
    """Longest example, prompt and completion together, in tokens; the rest is cut off."""
    attempts: tuple[int, int] | None = None
    """Fewest and most failed attempts before the solution of a reference trace; null is the task's own default."""
    from_scratch: bool = False
    """Start from random weights (the tiny policy only)."""
    checkpoint_every: Count = 500
    """Optimizer steps between checkpoints, from which a killed run resumes."""
    score: bool = False
    """Evaluate the policy when it is done, and write its score into the model's recipe.json."""


class RftSettings(Section):
    """Rejection-sampling fine-tuning: sample, filter, select, fit, and again (Deng et al. 2025, §4.4.1).

    Responses are sampled as `rollout` says. What the fit depends on beside the keys below is as `sft` says: weight
    decay, β₂, the longest example, checkpoints.
    """

    model_config = ConfigDict(validate_by_name=True, validate_by_alias=True, serialize_by_alias=True)

    iterations: Count = 4
    """How many times responses are sampled and learnt from."""
    prompts: Count | None = None
    """Training problems that are asked in an iteration, the next ones each time; null is all of them every time."""
    samples: Count = 8
    """Responses sampled per problem: k."""
    filters: list[str | dict[str, Any]] = [
        "has_answer", "has_digit", "cut_after_answer", {"max_redundancy": {"limit": 0.31}},
    ]  # fmt: skip
    """Rules that every response must pass, in this order: names, a name over its hyperparameters, or the import path
    of a function of your own with `@rft_filter`, like my_pkg.rules:polite. Those of the paper by default.

    - `has_answer`: it states an answer in the task's own mark, such as `\\boxed{…}` or `<answer>…</answer>`.
    - `has_digit`: it has at least one digit.
    - `cut_after_answer`: drops none; a response ends at its first answer, which is then the one that is judged.
    - `max_redundancy`: its 3-gram redundancy is at most `limit`, 0.31.
    - `max_length`: it has at most so many `tokens`.
    - `finished`: it ended by itself, not at the length limit.
    - `dedupe`: no earlier response to the problem is the same but for white space.
    """
    answer_mark: str | None = None
    """What an answer begins with, for the filters has_answer and cut_after_answer; null is the task's own mark."""
    selector: str | dict[str, Any] = "random"
    """Which of the right responses are learnt: those that score highest. An import path names a function of your own
    with `@rft_selector`.

    - `random`: any.
    - `entropy`: those with the highest mean token entropy.
    - `branching`: those with the highest mean branching factor.
    - `shortest`: those with the fewest tokens.
    - `diverse`: spread over problems, and over the distinct answers to each.
    """
    budget: Count = 1100
    """How many responses are learnt in an iteration; all that there are, where they are fewer."""
    per_prompt: Count | None = 4
    """How many of them may be responses to one problem; null is any number."""
    noise: Annotated[float, Field(ge=0, lt=1)] = 0.05
    """Share of the selected set that is taken from the wrong responses that pass the filters."""
    from_: Literal["current", "base"] = Field(default="current", alias="from")
    """Which policy an iteration fits: the one of the iteration before, or always the one that the run began with.
    Responses are sampled from the one before in either case."""
    epochs: Annotated[float, Field(gt=0)] = 1
    """Passes over the selected set."""
    batch_size: Count = 32
    """Responses per optimizer step."""
    learning_rate: Annotated[float, Field(gt=0)] = 1e-5
    """Step size of AdamW, at its highest."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """How the learning rate goes on after the warm-up in each fit: it stays, or falls to 0 at the last step."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Optimizer steps of each fit over which the learning rate rises from 0."""

    @field_validator("filters")
    @classmethod
    def _filters_exist(cls, specs: list[str | dict[str, Any]]) -> list[str | dict[str, Any]]:
        from explorl.training.rft.registry import build_filters

        build_filters(specs)
        return specs

    @field_validator("selector")
    @classmethod
    def _selector_exists(cls, spec: str | dict[str, Any]) -> str | dict[str, Any]:
        from explorl.training.rft.registry import build_selector

        build_selector(spec)
        return spec


class EvaluationSettings(Section):
    """How a policy is judged."""

    protocol: str = "mecklenburg"
    """How completions are drawn: the name of a protocol. Its token limit gives way to `rollout.max_tokens`."""
    problems: Count | None = None
    """How many holdout problems; null is all of `task.holdout_problems`."""
    samples: Count | None = None
    """Completions per problem; null is the protocol's own number."""
    every: Annotated[int, Field(ge=0)] = 0
    """Optimizer steps between evaluations during training; 0 is none."""
    ends: Annotated[int, Field(ge=0)] = 64
    """How many holdout problems at most are scored before the first step and after the last one, where `every` is 0;
    0 is none. Where `every` is not 0, both ends are scored as every other evaluation is."""
    batch_size: Count | None = None
    """Sequences sampled at a time; null is what fits into memory."""

    @field_validator("protocol")
    @classmethod
    def _known_protocol(cls, value: str) -> str:
        from explorl.evaluation.protocols import protocol

        protocol(value)
        return value


class Config(Section):
    """Everything that a run depends on."""

    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    """Fixes the order of the prompts, what is sampled, and the values of new weights."""
    model: ModelSettings = ModelSettings()
    task: TaskSettings = TaskSettings()
    rollout: RolloutSettings = RolloutSettings()
    training: TrainingSettings = TrainingSettings()
    strategies: list[str | dict[str, Any]] = []
    """Exploration strategies, in the order in which they act: names, or a name over its hyperparameters."""
    sft: SftSettings = SftSettings()
    rft: RftSettings = RftSettings()
    evaluation: EvaluationSettings = EvaluationSettings()

    @field_validator("task")
    @classmethod
    def _task_exists(cls, task: TaskSettings) -> TaskSettings:
        from explorl.tasks import check_task

        check_task(task.name, task.options, beside=TaskSettings.model_fields)
        return task

    @field_validator("strategies")
    @classmethod
    def _strategies_exist(cls, specs: list[str | dict[str, Any]], info: ValidationInfo) -> list[str | dict[str, Any]]:
        from explorl.strategies import build_all

        build_all(specs, construct=_constructs(info))
        return specs

    @model_validator(mode="after")
    def _strategies_fit(self, info: ValidationInfo) -> Config:
        from explorl.strategies import build_all
        from explorl.tasks.registry import task_type

        for strategy in build_all(self.strategies, construct=_constructs(info)):
            strategy.check(num_generations=self.training.generations)
            strategy.check_length(max_completion_length=self.rollout.max_tokens)
            if strategy.needs_answers and not getattr(task_type(self.task.name), "has_answers", True):
                raise ValueError(
                    f"{strategy.name} looks at what each answer says, and task {self.task.name!r} has no answers "
                    f"(has_answers is False); leave out {strategy.name}, or take a task that has them, like 'countdown'"
                )
        return self

    @model_validator(mode="after")
    def _dynamic_sampling_fits(self) -> Config:
        if self.training.dynamic_sampling is None:
            return self
        if self.rollout.engine == "vllm":
            raise ValueError("training.dynamic_sampling has not been tried with vLLM; set rollout.engine to null")
        prompts, problems = self.training.prompts_per_step, self.task.train_problems
        if problems is not None and problems <= prompts:
            raise ValueError(
                f"training.dynamic_sampling needs prompts beside those of a step: task.train_problems is {problems} "
                f"and training.prompts_per_step {prompts}; use more problems, such as {10 * prompts}"
            )
        return self

    def dump(self) -> dict[str, Any]:
        """The configuration as plain values for YAML and JSON."""
        return self.model_dump(mode="json")


def _constructs(info: ValidationInfo) -> bool:
    """Return whether strategies of other packages may be built to be checked: not where a file is only shown."""
    return not info.context or bool(info.context["construct"])


def read_yaml(text: str, place: str) -> Any:
    """Return what a YAML document says; `ConfigError` names the place."""
    try:
        return parse_yaml(text, place)
    except DocumentError as error:
        raise ConfigError(str(error)) from None


def presets() -> list[str]:
    """Names of the presets that ship with the package."""
    return sorted(path.name.removesuffix(".yaml") for path in (resources.files("explorl") / "presets").iterdir())


def load_config(
    path: str | Path | None = None,
    *,
    preset: str | None = None,
    overrides: Sequence[str] = (),
    values: Mapping[str, Any] | None = None,
    construct: bool = True,
) -> Config:
    """Return the resolved configuration: defaults < preset < file < `overrides` ("training.steps=60") < `values`.

    ``construct=False`` is for what only shows it: plug-ins that it names by their import paths are found, and not
    constructed.
    """
    base: dict[str, Any] = {}
    merged: dict[str, Any] = {}
    origin: list[str] = []
    if preset is not None:
        if preset not in presets():
            raise ConfigError(f"unknown preset {preset!r}; {suggest(preset, presets())}")
        text = (resources.files("explorl") / "presets" / f"{preset}.yaml").read_text(encoding="utf-8")
        base = _mapping(read_yaml(text, f"preset {preset}"), f"preset {preset}")
    if path is not None:
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"cannot read the config file {path}: {error}") from error
        merged = _merge(merged, _mapping(read_yaml(text, str(path)), str(path)))
        origin.append(str(path))
    if overrides:
        merged = apply_overrides(merged, overrides)
        origin.append("--set")
    merged = _merge(merged, values or {})
    place = " and ".join(origin) or "the configuration"
    return _validated(_merge(adapt_preset(base, merged), merged), place, construct=construct)


def apply_overrides(values: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """Values with the changes of --set."""
    merged = dict(values)
    for override in overrides:
        key, separator, value = override.partition("=")
        if not separator or not key:
            raise ConfigError(f"--set {override!r} is not key=value; write it like training.learning_rate=5e-6")
        nested: Any = read_yaml(value, f"--set {override}")
        for part in reversed(key.split(".")):
            nested = {part: nested}
        merged = _merge(merged, nested)
    return merged


def _validated(values: Mapping[str, Any], place: str, *, construct: bool = True) -> Config:
    try:
        return Config.model_validate(values, context={"construct": construct})
    except ValidationError as error:
        raise ConfigError(_explain(error, place)) from None


def adapt_preset(preset: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """A preset's values without what it says of its own task, if the changes to it name another one."""
    task, changed = preset.get("task", {}), changes.get("task")
    if not isinstance(changed, Mapping) or changed.get("name", task.get("name")) == task.get("name"):
        return dict(preset)
    counts = {key: task[key] for key in ("train_problems", "holdout_problems") if key in task}
    made = ("attempts", "from_scratch")  # how the preset's policy was made; on another task it is fine-tuned as it is
    sft = {key: value for key, value in preset.get("sft", {}).items() if key not in made}
    return {**preset, "task": counts, "sft": sft}


def _mapping(value: Any, place: str) -> dict[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ConfigError(f"{place} must hold keys and values, like `training: {{steps: 100}}`")
    return value


def _merge(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Mappings are merged key by key; anything else is replaced."""
    merged = dict(base)
    for key, value in changes.items():
        old = merged.get(key)
        merged[key] = _merge(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return merged


_ELSEWHERE = {
    "evaluation.engine": "Explorl's engine samples the evaluations of a run; explorl eval --engine vllm scores its "
    "model with vLLM afterwards",
}
"""Keys that one may expect, and where the thing is to be had."""


def _explain(error: ValidationError, place: str) -> str:
    """pydantic's findings, one line each: key, value, what is wrong, the nearest known key."""
    lines = []
    for finding in error.errors():
        location = [str(part) for part in finding["loc"]]
        key = ".".join(location)
        if finding["type"] == "extra_forbidden":
            advice = _ELSEWHERE.get(key) or suggest(location[-1], _keys_beside(location))
            lines.append(f"unknown key {key} in {place}; {advice}")
        elif finding["type"] == "value_error":
            said = str(finding["ctx"]["error"])
            where = f"{key}: " if key and not said.startswith(f"{key} ") else ""
            lines.append(f"{where}{said} (in {place})")
        elif finding["type"] == "model_type":
            said = "empty" if finding["input"] is None else repr(finding["input"])
            lines.append(f"{key} is {said} in {place}; use keys and values, like {_sample(location)}, or leave it out")
        else:
            lines.append(f"{key} is {finding['input']!r} in {place}: {finding['msg'].lower()}{_default(location)}")
    return "\n".join(dict.fromkeys(lines))


def check_trackers(names: Sequence[str]) -> None:
    """That every tracker of ``training.report_to`` is installed."""
    for name in names:
        if importlib.util.find_spec(_TRACKER_PACKAGES.get(name, name)) is None:
            raise ConfigError(f"training.report_to names {name}, which is not installed: pip install {name}")


def check_engine(engine: str | None) -> None:
    """That what samples, ``rollout.engine``, is installed."""
    if engine == "vllm" and importlib.util.find_spec("vllm") is None:
        raise ConfigError(
            "rollout.engine is vllm, which is not installed: pip install explorl[vllm], or use explorl or generate"
        )


def unsandboxed_code(values: Mapping[str, Any]) -> list[str]:
    """Return what a configuration lets run outside the sandbox, in lines to be shown before it does."""
    model, task = values["model"], values["task"]
    lines = [f"model.trust_remote_code is true: Python code that comes with {model['name']} will run"]
    lines = lines if model["trust_remote_code"] else []
    if task.get("unisolated"):
        lines.append(f"task.unisolated is true: programs that {model['name']} writes will run without isolation")
    return lines


RESUMABLE = {
    "grpo": (
        "training.steps", "training.checkpoint_every", "training.keep_checkpoints", "training.report_to",
        "training.lens", "training.lens.every", "training.lens.answers", "training.lens.rate",
        "training.lens.observers", "evaluation.every", "evaluation.ends",
    ),
    "sft": ("sft.epochs", "sft.checkpoint_every", "sft.score"),
    "rft": ("rft.iterations",),
}  # fmt: skip
"""What may be changed where a run goes on, by its kind."""


def resumed_config(held: Config, overrides: Sequence[str], kind: str, place: str) -> Config:
    """A run's configuration with the changes that may be made where it goes on; all others are refused by name."""
    if not overrides:
        return held
    asked = _validated(apply_overrides(held.dump(), overrides), "--set")
    for key, (old, new) in changed_keys(held.dump(), asked.dump()).items():
        if key not in RESUMABLE[kind]:
            raise ConfigError(
                f"{key} is {old!r} in {place} and {new!r} in --set: a run goes on as it began, and only "
                f"{', '.join(RESUMABLE[kind])} may change; start a new run for it"
            )
    return asked


def with_defaults(stored: Mapping[str, Any]) -> dict[str, Any]:
    """A stored configuration with the default of each key that it lacks: one from before there was that key is equal to
    one that leaves it as it is."""
    return _merge(Config().dump(), stored)


def rft_config(config: Config) -> Config:
    """The configuration of an RFT run. Its steps are iterations, and `training` says so to all that read the run."""
    training = config.training.model_copy(update={"steps": config.rft.iterations, "iterations": 1})
    return config.model_copy(update={"training": training})


def changed_keys(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """The dotted keys whose values differ, with the old value and the new one; a lacking key has its default."""
    before, after = _flat(with_defaults(old)), _flat(with_defaults(new))
    keys = dict.fromkeys([*before, *after])
    return {key: (before.get(key), after.get(key)) for key in keys if before.get(key) != after.get(key)}


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested values under their dotted keys."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return flat


def check_precision(dtype: str) -> None:
    """That this computer can train in ``model.dtype``."""
    if "bfloat16" in dtype and _lacks_bfloat16():
        raise ConfigError(f"model.dtype is {dtype}, and this computer's GPU has no bfloat16; use float16, or float32")
    if dtype == "float16" and not _has_accelerator():
        raise ConfigError(
            "model.dtype is float16, whose gradients must be scaled, and this computer has no GPU to do that on; use "
            "bfloat16, or float32"
        )


def _lacks_bfloat16() -> bool:
    """Whether there is a GPU, and it does not compute in bfloat16 itself."""
    import torch

    return torch.cuda.is_available() and not torch.cuda.is_bf16_supported(including_emulation=False)


def _has_accelerator() -> bool:
    import torch
    from transformers.utils import is_torch_xla_available

    return bool(torch.accelerator.is_available() or is_torch_xla_available())


def _section(location: Sequence[str]) -> type[BaseModel] | None:
    section: type[BaseModel] | None = Config
    for part in location:
        field = section.model_fields.get(part) if section is not None else None
        candidates = [field.annotation, *get_args(field.annotation)] if field is not None else []
        section = next((c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel)), None)
    return section


def _keys_beside(location: Sequence[str]) -> list[str]:
    section = _section(location[:-1])
    return [field.alias or name for name, field in section.model_fields.items()] if section is not None else []


def _default(location: Sequence[str]) -> str:
    section = _section(location[:-1])
    field = section.model_fields.get(location[-1]) if section is not None else None
    return f" (the default is {field.default!r})" if field is not None else ""


def _sample(location: Sequence[str]) -> str:
    """A first key of a section, as a file has it."""
    section = _section(location)
    name, field = next(iter(section.model_fields.items())) if section is not None else ("", None)
    return f"{{{name}: {field.default}}}" if field is not None else "{}"
