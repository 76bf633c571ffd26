"""Answers that call a tool in text: what it says is not learnt from and enters no statistic."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset

from explorl.rollout import tool_use
from explorl.rollout.tool_use import ToolUse
from explorl.rollout.tools import Delimiters, python_tool
from explorl.strategies import REGISTRY, Batch, Strategy, build_all
from explorl.training.grpo import sampler
from explorl.training.grpo.batch import ROW_FIELDS, penalties
from explorl.training.grpo.observers import statistics
from explorl.training.grpo.shaping import shape
from explorl.training.grpo.trainer import ExplorationTrainer
from explorl.training.grpo.trl_adapter import logs_of
from tests.training.test_every_strategy import SETTINGS, few_answers, logs, weights
from tests.training.tool_policy import PROMPTS, calculator, make_trainer, save_tool_policy

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

RATES = {prompt: (index % 4) / 4 for index, prompt in enumerate(PROMPTS)}
COMPANY: list[Any] = [
    {"ppl_shaping": {"alpha": 0.2}},
    {"element_wise_temperature": {"solve_rates": RATES}},
    {"bottom_p": {"p": 0.8}},
    "importance_correction",
    "egsw",
    {"position_shaping": {"start": 0, "steps": 9}},
    {"forking_tokens": {"normalize": "kept"}},
    {"overlong_penalty": {"cache": 10, "longest": 20}},
    {"kl_cov": {"fraction": 0.2}},
]
Make = Callable[..., Any]


@dataclass(frozen=True)
class Watching(Strategy):
    """Keeps the batches that it sees."""

    seen: list[Batch] = field(default_factory=list)

    def advantages(self, batch: Batch) -> torch.Tensor:
        self.seen.append(batch)
        return batch.advantages


@pytest.fixture(scope="module")
def tool_policy(small_policy: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tool_policy(small_policy, tmp_path_factory.mktemp("tool-policy"))


@pytest.fixture
def make(tool_policy: Path, tmp_path: Path) -> Make:
    def trainer(*strategies: Any, options: dict[str, Any] | None = None, **changes: Any) -> Any:
        settings = {"strategies": strategies, "correct": ("digits", 0.5), "answers": few_answers, **(options or {})}
        return make_trainer(ExplorationTrainer, tool_policy, tmp_path / "out", options=settings, **changes)

    return trainer


@pytest.fixture(scope="module")
def batch(tool_policy: Path, tmp_path_factory: pytest.TempPathFactory) -> Batch:
    """A batch in which a good part of the tokens are a tool's."""
    watching = Watching()
    options: dict[str, Any] = {
        "strategies": [watching, "outcome_exploration", "lp_reg"],
        "correct": ("digits", 0.5),
    }
    options["answers"] = few_answers
    folder = tmp_path_factory.mktemp("out")
    make_trainer(ExplorationTrainer, tool_policy, folder, options=options, beta=0.1).train()
    return watching.seen[0]


def tool_tokens(batch: Batch) -> torch.Tensor:
    """Tokens before the last that counts, and that do not count: outputs."""
    after = batch.mask.flip(1).cumsum(1).flip(1) > 0
    return after & (batch.mask == 0)


def spoilt(batch: Batch) -> Batch:
    """The same with nonsense on the tokens of tools."""
    output = tool_tokens(batch)
    generator = torch.Generator().manual_seed(1)

    def nonsense(values: torch.Tensor | None, scale: float) -> torch.Tensor | None:
        noise = scale * torch.rand(batch.mask.shape, generator=generator)
        return None if values is None else torch.where(output, noise, values)

    logps = nonsense(batch.logps, -30.0)
    return batch.with_(
        logps=logps,
        old_logps=nonsense(batch.old_logps, -30.0),
        ref_logps=nonsense(batch.ref_logps, -30.0),
        sampling_logps=nonsense(batch.sampling_logps, -30.0),
        entropy=nonsense(batch.entropy, 50.0),
        branching=nonsense(batch.branching, 90.0),
        advantages=nonsense(batch.advantages, 5.0),
        min_p_mass=nonsense(batch.min_p_mass, 1.0),
    )


