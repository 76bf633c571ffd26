"""Random and fixed batches for the tests of the strategies."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from beartype import beartype
from hypothesis import settings
from hypothesis import strategies as st
from jaxtyping import jaxtyped

from explorl.strategies import Batch

THOROUGH = settings(max_examples=80, deadline=None)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@cache
def checked(function):
    """The function with the shapes and dtypes of its signature checked at each call."""
    return jaxtyped(typechecker=beartype)(function)


@dataclass(frozen=True)
class Case:
    """Inputs of every pure function; where the mask is 0 there is garbage."""

    advantages: torch.Tensor
    logps: torch.Tensor
    entropy: torch.Tensor
    mask: torch.Tensor
    rewards: torch.Tensor
    correctness: torch.Tensor
    correct: torch.Tensor
    group: torch.Tensor

    def map(self, per_token, per_row):
        return Case(
            *(per_token(x) for x in (self.advantages, self.logps, self.entropy, self.mask)),
            *(per_row(x) for x in (self.rewards, self.correctness, self.correct, self.group)),
        )

    def batch(self) -> Batch:
        """The same as a strategy sees it; what was sampled from is some other distribution."""
        return make_batch(
            logps=self.logps,
            old_logps=self.logps,
            sampling_logps=-0.5 * self.entropy,
            entropy=self.entropy,
            mask=self.mask,
            advantages=self.advantages,
            rewards=self.rewards,
            correctness=self.correctness,
            correct=self.correct,
            group=self.group,
            truncated=torch.zeros(len(self.group), dtype=torch.bool),
        )


def exact(tensor):
    """What a tensor holds, as float64."""
    return tensor.double().numpy()


@st.composite
def cases(draw, dtype=None):
    """Ragged masks with holes and empty sequences, group ids in any order, ties, equal rewards, NaN in the padding.

    What is correct has nothing to do with the total reward, and some answers could not be scored.
    """
    rows, width = draw(st.integers(1, 7)), draw(st.integers(1, 8))
    kind = DTYPES[dtype or draw(st.sampled_from(sorted(DTYPES)))]
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    ids = rng.choice([-3, 0, 7, 1_000_003], rows)
    mask = (np.arange(width) < rng.integers(0, width + 1, rows)[:, None]).astype(np.float32)
    if draw(st.booleans()):
        mask *= rng.random(mask.shape) > 0.25  # a tool's output amid the tokens
    size = draw(st.sampled_from([1e-3, 1.0, 30.0]))
    coarse = draw(st.booleans())

    def values(low, high):
        grid = rng.integers(-2, 3, mask.shape) / 2 if coarse else rng.uniform(-1, 1, mask.shape)
        out = np.clip(grid * size, low, high)
        return np.where(mask > 0, out, rng.choice([np.nan, np.inf, -np.inf, 1e30], mask.shape))

    rewards = {
        "binary": rng.choice([0.0, 0.1, 1.0, 1.1], rows),
        "equal": np.full(rows, rng.choice([0.0, 0.3, 1.0])),
        "any": rng.uniform(-2, 2, rows),
    }[draw(st.sampled_from(["binary", "equal", "any"]))]

    correctness = rng.choice([0.0, 0.5, 1.0, 2.0, -1.0, np.nan], rows)
    threshold = rng.choice([-2.0, 0.5, 1.0, 3.0])

    def tensor(array):
        return torch.tensor(array, dtype=torch.float32).to(kind)

    return Case(
        advantages=tensor(values(-np.inf, np.inf)),
        logps=tensor(-np.abs(values(-np.inf, np.inf))),
        entropy=tensor(np.abs(values(-np.inf, np.inf))),
        mask=torch.tensor(mask, dtype=torch.float32),
        rewards=tensor(rewards),
        correctness=tensor(correctness),
        correct=torch.tensor(correctness >= threshold),
        group=torch.tensor(ids, dtype=torch.long),
    )


def close(actual, expected, name=""):
    """Finite, and equal to 1e-6; what comes back as bfloat16 to its last bit."""
    rounding = 2**-8 if actual.dtype == torch.bfloat16 else 1e-6
    assert torch.isfinite(actual).all(), (name, actual)
    np.testing.assert_allclose(exact(actual), expected, rtol=rounding, atol=1e-6, err_msg=name)


def make_batch(**changes) -> Batch:
    """Two prompts with three answers each, of up to four tokens; what is masked out is NaN.

    The total reward is correctness and 0.1 for the format; unless told otherwise, an answer is correct from 1 on.
    """
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 1, 1, 0], [1, 0, 0, 0], [1, 1, 1, 1], [1, 1, 0, 0]]).float()
    steps = torch.arange(24, dtype=torch.float32).reshape(6, 4)

    def padded(values):
        return torch.where(mask > 0, values, torch.nan)

    correctness = changes.pop("correctness", torch.tensor([1.0, 0.0, 0.0, 1.0, 0.0, 0.0]))
    fields = {
        "logps": padded(-0.1 - 0.05 * steps),
        "old_logps": padded(-0.1 - 0.05 * steps),
        "ref_logps": None,
        "sampling_logps": None,
        "entropy": padded(0.1 * ((steps * 7) % 11)),
        "branching": None,
        "mask": mask,
        "advantages": padded(torch.tensor([1.0, -0.5, -0.5, 1.2, -0.6, -0.6]).unsqueeze(1).expand(6, 4)),
        "rewards": torch.tensor([1.1, 0.1, 0.0, 1.0, 0.0, 0.0]),
        "correct": correctness >= 1,
        "correctness": correctness,
        "group": torch.tensor([9, 9, 9, 4, 4, 4]),
        "truncated": torch.tensor([False, True, False, False, True, False]),
        "temperature": torch.tensor([0.6, 0.6, 0.6, 1.5, 1.5, 1.5]),
        "step": 0,
        "prompts": ["a"] * 3 + ["b"] * 3,
    }
    return Batch(**{**fields, **changes})
