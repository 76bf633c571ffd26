"""Programming: complete a Python function so that hidden tests pass, as in HumanEval.

    correctness = 1 if the function passes all tests
    format      = 1 if the completion has exactly one fenced block, and it defines the function

Chen et al. 2021, "Evaluating Large Language Models Trained on Code". Programs run in a `sandbox`, away from the tests.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from explorl.core.plugins import unknown
from explorl.core.text import clean
from explorl.sandbox.programs import DEFAULTS, ProgramLimits, ProgramTestResult, in_threads, run_tests
from explorl.tasks.answer_span import read_completion
from explorl.tasks.base import Problem, Prompt, Task, Verdict
from explorl.tasks.code.extract import defines, extract_function, find_fences, split_prompt
from explorl.tasks.json_lines import Record, group_by_split, read_records, short_repr, split_files

HUB_ID = "openai/openai_humaneval"
FILE = "humaneval.jsonl"
FIELDS = ("task_id", "prompt", "entry_point", "canonical_solution", "test")
MAX_SOURCE = 1 << 16

_EXAMPLE = (
    '{"task_id": "own/0", "prompt": "def f(x):\\n", "entry_point": "f", "canonical_solution": "    return x\\n", '
    '"test": "def check(candidate):\\n    assert candidate(1) == 1\\n"}'
)


@dataclass(frozen=True)
class Code(Task):
    """HumanEval from the hub, or problems of humaneval.jsonl in a folder (``data_dir``).

    Problems are for evaluation unless the files assign them to training: see `json_lines.split_files`.
    """

    name: str = "code"
    data_dir: str | Path | None = None
    seconds: float = DEFAULTS.seconds
    """Time limit for a program and all its tests, and for the processor time of all its processes. Time spent waiting
    for a busy processor does not count (see `ProgramLimits`)."""
    memory: int = DEFAULTS.memory
    """Address space of a program in bytes."""
    workers: int | None = None
    """Number of programs that run at the same time; None: one per core."""
    unisolated: bool = False
    """Run programs even if the sandbox cannot isolate them from this machine (docs/security.md)."""

    splits: ClassVar[tuple[str, ...]] = ("train", "holdout")
    templates: ClassVar[tuple[str, ...]] = ("chat", "plain")

    def __post_init__(self) -> None:
        if self.workers is not None and self.workers < 1:
            raise ValueError(f"workers={self.workers}: give a count like 4, or None for one per core")
        self._limits()

    def problems(self, split: str, *, limit: int | None = None) -> list[Problem]:
        self.check(split, limit)
        if not self._splits.get(split):
            raise unknown("split", split, self._splits)
        return self._splits[split][:limit]

    def prompt(self, problem: Problem, template: str | None = None) -> Prompt:
        """Return the prompt: ``chat`` asks for the function in a fenced block; ``plain`` is the head to continue."""
        template = template or self.templates[0]
        if template not in self.templates:
            raise unknown("template", template, self.templates)
        head = problem.data["prompt"]
        if template == "plain":
            return str(head)
        content = (
            f"Complete this Python function. Answer with the complete function, with the imports it needs, in one "
            f"```python block.\n\n```python\n{head.strip()}\n```"
        )
        return [{"role": "user", "content": content}]

    def verify(self, completion: str | bytes, problem: Problem, *, opened: bool = False) -> Verdict:
        """Verify a completion by running its tests. Text before the last ``</think>`` is ignored."""
        text, whole = read_completion(completion)
        _, closed, visible = text.rpartition("</think>")
        name, prompt = problem.data["entry_point"], problem.data["prompt"]
        fences = find_fences(visible)
        is_one_block = fences.lines == 2 and len(fences.blocks) == 1 and defines(fences.blocks[0], name)
        well_formed = whole and is_one_block and bool(closed or not opened)
        source = extract_function(visible, prompt, name)
        if not source:
            return Verdict(False, well_formed, error="no code")
        if len(source) > MAX_SOURCE:
            return Verdict(False, well_formed, error=f"a program of over {MAX_SOURCE} characters")
        before, _ = split_prompt(prompt, name)
        tested = run_tests(
            source,
            problem.data["test"],
            entry_point=name,
            preamble=before,
            limits=self._limits(),
            unisolated=self.unisolated,
        )
        answer = tested.normal or clean(source.strip())
        return Verdict(tested.status == "ok", well_formed, answer, self._error(tested))

    def verify_many(
        self,
        completions: Sequence[str | bytes],
        problems: Sequence[Problem],
        *,
        opened: Sequence[bool] | None = None,
    ) -> list[Verdict]:
        """Verify completions, as many at the same time as there are workers."""
        flags = [False] * len(completions) if opened is None else opened
        if not len(completions) == len(problems) == len(flags):
            raise ValueError(
                f"{len(completions)} completions, {len(problems)} problems, {len(flags)} flags: give the same "
                "number of each"
            )

        def verify(completion: str | bytes, problem: Problem, flag: bool) -> Verdict:
            return self.verify(completion, problem, opened=flag)

        return in_threads(verify, completions, problems, flags, workers=self.workers)

    def _limits(self) -> ProgramLimits:
        return ProgramLimits(seconds=self.seconds, cpu_seconds=self.seconds, memory=self.memory)

    def _error(self, tested: ProgramTestResult) -> str | None:
        if tested.status == "ok":
            return None
        if tested.status == "timeout":
            return f"took over {self.seconds:g} s"
        text = shortened_error(tested.error or tested.status)
        if text.startswith("MemoryError"):
            return f"used over {self.memory >> 20} MiB"
        return f"wrong answer: {text}" if text.startswith("AssertionError") else text

    @cached_property
    def _splits(self) -> dict[str, list[Problem]]:
        """The problems of each split, without held-out ones in the training split."""
        if self.data_dir is None:
            rows = {"holdout": [(dict(record), f"{HUB_ID}, row {row}") for row, record in enumerate(_read_hub())]}
        else:
            rows = _read_folder(Path(self.data_dir))
        splits = {split: _to_problems(rows[split]) for split in self.splits if split in rows}
        held_out = {key for problem in splits.get("holdout", ()) for key in (problem.id, problem.data["prompt"])}
        if "train" in splits:
            splits["train"] = [p for p in splits["train"] if not held_out & {p.id, p.data["prompt"]}]
        return splits


def shortened_error(text: str) -> str:
    """Return the first line of an error, shortened to 200 characters."""
    line = text.strip().split("\n")[0]
    return line if len(line) <= 200 else f"{line[:200]}…"


def _read_hub() -> Iterable[Mapping[str, Any]]:
    import datasets  # here, because the import takes seconds

    try:
        return datasets.load_dataset(HUB_ID, split="test")
    except OSError as error:
        raise FileNotFoundError(
            f"cannot load {HUB_ID} from the Hugging Face hub ({error}); give --data-dir, a folder with {FILE}"
        ) from error


def _read_folder(folder: Path) -> dict[str, list[Record]]:
    files = split_files(folder, FILE.removesuffix(".jsonl"))
    if not files:
        raise FileNotFoundError(f"no file {FILE} in {str(folder)!r}; give a folder with one")
    rows = {split: list(read_records(path, _EXAMPLE)) for split, path in files.items()}
    if list(rows) == ["all"]:
        rows = group_by_split(rows["all"]) or rows
    return rows if "all" not in rows else {"holdout": rows["all"]}


def _to_problems(rows: Iterable[tuple[Mapping[str, Any], str]]) -> list[Problem]:
    """Return records, with their locations, as problems; raise ValueError for a record with wrong or missing fields."""
    problems: dict[str, Problem] = {}
    for record, location in rows:
        for field in FIELDS:
            if not isinstance(record.get(field), str):
                raise ValueError(f"{location}: {field} is {short_repr(record.get(field))}; give a line like {_EXAMPLE}")
        if not defines(record["prompt"], record["entry_point"]):
            raise ValueError(
                f"{location}: the prompt does not define {record['entry_point']!r}; give a line like {_EXAMPLE}"
            )
        if not defines(record["test"], "check"):
            raise ValueError(f"{location}: the test does not define check(candidate); give a line like {_EXAMPLE}")
        key = f"code:{record['task_id']}"
        if key in problems:
            raise ValueError(f"{location}: duplicate task_id {record['task_id']!r}; keep one of them")
        problems[key] = Problem(key, {field: record[field] for field in FIELDS})
    if not problems:
        raise ValueError(f"no problems; give a file {FILE} with lines like {_EXAMPLE}")
    return list(problems.values())
