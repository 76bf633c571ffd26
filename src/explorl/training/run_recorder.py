"""A run folder and held-out pass@k for a plain TRL script, so that `explorl report` shows it.

recorder = RunRecorder("runs/mine")
trainer = GRPOTrainer(..., callbacks=[PassAtK(held_out, reward, every=50)])   # or ExplorationTrainer
recorder.watch(trainer)
trainer.train()

explorl report runs/mine
"""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from numbers import Integral
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback
from trl.trainer.utils import is_async_callable

from explorl.core.store import RunStore, StoreError, cleaned
from explorl.evaluation import Evaluation, Protocol, evaluate
from explorl.models import Policy
from explorl.rollout import SamplingParams
from explorl.tasks import Problem, Task, Verdict
from explorl.training.grpo.activity import Activity
from explorl.training.grpo.construction import check_chat_template, check_prompts
from explorl.training.grpo.logged_columns import logged_columns
from explorl.training.grpo.rewards import check_finite, checked_rewards
from explorl.training.grpo.stopping import stop_strings_of
from explorl.training.grpo.trainer import ExplorationTrainer
from explorl.training.grpo.trl_adapter import logs_of, rendered_prompt
from explorl.training.tracking import calling_handler, log_scores, store_evaluation

Reward = Callable[..., Sequence[float | None]]
"""A reward function as TRL calls it, with prompts, completions and the data set's columns; one number for each."""


class PassAtK(TrainerCallback):
    """Evaluates the policy on held-out prompts before training, every N steps, and at the end.

    Args:
        dataset: Rows with ``prompt`` (text or messages) and the columns that the reward function takes.
        reward: A reward function like TRL's.
        every: Steps between two evaluations; None evaluates only at the start and at the end.
        samples: Completions per prompt; pass@k is computed for every power of two up to it.
        max_tokens: Maximum length of a completion; None means the trainer's ``max_completion_length``.
        stop: Strings that end a completion; None means those of the trainer, and () none.
        temperature: Sampling temperature.
        correct: Minimum reward of a correct completion.
        batch_size: Maximum number of completions sampled together; None means as many as fit into memory.
        seed: Seed of the samples, the same at every evaluation.
        name: Name of the data set on the page.

    ``history`` has the evaluations by step; each is also in the trainer's log history, in every tracker of its
    ``report_to`` (as ``eval/pass@8``, with the ends of the interval), and in the folder of the `RunRecorder` that
    watches the trainer. With several processes the main one evaluates while the others wait, which
    requires the whole model in one process: no FSDP, no DeepSpeed stage 3.
    """

    def __init__(
        self,
        dataset: Any,
        reward: Reward,
        *,
        every: int | None = None,
        samples: int = 8,
        max_tokens: int | None = None,
        stop: str | Sequence[str] | None = None,
        temperature: float = 1.0,
        correct: float = 1.0,
        batch_size: int | None = None,
        seed: int = 0,
        name: str = "held-out",
    ) -> None:
        _check_whole("every", every, "use 1 or more, or None for start and end only", optional=True)
        _check_whole("samples", samples, "use 1 or more, such as 8")
        _check_whole("max_tokens", max_tokens, "use 1 or more, or None for the trainer's own limit", optional=True)
        _check_whole("batch_size", batch_size, "use 1 or more, or None for what memory allows", optional=True)
        if correct != correct:
            raise ValueError("correct is nan; use the minimum reward of a correct completion, such as 1.0")
        self.task = _Rows(dataset, reward, correct, name)
        self.every, self.samples, self.max_tokens, self.temperature = every, samples, max_tokens, temperature
        self.stop = None if stop is None else SamplingParams(stop=stop).stop
        self.batch_size, self.seed = batch_size, seed
        self.history: dict[int, Evaluation] = {}
        self.recorder: RunRecorder | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        for step in [step for step in self.history if step > state.global_step or state.global_step == 0]:
            del self.history[step]  # from an earlier training, or of steps that are repeated
        if state.global_step == 0:
            self._score(args, state, control, **kwargs)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        # Evaluate here already: trackers end their run in on_train_end before this callback is called. Not with
        # load_best_model_at_end, which chooses the final weights after the last step.
        last = control.should_training_stop and not args.load_best_model_at_end
        if last or (self.every and state.global_step % self.every == 0):
            self._score(args, state, control, **kwargs)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._score(args, state, control, **kwargs)

    def _score(self, args: Any, state: Any, control: Any, *, model: Any, processing_class: Any, **_: Any) -> None:
        step = state.global_step
        if step in self.history or not state.is_world_process_zero:
            return
        max_tokens = self.max_tokens or getattr(args, "max_completion_length", None) or 256
        stop = stop_strings_of(getattr(args, "generation_kwargs", None), model) if self.stop is None else self.stop
        sampling = SamplingParams(temperature=self.temperature, max_tokens=max_tokens, stop=stop)
        protocol = Protocol(self.samples, sampling, "PassAtK")
        tokenizer = getattr(processing_class, "tokenizer", processing_class)
        if tokenizer is None:
            raise ValueError("PassAtK has no tokenizer to sample with; set the trainer's processing_class")
        for problem in self.task.problems("holdout"):
            check_chat_template(problem.data, "the data set of PassAtK", processing_class)
        self.task.state = state
        policy = Policy(str(getattr(model.config, "_name_or_path", "") or "policy"), model, tokenizer)
        was_training = model.training
        model.eval()
        try:
            with torch.random.fork_rng(_devices(model)):  # sampling must not change the training
                evaluation = evaluate(
                    policy, self.task, self.task.problems("holdout"), protocol,
                    name="pass@k", seed=self.seed, batch_size=self.batch_size,
                )  # fmt: skip
        finally:
            model.train(was_training)
        handler = calling_handler()
        facts = {} if self.history else {"task": self.task.name, "strategies": _strategies(handler)}
        self.history[step] = evaluation
        log_scores(handler, args, state, control, evaluation, facts)
        if self.recorder is not None:
            self.recorder.store_evaluation(args, state, evaluation)


