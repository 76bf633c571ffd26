"""Run rejection-sampling fine-tuning in a folder, started or resumed.

Each iteration samples responses from the previous policy, filters them, selects some, fine-tunes a policy on them and
evaluates it. A stage is complete when its last file exists. A killed run resumes with the stage that it was in and ends
with the same weights as an uninterrupted one (bit for bit on a CPU).
"""

from __future__ import annotations

import gc
import os
import shutil
import time
from functools import partial
from pathlib import Path

import numpy as np
from rich.console import Console

from explorl.core.config import Config, ConfigError, check_precision, rft_config
from explorl.core.store import RunStore, read_json, write_json
from explorl.core.terminal import ProgressLines, literal
from explorl.evaluation.completions import Columns
from explorl.evaluation.evaluation import token_mean
from explorl.evaluation.prompts import check_prompts
from explorl.evaluation.sample import data_digest
from explorl.models import Policy
from explorl.tasks import Problem, Prompt, get_task
from explorl.tasks.base import checked_prompt, problems_of
from explorl.training.callbacks import progress_bar
from explorl.training.grpo.logged_columns import prompt_text
from explorl.training.rft import filters
from explorl.training.rft.answer_spans import answer_mark
from explorl.training.rft.fitting import check_turns, derived_seed, fit
from explorl.training.rft.folder import IterationFolder, Stage, link_folder
from explorl.training.rft.registry import build_filters, build_selector, name_of
from explorl.training.rft.samples import CUT, to_columns
from explorl.training.rft.sampling import PoolSampler, check_room
from explorl.training.rft.selectors import NEED_RECORDS, Selection, select
from explorl.training.rft.summary import empty_selection_text, scores_text, selection_facts, selection_text
from explorl.training.run_setup import begin_run, check_holdout, configured_policy, evaluate_holdout

PART_SIZE = 2048
"""Responses that are sampled and stored at a time."""
REPORTED_PROBLEMS = 64
"""Problems of each iteration whose responses are written to `rollouts/` for reports."""


class NoCorrectResponse(ValueError):
    """Raised for an iteration without a correct response; the message has the counts and the pool's path."""


def run_rft(config: Config, store: RunStore, *, console: Console, alone: bool = False) -> Path:
    """Run all iterations from the run's current stage; return the folder of the last policy.

    Nothing is written before the configuration, the task and the first policy are checked. ``alone`` locks the folder
    against other processes.
    """
    return _Loop(rft_config(config), store, console).run(alone)


def next_stage(config: Config, store: RunStore) -> tuple[int, Stage] | None:
    """Return the iteration and stage that a run continues with; None if it is finished."""
    for number in range(1, config.rft.iterations + 1):
        stage = IterationFolder(store, number).stage(is_scored(config, number))
        if stage is not None:
            return number, stage
    return None


def is_scored(config: Config, number: int) -> bool:
    """Tell whether the policy of an iteration is evaluated; 0 is the starting policy."""
    settings = config.evaluation
    if not settings.every:
        return bool(settings.ends)
    return number % settings.every == 0 or number == config.rft.iterations


def check_rft(config: Config) -> None:
    """Raise `ConfigError` for settings that RFT does not support, before weights are loaded."""
    check_precision(config.model.dtype)
    if int(os.environ.get("WORLD_SIZE") or 1) > 1:
        raise ConfigError(
            f"explorl rft runs in one process, but WORLD_SIZE is {os.environ['WORLD_SIZE']}; start it without torchrun "
            "or accelerate"
        )
    if config.strategies:
        raise ConfigError(
            f"strategies is {config.strategies!r}, but explorl rft has no strategies; remove it, or use explorl train"
        )
    if config.rollout.tools is not None:
        raise ConfigError(
            f"rollout.tools is {config.rollout.tools!r}, but explorl rft samples without tools; remove it"
        )
    if config.rollout.engine == "vllm":
        raise ConfigError("rollout.engine is vllm, which explorl rft does not support; use explorl or generate")
    name = build_selector(config.rft.selector)[0]
    if config.rollout.engine == "generate" and name in NEED_RECORDS:
        raise ConfigError(
            f"rft.selector is {name}, which model.generate does not record; set rollout.engine to explorl, or "
            "rft.selector to random, shortest or diverse"
        )


