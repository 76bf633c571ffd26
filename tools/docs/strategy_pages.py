"""Generate docs/strategies.md and the README's table from the docstrings of the strategies.

    python -m tools.docs.strategy_pages            # write both
    python -m tools.docs.strategy_pages --check    # fail if one is out of date

The advice and the measured effects are written by hand between two marks and preserved.
"""

from __future__ import annotations

import inspect
import os
import re
import textwrap
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from tools.docs.markdown import table

import explorl.strategies
from explorl.strategies._lib.schedule import Schedule
from explorl.strategies.base import Strategy
from explorl.strategies.registry import REGISTRY, describe

ADVICE, MEASURED = "advice", "measured effects"
"""Sections written by hand, each between two marks of this name."""
NOT_YET = "Nothing is measured yet."
README_COLUMNS = ("name", "what it does", "source")

HOOKS = (
    "arguments",
    "order",
    "sampling",
    "branching",
    "rewards",
    "advantages",
    "select",
    "weights",
    "clip",
    "keep",
    "penalty",
    "after_step",
)
LABELS = ("What to expect", "When not to use it", "Deviations")

HEAD = """\
# Exploration strategies

<!-- Written by `python -m tools.docs.strategy_pages` from the docstrings in src/explorl/strategies. Edit those. -->

## Which strategy should I use?

<!-- advice: begin -->
{advice}
<!-- advice: end -->

## All strategies

{listing}

`explorl strategies` prints this list, with `--json` in machine-readable form.
[A strategy of your own](tutorial-strategy.md) is one file.

## How they compose

A run takes any list of strategies. In a config file an entry is a name, or a name with its hyperparameters:

```yaml
strategies:
  - mask_truncated
  - risk_sensitive: {{beta: 2.0}}
  - entropy_advantage:
      alpha: {{from: 0.4, to: 0.0, start: 100, steps: 200, shape: cosine}}
```

In Python, pass the same list, or the objects themselves:

```python
from explorl import strategies as xs

strategies = [
    xs.MaskTruncated(),
    xs.RiskSensitive(beta=2.0),
    xs.EntropyAdvantage(alpha=xs.Schedule(0.4, 0.0, start=100, steps=200, shape="cosine")),
]
```

{composition}

{calls}

- Two strategies that replace the base advantage ({replacing}) cannot be combined, and
  no strategy can be listed twice; both are errors.
- A warning names strategies without effect in this list: one that shapes advantages before another replaces them, the
  earlier of two clips, and {reuse} on a batch that is used for one update. To reuse batches, set `num_iterations`
  to 2 or more ([`training.iterations`](configuration.md#trainingiterations) in a config), or `steps_per_generation`
  above `gradient_accumulation_steps`.

The run defines what counts as a correct answer: a named reward function and a threshold.
{correct} need this definition, and so do element_wise_temperature with
`source: running`, and pass_threshold, pkpo, maxrl, risk_sensitive and quantile_baseline with `of: correct` (the default
of pkpo and maxrl).

For each generation batch the log contains `strategy/<name>/…`: the mean absolute change of the advantages or weights
over all counted tokens (`advantage_change`, `weight_change`), the number of changed tokens (`advantage_tokens`,
`weight_tokens`), the fraction and number of tokens removed from the loss (`masked_change`, `masked_tokens`), and the
strategy's own metrics. The entropy bonus is TRL's own and is logged as `entropy_coef` and `policy_loss`.

## Schedules

A hyperparameter of type `float | Schedule` (or `int | Schedule`) takes a number or a schedule: a mapping in a config, a
`Schedule` in Python.

{schedule}

```yaml
- ppl_shaping:
    alpha: {{from: 0.05, to: 0.0, start: 200, steps: 100, shape: linear}}
```

```python
xs.PerplexityShaping(alpha=xs.Schedule(0.05, 0.0, start=200, steps=100, shape="linear"))
```

By default `start` is 0, `steps` is 1 and `shape` is linear. Steps are optimizer steps; if a batch is used for several
of them, the value is that of the step at which it was sampled (in `penalty`, that of the current step).
"""

TAIL = """\
## Measured effects

<!-- measured effects: begin -->
{measured}
<!-- measured effects: end -->
"""


def render(existing: str = "") -> str:
    """Return the document, with the advice and the measured effects of the `existing` one."""
    entries = [entry for entry in describe() if _is_builtin(entry)]
    head = HEAD.format(
        advice=by_hand(existing, ADVICE) or NOT_YET,
        listing=_listing(entries),
        composition=_paragraphs(explorl.strategies)[1],
        calls=_paragraphs(Strategy)[1],
        replacing=_names(name for name, strategy in REGISTRY.items() if strategy.replaces_advantage),
        reuse=_names(name for name, strategy in REGISTRY.items() if strategy.needs_reuse),
        correct=_names(name for name, strategy in REGISTRY.items() if strategy.needs_correct is True),
        schedule="\n\n".join(_paragraphs(Schedule)),
    )
    tail = TAIL.format(measured=by_hand(existing, MEASURED) or NOT_YET)
    return "\n".join([head, *map(_section, entries), tail])


def by_hand(document: str, name: str) -> str:
    """Return the text between the marks of this name, empty if there are none; raise if they do not pair."""
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    if begin not in document and end not in document:
        return ""
    before, has_begin, rest = document.partition(begin)
    text, has_end, after = rest.partition(end)
    if not (has_begin and has_end) or end in before or begin in after:
        raise ValueError(f"the {name} must be between {begin} and {end}, and each mark must occur once")
    return text.strip("\n")


