"""Multiple-choice questions from JSONL and CSV files, and GPQA from the Hugging Face hub."""

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
    """A question, its options, and which of them is right."""

    text: str
    choices: tuple[str, ...]
    answer: int


def read_file(path: str | Path) -> list[Question]:
    """Questions from a file: one JSON object a line, or a CSV table if its name ends in ``.csv``.

    Its columns are ``question``, ``choices``, ``answer`` (a place in ``choices``, from 0, or the text of the right
    one), or GPQA's own: ``Question``, ``Correct Answer``, ``Incorrect Answer 1`` to 3.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"no file {path.name} in {str(path.parent)!r}; give one with lines like {_EXAMPLE}")
    rows = _table(path) if path.suffix.lower() == ".csv" else read_records(path, _EXAMPLE)
    questions = [_question(record, place) for record, place in rows]
    if not questions:
        raise ValueError(f"{path}: no questions; give a file with lines like {_EXAMPLE}")
    return questions


def read_hub() -> list[Question]:
    """The 198 questions of GPQA diamond."""
    import datasets  # here, because it takes seconds and nothing else needs it

    try:
        rows = datasets.load_dataset(HUB_ID, HUB_CONFIG, split="train")
    except OSError as error:
        raise FileNotFoundError(
            f"cannot load {HUB_ID} from the Hugging Face hub ({error}); it is gated: agree to its terms on its page "
            "and log in by `hf auth login`, or give --data-dir (data_dir), a folder with choice.jsonl in it"
        ) from error
    return [_question(row, f"{HUB_ID}, row {number}") for number, row in enumerate(rows, start=1)]


def _table(path: Path) -> Iterator[tuple[dict[str, Any], str]]:
    with path.open(encoding="utf-8-sig", newline="") as file:
        rows = csv.DictReader(file)
        try:
            for row in rows:
                yield row, f"{path}, line {rows.line_num}"
        except (csv.Error, UnicodeDecodeError) as error:
            raise ValueError(f"{path}, line {rows.line_num + 1}: not CSV in UTF-8: {error}; save it as that") from None


def _question(record: Mapping[str, Any], place: str) -> Question:
    if "Correct Answer" in record:
        text = _text(record, "Question", place)
        choices = [_text(record, column, place) for column in ("Correct Answer", *_WRONG)]
        answer: object = 0
    else:
        for field in ("question", "choices", "answer"):
            if field not in record:
                raise ValueError(f"{place}: no field {field!r}; give a line like {_EXAMPLE}")
        text = _text(record, "question", place)
        given, answer = record["choices"], record["answer"]
        choices = [choice.strip() for choice in given if isinstance(choice, str)] if isinstance(given, list) else []
        if not isinstance(given, list) or len(choices) != len(given) or not all(choices):
            raise ValueError(f"{place}: choices is {short_repr(given)}; give a list of texts like ['iron', 'neon']")
    if not 2 <= len(choices) <= len(LETTERS) or len(set(choices)) < len(choices):
        raise ValueError(f"{place}: choices is {short_repr(choices)}; give 2 to {len(LETTERS)} that differ")
    if isinstance(answer, str) and answer.strip() in choices:
        answer = choices.index(answer.strip())
    # bool is an int to Python, but true is no place to whoever wrote the file.
    if not isinstance(answer, int) or isinstance(answer, bool) or not 0 <= answer < len(choices):
        raise ValueError(
            f"{place}: answer is {short_repr(answer)}; give a number from 0 to {len(choices) - 1} or one of the choices"
        )
    return Question(text, tuple(choices), answer)


def _text(record: Mapping[str, Any], field: str, place: str) -> str:
    value = record.get(field)
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{place}: {field} is {short_repr(value)}; give a text")
    return value.strip()
