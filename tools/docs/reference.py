"""Generate the reference pages of the documentation from the code.

python -m tools.docs.reference            # write docs/configuration.md, study-file.md, protocols.md, support.md
python -m tools.docs.reference --check    # fail if one is out of date
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
from tools.docs.markdown import table
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

`explorl train`, `sft` and `rft` use the same configuration, which is also the base of a [study](study-file.md). It is
assembled from the defaults below, a preset (`--preset tiny`), a YAML file (`--config my.yaml`) and single keys
(`--set training.learning_rate=1e-5`); later sources win. The file contains only the keys that it changes:

```yaml
task: {{name: countdown-mini}}
training:
  steps: 100
  learning_rate: 1e-5
strategies:
  - mask_truncated
  - risk_sensitive: {{beta: 2.0}}
```

`explorl config show --preset tiny --set training.steps=100` prints every key with its resolved value. An unknown key is
an error that suggests the closest known key; a value out of range is an error as well. The resolved configuration is
stored as `config.yaml` in the run's folder.
"""

STUDY = """\
# Study file

{note}

A study compares *arms*: configurations that each change some keys of a common base. [Studies](studies.md) describes the
commands and the statistics. A complete file:

```yaml
{example}
```

{rules}

## Keys

{keys}

### `profiles`

*mapping* · default `{{}}`

Changes to any of the other keys, by name of the profile. `--profile` selects one. A budget is replaced as a whole;
other mappings are merged key by key.

## What an arm cannot set

{reserved}

## Solve rates of the initial policy

`solve_rates: {start}` as a hyperparameter of a strategy stands for the initial policy's fraction of correct answers to
each training problem. The study measures it once, with `solve_rate_samples` samples, for all arms that use it.
"""

PROTOCOLS_PAGE = """\
# Protocols

{note}

A protocol defines how completions are sampled for an evaluation, and how many. `explorl eval --protocol NAME` uses one;
options such as `--temperature` override single settings. `evaluation.protocol` in the
[configuration](configuration.md#evaluationprotocol) names the protocol of evaluations during training.

{overview}

*Measures* are those reported in the paper's table or figure; all others are computed as well.

## Comparison with the papers

If a paper does not state a setting, the protocol has to choose one; it is marked *not stated*. Settings that are not
listed are disabled, and the paper does not mention them.

{compared}

## Training settings and the papers

The defaults and the preset `mecklenburg` follow Mecklenburg 2025; the strategies' defaults follow the papers that
introduced them.

{training}
"""


# ---------------------------------------------------------------------------- keys of a pydantic model
@dataclass(frozen=True)
class ConfigKey:
    """A key of a section and its documentation."""

    name: str
    """Dotted name."""
    kind: str
    default: str
    text: str
    options: tuple[str, ...] = ()
    """Allowed values, if there are only a few."""

    def render(self, link: Callable[[str], str]) -> str:
        facts = " · ".join(filter(None, (f"*{self.kind}*", self.default)))
        return f"### `{self.name}`\n\n{facts}\n\n{link(_as_list(self.text, self.options))}"


def keys(section: type[BaseModel], prefix: str = "") -> Iterator[ConfigKey]:
    """Yield the keys of a section; a key that holds a section is followed by the keys of that section."""
    texts = descriptions(section)
    for name, info in section.model_fields.items():
        inner, through = _inner(info.annotation)
        dotted = f"{prefix}{info.alias or name}"
        if name not in texts and inner is None:
            raise ValueError(f"{section.__name__}.{name} has no description; write one below the field")
        text = texts.get(name) or inspect.getdoc(inner) or ""
        yield ConfigKey(dotted, kind(info.annotation, info.metadata), _default(info), text, _options(info.annotation))
        if inner is not None:
            yield from keys(inner, f"{dotted}.{through}")
    if section.model_config.get("extra") == "allow":
        yield ConfigKey(f"{prefix}<option>", "any value", "", texts["model_config"])


def descriptions(section: type[BaseModel]) -> dict[str, str]:
    """Return the docstrings of a class's fields, by field."""
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(section))).body
    assert isinstance(tree, ast.ClassDef)
    texts = {}
    for line, below in zip(tree.body, tree.body[1:], strict=False):
        if isinstance(line, (ast.AnnAssign, ast.Assign)) and isinstance(below, ast.Expr):
            name = line.target if isinstance(line, ast.AnnAssign) else line.targets[0]
            texts[ast.unparse(name)] = inspect.cleandoc(ast.literal_eval(below.value))
    return texts


