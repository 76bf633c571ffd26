"""The packed SFT trainer learns what TRL's learns: losses, gradients, metrics, order of the rows."""

from __future__ import annotations

import functools
import random
import warnings
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, TrainerCallback, TrainingArguments
from trl import SFTConfig, SFTTrainer

from explorl.models import load_policy, tiny_tokenizer
from explorl.training.run_setup import disabled_progress, quiet
from explorl.training.sft import packed_rows
from explorl.training.sft.data import tokenize_dataset
from explorl.training.sft.forward_pass import tokens_that_fit
from explorl.training.sft.packed_rows import TokenRows
from explorl.training.sft.trainer import PackedSFTTrainer
from tests.modeling import zoo
from tests.training.test_sft import CHAT

LETTERS = "abcdefghij 0123456789+="


def text_rows(count: int, seed: int = 0, longest: int = 60) -> list[dict[str, Any]]:
    """Prompts and completions of very different lengths."""
    draw = random.Random(seed)

    def text(most: int) -> str:
        return "".join(draw.choice(LETTERS) for _ in range(draw.randint(1, most)))

    return [{"prompt": text(30), "completion": text(longest)} for _ in range(count)]


def chat_rows(count: int, seed: int = 0) -> list[dict[str, Any]]:
    return [
        {
            "prompt": [{"role": "system", "content": "answer"}, {"role": "user", "content": row["prompt"]}],
            "completion": [{"role": "assistant", "content": row["completion"]}],
        }
        for row in text_rows(count, seed)
    ]


def chat_tokenizer() -> Any:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template, tokenizer.model_max_length = CHAT, 4096
    return tokenizer


class Watch(TrainerCallback):
    """The gradients of each optimizer step."""

    def __init__(self) -> None:
        self.steps: list[dict[str, torch.Tensor]] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        named = model.named_parameters()
        self.steps.append({name: p.grad.clone() for name, p in named if p.grad is not None})


@pytest.fixture
def make(small_policy: Path, tmp_path: Path) -> Callable[..., Any]:
    """Builds a trainer class on the small policy; keyword arguments go to `SFTConfig`.

    By SGD: Adam makes of a gradient that is nothing but rounding a step as long as any other.
    """

    def build(cls: Any, rows: Any, *, model: Any = None, options: dict[str, Any] | None = None, **changes: Any) -> Any:
        arguments: dict[str, Any] = {
            "output_dir": str(tmp_path / "out"), "per_device_train_batch_size": 4, "max_steps": 2, "logging_steps": 1,
            "optim": "sgd", "learning_rate": 0.1, "save_strategy": "no", "report_to": "none", "disable_tqdm": True,
            "bf16": False, "gradient_checkpointing": False, "use_cpu": True, "dataloader_pin_memory": False,
            "max_length": 4096, "max_grad_norm": 0.0, "seed": 3,
        }  # fmt: skip
        if not isinstance(rows, list):
            arguments["dataset_kwargs"] = {"skip_prepare_dataset": True}
        trainer = cls(
            model=model if model is not None else load_policy(str(small_policy), device="cpu").model,
            args=SFTConfig(**{**arguments, **changes}),
            train_dataset=Dataset.from_list(rows) if isinstance(rows, list) else rows,
            processing_class=chat_tokenizer(),
            **(options or {}),
        )
        quiet(trainer)
        trainer.watch = Watch()
        trainer.add_callback(trainer.watch)
        return trainer

    return build


@pytest.fixture(scope="module", autouse=True)
def quietly() -> Iterator[None]:
    """No bars."""
    with disabled_progress(), pytest.MonkeyPatch.context() as patch:
        patch.setitem(packed_rows.MIN_SAVING, "cpu", 1)  # so that small batches have blocks
        yield


def assert_same(ours: Any, theirs: Any, *, tolerance: float = 1e-5) -> None:
    """Both have taken the same steps."""
    assert len(ours.watch.steps) == len(theirs.watch.steps) == ours.args.max_steps
    for got, expected in zip(ours.watch.steps, theirs.watch.steps, strict=True):
        assert got.keys() == expected.keys()
        for name, gradient in expected.items():
            difference = (got[name] - gradient).norm()
            assert difference <= tolerance * gradient.norm() + 1e-2 * tolerance, (name, difference, gradient.norm())
    for got, expected in zip(ours.state.log_history, theirs.state.log_history, strict=True):
        assert got.keys() == expected.keys()
        for key in ("loss", "num_tokens", "grad_norm"):
            assert got.get(key, 0.0) == pytest.approx(expected.get(key, 0.0), rel=10 * tolerance), key


