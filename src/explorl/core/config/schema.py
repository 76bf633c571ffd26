"""The sections of the configuration: every key with its type, default and description.

The defaults are the stable configuration of Mecklenburg 2025 ("Exploration Strategies for Reasoning Fine-tuning") where
it gives one: GRPO with learning rate 5e-6, 16 generations of at most 1,024 tokens at temperature 0.6, β = 0.001 and a
LoRA adapter of rank 8, on Countdown.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator

from explorl.core.config.checks import check_precision, has_accelerator
from explorl.core.sampling_ranges import RANGES

Fraction = Annotated[float, Field(gt=0, le=1)]
Count = Annotated[int, Field(ge=1)]
WeightsDtype = Literal["float32", "bfloat16", "float16"]
"""The dtypes in which `load_policy` can load weights."""
Tracker = Literal[
    "tensorboard", "trackio", "wandb", "mlflow", "comet_ml", "neptune", "swanlab", "clearml", "dvclive", "codecarbon",
    "dagshub", "azure_ml", "flyte", "kubeflow",
]  # fmt: skip
CISPO_BOUND = 5.0
"""ε_max of CISPO as TRL recommends it (ScaleRL, arXiv:2510.13786)."""


class Section(BaseModel):
    """A part of the configuration; unknown keys and NaN are errors."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, protected_namespaces=())

    @field_validator("*", mode="before")
    @classmethod
    def _reject_booleans_as_numbers(cls, value: Any, info: ValidationInfo) -> Any:
        """Reject true and false for numbers, which pydantic would read as 1 and 0."""
        kinds = _leaf_types(cls.model_fields[info.field_name or ""].annotation)
        if isinstance(value, bool) and bool not in kinds and (int in kinds or float in kinds):
            raise ValueError(f"it is {str(value).lower()}; use a number")
        return value


def _leaf_types(annotation: Any) -> list[Any]:
    """Return the types that an annotation consists of."""
    parts = get_args(annotation)
    return [kind for part in parts for kind in _leaf_types(part)] if parts else [annotation]


class LoraSettings(Section):
    """A LoRA adapter, made by peft."""

    rank: Count = 8
    """Rank of the two low-rank matrices that are trained for each adapted layer."""
    alpha: Count = 16
    """The adapter's output is scaled by alpha / rank."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Dropout rate of the adapter's inputs in training."""
    targets: str | list[str] = "all-linear"
    """Which layers get an adapter: `all-linear`, a regular expression, or a list of module names."""


class ModelSettings(Section):
    """The policy, and which of its weights are trained."""

    name: str = "Qwen/Qwen2-0.5B-Instruct"
    """The policy: `tiny`, `tiny-tools`, `smollm2-135m`, a folder, or a hub id."""
    dtype: Literal["float32", "bfloat16", "float16", "pure_bfloat16"] = "float32"
    """The precision of the computation.

    float32: full precision. It runs everywhere and is exact enough for runs to be compared, but is slow on a GPU.
    bfloat16: mixed precision, recommended on a GPU. Products are computed in bfloat16; the trained weights and the
        optimizer's state are float32.
    float16: mixed precision with float16 and a gradient scaler, for a GPU without bfloat16. It needs a GPU.
    pure_bfloat16: the weights themselves are bfloat16, which takes half the memory. Without LoRA the optimizer updates
        these weights and most of its small steps are lost to rounding; a LoRA adapter is float32 and loses none.

    If a policy is only evaluated, its weights are loaded in the precision of the computation.
    """
    lora: LoraSettings | None = LoraSettings()
    """The adapter that is trained; null trains all weights instead."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model, which some architectures need. It runs with your permissions, outside
    the sandbox: read it first."""

    @property
    def training_dtype(self) -> WeightsDtype:
        """The dtype in which the weights are loaded for training."""
        return "bfloat16" if self.dtype == "pure_bfloat16" else "float32"

    @property
    def evaluation_dtype(self) -> WeightsDtype:
        """The dtype in which the weights are loaded if nothing is trained."""
        return "bfloat16" if self.dtype == "pure_bfloat16" else self.dtype

    def precision(self) -> dict[str, bool]:
        """Return the arguments of a transformers Trainer; raise ConfigError if this computer lacks the precision."""
        check_precision(self.dtype)
        bf16 = self.evaluation_dtype == "bfloat16"
        # transformers accepts bf16 on a CPU only with use_cpu
        return {"bf16": bf16, "fp16": self.dtype == "float16", "use_cpu": bf16 and not has_accelerator()}