def of_rows(spec: dict[str, Any]) -> dict[str, Any]:
    ((name, options),) = spec.items()
    options = {**options, "solve_rates": RATES} if "solve_rates" in options else options
    return {name: {**options, "start": 0} if name == "position_shaping" else options}


@pytest.mark.parametrize("name", list(REGISTRY))
def test_no_strategy_looks_at_a_tools_tokens(batch: Batch, name: str) -> None:
    assert tool_tokens(batch).sum() > 0.1 * batch.mask.sum()
    counted = batch.mask > 0
    for options in SETTINGS[name]:
        results = []
        for variant in (batch, spoilt(batch)):
            strategies = build_all([of_rows({name: options})])
            shaped = shape(strategies, variant, lambda rewards: rewards - rewards.mean())
            inputs: dict[str, Any] = {f"kept/{key}": value for key, value in shaped.kept.items()}
            rows = {f"row_{key}": getattr(variant, key) for key in ROW_FIELDS}
            inputs |= {"recorded_entropy": variant.entropy, "ref_per_token_logps": variant.ref_logps, **rows}
            terms = penalties(
                strategies, inputs, logps=variant.logps - 0.1, old_logps=variant.old_logps, mask=variant.mask,
                advantages=shaped.advantages, temperature=1.0, step=0,
            )  # fmt: skip
            tensors = [shaped.advantages, shaped.loss_mask, shaped.weights, shaped.kl_weights]
            tensors += [*(shaped.clip or ()), *shaped.kept.values(), *(term for _, term in terms)]
            results.append(([tensor[counted] for tensor in tensors], shaped.metrics, shaped.loss_mask))
        (clean, numbers, mask), (other, other_numbers, other_mask) = results
        assert len(clean) == len(other)
        for first, two in zip(clean, other, strict=True):
            torch.testing.assert_close(two, first, rtol=0, atol=0)
        assert other_numbers == pytest.approx(numbers, abs=1e-6, nan_ok=True)
        assert mask[~counted].abs().max() == other_mask[~counted].abs().max() == 0


def with_nonsense(trainer: Any, sampled: dict[tuple[int, ...], torch.Tensor]) -> Any:
    """Log-probabilities and records of a tool's tokens are others, and so is their gradient.

    sampled: by the tokens of an answer, which of them the engine sampled.
    """
    recorded, logps = trainer.logprobs.statistics, trainer.logprobs.of

    def output_of(batch: Any) -> torch.Tensor:
        output = torch.zeros_like(batch["completion_mask"], dtype=torch.bool)
        for row, (ids, length) in enumerate(zip(batch["completion_ids"], batch["completion_mask"].sum(1), strict=True)):
            output[row, :length] = ~sampled[tuple(ids[:length].tolist())]
        return output

    def spoilt_records(batch: Any, *sampled_rows: Any, **options: Any) -> Any:
        found, output = recorded(batch, *sampled_rows, **options), output_of(batch)
        changed = {key: value.masked_fill(output, 40.0) for key, value in found._asdict().items() if value is not None}
        return found._replace(**changed)

    def spoilt_logps(batch: Any, **kwargs: Any) -> Any:
        values, entropy, aux = logps(batch, **kwargs)
        output = output_of(batch)
        values = torch.where(output, 3 * values - 2, values)
        return values, None if entropy is None else torch.where(output, 5 * entropy + 1, entropy), aux

    trainer.logprobs.statistics, trainer.logprobs.of = spoilt_records, spoilt_logps
    return trainer


@pytest.fixture
def sampled_once(monkeypatch: pytest.MonkeyPatch) -> Callable[[], dict[tuple[int, ...], torch.Tensor]]:
    """What is sampled from now on is sampled again after the call: which rows are decoded together depends on how long
    tools take, and rounding on that. The call says which tokens of each answer were sampled. Sampling draws random
    numbers, and what is logged is averaged over micro-batches that later ones decide: they go on as they did."""
    recorded: list[Any] = []
    position = [0]
    generate = tool_use.generate_with_tools

    def sampled(*arguments: Any, **options: Any) -> Any:
        if position[0] == len(recorded):
            recorded.append((generate(*arguments, **options), torch.get_rng_state()))
        rollouts, state = recorded[position[0]]
        torch.set_rng_state(state)
        position[0] += 1
        return rollouts

    monkeypatch.setattr(sampler, "generate_with_tools", sampled)

    def again() -> dict[tuple[int, ...], torch.Tensor]:
        position[0] = 0
        return {tuple(rollout.token_ids): rollout.sampled for rollouts, _ in recorded for rollout in rollouts}

    return again