def assert_same_scores(ours: Any, theirs: Any) -> None:
    """Both have logged the same about tokens: TRL's means are over micro-batches."""
    for got, expected in zip(ours.state.log_history, theirs.state.log_history, strict=True):
        assert got.keys() == expected.keys()
        for key in got:
            if key.endswith(("entropy", "mean_token_accuracy", "num_tokens")):
                assert got[key] == pytest.approx(expected[key], rel=1e-4), key


def train(*trainers: Any) -> None:
    for trainer in trainers:
        torch.manual_seed(7)
        trainer.train()


def both(make: Callable[..., Any], rows: Any, *, ours: dict[str, Any] | None = None, **changes: Any) -> tuple[Any, Any]:
    """A packed trainer and TRL's, after training."""
    options = changes.pop("options", {})
    mine = make(PackedSFTTrainer, rows, options={**options, "packed": True, **(ours or {})}, **changes)
    theirs = make(SFTTrainer, rows, options=options, **changes)
    train(mine, theirs)
    return mine, theirs


def ready(rows: list[dict[str, Any]]) -> Dataset:
    """Tokenised rows, which both trainers take as they are: TRL's own preparation takes a second."""
    dataset = tokenize_dataset(
        Dataset.from_list(rows), chat_tokenizer(), max_length=None, keep_start=True, completion_only=True
    )
    return dataset.select_columns(["input_ids", "labels"])


CASES: dict[str, dict[str, Any]] = {
    "one micro-batch": {},
    "accumulation": {"gradient_accumulation_steps": 3, "per_device_train_batch_size": 2},
    "several passes": {"per_device_train_batch_size": 8, "ours": {"tokens_per_pass": 250}},
    "checkpointing": {"gradient_checkpointing": True},
    "dft": {"loss_type": "dft"},
    "by length": {"train_sampling_strategy": "group_by_length"},
}


@pytest.mark.parametrize("case", CASES)
def test_losses_and_gradients_are_those_of_trl(case: str, make: Callable[..., Any]) -> None:
    changes = CASES[case]
    ours, theirs = both(make, ready(chat_rows(20)), **changes)
    assert ours._kind == "unrolled"
    assert_same(ours, theirs)
    assert_same_scores(ours, theirs)


PREPARED: dict[str, dict[str, Any]] = {
    "whole": {},
    "cut": {"max_length": 24},
    "the end is kept": {"max_length": 24, "truncation_mode": "keep_end"},
    "all tokens, shuffled": {"completion_only_loss": False, "shuffle_dataset": True},
}


@pytest.mark.filterwarnings("ignore:The `'keep_end'` truncation")
@pytest.mark.parametrize("case", PREPARED)
@pytest.mark.parametrize("kind", ["text", "chat"])
def test_rows_are_those_of_trl(case: str, kind: str, make: Callable[..., Any]) -> None:
    rows = text_rows(20) if kind == "text" else chat_rows(20)
    changes = dict(PREPARED[case])
    if kind == "chat" and "max_length" in changes:
        changes["max_length"] = 90
    ours, theirs = (make(cls, rows, **changes).train_dataset for cls in (PackedSFTTrainer, SFTTrainer))
    assert len(ours) == len(theirs) > 0
    assert (len(ours) < 20) == (case == "cut")
    assert ours["input_ids"] == theirs["input_ids"]
    assert ours["labels"] == theirs["labels"]
    assert ours.features["input_ids"] == theirs.features["input_ids"]
    assert ours.features["labels"] == theirs.features["labels"]


def test_rows_are_cut_as_trl_knows_it_or_not_at_all(make: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match="Unsupported truncation mode: keep_middle"):
        make(PackedSFTTrainer, text_rows(3), truncation_mode="keep_middle")


def test_a_column_that_trl_leaves_out_does_not_order_the_rows(make: Callable[..., Any]) -> None:
    rows = ready(text_rows(20)).add_column("length", [7 * place % 20 for place in range(20)])
    assert_same(*both(make, rows, train_sampling_strategy="group_by_length"))


