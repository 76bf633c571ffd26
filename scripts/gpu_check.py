"""Check that all fast paths compute correct results on this machine: one line per check, in under four minutes.

    python scripts/gpu_check.py                        on a GPU
    python scripts/gpu_check.py --device cpu --quick   some checks on a CPU; with TRITON_INTERPRET=1, also the kernels
    python scripts/gpu_check.py --only kernel          the checks with this text in their names

Engine against `generate`, packed passes against padded ones, kernels against torch, mixed precision, and one step with
every strategy, on small models with random weights. The exit status is 1 if a check fails.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from torch import Tensor
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb
from transformers.utils import logging as transformers_logging
from trl import GRPOConfig, SFTConfig
from trl.trainer.utils import add_fused_lm_head

from explorl.modeling import passes
from explorl.modeling.packed import packed_logps
from explorl.models import tiny_tokenizer
from explorl.rollout import Engine, SamplingParams
from explorl.rollout.backends import generate as reference
from explorl.rollout.memory.cache import LayerShape
from explorl.rollout.memory.pages import PageCache
from explorl.rollout.requests import prompt_token_ids
from explorl.rollout.sampling import Active, rng
from explorl.rollout.sampling.sample import sample_step
from explorl.rollout.state import KEY, LIMIT, POSITION, RUNNING, STATE_REALS, STATUS, STEP, TOP_K, SlotState
from explorl.strategies import REGISTRY
from explorl.training.grpo.trainer import ExplorationTrainer
from explorl.training.run_setup import disabled_progress, quiet
from explorl.training.sft.trainer import PackedSFTTrainer

PROMPTS = [f"{a} {b} {a + b}={2 * (a + b)}\n" for a in range(1, 5) for b in range(5, 9)]
SETTINGS: dict[str, dict[str, Any]] = {
    "bottom_p": {"p": 0.9},
    "element_wise_temperature": {"source": "running"},
    "annealed_temperature": {"decay": 3.0},
    "pass_threshold": {"threshold": 0.01},
    "curriculum": {"solve_rates": dict.fromkeys(PROMPTS, 0.5)},
    "position_shaping": {"start": 0},
    "passk_training": {"k": 2},
    "pkpo": {"k": 2},
    "outcome_exploration": {"kind": "batch"},
    "entropy_bonus": {"coef": 0.05},
    "reference_reset": {"every": 1},
}
"""Hyperparameters that strategies require, or need to act in the first step."""


@dataclass(frozen=True)
class Here:
    """The device, and how thorough the checks are."""

    device: torch.device
    quick: bool

    @property
    def gpu(self) -> bool:
        return self.device.type == "cuda"

    @property
    def has_kernels(self) -> bool:
        """Return whether the kernels run: on a GPU, or under Triton's interpreter."""
        try:
            language = import_module("triton.language")
        except ImportError:
            return False
        return self.gpu or type(language.sum).__name__ == "InterpretedFunction"

    def model(self, layers: int = 4) -> Any:
        """Return a small Llama whose next-token distributions differ."""
        tokenizer = tiny_tokenizer()
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=len(tokenizer), hidden_size=96, intermediate_size=192, num_hidden_layers=layers,
            num_attention_heads=6, num_key_value_heads=2, max_position_embeddings=512, initializer_range=0.15,
            bos_token_id=None, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
        )  # fmt: skip
        return LlamaForCausalLM(config).to(self.device).eval()

    def random(self, *shape: int, seed: int = 0) -> Tensor:
        return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(self.device)


Check = Callable[[Here], str | None]
"""A check raises an error on failure and returns a note."""


# -------------------------------------------------------------------- engine


def engine_greedy(here: Here) -> str:
    model, tokenizer = here.model(), tiny_tokenizer()
    params = SamplingParams(temperature=0.0, max_tokens=24)
    ours = Engine(model, tokenizer).generate(PROMPTS, 1, params).check()
    theirs = reference.generate(model, tokenizer, PROMPTS, 1, params)
    assert [list(rollout.token_ids) for rollout in ours] == [list(rollout.token_ids) for rollout in theirs]
    return f"{sum(len(rollout.token_ids) for rollout in ours)} tokens"


def engine_logps(here: Here) -> str:
    return f"largest difference {_against_forward(here, torch.float32, 1e-3):.1e}"


def engine_half(here: Here) -> str:
    return f"largest difference {_against_forward(here, torch.bfloat16, 0.8):.1e}"