@pytest.mark.parametrize("loss_type", ["dapo", pytest.param("grpo", marks=pytest.mark.slow)])
@pytest.mark.parametrize("strategies", [[], COMPANY], ids=["plain", "company"])
def test_no_gradient_and_no_logged_number_comes_from_a_tools_tokens(
    make: Make, sampled_once: Callable[[], Any], strategies: list[Any], loss_type: str
) -> None:
    changes = {"num_iterations": 2, "max_steps": 3, "beta": 0.05, "loss_type": loss_type, "optim": "sgd"}
    clean = make(*strategies, options={"observers": statistics()}, learning_rate=0.1, **changes)
    clean.train()
    other = make(*strategies, options={"observers": statistics()}, learning_rate=0.1, **changes)
    with_nonsense(other, sampled_once()).train()
    assert logs(clean)[1]["tools/call_frequency"] > 0.3
    for name, value in weights(clean).items():
        torch.testing.assert_close(weights(other)[name], value, rtol=0, atol=0, msg=name)
    expected, actual = logs(clean), logs(other)
    assert list(actual) == list(expected) == [1, 2, 3]
    for step in expected:
        assert actual[step] == pytest.approx(expected[step], rel=1e-6, nan_ok=True), step


def test_lengths_and_rewards_are_of_what_the_policy_wrote(make: Make) -> None:
    scored: list[list[str]] = []

    def digits(completions: list[str], **columns: Any) -> list[float]:
        scored.append(list(completions))
        return [float(len(text) % 3) for text in completions]

    watching, recorded = Watching(), []
    options = {"on_rollouts": lambda step, columns: recorded.append(columns), "token_records": 2}
    trainer = make(watching, options=options, reward=digits)
    trainer.train()
    batch, (columns,) = watching.seen[0], recorded
    logged = trainer.state.log_history[0]
    lengths = batch.mask.sum(1)
    assert logged["completions/mean_length"] == pytest.approx(lengths.mean().item())
    assert logged["completions/max_length"] == lengths.max().item()
    assert logged["num_tokens"] == lengths.sum() + sum(len(prompt) for prompt in columns["prompt"])
    assert scored[0] == columns["completion"]
    counts = [len(calls) for calls in columns["calls"]]
    assert logged["tools/callers"] == sum(map(bool, counts)) / len(counts)
    for row, calls in enumerate(columns["calls"]):
        text = columns["transcript"][row]
        outputs = [call["text"].strip().splitlines()[-1] for call in calls if call["status"] != "refused"]
        assert all(f"={line}>" in text + ">" for line in outputs[:-1])
        assert len(columns["completion"][row]) <= len(text)
        assert (columns["completion"][row] == text) == (not calls)
        tokens, entropy = columns["tokens"][row], columns["entropy"][row]
        if tokens is not None:
            assert "".join(tokens).replace("<eos>", "") == text
            forced = {index for call in calls for index in range(call["begin"], call["end"])}
            for name in ("entropy", "logp", "token_advantage", "token_weight", "branching"):
                nothing = {index for index, value in enumerate(columns[name][row]) if value is None}
                assert nothing == forced, name
            assert sum(value is not None for value in entropy) == lengths[row]


def calling(*sources: str) -> Delimiters:
    """A fence whose calls run one of these programs, whatever the policy wrote."""

    class Replaced(Delimiters):
        def find(self, text: str, start: int) -> Any:
            call = super().find(text, start)
            which = 0 if call is None else sum(map(ord, text[: call.end])) % len(sources)
            return None if call is None else call._replace(source=sources[which])

    return Replaced("<", "=", "", ">")


