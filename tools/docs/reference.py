"""Writes the reference pages of the documentation from the code, so that the two cannot drift apart.

python -m tools.docs.reference            # writes docs/configuration.md, study-file.md, protocols.md, support.md
python -m tools.docs.reference --check    # fails where one is not what would be written
"""

from __future__ import annotations

import ast
import inspect
import json
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from tools.docs.support_matrix import support_page

from explorl.core.config import Config, presets
from explorl.core.store import write_text
from explorl.evaluation.protocols import PROTOCOLS, Protocol
from explorl.strategies import EntropyGuidedWeighting, PassThreshold, PerplexityShaping, PositionShaping
from explorl.study import spec as study_file
from explorl.tasks import Task
from explorl.training.rft.filters import max_redundancy

NOTE = "<!-- Written by `python -m tools.docs.reference` from {source}. Edit that. -->"

CONFIGURATION = """\
# Configuration

{note}

One configuration serves `explorl train`, `sft` and `rft`, and is the base of a [study](study-file.md). It is put
together from the defaults below, a preset (`--preset tiny`), a YAML file (`--config my.yaml`) and single keys
(`--set training.learning_rate=1e-5`); the later ones win. The file holds only what it changes:

```yaml
task: {{name: countdown-mini}}
training:
  steps: 100
  learning_rate: 1e-5
strategies:
  - mask_truncated
  - risk_sensitive: {{beta: 2.0}}
```

`explorl config show --preset tiny --set training.steps=100` prints every key with its resolved value. An unknown key
is an error that suggests the nearest known one; a value out of range is an error, too. The run's folder keeps the
resolved configuration as `config.yaml`.
"""

STUDY = """\
# Study file

{note}

A study compares *arms*: configurations that each change something in a common base. [Studies](studies.md) has the
commands and the statistics. This is a whole file:

```yaml
{example}
```

{rules}

## Keys

{keys}

### `profiles`

*mapping* · default `{{}}`

Names over changes to any of the other keys. Where a file has profiles, `--profile` chooses one. A budget is replaced
as a whole; other mappings are merged key by key.

## What an arm cannot set

{reserved}

## Solve rates of the start

`solve_rates: {start}` as a hyperparameter of a strategy stands for the share of right answers that the starting policy
gives to each training problem. The study measures it once, with `solve_rate_samples` samples, for all arms that ask.
"""

PROTOCOLS_PAGE = """\
# Protocols

{note}

A protocol says how completions are drawn for an evaluation, and how many. `explorl eval --protocol NAME` uses one, and
options such as `--temperature` change single settings of it. `evaluation.protocol` in the
[configuration](configuration.md#evaluationprotocol) names the protocol of evaluations during training.

{overview}

*Measures* are those that the paper's own table or figure reports; all others are computed as well.

## Beside the papers

Where a paper does not state a setting, the protocol has to choose one; those are marked *not stated*. A setting that
is not listed is switched off, and the paper does not mention it.

{compared}

## Training, beside the papers

The defaults and the preset `mecklenburg` follow Mecklenburg 2025; the strategies' defaults follow the papers that
introduced them.

{training}
"""


# ---------------------------------------------------------------------------- keys of a pydantic model
@dataclass(frozen=True)
class Key:
    """One key of a section, as its page shows it."""

    name: str
    """Dotted, from the top."""
    kind: str
    default: str
    text: str
    options: tuple[str, ...] = ()
    """The values of a key that takes one of a few."""

    def render(self, link: Callable[[str], str]) -> str:
        facts = " · ".join(filter(None, (f"*{self.kind}*", self.default)))
        return f"### `{self.name}`\n\n{facts}\n\n{link(_listed(self.text, self.options))}"


def keys(section: type[BaseModel], prefix: str = "") -> Iterator[Key]:
    """The keys of a section, and after a key that holds a section those of that."""
    texts = descriptions(section)
    for name, info in section.model_fields.items():
        inner, through = _inner(info.annotation)
        dotted = f"{prefix}{info.alias or name}"
        if name not in texts and inner is None:
            raise ValueError(f"{section.__name__}.{name} has no description; write one below the field")
        text = texts.get(name) or inspect.getdoc(inner) or ""
        yield Key(dotted, kind(info.annotation, info.metadata), _default(info), text, _options(info.annotation))
        if inner is not None:
            yield from keys(inner, f"{dotted}.{through}")
    if section.model_config.get("extra") == "allow":
        yield Key(f"{prefix}<option>", "any value", "", texts["model_config"])