class _Loop:
    def __init__(self, config: Config, store: RunStore, console: Console) -> None:
        check_rft(config)
        self.config, self.store, self.console = config, store, console
        self.task = get_task(config.task.name, **config.task.options)
        self.problems = problems_of(self.task, "train", config.task.train_problems)
        if config.evaluation.every or config.evaluation.ends:
            check_holdout(config, self.task, self.problems)
        template = config.task.template
        prompts = [checked_prompt(self.task, self.task.prompt(problem, template)) for problem in self.problems]
        self.prompts = dict(zip([problem.id for problem in self.problems], prompts, strict=True))
        self.mark = config.rft.answer_mark or answer_mark(self.task, prompts[0])
        self._check_mark()
        self._loaded: Policy | None = None

    def _check_mark(self) -> None:
        names = [name for name in map(name_of, self.config.rft.filters) if name in filters.NEED_MARK]
        if names and self.mark is None:
            raise ConfigError(
                f"rft.filters has {' and '.join(names)}, but the task {self.task.name!r} has no answer mark; set "
                "rft.answer_mark, for example to <answer>, give the task's class an attribute answer_mark, or remove "
                f"{'that filter' if len(names) == 1 else 'those filters'}"
            )

    # ------------------------------------------------------------------ the run
    def run(self, alone: bool) -> Path:
        config, store = self.config, self.store
        self._check_policy(self._policy(self._first_policy(next_stage(config, store))))
        if alone:
            store.lock()
        stage = next_stage(config, store)
        resumed = f"iteration {stage[0]}, {stage[1]}" if stage and store.has_steps else None
        rows = [[problem.id, self.prompts[problem.id], data_digest(problem)] for problem in self.problems]
        step = stage[0] - 1 if stage else config.rft.iterations
        begin_run("rft", config, store, rows, step=step, resumed_from=resumed, say=self._print)
        if stage:
            shutil.rmtree(store.folder / "model", ignore_errors=True)  # left by a finished run that is extended
        if resumed:
            self._print(f"resuming with {resumed}")
        if is_scored(config, 0):
            self._score(0)
        for number in range(1, config.rft.iterations + 1):
            self._iterate(IterationFolder(store, number))
        model = store.folder / "model"
        if not model.is_dir():
            link_folder(IterationFolder(store, config.rft.iterations).model, model)
        return model

    def _iterate(self, iteration: IterationFolder) -> None:
        """Run the remaining stages of an iteration."""
        number = iteration.number
        if not iteration.pool_path.exists():
            self._sample(iteration)
        if not iteration.is_selected:
            self._select(iteration)
        if not iteration.model.is_dir():
            self._loaded = None
            gc.collect()  # the fit needs the memory
            selected = iteration.selected()
            examples = [
                {"prompt": self._prompt(problem, prompt), "completion": text}
                for problem, prompt, text in zip(
                    selected["problem"], selected["prompt"], selected["completion"], strict=True
                )
            ]
            start = self.config.model.name if self.config.rft.from_ == "base" else self._model(number - 1)
            seed = derived_seed(self.config.seed, number, "fit")
            began = time.monotonic()
            fit(self.config, iteration.fit, start, examples, seed=seed, console=self.console)
            write_json(iteration.folder / "fit" / "seconds.json", time.monotonic() - began)
        self._log(iteration)
        if is_scored(self.config, number):
            self._score(number)

    def _prompt(self, problem: str, sampled_prompt: str | None = None) -> Prompt:
        """Return a problem's prompt; raise `ConfigError` if it is no longer ``sampled_prompt``."""
        prompt = self.prompts.get(problem)
        if prompt is None or (sampled_prompt is not None and prompt_text(prompt) != sampled_prompt):
            change = "no longer has problem" if prompt is None else "has another prompt for problem"
            raise ConfigError(
                f"the task {self.config.task.name!r} {change} {problem!r}, for which this run has sampled responses; "
                "restore the task and its files, or start a new run"
            )
        return prompt

    def _model(self, number: int) -> str:
        """Return the policy after ``number`` iterations."""
        return str(IterationFolder(self.store, number).model) if number else self.config.model.name

    def _first_policy(self, stage: tuple[int, Stage] | None) -> str:
        """Return the policy that the run needs first."""
        return self._model(0 if stage is None else stage[0] if stage[1] == "evaluation" else stage[0] - 1)

    def _policy(self, name: str) -> Policy:
        """Load a policy to sample from; only the latest stays in memory."""
        if self._loaded is None or self._loaded.name != name:
            self._loaded = None
            self._loaded = configured_policy(self.config, name)
        return self._loaded

    def _check_policy(self, policy: Policy) -> None:
        prompts, template = list(self.prompts.values()), self.config.task.template
        check_prompts(prompts, policy, self.task, template)
        check_turns(prompts[0], policy, self.task, template)
        check_room(self.config, policy, prompts)

    def _print(self, text: str) -> None:
        self.console.print(literal(text), soft_wrap=True, highlight=False)

    # ------------------------------------------------------------------ sampling
    def _iteration_problems(self, number: int) -> list[Problem]:
        """Return the problems of an iteration, which cycle through all problems."""
        count = min(self.config.rft.prompts or len(self.problems), len(self.problems))
        first = (number - 1) * count
        return [self.problems[(first + index) % len(self.problems)] for index in range(count)]

    def _sample(self, iteration: IterationFolder) -> None:
        problems, samples = self._iteration_problems(iteration.number), self.config.rft.samples
        size = max(1, PART_SIZE // samples)
        parts = [problems[start : start + size] for start in range(0, len(problems), size)]
        label = f"iteration {iteration.number}: sampling"
        self._print(f"{label} {len(problems):,} problems × {samples}")
        sampler: PoolSampler | None = None
        bar, lines = progress_bar(self.console), ProgressLines(self.console)
        with bar:
            progress = bar.add_task(label, total=len(problems) * samples, note="")
            for index, part in enumerate(parts):
                if not iteration.part(index).exists():
                    policy = self._policy(self._model(iteration.number - 1))
                    sampler = sampler or PoolSampler(self.config, policy, self.task, self.mark)
                    prompts = [self.prompts[problem.id] for problem in part]
                    began, seed = time.monotonic(), derived_seed(self.config.seed, iteration.number, "sample", index)
                    responses = sampler.sample(part, prompts, seed, lambda count: bar.advance(progress, count))
                    iteration.write_part(index, responses, time.monotonic() - began)
                bar.update(progress, completed=min((index + 1) * size, len(problems)) * samples)
                if lines.due and index + 1 < len(parts):
                    lines.say(f"{label}: {(index + 1) * size * samples:,} of {len(problems) * samples:,}")
        if sampler is not None:
            sampler.engine.release()
        iteration.join_parts(len(parts))

    # ------------------------------------------------------------------ filtering and selecting
    def _select(self, iteration: IterationFolder) -> None:
        settings = self.config.rft
        pool, _ = iteration.pool()
        special = self._policy(self._model(iteration.number - 1)).tokenizer.all_special_tokens
        last = "no_special_tokens", partial(filters.no_special_tokens, tokens=special)
        kept, results = filters.apply_filters([*build_filters(settings.filters), last], pool)
        if not results[-1].dropped:
            results.pop()
        if not any(sample.correct for sample in kept):
            raise NoCorrectResponse(empty_selection_text(iteration, pool, kept, results))
        name, selector = build_selector(settings.selector)
        selection = select(
            kept, selector, budget=settings.budget, per_prompt=settings.per_prompt, noise=settings.noise,
            seed=[derived_seed(self.config.seed, iteration.number, "select")],
        )  # fmt: skip
        facts = selection_facts(pool, kept, results, selection, name, settings.budget)
        dropped = [(result.name, sample) for result in results for sample in result.dropped]
        iteration.write_selection(
            {
                "filter": [filter_name for filter_name, _ in dropped],
                "problem": [sample.problem for _, sample in dropped],
                "sample": [sample.sample for _, sample in dropped],
                "correct": [sample.correct for _, sample in dropped],
            },
            self._selected(selection),
            facts,
        )
        self._print(f"iteration {iteration.number}: {selection_text(facts)}")

    def _selected(self, selection: Selection) -> Columns:
        prompts = [prompt_text(self._prompt(sample.problem)) for sample in selection.samples]
        columns = to_columns(selection.samples)
        selected = {name: values for name, values in columns.items() if not name.startswith(CUT)}
        return {"prompt": prompts, **selected, "score": list(selection.scores)}

    # ------------------------------------------------------------------ metrics and scores
    def _log(self, iteration: IterationFolder) -> None:
        """Write a line of metrics for the iteration, and some of its responses for reports."""
        if _has_line(self.store, "train", iteration.number):
            return
        pool, columns = iteration.pool()
        losses = [line["loss"] for line in iteration.fit.metrics() if line.get("loss") is not None]
        before = max((line.get("num_tokens") or 0 for line in self.store.metrics()), default=0)
        seconds_path = iteration.folder / "fit" / "seconds.json"
        seconds = sum(columns["seconds"]) + (read_json(seconds_path) if seconds_path.exists() else 0.0)
        correct = float(np.mean([sample.correct for sample in pool]))
        facts = iteration.selection()
        reported = {problem.id for problem in self._iteration_problems(iteration.number)[:REPORTED_PROBLEMS]}
        samples = [sample for sample in pool if sample.problem in reported]
        self.store.write_rollouts(
            iteration.number,
            {
                "prompt": [prompt_text(self._prompt(sample.problem)) for sample in samples],
                "completion": [sample.text for sample in samples],
                "correct": [sample.correct for sample in samples],
                "reward/correctness": [float(sample.correct) for sample in samples],
            },
        )
        line = {
            "step": iteration.number,
            "kind": "train",
            "loss": losses[-1] if losses else None,
            "reward": correct,
            "rewards/correctness/mean": correct,
            "entropy": token_mean(columns["entropy"], columns["tokens"]),
            "branching": token_mean(columns["branching"], columns["tokens"]),
            "completions/mean_length": float(np.mean(columns["tokens"])),
            "num_tokens": before + sum(columns["tokens"]) + sum(columns["prompt_tokens"]),
            "step_time": seconds,
            **{f"rft/{key}": facts[key] for key in ("sampled", "correct", "filtered", "selected", "noise", "prompts")},
        }
        self.store.append_metrics(line)

    def _score(self, number: int) -> None:
        """Evaluate the policy after ``number`` iterations, unless that is done."""
        from explorl.evaluation.scores import as_json, scores

        path = self.store.folder / "evaluations" / f"step-{number:06d}.json"
        iteration = IterationFolder(self.store, number)
        if _has_line(self.store, "evaluation", number) and path.exists():
            return
        settings = self.config.evaluation
        result = evaluate_holdout(
            self.config, self._policy(self._model(number)), problems=None if settings.every else settings.ends
        )
        result.save(path.parent, path.stem)
        means = {f"pass@{k}": result.pass_at(k).mean for k in result.ks}
        if not _has_line(self.store, "evaluation", number):
            self.store.append_metrics({"step": number, "kind": "evaluation", **means})
        values = as_json(scores(result))
        self._print(f"{f'iteration {number}' if number else 'start'}: {scores_text(result, values)}")
        if number:
            write_json(iteration.evaluation_path, {"completions": f"evaluations/{path.stem}.parquet", "scores": values})


def _has_line(store: RunStore, kind: str, step: int) -> bool:
    return any(line.get("kind") == kind and line.get("step") == step for line in store.metrics())