def test_an_answer_that_a_program_prints_is_not_an_answer(make: Make) -> None:
    scored: list[str] = []

    def bracketed(completions: list[str], **columns: Any) -> list[float]:
        scored.extend(completions)
        return [float("[12]" in text) for text in completions]

    printing = calculator(fence=calling("print('[12]')"))
    trainer = make(reward=bracketed, options={"correct": ("bracketed", 1.0), "interpreter": printing})
    trainer.train()
    assert "<" in "".join(scored)
    assert "[12]" in "".join(logs_of(trainer)["completion"])  # what is shown has it
    assert trainer.state.log_history[0]["reward"] == 0


def test_messages_are_rewarded_for_the_policys_own_words_too(make: Make) -> None:
    scored: list[list[dict[str, str]]] = []
    recorded: list[dict[str, list[Any]]] = []

    def contents(completions: list[Any], **columns: Any) -> list[float]:
        scored.extend(completions)
        return [float(len(message["content"]) % 3) for (message,) in completions]

    options = {"on_rollouts": lambda step, columns: recorded.append(columns), "correct": ("contents", 1.0)}
    prompts = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
    trainer = make("ppl_shaping", options=options, reward=contents, prompts=prompts)
    trainer.train()
    assert [message["content"] for (message,) in scored] == recorded[0]["completion"]
    assert {message["role"] for (message,) in scored} == {"assistant"}
    assert recorded[0]["completion"] != recorded[0]["transcript"]


def test_evaluation_has_the_tool_too(make: Make) -> None:
    dataset = Dataset.from_dict({"prompt": PROMPTS[:2]})
    trainer = make("egsw", options={"eval_dataset": dataset}, per_device_eval_batch_size=8, num_generations_eval=4)
    metrics = trainer.evaluate()
    assert metrics["eval_tools/callers"] > 0
    assert metrics["eval_completions/max_length"] <= 24


def test_micro_batches_and_resuming_change_nothing(make: Make, tmp_path: Path) -> None:
    changes = {"max_steps": 4, "num_iterations": 2, "save_strategy": "steps", "save_steps": 2, "beta": 0.05}
    whole = make(*COMPANY, **changes)
    whole.train()
    small = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}
    smaller = make(*COMPANY, **{**changes, **small, "save_strategy": "no"})
    smaller.train()
    for name, value in weights(whole).items():
        torch.testing.assert_close(weights(smaller)[name], value, rtol=1e-4, atol=1e-5, msg=name)
    resumed = make(*COMPANY, **changes)
    resumed.train(resume_from_checkpoint=str(tmp_path / "out/checkpoint-2"))
    for name, value in weights(whole).items():
        torch.testing.assert_close(weights(resumed)[name], value, rtol=1e-4, atol=1e-5, msg=name)
    for step in (3, 4):
        expected, actual = logs(whole)[step], logs(resumed)[step]
        assert actual.keys() == expected.keys()
        near = [key for key in expected if not key.endswith("_tokens")]  # which count what is not exactly 1
        assert [actual[key] for key in near] == pytest.approx([expected[key] for key in near], rel=1e-3, abs=1e-5)


@pytest.mark.parametrize(
    "replacement", [{"dynamic_sampling": True}, {"skip_solved": {"visits": 1}}], ids=["dynamic", "skip"]
)
def test_prompts_are_exchanged_with_their_calls(make: Make, replacement: dict[str, Any]) -> None:
    def digits(completions: list[str], prompts: list[str], **columns: Any) -> list[float]:
        """The prompts that begin with 1 or 2 teach nothing."""
        return [
            1.0 if prompt[0] in "12" else float(len(text) % 2)
            for prompt, text in zip(prompts, completions, strict=True)
        ]

    steps: list[Any] = []
    options = {"on_rollouts": lambda step, columns: steps.append(columns), "token_records": 2, **replacement}
    trainer = make("ppl_shaping", options=options, reward=digits, max_steps=3)
    trainer.train()
    for columns in steps:
        assert any(columns["calls"])
        for row, calls in enumerate(columns["calls"]):
            assert "".join(columns["tokens"][row]).replace("<eos>", "") == columns["transcript"][row]
            forced = {index for call in calls for index in range(call["begin"], call["end"])}
            assert {index for index, value in enumerate(columns["logp"][row]) if value is None} == forced