class TaskSettings(Section):
    """The task: problems, prompts and the verifier."""

    model_config = ConfigDict(extra="allow")
    """Other keys are options of the task itself, such as `verifier` of `jsonl`; an unknown one is an error."""

    name: str = "countdown"
    """The name of a task (docs/evaluation.md lists them), or the import path of your own: my_pkg.puzzles:Puzzle."""
    template: str | None = None
    """The prompt template; null is the task's default."""
    data_dir: Path | None = None
    """Folder with the task's JSONL files; null downloads the problems from the hub, or generates them."""
    train_problems: Count | None = 2000
    """Number of training problems; null is all of them."""
    holdout_problems: Count | None = 500
    """Number of held-out problems of an evaluation if `evaluation.problems` is null; null is all of them."""

    @property
    def options(self) -> dict[str, Any]:
        """The arguments of `explorl.tasks.get_task` besides the name."""
        folder = {} if self.data_dir is None else {"data_dir": self.data_dir}
        return {**folder, **(self.model_extra or {})}


class RolloutSettings(Section):
    """Sampling of completions during training."""

    temperature: Annotated[float, Field(**RANGES["temperature"].bounds)] = 0.6
    """Sampling temperature; the training pass divides the logits by it too."""
    top_p: Annotated[float, Field(**RANGES["top_p"].bounds)] = 1.0
    """Sample only from the most likely tokens with this total probability; 1 keeps all."""
    top_k: Annotated[int, Field(**RANGES["top_k"].bounds)] = 0
    """Sample only from this many of the most likely tokens; 0 keeps all."""
    min_p: Annotated[float, Field(**RANGES["min_p"].bounds)] = 0.0
    """Drop tokens less likely than this share of the most likely token's probability; 0 keeps all."""
    repetition_penalty: Annotated[float, Field(**RANGES["repetition_penalty"].bounds)] = 1.0
    """Values above 1 make tokens less likely that have occurred in the prompt or the completion; 1 changes nothing."""
    max_tokens: Count = 1024
    """Maximum length of a completion in tokens, also in evaluations during training."""
    stop: list[Annotated[str, Field(min_length=1)]] = []
    """One or more strings that end a completion, such as `</answer>`, for policies that do not end by themselves; the
    string is kept. Evaluations during training use the same ones. Reward functions see the whole token that completes
    the string; evaluations see the text up to the end of the string."""
    engine: Literal["explorl", "generate", "vllm"] | None = None
    """The engine that samples the completions. null is Explorl's engine if it supports the model, and otherwise
    `model.generate`, with a warning that says why."""
    batch_size: Count | None = None
    """Maximum number of completions that Explorl's engine decodes at a time; null is as many as fit into memory, up to
    a few hundred."""
    memory_budget: Count | None = None
    """Bytes of memory for Explorl's engine besides the model; null is half of the free memory."""
    tools: str | None = None
    """A tool that completions may call, in training and in evaluations during it; null is none.

    python: fenced blocks of Python, which run in a sandbox; an output block with what they print follows.
    calculator: the same for tiny policies, `<<12*34=408>>`.

    A tool's output is not trained on, not part of any statistic, and not an answer."""
    tool_calls: Count = 3
    """Maximum number of calls per completion. The strategy tool_progression starts with fewer."""

    @field_validator("stop", mode="before")
    @classmethod
    def _strings(cls, value: Any) -> list[str]:
        strings = [value] if isinstance(value, str) else value
        if not isinstance(strings, (list, tuple)) or not all(isinstance(string, str) and string for string in strings):
            raise ValueError(
                f"it is read as {value!r}; use a text such as '</answer>' or a list of texts, quoted if YAML would "
                "read it as something else, like '###'; [] is none"
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
        """Return the limits of a completion, as changes of `explorl.evaluation.protocol`."""
        return {"max_tokens": self.max_tokens, "stop": self.stop or None}

    def tool(self) -> Any:
        """Return the tool with its limit of calls (`explorl.rollout.tools.ToolSpec`), or None."""
        from explorl.rollout.tools import get_tool

        return None if self.tools is None else get_tool(self.tools, max_calls=self.tool_calls)


class LensSettings(Section):
    """Details recorded of a step besides its rewards, under `lens/…` in metrics.jsonl and in the files of rollouts."""

    every: Count = 4
    """Inspect completions in detail every N steps."""
    answers: Annotated[int, Field(ge=0)] | None = None
    """Number of completions inspected in detail per such step, by one pass before the update and one after it: the best
    alternative token, the size of each token's update, the change of its probability. null is the share `rate`."""
    rate: Annotated[float, Field(ge=0, le=1)] = 0.05
    """Share of completions that are inspected in detail in such a step; 0 is none."""
    observers: list[str] = []
    """Import paths of your own observers, like my_pkg.watching:Lengths: objects with a method `see(self, step)`, or
    classes that are constructed without arguments."""


class DynamicSamplingSettings(Section):
    """Replace groups whose rewards are all equal by groups of new prompts (DAPO, arXiv:2503.14476)."""

    max_rounds: Count = 3
    """Maximum number of further sampling rounds per step; each samples as many prompts as are missing."""
    by: Literal["reward", "correct"] = "reward"
    """What must differ within a group: the total reward, or correctness, as in DAPO."""
    overdraw: bool = False
    """Sample enough prompts that about as many as are missing will be kept: fewer rounds, more completions."""


class SkipSolvedSettings(Section):
    """Sample prompts less often that are always solved."""

    visits: Count = 2
    """Consecutive visits with only correct answers after which a prompt is sampled less often."""
    floor: Fraction = 0.1
    """Probability of still sampling a solved prompt."""
    remembered: Count = 200_000
    """Maximum number of prompts whose solve counts are remembered."""


class TrainingSettings(Section):
    """GRPO. One step samples `prompts_per_step` × `generations` completions and updates the policy."""

    steps: Count = 200
    """Number of batches of completions that are sampled and trained on."""
    prompts_per_step: Count = 16
    """Number of different prompts per step."""
    generations: Annotated[int, Field(ge=2)] = 16
    """Completions sampled per prompt: the group whose mean is the baseline of an advantage."""
    micro_batch: Count = 16
    """Maximum number of sequences in one forward and backward pass. It changes memory and speed, and the result only
    with the loss bnpo and the strategy entropy_bonus, which average over each micro-batch."""
    iterations: Count = 1
    """Number of optimizer steps per batch."""
    learning_rate: Annotated[float, Field(gt=0)] = 5e-6
    """AdamW's peak learning rate."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Learning rate after the warm-up: constant, or falling to 0 at the last step."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Optimizer steps over which the learning rate rises from 0."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """AdamW's weight decay."""
    max_grad_norm: Annotated[float, Field(gt=0)] = 1.0
    """Gradients with a larger norm are clipped to it."""
    beta: Annotated[float, Field(ge=0)] = 0.001
    """Weight of the KL term against the starting policy; 0 needs no reference model."""
    loss: Literal["grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo"] = "dapo"
    """TRL's loss types. r is the ratio of the new to the old probability, A the advantage.

    grpo: the clipped objective, averaged over each sequence's tokens, then over sequences; favours short completions.
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
    """For cispo this is the upper bound of the ratio itself, not the margin above 1; its default there is 5.0."""
    scale_rewards: Literal["group", "batch", "none"] = "group"
    """The divisor of the difference between a reward and its group's mean.

    group: the standard deviation of the group's rewards.
    batch: the standard deviation of all rewards of the batch.
    none: no division (Dr. GRPO, arXiv:2503.20783).
    """
    shuffle: bool = False
    """Shuffle the prompts. Mecklenburg keeps their order, so that runs can be compared step by step."""
    dynamic_sampling: DynamicSamplingSettings | None = None
    """Replace groups without a learning signal, whose rewards are all equal; true uses the defaults."""
    skip_solved: SkipSolvedSettings | None = None
    """Sample prompts less often that are always solved; true uses the defaults."""
    gradient_checkpointing: bool = False
    """Recompute each layer in the backward pass: less memory, more time."""
    checkpoint_every: Count = 25
    """Optimizer steps between checkpoints, from which an interrupted run resumes."""
    keep_checkpoints: Count = 2
    """Number of the newest checkpoints that are kept on disk."""
    save_rollouts: bool = True
    """Store every completion of training, with its rewards, in the run's folder."""
    token_records: Annotated[int, Field(ge=0)] = 4
    """Number of prompts of each step whose completions are stored with statistics of every token."""
    lens: LensSettings | None = LensSettings()
    """Details recorded of each step besides its rewards; null records none."""
    report_to: list[Tracker] = []
    """Trackers of the transformers Trainer, such as tensorboard (its files are in RUN/tensorboard) or trackio. They get
    the scores on held-out problems too, as ``eval/pass@8`` with ``eval/pass@8_low`` and ``eval/pass@8_high``."""

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
                f"clip_high is {self.clip_high}, which for cispo is the upper bound of the ratio itself: every update "
                f"would shrink; use {CISPO_BOUND}, or leave it out"
            )
        return self

    @model_validator(mode="after")
    def _whole_micro_batches(self) -> TrainingSettings:
        sequences = self.prompts_per_step * self.generations
        if sequences % self.micro_batch:
            divisor = max(n for n in range(1, self.micro_batch + 1) if sequences % n == 0)
            raise ValueError(
                f"micro_batch is {self.micro_batch}, which does not divide prompts_per_step × generations = "
                f"{sequences}; use {divisor}"
            )
        return self


