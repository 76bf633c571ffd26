"""Sessions driven at random, against the model's own forward pass over every row by itself.

Whatever was extended, forked, cancelled and resumed, in whatever company, memory and order: each sampled token is the
one that the row's own random number picks from the model's distribution after the row's own tokens, forced tokens are
where they were put, and a row has ended exactly where one of its stops, or its limit, says so.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

from explorl.rollout import Engine, Rollout, SamplingParams, memory_plan
from explorl.rollout import scheduler as scheduler
from explorl.rollout.memory import pages
from explorl.rollout.sampling.rng import fork_key, request_keys, uniform
from explorl.rollout.session import Session

from .models import shared

NEAR = 2e-4
"""How far the records, and the edges of the distribution, may be from the model's own."""


@dataclass
class Row:
    """What is known of a row without looking at it."""

    prompt: list[int]
    params: SamplingParams
    key: int
    limit: int
    tokens: list[int] = field(default_factory=list)
    """As they were last seen."""
    forced: dict[int, int] = field(default_factory=dict)
    """Token that was put at each place."""
    floors: list[int] = field(default_factory=lambda: [0])
    """Where it was extended: stop strings begin anew after forced tokens, or after the one that stopped it."""
    breaks: list[int] = field(default_factory=list)
    forks: int = 0
    cancelled: bool = False


