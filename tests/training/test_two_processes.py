"""Every strategy on two processes that hold very different parts of a batch: it ends, and both do what one would do.

Each generation batch of a run is another way in which the parts differ (`SCENES`). One start trains trainer after
trainer, since starting takes longer than training; the tests read what the two processes wrote down.

Run as a module, it is the two processes (see `two_processes`).
"""

from __future__ import annotations

import faulthandler
import gc
import hashlib
import json
import math
import os
import random
import signal
import subprocess
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from accelerate.utils import gather_object
from transformers import TrainerCallback

from explorl.models import load_policy
from explorl.rollout import Rollout, Rollouts, SamplingParams
from explorl.rollout.branching import BranchedRollouts, Branching, branch_rows
from explorl.strategies import REGISTRY, build_all
from explorl.strategies.base import overrides
from explorl.training.grpo.branches import branch_metrics, branch_record
from explorl.training.grpo.trainer import ExplorationTrainer
from tests.training.small_runs import grpo_config
from tests.training.test_every_strategy import SETTINGS, few_answers, label

pytestmark = [pytest.mark.filterwarnings("ignore::UserWarning"), pytest.mark.timeout(1800)]

GENERATIONS, LENGTH = 4, 7
ROWS = 2 * GENERATIONS
"""Rows of a process in a generation batch: two prompts."""
SEED = 20
"""With which the engine samples what `test_scenes` asks for."""
LIMIT = 180
"""Seconds after which a run is taken to hang; it needs about one, and where the machine is busy twenty."""
CHANCES = 4
"""The processes are started at most so often: again after each run that failed, for those that come after it."""

SCENES = {
    "solved": "the first process has long answers, all correct; the second one short ones, all wrong and cut off",
    "flat": "all rows of the first process have advantage 0, and half of those of the second",
    "unscored": "no reward function scores an answer of the second process",
}
PLACES = {f"{number}{index}=": (scene, index) for number, scene in enumerate(SCENES) for index in range(4)}
"""Prompts in the order of training: of each scene two that go to the first process and two that go to the second."""

SOLVED = {prompt: float(position < 2) for prompt, (_, position) in PLACES.items()}
FALLING = {prompt: 1 - 0.02 * number for number, prompt in enumerate(PLACES)}
"""Solve rates with which a curriculum keeps all these prompts, in this order."""
NEVER_SOLVED = ["91=", "92="]


# ---------------------------------------------------------------- what is run


@dataclass(frozen=True)
class Case:
    strategies: list[dict[str, Any]]
    engine: bool = True
    """The engine samples; else the answers are given."""
    config: dict[str, Any] = field(default_factory=dict)
    """Arguments of `GRPOConfig`."""
    compared: Literal["steps", "batches", "no"] = "steps"
    """What has the gradient of a run on one process: each optimizer step; or all steps on a generation batch together,
    where chance decides which of them sees a row; or nothing."""
    whole: bool = False
    """One micro-batch a generation batch, so that everything logged is what one process logs."""
    short: int = 1
    """Tokens of a short answer."""
    even: bool = False
    """All answers have as many tokens."""
    tolerance: float = 1e-5

    @property
    def steps(self) -> int:
        """Optimizer steps on a generation batch."""
        window = self.config.get("gradient_accumulation_steps", 1)
        return self.config.get("steps_per_generation", window) // window * self.config.get("num_iterations", 1)


