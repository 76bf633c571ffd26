"""A language model whose next token depends on the last one alone, and a task for it: impacts are known by hand.

q → m | n, half and half       nothing follows from it
m, n → g | b, half and half    this token decides
g → r → end,  b → w → end      an answer with r is correct
"""

from __future__ import annotations

from typing import Any

from explorl.models import Policy, tiny_tokenizer
from explorl.tasks import Problem, Task, Verdict

NEXT = {"q": "mn", "m": "gb", "n": "gb", "g": "r", "b": "w", "r": "", "w": ""}


class Planted(Task):
    splits = ("train",)

    def problems(self, split, *, limit=None):
        return [Problem("one", {}), Problem("two", {})][:limit]

    def prompt(self, problem, template=None):
        return "q" if problem.id == "one" else "qq"

    def verify(self, completion, problem, *, opened=False):
        return Verdict("r" in completion)


def planted_policy(flat: bool = False) -> Policy:
    """The chain as a Llama: its layers add nothing, its embedding is one-hot, its head holds the chances.

    `flat`: the last token is drawn half and half from r and w whatever came before, so that no token decides.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = tiny_tokenizer()
    size = len(tokenizer) + len(tokenizer) % 2
    config = LlamaConfig(
        vocab_size=size, hidden_size=size, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1,
        max_position_embeddings=32, tie_word_embeddings=False, bos_token_id=None, eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    model: Any = LlamaForCausalLM(config).eval()
    ids = {letter: tokenizer.convert_tokens_to_ids(letter) for letter in NEXT}
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.model.embed_tokens.weight.copy_(torch.eye(size))
        head = torch.full((size, size), -20.0)
        for letter, follow in NEXT.items():
            followers = "rw" if flat and letter in "gb" else follow
            for other in followers:
                head[ids[other], ids[letter]] = 20.0
            if not follow:
                head[tokenizer.eos_token_id, ids[letter]] = 20.0
        model.lm_head.weight.copy_(head / size**0.5)
    return Policy("planted", model, tokenizer)