def descriptions(section: type[BaseModel]) -> dict[str, str]:
    """The strings below the fields of a class."""
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(section))).body
    assert isinstance(tree, ast.ClassDef)
    found = {}
    for line, below in zip(tree.body, tree.body[1:], strict=False):
        if isinstance(line, (ast.AnnAssign, ast.Assign)) and isinstance(below, ast.Expr):
            name = line.target if isinstance(line, ast.AnnAssign) else line.targets[0]
            found[ast.unparse(name)] = inspect.cleandoc(ast.literal_eval(below.value))
    return found


def kind(annotation: Any, metadata: Sequence[Any] = ()) -> str:
    """A type in words, with its bounds."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        bounds = [part for extra in arguments[1:] for part in getattr(extra, "metadata", [extra])]
        return kind(arguments[0], [*metadata, *bounds])
    if origin in (Union, UnionType):
        parts = " or ".join(kind(part) for part in arguments if part is not NoneType)
        return f"{parts}, or null" if NoneType in arguments else parts
    if origin is Literal:
        return _one_of(arguments)
    if origin is list:
        return f"list, each {kind(arguments[0])}" if get_args(arguments[0]) else f"list of {kind(arguments[0])}s"
    if origin is tuple:
        return f"list of {len(arguments)}, each {kind(arguments[0])}"
    if origin is dict or (inspect.isclass(annotation) and issubclass(annotation, BaseModel)):
        return "mapping"
    names = {NoneType: "null", str: "text", int: "integer", float: "number", bool: "true or false", Path: "path"}
    return f"{names[annotation]}{_bounds(metadata)}"


def _bounds(metadata: Sequence[Any]) -> str:
    signs = {"gt": ">", "ge": "≥", "lt": "<", "le": "≤"}
    found = [
        f" {sign} {shown(getattr(part, name))}"
        for part in metadata
        for name, sign in signs.items()
        if hasattr(part, name)
    ]
    return ",".join(found)


def _one_of(values: Iterable[Any]) -> str:
    *others, last = (f"`{value}`" for value in values)
    return f"{', '.join(others)} or {last}" if others else last


def _options(annotation: Any) -> tuple[str, ...]:
    if get_origin(annotation) is Literal:
        return tuple(map(str, get_args(annotation)))
    return tuple(option for part in get_args(annotation) for option in _options(part))


def _inner(annotation: Any) -> tuple[type[BaseModel] | None, str]:
    """The section that a key holds, and what stands between the two in a dotted key."""
    if inspect.isclass(annotation) and issubclass(annotation, BaseModel):
        return annotation, ""
    through = "<name>." if get_origin(annotation) is dict else ""
    for part in get_args(annotation):
        inner, between = _inner(part)
        if inner is not None:
            return inner, through + between
    return None, ""


def _default(info: FieldInfo) -> str:
    if info.is_required():
        return "required"
    value = info.get_default(call_default_factory=True)
    return "" if isinstance(value, BaseModel) else f"default `{shown(value)}`"


def shown(value: Any) -> str:
    """A value as a YAML file has it."""
    if isinstance(value, float):
        return re.sub(r"e-0*", "e-", f"{value:g}")
    if isinstance(value, (tuple, list)):
        return f"[{', '.join(map(shown, value))}]"
    return (value or '""') if isinstance(value, str) else json.dumps(value)


def _listed(text: str, options: Sequence[str]) -> str:
    """Lines that begin with one of the key's values, as a list."""
    blocks = []
    for block in text.split("\n\n"):
        if any(block.startswith(f"{option}: ") for option in options):
            starts = "|".join(map(re.escape, options))
            block = re.sub(r"\n +", " ", block)
            block = re.sub(rf"^({starts}): ", r"- `\1`: ", block, flags=re.MULTILINE)
        blocks.append(block)
    return "\n\n".join(blocks)


