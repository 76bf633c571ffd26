"""For tests of tools: a model that says what a test wants it to, and somebody who answers calls in its place."""

from __future__ import annotations

import itertools
import string
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from explorl.sandbox.interpreter import CellResult

CHARACTERS = (*filter(str.isprintable, string.printable), "\n")


class Desk:
    """In place of a pool of interpreters: answers calls by a function, after so many polls."""

    def __init__(self, answer: Callable[[str], CellResult], patience: int = 0) -> None:
        self.answer, self.patience = answer, patience
        self.opened: list[Desk.Worker] = []
        self.calls: list[Desk.Ticket] = []
        self.expected: list[int] = []
        self.starting = False

    class Ticket:
        def __init__(self, result: CellResult, patience: int) -> None:
            self._result, self.patience = result, patience

        @property
        def done(self) -> bool:
            return self.patience <= 0

        def result(self) -> CellResult:
            assert self.done
            return self._result

    class Worker:
        def __init__(self, desk: Desk) -> None:
            self.desk, self.sources, self.closed = desk, list[str](), False

        def submit(self, source: str) -> Desk.Ticket:
            assert not self.closed
            self.sources.append(source)
            ticket = Desk.Ticket(self.desk.answer(source), self.desk.patience)
            self.desk.calls.append(ticket)
            return ticket

        def replay(self, sources: Sequence[str]) -> None:
            for source in sources:
                self.submit(source)

        def close(self) -> None:
            self.closed = True

    def open(self) -> Desk.Worker:
        self.opened.append(Desk.Worker(self))
        return self.opened[-1]

    def __enter__(self) -> Desk:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def expect(self, interpreters: int) -> None:
        self.expected.append(interpreters)

    def poll(self, seconds: float = 0.0) -> int:
        if threading.current_thread() is threading.main_thread():  # the others are no clock
            self.turn()
        return 0

    def turn(self) -> None:
        for ticket in self.calls:
            ticket.patience -= 1


def echo(source: str) -> CellResult:
    return CellResult("ok", f"{len(source)}{source[:3]}\n", seconds=0.5)


def standing_in(desk: Desk) -> Any:
    return desk


def planted(follow: dict[str, dict[str, float]], extra: Sequence[str] = ()) -> tuple[Any, Any]:
    """A Llama that is a Markov chain over words, and its tokenizer, which reads characters one by one.

    Nothing but the last token's embedding, a unit vector, reaches the logits, which are the chain's log-probabilities.
    """
    from tokenizers import Regex, Tokenizer, decoders
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Split
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    named = [word for head, words in follow.items() for word in (head, *words)]
    words = list(dict.fromkeys(["<pad>", "<eos>", "<unk>", *CHARACTERS, *named, *extra]))
    ids = {word: index for index, word in enumerate(words)}
    backend = Tokenizer(WordLevel(ids, unk_token="<unk>"))
    backend.pre_tokenizer = Split(Regex(r"[\s\S]"), behavior="isolated")
    backend.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )
    size = len(words) + -len(words) % 8
    config = LlamaConfig(
        vocab_size=len(words),
        hidden_size=size,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=1,
        max_position_embeddings=2048,
        eos_token_id=ids["<eos>"],
        pad_token_id=ids["<pad>"],
        bos_token_id=None,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config).eval()
    logits = torch.full((len(words), len(words)), -60.0)
    logits[:, ids["<eos>"]] = 0.0
    for head, after in follow.items():
        logits[ids[head], ids["<eos>"]] = -60.0
        for word, chance in after.items():
            logits[ids[head], ids[word]] = float(torch.tensor(chance).log())
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(torch.eye(len(words), size))
        model.lm_head.weight.zero_()
        model.lm_head.weight[:, : len(words)] = logits.T / size**0.5  # the norm makes a unit vector √size long
        model.model.layers[0].self_attn.o_proj.weight.zero_()
        model.model.layers[0].mlp.down_proj.weight.zero_()
    return model, tokenizer


def always(chain: Sequence[str], **more: str) -> dict[str, dict[str, float]]:
    """Each word after the one before; further words by name."""
    pairs = [*itertools.pairwise(chain), *more.items()]
    return {head: {word: 1.0} for head, word in pairs}
