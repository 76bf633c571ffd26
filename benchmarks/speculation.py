"""Estimate what exact speculative decoding could save, with drafts from a row's own text and from its siblings.

    python benchmarks/speculation.py --model tiny --task countdown-mini --template terse
    python benchmarks/speculation.py --model smollm2-135m --task math:math500 --data-dir DATA --temperature 0.6

The engine's random numbers belong to a request and a position, so verifying a draft by sampling at each of its
positions changes no token: a draft is accepted as far as it equals what would have been sampled. This benchmark
computes the accepted length from completions that were sampled before. A draft is the text that followed an earlier
occurrence of the last three tokens, or two: in the row itself, or in the part of another sample of its prompt that
exists by then. All rows advance together, one pass at a time. "tail" are the passes in which at most `--tail` rows are
left; on a GPU, or with a large model on a CPU, such passes cost hardly more with several tokens per row than with one.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass, field

os.environ.setdefault("HF_HUB_OFFLINE", "1")

NGRAMS = (3, 2)


@dataclass
class Row:
    """A sampled completion that is decoded again."""

    prompt: list[int]
    answer: list[int]
    have: int = 0
    """Number of tokens of the completion so far."""
    seen: dict[tuple[int, ...], int] = field(default_factory=dict)
    """The end of the last occurrence of each n-gram in the row."""

    @property
    def text(self) -> list[int]:
        return self.prompt + self.answer[: self.have]

    def note(self, begin: int) -> None:
        """Record the n-grams that end after the first ``begin`` tokens, except those without a next token."""
        text = self.text
        for end in range(max(begin, 1), len(text)):
            for n in NGRAMS:
                if end >= n:
                    self.seen[tuple(text[end - n : end])] = end

    def follows(self, ngram: tuple[int, ...], length: int) -> list[int]:
        position = self.seen.get(ngram)
        return [] if position is None else self.text[position : position + length]


def passes(groups: Sequence[Sequence[Row]], length: int, siblings: bool) -> list[list[int]]:
    """Return the tokens that each row gains in each pass, until all rows have ended."""
    rows = [(row, group) for group in groups for row in group]
    for row, _ in rows:
        row.have = 0
        row.seen.clear()
        row.note(0)
    numbers = []
    while going_on := [(row, group) for row, group in rows if row.have < len(row.answer)]:
        gains = [(row, gained(row, draft(row, group if siblings else [], length))) for row, group in going_on]
        for row, gain in gains:  # after the loop: no row may use what another gains in the same pass
            before = len(row.text)
            row.have += gain
            row.note(before)
        numbers.append([gain for _, gain in gains])
    return numbers


def draft(row: Row, group: Sequence[Row], length: int) -> list[int]:
    text = row.text
    for n in NGRAMS:
        ngram = tuple(text[-n:])
        for source in (row, *(other for other in group if other is not row)):
            follower = source.follows(ngram, length)
            if follower:
                return follower
    return []


def gained(row: Row, drafted: Sequence[int]) -> int:
    """Return the number of tokens of a pass: the accepted tokens of the draft, and one more."""
    rest = row.answer[row.have :]
    accepted = next((i for i, (mine, real) in enumerate(zip(drafted, rest, strict=False)) if mine != real), None)
    return min((min(len(drafted), len(rest)) if accepted is None else accepted) + 1, len(rest))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--task", default="countdown-mini")
    parser.add_argument("--template", help="template of the task's prompts; terse for the tiny policy")
    parser.add_argument("--data-dir")
    parser.add_argument("--problems", type=int, default=16)
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--drafts", type=int, nargs="+", default=[3, 7], help="tokens of a draft")
    parser.add_argument("--tail", type=int, default=8, help="maximum number of rows left in the tail")
    args = parser.parse_args()

    from explorl.models import load_policy
    from explorl.rollout import Engine, SamplingParams
    from explorl.tasks import get_task

    name, _, dataset = args.task.partition(":")
    options = {key: value for key, value in (("data_dir", args.data_dir), ("dataset", dataset)) if value}
    task, policy = get_task(name, **options), load_policy(args.model)
    prompts = [task.prompt(problem, args.template) for problem in task.problems("holdout", limit=args.problems)]
    params = SamplingParams(max_tokens=args.max_tokens, temperature=args.temperature, seed=0)
    rollouts = Engine(policy.model, policy.tokenizer).generate(prompts, args.samples, params).check()
    groups: list[list[Row]] = [[] for _ in prompts]
    for rollout in rollouts:
        groups[rollout.prompt_index].append(Row(list(rollouts.prompt_ids[rollout.prompt_index]), rollout.token_ids))
    entropy = sum(float(rollout.entropy.sum()) for rollout in rollouts) / rollouts.tokens
    steps = max(len(row.answer) for group in groups for row in group)
    print(
        f"{args.model}, {args.task}, temperature {args.temperature:g}: {rollouts.tokens:,} tokens in {steps} steps, "
        f"entropy {entropy:.3f}"
    )
    for length in args.drafts:
        for siblings in (False, True):
            numbers = passes(groups, length, siblings)
            tail = [gain for gains in numbers if len(gains) <= args.tail for gain in gains]
            mean = sum(map(sum, numbers)) / sum(map(len, numbers))
            in_tail = f"{sum(tail) / len(tail):.2f} in the tail" if tail else "no tail"
            sources = "own text and siblings" if siblings else "own text"
            print(f"  drafts of {length} from {sources}: {mean:.2f} tokens per pass, {in_tail}; {len(numbers)} passes")


if __name__ == "__main__":
    main()
