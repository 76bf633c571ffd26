"""From a configuration to an RFT run in a folder, started or resumed.

Each iteration samples responses from the policy of the one before, filters them, selects some, fits a policy to them
and scores it. A stage is done when its last file is there; a run that was killed goes on with the stage that it was in,
and ends with the weights that it would have ended with (on a CPU to the last bit).
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
from explorl.core.store import RunStore, digest_of, read_json, write_json
from explorl.core.terminal import ProgressLines, literal
from explorl.evaluation.evaluation import data_digest
from explorl.evaluation.prompts import check_prompts
from explorl.models import Policy
from explorl.tasks import Prompt, get_task
from explorl.tasks.base import checked_prompt, problems_of
from explorl.training.callbacks import progress_bar
from explorl.training.grpo.logged_columns import prompt_text
from explorl.training.rft import filters as rules
from explorl.training.rft.answer_spans import answer_mark
from explorl.training.rft.fitting import check_turns, derived_seed, fit
from explorl.training.rft.folder import IterationFolder, Stage, link_folder
from explorl.training.rft.registry import build_filters, build_selector, name_of
from explorl.training.rft.samples import Columns, to_columns
from explorl.training.rft.sampling import Ask, Sampler, check_room
from explorl.training.rft.selectors import NEED_RECORDS, Selection, select
from explorl.training.rft.summary import choice_text, facts_of, nothing_text, scores_text, token_mean
from explorl.training.run_setup import check_holdout, configured_policy, evaluate_holdout, task_options

PART = 2048
"""Responses that are drawn and stored at a time."""
SHOWN_PROBLEMS = 64
"""Problems of each iteration whose responses lie in `rollouts/`, where reports look for some to show."""


class NothingToLearn(ValueError):
    """An iteration without a right response; the message has the counts, and where the pool lies."""


def run_rft(config: Config, store: RunStore, *, console: Console, alone: bool = False) -> Path:
    """Runs all iterations from the stage where the run stands; returns the folder of the last policy.

    Nothing is written before the configuration, the task and the first policy fit together. ``alone`` keeps other
    processes out of the folder.
    """
    return _Loop(rft_config(config), store, console).run(alone)


def where(config: Config, store: RunStore) -> tuple[int, Stage] | None:
    """The iteration and the stage that a run goes on with; None where it is done."""
    for number in range(1, config.rft.iterations + 1):
        stage = IterationFolder(store, number).stage(is_scored(config, number))
        if stage is not None:
            return number, stage
    return None


def is_scored(config: Config, number: int) -> bool:
    """Whether the policy of this iteration is evaluated; 0 is the one that the run begins with."""
    settings = config.evaluation
    if not settings.every:
        return bool(settings.ends)
    return number % settings.every == 0 or number == config.rft.iterations


def check_rft(config: Config) -> None:
    """What can be told to be wrong before a weight is loaded."""
    check_precision(config.model.dtype)
    if int(os.environ.get("WORLD_SIZE") or 1) > 1:
        raise ConfigError(
            f"explorl rft runs in one process, and there are {os.environ['WORLD_SIZE']}; start it without torchrun or "
            "accelerate"
        )
    if config.strategies:
        raise ConfigError(
            f"strategies is {config.strategies!r}, and explorl rft has none: they act in explorl train; leave it out"
        )
    if config.rollout.tools is not None:
        raise ConfigError(
            f"rollout.tools is {config.rollout.tools!r}, and explorl rft samples without tools; leave it out"
        )
    if config.rollout.engine == "vllm":
        raise ConfigError("rollout.engine is vllm, with which explorl rft cannot sample; use explorl or generate")
    name = build_selector(config.rft.selector)[0]
    if config.rollout.engine == "generate" and name in NEED_RECORDS:
        raise ConfigError(
            f"rft.selector is {name}, which model.generate does not record; set rollout.engine to explorl, or the "
            "selector to random, shortest or diverse"
        )


class _Loop:
    def __init__(self, config: Config, store: RunStore, console: Console) -> None:
        check_rft(config)
        self.config, self.store, self.console = config, store, console
        self.task = get_task(config.task.name, **task_options(config))
        self.asks = self._asks()
        self.prompts = {one.problem.id: one.prompt for one in self.asks}
        self.mark = config.rft.answer_mark or answer_mark(self.task, self.asks[0].prompt)
        self._check_mark()
        self._held: Policy | None = None

    def _asks(self) -> list[Ask]:
        config = self.config
        problems = problems_of(self.task, "train", config.task.train_problems)
        if config.evaluation.every or config.evaluation.ends:
            check_holdout(config, self.task, problems)
        return [Ask(one, checked_prompt(self.task, self.task.prompt(one, config.task.template))) for one in problems]

    def _check_mark(self) -> None:
        names = [name for name in map(name_of, self.config.rft.filters) if name in rules.NEED_MARK]
        if names and self.mark is None:
            raise ConfigError(
                f"rft.filters has {' and '.join(names)}, and the task {self.task.name!r} does not say how an answer is "
                "marked; set rft.answer_mark, to <answer> say, give its class an attribute answer_mark, or leave "
                f"{'it' if len(names) == 1 else 'them'} out"
            )

    # ------------------------------------------------------------------ the run
    def run(self, alone: bool) -> Path:
        config, store = self.config, self.store
        self._check_policy(self._policy(self._start_of(where(config, store))))
        if alone:
            store.lock()
        at = where(config, store)
        resumed = f"iteration {at[0]}, {at[1]}" if at and store.has_steps else None
        store.begin(config.dump(), "rft")
        store.rewind(at[0] - 1 if at else config.rft.iterations)
        rows = digest_of([[one.problem.id, one.prompt, data_digest(one.problem)] for one in self.asks])
        if resumed and (words := store.data_changed_warning(rows)):
            self._say(words)
        store.record_start(kind="rft", seed=config.seed, resumed_from=resumed, rows=rows)
        if at:
            shutil.rmtree(store.folder / "model", ignore_errors=True)  # of a run that is being extended
        if resumed:
            self._say(f"going on with {resumed}")
        if is_scored(config, 0):
            self._score(0)
        for number in range(1, config.rft.iterations + 1):
            self._iterate(IterationFolder(store, number))
        model = store.folder / "model"
        if not model.is_dir():
            link_folder(IterationFolder(store, config.rft.iterations).model, model)
        return model

    def _iterate(self, place: IterationFolder) -> None:
        """Does what is left of an iteration."""
        number = place.number
        if not place.pool_path.exists():
            self._sample(place)
        if not place.is_chosen:
            self._choose(place)
        if not place.model.is_dir():
            self._held = None
            gc.collect()  # the fit needs the memory
            selected = place.selected()
            examples = [
                {"prompt": self._prompt(problem, asked), "completion": text}
                for problem, asked, text in zip(selected["problem"], selected["prompt"], selected["text"], strict=True)
            ]
            start = self.config.model.name if self.config.rft.from_ == "base" else self._model(number - 1)
            seed = derived_seed(self.config.seed, number, "fit")
            begun = time.monotonic()
            fit(self.config, place.fit, start, examples, seed=seed, console=self.console)
            write_json(place.folder / "fit" / "seconds.json", time.monotonic() - begun)
        self._log(place)
        if is_scored(self.config, number):
            self._score(number)

    def _prompt(self, problem: str, asked: str | None = None) -> Prompt:
        """How a problem is asked; an error where the task has changed since it was: ``asked`` is how it was then."""
        prompt = self.prompts.get(problem)
        if prompt is None or (asked is not None and prompt_text(prompt) != asked):
            what = "has no problem" if prompt is None else "now asks otherwise for problem"
            raise ConfigError(
                f"the task {self.config.task.name!r} {what} {problem!r}, to which this run has sampled responses; "
                "restore the task and its files, or start a new run"
            )
        return prompt

    def _model(self, number: int) -> str:
        """The policy after so many iterations."""
        return str(IterationFolder(self.store, number).model) if number else self.config.model.name

    def _start_of(self, at: tuple[int, Stage] | None) -> str:
        """The policy that is needed first."""
        return self._model(0 if at is None else at[0] if at[1] == "evaluation" else at[0] - 1)

    def _policy(self, name: str) -> Policy:
        """A policy to sample from; one at a time is held."""
        if self._held is None or self._held.name != name:
            self._held = None
            self._held = configured_policy(self.config, name)
        return self._held

    def _check_policy(self, policy: Policy) -> None:
        prompts, template = [one.prompt for one in self.asks], self.config.task.template
        check_prompts(prompts, policy, self.task, template)
        check_turns(prompts[0], policy, self.task, template)
        check_room(self.config, policy, prompts)

    def _say(self, text: str) -> None:
        self.console.print(literal(text), soft_wrap=True, highlight=False)

    # ------------------------------------------------------------------ sampling
    def _asked(self, number: int) -> list[Ask]:
        """The problems of an iteration: the next ones, from the first again after the last."""
        count = min(self.config.rft.prompts or len(self.asks), len(self.asks))
        first = (number - 1) * count
        return [self.asks[(first + place) % len(self.asks)] for place in range(count)]

    def _sample(self, place: IterationFolder) -> None:
        asked, samples = self._asked(place.number), self.config.rft.samples
        size = max(1, PART // samples)
        parts = [asked[start : start + size] for start in range(0, len(asked), size)]
        label = f"iteration {place.number}: sampling"
        self._say(f"{label} {len(asked):,} problems × {samples}")
        sampler: Sampler | None = None
        bar, lines = progress_bar(self.console), ProgressLines(self.console)
        with bar:
            done = bar.add_task(label, total=len(asked) * samples, note="")
            for index, part in enumerate(parts):
                if not place.part(index).exists():
                    sampler = sampler or Sampler(
                        self.config, self._policy(self._model(place.number - 1)), self.task, self.mark
                    )
                    begun, seed = time.monotonic(), derived_seed(self.config.seed, place.number, "sample", index)
                    drawn = sampler.draw(part, seed, lambda count: bar.advance(done, count))
                    place.write_part(index, drawn, time.monotonic() - begun, sampler.prompt_tokens(part))
                bar.update(done, completed=min((index + 1) * size, len(asked)) * samples)
                if lines.due and index + 1 < len(parts):
                    lines.say(f"{label}: {(index + 1) * size * samples:,} of {len(asked) * samples:,}")
        if sampler is not None:
            sampler.release()
        place.join_parts(len(parts))

    # ------------------------------------------------------------------ filtering and selecting
    def _choose(self, place: IterationFolder) -> None:
        settings = self.config.rft
        pool, _ = place.pool()
        special = self._policy(self._model(place.number - 1)).tokenizer.all_special_tokens
        last = "no_special_tokens", partial(rules.no_special_tokens, tokens=special)
        kept, passes = rules.apply([*build_filters(settings.filters), last], pool)
        if not passes[-1].dropped:
            passes.pop()
        if not any(sample.correct for sample in kept):
            raise NothingToLearn(nothing_text(place, pool, kept, passes))
        name, selector = build_selector(settings.selector)
        found = select(
            kept, selector, budget=settings.budget, per_prompt=settings.per_prompt, noise=settings.noise,
            seed=[derived_seed(self.config.seed, place.number, "select")],
        )  # fmt: skip
        facts = facts_of(pool, kept, passes, found, name, settings.budget)
        dropped = [(one.name, sample) for one in passes for sample in one.dropped]
        place.write_selection(
            {
                "filter": [by for by, _ in dropped],
                "problem": [sample.problem for _, sample in dropped],
                "sample": [sample.sample for _, sample in dropped],
                "correct": [sample.correct for _, sample in dropped],
            },
            self._selected(found),
            facts,
        )
        self._say(f"iteration {place.number}: {choice_text(facts)}")

    def _selected(self, found: Selection) -> Columns:
        columns = {name: values for name, values in to_columns(found.samples).items() if not name.startswith("cut_")}
        prompts = [prompt_text(self._prompt(sample.problem)) for sample in found.samples]
        return {"prompt": prompts, **columns, "score": list(found.scores)}

    # ------------------------------------------------------------------ metrics and scores
    def _log(self, place: IterationFolder) -> None:
        """A line of metrics for the iteration, and some of its responses where reports look for them."""
        if _has_line(self.store, "train", place.number):
            return
        pool, columns = place.pool()
        losses = [line["loss"] for line in place.fit.metrics() if line.get("loss") is not None]
        before = max((line.get("num_tokens") or 0 for line in self.store.metrics()), default=0)
        seconds_path = place.folder / "fit" / "seconds.json"
        seconds = sum(columns["seconds"]) + (read_json(seconds_path) if seconds_path.exists() else 0.0)
        correct = float(np.mean([sample.correct for sample in pool]))
        facts = place.selection()
        shown = {one.problem.id for one in self._asked(place.number)[:SHOWN_PROBLEMS]}
        some = [sample for sample in pool if sample.problem in shown]
        self.store.write_rollouts(
            place.number,
            {
                "prompt": [prompt_text(self._prompt(sample.problem)) for sample in some],
                "completion": [sample.text for sample in some],
                "correct": [sample.correct for sample in some],
                "reward/correctness": [float(sample.correct) for sample in some],
            },
        )
        line = {
            "step": place.number,
            "kind": "train",
            "loss": losses[-1] if losses else None,
            "reward": correct,
            "rewards/correctness/mean": correct,
            "entropy": token_mean(pool, "entropy"),
            "branching": token_mean(pool, "branching"),
            "completions/mean_length": float(np.mean([sample.tokens for sample in pool])),
            "num_tokens": before + sum(sample.tokens for sample in pool) + round(sum(columns["prompt_tokens"])),
            "step_time": seconds,
            **{f"rft/{key}": facts[key] for key in ("sampled", "correct", "filtered", "selected", "noise", "prompts")},
        }
        self.store.append_metrics(line)

    def _score(self, number: int) -> None:
        """Evaluates the policy after so many iterations, unless that is done."""
        from explorl.evaluation.scores import as_json, scores

        path = self.store.folder / "evaluations" / f"step-{number:06d}.json"
        place = IterationFolder(self.store, number)
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
        found = as_json(scores(result))
        self._say(f"{f'iteration {number}' if number else 'start'}: {scores_text(result, found)}")
        if number:
            write_json(place.evaluation_path, {"completions": f"evaluations/{path.stem}.parquet", "scores": found})


def _has_line(store: RunStore, kind: str, step: int) -> bool:
    return any(line.get("kind") == kind and line.get("step") == step for line in store.metrics())
