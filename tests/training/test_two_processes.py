"""Every strategy on two processes that hold very different parts of a batch: it ends, and both do what one process does.

Each generation batch of a run is another way in which the parts differ (`SCENES`). One start of torchrun trains trainer
after trainer, since starting takes longer than training; the tests read what the two processes wrote down.

Run as a module, it is one of the two processes (see `two_processes`).
"""

from __future__ import annotations

import faulthandler
import gc
import hashlib
import json
import math
import os
import random
import subprocess
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from transformers import TrainerCallback
from trl import GRPOConfig

from explorl.models import load_policy
from explorl.rollout import Rollout, Rollouts, SamplingParams
from explorl.strategies import REGISTRY, build_all
from explorl.strategies.base import overrides
from explorl.training.grpo import ExplorationTrainer
from tests.training.test_every_strategy import SETTINGS, label

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

GENERATIONS, LENGTH = 4, 8
ROWS = 2 * GENERATIONS
"""Rows of a process in a generation batch: two prompts."""
LIMIT = 60
"""Seconds after which a run is taken to hang; it needs one or two."""
CHANCES = 4
"""So often the processes are started again after a run that failed."""

SCENES = {
    "solved": "the first process has long answers, all correct; the second one of one token each, none correct",
    "truncated": "no answer of the first process is cut off, and all of the second",
    "flat": "all rows of the first process have advantage 0, and half of those of the second",
    "unscored": "no reward function scores an answer of the second process",
}
PLACES = {f"{number}{place}=": (scene, place) for number, scene in enumerate(SCENES) for place in range(4)}
"""Prompts in the order of training: of each scene two that go to the first process and two that go to the second."""

SOLVED = {prompt: float(place < 2) for prompt, (_, place) in PLACES.items()}
FALLING = {prompt: 1 - 0.02 * number for number, prompt in enumerate(PLACES)}
"""Solve rates with which a curriculum keeps all these prompts, in this order."""
NEVER_SOLVED = ["91=", "92="]


# ---------------------------------------------------------------- the runs


@dataclass(frozen=True)
class Case:
    strategies: list[Any]
    engine: bool = True
    """The engine samples; else the answers are given."""
    config: dict[str, Any] = field(default_factory=dict)
    """Arguments of `GRPOConfig`."""
    compared: Literal["steps", "batches", "no"] = "steps"
    """What has the gradient of a run on one process: each optimizer step; or all steps on a generation batch together,
    where chance decides which of them sees a row; or nothing."""
    tolerance: float = 1e-5
    short: int = 1
    """How long the short answers are."""
    even: bool = False
    """All answers have as many tokens."""
    whole: bool = False
    """One micro-batch a generation batch: so all that is logged is that of one process."""