class SftSettings(Section):
    """Supervised fine-tuning on the task's reference solutions, with the loss on completion tokens only."""

    examples: Count = 11_000
    """Number of reference solutions to train on; Mecklenburg has about 11,000."""
    epochs: Annotated[float, Field(gt=0)] = 10
    """Passes over the examples."""
    batch_size: Count = 16
    """Examples per optimizer step."""
    learning_rate: Annotated[float, Field(gt=0)] = 1e-5
    """AdamW's peak learning rate."""
    schedule: Literal["constant", "linear", "cosine"] = "cosine"
    """Learning rate after the warm-up: constant, or falling to 0 at the last step."""
    warmup_steps: Annotated[int, Field(ge=0)] = 50
    """Optimizer steps over which the learning rate rises from 0."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.01
    """AdamW's weight decay."""
    adam_beta2: Annotated[float, Field(gt=0, lt=1)] = 0.999
    """AdamW's β₂, the decay rate of its average of squared gradients."""
    max_length: Count = 1280
    """Maximum length of an example, prompt and completion together, in tokens; longer ones are truncated."""
    attempts: tuple[int, int] | None = None
    """Minimum and maximum number of failed attempts before the solution in a reference trace; null is the task's
    default."""
    from_scratch: bool = False
    """Start from random weights (the tiny policy only)."""
    checkpoint_every: Count = 500
    """Optimizer steps between checkpoints, from which an interrupted run resumes."""
    score: bool = False
    """Evaluate the policy at the end, and write its score into the model's recipe.json."""


