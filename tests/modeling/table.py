"""Writes docs/models.md: on which architectures the fast paths run, measured on the zoo.

python -m tests.modeling.table
"""

from __future__ import annotations

import datetime
import re
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
import trl
from transformers.utils import logging as transformers_logging

from explorl.modeling.proof import turning_points

from . import harness, zoo
from .verdict import FAR, NEAR, Verdict, engine, training_pass

PATH = Path(__file__).parents[2] / "docs" / "models.md"
DATE = "Measured on "
"""How the line with the date begins."""
DIFFERS = 1e-2
"""|Δ log π| beyond which what TRL computes is not what the model computes alone: larger than any rounding."""

REASONS = [
    (r"attention sinks or a position bias", "attention sinks or a position bias"),
    (r"object has no attribute 'last_hidden_state'", "TRL's head fails"),
    (r"NoneType", "reads its attention mask"),
    (r"expanded size of the tensor|Expected size", "caches other keys than it attends to"),
    (r"it fails with", "fails"),
    (r"made 0 attention calls", "attention outside of transformers' interface"),
    (r"attention calls for", "not one attention call per cached layer"),
    (r"need more from a cache", "its cache holds more than keys and values"),
    (r"log-probabilities differ", "differs"),
]
"""What a reason is in short."""

INTRO = """\
# Models

*Engine* is Explorl's own sampling engine and *training pass* its packed pass over a batch without padding. Each is
compared with the model before its first use. *Right* means that log-probabilities (in training also gradients) equal
those of the model's own forward pass on each sequence alone, within {tolerance:g} in float32. If the engine is
*refused*, completions are sampled with `model.generate`. If the training pass *steps aside*, TRL's padded pass is
used. One warning gives the reason, and you need not set anything.

An *unrolled* pass runs Explorl's own version of the layers, which is faster still. A path that is right *up to* a
length of the configuration is used as long as the longest prompt and the longest completion of a batch together are
no longer. The column *TRL* shows the limits of TRL's own pass, which is used after stepping aside: *padding* if its
padded rows differ from the model on each sequence alone, *head* if its fused head omits something that the model does
to its logits, or fails.

The models are tiny, with random weights, on the CPU. The sequences are longer than all windows, chunks and original
context lengths, which here are {near} to {far} tokens. A name such as `mistral/full` is another configuration of
`mistral`: see `tests/modeling/zoo.py`. *Layers* lists the classes that mix tokens, and kinds of layers.

{date}{day}.

Versions: torch {torch}, transformers {transformers}, trl {trl}. Written by `python -m tests.modeling.table`.
"""


class Row(NamedTuple):
    name: str
    layers: str
    engine: str
    training_pass: str
    trl: str

    @property
    def fast(self) -> int:
        """How many paths are right at any length."""
        return sum(cell in ("right", "right, unrolled") for cell in (self.engine, self.training_pass))

    @property
    def group(self) -> int:
        if self.fast == 2:
            return 0
        return 1 if any(cell.startswith("right") for cell in (self.engine, self.training_pass)) else 2


GROUPS = ["Fully fast", "Partly fast", "As in TRL and transformers"]


def row(name: str) -> Row:
    """What becomes of one configuration; raises where a path is wrong."""
    return Row(name, zoo.kinds(zoo.build(name)), _engine(name), _training_pass(name), _trl(name))


def text(rows: list[Row], day: datetime.date) -> str:
    intro = INTRO.format(
        tolerance=harness.TOLERANCE,
        date=DATE,
        day=day.isoformat(),
        torch=torch.__version__.partition("+")[0],
        transformers=transformers.__version__,
        trl=trl.__version__,
        near=NEAR.threshold,
        far=2 * FAR.threshold,
    )
    counts = [sum(row.group == group for row in rows) for group in range(len(GROUPS))]
    types = len({row.name.partition("/")[0] for row in rows})
    said = f"{len(rows)} configurations of {types} model types: {counts[0]} fully fast, {counts[1]} partly, "
    said += f"{counts[2]} neither."
    parts = [intro, said]
    for group, title in enumerate(GROUPS):
        inside = sorted(row for row in rows if row.group == group)
        lines = [("Model", "Layers", "Engine", "Training pass", "TRL"), ("---",) * 5, *inside]
        parts.append(f"\n## {title}\n\n" + "\n".join(f"| {' | '.join(line)} |" for line in lines))
    left_out = "\n".join(f"- {name}: {why}" for name, why in sorted(zoo.UNBUILDABLE.items()))
    parts.append(f"\n## Left out\n\n{left_out}")
    return "\n".join(parts) + "\n"


def _engine(name: str) -> str:
    for lengths in (NEAR, FAR):
        verdict = engine(name, lengths)
        if not verdict.path:
            return _limited(name, engine, verdict, "refused")
    return "right"


def _training_pass(name: str) -> str:
    for lengths in (NEAR, FAR):
        verdict = training_pass(name, lengths)
        if not verdict.path:
            return _limited(name, training_pass, verdict, "steps aside")
    return "right, unrolled" if verdict.path == "unrolled" else "right"


def _limited(name: str, path: Any, verdict: Verdict, outcome: str) -> str:
    """Up to which turning point a path is right, where there is one."""
    points: dict[int, str] = {}
    for label, value in turning_points(zoo.config(name, threshold=FAR.threshold)).items():
        points.setdefault(value, label.rpartition(".")[2])
    said = f"{outcome} ({_short(verdict.reason)})"
    for point, label in sorted(points.items(), reverse=True):
        if path(name, FAR, limit=point).path:
            return f"right up to `{label}`, then {said}"
    return said


def _short(reason: str) -> str:
    return next(short for pattern, short in REASONS if re.search(pattern, reason))


def _trl(name: str) -> str:
    found = []
    if harness.padded_logps_of(zoo.build(name)) > DIFFERS:
        found.append("padding")
    try:
        if harness.head_logps_of(zoo.build(name)) > DIFFERS:
            found.append("head")
    except AttributeError:
        found.append("head fails")
    return ", ".join(found)


def main() -> None:
    transformers_logging.set_verbosity_error()
    torch.set_num_threads(1)
    names = [*zoo.architectures(), *zoo.variants()]
    PATH.write_text(text([row(name) for name in names], datetime.date.today()), encoding="utf-8")
    print(f"{PATH}: {len(names)} configurations")


if __name__ == "__main__":
    main()