def _against_forward(here: Here, dtype: torch.dtype, near: float) -> float:
    """Compare log-probabilities and entropies of sampled tokens with those of the model's own forward pass."""
    model, tokenizer = here.model(), tiny_tokenizer()
    rollouts = Engine(model, tokenizer, dtype=dtype).generate(PROMPTS, 4, SamplingParams(max_tokens=24, seed=1))
    worst, sums, count = 0.0, 0.0, 0
    for rollout in rollouts.check():
        prompt = prompt_token_ids(tokenizer, PROMPTS[rollout.prompt_index])
        ids = torch.tensor([[*prompt, *rollout.token_ids]], device=here.device)
        with torch.no_grad():
            logits = model(ids).logits[0, len(prompt) - 1 : -1]
        plain = logits.float().log_softmax(-1).cpu()
        logps = plain.gather(-1, torch.tensor(rollout.token_ids)[:, None])[:, 0]
        entropy = -(plain.exp() * plain).sum(-1)
        for first, other in ((rollout.logps, logps), (rollout.entropy, entropy)):
            apart = (first.float().cpu() - other).abs()
            worst, sums, count = max(worst, float(apart.max())), sums + float(apart.sum()), count + len(apart)
    assert worst < near, f"{worst:.1e} apart"
    assert sums / count < near / 10, f"{sums / count:.1e} apart on average"
    return worst


def engine_kernels(here: Here) -> None:
    model, tokenizer = here.model(2), tiny_tokenizer()
    params = SamplingParams(temperature=1.3, top_p=0.9, max_tokens=24 if here.gpu else 3, seed=6)
    prompts = PROMPTS if here.gpu else PROMPTS[:2]
    plain = Engine(model, tokenizer, use_kernels=False, use_graphs=False).generate(prompts, 4, params)
    fast = Engine(model, tokenizer, use_kernels=True, use_graphs=here.gpu, batch_size=24).generate(prompts, 4, params)
    for first, second in zip(plain, fast, strict=True):
        assert first.token_ids == second.token_ids
        torch.testing.assert_close(first.logps, second.logps, atol=1e-4, rtol=0)


# -------------------------------------------------------------------- training passes


def packed_pass(here: Here) -> str:
    """Check log-probabilities, entropies and gradients; with shared prompts, unrolled and with the model's layers."""
    model = here.model()
    add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    draw = torch.Generator().manual_seed(0)
    prompt, completion = 12, 40
    ids = torch.randint(8, model.config.vocab_size, (12, prompt + completion), generator=draw).to(here.device)
    ids[1::2, :prompt] = ids[::2, :prompt]
    places = torch.arange(prompt + completion, device=here.device)
    ends = torch.randint(1, completion, (12,), generator=draw).to(here.device)
    mask = (places[None] < prompt + ends[:, None]).long()

    def gradients(logps: Tensor, entropy: Tensor) -> list[Tensor]:
        model.zero_grad()
        logps.sum().backward()
        return [logps.detach(), entropy.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]

    ones = torch.ones(len(ids), device=here.device)
    expected = gradients(*passes.tempered_logps(model, ids, mask, completion, ones))
    worst = 0.0
    for unrolled in (False, True):
        actual = gradients(*packed_logps(model, ids, mask, completion, unrolled=unrolled))
        for first, other in zip(actual, expected, strict=True):
            torch.testing.assert_close(first, other, rtol=2e-3, atol=2e-3)
            worst = max(worst, float((first - other).abs().max()))
    return f"largest difference {worst:.1e}"


def chosen_pass(here: Here) -> str:
    model = here.model()
    add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    kinds = [passes.choose(model, 300, dtype=dtype).kind for dtype in (None, torch.bfloat16)]
    assert kinds == ["unrolled"] * 2, kinds
    return kinds[0]


def packed_sft(here: Here) -> str:
    rows = [{"prompt": prompt, "completion": "12+" * (3 + index)} for index, prompt in enumerate(PROMPTS)]
    losses = []
    for packed in (True, False):
        with tempfile.TemporaryDirectory() as folder, disabled_progress():
            args = SFTConfig(
                output_dir=folder, max_steps=2, per_device_train_batch_size=8, learning_rate=1e-3,
                completion_only_loss=True, gradient_checkpointing=False, bf16=False, use_cpu=not here.gpu,
                logging_steps=1, save_strategy="no", report_to="none", disable_tqdm=True, seed=0,
            )  # fmt: skip
            trainer = PackedSFTTrainer(
                model=here.model(), args=args, train_dataset=Dataset.from_list(rows),
                processing_class=tiny_tokenizer(), packed=packed,
            )  # fmt: skip
            quiet(trainer)
            trainer.train()
            losses.append([log["loss"] for log in trainer.state.log_history if "loss" in log])
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-3)
    return f"losses {losses[0][0]:.4f}, {losses[0][1]:.4f}"