def kind(annotation: Any, metadata: Sequence[Any] = ()) -> str:
    """Return a description of a type and its bounds."""
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
    bounds = [
        f" {sign} {shown(getattr(part, name))}"
        for part in metadata
        for name, sign in signs.items()
        if hasattr(part, name)
    ]
    return ",".join(bounds)


def _one_of(values: Iterable[Any]) -> str:
    *others, last = (f"`{value}`" for value in values)
    return f"{', '.join(others)} or {last}" if others else last


def _options(annotation: Any) -> tuple[str, ...]:
    if get_origin(annotation) is Literal:
        return tuple(map(str, get_args(annotation)))
    return tuple(option for part in get_args(annotation) for option in _options(part))


def _inner(annotation: Any) -> tuple[type[BaseModel] | None, str]:
    """Return the section that a key holds, if any, and the part between the two in a dotted key."""
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
    """Return a value as it is written in YAML."""
    if isinstance(value, float):
        return re.sub(r"e-0*", "e-", f"{value:g}")
    if isinstance(value, (tuple, list)):
        return f"[{', '.join(map(shown, value))}]"
    return (value or '""') if isinstance(value, str) else json.dumps(value)


def _as_list(text: str, options: Sequence[str]) -> str:
    """Return a text in which lines that begin with one of the key's values form a list."""
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


def linker(keys: Iterable[str], page: str = "") -> Callable[[str], str]:
    """Return a function that links keys in backticks, and pages of docs/, in a text."""
    names = {name for name in keys if "." in name}

    def link(text: str) -> str:
        text = re.sub(r"docs/([\w-]+)\.md", r"[\1.md](\1.md)", text.replace("``", "`"))
        return re.sub(r"`([\w.]+)`", lambda m: f"[{m[0]}]({page}#{_slug(m[1])})" if m[1] in names else m[0], text)

    return link


# ---------------------------------------------------------------------------- the pages
def configuration_page() -> str:
    """Return the page of the configuration."""
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
    """Return the page of the study file."""
    paragraphs = inspect.cleandoc(study_file.__doc__ or "").split("\n\n")
    example = next(part for part in paragraphs if part.startswith("    "))
    every = list(keys(study_file.StudyFile))
    link = linker((key.name for key in keys(Config)), "configuration.md")
    return STUDY.format(
        note=NOTE.format(source="src/explorl/study/spec.py"),
        example=textwrap.dedent(example),
        rules="\n\n".join(paragraphs[paragraphs.index(example) + 1 :]),
        keys="\n\n".join(key.render(link) for key in every),
        reserved=table(("key", "why"), [(f"`{key}`", link(why)) for key, why in study_file.RESERVED.items()]),
        start=study_file.START,
    )


def protocols_page() -> str:
    """Return the page of the protocols, with the values stated in their papers."""
    link = linker((key.name for key in keys(Config)), "configuration.md")
    overview = [
        (
            f"`{name}`",
            _samples(entry),
            *(_setting(entry, setting) for setting in SETTINGS),
            ", ".join(entry.measures) or "–",
        )
        for name, entry in PROTOCOLS.items()
    ]
    return PROTOCOLS_PAGE.format(
        note=NOTE.format(source="src/explorl/evaluation/protocols.py and its own table of what the papers state"),
        overview=table(("protocol", "samples", *SETTINGS.values(), "measures"), overview),
        compared="\n\n".join(_compared(name, entry) for name, entry in PROTOCOLS.items() if name in STATED),
        training=table(
            ("setting", "Explorl", "paper", "where", "note"),
            [
                (link(row.what), shown(row.ours()), row.paper.shown, row.paper.section, row.paper.note)
                for row in TRAINING
            ],
        ),
    )


def _page(parts: Iterable[str]) -> str:
    return "\n\n".join(part.strip() for part in parts) + "\n"


# ---------------------------------------------------------------------------- what the papers state
@dataclass(frozen=True)
class PaperValue:
    """A value stated in a paper."""

    value: Any
    section: str
    note: str = ""
    """Why ours differs."""

    @property
    def shown(self) -> str:
        text = shown(self.value) if self.value is not None else "*not stated*"
        return re.sub(r"^-(?=\d)", "−", text)


@dataclass(frozen=True)
class TrainingSetting:
    """A training setting and its value in a paper."""

    what: str
    ours: Callable[[], Any] = field(repr=False)
    paper: PaperValue