class RunRecorder(TrainerCallback):
    """Stores what a TRL trainer logs, samples and evaluates in a run's folder, as `explorl train` does.

    Args:
        folder: A new folder, or the folder of the run that the trainer resumes.
        rollouts_every: Steps between two generation batches whose completions are stored; 0 stores none.
        token_records: Number of prompts of each batch with records per token; needs an `ExplorationTrainer`, which also
            inspects some completions (its argument ``lens``). 0 stores none.

    Call `watch` with the trainer before it trains. A trainer that samples nothing, such as `SFTTrainer`, has no
    completions to store.
    """

    def __init__(self, folder: str | Path, *, rollouts_every: int = 1, token_records: int = 4) -> None:
        for name, value in (("rollouts_every", rollouts_every), ("token_records", token_records)):
            if value < 0:
                raise ValueError(f"{name} is {value}; use 0 for none, or 1 or more")
        self.store = RunStore(folder)
        self.rollouts_every, self.token_records = rollouts_every, token_records
        self._config: dict[str, Any] | None = None
        self._state: Any = None
        self._kind = "grpo"
        self._trainer: Any = None
        self._latest: Any = None
        self._handler: Any = None

    def watch(self, trainer: Any) -> RunRecorder:
        """Record this trainer and the `PassAtK` among its callbacks; return the recorder."""
        for other in trainer.callback_handler.callbacks:
            if other is self and self._handler is trainer.callback_handler:
                return self
            if isinstance(other, RunRecorder) and other is not self and other.folder == self.folder:
                raise ValueError(f"the trainer is already recorded in {self.store.folder}; watch it once")
        if self not in trainer.callback_handler.callbacks:  # unless it was passed as a callback
            trainer.add_callback(self)
        self._handler = trainer.callback_handler
        self._config = _config(trainer, self._attach_scores())
        samples = "rewards" in getattr(trainer, "_logs", {})  # GRPOTrainer and RLOOTrainer
        self._kind = "grpo" if samples else "sft"
        if isinstance(trainer, ExplorationTrainer):
            records = self.token_records if self.rollouts_every else 0
            trainer.listen(self._store_rollouts, records, after=self._store_rollouts if records else None)
        elif samples:
            self._trainer = trainer
        return self

    @property
    def folder(self) -> Path:
        """The run's folder as an absolute path."""
        return self.store.folder.resolve()

    def _attach_scores(self) -> PassAtK | None:
        """Connect the `PassAtK` among the trainer's callbacks, which may be added after the recorder, and return it."""
        scores = [callback for callback in self._handler.callbacks if isinstance(callback, PassAtK)]
        if len(scores) > 1:
            raise ValueError(f"{len(scores)} PassAtK callbacks cannot share the folder {self.store.folder}; use one")
        for callback in scores:
            callback.recorder = self
        return scores[0] if scores else None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._config is not None:
            self._config |= _evaluation_config(self._attach_scores())
        self._begin(args, state)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._handler is not None:
            self._attach_scores()
        self._latest = self._logged()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._state = None  # another train() starts or resumes a run

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        if state.is_world_process_zero and logs and "loss" in logs:  # the final summary has no loss
            self._begin(args, state)
            self.store.append_metrics({"step": state.global_step, "kind": "train", **logs})

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._trainer is None or not state.is_world_process_zero:
            return
        logs = logs_of(self._trainer)
        if self._logged() is self._latest:  # no new generation batch in this step
            return
        batch = args.per_device_train_batch_size * args.steps_per_generation * args.world_size
        self._store_rollouts(state.global_step, logged_columns(logs, batch, partial(rendered_prompt, self._trainer)))

    def _logged(self) -> Any:
        """Return the last logged advantage; its identity tells whether a batch was logged since."""
        advantages = None if self._trainer is None else logs_of(self._trainer)["advantages"]
        return advantages[-1] if advantages else None

    def store_evaluation(self, args: Any, state: Any, evaluation: Evaluation) -> None:
        """Store an evaluation of the policy at this step."""
        self._begin(args, state)
        store_evaluation(self.store, state.global_step, evaluation)

    def _store_rollouts(self, step: int, columns: Mapping[str, Sequence[Any]]) -> None:
        if self.rollouts_every and step % self.rollouts_every == 0:
            self.store.write_rollouts(step, columns)

    def _begin(self, args: Any, state: Any) -> None:
        """Start the run's folder, or rewind it to the step that the trainer resumes from."""
        # compare states: on_train_end is not called if training fails
        if self._state is state or not state.is_world_process_zero:
            return
        if self._config is None:
            raise ValueError("RunRecorder has no trainer to record; call recorder.watch(trainer) before train()")
        self._state = state
        if state.global_step == 0 and self.store.config_path.exists() and self.store.has_steps:
            raise StoreError(
                f"{self.store.folder} already holds a run; use another folder, or resume that run with "
                "trainer.train(resume_from_checkpoint=True)"
            )
        self.store.begin(self._config, self._kind)
        self.store.rewind(state.global_step)
        resumed = f"checkpoint-{state.global_step}" if state.global_step else None
        self.store.record_start(seed=args.seed, resumed_from=resumed)


