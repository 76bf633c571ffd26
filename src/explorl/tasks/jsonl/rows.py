r"""Rows of the task ``jsonl`` as problems: each checked, with its place in the error.

A row has ``prompt`` (or ``question``, or ``problem``): text, or messages. It has ``answer``: text, a number, or a list
of those that are accepted; of a text with ``####`` in it, as in GSM8K, only what follows counts, and without an answer
it is what the last ``\boxed`` of ``solution`` holds. The verifier ``choice`` takes a letter, or with a column
``choices`` one of them or its place, from 0; ``code`` takes ``test`` (HumanEval's ``check``, or a list of assertions)
and ``entry_point`` instead. ``completion``, or ``solution``, is what a model may be fine-tuned to write. Other columns
are kept in the problem's data.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping
from typing import Any

from explorl.core.plugins import unknown
from explorl.tasks.answer_span import last_boxed, last_hash
from explorl.tasks.base import Message, Problem, Prompt, completion_text
from explorl.tasks.choice.letters import LETTERS
from explorl.tasks.code.extract import defines
from explorl.tasks.json_lines import short_repr
from explorl.tasks.jsonl.numbers import is_number, parse_number
from explorl.tasks.jsonl.verifiers import VERIFIERS
from explorl.tasks.math.normalize import MAX_LENGTH

EXAMPLE = '{"prompt": "What is 6 times 7?", "answer": 42}'
_CODE = '{"prompt": "Write a function f.", "entry_point": "f", "test": ["assert f(1) == 1"]}'
_PROMPTS = ("prompt", "question", "problem")
_TESTS = ("test", "tests", "test_list")
_MESSAGES = '[{"role": "user", "content": "What is 6 times 7?"}]'


def read_row(record: Mapping[str, Any], place: str, verifier: str, *, is_example: bool = False) -> Problem:
    """A row as a problem; ``verifier``: "auto", or the one for rows that name none.

    ``is_example``: it is only there to be learnt, and needs a completion but no answer.
    """
    prompt = _prompt(record, place)
    data = {key: value for key, value in record.items() if key not in _PROMPTS and key not in ("completion", "split")}
    data["prompt"] = prompt
    if (completion := _completion(record, place)) is not None:
        data["completion"] = completion
    elif is_example:
        raise ValueError(f"{place}: no field 'completion', which the rows to fine-tune on are for; give text")
    if is_example and all(record.get(key) is None for key in ("answer", *_TESTS)):
        return Problem(_key(prompt, None), {**data, "verifier": "exact", "answer": []})
    named = _verifier(record, place, verifier)
    if named == "code":
        data |= _tests(record, place)
    elif named == "choice":
        data |= _choice(record, place)
    else:
        data["answer"] = _answers(record, place)
    if named == "auto":
        named = "number" if all(map(is_number, data["answer"])) else "exact"
    elif named in ("number", "math", "regex"):
        _check_answers(data["answer"], named, place)
    data["verifier"] = named
    return Problem(_key(prompt, data.get("choices")), data)


def differing_column(one: Problem, other: Problem) -> str | None:
    """The column in which two rows with the same prompt ask for different answers."""
    columns = ("answer", "test", "entry_point", "verifier")
    return next((column for column in columns if one.data.get(column) != other.data.get(column)), None)


def as_messages(prompt: Prompt) -> list[Message]:
    """A prompt as messages."""
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt


def _key(prompt: Prompt, choices: list[str] | None) -> str:
    """It does not depend on the place of a row in its file, on its answer, or on white space."""
    texts = [prompt] if isinstance(prompt, str) else [turn["content"] for turn in prompt]
    roles = [] if isinstance(prompt, str) else [turn["role"] for turn in prompt]
    parts = [*(roles if roles != ["user"] else ()), *(" ".join(text.split()) for text in (*texts, *(choices or ())))]
    return f"jsonl:{hashlib.sha256(chr(0).join(parts).encode()).hexdigest()[:16]}"


def _prompt(record: Mapping[str, Any], place: str) -> Prompt:
    column = next((name for name in _PROMPTS if name in record), None)
    if column is None:
        raise ValueError(f"{place}: no field 'prompt'; give a line like {EXAMPLE}")
    given = record[column]
    if isinstance(given, str) and given.strip():
        return given
    if not isinstance(given, list) or not given:
        raise ValueError(f"{place}: {column} is {short_repr(given)}; give text, or messages like {_MESSAGES}")
    turns = [_message(turn, place) for turn in given]
    if turns[-1]["role"] == "assistant":
        raise ValueError(
            f"{place}: {column} ends with a message of the assistant; put what it says into a column 'completion'"
        )
    return turns


def _message(turn: object, place: str) -> Message:
    role, content = (turn.get("role"), turn.get("content")) if isinstance(turn, dict) else (None, None)
    if isinstance(content, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in content):
        content = "".join(str(part.get("text", "")) for part in content)
    if not isinstance(role, str) or not isinstance(content, str) or not content.strip():
        raise ValueError(f"{place}: a message is {short_repr(turn)}; give messages of text, like {_MESSAGES}")
    return {"role": role, "content": content}


def _verifier(record: Mapping[str, Any], place: str, otherwise: str) -> str:
    """Which verifier a row asks for; "auto": that which fits its answer."""
    named = record.get("verifier", otherwise)
    if named in VERIFIERS:
        return str(named)
    if named != "auto":
        raise ValueError(f"{place}: {unknown('verifier', named, VERIFIERS)}")
    if any(record.get(name) is not None for name in _TESTS):
        return "code"
    if record.get("choices") is not None:
        return "choice"
    return "auto"


def _answers(record: Mapping[str, Any], place: str) -> list[str]:
    given, solution = record.get("answer"), record.get("solution")
    if "answer" not in record and isinstance(solution, str):
        given = last_boxed(solution)[0]
        if not given:
            raise ValueError(f"{place}: no answer, and no \\boxed in solution; give a line like {EXAMPLE}")
    elif "answer" not in record:
        raise ValueError(f"{place}: no field 'answer'; give a line like {EXAMPLE}")
    answers = [_text(answer) for answer in (given if isinstance(given, list) else [given])]
    if not answers or not all(answers):
        raise ValueError(f"{place}: answer is {short_repr(given)}; give text like '42', a number, or a list of them")
    return [str(answer) for answer in answers]


def _text(answer: object) -> str | None:
    """An answer as text; None for what is none."""
    if isinstance(answer, str):
        return (last_hash(answer)[0] or answer).strip()
    if isinstance(answer, bool):
        return str(answer).lower()
    if isinstance(answer, int | float) and math.isfinite(answer):
        return str(answer)
    return None


def _check_answers(answers: list[str], verifier: str, place: str) -> None:
    for answer in answers:
        if verifier == "number" and parse_number(answer) is None:
            raise ValueError(f"{place}: answer is {short_repr(answer)}, which is not one number; give one like 42")
        if verifier == "math" and len(answer) > MAX_LENGTH:
            raise ValueError(f"{place}: answer has {len(answer):,} characters; give at most {MAX_LENGTH:,}")
        if verifier == "regex":
            try:
                matches_all = re.compile(answer).search("") is not None
            except (re.error, RecursionError, OverflowError) as error:
                raise ValueError(
                    rf"{place}: answer is {short_repr(answer)}, no regular expression: {error}; give one like '\b42\b'"
                ) from None
            if matches_all:
                raise ValueError(
                    rf"{place}: the pattern {short_repr(answer)} is found in any text; give one like '\b42\b'"
                )


def _choice(record: Mapping[str, Any], place: str) -> dict[str, Any]:
    """The options, where they are given, and the place of the right one."""
    given, answer = record.get("choices"), record.get("answer")
    if given is None:
        letter = answer.strip().strip("().").upper() if isinstance(answer, str) else ""
        if len(letter) != 1 or letter not in LETTERS:
            raise ValueError(f"{place}: answer is {short_repr(answer)}; give a letter like 'C', or a list 'choices'")
        return {"answer": LETTERS.index(letter)}
    choices = [choice.strip() for choice in given if isinstance(choice, str)] if isinstance(given, list) else []
    if not isinstance(given, list) or len(choices) != len(given) or not all(choices):
        raise ValueError(f"{place}: choices is {short_repr(given)}; give a list of texts like ['iron', 'neon']")
    if not 2 <= len(choices) <= len(LETTERS) or len(set(choices)) < len(choices):
        raise ValueError(f"{place}: choices is {short_repr(given)}; give 2 to {len(LETTERS)} that differ")
    known = LETTERS[: len(choices)]
    if isinstance(answer, str) and answer.strip() in choices:
        answer = choices.index(answer.strip())
    elif isinstance(answer, str) and len(letter := answer.strip().strip("().").upper()) == 1 and letter in known:
        answer = known.index(letter)
    if not isinstance(answer, int) or isinstance(answer, bool) or not 0 <= answer < len(choices):
        raise ValueError(
            f"{place}: answer is {short_repr(answer)}; give one of the choices, its letter, or a number from 0 to "
            f"{len(choices) - 1}"
        )
    return {"choices": choices, "answer": answer}


def _tests(record: Mapping[str, Any], place: str) -> dict[str, str]:
    """What `run_tests` takes; a list of assertions becomes the body of ``check``."""
    name = record.get("entry_point")
    tests = next((record[key] for key in _TESTS if record.get(key) is not None), None)
    if not isinstance(name, str) or not name.isidentifier():
        raise ValueError(f"{place}: entry_point is {short_repr(name)}; give a line like {_CODE}")
    if isinstance(tests, str) and defines(tests, "check"):
        return {"entry_point": name, "test": tests}
    lines = tests.strip().split("\n") if isinstance(tests, str) else tests
    if not isinstance(lines, list) or not lines or not all(isinstance(line, str) and line.strip() for line in lines):
        raise ValueError(f"{place}: test is {short_repr(tests)}; give a line like {_CODE}")
    if not any(name in line for line in lines):
        raise ValueError(f"{place}: no test calls {name!r}; give a line like {_CODE}")
    body = "\n".join(f"    {line}" for part in lines for line in part.split("\n"))
    test = f"def check(candidate):\n    {name} = candidate\n{body}\n"
    try:
        compile(test, "test", "exec")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"{place}: test is no Python: {error}; give a line like {_CODE}") from None
    return {"entry_point": name, "test": test}


def _completion(record: Mapping[str, Any], place: str) -> str | None:
    """A reference completion: of a column ``completion`` or ``solution``, or an answer that shows its steps."""
    given = record.get("completion")
    if given is None:
        given = record.get("solution")
        answer = record.get("answer")
        if given is None and isinstance(answer, str) and last_hash(answer)[0]:
            given = answer
        return given.strip() or None if isinstance(given, str) else None
    if isinstance(given, list) and all(isinstance(turn, dict) for turn in given):
        given = completion_text(given)
    if not isinstance(given, str) or not given.strip():
        raise ValueError(f"{place}: completion is {short_repr(record['completion'])}; give text, or leave it out")
    return given
