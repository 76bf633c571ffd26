"""Problems of the mathematics benchmarks, from JSONL files and from the Hugging Face hub."""

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
    """A question and its right answer."""

    text: str
    answer: str


Splits = dict[str, list[BenchmarkProblem]]


@dataclass(frozen=True)
class Source:
    """Where the hub keeps a benchmark, and which of its splits is which of ours."""

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
    """The splits of a benchmark from a folder with ``<dataset>.jsonl``.

    What is for training lies in ``<dataset>-train.jsonl`` or, where there is a ``<dataset>-test.jsonl``, in the first;
    or a column ``split`` says it; or there are ``train.jsonl`` and ``test.jsonl`` instead. Where nothing says what is
    held out, it is all of a benchmark for evaluation, and else a tenth, drawn by seed.
    """
    trains = "train" in SOURCES[dataset].splits
    files = split_files(Path(folder), dataset, plain=trains)
    if not files:
        raise FileNotFoundError(
            f"no file {dataset}.jsonl in {str(folder)!r}; give a folder with lines like {_EXAMPLE} in it"
        )
    if list(files) == ["all"]:
        splits = {split: _questions(rows) for split, rows in group_by_split(_filled(files["all"])).items()}
    else:
        splits = {split: read_jsonl(path) for split, path in files.items()}
    if "all" in splits:
        splits["train" if trains else "holdout"] = splits.pop("all")
    if "holdout" not in splits:
        questions = shuffled(Random(seed), splits["train"])
        held_out = -(-len(questions) // 10)
        splits |= {"train": questions[held_out:], "holdout": questions[:held_out]}
    return splits


def read_hub(dataset: str) -> Splits:
    """The splits of a benchmark from the hub."""
    import datasets  # here, because it takes seconds and nothing else needs it

    source = SOURCES[dataset]
    try:
        loaded = {
            split: datasets.load_dataset(source.hub_id, source.config, split=theirs)
            for split, theirs in source.splits.items()
        }
    except OSError as error:
        raise FileNotFoundError(
            f"cannot load {source.hub_id} from the Hugging Face hub ({error}); give --data-dir (data_dir), a folder "
            f"with {dataset}.jsonl in it"
        ) from error
    return {
        split: [_question(row, f"{source.hub_id}, row {number}") for number, row in enumerate(rows, start=1)]
        for split, rows in loaded.items()
    }


def read_jsonl(path: str | Path) -> list[BenchmarkProblem]:
    r"""Questions from a file with one JSON object a line.

    The right answer is ``answer``, of which only what follows ``####`` counts if it has that, or else what the last
    ``\boxed`` of ``solution`` holds.
    """
    return _questions(_filled(Path(path)))


def _filled(path: Path) -> list[Record]:
    rows = list(read_records(path, _EXAMPLE))
    if not rows:
        raise ValueError(f"{path}: no problems; give a file with lines like {_EXAMPLE}")
    return rows


def _questions(rows: list[Record]) -> list[BenchmarkProblem]:
    return [_question(record, place) for record, place in rows]


def _question(record: Mapping[str, Any], place: str) -> BenchmarkProblem:
    text = record.get("question", record.get("problem"))
    if text is None:
        raise ValueError(f"{place}: no field 'question'; give a line like {_EXAMPLE}")
    if not isinstance(text, str) or not text.strip():
        raise ValueError(f"{place}: question is {short_repr(text)}; give a text like 'What is 6 · 7?'")
    return BenchmarkProblem(text.strip(), _answer(record, place))


def _answer(record: Mapping[str, Any], place: str) -> str:
    answer, solution = record.get("answer"), record.get("solution")
    if answer is None and isinstance(solution, str):
        boxed = last_boxed(solution)[0]
        if not boxed:
            raise ValueError(f"{place}: no \\boxed in solution {short_repr(solution)}; end it like \\boxed{{42}}")
        return boxed
    if answer is None:
        raise ValueError(f"{place}: no field 'answer' or 'solution'; give a line like {_EXAMPLE}")
    # bool is an int to Python, but true is no number to whoever wrote the file.
    if isinstance(answer, int | float) and not isinstance(answer, bool):
        return str(answer)
    text = (last_hash(answer)[0] or answer).strip() if isinstance(answer, str) else ""
    if not text:
        raise ValueError(f"{place}: answer is {short_repr(answer)}; give a text like '42'")
    return text