# -------------------------------------------------------------------- kernels


def sampling_kernel(here: Here) -> None:
    from explorl.rollout.sampling.kernel import sample_step_kernel

    vocab, rows = (49_152, 64) if here.gpu else (300, 4)
    warpers: dict[str, dict[str, Any]] = {
        "temperature": {"temperature": 0.7},
        "truncated": {"top_k": 50, "top_p": 0.9, "min_p": 0.02},
        "bottom": {"top_p": 0.95, "bottom_p": 0.9, "bottom_p_frequency": 0.7},
        "repetition": {"repetition_penalty": 1.1, "temperature": 0.3, "top_p": 0.8, "top_k": 20},
    }
    for name, warper_options in warpers.items():
        params = SamplingParams(seed=3, **warper_options)
        values = params.rows(rows, 1)
        active = Active.of(params, values)
        logits = here.random(rows, vocab, seed=8) * 2
        states = []
        for step in (sample_step, sample_step_kernel):
            state = SlotState(rows, 4, vocab, here.device)
            state.ints[KEY] = torch.from_numpy(rng.request_keys(1, range(rows))).to(here.device)
            state.ints[TOP_K] = torch.from_numpy(values["top_k"]).to(here.device)
            state.ints[LIMIT], state.ints[STEP, :], state.ints[STATUS] = 4, 1, RUNNING
            state.reals.copy_(torch.from_numpy(np.stack([values[key] for key in STATE_REALS])))
            state.set_stops([[7]])
            state.allocate(active)
            if active.repetition:
                state.mark_seen(torch.arange(rows, device=here.device), [[row, 90, 170] for row in range(rows)])
            step(logits, state, active)
            states.append(state)
        (tokens, counts), (other_tokens, other_counts) = (state.out_ints[:, :, 1] for state in states)
        assert torch.equal(tokens, other_tokens), name
        for observed in (counts, other_counts):
            assert _reaches(logits, observed, 0.95), f"{name}: branching factor"
        torch.testing.assert_close(states[0].out_reals, states[1].out_reals, atol=1e-4, rtol=1e-4, msg=name)


def _reaches(logits: torch.Tensor, counts: torch.Tensor, mass: float) -> bool:
    """Return whether this number of most likely tokens reaches the mass in float64 and one fewer does not.

    Of 18,000 tokens, the last of which has a probability of 1e-6, float32 does not always find the same one.
    """
    probs = logits.double().softmax(-1).sort(-1, descending=True).values
    above = probs.cumsum(-1).gather(1, counts.long()[:, None] - 1)[:, 0]
    below = above - probs.gather(1, counts.long()[:, None] - 1)[:, 0]
    return bool(((above > mass - 2e-6) & (below < mass + 2e-6)).all())


def attention_kernel(here: Here) -> None:
    from explorl.rollout.memory.triton_attention import KernelPages

    heads, kv_heads, size = (9, 3, 64) if here.gpu else (4, 2, 16)
    layers = [LayerShape(kv_heads, size, size, torch.float32, here.device)] * 2
    state = SlotState(3, 4, 10, here.device)
    state.ints[STATUS], state.ints[POSITION] = RUNNING, torch.tensor([0, 37, 16], device=here.device)
    outs = []
    for kind in (PageCache, KernelPages):
        cache: Any = kind(layers, 3, 10, 3, 16, state)
        cache.table.copy_(torch.tensor([[2, 0, 0], [3, 4, 5], [6, 7, 0]], device=here.device))
        for seed, block in enumerate(cache.blocks):
            block.copy_(here.random(*block.shape, seed=seed))
        cache.begin_step(state.ints, 38)
        key, value = (here.random(3, kv_heads, 1, size, seed=seed) for seed in (20, 21))
        cache.update(key, value, 1)
        outs.append(cache.attend(here.random(3, heads, 1, size, seed=22), key, value, 0.25, None, None))
    torch.testing.assert_close(*outs, atol=1e-4, rtol=1e-4)