def readme(existing: str) -> str:
    """Return the README with an up-to-date table of the strategies."""
    head_line = f"| {' | '.join(README_COLUMNS)} |\n"
    before, head, rest = existing.partition(head_line)
    if not head:
        raise ValueError(f"the README has no table that begins with {head_line!r}")
    after = rest.partition("\n\n")[2]
    rows = [
        (f"`{entry['name']}`", _effect(entry), _short(entry["paper"])) for entry in describe() if _is_builtin(entry)
    ]
    return f"{before}{table(README_COLUMNS, rows)}\n\n{after}"


def write(path: Path, *, check: bool = False, make: Callable[[str], str] = render) -> None:
    """Write the document, or with `check` raise if it is out of date."""
    existing = path.read_text(encoding="utf-8") if path.exists() else ""
    document = make(existing)
    if check:
        if document != existing:
            option = "path" if make is render else "readme-path"
            command = f"python -m tools.docs.strategy_pages --{option} {path}"
            raise ValueError(f"{path} is out of date; run {command}")
        return
    staged = path.with_name(f".{path.name}.{os.getpid()}")
    staged.write_text(document, encoding="utf-8")
    staged.replace(path)


def _is_builtin(entry: Mapping[str, Any]) -> bool:
    return entry["name"] in REGISTRY


def _short(paper: str) -> str:
    """Return the authors, the year and the location of a paper, without the title."""
    parts = []
    for source in paper.split("; "):
        authors = re.match(r".*?\d{4}", source)
        number, section = re.search(r" \(arXiv:[\d.]+\)", source), re.search(r", (Eq\.|§)[^,]*$", source)
        parts.append("".join(match[0] for match in (authors, number, section) if match))
    return "; ".join(parts)


def _listing(entries: list[dict[str, Any]]) -> str:
    rows = [(f"[`{entry['name']}`](#{entry['name']})", _effect(entry), _hooks(entry)) for entry in entries]
    return table(("name", "effect", "hooks"), rows)


def _section(entry: dict[str, Any]) -> str:
    """Return the section of one strategy: idea, formula, hyperparameters, and the paragraphs of its docstring."""
    _, formula, *paragraphs = entry["docs"].split("\n\n")
    texts: dict[str, list[str]] = {label: [] for label in ("", *LABELS)}
    label = ""
    for paragraph in paragraphs:
        label = next((new for new in LABELS if paragraph.startswith(f"{new}: ")), label)
        texts[label].append(paragraph.removeprefix(f"{label}: "))
    definitions, expect, when_not, deviations = ("\n\n".join(text) for text in texts.values())
    parts = [
        f"## {entry['name']}",
        f"**Idea.** {_effect(entry)}",
        f"```text\n{textwrap.dedent(formula)}\n```",
        definitions,
        f"In Python `xs.{entry['class']}`; hooks: {_hooks(entry)}.",
        _hyperparameters(entry),
        f"**What to expect.** {_capital(expect)}",
        f"**When not to use it.** {_capital(when_not)}",
        f"**Source.** {entry['paper'].rstrip('.')}.",
        f"**Deviations and errata.** {_capital(deviations)}",
    ]
    return "\n\n".join(parts) + "\n"


def _hyperparameters(entry: dict[str, Any]) -> str:
    if not entry["hyperparameters"]:
        return "No hyperparameters."
    notes = _notes(REGISTRY[entry["name"]])
    rows = [
        (
            f"`{parameter['name']}`",
            f"`{_options(parameter['type'])}`",
            "required" if parameter["required"] else f"`{parameter['default']!r}`",
            notes.get(parameter["name"], ""),
        )
        for parameter in entry["hyperparameters"]
    ]
    return table(("hyperparameter", "type", "default", "note"), rows)


def _notes(strategy: type[Strategy]) -> dict[str, str]:
    """Return the comments next to the fields of a strategy, by field."""
    return dict(re.findall(r"^    (\w+): .*?  # (.+)$", inspect.getsource(strategy), re.MULTILINE))


def _options(kind: str) -> str:
    """Return a type in the form of its values: 1 | -1 for Literal[1, -1]."""
    return re.sub(r"Literal\[(.*?)\]", lambda match: match[1].replace(", ", " | "), kind)


def _hooks(entry: dict[str, Any]) -> str:
    strategy = REGISTRY[entry["name"]]
    return ", ".join(f"`{hook}`" for hook in HOOKS if getattr(strategy, hook) is not getattr(Strategy, hook))


def _effect(entry: dict[str, Any]) -> str:
    return _capital(entry["effect"].partition(": ")[2])


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _paragraphs(documented: Any) -> list[str]:
    return (inspect.getdoc(documented) or "").replace("``", "`").split("\n\n")


def _names(names: Iterable[str]) -> str:
    *others, last = names
    return f"{', '.join(others)} and {last}" if others else last


def _main(path: Path = Path("docs/strategies.md"), readme_path: Path = Path("README.md"), check: bool = False) -> None:
    try:
        write(path, check=check)
        write(readme_path, check=check, make=readme)
    except ValueError as error:
        raise SystemExit(str(error)) from None


if __name__ == "__main__":
    import typer

    typer.run(_main)