def test_labels_of_another_length_than_their_row(make: Callable[..., Any]) -> None:
    rows = ready(text_rows(4)).to_list()
    rows[1]["labels"].append(5)
    rows[2]["labels"].pop()  # as many labels as tokens, all in all
    trainer = make(PackedSFTTrainer, Dataset.from_list(rows))
    with pytest.raises(ValueError, match=r"row 1 of the training dataset has \d+ labels for \d+ tokens"):
        trainer.train()


def test_an_adapter_gets_the_gradients_of_trl(make: Callable[..., Any]) -> None:
    lora = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False)
    ours, theirs = both(make, ready(text_rows(20)), options={"peft_config": lora}, gradient_accumulation_steps=2)
    assert_same(ours, theirs)
    assert all("lora_" in name for name in ours.watch.steps[0])


def test_an_adapter_that_waits_for_tokens_is_trained_by_trl(make: Callable[..., Any]) -> None:
    """Where an activated LoRA begins to act in a row, peft finds in rows that stand alone."""
    begins = chat_tokenizer()("=", add_special_tokens=False)["input_ids"]
    lora = LoraConfig(r=4, task_type="CAUSAL_LM", target_modules=["q_proj"], alora_invocation_tokens=begins)
    trainer = make(PackedSFTTrainer, ready(text_rows(8)), options={"peft_config": lora}, max_steps=1)
    with pytest.warns(UserWarning, match="padded pass, which is slower.*alora_invocation_tokens"):
        train(trainer)


def test_in_bfloat16_both_round_alike(make: Callable[..., Any]) -> None:
    rows = ready(text_rows(24))
    exact = make(SFTTrainer, rows, per_device_train_batch_size=12)
    exact.train()
    ours, theirs = both(make, rows, per_device_train_batch_size=12, bf16=True)
    weights = {p.dtype for p in ours.model.parameters()}
    assert weights == {torch.float32}
    for name, gradient in exact.watch.steps[0].items():
        ours_off, theirs_off = (
            float((trainer.watch.steps[0][name] - gradient).norm() / gradient.norm()) for trainer in (ours, theirs)
        )
        assert ours_off <= 1.5 * theirs_off + 1e-3, name
        assert theirs_off > 1e-4, name  # it does compute in bfloat16


@pytest.mark.parametrize("rows", [1, 5])
def test_a_few_rows(rows: int, make: Callable[..., Any]) -> None:
    ours, theirs = both(make, ready(text_rows(rows)), gradient_accumulation_steps=2, per_device_train_batch_size=2)
    assert_same(ours, theirs)


def test_prompts_are_not_learnt(make: Callable[..., Any]) -> None:
    """What the head reads at a place gets a gradient only where the token after it is a completion's."""
    rows = text_rows(5)
    trainer = make(PackedSFTTrainer, ready(rows), options={"packed": True})
    states: list[torch.Tensor] = []

    def keep(module: Any, inputs: Any, output: Any) -> None:
        if output.last_hidden_state.requires_grad:
            output.last_hidden_state.retain_grad()
            states.append(output.last_hidden_state)

    trainer.model.model.register_forward_hook(keep)
    trainer.get_train_dataloader()
    batches, learnt = trainer.get_batch_samples(iter([[0, 1, 2], [3, 4]]), 2, torch.device("cpu"))
    assert int(learnt) == sum(len(row["completion"]) + 1 for row in rows)  # and the end-of-sequence token
    for batch in batches:
        for some in batch["passes"]:
            trainer.compute_loss(trainer.model, some, num_items_in_batch=learnt).backward()
            gradient = states.pop().grad
            assert gradient is not None
            expected = expected_places(some, rows, trainer.processing_class)
            assert (gradient[0] != 0).any(-1).tolist() == expected


def expected_places(some: Any, rows: list[dict[str, Any]], tokenizer: Any) -> list[bool]:
    """Whether the token after each place belongs to a completion, by the text that stands there."""
    end = tokenizer.eos_token
    by_text = {row["prompt"] + row["completion"] + end: len(row["prompt"]) for row in rows}
    text, positions = tokenizer.decode(some["input_ids"][0]), some["position_ids"][0].tolist()
    found: list[bool] = []
    for whole in text.replace(end, end + "\0").split("\0")[:-1]:
        prompt, length = by_text[whole], len(tokenizer(whole)["input_ids"])
        found += [prompt <= place + 1 < length for place in range(length)]
    assert len(found) == len(positions)
    return found