def _slug(dotted: str) -> str:
    return re.sub(r"[^\w-]", "", dotted)


def linker(known: Iterable[str], page: str = "") -> Callable[[str], str]:
    """Makes links of keys that a text names in backticks, and of the pages of docs/."""
    names = {name for name in known if "." in name}

    def link(text: str) -> str:
        text = re.sub(r"docs/([\w-]+)\.md", r"[\1.md](\1.md)", text.replace("``", "`"))
        return re.sub(r"`([\w.]+)`", lambda m: f"[{m[0]}]({page}#{_slug(m[1])})" if m[1] in names else m[0], text)

    return link


# ---------------------------------------------------------------------------- the pages
def configuration_page() -> str:
    """Every key of the configuration."""
    every = list(keys(Config))
    link = linker(key.name for key in every)
    parts = [CONFIGURATION.format(note=NOTE.format(source="src/explorl/core/config/schema.py"))]
    tops = {key.name: key for key in every if "." not in key.name}
    plain = [key for name, key in tops.items() if not any(other.name.startswith(f"{name}.") for other in every)]
    parts += ["## Top level", *(key.render(link) for key in plain)]
    for name, top in tops.items():
        if top not in plain:
            parts += [f"## {name}", link(top.text)]
            parts += [key.render(link) for key in every if key.name.startswith(f"{name}.")]
    parts += ["## Presets", "`--preset NAME` starts from one of these."]
    for preset in presets():
        text = (resources.files("explorl") / "presets" / f"{preset}.yaml").read_text(encoding="utf-8")
        parts.append(f"### `{preset}`\n\n```yaml\n{text.strip()}\n```")
    return _page(parts)


def study_page() -> str:
    """Every key of a study file."""
    paragraphs = inspect.cleandoc(study_file.__doc__ or "").split("\n\n")
    example = next(part for part in paragraphs if part.startswith("    "))
    every = list(keys(study_file.StudyFile))
    link = linker((key.name for key in keys(Config)), "configuration.md")
    return STUDY.format(
        note=NOTE.format(source="src/explorl/study/spec.py"),
        example=textwrap.dedent(example),
        rules="\n\n".join(paragraphs[paragraphs.index(example) + 1 :]),
        keys="\n\n".join(key.render(link) for key in every),
        reserved=_table(("key", "why"), [(f"`{key}`", link(why)) for key, why in study_file.RESERVED.items()]),
        start=study_file.START,
    )


def protocols_page() -> str:
    """Every protocol, and what its paper says."""
    link = linker((key.name for key in keys(Config)), "configuration.md")
    overview = [
        (
            f"`{name}`",
            _samples(how),
            *(_setting(how, setting) for setting in SETTINGS),
            ", ".join(how.measures) or "–",
        )
        for name, how in PROTOCOLS.items()
    ]
    return PROTOCOLS_PAGE.format(
        note=NOTE.format(source="src/explorl/evaluation/protocols.py and its own table of what the papers state"),
        overview=_table(("protocol", "samples", *SETTINGS.values(), "measures"), overview),
        compared="\n\n".join(_compared(name, how) for name, how in PROTOCOLS.items() if name in STATED),
        training=_table(
            ("setting", "Explorl", "paper", "where", "note"),
            [(link(row.what), shown(row.ours()), row.paper.shown, row.paper.place, row.paper.note) for row in TRAINING],
        ),
    )


def _page(parts: Iterable[str]) -> str:
    return "\n\n".join(part.strip() for part in parts) + "\n"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join("| " + " | ".join(line) + " |" for line in (head, ("---",) * len(head), *rows))


# ---------------------------------------------------------------------------- what the papers state
@dataclass(frozen=True)
class Stated:
    """A value that a paper states."""

    value: Any
    place: str
    note: str = ""
    """Why ours is another one."""

    @property
    def shown(self) -> str:
        text = shown(self.value) if self.value is not None else "*not stated*"
        return re.sub(r"^-(?=\d)", "−", text)


@dataclass(frozen=True)
class Row:
    """A setting of training."""

    what: str
    ours: Callable[[], Any] = field(repr=False)
    paper: Stated