SETTINGS = {
    "temperature": "temperature",
    "top_p": "top-p",
    "top_k": "top-k",
    "repetition_penalty": "repetition penalty",
    "max_tokens": "token limit",
}
OFF = {"top_p": 1.0, "top_k": 0, "repetition_penalty": 1.0}

STATED: Mapping[str, Mapping[str, PaperValue]] = {
    "mecklenburg": {
        "samples": PaperValue(5, "§4"),
        "temperature": PaperValue(0.3, "§4"),
        "top_p": PaperValue(0.8, "§4"),
        "top_k": PaperValue(20, "§4"),
        "repetition_penalty": PaperValue(1.1, "§4"),
        "max_tokens": PaperValue(1024, "§4"),
    },
    "deng": {
        "temperature": PaperValue(0.6, "§2.4"),
        "top_p": PaperValue(0.95, "§2.4"),
        "max_tokens": PaperValue(8192, "§2.4"),
    },
    "deng-figure1": {
        "samples": PaperValue(640, "§2.4"),
        "temperature": PaperValue(0.6, "§2.4"),
        "top_p": PaperValue(0.95, "§2.4"),
        "max_tokens": PaperValue(8192, "§2.4"),
    },
    "deng-figure2": {
        "temperature": PaperValue(0.6, "§2.5"),
        "top_p": PaperValue(0.95, "§2.5"),
        "max_tokens": PaperValue(16384, "§2.5"),
    },
    "deng-table3": {
        "samples": PaperValue(64, "§4.4.1"),
        "samples of one task": PaperValue(128, "§4.4.1, AIME24"),
        "temperature": PaperValue(0.6, "§4.4.1"),
        "top_p": PaperValue(0.95, "§4.4.1"),
    },
    "deng-table4": {"samples": PaperValue(8, "Table 4")},
    "deng-table6": {"samples": PaperValue(8, "Table 6"), "samples of one task": PaperValue(4, "Table 6, HumanEval")},
    "egsw-table1": {},
}
"""Values by protocol and setting; the paper does not state those that are missing."""
PAPERS = {"mecklenburg": "Mecklenburg 2025", "deng": "Deng et al. 2025", "egsw": "Vanlioglu 2025"}

M, D, V = PAPERS.values()
BATCH = "the paper says “batch size”"
TRAINING = (
    TrainingSetting("model", lambda: Config().model.name, PaperValue("Qwen/Qwen2-0.5B-Instruct", f"{M}, §3")),
    TrainingSetting("LoRA rank", lambda: Config().model.lora.rank, PaperValue(8, f"{M}, §5.1")),  # type: ignore[union-attr]
    TrainingSetting("`rollout.temperature`", lambda: Config().rollout.temperature, PaperValue(0.6, f"{M}, Table 1")),
    TrainingSetting("`rollout.max_tokens`", lambda: Config().rollout.max_tokens, PaperValue(1024, f"{M}, §4")),
    TrainingSetting(
        "`training.prompts_per_step`", lambda: Config().training.prompts_per_step, PaperValue(16, f"{M}, §5.1", BATCH)
    ),
    TrainingSetting("`training.generations`", lambda: Config().training.generations, PaperValue(16, f"{M}, §5.1")),
    TrainingSetting(
        "`training.learning_rate`", lambda: Config().training.learning_rate, PaperValue(5e-6, f"{M}, §5.1")
    ),
    TrainingSetting("`training.beta`", lambda: Config().training.beta, PaperValue(0.001, f"{M}, §5.2")),
    TrainingSetting("`training.shuffle`", lambda: Config().training.shuffle, PaperValue(False, f"{M}, §4")),
    TrainingSetting("`task.train_problems`", lambda: Config().task.train_problems, PaperValue(2000, f"{M}, §4")),
    TrainingSetting("`task.holdout_problems`", lambda: Config().task.holdout_problems, PaperValue(500, f"{M}, §4")),
    TrainingSetting("weight of the format reward", lambda: Task.reward_parts["format"], PaperValue(0.1, f"{M}, §4")),
    TrainingSetting("`sft.examples`", lambda: Config().sft.examples, PaperValue(11_000, f"{M}, §4")),
    TrainingSetting("`sft.epochs`", lambda: Config().sft.epochs, PaperValue(10, f"{M}, §5.1")),
    TrainingSetting("`sft.learning_rate`", lambda: Config().sft.learning_rate, PaperValue(None, M, "our choice")),
    TrainingSetting(
        "`pass_threshold`: threshold", lambda: PassThreshold().threshold, PaperValue(0.3, f"{M}, Figure 7")
    ),
    TrainingSetting(
        "`egsw`: alpha",
        lambda: EntropyGuidedWeighting().alpha,
        PaperValue(0.3, f"{V}, §5", "0.8 for an instruct model"),
    ),
    TrainingSetting(
        "`egsw`: temperature P",
        lambda: EntropyGuidedWeighting().temperature,
        PaperValue(1.0, f"{V}, §5", "1.8 likewise"),
    ),
    TrainingSetting("`ppl_shaping`: alpha", lambda: PerplexityShaping().alpha, PaperValue(0.01, f"{D}, §4.4.2")),
    TrainingSetting("`position_shaping`: gamma", lambda: PositionShaping().gamma, PaperValue(0.1, f"{D}, §4.4.2")),
    TrainingSetting("`position_shaping`: slope", lambda: PositionShaping().slope, PaperValue(15.0, f"{D}, §4.4.2")),
    TrainingSetting(
        "`position_shaping`: shift",
        lambda: PositionShaping().shift,
        PaperValue(
            -0.5, f"{D}, §4.4.2", "with −0.5 the bonus is almost the same everywhere; the authors' code has 0.5"
        ),
    ),
    TrainingSetting("`position_shaping`: start", lambda: PositionShaping().start, PaperValue(200, f"{D}, §4.4.2")),
    TrainingSetting("`position_shaping`: steps", lambda: PositionShaping().steps, PaperValue(100, f"{D}, §4.4.2")),
    TrainingSetting("`rft.budget`", lambda: Config().rft.budget, PaperValue(1100, f"{D}, §4.4.1")),
    TrainingSetting("`rft.noise`", lambda: Config().rft.noise, PaperValue(0.05, f"{D}, §4.4.1")),
    TrainingSetting("`rft.batch_size`", lambda: Config().rft.batch_size, PaperValue(32, f"{D}, §4.4.1")),
    TrainingSetting("`rft.learning_rate`", lambda: Config().rft.learning_rate, PaperValue(1e-5, f"{D}, §4.4.1")),
    TrainingSetting(
        "`max_redundancy`: limit",
        lambda: inspect.signature(max_redundancy).parameters["limit"].default,
        PaperValue(0.31, f"{D}, §4.4.1"),
    ),
    TrainingSetting("`rft.samples`", lambda: Config().rft.samples, PaperValue(None, D, "our choice")),
    TrainingSetting("`rft.epochs`", lambda: Config().rft.epochs, PaperValue(None, D, "our choice")),
)


