"""Read problems of mathematics benchmarks from JSONL files and from the Hugging Face hub."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from explorl.tasks.answer_span import last_boxed, last_hash
from explorl.tasks.json_lines import Record, group_by_split, read_records, short_repr, split_files
from explorl.tasks.stable_random import shuffled


class BenchmarkProblem(NamedTuple):
    """A problem's text and its right answer."""

    text: str
    answer: str


Splits = dict[str, list[BenchmarkProblem]]


@dataclass(frozen=True)
class Source:
    """A benchmark's id on the hub, and the hub's name of each of our splits."""

    hub_id: str
    splits: Mapping[str, str]
    config: str | None = None


SOURCES: Mapping[str, Source] = {
    "math500": Source("HuggingFaceH4/MATH-500", {"holdout": "test"}),
    "aime24": Source("HuggingFaceH4/aime_2024", {"holdout": "train"}),
    "aime25": Source("math-ai/aime25", {"holdout": "test"}),
    "amc23": Source("math-ai/amc23", {"holdout": "test"}),
    "minerva": Source("math-ai/minervamath", {"holdout": "test"}),
    "gsm8k": Source("openai/gsm8k", {"train": "train", "holdout": "test"}, config="main"),
    "hendrycks": Source("DigitalLearningGmbH/MATH-lighteval", {"train": "train", "holdout": "test"}),
}

_EXAMPLE = r'{"question": "What is 6 · 7?", "answer": "42"}'


def read_folder(folder: str | Path, dataset: str, *, seed: int = 0) -> Splits:
    """Return the splits of a benchmark from a folder with ``<dataset>.jsonl``.

    Problems for training are in ``<dataset>-train.jsonl`` or, if there is a ``<dataset>-test.jsonl``, in
    ``<dataset>.jsonl``; or a column ``split`` says it; or there are ``train.jsonl`` and ``test.jsonl`` instead.
    Otherwise all problems of an evaluation benchmark are held out, and a tenth of the others, drawn by seed.
    """
    trains = "train" in SOURCES[dataset].splits
    files = split_files(Path(folder), dataset, plain=trains)
    if not files:
        raise FileNotFoundError(
            f"no file {dataset}.jsonl in {str(folder)!r}; give a folder with lines like {_EXAMPLE} in it"
        )
    if list(files) == ["all"]:
        splits = {split: _problems(rows) for split, rows in group_by_split(_nonempty(files["all"])).items()}
    else:
        splits = {split: read_jsonl(path) for split, path in files.items()}
    if "all" in splits:
        splits["train" if trains else "holdout"] = splits.pop("all")
    if "holdout" not in splits:
        problems = shuffled(Random(seed), splits["train"])
        held_out = -(-len(problems) // 10)
        splits |= {"train": problems[held_out:], "holdout": problems[:held_out]}
    return splits


def read_hub(dataset: str) -> Splits:
    """Return the splits of a benchmark from the hub."""
    import datasets  # imported here because it takes seconds and nothing else needs it

    source = SOURCES[dataset]
    try:
        loaded = {
            split: datasets.load_dataset(source.hub_id, source.config, split=hub_split)
            for split, hub_split in source.splits.items()
        }
    except OSError as error:
        raise FileNotFoundError(
            f"cannot load {source.hub_id} from the Hugging Face hub ({error}); give --data-dir (data_dir), a folder "
            f"with {dataset}.jsonl in it"
        ) from error
    return {
        split: [_problem(row, f"{source.hub_id}, row {number}") for number, row in enumerate(rows, start=1)]
        for split, rows in loaded.items()
    }


def read_jsonl(path: str | Path) -> list[BenchmarkProblem]:
    r"""Return the problems of a file with one JSON object per line.

    The right answer is ``answer``, or only the part after ``####`` if it has one; without ``answer`` it is the content
    of the last ``\boxed`` of ``solution``.
    """
    return _problems(_nonempty(Path(path)))


def _nonempty(path: Path) -> list[Record]:
    rows = list(read_records(path, _EXAMPLE))
    if not rows:
        raise ValueError(f"{path}: no problems; give a file with lines like {_EXAMPLE}")
    return rows


def _problems(rows: list[Record]) -> list[BenchmarkProblem]:
    return [_problem(record, location) for record, location in rows]


def _problem(record: Mapping[str, Any], location: str) -> BenchmarkProblem:
    text = record.get("question", record.get("problem"))
    if text is None:
        raise ValueError(f"{location}: no field 'question'; give a line like {_EXAMPLE}")
    if not isinstance(text, str) or not text.strip():
        raise ValueError(f"{location}: question is {short_repr(text)}; give a text like 'What is 6 · 7?'")
    return BenchmarkProblem(text.strip(), _answer(record, location))


def _answer(record: Mapping[str, Any], location: str) -> str:
    answer, solution = record.get("answer"), record.get("solution")
    if answer is None and isinstance(solution, str):
        boxed = last_boxed(solution)[0]
        if not boxed:
            raise ValueError(f"{location}: no \\boxed in solution {short_repr(solution)}; end it like \\boxed{{42}}")
        return boxed
    if answer is None:
        raise ValueError(f"{location}: no field 'answer' or 'solution'; give a line like {_EXAMPLE}")
    # bool is an int in Python, but true in a file is not a number.
    if isinstance(answer, int | float) and not isinstance(answer, bool):
        return str(answer)
    text = (last_hash(answer)[0] or answer).strip() if isinstance(answer, str) else ""
    if not text:
        raise ValueError(f"{location}: answer is {short_repr(answer)}; give a text like '42'")
    return text