class RftSettings(Section):
    """Rejection-sampling fine-tuning: sample, filter, select, fit, and repeat (Deng et al. 2025, §4.4.1).

    `rollout` sets how responses are sampled. `sft` sets what the keys below do not: weight decay, β₂, the maximum
    length of an example, checkpoints.
    """

    model_config = ConfigDict(validate_by_name=True, validate_by_alias=True, serialize_by_alias=True)

    iterations: Count = 4
    """Number of times that responses are sampled and trained on."""
    prompts: Count | None = None
    """Number of training problems per iteration, in turn; null is all of them each time."""
    samples: Count = 8
    """Number of responses sampled per problem: k."""
    filters: list[str | dict[str, Any]] = [
        "has_answer", "has_digit", "cut_after_answer", {"max_redundancy": {"limit": 0.31}},
    ]  # fmt: skip
    """Rules that every response must pass, in this order: names, a name with its hyperparameters, or the import path
    of your own function with `@rft_filter`, like my_pkg.rules:polite. The default is those of the paper.

    - `has_answer`: it states an answer in the task's mark, such as `\\boxed{…}` or `<answer>…</answer>`.
    - `has_digit`: it has at least one digit.
    - `cut_after_answer`: drops none; truncates a response after its first answer, which is then the judged one.
    - `max_redundancy`: its 3-gram redundancy is at most `limit`, 0.31.
    - `max_length`: it has at most `tokens` tokens.
    - `finished`: it ended by itself, not at the length limit.
    - `dedupe`: no earlier response to the problem is the same up to white space.
    """
    answer_mark: str | None = None
    """Text that an answer begins with, for the filters has_answer and cut_after_answer; null is the task's mark."""
    selector: str | dict[str, Any] = "random"
    """The correct responses to train on: those that score highest. An import path names your own function with
    `@rft_selector`.

    - `random`: any.
    - `entropy`: those with the highest mean token entropy.
    - `branching`: those with the highest mean branching factor.
    - `shortest`: those with the fewest tokens.
    - `diverse`: spread over problems, and over the distinct answers to each.
    """
    budget: Count = 1100
    """Maximum number of responses to train on per iteration."""
    per_prompt: Count | None = 4
    """Maximum number of these per problem; null is no limit."""
    noise: Annotated[float, Field(ge=0, lt=1)] = 0.05
    """Share of the selected set taken from the incorrect responses that pass the filters."""
    from_: Literal["current", "base"] = Field(default="current", alias="from")
    """The policy that an iteration fits: that of the previous iteration, or always the run's initial policy. Responses
    are sampled from that of the previous iteration in either case."""
    epochs: Annotated[float, Field(gt=0)] = 1
    """Passes over the selected set."""
    batch_size: Count = 32
    """Responses per optimizer step."""
    learning_rate: Annotated[float, Field(gt=0)] = 1e-5
    """AdamW's peak learning rate."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Learning rate of each fit after the warm-up: constant, or falling to 0 at the last step."""
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
    """Evaluation of a policy."""

    protocol: str = "mecklenburg"
    """The name of a protocol, which sets how completions are sampled. `rollout.max_tokens` overrides its limit."""
    problems: Count | None = None
    """Number of held-out problems; null is `task.holdout_problems`."""
    samples: Count | None = None
    """Completions per problem; null is the protocol's number."""
    every: Annotated[int, Field(ge=0)] = 0
    """Optimizer steps between evaluations during training; 0 is none."""
    ends: Annotated[int, Field(ge=0)] = 64
    """Maximum number of held-out problems scored before the first and after the last step if `every` is 0; 0 is none.
    If `every` is not 0, both ends are scored like every other evaluation."""
    batch_size: Count | None = None
    """Sequences sampled at a time; null is as many as fit into memory."""

    @field_validator("protocol")
    @classmethod
    def _known_protocol(cls, value: str) -> str:
        from explorl.evaluation.protocols import protocol

        protocol(value)
        return value