def settings(protocol: Protocol) -> dict[str, Any]:
    """Return the settings of a protocol, under the names of `STATED`."""
    values: dict[str, Any] = {"samples": protocol.samples}
    if protocol.samples_by_task:
        (values["samples of one task"],) = protocol.samples_by_task.values()
    return values | {setting: getattr(protocol.sampling, setting) for setting in SETTINGS}


def _compared(name: str, protocol: Protocol) -> str:
    paper = PAPERS[name.partition("-")[0]]
    rows = []
    for setting, value in settings(protocol).items():
        stated = STATED[name].get(setting)
        if stated is None and value == OFF.get(setting):
            continue
        ours = shown(value)
        stated = stated or PaperValue(None, "")
        rows.append((SETTINGS.get(setting, setting), ours, stated.shown, stated.section))
    return f"### `{name}`\n\n{protocol.source}.\n\n{table(('setting', 'Explorl', paper, 'where'), rows)}"


def _samples(protocol: Protocol) -> str:
    return "; ".join([str(protocol.samples), *(f"{task}: {count}" for task, count in protocol.samples_by_task.items())])


def _setting(protocol: Protocol, setting: str) -> str:
    value = getattr(protocol.sampling, setting)
    return "–" if value == OFF.get(setting) else shown(value)


PAGES: Mapping[str, Callable[[], str]] = {
    "configuration.md": configuration_page,
    "study-file.md": study_page,
    "protocols.md": protocols_page,
    "support.md": support_page,
}


def write(folder: Path, *, check: bool = False) -> None:
    """Write the pages, or with `check` raise if one is out of date."""
    for name, render in PAGES.items():
        path = folder / name
        if not check:
            write_text(path, render())
        elif not path.exists() or path.read_text(encoding="utf-8") != render():
            raise ValueError(f"{path} is out of date; run python -m tools.docs.reference")


def _main(folder: Path = Path("docs"), check: bool = False) -> None:
    try:
        write(folder, check=check)
    except ValueError as error:
        raise SystemExit(str(error)) from None


if __name__ == "__main__":
    import typer

    typer.run(_main)