SETTINGS = {
    "temperature": "temperature",
    "top_p": "top-p",
    "top_k": "top-k",
    "repetition_penalty": "repetition penalty",
    "max_tokens": "token limit",
}
OFF = {"top_p": 1.0, "top_k": 0, "repetition_penalty": 1.0}

STATED: Mapping[str, Mapping[str, Stated]] = {
    "mecklenburg": {
        "samples": Stated(5, "§4"),
        "temperature": Stated(0.3, "§4"),
        "top_p": Stated(0.8, "§4"),
        "top_k": Stated(20, "§4"),
        "repetition_penalty": Stated(1.1, "§4"),
        "max_tokens": Stated(1024, "§4"),
    },
    "deng": {
        "temperature": Stated(0.6, "§2.4"),
        "top_p": Stated(0.95, "§2.4"),
        "max_tokens": Stated(8192, "§2.4"),
    },
    "deng-figure1": {
        "samples": Stated(640, "§2.4"),
        "temperature": Stated(0.6, "§2.4"),
        "top_p": Stated(0.95, "§2.4"),
        "max_tokens": Stated(8192, "§2.4"),
    },
    "deng-figure2": {
        "temperature": Stated(0.6, "§2.5"),
        "top_p": Stated(0.95, "§2.5"),
        "max_tokens": Stated(16384, "§2.5"),
    },
    "deng-table3": {
        "samples": Stated(64, "§4.4.1"),
        "samples of one task": Stated(128, "§4.4.1, AIME24"),
        "temperature": Stated(0.6, "§4.4.1"),
        "top_p": Stated(0.95, "§4.4.1"),
    },
    "deng-table4": {"samples": Stated(8, "Table 4")},
    "deng-table6": {"samples": Stated(8, "Table 6"), "samples of one task": Stated(4, "Table 6, HumanEval")},
    "egsw-table1": {},
}
"""By protocol and setting; what is not here, the paper does not state."""
PAPERS = {"mecklenburg": "Mecklenburg 2025", "deng": "Deng et al. 2025", "egsw": "Vanlioglu 2025"}