class Config(Section):
    """The whole configuration of a run."""

    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    """Seed of the order of the prompts, the sampling, and the initial values of new weights."""
    model: ModelSettings = ModelSettings()
    task: TaskSettings = TaskSettings()
    rollout: RolloutSettings = RolloutSettings()
    training: TrainingSettings = TrainingSettings()
    strategies: list[str | dict[str, Any]] = []
    """Exploration strategies, in the order in which they act: names, or a name with its hyperparameters."""
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
                    f"{strategy.name} compares answers, and task {self.task.name!r} has none (has_answers is False); "
                    f"leave out {strategy.name}, or use a task that has answers, like 'countdown'"
                )
        return self

    @model_validator(mode="after")
    def _dynamic_sampling_fits(self) -> Config:
        if self.training.dynamic_sampling is None:
            return self
        if self.rollout.engine == "vllm":
            raise ValueError("training.dynamic_sampling is not supported with vLLM; set rollout.engine to null")
        prompts, problems = self.training.prompts_per_step, self.task.train_problems
        if problems is not None and problems <= prompts:
            raise ValueError(
                f"training.dynamic_sampling needs more prompts than a step has: task.train_problems is {problems} "
                f"and training.prompts_per_step {prompts}; use more problems, such as {10 * prompts}"
            )
        return self

    def dump(self) -> dict[str, Any]:
        """Return the configuration as plain values for YAML and JSON."""
        return self.model_dump(mode="json")


def _constructs(info: ValidationInfo) -> bool:
    """Return whether strategies of other packages may be constructed for checks: not if a file is only shown."""
    return not info.context or bool(info.context["construct"])