def test_a_progression_gives_some_prompts_the_tool(make: Make) -> None:
    steps: list[Any] = []
    progression = {"tool_progression": {"share": 0.5, "calls": 1, "seed": 2}}
    options = {"on_rollouts": lambda step, columns: steps.append(columns)}
    trainer = make(progression, options=options, max_steps=3)
    trainer.train()
    (strategy,) = build_all([progression])
    for step, columns in enumerate(steps):
        allowed = strategy.sampling(columns["prompt"], step)["tool_calls"]
        made = [sum(call["status"] != "refused" for call in calls) for calls in columns["calls"]]
        assert all(count <= most for count, most in zip(made, allowed, strict=True))
        share = sum(map(bool, allowed)) / len(allowed)
        assert logs(trainer)[step + 1]["strategy/tool_progression/share"] == share
        assert all(not calls for calls, most in zip(columns["calls"], allowed, strict=True) if not most)
    assert any(any(columns["calls"]) for columns in steps)


def test_a_progression_without_a_tool_is_refused(make: Make) -> None:
    with pytest.raises(
        ValueError, match="tool_progression sets how often completions may call a tool, but there is none"
    ):
        make("tool_progression", options={"interpreter": None})
    with pytest.raises(ValueError, match="calls goes up to 3, but the tool allows 2"):
        make("tool_progression", options={"interpreter": calculator(max_calls=2)})


HOSTILE = (
    "while True: pass",
    "import os\nos._exit(3)",
    "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)",
    "x = 'a' * 10**10",
    "print('7' * 10**7)",
    "import os\nwhile True: os.fork()",
    "import os\nfor f in range(64):\n try: os.close(f)\n except OSError: pass",
    "import sys\nsys.setrecursionlimit(10**9)\nf = lambda: f()\nf()",
    "raise SystemExit('bye')",
    "print('<eos>\\x00\\ud800')",
    "print('<eos>' + 9 * 'q')",
    "input()",
    "open('/etc/passwd', 'w')",
)


@pytest.mark.slow
def test_training_goes_on_whatever_programs_do(make: Make) -> None:
    steps: list[Any] = []
    options = {
        "on_rollouts": lambda step, columns: steps.append(columns),
        "interpreter": calculator(fence=calling(*HOSTILE), seconds=0.5, memory=256 << 20),
    }
    trainer = make("egsw", options=options, max_steps=3, per_device_train_batch_size=8)
    trainer.train()
    states = {call["status"] for columns in steps for calls in columns["calls"] for call in calls}
    assert {"ok", "error", "timeout", "exited"} <= states
    assert list(logs(trainer)) == [1, 2, 3]
    assert any("qqq" in text for columns in steps for text in columns["transcript"])
    for columns in steps:
        for own in columns["completion"]:
            assert "qqq" not in own


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"interpreter": "pyhton"}, "unknown tool 'pyhton'; did you mean 'python'"),
        ({"interpreter": 3}, "interpreter is 3; give the name of a tool"),
        ({"engine": "generate"}, r"interpreter='calculator' needs Explorl's engine, .*engine='generate'"),
        ({"rollout_func": print}, "cannot be combined with rollout_func"),
        ({"tools": [print]}, "cannot be combined with tools"),
    ],
)
def test_what_a_tool_does_not_go_with_is_refused(make: Make, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(options=options)


def test_a_tool_that_the_vocabulary_cannot_call_is_refused(make: Make) -> None:
    fence = Delimiters("⟨", "=", "", "⟩")
    with pytest.raises(ValueError, match=r"which the tokenizer of .* cannot write"):
        make(options={"interpreter": calculator(fence=fence)})


def test_a_tool_by_name_and_with_settings(make: Make) -> None:
    assert make(options={"interpreter": "python"}).sampler.interpreter == ToolUse(python_tool())
    use = ToolUse(python_tool(max_calls=1), warm=0)
    assert make(options={"interpreter": use}).sampler.interpreter is use
    assert make(options={"interpreter": None}).sampler.interpreter is None
    assert ToolUse.of(python_tool()) == ToolUse(python_tool())