REUSED = {"num_iterations": 2, "beta": 0.05}
WHOLE = {"per_device_train_batch_size": ROWS, "gradient_accumulation_steps": 1}
WINDOWS = {"per_device_train_batch_size": ROWS // 4, "steps_per_generation": 4, "gradient_accumulation_steps": 2}
"""A generation batch serves two optimizer steps."""
STILL = {**WINDOWS, "beta": 0.05, "learning_rate": 0.0}
DEFAULTS = {"bf16": True, "gradient_checkpointing": True}
"""TRL's own."""
EXACT_TEMPERATURE = {"element_wise_temperature": {"easy": 1.0, "solve_rates": SOLVED}}
"""The first process samples at just the trainer's own temperature, the second one does not."""
ALIKE = {"pkpo", "risk_sensitive", "quantile_baseline", "unlikeliness", "ucpo"}
"""Arithmetic on groups of the whole batch, for which maxrl stands in every test run."""
COMPANY = [
    {"ppl_shaping": {"alpha": 0.2}},
    EXACT_TEMPERATURE,
    {"bottom_p": {"p": 0.8}},
    {"importance_correction": {}},
    {"mask_truncated": {}},
    {"egsw": {}},
    {"kl_cov": {"fraction": 0.2}},
]


def variants() -> dict[str, dict[str, Any]]:
    """Every strategy with the hyperparameters of `SETTINGS`, and with solve rates of the prompts here."""
    specs = []
    for name, settings in SETTINGS.items():
        if name == "tool_progression":  # this policy calls no tool: see test_tools_processes
            continue
        rates = {**dict.fromkeys(NEVER_SOLVED, 0.0), **FALLING} if name == "curriculum" else SOLVED
        specs += [
            {name: {**options, "solve_rates": rates} if "solve_rates" in options else options} for options in settings
        ]
    specs.append(EXACT_TEMPERATURE)
    specs.append({"element_wise_temperature": {"easy": 1.0, "source": "running", "solve_rates": SOLVED}})
    return {label(spec): spec for spec in specs}


def needs_engine(spec: dict[str, Any]) -> bool:
    (strategy,) = build_all([spec])
    recorded = strategy.needs_sampling_logps or strategy.needs_min_p_mass is not None
    return recorded or overrides(strategy, "sampling") or overrides(strategy, "branching")


def cases() -> tuple[dict[str, Case], dict[str, Case]]:
    """Those of every test run, and the slow ones."""
    case = Case([], engine=False, config={**REUSED, **WHOLE}, whole=True)
    whole = Case([], config=WHOLE, whole=True, short=2)
    still = Case([], engine=False, config=STILL, compared="batches")
    windows = Case(COMPANY, config={**WINDOWS, "beta": 0.05}, compared="no")
    defaults = Case(COMPANY, config={**DEFAULTS, **REUSED}, compared="no")
    fast = {
        "given/plain": case,
        "engine/plain": Case([]),
        "engine/company": Case(COMPANY),
        "whole/plain": whole,
        "whole/one-token": replace(whole, short=1),
        "windows/company": windows,
        "defaults/plain": Case([], engine=False, config=DEFAULTS, tolerance=0.05),
        "defaults/company": replace(defaults, config=DEFAULTS),
    }
    slow = {
        "reused/company": Case(COMPANY, config=REUSED),
        "reused-defaults/company": defaults,
        "whole/company": replace(whole, strategies=COMPANY),
        "still/plain": still,
        "windows/plain": replace(windows, strategies=[]),
    }
    last = {next(iter(spec)): name for name, spec in variants().items()}
    usual = {*last.values(), label(EXACT_TEMPERATURE)}  # test_local_batch has every setting in every test run
    for name, spec in variants().items():
        # TRL averages its entropy bonus within each micro-batch. Where all of those have as many tokens, it does not
        # matter in which of them a row is.
        bonus = {"compared": "no"} if "entropy_bonus" in spec else {}
        even = {"even": bool(bonus), "strategies": [spec]}
        if needs_engine(spec):
            (fast if name in usual else slow)[f"engine/{name}"] = Case([spec])
            slow[f"reused/{name}"] = Case([spec], config=REUSED)
        else:
            (slow if ALIKE & spec.keys() or name not in usual else fast)[f"given/{name}"] = replace(case, **even)
            slow[f"still/{name}"] = replace(still, **even)
            if spec.get("entropy_bonus", {}).get("target"):  # its coefficient changes between the steps on a batch
                slow[f"still/{name}"] = replace(still, **even, compared="no")
            slow[f"engine/{name}"] = Case([spec], **bonus)
        slow[f"whole/{name}"] = replace(whole, strategies=[spec], **bonus)
        slow[f"windows/{name}"] = replace(windows, strategies=[spec])
        slow[f"defaults/{name}"] = replace(defaults, strategies=[spec])
    for name in ("engine/mask_truncated", "still/kl_cov-0.2"):
        fast[name] = slow.pop(name)
    return fast, slow


FAST, SLOW = cases()
CASES = FAST | SLOW


def scene_of(prompt: str) -> tuple[str, int, bool]:
    """Scene, place, and whether the second process has this prompt."""
    scene, position = PLACES[prompt]
    return scene, position, position >= 2


def reward(prompts: list[str]) -> list[float | None]:
    """What the scene of each prompt says, and a better one for the first answer. 1 and more is correct."""
    rewards: list[float | None] = []
    for row, prompt in enumerate(prompts):
        scene, position, second = scene_of(prompt)
        good = row % GENERATIONS == 0
        if (scene, position) == ("solved", 3) or (scene == "flat" and position != 2):
            rewards.append(0.5)
        elif scene == "solved":
            rewards.append(0.5 * good + (not second))
        elif scene == "unscored" and second:
            rewards.append([None, math.nan][good])
        else:
            rewards.append(float(good))
    return rewards


def is_short(prompt: str) -> bool:
    scene, _, second = scene_of(prompt)
    return scene == "solved" and second


def answers(case: Case) -> Callable[..., dict[str, Any]]:
    """TRL's `rollout_func`: completions that depend on the prompt and their place in the group, and on nothing else."""

    def given(prompts: list[str], trainer: Any) -> dict[str, Any]:
        tokenizer = trainer.processing_class
        completions = []
        for row, prompt in enumerate(prompts):
            scene, _, second = scene_of(prompt)
            draw = random.Random(f"{prompt} {row % GENERATIONS}")
            length = draw.randint(2, LENGTH) if scene != "solved" else case.short if second else LENGTH
            tokens = [draw.randrange(7, 100) for _ in range(LENGTH if case.even else length)]
            if draw.random() < 0.5 if scene != "solved" else not second:
                tokens[-1] = tokenizer.eos_token_id
            completions.append(tokens)
        return {"prompt_ids": tokenizer(prompts)["input_ids"], "completion_ids": completions, "logprobs": None}

    return given


def direct(trainer: Any, case: Case) -> None:
    """Has the trainer's engine sample what the scenes say, and the same on one process as on two.

    The half of a generation batch that a process of two has is drawn with a seed of its own.
    """
    generate, process = trainer.sampler.engine.generate, trainer.accelerator.process_index

    def directed(prompt_ids: list[list[int]], n: int, params: SamplingParams) -> Rollouts:
        rollouts: list[Rollout] = []
        lists = {name: value for name, value in vars(params).items() if isinstance(value, tuple)}
        for start in range(0, len(prompt_ids), ROWS):
            rows = slice(start, start + ROWS)
            own: dict[str, Any] = {name: value[rows] for name, value in lists.items() if len(value) == len(prompt_ids)}
            own["seed"] = SEED + 2 * trainer.state.global_step + process + start // ROWS
            short = is_short(trainer.sampled.prompts[start])
            if short:
                own |= {"max_tokens": case.short, "stop_token_ids": ()}
            sampled = generate(prompt_ids[rows], n, replace(params, **own)).rollouts
            rollouts += [cut_off(rollout, trainer.eos_token_ids) for rollout in sampled] if short else sampled
        return Rollouts(rollouts, prompt_ids, n, 0)

    def directed_branches(prompt_ids: list[list[int]], draw: Any) -> Rollouts:
        """The same of answers that branch: each half has trees of its own."""
        if draw.branching is None:
            return directed(prompt_ids, 1, draw.params)
        whole = BranchedRollouts([], prompt_ids, 1, 0)
        for start in range(0, len(prompt_ids), ROWS):
            ids, short = prompt_ids[start : start + ROWS], is_short(trainer.sampled.prompts[start])
            seed = SEED + 2 * trainer.state.global_step + process + start // ROWS
            branching = Branching(base=0, weight=0) if short else draw.branching
            found = branch_rows(trainer.sampler.engine, ids, replace(draw.params, seed=seed), branching)
            for one in found:
                parent = None if one.parent is None else one.parent + start
                one = cut_off(one, trainer.eos_token_ids, case.short) if short else one
                whole.rollouts.append(replace(one, request=one.request + start, parent=parent))
            whole.branches += [replace(one, parent=one.parent + start) for one in found.branches]
            whole.decisions += found.decisions
            whole.params_of += [row + start for row in found.params_of]
        draw.reorder(whole.params_of)
        for name, value in branch_metrics(gather_object([branch_record(whole)])).items():
            trainer.record_metric(name, value)
        return whole

    trainer.sampler.engine.generate = directed
    if any(overrides(strategy, "branching") for strategy in trainer.strategies):
        trainer.sampler.generate = directed_branches


def cut_off(rollout: Rollout, ends: Sequence[int], most: int = LENGTH) -> Rollout:
    """The rollout up to its last token that does not end it, if it has one, of so many."""
    others = [index for index, token in enumerate(rollout.token_ids[:most], start=1) if token not in ends]
    records = ("token_ids", "logps", "sampling_logps", "entropy", "branching", "sampled")
    if rollout.min_p_mass is not None:
        records += ("min_p_mass",)
    return replace(rollout, **{name: getattr(rollout, name)[: max(others, default=1)] for name in records})


class Gradients(TrainerCallback):
    """Keeps the gradient of each optimizer step, of all parameters together."""

    def __init__(self) -> None:
        self.steps: list[torch.Tensor] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.steps.append(torch.cat([p.grad.flatten().clone() for p in model.parameters() if p.grad is not None]))


@dataclass
class Outcome:
    """What a process has to say about a run."""

    weights: str
    """A hash of all of them at the end."""
    logs: list[dict[str, Any]]
    """Of each optimizer step, and of the end, without clocks."""
    rewards: list[list[float]]
    """Of the rows of this process, a list a generation batch."""
    completions: list[list[list[int]]]


def train(policy: Path, case: Case, *, processes: int) -> tuple[Outcome, torch.Tensor]:
    """A run on the scenes, one after the other, with the gradients of all its steps."""
    from datasets import Dataset

    loaded, gradients = load_policy(str(policy), device="cpu"), Gradients()
    rewards: list[list[float]] = []
    completions: list[list[list[int]]] = []

    def score(prompts: list[str], completion_ids: list[list[int]], **columns: Any) -> list[float | None]:
        values = reward(prompts)
        rewards.append([math.nan if value is None else value for value in values])
        completions.append(completion_ids)
        return values

    filtered = any("curriculum" in spec for spec in case.strategies)
    arguments: dict[str, Any] = {
        "per_device_train_batch_size": ROWS // 2,
        "num_generations": GENERATIONS,
        "max_completion_length": LENGTH,
        "max_steps": len(SCENES) * case.steps,
        "shuffle_dataset": False,
        "optim": "sgd",
        "learning_rate": 0.005,  # with 0.02 a step may lead so far that rounding grows a hundredfold in the next
        "max_grad_norm": 0.0,
        "seed": 5,
        **case.config,
    }
    if processes == 1:
        arguments["per_device_train_batch_size"] *= 2
    trainer = ExplorationTrainer(
        model=loaded.model,
        reward_funcs=score,
        processing_class=loaded.tokenizer,
        train_dataset=Dataset.from_dict({"prompt": [*(NEVER_SOLVED if filtered else []), *PLACES]}),
        rollout_func=None if case.engine else answers(case),
        strategies=case.strategies,
        correct=("score", 1.0),
        answers=few_answers,
        callbacks=[gradients],
        args=grpo_config(policy / "out", arguments),
    )
    assert trainer.accelerator.num_processes == processes
    assert (trainer.sampler.engine is not None) == case.engine
    if case.engine:
        direct(trainer, case)
    trainer.train()
    digest = hashlib.sha256()
    for value in trainer.accelerator.unwrap_model(trainer.model).state_dict().values():
        digest.update(value.numpy().tobytes())
    logs = [
        {key: value for key, value in entry.items() if "time" not in key and "per_second" not in key}
        for entry in trainer.state.log_history
    ]
    return Outcome(digest.hexdigest(), logs, rewards, completions), torch.stack(gradients.steps)


# ---------------------------------------------------------------- two processes


def one_of_two_processes(policy: Path, folder: Path, names: Sequence[str]) -> None:
    """Trains case after case. One that fails or hangs ends both processes."""
    warnings.simplefilter("ignore")
    rank = int(os.environ["RANK"])
    for name in names:
        with file_of(folder, name, rank, "error").open("w") as error:
            faulthandler.enable(file=error)  # gloo aborts where the processes gather different things
            faulthandler.dump_traceback_later(LIMIT, exit=True, file=error)
            try:
                outcome, gradients = train(policy, CASES[name], processes=2)
            except Exception:
                traceback.print_exc(file=error)
                raise
            finally:
                faulthandler.cancel_dump_traceback_later()
                faulthandler.disable()
        torch.save(gradients, file_of(folder, name, rank, "pt"))
        file_of(folder, name, rank, "json").write_text(json.dumps(asdict(outcome)))
    torch.distributed.destroy_process_group()


def both_processes(policy: Path, folder: Path, names: Sequence[str]) -> None:
    """Two copies of this process, which has imported everything, with what torchrun would tell them."""
    gc.freeze()  # every trainer collects garbage, and looking at all modules for it takes longer than to train
    store, running = f"file://{folder}/store-{os.getpid()}", set()
    for rank in (0, 1):
        child = os.fork()
        if child:
            running.add(child)
            continue
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
        status = 1
        try:
            torch.distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
            one_of_two_processes(policy, folder, names)
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(status)
    while running:
        child, status = os.wait()
        running.remove(child)
        if status:
            for other in running:
                os.kill(other, signal.SIGKILL)


def file_of(folder: Path, name: str, rank: int, ending: str) -> Path:
    return folder / f"{name.replace('/', '-')}-{rank}.{ending}"


@dataclass
class TwoProcesses:
    """Two processes over gloo, and what they found."""

    policy: Path
    folder: Path
    failed: dict[str, str] = field(default_factory=dict)

    def run(self, names: list[str]) -> None:
        for _ in range(CHANCES):
            if not names:
                return
            outcomes = self._start(names)
            left = [name for name in names if not all(self._file(name, rank, "json").exists() for rank in (0, 1))]
            for name in left[:1]:
                errors = [self._file(name, rank, "error") for rank in (0, 1)]
                self.failed[name] = "\n".join(file.read_text() for file in errors if file.exists()).strip() or outcomes
            names = left[1:]
        self.failed |= dict.fromkeys(names, f"not run, since these failed: {', '.join(self.failed)}")

    def _start(self, names: list[str]) -> str:
        """Runs these cases; returns what was said on the standard error stream."""
        command = [
            sys.executable,
            "-m",
            "tests.training.test_two_processes",
            str(self.policy),
            str(self.folder),
            *names,
        ]
        environment = {**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
        root = Path(__file__).parents[2]
        return subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True, check=False).stderr

    def _file(self, name: str, rank: int, ending: str) -> Path:
        return file_of(self.folder, name, rank, ending)

    def outcomes(self, name: str) -> tuple[Outcome, Outcome]:
        if name in self.failed:
            pytest.fail(f"{name} failed or hung on two processes:\n{self.failed[name]}", pytrace=False)
        first, second = (Outcome(**json.loads(self._file(name, rank, "json").read_text())) for rank in (0, 1))
        return first, second

    def gradients(self, name: str) -> list[torch.Tensor]:
        return [torch.load(self._file(name, rank, "pt"), weights_only=True) for rank in (0, 1)]


@pytest.fixture(scope="module")
def policy(small_policy: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first layer of the small policy, with an end of sequence that is likely in some places."""
    loaded, folder = load_policy(str(small_policy), device="cpu"), tmp_path_factory.mktemp("one-layer")
    model: Any = loaded.model
    model.model.layers = model.model.layers[:1]
    model.config.num_hidden_layers = 1
    with torch.no_grad():
        model.lm_head.weight[loaded.tokenizer.eos_token_id] *= 3
    model.save_pretrained(folder)
    loaded.tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def two_processes(
    policy: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> TwoProcesses:
    """With the outcomes of all cases that the selected tests ask for."""
    here: list[Any] = [item for item in request.session.items if item.path == request.path]
    names = {item.callspec.params["name"] for item in here if hasattr(item, "callspec")}
    runs = TwoProcesses(policy, tmp_path_factory.mktemp("outcomes"))
    runs.run([name for name in CASES if name in names])
    return runs


# ---------------------------------------------------------------- the tests

KNOWN: dict[str, str] = {}
"""Cases with a fault that is known, and what it is."""


def parameters(names: Sequence[str], known_failures: dict[str, str] | None = None) -> list[Any]:
    """The slow ones marked as such, and those that show a known fault."""

    def marks(name: str) -> list[Any]:
        slow = [pytest.mark.slow] if name in SLOW else []
        fault = (
            [pytest.mark.xfail(strict=True, reason=known_failures[name])]
            if known_failures and name in known_failures
            else []
        )
        return slow + fault

    return [pytest.param(name, marks=marks(name)) for name in names]


def test_every_strategy_is_here() -> None:
    tested = {strategy for case in FAST.values() for spec in case.strategies for strategy in spec}
    assert tested | ALIKE | {"tool_progression"} == set(REGISTRY)
    assert {strategy for case in SLOW.values() for spec in case.strategies for strategy in spec} >= ALIKE


@pytest.mark.parametrize("name", ["given/plain", "engine/plain", "engine/company"])
def test_scenes(two_processes: TwoProcesses, name: str) -> None:
    """The parts of the batch are as different as `SCENES` says."""
    first, second = two_processes.outcomes(name)
    end = load_policy(str(two_processes.policy), device="cpu").tokenizer.eos_token_id
    solved, flat, unscored = range(len(SCENES))
    assert min(first.rewards[solved]) >= 1 > max(second.rewards[solved])
    assert max(map(len, first.completions[solved])) == LENGTH
    assert set(map(len, second.completions[solved])) == {1}
    assert [end] not in second.completions[solved]
    assert any(ids[-1] == end for ids in first.completions[solved])
    assert set(first.rewards[flat]) == set(second.rewards[flat][GENERATIONS:]) == {0.5}
    assert len(set(second.rewards[flat][:GENERATIONS])) > 1
    assert len(set(first.rewards[unscored])) > 1
    assert all(map(math.isnan, second.rewards[unscored]))
    if name == "engine/company":
        logged = first.logs[0]
        assert [logged[f"strategy/element_wise_temperature/temperature_{end}"] for end in ("min", "max")] == [1.0, 1.5]


@pytest.mark.parametrize("name", parameters(list(CASES)))
def test_both_agree(two_processes: TwoProcesses, name: str) -> None:
    """They end, with the same weights, and have logged the same."""
    first, second = two_processes.outcomes(name)
    steps = len(SCENES) * CASES[name].steps
    assert [entry["step"] for entry in first.logs] == [*range(1, steps + 1), steps]
    assert all(math.isfinite(entry["loss"]) for entry in first.logs[:-1])
    assert first.weights == second.weights
    for log, other in zip(first.logs, second.logs, strict=True):
        assert log == pytest.approx(other, rel=1e-6, nan_ok=True)


ACTS = [name for name in FAST if name.startswith(("given/", "engine/")) and "plain" not in name]
IDLE = ("curriculum", "importance_correction")
"""Where the prompts are as wanted already, and where the samples are the policy's own."""


@pytest.mark.parametrize("name", [name for name in ACTS if not name.endswith(IDLE) and "easy_first" not in name])
def test_it_acts(two_processes: TwoProcesses, name: str) -> None:
    """Else all that is compared here would be equal for nothing."""
    two_processes.outcomes(name)
    plain, changed = (two_processes.gradients(n)[0] for n in (f"{name.split('/')[0]}/plain", name))
    assert (changed - plain).norm() > 1e-3 * plain.norm()


OF_ANY_SPLIT = ("num_tokens", "reward", "frac_reward", "completions/", "strategy/")
"""What is logged of a whole generation batch, however it is split into micro-batches."""
ROUNDED = ("strategy/importance_correction/weight_tokens",)
"""It counts tokens whose weight is not 1, be it by rounding."""


@pytest.mark.parametrize("name", parameters([name for name in CASES if CASES[name].compared != "no"], KNOWN))
def test_as_one_process(two_processes: TwoProcesses, name: str) -> None:
    """The same completions, gradients and logs as on one process that has all rows."""
    case, outcomes = CASES[name], two_processes.outcomes(name)
    single, expected = train(two_processes.policy, case, processes=1)
    assert single.completions == [a + b for a, b in zip(*(outcome.completions for outcome in outcomes), strict=True)]

    def of_steps(gradients: torch.Tensor) -> torch.Tensor:
        together = case.steps if case.compared == "batches" else 1
        return gradients.view(-1, together, gradients.size(1)).sum(1)

    for gradients in two_processes.gradients(name):
        off = (of_steps(gradients) - of_steps(expected)).norm(dim=1) / of_steps(expected).norm(dim=1).clamp(min=0.1)
        assert off.max() < case.tolerance, off.tolist()
    same = (*OF_ANY_SPLIT, "loss") if case.compared == "steps" else OF_ANY_SPLIT
    for step, (log, entry) in enumerate(zip(outcomes[0].logs, single.logs, strict=True), start=1):
        logged = {key: entry[key] for key in entry if (case.whole or key.startswith(same)) and key not in ROUNDED}
        close = pytest.approx(logged, rel=1e-4, abs=max(1e-5, case.tolerance), nan_ok=True)
        assert {key: log[key] for key in logged} == close, step


if __name__ == "__main__":
    both_processes(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