class Play:
    """A session and what should come of it."""

    def __init__(self, rng: np.random.Generator, model: Any, tokenizer: Any, engine: Engine) -> None:
        self.rng, self.model, self.tokenizer, self.engine = rng, model, tokenizer, engine
        self.vocab = engine.input_vocab()
        self.rows: list[Row] = []
        self.reported: list[int] = []
        self.said: list[str] = []
        prompts, n, params = self._requests()
        self.session: Session = engine.open(prompts, n, params)
        self._know(prompts, n, params)

    def _requests(self) -> tuple[list[list[int]], int, SamplingParams]:
        rng = self.rng
        shared = rng.integers(3, self.vocab, 40).tolist()
        prompts = [shared[: int(rng.integers(1, 40))] for _ in range(int(rng.integers(1, 6)))]
        n = int(rng.integers(1, 5))
        stop: tuple[str, ...] = ()
        if self.tokenizer is not None and rng.random() < 0.7:
            letters = [self.tokenizer.decode([int(i)]) for i in rng.integers(3, self.vocab, 4)]
            stop = tuple(letter for letter in letters if letter.strip())
        params = SamplingParams(
            temperature=float(rng.choice([0.0, 1.0, 0.7])),
            top_k=int(rng.choice([0, 0, 5])),
            repetition_penalty=float(rng.choice([1.0, 1.0, 1.3])),
            max_tokens=rng.integers(1, 30, len(prompts) * n).tolist(),
            stop_token_ids=rng.integers(0, self.vocab, int(rng.integers(0, 4))).tolist(),
            stop=stop,
            seed=int(rng.integers(1 << 30)),
        )
        return prompts, n, params

    def _know(self, prompts: list[list[int]], n: int, params: SamplingParams) -> None:
        keys = request_keys(params.seed or 0, range(len(prompts) * n)).tolist()
        limits: Any = params.max_tokens
        for i, (key, limit) in enumerate(zip(keys, limits, strict=True)):
            self.rows.append(Row(prompts[i // n], params, key, limit))

    # What may be done

    def act(self) -> None:
        names = ["step", "step", "some", "some", "extend", "fork", "cancel", "resume", "look", "run", "wrong"]
        name = str(self.rng.choice(names))
        self.said.append(name)
        getattr(self, name)()

    def _any(self) -> int | None:
        live = [i for i, row in enumerate(self.rows) if not row.cancelled]
        return int(self.rng.choice(live)) if live else None

    def step(self) -> None:
        self._ended(self.session.step())

    def some(self) -> None:
        self._ended(self.session.step(tokens=int(self.rng.integers(1, 9))))

    def _ended(self, rollouts: list[Rollout]) -> None:
        for rollout in rollouts:
            assert rollout.finish_reason is not None, rollout.request
            self.reported.append(rollout.request)
            self.seen(rollout)

    def run(self) -> None:
        if self.rng.random() < 0.3:
            self.session.run()
            assert not self.session.running

    def look(self) -> None:
        self.session.read_back()
        for row in self.rng.integers(0, len(self.rows), 3).tolist():
            self.seen(self.session.rollout(row))

    def extend(self) -> None:
        if (row := self._any()) is None:
            return
        mine, rollout = self.rows[row], self.session.rollout(row)
        self.seen(rollout)
        words = self.rng.integers(3, self.vocab, int(self.rng.choice([0, 0, 1, 3, 9]))).tolist()
        limit = len(rollout) + len(words) + int(self.rng.choice([0, 1, 7, 20]))
        limit = max(1, min(limit, 60))
        if limit < len(rollout) + len(words):
            return
        self.said[-1] += f" {row} by {len(words)}"
        self.session.extend(row, words, max_tokens=limit)
        mine.breaks.append(len(rollout))
        if words or rollout.stop is not None:
            mine.floors.append(len(rollout) + len(words))
        mine.forced |= {len(rollout) + i: word for i, word in enumerate(words)}
        mine.tokens += words
        mine.limit = limit

    def fork(self) -> None:
        if (row := self._any()) is None or len(self.rows) > 40:
            return
        mine, rollout = self.rows[row], self.session.rollout(row)
        self.seen(rollout)
        at = int(self.rng.integers(0, len(rollout) + 1))
        n = int(self.rng.integers(1, 4))
        limit = max(1, min(60, at + int(self.rng.integers(0, 20))))
        at = min(at, limit)
        self.said[-1] += f" {row} at {at}"
        rows = self.session.fork(row, n, at=at, max_tokens=limit)
        assert rows == list(range(len(self.rows), len(self.rows) + n))
        floors = [floor for floor in mine.floors if floor <= at]
        if at - 1 in mine.forced:
            floors.append(at)
        if at == len(rollout) and rollout.stop is not None:
            floors.append(at)
        for _ in rows:
            self.rows.append(
                Row(
                    mine.prompt,
                    mine.params,
                    fork_key(mine.key, mine.forks),
                    limit,
                    rollout.token_ids[:at],
                    {place: token for place, token in mine.forced.items() if place < at},
                    list(floors),
                    [*(b for b in mine.breaks if b < at), at],
                )
            )
            mine.forks += 1

    def cancel(self) -> None:
        if self.rng.random() < 0.5 and (row := self._any()) is not None:
            self.session.cancel(row)
            self.rows[row].cancelled = True
            self.seen(self.session.rollout(row))

    def resume(self) -> None:
        gone = [i for i, row in enumerate(self.rows) if row.cancelled]
        if gone:
            row = int(self.rng.choice(gone))
            self.session.resume(row)
            self.rows[row].cancelled = False

    def wrong(self) -> None:
        """Errors leave everything as it was."""
        row = self._any()
        calls: list[Any] = [
            lambda: self.session.extend(len(self.rows), [5]),
            lambda: self.session.step(tokens=0),
        ]
        if row is not None:
            calls += [
                lambda: self.session.extend(row, [self.vocab]),
                lambda: self.session.extend(row, [5] * 300, max_tokens=400),
                lambda: self.session.fork(row, at=99),
                lambda: self.session.fork(row, n=0),
                lambda: self.session.resume(row),
            ]
        with pytest.raises(ValueError, match=r"."):
            calls[int(self.rng.integers(len(calls)))]()

    # What should have come of it

    def seen(self, rollout: Rollout) -> None:
        """A row only ever grows."""
        mine = self.rows[rollout.request]
        assert rollout.token_ids[: len(mine.tokens)] == mine.tokens, f"row {rollout.request} has lost tokens"
        mine.tokens = list(rollout.token_ids)

    def check(self) -> None:
        self.session.read_back()
        for index, mine in enumerate(self.rows):
            rollout = self.session.rollout(index)
            self.seen(rollout)
            self._check_row(index, mine, rollout)

    def _check_row(self, index: int, mine: Row, rollout: Rollout) -> None:
        tokens = rollout.token_ids
        assert len(tokens) <= mine.limit
        places = [place for place in range(len(tokens)) if place not in mine.forced]
        assert rollout.sampled.tolist() == [place not in mine.forced for place in range(len(tokens))], index
        assert all(tokens[place] == word for place, word in mine.forced.items()), index
        self._check_end(index, mine, rollout)
        if not tokens:
            return
        ids = torch.tensor([[*mine.prompt, *tokens]])
        with torch.no_grad():
            logits = self.model(ids).logits[0, len(mine.prompt) - 1 : -1].double()
        temperature: Any = mine.params.temperature
        policy = (logits / (temperature or 1.0)).log_softmax(-1)
        want = policy[torch.arange(len(tokens)), torch.tensor(tokens)][places].float()
        torch.testing.assert_close(rollout.logps[places], want, atol=NEAR, rtol=1e-3, msg=f"logps of row {index}")
        self._check_draws(index, mine, tokens, logits, places)

    def _check_draws(self, index: int, mine: Row, tokens: list[int], logits: torch.Tensor, places: list[int]) -> None:
        temperature, top_k, penalty = (
            getattr(mine.params, name) for name in ("temperature", "top_k", "repetition_penalty")
        )
        chances = uniform(
            torch.tensor([self._key(index, place) for place in range(len(tokens))]), torch.arange(len(tokens))
        )
        for place in places:
            scores, had = logits[place].clone(), sorted({*mine.prompt, *tokens[:place]})
            scores[had] = torch.where(scores[had] > 0, scores[had] / penalty, scores[had] * penalty)
            if temperature == 0:
                assert scores[tokens[place]] >= scores.max() - NEAR, (
                    f"row {index}, token {place}: {float(scores.max() - scores[tokens[place]])}"
                )
                continue
            if top_k:
                best = scores.topk(top_k + 1).values
                if best[-2] - best[-1] < NEAR:  # either may be the last that is left
                    continue
                scores[scores < best[-2]] = -torch.inf
            ends = (scores / temperature).softmax(-1).cumsum(-1)
            low, high = (float(ends[t]) if t >= 0 else 0.0 for t in (tokens[place] - 1, tokens[place]))
            assert low - NEAR <= float(chances[place]) <= high + NEAR, (
                f"row {index}, token {place}: {low} {float(chances[place])} {high} {mine.params}"
            )

    def _key(self, index: int, place: int) -> int:
        """The key of the row that sampled the token at a place."""
        rollout = self.session.rollout(index)
        while rollout.parent is not None and place < (rollout.forked_at or 0):
            index = rollout.parent
            rollout = self.session.rollout(index)
        return self.rows[index].key

    def _check_end(self, index: int, mine: Row, rollout: Rollout) -> None:
        tokens = rollout.token_ids
        for place in range(len(tokens)):
            if place in mine.forced:
                continue
            last = place + 1 == len(tokens)
            stops = self._stops(mine, tokens, place)
            if stops and not last:
                assert place + 1 in mine.breaks, f"row {index} went on after token {place}"
            if last and mine.breaks[-1:] != [place + 1]:
                why = "stop" if stops else "length" if len(tokens) >= mine.limit else None
                assert rollout.finish_reason == why, f"row {index}: {rollout.finish_reason}, not {why}"

    def _stops(self, mine: Row, tokens: list[int], place: int) -> bool:
        ends: Any = mine.params.stop_token_ids
        if tokens[place] in ends:
            return True
        if not mine.params.stop:
            return False
        floor = max(floor for floor in mine.floors if floor <= place)
        text = self.tokenizer.decode(tokens[floor : place + 1])
        before = self.tokenizer.decode(tokens[floor:place])
        return any(string in text and string not in before for string in mine.params.stop)


@contextmanager
def house(rng: np.random.Generator) -> Iterator[str]:
    """One of the ways in which rows can lie in memory and be looked at."""
    with pytest.MonkeyPatch.context() as patch:
        kind = str(rng.choice(["spans", "spans", "pages", "ahead"]))
        if kind in ("pages", "ahead"):
            patch.setattr(memory_plan, "SPANS", ())
            patch.setitem(pages.PAGE, "cpu", int(rng.choice([2, 4, 16])))
            patch.setitem(scheduler.SYNC_STEPS, "cpu", int(rng.choice([1, 3, 8])))
        if kind == "ahead":
            patch.setitem(scheduler.AHEAD, "cpu", True)
        yield kind


def play(seed: int, models: dict[str, Any], tokenizer: Any, moves: int = 30) -> Play:
    """A session of random moves, checked at its end."""
    rng = np.random.default_rng(seed)
    with house(rng) as kind:
        name = str(rng.choice(list(models)))
        model = models[name]
        own = tokenizer if name == "policy" else None
        size = [None, None, 1, 2, 5][int(rng.integers(5))]
        engine = Engine(model, own, batch_size=size, unrolled=name in ("llama", "policy"))
        if kind in ("pages", "ahead") and rng.random() < 0.6:
            engine.memory_budget = int(rng.integers(300_000, 900_000))
        game = Play(rng, model, own, engine)
        game.said.insert(0, f"{name} {kind} batch_size={size} budget={engine.memory_budget}")
        try:
            for _ in range(moves):
                game.act()
            game.check()
            game.session.run()
            game.check()
        except BaseException:
            print(f"seed {seed}:", *game.said, sep="\n  ")
            raise
        return game


@pytest.fixture(scope="module")
def models(policy: Any) -> dict[str, Any]:
    return {name: shared(name) for name in ("llama", "gemma3", "gpt_neox")} | {"policy": policy}


@pytest.mark.parametrize("seed", [0, 1, 3, 4])
def test_whatever_is_done_to_a_session_rows_are_the_models_own(
    models: dict[str, Any], tokenizer: Any, seed: int
) -> None:
    play(seed, models, tokenizer, moves=20)


def test_stop_strings_hold_whatever_is_done(policy: Any, tokenizer: Any) -> None:
    for seed in (4, 6, 10, 39):
        play(seed, {"policy": policy}, tokenizer, moves=20)
