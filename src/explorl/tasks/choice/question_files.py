"""Read multiple-choice questions from JSONL and CSV files, and GPQA from the Hugging Face hub."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from explorl.tasks.choice.letters import LETTERS
from explorl.tasks.json_lines import read_records, short_repr

HUB_ID = "Idavidrein/gpqa"
HUB_CONFIG = "gpqa_diamond"

_EXAMPLE = '{"question": "Which is a metal?", "choices": ["iron", "neon"], "answer": "iron"}'
_WRONG = ("Incorrect Answer 1", "Incorrect Answer 2", "Incorrect Answer 3")


class Question(NamedTuple):
    """A question, its options, and the index of the right one."""

    text: str
    choices: tuple[str, ...]
    answer: int


def read_file(path: str | Path) -> list[Question]:
    """Return the questions of a file: one JSON object per line, or a CSV table if its name ends in ``.csv``.

    Its columns are ``question``, ``choices``, ``answer`` (an index into ``choices``, from 0, or the text of the right
    one), or those of GPQA: ``Question``, ``Correct Answer``, ``Incorrect Answer 1`` to 3.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"no file {path.name} in {str(path.parent)!r}; give one with lines like {_EXAMPLE}")
    rows = _read_csv(path) if path.suffix.lower() == ".csv" else read_records(path, _EXAMPLE)
    questions = [_to_question(record, location) for record, location in rows]
    if not questions:
        raise ValueError(f"{path}: no questions; give a file with lines like {_EXAMPLE}")
    return questions


def read_hub() -> list[Question]:
    """Return the 198 questions of GPQA diamond."""
    import datasets  # here, because the import takes seconds

    try:
        rows = datasets.load_dataset(HUB_ID, HUB_CONFIG, split="train")
    except OSError as error:
        raise FileNotFoundError(
            f"cannot load {HUB_ID} from the Hugging Face hub ({error}); it is gated: accept its terms on its page and "
            "log in with `hf auth login`, or set --data-dir (data_dir) to a folder with choice.jsonl"
        ) from error
    return [_to_question(row, f"{HUB_ID}, row {number}") for number, row in enumerate(rows, start=1)]


def _read_csv(path: Path) -> Iterator[tuple[dict[str, Any], str]]:
    with path.open(encoding="utf-8-sig", newline="") as file:
        rows = csv.DictReader(file)
        try:
            for row in rows:
                yield row, f"{path}, line {rows.line_num}"
        except (csv.Error, UnicodeDecodeError) as error:
            location = f"{path}, line {rows.line_num + 1}"
            raise ValueError(f"{location}: not CSV in UTF-8: {error}; save it in this format") from None


def _to_question(record: Mapping[str, Any], location: str) -> Question:
    if "Correct Answer" in record:
        text = _text(record, "Question", location)
        choices = [_text(record, column, location) for column in ("Correct Answer", *_WRONG)]
        answer: object = 0
    else:
        for field in ("question", "choices", "answer"):
            if field not in record:
                raise ValueError(f"{location}: no field {field!r}; give a line like {_EXAMPLE}")
        text = _text(record, "question", location)
        raw, answer = record["choices"], record["answer"]
        choices = [choice.strip() for choice in raw if isinstance(choice, str)] if isinstance(raw, list) else []
        if not isinstance(raw, list) or len(choices) != len(raw) or not all(choices):
            raise ValueError(f"{location}: choices is {short_repr(raw)}; give a list of texts like ['iron', 'neon']")
    if not 2 <= len(choices) <= len(LETTERS) or len(set(choices)) < len(choices):
        raise ValueError(f"{location}: choices is {short_repr(choices)}; give 2 to {len(LETTERS)} that differ")
    if isinstance(answer, str) and answer.strip() in choices:
        answer = choices.index(answer.strip())
    # bool is a subclass of int, but true is not an index.
    if not isinstance(answer, int) or isinstance(answer, bool) or not 0 <= answer < len(choices):
        raise ValueError(
            f"{location}: answer is {short_repr(answer)}; give a number from 0 to {len(choices) - 1} or one of the "
            "choices"
        )
    return Question(text, tuple(choices), answer)


def _text(record: Mapping[str, Any], field: str, location: str) -> str:
    value = record.get(field)
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{location}: {field} is {short_repr(value)}; give a text")
    return value.strip()
