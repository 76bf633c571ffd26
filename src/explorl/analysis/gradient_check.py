"""Whether the update size G_t, computed in closed form, is the gradient that autograd finds, on the run's own model.

    G_t = |α_t| · ‖e(o_t) − π‖₂ · ‖h_t‖₂    against    ‖∂ α_t log π(o_t) / ∂ W‖_F,   W the LM head

Deng et al. 2025, Eq. 4. Both are taken with α_t = 1, which scales them alike. They part where a model does more than
W·h to its logits, such as capping them, which the closed form does not know. Tokens of high entropy are taken: where
the policy is certain, both are 0 up to rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from explorl.analysis.lens import Context, Unavailable
from explorl.analysis.lens_table import LensTable
from explorl.stats import Table

ANSWERS, TOKENS = 4, 4
"""Completions that are looked at, and tokens of each."""
TOLERANCE = {"float32": 1e-3, "float64": 1e-3, "bfloat16": 5e-2, "float16": 1e-2}


@dataclass(frozen=True)
class GradientCheck:
    """Closed form and autograd side by side."""

    closed: tuple[float, ...]
    autograd: tuple[float, ...]
    dtype: str

    @property
    def largest(self) -> float:
        """The largest difference, relative to the largest gradient."""
        most = max(max(self.autograd), 1e-30)
        return max(abs(one - two) for one, two in zip(self.closed, self.autograd, strict=True)) / most

    @property
    def agrees(self) -> bool:
        return self.largest <= TOLERANCE.get(self.dtype, 5e-2)


def check_gradients(model: Any, sequences: Sequence[tuple[Sequence[int], Sequence[int]]], tokens: int) -> GradientCheck:
    """Compares both on up to `tokens` tokens of each (prompt, completion), those of the highest entropy."""
    import torch
    from torch import nn

    from explorl.modeling.proof import inner_model
    from explorl.modeling.token_records import answer_records, update_size

    head = inner_model(model).get_output_embeddings()
    if not isinstance(head, nn.Linear):
        raise ValueError(f"the LM head is a {type(head).__name__}; a check needs a plain torch.nn.Linear")
    weight = head.weight.detach().clone().requires_grad_()
    closed: list[float] = []
    found: list[float] = []

    def apart(module: Any, inputs: Any, output: Any) -> Any:
        """The head's own product, with a weight that only this path reaches: embeddings may share the model's."""
        return nn.functional.linear(inputs[0].detach(), weight, head.bias)

    for prompt, completion in sequences:
        ids = torch.tensor([[*prompt, *completion]], device=weight.device)
        mask = torch.ones_like(ids)
        records = answer_records(model, ids, mask, len(completion))
        ones = torch.ones_like(records.logps)
        sizes = update_size(records.logps, records.others_squared, records.state_norms, ones)[0]
        hook = head.register_forward_hook(apart)
        try:
            with torch.enable_grad():
                logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
        finally:
            hook.remove()
        logps = logits[0, len(prompt) - 1 : -1].float().log_softmax(-1)
        places = records.entropy[0].argsort(descending=True, stable=True)[:tokens].tolist()
        for place in places:
            (gradient,) = torch.autograd.grad(logps[place, completion[place]], weight, retain_graph=place != places[-1])
            found.append(float(gradient.float().norm()))
            closed.append(float(sizes[place]))
    return GradientCheck(tuple(closed), tuple(found), str(weight.dtype).removeprefix("torch."))


def gradient_check(table: LensTable, context: Context) -> GradientCheck | Unavailable:
    """The check on tokens of the run's latest answers."""
    answers, ids = table.completions, table.tokens["token_ids"]
    policy = context.policy
    vocabulary = int(policy.model.get_input_embeddings().weight.shape[0])
    sequences = []
    for index in np.flatnonzero(answers.count > 0)[::-1].tolist():
        own = ids[answers.start[index] : answers.start[index] + answers.count[index]].tolist()
        stored = answers.prompt_ids[index] if index < len(answers.prompt_ids) else None
        prompt = [int(token) for token in stored or policy.tokenizer(answers.prompt[index])["input_ids"]]
        if prompt and all(0 <= token < vocabulary for token in (*prompt, *own)):
            sequences.append((prompt, own))
        if len(sequences) == ANSWERS:
            break
    if not sequences:
        return Unavailable(f"no answer has token ids that {policy.name} knows; analyze the run with its own model")
    try:
        return check_gradients(policy.model, sequences, TOKENS)
    except ValueError as error:
        return Unavailable(str(error))


def summary(found: GradientCheck) -> str:
    """The check in a sentence."""
    text = (
        f"On {len(found.closed)} tokens in {found.dtype}, the update size in closed form and autograd's gradient of "
        f"the LM head {'agree' if found.agrees else 'differ'}; largest difference {found.largest:.1e} of the largest."
    )
    return text if found.agrees else f"{text} The model may cap or scale its logits, which the closed form leaves out."


def tables(found: GradientCheck) -> dict[str, Table]:
    """Both values of each token."""
    rows = [list(pair) for pair in zip(found.closed, found.autograd, strict=True)]
    return {"gradient_check": Table(["closed form", "autograd"], rows, "Size of a token's gradient", ".6g")}
