"""Compare the update size G_t in closed form with the gradient from autograd, on the run's own model.

    G_t = |α_t| · ‖e(o_t) − π‖₂ · ‖h_t‖₂    against    ‖∂ α_t log π(o_t) / ∂ W‖_F,   W the LM head

Deng et al. 2025, Eq. 4. Both are computed with α_t = 1, which scales them equally. They differ if a model computes its
logits by more than W·h, for example by capping them, which the closed form ignores. The check uses tokens of high
entropy, because both values are 0 up to rounding if the policy is certain.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from explorl.analysis.lens import Context, Findings, Unavailable, series_table
from explorl.analysis.lens_table import LensTable

COMPLETIONS, TOKENS = 4, 4
"""Completions that are checked, and tokens of each."""
TOLERANCE = {"float32": 1e-3, "float64": 1e-3, "bfloat16": 5e-2, "float16": 1e-2}


@dataclass(frozen=True)
class GradientCheck:
    """Values in closed form and from autograd."""

    closed: tuple[float, ...]
    autograd: tuple[float, ...]
    dtype: str

    @property
    def largest(self) -> float:
        """The largest difference, relative to the largest gradient."""
        scale = max(max(self.autograd), 1e-30)
        return max(abs(a - b) for a, b in zip(self.closed, self.autograd, strict=True)) / scale

    @property
    def agrees(self) -> bool:
        return self.largest <= TOLERANCE.get(self.dtype, 5e-2)


def check_gradients(model: Any, sequences: Sequence[tuple[Sequence[int], Sequence[int]]], tokens: int) -> GradientCheck:
    """Compare both on up to `tokens` tokens of each (prompt, completion), those of the highest entropy."""
    import torch
    from torch import nn

    from explorl.modeling.proof import inner_model
    from explorl.modeling.token_records import answer_records, update_size

    head = inner_model(model).get_output_embeddings()
    if not isinstance(head, nn.Linear):
        raise ValueError(f"the LM head is a {type(head).__name__}; the check needs a plain torch.nn.Linear")
    weight = head.weight.detach().clone().requires_grad_()
    closed: list[float] = []
    autograd: list[float] = []

    def detached_head(module: Any, inputs: Any, output: Any) -> Any:
        """Apply the head with a copy of its weight, because the embeddings may share the model's."""
        return nn.functional.linear(inputs[0].detach(), weight, head.bias)

    for prompt, completion in sequences:
        ids = torch.tensor([[*prompt, *completion]], device=weight.device)
        mask = torch.ones_like(ids)
        records = answer_records(model, ids, mask, len(completion))
        ones = torch.ones_like(records.logps)
        sizes = update_size(records.logps, records.others_squared, records.state_norms, ones)[0]
        hook = head.register_forward_hook(detached_head)
        try:
            with torch.enable_grad():
                logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
        finally:
            hook.remove()
        logps = logits[0, len(prompt) - 1 : -1].float().log_softmax(-1)
        positions = records.entropy[0].argsort(descending=True, stable=True)[:tokens].tolist()
        for position in positions:
            logp = logps[position, completion[position]]
            (gradient,) = torch.autograd.grad(logp, weight, retain_graph=position != positions[-1])
            autograd.append(float(gradient.float().norm()))
            closed.append(float(sizes[position]))
    return GradientCheck(tuple(closed), tuple(autograd), str(weight.dtype).removeprefix("torch."))


def gradient_check(table: LensTable, context: Context) -> Findings | Unavailable:
    """Check tokens of the run's latest completions."""
    completions, ids = table.completions, table.tokens["token_ids"]
    policy = context.policy
    vocabulary = int(policy.model.get_input_embeddings().weight.shape[0])
    sequences = []
    for index in np.flatnonzero(completions.count > 0)[::-1].tolist():
        completion = ids[completions.start[index] : completions.start[index] + completions.count[index]].tolist()
        stored = completions.prompt_ids[index] if index < len(completions.prompt_ids) else None
        prompt = [int(token) for token in stored or policy.tokenizer(completions.prompt[index])["input_ids"]]
        if prompt and all(0 <= token < vocabulary for token in (*prompt, *completion)):
            sequences.append((prompt, completion))
        if len(sequences) == COMPLETIONS:
            break
    if not sequences:
        return Unavailable(
            f"no completion has token ids within the vocabulary of {policy.name}; analyze the run with its own model"
        )
    try:
        return describe(check_gradients(policy.model, sequences, TOKENS))
    except ValueError as error:
        return Unavailable(str(error))


def describe(check: GradientCheck) -> Findings:
    """Return the findings of a check."""
    sentence = (
        f"On {len(check.closed)} tokens in {check.dtype}, the update size in closed form and autograd's gradient of "
        f"the LM head {'agree' if check.agrees else 'differ'}; largest difference {check.largest:.1e} of the largest."
    )
    if not check.agrees:
        sentence += " The model may cap or scale its logits, which the closed form ignores."
    columns = {"closed form": check.closed, "autograd": check.autograd}
    return Findings(
        sentence,
        {"gradient_check": series_table("Size of a token's gradient", columns, number=".6g")},
        values=asdict(check),
    )
