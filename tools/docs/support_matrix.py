"""Which strategies run where: every engine, every way to spread a model over processes, and verl.

The trainer refuses by the same rules: tests compare the two. `python -m tools.docs.reference` writes the page.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from explorl.integrations.verl.support import EXAMPLES
from explorl.integrations.verl.support import refusal as _inside_verl
from explorl.strategies import REGISTRY, ReferenceReset, Strategy, build
from explorl.strategies.base import overrides

_HEAD = """\
# What runs where

Written from the code by `python -m tools.docs.reference`. A strategy **runs** or is refused, with the reason in
words, when the trainer is built; nothing is ignored in silence. Of engines: `explorl` is Explorl's own, `generate` is
`model.generate`, `vllm` is vLLM through TRL ([vLLM](vllm.md)). Of training in several processes: DDP and ZeRO-1/2 keep
whole weights on each, ZeRO-3 and FSDP2 shard them ([Scale](scale.md)). An engine and a way to spread weights refuse
each for itself. Inside [verl](verl.md) its own workers sample and train.
"""


Rule = tuple[Callable[[Strategy], bool], str]

_ROWS: Rule = lambda one: overrides(one, "sampling"), "it samples all rows alike"
_BRANCHES: Rule = lambda one: overrides(one, "branching"), "its answers cannot branch"
_MASS: Rule = lambda one: one.needs_min_p_mass is not None, "it does not record how likely other tokens were"
_LOGPS: Rule = (
    lambda one: one.needs_sampling_logps,
    "it does not record the log-probabilities that were sampled from",
)
_TOOL: Rule = lambda one: bool(one.needs_interpreter), "the interpreter needs Explorl's engine"


def _refused_by(*rules: Rule) -> Callable[[Strategy], str | None]:
    """The reason of the first rule that applies."""
    return lambda one: next((reason for applies, reason in rules if applies(one)), None)


def _in_shards(strategy: Strategy) -> str | None:
    if isinstance(strategy, ReferenceReset):
        return "with β > 0 not where the reference is sharded too: under FSDP2, and under ZeRO-3 with a LoRA adapter"
    return None


REFUSALS: Mapping[str, Callable[[Strategy], str | None]] = {
    "explorl": _refused_by(),
    "generate": _refused_by(_ROWS, _BRANCHES, _MASS, _LOGPS),
    "vllm": _refused_by(_BRANCHES, _MASS, _TOOL),
    "DDP, ZeRO-1/2": _refused_by(),
    "ZeRO-3, FSDP2": _in_shards,
    "verl": _inside_verl,
}
"""Why a strategy is refused there; None where it runs."""


def examples() -> list[Strategy]:
    """One of every strategy in the registry."""
    return [build({name: EXAMPLES.get(name, {})}) for name in REGISTRY]


def support_page() -> str:
    """The page, in Markdown."""
    reasons: dict[str, int] = {}
    lines = [_HEAD, f"| strategy | {' | '.join(REFUSALS)} |", f"|---|{'---|' * len(REFUSALS)}"]
    for strategy in examples():
        cells = []
        for refusal in REFUSALS.values():
            reason = refusal(strategy)
            said = "partly" if refusal is _in_shards else "no"
            cells.append("runs" if reason is None else f"{said} ({reasons.setdefault(reason, len(reasons) + 1)})")
        lines.append(f"| [`{strategy.name}`](strategies.md#{strategy.name}) | {' | '.join(cells)} |")
    lines += ["", *(f"{number}. {reason}" for reason, number in reasons.items())]
    return "\n".join(lines) + "\n"