REUSED = {"num_iterations": 2, "beta": 0.05}
WINDOWS = {"steps_per_generation": 4, "gradient_accumulation_steps": 2, "per_device_train_batch_size": ROWS // 4}
"""A generation batch serves two optimizer steps."""
STILL = {**WINDOWS, "learning_rate": 0.0}
WHOLE = {"per_device_train_batch_size": ROWS, "gradient_accumulation_steps": 1}
DEFAULTS = {"bf16": True, "gradient_checkpointing": True}
"""TRL's own."""
EXACT_TEMPERATURE = {"element_wise_temperature": {"easy": 1.0, "solve_rates": SOLVED}}
"""The first process samples at just the trainer's own temperature, the second one does not."""
COMPANY = [
    {"passk_training": {"k": 2}},
    {"ppl_shaping": {"alpha": 0.2}},
    EXACT_TEMPERATURE,
    {"bottom_p": {"p": 0.8}},
    {"importance_correction": {}},
    {"mask_truncated": {}},
    {"egsw": {}},
    {"kl_cov": {"fraction": 0.2}},
]


def variants() -> dict[str, dict[str, Any]]:
    """Every strategy with the hyperparameters of `SETTINGS`, and solve rates of the prompts here."""
    found = []
    for name, settings in SETTINGS.items():
        rates = {**dict.fromkeys(NEVER_SOLVED, 0.0), **FALLING} if name == "curriculum" else SOLVED
        found += [{name: {**given, "solve_rates": rates} if "solve_rates" in given else given} for given in settings]
    found.append(EXACT_TEMPERATURE)
    found.append({"element_wise_temperature": {"easy": 1.0, "hard": 1.3, "source": "running", "decay": 0.0}})
    return {label(spec): spec for spec in found}


def needs_engine(spec: dict[str, Any]) -> bool:
    return "importance_correction" in spec or any(overrides(strategy, "sampling") for strategy in build_all([spec]))


def cases() -> tuple[dict[str, Case], dict[str, Case]]:
    """Those of every test run, and the slow ones."""
    fast = {
        "given/plain": Case([], engine=False, config={**REUSED, **WHOLE}, whole=True),
        "engine/plain": Case([]),
        "engine/company": Case(COMPANY),
        "whole/plain": Case([], config=WHOLE, whole=True, short=2),
        "whole/one-token": Case([], config=WHOLE, whole=True),
        "windows/company": Case(COMPANY, config={**WINDOWS, "beta": 0.05}, compared="no"),
        "defaults/plain": Case([], engine=False, config=DEFAULTS, tolerance=0.05),
        "defaults/company": Case(COMPANY, config={**DEFAULTS, **REUSED}, compared="no"),
    }
    slow: dict[str, Case] = {
        "still/plain": Case([], engine=False, config=STILL, compared="batches"),
        "windows/plain": Case([], config=WINDOWS, compared="no"),
        "given/company": Case([spec for spec in COMPANY if not needs_engine(spec)], engine=False, config=REUSED),
    }
    for name, spec in variants().items():
        # TRL's entropy bonus is averaged within each micro-batch: only where all have as many tokens does it not matter
        # in which of them a row is.
        bonus = "entropy_bonus" in spec
        alone = Case([spec], compared="no" if bonus else "steps")
        given = Case([spec], engine=False, config={**REUSED, **WHOLE}, whole=True, even=bonus)
        if needs_engine(spec):
            fast[f"engine/{name}"] = alone
            slow[f"reused/{name}"] = replace(alone, config=REUSED)
        else:
            fast[f"given/{name}"] = given
            slow[f"engine/{name}"] = alone
            slow[f"still/{name}"] = replace(given, config={**STILL, "beta": 0.05}, compared="batches", whole=False)
        slow[f"whole/{name}"] = replace(alone, config=WHOLE, whole=True, short=2)
        slow[f"windows/{name}"] = replace(alone, config={**WINDOWS, "beta": 0.05}, compared="no")
        slow[f"defaults/{name}"] = replace(alone, config={**DEFAULTS, **REUSED}, compared="no")
    for name in ("engine/mask_truncated", "still/kl_cov-0.2", "whole/clip_higher-0.001-0.002"):
        fast[name] = slow.pop(name)
    return fast, slow


FAST, SLOW = cases()
CASES = FAST | SLOW


def case_of(prompt: str) -> tuple[str, int, bool]:
    """Scene, place, and whether it is the second process that has this prompt."""
    scene, place = PLACES[prompt]
    return scene, place, place >= 2


def reward(prompts: list[str], completion_ids: list[list[int]], **columns: Any) -> list[float | None]:
    """What the scene of each prompt says. 1 and more is correct."""
    found: list[float | None] = []
    for prompt, ids in zip(prompts, completion_ids, strict=True):
        scene, place, second = case_of(prompt)
        odd = sum(ids) % 2
        if scene == "unscored" and second:
            found.append([None, math.nan][odd])
        elif scene == "flat" and place != 2:
            found.append(0.5)
        elif scene == "solved":
            found.append(0.5 * odd if second else 1 + 0.5 * odd)
        else:
            found.append(float(odd))
    return found


def longest(prompt: str, case: Case) -> int:
    scene, _, second = case_of(prompt)
    return case.short if scene == "solved" and second else LENGTH


def answers(case: Case) -> Callable[..., dict[str, Any]]:
    """TRL's `rollout_func`: completions that depend on the prompt and their place in the group, and on nothing else."""

    def given(prompts: list[str], trainer: Any) -> dict[str, Any]:
        tokenizer = trainer.processing_class
        completions = []
        for row, prompt in enumerate(prompts):
            scene, _, second = case_of(prompt)
            draw = random.Random(f"{prompt} {row % GENERATIONS}")
            length = LENGTH if case.even else longest(prompt, case) if scene == "solved" else draw.randint(2, LENGTH)
            tokens = [draw.randrange(7, 100) for _ in range(length)]
            if not second if scene == "truncated" else draw.random() < 0.5:
                tokens[-1] = tokenizer.eos_token_id
            completions.append(tokens)
        return {"prompt_ids": tokenizer(prompts)["input_ids"], "completion_ids": completions, "logprobs": None}

    return given


def direct(trainer: Any, case: Case) -> None:
    """Has the trainer's engine sample what the scenes say, and the same on one process as on two.

    The half of a generation batch that a process of two has is drawn with a seed of its own.
    """
    generate, first = trainer._engine.generate, trainer.accelerator.process_index

    def directed(prompt_ids: list[list[int]], n: int, params: SamplingParams) -> Rollouts:
        rollouts = []
        for start in range(0, len(prompt_ids), ROWS):
            rows = slice(start, start + ROWS)
            prompts = trainer._prompts[rows]
            lists = {name: value for name, value in vars(params).items() if isinstance(value, tuple)}
            own: dict[str, Any] = {name: value[rows] for name, value in lists.items() if len(value) == len(prompt_ids)}
            own["max_tokens"] = [longest(prompt, case) for prompt in prompts]
            own["seed"] = 2 * trainer.state.global_step + first + start // ROWS
            cut_off = case_of(prompts[0])[::2] == ("truncated", True)
            if cut_off:
                own["stop_token_ids"] = ()
            found = generate(prompt_ids[rows], n, replace(params, **own)).rollouts
            rollouts += [without_end(rollout, trainer.eos_token_ids) for rollout in found] if cut_off else found
        return Rollouts(rollouts, prompt_ids, n, 0)

    trainer._engine.generate = directed


def without_end(rollout: Rollout, ends: Sequence[int]) -> Rollout:
    """The rollout up to its last token that does not end it."""
    length = max(place for place, token in enumerate(rollout.token_ids, start=1) if token not in ends)
    records = ("token_ids", "logps", "sampling_logps", "entropy", "branching")
    return replace(rollout, **{name: getattr(rollout, name)[:length] for name in records})


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
    """A hash of all of them."""
    logs: list[dict[str, Any]]
    """Of each optimizer step and of the end, without clocks."""
    rewards: list[list[float]]
    """Of this process, a list a generation batch."""
    completions: list[list[list[int]]]


def train(policy: Path, case: Case, *, processes: int) -> tuple[Outcome, torch.Tensor]:
    """A run on the scenes, one after the other; with the gradients of all its steps."""
    from datasets import Dataset

    loaded, kept = load_policy(str(policy), device="cpu"), Gradients()
    rewards: list[list[float]] = []
    completions: list[list[list[int]]] = []

    def score(completion_ids: list[list[int]], **columns: Any) -> list[float | None]:
        found = reward(completion_ids=completion_ids, **columns)
        rewards.append([math.nan if value is None else value for value in found])
        completions.append(completion_ids)
        return found

    strategies = [name for spec in case.strategies for name in spec]
    prompts = [*NEVER_SOLVED, *PLACES] if "curriculum" in strategies else list(PLACES)
    arguments: dict[str, Any] = {
        "output_dir": str(policy / "out"),
        "per_device_train_batch_size": ROWS // 2,
        "gradient_accumulation_steps": 2,
        "num_generations": GENERATIONS,
        "max_completion_length": LENGTH,
        "shuffle_dataset": False,
        "optim": "sgd",
        "learning_rate": 0.02,
        "max_grad_norm": 0.0,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "use_cpu": True,
        "dataloader_pin_memory": False,
        "seed": 5,
    } | case.config
    arguments["max_steps"] = len(SCENES) * steps_a_batch(case)
    if processes == 1:
        arguments["per_device_train_batch_size"] *= 2
    trainer = ExplorationTrainer(
        model=loaded.model,
        reward_funcs=score,
        processing_class=loaded.tokenizer,
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        rollout_func=None if case.engine else answers(case),
        strategies=case.strategies,
        correct=("score", 1.0),
        callbacks=[kept],
        args=GRPOConfig(**arguments),
    )
    assert trainer.accelerator.num_processes == processes
    assert (trainer._engine is not None) == case.engine
    if case.engine:
        direct(trainer, case)
    trainer.train()
    digest = hashlib.sha256()
    for value in trainer.accelerator.unwrap_model(trainer.model).state_dict().values():
        digest.update(value.numpy().tobytes())
    logs = [{key: value for key, value in entry.items() if not is_clock(key)} for entry in trainer.state.log_history]
    return Outcome(digest.hexdigest(), logs, rewards, completions), torch.stack(kept.steps)


def steps_a_batch(case: Case) -> int:
    windows = case.config.get("steps_per_generation", 1) / case.config.get("gradient_accumulation_steps", 1)
    return max(int(windows), 1) * case.config.get("num_iterations", 1)


def is_clock(metric: str) -> bool:
    return any(part in metric for part in ("time", "per_second"))


# ---------------------------------------------------------------- two processes


def one_of_two_processes(policy: Path, folder: Path, names: Sequence[str]) -> None:
    """Trains case after case; what fails or hangs ends both processes."""
    warnings.simplefilter("ignore")
    gc.freeze()  # a trainer collects garbage, which takes longer than its steps
    rank = int(os.environ["RANK"])
    for name in names:
        with file_of(folder, name, f"{rank}.error").open("w") as error:
            faulthandler.dump_traceback_later(LIMIT, exit=True, file=error)
            try:
                outcome, gradients = train(policy, CASES[name], processes=2)
            except Exception:
                traceback.print_exc(file=error)
                raise
            faulthandler.cancel_dump_traceback_later()
        torch.save(gradients, file_of(folder, name, f"{rank}.pt"))
        file_of(folder, name, f"{rank}.json").write_text(json.dumps(asdict(outcome)))
    torch.distributed.destroy_process_group()


def file_of(folder: Path, name: str, ending: str) -> Path:
    return folder / f"{name.replace('/', ' ')} {ending}"


@dataclass
class TwoProcesses:
    """What two processes over gloo found, as torchrun starts them."""

    policy: Path
    folder: Path
    failed: dict[str, str] = field(default_factory=dict)

    def run(self, names: list[str]) -> None:
        for _ in range(CHANCES):
            said = self._start(names)
            left = [name for name in names if not all(file_of(self.folder, name, f"{r}.json").exists() for r in (0, 1))]
            if not left:
                return
            files = [file_of(self.folder, left[0], f"{rank}.error") for rank in (0, 1)]
            errors = [file.read_text() for file in files if file.exists()]
            self.failed[left[0]] = "\n".join(errors) if any(errors) else said
            names = left[1:]
            if not names:
                return
        self.failed |= dict.fromkeys(names, f"not run: {CHANCES} other runs failed: {', '.join(self.failed)}")

    def _start(self, names: list[str]) -> str:
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
        command = [*launch, "-m", __name__, str(self.policy), str(self.folder), *names]
        environment = {**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
        root = Path(__file__).parents[2]
        done = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True, check=False)
        return "" if done.returncode == 0 else done.stderr[-6000:]

    def outcomes(self, name: str) -> list[Outcome]:
        if name in self.failed:
            pytest.fail(f"{name} failed or hung on two processes:\n{self.failed[name]}", pytrace=False)
        return [Outcome(**json.loads(file_of(self.folder, name, f"{rank}.json").read_text())) for rank in (0, 1)]

    def gradients(self, name: str) -> list[torch.Tensor]:
        return [torch.load(file_of(self.folder, name, f"{rank}.pt"), weights_only=True) for rank in (0, 1)]


@pytest.fixture(scope="module")
def policy(small_policy: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first layer of the small policy, with an end of sequence that is likely in some places."""
    loaded, folder = load_policy(str(small_policy), device="cpu"), tmp_path_factory.mktemp("one-layer")
    loaded.model.model.layers = loaded.model.model.layers[:1]
    loaded.model.config.num_hidden_layers = 1
    with torch.no_grad():
        loaded.model.lm_head.weight[loaded.tokenizer.eos_token_id] *= 3
    loaded.model.save_pretrained(folder)
    loaded.tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def two_processes(
    policy: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[TwoProcesses]:
    """With the outcomes of all cases that are to be tested."""
    found = TwoProcesses(policy, tmp_path_factory.mktemp("outcomes"))
    asked = {item.callspec.params["name"] for item in request.session.items if item.fspath == request.fspath
             and hasattr(item, "callspec")}  # fmt: skip
    found.run([name for name in CASES if name in asked])
    gc.collect()
    gc.freeze()
    yield found
    gc.unfreeze()


EVERY = [*FAST, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)]


def test_every_strategy_is_here() -> None:
    for fewer in (FAST, CASES):
        assert {strategy for case in fewer.values() for spec in case.strategies for strategy in spec} == set(REGISTRY)


@pytest.mark.parametrize("name", ["given/plain", "engine/plain", "engine/company"])
def test_scenes(two_processes: TwoProcesses, name: str) -> None:
    """The parts of the batch are as different as `SCENES` says."""
    first, second = two_processes.outcomes(name)
    ends = load_policy(str(two_processes.policy), device="cpu").tokenizer.eos_token_id

    def ended(completions: list[list[int]]) -> list[bool]:
        return [ids[-1] == ends for ids in completions]

    scene = dict(zip(SCENES, range(len(SCENES)), strict=True))
    at = scene["solved"]
    assert min(first.rewards[at]) >= 1 > max(second.rewards[at])
    assert max(map(len, first.completions[at])) == LENGTH
    assert set(map(len, second.completions[at])) == {1}
    at = scene["truncated"]
    assert not any(ended(second.completions[at]))
    assert all(ended(first.completions[at])) if name.startswith("given") else any(ended(first.completions[at]))
    at = scene["flat"]
    assert set(first.rewards[at]) == {0.5} == set(second.rewards[at][GENERATIONS:])
    assert len(set(second.rewards[at][:GENERATIONS])) > 1
    at = scene["unscored"]
    assert all(map(math.isnan, second.rewards[at]))
    assert len(set(first.rewards[at])) > 1
    if name == "engine/company":
        temperatures = [first.logs[0][f"strategy/element_wise_temperature/temperature_{end}"] for end in ("min", "max")]
        assert temperatures == [1.0, 1.5]


@pytest.mark.parametrize("name", EVERY)
def test_both_agree(two_processes: TwoProcesses, name: str) -> None:
    """They end, with the same weights, and have logged the same, which is finite."""
    first, second = two_processes.outcomes(name)
    assert first.weights == second.weights
    steps = len(SCENES) * steps_a_batch(CASES[name])
    assert [entry["step"] for entry in first.logs] == [*range(1, steps + 1), steps]
    for one, other in zip(first.logs, second.logs, strict=True):
        assert one == pytest.approx(other, rel=1e-6, nan_ok=True)
    assert all(math.isfinite(entry["loss"]) for entry in first.logs[:-1])


OF_ANY_SPLIT = ("num_tokens", "reward", "frac_reward", "completions/", "strategy/")
"""What is logged of a whole generation batch, or as a sum: however it is split into micro-batches."""


@pytest.mark.parametrize(
    "name", [name for name in EVERY if CASES[getattr(name, "values", (name,))[0]].compared != "no"]
)
def test_as_one_process_does(two_processes: TwoProcesses, name: str) -> None:
    """The same gradients as on one process with all rows, and what is logged of a whole batch is the same."""
    case, (outcome, _) = CASES[name], two_processes.outcomes(name)
    one, expected = train(two_processes.policy, case, processes=1)
    halves = [o.completions for o in two_processes.outcomes(name)]
    assert one.completions == [a + b for a, b in zip(*halves, strict=True)]
    for found in two_processes.gradients(name):
        if case.compared == "batches":
            found, target = (g.view(len(SCENES), -1, g.size(1)).sum(1) for g in (found, expected))
        else:
            target = expected
        off = (found - target).norm(dim=1) / target.norm(dim=1).clamp(min=1e-3)
        assert off.max() < case.tolerance, off.tolist()
    for step, (two, entry) in enumerate(zip(outcome.logs, one.logs, strict=True)):
        keys = entry.keys() if case.whole else {key for key in entry if key.startswith(OF_ANY_SPLIT)}
        assert {key: two[key] for key in keys} == pytest.approx(
            {key: entry[key] for key in keys}, rel=1e-4, abs=max(1e-5, case.tolerance), nan_ok=True
        ), step


if __name__ == "__main__":
    one_of_two_processes(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