def test_no_row_predicts_the_one_behind_it() -> None:
    ids = np.arange(9)
    rows = TokenRows(ids, ids, np.array([4, 1, 4]))
    assert rows.targets.tolist() == [1, 2, 3, -100, -100, 6, 7, 8, -100]
    assert rows.scored.tolist() == [3, 0, 3]


@given(st.lists(st.integers(1, 40), min_size=1, max_size=12), st.sampled_from([None, 1, 3]))
@settings(max_examples=30, deadline=None)
def test_attention_in_blocks_stays_within_each_row(lengths: list[int], window: int | None) -> None:
    lengths = sorted(lengths)
    total = sum(lengths)
    rows = TokenRows(np.arange(total), np.arange(total), np.array(lengths))
    packed = rows.packed(np.arange(len(lengths)), torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(1, 2, total, 4, generator=generator, requires_grad=True)
    key, value = torch.randn(2, 1, 1, total, 4, generator=generator, requires_grad=True)
    out = packed["rows"].attend(query, key, value, 0.5, window, None)
    place = torch.arange(total)
    row = torch.tensor(np.repeat(np.arange(len(lengths)), lengths))
    seen = (row[:, None] == row) & (place[:, None] >= place) & (place[:, None] - place < (window or total))
    scores = (0.5 * query @ key.transpose(2, 3)).masked_fill(~seen, -torch.inf)
    expected = (torch.softmax(scores, -1) @ value).transpose(1, 2)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
    weights = torch.randn(out.shape, generator=generator)
    got, wanted = (torch.autograd.grad((result * weights).sum(), (query, key, value)) for result in (out, expected))
    for mine, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)


@given(st.lists(st.integers(1, 30), min_size=1, max_size=30), st.integers(30, 80), st.integers(1, 4))
@settings(max_examples=100, deadline=None)
def test_every_row_is_in_one_pass_and_bounds_hold(lengths: list[int], most: int, batches: int) -> None:
    total = sum(lengths)
    rows = TokenRows(np.zeros(total), np.zeros(total), np.array(lengths))
    chosen = [some.tolist() for some in np.array_split(np.arange(len(lengths)), min(batches, len(lengths)))]
    found = rows.batches(chosen, most)
    assert len(found) == len(chosen)
    assert sorted(np.concatenate([some for batch in found for some in batch]).tolist()) == list(range(len(lengths)))
    for batch in found:
        assert sum(len(some) for some in batch) <= max(len(some) for some in chosen)
        for some in batch:
            assert rows.lengths[some].sum() <= most
            assert sorted(rows.lengths[some]) == rows.lengths[some].tolist()


@pytest.mark.parametrize(
    ("name", "kind"), [("mamba", "padded"), ("gptj", "padded"), ("gemma2", "packed"), ("granite", "packed")]
)
def test_models_of_other_kinds_are_trained_as_trl_does(name: str, kind: str, make: Callable[..., Any]) -> None:
    """A state that runs on, heads of other layers, and logits that are capped or scaled."""
    tokenizer = tiny_tokenizer()
    found = []
    for cls in (PackedSFTTrainer, SFTTrainer):
        torch.manual_seed(0)
        found.append(make(cls, ready(text_rows(12)), model=zoo_model(name, len(tokenizer))))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", UserWarning)
        train(*found)
    slower = [str(warning.message) for warning in said if "padded pass, which is slower" in str(warning.message)]
    assert found[0]._kind == kind
    assert len(slower) == (kind == "padded")
    assert_same(*found, tolerance=1e-4)


def test_rows_that_have_nothing_to_learn(make: Callable[..., Any]) -> None:
    rows = ready(text_rows(8)).to_list()
    for row in rows[::2]:
        row["labels"] = [-100] * len(row["labels"])
    dataset = Dataset.from_list(rows)
    ours, theirs = both(make, dataset, ours={"tokens_per_pass": 100}, per_device_train_batch_size=8)
    assert_same(ours, theirs)


def zoo_model(name: str, vocab: int) -> Any:
    config = zoo.build(name).config
    config.vocab_size = vocab
    return AutoModelForCausalLM.from_config(config)


