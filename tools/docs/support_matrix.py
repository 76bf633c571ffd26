"""Build the table of which strategies run where: each engine, each way to distribute a model, and verl.

`python -m tools.docs.reference` writes the page. Tests compare the table with what the trainer rejects.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from tools.docs.markdown import table

from explorl.integrations.verl.support import EXAMPLES, refusal_reason
from explorl.strategies import REGISTRY, ReferenceReset, Strategy, build
from explorl.strategies.base import overrides

_HEAD = """\
# What runs where

Written from the code by `python -m tools.docs.reference`. A strategy either **runs** or is rejected with a reason when
the trainer is built; nothing is silently ignored. The engines: `explorl` is Explorl's own, `generate` is
`model.generate`, `vllm` is vLLM through TRL ([vLLM](vllm.md)). For training with several processes: DDP and ZeRO-1/2
hold complete weights on each process, ZeRO-3 and FSDP2 shard them ([Scale](scale.md)). The engine and the distribution
of weights restrict strategies independently. Inside [verl](verl.md), verl's own workers sample and train.

"""


Rule = tuple[Callable[[Strategy], bool], str]

_ROWS: Rule = lambda strategy: overrides(strategy, "sampling"), "it samples all rows with the same parameters"
_BRANCHES: Rule = lambda strategy: overrides(strategy, "branching"), "its completions cannot branch"
_MASS: Rule = (
    lambda strategy: strategy.needs_min_p_mass is not None,
    "it does not record the probabilities of other tokens",
)
_LOGPS: Rule = (
    lambda strategy: strategy.needs_sampling_logps,
    "it does not record the sampling log-probabilities",
)
_TOOL: Rule = lambda strategy: bool(strategy.needs_interpreter), "the interpreter needs Explorl's engine"


def _rejected_by(*rules: Rule) -> Callable[[Strategy], str | None]:
    """Return a function that returns the reason of the first rule that applies, or None."""
    return lambda strategy: next((reason for applies, reason in rules if applies(strategy)), None)


def _with_shards(strategy: Strategy) -> str | None:
    if isinstance(strategy, ReferenceReset):
        return "with β > 0 not if the reference is sharded as well: under FSDP2, and under ZeRO-3 with a LoRA adapter"
    return None


REFUSALS: Mapping[str, Callable[[Strategy], str | None]] = {
    "explorl": _rejected_by(),
    "generate": _rejected_by(_ROWS, _BRANCHES, _MASS, _LOGPS),
    "vllm": _rejected_by(_BRANCHES, _MASS, _TOOL),
    "DDP, ZeRO-1/2": _rejected_by(),
    "ZeRO-3, FSDP2": _with_shards,
    "verl": refusal_reason,
}
"""By column, a function that returns why a strategy is rejected there, or None if it runs."""


def examples() -> list[Strategy]:
    """Return one instance of every strategy in the registry."""
    return [build({name: EXAMPLES.get(name, {})}) for name in REGISTRY]


def support_page() -> str:
    """Return the page as Markdown."""
    footnotes: dict[str, int] = {}
    rows = []
    for strategy in examples():
        cells = [f"[`{strategy.name}`](strategies.md#{strategy.name})"]
        for column in REFUSALS.values():
            reason = column(strategy)
            verdict = "partly" if column is _with_shards else "no"
            if reason is None:
                cells.append("runs")
            else:
                cells.append(f"{verdict} ({footnotes.setdefault(reason, len(footnotes) + 1)})")
        rows.append(cells)
    notes = "\n".join(f"{number}. {reason}" for reason, number in footnotes.items())
    return f"{_HEAD}{table(('strategy', *REFUSALS), rows)}\n\n{notes}\n"