class _Rows(Task):
    """The rows of a data set as problems, verified by a reward function."""

    splits = ("holdout",)

    def __init__(self, dataset: Any, reward: Reward, correct: float, name: str) -> None:
        self.name, self._reward, self._threshold = name, reward, correct
        self.data, self.state = _rows(dataset), None
        if not callable(reward):
            raise ValueError(
                f"the reward function of PassAtK is {reward!r}; use one function, like those of TRL's reward_funcs"
            )
        function_name = getattr(reward, "__name__", repr(reward))
        if is_async_callable(reward):
            raise ValueError(f"the reward function {function_name} of PassAtK is asynchronous; use a regular function")
        parameter = inspect.signature(reward).parameters.get("completion_ids")
        if parameter is not None and parameter.default is parameter.empty:
            raise ValueError(
                f"the reward function {function_name} of PassAtK needs completion_ids, but gets only texts; use "
                "one that reads completions"
            )

    def problems(self, split: str, *, limit: int | None = None) -> list[Problem]:
        return [Problem(str(index), row) for index, row in enumerate(self.data)][:limit]

    def prompt(self, problem: Problem, template: str | None = None) -> Any:
        return problem.data["prompt"]

    def verify(self, completion: str | bytes, problem: Problem, *, opened: bool = False) -> Verdict:
        return self.verify_many([completion], [problem])[0]

    def verify_many(
        self, completions: Sequence[str | bytes], problems: Sequence[Problem], *, opened: Sequence[bool] | None = None
    ) -> list[Verdict]:
        rows = [problem.data for problem in problems]
        texts = [text if isinstance(text, str) else text.decode("utf-8", "replace") for text in completions]
        formatted = [
            text if isinstance(row["prompt"], str) else [{"role": "assistant", "content": text}]
            for text, row in zip(texts, rows, strict=True)
        ]
        columns = {key: [row.get(key) for row in rows] for key in rows[0]}
        prompts = columns.pop("prompt")
        for name in ("completion", "completion_ids"):  # TRL omits these columns
            columns.pop(name, None)
        arguments = {"prompts": prompts, "completions": formatted, **columns}
        signature = inspect.signature(self._reward)
        takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in signature.parameters.values())
        optional = {"trainer_state": self.state, "log_extra": _discard, "log_metric": _discard}
        arguments |= {name: value for name, value in optional.items() if takes_all or name in signature.parameters}
        try:
            signature.bind(**arguments)
        except TypeError as error:
            raise ValueError(
                f"the reward function of PassAtK cannot be called with {', '.join(arguments)}: {error}; the data set "
                "needs a column for each of its arguments"
            ) from None
        name = getattr(self._reward, "__name__", "reward")
        values = checked_rewards(name, self._reward(**arguments))
        if len(values) != len(texts):
            raise ValueError(
                f"the reward function returned {len(values)} numbers for {len(texts)} completions; return one for each"
            )
        numbers = [[math.nan if value is None else float(value)] for value in values]
        check_finite(torch.tensor(numbers, dtype=torch.float64), [name])
        return [Verdict(value is not None and bool(value >= self._threshold), answer=text.strip()[:200])
                for value, text in zip(values, texts, strict=True)]  # fmt: skip