def fused_kernels(here: Here) -> None:
    from explorl.modeling.triton_fused import add_rms_norm, gated, rms_norm, rotary

    width = 576 if here.gpu else 24
    x, up, weight = here.random(5, 1, width), here.random(5, 1, width, seed=2), here.random(width, seed=1)
    torch.testing.assert_close(rms_norm(x, weight, 1e-5, 0.0, False), torch.rms_norm(x, (width,), weight, 1e-5))
    total, normed = add_rms_norm(x, up, weight, 1e-5)
    torch.testing.assert_close(total, x + up)
    torch.testing.assert_close(normed, torch.rms_norm(x + up, (width,), weight, 1e-5))
    torch.testing.assert_close(gated(x, up, False), F.silu(x) * up)
    query, key = here.random(5, 1, 9, 24).transpose(1, 2), here.random(5, 1, 3, 24, seed=1).transpose(1, 2)
    cos, sin = here.random(5, 1, 24, seed=2), here.random(5, 1, 24, seed=3)
    for got, expected in zip(rotary(query, key, cos, sin), apply_rotary_pos_emb(query, key, cos, sin), strict=True):
        torch.testing.assert_close(got, expected)


def training_kernels(here: Here) -> None:
    from explorl.modeling.triton_training import AddedNorm, Gated

    width = 576 if here.gpu else 24
    x, y = (here.random(1, 40, width, seed=i).requires_grad_() for i in (1, 2))
    weight = here.random(width, seed=3).requires_grad_()
    total = x + y
    pairs = [
        (AddedNorm.apply(x, y, weight, 1e-5, None), (total, F.rms_norm(total, (width,), weight, 1e-5)), [x, y, weight]),
        ((Gated.apply(x, y),), (F.silu(x) * y,), [x, y]),
    ]
    for ours, theirs, inputs in pairs:
        slopes = [here.random(*value.shape, seed=9 + index) for index, value in enumerate(theirs)]
        actual = [*ours, *torch.autograd.grad(ours, inputs, slopes)]
        expected = [*theirs, *torch.autograd.grad(theirs, inputs, slopes)]
        for first, other in zip(actual, expected, strict=True):
            torch.testing.assert_close(first, other, rtol=1e-3, atol=1e-4)


