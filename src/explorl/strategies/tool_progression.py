"""Tool progression: introduce a tool gradually, on more prompts and with more calls over time.

    a prompt has the tool if   u(seed, prompt) < share(step),   u uniform on [0, 1)
    calls per completion ≤ ⌊calls(step)⌋ if it does,   0 otherwise

Deng et al. 2025, §4.3 and Table 2, name ETIR (code-integrated reasoning), which introduces tool use progressively. u
depends only on the prompt, so a prompt with the tool keeps it as the share rises, and all completions of a prompt are
sampled under the same conditions: their group compares what they did and not what they were allowed to do.

What to expect: completions without the tool keep the policy's own reasoning in the batch while it learns to call the
tool. With a share below 1 the reward is a mean over both kinds of prompts and rises with the share.

When not to use it: if the policy uses the tool well from the start, or to preserve its score without the tool; measure
that by an evaluation without it.

Deviations: the paper gives no schedule. This is the simplest one: a rising share of prompts and a rising number of
calls, both linear by default.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from explorl.strategies._lib.schedule import Schedule, Scheduled, at
from explorl.strategies._lib.validate import check_integer, check_number
from explorl.strategies.base import Batch, Sampling, Strategy

SHARE = Schedule(begin=0.25, to=1.0, steps=100)
CALLS = Schedule(begin=1, to=3, steps=100)


def allowed_calls(prompts: Sequence[str], *, share: float, calls: float, seed: int = 0) -> list[int]:
    """Return the allowed calls per completion for each prompt: ⌊calls⌋ if u(seed, prompt) < share, else 0."""
    return [math.floor(calls + 1e-9) if _uniform(seed, prompt) < share else 0 for prompt in prompts]


def _uniform(seed: int, prompt: str) -> float:
    digest = hashlib.sha256(f"{seed}/{prompt}".encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:6], "big") / 2**48


@dataclass(frozen=True)
class ToolProgression(Strategy):
    """Introduce a tool gradually, on more prompts and with more calls over time."""

    name = "tool_progression"
    paper = "Deng et al. 2025, From Trial-and-Error to Improvement, §4.3 and Table 2"
    needs_interpreter = True
    acts_on_parts = True

    share: Scheduled = SHARE  # of prompts that have the tool
    calls: Scheduled = CALLS  # per completion, rounded down
    seed: int = 0  # decides which prompts come first

    def __post_init__(self) -> None:
        check_number(self, "share", at_least=0, at_most=1, good=0.5)
        check_number(self, "calls", at_least=1, good=3)
        check_integer(self, "seed", at_least=0)

    def check_calls(self, *, max_calls: int) -> None:
        highest = max(at(self.calls, 0), at(self.calls, 10**9))
        if math.floor(highest + 1e-9) > max_calls:
            raise ValueError(
                f"tool_progression: calls goes up to {highest:g}, but the tool allows {max_calls}; use at most "
                f"{max_calls}, or raise the limit of the tool (max_calls, rollout.tool_calls)"
            )

    def sampling(self, prompts: Sequence[str], step: int) -> Sampling:
        return {"tool_calls": self._allowed(prompts, step)}

    def metrics(self, batch: Batch) -> Mapping[str, float]:
        """Return the fraction of completions that had the tool, and how often each of them could call it."""
        allowed = [float(calls) for calls in self._allowed(batch.collectives.gather_objects(batch.prompts), batch.step)]
        positive = [calls for calls in allowed if calls]
        share = len(positive) / len(allowed) if allowed else math.nan
        return {"share": share, "calls": positive[0] if positive else 0.0}

    def _allowed(self, prompts: Sequence[str], step: int) -> list[int]:
        return allowed_calls(prompts, share=at(self.share, step), calls=at(self.calls, step), seed=self.seed)