def _config(trainer: Any, scores: PassAtK | None) -> dict[str, Any]:
    """Return the run's configuration with the keys of `explorl train`, and TRL's arguments under ``trl``."""
    args = trainer.args
    config = {
        "model": {"name": str(getattr(trainer.model.config, "_name_or_path", ""))},
        "rollout": _existing(args, temperature="temperature", max_tokens="max_completion_length"),
        "strategies": [repr(strategy) for strategy in getattr(trainer, "strategies", [])],
        "training": {
            "steps": args.max_steps if args.max_steps > 0 else None,
            "iterations": 1,
            "learning_rate": args.learning_rate,
            **_existing(args, generations="num_generations", beta="beta", loss="loss_type"),
        },
        "seed": args.seed,
        "trl": {key: value for key, value in args.to_dict().items() if value is not None},
        **_evaluation_config(scores),
    }
    return dict(cleaned(json.loads(json.dumps(config, default=str))))


def _strategies(handler: Any) -> str:
    """Return the strategies of the trainer that this handler belongs to, as text."""
    trainers = [callback.trainer for callback in getattr(handler, "callbacks", ()) if isinstance(callback, Activity)]
    return ", ".join(repr(strategy) for trainer in trainers for strategy in trainer.strategies)


def _existing(args: Any, **names: str) -> dict[str, Any]:
    """Return those of the named arguments that this trainer has, by key."""
    return {key: getattr(args, name) for key, name in names.items() if hasattr(args, name)}


def _evaluation_config(scores: PassAtK | None) -> dict[str, Any]:
    """Return the part of the configuration about evaluation."""
    if scores is None:
        return {"task": {"name": ""}, "evaluation": None}
    evaluation = {"every": scores.every, "problems": len(scores.task.data), "samples": scores.samples}
    return {"task": {"name": scores.task.name}, "evaluation": evaluation}


def _rows(dataset: Any) -> list[dict[str, Any]]:
    """Return the rows of a data set; raise if one has no prompt."""
    if isinstance(dataset, Mapping):
        splits = ", ".join(map(repr, dataset))
        raise ValueError(f"the data set of PassAtK is a mapping of {splits}; use one of these")
    if dataset is None or isinstance(dataset, str):
        raise ValueError(f"the data set of PassAtK is {dataset!r}; use a datasets.Dataset or a list of rows")
    rows = [dict(row) for row in dataset]
    if not rows:
        raise ValueError("the data set of PassAtK is empty; use 1 row or more, such as 100")
    check_prompts(rows, "the data set of PassAtK")
    for name in ("prompts", "completions"):
        if any(name in row for row in rows):
            raise ValueError(
                f"the data set of PassAtK has a column {name!r}, which is an argument of reward functions for other "
                "values; rename it"
            )
    return rows


def _check_whole(name: str, value: Any, good: str, *, optional: bool = False) -> None:
    if not (optional and value is None) and (not isinstance(value, Integral) or value < 1):
        raise ValueError(f"{name} is {value!r}; {good}")


def _discard(*args: Any, **kwargs: Any) -> None:
    """Ignore what a reward function logs: it belongs to the training, not to its evaluation."""


def _devices(model: Any) -> list[int]:
    device = next(model.parameters()).device
    return [device.index or 0] if device.type == "cuda" else []
