"""The table of docs/gym.md: which data sets of reasoning-gym can be bought.

python -m tools.docs.gym_table docs/gym.md
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from explorl.tasks.gym.guard import scorer_source, uses_sympy
from explorl.tasks.gym.probe import ITEMS, Finding, probe_dataset, worst_finding
from explorl.tasks.gym.worker import factory

SOME = 0.1
"""Share of problems on which a canned answer must win to be told."""
HEADER = """\
# Data sets of reasoning-gym

Written by `python -m tools.docs.gym_table docs/gym.md`; reasoning-gym {version}, {items} problems of each data set
with its default options, a score of 1 is a win.

A scorer that can be bought is bought: a policy finds the answer that always wins before it learns to solve anything.
So a data set is probed when its task is made, with canned answers: nothing, `0`, `nan`, the question itself, another
problem's answer, the right answer with other numbers in it, and so on. An answer that is right does not count, however
many problems have it. A data set on which one of the others wins on most problems is **refused**: `get_task` raises a
ValueError with the finding, unless it is told `allow_exploitable=True`. What is probed is the task as it is asked for,
with its `config` and its `threshold`: where that is low, partial credit is for sale, too. A `composite` is refused if
one of its parts is.

- *held*: no canned answer won.
- *weak*: one won on over a tenth of the problems, but not on most.
- *scorer*: `text` compares with the right answer, `sympy` has sympy parse the answer (only formulas get there), `eval`
  evaluates it (as a plain value), `own` is any other code. All of them run shut in, with limits: see security.md.
- *seconds*: what the probe for this table took. The one of a task takes less, mostly hundredths of a second.

The probe knows few tricks. What held may still have a hole.

{summary}

| data set | verdict | finding | scorer | seconds |
|---|---|---|---|---|
"""


@dataclass(frozen=True)
class Row:
    """What was found out about a data set."""

    name: str
    findings: tuple[Finding, ...]
    scorer: str
    seconds: float

    @property
    def finding(self) -> Finding | None:
        """What tells most against it."""
        return worst_finding(self.findings) or next((found for found in self.findings if found.share > SOME), None)

    @property
    def verdict(self) -> str:
        if worst_finding(self.findings):
            return "**refused**"
        return "weak" if self.finding else "held"

    @property
    def cells(self) -> tuple[str, ...]:
        """What is the same on every machine."""
        found = self.finding
        shown = "" if found is None else f"{found.answer}: {found.wins} of {found.items}"
        return self.name, self.verdict, shown.replace("|", "\\|"), self.scorer


def rows() -> Iterator[Row]:
    """One for each data set that can be made without options."""
    known = factory().DATASETS
    for name in sorted(set(known) - {"composite"}):
        begun = time.process_time()
        findings = tuple(probe_dataset(name, {}, thorough=True))
        yield Row(name, findings, kind_of_scorer(known[name][0]), time.process_time() - begun)


def kind_of_scorer(kind: type) -> str:
    """How a class of data sets scores: by ``text``, ``sympy``, ``eval`` or code of its ``own``."""
    if uses_sympy(kind):
        return "sympy"
    if kind.score_answer.__qualname__.startswith("ProceduralDataset."):  # type: ignore[attr-defined]
        return "text"
    return "eval" if "eval(answer" in scorer_source(kind) else "own"


def page(table: list[Row]) -> str:
    """The whole page."""
    refused = sum(row.verdict == "**refused**" for row in table)
    weak = sum(row.verdict == "weak" for row in table)
    summary = f"{len(table)} data sets: {refused} are refused, {weak} are weak, {len(table) - refused - weak} held."
    head = HEADER.format(version=version("reasoning-gym"), items=ITEMS, summary=summary)
    return head + "".join(f"| {' | '.join([*row.cells, f'{row.seconds:.1f}'])} |\n" for row in table)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m tools.docs.gym_table FILE")
    Path(sys.argv[1]).write_text(page(list(rows())), encoding="utf-8")
