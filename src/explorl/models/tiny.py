"""The embedded policies: small Llama models with character tokens.

`tiny` has 0.9 million parameters and solves `countdown-mini` (three numbers from 1 to 20, targets from 1 to 100) about
four times in ten. It is an ordinary transformers model and tokenizer, trained and sampled by the same code as any
other, in seconds on a laptop. Its warm-start weights are in this package; `explorl sft --preset tiny` trains them from
scratch.

`tiny-tools` has 0.2 million parameters. It answers `products`, sometimes by calling a calculator; `explorl sft --preset
tiny-tools` trains it.
"""

from __future__ import annotations

import string
from importlib import resources
from pathlib import Path
from typing import Any

TAGS = ("<think>", "</think>", "<answer>", "</answer>")
PAD, EOS, UNKNOWN = "<pad>", "<eos>", "<unk>"
CHARACTERS = (*filter(str.isprintable, string.printable), "\n")


def tiny_checkpoint() -> Path:
    """Return the folder of the warm-start weights that ship with the package."""
    return Path(str(resources.files("explorl.models") / "tiny_checkpoint"))


def tiny_tools_checkpoint() -> Path:
    """Return the folder of the weights of `tiny-tools`."""
    return Path(str(resources.files("explorl.models") / "tiny_tools_checkpoint"))


def tiny_tokenizer() -> Any:
    """Return a tokenizer with one token per character and per tag; tags, unlike padding, survive decoding."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Split
    from transformers import PreTrainedTokenizerFast

    words = [PAD, EOS, UNKNOWN, *TAGS, *CHARACTERS]
    tokenizer = Tokenizer(WordLevel({word: index for index, word in enumerate(words)}, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_tokens([AddedToken(tag, normalized=False) for tag in TAGS])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNKNOWN,
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_max_length=256,
    )


def tiny_tools_model(seed: int = 0) -> Any:
    """Return `tiny-tools` with random weights."""
    return tiny_model(seed, hidden_size=64, layers=3)


def tiny_model(seed: int = 0, *, hidden_size: int = 128, layers: int = 4) -> Any:
    """Return `tiny`, or a model of another size, with random weights."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = tiny_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=3 * hidden_size,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(config)
