"""Generate docs/gym.md: which data sets of reasoning-gym have exploitable scorers.

python -m tools.docs.gym_table docs/gym.md
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from tools.docs.markdown import table

from explorl.tasks.gym.guard import scorer_source, uses_sympy
from explorl.tasks.gym.probe import ITEMS, ProbeFinding, probe_dataset, worst_finding
from explorl.tasks.gym.worker import factory

MIN_SHARE = 0.1
"""Fraction of problems on which a canned answer must win to be listed."""
HEADER = """\
# Data sets of reasoning-gym

Written by `python -m tools.docs.gym_table docs/gym.md`; reasoning-gym {version}, {items} problems of each data set
with its default options. A score of 1 is a win.

An exploitable scorer will be exploited: a policy finds the answer that always wins before it learns to solve anything.
Each data set is therefore probed when its task is created, with canned answers: nothing, `0`, `nan`, the question
itself, another problem's answer, the right answer with other numbers in it, and so on. A canned answer that happens to
be right does not count, however many problems share it. A data set on which another answer wins on most problems is
**refused**: `get_task` raises a ValueError with the finding, unless `allow_exploitable=True` is set. The probe uses the
requested task, with its `config` and its `threshold`: a low threshold also makes partial credit exploitable. A
`composite` is refused if one of its parts is.

- *held*: no canned answer won on more than a tenth of the problems.
- *weak*: one won on more than a tenth of the problems, but not on most.
- *scorer*: `text` compares with the right answer, `sympy` lets sympy parse the answer (only formulas reach it), `eval`
  evaluates it (as a plain value), `own` is any other code. All of them run isolated, with limits: see security.md.
- *seconds*: duration of the probe for this table. The probe of a task is shorter, usually hundredths of a second.

The probe tries only a few kinds of answers. A data set that held may still be exploitable.

{summary}

"""


@dataclass(frozen=True)
class ProbedDataset:
    """Findings of the probe of a data set."""

    name: str
    findings: tuple[ProbeFinding, ...]
    scorer: str
    seconds: float

    @property
    def finding(self) -> ProbeFinding | None:
        """Strongest finding against it, if any."""
        return worst_finding(self.findings) or next((item for item in self.findings if item.share > MIN_SHARE), None)

    @property
    def verdict(self) -> str:
        if worst_finding(self.findings):
            return "**refused**"
        return "weak" if self.finding else "held"

    @property
    def cells(self) -> tuple[str, ...]:
        """Cells of the table that do not depend on the machine."""
        finding = self.finding
        text = "" if finding is None else f"{finding.answer}: {finding.wins} of {finding.items}"
        return self.name, self.verdict, text, self.scorer


def rows() -> Iterator[ProbedDataset]:
    """Yield the result for each data set that can be created without options."""
    datasets = factory().DATASETS
    for name in sorted(set(datasets) - {"composite"}):
        start = time.process_time()
        findings = tuple(probe_dataset(name, {}, thorough=True))
        yield ProbedDataset(name, findings, kind_of_scorer(datasets[name][0]), time.process_time() - start)


def kind_of_scorer(kind: type) -> str:
    """Return how a class of data sets scores: by ``text``, ``sympy``, ``eval`` or its ``own`` code."""
    if uses_sympy(kind):
        return "sympy"
    if kind.score_answer.__qualname__.startswith("ProceduralDataset."):  # type: ignore[attr-defined]
        return "text"
    return "eval" if "eval(answer" in scorer_source(kind) else "own"


def page(probed: Sequence[ProbedDataset]) -> str:
    """Return the page."""
    refused = sum(row.verdict == "**refused**" for row in probed)
    weak = sum(row.verdict == "weak" for row in probed)
    summary = f"{len(probed)} data sets: {refused} are refused, {weak} are weak, {len(probed) - refused - weak} held."
    head = HEADER.format(version=version("reasoning-gym"), items=ITEMS, summary=summary)
    cells = [[*row.cells, f"{row.seconds:.1f}"] for row in probed]
    return f"{head}{table(('data set', 'verdict', 'finding', 'scorer', 'seconds'), cells)}\n"


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m tools.docs.gym_table FILE")
    Path(sys.argv[1]).write_text(page(list(rows())), encoding="utf-8")