def record_kernel(here: Here) -> None:
    from explorl.modeling.logit_blocks import DTYPES
    from explorl.modeling.triton_records import record

    rows, vocab = (32, 49_152) if here.gpu else (2, 60)
    logits = here.random(rows, vocab, seed=1) * 3
    targets = torch.randint(vocab, (rows,), generator=torch.Generator().manual_seed(2)).to(here.device)
    out = tuple(torch.empty(rows, dtype=kind, device=here.device) for kind in DTYPES)
    record(logits, targets, None, 0.95, out, lanes=None if here.gpu else 16)
    plain = logits.double().log_softmax(-1)
    logps, entropy = plain.gather(-1, targets[:, None])[:, 0], -(plain.exp() * plain).sum(-1)
    held = plain.exp().sort(-1, descending=True).values.cumsum(-1)
    torch.testing.assert_close(out[0].double(), logps, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(out[1].double(), entropy, atol=1e-4, rtol=1e-4)
    assert ((held < 0.95).sum(-1) + 1 - out[2]).abs().max() <= 1


# -------------------------------------------------------------------- steps


def digits(completions: Sequence[str], **columns: Any) -> list[float]:
    """Return a reward that has variance on random text."""
    return [round(sum(c.isdigit() for c in text) / max(len(text), 1), 1) for text in completions]


def first_characters(completions: Sequence[str], **columns: Any) -> list[str | None]:
    return [text.strip()[:1] or None for text in completions]


def _step(here: Here, *, bf16: bool, **options: Any) -> Any:
    """Return a trainer after one step on a model with random weights."""
    arguments: dict[str, Any] = {
        "max_steps": 1, "per_device_train_batch_size": 8, "gradient_accumulation_steps": 2, "num_generations": 4,
        "max_completion_length": 10, "learning_rate": 1e-3, "beta": 0.05, "logging_steps": 1, "save_strategy": "no",
        "report_to": "none", "disable_tqdm": True, "bf16": bf16, "use_cpu": not here.gpu, "seed": 3,
        "gradient_checkpointing": False, "dataloader_pin_memory": False,
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder, disabled_progress():
        here.model(2).save_pretrained(folder)  # TRL loads the reference from the model's path
        trainer = ExplorationTrainer(
            model=LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32),
            reward_funcs=digits,
            args=GRPOConfig(output_dir=folder, **arguments),
            train_dataset=Dataset.from_dict({"prompt": PROMPTS}),
            processing_class=tiny_tokenizer(),
            answers=first_characters,
            correct=("digits", 0.1),
            **options,
        )
        quiet(trainer)
        trainer.train()
    return trainer


def _logged(trainer: Any) -> dict[str, float]:
    log = next(log for log in trainer.state.log_history if "loss" in log)
    assert math.isfinite(log["loss"]), log
    assert math.isfinite(log["grad_norm"]), log
    return dict(log)


def mixed_precision(here: Here) -> str:
    """Check that weights stay float32 and change, and that gradients are close to those of float32."""
    norms = {}
    for bf16 in (False, True):
        before = here.model(2).state_dict()
        trainer = _step(here, bf16=bf16)
        norms[bf16] = _logged(trainer)["grad_norm"]
        after = trainer.accelerator.unwrap_model(trainer.model).state_dict()
        assert all(value.dtype == torch.float32 for value in after.values())
        assert any(not torch.equal(value, before[name]) for name, value in after.items())
    assert 0.5 < norms[True] / norms[False] < 2, norms  # the samples differ a little
    return f"gradient norms {norms[False]:.3f} and {norms[True]:.3f}"


def dynamic_sampling(here: Here) -> None:
    _logged(_step(here, bf16=here.gpu, dynamic_sampling=True, skip_solved=True))


def strategy_step(name: str) -> Check:
    def check(here: Here) -> str | None:
        options = SETTINGS.get(name, {})
        tool = "python" if name == "tool_progression" else None
        log = _logged(_step(here, bf16=here.gpu, strategies=[{name: options}], interpreter=tool))
        own = {key: value for key, value in log.items() if key.startswith(f"strategy/{name}/")}
        assert own or name == "entropy_bonus", "it logs nothing"
        return None

    return check


# -------------------------------------------------------------------- command


def checks(here: Here) -> Iterator[tuple[str, Check, bool]]:
    """Return the name of each check, the check, and whether it can run here."""
    yield "engine: tokens of generate", engine_greedy, True
    yield "engine: log-probabilities of the model", engine_logps, True
    yield "engine: bfloat16", engine_half, True
    yield "engine: kernels and graphs give the tokens of torch", engine_kernels, here.has_kernels
    yield "kernel: sampling", sampling_kernel, here.has_kernels
    yield "kernel: attention over pages", attention_kernel, here.has_kernels
    yield "kernel: norm, gate, rotation", fused_kernels, here.has_kernels
    yield "kernel: norm and gate in training", training_kernels, here.has_kernels
    yield "kernel: token records", record_kernel, here.has_kernels
    yield "pass: packed against padded", packed_pass, True
    yield "pass: unrolled in both precisions", chosen_pass, True
    yield "pass: fine-tuning packed against padded", packed_sft, True
    yield "step: mixed precision", mixed_precision, True
    yield "step: dynamic sampling", dynamic_sampling, True
    names = list(REGISTRY)
    for name in names[::9] if here.quick else names:
        yield f"step: {name}", strategy_step(name), True


def main(arguments: Sequence[str] | None = None) -> int:
    options = parsed(arguments)
    here = Here(torch.device(options.device), options.quick)
    warnings.filterwarnings("ignore")
    transformers_logging.disable_progress_bar()
    begun, failed, done = time.monotonic(), 0, 0
    for name, check, possible in checks(here):
        if options.only not in name:
            continue
        if not possible:
            print(f"– {name}: needs a GPU, or TRITON_INTERPRET=1", flush=True)
            continue
        start, mark, note = time.monotonic(), "✓", None
        try:
            note = check(here)
        except Exception as error:
            mark, failed = "✗", failed + 1
            note = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
            if options.traceback:
                traceback.print_exc()
        done += 1
        print(f"{mark} {name} {time.monotonic() - start:.1f} s{f' ({note})' if note else ''}", flush=True)
    print(
        f"{done - failed} of {done} checks passed in {time.monotonic() - begun:.0f} s on {options.device}", flush=True
    )
    if not done:
        print(f"no check has {options.only!r} in its name", file=sys.stderr)
    return int(failed > 0 or not done)


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cuda", "cpu"])
    parser.add_argument("--quick", action="store_true", help="every ninth strategy only")
    parser.add_argument("--only", default="", metavar="TEXT", help="run only checks with this text in their names")
    parser.add_argument("--traceback", action="store_true", help="show where a check failed")
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch sees no GPU here; use --device cpu")
    return options


if __name__ == "__main__":
    sys.exit(main())