OPTIONS: dict[str, dict[str, Any]] = {
    "padding-free": {"padding_free": True, "max_length": None},
    "label smoothing": {"label_smoothing_factor": 0.1},
    "noise": {"neftune_noise_alpha": 5.0},
}


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("option", OPTIONS)
def test_options_that_need_trls_own_pass(option: str, make: Callable[..., Any]) -> None:
    changes = {"max_steps": 1, **OPTIONS[option]}
    rows = ready(text_rows(12))
    ours, theirs = make(PackedSFTTrainer, rows, **changes), make(SFTTrainer, rows, **changes)
    with pytest.warns(UserWarning, match="padded pass, which is slower"):
        train(ours)
    train(theirs)
    assert_same(ours, theirs, tolerance=1e-7)
    ours._packed = True
    with pytest.raises(ValueError, match="packed=True does not work here"):
        ours.get_train_dataloader()


class Weighted(PackedSFTTrainer):
    """A stranger's loss, which reads labels and logits as TRL documents them."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        logits = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits[:, :-1]
        loss = torch.nn.functional.cross_entropy(logits.transpose(1, 2), inputs["labels"][:, 1:])
        return (loss, None) if return_outputs else loss


def test_a_loss_of_the_users_own_gets_padded_rows(make: Callable[..., Any]) -> None:
    trainer = make(Weighted, ready(text_rows(8)), max_steps=1)
    with pytest.warns(UserWarning, match="compute_loss is overridden"):
        train(trainer)
    assert trainer.watch.steps
    put_in_place = make(PackedSFTTrainer, ready(text_rows(8)), max_steps=1)
    put_in_place.compute_loss = Weighted.compute_loss.__get__(put_in_place)
    with pytest.warns(UserWarning, match="compute_loss is overridden"):
        train(put_in_place)


def test_a_step_of_the_users_own_sees_trls_batches(make: Callable[..., Any]) -> None:
    def subclass(base: Any, method: str) -> Any:
        def own(self: Any, *args: Any) -> Any:
            given = getattr(base, method)(self, *args)
            batches = (
                given[0] if method == "get_batch_samples" else [args[-1] if method == "_prepare_inputs" else args[1]]
            )
            self.learnt = [*getattr(self, "learnt", []), *(int((batch["labels"] != -100).sum()) for batch in batches)]
            return given

        return type("Own", (base,), {method: own})

    for method in ("training_step", "get_batch_samples", "_prepare_inputs"):
        ours, theirs = (
            make(subclass(cls, method), ready(text_rows(8)), max_steps=1) for cls in (PackedSFTTrainer, SFTTrainer)
        )
        with pytest.warns(UserWarning, match=f"padded pass, which is slower: {method} is overridden"):
            train(ours)
        train(theirs)
        assert ours.learnt == theirs.learnt


def test_switched_off_it_is_trl(make: Callable[..., Any]) -> None:
    ours = make(PackedSFTTrainer, ready(text_rows(12)), options={"packed": False})
    theirs = make(SFTTrainer, ready(text_rows(12)))
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        train(ours)
    train(theirs)
    assert_same(ours, theirs, tolerance=1e-9)


def test_no_pass_has_more_tokens_than_allowed(make: Callable[..., Any]) -> None:
    trainer = make(
        PackedSFTTrainer, ready(text_rows(40)), options={"packed": True, "tokens_per_pass": 128}, max_steps=1
    )
    trainer.get_train_dataloader()
    chosen = [list(range(start, start + 10)) for start in range(0, 40, 10)]
    batches, _ = trainer.get_batch_samples(iter(chosen), 4, torch.device("cpu"))
    sizes = [some["input_ids"].numel() for batch in batches for some in batch["passes"]]
    assert len(batches) == 4
    assert max(sizes) <= 128
    assert sum(sizes) == trainer._rows.lengths[:40].sum()
    tight = make(PackedSFTTrainer, ready(text_rows(40)), options={"packed": True, "tokens_per_pass": 20}, max_steps=1)
    with pytest.raises(ValueError, match=r"tokens_per_pass is 20, and the longest row has \d+ tokens; use \d+ or more"):
        tight.train()


def test_nothing_left_to_learn(make: Callable[..., Any]) -> None:
    rows = [{"prompt": "a" * 30, "completion": "b"}]
    with pytest.raises(ValueError, match="within max_length=20 tokens"):
        make(PackedSFTTrainer, rows, max_length=20)


@pytest.mark.parametrize("logged", [1, 2])
def test_evaluation_is_that_of_trl(logged: int, make: Callable[..., Any]) -> None:
    options = {"eval_dataset": ready(text_rows(6, seed=1))}
    how: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 1, "logging_steps": logged, "max_steps": 3}
    ours, theirs = both(make, ready(text_rows(12)), options=options, gradient_accumulation_steps=logged, **how)
    assert_same_scores(ours, theirs)
    for got, expected in zip(ours.state.log_history, theirs.state.log_history, strict=True):
        assert got.get("eval_loss", 0.0) == pytest.approx(expected.get("eval_loss", 0.0), rel=1e-5)
        assert got.get("num_tokens") == expected.get("num_tokens")


def test_a_resumed_training_takes_the_same_steps(make: Callable[..., Any], tmp_path: Path) -> None:
    how: dict[str, Any] = {"max_steps": 7, "gradient_accumulation_steps": 2, "lr_scheduler_type": "cosine"}
    whole = make(PackedSFTTrainer, ready(text_rows(20)), options={"packed": True}, **how)
    whole.train()
    saved = {**how, "save_strategy": "steps", "save_steps": 4}
    make(PackedSFTTrainer, ready(text_rows(20)), options={"packed": True}, **saved).train()
    resumed = make(PackedSFTTrainer, ready(text_rows(20)), options={"packed": True}, **how)
    resumed.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-4"))
    assert len(resumed.watch.steps) == 3
    for name, weight in whole.model.state_dict().items():
        assert torch.equal(resumed.model.state_dict()[name], weight), name


class _Waits(TorchDispatchMode):
    """Counts the operations for which the host would wait for a GPU, by what called them."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func.overloadpacket)
        indexed_by_mask = "index" in name and any(
            isinstance(index, torch.Tensor) and index.dtype == torch.bool
            for arg in args
            if isinstance(arg, (list, tuple))
            for index in arg
        )
        if name in {"aten._local_scalar_dense", "aten.nonzero", "aten.masked_select", "aten.equal"} or indexed_by_mask:
            self.found.append(name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("cls", [PackedSFTTrainer, SFTTrainer])
def test_nobody_waits_for_the_device_in_a_step(
    cls: Any, make: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trl.trainer.utils._use_triton", lambda device: True)  # TRL's head as on a GPU
    trainer = make(cls, ready(text_rows(20)), max_steps=3, logging_steps=100, logging_nan_inf_filter=False)
    step, waits = type(trainer).training_step, []

    def watched(self: Any, *args: Any, **kwargs: Any) -> Any:
        with _Waits() as mode:
            result = step(self, *args, **kwargs)
        waits.extend(mode.found)
        return result

    monkeypatch.setattr(cls, "training_step", watched)
    train(trainer)
    assert bool(waits) == (cls is SFTTrainer), waits


PREPARING = {
    "chat_template_path", "dataset_kwargs", "dataset_num_proc", "dataset_text_field", "eos_token", "max_length",
    "model_init_kwargs", "pad_token", "shuffle_dataset", "truncation_mode", "trust_remote_code", "eval_packing",
    "completion_only_loss", "assistant_only_loss", "packing_strategy",
}  # fmt: skip
"""Options that are done with when training begins."""
IN_TRAINING = {
    "loss_type": "in `compute_loss`",
    "activation_offloading": "around every pass, by TRL's `training_step`",
    "pad_to_multiple_of": "there is no padding",
    "packing": "TRL's own pass",
    "padding_free": "TRL's own pass",
    "router_aux_loss_coef": "TRL's own pass",
}


def test_every_option_of_trl_is_known() -> None:
    """An option that a new release adds has to be looked at."""
    own = {f.name for f in fields(SFTConfig)} - {f.name for f in fields(TrainingArguments)}
    assert own == PREPARING | set(IN_TRAINING)


def test_how_many_tokens_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    config = LlamaConfig(
        vocab_size=16, hidden_size=576, intermediate_size=1536, num_hidden_layers=2, num_attention_heads=9,
        num_key_value_heads=3,
    )  # fmt: skip
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    trained = sum(parameter.numel() for parameter in model.parameters())
    layer = 576 * (8 + 8 * 2) + 3 * 1536 * 2
    fits = functools.partial(tokens_that_fit, model, torch.device("cuda"), torch.bfloat16)
    for wanted, free in {10_000: 2 * 2 * layer * 10_000, 65_536: 1 << 40, 1_024: 0}.items():
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _, free=free: (free + 12 * trained, 1 << 50))
        assert fits("unrolled", False) == wanted
        assert fits("packed", False) <= wanted <= fits("unrolled", True)
    assert tokens_that_fit(model, torch.device("cpu"), None, "packed", False) == 4096