M, D, V = PAPERS.values()
BATCH = "the paper says “batch size”"
TRAINING = (
    Row("model", lambda: Config().model.name, Stated("Qwen/Qwen2-0.5B-Instruct", f"{M}, §3")),
    Row("LoRA rank", lambda: Config().model.lora.rank, Stated(8, f"{M}, §5.1")),  # type: ignore[union-attr]
    Row("`rollout.temperature`", lambda: Config().rollout.temperature, Stated(0.6, f"{M}, Table 1")),
    Row("`rollout.max_tokens`", lambda: Config().rollout.max_tokens, Stated(1024, f"{M}, §4")),
    Row("`training.prompts_per_step`", lambda: Config().training.prompts_per_step, Stated(16, f"{M}, §5.1", BATCH)),
    Row("`training.generations`", lambda: Config().training.generations, Stated(16, f"{M}, §5.1")),
    Row("`training.learning_rate`", lambda: Config().training.learning_rate, Stated(5e-6, f"{M}, §5.1")),
    Row("`training.beta`", lambda: Config().training.beta, Stated(0.001, f"{M}, §5.2")),
    Row("`training.shuffle`", lambda: Config().training.shuffle, Stated(False, f"{M}, §4")),
    Row("`task.train_problems`", lambda: Config().task.train_problems, Stated(2000, f"{M}, §4")),
    Row("`task.holdout_problems`", lambda: Config().task.holdout_problems, Stated(500, f"{M}, §4")),
    Row("weight of the format reward", lambda: Task.reward_parts["format"], Stated(0.1, f"{M}, §4")),
    Row("`sft.examples`", lambda: Config().sft.examples, Stated(11_000, f"{M}, §4")),
    Row("`sft.epochs`", lambda: Config().sft.epochs, Stated(10, f"{M}, §5.1")),
    Row("`sft.learning_rate`", lambda: Config().sft.learning_rate, Stated(None, M, "our choice")),
    Row("`pass_threshold`: threshold", lambda: PassThreshold().threshold, Stated(0.3, f"{M}, Figure 7")),
    Row("`egsw`: alpha", lambda: EntropyGuidedWeighting().alpha, Stated(0.3, f"{V}, §5", "0.8 for an instruct model")),
    Row("`egsw`: temperature P", lambda: EntropyGuidedWeighting().temperature, Stated(1.0, f"{V}, §5", "1.8 likewise")),
    Row("`ppl_shaping`: alpha", lambda: PerplexityShaping().alpha, Stated(0.01, f"{D}, §4.4.2")),
    Row("`position_shaping`: gamma", lambda: PositionShaping().gamma, Stated(0.1, f"{D}, §4.4.2")),
    Row("`position_shaping`: slope", lambda: PositionShaping().slope, Stated(15.0, f"{D}, §4.4.2")),
    Row(
        "`position_shaping`: shift",
        lambda: PositionShaping().shift,
        Stated(-0.5, f"{D}, §4.4.2", "with −0.5 the bonus is almost the same everywhere; the authors' code has 0.5"),
    ),
    Row("`position_shaping`: start", lambda: PositionShaping().start, Stated(200, f"{D}, §4.4.2")),
    Row("`position_shaping`: steps", lambda: PositionShaping().steps, Stated(100, f"{D}, §4.4.2")),
    Row("`rft.budget`", lambda: Config().rft.budget, Stated(1100, f"{D}, §4.4.1")),
    Row("`rft.noise`", lambda: Config().rft.noise, Stated(0.05, f"{D}, §4.4.1")),
    Row("`rft.batch_size`", lambda: Config().rft.batch_size, Stated(32, f"{D}, §4.4.1")),
    Row("`rft.learning_rate`", lambda: Config().rft.learning_rate, Stated(1e-5, f"{D}, §4.4.1")),
    Row(
        "`max_redundancy`: limit",
        lambda: inspect.signature(max_redundancy).parameters["limit"].default,
        Stated(0.31, f"{D}, §4.4.1"),
    ),
    Row("`rft.samples`", lambda: Config().rft.samples, Stated(None, D, "our choice")),
    Row("`rft.epochs`", lambda: Config().rft.epochs, Stated(None, D, "our choice")),
)


def settings(how: Protocol) -> dict[str, Any]:
    """What a protocol says, under the names of `STATED`."""
    found: dict[str, Any] = {"samples": how.samples}
    if how.samples_by_task:
        (found["samples of one task"],) = how.samples_by_task.values()
    return found | {setting: getattr(how.sampling, setting) for setting in SETTINGS}


def _compared(name: str, how: Protocol) -> str:
    paper = PAPERS[name.partition("-")[0]]
    rows = []
    for setting, value in settings(how).items():
        stated = STATED[name].get(setting)
        if stated is None and value == OFF.get(setting):
            continue
        ours = shown(value)
        stated = stated or Stated(None, "")
        rows.append((SETTINGS.get(setting, setting), ours, stated.shown, stated.place))
    return f"### `{name}`\n\n{how.source}.\n\n{_table(('setting', 'Explorl', paper, 'where'), rows)}"


def _samples(how: Protocol) -> str:
    return "; ".join([str(how.samples), *(f"{task}: {count}" for task, count in how.samples_by_task.items())])


def _setting(how: Protocol, setting: str) -> str:
    value = getattr(how.sampling, setting)
    return "–" if value == OFF.get(setting) else shown(value)


PAGES: Mapping[str, Callable[[], str]] = {
    "configuration.md": configuration_page,
    "study-file.md": study_page,
    "protocols.md": protocols_page,
    "support.md": support_page,
}


def write(folder: Path, *, check: bool = False) -> None:
    """Writes the pages, or fails where one is not what would be written."""
    for name, render in PAGES.items():
        path = folder / name
        if not check:
            write_text(path, render())
        elif not path.exists() or path.read_text(encoding="utf-8") != render():
            raise ValueError(f"{path} is not what the code says; run python -m tools.docs.reference")


def _main(folder: Path = Path("docs"), check: bool = False) -> None:
    try:
        write(folder, check=check)
    except ValueError as error:
        raise SystemExit(str(error)) from None


if __name__ == "__main__":
    import typer

    typer.run(_main)
